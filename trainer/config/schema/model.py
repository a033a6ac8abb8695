"""The decoder: YAML ``model.model_config``."""

import math
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.schema.adapter import PetConfig
from trainer.config.schema.fields import (
    BATCH,
    LAYERS,
    LENGTH,
    RANKS,
    REQUIRED,
    TOKEN_ID,
    VOCABULARY,
    WIDTH,
    Beside,
    Layer,
    Section,
    TokenId,
    one_number_of,
    setting,
)
from trainer.config.schema.moe import MoEConfig

Dtype = Literal["float32", "float16", "bfloat16"]
Probability = Annotated[float, Field(ge=0, lt=1)]
Divisor = Annotated[float, Field(gt=0)]
WindowSide = Annotated[int, Field(ge=-1, le=LENGTH)]
Activation = Literal["silu", "gelu_pytorch_tanh", "relu2"]


class RopeScaling(Section):
    """Stretches rotary positions beyond the trained length (YAML ``model_config.rope_scaling``)."""

    rope_type: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = setting(
        "linear", "Kind of scaling; default means none. dynamic multiplies the base by a power of alpha, which the"
        " length of a sequence does not change (Hunyuan).", aliases="type")
    factor: float = setting(
        1.0, "How many times longer the context gets. Default of longrope: max_position_embeddings /"
        " original_max_position_embeddings.", ge=1)
    low_freq_factor: float = setting(1.0, "llama3: frequencies below are scaled wholly.", gt=0)
    high_freq_factor: float = setting(4.0, "llama3: frequencies above are kept.", gt=0)
    original_max_position_embeddings: int | None = setting(
        None, "Trained length in tokens. Default null: max_position_embeddings.", ge=1, le=LENGTH)
    attention_factor: float | None = setting(
        None, "yarn, longrope: factor on cosine and sine. Default null: from the scaling factor.", gt=0)
    short_factor: list[Divisor] | None = setting(
        None, "longrope: divisors of the frequencies up to a seq_length of original_max_position_embeddings.")
    long_factor: list[Divisor] | None = setting(None, "longrope: divisors of the frequencies for a longer seq_length.")
    beta_fast: float = setting(32.0, "yarn: rotations above which a frequency is kept.", gt=0)
    beta_slow: float = setting(1.0, "yarn: rotations below which a frequency is scaled.", gt=0)
    truncate: bool = setting(True, "yarn: the blend between kept and scaled frequencies begins and ends at whole ones.")
    alpha: float | None = setting(
        None, "dynamic: the base is multiplied by alpha^(d / (d - 2)), with d rotated numbers of a head.", gt=0, le=1e9)
    mscale: float | None = setting(None, "yarn: numerator of the attention factor.", ge=0)
    mscale_all_dim: float | None = setting(None, "yarn: denominator of the attention factor.", ge=0)

    def mscale_of(self, weight: float) -> float:
        """Returns yarn's factor on cosine and sine: 0.1 weight ln(factor) + 1 (Peng et al. 2023, equation 22)."""
        if self.factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(self.factor) + 1.0


_NO_LAYER_NORM = Beside("centers_norms", False, "not yet supported with normalization LayerNorm", "use another model")
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Sizes that only multi-head latent attention has."""


class InitRule(Section):
    """Initial values of the weights with some names (YAML ``model_config.param_init_std_rules``)."""

    target: str = setting(
        REQUIRED, "Regular expression that matches the beginning of the names, here or in MindSpore Transformers:"
        " decoder.layers.0.self_attention.linear_qkv.weight.")
    init_method_std: float = setting(REQUIRED, "Standard deviation of the normal values, whose mean is 0.", ge=0)


class ModelConfig(Section):
    """The decoder (YAML ``model.model_config``, or ``model_config`` at the top level)."""

    model_type: str | None = setting(
        None, "Hugging Face's name of the family; sets model.arch.type if that is left out.")
    architectures: list[str] | str | None = setting(
        None, "Hugging Face's class; sets model.arch.type if that is left out.")
    net_name: str | None = setting(
        None, "TelechatForCausalLM: a name that begins with telechat3 makes it a TeleChat3. Default null: a TeleChat2.")
    batch_size: int = setting(1, "predict: prompts generated at once.", ge=1, le=BATCH)
    seq_length: int = setting(2048, "Tokens in a sequence.", ge=1, le=LENGTH, aliases="max_seq_len")
    num_layers: int = setting(32, "Decoder blocks.", ge=1, le=LAYERS, aliases="num_hidden_layers n_layers n_layer")
    hidden_size: int = setting(4096, "Width of the residual stream.", ge=1, le=WIDTH, aliases="dim")
    num_heads: int = setting(32, "Query heads.", ge=1, le=RANKS, aliases="num_attention_heads n_heads n_head")
    n_kv_heads: int | None = setting(
        None, "Key and value heads. Default null: num_heads.", ge=1, le=RANKS,
        aliases="num_key_value_heads num_query_groups multi_query_group_num")
    multi_query_attention: bool | None = setting(
        None, "ChatGLM: false takes num_heads instead of multi_query_group_num. Default null: the number given.")
    head_dim: int | None = setting(
        None, "Width of a head. Default null: hidden_size / num_heads.", ge=1, le=WIDTH, aliases="kv_channels")
    multi_latent_attention: bool = setting(
        False, "Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads are projected from"
        " one vector of kv_lora_rank numbers per token. n_kv_heads and head_dim then have no effect.",
        beside=_NO_LAYER_NORM)
    q_lora_rank: int | None = setting(
        None, "multi_latent_attention: width of the latent vector of queries. Default null: queries are projected from"
        " the residual stream, by q_proj.", ge=1, le=WIDTH)
    kv_lora_rank: int = setting(
        512, "multi_latent_attention: width of the latent vector of keys and values, which the KV cache stores.",
        ge=1, le=WIDTH)
    qk_nope_head_dim: int = setting(
        128, "multi_latent_attention: width of the part of a query or key without positions. A file with this key may"
        " also have transformers' qk_head_dim, the total width.", ge=1, le=WIDTH, aliases="qk_head_dim")
    qk_rope_head_dim: int = setting(
        64, "multi_latent_attention: width of the part with rotary positions, of which all heads share one key.",
        ge=2, le=WIDTH, aliases="qk_pos_emb_head_dim")
    v_head_dim: int = setting(128, "multi_latent_attention: width of a head's values.", ge=1, le=WIDTH)
    intermediate_size: int | None = setting(
        None, "Width of the feed-forward layer. Default null: 2/3 of 4 x hidden_size, rounded up to multiple_of.",
        ge=1, le=WIDTH, aliases="ffn_hidden_size")
    embedding_size: int | None = setting(
        None, "Width of embedding and head, which two matrices map to hidden_size and back (TeleChat3-1.8B). Default"
        " null, and 1: hidden_size, without such matrices.", ge=1, le=WIDTH)
    layers_group: int = setting(
        1, "Number of consecutive layers that share attention weights (TeleChat3-1.8B).", ge=1, le=LAYERS,
        beside=Beside("pet_config", 1, "not yet supported with adapters",
                      "write 1, which is a model with more weights"))
    multiple_of: int = setting(256, "The default of intermediate_size is a multiple of it.", ge=1, le=WIDTH)
    ffn_dim_multiplier: float | None = setting(
        None, "Factor on the default of intermediate_size before rounding. Default null: 1.", gt=0)
    vocab_size: int = setting(32000, "Tokens of the vocabulary.", ge=2, le=VOCABULARY, aliases="padded_vocab_size")
    max_position_embeddings: int | None = setting(
        None, "Longest context in tokens. Default null: seq_length.", ge=1, le=LENGTH, aliases="max_position_embedding")
    sliding_window: int | None = setting(
        None, "Size of the sliding window in tokens, including the current one. Default null, and 0: full attention.",
        ge=0, le=LENGTH)
    use_sliding_window: bool | None = setting(
        None, "false: no layer has a sliding window. true: layers from max_window_layers on have one. Default null:"
        " those of layer_types, or all.")
    max_window_layers: int | None = setting(
        None, "use_sliding_window: number of leading layers with full attention. Default null: none.",
        ge=0, le=LAYERS)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = setting(
        None, "Attention of each layer: full_attention or sliding_attention. Default null: the other keys decide.")
    sliding_window_pattern: int | None = setting(
        None, "Every Nth layer has no sliding window, where layer_types is left out (Cohere2, Gemma-3). Default null:"
        " as in the class.", ge=1, le=LAYERS, aliases="_sliding_window_pattern")
    window_size: list[WindowSide] | None = setting(
        None, "MindSpore Transformers' sliding window: the tokens before and after the current one that attention sees;"
        " [W, 0] is sliding_window W + 1, and -1 is no limit. Default null: sliding_window decides.",
        fix="write [W, 0] for a window of W tokens before the current one")
    window_attn_skip_freq: Layer | list[Layer] | None = setting(
        None, "Layers without the window of window_size: every Nth for an integer N; a list has 1 (window) or 0 for"
        " each layer. Layer 0 is like layer 1, as there. Default null: none, or layer_types.")
    position_embedding_type: Literal["rope", "yarn", "llama3", "none"] = setting(
        "rope", "Kind of positions: rotary, whose stretching rope_scaling describes; none: there are none.")
    nope_layer_interval: int | None = setting(
        None, "Every Nth layer has no rotary positions (NoPE). Default null: nope_layers decides.", ge=1, le=LAYERS,
        aliases="no_rope_layer_interval")
    nope_layers: list[Layer] | None = setting(
        None, "Layers without rotary positions, counted from 0. Default null: none.")
    no_rope_layers: list[Annotated[Literal[0, 1], one_number_of(0, 1)]] | None = setting(
        None, "SmolLM3's nope_layers: for each layer 1, or 0 if it has no rotary positions. Default null: nope_layers"
        " decides.")
    nope_without_window: bool = setting(
        False, "Layers without a sliding window have no rotary positions (Cohere2), unless nope_layers says which.",
        beside=Beside("multi_latent_attention", False, "not yet supported with multi_latent_attention"))
    softmax_scale: float | None = setting(
        None, "Factor on the scores of attention. Default null: 1 / sqrt(width of a head), with yarn and"
        " multi_latent_attention times the square of its mscale.", gt=0, aliases="attention_multiplier")
    query_pre_attn_scalar: float | None = setting(
        None, "Gemma's softmax_scale: the scale is 1 / sqrt of it. Default null: softmax_scale decides.", gt=0)
    attention_sinks: bool = setting(
        False, "A learned score of each head that competes with those of the keys and has no value (gpt-oss).",
        beside=Beside("multi_latent_attention", False, "not yet supported with multi_latent_attention"),
        explicit_only=(True,))
    attn_logit_softcapping: float | None = setting(
        None, "Softcapping of the attention's scores s: cap * tanh(s / cap) (Gemma-2). Default null: none.", gt=0,
        beside=Beside("multi_latent_attention", None, "not yet supported with multi_latent_attention"))
    embedding_multiplier: float = setting(1.0, "Factor on the embeddings (Granite).", gt=0)
    residual_multiplier: float = setting(
        1.0, "Factor on the output of each sublayer, before it is added to the residual stream (Granite).", gt=0,
        beside=Beside("multi_latent_attention", 1.0, "not yet supported with multi_latent_attention"))
    logits_scaling: float = setting(1.0, "Divisor of the logits (Granite).", gt=0)
    logit_scale: float = setting(1.0, "Factor on the logits (Cohere).", gt=0)
    final_logit_softcapping: float | None = setting(
        None, "Softcapping of the logits x: cap * tanh(x / cap) (Gemma-2). Default null: none.", gt=0)
    normalization: Literal["RMSNorm", "FusedRMSNorm", "LayerNorm"] = setting(
        "RMSNorm", "Kind of the norms: RMSNorm, under both of its names, or LayerNorm, which subtracts the mean of a"
        " row first.", fix="use a model with one of these", explicit_only=("LayerNorm",))
    norm_has_bias: bool = setting(True, "normalization LayerNorm: norms have a bias. false: none (Cohere).")
    rms_norm_eps: float = setting(
        1e-6, "Added to the mean square in a norm.", gt=0,
        aliases="layernorm_epsilon layer_norm_epsilon layer_norm_eps norm_epsilon norm_eps")
    layernorm_zero_centered_gamma: bool = setting(
        False, "Norms multiply by 1 + weight (Gemma).", aliases="zero_centered_gamma",
        beside=(
            Beside("experts", False, "not yet supported with experts"),
            Beside("multi_latent_attention", False, "not yet supported with multi_latent_attention"),
            Beside("mtp_depth", False, "not yet supported with multi-token prediction modules"),
        ))
    rope_theta: float = setting(
        10000.0, "Base of the rotary frequencies.", gt=0, aliases="theta rotary_base rotary_emb_base")
    window_rope_theta: float | None = setting(
        None, "Base of the rotary frequencies in layers with a sliding window, which rope_scaling then leaves as they"
        " are (OLMo-3). Default null: as in all other layers.", gt=0)
    rope_ratio: float = setting(1.0, "Factor on rope_theta (ChatGLM).", gt=0)
    rope_scaling: RopeScaling | None = setting(None, "Stretching of the positions. Default null: none.")
    qkv_has_bias: bool = setting(
        False, "Biases on query, key and value (Qwen2). As attention_bias it means what it means to Hugging Face's"
        " class: for Llama, Qwen3 and Qwen3-MoE attn_proj_has_bias as well.",
        aliases="attention_bias add_qkv_bias qkv_bias use_qkv_bias")
    attn_proj_has_bias: bool = setting(
        False, "Bias on the attention's output.", aliases="out_proj_has_bias attention_out_bias")
    mlp_has_bias: bool = setting(
        False, "Biases in the feed-forward layer. As add_bias_linear it means every matrix of a layer.",
        aliases="mlp_bias add_bias_linear",
        beside=Beside("experts", False, "not yet supported with experts, which have a bias on their output at most",
                      "leave it out, or write mlp_down_has_bias"))
    mlp_down_has_bias: bool | None = setting(
        None, "Bias on the output of the feed-forward layer and of each expert. Default null: mlp_has_bias.")
    parallel_attn: bool = setting(
        False, "Attention and feed-forward layer side by side: both take the norm of a layer's input, and both of their"
        " outputs are added to this input (Cohere).",
        beside=Beside("norms_every_input", False, "not yet supported with experts or multi_latent_attention",
                      "use another model"))
    use_bias: bool | None = setting(
        None, "Biases on every matrix of a layer (Starcoder2, ERNIE 4.5). Default null: qkv_has_bias,"
        " attn_proj_has_bias and mlp_has_bias say which.")
    use_qk_norm: bool = setting(
        False, "RMSNorm on query and key of each head (Qwen3). With multi_latent_attention on its latent vectors, and"
        " true by default.", aliases="qk_layernorm qk_norm", beside=_NO_LAYER_NORM)
    qk_norm_all_heads: bool = setting(
        False, "use_qk_norm: one RMSNorm over all heads of the query, and one over those of the key (OLMo), instead of"
        " one over each head.",
        beside=Beside("multi_latent_attention", False, "multi_latent_attention has norms on its latent vectors"))
    qk_norm_after_rotary: bool = setting(
        False, "use_qk_norm: norms after the rotary embedding (Hunyuan), not before.",
        beside=Beside("multi_latent_attention", False, "multi_latent_attention has norms on its latent vectors"))
    input_norms: bool = setting(
        True, "RMSNorm on the inputs of attention and feed-forward layer. false: none (OLMo-2), only those on their"
        " outputs, which post_self_attn_layernorm and post_mlp_layernorm describe.",
        beside=Beside("norms_every_input", True, "not yet supported with experts or multi_latent_attention"))
    post_self_attn_layernorm: bool = setting(
        False, "RMSNorm on the output of attention (GLM-4).",
        beside=(Beside("multi_latent_attention", False, "not yet supported with multi_latent_attention"),
                _NO_LAYER_NORM))
    post_mlp_layernorm: bool = setting(
        False, "RMSNorm on the output of the feed-forward layer (GLM-4).",
        beside=(Beside("experts", False, "not yet supported with experts"), _NO_LAYER_NORM))
    tie_word_embeddings: bool = setting(False, "One matrix for embedding and head.")
    num_labels: Annotated[Literal[1], one_number_of(1)] | None = setting(
        None, "1: a reward model, whose head gives a score instead of logits; loss.type reward sets it. Default null: a"
        " language model.")
    untie_embeddings_and_output_weights: bool | None = setting(
        None, "The opposite of tie_word_embeddings, Megatron's name. Default null: tie_word_embeddings decides.")
    hidden_dropout: Probability = setting(
        0.0, "Dropout on each sub-layer's output.",
        aliases="hidden_dropout_rate hidden_dropout_prob resid_pdrop residual_dropout")
    attention_dropout: Probability = setting(
        0.0, "Dropout on attention weights.", aliases="attention_dropout_rate attention_dropout_prob attn_dropout")
    neftune_noise_alpha: float | None = setting(
        None, "NEFTune (Jain et al. 2024): in training uniform noise of +-alpha / sqrt(tokens of the document x width)"
        " on the embeddings. Default null: none.", gt=0)
    label_smoothing: float = setting(
        0.0, "Label smoothing of the training's loss, as in torch.nn.CrossEntropyLoss. Default 0: none.", ge=0, lt=1)
    z_loss_weight: float = setting(
        0.0, "Weight of log(Z)^2 in the training's loss, with Z the sum of exp(logit) of the head; PaLM has 1e-4."
        " Default 0: none.", ge=0)
    initializer_range: float = setting(
        0.02, "Standard deviation of new weights.", gt=0, aliases="init_method_std sigma")
    param_init_std_rules: list[InitRule] | None = setting(
        None, "Standard deviations of new weights by name; of several rules the last one counts. Default null:"
        " initializer_range.")
    hidden_act: Literal[Activation, "swiglu", "fusedswiglu"] = setting(
        "silu", "Activation: silu (SwiGLU), under each of its names, GELU approximated by tanh, or relu2, the square of"
        " ReLU.",
        aliases="hidden_activation", fix="use a model with one of these: a model needs the activation it was made for",
        explicit_only=("relu2",))
    gated_linear_unit: bool = setting(
        True, "The feed-forward layer multiplies its activation by a second projection. false: it has no such gate"
        " (Starcoder2).",
        beside=(Beside("experts", True, "not yet supported with experts", "use another model"),
                Beside("has_silu", True, "not yet supported with hidden_act silu", "use another model")),
        explicit_only=(False,))
    mlp_names: Literal["up_proj", "c_fc"] = setting(
        "up_proj", "gated_linear_unit false: the name of the first of the two matrices, as the class has it: up_proj,"
        " or c_fc (Starcoder2).")
    compute_dtype: Dtype | None = setting(
        None, "Dtype of matrix products. Default null: amp_level decides; without it float32, on an Ascend bfloat16.")
    layernorm_compute_type: Dtype | None = setting(
        None, "Dtype of RMSNorm's input, weight and output. Default null: amp_level decides; without it float32.",
        aliases="layernorm_compute_dtype")
    softmax_compute_type: Dtype | None = setting(
        None, "Dtype of the attention's softmax. Default null: amp_level decides; without it float32.",
        aliases="softmax_compute_dtype")
    rotary_dtype: Dtype | None = setting(
        None, "Dtype of rotary tables and rotation. Default null: amp_level decides; without it float32.")
    param_init_type: Dtype = setting(
        "float32", "Accepted for compatibility: parameters are always float32.",
        aliases="param_init_dtype params_dtype")
    use_flash_attention: bool | None = setting(
        None, "Fused attention where the device has it. Default null: on an Ascend true, elsewhere false.")
    use_fused_rope: bool = setting(
        False, "Fused rotary embedding where the device has it.", aliases="apply_rope_fusion")
    use_fused_swiglu: bool = setting(False, "Fused SwiGLU where the device has it.", aliases="bias_swiglu_fusion")
    moe_config: MoEConfig | None = setting(None, "Mixture of experts. Default null: dense.")
    mtp_depth: int = setting(
        0, "Modules that each predict one token further (DeepSeek-V3, section 2.2).", ge=0, le=LAYERS,
        aliases="mtp_num_layers num_nextn_predict_layers num_mtp_layers",
        beside=_NO_LAYER_NORM._replace(value=0))
    mtp_loss_factor: float = setting(
        0.3, "Weight of the mean of their losses.", ge=0, aliases="mtp_loss_scaling_factor")
    offset: Layer | list[Layer] | list[list[Layer]] = setting(
        0, "Additional layers of each pipeline stage, beyond an equal share: a list with a number for each stage; with"
        " pp_interleave_num a list of such lists, one for each model chunk.")
    pp_interleave_num: int = setting(
        1, "Model chunks of each pipeline stage (virtual pipeline stages).", ge=1, le=LAYERS)
    use_contiguous_weight_layout_attention: bool = setting(
        False, "Layout of MindSpore Transformers' files that load_checkpoint reads: the rows of linear_qkv are all"
        " queries, all keys, all values. Default false: one group for each key/value head.",
        aliases="use_contiguous_weight_layout")
    use_interleaved_weight_layout_mlp: bool = setting(
        True, "Layout of MindSpore Transformers' files that load_checkpoint reads: in linear_fc1 the rows of gate and"
        " up take turns. false: all of gate, then all of up.")
    eos_token_id: TokenId | list[TokenId] | None = setting(
        None, "Token that ends a document. Default null: the tokenizer's.")
    bos_token_id: int | None = setting(
        None, "Token that starts a document. Default null: the tokenizer's.", ge=-TOKEN_ID, le=TOKEN_ID)
    eod_reset: bool = setting(
        False, "MindDataset: attention_mask has, for each token, the position where its document begins in the row, "
        "instead of 1 and 0. Other data do not need it.")
    pad_token_id: int | None = setting(
        None, "MindDataset: the padding token; as an input it has no loss. Other data: padding never has a loss. "
        "Default null: none.", ge=-TOKEN_ID, le=TOKEN_ID)

    max_decode_length: int | None = setting(
        None, "predict: tokens of prompt and answer. Default null: seq_length.", ge=1, le=LENGTH)
    max_new_tokens: int | None = setting(
        None, "predict: tokens of the answer. Default null: up to max_decode_length.", ge=1, le=LENGTH)
    do_sample: bool = setting(False, "predict: draw tokens instead of taking the likeliest.")
    temperature: float = setting(1.0, "predict: divides the logits before drawing.", gt=0)
    top_k: int = setting(0, "predict: draw among this many likeliest tokens. Default 0: all.", ge=0, le=VOCABULARY)
    top_p: float = setting(
        1.0, "predict: draw among the likeliest tokens of this total probability. Default 1: all.", gt=0, le=1)
    repetition_penalty: float = setting(
        1.0, "predict: divides the scores of tokens that the text already has. Default 1: off.", gt=0)
    rotary_pct: float = setting(
        1.0, "Fraction of a head with rotary embedding.", gt=0, le=1, aliases="partial_rotary_factor rotary_percent",
        beside=Beside("multi_latent_attention", 1.0, "multi_latent_attention has qk_rope_head_dim for the part of a"
                      " head that is rotated"))
    rope_interleave: bool = setting(
        False, "Rotary positions turn neighbouring numbers of a head instead of its two halves.",
        aliases="rotary_interleaved rope_interleaved")
    pet_config: PetConfig | None = setting(None, "Low-rank adapters, trained alone. Default null: none.")

    @property
    def kv_heads(self) -> int:
        """Returns the number of key-value heads; with multi_latent_attention there is one for each query head."""
        if self.n_kv_heads is None or self.multi_latent_attention:
            return self.num_heads
        return self.n_kv_heads

    @property
    def head_size(self) -> int:
        """Returns the width of a query or key of one head."""
        if self.multi_latent_attention:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim is None:
            return max(1, self.hidden_size // self.num_heads)  # more heads than numbers are an error
        return self.head_dim

    @property
    def activation(self) -> Activation:
        """Returns the activation of the feed-forward layers."""
        if self.hidden_act == "swiglu" or self.hidden_act == "fusedswiglu":
            return "silu"
        return self.hidden_act

    @property
    def has_silu(self) -> bool:
        """Returns whether the activation is silu."""
        return self.activation == "silu"

    @property
    def centers_norms(self) -> bool:
        """Returns whether norms subtract the mean of a row first: LayerNorm."""
        return self.normalization == "LayerNorm"

    @property
    def norm_offset(self) -> float:
        """Returns what is added to the weights of norms before these multiply."""
        return float(self.layernorm_zero_centered_gamma)

    @property
    def rotary_head_size(self) -> int:
        """Returns the width of a head as the rotary kernel sees it: the part with positions of latent attention."""
        if self.multi_latent_attention:
            return self.qk_rope_head_dim
        return self.head_size

    @property
    def rotary_size(self) -> int:
        """Returns how many numbers of a head have rotary embedding, from the first."""
        return int(self.rotary_head_size * self.rotary_pct)

    @property
    def maps_embedding(self) -> bool:
        """Returns whether matrices map the embedding to hidden_size, and hidden_size to the width of the head."""
        return self.embedding_size not in (None, 1)

    @property
    def embedding_width(self) -> int:
        """Returns the number of columns of the embedding and of the head."""
        if self.embedding_size is not None and self.maps_embedding:
            return self.embedding_size
        return self.hidden_size

    def has_window(self, layer: int) -> bool:
        """Returns whether a layer has a sliding window; MTP modules have none."""
        if not self.sliding_window or self.use_sliding_window is False or layer >= self.num_layers:
            return False
        if self.layer_types is not None:
            return self.layer_types[layer] == "sliding_attention"
        return not self.use_sliding_window or layer >= (self.max_window_layers or 0)

    def has_rotary(self, layer: int) -> bool:
        """Returns whether a layer has rotary positions; MTP modules have them unless no layer has."""
        if self.position_embedding_type == "none":
            return False
        if layer >= self.num_layers:
            return True
        if self.nope_layers is not None:
            return layer not in self.nope_layers
        if self.nope_without_window:
            return self.has_window(layer)
        return self.nope_layer_interval is None or (layer + 1) % self.nope_layer_interval != 0

    @property
    def unrotated_layers(self) -> tuple[int, ...]:
        """Returns the layers without rotary positions."""
        return tuple(layer for layer in range(self.num_layers) if not self.has_rotary(layer))

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Returns the layers with a sliding window."""
        return tuple(layer for layer in range(self.num_layers) if self.has_window(layer))

    @property
    def trained_length(self) -> int:
        """Returns the tokens up to which rotary positions were trained before they were stretched."""
        if self.rope_scaling is None:
            return self.max_positions
        return self.rope_scaling.original_max_position_embeddings or self.max_positions

    @property
    def has_window_rotary(self) -> bool:
        """Returns whether layers with a sliding window have other rotary frequencies than the others."""
        if self.window_rope_theta is None or not self.window_layers:
            return False
        is_scaled = self.rope_scaling is not None and self.rope_scaling.rope_type != "default"
        return is_scaled or self.window_rope_theta != self.rope_base

    @property
    def logits_factor(self) -> float:
        """Returns the factor on the logits, before their cap."""
        return self.logit_scale / self.logits_scaling

    @property
    def rope_base(self) -> float:
        """Returns the base of the rotary frequencies."""
        return self.rope_theta * self.rope_ratio

    @property
    def down_has_bias(self) -> bool:
        """Returns whether the feed-forward layer has a bias on its output."""
        if self.mlp_down_has_bias is None:
            return self.mlp_has_bias
        return self.mlp_down_has_bias

    @property
    def ffn_size(self) -> int:
        """Returns the width of the feed-forward layer; Llama's rule gives it if the file does not."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        width = int(2 * (4 * self.hidden_size) / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def experts(self) -> MoEConfig | None:
        """Returns the section about experts; None for a dense model."""
        if self.moe_config is not None and self.moe_config.expert_num > 1:
            return self.moe_config
        return None

    @property
    def norms_every_input(self) -> bool:
        """Returns whether a sublayer of the model can only have a norm on its input."""
        return self.experts is not None or self.multi_latent_attention

    @property
    def expert_size(self) -> int:
        """Returns the width of an expert."""
        if self.moe_config is None:
            return self.ffn_size
        return self.moe_config.moe_intermediate_size or self.ffn_size

    @property
    def shared_expert_size(self) -> int:
        """Returns the width of all shared experts together, which are computed as one expert; 0 without any."""
        moe = self.experts
        if moe is None:
            return 0
        return moe.moe_shared_expert_intermediate_size or moe.shared_expert_num * self.expert_size

    @property
    def has_shared_gate(self) -> bool:
        """Returns whether the output of the shared experts is gated."""
        return self.experts is not None and self.experts.use_shared_expert_gating and self.shared_expert_size > 0

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether a layer has experts; the MTP modules are layers from num_layers on."""
        moe = self.experts
        if moe is None or layer < (moe.first_k_dense_replace or 0):
            return False
        if layer >= self.num_layers:
            return True
        if 0 <= moe.moe_layer_end_index < layer:
            return False
        if isinstance(moe.moe_layer_freq, list):
            return bool(moe.moe_layer_freq[layer])
        return layer % moe.moe_layer_freq == 0

    @property
    def layers(self) -> range:
        """Returns the numbers of all layers; those of MTP modules begin at num_layers."""
        return range(self.num_layers + self.mtp_depth)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Returns the layers with experts, including MTP modules."""
        return tuple(layer for layer in self.layers if self.is_moe_layer(layer))

    @property
    def has_loss_terms(self) -> bool:
        """Returns whether a training adds terms to the cross entropy of its tokens."""
        return bool(self.label_smoothing or self.z_loss_weight)

    @property
    def balance_factor(self) -> float:
        """Returns the weight of the sum of the layers' auxiliary losses.

        If the load is even, transformers' load_balancing_loss_func returns num_experts_chosen for all layers together;
        the loss here is 1 in each layer. MTP modules, which transformers lacks, have additional losses.
        """
        moe = self.experts
        if moe is None:
            return 0.0
        if moe.aux_loss_factor is None and moe.router_aux_loss_coef is not None:
            layers = sum(self.is_moe_layer(layer) for layer in range(self.num_layers))
            return moe.router_aux_loss_coef * moe.num_experts_chosen / max(layers, 1)
        if moe.aux_loss_factor is None:
            return 0.05
        return moe.aux_loss_factor

    @property
    def max_positions(self) -> int:
        """Returns the longest context in tokens."""
        if self.max_position_embeddings is None:
            return self.seq_length
        return self.max_position_embeddings

    @property
    def labels_per_sequence(self) -> int:
        """Returns the number of labels of a sequence: one for each token."""
        return self.seq_length

    @property
    def labels_text(self) -> str:
        """Returns the name of the items with labels, in the plural."""
        return "tokens"

    @property
    def sequences_text(self) -> str:
        """Returns the name of the sequences, in the plural."""
        return f"sequences of {self.seq_length} tokens"
