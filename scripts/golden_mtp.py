"""Multi-token prediction in PyTorch, as DeepSeek-V3 describes it (DeepSeek-AI 2024, section 2.2, equations 21 to 25).

Part of make_golden.py. Module k (from 1) of a model of L layers has the names `model.layers.{L+k-1}.*` of the released
weights, and computes

    h_i^k = shared_head.norm(block_k(eh_proj [enorm(Emb(t_{i+k})); hnorm(h_i^{k-1})])),    logits = head(h_i^k)

to predict t_{i+k+1}. Embedding and head are the main model's. What a module hands on is the state after its norm, and
h^0 is the main model's after its final norm: the paper does not say, and so do transformers (`MtpLayer`) and vLLM
(`deepseek_mtp`) with the released weights, whose order of the two halves of the product this is too; the paper writes
them the other way round.
"""

from __future__ import annotations

import numpy as np
import torch
from golden_models import BASE, IGNORE_INDEX, TOKENS, Case, attention_mask, build_model, fill_weights, loss_sum

VARIANTS = {
    "embedding first": "hidden first",
    "the token k places further": "same token",
    "h^0 after the final norm": "before the final norm",
    "a norm of its own before the head": "final norm",
    "modules in a chain": "all from h^0",
    "no loss across documents": "across documents",
}
"""Feature of the golden files -> the mistake that must change them."""


def attach_modules(case: Case, name: str) -> torch.nn.Module:
    """Adds `mtp_depth` layers to the model, which also have the weights of an MTP module."""
    layers = {**BASE, **case.changes}["num_hidden_layers"]
    model = build_model(case, name, {"num_hidden_layers": layers + case.mtp_depth})
    make_norm, hidden, eps = type(model.model.norm), model.config.hidden_size, model.config.rms_norm_eps
    for layer in model.model.layers[layers:]:
        layer.enorm, layer.hnorm = make_norm(hidden, eps), make_norm(hidden, eps)
        layer.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        layer.shared_head = torch.nn.Module()
        layer.shared_head.norm = make_norm(hidden, eps)
    fill_weights(model, name + case.salt)
    model.config.num_hidden_layers, model.config.num_nextn_predict_layers = layers, case.mtp_depth
    return model


def mtp(array_BT: np.ndarray, places: int, fill: int) -> np.ndarray:
    """Shifts a sequence to the left by so many positions; `fill` after the end."""
    moved = np.full_like(array_BT, fill)
    moved[:, : TOKENS - places] = array_BT[:, places:]
    return moved


def mtp_labels(batch: dict[str, np.ndarray], places: int, variant: str) -> np.ndarray:
    """Labels of a module: none where its input token belongs to another document."""
    labels, segments = mtp(batch["labels"], places, IGNORE_INDEX), batch["segment_ids"]
    if variant == "across documents":
        return labels
    return np.where(mtp(segments, places, -1) == segments, labels, IGNORE_INDEX)


def sums_and_logits(
    model: torch.nn.Module, batch: dict[str, np.ndarray], depth: int, variant: str = ""
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Loss sum of the main model, one of each module, and the logits of all of them in this order."""
    base, positions = model.model, torch.from_numpy(batch["positions"]).long()
    x = base.embed_tokens(torch.from_numpy(batch["input_ids"]).long())
    rest = {"attention_mask": attention_mask(batch), "position_embeddings": base.rotary_emb(x, positions),
            "position_ids": positions}
    for layer in base.layers[:-depth]:
        x = layer(x, **rest)
    all_logits = [model.lm_head(base.norm(x))]
    if variant != "before the final norm":
        x = base.norm(x)
    first, losses = x, []
    for places, layer in enumerate(base.layers[-depth:], 1):
        ids = mtp(batch["input_ids"], 0 if variant == "same token" else places, 0)
        embedded, known = base.embed_tokens(torch.from_numpy(ids).long()), first if variant == "all from h^0" else x
        sublayers = [layer.enorm(embedded), layer.hnorm(known)]
        x = layer(layer.eh_proj(torch.cat(sublayers[::-1] if variant == "hidden first" else sublayers, -1)), **rest)
        norm = base.norm if variant == "final norm" else layer.shared_head.norm
        x = norm(x)
        all_logits.append(model.lm_head(x))
        losses.append(loss_sum(all_logits[-1], mtp_labels(batch, places, variant)))
    return loss_sum(all_logits[0], batch["labels"]), losses, all_logits


def mtp_effects(model: torch.nn.Module, batch: dict[str, np.ndarray], case: Case) -> dict[str, float]:
    """Returns how far a module's logits, or its relative loss, move with each mistake."""
    effects = {}
    with torch.no_grad():
        _, losses, logits = sums_and_logits(model, batch, case.mtp_depth)
        without_meaning = {"all from h^0": case.mtp_depth == 1, "across documents": not case.packed}
        for what, variant in VARIANTS.items():
            if without_meaning.get(variant, False):
                continue
            _, other_losses, other_logits = sums_and_logits(model, batch, case.mtp_depth, variant)
            moved = [float((a - b).abs().max()) for a, b in zip(logits, other_logits, strict=True)]
            moved += [abs(float(a / b) - 1) for a, b in zip(losses, other_losses, strict=True)]
            effects[what] = max(moved)
    return effects
