"""Device, parallel layout, memory and records: context, parallel, parallel_config, recompute_config and relatives."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PrivateAttr

from trainer.config.schema.fields import BATCH, COUNT, LAYERS, RANKS, FilePath, Section, one_number_of, section, setting

# A list in a list is MindSpore Transformers' way to number the layers of each pipeline stage: recompute.py refuses it.
_Layers: TypeAlias = bool | int | str | list[int | str | list[Any]]
ParallelMode: TypeAlias = Literal[
    "stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel"]


class ContextConfig(Section):
    """Device and execution mode (YAML ``context``)."""

    mode: Annotated[Literal[0, 1], one_number_of(0, 1)] = setting(
        0, "0: layers on arrays (CPU) or compiled blocks (Ascend); 1: operator by operator, to debug; memory grows on a"
        " CPU.")
    device_target: Literal["CPU", "Ascend", "GPU"] | None = setting(
        None, "Device. Default null: the best that is available.")
    device_fallback: bool = setting(
        False, "Use the best available device, with a note, if device_target is not available.")
    device_id: int = setting(0, "Which device of this machine.", ge=0, le=RANKS)
    max_device_memory: str | None = setting(None, 'Ascend: bound on device memory, as "58GB". Default null: none.')
    mempool_block_size: str | None = setting(
        None, 'Ascend: by how much the memory pool grows, as "1GB". Default null: MindSpore\'s 2GB.')
    memory_optimize_level: Literal["O0", "O1"] | None = setting(
        None, "Ascend: optimization of memory. Default null: MindSpore's O0.")
    max_call_depth: int | None = setting(
        None, "Ascend: depth of calls in a graph. Default null: MindSpore's 1000.", ge=1, le=COUNT)
    jit_config: dict[str, Any] | None = setting(
        None, "Ascend: options of mindspore.jit, jit_level and exec_order. Default null: MindSpore's.")
    jit_level: Literal["O0", "O1", "O2"] | None = setting(
        None, "Ascend: optimization of compiled blocks, O0 or O1. Default null: MindSpore's O0.")
    ascend_config: dict[str, Any] | None = setting(
        None, "Ascend: precision_mode, op_precision_mode, matmul_allow_hf32, conv_allow_hf32, jit_compile,"
        " op_debug_option. Default null: MindSpore's.")
    affinity_cpu_list: bool | str | list[Any] | dict[str, Any] | None = setting(
        None, "Ascend: bind MindSpore's threads to cores, true or which ones. Default null: not bound.")
    runtime_num_threads: int | None = setting(
        None, "Ascend: threads of kernels on the host. Default null, like 0: MindSpore's 30.", ge=0, le=RANKS)
    inter_op_parallel_num: int | None = setting(
        None, "Ascend: threads that start operators. Default null, like 0: MindSpore's 5.", ge=0, le=RANKS)
    deterministic: Literal["ON", "OFF"] | None = setting(
        None, "Ascend: the same bits in each run, which a CPU always gives. Default null: OFF.")
    exec_order: str | None = setting(None, "Ascend: order of operators, bfs or dfs. Default null: MindSpore's bfs.")
    pynative_synchronize: bool = setting(False, "Ascend: wait after each operator.")


class ParallelOptimizerConfig(Section):
    """How optimizer state is sharded (YAML ``parallel.parallel_optimizer_config``)."""

    parallel_optimizer_threshold: int = setting(
        64, "Parameters smaller than this many KiB are not sharded.", ge=0, le=COUNT)
    optimizer_weight_shard_size: int = setting(
        -1, "Data-parallel ranks that shard the state of a weight together. Default -1: all that have a copy of it.",
        ge=-1, le=RANKS)
    optimizer_level: Literal["level1", "level2", "level3"] = setting(
        "level1", "ZeRO stage: level1 shards optimizer state, level2 also gradients, level3 also weights, which are"
        " gathered for each use. Semi-automatic mode shards weights from level1 on; with level3 its backward pass"
        " gathers them again.")
    gradient_accumulation_shard: bool = setting(False, "Older name of optimizer_level level2.")


class PipelineConfig(Section):
    """How the micro-batches of a pipeline follow each other (YAML ``parallel.pipeline_config``)."""

    pipeline_interleave: bool = setting(False, "A stage has pp_interleave_num model chunks.")
    pipeline_scheduler: Literal["1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v"] = setting(
        "1f1b", "Order of forward and backward passes: 1f1b, or gpipe with all forward passes first; the others are"
        " MindSpore's, in semi-automatic mode.")
    _slices: int = PrivateAttr(default=1)

    @property
    def slices(self) -> int:
        """Returns the slices of a sequence, each of which is a pass: 1 in each run of this trainer.

        A search also estimates the layouts of files with several, which MindSpore Transformers runs.
        """
        return self._slices

    def with_slices(self, number: int) -> "PipelineConfig":
        """Returns the section with this number of slices."""
        changed = self.model_copy()
        changed._slices = number
        return changed


class ParallelSection(Section):
    """Parallel mode and its settings (YAML ``parallel``)."""

    parallel_mode: Annotated[Literal[0, 1, 2, 3], one_number_of(0, 1, 2, 3)] | ParallelMode = setting(
        0, "0, data_parallel or MANUAL_PARALLEL: explicit mode. 1, on several ranks: MindSpore's semi-automatic mode"
        " (Ascend only). 2 (automatic) and 3 (hybrid) are not yet supported.")
    parallel_fallback: Literal["explicit"] | None = setting(
        None, "explicit: explicit mode instead of semi-automatic mode. Default null: none.")
    full_batch: bool = setting(
        True, "Semi-automatic mode with micro-batches: a rank passes MindSpore the global batch; false: only its rows.")
    enable_parallel_optimizer: bool = setting(
        False, "Shard the optimizer state over the data-parallel ranks (ZeRO); optimizer_level selects the stage.")
    parallel_optimizer_config: ParallelOptimizerConfig = section(
        ParallelOptimizerConfig, "How optimizer state is sharded.")
    pipeline_config: PipelineConfig = section(PipelineConfig, "Order of a pipeline's micro-batches.")
    comm_fusion: dict[str, Any] | None = setting(
        None, "Semi-automatic mode: which collectives MindSpore joins, as AutoParallel.comm_fusion takes it:"
        " {allreduce: {mode: auto, config: null}}. Default null: MindSpore's.")
    force_fp32_communication: bool = setting(False, "Semi-automatic mode: sums over ranks are float32.")


class ParallelConfig(Section):
    """Degrees of parallelism (YAML ``parallel_config``); not used where use_parallel is false."""

    data_parallel: int | None = setting(
        None, "Data-parallel degree: replicas of the model. Default null: the ranks divided by the other degrees.",
        ge=1, le=RANKS)
    model_parallel: int = setting(1, "Tensor-parallel degree: ranks that shard each matrix.", ge=1, le=RANKS)
    context_parallel: int = setting(
        1, "Context-parallel degree: ranks that shard the tokens of each sequence.", ge=1, le=RANKS)
    context_parallel_algo: Literal["colossalai_cp", "ulysses_cp", "hybrid_cp"] = setting(
        "colossalai_cp", "Attention with context_parallel. colossalai_cp: the ranks gather keys and values; ulysses_cp:"
        " each rank computes some of the heads; hybrid_cp: ulysses_degree_in_cp ranks exchange heads, and groups of"
        " them gather keys and values.")
    ulysses_degree_in_cp: int = setting(
        1, "hybrid_cp: neighbouring ranks of context_parallel that exchange heads.", ge=1, le=RANKS)
    expert_parallel: int = setting(1, "Expert-parallel degree: ranks that shard the experts.", ge=1, le=RANKS)
    expert_model_parallel: int | None = setting(
        None, "Ranks that shard each expert in MindSpore Transformers: it multiplies expert_parallel, as a rank has"
        " whole experts here. Default null: model_parallel in files of its legacy classes, else 1.", ge=1, le=RANKS)
    pipeline_stage: int = setting(1, "Number of pipeline stages.", ge=1, le=RANKS)
    micro_batch_num: int = setting(1, "Micro-batches of a step in a pipeline.", ge=1, le=BATCH)
    use_seq_parallel: bool = setting(
        False, "Sequence parallelism: the tensor-parallel ranks also shard the tokens between the matrices (Korthikanti"
        " et al. 2022).")
    gradient_aggregation_group: int = setting(
        4, "Semi-automatic mode: groups of layers whose gradients MindSpore may sum in one collective.",
        ge=1, le=LAYERS)


class RecomputeConfig(Section):
    """Trade time for activation memory (YAML ``recompute_config``)."""

    recompute: _Layers = setting(
        False, "Blocks to compute again in the backward pass instead of keeping their activations: true for all, an"
        " integer for so many from the first, or a list of layers and ranges such as [0, 4-7].")
    select_recompute: _Layers | dict[str, _Layers] = setting(
        False, "Sublayers of blocks to compute again: a list of attention, mlp and MindSpore Transformers' regular"
        " expressions, or each with its layers; true for mlp.")
    select_recompute_exclude: _Layers | dict[str, _Layers] = setting(
        False, "Sublayers to except: written like select_recompute; true for both.")
    select_comm_recompute: _Layers | dict[str, _Layers] = setting(
        False, "Semi-automatic mode with use_seq_parallel: layers that gather the tokens before a product again in the"
        " backward pass, written like recompute.")
    mp_comm_recompute: bool = setting(
        True, "Semi-automatic mode: recomputation also repeats the communication of model_parallel.")
    parallel_optimizer_comm_recompute: bool = setting(
        False, "With recomputation: the same as optimizer_level level3.")
    recompute_slice_activation: bool = setting(
        False, "Semi-automatic mode: the ranks of model_parallel shard the tensors that recomputation keeps.")


class SwapConfig(Section):
    """Move activations to host memory (YAML ``swap_config``)."""


class TensorboardConfig(Section):
    """TensorBoard files (YAML ``tensorboard``)."""

    tensorboard_dir: FilePath | None = setting(
        None, "Folder for TensorBoard's event files, which rank 0 writes to its subfolder rank_0. Default null: none.")
    tensorboard_queue_size: int = setting(10, "Records that are kept before they are written.", ge=1, le=COUNT)
    log_interval: int = setting(1, "Optimizer steps between records.", ge=1, le=COUNT)
    log_loss_scale_to_tensorboard: bool = setting(False, "Write the loss scale too.")
    log_timers_to_tensorboard: bool = setting(False, "Write the time of a step, samples/s and tokens/s too.")


Outlet: TypeAlias = Literal["log", "tensorboard"]
"""A destination of records of the training state."""


class MonitorConfig(Section):
    """Training state records (YAML ``monitor_config``)."""

    monitor_on: bool = setting(False, "Whether the keys of this section act.")
    step_interval: int = setting(1, "Optimizer steps between records.", ge=1, le=COUNT)
    target: list[str] | None = setting(
        None, "Regular expressions for the parameters that local_norm_format and optimizer_state_format record, found"
        " anywhere in their names, which are Hugging Face's or MindSpore Transformers'. Default null: all.")
    invert: bool = setting(False, "Record the parameters that target does not name, instead of those that it names.")
    local_norm_format: Outlet | list[Outlet] | None = setting(
        None, "Where the norm of each parameter's gradient goes: log, tensorboard or both. Default null: nowhere.")
    optimizer_state_format: Outlet | list[Outlet] | None = setting(
        None, "Where the norms of AdamW's two averages of each parameter go, which takes time. Default null: nowhere.")
    weight_state_format: Outlet | list[Outlet] | None = setting(
        None, "Where the norm of all trained weights goes, which takes time. Default null: nowhere.")
    max_attention_logit_format: Outlet | list[Outlet] | None = setting(
        None, "Where the largest attention logit of each layer goes. Default null: nowhere.")
    throughput_baseline: float | None = setting(
        None, "Samples per second and device of a baseline; the throughput is recorded relative to it. Default null:"
        " off.", gt=0)
    print_struct: bool = setting(False, "Print the names of all trained parameters, and end without a step.")

    @property
    def patterns(self) -> list[str]:
        """Returns `target` as regular expressions; MindSpore Transformers writes ``*`` for all parameters."""
        targets = self.target or ["*"]
        return [".*" if text == "*" else text for text in targets]

    def destinations(self, key: str) -> frozenset[str]:
        """Returns the destinations of the records of a key such as ``local_norm_format``."""
        if not self.monitor_on:
            return frozenset()
        value = getattr(self, key)
        if isinstance(value, str):
            return frozenset([value])
        return frozenset(value or ())


def _rate(description: str, **bounds: Any) -> Any:
    return setting(None, f"{description}. Default null: that of docs/search.md.", **bounds)


class HardwareConfig(Section):
    """Rates and links of a device, for estimates of the time of a step by `plan --search` (YAML ``hardware``)."""

    peak_tflops: float | None = _rate("Peak of matrix products, TFLOP/s of a rank", gt=0)
    products: float | None = _rate("Share of the peak that matrix products reach", gt=0, le=1)
    experts: float | None = _rate("Share of the peak that grouped products of experts reach", gt=0, le=1)
    attention: float | None = _rate("Share of the peak that attention reaches", gt=0, le=1)
    memory_gbps: float | None = _rate("Bandwidth of a rank's memory, GB/s", gt=0)
    layer_overhead: float | None = _rate("Microseconds that a pass of a layer takes beside its operators", ge=0)
    ranks_per_node: int | None = setting(
        None, "Ranks of a node. Default null: --local_ranks, or that of docs/search.md.", ge=1, le=RANKS)
    node_gbps: float | None = _rate("Rate at which a rank sends to others of its node, GB/s", gt=0)
    node_latency: float | None = _rate("Microseconds of a collective in a node", ge=0)
    network_gbps: float | None = _rate("Rate at which a rank sends to other nodes, GB/s", gt=0)
    network_latency: float | None = _rate("Microseconds of a collective between nodes", ge=0)
