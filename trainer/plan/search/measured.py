"""Corrects the rates by step times of runs: `plan --search --measured FILE`.

The file is a list in YAML. Each item has the configuration of a run, such as config.yaml of its folder, the number of
its ranks, and the seconds of a step: ``- {config: output/a/config.yaml, ranks: 4, seconds: 0.21}``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from trainer.config.checks.parallel import fit_problems, resolve_for_job
from trainer.config.device_defaults import apply_device_defaults
from trainer.config.read.loader import load_config
from trainer.errors import UserError, value_text
from trainer.input_files import read_bytes
from trainer.parallel.world import world_of
from trainer.plan.device.model_facts import model_facts
from trainer.plan.memory import memory_estimate
from trainer.plan.search.hardware import Factors, Rates, device_rates
from trainer.plan.search.search import LayoutSearch
from trainer.plan.search.step_time import StepEstimator, StepTime

_FIX = "write a list of {config: FILE, ranks: N, seconds: S}"
_STEPS = (4.0, 2.0, 1.4, 1.1, 1.02)  # by which factors are changed
_TIE = 0.01  # weight of the factors' distance from 1: what no run tells stays as it is
_GROUPS = {"products": 0, "experts": 0, "attention": 0, "memory": 0, "layer_overhead": 1, "node": 2, "network": 2}


class Measurement(NamedTuple):
    """The time of a step of a run."""

    config: str
    ranks: int
    seconds: float


@dataclass(frozen=True)
class Corrections:
    """Corrected rates, and how far the estimates were off.

    Attributes:
        before, after: Mean of the relative errors of the estimates.
        correlation: Spearman's rank correlation of the estimates before, and of the measured times.
        runs: Number of measurements.
    """

    rates: Rates
    factors: Factors
    before: float
    after: float
    correlation: float
    runs: int


def read_measurements(path: Path) -> list[Measurement]:
    """Reads the step times of runs.

    Raises:
        UserError: The file cannot be read, or is no such list.
    """
    where = str(path)
    try:
        items = yaml.safe_load(read_bytes(path))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise UserError(rule, where=where, key="--measured", fix=_FIX) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"is no YAML: {error}", where=where, key="--measured", fix=_FIX) from None
    if not isinstance(items, list) or not items:
        raise UserError("is no list of measurements", where=where, key="--measured", fix=_FIX)
    measurements = []
    for number, item in enumerate(items, start=1):
        is_right = isinstance(item, dict) and set(item) == set(Measurement._fields)
        is_right = is_right and isinstance(item["config"], str) and type(item["ranks"]) is int and item["ranks"] > 0
        if not is_right or type(item["seconds"]) not in (int, float) or not 0 < item["seconds"] < math.inf:
            rule = f"item {number} is no measurement: {value_text(item)}"
            raise UserError(rule, where=where, key="--measured", fix=_FIX)
        measurements.append(Measurement(item["config"], item["ranks"], float(item["seconds"])))
    return measurements


def corrected_rates(search: LayoutSearch, measurements: Sequence[Measurement]) -> Corrections:
    """Finds the factors with which the estimates are nearest to the measured times, and corrects the search's rates.

    Raises:
        UserError: A configuration cannot be read, or is not for so many ranks.
    """
    seconds = [each.seconds for each in measurements]
    estimates = [estimate_run(each, search.device, Factors()) for each in measurements]
    factors = nearest_factors(estimates, seconds)
    corrected = [estimate_run(each, search.device, factors) for each in measurements]
    return Corrections(
        rates=factors.correct(search.rates),
        factors=factors,
        before=_mean_error(estimates, seconds),
        after=_mean_error(corrected, seconds),
        correlation=rank_correlation([each.seconds for each in estimates], seconds),
        runs=len(measurements),
    )


def nearest_factors(estimates: Sequence[StepTime], seconds: Sequence[float]) -> Factors:
    """Returns the factors with which the estimates of some runs are nearest to their times."""
    groups = range(len(Factors._fields))
    parts = [
        [sum(value for name, value in each.classes.items() if _GROUPS[name] == group) for group in groups]
        for each in estimates
    ]
    return Factors(*_nearest_factors(parts, seconds))


def estimate_run(measurement: Measurement, device: str, factors: Factors) -> StepTime:
    """Returns the estimate of the step of a run.

    Raises:
        UserError: Its configuration cannot be read, or is not for so many ranks.
    """
    world = world_of(measurement.ranks)
    config = apply_device_defaults(resolve_for_job(load_config(measurement.config), world), device)
    for each in fit_problems(config, world):
        fix = f"write the ranks of the run of {measurement.config}"
        raise UserError(each.error.rule, where="flag --measured", key="ranks", value=measurement.ranks, fix=fix)
    facts = model_facts(config, trains=True)
    rates = factors.correct(device_rates(config, world, device))
    memory = memory_estimate(config, True, device, world, None, facts)
    return StepEstimator(config, device, facts, rates).estimate(config, world, memory)


def _nearest_factors(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Returns the factors of the columns of `parts` whose sums have the least squared errors of their logarithms."""
    factors = [1.0] * len(parts[0])

    def error(candidate: Sequence[float]) -> float:
        """Returns the sum of squared errors, and a little for factors that are not 1."""
        total = _TIE * sum(math.log(each) ** 2 for each in candidate)
        for row, measured in zip(parts, seconds, strict=True):
            estimate = sum(each * factor for each, factor in zip(row, candidate, strict=True))
            total += math.log(estimate / measured) ** 2
        return total

    best = error(factors)
    for step in _STEPS:
        improves = True
        while improves:
            improves = False
            for index in range(len(factors)):
                for change in (step, 1 / step):
                    candidate = list(factors)
                    candidate[index] *= change
                    if error(candidate) < best:
                        best = error(candidate)
                        factors = candidate
                        improves = True
    return factors


def _mean_error(estimates: Sequence[StepTime], seconds: Sequence[float]) -> float:
    return statistics.fmean(
        abs(each.seconds / measured - 1) for each, measured in zip(estimates, seconds, strict=True)
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation: 1 if both have the same order. Equal values have their mean rank."""
    try:
        return statistics.correlation(_ranks(first), _ranks(second))
    except statistics.StatisticsError:  # a single value, or equal ones
        return 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(each) + (order.count(each) - 1) / 2 for each in values]
