"""The files in scripts/cluster: the nine arguments that they give the launcher on each node, and their own syntax.

Slurm's commands and the container's environment are stood in for; what the files themselves do is really run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

REPOSITORY = Path(__file__).resolve().parents[3]
SLURM = REPOSITORY / "scripts" / "cluster" / "slurm.sh"
VOLCANO = REPOSITORY / "scripts" / "cluster" / "volcano.yaml"
ORDER = "run_trainer.py --config 'my file.yaml' --predict_data \"$HOME `x` é\""

# Writes its arguments, and the interpreter's environment variable that Slurm needs, to a file of its own.
_LAUNCHER = """
printf "%s\\0" "$@" > "$NOTES/$BASHPID"; echo "${SRUN_CPUS_PER_TASK-none}" > "$NOTES/cpus"
echo "$RUN_TRAINER_SECRET" >> "$NOTES/secrets"
"""
_SCONTROL = '[ "$*" = "show hostnames node[07-08]" ] && printf "node07\\nnode08\\n"\n'
_SRUN = """
while [[ "$1" == --* ]]; do echo "$1" >> "$NOTES/srun"; shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" || exit $?; done
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


def arguments_in(notes: Path) -> list[list[str]]:
    """Returns the arguments of each call of the launcher, in the order of node ranks."""
    calls = [path.read_text().split("\0")[:-1] for path in notes.iterdir() if path.name.isdecimal()]
    return sorted(calls, key=lambda call: call[5])


# ---- Slurm -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Returns the environment of a batch script on the first of two nodes, with stand-ins for Slurm and the
    launcher."""
    program(tmp_path / "bin" / "scontrol", _SCONTROL)
    program(tmp_path / "bin" / "srun", _SRUN)
    program(tmp_path / "scripts" / "msrun_launcher.sh", _LAUNCHER)
    (tmp_path / "notes").mkdir()
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_CPUS_PER_TASK": "32",
    }


def run_slurm(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    copy = Path(environment["NOTES"]).parent / "spool" / "slurm_script"  # as Slurm does
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(SLURM, copy)
    return subprocess.run(["bash", copy, *arguments], env=environment, capture_output=True, text=True, timeout=30)


def test_every_node_gets_its_nine_arguments(cluster: dict[str, str]) -> None:
    done = run_slurm(cluster, ORDER)
    assert (done.returncode, done.stderr) == (0, "")
    notes = Path(cluster["NOTES"])
    port = str(20000 + 2 * (123456 % 5000))
    for node, call in enumerate(arguments_in(notes)):
        assert call == [ORDER, "16", "8", "node07", port, str(node), "output/msrun_log/slurm-123456", "True", "600"]
    assert len(arguments_in(notes)) == 2
    assert (notes / "srun").read_text().split() == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--wait=120"]
    assert (notes / "cpus").read_text() == "32\n"
    one, other = (notes / "secrets").read_text().split()
    assert one == other and len(one) == 64 and set(one) <= set("0123456789abcdef")


def test_variables_change_what_a_node_is_told(cluster: dict[str, str]) -> None:
    changes = {"RUN_TRAINER_SECRET": "given", "WORKERS_PER_NODE": "3", "MASTER_PORT": "9000", "CLUSTER_TIME_OUT": "60"}
    without = {name: value for name, value in cluster.items() if name != "SLURM_CPUS_PER_TASK"}
    assert run_slurm({**without, **changes}, ORDER).returncode == 0
    (first, _) = arguments_in(Path(cluster["NOTES"]))
    assert first[1:6] == ["6", "3", "node07", "9000", "0"] and first[8] == "60"
    assert (Path(cluster["NOTES"]) / "cpus").read_text() == "none\n"
    assert (Path(cluster["NOTES"]) / "secrets").read_text() == "given\ngiven\n"


def test_the_exit_code_of_a_node_is_that_of_the_job(cluster: dict[str, str]) -> None:
    program(Path(cluster["SLURM_SUBMIT_DIR"]) / "scripts" / "msrun_launcher.sh", "exit 7\n")
    assert run_slurm(cluster, ORDER).returncode == 7


def test_a_wrong_call_is_told(cluster: dict[str, str]) -> None:
    outside = {name: value for name, value in cluster.items() if name != "SLURM_JOB_ID"}
    for done in (run_slurm(cluster), run_slurm(cluster, "run_trainer.py", "--config"), run_slurm(outside, ORDER)):
        assert done.returncode == 2 and done.stderr.startswith("usage: sbatch ")
    elsewhere = run_slurm({**cluster, "SLURM_SUBMIT_DIR": "/nowhere"}, ORDER)
    assert elsewhere.returncode == 2 and "run sbatch in the repository's folder" in elsewhere.stderr


@pytest.mark.parametrize("checker", [["bash", "-n"], ["shellcheck", "--severity=style"]], ids=["bash", "shellcheck"])
def test_the_slurm_script_is_clean(checker: list[str]) -> None:
    if shutil.which(checker[0]) is None:
        pytest.skip(f"{checker[0]} is not installed")
    done = subprocess.run([*checker, str(SLURM)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_slurm_reads_all_of_its_lines() -> None:
    """It stops looking for #SBATCH at the first command."""
    lines = SLURM.read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) == 6 and max(options) < first_command


# ---- Volcano ---------------------------------------------------------------------------------------------------------
# The part of two schemas that the manifest uses: Volcano's Job (config/crd/volcano/bases/batch.volcano.sh_jobs.yaml of
# volcano-sh/volcano) and Kubernetes' PodSpec (core/v1). Unknown keys are errors, as with kubectl's strict validation.

Event = Literal[
    "*", "PodPending", "PodRunning", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "OutOfSync",
    "CommandIssued", "JobUpdated", "TaskFailed",
]  # fmt: skip
Action = Literal["AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob"]
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
PortName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=15)]
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Count = Annotated[int, Field(ge=0)]


class Kind(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Kind):
    name: Label | None = None
    generateName: Annotated[str, Field(pattern=r"^[a-z0-9][-a-z0-9]*$", max_length=50)] | None = None
    labels: dict[str, str] | None = None


class Policy(Kind):
    action: Action
    event: Event | None = None
    events: list[Event] | None = None
    exitCode: int | None = None
    timeout: str | None = None


class SecretKey(Kind):
    name: Label
    key: str
    optional: bool = False


class ValueFrom(Kind):
    secretKeyRef: SecretKey


class Variable(Kind):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    valueFrom: ValueFrom | None = None


class Port(Kind):
    name: PortName
    containerPort: Annotated[int, Field(ge=1, le=65535)]


class Resources(Kind):
    limits: dict[str, Quantity]
    requests: dict[str, Quantity] | None = None


class Mount(Kind):
    name: Label
    mountPath: str


class Container(Kind):
    name: Label
    image: str
    workingDir: str | None = None
    env: list[Variable] = []
    command: list[str]
    args: list[str] = []
    ports: list[Port] = []
    resources: Resources
    volumeMounts: list[Mount] = []


class Claim(Kind):
    claimName: Label


class Volume(Kind):
    name: Label
    persistentVolumeClaim: Claim


class PodSpec(Kind):
    restartPolicy: Literal["Always", "OnFailure", "Never"]
    terminationGracePeriodSeconds: Count = 30
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []


class Template(Kind):
    metadata: Metadata | None = None
    spec: PodSpec


class Task(Kind):
    name: Label
    replicas: Count
    minAvailable: Count | None = None
    policies: list[Policy] = []
    template: Template


class JobSpec(Kind):
    schedulerName: Annotated[str, Field(max_length=63)]
    queue: Label = "default"
    minAvailable: Count
    maxRetry: Count = 3
    plugins: dict[Literal["env", "svc", "ssh"], list[str]]
    policies: list[Policy] = []
    tasks: Annotated[list[Task], Field(min_length=1)]


class Job(Kind):
    apiVersion: Literal["batch.volcano.sh/v1alpha1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


@pytest.fixture
def manifest() -> dict[str, Any]:
    (document,) = yaml.safe_load_all(VOLCANO.read_text(encoding="utf-8"))
    return document


def test_the_manifest_is_a_volcano_job(manifest: dict[str, Any]) -> None:
    job = Job.model_validate(manifest)
    (task,) = job.spec.tasks
    assert job.spec.minAvailable == task.replicas, "all nodes are started, or none"
    assert set(job.spec.plugins) == {"env", "svc"}, "they set the variables that the command reads"
    (container,) = task.template.spec.containers
    (secret,) = (variable.valueFrom for variable in container.env if variable.name == "RUN_TRAINER_SECRET")
    assert secret.secretKeyRef.optional, "without it the launchers use a file on the volume"
    assert {mount.name for mount in container.volumeMounts} == {volume.name for volume in task.template.spec.volumes}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "minAvailable"), "2"),
        (("spec", "policies", 0, "event"), "PodDied"),
        (("spec", "tasks", 0, "replica"), 2),
        (("spec", "tasks", 0, "template", "spec", "containers", 0, "ports", 0, "containerPort"), 81180),
        (("spec", "tasks", 0, "template", "spec", "containers", 0, "env", 1, "value"), 8),
    ],
)
def test_the_schema_finds_mistakes(manifest: dict[str, Any], path: tuple, value: object) -> None:
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValidationError):
        Job.model_validate(manifest)


@pytest.mark.parametrize("node", [0, 1])
def test_every_pod_gets_its_nine_arguments(manifest: dict[str, Any], tmp_path: Path, node: int) -> None:
    (task,) = Job.model_validate(manifest).spec.tasks
    (container,) = task.template.spec.containers
    program(tmp_path / "scripts" / "msrun_launcher.sh", _LAUNCHER)
    program(tmp_path / "bin" / "getent", '[ "$*" = "hosts run-trainer-node-0.run-trainer" ]\n')
    (tmp_path / "notes").mkdir()
    environment = {
        **{variable.name: variable.value or "" for variable in container.env},
        # What Volcano's plugins env and svc set; the middle part of the names is the task's.
        "VC_TASK_INDEX": str(node),
        f"VC_{task.name.upper()}_NUM": str(task.replicas),
        f"VC_{task.name.upper()}_HOSTS": "run-trainer-node-0.run-trainer,run-trainer-node-1.run-trainer",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
    }
    done = subprocess.run(container.command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    order = environment["EXECUTE_ORDER"]
    expected = ["16", "8", "run-trainer-node-0.run-trainer", "8118", str(node), "/data/msrun_log", "True", "600"]
    assert arguments_in(tmp_path / "notes") == [[order, *expected]]
    assert (REPOSITORY / order.split()[0]).is_file() and (REPOSITORY / order.split()[2]).is_file()


def test_the_command_of_a_pod_is_the_launcher_itself(manifest: dict[str, Any]) -> None:
    """Its first process gets SIGTERM, so it must be the launcher and not a shell around it."""
    text = manifest["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["command"][-1]
    assert text.strip().splitlines()[-3].startswith("exec bash scripts/msrun_launcher.sh")
    launcher = (REPOSITORY / "scripts" / "msrun_launcher.sh").read_text(encoding="utf-8")
    assert launcher.rstrip().splitlines()[-1].startswith("exec ")
