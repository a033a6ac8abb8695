"""A real run with records of its training state: what TensorBoard's file has is what metrics.jsonl and the checkpoint
have."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from event_files import read_events
from run_helpers import arrays_of, column, eval_records, step_records, train_and_read, write_config
from tolerances import rounding_limit


@pytest.mark.slow
def test_records_of_a_run_are_its_numbers(home: Path):
    records = {
        "monitor_on": True, "step_interval": 3, "target": ["layers.1"], "local_norm_format": "tensorboard",
        "optimizer_state_format": "tensorboard", "weight_state_format": ["log", "tensorboard"],
    }  # fmt: skip
    tensorboard = {"tensorboard_dir": str(home / "events"), "log_timers_to_tensorboard": True}
    changes = {"monitor_config": records, "tensorboard": tensorboard, "do_eval": True, "runner_config.stop_step": 6}
    output, printed = train_and_read(write_config(home / "records", home / "data", changes))
    (path,) = (home / "events" / "rank_0").iterdir()
    found, steps = read_events(path).scalars, step_records(output)
    for tag, name in (("loss", "loss"), ("learning-rate", "lr"), ("grad-norm", "global_norm")):
        assert found[tag] == [(record["step"], np.float32(record[name])) for record in steps], tag
        assert [place for place, _ in found[f"{tag} vs samples"]] == [4 * step for step in range(1, 7)]
    losses = column(eval_records(output), "eval_loss")
    assert [value for _, value in found["eval-loss"]] == [np.float32(loss) for loss in losses]
    arrays = arrays_of(output)
    weights = {name: array for name, array in arrays.items() if name.startswith("model/")}
    norm = math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in weights.values()))
    limit = rounding_limit(sum(array.size for array in weights.values()), scale=0.5)
    assert found["weight_norm"][-1] == (6, pytest.approx(norm, rel=limit))
    assert printed.count(" weight_norm: ") == 2 and "local_norm/" not in printed
    for tag, kind in (("adam_m_norm", "exp_avg"), ("adam_v_norm", "exp_avg_sq")):
        names = [name.removeprefix(f"{tag}/") for name in found if name.startswith(f"{tag}/")]
        assert len(names) == 9 and all("layers.1" in name for name in names)
        for name in names:
            array = arrays[f"optimizer/{kind}.{name}"]
            norm = math.sqrt(float(np.square(array, dtype=np.float64).sum()))
            assert found[f"{tag}/{name}"][-1] == (6, pytest.approx(norm, rel=limit))
    assert len([name for name in found if name.startswith("local_norm/")]) == 9
    assert steps[5]["local_norm"].keys() == steps[5]["adam_m_norm"].keys()


def test_print_struct_names_the_parameters_and_makes_no_step(home: Path):
    changes = {"monitor_config": {"monitor_on": True, "print_struct": True}}
    output, printed = train_and_read(write_config(home / "struct", home / "data", changes))
    assert "\nmodel.layers.1.self_attn.q_proj.weight\n" in printed and not (output / "metrics.jsonl").exists()
