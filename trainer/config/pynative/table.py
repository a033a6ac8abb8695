"""The newer schema of MindSpore Transformers' files as a table of rules, one for each key.

The source is a file of the newer schema; the target is the schema of this trainer. Sections that the newer schema does
not describe, such as ``model``, are taken as they are: their keys are those of the target section.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from trainer.config.note import Note
from trainer.config.patterns import PatternError, read_pattern
from trainer.config.pynative.work import TranslationState
from trainer.config.read.nodes import Entry, Items, Table, is_null, plain, tree
from trainer.config.read.relocate import find_entry

Transform: TypeAlias = Callable[[TranslationState, str], None]
"""Sets target keys from a source key; it is called with the source key even if the file does not have it."""

_MODEL = "model.model_config"
_EVENTS = "monitor.tensorboard.output_dir"
_PROFILES = "profiler.enable_profiling"
_LEFT_TO_ADAMW = {"*word_embeddings*", "*output_layer*"}
"""The parameters that AdamW updates instead of Muon, in addition to norms and biases."""
_LATENT = {
    "q_a_proj": ("self_attention.linear_q_down_proj", "self_attention.linear_qkv"),
    "q_b_proj": ("self_attention.linear_q_up_proj", "self_attention.linear_qb"),
    "kv_a_proj_with_mqa": ("self_attention.linear_kv_down_proj", "self_attention.linear_qkv"),
    "kv_b_proj": ("self_attention.linear_kv_up_proj", "self_attention.linear_kvb"),
}
_ADAPTED = {
    "q_proj": ("self_attention.linear_q", "self_attention.linear_qkv"),
    "k_proj": ("self_attention.linear_k", "self_attention.linear_qkv"),
    "v_proj": ("self_attention.linear_v", "self_attention.linear_qkv"),
    "o_proj": ("self_attention.linear_proj",),
    "gate_proj": ("mlp.gating", "mlp.linear_fc1"),
    "up_proj": ("mlp.hidden", "mlp.linear_fc1"),
    "down_proj": ("mlp.linear_fc2",),
}
"""Target matrices -> the source modules that contain them."""


class KeyRule(NamedTuple):
    """A key of the newer schema that acts."""

    key: str
    kind: str  # the types of its value: int, float, bool, str, list, dict; null too where the default is None
    new: str | Transform = ""  # the target key with the same values
    default: Any = None  # MindSpore Transformers' default; None: the target key is not set
    when: str = ""  # a source key; the rule applies only if its value is true, or if the file has that section
    value: Any = None  # the value of the target key; None: that of the source key


def _clipping(work: TranslationState, key: str) -> None:
    norm = work.values[key]
    work.set_key("runner_wrapper.use_clip_grad", norm > 0, key)
    if norm > 0:
        work.set_key("runner_wrapper.max_grad_norm", norm, key)


def _save_path(work: TranslationState, key: str) -> None:
    path = work.values[key]
    if path:
        work.set_key("output_dir", path, key)
        text = f"{key}: used as output_dir; the checkpoints are in {path}/checkpoints"
        work.translation.notes.append(Note(text, "parallel"))


def _saving(work: TranslationState, key: str) -> None:
    """Adds the callbacks that print losses and save checkpoints; a run always saves at its end."""
    callbacks = work.node("callbacks")
    if isinstance(callbacks, Items):
        entries = list(callbacks.entries)
    else:
        entries = []
    entries.append(Entry(tree({"type": "MFLossMonitor"}, work.place("callbacks")), work.place("callbacks")))
    steps = work.values[key]
    if not work.values["checkpoint.enable_save"]:
        steps = 0
        key = "checkpoint.enable_save"
        text = f"{key} False: a checkpoint is still saved at the end of the run"
        work.translation.notes.append(Note(text, "ignored"))
    saver = Table({"type": Entry(tree("CheckpointMonitor"), work.place(key))})
    settings = {"save_checkpoint_steps": (steps, key)}
    settings["keep_checkpoint_max"] = (work.values["checkpoint.save_max"], "checkpoint.save_max")
    if work.values["checkpoint.async_save"]:
        settings["async_save"] = (True, "checkpoint.async_save")
    for name, (value, source) in settings.items():
        saver.explicit[name] = Entry(tree(value), work.place(source))
    entries.append(Entry(saver, work.place(key)))
    work.set_key("callbacks", Items(entries), "callbacks")


def _loading(work: TranslationState, key: str) -> None:
    if work.values[key]:
        work.set_key("load_checkpoint", work.values[key], key)
        if not work.values["checkpoint.no_load_optim"]:
            work.set_key("resume_training", True, "checkpoint.no_load_optim")


def _degree(new: str) -> Transform:
    def transform(work: TranslationState, key: str) -> None:
        """Sets the new key; a degree above 1 also turns on parallelism."""
        degree = work.values[key]
        if degree is None:
            return
        work.set_key(new, degree, key)
        if degree > 1:
            for name, value in (("use_parallel", True), ("parallel.parallel_mode", 1)):
                if find_entry(work.translation.root, name) is None:
                    work.set_key(name, value, key)

    return transform


def _sharding(work: TranslationState, key: str) -> None:
    ranks = work.values[key]
    if ranks < -1:
        work.problem(key, "must be at least -1", "write -1 for all data-parallel ranks")
    if ranks != 1:
        work.set_key("parallel.enable_parallel_optimizer", True, key)
    if ranks > 1:
        text = f"{key} {ranks}: all data-parallel ranks shard the optimizer state, but not weights and gradients"
        work.translation.notes.append(Note(text, "parallel"))


def _optimizer(work: TranslationState, key: str) -> None:
    table = work.table(key)
    settings = work.values[key]
    work.set_default(table, "type", "AdamW", f"{key}.type")
    work.set_default(table, "weight_decay", 0.01, f"{key}.weight_decay")
    if settings.get("type", "AdamW") == "AdamW":
        work.set_default(table, "betas", [0.9, 0.95], f"{key}.betas")
    if sorted(map(str, settings.get("adamw_include") or ())) == sorted(_LEFT_TO_ADAMW):
        del table.explicit["adamw_include"]
    work.set_key(key, table, key)


def _schedule(work: TranslationState, key: str) -> None:
    """Sets the schedule without its total_steps: its length is always that of the run."""
    table = work.table(key)
    if work.values[key].get("type") is None:
        fix = "add type: to it, for example CosineWithWarmUpLR"
        work.problem(f"{key}.type", "this key is required", fix, place=work.place(key))
        return
    table.explicit.pop("total_steps", None)
    work.set_default(table, "learning_rate", 1e-5, f"{key}.learning_rate")
    work.set_key("lr_schedule", table, key)


def _dataset(work: TranslationState, key: str) -> None:
    table = work.table(key)
    if not table.explicit:
        place = work.place("train_dataset")
        work.problem(key, "there is no data to train on", "write dataloader: and its type below", place=place)
        return
    if work.values[key].get("type") == "MindDataset":
        columns = table.explicit.pop("column_names", None)
        columns = columns or Entry(tree(["input_ids", "labels"], work.place(key)), work.place(key))
        work.set_key("train_dataset.input_columns", columns.node, f"{key}.column_names", place=columns.place)
    for name in ("num_parallel_workers", "python_multiprocessing"):
        table.explicit.pop(name, None)
    work.set_default(table, "shuffle", False, f"{key}.shuffle")
    work.set_key("train_dataset.data_loader", table, key)


def _model(work: TranslationState, key: str) -> None:
    for name, entry in work.table(key).explicit.items():
        work.set_key(f"{_MODEL}.{name}", entry.node, f"{key}.{name}", place=entry.place)


def _targets(work: TranslationState, key: str) -> None:
    target_modules = work.values[key]
    work.set_key(f"{_MODEL}.pet_config.target_modules", target_modules, key)
    adapted = _ADAPTED
    if work.values["model"].get("multi_latent_attention"):
        adapted = _ADAPTED | _LATENT
    try:
        pattern = read_pattern(target_modules)
    except PatternError as error:
        work.problem(key, str(error), "write for example linear_qkv")
        return
    names = [
        name
        for name, modules in adapted.items()
        if any(pattern.search(f"decoder.layers.0.{module}") for module in modules)
    ]
    if names:
        work.set_key(f"{_MODEL}.pet_config.target_modules", f".*({'|'.join(names)})", key)
        text = f"{key} {target_modules}: {', '.join(names)} of every layer, each with an adapter of its own"
        work.translation.notes.append(text)


def _recompute_mode(work: TranslationState, key: str) -> None:
    mode = work.values[key]
    layers = {"full": "recompute.full_recompute_layer", "select": "recompute.select_module"}
    if mode not in (None, "None", *layers):
        work.problem(key, "must be None, full or select", "write full, and the layers in full_recompute_layer")
    elif mode in layers and not work.values[layers[mode]]:
        place = work.place(key)
        work.problem(layers[mode], f"{key} {mode} needs it", "write layers, as [0-3]", place=place, has_value=False)


def _recompute_layers(work: TranslationState, key: str) -> None:
    if work.values["recompute.mode"] == "full" and work.values[key]:
        work.set_key("recompute_config.recompute", [str(layer) for layer in work.values[key]], key)


def _recompute_modules(work: TranslationState, key: str) -> None:
    modules = work.values[key]
    if work.values["recompute.mode"] != "select" or not modules:
        return
    if not all(isinstance(layers, list) for layers in modules.values()):
        work.problem(key, "must have a list of layers for each module", "write layers, as [0-3]")
        return
    texts = {name: [str(layer) for layer in layers] for name, layers in modules.items()}
    work.set_key("recompute_config.select_recompute", texts, key)


def _context(work: TranslationState, key: str) -> None:
    """Sets the keys of context, except mode 1, which has no counterpart."""
    table = work.table(key)
    written = dict(table.explicit)
    work.set_default(table, "device_target", "Ascend", f"{key}.device_target")
    if plain(table.explicit["device_target"].node) == "Ascend":
        work.set_default(table, "max_device_memory", "59GB", f"{key}.max_device_memory")
    for name, entry in table.explicit.items():
        if name != "mode":
            is_written = name in written and not is_null(written[name].node)
            work.set_key(f"{key}.{name}", entry.node, f"{key}.{name}", place=entry.place if is_written else None)


RULES = (
    KeyRule("training.seed", "int", "seed", 42),
    KeyRule("training.steps", "int", "runner_config.max_steps", 1000),
    KeyRule("training.local_batch_size", "int", "runner_config.batch_size", 1),
    KeyRule("training.global_batch_size", "int", "runner_config.global_batch_size", 1),
    KeyRule("training.max_norm", "float", _clipping, 1.0),
    KeyRule("training.deterministic", "bool", "context.deterministic", False, "training.deterministic", "ON"),
    KeyRule("checkpoint.enable_save", "bool", "", True),
    KeyRule("checkpoint.save_path", "str", _save_path, ""),
    KeyRule("checkpoint.save_max", "int", "", 5),
    KeyRule("checkpoint.async_save", "bool", "", False),
    KeyRule("checkpoint.save_interleaved_steps", "int", _saving, 1000),
    KeyRule("checkpoint.no_load_optim", "bool", "", False),
    KeyRule("checkpoint.load_path", "str", _loading, ""),
    KeyRule("parallelism.tensor_parallel", "int", _degree("parallel_config.model_parallel")),
    KeyRule("parallelism.context_parallel", "int", _degree("parallel_config.context_parallel")),
    KeyRule("parallelism.pipeline_parallel", "int", _degree("parallel_config.pipeline_stage")),
    KeyRule("parallelism.expert_parallel", "int", _degree("parallel_config.expert_parallel")),
    KeyRule("parallelism.pipeline_parallel_interleave_num", "int", f"{_MODEL}.pp_interleave_num"),
    KeyRule("parallelism.data_parallel_shard", "int", _sharding, -1),
    KeyRule("optimizer", "dict", _optimizer, {}),
    KeyRule("lr_scheduler", "dict", _schedule, {}),
    KeyRule("train_dataset.dataloader", "dict", _dataset, {}),
    KeyRule("train_dataset.drop_remainder", "bool", "train_dataset.drop_remainder", True),
    KeyRule("model", "dict", _model, {}),
    KeyRule("lora_config.target_modules", "str", _targets, "", "lora_config"),
    KeyRule("lora_config.lora_rank", "int", f"{_MODEL}.pet_config.lora_rank", 8, "lora_config"),
    KeyRule("lora_config.lora_alpha", "float", f"{_MODEL}.pet_config.lora_alpha", 16.0, "lora_config"),
    KeyRule("lora_config.lora_dropout", "float", f"{_MODEL}.pet_config.lora_dropout", 0.0, "lora_config"),
    KeyRule("recompute.mode", "str", _recompute_mode),
    KeyRule("recompute.full_recompute_layer", "list", _recompute_layers),
    KeyRule("recompute.select_module", "dict", _recompute_modules),
    KeyRule("context", "dict", _context, {}),
    KeyRule("callbacks", "list", "", []),  # _saving sets it
    KeyRule("monitor.train_state.local_norm", "bool|str|list", "runner_wrapper.local_norm", "",
            "monitor.train_state.local_norm", True),
    KeyRule(_EVENTS, "str", "tensorboard.tensorboard_dir", "", _EVENTS),
    # All tags of this trainer are written.
    KeyRule(_EVENTS, "str", "tensorboard.log_loss_scale_to_tensorboard", "", _EVENTS, True),
    KeyRule(_EVENTS, "str", "tensorboard.log_timers_to_tensorboard", "", _EVENTS, True),
    KeyRule("monitor.tensorboard.log_interval", "int", "tensorboard.log_interval", 1, _EVENTS),
    KeyRule("monitor.tensorboard.queue_size", "int", "tensorboard.tensorboard_queue_size", 1000, _EVENTS),
    KeyRule(_PROFILES, "bool", "profile", False, _PROFILES),
    KeyRule("profiler.start_step", "int", "profile_start_step", 1, _PROFILES),
    KeyRule("profiler.end_step", "int", "profile_stop_step", 1, _PROFILES),
    KeyRule("profiler.output_path", "str", "profile_output", None, _PROFILES),
    KeyRule("profiler.profiler_rank", "list", "profile_rank_ids", None, _PROFILES),
    KeyRule("profiler.profiler_level", "int", "profiler_level", 0, _PROFILES),
    KeyRule("profiler.mstx", "bool", "mstx", False, _PROFILES),
    KeyRule("profiler.profile_memory", "bool", "profile_memory", False, _PROFILES),
    KeyRule("profiler.with_stack", "bool", "with_stack", True, _PROFILES),
)  # fmt: skip


@cache
def keys_without_effect() -> dict[str, tuple[str, Any, bool]]:
    """Returns, for each source key without effect, the reason, the default, and whether other values are refused."""
    with (Path(__file__).parent / "unused.yaml").open(encoding="utf-8") as file:
        table = yaml.safe_load(file)
    return {
        key: (reason, default, kind == "refused")
        for kind, reasons in table.items()
        for reason, keys in reasons.items()
        for key, default in keys.items()
    }
