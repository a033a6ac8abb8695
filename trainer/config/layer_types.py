"""Converts the keys that say which layers have a sliding window, or experts, into one entry for each layer."""

from __future__ import annotations

from typing import Any


def window_layer_types(layers: int, skip_frequency: Any) -> list[str]:
    """Converts MindSpore Transformers' ``window_attn_skip_freq`` to ``layer_types``.

    It gives layer 0 the attention of layer 1 (attention.py, line 149: ``max(1, layer_number)``).
    """
    if isinstance(skip_frequency, list):
        windowed = [bool(value) for value in skip_frequency]
    elif isinstance(skip_frequency, int) and skip_frequency > 0:
        windowed = [(layer + 1) % skip_frequency != 0 for layer in range(layers)]
    else:
        windowed = [True] * layers
    windowed[:1] = windowed[1:2] or windowed[:1]
    return ["sliding_attention" if has_window else "full_attention" for has_window in windowed]


def alternating_layer_types(layers: int, period: int) -> list[str]:
    """Returns the ``layer_types`` of a model in which every `period`th layer has no sliding window."""
    kinds = {False: "full_attention", True: "sliding_attention"}
    return [kinds[layer % period != 0] for layer in range(1, layers + 1)]


def layers_with_experts(layers: int, step: int, dense: list[int]) -> list[int]:
    """Converts Qwen3-MoE's decoder_sparse_step and mlp_only_layers to ``moe_layer_freq``: 1 or 0 for each layer."""
    return [int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers)]
