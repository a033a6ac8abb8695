"""Reading a configuration is quick: it brings in neither MindSpore nor numpy, nor does a plan of data elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = """
import contextlib, io, sys
import trainer.config, trainer.cli.flags, trainer.config.read.model_folder
from trainer.config import json_schema, load_config, dump_config
config = trainer.config.parse_config("a.yaml", "seed: 1")
dump_config(config)
json_schema()
print(*(name for name in ("mindspore", "numpy", "torch", "rich", "typer") if name in sys.modules))
from trainer.cli.main import dispatch
with contextlib.redirect_stdout(io.StringIO()):
    flags = ["--device_target", "Ascend", "--train_dataset_dir", "/nowhere"]
    assert dispatch(["plan", "--config", "configs/mindformers_llama.yaml", *flags]) == 0
print(*(name for name in ("mindspore", "numpy", "torch", "rich") if name in sys.modules))
"""


def test_the_configuration_and_a_plan_without_data_import_no_heavy_library():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_table_of_flags_does_not_even_need_the_schema():
    program = "import sys, trainer.cli.flags; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
