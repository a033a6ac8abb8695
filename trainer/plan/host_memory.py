"""What whole layers on arrays (`trainer.ops.cpu`) have in memory in a training, counted array by array.

Legend: N tokens of a micro-batch, D hidden, F feed-forward, V vocabulary, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_LOGITS, _FEWEST_ROWS = 1 << 24, 64  # as in trainer.ops.cpu.head


class SublayerValues(NamedTuple):
    """Float32 values of a token."""

    kept: int
    """From forward to backward pass, the input of the sublayer included."""
    working: int
    """Of the backward pass."""


def sublayer_values(settings: ModelConfig, layer: int) -> dict[str, SublayerValues]:
    """Of "attention" and of "mlp", the feed-forward layer or the experts."""
    hidden, queries = settings.hidden_size, settings.num_heads * settings.head_size
    keys = settings.kv_heads * settings.head_size
    # Input, queries, keys, values, results of the heads; queries and keys before their norms.
    kept = hidden + 2 * queries + 2 * keys + (queries + keys) * settings.use_qk_norm
    # Gradients of the input, the heads, queries, keys and values; the normed input.
    attention = SublayerValues(kept, 2 * hidden + 2 * queries + 2 * keys)
    if not settings.is_moe_layer(layer):
        width = settings.ffn_size
        # Input, gate and up; the gradient of the input, the normed input, what the last product takes.
        return {"attention": attention, "mlp": SublayerValues(hidden + 2 * width, 2 * hidden + width)}
    moe, shared = settings.experts, settings.shared_expert_size
    rows = moe.num_experts_chosen
    # Input, normed input, result, scores and what the router's losses keep; gate and up of the chosen experts.
    kept = 3 * hidden + 4 * moe.expert_num + rows * 2 * settings.expert_size
    kept += (2 * shared + hidden * (1 + settings.has_shared_gate)) if shared else 0
    # Gradients of the input, by each sum, and of the rows of the experts.
    return {"attention": attention, "mlp": SublayerValues(kept, (3 + rows) * hidden + shared)}


def layer_values(settings: ModelConfig, layer: int, recomputed: str) -> SublayerValues:
    """Of a whole layer, of which "block", "attention", "mlp" or nothing ("") is computed again in the backward pass: it
    keeps its input alone."""
    values = sublayer_values(settings, layer)
    again = tuple(values) if recomputed == "block" else (recomputed,) if recomputed else ()
    kept = sum(each.kept for name, each in values.items() if name not in again)
    working = sum(values[name].kept for name in again) + max(each.working for each in values.values())
    return SublayerValues(kept + settings.hidden_size * bool(again), working)


def head_values(settings: ModelConfig, tokens: int) -> int:
    """While the head is computed: logits of some rows, these rows normed, the gradient of all."""
    rows = min(tokens, max(_FEWEST_ROWS, _LOGITS // settings.vocab_size))
    return rows * (settings.vocab_size + 2 * settings.hidden_size) + tokens * settings.hidden_size
