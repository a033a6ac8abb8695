"""The arrays that native CPU layers save for the backward pass: `trainer.arrays` allocates them, the plan counts them.

Legend: N tokens of a rank; with sequence parallelism it has n rows of the residual stream, otherwise N.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from trainer.models.spec.model import AdapterSpec, AttentionSpec, MlpSpec, MoeSpec
from trainer.models.spec.names import adapter_names

RowKind: TypeAlias = Literal["stream", "tokens", "queries", "keys", "routed", "experts"]
_LOGITS = 1 << 24  # logits that exist at once, unless the vocabulary is larger
_FEWEST_ROWS = 64
HEAD_ROWS = 1 << 11
"""Rows of a head in few bytes that threads decompress at once."""


class SavedArray(NamedTuple):
    """An array [rows, width] that a sublayer saves.

    Attributes:
        narrow: Its dtype is that of the products; otherwise float32.
        rows: One row for each
            "stream": row of the residual stream that the rank has;
            "tokens": token that the rank computes;
            "queries", "keys": query or key of its attention: of more tokens with context parallelism;
            "routed": token that it sends to experts: tensor-parallel ranks share the tokens;
            "experts": assignment of these tokens to experts.
    """

    name: str
    width: int
    narrow: bool = True
    rows: RowKind = "tokens"


def attention_inputs(spec: AttentionSpec, ulysses: int = 1) -> Iterator[SavedArray]:
    """Yields queries, keys and values as attention takes them; arguments as in `attention_saved`."""
    kv_heads = max(1, spec.kv_heads // ulysses)
    yield SavedArray("q", spec.heads // ulysses * spec.head_size, rows="queries")
    yield SavedArray("k", kv_heads * spec.head_size, rows="keys")
    yield SavedArray("v", kv_heads * spec.value_size, rows="keys")


def attention_saved(
    spec: AttentionSpec, sequence_parallel: bool = False, ulysses: int = 1, exchanges: bool = False
) -> Iterator[SavedArray]:
    """Yields the arrays that an attention sublayer saves besides its input.

    Where queries and keys are normed before they are rotated, those before the norm are saved and the backward pass
    norms and rotates them again, unless ranks have exchanged them.

    Args:
        spec: With the heads of the rank.
        ulysses: Ranks of Ulysses attention, which share these heads.
        exchanges: Whether context-parallel ranks exchange queries and keys.
    """
    if spec.pre_norm:
        yield SavedArray("scale", 1, narrow=False, rows="stream")
    gathered = spec.hidden
    if spec.latent is not None:
        queries_from = spec.hidden
        if spec.latent.query_rank is not None:
            queries_from = spec.latent.query_rank
            yield SavedArray("query_latent", spec.latent.query_rank, rows="stream")
        yield SavedArray("latent", spec.latent.key_value_rank, rows="stream")
        gathered = queries_from + spec.latent.key_value_rank + spec.latent.rope_size
    if sequence_parallel:
        yield SavedArray("normed", gathered)
    if spec.head_norm:
        yield SavedArray("plain_q", spec.heads * spec.head_size)
        yield SavedArray("plain_k", spec.kv_heads * spec.head_size)
    computed_again: tuple[str, ...] = ()
    if spec.head_norm and not spec.norms_rotated and not exchanges:
        computed_again = ("q", "k")
    yield from (array for array in attention_inputs(spec, ulysses) if array.name not in computed_again)
    yield SavedArray("heads", spec.heads * spec.value_size)
    if spec.post_norm:
        yield SavedArray("output", spec.hidden, narrow=False, rows="stream")
    for name, adapter in spec.adapters.items():
        rows: RowKind = "tokens"
        if name.endswith(("q_a_proj", "kv_a_proj_with_mqa")):
            rows = "stream"
        yield _adapter_array(name, adapter, rows)


def mlp_saved(spec: MlpSpec, sequence_parallel: bool = False) -> Iterator[SavedArray]:
    """Yields the arrays that a feed-forward sublayer saves besides its input; `spec` has the width of the rank."""
    if spec.pre_norm:
        yield SavedArray("scale", 1, narrow=False, rows="stream")
    if sequence_parallel:
        yield SavedArray("normed", spec.hidden)
    if spec.has_gate:
        yield SavedArray("gate", spec.width)
    yield SavedArray("up", spec.width)
    if spec.post_norm:
        yield SavedArray("output", spec.hidden, narrow=False, rows="stream")
    for name, adapter in spec.adapters.items():
        yield _adapter_array(name, adapter, "tokens")


def moe_saved(
    spec: MoeSpec, tensor_parallel: bool = False, gathers: bool = False, ranks: int = 1
) -> Iterator[SavedArray]:
    """Yields the arrays that the sublayer of an MoE layer saves besides its input; routed experts compute in float32.

    Args:
        ranks: Ranks that shard the experts. Each receives the tokens of its experts.
        gathers: Each rank receives all tokens instead.
    """
    yield SavedArray("scale", 1, narrow=False, rows="routed")
    yield SavedArray("normed", spec.hidden, narrow=False, rows="routed")
    # Scores, normalised scores, and two arrays for the losses of the router.
    yield SavedArray("router", 4 * spec.experts, narrow=False, rows="routed")
    yield SavedArray("gate", spec.width, narrow=False, rows="experts")
    yield SavedArray("up", spec.width, narrow=False, rows="experts")
    if gathers:
        yield SavedArray("gathered", ranks * spec.hidden, narrow=False, rows="routed")
    elif ranks > 1:
        yield SavedArray("received", spec.hidden, narrow=False, rows="experts")
        yield SavedArray("returned", spec.hidden, narrow=False, rows="experts")
    if spec.shared_width:
        if tensor_parallel:
            yield SavedArray("shared_normed", spec.hidden)
        yield SavedArray("shared_gate", spec.shared_width)
        yield SavedArray("shared_up", spec.shared_width)
    if spec.shared_gate:
        yield SavedArray("shared_output", spec.hidden, narrow=False, rows="routed")


def logit_rows(tokens: int, vocabulary: int) -> int:
    """Returns how many tokens have logits at once in the head of a rank with `tokens` tokens and this vocabulary."""
    return min(tokens, max(_FEWEST_ROWS, _LOGITS // vocabulary))


def _adapter_array(name: str, adapter: AdapterSpec, rows: RowKind) -> SavedArray:
    return SavedArray(adapter_names(name)[0], adapter.rank, rows=rows)
