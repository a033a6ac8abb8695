#!/usr/bin/env python3
"""Speed of prediction: reading prompts and greedy decoding, and an evaluation of as many tokens beside it.

Started by `benchmark.py targets`; PyTorch is `benchmark_torch.py --mode generate`. Prints one JSON line: for each
number of sequences the seconds of every repetition, by what was done. The first one warms up and is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainer.config import Config, Override, load_config  # noqa: E402


def time_generation(config: Config, numbers: list[int], prompt: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by number of sequences; a sequence has `prompt` tokens at first and seq_length at the end."""
    from trainer.data import build_datasets
    from trainer.models.generate import Generator, Sampling
    from trainer.run.session import open_session

    session, length = open_session(config), config.decoder.seq_length
    generator, dataset = Generator(session.model, session.build_inputs, ()), build_datasets(config)[0]
    found: dict[str, dict[str, list[float]]] = {}
    for rows in numbers:
        batch = dataset.batch(range(rows))
        prompts = [ids[:prompt].tolist() for ids in batch.input_ids]
        seconds: dict[str, list[float]] = {"prompt": [], "decode": [], "evaluation": []}
        for _ in range(repeats + 1):
            began, tokens = time.perf_counter(), generator.stream(prompts, [length - prompt] * rows, Sampling())
            next(tokens)
            read = time.perf_counter()
            decoded = sum(1 for _ in tokens)
            seconds["prompt"].append(read - began)
            seconds["decode"].append(time.perf_counter() - read)
            if decoded != length - prompt - 1:
                raise RuntimeError(f"{decoded} tokens were decoded, not {length - prompt - 1}")
            began = time.perf_counter()
            np.asarray(session.model(session.build_inputs(batch)).tokens.asnumpy())
            seconds["evaluation"].append(time.perf_counter() - began)
        found[str(rows)] = {name: values[1:] for name, values in seconds.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8], help="sequences that are generated together")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args()
    config = load_config(options.config, [Override(*pair.split("=", 1), "flag --set") for pair in options.set])
    print(json.dumps(time_generation(config, options.rows, options.prompt, options.repeats)))


if __name__ == "__main__":
    main()
