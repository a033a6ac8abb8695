"""Loss and gradients of a model, without a training step."""

from __future__ import annotations

from collections.abc import Iterable

import mindspore
import numpy as np

from trainer.models.decoder import Decoder
from trainer.models.inputs import ModelInputs, RouterStatistics
from trainer.ops.dropout import DropoutKey


def model_gradients(
    model: Decoder, inputs: ModelInputs, names: Iterable[str] | None = None, dropout: DropoutKey | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the total loss, and its gradients by the names of weights: these, or all that are trained."""
    parameters = model.parameters_by_name
    if names is None:
        names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    trained = {name: parameters[name] for name in names}
    run = mindspore.value_and_grad(
        lambda: model(inputs, dropout, RouterStatistics()).total, None, list(trained.values())
    )
    total, gradients = run()
    return total.asnumpy(), {name: each.asnumpy() for name, each in zip(trained, gradients, strict=True)}
