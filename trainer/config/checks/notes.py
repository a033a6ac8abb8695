"""Notes about valid settings that have no effect, or another effect than a reader of the file may expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from trainer.config.checks.adapters import adapter_notes
from trainer.config.checks.loaders import loader_notes
from trainer.config.checks.moe import capacity_factor, watched_keys, watches_drop_rate
from trainer.config.checks.parallel import (
    DATA_PARALLEL,
    SEMI_AUTO,
    is_semi_auto,
    parallel_degrees,
    runs_semi_auto,
    shards_optimizer,
)
from trainer.config.checks.rules import starts_anew
from trainer.config.families import named_family
from trainer.config.hugging_face import class_differences, saved_class
from trainer.config.note import Note
from trainer.config.other_models import UNSUPPORTED_FAMILIES
from trainer.config.precision import PART_KEYS, requested_dtype
from trainer.config.recompute import recompute_notes, recomputed_parts
from trainer.config.schema.callbacks import MoEDropRate
from trainer.config.schema.fields import Section
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config
from trainer.errors import value_text
from trainer.models.spec.sublayers import attention_spec, latent_spec
from trainer.parallel.mesh import Degrees
from trainer.parallel.world import World

_MODEL = "model.model_config"
_MOE = f"{_MODEL}.moe_config"


class _Unused(NamedTuple):
    """Keys that have no effect while a condition holds. They are reported where they differ from their defaults."""

    section: str
    keys: str
    when: Callable[[Config], object]
    because: str | Callable[[Config], str]
    switch: str = ""
    """The key that turns the section on: if it is left out, these keys are reported even with their defaults."""


def _moe(config: Config) -> MoEConfig:
    return config.decoder.experts or MoEConfig.model_construct()  # the defaults, without building a validator


def _run_mode(config: Config) -> str:
    return f"run_mode is {config.run_mode}"


def _has_capacity(config: Config) -> bool:
    """Returns True for a mixture of experts that drops tokens, and for a dense model, which has no such keys."""
    return config.decoder.experts is None or _moe(config).effective_capacity is not None


def _no_capacity_reason(config: Config) -> str:
    factor = _moe(config).capacity_factor
    if factor is None:
        return "capacity_factor is null, so no token is dropped"
    return f"capacity_factor is {factor:g}, so no token is dropped"


def _is_recorded(config: Config, key: str) -> bool:
    """Returns whether a key comes from the config.yaml of a run, not from a flag."""
    return config.source.is_of_run and not config.source.where(key).startswith("flag")


def _recomputes(config: Config) -> bool:
    """Returns False for a training without recomputation."""
    return not config.trains or any(recomputed_parts(config))


_SEMI_AUTO_ONLY = "only semi-automatic mode uses it"
_NOT_SHARED = "parallel.enable_parallel_optimizer is false"
_UNUSED = (
    _Unused("parallel", "comm_fusion force_fp32_communication", lambda c: not is_semi_auto(c), _SEMI_AUTO_ONLY),
    _Unused("parallel_config", "gradient_aggregation_group", lambda c: not is_semi_auto(c), _SEMI_AUTO_ONLY),
    _Unused("parallel.parallel_optimizer_config", "optimizer_level gradient_accumulation_shard"
            " parallel_optimizer_threshold optimizer_weight_shard_size",
            lambda c: not c.parallel.enable_parallel_optimizer, _NOT_SHARED),
    _Unused("parallel.pipeline_config", "pipeline_interleave pipeline_scheduler",
            lambda c: c.parallel_config.pipeline_stage == 1, "parallel_config.pipeline_stage is 1"),
    _Unused("parallel_config", "ulysses_degree_in_cp", lambda c: c.parallel_config.context_parallel_algo != "hybrid_cp",
            "only context_parallel_algo hybrid_cp uses it"),
    _Unused("parallel_config", "use_seq_parallel",
            lambda c: c.parallel_config.model_parallel == 1, "parallel_config.model_parallel is 1"),
    _Unused("recompute_config", "select_comm_recompute mp_comm_recompute recompute_slice_activation",
            lambda c: not is_semi_auto(c), _SEMI_AUTO_ONLY),
    _Unused("recompute_config", "parallel_optimizer_comm_recompute",
            lambda c: not c.parallel.enable_parallel_optimizer, _NOT_SHARED),
    _Unused("recompute_config", "parallel_optimizer_comm_recompute", lambda c: not _recomputes(c),
            "nothing is recomputed"),
    _Unused("recompute_config", "mp_comm_recompute recompute_slice_activation",
            lambda c: is_semi_auto(c) and not _recomputes(c), "nothing is recomputed"),
    _Unused("optimizer", "betas eps ns_steps ns_coefficients ns_eps adamw_include matched_adamw_rms",
            lambda c: c.optimizer.type == "SGD", "optimizer.type is SGD"),
    _Unused("optimizer", "momentum nesterov ns_steps ns_coefficients ns_eps adamw_include matched_adamw_rms",
            lambda c: c.optimizer.type in ("AdamW", "PmaAdamW"), lambda c: f"optimizer.type is {c.optimizer.type}"),
    _Unused("optimizer", "fused_num interleave_step fused_algo ema_alpha", lambda c: c.optimizer.type != "PmaAdamW",
            "only PmaAdamW uses it"),
    _Unused("optimizer", "ema_alpha", lambda c: c.optimizer.type == "PmaAdamW" and c.optimizer.fused_algo == "sma",
            "fused_algo is sma"),
    _Unused("optimizer", "qk_clip_threshold", lambda c: c.optimizer.type != "Muon" or not c.optimizer.qk_clip_enabled,
            "only Muon with qk_clip_enabled uses it"),
    _Unused("optimizer", "loraplus_lr_ratio", lambda c: not c.has_adapters, "there are no adapters"),
    _Unused("optimizer", "ns_steps",
            lambda c: c.optimizer.type == "Muon" and len(c.optimizer.newton_schulz) != c.optimizer.ns_steps,
            "ns_coefficients has the steps"),
    _Unused("train_dataset", "batch_size", lambda c: c.train_dataset.batch_size != c.runner_config.batch_size,
            lambda c: f"the batch size is runner_config.batch_size {c.runner_config.batch_size}"),
    _Unused("runner_config", "gradient_accumulation_steps",
            lambda c: c.runner_config.global_batch_size and c.source.where("runner_config.gradient_accumulation_steps"),
            "global_batch_size determines it"),
    _Unused("runner_config", "epochs", lambda c: c.runner_config.max_steps, "max_steps ends the run"),
    _Unused("train_dataset", "max_batches", lambda c: c.eval_dataset is not None or not c.train_dataset.held_out,
            "it limits evaluations: set eval_dataset.max_batches"),
    _Unused("eval_dataset", "held_out", lambda c: c.eval_dataset is not None,
            "only train_dataset has a held-out split"),
    _Unused("", "predict_data", lambda c: c.run_mode != "predict", _run_mode),
    _Unused("", "chat", lambda c: c.run_mode != "predict" and not c.tasks, _run_mode),
    _Unused("lm_eval", "tasks num_fewshot limit", lambda c: c.run_mode != "eval", _run_mode),
    _Unused("lm_eval", "num_fewshot limit", lambda c: c.run_mode == "eval" and not c.tasks, "lm_eval.tasks is empty"),
    _Unused("", "resume_training", lambda c: not c.trains and not _is_recorded(c, "resume_training"), _run_mode),
    _Unused("", "src_strategy_path_or_dir", lambda c: not c.load_checkpoint, "load_checkpoint is empty"),
    _Unused("", "freeze", lambda c: not c.trains and not c.source.is_of_run, _run_mode),
    _Unused("", "sample_prompt", lambda c: not c.trains and not _is_recorded(c, "sample_prompt"), _run_mode),
    _Unused("", "profile", lambda c: not c.trains and not _is_recorded(c, "profile"), _run_mode),
    _Unused("", "do_eval", lambda c: c.run_mode in ("predict", "chat") and not _is_recorded(c, "do_eval"), _run_mode),
    _Unused("runner_wrapper", "clip_value", lambda c: c.trains and c.runner_wrapper.use_clip_grad
            and c.runner_wrapper.clip_type == "norm", "runner_wrapper.clip_type is norm"),
    _Unused("runner_wrapper", "max_grad_norm clip_by_group", lambda c: c.trains and c.runner_wrapper.use_clip_grad
            and c.runner_wrapper.clip_type == "value", "runner_wrapper.clip_type is value"),
    _Unused("runner_wrapper", "max_grad_norm clip_type clip_by_group clip_value",
            lambda c: c.trains and not c.runner_wrapper.use_clip_grad,
            "runner_wrapper.use_clip_grad is false", "use_clip_grad"),
    _Unused("monitor_config", "local_norm_format optimizer_state_format weight_state_format"
            " max_attention_logit_format throughput_baseline print_struct",
            lambda c: not c.monitor_config.monitor_on, "monitor_config.monitor_on is false"),
    _Unused("tensorboard", "log_loss_scale_to_tensorboard log_timers_to_tensorboard log_interval"
            " tensorboard_queue_size", lambda c: not c.tensorboard.tensorboard_dir, "tensorboard_dir is not set"),
    _Unused("", "trackers", lambda c: not c.trains, _run_mode),
    _Unused("tensorboard", "tensorboard_dir", lambda c: not c.trains, _run_mode),
    _Unused("runner_wrapper", "global_norm_spike_threshold global_norm_spike_count_threshold",
            lambda c: c.trains and not c.runner_wrapper.use_skip_data_by_global_norm,
            "runner_wrapper.use_skip_data_by_global_norm is false", "use_skip_data_by_global_norm"),
    _Unused("runner_wrapper", "accumulate_allreduce_grads_in_fp32",
            lambda c: c.trains and requested_dtype(c.decoder, c.amp_level, "compute_dtype") == "float32",
            "matrix products and gradients are float32"),
    _Unused("runner_wrapper.scale_sense", "scale_factor scale_window",
            lambda c: c.trains and getattr(c.runner_wrapper.scale_sense, "type", "") == "FixedLossScaleUpdateCell",
            "a FixedLossScaleUpdateCell does not change its scale"),
    _Unused(_MODEL, "n_kv_heads", lambda c: c.decoder.n_kv_heads not in (None, c.decoder.kv_heads),
            "multi-head latent attention has a key and a value for each query head"),
    _Unused(_MODEL, "head_dim", lambda c: latent_spec(c.decoder) is not None
            and c.decoder.head_dim not in (None, c.decoder.head_size, c.decoder.qk_rope_head_dim),
            "multi-head latent attention has its own head sizes"),
    _Unused(_MODEL, "qk_norm_after_rotary", lambda c: not attention_spec(c.decoder).head_norm,
            "query and key have no norms"),
    _Unused(_MODEL, "mtp_loss_factor", lambda c: c.decoder.mtp_depth == 0, "mtp_depth is 0"),
    _Unused(_MOE, "capacity_factor enable_sdrop moe_token_drop_policy",
            lambda c: c.decoder.experts and _moe(c).use_gmm and _moe(c).capacity_factor != -1,
            "use_gmm drops no tokens"),
    _Unused(_MOE, "router_aux_loss_coef", lambda c: _moe(c).aux_loss_factor is not None, "aux_loss_factor is set"),
    _Unused(_MOE, "enable_sdrop", lambda c: not _moe(c).use_gmm and not _has_capacity(c), _no_capacity_reason),
    _Unused(_MOE, "moe_token_drop_policy",
            lambda c: not _moe(c).use_gmm and not _has_capacity(c) and _moe(c).moe_token_drop_policy,
            _no_capacity_reason),
    _Unused(_MOE, "enable_gmm_safe_tokens use_fused_ops_permute", lambda c: c.decoder.experts and not _moe(c).use_gmm,
            "use_gmm is false"),
    _Unused(_MOE, "moe_norm_min", lambda c: c.decoder.experts and not _moe(c).norm_topk_prob,
            "norm_topk_prob is false"),
    _Unused(_MOE, "topk_bias_update_rate", lambda c: c.decoder.experts and not _moe(c).balance_via_topk_bias,
            "balance_via_topk_bias is false"),
)  # fmt: skip


def _unused(config: Config) -> Iterator[str]:
    """Yields one note for each reason, with the keys that have no effect for it."""
    keys: dict[str, list[str]] = {}
    for rule in _UNUSED:
        if not rule.when(config):
            continue
        if isinstance(rule.because, str):
            because = rule.because
        else:
            because = rule.because(config)
        section: Section = config
        for part in filter(None, rule.section.split(".")):
            section = getattr(section, section.attribute(part))
        lacks_switch = rule.switch and not config.source.where(f"{rule.section}.{rule.switch}")
        for name in rule.keys.split():
            key = f"{rule.section}.{name}".lstrip(".")
            value = getattr(section, name)
            default = type(section).model_fields[name].get_default(call_default_factory=True)
            if value != default or (lacks_switch and config.source.where(key)):
                text = config.source.name(key)
                if isinstance(value, (bool, int, float)):
                    text += f" {value_text(value)}"
                keys.setdefault(because, []).append(text)
    return (f"{', '.join(names)}: not used, {because}" for because, names in keys.items())


_LEAKS = Note("context.mode 1 is for debugging: on a CPU, MindSpore leaks about 0.1 MiB of memory for each layer and"
              " micro-batch; context.mode 0 does not", "ignored")


def rule_notes(config: Config) -> list[str]:
    """Returns the notes that do not depend on the number of ranks."""
    unused = [Note(text, "ignored") for text in _unused(config)]
    dtypes = [Note(text, "dtype") for text in _precision(config)]
    recomputed = [Note(text, "ignored") for text in recompute_notes(config)]  # the numbers are the same
    return [*unused, *dtypes, *_run(config), *_mixture(config), *adapter_notes(config), *loader_notes(config),
            *recomputed]


def mode_notes(config: Config, world: World, device: str) -> Iterator[Note]:
    """Yields a note about context.mode 1 on a CPU."""
    if config.context.mode == 0 or config.run_mode in ("predict", "chat") or device != "CPU" or is_semi_auto(config):
        return
    if parallel_degrees(config, world).shards_layers:
        yield Note("context.mode 1: no effect on a CPU with model_parallel, expert_parallel or context_parallel: the"
                   " array engine computes the model", "ignored")
    else:
        yield _LEAKS


def _precision(config: Config) -> Iterator[str]:
    level = config.amp_level
    settings = config.decoder
    half = [key for key in PART_KEYS if requested_dtype(settings, level, key) == "float16"]
    names = dict.fromkeys((getattr(settings, key) and f"{_MODEL}.{key}") or "amp_level" for key in half)
    if settings.param_init_type != "float32":
        yield (f"{_MODEL}.param_init_type {settings.param_init_type}: not used, parameters are float32 main params and"
               " are cast to compute_dtype for matrix products")
    if level == "auto" and settings.compute_dtype == "float32":
        yield f"amp_level auto: matrix products stay float32, because {_MODEL}.compute_dtype is float32"
    if half and config.trains and config.runner_wrapper.scale_sense == 1.0:
        yield (f"{', '.join(names)}: without a loss scale, gradients below 6e-8 underflow in float16; set"
               " runner_wrapper.scale_sense, for example to {type: DynamicLossScaleUpdateCell}")


def _run(config: Config) -> Iterator[str]:
    decoder = config.decoder
    train = config.train_dataset
    reads_sequences = config.run_mode not in ("predict", "chat") or config.source.where(f"{_MODEL}.seq_length")
    if decoder.max_positions < decoder.seq_length and reads_sequences:
        yield (f"{_MODEL}.seq_length {decoder.seq_length} exceeds max_position_embeddings {decoder.max_positions}, the"
               " longest sequence that the model was trained for")
    trained_for = None
    if config.teacher is not None:
        trained_for = config.teacher.decoder.max_position_embeddings
    if trained_for is not None and trained_for < decoder.seq_length:
        yield (f"loss.teacher: {_MODEL}.seq_length {decoder.seq_length} exceeds its max_position_embeddings"
               f" {trained_for}, the longest sequence that it was trained for")
    if config.eval_dataset is not None and train.held_out:
        yield (f"train_dataset.held_out {train.held_out}: these documents are left out of the training but not"
               " evaluated, because there is an eval_dataset; set it to 0 to train on them")
    if config.trains and config.resume_training is True and config.load_checkpoint and not config.has_adapters:
        yield (f"resume_training true: continues from the checkpoint in load_checkpoint ({config.load_checkpoint}) with"
               " its optimizer state, step and position in the data; the other value starts over from these weights")
    if starts_anew(config):
        yield "load_checkpoint is empty: this finetuning starts from new weights, as run_mode train does"
    optimizer = config.optimizer
    if config.trains and optimizer.type == "PmaAdamW" and optimizer.fused_algo == "ema":
        factor = 1 - (1 - optimizer.ema_alpha) ** optimizer.fused_num
        yield (f"optimizer.fused_algo ema: begins at zero, as in MindSpore Transformers, so the average that replaces"
               f" the weights is {factor:.3g} times a mean of them; sma is a mean")
    if config.do_eval and config.eval_step_interval == -1 and config.eval_epoch_interval == -1:
        yield "do_eval: evaluates only at the end, because eval_step_interval and eval_epoch_interval are -1"
    if config.trains and config.runner_wrapper.type == "MFPipelineWithLossScaleCell":
        yield "runner_wrapper.type MFPipelineWithLossScaleCell: treated as MFTrainOneStepCell"
    saves_decoder = config.trains and config.is_decoder and not config.has_adapters
    if saves_decoder and not saved_class(decoder, config.model.arch.type):
        features = ", ".join(class_differences(decoder, config.model.arch.type))
        yield (f"model.arch.type {config.model.arch.type}: checkpoints have no config.json, because no class of"
               f" transformers computes this model; unlike {config.model.arch.type} it has {features}")
    for name in ("architectures", "model_type"):
        value = getattr(decoder, name)
        if value and not named_family({name: value})[0]:
            unlike = ""
            if name == "model_type" and value in UNSUPPORTED_FAMILIES:
                unlike = f"; unlike there, {UNSUPPORTED_FAMILIES[value]}"
            yield (f"model_config.{name} {value}: not a known family; the model is built as {config.model.arch.type}"
                   f" (model.arch.type){unlike}")


def _mixture(config: Config) -> Iterator[str]:
    moe = config.decoder.experts
    written = config.decoder.moe_config
    watchers = [number for number, callback in enumerate(config.callbacks) if isinstance(callback, MoEDropRate)]
    if moe is None:
        if written is not None and written != MoEConfig():
            yield Note("moe_config: no effect, expert_num is 1 (dense model)", "ignored")
        for number in watchers:
            yield f"callbacks.{number} MoEDropRateCallback: no effect, the model has no experts"
        return
    if moe.effective_capacity is not None and (config.do_eval or not config.trains):
        yield (f"moe_config.capacity_factor {moe.effective_capacity:g} applies to training only: evaluation and"
               " prediction drop no tokens")
    if moe.balance_via_topk_bias and not moe.topk_bias_update_rate:
        yield "moe_config.balance_via_topk_bias: no effect, topk_bias_update_rate is 0"
    if not config.trains:
        return
    if moe.output_router_logits is False and (factor := config.decoder.balance_factor):
        yield (f"output_router_logits false: does not switch off the auxiliary loss here (weight {factor:g}); to switch"
               " it off, write aux_loss_factor: 0")
    if watches_drop_rate(config):
        yield from _drop_rate(config, moe, watchers)


def _drop_rate(config: Config, moe: MoEConfig, watchers: list[int]) -> Iterator[str]:
    """Yields notes about the reported drop rate; `watchers` are the numbers of the callbacks that report it."""
    where = config.source.where(f"{_MOE}.callback_moe_droprate")
    if not watchers:
        assumed = watched_keys(config) | {"capacity_factor": (capacity_factor(moe), "")}
        values = {name: assumed[name][0] for name in MoEDropRate.model_fields if name in assumed}
        shown = (f"{name} {'null' if value is None else value}" for name, value in values.items())
        yield ("moe_config.callback_moe_droprate: MoEDropRateCallback is not in callbacks; it is added with the model's"
               f" {', '.join(shown)}")
    elif not moe.callback_moe_droprate and where:
        yield f"callback_moe_droprate ({where}) is false, but callbacks has MoEDropRateCallback: drop rates are logged"
    elif not moe.callback_moe_droprate:
        yield f"callbacks.{watchers[0]} MoEDropRateCallback: callback_moe_droprate is not in moe_config; assumed true"
    if moe.effective_capacity is None:
        reason = "capacity_factor sets no limit"
        if moe.use_gmm:
            reason = "use_gmm drops no tokens"
        yield f"the drop rate will be 0 in every layer: {reason}"


def parallel_notes(config: Config, world: World) -> Iterator[str]:
    """Yields notes about parallel settings that have no effect in this job, and about those derived for it."""
    parallel = config.parallel
    semi_auto = runs_semi_auto(config, world)
    if parallel.full_batch is False and not semi_auto:
        yield "parallel.full_batch false: not used, each rank reads its own sequences"
    if config.sample_prompt is not None and semi_auto:
        yield ("sample_prompt: not used, semi-automatic mode generates no text; add --run_mode predict"
               " --use_parallel false to generate from the checkpoints")
    if world.size > 1:
        if config.use_parallel is None and not config.source.source_places:  # the newer schema has no such key
            yield f"use_parallel: not set; it is true, because the job has {world.size} ranks"
        if parallel.parallel_mode in SEMI_AUTO and parallel.parallel_fallback:
            yield (f"parallel.parallel_mode {parallel.parallel_mode}: replaced by explicit mode, because"
                   f" parallel_fallback is {parallel.parallel_fallback}")
        level = config.source.place("parallel.parallel_optimizer_config.optimizer_level")
        has_stages = parallel_degrees(config, world).pipeline_stage > 1  # then both trainers keep the weights
        if level.value == "default" and not has_stages and shards_optimizer(config, world):
            yield f"{level.key} default: taken as never, because ranks of an Ascend do not yet reshard weights"
        return
    section = config.parallel_config
    names = (*Degrees._fields, "micro_batch_num")
    degrees = {name: getattr(section, name) for name in names}
    used = [f"parallel_config.{name} {value}" for name, value in degrees.items() if value is not None and value > 1]
    if used and not config.use_parallel:
        yield f"{', '.join(used)}: not used, the run has one device: {_single_device_reason(config)}"
    if config.use_parallel:
        yield "use_parallel true: the job has one rank; `run_trainer.py launch --nproc 8` starts eight"
    keys = []
    if not semi_auto and parallel.parallel_mode not in (*DATA_PARALLEL, "stand_alone"):
        keys.append(f"parallel.parallel_mode {parallel.parallel_mode}")
    if parallel.enable_parallel_optimizer and config.source.place("parallel.enable_parallel_optimizer").order:
        keys.append("parallel.enable_parallel_optimizer true")
    if keys:
        yield f"{', '.join(keys)}: not used, the run has one device"


def _single_device_reason(config: Config) -> str:
    """Returns why a file for several devices runs on one, or how to start several."""
    if config.use_parallel is False:
        return "use_parallel is false"
    if config.run_mode == "chat":
        return "run_mode chat has one rank"
    if not config.trains and is_semi_auto(config):
        return "semi-automatic mode trains only"
    section = config.parallel_config
    sharding = {*Degrees._fields} - {"data_parallel"}
    if config.run_mode == "predict" and config.context.device_target == "Ascend":
        if any(getattr(section, name) > 1 for name in sharding):
            return "prediction shards a model on CPUs only"
    return "start several with `launch --nproc`"


def pipeline_notes(config: Config) -> Iterator[str]:
    """Yields notes about gradient_accumulation_steps in a pipeline, and micro_batch_num without one."""
    steps = config.runner_config.gradient_accumulation_steps
    section = config.parallel_config
    if steps > 1 and section.pipeline_stage > 1:
        yield Note(
            f"runner_config.gradient_accumulation_steps {steps}: no effect in a pipeline;"
            f" parallel_config.micro_batch_num {section.micro_batch_num} sets the micro-batches of a step",
            "ignored",
        )
    if section.pipeline_stage == 1 and section.micro_batch_num > 1:
        text = f"parallel_config.micro_batch_num {section.micro_batch_num}: no effect without a pipeline"
        yield Note(text, "ignored")
