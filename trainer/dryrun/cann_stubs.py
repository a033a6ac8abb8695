"""Builds stubs of CANN's libraries, once for each version of their sources."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from trainer.errors import RunError, UserError
from trainer.storage.cache_folder import build_once, user_cache

SOURCES = Path(__file__).resolve().parent / "native"
LIBRARY = "libascend_stand_ins.so"
_COMPILER = "g++"
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-D_GLIBCXX_USE_CXX11_ABI=0")  # MindSpore's ABI
# The libraries of CANN that MindSpore's libraries load; each name is a link to the one library that is built.
_NAMES = (
    "acl_dvpp", "acl_dvpp_mpi", "acl_dvpp_op", "acl_mdl", "acl_op_compiler", "acl_tdt_channel", "ascend_hal",
    "ascendalog", "ascendcl", "atb", "c_sec", "ge_runner", "graph", "hccl", "mmpa", "msprofiler", "nnopbase",
    "platform", "profapi", "register", "runtime",
)  # fmt: skip
# Constructors of objects of GE that MindSpore reads.
_OBJECTS = frozenset((
    "_ZN2ge13AscendStringC1EPKc", "_ZN2ge12AscendStringC1EPKc",
    "_ZN2ge10TensorTypeC1ERKSt16initializer_listINS_8DataTypeEE",
))  # fmt: skip
_TOOLKIT = "cann"  # MindSpore finds CANN's folder by this name in the path of the library
# MindSpore's Python package reads the version of CANN from this file.
_VERSION_FILE = Path("python/hccl/sys_version.py")
_VERSION = "__sys_version__ = '8.5.0'\n"


def missing_compiler() -> str:
    """Returns why the libraries cannot be built on this machine; an empty text if they can."""
    if shutil.which(_COMPILER):
        return ""
    return f"a dry run builds small libraries with {_COMPILER}, which is not installed"


def build_cann_stubs(cache: Path | None = None) -> Path:
    """Returns a folder with stubs that MindSpore takes for CANN. Builds them first if necessary, in a few seconds.

    Args:
        cache: The folder in which they are kept. Default None: that of the user.

    Raises:
        UserError: There is no compiler.
        RunError: The compiler fails.
    """
    if cache is None:
        cache = user_cache()
    digest = hashlib.sha256(" ".join((*_FLAGS, *_NAMES, _VERSION)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    folder = cache / f"ascend-{digest.hexdigest()[:16]}"
    missing = missing_compiler()
    if missing and not folder.is_dir():
        raise UserError(missing, key="--dryrun", fix="install it, for example with apt-get install g++")
    build_once(folder, lambda path: _build(path / _TOOLKIT))
    return folder / _TOOLKIT


def _build(folder: Path) -> None:
    libraries = folder / "lib64"
    libraries.mkdir(parents=True)
    (folder / "opp").mkdir()
    (folder / _VERSION_FILE).parent.mkdir(parents=True)
    (folder / _VERSION_FILE).write_text(_VERSION)
    (folder / _VERSION_FILE).with_name("__init__.py").touch()
    symbols = folder / "symbols.cc"
    symbols.write_text("\n".join(map(_alias, (SOURCES / "symbols.txt").read_text().split())) + "\n")
    # One source, because an alias needs a function that is defined in the same source.
    source = folder / "all.cc"
    source.write_text(f'#include "{SOURCES / "stand_ins.cc"}"\n#include "symbols.cc"\n')
    command = [_COMPILER, *_FLAGS, "-o", str(libraries / LIBRARY), str(source), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        text = f"exit code {result.returncode}"
        if lines:
            text = lines[0]
        raise RunError(f"{_COMPILER} cannot build the libraries of a dry run: {text}", fix="use GCC 9 or later")
    for name in _NAMES:
        (libraries / f"lib{name}.so").symlink_to(LIBRARY)


def _alias(symbol: str) -> str:
    """Returns C++ source that makes a symbol an alias of a function without effect."""
    function = "stand_in"
    if symbol in _OBJECTS:
        function = "stand_in_object"
    return f'asm(".globl {symbol}\\n.set {symbol}, {function}\\n");'
