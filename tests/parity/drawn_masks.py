"""Which dropout masks a model draws, by native layers or by cells."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from trainer.arrays.dropout import LayerDropout
from trainer.ops import dropout, plain
from trainer.ops.dropout import DropoutKey


class DrawnMask(NamedTuple):
    """A mask, or the part of it that native layers draw at once."""

    key: DropoutKey
    site: int
    shape: tuple[int, ...]
    rate: float


def drawn_masks(monkeypatch: pytest.MonkeyPatch) -> list[DrawnMask]:
    """Returns what is filled with each mask that is drawn from now on."""
    drawn: list[DrawnMask] = []
    whole, rows, probabilities = plain.dropout_mask, LayerDropout.rows, LayerDropout.probabilities

    def draw(key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: None = None) -> np.ndarray:
        drawn.append(DrawnMask(key, site, shape, rate))
        return whole(key, site, shape, rate, part)

    def draw_rows(self: LayerDropout, name: str, *place: object) -> np.ndarray:
        mask = rows(self, name, *place)
        drawn.append(DrawnMask(self.key, self.sites[name].number, mask.shape, self.sites[name].rate))
        return mask

    def draw_probabilities(self: LayerDropout, *place: object) -> np.ndarray:
        mask = probabilities(self, *place)
        drawn.append(DrawnMask(self.key, self.attention_site, mask.shape, self.attention_rate))
        return mask

    for module in (plain, dropout):  # of the residual stream, and of the scores
        monkeypatch.setattr(module, "dropout_mask", draw)
    monkeypatch.setattr(LayerDropout, "rows", draw_rows)
    monkeypatch.setattr(LayerDropout, "probabilities", draw_probabilities)
    return drawn
