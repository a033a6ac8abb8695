"""The calls of MindSpore 2.10 that the section `context` makes on an Ascend. Pure Python, so that `plan` shows them.

`mindspore.set_context` takes the same keys and warns for each that it will be removed; the calls here are those that it
recommends instead.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

_MEMORY = {"max_device_memory": "max_size", "mempool_block_size": "increase_size"}
_SIZE = re.compile(r"(?:[1-9]\d*(?:\.\d+)?|0\.\d*[1-9]\d*)GB")
_PRECISION = "device_context.ascend.op_precision"
_ASCEND = "device_context.ascend"
_ASCEND_CONFIG = {
    "precision_mode": f"{_PRECISION}.precision_mode",
    "op_precision_mode": f"{_PRECISION}.op_precision_mode",
    "matmul_allow_hf32": f"{_PRECISION}.matmul_allow_hf32",
    "conv_allow_hf32": f"{_PRECISION}.conv_allow_hf32",
    "jit_compile": f"{_ASCEND}.op_tuning.op_compile",
    "op_debug_option": f"{_ASCEND}.op_debug.debug_option",
}
_TEXTS: dict[str, tuple[str, ...]] = {
    "precision_mode": (
        "must_keep_origin_dtype", "force_fp16", "force_fp32", "allow_fp32_to_fp16", "allow_fp32_to_bf16",
        "allow_mix_precision", "allow_mix_precision_fp16", "allow_mix_precision_bf16",
    ),
    "op_precision_mode": (),
    "op_debug_option": ("oom",),
}  # fmt: skip
"""The keys of `ascend_config` whose value is a text, and the values that MindSpore takes; none: any, a path."""
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_DEVICE = re.compile(r"device\d+")
SPEED_UP_KEY = "parallel_speed_up_json_path"
"""How communication overlaps with computation: semi-automatic mode hands it to MindSpore."""
_JIT = {"jit_level": ("O0", "O1"), "exec_order": ("bfs", "dfs")}
_KEYS = (
    *_MEMORY, "memory_optimize_level", "deterministic", "max_call_depth", "inter_op_parallel_num",
    "runtime_num_threads", "pynative_synchronize", "affinity_cpu_list", "ascend_config", "jit_config", *_JIT,
)  # fmt: skip


@dataclass(frozen=True)
class DeviceCall:
    """A call of MindSpore: its name below `mindspore`, and its arguments as (name, value), "" for a positional one."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:  # arguments may be lists
        return hash(str(self))

    def __str__(self) -> str:
        positional = [repr(value) for name, value in self.arguments if not name]
        named = [f"{name}={value!r}" for name, value in self.arguments if name]
        return f"{self.name}({', '.join([*positional, *named])})"

    def make(self, mindspore: ModuleType) -> None:
        """Calls the function of MindSpore."""
        function: Any = functools.reduce(getattr, self.name.split("."), mindspore)
        function(
            *(value for name, value in self.arguments if not name),
            **{name: value for name, value in self.arguments if name},
        )


def device_calls(config: Config, device: str) -> tuple[DeviceCall, ...]:
    """Returns the calls to make before anything runs on the device, in order; empty for all devices but an Ascend.

    Raises:
        UserError: A value that MindSpore would refuse.
    """
    if device != "Ascend":
        return ()
    context = config.context
    deterministic = None
    if context.deterministic is not None:
        deterministic = context.deterministic == "ON"
    single = {  # calls with one value
        "set_deterministic": deterministic,
        "set_recursion_limit": context.max_call_depth,
        "runtime.dispatch_threads_num": context.inter_op_parallel_num or None,
        "device_context.cpu.op_tuning.threads_num": context.runtime_num_threads or None,
    }
    calls = _memory(config)
    calls += [DeviceCall(name, (("", value),)) for name, value in single.items() if value is not None]
    if context.pynative_synchronize:
        calls.append(DeviceCall("runtime.launch_blocking"))
    return (*calls, *_affinity(config), *_ascend(config))


def jit_options(config: Config, device: str) -> dict[str, str]:
    """Returns the options of `mindspore.jit` for each compiled block; empty for all devices but an Ascend.

    Raises:
        UserError: `jit_config` has an option that MindSpore does not support, or conflicts with another key.
    """
    if device != "Ascend":
        return {}
    context = config.context
    options = {}
    for name, value in (context.jit_config or {}).items():
        if name not in _JIT:
            raise _error(config, "jit_config", context.jit_config, f"{name} is not {' or '.join(_JIT)}", "remove it")
        options[name] = value
    for name, value in (("jit_level", context.jit_level), ("exec_order", context.exec_order)):
        if value is not None and options.setdefault(name, value) != value:
            rule = f"conflicts with {name} {options[name]} in jit_config"
            raise _error(config, name, value, rule, "remove one of the two")
    for name, value in options.items():
        if value not in _JIT[name]:
            key = "jit_config"
            if getattr(context, name) is not None:
                key = name
            rule = f"{name} of mindspore.jit is one of {', '.join(_JIT[name])}"
            raise _error(config, key, getattr(context, key), rule, f"write {_JIT[name][-1]}")
    return options


def unused_keys(config: Config, device: str) -> list[str]:
    """Returns the keys that are set and have no effect on this device, with their locations."""
    if device == "Ascend":
        return []
    context = config.context
    fields = type(config.context).model_fields
    names = [name for name in _KEYS if getattr(context, name) != fields[name].default]
    unused = []
    for name in names:
        key = f"context.{name}"
        if location := config.source.where(key):
            key += f" ({location})"
        unused.append(key)
    return unused


def _memory(config: Config) -> list[DeviceCall]:
    """Returns one call for all keys of memory: MindSpore refuses a second one."""
    arguments = []
    for key, name in _MEMORY.items():
        size = getattr(config.context, key)
        if size is None:
            continue
        if not _SIZE.fullmatch(size):
            raise _error(config, key, size, "must be a number of gigabytes", "write for example 58GB")
        arguments.append((name, size))
    if config.context.memory_optimize_level is not None:
        arguments.append(("optimize_level", config.context.memory_optimize_level))
    if arguments:
        return [DeviceCall("runtime.set_memory", tuple(arguments))]
    return []


def _affinity(config: Config) -> list[DeviceCall]:
    """Returns the call that binds threads to cores: chosen by MindSpore, of all threads, or of those of a module."""
    cores = config.context.affinity_cpu_list
    if cores is None or cores == "":
        return []
    name = "runtime.set_cpu_affinity"
    if isinstance(cores, bool):
        return [DeviceCall(name, (("", cores),))]
    if isinstance(cores, str):
        cores = [cores]
    key = "affinity_cpu_list"
    fits = True
    if isinstance(cores, list):
        fits = _are_cores(cores)
    elif cores and all(map(_DEVICE.fullmatch, cores)):
        fits = all(map(_are_cores, cores.values()))
    else:
        key = "module_to_cpu_dict"
        fits = all(map(_are_numbers, cores.values()))
    if not fits:
        rule = "must be true or false, a list of ranges, such lists for devices, or lists of numbers for modules"
        fix = "write for example ['0-3', '8-11'], {device0: ['0-3']} or {main: [0, 1]}"
        raise _error(config, "affinity_cpu_list", config.context.affinity_cpu_list, rule, fix)
    return [DeviceCall(name, (("", True), (key, cores)))]


def _are_cores(value: Any) -> bool:
    """Returns whether a value is a list of ranges of cores, as MindSpore reads them."""
    return isinstance(value, list) and all(isinstance(each, str) and _CORES.fullmatch(each) for each in value)


def _are_numbers(value: Any) -> bool:
    """Returns whether a value is a list of numbers of cores."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _ascend(config: Config) -> list[DeviceCall]:
    calls = []
    for name, written in (config.context.ascend_config or {}).items():
        key = f"ascend_config.{name}"
        if name == SPEED_UP_KEY:
            continue
        if name not in _ASCEND_CONFIG:
            known = ", ".join(_ASCEND_CONFIG)
            rule = f"MindSpore 2.10 does not support it; supported keys are {known}"
            raise _error(config, key, written, rule, "remove it")
        value = written
        rule = ""
        if name not in _TEXTS:
            if value not in (0, 1, "0", "1"):
                rule = "must be true or false"
            value = value in (1, "1")
        elif not isinstance(value, str):
            rule = "must be a string"
        elif _TEXTS[name] and value not in _TEXTS[name]:
            rule = f"must be one of {', '.join(_TEXTS[name])}"
        if rule:
            raise _error(config, key, written, rule, "correct the value")
        calls.append(DeviceCall(_ASCEND_CONFIG[name], (("", value),)))
    return calls


def _error(config: Config, name: str, value: object, rule: str, fix: str) -> UserError:
    key = f"context.{name}"
    where = config.source.where(key) or config.source.where(key.rpartition(".")[0])
    return UserError(rule, where=where, key=key, value=value, fix=fix)
