"""A resumed run equals one that never stopped, bit for bit; a checkpoint that does not fit is an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from run_helpers import (
    arrays_of,
    assert_same_bits,
    assert_same_run,
    call,
    column,
    config_of,
    eval_records,
    figures,
    files_below,
    mark_again,
    refusal,
    step_records,
    train,
    write_config,
)
from safetensors.numpy import load_file, save_file

from trainer.cli.main import dispatch
from trainer.errors import UserError
from trainer.monitors.files import lock_folder
from trainer.run.prepare import prepare_run
from trainer.storage.marker import marker_content

pytestmark = pytest.mark.slow

HALF = 8  # N: in the middle of the second epoch
WINDOW = 4

# All that has a state or a stream of random numbers: shuffling, dropout in both places, accumulation with a last,
# partial window in each epoch, clipping, a loss scale that grows, a schedule, evaluation.
CHANGES = {
    "model.model_config.hidden_dropout": 0.1,
    "model.model_config.attention_dropout": 0.1,
    "runner_config": {"batch_size": 4, "epochs": 3, "gradient_accumulation_steps": WINDOW, "stop_step": 2 * HALF},
    "runner_wrapper": {
        "use_clip_grad": True,
        "max_grad_norm": 0.7,
        "scale_sense": {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 256, "scale_window": 3},
    },
    "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": 0.01, "warmup_steps": 3},
    "do_eval": True,
    "eval_step_interval": 5,
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": HALF, "keep_checkpoint_max": 3}],
}


BESIDE = {"callbacks__0__async_save": True, "callbacks__0__save_checkpoint_steps": 3}


@pytest.fixture(scope="module")
def resumed(home: Path, path: Path, whole: Path) -> Path:
    """Trains N steps, stops, and trains N more, with asynchronous saving."""
    output = train(path, output_dir=home / "halves", runner_config__stop_step=HALF, **BESIDE)
    assert column(step_records(output), "step") == list(range(1, HALF + 1))
    assert_same_bits(arrays_of(output), arrays_of(whole, HALF))
    return train(path, output_dir=home / "halves", resume_training=True, **BESIDE)


def test_the_stop_is_where_it_is_hardest(whole: Path) -> None:
    records = step_records(whole)
    steps_per_epoch = column(records, "epoch").count(1)
    assert steps_per_epoch < HALF < 2 * steps_per_epoch - 1  # in the middle of the second epoch
    fullest = max(column(records, "tokens"))
    assert records[steps_per_epoch - 1]["tokens"] < fullest * 0.8  # each epoch ends in a partial window


def test_stopped_and_resumed_equals_never_stopped(whole: Path, resumed: Path) -> None:
    """Compares every number, weight and moment with those of an uninterrupted run."""
    assert_same_run(resumed, whole)
    last = column(eval_records(whole), "eval_loss")[-1]
    assert column(eval_records(resumed), "eval_loss")[-1] == last


def test_the_loss_scale_goes_on_where_it_was(resumed: Path) -> None:
    """It doubles after every third step; a window that began anew after the stop would double it later."""
    scales = [256 * 2 ** (step // 3) for step in range(2 * HALF)]
    assert column(step_records(resumed), "loss_scale") == scales


def test_metrics_tell_how_long_a_save_held_the_training(whole: Path, resumed: Path) -> None:
    for output, saved_at in ((whole, [HALF]), (resumed, [3, 6, 9, 12, 15])):
        waited = {record["step"] - 1: record.get("save_wait_seconds") for record in step_records(output)}
        assert [step for step, seconds in waited.items() if seconds] == saved_at
        *_, end = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        assert end == {"step": 2 * HALF, "save_wait_seconds": end["save_wait_seconds"]}
        assert end["save_wait_seconds"] > 0  # no step comes after the last one
    assert sorted(path.name for path in (resumed / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (12, 15, 16)
    ]  # keep_checkpoint_max


def test_metrics_hold_every_step_once(resumed: Path) -> None:
    assert column(step_records(resumed), "step") == list(range(1, 2 * HALF + 1))
    assert column(eval_records(resumed), "step") == [5, HALF, 10, 15, 2 * HALF]  # the first half ended with one
    assert not any("metrics-" in name for name in files_below(resumed))


def test_a_checkpoint_by_name_and_steps_that_were_made_before(path: Path, whole: Path, home: Path) -> None:
    output = shutil.copytree(whole, home / "by_name")  # has reached 2N; goes back to N and makes the rest again
    train(path, output_dir=output, resume_training=f"step-{HALF:08d}")
    assert figures(output) == figures(whole)
    assert column(eval_records(output), "step") == column(eval_records(whole), "step")
    assert_same_bits(arrays_of(output), arrays_of(whole))


def test_resuming_into_another_folder(path: Path, whole: Path, home: Path) -> None:
    checkpoint = whole / "checkpoints" / f"step-{HALF:08d}"
    steps = {"runner_config__stop_step": HALF + 2}
    output = train(path, output_dir=home / "other", resume_training=True, load_checkpoint=checkpoint, **steps)
    assert figures(output) == figures(whole)[HALF : HALF + 2]


def test_nothing_is_left_to_do(path: Path, whole: Path, capsys: pytest.CaptureFixture) -> None:
    before = {name: (whole / name).read_bytes() for name in files_below(whole) if not name.startswith("logs/")}
    renamed = whole / "checkpoints" / "mine"
    shutil.copytree(whole / "checkpoints" / f"step-{2 * HALF:08d}", renamed)
    marker = json.loads((renamed / "COMPLETE").read_text())
    del marker["checksum"]
    (renamed / "COMPLETE").write_bytes(marker_content(marker | {"save_number": 99}))
    train(path, output_dir=whole, resume_training=True)
    shutil.rmtree(renamed)
    shown = capsys.readouterr().out
    assert f"nothing to do: the checkpoint is at step {2 * HALF}" in shown
    assert f"{renamed} was saved after step-{2 * HALF:08d} and is ignored" in shown
    for name, content in before.items():
        if name not in ("config.yaml", "plan.txt"):  # these say what was asked for last
            assert (whole / name).read_bytes() == content, name


def test_ignoring_the_data_starts_it_from_the_beginning(path: Path, whole: Path, home: Path) -> None:
    output = shutil.copytree(whole, home / "ignoring")
    flags = {"resume_training": f"step-{HALF:08d}", "runner_config__stop_step": HALF + 2, "do_eval": False}
    train(path, output_dir=output, ignore_data_skip=True, train_dataset__data_loader__shuffle=False, **flags)
    records = step_records(output)[HALF:]
    assert column(records, "step") == [HALF + 1, HALF + 2]
    assert column(records, "epoch") == [1, 1]
    assert column(records, "lr") == column(step_records(whole), "lr")[HALF : HALF + 2]  # the schedule goes on
    assert records[0]["loss"] < step_records(whole)[0]["loss"] - 0.3  # and so do the weights


def plan_of(path: Path, capsys: pytest.CaptureFixture, **flags: object) -> dict:
    """Returns the output of `plan --json`."""
    pairs = [text for name, value in flags.items() for text in (f"--{name.replace('__', '.')}", str(value))]
    assert dispatch(["plan", "--json", "--config", str(path), *pairs]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_says_where_a_run_would_go_on(path: Path, whole: Path, capsys: pytest.CaptureFixture) -> None:
    plan = plan_of(path, capsys, output_dir=whole, resume_training=f"step-{HALF:08d}")
    steps_per_epoch = column(step_records(whole), "epoch").count(1)
    epoch, batch = 1 + HALF // steps_per_epoch, 1 + WINDOW * (HALF % steps_per_epoch)
    checkpoint = str(whole / "checkpoints" / f"step-{HALF:08d}")
    assert plan["resumes"] == {"checkpoint": checkpoint, "step": HALF, "epoch": epoch - 1, "batch": batch - 1}
    assert plan["notes"] == plan_of(path, capsys)["notes"], "no setting differs"
    assert plan_of(path, capsys, output_dir=whole)["resumes"] is None
    place = f"step {HALF} is done, continues with step {HALF + 1} (epoch {epoch}, micro-batch {batch})"
    for resume, words in ((f"step-{HALF:08d}", f"{checkpoint}: {place}"), ("True", "is done, no step is left")):
        command = ["plan", "--config", str(path), "--output_dir", str(whole), "--resume_training", resume]
        assert dispatch(command) == 0
        assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"resume_training": "step-00000099"}, "no such checkpoint"),
        ({"optimizer__type": "SGD"}, "made with AdamW"),
        ({"runner_config__batch_size": 2}, "batch_size was 4 and is 2"),
        ({"train_dataset__data_loader__num_samples": 40}, "and is 40"),
        ({"model__model_config__num_layers": 3}, "lacks model.layers.2."),
        ({"output_dir": "/nowhere"}, "there is nothing to resume"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_the_plan_refuses_what_a_run_would(
    path: Path, whole: Path, capsys: pytest.CaptureFixture, flags: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(path, capsys, **{"output_dir": whole, "resume_training": True, **flags})


def test_settings_that_changed_since_the_checkpoint_are_told(
    path: Path, whole: Path, home: Path, capsys: pytest.CaptureFixture
) -> None:
    output = shutil.copytree(whole, home / "changed")
    flags = {
        "output_dir": output, "resume_training": f"step-{HALF:08d}", "do_eval": False,
        "lr_schedule__learning_rate": 0.02, "amp_level": "O2", "runner_wrapper__max_grad_norm": 0.5,
        "runner_wrapper__scale_sense": 128, "model__model_config__top_k": 3,
    }  # fmt: skip
    expected = (
        f"differs from the run that made step-{HALF:08d}: lr_schedule.learning_rate 0.01 -> 0.02,"
        " runner_wrapper.max_grad_norm 0.7 -> 0.5, runner_wrapper.scale_sense.type DynamicLossScaleUpdateCell -> not"
        " set, amp_level not set -> O2, runner_wrapper.scale_sense not set -> 128"
    )
    assert expected in plan_of(path, capsys, **flags)["notes"]
    train(path, **flags, runner_config__stop_step=HALF + 1, context__mode=1)
    assert expected in capsys.readouterr().out
    assert "resumes" in (output / "plan.txt").read_text()
    flags["resume_training"] = True  # its checkpoint remembers what it was made with
    assert not any("differs" in note for note in plan_of(path, capsys, **flags)["notes"])


def test_a_checkpoint_that_remembers_no_settings_can_be_resumed(
    path: Path, whole: Path, home: Path, capsys: pytest.CaptureFixture
) -> None:
    output = shutil.copytree(whole, home / "older")
    checkpoint = output / "checkpoints" / f"step-{HALF:08d}"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["settings"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    mark_again(checkpoint, with_checksums=False)
    flags = {"output_dir": output, "resume_training": checkpoint.name, "lr_schedule__learning_rate": 0.02}
    plan = plan_of(path, capsys, **flags)
    assert plan["resumes"]["step"] == HALF
    assert not any("differs" in note for note in plan["notes"])
    assert any("was saved without checksums: only the lengths" in note for note in plan["notes"])


def refuses(path: Path, output: Path, *parts: str, **flags: object) -> None:
    """Checks that a run which is resumed is refused with a message of these parts; nothing in the folder changes."""
    before = {name: (output / name).read_bytes() for name in files_below(output)}
    resume = {"output_dir": output, "resume_training": True, **flags}
    refusal(lambda: train(path, **resume), "flag --resume_training", *parts)
    assert {name: (output / name).read_bytes() for name in files_below(output)} == before


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"seed": 9}, ["seed was 1 and is 9", "--ignore_data_skip"]),
        ({"runner_config.batch_size": 2}, ["batch_size was 4 and is 2"]),
        ({"runner_config.gradient_accumulation_steps": 2}, ["gradient_accumulation_steps was 4 and is 2"]),
        ({"train_dataset.data_loader.shuffle": False}, ["shuffle was true and is false"]),
        ({"train_dataset.data_loader.num_samples": 40}, ["rows was", "and is 40"]),
        ({"train_dataset.held_out": 0.3}, ["held_out was 0.2 and is 0.3"]),
        ({"model.model_config.seq_length": 8}, ["seq_length was 16 and is 8"]),
        ({"model.model_config.intermediate_size": 48}, ["mlp.gate_proj.weight", "[32, 16]", "[48, 16]"]),
        ({"model.model_config.num_layers": 3}, ["lacks model.layers.2."]),
        ({"model.model_config.num_layers": 1}, ["model.layers.1.", "this model does not have"]),
        ({"optimizer.type": "SGD"}, ["made with AdamW", "optimizer.type is SGD", "--load_checkpoint"]),
        ({"resume_training": "step-00000099"}, ["step-00000099", "no such checkpoint", "that is there (step-"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(path: Path, whole: Path, flags: dict, parts: list[str]) -> None:
    refuses(path, whole, *parts, **{name.replace(".", "__"): value for name, value in flags.items()})


def test_other_text_of_the_same_size_is_refused(path: Path, whole: Path, home: Path) -> None:
    other = home / "other_data"
    shutil.copytree(home / "data", other)
    text = (other / "3.txt").read_text()
    (other / "3.txt").write_text(text.replace("cat", "cow").replace("dogs", "cats"))
    refuses(path, whole, "content was", train_dataset__data_loader__dataset_dir=other)
    shutil.copy(home / "data" / "3.txt", other / "3.txt")  # the same text elsewhere is the same data
    train(path, output_dir=whole, resume_training=True, train_dataset__data_loader__dataset_dir=other)


def test_an_incomplete_checkpoint_is_passed_over_and_refused_by_name(path: Path, whole: Path, home: Path) -> None:
    output = shutil.copytree(whole, home / "incomplete")
    newest = output / "checkpoints" / f"step-{2 * HALF:08d}"
    (newest / "COMPLETE").unlink()
    refuses(path, output, "incomplete", f"step-{HALF:08d}", resume_training=newest.name)  # the fix names the one to use
    train(path, output_dir=output, resume_training=True)  # from N
    assert_same_run(output, whole)


def test_a_damaged_checkpoint_is_refused(path: Path, whole: Path, home: Path) -> None:
    output = shutil.copytree(whole, home / "damaged")
    state = output / "checkpoints" / f"step-{2 * HALF:08d}" / "optimizer.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    refuses(path, output, "damaged: optimizer.safetensors has", f"step-{HALF:08d}")


Arrays = dict[str, np.ndarray]
NORM, GATE = "model.norm.weight", "exp_avg.model.layers.0.mlp.gate_proj.weight"
SQUARES = f"exp_avg_sq.{NORM}"


def change_arrays(file: Path, change: Callable[[Arrays], Arrays]) -> None:
    arrays = load_file(file)
    changed = change(arrays)
    save_file(arrays | changed, file)


def with_nan(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed[3] = np.nan
    return changed


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("model", lambda arrays: {NORM: with_nan(arrays[NORM])}, "not finite: model.norm.weight has NaN or infinity"),
        ("optimizer", lambda arrays: {GATE: arrays[GATE].T.copy()}, f"{GATE} of shape [16, 32], not [32, 16]"),
        ("optimizer", lambda arrays: {SQUARES: arrays[SQUARES].astype(np.float16)}, f"{SQUARES} in F16, not F32"),
        ("optimizer", lambda arrays: {f"third.{NORM}": arrays.pop(SQUARES)}, f"lacks {SQUARES}"),
        ("state", {"position": {"step": 17, "data_from_step": 1}}, "says step 17 (position.step), its marker 16"),
        ("state", {"position": {"batch": 10**6}}, "position.batch is 1000000, and an epoch has"),
        ("state", {"optimizer": {"updates": 17}}, "optimizer.updates is 17, and position.step 16"),
        ("state", {"step": {"loss_scale": 3}}, "step.loss_scale: input should be"),
    ],
)
def test_a_checkpoint_with_right_checksums_that_makes_no_sense(
    path: Path, whole: Path, tmp_path: Path, name: str, change, part: str
) -> None:
    output = shutil.copytree(whole, tmp_path / "output")
    checkpoint = output / "checkpoints" / f"step-{2 * HALF:08d}"
    if name == "state":
        state = json.loads((checkpoint / "state.json").read_text())
        for key, values in change.items():
            state[key] |= values
        (checkpoint / "state.json").write_text(json.dumps(state))
    else:
        change_arrays(checkpoint / f"{name}.safetensors", change)
    mark_again(checkpoint)
    refuses(path, output, part, f"step-{HALF:08d}")


def test_nan_in_the_optimizer_state_is_found_when_it_is_read(path: Path, whole: Path, home: Path) -> None:
    output = shutil.copytree(whole, home / "nan_state")
    checkpoint = output / "checkpoints" / f"step-{2 * HALF:08d}"
    change_arrays(checkpoint / "optimizer.safetensors", lambda arrays: {SQUARES: with_nan(arrays[SQUARES])})
    mark_again(checkpoint)
    config = config_of(path, output_dir=output, resume_training=True)
    found = prepare_run(config).resumed.optimizer
    with pytest.raises(UserError, match="not finite: exp_avg_sq.model.norm.weight") as caught:
        [array.read() for array in found.values()]
    assert f"--resume_training step-{HALF:08d}" in str(caught.value)


def test_nothing_to_resume(path: Path, home: Path) -> None:
    with pytest.raises(UserError, match="there is nothing to resume") as caught:
        train(path, output_dir=home / "absent", resume_training=True)
    assert "absent" in str(caught.value) and not (home / "absent").exists()
    (home / "empty" / "checkpoints").mkdir(parents=True)
    refuses(path, home / "empty", "no complete checkpoint")


def test_two_runs_do_not_write_to_one_folder(home: Path) -> None:
    path = write_config(home / "busy", home / "data")
    output = train(path, runner_config__stop_step=2)
    before = files_below(output)
    with lock_folder(output):
        code, _, errors = call("--config", path, cwd=home)
    assert code == 2 and "another run writes there" in errors and "output_dir" in errors
    assert files_below(output) == before
    assert call("--config", path, "--stop_step", "2", cwd=home)[0] == 0
