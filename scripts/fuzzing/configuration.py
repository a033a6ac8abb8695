"""YAML files: their text, and the values of their keys by the schema."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from fuzz import REPOSITORY, Attempt, check

from fuzzing.mutate import NUMBERS, STRINGS, changed_bytes, changed_json, changed_lines, odd_value, yaml_scalar
from trainer.config import Config, config_notes, dump_config, load_config, parse_config, preflight
from trainer.config.pynative.table import ROWS, rows_without_effect
from trainer.config.schema.fields import Section, fields_by_yaml_name, shape_of, support_of, types_of
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS
from trainer.plan.render import plan_dict, plan_sections
from trainer.run.plan_file import plan_file

TINY = {
    "context": {"device_target": "CPU"},
    "model": {
        "model_config": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 300, "seq_length": 8}
    },
    "train_dataset": {"data_loader": {"type": "SyntheticDataset", "num_samples": 8}},
}


def _check_read(config: Config) -> None:
    """Checks that a configuration that is dumped and read again is equal."""
    config_notes(config)
    try:
        preflight(config)
    except UserError:
        pass
    check(parse_config("dumped.yaml", dump_config(config)) == config, "the dumped configuration is another one")


def _yaml_text(folder: Path) -> Attempt:
    texts = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "configs").rglob("*.yaml"))]
    file = folder / "a.yaml"

    def attempt(rng: random.Random) -> None:
        content = changed_lines(rng.choice(texts), rng).encode("utf-8", "surrogatepass")
        file.write_bytes(changed_bytes(content, rng) if rng.random() < 0.2 else content)
        _check_read(load_config(str(file)))

    return attempt


def leaves(kind: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Returns every key that acts: its dotted path, the type that selects its section, and its declaration."""
    for name, field in fields_by_yaml_name(kind).items():
        shape = shape_of(field)
        if support_of(field)[0] == "supported" and kind.support == "supported" and name != "type":
            yield (*path, name), field
        for below in shape.kinds:
            if below.support == "supported":
                chosen = f"{name}:{types_of(below)[0]}" if len(shape.kinds) > 1 else name
                yield from leaves(below, (*path, f"[{chosen}" if shape.is_list else chosen))


def fits(value: Any, annotation: Any, notes: tuple[Any, ...] = ()) -> bool:
    """Returns whether a value has a type; reads the schema without pydantic."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return fits(value, inner, (*notes, *more))
    if origin in (Union, UnionType):
        return any(fits(value, part, notes) for part in get_args(annotation))
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(annotation))
    if annotation is Any:
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if origin is list or annotation is list:
        return isinstance(value, list) and all(fits(one, (*get_args(annotation), Any)[0]) for one in value)
    if origin is dict or annotation is dict:
        return isinstance(value, dict)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return isinstance(value, dict)
    if annotation is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and abs(value) < float("inf") and _within(value, notes)
    if annotation is int:
        return type(value) is int and _within(value, notes)
    return type(value) is annotation and _within(value, notes)


def _unpacked(notes: Iterable[Any]) -> list[Any]:
    """Bounds one by one: pydantic's Field holds several."""
    return [one for note in notes for one in getattr(note, "metadata", [note])]


def _within(value: Any, notes: tuple[Any, ...]) -> bool:
    for note in _unpacked(notes):
        if hasattr(note, "ge") and value < note.ge or hasattr(note, "gt") and value <= note.gt:
            return False
        if hasattr(note, "le") and value > note.le or hasattr(note, "lt") and value >= note.lt:
            return False
        if hasattr(note, "min_length") and len(value) < note.min_length:
            return False
    return True


def _bounds(annotation: Any, notes: tuple[Any, ...]) -> list[Any]:
    """Returns the bounds of a number, and the numbers just beyond them."""
    found = []
    parts = [annotation, *get_args(annotation)]
    every = [*notes, *(note for part in parts if get_origin(part) is Annotated for note in get_args(part)[1:])]
    for note in _unpacked(every):
        found += [getattr(note, name) + more for name in ("ge", "gt", "le", "lt") if hasattr(note, name)
                  for more in (-1, 0, 1)]  # fmt: skip
    return found


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns the tiny configuration with a value at a path."""
    for part in reversed(path):
        name, _, kind = part.lstrip("[").partition(":")
        if kind and isinstance(value, dict):
            value = {"type": kind, **value}
        value = {name: [value] if part.startswith("[") else value}
    return _merged(TINY, value)


def _merged(base: Any, more: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(more, dict):
        return more
    if base.get("type", more.get("type")) != more.get("type", base.get("type")):
        return more
    return {key: _merged(base[key], more[key]) if key in base and key in more else {**base, **more}[key]
            for key in {**base, **more}}  # fmt: skip


def _key(path: tuple[str, ...]) -> str:
    return ".".join(part.lstrip("[").partition(":")[0] + (".0" if part.startswith("[") else "") for part in path)


def _yaml_values(folder: Path) -> Attempt:
    every = [(path, field) for path, field in leaves(Config) if "dataset_task" not in path[0]]

    def attempt(rng: random.Random) -> None:
        path, field = rng.choice(every)
        bounds = _bounds(field.annotation, tuple(field.metadata))
        how = rng.random()
        value = rng.choice(bounds) if bounds and how < 0.4 else rng.choice(NUMBERS) if how < 0.5 else odd_value(rng)
        if isinstance(value, str) and rng.random() < 0.3:
            value = [value, rng.choice(STRINGS)]
        config = parse_config("a.yaml", yaml_scalar(_with(path, value)))
        if not shape_of(field).kinds:
            right = fits(value, field.annotation, tuple(field.metadata))
            check(right or value is None, f"{_key(path)} = {value!r:.200}")
        _check_read(config)
        plan = plan_file(config, SINGLE_PROCESS, [])
        plan_dict(plan)
        plan_sections(plan, True)

    return attempt


def _newer_values(folder: Path) -> Attempt:
    """Changes values of files in the newer schema, as parsed YAML: those that are there, and keys of its table."""
    files = [yaml.safe_load(path.read_bytes()) for path in sorted((REPOSITORY / "configs" / "pynative").glob("*.yaml"))]
    keys = sorted({row.old for row in (*ROWS, *rows_without_effect())})

    def attempt(rng: random.Random) -> None:
        content = changed_json(rng.choice(files), rng)
        if isinstance(content, dict) and rng.random() < 0.5:
            value: Any = odd_value(rng)
            for part in reversed(rng.choice(keys).split(".")):
                value = {part: value}
            content = _merged(content, value)
        config = parse_config("a.yaml", yaml_scalar(content))
        _check_read(config)
        plan = plan_file(config, SINGLE_PROCESS, [])
        plan_dict(plan)
        plan_sections(plan, True)

    return attempt


KINDS = {"yaml_text": _yaml_text, "yaml_values": _yaml_values, "newer_values": _newer_values}
