"""Declares keys of the YAML file: default, documentation, other names and support.

Every section is a frozen pydantic model derived from :class:`Section`. Every key that acts is declared by

* :func:`setting`: a value, a list or a union of sections;
* :func:`section`: a nested section that may be left out.

Keys without effect are declared in ``unsupported.yaml``.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from trainer.config.schema.unsupported import OTHER_NAMES, Support, unsupported_keys
from trainer.errors import shorten_repr
from trainer.input_files import path_error

REQUIRED: Any = ...

# Upper bounds of counts, far beyond any training: a larger value is a slip, refused before it costs memory.
LAYERS = 10_000
RANKS = 1 << 20  # also heads and experts
WIDTH = VOCABULARY = 1 << 24
LENGTH = 1 << 28  # tokens
BATCH = 1 << 20
COUNT = 10**12  # steps, samples
TOKEN_ID = (1 << 31) - 1
TokenId: TypeAlias = Annotated[int, Field(ge=-TOKEN_ID, le=TOKEN_ID)]
Layer: TypeAlias = Annotated[int, Field(ge=-LAYERS, le=LAYERS)]
"""A layer, or the additional layers of a pipeline stage."""


def refuse_value(rule: str) -> NoReturn:
    """Raises the error of a validator, whose message is the rule."""
    raise PydanticCustomError("value_rule", "{rule}", {"rule": rule})


def one_number_of(*choices: int) -> BeforeValidator:
    """Returns the annotation of a `Literal` of these numbers: pydantic takes true for 1 and false for 0."""

    def refuse_truth(value: Any) -> Any:
        """Returns the value if it is neither true nor false."""
        if isinstance(value, bool):
            expected = ", ".join(map(str, choices))
            raise PydanticCustomError("literal_error", "must be one of {expected}", {"expected": expected})
        return value

    return BeforeValidator(refuse_truth)


def _validate_path(path: str) -> str:
    if rule := path_error(path):
        refuse_value(rule)
    return path


FilePath: TypeAlias = Annotated[str, AfterValidator(_validate_path)]
"""A file or a folder that need not exist; keys may allow the empty string."""

_WORDS = {"ignored": "Ignored", "not_yet": "Not yet"}

_ALIASES = "x-aliases"
_SUPPORT = "x-support"
_REASON = "x-reason"
_FIX = "x-fix"
_BESIDE = "x-beside"
_EXPLICIT = "x-explicit"


class Beside(NamedTuple):
    """The only value that a key may have while another key of its section is set."""

    other: str
    """The other attribute of the section: the rule applies if it is true, or a section."""
    value: Any
    rule: str
    """The reason, as a sentence without its full stop."""
    fix: str = "leave it out"


class Section(BaseModel):
    """Base of all sections: frozen; unknown keys and coercions are errors, except an integer for a float."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
        defer_build=True,  # one validator for the root, at first use, instead of one for each class at import
    )

    support: ClassVar[Support] = "supported"
    """Whether the section acts, is ignored with a note, or is a "not yet supported" error."""
    support_reason: ClassVar[str] = ""
    default_type: ClassVar[str] = ""
    """In a union discriminated by ``type``: the default type."""
    type_aliases: ClassVar[dict[str, str]] = {}
    """Other values of ``type`` -> the value with the same meaning, for example for a misspelling."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Adds the keys without effect to the class. No validator is built yet, see `defer_build`."""
        for name, annotation, default, support, reason in unsupported_keys(cls.__name__):
            extra: dict[str, Any] = {}
            if name in OTHER_NAMES:
                extra[_ALIASES] = [OTHER_NAMES[name]]
            if reason:
                extra |= {_SUPPORT: support, _REASON: reason}
                description = f"{_WORDS[support]}: {reason}"
            else:
                description = f"{_WORDS[cls.support]}: {cls.support_reason}"
            declared = _declare(default, f"{description}. Default {shorten_repr(default)}.", extra, {})
            cls.model_fields[name] = FieldInfo.from_annotated_attribute(annotation, declared)

    @classmethod
    def attribute(cls, key: str) -> str:
        """Returns the attribute that has a key of the file."""
        return next((name for name, field in cls.model_fields.items() if field.alias == key), key)


def _declare(default: Any, description: str, extra: dict[str, Any], constraints: dict[str, Any]) -> Any:
    extra = {key: value for key, value in extra.items() if value}
    if isinstance(default, (list, dict)):
        constraints["default_factory"] = default.copy
    else:
        constraints["default"] = default
    return Field(description=description, json_schema_extra=extra or None, **constraints)


def default_text(default: Any) -> str:
    """Returns a default as descriptions write it: ``null``, ``true``, ``1e-5``, ``level1``, ``['*.txt']``."""
    if isinstance(default, str):
        return default
    if isinstance(default, float):
        return f"{default:g}".replace("e-0", "e-")
    return shorten_repr(default)


def setting(
    default: Any,
    description: str,
    *,
    aliases: str = "",
    fix: str = "",
    beside: Beside | tuple[Beside, ...] = (),
    explicit_only: tuple[Any, ...] = (),
    **constraints: Any,
) -> Any:
    """Declares a key that acts.

    Args:
        default: Value if the file leaves the key out; ``REQUIRED`` if it must not.
        description: What the key does, with its unit. The default is added unless the description has it.
        aliases: Other names of the key, separated by spaces; different values under two names are an error.
        fix: What to do about a value that is not allowed, if the description is no help.
        beside: Other keys that allow only one value of this one; this value is then the default.
        explicit_only: Values that semi-automatic mode does not support yet.
        **constraints: Bounds for pydantic's ``Field``, such as ``ge=1``.
    """
    if default is not REQUIRED and "Default" not in description:
        description += f" Default {default_text(default)}."
    if isinstance(beside, Beside):
        beside = (beside,)
    extra = {_ALIASES: aliases.split(), _FIX: fix, _BESIDE: beside, _EXPLICIT: explicit_only}
    return _declare(default, description, extra, constraints)


def section(kind: type[Section], description: str, **constraints: Any) -> Any:
    """Declares a nested section whose keys all have defaults. They are not validated: that would build a validator."""
    return Field(default_factory=kind.model_construct, description=description, **constraints)


def _extra(field: FieldInfo, key: str, default: Any) -> Any:
    if isinstance(field.json_schema_extra, dict):
        return field.json_schema_extra.get(key, default)
    return default


def aliases_of(field: FieldInfo) -> list[str]:
    """Returns the other names of a key."""
    return _extra(field, _ALIASES, [])


def fix_of(field: FieldInfo) -> str:
    """Returns what to do about a value out of bounds; empty if the description says it."""
    return _extra(field, _FIX, "")


def beside_of(field: FieldInfo) -> tuple[Beside, ...]:
    """Returns the rules about other keys that allow only one value of this one."""
    return _extra(field, _BESIDE, ())


def explicit_only(field: FieldInfo) -> tuple[Any, ...]:
    """Returns the values of a key that semi-automatic mode does not support."""
    return _extra(field, _EXPLICIT, ())


def support_of(field: FieldInfo) -> tuple[Support, str]:
    """Returns whether a key acts, and the reason if it does not."""
    return _extra(field, _SUPPORT, "supported"), _extra(field, _REASON, "")


class Shape(NamedTuple):
    """The sections that a key may have as its value."""

    kinds: tuple[type[Section], ...]
    """The classes of the section; ``type`` selects one of several."""
    is_list: bool
    """Whether the value is a list of sections."""
    nullable: bool
    """Whether ``null`` is a value and not an empty section."""


def _flatten(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _flatten(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [part for option in get_args(annotation) for part in _flatten(option)]
    return [annotation]


def shape_of(field: FieldInfo) -> Shape:
    """Returns the sections in a field's annotation."""
    parts = _flatten(field.annotation)
    items = [item for part in parts if get_origin(part) is list for item in _flatten(get_args(part)[0])]
    return Shape(_sections(items) or _sections(parts), bool(_sections(items)), type(None) in parts)


def scalar_kinds(field: FieldInfo, *, listed: bool = True) -> set[type]:
    """Returns the types of a field's values without ``None``; `listed` includes those of the members of a ``Literal``.
    """
    parts = _flatten(field.annotation)
    kinds = {get_origin(part) or part for part in parts if get_origin(part) is not Literal}
    members = {type(value) for part in parts if get_origin(part) is Literal for value in get_args(part) if listed}
    return {kind for kind in kinds | members if isinstance(kind, type) and kind is not type(None)}


def _sections(parts: list[Any]) -> tuple[type[Section], ...]:
    kinds = (part for part in parts if isinstance(part, type) and not get_origin(part))  # list[...] is a type in 3.10
    return tuple(kind for kind in kinds if issubclass(kind, Section))


@cache
def fields_by_yaml_name(kind: type[Section]) -> dict[str, FieldInfo]:
    """Returns the fields of a section by their main names in the file: pydantic's alias, or the attribute's name."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


@cache
def yaml_names(kind: type[Section]) -> dict[str, str]:
    """Returns, for every name that a file may use in a section, the main name."""
    fields = fields_by_yaml_name(kind).items()
    return {name: main for main, field in fields for name in (main, *aliases_of(field))}


def types_of(kind: type[Section]) -> tuple[str, ...]:
    """Returns the values of ``type`` that select this class of section."""
    return get_args(kind.model_fields["type"].annotation)
