"""The groups of `benchmark.py targets`: their figures against their targets, and whole runs of some."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_helpers import programs, run

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import benchmark  # noqa: E402
import benchmark_groups  # noqa: E402
import benchmark_preferences  # noqa: E402
import benchmark_targets  # noqa: E402
import benchmark_tools  # noqa: E402

from trainer.data import build_datasets  # noqa: E402
from trainer.optim.freeze import trained_shapes  # noqa: E402


def figures_of_groups() -> dict[str, dict]:
    """Returns a round that meets each target."""
    trainer = replace(run(1.4, 0.45, 1_300_000_000), eval_tokens_per_second=2.6 * 2048 / 0.45)
    eager, compiled = run(1.0, 0.6, 800_000_000), run(30.0, 0.6)
    prediction = {"trainer 1 decode": 0.2, "trainer 8 decode": 0.6, "eager 1 decode": 0.35, "eager 8 decode": 0.91,
                  "trainer 8 prompt": 0.1, "trainer 8 evaluation": 0.25}  # fmt: skip
    return {
        "dense": {"trainer": trainer, "eager": eager, "compiled": compiled, "ceiling": 160.0},
        "bfloat16": {"trainer": trainer, "compiled": compiled}, "wide": {"trainer": run(1.4, 0.37), "eager": eager},
        "experts": {"trainer": run(1.4, 0.37), "eager": eager, "dense": run(1.4, 0.37), "experts 4": run(1.4, 0.4),
                    "experts 64": run(1.4, 0.47)},
        "lora": {"trainer": run(1.0, 0.3), "full": run(1.4, 0.4), "before": run(3.0, 0.39)},
        "lora_memory": {"trainer": run(peak=6_400_000_000)},
        "base_dtypes": {"float32": run(1.0, 4.0, 5_900_000_000), "bfloat16": run(1.0, 5.0, 3_000_000_000),
                        "int8": run(1.0, 5.0, 2_300_000_000), "nf4": run(1.0, 5.0, 2_000_000_000)},
        "large": {"trainer": run(15.0, 10.0)},
        "latent": {"trainer": run(1.0, 0.4), "heads": run(1.0, 0.4), "before": run(3.0, 0.48)},
        "dropout": {"trainer": run(1.0, 0.48), "without": run(1.0, 0.4), "before": run(3.0, 0.58)},
        "memory": {"trainer": run(peak=1_360_000_000)}, "prediction": prediction, "start": {"help": 0.3, "plan": 0.5},
        "watching": {"share": 0.005, "step": 0.5, "own": 1e-4, "others": 1e-4, "report": 0.1},
        "qwen3": {"trainer": run(steady=1.0), "peer": run(steady=1.91)},
        "qwen3_lora": {"trainer": run(steady=1.0), "peer": run(steady=1.71)},
        "wide_lora": {"trainer": run(steady=1.0), "peer": run(steady=1.51)},
        "one_sequence": {"trainer": run(steady=1.0), "peer": run(steady=1.41)},
        "variants": {f"{name}{side}": run(steady=seconds) for side, seconds in (("", 1.0), (", eager", 1.31))
                     for name in ("latent attention", "windows of 64", "dropout")},
        "preferences": {
            **{f"{method}, {model}{side}": run(steady=seconds, peak=1_140_000_000) for method in ("dpo", "ipo", "orpo")
               for model in ("all weights", "LoRA") for side, seconds in (("", 1.0), (", TRL", 1.31))},
            "supervised": run(),
        },
    }  # fmt: skip


@pytest.mark.parametrize(("group", "changes", "failing"), [
    ("dense", {}, []),
    ("dense", {"compiled": run(30.0, 0.58)}, ["tokens/s, float32 / torch.compile"]),
    ("dense", {"eager": run(1.0, 0.58, 800_000_000)}, ["tokens/s, float32 / PyTorch eager"]),
    ("dense", {"eager": run(1.0, 0.6, 770_000_000)}, ["peak memory less MindSpore's import / PyTorch's"]),
    ("dense", {"ceiling": 191.0}, ["share of the float32 product peak"]),  # 55 GFLOP in 0.45 s
    ("bfloat16", {"compiled": run(30.0, 0.51)}, ["tokens/s, bfloat16 / torch.compile with autocast"]),
    ("wide", {"eager": run(1.0, 0.59)}, ["tokens/s, 8 layers of 512, seq 512 / PyTorch eager"]),
    ("experts", {}, []),
    ("experts", {"eager": run(1.0, 0.59)}, ["tokens/s, 8 experts / PyTorch's loop over experts"]),
    ("experts", {"dense": run(1.0, 0.35)}, ["tokens/s, 8 experts / dense of equal active weights"]),
    ("experts", {"experts 64": run(1.0, 0.51)}, ["step, 64 / 4 experts"]),
    ("lora", {}, []),
    ("lora", {"full": run(1.4, 0.39)}, ["step, LoRA / all weights trained"]),
    ("lora", {"before": run(3.0, 0.38)}, ["tokens/s, LoRA / an earlier checkout"]),
    ("lora", {"trainer": run(1.1, 0.3)}, ["first step with LoRA, seconds"]),
    ("lora_memory", {"trainer": run(peak=6_410_000_000)}, ["peak memory, LoRA of Qwen3-0.6B, GiB"]),
    ("base_dtypes", {}, []),
    ("base_dtypes", {"int8": run(1.0, 5.0, 2_400_000_000)}, ["peak memory, LoRA of Qwen3-0.6B on int8, GB"]),
    ("base_dtypes", {"nf4": run(1.0, 5.1, 2_000_000_000)}, ["tokens/s, LoRA of Qwen3-0.6B on nf4 / float32"]),
    ("large", {}, []),
    ("large", {"trainer": run(15.1, 10.0)}, ["first step / a later one, Qwen3-0.6B"]),
    ("latent", {"heads": run(1.0, 0.39)}, ["step, latent attention / heads of 32"]),
    ("latent", {"before": run(3.0, 0.47)}, ["tokens/s, latent attention / an earlier checkout"]),
    ("dropout", {"without": run(1.0, 0.39)}, ["step, dropout of sublayers and attention / none"]),
    ("dropout", {"before": run(3.0, 0.57)}, ["tokens/s, dropout / an earlier checkout"]),
    ("memory", {"trainer": run(peak=1_370_000_000)}, ["peak memory, vocabulary 32,768, against before"]),
    ("prediction", {}, []),
    ("prediction", {"eager 1 decode": 0.33}, ["tokens/s, prediction of 1 / PyTorch eager"]),
    ("prediction", {"eager 8 decode": 0.89}, ["tokens/s, prediction of 8 / PyTorch eager"]),
    ("prediction", {"trainer 8 prompt": 0.13}, ["tokens/s, prompts / evaluation"]),
    ("start", {"help": 0.31}, ["CPU seconds of help"]),
    ("start", {"plan": 0.51}, ["CPU seconds of plan"]),
    ("bfloat16", {"float32": run(30.0, 0.51)}, ["tokens/s, bfloat16 / torch.compile with autocast"]),
    ("qwen3", {}, []),
    ("qwen3", {"peer": run(steady=1.89)}, ["tokens/s, Qwen3-0.6B / transformers"]),
    ("qwen3_lora", {}, []),
    ("qwen3_lora", {"peer": run(steady=1.69)}, ["tokens/s, LoRA of Qwen3-0.6B / transformers and PEFT"]),
    ("wide_lora", {}, []),
    ("wide_lora", {"peer": run(steady=1.49)}, ["tokens/s, LoRA of 8 layers of 512 / transformers and PEFT"]),
    ("one_sequence", {}, []),
    ("one_sequence", {"peer": run(steady=1.39)}, ["tokens/s, 8 layers of 512, one sequence of 512 / PyTorch eager"]),
    ("variants", {}, []),
    ("variants", {"latent attention, eager": run(steady=1.29)}, ["tokens/s, latent attention / PyTorch eager"]),
    ("variants", {"windows of 64, eager": run(steady=1.29)}, ["tokens/s, windows of 64 / PyTorch eager"]),
    ("variants", {"dropout, eager": run(steady=1.29)}, ["tokens/s, dropout / PyTorch eager"]),
    ("preferences", {}, []),
    ("preferences", {"dpo, all weights, TRL": run(steady=1.29)}, ["pairs/s, DPO, all weights / TRL"]),
    ("preferences", {"ipo, LoRA, TRL": run(steady=1.29)}, ["pairs/s, IPO, LoRA / TRL"]),
    ("preferences", {"orpo, LoRA, TRL": run(steady=1.29)}, ["pairs/s, ORPO, LoRA / TRL"]),
    ("preferences", {"supervised": run(peak=990_000_000)},
     ["peak memory, DPO with LoRA / supervised with the same tokens"]),
    ("watching", {}, []),
    ("watching", {"share": 0.0051}, ["share of a step, lines, metrics, TensorBoard, report"]),
])  # fmt: skip
def test_each_figure_of_the_targets_can_fail_alone(group: str, changes: dict, failing: list[str]) -> None:
    lines = list(benchmark_targets.GROUPS[group].lines([{**figures_of_groups()[group], **changes}] * 2))
    assert [line.name for line in lines if line.verdict != "pass"] == failing


def test_a_slow_evaluation_and_first_step_miss_their_targets() -> None:
    slow = replace(run(1.6, 0.45), eval_tokens_per_second=2.4 * 2048 / 0.45)
    lines = benchmark_targets.GROUPS["dense"].lines([{**figures_of_groups()["dense"], "trainer": slow}])
    assert [line.name for line in lines if line.verdict != "pass"] == [
        "tokens/s, evaluation / training", "first step after the import, seconds"]  # fmt: skip


def test_limits_without_avx512_are_those_of_lines() -> None:
    figures = figures_of_groups()
    found = [line for name, group in benchmark_targets.GROUPS.items() for line in group.lines([figures[name]])]
    lines = {line.name: line for line in found}
    for name, limit in benchmark_targets.AVX2_LIMITS.items():
        assert lines[name].at_least and limit < lines[name].limit


def targets_flags(flags: list[str]) -> list[str]:
    """Returns the flags of `targets` with the programs of flags of `dense`."""
    python, trainer = (flags[flags.index(name) + 1] for name in ("--torch_python", "--trainer"))
    return ["targets", "--torch_python", python, "--trainer", trainer, "--steps", "5", "--rounds", "2"]


def test_whole_benchmark_of_some_targets(tmp_path, capsys) -> None:
    flags = programs(tmp_path)
    names = ["bfloat16", "wide", "experts", "memory"]
    assert benchmark.main([*targets_flags(flags), "--only", *names]) == 1
    result = json.loads(capsys.readouterr().out)
    assert {line["name"]: line["value"] for line in result["lines"] if "tokens/s" in line["name"]} == {
        "tokens/s, bfloat16 / torch.compile with autocast": 0.8,
        **dict.fromkeys(("tokens/s, 8 layers of 512, seq 512 / PyTorch eager",
                         "tokens/s, 8 experts / PyTorch's loop over experts",
                         "tokens/s, 8 experts / dense of equal active weights"), 1.0),
    }  # fmt: skip
    assert list(result["rounds"]) == names and {len(found) for found in result["rounds"].values()} == {2}
    assert result["machine"]["torch"] == "2.0"


def trained(keys: dict[str, str]) -> int:
    """Returns the number of trained weights of a model of the benchmark."""
    config = benchmark_groups.config_of(benchmark_groups.DENSE, keys)
    return sum(math.prod(shape) for shape in trained_shapes(config).values())


def test_both_programs_must_train_the_same(tmp_path, capsys) -> None:
    group = ["--only", "one_sequence"]
    weights = trained(benchmark_groups.WIDE)
    flags = targets_flags(programs(tmp_path, torch_seconds=0.75, trained=weights))
    assert benchmark.main([*flags, *group]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [line["value"] for line in result["lines"]] == [1.5]
    assert result["rounds"]["one_sequence"][0]["peer"]["trained"] == weights
    programs(tmp_path, trained=weights * 98 // 100)
    assert benchmark.main([*flags, *group]) == 2
    assert f"trains {weights:,} weights, the other program {weights * 98 // 100}" in capsys.readouterr().err
    programs(tmp_path, trained=weights, loss=8.6)
    assert benchmark.main([*flags, *group]) == 2
    assert "begins with a loss of 8.4, the other program with 8.6" in capsys.readouterr().err


@pytest.mark.parametrize(("program", "message"), [
    ("echo 'no module transformers' >&2; exit 1", "exit code 1:\nno module transformers"),
    ("echo 12 steps", "no JSON in the output:\n12 steps"),
])  # fmt: skip
def test_a_program_that_fails_is_named_with_its_last_lines(tmp_path, capsys, program, message) -> None:
    flags = targets_flags(programs(tmp_path))
    python = tmp_path / "torch_python"
    python.write_text(f"#!/bin/sh\ncase $1 in -c) echo '{{}}'; exit;; esac\n{program}\n")
    assert benchmark.main([*flags, "--only", "wide_lora"]) == 2
    error = capsys.readouterr().err
    assert f"{python} " in error and "benchmark_finetune.py" in error and message in error


def test_the_other_programs_have_the_sizes_of_the_trainer() -> None:
    config_of = benchmark_groups.config_of
    path = benchmark_groups.DENSE
    qwen3 = benchmark_tools.finetune_sizes(config_of(path, benchmark_groups.LORA | benchmark_groups.QWEN3))
    assert qwen3 == {"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_size": 128, "intermediate": 3072,
                     "vocabulary": 151936, "tokens": 512, "batch": 1, "lora_rank": 8, "lora_alpha": 16}  # fmt: skip
    latent = benchmark_tools.torch_sizes(config_of(path, benchmark_groups.LATENT))
    assert {"query_rank": 96, "key_value_rank": 64, "nope": 32, "rope": 16, "value": 32}.items() <= latent.items()
    windows = benchmark_tools.torch_sizes(config_of(path, {"model.model_config.sliding_window": "64"}))
    dropout = benchmark_tools.torch_sizes(config_of(path, benchmark_groups.DROPOUT))
    assert windows["window"] == 64 and (dropout["hidden_dropout"], dropout["attention_dropout"]) == (0.1, 0.1)
    half = {"model.model_config.layer_types": "[full_attention, full_attention, sliding_attention, sliding_attention]"}
    interleaved = benchmark_groups.LATENT | {"model.model_config.rope_interleave": "True"}
    dora = {"model.model_config.pet_config": "{use_dora: True}"}
    for sizes, keys, message in (
        (benchmark_tools.torch_sizes, {"model.model_config.sliding_window": "64"} | half, "in all layers or in none"),
        (benchmark_tools.torch_sizes, interleaved, "halves of a head"),
        (benchmark_tools.finetune_sizes, {}, "Qwen3 with a tied head"),
        (benchmark_tools.finetune_sizes, benchmark_groups.QWEN3 | dora, "plain LoRA"),
    ):
        with pytest.raises(benchmark.RunFailed, match=message):
            sizes(config_of(path, keys))


def test_both_sides_of_preferences_read_equally_many_tokens(tmp_path) -> None:
    benchmark_preferences.write_records(tmp_path, 8)
    batches = []
    for records, keys in (("pairs", {"loss.type": "dpo"}), ("answers", {})):
        keys = benchmark_preferences.keys_of(tmp_path, records) | keys
        config = benchmark_groups.config_of(benchmark_groups.DENSE, keys)
        dataset, _ = build_datasets(config)
        assert dataset.num_sequences == 8 and dataset.num_tokens == 8 * 512
        batches.append(dataset.batch(range(8)))
    pairs, answers = batches
    # Each document has 192 tokens with a loss: 191 of an answer and its end.
    assert (pairs.labels >= 0).sum() == (answers.labels >= 0).sum() == 16 * 192
    rows = (sorted(map(tuple, batch.input_ids.reshape(16, 256).tolist())) for batch in batches)
    assert next(rows) == next(rows)


def test_preferences_start_a_program_for_each_method(tmp_path, capsys) -> None:
    weights = {model: trained(benchmark_groups.WIDE_QWEN3 | keys)
               for model, keys in (("full", {}), ("lora", benchmark_groups.LORA))}  # fmt: skip
    flags = targets_flags(programs(tmp_path, torch_seconds=0.7, trained=weights["full"]))
    python = tmp_path / "torch_python"
    lines = f'echo "$*" >> {tmp_path}/calls\ncase "$*" in *lora_rank*) trained={weights["lora"]};; esac\n'
    text = python.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\ntrained={weights['full']}\n{lines}")
    python.write_text(text.replace(f'"trained": {weights["full"]}', "\"trained\": '$trained'"))
    assert benchmark.main([*flags, "--only", "preferences", "--rounds", "1"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [line["value"] for line in lines] == pytest.approx([1.4] * 6 + [1.0])
    calls = [call.split() for call in (tmp_path / "calls").read_text().splitlines() if "benchmark_trl.py" in call]
    assert [call[call.index("--method") + 1] for call in calls] == ["dpo", "ipo", "orpo"] * 2
    assert all("--tokens=256" in call and "--batch=4" in call for call in calls)


def test_an_earlier_checkout_is_measured_where_it_is_named(tmp_path, capsys) -> None:
    programs(tmp_path)
    program = str(tmp_path / "trainer.py")
    words = ["targets", "--trainer", program, "--steps", "5", "--only", "dropout"]
    for before, value in (([], None), (["--before", program], 1.0)):
        assert benchmark.main([*words, *before]) == (value is not None)  # 1: equally fast is below the target
        lines = json.loads(capsys.readouterr().out)["lines"]
        assert {line["name"]: line["value"] for line in lines}["tokens/s, dropout / an earlier checkout"] == value
    assert benchmark.main(["targets", "--only", "dropout", "wide"]) == 2
    assert "give --torch_python" in capsys.readouterr().err
