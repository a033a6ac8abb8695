"""What whole layers on arrays (`trainer.ops.cpu`) have in memory in a training, counted array by array.

Legend: N tokens of a micro-batch, D hidden, F feed-forward, V vocabulary, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_LOGITS, _FEWEST_ROWS = 1 << 24, 64  # as in trainer.arrays.head
_WIDE = 4  # bytes of float32


class SublayerBytes(NamedTuple):
    """Of a token."""

    kept: int
    """From forward to backward pass, the input of the sublayer included."""
    working: int
    """Of the backward pass."""


def sublayer_bytes(settings: ModelConfig, layer: int, narrow: int) -> dict[str, SublayerBytes]:
    """Of "attention" and of "mlp", the feed-forward layer or the experts.

    `narrow` are the bytes of a number that a product takes, 4, or 2 in bfloat16: all else is float32.
    """
    hidden, queries = settings.hidden_size, settings.num_heads * settings.head_size
    keys, rounds = settings.kv_heads * settings.head_size, narrow < _WIDE
    # Input; queries, keys, values, results of the heads; queries and keys before their norms.
    kept = _WIDE * hidden + narrow * (2 * queries + 2 * keys + (queries + keys) * settings.use_qk_norm)
    # Gradients of the input, queries, keys and values; of the heads, and the normed input; in bfloat16 what products
    # take of the gradients.
    working = _WIDE * (hidden + queries + 2 * keys) + narrow * (queries + hidden)
    working += rounds * narrow * (queries + 2 * keys + hidden)
    attention = SublayerBytes(kept, working)
    if not settings.is_moe_layer(layer):
        width = settings.ffn_size
        # Gradient of the input; what the last product takes, the normed input; what products take of the gradient.
        working = _WIDE * hidden + narrow * (width + hidden + rounds * hidden)
        return {"attention": attention, "mlp": SublayerBytes(_WIDE * hidden + narrow * 2 * width, working)}
    moe, shared = settings.experts, settings.shared_expert_size
    rows = moe.num_experts_chosen
    # Input, normed input, result, scores and what the router's losses keep; gate and up of the chosen experts.
    kept = _WIDE * (3 * hidden + 4 * moe.expert_num + rows * 2 * settings.expert_size)
    kept += (narrow * 2 * shared + _WIDE * hidden * (1 + settings.has_shared_gate)) if shared else 0
    # Gradients of the input, by each sum, and of the rows of the experts.
    return {"attention": attention, "mlp": SublayerBytes(kept, _WIDE * ((3 + rows) * hidden + shared))}


def layer_bytes(settings: ModelConfig, layer: int, recomputed: str, narrow: int) -> SublayerBytes:
    """Of a whole layer, of which "block", "attention", "mlp" or nothing ("") is computed again in the backward pass: it
    keeps its input alone."""
    values = sublayer_bytes(settings, layer, narrow)
    again = tuple(values) if recomputed == "block" else (recomputed,) if recomputed else ()
    kept = sum(each.kept for name, each in values.items() if name not in again)
    working = sum(values[name].kept for name in again) + max(each.working for each in values.values())
    return SublayerBytes(kept + _WIDE * settings.hidden_size * bool(again), working)


def head_bytes(settings: ModelConfig, tokens: int, narrow: int) -> int:
    """While the head is computed: logits of some rows and these rows normed, in bfloat16 both once more, rounded; the
    gradient of all rows."""
    rows, hidden = min(tokens, max(_FEWEST_ROWS, _LOGITS // settings.vocab_size)), settings.hidden_size
    found = _WIDE * (rows * (settings.vocab_size + 2 * hidden) + tokens * hidden)
    return found + (narrow < _WIDE) * narrow * rows * (settings.vocab_size + hidden)
