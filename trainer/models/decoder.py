"""The decoder: its parameters, and the order of its parts in one wiring for every mode.

The parts are native layers on arrays where a CPU computes them (`array_parts.py`), otherwise MindSpore cells
(`cell_parts.py`).

Legend: B sequences, T tokens, N = B * T, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mindspore import Parameter, Tensor, nn

from trainer.models.array_parts import ArrayParts
from trainer.models.cell_parts import CellParts
from trainer.models.compute_weights import ModelParams
from trainer.models.dropout import DropoutShards
from trainer.models.inputs import DecoderCall, LossSums, ModelInputs, RouterStatistics
from trainer.models.spec.build import model_spec
from trainer.models.spec.init import initial_value
from trainer.models.spec.names import (
    EXPERT_BIAS,
    HEAD,
    MAPPING_IN,
    MAPPING_OUT,
    layer_prefix,
)
from trainer.models.spec.shapes import (
    balanced_layers,
)
from trainer.ops.measures import metric_functions

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.routing import RoutingCounts
    from trainer.parallel.tensor import RankModelShard


class DecoderForward(nn.Cell):
    """The order of a decoder's parts: embedding, layers, head, multi-token prediction modules, total loss.

    It is the same for a run in explicit mode (`Decoder`) and the stages of its pipeline, for the exported graphs of the
    audit and for semi-automatic mode. Each supplies the parts and says why they must differ. `call` is what its parts
    need of one call:

    run_embedding(ids_N, call) -> x_ND
    run_layer(number, x_ND, call) -> x_ND, auxiliary loss and z loss of its router (None in a dense layer)
    run_merge(module, x_ND, call) -> x_ND, the input of the block of a multi-token prediction module
    run_head(number, x_ND, call) -> sum of token losses; 0 is the main model, `module + 1` a module

    The layers of the modules follow the main model's. Graphs are made of this code too, so it is what their compiler
    can read.
    """

    def __init__(self, settings: ModelConfig, num_layers: int, mtp_modules: int) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        self.num_layers = num_layers
        self.mtp_modules = mtp_modules
        self.mtp_factor = settings.mtp_loss_factor / max(1, mtp_modules)
        self.aux_factor = settings.balance_factor
        self.z_factor = moe.z_loss_factor if moe else 0.0

    def losses(self, ids_N, mtp_modules, call):
        """Returns the fields of `LossSums` but the last, with so many of the modules."""
        return self.run_layers(ids_N, range(self.num_layers), True, True, mtp_modules, call)[1]

    def run_layers(self, x, layers, is_first, is_last, mtp_modules, call):
        """Runs layers that follow each other: with `is_first` from the tokens ids_N on, otherwise from x_ND, with
        `is_last` up to the losses.

        Returns:
            The residual stream after the layers, before the final norm, and what these layers contribute to the fields
            of `LossSums` but the last.
        """
        x_ND = self.run_embedding(x, call) if is_first else x
        losses = (None, None)
        for layer in layers:
            x_ND, losses = self.add_layer(layer, x_ND, losses, call)
        tokens = None
        mtp = None
        if is_last:
            tokens = self.run_head(0, x_ND, call)
            for module in range(mtp_modules):
                x_ND = self.run_merge(module, x_ND, call)
                x_ND, losses = self.add_layer(self.num_layers + module, x_ND, losses, call)
                mtp = _sum(mtp, self.run_head(module + 1, x_ND, call))
        total = tokens
        if mtp is not None:
            total = total + mtp * self.mtp_factor
        aux_loss, z_loss = losses
        if aux_loss is not None and self.aux_factor:
            total = _sum(total, aux_loss * self.aux_factor)
        if z_loss is not None and self.z_factor:
            total = _sum(total, z_loss * self.z_factor)
        return x_ND, (total, tokens, aux_loss, z_loss, mtp)

    def add_layer(self, number, x_ND, losses, call):
        """Runs a layer; adds its router losses to the sums of both."""
        x_ND, aux_loss, z_loss = self.run_layer(number, x_ND, call)
        return x_ND, (_sum(losses[0], aux_loss), _sum(losses[1], z_loss))


def _sum(total, added):
    if added is None:
        return total
    return added if total is None else total + added


class Decoder(DecoderForward):
    """A Llama/Qwen style decoder in explicit mode: compiled blocks, called one after the other.

    Args:
        compiled: Compile the block and the head (context.mode 0), or run operator by operator (mode 1).
        frozen: Names of parameters that are not trained: no gradient of them is computed. The expert bias of a frozen
            router stays as it is, too.
        recomputed: For each layer what the backward pass recomputes: "block", "attention", "mlp" or "" for nothing. An
            empty sequence means nothing in all layers.
        shard: What this rank has of the model, and the ranks that it computes the rest with; None: the whole model. A
            stage of a pipeline calls the parts of the decoder itself.

    Parameters have Hugging Face's names; `parameters_by_name` maps them, those of adapters at the end.
    """

    def __init__(
        self,
        settings: ModelConfig,
        kernels: KernelSet,
        *,
        seed: int,
        compiled: bool = True,
        frozen: Collection[str] = (),
        recomputed: Sequence[str] = (),
        shard: RankModelShard | None = None,
    ) -> None:
        spec = model_spec(settings)
        super().__init__(settings, spec.num_layers, spec.mtp_modules)
        self.shard = shard
        self.tensor = None if shard is None else shard.tensor
        specs = spec.parameters()
        self.parameters_by_name = {
            name: Parameter(
                Tensor(initial_value(parameter, settings, seed, None if shard is None else shard.shard_spec(name))),
                name,
                requires_grad=name not in frozen and parameter.role != "buffer",
            )
            for name, parameter in specs.items()
            if shard is None or shard.holds(name)
        }
        dropout = DropoutShards(settings, shard)
        self.settings = settings
        self.kernels = kernels
        # The multi-token prediction modules use these of the main model again.
        shared = (HEAD, MAPPING_IN, MAPPING_OUT) if self.mtp_modules else ()
        self.compute_weights = ModelParams(
            self.parameters_by_name, kernels.compute_dtype, specs, experts=True, shared=shared
        )
        trained = {name for name, parameter in specs.items() if name not in frozen and parameter.role != "buffer"}
        self.balanced_layers = balanced_layers(settings, frozen)
        # Multi-token prediction modules recompute what the last layer recomputes.
        again = list(recomputed) or [""] * self.num_layers
        again += again[-1:] * self.mtp_modules
        if kernels.host_layers:
            self.parts: ArrayParts | CellParts = ArrayParts(
                settings, kernels.host_dtype, self.parameters_by_name, self.compute_weights, again, trained, dropout,
                shard,
            )  # fmt: skip
        else:
            self.parts = CellParts(
                settings, kernels, self.compute_weights, compiled, again, trained, dropout, shard
            )
        self.run_embedding = self.parts.run_embedding
        self.run_layer = self.parts.run_layer
        self.run_merge = self.parts.run_merge
        self.run_head = self.parts.run_head

    @property
    def trained_parameters(self) -> dict[str, Parameter]:
        """The parameters that an optimizer updates, by name."""
        return {name: parameter for name, parameter in self.parameters_by_name.items() if parameter.requires_grad}

    def construct(
        self, inputs: ModelInputs, dropout: DropoutKey | None = None, statistics: RouterStatistics | None = None
    ) -> LossSums:
        """Sums of losses over the valid labels, not divided by anything.

        Args:
            inputs: One micro-batch, see `trainer.models.inputs`.
            dropout: Names the masks; None (evaluation) or rates of 0 drop nothing.
            statistics: Given in a training: it records what routers decide; tokens beyond the experts' capacity are
                dropped and the multi-token prediction modules run. None: evaluation.
        """
        modules = 0 if statistics is None else self.mtp_modules
        return LossSums(*self.losses(inputs.ids_N, modules, DecoderCall(inputs, dropout, statistics)))

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Returns the residual stream after the last block, before the final norm, without dropout: [N, D]."""
        return self.run_layers(inputs.ids_N, range(self.num_layers), True, False, 0, DecoderCall(inputs))[0]

    def update_expert_bias(self, counts: RoutingCounts | None) -> None:
        """Moves each router's expert bias against the load of its experts, after an optimizer step.

        DeepSeek-V3, section 2.1.2: up by a fixed amount for an expert with less than the mean load, down with more.
        `counts` are those of the whole window, over all ranks. The bias of a frozen router is frozen too.
        """
        for layer, requested_E in zip(counts.layers, counts.requested, strict=True) if counts is not None else ():
            bias_E = self.parameters_by_name.get(layer_prefix(layer) + EXPERT_BIAS)
            if layer in self.balanced_layers and bias_E is not None:
                metric_functions().update_expert_bias(bias_E, requested_E, self.settings.experts.topk_bias_update_rate)

    def logits(self, inputs: ModelInputs) -> Tensor:
        """Returns the logits of every token, [N, V]; for evaluation and tests, not for training."""
        return self.parts.logits(self.hidden_states(inputs))
