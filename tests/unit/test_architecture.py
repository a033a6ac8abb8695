"""The rules of the design that a reader cannot check at a glance, checked on the syntax trees of the whole package.

Each rule is a function from a package to its violations. The real package must have none; a small package that breaks
every rule shows that each is found.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# The rooms, from left to right. A module imports from its own room and from rooms further left; rooms of one place do
# not know each other. The longest prefix decides where a module belongs.
ROOMS = (
    ("trainer.errors", "trainer.tables"),
    ("trainer.input_files",),
    ("trainer.parallel.world", "trainer.parallel.sharding"),
    ("trainer.storage",),
    ("trainer.parallel.mesh",),
    ("trainer.parallel.schedule",),
    # The rules about a model read its description, which is made from the settings.
    ("trainer.config.family",),
    ("trainer.config.families", "trainer.config.location", "trainer.config.patterns"),
    ("trainer.config.schema",),
    ("trainer.models.spec",),
    ("trainer.config",),
    ("trainer.ops.host_library",),
    ("trainer.ops.precision",),
    # Facts without arrays of MindSpore, some of them the pure Python part of a room further right.
    (
        "trainer.data", "trainer.checkpoint.store", "trainer.optim.schedules", "trainer.optim.groups",
        "trainer.ops.select", "trainer.ops.routing", "trainer.ops.dropout",
        "trainer.device.settings", "trainer.device.doctor", "trainer.cli.flags", "trainer.launch",
        "trainer.dryrun.cann_stubs",
    ),
    ("trainer.optim.freeze", "trainer.device", "trainer.dryrun.process", "trainer.parallel.layout"),
    ("trainer.plan.division",),
    ("trainer.plan.device.model_facts",),
    ("trainer.plan.activations", "trainer.plan.device"),
    ("trainer.plan.memory", "trainer.plan.experts"),
    ("trainer.plan.flops",),
    ("trainer.plan.pipeline", "trainer.plan.weight_traffic"),
    ("trainer.plan.traffic",),
    ("trainer.plan.search",),
    ("trainer.plan",),
    ("trainer.launch.restart",),
    ("trainer.launch.checks",),
    ("trainer.device.threads", "trainer.device.pool"),
    ("trainer.parallel",),
    ("trainer.arrays",),
    ("trainer.ops",),
    ("trainer.models",),
    ("trainer.optim",),
    ("trainer.step",),
    ("trainer.monitors",),
    ("trainer.checkpoint",),
    ("trainer.report",),
    ("trainer.profiling",),
    ("trainer.run.session",),
    ("trainer.semi_auto.rules",),
    ("trainer.semi_auto",),
    ("trainer.semi_auto.backend",),
    ("trainer.run.prepare",),
    ("trainer.audit",),
    ("trainer.run",),
    # A trace observes the steps of a run.
    ("trainer.dryrun", "trainer.trace"),
    ("trainer.smoke", "trainer.sweep"),
    ("trainer.convert",),
    ("trainer.ci",),
    ("trainer.cli",),
)
LAST_ROOM_BEFORE_MINDSPORE = "trainer.launch.checks"
ALSO_WITHOUT_MINDSPORE = (
    "trainer.monitors", "trainer.report", "trainer.cli", "trainer.semi_auto.rules", "trainer.semi_auto.backend",
    "trainer.run.prepare", "trainer.smoke",
)

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_FILES_IN_A_FOLDER = 14
FILES_THAT_NAME = {
    "multi_latent_attention": 6, "pet_config": 10, "mtp_depth": 10, "use_qk_norm": 4, "post_self_attn_layernorm": 3,
}  # fmt: skip
"""Keys of the model -> files that may name them, beside the records of families; the others read `trainer.models.spec`,
which is made from them."""

FUSED_OPERATORS = frozenset(
    "rms_norm RmsNorm swiglu Swiglu rotary_position_embedding RotaryPositionEmbedding apply_rotary_pos_emb "
    "ApplyRotaryPosEmb flash_attention_score FlashAttentionScore grouped_matmul grouped_matmul_v2 "
    "grouped_matmul_v4 GroupedMatmul GroupedMatmulV4 moe_token_permute moe_token_unpermute MoeTokenPermute "
    "MoeTokenUnpermute".split()
)
ASCEND_MODULES = ("trainer.ops.ascend.kernels", "trainer.ops.ascend.moe", "trainer.ops.ascend.attention",
                  "trainer.ops.ascend.loss", "trainer.ops.ascend.context", "trainer.ops.ascend.dropout")
KERNEL_MODULES = (*ASCEND_MODULES, "trainer.ops.plain", "trainer.ops.plain_moe")
COLLECTIVES = frozenset(
    "AllReduce AllGather ReduceScatter Broadcast AlltoAll AlltoAllV NeighborExchange Send Receive Reduce Barrier "
    "CollectiveScatter CollectiveGather all_reduce all_gather all_gather_into_tensor reduce_scatter broadcast "
    "reduce_scatter_tensor all_to_all all_to_all_single isend irecv barrier distributed comm_func".split()
)

UNPICKLERS = frozenset("pickle cPickle dill cloudpickle joblib shelve marshal torch jsonpickle".split())
TEMPLATE_MODULES = ("trainer.data.tokens.template_engine", "trainer.data.tokens.chat_template")


@dataclass
class Module:
    """One source file of a package."""

    name: str
    path: Path
    tree: ast.Module
    text: str
    package: frozenset[str] = field(default=frozenset())  # names of all modules of the package

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yields the modules it imports anywhere, lazily and for type checkers too, with the line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    yield (full if full in self.package else base), node.lineno

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.path.name == "__init__.py"
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def used_from_mindspore(self) -> Iterator[tuple[str, int]]:
        """Yields every name it takes from MindSpore, by import or as an attribute of what it imported, with the
        line."""
        bound = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mindspore":
                for part in node.module.split("."):
                    yield part, node.lineno
                for alias in node.names:
                    bound.add(alias.asname or alias.name)
                    yield alias.name, node.lineno
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "mindspore":
                        bound.add(alias.asname or "mindspore")
                        yield from ((part, node.lineno) for part in alias.name.split("."))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in bound:
                    yield node.attr, node.lineno

    def at(self, line: int) -> str:
        return f"{self.path.name}:{line} ({self.name})"


def read_package(root: Path) -> list[Module]:
    """Returns all modules below ``root / "trainer"``."""
    modules = []
    for path in sorted((root / "trainer").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, path, ast.parse(text), text))
    names = frozenset(module.name for module in modules)
    for module in modules:
        module.package = names
    return modules


def room_of(name: str) -> tuple[int, str] | None:
    """Returns place and prefix of a module in ROOMS; None without one. The package itself comes before all."""
    if name == "trainer":
        return -1, name
    rooms = [
        (len(prefix), place, prefix)
        for place, prefixes in enumerate(ROOMS)
        for prefix in prefixes
        if name == prefix or name.startswith(prefix + ".")
    ]
    if not rooms:
        return None
    _, place, prefix = max(rooms)
    return place, prefix


def without_mindspore(name: str) -> bool:
    place, prefix = room_of(name) or (len(ROOMS), "")
    last = room_of(LAST_ROOM_BEFORE_MINDSPORE)[0]
    return place <= last or prefix in ALSO_WITHOUT_MINDSPORE


# ---- the rules -------------------------------------------------------------------------------------------------------


def homeless(modules: list[Module]) -> list[str]:
    names = [module.name for module in modules if room_of(module.name) is None]
    return [f"{name} has no room: give it a place in ROOMS" for name in names]


def backward_imports(modules: list[Module]) -> list[str]:
    found = []
    for module in modules:
        own = room_of(module.name)
        for target, line in module.imports():
            if not target.startswith("trainer.") or own is None:
                continue
            other = room_of(target)
            if other is not None and other != own and other[0] >= own[0]:
                found.append(f"{module.at(line)} imports {target}, which is not to its left")
    return found


def cycles(modules: list[Module]) -> list[str]:
    """Finds circles of imports, among them those within functions and those for type checkers alone."""
    graph = {}
    for module in modules:
        targets = {target for target, _ in module.imports()}
        graph[module.name] = {target for target in targets if target.startswith("trainer.") and target != module.name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def lines_of(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)


def mindspore_on_the_left(modules: list[Module]) -> list[str]:
    return [
        f"{module.at(line)} imports {target}"
        for module in modules
        if without_mindspore(module.name)
        for target, line in module.imports()
        if target.split(".")[0] == "mindspore"
    ]


def eager_imports_of_the_right(modules: list[Module]) -> list[str]:
    """Returns imports outside of functions by which a module without MindSpore needs it."""
    found = []
    for module in modules:
        if not without_mindspore(module.name):
            continue
        lazy = {
            line
            for node in ast.walk(module.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(node)
            for line in lines_of(node)
        }
        for target, line in module.imports():
            if target.startswith("trainer.") and not without_mindspore(target) and line not in lazy:
                found.append(f"{module.at(line)} imports {target} when it is itself imported")
    return found


def fused_operators_elsewhere(modules: list[Module]) -> list[str]:
    found = []
    for module in modules:
        if module.name not in ASCEND_MODULES:
            for name, line in module.used_from_mindspore():
                if name in FUSED_OPERATORS:
                    found.append(f"{module.at(line)} uses {name}: fused operators belong to trainer/ops/ascend")
        if room_of(module.name) not in (room_of("trainer.ops"), room_of("trainer.semi_auto")):
            for target, line in module.imports():
                if target in KERNEL_MODULES:
                    found.append(f"{module.at(line)} imports {target}: only ops and semi_auto choose kernels")
    return found


def communication_elsewhere(modules: list[Module]) -> list[str]:
    return [
        f"{module.at(line)} uses {name}: only trainer/parallel/collectives.py communicates"
        for module in modules
        if module.name != "trainer.parallel.collectives"
        for name, line in module.used_from_mindspore()
        if name in COLLECTIVES
    ]


def files_as_programs(modules: list[Module]) -> list[str]:
    """Returns uses of unpicklers, and of templates outside of the one sandbox."""
    found = []
    for module in modules:
        for target, line in module.imports():
            if target.split(".")[0] in UNPICKLERS:
                found.append(f"{module.at(line)} imports {target}, which runs what a file says")
            if target.startswith("jinja2") and module.name not in TEMPLATE_MODULES:
                found.append(f"{module.at(line)} imports {target}: templates belong to {TEMPLATE_MODULES[0]}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                allowed = any(word.arg == "allow_pickle" for word in node.keywords) or name in ("eval", "exec")
                if allowed or name in ("np.load", "numpy.load", "mindspore.load_checkpoint", "ms.load_checkpoint"):
                    found.append(f"{module.at(node.lineno)} calls {name}, which may run what a file says")
    return found


def long_files(modules: list[Module]) -> list[str]:
    lengths = ((module, len(module.text.splitlines())) for module in modules)
    return [f"{module.path.name} has {lines} lines" for module, lines in lengths if lines > MAX_FILE_LINES]


def full_folders(modules: list[Module]) -> list[str]:
    counts = Counter(module.path.parent for module in modules)
    return [f"{folder.name} has {count} files" for folder, count in counts.items() if count > MAX_FILES_IN_A_FOLDER]


def long_functions(modules: list[Module]) -> list[str]:
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and function_lines(node) > MAX_FUNCTION_LINES:
                found.append(f"{module.at(node.lineno)} {node.name} has {function_lines(node)} lines")
    return found


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines of a function without its docstring, which may have any length."""
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    return len(lines_of(node)) - (len(lines_of(first)) if has_docstring else 0)


RULES = (
    homeless, backward_imports, cycles, mindspore_on_the_left, eager_imports_of_the_right, fused_operators_elsewhere,
    communication_elsewhere, files_as_programs, long_files, full_folders, long_functions,
)


# ---- the real package ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_package() -> list[Module]:
    return read_package(REPOSITORY)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(real_package: list[Module], rule) -> None:
    assert rule(real_package) == []


def test_few_files_name_a_key_of_the_model(real_package: list[Module]) -> None:
    modules = [module for module in real_package if not module.name.startswith("trainer.config.family.")]
    found = {key: sum(key in module.text for module in modules) for key in FILES_THAT_NAME}
    assert all(0 < found[key] <= most for key, most in FILES_THAT_NAME.items()), found


def test_importing_the_left_side_leaves_mindspore_out(real_package: list[Module]) -> None:
    names = [module.name for module in real_package if without_mindspore(module.name)]
    assert len(names) > 20
    program = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            assert "mindspore" not in sys.modules, name
    """
    result = subprocess.run([sys.executable, "-c", program, *names], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- a package that breaks them all ----------------------------------------------------------------------------------

_BREAKS = {
    "nowhere.py": "",
    "errors.py": "def f():\n    from trainer.plan import plan\n",
    "data/__init__.py": "",
    "data/a.py": "from .b import x\nfrom trainer.cli import flags\n",
    "data/b.py": "def lazy():\n    import trainer.data.a\n",
    "cli/__init__.py": "",
    "cli/flags.py": "import mindspore as ms\n",
    "plan/__init__.py": "",
    "plan/plan.py": "from typing import TYPE_CHECKING\nfrom trainer.models.spec.shapes import x\n"
                    "if TYPE_CHECKING:\n    from trainer.data import a\n",
    "models/__init__.py": "",
    "models/spec/__init__.py": "",
    "models/spec/shapes.py": "",
    "models/decoder.py": "from mindspore import ops, mint as m\nfrom trainer.ops.plain import RmsNorm\n"
                         "y = ops.flash_attention_score(ops.swiglu)\nz = m.distributed.all_reduce\n"
                         "own = RmsNorm.Send\n",
    "ops/__init__.py": "",
    "ops/plain.py": "from mindspore.ops import RmsNorm\nimport mindspore.mint.distributed as dist\n",
    "ops/ascend/__init__.py": "",
    "ops/ascend/kernels.py": "from mindspore import ops\nops.rms_norm\n",
    "monitors/__init__.py": "import trainer.step\n",
    "step/__init__.py": "def long(" + "\n    a,\n    b=0,\n" + "):\n    '''One\n\n    two.'''\n" + "    x = 1\n" * 77,
    "step/fits.py": "def fits():\n    '''One\n\n    two.'''\n" + "    x = 1\n" * 79,
    "run/__init__.py": "",
    "run/loop.py": "x = 1\n" * 601,
    "cli/main.py": "import trainer.run.loop\ndef f():\n    import trainer.run.loop\n",
    **{f"step/parts/{number}.py": "" for number in range(15)},
    "parallel/__init__.py": "",
    "parallel/collectives.py": "from mindspore.ops import AllReduce, AllGather\n",
    "data/c.py": "import pickle\nfrom jinja2 import Environment\nx = np.load('f', allow_pickle=True)\neval('1')\n",
    "parallel/tensor.py": "from mindspore.communication import create_group\nfrom mindspore.ops import AllGather\n",
}


@pytest.fixture
def broken_package(tmp_path: Path) -> list[Module]:
    for name, content in {"__init__.py": "", **_BREAKS}.items():
        path = tmp_path / "trainer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return read_package(tmp_path)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (homeless, ["trainer.nowhere has no room"]),
        (backward_imports, ["trainer.data.a) imports trainer.cli.flags", "trainer.errors) imports trainer.plan.plan"]),
        (cycles, ["trainer.data.a -> trainer.data.b -> trainer.data.a"]),
        (mindspore_on_the_left, ["flags.py:1 (trainer.cli.flags) imports mindspore"]),
        (
            eager_imports_of_the_right,
            ["main.py:1 (trainer.cli.main) imports trainer.run.loop", "monitors) imports trainer.step"],
        ),
        (
            fused_operators_elsewhere,
            [
                "decoder) uses flash_attention_score", "decoder) uses swiglu",
                "decoder) imports trainer.ops.plain",
                "ops.plain) uses RmsNorm",
            ],
        ),
        (
            communication_elsewhere,
            [
                "decoder) uses all_reduce", "decoder) uses distributed", "ops.plain) uses distributed",
                "parallel.tensor) uses AllGather",
            ],
        ),
        (
            files_as_programs,
            ["data.c) imports pickle", "data.c) imports jinja2", "data.c) calls np.load", "data.c) calls eval"],
        ),
        (long_files, ["loop.py has 601 lines"]),
        (full_folders, ["parts has 15 files"]),
        (long_functions, ["(trainer.step) long has 81 lines"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_rule_finds_what_breaks_it(broken_package: list[Module], rule, expected: list[str]) -> None:
    found = sorted(rule(broken_package))
    assert len(found) == len(expected), found
    for part in expected:
        assert any(part in violation for violation in found), (part, found)


def test_every_rule_is_shown_to_find_something(broken_package: list[Module]) -> None:
    assert all(rule(broken_package) for rule in RULES)


@pytest.mark.parametrize("way", ["if TYPE_CHECKING:\n    {}", "def f():\n    {}", "{}"])
def test_a_cycle_is_one_whichever_way_it_imports(tmp_path: Path, way: str) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "errors.py").write_text("import trainer.plan\n")
    plan = tmp_path / "trainer" / "plan.py"
    plan.write_text("x = 1\n")
    assert cycles(read_package(tmp_path)) == []
    plan.write_text(way.format("from trainer import errors\n"))
    assert cycles(read_package(tmp_path)) != []
