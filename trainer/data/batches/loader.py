"""Loads the micro-batches of a rank, in the order of an epoch; a thread prepares them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.checks.problem import data_error
from trainer.data.batches.batch import AnyBatch, PairBatch, concatenate
from trainer.data.batches.blend import BlendedDataset
from trainer.data.batches.packing import SequenceDataset
from trainer.data.datasets import batch_size, build_datasets, build_eval_dataset
from trainer.data.rng import Stream, random_order
from trainer.data.tokens.token_file import Progress
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

DataParallelRank = tuple[int, int]
"""The data-parallel rank of this process, and the number of data-parallel ranks."""


@dataclass(frozen=True)
class EvalBatches:
    """The data of an evaluation: all batches of an epoch, or the first `max_batches`."""

    dataset: SequenceDataset
    loader: BatchLoader
    max_batches: int | None


@dataclass(frozen=True)
class TrainingBatches:
    """The data of a training; `evaluation` is None without do_eval."""

    dataset: SequenceDataset
    loader: BatchLoader
    evaluation: EvalBatches | None


def training_batches(
    config: Config, ranks: DataParallelRank, progress: Progress, note: Callable[[str], None]
) -> TrainingBatches:
    """Opens the training data, and the data for evaluation.

    Args:
        progress: Called with (bytes done, all bytes) while text is tokenized.
        note: Called with sentences for the user.

    Raises:
        UserError: The data cannot be read, or do not fill a batch.
    """
    train, evaluated = build_datasets(config, progress, note)
    loader = _loader(config, "train_dataset", train, ranks, shuffle=config.train_dataset.data_loader.shuffle)
    evaluation = None
    if config.do_eval:
        evaluation = _evaluation(config, evaluated, ranks)
    return TrainingBatches(train, loader, evaluation)


def eval_batches(
    config: Config, ranks: DataParallelRank, progress: Progress, note: Callable[[str], None]
) -> EvalBatches:
    """Opens the data of run mode eval; see `training_batches` for arguments and errors."""
    return _evaluation(config, build_eval_dataset(config, progress, note), ranks)


def _evaluation(config: Config, dataset: SequenceDataset | None, ranks: DataParallelRank) -> EvalBatches:
    assert dataset is not None, "preflight has seen that there is something to evaluate on"
    section = "train_dataset"
    if config.eval_dataset is not None:
        section = "eval_dataset"
    loader = _loader(config, section, dataset, ranks, shuffle=False, keep_all=True)
    return EvalBatches(dataset, loader, getattr(config, section).max_batches or None)


def _loader(
    config: Config, section: str, dataset: SequenceDataset, ranks: DataParallelRank, *, shuffle: bool,
    keep_all: bool = False,
) -> BatchLoader:  # fmt: skip
    settings = getattr(config, section)
    size = batch_size(config, section)
    drop_remainder = settings.drop_remainder and not keep_all
    # While a step computes, all micro-batches of the next step are prepared: no step waits for data.
    micro_batches_per_step = 1
    if not keep_all:
        micro_batches_per_step = config.runner_config.gradient_accumulation_steps
    if drop_remainder and dataset.num_sequences < size * ranks[1]:
        batch = f"batch_size {size}"
        if ranks[1] > 1:
            batch += f" x {ranks[1]} ranks"
        fix = f"set a smaller one, or {section}.drop_remainder to false"
        count = f"{dataset.num_sequences:,} {config.network.sequences_text}"
        rule = f"the data set has {count}, fewer than one global batch ({batch})"
        raise data_error(config, "runner_config.batch_size", rule, fix)
    return BatchLoader(
        dataset,
        batch_size=size,
        shuffle=shuffle,
        seed=config.seed,
        drop_remainder=drop_remainder,
        prefetch_size=max(settings.prefetch_size, micro_batches_per_step),
        rank=ranks[0],
        ranks=ranks[1],
    )


def epoch_order(dataset: SequenceDataset, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of sequences in an epoch: int64 [num_sequences], a function of the arguments alone."""
    if isinstance(dataset, BlendedDataset):
        return dataset.order(epoch, shuffle=shuffle, seed=seed)
    size = dataset.num_sequences
    if shuffle:
        return random_order(seed, Stream.ORDER, epoch, size)
    return np.arange(size)


def stored_sequences(dataset: SequenceDataset) -> int:
    """Returns how many sequences a data set can read, of which an epoch may have fewer."""
    if isinstance(dataset, BlendedDataset):
        return sum(share.sequences for share in dataset.shares)
    return dataset.num_sequences


@dataclass
class BatchLoader:
    """Makes the micro-batches of a data set; it keeps no state between epochs.

    An epoch takes `batch_size` x `ranks` sequences at a time in the order of `epoch_order`, and each rank gets other
    `batch_size` of them. No sequence is repeated in an epoch, and all ranks get equally many batches. The remaining
    sequences are dropped, or filled up to a full batch with padding without loss: shapes never change.

    Raises:
        UserError: The data set does not fill one batch.
    """

    dataset: SequenceDataset
    _: KW_ONLY
    batch_size: int  # sequences of a micro-batch on one rank
    shuffle: bool  # whether each epoch has its own random order
    seed: int
    drop_remainder: bool  # whether to drop the sequences at the end of an epoch that do not fill a batch of all ranks
    prefetch_size: int  # micro-batches to prepare ahead
    rank: int = 0
    ranks: int = 1
    reference: np.ndarray | None = None  # float64 [sequences, D], for the `PairBatch` of each sequence

    def __post_init__(self) -> None:
        assert self.batch_size >= 1 and self.prefetch_size >= 1 and 0 <= self.rank < self.ranks
        self.global_batch_size = self.batch_size * self.ranks
        self.batches_per_epoch, remainder = divmod(self.dataset.num_sequences, self.global_batch_size)
        if remainder and not self.drop_remainder:
            self.batches_per_epoch += 1
        if self.batches_per_epoch == 0:
            of_ranks = ""
            if self.ranks > 1:
                of_ranks = f" for each of {self.ranks} ranks"
            rule = f"{self.dataset.num_sequences} sequences do not fill one batch{of_ranks}"
            fix = "set a smaller batch_size, or drop_remainder to false"
            raise UserError(rule, key="batch_size", value=self.batch_size, fix=fix)

    def epoch(self, epoch: int, start: int = 0) -> Generator[AnyBatch, None, None]:
        """Iterates over the micro-batches of an epoch; the first `start` are skipped without reading them.

        A background thread prepares them from the first ``next`` on, until the iteration ends or the iterator is
        closed. Its errors are raised here.
        """
        assert 0 <= start <= self.batches_per_epoch
        return _prefetch(self._batches(epoch, start), self.prefetch_size)

    def _batches(self, epoch: int, start: int) -> Iterator[AnyBatch]:
        order = epoch_order(self.dataset, shuffle=self.shuffle, seed=self.seed, epoch=epoch)
        for index in range(start, self.batches_per_epoch):
            first = (index * self.ranks + self.rank) * self.batch_size
            indices = order[first : first + self.batch_size]
            batch = self._batch(indices)
            if self.reference is None or not isinstance(batch, PairBatch):
                yield batch
            else:
                reference_BD = np.zeros((self.batch_size, self.reference.shape[1]))
                reference_BD[: len(indices)] = self.reference[indices]
                yield batch._replace(reference=reference_BD)

    def _batch(self, indices: np.ndarray) -> AnyBatch:
        """Reads sequences, filled up to a micro-batch."""
        missing = self.batch_size - len(indices)
        if not missing:
            return self.dataset.batch(indices)
        if not len(indices):
            return self.dataset.padding(missing)
        return concatenate(self.dataset.batch(indices), self.dataset.padding(missing))


def _prefetch(batches: Iterator[AnyBatch], size: int) -> Generator[AnyBatch, None, None]:
    """Runs an iterator in a thread, up to `size` items ahead."""
    ready: queue.Queue[AnyBatch | BaseException | None] = queue.Queue(size)
    stop = threading.Event()

    def produce() -> None:
        """Puts all batches into the queue, then the error that ended them, or None."""
        last: BaseException | None = None
        try:
            for batch in batches:
                ready.put(batch)
                if stop.is_set():
                    return
        except BaseException as error:  # the consumer must get every error
            last = error
        if not stop.is_set():
            ready.put(last)

    # A daemon: an iterator that is never closed must not keep the process alive.
    thread = threading.Thread(target=produce, name="batch-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        # This makes space for the one item that the thread may be about to put; then it sees the event.
        while not ready.empty():
            try:
                ready.get_nowait()
            except queue.Empty:
                break
        if thread is not threading.current_thread():  # the garbage collector may run in any thread
            thread.join()
