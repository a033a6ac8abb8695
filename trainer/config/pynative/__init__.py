"""Translates files of MindSpore Transformers' newer schema, that of its PynativeTrainer (``--mode 1``).

Only a file of that schema loads the modules of this folder.
"""

from trainer.config.read.nodes import Table

_MARKS = ("training", "parallelism", "lr_scheduler", "checkpoint")
_OLDER = (
    "runner_config", "runner_wrapper", "lr_schedule", "parallel", "parallel_config", "trainer", "model_config",
    "train_dataset_task",
)  # fmt: skip


def is_newer_schema(root: Table) -> bool:
    """Returns whether a file has sections of the newer schema, and no section that only the older one has."""
    entries = root.entries()
    names: dict[str, set[str]] = {"train_dataset": set(), "model": set()}
    for name in names:
        if name in entries and isinstance(node := entries[name].node, Table):
            names[name] = set(node.entries())
    is_newer = any(name in entries for name in _MARKS) or "dataloader" in names["train_dataset"]
    is_older = any(name in entries for name in _OLDER) or bool(names["model"] & {"model_config", "arch"})
    return is_newer and not is_older
