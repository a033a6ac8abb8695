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
"""Gives the learning rate of optimizer step ``step`` (0-based)."""


class _Inputs(NamedTuple):
    """Input of a builder: the YAML section, the total number of steps, and where a key was set."""

    section: Any
    total_steps: int
    where: Callable[[str], str]


def build_schedule(section: Any, total_steps: int, where: Callable[[str], str] = lambda key: "") -> Schedule:
    """Builds the schedule of an ``lr_schedule`` section. It has no state: a resumed run needs only the step.

    Args:
        section: One of the schema's schedule types.
        total_steps: Optimizer steps of the whole run (epochs x steps of the data set). ``section.total_steps``, when it
            is neither -1 nor None, replaces it: after that many steps the schedule stays at its end value, however long
            the run is.
        where: Says where a dotted key was set (``configs/a.yaml:12``), for error messages.

    Raises:
        UserError: The total is below 1, the type is unknown, or two keys contradict each other.
    """
    if section.type not in _BUILDERS:
        raise UserError(f"is not a known schedule; known are {', '.join(_BUILDERS)}", where=where("lr_schedule.type"),
                        key="lr_schedule.type", value=section.type, fix="use one of these names")
    total = schedule_total_steps(section, total_steps)
    if total < 1:
        key = "lr_schedule.total_steps"
        raise UserError("must be at least 1 (-1: the steps of the data set)", where=where(key), key=key, value=total,
                        fix="leave it at -1 and give the run at least one step")
    return _BUILDERS[section.type](_Inputs(section, total, where))


def schedule_total_steps(section: Any, total_steps: int) -> int:
    """T of the formulas: the section's own ``total_steps``, or the run's where the section says -1 or nothing."""
    own = section.total_steps
    if own is None or own == -1:
        return total_steps
    return own


def warmup_steps(section: Any, total_steps: int) -> int:
    """w of the formulas: ``int(warmup_ratio * T)`` when a ratio is given (even 0), else ``warmup_steps``, else 0.

    MindSpore Transformers' rule: the ratio wins over the number. It may exceed ``total_steps``; such a run ends within
    its warm-up.
    """
    if section.warmup_ratio is not None:
        return int(total_steps * section.warmup_ratio)
    return section.warmup_steps or 0


def first_full_step(section: Any, total_steps: int) -> int:
    """The first step, from 0, that warm-up does not lower; 0 for a schedule without warm-up."""
    if "learning_rate" not in type(section).model_fields:
        return 0
    return warmup_steps(section, schedule_total_steps(section, total_steps))


def _warm_up(inputs: _Inputs, after: Schedule) -> Schedule:
    """warmup_lr_init + (lr - warmup_lr_init) * t / w before step w; ``after(t)`` from step w on."""
    section = inputs.section
    steps = warmup_steps(section, inputs.total_steps)
    start = section.warmup_lr_init
    rise = section.learning_rate - section.warmup_lr_init
    return lambda step: start + rise * step / steps if step < steps else after(step)


def _constant_warm_up(inputs: _Inputs) -> Schedule:
    """ConstantWarmUpLR. After warm-up: lr."""
    peak = inputs.section.learning_rate
    return _warm_up(inputs, lambda step: peak)


def _linear_with_warm_up(inputs: _Inputs) -> Schedule:
    """LinearWithWarmUpLR. After warm-up: lr * max(0, (T - t) / max(1, T - w)); the end is always 0."""
    peak = inputs.section.learning_rate
    total = inputs.total_steps
    steps = max(1, total - warmup_steps(inputs.section, total))
    return _warm_up(inputs, lambda step: peak * max(0.0, (total - step) / steps))


def _cosine_with_warm_up(inputs: _Inputs) -> Schedule:
    """CosineWithWarmUpLR. After warm-up: lr_end + (lr - lr_end) * (1 + cos(2 pi num_cycles (t - w) / (T - w))) / 2.

    ``num_cycles`` counts whole waves over T - w steps: 0.5 falls once from lr to lr_end, 1.5 ends low after one more
    peak. From step ``decay_steps`` on (default T, even when warm-up lasts longer) it is lr_end. As in MindSpore
    Transformers ``decay_steps`` (or ``decay_ratio``, which wins over it; 0 means not given) only cuts the curve, it
    does not squeeze the cosine; beyond T, where MindSpore Transformers' cosine would rise again, ours is lr_end. A cut
    that falls within warm-up is an error (MindSpore Transformers drops to lr_end there).
    """
    section = inputs.section
    return _cosine_until_cut(inputs, _steps(inputs, section.decay_steps, section.decay_ratio),
                             lambda progress: 2.0 * section.num_cycles * progress)


def _cosine_with_restarts(inputs: _Inputs) -> Schedule:
    """CosineWithRestartsAndWarmUpLR. After warm-up: lr_end + (lr - lr_end) * (1 + cos(pi u)) / 2.

    u is the fractional part of num_cycles (t - w) / (T - w): ``num_cycles`` falls from lr to lr_end, with a jump back
    to lr between two of them. ``decay_steps`` and the end are those of CosineWithWarmUpLR (between T and a later
    ``decay_steps`` MindSpore Transformers gives 0, ours lr_end).
    """
    section = inputs.section
    return _cosine_until_cut(inputs, _steps(inputs, section.decay_steps, None),
                             lambda progress: (section.num_cycles * progress) % 1.0)


def _cosine_until_cut(inputs: _Inputs, decay_steps: int | None, half_waves: Callable[[float], float]) -> Schedule:
    """The common part of both; ``half_waves`` turns the progress (t - w) / (T - w) into an angle in units of pi."""
    section = inputs.section
    total = inputs.total_steps
    first = warmup_steps(section, total)
    steps = max(1, total - first)
    if decay_steps is None:
        cut = total
    else:
        cut = min(decay_steps, total)
    if cut < min(first, total):
        by_ratio = decay_steps != section.decay_steps
        _refuse_inside_warm_up(inputs, "decay_ratio" if by_ratio else "decay_steps", "end", cut)
    end = section.lr_end
    fall = section.learning_rate - section.lr_end
    curve = _warm_up(inputs, lambda step: end + fall * _half_cosine(half_waves((step - first) / steps)))
    return lambda step: end if step >= cut else curve(step)


def _polynomial_with_warm_up(inputs: _Inputs) -> Schedule:
    """PolynomialWithWarmUpLR. After warm-up: lr_end + (lr - lr_end) * (1 - (t - w) / decay_steps) ** power.

    ``decay_steps`` is counted from the end of warm-up and defaults to max(1, T - w). After it, where MindSpore
    Transformers' base turns negative (and with power 1 its learning rate too), ours is lr_end; beyond T both are
    lr_end. ``lr_end`` must be below ``learning_rate``.
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
    """WarmUpStableDecayLR (WSD). After warm-up lr, and from step s on lr - (lr - lr_end) * (t - s) / (T - s).

    s is ``int(decay_start_ratio * T)`` when the ratio is given, otherwise ``decay_start_steps``; neither has a
    default, here or in MindSpore Transformers. Beyond T, where MindSpore Transformers' line goes on below zero, ours is
    lr_end. s before the end of warm-up is an error (MindSpore Transformers jumps).
    """
    section = inputs.section
    total = inputs.total_steps
    _check_end_below_peak(inputs)
    start = section.decay_start_steps
    if section.decay_start_ratio is not None:
        start = int(total * section.decay_start_ratio)
    if start is None:
        raise UserError("needs decay_start_steps or decay_start_ratio, the step at which decay starts",
                        where=inputs.where("lr_schedule.type"), key="lr_schedule.type", value=section.type,
                        fix="add decay_start_ratio: 0.8 to decay over the last fifth of the run")
    if start < warmup_steps(section, total):
        by_ratio = section.decay_start_ratio is not None
        _refuse_inside_warm_up(inputs, "decay_start_ratio" if by_ratio else "decay_start_steps", "start", start)
    peak = section.learning_rate
    end = section.lr_end
    steps = max(1, total - start)

    def stable_then_decay(step: int) -> float:
        progress = min(1.0, max(0.0, (step - start) / steps))
        if progress == 1.0:
            return end
        return peak - (peak - end) * progress

    return _warm_up(inputs, stable_then_decay)


def _constant_with_cool_down(inputs: _Inputs) -> Schedule:
    """ConstantWithCoolDownLR: warm-up, constant, cosine, constant, another constant (DeepSeek-V3, arXiv 2412.19437).

    After warm-up: lr for ``keep_steps``; then over d = ``decay_steps`` steps lr_end1 + (lr - lr_end1) * (1 + cos(2 pi
    num_cycles u / d)) / 2 with u the steps since then; then lr_end1 for ``final_steps``; then lr_end2 (None:
    lr_end1). d is ``int(decay_ratio * T)`` when that is given and not 0, otherwise ``decay_steps``, by default T as
    in MindSpore Transformers, so that without it the decay does not end within the run. An ``lr_end2`` of 0 is 0
    (MindSpore Transformers takes it for None).
    """
    section = inputs.section
    given = _steps(inputs, section.decay_steps, section.decay_ratio)
    decay_steps = given
    if given is None:
        decay_steps = inputs.total_steps
    decay_start = warmup_steps(section, inputs.total_steps) + (section.keep_steps or 0)
    decay_end = decay_start + decay_steps
    final_end = decay_end + (section.final_steps or 0)
    peak = section.learning_rate
    end = section.lr_end1
    if section.lr_end2 is None:
        last = end
    else:
        last = section.lr_end2

    def phases(step: int) -> float:
        if step < decay_start:
            return peak
        if step < decay_end:
            return end + (peak - end) * _half_cosine(2.0 * section.num_cycles * (step - decay_start) / decay_steps)
        if step < final_end:
            return end
        return last

    return _warm_up(inputs, phases)


def _cosine_annealing(inputs: _Inputs) -> Schedule:
    """CosineAnnealingLR: eta_min + (base_lr - eta_min) * (1 + cos(pi t / t_max)) / 2 (arXiv 1608.03983).

    It has no warm-up and no end: after ``t_max`` steps it rises again, back to base_lr at 2 t_max. T plays no part.
    """
    section = inputs.section
    fall = section.base_lr - section.eta_min
    return lambda step: section.eta_min + fall * _half_cosine(step / section.t_max)


def _cosine_annealing_warm_restarts(inputs: _Inputs) -> Schedule:
    """CosineAnnealingWarmRestarts: eta_min + (base_lr - eta_min) * (1 + cos(pi u / p)) / 2 (arXiv 1608.03983).

    u counts the steps since the last restart; the period p is ``t_0`` first and ``t_mult`` times the one before after
    each restart. No warm-up, no end, T plays no part. Restarts are found in whole numbers (MindSpore Transformers'
    float32 logarithm may miss one by a step).
    """
    section = inputs.section
    low = section.eta_min or 0.0
    fall = section.base_lr - low

    def learning_rate(step: int) -> float:
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
    """1 at an angle of 0, 0 at ``half_waves`` = 1 (an angle of pi), never below 0."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * half_waves)))


def _steps(inputs: _Inputs, steps: int | None, ratio: float | None) -> int | None:
    """The steps of a decay: ``max(1, int(ratio * T))`` when a ratio is given, otherwise ``steps``.

    A ratio of 0 counts as not given, as MindSpore Transformers' documentation says; its code would give a schedule that
    is lr_end from step 0 on.
    """
    if ratio:
        return max(1, int(inputs.total_steps * ratio))
    return steps


def _refuse_inside_warm_up(inputs: _Inputs, name: str, event: str, step: int) -> NoReturn:
    warm_up_end = warmup_steps(inputs.section, inputs.total_steps)
    key = f"lr_schedule.{name}"
    raise UserError(f"the decay would {event} at step {step}, before the warm-up ends at step {warm_up_end}",
                    where=inputs.where(key), key=key, value=getattr(inputs.section, name),
                    fix=f"shorten the warm-up or let the decay {event} later")


def _check_end_below_peak(inputs: _Inputs) -> None:
    section = inputs.section
    if section.lr_end >= section.learning_rate:
        raise UserError(f"must be below learning_rate ({section.learning_rate:g}), from which the decay starts",
                        where=inputs.where("lr_schedule.lr_end"), key="lr_schedule.lr_end", value=section.lr_end,
                        fix="lower lr_end or raise learning_rate")


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
