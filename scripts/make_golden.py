#!/usr/bin/env python3
"""Makes tests/golden: tiny Hugging Face models and PyTorch optimizers, what they compute, and from what.

The tests compare the trainer with these files and need neither torch nor transformers; this script does, in an
environment of its own:

    python -m venv torch-env && torch-env/bin/pip install torch transformers safetensors "numpy<2"
    torch-env/bin/python scripts/make_golden.py                # writes every file
    torch-env/bin/python scripts/make_golden.py --only qwen3   # writes that one
    torch-env/bin/python scripts/make_golden.py --check        # compares, writes nothing; exit code 1 on a difference

Nothing is downloaded: models are built from the configurations below and filled from a generator seeded by the case's
name. The same versions on the same machine give the same bytes; other machines may differ in the last bits of a
float32.

Every case is checked to be sensitive to what it is there for: with that feature removed its logits must move by at
least 100 times the tolerance of the tests. A rotary scaling which does not matter at these lengths would prove
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from safetensors.numpy import save
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import golden_files  # noqa: E402  (beside the tests, which must run without torch)

ROWS, TOKENS, VOCABULARY = 2, 24, 64
IGNORE_INDEX = -100
TOLERANCE = 1e-4
REQUIRED_EFFECT = 100 * TOLERANCE
LARGEST_TOTAL_BYTES = 3_000_000

BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}
"""In the keys of config.json before transformers 5, which converts rope_theta and rope_scaling into rope_parameters."""

# Lengths of the documents that a packed row holds.
DOCUMENT_LENGTHS = ((7, 1, 16), (15, 9))

# A base of 500 puts the wavelengths of an 8-wide head at 6, 30, 141 and 664 positions: with 64 original positions
# llama3 and yarn then keep, blend and stretch at least one frequency each.
SCALING_BASE = {"rope_theta": 500.0, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_ALL_KEYS = {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "mscale": 3.0, "mscale_all_dim": 0.2}


@dataclass(frozen=True)
class Case:
    """One model and batch.

    Attributes:
        what: What the case shows.
        changes: What its configuration changes in BASE.
        packed: Several documents in a row: positions restart and no token attends to another document.
        without: Configuration changes that remove what the case is there for.
        neutral: Weights (by the end of their name) replaced by a value to remove it instead.
    """

    what: str
    changes: dict[str, Any] = field(default_factory=dict)
    model_type: str = "llama"
    packed: bool = False
    without: dict[str, Any] = field(default_factory=dict)
    neutral: dict[str, float] = field(default_factory=dict)


QWEN3 = {"head_dim": 16, "rms_norm_eps": 1e-3}  # an epsilon that a test can feel
CASES = {
    "llama": Case("grouped-query attention, untied head", neutral={"norm.weight": 1.0}),
    "llama_packed": Case("several documents in a row", packed=True),
    "llama_tied_linear": Case("tied head, linear rotary scaling",
                              {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
                              without={"rope_scaling": None}),
    "llama_llama3": Case("llama3 rotary scaling", {**SCALING_BASE, "rope_scaling": LLAMA3},
                         without={"rope_scaling": None}),
    "llama_yarn": Case("yarn rotary scaling, attention factor from the factor", {**SCALING_BASE, "rope_scaling": YARN},
                       without={"rope_scaling": None}),
    "llama_yarn_mscale": Case("yarn rotary scaling with its optional keys",
                              {**SCALING_BASE, "rope_scaling": YARN_ALL_KEYS}, without={"rope_scaling": YARN}),
    "llama_bias": Case("biases in attention and MLP", {"attention_bias": True, "mlp_bias": True},
                       neutral={".bias": 0.0}),
    "qwen2": Case("query, key and value biases, tied head", {"tie_word_embeddings": True}, "qwen2",
                  neutral={".bias": 0.0}),
    "qwen3": Case("query and key norms, heads wider than hidden / heads, untied head", QWEN3, "qwen3",
                  neutral={"q_norm.weight": 1.0, "k_norm.weight": 1.0}),
    "qwen3_packed": Case("several documents in a row", QWEN3, "qwen3", packed=True),
}


def build_model(case: Case, name: str, changes: dict[str, Any]) -> torch.nn.Module:
    """The model in evaluation mode and float32, its weights a function of the case's name and their own names."""
    config = {**BASE, **case.changes, **changes}
    hf_config = AutoConfig.for_model(case.model_type, attn_implementation="eager", use_cache=False, **_copy(config))
    check_rotary_keys(hf_config, config)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(make_weight(f"{name}/{weight_name}", tuple(weight.shape))))
    return model


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    """Transformers changes the dictionaries that it is given."""
    return json.loads(json.dumps(config))


def check_rotary_keys(hf_config: Any, config: dict[str, Any]) -> None:
    """Fails unless transformers understood rope_theta and rope_scaling: version 5 keeps both in ``rope_parameters``."""
    understood = getattr(hf_config, "rope_parameters", None)
    if understood is None:
        understood = {"rope_theta": hf_config.rope_theta, **(hf_config.rope_scaling or {"rope_type": "default"})}
    wanted = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    if any(understood.get(key) != value for key, value in wanted.items()):
        raise SystemExit(f"transformers {transformers.__version__} made {understood} of {wanted}")


def make_weight(seed_text: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms around 1, biases around 0, matrices large enough for attention to be far from uniform."""
    generator = np.random.RandomState(zlib.crc32(seed_text.encode()))  # a stream that numpy promises never to change
    normal = generator.standard_normal(shape)
    if seed_text.endswith("norm.weight"):
        return (1.0 + 0.2 * normal).astype(np.float32)
    scale = 0.2 if seed_text.endswith(".bias") else 0.3 if "self_attn" in seed_text else 0.15
    return (scale * normal).astype(np.float32)


def make_batch(name: str, packed: bool) -> dict[str, np.ndarray]:
    """int32 [B, T] arrays as the trainer's data room makes them; some labels are ignored in every row."""
    generator = np.random.RandomState(zlib.crc32(f"{name}/tokens".encode()))
    tokens = generator.randint(0, VOCABULARY, size=(ROWS, TOKENS + 1))
    lengths = DOCUMENT_LENGTHS if packed else ((TOKENS,),) * ROWS
    labels = tokens[:, 1:].copy()
    if packed:
        for row, row_lengths in enumerate(lengths):
            labels[row, np.cumsum(row_lengths) - 1] = IGNORE_INDEX
    else:
        labels[0, :5] = IGNORE_INDEX  # a masked prompt
        labels[1, -1] = IGNORE_INDEX
    arrays = {
        "input_ids": tokens[:, :-1],
        "labels": labels,
        "positions": np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths]),
        "segment_ids": np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]),
    }
    return {key: np.ascontiguousarray(array, dtype=np.int32) for key, array in arrays.items()}


def forward(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """Logits [B, T, V] under an additive mask [B, 1, T, T]: causal, and no token attends to another document."""
    segments = torch.from_numpy(batch["segment_ids"])
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    may_attend = (segments[:, :, None] == segments[:, None, :]) & causal
    mask = torch.zeros(may_attend.shape).masked_fill(~may_attend, torch.finfo(torch.float32).min)
    return model(input_ids=torch.from_numpy(batch["input_ids"]).long(), attention_mask=mask[:, None],
                 position_ids=torch.from_numpy(batch["positions"]).long()).logits


def effect(case: Case, name: str, batch: dict[str, np.ndarray], logits: np.ndarray) -> float:
    """How far the logits move when what the case is there for is removed (packed: the borders between documents).

    The restarting positions of a packed row have no effect of their own: rotary embeddings see differences only.
    """
    model = build_model(case, name, case.without)
    if case.packed:
        batch = {**batch, "segment_ids": np.zeros_like(batch["segment_ids"])}
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            for ending, value in case.neutral.items():
                if weight_name.endswith(ending):
                    weight.fill_(value)
        return float(np.abs(forward(model, batch).numpy() - logits).max())


def make_model_case(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    case = CASES[name]
    batch = make_batch(name, case.packed)
    model = build_model(case, name, {})
    logits = forward(model, batch)
    loss_sum = functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["labels"]).long().flatten(),
                                        ignore_index=IGNORE_INDEX, reduction="sum")
    valid_tokens = int((batch["labels"] != IGNORE_INDEX).sum())
    (loss_sum / valid_tokens).backward()
    moved = effect(case, name, batch, logits.detach().numpy())
    if moved < REQUIRED_EFFECT:
        raise SystemExit(f"{name}: without '{case.what}' the logits move by {moved:.2g} only, too little to test it")
    tensors = {**batch, "logits": logits.detach().numpy(), "loss_sum": loss_sum.detach().numpy().reshape(()),
               "valid_tokens": np.array(valid_tokens, dtype=np.int64)}
    for weight_name, weight in model.named_parameters():
        tensors[f"weight.{weight_name}"] = weight.detach().numpy()
        tensors[f"gradient.{weight_name}"] = weight.grad.numpy()
    metadata = {"what": case.what, "config": {"model_type": case.model_type, **BASE, **case.changes},
                "config_as_saved": json.loads(model.config.to_json_string(use_diff=False)),
                "effect_on_logits": float(f"{moved:.2g}")}
    return tensors, metadata


OPTIMIZER_SHAPES = {"matrix": (6, 5), "vector": (7,), "late": (4, 3), "tiny": (3, 2)}
OPTIMIZER_STEPS, RECORDED_STEPS, PEAK_LEARNING_RATE = 100, (1, 10, 100), 0.01
OPTIMIZER_CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW,
              {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": False, "foreach": False}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
}


def make_optimizer_case(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Matrices decay, vectors do not; gradients from ``golden_files.golden_gradient``; half a cosine down to 0."""
    kind, settings = OPTIMIZER_CASES[name]
    initial = {key: make_weight(f"{name}/{key}", shape) for key, shape in OPTIMIZER_SHAPES.items()}
    parameters = {key: torch.nn.Parameter(torch.from_numpy(value.copy())) for key, value in initial.items()}
    decays = {key: settings["weight_decay"] if len(shape) > 1 else 0.0 for key, shape in OPTIMIZER_SHAPES.items()}
    optimizer = kind([{"params": [parameters[key]], "weight_decay": decays[key]} for key in parameters],
                     lr=PEAK_LEARNING_RATE, **settings)
    learning_rates = 0.5 * PEAK_LEARNING_RATE * (1 + np.cos(np.pi * np.arange(OPTIMIZER_STEPS) / OPTIMIZER_STEPS))
    tensors = {"learning_rates": learning_rates, **{f"initial.{key}": value for key, value in initial.items()}}
    for step, learning_rate in enumerate(learning_rates):
        for index, (key, shape) in enumerate(OPTIMIZER_SHAPES.items()):
            parameters[key].grad = torch.from_numpy(golden_files.golden_gradient(step, index, shape))
        for group in optimizer.param_groups:
            group["lr"] = float(learning_rate)
        optimizer.step()
        if step + 1 in RECORDED_STEPS:
            tensors |= {f"after_{step + 1}.{key}": value.detach().numpy().copy() for key, value in parameters.items()}
    state_keys = sorted(key for key in optimizer.state[parameters["matrix"]] if key != "step")
    for key, parameter in parameters.items():
        tensors |= {f"state.{kind}.{key}": optimizer.state[parameter][kind].numpy().copy() for kind in state_keys}
    metadata = {"what": f"PyTorch {kind.__name__} in float32", "names": list(OPTIMIZER_SHAPES),
                "settings": {"optimizer": kind.__name__, **settings, "weight_decay": decays},
                "recorded_steps": list(RECORDED_STEPS), "state_keys": state_keys}
    return tensors, metadata


def make_file(name: str) -> bytes:
    """The content of one golden file; it holds no date, so that making it again changes nothing."""
    if name.startswith("model_"):
        tensors, metadata = make_model_case(name.removeprefix("model_"))
    else:
        tensors, metadata = make_optimizer_case(name.removeprefix("optimizer_"))
    metadata["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__,
                            "numpy": np.__version__, "safetensors": safetensors.__version__,
                            "python": ".".join(map(str, sys.version_info[:3]))}
    contiguous = {key: np.array(value, order="C") for key, value in tensors.items()}
    return save(contiguous, metadata={"golden": json.dumps(metadata, sort_keys=True)})


def differences(content: bytes, path: Path) -> list[str]:
    """What of a file on disk is not what the script makes now; float32 numbers may differ in their last bits."""
    if not path.exists():
        return ["is missing"]
    made, stored = safetensors.numpy.load(content), safetensors.numpy.load(path.read_bytes())
    if made.keys() != stored.keys():
        return [f"tensors {sorted(made.keys() ^ stored.keys())} are in one of the two only"]
    return [f"{key} differs" for key in made if made[key].shape != stored[key].shape
            or not np.allclose(made[key], stored[key], rtol=1e-5, atol=1e-6)]


def main() -> int:
    names = [*(f"model_{name}" for name in CASES), *(f"optimizer_{name}" for name in OPTIMIZER_CASES)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append",
                        help=f"make this one only (the part before _ may be left out): {', '.join(names)}")
    parser.add_argument("--check", action="store_true", help="compare with the files on disk and write nothing")
    parser.add_argument("--folder", type=Path, default=golden_files.GOLDEN_FOLDER)
    options = parser.parse_args()
    wanted = [name for name in names
              if not options.only or not {name, name.split("_", 1)[1]}.isdisjoint(options.only)]
    if not wanted:
        parser.error(f"--only {' '.join(options.only)}: known are {', '.join(names)}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in wanted:
        content, path = make_file(name), options.folder / f"{name}.safetensors"
        if options.check:
            found = differences(content, path)
            failed |= bool(found)
            print(f"{name}: {'; '.join(found) or 'as made now'}")
        else:
            path.write_bytes(content)
            print(f"{path}: {len(content)} bytes")
    total = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
    print(f"all files: {total} bytes")
    if total > LARGEST_TOTAL_BYTES:
        raise SystemExit(f"more than the {LARGEST_TOTAL_BYTES} bytes that the repository should carry")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
