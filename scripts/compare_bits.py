#!/usr/bin/env python3
"""Compares the numbers that two checkouts of the trainer compute, for changes that must not change them.

    git worktree add --detach /tmp/old HEAD~1
    python scripts/compare_bits.py /tmp/old .
    python scripts/compare_bits.py /tmp/old . --only dense latent --limit 1e-5

Each checkout trains the same tiny models, in one process of its own: two steps of two micro-batches by SGD with
momentum, whose buffers hold the gradients themselves. For each model it prints `same bits`, or by how much the losses
(of training and of evaluation) and the gradients differ, relative to the largest number of the tensor, which tensor
differs most, and whether a greedy prediction still gives the same text. Only the command line's keys and the files of
a run are used, so that checkouts can be far apart. Exit code 0 when no difference is above --limit, 1 when one is, 2
when a checkout cannot be run. It takes about 40 seconds a checkout on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]

MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "vocab_size": 257, "seq_length": 24,
    "initializer_range": 0.2, "max_position_embeddings": 512, "max_new_tokens": 12,
}  # fmt: skip
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 24, "aux_loss_factor": 0.1}
DEEPSEEK_EXPERTS = {
    "expert_num": 8, "num_experts_chosen": 3, "moe_intermediate_size": 16, "aux_loss_factor": 0.1, "n_group": 4,
    "topk_group": 2, "shared_expert_num": 1, "use_gating_sigmoid": True, "routed_scaling_factor": 1.5,
    "balance_via_topk_bias": True, "topk_bias_update_rate": 0.01, "first_k_dense_replace": 1, "z_loss_factor": 0.01,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
ADAPTERS = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 16, "target_modules": ".*_proj"}
ALL_BIASES = {
    "qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True, "mlp_down_has_bias": True,
}  # fmt: skip

DOCUMENTS = ("The quick brown fox jumps over the lazy dog. ", "0 1 2 3 5 8 13 21 34\n", "def f(x):\n    return x\n")
PROMPT = "The quick"
STEPS = 2


class Case(NamedTuple):
    """Describes a tiny model.

    Attributes:
        model: Changes to `MODEL`.
        sections: Changes to the other sections of the configuration.
    """

    model: Mapping[str, Any] = {}
    sections: Mapping[str, Any] = {}


PACKED = {"train_dataset": {"packing": "whole"}}
CASES: dict[str, Case] = {
    "dense": Case(),
    "long": Case({"seq_length": 300, "n_kv_heads": 2}),  # more tokens than a tile of rows or a block of queries
    "grouped heads": Case({"n_kv_heads": 2, "head_dim": 12}),
    "window": Case({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}),
    "packed": Case({"n_kv_heads": 2}, PACKED),
    "biases": Case(ALL_BIASES),
    "qk norm": Case({"use_qk_norm": True, "n_kv_heads": 1}),
    "partial rotary": Case({"rotary_pct": 0.5, "rope_theta": 500.0}),
    "interleaved rotary": Case({"rotary_pct": 0.5, "rope_interleave": True}),
    "yarn": Case({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
    "tied": Case({"tie_word_embeddings": True}),
    "norms after": Case({"post_self_attn_layernorm": True, "post_mlp_layernorm": True}),
    "caps": Case({"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "n_kv_heads": 2, "seq_length": 300}),
    "sinks": Case({"attention_sinks": True, "n_kv_heads": 2, "seq_length": 300}, PACKED),
    "side by side": Case({"parallel_attn": True}),
    "mapped embedding": Case({"embedding_size": 16, "layers_group": 2}),
    "Mixtral": Case({"moe_config": EXPERTS | {"norm_topk_prob": True}}),
    "Qwen3-MoE": Case({"use_qk_norm": True, "n_kv_heads": 2, "moe_config": EXPERTS | {
        "norm_topk_prob": False, "use_shared_expert_gating": True, "shared_expert_num": 1}}),
    "capacity": Case({"moe_config": EXPERTS | {"capacity_factor": 1.0}}),
    "DeepSeek experts": Case({"moe_config": DEEPSEEK_EXPERTS}),
    "latent": Case(LATENT),
    "DeepSeek": Case({**LATENT, "rope_interleave": True, "mtp_depth": 1, "moe_config": DEEPSEEK_EXPERTS}, PACKED),
    "multi-token": Case({"mtp_depth": 2, "n_kv_heads": 2}),
    "recomputed": Case({"n_kv_heads": 2}, {"recompute_config": {"recompute": True}}),
    "recomputed experts": Case({"moe_config": EXPERTS}, {"recompute_config": {"recompute": True}}),
    "frozen": Case({}, {"freeze": {"include": ["embeddings", "layers: 0"]}}),
    "dropout": Case({"hidden_dropout": 0.2, "attention_dropout": 0.1, "n_kv_heads": 2}),
    "recomputed dropout": Case(
        {"hidden_dropout": 0.2, "attention_dropout": 0.1}, {"recompute_config": {"recompute": True}}
    ),
    "LoRA": Case({"n_kv_heads": 2, "pet_config": ADAPTERS}),
    "LoRA with dropout": Case({"pet_config": ADAPTERS | {"lora_dropout": 0.1}}, PACKED),
    "latent LoRA": Case({**LATENT, "pet_config": ADAPTERS | {"target_modules": ".*"}}),
    "bfloat16": Case({"n_kv_heads": 2, "compute_dtype": "bfloat16"}),
    "bfloat16 experts": Case({"compute_dtype": "bfloat16", "moe_config": EXPERTS}),
    "float16": Case({"n_kv_heads": 2, "compute_dtype": "float16"}),
}  # fmt: skip


class Numbers(NamedTuple):
    """The results of a checkout for a model.

    Attributes:
        losses: Losses of each step, and of the evaluation after it.
        tensors: Weights, gradients and other tensors of the last checkpoint, by file and name.
        text: Predictions after each step.
        failure: Why there are no results; empty if there are.
    """

    losses: list[float]
    tensors: Arrays
    text: list[str]
    failure: str = ""


# --- in the process of a checkout -----------------------------------------------------------------------------------


def configuration(case: Case, folder: Path) -> dict[str, Any]:
    """Returns the configuration of a case, as the content of a YAML file."""
    data = {
        "data_loader": {"type": "TextDataset", "dataset_dir": str(folder / "text"), "shuffle": False},
        "tokenizer": {"type": "bytes"}, "packing": "cut", "cache_dir": str(folder / "cache"),
    }  # fmt: skip
    sections = dict(case.sections)
    trained = data | sections.pop("train_dataset", {})
    return {
        "seed": 7, "run_mode": "train", "output_dir": str(folder / "run"), "report": False,
        "model": {"arch": {"type": "LlamaForCausalLM"}, "model_config": MODEL | dict(case.model)},
        "train_dataset": trained, "eval_dataset": trained | {"max_batches": 1},
        "runner_config": {
            "epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 2, "stop_step": STEPS},
        "runner_wrapper": {"use_clip_grad": False},
        "optimizer": {"type": "SGD", "momentum": 0.5},
        "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.1},
        "do_eval": True, "eval_step_interval": 1, "sample_prompt": PROMPT,
        "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 0}],
        **sections,
    }  # fmt: skip


def read_tensors(path: Path) -> Arrays:
    """Reads the arrays of a .safetensors file, as bytes where NumPy lacks the dtype."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32, "I64": np.int64}
    found = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(content[first:last], kinds.get(entry["dtype"], np.uint8))
    return found


def compute(case: Case, folder: Path) -> Numbers:
    """Trains the model of a case by the `trainer` that is imported."""
    from trainer import train

    text = folder / "text"
    text.mkdir(parents=True)
    for number in range(60):
        # Of many lengths: packing puts several into a sequence, and cuts long ones.
        words = [DOCUMENTS[(number + part) % 3] for part in range(1 + number * number % 7)]
        (text / f"{number:02d}.txt").write_text("".join(words)[: 5 + 11 * number])
    run = train(configuration(case, folder))
    losses = [record["loss"] for record in run.metrics] + [record["eval_loss"] for record in run.evaluations]
    files = sorted(run.checkpoint.glob("*.safetensors"))
    tensors = {f"{file.stem} {name}": array for file in files for name, array in read_tensors(file).items()}
    samples = (run.folder / "samples.jsonl").read_text().splitlines()
    return Numbers(losses, tensors, [json.loads(line)["text"] for line in samples])


def run_cases(checkout: Path, folder: Path, names: Sequence[str]) -> None:
    """Computes the cases with the trainer of a checkout, and writes each result to `folder`."""
    sys.path.insert(0, str(checkout))
    import trainer

    if not Path(trainer.__file__).is_relative_to(checkout):
        raise SystemExit(f"{trainer.__file__} was imported, which is not in {checkout}")
    for name in names:
        place = folder / name.replace(" ", "_")
        place.mkdir()
        failure, found, printed = "", None, io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                found = compute(CASES[name], place)
        except Exception as error:  # of a checkout that is being changed: whatever it is, the other cases go on
            failure = f"{type(error).__name__}: {error}".strip()
            (place / "traceback.txt").write_text(f"{printed.getvalue()}\n{traceback.format_exc()}")
        if found is not None:
            np.savez(place / "tensors.npz", **found.tensors)
        kept = {"losses": found.losses if found else [], "text": found.text if found else [], "failure": failure}
        (place / "numbers.json").write_text(json.dumps(kept))


# --- comparing --------------------------------------------------------------------------------------------------------


def read_numbers(folder: Path, name: str) -> Numbers:
    place = folder / name.replace(" ", "_")
    kept, path = json.loads((place / "numbers.json").read_text()), place / "tensors.npz"
    tensors = {}
    if path.exists():
        with np.load(path) as file:
            tensors = {key: file[key] for key in file.files}
    return Numbers(kept["losses"], tensors, kept["text"], kept["failure"])


def relative_difference(old: np.ndarray, new: np.ndarray) -> float:
    """Returns the largest difference of two arrays, relative to the largest number of the old one.

    It is inf if their shapes differ, or only one of two numbers is finite.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    if old.tobytes() == new.tobytes():
        return 0.0
    if old.dtype == np.uint8:
        return float("inf")
    first, second = old.astype(np.float64), new.astype(np.float64)
    if not np.array_equal(np.isfinite(first), np.isfinite(second)):
        return float("inf")
    finite = np.isfinite(first)
    largest = np.max(np.abs(first[finite]), initial=0.0)
    difference = np.max(np.abs(first[finite] - second[finite]), initial=0.0)
    # -0.0 and 0.0 are the smallest difference that there is.
    return max(difference / largest if largest else difference, float(np.finfo(np.float64).tiny))


class Verdict(NamedTuple):
    """Says how two checkouts differ in a case: `size` as in `relative_difference`, inf if it is more than rounding,
    and a line of text."""

    size: float
    text: str


def judge(old: Numbers, new: Numbers) -> Verdict:
    """Compares the numbers of one case."""
    if old.failure or new.failure:
        lines = [f"{side} failed: {' '.join(numbers.failure.split())[:300]}"
                 for side, numbers in (("old", old), ("new", new)) if numbers.failure]  # fmt: skip
        return Verdict(float("inf"), "; ".join(lines))
    losses = relative_difference(np.array(old.losses), np.array(new.losses))
    names = sorted(old.tensors.keys() & new.tensors.keys())
    sizes = {name: relative_difference(old.tensors[name], new.tensors[name]) for name in names}
    only = sorted(old.tensors.keys() ^ new.tensors.keys())
    worst = max(sizes, key=sizes.__getitem__, default="")
    differing = sum(1 for value in sizes.values() if value)
    size = max(losses, sizes.get(worst, 0.0))
    words = ["same bits"]
    if size:
        words = [f"loss {losses:.1e}", f"tensors {sizes[worst]:.1e} ({worst}; {differing} of {len(sizes)} differ)"]
    if only:
        words.append(f"{len(only)} tensors are in one alone, such as {only[0]}")
    if old.text != new.text:
        words.append("another prediction")
    has_more = bool(only) or old.text != new.text
    return Verdict(float("inf") if has_more else size, ", ".join(words))


def compute_in_a_process(checkout: Path, folder: Path, names: Sequence[str]) -> None:
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).resolve()), "--run", str(checkout), str(folder), *names]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        last = "\n".join((result.stderr or result.stdout).splitlines()[-15:])
        raise SystemExit(f"{checkout} cannot be run:\n{last}")


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["--run"]:
        run_cases(Path(words[1]), Path(words[2]), words[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path, help="the root of a checkout")
    parser.add_argument("new", type=Path, help="the root of another")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE",
                        help=f"of {', '.join(CASES)}")
    parser.add_argument("--limit", type=float, default=0.0, help="largest relative difference that passes")
    parser.add_argument("--keep", type=Path, help="a new folder to keep all runs in")
    options = parser.parse_args(words)
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-bits-")))
        else:
            folder = options.keep.resolve()
            folder.mkdir(parents=True)
        for side in ("old", "new"):
            compute_in_a_process(getattr(options, side).resolve(), folder / side, options.only)
        verdicts = {name: judge(*(read_numbers(folder / side, name) for side in ("old", "new")))
                    for name in options.only}  # fmt: skip
    for name, verdict in verdicts.items():
        print(f"{name:20} {verdict.text}")
    return int(any(verdict.size > options.limit for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
