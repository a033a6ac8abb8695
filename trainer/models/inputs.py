"""The inputs of a model (tensors, position tables, attention mask) built from a batch of arrays, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from mindspore import Tensor

from trainer.arrays.attention.positions import CpuRotary, TokenPositions, query_blocks
from trainer.arrays.vocabulary.loss_terms import LossTerms
from trainer.arrays.vocabulary.preferences import Pairs, find_pairs
from trainer.data.batches.batch import IGNORE_INDEX, AnyBatch, WeightedBatch
from trainer.data.batches.context import ContextShard
from trainer.models.spec.build import model_spec
from trainer.models.spec.rotary import all_rotary_angles
from trainer.ops.measures import metric_functions
from trainer.ops.routing import Routing, RoutingCounts, StepExpertLoad

if TYPE_CHECKING:
    from trainer.arrays.passes import Tape, Variable
    from trainer.arrays.vocabulary.distillation import Distillation
    from trainer.config.schema.model import ModelConfig
    from trainer.config.schema.moe import MoEConfig
    from trainer.config.schema.runner import LossConfig
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.tensor import RankModelShard


Stream = TypeVar("Stream", "Tensor", "Variable")
"""The residual stream: a variable between native CPU layers, otherwise a tensor."""
Positions: TypeAlias = tuple[tuple, tuple, "tuple | None", "TokenPositions | None", "tuple | None"]
"""The positions of a batch: tables, mask, window_mask and positions of `ModelInputs`."""


class SequenceWeights(NamedTuple):
    """Which sequence of the batch each token belongs to, for losses that are means over sequences.

    N counts the tokens that this rank sends to experts: tensor-parallel ranks share the tokens.
    """

    mean_BN: Tensor
    """float32, 1 / T where the token belongs to the sequence, else 0."""
    mean_BR: Tensor
    """float32, `mean_BN` repeated for each of the k experts of a token, R = N * k."""
    tokens_B1: Tensor
    """float32, loss tokens of the sequence; with gbs_aux_loss their mean over the sequences."""
    valid_N1: Tensor
    """float32, 1 for a loss token, else 0."""


class MtpInputs(NamedTuple):
    """Tokens and labels of an MTP module."""

    ids_N: Tensor
    """The token `module number` positions later; 0 at the end of a sequence."""
    labels_N: Tensor
    """int32, the label of that token; 0 where there is no loss."""
    valid_N1: Tensor
    """float32, 1 where that token is a loss token of the position's document, else 0."""


class ModelInputs(NamedTuple):
    """One micro-batch on the device. N = B * T."""

    ids_N: Tensor
    labels_N: Tensor
    """int32, 0 where there is no loss."""
    valid_N1: Tensor
    """float32, 1 or the weight of its record for a loss token, else 0."""
    tables: tuple[Tensor, Tensor, Tensor, Tensor]
    """Cosines and sines for the queries, then for the keys, in the kernels' layout."""
    mask: tuple[Tensor, Tensor | None]
    """Attention mask, causal and within a document, as the kernels take it (their `AttentionMasks`)."""
    scores_shape: tuple[int, ...]
    """Shape of the attention probabilities and of their dropout mask."""
    sequence_weights: SequenceWeights | None
    """None for a dense model."""
    mtp: tuple[MtpInputs, ...]
    """One for each MTP module."""
    window_mask: tuple[Tensor, Tensor | None] | None = None
    """`mask` for layers with a sliding window; None where no layer has one."""
    positions: TokenPositions | None = None
    """Replaces tables and masks for native CPU layers."""
    rows: np.ndarray | None = None
    """Which tokens of the micro-batch these are, where context-parallel ranks share it; None: all."""
    window_tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    """`tables` for layers with a sliding window, where they differ."""
    pairs: Pairs | None = None
    """The pairs of answers for a loss of preferences; None: the loss is the sum over the tokens."""
    noise_M: np.ndarray | None = None
    """float32, largest absolute noise on the embedding of each token of the micro-batch, on all ranks; None: none."""
    distillation: Distillation | None = None
    """The teacher's logits, which the main model's head compares with its own; None: there is no teacher."""


class LossSums(NamedTuple):
    """The sums of a forward pass, float32 scalars. The step divides them by the loss tokens of the global batch.

    They are variables where native CPU layers compute, otherwise tensors; `asnumpy` of both gives the number.

    `total` is minimised: `tokens` plus the other losses times their factors. The others are None in an evaluation, and
    where the model has no such part.
    """

    total: Tensor | Variable
    tokens: Tensor | Variable
    """Losses of all loss tokens, or of all images. With `RouterStatistics.terms` those are in it: `terms` has the cross
    entropy alone. So has `Distillation`, which is in it in a training."""
    aux_loss: Tensor | Variable | None = None
    """Sum over the routers; see `trainer.models.moe.RouterLosses`."""
    z_loss: Tensor | Variable | None = None
    mtp: Tensor | Variable | None = None
    """Token losses of the MTP modules, summed over the modules."""
    correct: Tensor | None = None
    """Correct labels of images, in evaluation only."""


@dataclass
class RouterStatistics:
    """The decisions of the routers in one forward pass of a training, and the largest attention logits.

    Attributes:
        routings: (layer, its routing, the router's scores) of each MoE layer, in forward order: arrays where the host
            has decided the routing, tensors where a graph has.
        load: The expert load of the step, only for gbs_aux_loss.
        max_logits: By layer, the array that takes the largest attention logit of each head; only native layers do it.
        terms: The terms that the main model's head adds to its cross entropy; None: none.
    """

    routings: list[tuple[int, Any, Any]] = field(default_factory=list)
    load: StepExpertLoad | None = None
    max_logits: Mapping[int, np.ndarray] = field(default_factory=dict)
    terms: LossTerms | None = None

    def counts(self) -> RoutingCounts | None:
        """Returns the counts of all MoE layers; None where the model has none."""
        if not self.routings:
            return None
        layers, routings, scores = zip(*self.routings, strict=True)
        return metric_functions().routing_counts(layers, [Routing(*routing) for routing in routings], scores)


class PassObserver(Protocol):
    """Sees what the parts of a decoder compute for one micro-batch, and changes nothing."""

    def stream(self, layer: int, part: str, x_ND: Stream) -> Stream:
        """Returns the residual stream, which it also sees, now and as a gradient in the backward pass.

        Args:
            layer: The layer that takes the stream, or has computed it.
            part: "input", or the part of the layer that was the last to add to the stream: "block", "attention", "mlp"
                or "experts".
        """

    def saved(self, layer: int, arrays: Mapping[str, Any]) -> None:
        """Sees the arrays that a part of a layer has saved for its backward pass; only native layers call this."""

    def loss(self, head: int, sum_: Tensor | Variable) -> None:
        """Sees the sum of the token losses of a head, see `run_head`."""


class DecoderCall(NamedTuple):
    """The arguments of one call of `Decoder`, for its parts.

    Attributes:
        tape: Records the passes of native CPU layers; None: there is no backward pass, or MindSpore runs it.
    """

    inputs: ModelInputs
    dropout: DropoutKey | None = None
    statistics: RouterStatistics | None = None
    observer: PassObserver | None = None
    tape: Tape | None = None


class PredictionCall(NamedTuple):
    """The arguments of one pass of a prediction, for the layers; the parts of the decoder make and use it.

    Attributes:
        tables: Position tables of the new tokens, or their rotation; the last item is that of layers with a window.
        masks: The terms that attention adds to its scores, without and with a sliding window.
        cache: The KV cache, which writes to the positions of the new tokens.
    """

    tables: Sequence[Any]
    masks: Sequence[Any]
    cache: Any


class InputBuilder:
    """Builds `ModelInputs` from batches.

    It keeps the tables and masks of the common case, sequences of a single document with positions from 0 on. Tables
    have rows for the positions below seq_length and max_position_embeddings.

    Args:
        shard: Says which tokens of each sequence the rank has; None: all. A batch has the full sequences, of which the
            masks of attention need all tokens.
        loss: The loss of preferences; None: of tokens.
        teach: Computes what the teacher of a distillation says about a batch; None: there is no teacher.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, shard: RankModelShard | None = None,
        loss: LossConfig | None = None, teach: Callable[[AnyBatch], Distillation] | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.loss = loss
        self.teach = teach
        self.kernels = kernels
        if shard is None:
            self.part = ContextShard(0, 1)
            self.tensor = None
        else:
            self.part = shard.tokens
            self.tensor = shard.tensor
        spec = model_spec(settings)
        self.mtp_modules = spec.mtp_modules
        self.width = spec.embedding
        rotated = (layer.attention for layer in spec.layers if layer.attention.is_rotated)
        attention = next(rotated, spec.layers[0].attention)
        self.masks = kernels.attention_masks(settings)
        if self.tensor is not None:
            attention = attention.local(self.tensor.group.size)
            heads = {"num_heads": attention.heads, "n_kv_heads": attention.kv_heads}
            self.masks = kernels.attention_masks(settings.model_copy(update=heads))
        self.angles = all_rotary_angles(settings, max(settings.seq_length, settings.max_positions))
        self.on_arrays = kernels.host_layers
        self.rotary = CpuRotary(attention)
        self._cached_positions: tuple[tuple[int, ...], Positions] | None = None
        self._means: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def __call__(self, batch: AnyBatch) -> ModelInputs:
        tables, mask, window_mask, positions, window_tables = self._positions(batch)
        labels = self.part.select_tokens(batch.labels).reshape(-1)
        valid = labels != IGNORE_INDEX
        counts_N1 = valid.astype(np.float32)[:, None]
        if isinstance(batch, WeightedBatch):
            counts_N1 *= self.part.select_tokens(batch.values).reshape(-1, 1)
        valid_N1 = Tensor(counts_N1)
        sequence_weights = None
        if self.settings.experts is not None:
            sequence_weights = self._sequence_weights(self.settings.experts, batch, counts_N1, valid_N1)
        rows = None
        if self.part.ranks > 1:
            rows = self.part.rows(*batch.input_ids.shape)
        pairs = None
        if self.loss is not None:
            assert not isinstance(batch, WeightedBatch), "a loss of preferences has no weights"
            pairs = find_pairs(batch, self.loss)
        distillation = None
        if self.teach is not None:
            distillation = self.teach(batch)
        return ModelInputs(
            Tensor(self.part.select_tokens(batch.input_ids).reshape(-1)),
            Tensor(np.where(valid, labels, 0).astype(np.int32)),
            valid_N1,
            tables,
            mask,
            self.masks.scores_shape(*batch.input_ids.shape),
            sequence_weights,
            tuple(_mtp_inputs(batch, offset, self.part) for offset in range(1, self.mtp_modules + 1)),
            window_mask,
            positions,
            rows,
            window_tables,
            pairs,
            self._noise(batch),
            distillation,
        )

    def _noise(self, batch: AnyBatch) -> np.ndarray | None:
        """Returns alpha / sqrt(tokens of the document x width) of each token of the batch, [B * T]; None without noise.

        The length of a document is that of its piece in the sequence.
        """
        alpha = self.settings.neftune_noise_alpha
        if alpha is None:
            return None
        documents_BT = batch.segment_ids + np.arange(len(batch.segment_ids))[:, None] * (batch.segment_ids.max() + 1)
        _, document_M, tokens = np.unique(documents_BT, return_inverse=True, return_counts=True)
        limits = alpha / np.sqrt(tokens * self.width)
        return limits.astype(np.float32)[document_M.reshape(-1)]

    def _sequence_weights(
        self, moe: MoEConfig, batch: AnyBatch, counts_N1: np.ndarray, valid_N1: Tensor
    ) -> SequenceWeights:
        rows, length = batch.input_ids.shape
        local_rows = slice(None)
        if self.tensor is not None:
            local_rows = self.tensor.token_shard(valid_N1.shape[0])
            valid_N1 = Tensor(counts_N1[local_rows])
        if self._means is None or self._means[0] != (rows, length):
            mean_BB = np.eye(rows, dtype=np.float32) / np.float32(length)
            mean_BN = np.ascontiguousarray(np.repeat(mean_BB, length // self.part.ranks, axis=1)[:, local_rows])
            mean_BR = np.repeat(mean_BN, moe.num_experts_chosen, axis=1)
            self._means = (rows, length), Tensor(mean_BN), Tensor(mean_BR)
        tokens_B1 = (batch.labels != IGNORE_INDEX).sum(axis=1, keepdims=True).astype(np.float32)
        if moe.balances_step:  # a loss over the micro-batch, not over its sequences
            tokens_B1[:] = tokens_B1.mean()
        return SequenceWeights(*self._means[1:], Tensor(tokens_B1), valid_N1)

    def rotation(self, positions_N: np.ndarray) -> list[np.ndarray]:
        """Returns the rotations of tokens at these positions for native CPU layers, complex [N, 1, h].

        A second item is for layers with a sliding window, if they have other rotary frequencies.
        """
        return [self.rotary.table(cos[positions_N], sin[positions_N]) for cos, sin in self.angles]

    def tables(self, positions_N: np.ndarray) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Returns the position tables of tokens at these positions, as the kernels take them; items as `rotation`."""
        tables = [self.kernels.rotary_tables(cos[positions_N], sin[positions_N]) for cos, sin in self.angles]
        return [(cos, sin, cos, sin) for cos, sin in tables]

    def _positions(self, batch: AnyBatch) -> Positions:
        length = batch.input_ids.shape[1]
        single = not batch.segment_ids.any() and bool((batch.positions == np.arange(length)).all())
        if single and self._cached_positions is not None and self._cached_positions[0] == batch.input_ids.shape:
            return self._cached_positions[1]
        positions_N = self.part.select_tokens(batch.positions).reshape(-1)
        window = self.settings.sliding_window
        make_mask: Callable = self.masks
        if self.on_arrays:
            make_mask = partial(query_blocks, shard=self.part.ring)
        mask = make_mask(batch.segment_ids)
        window_mask = None
        if self.settings.window_layers:
            window_mask = make_mask(batch.segment_ids, window=window)
        positions: Positions
        if self.on_arrays:
            rotation, *more = self.rotation(positions_N)
            positions = (), (None, None), None, TokenPositions(rotation, mask, window_mask, *more), None
        else:
            tables = self.tables(positions_N)
            positions = tables[0], mask, window_mask, None, tables[-1]
        if single:
            self._cached_positions = batch.input_ids.shape, positions
        return positions


def _mtp_inputs(batch: AnyBatch, offset: int, part: ContextShard) -> MtpInputs:
    """Returns the tokens and labels `offset` positions after those of this rank, within their documents."""
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


def _mtp_labels(batch: AnyBatch, offset: int) -> np.ndarray:
    labels_BT = np.full_like(batch.labels, IGNORE_INDEX)
    if offset < labels_BT.shape[1]:
        same_BT = batch.segment_ids[:, offset:] == batch.segment_ids[:, :-offset]
        labels_BT[:, :-offset] = np.where(same_BT, batch.labels[:, offset:], IGNORE_INDEX)
    return labels_BT


def mtp_labels(batch: AnyBatch, modules: int) -> int:
    """Counts the loss tokens of all MTP modules together."""
    labels = (_mtp_labels(batch, offset) for offset in range(1, modules + 1))
    return sum(int(np.count_nonzero(labels_BT != IGNORE_INDEX)) for labels_BT in labels)
