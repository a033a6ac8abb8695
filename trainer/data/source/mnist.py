"""The images of MNIST, or of any data set in its files, as rows of a data set.

Shape legend: B images of a micro-batch, P pixels of an image.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.data.batches.batch import IGNORE_INDEX
from trainer.data.batches.packing import checked_indices
from trainer.data.source.idx import IMAGES_MAGIC, LABELS_MAGIC, IdxFile, read_array, read_header
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

MEAN, STANDARD_DEVIATION = 0.1307, 0.3081
"""Of all pixels of MNIST's training images, from 0 to 1."""
PATH_VARIABLE = "DATA_PATH"
"""Environment variable with the folder, where the file names none; the one of MindSpore's tutorials."""

_PARTS = {"train": ("train",), "test": ("t10k",), "all": ("train", "t10k")}
_FOLDERS = {"train": "train", "t10k": "test"}  # where some copies keep the two apart
_DRAW = "python scripts/make_digits.py data/digits draws a set of the same format"


class ImageBatch(NamedTuple):
    """One micro-batch of images.

    Attributes:
        pixels: uint8 [B, P].
        labels: int32 [B]; `IGNORE_INDEX` in a row that fills a last batch up.
    """

    pixels: np.ndarray
    labels: np.ndarray


class ImageDataset:
    """Images and labels, one file or several one after the other; a `RowDataset`, of which a row is one image.

    Args:
        images: For each file uint8 [images, height, width].
        labels: For each file uint8 [images].
        limit: At most so many images; None: all.
    """

    has_boundaries = False
    seq_length = 1

    def __init__(self, images: Sequence[np.ndarray], labels: Sequence[np.ndarray], limit: int | None = None) -> None:
        pixels = [each.reshape(len(each), -1) for each in images]
        # One file stays mapped: what is not read takes no memory.
        self._pixels_NP = pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
        self._labels_N = np.concatenate(labels).astype(np.int32)
        found = hashlib.sha256()
        for array in (*pixels, *labels):
            found.update(np.ascontiguousarray(array).data)
        self.content = f"images {found.hexdigest()[:16]}"
        self.num_rows = min(len(self._labels_N), limit or len(self._labels_N))
        self.num_tokens = self.num_documents = self.num_rows
        self.max_token_id = int(self._labels_N.max())

    def rows(self, indices: Sequence[int] | np.ndarray) -> ImageBatch:
        """Reads images; see `RowDataset.rows`."""
        indices_B = checked_indices(indices, self.num_rows)
        return ImageBatch(np.array(self._pixels_NP[indices_B]), self._labels_N[indices_B])

    def padding(self, rows: int) -> ImageBatch:
        """Makes images that carry no loss."""
        return ImageBatch(np.zeros((rows, self._pixels_NP.shape[1]), np.uint8), np.full(rows, IGNORE_INDEX, np.int32))


def build_images(config: Config, section: str) -> ImageDataset:
    """Reads the images of a section.

    Raises:
        UserError: A file is missing, damaged, or not one of MNIST's; other images than the classifier takes, or a
            label that is none of its classes.
    """
    files = [_checked(config, section, *pair) for pair in _found(config, section)]
    images, labels = [], []
    for image_file, label_file in files:
        images.append(_placed(config, section, read_array, image_file))
        labels.append(_placed(config, section, read_array, label_file))
        largest, classes = int(labels[-1].max()), config.classifier.classes
        if largest >= classes:
            rule = f"{label_file.path}: it has the label {largest}, and the classes are 0 to {classes - 1}"
            raise _error(config, section, rule, f"set model.classifier.classes to {largest + 1}")
    return ImageDataset(images, labels, getattr(config, section).data_loader.num_samples)


def _found(config: Config, section: str) -> Iterator[tuple[Path, Path]]:
    """Images and labels of each part that the section reads."""
    loader = getattr(config, section).data_loader
    usage = loader.usage or ("test" if section == "eval_dataset" else "train")
    name = loader.dataset_dir or os.environ.get(PATH_VARIABLE, "")
    if not name:
        rule = f"{loader.type} needs the folder of its files"
        raise _error(config, section, rule, f"set it, or the environment variable {PATH_VARIABLE}; {_DRAW}")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise _error(config, section, f"{folder} is no folder", f"name the folder of MNIST's files; {_DRAW}")
    for part in _PARTS[usage]:
        yield (
            _file(config, section, folder, part, "images", "idx3"),
            _file(config, section, folder, part, "labels", "idx1"),
        )


def _file(config: Config, section: str, folder: Path, part: str, kind: str, form: str) -> Path:
    """A file under one of its usual names, in the folder, in a folder of its part, or in the one beside this."""
    names = [f"{part}-{kind}{sign}{form}-ubyte{end}" for end in ("", ".gz") for sign in ("-", ".")]
    for where in (folder, folder / _FOLDERS[part], folder.parent / _FOLDERS[part]):
        for name in names:
            if (where / name).is_file():
                return where / name
    rule = f"{folder} has no {names[0]}, nor {names[0]}.gz"
    raise _error(config, section, rule, f"copy MNIST's four files there; {_DRAW}")


def _checked(config: Config, section: str, images: Path, labels: Path) -> tuple[IdxFile, IdxFile]:
    """Both headers, which fit each other and the classifier."""
    image_file = _placed(config, section, read_header, images, IMAGES_MAGIC)
    label_file = _placed(config, section, read_header, labels, LABELS_MAGIC)
    (count, height, width), pixels = image_file.shape, config.classifier.pixels
    if count != label_file.shape[0]:
        rule = f"{images} has {count:,} images, and {labels.name} {label_file.shape[0]:,} labels"
        raise _error(config, section, rule, "use two files that belong together")
    if height * width != pixels:
        rule = f"{images}: its images are {height} x {width}, and the classifier takes {pixels} pixels"
        raise _error(config, section, rule, f"set model.classifier.pixels to {height * width}")
    return image_file, label_file


def _placed(config: Config, section: str, read, *arguments):
    """What `read` gives; its error says where the folder was named."""
    try:
        return read(*arguments)
    except UserError as error:
        raise _error(config, section, error.rule, error.fix) from None


def _error(config: Config, section: str, rule: str, fix: str) -> UserError:
    key = f"{section}.data_loader.dataset_dir"
    where = config.source.where(key)
    value = getattr(config, section).data_loader.dataset_dir
    if not value and PATH_VARIABLE in os.environ:
        where, key, value = "environment", PATH_VARIABLE, os.environ[PATH_VARIABLE]
    return UserError(rule, where=where or config.source.where(f"{section}.data_loader.type"), key=key, value=value,
                     fix=fix)
