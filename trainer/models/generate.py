"""Text generation: greedy or sampled continuation of a batch of prompts with a key/value cache.

One pass over each piece of the prompts, then one token a step for all sequences. On a CPU a pass runs in NumPy (see
trainer/arrays/inference.py), on a device operator by operator, without compilation.

Legend: B sequences, Q new tokens of a pass, N = B * Q, S cached positions, D hidden, C = heads * head size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn

from trainer.arrays.memory import host_threads, parts
from trainer.errors import RunError
from trainer.models.block import Block
from trainer.models.moe import HostMoeLayer
from trainer.models.spec.names import EMBEDDING, adapter_names
from trainer.models.spec.shapes import adapted_projections, block_names
from trainer.parallel.sharding import range_of_rank

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder
    from trainer.parallel.host_group import HostGroup

_ROUND = 32  # on a device the length that attention sees is a multiple of this, so that few shapes occur
_MOST_PROMPT_TOKENS = 256  # of each sequence in a pass: its scores are [H, Q, S] numbers for each sequence
_SHARED_WORK = 1 << 23  # multiplications of a layer from which threads share the sequences of a pass


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        do_sample: Sample a token; False takes the most likely one.
        temperature: Divides the logits before sampling.
        top_k: Sample from this many most likely tokens; 0: from all.
        top_p: Sample from the most likely tokens whose probabilities add up to this; 1.0: from all.
        repetition_penalty: Divides positive (multiplies negative) logits of tokens that the sequence has already; 1.0:
            off.
        seed: Seed of the samples. Each sequence and position has its own random stream, so that a sequence does not
            depend on the others of its batch.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


def choose_token(logits_V: np.ndarray, seen: Sequence[int], sampling: Sampling, row: int, position: int) -> int:
    """The next token of a sequence with the tokens `seen`; sequence number `row` and `position` name the random stream.
    """
    if not sampling.do_sample and sampling.repetition_penalty == 1.0:
        return int(logits_V.argmax())
    logits = logits_V.astype(np.float64)
    if sampling.repetition_penalty != 1.0:
        ids = np.unique(np.asarray(seen, np.int64))
        penalty = sampling.repetition_penalty
        logits[ids] = np.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
    if not sampling.do_sample:
        return int(logits.argmax())
    logits /= sampling.temperature
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    probabilities = np.exp(logits[order] - logits[order[0]])
    probabilities /= probabilities.sum()
    if sampling.top_p < 1.0:
        # A token is kept while the more likely ones add up to less than top_p, so the first always is.
        keep = np.cumsum(probabilities) - probabilities < sampling.top_p
        order, probabilities = order[keep], probabilities[keep] / probabilities[keep].sum()
    stream = np.random.Generator(np.random.Philox(key=[sampling.seed, 0x9E], counter=[0, 0, row, position]))
    return int(order[np.searchsorted(np.cumsum(probabilities), stream.random(), side="right").clip(max=len(order) - 1)])


class StageChunk(NamedTuple):
    """Layers that a rank computes one after the other.

    Attributes:
        receive: Waits for their input from another stage of a pipeline; None where they read tokens.
        send: Takes their result there; None where logits follow.
    """

    layers: Sequence[int]
    receive: Callable[[], np.ndarray] | None = None
    send: Callable[[np.ndarray], None] | None = None


class Generator:
    """Continues prompts with a decoder; `build_inputs` has the position tables, and `eos_ids` end a sequence.

    In a pipeline `chunks` are those of this stage, and `share` gives all stages the logits of the last one, which takes
    None from the others. Where ranks divide a model, `agree` makes the new tokens of one of them those of all, whatever
    the rounding of their processors.
    """

    def __init__(
        self,
        model: Decoder,
        build_inputs: InputBuilder,
        eos_ids: Sequence[int],
        chunks: Sequence[StageChunk] | None = None,
        share: Callable[[np.ndarray | None], np.ndarray] = lambda logits_BV: logits_BV,
        agree: Callable[[list[int | None]], list[int | None]] = lambda tokens: tokens,
    ) -> None:
        self.model, self.eos_ids, self.share, self.agree = model, frozenset(eos_ids), share, agree
        self.chunks = chunks or [StageChunk(range(model.settings.num_layers))]
        self.parts: DeviceParts | HostParts = (HostParts if model.kernels.host else DeviceParts)(model, build_inputs)

    def stream(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], sampling: Sampling, first_row: int = 0
    ) -> Iterator[list[int | None]]:
        """Yields, step by step, the new token of every sequence; None for a sequence that has ended.

        Args:
            prompts: Token ids of each sequence, none empty.
            max_tokens: The largest number of new tokens of each sequence.
            first_row: Number of the first sequence among all prompts, for the random streams.

        Raises:
            RunError: The model's output is not finite.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        capacity = int(max(length + extra for length, extra in zip(lengths, max_tokens, strict=True)))
        cache = self.new_cache(len(prompts), capacity)
        rows = [list(prompt) for prompt in prompts]
        ids_BQ = np.zeros((len(prompts), int(lengths.max())), np.int32)
        for row, prompt in enumerate(prompts):
            ids_BQ[row, : len(prompt)] = prompt
        logits_BV = self.read_prompts(cache, ids_BQ, lengths)
        left = list(max_tokens)
        while True:
            chosen = self.agree([
                choose_token(logits_BV[row], tokens, sampling, first_row + row, len(tokens)) if left[row] > 0 else None
                for row, tokens in enumerate(rows)
            ])  # fmt: skip
            for row, token in enumerate(chosen):
                if token is not None:
                    left[row] = 0 if token in self.eos_ids else left[row] - 1
                    rows[row].append(token)
            if all(token is None for token in chosen):
                return
            yield chosen
            if not any(left):
                return
            starts = np.array([len(tokens) - 1 for tokens in rows])
            last_B1 = np.array([[tokens[-1]] for tokens in rows], np.int32)
            logits_BV = self.forward(cache, last_B1, starts, np.zeros_like(starts))

    def new_cache(self, rows: int, tokens: int) -> Cache | HostCache:
        """An empty cache for so many sequences of so many tokens."""
        return self.parts.new_cache(rows, tokens)

    def read_prompts(self, cache: Cache | HostCache, ids_BQ: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
        """Logits [B, V] after the last token of each prompt; `ids_BQ` may have anything after it."""
        logits_BV = None
        for first in range(0, ids_BQ.shape[1], _MOST_PROMPT_TOKENS):
            piece_BQ, last_B = ids_BQ[:, first : first + _MOST_PROMPT_TOKENS], lengths_B - 1 - first
            ends_B = (0 <= last_B) & (last_B < piece_BQ.shape[1])
            last_B = last_B.clip(0, piece_BQ.shape[1] - 1)
            of_piece_BV = self.forward(cache, piece_BQ, np.full_like(lengths_B, first), last_B)
            logits_BV = of_piece_BV if logits_BV is None else logits_BV
            logits_BV[ends_B] = of_piece_BV[ends_B]
        return logits_BV

    def forward(
        self, cache: Cache | HostCache, ids_BQ: np.ndarray, starts_B: np.ndarray, last_B: np.ndarray
    ) -> np.ndarray:
        """Logits [B, V] after token number `last` of each sequence in this pass, whose first position is `starts`."""
        parts, settings = self.parts, self.model.settings
        rows, width = ids_BQ.shape
        heads = settings.num_heads, parts.block.attention.cache_heads
        positions_BQ = np.minimum(starts_B[:, None] + np.arange(width), cache.capacity - 1)
        seen = parts.seen(int(positions_BQ.max()) + 1)
        allowed_BQS = np.arange(seen) <= positions_BQ[:, :, None]
        masks = [parts.kernels.cached_mask(allowed_BQS, *heads)]
        if settings.window_layers:
            near_BQS = allowed_BQS & (np.arange(seen) > positions_BQ[:, :, None] - settings.sliding_window)
            masks.append(parts.kernels.cached_mask(near_BQS, *heads))
        tables = parts.tables(positions_BQ.reshape(-1))
        cache.place(positions_BQ, seen)
        logits_BV = None
        for chunk in self.chunks:
            x_ND = parts.embed(ids_BQ.reshape(-1)) if chunk.receive is None else chunk.receive()
            x_ND = parts.run_layers(chunk.layers, x_ND, tables, masks, cache)
            if chunk.send is None:
                logits_BV = parts.logits(x_ND, (np.arange(rows) * width + last_B).astype(np.int32))
            else:
                chunk.send(x_ND)
        logits_BV = self.share(logits_BV)
        if not np.isfinite(logits_BV).all():
            rule = "the model's output is not finite: its weights have diverged or are damaged"
            raise RunError(rule, fix="use another checkpoint")
        return logits_BV


def _run_layers(parts, layers, x_ND, tables, masks, cache):
    """As `DeviceParts.run_layers`, for both kinds of parts."""
    attention, attend, has_window = parts.block.attention, parts.kernels.cached_attention, parts.has_window
    for layer in layers:
        weights = parts.weights(layer)
        q_NC, *new = attention.project(x_ND, tables[0:2], tables[2:4], weights)
        cached = cache.update(layer, new)
        x_ND = x_ND + attention.over_cache(attend, q_NC, cached, masks[has_window(layer)], weights)
        x_ND = parts.feed_forward(layer, x_ND, weights)
    return x_ND


class DeviceParts:
    """What a pass consists of, with the model's own kernels: tensors go from part to part."""

    def __init__(self, model: Decoder, build_inputs: InputBuilder) -> None:
        self.model, self.kernels, self.block, self.tables = model, model.kernels, model.block, build_inputs.tables
        self.has_window = model.settings.has_window

    def new_cache(self, rows: int, tokens: int) -> Cache:
        return Cache(self.model, rows, self.seen(tokens))

    def seen(self, positions: int) -> int:
        """How many cached positions attention sees where it must see so many."""
        return -(-positions // _ROUND) * _ROUND

    def weights(self, layer: int) -> list[Tensor | None]:
        return [*self.model.layer_weights[layer], *self.model.adapter_masks(None, layer, 0)]

    def embed(self, ids_N: np.ndarray) -> Tensor:
        return self.model.run_embedding(Tensor(ids_N))

    def run_layers(
        self, layers: Sequence[int], x_ND: Tensor, tables: Sequence[Tensor], masks: Sequence[Tensor], cache: Cache
    ) -> Tensor:
        """The residual stream after layers that follow each other; `masks` are those without and with a window."""
        return _run_layers(self, layers, x_ND, tables, masks, cache)

    def feed_forward(self, layer: int, x_ND: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        """The residual stream after the feed-forward sublayer of a layer."""
        experts = self.model.layers[layer].get("experts")
        return x_ND + self.block.mlp(x_ND, weights) if experts is None else experts(x_ND)[0]

    def logits(self, x_ND: Tensor, ends_B: np.ndarray) -> np.ndarray:
        """Logits after the tokens `ends`, [B, V]."""
        return self.model.logits_of(self.kernels.gather_rows(x_ND, Tensor(ends_B))).asnumpy()


class HostParts:
    """The same with NumPy's kernels: arrays go from part to part.

    Weights are read where the model has them. In half precision matrices are rounded once, to copies in float32; an
    adapted matrix has a copy with its adapter.

    Ranks that divide the model all have the same tokens. A tensor-parallel rank caches its own heads, and what its
    columns of a matrix give is summed; each rank has the logits of the whole vocabulary.
    """

    def __init__(self, model: Decoder, build_inputs: InputBuilder) -> None:
        self.settings = settings = model.settings
        self.kernels = kernels = model.kernels.host()
        self.block, self.linear, self.has_window = Block(settings, kernels), kernels.linear(), settings.has_window
        self.vocabulary, self.divided = None, model.shard is not None
        if model.tensor is not None:
            self.vocabulary = Vocabulary(model.tensor.group, model.shard.layout.parameters[EMBEDDING].shape[0])
            for projection in (self.block.attention.out, self.block.mlp.down):
                projection.linear = kernels.summed_linear(model.tensor.group)
        _call_directly(self.block)
        self.cos, self.sin = build_inputs.cos, build_inputs.sin
        self.norm = kernels.rms_norm(settings.embedding_width, settings.rms_norm_eps)
        self.of_layers = [self._layer(model, layer) for layer in range(settings.num_layers)]
        self.moe = HostMoeLayer(settings, kernels, model.moe, model.shard) if model.moe is not None else None
        experts = [model.layers[layer].get("experts") for layer in range(settings.num_layers)]
        # The router and the gate of shared experts multiply in float32.
        self.of_experts = [
            one and [self._matrix(weight) if weight.ndim == 3 and not kernels.precision.by
                     or ".shared_experts." in weight.name else weight.asnumpy() for weight in one.weights]
            for one in experts
        ]  # fmt: skip
        self.layer_size = max(map(self._size, range(settings.num_layers)))
        self.embedding, self.final_norm = (
            one if one is None else one.asnumpy() for one in (model.embedding, model.final_norm)
        )  # a stage of a pipeline may lack them
        self.head, self.mapping_in, self.mapping_out = (
            one if one is None else self._matrix(one)
            for one in (model.head_weight, model.mapping_in, model.mapping_out)
        )

    def _matrix(self, weight: Parameter) -> np.ndarray:
        return self.kernels.rounded(weight.asnumpy().astype(np.float32, copy=False))

    def _layer(self, model: Decoder, layer: int) -> list[np.ndarray | None]:
        """The weights of a block as `block_names`, without adapters."""
        names, parameters = block_names(self.settings), model.layer_weights[layer]
        found = [
            None if one is None else self._matrix(one) if one.ndim == 2 and ".lora_" not in one.name else one.asnumpy()
            for one in parameters
        ]
        for projection in adapted_projections(self.settings):
            a, b = (names.index(name) for name in adapter_names(projection))
            if found[a] is not None:
                place, scale = names.index(f"{projection}.weight"), np.float32(self.settings.pet_config.scale)
                found[place] = found[place] + (found[b] * scale) @ found[a]
                found[a] = found[b] = None
        return [*found, *(None for _ in names[len(found) :])]

    def _size(self, layer: int) -> int:
        """The numbers of a layer's matrices that a token is multiplied with."""
        matrices = [one for one in (*self.of_layers[layer], *(self.of_experts[layer] or ())) if one is not None]
        of_experts = sum(one[0].size for one in matrices if one.ndim == 3)  # [experts, rows, columns]
        chosen = self.settings.moe_config.num_experts_chosen if of_experts else 0
        return chosen * of_experts + sum(one.size for one in matrices if one.ndim == 2)

    def new_cache(self, rows: int, tokens: int) -> HostCache:
        dtype = self.kernels.precision.compute.dtype
        heads, dtype = self.block.attention.cache_heads, "float32" if dtype == "bfloat16" else dtype
        return HostCache(self.settings, heads, rows, tokens, dtype)

    def seen(self, positions: int) -> int:
        return positions

    def tables(self, positions_N: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.kernels.rotary_tables(self.cos[positions_N], self.sin[positions_N]) * 2

    def weights(self, layer: int) -> list[np.ndarray | None]:
        return self.of_layers[layer]

    def embed(self, ids_N: np.ndarray) -> np.ndarray:
        x_NE = self.embedding[ids_N] if self.vocabulary is None else self.vocabulary.rows(self.embedding, ids_N)
        return x_NE if self.mapping_in is None else self.linear(x_NE, self.mapping_in)

    def run_layers(
        self, layers: Sequence[int], x_ND: np.ndarray, tables: Sequence[np.ndarray],
        masks: Sequence[np.ndarray | None], cache: HostCache,
    ) -> np.ndarray:  # fmt: skip
        """As `DeviceParts.run_layers`. Threads share the sequences, and go through all layers without waiting."""
        rows, threads = len(cache.positions_BQ), host_threads()
        # With less to compute, threads would wait for each other: only one at a time is in Python.
        if self.divided or rows == 1 or len(x_ND) * self.layer_size < _SHARED_WORK:
            return _run_layers(self, layers, x_ND, tables, masks, cache)
        out_ND, width = np.empty_like(x_ND), len(x_ND) // rows

        def run(part: slice, thread: int) -> None:
            tokens = slice(part.start * width, part.stop * width)
            of_part = [table[tokens] for table in tables], [mask if mask is None else mask[part] for mask in masks]
            out_ND[tokens] = _run_layers(self, layers, x_ND[tokens], *of_part, cache.part(part))

        threads.run(parts(slice(0, rows), -(-rows // threads.threads)), run)
        return out_ND

    def feed_forward(self, layer: int, x_ND: np.ndarray, weights: Sequence[np.ndarray | None]) -> np.ndarray:
        experts = self.of_experts[layer]
        return x_ND + self.block.mlp(x_ND, weights) if experts is None else self.moe(x_ND, experts)

    def logits(self, x_ND: np.ndarray, ends_B: np.ndarray) -> np.ndarray:
        x_BE = x_ND[ends_B] if self.mapping_out is None else self.linear(x_ND[ends_B], self.mapping_out)
        logits_BV = self.linear(self.norm(x_BE, self.final_norm), self.head)
        return logits_BV if self.vocabulary is None else self.vocabulary.whole(logits_BV)


class Vocabulary(NamedTuple):
    """A vocabulary of which each rank of a group has a part."""

    group: HostGroup
    size: int

    @property
    def own(self) -> slice:
        return range_of_rank(self.size, self.group.rank, self.group.size)

    def rows(self, embedding_VE: np.ndarray, ids_N: np.ndarray) -> np.ndarray:
        """The embeddings of tokens of any rank."""
        place_N = ids_N - self.own.start
        inside_N = (place_N >= 0) & (place_N < len(embedding_VE))
        return self.group.all_reduce(embedding_VE[np.where(inside_N, place_N, 0)] * inside_N[:, None])

    def whole(self, own_BV: np.ndarray) -> np.ndarray:
        """The logits of all ranks."""
        logits_BV = np.empty((len(own_BV), self.size), np.float32)
        logits_BV[:, self.own] = own_BV
        self.group.complete_ranges(list(logits_BV))
        return logits_BV


class Cache:
    """What each layer keeps of every token, keys and values or what they are made from, written in place.

    Two arrays of a layer, [B * S, width] with the widths of `ModelConfig.cache_widths`.
    """

    def __init__(self, model: Decoder, rows: int, capacity: int) -> None:
        settings, dtype = model.settings, model.kernels.compute_dtype
        self.rows, self.capacity, self.write = rows, capacity, model.kernels.write_rows

        def empty(name: str, width: int) -> Parameter:
            zeros = Tensor(np.zeros((rows * capacity, width), np.float32), dtype)
            return Parameter(zeros, name=name, requires_grad=False)

        self.layers = [
            tuple(empty(f"cache.{layer}.{number}", width) for number, width in enumerate(settings.cache_widths))
            for layer in range(settings.num_layers)
        ]
        self.index, self.seen = Tensor(np.zeros(1, np.int32)), 0

    def place(self, positions_BQ: np.ndarray, seen: int) -> None:
        """Sets where the next calls of `update` write and how many positions they return."""
        offsets = np.arange(self.rows)[:, None] * self.capacity
        self.index, self.seen = Tensor((offsets + positions_BQ).reshape(-1).astype(np.int32)), seen

    def update(self, layer: int, new: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Writes what a layer keeps of new tokens; returns the cached arrays, [B, seen, width]."""
        found = []
        for store, rows in zip(self.layers[layer], new, strict=True):
            self.write(store, self.index, rows)
            found.append(store.reshape(self.rows, self.capacity, -1)[:, : self.seen])
        return found[0], found[1]


class HostCache:
    """The same as arrays [B, K, capacity, d], in the dtype of the matrix products, or float32 for bfloat16, which NumPy
    lacks: what a head reads is contiguous. K is 1 where all heads share what is kept."""

    def __init__(self, settings: ModelConfig, heads: int, rows: int, capacity: int, dtype: str) -> None:
        self.capacity, self.sequences_B1, self.positions_BQ, self.seen = capacity, np.arange(rows)[:, None], None, 0
        self.layers = [
            tuple(np.zeros((rows, heads, capacity, width // heads), dtype) for width in settings.cache_widths)
            for _ in range(settings.num_layers)
        ]

    def place(self, positions_BQ: np.ndarray, seen: int) -> None:
        self.positions_BQ, self.seen = positions_BQ, seen

    def part(self, rows: slice) -> HostCache:
        """That of some of the sequences, where it is placed."""
        found = copy.copy(self)
        found.positions_BQ = self.positions_BQ[rows]
        found.sequences_B1 = np.arange(len(found.positions_BQ))[:, None]
        found.layers = [tuple(store[rows] for store in stores) for stores in self.layers]
        return found

    def update(self, layer: int, new: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """As `Cache.update`; returns [B, K, seen, d], or [B, seen, d] where all heads share it."""
        heads = self.layers[layer][0].shape[1]
        for store, rows in zip(self.layers[layer], new, strict=True):
            store[self.sequences_B1, :, self.positions_BQ] = rows.reshape(*self.positions_BQ.shape, heads, -1)
        first, second = (store[:, :, : self.seen] if heads > 1 else store[:, 0, : self.seen]
                         for store in self.layers[layer])  # fmt: skip
        return first, second


def _call_directly(cell: nn.Cell) -> None:
    """Makes calls of a cell and of those inside it calls of their `construct`: what MindSpore does first takes ten
    microseconds, as long as a small product."""
    cell.__class__ = _direct(type(cell))
    for name, inner in cell.name_cells().items():
        _call_directly(inner)
        cell.__dict__[name] = inner  # found without the search that follows where there is no attribute


@functools.cache
def _direct(kind: type[nn.Cell]) -> type[nn.Cell]:
    return type(kind.__name__, (kind,), {"__call__": kind.construct})
