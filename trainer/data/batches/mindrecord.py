"""Reads rows of MindRecord files as sequences: rows of T tokens with labels, or of T + 1 tokens.

Shape legend: B sequences of a micro-batch, T tokens of a sequence, W width of a row: T or T + 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.checks.problem import data_error, nearest
from trainer.data.batches.batch import IGNORE_INDEX, Batch, document_positions, find_unknown_token
from trainer.data.batches.packing import DocumentCounts, SequenceDataset, checked_indices, count_dataset_loss_tokens
from trainer.data.batches.split import DocumentSpans, hold_out
from trainer.data.source.indexed import Location
from trainer.data.source.mindrecord import MindRecordFile, list_files, open_mindrecord
from trainer.errors import RunError, UserError

if TYPE_CHECKING:
    from trainer.config import Config

_TOKENS = "input_ids"
_LABELS = "labels"
_MASK = "attention_mask"
# These are read only if input_columns names them.
_LOSS_MASK = "loss_mask"
_POSITIONS = "position_ids"
_ROLES = (_TOKENS, _LABELS, _MASK, _LOSS_MASK, _POSITIONS)
_OTHER_NAMES = {"target_ids": _LABELS}
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class RowFormat:
    """The columns of a file, and how its rows become sequences."""

    columns: dict[str, str]  # one of _ROLES, at least input_ids -> the column
    seq_length: int
    vocab_size: int
    pad: int | None  # a position whose input is this token has no loss
    eod: int | None  # the token that ends a document; None: a row is a document
    mask_is_starts: bool  # attention_mask has the position at which each token's document begins, not 1 and 0
    width: int  # W


class MindRecordDataset(SequenceDataset):
    """Rows of MindRecord files, file after file.

    Args:
        rows: The numbers of the rows that belong to the data set, int64 [sequences].
    """

    def __init__(self, files: Sequence[MindRecordFile], row_format: RowFormat, rows: np.ndarray) -> None:
        self._files = tuple(files)
        self._format = row_format
        self._rows = rows
        self._starts = np.cumsum([0, *(len(file.starts) for file in files)])
        self.num_sequences = self.num_documents = len(rows)
        self.seq_length = row_format.seq_length
        self.num_tokens = self.num_sequences * self.seq_length
        self.max_token_id = row_format.vocab_size - 1  # `batch` checks it
        # The name that the class had when the first data sets were hashed.
        described = repr(row_format).replace("RowFormat", "Reading", 1)
        digest = hashlib.sha256(f"{described} ".encode() + rows.tobytes())
        for file in files:
            for part in file.sample_bytes():
                digest.update(part)
        self.content = f"{len(files)} MindRecord files ({digest.hexdigest()[:16]})"

    def count_documents(self) -> DocumentCounts:
        return DocumentCounts(np.full(self.num_sequences, self.seq_length), count_dataset_loss_tokens(self))

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Reads the sequences with these numbers, in this order.

        Raises:
            RunError: A row is damaged, has another length, or contains a token beyond the vocabulary.
        """
        row_format = self._format
        rows_B = self._rows[checked_indices(indices, self.num_sequences)]
        read = [self._read(row) for row in rows_B.tolist()]
        columns = {role: np.stack([row[number] for row in read]) for number, role in enumerate(row_format.columns)}
        tokens_BT = columns[_TOKENS][:, : row_format.seq_length]
        labels_BT = columns.get(_LABELS, columns[_TOKENS])[:, -row_format.seq_length :]
        has_loss_BT = labels_BT != IGNORE_INDEX
        if row_format.pad is not None:
            has_loss_BT &= tokens_BT != row_format.pad
        if _LOSS_MASK in columns:
            has_loss_BT &= columns[_LOSS_MASK][:, -row_format.seq_length :] != 0
        positions_BT = np.broadcast_to(np.arange(row_format.seq_length), tokens_BT.shape)
        segments_BT = np.zeros(tokens_BT.shape, np.int64)
        if row_format.eod is not None:
            positions_BT, segments_BT = document_positions(tokens_BT, row_format.eod)
        if _POSITIONS in columns:
            positions_BT = columns[_POSITIONS][:, : row_format.seq_length]
        mask_BT = None
        if _MASK in columns:
            mask_BT = columns[_MASK][:, : row_format.seq_length]
        if mask_BT is not None and row_format.mask_is_starts:
            segments_BT[:, 1:] += np.cumsum(mask_BT[:, 1:] != mask_BT[:, :-1], axis=1)
        elif mask_BT is not None:
            is_padding_BT = mask_BT == 0
            has_loss_BT &= ~is_padding_BT
            segments_BT = np.where(is_padding_BT, segments_BT.max(axis=1, keepdims=True) + 1, segments_BT)
            tokens_BT = np.where(is_padding_BT, 0, tokens_BT)
        if unknown := find_unknown_token(tokens_BT, labels_BT, has_loss_BT, row_format.vocab_size):
            sequence, token_id = unknown
            file, number = self._place(rows_B[sequence])
            rule = f"row {number} contains token id {token_id}, but the model's vocabulary has {row_format.vocab_size}"
            fix = "set model.model_config.vocab_size to that of the tokenizer that made the file"
            raise RunError(rule, where=str(file.path), fix=fix)
        arrays = (tokens_BT, np.where(has_loss_BT, labels_BT, IGNORE_INDEX), positions_BT, segments_BT)
        return Batch(*(np.ascontiguousarray(array, np.int32) for array in arrays))

    def _place(self, row: int) -> tuple[MindRecordFile, int]:
        """Returns the file of a row, and the row's number in it."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._files[number], row - int(self._starts[number])

    def _read(self, row: int) -> list[np.ndarray]:
        file, number = self._place(row)
        row_format = self._format
        arrays = file.read(number, list(row_format.columns.values()))
        for (role, name), array in zip(row_format.columns.items(), arrays, strict=True):
            allowed = (row_format.seq_length, row_format.width)
            if role in (_TOKENS, _LABELS):
                allowed = (row_format.width,)
            rule = ""
            if len(array) not in allowed:
                rule = f"row {number} has {len(array)} elements in {name}, other rows {row_format.width}"
            elif role == _POSITIONS and (array.min() < 0 or array.max() >= len(array)):
                rule = f"{name} of row {number} has positions beyond its {len(array)} tokens"
            elif role == _MASK and not row_format.mask_is_starts and not np.isin(array, (0, 1)).all():
                rule = f"{name} of row {number} has other values than 0 and 1"
            if rule:
                fix = "make the file again; a mask of where documents begin needs model_config.eod_reset: true"
                raise RunError(rule, where=str(file.path), fix=fix)
        return arrays


def build_mindrecord(config: Config, section: str) -> tuple[MindRecordDataset, MindRecordDataset | None]:
    """Builds the data set of a section's MindDataset, and the data set of its held-out rows (or None).

    Raises:
        UserError: No files are named, or one of them is missing or damaged. Or a column is missing or has no tokens, or
            the rows do not have the length of the model's sequences.
    """
    settings = getattr(config, section)
    location, names = _find_names(config, section)
    is_listed = isinstance(settings.data_loader.dataset_files, list)
    paths = [path for name in names for path in _paths(name, location, is_listed)]
    files = [open_mindrecord(path, location) for path in paths]
    columns = _columns(config, section, files, location)
    eod = None
    if settings.eod_reset:
        eod = _eod(config, section)
    width = _width(config, files[0], columns)
    sizes = config.decoder
    row_format = RowFormat(columns, sizes.seq_length, sizes.vocab_size, sizes.pad_token_id, eod, sizes.eod_reset, width)
    total = sum(len(file.starts) for file in files)
    rows = np.arange(total)
    held_out = None
    if section == "train_dataset" and settings.held_out:
        if total < 2:
            raise data_error(config, f"{section}.held_out", "the files have only one row", "remove it")
        train, evaluated = hold_out(DocumentSpans(rows, np.ones(total, np.int64)), settings.held_out, config.seed)
        rows = train.starts
        held_out = MindRecordDataset(files, row_format, evaluated.starts)
    dataset = MindRecordDataset(files, row_format, rows[: settings.data_loader.num_samples])
    _check_rows(location, dataset, files[0], row_format)
    return dataset, held_out


def _find_names(config: Config, section: str) -> tuple[Location, list[str]]:
    loader = getattr(config, section).data_loader
    prefix = f"{section}.data_loader"
    named = loader.dataset_files
    if loader.dataset_dir and named:
        raise data_error(config, f"{prefix}.dataset_files", "dataset_dir names files too", "remove one")
    key = f"{prefix}.dataset_dir"
    names = [loader.dataset_dir]
    if named:
        key = f"{prefix}.dataset_files"
        names = list(named)
    if isinstance(named, str):
        names = [named]
    if not all(names):
        fix = "set dataset_dir to a MindRecord file or a folder of them"
        raise data_error(config, key, "MindDataset needs a file or a folder", fix)
    return Location(config.source.name(key), config.source.where(key)), names


def _paths(name: str, location: Location, is_listed: bool) -> list[Path]:
    """Lists the files of a name. A file stands for all files written with it; in a list it stands for itself."""
    path = Path(name).expanduser()
    if is_listed and not path.is_dir():
        return [path]
    return list_files(path, location)


def column_roles(names: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Returns what each of input_columns means, by construct_args_key as far as it goes, else by its name."""
    written = [*keys[: len(names)], *names[len(keys) :]]
    return [_OTHER_NAMES.get(role, role) for role in written]


def _columns(config: Config, section: str, files: Sequence[MindRecordFile], location: Location) -> dict[str, str]:
    """Finds the columns of tokens, labels and masks: those of input_columns, or all with the usual names."""
    settings = getattr(config, section)
    key = f"{section}.input_columns"
    first = files[0]
    names = settings.input_columns
    keys = settings.construct_args_key or []
    if not names:
        names = [name for name in first.types if _OTHER_NAMES.get(name, name) in (_TOKENS, _LABELS, _MASK)]
        keys = []
    roles: dict[str, str] = {}
    for name, role in zip(names, column_roles(names, keys), strict=True):
        if role not in _ROLES:
            known = f"{_TOKENS}, {_LABELS} (or target_ids), {_MASK}, {_LOSS_MASK} and {_POSITIONS}"
            guess = nearest(role, _ROLES)
            fix = "leave it out"
            if guess:
                fix = f"you probably mean {guess}"
            raise data_error(config, key, f"{role} is none of the columns that are read: {known}", fix)
        if role in roles:
            raise data_error(config, key, f"{roles[role]} and {name} are both {role}", "name one of them")
        roles[role] = name
    if _TOKENS not in roles:
        available = ", ".join(first.types)
        if settings.input_columns:
            raise data_error(config, key, f"it does not name {_TOKENS}", f"write its name first; columns: {available}")
        rule = f"{first.path.name} has no column {_TOKENS}: its columns are {available}"
        raise UserError(rule, where=location.where, key=location.key, value=str(first.path),
                        fix=f"name the column of tokens in {key}")
    for file in files:
        for name in roles.values():
            if name not in file.types:
                rule = f"{file.path.name} has no column {name}: its columns are {', '.join(file.types)}"
                raise data_error(config, key, rule, "name columns of the file")
            if name not in file.arrays or file.types[name] not in ("int32", "int64"):
                rule = f"column {name} of {file.path.name} holds {file.types[name]}, not arrays of int32 or int64"
                raise data_error(config, key, rule, "name other columns")
    return roles


def _eod(config: Config, section: str) -> int:
    """Returns the token that ends a document: eod_token_id of the section, or the model's end token."""
    token_id = getattr(config, section).eod_token_id
    if token_id is None:
        token_id = config.decoder.eos_token_id
    if isinstance(token_id, list):
        token_id = token_id[0]
    if token_id is None:
        rule = "documents are separated at the token that ends one, and no such token is set"
        raise data_error(config, f"{section}.eod_reset", rule, f"set {section}.eod_token_id to it")
    return token_id


def _width(config: Config, file: MindRecordFile, columns: dict[str, str]) -> int:
    """Returns the number of tokens in the first row, which must fit the model's sequences."""
    key = "model.model_config.seq_length"
    length = config.decoder.seq_length
    width = len(file.read(0, [columns[_TOKENS]])[0])
    if width == length + 1 or (width == length and _LABELS in columns):
        return width
    rule = f"the rows of {file.path.name} have {width} tokens, and a sequence needs {length + 1}"
    if width != length:
        rule += f", or {length} with labels that are the next tokens"
    fix = f"set it to {width - 1}"
    if _LABELS in columns:
        fix += f", or to {width}"
    raise data_error(config, key, rule, fix)


def _check_rows(location: Location, dataset: MindRecordDataset, file: MindRecordFile, row_format: RowFormat) -> None:
    """Reads some rows as a run does, and raises an error if the labels are not shifted."""
    last = dataset.num_sequences - 1
    try:
        batch = dataset.batch(sorted({last * number // (_CHECKED_ROWS - 1) for number in range(_CHECKED_ROWS)}))
    except RunError as error:
        raise UserError(error.rule, where=location.where, key=location.key, value=error.where, fix=error.fix) from None
    same = (batch.labels == batch.input_ids) | (batch.labels == IGNORE_INDEX)
    length = row_format.seq_length
    if row_format.width == length > 1 and same.all() and (batch.labels != IGNORE_INDEX).any():
        rule = f"the labels in {file.path.name} are the input tokens themselves, not the next ones"
        fix = f"make rows of {length + 1} tokens, whose labels are shifted here, or shift the labels"
        raise UserError(rule, where=location.where, key=location.key, value=str(file.path), fix=fix)
