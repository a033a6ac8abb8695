"""The decoder: its parameters, and the order of its parts in one wiring for every mode.

The parts are native layers on arrays where a CPU computes them (`array_parts.py`), otherwise MindSpore cells
(`cell_parts.py`).

Legend: B sequences, T tokens, N = B * T, D hidden, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from mindspore import Parameter, Tensor, nn
from mindspore.ops import operations as P

from trainer.models.array_parts import ArrayParts
from trainer.models.cell_parts import CellParts
from trainer.models.compute_weights import ModelParams
from trainer.models.dropout import DropoutShards
from trainer.models.inputs import DecoderCall, LossSums, ModelInputs, PassObserver, RouterStatistics
from trainer.models.recompute import Compiled
from trainer.models.spec.build import model_spec
from trainer.models.spec.init import initial_value
from trainer.models.spec.names import EXPERT_BIAS, HEAD, layer_prefix
from trainer.models.spec.shapes import balanced_layers, base_dtypes
from trainer.models.spec.sublayers import moe_config
from trainer.ops.measures import metric_functions
from trainer.storage.quantized import FrozenMatrix

if TYPE_CHECKING:
    import numpy as np

    from trainer.arrays.passes import Tape, Variable
    from trainer.arrays.vocabulary.distillation import WriteLogits
    from trainer.config.schema.model import ModelConfig
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.routing import RoutingCounts
    from trainer.parallel.tensor import RankModelShard
    from trainer.storage.base_dtypes import BaseDtype

Losses: TypeAlias = "tuple[Tensor | None, ...]"
"""The fields of `LossSums` except the last; None where these layers contribute nothing."""


class DecoderForward(nn.Cell):
    """The order of a decoder's parts: embedding, layers, head, MTP modules, total loss.

    Explicit mode (`Decoder`), the stages of its pipeline, the graphs of the audit and semi-automatic mode share it.
    Each supplies the parts; `call` has their arguments for one call:

    run_embedding(ids_N, call) -> x_ND
    run_layer(number, x_ND, call) -> x_ND, auxiliary loss and z loss of its router (None in a dense layer)
    run_merge(module, x_ND, call) -> x_ND, the input of the block of a multi-token prediction module
    run_head(number, x_ND, call) -> sum of token losses; 0 is the main model, `module + 1` a module

    The layers of the modules follow the main model's. MindSpore compiles this code, too, so it uses only the Python
    that the compiler understands.
    """

    def __init__(self, settings: ModelConfig, num_layers: int, mtp_modules: int) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        self.num_layers = num_layers
        self.mtp_modules = mtp_modules
        self.embedding_factor = settings.embedding_multiplier
        self.scale_embedding = P.Mul()
        self.mtp_factor = settings.mtp_loss_factor / max(1, mtp_modules)
        self.aux_factor = settings.balance_factor
        self.z_factor = 0.0
        if moe:
            self.z_factor = moe.z_loss_factor

    def losses(self, ids_N: Tensor, mtp_modules: int, call: Any) -> Losses:
        """Returns the fields of `LossSums` except the last, with the first `mtp_modules` MTP modules."""
        return self.run_layers(ids_N, range(self.num_layers), True, True, mtp_modules, call)[1]

    def run_layers(
        self, x: Tensor, layers: Sequence[int], is_first: bool, is_last: bool, mtp_modules: int, call: Any
    ) -> tuple[Tensor, Losses]:
        """Runs consecutive layers.

        Args:
            x: The tokens [N] where `is_first`, otherwise the residual stream [N, D].
            is_first: Begin with the embedding.
            is_last: Go on to the heads and the MTP modules.

        Returns:
            The residual stream after the layers, before the final norm, and what these layers contribute to the fields
            of `LossSums` except the last.
        """
        x_ND = x
        if is_first:
            x_ND = self.run_embedding(x, call)
            if self.embedding_factor != 1:
                x_ND = self.scale_embedding(x_ND, self.embedding_factor)
        losses: tuple[Tensor | None, Tensor | None] = (None, None)
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

    def add_layer(
        self, number: int, x_ND: Tensor, losses: tuple[Tensor | None, Tensor | None], call: Any
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Runs a layer and adds its auxiliary loss and z-loss to the sums of both."""
        x_ND, aux_loss, z_loss = self.run_layer(number, x_ND, call)
        return x_ND, (_sum(losses[0], aux_loss), _sum(losses[1], z_loss))


def _sum(total: Tensor | None, added: Tensor | None) -> Tensor | None:
    if added is None:
        return total
    if total is None:
        return added
    return total + added


class Decoder(DecoderForward):
    """A Llama/Qwen style decoder in explicit mode: compiled blocks, called one after the other.

    Args:
        compiled: Compile the block and the head (context.mode 0), or run operator by operator (mode 1).
        frozen: Names of parameters that are not trained and have no gradients. The expert bias of a frozen router does
            not change either.
        recomputed: For each layer what the backward pass recomputes: "block", "attention", "mlp" or "" for nothing. An
            empty sequence means nothing in all layers.
        shard: The part of the model that this rank has, and the ranks that have the others; None: this rank has all. A
            pipeline stage calls the parts of the decoder itself.
        dtypes: By name, how frozen matrices are held in few bytes; None: as the adapters of the settings say.

    Attributes:
        parameters_by_name: The parameters by Hugging Face's names, adapters at the end: a Parameter or, of the base
            model in few bytes, a FrozenMatrix.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, *, seed: int, compiled: Compiled = True,
        frozen: Collection[str] = (), recomputed: Sequence[str] = (), shard: RankModelShard | None = None,
        dtypes: Mapping[str, BaseDtype] | None = None,
    ) -> None:  # fmt: skip
        spec = model_spec(settings)
        super().__init__(settings, spec.num_layers, spec.mtp_modules)
        self.shard = shard
        self.tensor = None if shard is None else shard.tensor
        specs = spec.parameters()
        trained = {name for name, parameter in specs.items() if name not in frozen and parameter.role != "buffer"}
        self.parameters_by_name: dict[str, Any] = {}
        if dtypes is None:
            dtypes = base_dtypes(settings)
        for name, parameter in specs.items():
            local = None
            if shard is not None:
                if not shard.holds(name):
                    continue
                local = shard.shard_spec(name)
            draw = partial(initial_value, parameter, settings, seed, local)
            if name in dtypes:
                self.parameters_by_name[name] = FrozenMatrix(name, parameter.shape, dtypes[name], draw)
            else:
                self.parameters_by_name[name] = Parameter(Tensor(draw()), name, requires_grad=name in trained)
        dropout = DropoutShards(settings, shard)
        self.settings = settings
        self.kernels = kernels
        shared = []
        if self.mtp_modules:
            shared.append(HEAD)  # the MTP modules use that of the main model, too
        if spec.attention_group > 1:
            shared += [name for name in specs if ".self_attn." in name]
        self.compute_weights = ModelParams(self.parameters_by_name, kernels.compute_dtype, specs, shared)
        self.balanced_layers = balanced_layers(settings, frozen)
        again = list(recomputed) or [""] * (self.num_layers + self.mtp_modules)
        if kernels.host_layers:
            self.parts: ArrayParts | CellParts = ArrayParts(
                settings, kernels.host_dtype, self.parameters_by_name, self.compute_weights, again, trained, dropout,
                shard,
            )  # fmt: skip
            self.scale_embedding = operator.mul
        else:
            self.parts = CellParts(settings, kernels, self.compute_weights, compiled, again, trained, dropout, shard)
        self.run_embedding = self.parts.run_embedding
        self.run_layer = self.parts.run_layer
        self.run_merge = self.parts.run_merge
        self.run_head = self.parts.run_head

    def construct(
        self, inputs: ModelInputs, dropout: DropoutKey | None = None, statistics: RouterStatistics | None = None,
        observer: PassObserver | None = None, tape: Tape | None = None,
    ) -> LossSums:  # fmt: skip
        """Returns the sums of the losses of all loss tokens.

        Args:
            inputs: One micro-batch, see `trainer.models.inputs`.
            dropout: Names the masks; None (evaluation) or rates of 0 drop nothing.
            statistics: In a training records what routers decide; tokens beyond the expert capacity are dropped, and
                the MTP modules run. None: evaluation.
            observer: Sees what the parts compute.
            tape: See `DecoderCall`.
        """
        call = DecoderCall(inputs, dropout, statistics, observer, tape)
        return LossSums(*self.losses(inputs.ids_N, self.count_active_modules(call), call))

    def count_active_modules(self, call: DecoderCall) -> int:
        """Returns how many MTP modules run in a call: none in an evaluation."""
        if call.statistics is None:
            return 0
        return self.mtp_modules

    def hidden_states(self, inputs: ModelInputs) -> Tensor | Variable:
        """Returns the residual stream after the last block, before the final norm, without dropout: [N, D]."""
        return self.run_layers(inputs.ids_N, range(self.num_layers), True, False, 0, DecoderCall(inputs))[0]

    def update_expert_bias(self, counts: RoutingCounts | None) -> None:
        """Moves each router's expert bias against the load of its experts, after an optimizer step.

        The bias goes up by a fixed amount for an expert with less than the mean load, and down for one with more
        (DeepSeek-V3, section 2.1.2). The bias of a frozen router stays.

        Args:
            counts: The counts of the global batch; None: no rank has routers.
        """
        if counts is None:
            return
        for layer, requested_E in zip(counts.layers, counts.requested, strict=True):
            bias_E = self.parameters_by_name.get(layer_prefix(layer) + EXPERT_BIAS)
            if layer in self.balanced_layers and bias_E is not None:
                rate = moe_config(self.settings).topk_bias_update_rate
                metric_functions().update_expert_bias(bias_E, requested_E, rate)

    def scores(self, inputs: ModelInputs, last_A: np.ndarray) -> np.ndarray:
        """Returns a reward model's scores of the answers that end with these tokens of the batch, float64 [A]."""
        assert isinstance(self.parts, ArrayParts), "the checks of a configuration refuse scores on other engines"
        return self.parts.scores(self.hidden_states(inputs), last_A)

    def logits_by_rows(self, inputs: ModelInputs) -> WriteLogits:
        """Returns a function that computes the logits of some tokens of a batch, after the pass through all layers."""
        assert isinstance(self.parts, ArrayParts), "the checks of a configuration refuse distillation on other engines"
        return self.parts.logits_by_rows(self.hidden_states(inputs))

    def logits(self, inputs: ModelInputs) -> Tensor | Variable:
        """Returns the logits of every token, [N, V]; for evaluation and tests, not for training."""
        return self.parts.logits(self.hidden_states(inputs))
