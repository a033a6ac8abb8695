"""The cells of a decoder: attention and feed-forward layer, block of both, head, merge of an MTP module.

Each is a pure function of its inputs and weights and holds no Parameters, so that one compiled copy serves every layer.
Every call site within a cell has a kernel of its own: see trainer/ops/__init__.py.

Multi-token prediction (MTP; DeepSeek-AI 2024, DeepSeek-V3, section 2.2): module k takes the hidden state of the module
before it at a position (the first: of the main model, after its final norm) and the embedding of the token k positions
later, and predicts the token after that:

    h_i^k = norm_k(block_k(W_k [norm(Emb(t_{i+k})); norm(h_i^{k-1})])),   loss_k = cross entropy(head(h_i^k), t_{i+k+1})

The paper leaves open where the norm before the head stands; this, and the order of the two halves of the product, is
what transformers and vLLM compute with DeepSeek's released weights. Embedding and head are the main model's.

Legend: N tokens, D hidden, C = heads * head size, K = key/value heads * head size, V vocabulary, B sequences, Q new
tokens of each in prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn
from mindspore.ops import operations as P

from trainer.models.latent_attention import LatentAttentionLayer
from trainer.models.projection import Projection
from trainer.models.spec.names import MTP_NORM, MTP_WEIGHTS, POST_ATTENTION_NORM, POST_MLP_NORM  # noqa: F401
from trainer.models.spec.shapes import block_names
from trainer.models.spec.sublayers import attention_spec, latent_spec, mlp_spec

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.vocabulary import VocabShard
    from trainer.parallel.tensor import TensorParallel


class AttentionLayer(nn.Cell):
    """x_ND -> what attention adds to the residual stream, [N, D].

    Norm, projections, optional norm of queries and keys, rotary embedding, attention, output projection, optional norm.
    `weights` are all weights of the block, in the order of `block_names`. With `tensor` they are those of a rank, which
    has some of the heads.
    """

    def __init__(
        self,
        settings: ModelConfig,
        kernels: KernelSet,
        window: int | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        names = block_names(settings)
        spec = attention_spec(settings)
        if tensor is not None:
            spec = spec.local(tensor.group.size)
        self.qk_norm = spec.head_norm
        self.head_size = spec.head_size
        self.norm_weight = names.index("input_layernorm.weight")
        self.norm = kernels.rms_norm(spec.hidden, spec.eps)
        self.column_parallel_input = None if tensor is None else tensor.column_parallel_input()
        self.query, self.key, self.value = (Projection(f"self_attn.{one}_proj", settings, kernels) for one in "qkv")
        self.out = Projection("self_attn.o_proj", settings, kernels, tensor)
        if self.qk_norm:
            self.q_norm, self.k_norm = (names.index(f"self_attn.{name}_norm.weight") for name in "qk")
        self.query_norm = kernels.head_norm(self.head_size, spec.eps)
        self.key_norm = kernels.head_norm(self.head_size, spec.eps)
        turned = self.head_size, spec.rotary_size, spec.rotary_interleaved
        self.query_rotary, self.key_rotary = (kernels.rotary(*turned) for _ in range(2))
        self.heads = spec.heads
        self.cache_heads = spec.kv_heads
        options = kernels.attention_options(settings, window)
        self.attention = kernels.attention(self.heads, spec.kv_heads, self.head_size, **options)
        self.has_post_norm = spec.post_norm
        self.post_norm = kernels.rms_norm(spec.hidden, spec.eps)
        self.post_norm_weight = names.index(POST_ATTENTION_NORM) if self.has_post_norm else None

    def construct(self, x_ND, query_tables, key_tables, masks, dropout, weights):
        y_ND = self.attention_input(x_ND, weights)
        q_NC, k_NK, v_NK = self.project_qkv(y_ND, query_tables, key_tables, weights)
        return self.project_output(self.attention(q_NC, k_NK, v_NK, masks[0], masks[1], dropout), weights)

    def project_output(self, context_NC, weights):
        """The output projection of what the heads attend to, with a norm after it where the model has one: [N, D]."""
        out_ND = self.out(context_NC, weights)
        return self.post_norm(out_ND, weights[self.post_norm_weight]) if self.has_post_norm else out_ND

    def project(self, x_ND, query_tables, key_tables, weights):
        """Rotated queries and keys, and values."""
        return self.project_qkv(self.attention_input(x_ND, weights), query_tables, key_tables, weights)

    def attention_input(self, x_ND, weights):
        """What the heads are made from: the normed residual stream."""
        y_ND = self.norm(x_ND, weights[self.norm_weight])
        return y_ND if self.column_parallel_input is None else self.column_parallel_input(y_ND)

    def project_qkv(self, y_ND, query_tables, key_tables, weights):
        q_NC = self.query(y_ND, weights)
        k_NK = self.key(y_ND, weights)
        v_NK = self.value(y_ND, weights)
        if self.qk_norm:
            q_NC = self.query_norm(q_NC, weights[self.q_norm])
            k_NK = self.key_norm(k_NK, weights[self.k_norm])
        q_NC = self.query_rotary(q_NC, query_tables[0], query_tables[1])
        return q_NC, self.key_rotary(k_NK, key_tables[0], key_tables[1]), v_NK

    def attend_over_cache(self, attend, q_NC, cached, mask, weights):
        """The same over cached keys and values [B, S, K], for prediction; `attend` is `cached_attention`."""
        rows = cached[0].shape[0]
        heads = self.heads
        kv_heads = self.cache_heads
        out_BQC = attend(q_NC.reshape(rows, -1, q_NC.shape[1]), cached[0], cached[1], mask, heads, kv_heads)
        return self.project_output(out_BQC.reshape(q_NC.shape), weights)

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """As `Block.shard_over`."""
        for norm in (self.norm, self.post_norm):
            norm.shard_over(tokens)
        for projection in (self.query, self.key, self.value):
            projection.shard_over(data, columns=tensor)
        self.out.shard_over(data, rows=tensor, tokens=tokens)
        for part in (self.query_rotary, self.key_rotary, self.attention):
            part.shard_over(data, tensor)
        for norm in (self.query_norm, self.key_norm) if self.qk_norm else ():
            norm.shard_over(data, tensor)


class MlpLayer(nn.Cell):
    """x_ND -> what the feed-forward layer adds to the residual stream, [N, D].

    Norm, gate and up projections, SwiGLU, down projection, optional norm. `weights` as in `AttentionLayer`.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        names = block_names(settings)
        spec = mlp_spec(settings)
        self.norm_weight = names.index("post_attention_layernorm.weight")
        self.norm = kernels.rms_norm(spec.hidden, spec.eps)
        self.column_parallel_input = None if tensor is None else tensor.column_parallel_input()
        self.gate, self.up = (Projection(f"mlp.{name}_proj", settings, kernels) for name in ("gate", "up"))
        self.down = Projection("mlp.down_proj", settings, kernels, tensor)
        self.swiglu = kernels.swiglu()
        self.has_post_norm = spec.post_norm
        self.post_norm = kernels.rms_norm(spec.hidden, spec.eps)
        self.post_norm_weight = names.index(POST_MLP_NORM) if self.has_post_norm else None

    def construct(self, x_ND, weights):
        y_ND = self.norm(x_ND, weights[self.norm_weight])
        y_ND = y_ND if self.column_parallel_input is None else self.column_parallel_input(y_ND)
        out_ND = self.down(self.swiglu(self.gate(y_ND, weights), self.up(y_ND, weights)), weights)
        return self.post_norm(out_ND, weights[self.post_norm_weight]) if self.has_post_norm else out_ND

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """As `Block.shard_over`."""
        for norm in (self.norm, self.post_norm):
            norm.shard_over(tokens)
        for projection in (self.gate, self.up):
            projection.shard_over(data, columns=tensor)
        self.down.shard_over(data, rows=tensor, tokens=tokens)
        self.swiglu.shard_over(data, tensor)


class Block(nn.Cell):
    """One decoder block as a pure function of the residual stream, the position tables, the masks and the weights.

    Every tensor is an argument of its own: MindSpore takes a tuple of tensors for a constant and compiles for each
    new one. `part` is "block", or its sublayer "attention" or "mlp", which ignores weights and masks of the other one.
    `window` is that of `KernelSet.window`, `tensor` as in `AttentionLayer`.
    """

    def __init__(
        self,
        settings: ModelConfig,
        kernels: KernelSet,
        part: str = "block",
        window: int | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.has_attention = part in ("block", "attention")
        self.has_mlp = part in ("block", "mlp")
        if self.has_attention:
            layer = AttentionLayer if latent_spec(settings) is None else LatentAttentionLayer
            self.attention = layer(settings, kernels, window, tensor)
            self.add_attention = P.Add()
            self.drop_attention = kernels.dropout(settings.hidden_dropout)
        if self.has_mlp:
            self.mlp = MlpLayer(settings, kernels, tensor)
            self.add_mlp = P.Add()
            self.drop_mlp = kernels.dropout(settings.hidden_dropout)

    def construct(
        self, x_ND, q_cos, q_sin, k_cos, k_sin, mask, more_mask, drop_scores, drop_attention, drop_mlp, *weights
    ):
        if self.has_attention:
            masks = (mask, more_mask)
            added_ND = self.attention(x_ND, (q_cos, q_sin), (k_cos, k_sin), masks, drop_scores, weights)
            if drop_attention is not None:
                added_ND = self.drop_attention(added_ND, drop_attention)
            x_ND = self.add_attention(x_ND, added_ND)
        if self.has_mlp:
            added_ND = self.mlp(x_ND, weights)
            if drop_mlp is not None:
                added_ND = self.drop_mlp(added_ND, drop_mlp)
            x_ND = self.add_mlp(x_ND, added_ND)
        return x_ND

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """For semi-automatic mode: the products as in Megatron-LM (Shoeybi et al. 2019, section 3): the first of a pair
        is sharded along its outputs, the second along its inputs; all else along the batch, or like the columns of its
        input.

        The residual stream and its norms are sharded over `tokens` ranks: `data`, or with sequence parallelism
        (Korthikanti et al. 2022, section 4.2) data * tensor.
        """
        row = (tokens, 1)
        rows = "all" if tokens > data else "data"
        if self.has_attention:
            self.attention.shard_over(data, tensor, tokens)
            self.drop_attention.shard_over(data, tensor, rows)
            self.add_attention.shard((row, row))
        if self.has_mlp:
            self.mlp.shard_over(data, tensor, tokens)
            self.drop_mlp.shard_over(data, tensor, rows)
            self.add_mlp.shard((row, row))


class EmbeddingRows(nn.Cell):
    """(weight_VE, ids_N) -> x_NE, or the rows of it that the rank has.

    Compiled like the other parts: on its own MindSpore compiles the operator of its gradient anew at every call.
    """

    def __init__(
        self, kernels: KernelSet, tensor: TensorParallel | None = None, part: VocabShard | None = None
    ) -> None:
        super().__init__()
        self.gather_rows = kernels.gather_rows if part is None else kernels.vocabulary_rows(part)
        self.row_parallel_output = None if tensor is None else tensor.row_parallel_output()

    def construct(self, weight_VE, ids_N):
        x_NE = self.gather_rows(weight_VE, ids_N)
        return x_NE if self.row_parallel_output is None else self.row_parallel_output(x_NE)


class EmbeddingMapping(nn.Cell):
    """(x_NI, weight_OI) -> y_NO: from the width of the embedding to that of the residual stream, or back."""

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__()
        self.linear = kernels.linear()
        self.cast = P.Cast()

    def construct(self, x_NI, weight_OI):
        return self.cast(self.linear(x_NI, weight_OI), x_NI.dtype)


class HeadInput(nn.Cell):
    """What the output projection multiplies: (x_ND, norm_E[, mapping_ED]) -> normed x, [N, E].

    E is D, or where a matrix maps the residual stream to the embedding's width, that width.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.column_parallel_input = None if tensor is None else tensor.column_parallel_input()
        self.norm = kernels.rms_norm(settings.embedding_width, settings.rms_norm_eps)
        self.maps = settings.maps_embedding
        self.mapping = EmbeddingMapping(kernels)

    def construct(self, x_ND, norm_E, mapping_ED=None):
        y_NE = self.norm(self.mapping(x_ND, mapping_ED) if self.maps else x_ND, norm_E)
        return y_NE if self.column_parallel_input is None else self.column_parallel_input(y_NE)


class Head(nn.Cell):
    """Final norm, output projection and cross entropy: (x_ND, norm_E, weight_VE, labels_N, valid_N1) -> loss sum.

    E and `mapping_ED`, which comes last, as in `HeadInput`.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.normed = HeadInput(settings, kernels, tensor)
        self.cross_entropy = kernels.cross_entropy()

    def construct(self, x_ND, norm_E, weight_VE, labels_N, valid_N1, mapping_ED=None):
        return self.cross_entropy(self.normed(x_ND, norm_E, mapping_ED), weight_VE, labels_N, valid_N1)


class MtpMerge(nn.Cell):
    """(embeddings of later tokens, residual stream, its norm, two norms, projection) -> input of a module's block."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        sizes = settings.hidden_size, settings.rms_norm_eps
        self.final_norm, self.embedding_norm, self.hidden_norm = (kernels.rms_norm(*sizes) for _ in range(3))
        self.concat = P.Concat(1)
        self.project = kernels.linear()
        self.cast = P.Cast()

    def construct(self, embedded_ND, hidden_ND, final_norm_D, enorm_D, hnorm_D, weight_DC):
        known_ND = self.hidden_norm(self.final_norm(hidden_ND, final_norm_D), hnorm_D)
        both_NC = self.concat((self.embedding_norm(embedded_ND, enorm_D), known_ND))
        return self.cast(self.project(both_NC, weight_DC), hidden_ND.dtype)
