"""The decoder's loss as one graph that MindSpore cuts over ranks, in its semi-automatic mode.

The blocks are those of every run, built from the kernels of `trainer/ops/sharded.py`. Each cell here holds the weights
that it uses: MindSpore finds the stage of a weight by the cell that uses it.

Legend: as in decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mindspore import Parameter, ParameterTuple, nn
from mindspore.ops import operations as P

from trainer.models.decoder import Block, Head
from trainer.models.mtp import NORM, WEIGHTS, MergeTokens
from trainer.models.shapes import EMBEDDING, FINAL_NORM, HEAD, block_weights, layer_prefix

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet


class SemiAutoDecoder(nn.Cell):
    """(ids_N, targets, tables, mask, further) -> the sum of the losses that is minimised.

    `targets` are labels_N and what the loss of each counts, [N, 1]; `further` has ids and the same two for each module
    for further tokens.

    Args:
        settings: The model section: without experts, adapters and dropout.
        kernels: What it is built from.
        parameters: By name.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, parameters: Mapping[str, Parameter]) -> None:
        super().__init__(auto_prefix=False)
        embedding, final_norm = parameters[EMBEDDING], parameters[FINAL_NORM]
        output = embedding if settings.tie_word_embeddings else parameters[HEAD]
        depth = settings.num_layers

        def layer(number: int) -> LayerCell:
            names = [layer_prefix(number) + name for name in block_weights(settings)]
            return LayerCell(Block(settings, kernels), [parameters[name] for name in names])

        def own(number: int, name: str) -> Parameter:
            return parameters[layer_prefix(number) + name]

        later = range(depth, depth + settings.mtp_depth)
        norms = [final_norm] + [own(number, NORM) for number in later]
        self.embed = EmbeddingCell(embedding)
        merges = [
            MergeCell(MergeTokens(settings, kernels), embedding, [norm, *(own(number, name) for name in WEIGHTS)])
            for number, norm in zip(later, norms, strict=False)
        ]
        self.layers, self.merges = _cells(map(layer, range(depth))), _cells(merges)
        self.modules = _cells(map(layer, later))
        self.heads = _cells(HeadCell(Head(settings, kernels), norm, output) for norm in norms)
        self.mtp_factor = settings.mtp_loss_factor / max(1, settings.mtp_depth)

    def construct(self, ids_N, targets, tables, mask, mtp):
        x_ND = self.embed(ids_N)
        for layer in self.layers:
            x_ND = layer(x_ND, tables, mask)
        total = self.heads[0](x_ND, targets)
        for module in range(len(self.modules)):
            x_ND = self.merges[module](mtp[module][0], x_ND)
            x_ND = self.modules[module](x_ND, tables, mask)
            total = total + self.heads[module + 1](x_ND, mtp[module][1:]) * self.mtp_factor
        return total


def _cells(cells: Iterable[nn.Cell]) -> nn.CellList:
    """A list that leaves the names of parameters as they are."""
    return nn.CellList(list(cells), auto_prefix=False)


class EmbeddingCell(nn.Cell):
    """ids_N -> [N, D]."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.weight, self.gather = weight, P.Gather()

    def construct(self, ids_N):
        return self.gather(self.weight, ids_N, 0)

    def shard_over(self, data: int, vocabulary: int) -> None:
        self.gather.shard(((vocabulary, 1), (data,)))


class LayerCell(nn.Cell):
    """(x_ND, tables, mask) -> x_ND."""

    def __init__(self, block: Block, weights: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.block, self.weights = block, ParameterTuple(weights)

    def construct(self, x_ND, tables, mask):
        return self.block(x_ND, *tables, mask, None, None, None, None, *self.weights)

    def shard_over(self, data: int, tensor: int) -> None:
        """The products as Megatron-LM cuts them (Shoeybi et al. 2019, section 3): the first of a pair along its
        outputs, the second along its inputs; all else along the batch, or like the columns that it gets.
        """
        attention, mlp, row = self.block.attention, self.block.mlp, (data, 1)
        for norm in (attention.norm, mlp.norm):
            norm.shard_over(data)
        for projection in (attention.query, attention.key, attention.value, mlp.gate, mlp.up):
            projection.linear.shard_over(data, columns=tensor)
        for projection in (attention.out, mlp.down):
            projection.linear.shard_over(data, rows=tensor)
        for part in (attention.query_rotary, attention.key_rotary, attention.attention, mlp.swiglu):
            part.shard_over(data, tensor)
        for norm in (attention.query_norm, attention.key_norm) if attention.qk_norm else ():
            norm.shard_over(data, tensor)
        for add in (self.block.add_attention, self.block.add_mlp):
            add.shard((row, row))


class MergeCell(nn.Cell):
    """(mtp_ids_N, x_ND) -> x_ND of the module's block."""

    def __init__(self, merge: MergeTokens, embedding: Parameter, weights: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.merge, self.embed, self.weights = merge, EmbeddingCell(embedding), ParameterTuple(weights)

    def construct(self, mtp_ids_N, x_ND):
        return self.merge(self.embed(mtp_ids_N), x_ND, *self.weights)

    def shard_over(self, data: int, vocabulary: int) -> None:
        merge = self.merge
        self.embed.shard_over(data, vocabulary)
        for part in (merge.final_norm, merge.embedding_norm, merge.hidden_norm, merge.project):
            part.shard_over(data)
        merge.concat.shard(((data, 1), (data, 1)))


class HeadCell(nn.Cell):
    """(x_ND, (labels_N, counts_N1)) -> sum of the losses."""

    def __init__(self, head: Head, norm: Parameter, weight: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.head, self.norm, self.weight = head, norm, weight

    def construct(self, x_ND, targets):
        return self.head(x_ND, self.norm, self.weight, targets[0], targets[1])

    def shard_over(self, data: int, vocabulary: int) -> None:
        self.head.norm.shard_over(data)
        self.head.cross_entropy.shard_over(data, vocabulary)
