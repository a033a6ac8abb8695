"""Which parameters the parts of a decoder in one graph take, whether the graph holds them or is given them."""

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
    """What each part of a decoder takes; None stands for a parameter that the model, or the layer, does not have."""

    embedding: tuple
    """The embedding, and the matrix that maps it to the residual stream."""
    layers: tuple[tuple[tuple, tuple], ...]
    """Of each layer `block_weights` and, of one with experts, `moe_shapes`."""
    merges: tuple[tuple, ...]
    """Of each multi-token prediction module the norm before it, and `MTP_WEIGHTS`."""
    heads: tuple[tuple, ...]
    """Of the main model and each module the norm, the matrix of the head, and the one that maps to its width."""


def graph_parts(
    settings: ModelConfig, take: Callable[[str], T | None], layers: Sequence[int] | None = None
) -> GraphParts:
    """Returns what `take` gives for the name of each parameter.

    Args:
        layers: Numbers of the layers, those of multi-token prediction modules last. Default None: all.
    """
    spec = model_spec(settings)
    numbers = layers
    if layers is None:
        numbers = range(len(spec.layers))
    modules = [number for number in numbers if number in spec.module_layers]

    def of_layer(number: int, names: Iterable[str]) -> tuple[T | None, ...]:
        return tuple(take(spec.parameter_name(number, name)) if name else None for name in names)

    def layer_parts(number: int) -> tuple[tuple, tuple]:
        names = block_weights(settings)
        if not spec.layers[number].is_moe:
            return of_layer(number, names), ()
        in_block = [name if sublayer_of(name) == "attention" else "" for name in names]
        return of_layer(number, in_block), of_layer(number, moe_shapes(settings))

    norms = [take(FINAL_NORM), *(of_layer(number, [MTP_NORM])[0] for number in modules)]
    head = take(EMBEDDING if spec.tied else HEAD)
    mapping = take(MAPPING_OUT)
    return GraphParts(
        (take(EMBEDDING), take(MAPPING_IN)),
        tuple(map(layer_parts, numbers)),
        tuple((norm, *of_layer(number, MTP_WEIGHTS)) for number, norm in zip(modules, norms, strict=False)),
        tuple((norm, head, mapping) for norm in norms),
    )
