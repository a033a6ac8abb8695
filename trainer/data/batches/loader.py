"""The batches of a run: one rank's part of the training data and of the evaluation data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.batches.packing import SequenceDataset
from trainer.data.batches.sampler import BatchLoader
from trainer.data.datasets import batch_size, build_datasets, build_eval_dataset
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

Progress = Callable[[int, int], None]
Ranks = tuple[int, int]
"""This rank, and how many share the data."""


@dataclass(frozen=True)
class EvalBatches:
    """Data of an evaluation: all batches of an epoch, or the first `max_batches`."""

    dataset: SequenceDataset
    loader: BatchLoader
    max_batches: int | None


@dataclass(frozen=True)
class TrainingBatches:
    """Data of a training; `evaluation` is None without do_eval."""

    dataset: SequenceDataset
    loader: BatchLoader
    evaluation: EvalBatches | None


def training_batches(
    config: Config, ranks: Ranks, progress: Progress, notice: Callable[[str], None]
) -> TrainingBatches:
    """Opens the training data, and what is held out of it or named for evaluation.

    Args:
        config: The whole configuration.
        ranks: Selects the part of every batch.
        progress: Called with (bytes done, bytes in all) while text is tokenized.
        notice: Called with a sentence that the user should know.

    Raises:
        UserError: The data cannot be read, or fills no batch.
    """
    train, held_out = build_datasets(config, progress, notice)
    loader = _loader(config, "train_dataset", train, ranks, shuffle=config.train_dataset.data_loader.shuffle)
    return TrainingBatches(train, loader, _evaluation(config, held_out, ranks) if config.do_eval else None)


def eval_batches(config: Config, ranks: Ranks, progress: Progress, notice: Callable[[str], None]) -> EvalBatches:
    """Opens the data of run mode eval; arguments and errors as in `training_batches`."""
    return _evaluation(config, build_eval_dataset(config, progress, notice), ranks)


def _evaluation(config: Config, dataset: SequenceDataset | None, ranks: Ranks) -> EvalBatches:
    assert dataset is not None, "preflight has seen that there is something to evaluate on"
    section = "eval_dataset" if config.eval_dataset is not None else "train_dataset"
    loader = _loader(config, section, dataset, ranks, shuffle=False, whole=True)
    return EvalBatches(dataset, loader, getattr(config, section).max_batches or None)


def _loader(
    config: Config, section: str, dataset: SequenceDataset, ranks: Ranks, *, shuffle: bool, whole: bool = False
) -> BatchLoader:
    settings, size = getattr(config, section), batch_size(config, section)
    drop_remainder = settings.drop_remainder and not whole
    if drop_remainder and dataset.num_sequences < size * ranks[1]:
        of_ranks = f" on each of {ranks[1]} ranks" if ranks[1] > 1 else ""
        key, fix = "runner_config.batch_size", f"set a smaller one, or {section}.drop_remainder to False"
        rule = f"{dataset.num_sequences:,} {config.network.sequences_text} do not fill a batch of {size}{of_ranks}"
        raise UserError(rule, where=config.source.where(key), key=key, value=size, fix=fix)
    return BatchLoader(
        dataset,
        batch_size=size,
        shuffle=shuffle,
        seed=config.seed,
        drop_remainder=drop_remainder,
        prefetch_size=settings.prefetch_size,
        rank=ranks[0],
        ranks=ranks[1],
    )
