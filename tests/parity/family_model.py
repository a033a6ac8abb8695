"""A golden model of a family as a folder of Hugging Face: the checks that each family passes.

`make_golden.py` makes a file family_NAME.safetensors for each case of scripts/golden_families.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_decoder import GoldenDecoder, golden_decoder
from golden_files import load_model_case, load_peft_modules, write_folder
from mindspore import Tensor
from model_gradients import model_gradients
from numpy_kernels import assert_same_bits, distance
from safetensors.numpy import load_file
from tolerances import decoder_limits

from trainer.checkpoint.adapters import adapter_config, merge_adapters
from trainer.checkpoint.tensor_names import to_disk
from trainer.config import Config, dump_config, parse_config
from trainer.config.checks.notes import rule_notes
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import saved_class
from trainer.data import Batch
from trainer.models.inputs import RouterStatistics
from trainer.models.spec.names import is_buffer
from trainer.models.spec.shapes import adapter_shapes
from trainer.run.export import export
from trainer.run.prepare import build_plan

ADAPTERS = {"pet_config": {"target_modules": ".*", "lora_rank": 2, "lora_b_std": 0.1}}


class FamilyModel:
    """One golden model, whose folder is written to `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.case = load_model_case(name)
        self.folder = folder
        self.described: dict[str, Any] = self.case.metadata["config_as_saved"]
        write_folder(folder, self.described, self.case.weights)

    def config(self, folder: Path | None = None, **model: Any) -> Config:
        """Returns the configuration of a finetuning with the folder; `model` has further keys of `model_config`."""
        settings = {"seq_length": self.case.input_ids.shape[1]} | model
        # Losses of transformers have no balance loss unless asked for.
        if not self.described.keys().isdisjoint(("num_experts_per_tok", "moe_k")):
            settings["router_aux_loss_coef"] = 0.0
        sections = {
            "pretrained_model_dir": str(folder or self.folder), "run_mode": "finetune",
            "model": {"model_config": settings},
            "train_dataset": {
                "data_loader": {"type": "SyntheticDataset", "num_samples": 8}, "tokenizer": {"type": "bytes"},
            },
        }  # fmt: skip
        return parse_config(self.case.name, json.dumps(sections))

    def decoder(self, mode: int = 0, **model: Any) -> GoldenDecoder:
        """Returns the model with the weights of the case."""
        return golden_decoder(self.case, self.config(**model).decoder, mode)

    def check_weights(self) -> None:
        """The folder goes in and out: the number of weights, each tensor, and the keys of config.json."""
        config = self.config()
        assert parse_config("again", dump_config(config)) == config
        assert saved_class(config.decoder, config.model.arch.type) == self.described["architectures"][0]
        assert build_plan(config).model.weights == self.case.metadata["parameters"]
        again = self.folder / "again"
        export(config, again, merge=False)
        saved = load_file(again / "model.safetensors")
        assert_same_bits(saved, self.case.weights)
        written = json.loads((again / "config.json").read_text())
        others = {"dtype", "use_cache", "bos_token_id", "eos_token_id", "router_aux_loss_coef"}  # see `config`
        for key in written.keys() & self.described.keys() - others:
            theirs = self.described[key]
            if key == "rope_parameters":
                assert written[key].items() >= theirs.items()
            elif theirs is not None:
                assert written[key] == pytest.approx(theirs), key
        assert self.config(again).decoder == config.decoder

    def check_numbers(self, mode: int) -> None:
        """Logits, loss and every gradient are those of transformers."""
        built = self.decoder(mode)
        case, model, inputs = built.case, built.model, built.inputs
        limits = decoder_limits(model.settings, rows=len(case.input_ids))
        assert distance(model.logits(inputs).asnumpy().reshape(case.logits.shape), case.logits) < limits.loss
        names = [name for name in model.parameters_by_name if not is_buffer(name)]
        loss_sum, gradients = model_gradients(model, inputs, names)
        assert distance(loss_sum, np.float32(case.loss_sum)) < limits.loss
        found = to_disk(
            {name: one / case.valid_tokens for name, one in gradients.items()}, self.described["architectures"][0]
        )
        assert found.keys() == case.gradients.keys()
        for name, gradient in found.items():
            right = case.gradients[name]
            assert distance(gradient, right) < limits.gradients if right.any() else not gradient.any(), name

    def check_documents(self) -> None:
        """The loss of documents in a row is the sum of the losses of each alone."""
        built = self.decoder()
        case = built.case
        total = 0.0
        for row, segments in enumerate(case.segment_ids):
            for segment in np.unique(segments):
                places = np.flatnonzero(segments == segment)
                arrays = (case.input_ids, case.labels, case.positions)
                ids, labels, positions = (np.ascontiguousarray(one[row : row + 1, places]) for one in arrays)
                inputs = built.build_inputs(Batch(ids, labels, positions, np.zeros_like(ids)))
                total += float(built.model(inputs, None, RouterStatistics()).tokens.asnumpy())
        limit = decoder_limits(built.model.settings, rows=len(case.input_ids)).loss
        assert total == pytest.approx(case.loss_sum, rel=limit)

    def check_adapters(self) -> None:
        """Logits with adapters are those of the weights into which they are merged."""
        adapted = self.decoder_with_adapters()
        weights = {name: one.asnumpy() for name, one in adapted.model.parameters_by_name.items()}
        merged = self.decoder()
        before = merged.model.logits(merged.inputs).asnumpy()
        for name, array in merge_adapters(weights, adapted.model.settings).items():
            merged.model.parameters_by_name[name].set_data(Tensor(array))
        merged.model.compute_weights.refresh()
        right = merged.model.logits(merged.inputs).asnumpy()
        found = adapted.model.logits(adapted.inputs).asnumpy()
        limit = decoder_limits(adapted.model.settings, rows=len(self.case.input_ids)).loss
        assert distance(found, right) < limit
        assert distance(before, right) > 100 * limit

    def check_modules_of_peft(self) -> None:
        """PEFT adapts the same matrices for our adapter_config.json, with the same names and shapes.

        The exceptions are matrices that are one in transformers, and those of dense layers beside experts: a note says
        that PEFT cannot load them.
        """
        config = self.config(**ADAPTERS)
        sides: dict[str, dict[str, int]] = {}
        for name, shape in adapter_shapes(config.decoder).items():
            module, _, factor = name.removesuffix(".weight").rpartition(".lora_")
            sides.setdefault(module, {})[factor] = shape["BA".index(factor)]
        told = "".join(rule_notes(config))
        for pieces in FAMILIES[self.described["architectures"][0]].joined_tensors.values():
            adapted = [name for name in sides if name.endswith(tuple(f".{piece}" for piece in pieces))]
            last = " and ".join(piece.rpartition(".")[2] for piece in pieces)
            assert (f"PEFT cannot load adapters of {last}," in told) == bool(adapted)
            for name in adapted:
                del sides[name]
        in_dense_layers = [name for name in sides if ".mlp." in name and config.decoder.moe_layers]
        assert ("which it takes for matrices of experts" in told) == bool(in_dense_layers)
        for name in in_dense_layers:
            del sides[name]
        targets = adapter_config(config.decoder, "")["target_modules"]
        theirs = {
            name: shape for name, shape in load_peft_modules()[self.case.name].items()
            if any(name == target or name.endswith(f".{target}") for target in targets)
        }
        assert {name: [factors["B"], factors["A"]] for name, factors in sides.items()} == theirs

    def decoder_with_adapters(self) -> GoldenDecoder:
        """Returns the model with new adapters on every matrix that can have one."""
        return golden_decoder(self.case, self.config(**ADAPTERS).decoder, mode=0)
