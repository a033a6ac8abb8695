"""Knowledge distillation: loss and gradients against PyTorch and formulas; a step in parts equals one step.

`scripts/golden_distillation.py` made the numbers of PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy_kernels
import pytest
from golden_distillation_cases import (
    CASES,
    DistillationCase,
    load_results,
    summary,
    write_drawn_model,
    write_model,
)
from model_gradients import model_gradients
from native_layers import HIDDEN, VOCABULARY, Case, normal
from numpy_kernels import assert_close, assert_same_bits, distance
from tiny_trainer import MODEL, join, make_batch, make_window
from tiny_trainer import config_of as tiny_config
from tolerances import (
    DIVERGENCE_BFLOAT16,
    DIVERGENCE_IN_FEW_BYTES,
    RUN_LOSSES,
    decoder_limits,
    rounding_limit,
)

from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.arrays.vocabulary.distillation import Distillation
from trainer.arrays.vocabulary.head import FusedLinearCrossEntropy
from trainer.arrays.vocabulary.loss_terms import LossTerms
from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.hugging_face import class_on_disk
from trainer.checkpoint.tensor_names import to_disk
from trainer.config import Config, parse_config
from trainer.data.batches.batch import Batch, WeightedBatch
from trainer.models.spec.model import NormSpec
from trainer.run.session import open_session, open_teacher, open_training
from trainer.step.evaluate import evaluate
from trainer.step.train_step import TrainStep

ROWS = 10
WIDTH = 5  # of the teacher


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def capped(logits: np.ndarray, cap: float | None) -> np.ndarray:
    return logits if cap is None else cap * np.tanh(logits / cap)


@pytest.mark.parametrize("cap", [None, 1.5], ids=["", "capped"])
@pytest.mark.parametrize(
    ("temperature", "alpha", "smoothing"), [(1.0, 1.0, 0.0), (2.5, 0.4, 0.0), (0.5, 0.7, 0.2), (3.0, 0.0, 0.0)]
)
def test_the_head_with_a_teacher(
    temperature: float, alpha: float, smoothing: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher has another width and caps its logits, too; 10 tokens are tiles of 4, 4 and 2."""
    monkeypatch.setattr("trainer.arrays.vocabulary.head.logit_rows", lambda tokens, vocabulary: 4)
    random = np.random.default_rng(5)
    labels_N = random.integers(0, VOCABULARY, ROWS, dtype=np.int32)
    valid_N1 = np.linspace(0, 2, ROWS, dtype=np.float32)[:, None]  # the first label does not count
    theirs = {"norm": 1 + normal(random, WIDTH, scale=0.3), "weight": normal(random, VOCABULARY, WIDTH)}
    weights = {"norm": 1 + normal(random, HIDDEN, scale=0.3), "weight": normal(random, VOCABULARY, HIDDEN)}
    taught_ND = normal(random, ROWS, WIDTH)
    x_ND = normal(random, ROWS, HIDDEN)
    teacher = FusedLinearCrossEntropy(WIDTH, NormSpec(1e-3), Scratch(), scale=0.5, cap=2.0)
    normed_NE = 0.5 * numpy_kernels.rms_norm(taught_ND.astype(np.float64), theirs["norm"].astype(np.float64), 1e-3)
    target_NV = log_softmax(capped(normed_NE @ theirs["weight"].T.astype(np.float64), 2.0) / temperature)

    def sums(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Returns the sums of cross entropy, smoothed loss and divergence."""
        logits = capped(numpy_kernels.rms_norm(x, norm, 1e-3) @ weight.T, cap)
        log_probs = log_softmax(logits)
        divergence = (np.exp(target_NV) * (target_NV - log_softmax(logits / temperature))).sum(-1)
        rows = -log_probs[np.arange(ROWS), labels_N], -log_probs.mean(-1), divergence
        return np.array([(valid_N1[:, 0] * each).sum() for each in rows])

    def formula(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        factors = (1 - alpha) * (1 - smoothing), (1 - alpha) * smoothing, alpha * temperature**2
        return sums(x, norm, weight) @ np.array(factors)

    case = Case(x_ND, np.ones(()), weights, formula, 2 * HIDDEN + 4 + VOCABULARY + 8 + ROWS)
    limit = rounding_limit(case.terms)
    right = sums(x_ND, **weights)
    run = FusedLinearCrossEntropy(HIDDEN, NormSpec(1e-3), Scratch(), cap=cap)

    def distillation() -> Distillation:
        return Distillation(alpha, temperature, teacher.logits_by_rows(SublayerCall(theirs, save=False), taught_ND))

    for trained in (("norm", "weight"), ("norm",)):
        terms = LossTerms(smoothing, 0.0, VOCABULARY) if smoothing else None
        compared = distillation()
        arrays = x_ND, labels_N, valid_N1, None, terms, compared
        call = SublayerCall(weights, save=True, trained=trained)
        case.check_result(run.forward(call, *arrays))
        assert distance(np.array([compared.cross_entropy, compared.divergence]), right[[0, 2]]) <= limit
        grad, grads = run.backward(call, *arrays, np.float32(1))
        if len(trained) == len(weights):
            case.check_gradients({"x": grad} | grads)
    compared = distillation()
    evaluated = run.forward(SublayerCall(weights, save=False), x_ND, labels_N, valid_N1, None, None, compared)
    assert distance(np.array([evaluated, compared.divergence]), right[[0, 2]]) <= limit


def golden_config(case: DistillationCase, folder: Path) -> tuple[Config, Any]:
    """Returns the training of a golden model with its teacher, and the student's golden case."""
    student = write_model(case.student, folder / "student")
    write_model(case.teacher, folder / "teacher")
    loss = {"type": "distillation", "teacher": str(folder / "teacher")}
    sections = {
        "pretrained_model_dir": str(folder / "student"), "load_checkpoint": str(folder / "student"),
        "loss": loss | {"temperature": case.temperature, "alpha": case.alpha},
        "train_dataset": {"data_loader": {"type": "SyntheticDataset"}, "tokenizer": {"type": "bytes"}},
        "model": {"model_config": {"seq_length": student.input_ids.shape[1]}},
        "run_mode": "finetune",
    }  # fmt: skip
    return parse_config("distillation", json.dumps(sections)), student


@pytest.mark.parametrize("case", CASES, ids=[f"{case.teacher}-{case.student}" for case in CASES])
def test_losses_and_gradients_are_those_of_pytorch(case: DistillationCase, tmp_path: Path) -> None:
    config, student = golden_config(case, tmp_path)
    right = load_results()[CASES.index(case)]
    session = open_session(config, load_initial_weights(config))
    inputs = session.build_inputs(Batch(student.input_ids, student.labels, student.positions, student.segment_ids))
    limits = decoder_limits(config.decoder, rows=len(student.input_ids))
    total, gradients = model_gradients(session.model, inputs, session.model.parameters_by_name)
    tokens = student.valid_tokens
    assert distance(total / tokens, np.float32(right["total"])) < limits.loss
    compared = inputs.distillation
    assert distance(np.float32(compared.cross_entropy / tokens), np.float32(right["loss"])) < limits.loss
    # The divergence is a difference of two losses: so is its error, at the temperature.
    assert abs(compared.divergence / tokens - right["kl"]) < limits.loss * right["loss"] / case.temperature
    on_disk = to_disk(gradients, class_on_disk(config))
    assert right["gradients"].keys() == on_disk.keys()
    for name, gradient in on_disk.items():
        ours = np.array(summary(np.asarray(gradient) / tokens))
        norm, product = right["gradients"][name]
        assert np.abs(ours - [norm, product]).max() < limits.gradients * norm, name


TEACHER = {"num_layers": 1, "hidden_size": 24, "num_heads": 3, "n_kv_heads": 3, "head_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drawn_model(tmp_path_factory.mktemp("teachers") / "teacher", 8, **MODEL | TEACHER)


def distilling_step(folder: Path, **sections: Any) -> TrainStep:
    """Returns the training step of the tiny model with a teacher; SGD with momentum keeps the gradients."""
    loss = {"type": "distillation", "teacher": str(folder)} | sections.pop("loss", {})
    optimizer = {"type": "SGD", "momentum": 0.5}
    config = tiny_config(loss=loss, optimizer=optimizer, seed=5, **sections)
    return open_training(config, lambda update: 0.1)


def gradients_of(step: TrainStep) -> dict[str, np.ndarray]:
    """Returns the gradients of the first step."""
    return {name: each.asnumpy() for name, each in step.optimizer.state["momentum_buffer"].items()}


LIMITS = decoder_limits(tiny_config().decoder, rows=4)


def test_micro_batches_of_unequal_labels_equal_one_batch(folder: Path) -> None:
    parts = make_window(3, 11, 0, 7)
    joined = join(parts, 4)
    split = distilling_step(folder)
    found = split(parts)
    whole = distilling_step(folder)
    right = whole([joined])
    assert found.tokens == right.tokens == 21
    assert found.loss == pytest.approx(right.loss, rel=LIMITS.loss)
    assert found.losses["kl"] == pytest.approx(right.losses["kl"], rel=RUN_LOSSES)
    assert_close(gradients_of(split), gradients_of(whole), LIMITS.gradients)
    # Padding and the weights of records change what is divided, and by what.
    padded = distilling_step(folder)([join(parts, 6)])
    assert padded.losses["kl"] == pytest.approx(right.losses["kl"], rel=RUN_LOSSES)
    halves = np.repeat(np.array([[0.5], [2], [1], [1]], np.float32), MODEL["seq_length"], 1)
    columns = {"train_dataset": {"data_loader": {"type": "JsonlDataset", "columns": {"weight": "weight"}}}}
    weighted = distilling_step(folder, **columns)([WeightedBatch(*joined, halves)])
    each = [distilling_step(folder)([part]).losses["kl"] for part in (parts[0], parts[1], parts[3])]
    assert weighted.losses["kl"] == pytest.approx(np.dot(each, [1.5, 22, 7]) / 30.5, rel=RUN_LOSSES)


def test_a_model_that_is_its_own_teacher_learns_nothing_from_it(tmp_path: Path) -> None:
    itself = write_drawn_model(tmp_path / "itself", 5, **MODEL)
    step = distilling_step(itself, loss={"alpha": 1.0, "temperature": 3.0})
    result = step([make_batch(1, 9)])
    assert result.losses["kl"] == 0 and result.global_norm == 0
    assert not any(gradient.any() for gradient in gradients_of(step).values())
    assert result.loss > 1


def test_the_divergence_is_that_of_the_logits(folder: Path) -> None:
    """Also in an evaluation, whose loss is the cross entropy."""
    config = tiny_config(loss={"type": "distillation", "teacher": str(folder), "temperature": 3.0}, seed=5)
    session = open_session(config)
    batches = [make_batch(2, 9, rows=2), make_batch(3, 4)]
    result = evaluate(session.model, session.build_inputs, batches, lambda: False)
    teacher = open_teacher(config, "CPU")
    total = 0.0
    for each in batches:
        ours = session.model.logits(session.build_inputs(each)).asnumpy().astype(np.float64)
        theirs = teacher.model.logits(teacher.build_inputs(each)).asnumpy().astype(np.float64)
        target, log_probs = log_softmax(theirs / 3), log_softmax(ours / 3)
        counts = each.labels.reshape(-1) >= 0
        total += (np.exp(target) * (target - log_probs)).sum(-1)[counts].sum()
    assert result.kl == pytest.approx(total / 13, rel=RUN_LOSSES)
    alone = open_session(tiny_config(seed=5))
    plain = evaluate(alone.model, alone.build_inputs, batches, lambda: False)
    assert plain.loss == result.loss and plain.kl is None


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [("bfloat16", DIVERGENCE_BFLOAT16), ("int8", DIVERGENCE_IN_FEW_BYTES), ("nf4", DIVERGENCE_IN_FEW_BYTES)],
)
def test_a_teacher_in_few_bytes(folder: Path, dtype: str, limit: float) -> None:
    """Codes move the divergence by little, and the checksum of the weights is another one."""
    exact = distilling_step(folder)
    stored = distilling_step(folder, loss={"teacher_dtype": dtype})
    batch = make_batch(1, 9)
    right = exact([batch]).losses["kl"]
    found = stored([batch]).losses["kl"]
    assert found != right and found == pytest.approx(right, rel=limit)
    assert exact.teacher != stored.teacher and len(stored.teacher) == 64


def test_recomputation_and_adapters_leave_the_teacher_alone(folder: Path) -> None:
    batch = make_batch(1, 9)
    right = distilling_step(folder)
    known = right([batch])
    again = distilling_step(folder, recompute_config={"recompute": True})
    found = again([batch])
    assert (found.loss, found.losses, found.global_norm) == (known.loss, known.losses, known.global_norm)
    assert_same_bits(gradients_of(again), gradients_of(right))
    with_adapters = distilling_step(folder, model={"pet_config": {"lora_rank": 2, "target_modules": ".*"}})
    assert with_adapters([batch]).losses["kl"] == pytest.approx(known.losses["kl"], rel=RUN_LOSSES)


def test_a_bfloat16_training_has_a_teacher_in_bfloat16_products(folder: Path) -> None:
    batch = make_batch(1, 9)
    exact = distilling_step(folder)([batch])
    rounded = distilling_step(folder, model={"compute_dtype": "bfloat16"})([batch])
    assert rounded.losses["kl"] == pytest.approx(exact.losses["kl"], rel=DIVERGENCE_BFLOAT16)
    assert rounded.losses["kl"] != exact.losses["kl"]
