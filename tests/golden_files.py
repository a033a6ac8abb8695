"""Reads tests/golden: what Hugging Face models and PyTorch optimizers compute, made by scripts/make_golden.py.

Needs numpy and safetensors only. Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

_STORED = ("codes.", "scales", "mean.", "values", "dynamic_values", "other.", "sample")
GOLDEN_FOLDER = Path(__file__).parent / "golden"


class ModelCase(NamedTuple):
    """One tiny Hugging Face model, one batch, and what the model makes of it in float32."""

    name: str
    config: dict[str, Any]
    """The Hugging Face configuration, in the keys of config.json before transformers 5 (rope_theta, rope_scaling)."""
    weights: dict[str, np.ndarray]
    """By the names of Hugging Face's published files, for example ``model.layers.0.self_attn.q_proj.weight`` [out, in];
    each expert has its own. Tied: no ``lm_head``."""
    gradients: dict[str, np.ndarray]
    """Of ``loss_sum / valid_tokens``, by the same names; the bias of a router's choice has none."""
    input_ids: np.ndarray
    """int32 [B, T]."""
    labels: np.ndarray
    """int32 [B, T]: the next token, -100 where there is no loss."""
    positions: np.ndarray
    """int32 [B, T]: position within the document."""
    segment_ids: np.ndarray
    """int32 [B, T]: which document of the row; all 0 in the cases that are not packed."""
    logits: np.ndarray
    """float32 [B, T, V]."""
    loss_sum: float
    valid_tokens: int
    metadata: dict[str, Any]
    """The whole header: what the case shows, its sensitivity, the versions that made it."""
    mtp_loss_sums: np.ndarray | None = None
    """float32 [modules]: their loss sums; the gradients are of (loss_sum + mtp_loss_factor / modules * all of these) /
    valid_tokens, with the header's mtp_loss_factor."""


class OptimizerCase(NamedTuple):
    """Some tensors under a PyTorch optimizer, in float32, with gradients from ``golden_gradient``."""

    name: str
    settings: dict[str, Any]
    """``optimizer``, its settings, and ``weight_decay``: one value a tensor, by name."""
    names: list[str]
    """The tensors in the order of ``golden_gradient``'s ``index``."""
    learning_rates: np.ndarray
    """float64 [steps]; update number n (from 0) uses ``learning_rates[n]``."""
    initial: dict[str, np.ndarray]
    after: dict[int, dict[str, np.ndarray]]
    """The tensors after so many updates."""
    state: dict[str, dict[str, np.ndarray]]
    """The optimizer's state after the last update, for example ``state["exp_avg"]["matrix"]``."""
    metadata: dict[str, Any]


class AdapterCase(NamedTuple):
    """Adapters of PEFT for a golden model, in float32."""

    name: str
    model: str
    """The golden model, with whose batch the numbers below are computed."""
    settings: dict[str, Any]
    """Of PEFT's LoraConfig."""
    adapter_config: dict[str, Any]
    """The adapter_config.json that PEFT saves."""
    adapters: dict[str, np.ndarray]
    """The tensors that PEFT saves, by their names there."""
    gradients: dict[str, np.ndarray]
    """Of ``loss_sum / valid_tokens``, by the same names."""
    merged: dict[str, np.ndarray]
    """The adapted matrices after `merge_and_unload`, by the names of the model."""
    logits: np.ndarray
    """float32 [B, T, V], with the adapters."""
    loss_sum: float
    valid_tokens: int
    start: dict[str, np.ndarray]
    """A and B before the training, where PEFT took them from the base model's weights."""
    stored: dict[str, np.ndarray]
    """Of a quantized base what bitsandbytes holds: codes, scales, scales_of_scales and mean of each matrix, and of
    `sample`; the values of the codes, and the `other` weights."""


def golden_gradient(step: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the gradient that update ``step`` (from 0) sees for tensor number ``index``: float32, computed in
    float64.

    With k the flat index of an element: 10**(1 - 2 index) * sin(0.7 k + 0.3 (index + 1) step + 0.1), so tensor 0 has
    gradients of 10, tensor 3 of 1e-5 (where eps is felt). Tensor 2 has a gradient of zero in the first five steps.
    """
    flat = np.arange(int(np.prod(shape)), dtype=np.float64)
    gradient = 10.0 ** (1 - 2 * index) * np.sin(0.7 * flat + 0.3 * (index + 1) * step + 0.1)
    if index == 2 and step < 5:
        gradient[:] = 0.0
    return gradient.reshape(shape).astype(np.float32)


def model_case_names(kind: str = "model") -> list[str]:
    """Cases of dense models ("model"), with experts ("experts"), with multi-token prediction modules ("mtp")."""
    return sorted(path.stem for path in GOLDEN_FOLDER.glob(f"{kind}_*.safetensors"))


def load_model_case(name: str) -> ModelCase:
    metadata, tensors = _read(name)
    return ModelCase(
        name=name, config=metadata["config"], weights=_group(tensors, "weight."),
        gradients=_group(tensors, "gradient."), metadata=metadata,
        loss_sum=float(tensors["loss_sum"]), valid_tokens=int(tensors["valid_tokens"]),
        mtp_loss_sums=tensors["mtp_loss_sums"] if "mtp_loss_sums" in tensors else None,
        **{key: tensors[key] for key in ("input_ids", "labels", "positions", "segment_ids", "logits")},
    )


def write_folder(folder: Path, described: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors of a folder of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def load_peft_modules() -> dict[str, dict[str, list[int]]]:
    """Returns the matrices of each family's layers that PEFT can adapt: full names -> [outputs, inputs]."""
    stored = json.loads((GOLDEN_FOLDER / "peft_modules.json").read_text())["modules"]
    return {
        family: {f"model.layers.{n}.{name}": shape for n, layer in enumerate(layers) for name, shape in layer.items()}
        for family, layers in stored.items()
    }


def load_adapter_case(name: str) -> AdapterCase:
    metadata, tensors = _read(name)
    return AdapterCase(
        name=name, model=metadata["model"], settings=metadata["settings"], adapter_config=metadata["adapter_config"],
        adapters=_group(tensors, "adapter."), gradients=_group(tensors, "gradient."),
        merged=_group(tensors, "merged."), logits=tensors["logits"], loss_sum=float(tensors["loss_sum"]),
        valid_tokens=int(tensors["valid_tokens"]), start=_group(tensors, "start."),
        stored={key: tensor for key, tensor in tensors.items() if key.startswith(_STORED)},
    )


def load_optimizer_case(name: str) -> OptimizerCase:
    metadata, tensors = _read(name)
    return OptimizerCase(
        name=name, settings=metadata["settings"], names=metadata["names"], metadata=metadata,
        learning_rates=tensors["learning_rates"], initial=_group(tensors, "initial."),
        after={step: _group(tensors, f"after_{step}.") for step in metadata["recorded_steps"]},
        state={key: _group(tensors, f"state.{key}.") for key in metadata["state_keys"]},
    )


def model_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``model_config`` section of a YAML that describes the model of a golden case."""
    is_glm, is_sandwich = config["model_type"] in ("glm", "glm4"), config["model_type"] == "glm4"
    head_dim = config["head_dim"] if "head_dim" in config else config["hidden_size"] // config["num_attention_heads"]
    return {
        "type": {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "glm": "GlmConfig",
                 "glm4": "Glm4Config", "mistral": "LlamaConfig"}[config["model_type"]],
        "rotary_pct": config["partial_rotary_factor"] if is_glm else 1.0,
        "rope_interleave": is_glm,
        "sliding_window": config["sliding_window"] if "sliding_window" in config else None,
        "layer_types": config["layer_types"] if "layer_types" in config else None,
        "post_self_attn_layernorm": is_sandwich,
        "post_mlp_layernorm": is_sandwich,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim,
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_theta"],
        "rope_scaling": config["rope_scaling"],
        "qkv_has_bias": config["model_type"] == "qwen2" or config["attention_bias"],
        "attn_proj_has_bias": config["model_type"] != "qwen2" and not is_glm and config["attention_bias"],
        "mlp_has_bias": config["model_type"] == "llama" and config["mlp_bias"],
        "use_qk_norm": config["model_type"] == "qwen3",
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _read(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with safe_open(GOLDEN_FOLDER / f"{name}.safetensors", framework="numpy") as file:
        return json.loads(file.metadata()["golden"]), {key: file.get_tensor(key) for key in file.keys()}


def _group(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
