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
from pathlib import Path
from typing import Any

from trainer.config import parse_config
from trainer.config.checks.parallel import resolve_for_job
from trainer.dryrun.measure import CaseRun, failure_of
from trainer.dryrun.process import CASES, RESULTS, Measurement
from trainer.parallel.world import World


def end_with_parent() -> None:
    """A model of many layers compiles for minutes: nobody waits for it once the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(folder: Path) -> None:
    job = json.loads((folder / CASES).read_text())
    world = World(job["rank"], job["ranks"], 0, 1)
    libraries = ctypes.CDLL(os.environ["LD_PRELOAD"])
    with (folder / RESULTS).open("a") as results:

        def write(case: str, **values: Any) -> None:
            print(json.dumps({"case": case, **values}), file=results, flush=True)

        for name, case in job["cases"].items():
            write(name, says="started")
            found = measure(name, case, world, libraries, lambda text, name=name: write(name, says=text))
            write(name, measurement=asdict(found))


def measure(
    name: str, case: Mapping[str, Any], world: World, libraries: ctypes.CDLL, say: Callable[[str], None]
) -> Measurement:
    """Runs a case; whatever it raises is its result."""
    from trainer.dryrun.tasks import prepare_process

    began = time.perf_counter()
    failure = None
    found = {}
    results = {}
    try:
        config = resolve_for_job(parse_config(name, case["config"]), world)
        prepare_process(config, world)
        run = CaseRun(config, world, case["steps"], case["options"], say, libraries)
        run.start()
        module, _, function = case["task"].partition(":")
        found = getattr(importlib.import_module(module), function)(run) or {}
        results = run.results()
    except Exception as error:
        traceback.print_exc()
        failure = failure_of(error)
    seconds = time.perf_counter() - began
    return Measurement(failure=failure, seconds=seconds, found=found, **results)


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # what MindSpore does at the end of a process takes a second, and nobody needs it
