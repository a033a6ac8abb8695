"""run_trainer: a command-line trainer for language models on MindSpore.

In a notebook: `from trainer import train, load`, see `trainer.run.notebook`.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "load", "train"]


def __getattr__(name: str) -> Any:
    """Imports a function for notebooks at its first use, so that importing the package loads nothing else."""
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("trainer.run.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
