"""Whether this machine can run the trainer: a verdict for each thing it needs, and what to do about it.

Answers without importing MindSpore. The deep check starts it in a process of its own and computes something.
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
    found: str
    fix: str = ""  # empty when it is ok


def checks(output_dir: Path = Path("output"), deep: bool = False) -> list[Check]:
    """Checks everything.

    Args:
        output_dir: Where a run would write; it need not exist.
        deep: Whether to start MindSpore in a process of its own as well, which takes some seconds.
    """
    cores = os.cpu_count() or 1
    found = [
        check_python(sys.version_info[:3]),
        check_mindspore(_installed_version("mindspore")),
        check_numpy(_installed_version("numpy")),
        check_device(Path("/"), os.environ),
        check_cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores, cores),
        check_memory(_available_memory_bytes(), cgroup_memory_left_bytes(Path("/"))),
        check_disk(output_dir),
        check_msrun(Path(sys.executable).parent, os.environ.get("PATH", "")),
    ]
    if deep:
        return found + [check_deep()]
    return found


def exit_code(found: Sequence[Check]) -> int:
    if any(check.verdict == "fail" for check in found):
        return EXIT_RUN_FAILED
    return EXIT_OK


def to_json(found: Sequence[Check]) -> str:
    """For machines: ``{"ok": true, "checks": [{"name": ..., "verdict": ..., "found": ..., "fix": ...}]}``."""
    ok = exit_code(found) == EXIT_OK
    return json.dumps({"ok": ok, "checks": [asdict(check) for check in found]}, indent=2, ensure_ascii=False)


def render(found: Sequence[Check], console: Console) -> None:
    """For people: a table, a line a check, with the fix below what needs one."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in found:
        text = Text(check.found)
        if check.fix:
            text.append(f"\n-> {check.fix}", style=styles[check.verdict])
        table.add_row(Text(check.verdict, style=styles[check.verdict]), check.name, text)
    console.print(table)


def check_python(version: tuple[int, int, int]) -> Check:
    found = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version[:2] in SUPPORTED_PYTHONS:
        return Check("Python", "ok", found)
    return Check("Python", "fail", found, "use Python 3.10, 3.11 or 3.12: bash scripts/quickstart.sh finds one")


def check_mindspore(version: str | None) -> Check:
    if version is None:
        return Check("MindSpore", "fail", "not installed", "pip install -c constraints.txt mindspore")
    if version == TESTED_MINDSPORE:
        return Check("MindSpore", "ok", version)
    fix = f"pip install mindspore=={TESTED_MINDSPORE}"
    same_series = version.split(".")[:2] == TESTED_MINDSPORE.split(".")[:2]
    return Check("MindSpore", "warn" if same_series else "fail", f"{version}; tested with {TESTED_MINDSPORE}", fix)


def check_numpy(version: str | None) -> Check:
    """MindSpore 2.10 installs with numpy 2 but its data sets then fail."""
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
    """Looks for an Ascend; arguments as of `check_device`."""
    cards = sum(1 for _ in (root / "dev").glob("davinci[0-9]*"))
    driver = shutil.which("npu-smi", path=environment.get("PATH", "")) is not None
    toolkit = (root / "usr/local/Ascend").is_dir() or "ASCEND_HOME_PATH" in environment
    return AscendParts(cards, driver, toolkit)


def missing_for_ascend(root: Path, environment: Mapping[str, str], package: Path | None = None) -> list[str]:
    """Why a run cannot use an Ascend; empty when it can. `package`: MindSpore's folder; None: look."""
    found = find_ascend(root, environment)
    if found.cards:
        missing = []
    else:
        missing = ["no card (/dev/davinci0)"]
    # A container may have the cards and the driver's libraries without its tool.
    if not (found.driver or (root / "usr/local/Ascend/driver").is_dir()):
        missing.append("no driver (npu-smi, /usr/local/Ascend/driver)")
    if not found.toolkit:
        missing.append("no CANN libraries (/usr/local/Ascend, ASCEND_HOME_PATH)")
    if package is None:
        spec = importlib.util.find_spec("mindspore")
        package = None
        if spec and spec.origin:
            package = Path(spec.origin).parent
    if package is None or not any((package / "lib/plugin").glob("libmindspore_ascend.so*")):
        missing.append("no Ascend plugin in the mindspore package")
    return missing


def check_device(root: Path, environment: Mapping[str, str]) -> Check:
    """The best device there is: Ascend with its toolkit, else the CPU.

    Args:
        root: Of the file system, for tests.
        environment: Its PATH leads to npu-smi.
    """
    cards, smi, toolkit = find_ascend(root, environment)
    if cards or smi:
        cards_text = "npu-smi"
        if cards:
            cards_text = f"{cards} Ascend card{'s' if cards != 1 else ''}"
        if not toolkit:
            fix = "install CANN, then source its set_env.sh; until then use --device_target CPU"
            return Check("device", "warn", f"{cards_text}, but no CANN toolkit in /usr/local/Ascend", fix)
        if not cards:
            return Check("device", "warn", "npu-smi and CANN, but no card in /dev", "pass the cards to the container")
        return Check("device", "ok", f"{cards_text} with CANN")
    if toolkit:
        return Check("device", "warn", f"CPU ({processor_name()}); CANN is installed, but there is no Ascend card",
                     "pass the cards to the container, or use --device_target CPU")
    gpu = _gpu_name(environment)
    if gpu:
        return Check("device", "warn", f"CPU ({processor_name()}); {gpu} stays idle",
                     f"nothing to do: MindSpore {TESTED_MINDSPORE} has no GPU wheel, training uses the CPU")
    return Check("device", "ok", f"CPU ({processor_name()})")


def check_cores(usable: int, present: int) -> Check:
    found = f"{usable} usable" + (f" of {present}" if usable != present else "")
    if usable >= 2:
        return Check("cores", "ok", found)
    return Check("cores", "warn", found, "give the process two cores or more: data and model share a single one")


def check_memory(available_bytes: int, cgroup_left_bytes: int | None) -> Check:
    """Memory that is left, on the machine or within the container's limit, whichever is less."""
    limited = cgroup_left_bytes is not None and cgroup_left_bytes < available_bytes
    left_bytes = available_bytes
    if limited:
        left_bytes = cgroup_left_bytes
    found = f"{left_bytes / _GIB:.1f} GiB available{' within the limit of the container' if limited else ''}"
    if left_bytes < 1 * _GIB:  # importing MindSpore takes 0.4 GiB, a small model as much again
        return Check("memory", "fail", found, "free 1 GiB at least: MindSpore alone takes almost half of it")
    if left_bytes < 4 * _GIB:
        return Check("memory", "warn", found, "enough for configs/quickstart.yaml; larger models want 4 GiB and more")
    return Check("memory", "ok", found)


def check_disk(output_dir: Path) -> Check:
    """Free space where the run will write, and whether it may write there."""
    existing = output_dir.absolute()
    while not os.path.exists(existing):  # unlike Path.exists, no error where a parent may not be read
        existing = existing.parent
    if not existing.is_dir():
        return Check("disk", "fail", f"{existing} is a file", "choose another output_dir")
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return Check("disk", "fail", f"{existing} is not writable", "choose another output_dir")
    free_bytes = shutil.disk_usage(existing).free
    found = f"{free_bytes / _GIB:.1f} GiB free for {output_dir}"
    if free_bytes < _GIB // 4:
        return Check("disk", "fail", found, "free 0.25 GiB at least, or choose another output_dir")
    if free_bytes < 2 * _GIB:
        return Check("disk", "warn", found, "enough for small models: a checkpoint takes 12 bytes a parameter")
    return Check("disk", "ok", found)


def check_msrun(executable_folder: Path, search_path: str) -> Check:
    """msrun itself starts workers with the first python on PATH; `launch` always uses the Python that runs it."""
    own = executable_folder / "msrun"
    if not own.exists():
        return Check("msrun", "warn", f"not beside {executable_folder}/python; only parallel runs need it",
                     "pip install -c constraints.txt mindspore, with this Python")
    python = shutil.which("python", path=search_path)
    if python is None or Path(python).parent.absolute() != executable_folder.absolute():
        found = f"{own}; called without `launch`, it uses the first python on PATH, {python or 'and there is none'}"
        return Check("msrun", "warn", found, f"source {executable_folder}/activate before calling msrun itself")
    return Check("msrun", "ok", str(own))


def check_deep() -> Check:
    command = [sys.executable, "-c", _DEEP_PROGRAM]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DEEP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        found = f"no answer within {_DEEP_TIMEOUT_SECONDS} s"
        return Check("MindSpore runs", "fail", found, "see whether the machine is busy")
    if result.returncode == 0:
        return Check("MindSpore runs", "ok", result.stdout.strip().splitlines()[-1])
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    see_all = 'to see all of it: python -c "import mindspore; mindspore.run_check()"'
    return Check("MindSpore runs", "fail", lines[-1], see_all)


def memory_left_bytes(root: Path = Path("/")) -> int:
    """Memory that is left, on the machine or within the container's limit, whichever is less."""
    limited = cgroup_memory_left_bytes(root)
    available = _available_memory_bytes()
    if limited is None:
        return available
    return min(available, limited)


def most_memory_bytes(root: Path = Path("/")) -> int:
    """What a process here can have at most: the memory of the machine, or the container's limit, and the swap space."""
    import psutil

    limits = [group.limit_bytes for group in _limited_groups(root)]
    return min([psutil.virtual_memory().total, *limits]) + psutil.swap_memory().total


def cgroup_memory_left_bytes(root: Path) -> int | None:
    """Memory left within the tightest limit on this process's control groups (version 1 or 2), or None without a limit.
    """
    return min((group.left_bytes for group in _limited_groups(root)), default=None)


class _Group(NamedTuple):
    """A control group with a limit on its memory."""

    limit_bytes: int
    left_bytes: int


def _limited_groups(root: Path) -> Iterator[_Group]:
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, own = membership.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
            limit = "memory.max"
            used = "memory.current"
            cached = "inactive_file"
        elif controllers == "memory":
            mount = root / "sys/fs/cgroup/memory"
            limit = "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        # Within a container the path is the host's and may not exist here; then the mount itself is the container's.
        groups = [mount / own.lstrip("/"), *(mount / own.lstrip("/")).parents]
        groups = [group for group in groups if group == mount or mount in group.parents]
        found = (_limited_group(group, limit, used, cached) for group in groups)
        yield from (group for group in found if group is not None)


def _limited_group(group: Path, limit_file: str, used_file: str, cached_field: str) -> _Group | None:
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / used_file).read_text())
        cached = re.search(rf"^{cached_field} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= _NO_LIMIT_BYTES:
        return None
    # The kernel gives back what it only caches of files before it calls a limit reached.
    return _Group(int(limit), max(0, int(limit) - used + (int(cached[1]) if cached else 0)))


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _available_memory_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available


def processor_name() -> str:
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
    return ""
