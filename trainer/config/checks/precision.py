"""Mixed precision: what each `amp_level` asks for, and what it may not be told beside it.

=========  =========================  =============  ================  ============
amp_level  matrix products            norms          softmax, rotary   loss
=========  =========================  =============  ================  ============
(null)     compute_dtype              layernorm_...  softmax_...,      float32
                                      compute_type   rotary_dtype
O0         float32                    float32        float32           float32
O1, auto   half                       float32        float32           float32
O2         half                       float32        half              float32
O3         half                       half           half              float32
=========  =========================  =============  ================  ============

Half is float16, or bfloat16 where compute_dtype says so. A key of a part that is left out is float32 without an
amp_level. One that is written wins over auto and must not contradict the other levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainer.config.checks.problem import Problem

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig
    from trainer.config.schema.root import Config

HALF_PARTS: dict[str, frozenset[str]] = {
    "O0": frozenset(),
    "O1": frozenset({"compute_dtype"}),
    "auto": frozenset({"compute_dtype"}),
    "O2": frozenset({"compute_dtype", "softmax_compute_type", "rotary_dtype"}),
    "O3": frozenset({"compute_dtype", "softmax_compute_type", "rotary_dtype", "layernorm_compute_type"}),
}
"""For each amp_level the keys of `model_config` whose part it computes in half precision."""

PART_KEYS = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")
_MODEL = "model.model_config"


def asked_dtype(settings: ModelConfig, amp_level: str | None, key: str) -> str:
    """Dtype that the configuration asks for, whatever the device: of the part that `key` of `model_config` names."""
    written = getattr(settings, key)
    if written is not None:
        return written
    if amp_level is None or key not in HALF_PARTS[amp_level]:
        return "float32"
    return half_of(settings)


def half_of(settings: ModelConfig) -> str:
    """The half precision of an amp_level: float16, MindSpore's default, unless compute_dtype chooses bfloat16."""
    return "bfloat16" if settings.compute_dtype == "bfloat16" else "float16"


def precision_problems(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    """A dtype that contradicts the amp_level: one of the two would not be what its reader believes."""
    level, settings = config.amp_level, config.decoder
    if level in (None, "auto"):
        return
    for key in PART_KEYS:
        written = getattr(settings, key)
        says = half_of(settings) if key in HALF_PARTS[level] else "float32"
        if written is None or written == says:
            continue
        place = config.source.where("amp_level")
        other = "remove one of the two, or use amp_level auto, over which a written dtype wins"
        yield report(f"{_MODEL}.{key}", written, f"amp_level {level} ({place}) means {says} here", other)


def precision_notices(config: Config) -> Iterator[str]:
    """What a reader of the file might not expect of the dtypes."""
    level, settings = config.amp_level, config.decoder
    keys: dict[str, list[str]] = {"float16": [], "bfloat16": [], "float32": []}
    for key in PART_KEYS:
        keys[asked_dtype(settings, level, key)].append(f"{_MODEL}.{key}" if getattr(settings, key) else "amp_level")
    if keys["bfloat16"] and config.context.device_target in (None, "CPU"):
        names = ", ".join(dict.fromkeys(keys["bfloat16"]))
        yield f"{names}: a CPU has no bfloat16 kernels; it computes in float32 instead of bfloat16"
    if settings.param_init_type != "float32":
        yield (
            f"{_MODEL}.param_init_type {settings.param_init_type}: parameters are kept in float32, as master weights"
            " that no small update is lost on; products cast them to compute_dtype"
        )
    if level == "auto" and settings.compute_dtype == "float32":
        yield f"amp_level auto: matrix products stay float32, {_MODEL}.compute_dtype says so"
    trains = config.trains
    if keys["float16"] and trains and config.runner_wrapper.scale_sense == 1.0:
        yield (
            f"{', '.join(dict.fromkeys(keys['float16']))}: gradients below 6e-8 become zero in float16; set"
            " runner_wrapper.scale_sense, for example to {type: DynamicLossScaleUpdateCell}"
        )
