"""Data sets (YAML ``train_dataset`` and ``eval_dataset``)."""

# No `from __future__ import annotations`: pydantic would have to compile every annotation's text at start-up.
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer.config.schema.fields import REQUIRED, Section, ignored, section, setting

_MEANWHILE = "use TextDataset, JsonlDataset or SyntheticDataset"
_ROWS_ARE_MADE_HERE = "rows are made by the data set itself"
_ONE_THREAD = "micro-batches are prepared by one background thread of this process"


class _Loader(Section):
    """What all data loaders share."""

    default_type: ClassVar[str] = "TextDataset"

    dataset_dir: str = setting(
        "",
        'A file, a folder, or "stdlib" (the standard library of this Python). Default empty: none.',
        aliases=("dataset_path",),
    )
    shuffle: bool = setting(True, "Another order of rows each epoch, from the seed. Default True.")
    num_samples: int | None = setting(None, "At most so many rows. Default null: all.", ge=1)
    patterns: list[str] = setting(["*.txt", "*.md", "*.py"], "Which files of a folder count.", min_length=1)


class TextLoader(_Loader):
    """Plain text: a file is a document."""

    type: Literal["TextDataset"] = setting("TextDataset", "Kind of data.")


class JsonlLoader(_Loader):
    """JSON lines: a line is a document (``text``), a dialogue (``messages``) or an instruction (Alpaca's fields)."""

    type: Literal["JsonlDataset"] = setting(REQUIRED, "Kind of data.")
    patterns: list[str] = setting(["*.jsonl"], "Which files of a folder count.", min_length=1)


class SyntheticLoader(_Loader):
    """Random tokens, for benchmarks."""

    type: Literal["SyntheticDataset"] = setting(REQUIRED, "Kind of data.")


class MnistLoader(_Loader):
    """Images of digits in the files of MNIST, for an MlpClassifier."""

    type: Literal["MnistDataset"] = setting(REQUIRED, "Kind of data.")
    dataset_dir: str = setting(
        "",
        "Folder of the files. Default empty: the folder in the environment variable DATA_PATH.",
        aliases=("dataset_path",),
    )
    usage: Literal["train", "test", "all"] | None = setting(
        None, "Which images. Default null: train in train_dataset, test in eval_dataset."
    )


class MindLoader(_Loader):
    """MindRecord files."""

    support = "not_yet"
    support_reason = f"MindRecord files cannot be read; {_MEANWHILE}"

    type: Literal["MindDataset"] = setting(REQUIRED, "Kind of data.")
    dataset_files: list[str] | str | None = setting(None, "The files. Default null: dataset_dir.")


class MegatronLoader(_Loader):
    """Megatron's indexed token files."""

    support = "not_yet"
    support_reason = f"Megatron's token files cannot be read; {_MEANWHILE}"

    type: Literal["BlendedMegatronDatasetDataLoader"] = setting(REQUIRED, "Kind of data.")
    datasets_type: str = setting("GPTDataset", "Kind of rows.")
    sizes: list[int] | None = setting(None, "Rows of training, validation and test.")
    config: dict[str, Any] | None = setting(None, "Megatron's own settings: seq_length, data_path, split and others.")


class HuggingFaceLoader(_Loader):
    """Data sets of the Hugging Face hub or their local copies."""

    support = "not_yet"
    support_reason = f"Hugging Face data sets cannot be read; {_MEANWHILE}"

    type: Literal["HFDataLoader", "CommonDataLoader", "ADGenDataLoader", "SFTDataLoader"] = setting(
        REQUIRED, "Kind of data."
    )
    load_func: str | None = setting(None, "How the hub's library opens it.")
    path: str | None = setting(None, "Name or folder of the data set.")
    data_dir: str | None = setting(None, "Folder of its files.")
    data_files: list[str] | str | dict[str, Any] | None = setting(None, "Its files.")
    name: str | None = setting(None, "Its part.")
    split: str | None = setting(None, "Its split.")
    handler: list[dict[str, Any]] | dict[str, Any] | None = setting(None, "What is done to each sample.")
    packing: str | None = setting(None, "How samples are packed into rows.")
    create_attention_mask: bool = setting(False, "Hand out a mask.")
    create_compressed_eod_mask: bool = setting(False, "Hand out a compressed mask.")
    compressed_eod_mask_length: int | None = setting(None, "Its length.")
    compressed_eod_mask: bool = setting(False, "Hand out a compressed mask.")
    adaptor_config: dict[str, Any] | None = setting(None, "Shapes of a packed row.")
    use_broadcast_data: bool = setting(True, "One rank reads for all.")
    phase: str | None = setting(None, "Training or evaluation.")
    version: str | int | None = setting(None, "Version of the data set.")
    tokenizer: dict[str, Any] | None = setting(None, "Tokenizer of this loader.")
    max_length: int | None = setting(None, "Longest sample in tokens.")
    input_columns: list[str] | None = setting(None, "Columns to read.")


DataLoader = Annotated[
    TextLoader | JsonlLoader | SyntheticLoader | MnistLoader | MindLoader | MegatronLoader | HuggingFaceLoader,
    Field(discriminator="type"),
]


class TokenizerConfig(Section):
    """Text to tokens (YAML ``train_dataset.tokenizer``)."""

    type: Literal["bytes", "huggingface"] = setting("bytes", "bytes: one token a byte; huggingface: a tokenizer.json.")
    path: str = setting("", "huggingface: the tokenizer.json or its folder.")


class DatasetConfig(Section):
    """A data set (YAML ``train_dataset``, ``eval_dataset``)."""

    data_loader: DataLoader = Field(default_factory=TextLoader, description="Where the data comes from.")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "Text to tokens.")
    held_out: float = setting(
        0.0,
        "Fraction of documents kept out of training, for evaluation when eval_dataset is absent. Default 0.",
        ge=0,
        lt=1,
    )
    drop_remainder: bool = setting(True, "Leave out the last, smaller batch of an epoch. Default True.")
    num_parallel_workers: int = ignored(8, "Threads of the data pipeline.", _ONE_THREAD, ge=1)
    prefetch_size: int = setting(2, "Micro-batches prepared ahead. Default 2.", ge=1)
    batch_size: int | None = setting(
        None, "eval_dataset: rows of a batch. Default null: runner_config.batch_size.", ge=1
    )
    max_batches: int = setting(0, "eval_dataset: micro-batches an evaluation reads. Default 0: all.", ge=0)
    cache_dir: str | None = setting(
        None, "Folder of the token files that are built once. Default null: ~/.cache/run_trainer/tokens."
    )
    seed: int | None = ignored(None, "Seed of the data set.", "the order follows the top-level seed")
    input_columns: list[str] | None = ignored(None, "Columns of a row.", _ROWS_ARE_MADE_HERE)
    output_columns: list[str] | None = ignored(None, "Columns of a row.", _ROWS_ARE_MADE_HERE)
    construct_args_key: list[str] | None = ignored(None, "Columns the model takes.", _ROWS_ARE_MADE_HERE)
    repeat: int = ignored(1, "How often an epoch repeats.", "runner_config.epochs says how often", ge=1)
    do_eval: bool = ignored(False, "This is for evaluation.", "eval_dataset always is")
    auto_tune: bool = ignored(False, "Tune the pipeline.", _ONE_THREAD)
    filepath_prefix: str = ignored("", "File of such tuning.", _ONE_THREAD)
    autotune_per_step: int = ignored(10, "Steps of such tuning.", _ONE_THREAD)
    profile: bool = ignored(False, "Time the pipeline.", _ONE_THREAD)
    numa_enable: bool = ignored(False, "Bind to a NUMA node.", _ONE_THREAD)
    python_multiprocessing: bool = ignored(False, "Processes instead of threads.", _ONE_THREAD)
    eod_reset: bool = ignored(False, "Keep packed documents apart.", "packed documents are always kept apart")
    eod_token_id: int | None = ignored(None, "Token that ends a document.", "the tokenizer's end token does")
    dynamic_batch: bool = ignored(False, "Rows of changing length.", "rows always have seq_length tokens")
    divisor: int | None = ignored(None, "Rows of changing length.", "rows always have seq_length tokens")
    remainder: int | None = ignored(None, "Rows of changing length.", "rows always have seq_length tokens")
    broadcast_data: bool = ignored(
        False, "One rank reads for all.", "every rank reads rows of its own", aliases=("use_broadcast_data",)
    )
    token_monitor: bool = ignored(False, "Record tokens.", "metrics.jsonl counts tokens")
    token_monitor_config: dict[str, Any] | None = ignored(None, "Record tokens.", "metrics.jsonl counts tokens")
    max_length: int | None = ignored(None, "Tokens in a row.", "model_config.seq_length says how long rows are")
    ignore_token_id: int | None = ignored(None, "Label without loss.", "labels without loss are always -100")
    text_transforms: dict[str, Any] | None = ignored(None, "Changes to text.", _ROWS_ARE_MADE_HERE)
    shuffle: bool | None = ignored(None, "Another order each epoch.", "data_loader.shuffle decides")
    type: str | None = ignored(None, "MindSpore Transformers' class.", _ROWS_ARE_MADE_HERE)


class DatasetTask(Section):
    """MindSpore Transformers' wrapping of a data set (YAML ``train_dataset_task``), which ``dataset_config`` is."""

    type: str | dict[str, Any] | None = ignored(
        "CausalLanguageModelDataset", "MindSpore Transformers' class.", "the data set's loader says what it is"
    )
