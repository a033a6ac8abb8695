"""`plan --audit ascend`: the graph of a training step for Ascend holds what the configuration asks for, or it is said
what is missing."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import mindspore
import pytest
from no_decoder import KIND, NO_DECODER

from trainer.audit import report
from trainer.audit.graph import Node, export_step, trained_names
from trainer.audit.report import Audit, audit_ascend, audit_sections
from trainer.cli import main as cli
from trainer.config import Config, parse_config
from trainer.dryrun import report as dryrun
from trainer.errors import UserError
from trainer.models.spec.names import layer_prefix
from trainer.ops.ascend.support import CANN, HOST, KERNEL, NONE, SUPPORT, dtype_problem, kernel_sources
from trainer.ops.kernel_set import load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels

SIZES = {
    "num_layers": 6, "hidden_size": 8192, "num_heads": 64, "n_kv_heads": 8, "intermediate_size": 28672,
    "vocab_size": 128256, "seq_length": 32, "compute_dtype": "bfloat16",
}  # fmt: skip
"""Of a model with 70 billion weights, which nobody allocates."""
FUSED = {"use_fused_rope": True, "use_fused_swiglu": True, "use_flash_attention": True}
EXPERTS = {
    "expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "shared_expert_num": 1,
}  # fmt: skip


LATENT_SIZES = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
}  # fmt: skip


def config_of(experts: dict | None = None, top: dict | None = None, **changes) -> Config:
    sizes = SIZES | FUSED | changes | ({"moe_config": EXPERTS | experts} if experts is not None else {})
    return parse_config("audit", json.dumps({"model": {"model_config": sizes}, **(top or {})}))


def counted(audit: Audit) -> dict[str, tuple[int, int]]:
    """Returns (requested, found) of each operator with a count above zero."""
    return {each.operator: (each.asked, each.found) for each in audit.fused if each.asked or each.found}


def check_complete(audit: Audit, expected: dict[str, tuple[int, int]]) -> None:
    assert counted(audit) == expected and not audit.missing


def both(operator: str, count: int) -> dict[str, tuple[int, int]]:
    return {operator: (count, count), f"{operator}Grad": (count, count)}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MindSpore leaves its analysis of a refused graph in the working directory


OF_LAYERS = frozenset((
    "use_fused_rope", "use_fused_swiglu", "use_flash_attention", "use_qk_norm", "post_self_attn_layernorm",
    "post_mlp_layernorm", "moe_config", "mtp_depth", "pet_config", "multi_latent_attention", *LATENT_SIZES,
))  # fmt: skip
"""Settings that a step without layers does not depend on."""
_exported: dict[tuple, list[Node]] = {}


def export_once(settings, kernels, layers, trained, *shape) -> list[Node]:
    """Exports a step as `export_step` does, once for equal settings: building graphs takes nearly all of the time of
    these tests, and the number of layers of one kind makes no difference."""
    prefixes = {layer_prefix(layer): place for place, layer in enumerate(layers)}
    learn = set()
    for name in trained:
        prefix = ".".join(name.split(".")[:3]) + "." if name.startswith("model.layers.") else None
        if prefix is None or prefix in prefixes:
            learn.add((prefixes.get(prefix), name.removeprefix(prefix or "")))
    unrotated = settings.unrotated_layers
    kinds = tuple((settings.is_moe_layer(each), each >= settings.num_layers, each in unrotated) for each in layers)
    apart = {"num_layers", "nope_layers", *OF_LAYERS} if not layers else {"num_layers", "nope_layers"}
    if not any(has_experts or is_module for has_experts, is_module, _ in kinds):
        apart |= {"moe_config", "mtp_depth"}
    key = settings.model_dump_json(exclude=apart), kinds, frozenset(learn), shape
    if key not in _exported:
        _exported[key] = export_step(settings, kernels, layers, trained, *shape)
    return _exported[key]


@pytest.fixture(autouse=True)
def each_graph_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "export_step", export_once)


ROPE, ATTENTION, SWIGLU = both("RotaryPositionEmbedding", 12), both("FlashAttentionScore", 6), both("Swiglu", 6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ROPE | ATTENTION | SWIGLU | both("RmsNorm", 13)),
        # Without Swiglu alone: see the experts with a capacity.
        ({"use_fused_rope": False, "use_flash_attention": False, "use_qk_norm": True, "post_self_attn_layernorm": True,
          "post_mlp_layernorm": True}, SWIGLU | both("RmsNorm", 37)),
    ],
    ids=["all", "without rope and attention, all norms"],
)
def test_the_switches_of_a_dense_model(changes: dict, expected: dict) -> None:
    check_complete(audit_ascend(config_of(**changes)), expected)


def test_layers_without_rotary_positions_rotate_nothing() -> None:
    audit = audit_ascend(config_of(nope_layers=[1, 5]))
    check_complete(audit, both("RotaryPositionEmbedding", 8) | ATTENTION | SWIGLU | both("RmsNorm", 13))
    assert audit.layers == (("dense", 4), ("dense, without rotary positions", 2))


LATENT = {"multi_latent_attention": True, "num_layers": 1, **LATENT_SIZES}


def test_latent_attention_keeps_the_fused_operators() -> None:
    """Values of 24 numbers are filled up to the 32 of a query."""
    model = {"arch": {"type": "LlamaForCausalLM"}, "model_config": SIZES | FUSED | LATENT}
    products = both("RotaryPositionEmbedding", 2) | both("FlashAttentionScore", 1) | both("Swiglu", 1)
    check_complete(audit_ascend(parse_config("audit", json.dumps({"model": model}))), products | both("RmsNorm", 5))


def test_experts_and_a_multi_token_prediction_module() -> None:
    """Counts by kind of layer are also those of the whole model built at once."""
    config = config_of(
        {"use_gmm": True, "use_fused_ops_permute": True, "aux_loss_factor": 0.01}, mtp_depth=1, num_layers=1
    )
    audit = audit_ascend(config)
    assert not audit.missing
    assert {other.source for other in audit.others} <= {CANN}, "every operator is known to the Ascend libraries"
    # The layer is dense; the module has experts and a shared one.
    norms = {"RmsNorm": (8, 8), "RmsNormGrad": (9, 9)}  # the stream's is computed once for head and module
    sorting = ("MoeTokenPermute", "MoeTokenPermuteGrad", "InnerMoeTokenUnpermute", "MoeTokenUnpermuteGrad")
    assert counted(audit) == norms | dict.fromkeys(sorting, (1, 1)) | {"GroupedMatmulV4": (9, 9)} | both(
        "Swiglu", 3
    ) | both("FlashAttentionScore", 2) | both("RotaryPositionEmbedding", 4)

    settings = config.decoder
    precision = resolve_precision(settings, None, "Ascend")
    kernels = load_kernels(select_kernels(settings, "Ascend", precision), precision)
    names = trained_names(settings, frozenset())
    whole = Counter(node.operator for node in export_step(settings, kernels, range(2), names, 2, 64))
    for each in audit.fused:
        assert each.found == whole[each.operator], each.operator


def test_experts_sorted_by_gathers() -> None:
    swiglu = both("Swiglu", 12)  # of the experts and of the shared one
    expected = ROPE | ATTENTION | swiglu | both("RmsNorm", 13) | {"GroupedMatmulV4": (54, 54)}
    check_complete(audit_ascend(config_of({"use_gmm": True, "first_k_dense_replace": 0})), expected)


def test_experts_with_a_capacity_stay_on_the_device() -> None:
    experts = {"use_gmm": False, "capacity_factor": 1.5, "first_k_dense_replace": 0}
    expected = ROPE | ATTENTION | both("RmsNorm", 13) | {"GroupedMatmulV4": (54, 54)}
    check_complete(audit_ascend(config_of(experts, use_fused_swiglu=False)), expected)


def test_kernels_that_are_not_there_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of({"use_gmm": True, "first_k_dense_replace": 0}, num_layers=1)
    kernels = ("RotaryPositionEmbedding", "Swiglu", "FlashAttentionScore", "RmsNorm")
    missing = [*(name + end for name in kernels for end in ("", "Grad")), "GroupedMatmulV4"]
    monkeypatch.setattr(
        report, "export_step", lambda *step: [node for node in export_once(*step) if node.operator not in missing]
    )
    audit = audit_ascend(config)
    assert sorted(audit.missing) == sorted(missing)
    assert all(each.note == "missing in the graph" and each.found == 0 for each in audit.fused if each.missing)
    assert audit_sections(audit)[-1][1][1] == (f"missing: {', '.join(audit.missing)}",)


LORA = {"pet_config": {"pet_type": "lora", "lora_rank": 4, "lora_dropout": 0.1, "target_modules": ".*wq|.*w2"}}


@pytest.mark.parametrize(
    ("dense", "changes", "top", "asked", "swiglus", "gradients"),
    [
        # A dense layer, and one whose products are three forwards and three back to the adapters of its attention.
        (1, LORA, {}, 6, 3, 3),
        # Through the frozen layer to the embedding: no weights.
        (0, {}, {"freeze": {"include": [{"layers": 0}]}}, 15, 4, 4),
        (0, {}, {"freeze": {"include": ["embeddings", {"layers": 0}]}}, 12, 4, 2),  # of layer 0 the forward pass alone
        (0, {}, {"freeze": {"include": ["embeddings", {"layers": 0}, "*.1.self_attn.*", "*.1.*norm*"]}}, 10, 4, 0),
    ],
    ids=["adapters", "one layer", "from below", "the experts alone"],
)
def test_products_and_gradients_where_a_part_is_trained(
    dense: int, changes: dict, top: dict, asked: int, swiglus: int, gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = {}

    def export(settings, kernels, layers, trained, *shape):
        key = tuple(layers), trained
        exported[key] = export_once(settings, kernels, layers, trained, *shape)
        return exported[key]

    def without_some(settings, kernels, layers, trained, *shape):
        gone = ("GroupedMatmulV4", "Swiglu", "SwigluGrad")
        return [node for node in exported[tuple(layers), trained] if node.operator not in gone]

    config = config_of({"use_gmm": True, "first_k_dense_replace": dense}, top, num_layers=2, **changes)
    monkeypatch.setattr(report, "export_step", export)
    audit = audit_ascend(config)
    assert counted(audit)["GroupedMatmulV4"] == (asked, asked) and not audit.missing
    monkeypatch.setattr(report, "export_step", without_some)  # the same graphs, not built again
    audit = audit_ascend(config)
    # In each layer the experts and the shared expert have one. Gradients pass through a frozen layer to the embedding,
    # and from the adapters of a layer through its experts; of the first trained layer some are asked for only if found.
    expected = {"GroupedMatmulV4": asked, "Swiglu": swiglus} | ({"SwigluGrad": gradients} if gradients else {})
    assert {each.operator: each.asked for each in audit.fused if each.missing} == expected
    assert all(each.found == 0 for each in audit.fused if each.missing)


def test_what_an_ascend_would_refuse_of_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="mempool_block_size"):
        audit_ascend(config_of(top={"context": {"mempool_block_size": "5XB"}}))


def test_gradients_end_at_frozen_layers() -> None:
    """Its graphs are those of "from below", and of a step without anything frozen."""
    top = {"freeze": {"include": ["embeddings", {"layers": "0-3"}]}}
    audit = audit_ascend(config_of({"use_gmm": True, "first_k_dense_replace": 0}, top))
    assert not audit.missing
    found = {each.operator: each.found for each in audit.fused}
    assert (found["Swiglu"], found["SwigluGrad"], found["RmsNormGrad"]) == (12, 4, 5)
    assert audit.layers == (("experts, frozen", 4), ("experts", 1), ("experts", 1))


@pytest.mark.parametrize(("top", "recomputes"), [
    ({"recompute": True}, True), ({"recompute_config": {"select_recompute": ["mlp"]}}, True),
    ({"recompute_config": {"recompute": []}}, False),
])  # fmt: skip
def test_it_says_so_where_operators_run_again(top: dict, recomputes: bool) -> None:
    limits = list(report._limits(config_of(top=top), True))
    assert any(text.startswith("recomputation runs") for text in limits) == recomputes


def test_weights_of_any_size_are_only_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 billion weights: none is allocated. And a package without Ascend libraries says so."""
    monkeypatch.setattr(report, "kernel_sources", lambda operators: None)
    audit = audit_ascend(config_of(num_layers=80))
    assert {each.operator: each.found for each in audit.fused}["FlashAttentionScore"] == 80
    assert audit.others == () and any("brings no Ascend libraries" in text for text in audit.limits)


# ---- what is known of the operators ----------------------------------------------------------------------------------

_WRITTEN = {"float": "float32"}


@pytest.mark.parametrize("operator", SUPPORT)
def test_dtypes_are_those_of_the_installed_documentation(operator: str) -> None:
    support = SUPPORT[operator]
    name = support.documented_by
    function = getattr(mindspore.ops, name, None) or getattr(mindspore.ops.auto_generate, name)
    text = function.__doc__.lower()
    for dtypes in support.inputs:
        for dtype in dtypes:
            word = rf"(?<![a-z0-9]){_WRITTEN.get(dtype, dtype)}(?![a-z0-9])"  # float16 is no part of bfloat16
            assert re.search(word, text), f"{dtype} of {operator} is in no word of its documentation"


@pytest.mark.parametrize(
    ("operator", "inputs", "problem"),
    [
        ("Swiglu", ("bfloat16",), ""), ("Swiglu", ("int8",), "input 1 is int8, documented: bfloat16, float, float16"),
        ("RmsNorm", ("float", "bfloat16"), "the first 2 inputs must have one dtype, here float, bfloat16"),
        ("FlashAttentionScore", ("float16", "float16", "float16", "bool"), ""),
        ("FlashAttentionScore", ("float", "float", "float", "bool"), "input 1 is float, documented: bfloat16, float16"),
        ("GroupedMatmulV4", ("float16", "float16", "int32"), "input 3 is int32, documented: int64"),
    ],
)  # fmt: skip
def test_dtypes_are_compared(operator: str, inputs: tuple[str, ...], problem: str) -> None:
    assert dtype_problem(operator, inputs) == problem


def test_kernels_are_looked_up_in_the_installed_libraries(tmp_path: Path) -> None:
    found = kernel_sources(["Swiglu", "MatMul", "Gather", "UnsortedSegmentSum", "PyExecute", "NoSuchOperator"])
    if found is None:
        pytest.skip("this wheel of MindSpore brings no Ascend libraries")
    assert found == {
        "Swiglu": KERNEL, "MatMul": KERNEL, "Gather": KERNEL, "UnsortedSegmentSum": CANN, "PyExecute": HOST,
        "NoSuchOperator": NONE,
    }  # fmt: skip
    assert kernel_sources(["Swiglu"], tmp_path) is None


# ---- the command -----------------------------------------------------------------------------------------------------


def run_plan(tmp_path: Path, capsys: pytest.CaptureFixture, config: dict, *flags: str) -> tuple[int, str, str]:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--audit", *flags, "--config", str(file)])
    out = capsys.readouterr()
    return end.value.code, out.out, out.err


def test_the_command_exits_with_1_where_an_operator_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the Ascend backend, and in this process where that cannot be had."""
    small = {"hidden_size": 64, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 96, "vocab_size": 101}
    model = {"model": {"model_config": SIZES | FUSED | small | {"num_layers": 1}}}
    divided = {"use_parallel": True, "context": {"mode": 1}, "parallel_config": {"model_parallel": 2}}
    flags = ("--model.model_config.compute_dtype", "float32", "--ranks", "4", "--rank", "3")
    code, out, _ = run_plan(tmp_path, capsys, model | divided, "ascend", *flags)
    calls = re.search(r"COLLECTIVES OF RANK 3 OF 4 IN A STEP.*?\n\n", out, re.DOTALL)[0]
    assert re.search(r"AllReduce +tp: 2-3 +6 ", calls) and re.search(r"AllGather +tp: 2-3 +1 ", calls)
    assert code == 1 and "missing: FlashAttentionScore, FlashAttentionScoreGrad" in " ".join(out.split())
    assert "compute_dtype is float32" in " ".join(out.split())
    monkeypatch.setattr(dryrun, "audit_on_backend", lambda config, world: "there is no compiler")
    explicit = {"parallel": {"parallel_mode": "semi_auto_parallel", "parallel_fallback": "explicit"}}
    model = {"model": {"model_config": SIZES | FUSED | {"num_layers": 1}}}  # its graphs are those of the first test
    code, out, errors = run_plan(tmp_path, capsys, model | explicit, "ascend", "--json")
    found = json.loads(out)
    assert code == 0 and found["missing"] == found["semi_auto"] == []
    assert "not compiled for an Ascend: there is no compiler" in errors
    assert found["fused"][0]["operator"] == "RotaryPositionEmbedding" and found["fused"][0]["found"] == 2


def test_another_model_has_nothing_to_audit(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, _, errors = run_plan(tmp_path, capsys, NO_DECODER, "ascend")
    assert code == 2 and f"a.json:1: model.arch.type = {KIND!r}: has no fused operators" in errors


def test_another_audit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, _, errors = run_plan(tmp_path, capsys, {}, "cpu")
    assert code == 2 and "there is an audit for ascend alone" in errors and "write --audit ascend" in errors
