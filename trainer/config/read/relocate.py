"""Puts keys that stand in another of their known places where the schema has them.

MindSpore Transformers' files write one thing in several places: ``moe_config`` at the top or inside ``model_config``,
``callback`` for ``callbacks``, a data set inside ``train_dataset_task``. All are moved to one place before anything
is checked; two places that disagree are an error.
"""

from __future__ import annotations

from pydantic.fields import FieldInfo

from trainer.config.location import SourceLocation
from trainer.config.read.nodes import Entry, Items, Scalar, Table, is_null, own_node, plain
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
    # What use_skip_data_by_global_norm reads there.
    "monitor_config.global_norm_spike_threshold": "runner_wrapper.global_norm_spike_threshold",
    "monitor_config.global_norm_spike_count_threshold": "runner_wrapper.global_norm_spike_count_threshold",
    "train_dataset_task.dataset_config": "train_dataset",
    "eval_dataset_task.dataset_config": "eval_dataset",
    f"parallel.{_THRESHOLD}": f"parallel.parallel_optimizer_config.{_THRESHOLD}",
    # What transformers 5 writes in a config.json.
    f"{_MODEL}.rope_parameters.rope_theta": f"{_MODEL}.rope_theta",
    f"{_MODEL}.rope_parameters.partial_rotary_factor": f"{_MODEL}.rotary_pct",
    f"{_MODEL}.rope_parameters": f"{_MODEL}.rope_scaling",
}
"""Other place of a key -> its own place."""


def canonical_key(key: str) -> str:
    """The own place of a dotted key that may be written in another known place."""
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
    """True for keys of ``moe_config`` that newer files write in ``model_config`` itself."""
    return key not in yaml_names(ModelConfig) and key in yaml_names(MoEConfig)


def is_top_level(key: str) -> bool:
    """True for a key, or another name or place of one, at the top of a file."""
    return key in yaml_names(Config) or canonical_key(key) != key


def fields_at(key: str) -> list[FieldInfo]:
    """The declarations of a dotted key: none when it is unknown, several when sections of different types have it."""
    kinds: tuple[type[Section], ...] = (Config,)
    fields: list[FieldInfo] = []
    for part in canonical_key(key).split("."):
        if not part.isdecimal():
            known = [item for kind in kinds for item in fields_by_yaml_name(kind).items()]
            fields = [field for main, field in known if part in (main, *aliases_of(field))]
            kinds = tuple(kind for field in fields for kind in shape_of(field).kinds)
    return fields


def move_to_canonical_sections(root: Table) -> list[str]:
    """Moves every section of the tree to its own place, in place.

    Returns:
        Notes about keys whose place had to be guessed.

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
        _drop_whole_width(settings.node)
    return notes


def _drop_whole_width(settings: Table) -> None:
    """Leaves out transformers' qk_head_dim: beside qk_nope_head_dim, which is Megatron's qk_head_dim, it is a sum."""
    values = {name: plain(entry.node) for name, entry in settings.entries().items() if name.startswith("qk_")}
    parts = [values.get(f"qk_{part}_head_dim") for part in ("nope", "rope")]
    if "qk_head_dim" in values and all(isinstance(part, int) for part in parts) and values["qk_head_dim"] == sum(parts):
        _remove(settings, "qk_head_dim")


def _remove(table: Table, name: str) -> None:
    if name not in table.own:
        table.own = table.entries()
        table.bases = []
    del table.own[name]


def find_entry(root: Table, key: str) -> Entry | None:
    """What stands at a dotted key; None where nothing does."""
    entry = Entry(root)
    for part in key.split("."):
        if isinstance(entry.node, Table):
            entries = entry.node.entries()
        else:
            entries = {}
        if part not in entries:
            return None
        entry = entries[part]
    return entry


def parent(root: Table, key: str, place: SourceLocation) -> Table:
    """Returns the section that holds a dotted key, made at `place` where missing, ready to be changed."""
    table = root
    for part in key.split(".")[:-1]:
        entries = table.entries()
        if part not in entries or is_null(entries[part].node):
            table.own[part] = Entry(Table(), place)
        elif part not in table.own:
            table.own[part] = entries[part]
        below = own_node(table.own[part])
        if not isinstance(below, Table):
            fix = f"write {part}: and its keys below"
            raise UserError("must be a section", where=table.own[part].place.text, key=part, fix=fix)
        table = below
    return table


def _move(root: Table, old: str, new: str, *, keeps_null: bool = False) -> None:
    """Moves what stands at a dotted key, if anything does; null is a value only where `keeps_null` says so."""
    entry = find_entry(root, old)
    if entry is None:
        return
    _remove(parent(root, old, entry.place), old.rpartition(".")[2])
    if is_null(entry.node) and not keeps_null:
        return
    target = parent(root, new, entry.place)
    name = new.rpartition(".")[2]
    present = None
    if name in target.entries():
        present = target.entries()[name]
    if present is None or (is_null(present.node) and not keeps_null):
        target.own[name] = entry
    elif present.node is not entry.node:
        target.own[name] = Entry(merge(present, entry, new), present.place)


def merge(first: Entry, second: Entry, key: str) -> Table | Items | Scalar:
    """One node with the contents of two places.

    Raises:
        UserError: They disagree; the message names both lines.
    """
    if isinstance(first.node, Table) and isinstance(second.node, Table):
        table = Table(dict(first.node.entries()))
        for name, entry in second.node.entries().items():
            if name in table.own:
                merged = merge(table.own[name], entry, f"{key}.{name}")
                table.own[name] = Entry(merged, table.own[name].place, table.own[name].is_alias)
            else:
                table.own[name] = entry
        return table
    if plain(first.node) != plain(second.node):
        raise disagreement(key, first, second)
    return first.node


def disagreement(key: str, first: Entry, second: Entry) -> UserError:
    """Two places give one key different values."""
    if first.place.order > second.place.order:
        later = first
        earlier = second
    else:
        later = second
        earlier = first
    rule = f"disagrees with {earlier.place.text}, where the same setting is {plain(earlier.node)!r}"
    return UserError(rule, where=later.place.text, key=key, value=plain(later.node), fix="remove one of the two")


def _join_betas(root: Table) -> None:
    """``beta1`` and ``beta2`` of the optimizer become ``betas``, the absent one with its default."""
    optimizer = find_entry(root, "optimizer")
    if optimizer is not None and isinstance(optimizer.node, Table):
        entries = optimizer.node.entries()
    else:
        entries = {}
    given = {name: entries[name] for name in _BETAS if name in entries}
    if not given:
        return
    defaults = OptimizerConfig.model_fields["betas"].get_default(call_default_factory=True)
    pair = [given.get(name, Entry(Scalar(value))) for name, value in zip(_BETAS, defaults, strict=True)]
    both = Entry(Items(pair), next(iter(given.values())).place)
    if "betas" in entries:
        merge(entries["betas"], both, "optimizer.betas")
    optimizer.node = Table({name: entry for name, entry in entries.items() if name not in given} | {"betas": both})


def _restore_lost_indentation(root: Table) -> list[str]:
    """Documentation that lost its indentation: keys at the top that belong to the empty section above them.

    A key at the top is adopted when it is no top-level key, and the nearest section above it has a key of that name and
    is empty, but for adopted keys, or is a list (then its last item gets the key).
    """
    adopted: dict[str, list[Entry]] = {}
    section_key = ""
    for key, entry in list(root.own.items()):
        if is_top_level(key):
            opened = is_null(entry.node) or isinstance(entry.node, Items)
            section_key = ""
            if opened and _names_in(key):
                section_key = key
        elif section_key and key in _names_in(section_key):
            home = root.own[section_key]
            if is_null(home.node):
                home.node = Table()
            elif isinstance(home.node, Items):
                if home.node.entries:
                    home = home.node.entries[-1]
                else:
                    home = Entry(Scalar(None))
            if isinstance(home.node, Table):
                home.node.own[key] = root.own.pop(key)
                adopted.setdefault(section_key, []).append(entry)
    return [
        f"{entries[0].place.text}: indent these lines: {len(entries)} keys at the top level are taken as {section}'s"
        for section, entries in adopted.items()
    ]


def _names_in(key: str) -> set[str]:
    """The names that a file may use in the sections which a top-level key may hold."""
    return {name for field in fields_at(key) for kind in shape_of(field).kinds for name in yaml_names(kind)}
