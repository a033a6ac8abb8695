"""What the plan and the training loop ask of a way to compute a training, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from trainer.config import Config
    from trainer.config.checks.problem import ConfigError
    from trainer.data.batches.loader import Ranks
    from trainer.parallel.world import World


class ExecutionMode(Protocol):
    """Explicit mode (`trainer.run.prepare`) or MindSpore's semi-automatic mode (`trainer.semi_auto.backend`).

    Nothing but `open` imports MindSpore. Adding a mode takes a class with these members and a line in
    `select_execution_mode`.
    """

    config: Config
    world: World
    data_config: Config  # with the batch sizes that one of `data_ranks` reads
    data_ranks: Ranks

    def execution(self, device: str) -> str:
        """How the model is computed, in words."""

    def check_device(self, device: str) -> None:
        """Raises a UserError where the mode does not run on this device; asked before all else."""

    def problems(self) -> list[ConfigError]:
        """What keeps the configuration from running in this mode, beside what `trainer.config` checks."""

    def notes(self) -> Iterator[str]:
        """Keys that have no effect, or another one, in this mode."""

    def open(self, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None, device: str) -> Any:
        """The training step, ready to be called: a `TrainStep` or a `GraphStep`. Imports MindSpore.

        The schedule gives the learning rate of update `n`, from 0; weights None are those of `seed`.

        Raises:
            UserError: The device is not there.
            RunError: The other ranks do not answer, or start with other weights.
        """

    def check_layout(self, layout: Mapping[str, Any], communicator: Any) -> None:
        """Raises a RunError where ranks differ in what must be the same on all of them before the first step."""
