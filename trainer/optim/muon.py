"""Muon: orthogonalises the momentum of each matrix before it updates the weights; AdamW updates all other parameters.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the step length of Liu et al. 2025 ("Muon is scalable for
LLM training", section 2.2), as in MindSpore Transformers, so that a learning rate for AdamW fits Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import mindspore
from mindspore import Parameter, Tensor, ops
from mindspore.ops import operations as P

from trainer.optim.adamw import AdamW
from trainer.optim.base import Optimizer, expand_scale, scalar
from trainer.optim.groups import ParameterGroup

if TYPE_CHECKING:
    from trainer.config.schema.optimizer import OptimizerConfig
    from trainer.parallel.sharding import OptimizerShard, ShardSpec
    from trainer.parallel.tensor import TensorShardedMatrices
    from trainer.storage.tensor_file import ArrayOrLazyArray


class Muon(Optimizer):
    """b = momentum b + g;  d = g + momentum b (nesterov) or b;  p = p - lr decay p - lr r orthogonal(d)

    r = matched_adamw_rms sqrt(max(rows, columns)) gives an update the root mean square of AdamW's updates. Without it
    r = sqrt(max(1, rows / columns)), as in Jordan et al. AdamW updates the other groups with the same learning rate.

    If ranks shard a matrix or its momentum, they gather the direction of one matrix after the other. Each rank computes
    the same update and applies its shard of it (Liu et al. 2025, section 2.3).

    Args:
        compiled: Whether to compile the orthogonalisation, once for each shape.
        parts: How tensor-parallel ranks shard matrices; None if they do not.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig,
        compiled: bool = True, shards: Mapping[str, OptimizerShard] | None = None,
        parts: TensorShardedMatrices | None = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, groups, (), shards)
        self.parts = parts
        by_muon = {name for group in groups if group.optimizer == "Muon" for name in group.parameters}
        self.matrices = {name: parameter for name, parameter in self.parameters.items() if name in by_muon}
        others = {name: parameter for name, parameter in self.parameters.items() if name not in by_muon}
        other_shards = {name: shard for name, shard in self.shards.items() if name in others}
        self.adamw = AdamW(others, groups, settings, shards=other_shards)
        buffers = {name: self.new_array(self.state_shape(name), f"momentum_buffer.{name}") for name in self.matrices}
        self.state = {"momentum_buffer": buffers, **self.adamw.state}
        self.momentum = scalar(settings.momentum)
        self.nesterov = settings.nesterov
        self.rms = settings.matched_adamw_rms
        if compiled:
            self.iterate = mindspore.jit(_newton_schulz)
        else:
            self.iterate = _newton_schulz
        self.eps = scalar(settings.ns_eps)
        self.coefficients = [tuple(map(scalar, triple)) for triple in settings.newton_schulz]

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        """Updates the matrices by Muon, and the other weights by AdamW."""
        self.updates += 1
        gradient_of = dict(zip(self.parameters, gradients, strict=True))
        scale_of = dict(zip(self.parameters, expand_scale(scale, len(gradients)), strict=True))
        others = list(self.adamw.parameters)
        self.adamw.update([gradient_of[name] for name in others], lr, [scale_of[name] for name in others])
        for name, matrix in self.matrices.items():
            self.update_matrix(name, matrix, gradient_of[name], scale_of[name], lr * self.lr_ratio[name])

    def update_matrix(self, name: str, matrix: Parameter, gradient: Tensor, scale: float, lr: float) -> None:
        """Updates one matrix, or the matrices of a layer's experts [E, rows, columns], in place."""
        shard = self.shards.get(name)
        if shard is not None:
            gradient = self.local_slice(gradient, name)
        if scale != 1.0:
            gradient = gradient * scalar(scale)
        buffer = self.state["momentum_buffer"][name]
        buffer.copy_(buffer * self.momentum + gradient)
        direction = buffer
        if self.nesterov:
            direction = gradient + buffer * self.momentum
        if shard is not None:
            assert shard.gather is not None, "an optimizer whose state is sharded has this collective"
            direction = shard.gather(direction, matrix.size).reshape(matrix.shape)
        if self.parts is not None:
            direction = self.parts.unshard(name, direction)
        step = scalar(lr * self.step_length(*direction.shape[-2:]))
        if len(matrix.shape) == 3:  # each expert's matrix by itself
            direction = ops.concat([self.orthogonal(one).expand_dims(0) for one in ops.unbind(direction)])
        else:
            direction = self.orthogonal(direction)
        if self.parts is not None:
            direction = self.parts.local_shard(name, direction)
        weights = matrix
        if shard is not None and shard.shards_weights:
            weights = self.local_slice(matrix, name)
            direction = self.local_slice(direction, name)
        decayed = weights
        if self.decay[name]:
            decayed = weights * scalar(1 - lr * self.decay[name])
        updated = decayed - direction * step
        if shard is None or weights is matrix:
            matrix.copy_(updated)
        else:
            assert shard.all_gather is not None, "an optimizer whose state is sharded has this collective"
            shard.all_gather([matrix], [updated])

    def step_length(self, rows: int, columns: int) -> float:
        """Returns r of the class docstring for a matrix of this shape."""
        if self.rms is None:
            return math.sqrt(max(1.0, rows / columns))
        return self.rms * math.sqrt(max(rows, columns))

    def orthogonal(self, direction: Tensor) -> Tensor:
        """Computes nearly U V^T of the singular value decomposition U S V^T: singular values of about 0.7 to 1.2."""
        tall = direction.shape[0] > direction.shape[1]
        x = direction
        if tall:
            x = ops.transpose(direction, (1, 0))
        # The Frobenius norm bounds the largest singular value, which must be at most 1.
        norm = ops.sqrt(P.MatMul(transpose_b=True)(x.reshape(1, -1), x.reshape(1, -1)).reshape(()))
        x = x / (norm + self.eps)
        for coefficients in self.coefficients:
            x = self.iterate(x, *coefficients)
        if tall:
            return ops.transpose(x, (1, 0))
        return x

    def load_state(
        self, arrays: Mapping[str, ArrayOrLazyArray], updates: int, part_of: Callable[[str], ShardSpec] | None = None
    ) -> None:
        super().load_state(arrays, updates, part_of)
        self.adamw.updates = updates


def _newton_schulz(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes a x + (b A + c A A) x with A = x x^T: a s + b s^3 + c s^5 of each singular value s."""
    square = P.MatMul(transpose_b=True)(x, x)
    return x * a + P.MatMul()(square * b + P.MatMul()(square, square) * c, x)
