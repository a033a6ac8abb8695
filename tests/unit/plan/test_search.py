"""`plan --search`: its layouts, memory and order against plans of the files that it writes, and against all layouts."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
from tolerances import BUBBLE, FLOAT64_SUMS

from trainer.cli.main import dispatch
from trainer.config import Config, dump_config, parse_config
from trainer.config.checks.parallel import resolve_for_job
from trainer.config.device_defaults import apply_device_defaults
from trainer.errors import UserError
from trainer.parallel.schedule import Cost, one_forward_one_backward, simulate
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.plan.memory import memory_estimate
from trainer.plan.pipeline import closed_form_time, pipeline_plan
from trainer.plan.search.alternatives import lost_alternatives
from trainer.plan.search.hardware import Factors, device_rates
from trainer.plan.search.layouts import LEVELS, RECOMPUTATIONS, balanced_offset
from trainer.plan.search.measured import Measurement, corrected_rates, estimate_run, rank_correlation, read_measurements
from trainer.plan.search.render import assumptions, file_place, result_sections, yaml_difference
from trainer.plan.search.search import LayoutSearch, SearchResult, shown_candidates
from trainer.plan.traffic import traffic_plan
from trainer.run.plan_file import layout_rules, open_search, world_from_degrees
from trainer.tables import print_sections

DENSE = {
    "num_layers": 4, "hidden_size": 512, "num_heads": 8, "n_kv_heads": 4, "intermediate_size": 1536,
    "vocab_size": 4096, "seq_length": 1024,
}  # fmt: skip
EXPERTS = DENSE | {"moe_config": {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 256}}
LATENT = {
    "num_layers": 4, "hidden_size": 512, "num_heads": 8, "intermediate_size": 1536, "vocab_size": 4096,
    "seq_length": 1024, "kv_lora_rank": 64, "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_config": {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1},
}  # fmt: skip
MODELS = {
    "dense": ("Qwen3ForCausalLM", DENSE), "experts": ("Qwen3MoeForCausalLM", EXPERTS),
    "latent": ("DeepseekV3ForCausalLM", LATENT), "side by side": ("CohereForCausalLM", DENSE),
}  # fmt: skip


def configuration(model: str, mode: int, /, **sections: object) -> Config:
    family, settings = MODELS[model]
    values = {
        "use_parallel": True, "parallel": {"parallel_mode": mode}, "context": {"device_target": "Ascend"},
        "runner_config": {"batch_size": 1, "global_batch_size": 4}, "optimizer": {"type": "AdamW"},
        "model": {"arch": {"type": family}, "model_config": settings},
    }  # fmt: skip
    return parse_config("search", json.dumps(values | sections))


def search_of(config: Config, ranks: int, limit_mib: float, per_node: int = 4) -> LayoutSearch:
    world = world_of(ranks, min(per_node, ranks))
    job = world_from_degrees(config, SINGLE_PROCESS)
    rules = partial(layout_rules, device="Ascend")
    rates = device_rates(config, world, "Ascend")
    return LayoutSearch(config, world, job, "Ascend", limit_mib * (1 << 20), rates, rules)


def planned(config: Config, world: World) -> tuple[Config, dict[str, int]]:
    """Returns a configuration read from its own text, and the memory that `plan` shows for it."""
    read = parse_config("written", dump_config(config))
    resolved = apply_device_defaults(resolve_for_job(read, world), "Ascend")
    return resolved, memory_estimate(resolved, True, "Ascend", world)


@pytest.mark.parametrize(("model", "mode"), [("dense", 1), ("experts", 0), ("latent", 1)])
def test_the_best_layout_is_that_of_all_layouts_one_by_one(model: str, mode: int) -> None:
    """Plans every layout alone, without the pruning and the shared facts of the search."""
    config = configuration(model, mode)
    search = search_of(config, 4, 420)
    result = search.run()
    best = shown_candidates(result.candidates)[0]
    every = []
    for plain in search.plain_layouts():
        for one, level, choice in itertools.product(search._with_offsets(plain), LEVELS, RECOMPUTATIONS):
            if level and plain.degrees.data_parallel * plain.degrees.context_parallel == 1:
                continue
            layout = one._replace(level=level, recomputed=choice)
            changed = search.configs.make(layout)
            if layout_rules(changed, search.world, "Ascend"):
                continue
            memory = memory_estimate(changed, True, "Ascend", search.world)
            if memory["total"] <= search.limit_bytes:
                every.append((search.estimator.estimate(changed, search.world, memory).seconds, layout))
    assert len(every) > 100
    assert any(layout.recomputed != "none" for _, layout in every)
    assert best.seconds == pytest.approx(min(seconds for seconds, _ in every), rel=FLOAT64_SUMS)


def test_no_sublayer_alone_is_recomputed_where_both_are_side_by_side() -> None:
    result = search_of(configuration("side by side", 0), 4, 240).run()
    assert {each.layout.recomputed for each in result.candidates} == {"none", "1/4", "1/2", "3/4", "full"}


@pytest.mark.parametrize(("model", "mode"), [("dense", 0), ("experts", 1), ("latent", 0)])
def test_memory_and_traffic_are_those_of_the_plan_of_the_written_file(model: str, mode: int) -> None:
    config = configuration(model, mode)
    search = search_of(config, 16, 500)
    result = search.run()
    looked_at = [*result.candidates[::3], *result.refused[:10]]
    assert len(looked_at) > 4
    for candidate in looked_at:
        changed, memory = planned(search.changed_config(config, candidate.layout), search.world)
        assert memory == candidate.memory, candidate.layout
        traffic = traffic_plan(changed, search.world, "Ascend")
        assert (traffic is None) == (mode == 1)
        if traffic is not None and candidate.time is not None:
            sent = pytest.approx(max(traffic.stage_bytes), rel=FLOAT64_SUMS)
            assert candidate.time.sent_bytes == sent, candidate.layout


@pytest.mark.parametrize(("chunks", "numbers"), [(1, (4, 9, 16)), (2, (4, 8, 10, 11)), (4, (8, 9))])
def test_the_time_of_a_pipeline_is_near_that_of_its_schedule(chunks: int, numbers: tuple[int, ...]) -> None:
    """The closed form is exact for equal stages and for a slow stage; with several chunks it is a bound from above."""

    def simulated(times: list[float], number: int) -> float:
        schedule = one_forward_one_backward(len(times), number, chunks)
        return simulate(schedule, lambda s, c: Cost(times[s] / 3 / chunks, 2 * times[s] / 3 / chunks)).end

    for number in numbers:
        equal = [1.0] * 4
        assert closed_form_time(equal, number, chunks) == pytest.approx(simulated(equal, number), rel=FLOAT64_SUMS)
        for slowest in range(4):
            times = [1.4 if stage == slowest else 1.0 for stage in range(4)]
            least = simulated(times, number)
            bound = FLOAT64_SUMS if chunks == 1 else BUBBLE
            assert least * (1 - FLOAT64_SUMS) <= closed_form_time(times, number, chunks) <= least * (1 + bound)


def test_the_bubble_is_that_of_the_plan_of_the_written_file() -> None:
    config = configuration("latent", 0, recompute_config={"select_recompute": ["mlp"]})
    search = search_of(config, 8, 4000)
    pipelines = [one for one in search.plain_layouts() if one.degrees.pipeline_stage > 1]
    shown = shown_candidates(search.run_some(pipelines, 12).candidates)
    assert len(shown) > 2
    for candidate in shown:
        changed, _ = planned(search.changed_config(config, candidate.layout), search.world)
        plan = pipeline_plan(changed, candidate.layout.degrees.pipeline_stage)
        assert plan is not None
        assert search.bubble(candidate.layout) == plan.bubble_share > 0.0


def test_offsets_balance_the_head_against_layers() -> None:
    assert balanced_offset([1.0] * 8, 0.0, 4, 1) == 0
    assert balanced_offset([1.0] * 9, 3.0, 3, 1) == ((1, 1, -2),)
    assert balanced_offset([1.0] * 8, 1.0, 2, 2) in (((0, 0), (0, 0)), 0, ((0, 0), (1, -1)), ((1, 0), (0, -1)))


_REASONS = ("rule: ", "memory: ", "divisibility: ", "micro-batches: ", "+")


def test_alternatives_name_why_they_lost() -> None:
    search = search_of(configuration("experts", 1), 8, 300)
    result = search.run()
    lost = {each.name: each.reason for each in lost_alternatives(search, shown_candidates(result.candidates)[0])}
    assert "semi-automatic mode does not support context parallelism" in lost["context parallel"]
    assert all(reason.startswith(_REASONS) for reason in lost.values())


def test_a_pipeline_that_needs_more_micro_batches_lost_for_these() -> None:
    """Two sequences are one micro-batch for each of two replicas; of 4 or 8 replicas there is no pipeline at all."""
    runner = {"batch_size": 1, "global_batch_size": 2}
    search = search_of(configuration("dense", 1, runner_config=runner), 8, 4000)
    lost = {each.name: each.reason for each in lost_alternatives(search, search.run().candidates[0])}
    assert lost["pipeline without tensor parallel"] == (
        "micro-batches: dp 2 pp 4 needs 8 sequences a step, not 2: 4 stages need as many micro-batches"
    )
    assert lost["data parallel alone (ZeRO)"] == "divisibility: 2 sequences are no multiple of data_parallel 8"


def test_faster_links_between_nodes_change_the_order() -> None:
    slow = search_of(configuration("experts", 1, hardware={"network_gbps": 1.0}), 16, 2000)
    fast = search_of(configuration("experts", 1, hardware={"network_gbps": 1000.0, "network_latency": 0.0}), 16, 2000)
    assert fast.run().candidates[0].seconds < slow.run().candidates[0].seconds


def test_a_limit_that_nothing_meets_is_one_problem() -> None:
    search = search_of(configuration("dense", 1), 8, 10)
    result: SearchResult = search.run()
    assert not result.candidates
    error = search.nothing_fits(result)
    assert "no layout on 8 ranks fits into 10 MiB" in str(error)
    uneven = configuration("dense", 1, runner_config={"batch_size": 1, "global_batch_size": 7})
    search = search_of(uneven, 8, 4000)
    result = search.run()
    if not result.candidates:
        assert "--ranks" in str(search.nothing_fits(result))


@pytest.mark.parametrize(("sections", "key"), [
    ({"model": {"arch": {"type": "Qwen3ForCausalLM"}, "model_config": DENSE | {"label_smoothing": 0.1}}},
     "model.model_config.label_smoothing"),
    ({"optimizer": {"type": "PmaAdamW"}, "use_parallel": True}, "optimizer"),
])  # fmt: skip
def test_a_key_with_which_no_layout_runs_is_named_with_its_fix(sections: dict[str, object], key: str) -> None:
    for mode in (0, 1):
        search = open_search(configuration("dense", mode, **sections), world_of(8), "Ascend")
        result = search.run()
        assert not result.candidates
        with pytest.raises(UserError, match="Fix: ") as error:
            search.nothing_fits(result)
        assert key in str(error.value) and "ranks" not in error.value.fix


def test_a_schedule_that_is_not_estimated_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    degrees = {"pipeline_stage": 2, "data_parallel": 4, "micro_batch_num": 4}
    for name, has_file in (("zero_bubble_v", False), ("gpipe", True)):
        order = {"pipeline_interleave": True, "pipeline_scheduler": name}
        sections = {"parallel": {"parallel_mode": 1, "pipeline_config": order}, "parallel_config": degrees,
                    "runner_config": {"batch_size": 1}}  # fmt: skip
        config = configuration("dense", 1, **sections)
        search = open_search(config, world_of(8), "Ascend")
        result = search.run()
        assert (result.file is not None) == has_file
        print_sections(result_sections(search, result, config, None))
        says = "asks for parallel.pipeline_config.pipeline_scheduler zero_bubble_v, which is not estimated"
        assert (says in capsys.readouterr().out) != has_file


def test_the_nearest_layout_that_fits_changes_few_keys() -> None:
    config = configuration("dense", 1, parallel_config={"data_parallel": 8})
    world = world_of(8)
    limit = memory_estimate(apply_device_defaults(resolve_for_job(config, world), "Ascend"), True, "Ascend", world)
    search = LayoutSearch(config, world, world, "Ascend", limit["total"] * 0.75, device_rates(config, world, "Ascend"),
                          partial(layout_rules, device="Ascend"))  # fmt: skip
    nearest = search.nearest()
    assert nearest is not None
    _, memory = planned(search.changed_config(config, nearest.layout), world)
    assert memory["total"] == nearest.memory_bytes <= search.limit_bytes


def test_measured_times_correct_the_rates(tmp_path: Path) -> None:
    """Times that are those of other rates are explained by factors, so that the estimates become right."""
    factors = Factors(operators=1.7, overhead=1.0, links=3.0)
    runs = []
    layouts = (
        {"data_parallel": 8}, {"data_parallel": 4, "model_parallel": 2}, {"data_parallel": 2, "model_parallel": 4},
        {"data_parallel": 1, "model_parallel": 4, "pipeline_stage": 2, "micro_batch_num": 16},
    )  # fmt: skip
    for number, degrees in enumerate(layouts):
        file = tmp_path / f"{number}.yaml"
        config = configuration("dense", 1, parallel_config=degrees)
        file.write_text(dump_config(config), encoding="utf-8")
        run = Measurement(str(file), 8, 1.0)
        runs.append(run._replace(seconds=estimate_run(run, "Ascend", factors).seconds))
    search = search_of(configuration("dense", 1), 8, 4000, per_node=8)
    corrections = corrected_rates(search, runs)
    assert corrections.before > 0.3
    assert corrections.after < 0.1
    assert corrections.factors.links > 1.5
    assert "rates that the step times of 4 runs have corrected" in assumptions(search, corrections)[-1]
    assert "default rates, which nobody measured; see --measured" in assumptions(search, None)[-1]
    search = search_of(configuration("dense", 1, hardware={"network_gbps": 1.0}), 8, 4000)
    assert "default rates but for network_gbps of the file" in assumptions(search, None)[-1]


def test_a_measurement_on_other_ranks_than_its_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    config = configuration("dense", 1, parallel_config={"data_parallel": 4, "model_parallel": 2})
    file.write_text(dump_config(config), encoding="utf-8")
    with pytest.raises(UserError, match="flag --measured: ranks = 7: .*(.|\n)*write the ranks of the run of .*a.yaml"):
        estimate_run(Measurement(str(file), 7, 1.0), "Ascend", Factors())


def test_a_file_of_measurements_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("", "a: 1", "- {config: null, ranks: 2, seconds: 1}",
                 "- {config: a, ranks: 0, seconds: 1}", "- {config: a, ranks: 2}", "[1", "- 3"):
        file = tmp_path / "steps.yaml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="Fix: write a list") as error:
            read_measurements(file)
        assert "None" not in str(error.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_measurements(tmp_path / "nothing.yaml")


def test_rank_correlation_of_ties() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0
    # By hand: ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3.
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_the_command_writes_a_file_that_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.yaml"
    source.write_text(dump_config(configuration("experts", 1)), encoding="utf-8")
    best = tmp_path / "best.yaml"
    flags = ["--search", "--ranks", "16", "--max_device_memory", "1GB", "--write", str(best), "--json"]
    assert dispatch(["plan", "--config", str(source), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["best"]) == 10
    assert found["changes"]
    assert found["considered"] > 300
    assert not {"None", "True", "False"} & {value for pair in found["changes"].values() for value in pair}
    with pytest.raises(UserError, match="flag --write: .* is there already"):
        dispatch(["plan", "--config", str(source), *flags])
    with pytest.raises(UserError, match="flag --write: .* its folder does not exist"):
        dispatch(["plan", "--config", str(source), "--search", "--write", str(tmp_path / "nothing" / "best.yaml")])
    assert dispatch(["plan", "--config", str(source), *flags, "--force"]) == 0
    capsys.readouterr()
    assert dispatch(["plan", "--config", str(best), "--ranks", "16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory_bytes"]["total"] == found["best"][0]["memory_bytes"]
    assert plan["steps"]["rows_per_step"] == found["global_batch"] == 4
    assert dispatch(["plan", "--config", str(best), "--search"]) == 0
    text = capsys.readouterr().out
    assert "ranks    16, global batch of 4 sequences" in text and "`plan" not in text
    for title in ("ASSUMPTIONS", "BEST LAYOUTS", "WELL-KNOWN ALTERNATIVES"):
        assert title in text


def test_changed_values_are_those_of_a_file() -> None:
    before = configuration("dense", 1, parallel_config={"data_parallel": None, "use_seq_parallel": False})
    after = configuration("dense", 1, parallel_config={"data_parallel": 8, "use_seq_parallel": True})
    rows = yaml_difference(before, after)
    assert ("parallel_config.use_seq_parallel", "false", "true") in rows
    assert all("None" not in row and "True" not in row for row in rows)


def test_options_of_the_search_need_it(tmp_path: Path) -> None:
    source = tmp_path / "a.yaml"
    source.write_text(dump_config(configuration("dense", 1)), encoding="utf-8")
    with pytest.raises(UserError, match="add --search"):
        dispatch(["plan", "--config", str(source), "--check", "2"])


def test_a_file_that_is_faster_than_all_others_is_not_called_slower() -> None:
    """Its micro-batch has more sequences than the search tries."""
    runner = {"batch_size": 16, "gradient_accumulation_steps": 1}
    config = configuration("dense", 0, runner_config=runner, parallel_config={"data_parallel": 1})
    search = open_search(config, SINGLE_PROCESS, "Ascend")
    result = search.run()
    assert result.is_file_fastest
    assert file_place(result) == "no layout is estimated to be faster than its own"
    titles = [title for title, _ in result_sections(search, result, config, None)]
    assert "what the best of the others changes in the file" in titles
    alternatives = lost_alternatives(search, shown_candidates(result.candidates)[0])
    assert {each.reason for each in alternatives} == {"divisibility: it takes more than one rank"}


def test_a_search_is_for_the_training_of_decoders() -> None:
    config = configuration("dense", 1, run_mode="predict")
    with pytest.raises(UserError, match="--search"):
        open_search(config, world_of(8), "Ascend")
