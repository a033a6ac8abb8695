"""Log-probabilities of the answers before a training, which its loss of preferences compares with.

They are computed once, with the weights that the training begins with, and kept beside the token files. The name of
their file is a hash of all numbers that they depend on: weights, tokens, labels and the settings of the model. So a
file is never out of date.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.batches.batch import PairBatch, concatenate
from trainer.data.batches.loader import BatchLoader, stored_sequences
from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.parallel.communicator import Communicator
from trainer.storage.quantized import FrozenMatrix

if TYPE_CHECKING:
    from mindspore import Parameter

_FORMAT = "run_trainer reference 1"
_DIGEST_BYTES = 32
_HASHED_SEQUENCES = 256


def digest_of_weights(parameters: Mapping[str, Parameter | FrozenMatrix]) -> str:
    """Computes the SHA-256 of names, shapes and values of the parameters of a model."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        parameter = parameters[name]
        if not isinstance(parameter, FrozenMatrix):
            parameter = parameter.asnumpy()
        array = np.ascontiguousarray(parameter)
        digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def attach_reference(
    model: Callable[[Any], Any], build_inputs: Callable[[Any], Any], loader: BatchLoader, weights: str, folder: Path,
    communicator: Communicator, on_batch: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Sets the log-probabilities of the sequences of a loader: those of the file, or new ones, which the ranks share.

    Args:
        weights: Identifies the weights of the model, and its settings.
        folder: The folder of the file.
        on_batch: Called with (batches done, all batches of this rank) while they are computed.

    Raises:
        UserError: The folder cannot be written.
    """
    sequences = stored_sequences(loader.dataset)
    documents, data = _describe_data(loader, sequences)
    key = hashlib.sha256("\n".join([_FORMAT, weights, data]).encode()).hexdigest()
    path = folder / f"reference-{key[:32]}.bin"
    stored = _read(path, (sequences, documents))
    # All ranks compute together, or none does.
    if communicator.any(stored is None):
        stored = _compute(model, build_inputs, loader, (sequences, documents), communicator, on_batch)
        if communicator.rank == 0:
            _write(path, stored)
    loader.reference = stored


def _describe_data(loader: BatchLoader, sequences: int) -> tuple[int, str]:
    """Returns the most documents of a sequence, and a hash of all sequences."""
    digest = hashlib.sha256()
    documents = 2
    for first in range(0, sequences, _HASHED_SEQUENCES):
        batch = loader.dataset.batch(range(first, min(first + _HASHED_SEQUENCES, sequences)))
        documents = max(documents, int(batch.segment_ids.max()) // 2 * 2 + 2)
        for array in batch:
            digest.update(f"{list(array.shape)}".encode())
            digest.update(array.tobytes())
    return documents, digest.hexdigest()


def _compute(
    model: Callable[[Any], Any], build_inputs: Callable[[Any], Any], loader: BatchLoader, shape: tuple[int, int],
    communicator: Communicator, on_batch: Callable[[int, int], None],
) -> np.ndarray:  # fmt: skip
    """Computes the log-probabilities of all documents; each rank has every n-th batch."""
    sequences, documents = shape
    size = loader.batch_size
    log_probs = np.zeros(shape)
    starts = range(communicator.rank * size, sequences, communicator.size * size)
    on_batch(0, len(starts))
    for done, first in enumerate(starts, start=1):
        end = min(first + size, sequences)
        batch = loader.dataset.batch(range(first, end))
        if missing := first + size - end:
            batch = concatenate(batch, loader.dataset.padding(missing))
        assert isinstance(batch, PairBatch)
        inputs = build_inputs(batch._replace(reference=np.zeros((size, documents))))
        model(inputs)
        found_BD = inputs.pairs.log_probs_A.reshape(size, -1)[: end - first]
        log_probs[first:end, : found_BD.shape[1]] = found_BD[:, :documents]
        on_batch(done, len(starts))
    [summed] = communicator.all_reduce([log_probs])
    return np.asarray(summed).reshape(shape)


def _read(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Reads a file; returns None if it is missing or damaged, so that it is written again."""
    try:
        content = read_bytes(path)
    except OSError:
        return None
    numbers = content[_DIGEST_BYTES:]
    is_whole = len(numbers) == 8 * shape[0] * shape[1]
    if not is_whole or hashlib.sha256(numbers).digest() != content[:_DIGEST_BYTES]:
        return None
    return np.frombuffer(numbers).reshape(shape)


def _write(path: Path, log_probs: np.ndarray) -> None:
    numbers = np.ascontiguousarray(log_probs, np.float64).tobytes()
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(numbers).digest() + numbers)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        rule = f"the log-probabilities before the training cannot be written ({error.strerror})"
        fix = "set train_dataset.cache_dir to a folder that you can write"
        raise UserError(rule, key="train_dataset.cache_dir", value=str(path.parent), fix=fix) from None
