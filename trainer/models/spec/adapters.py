"""Low-rank adapters: which matrices of a model have one, and the parameters of an adapter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.models.spec.model import AdapterSpec, ParameterSpec, Sharding
from trainer.models.spec.names import (
    EMBEDDING,
    adapter_names,
    layer_prefix,
    magnitude_name,
    megatron_module,
    sublayer_of,
)
from trainer.models.spec.sublayers import attention_parameters, latent_spec, mlp_parameters

if TYPE_CHECKING:
    import numpy as np

    from trainer.config.schema.adapter import ModuleNames
    from trainer.config.schema.model import ModelConfig
    from trainer.storage.base_dtypes import BaseDtype

SECTION = "model.model_config.pet_config"
TARGETS_KEY = f"{SECTION}.target_modules"

_GRAPH_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.c_fc": "output.mapping",
    "mlp.c_proj": "output.projection",
}
_VOCABULARY_MODULES = {
    "model.embed_tokens": ("tok_embeddings", "embedding.word_embeddings"),
    "lm_head": ("lm_head", "output_layer"),
}
"""The embedding and the head -> their names in MindSpore Transformers' graph mode and in its PyNative mode."""
_LATENT_QUERY = "self_attention.linear_q_proj"
"""MindSpore Transformers' name of q_proj in multi-head latent attention."""

Matrix = TypeVar("Matrix", bound=Any)  # an array or a tensor


def adapter_spec(settings: ModelConfig) -> AdapterSpec | None:
    """Returns the adapter of a matrix that no pattern of ranks and alphas matches; None where the model has none.

    Dropout and the kind of initial values are those of all adapters.
    """
    pet = settings.pet_config
    if pet is None:
        return None
    return AdapterSpec(pet.lora_rank, pet.scale, pet.lora_dropout, pet.lora_a_std, pet.lora_b_std, pet.use_dora)


def layer_adapters(settings: ModelConfig, layer: int) -> dict[str, AdapterSpec]:
    """Returns the adapters of a layer by the names of their matrices, in forward order."""
    pet = settings.pet_config
    common = adapter_spec(settings)
    if pet is None or common is None:
        return {}
    adapters = {}
    for name in layer_targets(settings, layer):
        full = layer_prefix(layer) + name
        rank = pet.rank_of(full)
        adapters[name] = common._replace(rank=rank, scale=pet.alpha_of(full) / pet.divisor(rank))
    return adapters


def adapted_matrices(settings: ModelConfig) -> Iterator[tuple[str, AdapterSpec]]:
    """Yields the full name, without its last part, of every adapted matrix, and its adapter: of layers first."""
    for layer in settings.layers:
        for name, adapter in layer_adapters(settings, layer).items():
            yield layer_prefix(layer) + name, adapter
    yield from vocabulary_adapters(settings).items()


def vocabulary_modules() -> dict[str, ModuleNames]:
    """Returns all full names of the embedding and of the head, by those that they have here."""
    from trainer.config.schema.adapter import ModuleNames  # its package imports this module

    return {
        name: ModuleNames((name, f"model.{graph}"), (f"model.{pynative}", pynative))
        for name, (graph, pynative) in _VOCABULARY_MODULES.items()
    }


def vocabulary_adapters(settings: ModelConfig) -> dict[str, AdapterSpec]:
    """Returns the adapters of embedding and head by the full names of these, without the last part.

    target_modules has to name them: an expression for any name, such as `.*`, is one for the matrices of layers.
    """
    pet = settings.pet_config
    common = adapter_spec(settings)
    if pet is None or common is None:
        return {}
    adapters = {}
    for name, names in vocabulary_modules().items():
        words = [full.rpartition(".")[2] for full in (*names.others, *names.pynative)]
        if any(word in pet.target_modules for word in words) and pet.adapts(names):
            rank = pet.rank_of(name)
            adapters[name] = common._replace(rank=rank, scale=pet.alpha_of(name) / pet.divisor(rank))
    return adapters


def vocabulary_adapter_parameters(
    name: str, adapter: AdapterSpec, vocabulary: int, width: int
) -> Iterator[ParameterSpec]:
    """Yields A and B of the adapter of the embedding or of the head.

    The embedding's adds scale B A[:, token] to the row of a token. As in PEFT, its A starts with zeros, and its B with
    normal values of standard deviation 1.
    """
    matrix = ParameterSpec(f"{name}.weight", (vocabulary, width))
    if matrix.name != EMBEDDING:
        yield from adapter_parameters(matrix, name, adapter)
        return
    a, b = adapter_names(name)
    yield ParameterSpec(a, (adapter.rank, vocabulary), "replicated", "zeros", "adapter")
    yield ParameterSpec(b, (width, adapter.rank), "replicated", "lora_embedding_b", "adapter")


def adapter_factors(weights: Mapping[str, Matrix], name: str) -> tuple[Matrix, Matrix]:
    """Returns A and B of an adapter, by the full name of its matrix, so that B A has the shape of the matrix."""
    a, b = (weights[factor] for factor in adapter_names(name))
    if f"{name}.weight" == EMBEDDING:
        return b.T, a.T
    return a, b


def factors_text(settings: ModelConfig) -> str:
    """Returns the factors on the outputs of adapters as text: one, or the least and the largest."""
    return _range_text(adapter.scale for _, adapter in adapted_matrices(settings))


def ranks_text(settings: ModelConfig) -> str:
    """Returns the ranks of adapters as text: one, or the least and the largest."""
    return _range_text(adapter.rank for _, adapter in adapted_matrices(settings))


def _range_text(numbers: Iterable[float]) -> str:
    ordered = sorted(numbers)
    ends = dict.fromkeys((f"{ordered[0]:g}", f"{ordered[-1]:g}"))
    return " to ".join(ends)


def scales_by_rank(settings: ModelConfig, name: str) -> dict[int, float]:
    """Returns the factors on the outputs of a matrix's adapters, by their ranks.

    Cells know of a layer the shapes of its weights alone. Raises a ValueError if layers have adapters of one rank with
    different factors.
    """
    scales: dict[int, float] = {}
    for layer in settings.layers:
        adapter = layer_adapters(settings, layer).get(name)
        if adapter is not None and scales.setdefault(adapter.rank, adapter.scale) != adapter.scale:
            raise ValueError(f"{name} has adapters of rank {adapter.rank} with different factors")
    return scales


def initial_method(settings: ModelConfig) -> str:
    """Returns where the initial values of adapters come from: `true`, pissa, pissa_niter_N or olora."""
    if settings.pet_config is None:
        return "true"
    return settings.pet_config.initial


def changes_base(settings: ModelConfig) -> bool:
    """Returns whether the adapters start with a part of the base model's weights, which is taken out of these."""
    return settings.pet_config is not None and settings.pet_config.changes_base


def base_dtype(settings: ModelConfig) -> BaseDtype | None:
    """Returns how the matrices of layers under adapters are held in few bytes; None where they are float32."""
    if settings.pet_config is None or settings.pet_config.base_dtype == "float32":
        return None
    return settings.pet_config.base_dtype


def saved_settings(settings: ModelConfig) -> ModelConfig:
    """Returns the settings with the adapters as they are saved."""
    if settings.pet_config is None:
        return settings
    return settings.model_copy(update={"pet_config": settings.pet_config.as_saved})


def without_adapters(settings: ModelConfig) -> ModelConfig:
    """Returns the settings of the model whose matrices have no adapters."""
    return settings.model_copy(update={"pet_config": None})


def projections(settings: ModelConfig) -> list[str]:
    """Returns the matrices of a layer that can have an adapter, in forward order, by their names in the layer."""
    return list(matrix_shapes(settings))


def matrix_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of these matrices by their names in the layer."""
    parameters = [*attention_parameters(settings), *mlp_parameters(settings)]
    return {spec.name.removesuffix(".weight"): spec.shape for spec in parameters if spec.role == "matrix"}


def adaptable_matrices(settings: ModelConfig, layer: int) -> dict[str, ModuleNames]:
    """Returns the full names of the matrices of a layer that can have an adapter, by their names in the layer.

    Those of experts cannot.
    """
    names = projections(settings)
    if settings.is_moe_layer(layer):
        names = [name for name in names if sublayer_of(name) == "attention"]
    return {name: module_names(settings, layer, name) for name in names}


def module_names(settings: ModelConfig, layer: int, name: str) -> ModuleNames:
    """Returns the full names of the matrix `name` of a layer."""
    from trainer.config.schema.adapter import ModuleNames  # its package imports this module

    graph = _GRAPH_NAMES[name]
    if name == "self_attn.q_proj" and latent_spec(settings) is not None:
        graph = _LATENT_QUERY
    module = pynative_layer(settings, layer)
    prefix = layer_prefix(layer)
    others = [f"{prefix}{name}", f"{prefix}{graph}"]
    if graph.startswith("self_attention."):
        others.append(f"{module}{graph}")
    pynative = f"{module}{megatron_module(name)}"
    return ModuleNames(tuple(others), (f"model.{pynative}", pynative))


def pynative_layer(settings: ModelConfig, layer: int) -> str:
    """Returns the prefix of the modules of a layer in MindSpore Transformers' PyNative mode, in its `GPTModel`."""
    if layer < settings.num_layers:
        return f"decoder.layers.{layer}."
    return f"mtp.layers.{layer - settings.num_layers}.transformer_layer."


def layer_targets(settings: ModelConfig, layer: int) -> tuple[str, ...]:
    """Returns the projections of a layer, which may be that of an MTP module, that have an adapter, in forward order.

    Raises a PatternError for an invalid expression.
    """
    adapters = settings.pet_config
    if adapters is None:
        return ()
    return tuple(name for name, names in adaptable_matrices(settings, layer).items() if adapters.adapts(names))


def target_pattern(targets: Mapping[int, Collection[str]]) -> str:
    """Returns the `target_modules` that selects these matrices, by layer with their names in it."""
    layers: dict[str, list[str]] = {}
    for layer, names in targets.items():
        if names:
            layers.setdefault(_one_of([name.rpartition(".")[2] for name in names]), []).append(str(layer))
    return "|".join(rf"model\.layers\.{_one_of(numbers)}\..*\.{names}" for names, numbers in layers.items())


def _one_of(texts: Sequence[str]) -> str:
    """Returns a regular expression for one of several texts."""
    if len(texts) == 1:
        return texts[0]
    return f"({'|'.join(texts)})"


def merged_matrix(weight_OI: Matrix, a_RI: Matrix, b_OR: Matrix, scale: float) -> Matrix:
    """Returns a matrix merged with its adapter, W + scale B A, for arrays or tensors."""
    return weight_OI + (b_OR * scale) @ a_RI


def with_magnitudes(matrix_OI: np.ndarray, magnitude_O: np.ndarray) -> np.ndarray:
    """Returns a matrix with rows of these lengths."""
    import numpy as np  # a plan without data does without

    return matrix_OI * (magnitude_O / np.linalg.norm(matrix_OI, axis=1))[:, None]


def adapter_parameters(matrix: ParameterSpec, name: str, adapter: AdapterSpec) -> Iterator[ParameterSpec]:
    """Yields A and B of the adapter of a matrix, and with DoRA its magnitudes.

    If ranks shard the outputs or inputs of the matrix, they shard one of the two likewise, and each rank computes a
    part of the gradient of the other one.
    """
    outputs, inputs = matrix.shape
    down, up = adapter_names(name)
    sharding_of_down: Sharding = matrix.sharding
    sharding_of_up: Sharding = matrix.sharding
    if matrix.sharding in ("column", "kv_column"):
        sharding_of_down = "partial"
    elif matrix.sharding == "row":
        sharding_of_up = "partial"
    yield ParameterSpec(down, (adapter.rank, inputs), sharding_of_down, "lora_a", "adapter")
    yield ParameterSpec(up, (outputs, adapter.rank), sharding_of_up, "lora_b", "adapter")
    if adapter.has_magnitude:
        yield ParameterSpec(magnitude_name(name), (outputs,), "replicated", "lora_magnitude", "adapter")
