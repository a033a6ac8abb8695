#!/usr/bin/env python3
"""Writes the training data of a configuration as indexed token files of Megatron-LM: PREFIX.bin and PREFIX.idx.

    python scripts/make_megatron.py PREFIX --config FILE [flags of run_trainer.py]

Reads `train_dataset` with its tokenizer, whatever its loader; each document ends with the tokenizer's end token. Of
several sources each becomes files of its own: PREFIX-0, PREFIX-1 ... The files have no place for which tokens carry
loss: conversations are refused, and scripts/make_mindrecord.py writes them. A BlendedMegatronDatasetDataLoader reads
the files, here and in MindSpore Transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainer.cli.flags import split_arguments  # noqa: E402
from trainer.config import load_config  # noqa: E402
from trainer.data.datasets import TRAIN, find_tokenizer, open_token_files  # noqa: E402
from trainer.data.source.indexed import write_indexed  # noqa: E402
from trainer.errors import TrainerError, UserError  # noqa: E402


def main(argv: list[str]) -> list[str]:
    """Returns a line about each pair of files.

    Raises:
        UserError: The arguments or the data are wrong, or some tokens carry no loss.
    """
    arguments = split_arguments(argv)
    if arguments.config is None or len(arguments.rest) != 1:
        raise UserError("one PREFIX and a --config are needed", fix="write make_megatron.py data/wiki --config FILE")
    config, told = load_config(arguments.config, arguments.overrides), []
    opened = open_token_files(config, TRAIN, note=lambda sentence: print(f"note: {sentence}", file=sys.stderr))
    for number, (source, _, tokens) in enumerate(opened):
        if tokens.mask is not None:
            rule = "some of its tokens carry no loss, and indexed token files have no place for that"
            raise UserError(rule, where=source.where, key=source.key, value=source.name,
                            fix="use scripts/make_mindrecord.py, or set train_dataset.train_on to all")
        prefix = Path(arguments.rest[0] + (f"-{number}" if len(opened) > 1 else "")).expanduser()
        prefix.parent.mkdir(parents=True, exist_ok=True)
        spans = zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True)
        documents = (tokens.tokens[start:end] for start, end in spans)
        count = write_indexed(prefix, documents, find_tokenizer(config, TRAIN).vocab_size)
        told.append(f"{prefix}: {count:,} documents, {tokens.meta.num_tokens:,} tokens of {source.name}")
    return told


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    try:
        print(*main(sys.argv[1:]), sep="\n")
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
