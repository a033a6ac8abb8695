"""Weights that a checkpoint may have or lack: multi-token prediction (MTP) modules and expert biases.

Published files have DeepSeek's MTP modules after the last layer, whether a run trains them or not. Expert biases belong
to the training, and the files of most families have none. Pure Python.
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
"""Ends of the names that only MTP modules have."""


def unused_modules(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """Tensors of MTP modules that the model does not have, and a notice about them; `names` are those of the file."""
    beyond = [name for name in names if _layer(name) >= settings.num_layers]
    layers = {_layer(name) for name in beyond}
    modules = _modules(beyond)
    unused = {layer for layer in modules if layer >= settings.num_layers + settings.mtp_depth}
    # If there are other layers among them, the file is of a deeper model.
    if not unused or layers != modules:
        return set(), ""
    depth = max(unused) - settings.num_layers + 1
    one, them = ("module", "it") if len(unused) == 1 else ("modules", "them")
    text = f"not loaded from the checkpoint: the multi-token prediction {one} ({layer_text(unused)})"
    return {name for name in beyond if _layer(name) in unused}, f"{text}; mtp_depth: {depth} would use {them}"


def missing_modules(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """Parameters of MTP modules that the file lacks completely, and a notice about them."""
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
    """The expert biases of balance_via_topk_bias, where the file has none at all, and a notice about them."""
    moe = settings.experts
    if moe is None or not moe.balance_via_topk_bias or any(name.endswith(EXPERT_BIAS) for name in names):
        return set(), ""
    found = {name for name in parameter_shapes(settings) if name.endswith(EXPERT_BIAS)}
    return found, "balance_via_topk_bias: the checkpoint has no expert bias, which starts at 0"


def fix_for(missing: Collection[str], unknown: Collection[str], settings: ModelConfig) -> str:
    """The fix, where the file differs in MTP modules alone; else empty."""
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
    """The layer of a tensor; -1 for a tensor outside the layers."""
    number = name.removeprefix(_LAYERS).partition(".")[0]
    return int(number) if name.startswith(_LAYERS) and number.isdecimal() else -1
