"""Draws a data set of the ten digits in MNIST's format, for machines without a network.

    python scripts/make_digits.py data/digits                  60000 images to train on, 10000 to test
    DATA_PATH=data/digits python run_trainer.py --config configs/mnist_accumulation.yaml

Each image is a digit of one of the faces of DejaVu, which come with matplotlib: turned, slanted, scaled, shifted, of
changing contrast, and noisy. The images are a function of the seed and of FreeType's rendering of the faces. The test
images use the same faces; they are other drawings.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np

SIDE = 28  # pixels of an image, as in MNIST
CANVAS = 2 * SIDE  # a digit is drawn at twice the size, and read between its pixels
FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique", "DejaVuSansMono",
    "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic",
)  # fmt: skip
INK_HEIGHT = 40  # pixels of the canvas: 20 of the image, as in MNIST
MOST_TURN = np.deg2rad(15)
MOST_SLANT, MOST_SCALE, MOST_SHIFT = 0.2, 0.15, 2.0  # shear, part of the size, pixels of the image
NOISE = 12.0  # standard deviation, of 255
CHUNK = 2000  # images drawn at once
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049  # unsigned bytes (8) of three axes and of one


def main(arguments: list[str] | None = None) -> int:
    """Writes the four files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder; made if missing")
    parser.add_argument("--train", type=int, default=60000, help="images to train on (default 60000)")
    parser.add_argument("--test", type=int, default=10000, help="images to test with (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices (default 1)")
    parser.add_argument("--gzip", action="store_true", help="compress the files")
    options = parser.parse_args(arguments)
    if min(options.train, options.test) < 1 or options.seed < 0:
        parser.error("--train and --test are at least 1, --seed at least 0")
    glyphs = render_digits(find_faces())
    options.folder.mkdir(parents=True, exist_ok=True)
    for place, (part, count) in enumerate((("train", options.train), ("t10k", options.test))):
        images, labels = draw(glyphs, count, np.random.Generator(np.random.Philox(key=[options.seed, place])))
        write_idx(options.folder / f"{part}-images-idx3-ubyte", IMAGES_MAGIC, images, options.gzip)
        write_idx(options.folder / f"{part}-labels-idx1-ubyte", LABELS_MAGIC, labels, options.gzip)
    print(f"{options.folder}: {options.train} images to train on, {options.test} to test with, {len(glyphs)} faces")
    return 0


def find_faces() -> list[Path]:
    """Finds the fonts that come with matplotlib, or else installed ones."""
    spec = importlib.util.find_spec("matplotlib")
    folders = [Path(spec.origin).parent / "mpl-data/fonts/ttf"] if spec and spec.origin else []
    folders += [Path("/usr/share/fonts/truetype/dejavu"), Path("/usr/share/fonts/dejavu"), Path("/usr/share/fonts/TTF")]
    for folder in folders:
        found = [folder / f"{name}.ttf" for name in FACES if (folder / f"{name}.ttf").exists()]
        if found:
            return found
    sys.exit("error: there is no DejaVu font: pip install -c constraints.txt matplotlib")


def render_digits(faces: list[Path]) -> np.ndarray:
    """Draws every digit of every font in the middle of a canvas: float32 [fonts, 10, CANVAS, CANVAS], ink is 1."""
    from PIL import Image, ImageDraw, ImageFont

    drawn = np.zeros((len(faces), 10, CANVAS, CANVAS), np.float32)
    for number, face in enumerate(faces):
        trial = ImageFont.truetype(str(face), 100).getbbox("0")
        font = ImageFont.truetype(str(face), round(100 * INK_HEIGHT / (trial[3] - trial[1])))
        for digit in range(10):
            canvas = Image.new("L", (CANVAS, CANVAS))
            left, top, right, bottom = font.getbbox(str(digit))
            corner = ((CANVAS - left - right) // 2, (CANVAS - top - bottom) // 2)
            ImageDraw.Draw(canvas).text(corner, str(digit), fill=255, font=font)
            drawn[number, digit] = np.asarray(canvas, np.float32) / 255
    # Means of 2 x 2 pixels: reading at half the size must not depend on single pixels.
    wide = np.pad(drawn, ((0, 0), (0, 0), (0, 1), (0, 1)))
    return (wide[..., :-1, :-1] + wide[..., 1:, :-1] + wide[..., :-1, 1:] + wide[..., 1:, 1:]) / 4


def draw(glyphs: np.ndarray, count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws images uint8 [count, SIDE, SIDE] and labels uint8 [count]."""
    images, labels = np.empty((count, SIDE, SIDE), np.uint8), np.empty(count, np.uint8)
    for first in range(0, count, CHUNK):
        own = slice(first, min(first + CHUNK, count))
        labels[own] = random.integers(0, 10, own.stop - own.start)
        images[own] = draw_digits(glyphs, labels[own], random)
    return images, labels


def draw_digits(glyphs: np.ndarray, labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draws one image of each label: uint8 [n, SIDE, SIDE]."""
    n = len(labels)
    faces = random.integers(0, len(glyphs), n)
    turn, slant, scale, right, down = random.uniform(-1, 1, (5, n))
    turn, slant, scale = turn * MOST_TURN, slant * MOST_SLANT, 1 + scale * MOST_SCALE
    # Position on the canvas of each pixel of the image: rotated, slanted and scaled about the middle.
    middle = (SIDE - 1) / 2
    y, x = (axis.reshape(1, -1) - middle for axis in np.mgrid[:SIDE, :SIDE])
    x, y = x - MOST_SHIFT * right[:, None], y - MOST_SHIFT * down[:, None]
    cos, sin = (np.cos(turn) / scale)[:, None], (np.sin(turn) / scale)[:, None]
    x, y = cos * x + sin * y, cos * y - sin * x
    x = x + slant[:, None] * y
    ink = _between(glyphs, faces, labels, 2 * y + (CANVAS - 1) / 2, 2 * x + (CANVAS - 1) / 2)
    contrast, noise = random.uniform(150, 255, (n, 1)), random.normal(0, NOISE, ink.shape)
    return np.clip(np.rint(ink * contrast + noise), 0, 255).astype(np.uint8).reshape(n, SIDE, SIDE)


def _between(glyphs: np.ndarray, faces: np.ndarray, labels: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Interpolates the canvases bilinearly, with 0 outside of them. y and x: [n, pixels]."""
    y0, x0 = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    part_y, part_x = y - y0, x - x0

    def at(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        inside = (row >= 0) & (row < CANVAS) & (column >= 0) & (column < CANVAS)
        row, column = row.clip(0, CANVAS - 1), column.clip(0, CANVAS - 1)
        return np.where(inside, glyphs[faces[:, None], labels[:, None], row, column], 0)

    upper = at(y0, x0) * (1 - part_x) + at(y0, x0 + 1) * part_x
    lower = at(y0 + 1, x0) * (1 - part_x) + at(y0 + 1, x0 + 1) * part_x
    return upper * (1 - part_y) + lower * part_y


def write_idx(path: Path, magic: int, array: np.ndarray, compress: bool) -> None:
    """Writes MNIST's format: a big-endian magic number, the length of each axis, then the bytes."""
    data = struct.pack(f">{1 + array.ndim}i", magic, *array.shape) + array.tobytes()
    if compress:
        path, data = path.with_name(f"{path.name}.gz"), gzip.compress(data, 6, mtime=0)
    path.write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
