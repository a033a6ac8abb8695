#!/usr/bin/env python3
"""Kills ranks with SIGKILL while they save, for each way to divide a model, and looks at what is left on disk.

    python scripts/check_kills.py                          200 kills over all layouts
    python scripts/check_kills.py --kills 12 --only experts "level 3" --seed 7

The ranks of each layout train a tiny model and save after each step; in every second training they save beside it. A
random rank kills itself, or all ranks at once, at the beginning or the end of a random call within a save. Then the
newest checkpoints must be complete, with the same files as those of a training that nobody disturbs, and none that
was complete before may be missing. The next ranks resume from what is left, and are killed in a later save. When a
training has reached its end, its losses, norms, learning rates and its last checkpoint must be the undisturbed ones,
bit for bit. Exit code 1: something else was found. 200 kills take about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "integration", "parallel"))]

from layout_cases import LAYOUTS, MODELS, ROWS, Layout  # noqa: E402
from rank_job import RankEnd, run_ranks  # noqa: E402
from run_helpers import assert_same_run, step_records, write_config, write_corpus  # noqa: E402

from trainer.checkpoint.store import complete_checkpoints, read_marker, resolve_best_link  # noqa: E402
from trainer.checkpoint.verify import verify  # noqa: E402

STEPS, KEPT = 6, 2
CASES = {
    "one rank": Layout(1, {}),
    "level 1": Layout(2, {"data_parallel": 2}, "level1", micro_batches=2),
    **LAYOUTS,
}  # fmt: skip


class Undisturbed(NamedTuple):
    """A training that nobody disturbs.

    Attributes:
        calls: How many beginnings and ends of calls its saves have, on each rank.
        checksums: Of the files of each step's checkpoint, by their names.
    """

    output: Path
    calls: list[int]
    checksums: dict[int, dict[str, str]]


def write(folder: Path, data: Path, layout: Layout, in_background: bool, kept: int) -> Path:
    """Writes the configuration of a training."""
    sharing = {"parallel_optimizer_threshold": 0, "optimizer_level": layout.level or "level1"}
    model = MODELS["DeepSeek" if "expert_parallel" in layout.degrees else "dense"]
    saves = {"type": "CheckpointMonitor", "save_checkpoint_steps": 1, "keep_checkpoint_max": kept,
             "async_save": in_background, "keep_best": 1}  # fmt: skip
    changes: dict[str, Any] = {f"model.model_config.{key}": value for key, value in model.items()} | {
        "use_parallel": layout.ranks > 1, "parallel_config": layout.degrees, "callbacks": [saves],
        "parallel": {"enable_parallel_optimizer": bool(layout.level), "parallel_optimizer_config": sharing},
        "runner_config.batch_size": ROWS // layout.data // layout.micro_batches,
        "runner_config.gradient_accumulation_steps": layout.micro_batches, "runner_config.stop_step": STEPS,
        "do_eval": True, "eval_step_interval": 2,
    }  # fmt: skip
    return write_config(folder, data, changes)


def train(config: Path, layout: Layout, killer: int = 0, at: int = 0, killed: Sequence[int] = ()) -> list[RankEnd]:
    """Trains up to the last step, or until ranks are killed; resumes what is there. See `kill_cases.trained`."""
    resumes = bool(complete_checkpoints(config.parent / "output" / "checkpoints"))
    return run_ranks(layout.ranks, "kill_cases:trained", str(config), resumes, killer, at, list(killed))


def check(holds: bool, text: str) -> None:
    """Raises an AssertionError, also where Python runs without assertions."""
    if not holds:
        raise AssertionError(text)


def train_undisturbed(folder: Path, data: Path, layout: Layout, in_background: bool) -> Undisturbed:
    """Trains without a kill, and keeps all checkpoints."""
    ends = train(write(folder, data, layout, in_background, kept=STEPS), layout)
    check(all(end.code == 0 for end in ends), "\n".join(end.log for end in ends))
    output = folder / "output"
    checksums = {}
    for path in complete_checkpoints(output / "checkpoints"):
        marker = read_marker(path)
        assert marker is not None and marker.checksums is not None
        checksums[marker.step] = dict(marker.checksums)
    check(sorted(checksums) == list(range(1, STEPS + 1)), f"checkpoints of the steps {sorted(checksums)}")
    return Undisturbed(output, [end.result for end in ends], checksums)


def check_left(output: Path, before: Sequence[int], right: Undisturbed, lag: int) -> list[int]:
    """Checks what a killed training has left; returns the steps of its complete checkpoints.

    Args:
        before: The complete checkpoints before it.
        lag: How many of the last steps may have no checkpoint yet.
    """
    folder = output / "checkpoints"
    steps = []
    for path in complete_checkpoints(folder):
        (found,) = verify(path)
        check(not found.problem, f"{path.name}: {found.problem}")
        marker = read_marker(path)
        assert marker is not None
        check(marker.checksums == right.checksums[marker.step], f"{path.name} has other files")
        steps.append(marker.step)
    done = max((record["step"] for record in step_records(output)), default=0)
    newest = max(steps, default=0)
    check(newest >= max(before, default=0), f"steps {steps} are complete, and {list(before)} were")
    check(newest >= done - lag, f"step {done} was done, and the newest checkpoint is of step {newest}")
    check(len(steps) >= min(KEPT, newest), f"only steps {steps} are complete")
    best = resolve_best_link(folder / "best")
    check(best == folder / "best" or read_marker(best) is not None, f"best points to {best.name}")
    return steps


def check_layout(name: str, kills: int, folder: Path, data: Path, seed: int, in_background: bool) -> int:
    """Kills so many trainings of a layout within their saves, and returns how many of them were resumed to the end.

    Raises:
        AssertionError: A checkpoint was lost or differs, or a resumed training does.
    """
    layout = CASES[name]
    draw = random.Random(f"{seed} {name} {in_background}")
    right = train_undisturbed(folder / "right", data, layout, in_background)
    config = write(folder / "killed", data, layout, in_background, KEPT)
    output = config.parent / "output"
    done = finished = 0
    left: list[int] = []
    while done < kills or left:
        at, killer = 0, draw.randrange(layout.ranks)
        killed = draw.choice([[killer], list(range(layout.ranks))])
        if done < kills:
            calls = right.calls[killer] * (STEPS - max(left, default=0)) // STEPS
            at = draw.randint(1, max(1, calls))
        ends = train(config, layout, killer, at, killed)
        late = [rank for rank, end in enumerate(ends) if end.code == -signal.SIGKILL and rank not in killed]
        check(not late, f"ranks {late} went on after the kill of {killed} until they were ended")
        if ends[killer].code == -signal.SIGKILL:
            done += 1
            left = check_left(output, left, right, lag=1 + in_background)
            continue
        check(all(end.code == 0 for end in ends), "\n".join(end.log[-3000:] for end in ends))
        assert_same_run(output, right.output)
        finished += 1
        left = []
        shutil.rmtree(output)
    return finished


def shares(kills: int, names: Sequence[str]) -> Mapping[str, int]:
    """Returns how many kills each layout gets."""
    return {name: kills // len(names) + (number < kills % len(names)) for number, name in enumerate(names)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of all layouts together")
    names = list(CASES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LAYOUT", help=", ".join(names))
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        data = write_corpus(Path(temporary) / "data")
        for number, (name, kills) in enumerate(shares(wanted.kills, wanted.only).items()):
            began = time.monotonic()
            # Both ways to save, of which an odd number of kills tries the one more.
            both = [(kills + 1) // 2, kills // 2]
            finished, problem = 0, ""
            for in_background, count in zip((number % 2 == 0, number % 2 == 1), both, strict=True):
                folder = Path(temporary) / f"{number}-{in_background}"
                try:
                    if count:
                        finished += check_layout(name, count, folder, data, wanted.seed, in_background)
                except AssertionError as error:
                    problem += f"\n  {'beside the training' if in_background else 'saves wait'}: {error}"
            failed += bool(problem)
            counts = f"{CASES[name].ranks} ranks  {kills:4} kills, {finished:3} trainings resumed to their end"
            print(f"{name:26} {counts}  {time.monotonic() - began:6.1f} s{problem}", flush=True)
    print(f"{wanted.kills} kills in {len(wanted.only)} layouts, {failed} layouts with a problem")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
