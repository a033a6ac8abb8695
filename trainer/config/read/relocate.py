"""Puts keys that stand in another of their known places where the schema has them.

MindSpore Transformers' files write one thing in several places: ``moe_config`` at the top or inside ``model_config``,
``callback`` for ``callbacks``, a data set inside ``train_dataset_task``. All are moved to one place before anything
is checked; two places that disagree are an error.
"""

from __future__ import annotations

from trainer.config.read.nodes import Entry, Items, Scalar, Table, is_null, own_node, plain
from trainer.config.schema.fields import Section, shape_of, yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.optimizer import OptimizerConfig
from trainer.config.schema.root import Config
from trainer.errors import UserError

_MODEL = ("model", "model_config")
_BETAS = {"beta1": "0", "beta2": "1"}

MOVED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("callback",), ("callbacks",)),
    (("model_config",), ("model", "model_config")),
    (("moe_config",), ("model", "model_config", "moe_config")),
    (("train_dataset_task", "dataset_config"), ("train_dataset",)),
    (("eval_dataset_task", "dataset_config"), ("eval_dataset",)),
    (
        ("parallel", "parallel_optimizer_threshold"),
        ("parallel", "parallel_optimizer_config", "parallel_optimizer_threshold"),
    ),
    # What transformers 5 writes in a config.json.
    ((*_MODEL, "rope_parameters", "rope_theta"), (*_MODEL, "rope_theta")),
    ((*_MODEL, "rope_parameters", "partial_rotary_factor"), (*_MODEL, "rotary_pct")),
    ((*_MODEL, "rope_parameters"), (*_MODEL, "rope_scaling")),
)
"""Other places of a section -> its own place."""


def canonical_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The own place of a dotted key that may be written in another known place."""
    for old, new in MOVED:
        if keys[: len(old)] == old:
            keys = new + keys[len(old) :]
    if len(keys) == 3 and keys[:2] == _MODEL and is_flat_moe_key(keys[2]):
        keys = (*_MODEL, "moe_config", keys[2])
    if len(keys) == 2 and keys[0] == "optimizer" and keys[1] in _BETAS:
        keys = ("optimizer", "betas", _BETAS[keys[1]])
    return keys


def is_flat_moe_key(key: str) -> bool:
    """True for keys of ``moe_config`` that newer files write in ``model_config`` itself."""
    return key not in yaml_names(ModelConfig) and key in yaml_names(MoEConfig)


def arrange(root: Table) -> list[str]:
    """Moves every section of the tree to its own place, in place.

    Returns:
        Notices about keys whose place had to be guessed.

    Raises:
        UserError: Two places give the same key different values.
    """
    notices = _adopt_lost_keys(root)
    for old, new in MOVED:
        _move(root, old, new)
    _join_betas(root)
    settings = _find(root, _MODEL)
    if settings is not None and isinstance(settings.node, Table):
        flat = [key for key in settings.node.entries() if is_flat_moe_key(key)]
        if flat:
            _move_flat_moe_keys(settings, flat)
    return notices


def _find(root: Table, keys: tuple[str, ...]) -> Entry | None:
    entry = Entry(root)
    for key in keys:
        entries = entry.node.entries() if isinstance(entry.node, Table) else {}
        if key not in entries:
            return None
        entry = entries[key]
    return entry


def _parent(root: Table, keys: tuple[str, ...], like: Entry) -> Table:
    """The section that holds ``keys``, made where missing."""
    table = root
    for key in keys[:-1]:
        entries = table.entries()
        if key not in entries or is_null(entries[key].node):
            table.own[key] = Entry(Table(), like.place)
        elif key not in table.own:
            table.own[key] = entries[key]
        node = own_node(table.own[key])
        if not isinstance(node, Table):
            raise UserError(
                "must be a section", where=table.own[key].place.text, key=key, fix=f"write {key}: and its keys below"
            )
        table = node
    return table


def _move(root: Table, old: tuple[str, ...], new: tuple[str, ...]) -> None:
    entry = _find(root, old)
    if entry is None:
        return
    _remove(_parent(root, old, entry), old[-1])
    if is_null(entry.node):
        return
    target = _parent(root, new, entry)
    present = target.entries()[new[-1]] if new[-1] in target.entries() else None
    if present is None or is_null(present.node):
        target.own[new[-1]] = entry
    elif present.node is not entry.node:
        merged = Entry(merge(present, entry, ".".join(new)), present.place)
        target.own[new[-1]] = merged


def _remove(table: Table, key: str) -> None:
    if key not in table.own:
        table.own, table.bases = table.entries(), []
    del table.own[key]


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
    later, earlier = (first, second) if first.place.order > second.place.order else (second, first)
    return UserError(
        f"disagrees with {earlier.place.text}, where the same setting is {plain(earlier.node)!r}",
        where=later.place.text,
        key=key,
        value=plain(later.node),
        fix="remove one of the two",
    )


def _join_betas(root: Table) -> None:
    """``beta1`` and ``beta2`` of the optimizer become ``betas``, the absent one with its default."""
    optimizer = _find(root, ("optimizer",))
    if optimizer is None or not isinstance(optimizer.node, Table):
        return
    entries = optimizer.node.entries()
    given = {name: entries[name] for name in _BETAS if name in entries}
    if not given:
        return
    first = next(iter(given.values()))
    defaults = OptimizerConfig.model_fields["betas"].get_default(call_default_factory=True)
    pairs = zip(_BETAS, defaults, strict=True)
    both = Entry(Items([given[name] if name in given else Entry(Scalar(value)) for name, value in pairs]), first.place)
    if "betas" in entries:
        merge(entries["betas"], both, "optimizer.betas")
    optimizer.node = Table({name: entry for name, entry in entries.items() if name not in given} | {"betas": both})


def _move_flat_moe_keys(settings: Entry, flat: list[str]) -> None:
    table = own_node(settings)
    entries = table.entries()
    moved = Entry(Table({key: entries[key] for key in flat}), entries[flat[0]].place)
    table = Table({key: entry for key, entry in entries.items() if key not in flat})
    settings.node = table
    if "moe_config" in table.own and not is_null(table.own["moe_config"].node):
        moved = Entry(merge(table.own["moe_config"], moved, "model.model_config.moe_config"), moved.place)
    table.own["moe_config"] = moved


def _adopt_lost_keys(root: Table) -> list[str]:
    """Documentation that lost its indentation: keys at the top that belong to the empty section above them.

    A key at the top is adopted when it is no top-level key, and the nearest section above it has a key of that name and
    is empty, but for adopted keys, or is a list (then its last item gets the key).
    """
    adopted: dict[str, list[Entry]] = {}
    section_key = ""
    for key, entry in list(root.own.items()):
        if key in yaml_names(Config) or key in {old[0] for old, _ in MOVED}:
            opened = is_null(entry.node) or isinstance(entry.node, Items)
            section_key = key if opened and _kinds(key) else ""
        elif section_key and any(key in yaml_names(kind) for kind in _kinds(section_key)):
            section = root.own[section_key]
            if is_null(section.node):
                section.node = Table()
            home = _last_table(section)
            if home is not None:
                home.own[key] = root.own.pop(key)
                adopted.setdefault(section_key, []).append(entry)
    return [
        f"{entries[0].place.text}: indent these lines: {len(entries)} keys at the top level are taken as {section}'s"
        for section, entries in adopted.items()
    ]


def _last_table(section: Entry) -> Table | None:
    node = section.node
    if isinstance(node, Items):
        node = node.entries[-1].node if node.entries else Scalar(None)
    return node if isinstance(node, Table) else None


def _kinds(key: str) -> tuple[type[Section], ...]:
    """The sections a top-level key may hold."""
    for old, new in MOVED:
        if old == (key,):
            return (
                {"model_config": (ModelConfig,), "moe_config": (MoEConfig,)}[new[-1]]
                if len(new) > 1
                else _kinds(new[0])
            )
    return shape_of(Config.model_fields[key]).kinds if key in Config.model_fields else ()
