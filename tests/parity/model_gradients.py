"""Loss and gradients of a model, without a training step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mindspore import Tensor

from trainer.models.decoder import Decoder
from trainer.models.inputs import DecoderCall, LossSums, ModelInputs, RouterStatistics
from trainer.ops.dropout import DropoutKey
from trainer.step.differentiate import differentiation


def model_gradients(
    model: Decoder, inputs: ModelInputs, names: Iterable[str] | None = None, dropout: DropoutKey | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the total loss, and its gradients by the names of weights: these, or all that are trained."""
    sums, gradients = losses_and_gradients(model, inputs, names, dropout)
    return sums.total.asnumpy(), gradients


def losses_and_gradients(
    model: Decoder, inputs: ModelInputs, names: Iterable[str] | None = None, dropout: DropoutKey | None = None
) -> tuple[LossSums, dict[str, np.ndarray]]:
    """Returns all losses, and the gradients of the total loss as `model_gradients` does."""
    parameters = model.parameters_by_name
    if names is None:
        names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    names = list(names)
    differentiate = differentiation(model, [parameters[name] for name in names])
    sums, gradients = differentiate(DecoderCall(inputs, dropout, RouterStatistics()), Tensor(np.float32(1)))
    return sums, {name: each.asnumpy() for name, each in zip(names, gradients, strict=True)}
