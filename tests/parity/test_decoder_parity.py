"""The decoder against Hugging Face: logits, loss and every gradient, float32 (limits: tolerances.py).

Both ways of running on a CPU are held to it: native layers (context.mode 0), and operator by operator (mode 1).
"""

from __future__ import annotations

import numpy as np
import pytest
from decoder_settings import decoder_settings
from golden_decoder import MODES, GoldenDecoder, golden_decoder
from golden_files import load_model_case, model_case_names, model_settings
from numpy_kernels import distance

from trainer.data import Batch


def build(name: str, mode: int = 0) -> GoldenDecoder:
    case = load_model_case(name)
    return golden_decoder(case, decoder_settings(seq_length=24, **model_settings(case.config)), mode)


def test_positions_that_start_again_change_the_logits_of_a_single_segment() -> None:
    """Restarts positions as Megatron-LM's reset_position_ids alone does, before and after a sequence with positions
    from 0 on."""
    case, model, build_inputs = build(model_case_names()[0])
    plain = np.ascontiguousarray(np.broadcast_to(np.arange(24, dtype=np.int32), case.input_ids.shape))
    again = np.where(plain < 10, plain, plain - 10)
    one = np.zeros_like(case.segment_ids)
    logits = [model.logits(build_inputs(Batch(case.input_ids, case.labels, positions, one))).asnumpy()
              for positions in (again, plain, again, plain)]
    assert np.array_equal(logits[0], logits[2]) and np.array_equal(logits[1], logits[3])
    logits = [array.reshape(*plain.shape, -1) for array in logits]
    assert np.array_equal(logits[0][:, :10], logits[1][:, :10])
    assert distance(logits[0][:, 11:], logits[1][:, 11:]) > 0.01


@MODES
@pytest.mark.parametrize("name", model_case_names())
def test_logits_loss_and_gradients_equal_hugging_face(name: str, mode: int) -> None:
    build(name, mode).check_numbers()


@pytest.mark.parametrize("name", ["model_glm4", "model_mistral", "model_qwen3_window"])
def test_generation_goes_the_same_way_as_the_whole_row(name: str) -> None:
    """With a cache: neighbours rotated, norms after the sublayers; a prompt that is longer than the window."""
    build(name).check_generation(9, new_tokens=5)
