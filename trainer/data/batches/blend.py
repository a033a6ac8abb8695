"""Blends several data sets into one by weights."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.batches.batch import AnyBatch, concatenate
from trainer.data.batches.packing import DocumentCounts, PackingReport, RecordWeights, SequenceDataset, checked_indices
from trainer.data.rng import Stream, random_order


@dataclass(frozen=True)
class SourceShare:
    """The share of one source in an epoch."""

    name: str
    weight: float | None  # None in an evaluation, which reads every sequence once
    sequences: int  # all sequences of the source
    epoch_sequences: int  # the sequences that an epoch reads from it
    epoch_passes: float  # how often an epoch reads the source: `epoch_sequences` / `sequences`
    packing: PackingReport | None


class BlendedDataset:
    """The sequences of several data sets, numbered one data set after the other; a `SequenceDataset`.

    An epoch of a training has as many sequences as all data sets together, or `limit`. Each data set contributes the
    fraction weight / sum of weights, rounded by largest remainders. Its passes continue from epoch to epoch, so a
    sequence is repeated only after all other sequences of its data set.

    Args:
        names: The names of the data sets.
        weights: Greater than 0; None to read each sequence once, one data set after the other, as evaluations do.
        limit: The most sequences in an epoch (``num_samples``); None for all.
    """

    def __init__(
        self, datasets: Sequence[SequenceDataset], names: Sequence[str], weights: Sequence[float] | None,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        self._datasets = tuple(datasets)
        sizes = [dataset.num_sequences for dataset in datasets]
        self._starts = np.cumsum([0, *sizes])
        total = sum(sizes)
        self.num_sequences = total
        if limit is not None:
            self.num_sequences = min(total, limit)
        counts = sizes
        share_weights: list[float | None] = [None] * len(sizes)
        if weights is not None:
            counts = largest_remainders(weights, self.num_sequences)
            share_weights = list(weights)
        self.is_weighted = weights is not None
        self.record_form = ""
        shares = []
        for name, weight, size, count, dataset in zip(names, share_weights, sizes, counts, datasets, strict=True):
            passes = 0.0
            if size:
                passes = count / size
            shares.append(SourceShare(name, weight, size, count, passes, dataset.packing))
        self.shares = tuple(shares)
        self.seq_length = datasets[0].seq_length
        self.num_tokens = sum(dataset.num_tokens for dataset in datasets)
        self.num_documents = sum(dataset.num_documents for dataset in datasets)
        self.max_token_id = max(dataset.max_token_id for dataset in datasets)
        parts = [f"{share.weight} {dataset.content}" for share, dataset in zip(self.shares, datasets, strict=True)]
        self.packing = _sum_reports([dataset.packing for dataset in datasets])
        description = []
        if self.packing is not None:
            description.append(f"packing {self.packing.packing}")
        if weights is not None:
            description.append(f"weights {' '.join(f'{weight:g}' for weight in weights)}")
        description.append(hashlib.sha256(repr(parts).encode()).hexdigest()[:16])
        self.content = f"{len(parts)} sources ({', '.join(description)})"

    def order(self, epoch: int, *, shuffle: bool, seed: int) -> np.ndarray:
        """Returns the sequences of an epoch: int64 [num_sequences], a function of the arguments alone.

        Without `shuffle` each data set keeps its order; the seed still decides how the data sets alternate.
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
        """Returns `count` sequences of a data set, from number `first` of its consecutive passes on."""
        size = self.shares[source].sequences
        passes = range(first // size, -(-(first + count) // size))
        if shuffle:
            orders = [random_order(seed, Stream.SOURCE_ORDER, source << 32 | number, size) for number in passes]
        else:
            orders = [np.arange(size)] * len(passes)
        start = first - passes.start * size
        if orders:
            return np.concatenate(orders)[start : start + count]
        return np.empty(0, np.int64)

    def batch(self, indices: Sequence[int] | np.ndarray) -> AnyBatch:
        indices_B = checked_indices(indices, int(self._starts[-1]))
        source_B = np.searchsorted(self._starts, indices_B, side="right") - 1
        parts = [
            self._datasets[source].batch(indices_B[source_B == source] - self._starts[source])
            for source in np.unique(source_B).tolist()
        ]
        by_source = functools.reduce(concatenate, parts)
        place_B = np.argsort(np.argsort(source_B, kind="stable"), kind="stable")
        return type(by_source)(*(array[place_B] for array in by_source))

    def padding(self, size: int) -> AnyBatch:
        return self._datasets[0].padding(size)

    def count_documents(self) -> DocumentCounts:
        lengths, loss_tokens = zip(*(dataset.count_documents() for dataset in self._datasets), strict=True)
        return DocumentCounts(np.concatenate(lengths), sum(loss_tokens))


def largest_remainders(weights: Sequence[float], total: int) -> list[int]:
    """Divides `total` in proportion to the weights (Hamilton's method); among equal remainders the first wins."""
    quotas = [total * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda number: counts[number] - quotas[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _sum_reports(reports: Sequence[PackingReport | None]) -> PackingReport | None:
    """Combines the packing reports of several data sets; returns None if there are none."""
    packed = [report for report in reports if report is not None]
    if not packed:
        return None
    sequences = sum(report.sequences for report in packed)
    padding = 0.0
    if sequences:
        padding = sum(report.padding * report.sequences for report in packed) / sequences
    return PackingReport(
        packing=", ".join(dict.fromkeys(report.packing for report in packed)),
        samples=sum(report.samples for report in packed),
        sequences=sequences,
        padding=padding,
        truncated=sum(report.truncated for report in packed),
        dropped=sum(report.dropped for report in packed),
        bad_records=sum(report.bad_records for report in packed),
        weights=_join_weights([report.weights for report in packed if report.weights is not None]),
    )


def _join_weights(parts: Sequence[RecordWeights]) -> RecordWeights | None:
    """Combines the weights of the records of several data sets; returns None if there are none."""
    if not parts:
        return None
    records = sum(part.records for part in parts)
    return RecordWeights(
        least=min(part.least for part in parts),
        most=max(part.most for part in parts),
        mean=sum(part.mean * part.records for part in parts) / records,
        zeros=sum(part.zeros for part in parts),
        records=records,
    )
