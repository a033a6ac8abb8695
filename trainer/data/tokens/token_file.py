"""Writes and reads token files: a tokenized corpus on disk, written once as a stream and then memory-mapped.

A token file is a folder of the cache, named by a hash of content and settings::

    tokens.bin    uint16 or uint32 (by the tokenizer's vocabulary), all documents one after the other
    offsets.bin   int64 [documents + 1], where each document starts, and the end of the last
    mask.bin      uint8, 1 where a token carries loss; only if some token carries none
    values.bin    float32 [documents], the label, margin or weight of each; only if some is not 0
    pages.bin     the checksum of each page of tokens.bin, then of each page of mask.bin
    meta.json     counts, sizes and checksums of the files; tokenizer and source

It is written under a temporary name and renamed when it is complete and on disk. So a build that is killed leaves
nothing that looks like a token file. If two builds run at once, the first wins and the second uses its file.

Tokens may take many gigabytes, and a rank reads only some of them: each page is checked when it is first read. The
other files are read, and checked, when a token file is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from trainer.data.source.files import DataSource, no_text_error
from trainer.data.source.samples import SkippedRecords
from trainer.data.tokens.encode import Encoded
from trainer.data.tokens.tokenizer import Tokenizer
from trainer.errors import RunError, UserError
from trainer.input_files import read_bytes, replace_surrogates
from trainer.storage.checksums import (
    DIGEST_BYTES,
    DIGEST_PATTERN,
    PageChecks,
    checksum_of_bytes,
    checksum_of_file,
    flush_to_disk,
    page_digests,
)
from trainer.storage.json_files import Count, JsonError, StrictModel, parse_json

FORMAT_VERSION: Literal[2] = 2
_MASK_CHUNK = 4 << 20
_ABANDONED_SECONDS = 3600.0
_TEMPORARY = ".building-"
# Other processes may build the same file at the same time.
_ATTEMPTS = 10
_WAIT_SECONDS = 0.05
_PAGED = ("tokens.bin", "mask.bin")
_PAGES = "pages.bin"
_VALUES = "values.bin"
_META = "meta.json"
_STREAMS = ("tokens.bin", "offsets.bin", "mask.bin", _VALUES)
_COUNTS = ("num_tokens", "num_documents", "num_conversations", "num_rendered", "num_loss_tokens")

Progress = Callable[[int, int], None]
"""Takes the bytes of the source that are done, and all of its bytes."""


class TokenCache(NamedTuple):
    """The folder of token files, and the key and location that set it."""

    path: Path
    key: str
    where: str


class TokenFileMeta(StrictModel):
    """The content of ``meta.json``."""

    format_version: Literal[2]
    num_tokens: Annotated[Count, Field(ge=1)]
    num_documents: Count
    num_conversations: Count  # documents with a prompt: conversations, instructions, prompts with completions
    num_rendered: Count  # how many of these the chat template rendered
    num_loss_tokens: Count
    num_skipped: Count  # bad records that were left out
    first_skipped: str  # the error of the first bad record
    max_token_id: Count
    dtype: Literal["uint16", "uint32"]
    has_mask: bool
    tokenizer: str
    source: str
    file_bytes: dict[str, Count]
    checksums: dict[str, Annotated[str, Field(pattern=DIGEST_PATTERN)]] = {}
    """Of offsets.bin, values.bin, pages.bin and this file without its checksums; empty while it is written."""

    def compute_checksum(self) -> str:
        """Computes the checksum of this file without its checksums."""
        return checksum_of_bytes(self.model_dump_json(exclude={"checksums"}).encode())

    def expected_bytes(self) -> dict[str, int]:
        """Computes the sizes of the files from the counts."""
        token_bytes = self.num_tokens * np.dtype(self.dtype).itemsize
        sizes = {"tokens.bin": token_bytes, "offsets.bin": 8 * (self.num_documents + 1)}
        if self.has_mask:
            sizes["mask.bin"] = self.num_tokens
        if _VALUES in self.file_bytes:
            sizes[_VALUES] = 4 * self.num_documents
        pages = sum(PageChecks.count_pages(sizes[name]) for name in _PAGED if name in sizes)
        return sizes | {_PAGES: pages * DIGEST_BYTES}


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped token file."""

    path: Path
    meta: TokenFileMeta
    tokens: np.ndarray  # uint16 or uint32 [num_tokens]
    offsets: np.ndarray  # int64 [num_documents + 1]
    mask: np.ndarray | None  # uint8 [num_tokens], or None when every token carries loss
    checks: dict[str, PageChecks]  # for tokens.bin and mask.bin
    values: np.ndarray | None = None  # float32 [num_documents], or None when all are 0

    def check(self, starts: np.ndarray, lengths: np.ndarray, names: Iterable[str] = ("tokens.bin", "mask.bin")) -> None:
        """Checks ranges of tokens that are about to be read.

        Raises:
            UserError: They differ from what was written. It is not a RunError, since a restart of the job cannot help.
        """
        for name in names:
            if name not in self.checks:
                continue
            item_bytes = 1
            if name == "tokens.bin":
                item_bytes = self.tokens.itemsize
            damaged = self.checks[name].first_damaged_byte(starts * item_bytes, (starts + lengths) * item_bytes)
            if damaged is not None:
                rule = f"the token file is damaged: {name} differs from what was written, from byte {damaged:,} on"
                raise UserError(rule, where=str(self.path), fix="remove this folder: the next run builds it again")


class DamagedTokenFile(ValueError):
    """A token file is missing or damaged; the message names the file in it."""


def open_token_file(path: Path) -> TokenFile | None:
    """Opens a token file; returns None if it is missing, damaged, unreadable or of another format."""
    try:
        return checked_token_file(path)
    except DamagedTokenFile:
        return None


def checked_token_file(path: Path, every_page: bool = False) -> TokenFile:
    """Opens a token file and checks it.

    Args:
        every_page: Whether to check all tokens now; otherwise each page is checked when it is first read.

    Raises:
        DamagedTokenFile: The token file is missing or damaged.
    """
    meta = _read_meta(path)
    dtypes = {"tokens.bin": np.dtype(meta.dtype), "offsets.bin": np.dtype(np.int64), _VALUES: np.dtype(np.float32)}
    arrays = {}
    for name in meta.file_bytes:
        try:
            arrays[name] = np.asarray(np.memmap(path / name, dtypes.get(name, np.dtype(np.uint8)), mode="r"))
        except (OSError, ValueError) as error:
            raise DamagedTokenFile(f"{name} cannot be read ({error})") from None
    for name in arrays.keys() & {"offsets.bin", _VALUES, _PAGES}:
        try:
            checksum = checksum_of_file(path / name)
        except OSError as error:
            raise DamagedTokenFile(f"{name} cannot be read ({error.strerror})") from None
        if checksum != meta.checksums.get(name):
            raise DamagedTokenFile(f"the checksum of {name} does not match {_META}")
    offsets = arrays["offsets.bin"]
    if offsets[0] != 0 or offsets[-1] != meta.num_tokens or (np.diff(offsets) <= 0).any():
        raise DamagedTokenFile("offsets.bin does not contain the offsets of documents")
    digests = arrays[_PAGES].reshape(-1, DIGEST_BYTES)
    paged = [name for name in _PAGED if name in arrays]
    ends = np.cumsum([PageChecks.count_pages(arrays[name].nbytes) for name in paged])
    parts = zip(paged, np.split(digests, ends[:-1]), strict=True)
    checks = {name: PageChecks(arrays[name].view(np.uint8), part) for name, part in parts}
    token_file = TokenFile(
        path, meta, arrays["tokens.bin"], offsets, arrays.get("mask.bin"), checks, arrays.get(_VALUES)
    )
    if every_page:
        try:
            token_file.check(np.array([0]), np.array([meta.num_tokens]))
        except UserError as error:
            raise DamagedTokenFile(error.rule.partition(": ")[2]) from None
    return token_file


def is_token_file(path: Path) -> bool:
    """Checks whether a folder is a token file, intact or damaged."""
    return (path / _META).is_file() and (path / "offsets.bin").exists()


def _read_meta(path: Path) -> TokenFileMeta:
    """Reads ``meta.json`` and checks it against the sizes on disk; raises DamagedTokenFile if anything disagrees."""
    try:
        meta: TokenFileMeta = parse_json(read_bytes(path / _META), TokenFileMeta, _META)
        sizes = {name: (path / name).stat().st_size for name in meta.expected_bytes()}
    except JsonError as error:
        raise DamagedTokenFile(str(error)) from None
    except OSError as error:
        name = Path(error.filename or _META).name
        raise DamagedTokenFile(f"{name} cannot be read ({error.strerror})") from None
    if meta.checksums.get(_META) != meta.compute_checksum():
        raise DamagedTokenFile(f"{_META} was modified: its checksum does not match its content")
    for name, size in meta.expected_bytes().items():
        if sizes[name] != size or meta.file_bytes.get(name) != size:
            raise DamagedTokenFile(f"{name} has {sizes[name]:,} bytes, not {size:,}")
    if meta.file_bytes.keys() != sizes.keys():
        raise DamagedTokenFile(f"{_META} lists unexpected files in file_bytes")
    return meta


def build_token_file(
    cache: TokenCache, name: str, encoded: Iterable[Encoded], tokenizer: Tokenizer, *, source: DataSource,
    skipped: SkippedRecords, progress: Progress | None = None,
) -> TokenFile:  # fmt: skip
    """Writes a token file from a stream of encoded documents, with one group of them in memory at a time.

    Args:
        name: The folder to make. An existing one is used if it is intact and replaced if it is damaged.
        encoded: The corpus.
        source: The origin of the corpus, for messages and progress.
        skipped: The bad records that `encoded` leaves out.
        progress: Called after every group of documents.

    Raises:
        UserError: The corpus contains no text, or the cache folder cannot be written.
        RunError: The disk is full or fails.
    """
    temporary = _temporary_name(cache.path)
    path = cache.path / name
    try:
        temporary.mkdir(parents=True)
        _remove_abandoned(cache.path)
    except OSError as error:
        rule = f"the folder for token files cannot be written ({error.strerror})"
        fix = f"set {cache.key} to a folder that you can write"
        raise UserError(rule, where=cache.where, key=cache.key, value=str(cache.path), fix=fix) from None
    done_bytes = 0
    source_bytes = source.size_bytes
    try:
        with _Writer(temporary, tokenizer) as writer:
            for group in encoded:
                writer.add(group)
                done_bytes += group.source_bytes
                if progress is not None:
                    progress(min(done_bytes, source_bytes), source_bytes)
            writer.finish(source, skipped)
        _publish(temporary, path)
    except OSError as error:
        raise _failed_write(cache, error, temporary, done_bytes, source_bytes) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    token_file = _open_published(path)
    if token_file is None:
        fix = f"check whether another process cleans this folder, or set {cache.key} to another one"
        raise RunError("the token file was damaged or removed right after it was written", where=str(path), fix=fix)
    return token_file


def _failed_write(cache: TokenCache, error: OSError, temporary: Path, done_bytes: int, source_bytes: int) -> RunError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        rule = f"a token file could not be written ({error.strerror})"
        return RunError(rule, where=str(cache.path), fix=f"set {cache.key} to a folder on a disk that works")
    written_bytes = sum(file.stat().st_size for file in temporary.glob("*"))
    needed_bytes = source_bytes * 2
    if done_bytes:
        needed_bytes = int(written_bytes * source_bytes / done_bytes)
    free_bytes = shutil.disk_usage(cache.path).free + written_bytes
    rule = f"the disk is full: the token file needs about {needed_bytes} bytes, {free_bytes} are free"
    return RunError(rule, where=str(cache.path), fix=f"free some space, or set {cache.key} to a folder on another disk")


class _Writer:
    """Appends encoded documents to the files of one folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype: Literal["uint16", "uint32"] = "uint32"
        if tokenizer.vocab_size <= 1 << 16:
            self._dtype = "uint16"
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        self._max_token_id = 0
        self._has_mask = False
        self._has_values = False

    def __enter__(self) -> _Writer:
        self._streams = {name: open(self._folder / name, "wb") for name in _STREAMS}
        self._streams["offsets.bin"].write(np.zeros(1, np.int64).tobytes())
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()

    def add(self, group: Encoded) -> None:
        """Appends documents."""
        tokens = group.tokens.astype(self._dtype, casting="same_kind", copy=False)
        offsets = self._counts["num_tokens"] + group.ends
        self._write_mask(len(tokens), group.has_loss)
        self._streams["tokens.bin"].write(np.ascontiguousarray(tokens).data)
        self._streams["offsets.bin"].write(offsets.data)
        values = group.values
        if values is None:
            values = np.zeros(len(offsets), np.float32)
        self._has_values = self._has_values or bool(values.any())
        self._streams[_VALUES].write(values.data)
        loss_tokens = len(tokens)
        if group.has_loss is not None:
            loss_tokens = int(group.has_loss.sum())
        added = (len(tokens), len(offsets), group.num_conversations, group.num_rendered, loss_tokens)
        for name, count in zip(_COUNTS, added, strict=True):
            self._counts[name] += count
        self._max_token_id = max(self._max_token_id, int(tokens.max(initial=0)))

    def _write_mask(self, num_tokens: int, has_loss: np.ndarray | None) -> None:
        """Appends to the mask from the first token without loss on; most corpora need no mask."""
        if not self._has_mask and (has_loss is None or has_loss.all()):
            return
        if not self._has_mask:
            self._has_mask = True
            self._write_ones(self._counts["num_tokens"])
        if has_loss is None:
            self._write_ones(num_tokens)
        else:
            self._streams["mask.bin"].write(has_loss.astype(np.uint8).data)

    def _write_ones(self, count: int) -> None:
        ones = np.ones(min(count, _MASK_CHUNK), np.uint8)
        for start in range(0, count, _MASK_CHUNK):
            self._streams["mask.bin"].write(ones[: count - start].data)

    def finish(self, source: DataSource, skipped: SkippedRecords) -> None:
        """Flushes everything to disk, ``meta.json`` last.

        Raises:
            UserError: The corpus contains no text.
        """
        if self._counts["num_documents"] == 0:
            raise no_text_error(source, skipped.num_skipped, str(skipped.first or ""))
        for name, is_needed in (("mask.bin", self._has_mask), (_VALUES, self._has_values)):
            if not is_needed:
                self._streams.pop(name).close()
                (self._folder / name).unlink()
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        file_bytes = {name: stream.tell() for name, stream in self._streams.items()}
        pages = self._folder / _PAGES
        with pages.open("wb") as stream:
            for name in _PAGED:
                if name in file_bytes:
                    stream.writelines(page_digests(self._folder / name))
            file_bytes[_PAGES] = stream.tell()
            stream.flush()
            os.fsync(stream.fileno())
        meta = TokenFileMeta(
            format_version=FORMAT_VERSION,
            **self._counts,
            num_skipped=skipped.num_skipped,
            first_skipped=replace_surrogates(str(skipped.first or "")),
            max_token_id=self._max_token_id,
            dtype=self._dtype,
            has_mask=self._has_mask,
            tokenizer=self._tokenizer.fingerprint,
            source=replace_surrogates(source.name),
            file_bytes=file_bytes,
        )
        summed = file_bytes.keys() & {"offsets.bin", _VALUES, _PAGES}
        checksums = {name: checksum_of_file(self._folder / name) for name in sorted(summed)}
        meta = meta.model_copy(update={"checksums": checksums | {_META: meta.compute_checksum()}})
        with open(self._folder / _META, "w", encoding="utf-8") as stream:
            stream.write(meta.model_dump_json(indent=1))
            stream.flush()
            os.fsync(stream.fileno())
        flush_to_disk(self._folder)


def _publish(temporary: Path, path: Path) -> None:
    """Renames a finished folder into place; keeps another builder's complete file and replaces a damaged one."""
    for _ in range(_ATTEMPTS):
        try:
            os.rename(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if open_token_file(path) is not None:
                return
            _discard(path)
            continue
        flush_to_disk(path.parent)
        return


def _open_published(path: Path) -> TokenFile | None:
    """Opens a token file that this or another process has published; returns None if it does not exist.

    Another builder may have moved it away, as the damaged file that it replaces, and then puts it back.
    """
    for _ in range(_ATTEMPTS):
        token_file = open_token_file(path)
        if token_file is not None:
            return token_file
        time.sleep(_WAIT_SECONDS)
    return None


def _discard(path: Path) -> None:
    """Removes a damaged file atomically, so that no process sees half of it.

    If another process has replaced it by an intact file in the meantime, that file is put back.
    """
    aside = _temporary_name(path.parent)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if open_token_file(aside) is not None:
        with contextlib.suppress(OSError):  # a third process has put a file there
            os.rename(aside, path)
            return
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)


def _temporary_name(folder: Path) -> Path:
    return folder / f"{_TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _remove_abandoned(cache: Path) -> None:
    """Removes the temporary folders of killed builds, which have not changed for an hour."""
    for folder in cache.glob(f"{_TEMPORARY}*"):
        try:
            written = max(path.stat().st_mtime for path in (folder, *folder.glob("*")))
        except OSError:
            continue  # its builder has just finished
        if time.time() - written > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
