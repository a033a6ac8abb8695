"""Replaces MindSpore's msrun, which takes seconds to import: starts a scheduler and the workers.

Like the real one it starts whatever `python` is first on PATH, and kills every worker when one ends with an error. The
scheduler, which is MindSpore's and takes a second to load, only runs with STAND_IN_SCHEDULER in the environment.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
for name in ("worker_num", "local_worker_num", "master_port", "node_rank", "cluster_time_out", "tail_worker_log"):
    parser.add_argument(f"--{name}", type=int, default=0)
for name in ("master_addr", "log_dir", "join"):
    parser.add_argument(f"--{name}")
parser.add_argument("script")
options = parser.parse_args()

shared = {
    "MS_WORKER_NUM": str(options.worker_num),
    "MS_SCHED_HOST": options.master_addr,
    "MS_SCHED_PORT": str(options.master_port),
    "RANK_SIZE": str(options.worker_num),
}


def start(own: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(["python", options.script], env={**os.environ, **shared, **own}, start_new_session=True)


scheduler = start({"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}) if "STAND_IN_SCHEDULER" in os.environ else None
workers = []
for place in range(options.local_worker_num):
    rank = options.node_rank * options.local_worker_num + place
    workers.append(start({"MS_ROLE": "MS_WORKER", "RANK_ID": str(rank), "DEVICE_ID": str(place)}))
while any(worker.poll() is None for worker in workers):
    if any(worker.poll() for worker in workers):
        for worker in workers:
            os.killpg(worker.pid, signal.SIGKILL)
        sys.exit(1)
    time.sleep(0.1)
sys.exit(scheduler.wait() if scheduler else 0)
