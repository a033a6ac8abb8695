"""The newer schema of MindSpore Transformers' files as a table of rows, at least one for each key.

The source is a file of the newer schema; the target is the schema of this trainer. Sections that the newer schema does
not describe, such as ``model``, are taken as they are: their keys are those of the target section.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from trainer.config.families import has_latent_attention, named_family, source_class
from trainer.config.note import Note
from trainer.config.pynative import degrees, inverses
from trainer.config.pynative.latent import asks_for_latent_attention, set_latent_attention
from trainer.config.pynative.translation import Translation
from trainer.config.read.nodes import Entry, Items, Table, plain, tree
from trainer.config.read.rows import Row, Transform, reverse
from trainer.config.schema.unsupported import read_table

_MODEL = "model.model_config"
_EVENTS = "monitor.tensorboard.output_dir"
_PROFILES = "profiler.enable_profiling"
_SIZES = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "qkv_has_bias": "attention_bias", "mlp_has_bias": "mlp_bias", "use_qk_norm": "qk_layernorm",
    "layernorm_compute_type": "layernorm_compute_dtype", "softmax_compute_type": "softmax_compute_dtype",
    "param_init_type": "params_dtype", "use_fused_rope": "apply_rope_fusion", "rotary_pct": "partial_rotary_factor",
    "use_fused_swiglu": "bias_swiglu_fusion", "mtp_depth": "num_nextn_predict_layers",
    "mtp_loss_factor": "mtp_loss_scaling_factor",
}  # fmt: skip
"""Keys of the decoder here -> their names in MindSpore Transformers' newer files, where those differ."""
_EXPERTS = {
    "expert_num": "num_experts", "num_experts_chosen": "num_experts_per_tok", "z_loss_factor": "moe_z_loss_coeff",
    "capacity_factor": "moe_expert_capacity_factor", "aux_loss_factor": "moe_aux_loss_coeff",
    "shared_expert_num": "n_shared_experts", "use_shared_expert_gating": "moe_shared_expert_gate",
    "balance_via_topk_bias": "moe_router_enable_expert_bias", "topk_bias_update_rate": "moe_router_bias_update_rate",
    "use_gmm": "moe_grouped_gemm", "use_fused_ops_permute": "moe_permute_fusion",
}  # fmt: skip
"""The same of experts."""


def _saving(work: Translation, row: Row) -> None:
    """Adds the callbacks that print losses and save checkpoints; a run always saves at its end."""
    callbacks = work.node(row.old)
    entries = []
    if isinstance(callbacks, Items):
        entries = list(callbacks.entries)
    if not any(plain(entry.node).get("type") == "MFLossMonitor" for entry in entries if isinstance(entry.node, Table)):
        entries.append(Entry(tree({"type": "MFLossMonitor"}, work.place(row.old)), work.place(row.old)))
    steps_key = "checkpoint.save_interleaved_steps"
    steps = work.values[steps_key]
    if not work.values["checkpoint.enable_save"]:
        steps = 0
        steps_key = "checkpoint.enable_save"
        text = f"{steps_key} false: a checkpoint is still saved at the end of the run"
        work.notes.append(Note(text, "ignored"))
    saver = {
        "type": ("CheckpointMonitor", steps_key),
        "save_checkpoint_steps": (steps, steps_key),
        "keep_checkpoint_max": (work.values["checkpoint.save_max"], "checkpoint.save_max"),
    }
    if work.values["checkpoint.async_save"]:
        saver["async_save"] = (True, "checkpoint.async_save")
    settings = {name: Entry(tree(value), work.place(source)) for name, (value, source) in saver.items()}
    entries.append(Entry(Table(settings), work.place(steps_key)))
    work.set_key(row.new, Items(entries), row.old)


def _optimizer(work: Translation, row: Row) -> None:
    table = work.table(row.old)
    kind = work.values["optimizer.type"]
    if kind == "Muon":
        _rename_muon(work, table)
    for name in ("adamw_betas", "adamw_eps"):
        if table.explicit.pop(name, None):
            work.problem(f"{row.old}.{name}", "only Muon has it", f"write {name.removeprefix('adamw_')}")
    if kind == "SGD":
        text = "optimizer.type SGD: MindSpore Transformers' PynativeTrainer does not have it"
        work.notes.append(Note(text, "parallel"))
    elif kind == "Muon" and not asks_for_latent_attention(work.values["model"]):
        text = "optimizer.type Muon: MindSpore Transformers has it only for multi-head latent attention"
        work.notes.append(Note(text, "parallel"))
    work.set_key(row.new, table, row.old)


def _rename_muon(work: Translation, optimizer: Table) -> None:
    """Renames the keys of a Muon there: eps belongs to Newton-Schulz, adamw_eps and adamw_betas to AdamW."""
    entries = optimizer.explicit
    betas = entries.pop("betas", None)
    if betas is not None:
        text = f"betas of Muon ({betas.place.text}): no effect, its AdamW has adamw_betas there"
        work.notes.append(Note(text, "ignored"))
    for name, new_name in (("eps", "ns_eps"), ("adamw_eps", "eps"), ("adamw_betas", "betas")):
        if name in entries:
            entries[new_name] = entries.pop(name)


def _schedule(work: Translation, row: Row) -> None:
    """Sets the schedule without its total_steps: its length is always that of the run."""
    key = row.old
    table = work.table(key)
    if work.values[key].get("type") is None:
        fix = "add type: to it, for example CosineWithWarmUpLR"
        work.problem(f"{key}.type", "this key is required", fix, place=work.place(key))
        return
    if written := table.explicit.pop("total_steps", None):
        text = f"{key}.total_steps ({written.place.text}): no effect, the schedule has the steps of the run there, too"
        work.notes.append(Note(text, "ignored"))
    if "base_lr" in table.explicit and (written := table.explicit.pop("learning_rate", None)):
        work.notes.append(Note(f"{key}.learning_rate ({written.place.text}): no effect beside base_lr", "ignored"))
    work.set_key("lr_schedule", table, key)


def _learning_rate(work: Translation, row: Row) -> None:
    if "base_lr" not in work.table("lr_scheduler").explicit:
        work.set_key(row.new, row.default, row.old)


def _dataset(work: Translation, row: Row) -> None:
    key = row.old
    table = work.table(key)
    if not table.explicit:
        if key not in work.wrong and not any(each.error.key.startswith("train_dataset.") for each in work.problems):
            place = work.place("train_dataset")
            work.problem(key, "there is no data to train on", "write dataloader: and its type below", place=place)
        return
    if work.values[key].get("type") == "MindDataset":
        columns = table.explicit.pop("column_names", None)
        columns = columns or Entry(tree(["input_ids", "labels"], work.place(key)), work.place(key))
        work.set_key("train_dataset.input_columns", columns.node, f"{key}.column_names", place=columns.place)
    for name in ("num_parallel_workers", "python_multiprocessing"):
        table.explicit.pop(name, None)
    work.set_key("train_dataset.data_loader", table, key)


_GRAPH_MODE_ONLY = (
    "window_size", "window_attn_skip_freq", "softmax_scale", "nope_layer_interval", "param_init_std_rules",
)  # fmt: skip


def _model(work: Translation, row: Row) -> None:
    """Sets the keys of the model, except those of Hugging Face that MindSpore Transformers' class drops."""
    key = row.old
    settings = work.values[key]
    family, _ = named_family(settings)
    known = None
    if family:
        known = source_class(family, settings)
    for name, entry in work.table(key).explicit.items():
        if known is not None and name in known.unread:
            if settings[name] not in (None, False):
                text = f"{entry.place.text}: {key}.{name}: not used, as in MindSpore Transformers' {known.name}"
                work.notes.append(text)
            continue
        if "." in name:
            work.problem(f"{key}.{name}", "unknown key in model", "write its section, and the rest of its name below",
                         place=entry.place)  # fmt: skip
            continue
        if name in _GRAPH_MODE_ONLY and settings[name] is not None:
            text = "acts here; MindSpore Transformers' PynativeTrainer does not read it"
            work.notes.append(f"{entry.place.text}: {key}.{name}: {text}")
        work.set_key(f"{_MODEL}.{name}", entry.node, f"{key}.{name}", place=entry.place)
    if known is not None and has_latent_attention(family, settings):
        set_latent_attention(work, known)


def _targets(work: Translation, row: Row) -> None:
    """Sets the expression, which is found anywhere in the full names of PyNative mode."""
    if not work.values[row.old]:
        work.problem(row.old, "this key is required", "write for example linear_qkv", place=work.place("lora_config"))
        return
    work.set_key(row.new, work.values[row.old], row.old)
    work.set_key(f"{_MODEL}.pet_config.match", "search", row.old)


def _recompute_mode(work: Translation, row: Row) -> None:
    key = row.old
    mode = work.values[key]
    layers = {"full": "recompute.full_recompute_layer", "select": "recompute.select_module"}
    if mode not in (None, "None", *layers):
        work.problem(key, "must be None, full or select", "write full, and the layers in full_recompute_layer")
    elif mode in layers and not work.values[layers[mode]]:
        place = work.place(key)
        work.problem(layers[mode], f"{key} {mode} needs it", "write layers, as [0-3]", place=place, has_value=False)


def _recompute_modules(work: Translation, row: Row) -> None:
    """Sets the recomputed modules: a list names them for all layers, a section gives each its layers."""
    key = row.old
    modules = work.values[key]
    if not modules:
        return
    if isinstance(modules, list):
        if any(str(name)[:1].isdigit() for name in modules):
            work.problem(key, "a list must have names of modules", "write a section: {self_attention: [0-3]}")
        work.set_key(row.new, [str(name) for name in modules], key)
        return
    if not all(isinstance(layers, list) for layers in modules.values()):
        work.problem(key, "must have a list of layers for each module", "write layers, as [0-3]")
        return
    texts = {name: [str(layer) for layer in layers] for name, layers in modules.items()}
    work.set_key(row.new, texts, key)


def _context(work: Translation, row: Row) -> None:
    """Sets the keys of context, except mode 1, which has no counterpart."""
    for name, entry in work.table(row.old).explicit.items():
        if name != "mode":
            work.set_key(f"{row.new}.{name}", entry.node, f"{row.old}.{name}", place=entry.place)


def _clipping_norm(work: Translation, row: Row) -> None:
    """Sets the largest norm of the gradients. There, clipping multiplies them by max_norm / their norm, if that is
    below 1 (mindformers/pynative/trainer/utils.py, line 787): 0 does not switch it off."""
    norm = work.values[row.old]
    fix = f"write {inverses.NO_CLIPPING:.1e}, which clips nothing"
    if norm < 0:
        work.problem(row.old, "MindSpore Transformers would reverse the gradients", fix)
    elif norm == 0:
        work.problem(row.old, "MindSpore Transformers would multiply the gradients by 0", fix)
    elif norm < inverses.NO_CLIPPING:
        work.set_key(row.new, norm, row.old)


def _norms(names: bool | str | list[str]) -> bool | list[str]:
    """Returns which norms are recorded: all, none, or those of parameters with these parts in their names."""
    if isinstance(names, str):
        names = [names]
    if isinstance(names, list):
        names = [name for name in names if name != ""]
    return names or False


_OPPOSITE = Transform(lambda value: not value, lambda value: not value)
_ON = Transform(lambda value: "ON", lambda value: value == "ON")

# Keys below a row of kind "dict" are those of the section here; their rows have the defaults that differ.
ROWS = (
    Row("training.seed", "seed", "int", 42),
    Row("training.steps", "runner_config.max_steps", "int", 1000),
    Row("training.local_batch_size", "runner_config.batch_size", "int", 1),
    Row("training.global_batch_size", "runner_config.global_batch_size", "int", 1),
    Row("training.rampup_batch_size", "runner_config.rampup_batch_size", "list"),
    Row("training.max_norm", "runner_wrapper.use_clip_grad", "float", 1.0,
        transform=Transform(lambda norm: norm < inverses.NO_CLIPPING)),
    Row("training.max_norm", "runner_wrapper.max_grad_norm", "float", 1.0, apply=_clipping_norm,
        inverse=inverses.max_norm),
    Row("training.deterministic", "context.deterministic", "bool", False, "training.deterministic", _ON),
    # There it is read by nobody; here it is a folder like save_path, which wins.
    Row("output_dir", "output_dir", "str", "", "output_dir"),
    # _saving reads these four.
    Row("checkpoint.enable_save", "", "bool", True,
        inverse=lambda config: config.checkpoint_monitor.save_checkpoint_steps > 0),
    Row("checkpoint.save_max", "", "int", 5, inverse=lambda config: config.checkpoint_monitor.keep_checkpoint_max),
    Row("checkpoint.async_save", "", "bool", False, inverse=lambda config: config.checkpoint_monitor.async_save),
    Row("checkpoint.save_interleaved_steps", "", "int", 1000,
        inverse=lambda config: config.checkpoint_monitor.save_checkpoint_steps or ...),
    Row("checkpoint.save_path", "output_dir", "str", "", "checkpoint.save_path",
        note="the folder of the run; the checkpoints are in {}/checkpoints"),
    Row("checkpoint.load_path", "load_checkpoint", "str", "", "checkpoint.load_path"),
    Row("checkpoint.no_load_optim", "resume_training", "bool", False, "checkpoint.load_path", _OPPOSITE),
    Row("parallelism.tensor_parallel", "parallel_config.model_parallel", "int", apply=degrees.set_degree),
    Row("parallelism.sequence_parallel", "parallel_config.use_seq_parallel", "bool", False,
        apply=degrees.set_sequence_parallel),
    Row("parallelism.context_parallel", "parallel_config.context_parallel", "int", apply=degrees.set_degree),
    Row("parallelism.context_parallel_method", "parallel_config.context_parallel_algo", "str", "colossal",
        choices={"colossal": "colossalai_cp", "ulysses": "ulysses_cp", "hybrid": "hybrid_cp"}),
    Row("parallelism.ulysses_degree_in_cp", "parallel_config.ulysses_degree_in_cp", "int",
        apply=degrees.set_ulysses_degree, inverse=inverses.ulysses_degree_in_cp),
    Row("parallelism.pipeline_parallel", "parallel_config.pipeline_stage", "int", apply=degrees.set_degree),
    Row("parallelism.pipeline_parallel_interleave_num", f"{_MODEL}.pp_interleave_num", "int"),
    Row("parallelism.pipeline_parallel_schedule", "parallel.pipeline_config.pipeline_scheduler", "str", "1f1b",
        apply=degrees.set_schedule, choices={"1f1b": "1f1b", "interleaved_1f1b": "1f1b", "gpipe": "gpipe"}),
    Row("parallelism.expert_parallel", "parallel_config.expert_parallel", "int", apply=degrees.set_degree),
    Row("parallelism.data_parallel_shard", "parallel.enable_parallel_optimizer", "int", -1, apply=degrees.set_sharding,
        inverse=inverses.data_parallel_shard),
    Row("parallelism.data_parallel_shard_strategy", "parallel.parallel_optimizer_config.optimizer_level", "str",
        "optim_grads_params", apply=degrees.set_sharding_level, inverse=inverses.data_parallel_shard_strategy,
        choices=degrees.LEVELS),
    # degrees.set_sharding_level reads it.
    Row("parallelism.reshard_after_forward_policy", "", "str", "default", inverse=inverses.reshard_after_forward,
        choices={name: name for name in ("always", "never", "default")}),
    Row("optimizer", "optimizer", "dict", {}, apply=_optimizer),
    Row("optimizer.type", "optimizer.type", default="AdamW"),
    Row("optimizer.weight_decay", "optimizer.weight_decay", default=0.01),
    Row("optimizer.betas", "optimizer.betas", default=[0.9, 0.95], when="optimizer.type=AdamW"),
    Row("optimizer.eps", "optimizer.ns_eps", default=1e-8, when="optimizer.type=Muon"),
    Row("optimizer.adamw_eps", "optimizer.eps", when="optimizer.type=Muon"),
    Row("optimizer.adamw_betas", "optimizer.betas", when="optimizer.type=Muon"),
    Row("lr_scheduler", "lr_schedule", "dict", {}, apply=_schedule),
    Row("lr_scheduler.learning_rate", "lr_schedule.learning_rate", default=1e-5, apply=_learning_rate),
    Row("train_dataset.dataloader", "train_dataset.data_loader", "dict", {}, apply=_dataset),
    Row("train_dataset.dataloader.shuffle", "train_dataset.data_loader.shuffle", default=False,
        when="train_dataset.dataloader"),
    Row("train_dataset.dataloader.column_names", "train_dataset.input_columns", when="train_dataset.dataloader"),
    Row("train_dataset.drop_remainder", "train_dataset.drop_remainder", "bool", True),
    Row("train_dataset.prefetch_size", "train_dataset.prefetch_size", "int"),
    Row("model", _MODEL, "dict", {}, apply=_model),
    # Behind the model, whose layers it divides.
    Row("parallelism.pipeline_parallel_layers_per_stage", f"{_MODEL}.offset", "str|list",
        apply=degrees.set_stage_layers, inverse=inverses.layers_per_stage),
    Row("model.architectures", "model.arch.type"),
    *(Row(f"model.{old}", f"{_MODEL}.{new}") for new, old in _SIZES.items()),
    *(Row(f"model.{old}", f"{_MODEL}.moe_config.{new}") for new, old in _EXPERTS.items()),
    Row("model.n_routed_experts", f"{_MODEL}.moe_config.expert_num", when="model.architectures=DeepseekV3ForCausalLM"),
    Row("lora_config", f"{_MODEL}.pet_config"),
    Row("lora_config.target_modules", f"{_MODEL}.pet_config.target_modules", "str", "", "lora_config", apply=_targets,
        inverse=inverses.target_modules),
    Row("lora_config.lora_rank", f"{_MODEL}.pet_config.lora_rank", "int", 8, "lora_config"),
    Row("lora_config.lora_alpha", f"{_MODEL}.pet_config.lora_alpha", "float", 16.0, "lora_config"),
    Row("lora_config.lora_dropout", f"{_MODEL}.pet_config.lora_dropout", "float", 0.0, "lora_config"),
    Row("lora_config.lora_a_std", f"{_MODEL}.pet_config.lora_a_std", "float", 0.01, "lora_config"),
    Row("lora_config.lora_b_std", f"{_MODEL}.pet_config.lora_b_std", "float", 0.0, "lora_config"),
    Row("lora_config.exclude_layers", f"{_MODEL}.pet_config.exclude_layers", "str", None, "lora_config",
        inverse=inverses.exclude_layers),
    Row("recompute.mode", "", "str", apply=_recompute_mode, inverse=inverses.recompute_mode),
    Row("recompute.full_recompute_layer", "recompute_config.recompute", "list", None, "recompute.mode=full",
        Transform(lambda layers: [str(layer) for layer in layers]), inverse=inverses.full_recompute_layer),
    Row("recompute.select_module", "recompute_config.select_recompute", "dict|list", None, "recompute.mode=select",
        apply=_recompute_modules, inverse=inverses.select_module),
    # Both are errors on an Ascend, and without effect on a CPU.
    Row("swap.enable", "swap_config.swap", "bool", False, "swap.enable"),
    Row("parallelism.cpu_offload", "context.memory_offload", "bool", False, "parallelism.cpu_offload", _ON),
    Row("context", "context", "dict", {}, apply=_context),
    Row("context.device_target", "context.device_target", default="Ascend"),
    Row("context.max_device_memory", "context.max_device_memory", default="59GB", when="context.device_target=Ascend"),
    Row("callbacks", "callbacks", "list", [], apply=_saving, inverse=inverses.callbacks),
    Row("monitor.train_state.local_norm", "runner_wrapper.local_norm", "bool|str|list", "",
        "monitor.train_state.local_norm", Transform(_norms, lambda names: names)),
    Row(_EVENTS, "tensorboard.tensorboard_dir", "str", "", _EVENTS),
    # All tags of this trainer are written.
    Row(_EVENTS, "tensorboard.log_loss_scale_to_tensorboard", "str", "", _EVENTS, Transform(bool)),
    Row(_EVENTS, "tensorboard.log_timers_to_tensorboard", "str", "", _EVENTS, Transform(bool)),
    Row("monitor.tensorboard.log_interval", "tensorboard.log_interval", "int", 1, _EVENTS),
    Row("monitor.tensorboard.queue_size", "tensorboard.tensorboard_queue_size", "int", 1000, _EVENTS),
    Row(_PROFILES, "profile", "bool", False, _PROFILES),
    Row("profiler.start_step", "profile_start_step", "int", 1, _PROFILES),
    Row("profiler.end_step", "profile_stop_step", "int", 1, _PROFILES),
    Row("profiler.output_path", "profile_output", "str", None, _PROFILES),
    Row("profiler.profiler_rank", "profile_rank_ids", "list", None, _PROFILES),
    Row("profiler.profiler_level", "profiler_level", "int", 0, _PROFILES),
    Row("profiler.mstx", "mstx", "bool", False, _PROFILES),
    Row("profiler.profile_memory", "profile_memory", "bool", False, _PROFILES),
    Row("profiler.with_stack", "with_stack", "bool", True, _PROFILES),
)  # fmt: skip
# The settings of experts are flat keys there.
SOURCE_PLACES = {**reverse(ROWS), f"{_MODEL}.moe_config": "model"}
"""Places here -> there."""
SOURCE_DEFAULTS = {row.old: row.default for row in ROWS if row.default not in (None, "")}
"""Keys there -> their defaults there, as far as these are values that a file may write."""


@cache
def rows_without_effect() -> tuple[Row, ...]:
    """Returns the rows of keys that change nothing here, or whose other values are refused."""
    table = read_table(Path(__file__).with_name("unused.yaml"))
    return tuple(
        Row(key, default=default, reason=reason, is_refused=kind == "refused")
        for kind, reasons in table.items()
        for reason, keys in reasons.items()
        for key, default in keys.items()
    )
