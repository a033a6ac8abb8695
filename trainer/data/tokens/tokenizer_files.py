"""The JSON files of a Hugging Face tokenizer, as pydantic models: what is read of them.

A file that is missing says nothing; one that is there must be right: a tokenizer without its end token or its chat
template would train on something else.
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
    """A token that is found in a text before all others."""

    id: TokenId
    content: str


class TokenizerModel(LenientModel):
    """The vocabulary: ids by text, or of Unigram a list of texts with their scores."""

    vocab: dict[str, TokenId] | list[Any] = {}
    merges: Any = None  # hundreds of thousands of pairs, which the library checks
    continuing_subword_prefix: str | None = None

    @model_validator(mode="after")
    def has_prefixes(self) -> TokenizerModel:
        prefix = self.continuing_subword_prefix
        merges = self.merges
        # The library takes it off the second part of each merge, whatever that is.
        for merge in merges if prefix and isinstance(merges, list) else ():
            parts = merge
            if isinstance(merge, str):
                parts = merge.split(" ")
            if not (isinstance(parts, list) and parts and str(parts[-1]).startswith(prefix)):
                raise ValueError("continuing_subword_prefix does not begin the second part of every merge")
        return self


class TokenizerJson(LenientModel):
    """``tokenizer.json``: what the library does not check before it counts on it."""

    added_tokens: list[AddedToken] = []
    model: TokenizerModel


class SerializedToken(LenientModel):
    content: str


TokenText = str | SerializedToken | None


class NamedTemplate(LenientModel):
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
        """What the file says, other keys too."""
        return self.model_dump(exclude_unset=True)


class EndTokens(LenientModel):
    """``generation_config.json`` and ``config.json``: the ids that end a text."""

    eos_token_id: int | list[int] | None = None


def read_beside(path: Path, model: type[Read]) -> Read:
    """Reads a file that may be missing.

    Raises:
        UserError: It cannot be read, or is not what it must be.
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
