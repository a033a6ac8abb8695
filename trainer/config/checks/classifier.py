"""Rules of a classifier: what a decoder has and it has not, and which data it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.config.checks.problem import Problem
from trainer.config.schema.data import TokenizerConfig
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.root import CLASSIFIER, Config
from trainer.config.schema.system import RecomputeConfig

_IMAGES = "MnistDataset"
_KIND = "model.arch.type"


def classifier_problems(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    """A classifier reads images and nothing else does; what it has no part for is not ignored."""
    if config.classifier is None:
        yield from _decoder(config, report)
        return
    of_decoders = {
        "model.model_config": config.decoder != ModelConfig(),
        "recompute_config": config.recompute_config != RecomputeConfig() or config.recompute,
        "train_dataset.tokenizer": config.train_dataset.tokenizer != TokenizerConfig(),
    }
    for key, present in of_decoders.items():
        if present:
            yield report(key, "...", f"an {CLASSIFIER} has nothing of it", "remove it")
    if config.run_mode == "predict":
        rule = f"an {CLASSIFIER} generates no text"
        yield report("run_mode", "predict", rule, "use --run_mode eval, which gives the accuracy")
    if config.amp_level not in (None, "O0"):
        yield report("amp_level", config.amp_level, f"an {CLASSIFIER} computes in float32", "remove it, or write O0")
    if config.train_dataset.held_out:
        key, fix = "train_dataset.held_out", "remove it and write an eval_dataset, which reads the test images"
        yield report(key, config.train_dataset.held_out, "it keeps documents back, and images are none", fix)
    for section, kind in _loaders(config):
        if kind != _IMAGES:
            rule = f"an {CLASSIFIER} takes images"
            yield report(f"{section}.data_loader.type", kind, rule, f"write {_IMAGES}")


def _decoder(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    kind = config.model.arch.type
    if config.model.classifier is not None:
        rule = f"only an {CLASSIFIER} has it, and {_KIND} is {kind}"
        yield report("model.classifier", "...", rule, f"write {_KIND}: {CLASSIFIER}, or remove it")
    for section, found in _loaders(config):
        if found == _IMAGES:
            fix = f"write {_KIND}: {CLASSIFIER}, or use TextDataset, JsonlDataset or SyntheticDataset"
            yield report(f"{section}.data_loader.type", found, f"{kind} takes text, not images", fix)


def _loaders(config: Config) -> Iterator[tuple[str, str]]:
    """The data sets that the file has, with their kind."""
    yield "train_dataset", config.train_dataset.data_loader.type
    if config.eval_dataset is not None:
        yield "eval_dataset", config.eval_dataset.data_loader.type
