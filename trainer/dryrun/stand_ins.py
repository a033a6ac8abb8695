"""Builds the libraries that stand in for CANN's, once for each version of their sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import RunError, UserError

SOURCES = Path(__file__).resolve().parent / "native"
LIBRARY = "libascend_stand_ins.so"
_COMPILER = "g++"
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-D_GLIBCXX_USE_CXX11_ABI=0")  # MindSpore's ABI
# The libraries of CANN that MindSpore's load; all of them are this one.
_NAMES = (
    "acl_dvpp", "acl_dvpp_mpi", "acl_dvpp_op", "acl_mdl", "acl_op_compiler", "acl_tdt_channel", "ascend_hal",
    "ascendalog", "ascendcl", "atb", "c_sec", "ge_runner", "graph", "hccl", "mmpa", "msprofiler", "nnopbase",
    "platform", "profapi", "register", "runtime",
)  # fmt: skip
# Constructors of GE's objects that MindSpore reads afterwards.
_OBJECTS = frozenset((
    "_ZN2ge13AscendStringC1EPKc", "_ZN2ge12AscendStringC1EPKc",
    "_ZN2ge10TensorTypeC1ERKSt16initializer_listINS_8DataTypeEE",
))  # fmt: skip
_TOOLKIT = "cann"  # MindSpore looks for CANN's folder by this name, in the path of the library
# MindSpore's Python package asks for the version of CANN there.
_VERSION_FILE = Path("python/hccl/sys_version.py")
_VERSION = "__sys_version__ = '8.5.0'\n"


def missing_compiler() -> str:
    """Why the libraries cannot be built here; empty where they can be."""
    if shutil.which(_COMPILER):
        return ""
    return f"a dry run builds small libraries with {_COMPILER}, which is not here"


def stand_ins(cache: Path | None = None) -> Path:
    """The folder that looks like CANN's to MindSpore; built where it is not there yet, which takes a few seconds.

    Raises:
        UserError: There is no compiler.
        RunError: It cannot build them.
    """
    if cache is None:
        cache = cache_folder(os.environ)
    digest = hashlib.sha256(" ".join((*_FLAGS, *_NAMES, _VERSION)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    folder = cache / f"ascend-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder / _TOOLKIT
    if missing := missing_compiler():
        raise UserError(missing, key="--dryrun", fix="install it, for example with apt-get install g++")
    cache.mkdir(parents=True, exist_ok=True)
    # Two processes may build at once: each builds in a folder of its own, and the first one to end gives it its name.
    with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as name:
        building = Path(name) / "ascend"
        _build(building / _TOOLKIT)
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder / _TOOLKIT


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where libraries are kept from run to run."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "run_trainer"


def _build(folder: Path) -> None:
    libraries = folder / "lib64"
    libraries.mkdir(parents=True)
    (folder / "opp").mkdir()
    (folder / _VERSION_FILE).parent.mkdir(parents=True)
    (folder / _VERSION_FILE).write_text(_VERSION)
    (folder / _VERSION_FILE).with_name("__init__.py").touch()
    symbols = folder / "symbols.cc"
    symbols.write_text("\n".join(map(_alias, (SOURCES / "symbols.txt").read_text().split())) + "\n")
    # One source: an alias can only be made of what is defined beside it.
    source = folder / "all.cc"
    source.write_text(f'#include "{SOURCES / "stand_ins.cc"}"\n#include "symbols.cc"\n')
    command = [_COMPILER, *_FLAGS, "-o", str(libraries / LIBRARY), str(source), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        if lines:
            text = lines[0]
        else:
            text = f"exit code {result.returncode}"
        raise RunError(f"{_COMPILER} cannot build the libraries of a dry run: {text}", fix="use GCC 9 or later")
    for name in _NAMES:
        (libraries / f"lib{name}.so").symlink_to(LIBRARY)


def _alias(symbol: str) -> str:
    """C++ source that makes a symbol another name of a function that does nothing."""
    return f'asm(".globl {symbol}\\n.set {symbol}, {"stand_in_object" if symbol in _OBJECTS else "stand_in"}\\n");'
