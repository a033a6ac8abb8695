"""Folders that transformers loads: config.json, generation_config.json, tokenizer, shards, dtypes.

scripts/check_folders.py proves with transformers itself what is checked here by files and keys.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
from config_helpers import BASE, failure, load
from golden_files import load_model_case, model_case_names
from safetensors.numpy import load_file, save_file
from tolerances import U_BFLOAT16, U_FLOAT16

from trainer.checkpoint.adapters import adapter_config, load_initial_weights
from trainer.checkpoint.hugging_face import class_on_disk, folder_files, parse_size, split_into_files, write_weights
from trainer.checkpoint.tensor_names import to_disk
from trainer.checkpoint.weights import check_teacher_files, open_teacher_weights, read_weights
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.main import dispatch
from trainer.config import config_notes, parse_config
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import class_differences, config_json, saved_class
from trainer.data.source.records import Record, raise_error
from trainer.data.source.samples import to_sample
from trainer.data.tokens.chat_template import load_chat_template
from trainer.data.tokens.encode import encode_samples
from trainer.data.tokens.tokenizer import ByteTokenizer, load_tokenizer
from trainer.errors import RunError
from trainer.models.spec.shapes import all_shapes, parameter_shapes
from trainer.run.export import export
from trainer.run.prepare import build_plan
from trainer.storage.bfloat16 import as_bfloat16, as_float32

GOLDEN = [*model_case_names(), *model_case_names("experts")]
ADAPTED = BASE.replace("    seq_length: 32\n", """    seq_length: 32
    pet_config: {{target_modules: q_proj}}
""") + "adapter_id: {folder}\n"
SIZES = "num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 300, seq_length: 16"


def source(path: Path, name: str = "model_qwen3") -> Path:
    """Returns a folder with a golden model."""
    case = load_model_case(name)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(case.metadata["config_as_saved"]))
    save_file(dict(case.weights), path / "model.safetensors")
    return path


def config_file(path: Path, folder: Path, tokenizer: str = "{type: bytes}") -> Path:
    text = f"pretrained_model_dir: {folder}\ntrain_dataset: {{tokenizer: {tokenizer}}}\n"
    path.write_text(text)
    return path


def load_folder(folder: Path):
    return parse_config("a.yaml", f"pretrained_model_dir: {folder}\n")


@pytest.mark.parametrize("name", GOLDEN)
def test_config_json_says_what_it_was_read_from(tmp_path: Path, name: str) -> None:
    theirs = load_model_case(name).metadata["config_as_saved"]
    config = load_folder(source(tmp_path / "theirs", name))
    kind = config.model.arch.type
    assert saved_class(config.decoder, kind) == kind
    ours = config_json(config.decoder, kind)
    for key, value in ours.items():
        if theirs.get(key) is not None and key not in ("dtype", "architectures", "use_cache"):
            if key == "rope_parameters":
                assert value.items() >= theirs[key].items()
            else:
                assert value == pytest.approx(theirs[key]), key
    assert (ours["architectures"], ours["model_type"]) == ([kind], theirs["model_type"])
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(ours))
    assert config_json(load_folder(tmp_path / "ours").decoder, kind) == ours


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if FAMILIES[kind].in_transformers])
def test_a_yaml_of_each_class_becomes_a_config_json_of_it(kind: str) -> None:
    experts = ", expert_num: 4, num_experts_chosen: 2" if FAMILIES[kind].is_mixture else ""
    experts += ", shared_expert_num: 1" if kind in ("Qwen2MoeForCausalLM", "Dots1ForCausalLM") else ""
    decoder = load(f"model: {{arch: {{type: {kind}}}, model_config: {{{SIZES}{experts}}}}}\n").decoder
    assert class_differences(decoder, kind) == []
    assert config_json(decoder, kind).keys() >= FAMILIES[kind].defaults.keys() - {"rope_scaling"}


@pytest.mark.parametrize(
    ("keys", "saved", "differences"),
    [
        ("use_qk_norm: True", "Qwen3ForCausalLM", []),
        ("qkv_has_bias: True", "Qwen2ForCausalLM", []),
        ("attention_bias: True, mlp_bias: True", "LlamaForCausalLM", []),
        ("expert_num: 4, num_experts_chosen: 2", "MixtralForCausalLM", []),
        ("expert_num: 4, use_qk_norm: True, norm_topk_prob: False", "Qwen3MoeForCausalLM", []),
        ("sliding_window: 8", "MistralForCausalLM", []),
        ("sliding_window: 8, qkv_has_bias: True, layer_types: [full_attention, sliding_attention]",
         "Qwen2ForCausalLM", []),
        ("rope_interleave: True, rotary_pct: 0.5", "GlmForCausalLM", []),
        ("rope_interleave: True", "GlmForCausalLM", []),
        ("rotary_pct: 0.5", "Phi3ForCausalLM", []),
        ("mlp_down_has_bias: True", "TelechatForCausalLM", ["a bias on one side of the feed-forward layer"]),
        ("embedding_size: 16", "TeleChat3ForCausalLM", ["an embedding of another width"]),
    ],
)
def test_a_model_is_saved_as_the_class_that_computes_it(keys: str, saved: str, differences: list[str]) -> None:
    decoder = load(f"model: {{arch: {{type: LlamaForCausalLM}}, model_config: {{{SIZES}, {keys}}}}}\n").decoder
    assert saved_class(decoder, "LlamaForCausalLM") == saved
    assert class_differences(decoder, saved) == []
    assert differences == [] or class_differences(decoder, "LlamaForCausalLM") == differences


LATENT = "multi_latent_attention: True, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8"
MIXTURE = "expert_num: 4, num_experts_chosen: 2"


@pytest.mark.parametrize(
    ("kind", "keys", "difference"),
    [
        ("LlamaForCausalLM", LATENT, "multi-head latent attention"),
        ("LlamaForCausalLM", "rope_scaling: {type: dynamic, alpha: 3}", "dynamic scaling"),
        ("Qwen3ForCausalLM", "qk_norm_after_rotary: True, sliding_window: 8", "in another place"),
        ("LlamaForCausalLM", "rotary_pct: 0.5, use_qk_norm: True", "rotary positions on a part of a head"),
        ("LlamaForCausalLM", "sliding_window: 8, layer_types: [full_attention, sliding_attention]", "a sliding window"),
        ("LlamaForCausalLM", "sliding_window: 8, attention_bias: True", "a sliding window"),
        ("Phi3ForCausalLM", "rope_scaling: {type: linear, factor: 2}, rotary_pct: 0.5", "linear scaling"),
        ("MistralForCausalLM", "qkv_has_bias: True, attn_proj_has_bias: True, sliding_window: 8", "other biases"),
        ("LlamaForCausalLM", "qkv_has_bias: True, mlp_has_bias: True, sliding_window: 8", "other biases"),
        ("ChatGLM2ForConditionalGeneration", "use_qk_norm: True", "norms on query and key"),
        ("TelechatForCausalLM", "use_qk_norm: True, rope_interleave: True", "norms on query and key"),
        ("TelechatForCausalLM", f"{MIXTURE}, shared_expert_num: 1", "shared experts"),
        ("TelechatForCausalLM", f"{MIXTURE}, first_k_dense_replace: 1", "dense layers"),
        ("MixtralForCausalLM", f"{MIXTURE}, balance_via_topk_bias: True", "an expert bias"),
        ("Qwen3MoeForCausalLM", f"{MIXTURE}, shared_expert_num: 1", "shared experts"),
        ("DeepseekV3ForCausalLM", f"{LATENT}, {MIXTURE}, shared_expert_num: 1, scoring_func: softmax", "a softmax"),
    ],
)
def test_a_model_that_no_class_computes_has_no_config_json(
    tmp_path: Path, kind: str, keys: str, difference: str
) -> None:
    model = f"model: {{arch: {{type: {kind}}}, model_config: {{{SIZES}, {keys}}}}}\n"
    config = load(model)
    assert any(difference in what for what in class_differences(config.decoder, kind))
    assert "config.json" not in folder_files(config)
    assert any("checkpoints have no config.json" in note for note in config_notes(config))
    weights = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(config.decoder).items()}
    save_file(to_disk(weights, class_on_disk(config)), tmp_path / "model.safetensors")
    loaded = load(f"{model}load_checkpoint: {tmp_path}\n")
    message = failure(lambda: export(loaded, tmp_path / "out", merge=False))
    assert f"unlike a {kind}" in message and difference in message and not (tmp_path / "out").exists()
    assert export(loaded, tmp_path / "weights.safetensors", merge=False).files == ("weights.safetensors",)


# ---- tokenizer -------------------------------------------------------------------------------------------------------

TEXTS = ["plain", "It costs 5 \N{EURO SIGN}.\n\tTwo  spaces ", "\x00\x7f \N{GRINNING FACE}", "a<|endoftext|>b", ""]


def test_the_byte_tokenizer_is_a_tokenizer_json(tmp_path: Path) -> None:
    import tokenizers

    config = load(f"model_config: {{{SIZES}}}\ntrain_dataset: {{data_loader: {{dataset_dir: stdlib}}}}\n")
    files = folder_files(config, form="chat")
    theirs, ours = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"]), ByteTokenizer()
    for text in TEXTS:
        assert theirs.encode(text).ids == ours.encode(text)
        assert theirs.decode(ours.encode(text), skip_special_tokens=False) == text
    assert theirs.get_vocab_size() == 257
    described = json.loads(files["tokenizer_config.json"])
    assert described["chat_template"].encode() == files["chat_template.jinja"]
    assert described["eos_token"] == "<|endoftext|>" == theirs.id_to_token(256)
    generation, model = (json.loads(files[name]) for name in ("generation_config.json", "config.json"))
    assert generation["eos_token_id"] == model["eos_token_id"] == 256 and generation["do_sample"] is False
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    again = load_folder(tmp_path)
    texts = [load_chat_template(config, "train_dataset", load_tokenizer(config)).render(messages)
             for config in (config, again)]
    assert texts[0] == texts[1] and texts[0].endswith("Yes<|endoftext|>")
    assert folder_files(again)["config.json"] == files["config.json"]
    assert folder_files(again)["tokenizer.json"] == files["tokenizer.json"]


def test_a_folder_asks_as_the_training_did(tmp_path: Path) -> None:
    config = load(f"model_config: {{{SIZES}}}\ntrain_dataset: {{data_loader: {{dataset_dir: stdlib}}}}\n")
    for form in ("text", None):
        files = folder_files(config, form=form)
        assert "chat_template.jinja" not in files and "chat_template" not in json.loads(files["tokenizer_config.json"])
    for name, content in folder_files(config, form="alpaca").items():
        (tmp_path / name).write_bytes(content)
    again = load_folder(tmp_path)
    template = load_chat_template(again, "train_dataset", load_tokenizer(again))
    record = Record({"instruction": "Say yes.", "output": "Yes"}, "a.jsonl:1", 0)
    sample = to_sample(record, {})
    tokenizer = load_tokenizer(config)
    plain = load_chat_template(config, "train_dataset", tokenizer)
    trained = next(encode_samples([(sample, 0)], tokenizer, plain, "assistant", 1, raise_error)).tokens
    assert load_tokenizer(again).encode(template.render(sample.messages)) == trained.tolist()
    assert template.render(sample.messages[:1], add_generation_prompt=True) == sample.prompt


def test_the_files_of_a_tokenizer_are_copied(tmp_path: Path) -> None:
    made = folder_files(load(f"model_config: {{{SIZES}}}\ntrain_dataset: {{data_loader: {{dataset_dir: stdlib}}}}\n"))
    (tmp_path / "tokenizer.json").write_bytes(made["tokenizer.json"])
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = f"train_dataset: {{tokenizer: {{type: huggingface, path: {tmp_path}}}}}\n"
    files = folder_files(load(f"model_config: {{{SIZES}}}\n{tokenizer}"))
    assert files["chat_template.jinja"] == b"{{ messages }}"
    assert files["tokenizer.json"] == made["tokenizer.json"]
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"


def test_random_tokens_have_no_tokenizer() -> None:
    synthetic = "train_dataset: {data_loader: {type: SyntheticDataset, num_samples: 4}}\n"
    files = folder_files(load(f"model_config: {{{SIZES}}}\n{synthetic}"))
    assert set(files) == {"config.json", "generation_config.json"}


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_bfloat16_rounds_to_nearest_even() -> None:
    ones = np.array([1.0, 1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8, -2.5, 0.0, np.inf, 3.4e38], np.float32)
    right = [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xC020, 0, 0x7F80, 0x7F80]
    assert as_bfloat16(ones).tolist() == right
    not_numbers = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(as_float32(as_bfloat16(not_numbers))).all()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 0), ("bfloat16", U_BFLOAT16), ("float16", 2 * U_FLOAT16)])
def test_every_dtype_reads_back(tmp_path: Path, dtype: str, limit: float) -> None:
    arrays = {"b": np.random.RandomState(1).standard_normal((3, 5)).astype(np.float32), "a": np.ones(1, np.float32)}
    arrays["view"] = arrays["b"].T
    write_weights(tmp_path / "x.safetensors", arrays, dtype)
    with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    for name, array in read_weights(tmp_path / "x.safetensors").items():
        assert np.abs(array - arrays[name]).max() <= limit * np.abs(arrays[name]).max()
    if dtype == "float16":
        message = failure(lambda: write_weights(tmp_path / "y", {"big": np.array([1e5], np.float32)}, dtype))
        assert "big has numbers beyond the range of float16" in message


@pytest.mark.parametrize(("text", "size"), [("5GB", 5e9), ("500MB", 5e8), ("2GiB", 2 << 30), ("1.5kb", 1500), ("7", 7)])
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5 apples"])
def test_what_is_no_size(text: str) -> None:
    assert "is not a size" in failure(lambda: parse_size(text))


def test_shards_are_filled_in_order() -> None:
    weights = {name: np.zeros(size, np.float32) for name, size in (("a", 2), ("b", 3), ("c", 9), ("d", 1), ("e", 1))}
    assert list(split_into_files(weights, 20, "float32").values()) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(split_into_files(weights, 100, "bfloat16")) == ["model.safetensors"]


def test_export_writes_a_folder_in_shards(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, output = source(tmp_path / "source"), tmp_path / "exported"
    config = config_file(tmp_path / "a.yaml", folder)
    arguments = ["export", "--config", str(config), "--output", str(output)]
    dispatch([*arguments, "--shard_size", "20KB"])
    names = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(names) > 1 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((output / "model.safetensors.index.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert index["weight_map"].keys() == weights.keys() and set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
    for name, array in read_weights(output).items():
        np.testing.assert_array_equal(array, weights[name])
    assert f"wrote {output}: the weights of {folder}" in capsys.readouterr().out
    assert "is there already" in failure(lambda: dispatch(arguments))
    dispatch([*arguments, "--force", "--dtype", "bfloat16"])
    assert {path.name for path in output.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_folder(output)
    assert again.decoder.head_dim == 16 and again.model.arch.type == "Qwen3ForCausalLM"


def test_an_export_that_fails_leaves_the_weights_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = source(tmp_path / "source")
    output = tmp_path / "exported"
    arguments = ["export", "--config", str(config_file(tmp_path / "a.yaml", folder)), "--output", str(output)]
    dispatch(arguments)
    earlier = (output / "model.safetensors").read_bytes()

    def full_disk(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.run.export.write_weights", full_disk)
    with pytest.raises(RunError, match="No space left"):
        dispatch([*arguments, "--force", "--dtype", "bfloat16"])
    assert (output / "model.safetensors").read_bytes() == earlier


def test_export_of_a_file_writes_the_weights_alone(tmp_path: Path) -> None:
    folder = source(tmp_path / "source")
    output = tmp_path / "alone" / "w.safetensors"
    dispatch(["export", "--config", str(config_file(tmp_path / "a.yaml", folder)), "--output", str(output)])
    assert [path.name for path in output.parent.iterdir()] == ["w.safetensors"]


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    folder = source(tmp_path / "source")
    arguments = ["export", "--config", str(config_file(tmp_path / "a.yaml", folder)), "--output", str(tmp_path / "x")]
    assert "no such dtype" in failure(lambda: dispatch([*arguments, "--dtype", "int8"]))
    assert "is not a size" in failure(lambda: dispatch([*arguments, "--shard_size", "many"]))
    message = failure(lambda: dispatch(["export", str(folder), "--output", str(tmp_path / "x")]))
    assert f"{folder}: the weights of an export come after --load_checkpoint" in message
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "COMPLETE").write_text("{}")
    assert "is a checkpoint of a training" in failure(lambda: dispatch([*arguments, "--force"]))


def test_a_folder_whose_files_contradict_or_hang_is_refused(tmp_path: Path) -> None:
    ones = np.ones((2, 2), np.float32)
    write_weights(tmp_path / "model-1.safetensors", {"a": ones, "b": ones}, "float32")
    write_weights(tmp_path / "model-2.safetensors", {"c": ones, "b": ones}, "float32")
    message = failure(lambda: read_weights(tmp_path))
    assert "model-1.safetensors and model-2.safetensors both contain b" in message and "Fix: " in message
    (tmp_path / "model-2.safetensors").unlink()
    assert read_weights(tmp_path).keys() == {"a", "b"}
    os.mkfifo(tmp_path / "model-2.safetensors")  # opening it would wait for ever
    assert "model-2.safetensors" in failure(lambda: read_weights(tmp_path))


def test_the_index_of_a_folder_says_which_files_have_its_weights(tmp_path: Path) -> None:
    ones = np.ones((2, 2), np.float32)
    index = tmp_path / "model.safetensors.index.json"
    for name in ("model-1", "model-2", "consolidated"):
        write_weights(tmp_path / f"{name}.safetensors", {name: ones}, "float32")
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in ("model-1", "model-2")}}))
    assert read_weights(tmp_path).keys() == {"model-1", "model-2"}
    (tmp_path / "model-2.safetensors").unlink()
    message = failure(lambda: read_weights(tmp_path))
    assert "model-2.safetensors" in message and "No such file" in message
    index.write_text("{}")
    assert "model.safetensors.index.json cannot be read: " in failure(lambda: read_weights(tmp_path))
    index.unlink()
    assert read_weights(tmp_path).keys() == {"model-1"}
    (tmp_path / "model-1.safetensors").unlink()
    assert read_weights(tmp_path).keys() == {"consolidated"}


def _pipe(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    os.mkfifo(folder / "more.safetensors")


def _twice(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file({"lm_head.weight": arrays["lm_head.weight"]}, folder / "more.safetensors")


def _cut(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def _whole_numbers(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file({"lm_head.weight_scale": np.ones(4, np.int8)}, folder / "more.safetensors")


def _turned(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file(arrays | {"lm_head.weight": np.ascontiguousarray(arrays["lm_head.weight"].T)},
              folder / "model.safetensors")


def _missing(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file({name: array for name, array in arrays.items() if name != "model.norm.weight"},
              folder / "model.safetensors")


@pytest.mark.parametrize("damage", [_pipe, _twice, _cut, _whole_numbers, _turned, _missing])
def test_a_plan_refuses_the_weights_that_a_run_refuses(tmp_path: Path, damage: Callable[..., None]) -> None:
    folder = source(tmp_path / "source")
    config = parse_config("a.yaml", f"""
pretrained_model_dir: {folder}
load_checkpoint: {folder}
run_mode: finetune
output_dir: {tmp_path / 'output'}
train_dataset: {{data_loader: {{type: SyntheticDataset, num_samples: 8}}}}
""")  # fmt: skip
    assert build_plan(config).model.weights == sum(array.size for array in load_initial_weights(config).values())
    damage(folder, dict(load_model_case("model_qwen3").weights))
    message = failure(lambda: build_plan(config))
    assert message == failure(lambda: load_initial_weights(config))
    assert "load_checkpoint" in message and "Fix: " in message


def test_errors_of_a_teachers_weights_name_its_key(tmp_path: Path) -> None:
    described = load_model_case("model_qwen3").metadata["config_as_saved"]
    (tmp_path / "config.json").write_text(json.dumps(described | {"vocab_size": 300}))
    config = load(f"{BASE}loss: {{type: distillation, teacher: {tmp_path}}}\n")
    for files in ({}, {"x": np.ones(3, np.float32)}):
        if files:
            save_file(files, tmp_path / "model.safetensors")
        for check in (check_teacher_files, open_teacher_weights):
            message = failure(lambda check=check: check(config))
            assert f": loss.teacher = {str(tmp_path)!r}: the " in message


def test_a_plan_refuses_a_checkpoint_or_adapters_that_a_run_refuses(tmp_path: Path) -> None:
    """It compares lengths, names and shapes; checksums are compared when the run reads the numbers."""
    text = f"{BASE}load_checkpoint: {tmp_path / 'saved'}\noutput_dir: {tmp_path / 'output'}\n"
    config = load(text)
    weights = {name: np.zeros(shape, np.float32) for name, shape in all_shapes(config.decoder).items()}
    path = write_checkpoint(tmp_path / "saved", 1, {"model": weights}, {}, 0)
    assert build_plan(config).model.weights
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    message = failure(lambda: build_plan(config))
    assert message == failure(lambda: load_initial_weights(config)) and "not the" in message
    adapted = load(ADAPTED.format(folder=tmp_path / "adapters") + f"output_dir: {tmp_path / 'output'}\n")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(adapter_config(adapted.decoder, "")))
    os.mkfifo(tmp_path / "adapters" / "adapter_model.safetensors")
    message = failure(lambda: build_plan(adapted))
    assert message == failure(lambda: load_initial_weights(adapted)) and "a pipe" in message and "adapter_id" in message
