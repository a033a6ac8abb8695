"""Translates files of MindSpore Transformers' newer schema, that of its PynativeTrainer (``--mode 1``).

Only a file with a section of that schema loads the modules of this folder.
"""

from trainer.config.read.nodes import Table, find_entry

MARKS = ("training", "parallelism", "lr_scheduler", "checkpoint", "train_dataset.dataloader")
_OLDER = (
    "runner_config", "runner_wrapper", "lr_schedule", "parallel", "parallel_config", "trainer", "model_config",
    "train_dataset_task", "model.model_config", "model.arch",
)  # fmt: skip


def is_newer_schema(root: Table) -> bool:
    """Returns whether a file has sections of the newer schema.

    Raises:
        UserError: It also has sections that only the older schema has.
    """
    newer = {key: entry for key in MARKS if (entry := find_entry(root, key)) is not None}
    older = {key: entry for key in _OLDER if (entry := find_entry(root, key)) is not None}
    if newer and older:
        from trainer.config.pynative.mixed import mixed_schemas_error

        raise mixed_schemas_error(newer, older)
    return bool(newer)
