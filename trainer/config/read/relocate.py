"""Moves keys from their other known places to the sections where the schema has them.

MindSpore Transformers' files write one setting in several places: ``moe_config`` at the top or inside ``model_config``,
``callback`` for ``callbacks``, a data set inside ``train_dataset_task``. All are moved to one place before anything
is checked; two places that disagree are an error.
"""

from __future__ import annotations

from functools import cache

from pydantic.fields import FieldInfo

from trainer.config.location import SourceLocation
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, find_entry, is_null, plain, writable_node
from trainer.config.read.rows import Row
from trainer.config.schema.fields import Section, aliases_of, fields_by_yaml_name, shape_of, yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config
from trainer.errors import UserError, shorten_repr

_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"


@cache
def rows_by_place() -> dict[str, Row]:
    """Returns the rows of older names and other places by the old place, in which sections have their new places.

    The rows of sections stand before those of their keys.
    """
    threshold = "parallel_optimizer_threshold"
    rows = [
        Row("callback", "callbacks"),
        Row("model_config", _MODEL),
        Row("moe_config", _EXPERTS),
        # use_skip_data_by_global_norm reads these keys in MindSpore Transformers.
        Row("monitor_config.global_norm_spike_threshold", "runner_wrapper.global_norm_spike_threshold"),
        Row("monitor_config.global_norm_spike_count_threshold", "runner_wrapper.global_norm_spike_count_threshold"),
        Row("train_dataset_task.dataset_config", "train_dataset"),
        Row("eval_dataset_task.dataset_config", "eval_dataset"),
        Row(f"parallel.{threshold}", f"parallel.parallel_optimizer_config.{threshold}"),
        # transformers 5 writes these keys in a config.json.
        Row(f"{_MODEL}.rope_parameters", f"{_MODEL}.rope_scaling"),
        Row(f"{_MODEL}.rope_scaling.rope_theta", f"{_MODEL}.rope_theta"),
        Row(f"{_MODEL}.rope_scaling.partial_rotary_factor", f"{_MODEL}.rotary_pct"),
        Row("optimizer.beta1", "optimizer.betas.0"),
        Row("optimizer.beta2", "optimizer.betas.1"),
    ]
    # Newer files write the keys of moe_config in model_config.
    flat = (name for name in yaml_names(MoEConfig) if name not in yaml_names(ModelConfig))
    rows += [Row(f"{_MODEL}.{name}", f"{_EXPERTS}.{name}", keeps_null=True) for name in flat]
    return {row.old: row for row in rows}


def canonical_key(key: str) -> str:
    """Returns the schema's place of a dotted key that may be written in another known place."""
    place = ""
    for part in key.split("."):
        place = f"{place}.{part}".lstrip(".")
        if place in rows_by_place():
            place = rows_by_place()[place].new
    return place


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
    for row in rows_by_place().values():
        entry = find_entry(root, row.old)
        if entry is not None:
            _move(root, row, entry)
    settings = find_entry(root, _MODEL)
    if settings is not None and isinstance(settings.node, Table):
        _drop_total_width(settings.node)
        _separate_rotary_kinds(settings.node)
    return notes


def _separate_rotary_kinds(settings: Table) -> None:
    """Replaces transformers' rope_parameters of each kind of layers by those of full attention and window_rope_theta.

    Raises:
        UserError: Layers with a sliding window have scaled positions.
    """
    scaling = settings.entries().get("rope_scaling")
    if scaling is None or not isinstance(scaling.node, Table):
        return
    kinds = {name: entry.node for name, entry in scaling.node.entries().items()}
    full = kinds.get("full_attention")
    window = kinds.get("sliding_attention")
    if not isinstance(full, Table) or not isinstance(window, Table):
        return
    kept = full.entries()
    for name, key in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "rotary_pct")):
        if name in kept:
            settings.explicit[key] = kept.pop(name)
    settings.explicit["rope_scaling"] = Entry(Table(kept), scaling.place)
    for name, entry in window.entries().items():
        value = plain(entry.node)
        if name == "rope_theta":
            settings.explicit["window_rope_theta"] = entry
        elif value not in (None, "default"):
            rule = "not yet supported: positions of layers with a sliding window that are scaled"
            fix = "use another model"
            raise UserError(rule, where=entry.place.text, key=f"sliding_attention.{name}", value=value, fix=fix)


def _drop_total_width(settings: Table) -> None:
    """Removes transformers' qk_head_dim if it is the sum of the two parts; Megatron's means qk_nope_head_dim."""
    values = {name: plain(entry.node) for name, entry in settings.entries().items() if name.startswith("qk_")}
    nope = values.get("qk_nope_head_dim")
    rope = values.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(rope, int) and values.get("qk_head_dim") == nope + rope:
        remove_key(settings, "qk_head_dim")


def remove_key(table: Table, name: str) -> None:
    """Removes a key that a section has, also from its merge keys."""
    if any(name in base.entries() for base in table.bases):
        table.explicit = table.entries()
        table.bases = []
    del table.explicit[name]


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


def _move(root: Table, row: Row, entry: Entry) -> None:
    """Moves an entry from its old place to the new one, where it is merged with what is there."""
    remove_key(parent(root, row.old, entry.place), row.old.rpartition(".")[2])
    if is_null(entry.node) and not row.keeps_null:
        return
    section, _, name = row.new.rpartition(".")
    if name.isdecimal():
        _move_into_list(root, section, int(name), entry)
        return
    target = parent(root, row.new, entry.place)
    present = target.entries().get(name)
    if present is None or (is_null(present.node) and not row.keeps_null):
        target.explicit[name] = entry
    elif present.node is not entry.node:
        target.explicit[name] = Entry(merge_entries(present, entry, row.new), present.place)


def _move_into_list(root: Table, key: str, index: int, entry: Entry) -> None:
    """Moves an entry into the list of a dotted key; without one, the other items have their defaults."""
    target = parent(root, key, entry.place)
    name = key.rpartition(".")[2]
    present = target.entries().get(name)
    if present is None:
        present = Entry(default_node(fields_at(key)[0]), entry.place._replace(key=""))
    target.explicit[name] = present
    items = writable_node(present)
    if not isinstance(items, Items) or index >= len(items.entries):
        raise disagreement(key, present, entry)
    if items.entries[index].place.text:
        merge_entries(items.entries[index], entry, f"{key}.{index}")
    items.entries[index] = entry


def default_node(field: FieldInfo) -> Items | Scalar:
    """Returns a key's default list as a node, for an index into it, such as ``optimizer.betas.0``; else a null."""
    if field.is_required():
        return Scalar(None)
    default = field.get_default(call_default_factory=True)
    if isinstance(default, list) and default:
        return Items([Entry(Scalar(value)) for value in default])
    return Scalar(None)


def merge_entries(first: Entry, second: Entry, key: str) -> Node:
    """Returns one node with the contents of two places.

    Raises:
        UserError: They disagree; the message names both lines.
    """
    if isinstance(first.node, Table) and isinstance(second.node, Table):
        table = Table(dict(first.node.entries()))
        for name, entry in second.node.entries().items():
            if name in table.explicit:
                earlier = table.explicit[name]
                node = merge_entries(earlier, entry, f"{key}.{name}")
                table.explicit[name] = Entry(node, earlier.place, earlier.is_alias)
            else:
                table.explicit[name] = entry
        return table
    if plain(first.node) != plain(second.node):
        raise disagreement(key, first, second)
    return first.node


def disagreement(key: str, first: Entry, second: Entry) -> UserError:
    """Returns the error for a key that has different values in two places."""
    earlier, later = sorted((first, second), key=lambda entry: entry.place.order)
    rule = f"disagrees with {earlier.place.text}, where the same setting is {shorten_repr(plain(earlier.node))}"
    fix = "remove one of the two"
    return UserError(rule, where=later.place.text, key=later.place.key or key, value=plain(later.node), fix=fix)


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
