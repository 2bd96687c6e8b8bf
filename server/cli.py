"""The `outrider` command.

`--help` is generated from the settings' own descriptions and loads neither torch nor the web framework.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeAlias

from engine.catalog import CATALOG
from engine.errors import StartupError
from server import __version__
from server.bench import plan as bench_plan
from server.config import OPTIONS, ConfigError, load_config
from server.options import ENV_PREFIX, Option, flag_of
from server.training import plan as training_plan
from server.verify import plan as verify_plan
from server.verify.methods import method_configs

_VERSION = f"outrider {__version__}"

EXIT_STARTUP, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

SERVE_HELP = f"""\
Serve a model over an OpenAI-compatible API.

Every setting may come from a YAML file (key: block_size), the environment ({ENV_PREFIX}BLOCK_SIZE) or a flag
(--block-size). Flags win over the environment, the environment over the file. Relative paths start at
the working directory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit status: 0, or 1 where the server cannot start, 2 for settings that cannot hold.
    """
    args, unknown = build_parser().parse_known_args(argv)
    args.given = (sys.argv[1:] if argv is None else list(argv))[1:]
    try:
        _refuse_unknown(unknown, args)
        run: _Run = args.run
        return run(args)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except StartupError as error:
        return _fail(error, EXIT_STARTUP)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """A parser that takes flags as they are spelt, and whose errors are one line.

    The usage in front of them would push them off the screen.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"outrider: {message}; see {self.prog} --help\n")


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"
_Run = Callable[[argparse.Namespace], int]


def build_parser() -> argparse.ArgumentParser:
    """The parser: those commands that run an engine have a flag for each setting that matters to them."""
    parser = _Parser(prog="outrider", description="LLM inference server with lossless speculative decoding.")
    parser.add_argument("--version", action="version", version=_VERSION, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    options = list(OPTIONS.options.values())
    of_engine = [option for option in options if option.path[0] == "engine"]
    serve = _add_engine_command(
        commands,
        _serve,
        "serve a model over an OpenAI-compatible API",
        SERVE_HELP,
        "serve [--config FILE] [--model MODEL] [--SETTING VALUE ...]",
    )
    _add_settings(serve, options)
    bench = _add_engine_command(
        commands,
        _bench,
        "measure a server: latencies, throughput, what speculation gains",
        bench_plan.HELP,
        "bench [--url URL | --model MODEL --SETTING VALUE ...] [--paired | --against URL] ...",
    )
    bench_plan.add_flags(bench)
    _add_settings(bench, of_engine)
    verify = _add_engine_command(
        commands,
        _verify,
        "prove that speculation changes nothing: texts, logprobs, distributions",
        verify_plan.HELP,
        "verify [--url URL | --model MODEL --SETTING VALUE ...] [--methods M,M] [--quick] ...",
    )
    verify_plan.add_flags(verify)
    _add_settings(verify, of_engine)
    train = _add_engine_command(
        commands,
        _train_head,
        "train a draft head for a model",
        training_plan.HELP,
        "train-head --method eagle3|eagle|medusa --model MODEL --prompts FILE --out DIR ...",
    )
    training_plan.add_flags(train)
    _add_settings(train, [option for option in options if option.path == ("engine", "model")])
    models = commands.add_parser("models", help="list the models known by a short name")
    models.set_defaults(run=_models, flags=[])
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version, flags=[])
    return parser


def _add_engine_command(
    commands: _Commands, run: _Run, text: str, description: str, usage: str
) -> argparse.ArgumentParser:
    """Adds a command that needs an engine; the usage begins with its name."""
    parser = commands.add_parser(
        usage.partition(" ")[0],
        help=text,
        description=description,
        usage=f"outrider {usage}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_settings(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Adds a flag for each setting, and notes all flags that the command has by then."""
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with settings; also {ENV_PREFIX}CONFIG.")
    own = [flag_of(name) for name in vars(parser.parse_args([]))]
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_flag(groups[option.group], option)
    names = [option.name for option in options]
    parser.set_defaults(flags=[*own, *map(flag_of, names)], settings=frozenset(names))


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    default = f" (default: {option.default})" if option.default else ""
    text = (option.description + default).replace("%", "%%")
    if option.is_switch:
        group.add_argument(
            flag_of(option.name),
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        metavar = "|".join(option.values) or option.name.rpartition("_")[2].upper()
        group.add_argument(flag_of(option.name), metavar=metavar, default=argparse.SUPPRESS, help=text)


def _refuse_unknown(unknown: Sequence[str], args: argparse.Namespace) -> None:
    """One error for what argparse could not place; a flag gets the nearest that the command has."""
    for argument in unknown:
        if not argument.startswith("-"):
            raise ConfigError(
                f"unexpected argument {argument}: settings are flags, such as --model {argument}"
            )
        flag = argument.partition("=")[0]
        # Without the dashes, which all flags have in common.
        known = [name.lstrip("-") for name in args.flags]
        close = get_close_matches(flag.lower().strip("-").replace("_", "-"), known, n=1)
        hint = f"did you mean --{close[0]}?" if close else f"see outrider {args.command} --help"
        raise ConfigError(f"unknown flag {flag}: {hint}")


def _serve(args: argparse.Namespace) -> int:
    loaded = load_config(_settings(args), os.environ, args.config)
    from server.serve import serve  # it loads torch, which nothing above needs

    serve(loaded)
    return 0


def _bench(args: argparse.Namespace) -> int:
    settings = _settings(args)
    plan = bench_plan.read_plan(args)
    if plan.url is None:
        loaded = load_config(settings, os.environ, args.config)
        bench_plan.check_speculates(plan, loaded.config.engine.speculation.num_draft_tokens)
    elif settings or args.config:
        raise ConfigError(f"{flag_of(next(iter(settings), 'config'))} {bench_plan.LOCAL_ONLY}")
    from server.bench.command import bench  # it loads an HTTP client, which nothing above needs

    return bench(plan, settings, args.config)


def _verify(args: argparse.Namespace) -> int:
    settings = _settings(args)
    plan = verify_plan.read_plan(args)
    if plan.url is not None and (settings or args.config):
        raise ConfigError(f"{flag_of(next(iter(settings), 'config'))} {verify_plan.LOCAL_ONLY}")
    configs = {} if plan.url else method_configs(settings, os.environ, args.config, plan.methods)
    from server.verify.command import verify  # it loads an HTTP client, which nothing above needs

    return verify(plan, configs)


def _train_head(args: argparse.Namespace) -> int:
    plan = training_plan.read_plan(args)
    model = load_config(_settings(args), os.environ, args.config).config.engine.model
    from server.training.command import train  # it loads torch, which nothing above needs

    return train(plan, model, shlex.join(["outrider", "train-head", *args.given]))


def _settings(args: argparse.Namespace) -> dict[str, object]:
    """The settings that were given. A command may call a flag of its own like a setting that it lacks."""
    return {name: value for name, value in vars(args).items() if name in args.settings}


def _models(_: argparse.Namespace) -> int:
    for model in CATALOG.values():
        sys.stdout.write(f"{model.name:<24} {model.hub_id}\n{'':<24} {model.description}\n")
    return 0


def _version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"{_VERSION}\n")
    return 0


def _fail(error: Exception, status: int) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"outrider: {line}\n")
    return status
