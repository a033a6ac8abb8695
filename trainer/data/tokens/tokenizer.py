"""Tokenizers: text to token ids and back, in two kinds with the same interface:

- ``bytes``: ids 0 to 255 are the bytes of UTF-8, 256 ends a document. Needs no download and knows every character.
- ``huggingface``: a ``tokenizer.json`` (or the folder that holds it), read by the `tokenizers` library.

The token that ends a document (eos) is the first of these that exists: ``model_config.eos_token_id``;
``eos_token_id`` of a ``generation_config.json`` beside the tokenizer; ``eos_token`` of ``tokenizer_config.json``;
``eos_token_id`` of ``config.json``; the first of `EOS_NAMES` that the tokenizer knows. If it is a list of ids, the
first ends a document, and each of them ends generation. The token that begins a document (bos) is
``model_config.bos_token_id``, ``bos_token`` of ``tokenizer_config.json`` or the first of `BOS_NAMES`. It may be
missing, and is not used if ``tokenizer_config.json`` has ``add_bos_token: false``.

The name of a special token in a text stands for the token, as in transformers; the end token of ``bytes`` is written
`BYTES_EOS`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from trainer.config.checks.problem import data_error
from trainer.data.tokens.tokenizer_files import EndTokens, TokenizerConfigFile, TokenizerJson, read_beside
from trainer.errors import UserError
from trainer.storage.json_files import parse_json
from trainer.storage.marker import read_saved

if TYPE_CHECKING:
    import tokenizers

    from trainer.config import Config

EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<eos>")
BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>")
BYTES_EOS = "<|endoftext|>"
_BYTES_EOS_ID = 256
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER_TOKENS = 4  # a character has at most four bytes of UTF-8, a token at least one


class TextStream(Protocol):
    """Decodes token by token, for output that is shown during generation."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; it is empty while a character is incomplete."""

    def finish(self) -> str:
        """Returns the rest; an incomplete character becomes U+FFFD."""


class Offsets(NamedTuple):
    """The tokens of a text, with the characters that each token covers."""

    ids: np.ndarray  # unsigned [tokens]
    starts: np.ndarray  # int64 [tokens], the first character
    ends: np.ndarray  # int64 [tokens], behind the last character


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    vocab_size: int  # the largest id + 1
    eos_id: int  # ends a document, and each answer of a conversation
    eos_ids: tuple[int, ...]  # `eos_id` first; each of them ends generation
    eos_token: str  # the text of `eos_id`
    bos_id: int | None  # begins a document
    bos_token: str  # the text of `bos_id`; empty without one
    special_tokens: Mapping[str, Any]  # for chat templates: those of bos_token, eos_token, pad_token ... that exist
    added_tokens: Mapping[str, bool]  # tokens that are matched in a text before all others -> whether each is special
    folder: Path | None  # of the tokenizer's files
    fingerprint: str  # changes whenever a text could become other ids

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without bos and eos."""

    def encode_as_transformers(self, text: str) -> list[int]:
        """Returns the ids of `text` with the bos and eos that transformers adds for this tokenizer, if any."""

    def encode_batch(self, strings: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each string."""

    def encode_utf8(self, strings: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each string (valid UTF-8) as unsigned arrays, without Python integers."""

    def encode_offsets(self, strings: Sequence[str]) -> list[Offsets]:
        """Returns the ids of each string, with the characters that each token covers."""

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with this text, or None."""

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token, as it is written in a tokenizer.json."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; ids beyond the vocabulary and, by default, special tokens are left out."""

    def stream(self) -> TextStream:
        """Starts decoding token by token, for output that is shown during generation."""


def load_tokenizer(config: Config, section: str = "train_dataset") -> Tokenizer:
    """Loads the tokenizer of a data set section.

    Raises:
        UserError: The file is missing or not a tokenizer. Or the token that ends a document is not known, is not in
            the tokenizer, or lies beyond the model's vocabulary.
    """
    settings = getattr(config, section).tokenizer
    if settings.type != "bytes":
        return _load_hugging_face(config, settings.path, f"{section}.tokenizer.path")
    ids = _id_list(config.decoder.eos_token_id)
    if ids and ids[0] != _BYTES_EOS_ID:
        key = "model.model_config.eos_token_id"
        fix = f"leave it out, or set it to {_BYTES_EOS_ID}"
        rule = f"the tokenizer `bytes` ends a document with id {_BYTES_EOS_ID}"
        raise data_error(config, key, rule, fix)
    return ByteTokenizer()


class ByteTokenizer:
    """The bytes of UTF-8 as tokens."""

    vocab_size = 257
    eos_id = _BYTES_EOS_ID
    eos_ids: tuple[int, ...] = (_BYTES_EOS_ID,)
    eos_token = BYTES_EOS
    bos_id: int | None = None
    bos_token = ""
    special_tokens: Mapping[str, Any] = {"eos_token": BYTES_EOS}
    added_tokens: Mapping[str, bool] = {BYTES_EOS: True}
    folder: Path | None = None
    fingerprint = "bytes-2"

    def encode(self, text: str) -> list[int]:
        # Bytes from a terminal that are not UTF-8 arrive as lone surrogates; this restores them.
        return self._ids(text.encode("utf-8", "surrogateescape")).tolist()

    def encode_as_transformers(self, text: str) -> list[int]:
        """Returns the ids of `text`; no token is added."""
        return self.encode(text)

    def encode_batch(self, strings: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in strings]

    def encode_utf8(self, strings: Sequence[bytes]) -> list[np.ndarray]:
        return [self._ids(text) for text in strings]

    def encode_offsets(self, strings: Sequence[str]) -> list[Offsets]:
        return [self._offsets(text.encode()) for text in strings]

    def token_id(self, text: str) -> int | None:
        if text == BYTES_EOS:
            return _BYTES_EOS_ID
        if len(text) == 1 and text.isascii():
            return ord(text)
        return None

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token, as `export` writes it."""
        return {letter: byte for byte, letter in enumerate(byte_letters())} | {BYTES_EOS: _BYTES_EOS_ID}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        eos = BYTES_EOS.encode()
        if skip_special_tokens:
            eos = b""
        parts = (eos if token_id == _BYTES_EOS_ID else bytes([token_id]) for token_id in ids if 0 <= token_id <= 256)
        return b"".join(parts).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        return _ByteStream()

    def _ids(self, text: bytes) -> np.ndarray:
        parts = text.split(BYTES_EOS.encode())
        if len(parts) == 1:
            return np.frombuffer(text, np.uint8)
        eos = np.array([_BYTES_EOS_ID], np.uint16)
        return np.concatenate([array for part in parts for array in (np.frombuffer(part, np.uint8), eos)][:-1])

    def _offsets(self, text: bytes) -> Offsets:
        character_of_byte = _characters_of_bytes(text)
        first = np.ones(len(text), bool)
        for match in re.finditer(re.escape(BYTES_EOS.encode()), text):
            first[match.start() + 1 : match.end()] = False
        starts = character_of_byte[first]
        ids = self._ids(text)
        return Offsets(ids, starts, starts + np.where(ids == _BYTES_EOS_ID, len(BYTES_EOS), 1))


def byte_letters() -> Iterator[str]:
    """Yields the letter of each byte in a byte-level tokenizer (GPT-2's): printable bytes stand for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = 0
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(256 + others)
            others += 1


def _characters_of_bytes(text: bytes) -> np.ndarray:
    """Returns the number of the character of each byte of UTF-8."""
    # A byte that continues a character has the bits 10 at its start.
    return np.cumsum(np.frombuffer(text, np.uint8) & 0xC0 != 0x80) - 1


class _ByteStream:
    """Decodes bytes of UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if 0 <= token_id < 256:
            return self._decoder.decode(bytes([token_id]))
        return ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, read by the `tokenizers` library.

    Args:
        content: The bytes of the file, for the fingerprint.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, eos_ids: Sequence[int], bos_id: int | None,
        special_tokens: Mapping[str, Any], content: bytes, folder: Path,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.eos_id = eos_ids[0]
        self.eos_token: str = tokenizer.id_to_token(self.eos_id) or ""
        self.bos_id = bos_id
        self.bos_token = ""
        if bos_id is not None:
            self.bos_token = tokenizer.id_to_token(bos_id) or ""
        self.special_tokens = special_tokens
        added = tokenizer.get_added_tokens_decoder().values()
        self.added_tokens: Mapping[str, bool] = {token.content: token.special for token in added}
        self.folder: Path | None = folder
        self._token_bytes = _token_bytes(tokenizer)
        # Ids may have gaps, so the number of tokens does not give the largest one.
        self.vocab_size = _largest_id(tokenizer) + 1
        self.fingerprint = f"huggingface-1:{hashlib.sha256(content).hexdigest()}:{self.eos_id}:{bos_id}"

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_as_transformers(self, text: str) -> list[int]:
        """Returns the ids of `text` with those that the post-processor of tokenizer.json adds.

        The flags add_bos_token and add_eos_token have no effect in transformers 5.24 if there is a tokenizer.json.
        """
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def encode_batch(self, strings: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encodings(list(strings))]

    def encode_utf8(self, strings: Sequence[bytes]) -> list[np.ndarray]:
        encodings = self._encodings([text.decode() for text in strings])
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _encodings(self, strings: list[str]) -> list[tokenizers.Encoding]:
        # `fast` only leaves out the character offsets, which are not needed here.
        return self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)

    def encode_offsets(self, strings: Sequence[str]) -> list[Offsets]:
        result: dict[int, Offsets] = {}
        if self._token_bytes is not None:
            for number, encoding in enumerate(self._encodings(list(strings))):
                offsets = _offsets_by_lengths(strings[number], encoding.ids, self._token_bytes)
                if offsets is not None:
                    result[number] = offsets
        remaining = [number for number in range(len(strings)) if number not in result]
        encodings = self._tokenizer.encode_batch([strings[number] for number in remaining], add_special_tokens=False)
        for number, encoding in zip(remaining, encodings, strict=True):
            covered = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            result[number] = Offsets(np.array(encoding.ids, np.uint32), covered[:, 0], covered[:, 1])
        return [result[number] for number in range(len(strings))]

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [int(token_id) for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def stream(self) -> TextStream:
        return _DiffStream(self)


def _offsets_by_lengths(text: str, ids: list[int], token_bytes: np.ndarray) -> Offsets | None:
    """Computes the characters that tokens of bytes cover from their lengths, which is faster than the library's way.

    Returns None if the tokens do not spell the text, for example because a normalizer changed it.
    """
    content = text.encode()
    ids_N = np.array(ids, np.uint32)
    ends_N = np.cumsum(token_bytes[ids_N])
    if not ids or int(ends_N[-1]) != len(content) or not unicodedata.is_normalized("NFC", text):
        return None
    starts_N = ends_N - token_bytes[ids_N]
    if len(content) > len(text):
        character_of_byte = _characters_of_bytes(content)
        starts_N = character_of_byte[starts_N]
        ends_N = character_of_byte[ends_N - 1] + 1
    return Offsets(ids_N, starts_N, ends_N)


def _token_bytes(tokenizer: tokenizers.Tokenizer) -> np.ndarray | None:
    """Counts the bytes of each token of a byte-level tokenizer (GPT-2, Llama-3, Qwen), int64 [vocab_size]; else None.
    """
    described = json.loads(tokenizer.to_str())
    pre_tokenizer = described["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel" and not step["add_prefix_space"]]
    normalizer = (described["normalizer"] or {"type": "NFC"})["type"]
    if not byte_level or normalizer != "NFC" or described["model"]["type"] != "BPE":
        return None
    # In the vocabulary each byte is written as one character.
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    lengths = np.zeros(_largest_id(tokenizer) + 1, np.int64)
    lengths[list(vocabulary.values())] = [len(token) for token in vocabulary]
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        lengths[token_id] = len(token.content.encode())
    return lengths


class _DiffStream:
    """Decodes a short window of tokens twice, without and with the new token: the difference is the new text.

    A single token cannot be decoded: some tokenizers drop or add a space at the start, and a character may be spread
    over several tokens (its text ends in U+FFFD until the last one arrives).
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._new_text()
        incomplete = text.endswith(_REPLACEMENT) and len(self._waiting) < _LONGEST_CHARACTER_TOKENS
        if not text or incomplete:
            return ""
        self._shown = self._waiting
        self._waiting = []
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._waiting = []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]


def _load_hugging_face(config: Config, name: str, key: str) -> HuggingFaceTokenizer:
    where = config.source.where(key)
    if not name:
        fix = "set tokenizer.path to the file or its folder, or tokenizer.type to bytes"
        raise data_error(config, key, "the tokenizer `huggingface` needs a tokenizer.json", fix)
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        path = path / "tokenizer.json"
    fix = "name a tokenizer.json as saved by Hugging Face tokenizers, or its folder, or set tokenizer.type to bytes"
    try:
        content = read_saved(path)
    except OSError as error:
        rule = f"the tokenizer cannot be read ({error.strerror})"
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix) from None

    import tokenizers  # late: the byte tokenizer does not need it

    try:
        parse_json(content, TokenizerJson, path.name)
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises plain Exception, and a BaseException where its Rust code panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        rule = f"this is not a tokenizer.json ({error})"
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix) from None
    # A file may contain settings for fixed-size batches; a training corpus must be neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    described = read_beside(path.with_name("tokenizer_config.json"), TokenizerConfigFile).values()
    eos_ids = _find_eos(config, tokenizer, described, path)
    if not eos_ids:
        rule = f"the tokenizer has no token that ends a document; looked for {', '.join(EOS_NAMES)}"
        raise UserError(rule, where=where, key=key, value=str(path), fix="set model.model_config.eos_token_id")
    bos_id = _find_bos(config, tokenizer, described)
    needed_ids = [eos_ids[0]]
    if bos_id is not None:
        needed_ids.append(bos_id)
    _check_vocabulary(config, tokenizer, needed_ids)
    mapped = read_beside(path.with_name("special_tokens_map.json"), TokenizerConfigFile).values()
    special = _special_tokens({**mapped, **described})
    if not described:
        known_ids = {"eos_token": eos_ids[0], "bos_token": bos_id}
        special = {name: tokenizer.id_to_token(each) for name, each in known_ids.items() if each is not None} | special
    return HuggingFaceTokenizer(
        tokenizer, eos_ids=eos_ids, bos_id=bos_id, special_tokens=special, content=content, folder=path.parent
    )


def _largest_id(tokenizer: tokenizers.Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values())


def _text_of(token: object) -> str | None:
    """Returns the text of a token in tokenizer_config.json, which may be a serialised AddedToken."""
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and token:
        return token
    return None


def _special_tokens(described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the special tokens of tokenizer_config.json, as transformers passes them to a chat template."""
    names = [name for name in described if name.endswith("_token") and _text_of(described[name]) is not None]
    special: dict[str, Any] = {name: _text_of(described[name]) for name in names}
    added = described.get("additional_special_tokens")
    if isinstance(added, list):
        special["additional_special_tokens"] = [text for token in added if (text := _text_of(token)) is not None]
    return special


def _id_list(value: object) -> list[int]:
    values = [value]
    if isinstance(value, list):
        values = value
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]


def _known_ids(tokenizer: tokenizers.Tokenizer, ids: Iterable[int], where: str, key: str) -> tuple[int, ...]:
    """Returns the ids; raises a UserError about `key` if the tokenizer lacks one."""
    for token_id in ids:
        if not 0 <= token_id < 1 << 31 or tokenizer.id_to_token(token_id) is None:
            fix = f"leave it out to use the tokenizer's own, or set an id below {tokenizer.get_vocab_size()}"
            rule = "the tokenizer has no token with this id"
            raise UserError(rule, where=where, key=key, value=token_id, fix=fix)
    return tuple(ids)


def _find_eos(
    config: Config, tokenizer: tokenizers.Tokenizer, described: Mapping[str, Any], path: Path
) -> tuple[int, ...]:
    """Finds the ids that end a document or generation, in the order of the module's docstring."""
    key = "model.model_config.eos_token_id"
    if ids := _id_list(config.decoder.eos_token_id):
        return _known_ids(tokenizer, ids, config.source.where(key), key)
    beside = path.with_name("generation_config.json")
    if ids := _id_list(read_beside(beside, EndTokens).eos_token_id):
        return _known_ids(tokenizer, ids, str(beside), "eos_token_id")
    token_id = tokenizer.token_to_id(_text_of(described.get("eos_token")) or "")
    if token_id is not None:
        return (token_id,)
    beside = path.with_name("config.json")
    if ids := _id_list(read_beside(beside, EndTokens).eos_token_id):
        return _known_ids(tokenizer, ids, str(beside), "eos_token_id")
    token_ids = [tokenizer.token_to_id(name) for name in EOS_NAMES]
    return tuple(token_id for token_id in token_ids if token_id is not None)[:1]


def _find_bos(config: Config, tokenizer: tokenizers.Tokenizer, described: Mapping[str, Any]) -> int | None:
    if described.get("add_bos_token") is False:
        return None
    token_id = config.decoder.bos_token_id
    key = "model.model_config.bos_token_id"
    if token_id is not None:
        return _known_ids(tokenizer, [token_id], config.source.where(key), key)[0]
    names = [name for name in (_text_of(described.get("bos_token")), *BOS_NAMES) if name]
    token_ids = [tokenizer.token_to_id(name) for name in names]
    return next((token_id for token_id in token_ids if token_id is not None), None)


def _check_vocabulary(config: Config, tokenizer: tokenizers.Tokenizer, ids: Iterable[int]) -> None:
    """Checks that the tokens of every document are within the model's vocabulary."""
    vocab_size = config.decoder.vocab_size
    for token_id in ids:
        if token_id >= vocab_size:
            tokens = _largest_id(tokenizer) + 1
            token = tokenizer.id_to_token(token_id)
            rule = f"the tokenizer has {tokens} tokens, beyond the model's vocabulary of {vocab_size}"
            rule += f": a document needs {token!r}, whose id is {token_id}"
            fix = f"set it to at least {tokens}, or use the model's own tokenizer"
            raise data_error(config, "model.model_config.vocab_size", rule, fix)
