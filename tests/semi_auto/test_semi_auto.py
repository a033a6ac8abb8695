"""Semi-automatic mode with a single rank on a CPU: how the cells are wrapped, with which settings and strategies, and
that its loss, its steps and its checkpoints are those of explicit mode. What MindSpore makes of it for several ranks is
in tests/ascend and test_sharded_numbers.py."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, Pipeline
from numpy_kernels import assert_close, assert_same_bits, distance
from tolerances import GRADIENTS_BFLOAT16, RUN_LOSSES, RUN_NEAR_ZERO, RUN_NORMS, DecoderLimits, decoder_limits

import trainer.run.loop
import trainer.semi_auto.step
from trainer.audit import report
from trainer.checkpoint.store import read_checkpoint
from trainer.cli.main import dispatch
from trainer.config import Config, parse_config
from trainer.config.checks.parallel import zero_level
from trainer.data import Batch
from trainer.data.batches.batch import IGNORE_INDEX
from trainer.dryrun import report as dryrun
from trainer.errors import RunError, UserError
from trainer.models.spec.shapes import all_shapes
from trainer.ops import dropout, plain
from trainer.ops.ascend import dropout as ascend_dropout
from trainer.ops.dropout import DropoutKey
from trainer.optim.freeze import trained_shapes
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.run.session import open_training
from trainer.semi_auto.backend import SemiAutoBackend
from trainer.semi_auto.cells import GradientCell, SemiAuto
from trainer.semi_auto.evaluation import contribution_to_mean
from trainer.semi_auto.network import LazyLossCell, LossCell, build_semi_auto, differentiated_names
from trainer.semi_auto.step import GraphStep, graph_mode
from trainer.semi_auto.training import graph_batch, open_semi_auto_training
from trainer.step.train_step import TrainStep

ROWS, TOKENS, VOCABULARY = 4, 8, 19
SIZES = {
    "num_layers": 4, "hidden_size": 16, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCABULARY, "seq_length": TOKENS, "qkv_has_bias": True,
}  # fmt: skip


def config_of(top: dict | None = None, **changes: Any) -> Config:
    base = {
        "use_parallel": True, "parallel": {"parallel_mode": 1}, "runner_config": {"batch_size": ROWS},
        "model": {"model_config": SIZES | changes},
    }  # fmt: skip
    return parse_config("semi", json.dumps(base | (top or {})))


def explicit(config: Config, schedule: Callable[[int], float], weights: dict | None = None) -> TrainStep:
    """Trains in explicit mode, operator by operator, because compiling would take seconds."""
    context = config.context.model_copy(update={"mode": 1})
    return open_training(config.model_copy(update={"context": context}), schedule, weights)


def built(top: dict | None = None, ranks: int = 8, **changes: Any) -> SemiAuto:
    return build_semi_auto(config_of(top, **changes), world_of(ranks))


# ---- how the cells are wrapped ---------------------------------------------------------------------------------------


def test_the_loss_alone() -> None:
    found = built()
    assert type(found.network) is AutoParallel and type(found.step) is GradientCell
    assert found.network.network is found.step and found.step.network is found.loss
    assert type(found.loss) is LossCell and found.step.sums == ()
    assert found.network._parallel_mode == "semi_auto" and found.network._pipeline_stages == 1
    assert not found.network._enable_parallel_optimizer and not found.network._init_param_in_compile
    assert not found.network._full_batch  # without micro-batches a rank passes its own sequences


def test_accumulation_stands_around_the_loss() -> None:
    found = built({"runner_config": {"batch_size": ROWS, "gradient_accumulation_steps": 3}})
    accumulation = found.step.network
    assert type(accumulation) is GradAccumulation and accumulation.micro_size == 3
    assert accumulation.network is found.loss
    assert found.network._full_batch  # parallel.full_batch: True is the default
    assert [total.name for total in found.step.sums] == [f"accu_grads.{each.name}" for each in found.step.weights]


def test_a_pipeline_takes_the_place_of_accumulation() -> None:
    found = built({
        "runner_config": {"batch_size": ROWS, "gradient_accumulation_steps": 4},
        "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4, "data_parallel": 4},
    })  # fmt: skip
    pipeline, decoder = found.step.network, found.loss.decoder
    assert type(pipeline) is Pipeline and pipeline.micro_size == 4 and type(found.loss) is LazyLossCell
    assert found.network._pipeline_stages == 2
    assert [layer.pipeline_stage for layer in decoder.layers] == [0, 0, 1, 1]
    assert decoder.embed.pipeline_stage == 0 and decoder.heads[0].pipeline_stage == 1


def test_stages_of_layers() -> None:
    parallel = {"pipeline_stage": 2, "micro_batch_num": 4, "data_parallel": 4}
    decoder = built({"parallel_config": parallel}, num_layers=5, offset=[1, 0], mtp_depth=1).loss.decoder
    assert [layer.pipeline_stage for layer in decoder.layers] == [0, 0, 0, 1, 1, 1]  # the last one is the module's
    assert decoder.embed.pipeline_stage == 0
    assert {part.pipeline_stage for part in (*decoder.heads, *decoder.merges)} == {1}
    order = {"pipeline_interleave": True, "pipeline_scheduler": "seqpipe"}
    interleaved = {"parallel_mode": 1, "pipeline_config": order}
    found = built({"parallel_config": parallel, "parallel": interleaved}, pp_interleave_num=2)
    assert [layer.pipeline_stage for layer in found.loss.decoder.layers] == [0, 1, 0, 1]
    assert found.network._pipeline_interleave and found.network._pipeline_scheduler == "seqpipe"


@pytest.mark.parametrize(
    ("changes", "frozen", "added"),
    [
        ({}, ["*.layers.[01].*", "*embed*"], "model.layers.1.post_attention_layernorm.weight"),
        ({"parallel_attn": True}, ["*.layers.[01].*", "*embed*"], "model.layers.1.input_layernorm.weight"),
        ({"offset": [-2, 2]}, ["*embed*"], None),  # the first stage has no layers
    ],
)
def test_each_stage_has_a_gradient(changes: dict[str, Any], frozen: list[str], added: str | None) -> None:
    """Else MindSpore compiles no graph for its layers."""
    parallel = {"pipeline_stage": 2, "micro_batch_num": 4, "data_parallel": 4}
    config = config_of({"parallel_config": parallel, "freeze": {"include": frozen}}, **changes)
    assert set(differentiated_names(config)) - set(trained_shapes(config)) == {added} - {None}


def test_shared_optimizer_state() -> None:
    found = built({"parallel": {
        "parallel_mode": 1, "enable_parallel_optimizer": True, "full_batch": False,
        "parallel_optimizer_config": {"parallel_optimizer_threshold": 16, "optimizer_weight_shard_size": 4},
    }})  # fmt: skip
    network = found.network
    assert network._enable_parallel_optimizer and network._parallel_optimizer_threshold == 16
    assert network._optimizer_weight_shard_size == 4 and network._optimizer_level == "level1"
    assert not network._full_batch and network._dataset_strategy_config == ((8, 1),) * 5


def level_of(recompute: dict, **section: Any) -> str:
    parallel = {"parallel_mode": 1, "enable_parallel_optimizer": True, "parallel_optimizer_config": section}
    return zero_level(config_of({"parallel": parallel, "recompute_config": recompute}))


def test_levels_of_sharing() -> None:
    again = {"parallel_optimizer_comm_recompute": True}
    assert level_of({}, gradient_accumulation_shard=True) == level_of({}, optimizer_level="level2") == "level2"
    assert level_of(again) == "level1" and level_of(again | {"recompute": True}) == "level3"
    assert level_of({}, gradient_accumulation_shard=True, optimizer_level="level3") == "level3"


def test_settings_of_communication_reach_the_graph(tmp_path: Path) -> None:
    file, fusion = tmp_path / "speed_up.json", {"allreduce": {"mode": "size", "config": 32}}
    file.write_text(json.dumps({"enable_communication_fusion": True}))
    context = {"ascend_config": {"parallel_speed_up_json_path": str(file)}}
    parallel = {"parallel_mode": 1, "comm_fusion": fusion, "force_fp32_communication": True}
    network = built({"parallel": parallel, "context": context}).network
    assert network._comm_fusion_config == fusion and network._force_fp32_communication
    assert network._transformer_opt_config == str(file)
    file.unlink()
    with pytest.raises(UserError, match="speed_up.json'.*: there is no such file"):
        SemiAutoBackend(config_of({"context": context}), SINGLE_PROCESS).open(lambda update: 0.0, None, "CPU")


def test_only_the_last_stage_adds_to_the_loss_of_an_evaluation() -> None:
    shares = [contribution_to_mean(Tensor(np.float32(loss)), stage, 2) for stage, loss in enumerate((np.nan, 3))]
    assert [float(share.asnumpy()) for share in shares] == [0, 6]  # the mean over the ranks is the loss


def test_a_rank_hands_over_its_part_of_every_micro_batch() -> None:
    runner = {"batch_size": 1, "gradient_accumulation_steps": 2}
    degrees = {"data_parallel": 2, "model_parallel": 2}
    top = {"parallel": {"parallel_mode": 1, "full_batch": False}, "parallel_config": degrees, "runner_config": runner}
    windows = [graph_batch(config_of(top), World(rank, 4, rank, 4)) for rank in range(4)]
    assert [list(window.local_rows) for window in windows] == [[0, 2], [0, 2], [1, 3], [1, 3]] and windows[0].rows == 4


def test_without_micro_batches_a_rank_hands_over_its_sequences_in_any_case() -> None:
    top = {"parallel_config": {"data_parallel": 2, "model_parallel": 2}, "runner_config": {"batch_size": 1}}
    windows = [graph_batch(config_of(top), World(rank, 4, rank, 4)) for rank in range(4)]
    assert [list(window.local_rows) for window in windows] == [[0], [0], [1], [1]]


def test_what_is_computed_again() -> None:
    section = {"recompute": 1, "select_recompute": {"attention": [1]}, "mp_comm_recompute": False,
               "select_comm_recompute": {".*\\.norm": [3]}}  # fmt: skip
    layers = built({"recompute_config": section}).loss.decoder.layers
    assert [layer._has_config_recompute for layer in layers] == [True, False, False, False]
    assert [layer.block.attention._has_config_recompute for layer in layers] == [True, True, False, False]
    assert not layers[1].block.mlp._has_config_recompute
    first, last = (layer.block.mlp.down.linear.product.attrs for layer in (layers[0], layers[2]))
    assert first["recompute_comm_op"] is False and "recompute_comm_op" not in last
    assert layers[3].block.mlp.norm.norm.attrs["recompute_comm_op"] is True


def test_sequence_parallelism_shards_what_is_between_the_products() -> None:
    degrees = {"data_parallel": 4, "model_parallel": 2, "use_seq_parallel": True}
    decoder = built({"parallel_config": degrees}, vocab_size=20).loss.decoder
    block = decoder.layers[0].block
    assert block.add_mlp.in_strategy == ((8, 1), (8, 1)) and block.attention.norm.norm.in_strategy == ((8, 1), (1,))
    assert block.mlp.down.linear.product.out_strategy == decoder.embed.gather.out_strategy == ((8, 1),)
    assert block.mlp.up.linear.product.in_strategy == ((4, 1), (2, 1))


def test_jit_options_reach_the_graph() -> None:
    found = built({"context": {"jit_level": "O1", "exec_order": "dfs"}})
    options = found.network.jit_config_dict
    assert options["jit_level"] == "O1" and options["exec_order"] == "dfs"
    assert not built().network.jit_config_dict


def test_no_rank_of_several_allocates_whole_weights() -> None:
    found = built({"runner_config": {"batch_size": ROWS, "gradient_accumulation_steps": 2}})
    assert all(parameter.has_init for parameter in found.network.get_parameters())


def test_what_the_mode_cannot_do_is_an_error() -> None:
    with pytest.raises(UserError, match="Muon.*: not yet supported in semi-automatic mode"):
        built({"optimizer": {"type": "Muon"}})


# ---- strategies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strategies_come_from_parallel_config(dtype: str) -> None:
    degrees = {"parallel_config": {"data_parallel": 4, "model_parallel": 2}}
    layer = built(degrees, compute_dtype=dtype).loss.decoder.layers[1].block

    def product(projection: nn.Cell) -> nn.Cell:
        return projection.linear if dtype == "float32" else projection.linear.kernel

    assert product(layer.attention.query).product.in_strategy == ((4, 1), (2, 1))
    assert product(layer.attention.query).bias_add.in_strategy == ((4, 2), (2,))
    for first in (layer.mlp.gate, layer.mlp.up):
        assert product(first).product.in_strategy == ((4, 1), (2, 1))
    for second in (layer.attention.out, layer.mlp.down):
        assert product(second).product.in_strategy == ((4, 2), (1, 2))


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    degrees = {"parallel_config": {"data_parallel": 4, "model_parallel": 2}}
    assert built(degrees).loss.decoder.embed.gather.in_strategy == ((1, 1), (4,))
    assert built(degrees, vocab_size=20).loss.decoder.embed.gather.in_strategy == ((2, 1), (4,))


def test_the_audit_shows_what_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dryrun, "audit_on_backend", lambda config, world: "not needed")  # it does the same in a process
    monkeypatch.setattr(report, "export_step", lambda *step: [])  # the operators: tests/parity/test_ascend_audit.py
    section = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2}
    steps = {"batch_size": ROWS, "gradient_accumulation_steps": 2}
    mode = {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": True}
    config = {"use_parallel": True, "parallel": mode, "parallel_config": section, "runner_config": steps}
    file = tmp_path / "semi.json"
    file.write_text(json.dumps(config | {"model": {"model_config": SIZES | {"num_layers": 3}}}))
    assert dispatch(["plan", "--audit", "ascend", "--json", "--config", str(file)]) == 1
    pairs = json.loads(capsys.readouterr().out)["semi_auto"]
    found = dict(pairs)
    assert found["mode"] == "semi_auto, 2 pipeline stage(s), 1f1b"
    assert found["network"] == "AutoParallel ( GradientCell ( Pipeline, 2 micro-batches ( LazyLossCell ) ) )"
    assert (found["stage 0"], found["stage 1"]) == ("layer 0", "layers 1-2")
    assert found["mlp.down"] == "input (2, 2), weight (1, 2)" and found["mlp.up"] == "input (2, 1), weight (2, 1)"
    assert "hsdp" in found["optimizer state"] and "no_init_parameters" in found["weights"]
    assert "gradient_accumulation_steps 2: no effect in a pipeline" in found["note"]


# ---- its numbers are those of a run ----------------------------------------------------------------------------------


def batch(number: int = 0, rows: int = ROWS, length: int = TOKENS) -> Batch:
    random = np.random.default_rng(number)
    ids = random.integers(0, VOCABULARY, (rows, length + 1)).astype(np.int32)
    segments, positions = np.zeros((rows, length), np.int32), np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    segments[1, 3:], segments[1, 6:] = 1, 2
    positions[1, 3:6], positions[1, 6:] = np.arange(3), np.arange(length - 6)
    labels = ids[:, 1:].copy()
    labels[1, [2, 5]], labels[rows - 1, 1 + number :] = -100, -100
    return Batch(ids[:, :-1].copy(), labels, positions, segments)


def drawn_weights(config: Config, deviation: float = 0.1) -> dict[str, np.ndarray]:
    random, shapes = np.random.default_rng(1), all_shapes(config.decoder)
    return {name: random.normal(0, deviation, shape).astype(np.float32) for name, shape in shapes.items()}


def computed(step: GraphStep, window: list[Batch]) -> tuple[Tensor, tuple[Tensor, ...]]:
    with graph_mode():
        return step.network(*step.batch.tensors(window, 1 / (window[0].labels != -100).sum()))


@pytest.mark.parametrize(
    ("changes", "close"),
    [
        # A window in the second of two layers, which have one attention, and an embedding of another width. All heads
        # have keys of their own, without biases, and half of each is rotated.
        ({"num_layers": 2, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1, "layers_group": 2,
          "embedding_size": 12, "n_kv_heads": 4, "rotary_pct": 0.5, "qkv_has_bias": False}, None),
        # One layer, where what is different is within a layer: compiling is most of what this costs.
        ({"use_qk_norm": True, "tie_word_embeddings": True, "seq_length": 7, "rotary_pct": 0.5, "rope_interleave": True,
          "post_self_attn_layernorm": True, "post_mlp_layernorm": True}, None),
        ({"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 6, "rope_interleave": True,
          "architectures": "LlamaForCausalLM"}, None),
        # Adapters in one layer of two and in the module behind them: the other layer has none.
        ({"num_layers": 2, "mtp_depth": 1, "pet_config": {
            "lora_rank": 4, "target_modules": r"model.layers.[12].*(q|v|down)_proj"}}, None),
        # Half precision: the kernels round in other places.
        ({"compute_dtype": "bfloat16"}, GRADIENTS_BFLOAT16),
    ],
)
def test_gradients_are_those_of_the_kernels_of_a_run(changes: dict[str, Any], close: float | None) -> None:
    config = config_of({"optimizer": {"type": "SGD", "momentum": 0.0}}, **{"num_layers": 1} | changes)
    limits = decoder_limits(config.decoder, rows=ROWS) if close is None else DecoderLimits(close, close)
    window = [batch(length=config.decoder.seq_length)]
    weights = None
    if config.decoder.pet_config is not None:  # at first an adapter's B is zero, and so is the gradient of its A
        weights = drawn_weights(config)
    run = explicit(config, lambda update: 0.0, weights)
    right = run.backward(window[0], 0, 1 / (window[0].labels != -100).sum())
    step = open_semi_auto_training(config, lambda update: 0.0, weights, SINGLE_PROCESS, "CPU")
    loss, gradients = computed(step, window)
    if not config.decoder.mtp_depth:  # the graph's loss includes that of the modules
        assert distance(loss.asnumpy(), right.loss_sum.asnumpy() / (window[0].labels != -100).sum()) < limits.loss
    assert_close(gradients, right.gradients, limits.gradients)


def test_steps_are_those_of_a_run() -> None:
    """With micro-batches of unequal numbers of labels, clipping and a loss scale, and a shorter window at the end. The
    graph does not depend on the optimizer: AdamW is below, in a whole run."""
    top = {
        "optimizer": {"type": "SGD", "nesterov": True, "momentum": 0.9},
        "runner_config": {"batch_size": ROWS, "gradient_accumulation_steps": 2},
        "runner_wrapper": {
            "use_clip_grad": True, "max_grad_norm": 0.5, "scale_sense": 256.0, "local_norm": True,
            "clip_by_group": True,
        },
    }  # fmt: skip
    config = config_of(top, num_layers=1)
    run = explicit(config, lambda update: 0.02)
    step = open_semi_auto_training(config, lambda update: 0.02, None, SINGLE_PROCESS, "CPU")
    limits = decoder_limits(config.decoder, rows=2 * ROWS)
    windows = [[batch(number + 2 * place) for number in range(2)] for place in range(4)] + [[batch(1)]]
    for window in windows:
        mine, right = step(window), run(window)
        assert mine.updated and (mine.tokens, mine.lr, mine.loss_scale) == (right.tokens, right.lr, right.loss_scale)
        assert mine.loss == pytest.approx(right.loss, rel=limits.loss)
        assert mine.global_norm == pytest.approx(right.global_norm, rel=limits.gradients)
        assert mine.local_norms == pytest.approx(right.local_norms, RUN_NORMS, RUN_NEAR_ZERO)
    saved, expected = step.state_dict_shard(), run.state_dict_shard()
    assert saved.updates == expected.updates
    for mine, right in ((saved.weights, expected.weights), (saved.optimizer, expected.optimizer)):
        assert_close(mine, {name: piece.array for name, piece in right.items()}, RUN_NORMS)


def test_a_step_that_is_not_to_be_learned_from_changes_nothing() -> None:
    wrapper = {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": 1e-6, "scale_sense": 16.0}
    config = config_of({"runner_wrapper": wrapper}, num_layers=1)
    step = open_semi_auto_training(config, lambda update: 0.1, None, SINGLE_PROCESS, "CPU")
    before = {name: array.copy() for name, array in step.state_dict_shard().weights.items()}
    spike = step([batch()])
    assert not spike.updated and spike.skipped.startswith("spike: norm")
    empty = step([batch()._replace(labels=np.full((ROWS, TOKENS), IGNORE_INDEX, np.int32))])
    assert (empty.updated, empty.skipped, empty.tokens) == (False, "no token with a loss", 0)
    last = "lm_head.weight"
    step.parameters.local[last].set_data(Tensor(before[last] * np.float32(np.inf)))
    overflow = step([batch()])
    assert (overflow.updated, overflow.overflow, step.optimizer.updates) == (False, True, 0)
    for name, array in step.state_dict_shard().weights.items():
        assert name == last or np.array_equal(array, before[name]), name
    step.guards.wrapper = step.guards.wrapper.model_copy(update={"use_skip_data_by_global_norm": False})
    step.guards.loss_scale.value = 1.0
    with pytest.raises(RunError, match="first non-finite gradient: "):
        step([batch()])


class Product(nn.Cell):
    """As the operator that a CPU lacks, with a mask of factors."""

    def __init__(self, rate: float) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x, mask):
        return x * mask


def factors_in_graph(seed, shape, rate):
    numbers = ops.arange(math.prod(shape)).astype(mstype.float32) + seed.astype(mstype.float32)
    return (ops.floor_mod(numbers, 5.0) > 0.5).astype(mstype.float32).reshape(shape) * 1.25


def test_dropout_masks_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares masks of the same site and step, which are a pattern here because a CPU lacks the operator. Those of
    another micro-batch follow from the seeds, which the host gives to the graph."""

    def seed_of(key: DropoutKey, site: int) -> int:
        return 1000 * key.step + 100 * key.micro_batch + site

    def factors(key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: None = None) -> np.ndarray:
        numbers = np.arange(math.prod(shape)) + seed_of(key, site)
        return np.where(numbers % 5 > 0, np.float32(1.25), np.float32(0)).reshape(shape)

    for module in (plain, dropout):  # of the residual stream, and of the scores
        monkeypatch.setattr(module, "dropout_mask", factors)
    monkeypatch.setattr(trainer.semi_auto.step, "mask_seed", lambda key, site: 4 * seed_of(key, site))
    monkeypatch.setattr(ascend_dropout, "draw_bits", factors_in_graph)
    monkeypatch.setattr(ascend_dropout, "Dropout", Product)
    top = {
        "optimizer": {"type": "SGD", "momentum": 0.0}, "runner_wrapper": {"use_clip_grad": True},
    }
    adapters = {"lora_rank": 4, "lora_dropout": 0.2, "target_modules": ".*(q|down)_proj"}
    config = config_of(
        top, num_layers=2, n_kv_heads=4, hidden_dropout=0.2, attention_dropout=0.2, pet_config=adapters
    )
    weights = drawn_weights(config)
    run = explicit(config, lambda update: 0.1, weights)
    step = open_semi_auto_training(config, lambda update: 0.1, weights, SINGLE_PROCESS, "CPU")
    limits = decoder_limits(config.decoder, rows=ROWS)
    for number in range(2):
        mine, right = step([batch(number)]), run([batch(number)])
        assert mine.loss == pytest.approx(right.loss, rel=limits.loss)
        assert mine.global_norm == pytest.approx(right.global_norm, rel=limits.gradients)
    seeds = trainer.semi_auto.step.MaskSeeds(config.seed, micro_batches=2, ranks=1).for_rows(3, 2 * ROWS)
    keys = [DropoutKey(config.seed, 0, 3, micro_batch) for micro_batch in range(2)]
    assert seeds[:, 0].tolist() == [seed_of(key, 0) for key in keys for _ in range(ROWS)]
    assert float(step.model(batch()).tokens.asnumpy()) == pytest.approx(
        float(run.model(run.build_inputs(batch())).tokens.asnumpy()), rel=limits.loss
    )


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the check that keeps this mode from a CPU, where a single rank can run it."""
    monkeypatch.setattr(SemiAutoBackend, "check_device", lambda backend, device: None)


def trained(folder: Path, mode: int, **more: Any) -> tuple[list[dict[str, Any]], list[tuple[float, int]], Any]:
    """Returns steps of the metrics, loss and tokens of the evaluations, and the last checkpoint."""
    top = {
        "output_dir": str(folder), "report": False, "parallel": {"parallel_mode": mode}, "use_parallel": mode == 1,
        "train_dataset": {"data_loader": {"type": "SyntheticDataset", "num_samples": 60}},
        "do_eval": True, "eval_step_interval": 5,
        "eval_dataset": {"data_loader": {"type": "SyntheticDataset", "num_samples": 6}},
        "runner_config": {"batch_size": ROWS, "epochs": 2, "gradient_accumulation_steps": 2},
        "optimizer": {"type": "AdamW", "weight_decay": 0.1}, "lr_schedule": {"learning_rate": 0.01},
        "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 3, "keep_checkpoint_max": 9}],
    }  # fmt: skip
    assert trainer.run.loop.run(config_of(top | more, num_layers=1)) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    newest = max((folder / "checkpoints").glob("step-*"))
    evaluated = [(line["eval_loss"], line["eval_tokens"]) for line in lines if "eval_loss" in line]
    return [line for line in lines if "loss" in line], evaluated, read_checkpoint(newest)


def test_a_run_and_one_that_goes_on_from_its_checkpoint(tmp_path: Path, on_a_cpu: None) -> None:
    whole, evaluated, last = trained(tmp_path / "whole", 1, recompute_config={"recompute": True})
    right, evaluated_right, expected = trained(tmp_path / "explicit", 0, context={"mode": 1})
    assert [line["tokens"] for line in whole] == [line["tokens"] for line in right] and len(whole) > 6
    np.testing.assert_allclose([line["loss"] for line in whole], [line["loss"] for line in right], RUN_LOSSES)
    np.testing.assert_allclose(evaluated, evaluated_right, RUN_LOSSES)
    assert len(evaluated) > 1
    for part in ("model", "optimizer"):
        assert_close(last.tensors[part], expected.tensors[part], RUN_NORMS)
    kept = min((tmp_path / "whole" / "checkpoints").glob("step-*"))
    shutil.copytree(kept, tmp_path / "resumed" / "checkpoints" / kept.name)
    rest, _, again = trained(tmp_path / "resumed", 1, resume_training=True, do_eval=False)
    assert [line["step"] for line in rest][-len(whole) + 3 :] == [line["step"] for line in whole[3:]]
    for part in ("model", "optimizer"):
        assert_same_bits(again.tensors[part], last.tensors[part])
