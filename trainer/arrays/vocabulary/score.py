"""The head of a reward model on arrays: a score of each answer, forward and backward.

The score is the product of the last token's normed row with a vector, as in the sequence classifiers of transformers
with one label. It is float32, and so is the vector, in a training in half precision, too.

Legend: N tokens, D hidden, E width of the head, A answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays.memory import empty
from trainer.arrays.vocabulary.head import FusedLinearCrossEntropy

if TYPE_CHECKING:
    from trainer.arrays.tiles import SublayerCall
    from trainer.arrays.vocabulary.distillation import Distillation
    from trainer.arrays.vocabulary.loss_terms import LossTerms
    from trainer.arrays.vocabulary.preferences import Pairs


class ScoreHead(FusedLinearCrossEntropy):
    """Computes the loss of pairs from the scores of their answers.

    The weights are "norm", "weight" [1, E], and "mapping" [E, D] where the head has another width than the residual
    stream. Norm and mapping, and the backward pass, are those of the head with logits.
    """

    def scores(self, call: SublayerCall, x_ND: np.ndarray, last_A: np.ndarray) -> np.ndarray:
        """Returns the scores of the answers that end with these tokens, float64 [A]."""
        return self._products(call, self._last_rows(call, x_ND, last_A))

    def _last_rows(self, call: SublayerCall, x_ND: np.ndarray, last_A: np.ndarray) -> np.ndarray:
        """Returns the normed rows of the answers' last tokens, [A, E]."""
        x_AD = np.ascontiguousarray(x_ND[last_A])
        return self.normed(call, x_AD, np.empty((len(x_AD), self.width), np.float32))

    @staticmethod
    def _products(call: SublayerCall, y_AE: np.ndarray) -> np.ndarray:
        return y_AE.astype(np.float64) @ call.weights["weight"][0].astype(np.float64)

    @np.errstate(all="ignore")
    def forward(
        self, call: SublayerCall, x_nD: np.ndarray, labels_N: np.ndarray, valid_N1: np.ndarray,
        pairs: Pairs | None = None, terms: LossTerms | None = None, distillation: Distillation | None = None,
    ) -> np.float32:  # fmt: skip
        """Returns the loss of the pairs; if `call.save`, also computes the gradients of x and of the trained weights.
        """
        if pairs is None or terms is not None or distillation is not None:
            raise ValueError("a score has no loss of tokens")
        last_A = pairs.last_tokens(valid_N1)
        y_AE = self._last_rows(call, x_nD, last_A)
        loss, slopes_A = pairs.compare_scores(self._products(call, y_AE))
        if not call.save:
            return loss
        gradients = call.gradients
        if gradients.needs("weight"):
            gradients.arrays["weight"] = empty(1, self.width)
            gradients.arrays["weight"][0] = slopes_A @ y_AE
        grad_NE = empty(len(x_nD), self.width)
        grad_NE[...] = 0
        grad_NE[last_A] = slopes_A[:, None] * call.weights["weight"]
        call.saved["input"] = self._input_gradient(call, x_nD, grad_NE)
        call.saved["weights"] = gradients.compute()
        return loss

    def logits(self, call: SublayerCall, x_nD: np.ndarray) -> Any:
        """Raises a ValueError: a reward model has no logits."""
        raise ValueError("a reward model has no logits")
