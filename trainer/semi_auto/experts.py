"""Experts in a graph that MindSpore shards, with an all-to-all between the ranks that share them.

What MindSpore cannot shard by itself stands in a `Morph`: a function of this rank's shards, whose inputs and outputs
have layouts that the cell states. MindSpore replaces it by the function's operators before it differentiates.

    router: norm, product, scores    operators with strategies, tokens over the data-parallel ranks (with sequence
                                     parallelism over all ranks of a stage)
    choice of the experts            Morph without gradient, all tokens of a data-parallel rank
    gates, losses of the router      operators with strategies
    dispatch, experts, combine       Morph, tokens over all ranks of a stage, experts over groups of neighbours

The routing and the grouped product inside are those of explicit mode on an Ascend (trainer/ops/ascend/moe.py).

Legend: N tokens, B sequences, T tokens of a sequence, D hidden, E experts, k experts chosen by a token, S ranks of an
expert-parallel group, e = E / S experts of a rank, F width of an expert. A rows of a rank: its N k assignments, and a
row of zeros for each expert. R rows that a rank's experts compute.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from mindspore import Layout, Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import SumExt

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
"""What a layer with experts counts, [1, E] each: assignments, those that are computed, and the sum over tokens of
-p log p of each expert's normalised score."""


class ExpertRanks(NamedTuple):
    """How the ranks of a pipeline stage share tokens and experts."""

    data: int
    tensor: int
    expert: int
    """Ranks of an expert-parallel group: neighbours, which have all experts together."""
    group: str
    """Name of this rank's group."""
    tokens: int
    """Tokens of a micro-batch of a data-parallel rank."""
    is_dry: bool = False
    """Whether nothing is computed: no count is known then, and every rank sends equally many rows to all."""


def expert_group(degrees: Degrees, rank: int) -> tuple[str, range]:
    """Name and ranks of the expert-parallel group of a rank."""
    ranks = Mesh(degrees).group_of("ep", rank)
    return f"{len(ranks)}-experts-{ranks[0]}", ranks


def make_statistics(prefix: str, experts: int) -> list[Parameter]:
    """A layer's `STATISTICS`, summed over the micro-batches of a step and over all ranks."""
    zeros = initializer("zeros", (1, experts), mstype.float32)
    names = [f"{prefix}mlp.gate.{name}" for name in STATISTICS]
    return [Parameter(zeros, name, requires_grad=False, parallel_optimizer=False) for name in names]


class ExpertChoice(nn.Cell):
    """(scores_NE, bias_E) -> experts_Nk, kept_Nk (1 where the expert computes it, else 0), requested_BE, kept_BE."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, ranks: ExpertRanks, capacity: int | None) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        # This mode sends a row of zeros to every expert.
        self.route = kernels.route(replace(RoutingRule.from_config(moe), safe_tokens=False))
        self.capacity = capacity
        self.policy = moe.drop_policy
        self.length = settings.seq_length
        self.experts = moe.expert_num
        self.chosen = moe.num_experts_chosen
        self.every_11E = Tensor(np.arange(self.experts, dtype=np.int32)[None, None])
        self.morph = P.Morph(self.choose, self.infer_shape, self.infer_dtype).add_prim_attr("self_define_shard", True)
        layout = Layout((ranks.data, ranks.tensor), ("data", "tensor"))
        rows = layout("data", "None")
        self.morph.shard(in_strategy=(rows, layout("None")), out_strategy=(rows,) * 4)
        self.morph.recompute(False)

    def construct(self, scores_NE, bias_E):
        return self.morph(scores_NE, bias_E)

    def infer_shape(self, scores, bias):
        assignments = [scores[0], self.chosen]
        counts = [scores[0] // self.length, self.experts]
        return assignments, assignments, counts, counts

    def infer_dtype(self, scores, bias):
        return mstype.int32, scores, scores, scores

    def choose(self, scores_NE, bias_E):
        routing = self.route(scores_NE, bias_E, self.capacity, self.policy)
        experts_Nk = routing[0]
        if self.capacity is None:
            kept_Nk = ops.ones(experts_Nk.shape, mstype.float32)
            counts_BE = self.count(experts_Nk)
            return experts_Nk, kept_Nk, counts_BE, counts_BE
        is_kept_Nk = routing[1] < routing[3].sum()  # rows of dropped assignments stand after those of all experts
        group_Nk = ops.select(is_kept_Nk, experts_Nk, ops.full_like(experts_Nk, self.experts))
        return experts_Nk, is_kept_Nk.astype(mstype.float32), self.count(experts_Nk), self.count(group_Nk)

    def count(self, group_Nk):
        """The assignments of each sequence to each expert, [B, E]."""
        group_BA1 = group_Nk.reshape(-1, self.length * self.chosen, 1)
        return (group_BA1 == self.every_11E).astype(mstype.float32).sum(1)


class RoutedExperts(nn.Cell):
    """(y_ND, gates_Nk, experts_Nk, gate_EFD, up_EFD, down_EDF) -> what the chosen experts add, [N, D].

    With several ranks in a group each rank sends its tokens to the ranks that have their experts, and gets the results
    back. It sends a row of zeros to every expert too: so no rank, no expert is without rows.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, ranks: ExpertRanks) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        # fmt: skip
        self.experts = moe.expert_num
        self.chosen = moe.num_experts_chosen
        self.ranks = ranks.expert
        self.group = ranks.group
        self.local_experts = moe.expert_num // ranks.expert
        self.is_dry = ranks.is_dry
        self.every_E = Tensor(np.arange(self.experts, dtype=np.int32))
        self.permute = Permute(has_safe_tokens=True)
        self.unpermute = Unpermute(has_safe_tokens=True)
        self.reorder = _Reorder()
        self.reorder_back = _Reorder()
        self.gate, self.up, self.down = (kernels.grouped_matmul(True, True) for _ in range(3))  # a row of zeros each
        self.swiglu = kernels.swiglu()
        self.to_host = P.MoveTo()
        self.morph = P.Morph(self.compute, self.infer, self.infer).add_prim_attr("self_define_shard", True)
        layout = Layout((ranks.data * ranks.tensor // ranks.expert, ranks.expert), ("groups", "expert"))
        rows = layout(("groups", "expert"), "None")
        stack = layout("expert", "None", "None")
        self.morph.shard(in_strategy=(*(rows,) * 3, *(stack,) * 3), out_strategy=(rows,))

    def construct(self, y_ND, gates_Nk, experts_Nk, gate_EFD, up_EFD, down_EDF):
        return self.morph(y_ND, gates_Nk, experts_Nk, gate_EFD, up_EFD, down_EDF)

    def infer(self, y, gates, experts, gate, up, down):
        return y

    def compute(self, y_ND, gates_Nk, experts_Nk, gate_eFD, up_eFD, down_eDF):
        """Of this rank's tokens and weights."""
        expert_A = ops.concat((experts_Nk.reshape(-1), self.every_E))
        order_A = stable_order(expert_A)
        row_Nk = stable_order(order_A)[: experts_Nk.shape[0] * self.chosen].reshape(experts_Nk.shape)
        # The assignments after the last token's are the rows of zeros.
        token_A = ops.minimum(ops.floor_divide(order_A, self.chosen), y_ND.shape[0])
        counts_E = (expert_A.expand_dims(1) == self.every_E.expand_dims(0)).astype(mstype.float32).sum(0)
        rows_AD = self.permute(y_ND, token_A, row_Nk)
        if self.ranks == 1:
            out_AD = self.products(rows_AD, counts_E.astype(mstype.int64), gate_eFD, up_eFD, down_eDF)
        else:
            sorted_A = ops.gather_elements(expert_A, 0, order_A)
            out_AD = self.exchanged(rows_AD, sorted_A, counts_E, (gate_eFD, up_eFD, down_eDF))
        return self.unpermute(out_AD, gates_Nk, token_A, row_Nk)

    def exchanged(self, rows_AD, expert_A, counts_E, weights):
        """The same rows, computed where their experts are."""
        counts_Se = counts_E.reshape(self.ranks, self.local_experts)
        received_counts_Se = all_to_all(counts_Se, self.group, self.ranks)
        send = self.rows_of_ranks(counts_Se, rows_AD)
        receive = self.rows_of_ranks(received_counts_Se, rows_AD)
        rows_RD = all_to_all_rows(rows_AD, send, receive, self.group)
        local_A1 = ops.floor_mod(expert_A, self.local_experts).astype(mstype.float32).reshape(-1, 1)
        order_R = stable_order(all_to_all_rows(local_A1, send, receive, self.group).reshape(-1))
        inverse_R = stable_order(order_R)
        counts_e = received_counts_Se.sum(0).astype(mstype.int64)
        out_RD = self.products(self.reorder(rows_RD, order_R, inverse_R), counts_e, *weights)
        out_RD = self.reorder_back(out_RD, inverse_R, order_R)
        return all_to_all_rows(out_RD, receive, send, self.group).reshape(rows_AD.shape)

    def rows_of_ranks(self, counts_Se, rows_AD):
        """How many rows each rank of the group gets, or sends. They are sizes of arrays, so the host needs them."""
        if self.is_dry:
            even = ()
            for rank in range(self.ranks):
                even += ((rows_AD.shape[0] + rank) // self.ranks,)
            return even
        return self.to_host(counts_Se.sum(1).astype(mstype.int64), "CPU", True)

    def products(self, rows_RD, counts_e, gate_eFD, up_eFD, down_eDF):
        inner_RF = self.swiglu(self.gate(rows_RD, gate_eFD, counts_e), self.up(rows_RD, up_eFD, counts_e))
        return self.down(inner_RF, down_eDF, counts_e)


class _Reorder(nn.Cell):
    """Rows in another order; `inverse` is the order back."""

    def construct(self, rows_RD, order_R, inverse_R):
        return mint.index_select(rows_RD, 0, order_R)

    def bprop(self, rows_RD, order_R, inverse_R, out, grad_RD):
        return mint.index_select(grad_RD, 0, inverse_R), ops.zeros_like(order_R), ops.zeros_like(inverse_R)


def group_tokens(settings: ModelConfig, ranks: ExpertRanks) -> int:
    """Tokens whose mean scores make a balance loss: of a sequence, with gbs_aux_loss all of a data-parallel rank."""
    return ranks.tokens if settings.experts.balances_step else settings.seq_length


class GroupWeights(Sharded):
    """weight_N1 of each token -> weight_G1 of each group.

    One for all layers, which would compute the same.
    """

    axes: ClassVar = {"sum": "d.."}

    def __init__(self, tokens: int) -> None:
        super().__init__(auto_prefix=False)
        self.tokens = tokens
        self.reshape = P.Reshape()
        self.sum = SumExt()

    def construct(self, weight_N1):
        return self.sum(self.reshape(weight_N1, (-1, self.tokens, 1)), (1,))


class GraphRouterLosses(nn.Cell):
    """(logits_NE, scores_NE, load_GE, weight_N1, weight_G1, loss_11) -> loss_11 and the losses of this router, each
    times its factor.

    The formulas are those of `trainer.models.moe`. The sum is [1, 1]: a stage of a pipeline does not hand on numbers
    without an axis. The tokens are in the G groups of `GroupWeights`. `load_GE` has for each the experts' parts of its
    assignments, [1, E] where they are those of all. `weight_N1` is 1 for a token
    with a label that counts, else 0.
    """

    axes: ClassVar = {
        "total uneven sum largest exp rest log square sum_z": "d.", "mean": "d..", "at_least scale": "d.,",
        "divide centre back pick pick_z": "d.,d.", "times_factor times_z_factor": "..,", "add_aux add_z": "..,..",
    }  # fmt: skip

    def __init__(self, settings: ModelConfig, ranks: ExpertRanks) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        self.experts = moe.expert_num
        self.aux_factor = settings.balance_factor
        self.z_factor = moe.z_loss_factor
        self.normalises = moe.score_function == "sigmoid"
        self.tokens = group_tokens(settings, ranks)
        self.total = SumExt()
        self.at_least = P.Add()
        self.divide = P.Div()
        self.reshape = P.Reshape()
        self.mean = P.ReduceMean()
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

    def construct(self, logits_NE, scores_NE, load_GE, weight_N1, weight_G1, loss_11):
        if self.aux_factor:
            aux_loss_11 = self.aux_loss(scores_NE, load_GE, weight_G1)
            loss_11 = self.add_aux(loss_11, self.times_factor(aux_loss_11, self.aux_factor))
        if self.z_factor:
            loss_11 = self.add_z(loss_11, self.times_z_factor(self.z_loss(logits_NE, weight_N1), self.z_factor))
        return loss_11

    def aux_loss(self, scores_NE, load_GE, weight_G1):
        p_NE = self.normalised(scores_NE) if self.normalises else scores_NE
        mean_GE = self.mean(self.reshape(p_NE, (-1, self.tokens, self.experts)), 1)
        uneven_G1 = self.uneven(self.scale(self.weigh(mean_GE, ops.stop_gradient(load_GE)), self.experts), (1,), True)
        return self.sum(self.pick(uneven_G1, weight_G1), (0,), True)

    def z_loss(self, logits_NE, weight_N1):
        largest_N1 = ops.stop_gradient(self.largest(logits_NE, 1))
        rest_N1 = self.rest(self.exp(self.centre(logits_NE, largest_N1)), (1,), True)
        total_N1 = self.back(self.log(rest_N1), largest_N1)
        return self.sum_z(self.pick_z(self.square(total_N1), weight_N1), (0,), True)

    def normalised(self, scores_NE):
        """A token's scores with the sum 1."""
        return self.divide(scores_NE, self.at_least(self.total(scores_NE, (1,), True), 1e-20))

    def shard_over(self, data: int, *, load_is_shared: bool) -> None:
        axes = self.axes | {"weigh": "d.,.." if load_is_shared else "d.,d."}
        shard_operators(self, axes, d=data)


class ExpertLayer(nn.Cell):
    """(x_ND, weight_N1, weight_G1, loss_11, seeds_B1 or None) -> residual stream and `GraphRouterLosses`.

    It takes the place of a feed-forward sublayer. In evaluation it gives x_ND alone.

    Args:
        kernels: Those that MindSpore shards.
        local: Those of explicit mode, for what a rank computes by itself.
        weights: In the order of `moe_shapes`.
        statistics: In the order of `STATISTICS`.
    """

    axes: ClassVar = {
        "keep add_shared add": "n.,n.", "totals log minus": "d.", "share least": "d.,", "entropy": "d.,d.",
        "all_shares": "..", "divide sums assigns": "..,..",
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
        names = list(moe_shapes(settings))
        self.weights = ParameterTuple(weights)
        self.statistics = ParameterTuple(statistics)
        self.ranks = ranks
        self.first = names.index("mlp.experts.gate_proj.weight")
        self.bias = names.index(EXPERT_BIAS) if EXPERT_BIAS in names else -1
        self.no_bias_E = Tensor(np.zeros(moe.expert_num, np.float32))
        self.has_shared = settings.shared_expert_size > 0
        self.first_shared = self.first + 3
        self.drops = moe.effective_capacity is not None
        self.of_step = moe.balances_step
        self.assigned = 1.0 / (settings.seq_length * moe.num_experts_chosen)
        self.router = Router(settings, kernels)
        self.gates = Gates(settings)
        self.losses = GraphRouterLosses(settings, ranks)
        self.choice = ExpertChoice(settings, local, ranks, moe.capacity(ranks.tokens))
        self.choice_of_all = ExpertChoice(settings, local, ranks, None)  # an evaluation drops nothing
        self.experts = RoutedExperts(settings, local, ranks)
        self.shared = SharedExperts(settings, kernels) if self.has_shared else None
        self.keep = P.Mul()
        self.add_shared = P.Add()
        self.add = P.Add()
        self.drop = kernels.dropout(settings.hidden_dropout)
        self.share = P.Mul()
        self.all_shares = SumExt()
        self.divide = P.Div()
        self.totals = tuple(SumExt() for _ in STATISTICS)
        self.sums = tuple(P.Add() for _ in STATISTICS)
        self.assigns = tuple(P.Assign() for _ in STATISTICS)
        self.log = P.Log()
        self.least = P.Add()
        self.minus = P.Neg()
        self.entropy = P.Mul()
        for part in (*self.sums, *self.assigns):
            part.recompute(False)

    def construct(self, x_ND, weight_N1, weight_G1, loss_11, seeds_B1):
        weights = self.weights
        y_ND, logits_NE, scores_NE = self.router(x_ND, weights[0], weights[1])
        bias_E = weights[self.bias] if self.bias >= 0 else self.no_bias_E
        constant_NE = ops.stop_gradient(scores_NE)
        if self.training:
            experts_Nk, kept_Nk, requested_BE, kept_BE = self.choice(constant_NE, bias_E)
        else:
            experts_Nk, kept_Nk, requested_BE, kept_BE = self.choice_of_all(constant_NE, bias_E)
        gates_Nk = self.gates(scores_NE, experts_Nk)
        if self.drops:
            gates_Nk = self.keep(gates_Nk, kept_Nk)
        matrices = weights[self.first], weights[self.first + 1], weights[self.first + 2]
        if not self.training:
            # Without a gradient MindSpore 2.10 hands a Morph the parameters themselves, and fails ("requires_grad").
            matrices = tuple(ops.stop_gradient(matrix) for matrix in matrices)
        added_ND = self.experts(y_ND, gates_Nk, experts_Nk, *matrices)
        if self.has_shared:
            added_ND = self.add_shared(added_ND, self.shared(y_ND, *weights[self.first_shared :]))
        if seeds_B1 is not None:
            added_ND = self.drop(added_ND, seeds_B1)
        x_ND = self.add(x_ND, added_ND)
        if not self.training:
            return x_ND
        requested_1E = self.count(0, requested_BE)
        if self.of_step:
            load_GE = self.divide(requested_1E, self.all_shares(requested_1E, (1,), True))
        else:
            load_GE = self.share(requested_BE, self.assigned)
        loss_11 = self.losses(logits_NE, scores_NE, load_GE, weight_N1, weight_G1, loss_11)
        counted = requested_1E, self.count(1, kept_BE), self.count(2, self.entropies(constant_NE))
        return ops.depend(x_ND, counted), loss_11

    def count(self, number, values_GE):
        """Adds to the statistics of the step, and returns what they are then, [1, E]."""
        parameter = self.statistics[number]
        total_1E = self.sums[number](parameter, self.totals[number](ops.stop_gradient(values_GE), (0,), True))
        return ops.depend(total_1E, self.assigns[number](parameter, total_1E))

    def entropies(self, scores_NE):
        """-p log p of each score."""
        p_NE = self.losses.normalised(scores_NE)
        return self.minus(self.entropy(p_NE, self.log(self.least(p_NE, 1e-20))))

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """`data` and `tensor` ranks; the residual stream is sharded over `tokens` ranks."""
        shard_operators(self, self.axes, d=data, n=tokens)
        self.router.shard_over(tokens)
        self.gates.shard_over(tokens)
        self.losses.shard_over(data, load_is_shared=self.of_step)
        if self.has_shared:
            self.shared.shard_over(data, tensor)
        self.drop.shard_over(data, tensor, "all" if tokens > data else "data")


class ExpertCells(NamedTuple):
    """What a decoder with experts needs."""

    of_layer: Callable[[str, Sequence[Parameter]], ExpertLayer]
    """(prefix of a layer's names, its weights) -> its experts."""
    group_weights: GroupWeights


def expert_cells(config: Config, world: World, kernels: KernelSet, local: KernelSet) -> ExpertCells | None:
    """None for a dense model; `kernels` and `local` as in `ExpertLayer`."""
    if config.decoder.experts is None:
        return None
    settings = config.decoder
    degrees = parallel_degrees(config, world)
    group, _ = expert_group(degrees, world.rank)
    tokens = config.runner_config.batch_size * settings.seq_length
    # In MindSpore's dry run no kernel computes.
    is_dry = os.environ.get("MS_SIMULATION_LEVEL", "") not in ("", "0")
    ranks = ExpertRanks(degrees.data_parallel, degrees.model_parallel, degrees.expert_parallel, group, tokens, is_dry)

    def make(prefix: str, weights: Sequence[Parameter]) -> ExpertLayer:
        statistics = make_statistics(prefix, settings.experts.expert_num)
        return ExpertLayer(settings, kernels, local, weights, statistics, ranks)

    return ExpertCells(make, GroupWeights(group_tokens(settings, ranks)))


class GraphRouters:
    """What the routers of all layers did in a step, and the bias that balances them.

    Args:
        decoder: Its layers have the statistics.
        parameters: Of this rank.
        speaks: Whether this rank tells the other stages of a pipeline; None without a pipeline.
    """

    def __init__(
        self,
        config: Config,
        decoder: nn.Cell,
        parameters: ShardedParameters,
        communicator: Communicator,
        speaks: bool | None,
    ) -> None:
        settings = config.decoder
        self.moe = settings.experts
        self.layers = tuple(settings.moe_layers)
        self.communicator = communicator
        self.speaks = speaks
        layers = {layer: decoder.layers[layer].experts.statistics for layer in self.layers}
        self.local = {layer: found for layer, found in layers.items() if found[0].name in parameters.sums}
        balanced = set(balanced_layers(settings, frozen_names(config))) & self.local.keys()
        self.biases = {layer: parameters.local[layer_prefix(layer) + EXPERT_BIAS] for layer in sorted(balanced)}

    def counts(self) -> RoutingCounts:
        """Over all ranks and micro-batches."""
        zeros = Tensor(np.zeros((len(STATISTICS), self.moe.expert_num), np.float32))
        of_layers = [ops.concat(tuple(self.local[layer])) if layer in self.local else zeros for layer in self.layers]
        counted_LSE = ops.stack(of_layers)
        if self.speaks is not None:
            counted_LSE = self.communicator.all_reduce([counted_LSE * float(self.speaks)])[0]
        if not has_all_operators():
            counted_LSE = counted_LSE.asnumpy()
        requested_LE, kept_LE, entropy_LE = (counted_LSE[:, number] for number in range(len(STATISTICS)))
        return RoutingCounts(self.layers, kept_LE, requested_LE, entropy_LE.sum(1) * self.moe.num_experts_chosen)

    def update_bias(self, counts: RoutingCounts) -> None:
        """As `Decoder.update_expert_bias`."""
        for layer, bias_E in self.biases.items():
            requested_E = counts.requested[self.layers.index(layer)]
            metric_functions().update_expert_bias(bias_E, requested_E, self.moe.topk_bias_update_rate)

    def clear(self) -> None:
        """Before the next step."""
        for parameter in itertools.chain(*self.local.values()):
            ops.assign(parameter, ops.zeros_like(parameter))
