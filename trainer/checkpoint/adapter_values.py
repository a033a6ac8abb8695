"""Adapters whose initial values come from the base model's weights, and the plain LoRA that they are saved as.

PiSSA (Meng et al. 2024) and OLoRA (Büyükakyüz 2024) start with scale B0 A0 taken out of W: W - scale B0 A0 is frozen in
place of W. A reader that has the original W needs W - scale B0 A0 + scale B A = W + scale [B, -B0] [A; A0]: an adapter
of twice the rank, as which PEFT saves such adapters, too (`path_initial_model_for_weight_conversion`). Both halves can
be read back from it, so that a training resumes with the same bits.

Legend: O/I out and in features of a matrix, R rank: A [R, I], B [O, R].
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from trainer.models.spec.adapters import adapted_matrices, initial_method, merged_matrix
from trainer.models.spec.names import adapter_names, magnitude_name
from trainer.parallel.sharding import ShardedArray, as_sharded_array

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

Weights = dict[str, np.ndarray]


def initial_names(matrix: str) -> tuple[str, str]:
    """Returns the names of A0 and B0 of a matrix, which are kept beside the weights."""
    return f"{matrix}.lora_A.initial", f"{matrix}.lora_B.initial"


def decompose(base: Mapping[str, np.ndarray], settings: ModelConfig, seed: int) -> Weights:
    """Returns the adapters that the training starts with, as they are saved: both halves are A0 and B0.

    Args:
        base: The base model's weights, in which a multi-token prediction module may be missing.
        seed: Of the random numbers of `pissa_niter_N`.
    """
    adapters: Weights = {}
    method, _, iterations = initial_method(settings).partition("_niter_")
    for matrix, adapter in adapted_matrices(settings):
        if f"{matrix}.weight" not in base:
            continue
        weight_OI = base[f"{matrix}.weight"]
        if method == "olora":
            q, r = np.linalg.qr(weight_OI)
            a_RI = r[: adapter.rank]
            b_OR = q[:, : adapter.rank]
        else:
            if iterations:
                stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(f"{matrix}.svd".encode())]))
                u, values, vt = _fast_svd(weight_OI, adapter.rank, int(iterations), stream)
            else:
                u, values, vt = np.linalg.svd(weight_OI, full_matrices=False)
            # PiSSA: scale B A is the best approximation of W = U S V^T of this rank.
            root_R = np.sqrt(values[: adapter.rank] / np.float32(adapter.scale))
            a_RI = root_R[:, None] * vt[: adapter.rank]
            b_OR = u[:, : adapter.rank] * root_R
        name_a, name_b = adapter_names(matrix)
        adapters[name_a] = np.concatenate([a_RI, a_RI]).astype(np.float32)
        adapters[name_b] = np.concatenate([b_OR, -b_OR], axis=1).astype(np.float32)
    return adapters


def _fast_svd(
    weight_OI: np.ndarray, rank: int, iterations: int, stream: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the leading part of U, S and V^T by subspace iteration (Halko et al. 2011, algorithms 4.4 and 5.1)."""
    q, _ = np.linalg.qr(weight_OI @ stream.standard_normal((weight_OI.shape[1], rank), dtype=np.float32))
    for _ in range(iterations):
        q, _ = np.linalg.qr(weight_OI.T @ q)
        q, _ = np.linalg.qr(weight_OI @ q)
    u, values, vt = np.linalg.svd(q.T @ weight_OI, full_matrices=False)
    return q @ u, values, vt


def row_lengths(weights: Mapping[str, np.ndarray], settings: ModelConfig) -> Weights:
    """Returns the magnitudes that DoRA starts with: the lengths of the rows of W + scale B A. Empty without DoRA."""
    lengths: Weights = {}
    for matrix, adapter in adapted_matrices(settings):
        if adapter.has_magnitude and f"{matrix}.weight" in weights:
            a_RI, b_OR = (weights[name] for name in adapter_names(matrix))
            merged_OI = merged_matrix(np.asarray(weights[f"{matrix}.weight"]), a_RI, b_OR, adapter.scale)
            lengths[magnitude_name(matrix)] = np.linalg.norm(merged_OI, axis=1)
    return lengths


def take_out(weights: Weights, settings: ModelConfig) -> Weights:
    """Returns the weights of a training from those of the base model and adapters as they are saved.

    A0 and B0 are returned beside them, see `initial_names`.
    """
    taken: Weights = {}
    for matrix, adapter in adapted_matrices(settings):
        if f"{matrix}.weight" not in weights:
            continue
        name_a, name_b = adapter_names(matrix)
        initial_a, initial_b = initial_names(matrix)
        rank = adapter.rank
        taken[name_a] = np.ascontiguousarray(weights[name_a][:rank])
        taken[name_b] = np.ascontiguousarray(weights[name_b][:, :rank])
        taken[initial_a] = np.ascontiguousarray(weights[name_a][rank:])
        taken[initial_b] = -weights[name_b][:, rank:]
        removed_OI = (np.float32(adapter.scale) * taken[initial_b]) @ taken[initial_a]
        taken[f"{matrix}.weight"] = weights[f"{matrix}.weight"] - removed_OI
    return weights | taken


def pop_initial(weights: Weights) -> Weights:
    """Removes A0 and B0 from the weights and returns them."""
    return {name: weights.pop(name) for name in list(weights) if name.endswith(".initial")}


def as_saved(trained: Mapping[str, ShardedArray], initial: Mapping[str, np.ndarray]) -> dict[str, ShardedArray]:
    """Returns the adapters as they are saved, from A and B and their initial values."""
    saved = dict(trained)
    matrices = [name.removesuffix(".lora_A.initial") for name in initial if name.endswith(".lora_A.initial")]
    for matrix in matrices:
        name_a, name_b = adapter_names(matrix)
        a_RI, b_OR = (trained[name].array.reshape(trained[name].spec.global_shape) for name in (name_a, name_b))
        initial_a, initial_b = (initial[name] for name in initial_names(matrix))
        saved[name_a] = as_sharded_array(np.concatenate([a_RI, initial_a]))
        saved[name_b] = as_sharded_array(np.concatenate([b_OR, -initial_b], axis=1))
    return saved
