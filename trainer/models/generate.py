"""Text generation: greedy or sampled continuation of a batch of prompts with a key/value cache.

One pass over each piece of the prompts, then one token a step for all sequences. The parts of the decoder compute a
pass: on a CPU those of native layers (`ArrayParts`), on a device cells operator by operator, without compilation
(`CellParts`).

Legend: B sequences, Q new tokens of a pass, N = B * Q, S cached positions.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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

_MOST_PROMPT_TOKENS = 256  # of each sequence in a pass: its scores are [H, Q, S] numbers for each sequence


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
        order = order[keep]
        probabilities = probabilities[keep] / probabilities[keep].sum()
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
        self.eos_ids = frozenset(eos_ids)
        self.share = share
        self.agree = agree
        settings = model.settings
        self.chunks = chunks or [StageChunk(range(settings.num_layers))]
        if settings.window_layers:
            self.windows = [None, settings.sliding_window]
        else:
            self.windows = [None]
        if native is None:
            native = model.kernels.host_layers
        self.parts: ArrayParts | CellParts = model.parts
        self.tables = build_inputs.tables
        if native:
            self.parts = prediction_parts(settings, model.parameters_by_name, model.shard)
            self.tables = build_inputs.rotation

    def stream(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], sampling: Sampling, first_row: int = 0
    ) -> collections.abc.Generator[list[int | None], None, None]:
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
                    if token in self.eos_ids:
                        left[row] = 0
                    else:
                        left[row] = left[row] - 1
                    rows[row].append(token)
            if all(token is None for token in chosen):
                return
            yield chosen
            if not any(left):
                return
            starts = np.array([len(tokens) - 1 for tokens in rows])
            last_B1 = np.array([[tokens[-1]] for tokens in rows], np.int32)
            logits_BV = self.forward(cache, last_B1, starts, np.zeros_like(starts))

    def new_cache(self, rows: int, tokens: int) -> CellCache | KVCache:
        """Returns an empty cache for so many sequences of so many tokens."""
        return self.parts.new_cache(rows, tokens)

    def read_prompts(self, cache: CellCache | KVCache, ids_BQ: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
        """Logits [B, V] after the last token of each prompt; `ids_BQ` may have anything after it."""
        logits_BV = None
        for first in range(0, ids_BQ.shape[1], _MOST_PROMPT_TOKENS):
            piece_BQ = ids_BQ[:, first : first + _MOST_PROMPT_TOKENS]
            last_B = lengths_B - 1 - first
            ends_B = (0 <= last_B) & (last_B < piece_BQ.shape[1])
            last_B = last_B.clip(0, piece_BQ.shape[1] - 1)
            of_piece_BV = self.forward(cache, piece_BQ, np.full_like(lengths_B, first), last_B)
            if logits_BV is None:
                logits_BV = of_piece_BV
            logits_BV[ends_B] = of_piece_BV[ends_B]
        return logits_BV

    def forward(
        self, cache: CellCache | KVCache, ids_BQ: np.ndarray, starts_B: np.ndarray, last_B: np.ndarray
    ) -> np.ndarray:
        """Returns the logits [B, V] after token number `last` of each sequence in this pass, whose first position is
        `starts`."""
        parts = self.parts
        rows, width = ids_BQ.shape
        positions_BQ = np.minimum(starts_B[:, None] + np.arange(width), cache.capacity - 1)
        cached_S = np.arange(parts.cached_length(int(positions_BQ.max()) + 1))
        cache.place(positions_BQ, len(cached_S))
        masks = [parts.cached_mask(visible_keys(positions_BQ, cached_S, window)) for window in self.windows]
        call = PredictionCall(self.tables(positions_BQ.reshape(-1)), masks, cache)
        logits_BV = None
        for chunk in self.chunks:
            if chunk.receive is None:
                x_ND = parts.embed_tokens(ids_BQ.reshape(-1))
            else:
                x_ND = chunk.receive()
            x_ND = parts.predict_layers(chunk.layers, x_ND, call)
            if chunk.send is None:
                logits_BV = parts.predict_logits(x_ND, (np.arange(rows) * width + last_B).astype(np.int32))
            else:
                chunk.send(x_ND)
        logits_BV = self.share(logits_BV)
        if not np.isfinite(logits_BV).all():
            rule = "the model's output is not finite: its weights have diverged or are damaged"
            raise RunError(rule, fix="use another checkpoint")
        return logits_BV
