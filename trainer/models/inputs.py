"""The inputs of a model (tensors, position tables, attention mask) built from a batch of arrays, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from mindspore import Tensor

from trainer.arrays.attention.positions import Rotary, TokenPositions, query_blocks
from trainer.data.batches.batch import IGNORE_INDEX, Batch
from trainer.data.batches.context import ContextShard
from trainer.models.spec.build import model_spec
from trainer.models.spec.rotary import rotary_angles
from trainer.ops.measures import metric_functions
from trainer.ops.routing import Routing, RoutingCounts, StepExpertLoad

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.tensor import RankModelShard


Positions: TypeAlias = tuple[tuple, tuple, "tuple | None", "TokenPositions | None"]
"""Where the tokens of a batch stand: tables, mask, window_mask and positions of `ModelInputs`."""


class SequenceWeights(NamedTuple):
    """Which sequence of the batch each token belongs to, for losses that are means over sequences.

    The tokens are those that this rank sends to experts: tensor-parallel ranks share theirs.
    """

    mean_BN: Tensor
    """float32, 1 / T where the token belongs to the sequence, else 0."""
    mean_BR: Tensor
    """The same for each of the k experts of a token, R = N * k."""
    tokens_B1: Tensor
    """float32, valid labels of the sequence; with gbs_aux_loss their mean over the sequences."""
    valid_N1: Tensor
    """As in `ModelInputs`, of these tokens."""


class MtpInputs(NamedTuple):
    """Tokens and labels of a multi-token prediction module, as in `ModelInputs`."""

    ids_N: Tensor
    """The token `module number` positions later; 0 at the end of a sequence."""
    labels_N: Tensor
    valid_N1: Tensor
    """1 where that token and its label belong to the same document as the position and the label counts, else 0."""


class ModelInputs(NamedTuple):
    """One micro-batch on the device. N = B * T."""

    ids_N: Tensor
    labels_N: Tensor
    """int32, 0 where there is no loss."""
    valid_N1: Tensor
    """float32, 1 where the label counts, else 0."""
    tables: tuple[Tensor, Tensor, Tensor, Tensor]
    """Cosines and sines for the queries, then for the keys, in the kernels' layout."""
    mask: tuple[Tensor, Tensor | None]
    """Causal and within a document, as the kernels take it; see their `AttentionMasks`."""
    scores_shape: tuple[int, ...]
    """Shape of the attention's probabilities, which their dropout masks cover."""
    sequence_weights: SequenceWeights | None
    """None for a dense model."""
    mtp: tuple[MtpInputs, ...]
    """One for each multi-token prediction module."""
    window_mask: tuple[Tensor, Tensor | None] | None = None
    """`mask` for layers with a sliding window; None where no layer has one."""
    positions: TokenPositions | None = None
    """In the place of tables and masks, where layers are computed on arrays."""
    rows: np.ndarray | None = None
    """Which tokens of the whole micro-batch these are, where context-parallel ranks share it; None: all."""


class LossSums(NamedTuple):
    """What a forward pass adds up, float32 scalars; to be divided by the valid labels of the whole window.

    `total` is minimised: `tokens` and the other losses times their factors. The others are None where the model has no
    such part, and in evaluation.
    """

    total: Tensor
    tokens: Tensor
    """Losses of all valid labels: of the next tokens, or of the images."""
    aux_loss: Tensor | None = None
    """Sum over the routers; see `trainer.models.moe.RouterLosses`."""
    z_loss: Tensor | None = None
    mtp: Tensor | None = None
    """Token losses of the multi-token prediction modules, summed over the modules."""
    correct: Tensor | None = None
    """Correct labels of a classifier, in evaluation only."""


@dataclass
class RouterStatistics:
    """What the routers decided in one forward pass of a training.

    Attributes:
        routings: (layer, its routing, the router's scores), one for each layer with experts, in forward order; arrays
            or tensors, as the routing was decided on the host or in a graph.
        load: The load of the step, for gbs_aux_loss alone.
    """

    routings: list[tuple[int, Any, Any]] = field(default_factory=list)
    load: StepExpertLoad | None = None

    def counts(self) -> RoutingCounts | None:
        """The counts of all layers; None without experts."""
        if not self.routings:
            return None
        layers, routings, scores = zip(*self.routings, strict=True)
        return metric_functions().routing_counts(layers, [Routing(*routing) for routing in routings], scores)


class DecoderCall(NamedTuple):
    """What the parts of `Decoder` need of one call."""

    inputs: ModelInputs
    dropout: DropoutKey | None = None
    statistics: RouterStatistics | None = None


class PredictionCall(NamedTuple):
    """What the layers need of one pass of a prediction, as the parts of the decoder make it.

    Attributes:
        tables: Position tables of the new tokens, or their rotation.
        masks: What attention adds to its scores, without and with a window.
        cache: What the layers keep of all tokens, placed at the new ones.
    """

    tables: Any
    masks: Sequence[Any]
    cache: Any


class InputBuilder:
    """Builds `ModelInputs`; keeps tables and mask of the common case, sequences that hold a single document
    with positions from 0 on.

    The kernels make tables and masks; positions up to seq_length or max_position_embeddings have a row.

    Args:
        shard: Which tokens of each sequence of a batch the rank has; None: all. The inputs are those of its tokens, but
            what it needs to know of the others is taken from the whole batch.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, shard: RankModelShard | None = None) -> None:
        self.settings = settings
        self.kernels = kernels
        if shard is None:
            self.part = ContextShard(0, 1)
            self.tensor = None
        else:
            self.part = shard.tokens
            self.tensor = shard.tensor
        spec = model_spec(settings)
        self.mtp_modules = spec.mtp_modules
        attention = spec.layers[0].attention
        self.masks = kernels.attention_masks(settings)
        if self.tensor is not None:
            attention = attention.local(self.tensor.group.size)
            heads = {"num_heads": attention.heads, "n_kv_heads": attention.kv_heads}
            self.masks = kernels.attention_masks(settings.model_copy(update=heads))
        self.cos, self.sin = rotary_angles(settings, max(settings.seq_length, settings.max_positions))
        self.on_arrays = kernels.host_layers
        self.rotary = Rotary(attention)
        self._cached_positions: tuple[tuple[int, int], Positions] | None = None
        self._means: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def __call__(self, batch: Batch) -> ModelInputs:
        tables, mask, window_mask, positions = self._positions(batch)
        labels = self.part.select_tokens(batch.labels).reshape(-1)
        valid = labels != IGNORE_INDEX
        counts_N1 = valid.astype(np.float32)[:, None]
        valid_N1 = Tensor(counts_N1)
        return ModelInputs(
            Tensor(self.part.select_tokens(batch.input_ids).reshape(-1)),
            Tensor(np.where(valid, labels, 0).astype(np.int32)),
            valid_N1,
            tables,
            mask,
            self.masks.scores_shape(*batch.input_ids.shape),
            self._sequence_weights(batch, counts_N1, valid_N1) if self.settings.experts is not None else None,
            tuple(_mtp_inputs(batch, offset, self.part) for offset in range(1, self.mtp_modules + 1)),
            window_mask,
            positions,
            self.part.rows(*batch.input_ids.shape) if self.part.ranks > 1 else None,
        )

    def _sequence_weights(self, batch: Batch, counts_N1: np.ndarray, valid_N1: Tensor) -> SequenceWeights:
        rows, length = batch.input_ids.shape
        own = slice(None)
        if self.tensor is not None:
            own = self.tensor.token_shard(valid_N1.shape[0])
            valid_N1 = Tensor(counts_N1[own])
        if self._means is None or self._means[0] != (rows, length):
            each = np.eye(rows, dtype=np.float32) / np.float32(length)
            mean_BN = np.ascontiguousarray(np.repeat(each, length // self.part.ranks, axis=1)[:, own])
            mean_BR = np.repeat(mean_BN, self.settings.experts.num_experts_chosen, axis=1)
            self._means = (rows, length), Tensor(mean_BN), Tensor(mean_BR)
        tokens_B1 = (batch.labels != IGNORE_INDEX).sum(axis=1, keepdims=True).astype(np.float32)
        if self.settings.experts.balances_step:  # a loss of the micro-batch as a whole
            tokens_B1[:] = tokens_B1.mean()
        return SequenceWeights(*self._means[1:], Tensor(tokens_B1), valid_N1)

    def rotation(self, positions_N: np.ndarray) -> np.ndarray:
        """Returns what layers on arrays rotate tokens at these positions by, see `Rotary.table`."""
        return self.rotary.table(self.cos[positions_N], self.sin[positions_N])

    def tables(self, positions_N: np.ndarray) -> tuple[Tensor, ...]:
        """Returns the position tables of tokens at these positions, as the kernels take them."""
        tables = self.kernels.rotary_tables(self.cos[positions_N], self.sin[positions_N])
        return (*tables, *tables)

    def _positions(self, batch: Batch) -> Positions:
        length = batch.input_ids.shape[1]
        single = not batch.segment_ids.any() and bool((batch.positions == np.arange(length)).all())
        if single and self._cached_positions is not None and self._cached_positions[0] == batch.input_ids.shape:
            return self._cached_positions[1]
        positions_N = self.part.select_tokens(batch.positions).reshape(-1)
        window = self.settings.sliding_window
        if self.on_arrays:
            make = partial(query_blocks, shard=self.part.ring)
        else:
            make = self.masks
        mask = make(batch.segment_ids)
        window_mask = None
        if self.settings.window_layers:
            window_mask = make(batch.segment_ids, window=window)
        if self.on_arrays:
            found = (), (None, None), None, TokenPositions(self.rotation(positions_N), mask, window_mask)
        else:
            found = self.tables(positions_N), mask, window_mask, None
        if single:
            self._cached_positions = batch.input_ids.shape, found
        return found


def _mtp_inputs(batch: Batch, offset: int, part: ContextShard) -> MtpInputs:
    """Tokens and labels `offset` positions after those of a part, in the same document."""
    ids_BT = np.zeros_like(batch.input_ids)
    labels_BT = _mtp_labels(batch, offset)
    ids_BT[:, : max(0, ids_BT.shape[1] - offset)] = batch.input_ids[:, offset:]
    ids_BT = part.select_tokens(ids_BT)
    labels_BT = part.select_tokens(labels_BT)
    valid_BT = labels_BT != IGNORE_INDEX
    return MtpInputs(
        Tensor(ids_BT.reshape(-1)),
        Tensor(np.where(valid_BT, labels_BT, 0).reshape(-1)),
        Tensor(valid_BT.reshape(-1, 1).astype(np.float32)),
    )


def _mtp_labels(batch: Batch, offset: int) -> np.ndarray:
    labels_BT = np.full_like(batch.labels, IGNORE_INDEX)
    if offset < labels_BT.shape[1]:
        same_BT = batch.segment_ids[:, offset:] == batch.segment_ids[:, :-offset]
        labels_BT[:, :-offset] = np.where(same_BT, batch.labels[:, offset:], IGNORE_INDEX)
    return labels_BT


def mtp_labels(batch: Batch, modules: int) -> int:
    """Number of labels of all multi-token prediction modules together."""
    labels = (_mtp_labels(batch, offset) for offset in range(1, modules + 1))
    return sum(int(np.count_nonzero(labels_BT != IGNORE_INDEX)) for labels_BT in labels)
