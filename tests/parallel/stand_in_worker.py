"""A worker without MindSpore: does steps, sends heartbeats, saves when it is told to end, and misbehaves on demand.

Its arguments: STEPS [RANK@STEP:ACTION ...] [anything else].
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.device.stop_signals import StopSignals  # noqa: E402
from trainer.launch import heartbeat  # noqa: E402

RANK = int(os.environ["RANK_ID"])


def wait_for_others(step: int) -> None:
    """Waits until the other ranks of this host have done a step or two, however slowly they start."""
    job, size = Path(os.environ[heartbeat.JOB_VARIABLE]), int(os.environ["RUN_TRAINER_LOCAL_SIZE"])
    first = RANK // size * size
    for rank in set(range(first, first + size)) - {RANK}:
        while step_of(job, rank) < min(step - 1, 2):
            time.sleep(0.02)


def step_of(job: Path, rank: int) -> int:
    try:
        return int(heartbeat.beat_file(job, rank).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def act(action: str, step: int) -> None:
    name, _, value = action.partition("=")
    if name in ("exit", "first", "raise", "kill", "announce"):
        wait_for_others(step)
    if name == "exit":
        print("something bad happened", file=sys.stderr, flush=True)
        os._exit(int(value))
    elif name == "first":  # fails in the first start of the job alone
        if not heartbeat.restart_info():
            os._exit(int(value))
    elif name == "raise":
        raise ValueError("something bad happened")
    elif name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "announce":  # it fails, but its process takes its time to end
        heartbeat.announce_failure(int(value))
        time.sleep(30)
    elif name == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    elif name == "slow":  # saves for so many seconds
        global saving_seconds
        saving_seconds = float(value)
    elif name == "tokenize":
        heartbeat.beat(None)
    elif name == "hang":
        wait_for_ever()
    elif name == "after":  # goes on once the test has made this file
        while not Path(value).exists():
            time.sleep(0.02)
    elif name == "child":
        subprocess.Popen(["sleep", "1000"])


def wait_for_ever() -> None:
    while True:
        time.sleep(1)


facts = {
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
    "threads": os.environ["OMP_NUM_THREADS"],
    "path": os.environ["PATH"],
    "python": sys.executable,
    "pid": os.getpid(),
    **{name: os.environ.get(name) for name in ("RANK_ID", "MS_WORKER_NUM", "RUN_TRAINER_LOCAL_SIZE", "MS_ROLE")},
}
print("facts", json.dumps(facts), flush=True)
heartbeat.start()
actions, saving_seconds = {}, 0.0
for word in sys.argv[2:]:
    place, _, action = word.partition(":")
    if action:
        actions.setdefault(place, []).append(action)
with StopSignals() as stop:
    for step in range(1, int(sys.argv[1]) + 1):
        for action in actions.get(f"{RANK}@{step}", []):
            act(action, step)
        time.sleep(0.05)
        heartbeat.beat(step)
        print(f"rank {RANK} did step {step}", flush=True)
        if stop:
            time.sleep(saving_seconds)
            print(f"saved after {stop.received.name}", flush=True)
            break
sys.exit(stop.exit_code)
