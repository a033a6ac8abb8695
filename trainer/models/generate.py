"""Text generation: greedy or sampled continuation of a batch of prompts with a key/value cache.

It runs operator by operator, without compilation: one pass over all prompts, then one token a step for all sequences.
Legend: B sequences, Q new tokens of a pass, S cached positions, D hidden, C = heads * head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor

from trainer.errors import RunError

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder

_ROUND = 32  # the length that attention sees is a multiple of this, so that few shapes occur


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


class Generator:
    """Continues prompts with a decoder; `build_inputs` has the position tables, and `eos_ids` end a sequence."""

    def __init__(self, model: Decoder, build_inputs: InputBuilder, eos_ids: Sequence[int]) -> None:
        self.model, self.tables, self.eos_ids = model, build_inputs.tables, frozenset(eos_ids)

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
        logits_BV = self.forward(cache, ids_BQ, np.zeros_like(lengths), lengths - 1)
        left = list(max_tokens)
        while True:
            chosen: list[int | None] = []
            for row, tokens in enumerate(rows):
                token = None
                if left[row] > 0:
                    token = choose_token(logits_BV[row], tokens, sampling, first_row + row, len(tokens))
                    left[row] = 0 if token in self.eos_ids else left[row] - 1
                    tokens.append(token)
                chosen.append(token)
            if all(token is None for token in chosen):
                return
            yield chosen
            if not any(left):
                return
            starts = np.array([len(tokens) - 1 for tokens in rows])
            last_B1 = np.array([[tokens[-1]] for tokens in rows], np.int32)
            logits_BV = self.forward(cache, last_B1, starts, np.zeros_like(starts))

    def new_cache(self, rows: int, tokens: int) -> Cache:
        """An empty cache for so many sequences of so many tokens."""
        return Cache(self.model, rows, _round_up(tokens))

    def forward(self, cache: Cache, ids_BQ: np.ndarray, starts: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Logits [B, V] after token number `last` of each sequence in this pass, whose first position is `starts`."""
        model, settings = self.model, self.model.settings
        rows, width = ids_BQ.shape
        positions_BQ = np.minimum(starts[:, None] + np.arange(width), cache.capacity - 1)
        seen = _round_up(int(positions_BQ.max()) + 1)
        allowed_BQS = np.arange(seen) <= positions_BQ[:, :, None]
        attention, attend = model.block.attention, model.kernels.cached_attention
        masks = [model.kernels.cached_mask(allowed_BQS, settings.num_heads, attention.cache_heads)]
        if settings.window_layers:
            near_BQS = allowed_BQS & (np.arange(seen) > positions_BQ[:, :, None] - settings.sliding_window)
            masks.append(model.kernels.cached_mask(near_BQS, settings.num_heads, attention.cache_heads))
        tables = self.tables(positions_BQ.reshape(-1))
        cache.place(positions_BQ, seen)
        x_ND = model.run_embedding(Tensor(ids_BQ.reshape(-1)))
        for layer, parameters in enumerate(model.layer_weights[: settings.num_layers]):
            weights = [*parameters, *model.adapter_masks(None, layer, rows * width)]
            q_NC, *new = attention.project(x_ND, tables[0:2], tables[2:4], weights)
            mask = masks[settings.has_window(layer)]
            x_ND = x_ND + attention.over_cache(attend, q_NC, cache.update(layer, new), mask, weights)
            experts = model.layers[layer].get("experts")
            x_ND = x_ND + model.block.mlp(x_ND, weights) if experts is None else experts(x_ND)[0]
        ends = Tensor((np.arange(rows) * width + last).astype(np.int32))
        logits_BV = model.logits_of(model.kernels.gather_rows(x_ND, ends)).asnumpy()
        if not np.isfinite(logits_BV).all():
            rule = "the model's output is not finite: its weights have diverged or are damaged"
            raise RunError(rule, fix="use another checkpoint")
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


def _round_up(number: int) -> int:
    return -(-number // _ROUND) * _ROUND
