"""run_trainer.py whose `launch` forks its workers from a process that has imported MindSpore: fork_server.py."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS.parent), str(TESTS)]

if __name__ == "__main__":
    from fork_server import FORKED

    from trainer.cli.main import program
    from trainer.launch import command

    command.trainer_command = lambda: [sys.executable, "-u", str(FORKED), str(TESTS.parent / "run_trainer.py")]
    program()
