"""The feed-forward sublayer of an MoE layer: norm, router, dispatch, experts, combine, shared experts.

It runs operator by operator around compiled pieces: only the router's choice says which tokens go where.

Legend: N = B * T tokens of B sequences, D hidden, E experts, k chosen by a token, R sorted assignments, F their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from mindspore import Parameter, Tensor, _no_grad, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.models.recompute import Compiled, compile_cell
from trainer.models.spec.names import EXPERT_BIAS, EXPERT_DOWN_BIAS, EXPERT_GATE_BIAS, EXPERT_UP_BIAS, ROUTER_BIAS
from trainer.models.spec.shapes import moe_shapes
from trainer.models.spec.sublayers import moe_config
from trainer.ops.dispatch import AllToAllDispatcher
from trainer.ops.routing import RoutingRule
from trainer.parallel.collectives import AllReduce, GatherFromSequenceParallel, ScatterToSequenceParallel

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig
    from trainer.models.inputs import RouterStatistics, SequenceWeights
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.routing import Routing
    from trainer.parallel.collectives import DeviceGroup, ProcessGroup
    from trainer.parallel.tensor import RankModelShard, TensorParallel


class Router(nn.Cell):
    """(x_ND, norm_D, router_ED[, bias_E]) -> (normalised x_ND, logits_NE, scores_NE); logits and scores in float32."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.norm = kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps)
        self.product = kernels.router_linear()
        self.cast = P.Cast()
        self.sigmoid_scores = moe_config(settings).score_function == "sigmoid"
        self.softmax = P.Softmax()
        self.sigmoid = P.Sigmoid()

    def construct(
        self, x_ND: Tensor, norm_D: Tensor, router_ED: Tensor, bias_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y_ND = self.norm(x_ND, norm_D)
        logits_NE = self.product(self.cast(y_ND, mstype.float32), router_ED, bias_E)
        if self.sigmoid_scores:
            return y_ND, logits_NE, self.sigmoid(logits_NE)
        return y_ND, logits_NE, self.softmax(logits_NE)

    def shard_over(self, data: int) -> None:
        """Shards the tokens over `data` ranks, in semi-automatic mode."""
        self.norm.shard_over(data)
        self.product.shard_over(data)
        for part in (self.softmax, self.sigmoid):
            part.shard(((data, 1),))


class Gates(nn.Cell):
    """(scores_NE, experts_Nk) -> gates_Nk, the factors of the chosen experts' outputs."""

    def __init__(self, settings: ModelConfig) -> None:
        super().__init__()
        moe = moe_config(settings)
        self.normalised = moe.norm_topk_prob
        self.least = moe.moe_norm_min
        self.at_least = P.Maximum()
        self.factor = moe.routed_scaling_factor
        self.gather = P.GatherD()
        self.matmul = P.MatMul()
        self.add = P.Add()
        self.divide = P.Div()
        self.multiply = P.Mul()
        self.ones_kk = Tensor(np.ones((moe.num_experts_chosen,) * 2, np.float32))

    def construct(self, scores_NE: Tensor, experts_Nk: Tensor) -> Tensor:
        gates_Nk = self.gather(scores_NE, 1, experts_Nk)
        if self.normalised:
            sums_Nk = self.add(self.matmul(gates_Nk, self.ones_kk), 1e-20)
            if self.least:
                sums_Nk = self.at_least(sums_Nk, self.least)
            gates_Nk = self.divide(gates_Nk, sums_Nk)
        if self.factor == 1:
            return gates_Nk
        return self.multiply(gates_Nk, self.factor)

    def shard_over(self, data: int) -> None:
        """Shards the tokens over `data` ranks, in semi-automatic mode."""
        row = (data, 1)
        for part in (self.gather, self.divide):
            part.shard((row, row))
        self.matmul.shard((row, (1, 1)))
        for part in (self.add, self.at_least, self.multiply):
            part.shard((row, ()))


class RouterLosses(nn.Cell):
    """(logits_NE, scores_NE, load, fields of `SequenceWeights`) -> auxiliary loss and z-loss, sums over loss tokens.

    `load` is experts_Nk; with gbs_aux_loss it is shares_1E, the experts' shares of all assignments of the step
    (`StepExpertLoad`).

    The auxiliary loss of a sequence is DeepSeek-V3's (equations 17 to 20) times the loss tokens of the sequence:
    sum_e f_e P_e, which is 1 for an even load. f_e is E / (k T) x assignments to e, and P_e the mean of the normalised
    scores. It does not depend on the numbers of micro-batches and ranks. With gbs_aux_loss, f_e is E times the expert's
    share of the step, and P_e the mean over the micro-batch.
    The z-loss is the sum over loss tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5).

    Args:
        sharing: The ranks that share a micro-batch: the tokens are those of this rank, and the losses its part of the
            sums. None: the rank has all tokens.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, sharing: ProcessGroup | None = None) -> None:
        super().__init__()
        moe = moe_config(settings)
        self.experts = moe.expert_num
        self.even = moe.expert_num / moe.num_experts_chosen
        self.normalise = moe.score_function == "sigmoid"
        self.with_z = moe.z_loss_factor > 0
        self.of_step = moe.balances_step
        self.one_hot = kernels.one_hot(self.experts)
        self.matmul = P.MatMul()
        self.matmul_at = P.MatMul(transpose_a=True)
        self.ones_EE = Tensor(np.ones((self.experts, self.experts), np.float32))
        self.ones_E1 = Tensor(np.ones((self.experts, 1), np.float32))
        self.no_loss = Tensor(0.0, mstype.float32)
        self.add_up = None if sharing is None else AllReduce(sharing)

    def construct(
        self, logits_NE: Tensor, scores_NE: Tensor, load: Tensor, mean_BN: Tensor, mean_BR: Tensor, tokens_B1: Tensor,
        valid_N1: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns both sums; no gradient flows through the experts' loads."""
        if self.of_step:
            load_BE = ops.stop_gradient(load * self.experts)
        else:
            assigned_RE = self.one_hot(load.reshape(-1))
            load_BE = self.matmul(mean_BR, assigned_RE)
            if self.add_up is not None:
                load_BE = self.add_up(load_BE)
            load_BE = ops.stop_gradient(load_BE * self.even)
        if self.normalise:
            scores_NE = scores_NE / (self.matmul(scores_NE, self.ones_EE) + 1e-20)
        uneven_BE = load_BE * self.matmul(mean_BN, scores_NE)
        aux_loss = self.matmul_at(tokens_B1, self.matmul(uneven_BE, self.ones_E1)).reshape(())
        if not self.with_z:
            return aux_loss, self.no_loss
        largest_N1 = ops.stop_gradient(ops.amax(logits_NE, 1, True))
        rest_N1 = self.matmul(ops.exp(logits_NE - largest_N1), self.ones_E1)
        total_N1 = largest_N1 + ops.log1p(rest_N1 - 1.0)
        return aux_loss, self.matmul_at(valid_N1, total_N1 * total_N1).reshape(())


class SharedExperts(nn.Cell):
    """The shared experts as one wide SwiGLU: (y_ND, gate_SD, up_SD, down_DS[, weight_1D]) -> [N, D].

    With `weight_1D` the sum is multiplied by sigmoid(y weight^T), which is computed in float32 like the router.

    Args:
        rows: The tensor-parallel ranks: each has rows of y and of the result, and columns of the experts. None: this
            rank has all of them.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, rows: TensorParallel | None = None) -> None:
        super().__init__()
        self.column_parallel_input: nn.Cell | None = None
        self.row_parallel_output: nn.Cell | None = None
        if rows is not None:
            self.column_parallel_input = rows.column_parallel_input()
            self.row_parallel_output = rows.row_parallel_output()
        self.gate = kernels.linear()
        self.up = kernels.linear()
        self.down = kernels.linear()
        self.swiglu = kernels.gated("silu")
        self.has_gate = settings.has_shared_gate
        self.score = kernels.router_linear()
        self.sigmoid = P.Sigmoid()
        self.spread = P.MatMul()
        self.cast = P.Cast()
        self.ones_1D = Tensor(np.ones((1, settings.hidden_size), np.float32))
        self.multiply = P.Mul()

    def construct(
        self, y_ND: Tensor, gate_SD: Tensor, up_SD: Tensor, down_DS: Tensor, weight_1D: Tensor | None = None
    ) -> Tensor:
        all_rows_ND = y_ND
        if self.column_parallel_input is not None:
            all_rows_ND = self.column_parallel_input(y_ND)
        out_ND = self.down(self.swiglu(self.gate(all_rows_ND, gate_SD), self.up(all_rows_ND, up_SD)), down_DS)
        if self.row_parallel_output is not None:
            out_ND = self.row_parallel_output(out_ND)
        if not self.has_gate:
            return out_ND
        share_N1 = self.sigmoid(self.score(self.cast(y_ND, mstype.float32), weight_1D))
        return self.multiply(out_ND, self.cast(self.spread(share_N1, self.ones_1D), out_ND.dtype))

    def shard_over(self, data: int, tensor: int) -> None:
        """Shards the tokens over `data` ranks and the width over `tensor` ranks, in semi-automatic mode."""
        row = (data, 1)
        for linear in (self.gate, self.up):
            linear.shard_over(data, columns=tensor)
        self.down.shard_over(data, rows=tensor)
        self.swiglu.shard_over(data, tensor)
        self.score.shard_over(data)
        self.sigmoid.shard((row,))
        self.spread.shard((row, (1, 1)))
        self.multiply.shard((row, row))


class ExpertBiases(nn.Cell):
    """(gates_Nk, experts_Nk, row_Nk, counts_E, bias_ED) -> the sum of each token's biases times their gates, [N, D].

    Dropped assignments, whose rows follow those of all experts, have no bias.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, experts: int) -> None:
        super().__init__()
        self.one_hot = kernels.one_hot(experts)
        self.matmul = P.MatMul()
        self.cast = P.Cast()
        self.drops = moe_config(settings).effective_capacity is not None

    def construct(
        self, gates_Nk: Tensor, experts_Nk: Tensor, row_Nk: Tensor, counts_E: Tensor, bias_ED: Tensor
    ) -> Tensor:
        if self.drops:
            gates_Nk = gates_Nk * self.cast(row_Nk < counts_E.sum(), gates_Nk.dtype)
        share_NkE = self.one_hot(experts_Nk) * gates_Nk.expand_dims(-1)
        return self.matmul(share_NkE.sum(1), bias_ED)


class RowBiases(nn.Cell):
    """(x_RF, bias_EF, counts_E) -> x plus the bias of the expert that each row belongs to, [R, F]."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.matmul = P.MatMul()
        self.cast = P.Cast()
        # A product with it is the cumulative sum, for which an Ascend has a legacy operator only.
        self.upto_EE = Tensor(np.triu(np.ones((experts, experts), np.float32)))

    def construct(self, x_RF: Tensor, bias_EF: Tensor, counts_E: Tensor) -> Tensor:
        """Adds nothing to rows that follow those of all experts."""
        count_1E = self.cast(counts_E, mstype.float32).reshape(1, -1)
        end_1E = self.matmul(count_1E, self.upto_EE)
        start_1E = end_1E - count_1E
        row_R1 = Tensor(np.arange(x_RF.shape[0], dtype=np.float32)[:, None])
        belongs_RE = ops.logical_and(row_R1 >= start_1E, row_R1 < end_1E)
        added_RF = self.matmul(ops.stop_gradient(self.cast(belongs_RE, mstype.float32)), bias_EF)
        return x_RF + self.cast(added_RF, x_RF.dtype)


class ClampedSwiGLU(nn.Cell):
    """(u + 1) g sigmoid(alpha g): g is gate up to the limit, u is up within it on both sides (gpt-oss)."""

    def __init__(self, limit: float, alpha: float) -> None:
        super().__init__()
        self.limit = limit
        self.alpha = alpha
        self.least = P.Minimum()
        self.largest = P.Maximum()
        self.sigmoid = P.Sigmoid()
        self.cast = P.Cast()

    def construct(self, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        """Computes in float32; the result has the dtype of the inputs."""
        gate = self.least(self.cast(gate_RF, mstype.float32), self.limit)
        up = self.largest(self.least(self.cast(up_RF, mstype.float32), self.limit), -self.limit)
        return self.cast((up + 1.0) * gate * self.sigmoid(gate * self.alpha), gate_RF.dtype)


class MoeLayer(nn.Cell):
    """The feed-forward sublayer of an MoE layer; one instance serves all layers, like a compiled block.

    A graph can hold `train` too (`construct`). A routing is a plain tuple there, so it is indexed by numbers.

    Args:
        shard: The experts and tokens that the rank has. The ranks of a tensor-parallel group share the tokens for the
            experts: each takes its rows of the residual stream, also where it has all rows. None: the rank has all.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, compiled: Compiled, shard: RankModelShard | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        moe = moe_config(settings)
        places = {name: place for place, name in enumerate(moe_shapes(settings))}
        tensor = None
        sharing = None
        expert_group = None
        if shard is not None:
            tensor = shard.tensor
            sharing = shard.sharing
            expert_group = shard.experts
        rows = None
        if tensor is not None:
            rows = tensor._replace(sequence_parallel=True)
        self.divide = self.join = None
        self.sharing = 1  # ranks that have other rows of the residual stream
        if sharing is not None:
            self.sharing = sharing.size
        if tensor is not None and not tensor.sequence_parallel:
            self.divide = ScatterToSequenceParallel(tensor.group)
            self.join = GatherFromSequenceParallel(tensor.group)
            self.sharing //= tensor.group.size
        self.drop_policy = moe.drop_policy
        self.has_shared = settings.shared_expert_size > 0
        self.losses_of_step = moe.balances_step
        self.first = places["mlp.experts.gate_proj.weight"]
        self.bias = places.get(EXPERT_BIAS)
        self.down_bias = places.get(EXPERT_DOWN_BIAS)
        self.gate_bias = places.get(EXPERT_GATE_BIAS)
        self.up_bias = places.get(EXPERT_UP_BIAS)
        self.router_bias = places.get(ROUTER_BIAS)
        activation = kernels.gated("silu")
        if moe.swiglu_limit is not None:
            activation = ClampedSwiGLU(moe.swiglu_limit, moe.swiglu_alpha)
        self.first_shared = len(places) - (3 + settings.has_shared_gate)
        local_experts = moe.expert_num
        if expert_group is not None:
            local_experts //= expert_group.size
        self.row_biases = RowBiases(local_experts)
        pieces = (
            kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps),
            Router(settings, kernels),
            Gates(settings),
            RouterLosses(settings, kernels, sharing),
            SharedExperts(settings, kernels, rows),
            activation,
            ExpertBiases(settings, kernels, local_experts),
        )
        compiled_pieces = [compile_cell(piece, compiled) for piece in pieces]
        self.norm, self.router, self.gates, self.losses, self.shared, self.swiglu, self.biases = compiled_pieces
        self.route = kernels.route(RoutingRule.from_config(moe))
        self.permute = kernels.permute()
        self.unpermute = kernels.unpermute()
        self.dispatch = None
        if expert_group is not None:
            self.dispatch = AllToAllDispatcher(cast("DeviceGroup", expert_group), self.permute, self.unpermute)
        self.drop = kernels.dropout(settings.hidden_dropout)
        self.output_scale = settings.residual_multiplier
        # With neither a capacity nor safe tokens, every row belongs to an expert.
        fills_rows = moe.effective_capacity is None and not RoutingRule.from_config(moe).safe_tokens
        self.gate, self.up, self.down = (kernels.grouped_matmul(fills_rows) for _ in range(3))

    def construct(
        self, x_ND: Tensor, weights: Sequence[Tensor], sequence_weights: SequenceWeights, mask_ND: Tensor | None,
        capacity: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns the residual stream, the auxiliary loss and the z-loss of `train`, in a graph."""
        x_ND, aux_loss, z_loss, _, _ = self.train(x_ND, weights, sequence_weights, mask_ND, capacity)
        return x_ND, aux_loss, z_loss

    def train(
        self, x_ND: Tensor, weights: Sequence[Tensor], sequence_weights: SequenceWeights, mask_ND: Tensor | None,
        capacity: int | None, routing: Routing | None = None, shares: Callable | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Routing, Tensor]:  # fmt: skip
        """Returns the residual stream, auxiliary loss, z-loss, the routing and the router's scores [N, E].

        Args:
            weights: In the order of `moe_shapes`.
            mask_ND: The dropout mask of the sublayer's output, or None.
            capacity: The expert capacity, or None.
            routing: The routing of an earlier pass, which this one repeats; None: the router decides.
            shares: For gbs_aux_loss: `StepExpertLoad.layer_load`; None, as in a graph: the load of the micro-batch.
        """
        rows_ND = self.local_rows(x_ND)
        y_ND, logits_NE, scores_NE = self.scores(rows_ND, weights)
        if routing is None:
            routing = self.route(scores_NE, self.expert_bias(weights), capacity, self.drop_policy)
        gates_Nk = self.gates(scores_NE, routing[0])
        load = routing[0]
        if self.losses_of_step:
            load = self.load_shares(routing[4], shares)
        aux_loss, z_loss = self.losses(logits_NE, scores_NE, load, *sequence_weights)
        added_ND = self.experts(y_ND, gates_Nk, routing, weights)
        if mask_ND is not None:
            added_ND = self.drop(added_ND, mask_ND)
        if self.output_scale != 1:
            added_ND = added_ND * self.output_scale
        return x_ND + added_ND, aux_loss, z_loss, routing, scores_NE

    def scores(self, x_ND: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the normed rows, and logits and scores of the router."""
        if self.router_bias is None:
            return self.router(x_ND, weights[0], weights[1])
        return self.router(x_ND, weights[0], weights[1], weights[self.router_bias])

    def local_rows(self, x_ND: Tensor) -> Tensor:
        """Returns the rows of the residual stream that this rank sends to experts."""
        if self.divide is None:
            return x_ND
        return self.divide(x_ND)

    def expert_bias(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Returns the expert bias [E] among the weights; None where the router has none."""
        if self.bias is None:
            return None
        return weights[self.bias]

    def load_shares(self, requested_E: Tensor, shares: Callable | None) -> Tensor:
        """Returns each expert's share of the assignments, [1, E]: of the step, or without `shares` of these tokens."""
        if shares is not None:
            share_E = shares(requested_E)
            if not isinstance(share_E, Tensor):
                share_E = Tensor(share_E)
            return ops.cast(share_E, mstype.float32).reshape(1, -1)
        requested_E = ops.cast(requested_E, mstype.float32)
        return (requested_E / ops.reduce_sum(requested_E)).reshape(1, -1)

    def experts(self, y_ND: Tensor, gates_Nk: Tensor, routing: Routing, weights: Sequence[Tensor]) -> Tensor:
        """Returns the sum of routed and shared experts for all rows of the residual stream, [N, D]."""
        if self.dispatch is None:
            added_ND = self.routed_experts(y_ND, gates_Nk, routing, weights)
        else:
            run = partial(self.routed_experts, weights=weights)
            added_ND = self.dispatch(y_ND, gates_Nk, routing, run)
        if self.has_shared:
            added_ND = added_ND + self.shared(y_ND, *weights[self.first_shared :])
        if self.join is None:
            return added_ND
        return self.join(added_ND)

    def routed_experts(self, y_ND: Tensor, gates_Nk: Tensor, routing: Routing, weights: Sequence[Tensor]) -> Tensor:
        """Returns the sum of each token's experts weighted by their gates, [N, D]; the rank has all these experts."""
        gate_EFD = weights[self.first]
        up_EFD = weights[self.first + 1]
        down_EDF = weights[self.first + 2]
        row_Nk = routing[1]
        token_R = routing[2]
        counts_E = routing[3]
        rows_RD = self.permute(y_ND, token_R, row_Nk)
        gate_RF = self.gate(rows_RD, gate_EFD, counts_E)
        up_RF = self.up(rows_RD, up_EFD, counts_E)
        if self.gate_bias is not None and self.up_bias is not None:
            gate_RF = self.row_biases(gate_RF, weights[self.gate_bias], counts_E)
            up_RF = self.row_biases(up_RF, weights[self.up_bias], counts_E)
        inner_RF = self.swiglu(gate_RF, up_RF)
        added_ND = self.unpermute(self.down(inner_RF, down_EDF, counts_E), gates_Nk, token_R, row_Nk)
        if self.down_bias is not None:
            bias_ND = self.biases(gates_Nk, routing[0], routing[1], routing[3], weights[self.down_bias])
            added_ND = added_ND + ops.cast(bias_ND, added_ND.dtype)
        return added_ND

    def evaluate(self, x_ND: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Returns the residual stream in an evaluation, or a prediction on a device: no capacity, dropout or losses."""
        y_ND, _, scores_NE = self.scores(self.local_rows(x_ND), weights)
        routing = self.route(scores_NE, self.expert_bias(weights), None, self.drop_policy)
        gates_Nk = self.gates(scores_NE, routing[0])
        added_ND = self.experts(y_ND, gates_Nk, routing, weights)
        if self.output_scale != 1:
            added_ND = added_ND * self.output_scale
        return x_ND + added_ND


class MoeFunction:
    """The feed-forward sublayer of one MoE layer.

    Args:
        function: The sublayer of all layers.
        weights: In the order of `moe_shapes`.
        capacity: Tokens of a micro-batch -> expert capacity in a training, or None.
        reached: Whether a gradient flows through it.
        recomputed: Compute its activations again in the backward pass.
    """

    def __init__(
        self, function: MoeLayer, layer: int, weights: Sequence[Parameter], capacity: Callable[[int], int | None], *,
        reached: bool, recomputed: bool,
    ) -> None:  # fmt: skip
        self.function = function
        self.layer = layer
        self.weights = weights
        self.capacity = capacity
        self.reached = reached
        self.keeps_activations = reached and not recomputed

    def __call__(
        self, x_ND: Tensor, sequence_weights: SequenceWeights | None = None,
        mask: Callable[[], Tensor | None] = lambda: None, statistics: RouterStatistics | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Returns the residual stream, the auxiliary loss and the z-loss.

        Args:
            mask: Draws the dropout mask of the sublayer's output.
            statistics: None in an evaluation: the losses are None.
        """
        # Compiled pieces take views, see cell_parts.py; the grouped product reads the stacked experts where they are.
        views = [_view_matrix(weight) for weight in self.weights]
        if statistics is None:
            return self.function.evaluate(x_ND, views), None, None
        assert sequence_weights is not None  # a training has them
        capacity = self.capacity(x_ND.shape[0] * self.function.sharing)
        shares = None
        if statistics.load is not None:
            shares = statistics.load.layer_load(self.layer)

        def train(x_ND: Tensor, views: Sequence[Tensor], routing: Routing | None = None) -> tuple:
            return self.function.train(x_ND, views, sequence_weights, mask(), capacity, routing, shares)

        if not self.reached:
            with _no_grad():
                x_ND, aux_loss, z_loss, routing, scores_NE = train(x_ND, views)
        elif self.keeps_activations:
            x_ND, aux_loss, z_loss, routing, scores_NE = train(x_ND, views)
        else:
            argnums = [argnum for argnum, weight in enumerate(self.weights) if weight.requires_grad]
            call = _RecomputedExperts(train, views, argnums)
            # All are views: the gradient within the cell's bprop would call the hooks of parameters once more.
            trained = [views[argnum].view(views[argnum].shape) for argnum in argnums]
            x_ND, aux_loss, z_loss = call(x_ND, *trained)
            routing = call.routing
            scores_NE = call.scores_NE
        statistics.routings.append((self.layer, routing, scores_NE))
        return x_ND, aux_loss, z_loss


def _view_matrix(weight: Parameter) -> Tensor:
    if weight.ndim == 3:
        return weight
    return weight.view(weight.shape)


class _RecomputedExperts(nn.Cell):
    """One call that keeps its inputs and the routing, and runs again in the backward pass, with the same routing.

    `compute` is (x_ND, weights, routing or None) -> the result of `MoeLayer.train`; `argnums` says which of the weights
    `views` are trained.
    """

    def __init__(self, compute: Callable, views: Sequence[Tensor], argnums: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        self.compute = compute
        self.views = views
        self.argnums = argnums
        self.gradients = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, x_ND: Tensor, *trained: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the experts without recording them, and keeps the routing for `bprop`."""
        x_ND, aux_loss, z_loss, self.routing, self.scores_NE = self.compute(x_ND, self.views)
        # A new tensor: a result leads to this cell's `bprop`, and without a z-loss all calls share one tensor for it.
        return x_ND, aux_loss, z_loss + 0

    def recompute(self, x_ND: Tensor, *trained: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the results of `construct` from these trained weights, with the routing of the first run."""
        views = list(self.views)
        for argnum, weight in zip(self.argnums, trained, strict=True):
            views[argnum] = weight
        return self.compute(x_ND, views, self.routing)[:3]

    def bprop(self, x_ND: Tensor, *trained_out_grads: Any) -> tuple[Tensor, ...]:
        """Returns the gradients of x and of the trained weights."""
        trained = trained_out_grads[: len(self.argnums)]
        grads = trained_out_grads[-1]
        return self.gradients(self.recompute)(x_ND, *trained, grads)
