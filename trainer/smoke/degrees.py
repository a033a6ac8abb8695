"""The kinds of parallelism of a smoke run: those of the file, each of degree 2, as far as the ranks and the trainer go.

As many degrees as possible are kept; among equally many those that stand first in `KINDS`. Ranks that are left over are
data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.parallel import parallel_degrees, parallel_problems
from trainer.config.schema.root import ConfigSource
from trainer.errors import UserError
from trainer.parallel.mesh import Degrees
from trainer.parallel.world import World, world_of
from trainer.run.prepare import select_execution_mode

SHARING = "enable_parallel_optimizer"
KINDS = ("pipeline_stage", "model_parallel", "expert_parallel", "context_parallel", "data_parallel", SHARING)
"""The degrees of `parallel_config`, and then whether the ranks share the state of the optimizer."""
_SMOKE_DEGREE = 2


class SmokeLayout(NamedTuple):
    """The parallelism of a smoke run.

    Attributes:
        shares: Whether the ranks shard the optimizer state (enable_parallel_optimizer).
    """

    degrees: Degrees = Degrees()
    shares: bool = False

    def kinds(self) -> set[str]:
        """Returns the kinds of `KINDS` that the layout has."""
        degrees = self.degrees._asdict()
        kinds = {kind for kind in KINDS if degrees.get(kind, 1) > 1}
        if self.shares:
            kinds.add(SHARING)
        return kinds


def possible_layouts(asked: Collection[str], ranks: int) -> list[SmokeLayout]:
    """Returns all layouts with kinds of parallelism of the file, the best first; the last one is pure data parallelism.

    Args:
        asked: The kinds of the file.
    """
    subsets = (kinds for number in range(len(asked) + 1) for kinds in combinations(asked, number))
    layouts = dict.fromkeys(layout_with(kinds, ranks) for kinds in subsets)

    def sort_key(layout: SmokeLayout) -> tuple[int, list[int], bool]:
        missing = [place for place, kind in enumerate(KINDS) if kind in asked and kind not in layout.kinds()]
        places = [-place for place in missing if KINDS[place] != SHARING]
        return len(places), places, not layout.shares

    return sorted(layouts, key=sort_key)


def layout_with(kinds: Collection[str], ranks: int) -> SmokeLayout:
    """Returns a layout of `ranks` ranks with as many of these kinds of parallelism as fit."""
    left = ranks
    degrees = dict.fromkeys(Degrees._fields, 1)
    for name in ("pipeline_stage", "model_parallel", "context_parallel", "data_parallel"):
        if name in kinds and left % _SMOKE_DEGREE == 0:
            degrees[name] = _SMOKE_DEGREE
            left = left // _SMOKE_DEGREE
    degrees["data_parallel"] *= left
    if "expert_parallel" in kinds and (ranks // degrees["pipeline_stage"]) % _SMOKE_DEGREE == 0:
        degrees["expert_parallel"] = _SMOKE_DEGREE
    return SmokeLayout(Degrees(**degrees), SHARING in kinds and ranks > 1)


def parallelism_kinds(config: Config, world: World) -> list[str]:
    """Returns the kinds of parallelism that a configuration has in a job of this world size."""
    if config.use_parallel is False:
        return []
    kinds = SmokeLayout(parallel_degrees(config, world), bool(config.parallel.enable_parallel_optimizer)).kinds()
    return [kind for kind in KINDS if kind in kinds]


def kind_name(kind: str, source: ConfigSource) -> str:
    """Returns a kind of parallelism under its name in the file's schema: tensor_parallel for model_parallel."""
    section = "parallel_config"
    if kind == SHARING:
        section = "parallel"
    return source.name(f"{section}.{kind}").rpartition(".")[2]


def refusals(config: Config, ranks: int, device: str) -> Iterator[str]:
    """Yields why a job of `ranks` ranks cannot run a small file with its degrees, one sentence each."""
    world = world_of(ranks)
    for problem in parallel_problems(config, world):
        yield f"{problem.error.key}: {problem.error.rule}"
    try:
        select_execution_mode(config, world).check_device(device)
    except UserError as error:
        yield f"{error.key}: {error.rule}"
