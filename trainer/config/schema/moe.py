"""Mixture of experts: YAML ``moe_config``."""

import math
from typing import Literal

from trainer.config.schema.fields import LAYERS, RANKS, WIDTH, Layer, Section, setting


class MoEConfig(Section):
    """Mixture of experts (YAML ``moe_config``, at the top level or inside ``model_config``)."""

    expert_num: int = setting(
        1, "Experts a layer; 1 is a dense model.", ge=1, le=RANKS,
        aliases="n_routed_experts num_experts num_local_experts num_moe_experts moe_num_experts")
    num_experts_chosen: int = setting(
        1, "Experts each token goes to.", ge=1, le=RANKS, aliases="num_experts_per_tok moe_router_topk moe_k")
    capacity_factor: float | None = setting(
        None, "Expert capacity relative to an even load: 1.0 is tokens x num_experts_chosen / expert_num of a"
        " micro-batch. Excess tokens are dropped in training. -1: no limit. Default null: no limit; with enable_sdrop"
        " 1.1.", aliases="moe_expert_capacity_factor")
    enable_sdrop: bool = setting(
        False, "Drop tokens over capacity, by default in order of position. Default false: capacity_factor decides.")
    aux_loss_factor: float | None = setting(
        None, "Weight of the sum of the layers' auxiliary losses. Default null: that of router_aux_loss_coef, or 0.05.",
        ge=0, aliases="moe_aux_loss_coeff aux_loss_alpha")
    router_aux_loss_coef: float | None = setting(
        None, "Hugging Face's weight of the auxiliary loss: aux_loss_factor is this x num_experts_chosen / MoE layers."
        " Default null: aux_loss_factor.", ge=0)
    aux_loss_factors: list[float] | None = setting(
        None, "Weights of several auxiliary losses; only that of expert is supported.")
    aux_loss_types: list[Literal["expert", "device", "comm"]] | None = setting(
        None, "Kinds of auxiliary losses; only expert is supported.")
    z_loss_factor: float = setting(0.0, "Weight of the router's z-loss.", ge=0, aliases="moe_z_loss_coeff")
    norm_topk_prob: bool = setting(True, "Make the chosen experts' weights sum to 1.")
    moe_norm_min: float = setting(
        0.0, "Least divisor of norm_topk_prob: where the scores of the chosen experts sum to less, their weights sum to"
        " less than 1 (ERNIE 4.5).", ge=0, lt=1)
    use_gating_sigmoid: bool = setting(False, "Sigmoid router instead of softmax.")
    scoring_func: Literal["softmax", "sigmoid"] | None = setting(
        None, "Router function by its Hugging Face name. Default null: use_gating_sigmoid decides.",
        aliases="moe_router_score_function")
    routed_scaling_factor: float = setting(
        1.0, "Factor on the routed experts' sum.", gt=0, aliases="moe_router_topk_scaling_factor")
    shared_expert_num: int = setting(
        0, "Number of shared experts.", ge=0, le=RANKS, aliases="n_shared_experts moe_num_shared_experts")
    moe_intermediate_size: int | None = setting(
        None, "Width of an expert. Default null: intermediate_size.", ge=1, le=WIDTH, aliases="moe_ffn_hidden_size")
    moe_shared_expert_intermediate_size: int | None = setting(
        None, "Total width of the shared experts. Default null: shared_expert_num times that of an expert.",
        ge=1, le=WIDTH, aliases="shared_expert_intermediate_size shared_intermediate_size")
    use_shared_expert_gating: bool = setting(
        False, "Multiply the shared experts' output by the sigmoid of a projection of the token (Qwen2-MoE).",
        aliases="moe_shared_expert_gate")
    moe_mlp_has_bias: bool = setting(
        False, "Biases on the three matrices of each expert (gpt-oss).", explicit_only=(True,))
    moe_router_has_bias: bool = setting(False, "A bias on the router's logits (gpt-oss).", explicit_only=(True,))
    swiglu_limit: float | None = setting(
        None, "Experts compute (up + 1) * gate * sigmoid(swiglu_alpha * gate), with gate up to this limit and up within"
        " it on both sides (gpt-oss). Default null: silu(gate) * up.", gt=0)
    swiglu_alpha: float = setting(1.702, "swiglu_limit: the slope of the sigmoid.", gt=0)
    first_k_dense_replace: int | None = setting(
        None, "Leading layers that stay dense. Default null: none.", ge=0, le=LAYERS, aliases="moe_layer_start_index")
    moe_layer_end_index: int = setting(
        -1, "ERNIE 4.5: the last layer that may have experts, counted from 0. Default -1: the last of all.",
        ge=-1, le=LAYERS)
    moe_layer_freq: Layer | list[Layer] = setting(
        1, "Frequency of MoE layers: N makes every Nth layer one; a list has 1 (MoE) or 0 (dense) for each layer.")
    decoder_sparse_step: int = setting(
        1, "Qwen3-MoE: of every N layers the last one has experts. Default 1: moe_layer_freq decides.", ge=1, le=LAYERS,
        aliases="moe_layer_interval")
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = setting(
        None, "GLM-4.7-Flash: for each layer sparse if it has experts, else dense. Default null: other keys decide.")
    mlp_only_layers: list[Layer] | None = setting(
        None, "Qwen3-MoE: layers that stay dense, counted from 0. Default null: moe_layer_freq decides.")
    n_group: int | None = setting(
        None, "Groups of experts the router chooses among; 0 or null: none.",
        ge=0, le=RANKS, aliases="moe_router_num_groups")
    topk_group: int | None = setting(
        None, "Groups a token may go to; 0 or null: any.", ge=0, le=RANKS, aliases="moe_router_group_topk")
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] | None = setting(
        None, "The router's choice by its Hugging Face name: greedy has no groups, noaux_tc has an expert bias."
        " Default null: the other keys decide.")
    balance_via_topk_bias: bool = setting(
        False, "Balance the load by an expert bias: after a step it falls for experts with more than an even share of"
        " the tokens, and rises for the others.", aliases="moe_router_enable_expert_bias")
    topk_bias_update_rate: float = setting(
        0.0, "Change of the expert bias in a step.", ge=0, aliases="moe_router_bias_update_rate")
    use_gmm: bool | None = setting(
        None, "One grouped matrix product for all experts of a device; drops nothing. Default null: on an Ascend true"
        " where no capacity is set, elsewhere false.", aliases="moe_grouped_gemm")
    enable_gmm_safe_tokens: bool = setting(
        False, "Give every expert at least one token, so that no group of a grouped product is empty.")
    use_fused_ops_permute: bool = setting(
        False, "Fused sorting of tokens by expert where the device has it.", aliases="moe_permute_fusion")
    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "sub_seq_aux_loss", "gbs_aux_loss", "global_aux_loss", "sinkhorn", "none"
    ] = setting(
        "aux_loss", "The auxiliary loss: aux_loss and seq_aux_loss are that of each sequence (DeepSeek-V3, section"
        " 2.1.2), independent of accumulation and ranks; sub_seq_aux_loss is that of the tokens of a micro-batch on one"
        " rank, supported where they are one sequence; gbs_aux_loss (Megatron-LM: global_aux_loss) is that of the"
        " global batch.")
    moe_token_drop_policy: Literal["position", "probability", "probs", False] | None = setting(
        None, "Tokens to drop beyond the capacity: the last of a micro-batch (position), or those with the lowest score"
        " (probability, or probs). Default null: probability; with enable_sdrop position.", aliases="drop_policy")
    output_router_logits: bool | None = setting(
        None, "In Hugging Face, false switches the auxiliary loss off; here only aux_loss_factor does.")
    moe_token_dispatcher_type: Literal[
        "alltoall", "alltoall_deredundency", "alltoall_zero_redundancy", "allgather"
    ] = setting(
        "alltoall", "Token dispatcher of expert_parallel: alltoall sends each token to the ranks of its experts; here"
        " the other two names with alltoall do the same. With allgather every rank gets all tokens and sums the outputs"
        " of its experts. The results are the same. Default alltoall.")
    callback_moe_droprate: bool = setting(
        False, "Report the dropped tokens of every layer (with callback MoEDropRateCallback).")

    @property
    def balances_step(self) -> bool:
        """Returns whether the auxiliary loss is that of the global batch, not of each sequence."""
        return self.moe_router_load_balancing_type in ("gbs_aux_loss", "global_aux_loss")

    @property
    def score_function(self) -> str:
        """Returns the function that turns the router's logits into scores: softmax or sigmoid."""
        if self.scoring_func is not None:
            return self.scoring_func
        if self.use_gating_sigmoid:
            return "sigmoid"
        return "softmax"

    @property
    def has_expert_bias(self) -> bool:
        """Returns whether the router chooses experts by score plus an expert bias."""
        return self.balance_via_topk_bias or self.topk_method == "noaux_tc"

    @property
    def group_score(self) -> Literal["best", "two_best"]:
        """Returns how a group of experts is scored: "two_best" by the sum of its two best experts, or "best"."""
        if self.has_expert_bias or self.score_function == "sigmoid":
            return "two_best"
        return "best"

    @property
    def effective_capacity(self) -> float | None:
        """Returns the capacity factor that applies in training; None if no token is dropped."""
        if self.use_gmm or self.capacity_factor == -1:
            return None
        if self.capacity_factor is None and self.enable_sdrop:
            return 1.1
        return self.capacity_factor

    @property
    def drop_policy(self) -> str:
        """Returns which tokens beyond the capacity are dropped: "probability", the lowest scores, or "position"."""
        if self.moe_token_drop_policy == "position":
            return "position"
        if not self.moe_token_drop_policy and self.enable_sdrop:
            return "position"
        return "probability"

    def capacity(self, tokens: int) -> int | None:
        """Returns how many of `tokens` tokens an expert takes in training; None for no limit.

        GShard (Lepikhin et al. 2020, section 2.2): an equal share of all assignments, times the factor, rounded up.
        """
        if self.effective_capacity is None:
            return None
        from fractions import Fraction  # here: start-up does not need it

        # Exact: in binary, 1.1 x 10 is a little more than 11.
        share = Fraction(str(self.effective_capacity)) * self.num_experts_chosen * tokens / self.expert_num
        return min(tokens, math.ceil(share))
