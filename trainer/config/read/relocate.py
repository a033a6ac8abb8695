"""Moves keys from their other known places to the sections where the schema has them.

MindSpore Transformers' files write one setting in several places: ``moe_config`` at the top or inside ``model_config``,
``callback`` for ``callbacks``, a data set inside ``train_dataset_task``. All are moved to one place before anything
is checked; two places that disagree are an error.
"""

from __future__ import annotations

from pydantic.fields import FieldInfo

from trainer.config.location import SourceLocation
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, is_null, plain, writable_node
from trainer.config.schema.fields import Section, aliases_of, fields_by_yaml_name, shape_of, yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.optimizer import OptimizerConfig
from trainer.config.schema.root import Config
from trainer.errors import UserError

_MODEL = "model.model_config"
_BETAS = {"beta1": "0", "beta2": "1"}
_THRESHOLD = "parallel_optimizer_threshold"

_MOVED = {
    "callback": "callbacks",
    "model_config": _MODEL,
    "moe_config": f"{_MODEL}.moe_config",
    # use_skip_data_by_global_norm reads these keys in MindSpore Transformers.
    "monitor_config.global_norm_spike_threshold": "runner_wrapper.global_norm_spike_threshold",
    "monitor_config.global_norm_spike_count_threshold": "runner_wrapper.global_norm_spike_count_threshold",
    "train_dataset_task.dataset_config": "train_dataset",
    "eval_dataset_task.dataset_config": "eval_dataset",
    f"parallel.{_THRESHOLD}": f"parallel.parallel_optimizer_config.{_THRESHOLD}",
    # transformers 5 writes these keys in a config.json.
    f"{_MODEL}.rope_parameters.rope_theta": f"{_MODEL}.rope_theta",
    f"{_MODEL}.rope_parameters.partial_rotary_factor": f"{_MODEL}.rotary_pct",
    f"{_MODEL}.rope_parameters": f"{_MODEL}.rope_scaling",
}
"""Other place of a key -> its place in the schema."""


def canonical_key(key: str) -> str:
    """Returns the schema's place of a dotted key that may be written in another known place."""
    for old, new in _MOVED.items():
        if f"{key}.".startswith(f"{old}."):
            key = new + key[len(old) :]
    section, _, name = key.rpartition(".")
    if section == _MODEL and is_flat_moe_key(name):
        return f"{_MODEL}.moe_config.{name}"
    if section == "optimizer" and name in _BETAS:
        return f"optimizer.betas.{_BETAS[name]}"
    return key


def is_flat_moe_key(key: str) -> bool:
    """Returns whether a key belongs to ``moe_config`` but newer files write it in ``model_config``."""
    return key not in yaml_names(ModelConfig) and key in yaml_names(MoEConfig)


def is_top_level(key: str) -> bool:
    """Returns whether a file may have a key at its top level, under any name or place that is known."""
    return key in yaml_names(Config) or canonical_key(key) != key


def fields_at(key: str) -> list[FieldInfo]:
    """Returns the declarations of a dotted key: none if it is unknown, several if sections of different types have it.
    """
    kinds: tuple[type[Section], ...] = (Config,)
    fields: list[FieldInfo] = []
    for part in canonical_key(key).split("."):
        if not part.isdecimal():
            known = [item for kind in kinds for item in fields_by_yaml_name(kind).items()]
            fields = [field for main, field in known if part in (main, *aliases_of(field))]
            kinds = tuple(kind for field in fields for kind in shape_of(field).kinds)
    return fields


def move_to_canonical_sections(root: Table) -> list[str]:
    """Moves every key of the tree, in place, to the section where the schema has it.

    Returns:
        Notes about keys whose section was guessed.

    Raises:
        UserError: Two places give the same key different values.
    """
    notes = _restore_lost_indentation(root)
    for old, new in _MOVED.items():
        _move(root, old, new)
    _join_betas(root)
    settings = find_entry(root, _MODEL)
    if settings is not None and isinstance(settings.node, Table):
        for key in filter(is_flat_moe_key, settings.node.entries()):
            _move(root, f"{_MODEL}.{key}", f"{_MODEL}.moe_config.{key}", keeps_null=True)
        _drop_total_width(settings.node)
    return notes


def _drop_total_width(settings: Table) -> None:
    """Removes transformers' qk_head_dim if it is the sum of the two parts; Megatron's means qk_nope_head_dim."""
    values = {name: plain(entry.node) for name, entry in settings.entries().items() if name.startswith("qk_")}
    nope = values.get("qk_nope_head_dim")
    rope = values.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(rope, int) and values.get("qk_head_dim") == nope + rope:
        _remove(settings, "qk_head_dim")


def _remove(table: Table, name: str) -> None:
    if name not in table.explicit:
        table.explicit = table.entries()
        table.bases = []
    del table.explicit[name]


def find_entry(root: Table, key: str) -> Entry | None:
    """Returns the entry at a dotted key; None if there is none."""
    entry = Entry(root)
    for part in key.split("."):
        if not isinstance(entry.node, Table):
            return None
        entries = entry.node.entries()
        if part not in entries:
            return None
        entry = entries[part]
    return entry


def parent(root: Table, key: str, place: SourceLocation) -> Table:
    """Returns the section of a dotted key for changes; missing sections are created with the location `place`.

    Raises:
        UserError: A part of the key is a value or a list, not a section.
    """
    table = root
    for part in key.split(".")[:-1]:
        entries = table.entries()
        if part not in entries or is_null(entries[part].node):
            table.explicit[part] = Entry(Table(), place._replace(key=""))
        elif part not in table.explicit:
            table.explicit[part] = entries[part]
        section = writable_node(table.explicit[part])
        if not isinstance(section, Table):
            fix = f"write {part}: and its keys below"
            raise UserError("must be a section", where=table.explicit[part].place.text, key=part, fix=fix)
        table = section
    return table


def _move(root: Table, old: str, new: str, *, keeps_null: bool = False) -> None:
    """Moves the entry at a dotted key, if there is one; `keeps_null` says whether null is a value."""
    entry = find_entry(root, old)
    if entry is None:
        return
    _remove(parent(root, old, entry.place), old.rpartition(".")[2])
    if is_null(entry.node) and not keeps_null:
        return
    target = parent(root, new, entry.place)
    name = new.rpartition(".")[2]
    present = target.entries().get(name)
    if present is None or (is_null(present.node) and not keeps_null):
        target.explicit[name] = entry
    elif present.node is not entry.node:
        target.explicit[name] = Entry(merge(present, entry, new), present.place)


def merge(first: Entry, second: Entry, key: str) -> Node:
    """Returns one node with the contents of two places.

    Raises:
        UserError: They disagree; the message names both lines.
    """
    if isinstance(first.node, Table) and isinstance(second.node, Table):
        table = Table(dict(first.node.entries()))
        for name, entry in second.node.entries().items():
            if name in table.explicit:
                earlier = table.explicit[name]
                table.explicit[name] = Entry(merge(earlier, entry, f"{key}.{name}"), earlier.place, earlier.is_alias)
            else:
                table.explicit[name] = entry
        return table
    if plain(first.node) != plain(second.node):
        raise disagreement(key, first, second)
    return first.node


def disagreement(key: str, first: Entry, second: Entry) -> UserError:
    """Returns the error for a key that has different values in two places."""
    earlier, later = sorted((first, second), key=lambda entry: entry.place.order)
    rule = f"disagrees with {earlier.place.text}, where the same setting is {plain(earlier.node)!r}"
    fix = "remove one of the two"
    return UserError(rule, where=later.place.text, key=later.place.key or key, value=plain(later.node), fix=fix)


def _join_betas(root: Table) -> None:
    """Replaces the optimizer's ``beta1`` and ``beta2`` by ``betas``; an absent one gets its default."""
    optimizer = find_entry(root, "optimizer")
    if optimizer is None or not isinstance(optimizer.node, Table):
        return
    entries = optimizer.node.entries()
    written = {name: entries[name] for name in _BETAS if name in entries}
    if not written:
        return
    defaults = OptimizerConfig.model_fields["betas"].get_default(call_default_factory=True)
    pair = [written.get(name, Entry(Scalar(value))) for name, value in zip(_BETAS, defaults, strict=True)]
    both = Entry(Items(pair), next(iter(written.values())).place._replace(key=""))
    if "betas" in entries:
        merge(entries["betas"], both, "optimizer.betas")
    optimizer.node = Table({name: entry for name, entry in entries.items() if name not in written} | {"betas": both})


def _restore_lost_indentation(root: Table) -> list[str]:
    """Moves keys at the top level into the empty section above them, as in text that has lost its indentation.

    An unknown top-level key is moved if the nearest section above it has a key of that name, and is empty (except for
    moved keys) or is a list. The last item of a list gets the key.

    Returns:
        Notes about the moved keys.
    """
    moved: dict[str, list[Entry]] = {}
    section_key = ""
    for key, entry in list(root.explicit.items()):
        if is_top_level(key):
            is_open = is_null(entry.node) or isinstance(entry.node, Items)
            section_key = ""
            if is_open and _names_in(key):
                section_key = key
        elif section_key and key in _names_in(section_key):
            section = root.explicit[section_key]
            if is_null(section.node):
                section.node = Table()
            elif isinstance(section.node, Items):
                if not section.node.entries:
                    continue
                section = section.node.entries[-1]
            if isinstance(section.node, Table):
                section.node.explicit[key] = root.explicit.pop(key)
                moved.setdefault(section_key, []).append(entry)
    return [
        f"{entries[0].place.text}: indent these lines: {len(entries)} keys at the top level are taken as {name}'s"
        for name, entries in moved.items()
    ]


def _names_in(key: str) -> set[str]:
    """Returns the names that a file may use in the section, or sections, of a top-level key."""
    return {name for field in fields_at(key) for kind in shape_of(field).kinds for name in yaml_names(kind)}
