"""The parameters of a model by layer, for plans of many layouts of one model.

Most layers of a model are equal. Layers with equal parameters share one `ParameterUnit`, so that what holds for one of
them is computed once for all: `ModelFacts.once` remembers it, for as long as these facts are in use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from trainer.config import Config
from trainer.config.recompute import Part, recomputed_parts
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import ModelSpec, ParameterSpec
from trainer.models.spec.names import is_buffer
from trainer.ops.precision import resolve_precision
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import parameter_groups, state_names
from trainer.parallel.mesh import Degrees
from trainer.plan.division import passes_at_once, pipeline_layers

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_Value = TypeVar("_Value")


class UnitParameter(NamedTuple):
    """A parameter of a unit.

    Attributes:
        spec: Its description; of a layer's parameter the name is the one within the layer.
        is_trained: Whether it has a gradient.
        states: Arrays of its size that the optimizer keeps.
    """

    spec: ParameterSpec
    is_trained: bool
    states: int


@dataclass(frozen=True, eq=False)
class ParameterUnit:
    """The parameters of a layer. Layers with equal parameters have one unit, which is equal to itself alone."""

    parameters: tuple[UnitParameter, ...]


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What all layouts of a model share.

    Attributes:
        layers: The units of the layers, those of multi-token prediction modules at the end.
        ends: Parameters outside of layers, each a unit of one, by their names.
        trained: The shapes of the trained parameters; empty if nothing is trained.
        first: See `ModelSpec.first_reached`.
    """

    spec: ModelSpec
    layers: tuple[ParameterUnit, ...]
    ends: Mapping[str, ParameterUnit]
    trained: Mapping[str, tuple[int, ...]]
    first: int
    _results: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: tuple[Any, ...], compute: Callable[[], _Value]) -> _Value:
        """Returns what `compute` returned for this key, and computes it the first time."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    def chunks(self, config: Config, degrees: Degrees) -> list[list[list[int]]]:
        """Returns the result of `pipeline_layers`."""
        key = ("chunks", degrees.pipeline_stage, *_pipeline_key(config))
        return self.once(key, lambda: pipeline_layers(config, degrees))

    def passes_at_once(self, config: Config) -> list[list[tuple[tuple[int, ...], int]]]:
        """Returns the result of `passes_at_once` for the pipeline of the configuration."""
        stages = config.parallel_config.pipeline_stage
        order = config.parallel.pipeline_config
        key = ("in flight", stages, config.decoder.pp_interleave_num, config.parallel_config.micro_batch_num,
               order.pipeline_scheduler, order.slices)  # fmt: skip
        return self.once(key, lambda: passes_at_once(config, stages))

    def recomputed(self, config: Config) -> tuple[Part, ...]:
        """Returns the result of `recomputed_parts`."""
        section = config.recompute_config
        written = (config.recompute, section.recompute, section.select_recompute, section.select_recompute_exclude)
        key = ("recomputed", str(written), config.use_parallel, *_pipeline_key(config))
        return self.once(key, lambda: recomputed_parts(config))


def _pipeline_key(config: Config) -> tuple[Any, ...]:
    """Returns what the layers of model chunks depend on."""
    settings = config.decoder
    return config.parallel_config.pipeline_stage, settings.pp_interleave_num, str(settings.offset)


def is_half(config: Config, facts: ModelFacts) -> bool:
    """Returns whether an Ascend multiplies matrices in half precision."""
    return facts.once(
        ("half",), lambda: resolve_precision(config.decoder, config.amp_level, "Ascend").compute.dtype != "float32"
    )


def model_facts(config: Config, trains: bool) -> ModelFacts:
    """Collects the parameters of a decoder by unit."""
    spec = model_spec(config.decoder)
    trained: dict[str, tuple[int, ...]] = {}
    if trains:
        trained = trained_shapes(config)
    states = state_names(config.optimizer)
    arrays: dict[str, int] = {}
    for group in parameter_groups(trained, config.optimizer):
        arrays |= dict.fromkeys(group.parameters, len(states[group.optimizer]))
    layers: list[list[UnitParameter]] = [[] for _ in spec.layers]
    ends = {}
    for name, parameter in spec.parameters().items():
        one = UnitParameter(parameter, name in trained and not is_buffer(name), arrays.get(name, 0))
        if match := _LAYER.match(name):
            layers[int(match[1])].append(one._replace(spec=parameter._replace(name=match[2])))
        else:
            ends[name] = ParameterUnit((one,))
    units: dict[tuple[UnitParameter, ...], ParameterUnit] = {}
    for parameters in map(tuple, layers):
        units.setdefault(parameters, ParameterUnit(parameters))
    return ModelFacts(spec, tuple(units[tuple(each)] for each in layers), ends, trained, spec.first_reached(trained))
