"""A model that is not a decoder, the classifier of images, for tests of what others make of it."""

from __future__ import annotations

import json
from typing import Any

from trainer.config.schema.images import CLASSIFIER, IMAGES

KIND = CLASSIFIER
NO_DECODER: dict[str, Any] = {
    "model": {"arch": {"type": KIND}}, "train_dataset": {"data_loader": {"type": IMAGES, "dataset_dir": "digits"}},
}  # fmt: skip
SMALL_NO_DECODER = NO_DECODER | {"model": {"arch": {"type": KIND}, "classifier": {"hidden_sizes": [32]}}}
NO_DECODER_TEXT = "".join(f"{section}: {json.dumps(value)}\n" for section, value in NO_DECODER.items())
