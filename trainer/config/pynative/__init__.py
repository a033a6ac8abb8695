"""The newer schema of MindSpore Transformers' files, of its PynativeTrainer (``--mode 1``), and its translation.

Only a file of that schema loads the modules here.
"""

from trainer.config.read.nodes import Table

_MARKS = ("training", "parallelism", "lr_scheduler", "checkpoint")
_OLDER = (
    "runner_config", "runner_wrapper", "lr_schedule", "parallel", "parallel_config", "run_mode", "trainer",
    "output_dir", "use_parallel", "model_config", "train_dataset_task",
)  # fmt: skip


def is_newer_schema(root: Table) -> bool:
    """Whether a file has sections that only the newer schema has, and none that only the older one has."""
    entries = root.entries()
    below = {name: entries[name].node for name in ("train_dataset", "model") if name in entries}
    names = {name: set(node.entries()) if isinstance(node, Table) else set() for name, node in below.items()}
    marked = any(name in entries for name in _MARKS) or "dataloader" in names.get("train_dataset", ())
    older = any(name in entries for name in _OLDER) or bool(names.get("model", set()) & {"model_config", "arch"})
    return marked and not older
