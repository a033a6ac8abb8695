"""The style of trainer/: counts of habits that make code hard to read.

Each ceiling may only fall. Who lowers a count lowers its ceiling in the same commit.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TRAINER = Path(__file__).resolve().parents[2] / "trainer"

CEILINGS = {
    "tuple assignments of separate values": 0,
    "conditional expressions": 129,
    "function docstrings whose first word is no verb": 0,
    "docstrings that begin with The same, As, Of, Those, See or What": 0,
    "variables and parameters of home-made words": 15,
    "functions named by a preposition or a participle": 5,
    "public functions without a docstring": 194,
    "texts that say True or False, which files and flags call true and false": 4,
}

HOME_MADE = {
    "own", "told", "held", "tell", "whole", "found", "said", "vote", "votes", "peer", "room", "around",
    "entrance",
    "trouble", "wanted", "given", "home", "met",
}  # fmt: skip
HOME_MADE_START = ("own_", "told_", "held_", "whole_")
HOME_MADE_END = ("_told", "_found", "_own")
NO_VERB = {
    "around", "beside", "beyond", "above", "below", "within", "whole", "own", "at", "of", "how", "here", "there",
    "over",
    "end", "more", "rest", "others", "another",
    "told", "held", "kept", "found", "summed", "counted", "arrived", "moved",
    "reached", "fitted", "joined", "passed_over", "decoded", "merged", "rounded", "wrapped", "spread", "asked", "drawn",
    "entered", "added", "named", "given", "shown", "located_step", "damaged", "stopped", "reduced", "scaled", "halved",
    "failed", "signalled", "restarted", "ended", "expanded", "numbered", "stacked", "concatenated", "converted",
}  # fmt: skip
# The imperative of common verbs, and every word in -s: "Returns", "Computes", "Catches".
FIRST_VERB = re.compile(
    r"(Return|Raise|Read|Write|Check|Build|Make|Compute|Sum|Send|Create|Load|Save|Parse|Find|Open|Close|Add|Remove|Run"
    r"|Start|Stop|Print|Get|Set|Count|Draw|Prepare|Convert|Split|Pack|List|Move|Wait|Yield|Evaluate|Update"
    r"|Initiali[sz]e|Train|Apply|Whether|[A-Z][a-z]+s)\b"
)
NO_SENTENCE = re.compile(r"(The same|As |Of |That of|Those|See |What |It )")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    return Counter(name for path in TRAINER.rglob("*.py") for name in habits(ast.parse(path.read_text("utf-8"))))


def test_no_count_rises(counts: Counter[str]) -> None:
    assert {name: counts[name] for name in CEILINGS if counts[name] > CEILINGS[name]} == {}


KERNELS = ("ops/plain.py", "ops/plain_moe.py", "ops/ascend/", "arrays/measures.py")
"""Files in which one name stands for the versions of one function on several devices."""
AMBIGUOUS = {"Measurement", "Row", "SublayerOutput", "main", "module_names", "ranks_text"}
"""Public names that two files define with two meanings; it may only shrink."""


def test_a_public_name_stands_for_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for path in TRAINER.rglob("*.py"):
        place = path.relative_to(TRAINER).as_posix()
        if place.startswith(KERNELS):
            place = "kernels"
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.ClassDef, *Function.__args__)) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(place)
    assert {name for name, files in places.items() if len(files) > 1} == AMBIGUOUS


def test_each_habit_is_counted() -> None:
    tree = ast.parse(
        "a, b = 1, c\n"
        "a, b = b, a\n"  # a swap needs its tuple
        "d = 1 if a else 2\n"
        "def beside(own_rows):\n    '''The same for rows.'''\n"
        "def public():\n    held = 1\n"
        "def _private():\n    '''Returns nothing.'''\n"
        "'''True in a docstring.'''\n"
        "fix = f'set {key} to True'\n"
    )
    assert Counter(habits(tree)) == dict.fromkeys(CEILINGS, 1) | {"variables and parameters of home-made words": 2}


def habits(tree: ast.Module) -> Iterator[str]:
    """Yields the name of a habit, as in CEILINGS, for each place that has it."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if is_separate(target, node.value):
                    yield "tuple assignments of separate values"
        if isinstance(node, ast.IfExp):
            yield "conditional expressions"
        if isinstance(node, Function):
            yield from habits_of_function(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if re.search(r"\b(True|False)\b", node.value):
                yield "texts that say True or False, which files and flags call true and false"


def is_separate(target: ast.expr, value: ast.expr) -> bool:
    """Returns whether a tuple is assigned whose values could be one statement each, as those of a swap cannot."""
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)):
        return False
    targets = {ast.unparse(each) for each in target.elts}
    return targets.isdisjoint(ast.unparse(each) for each in value.elts)


def habits_of_function(function: Function) -> Iterator[str]:
    """Yields the habits of one function: its docstring, its name, its variables."""
    docstring = ast.get_docstring(function)
    if docstring is None and not function.name.startswith("_"):
        yield "public functions without a docstring"
    if docstring is not None:
        if not FIRST_VERB.match(docstring) and not re.match(r"[(`x_]", docstring):
            yield "function docstrings whose first word is no verb"
        if NO_SENTENCE.match(docstring):
            yield "docstrings that begin with The same, As, Of, Those, See or What"
    name = function.name.strip("_")
    if name in NO_VERB or name.startswith("of_"):
        yield "functions named by a preposition or a participle"
    stored = (each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    arguments = function.args
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for variable in {each.id for each in stored} | {each.arg for each in parameters}:
        if variable in HOME_MADE or variable.startswith(HOME_MADE_START) or variable.endswith(HOME_MADE_END):
            yield "variables and parameters of home-made words"
