"""What `plan` says about a job of several ranks: layout, the global batch, shared optimizer state, memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tolerances import PLANNED_MEMORY, SMALL_ARRAYS

from trainer.cli.main import dispatch
from trainer.config import Config, Override, load_config
from trainer.errors import UserError
from trainer.parallel.sharding import BUCKET_BYTES
from trainer.parallel.world import World, world_of
from trainer.plan.memory import memory_estimate, memory_notes
from trainer.plan.render import plan_text
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
MIB = 1 << 20


def config_of(name: str = "quickstart", **keys: object) -> Config:
    overrides = [Override(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return load_config(str(REPOSITORY / "configs" / f"{name}.yaml"), overrides)


def text_of(config: Config, world: World) -> str:
    return " ".join(plan_text(build_plan(config, world)).split())


def test_the_global_batch_is_that_of_all_ranks() -> None:
    config = config_of(runner_config__batch_size=4, runner_config__gradient_accumulation_steps=2)
    one, eight = build_plan(config), build_plan(config, world_of(8))
    assert (one.ranks, one.degrees, one.steps.rows_per_step, one.steps.tokens_per_step) == (1, {}, 8, 8 * 128)
    assert (eight.ranks, eight.degrees, eight.steps.rows_per_step) == (8, {"data_parallel": 8}, 64)
    assert eight.steps.tokens_per_step == 64 * 128 and eight.steps.batch_rows == 4
    assert eight.data.rows == one.data.rows
    assert eight.steps.steps_per_epoch == -(-(one.data.rows // 32) // 2)
    same = config_of(runner_config__batch_size=32, runner_config__gradient_accumulation_steps=2)
    assert build_plan(same).steps.steps_per_epoch == eight.steps.steps_per_epoch
    kept = config_of(runner_config__batch_size=4, train_dataset__drop_remainder=False)
    assert build_plan(kept, world_of(8)).steps.steps_per_epoch == -(-one.data.rows // 32)
    text = text_of(config, world_of(8))
    assert "ranks 8: data_parallel 8" in text
    assert "optimizer step 2 micro-batches of 4 sequences on each rank: 64 sequences, 8,192 tokens" in text
    assert "rank" not in text_of(config, world_of(1))


def test_an_evaluation_reads_its_batches_on_every_rank() -> None:
    config = config_of(train_dataset__max_batches=2, runner_config__batch_size=4)
    assert build_plan(config).data.eval_rows == 8
    assert build_plan(config, world_of(4)).data.eval_rows == 32


def test_sharing_cuts_the_optimizer_state() -> None:
    shared = config_of("bench_dense", parallel__enable_parallel_optimizer=True)
    whole = memory_estimate(config_of("bench_dense"), True, "CPU", world_of(8))
    alone = memory_estimate(config_of("bench_dense"), True, "CPU")
    assert memory_estimate(shared, True, "CPU") == alone
    assert whole["workspaces"] - alone["workspaces"] == 2 * min(BUCKET_BYTES, whole["gradients"]), "to add them up"
    cut = memory_estimate(shared, True, "CPU", world_of(8))
    assert cut["optimizer state"] == pytest.approx(whole["optimizer state"] / 8, rel=SMALL_ARRAYS)
    assert whole["total"] - cut["total"] == whole["optimizer state"] - cut["optimizer state"]
    none = config_of(
        "bench_dense", parallel__enable_parallel_optimizer=True, parallel__parallel_optimizer_threshold=2**30
    )
    assert memory_estimate(none, True, "CPU", world_of(8)) == whole
    text = text_of(shared, world_of(8))
    assert "optimizer state 1/8 on each rank; parameters below 64 KiB whole on all" in text
    assert build_plan(shared).steps.sharing is None


def test_levels_cut_gradients_and_weights() -> None:
    """But for one layer, or embedding or head, which are whole at a time, and a layer whose weights are under way."""
    level = "parallel__parallel_optimizer_config__optimizer_level"
    first, second, third = (
        memory_estimate(config_of("bench_dense", parallel__enable_parallel_optimizer=True, **{level: each}), True,
                        "CPU", world_of(8))
        for each in ("level1", "level2", "level3")
    )  # fmt: skip
    assert first["gradients"] == first["weights"] == second["weights"]
    assert first["gradients"] / 8 < second["gradients"] == third["gradients"] < third["weights"]
    assert third["weights"] < first["weights"] / 2
    text = text_of(config_of("bench_dense", parallel__enable_parallel_optimizer=True, **{level: "level3"}), world_of(8))
    assert "optimizer state 1/8 on each rank, and of the gradients and weights; parameters below" in text


@pytest.mark.parametrize(
    ("name", "keys", "measured_mib"),
    [
        ("quickstart", {}, 626),
        ("bench_dense", {"runner_config__batch_size": 2, "model__model_config__num_layers": 16}, 885),
    ],
)
def test_the_memory_of_a_rank_is_near_what_was_measured(name: str, keys: dict, measured_mib: int) -> None:
    """Peaks of rank 0 of 2 with MindSpore 2.10 on two cores: what exchanges gradients takes little."""
    estimate = build_plan(config_of(name, **keys), world_of(2)).memory_bytes["total"]
    assert estimate / MIB == pytest.approx(measured_mib, rel=PLANNED_MEMORY)


@pytest.mark.parametrize(
    ("name", "keys", "measured_mib"),
    [
        ("bench_dense", {}, 1031),
        ("bench_dense", {"model_parallel": 2}, 787),
        ("bench_dense", {"model_parallel": 2, "use_seq_parallel": True}, 792),
        ("bench_dense", {"pipeline_stage": 2, "micro_batch_num": 4}, 909),
        ("bench_dense", {"context_parallel": 2}, 934),
        ("bench_dense", {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"}, 906),
        ("bench_moe", {"expert_parallel": 2}, 1269),
        ("bench_moe", {"model_parallel": 2}, 1177),
    ],
)
def test_the_memory_of_ranks_that_divide_a_model_is_near_what_was_measured(
    name: str, keys: dict, measured_mib: int
) -> None:
    """Peaks of rank 0 of 2, with 12 layers."""
    degrees = {f"parallel_config__{key}": value for key, value in keys.items()}
    config = config_of(name, model__model_config__num_layers=12, use_parallel=True, **degrees)
    found = build_plan(config, world_of(2)).memory_bytes["total"]
    assert found / MIB == pytest.approx(measured_mib, rel=PLANNED_MEMORY)


def test_memory_counts_the_ranks_of_a_host() -> None:
    plan = build_plan(config_of(), world_of(16, 4))
    text = plan_text(plan)
    assert "16, 4 of them on this host: data_parallel 16" in text
    assert (
        f"4 ranks of this host{4 * plan.memory_bytes['total'] / MIB:>10,.0f}".split()
        == text[text.index("4 ranks") :].split()[:6]
    )
    assert list(memory_notes(100 * MIB, 400 * MIB, ranks=4)) == []
    (note,) = memory_notes(100 * MIB, 399 * MIB, ranks=4)
    assert "the 4 ranks of this host need about 400 MiB of memory and 399 MiB are left" in note
    crowd = build_plan(config_of(), world_of(1024))
    assert any("the 1024 ranks of this host need" in note for note in crowd.notes)


def test_the_command_plans_for_a_job_that_is_not_there(capsys: pytest.CaptureFixture) -> None:
    assert dispatch(["plan", "--config", QUICKSTART, "--ranks", "8", "--local_ranks=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["host_ranks"], found["steps"]["rows_per_step"]) == (8, 2, 256)


def test_the_command_sees_the_job_around_it(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    monkeypatch.setenv("RANK_ID", "3")
    assert dispatch(["plan", "--config", QUICKSTART, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["degrees"] == {"data_parallel": 4}


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--ranks 0", "--ranks"),
        ("--ranks eight", "--ranks"),
        ("--ranks 4 --local_ranks 5", "--local_ranks = 5: exceeds the 4 ranks"),
        ("--ranks 8 --local_ranks 3", "--local_ranks = 3: must divide --ranks 8"),
        ("--ranks 8 --parallel_config.data_parallel 3", "data_parallel 3 needs 3 ranks, but the job has 8"),
        ("--ranks 8 --use_parallel false", "leave --ranks out, or add --use_parallel true"),
        ("--ranks 100000", "fewer than one global batch (batch_size 32 x 100000 ranks)"),
    ],
)
def test_a_job_that_cannot_be_is_an_error(flags: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        dispatch(["plan", "--config", QUICKSTART, *flags.split()])
    assert part in str(caught.value)
