"""The network of MindSpore's semi-automatic mode for a configuration, built as for a training and described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspore import nn

from trainer.config.checks.parallel import degrees_of
from trainer.config.layer_ranges import layer_text
from trainer.parallel.world import World, world_of
from trainer.semi_auto.network import LossCell, SemiAuto, build_semi_auto
from trainer.semi_auto.rules import semi_auto_notices

if TYPE_CHECKING:
    from trainer.config import Config


def semi_auto_rows(config: Config, world: World) -> list[tuple[str, str]]:
    """Names and values: the cells from the outside to the inside, their settings, stages and strategies.

    Args:
        config: The configuration of the run.
        world: The job; a single process stands for as many ranks as the degrees ask for.

    Raises:
        UserError: The configuration asks for what this mode cannot do.
    """
    built = build_semi_auto(config, world if world.size > 1 else world_of(degrees_of(config, world).ranks))
    network, cells = built.network, list(_cells(built))
    loss = cells[-1]
    assert isinstance(loss, LossCell)
    shared = network._enable_parallel_optimizer
    threshold = f"shared by data-parallel ranks (hsdp), of parameters from {network._parallel_optimizer_threshold} KB"
    rows = [
        ("network", " ( ".join(_name(cell) for cell in cells) + " )" * (len(cells) - 1)),
        ("mode", f"{network._parallel_mode}, {network._pipeline_stages} pipeline stage(s)"),
        ("data of a rank", "the whole batch" if network._full_batch else "its part of the batch"),
        ("optimizer", config.optimizer.type),
        ("optimizer state", threshold if shared else "whole on every rank"),
        ("weights", f"{len(loss.by_name)}, allocated once MindSpore has sharded them (no_init_parameters)"),
    ]
    return [*rows, *_stages(loss), *_strategies(loss), *(("note", notice) for notice in semi_auto_notices(config))]


def _cells(built: SemiAuto) -> Iterator[nn.Cell]:
    cell = built.network
    while not isinstance(cell, LossCell):
        yield cell
        cell = cell.network
    yield cell


def _name(cell: nn.Cell) -> str:
    micro_batches = getattr(cell, "micro_size", None)
    return type(cell).__name__ + (f", {micro_batches} micro-batches" if micro_batches else "")


def _stages(loss: LossCell) -> list[tuple[str, str]]:
    """Layers by the stage of a pipeline; nothing without one."""
    decoder, found = loss.decoder, {}
    for number, layer in enumerate(decoder.layers):
        found.setdefault(getattr(layer, "pipeline_stage", None), set()).add(number)
    if len(found) < 2:
        return []
    return [(f"stage {stage}", layer_text(layers)) for stage, layers in sorted(found.items())]


def _strategies(loss: LossCell) -> list[tuple[str, str]]:
    """The strategy of each matrix product of the first layer, which is the same in all layers."""
    found = []
    for name, cell in loss.decoder.layers[0].cells_and_names():
        strategy = getattr(getattr(cell, "product", None), "in_strategy", None)
        if strategy:
            projection = name.removeprefix("block.").partition(".linear")[0]
            found.append((projection, f"input {strategy[0]}, weight {strategy[1]}"))
    return found
