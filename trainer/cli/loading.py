"""Loads modules without garbage collections, and loads and runs the file that a command names."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trainer.device.stop_signals import receive_signals_in_a_thread
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.cli.flags import Arguments
    from trainer.config import Config
    from trainer.config.checks.problem import ConfigError

ConfigFile = Annotated[str | None, Option("--config", help="The YAML file.", metavar="FILE", show_default=False)]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Options = Annotated[
    str | None,
    Option("--options", help="Any other keys: a.b=c d.e=f.", metavar="KEY=VALUE", show_default=False),
]


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disables Python's cyclic collector, which would inspect many thousands of new objects that are not garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # the first collection would go through all that was loaded
            gc.enable()


def load_file(arguments: Arguments, problems: list[ConfigError] | None = None) -> Config:
    """Reads the configuration; its errors are appended to `problems`, or raised without that list."""
    from trainer.config import load_config

    if arguments.config is None:
        raise UserError("a run needs its YAML file", key="--config", fix="write --config configs/quickstart.yaml")
    with gc_disabled():
        return load_config(arguments.config, arguments.overrides, problems)


def run_config(config: Config) -> int:
    """Runs a configuration; returns the exit code."""
    receive_signals_in_a_thread()  # before numpy and MindSpore start threads
    from trainer.run.loop import run

    return run(config)
