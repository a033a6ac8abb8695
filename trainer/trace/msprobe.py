"""Reads a dump of msprobe, the precision debugger of MindStudio, as a trace.

Format: docs/en/dump/mindspore_data_dump_instruct.md of github.com/Ascend/msprobe at commit 8ff00da3, sections "Dynamic
Graph" and "dump.json Description":

    step0/rank0/dump.json          statistics of the inputs and outputs of each module and API
    step0/rank0/dump_tensor_data   with task "tensor": the tensors as .npy, named by `data_name`

Modules (levels L0 and mix) are called `{Cell}.{path}.{class}.{forward|backward}.{call}`, their gradients
`{Cell}.{path}.{class}.parameters_grad.{number}`. A single process is `proc{pid}` instead of `rank{n}`.

A call of a module is a micro-batch. Tensor-parallel ranks are neighbours, then come data-parallel ranks, then stages,
as in Megatron-LM; how many there are shows in the shapes.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.models.spec.names import MTP_WEIGHTS
from trainer.parallel.mesh import divisors
from trainer.parallel.sharding import shard_range
from trainer.trace.bounds import UNIT_ROUNDOFFS, coarsest
from trainer.trace.folder import Trace, layer_of, right_keys
from trainer.trace.record import Key, Kind, Piece
from trainer.trace.sketch import Place, Summary, matrix_shape, summarize

_ENTRY = re.compile(r"(?:Cell|Module)\.(?:\d+\.)?(.+)\.[A-Za-z_]\w*\.(forward|backward|parameters_grad)\.(\d+)")
_IN_MTP = re.compile(r"(?:^|\.)mtp\.(?:layers\.)?(\d+)(?:\.(.+))?$")
_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.(.+))?$")
_FOLDER = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d+)")
_PARTS = {
    "self_attention": "self_attn", "attention": "self_attn", "attn": "self_attn", "feed_forward": "mlp",
    "linear_proj": "o_proj", "wo": "o_proj", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "w1": "gate_proj",
    "w2": "down_proj", "w3": "up_proj", "linear_fc2": "down_proj", "pre_mlp_layernorm": "post_attention_layernorm",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "q_layernorm": "q_norm",
    "k_layernorm": "k_norm", "router": "gate",
}  # fmt: skip
"""Parts of the names of modules in MindSpore Transformers and Megatron-LM -> Hugging Face's."""
_OUTSIDE = {
    "embed_tokens": "model.embed_tokens", "tok_embeddings": "model.embed_tokens",
    "word_embeddings": "model.embed_tokens", "norm": "model.norm", "norm_out": "model.norm",
    "final_layernorm": "model.norm", "lm_head": "lm_head", "output_layer": "lm_head",
}  # fmt: skip
_IN_MODULE = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
"""Parts of modules of multi-token prediction beside their layer, in Megatron-LM -> Hugging Face's."""
_JOINED = ("linear_qkv", "w_qkv", "linear_fc1", "w_gate_hidden", "qkv_proj", "gate_up_proj")


class _Entry(NamedTuple):
    """An entry of dump.json about a module."""

    name: str  # Hugging Face's
    what: str  # forward, backward or parameters_grad
    call: int
    tensors: Mapping[str, Any]


@dataclass
class _Rank:
    """The dump of one rank in a step."""

    rank: int
    folder: Path
    entries: list[_Entry]


def is_msprobe_dump(folder: Path) -> bool:
    """Returns whether a folder is a dump_path of msprobe, or the pynative part of one."""
    return bool(_step_folders(folder))


def _step_folders(folder: Path) -> dict[int, Path]:
    folders: dict[int, Path] = {}
    for path in (*sorted(folder.glob("step*")), *sorted((folder / "pynative").glob("step*"))):
        match = _FOLDER.fullmatch(path.name)
        if match and any(path.glob("*/dump.json")):
            folders.setdefault(int(match[1]), path)
    return dict(sorted(folders.items()))


def read_dump(folder: Path, right: Trace) -> Trace:
    """Reads a dump; the trace with the right numbers says which tensors there are, and their unsharded shapes.

    The first step of the dump is compared with the first one of the trace.

    Raises:
        UserError: The dump is damaged, or no entry stands for a tensor of the trace.
    """
    trace = Trace(folder, {})
    last = max((key.step for key in right.pieces), default=0)
    for number, path in enumerate(_step_folders(folder).values(), start=1):
        if number > last:
            trace.unmatched.setdefault(path.name, f"the right trace ends with step {last}")
            continue
        ranks = [_read_rank(rank, each, trace) for rank, each in enumerate_ranks(path)]
        try:
            _Step(right, trace, ranks, number).add_pieces()
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            # Of the contents of a dump.json, or of a tensor's file.
            raise UserError(f"is damaged: {error}", where="flag --against", value=str(path), fix="dump again") from None
    if not trace.pieces:
        reasons = "; ".join(why for why, _ in Counter(trace.unmatched.values()).most_common(3))
        rule = f"none of its {len(trace.unmatched)} entries stands for a tensor of the right trace ({reasons})"
        fix = 'dump with "level": "L0" or "mix", and pass the model to PrecisionDebugger.start'
        raise UserError(rule, where="flag --against", value=str(folder), fix=fix)
    dtypes = {piece.dtype for pieces in trace.pieces.values() for piece in pieces if piece.key.kind == "activation"}
    if dtypes:
        trace.facts = {"compute_dtype": coarsest(dtypes)}
    return trace


def enumerate_ranks(step: Path) -> list[tuple[int, Path]]:
    """Returns the ranks of a step with their folders; a single process is rank 0."""
    folders = [path.parent for path in step.glob("rank*/dump.json")]
    numbered = {int(match[1]): folder for folder in folders if (match := _RANK.fullmatch(folder.name))}
    return sorted(numbered.items()) or [(0, path.parent) for path in sorted(step.glob("proc*/dump.json"))[:1]]


def _read_rank(rank: int, folder: Path, trace: Trace) -> _Rank:
    path = folder / "dump.json"
    try:
        data = dict(json.loads(read_bytes(path))["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "call PrecisionDebugger.stop() and step(), which write it, and dump again"
        rule = f"cannot be read as a dump.json of msprobe: {error}"
        raise UserError(rule, where="flag --against", value=str(path), fix=fix) from None
    entries = []
    for text, tensors in data.items():
        match = _ENTRY.fullmatch(text)
        if match is None:
            trace.unmatched.setdefault(text.split(".")[0] + ".*", "an API, not a module")
            continue
        if not isinstance(tensors, dict) or tensors.get("is_recompute"):
            continue
        name = module_name(match[1])
        if not name:
            trace.unmatched.setdefault(match[1], "no module of the right trace has this name")
            continue
        entries.append(_Entry(name, match[2], int(match[3]), tensors))
    return _Rank(rank, folder, entries)


def module_name(path: str) -> str:
    """Returns Hugging Face's name of a module of MindSpore Transformers, Megatron-LM or Hugging Face; "" if unknown.

    Of a module of multi-token prediction it is ``mtp.N`` for its layer: the model says which layer that is.
    """
    match = _IN_MTP.search(path)
    if match is not None:
        parts = (match[2] or "").split(".")
        name = f"mtp.{match[1]}"
        if parts[0] == "transformer_layer":
            return ".".join([name, *(_PARTS.get(part, part) for part in parts[1:])])
        if parts[0] in _IN_MODULE:
            return f"{name}.{_IN_MODULE[parts[0]]}"
        return ""
    match = _IN_LAYER.search(path)
    if match is None:
        return _OUTSIDE.get(path.split(".")[-1], "")
    name = f"model.layers.{match[1]}"
    if match[2] is None:
        return name
    parts = [_PARTS.get(part, part) for part in match[2].split(".")]
    return ".".join([name, *parts])


class _Step:
    """Turns the entries of a step into pieces."""

    def __init__(self, right: Trace, trace: Trace, ranks: Sequence[_Rank], step: int) -> None:
        self.right = right
        self.trace = trace
        self.ranks = ranks
        self.entries = [entry for rank in ranks for entry in rank.entries]
        self.step = step
        self.sequences = _sequences_in_order(right, step)
        shapes = {key.name: pieces[0].place.shape for key, pieces in right.pieces.items() if key.kind == "activation"}
        self.widths = {name: width for name, (_, width) in shapes.items()}
        self.length = next((length for length, _ in shapes.values()), 0)
        self.tensor = self._tensor_ranks()
        self.context = self._context_ranks()
        modules = {layer_of(key.name) for key in right.pieces if key.name.endswith(MTP_WEIGHTS)}
        self.first_module = min((layer for layer in modules if layer is not None), default=None)
        self.layers = {
            rank.rank: {layer for entry in rank.entries if (layer := layer_of(entry.name)) is not None}
            for rank in sorted(ranks, key=lambda each: each.rank)
        }
        self.offsets = self._first_layers()
        stages = len({self.offsets[rank] + min(layers, default=0) for rank, layers in self.layers.items()}) or 1
        self.replicas = max(1, len(ranks) // (self.tensor * stages))

    def _tensor_ranks(self) -> int:
        """Returns the number of tensor-parallel ranks, from the width of the heads or of an o_proj weight."""
        for entry in self.entries:
            local = _shape((entry.tensors.get("parameters") or {}).get("weight"))
            key = Key(self.step, "weight", f"{entry.name}.weight")
            if entry.name.endswith(("o_proj", "down_proj")) and local and key in self.right.pieces:
                return max(1, self.right.pieces[key][0].place.shape[1] // local[-1])
        return 1

    def _context_ranks(self) -> int:
        """Returns into how many parts context parallelism cuts a sequence.

        The input of an o_proj has all tokens of a rank's part of the sequence, also with sequence parallelism.
        """
        for entry in self.entries:
            shape = _shape(_first(entry.tensors.get("input_args"))) or ()
            if entry.what != "forward" or not entry.name.endswith("o_proj") or len(shape) < 2 or not self.length:
                continue
            sizes = shape[:-1]  # [T, B], [B, T] or [B * T]
            if any(size % self.length == 0 for size in sizes):
                return 1
            return min((self.length // size for size in sizes if self.length % size == 0), default=1)
        return 1

    def _first_layers(self) -> dict[int, int]:
        """Returns the first layer of each rank: stages may count their layers from 0."""
        total = self.right.facts["layers"]
        if self.first_module is not None:
            total = self.first_module
        counts = [len(layers) for layers in self.layers.values()]
        if all(layers == set(range(len(layers))) for layers in self.layers.values()):
            for stages in divisors(len(counts)):
                size = len(counts) // stages
                of_stages = counts[::size]
                if sum(of_stages) == total and counts == [count for count in of_stages for _ in range(size)]:
                    return {rank: sum(of_stages[: place // size]) for place, rank in enumerate(self.layers)}
        return dict.fromkeys(self.layers, 0)

    def add_pieces(self) -> None:
        """Adds the pieces of all ranks to the trace."""
        for rank in self.ranks:
            tensor_rank = rank.rank % self.tensor
            replica = rank.rank // self.tensor % self.replicas
            self.trace.coordinates[rank.rank] = {
                "pipeline": rank.rank // (self.tensor * self.replicas), "data": replica, "context": 0,
                "tensor": tensor_rank,
            }  # fmt: skip
            entries = [entry for each in rank.entries if (entry := self._with_global_layer(each, rank.rank))]
            calls = _ordinals(entries)
            for entry in entries:
                for kind, name, tensor in _tensors(entry):
                    if kind in ("weight", "gradient"):
                        if kind == "gradient" and (max(calls.values(), default=0) or self.replicas > 1):
                            why = "a gradient of one micro-batch of one replica; the right trace has their sum"
                            self.trace.unmatched.setdefault("parameters_grad.*", why)
                            continue
                        self._add_parameter(rank, kind, name, tensor, tensor_rank)
                    else:
                        order = calls.get((entry.name, entry.call), entry.call) * self.replicas + replica
                        self._add_activation(rank, kind, name, tensor, tensor_rank, order)

    def _with_global_layer(self, entry: _Entry, rank: int) -> _Entry | None:
        """Returns an entry with the name of the right trace; None where that has no such module."""
        if entry.name.startswith("mtp."):
            _, number, *rest = entry.name.split(".")
            if self.first_module is None:
                self.trace.unmatched.setdefault(entry.name, "the right trace has no multi-token prediction")
                return None
            return entry._replace(name=".".join(["model.layers", str(self.first_module + int(number)), *rest]))
        layer = layer_of(entry.name)
        offset = self.offsets[rank]
        if layer is None or not offset:
            return entry
        rest_of_name = entry.name.removeprefix(f"model.layers.{layer}")
        return entry._replace(name=f"model.layers.{layer + offset}{rest_of_name}")

    def _add_parameter(self, rank: _Rank, kind: Kind, name: str, tensor: Mapping[str, Any], tensor_rank: int) -> None:
        key = Key(self.step, kind, name)
        if key not in self.right.pieces:
            self.trace.unmatched.setdefault(name, _why_unknown(name, "no parameter of the right trace has this name"))
            return
        full = self.right.pieces[key][0].place.shape
        local = matrix_shape(_shape(tensor) or ())
        rows, columns = (self._range(*sizes, tensor_rank) for sizes in zip(full, local, strict=True))
        place = Place(full, (rows,), columns)
        if place.size != math.prod(local):
            self.trace.unmatched.setdefault(name, f"of shape {list(local)}, where the right one is {list(full)}")
            return
        self._add(rank, key, tensor, place)

    def _range(self, full: int, local: int, tensor_rank: int) -> tuple[int, int]:
        """Returns the range of an axis that a tensor-parallel rank has."""
        if local == full:
            return 0, full
        part = shard_range(full, tensor_rank, self.tensor)
        return part.start, part.stop

    def _add_activation(
        self, rank: _Rank, kind: Kind, name: str, tensor: Mapping[str, Any], tensor_rank: int, order: int
    ) -> None:
        width = self.widths.get(name)
        shape = _shape(tensor)
        if width is None or not shape:
            self.trace.unmatched.setdefault(name, _why_unknown(name, "the right trace does not record this output"))
            return
        if self.context > 1:
            part = f"1/{self.context} of the tokens of each sequence"
            why = f"context parallelism: a rank has {part}, and the dump does not say which"
            self.trace.unmatched.setdefault(name, why)
            return
        columns = self._range(width, shape[-1], tensor_rank)
        rows = math.prod(shape[:-1])
        all_rows = rows
        if rows % self.length and rows * self.tensor % self.length == 0:
            all_rows = rows * self.tensor  # sequence parallelism
        count = all_rows // self.length
        sequences = self.sequences[order * count : (order + 1) * count]
        if shape[-1] != columns[1] - columns[0] or len(sequences) != count or not count:
            why = f"of shape {list(shape)}, which is no whole micro-batch of sequences of {self.length} tokens"
            self.trace.unmatched.setdefault(name, why)
            return
        file = self._file(rank, tensor)
        if file is not None and all_rows == rows:
            for number, sequence in enumerate(sequences):
                array = _sequence_rows(np.lib.format.open_memmap(file, "r"), number, count, self.length)
                place = Place((self.length, width), ((0, self.length),), columns)
                key = Key(self.step, kind, name, sequence)
                self.trace.add([Piece(key, rank.rank, place, _dtype(tensor), summarize(array, place))])
            return
        start = 0
        if all_rows != rows:
            start = tensor_rank * rows
        place = Place((all_rows, width), ((start, start + rows),), columns)
        self._add(rank, Key(self.step, kind, name, "+".join(sequences)), tensor, place)

    def _add(self, rank: _Rank, key: Key, tensor: Mapping[str, Any], place: Place) -> None:
        file = self._file(rank, tensor)
        if file is not None:
            array = np.lib.format.open_memmap(file, "r")
            summary = summarize(array.reshape(-1, place.columns[1] - place.columns[0]), place)
        else:
            largest, smallest, mean, norm = (_number(tensor.get(name)) for name in ("Max", "Min", "Mean", "Norm"))
            if tensor.get("Norm") is None:
                self.trace.unmatched.setdefault(key.name, "has no statistics")
                return
            summary = Summary(place.size, largest, smallest, mean, norm)
        self.trace.add([Piece(key, rank.rank, place, _dtype(tensor), summary)])

    def _file(self, rank: _Rank, tensor: Mapping[str, Any]) -> Path | None:
        name = tensor.get("data_name")
        if not isinstance(name, str) or not name.endswith(".npy") or "/" in name:
            return None
        path = rank.folder / "dump_tensor_data" / name
        if path.is_file():
            return path
        return None


def _sequences_in_order(right: Trace, step: int) -> list[str]:
    """Returns the sequences of a step in the order in which data-parallel ranks take them, micro-batch by micro-batch.

    Ranks that compute a micro-batch together have the same sequences, which count once.
    """
    by_replica: dict[int, list[list[str]]] = {}
    for rank, steps in sorted(right.micro_batches.items()):
        replica = right.coordinates.get(rank, {}).get("data", rank)
        if step <= len(steps):
            by_replica.setdefault(replica, steps[step - 1])
    longest = max((len(each) for each in by_replica.values()), default=0)
    order: list[str] = []
    for number in range(longest):
        for micro_batches in by_replica.values():
            if number < len(micro_batches):
                order += micro_batches[number]
    return order


def _why_unknown(name: str, why: str) -> str:
    """Returns why the right trace has no tensor of a name."""
    if any(joined in name for joined in _JOINED):
        return "one matrix there, several in the right trace"
    return why


def _ordinals(entries: Sequence[_Entry]) -> dict[tuple[str, int], int]:
    """Returns the number of the micro-batch of each call of a module; recomputed calls, left out before, are numbered
    too."""
    calls: dict[str, list[int]] = {}
    for entry in entries:
        if entry.what == "forward":
            calls.setdefault(entry.name, []).append(entry.call)
    return {(name, call): place for name, numbers in calls.items() for place, call in enumerate(sorted(set(numbers)))}


def _tensors(entry: _Entry) -> Iterator[tuple[Kind, str, Mapping[str, Any]]]:
    """Yields kind, name and data of the tensors of an entry that a trace has."""
    tensors = entry.tensors
    if entry.what == "forward":
        output = _first(tensors.get("output"))
        if output is not None:
            yield "activation", entry.name, output
        first_input = _first(tensors.get("input_args"))
        if first_input is not None and entry.name.endswith("o_proj"):
            yield "activation", f"{entry.name}.input", first_input
        if entry.call == 0:
            for name, tensor in (tensors.get("parameters") or {}).items():
                if isinstance(tensor, dict):
                    yield "weight", f"{entry.name}.{name}", tensor
    elif entry.what == "backward":
        gradient = _first(tensors.get("input"))
        if gradient is not None and not entry.name.endswith(("_proj", "layernorm", "_norm")):
            # What the feed-forward sublayer adds has the gradient of the stream behind the layer.
            yield "activation gradient", entry.name.removesuffix(".mlp"), gradient
    else:
        for name, values in tensors.items():
            gradient = _first(values)
            if gradient is not None:
                yield "gradient", f"{entry.name}.{name}", gradient


def _first(values: Any) -> Mapping[str, Any] | None:
    """Returns the first tensor of a list of arguments or results."""
    if not isinstance(values, list):
        values = [values]
    for value in values:
        if isinstance(value, dict) and "shape" in value and value["shape"]:
            return value
        if isinstance(value, list) and (tensor := _first(value)) is not None:
            return tensor
    return None


def _shape(tensor: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("shape"), list):
        return None
    return tuple(tensor["shape"])


def _dtype(tensor: Mapping[str, Any]) -> str:
    name = str(tensor.get("dtype", "")).lower().split(".")[-1]
    if name in UNIT_ROUNDOFFS:
        return name
    return "float32"


def _number(value: Any) -> float:
    if type(value) in (int, float):
        return float(value)
    return math.nan


def _sequence_rows(array: np.ndarray, number: int, count: int, length: int) -> np.ndarray:
    """Returns the rows of one sequence of a micro-batch: [B, T, C], [T, B, C] or [B * T, C]; the file stays on disk."""
    width = array.shape[-1]
    if array.ndim == 3 and array.shape[:2] == (length, count) and count != length:
        return array[:, number]
    return array.reshape(-1, width)[number * length : (number + 1) * length]


def scale_gradients(trace: Trace, right: Trace) -> float | None:
    """Brings the gradients of a dump to the scale of the right trace; returns the factor that they had.

    A program may multiply its loss: by a loss scale, or by the number of micro-batches that it does not divide by. The
    factor is the median of the ratios of norms; None where there is no gradient.
    """
    ratios = []
    for key, pieces in trace.pieces.items():
        if key.kind in ("activation gradient", "gradient"):
            parts = right_keys(key, right)
            if all(part in right.pieces for part in parts) and pieces[0].place.is_whole:
                norm = math.hypot(*(right.pieces[part][0].summary.norm for part in parts))
                if norm > 0 and math.isfinite(pieces[0].summary.norm):
                    ratios.append(pieces[0].summary.norm / norm)
    if not ratios:
        return None
    factor = float(np.median(ratios))
    for key, pieces in trace.pieces.items():
        if key.kind in ("activation gradient", "gradient"):
            trace.pieces[key] = [replace(piece, summary=_divided(piece.summary, factor)) for piece in pieces]
    return factor


def _divided(summary: Summary, factor: float) -> Summary:
    sketch = summary.sketch
    if sketch is not None:
        sketch = sketch / factor
    scaled = {name: getattr(summary, name) / factor for name in ("largest", "smallest", "mean", "norm")}
    return replace(summary, **scaled, checksum=None, sketch=sketch)
