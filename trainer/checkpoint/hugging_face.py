"""The files that make a folder of weights loadable by transformers: config.json, generation_config.json, tokenizer.

    model.safetensors, or model-00001-of-00003.safetensors ... and model.safetensors.index.json
    config.json, generation_config.json
    tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja ...

No MindSpore. `trainer.config.hugging_face` has the keys of config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.checkpoint.json_models import record_form_of
from trainer.config.hugging_face import config_json, saved_class
from trainer.data.tokens.chat_template import alpaca, load_chat_template
from trainer.data.tokens.tokenizer import BYTES_EOS, ByteTokenizer, Tokenizer, byte_letters, load_tokenizer
from trainer.errors import UserError
from trainer.storage.bfloat16 import as_bfloat16
from trainer.storage.marker import read_saved
from trainer.storage.tensor_file import BFLOAT16, ArrayOrLazyArray, TensorInfo, write_tensors

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.data.batches.packing import RecordForm
    from trainer.data.tokens.chat_template import ChatTemplate


class _WrittenDtype(NamedTuple):
    """safetensors' name of a dtype, its bytes, and the conversion from float32."""

    code: str
    item_bytes: int
    convert: Callable[[np.ndarray], np.ndarray]


_WRITTEN = {
    "float32": _WrittenDtype("F32", 4, lambda array: np.ascontiguousarray(array, np.float32)),
    "bfloat16": _WrittenDtype(BFLOAT16, 2, as_bfloat16),
    "float16": _WrittenDtype("F16", 2, lambda array: array.astype(np.float16)),
}
DTYPES = tuple(_WRITTEN)
CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_LARGEST_FLOAT16 = 65504.0
_SHARD_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")

Files = dict[str, bytes]


def folder_files(
    config: Config, dtype: str = "float32", settings: ModelConfig | None = None, form: RecordForm | None = None
) -> Files:
    """Returns the files beside the weights by name; none for another model than a decoder, which transformers lacks.

    config.json is left out if no class of transformers computes this model: it would describe another model.

    Args:
        settings: The configuration of the saved weights; `config.decoder` by default.
        form: How their training wrote its records; None if that is not known.

    Raises:
        UserError: The tokenizer cannot be read.
    """
    if not config.is_decoder:
        return {}
    settings = settings or config.decoder
    tokenizer = tokenizer_of(config)
    ids = _special_ids(config, tokenizer)
    if settings.num_labels:
        ids["pad_token_id"] = score_padding(config, tokenizer)
    kind = saved_class(settings, config.model.arch.type)
    files: Files = {}
    if kind:
        files[CONFIG] = _json(config_json(settings, kind, dtype) | ids)
    names: tuple[str, ...] = ("do_sample", "repetition_penalty")
    if settings.do_sample:  # else transformers warns of the other keys
        names = _SAMPLING
    generation = {name: getattr(settings, name) for name in names} | ids
    if tokenizer is None:
        return files | {GENERATION: _json(generation)}
    template = trained_template(config, tokenizer, form)
    if template is not None and template.turn_end_id is not None:
        generation["eos_token_id"] = _one_or_list([*tokenizer.eos_ids, template.turn_end_id], settings)
    files[GENERATION] = _json(generation)
    if isinstance(tokenizer, ByteTokenizer):
        files |= _byte_tokenizer(settings)
    else:
        files |= _tokenizer_files(config, tokenizer)
    if template is not None and (config.train_dataset.chat_template or not template.is_given):
        files["chat_template.jinja"] = template.as_file.encode()
        # Versions of transformers before 4.43 look for it in tokenizer_config.json.
        files["tokenizer_config.json"] = _with_key(files["tokenizer_config.json"], "chat_template", template.as_file)
    return files


def class_on_disk(config: Config) -> str:
    """Returns the class whose tensor names the saved weights have."""
    kind = config.model.arch.type
    return saved_class(config.decoder, kind) or kind


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _with_key(content: bytes, key: str, value: str) -> bytes:
    """Adds a key to a JSON file; returns the file unchanged if it contains no object."""
    try:
        described = json.loads(content)
    except ValueError:
        return content
    if isinstance(described, dict):
        return _json(described | {key: value})
    return content


def tokenizer_of(config: Config) -> Tokenizer | None:
    """Loads the tokenizer of the training data; None if the data are tokens and no tokenizer is named."""
    train = config.train_dataset
    unknown = not train.data_loader.reads_text and train.tokenizer.type == "bytes"
    too_small = train.tokenizer.type == "bytes" and config.decoder.vocab_size < ByteTokenizer.vocab_size
    if unknown or too_small:
        return None
    return load_tokenizer(config)


def _special_ids(config: Config, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the ids of the tokens that begin and end a text; ids beyond the vocabulary are left out."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": _one_or_list(tokenizer.eos_ids, config.decoder)}


def score_padding(config: Config, tokenizer: Tokenizer | None) -> int | None:
    """Returns the padding token of a reward model, with which transformers finds the last token of an answer.

    So it must not end an answer. It is the tokenizer's padding or unknown token, or a special token with pad in its
    name, such as Llama's <|finetune_right_pad_id|>; of bytes it is 0. None if the tokenizer has none of them.
    """
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return 0
    ends = {tokenizer.eos_id}
    template = _template_of(config, tokenizer)
    if template is not None and template.turn_end_id is not None:
        ends.add(template.turn_end_id)
    named = [tokenizer.special_tokens.get(name) for name in ("pad_token", "unk_token")]
    added = [token for token, is_special in tokenizer.added_tokens.items() if is_special and "pad" in token.lower()]
    for token in (*named, *added):
        if isinstance(token, str):
            ids = tokenizer.encode(token)
            if len(ids) == 1 and ids[0] not in ends and ids[0] < config.decoder.vocab_size:
                return ids[0]
    return None


def _one_or_list(tokens: Iterable[int], settings: ModelConfig) -> int | list[int] | None:
    ids = [token for token in dict.fromkeys(tokens) if token < settings.vocab_size]
    if len(ids) > 1:
        return ids
    return next(iter(ids), None)


def trained_template(config: Config, tokenizer: Tokenizer, form: RecordForm | None) -> ChatTemplate | None:
    """Returns the chat template of the tokenizer or the YAML, or else what a training used without one.

    None if it used none, or if that is not known: another template would ask the model in a form that it never saw.
    """
    template = _template_of(config, tokenizer)
    if template is None or template.is_given or form == "chat":
        return template
    if form == "alpaca":
        return alpaca(tokenizer)
    return None


def chat_template_of(config: Config, tokenizer: Tokenizer) -> ChatTemplate:
    """Loads the template with which a model is asked: that of the tokenizer or the YAML, or the form of its training.

    Without both it is ChatML. Raises the errors of `load_chat_template`.
    """
    template = load_chat_template(config, "train_dataset", tokenizer)
    if not template.is_given and record_form_of(trained_path(config)) == "alpaca":
        return alpaca(tokenizer)
    return template


def trained_path(config: Config) -> Path:
    """Returns where the trained weights of a model are: its adapters, or all of them."""
    return Path(config.adapter_id or config.load_checkpoint).expanduser()


def _template_of(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Loads the chat template of the training data; None if it is invalid, which only data without chats allow."""
    try:
        return load_chat_template(config, "train_dataset", tokenizer)
    except UserError:
        return None


def _tokenizer_files(config: Config, tokenizer: Tokenizer) -> Files:
    """Reads the files of a Hugging Face tokenizer; adds a tokenizer_config.json if it has none."""
    folder = tokenizer.folder
    assert folder is not None
    path = Path(config.train_dataset.tokenizer.path).expanduser()
    sources = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    if path.is_file():
        sources["tokenizer.json"] = path
    try:
        files = {name: read_saved(source) for name, source in sources.items()}
    except OSError as error:
        where = config.source.where("train_dataset.tokenizer.path")
        key = "train_dataset.tokenizer.path"
        rule = f"a file of the tokenizer cannot be read ({error.strerror})"
        fix = "make it readable, or copy the tokenizer again"
        raise UserError(rule, where=where, key=key, value=str(folder), fix=fix) from None
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    files.setdefault("tokenizer_config.json", _json(described | {"clean_up_tokenization_spaces": False}))
    return files


def _byte_tokenizer(settings: ModelConfig) -> Files:
    """Returns the byte tokenizer as a tokenizer.json: an alphabet of 256 bytes without merges, and the end token."""
    eos = {"content": BYTES_EOS, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
           "special": True}  # fmt: skip
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {letter: byte for byte, letter in enumerate(byte_letters())},
        "merges": [],
    }
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
                 "added_tokens": [{"id": ByteTokenizer.eos_id, **eos}], "pre_tokenizer": bytes_alone,
                 "decoder": bytes_alone, "model": model}  # fmt: skip
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(ByteTokenizer.eos_id): eos},
        "eos_token": BYTES_EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": settings.max_positions,
    }
    special = {"eos_token": BYTES_EOS}
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(described),
            "special_tokens_map.json": _json(special)}  # fmt: skip


# ---- weights ---------------------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as 5GB, 500MB or 2GiB.

    Raises:
        UserError: The text is not a size.
    """
    size = 0.0
    match = _SHARD_SIZE.fullmatch(text.strip())
    if match is not None:
        number, unit, binary = match.groups()
        base = 1000
        if binary:
            base = 1024
        size = float(number) * base ** " KMGT".index(unit.upper() or " ")
    if size < 1:
        raise UserError("is not a size", key="--shard_size", value=text, fix="write 5GB, 500MB or 2GiB")
    return int(size)


def split_into_files(weights: Mapping[str, ArrayOrLazyArray], limit_bytes: int, dtype: str) -> dict[str, list[str]]:
    """Returns the names of the tensors of each file, in order; a tensor above the limit has a separate file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, array in weights.items():
        size = array.size * _WRITTEN[dtype].item_bytes
        if groups[-1] and filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}


def index_json(files: Mapping[str, list[str]], weights: Mapping[str, ArrayOrLazyArray], dtype: str) -> bytes:
    """Returns the content of model.safetensors.index.json: which file has which tensor."""
    total = sum(array.size for array in weights.values())
    where = {name: file for file, names in files.items() for name in names}
    metadata = {"total_parameters": total, "total_size": total * _WRITTEN[dtype].item_bytes}
    return _json({"metadata": metadata, "weight_map": dict(sorted(where.items()))})


def write_weights(path: Path, arrays: Mapping[str, ArrayOrLazyArray], dtype: str) -> None:
    """Writes float32 arrays as a safetensors file, each read and converted on its own: numpy has no bfloat16.

    Raises:
        OSError: The disk is full or cannot be written.
        UserError: A number is beyond the range of float16.
    """
    code, item_bytes, convert = _WRITTEN[dtype]
    entries = {name: TensorInfo(code, array.shape, array.size * item_bytes) for name, array in arrays.items()}

    def convert_arrays() -> Iterator[np.ndarray]:
        """Yields the arrays in `dtype`; raises UserError for numbers beyond the range of float16."""
        for name, array_or_lazy in arrays.items():
            array = np.asarray(array_or_lazy)
            if dtype == "float16" and np.abs(array).max(initial=0) > _LARGEST_FLOAT16:
                rule = f"{name} has numbers beyond the range of float16"
                raise UserError(rule, key="--dtype", value=dtype, fix="use bfloat16 or float32")
            yield convert(array)

    write_tensors(path, entries, convert_arrays())
