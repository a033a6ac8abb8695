"""Finds the token file of a data set in the cache, or builds it.

The name of a token file is a hash of the source's content and of the settings of tokenizer and chat template. Computing
it reads all text. So a stamp file stores the name under the source's metadata (paths, sizes, times, inodes), and the
next run reads no text.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.data.source import files as sources
from trainer.data.source.documents import read_text_chunks
from trainer.data.source.files import DataSource
from trainer.data.source.records import raise_error
from trainer.data.source.samples import SkippedRecords, read_samples
from trainer.data.tokens.chat_template import ASSISTANT, ChatTemplate, chatml
from trainer.data.tokens.encode import Encoded, encode_samples, encode_text_chunks
from trainer.data.tokens.token_file import (
    FORMAT_VERSION,
    Progress,
    TokenCache,
    TokenFile,
    build_token_file,
    open_token_file,
)
from trainer.data.tokens.tokenizer import Tokenizer
from trainer.errors import RunError
from trainer.input_files import read_bytes

# Size of the chunks of a long document: it limits memory and lets a tokenizer's threads share the work.
CHUNK_BYTES = 1 << 18
# Size of the text that is encoded in one call.
GROUP_BYTES = 4 << 20

OnNote = Callable[[str], None]
"""Takes a sentence for the user."""


class _TokenizationSettings(NamedTuple):
    """How a source becomes tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # only for a source of records
    train_on: str
    chunk_bytes: int
    group_bytes: int

    @property
    def settings(self) -> str:
        """Returns everything that decides which tokens a text becomes, as a string to hash."""
        lines = [str(FORMAT_VERSION), self.tokenizer.fingerprint]
        if self.template is not None:
            lines += [self.template.fingerprint, self.train_on]
        return "\n".join([*lines, str(self.chunk_bytes), ""])


def find_token_file(
    source: DataSource, tokenizer: Tokenizer, cache: TokenCache, *, template: ChatTemplate | None = None,
    train_on: str = ASSISTANT, progress: Progress | None = None, note: OnNote | None = None,
    chunk_bytes: int = CHUNK_BYTES, group_bytes: int = GROUP_BYTES,
) -> TokenFile:  # fmt: skip
    """Opens the token file of a source; builds it first if it is missing in the cache or damaged.

    Args:
        template: The chat template of conversations; None for ChatML.
        train_on: The turns of a conversation that carry loss.
        progress: Called during a build with (bytes done, bytes of the source).
        note: Called with a sentence when a damaged file is rebuilt, and when records are skipped.
        chunk_bytes: The most bytes of a chunk of a text file.
        group_bytes: The bytes of text that are encoded in one call.

    Raises:
        UserError: The source is not text, is empty or cannot be read, a record is bad, the template refuses a
            conversation, or the cache cannot be written.
        RunError: The disk is full, or the source changes while it is read.
    """
    if source.kind == sources.RECORDS:
        template = template or chatml(tokenizer)
    else:
        template = None
    tokenization = _TokenizationSettings(tokenizer, template, train_on, chunk_bytes, group_bytes)
    token_file = _find(source, tokenization, cache, progress, note)
    if note is not None and token_file.meta.num_skipped:
        count = token_file.meta.num_skipped
        first = token_file.meta.first_skipped.split("\n")[0]
        skipped = f"{count:,} bad records of {source.name} are skipped"
        if count == 1:
            skipped = f"1 bad record of {source.name} is skipped"
        note(f"{skipped}; the first: {first}")
    return token_file


def _find(
    source: DataSource, tokenization: _TokenizationSettings, cache: TokenCache, progress: Progress | None,
    note: OnNote | None,
) -> TokenFile:  # fmt: skip
    settings = _settings(source, tokenization)
    stamp_file = _stamp_file(source, settings, cache)
    name = _read_stamp(stamp_file)
    if name is None:
        is_settled = sources.stamp_is_settled(source, time.time())
        name = sources.content_key(source, settings)[:32]
        _check_unchanged(source)
        if is_settled:
            _write_stamp(stamp_file, name)
    path = cache.path / name
    token_file = open_token_file(path)
    if token_file is not None:
        return token_file
    if os.path.lexists(path) and note is not None:
        note(f"The token file {path} is damaged; building it again.")
    skipped = SkippedRecords()
    encoded = _encode(source, tokenization, skipped)
    tokenizer = tokenization.tokenizer
    return build_token_file(cache, name, encoded, tokenizer, source=source, skipped=skipped, progress=progress)


def _settings(source: DataSource, tokenization: _TokenizationSettings) -> str:
    return f"{source.reading}\n{tokenization.settings}"


def _stamp_file(source: DataSource, settings: str, cache: TokenCache) -> Path:
    return cache.path / f"{sources.stamp(source, settings)[:32]}.stamp"


def _encode(source: DataSource, tokenization: _TokenizationSettings, skipped: SkippedRecords) -> Iterator[Encoded]:
    """Encodes the source; raises a RunError at its end, before the token file is published, if a file has changed."""
    tokenizer, template, train_on, chunk_bytes, group_bytes = tokenization
    if template is None:
        yield from encode_text_chunks(read_text_chunks(source, chunk_bytes), tokenizer, group_bytes)
    else:
        report = raise_error
        if source.skips_bad_records:
            report = skipped.add
        samples = read_samples(source, skipped)
        yield from encode_samples(samples, tokenizer, template, train_on, group_bytes, report)
    _check_unchanged(source)


def _check_unchanged(source: DataSource) -> None:
    changed = sources.first_changed(source)
    if changed is not None:
        fix = "start again when no process writes to the data set any more"
        raise RunError("the file changed while it was read", where=str(changed), fix=fix)


def _read_stamp(stamp_file: Path) -> str | None:
    try:
        name = read_bytes(stamp_file).decode("ascii")
    except (OSError, ValueError):
        return None
    if len(name) == 32 and set(name) <= set("0123456789abcdef"):
        return name
    return None


def _write_stamp(stamp_file: Path, name: str) -> None:
    """Stores the name; if the cache cannot be written, the next run only has to read the text again."""
    temporary = stamp_file.with_name(f".{stamp_file.name}-{uuid.uuid4().hex[:8]}")
    try:
        stamp_file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(name, encoding="ascii")
        os.replace(temporary, stamp_file)
    except OSError:
        with contextlib.suppress(OSError):  # the cache may be no folder
            temporary.unlink()
