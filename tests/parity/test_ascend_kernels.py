"""The Ascend kernels without an Ascend: MindSpore's front end accepts them, and they mean what the reference computes.

`mindspore.export` runs the whole front end (types, shapes, gradients) and selects no kernel, so the graph that an
Ascend would get can be built and searched on any machine. What the kernels compute there with operators as documented
(documented_operators.py) is compared with the reference kernels.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import mindspore
import numpy as np
import pytest
from decoder_settings import decoder_settings
from documented_operators import NORMS_AND_ACTIVATIONS
from exported_graphs import FLOAT, Backward, export
from mindspore import Tensor, nn
from numpy_kernels import assert_close, distance, standard_normal
from tolerances import OPERATOR

from trainer.config.schema.model import ModelConfig
from trainer.data import Batch
from trainer.models.block import Block
from trainer.models.inputs import InputBuilder
from trainer.models.spec.shapes import attention_shapes, mlp_shapes
from trainer.ops import plain as plain_kernels
from trainer.ops.ascend import kernels as ascend
from trainer.ops.kernel_set import KernelSet, load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels

ROWS, TOKENS, HEADS, SIZE, WIDTH, EPS = 2, 6, 4, 16, 10, 1e-5
N = ROWS * TOKENS
RANDOM = np.random.default_rng(7)
normal = partial(standard_normal, RANDOM)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
HALF_ANGLES = RANDOM.uniform(0, 7, (N, SIZE // 2))
COS, SIN = (np.tile(table(HALF_ANGLES), 2).astype(np.float32) for table in (np.cos, np.sin))


class Case(NamedTuple):
    """A fused kernel and its reference on the same arrays; `extra` and `reference_extra` are their tables."""

    fused: nn.Cell
    plain: nn.Cell
    arrays: list[np.ndarray]
    extra: tuple[Tensor, ...]
    reference_extra: tuple[Tensor, ...]
    operators: tuple[str, str]


def cases() -> dict[str, Case]:
    tables = [plain_kernels.rotary_tables(COS, SIN, fused=fused) for fused in (True, False)]
    return {
        "rms_norm": Case(
            ascend.RmsNorm(WIDTH, EPS), plain_kernels.RmsNorm(WIDTH, EPS), [normal(N, WIDTH), normal(WIDTH)], (), (),
            ("RmsNorm", "RmsNormGrad"),
        ),
        "rms_norm_of_heads": Case(
            ascend.RmsNorm(SIZE, EPS), plain_kernels.RmsNorm(SIZE, EPS), [normal(N * HEADS, SIZE), normal(SIZE)],
            (), (), ("RmsNorm", "RmsNormGrad"),
        ),
        "rotary": Case(
            ascend.Rotary(SIZE), plain_kernels.Rotary(SIZE), [normal(N, HEADS * SIZE)], *tables,
            ("RotaryPositionEmbedding", "RotaryPositionEmbeddingGrad"),
        ),
        "swiglu": Case(
            ascend.SwiGLU(), plain_kernels.SwiGLU(), [normal(N, WIDTH), normal(N, WIDTH)], (), (),
            ("Swiglu", "SwigluGrad"),
        ),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_front_end_builds_the_fused_operator_and_its_gradient(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    inputs = [*map(Tensor, case.arrays), *case.extra]
    operator, gradient = case.operators
    out = case.plain(*map(Tensor, case.arrays), *case.reference_extra)

    forward = export(case.fused, inputs, tmp_path / "forward")
    assert operator in forward.operators
    assert forward.shapes == [out.shape]
    backward = export(Backward(case.fused), [*inputs, Tensor(normal(*out.shape))], tmp_path / "backward")
    assert gradient in backward.operators
    assert backward.shapes[: len(case.arrays)] == [array.shape for array in case.arrays]


class FusedBlock(nn.Cell):
    """A decoder block of fused kernels, without dropout."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.block = Block(settings, kernels)

    def construct(self, x_ND, q_cos, q_sin, k_cos, k_sin, mask, ends, *weights):
        return self.block(x_ND, q_cos, q_sin, k_cos, k_sin, mask, ends, None, None, None, *weights)


settings_of = partial(
    decoder_settings, hidden_size=32, num_heads=2, n_kv_heads=1, seq_length=TOKENS, intermediate_size=WIDTH,
    use_fused_rope=True, use_fused_swiglu=True, use_flash_attention=True, compute_dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("amp_level", [None, "O2", "O3"])
def test_front_end_builds_a_whole_block(amp_level: str | None, tmp_path: Path) -> None:
    """All fused kernels together in bfloat16, on the tables and the mask that `InputBuilder` makes for them."""
    settings = settings_of(use_qk_norm=True)
    precision = resolve_precision(settings, amp_level, "Ascend")
    kernels = load_kernels(select_kernels(settings, "Ascend", precision), precision)
    tokens = np.zeros((ROWS, TOKENS), np.int32)
    inputs = InputBuilder(settings, kernels)(Batch(tokens, tokens, tokens, SEGMENTS.astype(np.int32)))
    rotary = mindspore.bfloat16 if amp_level else mindspore.float32
    assert {table.dtype for table in inputs.tables} == {rotary} and inputs.mask[0].dtype == mindspore.bool_
    weights = [normal(*shape) for shape in (attention_shapes(settings) | mlp_shapes(settings)).values()]
    arguments = [Tensor(normal(N, 32)), *inputs.tables, *inputs.mask, *map(Tensor, weights)]

    graph = export(Backward(FusedBlock(settings, kernels)), [*arguments, Tensor(normal(N, 32))], tmp_path / "block")
    assert graph.shapes == [argument.shape for argument in arguments]
    assert {gradient for case in CASES.values() for gradient in case.operators} <= graph.operators.keys()
    assert {"FlashAttentionScore", "FlashAttentionScoreGrad"} <= graph.operators.keys()
    # Gradients of the residual stream and of every weight leave in float32.
    assert {graph.dtypes[0], *graph.dtypes[-len(weights) :]} == {FLOAT}
    assert "Cast" in graph.operators


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """Returns the cases with the operators as documented."""
    for name, operator in NORMS_AND_ACTIVATIONS.items():
        monkeypatch.setattr(ascend, name, operator)
    return cases()


@pytest.mark.parametrize("name", CASES)
def test_documented_operator_computes_what_the_reference_does(name: str, documented: dict[str, Case]) -> None:
    """Which half rotates, which operand gets silu, what the mask means, the scale."""
    case = documented[name]
    arrays = [Tensor(array) for array in case.arrays]
    ours, right = case.fused(*arrays, *case.extra), case.plain(*arrays, *case.reference_extra)
    assert ours.dtype == right.dtype == mindspore.float32
    assert distance(ours.asnumpy(), right.asnumpy()) < OPERATOR


@pytest.mark.parametrize("name", [name for name in CASES if name != "rotary"])  # MindSpore derives its gradient
def test_gradients_with_the_documented_operators(name: str, documented: dict[str, Case]) -> None:
    case = documented[name]
    arrays, numbers = [Tensor(array) for array in case.arrays], tuple(range(len(case.arrays)))
    upstream = Tensor(normal(*case.plain(*arrays, *case.reference_extra).shape))
    ours, right = (
        mindspore.grad(lambda *args, kernel=kernel: (kernel(*args) * upstream).sum(), numbers)(*arrays, *extra)
        for kernel, extra in ((case.fused, case.extra), (case.plain, case.reference_extra))
    )
    assert_close(ours, right, OPERATOR)


def chosen(device: str, **changes) -> dict[str, tuple[str, str]]:
    return {choice.kernel: (choice.chosen, choice.why) for choice in select_kernels(settings_of(**changes), device)}


def test_every_fused_kernel_is_chosen_on_ascend_and_none_elsewhere() -> None:
    assert {kernel: operator for kernel, (operator, _) in chosen("Ascend").items()} == {
        "rms_norm": "RmsNorm", "rotary_embedding": "rotary_position_embedding", "swiglu": "swiglu",
        "attention": "flash_attention_score",
    }
    assert {operator for operator, _ in chosen("CPU").values()} == {"reference"}


@pytest.mark.parametrize(
    ("changes", "kernel", "reason"),
    [
        ({"use_fused_rope": False}, "rotary_embedding", "use_fused_rope is off"),
        ({"rotary_pct": 0.5}, "rotary_embedding", "rotates all 16 dimensions of a head; rotary_pct 0.5 rotates only 8"),
        ({"rope_interleave": True}, "rotary_embedding", "turns neighbouring numbers with one table for all sequences"),
        ({"num_heads": 1, "n_kv_heads": 1, "head_dim": 896}, "rotary_embedding", "of less than 896 numbers"),
        ({"use_fused_swiglu": False}, "swiglu", "use_fused_swiglu is off"),
        ({"use_flash_attention": False}, "attention", "use_flash_attention is off"),
        ({"attention_dropout": 0.1}, "attention", "with sequences of a multiple of 16 tokens, here 6"),
        ({"compute_dtype": "float32"}, "attention", "compute_dtype is float32"),
        ({"head_dim": 24}, "attention", "multiple of 16"),
        ({"head_dim": 1024}, "attention", "up to 512"),
    ],
)
def test_what_a_fused_kernel_cannot_do_goes_to_the_reference(changes: dict, kernel: str, reason: str) -> None:
    choice, why = chosen("Ascend", **changes)[kernel]
    assert choice == "reference" and reason in why
