"""Encodes documents as token ids, with a mask of the tokens that carry loss.

- A conversation is encoded as its chat template renders it; no token is added before or after it.
- An instruction in Alpaca's form is a conversation if the tokenizer or the YAML has a chat template; otherwise it is
  a prompt with its completion, in the form "### Instruction:".
- A prompt with its completion is one text between the tokens that begin and end a document; the completion and the end
  carry loss.
- A text carries loss in all its tokens, and in the token that ends it.
- The two answers of a pair are two documents, the chosen one first. So are an answer with a label and the answer to
  another prompt.

Prompt and answer are encoded together, as in use. A token carries loss if it covers a character that carries loss.
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
    """The tokens of a group of documents; the last document may continue in the next group."""

    tokens: np.ndarray  # unsigned [tokens]
    has_loss: np.ndarray | None  # bool [tokens]; None if all carry loss
    ends: np.ndarray  # int64 [documents that end here], the index after the last token of each
    source_bytes: int  # bytes of the source that they consumed, for progress
    num_conversations: int = 0  # documents with a prompt: conversations, instructions, prompts with completions
    num_rendered: int = 0  # how many of these the chat template rendered
    values: np.ndarray | None = None  # float32 [documents], `Sample.value` of each; None if all are 0


class _UnencodedDocument(NamedTuple):
    """A document before it is encoded."""

    text: str
    spans: Spans | None  # characters that carry loss; None if all do
    is_rendered: bool
    source_bytes: int
    value: float = 0.0


def encode_text_chunks(chunks: Iterable[TextChunk], tokenizer: Tokenizer, group_bytes: int) -> Iterator[Encoded]:
    """Encodes the chunks of text documents, `group_bytes` at a time."""
    eos = np.array([tokenizer.eos_id], np.uint32)
    in_document = False
    for group in _groups(chunks, lambda chunk: len(chunk.text), group_bytes):
        parts = []
        lengths = []
        ends = []
        encoded = tokenizer.encode_utf8([chunk.text for chunk in group])
        for chunk, ids in zip(group, encoded, strict=True):
            part = [ids]
            if not in_document and tokenizer.bos_id is not None:
                part.insert(0, np.array([tokenizer.bos_id], np.uint32))
            if chunk.ends_document:
                part.append(eos)
            parts.extend(part)
            lengths.append(sum(map(len, part)))
            ends.append(chunk.ends_document)
            in_document = not chunk.ends_document
        cumulative = np.cumsum(lengths, dtype=np.int64)
        source_bytes = sum(chunk.source_bytes for chunk in group)
        yield Encoded(np.concatenate(parts), None, cumulative[np.array(ends, bool)], source_bytes)


def encode_samples(
    samples: Iterable[tuple[Sample, int]], tokenizer: Tokenizer, template: ChatTemplate, train_on: str,
    group_bytes: int, report: Callable[[UserError], None],
) -> Iterator[Encoded]:  # fmt: skip
    """Encodes samples, each with its bytes of the source, `group_bytes` at a time.

    `report` takes the error of a conversation that the template refuses; if it returns, the sample is left out. If the
    template does not end on a conversation, that error is raised: many such conversations would take hours.
    """

    def documents() -> Iterator[_UnencodedDocument]:
        """Yields the documents, and reports each record that cannot become one."""
        for sample, source_bytes in samples:
            try:
                answers = [_document(sample, template, train_on, source_bytes)]
                if sample.other is not None:
                    answers.append(_document(sample.other, template, train_on, 0))
            except EndlessTemplateError:
                raise
            except UserError as error:
                report(error)
                continue
            yield from answers

    for group in _groups(documents(), lambda document: len(document.text), group_bytes):
        yield _encode_documents(group, tokenizer)


def _groups(items: Iterable, size_of: Callable[..., int], group_size: int) -> Iterator[list]:
    """Groups consecutive items until their sizes reach `group_size`."""
    group = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= group_size:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _document(sample: Sample, template: ChatTemplate, train_on: str, source_bytes: int) -> _UnencodedDocument:
    if sample.messages is not None and (template.is_given or not sample.text):
        text, spans = template.spans(sample.messages, sample.tools, train_on, sample.where)
        return _UnencodedDocument(text, spans, True, source_bytes, sample.value)
    if not sample.prompt:
        return _UnencodedDocument(sample.text, None, False, source_bytes, sample.value)
    text = sample.prompt + sample.text
    start = len(sample.prompt)
    if train_on == "all":
        start = 0
    return _UnencodedDocument(text, [(start, len(text))], False, source_bytes, sample.value)


def _encode_documents(documents: Sequence[_UnencodedDocument], tokenizer: Tokenizer) -> Encoded:
    eos = np.array([tokenizer.eos_id], np.uint32)
    bos = np.array([], np.uint32)
    if tokenizer.bos_id is not None:
        bos = np.array([tokenizer.bos_id], np.uint32)
    unmasked = [document.text.encode() for document in documents if document.spans is None]
    masked = [document.text for document in documents if document.spans is not None]
    encoded_unmasked = iter(tokenizer.encode_utf8(unmasked))
    encoded_masked = iter(tokenizer.encode_offsets(masked))
    parts = []
    masks = []
    ends = []
    length = 0
    for document in documents:
        if document.spans is None:
            ids = next(encoded_unmasked)
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
    has_loss = None
    if masked:
        has_loss = np.concatenate(masks)
    values = None
    if any(document.value for document in documents):
        values = np.array([document.value for document in documents], np.float32)
    return Encoded(
        np.concatenate(parts),
        has_loss,
        np.array(ends, np.int64),
        sum(document.source_bytes for document in documents),
        num_conversations=len(masked),
        num_rendered=sum(document.is_rendered for document in documents),
        values=values,
    )


def loss_mask(offsets: Offsets, spans: Spans) -> np.ndarray:
    """Finds the tokens that cover a character of the spans.

    Returns:
        bool [tokens]. A token that covers no character, between two tokens that carry loss, carries loss too.
    """
    starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    first = np.searchsorted(offsets.ends, starts, side="right")
    last = np.searchsorted(offsets.starts, ends, side="left")
    mask = np.zeros(len(offsets.ids), bool)
    for begin, end in zip(first, last, strict=True):
        mask[begin:end] = True
    return mask
