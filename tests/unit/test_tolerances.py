"""Tolerances: wide enough for rounding in any order, narrow enough for a relative error of 1e-5, in one place."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy_kernels import distance
from tolerances import U, decoder_limits, rounding_limit

from trainer.config import parse_config

MUTATION = 1 + 1e-5
TESTS = Path(__file__).resolve().parents[1]
TOLERANCES = TESTS / "tolerances.py"
# Functions with a tolerance, and the number of arguments before it.
COMPARISONS = {"approx": 1, "assert_allclose": 2, "allclose": 2, "isclose": 2, "close": 2, "assert_close": 2}
KEYWORDS = {"rtol", "atol", "rel", "abs", "rel_tol", "abs_tol"}
DISTANCES = {"abs", "distance", "furthest"}


def one_by_one(values: np.ndarray) -> np.float32:
    return np.cumsum(values, dtype=np.float32)[-1]


def in_lanes(width: int) -> Callable[[np.ndarray], np.float32]:
    """Sums as a processor with registers of `width` numbers does."""
    return lambda values: one_by_one(np.cumsum(values.reshape(-1, width), 0, dtype=np.float32)[-1])


@pytest.mark.parametrize("terms", [16, 64, 512, 1024])
def test_sums_in_any_order_stay_within_the_limit(terms: int) -> None:
    draw = np.random.default_rng(terms)
    for _ in range(50):
        values = draw.normal(size=terms).astype(np.float32)
        exact = values.astype(np.float64).sum()
        size = np.abs(values).sum()
        for add in (one_by_one, in_lanes(4), in_lanes(8), in_lanes(16), np.sum):
            assert abs(add(values) - exact) < rounding_limit(terms) * size


@pytest.mark.parametrize("terms", [(1,), (20, 3), (1000,), (10**9,)])
@pytest.mark.parametrize("scale", [1.0, 3.0, 1e6])
def test_no_limit_lets_a_mutation_of_1e_5_pass(terms: tuple[int, ...], scale: float) -> None:
    assert 4 * U <= rounding_limit(*terms, scale=scale) < 1e-5
    values = np.random.default_rng(1).normal(size=(8, 8))
    assert not distance(values * MUTATION, values) < rounding_limit(*terms, scale=scale)


def test_a_decoders_gradients_have_a_wider_limit_than_its_loss() -> None:
    section = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    section["seq_length"] = 4
    limits = decoder_limits(parse_config("tiny", json.dumps({"model": {"model_config": section}})).decoder)
    assert 4 * U < limits.loss < limits.gradients < 1e-5


def called(node: ast.AST) -> str:
    """Returns the name of the function that a call calls, without its module; of another node an empty one."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def has_literal(node: ast.AST) -> bool:
    """Tells a number that somebody chose from a formula of whole numbers and constants, like ``16 * U_FLOAT16``."""
    if called(node) == "rounding_limit":
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float) and node.value != 0
    return any(map(has_literal, ast.iter_child_nodes(node)))


def tolerances_in(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields what calls and comparisons take as tolerance, and what is given to a variable with such a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if called(node) in COMPARISONS:
                yield from node.args[COMPARISONS[called(node)] :]
            if called(node) in COMPARISONS or called(node) == "":
                yield from (keyword.value for keyword in node.keywords if keyword.arg in KEYWORDS)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                if isinstance(operator, (ast.Lt, ast.LtE)) and DISTANCES & {called(each) for each in ast.walk(left)}:
                    yield right
        elif isinstance(node, ast.Assign) and re.search(
            r"\b(limit|tolerance)s?\b", ast.unparse(node.targets), re.IGNORECASE
        ):
            yield node.value


def test_a_literal_is_found() -> None:
    found = {
        "approx(1, rel=0.1)": True, "approx(1, 1e-3)": True, "np.testing.assert_allclose(a, b, 1e-6)": True,
        "assert_close(a, b, 1e-3)": True, "assert 0 < distance(a, b) < 2e-3": True,
        "assert np.abs(a).max() < 1e-5 * b": True, "limit = 1e-5": True,
        "approx(1, rel=4 * U, abs=0.0)": False, "approx(1.5)": False, "assert distance(a, b) > 1e-3": False,
        "limit = rounding_limit(3, scale=0.5)": False,
    }  # fmt: skip
    for text, expected in found.items():
        assert any(map(has_literal, tolerances_in(ast.parse(text)))) == expected, text


def test_every_tolerance_is_a_named_one() -> None:
    places = []
    for path in TESTS.rglob("*.py"):
        if path != TOLERANCES:
            found = tolerances_in(ast.parse(path.read_text(encoding="utf-8")))
            places += [f"{path}:{each.lineno}" for each in found if has_literal(each)]
    assert not places, "name these tolerances in tests/tolerances.py, with the reason"


def test_every_name_is_used() -> None:
    words = Counter(word for path in TESTS.rglob("*.py") for word in re.findall(r"\w+", path.read_text("utf-8")))
    names = re.findall(r"^([A-Z]\w+)\b.* = ", TOLERANCES.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) > 50
    assert not [name for name in names if words[name] < 2]
