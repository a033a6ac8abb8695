"""What the JSON files of a checkpoint hold, as pydantic models: `state.json` and PEFT's `adapter_config.json`.

The marker's model is `trainer.storage.marker.Marker`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.store import STATE, Checkpoint, damaged_checkpoint, find_checkpoint, read_checkpoint
from trainer.data.batches.packing import RecordForm
from trainer.data.batches.step_sizes import step_sizes
from trainer.errors import UserError
from trainer.storage.json_files import Count, JsonError, LenientModel, StrictModel, check_json

_LEVELS = 1 << 20  # of a ramp-up, more than any that was written


class PositionState(StrictModel):
    """Where a run is; see `trainer.checkpoint.state.Position`."""

    step: Count
    epoch: Count
    batch: Count
    tokens: Count
    data_from_step: Count | None = None


class OptimizerRecord(StrictModel):
    """The optimizer's type and its number of updates."""

    type: str
    updates: Count


class LossScaleState(StrictModel):
    """See `trainer.step.loss_scale.LossScale`."""

    dynamic: bool
    value: float = Field(gt=0)
    quiet_steps: Count
    overflows_in_a_row: Count
    overflows: Count


class StepState(StrictModel):
    """State of the training step apart from the optimizer."""

    loss_scale: LossScaleState
    spikes: Count
    spikes_in_a_row: Count
    first_weights: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The digest of the weights that a loss of preferences compares with."""
    teacher: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The digest of the weights of a distillation's teacher."""


class DataLayout(LenientModel):
    """What a position in the training data means; see `trainer.data.datasets.data_layout`."""

    batch_size: int = Field(ge=1, le=2**31)
    gradient_accumulation_steps: int = Field(ge=1, le=2**31)
    ranks: int = Field(1, ge=1, le=2**31)  # checkpoints from before runs of several ranks lack it
    rows: Count | None = None
    drop_remainder: bool | None = None
    rampup_batch_size: list[Count] | None = None
    record_form: RecordForm | None = None

    @model_validator(mode="after")
    def is_consistent(self) -> DataLayout:
        """Checks that fields do not contradict each other, and that each step of a ramp-up has a micro-batch."""
        if (self.rows is None) != (self.drop_remainder is None):
            raise ValueError("rows and drop_remainder stand together")
        if self.rampup_batch_size is not None:
            micro_batch = self.batch_size * self.ranks
            full = micro_batch * self.gradient_accumulation_steps
            start, increment = [*self.rampup_batch_size, 0, 0][:2]
            fits = micro_batch <= start <= full and 0 < increment and full - start <= _LEVELS * increment
            if len(self.rampup_batch_size) != 3 or not fits:
                raise ValueError(f"rampup_batch_size is {self.rampup_batch_size}, and a step has {full} sequences")
        return self

    @property
    def batches(self) -> int | None:
        """Returns the micro-batches of an epoch, as `trainer.data.batches.loader` counts them; None if unknown."""
        if self.rows is None:
            return None
        batches, left = divmod(self.rows, self.batch_size * self.ranks)
        return batches + bool(left and not self.drop_remainder)


class BaseRecord(StrictModel):
    """The base model of adapters."""

    load_checkpoint: str | None
    seed: int
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class RunState(LenientModel):
    """`state.json` of a training run. Checkpoints of earlier versions lack some of it."""

    position: PositionState
    optimizer: OptimizerRecord
    data: DataLayout
    step: StepState | None = None
    settings: dict[str, Any] | None = None
    evaluations: EvalHistory | None = None
    base: BaseRecord | None = None

    @model_validator(mode="after")
    def is_consistent(self) -> RunState:
        """Checks that steps, updates, tokens and position do not contradict each other."""
        step = self.position.step
        batches = self.data.batches
        if self.optimizer.updates > step:
            raise ValueError(f"optimizer.updates is {self.optimizer.updates}, and position.step {step}")
        if batches is not None and self.position.batch >= max(batches, 1):
            raise ValueError(f"position.batch is {self.position.batch}, and an epoch has {batches} micro-batches")
        if self.optimizer.updates and not self.position.tokens:
            raise ValueError(f"position.tokens is 0, and optimizer.updates {self.optimizer.updates}")
        self._check_steps()
        evaluated = 0
        if self.evaluations is not None:
            evaluated = max((0, *(each.step for each in self.evaluations.best)))
        if evaluated > step:
            raise ValueError(f"evaluations.best names step {evaluated}, and position.step is {step}")
        return self

    def _check_steps(self) -> None:
        """Checks the step against epoch and batch, which determine the steps since the data began."""
        position = self.position
        batches = self.data.batches
        began = position.data_from_step
        if not batches:
            return
        sizes = step_sizes(self.data.model_dump(), batches, began or 0)
        done = sizes.steps_until(position.epoch * batches + position.batch)
        # Checkpoints of earlier versions do not say where the data began: --ignore_data_skip begins them anew.
        if position.step < done or (began is not None and position.step != began + done):
            meaning = f"position.epoch {position.epoch} and position.batch {position.batch} mean {done} steps"
            since = ""
            if began:
                since = f" after step {began}"
            raise ValueError(f"{meaning}{since}, and position.step is {position.step}")


def read_run_state(found: Checkpoint) -> RunState:
    """Reads the state of a checkpoint of a training run.

    Raises:
        UserError: It has other fields or values, or contradicts itself or the marker.
    """
    try:
        state: RunState = check_json(found.state, RunState, STATE)
    except JsonError as error:
        raise damaged_checkpoint(found.path, str(error)) from error
    if state.position.step != found.step:
        rule = f"{STATE} says step {state.position.step} (position.step), its marker {found.step}"
        raise damaged_checkpoint(found.path, rule)
    return state


def record_form_of(path: Path) -> RecordForm | None:
    """Returns how the training of a checkpoint wrote its records as text; None if nothing says so.

    Args:
        path: A checkpoint of this trainer, or what holds one; or other weights.
    """
    try:
        return read_run_state(read_checkpoint(find_checkpoint(path), parts=())).data.record_form
    except UserError:
        return None


def read_base(found: Checkpoint) -> BaseRecord:
    """Reads the record of the base model from a checkpoint of adapters; raises a UserError if it is damaged."""
    base = read_run_state(found).base
    if base is None:
        raise damaged_checkpoint(found.path, f"{STATE}: base: the record of the adapters' base model is missing")
    return base


class AdapterDescription(LenientModel):
    """The keys of PEFT's `adapter_config.json` that are read; other keys are compared with the supported values."""

    r: int = Field(ge=1, le=2**31)
    lora_alpha: float = Field(gt=0)
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
