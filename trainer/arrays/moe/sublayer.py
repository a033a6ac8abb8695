"""The sublayer with experts on arrays: norm, router, dispatch, experts, shared experts, residual stream.

Ranks that share the experts exchange tokens in one of Megatron-LM's two ways, see `trainer.arrays.moe.dispatch`.

Legend: N = B * T tokens of B sequences, n rows of the residual stream that a rank sends to experts, D hidden, E
experts, k chosen by a token, S ranks that hold all experts, e = E / S experts of a rank, R rows of this rank's tokens,
Q rows that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor

from trainer.arrays.memory import empty
from trainer.arrays.mlp import CpuMlp
from trainer.arrays.moe.dispatch import token_dispatcher
from trainer.arrays.moe.experts import CpuExperts, ExpertWeights
from trainer.arrays.moe.router import CpuRouter, sigmoid
from trainer.arrays.tiles import RmsNorm, SublayerCall, WeightGradients
from trainer.models.spec.model import MlpSpec
from trainer.models.spec.names import EXPERT_BIAS, EXPERT_DOWN_BIAS, MLP_NORM, ROUTER, SHARED_GATE
from trainer.ops.routing import Routing, RoutingRule, local_routing, route

if TYPE_CHECKING:
    from trainer.arrays.moe.router import RoutedTokens, RouterLabels, Shares
    from trainer.arrays.tiles import Arrays, Gradients, Scratch, Tile
    from trainer.config.schema.moe import MoEConfig
    from trainer.models.spec.model import MoeSpec
    from trainer.ops.routing import DropPolicy
    from trainer.parallel.host_group import CpuGroup
    from trainer.parallel.tensor import TensorParallel

_EXPERTS = {field: f"mlp.experts.{field}_proj.weight" for field in ("gate", "up", "down")} | {"bias": EXPERT_DOWN_BIAS}
_SHARED = "mlp.shared_experts."


@dataclass(frozen=True)
class MoeInputs:
    """What one call needs besides tokens and weights.

    Attributes:
        labels: Of the tokens that this rank sends to experts; None in a prediction: there are no losses.
        capacity: Most tokens that an expert computes, or None.
        shares: For gbs_aux_loss, see `Shares`.
        routing: The routing of an earlier pass, to be repeated; None: the router decides.
    """

    labels: RouterLabels | None = None
    capacity: int | None = None
    shares: Shares | None = None
    routing: Routing | None = None


class CpuMoe:
    """The sublayer of all layers with experts.

    Args:
        spec: Of the whole model's experts; with the width of this rank's shared experts.
        rule: How tokens choose experts.
        tensor: The tensor-parallel ranks, which share the rows of the residual stream for the experts.
        experts: The ranks that share the experts; None: this rank has all of them.
        predicts: All ranks have the same tokens, each computes its experts for them, and they add up the results.
    """

    def __init__(
        self, spec: MoeSpec, moe: MoEConfig, rule: RoutingRule, scratch: Scratch, tensor: TensorParallel | None = None,
        experts: CpuGroup | None = None, predicts: bool = False,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.rule = rule
        self.drop_policy: DropPolicy = moe.drop_policy
        self.scratch = scratch
        self.group = experts
        # The rank takes its rows of a residual stream that is the same on all ranks of its tensor-parallel group.
        if tensor is not None and not tensor.sequence_parallel:
            self.divides = tensor
        else:
            self.divides = None
        self.norm = RmsNorm(spec.hidden, spec.eps)
        self.router = CpuRouter(moe)
        self.experts = CpuExperts(scratch)
        self.dispatcher = token_dispatcher(self.experts, moe, experts)
        self.shared: CpuMlp | None = None
        if spec.shared_width:
            rows = tensor
            if tensor is not None and not predicts:
                rows = tensor._replace(sequence_parallel=True)
            shared = MlpSpec(spec.hidden, spec.shared_width, spec.eps)
            self.shared = CpuMlp(shared, scratch, rows, prefix=_SHARED, is_sublayer=False)

    def forward(
        self, call: SublayerCall, x_ND: np.ndarray, inputs: MoeInputs
    ) -> tuple[Tensor, MoePass]:
        """Returns the residual stream after the sublayer, and all that the pass has computed."""
        if self.divides is None:
            rows_ND = x_ND
        else:
            rows_ND = x_ND[self.divides.token_shard(len(x_ND))]
        passed = MoePass(inputs, rows_ND, *self._normed(call, rows_ND))
        self._route(call, passed)
        added_ND, passed.dispatched = self.dispatcher.forward(
            passed.y_ND, passed.gates_Nk, _expert_weights(call.weights), passed.routing
        )
        if self.shared is not None:
            added_ND += self._shared_forward(call, passed)
        if self.divides is not None:
            added_ND = self.divides.group.all_gather_rows(added_ND)
        result, out_ND = empty(*x_ND.shape)

        def add(tile: Tile) -> None:
            added_nD = added_ND[tile.rows]
            if _drops(call, self.spec):
                mask_nD = call.dropout.rows("mlp_output", tile.rows, added_nD.shape[1])
                mask_nD *= added_nD
                added_nD = mask_nD
            np.add(x_ND[tile.rows], added_nD, out=out_ND[tile.rows])

        self.scratch.run(len(x_ND), add)
        return result, passed

    def predict(self, call: SublayerCall, x_ND: np.ndarray, thread: int) -> np.ndarray:
        """Returns the residual stream after the sublayer for few tokens, which all ranks have."""
        weights = call.weights
        y_ND = np.empty_like(x_ND)
        self.norm(x_ND, weights[MLP_NORM], self.norm.scales(x_ND), y_ND)
        gates_Nk, routing = self.router.choose(
            y_ND, weights[ROUTER], lambda scores_NE: route(self.rule, scores_NE, weights.get(EXPERT_BIAS))
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
        return x_ND + added_ND

    def _normed(self, call: SublayerCall, rows_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the normed rows and the factor of each."""
        y_ND = empty(*rows_ND.shape)[1]
        scale_N = np.empty(len(rows_ND), np.float32)

        def compute(tile: Tile) -> None:
            scale_N[tile.rows] = self.norm.scales(rows_ND[tile.rows])
            self.norm(rows_ND[tile.rows], call.weights[MLP_NORM], scale_N[tile.rows], y_ND[tile.rows])

        self.scratch.run(len(rows_ND), compute)
        return y_ND, scale_N

    def _route(self, call: SublayerCall, passed: MoePass) -> None:
        inputs = passed.inputs
        shared = None
        if inputs.labels is not None:
            shared = inputs.labels.shared
        bias_E = call.weights.get(EXPERT_BIAS)

        def decide(scores_NE: np.ndarray) -> Routing:
            if inputs.routing is not None:
                return inputs.routing
            return route(self.rule, scores_NE, bias_E, inputs.capacity, self.drop_policy, shared)

        if inputs.labels is None:
            passed.gates_Nk, passed.routing = self.router.choose(passed.y_ND, call.weights[ROUTER], decide)
            return
        passed.routed = self.router.forward(passed.y_ND, call.weights[ROUTER], inputs.labels, decide, inputs.shares)
        passed.gates_Nk = passed.routed.gates_Nk
        passed.routing = passed.routed.routing

    def _shared_forward(self, call: SublayerCall, passed: MoePass) -> np.ndarray:
        """Returns what the shared experts add, [n, D]."""
        passed.shared = SublayerCall(call.weights, save=call.save)
        out_ND = self.shared.forward(passed.shared, passed.y_ND).asnumpy()
        if SHARED_GATE not in call.weights:
            return out_ND
        passed.share_N1 = sigmoid(passed.y_ND @ call.weights[SHARED_GATE].T)
        passed.shared_out_ND = out_ND
        return out_ND * passed.share_N1

    def backward(
        self, call: SublayerCall, passed: MoePass, grad_ND: np.ndarray, grad_aux_loss: np.ndarray,
        grad_z_loss: np.ndarray,
    ) -> tuple[Tensor, Gradients]:  # fmt: skip
        """Returns the gradients of x and of the trained weights. `passed` is used up."""
        gradients = call.gradients
        added_ND = grad_ND
        if _drops(call, self.spec):
            added_ND = empty(*grad_ND.shape)[1]

            def drop(tile: Tile) -> None:
                mask_nD = call.dropout.rows("mlp_output", tile.rows, grad_ND.shape[1])
                np.multiply(grad_ND[tile.rows], mask_nD, out=added_ND[tile.rows])

            self.scratch.run(len(grad_ND), drop)
        if self.divides is not None:
            added_ND = added_ND[self.divides.token_shard(len(grad_ND))]
        of_experts = [field for field, name in _EXPERTS.items() if name in gradients.trained]
        weights = _expert_weights(call.weights)
        found = self.dispatcher.backward(
            passed.y_ND, passed.gates_Nk, weights, passed.routing, passed.dispatched, added_ND, of_experts
        )
        grad_y_ND = found.x_ND
        gradients.tensors.update({_EXPERTS[field]: tensor for field, tensor in found.weights.items()})
        if self.shared is not None:
            grad_y_ND += self._shared_gradient(call, passed, added_ND)
        of_router_ED = self.router.backward(
            passed.y_ND, call.weights[ROUTER], passed.inputs.labels, passed.routed, found.gates_Nk, grad_aux_loss,
            grad_z_loss, grad_y_ND,
        )  # fmt: skip
        if ROUTER in gradients.trained:
            gradients.tensors[ROUTER] = Tensor(of_router_ED)
        result, out_ND = empty(*grad_ND.shape)

        def through_norm(tile: Tile) -> None:
            grad_nD = grad_y_ND[tile.rows]
            self.norm.backward(call, MLP_NORM, passed.rows_ND[tile.rows], grad_nD, tile, passed.scale_N[tile.rows])
            if self.divides is None:
                np.add(grad_nD, grad_ND[tile.rows], out=out_ND[tile.rows])

        self.scratch.run(len(grad_y_ND), through_norm)
        if self.divides is not None:
            np.add(self.divides.group.all_gather_rows(grad_y_ND), grad_ND, out=out_ND)
        return result, gradients.compute()

    def _shared_gradient(self, call: SublayerCall, passed: MoePass, grad_ND: np.ndarray) -> np.ndarray:
        """Returns what the shared experts add to the gradient of y; adds the gradients of their weights."""
        gradients = call.gradients
        of_score_N1 = None
        if passed.share_N1 is not None:
            share_N1 = passed.share_N1
            of_score_N1 = np.einsum("nd,nd->n", grad_ND, passed.shared_out_ND)[:, None] * share_N1 * (1 - share_N1)
            grad_ND = grad_ND * share_N1
        passed.shared.gradients = WeightGradients(gradients.trained)
        result, found = self.shared.backward(passed.shared, passed.y_ND, grad_ND)
        gradients.tensors.update(found)
        of_y_ND = result.asnumpy()
        if of_score_N1 is not None:
            of_y_ND += of_score_N1 * call.weights[SHARED_GATE]
            if SHARED_GATE in gradients.trained:
                gradients.tensors[SHARED_GATE] = Tensor(of_score_N1.T @ passed.y_ND)
        return of_y_ND


@dataclass
class MoePass:
    """What a forward pass has computed, most of which the backward pass needs."""

    inputs: MoeInputs
    rows_ND: np.ndarray
    y_ND: np.ndarray
    scale_N: np.ndarray
    gates_Nk: np.ndarray | None = None
    routing: Routing | None = None
    routed: RoutedTokens | None = None
    dispatched: Any = None
    shared: SublayerCall | None = None
    share_N1: np.ndarray | None = None
    shared_out_ND: np.ndarray | None = None


def _drops(call: SublayerCall, spec: MoeSpec) -> bool:
    return call.dropout is not None and spec.output_dropout > 0


def _expert_weights(weights: Arrays) -> ExpertWeights:
    return ExpertWeights(*(weights.get(name) for name in _EXPERTS.values()))
