#!/usr/bin/env python3
"""Training of a Qwen3 model on preferences in TRL, with `--lora_rank` of PEFT's adapters, timed as the trainer is.

DPO and IPO compute the log-probabilities of the reference once before the first step, as the trainer does; that is not
timed. Gradient checkpointing and bfloat16, which TRL has by default, are off. ORPO is one of its experimental trainers.

Runs in an environment of its own that holds torch, transformers, peft and trl; `benchmark.py targets` starts it with
`--torch_python`. Prints one JSON line: the seconds of every step, the first loss, the number of trained weights, and
the peak of resident memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import datasets
import transformers
import trl
from benchmark_finetune import PROJECTIONS, build_model, print_report, read_options
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

END = "<|endoftext|>"


class StepTimer(TrainerCallback):
    """Collects the seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token a byte and one that ends a document, as the trainer's own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def build_trainer(options: argparse.Namespace, folder: str, timer: StepTimer) -> transformers.Trainer:
    """Returns TRL's trainer of the method."""
    arguments: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "learning_rate": 1e-6, "lr_scheduler_type": "constant", "adam_beta2": 0.95, "weight_decay": 0.1,
        "max_grad_norm": 1.0, "beta": 0.1, "max_length": options.tokens, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no",
        "report_to": "none",
    }  # fmt: skip
    if options.method == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        kind = ORPOTrainer
        settings = ORPOConfig(**arguments)
    else:
        kind = trl.DPOTrainer
        loss = {"dpo": "sigmoid", "ipo": "ipo"}[options.method]
        settings = trl.DPOConfig(**arguments, loss_type=loss, precompute_ref_log_probs=True)
    adapters = None
    if options.lora_rank:
        adapters = LoraConfig(r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules=PROJECTIONS)
    pairs = datasets.load_dataset("json", data_files=options.pairs, split="train", cache_dir=folder)
    return kind(
        model=build_model(options), args=settings, train_dataset=pairs, processing_class=byte_tokenizer(),
        peft_config=adapters, callbacks=[timer],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=("dpo", "ipo", "orpo"), required=True)
    parser.add_argument("--pairs", required=True, help="a file of JSON lines with prompt, chosen and rejected")
    options = read_options(parser)
    timer = StepTimer()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        trainer = build_trainer(options, folder, timer)
        trainer.train()
    trained = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    first_loss = trainer.state.log_history[0]["loss"]
    measured = {"step_seconds": timer.seconds, "first_loss": first_loss, "trained": trained, "trl": trl.__version__}
    print_report(measured, 2 * options.batch * options.tokens)


if __name__ == "__main__":
    main()
