"""Keys of MindSpore Transformers' files that load but have no effect.

An **ignored** key gives a note if it differs from its default. A key that is **not yet** supported must have its
default: another value would change the results, and is an error. Both are validated, described in the JSON Schema and
suggested for misspelled keys. ``unsupported.yaml`` lists them; `Section` adds them to its classes.
"""

from ast import literal_eval
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union

import yaml
from pydantic import Field

Support: TypeAlias = Literal["supported", "ignored", "not_yet"]
_SUPPORT: dict[str, Support] = {"ignored": "ignored", "not_yet": "not_yet"}

OTHER_NAMES = {
    "router_dense_type": "moe_router_dtype", "use_random_expert": "moe_router_force_expert_balance",
    "emb_dropout_prob": "embed_dropout_prob", "checkpoint_name_or_path": "pretrained_model_name_or_path",
    "ffn_concat": "mlp_concat", "residual_dtype": "res_dtype", "torch_dtype": "dtype",
    "broadcast_data": "use_broadcast_data", "generation": "generation_config",
}  # fmt: skip
"""Keys of the table that have another name."""

_TYPES: dict[str, Any] = {
    "any": Any,
    "bool": bool,
    "float": float,
    "float>=0": Annotated[float, Field(ge=0)],
    "fraction": Annotated[float, Field(ge=0, le=1)],
    "int": int,
    "int>=-1": Annotated[int, Field(ge=-1)],
    "int>=0": Annotated[int, Field(ge=0)],
    "int>=1": Annotated[int, Field(ge=1)],
    "integers": list[int],
    "list": list[Any],
    "null": None,
    "probability": Annotated[float, Field(ge=0, lt=1)],
    "section": dict[str, Any],
    "sections": list[dict[str, Any]],
    "str": str,
    "strings": list[str],
}


def unsupported_keys(section: str) -> Iterator[tuple[str, Any, Any, Support, str]]:
    """Yields the name, annotation, default, support and reason of each key without effect of a section.

    The keys of a section that is unsupported as a whole have no reason of their own: it is "".
    """
    for kind, reasons in read_table(Path(__file__).with_suffix(".yaml")).get(section, {}).items():
        support = _SUPPORT.get(kind, "supported")
        if support == "supported":
            reasons = {"": reasons}
        for reason, keys in reasons.items():
            for name, declared in keys.items():
                annotation, default = _annotation(declared)
                yield name, annotation, default, support, reason


@cache
def read_table(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns a table of keys by their reasons, from a file of this package."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # six times as fast, where PyYAML was built with it
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, loader)


def _annotation(declared: Any) -> tuple[Any, Any]:
    """Returns the annotation and the default of ``4``, ``str``, ``int>=1 = 4`` or ``ON | OFF``."""
    if not isinstance(declared, str):
        return type(declared), declared
    types, has_default, default_text = declared.partition(" =")
    names = types.split(" | ")
    members = [_TYPES[name] for name in names if name in _TYPES]
    words = tuple(name for name in names if name not in _TYPES)
    if words:
        members.insert(0, Literal.__getitem__(words))
    default = None
    if has_default:
        default = _value(default_text.strip())
    else:
        members.append(None)
    return Union.__getitem__(tuple(members)), default


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (SyntaxError, ValueError):
        return text
