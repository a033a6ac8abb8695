"""A grid becomes runs: keys and values as flags take them, names of folders, mistakes."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
from trainer.sweep.grid import point_folder_name, points
from trainer.sweep.run import SweepRun, _end_text, jobs_for


def test_every_combination_is_a_run():
    found = points(["lr_schedule.learning_rate=1e-4, 3e-4", "--seed=1,2"])
    assert [point.name for point in found] == [
        "learning_rate=1e-4,seed=1", "learning_rate=1e-4,seed=2",
        "learning_rate=3e-4,seed=1", "learning_rate=3e-4,seed=2",
    ]  # fmt: skip
    assert found[1].flags == ("--lr_schedule.learning_rate=1e-4", "--seed=2")


@pytest.mark.parametrize(
    ("listed", "texts"),
    [
        ("[0.9,0.95],[0.9, 0.99]", ["[0.9,0.95]", "[0.9, 0.99]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("{a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
        ("/data/a b,/data/c=d", ["/data/a b", "/data/c=d"]),
        ("True", ["True"]),
    ],
)
def test_values_are_those_of_yaml(listed, texts):
    flags = [point.flags[0] for point in points([f"optimizer.betas={listed}"])]
    assert flags == [f"--optimizer.betas={text}" for text in texts]


def test_names_are_folders_without_quotes_and_stay_different():
    assert point_folder_name("lr=1e-4,seed=2") == "lr=1e-4,seed=2"
    hostile = ["a=/etc", "a=..", "a=../..", "a='", "a=\n", "a=x y", "a=x\ty", "a=$(ls)"]
    hostile += ["a=" + "x" * 300, "a=" + "x" * 301]
    names = [point_folder_name(name) for name in hostile]
    assert len(set(names)) == len(names) and all(len(name) <= 110 for name in names)
    assert not any(set(name) & set("/'\" \n\t$()\\*?") for name in names)
    keys = points(["optimizer.eps=1e-8", "runner_config.epochs=1", "train_dataset.seed=1", "seed=2"])
    assert keys[0].name == "eps=1e-8,epochs=1,train_dataset.seed=1,seed=2"


@pytest.mark.parametrize(
    ("grids", "given", "part"),
    [
        ([], [], "a sweep needs a grid"),
        ([""], [], "is not key=value,value"),
        (["seed"], [], "is not key=value,value"),
        (["=1"], [], "is not key=value,value"),
        (["seed="], [], "has no value"),
        (["seed=1,,2"], [], "cannot be parsed as a list"),
        (["seed=1,"], [], "cannot be parsed as a list"),
        (["seed=1],[2"], [], "cannot be parsed as a list"),
        (["seed=[1"], [], "cannot be parsed as a list"),
        (["seed=" + "[" * 600], [], "cannot be parsed as a list"),
        (["seed=1,1"], [], "is listed twice"),
        (["seed=1", "seed=2"], [], "is given twice"),
        (["learning_rate=1", "lr_schedule.learning_rate=2"], [], "is given twice"),
        (["seed=1,2"], ["seed"], "is given by a flag too"),
        (["sede=1,2"], [], "unknown flag"),
        (["output_dir=a,b"], [], "cannot be different"),
        (["config=a,b"], [], "cannot be different"),
        (["output-dir=a"], [], "cannot be different"),
        ([f"{key}={','.join(map(str, range(40)))}" for key in ("seed", "batch_size")], [], "1,600 combinations"),
    ],
)
def test_mistakes_are_found(grids, given, part):
    with pytest.raises(UserError) as caught:
        points(grids, given)
    assert part in str(caught.value)


def test_jobs_are_within_the_cores_and_one_on_a_device(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert [jobs_for(None, 9, "CPU"), jobs_for(None, 3, "CPU"), jobs_for(8, 9, "CPU")] == [4, 3, 8]
    assert jobs_for(None, 9, "Ascend") == 1
    # There is no memory for two, unless the user knows better.
    assert [jobs_for(jobs, 9, "CPU", 1 << 60) for jobs in (None, 3)] == [1, 3]
    for jobs, device in ((0, "CPU"), (2, "Ascend")):
        with pytest.raises(UserError):
            jobs_for(jobs, 4, device)


def test_a_run_that_is_killed_is_named_so(tmp_path):
    (tmp_path / "sweep.log").write_text("step 3/9 | loss 2.5\n")
    text = _end_text(SweepRun("lr=1", tmp_path, [], code=-9), 3.0)
    assert text == f"failed: ended by SIGKILL (see {tmp_path / 'sweep.log'})"
