#!/usr/bin/env python3
"""Makes tests/golden: inputs and outputs of tiny Hugging Face models and PyTorch optimizers.

The tests compare the trainer with these files and need neither torch nor transformers; this script does, in an
environment of its own (peft for the files adapter_*, with bitsandbytes for quantized_*):

    python -m venv torch-env && torch-env/bin/pip install torch transformers peft safetensors "numpy<2"
    torch-env/bin/python scripts/make_golden.py                # writes every file
    torch-env/bin/python scripts/make_golden.py --only qwen3   # writes that one
    torch-env/bin/python scripts/make_golden.py --check        # compares, writes nothing; exit code 1 on a difference

Nothing is downloaded: models are built from the configurations below and filled from a generator seeded by the case's
name. The same versions on the same machine give the same bytes; other machines may differ in the last bits of a
float32.

Every case must be sensitive to the feature that it tests: without that feature its logits must move by at least 100
times the tolerance of the tests. (A rotary scaling without effect at these lengths would prove nothing.) No choice of
experts may be close, because rounding could decide it differently elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from golden_adapters import BASE as ADAPTED
from golden_adapters import CASES as ADAPTER_CASES
from golden_adapters import QUANTIZED as QUANTIZED_CASES
from golden_adapters import QUANTIZED_SIZES, make_loraplus_case
from golden_adapters import make_case as make_adapter_case
from golden_families import FAMILY_CASES
from golden_models import (
    BASE,
    IGNORE_INDEX,
    VOCABULARY,
    Case,
    Removal,
    build_model,
    check_names,
    effect,
    forward,
    gradients_on_disk,
    loss_sum,
    make_batch,
    make_weight,
    require_effect,
    routers_watched,
    state_on_disk,
)
from golden_mtp import attach_modules, mtp_effects, sums_and_logits
from golden_telechat import CASES as TELECHAT_CASES
from golden_telechat import make_case as make_telechat_case
from safetensors.numpy import save

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import golden_files  # noqa: E402  (beside the tests, which must run without torch)

LARGEST_TOTAL_BYTES = 7_000_000

# A base of 500 puts the wavelengths of an 8-wide head at 6, 30, 141 and 664 positions: with 64 original positions
# llama3 and yarn then keep, blend and stretch at least one frequency each.
SCALING_BASE = {"rope_theta": 500.0, "max_position_embeddings": 256}
SCALED = {**SCALING_BASE, "num_hidden_layers": 1, "intermediate_size": 24}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_ALL_KEYS = {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "mscale": 3.0, "mscale_all_dim": 0.2}


QWEN3 = {"head_dim": 16, "rms_norm_eps": 1e-3}  # an epsilon that a test can feel
MTP_FACTOR = 0.3
EXPERTS = {"num_experts_per_tok": 2, "rms_norm_eps": 1e-3}
MIXTRAL = {**EXPERTS, "num_local_experts": 4, "intermediate_size": 24}
QWEN3_MOE = {**EXPERTS, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 8, "num_hidden_layers": 3,
             "mlp_only_layers": [1], "norm_topk_prob": False}
GLM4_MOE = {
    **EXPERTS, "head_dim": 16, "n_routed_experts": 8, "moe_intermediate_size": 8,
    "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1,
    "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0,
}
GLM4_MOE_REMOVALS = {
    "groups": Removal({"n_group": 1, "topk_group": 1}),
    "correction bias": Removal(neutral={"e_score_correction_bias": 0.0}),
    "shared experts": Removal(neutral={"shared_experts.down_proj.weight": 0.0}),
    "scaling factor": Removal({"routed_scaling_factor": 1.0}),
    "normalised weights": Removal({"norm_topk_prob": False}),
    "dense first layer": Removal({"first_k_dense_replace": 0}),
    "partial rotary": Removal({"partial_rotary_factor": 1.0}),
    "attention bias": Removal(neutral={"_proj.bias": 0.0}),
    "query and key norms": Removal(neutral={"q_norm.weight": 1.0, "k_norm.weight": 1.0}),
}
GLM = {"head_dim": 16, "rms_norm_eps": 1e-3, "attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": None,
       "intermediate_size": 24}
GLM_REMOVALS = {
    "partial rotary": Removal({"partial_rotary_factor": 1.0}),
    "attention bias": Removal(neutral={"_proj.bias": 0.0}),
}
QWEN2_MOE = {**EXPERTS, "attention_bias": True, "num_experts": 8, "moe_intermediate_size": 8,
             "shared_expert_intermediate_size": 24,
             "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False}
DEEPSEEK_V3 = {
    **GLM4_MOE, **SCALING_BASE, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 4,
    "rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "mscale": 1.5, "mscale_all_dim": 0.8},
}
for key in ("head_dim", "use_qk_norm", "partial_rotary_factor"):
    del DEEPSEEK_V3[key]
DEEPSEEK_V3_REMOVALS = {
    **{name: removal for name, removal in GLM4_MOE_REMOVALS.items() if name in (
        "groups", "correction bias", "shared experts", "scaling factor", "normalised weights", "dense first layer")},
    "norms of latent vectors": Removal(neutral={"_a_layernorm.weight": 1.0}),
    "attention bias": Removal(neutral={"_proj.bias": 0.0, "_with_mqa.bias": 0.0}),
    "interleaved rotary": Removal({"rope_interleave": False}),
    "yarn": Removal({"rope_scaling": None}),
    "factor on the scores": Removal({"rope_scaling": {
        **DEEPSEEK_V3["rope_scaling"], "mscale": None, "mscale_all_dim": None, "attention_factor":
            (0.15 * math.log(4.0) + 1) / (0.08 * math.log(4.0) + 1)}}),
}
CASES = {
    "llama": Case("grouped-query attention, untied head", neutral={"norm.weight": 1.0}),
    "llama_packed": Case("several documents in a row", packed=True),
    "llama_tied_linear": Case("tied head, linear rotary scaling",
                              {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
                              without={"rope_scaling": None}),
    "llama_llama3": Case("llama3 rotary scaling", {**SCALED, "rope_scaling": LLAMA3},
                         without={"rope_scaling": None}),
    "llama_yarn": Case("yarn rotary scaling, attention factor from the factor", {**SCALED, "rope_scaling": YARN},
                       without={"rope_scaling": None}),
    "llama_yarn_mscale": Case("yarn rotary scaling with its optional keys",
                              {**SCALED, "rope_scaling": YARN_ALL_KEYS}, without={"rope_scaling": YARN}),
    "llama_bias": Case("biases in attention and MLP", {"attention_bias": True, "mlp_bias": True},
                       neutral={".bias": 0.0}),
    "qwen2": Case("query, key and value biases, tied head", {"tie_word_embeddings": True}, "qwen2",
                  neutral={".bias": 0.0}),
    "qwen3": Case("query and key norms, heads wider than hidden / heads, untied head", QWEN3, "qwen3",
                  neutral={"q_norm.weight": 1.0, "k_norm.weight": 1.0}),
    "qwen3_packed": Case("several documents in a row", QWEN3, "qwen3", packed=True),
    "mistral": Case("a sliding window in every layer", {"sliding_window": 5, "head_dim": 8, "intermediate_size": 24},
                    "mistral", without={"sliding_window": None}),
    "qwen3_window": Case("a sliding window in one of two layers",
                         {"sliding_window": 6, "head_dim": 8, "intermediate_size": 24, "use_sliding_window": True,
                          "layer_types": ["sliding_attention", "full_attention"]}, "qwen3",
                         removals={"window": Removal({"use_sliding_window": False, "layer_types": None}),
                                   "full layer": Removal({"layer_types": ["sliding_attention"] * 2})}),
    "glm": Case("neighbours of half a head rotated, gate and up in one matrix", {**GLM, "num_hidden_layers": 1}, "glm",
                removals=GLM_REMOVALS),
    "glm4": Case("the same with norms after the sublayers; several documents in a row", GLM, "glm4", packed=True,
                 removals=GLM_REMOVALS | {"norms": Removal(neutral={"post_self_attn_layernorm.weight": 1.0,
                                                                    "post_mlp_layernorm.weight": 1.0})}),
    "mixtral": Case("two of four experts, weights that sum to 1", MIXTRAL, "mixtral",
                    without={"num_experts_per_tok": 1}, salt="2"),
    "qwen3_moe": Case("two of eight experts, weights as the softmax gives them, a dense layer between", QWEN3_MOE,
                      "qwen3_moe", removals={
                          "weights as they are": Removal({"norm_topk_prob": True}),
                          "dense layer": Removal({"mlp_only_layers": []}),
                          "norms": Removal(neutral={"q_norm.weight": 1.0, "k_norm.weight": 1.0})}, salt="47"),
    "qwen2_moe": Case("a shared expert with a gate", QWEN2_MOE, "qwen2_moe", removals={
        "gate": Removal(neutral={"shared_expert_gate.weight": 0.0}),
        "shared expert": Removal(neutral={"shared_expert.down_proj.weight": 0.0}),
        "weights as they are": Removal({"norm_topk_prob": True}),
        "attention bias": Removal(neutral={"_proj.bias": 0.0})}, salt="10"),
    "glm4_moe": Case("sigmoid router with groups and correction bias, shared experts, a dense first layer, half of a"
                     " head rotated", GLM4_MOE, "glm4_moe", removals=GLM4_MOE_REMOVALS, salt="1"),
    "deepseek_v3": Case("multi-head latent attention with latent queries, yarn with mscale; experts as in glm4_moe",
                        DEEPSEEK_V3, "deepseek_v3", removals=DEEPSEEK_V3_REMOVALS, salt="2"),
    "deepseek_v3_packed": Case("multi-head latent attention without latent queries; several documents in a row",
                               {**DEEPSEEK_V3, "q_lora_rank": None, "rope_scaling": None, "attention_bias": False,
                                "v_head_dim": 14, "num_hidden_layers": 1, "first_k_dense_replace": 0},
                               "deepseek_v3", packed=True),
    "mtp_1": Case("one module for a further token, dense", mtp_depth=1),
    "mtp_2": Case("two multi-token prediction modules, with experts; several documents in a row",
                  {**GLM4_MOE, "num_hidden_layers": 1}, "glm4_moe", packed=True, mtp_depth=2, salt="10"),
    **FAMILY_CASES,
}


def file_name(name: str) -> str:
    """Returns the file of a case; its prefix says which tests read it: of a family, of a dense model, experts or
    multi-token prediction."""
    if name in FAMILY_CASES:
        return f"family_{name}"
    if name.startswith("mtp_"):
        return name
    return ("experts_" if "_moe" in name or name.startswith(("mixtral", "deepseek")) else "model_") + name


def make_model_case(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    case = CASES[name]
    batch = make_batch(name + case.salt, case.packed, case.changes.get("vocab_size", VOCABULARY))
    model = build_model(case, name, {})
    with routers_watched(name, model) as margins:
        logits = forward(model, batch)
    total = loss_sum(logits, batch["labels"])
    valid_tokens = int((batch["labels"] != IGNORE_INDEX).sum())
    (total / valid_tokens).backward()
    effects = {what: effect(case, name, removal, batch, logits.detach().numpy())
               for what, removal in case.all_removals.items()}
    check_names(name, model)
    return _case_tensors(batch, model, logits, total, valid_tokens), _case_metadata(case, model, name, effects, margins)


def make_mtp_case(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Gradients are of (loss_sum + MTP_FACTOR / depth * all mtp_loss_sums) / valid_tokens."""
    case = CASES[name]
    batch = make_batch(name + case.salt, case.packed)
    model = attach_modules(case, name)
    with routers_watched(name, model) as margins:
        total, mtp, (logits, *_) = sums_and_logits(model, batch, case.mtp_depth)
    valid_tokens = int((batch["labels"] != IGNORE_INDEX).sum())
    ((total + MTP_FACTOR / case.mtp_depth * sum(mtp)) / valid_tokens).backward()
    tensors = _case_tensors(batch, model, logits, total, valid_tokens)
    tensors["mtp_loss_sums"] = np.array([float(one.detach()) for one in mtp], np.float32)
    metadata = _case_metadata(case, model, name, mtp_effects(model, batch, case), margins)
    return tensors, metadata | {"mtp_loss_factor": MTP_FACTOR}


def _case_tensors(
    batch: dict[str, np.ndarray], model: torch.nn.Module, logits: torch.Tensor, total: torch.Tensor, valid_tokens: int
) -> dict[str, np.ndarray]:
    tensors = {**batch, "logits": logits.detach().numpy(), "loss_sum": total.detach().numpy().reshape(()),
               "valid_tokens": np.array(valid_tokens, dtype=np.int64)}
    tensors |= {f"weight.{key}": array for key, array in state_on_disk(model).items()}
    return tensors | {f"gradient.{key}": array for key, array in gradients_on_disk(model).items()}


def _case_metadata(
    case: Case, model: torch.nn.Module, name: str, effects: dict[str, float], margins: list[float]
) -> dict[str, Any]:
    moved = require_effect(name, effects)
    metadata = {"what": case.what, "config": {"model_type": case.model_type, **BASE, **case.changes},
                "config_as_saved": json.loads(model.config.to_json_string(use_diff=False)),
                "effect_on_logits": float(f"{moved:.2g}"), "parameters": model.num_parameters(only_trainable=True)}
    if margins or case.mtp_depth:
        metadata |= {"config_json": json.loads(model.config.to_json_string()),
                     "smallest_margin": float(f"{min(margins, default=1.0):.2g}"),
                     "effects_on_logits": {what: float(f"{one:.2g}") for what, one in effects.items()}}
    return metadata


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
    """Makes the content of one golden file, without a date, so that making it again changes nothing."""
    if name.startswith("optimizer_"):
        case = name.removeprefix("optimizer_")
        if case == "loraplus":
            tensors, metadata = make_loraplus_case(golden_files.golden_gradient)
        else:
            tensors, metadata = make_optimizer_case(case)
    elif name.startswith(("adapter_", "quantized_")):
        case, base = name.partition("_")[2], CASES[ADAPTED]
        changes = {} if case in ADAPTER_CASES else QUANTIZED_SIZES
        model = build_model(base, ADAPTED, changes)
        tensors, metadata = make_adapter_case(case, model, make_batch(ADAPTED, base.packed))
    elif name.startswith("other_"):
        tensors, metadata = make_telechat_case(name.removeprefix("other_"))
    elif name.startswith("mtp_"):
        tensors, metadata = make_mtp_case(name)
    else:
        tensors, metadata = make_model_case(name.split("_", 1)[1])
    metadata["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__,
                            "numpy": np.__version__, "safetensors": safetensors.__version__,
                            "python": ".".join(map(str, sys.version_info[:3]))}
    contiguous = {key: np.array(value, order="C") for key, value in tensors.items()}
    return save(contiguous, metadata={"golden": json.dumps(metadata, sort_keys=True)})


def differences(content: bytes, path: Path) -> list[str]:
    """Differences between a file on disk and the script's result; float32 numbers may differ in their last bits."""
    if not path.exists():
        return ["is missing"]
    made, stored = safetensors.numpy.load(content), safetensors.numpy.load(path.read_bytes())
    if made.keys() != stored.keys():
        return [f"tensors {sorted(made.keys() ^ stored.keys())} are in one of the two only"]
    return [f"{key} differs" for key in made if made[key].shape != stored[key].shape
            or not np.allclose(made[key], stored[key], rtol=1e-5, atol=1e-6)]


def main() -> int:
    names = [*map(file_name, CASES), *(f"other_{name}" for name in TELECHAT_CASES),
             *(f"optimizer_{name}" for name in OPTIMIZER_CASES), "optimizer_loraplus",
             *(f"adapter_{name}" for name in ADAPTER_CASES), *(f"quantized_{name}" for name in QUANTIZED_CASES)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append",
                        help=f"make only this one (without the part before _): {', '.join(names)}")
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
        raise SystemExit(f"exceeds the {LARGEST_TOTAL_BYTES} bytes that the repository should contain")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
