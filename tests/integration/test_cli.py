"""The command line as a process: quick, without MindSpore, from any folder, and helpful about mistakes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import Answer, answers_of
from run_helpers import (
    PROGRAM,
    REPOSITORY,
    call,
    column,
    config_of,
    step_records,
    write_config,
    write_corpus,
    write_instructions,
)

from trainer.cli.flags import FLAGS, NO_EFFECT, PANELS

QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"

# Runs a command as the program does, then says on the last line of standard error whether MindSpore is loaded.
WATCHED = """if True:
    import sys
    from trainer.cli.main import main
    try:
        main(sys.argv[1:])
    finally:
        print(f"mindspore loaded: {'mindspore' in sys.modules}", file=sys.stderr)
"""
QUICK = {
    "help": ["--help"],
    "plan help": ["plan", "--help"],
    "plan": ["plan", "--config", str(QUICKSTART)],
    "plan json": ["plan", "--json", "--config", str(QUICKSTART)],
    "schema": ["schema"],
}
# These are asked in one process.
HELPED = ("train", "plan", "export", "launch", "status", "doctor", "schema")
MISTAKES: list[tuple[list[str], list[str]]] = [
    (["plam"], ["plam", "no such command", "use plan"]),
    (["fit"], ["no such command", "use one of train, chat, eval, plan, ", ", status, stop, verify, "]),
    (["--btach_size", "3"], ["--btach_size", "unknown flag", "--batch_size"]),
    (["plan", "--epoch", "3"], ["--epoch", "unknown flag", "--epochs"]),
    (["doctor", "--jsn"], ["--jsn", "--json"]),
    (["schema", "--json"], ["--json"]),
    (["--json", "--config", str(QUICKSTART)], ["--json"]),
    (["plan", "--config", str(QUICKSTART), "--options", "seed=3", "x.y=1"], ["x: unknown key"]),
    (["plan", "extra", "--config", str(QUICKSTART)], ["extra"]),
    (["plan", "--config", str(QUICKSTART), "--rank", "8"], ["--rank", "of a dry run or an audit", "--ranks 8"]),
    (["plan"], ["--config", "needs its YAML file", "configs/quickstart.yaml"]),
    (["--config"], ["--config", "needs a value"]),
]


def children_seconds() -> float:
    """Returns the CPU seconds of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watched(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(REPOSITORY), "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", QUICK)
def test_answers_quickly_and_without_mindspore(name: str, tmp_path: Path) -> None:
    # The promise is 0.4 s for help and 1 s for a plan on a quiet machine. Here processor time is bounded, by twice as
    # much: other processes hardly change it.
    if name.startswith("plan") and "help" not in name:
        watched(QUICK[name], tmp_path)  # the first one tokenizes the text into the cache
    before_seconds = children_seconds()
    done = watched(QUICK[name], tmp_path)
    seconds = children_seconds() - before_seconds
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["mindspore loaded: False"]
    assert done.stdout
    assert seconds < (0.8 if "help" in name else 2)
    assert not any(tmp_path.rglob("*.yaml")) and not (tmp_path / "output").exists()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("answers")
    lines = {command: [command, "--help"] for command in HELPED} | {"": ["--help"]}
    lines |= {repr(arguments): arguments for arguments, _ in MISTAKES}
    found = answers_of(lines, folder, HOME=str(folder), COLUMNS="80")
    assert not any(folder.rglob("*"))
    return found


@pytest.mark.parametrize("command", HELPED)
def test_every_command_helps(command: str, answers: dict[str, Answer]) -> None:
    found = answers[command]
    assert (found.code, found.errors, found.loaded_mindspore) == (0, "", False) and command in found.output
    assert found.cpu_seconds < 0.8


def test_a_paragraph_of_help_breaks_where_the_terminal_ends(answers: dict[str, Answer]) -> None:
    """Not where the line of its docstring ends: the first word of a line had no room on the line before."""
    for command in ("plan", "export"):
        prose = answers[command].output.partition("╭")[0]
        for paragraph in re.split(r"\n\s*\n", prose):
            lines = [line.strip() for line in paragraph.strip().splitlines()]
            for line, following in zip(lines, lines[1:], strict=False):
                assert len(line) + 1 + len(following.split()[0]) > 78, line


def test_help_has_room_for_every_flag(answers: dict[str, Answer]) -> None:
    for command in ("", "train", "plan", "export"):
        output = answers[command].output
        for flag in ["config", "options", *(flag.name for flag in FLAGS)]:
            assert f"--{flag} " in output, flag
        lines = output.splitlines()
        assert max(map(len, lines)) <= 80
        last = lines[next(n for n, line in enumerate(lines) if NO_EFFECT in line) :]
        one_line_each = last[1 : len(PANELS[NO_EFFECT]) + 1]
        assert all(re.match(r"│ --\w+ .*(ignored|not yet)\.", line) for line in one_line_each), last
        acting = [title for title in PANELS if title != NO_EFFECT]
        titles = re.findall("╭─ (.+?) ─", output)
        assert titles == ["Options", *acting, *([] if command else ["Commands"]), NO_EFFECT]


def test_a_plan_says_what_a_run_would_do(tmp_path: Path) -> None:
    _, output, _ = call("plan", "--config", QUICKSTART, "--gradient_accumulation_steps", 4, cwd=tmp_path)
    lines = output.splitlines()
    assert len(lines) <= 30 and all(line == line.rstrip() for line in lines)
    for text in ("optimizer step", "4 micro-batches of 32 sequences", "array engine", "learning rate",
                 "weights", "MiB"):  # fmt: skip
        assert text in output, text
    flags = ("--output_dir", "x" * 100, "--sink_mode", "--verbose")
    _, output, _ = call("plan", "--config", QUICKSTART, *flags, cwd=tmp_path)
    assert output.startswith("NOTES\n  - ignored: runner_config.sink_mode (flag --sink_mode): each optimizer step is")
    assert "x" * 100 in output, "no cell is folded in a pipe"
    assert re.search(r"rotary_embedding  use_fused_rope: false +reference  use_fused_rope is off; device", output)
    code, output, _ = call("plan", "--json", "--config", QUICKSTART, "--use_fused_rope", cwd=tmp_path)
    plan = json.loads(output)
    assert code == 0 and plan["run_mode"] == "train"
    assert plan["steps"]["last_step"] == config_of(QUICKSTART).runner_config.stop_step
    rope = next(choice for choice in plan["model"]["kernels"] if choice["kernel"] == "rotary_embedding")
    assert rope["asked"] == "use_fused_rope: true" and rope["chosen"] == "reference" and "Ascend" in rope["why"]


def test_a_plan_and_the_run_after_it_have_the_same_data(tmp_path: Path) -> None:
    """The number of steps, for text whose number of tokens nothing but tokenizing tells; and it is tokenized once."""
    changes = {"train_dataset.data_loader.type": "JsonlDataset", "do_eval": True, "runner_config.batch_size": 2,
               "context": {"mode": 1}}  # fmt: skip
    path = write_config(tmp_path, write_instructions(tmp_path / "data.jsonl", 12), changes)
    code, output, errors = call("plan", "--json", "--config", path, cwd=tmp_path)
    plan = json.loads(output)
    assert code == 0, errors
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("tokens.bin")}
    code, _, errors = call("--config", path, cwd=tmp_path)
    assert code == 0 and len(before) == 1, errors
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("tokens.bin")} == before
    records = step_records(tmp_path / "output")
    assert (len(records), records[-1]["step"]) == (plan["steps"]["total_steps"], plan["steps"]["total_steps"])
    assert column(records, "epoch").count(1) == plan["steps"]["steps_per_epoch"]
    evaluated = call("plan", "--json", "--config", path, "--run_mode", "eval",
                     "--load_checkpoint", tmp_path / "output" / "checkpoints", cwd=tmp_path)  # fmt: skip
    assert json.loads(evaluated[1])["data"]["eval_rows"] == plan["data"]["eval_rows"] > 0, evaluated


def test_doctor_judges_this_machine_without_loading_mindspore(tmp_path: Path) -> None:
    done = watched(["doctor", "--json"], tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr.splitlines() == ["mindspore loaded: False"], done.stderr
    assert found["ok"] and {check["verdict"] for check in found["checks"]} <= {"ok", "warn"}
    code, output, _ = call("doctor", cwd=tmp_path)
    assert code == 0 and all(word in output for word in ("Python", "MindSpore"))


def test_the_schema_is_a_json_schema_of_the_configuration(tmp_path: Path) -> None:
    _, output, _ = call("schema", cwd=tmp_path)
    schema = json.loads(output)
    older = schema["$defs"]["Config"]["properties"]
    newer = schema["$defs"]["NewerConfig"]["properties"]
    assert {"runner_config", "model", "train_dataset", "lr_schedule"} <= set(older)
    assert {"training", "model", "train_dataset", "lr_scheduler"} <= set(newer)


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES)
def test_a_mistaken_command_line_is_explained(
    arguments: list[str], parts: list[str], answers: dict[str, Answer]
) -> None:
    found = answers[repr(arguments)]
    assert (found.code, found.output, found.loaded_mindspore) == (2, "", False), found.errors
    assert "Traceback" not in found.errors
    for part in ["error: ", *parts]:
        assert part in found.errors, (part, found.errors)


def test_paths_count_from_the_working_directory(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    write_config(tmp_path / "configs", "data", {"output_dir": "out", "train_dataset.cache_dir": "cache"})
    code, output, errors = call("plan", "--config", "configs/run.yaml", cwd=tmp_path)
    assert code == 0 and "sequences an epoch" in output, errors
    code, _, errors = call("plan", "--config", "run.yaml", cwd=tmp_path)
    assert code == 2 and "run.yaml" in errors
    code, _, errors = call("plan", "--config", "run.yaml", cwd=tmp_path / "configs")  # its data is not there
    assert code == 2 and "dataset_dir" in errors and str(tmp_path / "configs") in errors


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} {PROGRAM} schema | head -c 20"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("{") and done.stderr == ""


def test_a_full_disk_behind_the_output_is_one_message(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as output:
        done = subprocess.run([sys.executable, PROGRAM, "completion", "bash"], cwd=tmp_path, env=environment,
                              stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: the output could not be written: [Errno 28] No space left on device.\n"


def test_a_terminal_without_a_character_gets_its_escape(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    path = write_config(tmp_path, tmp_path / "data")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, PROGRAM, "data", "--config", path, "--rows", "1"], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0 and "stand between \\xab and \\xbb" in done.stdout


def test_closed_standard_streams_are_like_dev_null(tmp_path: Path) -> None:
    write_config(tmp_path, write_corpus(tmp_path / "data"))
    command = f"{sys.executable} {PROGRAM} plan --config run.yaml <&- >&-"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "") and "Traceback" not in done.stderr
