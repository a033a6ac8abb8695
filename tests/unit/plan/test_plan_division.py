"""Who holds what in the plan: the same as the layout that the ranks follow, and readable for many thousands of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trainer.cli.main import dispatch
from trainer.config import Config, Override, load_config
from trainer.models.spec.names import EMBEDDING, HEAD, layer_prefix
from trainer.parallel.mesh import Degrees, Mesh, group_ranks
from trainer.parallel.world import world_of
from trainer.plan.division import ShardingPlan, model_layout_for, ranks_text, sharding_plan
from trainer.plan.pipeline import pipeline_plan
from trainer.plan.render import sharding_sections
from trainer.tables import sections_text

REPOSITORY = Path(__file__).resolve().parents[3]
LAYOUTS = {
    "tensor": Degrees(data_parallel=2, model_parallel=4),
    "everything": Degrees(2, 2, 2, 2, 4),
    "stages": Degrees(pipeline_stage=4, data_parallel=2),
    "experts": Degrees(data_parallel=8, expert_parallel=4),
}


def config_of(degrees: Degrees, **keys: object) -> Config:
    keys |= {f"parallel_config__{name}": size for name, size in degrees._asdict().items()}
    keys = {"use_parallel": True, "model__model_config__num_layers": 6, "parallel_config__micro_batch_num": 8} | keys
    overrides = [Override(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return load_config(str(REPOSITORY / "configs" / "moe_mtp.yaml"), overrides, problems=[])


def own(found: ShardingPlan, axis: str, rank: int) -> dict[str, str]:
    """Returns the parts of a rank by the table of an axis."""
    for share in getattr(found, axis):
        if rank in ranks_of(share.ranks):
            return share.parts
    return {}


def ranks_of(text: str) -> list[int]:
    """Returns the ranks that a text means."""
    blocks = [[int(end) for end in part.split("-")] for part in text.replace(" ... ", ", ... ").split(", ") if
              not part.startswith("...")]  # fmt: skip
    if "..." in text:
        last = [int(end) for end in text.split("... ")[1].split("-")]
        step = blocks[1][0] - blocks[0][0]
        blocks = [[first + end - blocks[0][0] for end in blocks[0]] for first in range(blocks[0][0], last[0] + 1, step)]
    return [rank for first, *end in blocks for rank in range(first, (end or [first])[0] + 1)]


@pytest.mark.parametrize("degrees", LAYOUTS.values(), ids=LAYOUTS)
def test_each_rank_holds_what_the_layout_says(degrees: Degrees) -> None:
    config, world = config_of(degrees), world_of(degrees.ranks)
    found, layout, mesh = sharding_plan(config, world), model_layout_for(config, world), Mesh(degrees)
    settings = config.decoder

    def text(name: str, rank: int, unit: int = 1) -> str:
        shard = layout.shard(name, mesh.coordinate_of(rank))
        first, last = shard.start[0] // unit, (shard.start[0] + shard.shape[0]) // unit - 1
        return str(first) if first == last else f"{first}-{last}"

    weights = [0] * degrees.pipeline_stage
    for rank in range(mesh.size):
        where = mesh.coordinate_of(rank)
        size = sum(math.prod(shape) for name, shape in layout.local_shapes(where).items() if "correction" not in name)
        weights[where.pipeline] = max(size, weights[where.pipeline])
        stage = next(one for one in found.stages if rank in ranks_of(one.ranks))
        held = [layer for chunk in stage.layers for layer in ranks_of(chunk.replace("; ", ", "))]
        assert held == [layer for layer in range(settings.num_layers)
                        if layout.holds(f"{layer_prefix(layer)}self_attn.q_proj.weight", where)]  # fmt: skip
        assert ("embedding" in stage.ends) == layout.holds(EMBEDDING, where)
        assert ("head" in stage.ends) == layout.holds(HEAD, where)
        if degrees.model_parallel > 1:
            parts, prefix = own(found, "tensor", rank), layer_prefix(0)
            assert parts["vocabulary"] == text(HEAD, rank)
            assert parts["heads"] == text(f"{prefix}self_attn.q_proj.weight", rank, settings.head_size)
            key_heads = text(f"{prefix}self_attn.k_proj.weight", rank, settings.head_size)
            assert parts["kv heads"].split(" (")[0] == key_heads
        if degrees.expert_parallel > 1:
            name = next(name for name in layout.parameters if name.endswith("mlp.experts.gate_proj.weight"))
            assert own(found, "experts", rank)["experts of a layer"] == text(name, rank)
    assert weights == [stage.weights for stage in found.stages]
    for group in found.groups:
        for name in group.name.split(", "):
            every = {tuple(group_ranks(mesh, rank)[name]) for rank in range(mesh.size)}
            every = {one for one in every if len(one) > 1}
            assert (group.size, group.number) == (len(min(every)), len(every))
            assert [group.first, group.last] == [ranks_text(one) for one in (min(every), max(every))]


def test_heads_that_several_ranks_have_are_said() -> None:
    degrees = Degrees(model_parallel=8)
    config = config_of(degrees, model__model_config__num_heads=8, model__model_config__n_kv_heads=2)
    parts = [share.parts["kv heads"] for share in sharding_plan(config, world_of(8)).tensor]
    assert parts == ["0 (on 4 ranks)"] * 4 + ["1 (on 4 ranks)"] * 4


def test_ring_and_ulysses_ranks_have_other_tokens() -> None:
    degrees = Degrees(context_parallel=2)
    sizes = {"model__model_config__seq_length": 64}
    ring = config_of(degrees, **sizes)
    ulysses = config_of(degrees, **sizes, parallel_config__context_parallel_algo="ulysses_cp")
    tokens = [[share.parts["tokens"] for share in sharding_plan(one, world_of(2)).context] for one in (ring, ulysses)]
    assert tokens == [["0-15, 48-63", "16-31, 32-47"], ["0-31", "32-63"]]


def test_neighbours_of_a_hybrid_ring_divide_the_tokens_of_its_member() -> None:
    keys = {"model__model_config__seq_length": 64, "parallel_config__context_parallel_algo": "hybrid_cp"}
    config = config_of(Degrees(context_parallel=4, model_parallel=2), parallel_config__ulysses_degree_in_cp=2, **keys)
    found = sharding_plan(config, world_of(8))
    assert [share.parts["tokens"] for share in found.context] == ["0-15", "48-63", "16-31", "32-47"]
    groups = [(one.name, one.size, one.number, one.first, one.last) for one in found.groups]
    assert ("ulysses", 2, 4, "0, 2", "5, 7") in groups and ("ring", 2, 4, "0, 4", "3, 7") in groups


def test_a_job_of_many_ranks_fits_a_page() -> None:
    degrees = Degrees(16, 64, 2, 8, 64)
    keys = {"num_heads": 64, "num_layers": 64, "moe_config__expert_num": 256}
    config = config_of(degrees, **{f"model__model_config__{name}": value for name, value in keys.items()})
    found = sharding_plan(config, world_of(16_384))
    lines = sections_text(sharding_sections(found, None)).splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 80
    keys = {"model__model_config__num_layers": 128, "model__model_config__pp_interleave_num": 4}
    chunks = config_of(degrees, **keys, parallel_config__micro_batch_num=32)
    found = sharding_plan(chunks, world_of(16_384))
    lines = sections_text(sharding_sections(found, pipeline_plan(chunks, 16))).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    first = lines.index("STAGES OF THE PIPELINE (weights of a rank, in millions)") + 2
    assert lines[first].split()[:4] == ["0", "0-1023", "0-1;", "32-33"]
    assert lines[first + 1].split() == ["64-65;", "96-97"]


def test_ranks_with_whole_models_divide_nothing() -> None:
    assert sharding_plan(config_of(Degrees(data_parallel=8)), world_of(8)) is None
    assert sharding_plan(config_of(Degrees()), world_of(1)) is None


def test_the_command_gives_it_as_json(capsys: pytest.CaptureFixture) -> None:
    flags = "--use_parallel True --parallel_config.model_parallel 2 --json".split()
    assert dispatch(["plan", "--config", str(REPOSITORY / "configs" / "quickstart.yaml"), *flags]) == 0
    found = json.loads(capsys.readouterr().out)["division"]
    assert found["groups"] == [{"name": "tp", "size": 2, "number": 1, "first": "0-1", "last": "0-1"}]
    assert [share["parts"]["heads"] for share in found["tensor"]] == ["0-1", "2-3"]
