"""What a training may add to the cross entropy of a token: label smoothing and the z-loss of the head.

With lse = logsumexp(logits), the label y, the vocabulary V, smoothing e and weight w, the minimised loss of a token is

    (1 - e) (lse - logits[y]) + e (lse - mean(logits)) + w lse^2

The first two terms are those of torch.nn.CrossEntropyLoss(label_smoothing=e) (Szegedy et al. 2016, section 7). The last
one keeps logits small (Chowdhery et al. 2022, PaLM, section 5). Its derivative by the logits, with p = softmax(logits),
is p (1 + 2 w lse) - e / V, and - (1 - e) for the label.

Legend: n tokens, V vocabulary of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig


TERMS = ("smoothing_loss", "head_z_loss")
"""Names of the means over loss tokens of lse - mean(logits) and of lse^2, before their factors."""


@dataclass
class LossTerms:
    """The terms of a micro-batch, and sums over its loss tokens after the forward pass.

    Attributes:
        smoothing, z_weight: e and w above.
        vocabulary: V of all ranks.
        cross_entropy: Sum of lse - logits[y].
        smoothed: Sum of lse - mean(logits).
        squares: Sum of lse^2.
    """

    smoothing: float
    z_weight: float
    vocabulary: int
    cross_entropy: float = 0.0
    smoothed: float = 0.0
    squares: float = 0.0

    def add(self, losses_n: np.ndarray, lse_n: np.ndarray, mean_n: np.ndarray, weights_n: np.ndarray) -> None:
        """Adds the terms of some tokens, float64, times the weights of these."""
        self.cross_entropy += float(losses_n @ weights_n)
        self.smoothed += float((lse_n - mean_n) @ weights_n)
        self.squares += float(lse_n * lse_n @ weights_n)

    @property
    def total(self) -> float:
        """Returns the sum of the minimised losses."""
        likely = (1 - self.smoothing) * self.cross_entropy
        return likely + self.smoothing * self.smoothed + self.z_weight * self.squares

    def differentiate(self, probabilities_nV: np.ndarray, lse_n: np.ndarray) -> None:
        """Turns probabilities into the derivatives by the logits, apart from that of the label."""
        probabilities_nV *= (1 + 2 * self.z_weight * lse_n).astype(np.float32)[:, None]
        probabilities_nV -= np.float32(self.smoothing / self.vocabulary)


def find_terms(settings: ModelConfig) -> LossTerms | None:
    """Returns the terms of a micro-batch before its forward pass; None where the loss is the cross entropy."""
    if not settings.has_loss_terms:
        return None
    return LossTerms(settings.label_smoothing, settings.z_loss_weight, settings.vocab_size)
