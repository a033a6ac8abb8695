"""Parameter groups: which parameters decay, and which optimizer updates each. Pure Python: `plan` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from trainer.config.schema.optimizer import OptimizerConfig
from trainer.models.spec.names import is_adapter_output, megatron_names


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same weight decay, learning rate and optimizer."""

    name: str
    weight_decay: float
    parameters: tuple[str, ...]
    optimizer: str = "AdamW"
    lr_ratio: float = 1.0
    """Factor on the learning rate."""


EMA = "ema"
"""The state array with the exponential moving average of a weight (`optimizer.ema_decay`)."""
PMA = "pma_weight"
"""The state array with the average that will replace a weight (PmaAdamW)."""

STATE_NAMES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",), "Muon": ("momentum_buffer",)}
"""The state arrays, of a parameter's size, that each update rule keeps."""


def average_names(settings: OptimizerConfig) -> tuple[str, ...]:
    """Returns the state arrays, of a parameter's size, that hold averages of weights."""
    names: tuple[str, ...] = ()
    if settings.type == "PmaAdamW":
        names += (PMA,)
    if settings.ema_decay is not None:
        names += (EMA,)
    return names


def state_names(settings: OptimizerConfig) -> dict[str, tuple[str, ...]]:
    """Returns all state arrays of a parameter, by the optimizer of its group."""
    return {rule: names + average_names(settings) for rule, names in STATE_NAMES.items()}


def parameter_of(key: str) -> str:
    """Returns the parameter's name in the name of a state array, `kind.parameter`."""
    return key.split(".", 1)[1]


def parameter_groups(shapes: Mapping[str, tuple[int, ...]], settings: OptimizerConfig) -> tuple[ParameterGroup, ...]:
    """Divides parameters into groups: matrices have weight decay; norm weights and biases have none.

    A bias has one axis, or two if the biases of experts are stacked. Muon leaves norms, biases and `adamw_include` to
    AdamW: each row of embedding and head is the vector of a token, which needs no orthogonalised update.
    `weight_decay_include` and `weight_decay_exclude` move parameters into additional groups, as does LoRA+ with the
    parameters of an adapter that make its output.

    Args:
        shapes: The trainable parameters, by name.
    """
    decay = settings.weight_decay
    rule = settings.type
    if rule == "PmaAdamW":
        rule = "AdamW"
    matrices = [name for name, shape in shapes.items() if len(shape) > 1 and not name.endswith(".bias")]
    others = [name for name in shapes if name not in set(matrices)]
    if rule != "Muon":
        decayed = [ParameterGroup("matrices", decay, tuple(matrices), rule)]
        vectors = ParameterGroup("norms and biases", 0.0, tuple(others), rule)
    else:
        # Three axes: the stacked matrices of a layer's experts.
        by_adamw = {
            name
            for name, megatron in megatron_names(matrices).items()
            if len(shapes[name]) > 3 or any(fnmatchcase(megatron, pattern) for pattern in settings.adamw_include)
        }
        by_muon = tuple(name for name in matrices if name not in by_adamw)
        left = tuple(name for name in matrices if name in by_adamw)
        decayed = [
            ParameterGroup("matrices, by Muon", decay, by_muon, "Muon"),
            ParameterGroup("other matrices, by AdamW", decay, left),
        ]
        vectors = ParameterGroup("norms and biases, by AdamW", 0.0, tuple(others))
    included = matching_parameters(shapes, settings.weight_decay_include)
    excluded = matching_parameters(shapes, settings.weight_decay_exclude) - included
    groups = [part for group in decayed for part in _divide(group, excluded, "without", 0.0)]
    groups += _divide(vectors, included, "with", decay)
    ratio = settings.loraplus_lr_ratio
    if ratio == 1:
        return tuple(groups)
    faster = {name for name in shapes if is_adapter_output(name)}
    return tuple(part for group in groups for part in _move(group, faster, "LoRA+", lr_ratio=ratio))


def _divide(group: ParameterGroup, moved: Set[str], word: str, weight_decay: float) -> list[ParameterGroup]:
    """Returns the group without its moved parameters, then these with another weight decay if there are any."""
    return _move(group, moved, f"{word} weight decay", weight_decay=weight_decay)


def _move(group: ParameterGroup, moved: Set[str], what: str, **changes: Any) -> list[ParameterGroup]:
    """Returns the group without its moved parameters, then these in a changed group if there are any."""
    remaining = tuple(name for name in group.parameters if name not in moved)
    taken = tuple(name for name in group.parameters if name in moved)
    groups = [replace(group, parameters=remaining)]
    if taken:
        groups.append(replace(group, name=f"{group.name}, {what}", parameters=taken, **changes))
    return groups


def unmatched_decay_rules(names: Iterable[str], settings: OptimizerConfig) -> Iterator[tuple[str, str]]:
    """Yields key and text of each rule about weight decay that matches no parameter."""
    names = list(names)
    for key in ("weight_decay_include", "weight_decay_exclude"):
        for rule in getattr(settings, key) or ():
            if not matching_parameters(names, [rule]):
                yield f"optimizer.{key}", rule


def matching_parameters(names: Iterable[str], rules: Sequence[str] | None) -> set[str]:
    """Returns the parameters that any of the rules matches: a name, a part of it, or a pattern with * and ?.

    Rules are for the names in MindSpore Transformers. One that matches none of these is for Hugging Face's.
    """
    matched: set[str] = set()
    for rule in rules or ():
        megatron = megatron_names(names)
        of_rule = {name for name in megatron if rule in megatron[name] or fnmatchcase(megatron[name], rule)}
        matched |= of_rule or {name for name in megatron if rule in name or fnmatchcase(name, rule)}
    return matched
