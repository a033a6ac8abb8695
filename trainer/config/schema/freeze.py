"""Frozen weights: YAML ``freeze``."""

from typing import Annotated, Any, TypeAlias

from pydantic import Field

from trainer.config.schema.fields import Section, setting

_Pattern: TypeAlias = Annotated[str, Field(max_length=1000)]
_Patterns: TypeAlias = _Pattern | list[_Pattern | dict[str, Any]] | dict[str, Any]


class FreezeConfig(Section):
    """Frozen weights (YAML ``freeze``): those of include, embeddings and layers, except those of exclude."""

    include: _Patterns = setting(
        [], "Weights to freeze: patterns on their names with * and ?, embeddings, and layers: 0-3. Default: none.")
    exclude: _Patterns = setting([], "Exceptions, which are trained, written like include. Default: none.")
    embeddings: bool = setting(False, "Freeze the embeddings: as embeddings in include.")
    layers: int | str | list[int | str] | None = setting(
        None, "Layers to freeze, as layers: ... in include: a layer, a range such as 0-3, or a list of them.")
