"""The feed-forward half of a layer with experts: norm, router, dispatch, experts, combine, shared experts.

It runs operator by operator around compiled pieces: which tokens go where is known only when the router has spoken.

Legend: N = B * T tokens of B rows, D hidden, E experts, k chosen for a token, R sorted assignments, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.models.recompute import compile_cell
from trainer.models.shapes import EXPERT_BIAS, moe_shapes
from trainer.ops.routing import Routing, RoutingCounts

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.models.inputs import SequenceWeights
    from trainer.ops.kernel_set import KernelSet


@dataclass
class RouterStatistics:
    """What the routers of one forward pass of a training leave beside the residual stream.

    Attributes:
        shares: Which token belongs to which row, for the balance loss.
        balance, z: Sums of both losses over the layers, float32 scalars; None before the first layer with experts.
        routings: (layer, its routing, the router's scores), one for each layer with experts, in forward order; arrays
            or tensors, as the routing was decided on the host or in a graph.
    """

    shares: SequenceWeights | None
    balance: Tensor | None = None
    z: Tensor | None = None
    routings: list[tuple[int, Any, Any]] = field(default_factory=list)

    def add(self, balance: Tensor, z: Tensor) -> None:
        self.balance = balance if self.balance is None else self.balance + balance
        self.z = z if self.z is None else self.z + z

    def counts(self) -> RoutingCounts | None:
        """What was recorded, on the host; None without experts."""
        if not self.routings:
            return None
        layers, routings, scores = zip(*self.routings, strict=True)
        return RoutingCounts(
            layers=layers,
            kept=np.stack([np.asarray(routing.kept_E) for routing in routings]),
            requested=np.stack([np.asarray(routing.requested_E) for routing in routings]),
            entropy=np.array([_entropy(np.asarray(scores_NE)) for scores_NE in scores]),
        )


def _entropy(scores_NE: np.ndarray) -> float:
    """Mean over tokens of the entropy of the normalised scores, in nats."""
    p_NE = scores_NE / (scores_NE.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return float(-(p_NE * np.log(p_NE + np.float32(1e-20))).sum(axis=1, dtype=np.float64).mean())


class Router(nn.Cell):
    """(x_ND, norm_D, router_ED) -> (normalised x_ND, logits_NE, scores_NE); logits and scores in float32."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.norm = kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps)
        self.product, self.cast = kernels.router_linear(), P.Cast()
        self.sigmoid_scores = settings.experts.score_function == "sigmoid"
        self.softmax, self.sigmoid = P.Softmax(), P.Sigmoid()

    def construct(self, x_ND, norm_D, router_ED):
        y_ND = self.norm(x_ND, norm_D)
        logits_NE = self.product(self.cast(y_ND, mstype.float32), router_ED)
        scores_NE = self.sigmoid(logits_NE) if self.sigmoid_scores else self.softmax(logits_NE)
        return y_ND, logits_NE, scores_NE


class Gates(nn.Cell):
    """(scores_NE, experts_Nk) -> gates_Nk: what each chosen expert's output is multiplied by."""

    def __init__(self, settings: ModelConfig) -> None:
        super().__init__()
        moe = settings.experts
        self.normalised, self.factor = moe.norm_topk_prob, moe.routed_scaling_factor
        self.gather, self.matmul = P.GatherD(), P.MatMul()
        self.ones_kk = Tensor(np.ones((moe.num_experts_chosen,) * 2, np.float32))

    def construct(self, scores_NE, experts_Nk):
        gates_Nk = self.gather(scores_NE, 1, experts_Nk)
        if self.normalised:
            gates_Nk = gates_Nk / (self.matmul(gates_Nk, self.ones_kk) + 1e-20)
        return gates_Nk if self.factor == 1 else gates_Nk * self.factor


class RouterLosses(nn.Cell):
    """(logits_NE, scores_NE, experts_Nk, ...) -> (balance, z): sums that are to be divided by the valid tokens.

    balance: DeepSeek-V3's loss of one sequence (equations 17 to 20), sum_e f_e P_e with f_e = E / (k T) x assignments
    to e and P_e the mean of the normalised scores, 1 when all is even, times the sequence's valid tokens. A loss over
    the whole batch would change when the batch is cut into micro-batches or spread over ranks; this one does not.
    z: sum over valid tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5).
    """

    def __init__(self, settings: ModelConfig) -> None:
        super().__init__()
        moe = settings.experts
        self.experts, self.even = moe.expert_num, moe.expert_num / moe.num_experts_chosen
        self.normalise, self.with_z = moe.score_function == "sigmoid", moe.z_loss_factor > 0
        self.one_hot, self.matmul, self.matmul_at = P.OneHot(), P.MatMul(), P.MatMul(transpose_a=True)
        self.ones_EE = Tensor(np.ones((self.experts, self.experts), np.float32))
        self.ones_E1 = Tensor(np.ones((self.experts, 1), np.float32))
        self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)

    def construct(self, logits_NE, scores_NE, experts_Nk, mean_BN, mean_BR, tokens_B1, valid_N1):
        # mean_BN, mean_BR: 1 / T where a token, or one of its assignments, belongs to the row
        assigned_RE = self.one_hot(experts_Nk.reshape(-1), self.experts, self.on, self.off)
        load_BE = ops.stop_gradient(self.matmul(mean_BR, assigned_RE) * self.even)
        if self.normalise:
            scores_NE = scores_NE / (self.matmul(scores_NE, self.ones_EE) + 1e-20)
        uneven_BE = load_BE * self.matmul(mean_BN, scores_NE)
        balance = self.matmul_at(tokens_B1, self.matmul(uneven_BE, self.ones_E1)).reshape(())
        if not self.with_z:
            return balance, self.off
        largest_N1 = ops.stop_gradient(ops.amax(logits_NE, 1, True))
        rest_N1 = self.matmul(ops.exp(logits_NE - largest_N1), self.ones_E1)
        total_N1 = largest_N1 + ops.log1p(rest_N1 - 1.0)
        return balance, self.matmul_at(valid_N1, total_N1 * total_N1).reshape(())


class SharedExperts(nn.Cell):
    """The experts of every token, as one wide SwiGLU: (y_ND, gate_SD, up_SD, down_DS) -> [N, D]."""

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__()
        self.gate, self.up, self.down = kernels.linear(), kernels.linear(), kernels.linear()
        self.swiglu = kernels.swiglu()

    def construct(self, y_ND, gate_SD, up_SD, down_DS):
        return self.down(self.swiglu(self.gate(y_ND, gate_SD), self.up(y_ND, up_SD)), down_DS)


class TokenDispatcher:
    """Brings tokens to their experts and back, within one device.

    Between permute and un-permute stands the exchange between ranks where experts are spread over several: a dispatcher
    of those has the same two functions.
    """

    def __init__(self, kernels: KernelSet) -> None:
        self.permute, self.unpermute = kernels.permute(), kernels.unpermute()

    def dispatch(self, x_ND: Tensor, routing: Any) -> tuple[Tensor, Tensor]:
        """Rows sorted by expert [R, D], and how many of them each expert has [E]."""
        return self.permute(x_ND, routing), routing.counts_E

    def combine(self, y_RD: Tensor, gates_Nk: Tensor, routing: Any) -> Tensor:
        """What the experts made of each token, weighted and added up: [N, D]."""
        return self.unpermute(y_RD, gates_Nk, routing)


class MoeLayer:
    """(x_ND, weights) -> x_ND with what the experts add; serves all layers, like a compiled block.

    Args:
        settings: The model section.
        kernels: What it is built from.
        compiled: Compile its pieces (context.mode 0).
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, compiled: bool) -> None:
        moe = settings.experts
        self.moe, self.names = moe, list(moe_shapes(settings))
        self.has_shared = settings.shared_expert_size > 0
        pieces = (
            kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps),
            Router(settings, kernels),
            Gates(settings),
            RouterLosses(settings),
            SharedExperts(kernels),
            kernels.swiglu(),
        )
        made = [compile_cell(piece, compiled) for piece in pieces]
        self.norm, self.router, self.gates, self.losses, self.shared, self.swiglu = made
        self.cpu_router = kernels.cpu_router(moe) if kernels.cpu_router else None
        self.cpu_experts = kernels.cpu_experts() if kernels.cpu_experts else None
        self.route = kernels.route(
            moe.expert_num,
            moe.num_experts_chosen,
            groups=moe.n_group or 1,
            chosen_groups=moe.topk_group or moe.n_group or 1,
            group_score=moe.group_score,
            safe_tokens=moe.use_gmm and moe.enable_gmm_safe_tokens,
        )
        self.dispatcher = TokenDispatcher(kernels)
        self.gate, self.up, self.down = (kernels.grouped_matmul() for _ in range(3))

    def rule(self, tokens: int, weights: Sequence[Tensor], drops: bool) -> tuple[Tensor | None, int | None, str]:
        """What the choice depends on beside the scores; tokens over capacity are dropped in training only."""
        bias_E = weights[self.names.index(EXPERT_BIAS)] if EXPERT_BIAS in self.names else None
        return bias_E, self.moe.capacity(tokens) if drops else None, self.moe.drop_policy

    def experts(self, y_ND: Tensor, gates_Nk: Tensor, routing: Any, weights: Sequence[Tensor]) -> Tensor:
        """What routed and shared experts add to the residual stream, [N, D]."""
        gate_EFD, up_EFD, down_EDF = (weights[self.names.index(f"mlp.experts.{name}_proj.weight")] for name in _NAMES)
        if self.cpu_experts is not None:  # all experts are here: nothing is exchanged between dispatch and combine
            added_ND = self.cpu_experts(y_ND, gates_Nk, gate_EFD, up_EFD, down_EDF, routing)
        else:
            routing = Routing(*(part if isinstance(part, Tensor) else Tensor.from_numpy(part) for part in routing))
            rows_RD, counts_E = self.dispatcher.dispatch(y_ND, routing)
            inner_RF = self.swiglu(self.gate(rows_RD, gate_EFD, counts_E), self.up(rows_RD, up_EFD, counts_E))
            added_ND = self.dispatcher.combine(self.down(inner_RF, down_EDF, counts_E), gates_Nk, routing)
        if self.has_shared:
            first = self.names.index("mlp.shared_experts.gate_proj.weight")
            added_ND = added_ND + self.shared(y_ND, *weights[first : first + 3])
        return added_ND

    def __call__(self, x_ND: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Evaluation and prediction: nothing is dropped, no losses."""
        y_ND, _, scores_NE = self.router(x_ND, weights[0], weights[1])
        routing = self.route(scores_NE, *self.rule(scores_NE.shape[0], weights, drops=False))
        return x_ND + self.experts(y_ND, self.gates(scores_NE, routing.experts_Nk), routing, weights)

    def train(
        self,
        x_ND: Tensor,
        weights: Sequence[Tensor],
        shares: SequenceWeights,
        dropped_ND: Tensor | None,
        routing: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Any, Tensor]:
        """A layer of a training.

        Args:
            x_ND: Residual stream.
            weights: In the order of `moe_shapes`.
            shares: Of the micro-batch.
            dropped_ND: Mask of the dropout on what is added, or None.
            routing: That of an earlier pass, to be repeated; None: the router decides.

        Returns:
            Residual stream, balance and z loss, the routing, the router's scores.
        """
        if self.cpu_router is not None:
            y_ND = self.norm(x_ND, weights[0])
            gates_Nk, balance, z, routing, scores_NE = self.routed_on_host(y_ND, weights, shares, routing)
        else:
            y_ND, logits_NE, scores_NE = self.router(x_ND, weights[0], weights[1])
            if routing is None:
                routing = self.route(scores_NE, *self.rule(scores_NE.shape[0], weights, drops=True))
            gates_Nk = self.gates(scores_NE, routing.experts_Nk)
            balance, z = self.losses(logits_NE, scores_NE, routing.experts_Nk, *shares)
        added_ND = self.experts(y_ND, gates_Nk, routing, weights)
        return x_ND + (added_ND if dropped_ND is None else added_ND * dropped_ND), balance, z, routing, scores_NE

    def routed_on_host(
        self, y_ND: Tensor, weights: Sequence[Tensor], shares: SequenceWeights, routing: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any, np.ndarray]:
        """Gates, balance and z loss, routing and scores, as of the cells with the choice between them."""
        rule = self.rule(y_ND.shape[0], weights, drops=True)

        def decide(scores_NE: np.ndarray) -> Any:
            return self.route.of_arrays(scores_NE, *rule) if routing is None else routing

        return self.cpu_router(y_ND, weights[1], shares.tokens_B1, shares.valid_N1, decide)


class MoePart:
    """The feed-forward half of one layer with experts: (x_ND, mask of its dropout, tally) -> x_ND.

    Args:
        function: Of all layers.
        layer: Its number.
        weights: In the order of `moe_shapes`.
        reached: Whether a gradient flows through it.
        recomputed: Compute its activations again in the backward pass.
    """

    def __init__(
        self, function: MoeLayer, layer: int, weights: Sequence[Parameter], *, reached: bool, recomputed: bool
    ) -> None:
        self.function, self.layer, self.weights = function, layer, weights
        self.keeps_activations = reached and not recomputed

    def __call__(
        self, x_ND: Tensor, mask: Callable[[], Tensor | None] = lambda: None, statistics: RouterStatistics | None = None
    ) -> Tensor:
        # Compiled pieces take views, see decoder.py; the grouped product reads the stacked experts where they are.
        views = [weight if weight.ndim == 3 else weight.view(weight.shape) for weight in self.weights]
        if statistics is None:
            return self.function(x_ND, views)
        if self.keeps_activations:
            x_ND, balance, z, routing, scores_NE = self.function.train(x_ND, views, statistics.shares, mask())
        else:
            trained = [place for place, weight in enumerate(self.weights) if weight.requires_grad]
            once = _Replayed(self.function, views, trained, statistics.shares, mask)
            x_ND, balance, z = once(x_ND, *(views[place] for place in trained))
            routing, scores_NE = once.routing, once.scores_NE
        statistics.add(balance, z)
        statistics.routings.append((self.layer, routing, scores_NE))
        return x_ND


class _Replayed(nn.Cell):
    """One call that keeps what enters it and the routing, and runs again in the backward pass, with that routing."""

    def __init__(
        self,
        function: MoeLayer,
        views: Sequence[Tensor],
        trained: Sequence[int],
        shares: SequenceWeights,
        mask: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.function, self.views, self.trained = function, views, trained
        self.shares, self.mask = shares, mask
        self.gradients = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, x_ND, *trained):
        x_ND, balance, z, self.routing, self.scores_NE = self.function.train(x_ND, self.views, self.shares, self.mask())
        return x_ND, balance, z

    def again(self, x_ND, *trained):
        views = list(self.views)
        for place, weight in zip(self.trained, trained, strict=True):
            views[place] = weight
        return self.function.train(x_ND, views, self.shares, self.mask(), self.routing)[:3]

    def bprop(self, x_ND, *trained_out_grads):
        trained, grads = trained_out_grads[: len(self.trained)], trained_out_grads[-1]
        return self.gradients(self.again)(x_ND, *trained, grads)


_NAMES = ("gate", "up", "down")
