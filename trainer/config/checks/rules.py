"""Rules across sections: keys that contradict each other, and what a run needs beyond a valid file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from trainer.config.checks.adapters import adapter_file_problems
from trainer.config.checks.loaders import loader_problems, loader_tokenizer_problems
from trainer.config.checks.model import model_problems
from trainer.config.checks.moe import callback_problems
from trainer.config.checks.parallel import parallel_problems, runs_semi_auto
from trainer.config.checks.problem import NO_VALUE, ConfigError, problem, raise_problems
from trainer.config.patterns import PatternError, read_pattern
from trainer.config.precision import requested_dtype
from trainer.config.schema.callbacks import CheckpointMonitor, EarlyStop
from trainer.config.schema.data import TokenizerConfig
from trainer.config.schema.fields import support_of
from trainer.config.schema.root import Config
from trainer.config.schema.runner import LossScaleSection
from trainer.input_files import (
    SPECIAL,
    is_special,
    links_out_of,
    missing_path_fix,
    missing_path_reason,
    unwritable_reason,
)
from trainer.parallel.world import SINGLE_PROCESS, World

_LARGEST_FLOAT32 = 3.4028234663852886e38
NO_EVALUATION_DATA = "there is no evaluation data"
_REMOVE_ONE = "remove one of the two"
_MODEL = "model.model_config"
_ADDED_TO = ("checkpoints", "logs", "profile", "tokens", "trackers", "metrics.jsonl", "samples.jsonl")
"""What a run adds to or writes into, in its output_dir; it replaces other files, also where they are links."""
_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size")


def rule_problems(config: Config) -> list[ConfigError]:
    """Returns the errors for keys that contradict each other."""
    rules = (model_problems, callback_problems, loader_problems, _schedule, _training, _records, _profiles)
    return [error for rule in rules for error in rule(config)]


def _schedule(config: Config) -> Iterator[ConfigError]:
    schedule = config.lr_schedule
    key = "lr_schedule"
    where = config.source.where
    total = schedule.total_steps
    names = type(schedule).model_fields
    if total == 0:
        yield problem(config, f"{key}.total_steps", "must be at least 1, or -1", "write -1 for all steps of the run")
    used = {name: getattr(schedule, name) for name, field in names.items() if support_of(field)[0] == "supported"}
    for part in ("warmup", "decay", "decay_start"):
        steps = used.get(f"{part}_steps")
        ratio = used.get(f"{part}_ratio")
        if ratio is not None and steps:
            rule = f"cannot be combined with {part}_ratio = {ratio} ({where(f'{key}.{part}_ratio')})"
            yield problem(config, f"{key}.{part}_steps", rule, _REMOVE_ONE)
        if steps is not None and total > 0 and steps > total:
            yield problem(config, f"{key}.{part}_steps", f"must be at most the schedule's total_steps ({total})",
                          f"lower {part}_steps or raise {key}.total_steps")
    name = "base_lr"
    if "learning_rate" in names:
        name = "learning_rate"
    if config.optimizer.learning_rate not in (None, getattr(schedule, name)):
        rule = f"disagrees with {key}.{name} = {getattr(schedule, name)} ({where(f'{key}.{name}')})"
        fix = f"{_REMOVE_ONE}, or give both one value: --learning_rate X --optimizer.learning_rate X"
        yield problem(config, "optimizer.learning_rate", rule, fix)


def _training(config: Config) -> Iterator[ConfigError]:
    for section in ("train_dataset", "eval_dataset"):
        dataset = getattr(config, section)
        if dataset is not None and dataset.tokenizer.type == "bytes" and dataset.tokenizer.path:
            fix = f"set {section}.tokenizer.type to huggingface, or remove the path"
            yield problem(config, f"{section}.tokenizer.path", "the byte tokenizer uses no file", fix)
        if dataset is not None and dataset.packing is not None and not dataset.data_loader.reads_text:
            rule = f"does not apply to {dataset.data_loader.type}, which has no documents"
            yield problem(config, f"{section}.packing", rule, "remove it")
    scale = config.runner_wrapper.scale_sense
    key = "runner_wrapper.scale_sense"
    if isinstance(scale, LossScaleSection):
        scale = scale.loss_scale_value
        key = f"{key}.loss_scale_value"
    if scale > _LARGEST_FLOAT32:
        rule = f"the loss scale exceeds the largest float32 number ({_LARGEST_FLOAT32:.3g})"
        yield problem(config, key, rule, "write a smaller one, for example 65536")
    key = "runner_wrapper.accumulate_allreduce_grads_in_fp32"
    if not config.runner_wrapper.accumulate_allreduce_grads_in_fp32:
        if requested_dtype(config.decoder, config.amp_level, "compute_dtype") == "float16":
            rule = "is not supported with compute_dtype float16, in which sums of gradients overflow"
            yield problem(config, key, rule, "leave it out, or use compute_dtype bfloat16")


def _records(config: Config) -> Iterator[ConfigError]:
    for number, pattern in enumerate(config.monitor_config.patterns):
        try:
            read_pattern(pattern)
        except PatternError as error:
            yield problem(config, f"monitor_config.target.{number}", str(error), "write for example layers.0",
                          value=pattern, because="monitor_config.target")  # fmt: skip


def _packages(config: Config) -> Iterator[ConfigError]:
    """Yields errors for trackers and TensorBoard files whose packages are not installed."""
    packages = dict.fromkeys(config.tracker_names, "trackers")
    if config.tensorboard.tensorboard_dir:
        packages["tensorboardX"] = "tensorboard.tensorboard_dir"
    for package, key in packages.items():
        if find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed"
            fix = f"pip install {package}"
            if package == "swanlab":  # it cannot be an extra, see setup.cfg
                fix += ", then pip install 'protobuf>=7.34.1', which MindSpore needs"
            yield problem(config, key, rule, fix)._replace(is_absent=True)


def preflight(config: Config, world: World = SINGLE_PROCESS, backend_problems: Sequence[ConfigError] = ()) -> None:
    """Checks that a configuration has all that its ``run_mode`` needs on the ranks of `world`.

    Looks at the disk for ``output_dir``, ``load_checkpoint``, ``adapter_id`` and ``pretrained_model_dir`` only.

    Args:
        config: A configuration that `load_config` accepted; it may be one section copied from documentation.
        world: The rank of this process and the number of ranks.
        backend_problems: Errors of the execution mode, to be raised together with the others.

    Raises:
        UserError: Sizes of the model, weights, prompts or evaluation data are missing, ``output_dir`` is a file, or
            the degrees of parallelism do not fit the job.
    """
    raise_problems([*run_problems(config, world), *backend_problems])


def run_problems(config: Config, world: World) -> list[ConfigError]:
    """Returns the errors of `preflight` that do not depend on the execution mode."""
    problems = [*_model_sizes(config), *_weights(config), *adapter_file_problems(config), *_evaluation_data(config),
                *_averages(config), *loader_tokenizer_problems(config)]
    if config.trains:
        problems += [*_evaluation_callbacks(config), *_packages(config)]
    if config.run_mode == "predict" and not config.predict_data:
        fix = 'give --predict_data "Once upon a time"'
        rule = "run_mode predict needs prompts"
        problems.append(problem(config, "predict_data", rule, fix, because="run_mode"))
    problems += _output_dir(config)
    if config.tasks:
        problems += _tasks(config, world)
    if config.trains:
        problems += _samples(config, world)
    return [*problems, *parallel_problems(config, world)]


def _model_sizes(config: Config) -> Iterator[ConfigError]:
    """Yields an error for a decoder whose sizes are missing."""
    missing = [name for name in _SIZES if not config.source.where(f"{_MODEL}.{name}")]
    if not config.source.path or not missing or not config.is_decoder:
        return
    rule = f"a run needs the sizes of its model; missing: {', '.join(missing)}"
    fix = f"write them in {_MODEL}, as configs/quickstart.yaml does, or name a model folder: --model FOLDER"
    # A template has no sizes and no model folder: flags name the folder.
    is_absent = len(missing) == len(_SIZES)
    if config.pretrained_model_dir:
        is_absent = not _exists(config.pretrained_model_dir)
    yield problem(config, _MODEL, rule, fix, value=NO_VALUE)._replace(is_absent=is_absent)


def _weights(config: Config) -> Iterator[ConfigError]:
    """Yields an error for weights that do not exist, or that the run mode needs and the file does not name."""
    mode = config.run_mode
    # A checkpoint of adapters lacks the base model: a run that resumes needs one, too.
    resumes = mode == "finetune" and config.resume_training is not False and not config.has_adapters
    if not _exists(config.load_checkpoint):
        fix = "name a checkpoint folder (output/checkpoints/step-...) or a .safetensors file"
        fix = missing_path_fix(config.load_checkpoint, fix)
        rule = f"the path {missing_path_reason(os.path.expanduser(config.load_checkpoint))}"
        yield problem(config, "load_checkpoint", rule, fix)._replace(is_absent=True)
    elif mode != "train" and not config.load_checkpoint and not resumes and not starts_anew(config):
        fix = "give --load_checkpoint output/checkpoints/step-... or --model FOLDER, or use run_mode train"
        yield problem(config, "load_checkpoint", f"run_mode {mode} needs weights", fix, because="run_mode")


def average_keys(config: Config) -> list[str]:
    """Returns the keys with which a training averages its weights."""
    keys = []
    if config.trains and config.optimizer.type == "PmaAdamW":
        keys.append("optimizer.type")
    if config.trains and config.optimizer.ema_decay is not None:
        keys.append("optimizer.ema_decay")
    return keys


def _averages(config: Config) -> Iterator[ConfigError]:
    """Yields an error for evaluations of averages that the training does not keep."""
    if config.use_ema and config.trains and config.do_eval and config.optimizer.ema_decay is None:
        rule = "the training keeps no averages of its weights"
        yield problem(config, "use_ema", rule, "set optimizer.ema_decay, for example to 0.999, or leave it out")


def _evaluation_data(config: Config) -> Iterator[ConfigError]:
    """Yields an error for an evaluation without data."""
    key = ""
    if config.run_mode == "eval" and not config.tasks:
        key = "run_mode"
    elif config.trains and config.do_eval:
        key = "do_eval"
    if key and config.eval_dataset is None and not config.train_dataset.held_out:
        yield evaluation_data_error(config, key)


def evaluation_data_error(config: Config, key: str) -> ConfigError:
    """Returns the error for a key that asks for an evaluation without data."""
    fix = "set train_dataset.held_out, for example to 0.05, or write an eval_dataset"
    return problem(config, key, NO_EVALUATION_DATA, fix)


def _tasks(config: Config, world: World) -> Iterator[ConfigError]:
    """Yields the first reason why this job cannot run tasks of lm-eval."""
    key = "lm_eval.tasks"
    if config.decoder.num_labels is not None:
        yield problem(config, key, "asks a language model, and a reward model writes no text",
                      "leave it out: the evaluation then has loss and accuracy, and run_mode predict gives scores")
    elif world.size > 1:
        rule = f"runs in one process, and the job has {world.size} ranks"
        yield problem(config, key, rule, "start it without launch")
    elif find_spec("lm_eval") is None:
        rule = "needs the package lm_eval, which is not installed"
        yield problem(config, key, rule, "pip install 'run-trainer[lm-eval]'")._replace(is_absent=True)


def _output_dir(config: Config) -> Iterator[ConfigError]:
    """Yields an error for an output_dir that is a file, cannot be written, or has a pipe in it or a link out of it."""
    folder = Path(config.output_dir).expanduser()
    existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), None)
    if existing is not None and not os.path.isdir(existing):
        rule = "is a broken link, not a folder"
        if existing.exists():
            rule = "is a file, not a folder"
        if existing != folder:
            rule = f"{existing} {rule}"
        yield problem(config, "output_dir", rule, "give another --output_dir")
    elif existing is not None and (reason := unwritable_reason(existing)):
        rule = f"cannot be written: {reason}"
        if existing != folder:
            rule = f"cannot be created in {existing}: {reason}"
        fix = "give another --output_dir, or make the folder writable"
        yield problem(config, "output_dir", rule, fix)._replace(is_absent=True)
    logs = sorted((folder / "logs").glob("rank-*.log"))
    added_to = [*(folder / name for name in _ADDED_TO), *logs]
    for rule in links_out_of(folder, added_to):
        yield problem(config, "output_dir", rule, "remove the link, or give the other folder as --output_dir")
    for path in filter(is_special, [*added_to, *sorted((folder / "trackers").glob("*"))]):
        rule = f"{path.relative_to(folder)} in it is {SPECIAL}: a run would wait for it"
        yield problem(config, "output_dir", rule, "remove it, or give another --output_dir")
    if config.worker_log_dir is not None:
        for path in filter(is_special, sorted(Path(config.worker_log_dir).expanduser().glob("worker_*.log"))):
            rule = f"{path.name} in it is {SPECIAL}: a run would wait for it"
            yield problem(config, "worker_log_dir", rule, "remove it, or give another folder")


def starts_anew(config: Config) -> bool:
    """Returns whether a finetuning starts from new weights because the file has an empty load_checkpoint."""
    return config.run_mode == "finetune" and not config.load_checkpoint and bool(config.source.where("load_checkpoint"))


def _profiles(config: Config) -> Iterator[ConfigError]:
    window = config.profile_monitor
    if window is not None and window.stop_step < window.start_step:
        number = next((n for n, callback in enumerate(config.callbacks) if callback is window), None)
        if number is None:
            key = "profile_stop_step"
            first_key = "profile_start_step"
        else:
            key = f"callbacks.{number}.stop_step"
            first_key = "start_step"
        rule = f"must not be less than {first_key} ({window.start_step})"
        yield problem(config, key, rule, f"raise it, or lower {first_key}")


def _evaluation_callbacks(config: Config) -> Iterator[ConfigError]:
    """Yields errors for callbacks that act on evaluations in a run that makes none before its end."""
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, EarlyStop):
            key = f"callbacks.{number}.type"
        elif isinstance(callback, CheckpointMonitor) and callback.keep_best:
            key = f"callbacks.{number}.keep_best"
        else:
            continue
        if not config.do_eval:
            rule = "requires evaluations, and do_eval is false"
            yield problem(config, key, rule, "write do_eval: true, or leave it out")
        elif isinstance(callback, EarlyStop) and config.eval_step_interval < 1 and config.eval_epoch_interval < 1:
            rule = "requires evaluations during the training, and this run evaluates only at its end"
            yield problem(config, key, rule, "set eval_step_interval or eval_epoch_interval")


def _samples(config: Config, world: World) -> Iterator[ConfigError]:
    """Yields an error for a sample_prompt that cannot be continued; semi-automatic mode leaves it out, with a note."""
    key = "sample_prompt"
    dataset = config.train_dataset
    if config.sample_prompt is None or runs_semi_auto(config, world):
        return
    names_tokenizer = dataset.tokenizer != TokenizerConfig() or config.source.where("train_dataset.tokenizer.type")
    if not config.sample_prompt:
        yield problem(config, key, "a prompt is empty", 'give a text, for example "Once upon a time", or leave it out')
    elif not dataset.data_loader.reads_text and not names_tokenizer:
        rule = f"requires train_dataset.tokenizer, because {dataset.data_loader.type} contains token ids"
        yield problem(config, key, rule, "name the tokenizer in train_dataset.tokenizer, or leave the prompt out")


def _exists(path: str | None) -> bool:
    return not path or os.path.exists(os.path.expanduser(path))
