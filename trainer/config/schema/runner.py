"""Sections about the run itself: runner_config, runner_wrapper and what a profile or TensorBoard would need."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.schema.fields import BATCH, COUNT, Section, setting


class RunnerConfig(Section):
    """How many batches of which size (YAML ``runner_config``)."""

    batch_size: int = setting(1, "Sequences (of a classifier: images) in one micro-batch.", ge=1, le=BATCH)
    epochs: int = setting(1, "Passes over the training data.", ge=1, le=COUNT)
    gradient_accumulation_steps: int = setting(
        1, "Micro-batches whose gradients are summed before one optimizer step.", ge=1, le=BATCH)
    global_batch_size: int | None = setting(
        None, "Sequences of one optimizer step over all ranks, in place of gradient_accumulation_steps (in a pipeline:"
        " micro_batch_num), which are then what batch_size and data_parallel leave. Default null: they say it.",
        ge=1, le=BATCH)
    max_steps: int | None = setting(
        None, "Optimizer steps of the whole run, in place of epochs: the data are read again until then. Default null:"
        " epochs says it.", ge=1, le=COUNT)
    stop_step: int = setting(
        0, "Ends the run after this optimizer step and changes nothing else, the schedule included. Default 0: off.",
        ge=0, le=COUNT)


class LossScaleSection(Section):
    """A loss scale with its rules (YAML ``runner_wrapper.scale_sense``)."""

    type: Literal["DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell"] = setting(
        "DynamicLossScaleUpdateCell", "Dynamic: falls on overflow, grows after a quiet window. Fixed: stays.")
    loss_scale_value: float = setting(65536, "First loss scale.", gt=0)
    scale_factor: int = setting(2, "Dynamic: factor of a change of the scale; 1: the scale stays.", ge=1, le=COUNT)
    scale_window: int = setting(
        1000, "Dynamic: optimizer steps without overflow before the scale grows.", ge=1, le=COUNT)


class RunnerWrapper(Section):
    """What happens around forward and backward (YAML ``runner_wrapper``)."""

    type: Literal["MFTrainOneStepCell", "MFPipelineWithLossScaleCell"] = setting(
        "MFTrainOneStepCell", "MindSpore Transformers' cell; both mean the same step here.")
    use_clip_grad: bool = setting(False, "Clip gradients before the update.")
    clip_type: Literal["norm", "value"] = setting("norm", "By max_grad_norm, or each element by clip_value.")
    max_grad_norm: float = setting(1.0, "Largest norm after clipping. Default 1.0.", gt=0)
    clip_by_group: bool = setting(
        False, "Each parameter group of the optimizer by its own norm instead of all by the global one.")
    clip_value: float = setting(
        1.0, "clip_type value: largest absolute value of an element after clipping. Default 1.0.", gt=0)
    scale_sense: Annotated[float, Field(gt=0)] | LossScaleSection = setting(
        1.0, "Loss scale: a number, or a section of a dynamic one. Default 1.0: off.")
    accumulate_allreduce_grads_in_fp32: bool = setting(
        True, "Keep the gradients of matrices in float32; False: in compute_dtype bfloat16 (ranks add up in float32).")
    local_norm: bool = setting(False, "Norm of each parameter's gradient in metrics.jsonl.")
    use_skip_data_by_global_norm: bool = setting(
        False, "Skip the update of a step whose gradient norm is above global_norm_spike_threshold.")
    global_norm_spike_threshold: float = setting(
        1.0, "Gradient norm before clipping above which a step is a spike. Default 1.0.", gt=0)
    global_norm_spike_count_threshold: int = setting(10, "Consecutive spikes that stop the run.", ge=1, le=COUNT)
