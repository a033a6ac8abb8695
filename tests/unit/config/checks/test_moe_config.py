"""The keys of experts and multi-token prediction: what they mean, what contradicts them, what a reader should know."""

from __future__ import annotations

import pytest
from config_helpers import BASE, error_of, load, notes

from trainer.config import dump_config, parse_config
from trainer.config.checks.moe import watches_drop_rate
from trainer.errors import UserError
from trainer.optim.freeze import frozen_names, trained_shapes

MODEL = "model_config: {num_layers: 4, hidden_size: 64, num_heads: 4, vocab_size: 300, seq_length: 32}\n"


def moe(keys: str, more: str = "") -> str:
    """Returns a file with 8 experts, 2 chosen, and further keys."""
    return f"{MODEL}moe_config: {{expert_num: 8, num_experts_chosen: 2{keys and ', '}{keys}}}\n{more}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (moe("").replace("num_experts_chosen: 2", "num_experts_per_tok: 9"), ["more experts than there are (8)"]),
        (moe("n_group: 3"), ["a.yaml:2: ", "n_group = 3: must divide the experts (8)"]),
        (moe("n_group: 4, topk_method: greedy"), ["topk_method = 'greedy': uses no groups, and n_group is 4"]),
        (moe("topk_method: best"), ["topk_method = 'best': must be greedy, group_limited_greedy or noaux_tc"]),
        (moe("capacity_factor: 0"), ["capacity_factor = 0", "must be greater than 0, or -1"]),
        (moe("capacity_factor: -0.5"), ["capacity_factor = -0.5", "use 1.1 or -1"]),
        (moe("capacity_factor: 1.5, drop_policy: False"), ["no token is dropped, but the capacity factor is 1.5"]),
        (moe("drop_policy: random"), ["moe_config.drop_policy = 'random': must be position, probability"]),
        (moe("first_k_dense_replace: 5"), ["must be at most num_layers (4)"]),
        (moe("first_k_dense_replace: 4"), ["first_k_dense_replace = 4: leaves no layer with experts"]),
        (moe("moe_layer_freq: [0, 0, 0, 0]"), ["moe_layer_freq", "leaves no layer with experts"]),
        (moe("moe_layer_freq: 0"), ["moe_layer_freq = 0: must be at least 1"]),
        (moe("moe_layer_freq: [1, 2, 1, 1]"), ["moe_layer_freq", "a list may have only 0 and 1"]),
        (
            moe("aux_loss_factor: 0.2, aux_loss_types: [expert], aux_loss_factors: [0.1]"),
            ["not yet", "write aux_loss_factor: 0.1"],
        ),
        (moe("aux_loss_types: [expert, comm], aux_loss_factors: [0.1, 1]"), ["aux_loss_types", "aux_loss_factor: 0.1"]),
        (moe("aux_loss_types: [device], aux_loss_factors: [0.1]"), ["aux_loss_types", "not yet"]),
        (moe("moe_router_load_balancing_type: sinkhorn"), ["'sinkhorn': not yet", "seq_aux_loss"]),
        (moe("moe_router_load_balancing_type: none"), ["'none': contradicts aux_loss_factor", "aux_loss_factor: 0"]),
        (moe("shared_expert_num: 1, moe_mlp_has_bias: True, swiglu_limit: 7"),
         ["moe_mlp_has_bias = true: not yet supported with shared experts", "swiglu_limit = 7.0: not yet"]),
        (moe("use_shared_expert_gating: True"), ["requires shared experts, and the model has none"]),
        (moe("use_random_expert: True"), ["use_random_expert = true: not yet"]),
        (moe("").replace("seq_length", "mlp_has_bias: True, seq_length"), ["mlp_has_bias = true: not yet", "experts"]),
        (moe("").replace("seq_length", "mtp_depth: -1, seq_length"), ["mtp_depth = -1: must be at least 0"]),
        (moe("").replace("seq_length: 32", "mtp_depth: 2, seq_length: 2"), ["mtp_depth = 2: must be less than"]),
        (
            moe("").replace("seq_length", "pet_config: {target_modules: '.*w[123]'}, seq_length"),
            ["target_modules = '.*w[123]': matches only weights of experts"],
        ),
        (
            moe("").replace("seq_length", "pet_config: {target_modules: '.*experts.*gate_proj'}, seq_length"),
            ["matches only weights of experts, where LoRA is not supported", ".*q_proj"],
        ),
        (
            moe("use_gating_sigmoid: False, scoring_func: sigmoid"),
            ["scoring_func = 'sigmoid': disagrees with use_gating_sigmoid = false (a.yaml:2): it means true"],
        ),
        (moe("mlp_only_layers: [0, 1, 2, 3]"), ["mlp_only_layers = [0, 1, 2, 3]: leaves no layer with experts"]),
        (
            moe("first_k_dense_replace: 2, mlp_only_layers: [2, 3]"),
            ["mlp_only_layers = [2, 3]: leaves no layer with experts, with first_k_dense_replace = 2"],
        ),
        (moe("decoder_sparse_step: 5"), ["decoder_sparse_step = 5: leaves no layer with experts"]),
    ],
)
def test_contradictions(text: str, parts: list[str]) -> None:
    message = error_of(text)
    assert all(part in message for part in parts), message
    assert "a.yaml:" in message and "\n  Fix: " in message


DROP_RATE = "callbacks: [{type: MoEDropRateCallback, %s}]\n"


@pytest.mark.parametrize(
    ("keys", "callback", "parts"),
    [
        ("", "expert_num: 4", ["callbacks.0.expert_num = 4: disagrees with", "moe_config.expert_num = 8 (a.yaml:2)"]),
        ("", "num_layers: 3", ["num_layers = 3", "disagrees with model_config.num_layers = 4 (a.yaml:1)"]),
        ("", "mtp_depth: 1", ["mtp_depth = 1", "disagrees with model_config.mtp_depth = 0, its default"]),
        ("capacity_factor: 1.5", "capacity_factor: 1.25", ["capacity_factor = 1.25", "capacity_factor = 1.5 (a.yaml"]),
        ("", "capacity_factor: 1.1", ["capacity_factor = 1.1", "= null, no limit", "write capacity_factor: 1.1 in"]),
        ("enable_sdrop: True", "capacity_factor: 1.5", ["capacity_factor = 1.5", "= 1.1, its default"]),
    ],
)
def test_a_callback_that_describes_another_model(keys: str, callback: str, parts: list[str]) -> None:
    message = error_of(moe(keys, DROP_RATE % callback))
    assert all(part in message for part in parts), message


def test_a_bias_callback_that_describes_another_model() -> None:
    callback = "callbacks: [{type: TopkBiasBalanceCallback, topk_bias_update_rate: 0.1}]\n"
    keys = "balance_via_topk_bias: True, topk_bias_update_rate: 0.001"
    assert "topk_bias_update_rate = 0.1: disagrees with" in error_of(moe(keys, callback))
    assert "every step moves the bias by itself" in notes(moe(keys, callback.replace("0.1", "0.001")))


@pytest.mark.parametrize(
    "text",
    [
        moe("n_group: 1, topk_group: 1"),
        moe("n_group: 8, topk_group: 4, topk_method: group_limited_greedy"),
        moe("use_gmm: True, moe_token_drop_policy: False, capacity_factor: -1"),
        moe("use_gmm: True", DROP_RATE % "capacity_factor: 1.5"),
        moe("", DROP_RATE % "capacity_factor: -1"),
        moe("capacity_factor: -1", DROP_RATE % "capacity_factor: -1"),
        moe("use_gating_sigmoid: True, scoring_func: sigmoid"),
        moe("moe_layer_freq: [0, 1, 0, 1], first_k_dense_replace: 1"),
        moe("aux_loss_factor: 0.1, aux_loss_types: [expert], aux_loss_factors: [0.1]"),
        moe("aux_loss_factor: 0, moe_router_load_balancing_type: none"),
        moe("moe_router_load_balancing_type: seq_aux_loss"),
        moe("capacity_factor: 2", DROP_RATE % "expert_num: 8, capacity_factor: 2.0, num_layers: 4, mtp_depth: 0"),
        "model_config: {mtp_depth: 1}\n",
        # A dense model: nothing of it acts, so nothing of it is wrong.
        MODEL + "moe_config: {use_random_expert: True, use_gmm: True, enable_sdrop: True}\n",
    ],
)
def test_what_is_right_at_the_edge_loads(text: str) -> None:
    load(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (moe(""), ""),
        (moe("capacity_factor: 1.5"), ""),
        (
            moe("capacity_factor: 1.5", "do_eval: True\n"),
            "moe_config.capacity_factor 1.5 applies to training only: evaluation and prediction drop no tokens",
        ),
        (moe("use_gmm: true, capacity_factor: 1.5"), "capacity_factor 1.5: not used, use_gmm drops no tokens"),
        (moe("use_gmm: True, capacity_factor: -1"), ""),
        (moe("enable_sdrop: true, capacity_factor: -1"), "enable_sdrop true: not used, capacity_factor is -1"),
        (moe("drop_policy: position"), "moe_config.drop_policy: not used, capacity_factor is null, so"),
        (moe("topk_bias_update_rate: 0.1"), "topk_bias_update_rate 0.1: not used, balance_via_topk_bias is false"),
        (moe("balance_via_topk_bias: True"), "no effect, topk_bias_update_rate is 0"),
        (moe("router_dense_type: float32"), ""),
        (moe("router_dense_type: bfloat16"), "router_dense_type (a.yaml:2): the router always computes in float32"),
        (MODEL.replace("}", ", moe_router_dtype: float16, num_experts: 4}"), "the router always computes in float32"),
        (moe("comp_comm_parallel: True, ep_extend_tp: True"), "each rank has its experts"),
        (moe("routing_policy: TopkRouterV2"), "num_experts_chosen, n_group and capacity_factor say it"),
        (
            moe("capacity_factor: 1.5, callback_moe_droprate: True"),
            "added with the model's expert_num 8, capacity_factor 1.5, num_layers 4, mtp_depth 0",
        ),
        (
            moe("capacity_factor: 1.5", DROP_RATE % "num_layers: 4"),
            "callbacks.0 MoEDropRateCallback: callback_moe_droprate is not in moe_config; assumed true",
        ),
        (
            moe("capacity_factor: 1.5, callback_moe_droprate: False", DROP_RATE % "num_layers: 4"),
            "callback_moe_droprate (a.yaml:2) is false, but callbacks has MoEDropRateCallback: drop rates are logged",
        ),
        (moe("enable_gmm_safe_tokens: true"), "moe_config.enable_gmm_safe_tokens true: not used, use_gmm is false"),
        (moe("moe_permute_fusion: true"), "moe_config.moe_permute_fusion true: not used, use_gmm is false"),
        (moe("use_gmm: True, enable_gmm_safe_tokens: True, use_fused_ops_permute: True"), ""),
        (MODEL.replace("}", ", mtp_loss_factor: 0.5}"), "model_config.mtp_loss_factor 0.5: not used, mtp_depth is 0"),
        (MODEL.replace("}", ", mtp_loss_factor: 0.5, mtp_depth: 1}"), ""),
        (moe("first_k_dense_replace: 4").replace("seq_length", "mtp_depth: 1, seq_length"), "have no config.json"),
        (
            moe("").replace("seq_length", "pet_config: {target_modules: '.*wq|.*experts.*'}, seq_length"),
            "target_modules: routers and experts get no adapters: LoRA on them is not supported",
        ),
        (
            moe("use_gmm: True, callback_moe_droprate: True", DROP_RATE % "num_layers: 4"),
            "the drop rate will be 0 in every layer: use_gmm drops no tokens",
        ),
        (
            moe("callback_moe_droprate: True", DROP_RATE % "num_layers: 4"),
            "0 in every layer: capacity_factor sets no limit",
        ),
        (
            moe("").replace("seq_length", "pet_config: {target_modules: '.*wq|.*w1'}, seq_length"),
            "target_modules: gate_proj of MoE layers get no adapters",
        ),
    ],
)
def test_notes(text: str, told: str) -> None:
    assert told in notes(text) if told else notes(text) == ""


def test_a_flag_that_takes_the_experts_away_is_blamed() -> None:
    flag = "model.model_config.moe_config=null"
    message = error_of(moe("", "model: {arch: {type: MixtralForCausalLM}}\n"), flag)
    assert "flag --model.model_config.moe_config: model.model_config.moe_config = null: Mixtral" in message
    message = error_of(moe("", DROP_RATE % "expert_num: 8"), flag)
    assert "disagrees with model.model_config.moe_config = null (flag --model.model_config.moe_config): a" in message


def test_either_setting_turns_the_drop_rate_on() -> None:
    assert watches_drop_rate(load(moe("callback_moe_droprate: True")))
    assert watches_drop_rate(load(moe("", DROP_RATE % "num_layers: 4")))
    assert not watches_drop_rate(load(moe("")))
    assert not watches_drop_rate(load("moe_config: {callback_moe_droprate: True}\n"))


@pytest.mark.parametrize(
    ("keys", "tokens", "capacity"),
    [
        ("", 100, None),
        ("capacity_factor: -1", 100, None),
        ("use_gmm: True, capacity_factor: 1.0", 100, None),
        ("capacity_factor: 1.0", 100, 25),
        ("capacity_factor: 1.1", 10, 3),  # 2.75
        ("capacity_factor: 1.1", 40, 11),  # in binary a little more than 11
        ("enable_sdrop: True", 40, 11),
        ("capacity_factor: 99", 100, 100),
    ],
)
def test_capacity(keys: str, tokens: int, capacity: int | None) -> None:
    assert load(moe(keys)).decoder.experts.capacity(tokens) == capacity


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ("capacity_factor: 1", "probability"),
        ("capacity_factor: 1, drop_policy: probs", "probability"),
        ("capacity_factor: 1, drop_policy: position", "position"),
        ("enable_sdrop: True", "position"),
        ("enable_sdrop: True, moe_token_drop_policy: probability", "probability"),
    ],
)
def test_which_tokens_go(keys: str, policy: str) -> None:
    assert load(moe(keys)).decoder.experts.drop_policy == policy


def test_a_dumped_mixture_routes_alike() -> None:
    """The dump holds every key that acts: a default written out must not switch the capacity on."""
    sigmoid, capacity = "scoring_func: sigmoid", "capacity_factor: 2, drop_policy: position"
    for keys in ("", sigmoid, "use_gmm: True", "enable_sdrop: True", capacity):
        config = load(BASE + moe(keys).removeprefix(MODEL))
        again = parse_config("dumped.yaml", dump_config(config))
        assert again == config and again.decoder.experts.capacity(40) == config.decoder.experts.capacity(40)


def test_experts_are_frozen_together() -> None:
    config = load(moe("shared_expert_num: 1", "freeze: {include: '*.experts.*'}\n"))
    frozen = frozen_names(config)
    assert {name.split(".", 3)[3] for name in frozen} == {
        f"mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    assert "model.layers.0.mlp.shared_experts.up_proj.weight" in trained_shapes(config)
    for pattern, meant in (
        ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.up_proj.weight"),
        ("*.experts.3.*", "*.experts.*"),
        ("*.experts.3", "*.experts.*"),
    ):
        with pytest.raises(UserError) as caught:
            frozen_names(load(moe("", f"freeze: {{include: '{pattern}'}}\n")))
        assert f"stacked weight, all trained or all frozen: write '{meant}'" in str(caught.value)


def test_the_bias_of_the_choice_is_no_trained_weight() -> None:
    config = load(moe("balance_via_topk_bias: True, topk_bias_update_rate: 0.001"))
    assert not [name for name in trained_shapes(config) if "bias" in name]
