"""Text generation: greedy or sampled continuation of a batch of prompts with a key/value cache.

One pass over each piece of the prompts, then one token a step for all sequences. On a CPU a pass runs in NumPy (see
`ArrayPredictor`), on a device operator by operator, without compilation.

Legend: B sequences, Q new tokens of a pass, N = B * Q, S cached positions, D hidden, C = heads * head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor

from trainer.arrays.attention.cache import KVCache, cached_mask
from trainer.arrays.attention.positions import Rotary
from trainer.arrays.attention.sublayer import CpuAttention
from trainer.arrays.memory import host_threads, parts
from trainer.arrays.mlp import CpuMlp
from trainer.arrays.moe.sublayer import CpuMoe
from trainer.arrays.sublayer import SublayerCall
from trainer.arrays.tiles import RmsNorm, Scratch
from trainer.errors import RunError
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import AttentionSpec, MlpSpec, MoeSpec
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD, MAPPING_IN, MAPPING_OUT, adapter_names
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.routing import RoutingRule
from trainer.parallel.sharding import range_of_rank

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder
    from trainer.models.spec.model import LayerSpec

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
    the rounding of their processors. `native`: with native CPU layers; None: where the model has them.
    """

    def __init__(
        self,
        model: Decoder,
        build_inputs: InputBuilder,
        eos_ids: Sequence[int],
        chunks: Sequence[StageChunk] | None = None,
        share: Callable[[np.ndarray | None], np.ndarray] = lambda logits_BV: logits_BV,
        agree: Callable[[list[int | None]], list[int | None]] = lambda tokens: tokens,
        native: bool | None = None,
    ) -> None:
        self.model, self.eos_ids, self.share, self.agree = model, frozenset(eos_ids), share, agree
        self.chunks = chunks or [StageChunk(range(model.settings.num_layers))]
        if native is None:
            native = model.kernels.host_layers
        kind = ArrayPredictor if native else DeviceParts
        self.parts: DeviceParts | ArrayPredictor = kind(model, build_inputs)

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

    def new_cache(self, rows: int, tokens: int) -> Cache | KVCache:
        """An empty cache for so many sequences of so many tokens."""
        return self.parts.new_cache(rows, tokens)

    def read_prompts(self, cache: Cache | KVCache, ids_BQ: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
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
        self, cache: Cache | KVCache, ids_BQ: np.ndarray, starts_B: np.ndarray, last_B: np.ndarray
    ) -> np.ndarray:
        """Logits [B, V] after token number `last` of each sequence in this pass, whose first position is `starts`."""
        parts, settings = self.parts, self.model.settings
        rows, width = ids_BQ.shape
        positions_BQ = np.minimum(starts_B[:, None] + np.arange(width), cache.capacity - 1)
        seen = parts.cached_length(int(positions_BQ.max()) + 1)
        allowed_BQS = np.arange(seen) <= positions_BQ[:, :, None]
        masks = [parts.masks(allowed_BQS)]
        if settings.window_layers:
            near_BQS = allowed_BQS & (np.arange(seen) > positions_BQ[:, :, None] - settings.sliding_window)
            masks.append(parts.masks(near_BQS))
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


class DeviceParts:
    """What a pass consists of, with the model's own kernels: tensors go from part to part."""

    def __init__(self, model: Decoder, build_inputs: InputBuilder) -> None:
        self.model, self.kernels, self.tables = model, model.kernels, build_inputs.tables
        self.parts, self.block = model.parts, model.parts.block
        self.has_window = model.settings.has_window

    def new_cache(self, rows: int, tokens: int) -> Cache:
        return Cache(self.model, rows, self.cached_length(tokens))

    def cached_length(self, positions: int) -> int:
        """How many cached positions attention sees where it must see so many."""
        return -(-positions // _ROUND) * _ROUND

    def masks(self, allowed_BQS: np.ndarray) -> Tensor:
        """What attention adds to its scores."""
        return self.kernels.cached_mask(allowed_BQS)

    def weights(self, layer: int) -> list[Tensor | None]:
        return [*self.parts.layer_weights[layer], *self.parts.adapter_masks(None, layer, 0)]

    def embed(self, ids_N: np.ndarray) -> Tensor:
        return self.model.run_embedding(Tensor(ids_N))

    def run_layers(
        self, layers: Sequence[int], x_ND: Tensor, tables: Sequence[Tensor], masks: Sequence[Tensor], cache: Cache
    ) -> Tensor:
        """The residual stream after layers that follow each other; `masks` are those without and with a window."""
        attention, attend = self.block.attention, self.kernels.cached_attention
        for layer in layers:
            weights = self.weights(layer)
            q_NC, *new = attention.project(x_ND, tables[0:2], tables[2:4], weights)
            cached = cache.update(layer, new)
            x_ND = x_ND + attention.over_cache(attend, q_NC, cached, masks[self.has_window(layer)], weights)
            x_ND = self.feed_forward(layer, x_ND, weights)
        return x_ND

    def feed_forward(self, layer: int, x_ND: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        """The residual stream after the feed-forward sublayer of a layer."""
        experts = self.parts.layers[layer].get("experts")
        return x_ND + self.block.mlp(x_ND, weights) if experts is None else experts(x_ND)[0]

    def logits(self, x_ND: Tensor, ends_B: np.ndarray) -> np.ndarray:
        """Logits after the tokens `ends`, [B, V]."""
        return self.model.logits_of(self.kernels.gather_rows(x_ND, Tensor(ends_B))).asnumpy()


class Cache:
    """What each layer keeps of every token, keys and values or what they are made from, written in place.

    Two arrays of a layer, [B * S, width] with the widths of `AttentionSpec.cache_widths`.
    """

    def __init__(self, model: Decoder, rows: int, capacity: int) -> None:
        settings, dtype = model.settings, model.kernels.compute_dtype
        widths = attention_spec(settings).cache_widths
        self.rows, self.capacity, self.write = rows, capacity, model.kernels.write_rows

        def empty(name: str, width: int) -> Parameter:
            zeros = Tensor(np.zeros((rows * capacity, width), np.float32), dtype)
            return Parameter(zeros, name=name, requires_grad=False)

        self.layers = [
            tuple(empty(f"cache.{layer}.{number}", width) for number, width in enumerate(widths))
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


class ArrayPredictor:
    """What a pass consists of: arrays go from part to part.

    Weights are read where the model has them, in float32; a matrix with an adapter has a merged copy. Ranks that share
    the model all have the same tokens. A tensor-parallel rank caches its own heads, and what its columns of a matrix
    give is summed; each rank has the logits of the whole vocabulary.
    """

    def __init__(self, model: Decoder, build_inputs: InputBuilder) -> None:
        host_threads()  # they limit the threads of NumPy's own library, which would poll between two products
        self.spec = model_spec(model.settings)
        self.settings = model.settings
        self.scratch = Scratch(shares_products=True)
        self.tensor = None
        self.vocabulary = model.settings.vocab_size
        self.is_sharded = model.shard is not None
        if model.tensor is not None:
            self.tensor = model.tensor._replace(shares_rows=False)
            self.vocabulary = model.shard.layout.parameters[EMBEDDING].shape[0]
        self.cos, self.sin = build_inputs.cos, build_inputs.sin
        self.rotary = Rotary(self.spec.layers[0].attention)
        self.weights = {name: parameter.asnumpy() for name, parameter in model.parameters_by_name.items()}
        self.norm = RmsNorm(self.spec.embedding, self.spec.eps)
        self.attentions: dict[AttentionSpec, CpuAttention] = {}
        self.mlps: dict[MlpSpec | MoeSpec, CpuMlp | CpuMoe] = {}
        experts = None if model.shard is None else model.shard.experts
        for layer in self.spec.layers:
            self._make_sublayers(layer.attention, layer.mlp, experts)
        self.calls = [
            SublayerCall(self._layer_weights(layer), save=False) for layer in range(self.spec.num_layers)
        ]
        layers = self.spec.layers[: self.spec.num_layers]
        self.work = max((_multiplications(layer) for layer in layers), default=0)

    def _make_sublayers(self, attention: AttentionSpec, mlp: MlpSpec | MoeSpec, experts) -> None:
        if attention not in self.attentions:
            plain = replace(attention, adapters={})
            self.attentions[attention] = CpuAttention(plain, self.scratch, self.tensor, pairs=False)
        if mlp in self.mlps:
            return
        if isinstance(mlp, MoeSpec):
            rule = RoutingRule.of(self.settings.experts)
            self.mlps[mlp] = CpuMoe(
                mlp, self.settings.experts, rule, self.scratch, self.tensor, experts, predicts=True
            )
        else:
            self.mlps[mlp] = CpuMlp(replace(mlp, adapters={}), self.scratch, self.tensor)

    def _layer_weights(self, number: int) -> Mapping[str, np.ndarray]:
        layer = self.spec.layers[number]
        names = {one.name: self.spec.parameter_name(number, one.name) for one in layer.parameters}
        found = {name: self.weights[full] for name, full in names.items() if full in self.weights}
        for name, adapter in layer.adapters.items():
            a, b = adapter_names(name)
            if f"{name}.weight" in found:
                found[f"{name}.weight"] = found[f"{name}.weight"] + (found[b] * np.float32(adapter.scale)) @ found[a]
        return found

    def new_cache(self, rows: int, tokens: int) -> KVCache:
        """Returns an empty cache for so many sequences of so many tokens."""
        attention = self.spec.layers[0].attention
        return KVCache(len(self.calls), attention.cache_widths, attention.cache_heads, rows, tokens)

    def cached_length(self, positions: int) -> int:
        """Returns how many cached positions attention sees where it must see so many."""
        return positions

    def masks(self, allowed_BQS: np.ndarray) -> np.ndarray | None:
        """Returns what attention adds to its scores."""
        attention = self.spec.layers[0].attention
        return cached_mask(allowed_BQS, attention.heads // attention.cache_heads)

    def tables(self, positions_N: np.ndarray) -> np.ndarray:
        """Returns the rotation of tokens at these positions."""
        return self.rotary.table(self.cos[positions_N], self.sin[positions_N])

    def embed(self, ids_N: np.ndarray) -> np.ndarray:
        """Returns the residual stream of tokens, [N, D]."""
        embedding_VE = self.weights[EMBEDDING]
        if self.tensor is None:
            x_NE = embedding_VE[ids_N]
        else:
            group = self.tensor.group
            place_N = ids_N - range_of_rank(self.vocabulary, group.rank, group.size).start
            inside_N = (place_N >= 0) & (place_N < len(embedding_VE))
            x_NE = group.all_reduce(embedding_VE[np.where(inside_N, place_N, 0)] * inside_N[:, None])
        if MAPPING_IN not in self.weights:
            return x_NE
        return self._project(x_NE, self.weights[MAPPING_IN])

    def _project(self, x_NI: np.ndarray, weight_OI: np.ndarray) -> np.ndarray:
        out_NO = np.empty((len(x_NI), len(weight_OI)), np.float32)
        self.scratch.tile(slice(0, len(x_NI)), 0).project(x_NI, weight_OI, out_NO)
        return out_NO

    def run_layers(
        self, layers: Sequence[int], x_ND: np.ndarray, rotation_N1h: np.ndarray, masks: Sequence[np.ndarray | None],
        cache: KVCache,
    ) -> np.ndarray:  # fmt: skip
        """Returns the residual stream after layers that follow each other; `masks` are those without and with a window.

        Threads share the sequences, and go through all layers without waiting.
        """
        rows, threads = len(cache.positions_BQ), host_threads()
        # With less to compute, threads would wait for each other: only one at a time is in Python.
        if self.is_sharded or rows == 1 or len(x_ND) * self.work < _SHARED_WORK:
            return self._run_layers(layers, x_ND, rotation_N1h, masks, cache, 0)
        out_ND = np.empty_like(x_ND)
        width = len(x_ND) // rows

        def run(part: slice, thread: int) -> None:
            tokens = slice(part.start * width, part.stop * width)
            of_part = [mask if mask is None else mask[part] for mask in masks]
            inputs = x_ND[tokens], rotation_N1h[tokens], of_part, cache.part(part)
            out_ND[tokens] = self._run_layers(layers, *inputs, thread)

        threads.run(parts(slice(0, rows), -(-rows // threads.threads)), run)
        return out_ND

    def _run_layers(
        self, layers: Sequence[int], x_ND: np.ndarray, rotation_N1h: np.ndarray, masks: Sequence[np.ndarray | None],
        cache: KVCache, thread: int,
    ) -> np.ndarray:  # fmt: skip
        rows = slice(0, len(x_ND))
        for layer in layers:
            spec, call = self.spec.layers[layer], self.calls[layer]
            mask = masks[spec.attention.window is not None]
            attention, mlp = self.attentions[spec.attention], self.mlps[spec.mlp]
            x_ND = attention.predict(call, x_ND, rotation_N1h, layer, cache, mask, self.scratch.tile(rows, thread))
            x_ND = mlp.predict(call, x_ND, thread)
        return x_ND

    def logits(self, x_ND: np.ndarray, ends_B: np.ndarray) -> np.ndarray:
        """Returns the logits after the tokens `ends`, [B, all tokens]."""
        x_BE = x_ND[ends_B]
        if MAPPING_OUT in self.weights:
            x_BE = self._project(x_BE, self.weights[MAPPING_OUT])
        y_BE = np.empty_like(x_BE)
        self.norm(x_BE, self.weights[FINAL_NORM], self.norm.scales(x_BE), y_BE)
        local_BV = self._project(y_BE, self.weights[EMBEDDING if self.spec.tied else HEAD])
        if self.tensor is None:
            return local_BV
        group = self.tensor.group
        logits_BV = np.empty((len(local_BV), self.vocabulary), np.float32)
        logits_BV[:, range_of_rank(self.vocabulary, group.rank, group.size)] = local_BV
        group.complete_ranges(list(logits_BV))
        return logits_BV


def _multiplications(layer: LayerSpec) -> int:
    """Counts those of a token in a layer."""
    return sum(layer.active_size(parameter) for parameter in layer.parameters if len(parameter.shape) > 1)
