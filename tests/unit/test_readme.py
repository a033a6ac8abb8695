"""The README says what is true: its commands parse, its files exist, its links resolve, its table holds every flag.
The files in configs/ can be planned in a fresh clone.

Every block marked `bash` is run by bash with stubs: nothing is on PATH, and every program only has its arguments noted.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from test_mnist_files import write_set

from trainer.cli.flags import FLAGS, split_arguments
from trainer.config import load_config, parse_config
from trainer.data.source.documents import parse_line
from trainer.errors import UserError
from trainer.launch.arguments import HELP, LaunchOptions, read_options, read_positional
from trainer.models.shapes import parameter_shapes
from trainer.parallel.world import world_of
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CONFIGS = sorted(path.name for path in (REPOSITORY / "configs").glob("*.yaml"))
WITHOUT_CONFIG = ("doctor", "schema")
OF_A_JOB = ("status", "stop")

# `kind` of a fenced block -> its text.
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STUBS = """
python() { printf 'python\\0'; printf '%s\\0' "$@"; printf '\\n\\0'; } >&3
command_not_found_handle() { printf '%s\\0' "$@"; printf '\\n\\0'; } >&3
source() { :; }
PATH=/nonexistent
"""


def blocks(kind: str) -> list[str]:
    return [text for found, text in _FENCE.findall(README) if found == kind]


def run_with_stubs(script: str, folder: Path) -> list[list[str]]:
    """The commands that bash would start for `script`, each as its words after all expansions."""
    (folder / "output").mkdir(exist_ok=True)
    notes = folder / "commands"
    done = subprocess.run(
        ["bash", "-c", f"exec 3>{notes}\n{_STUBS}{script}"], cwd=folder, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, ""), script
    commands, words = [], []
    for word in notes.read_text(encoding="utf-8").split("\0")[:-1]:
        if word == "\n":
            commands.append(words)
            words = []
        else:
            words.append(word)
    return commands


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return run_with_stubs("\n".join(blocks("bash")), tmp_path_factory.mktemp("readme"))


def check_command(words: list[str]) -> None:
    """Takes a command line of run_trainer.py apart as the program does, and loads its configuration.

    Raises:
        UserError: A flag, a key or a value is wrong.
    """
    name = words[0] if words and not words[0].startswith("--") else "train"
    if name in OF_A_JOB:
        assert len(words) == 2 and not words[1].startswith("-"), words
        return
    if name == "launch":
        check_job(read_options(words[1:]))
        return
    assert name in ("train", "plan", "export", *WITHOUT_CONFIG), words
    own = {"export": ("--merge", "--force")}.get(name, ("--help", "--json", "--deep", "--verbose"))
    own_values = {"export": ("--output", "--adapter"), "plan": ("--ranks", "--local_ranks", "--audit")}.get(name, ())
    arguments = split_arguments(words[words[:1] == [name] :], own, own_values)
    assert {word for word in arguments.rest if word.startswith("--")} <= {*own, *own_values}, words
    if name not in WITHOUT_CONFIG and "--help" not in arguments.rest:
        assert arguments.config is not None, words
        load_config(str(REPOSITORY / arguments.config), arguments.overrides)


def check_job(options: LaunchOptions) -> None:
    """The options of a launcher, and that the configuration runs on so many ranks.

    Raises:
        UserError: As above.
    """
    arguments = split_arguments(options.arguments)
    assert arguments.config is not None and arguments.rest == [], options
    config = load_config(str(REPOSITORY / arguments.config), arguments.overrides)
    build_plan(config, world_of(options.worker_num, options.local_worker_num))


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the README has the user draw."""
    monkeypatch.setenv("DATA_PATH", str(write_set(tmp_path / "digits", train=640, side=28)))


def test_every_command_of_run_trainer_is_right(commands: list[list[str]]) -> None:
    ours = [words[2:] for words in commands if words[:2] == ["python", "run_trainer.py"]]
    assert len(ours) == len(re.findall(r"^python run_trainer\.py", README, re.MULTILINE)) > 20
    for words in ours:
        check_command(words)


@pytest.mark.parametrize(
    "wrong",
    [
        "--config configs/quickstart.yaml --epoch 3",
        "--config configs/quickstart.yaml --runner_config.epoch 3",
        "--config configs/quickstart.yaml --epochs three",
        "--config configs/nothing.yaml",
    ],
)
def test_a_wrong_command_is_found(wrong: str, tmp_path: Path) -> None:
    (words,) = run_with_stubs(f"python run_trainer.py {wrong}", tmp_path)
    with pytest.raises(UserError):
        check_command(words[2:])


def test_every_call_of_the_launcher_script_is_right(commands: list[list[str]]) -> None:
    calls = [words[2:] for words in commands if words[:2] == ["bash", "scripts/msrun_launcher.sh"]]
    assert {len(words) for words in calls} == {1, 2, 6, 9}
    for words in calls:
        check_job(read_positional(words, {}))


def test_every_job_of_a_cluster_names_its_files(commands: list[list[str]]) -> None:
    (submitted,) = (words for words in commands if words[0] == "sbatch")
    assert (REPOSITORY / submitted[-2]).is_file()
    check_job(read_positional(submitted[-1:], {}))
    (created,) = (words for words in commands if words[0] == "kubectl")
    assert (REPOSITORY / created[-1]).is_file()


def test_the_table_of_launch_holds_every_option() -> None:
    part = README[README.index("### Options of launch") : README.index("### msrun_launcher.sh")]
    assert re.findall(r"^\| `--(\w+)` \|", part, re.MULTILINE) == [*HELP, "force"]


def test_every_other_command_starts_a_file_that_is_there(commands: list[list[str]]) -> None:
    programs = {words[1] for words in commands if words[0] in ("bash", "python") and not words[1].startswith("-")}
    assert {"scripts/quickstart.sh", "scripts/test.sh", "run_trainer.py"} <= programs
    assert [name for name in programs if not (REPOSITORY / name).is_file()] == []


def test_every_yaml_block_is_a_valid_configuration() -> None:
    assert len(blocks("yaml")) >= 2
    for text in blocks("yaml"):
        parse_config("README.md", text)


def test_the_freezing_block_is_a_whole_file() -> None:
    (text,) = (text for text in blocks("yaml") if "freeze:" in text)
    plan = build_plan(parse_config("README.md", text))
    assert plan.frozen.tensors and plan.weights and plan.recompute


def test_every_json_line_is_a_document() -> None:
    lines = [line for text in blocks("json") for line in text.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        assert any(piece.has_loss for piece in parse_line(line.encode(), "README.md"))


def test_every_import_of_a_python_block_exists() -> None:
    """Looks names up in the sources: the blocks import MindSpore, this test does not."""
    nodes = [node for text in blocks("python") for node in ast.walk(ast.parse(text))]
    ours = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer.")]
    assert len(ours) >= 4
    for node in ours:
        assert {alias.name for alias in node.names} <= names_in(node.module), node.module


def names_in(module: str) -> set[str]:
    """The classes, functions and imports at the top of a module."""
    path = REPOSITORY / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set()
    for part in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(part, (ast.ClassDef, ast.FunctionDef)):
            names.add(part.name)
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in part.names}
    return names


def test_the_table_holds_every_flag_and_its_key() -> None:
    rows = re.findall(r"^\| `--(\w+)` \| `([\w.]+)` \| .*\S.* \|$", README, re.MULTILINE)
    assert rows == [(flag.name, flag.key) for flag in FLAGS]


def test_what_the_table_calls_not_yet_or_ignored_is() -> None:
    """By the help of the flag, which stands beside its key's own support."""
    for name, meaning in re.findall(r"^\| `--(\w+)` \| `[\w.]+` \| (.*) \|$", README, re.MULTILINE):
        (flag,) = (flag for flag in FLAGS if flag.name == name)
        assert ("not yet" in meaning) == ("not yet" in flag.help), name
        assert ("ignored" in meaning) == ("ignored" in flag.help), name


def test_every_configuration_is_named_and_every_name_exists() -> None:
    named = set(re.findall(r"configs/([\w.]+\.yaml)", README))
    assert named == set(CONFIGS)


def titles(level: str) -> list[str]:
    """The headings, as GitHub names their places."""
    found = re.findall(rf"^{level} (.+)$", _FENCE.sub("", README), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found]


def test_every_link_resolves() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", README))
    assert len(links) > 15
    for link in links:
        if link.startswith("#"):
            assert link[1:] in titles("#+"), link
        else:
            assert (REPOSITORY / link).is_file(), link


def test_every_section_is_linked_from_the_top() -> None:
    top = README[: README.index("\n## ")]
    assert [title for title in titles("##") if f"](#{title})" not in top] == []


def test_the_benchmark_table_has_its_markers() -> None:
    begin, end = README.index("<!-- benchmark:begin -->"), README.index("<!-- benchmark:end -->")
    assert README.count("<!-- benchmark:") == 2
    assert "|" in README[begin:end]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_can_be_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = load_config(f"configs/{name}", [])
    assert Path(config.output_dir) == Path("output", name.removesuffix(".yaml"))
    plan = build_plan(config)
    assert plan.last_step >= 20
    # The file from MindSpore Transformers shows what notes look like; the others leave nothing to be noted, but that
    # adapters have no base where quickstart.yaml has not been trained, and that evaluation drops no tokens.
    expected = {"mindformers_llama.yaml": range(6, 99), "lora.yaml": (1,), "moe_tiny.yaml": (1,)}
    assert len(plan.notices) in expected.get(name, (0,))


def test_the_instructions_can_start_from_the_weights_of_the_quickstart() -> None:
    names = ("quickstart.yaml", "instructions.yaml")
    quickstart, instructions = (load_config(str(REPOSITORY / "configs" / name), []) for name in names)
    assert parameter_shapes(quickstart.decoder) == parameter_shapes(instructions.decoder)


def test_the_instructions_have_both_forms_and_stay_small() -> None:
    path = REPOSITORY / "configs" / "data" / "instructions.jsonl"
    lines = path.read_bytes().splitlines()
    assert path.stat().st_size < 60_000
    pieces = [parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    assert all(any(piece.has_loss for piece in document) for document in pieces)
    assert sum(b'"messages"' in line for line in lines) > 50 < sum(b'"instruction"' in line for line in lines)
    assert len(set(lines)) == len(lines) >= 200
