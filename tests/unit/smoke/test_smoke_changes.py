"""What `smoke` changes of a file: smaller, but of the same kind. The files are like MindSpore Transformers'."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from smoke_files import ALPACA, DENSE, EXPERTS
from tolerances import SIZES_OF_TWO_ROUNDINGS, SMALL_SIZE

from trainer.config import Config, Override, load_config, parse_config
from trainer.config.families import FAMILIES
from trainer.config.recompute import comm_recompute_layers, recomputed_parts
from trainer.models.spec.adapters import layer_targets
from trainer.models.spec.shapes import all_shapes
from trainer.optim.freeze import frozen_names
from trainer.parallel.mesh import Degrees
from trainer.run.prepare import build_plan
from trainer.smoke.changes import Setup, smoke_text
from trainer.smoke.data import sections_read
from trainer.smoke.degrees import KINDS, kind_name, possible_layouts
from trainer.smoke.needs import full_run_requirements
from trainer.smoke.report import changes_section
from trainer.smoke.run import _resolve_batch, smoke_changes


def small(text: str, *pairs: str, ranks: int = 1, missing: bool = True) -> tuple[Config, dict[str, tuple]]:
    """Returns the configuration that is run, and what was changed: key -> (from, to, why)."""
    overrides = [Override(*pair.split("=", 1)) for pair in pairs]
    config = parse_config("theirs.yaml", text, overrides, [])
    absent = dict.fromkeys(sections_read(config), "") if missing else {}
    changes = smoke_changes(config, Setup(3, ranks, Path("/tmp/smoke"), "CPU", absent))
    told = {change.key: change[1:] for change in changes}
    return parse_config("smoke.yaml", smoke_text(config, changes)), told


@pytest.mark.parametrize(("limit", "end"), [("58GB", " the 58 GiB of max_device_memory"), ("58 G", "included")])
def test_a_limit_of_memory_is_named_if_it_is_one(limit: str, end: str) -> None:
    """One that is none is an error of a run on an Ascend; the small copy runs on a CPU."""
    config = load_config("configs/quickstart.yaml", [Override("context.max_device_memory", limit)])
    [memory] = [need for need in full_run_requirements(config, build_plan(config), {}) if need.startswith("memory")]
    assert memory.endswith(end)


def test_a_dense_model_keeps_its_ratios_and_everything_about_the_step():
    config, told = small(DENSE)
    sizes = config.decoder
    assert (sizes.num_heads // sizes.kv_heads, sizes.kv_heads, sizes.qkv_has_bias) == (7, 2, True)
    assert sizes.hidden_size % sizes.num_heads == 0 and sizes.hidden_size <= 128 and sizes.seq_length == 128
    assert sizes.intermediate_size / sizes.hidden_size == pytest.approx(18944 / 3584, rel=SIZES_OF_TWO_ROUNDINGS)
    assert (sizes.compute_dtype, sizes.softmax_compute_type, sizes.rope_theta) == ("bfloat16", "float16", 1e6)
    assert "model.model_config.compute_dtype" not in told
    wrapper, optimizer = config.runner_wrapper, config.optimizer
    assert (wrapper.max_grad_norm, wrapper.scale_sense.loss_scale_value) == (0.5, 4096)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ([0.9, 0.95], 1e-6, 0.01)
    runner = config.runner_config
    assert (runner.batch_size, runner.gradient_accumulation_steps, runner.stop_step) == (2, 2, 3)
    assert (config.lr_schedule.lr_end, config.lr_schedule.total_steps) == (1e-6, 3)
    assert int(config.lr_schedule.warmup_ratio * 3) == 1
    monitor = config.checkpoint_monitor
    assert (monitor.save_checkpoint_steps, monitor.keep_checkpoint_max) == (2, 2)


def test_special_tokens_stay_distinct_and_equal_ones_equal():
    config, _ = small(DENSE)
    assert config.decoder.eos_token_id == [510, 511] and config.decoder.pad_token_id == 510
    assert config.decoder.vocab_size == 512


def test_layers_of_each_kind_remain():
    # Of 28 layers in two stages the first 5 and 3 are computed again: 0-4 and 15-17, as stage 0 has 15 of them.
    config, told = small(DENSE)
    assert recomputed_parts(config) == ("block", "", "")
    assert told["recompute_config.recompute"][:2] == ([5, 3], [0])
    assert config.decoder.offset == 0
    text = DENSE.replace("recompute: [5, 3], select_recompute: False",
                         "recompute: False, select_recompute: {feed_forward.mul: [0, 1], attention: 3}")
    parts = recomputed_parts(small(text.replace("pipeline_stage: 2", "pipeline_stage: 1"))[0])
    assert set(parts) == {"block", "attention", ""}


@pytest.mark.parametrize(
    ("window", "layers"),
    [("max_window_layers: 20", [False, False, True]), ("max_window_layers: 4", [False, True, True]),
     (f"layer_types: [{', '.join(['full_attention', 'sliding_attention'] * 14)}]", [False, True, False])],
)  # fmt: skip
def test_layers_with_and_without_a_window_remain(window, layers):
    text = DENSE.replace("recompute: [5, 3]", "recompute: False").replace("pipeline_stage: 2", "pipeline_stage: 1")
    keys = ("use_sliding_window: True", "sliding_window: 4096", window, "num_layers:")
    decoder = small(text.replace("num_layers:", "\n    ".join(keys)))[0].decoder
    assert [decoder.has_window(layer) for layer in range(decoder.num_layers)] == layers
    assert decoder.sliding_window == 64 == decoder.seq_length // 2


def test_one_process_has_no_degrees_and_the_table_says_why():
    config, told = small(DENSE)
    assert (config.use_parallel, config.parallel.parallel_mode) == (False, 0)
    before, after, why = told["parallel_config.pipeline_stage"]
    assert (before, after) == (2, 1) and "--ranks starts several" in why


def test_several_ranks_keep_a_kind_of_parallelism_of_the_file():
    interleaved = "parallel: {pipeline_config: {pipeline_interleave: True, pipeline_scheduler: seqpipe}, "
    text = DENSE.replace("parallel: {", interleaved).replace("num_layers:", "pp_interleave_num: 4\n    num_layers:")
    config, told = small(text.replace("model_parallel: 4", "model_parallel: 1"), ranks=2)
    parallel, decoder = config.parallel_config, config.decoder
    assert (config.use_parallel, parallel.pipeline_stage, parallel.data_parallel) == (True, 2, 1)
    assert (decoder.num_layers, decoder.pp_interleave_num, decoder.offset, parallel.micro_batch_num) == (4, 2, 0, 2)
    assert config.parallel.pipeline_config.pipeline_scheduler == "1f1b"
    assert told["parallel_config.data_parallel"][:2] == (2, 1)
    alone = DENSE.replace("pipeline_stage: 2", "pipeline_stage: 1")
    config, told = small(alone, ranks=4)
    assert (config.parallel_config.model_parallel, config.parallel_config.data_parallel) == (2, 2)
    assert told["parallel_config.model_parallel"][2] == "--ranks 4, 2 for each kind of parallelism"


def test_the_layers_that_are_recomputed_are_no_counts_of_stages():
    text = DENSE.replace("recompute: [5, 3]", "select_comm_recompute: [3, 0], recompute: [4, 0]")
    alone, staged = (small(text.replace("offset: [1, -1]", "offset: 0"), ranks=ranks)[0] for ranks in (1, 8))
    assert staged.parallel_config.pipeline_stage == 2
    for config in (alone, staged):
        assert recomputed_parts(config) == ("block", "", "") and comm_recompute_layers(config) == {0}
    both = DENSE.replace("recompute: [5, 3]", "recompute: [13, 14]")
    assert recomputed_parts(small(both, ranks=8)[0]).count("block") == 2


def test_ranks_share_the_state_of_small_matrices():
    plain = DENSE.replace("pipeline_stage: 2", "pipeline_stage: 1").replace("model_parallel: 4", "model_parallel: 1")
    config, _ = small(plain, ranks=2)
    assert config.parallel.enable_parallel_optimizer
    assert config.parallel.parallel_optimizer_config.parallel_optimizer_threshold == 1


def test_a_kind_that_is_refused_is_left_out_with_the_reason(monkeypatch):
    def refusals(config, ranks, device):
        degrees = config.parallel_config
        if degrees.pipeline_stage > 1 and degrees.model_parallel > 1:
            yield "parallel_config.model_parallel: not built"

    monkeypatch.setattr("trainer.smoke.run.refusals", refusals)
    config, told = small(DENSE, ranks=8)
    degrees = config.parallel_config
    assert (degrees.pipeline_stage, degrees.model_parallel, degrees.data_parallel) == (2, 1, 4)
    assert told["parallel_config.model_parallel"][2] == "refused: parallel_config.model_parallel: not built"


def test_layouts_keep_as_many_kinds_as_there_are_ranks_for():
    def best(ranks: int, *asked: str) -> list[int]:
        found = possible_layouts(asked, ranks)
        assert all(one.degrees.ranks == ranks for one in found)
        assert found[-1].degrees == Degrees(data_parallel=ranks)
        return list(found[0].degrees)

    pipeline, tensor, experts, context, data, sharing = KINDS
    # stages, data, context, tensor, experts
    assert best(8, pipeline, tensor, data, sharing) == [2, 2, 1, 2, 1]
    assert best(8, *KINDS) == [2, 1, 2, 2, 2]
    assert best(8, tensor, experts) == [1, 4, 1, 2, 2]
    assert best(4, pipeline, tensor, experts, data) == [2, 1, 1, 2, 2]
    assert best(2, pipeline, tensor) == [2, 1, 1, 1, 1]
    assert best(2, pipeline, tensor, experts) == [1, 1, 1, 2, 2]
    assert best(2, pipeline, experts, data) == [1, 2, 1, 1, 2]
    assert best(6, pipeline, tensor) == [2, 3, 1, 1, 1]
    assert best(3, pipeline, tensor, experts, data) == [1, 3, 1, 1, 1]
    assert best(1, *KINDS) == [1, 1, 1, 1, 1]
    assert [one.shares for one in possible_layouts([data, sharing], 2)] == [True, False]


def test_micro_batches_of_a_pipeline_are_accumulated():
    config, told = small(EXPERTS)
    assert config.runner_config.gradient_accumulation_steps == 2
    assert "in place of the 2 micro-batches" in told["runner_config.gradient_accumulation_steps"][2]


def test_data_that_is_not_here_has_the_same_form():
    config, told = small(DENSE)
    assert config.train_dataset.data_loader.type == "MindDataset" and config.do_eval
    assert config.train_dataset.input_columns == ["input_ids", "target_ids", "attention_mask"]
    assert config.train_dataset.data_loader.num_samples == 3 * 2 * 2
    few = small(DENSE, "train_dataset.data_loader.num_samples=1")[0].train_dataset.data_loader
    assert few.num_samples == 3 * 2 * 2  # otherwise the run would end before its third step
    assert told["do_eval"][2] == "the file has an eval_dataset"
    assert config.eval_dataset.data_loader.dataset_dir == "/tmp/smoke/data/eval_dataset/rows.mindrecord"
    loader = small(EXPERTS)[0].train_dataset.data_loader
    assert loader.config.data_path[::2] == ["0.3", "0.7"] and loader.config.eod_mask_loss
    assert loader.config.seq_length == 128 and loader.config.eod == 511 and loader.sizes == [6, 0, 0]
    loader = small(ALPACA)[0].train_dataset.data_loader
    assert (loader.path, loader.data_files) == ("json", "/tmp/smoke/data/train_dataset/train.json")
    assert [step["type"] for step in loader.handler] == ["take", "AlpacaInstructDataHandler", "PackingHandler"]
    assert "tokenizer" not in loader.handler[1]


def test_real_tokens_need_the_whole_vocabulary():
    config, told = small(DENSE, missing=False)
    assert config.decoder.vocab_size == 152064 and config.decoder.eos_token_id == [151643, 151645]
    assert told["train_dataset.data_loader.dataset_dir"][2] == "its first rows, of 128 tokens each"


def test_experts_keep_their_groups_and_the_layers_their_pattern():
    config, told = small(EXPERTS)
    decoder, moe = config.decoder, config.decoder.experts
    assert (decoder.num_layers, decoder.mtp_depth, decoder.moe_layers) == (3, 1, (1, 2, 3))
    assert (moe.n_group, moe.topk_group, moe.num_experts_chosen, moe.first_k_dense_replace) == (8, 4, 8, 1)
    assert moe.expert_num % 8 == 0 and moe.num_experts_chosen < 4 * moe.expert_num // 8
    assert decoder.shared_expert_size == 2 * decoder.expert_size
    assert (decoder.num_heads, decoder.kv_heads, decoder.head_size) == (16, 2, 8)
    assert decoder.hidden_size / 128 == pytest.approx(4096 / (64 * 128), rel=SMALL_SIZE)
    balance, rate = config.callbacks[0], config.callbacks[1]
    assert balance.expert_num == rate.expert_num == moe.expert_num and (rate.num_layers, rate.mtp_depth) == (3, 1)
    assert (config.lr_schedule.warmup_steps, config.lr_schedule.total_steps) == (1, 3)
    assert config.checkpoint_monitor.save_checkpoint_steps == 2


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ("moe_layer_freq: 2", [1, 0, 1]),
        ("moe_layer_freq: [0, 0, 1, 1, 1, 1]", [0, 1, 1]),
        ("decoder_sparse_step: 2", [0, 1, 0]),
        ("mlp_only_layers: [0, 5]", [0, 1, 1]),
        ("first_k_dense_replace: 2", [0, 1, 1]),
        ("moe_layer_freq: 1", [1, 1]),
    ],
)
def test_patterns_of_layers_with_experts(keys, pattern):
    sizes = "num_layers: 6, hidden_size: 512, num_heads: 8, vocab_size: 300, seq_length: 64"
    text = f"model: {{model_config: {{{sizes}, moe_config: {{expert_num: 16, num_experts_chosen: 2, {keys}}}}}}}\n"
    decoder = small(text)[0].decoder
    assert [int(decoder.is_moe_layer(layer)) for layer in range(decoder.num_layers)] == pattern
    assert decoder.experts.expert_num == 8


def test_frozen_weights_and_adapters_of_layers_go_with_them():
    sizes = "num_layers: 8, hidden_size: 512, num_heads: 8, vocab_size: 300, seq_length: 64"
    frozen = "freeze: {include: ['model.layers.6.mlp.*', {layers: 0-3}, embeddings], exclude: ['*.3.*norm*']}\n"
    config, told = small(f"model: {{model_config: {{{sizes}}}}}\n{frozen}")
    # The kinds: frozen (0-2), all but its norms (3), nothing (4, 5, 7), the feed-forward layer (6).
    assert config.decoder.num_layers == 5
    names = frozen_names(config)
    assert "model.embed_tokens.weight" in names
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2", "4"}
    assert "model.layers.4.mlp.up_proj.weight" in names and "model.layers.0.input_layernorm.weight" in names
    assert "model.layers.2.mlp.up_proj.weight" in names and "model.layers.2.input_layernorm.weight" not in names
    assert all(".mlp." in name for name in names if name.startswith("model.layers.4."))
    adapters = "pet_config: {lora_rank: 16, lora_alpha: 32, target_modules: 'model.layers.[4-7].*q_proj'}"
    config, told = small(f"model: {{model_config: {{{sizes}, {adapters}}}}}\n")
    pet = config.decoder.pet_config
    assert [layer_targets(config.decoder, layer) for layer in range(3)] == [(), (), ("self_attn.q_proj",)]
    assert (pet.lora_rank, pet.scale) == (4, 2.0)
    root = adapters.replace("lora_alpha: 32", "lora_alpha: 32, use_rslora: True")
    pet = small(f"model: {{model_config: {{{sizes}, {root}}}}}\n")[0].decoder.pet_config
    assert (pet.lora_rank, pet.lora_alpha, pet.scale) == (4, 16.0, 8.0)
    plain = small(f"model: {{model_config: {{{sizes}, pet_config: {{target_modules: '.*wq|.*wv'}}}}}}\n")[1]
    assert "model.model_config.pet_config.target_modules" not in plain


def test_a_folder_that_is_not_here_is_a_small_model_with_bytes():
    config, told = small(ALPACA)
    assert config.pretrained_model_dir is None and config.train_dataset.tokenizer.type == "bytes"
    assert told["pretrained_model_dir"][2] == "it is not here: a small LlamaForCausalLM"
    assert config.decoder.num_layers == 2 and config.decoder.vocab_size >= 257


def test_latent_attention_and_a_mapped_embedding_are_smaller_in_their_ratios():
    sizes = "num_layers: 8, hidden_size: 7168, num_heads: 128, intermediate_size: 18432, vocab_size: 300"
    latent = "multi_latent_attention: True, q_lora_rank: 1536, kv_lora_rank: 512, v_head_dim: 128"
    decoder = small(f"model: {{model_config: {{{sizes}, {latent}, qk_layernorm: True, seq_length: 64}}}}\n")[0].decoder
    widths = (decoder.q_lora_rank, decoder.kv_lora_rank, decoder.qk_nope_head_dim, decoder.qk_rope_head_dim)
    assert widths == (16, 8, 16, 8) and (decoder.v_head_dim, decoder.num_heads, decoder.hidden_size) == (16, 4, 64)
    mapped = "embedding_size: 3584, layers_group: 4"
    decoder = small(f"model: {{model_config: {{{sizes}, {mapped}, seq_length: 64}}}}\n")[0].decoder
    assert decoder.embedding_width * 2 == decoder.hidden_size and (decoder.num_layers, decoder.layers_group) == (3, 2)


def test_weights_that_fit_are_loaded(tmp_path):
    sizes = "num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 300, seq_length: 512, compute_dtype: bfloat16"
    text = f"load_checkpoint: {tmp_path}\nmodel: {{model_config: {{{sizes}}}}}\n"
    assert small(text)[0].load_checkpoint == str(tmp_path)
    config, told = small(text.replace("num_layers: 2", "num_layers: 3"))
    assert (config.load_checkpoint, told["load_checkpoint"][2]) == ("", "new weights: those have the full size")
    gone = small(text.replace(str(tmp_path), "/nowhere"))[1]
    assert gone["load_checkpoint"] == ("/nowhere", "", "new weights: it is not here")


def test_a_small_model_stays_as_it_is():
    sizes = "num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 300, seq_length: 32"
    text = f"model: {{model_config: {{{sizes}}}}}\nrunner_config: {{batch_size: 2}}\n"
    assert not [key for key in small(text)[1] if key.startswith("model.")]


def test_an_evaluation_of_another_kind_is_left_out():
    text = DENSE.replace("{type: MindDataset, dataset_dir: '/nowhere/eval'}", "{type: SQuADDataLoader}")
    config, _ = small(text)
    assert config.eval_dataset is None and not config.do_eval


WITHOUT_MTP = (
    "SmolLM3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    *(kind for kind, family in FAMILIES.items() if family.model.get("normalization") == "LayerNorm"),
)  # fmt: skip
"""Classes that are refused with multi-token prediction modules."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_of_each_class_becomes_small(kind):
    sizes = ("num_layers: 12, hidden_size: 6144, num_heads: 48, n_kv_heads: 8, intermediate_size: 24576,"
             f" vocab_size: 150000, seq_length: 4096, mtp_depth: {int(kind not in WITHOUT_MTP)}")
    shared = int("moe_mlp_has_bias" not in FAMILIES[kind].experts)  # refused beside shared experts
    experts = f"{{expert_num: 160, num_experts_chosen: 8, moe_intermediate_size: 1536, shared_expert_num: {shared}}}"
    moe = f", moe_config: {experts}" if FAMILIES[kind].is_mixture else ""
    config, _ = small(f"model: {{arch: {{type: {kind}}}, model_config: {{{sizes}{moe}}}}}\n")
    before = parse_config("a.yaml", f"model: {{arch: {{type: {kind}}}, model_config: {{{sizes}{moe}}}}}\n").decoder
    weights = sum(math.prod(shape) for shape in all_shapes(config.decoder).values())
    assert weights < 2_000_000 and config.model.arch.type == kind and config.decoder.mtp_depth == before.mtp_depth
    parts = {name.split(".", 3)[-1] for name in all_shapes(before)}
    assert {name.split(".", 3)[-1] for name in all_shapes(config.decoder)} == parts, "kinds of weights are missing"


def test_the_table_of_a_newer_file_has_its_keys_and_values():
    file = Path(__file__).resolve().parents[3] / "configs" / "pynative" / "pipeline.yaml"
    config = load_config(str(file))
    setup = Setup(3, 1, Path("/tmp/smoke"), "CPU", dict.fromkeys(sections_read(config), ""))
    rows = changes_section(smoke_changes(_resolve_batch(config), setup), config)[1][1:]
    values = {key: (before, after) for key, before, after, _ in rows}
    assert values["parallelism.pipeline_parallel"] == ("2", "1")
    assert values["parallelism.pipeline_parallel_layers_per_stage"][0] == '["0-6, 14-20", "7-13, 21-27"]'
    assert values["training.steps"] == ("1000", "3") and values["training.global_batch_size"] == ("16", "2")
    assert values["model.num_hidden_layers"] == ("28", "2")
    sections = ("model", "train_dataset", "training", "lr_scheduler", "checkpoint", "parallelism", "context")
    assert {key.partition(".")[0] for key in values} == set(sections)
    assert "model_config" not in str(rows) and "micro_batch_num" not in str(rows)
    names = [kind_name(kind, config.source) for kind in KINDS]
    assert names == ["pipeline_parallel", "tensor_parallel", "expert_parallel", "context_parallel", "data_parallel",
                     "data_parallel_shard"]


def test_a_small_copy_has_no_teacher(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 4000}')
    loss = f"loss: {{type: distillation, teacher: {tmp_path}, alpha: 0.3}}\n"
    config, changes = small((Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml").read_text() + loss)
    assert config.loss is None and "no teacher" in str(changes["loss"])


def test_pairs_of_answers_have_room_for_both():
    text = (Path(__file__).resolve().parents[3] / "configs" / "dpo.yaml").read_text()
    text = text.replace("seq_length: 512 ", "seq_length: 4096 ")
    config, changes = small(text.replace("position_embeddings: 512", "position_embeddings: 4096"), missing=False)
    assert config.decoder.seq_length == 1024
    assert config.train_dataset.overlong == "drop" and "train_dataset.overlong" in changes
