"""Stands for MindSpore's msrun in RUN_TRAINER_MSRUN: the same program, in a process that has imported MindSpore."""

import os
import sys

from fork_server import SOCKET_VARIABLE, run_forked

MSRUN = "mindspore.parallel.cluster.run"

if __name__ == "__main__":
    sys.exit(run_forked(os.environ[SOCKET_VARIABLE], ["-m", MSRUN, *sys.argv[1:]]))
