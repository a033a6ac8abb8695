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
from trainer.errors import UserError
from trainer.parallel.mesh import Degrees
from trainer.parallel.world import World, world_of
from trainer.run.prepare import select_execution_mode

SHARING = "enable_parallel_optimizer"
KINDS = ("pipeline_stage", "model_parallel", "expert_parallel", "context_parallel", "data_parallel", SHARING)
"""The degrees of `parallel_config`, and then whether the ranks share the state of the optimizer."""
_KEPT = 2


class Layout(NamedTuple):
    """How the ranks of a smoke run divide the work.

    Attributes:
        shares: Whether they share the state of the optimizer (enable_parallel_optimizer).
    """

    degrees: Degrees = Degrees()
    shares: bool = False

    def kinds(self) -> set[str]:
        """Those of `KINDS` that it has."""
        degrees = self.degrees._asdict()
        return {kind for kind in KINDS if (self.shares if kind == SHARING else degrees[kind] > 1)}


def layouts(asked: Collection[str], ranks: int) -> list[Layout]:
    """All layouts of kinds that the file has, the best first; the last one is data parallelism alone.

    Args:
        asked: The kinds of the file.
    """
    chosen = (kinds for number in range(len(asked) + 1) for kinds in combinations(asked, number))
    every = dict.fromkeys(layout_of(kinds, ranks) for kinds in chosen)

    def dropped(layout: Layout) -> tuple[int, list[int], bool]:
        missing = [place for place, kind in enumerate(KINDS) if kind in asked and kind not in layout.kinds()]
        places = [-place for place in missing if KINDS[place] != SHARING]
        return len(places), places, not layout.shares

    return sorted(every, key=dropped)


def layout_of(kinds: Collection[str], ranks: int) -> Layout:
    """So many ranks with these kinds of parallelism, as far as they go."""
    left = ranks
    degrees = dict.fromkeys(Degrees._fields, 1)
    for name in ("pipeline_stage", "model_parallel", "context_parallel", "data_parallel"):
        if name in kinds and left % _KEPT == 0:
            degrees[name] = _KEPT
            left = left // _KEPT
    degrees["data_parallel"] *= left
    if "expert_parallel" in kinds and (ranks // degrees["pipeline_stage"]) % _KEPT == 0:
        degrees["expert_parallel"] = _KEPT
    return Layout(Degrees(**degrees), SHARING in kinds and ranks > 1)


def asked_kinds(config: Config, world: World) -> list[str]:
    """The kinds of parallelism of a file in its own job."""
    if config.use_parallel is False:
        return []
    degrees = parallel_degrees(config, world)._asdict()
    return [kind for kind in KINDS if degrees.get(kind, 1) > 1 or kind == SHARING and
            config.parallel.enable_parallel_optimizer]  # fmt: skip


def refusals(config: Config, ranks: int, device: str) -> Iterator[str]:
    """Why a job of so many ranks does not run a small file with its degrees, a sentence each."""
    world = world_of(ranks)
    for one in parallel_problems(config, world):
        yield f"{one.error.key}: {one.error.rule}"
    try:
        select_execution_mode(config, world).check_device(device)
    except UserError as error:
        yield f"{error.key}: {error.rule}"


def reason(kind: str, refused: Collection[str]) -> str:
    """Why a layout without a kind of parallelism was taken: what was said against one with it."""
    own = [rule for rule in refused if kind in rule]
    return f"refused: {'; '.join(own or refused)}"
