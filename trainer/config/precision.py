"""Mixed precision: the dtypes that each `amp_level` requests.

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

Half is float16, or bfloat16 if compute_dtype is bfloat16. Without an amp_level, keys that are left out are float32.
A key that is written wins over auto and must not contradict the other levels.
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
"""amp_level -> the keys of `model_config` whose part of the model it computes in half precision."""

PART_KEYS = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")


def requested_dtype(settings: ModelConfig, amp_level: str | None, key: str) -> str:
    """Returns the requested dtype of the part of the model that a key of `model_config` names, for any device."""
    written = getattr(settings, key)
    if written:
        return written
    if amp_level is None:
        return "float32"
    return level_dtype(settings, amp_level, key)


def level_dtype(settings: ModelConfig, amp_level: str, key: str) -> str:
    """Returns the dtype that an amp_level implies for a part; half is float16, or bfloat16 if compute_dtype is."""
    if key not in HALF_PARTS[amp_level]:
        return "float32"
    if settings.compute_dtype == "bfloat16":
        return "bfloat16"
    return "float16"
