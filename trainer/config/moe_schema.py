"""Mixture of experts: YAML ``moe_config``."""

# No `from __future__ import annotations`: pydantic would have to compile every annotation's text at start-up.
import math
from typing import Literal

from trainer.config.fields import Section, setting

MOE_LATER = "mixture of experts is not built; train a dense model: expert_num 1, mtp_depth 0"


class MoEConfig(Section):
    """Mixture of experts (YAML ``moe_config``, at the top level or inside ``model_config``)."""

    support = "not_yet"
    support_reason = MOE_LATER

    expert_num: int = setting(
        1,
        "Experts a layer; 1 is a dense model. Default 1.",
        ge=1,
        aliases=("n_routed_experts", "num_experts", "num_moe_experts"),
    )
    num_experts_chosen: int = setting(
        1, "Experts each token goes to. Default 1.", ge=1, aliases=("num_experts_per_tok", "moe_router_topk")
    )
    capacity_factor: float | None = setting(
        None,
        "Room of an expert, as a multiple of its fair share; -1: no bound. Default null: no bound, with enable_sdrop 1.1.",
        aliases=("moe_expert_capacity_factor",),
    )
    enable_sdrop: bool = setting(False, "Drop tokens over capacity in order of position. Default False.")
    aux_loss_factor: float = setting(
        0.05, "Weight of the balance loss. Default 0.05.", ge=0, aliases=("moe_aux_loss_coeff", "router_aux_loss_coef")
    )
    aux_loss_factors: list[float] | None = setting(None, "Weights of several balance losses. Default null.")
    aux_loss_types: list[Literal["expert", "device", "comm"]] | None = setting(
        None, "Kinds of balance losses. Default null."
    )
    z_loss_factor: float = setting(
        0.0, "Weight of the router's z loss. Default 0.", ge=0, aliases=("moe_z_loss_coeff",)
    )
    norm_topk_prob: bool = setting(True, "Make the chosen experts' weights sum to 1. Default True.")
    use_gating_sigmoid: bool = setting(False, "Sigmoid router instead of softmax. Default False.")
    scoring_func: Literal["softmax", "sigmoid"] | None = setting(
        None,
        "Router function by its Hugging Face name. Default null: use_gating_sigmoid decides.",
        aliases=("moe_router_score_function",),
    )
    router_dense_type: Literal["float32", "float16", "bfloat16"] = setting(
        "float32", "Dtype of the router. Default float32.", aliases=("moe_router_dtype",)
    )
    routed_scaling_factor: float = setting(
        1.0, "Factor on the routed experts' sum. Default 1.", gt=0, aliases=("moe_router_topk_scaling_factor",)
    )
    shared_expert_num: int = setting(0, "Experts every token goes to. Default 0.", ge=0, aliases=("n_shared_experts",))
    use_shared_expert_gating: bool = setting(False, "Gate the shared expert's output. Default False.")
    moe_intermediate_size: int | None = setting(
        None, "Width of an expert. Default null: intermediate_size.", ge=1, aliases=("moe_ffn_hidden_size",)
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None, "Width of the shared expert. Default null.", ge=1, aliases=("shared_expert_intermediate_size",)
    )
    first_k_dense_replace: int | None = setting(None, "Leading layers that stay dense. Default null: none.", ge=0)
    moe_layer_freq: int | list[int] = setting(1, "Every how many layers experts stand. Default 1.")
    n_group: int | None = setting(
        None,
        "Groups of experts the router chooses among; 0 or null: none. Default null.",
        ge=0,
        aliases=("moe_router_num_groups",),
    )
    topk_group: int | None = setting(
        None, "Groups a token may go to; 0 or null: any. Default null.", ge=0, aliases=("moe_router_group_topk",)
    )
    topk_method: str | None = setting(None, "The router's choice by its Hugging Face name. Default null.")
    balance_via_topk_bias: bool = setting(
        False, "Balance by a bias on the router's choice. Default False.", aliases=("moe_router_enable_expert_bias",)
    )
    topk_bias_update_rate: float = setting(
        0.0, "Step of that bias. Default 0.", ge=0, aliases=("moe_router_bias_update_rate",)
    )
    group_wise_a2a: bool = setting(False, "All-to-all in groups. Default False.")
    comp_comm_parallel: bool = setting(False, "Overlap expert computation and communication. Default False.")
    comp_comm_parallel_degree: int = setting(2, "Parts of that overlap. Default 2.", ge=1)
    save_token_distribution: bool = setting(False, "Write the tokens of each expert. Default False.")
    cur_layer: int = setting(0, "First layer of that record. Default 0.", ge=0)
    enable_cold_hot_expert: bool = setting(False, "Copy the experts with most tokens. Default False.")
    update_step: int = setting(10000, "Steps between such copies. Default 10000.", ge=1)
    hot_expert_num: int = setting(0, "Experts to copy. Default 0.", ge=0)
    cold_token_percent: float = setting(1.0, "Share of tokens for experts without copies. Default 1.", ge=0, le=1)
    moe_module_name: str = setting("", "Where those experts stand in the model. Default empty.")
    use_gmm: bool = setting(
        False, "One grouped matrix product for all experts of a device. Default False.", aliases=("moe_grouped_gemm",)
    )
    enable_gmm_safe_tokens: bool = setting(
        False,
        "Give every expert at least one token, so that a grouped product never meets an empty group. Default False.",
    )
    use_fused_ops_permute: bool = setting(
        False, "Fused sorting of tokens by expert. Default False.", aliases=("moe_permute_fusion",)
    )
    use_fused_ops_topkrouter: bool = setting(False, "Fused router. Default False.")
    enable_deredundency: bool = setting(False, "Send a token only once to a device group. Default False.")
    npu_nums_per_device: int = setting(1, "Devices of such a group. Default 1.", ge=1)
    dispatch_global_max_bs: int = setting(0, "Largest batch of a fused dispatch. Default 0.", ge=0)
    expert_group_size: int | None = setting(None, "Experts of a group. Default null.", ge=1)
    use_random_expert: bool = setting(
        False, "Random routing, for speed tests. Default False.", aliases=("moe_router_force_expert_balance",)
    )
    use_allgather_in_group: bool = setting(False, "All-gather in a group instead of all-to-all. Default False.")
    moe_token_dispatcher_type: Literal["alltoall", "alltoall_deredundency", "alltoall_zero_redundancy", "allgather"] = (
        setting("alltoall", "How tokens reach their experts. Default alltoall.")
    )
    moe_router_load_balancing_type: str = setting("aux_loss", "How the load is balanced. Default aux_loss.")
    moe_router_pre_softmax: bool = setting(False, "Softmax before choosing. Default False.")
    moe_router_fusion: bool = setting(False, "Fused router. Default False.")
    routing_policy: str | None = setting(None, "The router by MindSpore Transformers' name. Default null.")
    ep_extend_tp: bool = setting(False, "Experts across tensor groups. Default False.")
    max_router_load: int | None = setting(None, "Largest load of an expert. Default null.")
    moe_token_drop_policy: Literal["probs", "position", False] | None = setting(
        "probs", "Which tokens over capacity go. Default probs."
    )
    moe_pad_expert_input_to_capacity: bool = setting(False, "Pad experts' inputs to capacity. Default False.")
    callback_moe_droprate: bool = setting(
        False, "Report the dropped tokens of every layer (with callback MoEDropRateCallback). Default False."
    )

    @property
    def score_function(self) -> str:
        """What turns the router's logits into scores: softmax or sigmoid."""
        return self.scoring_func or ("sigmoid" if self.use_gating_sigmoid else "softmax")

    @property
    def has_choice_bias(self) -> bool:
        """Whether a bias on the scores takes part in the choice of experts, and only there."""
        return self.balance_via_topk_bias or self.topk_method == "noaux_tc"

    @property
    def group_score(self) -> str:
        """How a group of experts is scored: by its two best experts together, or by its best."""
        return "two_best" if self.has_choice_bias or self.score_function == "sigmoid" else "best"

    @property
    def room(self) -> float | None:
        """The capacity factor in force; None when training drops nothing."""
        factor = 1.1 if self.capacity_factor is None and self.enable_sdrop else self.capacity_factor
        return None if self.use_gmm or factor == -1 else factor

    @property
    def drop_policy(self) -> str:
        """Which tokens over capacity go: those of the lowest probability, or the last by position."""
        by_position = self.enable_sdrop or self.moe_token_drop_policy == "position"
        return "position" if by_position else "probability"

    def capacity(self, tokens: int) -> int | None:
        """Most tokens of an expert among so many; None for no bound.

        GShard (Lepikhin et al. 2020, section 2.2): an equal share of all assignments, times the factor, rounded up.
        """
        if self.room is None:
            return None
        from fractions import Fraction  # here: start-up does not need it

        # Exact: in binary, 1.1 x 10 is a little more than 11.
        return min(tokens, math.ceil(Fraction(str(self.room)) * self.num_experts_chosen * tokens / self.expert_num))
