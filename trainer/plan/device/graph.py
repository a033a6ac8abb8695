"""Activations of a rank in semi-automatic mode on an Ascend: what the one graph of its stage holds at its peak.

What is counted is what MindSpore's allocator had in use at the peak of dry runs (`MS_ALLOC_CONF=memory_tracker:True`):

* of every micro-batch under way what its layers keep, and its attention mask;
* a copy of each matrix in half precision, from its first use in the forward pass to its last one in the backward pass,
  for each micro-batch under way. What is computed again makes its copies again, one layer at a time. With
  enable_parallel_optimizer below level3 the copies, or what is gathered, are kept once for all micro-batches; without
  it, a pipeline that recomputes one sublayer of a layer has its matrices in float32 for each micro-batch;
* on the last stage the logits, their one-hot labels and one more such matrix in float32;
* while a layer's backward pass runs what it has computed again, and gradients inside its feed-forward layer; beside
  what is gathered, gradients that wait to be reduced, in half precision and in float32.

A stage has as many micro-batches under way as its schedule says; see `trainer.config.stages.training_schedule`.

Where a pass takes a slice of the sequences, it is counted as MindSpore Transformers' Llama computes attention
(mindformers/models/llama/llama_transformer.py, `seq_pipe`): each layer has caches of the keys and values of whole
sequences, and of their gradients, and each slice under way keeps keys and values of the whole sequence, zeros included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.parallel import zero_level
from trainer.config.recompute import comm_recompute_layers
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.model import AttentionSpec
from trainer.models.spec.names import EMBEDDING, HEAD
from trainer.models.spec.sublayers import attention_spec, moe_spec
from trainer.parallel.mesh import Degrees
from trainer.parallel.sharding import FLOAT32_BYTES
from trainer.plan.device.model_facts import ModelFacts
from trainer.plan.division import micro_batch_tokens

_LOGIT_BYTES = 12  # logits, one-hot labels, and one more while they are multiplied or the gradient is made
_LOSS_BYTES = 8  # of these what a loss keeps for its backward pass


class _SublayerMemory(NamedTuple):
    """Bytes of a token in one sublayer of a layer: input of the norm, its result, the rest, and the peak of the rest
    during the backward pass."""

    stream: int
    normed: int
    inside: int
    backward: int

    @property
    def saved(self) -> int:
        """Bytes that the forward pass saves for the backward pass, without recomputation."""
        return self.stream + self.normed + self.inside


class GraphMemory(NamedTuple):
    """Bytes of a rank by kind.

    Attributes:
        copies: Of matrices in half precision, or gathered, that are kept from the forward to the backward pass.
        constants: Of the graph: masks and tables.
        activations: All else, at the peak.
    """

    copies: int
    constants: int
    activations: int


class GraphMatrices(NamedTuple):
    """Bytes in float32 of the matrices of a stage, as the rank multiplies by them.

    Attributes:
        layers: By the layer, then by the sublayer.
        ends: Of the matrices outside of layers, by their names.
    """

    layers: Mapping[int, Mapping[str, int]]
    ends: Mapping[str, int]


def number_width(half: bool) -> int:
    """Returns the bytes of a number in the dtype of the products."""
    if half:
        return 2
    return FLOAT32_BYTES


def graph_memory(
    config: Config, degrees: Degrees, facts: ModelFacts, stage: int, half: bool, matrices: GraphMatrices,
    shares: bool, adds_up: bool,
) -> GraphMemory:  # fmt: skip
    """Returns the memory of a rank of a pipeline stage in a training.

    Args:
        shares: Whether data-parallel ranks share the weights.
        adds_up: Whether the gradients of several micro-batches are summed.
    """
    settings = config.decoder
    share = degrees.model_parallel
    width = number_width(half)
    tokens = micro_batch_tokens(config, degrees)
    again = facts.recomputed(config)
    chunks = stage_chunks(config, degrees, facts, stage)
    is_last = stage == degrees.pipeline_stage - 1
    slices = config.parallel.pipeline_config.slices
    mask = _mask_bytes(config, half)
    caches = _cache_bytes(settings, tokens, slices, width, share)
    copy_width = 0
    if half or shares:
        copy_width = width
    shares_state = config.parallel.enable_parallel_optimizer  # MindSpore then copies weights once, even on one rank
    keeps_gathered = shares_state and zero_level(config) != "level3"
    gathering = comm_recompute_layers(config)
    copies: list[int] = []  # that a pass has, by chunk
    kept: list[int] = []  # of a pass, by chunk
    working = 0
    for number, layers in enumerate(chunks):
        copies.append(0)
        kept.append(mask + caches.of_pass)
        receives = stage > 0 or number > 0
        for layer in layers:
            part = again[layer]
            gathers = layer in gathering
            kind = ("sublayers", settings.is_moe_layer(layer), gathers, share, config.parallel_config.use_seq_parallel)
            sublayers = facts.once(kind, lambda: _layer_sublayers(config, layer, gathers, half, share))  # noqa: B023
            kept[-1] += tokens * _saved_bytes(config, sublayers, part, share, receives and layer == layers[0])
            kept[-1] += caches.of_layer_and_pass
            remade = _remade(config, part, share)
            of_layer = matrices.layers[layer]
            layer_copies = {name: size * copy_width // FLOAT32_BYTES for name, size in of_layer.items()}
            copies[-1] += sum(size for name, size in layer_copies.items() if keeps_gathered or name not in remade)
            if degrees.pipeline_stage > 1 and len(remade) == 1 and not shares_state:
                copies[-1] += of_layer[remade[0]]  # MindSpore copies what the recomputed operators take (TensorMove)
            inside = sum(sublayers[name].saved for name in remade)
            gradients = sublayers["mlp"].backward - sublayers["mlp"].inside
            stream = sublayers["attention"].stream + width * settings.hidden_size
            transient = 0
            if not keeps_gathered:
                transient = max((layer_copies[name] for name in remade), default=0)
            if part == "block" and shares and not adds_up:
                transient += sum(of_layer.values()) * (4 + half) // 2
            working = max(working, tokens * (inside + gradients + stream) + transient)
    if half and is_last:
        copies[-1] += matrices.ends.get(HEAD, matrices.ends.get(EMBEDDING, 0)) * width // FLOAT32_BYTES
    losses = 0  # what the loss of each other pass under way keeps
    if is_last:
        vocabulary = _local_vocabulary(settings, share)
        logits = vocabulary * _LOGIT_BYTES  # of one head: a graph computes the gradient of each before the next one
        working = max(working, tokens * (logits + settings.hidden_size * (FLOAT32_BYTES + width)))
        losses = tokens * vocabulary * _LOSS_BYTES * (1 + facts.spec.mtp_modules)
    if shares and stage == 0 and degrees.pipeline_stage > 1:
        # The lookup of the last micro-batch under way: the gathered embedding, and rows before they are summed.
        rows = 2 * FLOAT32_BYTES * tokens * settings.hidden_size
        working = max(working, matrices.ends[EMBEDDING] + rows)
    tables = 2 * max(settings.seq_length, settings.max_positions) * settings.rotary_size * FLOAT32_BYTES
    causal = settings.seq_length**2 * len(chunks)
    moments = [
        (
            sum(one * (keeps_gathered or passes) for one, passes in zip(copies, counts, strict=True)),
            sum(one * passes for one, passes in zip(kept, counts, strict=True)) + losses * max(counts[-1] - 1, 0),
        )
        for counts, _ in stage_passes(config, degrees, facts, stage)
    ]
    copied, at_once = max(moments, key=sum)
    at_once += caches.of_layer * sum(map(len, chunks))
    return GraphMemory(copied, tables + causal, at_once + working)


def _mask_bytes(config: Config, half: bool) -> int:
    """Returns the bytes of the attention mask of a pass."""
    settings = config.decoder
    size = config.runner_config.batch_size * settings.seq_length**2 // config.parallel.pipeline_config.slices
    if is_flash(settings, half):
        return size
    return size * FLOAT32_BYTES


def _local_vocabulary(settings: ModelConfig, share: int) -> int:
    """Returns how many tokens of the vocabulary a rank has logits for."""
    if settings.vocab_size % share:
        return settings.vocab_size
    return settings.vocab_size // share


class _CacheBytes(NamedTuple):
    """Bytes of a rank for keys and values of whole sequences, where a pass takes a slice.

    Attributes:
        of_layer: The caches of a layer.
        of_layer_and_pass: What a layer keeps of a pass beside the keys and values of its slice.
        of_pass: What a model chunk keeps of a pass.
    """

    of_layer: int
    of_layer_and_pass: int
    of_pass: int


def _cache_bytes(settings: ModelConfig, tokens: int, slices: int, width: int, share: int) -> _CacheBytes:
    """Returns the bytes for keys and values of sequences of which a pass has `tokens`, one of `slices`."""
    if slices == 1:
        return _CacheBytes(0, 0, 0)
    spec = attention_spec(settings)
    keys = spec.kv_heads * spec.head_size * width // share
    both = spec.kv_heads * (spec.head_size + spec.value_size) * width // share
    # Keys, values and the gradients of both; the mask of a pass, as wide as keys, multiplies both.
    return _CacheBytes(2 * slices * tokens * both, (slices - 1) * tokens * both, slices * tokens * keys)


def stage_chunks(config: Config, degrees: Degrees, facts: ModelFacts, stage: int) -> list[list[int]]:
    """Returns the layers of each model chunk of a stage; modules belong to the last one."""
    chunks = [list(layers) for layers in facts.chunks(config, degrees)[stage]]
    if stage == degrees.pipeline_stage - 1:
        chunks[-1] += facts.spec.module_layers
    return chunks


def stage_passes(config: Config, degrees: Degrees, facts: ModelFacts, stage: int) -> list[tuple[tuple[int, ...], int]]:
    """Returns how many passes of each chunk wait for their backward pass at the same time, and the messages sent by
    then: what is sent exists until the end of the step, when a stage of explicit mode waits for all of it."""
    if degrees.pipeline_stage == 1:
        return [((1,), 0)]
    return facts.passes_at_once(config)[stage]


def _saved_bytes(
    config: Config, sublayers: Mapping[str, _SublayerMemory], part: str, share: int, received: bool
) -> int:
    """Returns the bytes that a layer saves for a token from its forward to its backward pass."""
    attention = sublayers["attention"]
    mlp = sublayers["mlp"]
    section = config.recompute_config
    # Results of communication that is not repeated are kept, and what lies before the last one.
    keeps_sent = share > 1 and not section.mp_comm_recompute
    if part == "block":
        if keeps_sent:
            return attention.saved + mlp.stream + mlp.normed
        if section.recompute_slice_activation and not received:
            return attention.stream // share
        return attention.stream
    if part == "mlp":
        return attention.saved + mlp.stream + mlp.normed * keeps_sent
    if part == "attention":
        return attention.stream + attention.normed * keeps_sent + mlp.saved
    return attention.saved + mlp.saved


def _remade(config: Config, part: str, share: int) -> tuple[str, ...]:
    """Returns the sublayers whose backward pass recomputes them and the copies of their weights."""
    if part == "block":
        if share == 1 or config.recompute_config.mp_comm_recompute:
            return ("attention", "mlp")
        return ("mlp",)
    if part:
        return (part,)
    return ()


def is_flash(settings: ModelConfig, half: bool) -> bool:
    """Returns whether the fused operator computes attention, which saves no probabilities."""
    if settings.attn_logit_softcapping is not None or settings.attention_sinks:
        return False
    return bool(settings.use_flash_attention) and half and settings.head_size % 16 == 0


def _layer_sublayers(config: Config, layer: int, gathers: bool, half: bool, share: int) -> dict[str, _SublayerMemory]:
    """Returns the bytes of a token in the sublayers of a layer.

    The residual stream is float32, and sequence parallelism shards it.

    Args:
        gathers: Whether the backward pass gathers the tokens before a product again.
    """
    settings = config.decoder
    width = number_width(half)
    hidden = settings.hidden_size
    shared = 1
    if config.parallel_config.use_seq_parallel:
        shared = share
    stream = FLOAT32_BYTES * hidden // shared
    normed = width * hidden  # each product of a rank needs all tokens
    if gathers:
        normed //= shared
    heads = _heads(settings, half) // share
    attention = _SublayerMemory(stream, normed, heads, heads)
    if settings.is_moe_layer(layer):
        inside = _experts(settings, width, share)
        return {"attention": attention, "mlp": _SublayerMemory(stream, normed, inside, inside)}
    columns = settings.ffn_size // share
    if settings.use_fused_swiglu and half:  # gate and up side by side, and their product
        inside = 3 * width * columns
        backward = 6 * width * columns
    else:  # gate, its SiLU and up in float32, and the product; gradients of two of them
        inside = (3 * FLOAT32_BYTES + width) * columns
        backward = 5 * FLOAT32_BYTES * columns
    return {"attention": attention, "mlp": _SublayerMemory(stream, normed, inside, backward)}


def _heads(settings: ModelConfig, half: bool) -> int:
    """Returns the bytes of queries, keys, values and results of all heads for a token."""
    width = number_width(half)
    spec = attention_spec(settings)
    queries = spec.heads * spec.head_size
    keys = spec.kv_heads * spec.head_size
    values = spec.heads * spec.value_size
    if spec.latent is not None:
        # Before and after their norms; queries, keys and values of all heads, cut, rotated and joined.
        heads = width * (2 * spec.latent.down_size + 5 * queries + 2 * values)
    else:  # what enters the norm of a head is float32
        heads = (width + FLOAT32_BYTES * spec.head_norm) * (queries + keys) + width * keys
    # Of the softmax the largest score and the sum, eight times each.
    scores = spec.heads * 64
    if not is_flash(settings, half):
        scores = kept_scores(spec, settings.seq_length, width)
    return heads + width * values + scores


def kept_scores(attention: AttentionSpec, length: int, width: int) -> int:
    """Returns the bytes that plain attention saves of a token's probabilities, in float32 and in a product's dtype.

    With a cap of the scores it saves their tanh, too. Each quarter of the tokens has the keys up to its end: ten
    sixteenths of all.
    """
    saved = FLOAT32_BYTES + width * (width < FLOAT32_BYTES)
    if attention.score_cap is not None:
        saved += FLOAT32_BYTES
    return attention.heads * length * saved * 10 // 16


def _experts(settings: ModelConfig, width: int, share: int) -> int:
    """Returns the bytes of a token in an MoE layer: scores, the routed rows, and the shared expert.

    The rows count before and after each operator that sorts, multiplies and adds them up; each of `share` ranks
    computes a part of them.
    """
    moe = moe_spec(settings)
    rows = moe.chosen * 4 * (moe.hidden + moe.width) * width // share
    shared = 3 * moe.shared_width * width // share + moe.hidden * width * bool(moe.shared_width)
    return 12 * moe.experts + rows + moe.hidden * width + shared
