#!/usr/bin/env python3
"""Makes tests/golden/scores.json: what reward models of transformers score, with the weights of golden models.

    torch-env/bin/python scripts/golden_scores.py                               # writes the file
    torch-env/bin/python scripts/golden_scores.py --check                       # compares; exit code 1 on a difference
    torch-env/bin/python scripts/golden_scores.py --trainer .venv/bin/python    # checks what the trainer exports, too

The environment is that of make_golden.py. `--trainer` names the Python that run_trainer.py runs with: it exports each
reward model, and transformers must load the folder without a missing tensor and with the same scores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import golden_scores_cases as cases  # noqa: E402  (beside the tests, which must run without torch)

TOLERANCE = 1e-5


def scores_of(folder: Path) -> list[float]:
    """Returns the scores of the documents of a case, in one batch with padding."""
    how = {"output_loading_info": True, "attn_implementation": "eager"}
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **how)
    problems = {kind: sorted(names) for kind, names in info.items() if names}
    if problems or model.config.num_labels != 1:
        raise SystemExit(f"{folder}: {problems}, {model.config.num_labels} labels")
    padding = model.config.pad_token_id
    width = max(map(len, cases.DOCUMENTS))
    rows = [[*document, *[padding] * (width - len(document))] for document in cases.DOCUMENTS]
    mask = [[1] * len(document) + [0] * (width - len(document)) for document in cases.DOCUMENTS]
    with torch.no_grad():
        found = model.eval()(torch.tensor(rows), attention_mask=torch.tensor(mask)).logits[:, 0]
    return [float(score) for score in found]


def check_export(name: str, trainer: str, folder: Path) -> list[float]:
    """Returns the scores of what the trainer exports of a case."""
    config = folder / "config.yaml"
    config.write_text(
        f"pretrained_model_dir: {folder / 'source'}\nload_checkpoint: {folder / 'source'}\n"
        "train_dataset: {tokenizer: {type: bytes}}\n"
    )
    output = folder / "exported"
    command = [trainer, str(ROOT / "run_trainer.py"), "export", "--config", str(config), "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return scores_of(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--trainer", default="")
    arguments = parser.parse_args()
    scores: dict[str, list[float]] = {}
    failed = 0
    for name in cases.NAMES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            cases.write_reward_model(name, folder / "source")
            scores[name] = scores_of(folder / "source")
            spread = float(np.ptp(scores[name]))
            if spread < 0.1:
                raise SystemExit(f"{name}: the scores of all documents are alike ({spread:.2g})")
            if arguments.trainer:
                away = float(np.abs(np.subtract(check_export(name, arguments.trainer, folder), scores[name])).max())
                failed += away > TOLERANCE
                print(f"{name}: exported, scores differ by {away:.2g}")
    content = {"transformers": transformers.__version__, "torch": torch.__version__, "scores": scores}
    if arguments.check or arguments.trainer:
        known = cases.load_scores()
        failed += sum(not np.allclose(scores[name], known[name], rtol=0, atol=TOLERANCE) for name in cases.NAMES)
        print(f"{len(scores)} cases, {failed} differences")
        return int(failed > 0)
    cases.PATH.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
