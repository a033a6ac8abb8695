"""Mixed precision: what each `amp_level` asks for.

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

from trainer.config.schema.model import ModelConfig

HALF_PARTS: dict[str, frozenset[str]] = {
    "O0": frozenset(),
    "O1": frozenset({"compute_dtype"}),
    "auto": frozenset({"compute_dtype"}),
    "O2": frozenset({"compute_dtype", "softmax_compute_type", "rotary_dtype"}),
    "O3": frozenset({"compute_dtype", "softmax_compute_type", "rotary_dtype", "layernorm_compute_type"}),
}
"""For each amp_level the keys of `model_config` whose part it computes in half precision."""

PART_KEYS = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")


def requested_dtype(settings: ModelConfig, amp_level: str | None, key: str) -> str:
    """Dtype that the configuration asks for, whatever the device: of the part that `key` of `model_config` names."""
    return getattr(settings, key) or ("float32" if amp_level is None else level_dtype(settings, amp_level, key))


def level_dtype(settings: ModelConfig, amp_level: str, key: str) -> str:
    """Dtype of a part by the amp_level alone; half is float16, MindSpore's default, or bfloat16 as compute_dtype."""
    half = "float16"
    if settings.compute_dtype == "bfloat16":
        half = "bfloat16"
    if key in HALF_PARTS[amp_level]:
        return half
    return "float32"
