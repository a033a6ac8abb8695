"""The row of a file in `plan --search` whose pipeline has one of MindSpore's sequence pipelines."""

from __future__ import annotations

import json

import pytest
from tolerances import FLOAT64_SUMS

from trainer.config import Config, parse_config
from trainer.models.spec.sublayers import attention_spec
from trainer.parallel.world import world_of
from trainer.plan.device.graph import _cache_bytes
from trainer.plan.search.layouts import file_layout
from trainer.plan.search.render import assumptions, result_dict
from trainer.plan.search.search import Candidate, LayoutSearch, SearchResult
from trainer.run.plan_file import open_search

LONG = {
    "num_layers": 8, "hidden_size": 512, "num_heads": 8, "n_kv_heads": 2, "intermediate_size": 1536,
    "vocab_size": 4096, "seq_length": 8192,
}  # fmt: skip


def configuration(scheduler: str, chunks: int = 1, slices: int = 1, mode: int = 1) -> Config:
    """Returns a file of 4 stages and 2 replicas with 8 micro-batches."""
    return parse_config("search", json.dumps({
        "use_parallel": True, "context": {"device_target": "Ascend"}, "runner_config": {"batch_size": 1},
        "parallel": {
            "parallel_mode": mode,
            "pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": scheduler},
        },
        "parallel_config": {
            "pipeline_stage": 4, "data_parallel": 2, "micro_batch_num": 8, "seq_split_num": slices,
        },
        "optimizer": {"type": "AdamW"},
        "model": {"arch": {"type": "LlamaForCausalLM"}, "model_config": LONG | {"pp_interleave_num": chunks}},
    }))  # fmt: skip


def searched(config: Config) -> tuple[LayoutSearch, SearchResult]:
    search = open_search(config, world_of(8), "Ascend")
    return search, search.run()


def file_of(config: Config) -> Candidate:
    """Returns the row of the file itself."""
    row = searched(config)[1].file
    assert row is not None
    return row


@pytest.mark.parametrize("chunks", [1, 2])
def test_without_slices_a_file_of_seqpipe_is_one_of_interleaved_1f1b(chunks: int) -> None:
    """Layouts of published files have no slices: theirs is the schedule of Narayanan et al. 2021."""
    config = configuration("seqpipe", chunks)
    search, result = searched(config)
    row, usual = result.file, file_of(configuration("1f1b", chunks))
    assert row is not None and row.time == usual.time and row.memory == usual.memory
    assert search.bubble(row.layout) == search.bubble(usual.layout) > 0
    found = result_dict(search, result, config, None)
    assert found["file"]["pipeline_scheduler"] == "seqpipe" and not found["other_schedule"]
    assert "faster than its own" in found["file"]["place"] and "refuses" not in found["file"]["place"]
    assert found["schedule"] == "the file's own layout has seqpipe, which is MindSpore's; the others have 1f1b"
    assert found["changes"]["parallel.pipeline_config.pipeline_scheduler"] == ["seqpipe", "1f1b"]
    assert "that of the file seqpipe" in assumptions(search, None)[1]
    assert all(each["pipeline_scheduler"] == "1f1b" for each in found["best"])


def test_slices_shorten_the_bubble_and_keep_fewer_activations() -> None:
    whole, cut = (file_of(configuration("seqpipe", slices=number)) for number in (1, 4))
    assert whole.time is not None and cut.time is not None
    assert "seqpipe x 4 slices" in cut.layout.text
    assert cut.time.waiting < whole.time.waiting
    # Each slice is a pass with overhead of its own; bytes are the same.
    overheads = [each.time.classes["layer_overhead"] for each in (whole, cut) if each.time is not None]
    assert overheads[1] > 3 * overheads[0]
    assert cut.time.sent_bytes == pytest.approx(whole.time.sent_bytes, rel=FLOAT64_SUMS)
    assert cut.memory["activations"] < whole.memory["activations"]
    assert cut.memory["weights"] == whole.memory["weights"]
    search, result = searched(configuration("seqpipe", slices=4))
    assert "seq_split_num 4 is estimated as MindSpore Transformers runs it" in result_dict(
        search, result, search.config, None
    )["schedule"]


def test_turns_of_seqvpp_keep_fewer_slices_than_those_of_seqpipe() -> None:
    rows = {name: file_of(configuration(name, 2, slices=4)) for name in ("seqpipe", "seqvpp", "seqsmartvpp")}
    needed = [rows[name].memory_bytes for name in ("seqpipe", "seqvpp", "seqsmartvpp")]
    assert needed[0] > needed[1] > needed[2]
    seconds = {name: row.seconds for name, row in rows.items()}
    assert seconds["seqsmartvpp"] >= seconds["seqvpp"]


def test_caches_have_keys_and_values_of_whole_sequences() -> None:
    """By hand: 2 heads of 64 keys and 64 values in bfloat16 of 8192 tokens, of which a slice has 2048."""
    settings = configuration("seqpipe").decoder
    assert attention_spec(settings).kv_heads * attention_spec(settings).head_size == 128
    caches = _cache_bytes(settings, tokens=2048, slices=4, width=2, share=1)
    sequence = 8192 * 128 * 2  # keys, or values
    assert caches.of_layer == 4 * sequence  # and their gradients
    assert caches.of_layer_and_pass == 2 * sequence * 3 // 4  # beside those of the slice
    assert caches.of_pass == sequence


def test_a_schedule_that_its_mode_does_not_have_has_no_row() -> None:
    search, result = searched(configuration("seqpipe", 2, mode=0))
    assert result.file is None and search.other_schedule == "seqpipe"
    search = open_search(configuration("seqvpp", 2, slices=3), world_of(8), "Ascend")
    assert search.other_schedule == "seqvpp"  # its stages may wait for each other for ever


def test_what_a_run_of_the_file_refuses_is_said() -> None:
    config = configuration("seqvpp")
    search, result = searched(config)
    place = result_dict(search, result, config, None)["file"]["place"]
    assert "a run refuses it: parallel.pipeline_config.pipeline_scheduler needs several model chunks" in place


def test_where_only_the_sliced_layout_of_a_file_fits_the_error_says_so() -> None:
    search = open_search(configuration("seqpipe", slices=4), world_of(8), "Ascend")
    layout = file_layout(search.configs.unchanged, search.world)
    result = SearchResult(search.configs, search.world, search.limit_bytes)
    result.refused.append(Candidate(layout._replace(slices=1, schedule="1f1b"), {"total": 70 << 30}))
    result.file = Candidate(layout, {"total": 50 << 30})
    text = str(search.nothing_fits(result))
    assert "no layout on 8 ranks fits into 60.0 GiB; the smallest (dp 2 pp 4, optimizer none" in text
    assert "that of the file itself (dp 2 pp 4 seqpipe x 4 slices) needs 50.0 GiB" in text
