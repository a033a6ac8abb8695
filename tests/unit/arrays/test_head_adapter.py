"""The adapter of the output projection in float16, whose small gradients need all digits of that dtype."""

from __future__ import annotations

import numpy as np
from tolerances import U_FLOAT16

from trainer.arrays.tiles import SublayerCall
from trainer.arrays.vocabulary.head_adapter import LORA_A, LORA_B, HeadAdapter
from trainer.models.spec.model import AdapterSpec

TOKENS, WIDTH, VOCABULARY, RANK = 12, 16, 40, 4
DIVISOR = np.float32(1024)
SMALL = 1e-7  # of the gradients of logits, from a mean over many tokens


def test_small_gradients_keep_their_digits_in_float16() -> None:
    random = np.random.default_rng(0)
    a_RE, b_VR, y_nE = (
        random.standard_normal(shape).astype(np.float16)
        for shape in ((RANK, WIDTH), (VOCABULARY, RANK), (TOKENS, WIDTH))
    )
    grad_nV = (random.standard_normal((TOKENS, VOCABULARY)) * SMALL * DIVISOR).astype(np.float16)
    call = SublayerCall({LORA_A: a_RE, LORA_B: b_VR}, trained=(LORA_A, LORA_B))
    adapter = HeadAdapter(AdapterSpec(RANK, 2.0), call)
    adapter.allocate_gradients()
    grad_y_nE = np.zeros((TOKENS, WIDTH), np.float32)
    adapter.add_gradients(grad_nV, y_nE, grad_y_nE, DIVISOR)

    a, b, y, grad = (array.astype(np.float64) for array in (a_RE, b_VR, y_nE, grad_nV))
    grad *= 2.0 / float(DIVISOR)
    expected = {"y": grad @ b @ a, LORA_A: (grad @ b).T @ y, LORA_B: grad.T @ (y @ a.T)}
    results = {"y": grad_y_nE, **adapter.gradients}
    for name, array in expected.items():
        # One factor of each product is rounded once; the products of random matrices are as large as their factors.
        distance = np.linalg.norm(results[name] - array) / np.linalg.norm(array)
        assert distance < 2 * U_FLOAT16, name
