"""Rules across sections: what a configuration says against itself, and what its run needs beyond a valid file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from trainer.config.checks.adapters import adapter_file_problems
from trainer.config.checks.model import model_problems
from trainer.config.checks.moe import callback_problems, moe_problems
from trainer.config.checks.parallel import parallel_problems, runs_semi_auto
from trainer.config.checks.problem import NO_VALUE, ConfigError, problem, raise_problems
from trainer.config.patterns import PatternError, read_pattern
from trainer.config.precision import requested_dtype
from trainer.config.schema.data import TokenizerConfig
from trainer.config.schema.fields import support_of
from trainer.config.schema.root import CLASSIFIER, Config
from trainer.config.schema.runner import LossScaleSection
from trainer.config.stages import stage_problems
from trainer.input_files import missing_path_reason
from trainer.parallel.world import SINGLE_PROCESS, World

_LARGEST_FLOAT32 = 3.4028234663852886e38
_ONE = "remove one of the two"
_MODEL = "model.model_config"
_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size")


def rule_problems(config: Config) -> list[ConfigError]:
    """Everything that the sections say against each other."""
    rules = (
        model_problems, moe_problems, callback_problems, stage_problems, _schedule, _training, _records, _profiles,
    )  # fmt: skip
    return [found for rule in rules for found in rule(config)]


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
            rule = f"says the same as {part}_ratio = {ratio} ({where(f'{key}.{part}_ratio')})"
            yield problem(config, f"{key}.{part}_steps", rule, _ONE)
        if steps is not None and total > 0 and steps > total:
            rule = f"must be at most the schedule's total_steps ({total})"
            fix = f"lower {part}_steps or raise {key}.total_steps"
            yield problem(config, f"{key}.{part}_steps", rule, fix)
    name = "base_lr"
    if "learning_rate" in names:
        name = "learning_rate"
    if config.optimizer.learning_rate not in (None, getattr(schedule, name)):
        rule = f"disagrees with {key}.{name} = {getattr(schedule, name)} ({where(f'{key}.{name}')})"
        fix = f"{_ONE}, or give both one value: --learning_rate X --optimizer.learning_rate X"
        yield problem(config, "optimizer.learning_rate", rule, fix)


def _training(config: Config) -> Iterator[ConfigError]:
    for section in ("train_dataset", "eval_dataset"):
        dataset = getattr(config, section)
        if dataset is not None and dataset.tokenizer.type == "bytes" and dataset.tokenizer.path:
            fix = f"set {section}.tokenizer.type to huggingface, or remove the path"
            yield problem(config, f"{section}.tokenizer.path", "the byte tokenizer reads no file", fix)
        if dataset is not None and dataset.packing is not None and not dataset.data_loader.reads_text:
            rule = f"a {dataset.data_loader.type} has no documents to pack"
            yield problem(config, f"{section}.packing", rule, "remove it")
    scale = config.runner_wrapper.scale_sense
    key = "runner_wrapper.scale_sense"
    if isinstance(scale, LossScaleSection):
        scale = scale.loss_scale_value
        key = f"{key}.loss_scale_value"
    if scale > _LARGEST_FLOAT32:
        rule = f"is beyond float32, in which the loss is multiplied: at most {_LARGEST_FLOAT32:.3g}"
        yield problem(config, key, rule, "write a smaller one: 65536 is a usual start")
    key = "runner_wrapper.accumulate_allreduce_grads_in_fp32"
    if not config.runner_wrapper.accumulate_allreduce_grads_in_fp32 and config.classifier is None:
        if requested_dtype(config.decoder, config.amp_level, "compute_dtype") == "float16":
            rule = "float16 has too small a range to sum gradients in"
            yield problem(config, key, rule, "leave it out, or use compute_dtype bfloat16")


def _records(config: Config) -> Iterator[ConfigError]:
    for number, pattern in enumerate(config.monitor_config.patterns):
        try:
            read_pattern(pattern)
        except PatternError as error:
            yield problem(config, f"monitor_config.target.{number}", str(error), "write for example layers.0",
                          value=pattern, because="monitor_config.target")  # fmt: skip


def _packages(config: Config) -> Iterator[ConfigError]:
    """The packages that records are handed to, which a run does without where it has none."""
    wanted = dict.fromkeys(config.tracker_names, "trackers")
    if config.tensorboard.tensorboard_dir:
        wanted["tensorboardX"] = "tensorboard.tensorboard_dir"
    for package, key in wanted.items():
        if find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed"
            fix = f"pip install {package}"
            if package == "swanlab":  # no extra could be installed, see setup.cfg
                fix += ", then pip install 'protobuf>=7.34.1', which MindSpore needs"
            yield problem(config, key, rule, fix)._replace(is_absent=True)


def preflight(config: Config, world: World = SINGLE_PROCESS, backend_problems: Sequence[ConfigError] = ()) -> None:
    """Checks what ``run_mode`` needs, as one of the ranks of `world`; a section copied from documentation cannot run.

    Looks at the disk for ``output_dir``, ``load_checkpoint`` and ``adapter_id`` only. The problems of the
    execution mode, ``backend_problems``, come with the others.

    Raises:
        UserError: Sizes of the model are missing, there are no weights or prompts, nothing to evaluate on,
            ``output_dir`` is a file, or the file asks for other ranks than the job has.
    """
    raise_problems([*run_problems(config, world), *backend_problems])


def run_problems(config: Config, world: World) -> list[ConfigError]:
    """The problems of `preflight` that do not depend on the backend."""
    return [*_run(config), *(_samples(config, world) if config.trains else ()), *parallel_problems(config, world)]


def _run(config: Config) -> Iterator[ConfigError]:
    mode = config.run_mode
    missing = [name for name in _SIZES if not config.source.where(f"{_MODEL}.{name}")]
    if config.source.path and missing and config.classifier is None:  # a classifier's defaults are a model to run
        rule = f"a run needs the sizes of its model; missing: {', '.join(missing)}"
        fix = f"write them in {_MODEL}, as configs/quickstart.yaml does, or name a model folder: --model FOLDER"
        # The template of a file has none of them and names no folder: flags do.
        folder = config.pretrained_model_dir
        if folder:
            elsewhere = not _exists(folder)
        else:
            elsewhere = len(missing) == len(_SIZES)
        yield problem(config, _MODEL, rule, fix, value=NO_VALUE)._replace(is_absent=elsewhere)
    # A checkpoint of adapters holds no base model: a run that resumes needs one too.
    resumes = mode == "finetune" and config.resume_training is not False and not config.has_adapters
    if not _exists(config.load_checkpoint):
        fix = "name a checkpoint folder (output/checkpoints/step-...) or a .safetensors file"
        rule = f"the path {missing_path_reason(os.path.expanduser(config.load_checkpoint))}"
        yield problem(config, "load_checkpoint", rule, fix)._replace(is_absent=True)
    elif mode != "train" and not config.load_checkpoint and not (resumes or starts_anew(config)):
        fix = "give --load_checkpoint output/checkpoints/step-... or --model FOLDER, or use run_mode train"
        yield problem(config, "load_checkpoint", f"run_mode {mode} needs weights", fix, because="run_mode")
    yield from adapter_file_problems(config)
    if mode == "eval":
        asked = "run_mode"
    else:
        asked = ""
        if config.do_eval and config.trains:
            asked = "do_eval"
    if asked and config.eval_dataset is None and not config.train_dataset.held_out:
        fix = "set train_dataset.held_out, for example to 0.05, or write an eval_dataset"
        yield problem(config, asked, "there is nothing to evaluate on", fix)
    yield from _evaluates(config) if config.trains else ()
    yield from _packages(config) if config.trains else ()
    if mode == "predict" and not config.predict_data:
        fix = 'give --predict_data "Once upon a time"'
        yield problem(config, "predict_data", "run_mode predict needs prompts", fix, because="run_mode")
    folder = Path(config.output_dir).expanduser()
    blocking = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), None)
    if blocking is not None and not os.path.isdir(blocking):
        what = "a link to what is not there"
        if blocking.exists():
            what = "a file"
        if blocking == folder:
            rule = f"is {what}, not a folder"
        else:
            rule = f"{blocking} is {what}, not a folder"
        yield problem(config, "output_dir", rule, "give another --output_dir")
    elif blocking is not None and not os.access(blocking, os.W_OK | os.X_OK, effective_ids=True):
        if blocking == folder:
            rule = "cannot be written"
        else:
            rule = f"cannot be made: {blocking} cannot be written"
        fix = "give another --output_dir, or make the folder writable"
        yield problem(config, "output_dir", rule, fix)._replace(is_absent=True)


def starts_anew(config: Config) -> bool:
    """Whether a finetuning starts from new weights because the file writes an empty load_checkpoint."""
    return config.run_mode == "finetune" and not config.load_checkpoint and bool(config.source.where("load_checkpoint"))


def _profiles(config: Config) -> Iterator[ConfigError]:
    window = config.profile_monitor
    if window is not None and window.stop_step < window.start_step:
        number = next((n for n, callback in enumerate(config.callbacks) if callback is window), None)
        if number is None:
            key = "profile_stop_step"
        else:
            key = f"callbacks.{number}.stop_step"
        rule = f"must be at least the first step that is profiled ({window.start_step})"
        yield problem(config, key, rule, "raise it, or lower the first one")


def _evaluates(config: Config) -> Iterator[ConfigError]:
    """A callback that acts on evaluations needs some before the run ends."""
    wants = {"EarlyStop": "type", "CheckpointMonitor": "keep_best"}
    for number, callback in enumerate(config.callbacks):
        if callback.type not in wants or (callback.type == "CheckpointMonitor" and not callback.keep_best):
            continue
        key = f"callbacks.{number}.{wants[callback.type]}"
        if not config.do_eval:
            rule = "needs the losses of evaluations, and this run makes none (do_eval is False)"
            yield problem(config, key, rule, "write do_eval: True, or leave it out")
        elif callback.type == "EarlyStop" and config.eval_step_interval < 1 and config.eval_epoch_interval < 1:
            rule = "needs evaluations while the run trains, and this run makes one, at its end"
            yield problem(config, key, rule, "set eval_step_interval or eval_epoch_interval")


def _samples(config: Config, world: World) -> Iterator[ConfigError]:
    """Text is sampled from a decoder with a tokenizer, in explicit mode."""
    key = "sample_prompt"
    dataset = config.train_dataset
    if config.sample_prompt is None:
        return
    fix = "leave it out, or generate from the checkpoints: --run_mode predict --use_parallel False"
    names_tokenizer = dataset.tokenizer != TokenizerConfig() or config.source.where("train_dataset.tokenizer.type")
    if config.classifier is not None:
        yield problem(config, key, f"an {CLASSIFIER} generates no text", "leave it out")
    elif not config.sample_prompt:
        yield problem(config, key, "a prompt is empty", 'give a text, for example "Once upon a time", or leave it out')
    elif not (dataset.data_loader.reads_text or names_tokenizer):
        rule = f"needs a tokenizer, and a {dataset.data_loader.type} holds tokens"
        yield problem(config, key, rule, "name the tokenizer in train_dataset.tokenizer, or leave the prompt out")
    elif runs_semi_auto(config, world):
        yield problem(config, key, "semi-automatic mode generates no text", fix)


def _exists(path: str | None) -> bool:
    return not path or os.path.exists(os.path.expanduser(path))
