"""Several sources as one data set: shares by weight, passes of their own, exact after resuming."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from data_helpers import jsonl, line_of, make_config

from trainer.data.batches.blend import BlendedDataset, largest_remainders
from trainer.data.batches.loader import BatchLoader, epoch_order
from trainer.data.datasets import build_datasets, build_eval_dataset
from trainer.data.source.synthetic import SyntheticDataset
from trainer.errors import UserError

SIZES, WEIGHTS = (30, 7, 13), (1.0, 2.0, 0.5)


def blended(weights=WEIGHTS, limit=None) -> BlendedDataset:
    parts = [SyntheticDataset(size, 6, 100, seed=1, first=100 * number) for number, size in enumerate(SIZES)]
    return BlendedDataset(parts, ["a", "b", "c"], weights, limit)


def loader_of(dataset, **changes) -> BatchLoader:
    settings = {"batch_size": 4, "shuffle": True, "seed": 3, "drop_remainder": True, "prefetch_size": 2, **changes}
    return BatchLoader(dataset, **settings)


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        ((1, 1), 10, [5, 5]),
        ((1, 1, 1), 10, [4, 3, 3]),
        ((0.7, 0.2, 0.1), 11, [8, 2, 1]),
        ((3,), 7, [7]),
        ((1000, 1), 10, [10, 0]),
    ],
)
def test_largest_remainders(weights, total, counts):
    assert largest_remainders(weights, total) == counts


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_and_are_off_by_less_than_one(seed):
    random = np.random.default_rng(seed)
    weights, total = random.random(int(random.integers(1, 9))).tolist(), int(random.integers(1, 1000))
    counts = largest_remainders(weights, total)
    assert sum(counts) == total
    assert all(abs(n - total * w / sum(weights)) < 1 for n, w in zip(counts, weights, strict=True))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sequence_comes_again_only_after_all_others_of_its_source(shuffle):
    dataset = blended()
    assert dataset.num_sequences == 50
    assert [share.epoch_sequences for share in dataset.shares] == [14, 29, 7]
    epochs = [epoch_order(dataset, shuffle=shuffle, seed=5, epoch=epoch).tolist() for epoch in range(13)]
    starts = np.cumsum([0, *SIZES])
    for source, (size, share) in enumerate(zip(SIZES, dataset.shares, strict=True)):
        mine = [[row - starts[source] for row in rows if starts[source] <= row < starts[source + 1]] for rows in epochs]
        assert {len(rows) for rows in mine} == {share.epoch_sequences}
        stream = sum(mine, [])
        passes = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert all(sorted(rows) == list(range(size)) for rows in passes[:-1])
        assert len(set(passes[-1])) == len(passes[-1])
        assert all((rows == sorted(rows)) != shuffle for rows in passes[:-1])


def test_sources_alternate_and_every_epoch_and_seed_differ():
    dataset = blended()
    orders = {str(epoch_order(dataset, shuffle=True, seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in range(4)}
    assert len(orders) == 8
    order = epoch_order(dataset, shuffle=False, seed=1, epoch=0)
    changes = (np.diff(np.searchsorted(np.cumsum(SIZES), order, side="right")) != 0).sum()
    assert changes > 15, "not one source after the other"


def test_resuming_gives_the_same_batches_on_any_number_of_ranks():
    whole = [batch.input_ids.tolist() for batch in loader_of(blended()).epoch(3)]
    assert [batch.input_ids.tolist() for batch in loader_of(blended()).epoch(3, 5)] == whole[5:]
    halves = [loader_of(blended(), batch_size=2, ranks=2, rank=rank).epoch(3) for rank in (0, 1)]
    assert [[*a.input_ids.tolist(), *b.input_ids.tolist()] for a, b in zip(*halves, strict=True)] == whole


def test_a_batch_holds_the_sequences_of_all_sources_in_the_requested_order():
    dataset = blended()
    parts = [SyntheticDataset(size, 6, 100, seed=1, first=100 * number) for number, size in enumerate(SIZES)]
    every = np.concatenate([part.batch(range(part.num_sequences)).input_ids for part in parts])
    order = np.random.default_rng(1).permutation(50)
    batch = dataset.batch(order)
    assert (batch.input_ids == every[order]).all()
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in batch)
    with pytest.raises(IndexError):
        dataset.batch([50])


def test_num_samples_limits_the_epoch_and_not_the_sources():
    dataset = blended(limit=10)
    assert dataset.num_sequences == 10 and [share.epoch_sequences for share in dataset.shares] == [3, 6, 1]
    rows = Counter(row for epoch in range(10) for row in epoch_order(dataset, shuffle=True, seed=1, epoch=epoch))
    assert sum(rows[row] for row in range(30)) == 30 and all(rows[row] == 1 for row in range(30))


def test_an_evaluation_reads_every_sequence_once():
    dataset = blended(weights=None)
    batches = list(loader_of(dataset, shuffle=False, drop_remainder=False).epoch(2))
    found = np.concatenate([batch.input_ids for batch in batches])[:50]
    assert (found == dataset.batch(range(50)).input_ids).all()


def test_weights_and_sources_are_part_of_the_content():
    assert blended().content == blended().content != blended((1.0, 2.0, 0.6)).content


# From the configuration


def sources_of(folder, weights=(3.0, 1.0), sizes=(20, 10)) -> dict:
    sources = []
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        records = [{"instruction": "a" * (place % 7 + 1), "output": chr(97 + number) * 9} for place in range(size)]
        sources.append({"path": str(jsonl(folder / f"{number}.jsonl", *records)), "weight": weight})
    return {"type": "JsonlDataset", "dataset_dir": "", "sources": sources}


def config_of(folder, loader, **sections):
    return make_config(folder, loader=loader, model={"seq_length": 64}, **sections)


def test_sources_of_a_configuration(tmp_path):
    config = config_of(tmp_path, sources_of(tmp_path), train={"packing": "none", "held_out": 0.2})
    train, held_out = build_datasets(config)
    assert [share.sequences for share in train.shares] == [16, 8]
    assert [share.epoch_sequences for share in train.shares] == [18, 6] and train.num_sequences == 24
    assert train.packing.samples == 24 and held_out.num_sequences == held_out.packing.samples == 6
    evaluation = {"data_loader": sources_of(tmp_path), "packing": "none"}
    told: list[str] = []
    config = config_of(tmp_path, sources_of(tmp_path), eval_dataset=evaluation, run_mode="eval")
    assert build_eval_dataset(config, note=told.append).num_sequences == 30
    assert len(told) == 1 and "eval_dataset: source weights are ignored" in told[0]


def test_a_source_without_a_share_or_a_sequence_is_an_error(tmp_path):
    with pytest.raises(UserError, match="sources.1.weight = 0.001: this weight gives .* none of the 30 seq") as caught:
        build_datasets(config_of(tmp_path, sources_of(tmp_path, (3.0, 0.001)), train={"packing": "none"}))
    assert line_of(tmp_path, "0.001") in str(caught.value)
    with pytest.raises(UserError, match="1.jsonl.*the source does not fill one sequence of 64 tokens"):
        build_datasets(config_of(tmp_path, sources_of(tmp_path, sizes=(20, 1)), train={"packing": "cut"}))


def test_the_plan_shows_shares_and_passes(tmp_path):
    from trainer.plan.render import plan_dict, plan_text
    from trainer.run.prepare import build_plan

    plan = build_plan(config_of(tmp_path, sources_of(tmp_path), train={"packing": "none"}))
    assert [source["epoch_sequences"] for source in plan_dict(plan)["data"]["sources"]] == [23, 7]
    text = " ".join(plan_text(plan).split())
    assert "0.jsonl: weight 3, 23 sequences an epoch, 1.15 passes over its 20" in text
    assert "1.jsonl: weight 1, 7 sequences an epoch, 0.70 passes over its 10" in text
    plan = build_plan(config_of(tmp_path, sources_of(tmp_path, sizes=(3, 1)), train={"packing": "none"}))
    text = " ".join(plan_text(plan).split())
    assert "1.jsonl: weight 1, 1 sequence an epoch" in text and "of 1 sequence" in text and "1 sequences" not in text
