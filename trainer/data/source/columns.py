"""Tells which columns of its files a loader of records reads."""

from __future__ import annotations

from typing import Any

from trainer.config.schema.data import AdGenLoader, SftLoader

_INSTRUCTION_KEYWORDS = {"instruction": "instruction_keyword", "input": "from_keyword", "output": "value_keyword"}


def record_columns(loader: Any) -> dict[str, str]:
    """Returns the column of each field of a record that has another name in the files: our name -> theirs."""
    columns: dict[str, str] = {}
    if isinstance(loader, AdGenLoader):
        columns = dict(zip(("instruction", "output"), loader.origin_columns, strict=True))
    elif isinstance(loader, SftLoader):
        columns = _sft_columns(loader)
    return {**columns, **loader.columns}


def _sft_columns(loader: SftLoader) -> dict[str, str]:
    arguments = loader.map_function_kwargs
    if loader.dataset_name == "advertisegen":
        return {"prompt": "content", "completion": "summary"}
    if loader.holds_chats and "data_field" in arguments:
        return {"conversations": arguments["data_field"]}
    if loader.dataset_name == "multi-instruct-dyn":
        return {ours: arguments[keyword] for ours, keyword in _INSTRUCTION_KEYWORDS.items() if keyword in arguments}
    return {}
