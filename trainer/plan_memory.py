"""How much memory a run will take: an estimate of its peak, by part.

Weights, gradients and optimizer state are exact. Activations are counted: what the kernels and the operators between
them keep for the backward pass. What MindSpore takes beside them was measured on a CPU (2 to 12 layers, 128 to 512
tokens of 64 to 256 numbers): the estimate is within a tenth of the peak there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.doctor import memory_left_bytes
from trainer.models.shapes import parameter_shapes

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig

_FLOAT32_BYTES = 4
_IMPORT_BYTES = 416 << 20  # resident after `import mindspore`
_COMPILED_BYTES = 128 << 20  # code of the compiled blocks, workspaces of the kernels, threads
_FRAGMENTATION = 4  # a quarter of the activations: blocks of the allocator that are held and not full
_OPTIMIZER_STATES = {"AdamW": 2, "SGD": 1}


def memory_estimate(config: Config, trains: bool) -> dict[str, int]:
    """Estimated peak of resident memory in bytes, by part and in total."""
    settings = config.decoder
    weights = sum(math.prod(shape) for shape in parameter_shapes(settings).values()) * _FLOAT32_BYTES
    parts = {"MindSpore and Python": _IMPORT_BYTES, "compiled code, workspaces": _COMPILED_BYTES, "weights": weights}
    if trains:
        tokens = config.runner_config.batch_size * settings.seq_length
        copies = 1 if config.runner_config.gradient_accumulation_steps == 1 else 2
        parts["gradients"] = weights * copies
        parts["optimizer state"] = weights * _OPTIMIZER_STATES[config.optimizer.type]
        parts["activations"] = tokens * activations_of_token(settings) * _FLOAT32_BYTES
        parts["compiled code, workspaces"] += parts["activations"] // _FRAGMENTATION
    return parts | {"total": sum(parts.values())}


def activations_of_token(settings: ModelConfig) -> int:
    """Numbers that are kept for each token between forward and backward, at the peak."""
    heads, keys = (number * settings.head_size for number in (settings.num_heads, settings.kv_heads))
    scores = settings.num_heads * settings.seq_length
    # Of each layer: residuals, norms and what follows them; q and the output before and after each change of layout,
    # k and v likewise; gate, up and their product; the probabilities.
    layer = 8 * settings.hidden_size + 6 * heads + 4 * keys + 3 * settings.ffn_size + scores
    # Dropout keeps its masks.
    layer += 2 * settings.hidden_size * bool(settings.hidden_dropout) + scores * bool(settings.attention_dropout)
    # Once: the head's logits, probabilities and their gradient, and what the attention's backward pass works on.
    return settings.num_layers * layer + 3 * settings.vocab_size + 4 * scores


def memory_notices(total_bytes: int, left_bytes: int | None = None) -> Iterator[str]:
    """Says when a run will probably not fit.

    Args:
        total_bytes: Of the estimate.
        left_bytes: Memory that is left here; None: look.
    """
    left_bytes = memory_left_bytes() if left_bytes is None else left_bytes
    if total_bytes > left_bytes:
        mib = 1 << 20
        yield (
            f"the run needs about {total_bytes / mib:,.0f} MiB of memory and {left_bytes / mib:,.0f} MiB are left:"
            " a smaller runner_config.batch_size with more gradient_accumulation_steps needs less"
        )
