"""The cells of a decoder: attention and feed-forward layer, block of both, head, merge of an MTP module.

Each cell is a pure function of its inputs and weights. It holds no Parameters, so that one compiled copy serves every
layer. Every call site within a cell has its own kernel (trainer/ops/__init__.py says why).

Multi-token prediction (MTP; DeepSeek-AI 2024, DeepSeek-V3, section 2.2): module k takes the hidden state of the module
before it at a position (the first: of the main model, after its final norm) and the embedding of the token k positions
later, and predicts the token after that:

    h_i^k = norm_k(block_k(W_k [norm(Emb(t_{i+k})); norm(h_i^{k-1})])),   loss_k = cross entropy(head(h_i^k), t_{i+k+1})

The paper leaves open where the norm before the head stands. Its place here, and the order of the two halves of the
product, are those of transformers and vLLM, which run DeepSeek's released weights. A module shares the embedding and
the head of the main model.

Legend: N tokens, D hidden, C = heads * head size, K = key/value heads * head size, V vocabulary, B sequences, Q new
tokens of each in prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import MeanExt

from trainer.models.latent_attention import LatentAttentionLayer
from trainer.models.projection import Projection
from trainer.models.spec.names import (  # noqa: F401
    INPUT_NORM,
    MTP_NORM,
    MTP_WEIGHTS,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    SINKS,
    norm_bias,
)
from trainer.models.spec.shapes import block_names
from trainer.models.spec.sublayers import attention_spec, latent_spec, mlp_spec, norm_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer.config.schema.model import ModelConfig
    from trainer.models.spec.model import AttentionSpec, MlpSpec, NormSpec
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.vocabulary import VocabShard
    from trainer.parallel.tensor import TensorParallel


class CenteredNorm(nn.Cell):
    """A norm of zero-centered weights: it multiplies by offset + weight."""

    def __init__(self, norm: nn.Cell, offset: float) -> None:
        super().__init__()
        self.norm = norm
        self.offset = offset
        self.add = P.Add()

    def construct(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        """Returns the normed x in the dtype of the norm."""
        return self.norm(x_ND, self.add(weight_D, self.offset))

    def shard_over(self, *degrees: int) -> None:
        """Shards the norm; each rank has all weights."""
        self.norm.shard_over(*degrees)
        self.add.shard(((1,), ()))


class LayerNorm(nn.Cell):
    """The norm of x without its mean, plus a bias if there is one (Ba et al. 2016, section 3)."""

    def __init__(self, norm: nn.Cell) -> None:
        super().__init__()
        self.norm = norm
        self.mean = MeanExt()
        self.subtract = P.Sub()
        self.add_bias = P.Add()
        self.cast = P.Cast()

    def construct(self, x_ND: Tensor, weight_D: Tensor, bias_D: Tensor | None = None) -> Tensor:
        """Returns the normed x in the dtype of the norm."""
        y_ND = self.norm(self.subtract(x_ND, self.mean(x_ND, (-1,), True)), weight_D)
        if bias_D is None:
            return y_ND
        return self.add_bias(y_ND, self.cast(bias_D, y_ND.dtype))


def make_norm(kernel: Callable[[int, float], nn.Cell], size: int, spec: NormSpec) -> nn.Cell:
    """Returns the norm of rows of `size` numbers, from the kernel of RMSNorm."""
    norm = kernel(size, spec.eps)
    if spec.offset:
        norm = CenteredNorm(norm, spec.offset)
    if spec.centers:
        norm = LayerNorm(norm)
    return norm


def norm_arguments(names: Sequence[str], weight: str) -> tuple[int, ...]:
    """Returns the places, among the arguments of a block, of a norm's weight and bias."""
    return tuple(names.index(name) for name in (weight, norm_bias(weight)) if name in names)


class SublayerOutput(nn.Cell):
    """The output of a sublayer, [N, D], normed and scaled where the model has that; dropout comes later.

    `weights` as in `AttentionLayer`.
    """

    def __init__(self, spec: AttentionSpec | MlpSpec, names: Sequence[str], norm_name: str, kernels: KernelSet) -> None:
        super().__init__()
        self.has_norm = spec.post_norm
        self.norm = make_norm(kernels.rms_norm, spec.hidden, spec.norm.rms)
        if self.has_norm:
            self.norm_weight = names.index(norm_name)
        self.factor = spec.output_scale
        self.scale = P.Mul()

    def construct(self, out_ND: Tensor, weights: Sequence[Tensor]) -> Tensor:
        if self.has_norm:
            out_ND = self.norm(out_ND, weights[self.norm_weight])
        if self.factor != 1:
            out_ND = self.scale(out_ND, self.factor)
        return out_ND

    def shard_over(self, tokens: int) -> None:
        """Shards tokens over `tokens` ranks."""
        self.norm.shard_over(tokens)
        self.scale.shard(((tokens, 1), ()))


class AttentionLayer(nn.Cell):
    """x_ND -> what attention adds to the residual stream, [N, D].

    Optional norm, projections, optional norm of queries and keys before or after the rotary embedding, attention,
    output projection, optional norm.
    `weights` are all weights of the block, in the order of `block_names`. With `tensor` the rank has some of the heads,
    and the weights are its shards.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, window: int | None = None,
        tensor: TensorParallel | None = None, is_rotated: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        names = block_names(settings)
        spec = attention_spec(settings)
        self.is_rotated = is_rotated
        if tensor is not None:
            spec = spec.local(tensor.group.size)
        self.qk_norm = spec.head_norm
        self.norms_rotated = spec.norms_rotated
        self.head_size = spec.head_size
        self.has_pre_norm = spec.pre_norm
        self.norm_weights = norm_arguments(names, INPUT_NORM)
        self.norm = make_norm(kernels.rms_norm, spec.hidden, spec.norm)
        self.column_parallel_input = None if tensor is None else tensor.column_parallel_input()
        self.query, self.key, self.value = (Projection(f"self_attn.{name}_proj", settings, kernels) for name in "qkv")
        self.out = Projection("self_attn.o_proj", settings, kernels, tensor)
        self.sinks: int | None = None
        if spec.sinks:
            self.sinks = names.index(SINKS)
        if self.qk_norm:
            self.q_norm, self.k_norm = (names.index(f"self_attn.{name}_norm.weight") for name in "qk")
        query_width, key_width = spec.norm_widths
        self.query_norm = make_norm(kernels.head_norm, query_width, spec.norm.rms)
        self.key_norm = make_norm(kernels.head_norm, key_width, spec.norm.rms)
        # Not that of the first layer, which may have no rotary positions where others have them.
        rotary_sizes = self.head_size, settings.rotary_size, spec.rotary_interleaved
        self.query_rotary, self.key_rotary = (kernels.rotary(*rotary_sizes) for _ in range(2))
        self.heads = spec.heads
        self.cache_heads = spec.kv_heads
        options = kernels.attention_options(settings, window)
        self.scale = spec.scale
        self.cap = None
        if spec.score_cap is not None:
            self.cap = kernels.soft_cap(spec.score_cap, "dt..")
            options["cap"] = self.cap
        self.attention = kernels.attention(self.heads, spec.kv_heads, self.head_size, scale=self.scale, **options)
        self.changes_output = spec.changes_output
        self.output = SublayerOutput(spec, names, POST_ATTENTION_NORM, kernels)

    def construct(
        self, x_ND: Tensor, query_tables: tuple[Tensor, Tensor], key_tables: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor | None], dropout: Tensor | None, weights: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        y_ND = self.attention_input(x_ND, weights)
        q_NC, k_NK, v_NK = self.project_qkv(y_ND, query_tables, key_tables, weights)
        if self.sinks is None:
            out_NC = self.attention(q_NC, k_NK, v_NK, masks[0], masks[1], dropout)
        else:
            out_NC = self.attention(q_NC, k_NK, v_NK, masks[0], masks[1], dropout, weights[self.sinks])
        return self.project_output(out_NC, weights)

    def project_output(self, context_NC: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Returns what the heads' results add to the residual stream, [N, D]."""
        out_ND = self.out(context_NC, weights)
        if self.changes_output:
            out_ND = self.output(out_ND, weights)
        return out_ND

    def project(
        self, x_ND: Tensor, query_tables: tuple[Tensor, Tensor], key_tables: tuple[Tensor, Tensor],
        weights: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns rotated queries [N, C], rotated keys [N, K] and values [N, K] from the residual stream."""
        return self.project_qkv(self.attention_input(x_ND, weights), query_tables, key_tables, weights)

    def attention_input(self, x_ND: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Returns the input of the projections, of all tokens where tensor-parallel ranks share the heads."""
        y_ND = x_ND
        if self.has_pre_norm:
            y_ND = self.norm(x_ND, *[weights[place] for place in self.norm_weights])
        if self.column_parallel_input is None:
            return y_ND
        return self.column_parallel_input(y_ND)

    def project_qkv(
        self, y_ND: Tensor, query_tables: tuple[Tensor, Tensor], key_tables: tuple[Tensor, Tensor],
        weights: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns rotated queries [N, C], rotated keys [N, K] and values [N, K] from the normed residual stream."""
        q_NC = self.query(y_ND, weights)
        k_NK = self.key(y_ND, weights)
        v_NK = self.value(y_ND, weights)
        if self.qk_norm and not self.norms_rotated:
            q_NC = self.query_norm(q_NC, weights[self.q_norm])
            k_NK = self.key_norm(k_NK, weights[self.k_norm])
        if self.is_rotated:
            q_NC = self.query_rotary(q_NC, query_tables[0], query_tables[1])
            k_NK = self.key_rotary(k_NK, key_tables[0], key_tables[1])
        if self.norms_rotated:
            q_NC = self.query_norm(q_NC, weights[self.q_norm])
            k_NK = self.key_norm(k_NK, weights[self.k_norm])
        return q_NC, k_NK, v_NK

    def attend_over_cache(
        self, attend: Callable, q_NC: Tensor, cached: tuple[Tensor, Tensor], mask: Tensor, weights: Sequence[Tensor]
    ) -> Tensor:
        """Returns what attention adds to the residual stream of new tokens in a prediction, [N, D].

        Args:
            attend: The kernel `cached_attention`.
            q_NC: Rotated queries of the new tokens of all sequences.
            cached: Keys and values of all tokens, [B, S, K].
        """
        rows = cached[0].shape[0]
        heads = self.heads
        kv_heads = self.cache_heads
        queries_BQC = q_NC.reshape(rows, -1, q_NC.shape[1])
        options = {"scale": self.scale, "cap": self.cap}
        if self.sinks is not None:
            options["sinks_H"] = weights[self.sinks]
        out_BQC = attend(queries_BQC, cached[0], cached[1], mask, heads, kv_heads, **options)
        return self.project_output(out_BQC.reshape(q_NC.shape), weights)

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """Shards heads over `tensor` ranks and tokens over `data` or `tokens` ranks, see `Block.shard_over`."""
        for part in (self.norm, self.output):
            part.shard_over(tokens)
        for projection in (self.query, self.key, self.value):
            projection.shard_over(data, columns=tensor)
        self.out.shard_over(data, rows=tensor, tokens=tokens)
        for part in (self.query_rotary, self.key_rotary, self.attention):
            part.shard_over(data, tensor)
        if self.qk_norm:
            self.query_norm.shard_over(data, tensor)
            self.key_norm.shard_over(data, tensor)


class MlpLayer(nn.Cell):
    """x_ND -> what the feed-forward layer adds to the residual stream, [N, D].

    Optional norm, gate (if there is one) and up projections, activation, down projection, optional norm. `weights` as
    in `AttentionLayer`.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        names = block_names(settings)
        spec = mlp_spec(settings)
        self.has_pre_norm = spec.pre_norm
        self.norm_weights = norm_arguments(names, spec.norm_name)
        self.norm = make_norm(kernels.rms_norm, spec.hidden, spec.norm)
        self.column_parallel_input = None if tensor is None else tensor.column_parallel_input()
        self.has_gate = spec.has_gate
        *inner, output = spec.matrices
        if self.has_gate:
            self.gate = Projection(inner[0], settings, kernels)
        self.up = Projection(inner[-1], settings, kernels)
        self.down = Projection(output, settings, kernels, tensor)
        self.activation = kernels.gated(spec.activation)
        self.changes_output = spec.changes_output
        self.output = SublayerOutput(spec, names, POST_MLP_NORM, kernels)

    def construct(self, x_ND: Tensor, weights: Sequence[Tensor]) -> Tensor:
        y_ND = x_ND
        if self.has_pre_norm:
            y_ND = self.norm(x_ND, *[weights[place] for place in self.norm_weights])
        if self.column_parallel_input is not None:
            y_ND = self.column_parallel_input(y_ND)
        if self.has_gate:
            inner_NF = self.activation(self.gate(y_ND, weights), self.up(y_ND, weights))
        else:
            inner_NF = self.activation(self.up(y_ND, weights))
        out_ND = self.down(inner_NF, weights)
        if self.changes_output:
            out_ND = self.output(out_ND, weights)
        return out_ND

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """Shards columns over `tensor` ranks and tokens over `data` or `tokens` ranks, see `Block.shard_over`."""
        for part in (self.norm, self.output):
            part.shard_over(tokens)
        for projection in (self.gate, self.up):
            projection.shard_over(data, columns=tensor)
        self.down.shard_over(data, rows=tensor, tokens=tokens)
        self.activation.shard_over(data, tensor)


class Block(nn.Cell):
    """One decoder block as a pure function of the residual stream, the position tables, the masks and the weights.

    Every tensor is a separate argument: MindSpore takes a tuple of tensors for a constant and compiles for each one.

    Args:
        part: "block", or its sublayer "attention" or "mlp", which ignores the weights and masks of the other one.
        window: The sliding window of the layer, see `KernelSet.window`.
        tensor: The tensor-parallel ranks that share the block; None: this rank has all of it.
        is_rotated: Whether the layer has rotary positions; latent attention always has.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, part: str = "block", window: int | None = None,
        tensor: TensorParallel | None = None, is_rotated: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.has_attention = part in ("block", "attention")
        self.has_mlp = part in ("block", "mlp")
        if self.has_attention:
            if latent_spec(settings) is None:
                self.attention = AttentionLayer(settings, kernels, window, tensor, is_rotated)
            else:
                self.attention = LatentAttentionLayer(settings, kernels, window, tensor)
            self.add_attention = P.Add()
            self.drop_attention = kernels.dropout(settings.hidden_dropout)
        if self.has_mlp:
            self.mlp = MlpLayer(settings, kernels, tensor)
            self.is_parallel = settings.parallel_attn
            self.add_mlp = P.Add()
            self.drop_mlp = kernels.dropout(settings.hidden_dropout)

    def construct(
        self, x_ND: Tensor, q_cos: Tensor, q_sin: Tensor, k_cos: Tensor, k_sin: Tensor, mask: Tensor,
        more_mask: Tensor | None, drop_scores: Tensor | None, drop_attention: Tensor | None, drop_mlp: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        input_ND = x_ND
        if self.has_attention:
            masks = (mask, more_mask)
            added_ND = self.attention(x_ND, (q_cos, q_sin), (k_cos, k_sin), masks, drop_scores, weights)
            if drop_attention is not None:
                added_ND = self.drop_attention(added_ND, drop_attention)
            x_ND = self.add_attention(x_ND, added_ND)
        if self.has_mlp:
            if not self.is_parallel:
                input_ND = x_ND
            added_ND = self.mlp(input_ND, weights)
            if drop_mlp is not None:
                added_ND = self.drop_mlp(added_ND, drop_mlp)
            x_ND = self.add_mlp(x_ND, added_ND)
        return x_ND

    def shard_over(self, data: int, tensor: int, tokens: int) -> None:
        """Sets the strategies of semi-automatic mode, as Megatron-LM shards (Shoeybi et al. 2019, section 3).

        The first product of a pair is sharded along its outputs, the second along its inputs. Other operators are
        sharded along the batch, or like the columns of their input.

        Args:
            data: Ranks that shard the batch.
            tensor: Ranks that shard heads and columns.
            tokens: Ranks that shard the residual stream and its norms: `data`, or with sequence parallelism
                (Korthikanti et al. 2022, section 4.2) data * tensor.
        """
        row = (tokens, 1)
        rows = "data"
        if tokens > data:
            rows = "all"
        if self.has_attention:
            self.attention.shard_over(data, tensor, tokens)
            self.drop_attention.shard_over(data, tensor, rows)
            self.add_attention.shard((row, row))
        if self.has_mlp:
            self.mlp.shard_over(data, tensor, tokens)
            self.drop_mlp.shard_over(data, tensor, rows)
            self.add_mlp.shard((row, row))


class EmbeddingRows(nn.Cell):
    """(weight_VE, ids_N) -> x_NE, or those of its rows that the rank has.

    It is compiled like the other parts: outside of a graph, MindSpore compiles its gradient operator at each call.
    """

    def __init__(
        self, kernels: KernelSet, tensor: TensorParallel | None = None, part: VocabShard | None = None
    ) -> None:
        super().__init__()
        self.gather_rows = kernels.gather_rows
        if part is not None:
            self.gather_rows = kernels.vocabulary_rows(part)
        self.row_parallel_output = None if tensor is None else tensor.row_parallel_output()

    def construct(self, weight_VE: Tensor, ids_N: Tensor) -> Tensor:
        x_NE = self.gather_rows(weight_VE, ids_N)
        if self.row_parallel_output is None:
            return x_NE
        return self.row_parallel_output(x_NE)


class EmbeddingMapping(nn.Cell):
    """(x_NI, weight_OI) -> y_NO: from the width of the embedding to that of the residual stream, or back."""

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__()
        self.linear = kernels.linear()
        self.cast = P.Cast()

    def construct(self, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        return self.cast(self.linear(x_NI, weight_OI), x_NI.dtype)


class HeadInput(nn.Cell):
    """The input of the output projection: (x_ND, norm_E[, mapping_ED[, bias_E]]) -> normed x, [N, E].

    E is the width of the embedding: D, unless a matrix maps the residual stream to another width.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.column_parallel_input = None if tensor is None else tensor.column_parallel_input()
        self.norm = make_norm(kernels.rms_norm, settings.embedding_width, norm_spec(settings))
        self.maps = settings.maps_embedding
        self.mapping = EmbeddingMapping(kernels)
        self.factor = settings.logits_factor
        self.scale = P.Mul()

    def construct(
        self, x_ND: Tensor, norm_E: Tensor, mapping_ED: Tensor | None = None, bias_E: Tensor | None = None
    ) -> Tensor:
        x_NE = x_ND
        if self.maps:
            x_NE = self.mapping(x_ND, mapping_ED)
        if bias_E is None:
            y_NE = self.norm(x_NE, norm_E)
        else:
            y_NE = self.norm(x_NE, norm_E, bias_E)
        if self.factor != 1:
            y_NE = self.scale(y_NE, self.factor)  # logits are linear in it
        if self.column_parallel_input is None:
            return y_NE
        return self.column_parallel_input(y_NE)

    def shard_over(self, tokens: int) -> None:
        """Shards tokens over `tokens` ranks."""
        self.norm.shard_over(tokens)
        self.mapping.linear.shard_over(tokens)
        self.scale.shard(((tokens, 1), ()))


class Head(nn.Cell):
    """Final norm, output projection and cross entropy: (x_ND, norm_E, weight_VE, labels_N, valid_N1) -> loss sum.

    `mapping_ED` and `bias_E`, the last arguments, are there where `HeadInput` needs them; E is the width that it
    describes.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.normed = HeadInput(settings, kernels, tensor)
        self.cap = None
        if settings.final_logit_softcapping is not None:
            self.cap = kernels.soft_cap(settings.final_logit_softcapping, "dt")
        self.cross_entropy = kernels.cross_entropy(settings.vocab_size, cap=self.cap)

    def construct(
        self, x_ND: Tensor, norm_E: Tensor, weight_VE: Tensor, labels_N: Tensor, valid_N1: Tensor,
        mapping_ED: Tensor | None = None, bias_E: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.cross_entropy(self.normed(x_ND, norm_E, mapping_ED, bias_E), weight_VE, labels_N, valid_N1)


class MtpMerge(nn.Cell):
    """(embeddings of later tokens, residual stream, its norm, two norms, projection) -> input of a module's block."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        sizes = settings.hidden_size, settings.rms_norm_eps
        self.final_norm, self.embedding_norm, self.hidden_norm = (kernels.rms_norm(*sizes) for _ in range(3))
        self.concat = P.Concat(1)
        self.project = kernels.linear()
        self.cast = P.Cast()

    def construct(
        self, embedded_ND: Tensor, hidden_ND: Tensor, final_norm_D: Tensor, enorm_D: Tensor, hnorm_D: Tensor,
        weight_DC: Tensor,
    ) -> Tensor:  # fmt: skip
        known_ND = self.hidden_norm(self.final_norm(hidden_ND, final_norm_D), hnorm_D)
        both_NC = self.concat((self.embedding_norm(embedded_ND, enorm_D), known_ND))
        return self.cast(self.project(both_NC, weight_DC), hidden_ND.dtype)
