"""Model FLOPs: the floating-point operations that a training step needs. MFU is their rate over the device's peak.

Counted as in PaLM (Chowdhery et al. 2022, appendix B) and Megatron-LM (`num_floating_point_operations` of
megatron/training/training.py): a product of N weights with a token takes 2 N operations forward, and in the backward
pass 2 N for the gradient of its input and 2 N for that of its weight, together the 6 N of these papers. Attention takes
as much for each pair of a query and a key that it sees: as in Megatron-LM the causal half of all pairs (PaLM counts all
of them), and with a sliding window those within it. What only some implementations compute is not counted: norms,
softmax, the optimizer, recomputation, masked pairs of packed documents, padding of experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from trainer.config.schema.model import ModelConfig
from trainer.config.teacher import teacher_run
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import ModelSpec
from trainer.models.spec.names import (
    EMBEDDING,
    FINAL_NORM,
    MAPPING_IN,
    MAPPING_OUT,
    adapter_names,
    norm_bias,
    sublayer_of,
)
from trainer.optim.freeze import frozen_names

if TYPE_CHECKING:
    from trainer.config import Config


Operator: TypeAlias = Literal["products", "experts", "attention"]
"""A class of operators with a rate of its own: products with matrices, with the matrices of experts, and attention."""


class Products(NamedTuple):
    """Products with one token (or image): so many weights, or pairs of numbers of attention."""

    weights: float
    gets_gradient: bool  # whether the backward pass needs the gradient of the input
    is_trained: bool  # whether it needs that of the weight; of attention, whose both sides are activations, as above
    operator: Operator = "products"
    sublayer: str = ""  # "attention" or "mlp"

    @property
    def forward(self) -> float:
        """Returns the floating-point operations of one token in the forward pass."""
        return 2 * self.weights

    @property
    def flops(self) -> float:
        """Returns the floating-point operations of one token, forward and backward."""
        return self.forward * (1 + self.gets_gradient + self.is_trained)


def flops_per_sequence(config: Config) -> float:
    """Returns the floating-point operations of one sequence, or one image.

    A training step is counted with its backward pass; other modes with the forward pass only. Experts count with those
    that are chosen for a token. Frozen weights have no gradient, and below the lowest layer with a trained weight there
    is no backward pass. Adapters count like other matrices. With a teacher its forward pass counts, too.
    """
    network = config.network
    if not isinstance(network, ModelConfig):
        return sum(each.flops for each in _image_products(config, network.linears))
    taught = 0.0
    teacher = teacher_run(config)
    if teacher is not None:
        taught = flops_per_sequence(teacher)
    layers, ends = decoder_products(config)
    return taught + config.decoder.seq_length * sum(each.flops for part in (*layers, ends) for each in part)


def _image_products(config: Config, linears: Mapping[str, tuple[int, int]]) -> Iterator[Products]:
    """Yields the products of a model of images, which need no gradient themselves."""
    frozen: Collection[str] = ()
    if config.trains:
        frozen = frozen_names(config)
    reached = False
    for name, shape in linears.items():
        weight = f"{name}.weight"
        trained = {each for each in (weight, f"{name}.bias") if config.trains and each not in frozen}
        yield Products(math.prod(shape), reached, weight in trained)
        reached |= bool(trained)


def decoder_products(config: Config) -> tuple[list[list[Products]], list[Products]]:
    """Returns the products of each layer, then those outside of layers: of the head and of the embedding's mappings."""
    spec = model_spec(config.decoder)
    parameters = spec.parameters()
    trains = config.trains
    frozen: Collection[str] = parameters
    if trains:
        frozen = frozen_names(config)
    trained = parameters.keys() - frozen
    first = spec.first_reached(trained)
    length = config.decoder.seq_length
    layers = [
        list(_layer_products(spec, layer, length, frozen, trains and layer >= first))
        for layer in range(len(spec.layers))
    ]
    ends = []
    if MAPPING_IN in parameters:
        size = math.prod(parameters[MAPPING_IN].shape)
        ends.append(Products(size, trains and EMBEDDING in trained, MAPPING_IN in trained))
    reached = trains and (first < len(layers) or not trained.isdisjoint((FINAL_NORM, norm_bias(FINAL_NORM))))
    for name, passes in ((MAPPING_OUT, 1), (spec.head, 1 + spec.mtp_modules)):
        if name in parameters:
            ends.append(Products(passes * math.prod(parameters[name].shape), reached, name in trained))
            reached |= name in trained
    for parameter in spec.adapter_parameters:
        if parameter.name != adapter_names(EMBEDDING.removesuffix(".weight"))[0]:  # its rows are looked up
            ends.append(Products(math.prod(parameter.shape), trains, trains and parameter.name not in frozen))
    return layers, ends


def _layer_products(
    spec: ModelSpec, layer: int, length: int, frozen: Collection[str], reached: bool
) -> Iterator[Products]:
    """Yields the products of a layer, or of a multi-token prediction module without its head.

    Args:
        length: Tokens of a sequence.
        reached: Whether the backward pass reaches the layer.
    """
    for name, parameter in spec.layer_parameters(layer).items():
        if parameter.role not in ("matrix", "router", "adapter"):
            continue
        operator: Operator = "products"
        if parameter.sharding == "expert":
            operator = "experts"
        size = spec.layers[layer].active_size(parameter)
        sublayer = sublayer_of(name.split(".", 3)[3])
        yield Products(size, reached, reached and name not in frozen, operator, sublayer)
    attention = spec.layers[layer].attention
    numbers = attention.heads * (attention.head_size + attention.value_size)
    yield Products(keys_seen(length, attention.window) * numbers, reached, reached, "attention", "attention")


def keys_seen(length: int, window: int | None) -> float:
    """Returns the number of keys that a query sees, as the mean over a sequence of `length` tokens.

    A query sees its own key and those before it, within the sliding window if there is one.
    """
    seen = length
    if window is not None:
        seen = min(window, length)
    return seen - seen * (seen - 1) / (2 * length)
