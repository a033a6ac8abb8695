"""Runs with a profile: the window, MindSpore's files and ours, and that the numbers of the run stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import config_of, figures, train_and_read, write_config

from trainer.config.schema.callbacks import ProfileMonitor
from trainer.errors import UserError
from trainer.parallel.world import world_of
from trainer.profiling.window import is_profiled


@pytest.fixture(scope="module")
def profiled(home: Path) -> tuple[Path, str]:
    """Returns a run of four steps of which the second and third are profiled, and what it printed."""
    path = write_config(home, home / "data", {"profile": True, "profile_start_step": 2, "profile_stop_step": 3})
    return train_and_read(path, runner_config__stop_step=4, profiler_level=1)


def test_a_run_says_where_its_profile_is_and_what_it_cannot_hold(profiled: tuple[Path, str]) -> None:
    output, printed = profiled
    assert f"note: the profile of steps 2 to 3 is in {output}/profile/rank_0\n" in printed
    assert "note: profile: profiler_level: no effect with MindSpore's profiler on a CPU\n" in printed
    assert "does not record native CPU layers; see kernels.txt and kernels.json" in printed
    assert printed.index("the profile of steps") < printed.index("checkpoint of step 4")


def test_the_parts_of_the_steps_are_a_table_and_a_trace(profiled: tuple[Path, str]) -> None:
    folder = profiled[0] / "profile" / "rank_0"
    table = (folder / "kernels.txt").read_text(encoding="utf-8")
    assert "A step, mean of steps 2 to 3" in table and "GFLOP/s" in table
    for part in ("q, k, v products", "attention: fused", "optimizer", "not explained"):
        assert part in table
    events = json.loads((folder / "kernels.json").read_text())
    steps = {event["name"]: event for event in events if event["name"].startswith("step ")}
    assert list(steps) == ["step 2", "step 3"]
    parts = [event for event in events if event["ph"] == "X" and event not in steps.values()]
    spans = [(step["ts"], step["ts"] + step["dur"]) for step in steps.values()]
    assert spans[0][1] <= spans[1][0]
    for event in parts:
        assert any(a - 1 <= event["ts"] and event["ts"] + event["dur"] <= b + 1 for a, b in spans), event
    assert {event["cat"] for event in parts} == {"forward", "backward", "step"}
    threads = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in parts} <= threads


def test_mindspores_files_say_how_the_job_is_divided(profiled: tuple[Path, str]) -> None:
    (path,) = (profiled[0] / "profile" / "rank_0").glob("*_ascend_ms/profiler_metadata.json")
    said = json.loads(path.read_text())["distributed_args"]
    assert said["data_parallel_size"] == said["tensor_model_parallel_size"] == said["world_size"] == 1


def test_a_profiled_run_has_the_numbers_of_another(profiled: tuple[Path, str], home: Path) -> None:
    path = write_config(home / "plain", home / "data")
    output, printed = train_and_read(path, runner_config__stop_step=4)
    assert figures(output) == figures(profiled[0])
    assert not (output / "profile").exists() and "note: profile" not in printed


def test_the_callback_profiles_operators_too_and_to_the_end_of_the_run(home: Path) -> None:
    monitor = {"type": "ProfileMonitor", "start_step": 1, "stop_step": 10, "output_path": str(home / "elsewhere")}
    path = write_config(home / "operators", home / "data", {"callbacks": [monitor]})
    _, printed = train_and_read(path, runner_config__stop_step=2, context__mode=1)
    folder = home / "elsewhere" / "profile" / "rank_0"
    assert f"the profile of steps 1 to 2 is in {folder}\n" in printed
    assert not (folder / "kernels.txt").exists(), "MindSpore's profiler sees them"
    (trace,) = folder.glob("*_ascend_ms/ASCEND_PROFILER_OUTPUT/trace_view.json")
    assert {"MatMulExt", "Add"} & {event["name"] for event in json.loads(trace.read_text())}


def test_a_window_that_the_run_does_not_reach_is_a_note(home: Path) -> None:
    path = write_config(home / "short", home / "data", {"profile": True, "profile_start_step": 5})
    output, printed = train_and_read(path, runner_config__stop_step=1)
    assert "note: profile: no step is profiled; this run does steps 1 to 1, the profile covers steps " in printed
    assert not (output / "profile").exists()


def test_a_window_that_ends_before_it_begins_is_a_mistake(home: Path) -> None:
    path = write_config(home / "wrong", home / "data")
    with pytest.raises(UserError, match=r"profile_stop_step = 2: must not be less than profile_start_step \(3\)"):
        config_of(path, profile=True, profile_start_step=3, profile_stop_step=2)
    monitor = "[{type: ProfileMonitor, start_step: 20}]"
    with pytest.raises(UserError, match=r"callbacks\.0\.stop_step = 10: must not be less than .*start_step \(20\)"):
        config_of(path, callbacks=monitor)


def test_which_ranks_are_profiled(home: Path) -> None:
    path = write_config(home / "ranks", home / "data")
    config = config_of(path, use_parallel=True, parallel_config="{data_parallel: 2, pipeline_stage: 2}")

    def chosen(**keys: object) -> list[int]:
        section = ProfileMonitor(type="ProfileMonitor", **keys)
        return [rank for rank in range(4) if is_profiled(section, config, world_of(4)._replace(rank=rank))]

    assert chosen() == [0, 1, 2, 3]
    assert chosen(profile_rank_ids=[1]) == [1]
    assert chosen(profile_pipeline=True) == [0, 2]
    assert chosen(profile_rank_ids=[1], profile_pipeline=True) == [0, 1, 2]
