"""Rules of MindSpore's semi-automatic mode: unsupported keys, keys without effect, and the data of a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config.checks.adapters import cell_problems, vocabulary_device_problems
from trainer.config.checks.degrees import expert_problems, pipeline_problems, tensor_problems
from trainer.config.checks.model import decoder_problems
from trainer.config.checks.notes import pipeline_notes
from trainer.config.checks.parallel import fit_problems, micro_batches_per_step, parallel_degrees, zero_level
from trainer.config.checks.problem import ConfigError, one_of, problem
from trainer.config.checks.rules import average_keys
from trainer.config.note import Note
from trainer.config.recompute import recomputed_parts
from trainer.config.schema.fields import explicit_only
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.root import Config
from trainer.config.stages import stage_layers, stage_problems
from trainer.device.settings import SPEED_UP_KEY
from trainer.errors import UserError
from trainer.models.spec.adapters import SECTION, adapter_spec
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import EMBEDDING
from trainer.models.spec.sublayers import latent_spec
from trainer.optim.freeze import trained_shapes
from trainer.parallel.mesh import Degrees
from trainer.parallel.world import World

_NOT_YET = "not yet supported in semi-automatic mode"
_FUSED = {"allreduce": ("auto", "size", "index"), "allgather": ("auto", "size"), "reducescatter": ("auto", "size")}
"""Collectives that MindSpore fuses, and the modes of each."""
_EXPLICIT_MODE = "set parallel.parallel_mode to 0 (explicit mode)"


def data_config(config: Config, world: World) -> Config:
    """Returns the configuration for the data: every rank reads the sequences of all ranks and selects its own later."""
    runner = config.runner_config
    degrees = parallel_degrees(config, world)
    rows = runner.batch_size * degrees.data_parallel
    changes = {"batch_size": rows, "gradient_accumulation_steps": micro_batches_per_step(config, degrees)}
    return config.model_copy(update={"runner_config": runner.model_copy(update=changes)})


def calls_one_graph(config: Config) -> bool:
    """Returns whether the micro-batches of a step must call one graph, which MindSpore inlines late.

    They do in a pipeline, and with accumulation if ranks shard the sums of gradients, or if the embedding is frozen:
    MindSpore 2.10 then does not find where one micro-batch ends ("Cannot find grad_accumulation border node").
    """
    if config.parallel_config.pipeline_stage > 1:
        return True
    if config.runner_config.gradient_accumulation_steps == 1:
        return False
    shards_sums = config.parallel.enable_parallel_optimizer and zero_level(config) != "level1"
    return shards_sums or EMBEDDING not in trained_shapes(config)


def uses_dropout(settings: ModelConfig) -> bool:
    """Returns whether a training of this model draws dropout masks."""
    adapter = adapter_spec(settings)
    if adapter is not None and adapter.dropout:
        return True
    return bool(settings.hidden_dropout or settings.attention_dropout)


def semi_auto_notes(config: Config) -> Iterator[str]:
    """Yields notes about keys that have no effect, or another one, in semi-automatic mode."""
    yield from pipeline_notes(config)
    if config.context.mode == 1:
        yield Note("context.mode 1: no effect in semi-automatic mode, which is one graph", "ignored")
    if config.decoder.experts is not None and config.decoder.experts.moe_token_dispatcher_type == "allgather":
        yield Note("moe_token_dispatcher_type allgather: no effect, this mode sends tokens by alltoall", "ignored")
    parts = []
    if model_spec(config.decoder).mtp_modules:
        parts.append("losses of MTP modules")
    if config.decoder.moe_layers:
        parts.append("losses of the routers")
    if parts:
        yield f"the loss of a training step includes the {' and the '.join(parts)}"


def semi_auto_problems(config: Config, world: World) -> list[ConfigError]:
    """Returns the reasons why this job cannot run in semi-automatic mode."""
    return decoder_problems(config, "semi_auto") or list(_unsupported(config, world)) or fit_problems(config, world)


def speed_up_file(config: Config) -> Path | None:
    """Returns the file for MindSpore's `AutoParallel.transformer_opt`, or None."""
    path = (config.context.ascend_config or {}).get(SPEED_UP_KEY)
    if path:
        return Path(path).expanduser()
    return None


def missing_files(config: Config) -> list[ConfigError]:
    """Returns an error for each missing file that a run reads; a plan for another machine does not need it."""
    file = speed_up_file(config)
    if file is None or file.is_file():
        return []
    key = f"context.ascend_config.{SPEED_UP_KEY}"
    return [problem(config, key, "there is no such file", "correct the path, or remove the key", value=str(file))]


def semi_auto_without_device(config: Config) -> UserError:
    """Returns the error for a run in semi-automatic mode on a CPU."""
    rule = "semi-automatic mode requires Ascend or GPU; this run uses the CPU"
    fix = f"add --parallel_fallback explicit, or {_EXPLICIT_MODE}"
    return problem(config, "parallel.parallel_mode", rule, fix).error


def _unsupported(config: Config, world: World) -> Iterator[ConfigError]:
    """Yields an error for each requested feature that the mode does not support."""
    if not config.trains:
        fix = "run it alone, without launch, or add --parallel_fallback explicit"
        yield problem(config, "run_mode", "semi-automatic mode supports train and finetune only", fix)
        return
    yield from _communication(config, parallel_degrees(config, world))
    yield from _not_in_one_graph(config)
    yield from _degrees(config)
    yield from _expert_parallel(config)
    yield from _recomputed_gathers(config)
    yield from _pipeline(config)


def _degrees(config: Config) -> Iterator[ConfigError]:
    yield from tensor_problems(config)
    if config.parallel_config.context_parallel > 1:
        rule = "semi-automatic mode does not support context parallelism"
        fix = f"{_EXPLICIT_MODE}, or set context_parallel to 1"
        yield problem(config, "parallel_config.context_parallel", rule, fix)


def _expert_parallel(config: Config) -> Iterator[ConfigError]:
    yield from expert_problems(config)
    if config.decoder.experts is None:
        return
    if config.do_eval and config.parallel_config.pipeline_stage > 1:
        # MindSpore 2.10 does not compile a Morph in the last stage of a forward pass ("The pointer[abs] is null").
        rule = f"{_NOT_YET} with experts in a pipeline"
        fix = "set it to false, and evaluate the checkpoints with --run_mode eval --use_parallel false"
        yield problem(config, "do_eval", rule, fix)
    if config.decoder.down_has_bias:
        fix = f"set it to false, or {_EXPLICIT_MODE}"
        yield problem(config, "model.model_config.mlp_down_has_bias", f"{_NOT_YET} with experts", fix)
    if config.decoder.experts.swiglu_limit is not None:
        key = "model.model_config.moe_config.swiglu_limit"
        yield problem(config, key, _NOT_YET, _EXPLICIT_MODE)


def _recomputed_gathers(config: Config) -> Iterator[ConfigError]:
    """Yields an error for recomputation within which level3 gathers weights again and MindSpore 2.10 compiles nothing.

    It says "Cannot have multiple U Monad or multiple IO Monad in Parameters list".
    """
    shares = config.parallel.enable_parallel_optimizer and zero_level(config) == "level3"
    if not shares or not calls_one_graph(config):
        return
    parts = set(recomputed_parts(config))
    what = ""
    if config.decoder.experts is not None and not parts.isdisjoint(("block", "mlp")):
        what = "experts and recomputed blocks or experts in a pipeline or with accumulation"
    elif config.parallel_config.pipeline_stage == 1 and "block" in parts and uses_dropout(config.decoder):
        what = "dropout and recomputed blocks with accumulation"
    if what:
        fix = "set parallel_optimizer_comm_recompute to false and optimizer_level to level2, or recompute to false"
        yield problem(config, "parallel.enable_parallel_optimizer", f"{_NOT_YET} with {what}: level3", fix)


def _communication(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    """Yields errors about the settings of collectives."""
    for name, setting in (config.parallel.comm_fusion or {}).items():
        mistake = _fusion_mistake(name, setting)
        if mistake:
            key = "parallel.comm_fusion"
            yield problem(config, f"{key}.{name}", *mistake, value=setting, because=key)
    size = config.parallel.parallel_optimizer_config.optimizer_weight_shard_size
    replicas = degrees.data_parallel
    key = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    fix = "write -1 for all of them"
    if size == 0 or 0 < size <= replicas and replicas % size:
        rule = "must be the number of ranks that shard the optimizer state of a weight"
        if size:
            rule = f"must divide data_parallel {replicas}"
        yield problem(config, key, rule, fix)
    elif config.parallel.enable_parallel_optimizer and size > degrees.ranks:
        # MindSpore 2.10 then says: parallel init failed.
        yield problem(config, key, f"the job has {degrees.ranks} ranks", fix)


def _fusion_mistake(name: str, setting: Any) -> tuple[str, str] | None:
    """Returns rule and fix for an entry of `comm_fusion` that MindSpore does not document; None if it is right."""
    if name == "openstate":
        if isinstance(setting, bool):
            return None
        return "must be true or false", "write true to fuse collectives"
    if name not in _FUSED:
        return f"MindSpore fuses {', '.join(_FUSED)}", f"write one of openstate, {', '.join(_FUSED)}"
    if not isinstance(setting, dict) or set(setting) != {"mode", "config"}:
        return "must have the keys mode and config", "write {mode: auto, config: null}"
    mode = setting["mode"]
    value = setting["config"]
    if mode not in _FUSED[name]:
        return f"its mode must be {one_of(_FUSED[name])}", "write {mode: auto, config: null}"
    if mode == "auto":
        if value is None:
            return None
        return "mode auto takes no config", "write config: null, or mode: size"
    if mode == "size":
        if type(value) is int and value > 0:
            return None
        return "the config of mode size is a number of megabytes above 0", "write config: 64"
    # mode index
    are_indices = isinstance(value, list) and value and all(type(index) is int and index >= 0 for index in value)
    if are_indices and value == sorted(set(value)):
        return None
    return "the config of mode index is a list of ascending numbers of gradients", "write for example config: [10, 20]"


def _pipeline(config: Config) -> Iterator[ConfigError]:
    if config.parallel_config.pipeline_stage == 1:
        return
    problems = list(pipeline_problems(config))
    yield from problems
    interleaves = config.parallel.pipeline_config.pipeline_interleave
    if config.parallel.pipeline_config.pipeline_scheduler != "1f1b" and not interleaves:
        key = "parallel.pipeline_config.pipeline_scheduler"
        fix = "write 1f1b, or set pipeline_interleave to true"
        yield problem(config, key, "without pipeline_interleave MindSpore supports 1f1b only", fix)
    yield from _sequence_pipeline(config)
    if problems or any(stage_problems(config)):
        return
    for stage, layers in enumerate(stage_layers(config)[1:-1], 1):  # the first has the embedding, the last the head
        if not layers:  # MindSpore 2.10: "Stage num is 4 which is not equal to stage used: 3"
            rule = f"assigns no layer to pipeline stage {stage}; every stage needs at least one"
            fix = "change offset so that every stage has a layer"
            yield problem(config, "model.model_config.offset", rule, fix)


def _sequence_pipeline(config: Config) -> Iterator[ConfigError]:
    """Yields errors about schedules with which MindSpore compiles no graph."""
    name = config.parallel.pipeline_config.pipeline_scheduler
    if name not in ("seqvpp", "seqsmartvpp"):
        return
    key = "parallel.pipeline_config.pipeline_scheduler"
    if config.decoder.pp_interleave_num == 1:
        yield problem(config, key, "needs several model chunks of a stage", "set pp_interleave_num to 2, or write 1f1b")
    if name == "seqsmartvpp" and config.parallel_config.pipeline_stage % 2:
        rule = f"needs an even number of stages, not {config.parallel_config.pipeline_stage}"
        yield problem(config, key, rule, "write seqvpp")


def _not_in_one_graph(config: Config) -> Iterator[ConfigError]:
    """Yields errors about features that do not work in one graph of the whole step."""
    settings = config.decoder
    if settings.has_window_rotary:
        rule = f"{_NOT_YET}: rotary positions that differ between kinds of layers"
        yield problem(config, "model.model_config.window_rope_theta", rule, _EXPLICIT_MODE)
    for prefix, section in (("", settings), ("moe_config.", settings.experts)):
        if section is not None:
            for name, field in type(section).model_fields.items():
                if getattr(section, name) in explicit_only(field):
                    yield problem(config, f"model.model_config.{prefix}{name}", _NOT_YET, _EXPLICIT_MODE)
    yield from cell_problems(config)
    yield from vocabulary_device_problems(config)
    adapters_key = config.whole_matrix_method
    if adapters_key:
        yield problem(config, adapters_key, _NOT_YET, f"leave it out, or {_EXPLICIT_MODE}")
    adapter = adapter_spec(settings)
    has_adapter_dropout = adapter is not None and adapter.dropout > 0
    if config.parallel_config.use_seq_parallel and latent_spec(settings) is not None and has_adapter_dropout:
        rule = f"{_NOT_YET} with MLA and sequence parallelism"
        fix = "set it to 0, or use_seq_parallel to false"
        yield problem(config, f"{SECTION}.lora_dropout", rule, fix)
    has_dropout = settings.hidden_dropout or settings.attention_dropout
    shards_state = config.parallel.enable_parallel_optimizer
    if has_dropout and settings.maps_embedding and shards_state and calls_one_graph(config):
        # MindSpore 2.10 does not compile it ("The pointer[prim] is null", node_info.cc).
        where = "a pipeline, or accumulation with sharded sums of gradients or a frozen embedding"
        rule = f"{_NOT_YET} with dropout, sharded optimizer state and {where}"
        fix = "set hidden_dropout and attention_dropout to 0, or enable_parallel_optimizer to false"
        yield problem(config, "model.model_config.embedding_size", rule, fix)
    if not config.runner_wrapper.accumulate_allreduce_grads_in_fp32:
        yield problem(config, "runner_wrapper.accumulate_allreduce_grads_in_fp32", _NOT_YET, "leave it out")
    if config.runner_config.rampup_batch_size is not None:
        fix = f"leave it out, or {_EXPLICIT_MODE}"
        yield problem(config, "runner_config.rampup_batch_size", f"{_NOT_YET}: one graph has all micro-batches", fix)
    if config.optimizer.type == "Muon":
        yield problem(config, "optimizer.type", _NOT_YET, "use AdamW or SGD")
    for key in average_keys(config):
        yield problem(config, key, _NOT_YET, f"leave averages of weights out, or {_EXPLICIT_MODE}")
