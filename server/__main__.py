"""The `outrider` command, as it is called."""

import sys


def main() -> int:
    """Runs the command line.

    Returns:
        The exit status; 130 after a Ctrl+C, also one that comes while modules are still being imported.
    """
    try:
        from server import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
