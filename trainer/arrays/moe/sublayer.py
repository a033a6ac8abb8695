"""The feed-forward sublayer of an MoE layer on arrays: norm, router, dispatch, experts, shared experts, residual.

Ranks that share the experts exchange tokens in one of Megatron-LM's two ways, see `trainer.arrays.moe.dispatch`.

Legend: N = B * T tokens of B sequences, n rows of the residual stream that a rank sends to experts, D hidden, E
experts, k chosen by a token, S ranks that hold all experts, e = E / S experts of a rank, R rows of this rank's tokens,
Q rows that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainer.arrays.memory import empty
from trainer.arrays.mlp import CpuMlp
from trainer.arrays.moe.dispatch import token_dispatcher
from trainer.arrays.moe.experts import CpuExperts, ExpertWeights
from trainer.arrays.moe.router import CpuRouter, sigmoid
from trainer.arrays.sublayer import add_to_stream
from trainer.arrays.tiles import CpuRmsNorm, SublayerCall, WeightGradients
from trainer.models.spec.model import MlpSpec
from trainer.models.spec.names import (
    EXPERT_BIAS,
    EXPERT_DOWN_BIAS,
    EXPERT_GATE_BIAS,
    EXPERT_UP_BIAS,
    MLP_NORM,
    ROUTER,
    ROUTER_BIAS,
    SHARED_GATE,
)
from trainer.ops.routing import Routing, RoutingRule, local_routing, route

if TYPE_CHECKING:
    from trainer.arrays.moe.router import RoutedTokens, RouterLabels, Shares
    from trainer.arrays.tiles import Arrays, Gradients, Scratch, Tile
    from trainer.config.schema.moe import MoEConfig
    from trainer.models.spec.model import MoeSpec
    from trainer.ops.routing import DropPolicy
    from trainer.parallel.host_group import CpuGroup
    from trainer.parallel.tensor import TensorParallel

_EXPERTS = {
    **{field: f"mlp.experts.{field}_proj.weight" for field in ("gate", "up", "down")},
    "bias": EXPERT_DOWN_BIAS, "gate_bias": EXPERT_GATE_BIAS, "up_bias": EXPERT_UP_BIAS,
}  # fmt: skip
_SHARED = "mlp.shared_experts."
_SITE = "mlp_output"  # of dropout


@dataclass(frozen=True)
class MoeInputs:
    """The inputs of one call besides tokens and weights.

    Attributes:
        labels: The loss tokens among those that this rank sends to experts; None in a prediction, which has no losses.
        capacity: The expert capacity, or None.
        shares: For gbs_aux_loss, see `Shares`.
        routing: The routing of an earlier pass, which this one repeats; None: the router decides.
    """

    labels: RouterLabels | None = None
    capacity: int | None = None
    shares: Shares | None = None
    routing: Routing | None = None


class CpuMoe:
    """The feed-forward sublayer of all MoE layers.

    Args:
        spec: With the experts of all ranks, and the width of this rank's shared experts.
        rule: How tokens choose experts.
        tensor: The tensor-parallel ranks, which share the rows of the residual stream for the experts.
        experts: The ranks that shard the experts; None: this rank has all of them.
        predicts: All ranks have the same tokens; each computes its experts for them, and they sum the results.
    """

    def __init__(
        self, spec: MoeSpec, moe: MoEConfig, rule: RoutingRule, scratch: Scratch, tensor: TensorParallel | None = None,
        experts: CpuGroup | None = None, predicts: bool = False,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.rule = rule
        self.drop_policy = cast("DropPolicy", moe.drop_policy)
        self.scratch = scratch
        self.group = experts
        # Tensor-parallel ranks that all have the full residual stream: each sends its rows to the experts.
        self.row_ranks: TensorParallel | None = None
        if tensor is not None and not tensor.sequence_parallel:
            self.row_ranks = tensor._replace(sequence_parallel=True)
        self.scale = np.float32(spec.output_scale)
        self.norm = CpuRmsNorm(spec.norm)
        self.router = CpuRouter(moe)
        clamp = None
        if spec.swiglu_limit is not None:
            clamp = spec.swiglu_limit, spec.swiglu_alpha
        self.experts = CpuExperts(scratch, clamp)
        self.dispatcher = token_dispatcher(self.experts, moe, experts)
        self.shared: CpuMlp | None = None
        if spec.shared_width:
            rows = tensor
            if tensor is not None and not predicts:
                rows = tensor._replace(sequence_parallel=True)
            shared = MlpSpec(spec.hidden, spec.shared_width, spec.norm)
            self.shared = CpuMlp(shared, scratch, rows, prefix=_SHARED, is_sublayer=False)

    def forward(
        self, call: SublayerCall, x_ND: np.ndarray, inputs: MoeInputs
    ) -> tuple[np.ndarray, MoePass]:
        """Returns the residual stream after the sublayer, and the arrays of the pass."""
        rows_ND = x_ND
        if self.row_ranks is not None:
            rows_ND = x_ND[self.row_ranks.token_shard(len(x_ND))]
        y_ND, scale_N = self._normed(call, rows_ND)
        gates_Nk, routing, routed = self._route(call, y_ND, inputs)
        added_ND, dispatched = self.dispatcher.forward(y_ND, gates_Nk, _expert_weights(call.weights), routing)
        passed = MoePass(inputs, rows_ND, y_ND, scale_N, gates_Nk, routing, routed, dispatched)
        if self.shared is not None:
            added_ND += self._shared_forward(self.shared, call, passed)
        if self.row_ranks is not None:
            added_ND = self.row_ranks.gather_tokens(added_ND)
        out_ND = empty(*x_ND.shape)
        dropout = call.dropout_of(self.spec.output_dropout)

        def add(tile: Tile) -> None:
            """Adds the experts' results to the residual stream, with dropout and factor."""
            rows = tile.rows
            add_to_stream(x_ND[rows], added_ND[rows], out_ND[rows], tile, _SITE, dropout, self.scale)

        self.scratch.run(len(x_ND), add)
        return out_ND, passed

    def predict(self, call: SublayerCall, x_ND: np.ndarray, thread: int) -> np.ndarray:
        """Returns the residual stream after the sublayer for few tokens, which all ranks have."""
        weights = call.weights
        y_ND = np.empty_like(x_ND)
        self.norm(x_ND, weights[MLP_NORM], self.norm.scales(x_ND), y_ND)
        gates_Nk, routing = self.router.choose(
            y_ND, weights[ROUTER], lambda scores_NE: route(self.rule, scores_NE, weights.get(EXPERT_BIAS)),
            weights.get(ROUTER_BIAS),
        )
        experts = _expert_weights(weights)
        if self.group is not None:
            routing = local_routing(routing.experts_Nk, self.group.rank, len(experts.gate))
        added_ND = self.experts.predict(y_ND, gates_Nk, experts, routing, thread)
        if self.group is not None:
            added_ND = self.group.all_reduce(added_ND)
        if self.shared is not None:
            shared_ND = self.shared.predict(call, y_ND, thread)
            if SHARED_GATE in weights:
                shared_ND *= sigmoid(y_ND @ weights[SHARED_GATE].T)
            added_ND = added_ND + shared_ND
        if self.scale != 1:
            added_ND = added_ND * self.scale
        return x_ND + added_ND

    def _normed(self, call: SublayerCall, rows_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the normed rows and the factor of each."""
        y_ND = empty(*rows_ND.shape)
        scale_N = np.empty(len(rows_ND), np.float32)

        def compute(tile: Tile) -> None:
            scale_N[tile.rows] = self.norm.scales(rows_ND[tile.rows])
            self.norm(rows_ND[tile.rows], call.weights[MLP_NORM], scale_N[tile.rows], y_ND[tile.rows])

        self.scratch.run(len(rows_ND), compute)
        return y_ND, scale_N

    def _route(
        self, call: SublayerCall, y_ND: np.ndarray, inputs: MoeInputs
    ) -> tuple[np.ndarray, Routing, RoutedTokens | None]:
        """Returns gates, routing, and for tokens with labels all results of the router."""
        shared = None
        if inputs.labels is not None:
            shared = inputs.labels.shared
        bias_E = call.weights.get(EXPERT_BIAS)

        def decide(scores_NE: np.ndarray) -> Routing:
            """Returns the routing of the forward pass, or decides it."""
            if inputs.routing is not None:
                return inputs.routing
            return route(self.rule, scores_NE, bias_E, inputs.capacity, self.drop_policy, shared)

        if inputs.labels is None:
            return *self.router.choose(y_ND, call.weights[ROUTER], decide, call.weights.get(ROUTER_BIAS)), None
        routed = self.router.forward(
            y_ND, call.weights[ROUTER], inputs.labels, decide, inputs.shares, call.weights.get(ROUTER_BIAS)
        )
        return routed.gates_Nk, routed.routing, routed

    def _shared_forward(self, shared: CpuMlp, call: SublayerCall, passed: MoePass) -> np.ndarray:
        """Returns the output of the shared experts, [n, D]."""
        passed.shared = SublayerCall(call.weights, save=call.save)
        out_ND = shared.forward(passed.shared, passed.y_ND)
        if SHARED_GATE not in call.weights:
            return out_ND
        passed.share_N1 = sigmoid(passed.y_ND @ call.weights[SHARED_GATE].T)
        passed.shared_out_ND = out_ND
        return out_ND * passed.share_N1

    def backward(
        self, call: SublayerCall, passed: MoePass, grad_ND: np.ndarray, grad_aux_loss: np.ndarray,
        grad_z_loss: np.ndarray,
    ) -> tuple[np.ndarray, Gradients]:  # fmt: skip
        """Returns the gradients of x and of the trained weights; overwrites the arrays of `passed`."""
        gradients = call.gradients
        added_grad_ND = grad_ND
        dropout = call.dropout_of(self.spec.output_dropout)
        if dropout is not None or self.scale != 1:
            added_grad_ND = empty(*grad_ND.shape)

            def change(tile: Tile) -> None:
                """Multiplies the gradients of a tile by the factor of the output and by its dropout mask."""
                np.multiply(grad_ND[tile.rows], self.scale, out=added_grad_ND[tile.rows])
                if dropout is not None:
                    added_grad_ND[tile.rows] *= dropout.rows(_SITE, tile.rows, grad_ND.shape[1])

            self.scratch.run(len(grad_ND), change)
        if self.row_ranks is not None:
            added_grad_ND = added_grad_ND[self.row_ranks.token_shard(len(grad_ND))]
        trained_experts = [field for field, name in _EXPERTS.items() if name in gradients.trained]
        expert_gradients = self.dispatcher.backward(
            passed.y_ND, passed.gates_Nk, _expert_weights(call.weights), passed.routing, passed.dispatched,
            added_grad_ND, trained_experts,
        )  # fmt: skip
        grad_y_ND = expert_gradients.x_ND
        gradients.arrays.update({_EXPERTS[field]: array for field, array in expert_gradients.weights.items()})
        if self.shared is not None:
            grad_y_ND += self._shared_gradient(self.shared, call, passed, added_grad_ND)
        assert passed.inputs.labels is not None and passed.routed is not None  # a training has labels
        logits_grad_NE = self.router.backward(
            call.weights[ROUTER], passed.inputs.labels, passed.routed, expert_gradients.gates_Nk, grad_aux_loss,
            grad_z_loss, grad_y_ND,
        )  # fmt: skip
        gradients.add(ROUTER, logits_grad_NE, passed.y_ND)
        gradients.add_bias(ROUTER_BIAS, logits_grad_NE)
        out_ND = empty(*grad_ND.shape)

        def through_norm(tile: Tile) -> None:
            """Takes the gradients of a tile back through the norm."""
            grad_nD = grad_y_ND[tile.rows]
            self.norm.backward(call, MLP_NORM, passed.rows_ND[tile.rows], grad_nD, tile, passed.scale_N[tile.rows])
            if self.row_ranks is None:
                np.add(grad_nD, grad_ND[tile.rows], out=out_ND[tile.rows])

        self.scratch.run(len(grad_y_ND), through_norm)
        if self.row_ranks is not None:
            np.add(self.row_ranks.gather_tokens(grad_y_ND), grad_ND, out=out_ND)
        return out_ND, gradients.compute()

    def _shared_gradient(
        self, shared: CpuMlp, call: SublayerCall, passed: MoePass, grad_ND: np.ndarray
    ) -> np.ndarray:
        """Returns the gradient of y through the shared experts, and adds the gradients of their weights."""
        assert passed.shared is not None
        gradients = call.gradients
        score_grad_N1 = None
        if passed.share_N1 is not None and passed.shared_out_ND is not None:
            share_N1 = passed.share_N1
            score_grad_N1 = np.einsum("nd,nd->n", grad_ND, passed.shared_out_ND)[:, None] * share_N1 * (1 - share_N1)
            grad_ND = grad_ND * share_N1
        passed.shared.gradients = WeightGradients(gradients.trained)
        y_grad_ND, weight_gradients = shared.backward(passed.shared, passed.y_ND, grad_ND)
        gradients.arrays.update(weight_gradients)
        if score_grad_N1 is not None:
            y_grad_ND += score_grad_N1 * call.weights[SHARED_GATE]
            if SHARED_GATE in gradients.trained:
                gradients.arrays[SHARED_GATE] = score_grad_N1.T @ passed.y_ND
        return y_grad_ND


@dataclass
class MoePass:
    """The arrays of a forward pass, most of which the backward pass needs.

    Attributes:
        routed: None in a prediction.
        dispatched: What the dispatcher saves for its backward pass.
        shared, share_N1, shared_out_ND: The call of the shared experts, their gate, and their output before the gate.
    """

    inputs: MoeInputs
    rows_ND: np.ndarray
    y_ND: np.ndarray
    scale_N: np.ndarray
    gates_Nk: np.ndarray
    routing: Routing
    routed: RoutedTokens | None
    dispatched: Any
    shared: SublayerCall | None = None
    share_N1: np.ndarray | None = None
    shared_out_ND: np.ndarray | None = None


def _expert_weights(weights: Arrays) -> ExpertWeights:
    arrays: dict[str, Any] = {field: weights.get(name) for field, name in _EXPERTS.items()}
    return ExpertWeights(**arrays)
