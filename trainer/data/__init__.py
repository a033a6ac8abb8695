"""Data: text to micro-batches. Needs numpy and, for Hugging Face tokenizers, `tokenizers`; never MindSpore.

The names below are imported when they are first used, so that the plan of a run whose data are missing needs no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "batches.batch": ("IGNORE_INDEX", "Batch"),
    "batches.loader": ("BatchLoader",),
    "batches.packing": ("PackedDataset", "SequenceDataset", "TokenDataset"),
    "datasets": ("build_datasets", "build_eval_dataset", "build_train_dataset"),
    "source.synthetic": ("SyntheticDataset",),
    "tokens.chat_template": ("ChatTemplate", "load_chat_template"),
    "tokens.tokenizer": ("TextStream", "Tokenizer", "load_tokenizer"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
