"""Multi-head latent attention: keys and values of all heads are made from one short vector of a token.

DeepSeek-AI 2024, DeepSeek-V2, section 2.1. With y the normed residual stream, for a head h:

    c_q = norm(W_qa y)                  q_h = [q_nope; rotate(q_rope)],  [q_nope; q_rope] = W_qb,h c_q
    [l; r] = W_kva y,  c = norm(l)      k_h = [W_k,h c; rotate(r)],      v_h = W_v,h c
    o_h = softmax(scale q_h k_h^T) v_h

Without q_lora_rank one matrix makes the queries from y. Without `LatentSpec.normed` c_q and c are not normed.
rotate(r) is one key for all heads. Prediction caches only c and rotate(r), and never makes the keys and values of
cached tokens: q_nope W_k,h c = (q_nope W_k,h) c, so c serves as one key of all heads, and W_v,h multiplies the weighted
sum of the c (same section, "absorbed").

Legend: N tokens, D hidden, H heads, L = kv_lora_rank, d = qk_nope_head_dim, R = qk_rope_head_dim, v = v_head_dim,
C = H * (d + R), V = H * v, B sequences of a prediction, S cached tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn
from mindspore.ops import operations as P

from trainer.models.projection import Projection
from trainer.models.spec.shapes import block_names
from trainer.models.spec.sublayers import attention_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer.config.schema.model import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.tensor import TensorParallel


class LatentAttentionLayer(nn.Cell):
    """x_ND -> what multi-head latent attention adds to the residual stream, [N, D].

    `weights` are all weights of the block, in the order of `block_names`. With `tensor` the rank has some of the heads.
    The vectors that all heads share are computed for the rows of the residual stream that the rank has.
    """

    cache_heads = 1
    """Key/value heads of the cache, which holds the vectors that all heads share."""

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, window: int | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        spec = attention_spec(settings)
        if tensor is not None:
            spec = spec.local(tensor.group.size)
        names = block_names(settings)
        heads = spec.heads
        latent = spec.latent
        assert latent is not None  # `Block` chooses this class by it
        self.norm_weight = names.index("input_layernorm.weight")
        self.norm = kernels.rms_norm(spec.hidden, spec.norm.eps)
        self.has_query_latent = latent.query_rank is not None
        query = "self_attn.q_proj"
        if self.has_query_latent:
            query = "self_attn.q_b_proj"
            self.query_down = Projection("self_attn.q_a_proj", settings, kernels)
        self.query = Projection(query, settings, kernels)
        self.key_value_down = Projection("self_attn.kv_a_proj_with_mqa", settings, kernels)
        self.normed = latent.normed
        if self.normed and self.has_query_latent:
            self.query_norm = kernels.rms_norm(latent.query_rank, latent.eps)
            self.query_norm_weight = names.index("self_attn.q_a_layernorm.weight")
        if self.normed:
            self.key_value_norm = kernels.rms_norm(latent.key_value_rank, latent.eps)
            self.key_value_norm_weight = names.index("self_attn.kv_a_layernorm.weight")
        self.key_value = Projection("self_attn.kv_b_proj", settings, kernels)
        self.out = Projection("self_attn.o_proj", settings, kernels, tensor)
        self.column_parallel_input = None if tensor is None else tensor.column_parallel_input()
        if tensor is not None:
            self.concat = P.Concat(1)
            self.cut_query_input = kernels.split_heads(1, latent.query_rank or spec.hidden)
            self.cut_latent = kernels.split_heads(1, latent.key_value_rank)
        rotated = latent.rope_size, spec.rotary_size, spec.rotary_interleaved
        self.query_rotary, self.key_rotary = (kernels.rotary(*rotated) for _ in range(2))
        self.scale = spec.scale
        self.attention = kernels.attention(
            heads, heads, spec.head_size, value_size=spec.value_size, scale=self.scale,
            **kernels.attention_options(settings, window),
        )  # fmt: skip
        self.heads = heads
        self.latent = latent.key_value_rank
        self.plain = latent.nope_size
        self.value = spec.value_size
        self.cut_query = kernels.split_heads(heads, self.plain)
        self.cut_down = kernels.split_heads(1, self.latent)
        self.cut_key_value = kernels.split_heads(heads, self.plain)
        self.join_query = kernels.join_heads(heads)
        self.join_key = kernels.join_heads(heads, shared=True)
        self.join_absorbed = kernels.join_heads(heads)
        self.cut_absorbed = kernels.split_heads(heads, self.plain)
        self.join_cached = kernels.join_heads(1)

    def construct(
        self, x_ND: Tensor, query_tables: tuple[Tensor, Tensor], key_tables: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor | None], dropout: Tensor | None, weights: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        q_NC, latent_NL, key_NR = self.project(x_ND, query_tables, key_tables, weights)
        k_NC, v_NV = self.expand_kv(latent_NL, key_NR, weights)
        return self.out(self.attention(q_NC, k_NC, v_NV, masks[0], masks[1], dropout), weights)

    def project(
        self, x_ND: Tensor, query_tables: tuple[Tensor, Tensor], key_tables: tuple[Tensor, Tensor],
        weights: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns rotated queries [N, C], latent vectors [N, L] and the rotated key of all heads [N, R].

        A prediction caches the last two.
        """
        y_ND = self.norm(x_ND, weights[self.norm_weight])
        query_input = y_ND
        if self.has_query_latent:
            query_input = self.query_down(y_ND, weights)
        latent_NL, key_NR = self.cut_down(self.key_value_down(y_ND, weights))
        if self.normed and self.has_query_latent:
            query_input = self.query_norm(query_input, weights[self.query_norm_weight])
        if self.normed:
            latent_NL = self.key_value_norm(latent_NL, weights[self.key_value_norm_weight])
        if self.column_parallel_input is not None:
            # In one collective: two that do not depend on each other would have no order.
            joined = self.concat((query_input, latent_NL, key_NR))
            query_input, rest = self.cut_query_input(self.column_parallel_input(joined))
            latent_NL, key_NR = self.cut_latent(rest)
        q_NC = self.query(query_input, weights)
        plain, rotated = self.cut_query(q_NC)
        q_NC = self.join_query(plain, self.query_rotary(rotated, query_tables[0], query_tables[1]))
        return q_NC, latent_NL, self.key_rotary(key_NR, key_tables[0], key_tables[1])

    def expand_kv(self, latent_NL: Tensor, key_NR: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns keys [N, C] and values [N, V] of all heads from the latent vectors and the rotated key."""
        plain, v_NV = self.cut_key_value(self.key_value(latent_NL, weights))
        return self.join_key(plain, key_NR), v_NV

    def attend_over_cache(
        self, attend: Callable, q_NC: Tensor, cached: tuple[Tensor, Tensor], mask: Tensor, weights: Sequence[Tensor]
    ) -> Tensor:
        """Returns what attention adds to the residual stream of new tokens in a prediction, [N, D].

        Args:
            attend: The kernel `cached_attention`.
            q_NC: Rotated queries of the new tokens of all sequences.
            cached: Latent vectors [B, S, L] and rotated keys [B, S, R] of all tokens.
        """
        latent_BSL, key_BSR = cached
        rows = latent_BSL.shape[0]
        length = latent_BSL.shape[1]
        tokens = q_NC.shape[0]
        matrix = self.key_value.matrix(weights)
        if matrix.dtype != q_NC.dtype:
            matrix = matrix.astype(q_NC.dtype)
        matrix = matrix.reshape(self.heads, -1, self.latent)
        plain, rotated = self.cut_absorbed(q_NC)
        plain = plain.reshape(tokens, self.heads, -1).transpose(1, 0, 2) @ matrix[:, : self.plain]
        queries = self.join_absorbed(plain.transpose(1, 0, 2).reshape(tokens, -1), rotated)
        keys = self.join_cached(latent_BSL.reshape(rows * length, -1), key_BSR.reshape(rows * length, -1))
        queries = queries.reshape(rows, -1, queries.shape[1])
        keys = keys.reshape(rows, length, -1)
        out = attend(queries, keys, latent_BSL, mask, self.heads, 1, scale=self.scale)
        out = out.reshape(tokens, self.heads, self.latent).transpose(1, 0, 2)
        out = (out @ matrix[:, self.plain :].transpose(0, 2, 1)).transpose(1, 0, 2)
        return self.out(out.reshape(tokens, -1), weights)

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """Shards heads over `tensor` ranks and tokens over `data` or `tokens` ranks, see `Block.shard_over`.

        The down-projections and the norms of the latent vectors are sharded like the residual stream: each rank of a
        tensor-parallel group holds the full matrices.
        """
        self.norm.shard_over(tokens)
        copies = data * tensor // tokens
        self.key_value_down.shard_over(tokens, copies=copies)
        if self.has_query_latent:
            self.query_down.shard_over(tokens, copies=copies)
        if self.normed and self.has_query_latent:
            self.query_norm.shard_over(tokens)
        if self.normed:
            self.key_value_norm.shard_over(tokens)
        self.cut_down.shard_over(tokens, 1)
        for projection in (self.query, self.key_value):
            projection.shard_over(data, columns=tensor)
        self.key_rotary.shard_over(data, 1)
        parts = self.query_rotary, self.cut_query, self.cut_key_value, self.join_query, self.join_key, self.attention
        for part in parts:
            part.shard_over(data, tensor)
        self.out.shard_over(data, rows=tensor, tokens=tokens)
