#!/usr/bin/env python3
"""The model of `benchmark.py dense`, `moe` and `targets` in PyTorch, as a user of PyTorch would write it, timed
the same way. With `--experts` its feed-forward layers are mixtures of experts as Hugging Face has them, and with
`--nope` its attention is multi-head latent attention. `--window`, `--hidden_dropout` and `--attention_dropout` give it
sliding windows and dropout. `--mode generate` decodes greedily with a key/value cache.

Runs in an environment of its own that holds torch (the trainer's must not); `benchmark.py` starts it with
`--torch_python`. Prints one JSON line: the seconds of every step, the first with compilation, the first loss, the
number of trained weights, and the peak of resident memory before anything else is measured.

Legend: B batch, T tokens, S cached tokens, D hidden, H heads, E head size; with experts N tokens of the batch, K chosen
by each; with latent attention L width of the latent vector of keys and values, R width of the rotated part of a head.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional

SIZES = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 8, "intermediate": 688, "tokens": 256, "vocabulary": 4096,
         "batch": 8, "experts": 0, "chosen": 2, "query_rank": 96, "key_value_rank": 64, "nope": 0, "rope": 16,
         "value": 32, "window": 0}
DROPOUT = "hidden_dropout", "attention_dropout"


class FeedForward(nn.Module):
    """Computes SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Computes a mixture of experts as Hugging Face's Mixtral: each expert computes its tokens and adds its output."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.chosen = sizes.chosen
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(sizes.hidden, sizes.intermediate) for _ in range(sizes.experts))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_ND = x_BTD.flatten(0, 1)
        probabilities_NK, experts_NK = self.router(x_ND).softmax(-1).topk(self.chosen)
        probabilities_NK = probabilities_NK / probabilities_NK.sum(-1, keepdim=True)
        mixed_ND = torch.zeros_like(x_ND)
        for number, expert in enumerate(self.experts):
            tokens, choices = torch.where(experts_NK == number)
            if len(tokens):
                part = expert(x_ND.index_select(0, tokens)) * probabilities_NK[tokens, choices, None]
                mixed_ND.index_add_(0, tokens, part)
        return mixed_ND.view_as(x_BTD)


class Attention(nn.Module):
    """Computes attention with rotary embeddings and grouped queries."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        hidden = sizes.hidden
        head_size = hidden // sizes.heads
        self.head_size = head_size
        self.grouped = sizes.kv_heads != sizes.heads
        self.dropout = sizes.attention_dropout
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, sizes.kv_heads * head_size, bias=False)
        self.value = nn.Linear(hidden, sizes.kv_heads * head_size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self, y_BTD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, mask_TT: torch.Tensor | None,
        cache: tuple[torch.Tensor, torch.Tensor] | None = None, start: int = 0,
    ) -> torch.Tensor:
        """Adds keys and values of y to `cache`, those of the tokens before `start`, [B, H, S, E]."""
        query, key, value = (
            projection(y_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, H, T, E]
            for projection in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cos_TE, sin_TE), rotate(key, cos_TE, sin_TE)
        if cache is not None:
            end = start + y_BTD.shape[1]
            for cached, new in zip(cache, (key, value), strict=True):
                cached[:, :, start:end] = new
            key, value = (cached[:, :, :end] for cached in cache)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask_TT, self.dropout if self.training else 0.0,
            is_causal=mask_TT is None and y_BTD.shape[1] > 1, enable_gqa=self.grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Computes multi-head latent attention as Hugging Face's DeepSeek-V3: keys and values are expanded for each token,
    and all heads share one rotated key."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        hidden = sizes.hidden
        heads = sizes.heads
        self.heads = heads
        self.dropout = sizes.attention_dropout
        self.query_parts = sizes.nope, sizes.rope
        self.latent_parts = sizes.key_value_rank, sizes.rope
        self.key_value_parts = sizes.nope, sizes.value
        self.query_down = nn.Linear(hidden, sizes.query_rank, bias=False)
        self.query_norm = nn.RMSNorm(sizes.query_rank, 1e-6)
        self.query_up = nn.Linear(sizes.query_rank, heads * sum(self.query_parts), bias=False)
        self.key_value_down = nn.Linear(hidden, sum(self.latent_parts), bias=False)
        self.key_value_norm = nn.RMSNorm(sizes.key_value_rank, 1e-6)
        self.key_value_up = nn.Linear(sizes.key_value_rank, heads * sum(self.key_value_parts), bias=False)
        self.output = nn.Linear(heads * sizes.value, hidden, bias=False)

    def forward(
        self, y_BTD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, mask_TT: torch.Tensor | None
    ) -> torch.Tensor:
        query_BHTE = self.query_up(self.query_norm(self.query_down(y_BTD))).unflatten(-1, (self.heads, -1))
        plain, turned = query_BHTE.transpose(1, 2).split(self.query_parts, -1)
        query_BHTE = torch.cat((plain, rotate(turned, cos_TR, sin_TR)), -1)
        latent_BTL, shared = self.key_value_down(y_BTD).split(self.latent_parts, -1)
        expanded = self.key_value_up(self.key_value_norm(latent_BTL)).unflatten(-1, (self.heads, -1))
        plain, value = expanded.transpose(1, 2).split(self.key_value_parts, -1)
        shared = rotate(shared.unsqueeze(1), cos_TR, sin_TR)  # [B, 1, T, R]
        key_BHTE = torch.cat((plain, shared.expand(-1, self.heads, -1, -1)), -1)
        mixed = functional.scaled_dot_product_attention(
            query_BHTE, key_BHTE, value, mask_TT, self.dropout if self.training else 0.0, is_causal=mask_TT is None)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Computes attention, then SwiGLU or experts; both behind RMSNorm and with dropout of what they add."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, 1e-6), nn.RMSNorm(hidden, 1e-6)
        self.attention = LatentAttention(sizes) if sizes.nope else Attention(sizes)
        self.mlp = Experts(sizes) if sizes.experts else FeedForward(hidden, sizes.intermediate)
        self.dropout = nn.Dropout(sizes.hidden_dropout) if sizes.hidden_dropout else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, *attention: object) -> torch.Tensor:
        """Passes rotary tables, mask and, if there is one, the cache to the attention."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), *attention))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


def rotate(x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos_TE + torch.cat((-second, first), -1) * sin_TE


class Decoder(nn.Module):
    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, 1e-6)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        rotated = sizes.rope if sizes.nope else sizes.hidden // sizes.heads
        frequencies = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
        places = torch.arange(sizes.tokens)
        angles = torch.outer(places.float(), frequencies).repeat(1, 2)
        self.register_buffer("cos_TE", angles.cos())
        self.register_buffer("sin_TE", angles.sin())
        before = places[:, None] - places  # [T, T]: how far a key is behind a query
        self.register_buffer("mask_TT", (before >= 0) & (before < sizes.window) if sizes.window else None)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss per token."""
        x_BTD = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TE, self.sin_TE, self.mask_TT)
        return functional.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), labels_BT.flatten())

    def next_logits(
        self, ids_BT: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]], start: int
    ) -> torch.Tensor:
        """Logits [B, V] after the last of these tokens, which follow those in the caches."""
        x_BTD, places = self.embedding(ids_BT), slice(start, start + ids_BT.shape[1])
        for block, cache in zip(self.blocks, caches, strict=True):
            x_BTD = block(x_BTD, self.cos_TE[places], self.sin_TE[places], None, cache, start)
        return self.head(self.norm(x_BTD[:, -1]))


def time_steps(options: argparse.Namespace) -> dict[str, object]:
    """Returns the seconds of each optimizer step: accumulated forward and backward, clipping by global norm, AdamW; and
    the first loss and the number of trained weights."""
    model = Decoder(options)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], 1e-3,
                                  betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if options.mode == "compile" else model
    half = torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16")
    ids = torch.randint(0, options.vocabulary, (options.batch, options.tokens + 1))
    seconds, losses = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        for _ in range(options.accumulate):
            with half:
                loss = forward(ids[:, :-1], ids[:, 1:]) / options.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item() * options.accumulate)
    trained = sum(weight.numel() for weight in model.parameters())
    return {"step_seconds": seconds, "first_loss": losses[0], "trained": trained}


@torch.inference_mode()
def time_generation(options: argparse.Namespace, rows: int) -> dict[str, list[float]]:
    """Seconds of reading prompts and of greedy decoding after them, for so many sequences, several times after a first
    one."""
    model = Decoder(options).eval()
    ids = torch.randint(0, options.vocabulary, (rows, options.prompt))
    shape = rows, options.kv_heads, options.tokens, options.hidden // options.heads
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats + 1):
        caches = [(torch.empty(shape), torch.empty(shape)) for _ in range(options.layers)]
        start = time.perf_counter()
        chosen = model.next_logits(ids, caches, 0).argmax(-1, keepdim=True)
        read = time.perf_counter()
        for place in range(options.prompt, options.tokens - 1):
            chosen = model.next_logits(chosen, caches, place).argmax(-1, keepdim=True)
            chosen.tolist()
        seconds.setdefault("prompt", []).append(read - start)
        seconds.setdefault("decode", []).append(time.perf_counter() - read)
    return {name: values[1:] for name, values in seconds.items()}


def matmul_gflops(size: int = 2048) -> float:
    """Returns the GFLOP/s of the fastest float32 matrix product on this machine, the upper bound for both
    frameworks."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mode", choices=("eager", "compile", "generate"), default="eager")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the products: autocast")
    more = {"steps": 20, "accumulate": 1, "threads": 2, "prompt": 128, "repeats": 3}
    for name, default in {**SIZES, **more}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in DROPOUT:
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8], help="sequences that are generated together")
    options = parser.parse_args()
    if options.mode == "generate" and (options.nope or options.window):
        parser.error("--mode generate has neither --nope nor --window")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.mode == "generate":
        print(json.dumps({str(rows): time_generation(options, rows) for rows in options.rows}))
        return
    measured = time_steps(options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({
        **measured,
        "tokens_per_step": options.batch * options.tokens * options.accumulate,
        "peak_rss_bytes": peak if sys.platform == "darwin" else peak * 1024,
        "matmul_gflops": matmul_gflops(),
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }))


if __name__ == "__main__":
    main()
