"""The root of the configuration: one attribute for each key at the top of a YAML file."""

# No `from __future__ import annotations`: pydantic would have to compile every annotation's text at start-up.
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import PrivateAttr

from trainer.config.checks.problem import NOWHERE, SourceLocation
from trainer.config.schema.arch import ModelSection
from trainer.config.schema.callbacks import Callback
from trainer.config.schema.classifier import ClassifierConfig
from trainer.config.schema.data import DatasetConfig, DatasetTask
from trainer.config.schema.fields import Section, ignored, not_yet, section, setting
from trainer.config.schema.freeze import FreezeConfig
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.optimizer import CosineWithWarmUpLR, LrSchedule, OptimizerConfig
from trainer.config.schema.runner import RunnerConfig, RunnerWrapper
from trainer.config.schema.system import (
    ContextConfig,
    MonitorConfig,
    ParallelConfig,
    ParallelSection,
    RecomputeConfig,
    SwapConfig,
    TensorboardConfig,
)

_PROFILE = "profiling is not built; metrics.jsonl has the seconds of each step"
_ANY_RANKS = "a checkpoint loads on any number of ranks"
_NO_HEALTH = (
    "a run stops at a loss that is not a number, and checkpoints are never replaced before the next is complete"
)
_LAYER_LR = "all parameters share one learning rate; leave it out"
_TEXT_ONLY = "only text models can be trained"

CLASSIFIER = "MlpClassifier"
"""The value of ``model.arch.type`` that is no decoder."""


@dataclass(frozen=True)
class Source:
    """Where each key that was set comes from. Any two are equal: origin is no part of a configuration's value."""

    path: str = field(default="", compare=False)
    positions: dict[str, SourceLocation] = field(default_factory=dict, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)
    written: dict[str, str] = field(default_factory=dict, compare=False)

    def where(self, key: str) -> str:
        """Says where a dotted key was set: ``configs/a.yaml:12``, ``flag --seed``, or an empty string for a default."""
        return self.place(key).text

    def name(self, key: str) -> str:
        """A dotted key as it was written, where that was one of its other names."""
        return self.written[key] if key in self.written else key

    def place(self, key: str) -> SourceLocation:
        """The same with its order in the file."""
        return self.positions[key] if key in self.positions else NOWHERE


class TrainerSection(Section):
    """MindSpore Transformers' trainer class (YAML ``trainer``)."""

    type: str = ignored(
        "CausalLanguageModelingTrainer", "MindSpore Transformers' class.", "run_mode says what a run does"
    )
    model_name: str = ignored("", "A name for the model.", "model.arch.type says which model it is")


class Config(Section):
    """Everything a run is told. Made by :func:`trainer.config.load_config`."""

    seed: int = setting(1, "Seed of weights, dropout and the order of data. Default 1.", ge=0, le=2**63 - 1)
    output_dir: str = setting(
        "./output", "Folder for all a run leaves; made when missing. Default ./output.", min_length=1
    )
    run_mode: Literal["train", "finetune", "eval", "predict"] = setting("train", "What to do. Default train.")
    use_parallel: bool | None = setting(
        None,
        "Whether parallel_config counts. Default null: True in a job of several ranks, False in a run of one.",
    )
    resume_training: bool | str = setting(
        False, "True: go on from the newest complete checkpoint; or the name of a step folder. Default False."
    )
    load_checkpoint: str = setting(
        "", "Weights to start from: a checkpoint folder or a safetensors file. Default empty: new weights."
    )
    load_ckpt_format: Literal["ckpt", "safetensors"] = ignored(
        "safetensors", "Format of load_checkpoint.", "it is seen from the file"
    )
    auto_trans_ckpt: bool = ignored(False, "Cut or join checkpoints for another layout.", _ANY_RANKS)
    src_strategy_path_or_dir: str = ignored("", "Layout of such a checkpoint.", _ANY_RANKS)
    only_save_strategy: bool = not_yet(
        False, "Write the layout and end.", "a checkpoint needs no file of its layout; leave it False"
    )
    strategy_load_checkpoint: str = ignored("", "Layout of a checkpoint.", _ANY_RANKS)
    load_ckpt_async: bool = ignored(False, "Load while compiling.", "weights load in a moment")
    remove_redundancy: bool = ignored(False, "Checkpoints hold shared parameters once.", _ANY_RANKS)
    use_graceful_exit: bool = ignored(
        False, "Finish and save on a signal.", "SIGINT and SIGTERM always finish the step and save"
    )
    do_eval: bool = setting(False, "Evaluate while training. Default False.")
    eval_step_interval: int = setting(
        100, "Optimizer steps between evaluations; -1: never by steps. Default 100.", ge=-1
    )
    eval_epoch_interval: int = setting(-1, "Epochs between evaluations; -1: never by epochs. Default -1.", ge=-1)
    report: bool = setting(True, "Leave report.png: the curves of the run. Default True.")
    log_format: Literal["rich", "plain", "mindformers", "mindspore"] = setting(
        "rich",
        "Progress line, plain lines, MindSpore Transformers' lines, or those of MindSpore's LossMonitor; rich is plain"
        " off a terminal. Default rich.",
    )
    worker_log_dir: str | None = setting(
        None,
        "Folder where every rank also writes what it prints, as worker_<rank>.log in log_format. Default null: none.",
        min_length=1,
    )
    ignore_data_skip: bool = setting(
        False, "Resume with the data from the beginning instead of where the run stopped. Default False."
    )
    data_skip_steps: int | None = not_yet(
        None, "Steps of data to skip on resuming.", "a resumed run knows its place in the data; leave it null", ge=0
    )
    amp_level: Literal["O0", "O1", "O2", "O3", "auto"] | None = setting(
        None,
        "Mixed precision: O0 none, O1 and auto matrix products in half precision, O2 softmax and rotary too, O3 all but"
        " the loss. Default null: the dtypes in model_config decide.",
    )
    predict_data: str | list[str] | None = setting(
        None, "predict: a prompt, several, or a file of prompts. Default null.", aliases=("input_data",)
    )
    predict_batch_size: int | None = setting(
        None, "predict: prompts generated at once. Default null: model_config.batch_size.", ge=1
    )

    runner_config: RunnerConfig = section(RunnerConfig, "How many batches of which size.")
    runner_wrapper: RunnerWrapper = section(RunnerWrapper, "What happens around forward and backward.")
    optimizer: OptimizerConfig = section(OptimizerConfig, "The update rule.")
    lr_schedule: LrSchedule = section(CosineWithWarmUpLR, "Learning rate of each step.")
    parallel: ParallelSection = section(ParallelSection, "How a run is spread.")
    parallel_config: ParallelConfig = section(ParallelConfig, "Degrees of the rank grid.")
    context: ContextConfig = section(ContextConfig, "Device and execution mode.")
    recompute_config: RecomputeConfig = section(RecomputeConfig, "Trade time for activation memory.")
    freeze: FreezeConfig = section(FreezeConfig, "Weights that are not trained.")
    swap_config: SwapConfig = section(SwapConfig, "Move activations to host memory.")
    model: ModelSection = section(ModelSection, "The model.")
    callbacks: list[Callback] = setting([], "Monitors of the run. Default: none but the progress line.")
    train_dataset: DatasetConfig = section(DatasetConfig, "Data to train on.")
    eval_dataset: DatasetConfig | None = setting(
        None, "Data to evaluate on. Default null: the documents that train_dataset.held_out keeps back."
    )
    train_dataset_task: DatasetTask = section(DatasetTask, "MindSpore Transformers' wrapping of train_dataset.")
    eval_dataset_task: DatasetTask = section(DatasetTask, "MindSpore Transformers' wrapping of eval_dataset.")
    trainer: TrainerSection = section(TrainerSection, "MindSpore Transformers' trainer class.")
    tensorboard: TensorboardConfig = section(TensorboardConfig, "TensorBoard files.")
    monitor_config: MonitorConfig = section(MonitorConfig, "Training state records.")

    metric: dict[str, Any] | list[Any] | None = ignored(
        None, "What an evaluation measures.", "it is loss and perplexity"
    )
    processor: dict[str, Any] | None = ignored(
        None, "MindSpore Transformers' tokenizer.", "train_dataset.tokenizer says which tokenizer"
    )
    eval_callbacks: list[Any] | None = ignored(None, "Monitors of an evaluation.", "evaluations are in metrics.jsonl")
    generation: dict[str, Any] | None = ignored(
        None, "Settings of generation.", "write them in model_config", aliases=("generation_config",)
    )
    infer: dict[str, Any] | None = ignored(None, "Settings of a served model.", "nothing is served")
    pretrained_model_dir: str | None = not_yet(
        None, "Folder of a Hugging Face model.", "write its sizes in model_config, its weights as load_checkpoint"
    )
    profile: bool = not_yet(False, "Record what the device does. Default False.", f"{_PROFILE}; leave it False")
    profile_start_step: int = ignored(1, "First step of it.", _PROFILE)
    profile_stop_step: int = ignored(10, "Last step of it.", _PROFILE)
    init_start_profile: bool = ignored(False, "From the very start.", _PROFILE)
    profile_communication: bool = ignored(False, "Communication too.", _PROFILE)
    profile_memory: bool = ignored(True, "Memory too.", _PROFILE)
    profile_output: str | None = ignored(None, "Folder of its records.", _PROFILE)
    profile_rank_ids: list[int] | None = ignored(None, "Ranks.", _PROFILE)
    profile_pipeline: bool = ignored(False, "One rank of each stage.", _PROFILE)
    profile_level: int = ignored(1, "Detail.", _PROFILE, aliases=("profiler_level",))
    profile_config: dict[str, Any] | None = ignored(None, "Further settings.", _PROFILE)
    with_stack: bool = ignored(False, "Python's stack too.", _PROFILE)
    data_simplification: bool = ignored(False, "Remove raw records.", _PROFILE)
    mstx: bool = ignored(False, "Device marks.", _PROFILE)
    train_precision_sync: bool | None = ignored(
        None, "The same bits each time.", "on a CPU a run always gives the same bits"
    )
    infer_precision_sync: bool | None = ignored(
        None, "The same bits each time.", "on a CPU a run always gives the same bits"
    )
    use_skip_data_by_global_norm: bool = setting(
        False, "The same as runner_wrapper.use_skip_data_by_global_norm, where older files write it. Default False."
    )
    use_checkpoint_health_monitor: bool = ignored(False, "Mark healthy checkpoints.", _NO_HEALTH)
    check_for_nan_in_loss_and_grad: bool = setting(
        False,
        "Stop at a loss that is not finite even where loss scaling would skip the step. Default False; without loss "
        "scaling a run always stops there.",
    )
    calculate_per_token_loss: bool = ignored(
        False, "Divide the loss by the valid tokens of the window.", "it always is, which is what True means"
    )
    print_separate_loss: bool = ignored(False, "Print extra losses on their own.", "a dense model has none")
    remote_save_url: str | None = ignored(
        None, "Where MindSpore Transformers uploads checkpoints to.", "nothing is uploaded"
    )
    register_path: str | None = not_yet(
        None, "Folder of own Python classes.", "only the built-in models can be trained; leave it out"
    )
    trust_remote_code: bool = ignored(False, "Run code of a Hugging Face repository.", "no such code is ever run")
    adapter_id: str | None = setting(
        None,
        "Adapters to start from, for model_config.pet_config: a folder with adapter_model.safetensors, as PEFT writes"
        " it, or the checkpoints of a training. Default null: new ones.",
    )
    modal_type: str | list[str] | None = not_yet(
        None, "Kinds of the inputs of predict_data.", f"{_TEXT_ONLY}; leave it out"
    )
    transform_process_num: int = ignored(1, "Processes that cut a checkpoint.", _ANY_RANKS)
    micro_batch_interleave_num: int = ignored(1, "Interleaved parts of a batch.", "only Ascend devices gain by it")
    enable_mindio_ttp_save_ckpt: bool = ignored(False, "Save with MindIO.", _NO_HEALTH)
    use_legacy: bool | None = ignored(None, "MindSpore Transformers' older or newer models.", "there is one kind")
    use_legacy_format: bool | None = ignored(
        None, "MindSpore Transformers' older checkpoints.", "checkpoints are safetensors"
    )
    balanced_load: bool = ignored(False, "Ranks share the reading of a checkpoint.", _ANY_RANKS)
    reshard_worker_num: int = ignored(1, "Processes that cut a checkpoint.", _ANY_RANKS)
    layer_scale: bool = not_yet(False, "Learning rates by layer.", _LAYER_LR)
    layer_decay: float = not_yet(0.65, "Their decay.", _LAYER_LR)
    grouped_lr_schedule: dict[str, Any] | None = not_yet(None, "Schedules by parameter.", _LAYER_LR)
    lr_scale: bool = not_yet(
        False, "Scale the learning rate by the batch.", "write the learning rate you mean; leave it out"
    )
    lr_scale_factor: int = ignored(256, "Rows that leave it as it is.", "the learning rate is not scaled")
    auto_tune: bool = ignored(False, "Tune the data pipeline.", "micro-batches are prepared by one background thread")
    filepath_prefix: str = ignored(
        "./autotune", "File of such tuning.", "micro-batches are prepared by one background thread"
    )
    autotune_per_step: int = ignored(10, "Steps of such tuning.", "micro-batches are prepared by one background thread")
    data_seed: int | None = ignored(None, "Seed of the data.", "the order follows the top-level seed")
    do_predict: bool = ignored(False, "Predict.", "run_mode says what a run does")
    print_interval: int | None = ignored(
        None, "Steps between lines.", "callbacks MFLossMonitor per_print_times says it"
    )
    resume_by_meta: bool = ignored(
        True, "Find the newest checkpoint by its record.", "a complete checkpoint is marked as such"
    )
    recompute: bool = setting(
        False, "The same as recompute_config.recompute: True, where older files write it. Default False."
    )

    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        """Where each key comes from."""
        return self._source

    @property
    def trains(self) -> bool:
        """Whether the run mode is one that updates weights."""
        return self.run_mode in ("train", "finetune")

    @property
    def decoder(self) -> ModelConfig:
        """The decoder's sizes and options."""
        return self.model.settings

    @property
    def classifier(self) -> ClassifierConfig | None:
        """The classifier's sizes; None for a decoder."""
        if self.model.arch.type != CLASSIFIER:
            return None
        return self.model.classifier or ClassifierConfig()

    @property
    def network(self) -> ModelConfig | ClassifierConfig:
        """The sizes of the model, of whichever kind it is."""
        return self.classifier or self.model.settings

    def with_source(self, source: Source) -> "Config":
        """Remembers where the keys come from; used by the loader only."""
        self._source = source
        return self
