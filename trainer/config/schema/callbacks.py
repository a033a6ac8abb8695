"""Monitors of a run (YAML ``callbacks``, or ``callback``)."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer.config.schema.fields import BATCH, COUNT, LAYERS, RANKS, REQUIRED, FilePath, Section, setting


class LossMonitor(Section):
    """A line every few steps."""

    type: Literal["MFLossMonitor"] = setting(REQUIRED, "Kind of monitor.")
    per_print_times: int = setting(1, "Optimizer steps between printed lines.", ge=1, le=COUNT, aliases="log_interval")


class CheckpointMonitor(Section):
    """Saves checkpoints."""

    type_aliases: ClassVar[dict[str, str]] = {"CheckpointMointor": "CheckpointMonitor"}
    type: Literal["CheckpointMonitor"] = setting(REQUIRED, "Kind of monitor.")
    save_checkpoint_steps: int = setting(1, "Optimizer steps between checkpoints; 0: only at the end.", ge=0, le=COUNT)
    keep_checkpoint_max: int = setting(5, "Newest complete checkpoints that are kept.", ge=1, le=COUNT)
    async_save: bool = setting(
        False, "Write checkpoints in the background. The training waits only while weights and optimizer state are"
        " copied to host memory, or if an earlier checkpoint is still being written.")
    keep_best: int = setting(
        0, "Number of checkpoints with the lowest eval loss to keep, in addition to the newest ones. An evaluation"
        " with such a loss saves one; checkpoints/best points to the best. Requires do_eval.", ge=0, le=COUNT)


def _repeated(description: str, **bounds: Any) -> Any:
    """Declares a key that repeats one of the model."""
    return setting(None, f"{description}; must agree with the model. Default null: the model's.", **bounds)


class MoEDropRate(Section):
    """Share of tokens that experts dropped, per layer."""

    type: Literal["MoEDropRateCallback"] = setting(REQUIRED, "Kind of monitor.")
    expert_num: int | None = _repeated("Experts", ge=1, le=RANKS)
    capacity_factor: float | None = _repeated("Capacity")
    num_layers: int | None = _repeated("Layers", ge=1, le=LAYERS)
    mtp_depth: int | None = _repeated("Multi-token prediction modules", ge=0, le=LAYERS)


class ObsMonitor(Section):
    """Uploads to object storage."""
    support = "ignored"
    support_reason = "nothing is uploaded"
    type: Literal["ObsMonitor"] = setting(REQUIRED, "Kind of monitor.")


class SummaryMonitor(Section):
    """MindInsight's records."""
    support = "ignored"
    support_reason = "metrics.jsonl and report.png hold what it would show"
    type: Literal["SummaryMonitor", "TrainingStateMonitor"] = setting(REQUIRED, "Kind of monitor.")


class MaxLogitsMonitor(Section):
    """Records the largest attention logit of each layer in metrics.jsonl and TensorBoard."""

    type: Literal["MaxLogitsMonitor", "MaxLogitsReset"] = setting(REQUIRED, "Kind of monitor.")
    step_interval: int = setting(1, "Optimizer steps between records; each is of one step.", ge=1, le=COUNT)


class StopMonitor(Section):
    """Saves a checkpoint when the run is asked to stop."""
    support = "ignored"
    support_reason = "SIGTERM and SIGINT always finish the step, save a checkpoint and end the run"
    type: Literal["OnRequestExit"] = setting(REQUIRED, "Kind of monitor.")


class EvalMonitor(Section):
    """Evaluation while training."""
    support = "ignored"
    support_reason = "do_eval with eval_step_interval evaluates while training"
    type: Literal["EvalCallBack"] = setting(REQUIRED, "Kind of monitor.")


class ProfileMonitor(Section):
    """Profiles a window of steps; the keys profile, profile_start_step ... are the same at the top."""

    type: Literal["ProfileMonitor"] = setting(REQUIRED, "Kind of monitor.")
    start_step: int = setting(1, "First step that is profiled.", ge=1, le=COUNT)
    stop_step: int = setting(10, "Last step that is profiled.", ge=1, le=COUNT)
    output_path: FilePath | None = setting(
        None, "Folder for its files, in which each rank has profile/rank_N. Default null: output_dir.")
    profile_rank_ids: list[Annotated[int, Field(ge=0, le=RANKS)]] | None = setting(
        None, "Ranks that are profiled. Default null: all.")
    profile_pipeline: bool = setting(False, "Profile the first rank of each stage of a pipeline.")
    profile_communication: bool = setting(False, "Ascend: small collectives, too; implies profiler_level 1.")
    profile_memory: bool = setting(False, "Ascend: memory of tensors.")
    profiler_level: int = setting(0, "Ascend: 0 operators, 1 and AICORE and AscendCL, 2 and runtime.", ge=0, le=2)
    with_stack: bool = setting(False, "Ascend: Python stacks.")
    data_simplification: bool = setting(True, "Ascend: remove the raw data.")
    mstx: bool = setting(False, "Ascend: mark steps in the trace (mstx).")


class EarlyStop(Section):
    """Ends a run whose eval loss no longer falls."""

    type_aliases: ClassVar[dict[str, str]] = {"EarlyStopCallBack": "EarlyStop", "EarlyStopping": "EarlyStop"}
    type: Literal["EarlyStop"] = setting(REQUIRED, "Kind of monitor.")
    monitor: Literal["eval_loss"] = setting("eval_loss", "What must fall.")
    patience: int = setting(
        1, "Evaluations in a row without an improvement that end the run.", ge=1, le=COUNT,
        aliases="early_stopping_patience")
    min_delta: float = setting(
        0.0, "An improvement is a loss lower than the last improved one by more than this, in nats.", ge=0,
        aliases="threshold early_stopping_threshold")


class DeviceMonitor(Section):
    """Checks and balances that only exist on clusters of Ascend devices."""
    support = "ignored"
    support_reason = "it watches a cluster of Ascend devices"
    type: Literal["ColdHotExpertMonitor", "StressDetectCallBack", "StressTestModelMonitor", "SDCMonitor"] = setting(
        REQUIRED, "Kind of monitor.")


class TopkBiasBalance(Section):
    """Moves the bias on the router's choice."""
    support = "ignored"
    support_reason = "every step moves the bias by itself, as moe_config says"
    type: Literal["TopkBiasBalanceCallback"] = setting(REQUIRED, "Kind of monitor.")
    balance_via_topk_bias: bool | None = _repeated("Balance experts by a bias")
    topk_bias_update_rate: float | None = _repeated("Step of that bias", ge=0)
    expert_num: int | None = _repeated("Experts", ge=1, le=RANKS)
    micro_batch_num: int | None = setting(None, "Micro-batches.", ge=1, le=BATCH)


Callback = Annotated[
    LossMonitor | CheckpointMonitor | MoEDropRate | ObsMonitor | SummaryMonitor | MaxLogitsMonitor | StopMonitor
    | EvalMonitor | ProfileMonitor | EarlyStop | DeviceMonitor | TopkBiasBalance, Field(discriminator="type"),
]  # fmt: skip
