"""Marks in a text that comes piece by piece, such as those around thoughts and calls."""


def num_begun(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark; fewer than the whole mark."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0
