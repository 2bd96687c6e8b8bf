"""The settings of each method that is verified."""

from collections.abc import Mapping, Sequence

from engine.config import EngineConfig
from server.config import OPTIONS, ConfigError, load_config


def method_configs(
    settings: Mapping[str, object], environ: Mapping[str, str], file: str | None, methods: Sequence[str]
) -> dict[str, EngineConfig]:
    """The engine's settings by method.

    A flag that only some methods have is for these; what file and environment say of other methods is left
    out, as when a server is started with another one.

    Args:
        settings: The flags that were given, by flat name.
        environ: The environment.
        file: Path of the YAML file; None takes the one the environment names.
        methods: Names of methods; empty for the one that is set.

    Raises:
        ConfigError: The settings do not hold, or a method is none.
    """
    choice = OPTIONS.choice
    if not methods:
        config = load_config(settings, environ, file).config.engine
        _refuse_plain(config.speculation.method)
        return {config.speculation.method: _drafting(config)}
    if choice.name in settings:
        raise ConfigError(f"--methods and --{choice.name} both name the method: give one of them")
    configs = {}
    for method in methods:
        if method not in choice.variants:
            raise ConfigError(f"--methods: there is no {method!r}; there are {', '.join(choice.variants)}")
        _refuse_plain(method)
        own = {name: value for name, value in settings.items() if _is_for(name, method)}
        configs[method] = _drafting(load_config({**own, choice.name: method}, environ, file).config.engine)
    unused = [name for name in settings if not any(_is_for(name, method) for method in methods)]
    if unused:
        variants = " or ".join(OPTIONS.options[unused[0]].variants)
        raise ConfigError(f"{unused[0]} is for {variants}, which --methods does not name")
    return configs


def _drafting(config: EngineConfig) -> EngineConfig:
    """The same settings, drafting whether or not it pays, unless a planner was asked for.

    No text depends on the planner, but without drafts there would be little to verify.
    """
    speculation = config.speculation
    if "planner" in speculation.model_fields_set:
        return config
    return config.model_copy(update={"speculation": speculation.model_copy(update={"planner": "fixed"})})


def _is_for(name: str, method: str) -> bool:
    variants = OPTIONS.options[name].variants
    return not variants or method in variants


def _refuse_plain(method: str) -> None:
    if method == OPTIONS.choice.variants[0]:
        raise ConfigError("without speculation there is nothing to verify: choose a method with --methods")
