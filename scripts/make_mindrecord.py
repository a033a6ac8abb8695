#!/usr/bin/env python3
"""Writes the training data of a configuration as MindRecord files, for MindDataset here and in MindSpore Transformers.

    python scripts/make_mindrecord.py FILE.mindrecord --config FILE [flags of run_trainer.py]

Reads `train_dataset` with its tokenizer and packing, whatever its loader. A row is a sequence of `seq_length` tokens:
column `input_ids`, and column `labels` with the next tokens, -100 where there is no loss (in a prompt, in padding, at
the end of a document). The files do not say which documents share a row: they see each other, unless the reader sets
`eod_reset`. `--train_dataset.packing none` writes one document in each row.

Needs MindSpore.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainer.cli.flags import split_arguments  # noqa: E402
from trainer.config import load_config  # noqa: E402
from trainer.data import SequenceDataset, build_train_dataset  # noqa: E402
from trainer.errors import TrainerError, UserError  # noqa: E402
from trainer.run.mindrecord import write_mindrecord  # noqa: E402

_ROWS_OF_A_BATCH = 256


def main(argv: list[str]) -> str:
    """Returns a line about the file.

    Raises:
        UserError: The arguments or the data are wrong.
    """
    arguments = split_arguments(argv)
    if arguments.config is None or len(arguments.rest) != 1:
        fix = "write make_mindrecord.py data/wiki.mindrecord --config FILE"
        raise UserError("one FILE and a --config are needed", fix=fix)
    path = Path(arguments.rest[0]).expanduser()
    if path.suffix != ".mindrecord":
        fix = f"write {path.name}.mindrecord"
        raise UserError("the name of a MindRecord file ends with .mindrecord", key="FILE", value=str(path), fix=fix)
    config = load_config(arguments.config, arguments.overrides)
    dataset, _ = build_train_dataset(config, note=lambda sentence: print(f"note: {sentence}", file=sys.stderr))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mindrecord(path, _rows(dataset))
    return f"{path}: {dataset.num_sequences:,} rows of {dataset.seq_length:,} tokens"


def _rows(dataset: SequenceDataset) -> Iterator[dict[str, np.ndarray]]:
    for first in range(0, dataset.num_sequences, _ROWS_OF_A_BATCH):
        batch = dataset.batch(range(first, min(first + _ROWS_OF_A_BATCH, dataset.num_sequences)))
        for tokens, labels in zip(batch.input_ids, batch.labels, strict=True):
            yield {"input_ids": tokens, "labels": labels}


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    try:
        print(main(sys.argv[1:]))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
