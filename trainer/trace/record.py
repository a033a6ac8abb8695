"""The folder of a trace: each rank writes the summaries of the tensors that it sees, and some tensors themselves.

    trace.json            what was run: model, dtypes, degrees, learning rates; written by rank 0 before the first step
    rank-0/rank.json      the rank, its coordinate in the mesh, and its micro-batches; written last
    rank-0/pieces.jsonl   a line for each tensor, or shard of one, that the rank has seen
    rank-0/sketches.f64   the sketches of the lines that have one, in their order
    rank-0/full/*.npy     the tensors that --full names, and the choices of routers
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from trainer.config.schema.model import Dtype
from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.monitors.files import make_folder, write_failure, write_text
from trainer.trace.sketch import BUCKETS, CELLS, SKETCH_SIZE, Place, Summary, as_numbers, summarize

FORMAT = 1
MANIFEST = "trace.json"
RANK_FILE = "rank.json"
PIECES = "pieces.jsonl"
SKETCHES = "sketches.f64"
_SKETCH_BYTES = 8 * SKETCH_SIZE
_NEEDED_FACTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("ranks", "layers", "summands"), lambda value: type(value) is int and value > 0),
    "compute_dtype": lambda value: value in get_args(Dtype),
    "learning_rates": lambda value: isinstance(value, list) and all(type(rate) in (int, float) for rate in value),
}
"""What a comparison needs of the manifest."""

Kind: TypeAlias = Literal["weight", "activation", "activation gradient", "gradient", "choice", "loss", "norm"]


class Key(NamedTuple):
    """Names a tensor of a run, whatever ranks have it.

    Attributes:
        name: Hugging Face's name of a module, a module and `.input`, or a parameter.
        sequence: Which sequence of the batch, as a checksum of its tokens; "" where all of them have a share.
    """

    step: int
    kind: Kind
    name: str
    sequence: str = ""


@dataclass(frozen=True)
class Piece:
    """What one rank has of a tensor.

    Attributes:
        scale: The norm of the numbers whose rounding shows in these, where it is larger than their own: a sublayer's
            output is what it adds to the residual stream.
        file: The numbers, as .npy; None: only their summary.
    """

    key: Key
    rank: int
    place: Place
    dtype: str
    summary: Summary
    scale: float | None = None
    file: Path | None = None


class TraceWriter:
    """Writes the folder of one rank.

    Args:
        pattern: Names of the tensors to write in full, with * and ?, or "": none.

    Attributes:
        matched: How many tensors, and shards of some, had such a name.
        count: How many were written.
    """

    def __init__(self, folder: Path, rank: int, pattern: str = "") -> None:
        self.folder = folder / f"rank-{rank}"
        self.rank = rank
        self.pattern = pattern
        self.full = 0
        self.matched = 0
        self.count = 0
        make_folder(self.folder / "full", "flag --output")
        (self.folder / RANK_FILE).unlink(missing_ok=True)
        self._pieces = open(self.folder / PIECES, "w", encoding="utf-8")
        self._sketches = open(self.folder / SKETCHES, "wb")

    def add(
        self, key: Key, array: np.ndarray, place: Place, dtype: str = "float32", scale: float | None = None
    ) -> None:
        """Writes the summary of the numbers [r, c] that this rank has of a tensor."""
        summary = summarize(array, place)
        file = ""
        try:
            is_asked_for = fnmatch.fnmatchcase(key.name, self.pattern)
            self.matched += is_asked_for
            if key.kind == "choice" or is_asked_for:
                file = self._write_full(key, array)
            line = {
                "step": key.step, "kind": key.kind, "name": key.name, "sequence": key.sequence, "shape": place.shape,
                "rows": place.rows, "columns": place.columns, "dtype": dtype, "max": _finite(summary.largest),
                "min": _finite(summary.smallest), "mean": _finite(summary.mean), "norm": _finite(summary.norm),
                "crc32": summary.checksum,
            }  # fmt: skip
            if scale is not None:
                line["scale"] = _finite(scale)
            if file:
                line["file"] = file
            self._pieces.write(json.dumps(line) + "\n")
            assert summary.sketch is not None
            self._sketches.write(summary.sketch.tobytes())
            self.count += 1
        except OSError as error:
            raise write_failure(self.folder, error, key="--output") from error

    def _write_full(self, key: Key, array: np.ndarray) -> str:
        self.full += 1
        words = (key.kind, key.name, f"step{key.step}", key.sequence)
        name = ".".join(re.sub(r"[^A-Za-z0-9_.-]", "_", word) for word in words if word)
        file = f"full/{self.full:06d}.{name}.npy"
        numbers = array
        if key.kind != "choice":
            numbers = as_numbers(array)
        np.save(self.folder / file, numbers)
        return file

    def close(self, facts: Mapping[str, Any]) -> None:
        """Ends the files; `facts` about the rank are written last, as the mark of completeness."""
        self._pieces.close()
        self._sketches.close()
        written = {"rank": self.rank, "pieces": self.count, "full": self.matched, **facts}
        write_text(self.folder / RANK_FILE, json.dumps(written, indent=1) + "\n")


def _finite(number: float) -> float | None:
    """Returns a number for JSON, which has no infinity and no NaN."""
    if math.isfinite(number):
        return float(number)
    return None


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes what was run."""
    write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")


def read_manifest(folder: Path, where: str) -> dict[str, Any]:
    """Reads what was run.

    Raises:
        UserError: The folder is not one of this version, or its manifest is damaged.
    """
    path = folder / MANIFEST
    fix = "name the --output of a trace, or a dump_path of msprobe"
    try:
        facts = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise UserError(f"has no {MANIFEST}", where=where, value=str(folder), fix=fix) from None
    except (OSError, ValueError) as error:
        rule = f"{MANIFEST} cannot be read: {error}"
        raise UserError(rule, where=where, value=str(folder), fix="write the trace again") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        rule = f"is not of format {FORMAT}, which this version writes"
        raise UserError(rule, where=where, value=str(path), fix="write the trace again")
    wrong = [name for name, is_right in _NEEDED_FACTS.items() if not is_right(facts.get(name))]
    if wrong:
        rule = f"is damaged: {', '.join(wrong)} is missing or wrong"
        raise UserError(rule, where=where, value=str(path), fix="write the trace again")
    return facts


def rank_folders(folder: Path) -> dict[int, Path]:
    """Returns the folders of the ranks that have written one, complete or not."""
    folders = {}
    for path in folder.glob("rank-*"):
        number = path.name.removeprefix("rank-")
        if number.isdecimal() and (path / PIECES).is_file():
            folders[int(number)] = path
    return dict(sorted(folders.items()))


def read_pieces(folder: Path, rank: int) -> Iterator[Piece]:
    """Yields the pieces of a rank; a last line that was being written is left out. The sketches stay on disk."""
    sketches = None
    path = folder / SKETCHES
    count = 0
    if path.is_file():
        count = path.stat().st_size // _SKETCH_BYTES
    if count:
        sketches = np.memmap(path, np.float64, "r", shape=(count, CELLS, CELLS, BUCKETS))
    with open(folder / PIECES, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.endswith("\n"):
                return
            sketch = None
            if sketches is not None and number < count:
                sketch = sketches[number]
            yield _piece(json.loads(line), rank, folder, sketch)


def _piece(line: Mapping[str, Any], rank: int, folder: Path, sketch: np.ndarray | None) -> Piece:
    rows = tuple((start, stop) for start, stop in line["rows"])
    place = Place(tuple(line["shape"]), rows, tuple(line["columns"]))
    # JSON has no NaN: None stands for numbers that are not finite.
    largest, smallest, mean, norm = (np.float64(line[name]).item() for name in ("max", "min", "mean", "norm"))
    summary = Summary(place.size, largest, smallest, mean, norm, line["crc32"], sketch)
    file = None
    if "file" in line:
        file = folder / line["file"]
    key = Key(line["step"], line["kind"], line["name"], line["sequence"])
    return Piece(key, rank, place, line["dtype"], summary, line.get("scale"), file)
