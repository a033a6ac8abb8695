"""pet_config: which matrices it means, what is refused, the shapes of adapters, and what needs no MindSpore of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from config_helpers import BASE, error_of, failure, load, notes
from tolerances import ADAPTER_DEVIATION, ADAPTER_MEAN, SEVERAL_OPERATORS

from trainer.checkpoint.adapters import adapter_config, base_model_digest, base_record, check_base, merge_adapters
from trainer.checkpoint.json_models import BaseRecord
from trainer.cli.flags import split_arguments
from trainer.config import Config, dump_config, parse_config, preflight
from trainer.config.schema.adapter import PetConfig
from trainer.models.spec.adapters import layer_targets, module_names, projections, vocabulary_adapters
from trainer.models.spec.init import initial_value
from trainer.models.spec.shapes import (
    adapted_projections,
    adapter_shapes,
    all_shapes,
    block_names,
    block_weights,
    parameter_shapes,
    parameter_specs,
)
from trainer.parallel.world import World
from trainer.plan.render import plan_text
from trainer.run.prepare import build_plan

KEY = "model.model_config.pet_config"
LINE = BASE.splitlines().index("    seq_length: 32") + 2  # where pet_config is written


def with_adapters(**section: object) -> str:
    """Returns the base file with a `pet_config` in one line."""
    return BASE.replace("    seq_length: 32\n", f"    seq_length: 32\n    pet_config: {json.dumps(section)}\n")


def config_of(**section: object) -> Config:
    return load(with_adapters(**section))


DEEP = BASE.replace("num_layers: 2", "num_layers: 12")


def targets(expression: str, layer: int = 0, **section: object) -> list[str]:
    """Returns the matrices of a layer that have an adapter, or [] where the file is refused because none has."""
    adapters = PetConfig(target_modules=expression, **section)
    decoder = load(DEEP).decoder.model_copy(update={"pet_config": adapters})
    return [name.split(".")[-1] for name in layer_targets(decoder, layer)]


# Which matrices


@pytest.mark.parametrize(
    ("expression", "section", "expected"),
    [
        ("embed_tokens|lm_head", {}, ["model.embed_tokens", "lm_head"]),
        (r".*q_proj|model\.embed_tokens", {}, ["model.embed_tokens"]),
        (".*tok_embeddings", {}, ["model.embed_tokens"]),
        (".*output_layer", {}, ["lm_head"]),
        ("embed_tokens|lm_head", {"exclude_layers": "lm_head"}, ["model.embed_tokens"]),
        ("linear_qkv|word_embeddings|output_layer", {"match": "search"}, ["model.embed_tokens", "lm_head"]),
        (".*", {}, []),  # for matrices of layers
        (".*", {"match": "search", "exclude_layers": "output_layer"}, []),
    ],
)
def test_the_vocabulary_has_adapters_if_it_is_named(expression: str, section: dict, expected: list[str]) -> None:
    decoder = config_of(target_modules=expression, rank_pattern={"lm_head": 3}, **section).decoder
    assert list(vocabulary_adapters(decoder)) == expected
    shapes = adapter_shapes(decoder)
    vocabulary, width = decoder.vocab_size, decoder.hidden_size
    if "lm_head" in expected:
        assert shapes["lm_head.lora_A.weight"] == (3, width) and shapes["lm_head.lora_B.weight"] == (vocabulary, 3)
    if "model.embed_tokens" in expected:
        assert shapes["model.embed_tokens.lora_embedding_A"] == (8, vocabulary)
        assert shapes["model.embed_tokens.lora_embedding_B"] == (width, 8)


QUERIES = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*QUERIES, "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (".*wq|.*wk|.*wv|.*wo", QUERIES),  # MindSpore Transformers' files
        (".*q_proj|.*k_proj|.*v_proj|.*o_proj", QUERIES),
        ("q_proj|v_proj", ["q_proj", "v_proj"]),
        ("wq|w2", ["q_proj", "down_proj"]),
        (".*w1|.*w3", ["gate_proj", "up_proj"]),
        (".*(wq|up_proj)", ["q_proj", "up_proj"]),
        (".*self_attn.*", QUERIES),
        (".*attention.*", QUERIES),
        (".*feed_forward.*", ["gate_proj", "up_proj", "down_proj"]),
        (".*_proj", EVERY),
        (".*", EVERY),
        (r"model\.layers\.\d+\.mlp\.down_proj", ["down_proj"]),
        ("q_pro", []),  # the whole name
        (".*norm.*", []),
        # A module of pynative mode is the matrices that are one there.
        (".*linear_qkv|.*linear_fc2", ["q_proj", "k_proj", "v_proj", "down_proj"]),
        ("linear_proj", ["o_proj"]),
        (r"decoder\.layers\.0\.self_attention\.linear_qkv", ["q_proj", "k_proj", "v_proj"]),
        (r"model\.decoder\.layers\.0\.mlp\.linear_fc1", ["gate_proj", "up_proj"]),
        ("linear_q", []),  # the whole name
    ],
)
def test_the_names_of_all_kinds_of_files_match(expression: str, expected: list[str]) -> None:
    assert targets(expression) == expected


def test_each_name_has_its_counterpart() -> None:
    decoder = load(BASE).decoder
    for ours in projections(decoder):
        theirs = module_names(decoder, 0, ours).others[1].split(".", 3)[-1]
        assert targets(f".*{theirs}") == targets(f".*{ours}") == [ours.split(".")[-1]]


def test_layers_are_told_apart() -> None:
    expression = r".*layers\.(0|11)\..*q_proj|.*layers\.1\..*w2"
    assert [targets(expression, layer) for layer in (0, 1, 2, 11)] == [["q_proj"], ["down_proj"], [], ["q_proj"]]
    expression = "model.layers.[0-1].self_attn.q_proj|decoder.layers.[1-2].self_attention.linear_proj"
    assert [targets(expression, layer) for layer in range(4)] == [["q_proj"], ["q_proj", "o_proj"], ["o_proj"], []]


@pytest.mark.parametrize(
    ("expression", "layers"),
    [
        (r"layers.[0-1].*linear_qkv", [0, 1, 10, 11]),  # as re.search: layers.1, then 0.self_attention
        (r"layers\.[0-1]\..*linear_qkv", [0, 1]),
        (r"^model\.decoder\.layers\.(2|11)\.", [2, 11]),
        (r"decoder.*linear_proj$", list(range(12))),
        ("q_proj", []),  # a name of Hugging Face
        ("wq", []),
    ],
)
def test_a_search_finds_the_full_names_of_pynative_mode_alone(expression: str, layers: list[int]) -> None:
    assert [layer for layer in range(12) if targets(expression, layer, match="search")] == layers


@pytest.mark.parametrize(
    ("match", "excluded", "layers"),
    [
        ("full", [r"model\.layers\.1"], [0, *range(2, 12)]),  # a module that contains the matrix
        ("full", [r".*layers\.[0-9]", r".*\.10\..*"], [11]),
        ("full", "1", [0, *range(2, 10)]),  # the beginning of a part of the name, as in graph mode
        ("full", "self_attn", []),
        ("full", "linear_q", []),
        ("full", ["feed_forward", "layers.3"], list(range(12))),
        ("search", "layers.1", [0, *range(2, 10)]),
        ("search", r"layers\.1$", [0, *range(2, 12)]),
        ("search", "mlp", list(range(12))),
    ],
)
def test_excluded_layers(match: str, excluded: str | list[str], layers: list[int]) -> None:
    expression = "linear_qkv"
    found = [layer for layer in range(12) if targets(expression, layer, match=match, exclude_layers=excluded)]
    assert found == layers


def test_modules_of_multi_token_prediction_are_layers_too() -> None:
    def adapted(**section: object) -> list[int]:
        text = with_adapters(**section).replace("seq_length: 32", "seq_length: 32\n    mtp_depth: 2")
        decoder = load(text).decoder
        return [layer for layer in range(4) if layer_targets(decoder, layer)]

    assert adapted() == [0, 1, 2, 3]
    assert adapted(target_modules=r"model\.layers\.[1-2]\..*q_proj") == [1, 2]
    assert adapted(target_modules=r"mtp\.layers\.1.*linear_qkv", match="search") == [3]
    assert adapted(target_modules="linear_qkv", match="search", exclude_layers="mtp") == [0, 1]
    assert adapted(exclude_layers="mtp") == [0, 1]


def test_defaults_are_those_of_the_documentation() -> None:
    section = config_of(pet_type="lora").decoder.pet_config
    assert (section.lora_rank, section.lora_alpha, section.lora_dropout, section.scale) == (8, 16, 0, 2)
    assert (section.lora_a_std, section.lora_b_std, section.excluding, section.match) == (None, 0, (), "full")
    assert layer_targets(config_of(pet_type="lora").decoder, 0) == tuple(f"self_attn.{name}" for name in QUERIES)
    assert load(BASE).decoder.pet_config is None
    config = config_of(lora_rank=4, lora_alpha=1)
    assert parse_config("again", dump_config(config)) == config and config.decoder.pet_config.scale == 0.25


# Mistakes


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"lora_rank": 0}, ["lora_rank = 0", "at least 1"]),
        ({"lora_rank": 2.5}, ["lora_rank = 2.5", "integer"]),
        ({"lora_alpha": 0}, ["lora_alpha = 0", "greater than 0"]),
        ({"lora_alpha": -1}, ["lora_alpha = -1", "greater than 0"]),
        ({"lora_dropout": 1.0}, ["lora_dropout = 1.0", "less than 1"]),
        ({"lora_dropout": -0.1}, ["lora_dropout = -0.1", "at least 0"]),
        ({"pet_type": "ptuning2"}, ["pet_type = 'ptuning2'", "must be lora", "write"]),
        ({"rank": 8}, ["rank: unknown key", "lora_rank"]),
        ({"target_modules": ""}, ["target_modules = ''", "not empty"]),
        ({"target_modules": ["q_proj"]}, ["target_modules = ['q_proj']", "Fix: write a string, for example .*wq|"]),
        ({"target_modules": "q_proj, v_proj"}, ["matches none", "Fix: write .*q_proj|.*v_proj; their names end in"]),
        ({"target_modules": ".*(wq"}, ["is not a regular expression", "unterminated", ".*q_proj|.*k_proj"]),
        ({"target_modules": "*q_proj"}, ["is not a regular expression", "nothing to repeat"]),
        ({"target_modules": ".*query|.*val_proj"}, ["matches none", "write .*q_proj|.*v_proj", "gate_proj"]),
        ({"target_modules": ".*qproj"}, ["matches none of the model's matrices", "write .*q_proj"]),
        ({"target_modules": ".*layers.7.*wq"}, ["only layers that the model does not have", "layers are 0"]),
        ({"exclude_layers": ["("]}, ["exclude_layers = ['(']", "is not a regular expression"]),
        ({"exclude_layers": ".*attention"}, ["exclude_layers = '.*attention'", "excludes every matrix"]),
        ({"exclude_layers": [""]}, ["exclude_layers.0 = ''", "not empty"]),
        ({"match": "search", "target_modules": "wq"}, ["matches none", "write linear_qkv; their names end in"]),
        ({"match": "search", "target_modules": "*q"}, ["'linear_qkv|linear_proj'"]),
        ({"match": "search", "target_modules": ".*"}, ["matches output_layer", "write exclude_layers: 'output_layer'"]),
        (
            {"target_modules": "wq|lm_head|embed_tokens", "use_dora": True},
            ["adapters of model.embed_tokens and lm_head are not supported with use_dora"],
        ),
        ({"target_modules": "lm_head", "lora_dropout": 0.1}, ["adapters of lm_head are not supported"]),
        ({"lora_a_std": 0}, ["lora_a_std = 0", "greater than 0"]),
        ({"lora_b_std": -0.1}, ["lora_b_std = -0.1", "at least 0"]),
        ({"rank_pattern": {"k": 0}}, ["rank_pattern.k = 0", "at least 1"]),
        ({"rank_pattern": {"(": 2}}, ["rank_pattern", "is not a regular expression"]),
        ({"alpha_pattern": {"q_proj": 0}}, ["alpha_pattern.q_proj = 0", "greater than 0"]),
        ({"use_dora": True, "lora_dropout": 0.1}, ["lora_dropout = 0.1", "not supported with use_dora"]),
        ({"use_dora": True, "init_lora_weights": "pissa"}, ["use_dora = true", "cannot be combined", "remove one"]),
        ({"base_dtype": "nf4", "init_lora_weights": "pissa"}, ["base_dtype = 'nf4'", "must be float32", "remove one"]),
        ({"base_dtype": "int4"},
         ["base_dtype = 'int4': must be float32, bfloat16, int8 or nf4", "Fix: write float32 (4 bytes a number"]),
        ({"base_dtype": 4}, ["base_dtype = 4: must be float32", "int8 (1.06) or nf4 (0.52)"]),
        ({"init_lora_weights": False}, ["init_lora_weights = false", "must be true, pissa, pissa_niter_N"]),
        ({"init_lora_weights": "pissa_niter_0"}, ["init_lora_weights = 'pissa_niter_0'", "N from 1 to 99"]),
        ({"init_lora_weights": "olora", "lora_b_std": 0.1}, ["lora_b_std = 0.1", "init_lora_weights olora"]),
        ({"init_lora_weights": "pissa", "lora_rank": 65}, ["lora_rank = 65", "rank 64 at most", "write at most 64"]),
    ],
)
def test_a_mistake_is_told_with_its_line_rule_and_fix(section: dict, parts: list[str]) -> None:
    message = error_of(with_adapters(**section))
    for part in [f"a.yaml:{LINE}", KEY, "Fix: ", *parts]:
        assert part in message, message


def test_adapters_of_embedding_and_head_need_matrices_that_are_two_on_one_rank() -> None:
    text = with_adapters(target_modules="wq|embed_tokens")
    message = error_of(text, "model.model_config.tie_word_embeddings=True", "optimizer.loraplus_lr_ratio=4")
    assert "not supported with tie_word_embeddings, optimizer.loraplus_lr_ratio" in message
    world = World(0, 2)
    for key in ("parallel_config.model_parallel=2", "parallel_config.pipeline_stage=2"):
        message = failure(lambda key=key: preflight(load(text, key, "use_parallel=True"), world))
        assert "adapters of model.embed_tokens are supported with data parallelism only" in message


def test_adapters_need_their_section() -> None:
    message = error_of(BASE, "adapter_id=output")
    assert "adapter_id = 'output'" in message and "pet_config, which is absent" in message and "lora_rank" in message


def test_evaluation_and_prediction_need_adapters(tmp_path: Path) -> None:
    text, here = with_adapters(), f"load_checkpoint={tmp_path}"
    message = failure(lambda: preflight(load(text, "run_mode=predict", here, "predict_data=a")))
    assert "run_mode predict with pet_config needs adapters" in message and "--adapter_id" in message
    message = failure(lambda: preflight(load(text, "run_mode=train", f"adapter_id={tmp_path}/nowhere")))
    assert "adapter_id" in message and "does not exist" in message and "adapter_model.safetensors" in message
    preflight(load(text, "run_mode=predict", here, f"adapter_id={tmp_path}", "predict_data=a"))


def test_resuming_a_finetuning_needs_the_base_too() -> None:
    message = failure(lambda: preflight(load(with_adapters(), "run_mode=finetune", "resume_training=True")))
    assert "run_mode finetune needs weights" in message
    preflight(load(BASE, "run_mode=finetune", "resume_training=True"))


def test_what_a_reader_might_not_expect_is_noted(tmp_path: Path) -> None:
    assert "on random base weights" in notes(with_adapters())
    assert notes(with_adapters(), f"load_checkpoint={tmp_path}") == ""
    assert notes(with_adapters(), f"load_checkpoint={tmp_path}", "resume_training=True") == ""
    unused = {"freeze_exclude": ["*norm*"], "param_init_type": "float16", "lora_a_init": "zero"}
    told = notes(with_adapters(**unused), "run_mode=eval")
    for part in (f"{KEY}.freeze_exclude", "only the adapters are trained", f"{KEY}.param_init_type", "lora_a_init"):
        assert part in told, told


def test_what_an_expression_matches_in_vain_is_noted() -> None:
    quiet = "load_checkpoint=/nowhere"
    found = notes(with_adapters(exclude_layers=[".*wk", "layers.0", "output_layer"]), quiet)
    assert "exclude_layers: 'layers.0' excludes nothing" in found and "'output_layer' excludes nothing" in found
    assert "wk" not in found
    found = notes(with_adapters(target_modules="lm_head|embed_tokens", exclude_layers=["lm_head", "wk"]), quiet)
    assert "'wk' excludes nothing" in found and "'lm_head' excludes" not in found
    found = notes(with_adapters(target_modules=".*", match="search", exclude_layers="output_layer|fc1"), quiet)
    assert "linear_qkv is q_proj, k_proj, v_proj here, each with an adapter of its own" in found
    assert "fc1" not in found and "excludes" not in found


def test_adapters_of_a_matrix_that_transformers_joins_with_another_are_not_for_peft() -> None:
    glm = ("model.arch.type=GlmForCausalLM", "load_checkpoint=/nowhere")
    assert "PEFT cannot load adapters" in notes(with_adapters(target_modules=".*_proj"), *glm)
    assert "PEFT" not in notes(with_adapters(target_modules=".*[qkvo]_proj|.*down_proj"), *glm)
    assert "PEFT" not in notes(with_adapters(target_modules=".*_proj"))


# Shapes and values


SOME = r".*layers\.0\..*q_proj|.*layers\.1\..*(wv|w2)"


def test_shapes_stand_in_forward_order_under_the_names_of_peft() -> None:
    settings = config_of(lora_rank=3, target_modules=SOME).decoder
    width = settings.ffn_size
    assert adapter_shapes(settings) == {
        "model.layers.0.self_attn.q_proj.lora_A.weight": (3, 64),
        "model.layers.0.self_attn.q_proj.lora_B.weight": (64, 3),
        "model.layers.1.self_attn.v_proj.lora_A.weight": (3, 64),
        "model.layers.1.self_attn.v_proj.lora_B.weight": (64, 3),
        "model.layers.1.mlp.down_proj.lora_A.weight": (3, width),
        "model.layers.1.mlp.down_proj.lora_B.weight": (64, 3),
    }
    assert list(all_shapes(settings)) == [*parameter_shapes(settings), *adapter_shapes(settings)]
    assert adapted_projections(settings) == ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    assert block_names(settings) == block_weights(settings)
    assert block_weights(settings)[-6:-4] == ["self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight"]


def test_masks_stand_at_the_end_where_there_is_dropout() -> None:
    settings = config_of(lora_dropout=0.1, target_modules="wq|w2").decoder
    assert block_names(settings) == [
        *block_weights(settings), "self_attn.q_proj.lora_dropout", "mlp.down_proj.lora_dropout",
    ]  # fmt: skip


def test_a_model_without_adapters_is_as_it_was() -> None:
    settings = load(BASE).decoder
    assert adapter_shapes(settings) == {} and all_shapes(settings) == parameter_shapes(settings)
    assert not any("lora" in name for name in block_names(settings))


def values(config: Config) -> dict[str, np.ndarray]:
    specs = parameter_specs(config.decoder)
    return {name: initial_value(spec, config.decoder, config.seed) for name, spec in specs.items()}


def test_initial_values() -> None:
    weights = values(config_of())
    a, b = (weights[f"model.layers.1.self_attn.k_proj.lora_{part}.weight"] for part in "AB")
    assert not b.any() and a.dtype == np.float32
    assert np.abs(a).max() <= 1 / 8 and abs(a.mean()) < ADAPTER_MEAN
    assert a.std() == pytest.approx(1 / 8 / 3**0.5, rel=ADAPTER_DEVIATION)
    chosen = values(config_of(lora_a_std=0.5, lora_b_std=0.25))
    a, b = (chosen[f"model.layers.1.self_attn.k_proj.lora_{part}.weight"] for part in "AB")
    assert a.std() == pytest.approx(0.5, rel=2 * ADAPTER_DEVIATION)
    assert b.std() == pytest.approx(0.25, rel=2 * ADAPTER_DEVIATION)
    base = values(load(BASE))
    assert all(np.array_equal(weights[name], base[name]) for name in base)


def test_merging_adds_the_scaled_product() -> None:
    config = config_of(lora_rank=2, lora_alpha=5, target_modules=SOME)
    weights, random = values(config), np.random.default_rng(1)
    for name, shape in adapter_shapes(config.decoder).items():
        weights[name] = random.normal(size=shape).astype(np.float32)
    found = merge_adapters(weights, config.decoder)
    assert list(found) == list(parameter_shapes(config.decoder))
    changed = {name for name in found if not np.array_equal(found[name], weights[name])}
    assert changed == {name.split(".lora_")[0] + ".weight" for name in adapter_shapes(config.decoder)}
    name = "model.layers.1.mlp.down_proj"
    a, b = weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"]
    np.testing.assert_allclose(found[f"{name}.weight"], weights[f"{name}.weight"] + 2.5 * b @ a, atol=SEVERAL_OPERATORS)


def test_the_description_is_that_of_peft() -> None:
    section = adapter_config(config_of(lora_dropout=0.1).decoder, "/models/base")
    assert section["target_modules"] == QUERIES and section["base_model_name_or_path"] == "/models/base"
    assert (section["peft_type"], section["r"], section["lora_alpha"], section["lora_dropout"]) == ("LORA", 8, 16, 0.1)
    some = adapter_config(config_of(target_modules=SOME).decoder, "")  # not every layer alike: full names
    assert some["base_model_name_or_path"] is None
    assert some["target_modules"] == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj",
    ]  # fmt: skip


def test_the_digest_sees_every_bit_of_the_base_and_nothing_else() -> None:
    config = config_of()
    weights = values(config)
    found = base_model_digest(weights, config.decoder)
    extra = {"lm_head.bias": np.ones(3), "model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((8, 64), np.float32)}
    assert base_model_digest(weights | extra, config.decoder) == found
    other = {"model.norm.weight": np.nextafter(weights["model.norm.weight"], np.float32(2))}
    assert base_model_digest(weights | other, config.decoder) != found
    state = BaseRecord(**base_record(config, weights))
    check_base(state, config, weights)
    message = failure(lambda: check_base(state, config, weights | other))
    assert "trained on another base model" in message and "leave load_checkpoint out and use --seed 1" in message
    state = state.model_copy(update={"load_checkpoint": "base.safetensors"})
    message = failure(lambda: check_base(state, config, weights | other))
    assert "Fix: give the same base model with --load_checkpoint base.safetensors" in message


def test_the_plan_tells_what_is_trained_and_what_it_takes() -> None:
    plain, plan = build_plan(load(BASE)), build_plan(config_of(lora_dropout=0.1))
    adapters = 2 * 4 * (64 + 64) * 8  # layers, matrices, rows and columns, rank
    assert plan.model.weights == adapters and plain.model.weights == plan.model.frozen.weights
    text = " ".join(plan_text(plan).split())
    frozen = plain.model.weights
    assert f"{adapters + frozen:,}: {adapters:,} trained, {frozen:,} frozen" in text
    assert "adapters rank 8, times 2, dropout 0.1, on q_proj k_proj v_proj o_proj" in text
    assert "adapters" not in plan_text(plain)
    some = build_plan(config_of(target_modules=".*layers.1.*w2"))
    assert re.search("adapters +rank 8, times 2, on down_proj of layer 1\n", plan_text(some))
    some = build_plan(config_of(target_modules=".*layers.1.*w2|.*wq", lora_a_std=0.02, lora_b_std=0.01))
    assert "on q_proj; down_proj of layer 1\n" in plan_text(some)
    starts = "rank 8, times 2, A starts with standard deviation 0.02, B starts with standard deviation 0.01, on"
    assert starts in plan_text(some) and "starts with" not in text
    root = plan_text(build_plan(config_of(lora_rank=4, lora_alpha=6, use_rslora=True)))
    assert re.search(r"adapters +rank 4, times 3 \(rsLoRA\), on q_proj", root)
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.*": 4}}
    some = build_plan(config_of(lora_rank=4, lora_alpha=8, **patterns))
    assert "rank 2 to 4, times 1 to 4, on q_proj" in plan_text(some)
    assert some.model.weights == 2 * (64 + 64) * (2 + 3 * 4)
    assert any("'proj' matches none of the adapted" in note
               for note in build_plan(config_of(alpha_pattern={"proj": 2})).notes)  # fmt: skip
    config = load(with_adapters(lora_rank=4, **patterns), "context.mode=1")
    message = failure(lambda: build_plan(config))
    assert "alpha_pattern" in message and "q_proj has adapters of rank 2 with different factors" in message
    plus = build_plan(load(with_adapters(), "optimizer.loraplus_lr_ratio=16"))
    assert "loraplus_lr_ratio 16" in plan_text(plus) and "loraplus" not in text
    row = rf"matrices, LoRA\+ +0 +8 +{adapters // 2:,} +times 16\n"
    assert re.search(row, plan_text(plus)) and "times 1\n" in plan_text(plus)
    assert not any("loraplus" in note for note in plus.notes)
    unused = build_plan(load(BASE, "optimizer.loraplus_lr_ratio=16")).notes
    assert any("loraplus_lr_ratio" in note and "no adapters" in note for note in unused)
    sizes, before = plan.memory_bytes, plain.memory_bytes
    assert sizes["gradients"] == 4 * adapters and sizes["optimizer state"] == 8 * adapters
    assert sizes["weights"] == before["weights"] + 4 * adapters


def test_flags_of_a_command_may_have_values() -> None:
    own = {"command_flags": ("--merge",), "command_options": ("--output",)}
    found = split_arguments(["--config", "a", "--output=x", "--merge", "--seed", "3", "--output", "y"], **own)
    assert found.rest == ["--output", "x", "--merge", "--output", "y"] and found.config == "a"
    assert [override.key for override in found.overrides] == ["seed"]
    assert "needs a value" in failure(lambda: split_arguments(["--output"], **own))
