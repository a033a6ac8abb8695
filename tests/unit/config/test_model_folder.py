"""A model folder of Hugging Face as one key, families that are not known, and the defaults of those that are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_helpers import error_of, load, notes
from golden_files import GOLDEN_FOLDER, load_model_case, model_case_names
from tolerances import BALANCE_OF_MEANS, SEVERAL_OPERATORS

from trainer.config import dump_config, parse_config
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import config_json
from trainer.config.read.model_folder import classify_key

FACTS = json.loads((GOLDEN_FOLDER / "families.json").read_text(encoding="utf-8"))
OTHERS: dict[str, dict[str, Any]] = FACTS["others"]
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3]}


def described(name: str = "model_qwen3") -> dict[str, Any]:
    """Returns the config.json of a golden model, as transformers saves it."""
    return load_model_case(name).metadata["config_as_saved"]


def folder_of(path: Path, config: dict[str, Any] | None = None, **more: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps((config or described()) | more, indent=2))
    (path / "generation_config.json").write_text(json.dumps(GENERATION, indent=2))
    return path


def key(path: Path, more: str = "") -> str:
    return f"pretrained_model_dir: {path}\n{more}"


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.in_transformers])
def test_the_table_of_defaults_is_transformers(kind: str) -> None:
    theirs, ours = FACTS["defaults"][kind], FAMILIES[kind].defaults
    assert theirs["model_type"] == FAMILIES[kind].model_type
    for name, value in ours.items():
        if name not in theirs:  # num_experts by its older name, which published files have
            name = "num_local_experts"
        assert (theirs[name] if value is not None or name == "sliding_window" else None) == value, name
    for name, value in theirs.items():
        assert classify_key(name, value, kind, kind) in ("read", "harmless"), f"{kind} reads {name}"


@pytest.mark.parametrize("name", [*model_case_names(), *model_case_names("experts"), "mtp_2"])
def test_a_folder_alone_describes_a_model(tmp_path: Path, name: str) -> None:
    theirs, folder = described(name), folder_of(tmp_path, described(name))
    config = load(key(folder, "run_mode: finetune\n"))
    decoder = config.decoder
    assert FAMILIES[config.model.arch.type].model_type == theirs["model_type"]
    sizes = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads vocab_size".split()
    ours = (decoder.num_layers, decoder.hidden_size, decoder.num_heads, decoder.n_kv_heads, decoder.vocab_size)
    assert ours == tuple(theirs[size] for size in sizes)
    assert (decoder.do_sample, decoder.temperature, decoder.top_p, decoder.top_k) == (True, 0.6, 0.9, 50)
    assert (config.load_checkpoint, config.train_dataset.tokenizer.path) == (str(folder), str(folder))
    assert config.train_dataset.tokenizer.type == "huggingface"
    assert "ignored" not in notes(key(folder))
    again = parse_config("config.yaml", dump_config(config))
    assert again == config and again.decoder == config.decoder


def test_what_the_yaml_and_the_flags_say_wins(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    text = key(folder, "run_mode: finetune\nload_checkpoint: other\ntrain_dataset: {tokenizer: {type: bytes}}\n"
               "model: {model_config: {rms_norm_eps: 1e-5, do_sample: False, rope_scaling: {type: linear, factor: 2}}}")
    config = load(text, "model_config.rope_theta=5000")
    decoder = config.decoder
    assert (decoder.rms_norm_eps, decoder.rope_theta) == (1e-5, 5000)
    assert (decoder.do_sample, decoder.temperature) == (False, 0.6)
    assert (decoder.rope_scaling.rope_type, decoder.rope_scaling.factor) == ("linear", 2)
    assert (config.load_checkpoint, config.train_dataset.tokenizer.type) == ("other", "bytes")


def test_a_training_starts_from_random_weights_and_a_resumed_run_from_its_own(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert load(key(folder)).load_checkpoint == ""
    finetune = key(folder, "run_mode: finetune\n")
    assert load(finetune, "resume_training=True").load_checkpoint == ""
    resolved = dump_config(load(finetune))
    assert f"load_checkpoint: {folder}" in resolved
    assert load(resolved, "resume_training=True").load_checkpoint == ""
    adapters = "model: {model_config: {pet_config: {target_modules: '.*q_proj'}}}\n"
    assert load(finetune + adapters, "resume_training=True").load_checkpoint == str(folder)


def test_keys_that_config_json_lacks_have_the_defaults_of_its_class(tmp_path: Path) -> None:
    sparse = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    decoder = load(key(folder_of(tmp_path, sparse))).decoder
    moe = decoder.experts
    assert (moe.expert_num, moe.num_experts_chosen, moe.norm_topk_prob, decoder.expert_size) == (128, 8, False, 768)
    assert (decoder.n_kv_heads, decoder.head_dim, decoder.use_qk_norm, decoder.vocab_size) == (4, 16, True, 151936)
    decoder = load(key(folder_of(tmp_path, sparse | {"model_type": "llama"}))).decoder
    assert (decoder.n_kv_heads, decoder.head_dim, decoder.ffn_size, decoder.rope_theta) == (4, 16, 11008, 10000)
    sparse["num_key_value_heads"] = 2  # 32 would be the class's
    decoder = load(key(folder_of(tmp_path, sparse | {"model_type": "qwen3"}))).decoder
    assert (decoder.head_dim, decoder.qkv_has_bias) == (128, False)
    windows = {"sliding_window": 64, "layer_types": ["full_attention"] * 2, "max_window_layers": 2}
    assert load(key(folder_of(tmp_path, sparse | {"model_type": "qwen2"} | windows))).decoder.qkv_has_bias


@pytest.mark.parametrize(
    ("yaml", "parts"),
    [
        ("num_layers: 3", ["a.yaml:2: model.model_config.num_layers = 3: ", "config.json:", " has 2"]),
        ("num_attention_heads: 8", ["model_config.num_attention_heads = 8: ", "has 4", "do not fit"]),
        ("head_dim: 8", ["head_dim = 8", "has 16"]),
        ("intermediate_size: 64", ["intermediate_size = 64", "has 48"]),
        ("vocab_size: 400", ["vocab_size = 400", "leave it out, or name another folder"]),
        ("tie_word_embeddings: true", ["tie_word_embeddings = true"]),
    ],
)
def test_sizes_that_contradict_the_folder(tmp_path: Path, yaml: str, parts: list[str]) -> None:
    text = key(folder_of(tmp_path), f"model: {{model_config: {{{yaml}}}}}\n")
    message = error_of(f"{text}run_mode: finetune\n")
    for part in parts:
        assert part in message
    name, value = yaml.split(": ")
    told = notes(text)  # a training that reads none of the weights
    assert "this training starts from new weights, of other sizes than those in pretrained_model_dir" in told
    assert f"{name} {value} instead of " in told


def test_experts_that_contradict_the_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, described("experts_qwen3_moe"))
    message = error_of(key(folder, "moe_config: {expert_num: 4}\nrun_mode: finetune\n"))
    assert "expert_num = 4: " in message and "has 8" in message
    assert load(key(folder, "moe_config: {num_experts_chosen: 1}\n")).decoder.experts.num_experts_chosen == 1


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["a.yaml:1: pretrained_model_dir", "the folder has no config.json"]),
        ("{\n'a': 1}", ["config.json:2", "is not valid JSON"]),
        ("[1]", ["config.json:1", "must be a JSON object"]),
        ("{}", ["config.json", "names no family"]),
        ('{"model_type": "llama",\n "hidden_size": "64"}', ["config.json:2: hidden_size", "integer"]),
        ('{"model_type": "llama",\n\t"hidden_act": "gelu"}', ["config.json:2: hidden_act = 'gelu': not yet supported"]),
        ('{"model_type": "llama",\n "rope_scaling": {"type": "dynamic"}}', ["config.json:2: rope_scaling.type"]),
        ('{"model_type": "llama",\n "rope_scaling": {"type": "dynamic", "alpha": 3.0}}', ["rope_scaling.type"]),
        ('{"model_type": "hunyuan_v1_dense",\n "rope_scaling": {"type": "dynamic"}}', ["json:2: rope_scaling.type"]),
        ('{"model_type": "llama",\n "rope_scaling": {"mrope_section": [1]}}', ["rope_scaling.mrope_section"]),
        ('{"model_type": "mistral",\n "sliding_window": -1}', ["sliding_window = -1", "at least 0"]),
        ('{"model_type": "llama",\n "scale_emb": 0.5}', ["config.json:2", "a factor on the embeddings"]),
        ('{"model_type": "llama",\n "quantization_config": {"bits": 4}}', ["config.json:2", "quantization_config"]),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, content: str | None, parts: list[str]) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    message = error_of(key(tmp_path))
    for part in parts:
        assert part in message
    assert "remove" not in message


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert "there is no such folder" in error_of(key(tmp_path / "absent"))
    assert "is a file, not a folder" in error_of(key(folder_of(tmp_path) / "config.json"))


TOLD = {
    "olmo": "norms have no weights",
    "qwen3_next": "some layers have linear attention",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_that_is_not_known_is_an_error_that_says_what_differs(tmp_path: Path, name: str) -> None:
    kind = OTHERS[name]["architectures"][0]
    message = error_of(key(folder_of(tmp_path, OTHERS[name])))
    for part in (kind, "this family is not known here", TOLD[name], "config.json:", "Qwen3ForCausalLM (qwen3)"):
        assert part in message
    assert "write model.arch.type" not in message  # it would be another model
    sizes = "num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 300"
    pasted = error_of(f"model_config: {{{sizes}, architectures: [{kind}], model_type: {name}}}\n")
    assert "a.yaml:1" in pasted and "this family is not known here" in pasted
    assert "remove" not in message + pasted


@pytest.mark.parametrize(
    ("kind", "keys", "windows"),
    [
        ("mistral", {"sliding_window": 16}, [0, 1, 2]),
        ("mistral", {}, [0, 1, 2]),  # 4096 is the class's
        ("mistral", {"sliding_window": None}, []),
        ("mixtral", {"sliding_window": 16}, [0, 1, 2]),
        ("llama", {"sliding_window": 16}, []),  # the class does not read it
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False, "layer_types": ["sliding_attention"]}, []),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, [1, 2]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, []),  # 28 is the class's max_window_layers
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True,
                   "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, [0, 2]),
    ],
)  # fmt: skip
def test_a_sliding_window_is_that_of_the_class(tmp_path: Path, kind: str, keys: dict, windows: list[int]) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = load(key(folder_of(tmp_path, {"model_type": kind, **sizes, **keys})))
    assert list(config.decoder.window_layers) == windows
    described = config_json(config.decoder, config.model.arch.type)
    again = load(key(folder_of(tmp_path / "again", described))).decoder
    assert again.window_layers == config.decoder.window_layers
    assert parse_config("config.yaml", dump_config(config)) == config


AS_LLAMA = "model: {arch: {type: LlamaForCausalLM}}\n"


@pytest.mark.parametrize("name", ["olmo"])
def test_a_family_is_taken_as_a_llama_where_the_yaml_says_so(tmp_path: Path, name: str) -> None:
    text = key(folder_of(tmp_path, OTHERS[name]), AS_LLAMA)
    config = load(text)
    assert (config.model.arch.type, config.decoder.num_layers, config.decoder.head_dim) == ("LlamaForCausalLM", 4, 8)
    told = notes(text)
    assert f"{name}: not a known family; the model is built as LlamaForCausalLM (model.arch.type)" in told
    assert "norms have no weights" in told
    assert parse_config("config.yaml", dump_config(config)) == config


@pytest.mark.parametrize(
    ("keys", "part"),
    [({"scale_emb": 12.0}, "scale_emb = 12.0"), ({"embedding_dropout": 0.1}, "embedding_dropout = 0.1")],
)
def test_a_key_that_changes_the_numbers_is_never_left_out(tmp_path: Path, keys: dict[str, float], part: str) -> None:
    message = error_of(key(folder_of(tmp_path, OTHERS["olmo"] | keys), AS_LLAMA))
    assert part in message
    assert "remove" not in message and "leave it out" not in message


def test_values_that_change_nothing_load_and_keys_that_nobody_knows_do_not(tmp_path: Path) -> None:
    plain = {"embedding_multiplier": 1.0, "logit_scale": 1.0, "attention_multiplier": 0.25}
    assert load(key(folder_of(tmp_path, OTHERS["olmo"] | plain), AS_LLAMA)).decoder.softmax_scale == 0.25
    sizes = "num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 300"
    neutral = f"model_config: {{{sizes}, final_logit_softcapping: null, logit_scale: 1}}\n"
    assert load(neutral).decoder.num_layers == 2
    pasted = error_of(f"model_config: {{{sizes}, scale_emb: 12.0}}\n")
    assert "a factor on the embeddings" in pasted and "remove" not in pasted
    odd = folder_of(tmp_path, OTHERS["olmo"], mystery=0.5, silent=False)
    message = error_of(key(odd, AS_LLAMA))
    assert "mystery = 0.5: the effect of this key" in message and "silent" not in message
    known = folder_of(tmp_path, described(), mystery=0.5)
    assert "config.json: not used, as in transformers: mlp_bias, mystery" in notes(key(known))


def test_names_of_two_families_are_an_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, described(), architectures=["Qwen3ForCausalLM"], model_type="olmo")
    assert "model_type = 'olmo': this family is not known" in error_of(key(folder))
    assert "write model.arch.type: Qwen3ForCausalLM" in error_of(key(folder_of(tmp_path), AS_LLAMA))
    folder = folder_of(tmp_path, described(), architectures=["Qwen3ForCausalLM"], model_type="llama")
    message = error_of(key(folder))
    assert "['Qwen3ForCausalLM']: is not the known class of model_type llama, which is LlamaForCausalLM" in message
    assert "write model.arch.type: LlamaForCausalLM or Qwen3ForCausalLM" in message
    assert load(key(folder, "model: {arch: {type: Qwen3ForCausalLM}}\n")).model.arch.type == "Qwen3ForCausalLM"
    other_head = folder_of(tmp_path, described(), architectures=["Qwen3ForTokenClassification"])
    assert "model_type qwen3, which is Qwen3ForCausalLM" in error_of(key(other_head))


# ---- the weight of the balance loss ----------------------------------------------------------------------------------


def our_balance_loss(logits_LNE: np.ndarray, chosen: int) -> float:
    """Returns the sum over layers of E / k * sum of (share of assignments * mean score), as trainer/models/moe.py
    has it."""
    total = 0.0
    for logits_NE in logits_LNE:
        scores_NE = np.exp(logits_NE) / np.exp(logits_NE).sum(-1, keepdims=True)
        first_Nk = np.argsort(-scores_NE, -1)[:, :chosen]
        share_E = np.bincount(first_Nk.ravel(), minlength=logits_NE.shape[1]) / first_Nk.size
        total += logits_NE.shape[1] * float((share_E * scores_NE.mean(0)).sum())
    return total


def test_router_aux_loss_coef_weighs_as_in_transformers() -> None:
    facts, sizes = FACTS["balance"], "num_layers: 3, hidden_size: 64, num_heads: 4, vocab_size: 300"
    logits_LNE, chosen = np.array(facts["logits"]), facts["num_experts_per_tok"]
    experts = f"num_local_experts: {logits_LNE.shape[2]}, num_experts_per_tok: {chosen}"
    text = f"model: {{arch: {{type: MixtralForCausalLM}}, model_config: {{{sizes}, {experts}, KEY}}}}\n"
    factor = load(text.replace("KEY", "router_aux_loss_coef: 0.02")).decoder.balance_factor
    alike = np.repeat(logits_LNE[:1], 3, 0)
    right = 0.02 * facts["loss_of_first_layer_in_all"]
    assert factor * our_balance_loss(alike, chosen) == pytest.approx(right, SEVERAL_OPERATORS)
    # A product of means over all layers is not the mean of each layer's product.
    assert factor * our_balance_loss(logits_LNE, chosen) == pytest.approx(0.02 * facts["loss"], BALANCE_OF_MEANS)
    assert load(text.replace("KEY", "aux_loss_factor: 0.02")).decoder.balance_factor == 0.02
    assert load(text.replace(", KEY", "")).decoder.balance_factor == 0.05
    assert "remove one of the two" in error_of(text.replace("KEY", "router_aux_loss_coef: 0.1, aux_loss_factor: 0.2"))


def test_the_yamls_aux_loss_factor_wins_over_the_folders_coefficient(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, described("experts_qwen3_moe"), router_aux_loss_coef=0.3)
    config = load(key(folder))
    assert config.decoder.balance_factor == pytest.approx(0.3 * 2 / 2)  # two of three layers have experts
    assert parse_config("config.yaml", dump_config(config)).decoder.balance_factor == config.decoder.balance_factor
    assert load(key(folder, "moe_config: {aux_loss_factor: 0.07}\n")).decoder.balance_factor == 0.07


def test_an_empty_name_is_none() -> None:
    assert load("pretrained_model_dir: ''\n").load_checkpoint == ""


def test_the_folder_of_a_run_is_told_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (50, 100):
        checkpoint = tmp_path / "checkpoints" / f"step-{step:08}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "checkpoints"):
        message = error_of(key(folder))
        assert "the folder has no config.json" in message
        assert f"Fix: name its newest checkpoint, {tmp_path}/checkpoints/step-00000100." in message
