"""The parts of a decoder on a CPU: native CPU layers (`trainer.arrays`) for training, evaluation and prediction.

`DecoderForward` calls them. They take the parameters of the model themselves.

Legend: B sequences of T tokens, N tokens of a rank, D hidden, E width of the embedding, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from trainer.arrays.attention.cache import KVCache, cached_bias
from trainer.arrays.attention.context import ContextParallel
from trainer.arrays.attention.sublayer import CpuAttention
from trainer.arrays.memory import host_array, host_threads, row_blocks
from trainer.arrays.mlp import CpuMlp
from trainer.arrays.moe.dispatch import TokenSharingGroup
from trainer.arrays.moe.router import RouterLabels
from trainer.arrays.moe.sublayer import CpuMoe, MoeInputs
from trainer.arrays.operators import operators
from trainer.arrays.passes import (
    BlockPart,
    ExpertsPart,
    ParallelBlockPart,
    PartWeights,
    Variable,
    keep_sharding,
    run_part,
)
from trainer.arrays.tiles import ReusedMemory, Scratch, SublayerCall
from trainer.arrays.vocabulary.embedding import CpuEmbedding, CpuMapping, CpuMerge
from trainer.arrays.vocabulary.head import FusedLinearCrossEntropy
from trainer.arrays.vocabulary.head_adapter import LORA_A, LORA_B
from trainer.arrays.vocabulary.loss_terms import find_terms
from trainer.arrays.vocabulary.score import ScoreHead
from trainer.config.recompute import SUBLAYERS
from trainer.models.dropout import embedding_noise
from trainer.models.inputs import ModelInputs, MtpInputs, PredictionCall
from trainer.models.spec.adapters import merged_matrix, with_magnitudes
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import AttentionSpec, MlpSpec, MoeSpec
from trainer.models.spec.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MAPPING_IN,
    MAPPING_OUT,
    MTP_NORM,
    MTP_WEIGHTS,
    adapter_names,
    layer_prefix,
    magnitude_name,
    norm_bias,
    sublayer_of,
)
from trainer.models.spec.sublayers import moe_config
from trainer.ops.routing import RoutingRule
from trainer.parallel.sharding import shard_range
from trainer.storage.quantized import FrozenMatrix

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

    from trainer.arrays.passes import DecoderPart, Tape
    from trainer.arrays.vocabulary.distillation import WriteLogits
    from trainer.config.schema.model import ModelConfig
    from trainer.models.compute_weights import ModelParams
    from trainer.models.dropout import DropoutShards
    from trainer.models.inputs import DecoderCall
    from trainer.models.spec.model import LayerSpec
    from trainer.parallel.collectives import ProcessGroup
    from trainer.parallel.host_group import CpuGroup
    from trainer.parallel.tensor import RankModelShard


_SHARED_WORK = 1 << 23  # multiplications of a layer from which threads share the sequences of a pass


class ArrayParts:
    """Embedding, layers, merges and heads of a decoder.

    Args:
        dtype: Dtype of the products: "float32", "bfloat16" or "float16".
        parameters: By their full names; a pipeline stage lacks those of the other stages.
        weights: None in a prediction.
        recomputed: For each layer, including those of MTP modules, what the backward pass recomputes: "block",
            "attention", "mlp" or "".
        trained: Full names of the trained weights, of all stages of a pipeline.
        dropout: None in a prediction.
    """

    def __init__(
        self, settings: ModelConfig, dtype: str, parameters: Mapping[str, Parameter], weights: ModelParams | None,
        recomputed: Sequence[str], trained: Collection[str], dropout: DropoutShards | None,
        shard: RankModelShard | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        tensor = None
        if shard is not None:
            tensor = shard.tensor
        self.spec = model_spec(settings)
        if tensor is not None:
            self.spec = self.spec.local(tensor.group.size, tensor.group.rank)
        self.dtype = dtype
        self.parameters = parameters
        self.in_few_bytes = any(isinstance(each, FrozenMatrix) for each in parameters.values())
        self.dropout = dropout
        self.predicts = weights is None
        self.unsharded = keep_sharding
        if weights is not None:
            self.unsharded = weights.unsharded
        memory = None
        if self.in_few_bytes and not self.predicts:  # a prediction may keep decompressed matrices
            memory = ReusedMemory()
        self.scratch = Scratch(self.predicts, memory)
        self.vocabulary = settings.vocab_size
        self.is_sharded = shard is not None
        self.context = None
        if tensor is not None and self.predicts:
            tensor = tensor._replace(sequence_parallel=False)
        elif shard is not None and shard.tokens.ranks > 1:
            self.context = ContextParallel(shard.tokens, _cpu_group(shard.ring), _cpu_group(shard.ulysses))
        self.tensor = tensor
        self.attentions: dict[AttentionSpec, CpuAttention] = {}
        self.mlps: dict[MlpSpec, CpuMlp] = {}
        self.experts = _Experts(settings, self.spec.layers, self.scratch, shard, self.predicts)
        embedding_name, head_name = (name.removesuffix(".weight") for name in (EMBEDDING, HEAD))
        self.embedding = CpuEmbedding(tensor, self.vocabulary, self.spec.adapters.get(embedding_name))
        self.mapping = CpuMapping(self.scratch)
        self.merge = CpuMerge(self.spec.hidden, self.spec.norm, self.scratch)
        self.head: FusedLinearCrossEntropy | ScoreHead = FusedLinearCrossEntropy(
            self.spec.embedding, self.spec.norm, self.scratch, tensor, self.vocabulary, settings.logits_factor,
            settings.final_logit_softcapping, self.spec.adapters.get(head_name),
        )  # fmt: skip
        narrow = ["weight", "mapping"]
        if self.spec.has_score:
            self.head = ScoreHead(self.spec.embedding, self.spec.norm, self.scratch)
            narrow = ["mapping"]
        embedding_names = (EMBEDDING, *adapter_names(embedding_name))
        self.embedding_weights = self._part({name: name for name in embedding_names}, narrow=[], by_rows=[EMBEDDING])
        self.mapping_weights = self._part({MAPPING_IN: MAPPING_IN}, narrow=[MAPPING_IN])
        self.layers = [self._layer_parts(number, again) for number, again in enumerate(recomputed)]
        self.first_reached = self.spec.first_reached(trained)
        self.save = self._saving(recomputed)
        modules = self.spec.module_layers
        self.norms = [FINAL_NORM, *(layer_prefix(layer) + MTP_NORM for layer in modules)]
        lora = dict(zip((LORA_A, LORA_B), adapter_names(head_name), strict=True))
        names = {"weight": self.spec.head, "mapping": MAPPING_OUT, **lora}
        self.heads = [
            self._part(
                {"norm": norm, norm_bias("norm"): norm_bias(norm), **names}, [*narrow, *lora], by_rows=["weight"]
            )
            for norm in self.norms
        ]
        self.merges = [
            self._part(
                {"norm": self.norms[number], **{name: layer_prefix(layer) + name for name in MTP_WEIGHTS}},
                narrow=["eh_proj.weight"],
            )
            for number, layer in enumerate(modules)
        ]  # fmt: skip

    def _part(self, names: Mapping[str, str], narrow: Collection[str], by_rows: Collection[str] = ()) -> PartWeights:
        """Returns the weights of a part that this rank has; `names` maps names in the part to full names."""
        named = {name: self.parameters[full] for name, full in names.items() if full in self.parameters}
        centered: list[str] = []
        if self.spec.norm.offset:
            centered = [name for name in named if name == "norm" or name.endswith("norm.weight")]
        return PartWeights(named, self.dtype, narrow, self.unsharded, centered, by_rows, self.scratch)

    def _layer_parts(self, number: int, again: str) -> dict[str, PartWeights]:
        """Returns the weights of the parts of a layer, in order.

        The parts are "block", or the sublayers where one of them is recomputed or has experts. A layer of another
        pipeline stage has none.
        """
        layer = self.spec.layers[number]
        names = {spec.name: self.spec.parameter_name(number, spec.name) for spec in layer.parameters}
        names = {name: full for name, full in names.items() if full in self.parameters and name not in _MODULE_NAMES}
        if not names:
            return {}
        narrow = [spec.name for spec in layer.parameters if spec.role in ("matrix", "adapter") and len(spec.shape) == 2]
        sublayers: tuple[str, ...] = ("block",)
        if isinstance(layer.mlp, MoeSpec):
            sublayers = ("attention", "experts")
        elif again in SUBLAYERS:
            sublayers = SUBLAYERS
        weights = {}
        for part in sublayers:
            sublayer = part
            if part == "experts":
                sublayer = "mlp"
            part_names = {
                name: full for name, full in names.items() if part == "block" or sublayer_of(name) == sublayer
            }
            weights[part] = self._part(part_names, narrow)
        return weights

    def _saving(self, recomputed: Sequence[str]) -> list[dict[str, bool]]:
        """Returns whether the parts of each layer save arrays for the backward pass."""
        saving = []
        for number, (layer_parts, again) in enumerate(zip(self.layers, recomputed, strict=True)):
            reached = number >= self.first_reached
            recomputed_part = again
            if again == "mlp" and "experts" in layer_parts:
                recomputed_part = "experts"
            saving.append({name: reached and recomputed_part not in ("block", name) for name in layer_parts})
        return saving

    def attention_of(self, spec: AttentionSpec) -> CpuAttention:
        """Returns the functions of the layers with this attention."""
        if spec not in self.attentions:
            merged = spec
            if self.predicts:
                merged = replace(spec, adapters={})
            self.attentions[spec] = CpuAttention(merged, self.scratch, self.tensor, self.context)
        return self.attentions[spec]

    def mlp_of(self, spec: MlpSpec | MoeSpec) -> CpuMlp | CpuMoe:
        """Returns the functions of the layers with this feed-forward sublayer."""
        if isinstance(spec, MoeSpec):
            assert self.experts.moe is not None
            return self.experts.moe
        return self.dense_mlp_of(spec)

    def dense_mlp_of(self, spec: MlpSpec) -> CpuMlp:
        """Returns the functions of the layers with this feed-forward sublayer, which has no experts."""
        if spec not in self.mlps:
            merged = spec
            if self.predicts:
                merged = replace(spec, adapters={})
            self.mlps[spec] = CpuMlp(merged, self.scratch, self.tensor)
        return self.mlps[spec]

    def run_embedding(self, ids_N: Tensor, call: DecoderCall) -> Variable:
        """Returns the residual stream of tokens, [N, D], in a training with the noise of NEFTune."""
        assert self.dropout is not None
        noise_NE = embedding_noise(self.dropout, call.dropout, call.inputs, self.spec.embedding)
        return self._embed(ids_N, noise_NE, call.tape)

    def _embed(self, ids_N: Tensor, noise_NE: np.ndarray | None, tape: Tape | None) -> Variable:
        """Returns the residual stream of tokens, [N, D], from the sum of their embeddings and the noise."""
        [x_NE] = run_part(self.embedding, self.embedding_weights, (), (ids_N.asnumpy(),), tape=tape)
        if noise_NE is not None:
            x_NE.array += noise_NE
        if not self.mapping_weights.named:
            return x_NE
        [x_ND] = run_part(self.mapping, self.mapping_weights, (x_NE,), tape=tape)
        return x_ND

    def run_layer(
        self, number: int, x_ND: Variable, call: DecoderCall
    ) -> tuple[Variable, Variable | None, Variable | None]:
        """Returns the residual stream after a layer, and the auxiliary loss and z-loss of its router, if it has one."""
        spec = self.spec.layers[number]
        statistics = call.statistics
        assert self.dropout is not None
        dropout = self.dropout.layer_dropout(spec, number, call.dropout, call.inputs)
        aux_loss = z_loss = None
        observer = call.observer
        on_saved = None
        if observer is not None:
            x_ND = observer.stream(number, "input", x_ND)
            on_saved = functools.partial(observer.saved, number)
        for name, weights in self.layers[number].items():
            save = statistics is not None and self.save[number][name]
            run = functools.partial(run_part, tape=call.tape, save=save, dropout=dropout, on_saved=on_saved)
            if isinstance(spec.mlp, MoeSpec) and name == "experts":
                moe = self.experts.moe
                assert moe is not None
                experts = ExpertsPart(moe, self.experts.inputs(number, len(x_ND.array), call))
                x_ND, *losses = run(experts, weights, (x_ND,))
                if statistics is not None:
                    aux_loss, z_loss = losses
                    statistics.routings.append((number, experts.routing, experts.scores_NE))
            elif name == "mlp":
                assert isinstance(spec.mlp, MlpSpec)
                mlp = self.dense_mlp_of(spec.mlp)
                [x_ND] = run(mlp, weights, (x_ND,))
            else:
                attention = self.attention_of(spec.attention)
                part: DecoderPart = attention
                if name == "block" and isinstance(spec.mlp, MlpSpec):
                    make: type[BlockPart] = BlockPart
                    if spec.mlp.is_parallel:
                        make = ParallelBlockPart
                    part = make(attention, self.dense_mlp_of(spec.mlp))
                max_logits = None
                if statistics is not None:
                    max_logits = statistics.max_logits.get(number)
                [x_ND] = run(part, weights, (x_ND,), (call.inputs.positions,), max_logits=max_logits)
            if observer is not None:
                x_ND = observer.stream(number, name, x_ND)
        return x_ND, aux_loss, z_loss

    def run_merge(self, module: int, x_ND: Variable, call: DecoderCall) -> Variable:
        """Returns the input of the block of an MTP module, [N, D]."""
        embedded_ND = self._embed(call.inputs.mtp[module].ids_N, None, call.tape)
        [merged_ND] = run_part(self.merge, self.merges[module], (embedded_ND, x_ND), tape=call.tape)
        return merged_ND

    def run_head(self, number: int, x_ND: Variable, call: DecoderCall) -> Variable:
        """Returns the sum of token losses of the main model (number 0) or of the MTP module `number - 1`."""
        labels: ModelInputs | MtpInputs = call.inputs
        if number:
            labels = call.inputs.mtp[number - 1]
        terms = None
        if call.statistics is not None and not number:
            terms = find_terms(self.settings)
            call.statistics.terms = terms
        distillation = None
        if not number:
            distillation = call.inputs.distillation
        arrays = labels.labels_N.asnumpy(), host_array(labels.valid_N1), call.inputs.pairs, terms, distillation
        save = call.statistics is not None
        [loss] = run_part(self.head, self.heads[number], (x_ND,), arrays, tape=call.tape, save=save)
        if call.observer is not None:
            call.observer.loss(number, loss)
        return loss

    def logits(self, x_ND: Variable) -> Variable:
        """Returns the logits of a residual stream after the last layer, [N, V], of all ranks."""
        return Variable(self.logits_of_rows(x_ND.asnumpy()))

    def logits_of_rows(self, x_nD: np.ndarray) -> np.ndarray:
        """Returns the logits of some rows of a residual stream after the last layer, [n, V], of all ranks."""
        return self._logits(SublayerCall(self.heads[0].arrays()), x_nD)

    def logits_by_rows(self, x_ND: Variable) -> WriteLogits:
        """Returns a function that computes the logits of some rows of a residual stream after the last layer."""
        return self.head.logits_by_rows(SublayerCall(self.heads[0].arrays(), save=False), x_ND.asnumpy())

    def scores(self, x_ND: Variable, last_A: np.ndarray) -> np.ndarray:
        """Returns a reward model's scores of the answers that end with these tokens, float64 [A]."""
        assert isinstance(self.head, ScoreHead), "a language model gives no scores"
        return self.head.scores(SublayerCall(self.heads[0].arrays(), save=False), x_ND.asnumpy(), last_A)

    def _logits(self, call: SublayerCall, x_ND: np.ndarray) -> np.ndarray:
        local_NV = self.head.logits(call, x_ND)
        if self.tensor is None:
            return local_NV
        group = cast("CpuGroup", self.tensor.group)
        logits_NV = np.empty((len(local_NV), self.vocabulary), np.float32)
        logits_NV[:, shard_range(self.vocabulary, group.rank, group.size)] = local_NV
        group.complete_ranges(list(logits_NV))
        return logits_NV

    # Prediction, only for the parts that `prediction_parts` makes.

    @functools.cached_property
    def merged_calls(self) -> list[SublayerCall]:
        """Returns a call of each layer with its weights, which are not copied; adapters are merged into copies."""
        return [self._merged_call(number) for number in range(self.spec.num_layers)]

    def prediction_call(self, layer: int) -> SublayerCall:
        """Returns a call of a layer with its weights. Those in few bytes are decompressed for this call alone."""
        if self.in_few_bytes:
            return self._merged_call(layer)
        return self.merged_calls[layer]

    def _merged_call(self, layer: int) -> SublayerCall:
        return SublayerCall(self._merged_weights(layer), save=False)

    @functools.cached_property
    def layer_functions(self) -> list[tuple[CpuAttention, CpuMlp | CpuMoe]]:
        """Returns the functions of the sublayers of each layer."""
        layers = self.spec.layers[: self.spec.num_layers]
        return [(self.attention_of(layer.attention), self.mlp_of(layer.mlp)) for layer in layers]

    @functools.cached_property
    def outer_call(self) -> SublayerCall:
        """Returns a call with the weights of the embedding, its mapping and the head."""
        weights: dict[str, np.ndarray] = {}
        for part in (self.embedding_weights, self.mapping_weights, self.heads[0]):
            weights |= part.arrays()
        return SublayerCall(weights, save=False)

    def _merged_weights(self, number: int) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for weights in self.layers[number].values():
            arrays |= weights.arrays()
        for name, adapter in self.spec.layers[number].adapters.items():
            matrix = f"{name}.weight"
            if matrix in arrays:
                a, b = adapter_names(name)
                if self.in_few_bytes:  # the decompressed matrix is this call's own
                    operators().matmul(arrays[b] * np.float32(adapter.scale), arrays[a], arrays[matrix], True)
                else:
                    arrays[matrix] = merged_matrix(arrays[matrix], arrays[a], arrays[b], adapter.scale)
                if adapter.has_magnitude:
                    arrays[matrix] = with_magnitudes(arrays[matrix], arrays[magnitude_name(name)])
        return arrays

    @functools.cached_property
    def multiplications(self) -> int:
        """Returns the multiplications of a token in the largest layer."""
        layers = self.spec.layers[: self.spec.num_layers]
        sizes = [sum(layer.active_size(spec) for spec in layer.parameters if len(spec.shape) > 1) for layer in layers]
        return max(sizes, default=0)

    def new_cache(self, rows: int, tokens: int) -> KVCache:
        """Returns an empty cache for `rows` sequences of `tokens` tokens."""
        attention = self.spec.layers[0].attention
        return KVCache(self.spec.num_layers, attention.cache_widths, attention.cache_heads, rows, tokens)

    def cached_length(self, positions: int) -> int:
        """Returns how many cached positions attention reads if a query sees `positions` of them."""
        return positions

    def cached_mask(self, visible_BQS: np.ndarray) -> np.ndarray | None:
        """Returns the term that attention adds to its scores, from which keys each query sees; None: all keys."""
        attention = self.spec.layers[0].attention
        return cached_bias(visible_BQS, attention.heads // attention.cache_heads)

    def embed_tokens(self, ids_N: np.ndarray) -> np.ndarray:
        """Returns the residual stream of tokens of the vocabulary, [N, D]."""
        x_NE = np.empty((len(ids_N), self.spec.embedding), np.float32)
        x_NE = self.embedding.look_up(self.outer_call.weights, ids_N, x_NE)
        if not self.mapping_weights.named:
            return x_NE
        x_ND = np.empty((len(ids_N), self.spec.hidden), np.float32)
        self.mapping.map_rows(self.outer_call, x_NE, x_ND)
        return x_ND

    def predict_layers(self, layers: Sequence[int], x_ND: np.ndarray, call: PredictionCall) -> np.ndarray:
        """Returns the residual stream [N, D] after consecutive layers, for new tokens of a prediction.

        Threads share the sequences, and go through all layers without waiting.
        """
        rows = len(call.cache.positions_BQ)
        threads = host_threads()
        # With less to compute, threads would wait for each other: only one at a time runs Python.
        # Weights in few bytes are decompressed once for all sequences.
        one_thread = self.is_sharded or rows == 1 or self.in_few_bytes
        if one_thread or len(x_ND) * self.multiplications < _SHARED_WORK:
            return self._predict_layers(layers, x_ND, call, 0)
        out_ND = np.empty_like(x_ND)
        width = len(x_ND) // rows

        def run(sequences: slice, thread: int) -> None:
            """Runs the layers on some of the sequences, with their tables, masks and cache."""
            tokens = slice(sequences.start * width, sequences.stop * width)
            masks = [mask if mask is None else mask[sequences] for mask in call.masks]
            thread_call = PredictionCall([table[tokens] for table in call.tables], masks, call.cache.select(sequences))
            out_ND[tokens] = self._predict_layers(layers, x_ND[tokens], thread_call, thread)

        threads.run(row_blocks(slice(0, rows), -(-rows // threads.threads)), run)
        return out_ND

    def _predict_layers(self, layers: Sequence[int], x_ND: np.ndarray, call: PredictionCall, thread: int) -> np.ndarray:
        rows = slice(0, len(x_ND))
        for layer in layers:
            weights = self.prediction_call(layer)
            attention, mlp = self.layer_functions[layer]
            has_window = attention.spec.window is not None
            mask = call.masks[has_window]
            rotation_N1h = call.tables[0]
            if has_window:
                rotation_N1h = call.tables[-1]
            tile = self.scratch.tile(rows, thread)
            stream_ND = attention.predict(weights, x_ND, rotation_N1h, layer, call.cache, mask, tile)
            if isinstance(mlp, CpuMlp) and mlp.spec.is_parallel:
                x_ND = mlp.predict(weights, x_ND, thread, stream_ND)
            else:
                x_ND = mlp.predict(weights, stream_ND, thread)
        return x_ND

    def predict_logits(self, x_ND: np.ndarray, ends_B: np.ndarray) -> np.ndarray:
        """Returns the logits [B, V] after the tokens in the rows `ends_B`."""
        return self._logits(self.outer_call, x_ND[ends_B])


def prediction_parts(
    settings: ModelConfig, parameters: Mapping[str, Parameter], shard: RankModelShard | None
) -> ArrayParts:
    """Returns the parts of a decoder for a prediction in float32, for any model.

    Ranks that share the model all have the same tokens. A tensor-parallel rank caches the keys and values of its heads,
    the ranks sum the products of their columns, and each rank has the logits of the full vocabulary.
    """
    host_threads()  # limits the threads of NumPy's BLAS library, which would poll between two products
    layers = len(model_spec(settings).layers)
    return ArrayParts(settings, "float32", parameters, None, [""] * layers, (), None, shard)


_MODULE_NAMES = frozenset((*MTP_WEIGHTS, MTP_NORM))


def _cpu_group(group: ProcessGroup | None) -> CpuGroup | None:
    return cast("CpuGroup | None", group)


class _Experts:
    """The feed-forward sublayer of all MoE layers, and the inputs of its calls."""

    def __init__(
        self, settings: ModelConfig, layers: Sequence[LayerSpec], scratch: Scratch, shard: RankModelShard | None,
        predicts: bool,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.token_ranks: TokenSharingGroup | None = None
        self.sharing = 1  # ranks that have other rows of the residual stream
        self.moe: CpuMoe | None = None
        spec = next((layer.mlp for layer in layers if isinstance(layer.mlp, MoeSpec)), None)
        if spec is None:
            return
        tensor = experts = None
        if shard is not None:
            tensor = shard.tensor
            experts = shard.experts
            if tensor is not None and predicts:
                tensor = tensor._replace(sequence_parallel=False)
            if shard.sharing is not None:
                self.token_ranks = TokenSharingGroup(cast("CpuGroup", shard.sharing), shard.tokens)
                self.sharing = shard.sharing.size
            if tensor is not None and not tensor.sequence_parallel:
                self.sharing //= tensor.group.size
        moe = moe_config(settings)
        self.moe = CpuMoe(spec, moe, RoutingRule.from_config(moe), scratch, tensor, _cpu_group(experts), predicts)

    def inputs(self, layer: int, tokens: int, call: DecoderCall) -> MoeInputs:
        """Returns the inputs of a call of a layer; an evaluation has neither a capacity nor losses."""
        statistics = call.statistics
        if statistics is None:
            return MoeInputs()
        weights = call.inputs.sequence_weights
        assert weights is not None
        tokens_B1 = weights.tokens_B1.asnumpy()
        valid_N1 = weights.valid_N1.asnumpy()
        shared = None
        if self.token_ranks is not None:
            shared = self.token_ranks.shared_tokens(len(tokens_B1), len(valid_N1))
        shares = None
        if statistics.load is not None:
            shares = statistics.load.layer_load(layer)
        capacity = moe_config(self.settings).capacity(tokens * self.sharing)
        return MoeInputs(RouterLabels(tokens_B1, valid_N1, shared), capacity, shares)
