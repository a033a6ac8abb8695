"""What recompute_config means for each layer, in MindSpore Transformers' spellings and plainer ones."""

from __future__ import annotations

import pytest
from config_helpers import BASE, error_of, load, notes

from trainer.config import dump_config, parse_config
from trainer.config.layer_ranges import layer_text
from trainer.config.recompute import recompute_text, recomputed_parts
from trainer.plan.render import plan_text
from trainer.run.prepare import build_plan

TEXT = BASE.replace("num_layers: 2", "num_layers: 4")
SILU = r"'feed_forward\.mul', 'feed_forward\.w1\.activation\.silu'"
BLOCK, ATTENTION, MLP = ("block",), ("attention",), ("mlp",)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ("{}", ("",) * 4),
        ("{recompute: False}", ("",) * 4),
        ("{recompute: True}", BLOCK * 4),
        ("{recompute: 0}", ("",) * 4),
        ("{recompute: 3}", BLOCK * 3 + ("",)),
        ("{recompute: []}", ("",) * 4),
        ("{recompute: [3]}", ("",) * 3 + BLOCK),
        ("{recompute: [0, 2-3]}", BLOCK + ("",) + BLOCK * 2),
        ("{recompute: 1-2}", ("",) + BLOCK * 2 + ("",)),
        ("{select_recompute: True}", MLP * 4),
        ("{select_recompute: 2}", MLP * 2 + ("",) * 2),
        ("{select_recompute: [1, 3]}", ("", "mlp", "", "mlp")),
        ("{select_recompute: attention}", ATTENTION * 4),
        ("{select_recompute: [mlp]}", MLP * 4),
        ("{select_recompute: [attention, mlp]}", BLOCK * 4),
        (f"{{select_recompute: [{SILU}]}}", MLP * 4),
        (r"{select_recompute: ['mlp\.activation_func\.silu', 'mlp\.mul']}", MLP * 4),
        (r"{select_recompute: ['self_attention\.core_attention\.flash_attention']}", ATTENTION * 4),
        (r"{select_recompute: ['attention\.wq', 'attention_norm\.cast']}", ATTENTION * 4),
        (r"{select_recompute: ['ffn_norm\.norm']}", MLP * 4),
        (r"{select_recompute: {'feed_forward\.mul': [1, 2], attention: True}}", ("attention", *BLOCK * 2, "attention")),
        ("{select_recompute: {attention: 1, mlp: 2-3}}", ("attention", "", "mlp", "mlp")),
        ("{recompute: 2, select_recompute: [attention]}", BLOCK * 2 + ATTENTION * 2),
        (r"{recompute: True, select_recompute_exclude: ['self_attention\.flash_attention']}", MLP * 4),
        ("{recompute: True, select_recompute_exclude: {mlp: [0]}}", ATTENTION + BLOCK * 3),
        ("{recompute: True, select_recompute_exclude: [3]}", BLOCK * 3 + ("",)),
    ],
)
def test_what_is_computed_again(keys: str, parts: tuple[str, ...]) -> None:
    config = load(f"{TEXT}recompute_config: {keys}\n")
    assert recomputed_parts(config) == parts
    again = parse_config("b.yaml", dump_config(config))
    assert again == config and recomputed_parts(again) == parts


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ("{recompute: True}", BLOCK * 6),
        ("{recompute: [3]}", ("",) * 3 + BLOCK * 3),  # no list selects a module: both do what the last layer does
        ("{recompute: [0, 4]}", BLOCK + ("",) * 3 + BLOCK + ("",)),
        ("{select_recompute: {attention: 3-5, mlp: [4]}}", ("",) * 3 + ATTENTION + BLOCK + ATTENTION),
        ("{recompute: True, select_recompute_exclude: {mlp: [5]}}", BLOCK * 5 + ATTENTION),
    ],
)
def test_multi_token_modules_are_layers_from_num_layers_on(keys: str, parts: tuple[str, ...]) -> None:
    config = load(f"{TEXT}recompute_config: {keys}\n", "model.model_config.mtp_depth=2")
    assert recomputed_parts(config) == parts
    assert recompute_text(build_plan(config).model.recomputed) == recompute_text(parts)


def test_older_files_write_it_at_the_top() -> None:
    assert recomputed_parts(load(f"{TEXT}recompute: True\n")) == BLOCK * 4
    assert recomputed_parts(load(TEXT, "recompute_config.recompute=2")) == (*BLOCK * 2, "", "")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ("{recompute: 5}", ["recompute = 5", "counts layers from the first", "the model has 4"]),
        ("{recompute: -1}", ["recompute = -1", "counts layers"]),
        ("{recompute: [4]}", ["recompute = [4]", "there is no layer 4", "0 to 3"]),
        ("{recompute: [2-7]}", ["there is no layer 7"]),
        ("{recompute: [two]}", ["'two' is not a layer"]),
        ("{recompute: [[0, 1], [2]]}", ["recompute = [[0, 1], [2]]: [0, 1] is a list in a list", "such as [0, 4-7]"]),
        ("{select_recompute: [[1]]}", ["select_recompute = [[1]]: [1] is a list in a list"]),
        ("{recompute: 0.5}", ["recompute = 0.5", "must be"]),
        ("{recompute: {a: 1}}", ["recompute_config.recompute = {'a': 1}", "must be true or false, an integer"]),
        ("{select_recompute: [everything]}", ["'everything' matches no sublayer", "attention or mlp"]),
        ("{select_recompute: {attention: [9]}}", ["select_recompute = ", "there is no layer 9"]),
        ("{select_recompute: [attention, 3]}", ["3 is not the name of a sublayer"]),
        ("{select_recompute_exclude: [9]}", ["select_recompute_exclude = [9]", "there is no layer 9"]),
        ("{recompte: True}", ["recompute_config.recompte", "recompute_config.recompute"]),
    ],
)
def test_mistakes_are_explained(keys: str, parts: list[str]) -> None:
    message = error_of(f"{TEXT}recompute_config: {keys}\n")
    assert all(part in message for part in [*parts, "a.yaml:16", "Fix: "]), message


def test_what_was_taken_is_said() -> None:
    said = notes(f"{TEXT}recompute_config: {{select_recompute: [{SILU}, add]}}\n")
    assert "the feed-forward sublayer of layers 0-3 is recomputed" in said and r"feed_forward\.mul, " in said
    assert "select_recompute: add: no effect" in said
    assert "feed-forward sublayer of every block" in notes(f"{TEXT}recompute_config: {{select_recompute: True}}\n")
    said = notes(f"{TEXT}recompute_config: {{recompute: [1]}}\n")
    assert "recompute: layer 1; in MindSpore Transformers a list counts layers of pipeline stages" in said
    for plain in ("recompute: True", "recompute: 2", "select_recompute: [attention]"):
        assert "recompute" not in notes(f"{TEXT}recompute_config: {{{plain}}}\n")


def test_the_plan_shows_it_and_needs_less_memory() -> None:
    # With so few tokens as in TEXT nothing is kept that counts.
    rows = "runner_config.batch_size=64"
    plans = {keys: build_plan(load(f"{TEXT}recompute_config: {{{keys}}}\n", rows)) for keys in (
        "recompute: False", "recompute: True", "recompute: 2", "select_recompute: [attention]")}  # fmt: skip
    none, whole, some, half = (plan.memory_bytes["activations"] for plan in plans.values())
    assert whole < min(some, half) < max(some, half) < none
    assert "blocks of layers 0-1" in plan_text(plans["recompute: 2"])
    assert "recompute" not in plan_text(plans["recompute: False"])
    # Below the lowest trained layer there is no backward pass.
    frozen = load(f"{TEXT}recompute_config: {{recompute: True}}\nfreeze: {{embeddings: True, layers: 0-2}}\n")
    assert "blocks of layer 3" in plan_text(build_plan(frozen))


def test_layers_in_words() -> None:
    assert layer_text([3]) == "layer 3"
    assert layer_text([2, 0, 1, 5, 7, 8]) == "layers 0-2, 5, 7-8"
    assert recompute_text(("", "mlp")) == "the feed-forward sublayer of layer 1"
