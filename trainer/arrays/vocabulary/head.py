"""Final norm, output projection and cross entropy on arrays, forward and backward.

The logits of all tokens, [N, V], never exist: some rows go through product, softmax and gradients, and then the next
ones in the same memory. In a training the forward pass computes the gradients of the loss, too (Hsu et al. 2024, Liger
Kernel, section 3.2), so that no logit is computed twice.

Where tensor-parallel ranks shard the vocabulary, they exchange three numbers of each token: the largest logit of their
shard, the sum of exp(logit - largest), and the logit of the label or 0; for `LossTerms` also the sum of the logits.
Each rank only has the logits of its shard.

With a matrix in a narrow dtype the normed rows and the gradients of the logits are rounded; logits, softmax and loss
are float32.

`loss_terms.py` has the terms that a training may add to the cross entropy, `distillation.py` the comparison with the
logits of another model.

Legend: N tokens (n of a tile or of a rank's rows), D hidden, E width of the head, V vocabulary of this rank, R rank of
the adapter, P tensor-parallel ranks, C numbers of each token that they exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays.memory import downcast_if_needed, empty, host_threads, narrow_like, part_of, row_blocks
from trainer.arrays.numpy_operators import soft_cap
from trainer.arrays.operators import operators
from trainer.arrays.stored import StoredMatrix, rows_of
from trainer.arrays.sublayer import CpuLinear
from trainer.arrays.tiles import CpuRmsNorm, shared_product
from trainer.arrays.vocabulary.head_adapter import LORA_A, LORA_B, HeadAdapter, divided_product
from trainer.models.spec.names import norm_bias
from trainer.models.spec.saved import HEAD_ROWS, logit_rows
from trainer.parallel.sharding import shard_range

if TYPE_CHECKING:
    from trainer.arrays.tiles import Gradients, Scratch, SublayerCall, Tile
    from trainer.arrays.vocabulary.distillation import Distillation, WriteLogits
    from trainer.arrays.vocabulary.loss_terms import LossTerms
    from trainer.arrays.vocabulary.preferences import Pairs
    from trainer.models.spec.model import AdapterSpec, NormSpec
    from trainer.parallel.collectives import ProcessGroup
    from trainer.parallel.tensor import TensorParallel

_INPUT_GRADIENT_BLOCK = 256  # rows and columns that a thread takes at once: without AVX-512 64 rows take a fifth longer
_COLUMNS = 1024  # of the vocabulary, that a thread takes at once
_ROWS = 32  # of a softmax that a thread takes at once
_SMALL_GRADIENTS = np.float32(1024)  # gradients of logits are below 1: in float16 times this, so that few become 0


class FusedLinearCrossEntropy:
    """Computes the sum over the loss tokens of logsumexp(logits) - logits[label].

    The weights are "norm", "norm.bias" of a LayerNorm, "weight" [V, E], and "mapping" [E, D] where the head has another
    width than the residual stream.

    Args:
        width: E.
        tensor: The tensor-parallel ranks, which shard the vocabulary; None: this rank has all of it.
        vocabulary: Size of the vocabulary of all ranks; not needed without `tensor`.
        scale: Factor on the logits, which multiplies the normed rows.
        cap: Logits x become cap * tanh(x / cap); None: they stay.
        adapter: That of the projection, whose weights are "lora_A" [R, E] and "lora_B" [V, R]; not with `tensor`.
    """

    def __init__(
        self, width: int, norm: NormSpec, scratch: Scratch, tensor: TensorParallel | None = None, vocabulary: int = 0,
        scale: float = 1.0, cap: float | None = None, adapter: AdapterSpec | None = None,
    ) -> None:  # fmt: skip
        self.adapter = adapter
        self.cap = cap
        self.scale = np.float32(scale)
        self.mapping = CpuLinear("mapping", weight="mapping")
        self.norm = CpuRmsNorm(norm)
        self.width = width
        self.scratch = scratch
        self.tensor = tensor
        self.first_token = 0
        self.largest_shard = 0
        if tensor is not None:
            self.first_token = shard_range(vocabulary, tensor.group.rank, tensor.group.size).start
            self.largest_shard = -(-vocabulary // tensor.group.size)

    def normed(self, call: SublayerCall, x_nD: np.ndarray, y_nE: np.ndarray) -> np.ndarray:
        """Writes the input of the output projection to `y_nE`, float32 [n, E], and returns it."""

        def compute(tile: Tile) -> None:
            """Maps and normalizes the rows of a tile."""
            z_nE = self._mapped(call, x_nD[tile.rows], tile)
            bias_E = call.weights.get(norm_bias("norm"))
            self.norm(z_nE, call.weights["norm"], self.norm.scales(z_nE), y_nE[tile.rows], bias_E)
            if self.scale != 1:
                y_nE[tile.rows] *= self.scale

        self.scratch.run(len(x_nD), compute)
        return y_nE

    def logits(self, call: SublayerCall, x_nD: np.ndarray) -> np.ndarray:
        """Returns the logits of this rank's vocabulary, [n, V]."""
        y_nE = self.normed(call, x_nD, np.empty((len(x_nD), self.width), np.float32))
        weight_VE = call.weights["weight"]
        y_nE = downcast_if_needed(y_nE, narrow_like(y_nE, weight_VE.dtype))
        logits_nV = np.empty((len(y_nE), len(weight_VE)), np.float32)
        adapter = self._adapter_of(call)
        if isinstance(weight_VE, StoredMatrix):
            self._multiply(y_nE, weight_VE, logits_nV, adapter)
        else:
            shared_product(y_nE, weight_VE, logits_nV)
            if adapter is not None:
                adapter.add_logits(adapter.low_rank(y_nE), slice(None), logits_nV)
        if self.cap is not None:
            soft_cap(logits_nV, self.cap)
        return logits_nV

    def logits_by_rows(self, call: SublayerCall, x_ND: np.ndarray) -> WriteLogits:
        """Returns a function that computes the logits of some rows, and keeps none; not with `tensor` or an adapter."""
        weight_VE = call.weights["weight"]
        y_NE = self.normed(call, x_ND, empty(len(x_ND), self.width))
        y_NE = downcast_if_needed(y_NE, narrow_like(y_NE, weight_VE.dtype))

        def write_logits(part: slice, logits_nV: np.ndarray) -> None:
            """Computes the logits of the rows `part`."""
            self._multiply(y_NE[part], weight_VE, logits_nV, None)
            cap = self.cap
            if cap is not None:
                blocks = row_blocks(slice(0, len(logits_nV)), _ROWS)
                host_threads().run(blocks, lambda rows, thread: soft_cap(logits_nV[rows], cap))

        return write_logits

    def _multiply(
        self, y_nE: np.ndarray, weight_VE: np.ndarray, logits_nV: np.ndarray, adapter: HeadAdapter | None
    ) -> None:
        """Computes the logits of normed rows, before the cap."""
        low_nR = None
        if adapter is not None:
            low_nR = adapter.low_rank(y_nE)

        def multiply(columns: slice, thread: int) -> None:
            """Computes the logits of some tokens of the vocabulary, for all rows."""
            operators().matmul(y_nE, rows_of(weight_VE, columns).T, logits_nV[:, columns])
            if adapter is not None and low_nR is not None:
                adapter.add_logits(low_nR, columns, logits_nV[:, columns])

        host_threads().run(row_blocks(slice(0, len(weight_VE)), _COLUMNS), multiply)

    def _adapter_of(self, call: SublayerCall) -> HeadAdapter | None:
        """Returns the adapter with the weights of a call; None without one."""
        if self.adapter is None:
            return None
        return HeadAdapter(self.adapter, call)

    def _mapped(self, call: SublayerCall, x_nD: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns the input of the norm for the rows of a tile."""
        mapping_ED = call.weights.get("mapping")
        if mapping_ED is None:
            return x_nD
        z_nE = tile.take(self.width)
        self.mapping.forward(call, tile.cast(x_nD, mapping_ED.dtype), z_nE, tile)
        return z_nE

    @np.errstate(all="ignore")
    def forward(
        self, call: SublayerCall, x_nD: np.ndarray, labels_N: np.ndarray, valid_N1: np.ndarray,
        pairs: Pairs | None = None, terms: LossTerms | None = None, distillation: Distillation | None = None,
    ) -> np.float32:  # fmt: skip
        """Returns the loss; if `call.save`, also computes the gradients of x and of the trained weights.

        The loss has the `terms`, whose sums the pass computes. Pairs have none. With `distillation` it is the cross
        entropy where the call does not save, else that of `Distillation`; the pass computes the sums of both.

        The loss of `pairs` is a function of the losses of their tokens. Its derivative by each is known only after all
        of them. So the logits are computed twice if the matrix is trained. Otherwise the gradients of the rows wait for
        their factors.
        """
        weight_VE = call.weights["weight"]
        y_NE = self.normed(call, x_nD, empty(len(x_nD), self.width))
        if self.tensor is not None:
            y_NE = self.tensor.gather_tokens(y_NE)
        losses_N = np.zeros(len(y_NE))
        weights_N1 = valid_N1
        pair_loss = np.float32(0)
        adapter = self._adapter_of(call)
        is_frozen = call.save and not call.gradients.needs("weight", LORA_A, LORA_B)
        if not call.save or (pairs is not None and not is_frozen):
            loss = self._loss(
                weight_VE, y_NE, labels_N, valid_N1, None, None, losses_N, adapter, distillation=distillation
            )
            if pairs is not None:
                pair_loss, weights_N1 = pairs.weigh(losses_N, valid_N1)
                loss = pair_loss
            if not call.save:
                return loss
        gradients = call.gradients
        grad_NE = empty(*y_NE.shape)
        weight_grad_VE = None
        if gradients.needs("weight"):
            weight_grad_VE = empty(*weight_VE.shape)
            gradients.arrays["weight"] = weight_grad_VE
        if adapter is not None:
            adapter.allocate_gradients()
        loss = self._loss(
            weight_VE, y_NE, labels_N, weights_N1, grad_NE, weight_grad_VE, losses_N, adapter, terms, distillation
        )
        if pairs is not None and is_frozen:
            pair_loss, weights_N1 = pairs.weigh(losses_N, valid_N1)
            grad_NE *= weights_N1
        if pairs is not None:
            loss = pair_loss
        if self.tensor is not None:
            grad_NE = self.tensor.reduce_partial(grad_NE)
        call.saved["input"] = self._input_gradient(call, x_nD, grad_NE)
        call.saved["weights"] = gradients.compute()
        return loss

    def backward(
        self, call: SublayerCall, x_nD: np.ndarray, labels_N: np.ndarray, valid_N1: np.ndarray, *others_and_grad: Any
    ) -> tuple[np.ndarray, Gradients]:
        """Returns the gradients of x and of the trained weights; overwrites those that the forward pass saved.

        Args:
            others_and_grad: Further arguments of `forward`, which are not used, and last the gradient of the loss.
        """
        input_grad = call.saved["input"]
        weight_grads = call.saved["weights"]
        if others_and_grad[-1] != 1:
            for gradient in (input_grad, *weight_grads.values()):
                gradient *= others_and_grad[-1]
        return input_grad, weight_grads

    def _loss(
        self, weight_VE: np.ndarray, y_NE: np.ndarray, labels_N: np.ndarray, valid_N1: np.ndarray,
        grad_NE: np.ndarray | None, weight_grad_VE: np.ndarray | None, out_N: np.ndarray, adapter: HeadAdapter | None,
        terms: LossTerms | None = None, distillation: Distillation | None = None,
    ) -> np.float32:  # fmt: skip
        """Returns the loss, and writes the cross entropies of the tokens to `out_N`, and the gradients.

        With gradients it overwrites `y_NE`.
        """
        # All ranks take equally many rows, also where the shards of the vocabulary differ in size.
        rows = logit_rows(len(y_NE), self.largest_shard or len(weight_VE))
        dtype = weight_VE.dtype
        # np.empty would take memory from the system each time, which costs a third of the product.
        logits_nV = self.scratch.take_for_part(rows, len(weight_VE))
        slope_nV = None
        if self.cap is not None and grad_NE is not None:
            slope_nV = empty(rows, len(weight_VE))
        narrow_nE = narrow_nV = None
        if dtype != np.float32:
            narrow_nE = empty(rows, self.width, dtype=dtype)
            if grad_NE is not None:
                narrow_nV = self.scratch.take_for_part(rows, len(weight_VE), dtype=dtype.type)
        part_VE = None
        if isinstance(weight_VE, StoredMatrix) and grad_NE is not None:
            part_VE = self.scratch.take_for_part(min(HEAD_ROWS, len(weight_VE)), self.width, dtype=dtype.type)
        if distillation is not None:
            distillation.allocate(rows, len(weight_VE))
        loss = 0.0
        for part in row_blocks(slice(0, len(y_NE)), rows):
            size = part.stop - part.start
            y_nE = y_NE[part]
            valid_n1 = valid_N1[part]
            if narrow_nE is None:
                factor_nE = y_nE
            else:
                factor_nE = downcast_if_needed(y_nE, narrow_nE[:size])
            grad_nV = part_of(narrow_nV, slice(size))
            if grad_NE is not None and grad_nV is None:
                grad_nV = logits_nV[:size]
            weights_n = valid_n1[:, 0].astype(np.float64)
            if distillation is not None:
                distillation.take_rows(part)
            losses_n = self._losses(
                logits_nV[:size], factor_nE, weight_VE, labels_N[part], grad_nV, part_of(slope_nV, slice(size)),
                adapter, terms, weights_n, distillation,
            )  # fmt: skip
            out_N[part] = losses_n
            loss += float(losses_n @ weights_n)
            if grad_NE is not None and grad_nV is not None:
                y_nE *= valid_n1
                if narrow_nE is not None:
                    downcast_if_needed(y_nE, factor_nE)
                self._gradients(
                    grad_nV, factor_nE, weight_VE, part_VE, grad_NE[part], weight_grad_VE, first=not part.start
                )
                if adapter is not None:
                    adapter.add_gradients(grad_nV, factor_nE, grad_NE[part], _gradient_factor(grad_nV.dtype))
                grad_NE[part] *= valid_n1
        if terms is not None:
            loss = terms.total
        if distillation is not None:
            minimised = distillation.finish(loss)
            if grad_NE is not None:
                loss = minimised
        return np.float32(loss)

    def _losses(
        self, logits_nV: np.ndarray, y_nE: np.ndarray, weight_VE: np.ndarray, labels_n: np.ndarray,
        grad_nV: np.ndarray | None, slope_nV: np.ndarray | None, adapter: HeadAdapter | None,
        terms: LossTerms | None, weights_n: np.ndarray, distillation: Distillation | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Returns the cross entropy of each row; `grad_nV`, which may be `logits_nV`, receives d loss / d logits.

        `slope_nV` receives the derivatives of the capped logits, if there is a cap and a gradient; `terms` and
        `distillation` the sums of the rows with these weights.
        """
        losses_n = np.empty(len(y_nE))
        above_n = np.empty(len(y_nE), np.float32)  # the largest logit minus that of the label
        inverse_sum_n = np.empty(len(y_nE), np.float32)
        largest_n = np.empty(len(y_nE), np.float32)
        label_n = np.empty(len(y_nE), np.float32)
        sum_n = None  # of the logits
        if terms is not None:
            sum_n = np.empty(len(y_nE))
        place_n = labels_n - self.first_token
        inside_n = (place_n >= 0) & (place_n < len(weight_VE))
        place_n = place_n * inside_n

        def normalise(rows: slice, thread: int) -> None:
            """Turns the logits of some rows into probabilities over this rank's tokens."""
            logits = logits_nV[rows]
            if self.cap is not None:
                soft_cap(logits, self.cap, part_of(slope_nV, rows))
            largest_n[rows] = logits.max(1)
            label_n[rows] = logits[np.arange(len(logits)), place_n[rows]] * inside_n[rows]
            # The difference of the logits comes first: it keeps its digits also for large logits.
            above_n[rows] = largest_n[rows] - label_n[rows]
            if sum_n is not None:
                sum_n[rows] = logits.sum(1, dtype=np.float64)
            if distillation is not None:
                distillation.compare(rows, logits)
            operators().softmax(logits, logits)
            inverse_sum_n[rows] = logits.max(1)  # the largest logit has the probability exp(0) / sum
            if self.tensor is None:
                finish(rows, thread)

        def finish(rows: slice, thread: int) -> None:
            """Computes the losses of some rows and the gradients of their logits."""
            logits = logits_nV[rows]
            losses_n[rows] = above_n[rows] - np.log(inverse_sum_n[rows], dtype=np.float64)
            if grad_nV is None:
                return
            label_part = np.float32(1)
            if terms is not None:
                terms.differentiate(logits, largest_n[rows] - np.log(inverse_sum_n[rows], dtype=np.float64))
                label_part = np.float32(1 - terms.smoothing)
            logits[np.arange(len(logits)), place_n[rows]] -= label_part * inside_n[rows]
            if distillation is not None:
                distillation.differentiate(rows, logits)
            if slope_nV is not None:
                logits *= slope_nV[rows]
            if grad_nV.dtype == np.float16:
                logits *= _SMALL_GRADIENTS
            downcast_if_needed(logits, grad_nV[rows])

        def scale_shard(rows: slice, thread: int) -> None:
            """Turns probabilities over this rank's tokens into those over the vocabulary."""
            logits_nV[rows] *= share_n[rows, None]
            finish(rows, thread)

        self._multiply(y_nE, weight_VE, logits_nV, adapter)
        host_threads().run(row_blocks(slice(0, len(y_nE)), _ROWS), normalise)
        if self.tensor is not None:
            share_n = self._combine_shards(self.tensor.group, largest_n, label_n, above_n, inverse_sum_n, sum_n)
            host_threads().run(row_blocks(slice(0, len(y_nE)), _ROWS), scale_shard)
        if terms is not None and sum_n is not None:
            lse_n = largest_n - np.log(inverse_sum_n, dtype=np.float64)
            terms.add(losses_n, lse_n, sum_n / terms.vocabulary, weights_n)
        if distillation is not None:
            distillation.add(losses_n, weights_n)
        return losses_n

    @staticmethod
    def _combine_shards(
        group: ProcessGroup, largest_n: np.ndarray, label_n: np.ndarray, above_n: np.ndarray, inverse_sum_n: np.ndarray,
        sum_n: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        """Replaces all of these but `label_n` by their values for the vocabulary of all ranks.

        Returns the probability of this rank's shard, [n].
        """
        numbers = [largest_n, 1 / inverse_sum_n, label_n]
        if sum_n is not None:
            numbers.append(sum_n.astype(np.float32))
        every_PCn = group.all_gather(np.stack(numbers))
        over_all_n = every_PCn[:, 0].max(0)
        mass_Pn = every_PCn[:, 1] * np.exp(every_PCn[:, 0] - over_all_n)
        total_n = mass_Pn.sum(0)
        largest_n[...] = over_all_n
        if sum_n is not None:
            sum_n[...] = every_PCn[:, 3].sum(0, dtype=np.float64)
        above_n[...] = over_all_n - every_PCn[:, 2].sum(0)
        inverse_sum_n[...] = 1 / total_n
        return mass_Pn[group.rank] / total_n

    def _gradients(
        self, grad_nV: np.ndarray, y_nE: np.ndarray, weight_VE: np.ndarray, part_VE: np.ndarray | None,
        out_nE: np.ndarray, out_VE: np.ndarray | None, first: bool,
    ) -> None:  # fmt: skip
        """Writes the gradient of y to `out_nE`, and that of the matrix to `out_VE`.

        Args:
            y_nE: The normed rows times valid_n1.
            part_VE: Memory for some rows of a `StoredMatrix`.
            out_VE: None: the matrix is not trained.
            first: Write the gradient of the matrix; False: add it to that of earlier tokens.
        """
        divisor = _gradient_factor(grad_nV.dtype)

        def compute_input_block(block: tuple[slice, slice], thread: int) -> None:
            """Computes the gradients of some rows and columns of the input, or adds those of some tokens."""
            rows, inputs = block
            operators().matmul(grad_nV[rows, columns], part_vE[:, inputs], out_nE[rows, inputs], columns.start > 0)

        def compute_weight_rows(columns: slice, thread: int) -> None:
            """Adds the gradients of some rows of the weight."""
            assert out_VE is not None
            divided_product(grad_nV[:, columns].T, y_nE, out_VE[columns], divisor, not first)

        blocks = [
            (rows, inputs)
            for rows in row_blocks(slice(0, len(y_nE)), _INPUT_GRADIENT_BLOCK)
            for inputs in row_blocks(slice(0, self.width), _INPUT_GRADIENT_BLOCK)
        ]
        columns = slice(0, len(weight_VE))
        part_vE = weight_VE
        if isinstance(weight_VE, StoredMatrix):
            assert part_VE is not None
            for columns in row_blocks(slice(0, len(weight_VE)), len(part_VE)):
                part_vE = part_VE[: columns.stop - columns.start]
                weight_VE.decompress_rows(columns, part_vE)
                host_threads().run(blocks, compute_input_block)
        else:
            host_threads().run(blocks, compute_input_block)
        if divisor != 1:
            out_nE /= divisor
        if out_VE is not None:
            host_threads().run(row_blocks(slice(0, len(weight_VE)), _COLUMNS), compute_weight_rows)

    def _input_gradient(self, call: SublayerCall, x_nD: np.ndarray, grad_nE: np.ndarray) -> np.ndarray:
        """Returns the gradient of x from that of the normed rows, `grad_nE`, which it overwrites."""
        maps = "mapping" in call.weights
        out_nD = empty(*x_nD.shape)
        mapped_grad_nE = out_nD
        if maps:
            mapped_grad_nE = grad_nE

        def compute(tile: Tile) -> None:
            """Takes the gradients of a tile back through the norm."""
            into_nE = mapped_grad_nE[tile.rows]
            if not maps:
                into_nE[...] = grad_nE[tile.rows]
            if self.scale != 1:
                into_nE *= self.scale
            self.norm.backward(call, "norm", self._mapped(call, x_nD[tile.rows], tile), into_nE, tile)

        self.scratch.run(len(x_nD), compute)
        if maps:
            self.mapping.backward_rows(call, grad_nE, x_nD, out_nD, self.scratch)
        return out_nD


def _gradient_factor(dtype: np.dtype) -> np.float32:
    """Returns what gradients of logits are multiplied by in this dtype."""
    if dtype == np.float16:
        return _SMALL_GRADIENTS
    return np.float32(1)
