"""MindSpore's semi-automatic mode as an execution mode; only `open` imports MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainer.config.checks.problem import raise_problems
from trainer.config.checks.unsupported import offload_problems
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
    """An `ExecutionMode`: one graph, which MindSpore shards over the ranks."""

    data_ranks = (0, 1)  # every rank reads the global batch; the graph takes this rank's sequences

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world

    @cached_property
    def data_config(self) -> Config:
        """Returns the configuration for the data: every rank reads the global batch."""
        return data_config(self.config, self.world)

    def execution(self, device: str) -> str:
        """Returns how the layers run, for the plan."""
        return "one graph, sharded by MindSpore"

    def check_device(self, device: str) -> None:
        """Raises a UserError on a CPU, for which MindSpore does not compile this mode, and for offloading."""
        if device == "CPU":
            raise semi_auto_without_device(self.config)
        for problem in offload_problems(self.config):
            raise problem.error

    def problems(self) -> list[ConfigError]:
        """Returns the keys that this mode does not support."""
        return semi_auto_problems(self.config, self.world)

    def notes(self) -> Iterator[str]:
        """Returns the notes about keys that have another effect in this mode, or none."""
        return semi_auto_notes(self.config)

    def open(
        self, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None, device: str
    ) -> GraphStep:
        """Opens a training; see `open_semi_auto_training` for arguments and errors."""
        raise_problems(missing_files(self.config))
        from trainer.semi_auto.training import open_semi_auto_training

        return open_semi_auto_training(self.config, schedule, weights, self.world, device)

    def check_layout(self, layout: Mapping[str, Any], communicator: Communicator) -> None:
        """Raises a RunError if ranks have different data."""
        from trainer.parallel.communicator import check_same_values

        check_same_values(layout, "data", communicator)
