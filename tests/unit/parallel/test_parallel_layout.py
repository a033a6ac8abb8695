"""Which part of each parameter a rank holds, over which ranks its gradient is summed, and who counts it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from trainer.config import parse_config
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import EMBEDDING, HEAD
from trainer.models.spec.shapes import all_shapes
from trainer.parallel.layout import ModelLayout, model_layout
from trainer.parallel.mesh import Degrees, Mesh, MeshCoordinate, group_ranks

SIZES = {
    "num_layers": 4, "hidden_size": 32, "num_heads": 8, "n_kv_heads": 4, "head_dim": 12, "intermediate_size": 48,
    "vocab_size": 96, "seq_length": 16,
}
DENSE = {"qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True, "use_qk_norm": True,
         "post_self_attn_layernorm": True, "embedding_size": 24}
LORA = {"pet_config": {"target_modules": ".*"}}
LATENT = {"architectures": "LlamaForCausalLM", "multi_latent_attention": True, "q_lora_rank": 20, "kv_lora_rank": 10,
          "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"moe_config": {"expert_num": 8, "num_experts_chosen": 2, "shared_expert_num": 2, "first_k_dense_replace": 1,
                          "balance_via_topk_bias": True, "use_shared_expert_gating": True}}
KINDS = {
    "dense": {}, "all": DENSE | LORA, "tied": {"tie_word_embeddings": True, "mtp_depth": 2}, "latent": LATENT | LORA,
    "latent query": LATENT | {"q_lora_rank": None}, "experts": EXPERTS | {"mtp_depth": 1},
    "one key": {"n_kv_heads": 1, "use_qk_norm": True}, "two keys": {"n_kv_heads": 2} | LORA,
}  # fmt: skip


def settings_of(**changes) -> ModelConfig:
    text = json.dumps({"model": {"model_config": SIZES | changes}})
    return parse_config("layout", text).decoder


def coordinates(degrees: Degrees) -> Iterator[MeshCoordinate]:
    sizes = degrees.pipeline_stage, degrees.data_parallel, degrees.context_parallel, degrees.model_parallel
    return (MeshCoordinate(*map(int, each)) for each in np.ndindex(*sizes))


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_held_and_counted_once(kind: str, tensor: int) -> None:
    """Over all ranks the parts that count cover each parameter exactly once, also where ranges of them do."""
    settings = settings_of(**KINDS[kind])
    degrees = Degrees(2, 2, 1, tensor, expert_parallel=2 if settings.experts else 1)
    layout = model_layout(settings, degrees, sequence_parallel=tensor > 1, stage_layers=[[0, 1], [2, 3]])
    assert list(layout.parameters) == list(all_shapes(settings))
    for name, shape in all_shapes(settings).items():
        counted = np.zeros(shape, int)
        for where in coordinates(degrees):
            if layout.is_first_holder(name, where):
                assert layout.holds(name, where)
                counted[layout.shard(name, where).slices] += 1
        assert (counted == 1).all(), name
        # Where data-parallel ranks each count a range, as many count a part as there are such ranks.
        shared = np.zeros(shape, int)
        for where in coordinates(degrees):
            if layout.is_first_holder(name, where, sharded=True):
                shared[layout.shard(name, where).slices] += 1
        ranks = 2 * tensor // degrees.expert_parallel if layout.parameters[name].by == "ep" else 2
        assert (shared == ranks).all(), name


def drawn(kind: str, seed: int) -> tuple[ModelConfig, ModelLayout]:
    """Returns a model and a layout of up to 64 ranks."""
    draw, settings = random.Random(f"{kind} {seed}"), settings_of(**KINDS[kind])
    pipeline, data, context = (draw.choice([1, 2]) for _ in range(3))
    tensor, rows = draw.choice([1, 2, 4, 8]), draw.random() < 0.4
    replica = data * context * tensor
    experts = draw.choice([one for one in (1, 2, 4, 8) if replica % one == 0]) if settings.experts else 1
    layers = [[0, 1, 2, 3]] if pipeline == 1 else [[0], [1, 2, 3]]
    degrees = Degrees(pipeline, data, context, tensor, experts)
    return settings, model_layout(settings, degrees, sequence_parallel=rows, stage_layers=layers)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_summed_over_just_those_that_have_a_part_of_them(kind: str, seed: int) -> None:
    """Checks, for each parameter, that the ranks that count cover it once. All ranks with a shard end with the same
    sum, in which each of its ranks is once: for all tokens, and of a tensor group either one rank or all."""
    settings, layout = drawn(kind, seed)
    mesh, kv_heads = Mesh(layout.degrees), None if settings.multi_latent_attention else settings.kv_heads
    every = [(mesh.coordinate_of(rank), group_ranks(mesh, rank, kv_heads)) for rank in range(mesh.size)]
    for name, one in layout.parameters.items():
        counted, holders = np.zeros(one.shape, np.int8), dict[tuple, list[int]]()
        for rank, (where, _) in enumerate(every):
            if layout.holds(name, where):
                shard = layout.shard(name, where)
                counted[shard.slices] += layout.is_first_holder(name, where)
                holders.setdefault(shard.start, []).append(rank)
        assert (counted == 1).all(), name
        sums = {rank: Counter([rank]) for rank in range(mesh.size)}
        for kind in one.sums:
            sums = {rank: sum((sums[other] for other in every[rank][1][kind]), Counter()) for rank in sums}
        for ranks in holders.values() if one.sums else ():
            assert len({tuple(sorted(sums[rank])) for rank in ranks}) in (1, layout.degrees.model_parallel), name
            for rank in ranks:
                found = sums[rank]
                assert rank in found and set(found) <= set(ranks) and set(found.values()) == {1}, name
                if set(found) != set(ranks):  # a whole gradient on every rank of a tensor group
                    same = [other for other in ranks if every[other][0].tensor == every[rank][0].tensor]
                    assert set(found) == set(same) and one.shards == 1 and not is_partial(name, settings), name


def is_partial(name: str, settings: ModelConfig) -> bool:
    """Returns whether tensor-parallel ranks always have different gradients of a parameter: from their own heads or
    tokens."""
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    is_moe = layer.isdigit() and settings.is_moe_layer(int(layer))
    of_tokens = is_moe and inner in (
        "mlp.gate.weight", "mlp.shared_expert_gate.weight", "post_attention_layernorm.weight")  # fmt: skip
    return of_tokens or inner.startswith(("mlp.experts.", "self_attn.q_norm", "self_attn.k_norm"))


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_the_local_model_are_those_of_the_layout(kind: str, tensor: int) -> None:
    settings = settings_of(**KINDS[kind])
    layout = model_layout(settings, Degrees(model_parallel=tensor))
    for where in coordinates(layout.degrees):
        local = model_spec(settings).local(tensor, where.tensor).parameters().values()
        assert layout.local_shapes(where) == {parameter.name: parameter.shape for parameter in local}


def project_qkv(layout: ModelLayout, name: str, size: int) -> list[list[int]]:
    """Returns the heads of which each tensor rank holds the rows or columns."""
    dimension = layout.parameters[name].dimension
    shards = [layout.shard(name, where) for where in coordinates(layout.degrees)]
    assert all(one.start[dimension] % size == 0 == one.shape[dimension] % size for one in shards)
    return [
        list(range(one.start[dimension] // size, (one.start[dimension] + one.shape[dimension]) // size))
        for one in shards
    ]


def test_a_rank_has_the_keys_of_its_queries() -> None:
    for kv_heads, expected in ((4, [[0], [1], [2], [3]]), (2, [[0], [0], [1], [1]]), (1, [[0]] * 4)):
        layout = model_layout(settings_of(n_kv_heads=kv_heads), Degrees(model_parallel=4))
        queries = project_qkv(layout, "model.layers.0.self_attn.q_proj.weight", 12)
        keys = project_qkv(layout, "model.layers.0.self_attn.k_proj.weight", 12)
        assert keys == expected and queries == [[0, 1], [2, 3], [4, 5], [6, 7]]
        for own_queries, own_keys in zip(queries, keys, strict=True):
            assert {query * kv_heads // 8 for query in own_queries} == set(own_keys)


def test_parts_of_latent_attention_are_whole_heads() -> None:
    layout = model_layout(settings_of(**LATENT), Degrees(model_parallel=4))
    prefix, heads = "model.layers.0.self_attn.", [[0, 1], [2, 3], [4, 5], [6, 7]]
    for name, size in (("q_b_proj", 10), ("kv_b_proj", 14), ("o_proj", 8)):
        assert project_qkv(layout, f"{prefix}{name}.weight", size) == heads
    whole = {name for name, one in layout.parameters.items() if name.startswith(prefix) and one.shards == 1}
    assert {name.removeprefix(prefix) for name in whole} == {
        "q_a_proj.weight", "q_a_layernorm.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"
    }


def sums_of(layout: ModelLayout, layer: int = 0) -> dict[str, str]:
    prefix = f"model.layers.{layer}."
    own = {name.removeprefix(prefix): one.sums for name, one in layout.parameters.items()}
    return {name: " ".join(sums) for name, sums in own.items() if not name.startswith("model.layers.")}


def test_partial_gradients_are_summed_over_the_tensor_group() -> None:
    settings = settings_of(**DENSE | LORA)
    plain = sums_of(model_layout(settings, Degrees(model_parallel=2)))
    partial = {name for name, sums in plain.items() if sums == "tp dp_cp"}
    assert {name for name in plain if plain[name] != "tp dp_cp"} == {n for n in plain if plain[n] == "dp_cp"}
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    assert partial == {f"{name}.lora_A.weight" for name in columns} | {
        "self_attn.o_proj.lora_B.weight", "mlp.down_proj.lora_B.weight", "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    with_rows = sums_of(model_layout(settings, Degrees(model_parallel=2), sequence_parallel=True))
    assert {name for name, sums in with_rows.items() if sums == "tp dp_cp"} == partial | {
        "input_layernorm.weight", "post_attention_layernorm.weight", "post_self_attn_layernorm.weight",
        "self_attn.o_proj.bias", "mlp.down_proj.bias", "model.norm.weight",
        "model.embedding_hidden_mapping_in.weight", "model.embedding_hidden_mapping_out.weight",
    }
    assert set(sums_of(model_layout(settings, Degrees(data_parallel=2), sequence_parallel=True)).values()) == {"dp_cp"}


def test_copies_of_a_key_head_sum_their_gradients() -> None:
    sums = sums_of(model_layout(settings_of(n_kv_heads=2, use_qk_norm=True, **LORA), Degrees(model_parallel=4)))
    assert {name for name, groups in sums.items() if groups == "kv dp_cp"} == {
        f"self_attn.{name}_proj.{kind}weight" for name in "kv" for kind in ("", "lora_B.")
    }
    assert sums["self_attn.k_norm.weight"] == sums["self_attn.k_proj.lora_A.weight"] == "tp dp_cp"


def test_experts_have_a_group_of_their_own() -> None:
    layout = model_layout(settings_of(**EXPERTS), Degrees(1, 2, 1, 2, expert_parallel=2))
    sums = sums_of(layout, layer=1)
    assert {sums[name] for name in sums if name.startswith("mlp.experts.")} == {"expert_dp"}
    # The tensor ranks share the tokens for the experts.
    for name in ("mlp.gate.weight", "mlp.shared_expert_gate.weight", "post_attention_layernorm.weight"):
        assert sums[name] == "tp dp_cp"
    assert sums["input_layernorm.weight"] == sums["mlp.shared_experts.down_proj.weight"] == "dp_cp"
    assert sums["mlp.gate.e_score_correction_bias"] == ""  # no gradient
    assert sums_of(layout)["post_attention_layernorm.weight"] == "dp_cp"  # layer 0 is dense
    stack = "model.layers.1.mlp.experts.down_proj.weight"
    # Neighbours hold all experts once, across the tensor axis.
    assert [layout.shard(stack, where).start[0] for where in coordinates(layout.degrees)] == [0, 4, 0, 4]
    wide = model_layout(settings_of(**EXPERTS), Degrees(1, 2, 1, 2, expert_parallel=4))
    assert [wide.shard(stack, where).start[0] for where in coordinates(wide.degrees)] == [0, 2, 4, 6]


def test_stages_hold_their_layers_and_share_the_embedding() -> None:
    degrees, stages = Degrees(pipeline_stage=2), [[0, 3], [1, 2]]
    layout = model_layout(settings_of(), degrees, stage_layers=stages)
    first, last = (set(layout.local_shapes(MeshCoordinate(stage, 0, 0, 0))) for stage in range(2))
    assert not first & last and first | last == set(layout.parameters)
    assert EMBEDDING in first and HEAD in last and "model.norm.weight" in last
    assert {int(name.split(".")[2]) for name in first if "layers" in name} == {0, 3}
    tied = model_layout(settings_of(tie_word_embeddings=True), degrees, stage_layers=stages).parameters[EMBEDDING]
    assert tied.stages == (0, 1) and tied.sums == ("dp_cp", "embedding")
    predicting = model_layout(settings_of(mtp_depth=1), degrees, stage_layers=stages)
    assert predicting.parameters[EMBEDDING].stages == (0, 1)
    assert predicting.parameters["model.layers.4.eh_proj.weight"].stages == (1,)
