"""The training in a checkpoint of MindSpore Transformers: the optimizer's state, steps, and how much data it has read.

AdamW keeps adam_m.NAME and adam_v.NAME for the parameter NAME, Muon muon_m.NAME instead for matrices, and both keep
main_param.NAME, the float32 copy of a weight in 16 bits (mindformers/pynative/optimizer/adamw.py, lines 196 to 248,
muon.py, lines 1988 to 2038, and mindformers/core/optim/adamw.py, line 167). common.json has the steps of an iteration
(mindformers/checkpoint/checkpoint.py, line 80), the file of a rank those of older versions. Read at commit 167a50de.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import safetensors

from trainer.checkpoint.mindformers.folders import Source, open_source, state_files
from trainer.checkpoint.mindformers.names import convert_weights, has_mindformers_names
from trainer.checkpoint.store import first_of
from trainer.checkpoint.tensor_names import disk_shapes, find_expert_names, from_disk, split_fused_tensors
from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.parallel.world import World
from trainer.storage.json_files import Count, JsonError, LenientModel, parse_json
from trainer.storage.tensor_file import ArrayOrLazyArray, TensorFile

if TYPE_CHECKING:
    from trainer.config import Config

MOMENTS = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v", "momentum_buffer": "muon_m"}
"""State arrays of AdamW and Muon -> how their names begin there."""
_MAIN = "main_param"
_COMMON = "common.json"
_FROM_WEIGHTS = "start a new run from its weights"

OpenArrays: TypeAlias = Callable[[str], Mapping[str, ArrayOrLazyArray]]
"""Opens the arrays of the optimizer whose names begin with a text, by Hugging Face's names of the parameters."""


class Counters(NamedTuple):
    """How far a training is: steps, updates of the optimizer, and sequences that it has read.

    `sequences` is None if the files do not say how many a step takes.
    """

    step: int
    updates: int
    sequences: int | None


class _Common(LenientModel):
    global_step: Count
    global_batch_size: Count | None = None
    consumed_samples: Count | None = None


def open_state(source: Source, config: Config, world: World) -> tuple[dict[str, ArrayOrLazyArray], OpenArrays]:
    """Opens the weights, in float32 where the optimizer has a copy, and makes the function that opens other arrays."""

    def open_arrays(kind: str) -> dict[str, ArrayOrLazyArray]:
        """Opens the arrays of one kind."""
        tensors, fix = open_source(source, config.src_strategy_path_or_dir, kind=kind, world=world)
        if has_mindformers_names(tensors):
            return convert_weights(tensors, config.decoder, source.path, fix)
        return split_fused_tensors({name: tensor.array for name, tensor in tensors.items()}, config.decoder)

    return open_arrays("") | open_arrays(_MAIN), open_arrays


def open_moments(
    shapes: Mapping[str, tuple[int, ...]], open_arrays: OpenArrays, path: Path
) -> dict[str, ArrayOrLazyArray]:
    """Opens the optimizer's state; `shapes` are those of its arrays by `kind.parameter`.

    Raises:
        UserError: The checkpoint lacks some of them, or has them in another shape.
    """
    state: dict[str, ArrayOrLazyArray] = {}
    for kind in dict.fromkeys(name.partition(".")[0] for name in shapes):
        needed = {name.removeprefix(f"{kind}."): shape for name, shape in shapes.items() if name.startswith(f"{kind}.")}
        arrays = open_arrays(MOMENTS[kind])
        on_disk = disk_shapes(needed, find_expert_names(arrays))
        if missing := [name for name, shape in on_disk.items() if name not in arrays or arrays[name].shape != shape]:
            rule = f"its optimizer has no {MOMENTS[kind]} of {first_of(missing)}"
            fix = f"use the optimizer of that training, or {_FROM_WEIGHTS}"
            raise UserError(rule, value=str(path), fix=fix)
        state |= {f"{kind}.{name}": array for name, array in from_disk(arrays, needed).items()}
    return state


def read_counters(source: Source) -> Counters:
    """Reads how far the training of a checkpoint is; raises a UserError if its files do not say it."""
    try:
        return _counters(source)
    except (OSError, OverflowError, TypeError, ValueError, safetensors.SafetensorError) as error:
        rule = f"the position of its training cannot be read: {getattr(error, 'strerror', None) or error}"
        fix = f"copy the complete folder, or {_FROM_WEIGHTS}"
        raise UserError(rule, value=str(source.path), fix=fix) from None


def _counters(source: Source) -> Counters:
    numbers = _numbers(state_files(source), ("global_step", "step_num", "global_batch_size"))
    step = numbers.get("step_num")
    batch = numbers.get("global_batch_size")
    sequences = None
    if not source.files and (source.path / _COMMON).is_file():
        common: _Common = parse_json(read_bytes(source.path / _COMMON), _Common, _COMMON)
        step = common.global_step
        batch = common.global_batch_size
        sequences = common.consumed_samples
    if step is None:
        raise JsonError("no file has its number of steps")
    if sequences is None and batch:
        sequences = step * batch
    updates = numbers.get("global_step", step)
    if updates == step - 1 and not source.files:
        updates = step  # the fused AdamW counts from -1
    if not 0 <= updates <= step:
        raise JsonError(f"it is at step {step}, and its optimizer has done {updates} updates")
    return Counters(step, updates, sequences)


def _numbers(files: Iterable[Path], names: Iterable[str]) -> dict[str, int]:
    """Returns the numbers with these names, each from the first file that has it."""
    numbers = {}
    for path in files:
        file = TensorFile(path)
        for name in names:
            if name in file.entries and name not in numbers:
                numbers[name] = int(file.tensor(name).read().item())
    return numbers
