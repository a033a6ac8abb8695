"""Dtypes and kernels of Ascend's operators, as far as they are known without an Ascend. Pure Python.

The dtypes are those of MindSpore 2.10's documentation: `documented_by` names functions, whose docstrings a test reads.
The operators with a kernel are read from the Ascend libraries, which the Linux wheel of MindSpore contains even for
machines that cannot run them.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_ANY = frozenset({"float16", "bfloat16", "float"})
_HALF = frozenset({"float16", "bfloat16"})
_UNKNOWN: frozenset[str] = frozenset()
_INDEX = frozenset({"int32", "int64"})


class Support(NamedTuple):
    """Dtypes of an operator's inputs, with the names of exported files (`float` is float32)."""

    inputs: tuple[frozenset[str], ...]
    """The dtypes of each input; an empty set, or no set for the last inputs, if they are not documented."""
    alike: int
    """How many of the first inputs must have the same dtype."""
    documented_by: str
    """The function of `mindspore.ops` whose docstring documents the dtypes."""


SUPPORT: Mapping[str, Support] = {
    "RmsNorm": Support((_ANY, _ANY), 2, "rms_norm"),
    "RmsNormGrad": Support((_ANY,) * 4, 0, "rms_norm"),
    "RotaryPositionEmbedding": Support((_ANY,) * 3, 3, "rotary_position_embedding"),
    "RotaryPositionEmbeddingGrad": Support((_ANY,) * 3, 3, "rotary_position_embedding"),
    "Swiglu": Support((_ANY,), 0, "swiglu"),
    "SwigluGrad": Support((_ANY, _ANY), 2, "swiglu"),
    "FlashAttentionScore": Support((_HALF,) * 3 + (frozenset({"bool", "uint8"}),), 3, "flash_attention_score"),
    "FlashAttentionScoreGrad": Support((_HALF,) * 4, 4, "flash_attention_score"),
    "GroupedMatmulV4": Support((_ANY, _ANY, frozenset({"int64"})), 2, "grouped_matmul_v4"),
    "MoeTokenPermute": Support((_ANY, _INDEX), 0, "moe_token_permute"),
    "MoeTokenPermuteGrad": Support((_ANY, frozenset({"int32"})), 0, "moe_token_permute"),
    "InnerMoeTokenUnpermute": Support((_UNKNOWN, frozenset({"int32"})), 0, "moe_token_unpermute"),
    "MoeTokenUnpermuteGrad": Support((_UNKNOWN, _UNKNOWN, frozenset({"int32"})), 0, "moe_token_unpermute"),
}


def dtype_problem(operator: str, inputs: Sequence[str]) -> str:
    """Returns how the dtypes of these inputs differ from the documented ones; an empty text if they do not."""
    support = SUPPORT[operator]
    for number, (dtype, allowed) in enumerate(zip(inputs, support.inputs, strict=False), 1):
        if allowed and dtype not in allowed:
            return f"input {number} is {dtype}, documented: {', '.join(sorted(allowed))}"
    if len(set(inputs[: support.alike])) > 1:
        return f"the first {support.alike} inputs must have one dtype, here {', '.join(inputs[: support.alike])}"
    return ""


_KERNELS = "plugin/libmindspore_ops_ascend.so"
_FURTHER = ("plugin/ascend/libmindspore_ascend_res_manager.so", "plugin/libmindspore_ascend.so.2")
_ON_HOST = frozenset({"PyExecute", "PyInterpret", "PyFunc"})

KERNEL = "kernel"
CANN = "CANN"
HOST = "host"
NONE = "none"


def kernel_sources(operators: Collection[str], libraries: Path | None = None) -> dict[str, str] | None:
    """Finds out from MindSpore's folder `lib` what computes each operator on Ascend.

    Args:
        libraries: The folder. Default None: that of the installed MindSpore.

    Returns:
        None if the folder has no Ascend libraries. Otherwise for each operator "kernel" (a kernel of MindSpore calls
        CANN's function for it), "CANN" (MindSpore passes the operator to CANN, whose libraries decide whether it runs
        on the AI cores or on the AI CPUs of the device), "host" (Python) or "none" (the libraries do not mention it).
    """
    folder = libraries
    installed = importlib.util.find_spec("mindspore")
    if folder is None and installed and installed.origin:
        folder = Path(installed.origin).with_name("lib")
    if folder is None or not (folder / _KERNELS).is_file():
        return None
    kernels, known = _names_in(folder)

    def source(operator: str) -> str:
        """Returns where an operator runs: on the host, in a kernel, in CANN, or nowhere."""
        if operator in _ON_HOST:
            return HOST
        # A view (SplitWithSizeView) computes nothing; if it must copy, it uses the kernel of its operator.
        if {operator.lower(), operator.removesuffix("View").lower()} & kernels:
            return KERNEL
        if operator in known:
            return CANN
        return NONE

    return {operator: source(operator) for operator in operators}


@functools.cache
def _names_in(folder: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the operators with a kernel in the libraries, in lower case, and all operators that they mention."""
    kernels = (folder / _KERNELS).read_bytes()
    # Mangled names of kernel classes (their length, the name, "Ascend") and the names of CANN's functions.
    classes = re.findall(rb"\d([A-Z]\w*?)AscendE", kernels)
    functions = re.findall(rb"\0aclnn(\w+)(?=\0)", kernels)
    mentioned = {
        name
        for library in (_KERNELS, *_FURTHER)
        if (folder / library).is_file()
        for name in re.findall(rb"\0([A-Z]\w+)(?=\0)", (folder / library).read_bytes())
    }
    return frozenset(name.decode().lower() for name in classes + functions), frozenset(map(bytes.decode, mentioned))
