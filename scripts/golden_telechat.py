"""TeleChat2 and TeleChat3-1.8B in PyTorch, by their published equations: transformers has no class for them.

Part of make_golden.py. They are Llamas (RMSNorm, rotary halves, SwiGLU, grouped query heads) but for this:

- TeleChat2: a bias on the outputs of attention and feed-forward layer; key_value holds for each key head the rows of
  its key, then those of its value. With experts: softmax over all, the best ones with weights that sum to 1, and a bias
  on each expert's output.
- TeleChat3-1.8B: the embedding has another width, which two matrices map to the residual stream and back; it is the
  head, too; and so many layers share the matrices of attention.

Tensors have the names of the published files. Shapes: B rows, T tokens, H query heads, K key heads, d head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from golden_models import IGNORE_INDEX, REQUIRED_MARGIN, VOCABULARY, attention_mask, loss_sum, make_batch, make_weight
from torch.nn import functional

HIDDEN, HEADS, KEY_HEADS, WIDTH, EPS, BASE = 32, 4, 2, 40, 1e-3, 10000.0
SIZES = {"hidden_size": HIDDEN, "num_heads": HEADS, "n_kv_heads": KEY_HEADS, "intermediate_size": WIDTH,
         "vocab_size": VOCABULARY, "rms_norm_eps": EPS, "seq_length": 24}
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "aux_loss_factor": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "telechat2": {"num_layers": 1, "type": "TelechatConfig"},
    "telechat2_experts": {"num_layers": 1, "type": "TelechatConfig", "moe_config": EXPERTS},
    "telechat3_1_8b": {"num_layers": 3, "layers_group": 2, "embedding_size": 16, "out_proj_has_bias": False,
                       "net_name": "telechat3_1b", "type": "TelechatConfig"},
}
"""By name the model_config of MindSpore Transformers' files, in small sizes."""
SALT = "1"
"""Chooses weights and tokens such that no router's choice is a close one."""

Weights = dict[str, torch.Tensor]


def tensor_shapes(case: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a file."""
    keys, layers, experts = 2 * KEY_HEADS * HIDDEN // HEADS, range(case["num_layers"]), case.get("moe_config")
    if "net_name" in case:
        width, shapes = case["embedding_size"], {}
        shapes["model.embed_tokens.weight"] = (VOCABULARY, width)
        shapes["model.embedding_hidden_mapping_in.weight"] = (HIDDEN, width)
        for layer in layers:
            name = f"model.layers.{layer}"
            shapes |= {f"{name}.{one}_layernorm.weight": (HIDDEN,) for one in ("input", "post_attention")}
            if layer % case["layers_group"] == 0:
                outs = {"q": HIDDEN, "k": keys // 2, "v": keys // 2, "o": HIDDEN}
                shapes |= {f"{name}.self_attn.{one}_proj.weight": (out, HIDDEN) for one, out in outs.items()}
            shapes |= {f"{name}.mlp.{one}_proj.weight": (WIDTH, HIDDEN) for one in ("gate", "up")}
            shapes[f"{name}.mlp.down_proj.weight"] = (HIDDEN, WIDTH)
        return shapes | {"model.embedding_hidden_mapping_out.weight": (width, HIDDEN), "model.norm.weight": (width,)}
    shapes = {"transformer.word_embeddings.weight": (VOCABULARY, HIDDEN)}
    for layer in layers:
        name = f"transformer.h.{layer}"
        shapes |= {f"{name}.{one}_layernorm.weight": (HIDDEN,) for one in ("input", "post_attention")}
        attention = f"{name}.self_attention"
        shapes |= {f"{attention}.query.weight": (HIDDEN, HIDDEN), f"{attention}.key_value.weight": (keys, HIDDEN),
                   f"{attention}.dense.weight": (HIDDEN, HIDDEN), f"{attention}.dense.bias": (HIDDEN,)}
        homes = [f"{name}.mlp"]
        if experts:
            shapes[f"{name}.mlp.router.weight"] = (experts["expert_num"], HIDDEN)
            homes = [f"{name}.mlp.local_experts.{expert}" for expert in range(experts["expert_num"])]
        for home in homes:
            shapes |= {f"{home}.{one}_proj.weight": (WIDTH, HIDDEN) for one in ("gate", "up")}
            shapes |= {f"{home}.down_proj.weight": (HIDDEN, WIDTH), f"{home}.down_proj.bias": (HIDDEN,)}
    return shapes | {"transformer.ln_f.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def forward(case: dict[str, Any], w: Weights, batch: dict[str, np.ndarray], margins: list[float]) -> torch.Tensor:
    """Logits [B, T, V]."""
    ids, is_small = torch.from_numpy(batch["input_ids"]).long(), "net_name" in case
    x = w["model.embed_tokens.weight" if is_small else "transformer.word_embeddings.weight"][ids]
    if is_small:
        x = x @ w["model.embedding_hidden_mapping_in.weight"].T
    mask, angles = attention_mask(batch), rotary_angles(batch["positions"])
    for layer in range(case["num_layers"]):
        name = f"model.layers.{layer}" if is_small else f"transformer.h.{layer}"
        y = rms_norm(x, w[f"{name}.input_layernorm.weight"])
        if is_small:
            shared = f"model.layers.{layer - layer % case['layers_group']}.self_attn"
            q, k, v = (heads(y @ w[f"{shared}.{one}_proj.weight"].T) for one in "qkv")
            x = x + attend(q, k, v, mask, angles) @ w[f"{shared}.o_proj.weight"].T
        else:
            own = f"{name}.self_attention"
            both = (y @ w[f"{own}.key_value.weight"].T).unflatten(-1, (KEY_HEADS, 2, HIDDEN // HEADS))
            k, v = (both[..., part, :].transpose(1, 2) for part in range(2))
            q = heads(y @ w[f"{own}.query.weight"].T)
            x = x + attend(q, k, v, mask, angles) @ w[f"{own}.dense.weight"].T + w[f"{own}.dense.bias"]
        y = rms_norm(x, w[f"{name}.post_attention_layernorm.weight"])
        x = x + (mixture(case["moe_config"], w, f"{name}.mlp", y, margins) if "moe_config" in case
                 else feed_forward(w, f"{name}.mlp", y))
    if is_small:
        x = x @ w["model.embedding_hidden_mapping_out.weight"].T
        return rms_norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T
    return rms_norm(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def heads(x: torch.Tensor) -> torch.Tensor:
    """Splits into heads: [B, heads, T, d]."""
    return x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)


def rotary_angles(positions: np.ndarray) -> torch.Tensor:
    """Returns [B, 1, T, d / 2]."""
    size = HIDDEN // HEADS
    return torch.from_numpy(positions)[:, None, :, None] / BASE ** (torch.arange(0, size, 2) / size)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, angles: torch.Tensor
) -> torch.Tensor:
    """Returns [B, T, H d]."""
    k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (turned(k, angles), v))
    scores = turned(q, angles) @ k.transpose(2, 3) / (HIDDEN // HEADS) ** 0.5 + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def feed_forward(w: Weights, name: str, y: torch.Tensor) -> torch.Tensor:
    inner = functional.silu(y @ w[f"{name}.gate_proj.weight"].T) * (y @ w[f"{name}.up_proj.weight"].T)
    out = inner @ w[f"{name}.down_proj.weight"].T
    return out + w[f"{name}.down_proj.bias"] if f"{name}.down_proj.bias" in w else out


def mixture(moe: dict[str, Any], w: Weights, name: str, y: torch.Tensor, margins: list[float]) -> torch.Tensor:
    scores = (y @ w[f"{name}.router.weight"].T).softmax(-1)
    best = scores.topk(moe["num_experts_chosen"] + 1, -1).values
    margins.append(float((best[..., -2] - best[..., -1]).min().detach()))
    kept = torch.where(scores >= best[..., -2:-1], scores, 0.0)
    shares = kept / kept.sum(-1, keepdim=True)
    outs = (feed_forward(w, f"{name}.local_experts.{expert}", y) for expert in range(moe["expert_num"]))
    return sum(shares[..., number, None] * out for number, out in enumerate(outs))


def make_case(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and header of a golden file."""
    case, margins = CASES[name], []
    batch = make_batch(name + SALT, packed=True)
    w = {key: torch.from_numpy(make_weight(f"{name}{SALT}/{key}", shape)).requires_grad_()
         for key, shape in tensor_shapes(case).items()}
    logits = forward(case, w, batch, margins)
    total, valid_tokens = loss_sum(logits, batch["labels"]), int((batch["labels"] != IGNORE_INDEX).sum())
    (total / valid_tokens).backward()
    if min(margins, default=1.0) < REQUIRED_MARGIN:
        raise SystemExit(f"{name}: a router's choice has a margin of {min(margins):.2g}: change the sizes")
    tensors = {**batch, "logits": logits.detach().numpy(), "loss_sum": total.detach().numpy().reshape(()),
               "valid_tokens": np.array(valid_tokens, dtype=np.int64)}
    tensors |= {f"weight.{key}": weight.detach().numpy() for key, weight in w.items()}
    tensors |= {f"gradient.{key}": weight.grad.numpy() for key, weight in w.items()}
    config = {"arch": {"type": "TelechatForCausalLM"}, "model_config": {**SIZES, **case}}
    what = "PyTorch by the published equations"
    return tensors, {"what": what, "config": config, "smallest_margin": float(f"{min(margins, default=1.0):.2g}")}
