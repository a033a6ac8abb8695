"""The golden files of tests/parity/test_adapter_methods.py: PEFT's adapters on a golden model, and merged matrices.

Part of make_golden.py; needs peft as well. A file has the folder that PEFT saves (`adapter.` and the config), the
logits and gradients with the adapters (`gradient.`), and the merged matrices (`merged.`). That of a quantized base
needs bitsandbytes, and has what it holds of the base instead of merged matrices.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from golden_models import IGNORE_INDEX, REQUIRED_EFFECT, forward, loss_sum, make_weight
from safetensors.numpy import load_file

BASE = "qwen3"
"""The golden model whose matrices are adapted."""
RANK = 3
ALPHA = 7.5


class AdapterCase(NamedTuple):
    """Settings of PEFT's LoraConfig, beside rank, alpha and target_modules."""

    what: str
    settings: dict[str, Any]


CASES = {
    "rslora": AdapterCase("rsLoRA: alpha over the root of the rank", {"use_rslora": True}),
    "dora": AdapterCase("DoRA: trained magnitudes", {"use_dora": True}),
    "patterns": AdapterCase("ranks and alphas by pattern", {
        "rank_pattern": {"down_proj": 2, "layers.0.self_attn.q_proj": 5, "q_.*": 4},
        "alpha_pattern": {"model.layers.0.self_attn.*": 10.0, "q": 1.0},
    }),
    "vocabulary": AdapterCase("embedding and head, beside a matrix of layers", {
        "target_modules": ["q_proj", "embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 2},
    }),
    "pissa": AdapterCase("PiSSA, converted to plain LoRA", {"init_lora_weights": "pissa", "use_rslora": True}),
    "olora": AdapterCase("OLoRA, converted to plain LoRA", {"init_lora_weights": "olora"}),
}


# bitsandbytes 0.50 reads blocks that go on in the next row wrongly on a CPU: rows are multiples of 64 numbers.
QUANTIZED_SIZES = {"hidden_size": 64, "intermediate_size": 128}
QUANTIZED = {"nf4": AdapterCase("QLoRA: matrices of layers in NF4 by bitsandbytes, the embedding in bfloat16", {})}


def quantize_base(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Quantizes the matrices of layers as transformers does with `load_in_4bit`.

    Returns what bitsandbytes holds of them, the other weights, and a larger matrix that it quantizes.
    """
    import bitsandbytes

    # Its products for processors with bfloat16 instructions need wider matrices.
    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    sample = make_weight("sample", (5, 3328))  # more blocks than a block of scales has
    stored = {"sample": sample} | _held("sample", *bitsandbytes.functional.quantize_4bit(
        torch.from_numpy(sample), blocksize=64, compress_statistics=True, quant_type="nf4"))
    for path, linear in list(model.model.layers.named_modules(prefix="model.layers")):
        if not isinstance(linear, torch.nn.Linear):
            continue
        quantized = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        quantized.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, quantized.to("cpu"))
        stored |= _held(path, quantized.weight.data, quantized.weight.quant_state)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.copy_(embedding.to(torch.bfloat16))
        head = model.get_output_embeddings().weight
        head.copy_(head.to(torch.bfloat16))
    model.is_loaded_in_4bit = True  # PEFT asks for it
    others = {key: weight for key, weight in model.named_parameters() if "_proj" not in key}
    return stored | {f"other.{key}": weight.detach().numpy().copy() for key, weight in others.items()}


def _held(name: str, codes: torch.Tensor, state: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a matrix that bitsandbytes has quantized, and the values of its codes."""
    return {
        f"codes.{name}": codes.numpy().reshape(-1), f"scales.{name}": state.absmax.numpy(),
        f"scales_of_scales.{name}": state.state2.absmax.numpy(), f"mean.{name}": state.offset.numpy().reshape(1),
        "values": state.code.numpy(), "dynamic_values": state.state2.code.numpy(),
    }  # fmt: skip


def make_case(
    name: str, model: torch.nn.Module, batch: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Adapts the model with adapters from a seed; returns the tensors and metadata of a file."""
    import peft

    case = (CASES | QUANTIZED)[name]
    quantized: dict[str, np.ndarray] = {}
    if name in QUANTIZED:
        quantized = quantize_base(model)
    plain = forward(model, batch).detach().numpy()
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]} | case.settings
    torch.manual_seed(1)  # for the A that PEFT draws
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    trained = {key: weight for key, weight in adapted.named_parameters() if weight.requires_grad}
    starts = {key: weight.detach().numpy().copy() for key, weight in trained.items()}
    converts = isinstance(settings.get("init_lora_weights"), str)
    folders = tempfile.TemporaryDirectory()
    conversion = None
    if converts:
        conversion = str(Path(folders.name) / "initial")
        adapted.peft_config["default"].init_lora_weights = True  # else PEFT would take the initial values out again
        adapted.save_pretrained(conversion)
    with torch.no_grad():
        for key, weight in trained.items():
            weight += torch.from_numpy(make_weight(f"{name}/{key}", tuple(weight.shape)))
    logits = forward(adapted, batch)
    moved = float(np.abs(logits.detach().numpy() - plain).max())
    if moved < REQUIRED_EFFECT:
        raise SystemExit(f"{name}: the adapters move the logits by {moved:.2g} only")
    total = loss_sum(logits, batch["labels"])
    valid_tokens = int((batch["labels"] != IGNORE_INDEX).sum())
    (total / valid_tokens).backward()
    tensors = {"logits": logits.detach().numpy(), "loss_sum": total.detach().numpy().reshape(())}
    tensors["valid_tokens"] = np.array(valid_tokens, dtype=np.int64)
    tensors |= {f"gradient.{_saved_name(key)}": weight.grad.numpy() for key, weight in trained.items()}
    with folders as folder:
        adapted.save_pretrained(folder, path_initial_model_for_weight_conversion=conversion)
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
        config["target_modules"] = sorted(config["target_modules"])  # PEFT writes a set
        tensors |= {f"adapter.{key}": value for key, value in load_file(f"{folder}/adapter_model.safetensors").items()}
    metadata = {"what": case.what, "model": f"model_{BASE}", "adapter_config": config, "settings": settings,
                "effect_on_logits": float(f"{moved:.2g}"), "peft": peft.__version__}
    if quantized:
        return tensors | quantized, metadata | {"bitsandbytes": importlib.metadata.version("bitsandbytes")}
    before = {key: weight.detach().numpy().copy() for key, weight in adapted.named_parameters()}
    matrices = {key.split(".base_layer")[0] for key in before if ".base_layer." in key}
    merged = dict(adapted.merge_and_unload().named_parameters())
    for key in sorted(matrices):
        matrix = f"{key.removeprefix('base_model.model.')}.weight"
        tensors[f"merged.{matrix}"] = merged[matrix].detach().numpy()
    if converts:
        tensors |= {f"start.{_saved_name(key)}": start for key, start in starts.items()}
    return tensors, metadata


LORAPLUS_RATIO, LORAPLUS_STEPS = 16.0, 100
LORAPLUS_SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": False, "foreach": False}


def make_loraplus_case(golden_gradient: Callable[..., np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns a file of an optimizer: AdamW with the groups of PEFT's `create_loraplus_optimizer`, without warm-up."""
    import peft
    from peft.optimizers import create_loraplus_optimizer

    recorded = (1, 10, 100)
    decay, peak = 0.1, 0.001
    base = torch.nn.ModuleDict({"proj": torch.nn.Linear(5, 6)})
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=["proj"]))
    parameters = {_saved_name(key).removeprefix("base_model.model."): weight
                  for key, weight in model.named_parameters() if weight.requires_grad}
    tensors: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for key, weight in parameters.items():
            weight.copy_(torch.from_numpy(make_weight(f"loraplus/{key}", tuple(weight.shape))))
            tensors[f"initial.{key}"] = weight.numpy().copy()
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=peak, loraplus_lr_ratio=LORAPLUS_RATIO, loraplus_weight_decay=decay,
        **LORAPLUS_SETTINGS,
    )
    ratios = [group["lr"] / peak for group in optimizer.param_groups]
    tensors["learning_rates"] = 0.5 * peak * (1 + np.cos(np.pi * np.arange(LORAPLUS_STEPS) / LORAPLUS_STEPS))
    for step, learning_rate in enumerate(tensors["learning_rates"]):
        for index, weight in enumerate(parameters.values()):
            weight.grad = torch.from_numpy(golden_gradient(step, index, tuple(weight.shape)))
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            group["lr"] = float(learning_rate) * ratio
        optimizer.step()
        if step + 1 in recorded:
            tensors |= {f"after_{step + 1}.{key}": one.detach().numpy().copy() for key, one in parameters.items()}
    state_keys = ["exp_avg", "exp_avg_sq"]
    for key, weight in parameters.items():
        tensors |= {f"state.{kind}.{key}": optimizer.state[weight][kind].numpy().copy() for kind in state_keys}
    settings = {"optimizer": "AdamW", **LORAPLUS_SETTINGS, "weight_decay": dict.fromkeys(parameters, decay)}
    metadata = {"what": "PEFT's LoRA+ with PyTorch's AdamW in float32", "names": list(parameters),
                "settings": settings | {"loraplus_lr_ratio": LORAPLUS_RATIO}, "recorded_steps": list(recorded),
                "state_keys": state_keys, "peft": peft.__version__}
    return tensors, metadata


def _saved_name(name: str) -> str:
    """Returns the name of a parameter in the file that PEFT saves."""
    if ".lora_magnitude_vector." in name:
        name = name.removesuffix(".weight")
    return name.replace(".default", "")
