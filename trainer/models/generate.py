"""Text generation: greedy or sampled continuation of a batch of prompts with a key/value cache.

One pass over each piece of the prompts, then one token a step for all sequences. On a CPU a pass runs in NumPy (see
trainer/models/array_prediction.py), on a device operator by operator, without compilation.

Legend: B sequences, Q new tokens of a pass, N = B * Q, S cached positions, D hidden, C = heads * head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor

from trainer.errors import RunError
from trainer.models.array_prediction import ArrayPredictor

if TYPE_CHECKING:
    from trainer.arrays.attention.cache import KVCache
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder

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
        return self.kernels.cached_mask(allowed_BQS, self.model.settings.num_heads, self.block.attention.cache_heads)

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
