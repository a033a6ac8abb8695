"""The command line's flags as plain data, and pure functions that turn arguments into overrides of the configuration.

Named flags are MindSpore Transformers' (``run_mindformer.py``); each sets one dotted key. Every other key of the
configuration is a flag as well: ``--runner_config.epochs 3``, ``--callbacks.0.save_checkpoint_steps=50``,
``--log_format plain``, or ``--options a.b=c d.e=f``. Strength, weakest first: file, ``--options``, named flags,
dotted flags. A flag that is given twice keeps its last value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainer.errors import UserError

# Only functions import trainer.config: --help shows the table without loading the schema.
if TYPE_CHECKING:
    from trainer.config import Override

FlagKind = Literal["value", "bool", "list", "optional"]
"""One value; True when alone; one or more strings; True when alone but a name is possible too."""


class Flag(NamedTuple):
    """A named flag."""

    name: str
    key: str
    kind: FlagKind
    help: str
    metavar: str = "TEXT"
    also: str = ""
    """A second key which gets the same value where its section is in the file."""


_DATA = "train_dataset.data_loader"
_MODEL = "model.model_config"
_MOE = "model.model_config.moe_config"

NO_EFFECT = "Accepted for compatibility, without effect"
# By panel of the help.
PANELS: dict[str, tuple[Flag, ...]] = {
    "Training": (
        Flag("run_mode", "run_mode", "value", "What to do: train, finetune, eval, predict or chat.", "MODE"),
        Flag("seed", "seed", "value", "Seed of weights, dropout and the order of data.", "INT"),
        Flag("learning_rate", "lr_schedule.learning_rate", "value", "Peak learning rate of the schedule.", "FLOAT"),
        Flag("epochs", "runner_config.epochs", "value", "Passes over the training data.", "INT"),
        Flag("batch_size", "runner_config.batch_size", "value", "Sequences of one micro-batch on a rank.", "INT"),
        Flag("gradient_accumulation_steps", "runner_config.gradient_accumulation_steps", "value",
             "Micro-batches of one optimizer step.", "INT"),
        Flag("stop_step", "runner_config.stop_step", "value", "End after this optimizer step; 0: off.", "INT"),
        Flag("use_clip_grad", "runner_wrapper.use_clip_grad", "bool", "Clip gradients by their global norm."),
        Flag("max_grad_norm", "runner_wrapper.max_grad_norm", "value", "Largest global norm after clipping.", "FLOAT"),
        Flag("do_eval", "do_eval", "bool", "Evaluate while training."),
        Flag("mode", "context.mode", "value",
             "0: layers on arrays or compiled blocks; 1: operator by operator. Newer schema: 1, no effect.", "0|1"),
        Flag("device_target", "context.device_target", "value", "Device: CPU, Ascend or GPU.", "NAME"),
        Flag("device_fallback", "context.device_fallback", "bool", "Use the best device if device_target is missing."),
        Flag("device_id", "context.device_id", "value", "Which device of this machine.", "INT"),
    ),
    "Data": (
        Flag("train_dataset_dir", f"{_DATA}.dataset_dir", "value",
             'Data to train on: file, folder or "stdlib".', "PATH"),
        Flag("eval_dataset_dir", "eval_dataset.data_loader.dataset_dir", "value", "Data to evaluate on.", "PATH"),
        Flag("num_samples", f"{_DATA}.num_samples", "value",
             "Maximum number of sequences of each data set.", "INT", also="eval_dataset.data_loader.num_samples"),
        Flag("predict_data", "predict_data", "list", "predict: prompts, or a file of prompts.", "TEXT..."),
        Flag("predict_batch_size", "predict_batch_size", "value", "predict: prompts generated at once.", "INT"),
        Flag("chat", "chat", "bool", "predict, tasks: render prompts with the chat template."),
        Flag("tasks", "lm_eval.tasks", "list", "eval: tasks of lm-eval, or task files.", "NAME..."),
        Flag("num_fewshot", "lm_eval.num_fewshot", "value", "tasks: solved examples before a question.", "INT"),
        Flag("limit", "lm_eval.limit", "value", "tasks: questions of each task.", "INT"),
    ),
    "Model": (
        Flag("model", "pretrained_model_dir", "value", "Folder of Hugging Face: sizes, weights, tokenizer.", "DIR"),
        Flag("pretrained_model_dir", "pretrained_model_dir", "value", "The same as --model.", "DIR"),
        Flag("do_sample", f"{_MODEL}.do_sample", "bool", "predict: sample instead of taking the likeliest token."),
        Flag("temperature", f"{_MODEL}.temperature", "value", "predict: divides the logits before sampling.", "FLOAT"),
        Flag("top_k", f"{_MODEL}.top_k", "value", "predict: sample among this many likeliest tokens.", "INT"),
        Flag("top_p", f"{_MODEL}.top_p", "value", "predict: sample among tokens of this total probability.", "FLOAT"),
        Flag("max_new_tokens", f"{_MODEL}.max_new_tokens", "value", "predict: longest answer in tokens.", "INT"),
        Flag("use_fused_rope", f"{_MODEL}.use_fused_rope", "bool", "Fused rotary embedding where there is one."),
        Flag("use_fused_swiglu", f"{_MODEL}.use_fused_swiglu", "bool", "Fused SwiGLU where there is one."),
        Flag("use_gmm", f"{_MOE}.use_gmm", "bool", "Experts as one grouped matrix product."),
        Flag("enable_gmm_safe_tokens", f"{_MOE}.enable_gmm_safe_tokens", "bool", "At least one token for each expert."),
        Flag("callback_moe_droprate", f"{_MOE}.callback_moe_droprate", "bool",
             "Report the tokens that experts dropped."),
    ),
    "Parallelism": (
        Flag("use_parallel", "use_parallel", "bool", "Run as one of several ranks; default: true if several exist."),
        Flag("parallel_fallback", "parallel.parallel_fallback", "value",
             "explicit: data parallelism instead of semi-automatic mode.", "NAME"),
    ),
    "Output": (
        Flag("profile", "profile", "bool", "Profile steps 1 to 10, or --profile_start_step to --profile_stop_step."),
        Flag("output_dir", "output_dir", "value", "Output directory of the run.", "DIR"),
        Flag("trackers", "trackers", "list", "Experiment trackers: wandb, mlflow, swanlab.", "NAME..."),
        Flag("log_format", "log_format", "value",
             "Lines of progress: rich, plain, mindformers or mindspore.", "FORMAT"),
    ),
    "Checkpoints": (
        Flag("load_checkpoint", "load_checkpoint", "value", "Weights to start from.", "PATH"),
        Flag("src_strategy_path_or_dir", "src_strategy_path_or_dir", "value",
             "Strategy files of MindSpore Transformers' checkpoint.", "PATH"),
        Flag("resume_training", "resume_training", "optional",
             "Resume from the newest, or the named, checkpoint.", "[NAME]"),
        Flag("adapter_id", "adapter_id", "value", "Low-rank adapters to start from.", "PATH"),
    ),
    NO_EFFECT: (
        Flag("sink_mode", "runner_config.sink_mode", "bool", "Data sink; ignored."),
        Flag("auto_trans_ckpt", "auto_trans_ckpt", "bool", "Transform checkpoints; ignored."),
        Flag("strategy_load_checkpoint", "strategy_load_checkpoint", "value", "Checkpoint's layout; ignored.", "PATH"),
        Flag("only_save_strategy", "only_save_strategy", "bool", "Write a layout; not yet."),
        Flag("transform_process_num", "transform_process_num", "value", "For auto_trans_ckpt; ignored.", "INT"),
        Flag("remote_save_url", "remote_save_url", "value", "Upload address; ignored.", "URL"),
        Flag("register_path", "register_path", "value", "Own Python classes; not yet.", "DIR"),
        Flag("trust_remote_code", "trust_remote_code", "bool", "Code of a model hub; ignored."),
        Flag("modal_type", "modal_type", "list", "Kinds of predict_data; not yet.", "TEXT..."),
    ),
}  # fmt: skip
FLAGS = tuple(flag for flags in PANELS.values() for flag in flags)


class Arguments(NamedTuple):
    """A command line, taken apart."""

    config: str | None
    overrides: list[Override]  # the weakest first
    rest: list[str]  # the command's own flags


@dataclass
class _Reader:
    """Reads arguments from left to right.

    Attributes:
        own: The flags of the command itself, without their dashes.
    """

    tokens: list[str]
    own: Sequence[str] = ()
    config: str | None = None
    options: list[Override] = field(default_factory=list)
    named: list[Override] = field(default_factory=list)
    dotted: list[Override] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)

    def next_is_value(self) -> bool:
        """Returns whether the next argument is a value, not a flag."""
        return bool(self.tokens) and (self.tokens[0] == "--" or not self.tokens[0].startswith("--"))

    def value(self, flag: str, inline: str | None, example: str) -> str:
        """Returns the value of a flag: the text after ``=``, or the next argument."""
        if inline is not None:
            return inline
        if self.next_is_value():
            return self.tokens.pop(0)
        raise UserError("needs a value", where=f"flag {flag}", fix=f"write {flag} {example}")

    def values(self, flag: str, inline: str | None, example: str) -> list[str]:
        """Returns all values up to the next flag."""
        texts = [self.value(flag, inline, example)]
        while self.next_is_value():
            texts.append(self.tokens.pop(0))
        return texts


def split_arguments(
    argv: Sequence[str],
    command_flags: Collection[str] = ("--help",),
    command_options: Collection[str] = (),
    read_before: Collection[str] = (),
) -> Arguments:
    """Takes a command line apart.

    Args:
        command_flags: Switches of the command itself: they stay in ``rest``.
        command_options: Options of the command with a value: they stay there, too.
        read_before: Names of flags that the caller has read already, for the fix of an unknown flag.

    Raises:
        UserError: An unknown flag (with the nearest one), or a missing value.
    """
    names = [flag.removeprefix("--") for flag in (*command_flags, *command_options)]
    reader = _Reader(list(argv), [*names, *read_before])
    while reader.tokens:
        token = reader.tokens.pop(0)
        if not token.startswith("--") or token in command_flags:
            reader.rest.append(token)
            continue
        name, equals, inline = token[2:].partition("=")
        text = None
        if equals:
            text = inline
        if f"--{name}" in command_options:
            value = reader.value(f"--{name}", text, _SHAPES.get(name, "PATH"))
            reader.rest += [f"--{name}", value]
            continue
        _read_flag(reader, name, text)
    return Arguments(reader.config, reader.options + reader.named + reader.dotted, reader.rest)


_SHAPES = {"ranks": "8", "local_ranks": "8", "audit": "ascend", "steps": "3", "jobs": "2",
           "against": "origin/main", "junit": "junit.xml", "summary": "summary.md",
           "grid": "optimizer.eps=1e-8,1e-6", "max_device_memory": "58GB", "write": "best.yaml", "check": "3",
           "measured": "steps.yaml"}  # fmt: skip
"""Examples of values of a command's own options that are no paths."""


_CLOSE = 0.85
"""Similarity of names that differ in a letter or two."""
_NULLS = ("null", "None", "~")
"""Values that remove a key of the file, an unknown one too."""


def _read_flag(reader: _Reader, name: str, inline: str | None) -> None:
    from trainer.config import Override

    if name == "config":
        if reader.config is not None:
            raise UserError("is given twice", where="flag --config", fix="give one configuration file")
        reader.config = reader.value("--config", inline, "configs/quickstart.yaml")
        return
    if name == "options":
        for pair in reader.values("--options", inline, "runner_config.epochs=3"):
            key, equals, text = pair.partition("=")
            if not equals or not key:
                fix = "write --options runner_config.epochs=3"
                raise UserError(f"{pair!r} is not key=value", where="flag --options", fix=fix)
            reader.options.append(Override(key, text, "--options"))
        return
    plain = name.replace("-", "_")
    by_name = {flag.name: flag for flag in FLAGS}
    if plain in by_name:
        reader.named += _read_named(reader, by_name[plain], inline)
    elif name.startswith("no-") and plain[3:] in by_name:
        reader.named += _negated(by_name[plain[3:]], inline)
    else:
        reader.dotted.append(_dotted(reader, name, inline))


def _read_named(reader: _Reader, flag: Flag, inline: str | None) -> list[Override]:
    from trainer.config import Override

    shown = f"--{flag.name}"
    example = flag.metavar.split("|")[0].strip("[].")
    text = "true"
    texts: tuple[str, ...] = ()
    if flag.name == "model" and (inline or (reader.tokens or [""])[0]).lstrip().startswith("{"):
        return [Override("model", reader.value(shown, inline, example), f"flag {shown}")]  # the section of this name
    if flag.kind == "list":
        texts = tuple(reader.values(shown, inline, "TEXT"))
        text = texts[0]
        if flag.metavar == "NAME..." and len(texts) == 1 and text.lstrip().startswith("["):
            texts = ()  # the list as a file has it
    elif flag.kind == "value" or inline is not None or reader.next_is_value():
        text = reader.value(shown, inline, example)
    if flag.kind == "bool" and text.lower() not in ("true", "false"):
        fix = f"write {shown}, {shown} false or --no-{flag.name}"
        raise UserError("must be true or false", where=f"flag {shown}", key=flag.name, value=text, fix=fix)
    overrides = [Override(flag.key, text, f"flag {shown}", texts=texts)]
    if flag.also:
        overrides.append(Override(flag.also, text, f"flag {shown}", only_if_present=True))
    return overrides


def _negated(flag: Flag, inline: str | None) -> list[Override]:
    from trainer.config import Override

    shown = f"--no-{flag.name}"
    if flag.kind not in ("bool", "optional"):
        fix = f"write --{flag.name} VALUE"
        raise UserError("only a true/false flag can be negated", where=f"flag {shown}", fix=fix)
    if inline is not None:
        raise UserError("takes no value", where=f"flag {shown}", fix=f"write --{flag.name} {inline} or {shown}")
    return [Override(flag.key, "false", f"flag {shown}")]


def _is_close(name: str, guess: str) -> bool:
    """Returns whether a flag is a name but for one or two letters; otherwise a flag of the command comes first."""
    return SequenceMatcher(None, name.replace("-", "_"), guess).ratio() >= _CLOSE


def _dotted(reader: _Reader, name: str, inline: str | None) -> Override:
    """Returns the override of a flag that is a key; reading the file reports unknown keys that have a dot."""
    from trainer.config import Override, in_sections, is_boolean, is_top_level, key_names, sections_with
    from trainer.config.checks.problem import nearest

    shown = f"--{name}"
    key = name
    if name.startswith("no-"):
        key = name[3:]
    removes = inline in _NULLS or (inline is None and reader.tokens[:1] and reader.tokens[0] in _NULLS)
    if "." not in key and not is_top_level(key) and not removes:
        flags = [flag.name for flag in FLAGS] + ["config", "options", *reader.own]
        guess = nearest(name.replace("-", "_"), [*flags, *key_names()])
        command_flag = nearest(name.replace("-", "_"), reader.own)
        if command_flag and not (guess and _is_close(name, guess)):
            guess = command_flag
        fix = "run_trainer.py --help lists the flags"
        longer = [f"--{flag}" for flag in flags if flag.startswith(f"{name.replace('-', '_')}_")]
        sections = sections_with(key)
        if sections and not (guess in flags and guess.lower() == name.lower()):
            fix = f"name its section: {in_sections(key, sections, prefix='--')}"
        elif longer and not (guess and _is_close(name, guess)):
            fix = f"you probably mean {' or '.join(longer[:3])}"
        elif guess in flags:
            fix = f"you probably mean --{guess}"
        elif guess:
            fix = f"you probably mean {in_sections(guess, sections_with(guess), prefix='--')}"
        raise UserError("unknown flag", where=f"flag {shown}", fix=fix)
    if name.startswith("no-"):
        if not is_boolean(key):
            raise UserError("only a true/false key can be negated", where=f"flag {shown}", fix=f"write --{key} VALUE")
        return Override(key, "false", f"flag {shown}")
    if inline is None and not reader.next_is_value() and is_boolean(key):
        return Override(key, "true", f"flag {shown}")
    return Override(key, reader.value(shown, inline, "VALUE"), f"flag {shown}")
