"""Rules and notes about MindSpore Transformers' data loaders ADGenDataLoader and SFTDataLoader."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.checks.problem import ConfigError, one_of, problem
from trainer.config.schema.data import EVAL, TRAIN, SftLoader
from trainer.config.schema.root import Config

_WHOLE_TEXT = ("alpaca", "advertisegen", "multi-round-chat-dyn-alpaca")
"""Data sets for which MindSpore Transformers trains on prompts, too."""
_CHAT_NAMES = {
    "user_role_name": ("human", "user"),
    "assistant_role_name": ("gpt", "assistant"),
    "from_keyword": ("from", "role"),
    "value_keyword": ("value", "content"),
}
_COLUMNS = ("data_field", "instruction_keyword", "from_keyword", "value_keyword")
_TEMPLATE = ("user_prompt", "assistant_prompt", "user_prompt_role", "assistant_prompt_role", "bos_token", "sep_token")
_WITHOUT_EFFECT = ("ignore_token_id", "max_length", "tokenizer")
_PAIRS = (("from", "value"), ("role", "content"))


def loader_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors about names of columns and roles that cannot be followed."""
    for section, loader in _sft_loaders(config):
        yield from _kwargs(config, loader, f"{section}.data_loader.map_function_kwargs")


def loader_tokenizer_problems(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each loader that alone names a tokenizer, which would not be read."""
    for section, loader in _sft_loaders(config):
        types = {getattr(config, section).tokenizer.type, config.train_dataset.tokenizer.type}
        if loader.tokenizer and types == {"bytes"} and not config.pretrained_model_dir:
            fix = "write train_dataset.tokenizer: {type: huggingface, path: FOLDER}, or pretrained_model_dir: FOLDER"
            rule = "the tokenizer of a loader is not read"
            yield problem(config, f"{section}.data_loader.tokenizer", rule, fix, value="...")


def _sft_loaders(config: Config) -> Iterator[tuple[str, SftLoader]]:
    for section in (TRAIN, EVAL):
        dataset = getattr(config, section)
        if dataset is not None and isinstance(dataset.data_loader, SftLoader):
            yield section, dataset.data_loader


def _kwargs(config: Config, loader: SftLoader, key: str) -> Iterator[ConfigError]:
    arguments = loader.map_function_kwargs
    known = (*_CHAT_NAMES, *_COLUMNS, *_TEMPLATE, *_WITHOUT_EFFECT)
    for name, value in arguments.items():
        where = f"{key}.{name}"
        if name not in known:
            yield problem(config, where, "unknown key", f"write one of {', '.join(dict.fromkeys(known))}", value=value)
        elif name in _TEMPLATE and value:
            fix = "leave it out, and write it into a template: train_dataset.chat_template"
            yield problem(config, where, "turns are written as the chat template says", fix, value=value)
        elif name in _COLUMNS and not isinstance(value, str):
            yield problem(config, where, "must be the name of a column", "write a text", value=value)
        elif loader.holds_chats and name in _CHAT_NAMES and value not in _CHAT_NAMES[name]:
            yield problem(config, where, f"must be {one_of(_CHAT_NAMES[name])}", "rename it in the file", value=value)
    pair = arguments.get("from_keyword", "from"), arguments.get("value_keyword", "value")
    named = all(pair[place] in _CHAT_NAMES[name] for place, name in enumerate(("from_keyword", "value_keyword")))
    if loader.holds_chats and named and pair not in _PAIRS:
        rule = "a turn has from and value, or role and content"
        yield problem(config, f"{key}.from_keyword", rule, "rename one of them in the file", value=pair[0])


def loader_notes(config: Config) -> Iterator[str]:
    """Yields a note where the loss of an SFTDataLoader covers other tokens than in MindSpore Transformers."""
    for section, loader in _sft_loaders(config):
        if loader.dataset_name in _WHOLE_TEXT:
            yield (f"{section}.data_loader.dataset_name {loader.dataset_name}: the loss covers the answers; that of"
                   " MindSpore Transformers covers the prompts, too")
