"""The teacher of a distillation as a run computes it."""

from __future__ import annotations

from trainer.config.precision import PART_KEYS
from trainer.config.schema.root import Config
from trainer.models.spec.shapes import matrix_dtypes
from trainer.storage.base_dtypes import BaseDtype

_SECTIONS = ("seed", "amp_level", "runner_config", "context", "parallel", "parallel_config", "use_parallel")


def teacher_run(config: Config) -> Config | None:
    """Returns the configuration of the teacher's passes: its model, with the batches, device and dtypes of the run.

    None if the run has no teacher.
    """
    teacher = config.teacher
    if teacher is None:
        return None
    settings = {name: getattr(config.decoder, name) for name in ("seq_length", *PART_KEYS)}
    model = teacher.model.model_copy(update={"settings": teacher.decoder.model_copy(update=settings)})
    return teacher.model_copy(update={"model": model} | {name: getattr(config, name) for name in _SECTIONS})


def teacher_dtypes(config: Config) -> dict[str, BaseDtype]:
    """Returns how the teacher's matrices are held in few bytes, by their full names; others are float32."""
    loss = config.distillation
    if loss is None or config.teacher is None or loss.teacher_dtype is None or loss.teacher_dtype == "float32":
        return {}
    return matrix_dtypes(config.teacher.decoder, loss.teacher_dtype)
