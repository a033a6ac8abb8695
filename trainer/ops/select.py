"""Selects the implementation of each kernel for a device, with the reason. `plan` prints it without MindSpore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.checks.parallel import parallel_degrees, runs_semi_auto, shards_optimizer, zero_level
from trainer.config.note import Note
from trainer.config.precision import PART_KEYS, requested_dtype
from trainer.config.schema.model import ModelConfig
from trainer.errors import value_text
from trainer.models.spec.adapters import base_dtype
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.host_library import bfloat16_products
from trainer.ops.precision import NarrowProducts, PartDtype, Precision, resolve_precision
from trainer.parallel.world import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.moe import MoEConfig
    from trainer.config.schema.root import Network

REFERENCE = "reference"
_MODEL = "model.model_config"


@dataclass(frozen=True)
class KernelChoice:
    """One kernel: the requested implementation (`asked`), the chosen one, and the reason."""

    kernel: str
    asked: str
    chosen: str
    why: str

    @property
    def fused(self) -> bool:
        """Whether a fused operator is chosen."""
        return self.chosen != REFERENCE


# Kernel, key that switches it on (None: always fused where the operator exists), operator of Ascend.
_KERNELS = (
    ("rotary_embedding", "use_fused_rope", "rotary_position_embedding"),
    ("swiglu", "use_fused_swiglu", "swiglu"),
    ("attention", "use_flash_attention", "flash_attention_score"),
    ("rms_norm", None, "RmsNorm"),
)
# Further kernels of models with experts; their keys are in moe_config.
_EXPERT_KERNELS = (
    ("grouped_matmul", "use_gmm", "GroupedMatmulV4"),
    ("token_permute", "use_fused_ops_permute", "moe_token_permute"),
)


def select_kernels(
    settings: Network, device: str, precision: Precision | None = None
) -> tuple[KernelChoice, ...]:
    """Selects the implementation of every kernel, by the `use_*` keys of the model section; none for another model.

    Without `precision`, the model section alone sets the dtypes.
    """
    if not isinstance(settings, ModelConfig):
        return ()
    dtypes = precision or resolve_precision(settings, None, device)
    if settings.experts is None:
        kernels = _KERNELS
    else:
        kernels = _KERNELS + _EXPERT_KERNELS
    return tuple(_choose(kernel, switch, operator, settings, device, dtypes) for kernel, switch, operator in kernels)


def _choose(
    kernel: str, switch: str | None, operator: str, settings: ModelConfig, device: str, precision: Precision
) -> KernelChoice:
    section: ModelConfig | MoEConfig | None = settings
    if (kernel, switch, operator) in _EXPERT_KERNELS:
        section = settings.experts
    is_requested = switch is None or bool(getattr(section, switch))
    requested = "(automatic)"
    if switch:
        requested = f"{switch}: {value_text(is_requested)}"
    if device != "Ascend":
        why = f"{switch} is off"
        if is_requested:
            why = f"{operator} exists only on Ascend"
        return KernelChoice(kernel, requested, REFERENCE, f"{why}; device is {device}")
    if not is_requested and kernel != "grouped_matmul":
        return KernelChoice(kernel, requested, REFERENCE, f"{switch} is off")
    limitation = _limitation(kernel, settings, precision)
    if limitation:
        return KernelChoice(kernel, requested, REFERENCE, limitation)
    why = f"fused operator of {device}"
    if not is_requested:
        why += f"; {switch} false only keeps the capacity, experts never compute on the host"
    elif kernel == "attention":
        why += "; its softmax is float32"
    return KernelChoice(kernel, requested, operator, why)


def _limitation(kernel: str, settings: ModelConfig, precision: Precision) -> str:
    """Returns why the fused operator cannot compute this part of the model; an empty text if it can."""
    if kernel == "attention" and settings.attention_dropout > 0 and settings.seq_length % 16:
        return f"flash_attention_score drops with sequences of a multiple of 16 tokens, here {settings.seq_length}"
    if kernel == "attention" and precision.compute.dtype == "float32":
        return "compute_dtype is float32; flash_attention_score takes float16 and bfloat16"
    if kernel == "attention" and (settings.head_size % 16 or settings.head_size > 512):
        return f"flash_attention_score takes heads of a multiple of 16 up to 512, here {settings.head_size}"
    if kernel == "attention" and settings.attn_logit_softcapping is not None:
        return f"attn_logit_softcapping is {settings.attn_logit_softcapping:g}; flash_attention_score caps no scores"
    if kernel == "attention" and settings.attention_sinks:
        return "attention_sinks is true; flash_attention_score has no sinks"
    values = attention_spec(settings).value_size
    if kernel == "attention" and values > settings.head_size:
        here = f"here {values} and {settings.head_size}"
        return f"flash_attention_score takes values that are no wider than the queries, {here}"
    if kernel == "swiglu" and settings.activation != "silu":
        return f"swiglu computes SiLU; the model's activation is {settings.activation}"
    turned = settings.rotary_head_size
    if kernel == "rotary_embedding" and settings.rotary_size != turned:
        part = f"rotary_pct {settings.rotary_pct:g} rotates only {settings.rotary_size}"
        return f"rotary_position_embedding rotates all {turned} dimensions of a head; {part}"
    if kernel == "rotary_embedding" and settings.rope_interleave:
        return "rotary_position_embedding turns neighbouring numbers with one table for all sequences only"
    if kernel == "rotary_embedding" and (turned >= 896 or settings.num_heads >= 1000):
        here = f"here {settings.num_heads} of {turned}"
        return f"rotary_position_embedding takes fewer than 1000 heads, of less than 896 numbers, {here}"
    experts = settings.experts
    if kernel == "token_permute" and experts is not None and not experts.use_gmm:
        return "use_gmm is off"
    if kernel == "token_permute" and experts is not None and experts.enable_gmm_safe_tokens:
        return "enable_gmm_safe_tokens adds rows that belong to no token; moe_token_permute makes none"
    return ""


def on_arrays(config: Config, device: str, world: World = SINGLE_PROCESS) -> bool:
    """Returns whether native CPU layers compute the model: that of every decoder on a CPU in explicit mode.

    The exception is training and evaluation with `context.mode` 1, which run MindSpore's operators one by one. They use
    native layers nevertheless if ranks shard the layers or the weights (level3), which only native layers support.
    """
    if device != "CPU" or not config.is_decoder or runs_semi_auto(config, world):
        return False
    if config.context.mode == 0 or config.run_mode in ("predict", "chat"):
        return True
    shares_weights = shards_optimizer(config, world) and zero_level(config) == "level3"
    return parallel_degrees(config, world).shards_layers or shares_weights


def precision_of(config: Config, device: str, world: World = SINGLE_PROCESS) -> Precision:
    """Returns the dtype of each part for a run of this configuration on a device."""
    if device == "CPU":
        return precision_on_cpu(config, on_arrays(config, device, world))
    return resolve_precision(config.decoder, config.amp_level, device)


def precision_on_cpu(config: Config, native: bool) -> Precision:
    """Returns the dtype of each part of a decoder on a CPU; `native` tells whether native CPU layers compute it."""
    requested = requested_dtype(config.decoder, config.amp_level, "compute_dtype")
    narrow = _narrow_products(requested, native, config.context.mode == 0)
    if config.run_mode in ("predict", "chat"):
        narrow = NarrowProducts("", "and a CPU predicts in float32", nothing_else=True)
    return resolve_precision(config.decoder, config.amp_level, "CPU", narrow)


def _narrow_products(dtype: str, native: bool, compiled: bool) -> NarrowProducts:
    """Returns how a CPU multiplies matrices of this dtype; only native layers multiply in bfloat16."""
    if not native:
        mode = "context.mode 1"
        if compiled:
            mode = "MindSpore's semi-automatic mode"
        return NarrowProducts("", f"which a CPU does not compute with {mode}")
    if dtype == "float16":
        return NarrowProducts("emulated", "float32 products of rounded numbers")
    by = bfloat16_products()
    why = {
        "oneDNN": "oneDNN multiplies, sums are float32",
        "emulated": "this processor has no instructions for it: float32 products of rounded numbers",
        "": "for which this MindSpore has no oneDNN 3.10",
    }
    return NarrowProducts(by, why[by])


def dtype_notes(config: Config, precision: Precision, device: str) -> Iterator[Note]:
    """Yields notes about parts on a CPU whose requested half precision is not available, or is slow."""
    requested = {key: requested_dtype(config.decoder, config.amp_level, key) for key in PART_KEYS}
    if device != "CPU" or not {"bfloat16", "float16"} & set(requested.values()):
        return
    parts = (precision.compute, precision.norm, precision.softmax, precision.rotary)
    keys_by_reason: dict[str, list[str]] = {}
    for key, part in zip(PART_KEYS, parts, strict=True):
        if part.dtype != requested[key]:
            name = "amp_level"
            if getattr(config.decoder, key) is not None:
                name = f"{_MODEL}.{key}"
            keys_by_reason.setdefault(part.why, []).append(name)
    for why, names in keys_by_reason.items():
        yield Note(f"{', '.join(dict.fromkeys(names))}: computes in float32; {why}", "dtype")
    compute = precision.compute.dtype
    if precision.by == "emulated":
        yield Note(f"{_MODEL}.compute_dtype {compute}: this processor has no instructions for it; the numbers are"
                   " rounded and multiplied in float32, which takes longer than compute_dtype float32", "dtype")
    if precision.by and config.decoder.experts is not None:
        yield Note(f"{_MODEL}.compute_dtype {compute}: on a CPU routed experts compute in float32", "dtype")
    if config.trains and not config.runner_wrapper.accumulate_allreduce_grads_in_fp32:
        yield Note("runner_wrapper.accumulate_allreduce_grads_in_fp32: on a CPU gradients are float32", "dtype")


def kernel_notes(choices: tuple[KernelChoice, ...]) -> Iterator[str]:
    """Yields notes about requested kernels of experts that the device does not have."""
    requested = {choice.asked for choice in choices}
    if "use_gmm: true" not in requested:
        return
    for choice in choices:
        if choice.asked == "use_fused_ops_permute: true" and not choice.fused:
            yield f"use_fused_ops_permute: the reference sorts the tokens, {choice.why}"


def part_dtypes(
    settings: Network, precision: Precision, choices: tuple[KernelChoice, ...]
) -> dict[str, PartDtype]:
    """Returns the dtype of each part and the reason, by the names that `plan` shows."""
    always = PartDtype("float32", "always")
    if not isinstance(settings, ModelConfig):
        return {name: always for name in ("parameters, matrix products, loss", "gradients, optimizer state")}
    parameters = always
    if settings.param_init_type != "float32":
        parameters = PartDtype("float32", f"master weights (asked: {settings.param_init_type})")
    softmax = precision.softmax
    if any(choice.kernel == "attention" and choice.fused for choice in choices):
        softmax = PartDtype("float32", "inside flash_attention_score")
    products = precision.compute
    others = {}
    if precision.by:
        if settings.experts is not None:
            others = {"routed experts": PartDtype("float32", f"a CPU has no {products.dtype} kernels of them")}
        products = PartDtype(f"{products.dtype} ({precision.by})", products.why)
    of_parameters = {"parameters": parameters}
    if dtype := base_dtype(settings):
        why = "base_dtype; decompressed before a product"
        if dtype == "bfloat16":
            why = "base_dtype"
        of_parameters = {
            "frozen matrices of layers": PartDtype(dtype, why),
            "frozen embedding and head": PartDtype("bfloat16", "beside a base_dtype"),
            "adapters and other parameters": parameters,
        }
    return {
        **of_parameters,
        "matrix products": products,
        **others,
        "norms": precision.norm,
        "softmax": softmax,
        "rotary tables": precision.rotary,
        "residual stream, loss": always,
        "gradients, optimizer state": always,
    }
