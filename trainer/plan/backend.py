"""The protocol of the ways to compute a training, which the plan and the training loop use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from trainer.config import Config
    from trainer.config.checks.problem import ConfigError
    from trainer.data.batches.loader import DataParallelRank
    from trainer.parallel.world import World


class ExecutionMode(Protocol):
    """Explicit mode (`trainer.run.prepare`) or MindSpore's semi-automatic mode (`trainer.semi_auto.backend`).

    Nothing but `open` imports MindSpore. Adding a mode takes a class with these members and a line in
    `select_execution_mode`.
    """

    config: Config
    world: World
    data_ranks: DataParallelRank

    @property
    def data_config(self) -> Config:
        """Returns the configuration with the batch sizes that one of `data_ranks` reads."""

    def execution(self, device: str) -> str:
        """Returns a phrase that says how the model is computed."""

    def check_device(self, device: str) -> None:
        """Raises a UserError if the mode does not support this device; called before all else."""

    def problems(self) -> list[ConfigError]:
        """Returns the configuration errors of this mode, in addition to those of `trainer.config`."""

    def notes(self) -> Iterator[str]:
        """Yields notes on keys that have no effect, or another effect, in this mode."""

    def open(self, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None, device: str) -> Any:
        """Returns the training step, a `TrainStep` or a `GraphStep`, ready to be called. Imports MindSpore.

        Args:
            schedule: Gives the learning rate of update `n`, from 0.
            weights: Initial weights by name; None initializes them from `seed`.

        Raises:
            UserError: The device is not there.
            RunError: The other ranks do not answer, or start with other weights.
        """

    def check_layout(self, layout: Mapping[str, Any], communicator: Any) -> None:
        """Raises a RunError if ranks differ in what must be the same on all of them before the first step."""
