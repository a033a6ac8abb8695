"""Optimizer and learning rate schedules (YAML ``optimizer`` and ``lr_schedule``)."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from trainer.config.schema.fields import COUNT, REQUIRED, Section, refuse_value, setting

Beta = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
_NS_STEPS = 100
_COEFFICIENTS = [3.4445, -4.7750, 2.0315]  # steepest at zero: small singular values grow fastest


def _is_triple(value: Any) -> bool:
    """Returns whether a value is three numbers."""
    return isinstance(value, list) and len(value) == 3 and all(type(number) in (int, float) for number in value)


def _validate_coefficients(value: list[Any]) -> list[Any]:
    """Returns a triple of numbers or a list of `[triple, steps]`; any other value is an error."""
    if _is_triple(value):
        return value
    segments = [part for part in value if isinstance(part, list) and len(part) == 2 and _is_triple(part[0])]
    counts = [part[1] for part in segments if type(part[1]) is int and part[1] >= 1]
    if not value or len(counts) < len(value) or sum(counts) > _NS_STEPS:
        refuse_value(f"must be [a, b, c], or [[[a, b, c], steps], ...] with 1 to {_NS_STEPS} steps in all")
    return value


Coefficients = Annotated[list[Any], AfterValidator(_validate_coefficients)]


class OptimizerConfig(Section):
    """The update rule (YAML ``optimizer``)."""

    # Names of fused versions, and of versions with float32 state, of the same update rule.
    type_aliases: ClassVar[dict[str, str]] = {
        "FusedAdamW": "AdamW", "FusedPmaAdamW": "PmaAdamW", "FP32StateAdamWeightDecay": "AdamW",
        "adamw": "AdamW", "muon": "Muon", "sgd": "SGD",
    }  # fmt: skip

    type: Literal["AdamW", "PmaAdamW", "SGD", "Muon"] = setting(
        "AdamW", "Update rule; Muon leaves embedding, head, norms and biases to AdamW. PmaAdamW replaces the weights by"
        " an average of earlier ones from time to time.")
    betas: list[Beta] = setting(
        [0.9, 0.999], "AdamW: decay rates of the two moments. Default [0.9, 0.999], of Muon [0.95, 0.95].",
        min_length=2, max_length=2, aliases="adamw_betas")
    eps: float = setting(1e-8, "AdamW's epsilon.", gt=0, aliases="adamw_eps")
    weight_decay: float = setting(
        0.0, "Decoupled weight decay, on matrices only if no rule says otherwise. Default 0, of Muon 0.1.", ge=0)
    weight_decay_include: list[str] | None = setting(
        None, "Parameters with weight decay: names, parts of names, or patterns with * and ?.")
    weight_decay_exclude: list[str] | None = setting(
        None, "Parameters without weight decay, unless weight_decay_include has them. A name is that of MindSpore"
        " Transformers (decoder.layers.0.self_attention.linear_qkv.weight), or Hugging Face's.")
    momentum: float = setting(0.0, "SGD, Muon: momentum. Default 0, of Muon 0.95.", ge=0, lt=1)
    nesterov: bool = setting(False, "SGD, Muon: Nesterov momentum. Default false, of Muon true.")
    ns_steps: int = setting(5, "Muon: Newton-Schulz steps that orthogonalise an update.", ge=1, le=_NS_STEPS)
    ns_coefficients: Coefficients = setting(
        _COEFFICIENTS, "Muon: coefficients [a, b, c] of all Newton-Schulz steps, or [[[a, b, c], steps], ...], which"
        " replaces ns_steps.")
    ns_eps: float = setting(1e-7, "Muon: added to the norm by which Newton-Schulz divides.", gt=0)
    adamw_include: list[str] = setting(
        ["*word_embeddings*", "*output_layer*"], "Muon: matrices that AdamW updates, as patterns for their names in"
        " MindSpore Transformers. Default: embedding and head.")
    qk_clip_enabled: bool = setting(
        True, "Muon with latent attention (MLA): scales queries and keys of heads with a logit above the threshold."
        " Default true, without latent attention false.")
    qk_clip_threshold: float = setting(100.0, "Attention logit above which QK-clip scales a head. Default 100.", gt=0)
    matched_adamw_rms: float | None = setting(
        0.2, "Muon: root mean square of an update, before the learning rate: AdamW's is about 0.2. Null: an orthogonal"
        " update times sqrt(max(1, rows / columns)).", gt=0)
    learning_rate: float | None = setting(
        None, "Peak learning rate; must agree with lr_schedule's when both are given. Default null: lr_schedule's.",
        ge=0)

    fused_num: int = setting(
        10, "PmaAdamW: how many weights are averaged before the average replaces the weights.", ge=1, le=COUNT)
    interleave_step: int = setting(1000, "PmaAdamW: updates between two weights of the average.", ge=1, le=COUNT)
    fused_algo: Literal["ema", "sma"] = setting(
        "ema", "PmaAdamW: sma is the mean; ema is that of MindSpore Transformers, which begins at zero.")
    ema_alpha: float = setting(0.2, "PmaAdamW with ema: the factor of a new weight. Default 0.2.", gt=0, lt=1)
    ema_decay: float | None = setting(
        None, "Keep exponential moving averages of the trained weights: average = ema_decay x average + (1 - ema_decay)"
        " x weight after each update. Default null: none.", ge=0, lt=1)

    loraplus_lr_ratio: float = setting(
        1.0, "LoRA+ (Hayou et al. 2024): learning rate of the matrices B of adapters over that of A. Default 1: the"
        " same.", gt=0, aliases="lora_plus_lr_ratio")

    @property
    def newton_schulz(self) -> list[list[float]]:
        """Returns the coefficients a, b, c of each Newton-Schulz step."""
        if _is_triple(self.ns_coefficients):
            return [self.ns_coefficients] * self.ns_steps
        return [triple for triple, steps in self.ns_coefficients for _ in range(steps)]


class _Schedule(Section):
    """The keys of all schedules."""

    default_type: ClassVar[str] = "CosineWithWarmUpLR"
    # MindSpore Transformers registers these names in addition to those of its classes.
    type_aliases: ClassVar[dict[str, str]] = {
        "constant_with_warmup": "ConstantWarmUpLR", "linear": "LinearWithWarmUpLR", "cosine": "CosineWithWarmUpLR",
        "cosine_with_restarts": "CosineWithRestartsAndWarmUpLR", "polynomial": "PolynomialWithWarmUpLR",
        "cosine_annealing": "CosineAnnealingLR", "cosine_annealing_warm_restarts": "CosineAnnealingWarmRestarts",
    }  # fmt: skip

    total_steps: int = setting(
        -1, "Optimizer steps over which the schedule runs. Default -1: all steps of the run (epochs x steps per"
        " epoch).", ge=-1, le=COUNT)


class _WarmUpSchedule(_Schedule):
    """Schedules that rise from ``warmup_lr_init`` to ``learning_rate`` first."""

    learning_rate: float = setting(5e-5, "Peak learning rate.", ge=0)
    warmup_lr_init: float = setting(0.0, "Learning rate of the first warm-up step.", ge=0)
    warmup_steps: int | None = setting(
        None, "Optimizer steps of warm-up, unless warmup_ratio is set. Default null: 0.",
        ge=0, le=COUNT, aliases="warmup_step")
    warmup_ratio: Ratio | None = setting(None, "Warm-up as a fraction of the total steps.")


class ConstantWarmUpLR(_WarmUpSchedule):
    """Warm-up, then constant."""

    type: Literal["ConstantWarmUpLR"] = setting(REQUIRED, "Kind of schedule.")


class LinearWithWarmUpLR(_WarmUpSchedule):
    """Warm-up, then a straight line to zero, which the step after the last one would have."""

    type: Literal["LinearWithWarmUpLR"] = setting(REQUIRED, "Kind of schedule.")


class CosineWithWarmUpLR(_WarmUpSchedule):
    """Warm-up, then ``num_cycles`` cosine waves down to ``lr_end``."""

    type: Literal["CosineWithWarmUpLR"] = setting("CosineWithWarmUpLR", "Kind of schedule.")
    lr_end: float = setting(0.0, "Learning rate at the end.", ge=0)
    num_cycles: float = setting(0.5, "Waves of the cosine; half a wave falls once.", gt=0, le=COUNT)
    decay_steps: int | None = setting(
        None, "Optimizer step, counted from the first of warm-up, at which the curve is cut, not compressed: from there"
        " on the learning rate is lr_end. Default null: the end of the run.", ge=1, le=COUNT)
    decay_ratio: Ratio | None = setting(None, "decay_steps as a fraction of the total steps; it wins if both are set.")


class CosineWithRestartsAndWarmUpLR(_WarmUpSchedule):
    """Warm-up, then ``num_cycles`` cosine falls, each starting at the peak again."""

    type: Literal["CosineWithRestartsAndWarmUpLR"] = setting(REQUIRED, "Kind of schedule.")
    lr_end: float = setting(0.0, "Learning rate at the end of a fall.", ge=0)
    num_cycles: float = setting(1.0, "Falls from peak to lr_end.", gt=0, le=COUNT)
    decay_steps: int | None = setting(
        None, "Optimizer step, counted from the first of warm-up, at which the curve is cut, not compressed: from there"
        " on the learning rate is lr_end. Default null: the end of the run.", ge=1, le=COUNT)


class PolynomialWithWarmUpLR(_WarmUpSchedule):
    """Warm-up, then (1 - progress)^power down to ``lr_end``."""

    type: Literal["PolynomialWithWarmUpLR"] = setting(REQUIRED, "Kind of schedule.")
    lr_end: float = setting(1e-7, "Learning rate at the end.", ge=0)
    power: float = setting(1.0, "Exponent. Default 1: a straight line.", gt=0)
    decay_steps: int | None = setting(None, "Steps of the decay after warm-up. Default null: the rest.", ge=1, le=COUNT)


class CosineAnnealingLR(_Schedule):
    """Half a cosine wave from ``base_lr`` to ``eta_min`` in ``t_max`` steps, and back up, without end."""

    type: Literal["CosineAnnealingLR"] = setting(REQUIRED, "Kind of schedule.")
    base_lr: float = setting(5e-5, "Highest learning rate.", ge=0, aliases="learning_rate")
    t_max: int = setting(REQUIRED, "Optimizer steps of half a wave.", ge=1, le=COUNT)
    eta_min: float = setting(0.0, "Lowest learning rate.", ge=0)


class CosineAnnealingWarmRestarts(_Schedule):
    """Cosine falls from ``base_lr`` to ``eta_min``: the first of ``t_0`` steps, each next ``t_mult`` times as long."""

    type: Literal["CosineAnnealingWarmRestarts"] = setting(REQUIRED, "Kind of schedule.")
    base_lr: float = setting(5e-5, "Highest learning rate.", ge=0, aliases="learning_rate")
    t_0: int = setting(REQUIRED, "Optimizer steps of the first fall.", ge=1, le=COUNT)
    t_mult: int = setting(1, "How many times longer each fall is than the one before.", ge=1, le=COUNT)
    eta_min: float = setting(0.0, "Lowest learning rate.", ge=0)


class WarmUpStableDecayLR(_WarmUpSchedule):
    """Warm-up, constant, then a straight line to ``lr_end``."""

    type: Literal["WarmUpStableDecayLR"] = setting(REQUIRED, "Kind of schedule.")
    lr_end: float = setting(1e-7, "Learning rate at the end.", ge=0)
    decay_start_steps: int | None = setting(
        None, "Optimizer step at which the decay starts, unless decay_start_ratio is set.", ge=0, le=COUNT)
    decay_start_ratio: Ratio | None = setting(None, "The start of the decay as a fraction of the total steps.")


class ConstantWithCoolDownLR(_WarmUpSchedule):
    """Warm-up, ``keep_steps`` at the peak, a cosine fall to ``lr_end1``, ``final_steps`` there, then ``lr_end2``."""

    type: Literal["ConstantWithCoolDownLR"] = setting(REQUIRED, "Kind of schedule.")
    keep_steps: int = setting(0, "Optimizer steps at the peak after warm-up.", ge=0, le=COUNT)
    decay_steps: int | None = setting(
        None, "Steps of the cosine fall. Default null: as many as the run has, so that it ends within the fall.",
        ge=1, le=COUNT)
    decay_ratio: Ratio | None = setting(None, "decay_steps as a fraction of the total steps; it wins if both are set.")
    num_cycles: float = setting(0.5, "Waves of the cosine.", gt=0, le=COUNT)
    lr_end1: float = setting(0.0, "Learning rate at the end of the fall.", ge=0)
    final_steps: int = setting(0, "Optimizer steps at lr_end1 after the fall.", ge=0, le=COUNT)
    lr_end2: float | None = setting(None, "Learning rate after final_steps. Default null: lr_end1.", ge=0)


LrSchedule = Annotated[
    ConstantWarmUpLR | LinearWithWarmUpLR | CosineWithWarmUpLR | CosineWithRestartsAndWarmUpLR | PolynomialWithWarmUpLR
    | CosineAnnealingLR | CosineAnnealingWarmRestarts | WarmUpStableDecayLR | ConstantWithCoolDownLR,
    Field(discriminator="type"),
]  # fmt: skip
