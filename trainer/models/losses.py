"""What a forward pass of any model gives."""

from __future__ import annotations

from typing import NamedTuple

from mindspore import Tensor


class LossSums(NamedTuple):
    """What a forward pass adds up, float32 scalars; to be divided by the valid labels of the whole window.

    `total` is what is minimised: `tokens` and the others times their factors. The others are None where the model has
    no such part, and in evaluation.
    """

    total: Tensor
    tokens: Tensor
    """Losses of all valid labels: of the next tokens, or of the images."""
    balance: Tensor | None = None
    """Of the routers, summed over layers; see `trainer.models.moe.RouterLosses`."""
    z: Tensor | None = None
    mtp: Tensor | None = None
    """Token losses of further tokens, summed over the modules."""
    correct: Tensor | None = None
    """Labels that the model finds likeliest; of a classifier, in evaluation only."""
