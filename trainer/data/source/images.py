"""Reads images and their labels from idx files.

An idx file, plain or gzipped, has a big-endian header (magic number, length of each axis), then bytes.

Shape legend: B images of a micro-batch, P pixels of an image.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from trainer.config.schema.images import ClassifierConfig
from trainer.data.batches.batch import IGNORE_INDEX
from trainer.data.batches.packing import checked_indices
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

Result = TypeVar("Result")

PATH_VARIABLE = "DATA_PATH"
"""The environment variable that names the folder if the YAML does not, as in MindSpore's tutorials."""

_PARTS = {"train": ("train",), "test": ("t10k",), "all": ("train", "t10k")}
_USAGE_OF = {"train_dataset": "train", "eval_dataset": "test"}
_FOLDERS = {"train": "train", "t10k": "test"}  # subfolders in some copies
_DRAW = "python scripts/make_digits.py data/digits draws a data set in the same format"

IMAGES_MAGIC = 2051
LABELS_MAGIC = 2049
"""0x00000803 and 0x00000801: unsigned bytes (08) of three axes, and of one."""

_GZIP_MAGIC = b"\x1f\x8b"
_KINDS = {IMAGES_MAGIC: "images", LABELS_MAGIC: "labels"}


class ImageBatch(NamedTuple):
    """A micro-batch of images."""

    pixels: np.ndarray  # uint8 [B, P]
    labels: np.ndarray  # int32 [B]; `IGNORE_INDEX` in the padding of a last batch


class ImageDataset:
    """Images and labels from one or several files; a `SequenceDataset` in which an image is a sequence of length 1.

    Args:
        images: uint8 [images, height, width] for each file.
        labels: uint8 [images] for each file.
        limit: The most images to use; None for all.
    """

    packing = None
    seq_length = 1

    def __init__(self, images: Sequence[np.ndarray], labels: Sequence[np.ndarray], limit: int | None = None) -> None:
        pixels = [each.reshape(len(each), -1) for each in images]
        # A single file stays memory-mapped: unread images take no memory.
        if len(pixels) == 1:
            self._pixels_NP = pixels[0]
        else:
            self._pixels_NP = np.concatenate(pixels)
        self._labels_N = np.concatenate(labels).astype(np.int32)
        digest = hashlib.sha256()
        for array in (*pixels, *labels):
            digest.update(np.ascontiguousarray(array).data)
        self.content = f"images {digest.hexdigest()[:16]}"
        self.num_sequences = min(len(self._labels_N), limit or len(self._labels_N))
        self.num_tokens = self.num_documents = self.num_sequences
        self.max_token_id = int(self._labels_N.max())

    def batch(self, indices: Sequence[int] | np.ndarray) -> ImageBatch:
        indices_B = checked_indices(indices, self.num_sequences)
        return ImageBatch(np.array(self._pixels_NP[indices_B]), self._labels_N[indices_B])

    def padding(self, size: int) -> ImageBatch:
        """Makes `size` images without loss, to fill up a last batch."""
        return ImageBatch(np.zeros((size, self._pixels_NP.shape[1]), np.uint8), np.full(size, IGNORE_INDEX, np.int32))


def build_images(config: Config, section: str) -> ImageDataset:
    """Reads the images of a section.

    Raises:
        UserError: A file is missing, damaged or of another format, its images do not fit the classifier, or a label is
            not one of the classes.
    """
    images = []
    labels = []
    classes = _settings(config).classes
    pairs = [_read_headers(config, section, *pair) for pair in _find_files(config, section)]
    for image_file, label_file in pairs:
        images.append(_read_located(config, section, read_array, image_file))
        labels.append(_read_located(config, section, read_array, label_file))
        largest = int(labels[-1].max())
        if largest >= classes:
            rule = f"{label_file.path}: it has the label {largest}, and the classes are 0 to {classes - 1}"
            raise _error(config, section, rule, f"set model.classifier.classes to {largest + 1}")
    return ImageDataset(images, labels, getattr(config, section).data_loader.num_samples)


def _settings(config: Config) -> ClassifierConfig:
    settings = config.network
    assert isinstance(settings, ClassifierConfig), "only a classifier reads images"
    return settings


def random_images(config: Config, size: int, seed: int) -> ImageBatch:
    """Makes `size` images of random pixels, with random labels."""
    settings = _settings(config)
    stream = np.random.default_rng(seed)
    pixels = stream.integers(0, 256, (size, settings.pixels)).astype(np.uint8)
    return ImageBatch(pixels, stream.integers(0, settings.classes, size).astype(np.int32))


def write_random_images(config: Config, folder: Path, size: int, seed: int) -> None:
    """Writes `size` random images as idx files, the same to train on and to evaluate on."""
    batch = random_images(config, size, seed)
    pixels = batch.pixels.shape[1]
    height = next(side for side in range(int(pixels**0.5), 0, -1) if pixels % side == 0)
    images = batch.pixels.reshape(size, height, -1)
    folder.mkdir(parents=True, exist_ok=True)
    for part in _PARTS["all"]:
        for kind, magic, array in (("images-idx3", IMAGES_MAGIC, images), ("labels-idx1", LABELS_MAGIC, batch.labels)):
            header = struct.pack(f">I{array.ndim}I", magic, *array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())


def _find_files(config: Config, section: str) -> Iterator[tuple[Path, Path]]:
    """Yields the files of images and labels of each part that the section reads."""
    loader = getattr(config, section).data_loader
    usage = loader.usage or _USAGE_OF[section]
    name = loader.dataset_dir or os.environ.get(PATH_VARIABLE, "")
    if not name:
        rule = f"{loader.type} needs the folder with its files"
        raise _error(config, section, rule, f"set it, or the environment variable {PATH_VARIABLE}; {_DRAW}")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise _error(config, section, f"{folder} is not a folder", f"name the folder of the idx files; {_DRAW}")
    for part in _PARTS[usage]:
        images = _find_file(config, section, folder, part, "images", "idx3")
        yield images, _find_file(config, section, folder, part, "labels", "idx1")


def _find_file(config: Config, section: str, folder: Path, part: str, kind: str, form: str) -> Path:
    """Finds a file by its usual names in the folder, in the subfolder of its part, or in the folder beside it."""
    names = [f"{part}-{kind}{sign}{form}-ubyte{end}" for end in ("", ".gz") for sign in ("-", ".")]
    for where in (folder, folder / _FOLDERS[part], folder.parent / _FOLDERS[part]):
        for name in names:
            if (where / name).is_file():
                return where / name
    rule = f"{folder} has neither {names[0]} nor {names[0]}.gz"
    raise _error(config, section, rule, f"copy the idx files there; {_DRAW}")


def _read_headers(config: Config, section: str, images: Path, labels: Path) -> tuple[IdxFile, IdxFile]:
    """Reads both headers and checks that they fit each other and the classifier."""
    image_file = _read_located(config, section, read_header, images, IMAGES_MAGIC)
    label_file = _read_located(config, section, read_header, labels, LABELS_MAGIC)
    count, height, width = image_file.shape
    pixels = _settings(config).pixels
    if count != label_file.shape[0]:
        rule = f"{images} has {count:,} images, and {labels.name} {label_file.shape[0]:,} labels"
        raise _error(config, section, rule, "use two files that belong together")
    if height * width != pixels:
        rule = f"{images}: its images are {height} x {width}, and the classifier takes {pixels} pixels"
        raise _error(config, section, rule, f"set model.classifier.pixels to {height * width}")
    return image_file, label_file


def _read_located(config: Config, section: str, read: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `read` with the arguments and adds the location of the folder's key to an error."""
    try:
        return read(*arguments)
    except UserError as error:
        raise _error(config, section, error.rule, error.fix) from None


def _error(config: Config, section: str, rule: str, fix: str) -> UserError:
    key = f"{section}.data_loader.dataset_dir"
    where = config.source.where(key)
    value = getattr(config, section).data_loader.dataset_dir
    if not value and PATH_VARIABLE in os.environ:
        where = "environment"
        key = PATH_VARIABLE
        value = os.environ[PATH_VARIABLE]
    return UserError(rule, where=where or config.source.where(f"{section}.data_loader.type"), key=key, value=value,
                     fix=fix)


class IdxFile(NamedTuple):
    """An idx file and its header."""

    path: Path
    shape: tuple[int, ...]
    header_bytes: int
    is_gzipped: bool


def read_header(path: Path, magic: int) -> IdxFile:
    """Reads the header, and checks the size of a file that is not compressed.

    Raises:
        UserError: The file cannot be read, is truncated or has another format.
    """
    kind = _KINDS[magic]
    axes = magic & 0xFF
    header_bytes = 4 * (1 + axes)
    try:
        with path.open("rb") as file:
            is_gzipped = file.read(2) == _GZIP_MAGIC
        with gzip.open(path) if is_gzipped else path.open("rb") as file:
            header = file.read(header_bytes)
        size_bytes = path.stat().st_size
    except (OSError, EOFError, zlib.error) as error:
        raise _damage_error(path, error) from None
    if len(header) < 4:
        raise _wrong(path, f"{len(header)} bytes are too few for an idx file of {kind}")
    actual_magic = struct.unpack(">i", header[:4])[0]
    if actual_magic != magic:
        what = f"{actual_magic}, which is not an idx file"
        if actual_magic in _KINDS:
            what = f"a file of {_KINDS[actual_magic]} ({actual_magic})"
        raise _wrong(path, f"it starts with the number of {what}, and {kind} have {magic}")
    if len(header) < header_bytes:
        raise _wrong(path, f"it ends within its header of {header_bytes} bytes")
    shape = struct.unpack(f">{axes}i", header[4:])
    if min(shape) < 1:
        raise _wrong(path, f"its header says {' x '.join(map(str, shape))}: there is nothing in it")
    if not is_gzipped:
        _check_size(path, size_bytes, shape, header_bytes)
    return IdxFile(path, shape, header_bytes, is_gzipped)


def read_array(file: IdxFile) -> np.ndarray:
    """Reads a file: uint8 in the shape of its header; it is memory-mapped unless it is compressed.

    Raises:
        UserError: A compressed file is damaged or truncated.
    """
    if not file.is_gzipped:
        return np.memmap(file.path, np.uint8, "r", file.header_bytes, file.shape)
    try:
        with gzip.open(file.path) as stream:
            data = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise _damage_error(file.path, error) from None
    _check_size(file.path, len(data), file.shape, file.header_bytes)
    return np.frombuffer(data, np.uint8, offset=file.header_bytes).reshape(file.shape)


def _check_size(path: Path, size_bytes: int, shape: tuple[int, ...], header_bytes: int) -> None:
    expected_bytes = header_bytes + math.prod(shape)
    if size_bytes != expected_bytes:
        state = "too long"
        if size_bytes < expected_bytes:
            state = "cut short"
        sizes = f"{' x '.join(map(str, shape))} take {expected_bytes:,} bytes, and it has {size_bytes:,}"
        raise _wrong(path, f"it is {state}: {sizes}")


def _damage_error(path: Path, error: Exception) -> UserError:
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return _wrong(path, f"it is cut short or damaged ({str(error).rstrip('.')})")
    return _wrong(path, f"it cannot be read ({getattr(error, 'strerror', None) or error})", "make it readable")


def _wrong(path: Path, rule: str, fix: str = "") -> UserError:
    return UserError(f"{path}: {rule}", fix=fix or f"copy {path.name} anew")
