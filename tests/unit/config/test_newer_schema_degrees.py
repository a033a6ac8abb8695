"""The section parallelism of the newer schema: explicit mode with each of its degrees, methods and strategies."""

from __future__ import annotations

import pytest
from config_helpers import load
from test_newer_schema import SMALL

from trainer.config import Config, parse_config
from trainer.config.pynative.reverse import source_statements
from trainer.config.stages import stage_layers
from trainer.convert.convert import older_text
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.plan.plan import Plan
from trainer.plan.render import plan_text
from trainer.run.plan_file import fewest_ranks, plan_file

ASCEND = SMALL.replace("device_target: CPU", "device_target: Ascend").replace("float32", "bfloat16")
FOUR = world_of(4)
OLDER = (
    "parallel_config", "model_parallel", "pipeline_stage", "optimizer_level", "ulysses_cp", "colossalai", "offset",
    "pp_interleave_num", "pipeline_scheduler", "parallel_mode", "use_seq_parallel", "parallel_optimizer",
)  # fmt: skip


def loaded(keys: str, base: str = SMALL) -> Config:
    return load(f"{base}parallelism: {{{keys}}}\n")


def planned(keys: str, base: str = SMALL, world: World = FOUR) -> Plan:
    return plan_file(loaded(keys, base), world, [])


def failed(keys: str, base: str = SMALL, world: World = FOUR) -> str:
    with pytest.raises(UserError) as raised:
        planned(keys, base, world)
    return str(raised.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("tensor_parallel: 2, sequence_parallel: True", {"model_parallel": 2, "use_seq_parallel": True}),
        ("context_parallel: 2", {"context_parallel": 2, "context_parallel_algo": "colossalai_cp"}),
        ("context_parallel: 2, context_parallel_method: Ulysses, ulysses_degree_in_cp: 2",
         {"context_parallel_algo": "ulysses_cp", "ulysses_degree_in_cp": 1}),
        ("context_parallel: 4, context_parallel_method: hybrid, ulysses_degree_in_cp: 2",
         {"context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 2}),
        ("pipeline_parallel: 2", {"pipeline_stage": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("base", [SMALL, ASCEND])
def test_degrees_are_those_of_explicit_mode(keys: str, expected: dict[str, object], base: str):
    config = loaded(keys, base)
    assert config.use_parallel and config.parallel.parallel_mode == 0
    assert {name: getattr(config.parallel_config, name) for name in expected} == expected
    if base == SMALL:
        plan = planned(keys)
        assert plan.degrees
        assert keys.partition(",")[0].replace(":", "") in plan_text(plan)
    written, _ = older_text("a.yaml", f"{base}parallelism: {{{keys}}}\n")
    assert parse_config("b.yaml", written) == config


@pytest.mark.parametrize(
    ("keys", "offset", "layers"),
    [
        ("pipeline_parallel_layers_per_stage: ['0-2', 3]", [1, -1], [[0, 1, 2], [3]]),
        ("pipeline_parallel_layers_per_stage: ['0-1', '2-3']", [0, 0], [[0, 1], [2, 3]]),
        ("pipeline_parallel_interleave_num: 2, pipeline_parallel_schedule: interleaved_1f1b,"
         " pipeline_parallel_layers_per_stage: ['0,2', '1,3']", [[0, 0], [0, 0]], [[0, 2], [1, 3]]),
        ("pipeline_parallel_interleave_num: 2", 0, [[0, 2], [1, 3]]),
        ("pipeline_parallel_layers_per_stage: auto", 0, [[0, 1], [2, 3]]),
    ],
)  # fmt: skip
def test_layers_of_stages(keys: str, offset: object, layers: list[list[int]]):
    keys = f"pipeline_parallel: 2, {keys}"
    config = loaded(keys)
    assert config.decoder.offset == offset
    assert config.parallel.pipeline_config.pipeline_interleave == ("interleave_num" in keys)
    assert stage_layers(config) == layers
    assert len(planned(keys, world=world_of(2)).pipeline.stages) == 2


@pytest.mark.parametrize("text", ["", "use_parallel: False\nparallel_config: {pipeline_stage: 2}\n"])
def test_offsets_of_a_run_without_stages_are_no_layers_of_stages(text: str):
    config = load(f"{text}model_config: {{num_layers: 4, offset: [0, 0, 0]}}\n")
    assert "parallelism.pipeline_parallel_layers_per_stage" not in source_statements(config)


@pytest.mark.parametrize(
    ("keys", "level", "ascend_level"),
    [
        ("data_parallel_shard: -1", "level3", "level2"),
        ("data_parallel_shard_strategy: optim", "level1", "level1"),
        ("data_parallel_shard_strategy: optim_grads", "level2", "level2"),
        ("reshard_after_forward_policy: never", "level2", "level2"),
        ("reshard_after_forward_policy: default, pipeline_parallel: 2", "level2", "level2"),
        ("reshard_after_forward_policy: always, pipeline_parallel: 2", "level3", None),
    ],
)
def test_strategies_and_policies_are_optimizer_levels(keys: str, level: str, ascend_level: str | None):
    parallel = loaded(keys).parallel
    assert (parallel.enable_parallel_optimizer, parallel.parallel_optimizer_config.optimizer_level) == (True, level)
    assert planned(keys).steps.sharing.level == level
    if ascend_level is None:
        message = failed(keys, ASCEND)
        assert "a.yaml:19: parallelism.reshard_after_forward_policy = 'always': ranks of an Ascend" in message
    else:
        plan = planned(keys, ASCEND)
        assert plan.steps.sharing.level == ascend_level
        keeps = "parallelism.reshard_after_forward_policy default: taken as never, because ranks of an Ascend"
        assert (keeps in "".join(plan.notes)) == (keys == "data_parallel_shard: -1")


def test_some_ranks_shard_and_others_copy():
    config, plan = loaded("data_parallel_shard: 2"), planned("data_parallel_shard: 2")
    assert config.parallel.parallel_optimizer_config.optimizer_weight_shard_size == 2
    assert plan.steps.sharing.ranks == 2 and planned("data_parallel_shard: -1").steps.sharing.ranks == 4
    weights = SMALL.replace("vocab_size: 300", "vocab_size: 90000")
    two, four = (planned(f"data_parallel_shard: {ranks}", weights).memory_bytes for ranks in (2, 4))
    assert 1.9 < two["optimizer state"] / four["optimizer state"] < 2  # the state of small arrays is not sharded
    job, notes = fewest_ranks(config, SINGLE_PROCESS)
    assert job.size == 2 and "planned for 2 ranks, the fewest that the degrees need" in notes[0]


def test_one_shard_is_a_copy_on_each_rank():
    plan = planned("data_parallel_shard: 1, data_parallel_shard_strategy: optim")
    assert plan.steps.sharing is None
    text = "\n".join(plan.notes)
    assert "parallelism.data_parallel_shard_strategy optim: not used, parallelism.data_parallel_shard is 1" in text


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("data_parallel_shard: 8, tensor_parallel: 2", ["data_parallel_shard = 8: must divide data_parallel 4"]),
        ("data_parallel_shard: 0", ["data_parallel_shard = 0: must be -1 or at least 1"]),
        ("data_parallel_shard_strategy: all", ["data_parallel_shard_strategy = 'all': must be optim, optim_grads or"]),
        ("reshard_after_forward_policy: often", ["reshard_after_forward_policy = 'often': must be always, never or"]),
        ("tensor_parallel: 8", ["parallelism.tensor_parallel = 8: must divide what it shards", "set it to 1, 2 or 4"]),
        ("tensor_parallel: 0", ["parallelism.tensor_parallel = 0: must be at least 1"]),
        ("context_parallel: 4, context_parallel_method: ring", ["context_parallel_method = 'ring': must be colossal"]),
        ("context_parallel: 4, context_parallel_method: hybrid", ["ulysses_degree_in_cp: parallelism.context_parallel_m"
                                                                  "ethod hybrid needs it"]),
        ("context_parallel: 2, context_parallel_method: ulysses, ulysses_degree_in_cp: 4", ["ulysses_degree_in_cp ="]),
        ("context_parallel: 8, context_parallel_method: ulysses", ["context_parallel = 8: with Ulysses its ranks must",
                                                                   "the hybrid method with ulysses_degree_in_cp"]),
        ("disable_gradient_division: False", ["disable_gradient_division = false", "summed over ranks"]),
        ("context_parallel_mask_type: full", ["context_parallel_mask_type = 'full'", "attention is causal"]),
        ("expert_parallel: 2", ["parallelism.expert_parallel = 2: the model has no experts"]),
        ("pipeline_parallel: 8", ["parallelism.pipeline_parallel = 8: the model has 4 layers"]),
        ("pipeline_parallel: 4, pipeline_parallel_interleave_num: 2", ["pipeline_parallel = 4: the model has 4"]),
        ("pipeline_parallel: 2, pipeline_parallel_schedule: zero", ["must be 1f1b, interleaved_1f1b or gpipe"]),
        ("pipeline_parallel: 2, pipeline_parallel_schedule: interleaved_1f1b", ["needs parallelism.pipeline_paral"]),
        ("pipeline_parallel: 2, pipeline_parallel_layers_per_stage: ['0-3']", ["['0-1', '2-3']"]),
        ("pipeline_parallel: 2, pipeline_parallel_layers_per_stage: ['0-1', '3']", ["3-3 where one from layer 2 on"]),
        ("pipeline_parallel: 2, pipeline_parallel_layers_per_stage: ['0-1', '2-7']", ["has 2 + 6 = 8 layers, and the"]),
        ("pipeline_parallel: 2, pipeline_parallel_layers_per_stage: even", ["must be auto or a list of ranges"]),
        ("pipeline_parallel: 2, pipeline_parallel_layers_per_stage: [a, b]", ["must be auto or a list of ranges"]),
        ("tensor_parallel: 2, pipeline_parallel: 4", ["needs 8 ranks, but the job has 4", "tensor_parallel 2"]),
    ],
)  # fmt: skip
def test_mistakes_name_the_keys_of_the_file(keys: str, expected: list[str]):
    message = failed(keys, world=world_of(8 if ": 8" in keys else 4))
    for text in (*expected, "a.yaml:19: parallelism."):
        assert text in message, message
    assert not any(older in message for older in OLDER) and "unset data_parallel" not in message, message


def test_a_run_mode_and_a_folder_for_results_do_not_make_it_an_older_file():
    config = load(f"run_mode: train\noutput_dir: results\n{SMALL}")
    assert (config.run_mode, config.output_dir, config.seed) == ("train", "results", 42)
    with pytest.raises(UserError, match=r"(?s)run_mode = .predict..*--run_mode"):
        load(f"run_mode: predict\n{SMALL}")


def test_too_few_micro_batches_name_the_global_batch():
    message = failed("pipeline_parallel: 2, data_parallel_shard: -1", SMALL.replace("size: 8}", "size: 4}"))
    assert "training.global_batch_size = 4: it makes 1 micro-batches of a rank, and 2 stages need" in message
    assert "set it to 8 or more" in message


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ("context_parallel: 2, context_parallel_method: ulysses", "context_parallel_method = 'ulysses': on an Ascend"),
        ("reshard_after_forward_policy: always", "reshard_after_forward_policy = 'always': ranks of an Ascend do not"),
    ],
)
def test_what_ranks_of_an_ascend_cannot_do_is_an_error(keys: str, part: str):
    message = failed(keys, ASCEND)
    assert part in message and "set context.device_target to CPU" in message
    assert not any(older in message for older in OLDER), message


def test_a_sharding_strategy_means_what_the_device_of_a_flag_can_do():
    levels = [
        load(text, f"context.device_target={device}").parallel.parallel_optimizer_config.optimizer_level
        for text in (SMALL, ASCEND) for device in ("CPU", "Ascend")
    ]
    assert levels == ["level3", "level2", "level3", "level2"]


def test_a_pipeline_with_a_tied_embedding_says_how_its_ranks_can_train():
    message = failed("pipeline_parallel: 2", ASCEND.replace("model:\n", "model:\n  tie_word_embeddings: True\n", 1))
    assert "parallelism.data_parallel_shard = -1: not yet supported on an Ascend with an embedding" in message
    assert "Fix: set it to 1." in message


LARGE = ASCEND.replace("hidden_size: 64", "hidden_size: 4096").replace("vocab_size: 300", "vocab_size: 150000")
LARGE = LARGE.replace("global_batch_size: 8", "global_batch_size: 64")
TENSOR = "tensor_parallel: 2, sequence_parallel: True"
STRATEGY = "data_parallel_shard_strategy: optim_grads"


@pytest.mark.parametrize(
    ("keys", "limit", "ranks", "why"),
    [
        (STRATEGY, "59GB", 1, ""),
        (STRATEGY, "13GB", 4, "planned for 4 ranks, the fewest whose memory fits; --ranks"),
        (f"{STRATEGY}, {TENSOR}", "59GB", 2, "planned for 2 ranks, the fewest that the degrees need"),
        (f"{STRATEGY}, {TENSOR}", "9GB", 4, "planned for 4 ranks, the fewest whose memory"),
    ],
)
def test_a_plan_without_ranks_takes_the_fewest_with_enough_memory(keys: str, limit: str, ranks: int, why: str):
    text = LARGE.replace("device_target: Ascend", f"device_target: Ascend, max_device_memory: {limit}")
    config = loaded(keys, text)
    job, notes = fewest_ranks(config, SINGLE_PROCESS)
    assert job.size == ranks and why in "".join(notes)
    assert plan_file(config, job, []).ranks == ranks
    assert fewest_ranks(config, FOUR) == (FOUR, [])
    if limit == "13GB":  # half as many are too few, by their activations or by what is exact
        assert any("a rank needs about" in note for note in planned(keys, text, world_of(ranks // 2)).notes)
    elif limit != "59GB":
        assert "GiB for weights, gradients and optimizer state" in failed(keys, text, world_of(ranks // 2))
    nothing = loaded(keys, text.replace(limit, "0.1GB"))
    assert fewest_ranks(nothing, SINGLE_PROCESS)[0].size in (1, 2)


@pytest.mark.parametrize(
    ("keys", "limit", "settings"),
    [
        ("", "4.6GB", "tensor_parallel: 4, sequence_parallel: true"),
        ("data_parallel_shard: 1", "4.6GB", "tensor_parallel: 4, sequence_parallel: true, pipeline_parallel: 2"),
        (TENSOR, "2GB", ""),  # 2.7 GiB of a rank with the activations
        ("", "1GB", ""),
    ],
)  # fmt: skip
def test_too_little_memory_names_degrees_that_fit(keys: str, limit: str, settings: str):
    text = LARGE.replace("device_target: Ascend", f"device_target: Ascend, max_device_memory: {limit}")
    message = failed(keys, text, fewest_ranks(loaded(keys, text), SINGLE_PROCESS)[0])
    if not settings:
        assert "no degrees help with up to 128 ranks" in message  # 64 sequences of a step, on 2 stages
        return
    words = ", ".join(f"parallelism.{setting}".replace(":", " to") for setting in settings.split(", "))
    assert f"for example set {words}: each of" in message, message
    names = [setting.partition(":")[0] for setting in settings.split(", ")]
    kept = [key for key in keys.split(", ") if key and key.partition(":")[0] not in names]
    changed = loaded(", ".join([*kept, settings]), text)
    job, _ = fewest_ranks(changed, SINGLE_PROCESS)
    total = plan_file(changed, job, []).memory_bytes["total"]
    assert f"each of {job.size} ranks then needs {total / 2**30:.1f} GiB" in message
