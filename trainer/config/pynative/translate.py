"""A tree of the newer schema -> one of ours. Every value keeps its line, so that later messages name it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.checks.problem import Problem, problem_at, raise_problems
from trainer.config.checks.unsupported import findings, ignored_texts
from trainer.config.checks.validation import validate
from trainer.config.location import SourceLocation
from trainer.config.notice import Notice
from trainer.config.patterns import PatternError, read_pattern
from trainer.config.pynative.schema import PynativeConfig
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, is_null, plain, tree
from trainer.config.read.resolve import resolve
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.root import Config
from trainer.errors import UserError

_MODEL = "model.model_config"
_WHERE_THERE = {
    f"{_MODEL}.moe_config": "model",
    f"{_MODEL}.pet_config": "lora_config",
    _MODEL: "model",
    "lr_schedule": "lr_scheduler",
    "train_dataset.data_loader": "train_dataset.dataloader",
    "train_dataset.input_columns": "train_dataset.dataloader.column_names",
}
"""Section here -> where its keys stand there."""

_MOVED = {
    "training.seed": "seed",
    "training.steps": "runner_config.max_steps",
    "training.local_batch_size": "runner_config.batch_size",
    "training.global_batch_size": "runner_config.global_batch_size",
    "parallelism.tensor_parallel": "parallel_config.model_parallel",
    "parallelism.context_parallel": "parallel_config.context_parallel",
    "parallelism.pipeline_parallel": "parallel_config.pipeline_stage",
    "parallelism.expert_parallel": "parallel_config.expert_parallel",
    "parallelism.pipeline_parallel_interleave_num": f"{_MODEL}.pp_interleave_num",
    "train_dataset.drop_remainder": "train_dataset.drop_remainder",
    "lora_config.target_modules": f"{_MODEL}.pet_config.target_modules",
    "lora_config.lora_rank": f"{_MODEL}.pet_config.lora_rank",
    "lora_config.lora_alpha": f"{_MODEL}.pet_config.lora_alpha",
    "lora_config.lora_dropout": f"{_MODEL}.pet_config.lora_dropout",
}
"""Key there -> key here with the same values."""

_DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")

_LEFT_TO_ADAMW = {"*word_embeddings*", "*output_layer*"}
"""What Muon leaves to AdamW here, beside norms and biases."""

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
"""Our matrices -> the modules there that hold them."""

_PROFILER_KEYS = {
    "start_step": "profile_start_step", "end_step": "profile_stop_step", "output_path": "profile_output",
    "profiler_rank": "profile_rank_ids", "profiler_level": "profiler_level", "mstx": "mstx",
    "profile_memory": "profile_memory", "with_stack": "with_stack",
}  # fmt: skip
"""Of `profiler`, with ours."""


@dataclass
class Translation:
    """The tree in our schema, and what was met on the way."""

    root: Table = field(default_factory=Table)
    there: dict[str, str] = field(default_factory=dict)
    """Our keys -> the keys they were translated from, for values that are computed."""
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def renamed(self, problem: Problem) -> Problem:
        """A problem under the file's name for its key; a flag keeps its own name."""
        where = problem.place.text
        if not where or where.startswith(("flag ", "--")):
            return problem
        error, ours = problem.error, "|".join(rf"\b{section}\b" for section in _WHERE_THERE)
        rule, fix = (re.sub(ours, lambda found: _WHERE_THERE[found[0]], text) for text in (error.rule, error.fix))
        given = {} if error.value is None else {"value": error.value}
        key = self.name_there(error.key)
        return problem._replace(error=UserError(rule, where=error.where, key=key, fix=fix, **given))

    def written(self, names: Mapping[str, str], positions: Mapping[str, SourceLocation]) -> dict[str, str]:
        """The names that the file has for our keys; `names` are those that are not the main ones."""
        keys = {key: names.get(key, key) for key, place in positions.items()}
        flags = ("flag ", "--")
        return {key: name if positions[key].text.startswith(flags) else self.name_there(name)
                for key, name in keys.items()}  # fmt: skip

    def name_there(self, key: str) -> str:
        """A key of ours as the file writes it."""
        if key in self.there:
            return self.there[key]
        for ours, theirs in _WHERE_THERE.items():
            if f"{key}.".startswith(f"{ours}."):
                return theirs + key[len(ours) :]
        return key


def is_key_there(key: str) -> bool:
    """Whether a dotted key of the command line is one of the newer schema: ``training.steps``."""
    first, _, rest = key.partition(".")
    if first in ("model", "recompute"):
        return bool(rest) and rest.split(".")[0] not in ("arch", "model_config", "classifier")
    return key.startswith("train_dataset.dataloader") or (
        first in yaml_names(PynativeConfig) and first not in yaml_names(Config)
    )


def translate(name: str, root: Table) -> Translation:
    """Translates a file, which messages call `name`.

    Raises:
        UserError: Nothing of the file is valid.
    """
    found = resolve(root, PynativeConfig)
    config, invalid = validate(found.data, found.positions, found.written, told=bool(found.problems),
                               kind=PynativeConfig)  # fmt: skip
    made = Translation(problems=[*found.problems, *invalid])
    if config is None:
        raise_problems(made.problems)
    assert isinstance(config, PynativeConfig), "a configuration without problems is valid"
    work = _Work(name, root, config, found.positions, made)
    for part in (_training, _checkpoint, _parallelism, _optimizer, _schedule, _dataset, _model, _recompute, _others):
        part(work)
    where = {key: place.text for key, place in found.positions.items()}
    unused = list(findings(config))
    for finding in unused:
        if finding.support == "not_yet":
            place = work.place(finding.key)
            rule = "cannot be translated"
            made.problems.append(problem_at(place, finding.key, rule, finding.reason, finding.value))
    texts = ignored_texts((one, where.get(one.key, ""), one.key) for one in unused if one.support == "ignored")
    made.notices += [Notice(text, "ignored") for text in texts]
    says = f"{name}: a file of MindSpore Transformers' newer schema: taken as its translation (`convert` writes it)"
    made.notices.insert(0, Notice(says, "parallel"))
    return made


@dataclass
class _Work:
    """A file that is being translated."""

    name: str
    root: Table
    config: PynativeConfig
    positions: dict[str, SourceLocation]
    made: Translation

    def place(self, key: str) -> SourceLocation:
        """Where a key there was written; the file as a whole for a default."""
        return self.positions.get(key, SourceLocation(0, f"{self.name} ({key} by default)"))

    def value(self, key: str) -> Any:
        """The value of a key there."""
        value: Any = self.config
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def table(self, key: str) -> Table:
        """A section there, to be changed: a copy; empty where there is none."""
        node: Node = self.root
        for part in key.split("."):
            entries = node.entries() if isinstance(node, Table) else {}
            if part not in entries:
                return Table()
            node = entries[part].node
        return Table(dict(node.entries())) if isinstance(node, Table) else Table()

    def put(self, key: str, value: Any, source: str) -> None:
        """Sets a key of ours, to a node or a plain value, with the place of a key there."""
        place, table = self.place(source), self.made.root
        *sections, last = key.split(".")
        for part in sections:
            entry = table.own.setdefault(part, Entry(Table(), place))
            assert isinstance(entry.node, Table), "sections are made here"
            table = entry.node
        table.own[last] = Entry(value if isinstance(value, Scalar | Items | Table) else tree(value, place), place)
        if not isinstance(value, Table):
            self.made.there[key] = source

    def put_default(self, table: Table, key: str, value: Any, source: str) -> None:
        """Adds to a section what MindSpore Transformers takes for a key that the file leaves out."""
        if key not in table.own or is_null(table.own[key].node):
            place = self.place(source)
            table.own[key] = Entry(tree(value, place), place)


def _move(work: _Work, keys: Iterable[str], *, written_only: bool = False) -> None:
    for key in keys:
        if key in work.positions or not written_only:
            work.put(_MOVED[key], work.value(key), key)


def _training(work: _Work) -> None:
    training = work.config.training
    _move(work, (key for key in _MOVED if key.startswith("training.")))
    clips, key = training.max_norm > 0, "training.max_norm"
    work.put("runner_wrapper.use_clip_grad", clips, key)
    if clips:
        work.put("runner_wrapper.max_grad_norm", training.max_norm, key)
    if training.deterministic:
        work.put("context.deterministic", "ON", "training.deterministic")


def _checkpoint(work: _Work) -> None:
    """Saving is a callback here; without one a run saves at its end."""
    section, callbacks = work.config.checkpoint, Items()
    if section.save_path:
        work.put("output_dir", section.save_path, "checkpoint.save_path")
        text = f"checkpoint.save_path: the run's folder; its checkpoints are in {section.save_path}/checkpoints"
        work.made.notices.append(Notice(text, "parallel"))
    saver: dict[str, Any] = {"type": "CheckpointMonitor", "save_checkpoint_steps": section.save_interleaved_steps}
    source = "checkpoint.save_interleaved_steps"
    if not section.enable_save:
        saver["save_checkpoint_steps"], source = 0, "checkpoint.enable_save"
        text = "checkpoint.enable_save False: the end of a run is saved all the same"
        work.made.notices.append(Notice(text, "ignored"))
    saver["keep_checkpoint_max"] = section.save_max
    if section.async_save:
        saver["async_save"] = True
    theirs = work.root.entries().get("callbacks")
    if theirs is not None and isinstance(theirs.node, Items):
        callbacks.entries += theirs.node.entries
    for value, key in (({"type": "MFLossMonitor"}, "callbacks"), (saver, source)):
        callbacks.entries.append(Entry(tree(value, work.place(key)), work.place(key)))
    work.put("callbacks", callbacks, "callbacks")
    if section.load_path:
        work.put("load_checkpoint", section.load_path, "checkpoint.load_path")
        if not section.no_load_optim:
            work.put("resume_training", True, "checkpoint.no_load_optim")


def _parallelism(work: _Work) -> None:
    section = work.config.parallelism
    _move(work, (key for key in _MOVED if key.startswith("parallelism.")), written_only=True)
    above = next((name for name in _DEGREES if getattr(section, name) > 1), "")
    if above:
        work.put("use_parallel", True, f"parallelism.{above}")
        work.put("parallel.parallel_mode", 1, f"parallelism.{above}")
    key = "parallelism.data_parallel_shard"
    if section.data_parallel_shard != 1:
        work.put("parallel.enable_parallel_optimizer", True, key)
        if section.data_parallel_shard > 1:
            text = f"{key} {section.data_parallel_shard}: the optimizer state is shared by all data-parallel ranks"
            work.made.notices.append(Notice(f"{text}; weights and gradients are whole on each", "parallel"))


def _optimizer(work: _Work) -> None:
    table = work.table("optimizer")
    work.put_default(table, "type", "AdamW", "optimizer.type")
    work.put_default(table, "weight_decay", 0.01, "optimizer.weight_decay")
    if work.config.optimizer.get("type", "AdamW") == "AdamW":
        work.put_default(table, "betas", [0.9, 0.95], "optimizer.betas")
    if set(work.config.optimizer.get("adamw_include") or ()) == _LEFT_TO_ADAMW:
        del table.own["adamw_include"]
    work.put("optimizer", table, "optimizer")


def _schedule(work: _Work) -> None:
    """The schedule's length is that of the run, whatever the file says of it."""
    table = work.table("lr_scheduler")
    if work.config.lr_scheduler.get("type") is None:
        fix = "add type: to it, for example CosineWithWarmUpLR"
        place = work.place("lr_scheduler")
        work.made.problems.append(problem_at(place, "lr_scheduler.type", "this key is required", fix))
        return
    table.own.pop("total_steps", None)
    work.put_default(table, "learning_rate", 1e-5, "lr_scheduler.learning_rate")
    work.put("lr_schedule", table, "lr_scheduler")


def _dataset(work: _Work) -> None:
    key = "train_dataset.dataloader"
    table, columns = work.table(key), None
    if not table.own:
        rule, fix = "there is no data to train on", "write dataloader: and its type below"
        work.made.problems.append(problem_at(work.place("train_dataset"), key, rule, fix))
        return
    kind = work.config.train_dataset.dataloader.get("type")
    if kind == "MindDataset":
        columns = table.own.pop("column_names", Entry(tree(["input_ids", "labels"], work.place(key)), work.place(key)))
    for name in ("num_parallel_workers", "python_multiprocessing"):
        table.own.pop(name, None)
    work.put_default(table, "shuffle", False, f"{key}.shuffle")
    work.put("train_dataset.data_loader", table, key)
    if columns is not None:
        work.positions.setdefault(f"{key}.column_names", columns.place)
        work.put("train_dataset.input_columns", columns.node, f"{key}.column_names")
    _move(work, ["train_dataset.drop_remainder"])


def _model(work: _Work) -> None:
    for name, entry in work.table("model").own.items():
        work.positions.setdefault(f"model.{name}", entry.place)
        work.put(f"{_MODEL}.{name}", entry.node, f"model.{name}")
    if work.config.lora_config is None:
        return
    _move(work, (key for key in _MOVED if key.startswith("lora_config.")))
    wanted, key = work.config.lora_config.target_modules, "lora_config.target_modules"
    adapted = _ADAPTED | (_LATENT if work.config.model.get("multi_latent_attention") else {})
    try:
        names = [
            name for name, modules in adapted.items()
            if any(read_pattern(wanted).search(f"decoder.layers.0.{module}") for module in modules)
        ]  # fmt: skip
    except PatternError as error:
        fix = "write for example linear_qkv"
        work.made.problems.append(problem_at(work.place(key), key, str(error), fix, wanted))
        return
    if names:
        work.put(f"{_MODEL}.pet_config.target_modules", f".*({'|'.join(names)})", key)
        text = f"{key} {wanted}: {', '.join(names)} of every layer, each with an adapter of its own"
        work.made.notices.append(text)


def _recompute(work: _Work) -> None:
    section = work.config.recompute
    for mode, name, key in (
        ("full", "full_recompute_layer", "recompute"), ("select", "select_module", "select_recompute")
    ):  # fmt: skip
        value, source = getattr(section, name), f"recompute.{name}"
        if section.mode != mode:
            continue
        if not value:
            rule = f"recompute.mode {mode} needs it"
            work.made.problems.append(problem_at(work.place("recompute.mode"), source, rule, "write layers, as [0-3]"))
        elif isinstance(value, dict):
            layers = {pattern: [str(layer) for layer in ranges] for pattern, ranges in value.items()}
            work.put(f"recompute_config.{key}", layers, source)
        else:
            work.put(f"recompute_config.{key}", [str(layer) for layer in value], source)


def _others(work: _Work) -> None:
    """The device, and the norms that are recorded. Execution mode 1 is what this trainer does anyway."""
    context = work.table("context")
    work.put_default(context, "device_target", "Ascend", "context.device_target")
    if plain(context.own["device_target"].node) == "Ascend":
        work.put_default(context, "max_device_memory", "59GB", "context.max_device_memory")
    for name, entry in context.own.items():
        if name != "mode":
            source = f"context.{name}"
            if not entry.place.text.endswith("by default)"):
                work.positions.setdefault(source, entry.place)
            work.put(source, entry.node, source)
    if work.config.monitor.train_state.local_norm:
        work.put("runner_wrapper.local_norm", True, "monitor.train_state.local_norm")
    tensorboard = work.config.monitor.tensorboard
    if tensorboard.output_dir:  # everything that this trainer has a tag for
        source = "monitor.tensorboard"
        work.put("tensorboard.tensorboard_dir", tensorboard.output_dir, f"{source}.output_dir")
        work.put("tensorboard.log_interval", tensorboard.log_interval, f"{source}.log_interval")
        work.put("tensorboard.tensorboard_queue_size", tensorboard.queue_size, f"{source}.queue_size")
        for name in ("loss_scale", "timers"):
            work.put(f"tensorboard.log_{name}_to_tensorboard", True, f"{source}.output_dir")
    if work.config.profiler.enable_profiling:
        work.put("profile", True, "profiler.enable_profiling")
        for name, key in _PROFILER_KEYS.items():
            value = getattr(work.config.profiler, name)
            if value is not None:
                work.put(key, value, f"profiler.{name}")
