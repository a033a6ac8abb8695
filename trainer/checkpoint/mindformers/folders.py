"""Finds and opens checkpoints of MindSpore Transformers; their shards become complete tensors, read when they are used.

    latest_checkpointed_iteration.txt                   8
    iteration_00000008/metadata.json                    which shard of which tensor is in which file
                      /PREFIX-model-0000000-0000002.safetensors, ... , PREFIX-opt-...safetensors, common.json

    checkpoint/rank_0/PREFIX_rank_0-EPOCH_STEP.safetensors, meta.json    versions 1.x, and use_legacy_format
    strategy/ckpt_strategy_rank_0.ckpt                                   how its ranks shard the tensors

    param_name_map.json, part0.safetensors, hyper_param.safetensors      merged by mindspore.unified_safetensors

The first kind is written by mindformers/checkpoint/checkpoint.py and metadata.py, the second by CheckpointMonitor in
mindformers/core/callback/callback.py (read at commit 167a50de). Without redundancy each shard is in one file only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from trainer.checkpoint.mindformers.names import SourceTensor, parameter_name
from trainer.checkpoint.mindformers.strategy import SourceLayout, StrategyError, digits_of, read_strategy
from trainer.checkpoint.store import ENDING, read_safetensors
from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.storage.json_files import Count, JsonError, LenientModel, parse_json
from trainer.storage.tensor_file import LazyArray, merge_shards

OpenFile: TypeAlias = Callable[[Path], dict[str, LazyArray]]
TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
MERGED = "param_name_map.json"
STRATEGY_KEY = "src_strategy_path_or_dir"
_MODEL_FILE = re.compile(r"(?:.+-)?model-(\d{7})-(\d{7})\.safetensors")
_STATE_FILE = re.compile(r"(?:.+-)?opt-(\d{7})-(\d{7})\.safetensors")
_RANK_FOLDER = re.compile(r"rank_(\d+)")
_RANK_FILE = re.compile(r".*-(\d+)_(\d+)\.(safetensors|ckpt)")


class Source(NamedTuple):
    """A checkpoint of MindSpore Transformers.

    Attributes:
        path: The folder of an iteration or of merged files, or the one with the folders of the ranks.
        files: The file of each rank; empty in the first two cases.
        name: What it is, for notes.
    """

    path: Path
    files: dict[int, Path]
    name: str


class _Chunk(LenientModel):
    global_offset: list[Count]
    local_shape: list[Count]


class _Tensor(LenientModel):
    global_shape: list[Count]
    axis_fragmentations: list[Count]
    chunk: list[_Chunk]


class _Place(LenientModel):
    file_name: str


class _Metadata(LenientModel):
    state_dict_metadata: dict[str, _Tensor]
    storage_data: dict[str, list[_Place]]


def find_source(path: Path) -> Source | None:
    """Returns the checkpoint of MindSpore Transformers that a path names, or None if it is something else.

    Raises:
        UserError: It is one that cannot be loaded, such as a .ckpt file.
    """
    if path.suffix == ".ckpt":
        raise _old_format(path)
    try:
        return _find_source(path)
    except OSError:  # `find_checkpoint` reports it
        return None


def _find_source(path: Path) -> Source | None:
    if not path.is_dir():
        return None
    if (path / TRACKER).is_file():
        iteration = _tracked_iteration(path)
        return Source(iteration, {}, iteration.name)
    if (path / MERGED).is_file() or any(_MODEL_FILE.fullmatch(file.name) for file in path.iterdir()):
        return Source(path, {}, path.name)
    if iterations := sorted(path.glob("iteration_[0-9]*")):
        rule = f"the folder has no {TRACKER}, which says the iteration that was saved last"
        raise _problem(path, rule, f"name an iteration, such as {iterations[-1]}")
    for folder in (path, path / "checkpoint", path.parent):
        ranks = _rank_folders(folder)
        if ranks and (folder != path.parent or _RANK_FOLDER.fullmatch(path.name)):
            return _rank_source(folder, ranks)
    if list(path.glob("*.ckpt")) and not list(path.glob(f"*{ENDING}")):
        raise _old_format(path)
    return None


def open_source(
    source: Source, strategy: str = "", *, kind: str = "", numbers: bool = True, world: World = SINGLE_PROCESS
) -> tuple[dict[str, SourceTensor], str]:
    """Opens the weights of a checkpoint, or arrays of its optimizer, unsharded, under the names of its parameters.

    Args:
        kind: The arrays of the optimizer whose names begin so, as adam_m; empty: the weights.
        strategy: `src_strategy_path_or_dir`, a strategy file or a folder of them; empty: those beside the folders.
        numbers, world: See `trainer.checkpoint.weights.read_weights`.

    Returns:
        The tensors, and what to do if they turn out to be shards.

    Raises:
        UserError: A file is missing or damaged, or shards are missing.
    """

    def open_file(file: Path) -> dict[str, LazyArray]:
        """Opens arrays of a file; it is closed if none of them is used, as those of a rank with copies."""
        arrays = read_safetensors(
            file, numbers=numbers, world=world, leave_out=lambda name: not parameter_name(name, kind)
        )
        return {parameter_name(name, kind): array for name, array in arrays.items()}

    if source.files:
        return _open_ranks(source, open_file, strategy, kind)
    return _open_iteration(source.path, cache(open_file), kind), ""


def state_files(source: Source) -> list[Path]:
    """Returns the files that may count the steps of a training: those of the optimizer, or of a rank."""
    if source.files:
        return [source.files[min(source.files)]]
    files = sorted(source.path.glob(f"*{ENDING}"))
    return [file for file in files if _STATE_FILE.fullmatch(file.name)] or files


def _problem(path: Path, rule: str, fix: str, key: str = "") -> UserError:
    return UserError(rule, key=key, value=str(path), fix=fix)


def _old_format(path: Path) -> UserError:
    folder = path.with_name(f"{path.stem}_safetensors")
    command = f"python -c \"import mindspore; mindspore.ckpt_to_safetensors('{path}', '{folder}')\""
    fix = f"convert it with MindSpore, and name {folder}: {command}"
    return _problem(path, "is in MindSpore's .ckpt format, which only MindSpore reads", fix)


# ---- the folder of an iteration --------------------------------------------------------------------------------------


def _tracked_iteration(path: Path) -> Path:
    try:
        folder = path / f"iteration_{int(read_bytes(path / TRACKER)):08d}"
    except (OSError, ValueError):
        rule = f"{TRACKER} does not contain the number of an iteration"
        raise _problem(path, rule, "name the folder of an iteration") from None
    if not folder.is_dir():
        rule = f"{TRACKER} names {folder.name}, which does not exist"
        raise _problem(path, rule, "name the folder of an iteration")
    return folder


def _open_iteration(path: Path, open_file: OpenFile, kind: str) -> dict[str, SourceTensor]:
    """Opens the tensors in the folder of an iteration; a single device writes no metadata.json."""
    if (path / MERGED).is_file():
        arrays = {file.name: open_file(file) for file in sorted(path.glob(f"*{ENDING}"))}
        return {name: SourceTensor(array, file) for file, part in arrays.items() for name, array in part.items()}
    if not (path / METADATA).exists():
        pattern = _MODEL_FILE
        if kind:
            pattern = _STATE_FILE
        files = [file for file in sorted(path.iterdir()) if pattern.fullmatch(file.name)]
        if not files:
            return {}
        match = pattern.fullmatch(files[0].name)
        assert match is not None
        if len(files) > 1 or int(match[2]) > 1:
            rule = f"the folder has no {METADATA}, which says where the shards of its tensors are"
            raise _problem(path, rule, "copy the complete folder")
        return {name: SourceTensor(array, files[0].name) for name, array in open_file(files[0]).items()}
    try:
        metadata: _Metadata = parse_json(read_bytes(path / METADATA), _Metadata, METADATA)
    except (JsonError, OSError) as error:
        rule = f"{METADATA} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise _problem(path, rule, "copy the complete folder") from None
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if parameter := parameter_name(name, kind):
            tensors[parameter] = _iteration_tensor(path, name, tensor, metadata.storage_data, open_file, kind)
    return tensors


def _iteration_tensor(
    path: Path, name: str, tensor: _Tensor, places: Mapping[str, list[_Place]], open_file: OpenFile, kind: str
) -> SourceTensor:
    """Opens a tensor of metadata.json from the first file that has each of its shards."""
    shards = {}
    first = ""
    for chunk in tensor.chunk:
        place = places.get(str((name, tuple(chunk.global_offset))))
        if not place:
            rule = f"{METADATA} says of no file that it has the shard {chunk.global_offset} of {name}"
            raise _problem(path, rule, "use another checkpoint")
        file = place[0].file_name
        first = first or file
        array = open_file(path / file).get(parameter_name(name, kind))
        if array is None or array.shape != tuple(chunk.local_shape):
            rule = f"{file} does not have the shard of {name} of shape {chunk.local_shape} that {METADATA} says"
            raise _problem(path, rule, "copy the complete folder, or use another checkpoint")
        # The offset is the number of the shard, those along the last axis first.
        counts = tensor.axis_fragmentations
        number = sum(chunk.global_offset)
        if number >= math.prod(counts) or len(counts) != array.ndim or len(chunk.global_offset) != 1:
            rule = f"{METADATA}: {name} has no shard {chunk.global_offset}"
            raise _problem(path, rule, "use another checkpoint")
        index = digits_of(number, counts)
        shards[tuple(at * size for at, size in zip(index, array.shape, strict=True))] = array
    return _merge_tensor(path, name, tuple(tensor.global_shape), shards, first)


def _merge_tensor(
    path: Path, name: str, shape: tuple[int, ...], shards: Mapping[tuple[int, ...], LazyArray], file: str
) -> SourceTensor:
    """Returns a tensor of its shards; raises a UserError if some are missing."""
    if not _is_tiled(shape, shards):
        rule = f"{len(shards)} shards of {name} (the first in {file}) are not all of a tensor of shape {list(shape)}"
        raise _problem(path, rule, "copy the files of all ranks, or use another checkpoint")
    if len(shards) == 1:
        return SourceTensor(next(iter(shards.values())), file)
    return SourceTensor(merge_shards(shape, shards), file)


def _is_tiled(shape: tuple[int, ...], shards: Mapping[tuple[int, ...], LazyArray]) -> bool:
    """Returns whether shards, which start at multiples of their shapes, cover an array of this shape once."""
    local_shapes = {shard.shape for shard in shards.values()}
    if len(local_shapes) != 1:
        return False
    (local_shape,) = local_shapes
    if len(local_shape) != len(shape) or len(shards) * math.prod(local_shape) != math.prod(shape):
        return False
    bounds = list(zip(local_shape, shape, strict=True))
    return all(at + local <= size for start in shards for at, (local, size) in zip(start, bounds, strict=True))


# ---- folders of ranks ------------------------------------------------------------------------------------------------


def _rank_folders(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    folders = {}
    for path in folder.iterdir():
        match = _RANK_FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir() and (list(path.glob(f"*{ENDING}")) or list(path.glob("*.ckpt"))):
            folders[int(match[1])] = path
    return dict(sorted(folders.items()))


def _rank_source(folder: Path, ranks: Mapping[int, Path]) -> Source:
    """Selects the newest step whose file every rank has."""
    by_step: dict[tuple[int, int], dict[int, Path]] = {}
    for rank, path in ranks.items():
        files = sorted(path.glob(f"*{ENDING}"))
        if not files:
            raise _old_format(folder)
        for file in files:
            match = _RANK_FILE.fullmatch(file.name)
            step = (0, 0)
            if match is not None:
                step = (int(match[1]), int(match[2]))
            if rank in by_step.setdefault(step, {}):
                rule = f"{path.name} has several files of a step, {by_step[step][rank].name} and {file.name}"
                raise _problem(folder, rule, "leave one of them there")
            by_step[step][rank] = file
    complete = [step for step, files in by_step.items() if len(files) == len(ranks)]
    if not complete or list(ranks) != list(range(len(ranks))):
        rule = f"there is no step that all ranks have saved: {len(ranks)} folders from {min(ranks)} to {max(ranks)}"
        raise _problem(folder, rule, "copy the folders of all ranks")
    epoch, step = max(complete)
    name = f"{len(ranks)} rank folders"
    if epoch:
        name = f"epoch {epoch}, step {step} of {name}"
    return Source(folder, by_step[max(complete)], name)


def _open_ranks(
    source: Source, open_file: OpenFile, strategy: str, kind: str
) -> tuple[dict[str, SourceTensor], str]:
    """Opens the tensors of all ranks; those that a strategy file shards are merged."""
    layouts, folder = _open_strategies(source, strategy)
    tensors: dict[str, dict[tuple[int, ...], LazyArray]] = {}
    files: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, file in source.files.items():
        for name, array in open_file(file).items():
            start = (0,) * array.ndim
            shape = array.shape
            of_rank = layouts.get(rank, {})
            layout = of_rank.get(f"{kind}.{name}", of_rank.get(name))  # an array lies as its parameter does
            if layout is not None and len(layout.tensor_map) == array.ndim:
                try:
                    start, shape = layout.place(rank, array.shape)
                except StrategyError as error:
                    rule = f"the strategy of {name} cannot be used: {error}"
                    raise _problem(folder, rule, _merge_fix(source, folder), STRATEGY_KEY) from None
            files.setdefault(name, f"{file.parent.name}/{file.name}")
            if shapes.setdefault(name, shape) != shape:
                rule = f"{name} has other shapes in {files[name]} and {file.parent.name}/{file.name}: shards of a job"
                raise _problem(source.path, rule, _merge_fix(source, folder))
            tensors.setdefault(name, {}).setdefault(start, array)
    merged = {
        name: _merge_tensor(source.path, name, shapes[name], shards, files[name])
        for name, shards in tensors.items()
    }
    if layouts:
        return merged, ""
    return merged, _merge_fix(source, folder)


def _merge_fix(source: Source, strategy: Path) -> str:
    """Returns the fix for shards without a readable strategy: its key, or the command that merges them."""
    match = _RANK_FILE.fullmatch(source.files[0].name)
    suffix = "1_1"
    if match is not None:
        suffix = f"{match[1]}_{match[2]}"
    command = (
        f"python toolkit/safetensors/unified_safetensors.py --mindspore_ckpt_dir {source.path} --src_strategy_dirs"
        f" {strategy} --output_dir {source.path.parent} --file_suffix {suffix}"
    )
    return (
        f"name the folder of the job's strategy files as {STRATEGY_KEY}, or merge the shards in MindSpore Transformers'"
        f" repository and name {source.path.parent}/{suffix}_ckpt_convert/unified_safe: {command}"
    )


def _open_strategies(source: Source, strategy: str) -> tuple[dict[int, dict[str, SourceLayout]], Path]:
    """Returns the layouts of each rank, and the folder of the strategy files; no layouts if it does not exist."""
    folder = source.path.parent / "strategy"
    if strategy:
        folder = Path(strategy).expanduser()
    elif (source.path / "strategy").is_dir():
        folder = source.path / "strategy"
    files = [folder]
    if folder.is_dir() or not strategy:
        files = sorted(folder.rglob("*.ckpt"))
    if not files and not strategy:
        return {}, folder
    layouts: dict[int, dict[str, SourceLayout]] = {}
    try:
        if not files:
            raise StrategyError("the folder has no .ckpt file")
        read = {file: read_strategy(file) for file in files}
        for rank in source.files:
            matching = [file for file in files if re.search(rf"rank_{rank}\.ckpt$", file.name)] or files
            layouts[rank] = {}
            for file in matching:
                layouts[rank] |= _stage_layouts(read[file], rank)
    except (StrategyError, OSError) as error:
        rule = f"the strategy of its shards cannot be read: {getattr(error, 'strerror', None) or error}"
        raise _problem(folder, rule, _merge_fix(source, folder), STRATEGY_KEY) from None
    return layouts, folder


def _stage_layouts(layouts: Mapping[str, SourceLayout], rank: int) -> dict[str, SourceLayout]:
    """Returns the layouts of a rank's stage: a merged file has the number of a stage before each name."""
    stage_layouts: dict[str, SourceLayout] = {}
    for name, layout in layouts.items():
        stage, dash, rest = name.partition("-")
        if not dash or not stage.isdecimal():
            stage_layouts[name] = layout
        elif int(stage) == rank // math.prod(layout.device_matrix):
            stage_layouts[rest] = layout
    return stage_layouts
