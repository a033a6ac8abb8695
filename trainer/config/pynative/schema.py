"""The newer schema: sections as MindSpore Transformers' PynativeTrainer reads them, with its defaults.

A key that acts is translated by `translate`; those that change nothing here, or cannot be translated, are in
``unsupported.yaml``. Sections that are dictionaries are translated as a whole: their keys are those of our section.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from trainer.config.schema.fields import BATCH, COUNT, LAYERS, RANKS, WIDTH, FilePath, Section, section, setting

_Ranges: TypeAlias = list[int | str]


class PynativeCheckpoint(Section):
    """Saving and loading (``checkpoint``)."""

    enable_save: bool = setting(True, "Save checkpoints.")
    save_path: FilePath = setting("", "Folder of the run. Default empty: ./output.")
    save_max: int = setting(5, "Newest checkpoints that are kept.", ge=1, le=COUNT)
    save_interleaved_steps: int = setting(1000, "Optimizer steps between checkpoints.", ge=1, le=COUNT)
    async_save: bool = setting(False, "Write checkpoints beside the training.")
    load_path: FilePath = setting("", "Weights to start from. Default empty: new ones.")
    no_load_optim: bool = setting(False, "Load the weights alone instead of resuming.")


class PynativeTraining(Section):
    """Steps and batches (``training``)."""

    steps: int = setting(1000, "Optimizer steps.", ge=1, le=COUNT)
    local_batch_size: int = setting(1, "Sequences of a micro-batch.", ge=1, le=BATCH)
    global_batch_size: int = setting(1, "Sequences of an optimizer step, over all ranks.", ge=1, le=BATCH)
    max_norm: float = setting(1.0, "Largest norm of the gradient; 0 or less: no clipping.")
    seed: int = setting(42, "Seed.", ge=0, le=2**63 - 1)
    deterministic: bool = setting(False, "The same bits each time.")


class PynativeParallelism(Section):
    """Degrees of parallelism (``parallelism``)."""

    data_parallel_shard: int = setting(-1, "Data-parallel ranks that share state; -1: all.", ge=-1, le=RANKS)
    tensor_parallel: int = setting(1, "Devices that share each matrix.", ge=1, le=RANKS)
    context_parallel: int = setting(1, "Devices that share each sequence's tokens.", ge=1, le=RANKS)
    pipeline_parallel: int = setting(1, "Devices that share the layers.", ge=1, le=RANKS)
    expert_parallel: int = setting(1, "Devices that share the experts.", ge=1, le=RANKS)
    pipeline_parallel_interleave_num: int = setting(1, "Parts of a pipeline stage.", ge=1, le=LAYERS)


class PynativeDataset(Section):
    """A data set (``train_dataset``)."""

    dataloader: dict[str, Any] = setting({}, "Where the data comes from. Default: none.")
    drop_remainder: bool = setting(True, "Leave out the last, smaller batch.")


class PynativeTrainState(Section):
    """What is recorded (``monitor.train_state``)."""

    local_norm: bool | str | list[str] = setting("", "Norms of the parameters' gradients.")


class PynativeHealth(Section):
    """Checks of checkpoints (``monitor.health_checkpoint``), which nothing reads."""


class PynativeTensorboard(Section):
    """TensorBoard files (``monitor.tensorboard``)."""

    output_dir: FilePath = setting("", "Folder for event files. Default empty: none.")
    log_interval: int = setting(1, "Steps between records.", ge=1, le=COUNT)
    queue_size: int = setting(1000, "Records that are kept before they are written.", ge=1, le=COUNT)


class PynativeMoeMonitor(Section):
    """Records of experts (``monitor.moe_monitor``)."""


class PynativeMonitor(Section):
    """Records (``monitor``)."""

    health_checkpoint: PynativeHealth = section(PynativeHealth, "Checks.")
    train_state: PynativeTrainState = section(PynativeTrainState, "What is recorded.")
    tensorboard: PynativeTensorboard = section(PynativeTensorboard, "TensorBoard files.")
    moe_monitor: PynativeMoeMonitor = section(PynativeMoeMonitor, "Records of experts.")


class PynativeProfiler(Section):
    """Profiling (``profiler``)."""

    enable_profiling: bool = setting(False, "Profile the steps from start_step to end_step.")
    start_step: int = setting(1, "First step that is profiled.", ge=1, le=COUNT)
    end_step: int = setting(1, "Last step that is profiled.", ge=1, le=COUNT)
    output_path: FilePath | None = setting(None, "Folder for the profile. Default null: output_dir.")
    profiler_rank: list[Annotated[int, Field(ge=0, le=RANKS)]] | None = setting(
        None, "Ranks that are profiled. Default null: all.")
    profiler_level: int = setting(0, "How much an Ascend records.", ge=0, le=2)
    mstx: bool = setting(False, "Mark steps in the profile.")
    profile_memory: bool = setting(False, "Memory of tensors in the profile.")
    with_stack: bool = setting(True, "Python stacks in the profile.")


class PynativeRecompute(Section):
    """Activations that are computed again (``recompute``)."""

    mode: Literal["None", "full", "select"] | None = setting("None", "What is computed again.")
    full_recompute_layer: _Ranges | None = setting(None, "mode full: layers, as [0-3, 5].")
    select_module: dict[str, _Ranges] | None = setting(None, "mode select: modules and their layers.")


class PynativeRecomputeComm(Section):
    """Communication that is done again (``recompute_comm``)."""


class PynativeSwap(Section):
    """Activations in host memory (``swap``)."""


class PynativeLora(Section):
    """Adapters (``lora_config``)."""

    target_modules: str = setting("", "Regular expression for the modules to adapt. Default empty.", min_length=1)
    lora_rank: int = setting(8, "Rank.", ge=1, le=WIDTH)
    lora_alpha: float = setting(16, "Numerator of their scale.", gt=0)
    lora_dropout: float = setting(0.0, "Dropout on what enters them.", ge=0, lt=1)


class PynativeConfig(Section):
    """A file of the newer schema."""

    checkpoint: PynativeCheckpoint = section(PynativeCheckpoint, "Saving and loading.")
    training: PynativeTraining = section(PynativeTraining, "Steps and batches.")
    parallelism: PynativeParallelism = section(PynativeParallelism, "Degrees of parallelism.")
    optimizer: dict[str, Any] = setting({}, "The update rule. Default: AdamW.")
    lr_scheduler: dict[str, Any] = setting({}, "Learning rate. Default: none.")
    train_dataset: PynativeDataset = section(PynativeDataset, "Data to train on.")
    model: dict[str, Any] = setting({}, "The model. Default: none.")
    monitor: PynativeMonitor = section(PynativeMonitor, "Records.")
    context: dict[str, Any] = setting({}, "Device. Default: none.")
    profiler: PynativeProfiler = section(PynativeProfiler, "Profiling.")
    recompute: PynativeRecompute = section(PynativeRecompute, "Activations that are computed again.")
    recompute_comm: PynativeRecomputeComm = section(PynativeRecomputeComm, "Communication that is done again.")
    swap: PynativeSwap = section(PynativeSwap, "Activations in host memory.")
    callbacks: list[dict[str, Any]] = setting([], "Monitors. Default: none.")
    lora_config: PynativeLora | None = setting(None, "Adapters. Default null: none.")
