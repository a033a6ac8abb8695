"""Text generation: greedy or sampled continuation of a batch of prompts with a key/value cache.

There is one pass over each piece of the prompts, then one pass for each new token of all sequences. On a CPU native
layers compute a pass (`ArrayParts`), on a device cells, operator by operator, without compilation (`CellParts`).

Legend: B sequences, Q new tokens of a pass, N = B * Q, S cached positions.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.errors import RunError
from trainer.models.array_parts import prediction_parts
from trainer.models.inputs import PredictionCall
from trainer.models.spec.visibility import visible_keys

if TYPE_CHECKING:
    from trainer.arrays.attention.cache import KVCache
    from trainer.models.array_parts import ArrayParts
    from trainer.models.cell_parts import CellCache, CellParts
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder

_MAX_PROMPT_TOKENS = 256  # of each sequence in a pass: its scores are [H, Q, S] numbers for each sequence


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        do_sample: Sample a token; False takes the most likely one.
        temperature: Divides the logits before sampling.
        top_k: Sample from this many most likely tokens; 0: from all.
        top_p: Sample from the most likely tokens whose probabilities add up to this; 1.0: from all.
        repetition_penalty: Divides positive (multiplies negative) logits of the tokens that are in the sequence; 1.0:
            off.
        seed: Seed of the samples. Each sequence and position has a separate random stream, so that a sequence does not
            depend on the others of its batch.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


def choose_token(logits_V: np.ndarray, tokens: Sequence[int], sampling: Sampling, row: int, position: int) -> int:
    """Returns the next token of a sequence with these tokens; its number `row` and `position` name the random stream.
    """
    if not sampling.do_sample and sampling.repetition_penalty == 1.0:
        return int(logits_V.argmax())
    logits = logits_V.astype(np.float64)
    if sampling.repetition_penalty != 1.0:
        ids = np.unique(np.asarray(tokens, np.int64))
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
        # A token is kept if the more likely ones add up to less than top_p; so the first one always is.
        keep = np.cumsum(probabilities) - probabilities < sampling.top_p
        order = order[keep]
        probabilities = probabilities[keep] / probabilities[keep].sum()
    stream = np.random.Generator(np.random.Philox(key=[sampling.seed, 0x9E], counter=[0, 0, row, position]))
    return int(order[np.searchsorted(np.cumsum(probabilities), stream.random(), side="right").clip(max=len(order) - 1)])


class StageChunk(NamedTuple):
    """Layers that a rank computes one after the other.

    Attributes:
        receive: Waits for their input from another pipeline stage; None where they read tokens.
        send: Sends their result to another pipeline stage; None where logits follow.
    """

    layers: Sequence[int]
    receive: Callable[[], np.ndarray] | None = None
    send: Callable[[np.ndarray], None] | None = None


class Generator:
    """Continues prompts with a decoder.

    Args:
        build_inputs: Has the position tables.
        eos_ids: Tokens that end a sequence.
        chunks: The model chunks of this pipeline stage; None: all layers in one.
        share: Takes the logits of the last stage (None on the others) and returns them on all stages.
        agree: Returns the new tokens of one rank on all ranks that share the model, because processors may round
            differently.
        native: Use native CPU layers; None: where the model has them.
    """

    def __init__(
        self, model: Decoder, build_inputs: InputBuilder, eos_ids: Sequence[int],
        chunks: Sequence[StageChunk] | None = None,
        share: Callable[[np.ndarray | None], np.ndarray | None] = lambda logits_BV: logits_BV,
        agree: Callable[[list[int | None]], list[int | None]] = lambda tokens: tokens, native: bool | None = None,
    ) -> None:  # fmt: skip
        self.eos_ids = frozenset(eos_ids)
        self.share = share
        self.agree = agree
        settings = model.settings
        self.embedding_factor = settings.embedding_multiplier
        self.chunks = chunks or [StageChunk(range(settings.num_layers))]
        self.windows: list[int | None] = [None]
        if settings.window_layers:
            self.windows.append(settings.sliding_window)
        if native is None:
            native = model.kernels.host_layers
        self.parts: ArrayParts | CellParts = model.parts
        self.tables: Callable[[np.ndarray], Any] = build_inputs.tables
        if native:
            self.parts = prediction_parts(settings, model.parameters_by_name, model.shard)
            self.tables = build_inputs.rotation

    def stream(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], sampling: Sampling, first_row: int = 0
    ) -> collections.abc.Generator[list[int | None], None, None]:
        """Yields, step by step, the new token of every sequence; None for a sequence that has ended.

        Args:
            prompts: Token ids of each sequence, at least one.
            max_tokens: Maximum number of new tokens of each sequence.
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
        remaining = list(max_tokens)
        while True:
            local_choice: list[int | None] = [None] * len(rows)
            for row, tokens in enumerate(rows):
                if remaining[row] > 0:
                    local_choice[row] = choose_token(
                        logits_BV[row], tokens, sampling, row=first_row + row, position=len(tokens)
                    )
            chosen = self.agree(local_choice)
            for row, token in enumerate(chosen):
                if token is None:
                    continue
                remaining[row] -= 1
                if token in self.eos_ids:
                    remaining[row] = 0
                rows[row].append(token)
            if all(token is None for token in chosen):
                return
            yield chosen
            if not any(remaining):
                return
            starts = np.array([len(tokens) - 1 for tokens in rows])
            last_B1 = np.array([[tokens[-1]] for tokens in rows], np.int32)
            logits_BV = self.forward(cache, last_B1, starts, np.zeros_like(starts))

    def new_cache(self, rows: int, tokens: int) -> CellCache | KVCache:
        """Returns an empty cache for `rows` sequences of `tokens` tokens."""
        return self.parts.new_cache(rows, tokens)

    def read_prompts(self, cache: CellCache | KVCache, ids_BQ: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
        """Returns the logits [B, V] after the last token of each prompt; `ids_BQ` may have any tokens after it."""
        logits_BV: np.ndarray | None = None
        for first in range(0, ids_BQ.shape[1], _MAX_PROMPT_TOKENS):
            piece_BQ = ids_BQ[:, first : first + _MAX_PROMPT_TOKENS]
            last_B = lengths_B - 1 - first
            ends_B = (0 <= last_B) & (last_B < piece_BQ.shape[1])
            last_B = last_B.clip(0, piece_BQ.shape[1] - 1)
            piece_logits_BV = self.forward(cache, piece_BQ, np.full_like(lengths_B, first), last_B)
            if logits_BV is None:
                logits_BV = piece_logits_BV
            logits_BV[ends_B] = piece_logits_BV[ends_B]
        assert logits_BV is not None  # no prompt is empty
        return logits_BV

    def forward(
        self, cache: CellCache | KVCache, ids_BQ: np.ndarray, starts_B: np.ndarray, last_B: np.ndarray
    ) -> np.ndarray:
        """Returns the logits [B, V] after one token of each sequence, in one pass over new tokens.

        Args:
            ids_BQ: The new tokens.
            starts_B: The position of the first new token of each sequence.
            last_B: Which of the new tokens the logits follow.

        Raises:
            RunError: The logits are not finite.
        """
        parts = self.parts
        rows, width = ids_BQ.shape
        positions_BQ = np.minimum(starts_B[:, None] + np.arange(width), cache.capacity - 1)
        cached_S = np.arange(parts.cached_length(int(positions_BQ.max()) + 1))
        cache.set_positions(positions_BQ, len(cached_S))
        masks = [parts.cached_mask(visible_keys(positions_BQ, cached_S, window)) for window in self.windows]
        call = PredictionCall(self.tables(positions_BQ.reshape(-1)), masks, cache)
        logits_BV = None
        for chunk in self.chunks:
            if chunk.receive is None:
                x_ND = parts.embed_tokens(ids_BQ.reshape(-1))
                if self.embedding_factor != 1:
                    x_ND = x_ND * self.embedding_factor
            else:
                x_ND = chunk.receive()
            x_ND = parts.predict_layers(chunk.layers, x_ND, call)
            if chunk.send is None:
                logits_BV = parts.predict_logits(x_ND, (np.arange(rows) * width + last_B).astype(np.int32))
            else:
                chunk.send(x_ND)
        logits_BV = self.share(logits_BV)
        assert logits_BV is not None  # one stage has them
        if not np.isfinite(logits_BV).all():
            rule = "the model's output is not finite: its weights have diverged or are damaged"
            raise RunError(rule, fix="use another checkpoint")
        return logits_BV
