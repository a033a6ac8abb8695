#!/usr/bin/env python3
"""Proves that transformers loads what the trainer exports: same logits, no missing or unexpected tensors, tokenizer.

    torch-env/bin/python scripts/check_folders.py --trainer .venv/bin/python                   # golden models, exported
    torch-env/bin/python scripts/check_folders.py output/quickstart/checkpoints/step-00000100  # these folders

The environment is that of make_golden.py. `--trainer` names the Python that run_trainer.py runs with. If peft is
installed too, adapters that PEFT saved are loaded by the trainer, and those that the trainer trained by PEFT: the
logits, and those of the merged model, must be the same in both. Exit code 1 on a difference.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
ADAPTED = {"lora_rank": 4, "lora_alpha": 6.0}
LAYER_1 = r"model\.layers\.1\..*(q_proj|o_proj|down_proj)"
# Golden model, PEFT's settings, and the target_modules of the trainer for the same matrices.
ADAPTERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "list": ("model_qwen3", {"target_modules": ["q_proj", "v_proj", "down_proj"]}, "q_proj|v_proj|down_proj"),
    "regex": ("model_qwen3", {"target_modules": LAYER_1}, LAYER_1),
    "layers": (
        "model_qwen3", {"target_modules": ["q_proj", "o_proj", "down_proj"], "layers_to_transform": [1]}, LAYER_1,
    ),
    "layers without rotary": ("family_smollm3", {"target_modules": ["q_proj", "down_proj"]}, "q_proj|down_proj"),
    "no gate": ("family_starcoder2", {"target_modules": ["q_proj", "c_fc", "c_proj"]}, "q_proj|c_fc|c_proj"),
    "side by side": ("family_cohere2", {"target_modules": ["k_proj", "up_proj", "o_proj"]}, "k_proj|up_proj|o_proj"),
    "ReLU squared": (
        "family_arcee", {"target_modules": ["k_proj", "up_proj", "down_proj"]}, "k_proj|up_proj|down_proj",
    ),
    "all matrices": ("model_llama", {"target_modules": "all-linear"}, ".*_proj"),
    "biases": ("model_qwen2", {"target_modules": ["k_proj", "up_proj"]}, "k_proj|up_proj"),
    "experts": ("experts_qwen3_moe", {"target_modules": ["q_proj", "k_proj"]}, "q_proj|k_proj"),
    "latent attention": (
        "experts_deepseek_v3", {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]},
        "q_b_proj|kv_a_proj_with_mqa|kv_b_proj",
    ),
}  # fmt: skip
REFUSED = {"init_lora_weights": "olora"}
# Settings of PEFT that pet_config has under the same names.
METHODS: dict[str, dict[str, Any]] = {
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "patterns": {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "v_proj": 8}, "alpha_pattern": {"v_proj": 3.0}},
}
# Of the trainer alone: PEFT reads plain LoRA of another rank.
CONVERTED: dict[str, dict[str, Any]] = {
    "PiSSA": {"init_lora_weights": "pissa"}, "OLoRA": {"init_lora_weights": "olora"},
}  # fmt: skip
LOGITS = """
import sys
import numpy as np
from trainer.checkpoint.adapters import load_initial_weights
from trainer.config import load_config
from trainer.data import Batch
from trainer.run.session import open_session
config = load_config(sys.argv[1])
session = open_session(config, load_initial_weights(config))
batch = np.load(sys.argv[2])
inputs = Batch(batch["input_ids"], batch["input_ids"], batch["positions"], batch["segment_ids"])
np.save(sys.argv[3], session.model.logits(session.build_inputs(inputs)).asnumpy())
"""
"""The program that computes logits in the trainer's environment."""
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
    if not tokenizer.chat_template:  # of a training on text
        return found
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    if "Hi" not in rendered or "Yes" not in rendered:
        found.append(f"the chat template makes {rendered!r}")
    return found


def write_source(case: golden_files.ModelCase, folder: Path) -> Path:
    """Writes a golden model as a folder of Hugging Face."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    described = case.metadata["config_as_saved"] | {"num_nextn_predict_layers": 0}
    (source / "config.json").write_text(json.dumps(described))
    save_file(dict(case.weights), source / "model.safetensors", {"format": "pt"})
    return source


def export(name: str, trainer: str, folder: Path, dtype: str) -> Path:
    """Exports a golden model through run_trainer.py."""
    source, output = write_source(golden_files.load_model_case(name), folder), folder / f"exported-{dtype}"
    config = folder / "config.yaml"
    data = "{tokenizer: {type: bytes}, chat_template: chatml}"
    config.write_text(f"pretrained_model_dir: {source}\ntrain_dataset: {data}\n")
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


class AdapterCheck:
    """Adapters of one golden model, in PEFT and in the trainer; shapes: B rows, T tokens, V vocabulary."""

    def __init__(self, name: str, trainer: str, folder: Path, target_modules: str, **method: Any) -> None:
        self.case = golden_files.load_model_case(name)
        self.trainer = trainer
        self.folder = folder
        self.source = write_source(self.case, folder)
        keys = ("input_ids", "positions", "segment_ids")
        self.batch = {key: getattr(self.case, key) for key in keys}
        np.savez(folder / "batch.npz", **self.batch)
        pet_config = ADAPTED | {"target_modules": target_modules, "lora_b_std": 0.1} | method
        if "init_lora_weights" in method:
            del pet_config["lora_b_std"]
        self.settings: dict[str, Any] = {
            "pretrained_model_dir": str(self.source), "run_mode": "finetune", "context": {"device_target": "CPU"},
            "model": {"model_config": {"seq_length": 24, "pet_config": pet_config}},
            "train_dataset": {"data_loader": {"type": "SyntheticDataset", "num_samples": 8}},
            "runner_config": {"batch_size": 4, "epochs": 1},
            "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.05},
        }  # fmt: skip

    def base(self) -> torch.nn.Module:
        """Returns the model without adapters."""
        return AutoModelForCausalLM.from_pretrained(self.source, attn_implementation="eager").float().eval()

    def config(self, **changes: Any) -> Path:
        """Writes the trainer's configuration."""
        file = self.folder / "adapters.yaml"
        file.write_text(json.dumps(self.settings | changes))
        return file

    def call(self, *arguments: object) -> subprocess.CompletedProcess:
        """Runs the trainer's Python in the repository."""
        command = [self.trainer, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def train(self) -> Path:
        """Trains adapters for two steps; returns their checkpoint."""
        output = self.folder / "run"
        done = self.call("run_trainer.py", "--config", self.config(output_dir=str(output)))
        if done.returncode:
            raise SystemExit(done.stderr)
        return max((output / "checkpoints").glob("step-*"))

    def differences(self, adapters: Path) -> list[str]:
        """Returns the problems of a folder of adapters: names in PEFT, logits here, logits after a merge."""
        import peft

        settings = peft.PeftConfig.from_pretrained(adapters)
        model = peft.get_peft_model(self.base(), settings)
        result = peft.set_peft_model_state_dict(model, peft.load_peft_weights(adapters, device="cpu"))
        missing = [name for name in result.missing_keys if "lora_" in name]
        found = [f"PEFT: unexpected {name}" for name in result.unexpected_keys]
        found += [f"PEFT: missing {name}" for name in missing]
        model.eval()
        with torch.no_grad():
            theirs = forward(model, self.batch).numpy()
            moved = float(np.abs(theirs - forward(self.base(), self.batch).numpy()).max())
            merged = forward(model.merge_and_unload(), self.batch).numpy()
        if moved < 100 * TOLERANCE["float32"]:
            found.append(f"the adapters move logits by {moved:.2g} only")
        config = self.config(adapter_id=str(adapters))
        output = self.folder / "logits.npy"
        done = self.call("-c", LOGITS, config, self.folder / "batch.npz", output)
        if done.returncode:
            return [*found, done.stderr.strip()]
        found += difference("the trainer's logits", np.load(output).reshape(theirs.shape), theirs)
        exported = self.folder / "merged"
        flags = ("--adapter", adapters, "--merge", "--output", exported, "--force")
        flags += ("--train_dataset.tokenizer.type", "bytes", "--train_dataset.chat_template", "chatml")
        done = self.call("run_trainer.py", "export", "--config", self.config(), *flags)
        if done.returncode:
            return [*found, done.stderr.strip()]
        loaded, problems = load(exported)
        with torch.no_grad():
            ours = forward(loaded, self.batch).numpy()
        return found + problems + difference("the merged logits", ours, merged)


def difference(what: str, ours: np.ndarray, theirs: np.ndarray) -> list[str]:
    """Returns a sentence about logits that differ."""
    away = float(np.abs(ours - theirs).max())
    if away <= TOLERANCE["float32"]:
        return []
    return [f"{what} differ from PEFT's by {away:.2g}"]


def save_with_peft(checked: AdapterCheck, folder: Path, **settings: Any) -> Path:
    """Saves adapters with random A and B as PEFT does."""
    import peft

    described = {"r": ADAPTED["lora_rank"], "lora_alpha": ADAPTED["lora_alpha"], "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(checked.base(), peft.LoraConfig(**described))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def check_adapters(trainer: str) -> dict[str, list[str]]:
    """Returns the problems of each kind of adapters, saved by PEFT and trained here, and of those that are refused."""
    results = {}
    cases = {what: (*case, {}) for what, case in ADAPTERS.items()}
    name, settings, target_modules = ADAPTERS["list"]
    cases |= {what: (name, settings | method, target_modules, method) for what, method in METHODS.items()}
    for what, (name, settings, target_modules, method) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            checked = AdapterCheck(name, trainer, Path(folder), target_modules, **method)
            saved = save_with_peft(checked, Path(folder) / "peft", **settings)
            results[f"adapters of PEFT, {what}"] = checked.differences(saved)
            results[f"trained adapters, {what}"] = checked.differences(checked.train())
    for what, method in CONVERTED.items():
        with tempfile.TemporaryDirectory() as folder:
            checked = AdapterCheck(name, trainer, Path(folder), ADAPTERS["list"][2], **method)
            results[f"trained adapters, {what}"] = checked.differences(checked.train())
    with tempfile.TemporaryDirectory() as folder:
        checked = AdapterCheck("model_qwen3", trainer, Path(folder), "q_proj|v_proj")
        for key, value in REFUSED.items():
            saved = save_with_peft(checked, Path(folder) / key, target_modules=["q_proj", "v_proj"], **{key: value})
            done = checked.call("run_trainer.py", "plan", "--config", checked.config(adapter_id=str(saved)))
            if done.returncode != 2 or key not in done.stderr:
                results[f"adapters with {key}"] = [f"exit {done.returncode} instead of an error: {done.stderr}"]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--trainer", metavar="PYTHON", help="export the golden models with it")
    options = parser.parse_args()
    logging.disable_progress_bar()
    results = {str(folder): load(folder)[1] for folder in options.folders}
    if options.trainer:
        names = [*golden_files.model_case_names(), *golden_files.model_case_names("experts"),
                 *golden_files.model_case_names("family")]
        results |= {f"{name} {dtype}": check(name, options.trainer, dtype) for name in names for dtype in TOLERANCE
                    if dtype == "float32" or name in ("model_qwen3", "experts_qwen3_moe")}
        if importlib.util.find_spec("peft"):
            results |= check_adapters(options.trainer)
    for name, found in results.items():
        print(f"{name}: {'; '.join(found) or 'loads'}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
