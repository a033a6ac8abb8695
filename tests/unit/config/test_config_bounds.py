"""What could fill memory, never end or stand for nothing: refused by bounds, within two seconds."""

from __future__ import annotations

import os
import time
from typing import Annotated, Literal, get_args, get_origin

import pytest
from config_helpers import BASE, error_of, failure, load

from trainer.cli.main import dispatch
from trainer.config import Config
from trainer.config.patterns import read_pattern
from trainer.config.schema.fields import shape_of, support_of
from trainer.errors import UserError


def bomb(use: str) -> str:
    """Returns nine sections that refer nine times to the one before: 9^9 values when they are expanded."""
    lines = ["processor:", "  a0: &a0 {x: 1, y: 2}"]
    for n in range(1, 9):
        names = ", ".join([f"*a{n - 1}"] * 9)
        lines.append(f"  a{n}: &a{n} {'{<<: [' + names + ']}' if use == 'merge' else '[' + names + ']'}")
    return "\n".join(lines)


def chain(length: int) -> str:
    links = [f"  a{n}: &a{n} {{<<: *a{n - 1}}}" for n in range(1, length)]
    return "\n".join(["processor:", "  a0: &a0 {x: 1}", *links])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (bomb("alias"), "more than 20000 keys and values"),
        (bomb("merge"), "more than 20000 keys and values"),
        (chain(900), "more than 64 levels"),
        ("processor: " + "[" * 900 + "]" * 900, "more than 64 levels"),
        ("processor: " + "{a: " * 900 + "1" + "}" * 900, "more than 64 levels"),
        ("processor: " + "[" * 200_000, "more than 64 levels"),
        ("\n".join(" " * n + "a:" for n in range(900)), "more than 64 levels"),
        ("\n".join(f"key{n}: {n}" for n in range(11_000)), "more than 20000 keys and values"),
        ("seed: 1" + "0" * 4000, "a.yaml:1: seed = '100000"),
        ("seed: 0x1" + "0" * 4000, "must be an integer of at most 64 bits"),
        ("optimizer: {learning_rate: 1e999}", "optimizer.learning_rate = '1e999': must be a number"),
        ("model: {model_config: {num_layers: 9223372036854775808}}", "num_layers = '9223372036854775808': must be an"),
        *((f"model: {{model_config: {{num_layers: 9223372036854775807, {keys}}}}}", "must be at most 10000")
          for keys in ("batch_size: 1", "sliding_window: 8, sliding_window_pattern: 2",
                       "moe_config: {mlp_only_layers: [1]}", "window_size: [7, 0], window_attn_skip_freq: 2")),
        ("model: {model_config: {hidden_size: 100000000}}", "must be at most 16777216"),
        ("lr_schedule: {num_cycles: 1.0e+308}", "num_cycles = 1e+308: must be at most"),
        ("model: {model_config: {eos_token_id: [1, 4294967296]}}", "must be at most 2147483647"),
        ("processor: !secret {a: 1}", "the tag !secret is not supported on a list or mapping"),
        ("processor: !!set {a, b}", "the tag !!set is not supported"),
        ("callbacks: !!python/tuple [1, 2]", "the tag !!python/tuple is not supported"),
        ('output_dir: "a\\0b"', "a text with the character U+0000"),
        ('output_dir: "a\\ud800b"', "a text with the character U+D800"),
        ('output_dir: "\\UFFFFFFFF"', "not valid YAML"),
        ("output_dir: ~nosuchuser/out", "this machine has no user 'nosuchuser'"),
        (f"output_dir: {'x' * 300}", "at most 255 bytes"),
        ("freeze: {include: ['" + "*a" * 5000 + "']}", "at most 1000 characters"),
        *((f"model: {{model_config: {{num_layers: 2, pet_config: {{target_modules: '{expression}'}}}}}}", rule)
          for expression, rule in (
              ("(" * 60 + ".*q_proj" + ")*" * 60, "itself repeats or chooses"),
              ("((a{1,30}){1,30}){1,30}", "itself repeats or chooses"),
              ("(a|a)*b", "itself repeats or chooses"),
              (".?" * 60 + "x", "more than 4 of"),
              ("(.|.)" * 30, "more than 4 of"),
              ("x" * 401, "longer than 400 characters"),
          )),
    ],
)
def test_what_could_fill_memory_or_never_end_is_refused(text, rule):
    begun = time.process_time()
    message = error_of(text)
    assert rule in message and "\n  Fix: " in message
    assert len(message) < 5000
    assert time.process_time() - begun < 4, "seconds of this process"


def test_what_is_within_the_bounds_is_read():
    assert load(chain(40))
    assert "must be a section" in error_of("processor: " + "[" * 60 + "]" * 60)


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"no_such_key_{n}: {n}" for n in range(2000)),
        "model:\n  model_config:\n" + "\n".join(f"    hidden_sizes_{n}: {n}" for n in range(2000)),
        "train_dataset:\n  data_loader:\n    patterns: [" + "1, " * 2000 + "2]",
        "model: {model_config: {num_layers: 80, pet_config: {target_modules: '(.*)*x|((a|.)*)*y|q_proj'}}}",
        f"model: {{model_config: {{num_layers: 80, pet_config: {{target_modules: '(?:{'(?:.*)*|' * 19})*'}}}}}}",
        f"model: {{model_config: {{num_layers: 9, pet_config: {{target_modules: '{'(?:(?=(?:.*.*)*).)*' * 9}'}}}}}}",
        "model: {model_config: {num_layers: 40, pet_config: {target_modules: '(.*.*.*.*)x|.*q_proj'}}}",
    ],
    ids=["top level", "model", "values", "expression", "repeats", "assertions", "wildcards"],
)
def test_thousands_of_mistakes_and_any_expression_are_answered_in_two_seconds(text):
    begun = time.process_time()
    try:
        load(text)
    except UserError:
        pass
    assert time.process_time() - begun < 2


def test_expressions_of_usual_length_are_taken():
    for expression in (r"^(?!.*vision).*\.layers\.(1[0-9]|2[0-3])\..*_proj$", ".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3",
                       r"[^(]*\.(q|k)_proj", r".*\.\d+\.\w+\.q_proj?", r"(?i:.*)(?P<name>q|k)_proj"):  # fmt: skip
        assert read_pattern(expression).pattern == expression


def test_every_count_has_an_upper_bound():
    def counts(annotation):
        if get_origin(annotation) is Annotated:
            inner, *notes = get_args(annotation)
            if inner is int:
                return [any(hasattr(one, "le") or hasattr(one, "lt") for note in notes for one in note.metadata)]
            return counts(inner)
        parts = get_args(annotation) if get_origin(annotation) is not Literal else ()
        return [annotation is not int] if not parts else [found for part in parts for found in counts(part)]

    seen, todo, unbounded = set(), [Config], []
    while todo:
        kind = todo.pop()
        seen.add(kind)
        for name, field in kind.model_fields.items():
            todo += [below for below in shape_of(field).kinds if below not in seen]
            is_bounded = any(hasattr(one, "le") or hasattr(one, "lt") for one in field.metadata)
            acts = "supported" == kind.support == support_of(field)[0]
            if acts and not is_bounded and not all(counts(field.annotation)):
                unbounded.append(f"{kind.__name__}.{name}")
    # Layers by their number, which those of the model bound, and weights of files.
    by_number = ("recompute", "select_comm_recompute", "select_recompute", "select_recompute_exclude")
    expected = {"FreezeConfig.layers", *(f"RecomputeConfig.{name}" for name in by_number)}
    assert {name for name in unbounded if not name.endswith("data_path")} == expected


@pytest.mark.parametrize(
    ("aliases", "overrides"),
    [(1500, [1500]), (1, [12_000, 12_000]), (1, [25_000])],
    ids=["a list in the place of aliases", "all flags together", "one flag"],
)
def test_what_overrides_add_counts_too(aliases, overrides):
    text = f"processor: {{one: &x 1, many: [{', '.join(['*x'] * aliases)}]}}"
    begun = time.process_time()
    message = error_of(text, *(f"processor.one=[{','.join(['1'] * count)}]" for count in overrides))
    assert "flag --processor.one" in message and "more than 20000 keys and values" in message and "Fix: " in message
    assert time.process_time() - begun < 4


@pytest.mark.parametrize("words", [["status", "~nosuchuser"], ["stop", "~nosuchuser"], ["verify", "~nosuchuser"],
                                   ["doctor", "--output_dir", "~nosuchuser/out"],
                                   ["export", "--config", "{file}", "--output", "~nosuchuser/model"]],
                         ids=lambda words: words[0])  # fmt: skip
def test_an_argument_names_no_folder_of_a_user_that_is_not_there(words, tmp_path):
    (tmp_path / "a.yaml").write_text(BASE)
    message = failure(lambda: dispatch([word.replace("{file}", str(tmp_path / "a.yaml")) for word in words]))
    assert "this machine has no user 'nosuchuser'" in message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_of_a_model_folder_that_never_ends_is_refused(name, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = f"pretrained_model_dir: {tmp_path}"
    (tmp_path / name).write_text("[" * 200_000)
    assert "is nested too deep" in error_of(text)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert f"{name} cannot be read" in error_of(text)
