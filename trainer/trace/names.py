"""The names that a trace gives to what the layers of a model compute: Hugging Face's names of modules."""

from __future__ import annotations

from trainer.models.spec.model import LayerSpec, MlpSpec, ModelSpec
from trainer.models.spec.names import POST_ATTENTION_NORM, POST_MLP_NORM, layer_prefix

EMBEDDED = "model.embed_tokens"
ROUTING = "mlp.gate"


def layer_name(layer: int) -> str:
    """Returns the name of a layer itself."""
    return layer_prefix(layer).removesuffix(".")


def stream_names(spec: LayerSpec, layer: int, part: str) -> list[str]:
    """Returns the names of the modules whose output is seen behind a part: of a sublayer, of the layer, or both."""
    parameters = {each.name for each in spec.parameters}
    prefix = layer_prefix(layer)
    if part == "attention":
        if POST_ATTENTION_NORM in parameters:
            return [prefix + POST_ATTENTION_NORM.removesuffix(".weight")]
        return [f"{prefix}self_attn"]
    names = [layer_name(layer)]
    if part != "block":
        name = "mlp"
        if POST_MLP_NORM in parameters:
            name = POST_MLP_NORM.removesuffix(".weight")
        names.insert(0, prefix + name)
    return names


def saved_tensors(spec: LayerSpec) -> dict[str, tuple[str, int]]:
    """Returns the arrays that native layers save and a trace has: name within the layer, and unsharded columns."""
    tensors = {"heads": ("self_attn.o_proj.input", spec.attention.heads * spec.attention.value_size)}
    if isinstance(spec.mlp, MlpSpec):
        *inner, _ = spec.mlp.matrices
        keys = ("gate", "up")[-len(inner) :]
        tensors |= {key: (name, spec.mlp.width) for key, name in zip(keys, inner, strict=True)}
    return tensors


def module_names(spec: ModelSpec) -> list[str]:
    """Returns the names of all activations and choices; on an Ascend those of `saved_tensors` are missing."""
    names = [EMBEDDED]
    for number, layer in enumerate(spec.layers):
        prefix = layer_prefix(number)
        names += stream_names(layer, number, "attention")
        names += stream_names(layer, number, "mlp")
        names += (prefix + name for name, _ in saved_tensors(layer).values())
        if layer.is_moe:
            names.append(prefix + ROUTING)
    return names
