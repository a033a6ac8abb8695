"""Data sets (YAML ``train_dataset`` and ``eval_dataset``)."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from trainer.config.schema.fields import BATCH, COUNT, LENGTH, REQUIRED, TOKEN_ID, FilePath, Section, section, setting
from trainer.config.schema.images import ImagesType

_Field: TypeAlias = Literal[
    "messages", "conversations", "instruction", "input", "output", "history", "prompt", "completion", "text", "system",
    "tools", "chosen", "rejected", "label", "margin", "weight"]
WEIGHT = "weight"
"""The field of a record with the factor on the loss of its tokens, which is read if `columns` names its column."""
TRAIN = "train_dataset"
EVAL = "eval_dataset"
_MEANWHILE = "use TextDataset, JsonlDataset or SyntheticDataset"


class _Loader(Section):
    """The keys of all data loaders."""

    default_type: ClassVar[str] = "TextDataset"
    reads_text: ClassVar[bool] = True  # False if the files contain tokens or images, which are not tokenized
    reads_images: ClassVar[bool] = False

    dataset_dir: FilePath = setting(
        "", 'A file, a folder, or "stdlib" (the standard library of this Python). Default empty: none.',
        aliases="dataset_path")
    shuffle: bool = setting(True, "Another order of sequences each epoch, from the seed.")
    num_samples: int | None = setting(None, "Maximum number of sequences or images. Default null: all.", ge=1, le=COUNT)


class SourceItem(Section):
    """One of several sources (YAML ``data_loader.sources``)."""

    path: FilePath = setting(REQUIRED, "A file or a folder, as in dataset_dir.", min_length=1)
    weight: float = setting(
        1.0, "Share of the source in an epoch is weight divided by the sum of all weights.", gt=0,
        fix="give a weight above 0, or remove the source")


def _sources() -> Any:
    return setting(
        [], "Several files or folders with their weights, in place of dataset_dir. Default empty: dataset_dir alone.")


class TextLoader(_Loader):
    """Plain text; each file is a document."""

    type: Literal["TextDataset"] = setting("TextDataset", "Kind of data.")
    sources: list[SourceItem] = _sources()
    patterns: list[str] = setting(
        ["*.txt", "*.md", "*.py", "*.txt.gz", "*.md.gz", "*.txt.zst", "*.md.zst"], "Files of a folder to read.",
        min_length=1)


class _RecordLoader(_Loader):
    """The keys of loaders that read records."""

    patterns: list[str] = setting(
        [f"*{suffix}{compression}" for suffix in (".jsonl", ".json") for compression in ("", ".gz", ".zst")]
        + ["*.parquet", "*.arrow"], "Files of a folder to read.", min_length=1)
    columns: dict[_Field, str] = setting(
        {}, "Columns of the files with other names than the usual ones, as {messages: dialogue}; {weight: weight} names"
        " that of the weight of each record's loss. Default empty.")
    split: str = setting(
        "", "The split to read if a folder has several. Default empty: train, in eval_dataset validation or test.")
    bad_records: Literal["error", "skip"] = setting(
        "error", "error: the first bad record ends the run; skip: bad records are left out and counted. Default error.")


class JsonlLoader(_RecordLoader):
    """Records in JSON, parquet or arrow files: texts, conversations, instructions, prompts with completions."""

    type: Literal["JsonlDataset"] = setting(REQUIRED, "Kind of data.")
    sources: list[SourceItem] = _sources()


class SyntheticLoader(_Loader):
    """Random tokens, for benchmarks."""
    reads_text = False
    type: Literal["SyntheticDataset"] = setting(REQUIRED, "Kind of data.")


class ImageLoader(_Loader):
    """Images and their labels in idx files, for a model of images."""
    reads_text = False
    reads_images = True
    type: ImagesType = setting(REQUIRED, "Kind of data.")
    dataset_dir: FilePath = setting(
        "", "Folder of the files. Default empty: the folder in the environment variable DATA_PATH.",
        aliases="dataset_path")
    usage: Literal["train", "test", "all"] | None = setting(
        None, "Which images. Default null: train in train_dataset, test in eval_dataset.")


class MindLoader(_Loader):
    """MindRecord files of tokens."""
    reads_text = False
    type: Literal["MindDataset"] = setting(REQUIRED, "Kind of data.")
    dataset_dir: FilePath = setting(
        "", "A MindRecord file, together with all files that were written with it, or a folder, with its subfolders. "
        "Default empty: dataset_files.", aliases="dataset_path")
    dataset_files: list[FilePath] | FilePath | None = setting(
        None, "Instead of dataset_dir: one file or folder, or a list; each file of a list is read alone. Default null.")


_DataPath: TypeAlias = list[FilePath | int | float] | FilePath | None


class MegatronConfig(Section):
    """The configuration of Megatron-LM's GPTDataset (YAML ``data_loader.config``)."""

    data_path: _DataPath = setting(
        None, "Files by their common path without .bin and .idx: [path, path] or [weight, path, weight, path]. "
        "Default null: dataset_dir.")
    train_data_path: _DataPath = setting(
        None, "As data_path, for the training data only; replaces data_path and split. Default null: data_path.")
    valid_data_path: _DataPath = setting(
        None, "As data_path, for the validation data only. Default null: data_path.")
    test_data_path: _DataPath = setting(None, "As data_path, for the test data only. Default null: data_path.")
    split: str | None = setting(
        None, 'Shares of training, validation and test in the documents of data_path: "969, 30, 1". Default null: the '
        "section reads all.")
    seed: int = setting(1234, "Seed of the order of documents and samples.", ge=0, lt=2**32)
    seq_length: int | None = setting(
        None, "Tokens of a sample. Default null: model.model_config.seq_length, which it must equal.", ge=1, le=LENGTH)
    eod: int = setting(-1, "Token that ends a document, for the keys below. Default -1: none.", ge=-1, le=TOKEN_ID)
    pad: int = setting(
        -1, "Token that is padding: it has no loss, and the model sees token 0. Default -1: none.",
        ge=-TOKEN_ID, le=TOKEN_ID)
    eod_mask_loss: bool = setting(False, "No loss for what follows the token eod.")
    reset_position_ids: bool = setting(False, "Positions start at 0 after each token eod.")
    create_attention_mask: bool = setting(
        True, "Make the attention mask from the data, which reset_attention_mask needs; without it it is causal.")
    reset_attention_mask: bool = setting(False, "Documents that end with the token eod do not see each other.")
    create_compressed_eod_mask: bool = setting(False, "The same as reset_attention_mask, in another form on Ascend.")
    drop_last_partial_validation_sequence: bool = setting(
        True, "Validation: leave out the last, shorter sample instead of filling it up with padding.")
    add_extra_token_to_sequence: bool = setting(
        True, "Read seq_length + 1 tokens a sample; without it the last token has no label.")


class MegatronLoader(_Loader):
    """Megatron-LM's indexed token files, in Megatron-LM's order."""
    reads_text = False
    type: Literal["BlendedMegatronDatasetDataLoader"] = setting(REQUIRED, "Kind of data.")
    dataset_dir: FilePath = setting(
        "", "A single path without .bin and .idx, instead of config.data_path. Default empty: config.data_path.",
        aliases="dataset_path")
    shuffle: bool = setting(False, "Shuffle the samples again each epoch; their order is random without it.")
    sizes: list[Annotated[int, Field(ge=0, le=COUNT)] | None] = setting(
        [], "Samples of an epoch of training, validation and test; documents repeat if there are too few. Default "
        "empty, or null for one: as many as the documents fill once.", max_length=3)
    phase: Literal["train", "valid", "test"] | None = setting(
        None, "The part of split and sizes to read. Default null: train in train_dataset, else valid.")
    config: MegatronConfig = section(MegatronConfig, "Files and settings of the samples.")


class HuggingFaceLoader(_RecordLoader):
    """Data sets of Hugging Face in local files: folders saved by `datasets`, and what `load_dataset` reads."""
    type: Literal["HFDataLoader", "CommonDataLoader"] = setting(REQUIRED, "Kind of data.")
    path: FilePath = setting(
        "", "A local folder or file, or a format (json, parquet, arrow) whose files data_files or data_dir names. "
        "Default empty: dataset_dir.")
    data_files: FilePath | list[FilePath] | dict[str, FilePath | list[FilePath]] | None = setting(
        None, "Files, or for each split its files; names may be patterns such as *.json. Default null: all of path.")
    data_dir: FilePath | None = setting(None, "Folder below path, or the folder of data_files. Default null: path.")
    handler: list[dict[str, Any]] | dict[str, dict[str, Any] | None] = setting(
        [], "Steps of processing: take and rename_column act, AlpacaInstructDataHandler and PackingHandler are what is "
        "done anyway, others are errors. Default empty.")


class AdGenLoader(_RecordLoader):
    """Instructions and their answers in two columns of JSON lines, as of the data set AdvertiseGen."""
    type: Literal["ADGenDataLoader"] = setting(REQUIRED, "Kind of data.")
    sources: list[SourceItem] = _sources()
    origin_columns: list[str] = setting(
        ["content", "summary"], "The columns of the instruction and of the answer.", min_length=2, max_length=2)
    bad_records: Literal["error", "skip"] = setting(
        "skip", "error: the first bad record ends the run; skip: bad records are left out and counted. Default skip, as"
        " MindSpore Transformers does.")


_CHATS = ("multi-round-chat", "multi-round-chat-dyn", "multi-round-chat-dyn-alpaca")


class SftLoader(_RecordLoader):
    """Records for finetuning in JSON or parquet files, in a form that ``dataset_name`` names."""
    type: Literal["SFTDataLoader"] = setting(REQUIRED, "Kind of data.")
    sources: list[SourceItem] = _sources()
    shuffle: bool = setting(False, "Another order of sequences each epoch, from the seed.")
    dataset_name: Literal["default", "alpaca", "advertisegen", "multi-round-chat", "multi-round-chat-dyn",
                          "multi-round-chat-dyn-alpaca", "multi-instruct-dyn"] | None = setting(
        None, "Form of a record. alpaca: instruction, input and output; advertisegen: content and summary; multi-round-"
        "chat...: conversations; multi-instruct-dyn: as alpaca, under other names. Default null: as a JsonlDataset.")
    tokenizer: dict[str, Any] | str | None = setting(
        None, "The tokenizer, which train_dataset.tokenizer or pretrained_model_dir must name. Default null: none.")
    map_function_kwargs: dict[str, Any] = setting(
        {}, "Names in the files: data_field, instruction_keyword, from_keyword, value_keyword, user_role_name and "
        "assistant_role_name. Default empty.")

    @property
    def holds_chats(self) -> bool:
        """Returns whether ``dataset_name`` says that a record is a conversation."""
        return self.dataset_name in _CHATS


class OtherLoader(_Loader):
    """MindSpore Transformers' loaders of single data sets."""
    support = "not_yet"
    support_reason = f"it cannot be read; {_MEANWHILE}, or HFDataLoader"
    type: Literal["SQuADDataLoader", "WMT16DataLoader", "TrainingDataLoader"] = setting(REQUIRED, "Kind of data.")


DataLoader = Annotated[
    TextLoader | JsonlLoader | SyntheticLoader | ImageLoader | MindLoader | MegatronLoader | HuggingFaceLoader
    | AdGenLoader | SftLoader | OtherLoader,
    Field(discriminator="type"),
]  # fmt: skip


class TokenizerConfig(Section):
    """The tokenizer (YAML ``train_dataset.tokenizer``)."""

    type: Literal["bytes", "huggingface"] = setting("bytes", "bytes: one token a byte; huggingface: a tokenizer.json.")
    path: FilePath = setting("", "huggingface: the tokenizer.json or its folder. Default empty.")


class DatasetConfig(Section):
    """A data set (YAML ``train_dataset``, ``eval_dataset``)."""

    data_loader: DataLoader = section(TextLoader, "Where the data comes from.")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "The tokenizer.")
    input_columns: list[str] | None = setting(
        None, "MindDataset: columns with the tokens, and the labels, attention_mask, loss_mask (1 where a token has a "
        "loss) and position_ids if there are any. Default null: input_ids, labels (or target_ids) and attention_mask, "
        "as far as the file has them.")
    construct_args_key: list[str] | None = setting(
        None, "MindDataset: the meaning of each of input_columns: input_ids, labels, attention_mask, loss_mask,"
        " position_ids. Default null: its name.")
    eod_reset: bool = setting(
        False, "MindDataset: separate the documents of a row; positions start at 0 in each. Other data: see packing.")
    eod_token_id: int | None = setting(
        None, "MindDataset: the token that ends a document, for eod_reset. Default null: model_config.eos_token_id.",
        ge=0, le=TOKEN_ID)
    chat_template: FilePath = setting(
        "", "The chat template: chatml, llama3, qwen3, ... (docs/data.md), a .jinja file, or a folder. Default empty: "
        "that of the tokenizer; if it has none, ChatML, with a note. In eval_dataset: that of train_dataset.")
    train_on: Literal["assistant", "last", "all"] | None = setting(
        None, "Tokens of a conversation that contribute to the loss: assistant (the assistant's turns and the token "
        "that ends each), last (only its last turn), all. Default null: assistant; in eval_dataset that of "
        "train_dataset.")
    held_out: float = setting(
        0.0, "Fraction of the documents that is not trained on but evaluated, if there is no eval_dataset.", ge=0, lt=1)
    packing: Literal["whole", "cut", "none"] | None = setting(
        None, "Packing of documents into sequences. whole: several uncut documents share a sequence; cut: one stream, "
        "cut every seq_length tokens; none: one document in each sequence. Default null: whole for conversations, cut "
        "for running text.")
    overlong: Literal["truncate", "drop", "error"] = setting(
        "truncate", "packing whole and none: treatment of documents longer than a sequence. truncate: keep the last "
        "seq_length tokens; drop: leave the document out; error: end the run.")
    drop_remainder: bool = setting(True, "Leave out the last, smaller batch of an epoch.")
    prefetch_size: int = setting(2, "Micro-batches prepared ahead, at least those of a step.", ge=1, le=BATCH)
    batch_size: int | None = setting(
        None, "eval_dataset: sequences of a batch. Default null: runner_config.batch_size.", ge=1, le=BATCH)
    max_batches: int = setting(0, "eval_dataset: micro-batches an evaluation reads. Default 0: all.", ge=0, le=COUNT)
    cache_dir: FilePath | None = setting(
        None, "Folder of the token files that are built once. Default null: ~/.cache/run_trainer/tokens, or "
        "output_dir/tokens if that cannot be made.")

    @property
    def has_weights(self) -> bool:
        """Returns whether each record has a weight, the factor on the loss of its tokens."""
        return WEIGHT in getattr(self.data_loader, "columns", {})


class DatasetTask(Section):
    """MindSpore Transformers' wrapper of a data set (YAML ``train_dataset_task``) with the key ``dataset_config``."""
