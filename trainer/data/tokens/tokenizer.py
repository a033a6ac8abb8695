"""Tokenizers: text to token ids and back, in two kinds with the same interface:

- ``bytes``: ids 0 to 255 are the bytes of UTF-8, 256 ends a document. Needs no download and knows every character.
- ``huggingface``: a ``tokenizer.json`` (or the folder that holds it), read by the `tokenizers` library.

The token that ends a document (eos) is the first of these that exists: ``model_config.eos_token_id`` (the first of a
list); ``eos_token`` of a ``tokenizer_config.json`` beside the tokenizer; the first of `EOS_NAMES` that the tokenizer
knows. The token that begins a document (bos) is found in the same way (`BOS_NAMES`). It may be missing, and is not used
where ``tokenizer_config.json`` says ``add_bos_token: false``.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<eos>")
BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>")
_BYTES_EOS_ID = 256
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER_TOKENS = 4  # a character has at most four bytes of UTF-8, a token at least one


class TextStream(Protocol):
    """Decodes token by token; see `Tokenizer.stream`."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """Returns the rest; an incomplete character becomes U+FFFD."""


class Tokenizer(Protocol):
    vocab_size: int  # the largest id + 1
    eos_id: int  # ends a document, and each answer of a conversation
    bos_id: int | None  # begins a document
    fingerprint: str  # changes whenever the same text could become other ids

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without bos and eos."""

    def encode_batch(self, strings: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each string."""

    def encode_utf8(self, strings: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each string (valid UTF-8) as unsigned arrays, without Python integers."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without special tokens and ids beyond the vocabulary."""

    def stream(self) -> TextStream:
        """Starts decoding token by token, for output that is shown during generation."""


def load_tokenizer(config: Config, section: str = "train_dataset") -> Tokenizer:
    """Loads the tokenizer of a data set section.

    Raises:
        UserError: The file is missing or not a tokenizer, no token that ends a document is known, or
            ``model_config.eos_token_id`` is not one of its tokens.
    """
    wanted = getattr(config, section).tokenizer
    if wanted.type != "bytes":
        return _load_hugging_face(config, wanted.path, f"{section}.tokenizer.path")
    eos_id = _configured_id(config, "eos")
    if eos_id not in (None, _BYTES_EOS_ID):
        key, fix = "model.model_config.eos_token_id", f"leave it out, or set it to {_BYTES_EOS_ID}"
        rule = f"the tokenizer `bytes` ends a document with id {_BYTES_EOS_ID}"
        raise UserError(rule, where=config.source.where(key), key=key, value=eos_id, fix=fix)
    return ByteTokenizer()


class ByteTokenizer:
    """The bytes of UTF-8 as tokens."""

    vocab_size = 257
    eos_id = _BYTES_EOS_ID
    bos_id = None
    fingerprint = "bytes-1"

    def encode(self, text: str) -> list[int]:
        # Bytes from a terminal that are not UTF-8 arrive as lone surrogates; this restores them.
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, strings: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in strings]

    def encode_utf8(self, strings: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in strings]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(token_id) for token_id in ids if 0 <= token_id < 256).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if 0 <= token_id < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` as a `tokenizers.Tokenizer`; `content` are the bytes of the file, for the fingerprint."""

    def __init__(self, tokenizer, *, eos_id: int, bos_id: int | None, content: bytes) -> None:
        self._tokenizer = tokenizer
        self.eos_id = eos_id
        self.bos_id = bos_id
        # Ids may have gaps, so the number of tokens does not give the largest one.
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = f"huggingface-1:{hashlib.sha256(content).hexdigest()}:{eos_id}:{bos_id}"

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, strings: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encodings(list(strings))]

    def encode_utf8(self, strings: Sequence[bytes]) -> list[np.ndarray]:
        encodings = self._encodings([text.decode() for text in strings])
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _encodings(self, strings: list[str]):
        # `fast` only leaves out the character offsets, which are not needed here.
        return self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token_id) for token_id in ids if 0 <= token_id < self.vocab_size])

    def stream(self) -> TextStream:
        return _DiffStream(self)


class _DiffStream:
    """Decodes a short window of tokens twice, without and with the new token: the difference is the new text.

    A token cannot be decoded alone: some tokenizers drop or add a space at the start, and a character may be spread
    over several tokens (its text ends in U+FFFD until the last one is there).
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
        self._shown, self._waiting = self._waiting, []
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
        where = where or config.source.where(key.removesuffix("path") + "type")
        fix = "set tokenizer.path to the file or its folder, or tokenizer.type to bytes"
        rule = "the tokenizer `huggingface` needs a tokenizer.json"
        raise UserError(rule, where=where, key=key, value=name, fix=fix)
    path = Path(os.path.expanduser(name))
    path = path / "tokenizer.json" if os.path.isdir(path) else path
    fix = "name a tokenizer.json as saved by Hugging Face tokenizers, or its folder, or set tokenizer.type to bytes"
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        rule = f"the tokenizer cannot be read ({getattr(error, 'strerror', None) or error})"
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix) from None

    import tokenizers  # late: the byte tokenizer does not need it

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        rule = f"this is not a tokenizer.json ({error})"
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix) from None
    # A file may contain settings for fixed-size batches; a training corpus must be neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        described = json.loads(path.with_name("tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        described = {}  # the file is optional
    described = described if isinstance(described, dict) else {}
    eos_id = _find_special(config, tokenizer, described, "eos", EOS_NAMES)
    if eos_id is None:
        rule = f"the tokenizer has no token that ends a document; looked for {', '.join(EOS_NAMES)}"
        raise UserError(rule, where=where, key=key, value=str(path), fix="set model.model_config.eos_token_id")
    bos_id = None
    if described.get("add_bos_token") is not False:
        bos_id = _find_special(config, tokenizer, described, "bos", BOS_NAMES)
    return HuggingFaceTokenizer(tokenizer, eos_id=eos_id, bos_id=bos_id, content=content)


def _configured_id(config: Config, kind: str) -> int | None:
    """Reads ``model_config.eos_token_id`` or ``bos_token_id``; the first of a list of eos ids."""
    token_id = getattr(config.decoder, f"{kind}_token_id")
    if isinstance(token_id, list):
        return token_id[0] if token_id else None
    return token_id


def _find_special(config: Config, tokenizer, described: dict, kind: str, names: Sequence[str]) -> int | None:
    """Finds the id of eos or bos (`kind`), in the order that the module's docstring gives."""
    token_id = _configured_id(config, kind)
    if token_id is not None:
        if token_id < 0 or tokenizer.id_to_token(token_id) is None:
            key = f"model.model_config.{kind}_token_id"
            fix = f"leave it out to use the tokenizer's own, or set an id below {tokenizer.get_vocab_size()}"
            rule = "the tokenizer has no token with this id"
            raise UserError(rule, where=config.source.where(key), key=key, value=token_id, fix=fix)
        return token_id
    token = described.get(f"{kind}_token")
    if isinstance(token, dict):  # a serialised AddedToken
        token = token.get("content")
    wanted = [token] if isinstance(token, str) else []
    return next((found for name in (*wanted, *names) if (found := tokenizer.token_to_id(name)) is not None), None)
