"""What a checkpoint may hold or lack beside the model's weights: multi-token prediction modules, expert biases.

Published files hold DeepSeek's modules behind the last layer, whether they are to be trained or not; a balancing bias
is a matter of the training, and files of most families know none. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from trainer.config.layer_ranges import layer_text
from trainer.models.shapes import EXPERT_BIAS, layer_prefix, parameter_shapes

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_LAYERS = "model.layers."
_OF_MODULES = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""What a layer has that is a multi-token prediction module, and no other layer."""


def unused_modules(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """Tensors of multi-token prediction modules that the model does not have, and what to say of them.

    Args:
        names: Of all tensors in the file.
        settings: The model section.
    """
    beyond = [name for name in names if _layer(name) >= settings.num_layers]
    layers = {_layer(name) for name in beyond}
    modules = _modules(beyond)
    unused = {layer for layer in modules if layer >= settings.num_layers + settings.mtp_depth}
    # With layers of another kind between them it is a deeper model.
    if not unused or layers != modules:
        return set(), ""
    depth = max(unused) - settings.num_layers + 1
    one, them = ("module", "it") if len(unused) == 1 else ("modules", "them")
    text = f"left out of the checkpoint: the {one} for further tokens ({layer_text(unused)})"
    return {name for name in beyond if _layer(name) in unused}, f"{text}; mtp_depth: {depth} would use {them}"


def missing_modules(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """Parameters of multi-token prediction modules of which the file has nothing, and what to say of them."""
    there = {_layer(name) for name in names}
    depth = range(settings.num_layers, settings.num_layers + settings.mtp_depth)
    missing = [layer for layer in depth if layer not in there]
    prefixes = tuple(layer_prefix(layer) for layer in missing)
    text = (
        f"the checkpoint has no multi-token prediction module: {layer_text(missing)} (mtp_depth {settings.mtp_depth})"
    )
    starts = "starts" if len(missing) == 1 else "start"
    return {name for name in parameter_shapes(settings) if name.startswith(prefixes)}, f"{text} {starts} from the seed"


def missing_biases(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """The biases that balance_via_topk_bias asks for, where the file has none at all, and what to say of them."""
    moe = settings.experts
    if moe is None or not moe.balance_via_topk_bias or any(name.endswith(EXPERT_BIAS) for name in names):
        return set(), ""
    found = {name for name in parameter_shapes(settings) if name.endswith(EXPERT_BIAS)}
    return found, "balance_via_topk_bias: the checkpoint has no bias on the choice of experts, it starts at 0"


def fix_for(missing: Collection[str], unknown: Collection[str], settings: ModelConfig) -> str:
    """How multi-token prediction modules are brought in line, where they are what differs; else empty."""
    beyond = [name for name in (*missing, *unknown) if _layer(name) >= settings.num_layers]
    if len(beyond) < len(missing) + len(unknown) or not beyond or _modules(beyond) != set(map(_layer, beyond)):
        return ""
    depth = settings.mtp_depth
    if unknown:
        return f"write mtp_depth: {max(map(_layer, unknown)) - settings.num_layers + 1}, as in the checkpoint"
    there = min(map(_layer, missing)) - settings.num_layers
    return f"write mtp_depth: {there} instead of {depth}, as in the checkpoint, or name one with its modules"


def _modules(names: Iterable[str]) -> set[int]:
    return {_layer(name) for name in names if name.endswith(_OF_MODULES)}


def _layer(name: str) -> int:
    """The layer of a tensor; -1 for one that stands in none."""
    number = name.removeprefix(_LAYERS).partition(".")[0]
    return int(number) if name.startswith(_LAYERS) and number.isdecimal() else -1
