"""The order of sequences in an epoch, and micro-batches of them that a background thread prepares ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np

from trainer.data.batches.batch import Batch, concatenate
from trainer.data.batches.packing import SequenceDataset
from trainer.data.rng import Stream, random_order
from trainer.errors import UserError


def epoch_order(num_sequences: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """The order of sequences in an epoch: int64 [num_sequences], a function of its arguments alone."""
    return random_order(seed, Stream.ORDER, epoch, num_sequences) if shuffle else np.arange(num_sequences)


def optimizer_steps(micro_batches: int, window: int) -> int:
    """Optimizer steps of so many micro-batches, `window` of them each; the last step may have fewer."""
    return -(-micro_batches // window)


class BatchLoader:
    """Makes the micro-batches of a data set; keeps no state between epochs.

    An epoch takes `batch_size` x `ranks` sequences at a time in the order of `epoch_order`, and each rank gets its own
    `batch_size` of them: no sequence is repeated in an epoch, and all ranks get equally many batches. The rest at the
    end is dropped, or filled up to a whole batch with padding without loss: shapes never change.

    Args:
        dataset: The sequences.
        batch_size: Sequences of a micro-batch on one rank.
        shuffle: Whether each epoch has its own random order.
        seed: Seed of the orders.
        drop_remainder: Whether to drop the sequences at the end of an epoch that do not fill a batch of all ranks.
        prefetch_size: Micro-batches to prepare ahead, at least 1.
        rank: Number of this rank.
        ranks: Number of ranks that divide each batch.

    Raises:
        UserError: The data set does not fill one batch.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_remainder: bool,
        prefetch_size: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        assert batch_size >= 1 and prefetch_size >= 1 and 0 <= rank < ranks
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._prefetch_size = prefetch_size
        self._rank = rank
        self._ranks = ranks
        self.global_batch_size = batch_size * ranks
        whole, left = divmod(dataset.num_sequences, self.global_batch_size)
        self.batches_per_epoch = whole + bool(left and not drop_remainder)
        if self.batches_per_epoch == 0:
            of_ranks = f" for each of {ranks} ranks" if ranks > 1 else ""
            rule = f"{dataset.num_sequences} sequences do not fill one batch{of_ranks}"
            fix = "set a smaller batch_size, or drop_remainder to False"
            raise UserError(rule, key="batch_size", value=batch_size, fix=fix)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterates over the micro-batches of an epoch.

        A background thread prepares them from the first ``next`` on, until the iteration ends or the iterator is
        closed. Its errors are raised here.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of micro-batches to skip without reading them.
        """
        assert 0 <= start <= self.batches_per_epoch
        return _prefetch(self._batches(epoch, start), self._prefetch_size)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = epoch_order(self._dataset.num_sequences, shuffle=self._shuffle, seed=self._seed, epoch=epoch)
        for index in range(start, self.batches_per_epoch):
            first = (index * self._ranks + self._rank) * self._batch_size
            indices = order[first : first + self._batch_size]
            missing = self._batch_size - len(indices)
            if not missing:
                yield self._dataset.batch(indices)
            elif not len(indices):
                yield self._dataset.padding(missing)
            else:
                yield concatenate(self._dataset.batch(indices), self._dataset.padding(missing))


def _prefetch(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    """Runs an iterator in a thread, up to `size` items ahead."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(size)
    stop = threading.Event()

    def produce() -> None:
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
        # This makes room for the one item that the thread may be about to put; then it sees the event.
        while not ready.empty():
            try:
                ready.get_nowait()
            except queue.Empty:
                break
        if thread is not threading.current_thread():  # the garbage collector may run in any thread
            thread.join()
