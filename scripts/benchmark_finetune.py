#!/usr/bin/env python3
"""Training of a Qwen3 model in transformers, with `--lora_rank` of PEFT's adapters, timed as the trainer is.

This is what a user of a CPU would write: eager, attention by `scaled_dot_product_attention`, float32, AdamW, clipping
by global norm. The weights and the tokens are random, so no files are needed.

Runs in an environment of its own that holds torch, transformers and peft; `benchmark.py targets` starts it with
`--torch_python`. Prints one JSON line: the seconds of every step, the first loss, the number of trained weights, and
the peak of resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def build_model(options: argparse.Namespace) -> PreTrainedModel:
    """Returns Qwen3 with random weights of the standard deviation that its configuration has, 0.02."""
    config = Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=options.intermediate,
        num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.kv_heads,
        head_dim=options.head_size, max_position_embeddings=options.tokens, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa", dtype=torch.float32,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def add_adapters(model: PreTrainedModel, rank: int, alpha: float) -> torch.nn.Module:
    """Returns the model with PEFT's LoRA of the attention's projections, all that is trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=PROJECTIONS))


def time_steps(options: argparse.Namespace) -> dict[str, object]:
    """Returns the seconds of each optimizer step, the first loss and the number of trained weights."""
    model: torch.nn.Module = build_model(options)
    if options.lora_rank:
        model = add_adapters(model, options.lora_rank, options.lora_alpha)
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # The fused AdamW is that of transformers' Trainer.
    optimizer = torch.optim.AdamW(trained, 1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, options.vocabulary, (options.batch, options.tokens))
    seconds = []
    losses = []
    for _ in range(options.steps):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return {"step_seconds": seconds, "first_loss": losses[0], "trained": sum(weight.numel() for weight in trained)}


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the sizes of a model, its adapters and batches, and sets threads and seed of PyTorch."""
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "vocabulary", "tokens", "batch")
    for name in sizes:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lora_rank", type=int, default=0, help="0: all weights are trained")
    parser.add_argument("--lora_alpha", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return options


def print_report(measured: dict[str, object], tokens: int) -> None:
    """Prints the JSON line of a run with `tokens` a step."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({
        **measured,
        "tokens_per_step": tokens,
        "peak_rss_bytes": peak if sys.platform == "darwin" else peak * 1024,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }))


def main() -> None:
    options = read_options(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    print_report(time_steps(options), options.batch * options.tokens)


if __name__ == "__main__":
    main()
