"""The classifier of images in semi-automatic mode, with data parallelism only.

Legend: as in trainer/models/classifier.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Parameter, ParameterTuple, Tensor, lazy_inline, nn
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import SumExt

from trainer.models.classifier import FullyConnected
from trainer.models.spec.shapes import classifier_names, parameter_shapes
from trainer.ops.plain import shard_operators
from trainer.optim.freeze import trained_shapes

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.ops.kernel_set import KernelSet


class ImageLossCell(nn.Cell):
    """(pixels_BP, targets_BC, share_B1) -> the scalar loss to minimise.

    `targets_BC` are one-hot, and zeros for an image without a label. `share_B1` is the weight of an image's loss.
    """

    def __init__(self, config: Config, kernels: KernelSet) -> None:
        super().__init__(auto_prefix=False)
        settings = config.classifier
        assert settings is not None
        trained = trained_shapes(config)
        self.by_name = {
            name: Parameter(initializer("zeros", shape, mstype.float32), name, requires_grad=name in trained)
            for name, shape in parameter_shapes(settings).items()
        }
        ordered = [name for pair in classifier_names(settings) for name in pair]
        self.weights = ParameterTuple([self.by_name[name] for name in ordered])
        self.layers = FullyConnected(settings, kernels)
        self.classes = settings.classes
        self.count = len(ordered)
        self.log_softmax = P.LogSoftmax(-1)
        self.pick = P.Mul()
        self.weigh = P.Mul()
        self.total = SumExt()
        self.negate = P.Neg()
        self.best = P.ArgMaxWithValue(axis=1)
        self.one_hot = P.OneHot()
        self.hit = P.Mul()
        self.hits = SumExt()
        self.one = Tensor(1.0, mstype.float32)
        self.zero = Tensor(0.0, mstype.float32)

    def construct(self, pixels_BP: Tensor, targets_BC: Tensor, share_B1: Tensor) -> Tensor:
        return self.loss(self.logits(pixels_BP), targets_BC, share_B1)

    def evaluated(self, pixels_BP: Tensor, targets_BC: Tensor, share_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses, and the number of images whose largest logit is that of their label."""
        logits_BC = self.logits(pixels_BP)
        predicted_BC = self.one_hot(self.best(logits_BC)[0], self.classes, self.one, self.zero)
        return self.loss(logits_BC, targets_BC, share_B1), self.hits(self.hit(predicted_BC, targets_BC))

    def logits(self, pixels_BP: Tensor) -> Tensor:
        """Computes logits_BC."""
        weights = ()
        for place in range(self.count):
            weights += (self.weights[place],)
        return self.layers(pixels_BP, *weights)

    def loss(self, logits_BC: Tensor, targets_BC: Tensor, share_B1: Tensor) -> Tensor:
        """Computes the weighted sum of the images' losses."""
        picked_BC = self.pick(self.log_softmax(logits_BC), targets_BC)
        return self.negate(self.total(self.weigh(picked_BC, share_B1)))

    def shard_over(self, data: int) -> None:
        """Shards the batch over `data` ranks."""
        for linear in self.layers.linears:
            linear.shard_over(data)
        shard_operators(self.layers, {"relu": "d."}, d=data)
        axes = {"log_softmax total best hits": "d.", "pick weigh hit": "d.,d.", "one_hot": "d.,,"}
        shard_operators(self, axes, d=data)


class LazyImageLossCell(ImageLossCell):
    """An `ImageLossCell` whose micro-batches call one graph, which MindSpore inlines late."""

    @lazy_inline
    def __init__(self, config: Config, kernels: KernelSet) -> None:
        super().__init__(config, kernels)
