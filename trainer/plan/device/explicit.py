"""Memory of a rank in explicit mode on an Ascend beside its weights and optimizer state: what a step holds at its peak.

What is counted is what MindSpore's allocator had in use at the peak of dry runs (`MS_ALLOC_CONF=memory_tracker:True`).
A backward pass goes through the layers from the last to the first; what they keep disappears, and gradients appear. The
peak is that of these moments: the loss and its gradient, the backward pass of each layer, and the end, when all
gradients are there. Beside them a compiled function holds, from call to call,

* what its forward pass saved last: once more what one layer keeps;
* the results of its backward pass: the gradient of the residual stream, and of a layer's weights;
* the tables and masks that it received last, and zeros that fill up gradients of slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.parallel import micro_batches_per_step
from trainer.models.spec.model import ModelSpec
from trainer.models.spec.names import EMBEDDING, HEAD
from trainer.parallel.mesh import Degrees
from trainer.parallel.sharding import BUCKET_BYTES, FLOAT32_BYTES
from trainer.plan.device.graph import number_width, stage_chunks, stage_passes
from trainer.plan.device.layers import LayerMemory, function_buffers, layer_memory
from trainer.plan.device.model_facts import ModelFacts
from trainer.plan.division import micro_batch_tokens

_PIECE = 1 << 24  # logits that the loss computes at a time
_PIECE_BYTES = 8  # that its compiled functions hold for each of them: two arrays in float32
_PENDING = 3  # buckets of gradients whose inputs exist at the same time, see `trainer.parallel.gradients`


class UnitGradients(NamedTuple):
    """Bytes of the gradients of a layer, or of a matrix outside of layers.

    Attributes:
        raw: As the backward pass computes them: of matrices with a copy in half precision in this.
        summed: In the dtype in which they are added up.
        largest: Of the largest matrix, in float32.
    """

    raw: int
    summed: int
    largest: int


class StageGradients(NamedTuple):
    """The gradients of a pipeline stage.

    Attributes:
        layers: By layer.
        ends: By the names of the parameters outside of layers.
        final: Bytes that the rank keeps of all sums: its shards where ranks share them.
        scatters: Whether ranks share the sums of each micro-batch (ZeRO stage 2).
    """

    layers: Mapping[int, UnitGradients]
    ends: Mapping[str, UnitGradients]
    final: int
    scatters: bool

    @property
    def total(self) -> int:
        """Returns the bytes of the sums of unshared gradients."""
        return sum(each.summed for each in (*self.layers.values(), *self.ends.values()))


class _Head(NamedTuple):
    """Bytes of the head and its loss.

    Attributes:
        kept: From its forward to its backward pass, beside the residual stream.
        working: While its gradients are computed.
        copies: In half precision, of a matrix that has no copy for all micro-batches.
        waits: Gradient of a matrix that is the embedding, too: it waits for that of the lookup.
        reduced: Gradients that ranks can add up at once.
        raw: The same as they are computed.
    """

    kept: int = 0
    working: int = 0
    copies: int = 0
    waits: int = 0
    reduced: int = 0
    raw: int = 0


def explicit_memory(
    config: Config, degrees: Degrees, facts: ModelFacts, stage: int, half: bool, gradients: StageGradients
) -> int:
    """Returns the bytes of activations and gradients of a pipeline stage at their peak."""
    settings = config.decoder
    tensor = degrees.model_parallel
    rows = 1
    if config.parallel_config.use_seq_parallel:
        rows = tensor
    spec = facts.once(("local", tensor), lambda: facts.spec.local(tensor))
    tokens = micro_batch_tokens(config, degrees)
    again = facts.recomputed(config)
    width = number_width(half)

    def layer_of(number: int) -> LayerMemory:
        """Returns the bytes of a layer, which are computed once for all equal layers."""
        layer = spec.layers[number]
        key = id(layer), again[number]  # `spec` lives as long as the facts
        if key not in different:
            different[key] = layer_memory(settings, layer, again[number], half, rows, degrees, tokens)
        return different[key]

    different: dict[tuple[int, str], LayerMemory] = {}
    chunks = []
    reached = []
    for layers in stage_chunks(config, degrees, facts, stage):
        reached += [number for number in layers if number >= facts.first]
        chunks.append({number: layer_of(number) for number in layers if number >= facts.first})
    kept = [sum(one.kept for one in layers.values()) for layers in chunks]
    stream = tokens * spec.hidden * FLOAT32_BYTES
    buffers = 2 * stream // rows  # gradients of the residual stream
    kinds = {(id(spec.layers[number]), id(facts.layers[number]), again[number]): number for number in reached}
    key = ("buffers", tuple(kinds), rows, degrees, tokens)
    parts = [(spec.layers[n], again[n], _is_frozen_in_part(facts, n)) for n in kinds.values()]
    buffers += facts.once(key, lambda: function_buffers(settings, parts, half, rows, degrees, tokens))
    if stage == 0:
        buffers += stream // rows  # rows of the embedding
        if tensor > 1:  # and before the ranks add them up, which each micro-batch keeps
            buffers += stream
            kept[0] += stream
    head = _Head()
    if stage == degrees.pipeline_stage - 1:
        head = _head(spec, facts, tokens, half, gradients)
        # Of the last call: the gradient of the stream, and its norm.
        buffers += tokens * spec.embedding * (FLOAT32_BYTES + width) + head.copies
    at_once = max(
        sum(one * passes for one, passes in zip(kept, counts, strict=True)) + sent * stream // rows
        for counts, sent in stage_passes(config, degrees, facts, stage)
    )
    return _step_peak(config, degrees, gradients, at_once + buffers, chunks, head)


def _is_frozen_in_part(facts: ModelFacts, layer: int) -> bool:
    """Returns whether a layer has frozen weights."""
    parameters = facts.layers[layer].parameters
    return any(not each.is_trained and each.spec.role != "buffer" for each in parameters)


def _step_peak(
    config: Config, degrees: Degrees, gradients: StageGradients, kept: int, chunks: Sequence[Mapping[int, LayerMemory]],
    head: _Head,
) -> int:  # fmt: skip
    """Returns the peak of a step from what its micro-batches keep and their backward passes take."""
    micro_batches = micro_batches_per_step(config, degrees)
    summed = gradients.total
    if degrees.pipeline_stage > 1:
        # Sums of the other micro-batches, whole until the end of the step, when ranks share them bucket by bucket.
        *others, last = chunks
        peaks = [_backward_peak(gradients, kept, layers, _Head(), 0) for layers in others]
        peaks.append(_backward_peak(gradients, kept + head.kept, last, head, 0))
        return summed + max(peaks)
    [layers] = chunks
    kept += head.kept
    if degrees.ranks == 1:
        sums = 0
        if micro_batches > 1:
            sums = summed
        return sums + _backward_peak(gradients, kept, layers, head, summed)
    reduced = _reduced_peak(gradients, kept, layers, head)
    if gradients.scatters:
        if micro_batches > 1:
            reduced += gradients.final
        return reduced
    if micro_batches == 1:
        return reduced
    first = _backward_peak(gradients, kept, layers, head, summed)
    if micro_batches > 2:
        first += summed
    # In the last micro-batch each sum takes the place of those before.
    working = max((one.working + gradients.layers[number].summed for number, one in layers.items()), default=0)
    return max(first, summed + kept + max(head.working, working))


def _backward_peak(
    gradients: StageGradients, kept: int, layers: Mapping[int, LayerMemory], head: _Head, end: int
) -> int:
    """Returns the peak of a backward pass whose gradients stay until its end.

    Args:
        kept: What all passes keep, the one of the head included.
        layers: Those that the pass goes through.
        end: Bytes of the gradients at the end, in the dtype of their sums.
    """
    peak = kept + head.working
    kept -= head.kept
    existing = head.waits + head.raw
    for number in sorted(layers, reverse=True):
        of_layer = gradients.layers[number]
        peak = max(peak, kept + existing + layers[number].working + of_layer.raw)
        existing += of_layer.raw
        kept -= layers[number].kept
    return max(peak, kept + max(existing + _lookup_gradient(gradients, head), end))


def _reduced_peak(gradients: StageGradients, kept: int, layers: Mapping[int, LayerMemory], head: _Head) -> int:
    """Returns the peak of a backward pass during which the ranks add up the gradients in buckets."""
    share = gradients.final / max(gradients.total, 1)
    peak = kept + head.working
    kept -= head.kept
    before = head.reduced
    existing = head.waits + before * share
    for number in sorted(layers, reverse=True):
        of_layer = gradients.layers[number]
        waiting = of_layer.raw
        if share < 1:  # a reduce-scatter has a result of its own beside its input
            waiting += before
        peak = max(peak, kept + int(existing) + layers[number].working + waiting)
        before = min(of_layer.summed, _PENDING * max(BUCKET_BYTES, of_layer.largest))
        existing += of_layer.summed * share
        kept -= layers[number].kept
    end = gradients.final + head.waits + _lookup_gradient(gradients, head)
    if share == 1 and EMBEDDING in gradients.ends:  # the last of them is among the sums
        end -= gradients.ends[EMBEDDING].raw
    return max(peak, kept + end)


def _lookup_gradient(gradients: StageGradients, head: _Head) -> int:
    """Returns the bytes of the gradient of the embedding, in float32; of one that is the head, too, also of the sum of
    both gradients."""
    if EMBEDDING not in gradients.ends:
        return 0
    return gradients.ends[EMBEDDING].raw * (1 + bool(head.waits))


def _head(spec: ModelSpec, facts: ModelFacts, tokens: int, half: bool, gradients: StageGradients) -> _Head:
    """Returns the bytes of the heads of the model and of its multi-token prediction modules."""
    width = number_width(half)
    heads = 1 + spec.mtp_modules
    matrix = spec.vocabulary * spec.embedding * width
    kept = heads * tokens * spec.embedding * width  # the norm of the stream
    # Of a module: the embeddings, their norm and that of the stream, and both joined.
    kept += spec.mtp_modules * tokens * spec.hidden * (FLOAT32_BYTES + 4 * width)
    # The gradient of the stream, to which that of a chunk of the vocabulary is added, and cast.
    working = tokens * spec.embedding * (FLOAT32_BYTES + 2 * width)
    copies = 0
    name = HEAD
    if spec.tied:
        name = EMBEDDING
    if half and (spec.tied or spec.mtp_modules):  # the matrix has no copy: each head casts it, and its gradient
        copies = heads * matrix
        gradient = matrix // width * (width + FLOAT32_BYTES)
    else:
        gradient = 2 * matrix  # chunk by chunk, and joined
    if name not in facts.trained:
        gradient = matrix  # zeros
    logits = min(tokens * spec.vocabulary, max(_PIECE, 128 * tokens)) * _PIECE_BYTES
    working += max(gradient, logits)
    of_matrix = 0
    if name in gradients.ends:
        of_matrix = gradients.ends[name].raw
    if heads > 1:  # that of the module's head, which comes first
        working += of_matrix
    ends = [each for end, each in gradients.ends.items() if end != EMBEDDING]
    reduced = sum(each.summed for each in ends)
    return _Head(kept, working, copies, of_matrix * spec.tied, reduced, sum(each.raw for each in ends))
