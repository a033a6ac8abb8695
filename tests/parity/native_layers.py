"""Sublayers of native CPU layers with small inputs, and what they compute as formulas, whose derivatives are exact.

The derivatives are complex steps: f(x + ih) has the derivative of f as its imaginary part over h, without cancellation
(Squire and Trapp 1998). Dropout masks come from `trainer.ops.dropout.dropout_mask`, which draws them as a whole.

Limits: tolerances.py, of the longest path. As in test_kernels.py, the gradient of a softmax cancels: `scale` is 3.

Legend: N tokens (B sequences x T), D hidden, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy_kernels
from decoder_settings import decoder_settings
from numpy_kernels import assert_close, distance
from tolerances import rounding_limit

from trainer.arrays.attention import positions
from trainer.arrays.attention.sublayer import CpuAttention
from trainer.arrays.dropout import DropoutSite, LayerDropout
from trainer.arrays.mlp import CpuMlp
from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.build import dropout_sites, model_spec
from trainer.models.spec.model import AdapterSpec, AttentionSpec, LayerSpec, MlpSpec
from trainer.models.spec.names import (
    INPUT_NORM,
    MLP_NORM,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    adapter_names,
    sublayer_of,
)
from trainer.models.spec.saved import attention_saved, mlp_saved
from trainer.ops.dropout import DropoutKey, dropout_mask

HIDDEN, HEADS, SIZE, WIDTH, VOCABULARY = 6, 4, 4, 9, 11
KEY = DropoutKey(seed=3, rank=0, step=1, micro_batch=2)
Arrays = Mapping[str, np.ndarray]


settings_of = functools.partial(
    decoder_settings, num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, n_kv_heads=2, head_dim=SIZE,
    intermediate_size=WIDTH, vocab_size=VOCABULARY, seq_length=16, rms_norm_eps=1e-3,
)  # fmt: skip


def normal(random: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (random.standard_normal(shape) * scale).astype(np.float32)


def derivatives(
    function: Callable[..., np.ndarray], arguments: Arrays, upstream: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the derivatives of sum(function(**arguments) * upstream), which is analytic, with respect to each
    argument."""
    step, found = 1e-30, {}
    given = {name: array.astype(complex) for name, array in arguments.items()}
    for name, array in given.items():
        found[name] = np.empty(array.shape)
        for place in np.ndindex(*array.shape):
            array[place] += 1j * step
            found[name][place] = (function(**given) * upstream).sum().imag / step
            array[place] = array[place].real
    return found


@dataclass(frozen=True)
class Case:
    """A part of a model with its inputs and weights, and what it computes of them as a formula.

    Attributes:
        x_ND: Its input; None where it has none.
        formula: (x=, **weights) -> result, of float64 or complex arrays.
        terms: Operations on the longest path of a forward pass.
        masks: The factors of dropout by the name of their site, which the formula takes, and `dropout` draws.
    """

    x_ND: np.ndarray | None
    upstream_ND: np.ndarray
    weights: dict[str, np.ndarray]
    formula: Callable[..., np.ndarray]
    terms: int
    settings: ModelConfig | None = None
    layer: LayerSpec | None = None
    sequences: Sequences | None = None
    dropout: LayerDropout | None = None
    masks: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, np.ndarray]:
        return self.weights if self.x_ND is None else {"x": self.x_ND, **self.weights}

    @functools.cached_property
    def result(self) -> np.ndarray:
        return self.formula(**{name: array.astype(np.float64) for name, array in self.arguments.items()})

    @functools.cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        return derivatives(self.formula, self.arguments, self.upstream_ND)

    def check_result(self, result: np.ndarray) -> None:
        assert distance(result, self.result) <= rounding_limit(self.terms)

    def check_gradients(self, found: Mapping[str, np.ndarray]) -> None:
        """Compares gradients; `found` has those of x and of all weights."""
        right, rows = self.gradients, len(self.upstream_ND if self.x_ND is None else self.x_ND)
        terms = 2 * (self.terms + rows)
        assert_close(found, right, rounding_limit(terms, scale=3))

    def call(self, trained: Iterable[str] | None = None, **options: Any) -> SublayerCall:
        """Returns a pass of a sublayer, a backward pass of all weights where they are not named."""
        names = self.weights if trained is None else trained
        return SublayerCall(self.weights, dropout=self.dropout, trained=names, **options)

    def sublayer(
        self, scratch: Scratch | None = None, layer: LayerSpec | None = None, tensor: Any = None
    ) -> Sublayer:
        """Returns what computes it; `layer` is the part of a tensor-parallel rank."""
        layer, scratch = layer or self.layer, scratch or Scratch()
        if self.sequences is None:
            return Sublayer(CpuMlp(layer.mlp, scratch, tensor), ())
        return Sublayer(CpuAttention(layer.attention, scratch, tensor), (self.sequences.positions,))


class Sublayer(NamedTuple):
    """Attention or a feed-forward layer, called alike: attention also takes where the tokens stand."""

    part: CpuAttention | CpuMlp
    place: tuple[positions.TokenPositions, ...]

    def forward(self, call: SublayerCall, x_ND: np.ndarray) -> np.ndarray:
        return self.part.forward(call, x_ND, *self.place)

    def backward(self, call: SublayerCall, x_ND: np.ndarray, upstream_ND: np.ndarray) -> tuple[np.ndarray, dict]:
        return self.part.backward(call, x_ND, *self.place, upstream_ND)

    def check_saved(
        self, saved: Arrays, tokens: int, stream: int, dtype: type = np.float32, **ranks: bool
    ) -> None:
        """Checks that a forward pass keeps what the description lists: names, shapes and dtypes."""
        rows = dict.fromkeys(("tokens", "queries", "keys"), tokens) | {"stream": stream}
        listed = (attention_saved if self.place else mlp_saved)(self.part.spec, **ranks)
        expected = {
            one.name: ((rows[one.rows], one.width), np.dtype(dtype if one.narrow else np.float32)) for one in listed
        }
        assert {name: (array.shape, array.dtype) for name, array in saved.items()} == expected


class Sequences(NamedTuple):
    """Where the tokens of some sequences stand, for the layer and for the formulas."""

    segments_BT: np.ndarray
    cos_Nd: np.ndarray
    sin_Nd: np.ndarray
    positions: positions.TokenPositions

    def allowed(self, window: int | None) -> np.ndarray:
        """Returns which keys each query sees, [B, T, T]."""
        tokens = np.arange(self.segments_BT.shape[1])
        apart_QS = tokens[:, None] - tokens[None]
        seen_QS = (apart_QS >= 0) & (apart_QS < (window or 1000))
        return seen_QS & (self.segments_BT[:, :, None] == self.segments_BT[:, None, :])


def sequences_of(spec: AttentionSpec, segments: Sequence[Sequence[int]], random: np.random.Generator) -> Sequences:
    segments_BT = np.array(segments)
    angles = normal(random, segments_BT.size, spec.rotary_size // 2, scale=2).astype(np.float64)
    both = np.repeat(angles, 2, axis=1) if spec.rotary_interleaved else np.concatenate((angles, angles), 1)
    cos_Nd, sin_Nd = np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)
    table_N1h = positions.CpuRotary(spec).table(cos_Nd, sin_Nd)
    blocks, window_blocks = (positions.query_blocks(segments_BT, window) for window in (None, spec.window))
    return Sequences(segments_BT, cos_Nd, sin_Nd, positions.TokenPositions(table_N1h, blocks, window_blocks))


def weights_of(layer: LayerSpec, sublayer: str, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Draws weights of "attention" or "mlp". Norms are around 1 and adapters small: in a softmax with one large
    probability everything cancels."""
    found = {}
    for one in layer.parameters:
        if sublayer_of(one.name) == sublayer:
            scale = one.shape[-1] ** -0.5 if one.role != "adapter" and len(one.shape) > 1 else 0.3
            found[one.name] = normal(random, *one.shape, scale=scale) + (one.role == "norm")
    return found


def dropping(
    settings: ModelConfig, layer: LayerSpec, rows: int, sequences: int
) -> tuple[LayerDropout, dict[str, np.ndarray]]:
    """Returns what draws the masks of a layer, and the factors of all sites with a rate: [N, width], and for
    "probabilities" [B, H, T, T]."""
    numbers, spec = dropout_sites(settings, 0), layer.attention
    adapters = {**spec.adapters, **getattr(layer.mlp, "adapters", {})}
    widths = {one.name: one.shape[-1] for one in layer.parameters}
    rates = dict.fromkeys(("attention_output", "mlp_output"), (spec.output_dropout, spec.hidden))
    rates |= {name: (adapter.dropout, widths[f"{name}.weight"]) for name, adapter in adapters.items()}
    sites = {name: DropoutSite(numbers[name], *one) for name, one in rates.items()}
    masks = {
        name: dropout_mask(KEY, numbers[name], (rows, width), rate) for name, (rate, width) in rates.items() if rate
    }
    if spec.dropout:
        masks["probabilities"] = probabilities_mask(spec, numbers["probabilities"], sequences, rows // sequences)
    return LayerDropout(KEY, sites, (numbers["probabilities"], spec.dropout)), masks


def probabilities_mask(spec: AttentionSpec, site: int, sequences: int, length: int) -> np.ndarray:
    """Returns the factors of attention probabilities, [B, H, T, T]."""
    kv_heads, groups = spec.kv_heads, spec.heads // spec.kv_heads
    mask = dropout_mask(KEY, site, (sequences * kv_heads, length * groups, length), spec.dropout)
    by_head = mask.reshape(sequences, kv_heads, length, groups, length).swapaxes(2, 3)
    return by_head.reshape(sequences, spec.heads, length, length)


def linear_formula(
    name: str, x: np.ndarray, weights: Arrays, adapters: Mapping[str, AdapterSpec], masks: Arrays
) -> np.ndarray:
    """Computes a product with its bias and its adapter, if it has them."""
    y = numpy_kernels.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias", 0.0))
    if name in adapters:
        down, up = (weights[one] for one in adapter_names(name))
        y = y + adapters[name].scale * (x * masks.get(name, 1.0)) @ down.T @ up.T
    return y


def attention_formula(
    spec: AttentionSpec, sequences: Sequences, masks: Arrays, x: np.ndarray, **weights: np.ndarray
) -> np.ndarray:
    """Returns the sublayer with its residual."""
    y = numpy_kernels.rms_norm(x, weights[INPUT_NORM], spec.norm.eps)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return linear_formula(f"self_attn.{name}", x, weights, spec.adapters, masks)

    made = _heads_formula if spec.latent is None else _latent_formula
    heads = made(spec, sequences, y, weights, linear)
    seen = sequences.allowed(spec.window)
    out = numpy_kernels.attention(*heads, seen, spec.head_size, masks.get("probabilities"), spec.scale)
    added = linear("o_proj", out)
    if spec.post_norm:
        added = numpy_kernels.rms_norm(added, weights[POST_ATTENTION_NORM], spec.norm.eps)
    return x + added * masks.get("attention_output", 1.0)


def _heads_formula(
    spec: AttentionSpec, sequences: Sequences, y: np.ndarray, weights: Arrays, linear: Callable
) -> list[np.ndarray]:
    """Queries, keys and values, [N, heads * size]."""
    found = []
    for name in "qkv":
        made = linear(f"{name}_proj", y)
        if name != "v" and spec.norms_rotated:
            made = _rotated(spec, sequences, made, spec.head_size)
        if spec.head_norm and name != "v":
            by_head = made.reshape(len(y), -1, spec.head_size)
            normed = numpy_kernels.rms_norm(by_head, weights[f"self_attn.{name}_norm.weight"], spec.norm.eps)
            made = normed.reshape(made.shape)
        if name != "v" and not spec.norms_rotated:
            made = _rotated(spec, sequences, made, spec.head_size)
        found.append(made)
    return found


def _latent_formula(
    spec: AttentionSpec, sequences: Sequences, y: np.ndarray, weights: Arrays, linear: Callable
) -> list[np.ndarray]:
    """Computes latent attention by equations 37 to 47 of DeepSeek-V2 (DeepSeek-AI 2024)."""
    latent = spec.latent
    nope, tokens = latent.nope_size, len(y)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        if not latent.normed:
            return x
        return numpy_kernels.rms_norm(x, weights[f"self_attn.{name}.weight"], latent.eps)

    if latent.query_rank is None:
        q = linear("q_proj", y)
    else:
        q = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", y)))
    both = linear("kv_a_proj_with_mqa", y)
    normed = norm("kv_a_layernorm", both[:, : latent.key_value_rank])
    key = _rotated(spec, sequences, both[:, latent.key_value_rank :], latent.rope_size)
    keys_values = linear("kv_b_proj", normed).reshape(tokens, spec.heads, -1)
    q = q.reshape(tokens, spec.heads, -1)
    turned = _rotated(spec, sequences, q[..., nope:].reshape(tokens, -1), latent.rope_size)
    q = np.concatenate((q[..., :nope], turned.reshape(tokens, spec.heads, -1)), -1)
    every_key = np.broadcast_to(key[:, None], (tokens, spec.heads, latent.rope_size))
    k = np.concatenate((keys_values[..., :nope], every_key), -1)
    return [array.reshape(tokens, -1) for array in (q, k, keys_values[..., nope:])]


def _rotated(spec: AttentionSpec, sequences: Sequences, x: np.ndarray, size: int) -> np.ndarray:
    tables = sequences.cos_Nd.astype(np.float64), sequences.sin_Nd.astype(np.float64)
    return numpy_kernels.rotary(x, *tables, size, spec.rotary_interleaved)


def mlp_formula(
    spec: MlpSpec, masks: Arrays, x: np.ndarray, *, prefix: str = "mlp.", is_sublayer: bool = True,
    **weights: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Returns the sublayer with its residual, or what the matrices alone make of x."""
    y = numpy_kernels.rms_norm(x, weights[MLP_NORM], spec.norm.eps) if is_sublayer else x

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return linear_formula(prefix + name.removeprefix("mlp."), x, weights, spec.adapters, masks)

    *inner, output = spec.matrices
    activation = numpy_kernels.swiglu if spec.has_gate else numpy_kernels.relu2
    added = linear(output, activation(*(linear(name, y) for name in inner)))
    if spec.post_norm:
        added = numpy_kernels.rms_norm(added, weights[POST_MLP_NORM], spec.norm.eps)
    return x * is_sublayer + added * masks.get("mlp_output", 1.0)


def attention_case(segments: Sequence[Sequence[int]], seed: int = 0, **changes: Any) -> Case:
    settings, random = settings_of(**changes), np.random.default_rng(seed)
    [layer] = model_spec(settings).layers
    spec = layer.attention
    sequences = sequences_of(spec, segments, random)
    rows, length = sequences.segments_BT.size, sequences.segments_BT.shape[1]
    weights = weights_of(layer, "attention", random)
    dropout, masks = dropping(settings, layer, rows, len(segments))
    x_ND, upstream_ND = (normal(random, rows, HIDDEN) for _ in range(2))
    terms = 2 * HIDDEN + 4 + spec.head_size + 6 + 2 * length + spec.heads * spec.value_size
    if spec.latent is not None:
        terms += 2 * (spec.latent.key_value_rank + 4)
    if spec.post_norm:
        terms += HIDDEN + 4
    if spec.adapters:
        terms += 2 * max(one.rank for one in spec.adapters.values())
    formula = functools.partial(attention_formula, spec, sequences, masks)
    drawn = dropout if masks else None
    return Case(x_ND, upstream_ND, weights, formula, terms, settings, layer, sequences, drawn, masks)


def mlp_case(tokens: int, seed: int = 0, **changes: Any) -> Case:
    settings, random = settings_of(**changes), np.random.default_rng(seed)
    [layer] = model_spec(settings).layers
    dropout, masks = dropping(settings, layer, tokens, 1)
    terms = 2 * HIDDEN + 4 + 8 + layer.mlp.width
    if layer.mlp.post_norm:
        terms += HIDDEN + 4
    if layer.mlp.adapters:
        terms += 2 * max(one.rank for one in layer.mlp.adapters.values())
    weights = weights_of(layer, "mlp", random)
    x_ND, upstream_ND = (normal(random, tokens, HIDDEN) for _ in range(2))
    formula = functools.partial(mlp_formula, layer.mlp, masks)
    return Case(x_ND, upstream_ND, weights, formula, terms, settings, layer, None, dropout if masks else None, masks)


ONE, PACKED = [[0] * 10], [[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]
BIASES = {"qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True}
POST_NORMS = {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def adapters(dropout: float = 0.0, targets: str = ".*_proj") -> dict[str, Any]:
    pet = {"lora_rank": 3, "lora_alpha": 7.5, "lora_dropout": dropout, "target_modules": targets}
    return {"pet_config": pet}


LATENT = {
    "architectures": "LlamaForCausalLM", "multi_latent_attention": True, "q_lora_rank": 5, "kv_lora_rank": 3,
    "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 3, "num_heads": 2, "n_kv_heads": 2, "head_dim": None,
}  # fmt: skip
ATTENTION: dict[str, tuple[dict, list]] = {
    "plain": ({}, PACKED),
    "all heads": ({"n_kv_heads": 4}, ONE),
    "one group, interleaved": ({"n_kv_heads": 1, "rope_interleave": True}, ONE),
    "partial, biases": ({"rotary_pct": 0.5, **BIASES}, [[0] * 6]),
    "head norms, window": ({"use_qk_norm": True, "sliding_window": 3}, PACKED),
    "window 1": ({"sliding_window": 1}, [[0] * 8]),
    "window 5": ({"sliding_window": 5}, [[0] * 8]),
    "one token": ({"use_qk_norm": True, "n_kv_heads": 1}, [[0], [0]]),
    "norm after it": ({**POST_NORMS, **BIASES}, PACKED),
    "adapters": (adapters(), PACKED),
    "adapters of some, biases": ({**adapters(targets=".*(q|o)_proj"), **BIASES}, ONE),
    "adapters with dropout": ({**adapters(0.3), **BIASES}, PACKED),
    "dropout of probabilities": ({"attention_dropout": 0.3}, PACKED),
    "dropout of the output": ({"hidden_dropout": 0.2, **BIASES}, ONE),
    "everything": (
        {"use_qk_norm": True, "sliding_window": 3, **POST_NORMS, **adapters(0.3), **DROPOUT, **BIASES}, PACKED,
    ),
    "latent": (LATENT, PACKED),
    "latent, interleaved, biases": ({**LATENT, "rope_interleave": True, **BIASES}, ONE),
    "latent, queries of the hidden state": ({**LATENT, "q_lora_rank": None, "sliding_window": 3}, ONE),
    "latent, adapters": ({**LATENT, **adapters(targets=".*_proj.*")}, ONE),
    "latent, everything": (
        {**LATENT, "q_lora_rank": None, "rope_interleave": True, **adapters(0.3, ".*_proj.*"), **DROPOUT, **BIASES},
        PACKED,
    ),
    "latent, no norms, a scale": ({**LATENT, "use_qk_norm": False, "softmax_scale": 0.9, **adapters()}, PACKED),
    "head norms after rotary": ({"use_qk_norm": True, "qk_norm_after_rotary": True, **adapters(), **BIASES}, PACKED),
}  # fmt: skip


@functools.cache
def attention_of(name: str) -> Case:
    changes, segments = ATTENTION[name]
    return attention_case(segments, seed=list(ATTENTION).index(name), **changes)


MLPS: dict[str, dict] = {
    "plain": {},
    "biases": BIASES,
    "norm after it": {**POST_NORMS, **BIASES},
    "adapters": adapters(),
    "adapters of some, biases": {**adapters(targets=".*(up|down)_proj"), **BIASES},
    "adapters with dropout": {**adapters(0.3), **BIASES},
    "dropout": {"hidden_dropout": 0.2},
    "everything": {**POST_NORMS, **adapters(0.3), **DROPOUT, **BIASES},
    "no gate, adapters with dropout": {
        "gated_linear_unit": False, "hidden_act": "relu2", "mlp_names": "c_fc", **adapters(0.3, ".*c_(fc|proj)"),
    },
}  # fmt: skip


@functools.cache
def mlp_of(name: str, tokens: int, width: int = WIDTH) -> Case:
    return mlp_case(tokens, seed=list(MLPS).index(name), intermediate_size=width, **MLPS[name])


def trained_subsets(names: Collection[str]) -> list[list[str]]:
    """Returns no weight, and each weight alone."""
    return [[], *([name] for name in names)]
