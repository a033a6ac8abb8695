"""From documents to token ids and the mask of those that carry loss.

- A conversation is its chat template's text. It brings its own first and last tokens, and none is added.
- An instruction in Alpaca's form is a conversation if the tokenizer or the YAML has a chat template; otherwise it is
  a prompt with its completion, in the form "### Instruction:".
- A prompt with its completion is one text between the tokens that begin and end a document; the completion and the end
  carry loss.
- All of a text carries loss, with the token that ends it.

Every text is encoded as a whole, as it is in use; a token carries loss when it covers a character that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trainer.data.source.documents import TextChunk
from trainer.data.source.samples import Sample
from trainer.data.tokens.chat_template import ChatTemplate, EndlessTemplateError
from trainer.data.tokens.loss_spans import Spans
from trainer.data.tokens.tokenizer import Offsets, Tokenizer
from trainer.errors import UserError


class Encoded(NamedTuple):
    """The tokens of some documents; the last may go on in the next one."""

    tokens: np.ndarray  # unsigned [tokens]
    has_loss: np.ndarray | None  # bool [tokens]; None where all carry loss
    ends: np.ndarray  # int64 [documents that end here], behind the last token of each
    source_bytes: int  # bytes of the source that they consumed, for progress
    num_conversations: int = 0  # documents with a prompt: conversations, instructions, prompts with completions
    num_rendered: int = 0  # those of them that the chat template wrote


class _UnencodedDocument(NamedTuple):
    """A document before it is encoded."""

    text: str
    spans: Spans | None  # characters that carry loss; None where all do
    is_rendered: bool
    source_bytes: int


def encode_text_chunks(pieces: Iterable[TextChunk], tokenizer: Tokenizer, group_bytes: int) -> Iterator[Encoded]:
    """Encodes the pieces of text documents, `group_bytes` at a time."""
    eos = np.array([tokenizer.eos_id], np.uint32)
    if tokenizer.bos_id is None:
        bos = []
    else:
        bos = [np.array([tokenizer.bos_id], np.uint32)]
    in_document = False
    for group in _groups(pieces, lambda piece: len(piece.text), group_bytes):
        parts = []
        lengths = []
        ends = []
        encoded = tokenizer.encode_utf8([piece.text for piece in group])
        for piece, ids in zip(group, encoded, strict=True):
            part = [*([] if in_document else bos), ids, *([eos] if piece.ends_document else [])]
            parts.extend(part)
            lengths.append(sum(map(len, part)))
            ends.append(piece.ends_document)
            in_document = not piece.ends_document
        cumulative = np.cumsum(lengths, dtype=np.int64)
        source_bytes = sum(piece.source_bytes for piece in group)
        yield Encoded(np.concatenate(parts), None, cumulative[np.array(ends, bool)], source_bytes)


def encode_samples(
    samples: Iterable[tuple[Sample, int]],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    train_on: str,
    group_bytes: int,
    report: Callable[[UserError], None],
) -> Iterator[Encoded]:
    """Encodes samples, each with its bytes of the source, `group_bytes` at a time.

    `report` gets the error of a conversation that the template refuses; if it returns, the sample is left out. That of
    a template which does not end is raised: with many such conversations the run would not begin.
    """

    def documents() -> Iterator[_UnencodedDocument]:
        for sample, source_bytes in samples:
            try:
                yield _document(sample, template, train_on, source_bytes)
            except EndlessTemplateError:
                raise
            except UserError as error:
                report(error)

    for group in _groups(documents(), lambda document: len(document.text), group_bytes):
        yield _encode_documents(group, tokenizer)


def _groups(items: Iterable, size_of: Callable[..., int], group_size: int) -> Iterator[list]:
    group = []
    held = 0
    for item in items:
        group.append(item)
        held += size_of(item)
        if held >= group_size:
            yield group
            group = []
            held = 0
    if group:
        yield group


def _document(sample: Sample, template: ChatTemplate, train_on: str, source_bytes: int) -> _UnencodedDocument:
    if sample.messages is not None and (template.is_given or not sample.text):
        text, spans = template.spans(sample.messages, sample.tools, train_on, sample.where)
        return _UnencodedDocument(text, spans, True, source_bytes)
    if not sample.prompt or train_on == "all":
        if not sample.prompt:
            spans = None
        else:
            spans = [(0, len(sample.prompt) + len(sample.text))]
        return _UnencodedDocument(sample.prompt + sample.text, spans, False, source_bytes)
    text = sample.prompt + sample.text
    return _UnencodedDocument(text, [(len(sample.prompt), len(text))], False, source_bytes)


def _encode_documents(documents: Sequence[_UnencodedDocument], tokenizer: Tokenizer) -> Encoded:
    eos = np.array([tokenizer.eos_id], np.uint32)
    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], np.uint32)
    whole = [document.text.encode() for document in documents if document.spans is None]
    masked = [document.text for document in documents if document.spans is not None]
    encoded_whole = iter(tokenizer.encode_utf8(whole) if whole else ())
    encoded_masked = iter(tokenizer.encode_offsets(masked) if masked else ())
    parts = []
    masks = []
    ends = []
    length = 0
    for document in documents:
        if document.spans is None:
            ids = next(encoded_whole)
            mask = np.ones(len(ids), bool)
        else:
            offsets = next(encoded_masked)
            ids = offsets.ids
            mask = loss_mask(offsets, document.spans)
        if not document.is_rendered:
            ids = np.concatenate([bos, ids, eos])
            mask = np.concatenate([np.full(len(bos), document.spans is None), mask, [True]])
        parts.append(ids)
        masks.append(mask)
        length += len(ids)
        ends.append(length)
    return Encoded(
        np.concatenate(parts),
        np.concatenate(masks) if masked else None,
        np.array(ends, np.int64),
        sum(document.source_bytes for document in documents),
        num_conversations=len(masked),
        num_rendered=sum(document.is_rendered for document in documents),
    )


def loss_mask(offsets: Offsets, spans: Spans) -> np.ndarray:
    """Which tokens cover a character of the spans.

    Returns:
        bool [tokens]. A token without a character of its own, between two that carry loss, carries loss too.
    """
    starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    first = np.searchsorted(offsets.ends, starts, side="right")
    last = np.searchsorted(offsets.starts, ends, side="left")
    mask = np.zeros(len(offsets.ids), bool)
    for begin, end in zip(first, last, strict=True):
        mask[begin:end] = True
    return mask
