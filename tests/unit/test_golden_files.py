"""The golden files are whole, agree with themselves and stay small; what they are for is tested in tests/parity."""

from __future__ import annotations

import numpy as np
import pytest
from golden_files import GOLDEN_FOLDER, golden_gradient, load_model_case, load_optimizer_case, model_case_names
from tolerances import FEW_OPERATIONS, NEAR_ZERO, SEVERAL_OPERATORS

EXPECTED = ["model_glm", "model_glm4", "model_llama", "model_llama_bias", "model_llama_llama3", "model_llama_packed",
            "model_llama_tied_linear", "model_llama_yarn", "model_llama_yarn_mscale", "model_mistral", "model_qwen2",
            "model_qwen3", "model_qwen3_packed", "model_qwen3_window"]
EXPERTS = ["experts_deepseek_v3", "experts_deepseek_v3_packed", "experts_glm4_moe", "experts_mixtral",
           "experts_qwen2_moe", "experts_qwen3_moe"]
FURTHER = ["mtp_1", "mtp_2"]
ALL = [*EXPECTED, *EXPERTS, *FURTHER, *model_case_names("family")]
NEVER_CHOSEN = ".experts.3."


def test_every_case_is_there_and_together_they_are_small():
    assert (model_case_names(), model_case_names("experts"), model_case_names("mtp")) == (EXPECTED, EXPERTS, FURTHER)
    assert sum(path.stat().st_size for path in GOLDEN_FOLDER.iterdir()) < 7_000_000


@pytest.mark.parametrize("name", ALL)
def test_loss_is_the_cross_entropy_of_the_logits(name):
    case = load_model_case(name)
    logits_NV = case.logits.reshape(-1, case.config["vocab_size"]).astype(np.float64)
    labels_N = case.labels.reshape(-1)
    valid = labels_N != -100
    largest = logits_NV.max(axis=1)
    log_sum_N = np.log(np.exp(logits_NV - largest[:, None]).sum(axis=1)) + largest
    losses = log_sum_N[valid] - logits_NV[valid, labels_N[valid]]
    assert case.loss_sum == pytest.approx(losses.sum(), rel=FEW_OPERATIONS)
    assert case.valid_tokens == valid.sum() < labels_N.size


@pytest.mark.parametrize("name", ALL)
def test_batch_follows_the_rules_of_packing(name):
    case = load_model_case(name)
    for ids, labels, positions, segments in zip(
            case.input_ids, case.labels, case.positions, case.segment_ids, strict=True):
        starts = np.flatnonzero(np.diff(segments, prepend=-1))
        assert (positions == np.arange(len(ids)) - np.repeat(starts, np.diff(np.append(starts, len(ids))))).all()
        shifted = labels[:-1] != -100
        assert (labels[:-1][shifted] == ids[1:][shifted]).all()
        if "packed" in name or name == "mtp_2":
            assert len(starts) > 1
            assert (labels[np.append(starts[1:], len(ids)) - 1] == -100).all()
    arrays = (case.input_ids, case.labels, case.positions, case.segment_ids)
    assert all(array.dtype == np.int32 and array.shape == (2, 24) for array in arrays)


@pytest.mark.parametrize("name", ALL)
def test_every_weight_has_a_gradient_that_a_test_can_feel(name):
    case = load_model_case(name)
    trained = {key: weight for key, weight in case.weights.items() if not key.endswith("e_score_correction_bias")}
    assert trained.keys() == case.gradients.keys()
    assert ("lm_head.weight" in case.weights) != case.config["tie_word_embeddings"]
    for weight_name, weight in trained.items():
        gradient = case.gradients[weight_name]
        assert gradient.shape == weight.shape and gradient.dtype == weight.dtype == np.float32
        if NEVER_CHOSEN in weight_name and len(trained) < len(case.weights):  # excluded by the bias
            assert not gradient.any(), weight_name
            continue
        # The softmax feels a bias of the keys only through its rotation, and an expert sees a few tokens only.
        least = 1e-4 if "_moe" in case.config["model_type"] else 1e-3
        assert np.abs(gradient).max() > least, weight_name
    assert {"torch", "transformers", "numpy"} <= case.metadata["versions"].keys()
    assert case.metadata["effect_on_logits"] > 0.01


@pytest.mark.parametrize("name", EXPERTS + FURTHER)
def test_no_choice_of_a_router_is_a_close_one(name):
    """Otherwise rounding could send a token to another expert on another machine."""
    assert load_model_case(name).metadata["smallest_margin"] > 1e-3


@pytest.mark.parametrize("name", FURTHER)
def test_mtp_modules_have_their_losses(name):
    case = load_model_case(name)
    depth = case.metadata["config_json"]["num_nextn_predict_layers"]
    assert case.mtp_loss_sums.shape == (depth,) and (case.mtp_loss_sums > 0).all()
    layers = case.config["num_hidden_layers"]
    assert f"model.layers.{layers + depth - 1}.eh_proj.weight" in case.weights


@pytest.mark.parametrize("name", ["optimizer_adamw", "optimizer_sgd"])
def test_first_update_follows_from_the_documented_gradients(name):
    case = load_optimizer_case(name)
    rate = case.learning_rates[0]
    for index, key in enumerate(case.names):
        start = case.initial[key].astype(np.float64)
        gradient, decay = golden_gradient(0, index, start.shape).astype(np.float64), case.settings["weight_decay"][key]
        if name == "optimizer_adamw":  # both moments, corrected for their bias, are the first gradient and its square
            expected = start * (1 - rate * decay) - rate * gradient / (np.abs(gradient) + case.settings["eps"])
        else:
            expected = start - rate * (gradient + decay * start)
        np.testing.assert_allclose(case.after[1][key], expected, rtol=SEVERAL_OPERATORS, atol=NEAR_ZERO)
        assert all(values[key].shape == start.shape for values in (*case.after.values(), *case.state.values()))
    assert list(case.after) == [1, 10, 100] and len(case.learning_rates) == 100
    assert len(set(case.settings["weight_decay"].values())) == 2
