#!/usr/bin/env python3
"""Proves that transformers loads what the trainer exports: same logits, no missing or unexpected tensors, tokenizer.

    torch-env/bin/python scripts/check_folders.py --trainer .venv/bin/python                   # golden models, exported
    torch-env/bin/python scripts/check_folders.py output/quickstart/checkpoints/step-00000100  # these folders

The environment is that of make_golden.py. `--trainer` names the Python that run_trainer.py runs with. Exit code 1 on a
difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from golden_models import forward
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import golden_files  # noqa: E402  (beside the tests, which must run without torch)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}
TEXT = "It costs 5 \N{EURO SIGN}.\n\tTwo  spaces<|endoftext|>next"


def load(folder: Path) -> tuple[torch.nn.Module, list[str]]:
    """Loads the model of a folder with transformers; returns it with the problems of its tensors and tokenizer."""
    how = {"output_loading_info": True, "attn_implementation": "eager"}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **how)
    found = [f"{kind}: {sorted(names)[:3]}" for kind, names in info.items() if names]
    return model.eval(), found + (tokenizer_problems(folder) if (folder / "tokenizer.json").exists() else [])


def tokenizer_problems(folder: Path) -> list[str]:
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids) != TEXT:
        found.append(f"the tokenizer makes {tokenizer.decode(ids)!r} of {TEXT!r}")
    if len(tokenizer) == 257 and ids != [*TEXT.split("<|")[0].encode(), 256, *b"next"]:
        found.append(f"the ids of bytes are {ids}")
    if tokenizer.eos_token_id is None:
        found.append("the tokenizer has no end token")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    if "Hi" not in rendered or "Yes" not in rendered:
        found.append(f"the chat template makes {rendered!r}")
    return found


def export(name: str, trainer: str, folder: Path, dtype: str) -> Path:
    """Exports a golden model through run_trainer.py."""
    case, source, output = golden_files.load_model_case(name), folder / "source", folder / f"exported-{dtype}"
    source.mkdir(exist_ok=True)
    described = case.metadata["config_as_saved"] | {"num_nextn_predict_layers": 0}
    (source / "config.json").write_text(json.dumps(described))
    save_file(dict(case.weights), source / "model.safetensors", {"format": "pt"})
    config = folder / "config.yaml"
    config.write_text(f"pretrained_model_dir: {source}\ntrain_dataset: {{tokenizer: {{type: bytes}}}}\n")
    command = [trainer, str(ROOT / "run_trainer.py"), "export", "--config", str(config), "--output", str(output),
               "--dtype", dtype, "--shard_size", "60KB"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return output


def check(name: str, trainer: str, dtype: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        model, found = load(export(name, trainer, Path(folder), dtype))
        case = golden_files.load_model_case(name)
        if str(model.dtype) != f"torch.{dtype}":
            found.append(f"loads as {model.dtype}")
        batch = {"input_ids": case.input_ids, "positions": case.positions, "segment_ids": case.segment_ids}
        with torch.no_grad():
            away = float(np.abs(forward(model.float(), batch).numpy() - case.logits).max())
        return found + ([f"logits differ by {away:.2g}"] if away > TOLERANCE[dtype] else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--trainer", metavar="PYTHON", help="export the golden models with it")
    options = parser.parse_args()
    logging.disable_progress_bar()
    results = {str(folder): load(folder)[1] for folder in options.folders}
    if options.trainer:
        names = [*golden_files.model_case_names(), *golden_files.model_case_names("experts")]
        results |= {f"{name} {dtype}": check(name, options.trainer, dtype) for name in names for dtype in TOLERANCE
                    if dtype == "float32" or name in ("model_qwen3", "experts_qwen3_moe")}
    for name, found in results.items():
        print(f"{name}: {'; '.join(found) or 'loads'}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
