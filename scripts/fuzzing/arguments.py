"""Command lines: flags, dotted keys and their values, as a shell would hand them over."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from fuzz import Accepted, Attempt

from fuzzing.configuration import TINY, fits, leaves
from fuzzing.mutate import NUMBERS, STRINGS, odd_value, yaml_scalar
from trainer.cli.flags import FLAGS
from trainer.cli.main import dispatch
from trainer.config import Config
from trainer.config.schema.fields import shape_of
from trainer.errors import UserError

_COMMANDS = ("plan", "plan", "plan", "plan", "data", "convert", "status", "stop", "export", "schema", "nothing")


def _of_shell(text: str) -> str:
    """Returns the text as a process would get it: without zero bytes, which no argument can have."""
    return os.fsdecode(text.replace("\0", "").encode("utf-8", "surrogatepass"))


def _keys() -> list[str]:
    """Returns the dotted keys of the sections of the tiny configuration."""
    kinds = {"data_loader": "SyntheticDataset", "lr_schedule": "CosineWithWarmUpLR"}
    found = []
    for path, _ in leaves(Config):
        names = [part.partition(":") for part in path]
        of_ours = all(not kind or kinds.get(name) == kind for name, _, kind in names)
        if of_ours and not any(part.startswith("[") for part in path):
            found.append(".".join(name for name, _, _ in names))
    return found


def _flags(folder: Path) -> Attempt:
    file = folder / "a.yaml"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    os.chdir(folder)
    keys = [*_keys(), *(flag.name for flag in FLAGS)]

    def value(rng: random.Random) -> str:
        how = rng.random()
        if how < 0.3:
            return str(rng.choice(NUMBERS))
        return rng.choice(STRINGS) if how < 0.7 else yaml_scalar(odd_value(rng))

    def attempt(rng: random.Random) -> None:
        words = [rng.choice(_COMMANDS), "--config", str(file)]
        for _ in range(rng.choice((1, 1, 2, 4))):
            key, how = rng.choice(keys), rng.randrange(10)
            if how == 0:
                key = ".".join([key] * rng.choice((2, 30, 70)))
            elif how == 1:
                other = rng.choice(STRINGS)
                key = rng.choice((f"{key}.0", f"{key}.{10**30}", f"no-{key}", f".{key}", f"{key}.", other))
            words += [f"--{key}={value(rng)}"] if how % 2 else [f"--{key}", value(rng)]
        if rng.random() < 0.15:
            words += ["--options", *(f"{rng.choice(keys)}={value(rng)}" for _ in range(3))]
        if rng.random() < 0.15:
            words.insert(rng.randrange(len(words)), value(rng))
        _answered([_of_shell(word) for word in words])

    return attempt


def _answered(words: list[str]) -> None:
    """Runs a command; an exit code without a message is no answer."""
    if words[:1] == ["export"]:
        words += ["--output", "there/model.safetensors"]
    code = dispatch(words)
    if code not in (0, 1):
        raise Accepted(f"exit code {code} without an error")


def _one_flag(folder: Path) -> Attempt:
    """Returns a flag with a value that its type cannot have."""
    file = folder / "a.yaml"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    os.chdir(folder)
    wanted = set(_keys())
    fields = {}
    for path, field in leaves(Config):
        key = ".".join(part.partition(":")[0] for part in path)
        if key in wanted and not shape_of(field).kinds:
            fields[key] = field

    def attempt(rng: random.Random) -> None:
        key = rng.choice(sorted(fields))
        value = rng.choice((*NUMBERS[9:], [1, [2]], {"a": {"b": 1}}, "no such value"))
        field = fields[key]
        if fits(value, field.annotation, tuple(field.metadata)) or fits(str(value), field.annotation, ()):
            raise UserError("this value is right", fix="none")
        code = dispatch(["plan", "--config", str(file), f"--{key}", yaml_scalar(value)])
        raise Accepted(f"--{key} {value!r} (exit code {code})")

    return attempt


def _either(folder: Path) -> Attempt:
    several, one = _flags(folder), _one_flag(folder)
    return lambda rng: (several if rng.random() < 0.6 else one)(rng)


KINDS = {"flags": _either}
