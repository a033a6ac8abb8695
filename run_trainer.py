#!/usr/bin/env python3
"""Command line of the trainer: `python run_trainer.py --config configs/quickstart.yaml`. See README.md."""

from trainer.cli import main

if __name__ == "__main__":
    main()
