"""Rules across sections: what a configuration says against itself, and what works but is worth knowing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from trainer.config.checks.adapter import adapter_notices
from trainer.config.checks.classifier import classifier_problems
from trainer.config.checks.model import model_problems
from trainer.config.checks.moe import callback_problems, moe_notices, moe_problems
from trainer.config.checks.precision import precision_notices, precision_problems
from trainer.config.checks.problem import Problem
from trainer.config.families import family_notices, family_problems
from trainer.config.recompute import recompute_notices, recompute_problems
from trainer.config.schema.freeze import FreezeConfig
from trainer.config.schema.root import Config
from trainer.config.schema.runner import LossScaleSection
from trainer.errors import UserError

BYTE_VOCABULARY = 257
"""Token ids of the byte tokenizer: 256 bytes and the end of a document."""

LARGEST_FLOAT32 = 3.4028234663852886e38

Report = Callable[..., Problem]


def reporter(config: Config) -> Report:
    """Makes a function that turns a key, its value, rule and fix into a problem at its place."""

    def report(key: str, value: Any, rule: str, fix: str) -> Problem:
        place = config.source.place(key)
        return Problem(place, UserError(rule, where=place.text, key=config.source.name(key), value=value, fix=fix))

    return report


def rule_problems(config: Config) -> list[Problem]:
    """Everything that the sections say against each other."""
    report = reporter(config)
    of_decoders = (model_problems, family_problems, moe_problems, _vocabulary, precision_problems, recompute_problems)
    rules = (
        classifier_problems, *(of_decoders if config.classifier is None else ()), callback_problems, _schedule,
        _learning_rate, _data, _pipeline, _loss_scale,
    )  # fmt: skip
    return [problem for rule in rules for problem in rule(config, report)]


def _vocabulary(config: Config, report: Report) -> Iterator[Problem]:
    size, key = config.decoder.vocab_size, "model.model_config.vocab_size"
    reads_bytes = config.train_dataset.tokenizer.type == "bytes" and config.train_dataset.data_loader.dataset_dir
    if reads_bytes and size < BYTE_VOCABULARY:
        yield report(
            key,
            size,
            f"the byte tokenizer has {BYTE_VOCABULARY} tokens, more than the model's vocabulary",
            f"set it to {BYTE_VOCABULARY} or more",
        )
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = getattr(config.decoder, name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < size:
                yield report(
                    f"model.model_config.{name}",
                    value,
                    f"must be a token of the vocabulary, 0 to {size - 1} (vocab_size {size})",
                    "set it to the tokenizer's id, or leave it out",
                )


def _schedule(config: Config, report: Report) -> Iterator[Problem]:
    schedule = config.lr_schedule
    total = schedule.total_steps
    if total == 0:
        yield report("lr_schedule.total_steps", 0, "must be at least 1, or -1", "write -1 for all steps of the run")
    for steps, ratio in (
        ("warmup_steps", "warmup_ratio"),
        ("decay_steps", "decay_ratio"),
        ("decay_start_steps", "decay_start_ratio"),
    ):
        names = type(schedule).model_fields
        if steps not in names:
            continue
        number = getattr(schedule, steps)
        if ratio in names and getattr(schedule, ratio) is not None and number:
            where = config.source.where(f"lr_schedule.{ratio}")
            yield report(
                f"lr_schedule.{steps}",
                number,
                f"says the same as {ratio} = {getattr(schedule, ratio)} ({where})",
                "remove one of the two",
            )
        if number is not None and total > 0 and number > total:
            yield report(
                f"lr_schedule.{steps}",
                number,
                f"must be at most the schedule's total_steps ({total})",
                f"lower {steps} or raise lr_schedule.total_steps",
            )


def _learning_rate(config: Config, report: Report) -> Iterator[Problem]:
    rate, schedule = config.optimizer.learning_rate, config.lr_schedule
    name = "learning_rate" if "learning_rate" in type(schedule).model_fields else "base_lr"
    peak = getattr(schedule, name)
    if rate is not None and rate != peak:
        where = config.source.where(f"lr_schedule.{name}")
        yield report(
            "optimizer.learning_rate",
            rate,
            f"disagrees with lr_schedule.{name} = {peak} ({where})",
            "remove one of the two",
        )


def _data(config: Config, report: Report) -> Iterator[Problem]:
    for section in ("train_dataset", "eval_dataset"):
        dataset = getattr(config, section)
        if dataset is None:
            continue
        tokenizer = dataset.tokenizer
        if tokenizer.type == "bytes" and tokenizer.path:
            yield report(
                f"{section}.tokenizer.path",
                tokenizer.path,
                "the byte tokenizer reads no file",
                f"set {section}.tokenizer.type to huggingface, or remove the path",
            )


def _pipeline(config: Config, report: Report) -> Iterator[Problem]:
    degrees, accumulation = config.parallel_config, config.runner_config.gradient_accumulation_steps
    if not config.use_parallel or degrees.pipeline_stage == 1:
        return
    if accumulation > 1 and degrees.micro_batch_num > 1 and accumulation != degrees.micro_batch_num:
        yield report(
            "runner_config.gradient_accumulation_steps",
            accumulation,
            f"under a pipeline it means micro_batch_num, which is {degrees.micro_batch_num}"
            f" ({config.source.where('parallel_config.micro_batch_num')})",
            "remove one of the two",
        )
    if max(accumulation, degrees.micro_batch_num) < degrees.pipeline_stage:
        yield report(
            "parallel_config.micro_batch_num",
            degrees.micro_batch_num,
            f"must be at least pipeline_stage ({degrees.pipeline_stage}), or stages stand idle",
            f"set it to {degrees.pipeline_stage} or more",
        )


def _loss_scale(config: Config, report: Report) -> Iterator[Problem]:
    sense, key = config.runner_wrapper.scale_sense, "runner_wrapper.scale_sense"
    if isinstance(sense, LossScaleSection):
        sense, key = sense.loss_scale_value, f"{key}.loss_scale_value"
    if sense > LARGEST_FLOAT32:
        rule = f"is beyond float32, in which the loss is multiplied: at most {LARGEST_FLOAT32:.3g}"
        yield report(key, sense, rule, "write a smaller one: 65536 is a usual start")


def rule_notices(config: Config) -> list[str]:
    """What works, but other than a reader of the file might expect."""
    rules = (
        precision_notices, _position_notices, _optimizer_notices, _data_notices, _mode_notices,
        _wrapper_notices, family_notices, moe_notices, adapter_notices, recompute_notices,
    )  # fmt: skip
    return [notice for rule in rules for notice in rule(config)]


def _wrapper_notices(config: Config) -> Iterator[str]:
    if not config.trains:
        return
    wrapper = config.runner_wrapper
    unused = {"norm": ("clip_value",), "value": ("max_grad_norm", "clip_by_group")}[wrapper.clip_type]
    keys = _set_keys(config, "runner_wrapper", unused)
    if wrapper.use_clip_grad and keys:
        yield f"{', '.join(keys)}: not used, runner_wrapper.clip_type is {wrapper.clip_type}"
    clipping = ("max_grad_norm", "clip_type", "clip_by_group", "clip_value")
    spikes = ("global_norm_spike_threshold", "global_norm_spike_count_threshold")
    for switch, names in (("use_clip_grad", clipping), ("use_skip_data_by_global_norm", spikes)):
        if not getattr(wrapper, switch):
            # Who leaves the switch out takes the key for it, whatever its value.
            given = bool(config.source.where(f"runner_wrapper.{switch}"))
            keys = _set_keys(config, "runner_wrapper", names, also_defaults=not given)
            if keys:
                yield f"{', '.join(keys)}: not used, runner_wrapper.{switch} is False"
    sense = wrapper.scale_sense
    if isinstance(sense, LossScaleSection) and sense.type == "FixedLossScaleUpdateCell":
        keys = _set_keys(config, "runner_wrapper.scale_sense", ("scale_factor", "scale_window"))
        if keys:
            yield f"{', '.join(keys)}: not used, a FixedLossScaleUpdateCell does not change its scale"
    if config.runner_wrapper.type == "MFPipelineWithLossScaleCell":
        yield "runner_wrapper.type MFPipelineWithLossScaleCell: the step is that of MFTrainOneStepCell"


def _set_keys(config: Config, section: str, names: tuple[str, ...], also_defaults: bool = False) -> list[str]:
    """Those of the names that the file or a flag sets, to something else than the default or `also_defaults`."""
    part = functools.reduce(getattr, section.split("."), config)
    defaults = {name: field.get_default(call_default_factory=True) for name, field in type(part).model_fields.items()}
    keys = [f"{section}.{name}" for name in names if also_defaults or getattr(part, name) != defaults[name]]
    return [key for key in keys if config.source.where(key)]


def _position_notices(config: Config) -> Iterator[str]:
    decoder = config.decoder
    if decoder.max_positions < decoder.seq_length:
        yield (
            f"model.model_config.seq_length {decoder.seq_length} is beyond max_position_embeddings"
            f" {decoder.max_positions}: the model sees positions it was not made for"
        )


def _optimizer_notices(config: Config) -> Iterator[str]:
    muon = ("ns_steps", "matched_adamw_rms")
    unused = {"SGD": ("betas", "eps", *muon), "AdamW": ("momentum", "nesterov", *muon), "Muon": ()}
    keys = _set_keys(config, "optimizer", unused[config.optimizer.type])
    if keys:
        yield f"{', '.join(keys)}: not used by {config.optimizer.type}"


def _data_notices(config: Config) -> Iterator[str]:
    train, evaluation = config.train_dataset, config.eval_dataset
    size = config.runner_config.batch_size
    if train.batch_size is not None and train.batch_size != size:
        yield f"train_dataset.batch_size {train.batch_size}: not used, runner_config.batch_size {size} counts"
    if train.max_batches and (evaluation is not None or not train.held_out):
        yield "train_dataset.max_batches: not used, it bounds evaluations: set eval_dataset.max_batches"
    if evaluation is not None and train.held_out:
        yield (
            f"train_dataset.held_out {train.held_out}: these documents are neither trained on nor evaluated,"
            " as there is an eval_dataset"
        )
    if evaluation is not None and evaluation.held_out:
        yield "eval_dataset.held_out: not used, only train_dataset keeps documents back"


def _mode_notices(config: Config) -> Iterator[str]:
    if config.run_mode != "predict" and config.predict_data is not None:
        yield f"predict_data: not used, run_mode is {config.run_mode}"
    if config.run_mode in ("eval", "predict") and config.resume_training is not False:
        yield f"resume_training: not used, run_mode is {config.run_mode}"
    elif config.resume_training is not False and config.load_checkpoint and config.decoder.pet_config is None:
        yield (
            f"resume_training: goes on from the checkpoint in load_checkpoint ({config.load_checkpoint}) with its"
            " optimizer, step and place in the data; leave it out to start anew from these weights"
        )
    if config.run_mode in ("eval", "predict") and config.freeze != FreezeConfig():
        yield f"freeze: not used, run_mode is {config.run_mode}"
    if config.do_eval and config.eval_step_interval == -1 and config.eval_epoch_interval == -1:
        yield "do_eval: evaluates only at the end, both eval_step_interval and eval_epoch_interval are -1"
