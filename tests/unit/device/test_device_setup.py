"""What a file sets on an Ascend reaches MindSpore, in order; a stand-in for its module tells, as there is no Ascend."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from test_device import Recorder, of_context

from trainer.device import resolve as device_room
from trainer.models import recompute
from trainer.parallel.world import World, world_of
from trainer.run import session


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    stand_in = Recorder()
    monkeypatch.setattr(device_room, "missing_for_ascend", lambda *_: [])
    monkeypatch.setattr(session, "mindspore", stand_in)
    session._make_calls.cache_clear()
    yield stand_in
    session._make_calls.cache_clear()


def set_up(text: str, world: World) -> None:
    session.set_up_device(of_context(text), "Ascend", world)


def test_device_first_then_its_settings_once(recorder: Recorder) -> None:
    text = "{device_id: 3, max_device_memory: 58GB, deterministic: 'ON', affinity_cpu_list: [0-3]}"
    set_up(text, world_of(1))
    expected = [
        ("set_device", ("Ascend", 3), {}),
        ("runtime.set_memory", (), {"max_size": "58GB"}),
        ("set_deterministic", (True,), {}),
        ("runtime.set_cpu_affinity", (True,), {"affinity_cpu_list": ["0-3"]}),
    ]
    names = [name for name, _, _ in recorder.calls]
    assert names[0] == "set_context" and recorder.calls[0][2].keys() == {"mode"}  # the one key that is not deprecated
    assert recorder.calls[1:] == expected
    set_up(text, world_of(1))  # a second session of one process: MindSpore takes memory and determinism only once
    assert [name for name, _, _ in recorder.calls[5:]] == ["set_context", "set_device"]


def test_a_rank_takes_its_own_device(recorder: Recorder) -> None:
    set_up("mode: 0", World(rank=13, size=16, local_rank=5, local_size=8))
    assert ("set_device", ("Ascend", 5), {}) in recorder.calls


def test_options_of_compilation_reach_every_block(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    seen, jit = [], mindspore.jit

    def recording(function, **options):
        seen.append(options)
        return jit(function)

    monkeypatch.setattr(recompute.mindspore, "jit", recording)
    from trainer.ops.kernel_set import load_kernels
    from trainer.ops.select import select_kernels

    config = of_context("jit_config: {jit_level: O1, exec_order: dfs}")
    kernels = load_kernels(select_kernels(config.decoder, "CPU"))
    session.build_model(config, kernels, "Ascend")
    assert len(seen) >= 2 and all(options == {"jit_level": "O1", "exec_order": "dfs"} for options in seen)
    seen.clear()
    session.build_model(config, kernels, "CPU")
    assert len(seen) >= 2 and not any(seen)


def test_mindspore_takes_the_options() -> None:
    """On a CPU they change nothing that was measured; the block computes the same."""
    run = recompute.compile_cell(nn.ReLU(), {"jit_level": "O1", "exec_order": "dfs"})
    assert run(Tensor(np.array([-1.0, 2.0], np.float32))).asnumpy().tolist() == [0.0, 2.0]
