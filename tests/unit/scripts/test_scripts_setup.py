"""The set-up scripts, run for real on a small project that is installed from a folder of wheels: no network."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPTS = sorted([*(REPOSITORY / "scripts").glob("*.sh"), REPOSITORY / ".ci" / "run"])

# Builds the small project without any package to build with. With the file `slow` there, pip hangs in the middle.
_BACKEND = """
import os, time, zipfile
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    if os.path.exists("slow"):
        open("building", "w").close()
        time.sleep(60)
    name = "run_trainer-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        info = "run_trainer-0.1.0.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: run-trainer\\nVersion: 0.1.0\\n"
            "Provides-Extra: test\\nRequires-Dist: dep\\nRequires-Dist: pytest; extra == 'test'\\n"
            "Requires-Dist: ruff; extra == 'test'\\nRequires-Dist: flake8; extra == 'test'\\n"
            "Requires-Dist: mypy; extra == 'test'\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""
# What the quickstart asks `plan` for: the folder that the training left its checkpoints in.
_PLAN = """import sys
if sys.argv[1] == "plan":
    assert sys.argv[2:] == ["--json", "--config", "configs/quickstart.yaml", "--runner_config.stop_step", "5 steps"]
    raise SystemExit(print('{"output_dir": "some where"}'))
"""
_SHOW_CALL = "import os, sys\nprint('called', __package__ or os.path.basename(sys.argv[0]), sys.argv[1:])\n"


def make_wheel(folder: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}/__init__.py", f"version = '{version}'\n")
        wheel.writestr(f"{name}/__main__.py", _SHOW_CALL)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class Project:
    """A small project with our scripts, in a path with spaces, and an empty HOME."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "my project"
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(folder / "home"), "PYTHON": sys.executable, "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": (folder / "wheels").as_uri(), "PIP_CONFIG_FILE": os.devnull,
            "TMPDIR": str(folder / "temporary"),  # a killed pip leaves its folders there
        }

    def fill(self) -> Project:
        for path in (self.root, self.folder / "home", self.folder / "wheels", self.folder / "temporary"):
            path.mkdir()
        tools = (("pytest", "1.0"), ("ruff", "1.0"), ("flake8", "1.0"), ("mypy", "1.0"))
        for name, version in (("dep", "1.0"), ("dep", "2.0"), *tools):
            make_wheel(self.folder / "wheels", name, version)
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("*.py"))
        (self.root / "backend.py").write_text(_BACKEND)
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        (self.root / "setup.cfg").write_text("[metadata]\nname = run-trainer\n")
        (self.root / "run_trainer.py").write_text(_PLAN + _SHOW_CALL + "import shutil; print(shutil.which('python'))\n")
        self.pin("1.0")
        return self

    def pin(self, version: str) -> None:
        (self.root / "constraints.txt").write_text(f"dep=={version}\n")

    def run(self, script: str, *arguments: str, fails: bool = False, **environment: str) -> str:
        """Runs a script from another folder; returns what it printed."""
        command = ["bash", str(self.root / "scripts" / script), *arguments]
        result = subprocess.run(command, cwd="/", env={**self.environment, **environment}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        assert (result.returncode != 0) == fails, result.stdout
        return result.stdout

    def python(self, program: str) -> str:
        command = [str(self.root / ".venv" / "bin" / "python"), "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def dep_version(self) -> str:
        return self.python("import dep; print(dep.version)")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path).fill()


# ---- an environment's life -------------------------------------------------------------------------------------------


def fake_python(path: Path, version: str, *, runs: bool = True) -> Path:
    """Returns an interpreter that only tells the version it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n" if runs else "#!/bin/sh\nexit 127\n")
    path.chmod(0o755)
    return path


def python_that_lends_its_pip(project: Project) -> Path:
    """Returns an interpreter whose environments use the pip of this one: installing another takes three seconds of
    CPU."""
    pip = importlib.util.find_spec("pip")
    (project.folder / "lent").mkdir()
    (project.folder / "lent" / "pip").symlink_to(Path(pip.origin).parent)
    maker = fake_python(project.folder / "python3", f"ok 3.11.1 {project.folder}/python3")
    make = f"""if [ "$1" = -m ]; then
    "{sys.executable}" -m venv --without-pip "$3"
    for folder in "$3"/lib/*/site-packages; do echo "{project.folder}/lent" >"$folder/pip.pth"; done
fi
"""
    maker.write_text(maker.read_text() + make)
    return maker


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def calls(output: str, *beginnings: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("called", *beginnings))]


@pytest.mark.slow
def test_an_environment_is_begun_anew_by_one_of_two_kept_updated_and_mended(project: Project) -> None:
    """What the scripts call is shown on the way, while the environment lives."""
    lending = {"PYTHON": str(python_that_lends_its_pip(project))}
    (project.root / "slow").touch()
    command = ["bash", str(project.root / "scripts" / "setup_env.sh")]
    process = subprocess.Popen(command, env={**project.environment, **lending}, stdout=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    deadline = time.monotonic() + 300
    while not (project.root / "building").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (project.root / "slow").unlink()
    (project.root / ".venv" / "leftover").touch()

    # Two at a time, one of which waits for the other; this environment has a pip of its own.
    own = ["--runner_config.stop_step", "5 steps"]
    command = ["bash", str(project.root / "scripts" / "quickstart.sh"), *own]
    at_a_time = 1 if shutil.which("flock") is None else 2
    processes = [
        subprocess.Popen(command, cwd="/", env=project.environment, stdout=subprocess.PIPE, text=True)
        for _ in range(at_a_time)
    ]
    outputs = sorted(process.communicate(timeout=600)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * at_a_time
    assert outputs[0].startswith("set-up: an earlier set-up was interrupted: making .venv anew\n")
    assert "making .venv with" in outputs[0] and "installing the packages" in outputs[0] and "done in" in outputs[0]
    for output in outputs[1:]:
        assert output.startswith("set-up: waiting for another set-up of this repository\nset-up: .venv is up to date\n")
    assert project.dep_version() == "1.0", "the pin counts, not the newest"
    assert not (project.root / ".venv" / "leftover").exists()
    python = project.root / ".venv" / "bin" / "python"
    train = ["--config", "configs/quickstart.yaml", *own]
    predict = ["--config", "some where/config.yaml", "--run_mode", "predict", "--load_checkpoint",
               "some where/checkpoints", "--predict_data", "def ", "import ", "class "]
    for output in outputs:
        shown = [f"called run_trainer.py {train}", str(python), f"called run_trainer.py {predict}", str(python)]
        assert calls(output, "/") == shown

    used_before = children_cpu_seconds()
    output = project.run("setup_env.sh")
    assert output == "set-up: .venv is up to date\n"
    assert children_cpu_seconds() - used_before < 0.5, "seconds"

    output = project.run("test.sh", "tests/unit", "-k", "a b")
    assert "updating .venv" in output
    pytest_arguments = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--durations=15", "tests/unit", "-k",
                        "a b"]  # fmt: skip
    shown = ["called ruff ['check', '.']", "called flake8 ['.']", "called mypy []", f"called pytest {pytest_arguments}"]
    assert calls(output) == shown
    (project.root / "tests").mkdir()
    (project.root / "tests" / "run_suite.py").write_text("print('called run_suite')\nraise SystemExit(1)")
    output = project.run("test.sh", fails=True)
    assert output.splitlines()[-1] == "called run_suite" and "called pytest" not in output
    assert project.run("setup_env.sh", "run") == "set-up: .venv is up to date\n"

    project.pin("9.9")
    output = project.run("setup_env.sh", fails=True)
    assert "pip could not install the packages" in output and "dep==9.9" in output
    project.pin("2.0")
    output = project.run("setup_env.sh")
    assert "updating .venv" in output and "making" not in output
    assert project.dep_version() == "2.0"
    project.python("import pytest")

    (project.root / "run_trainer.py").write_text("raise SystemExit(3)")
    output = project.run("quickstart.sh", fails=True)
    assert "predict" not in output, "no text is generated after a training that failed"

    moved = Project(project.folder)
    moved.root = project.root.rename(project.folder / "moved")
    assert "the repository was moved: making .venv anew" in moved.run("setup_env.sh", **lending)
    assert moved.run("setup_env.sh") == "set-up: .venv is up to date\n"


@pytest.mark.parametrize(("number", "code", "text"), [
    (signal.SIGKILL, 1, "pip was killed (signal 9), perhaps because the memory ran out; the end of"),
    (signal.SIGINT, 130, "set-up: interrupted; the next call begins anew\n"),
])  # fmt: skip
def test_what_a_pip_that_was_ended_has_left_is_not_built_on(
    project: Project, number: signal.Signals, code: int, text: str
) -> None:
    ended = fake_python(project.root / ".venv" / "bin" / "python", "")
    ended.write_text(f"#!/bin/sh\necho unpacking\nkill -{number.name[3:]} $$\n")
    program = 'source "$1/scripts/setup_env.sh"; install_packages run'
    done = subprocess.run(["bash", "-c", program, "bash", str(project.root)], env=project.environment, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == code and text in done.stderr
    assert ("  unpacking" in done.stderr.splitlines()) == (code == 1)
    assert (project.root / ".venv" / ".setup-state").read_text() == "installing\n", "the next set-up begins anew"


def test_ci_calls_the_test_script() -> None:
    lines = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "bash scripts/test.sh"


# ---- what is in .venv's place already --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["empty", "broken python"])
def test_half_an_environment_of_unknown_origin_is_replaced(project: Project, state: str) -> None:
    venv = project.root / ".venv"
    venv.mkdir()
    if state == "broken python":
        (venv / "pyvenv.cfg").touch()
        fake_python(venv / "bin" / "python", "", runs=False)
    # A Python that answers the probe and, asked for an environment, leaves a file: a real one takes seconds.
    maker = fake_python(project.folder / "python3", f"ok 3.11.1 {project.folder}/python3")
    maker.write_text(maker.read_text() + 'if [ "$1" = -m ]; then touch "$3/made"; fi\n')
    program = 'source "$1/scripts/setup_env.sh"; install_packages() { echo "installing for $1"; }; main'
    result = subprocess.run(["bash", "-c", program, "bash", str(project.root)], text=True, capture_output=True,
                            env={**project.environment, "PYTHON": str(maker)})
    assert result.returncode == 0, result.stderr
    assert ".venv does not work: making it anew" in result.stdout and "installing for run" in result.stdout
    assert (venv / "made").exists() and not (venv / "pyvenv.cfg").exists()
    assert (venv / ".setup-state").read_text() == "installing\n", "known as unfinished until it is ready"


def test_what_is_not_ours_is_left_alone(project: Project) -> None:
    (project.root / ".venv").mkdir()
    (project.root / ".venv" / "precious").touch()
    output = project.run("setup_env.sh", fails=True)
    assert "exists and is not a virtual environment" in output and "Move it away or delete it." in output
    (project.root / ".venv" / "pyvenv.cfg").touch()
    fake_python(project.root / ".venv" / "bin" / "python", "3.13")
    output = project.run("setup_env.sh", fails=True)
    assert "is an environment of Python 3.13, which this script did not make" in output
    assert (project.root / ".venv" / "precious").exists()


# ---- which Python ----------------------------------------------------------------------------------------------------


def find_python(project: Project, candidates: list[Path] | None = None, **environment: str) -> tuple[int, str]:
    """Runs the search alone, over the given places or over its own; returns the exit code and what it printed."""
    program = 'source "$1/scripts/setup_env.sh"; shift; '
    if candidates is not None:
        program += 'places=("$@"); candidates() { printf "%s\\n" "${places[@]}"; }; '
    program += 'find_python; printf "found %s\\n" "$python"'
    command = ["bash", "-c", program, "bash", str(project.root), *map(str, candidates or [])]
    variables = {**project.environment, "PYTHON": "", **environment}
    result = subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return result.returncode, result.stdout.strip()


def test_a_shim_that_does_not_run_and_versions_that_will_not_do_are_passed_over(project: Project) -> None:
    shim = fake_python(project.folder / "shims" / "python3.12", "", runs=False)
    old = fake_python(project.folder / "old" / "python3", "other 3.8.18")
    code, output = find_python(project, [shim, old, project.folder / "missing", Path(sys.executable)])
    assert (code, output) == (0, f"found {sys.executable}")


def test_when_none_will_do_each_is_explained(project: Project) -> None:
    shim = fake_python(project.folder / "shims" / "python3.12", "", runs=False)
    new = fake_python(project.folder / "new" / "python3", "other 3.13.0")
    (project.folder / "block").mkdir()
    (project.folder / "block" / "ensurepip.py").write_text("raise ImportError")
    bare = fake_python(project.folder / "bare" / "python3", "")
    bare.write_text(f'#!/bin/sh\nPYTHONPATH="{project.folder}/block" exec "{sys.executable}" "$@"\n')
    code, output = find_python(project, [shim, new, bare])
    minor = f"3.{sys.version_info[1]}"
    assert code == 1 and output.startswith("set-up failed: no Python 3.10, 3.11 or 3.12 that can make a virtual env")
    assert f"{shim}: does not run" in output
    assert f"{new}: Python 3.13.0, neither 3.10, 3.11 nor 3.12" in output
    without = rf"{bare}: Python {minor}\.\d+ without the venv and ensurepip modules .*apt install python{minor}-venv"
    assert re.search(without, output)
    assert "PYTHON=/path/to/python3.11" in output


def test_a_python_of_the_users_choice_is_taken_or_refused_but_not_replaced(project: Project) -> None:
    assert find_python(project, [], PYTHON=sys.executable) == (0, f"found {sys.executable}")
    new = fake_python(project.folder / "python3", "other 3.13.0")
    code, output = find_python(project, [Path(sys.executable)], PYTHON=str(new))
    assert code == 1 and f"PYTHON={new}: Python 3.13.0, neither" in output


@pytest.mark.parametrize(
    "place",
    [
        "home/.pyenv/versions/3.10.13/bin/python", "pyenv root/versions/3.12.1/bin/python",
        "uv/cpython-3.11.9-x/bin/python3",
        "home/.local/share/uv/python/cpython-3.12.1-x/bin/python3", "conda/envs/mine/bin/python",
        "home/miniconda3/bin/python", "on path/python3", "beside/versions/3.11.4/bin/python",
    ],
)
def test_where_a_python_is_looked_for(project: Project, place: str) -> None:
    """The search of the script itself must name the place; a real search would stop at an earlier one."""
    fake_python(project.folder / place, "x")
    fake_python(project.folder / "beside" / "shims" / "python3", "", runs=False)
    environment = {
        **project.environment, "PATH": f"{project.folder}/on path:{project.folder}/beside/shims:/usr/bin:/bin",
        "PYENV_ROOT": f"{project.folder}/pyenv root", "UV_PYTHON_INSTALL_DIR": f"{project.folder}/uv",
        "CONDA_PREFIX": f"{project.folder}/conda",
    }
    command = ["bash", "-c", 'source "$1/scripts/setup_env.sh"; candidates', "bash", str(project.root)]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert str(project.folder / place) in result.stdout.splitlines()


def test_the_environment_to_be_replaced_is_no_candidate(project: Project) -> None:
    own = fake_python(project.root / ".venv" / "bin" / "python", f"ok 3.11.1 {project.root}/.venv/bin/python")
    assert find_python(project, [own, Path(sys.executable)]) == (0, f"found {sys.executable}")


def test_an_unknown_argument_is_refused(project: Project) -> None:
    assert "unknown argument 'tests'" in project.run("setup_env.sh", "tests", fails=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_executable_and_strict(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


# ---- pins ------------------------------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in lines), "exact versions only"
    named = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}
    assert len(named) == len(lines), "a package is pinned twice"
    return named


def declared_requirements() -> list[Requirement]:
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    lines = settings["options"]["install_requires"] + settings["options.extras_require"]["test"]
    return [Requirement(line) for line in lines.splitlines() if line and not line.startswith("#")]


def test_every_package_that_is_needed_is_pinned() -> None:
    pinned, unseen, seen = pins(), declared_requirements(), set()
    while unseen:
        requirement = unseen.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert name in pinned, f"{name} has no pin in constraints.txt"
        unseen += [Requirement(line) for line in importlib.metadata.requires(name) or []]
    assert len(seen) > 40


def test_every_file_of_the_package_is_installed_with_it() -> None:
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    packed = [path for package, patterns in settings["options.package_data"].items() for pattern in patterns.split()
              for path in (REPOSITORY / package.replace(".", "/")).glob(pattern)]  # fmt: skip
    files = [path for path in (REPOSITORY / "trainer").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sorted(path for path in files if path.suffix != ".py") == sorted(path for path in packed if path.is_file())


def test_the_pins_are_within_the_ranges_of_setup_cfg() -> None:
    pinned = pins()
    for requirement in declared_requirements():
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
