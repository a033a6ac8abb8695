"""Device, parallel layout, memory and records: context, parallel, parallel_config, recompute_config and relatives."""

# No `from __future__ import annotations`: pydantic would have to compile every annotation's text at start-up.
from typing import Any, Literal, TypeAlias

from trainer.config.schema.fields import Section, ignored, section, setting

_ASCEND = "only Ascend devices have it"
_WHOLE_WEIGHTS = "every rank has whole weights and gradients; optimizer state alone is cut"
_OWN_ROWS = "data_parallel alone says how a batch is cut"
_NO_STRATEGY = "parallel_config alone says how a run is spread; checkpoints load on any number of ranks"
_NO_PIPELINE = "a pipeline is cut by pipeline_stage and micro_batch_num alone"
_NO_TENSOR = "tensor parallelism cuts products alone"
_NO_CONTEXT = "no context parallelism is built"
_BUCKETS = "gradients are reduced in buckets of a fixed size"
# A list in a list is MindSpore Transformers' way to number the layers of each pipeline stage: recompute.py refuses it.
_Layers: TypeAlias = bool | int | str | list[int | str | list[Any]]
_METRICS = "metrics.jsonl and report.png hold what a run shows"
_TENSORBOARD = "TensorBoard files are not written; metrics.jsonl and report.png hold what a run shows"
_COMPILER = "blocks are compiled with MindSpore's own defaults"


class ContextConfig(Section):
    """Device and execution mode (YAML ``context``)."""

    mode: int = setting(
        0,
        "0: blocks are compiled; 1: no compilation, for debugging; the same numbers. Default 0.",
        meanings={0: "graph", 1: "pynative"},
        ge=0,
        le=1,
    )
    device_target: Literal["CPU", "Ascend", "GPU"] | None = setting(None, "Device. Default null: the best there is.")
    device_fallback: bool = setting(
        False, "Take the best device there is where device_target is not there, and say so. Default False."
    )
    device_id: int = setting(0, "Which device of this machine. Default 0.", ge=0)
    max_device_memory: str | None = setting(None, 'Ascend: bound on device memory, as "58GB". Default null: none.')
    mempool_block_size: str | None = setting(
        None, 'Ascend: by how much the memory pool grows, as "1GB". Default null: MindSpore\'s 2GB.'
    )
    memory_optimize_level: Literal["O0", "O1"] | None = setting(
        None, "Ascend: optimization of memory. Default null: MindSpore's O0."
    )
    memory_offload: Literal["ON", "OFF"] | None = ignored(None, "Move idle memory to the host.", _ASCEND)
    max_call_depth: int | None = setting(
        None, "Ascend: depth of calls in a graph. Default null: MindSpore's 1000.", ge=1
    )
    jit_config: dict[str, Any] | None = setting(
        None, "Ascend: options of mindspore.jit, jit_level and exec_order. Default null: MindSpore's."
    )
    jit_level: Literal["O0", "O1", "O2"] | None = setting(
        None, "Ascend: optimization of compiled blocks, O0 or O1. Default null: MindSpore's O0."
    )
    infer_boost: str | None = ignored(None, "Faster inference.", "MindSpore 2.10 has given it up")
    save_graphs: bool | int = ignored(
        False, "Write compiled graphs.", "set the environment variable MS_DEV_SAVE_GRAPHS instead"
    )
    save_graphs_path: str = ignored(
        "./graph", "Where to.", "set the environment variable MS_DEV_SAVE_GRAPHS_PATH instead"
    )
    enable_graph_kernel: bool = ignored(False, "Fuse graph kernels.", _COMPILER)
    graph_kernel_flags: str | None = ignored(None, "Options of such fusion.", _COMPILER)
    ascend_config: dict[str, Any] | None = setting(
        None,
        "Ascend: precision_mode, op_precision_mode, matmul_allow_hf32, conv_allow_hf32, jit_compile, op_debug_option."
        " Default null: MindSpore's.",
    )
    gpu_config: dict[str, Any] | None = ignored(None, "Options of GPUs.", "GPUs run with MindSpore's own defaults")
    affinity_cpu_list: bool | str | list[Any] | dict[str, Any] | None = setting(
        None, "Ascend: bind MindSpore's threads to cores, True or which ones. Default null: not bound."
    )
    affinity_config: dict[str, Any] | None = ignored(None, "Cores to bind to.", "use taskset to bind a process")
    use_past: bool = ignored(False, "Keep keys and values.", "generation always keeps them")
    runtime_num_threads: int | None = setting(
        None, "Ascend: threads of kernels on the host; 0: as null. Default null: MindSpore's 30.", ge=0
    )
    inter_op_parallel_num: int | None = setting(
        None, "Ascend: threads that start operators; 0: as null. Default null: MindSpore's 5.", ge=0
    )
    enable_compile_cache: bool = ignored(False, "Keep compiled graphs.", _COMPILER)
    compile_cache_path: str | None = ignored(None, "Where to.", _COMPILER)
    deterministic: Literal["ON", "OFF"] | None = setting(
        None, "Ascend: the same bits each time, which a CPU always gives. Default null: OFF."
    )
    exec_order: str | None = setting(None, "Ascend: order of operators, bfs or dfs. Default null: MindSpore's bfs.")
    check_bprop: bool = ignored(False, "Check gradients.", "the tests check them")
    pynative_synchronize: bool = setting(False, "Ascend: wait after each operator. Default False.")
    max_memory_usage: str | None = ignored(None, "Bound on memory.", _ASCEND)
    hccl_buffsize: int | None = ignored(None, "Buffer of communication.", _ASCEND)


class ParallelOptimizerConfig(Section):
    """How optimizer state is cut (YAML ``parallel.parallel_optimizer_config``)."""

    gradient_accumulation_shard: bool = ignored(False, "Cut accumulated gradients.", _WHOLE_WEIGHTS)
    parallel_optimizer_threshold: int = setting(
        64, "Kilobytes (1024 bytes) of a parameter from which its optimizer state is cut. Default 64.", ge=0
    )
    optimizer_weight_shard_size: int = ignored(
        -1, "Devices that share a parameter.", "all data-parallel ranks share optimizer state"
    )
    optimizer_level: Literal["level1", "level2", "level3"] | None = ignored(None, "What is cut.", _WHOLE_WEIGHTS)


class ParallelSection(Section):
    """How a run is spread (YAML ``parallel``)."""

    parallel_mode: (
        Literal[0, 1, 2, 3]
        | Literal["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel"]
    ) = setting(
        0,
        "0 or data_parallel; with several ranks 1 is MindSpore's semi-automatic mode (Ascend only), 2 automatic and 3"
        " hybrid are not yet supported. Default 0.",
    )
    parallel_fallback: Literal["explicit"] | None = setting(
        None, "explicit: data parallelism, the trainer's own, in the place of semi-automatic mode. Default null: none."
    )
    full_batch: bool = setting(
        True, "Semi-automatic mode: a rank hands MindSpore the whole batch, or its own part. Default True."
    )
    gradients_mean: bool = ignored(
        False, "Average gradients over ranks.", "the loss is always divided by the valid tokens of all ranks"
    )
    enable_parallel_optimizer: bool = setting(
        False, "The data-parallel ranks share the optimizer state instead of having a copy each. Default False."
    )
    enable_alltoall: bool = ignored(False, "All-to-all communication.", "every rank has all experts")
    loss_repeated_mean: bool = ignored(
        True, "Average repeated losses.", "the loss is always divided by the valid tokens of all ranks"
    )
    search_mode: str = ignored("sharding_propagation", "How a strategy is found.", _NO_STRATEGY)
    strategy_ckpt_save_file: str | None = ignored(None, "Strategy file.", _NO_STRATEGY)
    strategy_ckpt_config: dict[str, Any] | None = ignored(None, "Strategy file and its contents.", _NO_STRATEGY)
    dataset_strategy: str | list[Any] | None = ignored(None, "How a batch is cut.", _OWN_ROWS)
    parallel_optimizer_config: ParallelOptimizerConfig = section(ParallelOptimizerConfig, "How optimizer state is cut.")
    device_num: int | None = ignored(None, "Devices.", "`launch --nproc` says how many ranks there are")
    group_ckpt_save_file: str | None = ignored(None, "File of groups.", _NO_STRATEGY)
    pipeline_config: dict[str, Any] | None = ignored(None, "Pipeline schedule.", _NO_PIPELINE)
    comm_fusion: dict[str, Any] | None = ignored(None, "Fused communication.", _BUCKETS)
    auto_parallel_search_mode: str | None = ignored(None, "How a strategy is found.", _NO_STRATEGY)
    force_fp32_communication: bool = ignored(False, "Communicate in float32.", "gradients are float32, and stay so")


class ParallelConfig(Section):
    """Degrees of the rank grid (YAML ``parallel_config``); with use_parallel False they are not used."""

    data_parallel: int | None = setting(
        None, "Copies of the model on different data. Default null: the ranks that the other degrees leave.", ge=1
    )
    model_parallel: int = setting(1, "Devices that share each matrix. Default 1.", ge=1)
    context_parallel: int = setting(1, "Devices that share each row's tokens. Default 1.", ge=1)
    expert_parallel: int = setting(1, "Devices that share the experts. Default 1.", ge=1)
    pipeline_stage: int = setting(1, "Devices that share the layers. Default 1.", ge=1)
    micro_batch_num: int = setting(1, "Micro-batches of a pipeline. Default 1.", ge=1)
    use_seq_parallel: bool = ignored(False, "Cut activations along the sequence.", _NO_TENSOR)
    vocab_emb_dp: bool = ignored(True, "Every device has the whole embedding.", "every rank has the whole embedding")
    gradient_aggregation_group: int = ignored(4, "Gradients communicated at once.", _BUCKETS, ge=1)
    seq_split_num: int = ignored(1, "Parts of a sequence in a pipeline.", _NO_PIPELINE, ge=1)
    expert_model_parallel: int | None = ignored(None, "Devices that share an expert.", _NO_TENSOR)
    context_parallel_algo: str = ignored("colossalai_cp", "How tokens are shared.", _NO_CONTEXT)
    ulysses_degree_in_cp: int = ignored(1, "Ulysses' part of context_parallel.", _NO_CONTEXT, ge=1)
    mem_coeff: float = ignored(0.1, "Weight of memory in a search.", _NO_STRATEGY)
    optimizer_shard: bool | None = ignored(
        None, "Cut optimizer state.", "parallel.enable_parallel_optimizer says whether it is cut"
    )
    sp_ds: int | None = ignored(None, "Older cut of the sequence.", _NO_CONTEXT)
    virtual_pipeline_model_parallel_size: int | None = ignored(None, "Interleaved pipeline parts.", _NO_PIPELINE)


class RecomputeConfig(Section):
    """Trade time for activation memory (YAML ``recompute_config``)."""

    recompute: _Layers = setting(
        False,
        "Blocks to compute again in the backward pass instead of keeping their activations: True for all, an integer"
        " for so many from the first, or a list of layers and ranges such as [0, 4-7]. Default False.",
    )
    select_recompute: _Layers | dict[str, _Layers] = setting(
        False,
        "Halves of blocks to compute again: a list of attention, mlp and MindSpore Transformers' regular expressions,"
        " or each with its layers; True for mlp. Default False.",
    )
    parallel_optimizer_comm_recompute: bool = ignored(False, "Communicate parameters again.", _WHOLE_WEIGHTS)
    mp_comm_recompute: bool = ignored(True, "Communicate activations again.", _NO_TENSOR)
    recompute_slice_activation: bool = ignored(False, "Cut what is kept.", _NO_TENSOR)
    select_recompute_exclude: _Layers | dict[str, _Layers] = setting(
        False, "Halves to keep after all: written like select_recompute; True for both. Default False."
    )
    select_comm_recompute: bool | int | list[Any] | dict[str, Any] = ignored(False, "Communicate again.", _NO_TENSOR)
    select_comm_recompute_exclude: bool | int | list[Any] | dict[str, Any] = ignored(
        False, "Blocks left out.", _NO_TENSOR
    )


class SwapConfig(Section):
    """Move activations to host memory (YAML ``swap_config``)."""

    swap: bool = ignored(False, "Move activations to the host.", _ASCEND)
    default_prefetch: int = ignored(1, "Operators ahead to bring them back.", _ASCEND)
    layer_swap: list[Any] | dict[str, Any] | None = ignored(None, "Whole blocks.", _ASCEND)
    op_swap: list[Any] | dict[str, Any] | None = ignored(None, "Parts of blocks.", _ASCEND)


class TensorboardConfig(Section):
    """TensorBoard files (YAML ``tensorboard``)."""

    tensorboard_dir: str | None = ignored(None, "Folder.", _TENSORBOARD)
    tensorboard_queue_size: int = ignored(10, "Records kept before writing.", _TENSORBOARD)
    log_loss_scale_to_tensorboard: bool = ignored(False, "Record the loss scale.", _TENSORBOARD)
    log_timers_to_tensorboard: bool = ignored(False, "Record times.", _TENSORBOARD)
    log_expert_load_to_tensorboard: bool = ignored(False, "Record experts.", _TENSORBOARD)


class MonitorConfig(Section):
    """Training state records (YAML ``monitor_config``)."""

    monitor_on: bool = ignored(True, "Record at all.", _METRICS)
    dump_path: str | None = ignored(None, "Folder.", _METRICS)
    target: list[str] | None = ignored(None, "Parameters.", _METRICS)
    invert: bool = ignored(False, "All others.", _METRICS)
    step_interval: int = ignored(1, "Steps between records.", _METRICS)
    local_loss_format: str | list[str] | None = ignored(None, "Loss of each rank.", _METRICS)
    device_local_loss_format: str | list[str] | None = ignored(None, "Loss of each device.", _METRICS)
    local_norm_format: str | list[str] | None = ignored(None, "Norm of each parameter.", _METRICS)
    device_local_norm_format: str | list[str] | None = ignored(None, "Norm of each device.", _METRICS)
    optimizer_state_format: str | list[str] | None = ignored(None, "Optimizer state.", _METRICS)
    weight_state_format: str | list[str] | None = ignored(None, "Weights.", _METRICS)
    max_attention_logit_format: str | list[str] | None = ignored(None, "Attention scores.", _METRICS)
    throughput_baseline: float | None = ignored(None, "Tokens per second to compare with.", _METRICS)
    print_struct: bool = ignored(False, "Print parameter names.", _METRICS)
    check_for_global_norm: bool = ignored(False, "Watch the global norm.", _METRICS)
    global_norm_record_path: str | None = ignored(None, "Its record.", _METRICS)
    global_norm_spike_threshold: float = ignored(3.0, "When it is a spike.", _METRICS)
    global_norm_spike_count_threshold: int = ignored(10, "Spikes in a row.", _METRICS)
    embedding_size: int | None = ignored(None, "Size of the embedding.", _METRICS)
    embedding_local_norm_threshold: float | None = ignored(None, "Norm of the embedding.", _METRICS)
    use_checkpoint_health_monitor: bool = ignored(False, "Mark healthy checkpoints.", _METRICS)
