"""Parameter groups, the global norm and the clip coefficient: plain arithmetic, no MindSpore."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tolerances import FLOAT64

from trainer.config import parse_config
from trainer.models.spec.names import is_buffer, megatron_names
from trainer.models.spec.shapes import adapter_shapes, parameter_shapes
from trainer.optim.groups import parameter_groups, unmatched_decay_rules
from trainer.step.clip import NormGroups, clip, clip_coefficient, norm_groups

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 11, "multiple_of": 8}
ALL_OPTIONS = {"qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True, "use_qk_norm": True}


def optimizer_of(**changes: object):
    return parse_config("groups", json.dumps({"optimizer": {"weight_decay": 0.1} | changes})).optimizer


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS, {"tie_word_embeddings": True}], ids=["plain", "all", "tied"])
def test_matrices_decay_and_norms_and_biases_do_not(options: dict) -> None:
    """Checks that each parameter is in exactly one group, and that vectors have no weight decay."""
    settings = parse_config("groups", json.dumps({"model": {"model_config": SIZES | options}})).decoder
    shapes = parameter_shapes(settings)
    matrices, vectors = parameter_groups(shapes, optimizer_of())
    assert (matrices.weight_decay, vectors.weight_decay) == (0.1, 0.0)
    by_name = {"norm.weight", "layernorm.weight", "q_norm.weight", "k_norm.weight"}
    undecayed = [name for name in shapes if name.endswith(".bias") or any(name.endswith(end) for end in by_name)]
    assert sorted(vectors.parameters) == sorted(undecayed) and undecayed
    assert sorted(matrices.parameters + vectors.parameters) == sorted(shapes)
    assert not set(matrices.parameters) & set(vectors.parameters)


def test_muon_updates_the_matrices_inside_the_blocks_only() -> None:
    settings = parse_config("groups", json.dumps({"model": {"model_config": SIZES | ALL_OPTIONS}})).decoder
    shapes = parameter_shapes(settings)
    muon, others, vectors = parameter_groups(shapes, optimizer_of(type="Muon"))
    assert [group.optimizer for group in (muon, others, vectors)] == ["Muon", "AdamW", "AdamW"]
    assert [group.weight_decay for group in (muon, others, vectors)] == [0.1, 0.1, 0.0]
    assert set(others.parameters) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(muon.parameters) == 2 * 7 and all(name.endswith("_proj.weight") for name in muon.parameters)
    assert sorted(muon.parameters + others.parameters + vectors.parameters) == sorted(shapes)


def test_muon_updates_the_matrices_of_experts_too() -> None:
    experts = {"expert_num": 4, "balance_via_topk_bias": True}
    settings = parse_config("groups", json.dumps({"model": {"model_config": SIZES | {"moe_config": experts}}})).decoder
    shapes = {name: shape for name, shape in parameter_shapes(settings).items() if not is_buffer(name)}
    muon, others, _ = parameter_groups(shapes, optimizer_of(type="Muon"))
    assert "model.layers.0.mlp.experts.up_proj.weight" in muon.parameters
    assert set(others.parameters) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Muon"])
def test_loraplus_moves_the_matrices_b_into_groups_of_their_own(kind: str) -> None:
    """Checks ratio and weight decay of each, and that a ratio of 1 changes nothing."""
    pet = {"pet_config": {"target_modules": "q_proj|down_proj"}}
    shapes = adapter_shapes(parse_config("groups", json.dumps({"model": {"model_config": SIZES | pet}})).decoder)
    plain = parameter_groups(shapes, optimizer_of(type=kind))
    assert parameter_groups(shapes, optimizer_of(type=kind, loraplus_lr_ratio=1.0)) == plain
    groups = parameter_groups(shapes, optimizer_of(type=kind, lora_plus_lr_ratio=16))
    assert groups[1].name == f"{groups[0].name}, LoRA+" and groups[1].optimizer == groups[0].optimizer == kind
    found = [(name, group.lr_ratio, group.weight_decay) for group in groups for name in group.parameters]
    assert sorted(found) == sorted((name, 16.0 if "lora_B" in name else 1.0, 0.1) for name in shapes)


@pytest.mark.parametrize(
    ("include", "exclude", "decaying", "without"),
    [
        (["norm"], None, {"norms and biases, with weight decay": "norm.weight"}, set()),
        (None, ["linear_qkv"], {}, {"q_proj.weight", "k_proj.weight", "v_proj.weight"}),
        (["decoder.layers.1.self_attention.linear_qkv.weight"], ["*linear_qkv*"], {},
         {"layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"}),
        (None, ["word_embeddings", "model.layers.1.mlp.up_proj", "*.0.mlp.gate_proj.*"], {},
         {"embed_tokens.weight", "layers.1.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight"}),
    ],
    ids=["a part of a name", "a matrix of three", "include wins", "names of both"],
)  # fmt: skip
def test_rules_of_weight_decay(include: list, exclude: list, decaying: dict, without: set[str]) -> None:
    """Checks which parameters the rules move, by the names in MindSpore Transformers and in Hugging Face's files."""
    settings = parse_config("groups", json.dumps({"model": {"model_config": SIZES | ALL_OPTIONS}})).decoder
    shapes = parameter_shapes(settings)
    rules = optimizer_of(weight_decay_include=include, weight_decay_exclude=exclude)
    found = [(name, group.weight_decay) for group in parameter_groups(shapes, rules) for name in group.parameters]
    decays = {name: len(shape) > 1 and not name.endswith(".bias") for name, shape in shapes.items()}
    for name in shapes:
        decays[name] |= bool(decaying) and name.endswith("norm.weight")
        decays[name] &= not name.endswith(tuple(without))
    assert sorted(found) == sorted((name, 0.1 * is_decayed) for name, is_decayed in decays.items())
    labels = {group.name for group in parameter_groups(shapes, rules)} - {"matrices", "norms and biases"}
    assert labels == (set(decaying) or {"matrices, without weight decay"})


def test_names_in_mindspore_transformers() -> None:
    names = ["model.layers.0.mlp.experts.down_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight",
             "model.layers.2.eh_proj.weight", "model.layers.2.mlp.shared_experts.up_proj.weight",
             "model.layers.2.shared_head.norm.weight", "lm_head.weight"]  # fmt: skip
    assert list(megatron_names(names).values()) == [
        "decoder.layers.0.mlp.experts.weight2", "decoder.layers.1.self_attention.linear_kvb.weight",
        "mtp.layers.0.eh_proj.weight", "mtp.layers.0.transformer_layer.mlp.shared_experts.linear_fc1.weight",
        "mtp.layers.0.final_layernorm.weight", "output_layer.weight",
    ]  # fmt: skip


def test_a_rule_that_matches_nothing_is_told() -> None:
    rules = optimizer_of(weight_decay_include=["layernorm", "linear_q"], weight_decay_exclude=["*.experts.*"])
    names = ["model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert list(unmatched_decay_rules(names, rules)) == [("optimizer.weight_decay_exclude", "*.experts.*")]


def test_groups_keep_the_order_of_the_model() -> None:
    shapes = {"a": (2, 2), "b": (2,), "c": (3, 2), "d": (), "e": (1, 1, 1)}
    assert [group.parameters for group in parameter_groups(shapes, optimizer_of())] == [("a", "c", "e"), ("b", "d")]


def test_norms_of_the_sums_of_squares() -> None:
    """Computes the norms of all gradients, of two groups and of each; the second gradient is not finite."""
    wanted = NormGroups(["a", "b", "c"], {"first": [0, 2], "second": [1]}, per_gradient={"a", "b"})
    found = wanted.norms(np.array([np.inf, 2.0, 25.0, np.inf, 9.0, np.inf, 16.0]))
    assert found == (math.inf, {"first": 5.0, "second": math.inf}, {"a": 3.0, "b": math.inf}, "b")
    assert NormGroups(["a", "b"], {}, per_gradient=set()).norms(np.array([4.0, 0.0])) == (2.0, {}, None, "")


@pytest.mark.parametrize("norm", [0.0, 1e-30, 0.5, math.nextafter(1.0, 0.0), 1.0])
def test_up_to_the_threshold_the_coefficient_is_exactly_one(norm: float) -> None:
    assert clip_coefficient(norm, 1.0) == 1.0


@pytest.mark.parametrize("norm", [math.nextafter(1.0, 2.0), 1.5, 7.0, 1e30])
@pytest.mark.parametrize("max_norm", [1.0, 0.1, 1e-6])
def test_above_the_threshold_the_norm_becomes_the_threshold(norm: float, max_norm: float) -> None:
    coefficient = clip_coefficient(norm, max_norm)
    assert 0 < coefficient < 1
    assert norm * coefficient == pytest.approx(max_norm, rel=FLOAT64)


# What `runner_wrapper` asks for; the gradients here are never looked into

NAMES, GROUP_OF = ["a", "b", "c"], {"a": "matrices", "b": "norms and biases", "c": "matrices"}
SQUARES = [9.0, 0.25, 16.0]  # norms: 5 of the matrices, 0.5 of the rest, sqrt(25.25) of all


def factors(squares: list[float] = SQUARES, scale: float = 1.0, **settings: object) -> list[float]:
    wrapper = parse_config("clip", json.dumps({"runner_wrapper": {"use_clip_grad": True} | settings})).runner_wrapper
    gradients = [object() for _ in NAMES]
    wanted = norm_groups(NAMES, wrapper, GROUP_OF)
    of_groups = [sum(squares[place] for place in group) for group in wanted.groups.values()]
    norms = wanted.norms(np.array([sum(squares), 0.0, *of_groups]) * scale**2)
    same, found = clip(gradients, norms, NAMES, wrapper, GROUP_OF, scale)
    assert same is gradients
    return found


def test_by_the_global_norm_all_shrink_alike() -> None:
    assert factors(max_grad_norm=1.0) == [1.0 / math.sqrt(25.25)] * 3
    assert factors(max_grad_norm=6.0) == [1.0] * 3, "a no-op below the threshold"


def test_by_group_each_shrinks_by_its_own_norm() -> None:
    assert factors(max_grad_norm=1.0, clip_by_group=True) == [0.2, 1.0, 0.2]
    assert factors(max_grad_norm=0.25, clip_by_group=True) == [0.05, 0.5, 0.05]


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("scale", [2.0, 1024.0, 65536.0])
def test_clipping_does_not_depend_on_the_loss_scale(scale: float, by_group: bool) -> None:
    """Unscaled before it is measured: powers of two leave the very same bits."""
    plain = factors(clip_by_group=by_group)
    assert [factor * scale for factor in factors(scale=scale, clip_by_group=by_group)] == plain
    assert factors(scale=scale, max_grad_norm=100.0, clip_by_group=by_group) == [1 / scale] * 3
    assert factors(scale=scale, use_clip_grad=False) == [1 / scale] * 3


@pytest.mark.parametrize("by_group", [False, True])
def test_all_zero_gradients_have_factor_one(by_group: bool) -> None:
    assert factors([0.0] * 3, clip_by_group=by_group) == [1.0] * 3
