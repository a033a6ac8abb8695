"""Files of images and labels: what is read, and what is said about missing, damaged and other files."""

from __future__ import annotations

import gzip
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from config_helpers import failure, load
from data_helpers import idx, write_set

from trainer.config import Config
from trainer.config.schema.images import IMAGES
from trainer.data import build_datasets
from trainer.data.batches.batch import IGNORE_INDEX
from trainer.data.batches.loader import eval_batches, training_batches
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[3]
IMAGE_FILE, LABEL_FILE = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGE_FILE = "t10k-images-idx3-ubyte"


def config_of(folder: Path | str, *pairs: str) -> Config:
    text = "model: {arch: {type: MlpClassifier}, classifier: {pixels: 16, hidden_sizes: [8]}}\n"
    text += f"train_dataset: {{data_loader: {{type: {IMAGES}, dataset_dir: '{folder}', shuffle: False}}}}\n"
    text += f"eval_dataset: {{data_loader: {{type: {IMAGES}, dataset_dir: '{folder}'}}}}\n"
    return load(text, "runner_config.batch_size=5", "do_eval=True", *pairs)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_set(tmp_path / "set")


def test_a_row_is_an_image(files: Path) -> None:
    train, evaluation = build_datasets(config_of(files))
    assert (train.num_sequences, evaluation.num_sequences) == (12, 5)
    batch = train.batch([11, 3])
    assert batch.pixels.dtype == np.uint8 and batch.pixels.tolist() == [[11] * 16, [3] * 16]
    assert batch.labels.dtype == np.int32 and batch.labels.tolist() == [1, 3]


def test_the_plan_counts_them(files: Path) -> None:
    plan = build_plan(config_of(files, "do_eval=True"))
    assert (plan.data.rows, plan.data.eval_rows) == (12, 5)
    assert build_plan(config_of(files, "train_dataset.data_loader.num_samples=7")).data.rows == 7


@pytest.mark.parametrize(("usage", "rows"), [("train", 12), ("test", 5), ("all", 17)])
def test_usage(files: Path, usage: str, rows: int) -> None:
    config = config_of(files, f"train_dataset.data_loader.usage={usage}")
    assert build_datasets(config)[0].num_sequences == rows


def test_a_last_batch_is_filled_up(files: Path) -> None:
    config = config_of(files, "train_dataset.drop_remainder=False")
    ranks = [training_batches(config, (rank, 2), lambda *_: None, print).loader for rank in range(2)]
    labels = [[batch.labels.tolist() for batch in loader.epoch(0)] for loader in ranks]
    assert labels[0] == [[0, 1, 2, 3, 4], [0, 1, *[IGNORE_INDEX] * 3]]
    assert labels[1] == [[5, 6, 7, 8, 9], [IGNORE_INDEX] * 5]


def test_gzip_and_other_names_and_folders(files: Path, tmp_path: Path) -> None:
    """torchvision gzips, some copies write a dot, and MindSpore's tutorial keeps train and test in folders."""
    other = tmp_path / "other"
    for name in sorted(path.name for path in files.iterdir()):
        folder = other / ("train" if name.startswith("train") else "test")
        folder.mkdir(parents=True, exist_ok=True)
        data = (files / name).read_bytes()
        if "images" in name:
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / name.replace("-idx", ".idx")).write_bytes(data)
    plain = build_datasets(config_of(files))
    for folder in (other, other / "train"):
        for left, right in zip(plain, build_datasets(config_of(folder)), strict=True):
            assert left.content == right.content
            assert np.array_equal(left.batch([0, 4]).pixels, right.batch([0, 4]).pixels)


def test_the_environment_names_the_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", str(files))
    assert build_datasets(config_of(""))[0].num_sequences == 12
    eval_batches(config_of("", "run_mode=eval"), (0, 1), lambda *_: None, print)
    (files / IMAGE_FILE).unlink()
    assert failure(lambda: build_datasets(config_of(""))).startswith(f"environment: DATA_PATH = '{files}': ")


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def zipped_and_cut(folder: Path) -> None:
    data = gzip.compress((folder / IMAGE_FILE).read_bytes())
    (folder / IMAGE_FILE).write_bytes(data[:-12])


def swapped(folder: Path) -> None:
    (folder / IMAGE_FILE).write_bytes((folder / LABEL_FILE).read_bytes())


def other_count(folder: Path) -> None:
    (folder / LABEL_FILE).write_bytes(idx(2049, np.zeros(11, np.uint8)))


def other_label(folder: Path) -> None:
    (folder / LABEL_FILE).write_bytes(idx(2049, np.full(12, 10, np.uint8)))


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing": (lambda folder: (folder / IMAGE_FILE).unlink(), [f"has neither {IMAGE_FILE} nor", "make_digits.py"]),
    "test missing": (lambda folder: (folder / TEST_IMAGE_FILE).unlink(), ["eval_dataset.data_loader", TEST_IMAGE_FILE]),
    "truncated": (cut(IMAGE_FILE, 100), ["it is cut short: 12 x 4 x 4 take 208 bytes, and it has 100", "copy"]),
    "header": (cut(LABEL_FILE, 6), [LABEL_FILE, "ends within its header of 8 bytes"]),
    "empty": (cut(LABEL_FILE, 0), [LABEL_FILE, "0 bytes are too few for an idx file of labels"]),
    "too long": (
        lambda folder: (folder / LABEL_FILE).write_bytes((folder / LABEL_FILE).read_bytes() + b"x"),
        ["it is too long: 12 take 20 bytes, and it has 21"],
    ),
    "gzip cut": (zipped_and_cut, [IMAGE_FILE, "cut short or damaged"]),
    "swapped": (swapped, [IMAGE_FILE, "number of a file of labels (2049), and images have 2051"]),
    "a text": (lambda folder: (folder / IMAGE_FILE).write_text("<html>"), ["not an idx file, and images have 2051"]),
    "nothing in it": (
        lambda folder: (folder / LABEL_FILE).write_bytes(idx(2049, np.zeros(0, np.uint8))), ["says 0: there is nothing"]
    ),
    "other count": (other_count, ["has 12 images, and train-labels-idx1-ubyte 11 labels"]),
    "other label": (other_label, ["has the label 10, and the classes are 0 to 9", "classifier.classes to 11"]),
    "other size": (
        lambda folder: write_set(folder, side=5), ["images are 5 x 5, and the classifier takes 16", "pixels to 25"]
    ),
    "a folder gone": (lambda folder: folder.rename(folder.with_name("x")), ["is not a folder", "make_digits.py"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported(files: Path, damage: str) -> None:
    break_it, words = DAMAGES[damage]
    break_it(files)
    message = failure(lambda: build_datasets(config_of(files)))
    assert message.startswith("a.yaml:") and "\n  Fix: " in message and f"dataset_dir = '{files}'" in message
    for word in words:
        assert word in message, message


def test_too_few_images_and_no_folder_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = failure(lambda: build_plan(config_of(files, "runner_config.batch_size=13")))
    assert "train_dataset has 12 images, fewer than one batch" in message
    monkeypatch.delenv("DATA_PATH", raising=False)
    message = failure(lambda: build_datasets(config_of("")))
    assert "needs the folder with its files" in message and "environment variable DATA_PATH" in message


# ---- the classifier's rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["model.model_config.seq_length=128"], ["model.model_config", "does not apply to MlpClassifier", "remove"]),
        (["model.model_config.pet_config.lora_rank=4"], ["model.model_config", "does not apply to MlpClassifier"]),
        (["recompute_config.recompute=True"], ["recompute_config", "does not apply to MlpClassifier"]),
        (["recompute=True"], ["recompute", "does not apply to MlpClassifier"]),
        (["train_dataset.tokenizer.type=huggingface"], ["train_dataset.tokenizer", "does not apply to MlpClassifier"]),
        (["loss.type=dpo"], ["loss", "does not apply to MlpClassifier"]),
        (["run_mode=eval", "lm_eval.tasks=arc_easy"], ["lm_eval.tasks", "asks a language model"]),
        (["run_mode=predict"], ["run_mode = 'predict'", "generates no text", "--run_mode eval"]),
        (["amp_level=O2"], ["amp_level = 'O2'", "float32"]),
        (["train_dataset.held_out=0.1"], ["held_out", "not supported for images", "eval_dataset"]),
        (["train_dataset.data_loader.type=SyntheticDataset"], ["takes images", f"write {IMAGES}"]),
        (["model.arch.type=LlamaForCausalLM"], ["only an MlpClassifier has it", "takes text, not images"]),
    ],
)
def test_what_a_classifier_has_not(files: Path, pairs: list[str], words: list[str]) -> None:
    message = failure(lambda: config_of(files, *pairs))
    for word in words:
        assert word in message, message


# ---- the digits that are drawn ---------------------------------------------------------------------------------------


def test_drawn_digits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("make_digits", REPOSITORY / "scripts" / "make_digits.py")
    make_digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_digits)
    for name, more in (("a", []), ("b", []), ("zipped", ["--gzip"]), ("other", ["--seed", "2"])):
        assert make_digits.main([str(tmp_path / name), "--train", "300", "--test", "40", *more]) == 0
    assert "300 images to train on, 40 to test with" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(names) == 4
    for name in names:
        data = (tmp_path / "a" / name).read_bytes()
        assert (tmp_path / "b" / name).read_bytes() == data
        assert (tmp_path / "other" / name).read_bytes() != data
        assert gzip.decompress((tmp_path / "zipped" / f"{name}.gz").read_bytes()) == data
    config = config_of(tmp_path / "zipped", "model.classifier.pixels=784")
    train, test = build_datasets(config)
    batch = train.batch(np.arange(300))
    assert np.bincount(batch.labels, minlength=10).min() > 10
    assert 0.05 < batch.pixels.mean() / 255 < 0.3  # ink on black, about as much as written digits have
    # An image is nearer to the mean of its own digit than to those of others, mostly; other images than in the test.
    means = np.stack([batch.pixels[batch.labels == digit].mean(0) for digit in range(10)])
    shown = test.batch(np.arange(40))
    nearest = ((shown.pixels[:, None] - means[None]) ** 2).sum(-1).argmin(-1)
    assert (nearest == shown.labels).mean() > 0.5
    assert not (shown.pixels[:, None] == batch.pixels[None, :40]).all(-1).any()


NAMES = re.compile(r"mnist|mlpclassifier|classifierconfig|(models?\.|config\.|images import )classifier", re.I)


def test_few_files_name_it() -> None:
    """The others ask what any model answers: `Config.is_decoder`, `Config.network`."""
    folders = [REPOSITORY / name for name in ("trainer", "configs", "scripts", "tests")]
    files = (file for folder in folders for file in folder.rglob("*.*"))
    named = [str(file) for file in files if file.suffix in (".py", ".yaml", ".sh") and NAMES.search(file.read_text())]
    assert len(named) == 12, named
