"""The root of the configuration: one attribute for each key at the top of a YAML file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, PrivateAttr

from trainer.config.families import FAMILIES
from trainer.config.location import NO_LOCATION, SourceLocation
from trainer.config.schema.callbacks import Callback, CheckpointMonitor, EarlyStop, ProfileMonitor
from trainer.config.schema.data import DatasetConfig, DatasetTask
from trainer.config.schema.fields import BATCH, COUNT, RANKS, FilePath, Section, section, setting
from trainer.config.schema.freeze import FreezeConfig
from trainer.config.schema.images import CLASSIFIER, ClassifierConfig
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.optimizer import CosineWithWarmUpLR, LrSchedule, OptimizerConfig
from trainer.config.schema.runner import LmEvalConfig, LossConfig, RunnerConfig, RunnerWrapper
from trainer.config.schema.system import (
    ContextConfig,
    HardwareConfig,
    MonitorConfig,
    ParallelConfig,
    ParallelSection,
    RecomputeConfig,
    SwapConfig,
    TensorboardConfig,
)
from trainer.errors import value_text

_PROFILE_KEYS = {
    "start_step": "profile_start_step", "stop_step": "profile_stop_step", "output_path": "profile_output",
}  # fmt: skip
"""Keys of a ProfileMonitor that have another name at the top level."""
_MODEL = "model.model_config"
_DOTTED_KEY = re.compile(
    r"(?<![\w./'\"-])((?=\w*[._])[a-z]\w*(?:\.\w+)*)(?:( = | is | )(true|false|ON|OFF|-?[0-9.]+))?(?![\w/-]|\.\w)"
)
"""A key in a text, and its value if that follows."""
_CLASSES = (*FAMILIES, CLASSIFIER)
Network: TypeAlias = ModelConfig | ClassifierConfig
"""The sizes of a model: of a decoder, or of one of another kind."""
if TYPE_CHECKING:
    ModelClass: TypeAlias = str
else:
    ModelClass = Literal[_CLASSES]


class ArchConfig(Section):
    """The model class (YAML ``model.arch``)."""

    type: ModelClass = setting(
        "LlamaForCausalLM", "Model class, which implies other keys: docs/models.md lists them. MlpClassifier classifies"
        " images; all others are decoders. Default: model_config.architectures, or LlamaForCausalLM.")


class ModelSection(Section):
    """The model (YAML ``model``)."""

    arch: ArchConfig = section(ArchConfig, "The model class.")
    settings: ModelConfig = section(ModelConfig, "Its sizes and options.", alias="model_config")
    classifier: ClassifierConfig | None = setting(
        None, "Sizes of an MlpClassifier, instead of model_config. Default null: those of its section.")


Tracker: TypeAlias = Literal["wandb", "mlflow", "swanlab"]


@dataclass(frozen=True)
class ConfigSource:
    """The locations of all keys that were set. Any two are equal: they do not affect a configuration's equality."""

    path: str = field(default="", compare=False)
    positions: dict[str, SourceLocation] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    source_places: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Places in this schema -> in that of the file, if it has another one."""
    source_defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Keys of the file's schema -> their defaults, if it is another one."""
    is_of_run: bool = field(default=False, compare=False)
    """Whether the file is the resolved config.yaml of a run."""

    def where(self, key: str) -> str:
        """Returns where a dotted key was set: ``configs/a.yaml:12``, ``flag --seed``, or "" for a default."""
        return self.place(key).text

    def name(self, key: str) -> str:
        """Returns a dotted key as the file or a flag writes it; if neither sets it, as the file would write it."""
        section = key
        while section:
            place = self.place(section)
            if place.key:
                return place.key + key[len(section) :]
            if section in self.source_places:
                return self.source_places[section] + key[len(section) :]
            section = section.rpartition(".")[0]
        return key

    @cached_property
    def _last_parts(self) -> dict[str, str]:
        """Returns the last parts of keys -> of those of the file, where these are the same in all sections."""
        names: dict[str, set[str]] = {}
        for key, place in self.positions.items():
            written = place.key
            if not written or place.value is not ...:
                written = key
            names.setdefault(key.rpartition(".")[2], set()).add(written.rpartition(".")[2])
        return {name: min(others) for name, others in names.items() if len(others) == 1}

    def name_keys(self, text: str, *, is_fix: bool = False) -> str:
        """Returns a text with the keys, and the values behind them, that the file has instead of those of this schema.

        Args:
            text: A rule or a note; its keys are dotted, or have an underscore; it may leave out their sections.
            is_fix: Whether the text says what to write: a key whose value is computed then keeps its name.
        """

        def rename(match: re.Match[str]) -> str:
            """Returns the key of the file for a match of `_DOTTED_KEY`."""
            key, separator, value = match.groups(default="")
            if key not in self.positions and key in self._last_parts:
                return self._last_parts[key] + separator + value
            if "." in key and f"{_MODEL}.{key}" in self.positions:
                key = f"{_MODEL}.{key}"  # texts leave this section out
            place = self.place(key)
            if place.value is not ... and value and not is_fix:
                return f"{place.key}{separator}{value_text(place.value)}"
            if place.key == key or (place.value is not ... and is_fix):
                return match[0]
            return self.name(key) + separator + value

        return _DOTTED_KEY.sub(rename, text)

    def place(self, key: str) -> SourceLocation:
        """Returns the location of a dotted key, or `NO_LOCATION` for a default."""
        return self.positions.get(key, NO_LOCATION)


class TrainerSection(Section):
    """MindSpore Transformers' trainer class (YAML ``trainer``)."""


class Config(Section):
    """The configuration of a run, read by :func:`trainer.config.load_config`."""

    seed: int = setting(1, "Seed of weights, dropout and the order of data.", ge=0, le=2**63 - 1)
    output_dir: FilePath = setting(
        "./output", "Folder for all files that a run writes; created if missing. Default ./output, also if empty.")
    run_mode: Literal["train", "finetune", "eval", "predict", "chat"] = setting("train", "What to do.")
    use_parallel: bool | None = setting(
        None, "Run in parallel and use parallel_config. Default null: true in a job of several ranks, else false.")
    resume_training: bool | FilePath = setting(
        False, "true: continue from the newest complete checkpoint; or the name of a step folder.")
    load_checkpoint: FilePath = setting(
        "", "Weights to start from: a checkpoint folder, also one of MindSpore Transformers, or a safetensors file."
        " Default empty: new weights.")
    src_strategy_path_or_dir: FilePath = setting(
        "", "load_checkpoint with MindSpore Transformers' folders of ranks: the strategy files of that job, or their"
        " folder. Default empty: the folder strategy beside them.")
    pretrained_model_dir: FilePath | None = setting(
        None, "A model folder as Hugging Face publishes it, for keys that the YAML leaves out: the model's sizes, the"
        " weights (except in run_mode train), the tokenizer and the sampling defaults.")
    do_eval: bool = setting(False, "Evaluate while training.")
    eval_step_interval: int = setting(100, "Optimizer steps between evaluations; -1: never by steps.", ge=-1, le=COUNT)
    use_ema: bool = setting(
        False, "Use the averages of optimizer.ema_decay instead of the weights: in evaluations of a training, and of a"
        " checkpoint in eval, predict, chat and export.")
    eval_epoch_interval: int = setting(-1, "Epochs between evaluations; -1: never by epochs.", ge=-1, le=COUNT)
    sample_prompt: str | list[str] | None = setting(
        None, "train, finetune: a prompt, or a few, that the model continues after each evaluation and at the end of"
        " the run, for samples.jsonl; model_config has the sampling keys. Default null: none.")
    report: bool = setting(True, "Write report.html and report.png: the curves of the run, its versions and settings.")
    report_interval: float = setting(
        30.0, "Seconds between updates of report.html during the training; a browser that shows it reloads it. 0: only"
        " at the end. Default 30.", ge=0, le=COUNT)
    profile: bool = setting(
        False, "Profile the steps from profile_start_step to profile_stop_step: MindSpore's profiler, and on a CPU a"
        " table of the parts of a step.")
    profile_start_step: int = setting(1, "First step that is profiled.", ge=1, le=COUNT)
    profile_stop_step: int = setting(10, "Last step that is profiled.", ge=1, le=COUNT)
    profile_output: FilePath | None = setting(
        None, "Folder for the profile, in which each rank has profile/rank_N. Default null: output_dir.")
    profile_rank_ids: list[Annotated[int, Field(ge=0, le=RANKS)]] | None = setting(
        None, "Ranks that are profiled. Default null: all.")
    profile_pipeline: bool = setting(False, "Profile the first rank of each stage of a pipeline.")
    profile_communication: bool = setting(False, "Ascend: small collectives in the profile; implies profiler_level 1.")
    profile_memory: bool = setting(False, "Ascend: memory of tensors in the profile.")
    profiler_level: int = setting(
        0, "Ascend: 0 operators, 1 and AICORE and AscendCL, 2 and runtime.", ge=0, le=2, aliases="profile_level")
    with_stack: bool = setting(False, "Ascend: Python stacks in the profile.")
    data_simplification: bool = setting(True, "Ascend: remove the raw data of the profile.")
    mstx: bool = setting(False, "Ascend: mark steps in the profile (mstx).")
    log_format: Literal["rich", "plain", "mindformers", "mindspore"] = setting(
        "rich", "Progress line, plain lines, MindSpore Transformers' lines, or those of MindSpore's LossMonitor; rich"
        " prints plain lines if the output is not a terminal.")
    worker_log_dir: FilePath | None = setting(
        None, "Folder for the lines of each rank, as worker_<rank>.log in log_format. Default null: none.",
        min_length=1)
    ignore_data_skip: bool = setting(False, "Resume with the data from the beginning instead of where the run stopped.")
    amp_level: Literal["O0", "O1", "O2", "O3", "auto"] | None = setting(
        None, "Mixed precision: O0 none, O1 and auto matrix products in half precision, O2 softmax and rotary too, O3"
        " all but the loss. Default null: the dtypes in model_config decide.")
    predict_data: str | list[str] | None = setting(
        None, "predict: a prompt, several, or a file of prompts.", aliases="input_data")
    predict_batch_size: int | None = setting(
        None, "predict: prompts generated at once. Default null: model_config.batch_size.", ge=1, le=BATCH)

    chat: bool = setting(
        False, "predict: a prompt is a user's message, rendered with the chat template; a record of a .jsonl may also"
        " hold messages. lm_eval.tasks: so is each question.")
    lm_eval: LmEvalConfig = section(LmEvalConfig, "Tasks of lm-eval.")

    runner_config: RunnerConfig = section(RunnerConfig, "How many batches of which size.")
    runner_wrapper: RunnerWrapper = section(RunnerWrapper, "Loss scale, clipping and checks of gradients.")
    optimizer: OptimizerConfig = section(OptimizerConfig, "The update rule.")
    loss: LossConfig | None = setting(
        None, "Train on answers that are preferred or judged, or train a reward model, or learn from a teacher. Default"
        " null: on each token.")
    lr_schedule: LrSchedule = section(CosineWithWarmUpLR, "Learning rate of each step.")
    parallel: ParallelSection = section(ParallelSection, "Parallel mode and its settings.")
    parallel_config: ParallelConfig = section(ParallelConfig, "Degrees of parallelism.")
    hardware: HardwareConfig = section(HardwareConfig, "Rates for `plan --search`; a run does not read them.")
    context: ContextConfig = section(ContextConfig, "Device and execution mode.")
    recompute_config: RecomputeConfig = section(RecomputeConfig, "Trade time for activation memory.")
    freeze: FreezeConfig = section(FreezeConfig, "Frozen weights.")
    swap_config: SwapConfig = section(SwapConfig, "Move activations to host memory.")
    model: ModelSection = section(ModelSection, "The model.")
    callbacks: list[Callback] = setting([], "Monitors of the run. Default: none but the progress line.")
    train_dataset: DatasetConfig = section(DatasetConfig, "Data to train on.")
    eval_dataset: DatasetConfig | None = setting(
        None, "Data to evaluate on. Default null: the held-out split of train_dataset.held_out.")
    train_dataset_task: DatasetTask = section(DatasetTask, "MindSpore Transformers' wrapper of train_dataset.")
    eval_dataset_task: DatasetTask = section(DatasetTask, "MindSpore Transformers' wrapper of eval_dataset.")
    trainer: TrainerSection = section(TrainerSection, "MindSpore Transformers' trainer class.")
    tensorboard: TensorboardConfig = section(TensorboardConfig, "TensorBoard files.")
    monitor_config: MonitorConfig = section(MonitorConfig, "Training state records.")
    trackers: Tracker | list[Tracker] = setting(
        [], "Experiment trackers that receive the numbers of metrics.jsonl during the run: wandb, mlflow, swanlab."
        " Their environment variables configure them. Default: none.")

    use_skip_data_by_global_norm: bool = setting(
        False, "The name of runner_wrapper.use_skip_data_by_global_norm in older files.")
    check_for_nan_in_loss_and_grad: bool = setting(
        False, "Stop at a loss that is not finite even if a loss scale would skip the step. Default false; without a"
        " loss scale such a run always stops.")
    adapter_id: FilePath | None = setting(
        None, "Low-rank adapters to start from: a folder with adapter_model.safetensors, as PEFT writes it, or the"
        " checkpoints of a training. Default null: new ones.")
    recompute: bool = setting(False, "The name of recompute_config.recompute: true in older files.")

    _source: ConfigSource = PrivateAttr(default_factory=ConfigSource)
    _teacher: "Config | None" = PrivateAttr(default=None)

    @property
    def source(self) -> ConfigSource:
        """Returns the locations of the keys that were set."""
        return self._source

    @property
    def trains(self) -> bool:
        """Returns whether the run mode updates weights."""
        return self.run_mode in ("train", "finetune")

    @property
    def tasks(self) -> list[str]:
        """Returns the tasks of lm-eval that this run evaluates; none in another run mode."""
        if self.run_mode == "eval":
            return self.lm_eval.names
        return []

    @property
    def preferences(self) -> LossConfig | None:
        """Returns the loss of answers that are compared; None if it is that of tokens or images."""
        if self.loss is None or self.loss.is_distillation:
            return None
        return self.loss

    @property
    def distillation(self) -> LossConfig | None:
        """Returns the loss of a student and its teacher; None without a teacher."""
        if self.loss is None or not self.loss.is_distillation:
            return None
        return self.loss

    @property
    def teacher(self) -> "Config | None":
        """Returns the model in the teacher's folder; None without a teacher, or if the folder has not been read."""
        if self.distillation is None:
            return None
        return self._teacher

    @property
    def decoder(self) -> ModelConfig:
        """Returns the decoder's sizes and options; of another model the defaults: dense, float32, without dropout."""
        return self.model.settings

    @property
    def whole_matrix_method(self) -> str:
        """Returns the key of adapters that are computed from whole matrices, which no ranks may shard; else empty."""
        adapters = self.decoder.pet_config
        if adapters is None or not adapters.needs_whole_matrices:
            return ""
        return f"model.model_config.pet_config.{adapters.needs_whole_matrices}"

    @property
    def has_adapters(self) -> bool:
        """Returns whether the decoder has low-rank adapters; only they are then trained."""
        return self.decoder.pet_config is not None

    @property
    def is_decoder(self) -> bool:
        """Returns whether the model is a decoder."""
        return self.model.arch.type != CLASSIFIER

    @property
    def network(self) -> Network:
        """Returns the sizes of the model, whatever its kind."""
        if self.is_decoder:
            return self.model.settings
        return self.model.classifier or ClassifierConfig()

    @property
    def tracker_names(self) -> list[str]:
        """Returns `trackers` as a list without repetitions."""
        if isinstance(self.trackers, str):
            return [self.trackers]
        return list(dict.fromkeys(self.trackers))

    @property
    def checkpoint_monitor(self) -> CheckpointMonitor:
        """Returns the callback that saves checkpoints; by default one that saves only at the end."""
        monitors = (callback for callback in self.callbacks if isinstance(callback, CheckpointMonitor))
        return next(monitors, CheckpointMonitor(type="CheckpointMonitor", save_checkpoint_steps=0))

    @property
    def profile_monitor(self) -> ProfileMonitor | None:
        """Returns the callback that profiles steps, or the same from the top-level keys; None without a profile."""
        monitor = next((callback for callback in self.callbacks if isinstance(callback, ProfileMonitor)), None)
        if monitor is not None or not self.profile:
            return monitor
        keys = _PROFILE_KEYS | {name: name for name in ProfileMonitor.model_fields if name in Config.model_fields}
        return ProfileMonitor(type="ProfileMonitor", **{name: getattr(self, key) for name, key in keys.items()})

    @property
    def early_stop(self) -> EarlyStop | None:
        """Returns the callback that ends a run early, if there is one."""
        return next((callback for callback in self.callbacks if isinstance(callback, EarlyStop)), None)

    def with_source(self, source: ConfigSource) -> "Config":
        """Sets the locations of the keys and returns this configuration; only the loader calls it."""
        self._source = source
        return self

    def with_teacher(self, teacher: "Config | None") -> "Config":
        """Sets the model in the teacher's folder and returns this configuration; only the loader calls it."""
        self._teacher = teacher
        return self
