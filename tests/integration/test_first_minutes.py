"""What a newcomer meets on a machine unlike ours: folders of any name, no network, a read-only home folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import PROGRAM, write_config, write_corpus

from trainer.checkpoint.store import newest_complete

pytestmark = pytest.mark.slow


def without_network(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a folder without network and with a read-only home folder."""
    home = folder / "home"
    home.mkdir()
    command = ["unshare", "--map-root-user", "--mount", "--net", "bash", "-c",
               f"mount -t tmpfs -o ro none '{home}' && ip link set lo up || exit 77\n{script}"]  # fmt: skip
    environment = {"HOME": str(home), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
                   "MPLBACKEND": "module://of_a_notebook"}  # fmt: skip
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no namespaces are permitted here: {done.stderr}")
    return done


def test_a_training_needs_no_network_no_home_folder_and_no_plain_name(tmp_path: Path) -> None:
    folder = tmp_path / "für mich, 100 % größer"
    data = write_corpus(folder / "meine Daten")
    changes = {"train_dataset": {"cache_dir": None, "data_loader": {"type": "TextDataset", "dataset_dir": data.name}},
               "report": True, "runner_config.stop_step": 2}  # fmt: skip
    write_config(folder, data.name, changes | {"output_dir": "Ausgabe ü"}).rename(folder / "läuft.yaml")
    done = without_network(folder, f"'{sys.executable}' '{PROGRAM}' --config läuft.yaml")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    cache = folder / "home" / ".cache" / "run_trainer"
    assert notes == [f"note: token files are in Ausgabe ü/tokens: {cache} cannot be made (Read-only file system)"]
    output = folder / "Ausgabe ü"
    assert newest_complete(output / "checkpoints").name == "step-00000002"
    assert (output / "report.html").is_file() and (output / "report.png").is_file()
