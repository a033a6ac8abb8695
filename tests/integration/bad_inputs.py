"""The mistakes of `test_bad_input.py`: a small configuration that works, each time with one thing wrong.

One or a few for each stage at which a mistake is found, each with all that the program does around it. What is said of
every other mistake of that stage is in the tests of the stage, in tests/unit.

A case is a change to the text of the YAML file, flags, or both, and what the message must say. ``{at}`` in an expected
text is the file with the line where the change begins, ``{home}`` the folder with the test's files.
"""

from __future__ import annotations

from dataclasses import dataclass

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
callbacks:
  - type: MFLossMonitor
    per_print_times: 1
  - type: CheckpointMonitor
    save_checkpoint_steps: 10
"""


@dataclass(frozen=True)
class Case:
    """A mistake.

    Attributes:
        name: Of the test.
        parts: What the message must say.
        old, new: The change to `BASE`; nothing without.
        flags: Further arguments.
        config: The file to give as --config, where it is not `BASE` with the change.
    """

    name: str
    parts: tuple[str, ...]
    old: str = ""
    new: str = ""
    flags: tuple[str, ...] = ()
    config: str = ""


def line(name: str, old: str, new: str, *parts: str) -> Case:
    """Returns a mistake in the file: the message names the line."""
    return Case(name, ("{at}", *parts, "Fix: "), old, new)


def flag(name: str, flags: str, *parts: str) -> Case:
    """Returns a mistake on the command line."""
    return Case(name, (*parts, "Fix: "), flags=tuple(flags.split()))


_TEXT_LOADER = "type: TextDataset\n    dataset_dir: {home}/data"


def data(name: str, kind: str, file: str, *parts: str, more: str = "") -> Case:
    """Returns a mistake in a file of data, or in how it is read."""
    return Case(name, (*parts, "Fix: "), _TEXT_LOADER, f"type: {kind}\n    dataset_dir: {{home}}/{file}{more}")


_PET, _MOE, _FREEZE = "seq_length: 16\n    pet_config: ", "seq_length: 16\n    moe_config: ", "seed: 1\nfreeze: "
_ADAPTERS = "--model.model_config.pet_config.lora_rank 2"
_EXPERTS = "--moe_config.expert_num 4 --moe_config.num_experts_chosen 2"
_NO_FOLDER = "--eval_dataset_dir {home}/nowhere"
_MEGATRON, _ROWS = "BlendedMegatronDatasetDataLoader", "MindDataset"
CONFIGURATION = (
    line("unknown key", "batch_size: 4", "batch_sise: 4", "runner_config.batch_sise", "batch_size"),
    flag("unknown key of a list item", "--callbacks.1.keep_max 3", "flag --callbacks.1.keep_max", "checkpoint_max"),
    line("text for a number", "batch_size: 4", "batch_size: four", "runner_config.batch_size = 'four'", "integer"),
    line("number for a section", "optimizer:\n  type: AdamW", "optimizer: 3", "optimizer = 3"),
    line("list for a section", "optimizer:\n  type: AdamW", "optimizer: [AdamW]", "optimizer"),
    line("null", "hidden_size: 16", "hidden_size:", "model.model_config.hidden_size", "integer"),
    flag("boolean flag", "--use_clip_grad maybe", "flag --use_clip_grad", "'maybe'", "true or false"),
    Case("no size of the model", ("run.yaml:4", "missing: hidden_size", "Fix: "), "    hidden_size: 16\n", ""),
    line("no type of a callback", "- type: MFLossMonitor\n    per", "- per", "callbacks.0", "type"),
    line("no dataset_dir", "\n    dataset_dir: {home}/data", "", "TextDataset needs a file or a folder", "dataset_dir"),
    line("tab", "  batch_size: 4", "\tbatch_size: 4", "tab"),
    Case("binary", ("{home}/binary.yaml", "Fix: "), config="{home}/binary.yaml"),
    line("heads and hidden size", "num_heads: 2", "num_heads: 3", "num_heads", "hidden_size", "16"),
    line("zero layers", "num_layers: 2", "num_layers: 0", "num_layers = 0", "at least 1"),
    line("another section's key", "seq_length: 16", "amp_level: O1", "model_config.amp_level", "amp_level at the top"),
    line("no accumulation", "steps: 1\n", "steps: 0\n", "gradient_accumulation_steps = 0", "at least 1"),
    flag("the same by a flag", "--gradient_accumulation_steps 0", "flag --gradient_accumulation_steps", "at least 1"),
    line("seed beyond 63 bits", "seed: 1", "seed: 99999999999999999999", "seed", "at most"),
    line("negative stop", "batch_size: 4", "batch_size: 4\n  stop_step: -2", "stop_step = -2", "at least 0"),
)
PARTS_OF_THE_MODEL = (
    line("no such adapter", "seq_length: 16", _PET + "{target_modules: .*query}", "matches none", "write .*q_proj"),
    line("experts", "seq_length: 16", _MOE + "{expert_num: 4, num_experts_chosen: 5}", "chosen = 5", "there are (4)"),
    flag("one expert frozen", f"{_EXPERTS} --freeze.include *.experts.1.*", "stacked weight", "write '*.experts.*'"),
    line("no such weight", "seed: 1", _FREEZE + "{include: [lm_head.wight]}", "matches no weight", "lm_head.weight"),
    line("everything frozen", "seed: 1", _FREEZE + "{include: '*'}", "leaves nothing to train", "exclude"),
    line("recomputed", "seed: 1", "seed: 1\nrecompute_config: {recompute: [2]}", "recompute = [2]", "no layer 2"),
)
DATA = (
    data("record without a form", "JsonlDataset", "fieldless.jsonl", "{home}/fieldless.jsonl:2: ", "are txet, id"),
    data("no such field", "JsonlDataset", "fieldless.jsonl", "columns", "txt", more="\n    columns: {txt: words}"),
    data("gzip cut short", "JsonlDataset", "cut.jsonl.gz", "{home}/cut.jsonl.gz:", "cut short"),
    data("only bad records", "JsonlDataset", "roles.jsonl", "no text: 1 of its records", "'bot'",
         more="\n    bad_records: skip"),
    data("binary text", "TextDataset", "binary.txt", "{home}/binary.txt:2", "UTF-8", "byte 4"),
    data("truncated index", _MEGATRON, "tokens/cut_index", "run.yaml:15", "cut_index.idx: it is truncated"),
    data("no MindRecord", _ROWS, "tokens/text.mindrecord", "run.yaml:15", "text.mindrecord: its header is not that"),
    line("batch larger than the data", "batch_size: 4", "batch_size: 999", "batch_size = 999", "fewer than one batch"),
    Case("token beyond the vocabulary", ("run.yaml:9", "vocab_size = 257", "beyond the model's vocabulary", "Fix: "),
         "data_loader:\n", "tokenizer: {type: huggingface, path: {home}/tokenizer}\n  data_loader:\n"),
    flag("a split out of bounds alone", "--do_eval --train_dataset.held_out 1.5", "error: flag --train", "less than 1"),
    flag("evaluation data not there", f"--do_eval {_NO_FOLDER}", "flag --eval_dataset_dir", "does not exist"),
    flag("the same in a run that evaluates", f"--run_mode eval --load_checkpoint {{home}}/good {_NO_FOLDER}",
         "flag --eval_dataset_dir", "does not exist"),
)  # fmt: skip
CHECKPOINTS = (
    flag("another width", "--load_checkpoint {home}/wide", "flag --load_checkpoint", "does not fit", "[257, 24]"),
    flag("by file", "--load_checkpoint {home}/wide.safetensors", "of shape [257, 24] where this model has [257, 16]"),
    flag("fewer layers", "--load_checkpoint {home}/shallow", "lacks model.layers.1.input_layernorm.weight (and 8"),
    flag("no marker", "--load_checkpoint {home}/half/checkpoints/step-00000003", "incomplete", "COMPLETE"),
    flag("only a half one", "--load_checkpoint {home}/half", "no complete checkpoint"),
    flag("file cut short", "--load_checkpoint {home}/cut.safetensors", "not a readable safetensors file"),
    flag("integers", "--load_checkpoint {home}/quantized.safetensors", "floating-point", "I8"),
    flag("resume another width", "--resume_training --output_dir {home}/wide", "--resume_training", "does not fit"),
    flag("predict another width", "--run_mode predict --predict_data a --load_checkpoint {home}/wide", "does not fit"),
    flag("a model for adapters", f"{_ADAPTERS} --adapter_id {{home}}/good", "flag --adapter_id", "a full model, not"),
    flag("adapters of a model", f"{_ADAPTERS} --resume_training --output_dir {{home}}/good", "contains a full model"),
)
PLACES = (
    Case("output_dir cannot be made", ("/proc/nowhere", "output_dir", "Fix: choose a folder"),
         "dir: {home}/output", "dir: /proc/nowhere"),
    line("no Ascend here", "seed: 1", "context: {device_target: Ascend}", "no CANN libraries", "doctor", "CPU"),
)  # fmt: skip
CASES = (*CONFIGURATION, *PARTS_OF_THE_MODEL, *DATA, *CHECKPOINTS, *PLACES)
