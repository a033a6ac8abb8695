"""README.md, CONTRIBUTING.md and docs/ say what is true: commands parse, keys and files exist, links resolve.

docs/flags.md is what its generator prints, the README is short, and the files in configs/ can be planned.

Every block marked `bash` is run by bash with stubs: nothing is on PATH, and every program only has its arguments noted.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from data_helpers import write_set
from fork_server import FORKED, ensure_server
from safetensors.numpy import save_file

from trainer.checkpoint.hugging_face import folder_files
from trainer.cli.flags import FLAGS, split_arguments
from trainer.config import Override, is_top_level, load_config, parse_config
from trainer.data.source.records import Record
from trainer.data.source.samples import to_sample
from trainer.errors import UserError
from trainer.launch.arguments import HELP, LaunchOptions, read_options, read_positional
from trainer.launch.checks import TRACE_SWITCHES, TRACE_VALUES
from trainer.models.spec.shapes import parameter_shapes
from trainer.parallel.world import world_of
from trainer.run.plan_file import plan_file
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES = {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in PATHS}
README, LAUNCH = PAGES["README.md"], PAGES["docs/launch.md"]
MAX_README_LINES = 220
MAX_IMAGE_BYTES = 150_000
MAX_SENTENCE_WORDS = 30
CONFIGS = sorted(path.name for path in (REPOSITORY / "configs").glob("*.yaml"))
WITHOUT_CONFIG = ("doctor", "schema")
OF_RUNS = {"compare": ("--loss", "--output"), "runs": ()}  # their options with a value
OF_A_JOB = ("status", "stop", "verify")
# Switches and options with a value of the commands themselves; every other flag is the configuration's.
SWITCHES = {
    "export": ("--help", "--merge", "--force", "--check"), "doctor": ("--help", "--json", "--deep"),
    "plan": ("--help", "--json", "--verbose", "--search", "--force"), "data": ("--help", "--json"),
    "smoke": ("--help", "--json"),
}  # fmt: skip
OPTIONS = {
    "export": ("--output", "--dtype", "--shard_size", "--adapter"),
    "plan": ("--ranks", "--local_ranks", "--audit", "--dryrun", "--rank", "--schedule", "--max_device_memory",
             "--write", "--check", "--measured"),
    "data": ("--rows",), "sweep": ("--grid", "--jobs"),
    "smoke": ("--ranks", "--steps", "--against", "--junit", "--summary"),
}  # fmt: skip

# `kind` of a fenced block -> its text.
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STUBS = """
python() { printf 'python\\0'; printf '%s\\0' "$@"; printf '\\n\\0'; } >&3
command_not_found_handle() { printf '%s\\0' "$@"; printf '\\n\\0'; } >&3
source() { :; }
cat() { printf '{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}'; }
PATH=/nonexistent
"""


def blocks(kind: str, page: str = "") -> list[str]:
    """Returns the fenced blocks of a kind, of one page or of all."""
    pages = [PAGES[page]] if page else PAGES.values()
    return [text for content in pages for found, text in _FENCE.findall(content) if found == kind]


def prose(page: str) -> str:
    """Returns a page without its fenced blocks."""
    return _FENCE.sub("", PAGES[page])


def sentences(page: str) -> list[str]:
    """Splits the prose of a page: paragraphs and list items, without tables, headings and images."""
    paragraphs = [""]
    for line in prose(page).splitlines():
        text = line.strip()
        item = re.match(r"(?:[-*>]|\d+\.) +(.*)", text)
        if not text or text.startswith(("#", "|", "<", "![")):
            paragraphs.append("")
        elif item:
            paragraphs.append(item[1])
        else:
            paragraphs[-1] += f" {text}"
    return [sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?])[*)]*\s+", paragraph)]


def run_with_stubs(script: str, folder: Path) -> list[list[str]]:
    """Returns the commands that bash would start for `script`, each as its words after all expansions."""
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
    return run_with_stubs("\n".join(blocks("bash")), tmp_path_factory.mktemp("docs"))


@pytest.fixture(autouse=True, scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of Hugging Face that the pages name /models/Qwen3-0.6B, and that of a teacher."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    _PLACES.update(dict.fromkeys(("/models/Qwen3-0.6B", "output/teacher"), str(folder)))
    return folder


_PLACES: dict[str, str] = {}
"""Folders of the pages -> those of the tests."""


def check_command(words: list[str]) -> None:
    """Takes a command line of run_trainer.py apart as the program does, and loads its configuration.

    Raises:
        UserError: A flag, a key or a value is wrong.
    """
    words = [_PLACES.get(word, word) for word in words]
    name = words[0] if words and not words[0].startswith("--") else "train"
    if name == "merge":
        from typer.main import get_command

        from trainer.cli.tools import tools

        command = get_command(tools).commands[name]
        command.make_context(name, words[1:])
        return
    if name in OF_A_JOB:
        assert len(words) == 2 and not words[1].startswith("-"), words
        return
    if name in OF_RUNS:
        own = split_arguments(words[1:], ("--exact", "--json"), OF_RUNS[name]).rest
        assert [word for word in own if not word.startswith("--")] and words[0] == name, words
        return
    if name == "launch":
        check_job(read_options(words[1:]))
        return
    if name == "trace":
        arguments = split_arguments(words[1:], TRACE_SWITCHES, TRACE_VALUES)
        assert "--output" in arguments.rest and ("--against" in arguments.rest or arguments.config), words
        if arguments.config is not None:
            load_config(str(REPOSITORY / arguments.config), arguments.overrides)
        return
    if name in ("chat", "eval"):  # the checkpoint is there only after a run, and the configuration beside it
        arguments = split_arguments(words[1:])
        assert len(arguments.rest) == 1 or (name == "eval" and arguments.config), words
        load_config(str(REPOSITORY / (arguments.config or "configs/quickstart.yaml")), arguments.overrides)
        return
    assert name in ("train", "plan", "data", "smoke", "sweep", "export", *WITHOUT_CONFIG), words
    own, own_values = SWITCHES.get(name, ("--help",)), OPTIONS.get(name, ())
    arguments = split_arguments(words[words[:1] == [name] :], own, own_values)
    assert {word for word in arguments.rest if word.startswith("--")} <= {*own, *own_values}, words
    if name == "smoke" and arguments.config is None:  # several files, or those that changed
        paths = [word for word in arguments.rest[1:] if word.startswith("configs/")]
        assert all((REPOSITORY / path).exists() for path in paths) and (paths or "--against" in words), words
        return
    if name not in WITHOUT_CONFIG and "--help" not in arguments.rest:
        assert arguments.config is not None, words
        # The config.yaml that a run leaves is there only after it: the examples train quickstart.yaml.
        left_by_a_run = arguments.config.startswith("output/")
        file = "configs/quickstart.yaml" if left_by_a_run else arguments.config
        with tempfile.TemporaryDirectory() as folder:
            for text in blocks("yaml", "README.md"):
                title, _, _ = text.partition("\n")
                (Path(folder) / title.removeprefix("# ")).write_text(text, encoding="utf-8")
            shown = Path(folder) / file
            config = load_config(str(shown if shown.is_file() else REPOSITORY / file), arguments.overrides)
        if name == "plan" and "--ranks" in arguments.rest and not {"--dryrun", "--search"} & set(arguments.rest):
            plan_file(config, world_of(int(arguments.rest[arguments.rest.index("--ranks") + 1])), [])


def check_job(options: LaunchOptions) -> None:
    """Checks the options of a launcher, and that the configuration runs on so many ranks.

    Raises:
        UserError: As above.
    """
    rest = list(options.arguments)
    values: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    if rest[:1] == ["trace"]:
        values = TRACE_VALUES
        switches = TRACE_SWITCHES
        rest = rest[1:]
    arguments = split_arguments(rest, switches, values)
    assert arguments.config is not None and not arguments.rest[2 * len(values) + len(switches) :], options
    assert {word for word in arguments.rest if word.startswith("--")} <= {*switches, *values}, options
    config = load_config(str(REPOSITORY / arguments.config), arguments.overrides)
    build_plan(config, world_of(options.worker_num, options.local_worker_num))


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes the images that the tutorial on gradient accumulation asks the user to draw."""
    monkeypatch.setenv("DATA_PATH", str(write_set(tmp_path / "digits", train=640, side=28)))


def test_every_command_of_run_trainer_is_right(commands: list[list[str]]) -> None:
    ours = [words[2:] for words in commands if words[:2] == ["python", "run_trainer.py"]]
    started = re.findall(r"^(?:.* \| )?python run_trainer\.py", "\n".join(blocks("bash")), re.MULTILINE)
    assert len(ours) == len(started) > 60
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
    part = LAUNCH[LAUNCH.index("## Options of launch") : LAUNCH.index("## In the background")]
    assert re.findall(r"^\| `--(\w+)` \|", part, re.MULTILINE) == [*HELP, "elastic", "force"]


def test_every_other_command_starts_a_file_that_is_there(commands: list[list[str]]) -> None:
    programs = {words[1] for words in commands if words[0] in ("bash", "python") and not words[1].startswith("-")}
    assert {"scripts/quickstart.sh", "scripts/test.sh", "run_trainer.py"} <= programs
    assert [name for name in programs if not (REPOSITORY / name).is_file()] == []


def test_every_yaml_block_is_a_valid_configuration() -> None:
    assert len(blocks("yaml")) >= 5
    for page in PAGES:
        for text in blocks("yaml", page):
            for name, folder in _PLACES.items():
                text = text.replace(name, folder)
            parse_config(page, text)


def test_the_freezing_block_is_a_whole_file() -> None:
    (text,) = (text for text in blocks("yaml") if "freeze:" in text)
    plan = build_plan(parse_config("docs/training.md", text))
    assert plan.model.frozen.tensors and plan.model.weights and any(plan.model.recomputed)


def test_every_json_line_is_a_document() -> None:
    lines = [line for text in blocks("json") for line in text.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        fields = json.loads(line)
        answers = ""
        if "chosen" in fields:
            answers = "pairs"
        elif "label" in fields:
            answers = "labels"
        sample = to_sample(Record(fields, "docs/data.md", 0), {}, answers)
        assert sample is not None and (sample.messages or sample.text)


def test_every_import_of_a_python_block_exists() -> None:
    """Names are looked up in the sources: the blocks import MindSpore, this test does not."""
    nodes = [node for text in blocks("python") for node in ast.walk(ast.parse(text))]
    ours = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer.")]
    assert len(ours) >= 4
    for node in ours:
        assert {alias.name for alias in node.names} <= names_in(node.module), node.module


def names_in(module: str) -> set[str]:
    """Returns the classes, functions and imports at the top of a module."""
    path = REPOSITORY / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set()
    for part in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(part, (ast.ClassDef, ast.FunctionDef)):
            names.add(part.name)
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in part.names}
    return names


def test_the_page_of_flags_is_up_to_date() -> None:
    ensure_server()
    command = [sys.executable, FORKED, "scripts/make_flags.py"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    message = "run: python scripts/make_flags.py > docs/flags.md"
    assert printed.stdout.splitlines() == PAGES["docs/flags.md"].splitlines(), message


def test_the_page_of_flags_holds_every_flag_and_its_key() -> None:
    rows = re.findall(r"^\| `--(\w+)` \| `([\w.]+)` \| .*\S.* \|$", PAGES["docs/flags.md"], re.MULTILINE)
    assert rows == [(flag.name, flag.key) for flag in FLAGS]


def test_every_flag_in_the_text_exists() -> None:
    """Looks up flags in backquotes: those of a run, of a command or of launch, negated or not."""
    known = {flag.name for flag in FLAGS} | {*HELP, "elastic", "force", "worker_num", "config", "options", "output_dir"}
    of_convert = ("--to", "--lossy", "--proof", "--steps")
    of_merge = ("--method", "--weight", "--base", "--t", "--scale", "--density")
    own = (*SWITCHES.values(), *OPTIONS.values(), *OF_RUNS.values(), ("--exact",), of_convert, of_merge)
    known |= {flag.removeprefix("--") for flags in own for flag in flags}
    for page in PAGES:
        for text in re.findall(r"`([^`]+)`", prose(page)):
            for name in re.findall(r"(?<![\w-])--([a-z]\w*)(?![\w.-])", text):
                assert name in known or is_top_level(name), (page, name)


def test_the_example_of_an_error_is_what_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (text,) = (text for text in blocks("text", "README.md") if text.startswith("$ "))
    command, _, message = text.partition("\n")
    with pytest.raises(UserError) as caught:
        check_command(command.split()[3:])
    assert f"error: {caught.value}\n" == message


def test_every_configuration_is_named_and_every_name_exists() -> None:
    named = set(re.findall(r"configs/([\w.]+\.yaml)", "\n".join(PAGES.values())))
    assert named == set(CONFIGS)
    listed = re.findall(r"^\| \[configs/([\w.]+\.yaml)\]", PAGES["docs/configuration.md"], re.MULTILINE)
    assert sorted(listed) == CONFIGS


def test_every_file_of_the_repository_that_is_named_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:trainer|tests|scripts)/[\w./]+)`", prose(page)):
            assert (REPOSITORY / name).exists(), (page, name)


def test_every_name_of_the_code_in_contributing_exists() -> None:
    """Finds names in backquotes, such as `Monitor` or `build_optimizer`, as words of the sources."""
    folders = [REPOSITORY / folder for folder in ("trainer", "tests", "scripts")]
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    named = set(re.findall(r"`(\w+)`", prose("CONTRIBUTING.md")))
    assert len(named) > 20
    assert sorted(named - words) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/flags.md"])
def test_no_sentence_is_long(page: str) -> None:
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > MAX_SENTENCE_WORDS] == []


def titles(page: str) -> list[str]:
    """Returns the anchors of the headings of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_resolves(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page)) + re.findall(r'src="([^"]+)"', prose(page))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = ((REPOSITORY / page).parent / path).resolve() if path else REPOSITORY / page
        assert target.is_file(), link
        if anchor:
            assert anchor in titles(str(target.relative_to(REPOSITORY))), link


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)\s#]+)", README))
    assert [page for page in PAGES if page not in linked] == ["README.md"]


def test_every_page_starts_with_what_a_reader_came_for() -> None:
    for page, text in PAGES.items():
        assert re.match(r"# .+\n\n(\*\*)?(?!This page)[A-Za-z]", text), page


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES


def test_the_images_are_small_and_all_shown() -> None:
    images = sorted((REPOSITORY / "docs" / "images").iterdir())
    assert images
    for path in images:
        assert path.stat().st_size <= MAX_IMAGE_BYTES, path.name
        assert f"docs/images/{path.name}" in README, path.name


def test_the_map_of_the_code_holds_every_room() -> None:
    rooms = {path.name for path in (REPOSITORY / "trainer").iterdir() if (path / "__init__.py").is_file()}
    described = re.findall(r"^\| `([\w/]+)/` \|", README, re.MULTILINE)
    assert {name.split("/")[0] for name in described} == rooms
    assert [name for name in described if not (REPOSITORY / "trainer" / name).is_dir()] == []


def test_the_benchmark_table_has_its_markers() -> None:
    page = PAGES["docs/benchmarks.md"]
    begin, end = page.index("<!-- benchmark:begin -->"), page.index("<!-- benchmark:end -->")
    assert page.count("<!-- benchmark:") == 2
    assert "|" in page[begin:end]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_can_be_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    overrides = []
    if name == "finetune.yaml":  # needs a model folder
        model = load_config("configs/instructions.yaml", [])
        for file, content in folder_files(model).items():
            (tmp_path / file).write_bytes(content)
        weights = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(model.decoder).items()}
        save_file(weights, tmp_path / "model.safetensors")
        overrides.append(Override("pretrained_model_dir", str(tmp_path)))
    config = load_config(f"configs/{name}", overrides)
    assert Path(config.output_dir) == Path("output", name.removesuffix(".yaml"))
    plan = build_plan(config)
    assert plan.steps.last_step >= 20
    # The file from MindSpore Transformers shows what notes look like; the others leave nothing to be noted, but that
    # adapters have no base where quickstart.yaml has not been trained, and that evaluation drops no tokens.
    expected = {"mindformers_llama.yaml": range(6, 99), "lora.yaml": (2,), "moe_tiny.yaml": (1,),
                "finetune.yaml": range(2)}
    assert len(plan.notes) in expected.get(name, (0,))


def test_the_instructions_can_start_from_the_weights_of_the_quickstart() -> None:
    names = ("quickstart.yaml", "instructions.yaml")
    quickstart, instructions = (load_config(str(REPOSITORY / "configs" / name), []) for name in names)
    assert parameter_shapes(quickstart.decoder) == parameter_shapes(instructions.decoder)


def test_the_instructions_have_both_forms_and_stay_small() -> None:
    path = REPOSITORY / "configs" / "data" / "instructions.jsonl"
    lines = path.read_bytes().splitlines()
    assert path.stat().st_size < 60_000
    samples = [to_sample(Record(json.loads(line), f"{path}:{number}", 0), {}) for number, line in enumerate(lines, 1)]
    assert all(sample is not None and sample.messages for sample in samples)
    assert sum(b'"messages"' in line for line in lines) > 50 < sum(b'"instruction"' in line for line in lines)
    assert len(set(lines)) == len(lines) >= 200
