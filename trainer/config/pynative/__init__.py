"""The newer schema of MindSpore Transformers' files, of its PynativeTrainer (``--mode 1``), and its translation.

Only a file of that schema loads the modules here.
"""

from trainer.config.read.nodes import Table

_MARKS = ("training", "parallelism", "lr_scheduler", "checkpoint")
_OLDER = ("runner_config", "runner_wrapper", "lr_schedule", "parallel", "parallel_config", "run_mode", "trainer")


def is_newer_schema(root: Table) -> bool:
    """Whether a file has sections that only the newer schema has, and none that only the older one has."""
    entries = root.entries()
    loader = entries["train_dataset"].node if "train_dataset" in entries else None
    marked = any(name in entries for name in _MARKS) or (isinstance(loader, Table) and "dataloader" in loader.entries())
    return marked and not any(name in entries for name in _OLDER)
