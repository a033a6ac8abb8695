#!/usr/bin/env python3
"""Measures the overhead of the trainer: its steps against a bare loop, in one process, in alternating windows."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainer.config import Config, Override, load_config  # noqa: E402
from trainer.monitors.metrics import Monitor, StepMetrics  # noqa: E402


class BareLoopMonitor(Monitor):
    """Times the trainer's steps between two calls of this monitor, and the steps of a bare loop.

    Everything between two steps counts for the trainer: data, metrics, other monitors. Nothing of the bare loop does.

    Args:
        bare_step: Runs one step of the bare loop, and returns when its arithmetic is done.
        window_steps: Number of steps of the trainer before the bare loop runs as many.
        warm_up_steps: Number of first steps that are not counted on either side, because they compile.
        clock: Returns seconds.
    """

    def __init__(self, bare_step: Callable[[], None], window_steps: int, warm_up_steps: int = 2,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._bare_step, self._window_steps, self._clock = bare_step, window_steps, clock
        self._warm_up_steps = warm_up_steps
        self._steps = 0
        self._left_at = 0.0
        self.trainer_seconds: list[float] = []
        self.bare_seconds: list[float] = []

    def on_step(self, metrics: StepMetrics) -> None:
        entered_at = self._clock()
        self._steps += 1
        done = self._steps - self._warm_up_steps
        if done > 0:
            self.trainer_seconds.append(entered_at - self._left_at)
            if done % self._window_steps == 0:
                self.bare_seconds += [self._time_bare_step() for _ in range(self._window_steps)]
        else:
            self._bare_step()
        self._left_at = self._clock()

    def _time_bare_step(self) -> float:
        start = self._clock()
        self._bare_step()
        return self._clock() - start


def build_bare_step(config: Config) -> Callable[[], None]:
    """Builds one step of the bare loop, with the decoder and optimizer of the configuration.

    Returns:
        A function that runs forward, backward, clipping and update on one fixed batch and waits for the result.
    """
    import mindspore

    from trainer.arrays.measures import squares
    from trainer.data import build_datasets
    from trainer.run.session import open_training
    from trainer.step.clip import clip_coefficient

    training = open_training(config, lambda update: 1e-3)
    model, optimizer = training.model, training.optimizer
    dataset, _ = build_datasets(config)
    batch = dataset.batch(range(config.runner_config.batch_size))
    inputs, tokens = training.build_inputs(batch), batch.labels.size
    gradients_of = mindspore.value_and_grad(
        lambda: model(inputs).total * (1 / tokens), None, list(optimizer.parameters.values())
    )

    def step() -> None:
        loss, gradients = gradients_of()
        norm = squares(gradients).sum() ** 0.5
        optimizer.update(gradients, 1e-3, clip_coefficient(norm, config.runner_wrapper.max_grad_norm))
        float(loss.asnumpy())

    return step


def run_trainer(config: Config, monitor: Monitor) -> None:
    """Runs the config as `run_trainer.py` does, with one more monitor."""
    from trainer.run.loop import run

    run(config, [monitor])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=22, help="steps of the trainer; the first two do not count")
    parser.add_argument("--window", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(options.config, [
            Override("output_dir", folder, "benchmark"),
            Override("runner_config.stop_step", str(options.steps), "benchmark"),
            Override("report", "False", "benchmark"),
        ])
        monitor = BareLoopMonitor(build_bare_step(config), options.window)
        run_trainer(config, monitor)
    print(json.dumps({"trainer_seconds": monitor.trainer_seconds, "bare_seconds": monitor.bare_seconds}))


if __name__ == "__main__":
    main()
