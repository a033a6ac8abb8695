"""The files of a text data set, and how to detect that they have changed."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError, working_directory
from trainer.input_files import missing_path_fix

STDLIB = "stdlib"
_COMPRESSIONS = (".gz", ".zst")
TEXT = "text"
RECORDS = "records"

# Folders that are not the standard library itself, or hold tests with deliberately broken text.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
)
_BESIDE_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "cache-*.arrow")
_READ_BYTES = 1 << 20
# A file that was written less than this time before it was read may change again within the same time stamp.
STAMP_SETTLES_SECONDS = 2.0


class SourceFile(NamedTuple):
    """A file and its metadata from the file system."""

    path: Path
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True)
class DataSource:
    """The files of one data set, in the order in which they are read, and how to read them.

    `kind` is ``text`` (each file is a document), ``stdlib`` (each UTF-8 file is a document) or ``records`` (a file has
    records with named fields, in the format of its suffix).
    """

    kind: str
    name: str  # the path as the user wrote it
    key: str  # for messages, as is `where`
    where: str
    files: tuple[SourceFile, ...]  # at least one
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a field -> its name in the files
    skips_bad_records: bool = False
    limit: int | None = None  # the most records to read; None for all
    notes: tuple[str, ...] = ()  # sentences for the user about the choice of files
    answers: str = ""  # what each record has for a loss of preferences (`LossConfig.answers`); empty for others

    @property
    def size_bytes(self) -> int:
        """Returns the sum of the sizes of the files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def reading(self) -> str:
        """Returns all settings that decide which samples are read, as a string to hash."""
        columns = sorted(self.columns.items())
        reading = f"{self.kind} {columns} {self.skips_bad_records} {self.limit}"
        if self.answers:
            reading += f" {self.answers}"
        return reading


def suffix_of(path: Path) -> tuple[str, str]:
    """Returns the suffix of a file's format and the suffix of its compression (or an empty string), in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if not suffixes or suffixes[-1] not in _COMPRESSIONS:
        return "".join(suffixes[-1:]), ""
    return "".join(suffixes[:-1]), suffixes[-1]


def matching_files(root: Path, patterns: Sequence[str], key: str, where: str) -> list[Path]:
    """Lists the files under `root` whose name matches a pattern, sorted.

    Hidden files and folders are left out, and so are the descriptions and cached results of a Hugging Face data set.

    Raises:
        UserError: No file matches, or a folder cannot be read.
    """

    def keep_file(name: str) -> bool:
        """Returns whether a file name matches a pattern and is not hidden."""
        is_data = not name.startswith(".") and not any(fnmatch(name, pattern) for pattern in _BESIDE_DATA)
        return is_data and any(fnmatch(name, pattern) for pattern in patterns)

    paths = _walk(root, lambda name: not name.startswith("."), keep_file, key, where)
    if not paths:
        rule = f"the folder has no file that matches {', '.join(patterns)}"
        fix = "name another folder, or set data_loader.patterns to the names of your files"
        raise UserError(rule, where=where, key=key, value=str(root), fix=fix)
    return paths


def stdlib_files(key: str, where: str) -> tuple[SourceFile, ...]:
    """Lists the source files of this Python's standard library; raises a UserError if there are none."""
    root = Path(sysconfig.get_paths()[STDLIB])
    paths: list[Path] = []
    if root.is_dir():
        skipped = _STDLIB_SKIPPED_FOLDERS
        paths = _walk(root, lambda name: name not in skipped, lambda name: name.endswith(".py"), key, where)
    if not paths:
        rule = f"this Python has no source files of its standard library in {root}"
        fix = "name a text file or a folder of text files instead"
        raise UserError(rule, where=where, key=key, value=STDLIB, fix=fix)
    return tuple(describe_file(path, key, where) for path in paths)


def _walk(
    root: Path, keep_folder: Callable[[str], bool], keep_file: Callable[[str], bool], key: str, where: str
) -> list[Path]:
    """Lists files recursively, sorted by path; links to folders are not followed, because they can loop."""

    def fail(error: OSError) -> None:
        raise unreadable_error(Path(error.filename or root), error, key, where)

    paths: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if keep_folder(name)]
        paths.extend(Path(folder, name) for name in names if keep_file(name))
    return sorted(paths, key=lambda path: path.parts)  # the same order as that of paths, but faster


def _status(path: Path) -> SourceFile:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "neither a regular file nor a folder")
    return SourceFile(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def describe_file(path: Path, key: str, where: str) -> SourceFile:
    """Reads the metadata of a file; raises a UserError if it does not exist, is not a file or is not readable."""
    try:
        return _status(path)
    except FileNotFoundError:
        rule = "the path does not exist"
        if os.path.islink(path):
            rule = "a link to a file that is gone"
        fix = missing_path_fix(path, f"correct the path; relative paths start at {working_directory()}")
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix) from None
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error, key, where) from None


def unreadable_error(path: Path, error: Exception, key: str, where: str) -> UserError:
    """Returns the error for a file or folder that the file system does not let us read."""
    rule = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    fix = "make the file readable, or leave it out with data_loader.patterns"
    return UserError(rule, where=where, key=key, value=str(path), fix=fix)


def open_source_file(source: DataSource, file: SourceFile) -> io.BufferedReader:
    """Opens a file of the source for reading its bytes as they are; raises a UserError if it cannot be opened."""
    try:
        return open(file.path, "rb")
    except OSError as error:
        raise unreadable_error(file.path, error, source.key, source.where) from None


def stamp(source: DataSource, settings: str) -> str:
    """Hashes the metadata of the files (path, size, times, inode), without reading them."""
    digest = hashlib.sha256(settings.encode())
    for file in source.files:
        fields = (os.path.abspath(file.path), *file[1:])
        digest.update("\0".join(map(str, fields)).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def stamp_is_settled(source: DataSource, now_seconds: float) -> bool:
    """Checks whether every file is old enough that its next change will change its time stamp."""
    newest_ns = max(max(file.mtime_ns, file.ctime_ns) for file in source.files)
    return newest_ns / 1e9 < now_seconds - STAMP_SETTLES_SECONDS


def first_changed(source: DataSource) -> Path | None:
    """Returns the first file whose metadata have changed since the source was listed, or None."""
    for file in source.files:
        try:
            if _status(file.path)[1:] != file[1:]:
                return file.path
        except OSError:
            return file.path
    return None


def content_key(source: DataSource, settings: str) -> str:
    """Hashes the content of the files in order: equal for a copy elsewhere, different for any changed byte."""
    total = hashlib.sha256(settings.encode())
    for file in source.files:
        digest = hashlib.sha256()
        with open_source_file(source, file) as stream:
            try:
                while chunk := stream.read(_READ_BYTES):
                    digest.update(chunk)
            except OSError as error:
                raise unreadable_error(file.path, error, source.key, source.where) from None
        total.update(digest.digest())
        suffix, compression = suffix_of(file.path)  # they decide how the file is read
        if source.kind != RECORDS:
            suffix = ""
        total.update(f"{suffix}{compression}\n".encode())
    return total.hexdigest()


def no_text_error(source: DataSource, num_skipped: int, first_skipped: str) -> UserError:
    """Returns the error for a source without any text, after `num_skipped` bad records were left out."""
    rule = "the data set holds no text: every file or record of it is empty"
    fix = "name files that contain text"
    if num_skipped:
        first = first_skipped.split("\n")[0].rstrip(".")
        counted = f"{num_skipped:,} of its records are bad, and no other has any"
        rule = f"the data set holds no text: {counted}; the first: {first}"
        fix = "set data_loader.columns to the names of the files' columns, or correct the records"
    return UserError(rule, where=source.where, key=source.key, value=source.name, fix=fix)
