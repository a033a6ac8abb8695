"""Parameters of MindSpore Transformers: their names and layouts in its files, and which parameters they are here.

Its own converters to Hugging Face's names say the same: mindformers/checkpoint/converter/convert_op.py,
mindformers/models/*/utils.py and toolkit/weight_convert/, read at commit 167a50de.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from trainer.checkpoint.store import first_of
from trainer.config.schema.model import ModelConfig
from trainer.errors import UserError
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD, POST_ATTENTION_NORM, POST_MLP_NORM, layer_prefix
from trainer.models.spec.shapes import parameter_shapes
from trainer.parallel.sharding import Shard
from trainer.storage.tensor_file import ArrayOrLazyArray, LazyArray, box_array, concatenate_arrays

Layout: TypeAlias = Literal["same", "stacked", "head groups", "pairs", "experts"]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class SourceTensor(NamedTuple):
    """A parameter of MindSpore Transformers, unsharded, and the name of the file that has it, or its first shard."""

    array: LazyArray
    file: str


class _Rule(NamedTuple):
    """Which parameters here a parameter of a layer is: how names begin there (`theirs`) and here (`ours`), its layout.

    Layouts:
        "stacked": the matrices, one above the other.
        "head groups": for each key/value head the rows of its query heads, of the key and of the value.
        "pairs": a row of the first matrix and one of the second take turns.
        "experts": the transposed matrices of each expert side by side: [experts, in, out], or [experts * in, out].
    """

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = "same"


_ATTENTION = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
_MLP = ("mlp.gate_proj.", "mlp.up_proj.")
# The first rule whose parameters the model has counts: latent attention has other names than grouped heads.
_RULES = (
    _Rule("input_layernorm.", ("input_layernorm.",)),
    _Rule("pre_mlp_layernorm.", ("post_attention_layernorm.",)),
    _Rule(POST_ATTENTION_NORM, (POST_ATTENTION_NORM,)),
    _Rule(POST_MLP_NORM, (POST_MLP_NORM,)),
    _Rule("self_attention.linear_qkv.", _ATTENTION, "head groups"),
    _Rule("self_attention.linear_qkv.", ("self_attn.q_a_proj.", "self_attn.kv_a_proj_with_mqa."), "stacked"),
    _Rule("self_attention.linear_qkv.", ("self_attn.q_proj.", "self_attn.kv_a_proj_with_mqa."), "stacked"),
    _Rule("self_attention.linear_q_proj.", ("self_attn.q_proj.",)),
    _Rule("self_attention.linear_q_down_proj.", ("self_attn.q_a_proj.",)),
    _Rule("self_attention.linear_q_up_proj.", ("self_attn.q_b_proj.",)),
    _Rule("self_attention.linear_qb.", ("self_attn.q_b_proj.",)),
    _Rule("self_attention.linear_kv_down_proj.", ("self_attn.kv_a_proj_with_mqa.",)),
    _Rule("self_attention.linear_kv_up_proj.", ("self_attn.kv_b_proj.",)),
    _Rule("self_attention.linear_kvb.", ("self_attn.kv_b_proj.",)),
    _Rule("self_attention.q_layernorm.", ("self_attn.q_norm.",)),
    _Rule("self_attention.q_layernorm.", ("self_attn.q_a_layernorm.",)),
    _Rule("self_attention.k_layernorm.", ("self_attn.k_norm.",)),
    _Rule("self_attention.k_layernorm.", ("self_attn.kv_a_layernorm.",)),
    _Rule("self_attention.kv_layernorm.", ("self_attn.kv_a_layernorm.",)),
    _Rule("self_attention.linear_proj.", ("self_attn.o_proj.",)),
    _Rule("mlp.linear_fc1.", _MLP, "pairs"),
    _Rule("mlp.linear_fc2.", ("mlp.down_proj.",)),
    _Rule("mlp.router.weight", ("mlp.gate.weight",)),
    _Rule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
    _Rule("mlp.expert_bias", ("mlp.gate.e_score_correction_bias",)),
    _Rule("mlp.experts.weight1", ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"), "experts"),
    _Rule("mlp.experts.weight2", ("mlp.experts.down_proj.weight",), "experts"),
    _Rule("mlp.shared_experts.linear_fc1.", ("mlp.shared_experts.gate_proj.", "mlp.shared_experts.up_proj."), "pairs"),
    _Rule("mlp.shared_experts.linear_fc2.", ("mlp.shared_experts.down_proj.",)),
    _Rule("mlp.shared_experts.shared_experts_gate.", ("mlp.shared_expert_gate.",)),
    # MTP modules
    _Rule("enorm.", ("enorm.",)),
    _Rule("hnorm.", ("hnorm.",)),
    _Rule("eh_proj.", ("eh_proj.",)),
    _Rule("final_layernorm.", ("shared_head.norm.",)),
    # The Llama of versions before 1.6, mindformers/models/llama/
    _Rule("attention_norm.", ("input_layernorm.",)),
    _Rule("ffn_norm.", ("post_attention_layernorm.",)),
    _Rule("attention.wq.", ("self_attn.q_proj.",)),
    _Rule("attention.wk.", ("self_attn.k_proj.",)),
    _Rule("attention.wv.", ("self_attn.v_proj.",)),
    _Rule("attention.w_qkv.", _ATTENTION, "head groups"),
    _Rule("attention.wo.", ("self_attn.o_proj.",)),
    _Rule("feed_forward.w1.", ("mlp.gate_proj.",)),
    _Rule("feed_forward.w3.", ("mlp.up_proj.",)),
    _Rule("feed_forward.w2.", ("mlp.down_proj.",)),
    _Rule("feed_forward.w_gate_hidden.", _MLP, "pairs"),
)
_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": FINAL_NORM,
    "output_layer.weight": HEAD,
    "model.tok_embeddings.embedding_weight": EMBEDDING,
    "model.norm_out.weight": FINAL_NORM,
    "lm_head.weight": HEAD,
}
_LAYER = re.compile(r"(decoder|model)\.layers\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)")
_SOURCE_PREFIXES = ("decoder.", "embedding.word_embeddings.", "model.tok_embeddings.")
# Parameters of the run beside the model's: the optimizer's, and counters.
_STATE = re.compile(
    r"(?!(decoder|mtp|model|embedding|transformer)\.)\w+"
    r"\.(decoder|mtp|model|embedding|output_layer|lm_head|transformer)\.[\w.]+"
    r"|(epoch_num|step_num|global_step|loss_scale|scale_sense|global_batch_size|consumed_samples|learning_rate"
    r"|current_iterator_step|last_overflow_iterator_step|__exception_save__)"
    r"|.*(tokens_per_expert|expert_load|fi_accu|fi_parameter|ga_steps|max_logits_val)"
    r"|_device_local_(norm|loss).*"
)


def is_run_state(name: str) -> bool:
    """Returns whether a tensor of its files belongs to the optimizer or counts something, and is no weight."""
    return _STATE.fullmatch(name) is not None


def parameter_name(name: str, kind: str = "") -> str:
    """Returns the parameter that a tensor is the weight of, or an array of the optimizer of this kind; empty: none.

    Its optimizers name each array after its parameter: adam_m.decoder.layers.0.mlp.linear_fc2.weight.
    """
    before, _, parameter = name.partition(".")
    if kind and before == kind and is_run_state(name):
        return parameter
    if kind or is_run_state(name):
        return ""
    return name


def has_mindformers_names(names: Iterable[str]) -> bool:
    """Returns whether tensors have the names of MindSpore Transformers."""
    return any(name.startswith(_SOURCE_PREFIXES) for name in names)


def convert_weights(
    tensors: Mapping[str, SourceTensor], settings: ModelConfig, path: Path, fix: str = ""
) -> dict[str, ArrayOrLazyArray]:
    """Returns the weights under Hugging Face's names, each matrix by itself, read when they are used.

    Args:
        path: The checkpoint, for messages.
        fix: What to do if shapes are wrong.

    Raises:
        UserError: Names tensors that no rule knows, or whose shape is not that of the model.
    """
    shapes = parameter_shapes(settings)
    weights: dict[str, ArrayOrLazyArray] = {}
    unexpected: list[str] = []
    misshapen: list[str] = []
    for name, (array, file) in tensors.items():
        layout, targets = _find_targets(name, shapes, settings)
        if not targets:
            unexpected.append(f"{name} in {file}")
        elif any(target not in shapes for target in targets):  # of an MTP module that the model does not have
            weights[targets[0]] = array
        elif array.shape not in (expected := _expected_shapes(layout, [shapes[target] for target in targets])):
            joined = " and ".join(targets)
            rule = f"{name} in {file} has shape {list(array.shape)} instead of {list(expected[0])} ({joined}: {layout})"
            misshapen.append(rule)
        else:
            weights |= _split(array, layout, targets, [shapes[target] for target in targets], settings)
    problems = []
    if unexpected:
        problems.append(f"no parameter of this model has a place for {first_of(unexpected)}")
    if misshapen:
        problems.append(first_of(misshapen))
    if problems:
        if not misshapen:
            fix = ""
        fix = fix or "use the model_config that the checkpoint was made with, or another checkpoint"
        rule = f"the checkpoint does not fit model.model_config: {'; '.join(problems)}"
        raise UserError(rule, value=str(path), fix=fix)
    return weights


def _find_targets(name: str, shapes: Shapes, settings: ModelConfig) -> tuple[Layout, list[str]]:
    """Returns how a tensor lies in its file and the names of its parameters here; no names if no rule knows it."""
    if name in _OUTSIDE_LAYERS:
        target = _OUTSIDE_LAYERS[name]
        if target in shapes or target == HEAD:  # files may have a copy of a head that is tied to the embedding
            return "same", [target]
        return "same", []
    layer = 0
    rest = ""
    if match := _LAYER.fullmatch(name):
        layer = int(match[2])
        rest = match[3]
    elif match := _MTP_LAYER.fullmatch(name):
        layer = settings.num_layers + int(match[1])
        rest = match[2]
        if layer not in settings.layers:
            return "same", [layer_prefix(layer) + rest]
    for rule in _RULES:
        if rest.startswith(rule.theirs):
            targets = [layer_prefix(layer) + ours + rest.removeprefix(rule.theirs) for ours in rule.ours]
            if all(target in shapes for target in targets):
                layout = rule.layout
                if layout == "head groups" and settings.use_contiguous_weight_layout_attention:
                    layout = "stacked"
                if layout == "pairs" and not settings.use_interleaved_weight_layout_mlp:
                    layout = "stacked"
                return layout, targets
    return "same", []


def _expected_shapes(layout: Layout, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the shapes that a tensor with this layout may have, from those of its parameters."""
    if layout == "experts":
        experts, rows, columns = shapes[0]
        joined = (columns, len(shapes) * rows)
        return [(experts, *joined), (experts * joined[0], joined[1])]
    return [(sum(shape[0] for shape in shapes), *shapes[0][1:])]


def _split(
    array: LazyArray, layout: Layout, targets: list[str], shapes: list[tuple[int, ...]], settings: ModelConfig
) -> dict[str, ArrayOrLazyArray]:
    """Returns the parameters in a tensor by name, experts one by one as on disk."""
    if layout == "same":
        return {targets[0]: array}
    if layout == "pairs":
        return {target: array[first::2] for first, target in enumerate(targets)}
    if layout == "experts":
        return {
            target.replace(".experts.", f".experts.{expert}."): _expert_matrix(array, expert, place, shapes[0])
            for place, target in enumerate(targets)
            for expert in range(shapes[0][0])
        }
    groups = 1
    if layout == "head groups":
        groups = settings.kv_heads
    sizes = [shape[0] // groups for shape in shapes]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return {
        target: concatenate_arrays([array[first : first + size] for first in range(start, array.shape[0], sum(sizes))])
        for target, start, size in zip(targets, starts, sizes, strict=True)
    }


def _expert_matrix(array: LazyArray, expert: int, place: int, shape: tuple[int, ...]) -> LazyArray:
    """Returns a matrix [rows, columns] of an expert; `shape` is that of all experts, `place` the matrix in the pair."""
    _, rows, columns = shape

    def read_box(box: Shard) -> np.ndarray:
        """Reads a box, which lies transposed in the pair."""
        first = place * rows + box.start[0]
        outputs = slice(first, first + box.shape[0])
        start = box.start[1]
        if array.ndim == 2:
            start += expert * columns
            values = array[start : start + box.shape[1], outputs].read()
        else:
            values = array[expert : expert + 1, start : start + box.shape[1], outputs].read()
        return np.ascontiguousarray(values.reshape(box.shape[1], box.shape[0]).T)

    return box_array((rows, columns), read_box)
