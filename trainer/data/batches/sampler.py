"""The order of rows in an epoch, cut into micro-batches that a background thread prepares ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np

from trainer.data.batches.batch import Batch, concatenate
from trainer.data.batches.packing import RowDataset
from trainer.data.rng import Stream, random_order
from trainer.errors import UserError


def epoch_order(num_rows: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """The order of rows in an epoch: int64 [num_rows], a function of nothing but its arguments."""
    return random_order(seed, Stream.ORDER, epoch, num_rows) if shuffle else np.arange(num_rows)


class BatchLoader:
    """Hands out micro-batches of a data set; keeps no state between epochs.

    An epoch goes through the rows in the order of `epoch_order`, `batch_size` x `ranks` at a time, of which each rank
    takes its own `batch_size`: in an epoch no row comes twice, and every rank gets equally many batches. What is left
    at the end is dropped, or filled up to a whole batch with padding rows that carry no loss: shapes never change.

    Args:
        dataset: The rows.
        batch_size: Rows of a micro-batch on one rank.
        shuffle: Whether each epoch has an order of its own.
        seed: Decides the orders.
        drop_remainder: Whether to drop the rows at the end of an epoch that do not fill a batch of all ranks.
        prefetch_size: Micro-batches to prepare ahead, at least 1.
        rank: Which part of each batch to take.
        ranks: How many take parts.

    Raises:
        UserError: The data set does not fill one batch.
    """

    def __init__(
        self,
        dataset: RowDataset,
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
        whole, left_rows = divmod(dataset.num_rows, self.global_batch_size)
        self.batches_per_epoch = whole + bool(left_rows and not drop_remainder)
        if self.batches_per_epoch == 0:
            of_ranks = f" for each of {ranks} ranks" if ranks > 1 else ""
            raise UserError(
                f"{dataset.num_rows} rows fill no batch{of_ranks}",
                key="batch_size",
                value=batch_size,
                fix="set a smaller batch_size, or drop_remainder to False",
            )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterates over the micro-batches of an epoch.

        A background thread prepares them from the first ``next`` on; it ends with the iteration, or when the iterator
        is closed. An error in it is raised here.

        Args:
            epoch: Number of the epoch, from 0.
            start: How many micro-batches to leave out without reading them.
        """
        assert 0 <= start <= self.batches_per_epoch
        return _prefetch(self._batches(epoch, start), self._prefetch_size)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = epoch_order(self._dataset.num_rows, shuffle=self._shuffle, seed=self._seed, epoch=epoch)
        for index in range(start, self.batches_per_epoch):
            first = (index * self._ranks + self._rank) * self._batch_size
            indices = order[first : first + self._batch_size]
            missing_rows = self._batch_size - len(indices)
            if not missing_rows:
                yield self._dataset.rows(indices)
            elif not len(indices):
                yield self._dataset.padding(missing_rows)
            else:
                yield concatenate(self._dataset.rows(indices), self._dataset.padding(missing_rows))


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
        except BaseException as error:  # whatever it is, the consumer must hear of it
            last = error
        if not stop.is_set():
            ready.put(last)

    # A daemon: an iterator that nobody closes must not keep the process alive.
    thread = threading.Thread(target=produce, name="batch-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        # After this the thread finds room for the one item that it may be about to put, then sees the event.
        while not ready.empty():
            try:
                ready.get_nowait()
            except queue.Empty:
                break
        if thread is not threading.current_thread():  # garbage is collected in whichever thread is at hand
            thread.join()
