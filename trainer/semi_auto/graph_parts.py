"""The parameters of each part of a decoder in one graph, which contains them or has them as arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from trainer.models.block import MTP_NORM, MTP_WEIGHTS
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD, MAPPING_IN, MAPPING_OUT, sublayer_of
from trainer.models.spec.shapes import block_weights, moe_shapes

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

T = TypeVar("T")


class GraphParts(NamedTuple):
    """The parameters of each part of a decoder; None for a parameter that the model or the layer does not have."""

    embedding: tuple
    """The embedding, and the matrix that maps it to the residual stream."""
    layers: tuple[tuple[tuple, tuple], ...]
    """For each layer those of `block_weights`, and for a MoE layer those of `moe_shapes`."""
    merges: tuple[tuple, ...]
    """For each MTP module the norm before it, and `MTP_WEIGHTS`."""
    heads: tuple[tuple, ...]
    """For the main model and each MTP module norm, matrix of the head, and matrix that maps to its width."""


def graph_parts(
    settings: ModelConfig, take: Callable[[str], T | None], layers: Sequence[int] | None = None
) -> GraphParts:
    """Returns the parts of a decoder with the result of `take` for the name of each parameter.

    Args:
        layers: Numbers of the layers, with those of MTP modules last. Default None: all.
    """
    spec = model_spec(settings)
    numbers: Sequence[int] = range(len(spec.layers))
    if layers is not None:
        numbers = layers
    modules = [number for number in numbers if number in spec.module_layers]

    def take_all(number: int, names: Iterable[str]) -> tuple[T | None, ...]:
        return tuple(take(spec.parameter_name(number, name)) if name else None for name in names)

    def layer_parts(number: int) -> tuple[tuple, tuple]:
        names = block_weights(settings)
        if not spec.layers[number].is_moe:
            return take_all(number, names), ()
        in_block = [name if sublayer_of(name) == "attention" else "" for name in names]
        return take_all(number, in_block), take_all(number, moe_shapes(settings))

    norms = [take(FINAL_NORM), *(take_all(number, [MTP_NORM])[0] for number in modules)]
    head_name = HEAD
    if spec.tied:
        head_name = EMBEDDING
    head = take(head_name)
    mapping = take(MAPPING_OUT)
    return GraphParts(
        (take(EMBEDDING), take(MAPPING_IN)),
        tuple(map(layer_parts, numbers)),
        tuple((norm, *take_all(number, MTP_WEIGHTS)) for number, norm in zip(modules, norms, strict=False)),
        tuple((norm, head, mapping) for norm in norms),
    )
