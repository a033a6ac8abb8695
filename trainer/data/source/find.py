"""Finds the files of a data set section, and the columns of its records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.checks.problem import data_error
from trainer.config.schema.data import AdGenLoader, HuggingFaceLoader, SftLoader
from trainer.data.source import files
from trainer.data.source.files import RECORDS, STDLIB, TEXT, DataSource, describe_file, matching_files, suffix_of
from trainer.data.source.huggingface import Request, read_request
from trainer.data.source.splits import choose_split, named_splits, saved_splits, split_of

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.data import JsonlLoader

_RECORD_SUFFIXES = (".jsonl", ".parquet", ".arrow")
_INSTRUCTION_KEYWORDS = {"instruction": "instruction_keyword", "input": "from_keyword", "output": "value_keyword"}


def find_sources(config: Config, section: str) -> tuple[tuple[DataSource, float], ...]:
    """Lists the files of each source of a section, without reading them, with the weight of the source.

    A section with ``dataset_dir`` has one source of weight 1.

    Raises:
        UserError: Not exactly one of ``dataset_dir`` and ``sources`` is set. Or a path does not exist or is neither a
            file nor a folder, a folder lacks matching files or the split, or a file cannot be read.
    """
    loader = getattr(config, section).data_loader
    prefix = f"{section}.data_loader"
    if isinstance(loader, HuggingFaceLoader):
        return ((_record_source(config, section, read_request(config, section)), 1.0),)
    key = f"{prefix}.dataset_dir"
    if loader.sources and loader.dataset_dir:
        rule = "a data set has either one dataset_dir or several sources, and both are set"
        fix = "remove one; dataset_dir may become another item of sources"
        raise data_error(config, key, rule, fix)
    if loader.sources:
        items = [(f"{prefix}.sources.{number}.path", item) for number, item in enumerate(loader.sources)]
        return tuple((_source(config, section, item.path, key), item.weight) for key, item in items)
    if not loader.dataset_dir:
        fix = "set dataset_dir"
        if loader.type == "TextDataset":
            fix += f", for example to {STDLIB}"
        raise data_error(config, key, f"{loader.type} needs a file or a folder", fix)
    return ((_source(config, section, loader.dataset_dir, key), 1.0),)


def _source(config: Config, section: str, name: str, key: str) -> DataSource:
    """Lists the files of one path of a TextDataset or JsonlDataset."""
    loader = getattr(config, section).data_loader
    where = config.source.where(key)
    if loader.type != "TextDataset":
        return _record_source(config, section, Request(name, key, [name], record_columns(loader), None))
    if name == STDLIB:
        return DataSource(STDLIB, name, key, where, files.stdlib_files(key, where))
    root = Path(os.path.expanduser(name))
    if suffix_of(root)[0] in _RECORD_SUFFIXES and not root.is_dir():
        fix = f"set {section}.data_loader.type to JsonlDataset"
        raise data_error(config, key, "the file holds records, and a TextDataset takes it for text", fix)
    paths = [root]
    if os.path.isdir(root):
        paths = matching_files(root, loader.patterns, key, where)
    return DataSource(TEXT, name, key, where, tuple(describe_file(path, key, where) for path in paths))


def _record_source(config: Config, section: str, request: Request) -> DataSource:
    loader = getattr(config, section).data_loader
    key = request.key
    where = config.source.where(key)
    paths = [Path(os.path.expanduser(path)) for path in request.paths]
    notes = request.notes
    if len(paths) == 1 and os.path.isdir(paths[0]):
        paths, split_notes = _files_of_split(loader, section, paths[0], key, where)
        notes = (*notes, *split_notes)
    elif not key.endswith("data_files") or not isinstance(loader.data_files, dict):
        _check_split(config, section, paths)
    described = tuple(describe_file(path, key, where) for path in paths)
    skips = loader.bad_records == "skip"
    answers = ""
    if config.preferences is not None:
        answers = config.preferences.answers
    return DataSource(
        RECORDS, request.name, key, where, described, request.columns, skips, request.limit, notes, answers
    )


def _check_split(config: Config, section: str, paths: list[Path]) -> None:
    """Refuses `split` if the names of single files tell another split; a name that tells no split means train."""
    split = getattr(config, section).data_loader.split
    if split and any(split_of(Path(path.name)) != split for path in paths):
        rule = "single files are read whole, and their names say another split"
        raise data_error(config, f"{section}.data_loader.split", rule, "leave it out, or name a folder")


def _files_of_split(
    loader: JsonlLoader, section: str, root: Path, key: str, where: str
) -> tuple[list[Path], tuple[str, ...]]:
    """Returns the files of the split of a folder that a section reads, and notes about the choice."""
    splits = saved_splits(root, key, where)
    if splits is None:
        splits = named_splits(root, matching_files(root, loader.patterns, key, where))
    split = choose_split(splits, loader.split, section, key, where)
    others = [name for name in splits if name != split]
    if not others or loader.split:
        return splits[split], ()
    note = f"{section} reads the split {split} of {root}, which also has {', '.join(others)}; set data_loader.split"
    return splits[split], (f"{note} to choose another.",)


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
