"""The teacher of a distillation: a frozen model whose logits a training compares with those of its own model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.arrays.vocabulary.distillation import Distillation

if TYPE_CHECKING:
    from trainer.config.schema.runner import LossConfig
    from trainer.data.batches.batch import AnyBatch
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder


@dataclass(frozen=True)
class Teacher:
    """Computes what the teacher says about a batch, before the student's pass over the same batch.

    Only the input of the teacher's output projection, [N, E], is kept: the student's head asks for the logits of some
    rows at a time. The pass is one of an evaluation: without dropout, and without gradients.

    Attributes:
        build_inputs: Builds the teacher's own inputs: other models have other rotary embeddings and windows.
        digest: Identifies the weights of the model.
    """

    model: Decoder
    build_inputs: InputBuilder
    loss: LossConfig
    digest: str

    def __call__(self, batch: AnyBatch) -> Distillation:
        write_logits = self.model.logits_by_rows(self.build_inputs(batch))
        return Distillation(self.loss.alpha, self.loss.temperature, write_logits)
