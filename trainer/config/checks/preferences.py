"""Rules about the loss: that of preferences, that with a teacher, and what a training adds to the cross entropy."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.checks.parallel import parallel_degrees, shards_optimizer, zero_level
from trainer.config.checks.problem import ConfigError, problem
from trainer.config.schema.data import EVAL, TRAIN
from trainer.config.schema.root import Config
from trainer.config.schema.runner import LossConfig
from trainer.models.spec.build import model_spec
from trainer.parallel.world import World

_KEY = "loss.type"
_LABELS = "model.model_config.num_labels"
_KEYS_OF_ONE = (
    ("gamma", "simpo", "a margin"),
    ("desirable_weight", "kto", "labels to weigh"),
    ("undesirable_weight", "kto", "labels to weigh"),
    ("teacher", "distillation", "a teacher"),
    ("temperature", "distillation", "a temperature"),
    ("alpha", "distillation", "a divergence to weigh"),
    ("teacher_dtype", "distillation", "a teacher"),
)
_FIELDS = {"pairs": "chosen and rejected", "margins": "chosen and rejected", "labels": "prompt, completion and label"}
_CELLS = "anything but native layers on a CPU (an Ascend, context.mode 1, semi-automatic mode)"
_TEACHER = "loss.teacher"
_NOISE = "model.model_config.neftune_noise_alpha"
_WEIGHTS = f"{TRAIN}.data_loader.columns"
_RECORDS = ("JsonlDataset", "HFDataLoader", "CommonDataLoader")


def loss_problems(config: Config, world: World, on_arrays: bool) -> list[ConfigError]:
    """Returns the errors about what a loss is made of.

    Args:
        on_arrays: Whether native CPU layers compute the model.
    """
    return [
        *_key_problems(config),
        *preference_problems(config, world, on_arrays),
        *distillation_problems(config, world, on_arrays),
        *term_problems(config, on_arrays),
    ]


def _uses_loss(config: Config) -> bool:
    """Returns whether the run mode computes a loss."""
    return not config.tasks and (config.trains or config.run_mode == "eval")


def _key_problems(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each key that the type of the loss does not have."""
    loss = config.loss
    if loss is None or not _uses_loss(config):
        return
    if loss.type in ("reward", "distillation") and loss.beta is not None:
        rule = "a reward model has no reference, so there is no strength"
        if loss.is_distillation:
            rule = "a distillation has no strength: alpha weighs the divergence from the teacher"
        yield problem(config, "loss.beta", rule, "leave it out")
    for name, kind, meaning in _KEYS_OF_ONE:
        is_default = getattr(loss, name) == LossConfig.model_fields[name].default  # as a dumped configuration has it
        if loss.type != kind and not is_default:
            rule = f"only {kind} has {meaning}, and loss.type is {loss.type}"
            yield problem(config, f"loss.{name}", rule, "leave it out")


def preference_problems(config: Config, world: World, on_arrays: bool) -> Iterator[ConfigError]:
    """Yields one error for all that the loss of preferences does not support, and those of the data.

    Args:
        on_arrays: Whether native CPU layers compute the model.
    """
    loss = config.preferences
    yield from _score_problems(config, world, on_arrays)
    if loss is None or not _uses_loss(config):
        return
    lacking = list(_unsupported(config, world, on_arrays))
    if lacking:
        rule = f"a loss of preferences is not yet supported with {', '.join(lacking)}"
        yield problem(config, _KEY, rule, "leave that out, or leave out loss")
    if config.run_mode == "eval" and loss.needs_reference:
        rule = "run_mode eval does not know the weights before the training, which this loss compares with"
        yield problem(config, _KEY, rule, "evaluate during the training: do_eval")
    for section in (TRAIN, EVAL):
        yield from _data_problems(config, loss, section)


def distillation_problems(config: Config, world: World, on_arrays: bool) -> Iterator[ConfigError]:
    """Yields one error for all that a distillation does not support, and those about its teacher.

    Args:
        on_arrays: Whether native CPU layers compute the model.
    """
    loss = config.distillation
    if loss is None or not _uses_loss(config):
        return
    lacking = list(_unsupported(config, world, on_arrays, compares=False))
    if lacking:
        rule = f"a distillation is not yet supported with {', '.join(lacking)}"
        yield problem(config, _KEY, rule, "leave that out, or leave out loss")
    if loss.teacher is None:
        yield problem(config, _TEACHER, "a distillation needs a teacher", "name its folder", because=_KEY)
    teacher = config.teacher
    if teacher is None:
        return
    if teacher.decoder.num_labels:
        yield problem(config, _TEACHER, "a reward model has no logits to learn from", "name a language model")
    theirs = teacher.decoder.vocab_size
    ours = config.decoder.vocab_size
    if theirs != ours:
        rule = f"its vocabulary has {theirs:,} tokens and that of the model {ours:,}: their logits cannot be compared"
        yield problem(config, _TEACHER, rule, "name a teacher with the model's vocabulary and tokenizer")


def term_problems(config: Config, on_arrays: bool) -> Iterator[ConfigError]:
    """Yields one error for each key about loss or embeddings of a training that something else does not support.

    Args:
        on_arrays: Whether native CPU layers compute the model.
    """
    settings = config.decoder
    if not config.trains:
        return
    used = {
        "model.model_config.label_smoothing": bool(settings.label_smoothing),
        "model.model_config.z_loss_weight": bool(settings.z_loss_weight),
        _NOISE: settings.neftune_noise_alpha is not None,
        _WEIGHTS: config.train_dataset.has_weights,
    }
    for key in (key for key, is_used in used.items() if is_used):
        lacking = []
        if not on_arrays:
            lacking.append(_CELLS)
        if key == _NOISE and settings.embedding_multiplier != 1:
            lacking.append(f"embedding_multiplier {settings.embedding_multiplier:g}")
        if key != _NOISE and config.preferences is not None:
            lacking.append(f"a loss of preferences ({config.preferences.type})")
        if key != _NOISE and model_spec(settings).mtp_modules:
            lacking.append("multi-token prediction")
        if key == _WEIGHTS and settings.experts is not None:
            lacking.append("experts")
        if lacking:
            yield problem(config, key, f"is not yet supported with {', '.join(lacking)}", "leave one of both out")


def _score_problems(config: Config, world: World, on_arrays: bool) -> Iterator[ConfigError]:
    """Yields errors about a reward model where its loss is not the subject."""
    is_reward = config.loss is not None and config.loss.type == "reward"
    if config.decoder.num_labels is None:
        if is_reward:
            fix = "leave it out: loss.type reward sets it to 1"
            yield problem(config, _LABELS, "a reward model has a head for one score", fix, because=_KEY)
        return
    if (config.trains or config.run_mode == "eval") and not is_reward:
        rule = "a model with a score instead of logits is trained and evaluated with the loss of reward models"
        yield problem(config, _LABELS, rule, "write loss: {type: reward}, or leave num_labels out")
    if config.sample_prompt or config.run_mode == "chat":
        key = "sample_prompt"
        if config.run_mode == "chat":
            key = "run_mode"
        fix = "leave it out, or use run_mode predict, which gives scores"
        yield problem(config, key, "a reward model writes no text", fix, because=_LABELS)
    if config.run_mode == "predict":
        lacking = list(_unsupported(config, world, on_arrays))
        if world.size > 1:
            lacking.append("several ranks")
        if lacking:
            rule = f"a prediction of scores is not yet supported with {', '.join(lacking)}"
            yield problem(config, _LABELS, rule, "leave that out")


def _unsupported(config: Config, world: World, on_arrays: bool, compares: bool = True) -> Iterator[str]:
    """Yields what the configuration has that a loss of preferences does not support.

    Args:
        compares: Whether answers are compared; False: the loss is that of a student and its teacher.
    """
    degrees = parallel_degrees(config, world)
    if compares and config.decoder.num_labels and config.has_adapters:
        yield "adapters of a reward model, whose new head they would leave frozen"
    if not on_arrays:
        yield _CELLS
    if compares and config.decoder.experts is not None:
        yield "experts"
    if model_spec(config.decoder).mtp_modules:
        yield "multi-token prediction"
    for name in ("model_parallel", "context_parallel", "expert_parallel", "pipeline_stage"):
        degree = getattr(degrees, name)
        if degree > 1:
            yield f"{name} {degree}"
    if compares and shards_optimizer(config, world) and zero_level(config) == "level3":
        yield "sharded weights (level3)"


def _data_problems(config: Config, loss: LossConfig, section: str) -> Iterator[ConfigError]:
    data = getattr(config, section)
    if data is None:
        return
    if data.data_loader.type not in _RECORDS:
        key = f"{section}.data_loader.type"
        rule = f"a loss of preferences needs records with {_FIELDS[loss.answers]}"
        yield problem(config, key, rule, "write JsonlDataset or HFDataLoader, or leave out loss", because=_KEY)
    if data.packing == "cut":
        rule = f"a {loss.unit} stays whole in a sequence"
        yield problem(config, f"{section}.packing", rule, "write whole or none, or leave it out")
    if data.train_on == "all":
        rule = "a loss of preferences compares answers, which carry loss without their prompt"
        yield problem(config, f"{section}.train_on", rule, "write assistant or last, or leave it out")
