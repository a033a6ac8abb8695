"""The classifier of images: fully connected layers with ReLU between them, and cross entropy.

A step trains it like a decoder: called with its inputs it returns sums of losses.

Legend: B images, P pixels, C classes, I/O in/out features.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.data.batches.batch import IGNORE_INDEX
from trainer.data.source.images import ImageBatch
from trainer.models.compute_weights import ModelParams
from trainer.models.inputs import LossSums
from trainer.models.recompute import Compiled, Differentiable, compile_cell
from trainer.models.spec.init import initial_value
from trainer.models.spec.shapes import parameter_specs

if TYPE_CHECKING:
    from trainer.config.schema.images import ClassifierConfig
    from trainer.models.inputs import PassObserver, RouterStatistics
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.routing import RoutingCounts


class ImageInputs(NamedTuple):
    """One micro-batch on the device."""

    pixels_BP: Tensor
    """float32, normalized by the settings `pixel_mean` and `pixel_std`."""
    targets_BC: Tensor
    """float32, one-hot; zeros where there is no loss."""


class ImageInputBuilder:
    """Turns an `ImageBatch` into `ImageInputs`."""

    def __init__(self, settings: ClassifierConfig) -> None:
        self.settings = settings
        self.rows_CC = np.eye(settings.classes, dtype=np.float32)

    def __call__(self, batch: ImageBatch) -> ImageInputs:
        valid_B1 = (batch.labels != IGNORE_INDEX)[:, None]
        pixels_BP = (batch.pixels.astype(np.float32) / 255 - self.settings.pixel_mean) / self.settings.pixel_std
        targets_BC = self.rows_CC[np.where(valid_B1[:, 0], batch.labels, 0)] * valid_B1
        return ImageInputs(Tensor(pixels_BP.astype(np.float32)), Tensor(targets_BC.astype(np.float32)))


class FullyConnected(nn.Cell):
    """(x_BP, weight_OI, bias_O, weight_OI, bias_O, ...) -> logits_BC."""

    def __init__(self, settings: ClassifierConfig, kernels: KernelSet) -> None:
        super().__init__()
        # One instance for every call site: see trainer/ops/__init__.py.
        self.linears = nn.CellList([kernels.linear() for _ in settings.linears])
        self.last = len(settings.linears) - 1
        self.relu = P.ReLU()

    def construct(self, x_BP: Tensor, *weights: Tensor) -> Tensor:
        """Returns the logits; a ReLU follows each layer but the last."""
        x = x_BP
        for layer, linear in enumerate(self.linears):
            x = linear(x, weights[2 * layer], weights[2 * layer + 1])
            if layer < self.last:
                x = self.relu(x)
        return x


class ImageLoss(nn.Cell):
    """(logits_BC, targets_BC) -> the sum of the images' losses."""

    def __init__(self) -> None:
        super().__init__()
        self.log_softmax = P.LogSoftmax(-1)

    def construct(self, logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
        return -(self.log_softmax(logits_BC) * targets_BC).sum()


class CorrectLabels(nn.Cell):
    """(logits_BC, targets_BC) -> the number of images whose largest logit is that of their label."""

    def __init__(self) -> None:
        super().__init__()
        self.best = P.ArgMaxWithValue(axis=1)

    def construct(self, logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
        predicted_B1 = self.best(logits_BC)[0].reshape(-1, 1).astype(mstype.int64)
        return ops.gather_elements(targets_BC, 1, predicted_B1).sum()


class Classifier(nn.Cell):
    """The classifier of the section `model.classifier`; the other arguments are those of `Decoder`."""

    shard = None  # every rank has all of it
    mtp_modules = 0

    def __init__(
        self, settings: ClassifierConfig, kernels: KernelSet, *, seed: int, compiled: Compiled = True,
        frozen: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(auto_prefix=False)
        self.settings = settings
        self.kernels = kernels
        specs = parameter_specs(settings)
        self.parameters_by_name = {
            name: Parameter(Tensor(initial_value(spec, settings, seed)), name, requires_grad=name not in frozen)
            for name, spec in specs.items()
        }
        self.compute_weights = ModelParams(self.parameters_by_name, kernels.compute_dtype, specs)
        self.ordered = list(self.parameters_by_name.values())
        argnums = tuple(argnum for argnum, parameter in enumerate(self.ordered) if not parameter.requires_grad)
        self.layers = FullyConnected(settings, kernels)
        self.run_layers = Differentiable(self.layers, compiled).stop_gradients_at(argnums)
        self.loss = compile_cell(ImageLoss(), compiled)
        self.correct_labels = compile_cell(CorrectLabels(), compiled)

    def construct(
        self, inputs: ImageInputs, dropout: DropoutKey | None = None, statistics: RouterStatistics | None = None,
        observer: PassObserver | None = None,
    ) -> LossSums:  # fmt: skip
        """Returns the sum of the images' losses; without `statistics`, in evaluation, also counts correct labels."""
        logits_BC = self.run_layers(inputs.pixels_BP, *(each.view(each.shape) for each in self.ordered))
        loss = self.loss(logits_BC, inputs.targets_BC)
        if statistics is not None:
            return LossSums(loss, loss)
        return LossSums(loss, loss, correct=self.correct_labels(logits_BC, inputs.targets_BC))

    def update_expert_bias(self, counts: RoutingCounts | None) -> None:
        """Does nothing: a classifier has no routers."""
