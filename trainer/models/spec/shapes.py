"""The parameters of a model by their full names, and their shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from trainer.config.schema.model import ModelConfig
from trainer.models.spec.adapters import adapter_spec, base_dtype, layer_targets, projections
from trainer.models.spec.build import dropout_sites, model_spec
from trainer.models.spec.model import ParameterSpec
from trainer.models.spec.names import (
    EXPERT_BIAS,
    LAYERS,
    ROUTER,
    adapter_names,
    layer_prefix,
    magnitude_name,
    mask_name,
)
from trainer.models.spec.sublayers import attention_parameters, mlp_parameters, moe_parameters

if TYPE_CHECKING:
    from trainer.config.schema.root import Network
    from trainer.storage.base_dtypes import BaseDtype

Shapes = dict[str, tuple[int, ...]]


def parameter_specs(settings: Network) -> dict[str, ParameterSpec]:
    """Returns every parameter of a model by its full name, in forward order, adapters at the end."""
    if isinstance(settings, ModelConfig):
        return model_spec(settings).parameters()
    specs = {}
    for name, (outputs, inputs) in settings.linears.items():
        specs[f"{name}.weight"] = ParameterSpec(f"{name}.weight", (outputs, inputs))
        specs[f"{name}.bias"] = ParameterSpec(f"{name}.bias", (outputs,), init="zeros", role="bias")
    return specs


def all_shapes(settings: Network) -> Shapes:
    """Returns the shape of every parameter by its full name, in forward order: the model's, then the adapters'."""
    return _shapes(parameter_specs(settings).values())


def parameter_shapes(settings: Network) -> Shapes:
    """Returns the shape of every parameter except adapters by its full name, in forward order."""
    return _shapes(spec for spec in parameter_specs(settings).values() if spec.role != "adapter")


def adapter_shapes(settings: Network) -> Shapes:
    """Returns the shapes of the adapters' parameters by their full names; empty without adapters."""
    return _shapes(spec for spec in parameter_specs(settings).values() if spec.role == "adapter")


def base_dtypes(settings: Network) -> dict[str, BaseDtype]:
    """Returns how the frozen matrices under adapters are held in few bytes, by their full names.

    Matrices outside the layers, the embedding among them, have at least 16 bits, as with QLoRA and PEFT. Parameters
    that are missing here are float32.
    """
    if not isinstance(settings, ModelConfig):
        return {}
    return matrix_dtypes(settings, base_dtype(settings))


def matrix_dtypes(settings: ModelConfig, dtype: BaseDtype | None) -> dict[str, BaseDtype]:
    """Returns how the matrices of a decoder are held if those of its layers are held so; see `base_dtypes`."""
    if dtype is None:
        return {}
    dtypes: dict[str, BaseDtype] = {}
    for name, spec in parameter_specs(settings).items():
        if spec.role == "embedding" or (spec.role == "matrix" and not name.startswith(LAYERS)):
            dtypes[name] = "bfloat16"
        elif spec.role == "matrix":
            dtypes[name] = dtype
    return dtypes


def attention_shapes(settings: ModelConfig) -> Shapes:
    """Returns the shapes of a block's attention parameters, norm first, in the order of the block's arguments."""
    return _shapes(attention_parameters(settings))


def mlp_shapes(settings: ModelConfig) -> Shapes:
    """Returns the shapes of a block's feed-forward parameters, norm first, in the order of the block's arguments."""
    return _shapes(mlp_parameters(settings))


def moe_shapes(settings: ModelConfig) -> Shapes:
    """Returns the shapes of an MoE layer's parameters: norm, router, stacked experts, shared experts, their gate."""
    return _shapes(moe_parameters(settings))


def balanced_layers(settings: ModelConfig, frozen: Collection[str]) -> list[int]:
    """Returns the layers whose expert bias is updated: their routers and biases are trainable."""
    moe = settings.experts
    if moe is None or not (moe.balance_via_topk_bias and moe.topk_bias_update_rate):
        return []
    names = (ROUTER, EXPERT_BIAS)
    return [layer for layer in settings.moe_layers if not any(layer_prefix(layer) + name in frozen for name in names)]


def adapted_projections(settings: ModelConfig) -> tuple[str, ...]:
    """Returns the projections that have an adapter in some layer, in forward order."""
    if adapter_spec(settings) is None:
        return ()
    adapted = {name for layer in settings.layers for name in layer_targets(settings, layer)}
    return tuple(name for name in projections(settings) if name in adapted)


def dropped_projections(settings: ModelConfig) -> tuple[str, ...]:
    """Returns the projections whose adapters have dropout, in forward order."""
    adapter = adapter_spec(settings)
    if adapter is None or not adapter.dropout:
        return ()
    return adapted_projections(settings)


def block_names(settings: ModelConfig) -> list[str]:
    """Returns the names of a block's arguments in order: weights, adapters, then the dropout masks of adapters."""
    return [*block_weights(settings), *(mask_name(name) for name in dropped_projections(settings))]


def block_weights(settings: ModelConfig) -> list[str]:
    """Returns the names of a block's parameters in the order of its arguments: weights, then adapters."""
    adapters = [matrix for name in adapted_projections(settings) for matrix in adapter_names(name)]
    common = adapter_spec(settings)
    if common is not None and common.has_magnitude:
        adapters += map(magnitude_name, adapted_projections(settings))
    return [*attention_shapes(settings), *mlp_shapes(settings), *adapters]


def mask_sites(settings: ModelConfig, layer: int) -> list[int | None]:
    """Returns the numbers of a layer's dropout masks in the order of a block's arguments; None where the rate is 0.

    The masks are those of the attention probabilities, of the outputs of both sublayers, and of adapters.
    """
    sites = dropout_sites(settings, layer)
    rates = {
        "probabilities": settings.attention_dropout,
        "attention_output": settings.hidden_dropout,
        "mlp_output": settings.hidden_dropout,
    }
    dropped = {name: number for name, number in sites.items() if rates.get(name, 1)}
    return [dropped.get(name) for name in (*rates, *dropped_projections(settings))]


def _shapes(parameters: Iterable[ParameterSpec]) -> Shapes:
    return {spec.name: spec.shape for spec in parameters}
