"""Translates the section parallelism: its degrees become those of explicit mode, which has them all."""

from __future__ import annotations

import re
from typing import Any

from trainer.config.note import Note
from trainer.config.pynative.translation import Translation
from trainer.config.read.nodes import Scalar, find_entry
from trainer.config.read.rows import Row
from trainer.config.schema.fields import aliases_of
from trainer.config.schema.model import ModelConfig

_STAGES = "parallelism.pipeline_parallel"
_CHUNKS = "parallelism.pipeline_parallel_interleave_num"
_METHOD = "parallelism.context_parallel_method"
_SHARD = "parallelism.data_parallel_shard"
_RESHARDING = "parallelism.reshard_after_forward_policy"
LEVELS = {"optim": "level1", "optim_grads": "level2", "optim_grads_params": "level3"}
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def set_degree(work: Translation, row: Row) -> None:
    """Sets a degree of parallelism; one above 1 asks for explicit mode."""
    degree = work.values[row.old]
    if degree is None:
        return
    work.set_key(row.new, degree, row.old)
    if degree > 1 and find_entry(work.root, "use_parallel") is None:
        work.set_key("use_parallel", True, row.old)
        work.set_key("parallel.parallel_mode", 0, row.old)


def set_sequence_parallel(work: Translation, row: Row) -> None:
    """Sets sequence parallelism, without which MindSpore Transformers has no tensor parallelism."""
    is_on = work.values[row.old]
    if row.old in work.entries:
        work.set_key(row.new, is_on, row.old)
    if _degree(work, "parallelism.tensor_parallel") > 1 and not is_on:
        text = f"{row.old} false: tensor parallelism without it, which MindSpore Transformers' trainer refuses"
        work.notes.append(Note(text, "parallel"))


def set_ulysses_degree(work: Translation, row: Row) -> None:
    """Sets how many ranks of context parallelism exchange heads; only the hybrid method needs it."""
    degree = work.values[row.old]
    method = work.values[_METHOD]
    ranks = _degree(work, "parallelism.context_parallel")
    if method == "hybrid" and degree is not None:
        work.set_key(row.new, degree, row.old)
    elif method == "hybrid" and ranks > 1:
        place = work.place(_METHOD)
        work.problem(row.old, f"{_METHOD} hybrid needs it", "write a divisor of context_parallel", place=place)
    elif method == "ulysses" and degree not in (None, ranks):
        work.problem(row.old, f"with {_METHOD} ulysses it is context_parallel {ranks}", "leave it out, or write hybrid")
    elif method == "colossal" and degree is not None:
        work.notes.append(Note(f"{row.old} {degree}: not used, {_METHOD} is colossal", "ignored"))


_MOST_EXAMPLES = 64  # ranges that a message shows


def set_stage_layers(work: Translation, row: Row) -> None:
    """Sets the layers of pipeline stages from a list of ranges for each of them: "0-3,8-11" has two model chunks."""
    written = work.values[row.old]
    stages = _degree(work, _STAGES)
    chunks = _degree(work, _CHUNKS)
    if written in (None, "auto"):
        return
    if stages == 1:
        work.notes.append(Note(f"{row.old}: not used, {_STAGES} is 1", "ignored"))
        return
    name, layers = _number_of_layers(work)
    fix = "write auto"
    if stages * chunks <= _MOST_EXAMPLES:
        fix += f", or for example {_even_ranges(layers, stages, chunks)}"
    ranges = _ranges(written)
    if ranges is None:
        work.problem(row.old, "must be auto or a list of ranges of layers", fix)
        return
    if len(ranges) != stages or any(len(of_stage) != chunks for of_stage in ranges):
        rule = f"must have a range for each of {stages} stages ({_STAGES})"
        if chunks > 1:
            rule = f"must have {chunks} ranges ({_CHUNKS}) for each of {stages} stages ({_STAGES})"
        work.problem(row.old, rule, fix)
        return
    sizes = []
    first = 0
    for begin, end in (of_stage[chunk] for chunk in range(chunks) for of_stage in ranges):
        if begin != first or end < begin:
            work.problem(row.old, f"has the range {begin}-{end} where one from layer {first} on belongs", fix)
            return
        sizes.append(end + 1 - begin)
        first = end + 1
    if layers != first:
        total = " + ".join(map(str, sizes))
        work.problem(row.old, f"has {total} = {first} layers, and the model has {name} {layers}", fix)
        return
    offset: list[Any] = [size - first // (stages * chunks) for size in sizes]
    if chunks > 1:
        offset = [offset[start : start + stages] for start in range(0, len(sizes), stages)]
    work.set_key(row.new, offset, row.old)


def set_schedule(work: Translation, row: Row) -> None:
    """Sets the order of a pipeline's micro-batches; as there, 1f1b with several chunks is interleaved."""
    if row.old in work.entries:
        work.set_key(row.new, row.choices[work.values[row.old]], row.old)
    if _degree(work, _CHUNKS) > 1:
        work.set_key("parallel.pipeline_config.pipeline_interleave", True, _CHUNKS)
    elif work.values[row.old] == "interleaved_1f1b" and _degree(work, _STAGES) > 1:
        work.problem(row.old, f"needs {_CHUNKS} of at least 2", "write 1f1b")


def set_sharding(work: Translation, row: Row) -> None:
    """Sets how many data-parallel ranks shard the model; the others have copies."""
    ranks = work.values[row.old]
    if ranks < 1 and ranks != -1:
        work.problem(row.old, "must be -1 or at least 1", "write -1 for all data-parallel ranks")
    if ranks != 1:
        work.set_key(row.new, True, row.old)
    if ranks > 1:
        work.set_key("parallel.parallel_optimizer_config.optimizer_weight_shard_size", ranks, row.old)


def set_sharding_level(work: Translation, row: Row) -> None:
    """Sets what data-parallel ranks shard.

    The default policy reshards weights after the forward pass where MindSpore Transformers' does, without a pipeline,
    except on an Ascend, where explicit mode cannot do it yet.
    """
    level = row.choices[work.values[row.old]]
    policy = work.values[_RESHARDING]
    if work.values[_SHARD] == 1:
        for name in sorted({row.old, _RESHARDING} & work.entries.keys()):
            work.notes.append(Note(f"{name} {work.values[name]}: not used, {_SHARD} is 1", "ignored"))
        return
    source = row.old
    if level == "level3":
        level, source = _level_of_policy(work, policy, row.old)
    elif policy != "default":
        work.notes.append(Note(f"{_RESHARDING} {policy}: not used, {row.old} shards no weights", "ignored"))
    work.set_key(row.new, level, source)


def _level_of_policy(work: Translation, policy: str, strategy: str) -> tuple[str, str]:
    """Returns the level of a file whose ranks shard weights, and the key that decides it."""
    is_ascend = work.values["context.device_target"] == "Ascend"
    if policy == "always" and is_ascend:
        rule = "ranks of an Ascend do not yet reshard weights after the forward pass"
        work.problem(_RESHARDING, rule, "write never or default, or set context.device_target to CPU")
    elif policy == "always":
        return "level3", _RESHARDING
    elif policy == "default" and _degree(work, _STAGES) == 1 and not is_ascend:
        return "level3", strategy
    return "level2", _RESHARDING


def _degree(work: Translation, key: str) -> int:
    return work.values[key] or 1


def _ranges(written: Any) -> list[list[tuple[int, int]]] | None:
    """Returns the ranges of layers of each stage; None if the value is not a list of them."""
    if not isinstance(written, list):
        return None
    ranges = []
    for item in written:
        matches = [_RANGE.fullmatch(text) for text in str(item).split(",")]
        ranges.append([(int(one[1]), int(one[2] or one[1])) for one in matches if one is not None])
        if None in matches:
            return None
    return ranges


def _even_ranges(layers: Any, stages: int, chunks: int) -> list[str]:
    """Returns ranges of nearly equal lengths for each stage; of two layers for each range if `layers` is no number."""
    pieces = stages * chunks
    if not isinstance(layers, int) or layers < pieces:
        layers = 2 * pieces
    bounds = [piece * layers // pieces for piece in range(pieces + 1)]
    ranges = [f"{bounds[piece]}-{bounds[piece + 1] - 1}" for piece in range(pieces)]
    return [", ".join(ranges[stage::stages]) for stage in range(stages)]


def _number_of_layers(work: Translation) -> tuple[str, Any]:
    """Returns the key that has the number of layers, as the file writes it, and its value; None without one."""
    names = ["num_layers", *aliases_of(ModelConfig.model_fields["num_layers"])]
    for name in names:
        entry = find_entry(work.root, f"model.model_config.{name}")
        if entry is not None and isinstance(entry.node, Scalar):
            return f"model.{name}", entry.node.value
    return "model.num_hidden_layers", None
