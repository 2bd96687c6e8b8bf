"""The server's settings, from a YAML file, the environment and flags.

Later sources win: defaults < file < environment < flags. All three use the same flat names; they are
merged once and validated once. Nothing is guessed: an unknown key is an error, and so is a setting that
the chosen speculation does not have, unless it comes from an earlier source than the choice.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from engine.config import EngineConfig
from engine.sampling_params import MAX_LOGPROBS
from engine.section import Section
from server.options import ENV_PREFIX, Option, derive_options, flag_of, variable_of
from server.tools.formats import ToolParserName

CONFIG_VARIABLE = variable_of("config")

LogLevel = Literal["debug", "info", "warning", "error"]


class HttpConfig(Section):
    """How the server is reached."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    served_model_name: str | None = Field(
        None, description="Name of the model in the API; default: the one it is loaded by."
    )
    root_path: str = Field("", description="Path prefix that a proxy strips, such as /llm.")
    max_body_mb: float = Field(8.0, gt=0, description="Largest request body accepted, in MiB.")
    max_choices: int = Field(1024, ge=1, description="Answers that one request may ask for: prompts times n.")
    max_logprobs: int = Field(
        MAX_LOGPROBS, ge=0, le=MAX_LOGPROBS, description="Alternatives per token that a request may ask for."
    )
    max_stored_responses: int = Field(
        1000,
        ge=0,
        description="Responses of /v1/responses that are kept in memory, those used last; 0 keeps none.",
    )
    max_stored_mb: float = Field(
        64.0, gt=0, description="Memory that they may take together, conversations included, in MiB."
    )
    shutdown_grace_seconds: int = Field(
        30,
        ge=0,
        description="Time that running answers get to finish after SIGTERM or Ctrl+C; a second signal ends "
        "them at once.",
    )
    tool_parser: ToolParserName | None = Field(
        None, description="How the model writes calls of functions; default: as its chat template does."
    )
    profiling: bool = Field(
        False,
        description="Let clients ask for traces of the engine's steps at /profile, which slow it down, and "
        "for the planner's figures at /debug/planner.",
    )
    log_level: LogLevel = Field("info", description="Least severe messages that are logged.")

    @field_validator("root_path")
    @classmethod
    def _a_prefix(cls, path: str) -> str:
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ValueError("start with a slash and not end with one")
        return path


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
    merged: Settings = {}
    chosen: Setting | None = None
    for settings in (
        {} if path is None else _file_settings(Path(path), origin),
        _environment_settings(environ),
        _flag_settings(flags),
    ):
        merged |= settings
        chosen = _choice(settings) or chosen
    notes = _drop_unchosen(merged, chosen)
    try:
        return LoadedConfig(ServerConfig.model_validate(_nest(merged, chosen)), notes)
    except ValidationError as error:
        lines = [_explain(details, merged) for details in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def unknown_name(kind: str, given: str, spell: Callable[[str], str]) -> ConfigError:
    """The error for a name that no setting has, with the nearest one in the source's own spelling."""
    # A file cannot name another file; a variable can.
    nearest = OPTIONS.nearest(given.removeprefix(ENV_PREFIX), () if spell is str else ("config",))
    hint = f"did you mean {spell(nearest)}?" if nearest else "see outrider serve --help"
    return ConfigError(f"{kind} {given}: {hint}")


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error and not a silent override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is given more than once", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


def _file_settings(path: Path, origin: str) -> Settings:
    try:
        content = yaml.load(path.read_text("utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"{origin}: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold lines of `name: value`, got {content!r:.60}")
    settings = {}
    for key, value in content.items():
        option = OPTIONS.options.get(key) if isinstance(key, str) else None
        if option is None:
            raise unknown_name(f"{path}: unknown key", str(key), str)
        if value is not None:
            settings[option.name] = _checked(option, Setting(value, str(path), 0))
        elif not option.is_nullable:
            raise ConfigError(f"{path}: {key} has no value: give it one or remove the line")
    return settings


def _environment_settings(environ: Mapping[str, str]) -> Settings:
    by_variable = {variable_of(option.name): option for option in OPTIONS.options.values()}
    settings = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE or not value:
            continue
        if re.match("(tcp|udp|sctp)://", value) or re.search("_SERVICE_(HOST|PORT)", variable):
            raise ConfigError(
                f"environment variable {variable} comes from Kubernetes, for a Service named outrider: "
                "rename the Service or give the pod enableServiceLinks: false"
            )
        if variable not in by_variable:
            raise unknown_name("unknown environment variable", variable, variable_of)
        option = by_variable[variable]
        settings[option.name] = _checked(option, Setting(value, variable, 1))
    return settings


def _flag_settings(flags: Mapping[str, object]) -> Settings:
    return {
        name: _checked(OPTIONS.options[name], Setting(value, flag_of(name), 2))
        for name, value in flags.items()
    }


def _checked(option: Option, setting: Setting) -> Setting:
    """Refuses what pydantic would read differently from what was meant."""
    value, label = setting.value, f"{setting.source}: {option.name}"
    if isinstance(value, bool) and not option.is_switch:
        raise ConfigError(
            f"{label} is not a switch, got {str(value).lower()} (YAML reads on, off, yes and no as that)"
        )
    if isinstance(value, str) and not value.strip() and not option.may_be_empty:
        raise ConfigError(f"{label} is empty: give it a value or leave it out")
    if isinstance(value, str) and value.startswith("~/"):
        return Setting(str(Path(value).expanduser()), setting.source, setting.layer)
    return setting


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
    notes = []
    for name, other in tuple(merged.items()):
        variants = OPTIONS.options[name].variants
        if not variants or variant in variants:
            continue
        if other.layer >= setting.layer:
            raise ConfigError(f"{other.source}: {name} is for {' or '.join(variants)}, but {fact}")
        del merged[name]
        notes.append(f"{name} from {other.source} is left out: {fact}")
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
    message = re.sub(r"^(Value error, |\w+ should )", "must ", details["msg"])
    place = option.locates(details["loc"])
    value = merged[option.name].value if place == option.name else details["input"]
    return f"{merged[option.name].source}: {place} {message}, got {value!r}"


def _explain_section(message: str, merged: Settings) -> str:
    """Settings that do not go together: says where each that the message speaks of comes from."""
    spoken = [name for name in merged if re.search(rf"\b{name}\b", message)]
    origins = ", ".join(f"{name} from {merged[name].source}" for name in spoken)
    return f"{message} ({origins})"
