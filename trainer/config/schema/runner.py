"""Batches, loss scale and gradients, tasks: YAML runner_config, runner_wrapper, loss and lm_eval."""

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from trainer.config.schema.fields import BATCH, COUNT, FilePath, Section, refuse_value, setting


def _validate_rampup(value: list[int]) -> list[int]:
    if len(value) != 3 or not 1 <= value[0] <= BATCH or not 1 <= value[1] <= BATCH or not 0 <= value[2] <= COUNT:
        refuse_value("must be [start, increment, samples], of which start and increment are at least 1")
    return value


Answers: TypeAlias = Literal["pairs", "labels", "margins"]
"""The answers of a record: a chosen and a rejected one, or one with a label, or a pair that may have a margin."""

RampUp = Annotated[list[Annotated[int, Field(ge=0, le=COUNT)]], AfterValidator(_validate_rampup)]


class RunnerConfig(Section):
    """How many batches of which size (YAML ``runner_config``)."""

    batch_size: int = setting(1, "Sequences (or images) in one micro-batch.", ge=1, le=BATCH)
    epochs: int = setting(1, "Passes over the training data.", ge=1, le=COUNT)
    gradient_accumulation_steps: int = setting(
        1, "Micro-batches whose gradients are summed before one optimizer step.", ge=1, le=BATCH)
    global_batch_size: int | None = setting(
        None, "Sequences of one optimizer step over all ranks. It determines gradient_accumulation_steps (in a pipeline"
        " micro_batch_num): global_batch_size / (batch_size x data_parallel). Default null: those keys.",
        ge=1, le=BATCH)
    rampup_batch_size: RampUp | None = setting(
        None, "[start, increment, samples]: the first steps have start sequences over all ranks, and over the first"
        " samples sequences of the training the global batch grows to its full size, by increment at a time. Default"
        " null: off.")
    max_steps: int | None = setting(
        None, "Optimizer steps of the run, instead of epochs: the data are read again as often as needed. Default null:"
        " epochs.", ge=1, le=COUNT)
    stop_step: int = setting(
        0, "Ends the run after this optimizer step, without any other effect, also on the schedule. Default 0: off.",
        ge=0, le=COUNT)


class LossScaleSection(Section):
    """A loss scale with its rules (YAML ``runner_wrapper.scale_sense``)."""

    type: Literal["DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell"] = setting(
        "DynamicLossScaleUpdateCell", "Dynamic: the scale is divided by scale_factor on overflow, and multiplied by it"
        " after scale_window good steps. Fixed: the scale never changes.")
    loss_scale_value: float = setting(65536, "First loss scale.", gt=0)
    scale_factor: int = setting(2, "Dynamic: factor of a change; 1: the scale never changes.", ge=1, le=COUNT)
    scale_window: int = setting(
        1000, "Dynamic: optimizer steps without overflow before the scale grows.", ge=1, le=COUNT)


class LossConfig(Section):
    """The loss of answers that are preferred, or judged one by one, or of a student and its teacher (YAML ``loss``)."""

    type: Literal["dpo", "ipo", "simpo", "orpo", "kto", "reward", "distillation"] = setting(
        "dpo", "dpo and ipo compare with the log-probabilities of the first weights; simpo and orpo need no reference."
        " kto compares, too; its records have one answer each, with a label. reward trains a reward model."
        " distillation adds the divergence from another model to the loss of each token.")
    beta: float | None = setting(
        None, "Strength of the preference, the factor of the rewards. Default null: 0.1; of simpo 2.0.", gt=0)
    gamma: float = setting(0.5, "simpo: the margin of the rewards that is asked for. Default 0.5.", ge=0)
    desirable_weight: float = setting(1.0, "kto: factor of the losses of desirable answers. Default 1.0.", ge=0)
    undesirable_weight: float = setting(1.0, "kto: factor of the losses of undesirable answers. Default 1.0.", ge=0)
    teacher: FilePath | None = setting(
        None, "distillation: the folder of the teacher, as Hugging Face publishes a model or as export writes it, with"
        " the tokenizer of the training data.", min_length=1)
    temperature: float = setting(
        1.0, "distillation: divides the logits of teacher and student before their divergence, which is multiplied by"
        " its square. Default 1.0.", gt=0)
    alpha: float = setting(
        0.5, "distillation: weight of the divergence from the teacher; the loss of the labels has 1 - alpha. Default"
        " 0.5.", ge=0, le=1)
    teacher_dtype: Literal["float32", "bfloat16", "int8", "nf4"] | None = setting(
        None, "distillation: how the teacher's matrices are held in memory, as base_dtype of adapters. Default null:"
        " bfloat16 if its config.json names that dtype, else float32.")

    @property
    def is_distillation(self) -> bool:
        """Returns whether the loss is that of tokens, with a teacher."""
        return self.type == "distillation"

    @property
    def needs_reference(self) -> bool:
        """Returns whether the loss compares with the log-probabilities before the training."""
        return self.type in ("dpo", "ipo", "kto")

    @property
    def answers(self) -> Answers:
        """Returns which answers each record of the data has."""
        if self.type == "kto":
            return "labels"
        if self.type == "reward":
            return "margins"
        return "pairs"

    @property
    def unit(self) -> str:
        """Returns what the loss is a mean over, for messages."""
        if self.answers == "labels":
            return "record"
        return "pair"


class RunnerWrapper(Section):
    """Loss scale, clipping and checks of gradients (YAML ``runner_wrapper``)."""

    type: Literal["MFTrainOneStepCell", "MFPipelineWithLossScaleCell"] = setting(
        "MFTrainOneStepCell", "MindSpore Transformers' cell; both mean the same step here.")
    use_clip_grad: bool = setting(False, "Clip gradients before the update.")
    clip_type: Literal["norm", "value"] = setting("norm", "By max_grad_norm, or each element by clip_value.")
    max_grad_norm: float = setting(1.0, "Largest norm after clipping. Default 1.0.", gt=0)
    clip_by_group: bool = setting(
        False, "Clip each parameter group by its own norm, not all by the total norm.")
    clip_value: float = setting(
        1.0, "clip_type value: largest absolute value of an element after clipping. Default 1.0.", gt=0)
    scale_sense: Annotated[float, Field(gt=0)] | LossScaleSection = setting(
        1.0, "Loss scale: a number, or a section of a dynamic one. Default 1.0: off.")
    accumulate_allreduce_grads_in_fp32: bool = setting(
        True, "Sum the gradients of matrices in float32; false: in compute_dtype bfloat16 (over ranks in float32).")
    local_norm: bool | list[str] = setting(
        False, "Write the norm of each parameter's gradient to metrics.jsonl: true for all, or a list of names, parts"
        " of names or patterns with * and ?, as in optimizer.weight_decay_include.")
    use_skip_data_by_global_norm: bool = setting(
        False, "Skip the update of a step whose gradient norm is above global_norm_spike_threshold.")
    global_norm_spike_threshold: float = setting(
        1.0, "Gradient norm before clipping above which a step is a spike. Default 1.0.", gt=0)
    global_norm_spike_count_threshold: int = setting(10, "Consecutive spikes that stop the run.", ge=1, le=COUNT)


class LmEvalConfig(Section):
    """Tasks of lm-eval (YAML ``lm_eval``), which run mode eval runs instead of the evaluation data."""

    tasks: str | list[str] = setting(
        [], "eval: tasks and groups of lm-eval by name, or task files (.yaml); several with commas. Default: none, the"
        " loss on the evaluation data.")
    num_fewshot: int | None = setting(
        None, "Solved examples before each question. Default null: as the task says.", ge=0, le=COUNT)
    limit: int | None = setting(None, "Questions of each task, from its first. Default null: all.", ge=1, le=COUNT)

    @property
    def names(self) -> list[str]:
        """Returns the tasks, without repetitions."""
        texts = self.tasks
        if isinstance(texts, str):
            texts = [texts]
        names = (name.strip() for text in texts for name in text.split(","))
        return list(dict.fromkeys(filter(None, names)))
