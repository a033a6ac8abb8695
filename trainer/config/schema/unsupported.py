"""The keys that change nothing: MindSpore Transformers' files have them, and they load.

An **ignored** key gives a note where it differs from its default. One that is **not yet** supported must have its
default: another value would change the results, and is an error. Both are checked, described in the JSON Schema and
known to the suggestions for misspelled keys. ``unsupported.yaml`` lists them; `Section` adds them to its classes.
"""

from ast import literal_eval
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union

import yaml
from pydantic import Field

Support: TypeAlias = Literal["supported", "ignored", "not_yet"]

OTHER_NAMES = {
    "router_dense_type": "moe_router_dtype",
    "use_random_expert": "moe_router_force_expert_balance",
    "emb_dropout_prob": "embed_dropout_prob",
    "checkpoint_name_or_path": "pretrained_model_name_or_path",
    "ffn_concat": "mlp_concat",
    "residual_dtype": "res_dtype",
    "torch_dtype": "dtype",
    "broadcast_data": "use_broadcast_data",
    "generation": "generation_config",
}
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
    """Name, annotation, default, support and reason of each such key of a section."""
    for kind, reasons in _table().get(section, {}).items():
        if kind == "whole":
            rows = [("supported", "", reasons)]
        else:
            rows = [(kind, *row) for row in reasons.items()]
        for support, reason, keys in rows:
            for name, declared in keys.items():
                yield name, *_annotation(declared), support, reason


@cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # six times as fast, where PyYAML was built with it
    with Path(__file__).with_suffix(".yaml").open(encoding="utf-8") as file:
        return yaml.load(file, loader)


def _annotation(declared: Any) -> tuple[Any, Any]:
    """The annotation and the default of ``4``, ``str``, ``int>=1 = 4`` or ``ON | OFF``."""
    if not isinstance(declared, str):
        return type(declared), declared
    types, has_default, default = declared.partition(" =")
    names = types.split(" | ")
    kinds = [_TYPES[name] for name in names if name in _TYPES]
    words = tuple(name for name in names if name not in _TYPES)
    annotation = Union[(*([Literal[words]] if words else []), *kinds, *([] if has_default else [None]))]  # noqa: UP007
    return annotation, _value(default.strip()) if has_default else None


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (SyntaxError, ValueError):
        return text
