"""What `plan` says, computed without MindSpore, and what it says where a run would not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_helpers import BASE, load
from safetensors.numpy import save_file
from tolerances import PLANNED_MEMORY, SMALL_ARRAYS

from trainer.config import Override, load_config, parse_config
from trainer.config.note import Note
from trainer.errors import UserError
from trainer.models.spec.shapes import all_shapes, parameter_shapes
from trainer.ops.host_library import OneDnn, find_onednn
from trainer.parallel.world import SINGLE_PROCESS
from trainer.plan import plan as plan_module
from trainer.plan.memory import check_host_memory, memory_estimate, memory_notes
from trainer.plan.plan import Plan
from trainer.plan.render import plan_dict, plan_sections, plan_text
from trainer.run import prepare
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[3]
MIB = 1 << 20


def plan_of(name: str, **flags: object):
    overrides = [Override(key.replace("__", "."), str(value)) for key, value in flags.items()]
    return build_plan(load_config(str(REPOSITORY / "configs" / f"{name}.yaml"), overrides))


def row(plan: Plan, name: str) -> str:
    """Returns what the plan's text says of a row; empty where it has none."""
    rows = dict(row for _, section in plan_sections(plan, verbose=False) for row in section if len(row) == 2)
    return rows.get(name, "")


def test_it_says_where_and_how_a_run_learns(tmp_path: Path) -> None:
    plan = plan_of("qwen3_tiny", output_dir=tmp_path, optimizer__eps=1e-6)
    assert plan.output_dir == str(tmp_path)
    assert plan.steps.optimizer == {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    text = " ".join(plan_text(plan).split())
    for part in (
        f"output_dir {tmp_path}",
        "optimizer AdamW, betas 0.9 0.95, eps 1e-06, weight_decay 0.1",
        "clipping global norm at most 1",
        "schedule WarmUpStableDecayLR",
    ):
        assert part in text
    assert json.loads(json.dumps(plan_dict(plan)))["steps"]["schedule"] == "WarmUpStableDecayLR"
    off = plan_of("qwen3_tiny", runner_wrapper__use_clip_grad=False, optimizer="{type: SGD, momentum: 0.9}")
    values = plan_of("qwen3_tiny", runner_wrapper__clip_type="value", runner_wrapper__clip_value=0.5)
    groups = plan_of("qwen3_tiny", runner_wrapper__clip_by_group=True)
    told = [row(plan, "clipping") for plan in (values, groups, off)]
    assert told == ["each element to at most 0.5", "norm of each group at most 1", "off"]
    assert off.steps.optimizer == {"type": "SGD", "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}


def test_the_plan_counts_the_bad_records_that_are_skipped(tmp_path: Path) -> None:
    good = (REPOSITORY / "configs" / "data" / "instructions.jsonl").read_text()
    (tmp_path / "some.jsonl").write_text('{"messages": []}\n' + good + '{"text"\n')
    loader = f"{{type: JsonlDataset, dataset_dir: {tmp_path}/some.jsonl, bad_records: skip}}"
    found = plan_of("instructions", train_dataset__data_loader=loader, train_dataset__cache_dir=str(tmp_path / "cache"))
    assert found.data.packing.bad_records == plan_dict(found)["data"]["packing"]["bad_records"] == 2
    assert "2 bad records skipped" in " ".join(plan_text(found).split())
    (note,) = (note for note in found.notes if "skipped" in note)
    assert "2 bad records of " in note and f"{tmp_path}/some.jsonl:1: messages = []" in note


def test_the_plan_shows_packing_with_its_numbers() -> None:
    found = plan_of("instructions")
    said = json.loads(json.dumps(plan_dict(found)))["data"]["packing"]
    assert (said["packing"], said["sequences"], said["truncated"], said["dropped"]) == ("whole", found.data.rows, 0, 0)
    text = " ".join(plan_text(found).split())
    assert (
        f"packing whole: {said['samples']} samples in {found.data.rows} sequences, {said['padding']:.1%} padding"
    ) in text
    long = plan_of("instructions", model__model_config__seq_length=64, train_dataset__overlong="drop")
    assert f"{long.data.packing.dropped} dropped" in plan_text(long) and long.data.packing.dropped > 0
    assert any(f"{long.data.packing.dropped} of 203 samples of" in note for note in long.notes)
    assert plan_of("instructions", train_dataset__packing="none").data.rows == said["samples"]
    assert plan_of("quickstart").data.packing.packing == "cut"
    synthetic = plan_of("quickstart", train_dataset__data_loader="{type: SyntheticDataset, num_samples: 40}")
    assert synthetic.data.packing is None


def test_plan_says_what_scales_the_loss_and_skips_steps() -> None:
    off = plan_of("quickstart")
    assert (row(off, "loss scale"), row(off, "skipped")) == ("off", "")
    scaled = plan_of("quickstart", runner_wrapper__scale_sense="{scale_window: 20}")
    assert row(scaled, "loss scale") == "dynamic from 65536, x 2 after 20 steps without overflow, / 2 on overflow"
    fixed = plan_of("quickstart", runner_wrapper__scale_sense=128, runner_wrapper__use_skip_data_by_global_norm=True)
    assert row(fixed, "loss scale") == "fixed, 128"
    assert row(fixed, "skipped") == "steps whose norm is above 1; 10 in a row end the run"


def test_the_schedule_shows_the_end_of_a_short_warm_up() -> None:
    rates = dict(plan_of("qwen3_tiny", lr_schedule__warmup_steps=3).steps.learning_rates)
    assert list(rates) == [1, 4, 10, 25, 50, 75, 100] and rates[4] == 0.003 > rates[1]

    def steps_of(schedule: str) -> list[int]:
        rates = dict(plan_of("quickstart", lr_schedule=schedule, runner_config__stop_step=5).steps.learning_rates)
        assert max(rates.values()) == pytest.approx(0.1)
        return list(rates)

    without = steps_of("{type: ConstantWarmUpLR, learning_rate: 0.1}")
    ratio = steps_of("{type: CosineWithWarmUpLR, learning_rate: 0.1, warmup_ratio: 0.02}")
    assert steps_of("{type: CosineAnnealingLR, base_lr: 0.1, t_max: 50}") == without
    assert without[:2] == [1, 5] and set(ratio) - set(without) == {1 + without[-1] // 50}


def test_a_plan_without_training_shows_no_weight_decay(tmp_path: Path) -> None:
    shapes = parameter_shapes(plan_of("qwen3_tiny").backend.config.decoder)
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    plan = plan_of("qwen3_tiny", run_mode="eval", load_checkpoint=tmp_path)
    assert plan.model.groups == () and plan.model.weights == plan_of("qwen3_tiny").model.weights
    text = plan_text(plan)
    assert f"{plan.model.weights:,}" in text and "decay" not in text


def test_muon_names_the_groups_that_each_rule_updates() -> None:
    plan = plan_of("qwen3_tiny", optimizer="{type: Muon, weight_decay: 0.2}")
    assert [(group.name, group.weight_decay, group.tensors) for group in plan.model.groups] == [
        ("matrices, by Muon", 0.2, 14),
        ("other matrices, by AdamW", 0.2, 2),
        ("norms and biases, by AdamW", 0.0, 9),
    ]
    assert "optimizer Muon, momentum 0.95, nesterov true, ns_steps 5," in " ".join(plan_text(plan).split())
    state = {name: plan_of("bench_dense", optimizer__type=name).memory_bytes for name in ("AdamW", "Muon", "SGD")}
    assert state["AdamW"]["optimizer state"] > state["Muon"]["optimizer state"] > state["SGD"]["optimizer state"]


def test_it_says_how_the_layers_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of("quickstart").execution == f"array engine: NumPy and {find_onednn().text}"
    for key, value in (
        ("hidden_dropout", 0.1), ("compute_dtype", "float16"), *lora(ATTENTION).items(), ("embedding_size", 64),
    ):  # fmt: skip
        found = plan_of("quickstart", **{f"model__model_config__{key}": value}).execution
        assert found == f"array engine: NumPy and {find_onednn().text}"
    assert plan_of("quickstart", context__mode=1).execution == "eager mode: operator by operator"
    predicts = [Override("run_mode", "predict"), Override("load_checkpoint", "x"), Override("predict_data", "x")]
    config = load_config(str(REPOSITORY / "configs/qwen3_tiny.yaml"), predicts)
    backend = prepare.ExplicitBackend(config, SINGLE_PROCESS)
    assert backend.execution("Ascend") == "eager mode: operator by operator"
    assert backend.execution("CPU") == f"array engine: NumPy and {find_onednn().text}"
    for module in (prepare, plan_module):
        monkeypatch.setattr(module, "find_onednn", lambda: OneDnn(None, "MindSpore's libdnnl.so.3 cannot be loaded"))
    plan = plan_of("quickstart")
    assert plan.execution == "array engine: NumPy alone, because MindSpore's libdnnl.so.3 cannot be loaded"
    told = "MindSpore's libdnnl.so.3 cannot be loaded: NumPy computes the layers, which takes longer"
    assert told in plan.notes and told not in plan_of("quickstart", context__mode=1).notes


def test_rows_of_an_evaluation_are_those_it_reads() -> None:
    assert plan_of("qwen3_tiny").data.eval_rows == 8 * 16, "max_batches of batch_size rows"
    assert plan_of("qwen3_tiny", train_dataset__max_batches=2, runner_config__batch_size=4).data.eval_rows == 8
    everything = plan_of("qwen3_tiny", train_dataset__max_batches=0).data.eval_rows
    assert everything is not None and everything > 128
    assert plan_of("qwen3_tiny", do_eval=False).data.eval_rows is None


def test_notes_are_a_list() -> None:
    notes = plan_text(plan_of("quickstart", runner_config__sink_mode=True, predict_data="x")).split("NOTES\n")[1]
    assert [line[:4] for line in notes.split("\n\n")[0].splitlines()] == ["  - ", "  - "]


def test_notes_come_by_importance_and_name_their_file_once() -> None:
    notes = (
        Note("ignored: a.b (configs/x.yaml:3), a.c (configs/x.yaml:4): nothing reads them", "ignored"),
        Note("compute_dtype: computes in float32; compute_dtype asks for bfloat16", "dtype"),
        Note("parallel_config (data_parallel 8): replaced, the run has one device", "parallel"),
        "moe_config: capacity_factor 1.25 applies to training only",
    )
    plan = replace(plan_of("quickstart"), notes=notes)
    (title, rows), *_ = plan_sections(plan, verbose=True)
    assert title == "notes (lines are those of configs/x.yaml)"
    assert [row[0] for row in rows[1:]] == [
        *(f"- {note}" for note in reversed(notes[1:])),
        "- ignored: a.b (line 3), a.c (line 4): nothing reads them",
    ]
    (_, rows), *_ = plan_sections(plan, verbose=False)
    assert rows[-1] == ("- 2 keys ignored (--verbose says why): a.b (line 3), a.c (line 4)",)


def test_a_note_has_the_kind_of_what_differs() -> None:
    notes = plan_of("mindformers_llama", parallel_config__data_parallel=8, do_eval=True, context__mode=1).notes
    kinds = {note.split(":")[0].split(" (")[0]: note.kind for note in notes if isinstance(note, Note)}
    assert kinds["ignored"] == "ignored" and kinds["parallel_config.data_parallel 8"] == "parallel"
    assert kinds["model.model_config.compute_dtype"] == "dtype"
    (other,) = (note for note in plan_of("quickstart", optimizer__momentum=0.5).notes)
    assert other.startswith("optimizer.momentum 0.5: not used") and other.kind == "ignored"
    assert json.loads(json.dumps(plan_dict(plan_of("quickstart", optimizer__momentum=0.5))))["notes"] == [other]


ADAPTERS = "{{pet_type: lora, lora_rank: 16, lora_alpha: 16, lora_dropout: {}, target_modules: '{}'}}"
ATTENTION = ".*q_proj|.*k_proj|.*v_proj|.*o_proj"
EVERY_PROJECTION = f"{ATTENTION}|.*gate_proj|.*up_proj|.*down_proj"
EXPERTS = "{expert_num: 8, num_experts_chosen: 2, aux_loss_factor: 0.01}"
SHARED = "{expert_num: 8, num_experts_chosen: 2, shared_expert_num: 1, moe_intermediate_size: 344}"
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
LATENT_QUERIES = {**LATENT, "q_lora_rank": 128}
LATENT_ADAPTERS = ".*q_b_proj|.*kv_b_proj|.*q_a_proj|.*o_proj"
RECOMPUTE = {"recompute_config__recompute": True}
BFLOAT16 = {"compute_dtype": "bfloat16"}


def lora(targets: str, dropout: float = 0.0) -> dict[str, str]:
    return {"pet_config": ADAPTERS.format(dropout, targets)}


@pytest.mark.parametrize(
    ("name", "layers", "batch", "keys", "flags", "measured_mib"),
    [
        ("bench_dense", 4, 8, {}, {}, 692),
        ("bench_dense", 4, 2, {}, {}, 588),
        ("bench_dense", 12, 8, {}, {}, 952),
        ("bench_dense", 4, 8, {"vocab_size": 32768}, {}, 910),
        ("bench_dense", 4, 2, {"vocab_size": 32768}, {}, 855),
        ("bench_dense", 2, 2, {"vocab_size": 32768, "tie_word_embeddings": True}, {}, 726),
        ("bench_dense", 12, 32, {}, {}, 1829),
        ("bench_dense", 8, 4, {"seq_length": 2048}, {}, 1440),
        ("bench_dense", 4, 16, {"hidden_size": 1024, "intermediate_size": 2816}, {}, 2108),
        ("bench_dense", 4, 32, {"embedding_size": 128}, {}, 1005),
        ("bench_dense", 12, 32, {}, {"runner_config__gradient_accumulation_steps": 2}, 1871),
        ("bench_dense", 12, 32, {}, RECOMPUTE, 912),
        ("bench_dense", 12, 16, {}, {"recompute_config__select_recompute": "[mlp]"}, 1004),
        ("bench_dense", 12, 32, BFLOAT16, {}, 1403),
        ("bench_dense", 4, 32, BFLOAT16, {}, 898),
        ("bench_dense", 12, 32, {"compute_dtype": "float16"}, {"runner_wrapper__scale_sense": 128}, 1501),
        ("bench_dense", 12, 32, {"attention_dropout": 0.1, "hidden_dropout": 0.1}, {}, 1844),
        ("bench_dense", 12, 32, {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}, {}, 2028),
        ("bench_dense", 4, 32, {"mtp_depth": 1}, {}, 1178),
        ("bench_dense", 6, 32, {"moe_config": EXPERTS}, {}, 1875),
        ("bench_dense", 6, 32, {"moe_config": SHARED}, {}, 1564),
        ("bench_dense", 6, 32, {"moe_config": EXPERTS}, RECOMPUTE, 1184),
        ("bench_dense", 6, 32, {"moe_config": EXPERTS, **BFLOAT16}, {}, 1811),
        ("bench_dense", 8, 32, LATENT, {}, 1503),
        ("bench_dense", 8, 32, LATENT_QUERIES, {}, 1533),
        ("bench_dense", 8, 32, {**LATENT_QUERIES, **BFLOAT16}, {}, 1232),
        ("bench_dense", 12, 32, lora(EVERY_PROJECTION), {}, 1792),
        ("bench_dense", 12, 32, lora(ATTENTION), {}, 1763),
        ("bench_dense", 12, 32, lora(ATTENTION, 0.05), {}, 1766),
        ("bench_dense", 12, 32, {**lora(EVERY_PROJECTION, 0.05), **BFLOAT16}, {}, 1370),
        ("bench_dense", 12, 32, lora(ATTENTION), RECOMPUTE, 768),
        ("bench_dense", 8, 32, {**LATENT_QUERIES, **lora(LATENT_ADAPTERS)}, {}, 1488),
        ("bench_moe", 4, 8, {}, {}, 790),
        ("quickstart", 4, 16, {}, {}, 590),
        ("qwen3_tiny", 8, 64, {}, {}, 813),
    ],
)
def test_the_memory_estimate_is_near_what_was_measured(
    name: str, layers: int, batch: int, keys: dict, flags: dict, measured_mib: int
) -> None:
    """Peaks (VmHWM) of three steps with MindSpore 2.10 on two cores."""
    keys = {"num_layers": layers, **keys}
    flags = {"runner_config__batch_size": batch, **flags}
    found = plan_of(name, **flags, **{f"model__model_config__{key}": value for key, value in keys.items()})
    assert found.memory_bytes["total"] / MIB == pytest.approx(measured_mib, rel=PLANNED_MEMORY)


@pytest.mark.parametrize(
    ("layers", "keys", "measured_mib"),
    [
        (4, {}, 945), (12, {}, 1516), (4, LATENT_QUERIES, 973), (4, lora(ATTENTION), 953),
        (4, {"moe_config": EXPERTS}, 1219), (4, {"attention_dropout": 0.1, "hidden_dropout": 0.1}, 1024),
    ],
)  # fmt: skip
def test_the_memory_of_a_training_operator_by_operator_is_roughly_what_was_measured(
    layers: int, keys: dict, measured_mib: int
) -> None:
    keys = {f"model__model_config__{key}": value for key, value in {"num_layers": layers, **keys}.items()}
    found = plan_of("bench_dense", context__mode=1, **keys).memory_bytes["total"]
    assert 0.9 < found / MIB / measured_mib < 1.25


def test_the_memory_of_an_evaluation_is_near_what_was_measured() -> None:
    overrides = [Override("run_mode", "eval"), Override("model.model_config.vocab_size", "32768")]
    config = load_config(str(REPOSITORY / "configs" / "bench_dense.yaml"), overrides)
    assert memory_estimate(config, trains=False, device="CPU")["total"] / MIB == pytest.approx(698, rel=PLANNED_MEMORY)


STUDENT = {
    "num_layers": 2, "hidden_size": 192, "num_heads": 4, "intermediate_size": 512, "vocab_size": 16000,
    "seq_length": 256,
}  # fmt: skip
TEACHER = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "intermediate_size": 1536, "vocab_size": 16000,
}  # fmt: skip
NARROW = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 4096}
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 4096}


@pytest.mark.parametrize(
    ("teacher", "student", "dtype", "batch", "measured_mib"),
    [
        ({}, {}, "float32", 16, 1010), ({}, {}, "bfloat16", 16, 944), ({}, {}, "nf4", 16, 937),
        ({}, BFLOAT16, "bfloat16", 16, 946), (WIDE, NARROW, "float32", 32, 1043),
        ({"vocab_size": 65536, "num_hidden_layers": 2}, {"vocab_size": 65536}, "float32", 4, 1340),
    ],
)  # fmt: skip
def test_the_memory_of_a_distillation_is_near_what_was_measured(
    tmp_path: Path, teacher: dict, student: dict, dtype: str, batch: int, measured_mib: int
) -> None:
    """Without the teacher the first one takes 734 MiB."""
    (tmp_path / "config.json").write_text(json.dumps(TEACHER | teacher))
    sections = {
        "model": {"model_config": STUDENT | student}, "runner_config": {"batch_size": batch},
        "loss": {"type": "distillation", "teacher": str(tmp_path), "teacher_dtype": dtype},
    }  # fmt: skip
    found = memory_estimate(parse_config("distillation", json.dumps(sections)), trains=True, device="CPU")
    assert found["total"] / MIB == pytest.approx(measured_mib, rel=PLANNED_MEMORY)


def test_a_run_that_does_not_fit_is_told_so() -> None:
    assert list(memory_notes(2000 * MIB, left_bytes=2000 * MIB)) == []
    (note,) = memory_notes(2001 * MIB, left_bytes=1000 * MIB)
    assert "about 2,001 MiB of memory and 1,000 MiB are left" in note
    huge = plan_of("bench_dense", runner_config__batch_size=8192, train_dataset__data_loader__num_samples=8192)
    assert any("MiB are left" in note for note in huge.notes)


def test_a_run_whose_weights_cannot_fit_is_refused() -> None:
    """Before MindSpore builds them: it answers with a MemoryError, or with an unknown error."""
    for size in ({"hidden_size": 16777216}, {"vocab_size": 16777216, "hidden_size": 4096}):
        with pytest.raises(UserError, match=r"alone take [\d,.]+ GiB of memory, and this machine has") as caught:
            plan_of("quickstart", **{f"model__model_config__{name}": value for name, value in size.items()})
        assert "quickstart.yaml:" in str(caught.value) and "reduce num_layers, hidden_size" in str(caught.value)
    config = load_config(str(REPOSITORY / "configs" / "quickstart.yaml"), [])
    parts = memory_estimate(config, trains=True, device="CPU")
    exact = 4 * (parts["weights"] + parts["gradients"] + parts["optimizer state"])
    check_host_memory(config, parts, ranks=4, total_bytes=exact)
    with pytest.raises(UserError, match="of the 4 ranks of this host alone take"):
        check_host_memory(config, parts, ranks=4, total_bytes=exact - 1)


def test_memory_without_training_is_that_of_the_weights() -> None:
    config = load_config(str(REPOSITORY / "configs" / "quickstart.yaml"), [])
    parts = memory_estimate(config, trains=False, device="CPU")
    assert parts.keys() == {"MindSpore and Python", "workspaces", "weights", "total"}


def test_the_plan_counts_a_base_in_few_bytes() -> None:
    """The numbers of QLoRA, section 3: 4 bits a number and 8.5 / 64 of double quantization, here 8.125 / 64."""
    adapted = "model.model_config.pet_config={lora_rank: 2, base_dtype: %s}"

    def parts(dtype: str, *pairs: str) -> dict[str, int]:
        return memory_estimate(load(BASE, adapted % dtype, *pairs), True, "CPU")

    wide = parts("float32")
    shapes = all_shapes(load(BASE).network)
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    others = sum(sizes.values()) - layers
    for dtype, bits in (("bfloat16", 16), ("int8", 8 + 32 / 64), ("nf4", 4 + 8.125 / 64)):
        found = parts(dtype)
        saved = layers * (32 - bits) / 8 + others * 2
        assert wide["weights"] - found["weights"] == pytest.approx(saved, rel=SMALL_ARRAYS)
        one_layer = 4 * layers / load(BASE).decoder.num_layers
        assert found["decompressed layer"] == pytest.approx(one_layer, rel=SMALL_ARRAYS)
        assert found["total"] == sum(size for part, size in found.items() if part != "total")
    assert "decompressed layer" not in parts("nf4", "model.model_config.compute_dtype=bfloat16")
    sampled = parts("nf4", "sample_prompt=hello")["text samples"]
    plain = memory_estimate(load(BASE, "sample_prompt=hello"), True, "CPU")["text samples"]
    assert sampled == plain, "no merged copies"


def test_sampling_text_takes_merged_copies_of_adapted_matrices_and_a_cache() -> None:
    adapted = 'model.model_config.pet_config={lora_rank: 2, target_modules: ".*o_proj"}'

    def parts(*pairs: str, trains: bool = True) -> dict[str, int]:
        return memory_estimate(load(BASE, *pairs), trains, "CPU")

    assert "text samples" not in parts(adapted)
    single, found = (parts("sample_prompt=hello", *more) for more in ((), (adapted,)))
    shapes = all_shapes(load(BASE).network).items()
    matrices = sum(math.prod(shape) for name, shape in shapes if name.endswith("o_proj.weight"))
    assert found["text samples"] - single["text samples"] == 4 * matrices
    assert found["total"] == sum(size for part, size in found.items() if part != "total")
    predicts = parts(adapted, "run_mode=predict", "predict_data=a", trains=False)
    assert predicts["matrices merged with adapters"] == 4 * matrices
    assert parts("sample_prompt=[a, hello]")["text samples"] == 2 * single["text samples"]


@pytest.mark.parametrize(
    ("target", "more", "parts"),
    [
        ("[layers.0, embed]", "", []),
        ("[linear_qkv]", "", []),  # MindSpore Transformers' name
        ("[layers.0, wq]", "", ["target 'wq' (a.yaml:", "matches no trained parameter; the nearest names are "]),
        ("['*']", "", []),
        ("[layers.7]", "", ["monitor_config.target 'layers.7' ("]),
        ("[model]", "invert: True,", []),
        ("['.']", "invert: True,", ["matches every trained parameter, and invert leaves none to record"]),
        ("[nothing]", "monitor_on: False,", []),
    ],
)
def test_records_of_parameters_that_are_not_there_are_a_note(target: str, more: str, parts: list[str]) -> None:
    section = f"monitor_on: True, local_norm_format: log, target: {target}, {more}"
    if "monitor_on: False" in more:
        section = section.replace("monitor_on: True, ", "")
    notes = build_plan(load(f"{BASE}\nmonitor_config: {{{section}}}\n")).notes
    found = [note for note in notes if "monitor_config.target" in note]
    assert len(found) == bool(parts) and all(part in found[0] for part in parts)


def test_local_norms_of_parameters_that_are_not_there_are_a_note() -> None:
    notes = build_plan(load(f"{BASE}\nrunner_wrapper: {{local_norm: [q_proj, wq]}}\n")).notes
    [note] = [note for note in notes if "local_norm" in note]
    assert note.startswith("runner_wrapper.local_norm 'wq' (a.yaml:") and "matches no trained parameter" in note
