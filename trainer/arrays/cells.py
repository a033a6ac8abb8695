"""The parts of a decoder on a CPU as cells: embedding, blocks and head, computed by `trainer.ops.cpu` on arrays.

A part is a cell with a `bprop` of its own, new for each call, which keeps what its backward pass needs. Only weights
that are trained are its inputs: no gradient is computed of the others. They are the parameters themselves, as the array
of a view, and of a gradient that went through one, would be a copy. Nothing is compiled.

Legend: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from trainer.arrays.head import HostHead, embedding_gradient, embedding_rows
from trainer.arrays.memory import Scratch, empty, host_threads, narrow_weight, on_host
from trainer.arrays.norms import RmsNorm, RowExchange
from trainer.arrays.positions import Gradients, TokenPositions, Weights
from trainer.arrays.router import sigmoid
from trainer.arrays.sublayers import HostAttention, HostMlp

if TYPE_CHECKING:
    from trainer.config import ModelConfig


class HostBlock:
    """The functions of a block, which serve all layers.

    Args:
        settings: Those that this rank computes with.
        dtype: That of the products, "float32" or "bfloat16".
        exchange: Of tensor-parallel ranks, whose products are in float32.
    """

    def __init__(self, settings: ModelConfig, dtype: str = "float32", exchange: RowExchange | None = None) -> None:
        scratch, self.dtype = Scratch(host_threads().threads), dtype
        self.attention = HostAttention(settings, scratch, exchange)
        norm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)
        self.mlp = HostMlp(settings.ffn_size, scratch, norm, exchange=exchange)


class HostLayerPart:
    """A block or a sublayer of it with the weights of one layer: (x_ND, positions) -> x_ND.

    Args:
        part: "block", "attention" or "mlp".
        named: The weights that it uses, by their names in a block.
        windowed: Whether the layer's attention has a sliding window.
        recomputed: Compute its activations again in the backward pass; also where no gradient flows through it.
    """

    def __init__(
        self, block: HostBlock, part: str, named: Mapping[str, Parameter], *, windowed: bool, recomputed: bool
    ) -> None:
        self.block, self.named, self.windowed, self.recomputed = block, dict(named), windowed, recomputed
        self.has_attention, self.has_mlp = part in ("block", "attention"), part in ("block", "mlp")

    @property
    def weights(self) -> list[Parameter]:
        return list(self.named.values())

    def __call__(self, x_ND: Tensor, positions: TokenPositions, trains: bool) -> Tensor:
        """Without `trains` nothing is kept for a backward pass, which would compute it again."""
        trained = [name for name, weight in self.named.items() if weight.requires_grad]
        keeps = trains and not self.recomputed
        return _LayerCall(self, positions, trained, keeps)(x_ND, *(self.named[name] for name in trained))

    def forward(
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, keeps: bool = True, adds: bool = True
    ) -> tuple[Tensor, tuple | None]:
        """The result, and what `backward` takes; without `keeps` None. Without `adds` the result is not computed."""
        middle_ND, attention, mlp = x_ND, None, None
        if self.has_attention:
            result, attention = self.block.attention.forward(
                x_ND, weights, positions, self._blocks(positions), keeps, adds or self.has_mlp
            )
            middle_ND = result.asnumpy()
        if self.has_mlp:
            result, mlp = self.block.mlp.forward(middle_ND, weights, keeps, adds)
        return result, (middle_ND, attention, mlp) if keeps else None

    def backward(
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, saved: tuple, grad_ND: np.ndarray,
        trained: Iterable[str],
    ) -> tuple[Tensor, Gradients]:  # fmt: skip
        middle_ND, attention, mlp = saved
        found: Gradients = {}
        if self.has_mlp:
            result, found = self.block.mlp.backward(middle_ND, weights, mlp, grad_ND, trained)
            grad_ND = result.asnumpy()
        if self.has_attention:
            result, more = self.block.attention.backward(
                x_ND, weights, positions, self._blocks(positions), attention, grad_ND, trained
            )
            found |= more
        return result, found

    def _blocks(self, positions: TokenPositions) -> tuple:
        return positions.window_blocks if self.windowed else positions.blocks


class _LayerCall(nn.Cell):
    """One call of a part. MindSpore runs `construct` of a cell with a `bprop` without recording it."""

    def __init__(self, part: HostLayerPart, positions: TokenPositions, trained: list[str], keeps: bool) -> None:
        super().__init__(auto_prefix=False)
        self.part, self.positions, self.trained, self.keeps = part, positions, trained, keeps
        self.saved: tuple | None = None

    def construct(self, x_ND, *trained):
        result, self.saved = self.part.forward(on_host(x_ND), self.arrays(), self.positions, self.keeps)
        return result

    def bprop(self, x_ND, *trained_out_grad):
        x, weights, saved = on_host(x_ND), self.arrays(), self.saved
        if saved is None:
            saved = self.part.forward(x, weights, self.positions, adds=False)[1]
        self.saved = None
        grad, found = self.part.backward(
            x, weights, self.positions, saved, on_host(trained_out_grad[-1]), self.trained
        )
        return grad, *(found[name] for name in self.trained)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: _weight(weight, self.part.block.dtype) for name, weight in self.part.named.items()}


def _weight(weight: Tensor, dtype: str) -> np.ndarray:
    """What a part computes with: of a matrix the numbers in the dtype of the products."""
    array = on_host(weight)
    return narrow_weight(array) if array.ndim == 2 and dtype == "bfloat16" else array


class HostNorm:
    """(x_ND, weight_D) -> normed x: the norm before experts."""

    def __init__(self, size: int, eps: float) -> None:
        self.norm = RmsNorm(size, eps)

    def __call__(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        return _NormCall(self.norm)(x_ND, weight_D)


class _NormCall(nn.Cell):
    """One call of a norm, which keeps the factors of the rows."""

    def __init__(self, norm: RmsNorm) -> None:
        super().__init__(auto_prefix=False)
        self.norm, self.scale_N = norm, None

    def construct(self, x_ND, weight_D):
        (result, out_ND), x = empty(*x_ND.shape), on_host(x_ND)
        self.scale_N = self.norm.scales(x)
        self.norm(x, on_host(weight_D), self.scale_N, out_ND)
        return result

    def bprop(self, x_ND, weight_D, out, grad_ND):
        (result, out_ND), x = empty(*x_ND.shape), on_host(x_ND)
        out_ND[...] = on_host(grad_ND)
        of_weight_D = self.norm.gradient(x, on_host(weight_D), self.scale_N, out_ND, empty(*x_ND.shape)[1])
        return result, Tensor(of_weight_D)


_SHARED = "gate_proj.weight", "up_proj.weight", "down_proj.weight"


class HostSharedExperts:
    """(y_ND, gate_SD, up_SD, down_DS[, weight_1D]) -> [N, D], as `trainer.models.moe.SharedExperts`."""

    def __init__(self, settings: ModelConfig, dtype: str = "float32") -> None:
        self.mlp = HostMlp(settings.shared_expert_size, Scratch(host_threads().threads), prefix="")
        self.dtype = dtype

    def __call__(self, y_ND: Tensor, *weights: Tensor) -> Tensor:
        return _SharedExpertsCall(self.mlp, self.dtype)(y_ND, *weights)


class _SharedExpertsCall(nn.Cell):
    """One call, which keeps what its backward pass needs."""

    def __init__(self, mlp: HostMlp, dtype: str) -> None:
        super().__init__(auto_prefix=False)
        self.mlp, self.dtype, self.saved, self.share_N1, self.out_ND = mlp, dtype, None, None, None

    def construct(self, y_ND, *weights):
        y, arrays = on_host(y_ND), self.arrays(weights)
        result, self.saved = self.mlp.forward(y, arrays)
        if len(weights) > len(_SHARED):
            self.share_N1, self.out_ND = sigmoid(y @ on_host(weights[-1]).T), result.asnumpy()
            result, out_ND = empty(*y.shape)
            np.multiply(self.out_ND, self.share_N1, out=out_ND)
        return result

    def bprop(self, y_ND, *weights_out_grad):
        weights, grad = weights_out_grad[:-2], on_host(weights_out_grad[-1])
        y, saved = on_host(y_ND), self.saved
        of_score_N1 = None
        if self.share_N1 is not None:
            of_score_N1 = np.einsum("nd,nd->n", grad, self.out_ND)[:, None] * self.share_N1 * (1 - self.share_N1)
            grad = grad * self.share_N1
        self.saved = self.out_ND = None
        result, found = self.mlp.backward(y, self.arrays(weights), saved, grad, _SHARED)
        gradients = [found[name] for name in _SHARED]
        if of_score_N1 is not None:
            result.asnumpy()[...] += of_score_N1 * on_host(weights[-1])
            gradients.append(Tensor(of_score_N1.T @ y))
        return result, *gradients

    def arrays(self, weights) -> dict[str, np.ndarray]:
        return {name: _weight(one, self.dtype) for name, one in zip(_SHARED, weights, strict=False)}


class HostEmbedding(nn.Cell):
    """One look-up of tokens: weight_VD -> x_ND."""

    def __init__(self, ids_N: Tensor) -> None:
        super().__init__(auto_prefix=False)
        self.ids_N = ids_N.asnumpy()

    def construct(self, weight_VD):
        return embedding_rows(on_host(weight_VD), self.ids_N)

    def bprop(self, weight_VD, out, grad_ND):
        return (embedding_gradient(weight_VD.shape, self.ids_N, on_host(grad_ND)),)


class HostHeadPart:
    """(x_ND, norm, matrix, labels, trains) -> sum of token losses: final norm, output projection, cross entropy."""

    def __init__(self, settings: ModelConfig, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.head = HostHead(settings.hidden_size, settings.rms_norm_eps)

    def __call__(
        self, x_ND: Tensor, norm_D: Parameter, weight_VD: Parameter, labels: Any, trains: bool
    ) -> Tensor:
        """`labels` has labels_N and valid_N1; without `trains` there is no backward pass."""
        named = {"norm": norm_D, "weight": weight_VD}
        trained = [name for name, weight in named.items() if weight.requires_grad]
        numbers = labels.labels_N.asnumpy(), on_host(labels.valid_N1)
        call = _HeadCall(self.head, named, trained, *numbers, trains, self.dtype)
        return call(x_ND, *(named[name] for name in trained))


class _HeadCall(nn.Cell):
    """One call of the head, which keeps the gradients of its loss."""

    def __init__(
        self, head: HostHead, named: dict[str, Parameter], trained: list[str], labels_N: np.ndarray,
        valid_N1: np.ndarray, trains: bool, dtype: str,
    ) -> None:  # fmt: skip
        super().__init__(auto_prefix=False)
        self.head, self.weights, self.trained, self.trains, self.dtype = head, named, trained, trains, dtype
        self.labels_N, self.valid_N1, self.found = labels_N, valid_N1, None

    def construct(self, x_ND, *trained):
        wanted = ("x", *self.trained) if self.trains else ()
        weights = (_weight(self.weights[name], self.dtype) for name in ("norm", "weight"))
        self.found = self.head(on_host(x_ND), *weights, self.labels_N, self.valid_N1, wanted)
        return Tensor(self.found.loss)

    def bprop(self, x_ND, *trained_out_grad):
        factor, found = on_host(trained_out_grad[-1]), self.found
        gradients = {"norm": found.norm_D, "weight": found.weight_VD}
        self.found = None
        wanted = [found.grad_ND, *(gradients[name] for name in self.trained)]
        for gradient in wanted:
            gradient.asnumpy()[...] *= factor
        return tuple(wanted)
