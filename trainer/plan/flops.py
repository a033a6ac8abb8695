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
from typing import TYPE_CHECKING, NamedTuple

from trainer.models.spec.adapters import layer_targets
from trainer.models.spec.names import EMBEDDING, HEAD, MAPPING_IN, MAPPING_OUT, adapter_names, layer_prefix
from trainer.models.spec.shapes import attention_shapes, mlp_shapes, moe_shapes, parameter_name, parameter_shapes
from trainer.optim.freeze import first_trained_layer, frozen_names

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig
    from trainer.config.schema.classifier import ClassifierConfig


class _Products(NamedTuple):
    """Products with one token (or image): so many weights, or pairs of numbers of attention."""

    weights: float
    gets_gradient: bool  # whether the backward pass needs the gradient of the input
    is_trained: bool  # whether it needs that of the weight; of attention, whose both sides are activations, as above

    @property
    def flops(self) -> float:
        return 2 * self.weights * (1 + self.gets_gradient + self.is_trained)


def flops_per_sequence(config: Config) -> float:
    """Floating-point operations of one sequence (of a classifier: image) in a training step, without a training in the
    forward pass alone.

    Experts count with those that are chosen for a token. Frozen weights have no gradient of their own, and below the
    lowest layer with a trained weight there is no backward pass; adapters count like other matrices.
    """
    if config.classifier is not None:
        return sum(each.flops for each in _classifier_products(config.classifier, config.trains))
    tokens = config.decoder.seq_length
    return tokens * sum(each.flops for each in _decoder_products(config))


def _classifier_products(settings: ClassifierConfig, trains: bool) -> Iterator[_Products]:
    matrices = [math.prod(shape) for shape in parameter_shapes(settings).values() if len(shape) > 1]
    for layer, weights in enumerate(matrices):
        yield _Products(weights, trains and layer > 0, trains)  # images need no gradient


def _decoder_products(config: Config) -> Iterator[_Products]:
    settings, trains = config.decoder, config.trains
    frozen: Collection[str] = frozen_names(config) if trains else parameter_shapes(settings)
    first = first_trained_layer(config, frozen) if trains else settings.num_layers + settings.mtp_depth
    shapes = parameter_shapes(settings)
    for layer in range(settings.num_layers + settings.mtp_depth):
        yield from _layer_products(settings, layer, frozen, trains and layer >= first)
    head = EMBEDDING if settings.tie_word_embeddings else HEAD
    for name, passes in ((MAPPING_IN, 1), (MAPPING_OUT, 1), (head, 1 + settings.mtp_depth)):
        if name in shapes:
            reached = trains and (name != MAPPING_IN or EMBEDDING not in frozen)
            yield _Products(passes * math.prod(shapes[name]), reached, trains and name not in frozen)


def _layer_products(
    settings: ModelConfig, layer: int, frozen: Collection[str], reached: bool
) -> Iterator[_Products]:
    """Of a layer, or after the last one of a multi-token prediction module, without its head; `reached` by the backward
    pass."""
    is_moe = settings.is_moe_layer(layer)
    shapes: Mapping[str, tuple[int, ...]] = attention_shapes(settings)
    shapes = shapes | (moe_shapes(settings) if is_moe else mlp_shapes(settings))
    if layer >= settings.num_layers:
        shapes["eh_proj.weight"] = (settings.hidden_size, 2 * settings.hidden_size)
    for name, shape in shapes.items():
        if len(shape) > 1 and not name.endswith(".bias"):
            trained = reached and parameter_name(settings, layer, name) not in frozen
            yield _Products(math.prod(shape) * _active_share(settings, name), reached, trained)
    if settings.pet_config is not None and layer < settings.num_layers:
        for projection in layer_targets(settings, layer):
            out, inp = shapes[f"{projection}.weight"]
            for name, width in zip(adapter_names(projection), (inp, out), strict=True):
                trained = reached and layer_prefix(layer) + name not in frozen
                yield _Products(width * settings.pet_config.lora_rank, reached, trained)
    numbers = settings.num_heads * (settings.head_size + settings.value_size)
    yield _Products(keys_seen(settings, layer) * numbers, reached, reached)


def _active_share(settings: ModelConfig, name: str) -> float:
    """Of the stacked experts of a layer, the share that a token is sent to; of other weights all."""
    moe = settings.experts
    return moe.num_experts_chosen / moe.expert_num if moe and name.startswith("mlp.experts.") else 1.0


def keys_seen(settings: ModelConfig, layer: int) -> float:
    """Keys that a query sees, mean over a sequence: those before it and its own, within the window where there is one.
    """
    length = settings.seq_length
    window = min(settings.sliding_window, length) if settings.has_window(layer) else length
    return window - window * (window - 1) / (2 * length)
