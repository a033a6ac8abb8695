"""The device of a run: what is missing for the one that is asked for, and by which of MindSpore's calls it is set."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_helpers import BASE, failure, load
from fork_server import FORKED, ensure_server

from trainer.config import Config
from trainer.device import doctor, settings
from trainer.device import resolve as device_room
from trainer.device.resolve import device_notes, resolve_device
from trainer.device.settings import DeviceCall, device_calls, jit_options
from trainer.run.prepare import build_plan

MISSING = ["no card (/dev/davinci0)", "no CANN libraries (/usr/local/Ascend, ASCEND_HOME_PATH)"]


@pytest.fixture
def with_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_room, "missing_for_ascend", lambda *_: [])


@pytest.fixture
def without_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_room, "missing_for_ascend", lambda *_: MISSING)
    monkeypatch.setattr(device_room, "find_ascend", lambda *_: doctor.AscendParts(0, False, False))


def told(config: Config) -> str:
    return "\n".join(device_notes(config, resolve_device(config)))


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_ascend")
def test_the_best_there_is_without_an_ascend() -> None:
    assert resolve_device(load(BASE)) == "CPU"
    assert resolve_device(load(BASE, "context.device_target=CPU")) == "CPU"
    assert told(load(BASE)) == ""


@pytest.mark.usefixtures("with_ascend")
def test_the_best_there_is_with_an_ascend() -> None:
    assert resolve_device(load(BASE)) == "Ascend"
    assert resolve_device(load(BASE, "context.device_target=CPU")) == "CPU"
    assert resolve_device(load(BASE, "context.device_target=Ascend", "context.device_fallback=True")) == "Ascend"
    assert "device_fallback: not used" in told(load(BASE, "context.device_fallback=True"))


@pytest.mark.usefixtures("without_ascend")
@pytest.mark.parametrize(("wanted", "words"), [("Ascend", MISSING), ("GPU", ["no GPU kernels"])])
def test_what_is_not_there(wanted: str, words: list[str]) -> None:
    config = load(BASE, f"context.device_target={wanted}")
    message = failure(lambda: resolve_device(config))
    assert f"context.device_target = '{wanted}'" in message and message.startswith("flag --context.device_target")
    for word in (*words, "use --device_target CPU", "--device_fallback", "doctor"):
        assert word in message
    config = load(BASE, f"context.device_target={wanted}", "context.device_fallback=True")
    assert resolve_device(config) == "CPU"
    assert told(config).startswith(f"context.device_target {wanted}: ")
    assert "the run uses the CPU (device_fallback)" in told(config)
    plan = build_plan(config)
    assert plan.device == "CPU" and any("device_fallback" in note for note in plan.notes)


@pytest.mark.usefixtures("without_ascend")
def test_an_ascend_that_is_not_whole_is_not_silently_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_room, "find_ascend", lambda *_: doctor.AscendParts(8, True, False))
    assert resolve_device(load(BASE)) == "CPU"
    assert "no CANN libraries" in told(load(BASE)) and told(load(BASE)).endswith("the run uses the CPU")


def test_what_is_missing_for_an_ascend(tmp_path: Path) -> None:
    """Lists what `doctor` looks for: card, driver, CANN, MindSpore's plugin."""
    package, nothing = tmp_path / "mindspore", {"PATH": str(tmp_path)}

    def missing(environment: dict[str, str] | None = None) -> list[str]:
        words = doctor.missing_for_ascend(tmp_path, environment or nothing, package)
        return [word.split(" (")[0] for word in words]

    assert missing() == ["no card", "no driver", "no CANN libraries", "no Ascend plugin in the mindspore package"]
    (package / "lib/plugin").mkdir(parents=True)
    (package / "lib/plugin/libmindspore_ascend.so.2").touch()
    assert missing() == ["no card", "no driver", "no CANN libraries"]
    assert missing(nothing | {"ASCEND_HOME_PATH": "/opt/cann"}) == ["no card", "no driver"]
    (tmp_path / "usr/local/Ascend/driver").mkdir(parents=True)
    assert missing() == ["no card"]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci_manager").touch()
    assert missing() == ["no card"]
    (tmp_path / "dev/davinci0").touch()
    assert missing() == []
    assert doctor.check_device(tmp_path, nothing).verdict == "ok"


# ---- the settings ----------------------------------------------------------------------------------------------------

# Key and value of the file -> the calls that it becomes, as a stand-in records them.
SETTINGS = {
    "max_device_memory: 58GB": [("runtime.set_memory", (), {"max_size": "58GB"})],
    "{max_device_memory: 58GB, mempool_block_size: 1.5GB, memory_optimize_level: O1}": [
        ("runtime.set_memory", (), {"max_size": "58GB", "increase_size": "1.5GB", "optimize_level": "O1"})
    ],
    "deterministic: 'ON'": [("set_deterministic", (True,), {})],
    "deterministic: 'OFF'": [("set_deterministic", (False,), {})],
    "max_call_depth: 10000": [("set_recursion_limit", (10000,), {})],
    "inter_op_parallel_num: 4": [("runtime.dispatch_threads_num", (4,), {})],
    "runtime_num_threads: 8": [("device_context.cpu.op_tuning.threads_num", (8,), {})],
    "pynative_synchronize: True": [("runtime.launch_blocking", (), {})],
    "affinity_cpu_list: True": [("runtime.set_cpu_affinity", (True,), {})],
    "affinity_cpu_list: [0-3, 8-11]": [("runtime.set_cpu_affinity", (True,), {"affinity_cpu_list": ["0-3", "8-11"]})],
    "affinity_cpu_list: 0-3": [("runtime.set_cpu_affinity", (True,), {"affinity_cpu_list": ["0-3"]})],
    "affinity_cpu_list: {main: [0]}": [("runtime.set_cpu_affinity", (True,), {"module_to_cpu_dict": {"main": [0]}})],
    "affinity_cpu_list: {device0: ['0-3']}": [
        ("runtime.set_cpu_affinity", (True,), {"affinity_cpu_list": {"device0": ["0-3"]}})
    ],
    "ascend_config: {precision_mode: must_keep_origin_dtype}": [
        ("device_context.ascend.op_precision.precision_mode", ("must_keep_origin_dtype",), {})
    ],
    "ascend_config: {op_precision_mode: a.ini}": [
        ("device_context.ascend.op_precision.op_precision_mode", ("a.ini",), {})
    ],
    "ascend_config: {matmul_allow_hf32: True}": [
        ("device_context.ascend.op_precision.matmul_allow_hf32", (True,), {})
    ],
    "ascend_config: {conv_allow_hf32: 0}": [("device_context.ascend.op_precision.conv_allow_hf32", (False,), {})],
    "ascend_config: {jit_compile: True}": [("device_context.ascend.op_tuning.op_compile", (True,), {})],
    "ascend_config: {op_debug_option: oom}": [("device_context.ascend.op_debug.debug_option", ("oom",), {})],
}  # fmt: skip


class Recorder(SimpleNamespace):
    """Stands in for the module mindspore: whatever is called below it is written down."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def __getattr__(self, name: str) -> _Named:
        return _Named(self, name)


class _Named:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __getattr__(self, name: str) -> _Named:
        return _Named(self.recorder, f"{self.name}.{name}")

    def __call__(self, *arguments: object, **named: object) -> None:
        self.recorder.calls.append((self.name, arguments, named))


def of_context(text: str) -> Config:
    text = text if text.startswith("{") else f"{{{text}}}"
    return load(f"{BASE}context: {text}\n")


@pytest.mark.usefixtures("with_ascend")
@pytest.mark.parametrize("text", SETTINGS)
def test_each_key_arrives_at_its_call(text: str) -> None:
    config, recorder = of_context(text), Recorder()
    for call in device_calls(config, resolve_device(config)):
        call.make(recorder)
    assert recorder.calls == SETTINGS[text]
    assert f"context: set with {SETTINGS[text][0][0]}(" in told(config)


@pytest.mark.usefixtures("with_ascend")
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("jit_config: {jit_level: O1}", {"jit_level": "O1"}),
        ("jit_config: {jit_level: O0, exec_order: dfs}", {"jit_level": "O0", "exec_order": "dfs"}),
        ("jit_level: O1, exec_order: bfs", {"jit_level": "O1", "exec_order": "bfs"}),
        ("jit_config: {jit_level: O1}, jit_level: O1", {"jit_level": "O1"}),
        ("mode: 0", {}),
    ],
)
def test_the_options_of_compilation(text: str, options: dict[str, str]) -> None:
    config = of_context(text)
    assert jit_options(config, resolve_device(config)) == options
    assert all(f"mindspore.jit {name}={value}" in told(config) for name, value in options.items())


@pytest.mark.usefixtures("without_ascend")
@pytest.mark.parametrize("text", [*SETTINGS, "jit_config: {jit_level: O2}", "jit_level: O2"])
def test_on_a_cpu_none_of_them_acts_and_that_is_told(text: str) -> None:
    config = of_context(text)
    assert device_calls(config, resolve_device(config)) == () and jit_options(config, "CPU") == {}
    key = text.strip("{").split(":")[0]
    assert f"ignored: context.{key} (a.yaml:" in told(config) and told(config).endswith("only Ascend devices have it")


@pytest.mark.usefixtures("with_ascend")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_device_memory: 58", ["context.max_device_memory = '58'", "gigabytes", "58GB"]),
        ("mempool_block_size: 0GB", ["context.mempool_block_size", "gigabytes"]),
        ("jit_config: {jit_level: O2}", ["context.jit_config", "one of O0, O1", "write O1"]),
        ("jit_level: O2", ["context.jit_level = 'O2'", "one of O0, O1"]),
        ("exec_order: gpto", ["context.exec_order = 'gpto'", "bfs, dfs"]),
        ("jit_config: {infer_boost: True}", ["context.jit_config", "infer_boost is not jit_level or exec_order"]),
        ("jit_config: {jit_level: O1}, jit_level: O0", ["context.jit_level = 'O0'", "conflicts with jit_level O1"]),
        ("ascend_config: {atomic_clean_policy: a}", ["supported keys are precision_mode,", "remove"]),
        ("ascend_config: {jit_compile: maybe}", ["context.ascend_config.jit_compile = 'maybe'", "true or false"]),
        ("ascend_config: {precision_mode: 1}", ["context.ascend_config.precision_mode = 1", "must be a string"]),
        ("ascend_config: {precision_mode: fp16}", ["context.ascend_config.precision_mode = 'fp16'", "force_fp16,"]),
        ("ascend_config: {op_debug_option: all}", ["context.ascend_config.op_debug_option = 'all'", "one of oom"]),
        ("affinity_cpu_list: [0, 1]", ["context.affinity_cpu_list = [0, 1]", "['0-3', '8-11']"]),
        ("affinity_cpu_list: 0-", ["context.affinity_cpu_list = '0-'", "a list of ranges"]),
        ("affinity_cpu_list: {device0: 0-3}", ["context.affinity_cpu_list = {'device0': '0-3'}", "for devices"]),
        ("affinity_cpu_list: {main: 0-3}", ["context.affinity_cpu_list = {'main': '0-3'}", "numbers for modules"]),
    ],
)
def test_values_that_mindspore_would_refuse(text: str, words: list[str]) -> None:
    config = of_context(text.replace("max_device_memory: 58", "max_device_memory: '58'"))
    message = failure(lambda: resolve_device(config))
    assert message.startswith("a.yaml:")
    for word in words:
        assert word in message, message


# ---- against the installed MindSpore ---------------------------------------------------------------------------------


def installed(path: str) -> str:
    """Returns the source of a module of the installed package, which is not imported."""
    spec = importlib.util.find_spec("mindspore")
    return (Path(spec.origin).parent / path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_call_exists_takes_its_arguments_and_is_current(tmp_path: Path) -> None:
    """In a process of its own: this one stays without MindSpore. A call is looked at and not made."""
    calls = sorted({(name, len(places), *named) for found in SETTINGS.values() for name, places, named in found})
    program = """if True:
        import functools, inspect, sys, mindspore
        for name, places, *named in eval(sys.argv[1]):
            function = functools.reduce(getattr, name.split("."), mindspore)
            inspect.signature(inspect.unwrap(function)).bind(*range(places), **dict.fromkeys(named))
            text = (inspect.getdoc(function) or "").lower()
            assert text and "deprecated" not in text, name
        options = inspect.signature(mindspore.jit).parameters
        assert "jit_level" in options and "exec_order" in mindspore.jit.__doc__
    """
    import subprocess

    ensure_server()
    (tmp_path / "look.py").write_text(program)
    command = [sys.executable, FORKED, tmp_path / "look.py", repr(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_values_are_those_that_mindspore_checks() -> None:
    source = installed("device_context/ascend/op_precision.py")
    start = source.index("supported_modes = [")
    modes = eval(source[source.index("[", start) : source.index("]", start) + 1])  # noqa: S307
    assert sorted(settings._TEXTS["precision_mode"]) == sorted(modes)
    assert 'valid_order = {"oom"}' in installed("device_context/ascend/op_debug.py")
    assert "affinity_cpu_list.get(device_key" in installed("runtime/thread_bind_core.py")


def test_set_context_itself_names_these_calls() -> None:
    """Reads the deprecation messages of set_context, which name the calls that replace its keys."""
    source = installed("context.py")
    start = source.index("deprecated_context_dict = {")
    table = eval(source[source.index("{", start) : source.index("}", start) + 1])  # noqa: S307
    ours: dict[str, set[str]] = {}
    for text, found in SETTINGS.items():
        ours.setdefault(text.strip("{").split(":")[0], set()).update(f"mindspore.{name}()" for name, _, _ in found)
    both = [key for key, instead in table.items() if key in ours and instead]
    assert {"max_device_memory", "deterministic", "max_call_depth", "ascend_config"} <= set(both)
    for key in both:
        assert any(name in table[key] for name in ours[key]), key


def test_a_call_in_words() -> None:
    assert str(DeviceCall("set_deterministic", (("", True),))) == "set_deterministic(True)"
    assert str(DeviceCall("runtime.set_memory", (("max_size", "58GB"),))) == "runtime.set_memory(max_size='58GB')"
    assert inspect.signature(DeviceCall.make).parameters.keys() == {"self", "mindspore"}
