"""The decoder's loss as one graph that MindSpore shards, in its semi-automatic mode.

The wiring and the blocks are those of every mode, built from the kernels of `trainer/ops/plain.py`.

Legend: as in trainer/models/decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

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
    """(ids_N, targets, tables, masks, mtp, counted, seeds_B1) -> the minimised sum of losses.

    `targets` are labels_N and the weight of each label's loss, [N, 1]; `mtp` has ids_N and the same two for each
    multi-token prediction module. `masks` are the causal one and that of the layers with a window. `counted` is None in
    a dense model and in evaluation, else for the losses of the routers valid_N1, 1
    where a label counts, and share_11, the weight of such a label. `seeds_B1` is
    None where nothing is dropped.

    MindSpore 2.10 does not compile a pipeline in which two stages use a weight. So the first stage looks up the tokens
    of the modules too, and with `staged` it hands a matrix that is embedding and head to the last stage as if it were
    an activation. The gradient comes back the same way.
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
        self.hands_on = staged and spec.tied
        parts = graph_parts(settings, parameters.get)
        self.embed, *mtp_embeds = (
            EmbeddingCell(*parts.embedding, EmbeddingMapping(kernels)) for _ in range(1 + spec.mtp_modules)
        )
        self.mtp_embeds = _cells(mtp_embeds)
        self.matrix = MatrixCell(parts.embedding[0], kernels.compute_dtype) if self.hands_on else None

        def layer_cell(layer: int) -> LayerCell:
            own, of_experts = parts.layers[layer]
            if not spec.layers[layer].is_moe:
                return LayerCell(Block(settings, kernels), own, mask_sites(settings, layer))
            cell = experts.of_layer(layer_prefix(layer), of_experts)
            return LayerCell(Block(settings, kernels, "attention"), own, mask_sites(settings, layer), cell)

        self.layers = _cells(map(layer_cell, range(len(spec.layers))))
        self.has_window = tuple(layer.attention.window is not None for layer in spec.layers)
        self.has_experts = tuple(layer.experts is not None for layer in self.layers)
        self.merges = _cells(MergeCell(MtpMerge(settings, kernels), weights) for weights in parts.merges)
        self.heads = _cells(
            HeadCell(Head(settings, kernels), norm, None if self.hands_on else weight, mapping)
            for norm, weight, mapping in parts.heads
        )
        self.reshape = P.Reshape()
        self.group_weights = experts.group_weights if experts else None
        self.balances = self.aux_factor > 0 or self.z_factor > 0
        self.weigh = P.Mul()
        self.no_loss_11 = None
        self.aux_factor = self.z_factor = 0.0  # `GraphRouterLosses` multiplies by them
        if experts is not None:
            self.no_loss_11 = Tensor(np.zeros((1, 1), np.float32))

    def construct(self, ids_N, targets, tables, masks, mtp, counted, seeds_B1):
        embedded = ()
        matrix_1VD = self.matrix() if self.hands_on else None
        for module in range(len(mtp)):
            embedded += (self.mtp_embeds[module](mtp[module][0]),)
        weights = (None, None) if counted is None else (counted[0], self.group_weights(counted[0]))
        call = (targets, tables, masks, mtp, embedded, matrix_1VD, weights, seeds_B1)
        losses = self.losses(ids_N, len(mtp), call)
        total = losses[0]
        if self.balances and counted is not None:
            # The product also makes the gradient that stages hand back one that depends on the batch: MindSpore 2.10
            # folds a constant one, and then does not find who sends it ("The pointer[fg_cnode] is null").
            total = total + self.weigh(losses[2], counted[1])
        return self.reshape(total, ())

    # The parts: cells that hold the weights that they use, because MindSpore takes the pipeline stage of a weight from
    # its cell.

    def run_embedding(self, ids_N, call):
        return self.embed(ids_N)

    def add_layer(self, number, x_ND, losses, call):
        """The layer itself adds its losses: a stage of a pipeline gets the sum as it gets the residual stream."""
        mask = call[2][1 if self.has_window[number] else 0]
        if not self.has_experts[number] or not self.training:
            return self.layers[number](x_ND, call[1], mask, call[7]), losses
        loss_11 = self.no_loss_11 if losses[0] is None else losses[0]
        x_ND, loss_11 = self.layers[number](x_ND, call[1], mask, call[7], *call[6], loss_11)
        # What no gradient comes back for is not handed on to the next stage ("The pointer[fg_cnode] is null").
        return x_ND, (loss_11, None) if self.balances else losses

    def run_merge(self, module, x_ND, call):
        return self.merges[module](call[4][module], x_ND)

    def run_head(self, number, x_ND, call):
        return self.heads[number](x_ND, call[0] if number == 0 else call[3][number - 1][1:], call[5])


def _cells(cells: Iterable[nn.Cell]) -> nn.CellList:
    """A list that does not change the names of parameters."""
    return nn.CellList(list(cells), auto_prefix=False)


class EmbeddingCell(nn.Cell):
    """ids_N -> [N, D]; `matrix` is that of the mapping, None where the embedding is as wide as the residual stream."""

    def __init__(self, weight: Parameter, matrix: Parameter | None, mapping: EmbeddingMapping) -> None:
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.gather = P.Gather()
        self.mapping = mapping
        self.matrix = matrix

    def construct(self, ids_N):
        x_NE = self.gather(self.weight, ids_N, 0)
        return x_NE if self.matrix is None else self.mapping(x_NE, self.matrix)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        self.mapping.linear.shard_over(tokens)
        result = ">n." if tokens > data else ""
        shard_operators(self, {"gather": f"v.,d{result}"}, d=data, v=vocabulary, n=tokens)


class MatrixCell(nn.Cell):
    """() -> the matrix [1, V, D] in the dtype of the products.

    The axis makes it the result of an operator: a stage does not hand on parameters and casts.
    """

    def __init__(self, weight: Parameter, dtype: mstype.Type) -> None:
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.dtype = dtype
        self.cast = P.Cast()
        self.expand = P.ExpandDims()

    def construct(self):
        return self.expand(self.cast(self.weight, self.dtype), 0)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        shard_operators(self, {"expand": "v."}, v=vocabulary)


class LayerCell(nn.Cell):
    """(x_ND, tables, mask, seeds_B1 or None) -> x_ND.

    With experts further weight_N1 of each token, weight_G1 and the sum of the router losses of the layers before,
    [1, 1]; x_ND then comes with the sum that has those of this layer too. A weight that only other layers have is None.
    `experts` take the place of the feed-forward sublayer. `sites` number the dropout masks, as `mask_sites`.
    """

    def __init__(
        self,
        block: Block,
        weights: Sequence[Parameter | None],
        sites: Sequence[int | None],
        experts: nn.Cell | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        own = [number for number, weight in enumerate(weights) if weight is not None]
        self.block = block
        self.weights = ParameterTuple([weights[number] for number in own])
        self.places = tuple(own.index(number) if number in own else -1 for number in range(len(weights)))
        self.experts = experts
        self.sites = tuple(sites)
        self.next_seed = P.Add()

    def construct(self, x_ND, tables, mask, seeds_B1, weight_N1=None, weight_G1=None, loss_11=None):
        weights = ()
        for place in self.places:
            weights += (self.weights[place],) if place >= 0 else (None,)
        drops = ()
        for site in self.sites:
            drops += (None if site is None or seeds_B1 is None else self.next_seed(seeds_B1, site),)
        x_ND = self.block(x_ND, *tables, mask, None, drops[0], drops[1], drops[2], *weights, *drops[3:])
        # Without a None for a dense layer: the graph of a cell that is computed again cannot return it.
        return x_ND if self.experts is None else self.experts(x_ND, weight_N1, weight_G1, loss_11, drops[2])

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """As `Block.shard_over`."""
        self.block.shard_over(data, tensor, tokens)
        shard_operators(self, {"next_seed": "d.,"}, d=data)
        if self.experts is not None:
            self.experts.shard_over(data, tensor, tokens)


class MergeCell(nn.Cell):
    """(embeddings of a module's tokens [N, D], x_ND) -> x_ND of the module's block."""

    def __init__(self, merge: MtpMerge, weights: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.merge = merge
        self.weights = ParameterTuple(weights)

    def construct(self, embedded_ND, x_ND):
        return self.merge(embedded_ND, x_ND, *self.weights)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        merge = self.merge
        for part in (merge.final_norm, merge.embedding_norm, merge.hidden_norm, merge.project):
            part.shard_over(tokens)
        shard_operators(merge, {"concat": "n.,n."}, n=tokens)


class HeadCell(nn.Cell):
    """(x_ND, (labels_N, counts_N1), matrix_1VD or None) -> sum of the losses."""

    def __init__(self, head: Head, norm: Parameter, weight: Parameter | None, mapping: Parameter | None) -> None:
        super().__init__(auto_prefix=False)
        self.head = head
        self.norm = norm
        self.weight = weight
        self.mapping = mapping
        self.squeeze = P.Squeeze(0)

    def construct(self, x_ND, targets, matrix_1VD):
        matrix_VD = self.weight if matrix_1VD is None else self.squeeze(matrix_1VD)
        return self.head(x_ND, self.norm, matrix_VD, targets[0], targets[1], self.mapping)

    def shard_over(self, data: int, vocabulary: int, tokens: int) -> None:
        self.head.normed.norm.shard_over(tokens)
        self.head.normed.mapping.linear.shard_over(tokens)
        self.head.cross_entropy.shard_over(data, vocabulary)
        shard_operators(self, {"squeeze": ".v."}, v=vocabulary)
