"""MindSpore's semi-automatic mode as a training backend; imports MindSpore in `open` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainer.config.checks.problem import raise_problems
from trainer.semi_auto.rules import (
    data_config,
    missing_files,
    semi_auto_notes,
    semi_auto_problems,
    semi_auto_without_device,
)

if TYPE_CHECKING:
    import numpy as np

    from trainer.config import Config
    from trainer.config.checks.problem import ConfigError
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World
    from trainer.semi_auto.step import GraphStep


class SemiAutoBackend:
    """A `ExecutionMode`: one graph, which MindSpore shards over the ranks."""

    data_ranks = (0, 1)  # every rank reads the batch of all; the graph takes this rank's part

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world

    @cached_property
    def data_config(self) -> Config:
        return data_config(self.config, self.world)

    def execution(self, device: str) -> str:
        return "one graph, sharded by MindSpore"

    def check_device(self, device: str) -> None:
        if device == "CPU":
            raise semi_auto_without_device(self.config)

    def problems(self) -> list[ConfigError]:
        return semi_auto_problems(self.config, self.world)

    def notes(self) -> Iterator[str]:
        return semi_auto_notes(self.config)

    def open(
        self, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None, device: str
    ) -> GraphStep:
        raise_problems(missing_files(self.config))
        from trainer.semi_auto.training import open_semi_auto_training

        return open_semi_auto_training(self.config, schedule, weights, self.world, device)

    def check_layout(self, layout: Mapping[str, Any], communicator: Communicator) -> None:
        from trainer.parallel.communicator import check_same_values

        check_same_values(layout, "data", communicator)
