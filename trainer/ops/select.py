"""Selects the implementation of each kernel for a device and says why. `plan` prints it without MindSpore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.checks.parallel import degrees_of, runs_semi_auto
from trainer.config.notice import Notice
from trainer.config.precision import PART_KEYS, asked_dtype
from trainer.config.schema.classifier import ClassifierConfig
from trainer.ops.host_library import bfloat16_products
from trainer.ops.precision import HostBfloat16, PartDtype, Precision, resolve_precision
from trainer.parallel.world import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig
    from trainer.parallel.mesh import Degrees

REFERENCE = "reference"
_MODEL = "model.model_config"


@dataclass(frozen=True)
class KernelChoice:
    """One kernel: what the configuration asked for, what it gets, and the reason."""

    kernel: str
    asked: str
    chosen: str
    why: str

    @property
    def fused(self) -> bool:
        return self.chosen != REFERENCE


# kernel, the configuration's switch (None: always fused where it exists), the Ascend operator
_KERNELS = (
    ("rotary_embedding", "use_fused_rope", "rotary_position_embedding"),
    ("swiglu", "use_fused_swiglu", "swiglu"),
    ("attention", "use_flash_attention", "flash_attention_score"),
    ("rms_norm", None, "RmsNorm"),
)
# The same for models with experts; their switches stand in moe_config.
_EXPERT_KERNELS = (
    ("grouped_matmul", "use_gmm", "GroupedMatmulV4"),
    ("token_permute", "use_fused_ops_permute", "moe_token_permute"),
)


def select_kernels(
    settings: ModelConfig | ClassifierConfig, device: str, precision: Precision | None = None
) -> tuple[KernelChoice, ...]:
    """The implementation of every kernel; a classifier has none to choose.

    The `use_*` switches of the model section say what was asked for. Without `precision` the model section alone sets
    the dtypes.
    """
    if isinstance(settings, ClassifierConfig):
        return ()
    dtypes = precision or resolve_precision(settings, None, device)
    kernels = _KERNELS if settings.experts is None else _KERNELS + _EXPERT_KERNELS
    return tuple(_choose(kernel, switch, operator, settings, device, dtypes) for kernel, switch, operator in kernels)


def _choose(
    kernel: str, switch: str | None, operator: str, settings: ModelConfig, device: str, precision: Precision
) -> KernelChoice:
    section = settings.experts if (kernel, switch, operator) in _EXPERT_KERNELS else settings
    wanted = switch is None or bool(getattr(section, switch))
    asked = f"{switch}: {wanted}" if switch else "(automatic)"
    if device != "Ascend":
        why = f"{operator} exists only on Ascend" if wanted else f"{switch} is off"
        return KernelChoice(kernel, asked, REFERENCE, f"{why}; device is {device}")
    if not wanted and kernel != "grouped_matmul":
        return KernelChoice(kernel, asked, REFERENCE, f"{switch} is off")
    obstacle = _obstacle(kernel, settings, precision)
    if obstacle:
        return KernelChoice(kernel, asked, REFERENCE, obstacle)
    more = "; its softmax is float32" if kernel == "attention" else ""
    more = more if wanted else f"; {switch} False only keeps the capacity, experts never compute on the host"
    return KernelChoice(kernel, asked, operator, f"fused operator of {device}{more}")


def _obstacle(kernel: str, settings: ModelConfig, precision: Precision) -> str:
    """Why the fused operator cannot compute this part of the model; empty if it can."""
    if kernel == "attention" and settings.attention_dropout > 0 and settings.seq_length % 16:
        return f"flash_attention_score drops with sequences of a multiple of 16 tokens, here {settings.seq_length}"
    if kernel == "attention" and precision.compute.dtype == "float32":
        return "compute_dtype is float32; flash_attention_score takes float16 and bfloat16"
    if kernel == "attention" and (settings.head_size % 16 or settings.head_size > 512):
        return f"flash_attention_score takes heads of a multiple of 16 up to 512, here {settings.head_size}"
    if kernel == "attention" and settings.value_size > settings.head_size:
        here = f"here {settings.value_size} and {settings.head_size}"
        return f"flash_attention_score takes values that are no wider than the queries, {here}"
    turned = settings.rotary_head_size
    if kernel == "rotary_embedding" and settings.rotary_size != turned:
        part = f"rotary_pct {settings.rotary_pct:g} rotates only {settings.rotary_size}"
        return f"rotary_position_embedding rotates all {turned} dimensions of a head; {part}"
    if kernel == "rotary_embedding" and settings.rope_interleave:
        return "rotary_position_embedding turns neighbouring numbers with one table for all sequences only"
    if kernel == "rotary_embedding" and (turned >= 896 or settings.num_heads >= 1000):
        here = f"here {settings.num_heads} of {turned}"
        return f"rotary_position_embedding takes fewer than 1000 heads, of less than 896 numbers, {here}"
    if kernel == "token_permute" and not settings.experts.use_gmm:
        return "use_gmm is off"
    if kernel == "token_permute" and settings.experts.enable_gmm_safe_tokens:
        return "enable_gmm_safe_tokens adds rows that belong to no token; moe_token_permute makes none"
    return ""


def has_host_layers(
    settings: ModelConfig | ClassifierConfig, precision: Precision, device: str, *, compiled: bool, divided: str = ""
) -> bool:
    """Whether whole layers are computed on arrays in the host's memory, without compilation.

    What they do not know goes through compiled blocks: what `_unknown_to_host_layers` names, and float16.

    Args:
        compiled: context.mode 0; mode 1 runs operator by operator.
        divided: What ranks divide that these layers do not know; empty for nothing.
    """
    if isinstance(settings, ClassifierConfig) or device != "CPU":
        return False
    parts = precision.compute, precision.norm, precision.softmax, precision.rotary
    has_dtypes = bool(precision.by) or all(part.dtype == "float32" for part in parts)
    return has_dtypes and not _unknown_to_host_layers(settings, compiled, divided)


def _unknown_to_host_layers(settings: ModelConfig, compiled: bool, divided: str) -> str:
    """What of a model, or of how it runs, whole layers on arrays do not know; empty if they know everything. `divided`
    as in `has_host_layers`."""
    found = {
        "context.mode 1": not compiled,
        f"ranks that divide {divided}": bool(divided),
        "multi-head latent attention": settings.multi_latent_attention,
        "norms after a sublayer": settings.post_self_attn_layernorm or settings.post_mlp_layernorm,
        "dropout": settings.hidden_dropout > 0 or settings.attention_dropout > 0,
        "adapters": settings.pet_config is not None,
        "an embedding of another width": settings.maps_embedding,
    }
    return next((name for name, is_there in found.items() if is_there), "")


def precision_of(config: Config, device: str, world: World = SINGLE_PROCESS) -> Precision:
    """The dtype that each part of a run computes in."""
    if device != "CPU":
        return resolve_precision(config.network, config.amp_level, device)
    divided = divided_for_bfloat16(degrees_of(config, world))
    return precision_on_cpu(config, divided=divided, semi_auto=runs_semi_auto(config, world))


def runs_host_layers(config: Config, device: str, world: World) -> bool:
    """`has_host_layers` of a run."""
    precision, compiled = precision_of(config, device, world), config.context.mode == 0
    divided = _divided_sequences(config, world)
    known = has_host_layers(config.network, precision, device, compiled=compiled, divided=divided)
    return known and not runs_semi_auto(config, world)


def why_compiled(config: Config, device: str, world: World) -> str:
    """What sends the layers of a run through compiled blocks; empty where `runs_host_layers`."""
    if runs_host_layers(config, device, world):
        return ""
    if device != "CPU" or config.classifier is not None:
        return f"device {device}" if device != "CPU" else "a classifier"
    if runs_semi_auto(config, world):
        return "MindSpore's semi-automatic mode"
    divided = _divided_sequences(config, world)
    return _unknown_to_host_layers(config.decoder, config.context.mode == 0, divided) or "float16"


def _divided_sequences(config: Config, world: World) -> str:
    """What ranks divide that layers on arrays do not know, as `has_host_layers` takes it."""
    return "sequences" if degrees_of(config, world).context_parallel > 1 else ""


def divided_for_bfloat16(degrees: Degrees) -> str:
    """The same where they make products in bfloat16, which they know of whole matrices alone."""
    return "matrices or sequences" if degrees.model_parallel > 1 or degrees.context_parallel > 1 else ""


def precision_on_cpu(config: Config, *, divided: str = "", semi_auto: bool = False) -> Precision:
    """`precision_of` for a CPU, whose layers on arrays have products in bfloat16; `divided` as in `has_host_layers`."""
    on_host = None
    if "bfloat16" in _asked(config).values():
        unknown = _unknown_to_host_layers(config.decoder, config.context.mode == 0, divided)
        on_host = _host_bfloat16("MindSpore's semi-automatic mode" if semi_auto else unknown)
    return resolve_precision(config.network, config.amp_level, "CPU", on_host)


def _asked(config: Config) -> dict[str, str]:
    """The dtypes that the configuration asks for."""
    if config.classifier is not None:
        return {}
    return {key: asked_dtype(config.decoder, config.amp_level, key) for key in PART_KEYS}


def _host_bfloat16(unknown: str) -> HostBfloat16:
    """Who multiplies in bfloat16; `unknown` is what layers on arrays do not know, or empty."""
    if unknown:
        return HostBfloat16("", f"which a CPU does not compute with {unknown}")
    by = bfloat16_products()
    why = {
        "oneDNN": "oneDNN multiplies, sums are float32",
        "emulated": "this processor has no instructions for it: float32 products of rounded numbers",
        "": "for which this MindSpore has no oneDNN 3.10",
    }
    return HostBfloat16(by, why[by])


def dtype_notices(config: Config, precision: Precision, device: str) -> Iterator[Notice]:
    """Notices about parts that asked for bfloat16 and get something else on a CPU, or get it slowly."""
    asked = _asked(config)
    if device != "CPU" or "bfloat16" not in asked.values():
        return
    found = zip(PART_KEYS, (precision.compute, precision.norm, precision.softmax, precision.rotary), strict=True)
    others: dict[str, list[str]] = {}
    for key, part in found:
        if part.dtype != asked[key]:
            own = getattr(config.decoder, key) is not None
            others.setdefault(part.why, []).append(f"{_MODEL}.{key}" if own else "amp_level")
    for why, names in others.items():
        yield Notice(f"{', '.join(dict.fromkeys(names))}: computes in float32; {why}", "dtype")
    if precision.by == "emulated":
        yield Notice(f"{_MODEL}.compute_dtype bfloat16: this processor has no instructions for it; the numbers are"
                     " rounded and multiplied in float32, which takes longer than compute_dtype float32", "dtype")
    if precision.by and config.decoder.experts is not None:
        yield Notice(f"{_MODEL}.compute_dtype bfloat16: on a CPU routed experts compute in float32", "dtype")
    if config.trains and not config.runner_wrapper.accumulate_allreduce_grads_in_fp32:
        yield Notice("runner_wrapper.accumulate_allreduce_grads_in_fp32: on a CPU gradients are float32", "dtype")


def kernel_notices(choices: tuple[KernelChoice, ...]) -> Iterator[str]:
    """Notices about kernels of experts that were asked for and do not exist on the device."""
    asked = {choice.asked for choice in choices}
    for choice in choices if "use_gmm: True" in asked else ():
        if choice.asked == "use_fused_ops_permute: True" and not choice.fused:
            yield f"use_fused_ops_permute: the reference sorts the tokens, {choice.why}"


def part_dtypes(
    settings: ModelConfig | ClassifierConfig, precision: Precision, choices: tuple[KernelChoice, ...]
) -> dict[str, PartDtype]:
    """The dtype of each part and its reason, by the names that `plan` shows."""
    always = PartDtype("float32", "always")
    if isinstance(settings, ClassifierConfig):
        return {name: always for name in ("parameters, matrix products, loss", "gradients, optimizer state")}
    asked = settings.param_init_type
    master = PartDtype("float32", f"master weights (asked: {asked})")
    fused_softmax = PartDtype("float32", "inside flash_attention_score")
    fused = any(choice.kernel == "attention" and choice.fused for choice in choices)
    products, others = precision.compute, {}
    if precision.by:
        products = PartDtype(f"{products.dtype} ({precision.by})", products.why)
        stays = PartDtype("float32", "a CPU has no bfloat16 kernels of them")
        wanted = {"routed experts": settings.experts is not None, "merge of tokens": bool(settings.mtp_depth)}
        others = {name: stays for name, is_there in wanted.items() if is_there}
    return {
        "parameters": always if asked == "float32" else master,
        "matrix products": products,
        **others,
        "norms": precision.norm,
        "softmax": fused_softmax if fused else precision.softmax,
        "rotary tables": precision.rotary,
        "residual stream, loss": always,
        "gradients, optimizer state": always,
    }
