"""A run follows no link out of its output folder: what lies elsewhere stays as it is, or the run does not start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from run_helpers import call, config_of, files_below, train, write_config

from trainer.checkpoint.store import newest_complete, read_checkpoint
from trainer.errors import UserError
from trainer.monitors.files import write_text
from trainer.run.loop import run

pytestmark = pytest.mark.slow

SAVES = {"callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 1, "keep_checkpoint_max": 1}],
         "report": True, "sample_prompt": "the", "do_eval": True}  # fmt: skip


@pytest.fixture(scope="module")
def saved(home: Path) -> Path:
    """Provides the output folder of a training of three steps."""
    return train(write_config(home / "saved", home / "data", SAVES), runner_config__stop_step=3)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_below(folder)}


def put(link: Path, target: Path) -> None:
    """Makes a link in place of what is there."""
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    else:
        link.unlink(missing_ok=True)
    link.symlink_to(target)


def test_links_are_replaced_or_removed_and_never_followed(home: Path, saved: Path, tmp_path: Path) -> None:
    """Each file of a resumed run, each place of a checkpoint and each leftover of a write is a link."""
    elsewhere, output = tmp_path / "elsewhere", tmp_path / "output"
    shutil.copytree(saved, elsewhere)
    shutil.copytree(saved, output)
    (elsewhere / "unmarked").mkdir()
    (elsewhere / "unmarked" / "mine").write_text("of value")
    other, checkpoints = elsewhere / "checkpoints" / "step-00000003", output / "checkpoints"
    (newest,) = checkpoints.iterdir()
    for name in ("step-00000001", "step-00000004", "step-00000005.replaced", ".tmp-step-00000004-abc", ".tmp-best"):
        put(checkpoints / name, other)
    put(checkpoints / "step-00000002", elsewhere / "unmarked")
    names = [name for name in files_below(saved) if "/" not in name and not name.endswith("jsonl")]
    assert {"config.yaml", "plan.txt", "run.json", "report.html", "report.png"} <= set(names)
    for name in names:
        put(output / name, elsewhere / name)
    for name in (*names, "metrics.jsonl", "samples.jsonl"):
        put(output / f"{name}.tmp", elsewhere / name)
    before = contents(elsewhere)
    path = write_config(tmp_path, home / "data", SAVES)
    train(path, output_dir=output, resume_training=newest.name, runner_config__stop_step=6)
    assert contents(elsewhere) == before
    assert newest_complete(checkpoints).name == "step-00000006"
    read_checkpoint(newest_complete(checkpoints))
    assert [each.name for each in sorted(checkpoints.iterdir())] == ["step-00000002", "step-00000006"]
    assert not [name for name in names if (output / name).is_symlink()]


WRITTEN = ("checkpoints", "logs", "logs/rank-0.log", "metrics.jsonl", "profile", "samples.jsonl")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("exists", [True, False], ids=["to what is there", "to nothing"])
def test_a_run_does_not_start_where_it_would_follow_a_link(home: Path, tmp_path: Path, name: str, exists: bool) -> None:
    elsewhere, output = tmp_path / "elsewhere", tmp_path / "output"
    target = elsewhere / Path(name).name
    if exists:
        (target.parent if target.suffix else target).mkdir(parents=True)
        if target.suffix:
            target.write_text("mine\n")
    link = output / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    before = contents(tmp_path)
    path = write_config(tmp_path / "config", home / "data")
    with pytest.raises(UserError, match=f"{name} in it is a link to {target}, and nothing is written outside"):
        run(config_of(path, output_dir=output))
    (tmp_path / "config" / "run.yaml").unlink()
    assert contents(tmp_path) == before and list(output.iterdir()) == [output / Path(name).parts[0]]


def test_links_within_the_folder_and_to_the_folder_are_allowed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "large").mkdir(parents=True)
    (tmp_path / "output").symlink_to("disk")
    (tmp_path / "disk" / "checkpoints").symlink_to("large")
    output = train(write_config(tmp_path, home / "data"), output_dir=tmp_path / "output", runner_config__stop_step=1)
    assert newest_complete(output / "checkpoints").name == "step-00000001"
    assert (tmp_path / "disk" / "large" / "step-00000001").is_dir()


def test_smoke_removes_nothing_through_a_link(home: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, home / "data")
    assert call("smoke", "--config", path, "--output_dir", "first", cwd=tmp_path)[0] == 0
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "smoke").symlink_to(tmp_path / "first" / "smoke")
    before = contents(tmp_path / "first")
    code, _, errors = call("smoke", "--config", path, "--output_dir", "second", cwd=tmp_path)
    assert code == 2 and "smoke in it is a link to" in errors, errors
    assert contents(tmp_path / "first") == before


def test_what_an_interrupted_write_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("of value")
    os.link(tmp_path / "mine", tmp_path / "plan.txt.tmp")
    write_text(tmp_path / "plan.txt", "plan")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine": "of value", "plan.txt": "plan"}
