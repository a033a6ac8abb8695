"""Knowledge distillation: a training of a model, the student, on the probabilities of another one, the teacher.

With temperature T, teacher's logits t and student's logits s of a token, its minimised loss is

    (1 - alpha) loss + alpha T^2 KL(q || p)     q = softmax(t / T), p = softmax(s / T)
    KL(q || p) = sum over the vocabulary of q (log q - log p)

(Hinton, Vinyals and Dean 2015, section 2). The loss on the left is that of the label, with the terms of `loss_terms.py`
if a training has them. KL is the forward divergence, from the teacher. T^2 makes up for the gradients, which shrink
with 1 / T^2: the derivative of the last term by s is alpha T (p - q).

The logits of all tokens, [N, V], never exist, of neither model: `FusedLinearCrossEntropy` takes some rows at a time,
and both models' logits of these rows are in memory together.

Legend: N tokens (n of a tile), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from trainer.arrays.memory import empty, row_blocks
from trainer.arrays.operators import operators

_COLUMNS = 4096  # of the vocabulary, whose differences of logits are in memory at once

WriteLogits: TypeAlias = Callable[[slice, np.ndarray], None]
"""Writes the logits of some tokens of a micro-batch to an array, float32 [n, V]."""


class Distillation:
    """The teacher's view of a micro-batch, and sums over its loss tokens after the forward pass.

    A head calls `allocate`, then for each tile of rows `take_rows`, `compare`, in a training `differentiate`, and
    `add`; at last `finish`.

    Args:
        write_logits: Computes the teacher's logits of some tokens.

    Attributes:
        cross_entropy: Sum of the student's cross entropies.
        divergence: Sum of KL(q || p), in nats.
    """

    def __init__(self, alpha: float, temperature: float, write_logits: WriteLogits) -> None:
        self.alpha = alpha
        self.temperature = temperature
        self.cross_entropy = 0.0
        self.divergence = 0.0
        self._write_logits: WriteLogits | None = write_logits
        self._free()

    def _free(self) -> None:
        self._teacher_nV = np.zeros((0, 0), np.float32)
        self._other_nV = self._teacher_nV
        self._divergence_n = np.zeros(0)

    def allocate(self, rows: int, vocabulary: int) -> None:
        """Allocates memory for tiles of so many rows."""
        self._teacher_nV = empty(rows, vocabulary)
        self._other_nV = empty(rows, vocabulary)
        self._divergence_n = np.empty(rows)

    def take_rows(self, part: slice) -> None:
        """Computes the teacher's logits of the next tile, the tokens `part` of the micro-batch."""
        assert self._write_logits is not None, "the head of a micro-batch runs once"
        self._write_logits(part, self._teacher_nV[: part.stop - part.start])

    def compare(self, rows: slice, logits_nV: np.ndarray) -> None:
        """Computes the divergences of some rows of the tile from the student's logits, which stay as they are."""
        factor = np.float32(1 / self.temperature)
        teacher_nV = self._teacher_nV[rows]
        probabilities_nV = self._other_nV[rows]
        teacher_nV *= factor
        # log q - log p = (t - max t) - (s - max s) + log max q - log max p, for logits t and s at the temperature. The
        # differences come first: they keep their digits also for large logits, and are 0 for equal ones.
        apart_n = teacher_nV.max(1).astype(np.float64) - logits_nV.max(1) * factor
        rounded_n = apart_n.astype(np.float32)
        operators().softmax(teacher_nV, probabilities_nV)
        divergence_n = rounded_n - apart_n + np.log(probabilities_nV.max(1), dtype=np.float64)
        for columns in row_blocks(slice(0, logits_nV.shape[1]), _COLUMNS):
            difference_nv = teacher_nV[:, columns] - logits_nV[:, columns] * factor
            difference_nv -= rounded_n[:, None]
            divergence_n += np.einsum("nv,nv->n", probabilities_nV[:, columns], difference_nv)
        student_nV = teacher_nV  # the memory is free again
        np.multiply(logits_nV, factor, out=student_nV)
        operators().softmax(student_nV, student_nV)
        self._divergence_n[rows] = divergence_n - np.log(student_nV.max(1), dtype=np.float64)
        student_nV -= probabilities_nV

    def differentiate(self, rows: slice, gradient_nV: np.ndarray) -> None:
        """Turns the derivatives of the loss on the left, of some rows of the tile, into those of the minimised loss."""
        gradient_nV *= np.float32(1 - self.alpha)
        difference_nV = self._teacher_nV[rows]  # p - q
        difference_nV *= np.float32(self.alpha * self.temperature)
        gradient_nV += difference_nV

    def add(self, losses_n: np.ndarray, weights_n: np.ndarray) -> None:
        """Adds the cross entropies and the divergences of the tile, times the weights of its tokens."""
        self.cross_entropy += float(losses_n @ weights_n)
        self.divergence += float(self._divergence_n[: len(weights_n)] @ weights_n)

    def finish(self, loss: float) -> float:
        """Returns the sum of the minimised losses from that of the losses on the left; frees memory."""
        self._free()
        self._write_logits = None
        return (1 - self.alpha) * loss + self.alpha * self.temperature**2 * self.divergence
