"""Compares the logits of a model with adapters with those of its export, which has them merged (`export --check`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.checkpoint.adapters import load_initial_weights
from trainer.config import Config
from trainer.data import IGNORE_INDEX, Batch
from trainer.models.spec.adapters import without_adapters

_ROWS = 2
_TOKENS = 64


class MergeDifference(NamedTuple):
    """The largest difference of two logits, and the largest logit with adapters."""

    difference: float
    largest: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"check: logits before and after the merge differ by at most {self.difference:.2g}, of {self.largest:.3g}"
            f" (the largest), for {self.tokens} random tokens"
        )


def check_merge(config: Config, output: Path) -> MergeDifference:
    """Computes the logits of random tokens with the adapters of `adapter_id`, and with the weights in `output`.

    Both models compute with the dtypes of the configuration. Imports MindSpore.
    """
    settings = without_adapters(config.decoder)
    merged = config.model_copy(
        update={
            "model": config.model.model_copy(update={"settings": settings}),
            "load_checkpoint": str(output),
            "adapter_id": None,
            "use_ema": False,  # the merged weights are those that the export was asked for
        }
    )
    tokens = min(_TOKENS, config.decoder.seq_length)
    stream = np.random.Generator(np.random.Philox(key=[config.seed, 0]))
    ids = stream.integers(0, config.decoder.vocab_size, (_ROWS, tokens), dtype=np.int32)
    positions = np.tile(np.arange(tokens, dtype=np.int32), (_ROWS, 1))
    batch = Batch(ids, np.full_like(ids, IGNORE_INDEX), positions, np.zeros_like(ids))
    before = _logits(config, batch)
    after = _logits(merged, batch)
    return MergeDifference(float(np.abs(after - before).max()), float(np.abs(before).max()), ids.size)


def _logits(config: Config, batch: Batch) -> np.ndarray:
    from trainer.models.inputs import InputBuilder
    from trainer.run.session import open_session

    session = open_session(config, load_initial_weights(config, averages=config.use_ema))
    assert isinstance(session.build_inputs, InputBuilder), "only a decoder has adapters"
    return session.model.logits(session.build_inputs(batch)).asnumpy()
