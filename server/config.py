"""The server's settings, from a YAML file, the environment and flags.

Later sources win: defaults < file < environment < flags. All three use the same flat names; they are
merged once and validated once. Nothing is guessed: an unknown key is an error, and so is a setting that
the chosen speculation does not have, unless it comes from an earlier source than the choice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.config import EngineConfig
from engine.section import Section
from server.config_file import UnreadableFile, read_entries
from server.http_config import HttpConfig
from server.options import ENV_PREFIX, Option, derive_options, flag_of, variable_of

CONFIG_VARIABLE = variable_of("config")

_ALLOWED = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a text (in quotes, where YAML takes it for something else)",
}
"""What pydantic says less well, by the type of its finding."""


class ServerConfig(Section):
    """Everything `outrider serve` is told."""

    http: HttpConfig = HttpConfig()
    engine: EngineConfig = EngineConfig()


OPTIONS = derive_options(ServerConfig)


class ConfigError(Exception):
    """Settings that cannot hold; the message names the source, the value and what is expected."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it comes from: the source in words, the layer as a number (a higher one wins)."""

    value: object
    source: str
    layer: int


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The validated settings, and what the merge left out, in words for the log."""

    config: ServerConfig
    notes: tuple[str, ...] = ()


Settings = dict[str, Setting]


def load_config(
    flags: Mapping[str, object], environ: Mapping[str, str], file: str | None = None
) -> LoadedConfig:
    """Merges the three sources and validates the result.

    Args:
        flags: Flat name to value, of the flags that were given.
        environ: The environment; only OUTRIDER_ variables matter, and an empty one counts as not set.
        file: Path of the YAML file; the one OUTRIDER_CONFIG names if None.

    Raises:
        ConfigError: A source cannot be read, holds an unknown key, or the settings do not hold.
    """
    origin = CONFIG_VARIABLE if file is None else "--config"
    path = environ.get(CONFIG_VARIABLE) or None if file is None else file
    readings = (
        _Reading() if path is None else _read_file(Path(path), origin),
        _read_environment(environ),
        _read_flags(flags),
    )
    _refuse([problem for reading in readings for problem in reading.problems])
    merged: Settings = {}
    chosen: Setting | None = None
    for reading in readings:
        merged |= reading.settings
        chosen = _choice(reading.settings) or chosen
    notes = _drop_unchosen(merged, chosen)
    try:
        return LoadedConfig(ServerConfig.model_validate(_nest(merged, chosen)), notes)
    except ValidationError as error:
        lines = [_explain(details, merged) for details in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _unknown_name(kind: str, given: str, spell: Callable[[str], str]) -> str:
    """The problem of a name that no setting has, with the nearest one in the source's own spelling."""
    # A file cannot name another file; a variable can.
    nearest = OPTIONS.nearest(given.removeprefix(ENV_PREFIX), () if spell is str else ("config",))
    hint = f"did you mean {spell(nearest)}?" if nearest else "see outrider serve --help"
    return f"{kind} {given}: {hint}"


@dataclass(slots=True)
class _Reading:
    """What a source holds, and what is wrong with it."""

    settings: Settings = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def take(self, option: Option, setting: Setting) -> None:
        """Adds a setting, or why pydantic would read it differently from what was meant."""
        value, label = setting.value, f"{setting.source}: {option.name}"
        if value is None and not option.is_nullable:
            self.problems.append(f"{label} has no value: give it one or remove the line")
        elif isinstance(value, bool) and not option.is_switch:
            self.problems.append(
                f"{label} is not a switch, got {str(value).lower()} (YAML reads on, off, yes and no as that)"
            )
        elif isinstance(value, str) and not value.strip() and not option.may_be_empty:
            self.problems.append(f"{label} is empty: give it a value or leave it out")
        elif isinstance(value, str) and value.startswith("~/"):
            self.settings[option.name] = replace(setting, value=str(Path(value).expanduser()))
        elif value is not None:
            self.settings[option.name] = setting


def _read_file(path: Path, origin: str) -> _Reading:
    reading = _Reading()
    try:
        entries = read_entries(path)
    except OSError as error:
        reading.problems.append(f"{origin}: cannot read {path}: {error.strerror}")
        return reading
    except UnreadableFile as error:
        reading.problems.append(str(error))
        return reading
    for entry in entries:
        option = OPTIONS.options.get(entry.name) if isinstance(entry.name, str) else None
        if option is not None:
            reading.take(option, Setting(entry.value, entry.place, 0))
        elif isinstance(entry.value, dict) and not {*entry.value}.isdisjoint(OPTIONS.options):
            reading.problems.append(
                f"{entry.place}: unknown key {entry.name}: settings have no sections, write its lines "
                "without it"
            )
        else:
            reading.problems.append(_unknown_name(f"{entry.place}: unknown key", str(entry.name), str))
    return reading


def _read_environment(environ: Mapping[str, str]) -> _Reading:
    by_variable = {variable_of(option.name): option for option in OPTIONS.options.values()}
    reading = _Reading()
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE or not value:
            continue
        if re.match("(tcp|udp|sctp)://", value) or re.search("_SERVICE_(HOST|PORT)", variable):
            reading.problems.append(
                f"environment variable {variable} comes from Kubernetes, for a Service named outrider: "
                "rename the Service or give the pod enableServiceLinks: false"
            )
        elif variable not in by_variable:
            reading.problems.append(_unknown_name("unknown environment variable", variable, variable_of))
        else:
            reading.take(by_variable[variable], Setting(value, variable, 1))
    return reading


def _read_flags(flags: Mapping[str, object]) -> _Reading:
    reading = _Reading()
    for name, value in flags.items():
        reading.take(OPTIONS.options[name], Setting(value, flag_of(name), 2))
    return reading


def _refuse(problems: Sequence[str]) -> None:
    """One error of all problems, a line each."""
    if problems:
        raise ConfigError("\n".join(problems))


def _choice(settings: Settings) -> Setting | None:
    """Which kind of speculation a source chooses: by name, or by what only that kind needs."""
    if OPTIONS.choice.name in settings:
        return settings[OPTIONS.choice.name]
    for name, setting in settings.items():
        variant = OPTIONS.options[name].implies
        if variant is not None:
            return Setting(variant, setting.source, setting.layer)
    return None


def _drop_unchosen(merged: Settings, chosen: Setting | None) -> tuple[str, ...]:
    """Takes out of `merged` what the choice overrides, and says so; refuses what contradicts it."""
    choice = OPTIONS.choice
    setting = chosen or Setting(choice.default, "the default", -1)
    variant = setting.value
    if variant not in choice.variants:
        known = ", ".join(choice.variants)
        raise ConfigError(f"{setting.source}: {choice.name} must be one of {known}, got {variant!r}")
    fact = f"{choice.name} is {variant} ({setting.source})"
    notes, problems = [], []
    for name, other in tuple(merged.items()):
        variants = OPTIONS.options[name].variants
        if not variants or variant in variants:
            continue
        if other.layer >= setting.layer:
            problems.append(f"{other.source}: {name} is for {' or '.join(variants)}, but {fact}")
            continue
        del merged[name]
        notes.append(f"{name} from {other.source} is left out: {fact}")
    _refuse(problems)
    return tuple(notes)


def _nest(merged: Settings, chosen: Setting | None) -> dict[str, Any]:
    """Puts flat settings where their sections are."""
    choice = OPTIONS.choice
    nested: dict[str, Any] = {}
    kind = choice.default if chosen is None else chosen.value
    _section(nested, (*choice.path, choice.name))[choice.discriminator] = kind
    for name, setting in merged.items():
        if name != choice.name:
            _section(nested, OPTIONS.options[name].path)[name] = setting.value
    return nested


def _section(nested: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        nested = nested.setdefault(name, {})
    return nested


def _explain(details: ErrorDetails, merged: Settings) -> str:
    """One line of pydantic's findings: the source, the setting, what is expected and what was given."""
    option = OPTIONS.at(details["loc"])
    if option is None:
        return _explain_section(details["msg"].removeprefix("Value error, "), merged)
    if option.name not in merged:
        variant = details["loc"][len(option.path)]
        return f"{OPTIONS.choice.name} {variant} needs {option.name}: give {flag_of(option.name)}"
    message = _ALLOWED.get(details["type"]) or re.sub(
        r"^(Value error, |\w+ should )", "must ", details["msg"]
    )
    place = option.locates(details["loc"])
    value = merged[option.name].value if place == option.name else details["input"]
    return f"{merged[option.name].source}: {place} {message}, got {value!r}"


def _explain_section(message: str, merged: Settings) -> str:
    """Settings that do not go together: says where each that the message speaks of comes from."""
    spoken = [name for name in merged if re.search(rf"\b{name}\b", message)]
    origins = ", ".join(f"{name} from {merged[name].source}" for name in spoken)
    return f"{message} ({origins})"
