"""Which dropout masks a rank draws: those of the whole model, for whole sequences, of which it needs a shard.

Legend: N tokens, D hidden, I columns of what enters a matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.dropout import DropoutSite, LayerDropout
from trainer.data.batches.context import ContextShard
from trainer.models.spec.adapters import adapter_spec, layer_targets
from trainer.models.spec.build import dropout_sites
from trainer.models.spec.shapes import dropped_projections
from trainer.models.spec.sublayers import attention_parameters, attention_spec, mlp_parameters
from trainer.ops.dropout import LocalHeads, MaskShard

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.config import ModelConfig
    from trainer.models.inputs import ModelInputs
    from trainer.models.spec.model import LayerSpec
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.tensor import RankModelShard


class DropoutShards:
    """Which parts of the dropout masks of the whole model, for whole sequences, a rank draws.

    Attributes:
        heads: For masks of probabilities; None: all.
        ranks: Those that share the columns of a matrix.
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
        sharing = self.sequence.ulysses  # divides the heads of a rank once more
        self.heads = None
        if self.ranks * sharing > 1:
            number = self.rank * sharing + self.sequence.rank % sharing
            spec = attention_spec(settings)
            local = spec.local(self.ranks)
            heads = local.heads // sharing
            kv_heads = max(1, local.kv_heads // sharing)
            self.heads = LocalHeads(number, spec.heads, spec.kv_heads, heads, kv_heads)

    def tokens(self, inputs: ModelInputs) -> int:
        """Tokens of the micro-batch, those of other ranks included."""
        return inputs.ids_N.shape[0] * self.sequence.ranks

    def rows(self, inputs: ModelInputs) -> MaskShard | None:
        """The part of a mask of the residual stream."""
        if self.tensor is None or not self.tensor.sequence_parallel:
            return self.replicated_rows(inputs)
        own = self.tensor.residual_shard(inputs.ids_N.shape[0])
        if inputs.rows is None:
            rows = own
        else:
            rows = inputs.rows[own]
        return MaskShard(self._number(self.rank), (rows, slice(None)))

    def columns(self, inputs: ModelInputs, width: int) -> MaskShard | None:
        """The part of a mask of what is cut by columns; `width` is that of the whole."""
        return self._part(inputs, slice(None) if self.tensor is None else self.tensor.column_shard(width), self.rank)

    def replicated_rows(self, inputs: ModelInputs) -> MaskShard | None:
        """The part of a mask of what each tensor-parallel rank has whole."""
        return self._part(inputs, slice(None), 0)

    def _part(self, inputs: ModelInputs, columns: slice, tensor_rank: int) -> MaskShard | None:
        if inputs.rows is None and columns == slice(None):
            return None
        return MaskShard(self._number(tensor_rank), (slice(None) if inputs.rows is None else inputs.rows, columns))

    def _number(self, tensor_rank: int) -> int:
        return self.sequence.rank * self.ranks + tensor_rank

    def adapter_mask(self, name: str, inputs: ModelInputs, width: int) -> tuple[int, MaskShard | None]:
        """Returns the columns of the mask of what enters an adapted matrix, of which the rank has `width`, and the part
        of it that the rank draws."""
        if name.endswith(("o_proj", "down_proj")):
            return width * self.ranks, self.columns(inputs, width * self.ranks)
        if name.endswith(("q_a_proj", "kv_a_proj_with_mqa")):
            return width, self.rows(inputs)
        return width, self.replicated_rows(inputs)

    def layer_dropout(
        self, spec: LayerSpec, layer: int, key: DropoutKey | None, inputs: ModelInputs
    ) -> LayerDropout | None:
        """Returns what draws the masks of a layer of native CPU layers; None where nothing is dropped. `spec` is that
        of the rank."""
        adapters = {**spec.attention.adapters, **getattr(spec.mlp, "adapters", {})}
        rates = [spec.attention.dropout, spec.attention.output_dropout, *(one.dropout for one in adapters.values())]
        if key is None or not any(rates):
            return None
        numbers = dropout_sites(self.settings, layer)
        sites = {}
        for name in ("attention_output", "mlp_output"):
            stream = self.rows(inputs)
            sites[name] = _site(numbers[name], spec.attention.output_dropout, spec.attention.hidden, stream)
        widths = {parameter.name: parameter.shape[1] for parameter in spec.parameters if len(parameter.shape) == 2}
        for name, adapter in adapters.items():
            width, part = self.adapter_mask(name, inputs, widths[f"{name}.weight"])
            sites[name] = _site(numbers[name], adapter.dropout, width, part)
        return LayerDropout(key, sites, (numbers["probabilities"], spec.attention.dropout), self.heads)


def _site(number: int, rate: float, width: int, part: MaskShard | None) -> DropoutSite:
    if part is None:
        return DropoutSite(number, rate, width)
    rows, columns = part.indices
    if isinstance(rows, slice):
        if rows == slice(None):
            rows = None
        else:
            rows = np.arange(rows.start, rows.stop)
    return DropoutSite(number, rate, width, columns, rows)


class AdapterMasks:
    """Draws the masks of the adapters' dropout for cells; every projection of every layer has its own, whether it is
    adapted or not."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, shards: DropoutShards) -> None:
        self.settings = settings
        self.names = dropped_projections(settings)
        self.draw = kernels.draw_mask
        self.shards = shards
        matrices = [*attention_parameters(settings), *mlp_parameters(settings)]
        kv_heads = attention_spec(settings).kv_heads
        self.shapes = {one.name: one.local(shards.ranks, kv_heads).shape for one in matrices}

    def __call__(self, key: DropoutKey | None, layer: int, inputs: ModelInputs) -> list[Tensor | None]:
        """Returns the masks of [N, I] numbers of a layer, as `block_names` ends; None where nothing is dropped."""
        if key is None or not self.names:
            return [None] * len(self.names)
        targets = layer_targets(self.settings, layer)
        rate = adapter_spec(self.settings).dropout
        sites = dropout_sites(self.settings, layer)
        found: list[Tensor | None] = []
        for name in self.names:
            if name not in targets:
                found.append(None)
                continue
            width, part = self.shards.adapter_mask(name, inputs, self.shapes[f"{name}.weight"][1])
            shape = self.shards.tokens(inputs), width
            found.append(self.draw(key, sites[name], shape, rate, part))
        return found
