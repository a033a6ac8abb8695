"""Checks whether this machine can run the trainer: a verdict for each requirement, and a fix.

It does not import MindSpore. The deep check starts MindSpore in a process of its own and computes something.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainer.errors import EXIT_OK, EXIT_RUN_FAILED
from trainer.input_files import unwritable_reason
from trainer.storage.compiler import find_compiler

if TYPE_CHECKING:
    from rich.console import Console

Verdict = Literal["ok", "warn", "fail"]

SUPPORTED_PYTHONS = ((3, 10), (3, 11), (3, 12))
TESTED_MINDSPORE = "2.10.0"

_GIB = 1 << 30
_NO_LIMIT_BYTES = 1 << 60  # control groups of version 1 say "no limit" with a number near 2**63
_SMI_TIMEOUT_SECONDS = 5
_DEEP_TIMEOUT_SECONDS = 120
_DEEP_PROGRAM = """
import mindspore as ms
x = ms.ops.ones((2, 3), ms.float32)
assert ms.ops.matmul(x, x.T).asnumpy().tolist() == [[3.0, 3.0], [3.0, 3.0]]
print("computed on", ms.get_context("device_target"))
"""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    verdict: Verdict  # warn: runs, with a limit worth knowing; fail: does not run
    found: str  # what the machine has
    fix: str = ""  # empty when it is ok


def checks(output_dir: Path = Path("output"), deep: bool = False) -> list[Check]:
    """Runs all checks.

    Args:
        output_dir: Where a run would write; it need not exist.
        deep: Whether to start MindSpore in a process of its own as well, which takes some seconds.
    """
    cores = os.cpu_count() or 1
    usable = cores
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    results = [
        check_python(sys.version_info[:3]),
        check_mindspore(installed_version("mindspore")),
        check_numpy(installed_version("numpy")),
        check_device(Path("/"), os.environ),
        check_cores(usable, cores),
        check_memory(_available_memory_bytes(), cgroup_memory_left_bytes(Path("/"))),
        check_disk(output_dir),
        check_compiler(find_compiler()),
        check_msrun(Path(sys.executable).parent, os.environ.get("PATH", "")),
    ]
    if deep:
        results.append(check_deep())
    return results


def exit_code(results: Sequence[Check]) -> int:
    """Returns the exit code of `doctor`: 1 if any check failed."""
    if any(check.verdict == "fail" for check in results):
        return EXIT_RUN_FAILED
    return EXIT_OK


def to_json(results: Sequence[Check]) -> str:
    """Returns the results as JSON: ``{"ok": true, "checks": [{"name": ..., "verdict": ..., "found": ..., "fix":
    ...}]}``."""
    ok = exit_code(results) == EXIT_OK
    return json.dumps({"ok": ok, "checks": [asdict(check) for check in results]}, indent=2, ensure_ascii=False)


def print_checks(results: Sequence[Check], console: Console) -> None:
    """Prints the results as a table with a line for each check, and the fix below it if there is one."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in results:
        text = Text(check.found)
        if check.fix:
            text.append(f"\n-> {check.fix}", style=styles[check.verdict])
        table.add_row(Text(check.verdict, style=styles[check.verdict]), check.name, text)
    console.print(table)


def check_python(version: tuple[int, int, int]) -> Check:
    """Checks that this Python's version is supported."""
    text = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version[:2] in SUPPORTED_PYTHONS:
        return Check("Python", "ok", text)
    return Check("Python", "fail", text, "use Python 3.10, 3.11 or 3.12: bash scripts/quickstart.sh finds one")


def check_mindspore(version: str | None) -> Check:
    """Checks that the tested version of MindSpore is installed; another one of its series gives a warning."""
    if version is None:
        return Check("MindSpore", "fail", "not installed", "pip install -c constraints.txt mindspore")
    if version == TESTED_MINDSPORE:
        return Check("MindSpore", "ok", version)
    fix = f"pip install mindspore=={TESTED_MINDSPORE}"
    verdict: Verdict = "fail"
    if version.split(".")[:2] == TESTED_MINDSPORE.split(".")[:2]:
        verdict = "warn"
    return Check("MindSpore", verdict, f"{version}; tested with {TESTED_MINDSPORE}", fix)


def version_notes(version: str | None) -> Iterator[str]:
    """Yields a note if another version of MindSpore is installed than the one that everything is tested with."""
    if version not in (None, TESTED_MINDSPORE):
        yield (f"MindSpore {version}: run_trainer is tested with {TESTED_MINDSPORE} only; with {version} nobody tested"
               " its oneDNN (on CPUs), compiled layers, collectives, MindRecord files and kernels of an Ascend;"
               f" pip install mindspore=={TESTED_MINDSPORE}")


def check_numpy(version: str | None) -> Check:
    """Checks for numpy 1: MindSpore 2.10 installs with numpy 2, but its data sets then fail."""
    if version is None:
        return Check("numpy", "fail", "not installed", "pip install -c constraints.txt numpy")
    if int(version.split(".")[0]) >= 2:
        return Check("numpy", "fail", f"{version}; MindSpore {TESTED_MINDSPORE} needs numpy 1", 'pip install "numpy<2"')
    return Check("numpy", "ok", version)


class AscendParts(NamedTuple):
    """The parts of an Ascend that this machine has."""

    cards: int  # how many
    driver: bool  # npu-smi
    toolkit: bool  # CANN's libraries


def find_ascend(root: Path, environment: Mapping[str, str]) -> AscendParts:
    """Returns the parts of an Ascend that this machine has; the arguments are those of `check_device`."""
    cards = sum(1 for _ in (root / "dev").glob("davinci[0-9]*"))
    driver = shutil.which("npu-smi", path=environment.get("PATH", "")) is not None
    toolkit = (root / "usr/local/Ascend").is_dir() or "ASCEND_HOME_PATH" in environment
    return AscendParts(cards, driver, toolkit)


def missing_for_ascend(root: Path, environment: Mapping[str, str], package: Path | None = None) -> list[str]:
    """Returns what a run on an Ascend would need and this machine does not have.

    Args:
        package: MindSpore's folder; None finds it.
    """
    parts = find_ascend(root, environment)
    missing = []
    if not parts.cards:
        missing.append("no card (/dev/davinci0)")
    # A container may have the cards and the driver's libraries without its tool.
    if not parts.driver and not (root / "usr/local/Ascend/driver").is_dir():
        missing.append("no driver (npu-smi, /usr/local/Ascend/driver)")
    if not parts.toolkit:
        missing.append("no CANN libraries (/usr/local/Ascend, ASCEND_HOME_PATH)")
    if package is None:
        spec = importlib.util.find_spec("mindspore")
        if spec and spec.origin:
            package = Path(spec.origin).parent
    if package is None or not any((package / "lib/plugin").glob("libmindspore_ascend.so*")):
        missing.append("no Ascend plugin in the mindspore package")
    return missing


def check_device(root: Path, environment: Mapping[str, str]) -> Check:
    """Checks which device is the best one: an Ascend with its toolkit, else the CPU.

    Args:
        root: Root of the file system, for tests.
        environment: Environment variables, whose PATH leads to npu-smi.
    """
    cards, smi, toolkit = find_ascend(root, environment)
    if cards or smi:
        cards_text = "npu-smi"
        if cards == 1:
            cards_text = "1 Ascend card"
        elif cards:
            cards_text = f"{cards} Ascend cards"
        if not toolkit:
            fix = "install CANN, then source its set_env.sh; until then use --device_target CPU"
            return Check("device", "warn", f"{cards_text}, but no CANN toolkit in /usr/local/Ascend", fix)
        if not cards:
            return Check("device", "warn", "npu-smi and CANN, but no card in /dev", "pass the cards to the container")
        return Check("device", "ok", f"{cards_text} with CANN")
    if toolkit:
        return Check("device", "warn", f"CPU ({processor_name()}); CANN is installed, but there is no Ascend card",
                     "pass the cards to the container, or use --device_target CPU")
    if gpu := _gpu_name(environment):
        return Check("device", "warn", f"CPU ({processor_name()}); {gpu} is not used",
                     f"nothing to do: MindSpore {TESTED_MINDSPORE} has no GPU wheel, training uses the CPU")
    return Check("device", "ok", f"CPU ({processor_name()})")


def check_cores(usable: int, present: int) -> Check:
    """Checks that the process may use two cores or more."""
    text = f"{usable} usable"
    if usable != present:
        text += f" of {present}"
    if usable >= 2:
        return Check("cores", "ok", text)
    return Check("cores", "warn", text, "use at least two cores: data loading and training share one now")


def check_memory(available_bytes: int, cgroup_left_bytes: int | None) -> Check:
    """Checks the available memory: that of the machine, or within the container's limit if that is less."""
    left_bytes = available_bytes
    limit = ""
    if cgroup_left_bytes is not None and cgroup_left_bytes < available_bytes:
        left_bytes = cgroup_left_bytes
        limit = " within the limit of the container"
    text = f"{left_bytes / _GIB:.1f} GiB available{limit}"
    if left_bytes < 1 * _GIB:  # importing MindSpore takes 0.4 GiB, a small model as much again
        return Check("memory", "fail", text, "free at least 1 GiB: MindSpore alone takes almost half of it")
    if left_bytes < 4 * _GIB:
        return Check("memory", "warn", text, "enough for configs/quickstart.yaml; larger models need 4 GiB or more")
    return Check("memory", "ok", text)


def check_disk(output_dir: Path) -> Check:
    """Checks the free space where the run will write, and the permission to write there."""
    existing = output_dir.absolute()
    while not os.path.exists(existing):  # unlike Path.exists, no error where a parent may not be read
        existing = existing.parent
    if not existing.is_dir():
        return Check("disk", "fail", f"{existing} is a file", "choose another output_dir")
    if reason := unwritable_reason(existing):
        return Check("disk", "fail", f"{existing} is not writable: {reason}", "choose another output_dir")
    free_bytes = shutil.disk_usage(existing).free
    text = f"{free_bytes / _GIB:.1f} GiB free for {output_dir}"
    if free_bytes < _GIB // 4:
        return Check("disk", "fail", text, "free at least 0.25 GiB, or choose another output_dir")
    if free_bytes < 2 * _GIB:
        fix = "enough for small models only: a checkpoint needs 12 bytes per parameter"
        return Check("disk", "warn", text, fix)
    return Check("disk", "ok", text)


def check_compiler(command: Sequence[str]) -> Check:
    """Checks for a C compiler, with which a step on a CPU is up to a tenth faster."""
    if command:
        return Check("C compiler", "ok", " ".join(command))
    fix = "install gcc, or set CC: the first run then compiles some functions, and steps are up to a tenth faster"
    return Check("C compiler", "warn", "none; NumPy computes all functions of rows", fix)


def check_msrun(executable_folder: Path, search_path: str) -> Check:
    """Checks that msrun uses this Python: called without `launch`, it starts workers with the first python on PATH."""
    msrun = executable_folder / "msrun"
    if not msrun.exists():
        return Check("msrun", "warn", f"not beside {executable_folder}/python; only parallel runs need it",
                     "pip install -c constraints.txt mindspore, with this Python")
    python = shutil.which("python", path=search_path)
    if python is None or Path(python).parent.absolute() != executable_folder.absolute():
        first = python or "and there is none"
        text = f"{msrun}; called without `launch`, it uses the first python on PATH, {first}"
        return Check("msrun", "warn", text, f"source {executable_folder}/activate before calling msrun itself")
    return Check("msrun", "ok", str(msrun))


def check_deep() -> Check:
    """Checks that MindSpore computes a matrix product in a process of its own."""
    command = [sys.executable, "-c", _DEEP_PROGRAM]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DEEP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"no answer within {_DEEP_TIMEOUT_SECONDS} s"
        return Check("MindSpore runs", "fail", text, "see whether the machine is busy")
    if result.returncode == 0:
        return Check("MindSpore runs", "ok", result.stdout.strip().splitlines()[-1])
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    see_all = 'to see all of it: python -c "import mindspore; mindspore.run_check()"'
    return Check("MindSpore runs", "fail", lines[-1], see_all)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the available memory: that of the machine, or within the container's limit if that is less."""
    limited = cgroup_memory_left_bytes(root)
    available = _available_memory_bytes()
    if limited is None:
        return available
    return min(available, limited)


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the most memory of a process here: that of the machine or the container's limit, and the swap space."""
    import psutil

    limits = [group.limit_bytes for group in _limited_groups(root)]
    return min([psutil.virtual_memory().total, *limits]) + psutil.swap_memory().total


def cgroup_memory_left_bytes(root: Path) -> int | None:
    """Returns the memory left within the tightest limit of this process's control groups, or None without a limit.

    It reads versions 1 and 2 of control groups.
    """
    return min((group.left_bytes for group in _limited_groups(root)), default=None)


_GROUP_FILES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers of a group -> its mount, the files of limit and use, and the field of cached files: version 2, then 1."""


class _Group(NamedTuple):
    """A control group with a memory limit."""

    limit_bytes: int
    left_bytes: int


def _limited_groups(root: Path) -> Iterator[_Group]:
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers not in _GROUP_FILES:
            continue
        place, *names = _GROUP_FILES[controllers]
        mount = root / place
        # Within a container the path is the host's and may not exist here; then the mount itself is the container's.
        folder = mount / path.lstrip("/")
        for ancestor in (folder, *folder.parents):
            if ancestor == mount or mount in ancestor.parents:
                group = _limited_group(ancestor, *names)
                if group is not None:
                    yield group


def _limited_group(group: Path, limit_file: str, used_file: str, cached_field: str) -> _Group | None:
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / used_file).read_text())
        cached = re.search(rf"^{cached_field} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= _NO_LIMIT_BYTES:
        return None
    # Before the kernel enforces a limit, it frees what it only caches of files.
    if cached:
        used -= int(cached[1])
    return _Group(int(limit), max(0, int(limit) - used))


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None without it. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _available_memory_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available


def processor_name() -> str:
    """Returns the processor's model name, or else its architecture."""
    with contextlib.suppress(OSError):
        if model := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return model[1]
    return platform.machine()


def _gpu_name(environment: Mapping[str, str]) -> str:
    smi = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    if smi is not None:
        command = [smi, "--query-gpu=name", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            result = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_SECONDS)
            if result.returncode == 0:
                return result.stdout.strip().partition("\n")[0]
    return ""
