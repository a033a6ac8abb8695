"""The decoder's loss as one graph that MindSpore shards, in its semi-automatic mode.

The forward pass (`DecoderForward`) and the blocks are those of every mode, with the kernels of `trainer/ops/plain.py`.

Legend: as in trainer/models/decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.models.block import Block, EmbeddingMapping, Head, MtpMerge
from trainer.models.decoder import DecoderForward
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import layer_prefix
from trainer.models.spec.shapes import mask_sites
from trainer.ops.plain import shard_operators
from trainer.semi_auto.graph_parts import graph_parts

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.semi_auto.experts import ExpertCells


class SemiAutoDecoder(DecoderForward):
    """(ids_N, targets, tables, masks, mtp, counted, seeds_B1) -> the sum of losses to minimise.

    Inputs:
        targets: labels_N, and the weight of each label's loss, [N, 1].
        masks: The causal mask, and the mask of layers with a window.
        mtp: For each MTP module ids_N and its `targets`.
        counted: For the losses of the routers valid_N1, 1 for a loss token, and share_11, the weight of a loss token.
            None in a dense model and in evaluation.
        seeds_B1: Seeds of the dropout masks; None without dropout.

    MindSpore 2.10 does not compile a pipeline in which two stages use one weight. So the first stage also looks up the
    tokens of the MTP modules. If embedding and head are tied, with `staged`, the first stage passes the matrix to the
    last stage as an activation, and the gradient comes back in the same way.
    """

    def __init__(
        self,
        settings: ModelConfig,
        kernels: KernelSet,
        parameters: Mapping[str, Parameter],
        experts: ExpertCells | None,
        *,
        staged: bool = False,
    ) -> None:
        spec = model_spec(settings)
        super().__init__(settings, spec.num_layers, spec.mtp_modules)
        self.passes_matrix = staged and spec.tied
        parts = graph_parts(settings, parameters.get)
        weight, matrix = parts.embedding
        self.embed, *mtp_embeds = (
            EmbeddingCell(weight, matrix, EmbeddingMapping(kernels)) for _ in range(1 + spec.mtp_modules)
        )
        self.mtp_embeds = _cells(mtp_embeds)
        self.matrix: Any = MatrixCell(weight, kernels.compute_dtype) if self.passes_matrix else None

        def layer_cell(layer: int) -> LayerCell:
            """Returns the cell of a layer, with its weights."""
            weights, expert_weights = parts.layers[layer]
            sites = mask_sites(settings, layer)
            is_rotated = spec.layers[layer].attention.is_rotated
            if experts is None or not spec.layers[layer].is_moe:
                return LayerCell(Block(settings, kernels, is_rotated=is_rotated), weights, sites)
            cell = experts.make_layer(layer_prefix(layer), expert_weights)
            return LayerCell(Block(settings, kernels, "attention", is_rotated=is_rotated), weights, sites, cell)

        self.layers = _cells(map(layer_cell, range(len(spec.layers))))
        self.has_window = tuple(layer.attention.window is not None for layer in spec.layers)
        self.has_experts = tuple(layer.experts is not None for layer in self.layers)
        self.merges = _cells(MergeCell(MtpMerge(settings, kernels), weights) for weights in parts.merges)
        self.heads = _cells(
            HeadCell(Head(settings, kernels), norm, None if self.passes_matrix else weight, mapping)
            for norm, weight, mapping in parts.heads
        )
        self.reshape = P.Reshape()
        self.group_weights: Any = experts.group_weights if experts else None
        self.balances = self.aux_factor > 0 or self.z_factor > 0
        self.weigh = P.Mul()
        self.no_loss_11 = None
        self.aux_factor = self.z_factor = 0.0  # `GraphRouterLosses` multiplies by them
        if experts is not None:
            self.no_loss_11 = Tensor(np.zeros((1, 1), np.float32))

    def construct(
        self,
        ids_N: Tensor,
        targets: tuple[Tensor, Tensor],
        tables: tuple[Tensor, ...],
        masks: tuple[Tensor, ...],
        mtp: tuple[tuple[Tensor, ...], ...],
        counted: tuple[Tensor, Tensor] | None,
        seeds_B1: Tensor | None,
    ) -> Tensor:
        embedded = ()
        matrix_1VD = self.matrix() if self.passes_matrix else None
        for module in range(len(mtp)):
            embedded += (self.mtp_embeds[module](mtp[module][0]),)
        weights = (None, None) if counted is None else (counted[0], self.group_weights(counted[0]))
        call = (targets, tables, masks, mtp, embedded, matrix_1VD, weights, seeds_B1)
        losses = self.losses(ids_N, len(mtp), call)
        total = losses[0]
        if self.balances and counted is not None:
            # The product also makes the gradient between stages depend on the batch: MindSpore 2.10 folds a constant
            # gradient, and then does not find its sender ("The pointer[fg_cnode] is null").
            total = total + self.weigh(losses[2], counted[1])
        return self.reshape(total, ())

    # Each part is a cell that holds its weights, because MindSpore takes the pipeline stage of a weight from its cell.

    def run_embedding(self, ids_N: Tensor, call: tuple) -> Tensor:
        """Looks up tokens, [N, D]."""
        return self.embed(ids_N)

    def add_layer(
        self, number: int, x_ND: Tensor, losses: tuple[Tensor | None, Tensor | None], call: tuple
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Runs a layer, which adds its router losses: a pipeline stage passes on their sum with the residual stream."""
        mask = call[2][1 if self.has_window[number] else 0]
        if not self.has_experts[number] or not self.training:
            return self.layers[number](x_ND, call[1], mask, call[7]), losses
        loss_11 = self.no_loss_11 if losses[0] is None else losses[0]
        x_ND, loss_11 = self.layers[number](x_ND, call[1], mask, call[7], *call[6], loss_11)
        # A value without a gradient must not be passed to the next stage ("The pointer[fg_cnode] is null").
        return x_ND, (loss_11, None) if self.balances else losses

    def run_merge(self, module: int, x_ND: Tensor, call: tuple) -> Tensor:
        """Computes the input of an MTP module's block, [N, D]."""
        return self.merges[module](call[4][module], x_ND)

    def run_head(self, number: int, x_ND: Tensor, call: tuple) -> Tensor:
        """Computes the loss of the main model (0) or of MTP module `number` - 1."""
        return self.heads[number](x_ND, call[0] if number == 0 else call[3][number - 1][1:], call[5])


def _cells(cells: Iterable[nn.Cell]) -> nn.CellList:
    """Returns a list of cells that does not change the names of their parameters."""
    return nn.CellList(list(cells), auto_prefix=False)


class EmbeddingCell(nn.Cell):
    """ids_N -> [N, D]; `matrix` maps to the residual stream, or is None if the embedding has its width."""

    def __init__(self, weight: Parameter, matrix: Parameter | None, mapping: EmbeddingMapping) -> None:
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.gather = P.Gather()
        self.mapping = mapping
        self.matrix = matrix

    def construct(self, ids_N: Tensor) -> Tensor:
        x_NE = self.gather(self.weight, ids_N, 0)
        return x_NE if self.matrix is None else self.mapping(x_NE, self.matrix)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        """Shards ids over `data`, the weight over `vocabulary` and the result over `tokens` ranks.

        MindSpore 2.10 shards the result of a replicated weight like the ids, and refuses another strategy for it.
        """
        self.mapping.linear.shard_over(tokens)
        result = ""
        if tokens > data and vocabulary > 1:
            result = ">n."
        shard_operators(self, {"gather": f"v.,d{result}"}, d=data, v=vocabulary, n=tokens)


class MatrixCell(nn.Cell):
    """() -> the matrix [1, V, D] in the dtype of the matrix products.

    The first axis makes it the result of an operator: a stage cannot pass on parameters or casts.
    """

    def __init__(self, weight: Parameter, dtype: mstype.Type) -> None:
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.dtype = dtype
        self.cast = P.Cast()
        self.expand = P.ExpandDims()

    def construct(self) -> Tensor:
        return self.expand(self.cast(self.weight, self.dtype), 0)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        """Shards the matrix over `vocabulary` ranks."""
        shard_operators(self, {"expand": "v."}, v=vocabulary)


class LayerCell(nn.Cell):
    """(x_ND, tables, mask, seeds_B1 or None) -> x_ND.

    A MoE layer has three more inputs: weight_N1 of each token, weight_G1 of each group, and the sum of the router
    losses of the layers before, [1, 1]. In training it returns x_ND and this sum with its own losses.

    Args:
        weights: The weights of the block; None for a weight that only other layers have.
        sites: The numbers of the dropout masks, from `mask_sites`.
        experts: Replaces the feed-forward sublayer of a MoE layer. Default None: a dense layer.
    """

    def __init__(
        self,
        block: Block,
        weights: Sequence[Parameter | None],
        sites: Sequence[int | None],
        experts: nn.Cell | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        existing = [number for number, weight in enumerate(weights) if weight is not None]
        self.block = block
        self.weights = ParameterTuple([weights[number] for number in existing])
        self.places = tuple(existing.index(number) if number in existing else -1 for number in range(len(weights)))
        self.experts = experts
        self.sites = tuple(sites)
        self.next_seed = P.Add()

    def construct(
        self,
        x_ND: Tensor,
        tables: tuple[Tensor, ...],
        mask: Tensor,
        seeds_B1: Tensor | None,
        weight_N1: Tensor | None = None,
        weight_G1: Tensor | None = None,
        loss_11: Tensor | None = None,
    ) -> Tensor:
        weights = ()
        for place in self.places:
            weights += (self.weights[place],) if place >= 0 else (None,)
        drops = ()
        for site in self.sites:
            drops += (None if site is None or seeds_B1 is None else self.next_seed(seeds_B1, site),)
        x_ND = self.block(x_ND, *tables, mask, None, drops[0], drops[1], drops[2], *weights, *drops[3:])
        # A dense layer does not return None too: the graph of a recomputed cell cannot return it.
        return x_ND if self.experts is None else self.experts(x_ND, weight_N1, weight_G1, loss_11, drops[2])

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """Shards the block and its experts; see `Block.shard_over` for the arguments."""
        self.block.shard_over(data, tensor, tokens)
        shard_operators(self, {"next_seed": "d.,"}, d=data)
        if self.experts is not None:
            self.experts.shard_over(data, tensor, tokens)


class MergeCell(nn.Cell):
    """(embeddings of an MTP module's tokens [N, D], x_ND) -> the input of the module's block, [N, D]."""

    def __init__(self, merge: MtpMerge, weights: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.merge = merge
        self.weights = ParameterTuple(weights)

    def construct(self, embedded_ND: Tensor, x_ND: Tensor) -> Tensor:
        return self.merge(embedded_ND, x_ND, *self.weights)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        """Shards N over `tokens` ranks."""
        merge = self.merge
        for part in (merge.final_norm, merge.embedding_norm, merge.hidden_norm, merge.project):
            part.shard_over(tokens)
        shard_operators(merge, {"concat": "n.,n."}, n=tokens)


class HeadCell(nn.Cell):
    """(x_ND, (labels_N, weights_N1), matrix_1VD or None) -> the weighted sum of the losses."""

    def __init__(self, head: Head, norm: Parameter, weight: Parameter | None, mapping: Parameter | None) -> None:
        super().__init__(auto_prefix=False)
        self.head = head
        self.norm = norm
        self.weight = weight
        self.mapping = mapping
        self.squeeze = P.Squeeze(0)

    def construct(self, x_ND: Tensor, targets: tuple[Tensor, Tensor], matrix_1VD: Tensor | None) -> Tensor:
        matrix_VD = self.weight if matrix_1VD is None else self.squeeze(matrix_1VD)
        return self.head(x_ND, self.norm, matrix_VD, targets[0], targets[1], self.mapping)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        """Shards norm and mapping over `tokens`, and the loss over `data` x `vocabulary` ranks."""
        self.head.normed.shard_over(tokens)
        self.head.cross_entropy.shard_over(data, vocabulary)
        shard_operators(self, {"squeeze": ".v."}, v=vocabulary)
