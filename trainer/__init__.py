"""run_trainer: a command-line trainer for language models on MindSpore."""

__version__ = "0.1.0"
