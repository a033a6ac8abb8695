"""How a key of the YAML file is declared: its default, its documentation, its other names and whether we can honour it.

Every section is a frozen pydantic model derived from :class:`Section`; every key that acts is declared by one of

* :func:`setting`: acts as documented;
* :func:`section`: a nested section that may be left out;

or, where it changes nothing, in ``unsupported.yaml``.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from trainer.config.schema.unsupported import OTHER_NAMES, Support, unsupported_keys
from trainer.input_files import path_error

REQUIRED: Any = ...

# Upper bounds of counts, far beyond what anybody trains: what is larger is a slip, refused before it costs memory.
LAYERS = 10_000
RANKS = 1 << 20  # of heads and experts too
WIDTH = VOCABULARY = 1 << 24
LENGTH = 1 << 28  # tokens
BATCH = 1 << 20
COUNT = 10**12  # steps, samples
TOKEN_ID = (1 << 31) - 1
TokenId: TypeAlias = Annotated[int, Field(ge=-TOKEN_ID, le=TOKEN_ID)]
Layer: TypeAlias = Annotated[int, Field(ge=-LAYERS, le=LAYERS)]
"""A layer, or how many more a stage has."""


def _is_path(path: str) -> str:
    if mistake := path_error(path):
        raise PydanticCustomError("path", mistake)  # type: ignore[arg-type]
    return path


FilePath: TypeAlias = Annotated[str, AfterValidator(_is_path)]
"""A file or a folder, which need not be there; the empty string where a key says so."""

_WORDS = {"ignored": "Ignored", "not_yet": "Not yet"}

_ALIASES = "x-aliases"
_SUPPORT = "x-support"
_REASON = "x-reason"
_FIX = "x-fix"
_BESIDE = "x-beside"


class Beside(NamedTuple):
    """The only value that a key may have beside another one of its section."""

    other: str
    """The other attribute of the section: it counts where it is true, or a section."""
    value: Any
    rule: str
    """Why, as a sentence without its full stop."""
    fix: str = "leave it out"


class Section(BaseModel):
    """Base of all sections: frozen; unknown keys and coercions are errors (but an integer for a float is fine)."""

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
    """Whether a section as a whole acts, is ignored with a note or ends in a "not yet" error."""
    support_reason: ClassVar[str] = ""
    default_type: ClassVar[str] = ""
    """In a union discriminated by ``type``: the type if the file names none."""
    type_aliases: ClassVar[dict[str, str]] = {}
    """Other spellings of ``type`` which mean the same, for example a misspelling once shipped."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Adds the keys that change nothing. No validator is built yet, see `defer_build`."""
        for name, annotation, default, support, reason in unsupported_keys(cls.__name__):
            if reason:
                told = f"{_WORDS[support]}: {reason}"
            else:
                told = f"{_WORDS[cls.support]}: {cls.support_reason}"
            if name in OTHER_NAMES:
                aliases = [OTHER_NAMES[name]]
            else:
                aliases = []
            extra = {_ALIASES: aliases, _SUPPORT: support if reason else "", _REASON: reason}
            if default is None:
                shown = "null"
            else:
                shown = repr(default)
            declared = _declare(default, f"{told}. Default {shown}.", extra, {})
            cls.model_fields[name] = FieldInfo.from_annotated_attribute(annotation, declared)

    @classmethod
    def attribute(cls, key: str) -> str:
        """The attribute of a key of the file."""
        return next((name for name, field in cls.model_fields.items() if field.alias == key), key)


def _declare(default: Any, description: str, extra: dict[str, Any], constraints: dict[str, Any]) -> Any:
    extra = {key: value for key, value in extra.items() if value}
    if isinstance(default, (list, dict)):
        constraints["default_factory"] = default.copy
    else:
        constraints["default"] = default
    return Field(description=description, json_schema_extra=extra or None, **constraints)


def setting(
    default: Any,
    description: str,
    *,
    aliases: str = "",
    fix: str = "",
    beside: Beside | None = None,
    **constraints: Any,
) -> Any:
    """Declares a key that acts.

    Args:
        default: Value when the file leaves the key out; ``REQUIRED`` when it may not.
        description: What it does, with its unit. The default is added, where the description does not explain it.
        aliases: Other names of the same key, with spaces between; two that disagree are an error.
        fix: What to do about a value out of bounds, where the description does not say it.
        beside: Another key that leaves it one value, which is its value then where the file leaves it out.
        **constraints: Bounds for pydantic's ``Field``, such as ``ge=1``.
    """
    if default is not REQUIRED and "Default" not in description:
        shown = default
        if isinstance(default, float):
            shown = f"{default:g}".replace("e-0", "e-")
        description += f" Default {'null' if default is None else shown}."
    extra = {_ALIASES: aliases.split(), _FIX: fix, _BESIDE: beside}
    return _declare(default, description, extra, constraints)


def section(kind: type[Section], description: str, **constraints: Any) -> Any:
    """Declares a nested section whose keys all have defaults; they are not validated, which would build a validator."""
    return Field(default_factory=kind.model_construct, description=description, **constraints)


def _extra(field: FieldInfo, key: str, default: Any) -> Any:
    return (field.json_schema_extra or {}).get(key, default)


def aliases_of(field: FieldInfo) -> list[str]:
    """Other names under which a file may write this field."""
    return _extra(field, _ALIASES, [])


def fix_of(field: FieldInfo) -> str:
    """What to do about a value out of bounds; empty where the description says it."""
    return _extra(field, _FIX, "")


def beside_of(field: FieldInfo) -> Beside | None:
    """Returns which other key leaves it one value."""
    return _extra(field, _BESIDE, None)


def support_of(field: FieldInfo) -> tuple[Support, str]:
    """Whether this field acts, and the reason when it does not."""
    return _extra(field, _SUPPORT, "supported"), _extra(field, _REASON, "")


class Shape(NamedTuple):
    """What a field may hold, as far as walking a file needs to know it."""

    kinds: tuple[type[Section], ...]
    """Sections it may be; several are told apart by their ``type``."""
    is_list: bool
    """True when it holds a list of them."""
    nullable: bool
    """True when ``null`` is a value of its own rather than an empty section."""


def _flatten(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _flatten(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [part for option in get_args(annotation) for part in _flatten(option)]
    return [annotation]


def shape_of(field: FieldInfo) -> Shape:
    """Finds the sections in a field's annotation."""
    parts = _flatten(field.annotation)
    items = [item for part in parts if get_origin(part) is list for item in _flatten(get_args(part)[0])]
    return Shape(_sections(items) or _sections(parts), bool(_sections(items)), type(None) in parts)


def scalar_kinds(field: FieldInfo, *, listed: bool = True) -> set[type]:
    """The types of value a field may hold, leaving out ``None``; of ``Literal`` the types of its members, if `listed`.
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
    """The fields of a section by the name that counts in the file: pydantic's alias, else the field's own name."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


@cache
def yaml_names(kind: type[Section]) -> dict[str, str]:
    """Every name a file may use in a section -> the name that counts."""
    fields = fields_by_yaml_name(kind).items()
    return {name: main for main, field in fields for name in (main, *aliases_of(field))}


def types_of(kind: type[Section]) -> tuple[str, ...]:
    """The values of ``type`` that select this section in its family."""
    return get_args(kind.model_fields["type"].annotation)
