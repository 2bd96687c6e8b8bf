"""Flat names for nested settings: the one list behind YAML keys, environment variables and flags.

It is read off the pydantic sections, so a setting is declared once, where it is used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import NoneType
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.section import IMPLIES_METHOD

ENV_PREFIX = "OUTRIDER_"


def flag_of(name: str) -> str:
    """The command line flag of a flat name."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a flat name."""
    return ENV_PREFIX + name.upper()


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    Attributes:
        name: Its flat name, the key in a YAML file.
        path: The sections it lies in, outermost first.
        group: What its section is about.
        description: What it does.
        default: Its default as a person reads it; empty where the description says it.
        values: All the values it may have, if they can be listed.
        is_switch: It is true or false.
        is_nullable: It may be left open, and is by default.
        may_be_empty: The empty text is a value.
        variants: Values of the enclosing choice that have this setting; empty for one that is always there.
        implies: The variant that is meant where this is given and none is named.
        defaults: By variant, where several have this setting.
    """

    name: str
    path: tuple[str, ...]
    group: str
    description: str
    default: str = ""
    values: tuple[str, ...] = ()
    is_switch: bool = False
    is_nullable: bool = False
    may_be_empty: bool = False
    variants: tuple[str, ...] = ()
    implies: str | None = None
    defaults: tuple[tuple[str, str], ...] = ()

    def locates(self, location: tuple[int | str, ...]) -> str | None:
        """The place in the setting that a pydantic error is about, such as extra_draft_models[0], or None.

        A setting whose values can be listed has no inside, and the kind that a union took it for is no place.
        """
        for variant in self.variants or (None,):
            own = (*self.path, *(() if variant is None else (variant,)), self.name)
            inner = location[len(own) :]
            if location[: len(own)] == own and not (inner and self.values):
                return self.name + "".join(f"[{place}]" for place in inner if isinstance(place, int))
        return None


@dataclass(frozen=True, slots=True)
class Choice:
    """A section of which there are several kinds, told apart by one field.

    Attributes:
        name: Flat name of the choice; also the section's field.
        path: The sections it lies in.
        discriminator: The field that tells the kinds apart.
        variants: The kinds.
        default: The kind taken when nothing is said.
    """

    name: str
    path: tuple[str, ...]
    discriminator: str
    variants: tuple[str, ...]
    default: str


@dataclass(frozen=True, slots=True)
class OptionSet:
    """All settings of a tree of sections by flat name, and the choice among them."""

    options: dict[str, Option]
    choice: Choice

    def nearest(self, name: str, also: Sequence[str] = ()) -> str | None:
        """The known flat name, or one of `also`, that looks most like `name`."""
        known = [*self.options, *also]
        close = get_close_matches(name.lower().strip("-").replace("-", "_"), known, n=1)
        return close[0] if close else None

    def at(self, location: tuple[int | str, ...]) -> Option | None:
        """The option at a location of a pydantic error, or inside of it; None if a whole section is meant."""
        return next(
            (option for option in self.options.values() if option.locates(location) is not None), None
        )


def derive_options(model: type[BaseModel]) -> OptionSet:
    """Reads the settings off a tree of sections with exactly one discriminated union in it."""
    choices: list[Choice] = []
    options: dict[str, Option] = {}
    for option in _walk(model, (), choices):
        known = options.get(option.name)
        if known is not None and not (known.variants and option.variants and known.path == option.path):
            raise TypeError(f"two sections have a setting {option.name}: flat names must be unique")
        options[option.name] = option if known is None else _join(known, option)
    (choice,) = choices
    return OptionSet(options, choice)


def _walk(model: type[BaseModel], path: tuple[str, ...], choices: list[Choice]) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(field.discriminator, str):
            yield from _walk_choice(name, field, path, choices)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _walk(annotation, (*path, name), choices)
        else:
            yield _option(name, field, path, _title(model))


def _walk_choice(
    name: str, field: FieldInfo, path: tuple[str, ...], choices: list[Choice]
) -> Iterator[Option]:
    key = str(field.discriminator)
    kinds: tuple[type[BaseModel], ...] = get_args(field.annotation)
    variants = {str(kind.model_fields[key].default): kind for kind in kinds}
    default = str(getattr(field.get_default(call_default_factory=True), key))
    choices.append(Choice(name, path, key, tuple(variants), default))
    text = "; ".join(f"{variant}: {_title(kind)}" for variant, kind in variants.items())
    yield Option(name, path, name.capitalize(), text, default, tuple(variants))
    for variant, kind in variants.items():
        for own, own_field in kind.model_fields.items():
            if own != key:
                option = _option(own, own_field, (*path, name), name.capitalize())
                extra = own_field.json_schema_extra
                implies = own_field.is_required() or (isinstance(extra, dict) and IMPLIES_METHOD in extra)
                yield replace(
                    option,
                    variants=(variant,),
                    implies=variant if implies else None,
                    defaults=((variant, option.default),),
                )


def _option(name: str, field: FieldInfo, path: tuple[str, ...], group: str) -> Option:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Option(
        name,
        path,
        group,
        field.description or "",
        default=_readable(default),
        values=get_args(field.annotation) if get_origin(field.annotation) is Literal else (),
        is_switch=field.annotation is bool,
        is_nullable=NoneType in get_args(field.annotation),
        may_be_empty=default == "",
    )


def _readable(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, ()) else str(default)


def _join(first: Option, second: Option) -> Option:
    """One option for a setting that several variants have, each with its own default."""
    defaults = first.defaults + second.defaults
    variants: dict[str, list[str]] = {}
    for variant, default in defaults:
        variants.setdefault(default, []).append(variant)
    text = ", ".join(f"{default} with {' and '.join(names)}" for default, names in variants.items())
    return replace(
        first,
        default=first.default if len(variants) == 1 else text,
        variants=first.variants + second.variants,
        defaults=defaults,
    )


def _title(model: type[BaseModel]) -> str:
    return (model.__doc__ or model.__name__).splitlines()[0].rstrip(".")
