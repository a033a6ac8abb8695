"""Names and shapes of a decoder's parameters. Pure Python: `plan` counts weights and memory with it.

The names are Hugging Face's for Llama, Qwen2 and Qwen3, one to one, and so is the layout [out, in] of every matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def attention_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one block's attention, norm first, in the order in which the block takes them."""
    hidden, queries = settings.hidden_size, settings.num_heads * settings.head_size
    keys = settings.kv_heads * settings.head_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes |= _linear(f"self_attn.{name}", out, hidden, settings.qkv_has_bias)
    shapes |= _linear("self_attn.o_proj", hidden, queries, settings.attn_proj_has_bias)
    if settings.use_qk_norm:
        shapes |= {f"self_attn.{name}.weight": (settings.head_size,) for name in ("q_norm", "k_norm")}
    return shapes


def mlp_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one block's feed-forward layer, norm first, in the order in which the block takes them."""
    hidden, width, bias = settings.hidden_size, settings.ffn_size, settings.mlp_has_bias
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    for name in ("gate_proj", "up_proj"):
        shapes |= _linear(f"mlp.{name}", width, hidden, bias)
    return shapes | _linear("mlp.down_proj", hidden, width, bias)


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def parameter_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the decoder by its full name, in forward order."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (settings.vocab_size, settings.hidden_size)}
    block = attention_shapes(settings) | mlp_shapes(settings)
    for layer in range(settings.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in block.items()}
    shapes[FINAL_NORM] = (settings.hidden_size,)
    if not settings.tie_word_embeddings:
        shapes[HEAD] = (settings.vocab_size, settings.hidden_size)
    return shapes


def _linear(name: str, out: int, inp: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight = {f"{name}.weight": (out, inp)}
    return weight | {f"{name}.bias": (out,)} if bias else weight
