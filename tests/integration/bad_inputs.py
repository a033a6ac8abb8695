"""Every mistake of `test_bad_input.py`: a small configuration that works, each time with one thing wrong.

A case is a change to the text of the YAML file, flags, or both, and what the message must say. ``{at}`` in an expected
text is the file with the line where the change begins, ``{home}`` the folder with the test's files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BASE = """\
seed: 1
output_dir: {home}/output
model:
  model_config:
    num_layers: 2
    hidden_size: 16
    num_heads: 2
    intermediate_size: 32
    vocab_size: 257
    seq_length: 16
train_dataset:
  cache_dir: {home}/cache
  data_loader:
    type: TextDataset
    dataset_dir: {home}/data
runner_config:
  batch_size: 4
  gradient_accumulation_steps: 1
runner_wrapper:
  type: MFTrainOneStepCell
  max_grad_norm: 1.0
optimizer:
  type: AdamW
lr_schedule:
  type: ConstantWarmUpLR
  learning_rate: 1.e-3
"""
CALLBACKS = """\
callbacks:
  - type: MFLossMonitor
    per_print_times: 1
  - type: CheckpointMonitor
    save_checkpoint_steps: 10
"""
BASE += CALLBACKS


_WITH = "--model.model_config.pet_config.lora_rank 2"


@dataclass(frozen=True)
class Case:
    """A mistake.

    Attributes:
        name: Of the test.
        parts: What the message must say.
        old, new: The change to `BASE`; nothing without.
        flags: Further arguments.
        code: Exit code.
        config: The file to give as --config, where it is not `BASE` with the change.
    """

    name: str
    parts: tuple[str, ...]
    old: str = ""
    new: str = ""
    flags: tuple[str, ...] = field(default=())
    code: int = 2
    config: str = ""


def line(name: str, old: str, new: str, *parts: str) -> Case:
    """Returns a mistake in the file: the message names the line."""
    return Case(name, ("{at}", *parts, "Fix: "), old, new)


def flag(name: str, flags: str, *parts: str) -> Case:
    """Returns a mistake on the command line."""
    return Case(name, (*parts, "Fix: "), flags=tuple(flags.split()))


def file(name: str, config: str, *parts: str) -> Case:
    """Returns a file that is no configuration."""
    return Case(name, parts, config=config)


UNKNOWN_KEYS = (
    line("top level", "seed: 1", "sede: 1", "sede", "seed"),
    line("nested", "batch_size: 4", "batch_sise: 4", "runner_config.batch_sise", "batch_size"),
    line("model", "num_heads: 2", "num_haeds: 2", "model.model_config.num_haeds", "num_heads"),
    line("list item", "per_print_times: 1", "per_print_time: 1", "callbacks.0.per_print_time", "per_print_times"),
    line("wrapper", "max_grad_norm: 1.0", "max_grad_nrom: 1.0", "runner_wrapper.max_grad_nrom", "max_grad_norm"),
    line("schedule", "learning_rate: 1.e-3", "learning_rte: 1.e-3", "lr_schedule.learning_rte", "learning_rate"),
    line("unknown type", "type: ConstantWarmUpLR", "type: ConstantWarmupsLR", "lr_schedule.type", "ConstantWarmUpLR"),
    flag("dotted flag", "--runner_config.batch_sise 3", "flag --runner_config.batch_sise", "batch_size"),
    flag("options", "--options runner_wrapper.max_norm=3", "--options", "runner_wrapper.max_norm", "max_grad_norm"),
    flag("list item by flag", "--callbacks.1.keep_max 3", "flag --callbacks.1.keep_max", "keep_checkpoint_max"),
    flag("item that is not there", "--callbacks.7.per_print_times 3", "flag --callbacks.7.per_print_times"),
)
WRONG_TYPES = (
    line("text for a number", "batch_size: 4", "batch_size: four", "runner_config.batch_size = 'four'", "integer"),
    line("quoted number", "batch_size: 4", 'batch_size: "4"', "runner_config.batch_size = '4'", "integer"),
    line("number for a section", "optimizer:\n  type: AdamW", "optimizer: 3", "optimizer = 3"),
    line("list for a section", "optimizer:\n  type: AdamW", "optimizer: [AdamW]", "optimizer"),
    line("section for a list", CALLBACKS, "callbacks: {type: MFLossMonitor}", "callbacks"),
    line("number for a boolean", "type: MFTrainOneStepCell", "use_clip_grad: 3", "runner_wrapper.use_clip_grad = 3"),
    line("null", "hidden_size: 16", "hidden_size:", "model.model_config.hidden_size", "integer"),
    flag("boolean flag", "--use_clip_grad maybe", "flag --use_clip_grad", "'maybe'", "true or false"),
)
MISSING_KEYS = (
    Case("size of the model", ("run.yaml:4", "missing: hidden_size", "Fix: "), "    hidden_size: 16\n", ""),
    line("type of a callback", "- type: MFLossMonitor\n    per", "- per", "callbacks.0", "type"),
    line("dataset_dir", "\n    dataset_dir: {home}/data", "", "TextDataset needs a file or a folder", "dataset_dir"),
)
YAML = (
    line("duplicate key", "seed: 1\n", "seed: 1\nseed: 2\n", "seed"),
    line("duplicate nested key", "batch_size: 4", "batch_size: 4\n  batch_size: 8", "batch_size"),
    line("tab", "  batch_size: 4", "\tbatch_size: 4", "tab"),
    line("unknown anchor", "seed: 1", "seed: *one", "one"),
    Case("open bracket", ("run.yaml:2", "begins on line 1", "Fix: close the bracket"), "seed: 1", "seed: [1"),
    line("bad indentation", "batch_size: 4", "batch_size: 4\n     x: 1", "indentation"),
    file("empty file", "{home}/empty.yaml", "{home}/empty.yaml", "empty"),
    file("only comments", "{home}/comments.yaml", "{home}/comments.yaml", "empty"),
    file("a list", "{home}/list.yaml", "{home}/list.yaml", "Fix: "),
    file("a directory", "{home}/data", "{home}/data", "is a directory", "Fix: "),
    file("not there", "{home}/nowhere.yaml", "{home}/nowhere.yaml", "Fix: "),
    file("binary", "{home}/binary.yaml", "{home}/binary.yaml", "Fix: "),
)
MODEL = (
    line("heads and hidden size", "num_heads: 2", "num_heads: 3", "num_heads", "hidden_size", "16"),
    line("key heads", "num_heads: 2", "num_heads: 2\n    n_kv_heads: 4", "n_kv_heads", "4"),
    line("odd rotated size", "num_heads: 2", "num_heads: 2\n    rotary_pct: 0.1", "rotary_pct", "0.1"),
    line("odd head size", "num_heads: 2", "num_heads: 2\n    head_dim: 7", "head_dim", "7"),
    line("zero layers", "num_layers: 2", "num_layers: 0", "num_layers = 0", "at least 1"),
    line("vocabulary below bytes", "vocab_size: 257", "vocab_size: 200", "vocab_size = 200", "257"),
    line("unknown amp_level", "seed: 1", "amp_level: O4", "amp_level = 'O4'", "O3 or auto"),
    line(
        "amp_level in the model",
        "seq_length: 16",
        "amp_level: O1",
        "model.model_config.amp_level",
        "write amp_level at the top",
    ),
    flag(
        "amp_level and dtype",
        "--amp_level O1 --model.model_config.compute_dtype float32",
        "flag --model.model_config.compute_dtype",
        "amp_level O1 (flag --amp_level) means float16",
    ),
)
_PET = "seq_length: 16\n    pet_config: "
ADAPTERS = (
    line("no rank", "seq_length: 16", _PET + "{lora_rank: 0}", "pet_config.lora_rank = 0", "at least 1"),
    line("no alpha", "seq_length: 16", _PET + "{lora_alpha: 0}", "pet_config.lora_alpha = 0", "greater than 0"),
    line("another kind", "seq_length: 16", _PET + "{pet_type: prefixtuning}", "'prefixtuning'", "must be lora"),
    line("dropout of one", "seq_length: 16", _PET + "{lora_dropout: 1.0}", "lora_dropout = 1.0", "less than 1"),
    line("no such target", "seq_length: 16", _PET + "{target_modules: .*query}", "matches none", "write .*q_proj"),
    line("no expression", "seq_length: 16", _PET + "{target_modules: .*(wq}", "is not a regular expression"),
    line("misspelt", "seq_length: 16", _PET + "{lora_ranks: 4}", "pet_config.lora_ranks: unknown key", "lora_rank"),
    flag("without a section", "--adapter_id {home}/good", "flag --adapter_id", "pet_config, which is absent"),
    flag("not there", f"{_WITH} --adapter_id {{home}}/nowhere", "flag --adapter_id", "does not exist"),
    flag("a whole model", f"{_WITH} --adapter_id {{home}}/good", "flag --adapter_id", "a full model, not adapters"),
    flag("an empty folder", f"{_WITH} --adapter_id {{home}}/bare", "flag --adapter_id", "no complete checkpoint"),
    flag("evaluation without them", f"{_WITH} --run_mode eval --load_checkpoint {{home}}/good", "needs adapters"),
    flag("resume a whole model", f"{_WITH} --resume_training --output_dir {{home}}/good", "contains a full model"),
)
_MOE = "seq_length: 16\n    moe_config: {expert_num: 4, num_experts_chosen: 2, "
_EXPERTS = "--moe_config.expert_num 4 --moe_config.num_experts_chosen"
_TARGETS = "--model.model_config.pet_config.target_modules"
EXPERTS = (
    line("more chosen", "seq_length: 16", _MOE.replace("2, ", "5}"), "chosen = 5", "than there are (4)"),
    line("groups", "seq_length: 16", _MOE + "n_group: 3}", "n_group = 3", "must divide the experts (4)"),
    line("too many groups", "seq_length: 16", _MOE + "n_group: 2, topk_group: 3}", "topk_group = 3", "(2)"),
    line("no capacity", "seq_length: 16", _MOE + "capacity_factor: 0}", "capacity_factor = 0", "or -1 for no bound"),
    line("negative capacity", "seq_length: 16", _MOE + "capacity_factor: -2}", "capacity_factor = -2", "use 1.1 or -1"),
    line("dense layers", "seq_length: 16", _MOE + "first_k_dense_replace: 3}", "must be at most num_layers (2)"),
    line("negative mtp_depth", "seq_length: 16", "seq_length: 16\n    mtp_depth: -1", "mtp_depth = -1", "least 0"),
    line("large mtp_depth", "seq_length: 16", "seq_length: 16\n    mtp_depth: 16", "mtp_depth = 16", "seq_length"),
    flag("chosen by flag", f"{_EXPERTS} 9", "flag --moe_config.num_experts_chosen", "more experts than there are (4)"),
    line(
        "another model's drop rate",
        "save_checkpoint_steps: 10",
        "save_checkpoint_steps: 10\n  - {type: MoEDropRateCallback, expert_num: 8}",
        "callbacks.2.expert_num = 8",
        "disagrees with model.model_config.moe_config.expert_num = 1",
    ),
    flag("one expert frozen", f"{_EXPERTS} 2 --freeze.include *.experts.1.*", "stacked weight", "write '*.experts.*'"),
    flag("adapters of experts", f"{_EXPERTS} 2 {_WITH} {_TARGETS} .*w1", "matches only weights of experts"),
)
_FREEZE = "seed: 1\nfreeze: "
FREEZE = (
    line("no such weight", "seed: 1", _FREEZE + "{include: [lm_head.wight]}", "matches no weight", "lm_head.weight"),
    line("a part of a name", "seed: 1", _FREEZE + "{include: [layers.0]}", "freeze.include.0", "write '*layers.0*'"),
    line("no such layer", "seed: 1", _FREEZE + "{layers: 0-2}", "freeze.layers = '0-2'", "no layer 2", "0 to 1"),
    line("a layer in words", "seed: 1", _FREEZE + "{include: ['layers: all']}", "'all' is not a layer", "0-3"),
    line("everything", "seed: 1", _FREEZE + "{include: '*'}", "leaves nothing to train", "exclude"),
    line("exclude alone", "seed: 1", _FREEZE + "{exclude: embeddings}", "no include", "include: ['*']"),
    line("a number", "seed: 1", _FREEZE + "{include: 3}", "freeze.include = 3", "a string, a list or a section"),
    line("misspelt", "seed: 1", _FREEZE + "{inculde: '*'}", "freeze.inculde", "freeze.include"),
    flag("by flag", "--freeze.include [layers:7]", "flag --freeze.include", "there is no layer 7"),
)
_RECOMPUTE = "seed: 1\nrecompute_config: "
RECOMPUTE = (
    line("too many layers", "seed: 1", _RECOMPUTE + "{recompute: 3}", "recompute = 3", "counts layers", "has 2"),
    line("no such layer", "seed: 1", _RECOMPUTE + "{recompute: [2]}", "recompute = [2]", "no layer 2", "0 to 1"),
    line("in words", "seed: 1", _RECOMPUTE + "{recompute: always}", "'always' is not a layer"),
    line("a fraction", "seed: 1", _RECOMPUTE + "{recompute: 0.5}", "recompute = 0.5", "must be true or false"),
    line("no such part", "seed: 1", _RECOMPUTE + "{select_recompute: [head]}", "'head' matches no sublayer", "mlp"),
    line("select no layer", "seed: 1", _RECOMPUTE + "{select_recompute: {mlp: [9]}}", "no layer 9"),
    line("misspelt", "seed: 1", _RECOMPUTE + "{recompte: True}", "recompute_config.recompte", "config.recompute"),
    flag("by flag", "--recompute_config.recompute 5", "flag --recompute_config.recompute", "counts layers"),
)
NUMBERS = (
    line("no accumulation", "steps: 1\n", "steps: 0\n", "gradient_accumulation_steps = 0", "at least 1"),
    line("negative accumulation", "steps: 1\n", "steps: -1\n", "gradient_accumulation_steps = -1", "at least 1"),
    line("accumulation of a part", "steps: 1\n", "steps: 1.5\n", "gradient_accumulation_steps = 1.5", "integer"),
    line("accumulation in words", "steps: 1\n", "steps: four\n", "gradient_accumulation_steps = 'four'", "integer"),
    flag("accumulation by flag", "--gradient_accumulation_steps 0", "flag --gradient_accumulation_steps", "at least 1"),
    line("clip norm of zero", "max_grad_norm: 1.0", "max_grad_norm: 0", "max_grad_norm = 0", "greater than 0"),
    line("negative clip norm", "max_grad_norm: 1.0", "max_grad_norm: -1.0", "max_grad_norm = -1.0", "greater than 0"),
    line("clip norm nan", "max_grad_norm: 1.0", "max_grad_norm: .nan", "max_grad_norm", ""),
    flag("clip norm by flag", "--max_grad_norm -0.5", "flag --max_grad_norm", "greater than 0"),
    line("seed beyond 63 bits", "seed: 1", "seed: 99999999999999999999", "seed", "at most"),
    line("negative stop", "batch_size: 4", "batch_size: 4\n  stop_step: -2", "stop_step = -2", "at least 0"),
)
_TEXT_LOADER = "type: TextDataset\n    dataset_dir: {home}/data"


def record(name: str, file: str, *parts: str, more: str = "") -> Case:
    """Returns a mistake in a file of records, or in how it is read."""
    return Case(name, (*parts, "Fix: "), _TEXT_LOADER, f"type: JsonlDataset\n    dataset_dir: {file}{more}")


RECORDS = (
    record("broken JSON line", "{home}/broken.jsonl", "{home}/broken.jsonl:2: this line is not JSON"),
    record("no form", "{home}/fieldless.jsonl", "{home}/fieldless.jsonl:2: ", "its columns are txet, id"),
    record("no answer", "{home}/unanswered.jsonl", "{home}/unanswered.jsonl:1: ", "no turn of the assistant"),
    record("empty content", "{home}/silent.jsonl", "{home}/silent.jsonl:1: messages.1.content: its content is empty"),
    record("unknown role", "{home}/roles.jsonl", "{home}/roles.jsonl:1: messages.0.role = 'bot'", "user, assistant"),
    record("an image", "{home}/image.jsonl", "{home}/image.jsonl:1: messages.0.content.0 = ", "images"),
    record("no such column", "{home}/data.parquet", "{home}/data.parquet: record 1: ", "columns are words, id"),
    record(
        "no mapped column",
        "{home}/data.parquet",
        "{home}/data.parquet: record 1: the record has no column 'body'", "its columns are words, id",
        more="\n    columns: {text: body}",
    ),
    record("a column that is no field", "{home}/data.parquet", "columns", "txt", more="\n    columns: {txt: words}"),
    record("gzip cut short", "{home}/cut.jsonl.gz", "{home}/cut.jsonl.gz:", "cut short"),
    record("zst cut short", "{home}/cut.json.zst", "{home}/cut.json.zst: record", "cut short"),
    record("parquet cut short", "{home}/cut.parquet", "{home}/cut.parquet: record 1", "cut short"),
    record("array cut short", "{home}/cut.json", "{home}/cut.json: record 2", "cut short"),
    record("no samples", "{home}/blank.txt", "run.yaml:15: ", "holds no text"),
    record("only bad ones", "{home}/roles.jsonl", "no text: 1 of its records", "'bot'", more="\n    bad_records: skip"),
    record("two ways", "{home}/roles.jsonl", "either one dataset_dir or", more="\n    sources: [{path: a}]"),
    Case(
        "weight of zero",
        ("{at}", "sources.0.weight = 0", "greater than 0", "Fix: "),
        _TEXT_LOADER,
        "sources: [{path: stdlib, weight: 0}]",
    ),
    Case(
        "from the hub",
        ("data_loader.path = 'owner/name'", "nothing is downloaded", "Fix: "),
        _TEXT_LOADER,
        "type: HFDataLoader\n    path: owner/name",
    ),
)
DATA = (
    line("no such folder", "dir: {home}/data\n", "dir: {home}/nowhere\n", "does not exist", "{home}/nowhere"),
    line("folder without text", "dir: {home}/data\n", "dir: {home}/bare\n", "*.txt", "{home}/bare"),
    line("empty files", "dir: {home}/data\n", "dir: {home}/blank.txt\n", "no text", "{home}/blank.txt"),
    Case(
        "binary text",
        ("{home}/binary.txt:2", "UTF-8", "byte 4", "Fix: "),
        "dir: {home}/data\n",
        "dir: {home}/binary.txt\n",
    ),
    line("rows longer than the data", "seq_length: 16", "seq_length: 100000", "seq_length = 100000", "use more data"),
    line("batch larger than the data", "batch_size: 4", "batch_size: 999", "batch_size = 999", "fewer than one batch"),
    Case(
        "token beyond the vocabulary",
        ("run.yaml:9", "model.model_config.vocab_size = 257", "beyond the model's vocabulary", "at least", "Fix: "),
        "data_loader:\n",
        "tokenizer: {type: huggingface, path: {home}/tokenizer}\n  data_loader:\n",
    ),
    line(
        "no such tokenizer",
        "data_loader:\n",
        "tokenizer: {type: huggingface, path: {home}/nowhere}\n  data_loader:\n",
        "tokenizer",
        "{home}/nowhere",
    ),
    flag("evaluation without data", "--do_eval", "flag --do_eval", "there is no evaluation data", "held_out"),
    flag("evaluation data not there", "--do_eval --eval_dataset_dir {home}/nowhere", "--eval_dataset_dir", "not exist"),
    flag(
        "evaluation run, data not there",
        "--run_mode eval --load_checkpoint {home}/good --eval_dataset_dir {home}/nowhere",
        "flag --eval_dataset_dir",
        "does not exist",
    ),
    flag("eval data below a batch", "--do_eval --eval_dataset_dir {home}/short.txt", "eval_dataset has 2 sequences"),
)
CHECKPOINTS = (
    flag("not there", "--load_checkpoint {home}/nowhere", "flag --load_checkpoint", "does not exist"),
    flag("another width", "--load_checkpoint {home}/wide", "flag --load_checkpoint", "does not fit", "[257, 24]"),
    flag("by file", "--load_checkpoint {home}/wide.safetensors", "of shape [257, 24] where this model has [257, 16]"),
    flag("fewer layers", "--load_checkpoint {home}/shallow", "lacks model.layers.1.input_layernorm.weight (and 8"),
    flag("no marker", "--load_checkpoint {home}/half/checkpoints/step-00000003", "incomplete", "COMPLETE"),
    flag("only a half one", "--load_checkpoint {home}/half", "no complete checkpoint"),
    flag("cut short", "--load_checkpoint {home}/cut/checkpoints/step-00000003", "damaged", "model.safetensors has"),
    flag("file cut short", "--load_checkpoint {home}/cut.safetensors", "not a readable safetensors file"),
    flag("a text file", "--load_checkpoint {home}/blank.txt", "not a readable safetensors file"),
    flag("integers", "--load_checkpoint {home}/quantized.safetensors", "floating-point", "I8"),
    flag("an empty folder", "--load_checkpoint {home}/bare", "no complete checkpoint"),
    flag("resume, nothing there", "--resume_training", "flag --resume_training", "nothing to resume"),
    flag("resume another width", "--resume_training --output_dir {home}/wide", "--resume_training", "does not fit"),
    flag("evaluate without weights", "--run_mode eval", "run_mode eval needs weights", "--load_checkpoint"),
    flag("predict another width", "--run_mode predict --predict_data a --load_checkpoint {home}/wide", "does not fit"),
    flag("predict without prompts", "--run_mode predict --load_checkpoint {home}/good", "needs prompts"),
)
PLACES = (
    line("output_dir is a file", "dir: {home}/output", "dir: {home}/blank.txt", "is a file, not a folder"),
    line("output_dir below a file", "dir: {home}/output", "dir: {home}/blank.txt/x", "blank.txt is a file"),
    Case(
        "output_dir cannot be made",
        ("/proc/nowhere", "output_dir", "Fix: choose a folder"),
        "dir: {home}/output",
        "dir: /proc/nowhere",
    ),
    Case(
        "cache_dir cannot be made",
        ("{at}", "train_dataset.cache_dir", "/proc/nowhere", "Fix: "),
        "cache_dir: {home}/cache",
        "cache_dir: /proc/nowhere",
    ),
    line("no Ascend here", "seed: 1", "context: {device_target: Ascend}", "no CANN libraries", "doctor", "CPU"),
)


def tokens(name: str, kind: str, path: str, *parts: str) -> Case:
    """Files of tokens that are damaged."""
    old = "type: TextDataset\n    dataset_dir: {home}/data"
    new = f"type: {kind}\n    dataset_dir: {{home}}/tokens/{path}"
    return Case(name, ("run.yaml:15", "train_dataset.data_loader.dataset_dir", *parts, "Fix: "), old, new)


_MEGATRON = "BlendedMegatronDatasetDataLoader"
TOKEN_FILES = (
    tokens("truncated index", _MEGATRON, "cut_index", "cut_index.idx: it is truncated"),
    tokens("shorter tokens", _MEGATRON, "cut_tokens", "cut_tokens.bin: it has", "and the index says"),
    tokens("longer tokens", _MEGATRON, "more_tokens", "more_tokens.bin: it has", "and the index says"),
    tokens("unknown dtype", _MEGATRON, "dtype", "dtype.idx", "the code 9 is no type of tokens"),
    tokens("index not there", _MEGATRON, "no_index", "no_index.idx: there is no such file"),
    tokens("no .db", "MindDataset", "rows.mindrecord", "rows.mindrecord.db: there is no such"),
    tokens("no MindRecord", "MindDataset", "text.mindrecord", "text.mindrecord: its header is not that"),
)
GROUPS = {
    "unknown key": UNKNOWN_KEYS,
    "wrong type": WRONG_TYPES,
    "missing key": MISSING_KEYS,
    "yaml": YAML,
    "model": MODEL,
    "adapters": ADAPTERS,
    "experts": EXPERTS,
    "freeze": FREEZE,
    "recompute": RECOMPUTE,
    "number": NUMBERS,
    "records": RECORDS,
    "data": DATA,
    "token files": TOKEN_FILES,
    "checkpoint": CHECKPOINTS,
    "place": PLACES,
}
