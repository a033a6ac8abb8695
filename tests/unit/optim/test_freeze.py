"""Which weights a freeze section selects, in all its forms, and the messages about its mistakes."""

from __future__ import annotations

import math

import pytest
from config_helpers import BASE, failure, load, notes

from trainer.config import Config, dump_config, parse_config
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from trainer.models.spec.shapes import all_shapes, parameter_shapes
from trainer.optim.freeze import freeze_notes, frozen_names, trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.plan.render import plan_text
from trainer.run.prepare import build_plan

LAYERS = 4
TEXT = BASE.replace("num_layers: 2", f"num_layers: {LAYERS}")


def config_of(freeze: str, *pairs: str) -> Config:
    return load(f"{TEXT}freeze: {freeze}\n", *pairs)


def names_of(*parts: str) -> set[str]:
    """Returns the names that hold one of the parts."""
    return {name for name in parameter_shapes(load(TEXT).decoder) if any(part in name for part in parts)}


LAYER_0, LAYER_1, LAYER_3 = (names_of(layer_prefix(layer)) for layer in (0, 1, 3))


@pytest.mark.parametrize(
    ("freeze", "names"),
    [
        ("{}", set()),
        ("{include: []}", set()),
        ("{include: lm_head.weight}", {HEAD}),
        ("{include: ['*norm.weight']}", names_of("norm")),
        ("{include: ['model.layers.?.mlp.*']}", names_of(".mlp.")),
        ("{include: embeddings}", {EMBEDDING}),
        ("{include: [embeddings, '*.q_proj.weight']}", {EMBEDDING} | names_of("q_proj")),
        # Layers: all that a reader of the documentation may write.
        ("{include: ['layers: 0-1']}", LAYER_0 | LAYER_1),
        ("{include: ['layers 0-1']}", LAYER_0 | LAYER_1),
        ("{include: [layers=0-1]}", LAYER_0 | LAYER_1),
        ("{include: 'layers: 0, 3'}", LAYER_0 | LAYER_3),
        ("{include: [layers: 0-1]}", LAYER_0 | LAYER_1),
        ("{include: [layers: 3]}", LAYER_3),
        ("{include: [layers: [0, 3]]}", LAYER_0 | LAYER_3),
        ("{include: ['layers: [0, 3]']}", LAYER_0 | LAYER_3),
        ("{include: {layers: 0-1, embeddings: true}}", LAYER_0 | LAYER_1 | {EMBEDDING}),
        ("{include: {layers: 0, embeddings: false}}", LAYER_0),
        ("\n  include:\n    - embeddings\n    - layers: 0-1", LAYER_0 | LAYER_1 | {EMBEDDING}),
        ("\n  include:\n    embeddings:\n    layers: 3", LAYER_3 | {EMBEDDING}),
        ("{layers: 0-1}", LAYER_0 | LAYER_1),
        ("{layers: 3, embeddings: True, include: lm_head.weight}", LAYER_3 | {EMBEDDING, HEAD}),
        # exclude takes from include.
        ("{include: '*', exclude: lm_head.weight}", names_of("") - {HEAD}),
        ("{include: '*', exclude: ['layers: 3', '*norm*']}", names_of("") - LAYER_3 - names_of("norm")),
        ("{layers: 0-3, exclude: ['layers: 1']}", names_of("layers") - LAYER_1),
    ],
)
def test_what_is_frozen(freeze: str, names: set[str]) -> None:
    config = config_of(freeze)
    assert frozen_names(config) == names
    shapes = parameter_shapes(config.decoder)
    assert trained_shapes(config) == {name: shape for name, shape in shapes.items() if name not in names}


@pytest.mark.parametrize(
    ("freeze", "parts"),
    [
        ("{include: ['model.layers.0']}", ["freeze.include.0 = 'model.layers.0'", "no weight", "'model.layers.0.*'"]),
        ("{include: [q_proj]}", ["matches no weight", "'*q_proj*'"]),
        ("{include: [model.norm.wight]}", ["matches no weight", "nearest names are model.norm.weight,"]),
        ("{include: ['*.wq.*']}", ["matches no weight", "the names are Hugging Face's: write '*.q_proj.*'"]),
        ("{include: [model.layers.0.feed_forward.w2.weight]}", ["write 'model.layers.0.mlp.down_proj.weight'"]),
        ("{include: [wo]}", ["a pattern must match the whole name: write '*o_proj*'"]),
        ("{include: ['*.ffn_norm.*', output.weight]}", ["write '*.post_attention_layernorm.*'"]),
        ("{include: [model.tok_embeddings.embedding_weight]}", ["write 'model.embed_tokens.weight'"]),
        ("{include: [model.tok_embedings.weight]}", ["nearest names are model.embed_tokens.weight"]),
        ("{include: [embeding]}", ["matches no weight", "nearest names are embeddings,"]),
        ("{include: [lm_head.weight, 0-1]}", ["a.yaml:16: freeze.include.1 = '0-1'", "write layers: 0-1"]),
        ("{include: '*', exclude: [nothing.*]}", ["freeze.exclude.0 = 'nothing.*'", "matches no weight"]),
        ("{include: [layers: 0-4]}", ["freeze.include.0", "there is no layer 4", "layers are 0 to 3"]),
        ("{layers: 2-1}", ["freeze.layers = '2-1'", "ends before it begins"]),
        ("{layers: 0-999999999}", ["there is no layer 999999999"]),
        ("{layers: -1}", ["freeze.layers = -1", "there is no layer -1"]),
        ("{layers: first}", ["freeze.layers = 'first'", "is not a layer", "range such as 0-3"]),
        ("{layers: []}", ["freeze.layers = []", "names no layer"]),
        ("{include: [layers: true]}", ["true is not a layer"]),
        ("{include: [heads: 3]}", ["'heads' is not a short form", "layers and embeddings"]),
        ("{include: [heads: false]}", ["'heads' is not a short form"]),
        ("{include: [embeddings: 3]}", ["embeddings is true or false"]),
        ("{include: '*'}", ["freeze.include = '*'", "leaves nothing to train", "freeze.exclude"]),
        ("{layers: 0-3, include: [embeddings, '*norm*', '*head*']}", ["leaves nothing to train"]),
        ("{exclude: [embeddings]}", ["freeze.exclude = ['embeddings']", "no include"]),
        ("{include: 3}", ["freeze.include = 3", "must be a string, a list or a section"]),
        ("{include: [3]}", ["freeze.include.0 = 3", "must be"]),
        ("{layers: 0.5}", ["freeze.layers = 0.5", "must be"]),
        ("{inclde: ['*']}", ["freeze.inclde", "freeze.include"]),
        ("embeddings", ["freeze = 'embeddings'", "must be a section"]),
    ],
)
def test_mistakes_are_explained(freeze: str, parts: list[str]) -> None:
    message = failure(lambda: frozen_names(config_of(freeze)))
    assert all(part in message for part in [*parts, "a.yaml:16", "Fix: "]), message


def test_an_entry_of_a_list_is_found_by_its_own_line_and_a_flag_by_its_name() -> None:
    config = load(f"{TEXT}freeze:\n  include:\n    - embeddings\n    - mdel.norm.weight\n")
    assert "a.yaml:19: freeze.include.1 = 'mdel.norm.weight'" in failure(lambda: frozen_names(config))
    config = load(TEXT, "freeze.include=[layers: 9]")
    assert "flag --freeze.include: freeze.include.0" in failure(lambda: frozen_names(config))


MIXTURE = "{expert_num: 4, balance_via_topk_bias: True, topk_bias_update_rate: 0.001, first_k_dense_replace: 1}"
MODULES = (f"model.model_config.moe_config={MIXTURE}", "model.model_config.mtp_depth=1")


def test_mtp_modules_can_be_frozen() -> None:
    frozen = frozen_names(config_of(f"{{layers: {LAYERS}}}", *MODULES))
    assert {name.split(".")[2] for name in frozen} == {str(LAYERS)}
    assert {f"model.layers.{LAYERS}.eh_proj.weight", f"model.layers.{LAYERS}.mlp.gate.weight"} < frozen
    cases = ((1, "its multi-token prediction module (mtp_depth) 4"), (2, "its multi-token prediction modules"))
    for modules, text in cases:
        config = config_of("{layers: 0-6}", *MODULES[:1], f"model.model_config.mtp_depth={modules}")
        message = failure(lambda config=config: frozen_names(config))
        assert "there is no layer 6: the model's layers are 0 to 3, and " + text in message


@pytest.mark.parametrize(
    ("freeze", "layers", "plan"),
    [
        ("{}", "", "an expert bias, moved by 0.001 a step"),
        ("{layers: 1-2}", "layers 1-2", "moved by 0.001 a step in layers 3-4, where the router is trained"),
        ("{include: '*.gate.weight'}", "layers 1-4", "an expert bias, which stays, as the routers are frozen"),
        ("{include: '*.2.*correction_bias'}", "layer 2", "moved by 0.001 a step in layers 1, 3-4"),
    ],
)
def test_a_note_says_that_the_expert_bias_of_frozen_routers_stays(freeze: str, layers: str, plan: str) -> None:
    config = config_of(freeze, *MODULES)
    told = f"moe_config.balance_via_topk_bias: the expert bias of frozen routers stays fixed ({layers})"
    assert list(freeze_notes(config))[freeze != "{}" :] == ([told] if layers else [])
    assert plan in build_plan(config).model.experts["balance"]


def test_a_model_with_only_expert_biases_left_has_nothing_to_train() -> None:
    config = config_of("{include: '*', exclude: '*correction_bias'}", *MODULES)
    assert "leaves nothing to train" in failure(lambda: frozen_names(config))


def test_a_tied_head_is_frozen_with_the_embedding_with_a_note() -> None:
    tied = ("model.model_config.tie_word_embeddings=True",)
    count, note = freeze_notes(config_of("{include: embeddings}", *tied))
    weights = sum(math.prod(shape) for shape in all_shapes(config_of("{}", *tied).decoder).values())
    embedding = math.prod(all_shapes(config_of("{}", *tied).decoder)[EMBEDDING])
    assert count == f"freeze: {embedding:,} of {weights:,} weights are frozen"
    assert "tie_word_embeddings" in note and "head" in note
    assert note in plan_text(build_plan(config_of("{include: embeddings}", *tied)))
    for other in (config_of("{include: embeddings}"), config_of("{layers: 0}", *tied)):
        assert len(list(freeze_notes(other))) == 1
    message = failure(lambda: frozen_names(config_of("{include: lm_head.weight}", *tied)))
    assert f"the model has no separate head (tie_word_embeddings): write {EMBEDDING}" in message


@pytest.mark.parametrize(
    ("freeze", "layer"),
    [
        ("{}", -1),
        ("{include: '*', exclude: embeddings}", -1),
        ("{layers: 0-1}", -1),
        ("{embeddings: True}", 0),
        ("{layers: 0-1, embeddings: True}", 2),
        ("{layers: '0, 2', embeddings: True}", 1),
        ("{include: '*', exclude: '*.2.*norm*'}", 2),
        ("{layers: 0-3, embeddings: True}", LAYERS),
    ],
)
def test_the_backward_pass_ends_at_the_lowest_trained_layer(freeze: str, layer: int) -> None:
    config = config_of(freeze)
    assert model_spec(config.decoder).first_reached(trained_shapes(config)) == layer


def test_frozen_weights_are_in_no_group() -> None:
    """Correctness: frozen parameters must not decay or have state. The optimizer holds the parameters of the groups."""
    config = config_of("{include: '*proj*'}")
    groups = parameter_groups(trained_shapes(config), config.optimizer)
    grouped = [name for group in groups for name in group.parameters]
    assert sorted(grouped) == sorted(names_of("norm", "embed", "head"))


def test_the_plan_counts_and_needs_less_memory() -> None:
    whole, half = build_plan(config_of("{}")), build_plan(config_of("{embeddings: True, layers: 0-1}"))
    assert (whole.model.frozen.tensors, whole.model.frozen.weights) == (0, 0)
    assert half.model.frozen.tensors == len(LAYER_0 | LAYER_1 | {EMBEDDING})
    assert half.model.weights + half.model.frozen.weights == whole.model.weights
    assert sum(group.weights for group in half.model.groups) == half.model.weights
    assert half.memory_bytes["weights"] == whole.memory_bytes["weights"]
    for part in ("gradients", "optimizer state"):
        ratio = half.model.weights / whole.model.weights
        assert half.memory_bytes[part] == pytest.approx(ratio * whole.memory_bytes[part])
    # Of all four layers and of two; with fewer tokens nothing is kept that counts.
    whole_kept, half_kept = (
        build_plan(config_of(freeze, "runner_config.batch_size=256")).memory_bytes["activations"]
        for freeze in ("{}", "{embeddings: True, layers: 0-1}")
    )
    assert half_kept < 0.75 * whole_kept
    text = plan_text(half)
    assert f"{whole.model.weights:,}: {half.model.weights:,} trained, {half.model.frozen.weights:,} frozen" in text
    assert "frozen" not in plan_text(whole)


def test_a_model_that_is_not_trained_says_so() -> None:
    assert "freeze: not used, run_mode is predict" in notes(f"{TEXT}freeze: {{layers: 0}}\nrun_mode: predict\n")
    assert FINAL_NORM in trained_shapes(load(TEXT))


@pytest.mark.parametrize("freeze", ["{include: [embeddings, layers: 0-1]}", "{layers: [0, 2-3], exclude: {layers: 2}}"])
def test_the_resolved_configuration_means_the_same(freeze: str) -> None:
    config = config_of(freeze)
    again = parse_config("b.yaml", dump_config(config))
    assert again == config and frozen_names(again) == frozen_names(config)
