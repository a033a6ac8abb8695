"""One graph of the whole model computes the same as explicit mode."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from decoder_settings import decoder_settings
from mindspore import Tensor
from model_gradients import model_gradients
from numpy_kernels import assert_close, distance
from tolerances import FEW_OPERATIONS, SEVERAL_OPERATORS

from trainer.audit.graph import FunctionalDecoder, StepGraph, flat_arguments
from trainer.data import Batch
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder, RouterStatistics
from trainer.ops.kernel_set import load_kernels
from trainer.ops.select import REFERENCE, KernelChoice

ROWS, TOKENS, VOCABULARY = 2, 8, 19
SIZES = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCABULARY, "seq_length": TOKENS, "use_qk_norm": True, "qkv_has_bias": True,
}  # fmt: skip
EXPERTS = {
    "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1,
    "shared_expert_num": 1, "use_gmm": True, "aux_loss_factor": 0.05, "z_loss_factor": 0.01,
}  # fmt: skip
RANDOM = np.random.default_rng(4)


def batch() -> Batch:
    ids = RANDOM.integers(0, VOCABULARY, (ROWS, TOKENS + 1)).astype(np.int32)
    segments = np.array([[0] * 5 + [1] * 3, [0] * 8], np.int32)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2], range(8)], np.int32)
    labels = ids[:, 1:].copy()
    labels[0, 4] = -100
    return Batch(ids[:, :-1].copy(), labels, positions, segments)


def test_a_dense_model_in_one_compiled_graph() -> None:
    settings, data = decoder_settings(**SIZES, tie_word_embeddings=True), batch()
    kernels = load_kernels([KernelChoice(name, "", REFERENCE, "") for name in KERNELS])
    model, build = Decoder(settings, kernels, seed=3, compiled=False), InputBuilder(settings, kernels)
    expected, gradients = model_gradients(model, build(data), model.parameters_by_name)

    weights = {name: Tensor(parameter.asnumpy()) for name, parameter in model.parameters_by_name.items()}
    arguments, structure, names = flat_arguments(settings, kernels, build(data), range(settings.num_layers), weights)
    step = StepGraph(FunctionalDecoder(settings, kernels, ROWS * TOKENS), structure, tuple(names))
    loss, found = mindspore.jit(step.construct)(*arguments)
    assert distance(loss.asnumpy(), expected) < FEW_OPERATIONS
    sums: dict[str, np.ndarray] = {}
    for name, gradient in zip(names.values(), found, strict=True):  # a tied head is the embedding a second time
        sums[name] = sums.get(name, 0) + gradient.asnumpy()
    assert_close(sums, gradients, SEVERAL_OPERATORS)


KERNELS = ("rotary_embedding", "swiglu", "attention", "rms_norm")


@pytest.mark.parametrize("changes", [{}, {"mtp_depth": 2}], ids=["experts", "modules"])
def test_experts_and_mtp_modules_give_the_same_loss(changes: dict, operators_as_documented: None) -> None:
    """Operator by operator, with the kernels whose routing is in the graph, and against the run's own on the host."""
    settings, data = decoder_settings(**SIZES, moe_config=EXPERTS, **changes), batch()
    plain = [KernelChoice(name, "", REFERENCE, "") for name in KERNELS]
    reference = load_kernels([*plain, KernelChoice("grouped_matmul", "", REFERENCE, "")])
    ascend = load_kernels([*plain, KernelChoice("grouped_matmul", "", "GroupedMatmulV4", "")])
    model, build = Decoder(settings, reference, seed=3, compiled=False), InputBuilder(settings, reference)
    inputs = build(data)
    expected = model(inputs, None, RouterStatistics()).total

    whole = FunctionalDecoder(settings, ascend, ROWS * TOKENS)
    layers = range(settings.num_layers + settings.mtp_depth)
    arguments, structure, _ = flat_arguments(settings, ascend, inputs, layers, model.parameters_by_name)
    found = StepGraph(whole, structure, ())(*arguments)
    assert distance(found.asnumpy(), expected.asnumpy()) < FEW_OPERATIONS
