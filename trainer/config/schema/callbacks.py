"""Monitors of a run (YAML ``callbacks``, or ``callback``)."""

# No `from __future__ import annotations`: pydantic would have to compile every annotation's text at start-up.
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer.config.schema.fields import REQUIRED, Section, ignored, not_yet, setting

_METRICS = "metrics.jsonl and report.png hold what it would show"
_KNOWN = "the run knows it"
_SAFETENSORS = "checkpoints are safetensors"


class LossMonitor(Section):
    """A line every few steps."""

    type: Literal["MFLossMonitor"] = setting(REQUIRED, "Kind of monitor.")
    per_print_times: int = setting(
        1, "Optimizer steps between printed lines. Default 1.", ge=1, aliases=("log_interval",)
    )
    origin_epochs: int | None = ignored(None, "Epochs of the run.", _KNOWN)
    dataset_size: int | None = ignored(None, "Steps of an epoch.", _KNOWN)
    initial_epoch: int | None = ignored(None, "First epoch.", _KNOWN)
    initial_step: int | None = ignored(None, "First step.", _KNOWN)
    global_batch_size: int | None = ignored(None, "Rows of a step.", _KNOWN)
    gradient_accumulation_steps: int | None = ignored(None, "Micro-batches of a step.", _KNOWN)
    micro_batch_num: int | None = ignored(None, "Micro-batches of a pipeline.", _KNOWN)
    micro_batch_interleave_num: int | None = ignored(None, "Interleaved parts of a batch.", _KNOWN)
    device_num: int | None = ignored(None, "Devices of the run.", _KNOWN)
    check_for_nan_in_loss_and_grad: bool = ignored(
        False, "Stop at a loss that is not a number.", "a run always stops there"
    )
    print_separate_loss: bool = ignored(
        True, "Print extra losses on their own.", "aux_loss, z_loss and mtp_loss always stand on their own"
    )


class CheckpointMonitor(Section):
    """Saves checkpoints."""

    type_aliases: ClassVar[dict[str, str]] = {"CheckpointMointor": "CheckpointMonitor"}

    type: Literal["CheckpointMonitor"] = setting(REQUIRED, "Kind of monitor.")
    save_checkpoint_steps: int = setting(1, "Optimizer steps between checkpoints; 0: only at the end. Default 1.", ge=0)
    keep_checkpoint_max: int = setting(5, "Newest complete checkpoints that are kept. Default 5.", ge=1)
    prefix: str = ignored("CKP", "Start of file names.", "a checkpoint is the folder step-NNNNNNNN")
    directory: str | None = ignored(None, "Folder of checkpoints.", "checkpoints are in output_dir/checkpoints")
    checkpoint_format: Literal["ckpt", "safetensors"] = ignored("safetensors", "File format.", _SAFETENSORS)
    async_save: bool = ignored(False, "Save in the background.", "a save is finished before the next step")
    save_checkpoint_seconds: int = not_yet(0, "Seconds between checkpoints.", "use save_checkpoint_steps", ge=0)
    keep_checkpoint_per_n_minutes: int = not_yet(0, "Keep one in so many minutes.", "use keep_checkpoint_max", ge=0)
    integrated_save: bool = ignored(True, "Gather the shards of parameters.", "every rank has whole weights")
    save_network_params: bool = ignored(False, "Also save weights alone.", "model.safetensors of a checkpoint is that")
    save_trainable_params: bool = ignored(
        False, "Also save trained weights.", "model.safetensors of a checkpoint has them"
    )
    save_optimizer: bool = not_yet(True, "Save the optimizer.", "every checkpoint can be resumed from; leave it True")
    exception_save: bool = ignored(
        False, "Save when the run fails.", "a failed step is never saved; use save_checkpoint_steps"
    )
    remove_redundancy: bool = ignored(False, "Write shared parameters once.", "rank 0 writes the weights, once")
    append_info: list[Any] | None = ignored(None, "Further contents.", "a checkpoint has all that a resumed run needs")
    enc_key: str | None = not_yet(None, "Key of encryption.", "checkpoints are not encrypted; leave it null")
    enc_mode: str | None = ignored(None, "Mode of encryption.", "checkpoints are not encrypted")
    global_batch_size: int | None = ignored(None, "Rows of a step.", _KNOWN)
    health_monitor_interval: int | None = ignored(None, "Steps between health checks.", "there is no such check")
    embedding_size: int | None = ignored(None, "Size of the embedding.", _KNOWN)
    embedding_local_norm_threshold: float | None = ignored(
        None, "Norm of a healthy embedding.", "there is no such check"
    )
    use_checkpoint_health_monitor: bool = ignored(False, "Mark healthy checkpoints.", "there is no such check")


class MoEDropRate(Section):
    """Share of tokens that experts dropped, per layer."""

    type: Literal["MoEDropRateCallback"] = setting(REQUIRED, "Kind of monitor.")
    expert_num: int | None = setting(None, "Experts; must agree with the model. Default null: the model's.", ge=1)
    capacity_factor: float | None = setting(None, "Capacity; must agree with the model. Default null: the model's.")
    num_layers: int | None = setting(None, "Layers; must agree with the model. Default null: the model's.", ge=1)
    mtp_depth: int | None = setting(
        None, "Further-token layers; must agree with the model. Default null: the model's.", ge=0
    )


class ObsMonitor(Section):
    """Uploads to object storage."""

    support = "ignored"
    support_reason = "nothing is uploaded"

    type: Literal["ObsMonitor"] = setting(REQUIRED, "Kind of monitor.")
    src_dir: str | None = setting(None, "What to upload.")
    target_dir: str | None = setting(None, "Where to.")
    step_upload_frequence: int = setting(100, "Steps between uploads.")
    epoch_upload_frequence: int = setting(-1, "Epochs between uploads.")
    keep_last: bool = setting(True, "Replace older uploads.")


class SummaryMonitor(Section):
    """MindInsight's records."""

    support = "ignored"
    support_reason = _METRICS

    type: Literal["SummaryMonitor", "TrainingStateMonitor", "MaxLogitsMonitor"] = setting(REQUIRED, "Kind of monitor.")
    summary_dir: str | None = setting(None, "Folder of the records.")
    collect_freq: int = setting(10, "Steps between records.")


class EvalMonitor(Section):
    """Evaluation while training."""

    support = "ignored"
    support_reason = "do_eval with eval_step_interval evaluates while training"

    type: Literal["EvalCallBack"] = setting(REQUIRED, "Kind of monitor.")
    step_interval: int = setting(100, "Steps between evaluations.")
    epoch_interval: int = setting(-1, "Epochs between evaluations.")


class ProfileMonitor(Section):
    """Records what the device does."""

    support = "not_yet"
    support_reason = "profiling is not built; remove it: metrics.jsonl has the seconds of each step"

    type: Literal["ProfileMonitor"] = setting(REQUIRED, "Kind of monitor.")
    start_step: int = setting(1, "First step.", ge=1)
    stop_step: int = setting(10, "Last step.", ge=1)
    output_path: str | None = setting(None, "Folder of the records.")
    start_profile: bool = setting(True, "Start with the run.")
    profile_rank_ids: list[int] | None = setting(None, "Ranks.")
    profile_pipeline: bool = setting(False, "One rank of each stage.")
    profile_communication: bool = setting(False, "Communication too.")
    profile_memory: bool = setting(False, "Memory too.")
    profiler_level: int = setting(0, "Detail.")
    with_stack: bool = setting(False, "Python's stack too.")
    data_simplification: bool = setting(True, "Remove raw records.")
    mstx: bool = setting(False, "Device marks.")
    config: dict[str, Any] | None = setting(None, "Further settings.")


class EarlyStop(Section):
    """Ends a run whose loss no longer falls."""

    support = "not_yet"
    support_reason = "stopping by the loss is not built; remove it and use runner_config.stop_step"

    type_aliases: ClassVar[dict[str, str]] = {"EarlyStopCallBack": "EarlyStop", "EarlyStopping": "EarlyStop"}

    type: Literal["EarlyStop"] = setting(REQUIRED, "Kind of monitor.")
    monitor: str = setting("eval_loss", "What is watched.")
    patience: int = setting(0, "Evaluations without improvement before the end.", ge=0)
    min_delta: float = setting(0.0, "Smallest change that counts.", ge=0)
    mode: Literal["auto", "min", "max"] = setting("auto", "Whether less is better.")


class DeviceMonitor(Section):
    """Checks and balances that only exist on clusters of Ascend devices."""

    support = "ignored"
    support_reason = "it watches a cluster of Ascend devices"

    type: Literal[
        "ColdHotExpertMonitor",
        "StressDetectCallBack",
        "StressTestModelMonitor",
        "SDCMonitor",
    ] = setting(REQUIRED, "Kind of monitor.")
    detection_interval: int | None = setting(None, "Steps between checks.")
    expert_num: int | None = setting(None, "Experts.")
    num_detections: int | None = setting(None, "Checks at a time.")
    save_checkpoint_steps: int | None = setting(None, "Steps between checkpoints.")


class TopkBiasBalance(Section):
    """Moves the bias on the router's choice."""

    support = "ignored"
    support_reason = "every step moves the bias by itself, as moe_config says"

    type: Literal["TopkBiasBalanceCallback"] = setting(REQUIRED, "Kind of monitor.")
    balance_via_topk_bias: bool | None = setting(
        None, "Balance experts by a bias; must agree with the model. Default null: the model's."
    )
    topk_bias_update_rate: float | None = setting(
        None, "Step of that bias; must agree with the model. Default null: the model's.", ge=0
    )
    expert_num: int | None = setting(None, "Experts; must agree with the model. Default null: the model's.", ge=1)
    micro_batch_num: int | None = setting(None, "Micro-batches.")


Callback = Annotated[
    LossMonitor
    | CheckpointMonitor
    | MoEDropRate
    | ObsMonitor
    | SummaryMonitor
    | EvalMonitor
    | ProfileMonitor
    | EarlyStop
    | DeviceMonitor
    | TopkBiasBalance,
    Field(discriminator="type"),
]
