"""The trackers that a configuration asks for. Their packages are imported when a run starts, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.monitors.metrics import Monitor
from trainer.monitors.services import SERVICES
from trainer.monitors.tensorboard import TensorBoard
from trainer.monitors.tracking import TrackerMonitor

if TYPE_CHECKING:
    from trainer.config import Config


def tracker_monitors(config: Config, notice: Callable[[str], None]) -> list[Monitor]:
    """The monitors of all trackers that a configuration asks for."""
    found: list[Monitor] = []
    if config.tensorboard.tensorboard_dir:
        every = config.tensorboard.log_interval
        found.append(TrackerMonitor("TensorBoard", lambda: TensorBoard(config), notice, every))
    if config.tracker_names:
        for name in config.tracker_names:
            service = SERVICES[name]
            found.append(TrackerMonitor(name, lambda service=service: service(config), notice))
    return found
