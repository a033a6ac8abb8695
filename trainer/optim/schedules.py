"""The learning rate of every optimizer step, by the names, keys and formulas of MindSpore Transformers.

Source of every formula: ``mindformers/core/lr/lr_schedule.py`` (MindSpore Transformers, July 2026) and the papers
that it cites. The arithmetic here is Python's float64; MindSpore Transformers' is float32, so the two agree to about
seven digits.

Convention of steps, as in MindSpore Transformers: step 0 is the first optimizer step, whose learning rate is ``lr(0)``.
With warm-up that is ``warmup_lr_init``, so with its default of 0 the first update moves no weight. The last step of a
run of ``total`` steps is ``total - 1``; a decay reaches its end value at ``lr(total)``, one step after the last update.

Symbols in the docstrings: t the step, w the warm-up steps, T the total steps, lr ``learning_rate``. Every
``*_steps``, ``t_max`` and ``t_0`` counts optimizer steps, every ``*_ratio`` is a fraction of T within 0..1 (rounded
down to whole steps), every learning rate is the factor of the optimizer's update, without a unit.

Where MindSpore Transformers' formula is broken outside the range it was written for, ours holds the value at the
range's border; the docstrings say where.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from trainer.errors import UserError

Schedule = Callable[[int], float]
"""Returns the learning rate of an optimizer step (0-based)."""


class _Inputs(NamedTuple):
    """The inputs of a builder: the YAML section, the total number of steps, and where a key was set."""

    section: Any
    total_steps: int
    where: Callable[[str], str]

    def error(self, name: str, rule: str, fix: str) -> UserError:
        """Makes the error for a key of the section."""
        key = f"lr_schedule.{name}"
        return UserError(rule, where=self.where(key), key=key, value=getattr(self.section, name), fix=fix)


def build_schedule(section: Any, total_steps: int, where: Callable[[str], str] = lambda key: "") -> Schedule:
    """Builds the schedule of an ``lr_schedule`` section; it has no state, so a resumed run needs only the step.

    Args:
        section: One of the schema's schedule types.
        total_steps: Optimizer steps of the run (epochs x steps of the data set). If ``section.total_steps`` is neither
            -1 nor None, it replaces this number, and the schedule stays at its end value after that many steps.
        where: Returns where a dotted key was set (``configs/a.yaml:12``), for error messages.

    Raises:
        UserError: The total is below 1, the type is unknown, or two keys contradict each other.
    """
    inputs = _Inputs(section, schedule_total_steps(section, total_steps), where)
    if section.type not in _BUILDERS:
        rule = f"is not a known schedule; known are {', '.join(_BUILDERS)}"
        raise inputs.error("type", rule, "use one of these names")
    if inputs.total_steps < 1:
        key = "lr_schedule.total_steps"
        raise UserError("must be at least 1 (-1: the steps of the data set)", where=where(key), key=key,
                        value=inputs.total_steps, fix="leave it at -1 and give the run at least one step")
    return _BUILDERS[section.type](inputs)


def schedule_total_steps(section: Any, total_steps: int) -> int:
    """Returns T of the formulas: the section's ``total_steps``, or the run's if the section has -1 or None."""
    if section.total_steps is None or section.total_steps == -1:
        return total_steps
    return section.total_steps


def warmup_steps(section: Any, total_steps: int) -> int:
    """Returns w of the formulas: ``int(warmup_ratio * T)`` if a ratio is set (even 0), else ``warmup_steps``, else 0.

    The ratio wins over the number, as in MindSpore Transformers. If w exceeds ``total_steps``, the run ends during its
    warm-up.
    """
    if section.warmup_ratio is not None:
        return int(total_steps * section.warmup_ratio)
    return section.warmup_steps or 0


def first_full_step(section: Any, total_steps: int) -> int:
    """Returns the first step (from 0) after warm-up; 0 for a schedule without warm-up."""
    if "learning_rate" not in type(section).model_fields:
        return 0
    return warmup_steps(section, schedule_total_steps(section, total_steps))


def _warm_up(inputs: _Inputs, after: Schedule) -> Schedule:
    """Returns warmup_lr_init + (lr - warmup_lr_init) * t / w before step w, and ``after(t)`` from step w on."""
    section = inputs.section
    steps = warmup_steps(section, inputs.total_steps)
    start = section.warmup_lr_init
    rise = section.learning_rate - section.warmup_lr_init

    def learning_rate(step: int) -> float:
        """Returns the rate of the warm-up, then that of `after`."""
        if step < steps:
            return start + rise * step / steps
        return after(step)

    return learning_rate


def _constant_warm_up(inputs: _Inputs) -> Schedule:
    """Builds ConstantWarmUpLR. After warm-up: lr."""
    peak = inputs.section.learning_rate
    return _warm_up(inputs, lambda step: peak)


def _linear_with_warm_up(inputs: _Inputs) -> Schedule:
    """Builds LinearWithWarmUpLR. After warm-up: lr * max(0, (T - t) / max(1, T - w)); the end is always 0."""
    peak = inputs.section.learning_rate
    total = inputs.total_steps
    steps = max(1, total - warmup_steps(inputs.section, total))
    return _warm_up(inputs, lambda step: peak * max(0.0, (total - step) / steps))


def _cosine_with_warm_up(inputs: _Inputs) -> Schedule:
    """Builds CosineWithWarmUpLR.

    After warm-up: lr_end + (lr - lr_end) * (1 + cos(2 pi num_cycles (t - w) / (T - w))) / 2.

    ``num_cycles`` counts full waves over T - w steps: 0.5 falls once from lr to lr_end, 1.5 ends low after one more
    peak. From step ``decay_steps`` on (default T, even if warm-up lasts longer) the learning rate is lr_end. As in
    MindSpore Transformers, ``decay_steps`` cuts the curve and does not compress the cosine. ``decay_ratio`` wins over
    it, and a ratio of 0 counts as not set. Beyond T, MindSpore Transformers' cosine would rise again; ours is lr_end.
    A cut within warm-up is an error (MindSpore Transformers drops to lr_end there).
    """
    section = inputs.section
    return _cosine_until_cut(inputs, _steps(inputs, section.decay_steps, section.decay_ratio),
                             lambda progress: 2.0 * section.num_cycles * progress)


def _cosine_with_restarts(inputs: _Inputs) -> Schedule:
    """Builds CosineWithRestartsAndWarmUpLR. After warm-up: lr_end + (lr - lr_end) * (1 + cos(pi u)) / 2.

    u is the fractional part of num_cycles (t - w) / (T - w): the learning rate falls ``num_cycles`` times from lr to
    lr_end and jumps back to lr in between. ``decay_steps`` and the end are as in CosineWithWarmUpLR. (Between T and a
    later ``decay_steps`` MindSpore Transformers returns 0; ours returns lr_end.)
    """
    section = inputs.section
    return _cosine_until_cut(inputs, _steps(inputs, section.decay_steps, None),
                             lambda progress: (section.num_cycles * progress) % 1.0)


def _cosine_until_cut(inputs: _Inputs, decay_steps: int | None, half_waves: Callable[[float], float]) -> Schedule:
    """Builds a cosine that ends at ``decay_steps``; `half_waves` makes (t - w) / (T - w) an angle in units of pi."""
    section = inputs.section
    total = inputs.total_steps
    first = warmup_steps(section, total)
    steps = max(1, total - first)
    cut = total
    if decay_steps is not None:
        cut = min(decay_steps, total)
    if cut < min(first, total):
        key = "decay_steps"
        if decay_steps != section.decay_steps:
            key = "decay_ratio"
        _refuse_inside_warm_up(inputs, key, "end", cut)
    end = section.lr_end
    fall = section.learning_rate - section.lr_end
    curve = _warm_up(inputs, lambda step: end + fall * _half_cosine(half_waves((step - first) / steps)))

    def learning_rate(step: int) -> float:
        if step >= cut:
            return end
        return curve(step)

    return learning_rate


def _polynomial_with_warm_up(inputs: _Inputs) -> Schedule:
    """Builds PolynomialWithWarmUpLR. After warm-up: lr_end + (lr - lr_end) * (1 - (t - w) / decay_steps) ** power.

    ``decay_steps`` counts from the end of warm-up and defaults to max(1, T - w). After it, MindSpore Transformers' base
    becomes negative (and with power 1 its learning rate too); ours is lr_end. Beyond T both are lr_end. ``lr_end`` must
    be below ``learning_rate``.
    """
    section = inputs.section
    total = inputs.total_steps
    _check_end_below_peak(inputs)
    first = warmup_steps(section, total)
    if section.decay_steps is not None:
        steps = section.decay_steps
    else:
        steps = max(1, total - first)
    end = section.lr_end
    fall = section.learning_rate - section.lr_end

    def decay(step: int) -> float:
        remaining = 1.0 - (step - first) / steps
        if step > total or remaining <= 0.0:
            return end
        return end + fall * remaining**section.power

    return _warm_up(inputs, decay)


def _warm_up_stable_decay(inputs: _Inputs) -> Schedule:
    """Builds WarmUpStableDecayLR (WSD). After warm-up: lr; from step s on: lr - (lr - lr_end) * (t - s) / (T - s).

    s is ``int(decay_start_ratio * T)`` if the ratio is set, otherwise ``decay_start_steps``. Neither has a default,
    here or in MindSpore Transformers. Beyond T, MindSpore Transformers' line falls below zero; ours stays at lr_end. If
    s is before the end of warm-up, that is an error (MindSpore Transformers jumps).
    """
    section = inputs.section
    total = inputs.total_steps
    _check_end_below_peak(inputs)
    start = section.decay_start_steps
    if section.decay_start_ratio is not None:
        start = int(total * section.decay_start_ratio)
    if start is None:
        fix = "add decay_start_ratio: 0.8 to decay over the last fifth of the run"
        raise inputs.error("type", "needs decay_start_steps or decay_start_ratio, the step at which decay starts", fix)
    if start < warmup_steps(section, total):
        key = "decay_start_steps"
        if section.decay_start_ratio is not None:
            key = "decay_start_ratio"
        _refuse_inside_warm_up(inputs, key, "start", start)
    peak = section.learning_rate
    end = section.lr_end
    steps = max(1, total - start)

    def stable_then_decay(step: int) -> float:
        """Returns the peak until the decay starts, then decays linearly."""
        progress = min(1.0, max(0.0, (step - start) / steps))
        if progress == 1.0:
            return end
        return peak - (peak - end) * progress

    return _warm_up(inputs, stable_then_decay)


def _constant_with_cool_down(inputs: _Inputs) -> Schedule:
    """Builds ConstantWithCoolDownLR: warm-up, constant, cosine, two constants (DeepSeek-V3, arXiv 2412.19437).

    After warm-up: lr for ``keep_steps``; then, over d steps and with u the steps since their beginning,
    lr_end1 + (lr - lr_end1) * (1 + cos(2 pi num_cycles u / d)) / 2; then lr_end1 for ``final_steps``; then lr_end2
    (None: lr_end1). d is ``int(decay_ratio * T)`` if the ratio is set and not 0, otherwise ``decay_steps``. By default
    d is T, as in MindSpore Transformers, so that the decay does not end within the run. An ``lr_end2`` of 0 is 0
    (MindSpore Transformers treats it as None).
    """
    section = inputs.section
    decay_steps = _steps(inputs, section.decay_steps, section.decay_ratio)
    if decay_steps is None:
        decay_steps = inputs.total_steps
    decay_start = warmup_steps(section, inputs.total_steps) + (section.keep_steps or 0)
    decay_end = decay_start + decay_steps
    final_end = decay_end + (section.final_steps or 0)
    peak = section.learning_rate
    end = section.lr_end1
    last = section.lr_end2
    if last is None:
        last = end

    def phases(step: int) -> float:
        """Returns the rate of the phase: peak, decay, end, and last after the final phase."""
        if step < decay_start:
            return peak
        if step < decay_end:
            return end + (peak - end) * _half_cosine(2.0 * section.num_cycles * (step - decay_start) / decay_steps)
        if step < final_end:
            return end
        return last

    return _warm_up(inputs, phases)


def _cosine_annealing(inputs: _Inputs) -> Schedule:
    """Builds CosineAnnealingLR: eta_min + (base_lr - eta_min) * (1 + cos(pi t / t_max)) / 2 (arXiv 1608.03983).

    There is no warm-up and no end: after ``t_max`` steps it rises again, up to base_lr at 2 t_max. T is not used.
    """
    section = inputs.section
    fall = section.base_lr - section.eta_min
    return lambda step: section.eta_min + fall * _half_cosine(step / section.t_max)


def _cosine_annealing_warm_restarts(inputs: _Inputs) -> Schedule:
    """Builds CosineAnnealingWarmRestarts: eta_min + (base_lr - eta_min) * (1 + cos(pi u / p)) / 2 (arXiv 1608.03983).

    u counts the steps since the last restart. The period p is ``t_0`` at first and is multiplied by ``t_mult`` at each
    restart. There is no warm-up and no end; T is not used. Restarts are computed with integers (MindSpore
    Transformers' float32 logarithm may miss one by a step).
    """
    section = inputs.section
    low = section.eta_min or 0.0
    fall = section.base_lr - low

    def learning_rate(step: int) -> float:
        """Returns the rate of a cosine that restarts after each period."""
        since = step
        period = section.t_0
        if section.t_mult == 1:
            since %= period
        while since >= period:
            since = since - period
            period = period * section.t_mult
        return low + fall * _half_cosine(since / period)

    return learning_rate


def _half_cosine(half_waves: float) -> float:
    """Returns 1 for an angle of 0, 0 for ``half_waves`` = 1 (an angle of pi), and never less than 0."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * half_waves)))


def _steps(inputs: _Inputs, steps: int | None, ratio: float | None) -> int | None:
    """Returns the steps of a decay: ``max(1, int(ratio * T))`` if a ratio is set, otherwise ``steps``.

    A ratio of 0 counts as not set, as MindSpore Transformers' documentation says; in its code the schedule would be
    lr_end from step 0 on.
    """
    if ratio:
        return max(1, int(inputs.total_steps * ratio))
    return steps


def _refuse_inside_warm_up(inputs: _Inputs, name: str, event: str, step: int) -> NoReturn:
    warm_up_end = warmup_steps(inputs.section, inputs.total_steps)
    rule = f"the decay would {event} at step {step}, before the warm-up ends at step {warm_up_end}"
    raise inputs.error(name, rule, f"shorten the warm-up or let the decay {event} later")


def _check_end_below_peak(inputs: _Inputs) -> None:
    section = inputs.section
    if section.lr_end >= section.learning_rate:
        rule = f"must be below learning_rate ({section.learning_rate:g}), from which the decay starts"
        raise inputs.error("lr_end", rule, "lower lr_end or raise learning_rate")


_BUILDERS: dict[str, Callable[[_Inputs], Schedule]] = {
    "ConstantWarmUpLR": _constant_warm_up,
    "LinearWithWarmUpLR": _linear_with_warm_up,
    "CosineWithWarmUpLR": _cosine_with_warm_up,
    "CosineWithRestartsAndWarmUpLR": _cosine_with_restarts,
    "PolynomialWithWarmUpLR": _polynomial_with_warm_up,
    "WarmUpStableDecayLR": _warm_up_stable_decay,
    "ConstantWithCoolDownLR": _constant_with_cool_down,
    "CosineAnnealingLR": _cosine_annealing,
    "CosineAnnealingWarmRestarts": _cosine_annealing_warm_restarts,
}
