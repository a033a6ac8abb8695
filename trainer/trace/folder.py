"""Reads the folder of a trace: the pieces that ranks recorded of each tensor, and the tensor joined from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.models.spec.names import GATED_MLP, POST_ATTENTION_NORM, POST_MLP_NORM, UNGATED_MLPS
from trainer.trace.names import EMBEDDED
from trainer.trace.record import RANK_FILE, Key, Piece, rank_folders, read_manifest, read_pieces
from trainer.trace.sketch import Place, Summary, join_summaries

_LAYER = re.compile(r"model\.layers\.(\d+)(?:\.(.+))?")


@dataclass
class Trace:
    """The records of all ranks of a run.

    Attributes:
        facts: What was run, see `trainer.trace.run.manifest`; for a dump of msprobe only what the dump says.
        pieces: What each rank recorded, by tensor.
        coordinates: The place of each rank in the mesh.
        micro_batches: The sequences of each micro-batch, by rank and step.
        lost: Sentences about ranks whose records are missing or end early, by rank.
        unmatched: Entries of a dump that stand for no tensor of the reference, with the reason.
    """

    folder: Path
    facts: Mapping[str, Any]
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    coordinates: dict[int, Mapping[str, int]] = field(default_factory=dict)
    micro_batches: dict[int, list[list[list[str]]]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Adds pieces of a rank."""
        for piece in pieces:
            self.pieces.setdefault(piece.key, []).append(piece)


class JoinedTensor(NamedTuple):
    """A tensor, joined from the pieces of all ranks.

    Attributes:
        shape: Rows and columns of the unsharded tensor, see `Place`.
        distinct: One piece for each place: replicas record the same numbers at the same place.
        is_complete: Whether these pieces contain each number of the tensor exactly once.
    """

    shape: tuple[int, int]
    summary: Summary
    distinct: Sequence[Piece]
    is_complete: bool
    scale: float | None


def read_trace(folder: Path, where: str) -> Trace:
    """Reads a folder that `trace` wrote.

    Raises:
        UserError: It is not one, or no rank has written anything.
    """
    trace = Trace(folder, read_manifest(folder, where))
    folders = rank_folders(folder)
    if not folders:
        fix = "run trace --config FILE --output with this folder again"
        raise UserError("has the records of no rank", where=where, value=str(folder), fix=fix)
    for rank in range(trace.facts["ranks"]):
        path = folders.get(rank)
        if path is None:
            trace.lost[rank] = "has written nothing"
            continue
        try:
            _add_rank(trace, rank, path)
        except (ValueError, KeyError, TypeError, AttributeError):  # of JSON, or of its contents
            raise UserError("is damaged", where=where, value=str(path), fix="record the trace again") from None
    return trace


def _add_rank(trace: Trace, rank: int, path: Path) -> None:
    """Adds the records of a rank.

    Raises:
        ValueError: They are fewer than the rank has written.
    """
    pieces = list(read_pieces(path, rank))
    trace.add(pieces)
    try:
        facts = json.loads(read_bytes(path / RANK_FILE))
    except FileNotFoundError:
        trace.lost[rank] = "did not end: its last records may be missing"
        return
    if facts["pieces"] != len(pieces) or any(piece.summary.sketch is None for piece in pieces):
        raise ValueError("records are missing")
    trace.coordinates[rank] = facts["coordinate"]
    trace.micro_batches[rank] = facts["micro_batches"]


def join_pieces(pieces: Sequence[Piece]) -> JoinedTensor:
    """Joins the pieces of a tensor; of ranks that have the same numbers, the first counts."""
    by_place: dict[Place, Piece] = {}
    for piece in pieces:
        by_place.setdefault(piece.place, piece)
    complete = [piece for piece in by_place.values() if piece.place.is_whole]
    distinct = complete[:1] or list(by_place.values())
    summary = join_summaries([piece.summary for piece in distinct])
    rows, columns = distinct[0].place.shape
    is_complete = summary.size == rows * columns
    return JoinedTensor(distinct[0].place.shape, summary, distinct, is_complete, joined_scale(distinct))


def joined_scale(parts: Sequence[Piece | JoinedTensor]) -> float | None:
    """Returns the scale of a tensor from those of its parts; see `Piece.scale`."""
    scales = [part.scale for part in parts if part.scale is not None]
    if not scales:
        return None
    return math.hypot(*scales)


def right_keys(key: Key, right: Trace) -> list[Key]:
    """Returns the tensors of the right trace that a tensor of another trace is compared with.

    A tensor of several sequences, whose key has "a+b", is compared with those of each sequence if the right trace has
    them one by one.
    """
    if key in right.pieces:
        return [key]
    return [key._replace(sequence=sequence) for sequence in key.sequence.split("+")]


def layer_of(name: str) -> int | None:
    """Returns the layer of a module or parameter; None outside of the layers."""
    match = _LAYER.match(name)
    if match is None:
        return None
    return int(match[1])


_ATTENTION_NORM = POST_ATTENTION_NORM.removesuffix(".weight")
_INNER = tuple(name for names in (GATED_MLP, *UNGATED_MLPS.values()) for name in names[:-1])
_FORWARD = ("self_attn.o_proj.input", "self_attn", _ATTENTION_NORM, "mlp.gate", *_INNER, "mlp",
            POST_MLP_NORM.removesuffix(".weight"))  # fmt: skip
_BACKWARD = 3
_PHASES = {
    "weight": 0, "activation": 1, "choice": 1, "loss": 2,
    "activation gradient": _BACKWARD, "gradient": _BACKWARD, "norm": 4,
}  # fmt: skip
_BEHIND = 1 << 30


def position(key: Key) -> tuple[int, int, int, int, str]:
    """Returns the place of a tensor in the order in which a step computes: weights, forward, losses, backward, norms.

    Gradients go from the last layer to the first. The gradient of a sublayer's output comes before those of its
    weights.
    """
    match = _LAYER.match(key.name)
    layer = _BEHIND  # the final norm and the head
    part = ""
    if match is not None:
        layer = int(match[1])
        part = match[2] or ""
    elif key.name == EMBEDDED or key.name.startswith(f"{EMBEDDED}."):
        layer = -1
    phase = _PHASES[key.kind]
    if phase == _BACKWARD:
        in_attention = part.startswith(("self_attn", "input_layernorm", _ATTENTION_NORM))
        return key.step, phase, -layer, 2 * in_attention + (key.kind == "gradient"), key.name
    place = len(_FORWARD)
    if part in _FORWARD:
        place = _FORWARD.index(part)
    return key.step, phase, layer, place, key.name
