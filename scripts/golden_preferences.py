#!/usr/bin/env python3
"""Makes tests/golden/preferences.json: the first steps of trainings on preferences in TRL.

    torch-env/bin/python scripts/golden_preferences.py            # writes the file
    torch-env/bin/python scripts/golden_preferences.py --check    # compares; exit code 1 on a difference

The environment is that of make_golden.py with trl. The numbers come from TRL's trainers, which read the records as
text. One number is exchanged: the first term of ORPO is the mean log-probability of the chosen answers, as in its
paper, instead of a mean over all tokens of the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import datasets  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import golden_preferences_cases as cases  # noqa: E402  (beside the tests, which must run without torch)

TOLERANCE = 1e-5
NAMES = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl",
         "accuracy", "margin")  # fmt: skip


class PaperOrpoTrainer(ORPOTrainer):
    """TRL's trainer of ORPO with the likelihood of the answers as its first term."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the numbers of TRL, of which the fifth is exchanged."""
        found = super().concatenated_forward(model, batch)
        return (*found[:4], -found[0].mean(), *found[5:])


KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"loss_type": "sigmoid", "precompute_ref_log_probs": True}),
    "ipo": (trl.DPOTrainer, trl.DPOConfig, {"loss_type": "ipo", "precompute_ref_log_probs": True}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "orpo": (PaperOrpoTrainer, ORPOConfig, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {"loss_type": "kto", "precompute_ref_log_probs": True}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
}


def train(kind: str, folder: Path) -> dict[str, list[float]]:
    """Returns the numbers of each step of a training."""
    cases.write_model(kind, folder / "model")
    trainer_class, config_class, more = KINDS[kind]
    section = dict(cases.SETTINGS[kind])
    if "gamma" in section:
        section["simpo_gamma"] = section.pop("gamma")
    model_class: Any = transformers.AutoModelForCausalLM
    records = [dict(each) for each in cases.records_of(kind)]
    if kind == "reward":
        model_class = transformers.AutoModelForSequenceClassification
        for record in records:
            prompt = record.pop("prompt")
            record |= {name: prompt + record[name] for name in ("chosen", "rejected")}
    else:
        for record in records:
            record.pop("margin", None)
    model = model_class.from_pretrained(folder / "model", attn_implementation="eager", dtype=torch.float32)
    settings = config_class(
        output_dir=str(folder / "out"), per_device_train_batch_size=len(records), max_steps=cases.STEPS,
        learning_rate=cases.LEARNING_RATE, lr_scheduler_type="constant", adam_beta1=cases.BETAS[0],
        adam_beta2=cases.BETAS[1], adam_epsilon=cases.EPSILON, weight_decay=cases.WEIGHT_DECAY,
        max_grad_norm=cases.CLIP, max_length=60, use_cpu=True, bf16=False, gradient_checkpointing=False,
        logging_steps=1, disable_tqdm=True, save_strategy="no", report_to="none", disable_dropout=True,
        **section, **more,
    )  # fmt: skip
    losses: list[float] = []

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        """Collects the losses before they are rounded."""

        def compute_loss(self, *arguments: Any, **names: Any) -> Any:
            """Returns TRL's loss."""
            loss = super().compute_loss(*arguments, **names)
            losses.append(float(loss))
            return loss

    trainer = Recorder(
        model=model, args=settings, train_dataset=datasets.Dataset.from_list(records),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    if len(losses) != cases.STEPS or len(logs) != cases.STEPS:
        raise SystemExit(f"{kind}: {len(losses)} losses and {len(logs)} lines of the log")
    found = {"loss": losses}
    found |= {name: [entry[name] for entry in logs] for name in NAMES[1:] if name in logs[0]}
    return {name: [float(f"{value:.8g}") for value in values] for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {kind: train(kind, Path(folder) / kind) for kind in KINDS}
    if arguments.check:
        ours, known = cases.numbers_of(results), cases.numbers_of(cases.load_results())
        failed = ours.shape != known.shape or not np.allclose(ours, known, rtol=TOLERANCE, atol=TOLERANCE)
        print(f"{len(results)} types, {ours.size} numbers: {'different' if failed else 'equal'}")
        return int(failed)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    cases.PATH.write_text(json.dumps(versions | {"types": results}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
