"""The process of a dry run: `python -m trainer.dryrun.worker FOLDER`, with the environment of `process.environment`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import parse_config
from trainer.config.checks.parallel import resolve_for_job
from trainer.dryrun.measure import CaseRun, describe_failure
from trainer.dryrun.process import CASES, RESULTS, Measurement
from trainer.parallel.world import World


def end_with_parent() -> None:
    """Ends this process when its parent is gone: a model with many layers compiles for minutes."""
    parent = os.getppid()

    def watch() -> None:
        """Ends the process when its parent is gone."""
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(folder: Path) -> None:
    """Runs the cases in a folder and writes their measurements there."""
    job = json.loads((folder / CASES).read_text())
    world = World(job["rank"], job["ranks"], 0, 1)
    libraries = ctypes.CDLL(os.environ["LD_PRELOAD"])
    with (folder / RESULTS).open("a") as results:

        def write(case: str, **values: Any) -> None:
            print(json.dumps({"case": case, **values}), file=results, flush=True)

        def say(case: str, text: str) -> None:
            write(case, says=text)

        for name, case in job["cases"].items():
            write(name, says="started")
            measurement = measure(name, case, world, libraries, partial(say, name))
            write(name, measurement=asdict(measurement))


def measure(
    name: str, case: Mapping[str, Any], world: World, libraries: ctypes.CDLL, say: Callable[[str], None]
) -> Measurement:
    """Runs a case and measures it; an exception becomes the failure of the measurement."""
    from trainer.dryrun.tasks import prepare_process

    began = time.perf_counter()
    failure = None
    result: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    try:
        config = resolve_for_job(parse_config(name, case["config"]), world)
        prepare_process(config, world)
        run = CaseRun(config, world, case["steps"], case["options"], say, libraries)
        run.start()
        module, _, function = case["task"].partition(":")
        result = getattr(importlib.import_module(module), function)(run) or {}
        measured = run.results()
    except Exception as error:
        traceback.print_exc()
        failure = describe_failure(error)
    seconds = time.perf_counter() - began
    return Measurement(failure=failure, seconds=seconds, found=result, **measured)


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # skips MindSpore's work at the end of a process, which takes a second
