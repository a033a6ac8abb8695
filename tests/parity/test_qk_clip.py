"""The largest attention logits, and QK-clip: algorithm 1 of Kimi K2 (arXiv 2507.20534), against NumPy.

Limits: tolerances.py. A missing square root, or a scaled value, is off by more than 1e-1.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy_kernels import assert_same_bits
from tiny_trainer import TOKENS, TinyTrainer, make_batch
from tolerances import decoder_limits

from trainer.data import IGNORE_INDEX, Batch
from trainer.models.spec.sublayers import attention_spec

NOPE, ROPE, VALUE, LATENT = 4, 2, 7, 8
MODEL = {
    "architectures": "LlamaForCausalLM", "multi_latent_attention": True, "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}  # fmt: skip
ATTENTION = "model.layers.0.self_attn."


def latent(query_rank: int | None = 10) -> TinyTrainer:
    return enlarged(TinyTrainer(True, None, **MODEL | {"q_lora_rank": query_rank}))


def enlarged(made: TinyTrainer) -> TinyTrainer:
    """Sets initial weights whose logits are a few units large."""
    random = np.random.default_rng(3)
    for name, value in made.initial.items():
        if "self_attn" in name and value.ndim == 2:
            made.initial[name] = random.normal(0, 0.6, value.shape).astype(np.float32)
    return made


def unrotated(seed: int, rows: int = 2) -> Batch:
    """Returns sequences whose tokens all have position 0, where the rotation is none; two segments in the first."""
    batch = make_batch(seed, 9, rows=rows)
    return batch._replace(positions=np.zeros_like(batch.positions))


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def max_logits(trainer: TinyTrainer, weights: dict[str, np.ndarray], batch: Batch) -> np.ndarray:
    """Returns the largest logit of each head of layer 0, at least 0, in float64."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    spec = attention_spec(trainer.model.settings)
    sizes = spec.latent
    x = weights["model.embed_tokens.weight"][batch.input_ids]
    x = normed(x, weights["model.layers.0.input_layernorm.weight"], spec.norm.eps)
    if sizes.query_rank is None:
        queries = x @ weights[f"{ATTENTION}q_proj.weight"].T
    else:
        low = x @ weights[f"{ATTENTION}q_a_proj.weight"].T
        low = normed(low, weights[f"{ATTENTION}q_a_layernorm.weight"], sizes.eps)
        queries = low @ weights[f"{ATTENTION}q_b_proj.weight"].T
    down = x @ weights[f"{ATTENTION}kv_a_proj_with_mqa.weight"].T
    low = normed(down[..., :LATENT], weights[f"{ATTENTION}kv_a_layernorm.weight"], sizes.eps)
    both = (low @ weights[f"{ATTENTION}kv_b_proj.weight"].T).reshape(*x.shape[:2], spec.heads, NOPE + VALUE)
    queries = queries.reshape(*x.shape[:2], spec.heads, NOPE + ROPE)
    logits = np.einsum("bqhd,bkhd->bhqk", queries[..., :NOPE], both[..., :NOPE])
    logits += np.einsum("bqhd,bkd->bhqk", queries[..., NOPE:], down[..., LATENT:])
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    visible = same & np.tri(TOKENS, dtype=bool)
    return np.maximum(np.where(visible[:, None], logits / math.sqrt(NOPE + ROPE), 0).max((0, 2, 3)), 0)


def clipped(
    weights: dict[str, np.ndarray], logits_H: np.ndarray, threshold: float, query: str
) -> dict[str, np.ndarray]:
    """Returns the weights after algorithm 1, lines 10 to 18, head by head."""
    after = dict(weights)
    q = weights[f"{ATTENTION}{query}.weight"].astype(np.float64).copy()
    kv = weights[f"{ATTENTION}kv_b_proj.weight"].astype(np.float64).copy()
    for head, largest in enumerate(logits_H):
        if largest > threshold:
            gamma = threshold / largest
            rows = slice(head * (NOPE + ROPE), head * (NOPE + ROPE) + NOPE)
            q[rows] *= math.sqrt(gamma)
            q[rows.stop : rows.stop + ROPE] *= gamma
            kv[head * (NOPE + VALUE) : head * (NOPE + VALUE) + NOPE] *= math.sqrt(gamma)
    return after | {f"{ATTENTION}{query}.weight": q, f"{ATTENTION}kv_b_proj.weight": kv}


def muon(threshold: float, **changes: object) -> dict:
    return {"type": "Muon", "qk_clip_threshold": threshold} | changes


@pytest.mark.parametrize(("query_rank", "query"), [(10, "q_b_proj"), (None, "q_proj")])
def test_weights_of_large_heads_are_those_of_the_paper(query_rank: int | None, query: str) -> None:
    """A learning rate of 0 leaves the clip alone. The step after it has the threshold as its largest logits.

    The first micro-batch has no loss token, but the largest logits of some heads."""
    trainer = latent(query_rank)
    batches = [unrotated(1), unrotated(2)]
    batches[0].labels[...] = IGNORE_INDEX
    of_batches = [max_logits(trainer, trainer.initial, batch) for batch in batches]
    right_H = np.max(of_batches, axis=0)
    assert (of_batches[0] > of_batches[1]).any()
    threshold = float(np.sort(right_H)[1:3].mean())  # some heads are above it, some below
    limit = decoder_limits(trainer.model.settings, rows=2).loss
    step = trainer.step(lambda update: 0.0, optimizer=muon(threshold))
    result = step(batches)
    np.testing.assert_allclose(result.max_logits[0], right_H, rtol=limit)
    assert result.clipped_heads == (result.max_logits > threshold).sum()
    assert 0 < (right_H > threshold).sum() < len(right_H)
    after = trainer.weights()
    for name, value in clipped(trainer.initial, right_H, threshold, query).items():
        if name.startswith("model.layers.0.") or "self_attn" not in name:
            np.testing.assert_allclose(after[name], value, rtol=10 * limit, err_msg=name)
    again = step(batches)
    np.testing.assert_allclose(again.max_logits[0], np.minimum(right_H, threshold), rtol=10 * limit)


def test_the_monitor_measures_grouped_heads_without_qk_clip() -> None:
    """Two queries share each key. AdamW has nothing to clip, and no bit of its training changes."""
    trainer = enlarged(TinyTrainer())
    batch = unrotated(3)
    first = {name.removeprefix("model.layers.0."): value for name, value in trainer.initial.items()}
    eps = trainer.model.settings.rms_norm_eps
    x = normed(first["model.embed_tokens.weight"][batch.input_ids], first["input_layernorm.weight"], eps)
    queries = (x @ first["self_attn.q_proj.weight"].T).reshape(*x.shape[:2], 2, 2, 4)
    keys = (x @ first["self_attn.k_proj.weight"].T).reshape(*x.shape[:2], 2, 4)
    logits = np.einsum("bqkgd,btkd->bkgqt", queries, keys) / math.sqrt(4)
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    visible = (same & np.tri(TOKENS, dtype=bool))[:, None, None]
    right_H = np.maximum(np.where(visible, logits, 0).max((0, 3, 4)), 0).reshape(-1)
    results = []
    for monitors in ([{"type": "MaxLogitsMonitor"}], []):
        results.append((trainer.step(callbacks=monitors)([batch]), trainer.weights()))
    limit = decoder_limits(trainer.model.settings, rows=2).loss
    np.testing.assert_allclose(results[0][0].max_logits[0], right_H, rtol=limit)
    assert results[0][0].clipped_heads is None and results[1][0].max_logits is None
    assert_same_bits(results[0][1], results[1][1])


def test_no_head_above_the_threshold_changes_no_bit() -> None:
    trainer = latent()
    results = []
    for section in (muon(1e6), {"type": "Muon", "qk_clip_enabled": False}):
        step = trainer.step(lambda update: 0.02, optimizer=section)
        results.append((step([unrotated(1), unrotated(2)]), trainer.weights()))
    assert results[0][0].clipped_heads == 0 and results[0][0].max_logits.max() > 1
    assert results[1][0].max_logits is None
    assert results[0][0].loss == results[1][0].loss
    assert_same_bits(results[0][1], results[1][1])


def test_each_step_measures_its_own_logits_and_evaluation_none() -> None:
    """Compares the maxima of a step after others with those of a new step; the model computes logits in between."""
    trainer = latent()
    step = trainer.step(lambda update: 0.0, optimizer=muon(1e6))
    step([unrotated(1)])
    trainer.model.logits(trainer.build_inputs(unrotated(1, rows=1)))
    second = step([unrotated(2)]).max_logits
    alone = trainer.step(lambda update: 0.0, optimizer=muon(1e6))([unrotated(2)]).max_logits
    np.testing.assert_array_equal(second, alone)
