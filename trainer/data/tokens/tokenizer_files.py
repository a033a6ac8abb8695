"""Reads the JSON files of a Hugging Face tokenizer with pydantic models of the keys that are used.

A file may be missing. A file that exists must be valid: without the end token or the chat template in it, a run would
train on something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from trainer.errors import UserError
from trainer.storage.json_files import JsonError, LenientModel, parse_json
from trainer.storage.marker import read_saved

TokenId = Annotated[int, Field(ge=0, le=10_000_000)]
Read = TypeVar("Read", bound=LenientModel)


class AddedToken(LenientModel):
    """A token that is matched in a text before all others."""

    id: TokenId
    content: str


class TokenizerModel(LenientModel):
    """The vocabulary: ids by text; for Unigram a list of texts with their scores."""

    vocab: dict[str, TokenId] | list[Any] = {}
    merges: Any = None  # hundreds of thousands of pairs, which the library checks
    continuing_subword_prefix: str | None = None

    @model_validator(mode="after")
    def has_prefixes(self) -> TokenizerModel:
        """Checks that the second token of every merge begins with the prefix of continuing subwords."""
        prefix = self.continuing_subword_prefix
        if not prefix or not isinstance(self.merges, list):
            return self
        # The library cuts as many bytes off the second part of each merge, without checking what they are.
        for merge in self.merges:
            parts = merge
            if isinstance(merge, str):
                parts = merge.split(" ")
            if not (isinstance(parts, list) and parts and str(parts[-1]).startswith(prefix)):
                raise ValueError("continuing_subword_prefix does not begin the second part of every merge")
        return self


class TokenizerJson(LenientModel):
    """``tokenizer.json``: the keys that the library uses without checking them."""

    added_tokens: list[AddedToken] = []
    model: TokenizerModel


class SerializedToken(LenientModel):
    """A token as the library saves it; it has further keys."""

    content: str


TokenText = str | SerializedToken | None


class NamedTemplate(LenientModel):
    """One of several chat templates."""

    name: str
    template: str


class TokenizerConfigFile(LenientModel):
    """``tokenizer_config.json`` and ``special_tokens_map.json``."""

    eos_token: TokenText = None
    bos_token: TokenText = None
    add_bos_token: bool | None = None
    additional_special_tokens: list[str | SerializedToken] | None = None
    chat_template: str | list[NamedTemplate] | None = None

    def values(self) -> dict[str, Any]:
        """Returns all keys of the file with their values."""
        return self.model_dump(exclude_unset=True)


class EndTokens(LenientModel):
    """``generation_config.json`` and ``config.json``: the ids of the tokens that end a text."""

    eos_token_id: int | list[int] | None = None


def read_beside(path: Path, model: type[Read]) -> Read:
    """Reads a file into `model`, which has default values for a missing file.

    Raises:
        UserError: The file cannot be read, is not JSON, or has values of other types.
    """
    try:
        content = read_saved(path)
    except FileNotFoundError:
        return model()
    except OSError as error:
        fix = "make it a readable file, or remove it"
        raise UserError(f"the file cannot be read ({error.strerror})", where=str(path), fix=fix) from None
    try:
        return parse_json(content, model, path.name)
    except JsonError as error:
        fix = "copy the file again from where the tokenizer is from"
        raise UserError(str(error), where=str(path), fix=fix) from None
