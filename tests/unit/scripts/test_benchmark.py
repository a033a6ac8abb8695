"""The benchmark's own arithmetic, and whole runs of it against programs that only pretend to train."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_helpers import CONFIG, programs, run
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import benchmark  # noqa: E402
import benchmark_bare  # noqa: E402
import benchmark_moe  # noqa: E402
import benchmark_profile  # noqa: E402
import benchmark_soak  # noqa: E402
import benchmark_step  # noqa: E402
import benchmark_tools  # noqa: E402

from trainer.config import Override, load_config, parse_config  # noqa: E402
from trainer.models.spec.shapes import parameter_shapes  # noqa: E402
from trainer.monitors.metrics import Monitor, StepMetrics, step_record  # noqa: E402
from trainer.profiling.host import NOT_EXPLAINED, profile_rows  # noqa: E402
from trainer.profiling.regions import RegionKey, RegionTimer  # noqa: E402


def step_metrics(step: int) -> StepMetrics:
    return StepMetrics(step, 9, 1, 1, step, 9, 1.0, 0.1, None, 1.0, False, 2048, 1e3, 1e3, 0.5, 0.0, 10**9)


def verdicts(**changes) -> dict[str, str]:
    runs = {"ours": [run()] * 3, "eager": [run(1.0, 0.48, 800_000_000)] * 3, "compiled": [run(30.0, 0.4)] * 3,
            "compilation": {32: run(1.0 + 1.4, 1.0), 4: run(0.2 + 1.0, 0.2)}, "accumulated": run(peak=1_040_000_000),
            "bare": {"trainer_seconds": [0.51, 0.50, 9.0], "bare_seconds": [0.50, 0.49, 0.50]}}
    return {line.name: line.verdict for line in benchmark.dense_lines(**{**runs, **changes})}


# --- arithmetic ---------------------------------------------------------------------------------------------------


def test_measure_leaves_out_the_first_steps_and_takes_the_median():
    result = benchmark_tools.measure([4.0, 9.0, 9.0, 0.5, 0.25, 0.5], 1000, 77)
    assert result == benchmark.Measurement(4.0, 0.5, 2000.0, 77)
    assert result.first_extra_seconds == 3.5


def test_measure_refuses_a_run_too_short():
    with pytest.raises(benchmark.RunFailed, match="a run of 3 steps, 4 are needed"):
        benchmark_tools.measure([1.0, 1.0, 1.0], 1000, 1)


def test_metrics_file_of_the_trainer_is_understood(tmp_path):
    lines = [json.dumps(step_record(step_metrics(step))) for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "eval_loss": 2.0}', '{"step": 5, "lo']))
    measured = benchmark_tools.measure_metrics_file(tmp_path / "metrics.jsonl")
    assert measured == benchmark.Measurement(0.5, 0.5, 4096.0, 10**9, first_loss=1.0)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(benchmark.RunFailed, match="holds no step"):
        benchmark_tools.measure_metrics_file(tmp_path / "metrics.jsonl")


def test_ratio_of_turns_is_not_moved_by_a_drift_of_the_machine():
    median, low, high = benchmark.paired_ratio([90.0, 45.0, 30.0], [100.0, 50.0, 25.0])
    assert (median, low, high) == (0.9, 0.9, 1.2)


@pytest.mark.parametrize(("value", "limit", "at_least", "binding", "verdict"), [
    (0.9, 0.9, True, True, "pass"), (0.89, 0.9, True, True, "FAIL"), (0.89, 0.9, True, False, "not yet"),
    (5.0, 5.0, False, True, "pass"), (5.1, 5.0, False, True, "FAIL"), (None, 1.0, True, True, "not measured"),
])
def test_verdict(value, limit, at_least, binding, verdict):
    assert benchmark.Line("x", value, limit, at_least, "", binding).verdict == verdict


def test_every_target_passes_and_the_goal_is_only_noted():
    assert verdicts() == {
        "tokens/s, trainer / PyTorch eager": "pass", "tokens/s, trainer / torch.compile": "not yet",
        "first step, seconds": "pass", "compilation, 32 / 4 layers": "pass",
        "peak memory / allowed": "pass", "peak memory, accumulation 8 / 1": "pass", "step, trainer / bare loop": "pass",
    }


@pytest.mark.parametrize(("changes", "failing"), [
    ({"eager": [run(1.0, 0.44, 800_000_000)] * 3}, "tokens/s, trainer / PyTorch eager"),
    ({"ours": [run(5.1, 0.5)] * 3}, "first step, seconds"),
    ({"compilation": {4: run(0.2 + 1.0, 0.2), 32: run(1.0 + 1.6, 1.0)}}, "compilation, 32 / 4 layers"),
    ({"ours": [run(peak=1_651_000_000)] * 3}, "peak memory / allowed"),  # 1.5 x 800e6 + 450e6
    ({"accumulated": run(peak=1_051_000_000)}, "peak memory, accumulation 8 / 1"),
    ({"bare": {"trainer_seconds": [0.52], "bare_seconds": [0.5]}}, "step, trainer / bare loop"),
])
def test_each_target_can_fail_alone(changes, failing):
    assert [name for name, verdict in verdicts(**changes).items() if verdict == "FAIL"] == [failing]


def test_what_was_left_out_is_said_and_does_not_fail():
    left_out = verdicts(compiled=[], bare=None)
    assert left_out["tokens/s, trainer / torch.compile"] == left_out["step, trainer / bare loop"] == "not measured"
    assert "FAIL" not in left_out.values()


def test_last_json_ignores_what_libraries_print():
    assert benchmark.last_json('warning\n{"a": 1}\n{"a": 2}\nbye\n') == {"a": 2}
    with pytest.raises(benchmark.RunFailed, match="no JSON"):
        benchmark.last_json("nothing\n")


def test_cpu_model(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 1\nmodel name\t: A Fine: CPU\n\nmodel name\t: another\n")
    assert benchmark_tools.cpu_model(cpuinfo) == "A Fine: CPU"
    assert benchmark_tools.cpu_model(tmp_path / "absent") != ""


def test_table_names_every_line():
    console = Console(width=160, record=True, file=io.StringIO())
    lines = [benchmark.Line("speed", 0.5, 0.9, True, "a / b"), benchmark.Line("step", None, 1.03, False, "left out")]
    benchmark_tools.render("Title", lines, console)
    text = console.export_text()
    assert all(part in text for part in ("speed", "0.500", ">= 0.9", "FAIL", "a / b", "<= 1.03", "not measured"))


def test_accumulation_is_judged_by_time_per_token_and_memory():
    runs = {1: [run(steady=0.5)] * 2, 2: [run(steady=1.0)] * 2, 16: [run(steady=8.4, peak=1_060_000_000)] * 2}
    for group, number in ((runs[2], 2), (runs[16], 16)):
        runs[number] = [benchmark.Measurement(3.5, r.steady_step_seconds, 2048 * number / r.steady_step_seconds,
                                              r.peak_rss_bytes) for r in group]
    lines = {line.name: line for line in benchmark_step.accumulation_lines(runs)}
    assert lines["time per token, accumulation 2 / 1"].value == pytest.approx(1.0)
    assert lines["time per token, accumulation 16 / 1"].value == pytest.approx(1.05)
    assert [line.verdict for line in lines.values()] == ["pass", "FAIL", "FAIL"]


def test_variants_are_judged_by_their_medians():
    seconds = {"plain": [0.5, 0.5, 9.0], "clipping": [0.505] * 3, "dynamic scale": [0.52] * 3,
               "half frozen": [0.3] * 3, "recompute": [0.75] * 3}
    lines = benchmark_step.variant_lines(seconds)
    assert [round(line.value, 2) for line in lines] == [1.01, 1.04, 0.6, 1.5]
    assert [line.verdict for line in lines] == ["pass", "FAIL", "pass", "not yet"]


def test_activations_are_what_grows_with_the_rows():
    constant, row = 500_000_000, 10_000_000
    many, few = run(peak=constant + 8 * row), run(peak=constant + row)
    assert benchmark_step.activation_bytes(many, few) == pytest.approx(8 * row)


def moe_runs(**steady: float) -> dict[str, list[benchmark.Measurement]]:
    seconds = {**{f"experts {number}": 0.5 for number in benchmark_moe.EXPERTS}, "dense": 0.3, "capacity": 0.5,
               "torch": 0.5, **{name.replace("_", " "): value for name, value in steady.items()}}
    return {name: [run(steady=value)] * 2 for name, value in seconds.items()}


@pytest.mark.parametrize(("steady", "deep", "failing"), [
    ({}, 1.4, []),
    ({"dense": 0.29}, 1.4, ["tokens/s, 8 experts / dense of equal active weights"]),
    ({"torch": 0.49}, 1.4, ["tokens/s, 8 experts, trainer / PyTorch's loop over experts"]),
    ({"experts_64": 1.01}, 1.4, ["step, 64 / 4 experts"]),
    ({"experts_32": 1.01, "capacity": 0.6}, 1.4, []),  # goals
    ({}, 1.6, ["compilation, 16 / 4 layers"]),
])
def test_each_target_of_a_model_with_experts_can_fail_alone(steady, deep, failing):
    compilation = {4: run(1.5, 0.5), 16: run(0.5 + deep, 0.5)}
    lines = benchmark_moe.moe_lines(moe_runs(**steady), compilation, 8)
    assert [line.name for line in lines if line.verdict == "FAIL"] == failing
    assert len(lines) == 8 and all(line.value is not None for line in lines)


def test_all_variants_with_experts_have_the_active_weights_of_the_dense_one():
    path = str(Path(benchmark_tools.ROOT, "configs", "bench_moe.yaml"))
    flags = benchmark_moe.variant_flags(load_config(path, []))
    active = {}
    for name, words in flags.items():
        pairs = zip(words[::2], words[1::2], strict=True)
        decoder = load_config(path, [Override(key.removeprefix("--"), text, "") for key, text in pairs]).decoder
        assert (decoder.experts is None) == (name == "dense")
        share = 1 if decoder.experts is None else decoder.experts.num_experts_chosen / decoder.experts.expert_num
        shapes = {key: shape for key, shape in parameter_shapes(decoder).items() if not key.endswith("mlp.gate.weight")}
        sizes = {key: np.prod(shape) for key, shape in shapes.items()}
        active[name] = sum(size * share if ".experts." in key else size for key, size in sizes.items())
        assert decoder.experts is None or (decoder.experts.effective_capacity is not None) == (name == "capacity")
    assert len(set(active.values())) == 1 and list(flags) == [*(f"experts {n}" for n in (4, 8, 16, 32, 64)), "dense",
                                                              "capacity"]


def test_the_pytorch_model_has_the_sizes_of_the_model_with_experts():
    config = load_config(str(Path(benchmark_tools.ROOT, "configs", "bench_moe.yaml")), [])
    sizes = benchmark_tools.torch_sizes(config)
    assert (sizes["experts"], sizes["chosen"], sizes["intermediate"]) == (8, 2, 344)
    others = {"shared_expert_num": "1", "first_k_dense_replace": "1", "use_gating_sigmoid": "True",
              "norm_topk_prob": "False"}
    for key, text in others.items():
        changed = load_config(str(Path(benchmark_tools.ROOT, "configs", "bench_moe.yaml")),
                              [Override(f"model.model_config.moe_config.{key}", text, "")])
        with pytest.raises(benchmark.RunFailed, match="the PyTorch model"):
            benchmark_tools.torch_sizes(changed)


# --- whole runs ---------------------------------------------------------------------------------------------------


def test_whole_benchmark_passes(tmp_path, capsys):
    assert benchmark.main(programs(tmp_path)) == 0
    result = json.loads(capsys.readouterr().out)
    assert [line["verdict"] for line in result["lines"]] == ["pass", "not yet", *["pass"] * 4, "not measured"]
    assert [len(result["runs"][name]) for name in ("trainer", "torch_eager", "torch_compile", "compilation")] == [2] * 4
    assert result["sizes"] == {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 8, "intermediate": 688,
                               "tokens": 256, "vocabulary": 4096, "batch": 8, "accumulate": 1}
    assert {"date", "commit", "cpu", "cores", "python", "mindspore", "torch"} <= result["machine"].keys()


def test_whole_benchmark_of_experts(tmp_path, capsys):
    flags = programs(tmp_path)
    experts = "moe_config: {expert_num: 8, num_experts_chosen: 2, use_gmm: True}"
    (tmp_path / "config.yaml").write_text(CONFIG + experts)
    assert benchmark.main(["moe", *flags[1:-1]]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [line["verdict"] for line in result["lines"]] == ["pass"] * 8
    assert {len(group) for group in result["runs"].values()} == {2} and len(result["runs"]) == 8
    assert (result["sizes"]["experts"], result["sizes"]["chosen"]) == (8, 2)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert benchmark.main(["moe", *flags[1:-1]]) == 2
    assert "needs a model with experts that drops nothing" in capsys.readouterr().err


def test_whole_benchmark_fails_when_a_target_is_missed(tmp_path, capsys):
    assert benchmark.main([*programs(tmp_path, torch_seconds=0.4), "--no_compile"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lines"][0]["verdict"] == "FAIL"
    assert "FAIL" in captured.err


@pytest.mark.parametrize(("file", "old", "new", "flags", "parts"), [
    ("trainer.py", None, "raise SystemExit('out of [memory]')", [], ["out of [memory]", "exit code 1"]),
    ("config.yaml", "num_layers", "num_layerz", [], ["num_layerz"]),
    ("config.yaml", "type: LlamaConfig,", "type: LlamaConfig, tie_word_embeddings: True,", [], ["untied head"]),
    ("config.yaml", "", "", ["--torch_python", "/nowhere/python"], ["/nowhere/python cannot be started: No such file"]),
], ids=["a failed run", "a bad configuration", "a model that the PyTorch script lacks", "no such Python"])
def test_what_cannot_be_measured_ends_the_benchmark_with_its_last_words(tmp_path, capsys, file, old, new, flags, parts):
    words = [*programs(tmp_path), *flags]
    (tmp_path / file).write_text(new if old is None else CONFIG.replace(old, new))
    assert benchmark.main(words) == 2
    captured = capsys.readouterr()
    assert all(part in captured.err for part in parts) and captured.out == ""


def test_too_few_steps_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        benchmark.main([*programs(tmp_path), "--steps", "3"])
    assert caught.value.code == 2
    assert "--steps at least 4" in capsys.readouterr().err


# --- the bare loop, alternating with the trainer --------------------------------------------------------------------


def test_bare_loop_runs_in_windows_and_neither_side_pays_for_the_other():
    now = 0.0

    def bare_step() -> None:
        nonlocal now
        now += 10.0

    monitor = benchmark_bare.BareLoopMonitor(bare_step, window_steps=2, warm_up_steps=1, clock=lambda: now)
    assert isinstance(monitor, Monitor)
    for step in range(1, 7):
        now += 100.0 if step == 1 else 1.0  # the trainer works; its first step compiles
        monitor.on_step(step_metrics(step))
    assert monitor.trainer_seconds == [1.0] * 5
    assert monitor.bare_seconds == [10.0] * 4


def test_soak_measures_growth_from_the_first_sample_to_the_last() -> None:
    found = benchmark_soak.growth([(300, 5_000_000, 4_000, 9, 11), (1300, 9_000_000, 9_000, 9, 11),
                                   (2300, 7_000_000, 6_000, 12, 10)])
    assert found == (2000, 1000.0, 1.0, 3, -1)
    memory, handles = benchmark_soak.soak_lines("dense", found)
    assert (memory.value, memory.verdict, handles.value, handles.verdict) == (1_000_000 / (1 << 20), "pass", 3, "FAIL")
    leaking = benchmark_soak.soak_lines("dense", found._replace(bytes_a_step=43_000.0))
    assert leaking[0].verdict == "FAIL"
    own = benchmark_soak.sample(7)
    assert own.step == 7 and min(own.private_bytes, own.heap_bytes) > 10e6 and own.files > 2 and own.threads > 0


def test_every_case_of_the_soak_is_a_configuration() -> None:
    for name, flags in benchmark_soak.CASES.items():
        overrides = [Override(key, text, "soak") for key, text in flags.items()]
        assert parse_config("soak", json.dumps(benchmark_soak.TINY), overrides).trains != name.startswith("prediction")


def test_cpu_seconds_are_those_of_the_command() -> None:
    busy = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(0.1)"]
    assert 0.3 <= benchmark_tools.cpu_seconds(busy) < 5
    with pytest.raises(benchmark.RunFailed, match="exit code 3"):
        benchmark_tools.cpu_seconds([sys.executable, "-c", "raise SystemExit(3)"])


# --- the profile ----------------------------------------------------------------------------------------------------

TINY_PROFILE = """
runner_config: {batch_size: 2}
model:
  arch: {type: LlamaForCausalLM}
  model_config: {type: LlamaConfig, num_layers: 2, hidden_size: 32, num_heads: 4, n_kv_heads: 2, intermediate_size: 48,
                 vocab_size: 64, seq_length: 16}
train_dataset: {data_loader: {type: SyntheticDataset, num_samples: 7}}
"""


def test_each_second_of_a_step_is_in_one_row() -> None:
    now = 0.0

    class TwoThreads:
        threads = 2

    def spend(seconds: float, thread: int = 0) -> None:
        nonlocal now
        now += seconds

    def run(threads: TwoThreads, items: list[float], function) -> None:
        for place, item in enumerate(items):
            function(item, place % 2)
        spend(1)  # nobody works

    regions = RegionTimer(lambda: now)
    product = regions.time_function(spend, lambda of, arguments: f"product of {of.part}", lambda _: (8.0, 2.0))

    def item(seconds: float, thread: int) -> None:
        spend(2)
        product(seconds)

    threads_run = regions.time_threads(run)
    with regions.region("step"):
        spend(5)
        with regions.region("backward pass", direction="backward"):
            spend(7)
            with regions.region("layer"):
                threads_run(TwoThreads(), [10, 20], item)
        product(3)
    # Two threads: a second of one of them is half a second of the step. 35 seconds together, 34 of them with work.
    assert {tuple(key): (row.seconds, row.calls) for key, row in regions.rows.items()} == {
        ("step", ""): (5, 1), ("backward pass", "backward"): (7, 1), ("product of step", ""): (3, 1),
        ("layer", "backward"): (2, 3), ("product of layer", "backward"): (15, 2),
        ("waiting threads", "backward"): (18, 1),
    }  # fmt: skip
    assert sum(row.seconds for row in regions.rows.values()) == now == 50
    row = regions.rows[RegionKey("product of layer", "backward")]
    assert (row.bytes, row.operations) == (16, 4)


@pytest.mark.parametrize(
    "keys",
    [
        {"moe_config": "{expert_num: 4, num_experts_chosen: 2, shared_expert_num: 1}", "compute_dtype": "bfloat16",
         "mtp_depth": 1},
        {"multi_latent_attention": True, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
         "v_head_dim": 8, "embedding_size": 16, "compute_dtype": "float16"},
        {"pet_config": "{pet_type: lora, lora_rank: 4, lora_alpha: 4, target_modules: '.*_proj', lora_dropout: 0.1}"},
    ],
)  # fmt: skip
def test_every_product_of_a_profile_is_that_of_a_part(keys: dict) -> None:
    overrides = [Override(f"model.model_config.{key}", str(value)) for key, value in keys.items()]
    profile = benchmark_profile.Profile(parse_config("config.yaml", TINY_PROFILE, overrides))
    profile.measured()
    end = f", {keys.get('compute_dtype', 'float32')}"
    names = {key.name for key, row in profile.regions.rows.items() if row.operations}
    rows = {name.removesuffix(end) for name in names}
    known = {"q, k, v products", "output projection", "gate, up products", "down product", "attention: scores, values",
             "attention: fused", "experts: products", "router: products", "head: products",
             "embedding: products", "inputs of modules: products", "weight gradients"}  # fmt: skip
    assert rows <= known and ("down product" in names) == ("compute_dtype" not in keys)


def test_the_profile_of_a_step_counts_its_products() -> None:
    config = parse_config("config.yaml", TINY_PROFILE, [])
    profile = benchmark_profile.Profile(config)
    before = profile.plain()
    taken = profile.measured()
    found = profile_rows(profile.regions.rows, 1)
    assert found[-1][0] == (NOT_EXPLAINED, "")
    assert before > 0 and sum(row.seconds for _, row in found) <= taken
    tokens, projections, mlp, head = 2 * 16, 32 * (32 + 2 * 16), 3 * 32 * 48, 64 * 32
    layers = 2 * (projections + 32 * 32 + mlp)
    scores = 2 * 2 * tokens * (16 + 1) / 2 * 32  # of two layers; a query sees the tokens up to its own
    assert {tuple(key): row.operations for key, row in found if row.operations} == {
        ("q, k, v products", "forward"): 2 * 2 * tokens * projections,
        ("q, k, v products", "backward"): 2 * 2 * tokens * projections,
        ("output projection", "forward"): 2 * 2 * tokens * 32 * 32,
        ("output projection", "backward"): 2 * 2 * tokens * 32 * 32,
        ("gate, up products", "forward"): 2 * 2 * tokens * mlp * 2 / 3,
        ("gate, up products", "backward"): 2 * 2 * tokens * mlp * 2 / 3,
        ("down product", "forward"): 2 * 2 * tokens * mlp / 3,
        ("down product", "backward"): 2 * 2 * tokens * mlp / 3,
        ("attention: fused", "forward"): 2 * scores,
        ("attention: fused", "backward"): 5 * scores,
        ("weight gradients", "backward"): 2 * tokens * layers,
        ("head: products", "forward"): 2 * tokens * head,
        ("head: products", "backward"): 4 * tokens * head,
    }
    rows = {tuple(key): row for key, row in found}
    for name in ("norm", "rotary", "SwiGLU, residual", "embedding"):
        assert rows[name, "forward"].seconds > 0 and rows[name, "backward"].seconds > 0, name
    for name in ("optimizer", "norm of the gradients", "data", "tensors as arrays"):
        assert rows[name, ""].seconds > 0, name
    # Three products of each matrix, and of what a query sees: (16 + 1) / 2 keys.
    attention = 3 * 2 * 2 * tokens * 2 * 32 * 17 / 2
    assert benchmark_profile.needed_operations(config) == 6 * tokens * (layers + head) + attention
    # Nothing is left of the measurement.
    assert sum(row.calls for row in profile.regions.rows.values()) == sum(row.calls for _, row in found)
    profile.plain()
    assert sum(row.calls for row in profile.regions.rows.values()) == sum(row.calls for _, row in found)
