"""Which shards of the dropout masks a rank draws. The masks cover the unsharded model and full sequences.

Legend: N tokens, D hidden, I input columns of a matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.dropout import DropoutSite, LayerDropout, draw_noise
from trainer.data.batches.context import ContextShard
from trainer.models.spec.adapters import adapter_spec, layer_targets
from trainer.models.spec.build import NOISE_SITE, dropout_sites
from trainer.models.spec.shapes import dropped_projections
from trainer.models.spec.sublayers import attention_parameters, attention_spec, mlp_parameters
from trainer.ops.dropout import LocalHeads, MaskShard

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.config.schema.model import ModelConfig
    from trainer.models.inputs import ModelInputs
    from trainer.models.spec.model import LayerSpec, ParameterSpec
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.tensor import RankModelShard


class DropoutShards:
    """The shards of the dropout masks that a rank draws.

    Attributes:
        heads: The rank's heads in masks of attention probabilities; None: all.
        rank, ranks: The tensor-parallel rank, and how many ranks shard the columns of a matrix.
    """

    def __init__(self, settings: ModelConfig, shard: RankModelShard | None) -> None:
        self.settings = settings
        self.tensor = None
        self.sequence = ContextShard(0, 1)
        if shard is not None:
            self.tensor = shard.tensor
            self.sequence = shard.tokens
        self.rank = 0
        self.ranks = 1
        if self.tensor is not None:
            self.rank = self.tensor.group.rank
            self.ranks = self.tensor.group.size
        sharing = self.sequence.ulysses  # ranks that shard the heads of a tensor-parallel rank once more
        self.heads = None
        if self.ranks * sharing > 1:
            number = self.rank * sharing + self.sequence.rank % sharing
            spec = attention_spec(settings)
            local = spec.local(self.ranks)
            heads = local.heads // sharing
            kv_heads = max(1, local.kv_heads // sharing)
            self.heads = LocalHeads(number, spec.heads, spec.kv_heads, heads, kv_heads)

    def tokens(self, inputs: ModelInputs) -> int:
        """Counts the tokens of the micro-batch on all context-parallel ranks."""
        return inputs.ids_N.shape[0] * self.sequence.ranks

    def rows(self, inputs: ModelInputs) -> MaskShard | None:
        """Returns the shard of a mask of the residual stream; None: all of it."""
        if self.tensor is None or not self.tensor.sequence_parallel:
            return self.replicated_rows(inputs)
        rows = self.tensor.residual_shard(inputs.ids_N.shape[0])
        if inputs.rows is not None:
            rows = inputs.rows[rows]
        return MaskShard(self._number(self.rank), (rows, slice(None)))

    def columns(self, inputs: ModelInputs, width: int) -> MaskShard | None:
        """Returns the shard of a mask of an activation whose columns, `width` on all ranks, ranks shard; None: all."""
        columns = slice(None)
        if self.tensor is not None:
            columns = self.tensor.column_shard(width)
        return self._shard(inputs, columns, self.rank)

    def replicated_rows(self, inputs: ModelInputs) -> MaskShard | None:
        """Returns the shard of a mask of an activation that all tensor-parallel ranks have; None: all of it."""
        return self._shard(inputs, slice(None), 0)

    def _shard(self, inputs: ModelInputs, columns: slice, tensor_rank: int) -> MaskShard | None:
        rows = inputs.rows
        if rows is None:
            if columns == slice(None):
                return None
            rows = slice(None)
        return MaskShard(self._number(tensor_rank), (rows, columns))

    def _number(self, tensor_rank: int) -> int:
        return self.sequence.rank * self.ranks + tensor_rank

    def adapter_mask(self, matrix: ParameterSpec, inputs: ModelInputs) -> tuple[int, MaskShard | None]:
        """Returns the width of the mask of an adapter's input on all ranks, and the shard of it that the rank draws.

        Args:
            matrix: The adapted matrix, with the shape that this rank has.
        """
        width = matrix.shape[1]
        if matrix.sharding == "row":
            return width * self.ranks, self.columns(inputs, width * self.ranks)
        if matrix.sharding == "replicated":  # a down-projection of latent attention
            return width, self.rows(inputs)
        return width, self.replicated_rows(inputs)

    def layer_dropout(
        self, spec: LayerSpec, layer: int, key: DropoutKey | None, inputs: ModelInputs
    ) -> LayerDropout | None:
        """Returns the object that draws the masks of a native CPU layer; None where the layer has no dropout.

        Args:
            spec: The layer with the heads and columns of this rank.
        """
        adapters = {**spec.attention.adapters, **getattr(spec.mlp, "adapters", {})}
        rates = [spec.attention.dropout, spec.attention.output_dropout, *(one.dropout for one in adapters.values())]
        if key is None or not any(rates):
            return None
        numbers = dropout_sites(self.settings, layer)
        sites = {}
        for name in ("attention_output", "mlp_output"):
            stream = self.rows(inputs)
            sites[name] = _site(numbers[name], spec.attention.output_dropout, spec.attention.hidden, stream)
        matrices = {parameter.name: parameter for parameter in spec.parameters}
        for name, adapter in adapters.items():
            width, shard = self.adapter_mask(matrices[f"{name}.weight"], inputs)
            sites[name] = _site(numbers[name], adapter.dropout, width, shard)
        return LayerDropout(key, sites, (numbers["probabilities"], spec.attention.dropout), self.heads)


def embedding_noise(
    shards: DropoutShards, key: DropoutKey | None, inputs: ModelInputs, width: int
) -> np.ndarray | None:
    """Returns the noise on the embeddings of this rank's rows, [N, width]; None where there is none."""
    if key is None or inputs.noise_M is None:
        return None
    return draw_noise(key, _site(NOISE_SITE, 0.0, width, shards.rows(inputs)), inputs.noise_M)


def _site(number: int, rate: float, width: int, shard: MaskShard | None) -> DropoutSite:
    if shard is None:
        return DropoutSite(number, rate, width)
    rows, columns = shard.indices
    assert isinstance(columns, slice)  # `DropoutShards` makes no others
    if isinstance(rows, slice):
        if rows == slice(None):
            return DropoutSite(number, rate, width, columns)
        rows = np.arange(rows.start, rows.stop)
    return DropoutSite(number, rate, width, columns, rows)


class AdapterMasks:
    """Draws the dropout masks of adapters for cells. Every projection of every layer has a mask, adapted or not."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, shards: DropoutShards) -> None:
        self.settings = settings
        self.names = dropped_projections(settings)
        self.draw = kernels.draw_mask
        self.shards = shards
        matrices = [*attention_parameters(settings), *mlp_parameters(settings)]
        kv_heads = attention_spec(settings).kv_heads
        self.matrices = {one.name: one.local(shards.ranks, kv_heads) for one in matrices}

    def __call__(self, key: DropoutKey | None, layer: int, inputs: ModelInputs) -> list[Tensor | None]:
        """Returns the masks [N, I] of a layer in the order of `self.names`; None where nothing is dropped."""
        adapter = adapter_spec(self.settings)
        if key is None or adapter is None or not self.names:
            return [None] * len(self.names)
        targets = layer_targets(self.settings, layer)
        sites = dropout_sites(self.settings, layer)
        masks: list[Tensor | None] = []
        for name in self.names:
            if name not in targets:
                masks.append(None)
                continue
            width, shard = self.shards.adapter_mask(self.matrices[f"{name}.weight"], inputs)
            shape = self.shards.tokens(inputs), width
            masks.append(self.draw(key, sites[name], shape, adapter.dropout, shard))
        return masks
