#!/usr/bin/env python3
"""Command line of the trainer: `python run_trainer.py --config configs/quickstart.yaml`. See README.md."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the packages load ends without a traceback
    try:
        from trainer.cli.loading import gc_disabled

        with gc_disabled():
            from trainer.cli.main import program
    except ModuleNotFoundError as missing:
        print(
            f"error: the package {missing.name} is not installed for {sys.executable}\n"
            "  Fix: bash scripts/setup_env.sh, then . .venv/bin/activate",
            file=sys.stderr,
        )
        sys.exit(2)
    program()
