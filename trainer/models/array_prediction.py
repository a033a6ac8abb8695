"""Prediction on a CPU: the native layers of `trainer.arrays` for few new tokens, with a key/value cache.

Legend: B sequences, Q new tokens of each, N = B * Q, D hidden, E width of the embedding, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.attention.cache import KVCache, cached_mask
from trainer.arrays.attention.positions import Rotary
from trainer.arrays.attention.sublayer import CpuAttention
from trainer.arrays.memory import host_threads, parts
from trainer.arrays.mlp import CpuMlp
from trainer.arrays.moe.sublayer import CpuMoe
from trainer.arrays.sublayer import SublayerCall
from trainer.arrays.tiles import RmsNorm, Scratch
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import AttentionSpec, MlpSpec, MoeSpec
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD, MAPPING_IN, MAPPING_OUT, adapter_names
from trainer.ops.routing import RoutingRule
from trainer.parallel.sharding import range_of_rank

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder

_SHARED_WORK = 1 << 23  # multiplications of a layer from which threads share the sequences of a pass


class ArrayPredictor:
    """What a pass consists of: arrays go from part to part.

    Weights are read where the model has them, in float32; a matrix with an adapter has a merged copy. Ranks that share
    the model all have the same tokens. A tensor-parallel rank caches its own heads, and what its columns of a matrix
    give is summed; each rank has the logits of the whole vocabulary.
    """

    def __init__(self, model: Decoder, build_inputs: InputBuilder) -> None:
        host_threads()  # they limit the threads of NumPy's own library, which would poll between two products
        self.spec = model_spec(model.settings)
        self.settings = model.settings
        self.scratch = Scratch(shares_products=True)
        self.tensor = None
        self.vocabulary = model.settings.vocab_size
        self.is_sharded = model.shard is not None
        if model.tensor is not None:
            self.tensor = model.tensor._replace(shares_rows=False)
            self.vocabulary = model.shard.layout.parameters[EMBEDDING].shape[0]
        self.cos, self.sin = build_inputs.cos, build_inputs.sin
        self.rotary = Rotary(self.spec.layers[0].attention)
        self.weights = {name: parameter.asnumpy() for name, parameter in model.parameters_by_name.items()}
        self.norm = RmsNorm(self.spec.embedding, self.spec.eps)
        self.attentions: dict[AttentionSpec, CpuAttention] = {}
        self.mlps: dict[MlpSpec | MoeSpec, CpuMlp | CpuMoe] = {}
        experts = None if model.shard is None else model.shard.experts
        for layer in self.spec.layers:
            self._make_sublayers(layer.attention, layer.mlp, experts)
        layers = range(len(self.spec.layers) - self.spec.mtp_modules)
        self.calls = [SublayerCall(self._layer_weights(layer), save=False) for layer in layers]
        self.work = max((self._work_of(layer) for layer in layers), default=0)

    def _make_sublayers(self, attention: AttentionSpec, mlp: MlpSpec | MoeSpec, experts) -> None:
        if attention not in self.attentions:
            plain = replace(attention, adapters={})
            self.attentions[attention] = CpuAttention(plain, self.scratch, self.tensor, pairs=False)
        if mlp in self.mlps:
            return
        if isinstance(mlp, MoeSpec):
            rule = RoutingRule.of(self.settings.experts)
            self.mlps[mlp] = CpuMoe(
                mlp, self.settings.experts, rule, self.scratch, self.tensor, experts, predicts=True
            )
        else:
            self.mlps[mlp] = CpuMlp(replace(mlp, adapters={}), self.scratch, self.tensor)

    def _layer_weights(self, number: int) -> Mapping[str, np.ndarray]:
        layer = self.spec.layers[number]
        names = {one.name: self.spec.parameter_name(number, one.name) for one in layer.parameters}
        found = {name: self.weights[full] for name, full in names.items() if full in self.weights}
        adapters = {**layer.attention.adapters, **getattr(layer.mlp, "adapters", {})}
        for name, adapter in adapters.items():
            a, b = adapter_names(name)
            if f"{name}.weight" in found:
                found[f"{name}.weight"] = found[f"{name}.weight"] + (found[b] * np.float32(adapter.scale)) @ found[a]
        return found

    def _work_of(self, number: int) -> int:
        """Counts the multiplications of a token in a layer."""
        mlp = self.spec.layers[number].mlp
        sizes = {name: array.size for name, array in self.calls[number].weights.items() if array.ndim > 1}
        if isinstance(mlp, MoeSpec):
            sizes |= {name: size * mlp.chosen // mlp.experts for name, size in sizes.items() if ".experts." in name}
        return sum(sizes.values())

    def new_cache(self, rows: int, tokens: int) -> KVCache:
        """Returns an empty cache for so many sequences of so many tokens."""
        attention = self.spec.layers[0].attention
        heads = attention.kv_heads if attention.latent is None else 1
        return KVCache(len(self.calls), attention.cache_widths, heads, rows, tokens)

    def cached_length(self, positions: int) -> int:
        """Returns how many cached positions attention sees where it must see so many."""
        return positions

    def masks(self, allowed_BQS: np.ndarray) -> np.ndarray | None:
        """Returns what attention adds to its scores."""
        attention = self.spec.layers[0].attention
        kv_heads = attention.kv_heads if attention.latent is None else 1
        return cached_mask(allowed_BQS, attention.heads // kv_heads)

    def tables(self, positions_N: np.ndarray) -> np.ndarray:
        """Returns the rotation of tokens at these positions."""
        return self.rotary.table(self.cos[positions_N], self.sin[positions_N])

    def embed(self, ids_N: np.ndarray) -> np.ndarray:
        """Returns the residual stream of tokens, [N, D]."""
        embedding_VE = self.weights[EMBEDDING]
        if self.tensor is None:
            x_NE = embedding_VE[ids_N]
        else:
            group = self.tensor.group
            place_N = ids_N - range_of_rank(self.vocabulary, group.rank, group.size).start
            inside_N = (place_N >= 0) & (place_N < len(embedding_VE))
            x_NE = group.all_reduce(embedding_VE[np.where(inside_N, place_N, 0)] * inside_N[:, None])
        if MAPPING_IN not in self.weights:
            return x_NE
        return self._project(x_NE, self.weights[MAPPING_IN])

    def _project(self, x_NI: np.ndarray, weight_OI: np.ndarray) -> np.ndarray:
        out_NO = np.empty((len(x_NI), len(weight_OI)), np.float32)
        self.scratch.tile(slice(0, len(x_NI)), 0).project(x_NI, weight_OI, out_NO)
        return out_NO

    def run_layers(
        self, layers: Sequence[int], x_ND: np.ndarray, rotation_N1h: np.ndarray, masks: Sequence[np.ndarray | None],
        cache: KVCache,
    ) -> np.ndarray:  # fmt: skip
        """Returns the residual stream after layers that follow each other; `masks` are those without and with a window.

        Threads share the sequences, and go through all layers without waiting.
        """
        rows, threads = len(cache.positions_BQ), host_threads()
        # With less to compute, threads would wait for each other: only one at a time is in Python.
        if self.is_sharded or rows == 1 or len(x_ND) * self.work < _SHARED_WORK:
            return self._run_layers(layers, x_ND, rotation_N1h, masks, cache, 0)
        out_ND = np.empty_like(x_ND)
        width = len(x_ND) // rows

        def run(part: slice, thread: int) -> None:
            tokens = slice(part.start * width, part.stop * width)
            of_part = [mask if mask is None else mask[part] for mask in masks]
            inputs = x_ND[tokens], rotation_N1h[tokens], of_part, cache.part(part)
            out_ND[tokens] = self._run_layers(layers, *inputs, thread)

        threads.run(parts(slice(0, rows), -(-rows // threads.threads)), run)
        return out_ND

    def _run_layers(
        self, layers: Sequence[int], x_ND: np.ndarray, rotation_N1h: np.ndarray, masks: Sequence[np.ndarray | None],
        cache: KVCache, thread: int,
    ) -> np.ndarray:  # fmt: skip
        rows = slice(0, len(x_ND))
        for layer in layers:
            spec, call = self.spec.layers[layer], self.calls[layer]
            mask = masks[spec.attention.window is not None]
            attention, mlp = self.attentions[spec.attention], self.mlps[spec.mlp]
            x_ND = attention.predict(call, x_ND, rotation_N1h, layer, cache, mask, self.scratch.tile(rows, thread))
            x_ND = mlp.predict(call, x_ND, thread)
        return x_ND

    def logits(self, x_ND: np.ndarray, ends_B: np.ndarray) -> np.ndarray:
        """Returns the logits after the tokens `ends`, [B, all tokens]."""
        x_BE = x_ND[ends_B]
        if MAPPING_OUT in self.weights:
            x_BE = self._project(x_BE, self.weights[MAPPING_OUT])
        y_BE = np.empty_like(x_BE)
        self.norm(x_BE, self.weights[FINAL_NORM], self.norm.scales(x_BE), y_BE)
        local_BV = self._project(y_BE, self.weights[EMBEDDING if self.spec.tied else HEAD])
        if self.tensor is None:
            return local_BV
        group = self.tensor.group
        logits_BV = np.empty((len(local_BV), self.vocabulary), np.float32)
        logits_BV[:, range_of_rank(self.vocabulary, group.rank, group.size)] = local_BV
        group.complete_ranges(list(logits_BV))
        return logits_BV
