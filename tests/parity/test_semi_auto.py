"""MindSpore's semi-automatic mode, as far as a CPU shows it: what is wrapped in what, with which settings and cuts, and
that the loss that is cut is the loss of a run."""

from __future__ import annotations

import json
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, Pipeline
from numpy_kernels import distance

from trainer.cli import dispatch
from trainer.config import Config, parse_config
from trainer.data import Batch
from trainer.errors import UserError
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.models.moe import Tally
from trainer.ops.kernel_set import load_kernels
from trainer.ops.select import REFERENCE, KernelChoice, select_kernels
from trainer.parallel.semi_auto import LossCell, SemiAuto, build_semi_auto, stages
from trainer.parallel.world import world_of

ROWS, TOKENS, VOCABULARY = 4, 8, 19
SIZES = {
    "num_layers": 4, "hidden_size": 16, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCABULARY, "seq_length": TOKENS, "qkv_has_bias": True,
}  # fmt: skip
RANDOM = np.random.default_rng(6)


def config_of(top: dict | None = None, **changes) -> Config:
    base = {
        "use_parallel": True, "parallel": {"parallel_mode": 1}, "runner_config": {"batch_size": ROWS},
        "model": {"model_config": SIZES | changes},
    }  # fmt: skip
    return parse_config("semi", json.dumps(base | (top or {})))


def built(top: dict | None = None, ranks: int = 8, **changes) -> SemiAuto:
    return build_semi_auto(config_of(top, **changes), world_of(ranks))


# ---- what is wrapped in what -----------------------------------------------------------------------------------------


def test_the_loss_alone() -> None:
    found = built()
    assert type(found.network) is AutoParallel and type(found.network.network) is LossCell
    assert found.network._parallel_mode == "semi_auto" and found.network._pipeline_stages == 1
    assert not found.network._enable_parallel_optimizer and found.notices == ()
    assert found.network._full_batch  # parallel.full_batch: True is the default


def test_accumulation_stands_around_the_loss() -> None:
    found = built({"runner_config": {"batch_size": ROWS, "gradient_accumulation_steps": 3}})
    accumulation = found.network.network
    assert type(accumulation) is GradAccumulation and accumulation.micro_size == 3
    assert type(accumulation.network) is LossCell and found.notices == ()


def test_a_pipeline_takes_the_place_of_accumulation_and_says_so() -> None:
    found = built({
        "runner_config": {"batch_size": ROWS, "gradient_accumulation_steps": 4},
        "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4, "data_parallel": 4},
    })  # fmt: skip
    pipeline = found.network.network
    assert type(pipeline) is Pipeline and pipeline.micro_size == 4 and type(pipeline.network) is LossCell
    assert found.network._pipeline_stages == 2
    assert [layer.pipeline_stage for layer in pipeline.network.decoder.layers] == [0, 0, 1, 1]
    assert pipeline.network.decoder.head.pipeline_stage == 1
    assert "gradient_accumulation_steps 4: no effect in a pipeline" in found.notices[0]
    assert "micro_batch_num 4 says how many" in found.notices[0]


def test_stages_of_layers_and_modules() -> None:
    settings = config_of(num_layers=4, mtp_depth=1).decoder
    found = stages(settings, 2)
    assert [found[f"decoder.layers.{layer}"] for layer in range(4)] == [0, 0, 0, 1]
    assert found["decoder.head"] == found["decoder.modules.0"] == found["decoder.merges.0"] == 1


def test_shared_optimizer_state() -> None:
    found = built({"parallel": {
        "parallel_mode": 1, "enable_parallel_optimizer": True, "full_batch": False,
        "parallel_optimizer_config": {"parallel_optimizer_threshold": 16},
    }})  # fmt: skip
    assert found.network._enable_parallel_optimizer and found.network._parallel_optimizer_threshold == 16
    assert not found.network._full_batch and found.network._dataset_strategy_config == "data_parallel"


def test_recomputation_without_effect_is_said() -> None:
    found = built({"recompute_config": {"recompute": True}})
    assert len(found.notices) == 1 and "recompute_config: no effect" in found.notices[0]


def test_shares_of_rows_are_those_of_the_host() -> None:
    config = config_of(moe_config={"expert_num": 4, "num_experts_chosen": 2, "use_gmm": True})
    kernels = load_kernels(select_kernels(config.decoder, "Ascend"))
    data = batch()
    right = InputBuilder(config.decoder, kernels)(data).shares
    found = LossCell(config, kernels).shares(Tensor(data.labels))
    for mine, expected in zip(found, right[:3], strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), expected.asnumpy())


def test_no_weight_is_drawn_before_mindspore_compiles() -> None:
    found = built()
    loss = found.network.network
    weights = [parameter for parameter in loss.trainable_params() if parameter.has_init]
    assert {parameter.name for parameter in weights} == set(loss.by_name) and loss.by_name
    groups = found.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(loss.by_name)


# ---- where it is cut -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strategies_come_from_parallel_config(dtype: str) -> None:
    degrees = {"parallel_config": {"data_parallel": 4, "model_parallel": 2}}
    layer = built(degrees, compute_dtype=dtype).network.network.decoder.layers[1].block

    def product(projection: nn.Cell) -> nn.Cell:
        return projection.linear if dtype == "float32" else projection.linear.kernel

    assert product(layer.attention.query).linear.product.in_strategy == ((4, 1), (2, 1))
    assert product(layer.attention.query).bias_add.in_strategy == ((4, 2), (2,))
    for first in (layer.mlp.gate, layer.mlp.up):
        assert product(first).product.in_strategy == ((4, 1), (2, 1))
    for second in (layer.attention.out, layer.mlp.down):
        assert product(second).product.in_strategy == ((4, 2), (1, 2))


@pytest.mark.parametrize(
    ("top", "changes", "parts"),
    [
        ({"parallel_config": {"pipeline_stage": 2}, "runner_config": {"gradient_accumulation_steps": 4}}, {},
         ["micro_batch_num = 1: a pipeline of 2 stages needs as many", "set it to 2 or more"]),
        ({"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 3}}, {}, ["batch_size = 4", "set it to 6"]),
        ({"parallel_config": {"pipeline_stage": 8, "micro_batch_num": 8}, "runner_config": {"batch_size": 8}}, {},
         ["pipeline_stage = 8", "the model has 4 layers"]),
        ({"parallel_config": {"model_parallel": 8}}, {}, ["model_parallel = 8", "4 and 2 of keys"]),
        ({"parallel_config": {"data_parallel": 3}}, {}, ["data_parallel 3 is for 3 ranks, and this job has 8"]),
        ({"parallel_config": {"context_parallel": 2}}, {}, ["context_parallel = 2", "not yet supported in semi"]),
        ({"parallel_config": {"expert_parallel": 2}}, {}, ["expert_parallel = 2", "not yet supported in semi"]),
        ({"optimizer": {"type": "Muon"}}, {}, ["optimizer.type = 'Muon'", "AdamW or SGD"]),
        ({}, {"hidden_dropout": 0.1}, ["hidden_dropout = 0.1", "set it to 0"]),
        ({}, {"pet_config": {"pet_type": "lora"}}, ["pet_config = 'lora'", "not yet supported in semi"]),
        ({}, {"moe_config": {"expert_num": 4}}, ["use_gmm = False", "set it to True"]),
        ({}, {"moe_config": {"expert_num": 4, "use_gmm": True, "balance_via_topk_bias": True}},
         ["balance_via_topk_bias = True", "the bias would stay"]),
    ],
)  # fmt: skip
def test_what_the_mode_cannot_do_is_an_error(top: dict, changes: dict, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        built(top, **changes)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_the_audit_shows_what_is_built(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    section = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2}
    steps = {"batch_size": ROWS, "gradient_accumulation_steps": 2}
    mode = {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": True}
    config = {"use_parallel": True, "parallel": mode, "parallel_config": section, "runner_config": steps}
    file = tmp_path / "semi.json"
    file.write_text(json.dumps(config | {"model": {"model_config": SIZES | {"num_layers": 3}}}))
    assert dispatch(["plan", "--audit", "ascend", "--json", "--config", str(file)]) == 0
    pairs = json.loads(capsys.readouterr().out)["semi_auto"]
    found = dict(pairs)
    assert found["network"] == "AutoParallel ( Pipeline, 2 micro-batches ( LossCell ) )"
    assert (found["stage 0"], found["stage 1"]) == ("layers 0-1", "layer 2")
    assert found["mlp.down"] == "input (2, 2), weight (1, 2)" and found["mlp.up"] == "input (2, 1), weight (2, 1)"
    assert "hsdp" in found["optimizer state"] and "no_init_parameters" in found["weights"]
    assert "gradient_accumulation_steps 2: no effect in a pipeline" in found["note"]
    assert dispatch(["plan", "--audit", "ascend", "--json", "--config", str(file), "--use_parallel", "False",
                     "--parallel_fallback", "explicit"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["semi_auto"] == []


# ---- the loss is that of a run ---------------------------------------------------------------------------------------


def batch() -> Batch:
    ids = RANDOM.integers(0, VOCABULARY, (ROWS, TOKENS + 1)).astype(np.int32)
    segments, positions = np.zeros((ROWS, TOKENS), np.int32), np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
    segments[1, 3:], segments[1, 6:] = 1, 2
    positions[1] = [0, 1, 2, 0, 1, 2, 0, 1]
    labels = ids[:, 1:].copy()
    labels[1, [2, 5]], labels[3, 1:] = -100, -100
    return Batch(ids[:, :-1].copy(), labels, positions, segments)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("length", [8, 7])
def test_tables_and_masks_in_the_graph_are_those_of_the_host(fused: bool, length: int) -> None:
    switches = {"use_fused_rope": True, "use_flash_attention": True, "compute_dtype": "bfloat16", "head_dim": 16}
    settings = config_of(**(switches if fused else {}), rotary_dtype="float32").decoder
    kernels = load_kernels(select_kernels(settings, "Ascend"))
    data = Batch(*(np.ascontiguousarray(array[:, :length]) for array in batch()))
    right = InputBuilder(settings, kernels)(data)
    builder = InputBuilder(settings, kernels)
    cos, sin = (Tensor(table[data.positions.reshape(-1)]) for table in (builder.cos, builder.sin))
    heads = settings.num_heads, settings.kv_heads
    found = [*kernels.tables_in_graph(heads[0])(cos, sin), *kernels.tables_in_graph(heads[1])(cos, sin)]
    for mine, expected in zip(found, right.tables, strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), expected.asnumpy())
    masks = kernels.mask_in_graph(length, *heads)(Tensor(data.segment_ids))
    for mine, expected in zip(masks, right.mask, strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None:
            assert mine.dtype == expected.dtype
            np.testing.assert_array_equal(mine.asnumpy(), expected.asnumpy())


def loss_of_a_run(config: Config, data: Batch) -> float:
    settings = config.decoder
    kernels = load_kernels([KernelChoice(name, "", REFERENCE, "") for name in PLAIN])
    model = Decoder(settings, kernels, seed=config.seed, compiled=False)
    inputs = InputBuilder(settings, kernels)(data)
    total = model(inputs, None, Tally(inputs.shares)).total
    return float(total.asnumpy()) / (data.labels != -100).sum()


PLAIN = ("rotary_embedding", "swiglu", "attention", "rms_norm")


@pytest.mark.parametrize("depth", [0, 2])
def test_the_loss_and_its_sum_over_micro_batches(depth: int) -> None:
    """With the reference kernels, one graph computes on a CPU what the mode would: for the batch, and for its parts
    added up without a division, which have different numbers of valid tokens."""
    config, data = config_of(mtp_depth=depth), batch()
    kernels = load_kernels([KernelChoice(name, "", REFERENCE, "") for name in PLAIN], sharded=True)
    loss = LossCell(config, kernels)
    loss.init_parameters_data()
    share_B1 = np.full((ROWS, 1), 1 / (data.labels != -100).sum(), np.float32)
    arguments = [Tensor(array) for array in (*data, share_B1)]
    right = loss_of_a_run(config, data)
    assert distance(mindspore.jit(loss.construct)(*arguments).asnumpy(), np.float32(right)) < 2e-6
    accumulation = GradAccumulation(loss, 2)
    assert distance(accumulation(*arguments).asnumpy(), np.float32(right)) < 2e-6
