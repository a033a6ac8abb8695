"""Parts of arrays: which numbers they are, how they are read and written, and how initial weights are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import safetensors.numpy
from golden_files import load_model_case
from test_expert_names import fused, golden
from test_joined_names import as_chatglm
from test_joined_names import golden as golden_of_family

from trainer.checkpoint.tensor_names import disk_slices, to_disk
from trainer.checkpoint.weights import CheckedWeights, fitting_weights, read_weights
from trainer.config.schema.model import ModelConfig
from trainer.errors import UserError
from trainer.models.spec import init
from trainer.models.spec.init import initial_value
from trainer.models.spec.model import Init, ParameterSpec
from trainer.models.spec.shapes import parameter_shapes
from trainer.parallel.sharding import Shard, ShardedArray, ShardSpec, full_shard_spec
from trainer.storage import tensor_file
from trainer.storage.bfloat16 import as_bfloat16
from trainer.storage.tensor_file import (
    LazyArray,
    TensorInfo,
    concatenate_arrays,
    create_tensor_file,
    float32_infos,
    read_shard,
    stack_arrays,
    write_shards,
    write_tensors,
)

SHAPES = [(), (1,), (7,), (5, 6), (6, 1), (3, 4, 5), (4, 3, 2, 5)]


def parts_of(shape: tuple[int, ...], seed: int = 0, count: int = 12) -> Iterator[ShardSpec]:
    """Shards and ranges of them, drawn at random; the first is all of the array."""
    draw = np.random.default_rng(seed)
    yield full_shard_spec(shape)
    for number in range(count):
        ends = [sorted(draw.integers(0, size + 1, 2)) for size in shape]
        ends = [[int(low), int(high) + (low == high and high < size)] for (low, high), size in
                zip(ends, shape, strict=True)]  # fmt: skip
        shard = Shard(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
        part = ShardSpec(shape, shard)
        low, high = sorted(map(int, draw.integers(0, part.size + 1, 2)))
        yield part if number % 2 else part._replace(flat_range=slice(low, high))


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def right(array: np.ndarray, part: ShardSpec) -> np.ndarray:
    own = array[part.shard.slices]
    return own if part.flat_range is None else own.reshape(-1)[part.flat_range]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_read_from_a_file_and_written_to_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(tensor_file, "_SPAN_BYTES", 64)  # so that scattered numbers take several reads
    before, array, path = numbers((3,)), numbers(shape), tmp_path / "x.safetensors"
    entries = float32_infos({"a": (3,), "b": shape})
    write_tensors(path, entries, [before, array])
    whole = path.read_bytes()
    stored = tensor_file.TensorFile(path).tensor("b")
    for part in parts_of(shape):
        found = stored.read(part)
        assert found.shape == part.shape
        np.testing.assert_array_equal(found, right(array, part))
        np.testing.assert_array_equal(read_shard(array, part), found)
        create_tensor_file(path, entries)
        write_shards(path, entries, {"b": [ShardedArray(part, found)]})
        again = safetensors.numpy.load_file(path)["b"]
        np.testing.assert_array_equal(right(again, part), found)
        assert np.count_nonzero(again) == np.count_nonzero(found)
        write_tensors(path, entries, [before, array])
        assert path.read_bytes() == whole


def test_what_is_made_of_stored_arrays_is_read_part_by_part() -> None:
    rows = [numbers((4, 5)) + number for number in range(3)]
    read: list[int] = []

    def stored(array: np.ndarray) -> LazyArray:
        return LazyArray(array.shape, lambda part: read.append(part.size) or read_shard(array, part))

    made = {
        "slices": (stored(rows[0])[1:4, 2:], rows[0][1:4, 2:]),
        "stacked": (stack_arrays([stored(row) for row in rows]), np.stack(rows)),
        "concatenated": (concatenate_arrays([stored(row) for row in rows]), np.concatenate(rows)),
        "steps": (stored(rows[0])[1::2, ::3], rows[0][1::2, ::3]),
        "both": (stack_arrays([stored(row) for row in rows])[:, 1:3], np.stack(rows)[:, 1:3]),
    }
    for name, (found, expected) in made.items():
        assert found.shape == expected.shape and found.ndim == expected.ndim
        np.testing.assert_array_equal(np.asarray(found), expected, name)
        assert np.asarray(found).dtype == np.float32
        for part in parts_of(expected.shape):
            read.clear()
            np.testing.assert_array_equal(found.read(part), right(expected, part), name)
            assert sum(read) == part.size or name == "steps"


@pytest.mark.parametrize("kind", get_args(Init))
def test_a_part_of_the_initial_weights_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, kind: Init) -> None:
    settings = golden("experts_mixtral")[1]
    spec = ParameterSpec("model.layers.0.mlp.up_proj.weight", (9,) if kind == "ones" else (6, 5, 7), init=kind)
    whole = initial_value(spec, settings, 3)
    monkeypatch.setattr(init, "_BLOCK", 11)
    for part in parts_of(spec.shape):
        np.testing.assert_array_equal(initial_value(spec, settings, 3, part), right(whole, part))


def forms(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray], ModelConfig, str]]:
    """Files of every form: name, tensors, settings, class."""
    for case in ("experts_mixtral", "experts_glm4_moe", "mtp_2"):
        weights, settings = golden(case)
        yield case, weights, settings, "MixtralForCausalLM" if case == "experts_mixtral" else "Qwen3MoeForCausalLM"
        yield f"{case}, fused", fused(weights, settings), settings, ""
    for case in ("model_glm", "experts_qwen2_moe", "family_granitemoeshared"):
        weights, settings, kind = golden_of_family(case, folder)
        yield case, weights, settings, kind
    weights = dict(load_model_case("model_glm").weights)
    settings = golden_of_family("model_glm", folder)[1]
    separate = fitting_weights(weights, settings, Path("file"))
    yield "chatglm", as_chatglm(separate, joined=True), settings, ""


def test_a_rank_reads_its_part_of_each_form_and_writes_it(tmp_path: Path) -> None:
    for form in forms(tmp_path):
        assert_form(tmp_path, *form)


def assert_form(folder: Path, name: str, weights: dict[str, np.ndarray], settings: ModelConfig, kind: str) -> None:
    entries = {key: TensorInfo("BF16", array.shape, 2 * array.size) for key, array in weights.items()}
    write_tensors(folder / "model.safetensors", entries, map(as_bfloat16, weights.values()))
    whole = fitting_weights(read_weights(folder), settings, Path(name))
    shapes = {key: array.shape for key, array in whole.items()}
    assert shapes == parameter_shapes(settings)
    every = {key: list(parts_of(array.shape, seed, 3))[1:] for seed, (key, array) in enumerate(whole.items())}
    for number in range(3):
        parts = {key: found[number] for key, found in every.items()}
        skipped = parts.popitem()[0]
        read = fitting_weights(read_weights(folder), settings, Path(name), parts=parts)
        assert read.keys() == parts.keys() and skipped not in read
        for key, array in read.items():
            assert array.flags.c_contiguous and array.dtype == np.float32
            np.testing.assert_array_equal(array, right(whole[key], parts[key]), f"{name}: {key}")
        if kind:
            on_disk = to_disk(whole, kind)
            for tensor, pieces in disk_slices(parts, shapes, kind).items():
                for one, own, part in pieces:
                    found = read[one].reshape(-1)[own]
                    np.testing.assert_array_equal(found, right(on_disk[tensor], part).reshape(-1), f"{name}: {tensor}")


def test_the_tensor_that_is_not_finite_is_named_whatever_part_is_read() -> None:
    good, bad = numbers((4, 3)), numbers((4, 3))
    bad[3, 1] = np.nan
    arrays = {"stack": np.stack([good, bad])}
    weights = CheckedWeights(arrays, {"first": good, "second": bad}, Path("file"), "", "load_checkpoint")
    upper = ShardSpec((2, 4, 3), Shard((0, 0, 0), (2, 2, 3)))
    assert weights.read({"stack": upper})["stack"].shape == (2, 2, 3)
    for parts in (None, {"stack": upper._replace(shard=Shard((0, 2, 0), (2, 2, 3)))}):
        with pytest.raises(Exception, match="not finite: second has NaN"):
            weights.read(parts)


def test_a_folder_of_hugging_face_without_weights_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="the folder of Hugging Face has no weights: no \\*.safetensors"):
        read_weights(tmp_path)
