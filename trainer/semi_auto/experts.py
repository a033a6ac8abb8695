"""Expert parallelism in a graph that MindSpore shards: ranks exchange tokens in all-to-alls.

A `Morph` contains what MindSpore cannot shard. It is a function of this rank's shards, and the cell sets the layouts of
its inputs and outputs. MindSpore replaces it by the function's operators before it differentiates the graph.

    router: norm, product, scores    operators with strategies, tokens over the data-parallel ranks (with sequence
                                     parallelism over all ranks of a stage)
    choice of the experts            Morph without gradient, all tokens of a data-parallel rank
    gates, losses of the router      operators with strategies
    dispatch, experts, combine       Morph, tokens over all ranks of a stage, experts over groups of neighbours

The routing and the grouped product inside are those of explicit mode on an Ascend (trainer/ops/ascend/moe.py).

Legend: N tokens, B sequences, T tokens of a sequence, D hidden, E experts, k experts chosen by a token, S ranks of an
expert-parallel group, e = E / S experts of a rank, F width of an expert. A rows of a rank: its N k assignments, and one
row of zeros for each expert. R rows that a rank's experts compute.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from mindspore import Layout, Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import InplaceCopy, MeanExt, SumExt

from trainer.config.checks.parallel import parallel_degrees
from trainer.models.moe import Gates, Router, SharedExperts
from trainer.models.spec.names import EXPERT_BIAS, layer_prefix
from trainer.models.spec.shapes import balanced_layers, moe_shapes
from trainer.ops.ascend.moe import Permute, Unpermute, stable_order
from trainer.ops.measures import metric_functions
from trainer.ops.plain import Sharded, shard_operators
from trainer.ops.routing import RoutingCounts, RoutingRule
from trainer.optim.freeze import frozen_names
from trainer.parallel.collectives import all_to_all, all_to_all_rows, has_all_operators
from trainer.parallel.mesh import Mesh

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.mesh import Degrees
    from trainer.parallel.world import World
    from trainer.semi_auto.shards import ShardedParameters

STATISTICS = ("requested", "kept", "entropy")
"""The counts of a MoE layer, [1, E] each: assignments, assignments that are not dropped, and the sum over tokens of
-p log p of each expert's normalised score."""


class ExpertRanks(NamedTuple):
    """How the ranks of a pipeline stage share tokens and experts."""

    data: int
    tensor: int
    expert: int
    """The size of an expert-parallel group: neighbouring ranks that together have all experts."""
    group: str
    """The name of this rank's group."""
    tokens: int
    """The number of tokens of a micro-batch of a data-parallel rank."""
    is_dry: bool = False
    """Whether this is a dry run: counts are not computed, and every rank sends equally many rows to all ranks."""


def expert_group(degrees: Degrees, rank: int) -> tuple[str, range]:
    """Returns the name and the ranks of a rank's expert-parallel group."""
    ranks = Mesh(degrees).group_of("ep", rank)
    return f"{len(ranks)}-experts-{ranks[0]}", ranks


def make_statistics(prefix: str, experts: int) -> list[Parameter]:
    """Makes the parameters with a layer's `STATISTICS`, which a step sums over its micro-batches and all ranks."""
    zeros = initializer("zeros", (1, experts), mstype.float32)
    names = [f"{prefix}mlp.gate.{name}" for name in STATISTICS]
    return [Parameter(zeros, name, requires_grad=False, parallel_optimizer=False) for name in names]


class ExpertChoice(nn.Cell):
    """(scores_NE, bias_E) -> experts_Nk, kept_Nk (0 for a dropped assignment, else 1), requested_BE, kept_BE."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, ranks: ExpertRanks, capacity: int | None) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        assert moe is not None
        # This mode sends a row of zeros to every expert.
        self.route = kernels.route(replace(RoutingRule.from_config(moe), safe_tokens=False))
        self.capacity = capacity
        self.policy = moe.drop_policy
        self.length = settings.seq_length
        self.experts = moe.expert_num
        self.chosen = moe.num_experts_chosen
        self.numbers_11E = Tensor(np.arange(self.experts, dtype=np.int32)[None, None])
        self.morph = P.Morph(self.choose, self.infer_shape, self.infer_dtype).add_prim_attr("self_define_shard", True)
        layout = Layout((ranks.data, ranks.tensor), ("data", "tensor"))
        rows = layout("data", "None")
        self.morph.shard(in_strategy=(rows, layout("None")), out_strategy=(rows,) * 4)
        self.morph.recompute(False)

    def construct(self, scores_NE: Tensor, bias_E: Tensor | None) -> Tensor:
        return self.morph(scores_NE, bias_E)

    def infer_shape(self, scores: list[int], bias: list[int]) -> tuple[list[int], ...]:
        """Returns the shapes of the results."""
        assignments = [scores[0], self.chosen]
        counts = [scores[0] // self.length, self.experts]
        return assignments, assignments, counts, counts

    def infer_dtype(self, scores: mstype.Type, bias: mstype.Type) -> tuple[mstype.Type, ...]:
        """Returns the dtypes of the results."""
        return mstype.int32, scores, scores, scores

    def choose(self, scores_NE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, ...]:
        """Computes the results for the tokens of this data-parallel rank."""
        routing = self.route(scores_NE, bias_E, self.capacity, self.policy)
        experts_Nk = routing[0]
        if self.capacity is None:
            kept_Nk = ops.ones(experts_Nk.shape, mstype.float32)
            counts_BE = self.count(experts_Nk)
            return experts_Nk, kept_Nk, counts_BE, counts_BE
        is_kept_Nk = routing[1] < routing[3].sum()  # rows of dropped assignments are last
        group_Nk = ops.select(is_kept_Nk, experts_Nk, ops.full_like(experts_Nk, self.experts))
        return experts_Nk, is_kept_Nk.astype(mstype.float32), self.count(experts_Nk), self.count(group_Nk)

    def count(self, group_Nk: Tensor) -> Tensor:
        """Counts the assignments of each sequence to each expert, [B, E]."""
        group_BA1 = group_Nk.reshape(-1, self.length * self.chosen, 1)
        return (group_BA1 == self.numbers_11E).astype(mstype.float32).sum(1)


class RoutedExperts(nn.Cell):
    """(y_ND, gates_Nk, experts_Nk, gate_EFD, up_EFD, down_EDF) -> the weighted sum of the experts' results, [N, D].

    With several ranks in a group, each rank sends its tokens to the ranks of their experts, and gets the results back.
    It also sends one row of zeros to every expert, so every rank and every expert has rows.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, ranks: ExpertRanks) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        assert moe is not None
        self.experts = moe.expert_num
        self.chosen = moe.num_experts_chosen
        self.ranks = ranks.expert
        self.group = ranks.group
        self.local_experts = moe.expert_num // ranks.expert
        self.is_dry = ranks.is_dry
        self.numbers_E = Tensor(np.arange(self.experts, dtype=np.int32))
        self.permute = Permute(has_safe_tokens=True)
        self.unpermute = Unpermute(has_safe_tokens=True)
        self.reorder = _Reorder()
        self.reorder_back = _Reorder()
        self.gate, self.up, self.down = (kernels.grouped_matmul(True, True) for _ in range(3))  # a row of zeros each
        self.swiglu = kernels.gated("silu")
        self.to_host = P.MoveTo()
        self.morph = P.Morph(self.compute, self.infer, self.infer).add_prim_attr("self_define_shard", True)
        layout = Layout((ranks.data * ranks.tensor // ranks.expert, ranks.expert), ("groups", "expert"))
        rows = layout(("groups", "expert"), "None")
        stack = layout("expert", "None", "None")
        self.morph.shard(in_strategy=(*(rows,) * 3, *(stack,) * 3), out_strategy=(rows,))

    def construct(
        self, y_ND: Tensor, gates_Nk: Tensor, experts_Nk: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        return self.morph(y_ND, gates_Nk, experts_Nk, gate_EFD, up_EFD, down_EDF)

    def infer(self, y: Any, gates: Any, experts: Any, gate: Any, up: Any, down: Any) -> Any:
        """Returns shape or dtype of the result: that of y_ND."""
        return y

    def compute(
        self, y_ND: Tensor, gates_Nk: Tensor, experts_Nk: Tensor, gate_eFD: Tensor, up_eFD: Tensor, down_eDF: Tensor
    ) -> Tensor:
        """Computes the result for this rank's tokens, from this rank's shards of the weights."""
        expert_A = ops.concat((experts_Nk.reshape(-1), self.numbers_E))
        order_A = stable_order(expert_A)
        row_Nk = mint.narrow(stable_order(order_A), 0, 0, experts_Nk.shape[0] * self.chosen).reshape(experts_Nk.shape)
        # The rows of zeros are assignments after those of the last token.
        token_A = ops.minimum(ops.floor_divide(order_A, self.chosen), y_ND.shape[0])
        counts_E = (expert_A.expand_dims(1) == self.numbers_E.expand_dims(0)).astype(mstype.float32).sum(0)
        rows_AD = self.permute(y_ND, token_A, row_Nk)
        if self.ranks == 1:
            out_AD = self.products(rows_AD, counts_E.astype(mstype.int64), gate_eFD, up_eFD, down_eDF)
        else:
            sorted_A = ops.gather_elements(expert_A, 0, order_A)
            out_AD = self.compute_remotely(rows_AD, sorted_A, counts_E, (gate_eFD, up_eFD, down_eDF))
        return self.unpermute(out_AD, gates_Nk, token_A, row_Nk)

    def compute_remotely(
        self, rows_AD: Tensor, expert_A: Tensor, counts_E: Tensor, weights: tuple[Tensor, ...]
    ) -> Tensor:
        """Sends rows to the ranks of their experts, and returns the results in the order of the rows."""
        counts_Se = counts_E.reshape(self.ranks, self.local_experts)
        received_counts_Se = all_to_all(counts_Se, self.group, self.ranks)
        send = self.rows_of_ranks(counts_Se, rows_AD)
        receive = self.rows_of_ranks(received_counts_Se, rows_AD)
        rows_RD = all_to_all_rows(rows_AD, send, receive, self.group)
        local_A1 = mint.remainder(expert_A, self.local_experts).astype(mstype.float32).reshape(-1, 1)
        order_R = stable_order(all_to_all_rows(local_A1, send, receive, self.group).reshape(-1))
        inverse_R = stable_order(order_R)
        counts_e = received_counts_Se.sum(0).astype(mstype.int64)
        out_RD = self.products(self.reorder(rows_RD, order_R, inverse_R), counts_e, *weights)
        out_RD = self.reorder_back(out_RD, inverse_R, order_R)
        return all_to_all_rows(out_RD, receive, send, self.group).reshape(rows_AD.shape)

    def rows_of_ranks(self, counts_Se: Tensor, rows_AD: Tensor) -> Tensor | tuple[int, ...]:
        """Returns the number of rows for each rank of the group. They are sizes of arrays, so the host needs them."""
        if self.is_dry:
            even = ()
            for rank in range(self.ranks):
                even += ((rows_AD.shape[0] + rank) // self.ranks,)
            return even
        return self.to_host(counts_Se.sum(1).astype(mstype.int64), "CPU", True)

    def products(self, rows_RD: Tensor, counts_e: Tensor, gate_eFD: Tensor, up_eFD: Tensor, down_eDF: Tensor) -> Tensor:
        """Computes this rank's experts for rows that are sorted by expert."""
        inner_RF = self.swiglu(self.gate(rows_RD, gate_eFD, counts_e), self.up(rows_RD, up_eFD, counts_e))
        return self.down(inner_RF, down_eDF, counts_e)


class _Reorder(nn.Cell):
    """(rows_RD, order_R, inverse_R) -> the rows in another order; `inverse_R` restores the old order."""

    def construct(self, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        return mint.index_select(rows_RD, 0, order_R)

    def bprop(
        self, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor, out: Tensor, grad_RD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return mint.index_select(grad_RD, 0, inverse_R), ops.zeros_like(order_R), ops.zeros_like(inverse_R)


def group_tokens(settings: ModelConfig, ranks: ExpertRanks) -> int:
    """Returns the number of tokens whose mean scores make one auxiliary loss.

    These are the tokens of a sequence, or with gbs_aux_loss all tokens of a data-parallel rank.
    """
    assert settings.experts is not None
    if settings.experts.balances_step:
        return ranks.tokens
    return settings.seq_length


class GroupWeights(Sharded):
    """weight_N1 of each token -> weight_G1 of each group. One cell computes it for all layers."""

    axes: ClassVar = {"sum": "d.."}

    def __init__(self, tokens: int) -> None:
        super().__init__(auto_prefix=False)
        self.tokens = tokens
        self.reshape = P.Reshape()
        self.sum = SumExt()

    def construct(self, weight_N1: Tensor) -> Tensor:
        return self.sum(self.reshape(weight_N1, (-1, self.tokens, 1)), (1,))


class GraphRouterLosses(nn.Cell):
    """(logits_NE, scores_NE, load_GE, weight_N1, weight_G1, loss_11) -> loss_11 plus the losses of this router.

    The formulas are those of `trainer.models.moe`; each loss is multiplied by its factor. The sum is [1, 1] because a
    pipeline stage cannot pass on a number without an axis.

    Inputs:
        load_GE: For each of the G groups of `GroupWeights` the share of assignments to each expert. It is [1, E] if all
            tokens of a step share one load.
        weight_N1: 1 for a loss token, else 0.
    """

    axes: ClassVar = {
        "total uneven sum largest exp rest log square sum_z": "d.", "mean": "d..", "at_least scale": "d.,",
        "divide centre back pick pick_z": "d.,d.", "times_factor times_z_factor": "..,", "add_aux add_z": "..,..",
    }  # fmt: skip

    def __init__(self, settings: ModelConfig, ranks: ExpertRanks) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        assert moe is not None
        self.experts = moe.expert_num
        self.aux_factor = settings.balance_factor
        self.z_factor = moe.z_loss_factor
        self.normalises = moe.score_function == "sigmoid"
        self.tokens = group_tokens(settings, ranks)
        self.total = SumExt()
        self.at_least = P.Add()
        self.divide = P.Div()
        self.reshape = P.Reshape()
        self.mean = MeanExt()
        self.weigh = P.Mul()
        self.scale = P.Mul()
        self.uneven = SumExt()
        self.pick = P.Mul()
        self.sum = SumExt()
        self.largest = P.ReduceMax(keep_dims=True)
        self.centre = P.Sub()
        self.exp = P.Exp()
        self.log = P.Log()
        self.rest = SumExt()
        self.back = P.Add()
        self.square = P.Square()
        self.pick_z = P.Mul()
        self.sum_z = SumExt()
        self.times_factor = P.Mul()
        self.add_aux = P.Add()
        self.times_z_factor = P.Mul()
        self.add_z = P.Add()

    def construct(
        self,
        logits_NE: Tensor,
        scores_NE: Tensor,
        load_GE: Tensor,
        weight_N1: Tensor,
        weight_G1: Tensor,
        loss_11: Tensor,
    ) -> Tensor:
        if self.aux_factor:
            aux_loss_11 = self.aux_loss(scores_NE, load_GE, weight_G1)
            loss_11 = self.add_aux(loss_11, self.times_factor(aux_loss_11, self.aux_factor))
        if self.z_factor:
            loss_11 = self.add_z(loss_11, self.times_z_factor(self.z_loss(logits_NE, weight_N1), self.z_factor))
        return loss_11

    def aux_loss(self, scores_NE: Tensor, load_GE: Tensor, weight_G1: Tensor) -> Tensor:
        """Computes the auxiliary loss, [1, 1]."""
        p_NE = self.normalised(scores_NE) if self.normalises else scores_NE
        mean_GE = self.mean(self.reshape(p_NE, (-1, self.tokens, self.experts)), (1,))
        uneven_G1 = self.uneven(self.scale(self.weigh(mean_GE, ops.stop_gradient(load_GE)), self.experts), (1,), True)
        return self.sum(self.pick(uneven_G1, weight_G1), (0,), True)

    def z_loss(self, logits_NE: Tensor, weight_N1: Tensor) -> Tensor:
        """Computes the z-loss, [1, 1]."""
        largest_N1 = ops.stop_gradient(self.largest(logits_NE, 1))
        rest_N1 = self.rest(self.exp(self.centre(logits_NE, largest_N1)), (1,), True)
        total_N1 = self.back(self.log(rest_N1), largest_N1)
        return self.sum_z(self.pick_z(self.square(total_N1), weight_N1), (0,), True)

    def normalised(self, scores_NE: Tensor) -> Tensor:
        """Divides each token's scores by their sum."""
        return self.divide(scores_NE, self.at_least(self.total(scores_NE, (1,), True), 1e-20))

    def shard_over(self, data: int, *, load_is_shared: bool) -> None:
        """Shards tokens over `data` ranks; `load_is_shared` tells that load_GE is [1, E]."""
        axes = self.axes | {"weigh": "d.,.." if load_is_shared else "d.,d."}
        shard_operators(self, axes, d=data)


class ExpertLayer(nn.Cell):
    """(x_ND, weight_N1, weight_G1, loss_11, seeds_B1 or None) -> the residual stream and loss_11 plus router losses.

    The cell replaces a feed-forward sublayer. In evaluation it returns only the residual stream.

    Args:
        kernels: Kernels that MindSpore shards.
        local: Kernels of explicit mode, for what a rank computes from its shards.
        weights: The layer's weights in the order of `moe_shapes`.
        statistics: The result of `make_statistics`.
    """

    axes: ClassVar = {
        "keep add_shared add": "n.,n.", "totals log minus": "d.", "share least": "d.,", "scale_output": "n.,",
        "entropy": "d.,d.", "all_shares": "..", "divide sums assigns": "..,..",
    }  # fmt: skip

    def __init__(
        self,
        settings: ModelConfig,
        kernels: KernelSet,
        local: KernelSet,
        weights: Sequence[Parameter],
        statistics: Sequence[Parameter],
        ranks: ExpertRanks,
    ) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        assert moe is not None
        names = list(moe_shapes(settings))
        self.weights = ParameterTuple(weights)
        self.statistics = ParameterTuple(statistics)
        self.ranks = ranks
        self.first = names.index("mlp.experts.gate_proj.weight")
        self.bias = names.index(EXPERT_BIAS) if EXPERT_BIAS in names else -1
        self.no_bias_E = Tensor(np.zeros(moe.expert_num, np.float32))
        self.has_shared = settings.shared_expert_size > 0
        self.first_shared = self.first + 3
        self.drops_tokens = moe.effective_capacity is not None
        self.balances_step = moe.balances_step
        self.assigned = 1.0 / (settings.seq_length * moe.num_experts_chosen)
        self.router = Router(settings, kernels)
        self.gates = Gates(settings)
        self.losses = GraphRouterLosses(settings, ranks)
        self.choice = ExpertChoice(settings, local, ranks, moe.capacity(ranks.tokens))
        self.choice_without_drops = ExpertChoice(settings, local, ranks, None)  # for evaluation
        self.experts = RoutedExperts(settings, local, ranks)
        self.shared: Any = SharedExperts(settings, kernels) if self.has_shared else None
        self.keep = P.Mul()
        self.add_shared = P.Add()
        self.add = P.Add()
        self.output_scale = settings.residual_multiplier
        self.scale_output = P.Mul()
        self.drop = kernels.dropout(settings.hidden_dropout)
        self.share = P.Mul()
        self.all_shares = SumExt()
        self.divide = P.Div()
        self.totals = tuple(SumExt() for _ in STATISTICS)
        self.sums = tuple(P.Add() for _ in STATISTICS)
        self.assigns = tuple(InplaceCopy() for _ in STATISTICS)
        self.log = P.Log()
        self.least = P.Add()
        self.minus = P.Neg()
        self.entropy = P.Mul()
        for part in (*self.sums, *self.assigns):
            part.recompute(False)

    def construct(
        self, x_ND: Tensor, weight_N1: Tensor, weight_G1: Tensor, loss_11: Tensor, seeds_B1: Tensor | None
    ) -> Tensor:
        weights = self.weights
        y_ND, logits_NE, scores_NE = self.router(x_ND, weights[0], weights[1])
        bias_E = weights[self.bias] if self.bias >= 0 else self.no_bias_E
        constant_NE = ops.stop_gradient(scores_NE)
        if self.training:
            experts_Nk, kept_Nk, requested_BE, kept_BE = self.choice(constant_NE, bias_E)
        else:
            experts_Nk, kept_Nk, requested_BE, kept_BE = self.choice_without_drops(constant_NE, bias_E)
        gates_Nk = self.gates(scores_NE, experts_Nk)
        if self.drops_tokens:
            gates_Nk = self.keep(gates_Nk, kept_Nk)
        matrices = weights[self.first], weights[self.first + 1], weights[self.first + 2]
        added_ND = self.experts(y_ND, gates_Nk, experts_Nk, *matrices)
        if self.has_shared:
            added_ND = self.add_shared(added_ND, self.shared(y_ND, *weights[self.first_shared :]))
        if seeds_B1 is not None:
            added_ND = self.drop(added_ND, seeds_B1)
        if self.output_scale != 1:
            added_ND = self.scale_output(added_ND, self.output_scale)
        x_ND = self.add(x_ND, added_ND)
        if not self.training:
            return x_ND
        requested_1E = self.count(0, requested_BE)
        if self.balances_step:
            load_GE = self.divide(requested_1E, self.all_shares(requested_1E, (1,), True))
        else:
            load_GE = self.share(requested_BE, self.assigned)
        loss_11 = self.losses(logits_NE, scores_NE, load_GE, weight_N1, weight_G1, loss_11)
        counted = requested_1E, self.count(1, kept_BE), self.count(2, self.entropies(constant_NE))
        return ops.depend(x_ND, counted), loss_11

    def count(self, number: int, values_GE: Tensor) -> Tensor:
        """Adds to a statistic of the step, and returns the new value, [1, E]."""
        parameter = self.statistics[number]
        total_1E = self.sums[number](parameter, self.totals[number](ops.stop_gradient(values_GE), (0,), True))
        return ops.depend(total_1E, self.assigns[number](parameter, total_1E))

    def entropies(self, scores_NE: Tensor) -> Tensor:
        """Returns -p log p of each normalised score."""
        p_NE = self.losses.normalised(scores_NE)
        return self.minus(self.entropy(p_NE, self.log(self.least(p_NE, 1e-20))))

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """Shards the layer over `data` x `tensor` ranks, and the residual stream over `tokens` ranks."""
        shard_operators(self, self.axes, d=data, n=tokens)
        self.router.shard_over(tokens)
        self.gates.shard_over(tokens)
        self.losses.shard_over(data, load_is_shared=self.balances_step)
        if self.has_shared:
            self.shared.shard_over(data, tensor)
        self.drop.shard_over(data, tensor, "all" if tokens > data else "data")


class ExpertCells(NamedTuple):
    """The cells that a decoder with experts needs."""

    make_layer: Callable[[str, Sequence[Parameter]], ExpertLayer]
    """(prefix of a layer's names, its weights) -> the cell of its experts."""
    group_weights: GroupWeights


def expert_cells(config: Config, world: World, kernels: KernelSet, local: KernelSet) -> ExpertCells | None:
    """Returns the cells of the experts, or None for a dense model; see `ExpertLayer` for `kernels` and `local`."""
    settings = config.decoder
    moe = settings.experts
    if moe is None:
        return None
    degrees = parallel_degrees(config, world)
    group, _ = expert_group(degrees, world.rank)
    tokens = config.runner_config.batch_size * settings.seq_length
    # MindSpore's dry run computes nothing.
    is_dry = os.environ.get("MS_SIMULATION_LEVEL", "") not in ("", "0")
    ranks = ExpertRanks(degrees.data_parallel, degrees.model_parallel, degrees.expert_parallel, group, tokens, is_dry)

    def make(prefix: str, weights: Sequence[Parameter]) -> ExpertLayer:
        statistics = make_statistics(prefix, moe.expert_num)
        return ExpertLayer(settings, kernels, local, weights, statistics, ranks)

    return ExpertCells(make, GroupWeights(group_tokens(settings, ranks)))


class GraphRouters:
    """The statistics of all routers in a step, and the expert biases that balance them.

    Args:
        decoder: The decoder, whose layers have the statistics.
        parameters: The parameters of this rank.
        sends_counts: Whether this rank sends the counts of its pipeline stage to the other stages. None: no pipeline.
    """

    def __init__(
        self,
        config: Config,
        decoder: nn.Cell,
        parameters: ShardedParameters,
        communicator: Communicator,
        sends_counts: bool | None,
    ) -> None:
        settings = config.decoder
        assert settings.experts is not None
        self.moe = settings.experts
        self.layers = tuple(settings.moe_layers)
        self.communicator = communicator
        self.sends_counts = sends_counts
        layers = {layer: decoder.layers[layer].experts.statistics for layer in self.layers}
        self.statistics = {layer: each for layer, each in layers.items() if each[0].name in parameters.sums}
        balanced = set(balanced_layers(settings, frozen_names(config))) & self.statistics.keys()
        self.biases = {layer: parameters.local[layer_prefix(layer) + EXPERT_BIAS] for layer in sorted(balanced)}

    def counts(self) -> RoutingCounts:
        """Returns the counts of the step over all ranks and micro-batches."""
        zeros = Tensor(np.zeros((len(STATISTICS), self.moe.expert_num), np.float32))
        by_layer = {layer: ops.concat(tuple(statistics)) for layer, statistics in self.statistics.items()}
        # A CPU has no current kernel for ops.stack, which is a legacy one.
        counted_LSE = ops.concat([by_layer.get(layer, zeros).expand_dims(0) for layer in self.layers])
        if self.sends_counts is not None:
            counted_LSE = self.communicator.all_reduce([counted_LSE * float(self.sends_counts)])[0]
        if not has_all_operators():
            counted_LSE = counted_LSE.asnumpy()
        requested_LE, kept_LE, entropy_LE = (counted_LSE[:, number] for number in range(len(STATISTICS)))
        return RoutingCounts(self.layers, kept_LE, requested_LE, entropy_LE.sum(1) * self.moe.num_experts_chosen)

    def update_bias(self, counts: RoutingCounts) -> None:
        """Raises the bias of experts with less than the mean load by the update rate, and lowers that of the others."""
        for layer, bias_E in self.biases.items():
            requested_E = counts.requested[self.layers.index(layer)]
            metric_functions().update_expert_bias(bias_E, requested_E, self.moe.topk_bias_update_rate)

    def clear(self) -> None:
        """Sets the statistics to zero, before the next step."""
        for parameter in itertools.chain(*self.statistics.values()):
            parameter.copy_(ops.zeros(parameter.shape, parameter.dtype))
