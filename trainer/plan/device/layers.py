"""What a layer of explicit mode holds on an Ascend: what it keeps for its backward pass, what that takes besides, and
what its compiled functions hold from call to call.

All bytes are of one token of a micro-batch, except where a function takes the number of tokens. `explicit` says how it
was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.config.schema.model import ModelConfig
from trainer.models.spec.model import AttentionSpec, LayerSpec, MlpSpec
from trainer.parallel.mesh import Degrees
from trainer.parallel.sharding import FLOAT32_BYTES
from trainer.plan.device.graph import is_flash, kept_scores, number_width

_FLASH_MASK_BYTES = 2048 * 2048
_TABLES = 4  # cosine and sine of queries and of keys


class LayerMemory(NamedTuple):
    """Bytes of a layer: what it keeps, and what its backward pass takes besides."""

    kept: int
    working: int


def layer_memory(
    settings: ModelConfig, layer: LayerSpec, part: str, half: bool, rows: int, degrees: Degrees, tokens: int
) -> LayerMemory:
    """Returns the bytes of a layer.

    Args:
        part: What its backward pass recomputes.
        rows: Number of ranks that share the rows of the residual stream.
    """
    sizes = kept_of_layer(settings, layer, half, rows, degrees)
    stream = settings.hidden_size * FLOAT32_BYTES // rows
    working = {"attention": _attention_working(settings, layer.attention, half)}
    working["mlp"] = _mlp_working(settings, layer, half, degrees)
    most = max(working.values())
    if not part:
        return LayerMemory(tokens * sizes["block"], tokens * (most + stream))
    remains = stream
    if part == "block" and layer.is_moe:
        # Attention and experts are two functions. Each keeps its input, and they are recomputed one after the other.
        remains += stream
        again = max(sizes[name] + working[name] for name in ("attention", "mlp"))
    elif part == "block":
        again = sizes["block"] + most
    else:
        other = "attention"
        if part == "attention":
            other = "mlp"
        again = max(sizes[part] + working[part], working[other])
    return LayerMemory(tokens * (sizes["block"] - sizes[part] + remains), tokens * (again + stream))


def _mlp_working(settings: ModelConfig, layer: LayerSpec, half: bool, degrees: Degrees) -> int:
    """Returns the bytes of a token that the backward pass of a feed-forward sublayer takes besides what it has kept."""
    mlp = layer.mlp
    widens = _widens(settings, half)
    width = number_width(half)
    if isinstance(mlp, MlpSpec):
        if not mlp.has_gate:  # one array and its gradient
            if widens:
                return 6 * mlp.width
            return 2 * width * mlp.width
        if widens:  # three arrays in float32
            return 12 * mlp.width
        return 4 * width * mlp.width  # gate beside up, and the gradient of both
    chosen = mlp.chosen / degrees.model_parallel
    # The gradient of the rows in float32, and those of the tokens; operators of its own kernel take products, too.
    rows = chosen * mlp.hidden * FLOAT32_BYTES
    if not _permutes_fused(settings):
        rows = 3 * rows + chosen * mlp.hidden * width
    return int(rows) + 2 * mlp.hidden * FLOAT32_BYTES // degrees.model_parallel


def _attention_working(settings: ModelConfig, spec: AttentionSpec, half: bool) -> int:
    """Returns the bytes of a token that the backward pass of attention takes: gradients of heads, or of a quarter of
    the probabilities."""
    width = number_width(half)
    queries = spec.heads * spec.head_size
    keys = spec.kv_heads * (spec.head_size + spec.value_size)
    working = 2 * width * (queries + keys)
    if not is_flash(settings, half):
        scores = spec.heads * settings.seq_length
        working += width * scores // 4
        if half:  # casts of all quarters to float32 take the place of those in half precision
            working += (FLOAT32_BYTES - width) * scores * 10 // 16
    return working


def function_buffers(
    settings: ModelConfig, layers: Sequence[tuple[LayerSpec, str, bool]], half: bool, rows: int, degrees: Degrees,
    tokens: int,
) -> int:  # fmt: skip
    """Returns the bytes that compiled functions of layers hold between their calls.

    These are what each forward pass saved last, the tables and masks that it and its backward pass got, and zeros.
    Dense layers, layers with experts, and layers with another window have functions of their own. One that stops the
    gradients of frozen weights holds what its last two calls saved.

    Args:
        layers: Each with what its backward pass recomputes, and whether it has frozen weights.
    """
    saved: dict[tuple[str, object], int] = {}
    inputs: dict[tuple[str, object], int] = {}
    width = number_width(half)
    for layer, part, is_frozen in layers:
        sizes = kept_of_layer(settings, layer, half, rows, degrees)
        attention = layer.attention
        form = layer.is_moe, attention.window, attention.is_rotated
        sublayer = "block"
        if layer.is_moe:
            sublayer = "attention"
        again = part in ("block", "attention")
        inputs[(str(again), form)] = _function_inputs(settings, attention, half, tokens, again)
        if again:
            sublayer = "mlp" * (part == "attention" and not layer.is_moe)
        else:  # a function that computes activations and gradients together needs no zeros
            inputs[("zeros", form)] = tokens * _zeros(settings, attention, half, degrees)
            if part == "mlp":
                sublayer = "attention"
        if sublayer:
            saved[(sublayer, form)] = sizes[sublayer] * (1 + is_frozen)
        mlp = layer.mlp
        if not isinstance(mlp, MlpSpec):  # the router, and the activation of the experts
            activation = 3 * width
            if _widens(settings, half):
                activation += 2 * FLOAT32_BYTES
            pieces = (FLOAT32_BYTES + width) * mlp.hidden + mlp.chosen * mlp.width * activation
            saved[("experts", None)] = pieces // degrees.model_parallel
    return tokens * sum(saved.values()) + sum(inputs.values())


def _widens(settings: ModelConfig, half: bool) -> bool:
    """Returns whether SwiGLU keeps float32 copies of its inputs, as the reference kernel does in half precision."""
    return half and not settings.use_fused_swiglu


def _permutes_fused(settings: ModelConfig) -> bool:
    """Returns whether moe_token_permute sorts the rows of experts."""
    return settings.experts is not None and bool(settings.experts.use_fused_ops_permute and settings.experts.use_gmm)


def _function_inputs(settings: ModelConfig, attention: AttentionSpec, half: bool, tokens: int, again: bool) -> int:
    """Returns the bytes of position tables and masks that the forward and the backward function of attention got.

    Args:
        again: The backward pass recomputes attention, so that it takes all of them. Otherwise it takes the mask of the
            fused operator alone, and without that of the rotary embedding two of the four tables.
    """
    rotated = attention.head_size
    if attention.latent is not None:
        rotated = attention.latent.rope_size
    table = tokens * rotated * FLOAT32_BYTES
    mask = _FLASH_MASK_BYTES
    masks = 2
    if not is_flash(settings, half):
        mask = tokens * settings.seq_length * FLOAT32_BYTES
        masks = 1 + again
    tables = 2 * _TABLES
    if not settings.use_fused_rope and not again:
        tables = _TABLES + 2
    return tables * table + masks * mask


def _zeros(settings: ModelConfig, spec: AttentionSpec, half: bool, degrees: Degrees) -> int:
    """Returns the bytes of a token of the zeros that fill up gradients of slices, which a graph holds as constants."""
    width = number_width(half)
    queries = spec.heads * spec.head_size
    keys = spec.kv_heads * spec.head_size
    zeros = 0
    if spec.latent is not None:  # parts of queries, keys and values, and the halves of what is rotated
        latent = spec.latent
        parts = 2 * latent.nope_size + spec.value_size + 5 * latent.rope_size
        zeros += width * (spec.heads * parts + latent.key_value_rank)
    elif not settings.use_fused_rope:
        zeros += 2 * width * (queries + keys)  # halves of each head
    if not is_flash(settings, half):
        zeros += 2 * width * (queries + keys)  # quarters of the tokens
    ranks = degrees.context_parallel
    if ranks > 1:
        # Keys and values of all tokens, and of those up to the end of either half of the rank's tokens; queries.
        zeros += 3 * keys * width * (4 * ranks + 1) + 4 * width * queries
    return zeros


def kept_of_layer(settings: ModelConfig, layer: LayerSpec, half: bool, rows: int, degrees: Degrees) -> dict[str, int]:
    """Returns the bytes that each sublayer of a layer, and the block, saves for a token in explicit mode.

    Residuals are float32. The results of output projections are kept where a norm or a factor changes them.

    Args:
        settings: Which kernels are used.
        layer: The local layer of a tensor-parallel rank.
        rows: Number of ranks that share the rows of the residual stream.
    """
    width = number_width(half)
    spec = layer.attention
    hidden = spec.hidden
    streams = (4 + width) * hidden // rows  # residual stream and its norm
    streams += width * hidden * (rows > 1)  # gathered
    attention = streams + _kept_heads(settings, spec, half, degrees)
    if spec.changes_output:
        attention += width * hidden // rows
    # What dropout leaves of the input of an adapter. Those of the feed-forward layer are not counted.
    attention += width * hidden * sum(adapter.dropout > 0 for adapter in spec.adapters.values())
    mlp = layer.mlp
    if isinstance(mlp, MlpSpec):
        # Gate and up, in the dtype in which they are multiplied, and their product.
        gates = 3 * width
        if _widens(settings, half):
            gates = 2 * 4 + width
        if mlp.activation != "silu":  # its result is kept for the gradient of the product, too
            gates = 3 * 4 + width
        if not mlp.has_gate:
            gates = 2 * 4 + width * half
        of_mlp = streams + gates * mlp.width
        if mlp.changes_output:
            of_mlp += width * hidden // rows
    else:
        of_mlp = _kept_experts(settings, layer, half, rows, degrees)
    return {"attention": attention, "mlp": of_mlp, "block": attention + of_mlp}


def _kept_heads(settings: ModelConfig, spec: AttentionSpec, half: bool, degrees: Degrees) -> int:
    """Returns the bytes of queries, keys, values and results of all heads that attention saves for a token."""
    width = number_width(half)
    queries = spec.heads * spec.head_size
    keys = spec.kv_heads * spec.head_size
    if is_flash(settings, half):
        scores = spec.heads * 64  # largest score and sum of the softmax, eight times each
    else:
        scores = kept_scores(spec, settings.seq_length, width)
    if spec.latent is not None:
        # Latent vectors before and after their norms; queries, keys, values and results of all heads. The fused
        # operator takes values as wide as keys, and its result is cut.
        values = spec.heads * spec.value_size
        wide = 2 * queries + 2 * values
        if spec.value_size < spec.head_size and is_flash(settings, half):
            wide = 4 * queries + values
        return scores + width * (2 * spec.latent.down_size + wide)
    ranks = degrees.context_parallel
    if ranks > 1:  # in the order of the sequence, up to the last token of either half of the rank's tokens
        scores += (2 * ranks + 1) * keys * width
    # Queries, keys, values and results; queries and keys also before, in and after their norm.
    heads = 2 * queries + 2 * keys
    if spec.head_norm:
        heads = 5 * queries + 4 * keys
    return scores + width * heads


def _kept_experts(settings: ModelConfig, layer: LayerSpec, half: bool, rows: int, degrees: Degrees) -> int:
    """Returns the bytes that an MoE sublayer saves for a token of the stream.

    The ranks of a tensor-parallel group share the tokens. Of a row of an expert it saves the input, gate, up, their
    product and the result. Where ranks exchange rows it saves them before and after they are sent, sorted by expert and
    summed up, and the results as well. moe_token_unpermute saves its input in float32.
    """
    mlp = layer.mlp
    assert not isinstance(mlp, MlpSpec)
    width = number_width(half)
    hidden = mlp.hidden
    exchanges = degrees.expert_parallel > 1
    inputs = 2
    if exchanges:
        inputs = 6
    row = inputs * width * hidden + 3 * width * mlp.width
    if _permutes_fused(settings) and half:
        row += FLOAT32_BYTES * hidden * (1 + exchanges)
    if _widens(settings, half):
        row += 2 * FLOAT32_BYTES * mlp.width
    moe = settings.experts
    if moe is not None and (moe.effective_capacity is not None or moe.enable_gmm_safe_tokens):
        # Each of three products sets rows without an expert to zero before and after it.
        row += 3 * width * (hidden + mlp.width)
    tensor = degrees.model_parallel
    # The residual stream, and its norm in both dtypes: the router computes in float32.
    router = FLOAT32_BYTES * hidden // rows + ((FLOAT32_BYTES + width) * hidden + 12 * mlp.experts) // tensor
    shared = 3 * mlp.shared_width * width + hidden * width * bool(mlp.shared_width)
    return router + mlp.chosen * row // tensor + shared
