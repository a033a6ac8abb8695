"""The parts of a dry run that need neither MindSpore nor a compiler."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from trainer.cli import main as cli
from trainer.config import Config, load_config, parse_config
from trainer.dryrun import cann_stubs, process, report
from trainer.dryrun.process import Case, CaseFailure, Collective, Measurement, run_cases
from trainer.dryrun.report import (
    DryRun,
    audit_on_backend,
    collective_rows,
    dry_run,
    dry_run_dict,
    dry_run_sections,
    group_names,
)
from trainer.errors import RunError, UserError
from trainer.parallel.world import World
from trainer.plan.render import sections_text

WORKER = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[-1])
job = json.loads((folder / "cases.json").read_text())
numbers = {"seconds": 1.0, "host_bytes": 5, "host_reads": {"a.py:1": [1, 5]}, "peak_bytes": 7, "failure": None,
           "legacy": {}, "collectives": [["AllReduce", "float32", 4, [0, 1]]], "found": {"rank": job["rank"]}}
with (folder / "results.jsonl").open("a") as file:
    for name, case in job["cases"].items():
        print(json.dumps({"case": name, "says": "started"}), file=file, flush=True)
        if case["config"] == "dies":
            print("it was the kernel", flush=True)
            os.abort()
        print(json.dumps({"case": name, "measurement": numbers}), file=file, flush=True)
"""


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Returns the start of the command of a worker that answers at once."""
    (tmp_path / "pretended_worker.py").write_text(WORKER)
    monkeypatch.setattr(process, "build_cann_stubs", lambda: tmp_path)
    return sys.executable, str(tmp_path / "pretended_worker.py")


def test_a_case_that_kills_its_process_leaves_the_others(pretended: tuple[str, ...]) -> None:
    said = []
    cases = {"first": Case("{}"), "bad": Case("dies"), "last": Case("{}")}
    found = run_cases(cases, 8, 3, lambda name, text: said.append((name, text)), pretended)
    assert list(found) == ["first", "bad", "last"]
    assert found["first"].failure is None and found["last"].found == {"rank": 3}
    assert found["first"].collectives == [Collective("AllReduce", "float32", 4, (0, 1))]
    assert found["first"].host_reads == {"a.py:1": (1, 5)}
    assert "signal 6" in found["bad"].failure.message and "it was the kernel" in found["bad"].failure.message
    assert said == [("first", "started"), ("bad", "started"), ("last", "started")]


def test_the_environment_is_that_of_a_rank_and_of_no_job() -> None:
    given = {"MS_WORKER_NUM": "2", "RANK_ID": "1", "HOME": "/home/x", "PYTHONPATH": "/own"}
    made = process.environment(given, Path("/cann"), 8, 3)
    assert (made["RANK_SIZE"], made["RANK_ID"], made["HOME"]) == ("8", "3", "/home/x")
    assert "MS_WORKER_NUM" not in made and made["MS_SIMULATION_LEVEL"] == "1"
    assert made["PYTHONPATH"].split(os.pathsep)[::2] == ["/cann/python", "/own"]


def test_without_a_compiler_the_error_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="g\\+\\+") as error:
        cann_stubs.build_cann_stubs(tmp_path)
    assert "apt-get install g++" in error.value.fix and not list(tmp_path.iterdir())


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'a.cc:1: error: unknown flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    with pytest.raises(RunError, match="unknown flag"):
        cann_stubs.build_cann_stubs(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_groups_have_the_names_of_the_plan() -> None:
    text = "use_parallel: True\nparallel_config: {model_parallel: 4, pipeline_stage: 2}\nmodel: {model_config: {"
    config = parse_config("a.yaml", text + SIZES + ", n_kv_heads: 2}}")
    names = group_names(config, World(5, 16, 5, 16))
    assert (names[4, 5, 6, 7], names[4, 5], names[1, 5], names[5, 13]) == ("tp", "kv", "dp", "pp")
    assert group_names(config, World(5, 8, 5, 8))[4, 5] == "kv" and not group_names(config, World(5, 12, 5, 12))
    calls = [Collective("AllReduce", "float32", 8, (4, 5)), Collective("AllReduce", "float32", 8, tuple(range(16)))]
    assert collective_rows(calls, names) == [("AllReduce", "kv: 4-5", 1, 8), ("AllReduce", "all: 0-15", 1, 8)]


@pytest.mark.parametrize("error", [RunError("g++ cannot build them"), PermissionError("no permission")])
def test_an_audit_says_why_it_is_not_made_there(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(process, "build_cann_stubs", refuse)
    assert audit_on_backend(parse_config("a.yaml", "{}"), World()) in ("g++ cannot build them", "no permission")


SIZES = "num_layers: 90, hidden_size: 64, num_heads: 4, vocab_size: 512, seq_length: 32"
SEMI = "context: {device_target: Ascend}\nparallel: {parallel_mode: 1}\nmodel: {arch: {type: LlamaForCausalLM}"


def tried(text: str, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Returns the configuration that the process of a dry run reads, in a folder of its own."""
    cases = []
    monkeypatch.setattr(report, "available_memory_bytes", lambda: 2 << 30)
    monkeypatch.setattr(report, "run_cases", lambda given, *more: cases.extend(given.values()) or {"": Measurement()})
    monkeypatch.chdir(folder)
    (folder / "a.yaml").write_text(text)
    told: list = []
    dry_run(load_config("a.yaml", problems=told), world, told, lambda line: None)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return parse_config("case", cases[0].config)


def test_files_of_the_configuration_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    sizes = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 64,
        "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 512,
    }  # fmt: skip
    (tmp_path / "model/config.json").write_text(json.dumps(sizes))
    text = (
        "context: {device_target: Ascend, ascend_config: {parallel_speed_up_json_path: up.json}}\n"
        "pretrained_model_dir: model\nmodel: {model_config: {seq_length: 32}}\n"
    )
    found = tried(text, World(), tmp_path, monkeypatch)
    assert (found.decoder.num_layers, found.decoder.intermediate_size) == (3, 96)
    assert found.context.ascend_config == {"parallel_speed_up_json_path": str(tmp_path / "up.json")}


def test_a_model_folder_may_be_elsewhere_but_not_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"pretrained_model_dir: gone\n{SEMI}, model_config: {{{SIZES}}}}}\n"
    # Ninety layers would not fit here as one graph; without use_parallel none is made.
    assert tried(f"use_parallel: False\n{text}", World(), tmp_path, monkeypatch).decoder.num_layers == 90
    (tmp_path / "elsewhere").rmdir()
    with pytest.raises(UserError, match="a dry run needs about"):
        tried(f"use_parallel: True\nparallel_config: {{data_parallel: 8}}\n{text}", World(0, 8, 0, 8), tmp_path,
              monkeypatch)  # fmt: skip
    with pytest.raises(UserError, match="a run needs the sizes of its model"):
        tried(f"pretrained_model_dir: gone\n{SEMI}}}\n", World(), tmp_path, monkeypatch)


def test_the_libraries_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    folder = cann_stubs.build_cann_stubs(tmp_path / "cache")
    monkeypatch.setenv("PATH", "")
    assert cann_stubs.build_cann_stubs(tmp_path / "cache") == folder
    assert (folder / "lib64/libascendcl.so").resolve() == (folder / "lib64" / cann_stubs.LIBRARY).resolve()
    assert folder.name == "cann", "MindSpore looks for this name"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dryrun", "cpu"], "write --dryrun ascend"),
        (["--dryrun", "ascend", "--ranks", "8", "--rank", "8"], "a job of 8 ranks has the ranks 0 to 7"),
        (["--dryrun", "ascend", "--model.model_config.num_heads", "0"], "num_heads"),
        (["--dryrun", "ascend", "--run_mode", "eval"], "run_mode = 'eval': a dry run does steps of a training"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "a.yaml"
    file.write_text("model: {model_config: {num_layers: 1}}\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", *flags, "--config", str(file)])
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_what_is_said_of_a_step_and_of_a_failure() -> None:
    calls = [Collective("AllReduce", "float32", 3 << 20, (0, 1)), Collective("AllReduce", "float32", 1 << 20, (0, 1))]
    measured = Measurement(
        host_bytes=12, host_reads={"trainer/step/a.py:1": (1, 12)}, legacy={"AddN": 2}, collectives=calls,
        peak_bytes=3 << 30,
    )  # fmt: skip
    found = DryRun(World(1, 2, 1, 2), measured, 5 << 29, 2 << 30, {(0, 1): "tp"})
    text = sections_text(dry_run_sections(found))
    for part in ("3.00 GiB, ABOVE max_device_memory 2.00 GiB; the plan estimates 2.50 GiB", "12 bytes", "AddN 2",
                 "AllReduce over tp: 0-1", "2 x, 4 MiB"):
        assert part in " ".join(text.split()), part
    with pytest.raises(RunError, match="a device would run out of memory: this rank needs 3.00 GiB of 2.00 GiB"):
        found.check()
    found._replace(limit_bytes=3 << 30).check()
    assert dry_run_dict(found)["exceeds_memory"]
    failed = Measurement(CaseFailure("CumSum", "trainer/models/moe.py:7", "TypeError: int64"))
    text = sections_text(dry_run_sections(DryRun(World(), failed, None, None)))
    assert all(part in text for part in ("CumSum", "trainer/models/moe.py:7", "TypeError: int64"))
