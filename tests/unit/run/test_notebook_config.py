"""What a notebook may give to `train`: mappings of any kind, and the numbers of NumPy."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import yaml
from config_helpers import BASE

from trainer.run.notebook import _load


def test_mappings_of_any_kind_with_numbers_of_numpy(tmp_path: Path):
    values = yaml.safe_load(BASE) | {"seed": np.int64(7), "optimizer": MappingProxyType({"eps": np.float32(0.5)}),
                                     "output_dir": tmp_path}  # fmt: skip
    loaded = _load(MappingProxyType(values), {})
    assert (loaded.seed, loaded.optimizer.eps, loaded.output_dir) == (7, 0.5, str(tmp_path))


def test_flags_with_numbers_of_numpy():
    flags = {"seed": np.int64(3), "do_eval": np.bool_(False), "optimizer.betas": [np.float32(0.5), 0.75]}
    loaded = _load(yaml.safe_load(BASE), flags)
    assert (loaded.seed, loaded.do_eval, loaded.optimizer.betas) == (3, False, [0.5, 0.75])
    assert _load(yaml.safe_load(BASE), {"optimizer.betas": np.array([0.5, 0.25])}).optimizer.betas == [0.5, 0.25]
