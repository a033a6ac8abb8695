"""Makes the description of a model from its settings, `model_config`.

Other modules read the description instead of the keys. Building it takes about a millisecond for 61 layers, so callers
build it once and not for every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.models.spec.adapters import (
    adapter_parameters,
    adapter_spec,
    layer_adapters,
    layer_targets,
    projections,
    vocabulary_adapter_parameters,
    vocabulary_adapters,
)
from trainer.models.spec.model import AdapterSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, ParameterSpec
from trainer.models.spec.sublayers import (
    attention_parameters,
    attention_spec,
    mlp_parameters,
    mlp_spec,
    moe_parameters,
    moe_spec,
    mtp_parameters,
    norm_spec,
)

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

_DROPOUT_SITES = ("probabilities", "attention_output", "mlp_output")


def model_spec(settings: ModelConfig) -> ModelSpec:
    """Returns the description of a decoder. Equal layers are one object."""
    kinds: dict[tuple[object, ...], LayerSpec] = {}
    layers = []
    for layer in settings.layers:
        is_mtp = layer >= settings.num_layers
        is_moe = settings.is_moe_layer(layer)
        adapters = layer_adapters(settings, layer)
        kind = (is_mtp, is_moe, settings.has_window(layer), settings.has_rotary(layer), *adapters.items())
        if kind not in kinds:
            kinds[kind] = _layer_spec(settings, layer, adapters)
        layers.append(kinds[kind])
    outer = vocabulary_adapters(settings)
    sizes = settings.vocab_size, settings.embedding_width
    return ModelSpec(
        vocabulary=settings.vocab_size,
        hidden=settings.hidden_size,
        embedding=settings.embedding_width,
        norm=norm_spec(settings),
        layers=tuple(layers),
        mtp_modules=settings.mtp_depth,
        tied=settings.tie_word_embeddings and settings.num_labels is None,
        has_score=settings.num_labels is not None,
        maps_embedding=settings.maps_embedding,
        attention_group=settings.layers_group,
        adapters=outer,
        adapter_parameters=tuple(
            parameter
            for name, adapter in outer.items()
            for parameter in vocabulary_adapter_parameters(name, adapter, *sizes)
        ),
    )


NOISE_SITE = 1 << 32
"""The number of the noise on the embeddings among the random streams of dropout masks; no mask has it."""


def dropout_sites(settings: ModelConfig, layer: int) -> dict[str, int]:
    """Returns the numbers of a layer's dropout masks. Each names a random stream and does not depend on the rates.

    The keys are "probabilities", "attention_output", "mlp_output", then the names of the layer's adapted projections,
    for example "self_attn.q_proj". The numbers of adapters follow those of all layers; every projection of every layer
    has one, so that a mask does not depend on which projections are adapted.
    """
    first = layer * len(_DROPOUT_SITES)
    sites = {name: first + number for number, name in enumerate(_DROPOUT_SITES)}
    if adapter_spec(settings) is None:
        return sites
    names = projections(settings)
    first = len(settings.layers) * len(_DROPOUT_SITES) + layer * len(names)
    return sites | {name: first + names.index(name) for name in layer_targets(settings, layer)}


def _layer_spec(settings: ModelConfig, layer: int, adapters: dict[str, AdapterSpec]) -> LayerSpec:
    """Describes a layer with these adapters, by the names of their matrices."""
    parameters: list[ParameterSpec] = []
    if layer >= settings.num_layers:
        parameters += mtp_parameters(settings.hidden_size)
    parameters += attention_parameters(settings)
    mlp: MlpSpec | MoeSpec
    if settings.is_moe_layer(layer):
        mlp = moe_spec(settings)
        parameters += moe_parameters(settings)
    else:
        mlp = mlp_spec(settings, adapters)
        parameters += mlp_parameters(settings)
    matrices = {parameter.name: parameter for parameter in parameters}
    for name, target in adapters.items():
        parameters += adapter_parameters(matrices[f"{name}.weight"], name, target)
    return LayerSpec(attention_spec(settings, layer, adapters), mlp, tuple(parameters))
