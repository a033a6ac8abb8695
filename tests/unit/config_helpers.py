"""What the tests of trainer.config share: a small valid file, and loading text as if it were one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.config import Config, Override, config_notes, parse_config
from trainer.errors import UserError

BASE = """\
model:
  model_config:
    num_layers: 2
    hidden_size: 64
    num_heads: 4
    vocab_size: 300
    seq_length: 32
train_dataset:
  data_loader:
    type: TextDataset
    dataset_dir: stdlib
callbacks:
  - type: MFLossMonitor
  - type: CheckpointMonitor
    save_checkpoint_steps: 100
"""
NEWER_DATA = """\
training: {steps: 2}
lr_scheduler: {type: ConstantWarmUpLR}
train_dataset: {dataloader: {type: SyntheticDataset, num_samples: 8}}
"""


def load(text: str, *pairs: str) -> Config:
    """Loads a file's text, named a.yaml, with ``key=value`` overrides."""
    overrides = [Override(*pair.split("=", 1), f"flag --{pair.split('=', 1)[0]}") for pair in pairs]
    return parse_config("a.yaml", text, overrides)


def error_of(text: str, *pairs: str) -> str:
    """Returns the whole message of the error that loading ends in."""
    return failure(lambda: load(text, *pairs))


def failure(action: Callable[[], object]) -> str:
    """Returns the whole message of the error that an action ends in; it is a user's error, exit code 2."""
    with pytest.raises(UserError) as caught:
        action()
    assert caught.value.exit_code == 2
    return str(caught.value)


def notes(text: str, *pairs: str) -> str:
    """Returns all notes about a file, a line each."""
    return "\n".join(config_notes(load(text, *pairs)))
