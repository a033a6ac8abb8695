"""The files in scripts/cluster: the nine arguments that they give the launcher on each node, and their own syntax.

Slurm's commands and the container's environment are stood in for; what the files themselves do is really run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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
# Keys of Volcano's Job (config/crd/volcano/bases/batch.volcano.sh_jobs.yaml of volcano-sh/volcano) and of Kubernetes'
# PodSpec (core/v1) with the kind of their values. kubectl's strict validation refuses any other.
_JOB, _POD = "spec", "spec.tasks.template.spec"
_CONTAINER = f"{_POD}.containers"
_ENV = f"{_CONTAINER}.env"
KEYS = {
    str: f"apiVersion kind metadata.generateName {_JOB}.schedulerName {_JOB}.queue {_JOB}.policies.event "
         f"{_JOB}.policies.action {_JOB}.tasks.name {_POD}.restartPolicy {_CONTAINER}.name {_CONTAINER}.image "
         f"{_CONTAINER}.workingDir {_ENV}.name {_ENV}.value {_ENV}.valueFrom.secretKeyRef.name "
         f"{_ENV}.valueFrom.secretKeyRef.key {_CONTAINER}.command {_CONTAINER}.ports.name "
         f"{_CONTAINER}.resources.limits.cpu {_CONTAINER}.resources.limits.memory {_CONTAINER}.volumeMounts.name "
         f"{_CONTAINER}.volumeMounts.mountPath {_POD}.volumes.name {_POD}.volumes.persistentVolumeClaim.claimName",
    int: f"{_JOB}.minAvailable {_JOB}.maxRetry {_JOB}.tasks.replicas {_POD}.terminationGracePeriodSeconds "
         f"{_CONTAINER}.ports.containerPort",
    bool: f"{_ENV}.valueFrom.secretKeyRef.optional",
    list: f"{_JOB}.plugins.env {_JOB}.plugins.svc",
}  # fmt: skip


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, type]]:
    """Yields the keys of a manifest, without the places in lists, and the kinds of their values."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for each in value:
            yield from leaves(each, path)
    else:
        yield path, type(value)


@pytest.fixture
def manifest() -> dict[str, Any]:
    (document,) = yaml.safe_load_all(VOLCANO.read_text(encoding="utf-8"))
    return document


def test_the_manifest_is_a_volcano_job(manifest: dict[str, Any]) -> None:
    known = {(name, kind) for kind, names in KEYS.items() for name in names.split()}
    assert set(leaves(manifest)) <= known
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    spec = manifest["spec"]
    (task,) = spec["tasks"]
    pod = task["template"]["spec"]
    assert spec["minAvailable"] == task["replicas"], "all nodes are started, or none"
    assert set(spec["plugins"]) == {"env", "svc"}, "they set the variables that the command reads"
    assert [(each["event"], each["action"]) for each in spec["policies"]] == [
        ("PodFailed", "AbortJob"), ("PodEvicted", "AbortJob"),
    ]  # fmt: skip
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    (secret,) = (each["valueFrom"] for each in container["env"] if each["name"] == "RUN_TRAINER_SECRET")
    assert secret["secretKeyRef"]["optional"], "without it the launchers use a file on the volume"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("node", [0, 1])
def test_every_pod_gets_its_nine_arguments(manifest: dict[str, Any], tmp_path: Path, node: int) -> None:
    (task,) = manifest["spec"]["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    program(tmp_path / "scripts" / "msrun_launcher.sh", _LAUNCHER)
    program(tmp_path / "bin" / "getent", '[ "$*" = "hosts run-trainer-node-0.run-trainer" ]\n')
    (tmp_path / "notes").mkdir()
    assert task["name"] == "node"
    environment = {
        **{each["name"]: each.get("value", "") for each in container["env"]},
        # What Volcano's plugins env and svc set; the middle part of the names is the task's.
        "VC_TASK_INDEX": str(node),
        "VC_NODE_NUM": str(task["replicas"]),
        "VC_NODE_HOSTS": "run-trainer-node-0.run-trainer,run-trainer-node-1.run-trainer",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
    }
    done = subprocess.run(
        container["command"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30
    )
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
