"""Several data sets as one: each gives its share of the sequences of an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.batches.batch import Batch, concatenate
from trainer.data.batches.packing import DocumentCounts, PackingReport, SequenceDataset, checked_indices
from trainer.data.rng import Stream, random_order


@dataclass(frozen=True)
class SourceShare:
    """What one source gives to an epoch."""

    name: str
    weight: float | None  # None in an evaluation, which reads every sequence once
    sequences: int  # that it has
    epoch_sequences: int  # that it gives to an epoch
    epoch_passes: float  # how often an epoch reads it: `epoch_sequences` / `sequences`
    packing: PackingReport | None


class BlendedDataset:
    """The sequences of several data sets, numbered one data set after the other; a `SequenceDataset`.

    An epoch of a training has as many sequences as all data sets together, or `limit`. Of these each data set gives
    weight / sum of weights, rounded by largest remainders: those that follow in its own passes, which go on from
    epoch to epoch. So a sequence comes again only after all others of its data set.

    Args:
        names: Of the data sets.
        weights: Greater than 0; None to read each sequence once, one data set after the other, as evaluations do.
        limit: At most so many sequences in an epoch (``num_samples``); None for all.
    """

    def __init__(
        self,
        datasets: Sequence[SequenceDataset],
        names: Sequence[str],
        weights: Sequence[float] | None,
        limit: int | None = None,
    ) -> None:
        self._datasets = tuple(datasets)
        sizes = [dataset.num_sequences for dataset in datasets]
        self._starts = np.cumsum([0, *sizes])
        total = sum(sizes)
        if limit is None:
            self.num_sequences = total
        else:
            self.num_sequences = min(total, limit)
        if weights is None:
            counts = sizes
        else:
            counts = largest_remainders(weights, self.num_sequences)
        self.is_weighted = weights is not None
        self.shares = tuple(
            SourceShare(name, weight, size, count, count / size if size else 0.0, dataset.packing)
            for name, weight, size, count, dataset in zip(
                names, weights or [None] * len(sizes), sizes, counts, datasets, strict=True
            )
        )
        self.seq_length = datasets[0].seq_length
        self.num_tokens = sum(dataset.num_tokens for dataset in datasets)
        self.num_documents = sum(dataset.num_documents for dataset in datasets)
        self.max_token_id = max(dataset.max_token_id for dataset in datasets)
        parts = [f"{share.weight} {dataset.content}" for share, dataset in zip(self.shares, datasets, strict=True)]
        self.packing = _summed([dataset.packing for dataset in datasets])
        if self.packing is not None:
            told = [f"packing {self.packing.packing}"]
        else:
            told = []
        told += [f"weights {' '.join(f'{weight:g}' for weight in weights)}"] if weights is not None else []
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        self.content = f"{len(parts)} sources ({', '.join([*told, digest])})"

    def order(self, epoch: int, *, shuffle: bool, seed: int) -> np.ndarray:
        """The sequences of an epoch: int64 [num_sequences], a function of the arguments alone.

        Without `shuffle` each data set keeps its order; how they alternate comes from the seed all the same.
        """
        if not self.is_weighted:
            return np.arange(self.num_sequences)
        counts = [share.epoch_sequences for share in self.shares]
        turn = random_order(seed, Stream.ORDER, epoch, self.num_sequences)
        source_of_turn = np.repeat(np.arange(len(counts)), counts)[turn]
        order = np.empty(self.num_sequences, np.int64)
        for source, count in enumerate(counts):
            part = self._pass_slice(source, epoch * count, count, shuffle=shuffle, seed=seed)
            order[source_of_turn == source] = self._starts[source] + part
        return order

    def _pass_slice(self, source: int, first: int, count: int, *, shuffle: bool, seed: int) -> np.ndarray:
        """`count` sequences of the passes over a data set, from number `first` of all its passes on."""
        size = self.shares[source].sequences
        passes = range(first // size, -(-(first + count) // size))
        orders = [
            random_order(seed, Stream.SOURCE_ORDER, source << 32 | number, size) if shuffle else np.arange(size)
            for number in passes
        ]
        start = first - passes.start * size
        if orders:
            return np.concatenate(orders)[start : start + count]
        return np.empty(0, np.int64)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        indices_B = checked_indices(indices, int(self._starts[-1]))
        source_B = np.searchsorted(self._starts, indices_B, side="right") - 1
        found: Batch | None = None
        for source in np.unique(source_B).tolist():
            part = self._datasets[source].batch(indices_B[source_B == source] - self._starts[source])
            if found is None:
                found = part
            else:
                found = concatenate(found, part)
        place_B = np.argsort(np.argsort(source_B, kind="stable"), kind="stable")
        return Batch(*(array[place_B] for array in found))

    def padding(self, size: int) -> Batch:
        return self._datasets[0].padding(size)

    def count_documents(self) -> DocumentCounts:
        lengths, loss_tokens = zip(*(dataset.count_documents() for dataset in self._datasets), strict=True)
        return DocumentCounts(np.concatenate(lengths), sum(loss_tokens))


def largest_remainders(weights: Sequence[float], total: int) -> list[int]:
    """Divides `total` in proportion to the weights (Hamilton's method); of equal remainders the first counts."""
    quotas = [total * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda number: counts[number] - quotas[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _summed(reports: Sequence[PackingReport | None]) -> PackingReport | None:
    """The report of all together."""
    found = [report for report in reports if report is not None]
    if not found:
        return None
    sequences = sum(report.sequences for report in found)
    padded = sum(report.padding * report.sequences for report in found)
    return PackingReport(
        packing=", ".join(dict.fromkeys(report.packing for report in found)),
        samples=sum(report.samples for report in found),
        sequences=sequences,
        padding=padded / sequences if sequences else 0.0,
        truncated=sum(report.truncated for report in found),
        dropped=sum(report.dropped for report in found),
        bad_records=sum(report.bad_records for report in found),
    )
