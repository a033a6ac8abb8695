"""The doctor: each verdict from what a machine could look like, and the whole of it on this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from trainer.device import doctor
from trainer.device.doctor import Check
from trainer.storage.compiler import find_compiler

REPOSITORY = Path(__file__).resolve().parents[3]
GIB = 1 << 30


def assert_verdict(check: Check, verdict: str, *words: str) -> None:
    assert check.verdict == verdict, check
    assert bool(check.fix) == (verdict != "ok"), f"a fix belongs to what is not ok, and to nothing else: {check}"
    for word in words:
        assert word in f"{check.found} {check.fix}", (word, check)


def executable(path: Path, script: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 9, 18), "fail"), ((3, 10, 0), "ok"), ((3, 12, 1), "ok"), ((3, 13, 0), "fail")]
)
def test_python(version: tuple[int, int, int], verdict: str) -> None:
    assert_verdict(doctor.check_python(version), verdict, ".".join(map(str, version)))


@pytest.mark.parametrize(
    ("version", "verdict"), [(None, "fail"), ("2.10.0", "ok"), ("2.10.1", "warn"), ("2.9.0", "fail"), ("2.1.0", "fail")]
)
def test_mindspore(version: str | None, verdict: str) -> None:
    assert_verdict(doctor.check_mindspore(version), verdict)


def test_the_tested_mindspore_is_the_pinned_one() -> None:
    assert f"mindspore=={doctor.TESTED_MINDSPORE}" in (REPOSITORY / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("version", "verdict"), [(None, "fail"), ("1.26.4", "ok"), ("2.1.0", "fail"), ("10.0", "fail")]
)
def test_numpy(version: str | None, verdict: str) -> None:
    assert_verdict(doctor.check_numpy(version), verdict)


def test_device(tmp_path: Path) -> None:
    nothing = {"PATH": ""}
    assert_verdict(doctor.check_device(tmp_path, nothing), "ok", "CPU")

    executable(tmp_path / "gpu" / "nvidia-smi", "echo Some GPU")
    environment = {"PATH": str(tmp_path / "gpu")}
    assert_verdict(doctor.check_device(tmp_path, environment), "warn", "CPU", "Some GPU is not used")
    executable(tmp_path / "broken" / "nvidia-smi", "echo no driver >&2; exit 9")
    assert_verdict(doctor.check_device(tmp_path, {"PATH": str(tmp_path / "broken")}), "ok", "CPU")

    executable(tmp_path / "npu" / "npu-smi")
    with_smi = {"PATH": str(tmp_path / "npu")}
    assert_verdict(doctor.check_device(tmp_path, with_smi), "warn", "no CANN toolkit")
    (tmp_path / "usr/local/Ascend").mkdir(parents=True)
    assert_verdict(doctor.check_device(tmp_path, with_smi), "warn", "no card in /dev")
    assert_verdict(doctor.check_device(tmp_path, nothing), "warn", "no Ascend card")
    (tmp_path / "dev").mkdir()
    for card in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / "dev" / card).touch()
    assert_verdict(doctor.check_device(tmp_path, nothing), "ok", "2 Ascend cards with CANN")


def test_cores() -> None:
    assert_verdict(doctor.check_cores(1, 64), "warn", "1 usable of 64")
    assert_verdict(doctor.check_cores(2, 2), "ok", "2 usable")


def test_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert_verdict(doctor.check_compiler(["gcc", "-m64"]), "ok", "gcc -m64")
    assert_verdict(doctor.check_compiler([]), "warn", "NumPy", "install gcc, or set CC")
    monkeypatch.setenv("CC", "")
    assert find_compiler() == []
    monkeypatch.setenv("CC", f"{sys.executable} -x")
    assert find_compiler() == [sys.executable, "-x"]
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == []


@pytest.mark.parametrize(
    ("available_gib", "cgroup_gib", "verdict", "found"),
    [
        (16, None, "ok", "16.0 GiB available"),
        (16, 32, "ok", "16.0 GiB available"),
        (16, 2, "warn", "2.0 GiB available within the limit of the container"),
        (0.5, None, "fail", "0.5 GiB available"),
        (16, 0, "fail", "0.0 GiB available within the limit of the container"),
    ],
)
def test_memory(available_gib: float, cgroup_gib: float | None, verdict: str, found: str) -> None:
    cgroup_bytes = None if cgroup_gib is None else int(cgroup_gib * GIB)
    check = doctor.check_memory(int(available_gib * GIB), cgroup_bytes)
    assert_verdict(check, verdict)
    assert check.found == found


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_cgroup_memory_version_2(tmp_path: Path) -> None:
    assert doctor.cgroup_memory_left_bytes(tmp_path) is None
    write_group(tmp_path / "proc/self", cgroup="0::/slice/job")
    groups = tmp_path / "sys/fs/cgroup"
    write_group(groups / "slice/job", memory__max="max", memory__current=5, memory__stat="anon 5\ninactive_file 0")
    assert doctor.cgroup_memory_left_bytes(tmp_path) is None
    # The limit of a parent counts, and what it caches of files does not.
    write_group(groups / "slice", memory__max=100, memory__current=70, memory__stat="anon 40\ninactive_file 30")
    assert doctor.cgroup_memory_left_bytes(tmp_path) == 60
    # Within a container only the mount itself is visible.
    write_group(tmp_path / "proc/self", cgroup="0::/host/path/of/this/container")
    write_group(groups, memory__max=10, memory__current=20, memory__stat="inactive_file 0")
    assert doctor.cgroup_memory_left_bytes(tmp_path) == 0
    assert doctor.total_memory_bytes(tmp_path) == 10 + psutil.swap_memory().total
    assert doctor.total_memory_bytes(tmp_path / "none") == psutil.virtual_memory().total + psutil.swap_memory().total


def test_cgroup_memory_version_1(tmp_path: Path) -> None:
    write_group(tmp_path / "proc/self", cgroup="5:cpu,cpuacct:/\n4:memory:/job\n0::/")
    files = {"memory__usage_in_bytes": 30, "memory__stat": "inactive_file 1\ntotal_inactive_file 10"}
    group = tmp_path / "sys/fs/cgroup/memory/job"
    write_group(group, memory__limit_in_bytes=9223372036854771712, **files)
    assert doctor.cgroup_memory_left_bytes(tmp_path) is None
    write_group(group, memory__limit_in_bytes=100, **files)
    assert doctor.cgroup_memory_left_bytes(tmp_path) == 80


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "not" / "yet"
    usage = doctor.shutil.disk_usage(tmp_path)
    for free_bytes, verdict in ((10 * GIB, "ok"), (GIB, "warn"), (GIB // 8, "fail")):
        fake = usage._replace(free=free_bytes)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, fake=fake: fake)
        assert_verdict(doctor.check_disk(missing), verdict, f"{free_bytes / GIB:.1f} GiB free")
    assert not missing.exists()
    (tmp_path / "file").touch()
    assert_verdict(doctor.check_disk(tmp_path / "file"), "fail", "is a file")
    assert_verdict(doctor.check_disk(tmp_path / "file" / "below"), "fail", "is a file")


def test_disk_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # nothing is closed to root
    try:
        assert_verdict(doctor.check_disk(closed / "output"), "fail", "is not writable")
    finally:
        os.seteuid(user)


def test_msrun(tmp_path: Path) -> None:
    own, other = tmp_path / "env" / "bin", tmp_path / "other"
    executable(own / "python")
    executable(other / "python")
    assert_verdict(doctor.check_msrun(own, f"{own}:{other}"), "warn", "only parallel runs need it")
    executable(own / "msrun")
    assert_verdict(doctor.check_msrun(own, f"{own}:{other}"), "ok", str(own / "msrun"))
    assert_verdict(doctor.check_msrun(own, f"{other}:{own}"), "warn", str(other / "python"), f"source {own}/activate")
    assert_verdict(doctor.check_msrun(own, ""), "warn", "there is none")


def test_exit_code_and_json() -> None:
    ok, warn, fail = Check("a", "ok", "fine"), Check("b", "warn", "hm", "mend it"), Check("c", "fail", "é", "mend it")
    assert doctor.exit_code([ok, warn]) == 0
    assert doctor.exit_code([ok, fail, warn]) == 1
    document = json.loads(doctor.to_json([warn, fail]))
    assert document["ok"] is False and json.loads(doctor.to_json([ok, warn]))["ok"] is True
    assert document["checks"][1] == {"name": "c", "verdict": "fail", "found": "é", "fix": "mend it"}


def test_the_table_shows_everything_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=60)
    doctor.print_checks([Check("disk", "fail", "[red]0 GiB[/red]", "free some")], console)
    shown = console.file.getvalue()
    assert "fail  disk  [red]0 GiB[/red]" in shown and "-> free some" in shown


def test_it_answers_on_this_machine_within_a_second_and_without_mindspore() -> None:
    program = """if True:
        import sys, time
        from trainer.device import doctor
        print(doctor.to_json(doctor.checks()))
        assert "mindspore" not in sys.modules
        print(time.process_time(), file=sys.stderr)
    """
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names = [check["name"] for check in json.loads(result.stdout)["checks"]]
    assert names == ["Python", "MindSpore", "numpy", "device", "cores", "memory", "disk", "C compiler", "msrun"]
    assert float(result.stderr) < 1.0  # of the processor: those of the clock depend on what else the machine does


@pytest.mark.slow
def test_the_deep_check_computes_something() -> None:
    assert_verdict(doctor.check_deep(), "ok", "computed on")


def test_a_deep_check_that_fails_shows_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DEEP_PROGRAM", "import sys; print('noise', file=sys.stderr); import no_such_engine")
    assert_verdict(doctor.check_deep(), "fail", "ModuleNotFoundError: No module named 'no_such_engine'")
    monkeypatch.setattr(doctor, "_DEEP_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_DEEP_TIMEOUT_SECONDS", 0.1)
    assert_verdict(doctor.check_deep(), "fail", "no answer within 0.1 s")


def test_a_plan_says_what_was_not_tested_with_another_mindspore() -> None:
    assert list(doctor.version_notes(doctor.TESTED_MINDSPORE)) == list(doctor.version_notes(None)) == []
    (note,) = doctor.version_notes("2.10.3")
    assert note.startswith("MindSpore 2.10.3: run_trainer is tested with 2.10.0 only") and "collectives" in note
