"""The command `data`: shows the first sequences of the data as the model sees them, without MindSpore."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.config.checks.model import decoder_problems
from trainer.config.checks.problem import raise_problems
from trainer.config.checks.rules import evaluation_data_error
from trainer.data import IGNORE_INDEX, SequenceDataset, Tokenizer, build_eval_dataset, build_train_dataset
from trainer.data.batches.batch import AnyBatch, PairBatch
from trainer.data.batches.blend import SourceShare
from trainer.data.batches.loader import epoch_order
from trainer.data.batches.packing import PackingReport
from trainer.data.datasets import EVAL, TRAIN, find_tokenizer
from trainer.errors import EXIT_OK, UserError
from trainer.plan.render import data_source_rows, format_count, record_weight_rows
from trainer.run.prepare import BuildProgress, print_note
from trainer.tables import Rows, Section, print_sections

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.runner import LossConfig

_PERCENTILES = (0, 10, 25, 50, 75, 90, 99, 100)
_BAR_COLUMNS = 40
_TIMED_TOKENS = 100_000  # tokens whose tokenizing is timed
_OPEN = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}"
_CLOSE = "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"
# Text of the data must not control the terminal.
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Segment(NamedTuple):
    """One document of a sequence.

    Attributes:
        labels: The next token of each token; -100 if the label is masked.
        trained_text: The text of the labels that are not masked.
        answer: What a loss of preferences takes the document for; empty for other losses.
    """

    tokens: list[int]
    labels: list[int]
    text: str
    trained_text: str
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class Statistics(PackingReport):
    """The statistics of a data set. Counts are per epoch; with packing `cut` they count all documents.

    Attributes:
        lengths: Percentiles of a document's tokens before it is truncated.
        sources: The data sources of a blend; empty for a single data source.
    """

    tokens: int
    loss_tokens: int
    lengths: dict[str, int]
    tokenizing_tokens_per_second: float | None
    sources: tuple[SourceShare, ...]


class TokenIds:
    """Shows token ids as text, for data that consists of tokens and has no tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the ids, each followed by a space."""
        return "".join(f"{token_id} " for token_id in ids)


class Preview(NamedTuple):
    """The first sequences of a data set as documents, and its statistics."""

    rows: list[list[Segment]]
    statistics: Statistics
    tokenizer: Tokenizer | TokenIds


def preview(config: Config, num_rows: int, notes: list[str]) -> Preview:
    """Reads the first sequences that the run trains on (run_mode eval: evaluates on), and the statistics of all.

    Raises:
        UserError: The data cannot be read, or the model is not a decoder.
        RunError: The token cache cannot be written.
    """
    if num_rows < 0:
        raise UserError("must be at least 0", key="--rows", value=num_rows, fix="write for example --rows 3")
    raise_problems(decoder_problems(config, "data"))
    evaluates = config.run_mode == "eval"
    section = TRAIN
    if evaluates and config.eval_dataset is not None:
        section = EVAL
    if evaluates:
        dataset = build_eval_dataset(config, BuildProgress(), notes.append)
        shuffle = False
    else:
        dataset, _ = build_train_dataset(config, BuildProgress(), notes.append)
        shuffle = config.train_dataset.data_loader.shuffle
    if dataset is None:
        raise evaluation_data_error(config, "run_mode").error
    data_section = getattr(config, section)
    tokenizer: Tokenizer | TokenIds = TokenIds()
    if data_section.data_loader.reads_text or data_section.tokenizer.type != "bytes":
        tokenizer = find_tokenizer(config, section)
    indices = epoch_order(dataset, shuffle=shuffle, seed=config.seed, epoch=0)[:num_rows]
    rows = []
    if len(indices):
        batch = dataset.batch(indices)
        rows = [_name_answers(config.preferences, batch, row, split_segments(batch, row, tokenizer))
                for row in range(len(indices))]  # fmt: skip
    return Preview(rows, _statistics(dataset, tokenizer), tokenizer)


def _name_answers(loss: LossConfig | None, batch: AnyBatch, row: int, segments: list[Segment]) -> list[Segment]:
    """Names the documents that a loss of preferences compares."""
    if loss is None or not isinstance(batch, PairBatch):
        return segments
    named = []
    for number, segment in enumerate(segments):
        if loss.answers != "labels":
            answer = ("chosen", "rejected")[number % 2]
        elif number % 2:
            answer = "answer to another prompt"
        else:
            value = batch.values[row][batch.segment_ids[row] == number][0]
            answer = ("undesirable", "desirable")[int(value)]
        named.append(segment._replace(answer=answer))
    return named


def split_segments(batch: AnyBatch, row: int, tokenizer: Tokenizer | TokenIds) -> list[Segment]:
    """Splits a sequence into its documents, without padding."""
    ids = batch.input_ids[row]
    labels = batch.labels[row]
    segment_ids = batch.segment_ids[row]
    segments = []
    for number in range(int(segment_ids[-1]) + 1):
        is_document = segment_ids == number
        document_ids = ids[is_document]
        document_labels = labels[is_document]
        trained = document_labels[document_labels != IGNORE_INDEX]
        if number and number == segment_ids[-1] and not len(trained) and not document_ids.any():
            break  # padding
        tokens = document_ids.tolist()
        text = _decode(tokenizer, tokens)
        segments.append(Segment(tokens, document_labels.tolist(), text, _decode(tokenizer, trained)))
    return segments


def _decode(tokenizer: Tokenizer | TokenIds, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _statistics(dataset: SequenceDataset, tokenizer: Tokenizer | TokenIds) -> Statistics:
    counts = dataset.count_documents()
    packed = dataset.packing or PackingReport("none", dataset.num_documents, dataset.num_sequences, padding=0.0)
    values = np.percentile(counts.lengths, _PERCENTILES, method="lower").astype(int).tolist()
    rate = None
    if not isinstance(tokenizer, TokenIds):
        rate = _tokenizing_rate(dataset, tokenizer)
    return Statistics(
        **vars(packed) | {"sequences": dataset.num_sequences},
        tokens=dataset.num_tokens,
        loss_tokens=counts.loss_tokens,
        lengths={f"p{percent}": value for percent, value in zip(_PERCENTILES, values, strict=True)},
        tokenizing_tokens_per_second=rate,
        sources=getattr(dataset, "shares", ()),
    )


def _tokenizing_rate(dataset: SequenceDataset, tokenizer: Tokenizer) -> float | None:
    """Returns the tokens per second of tokenizing the text of the first sequences; None without a sequence."""
    count = min(dataset.num_sequences, max(_TIMED_TOKENS // dataset.seq_length, 1))
    if not count:
        return None
    texts = [_decode(tokenizer, ids.tolist()) for ids in dataset.batch(range(count)).input_ids]
    began = time.perf_counter()
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    return tokens / (time.perf_counter() - began)


def print_preview(config: Config, num_rows: int, as_json: bool) -> int:
    """Prints the first sequences and the statistics; returns the exit code.

    Tokens with a loss are green on a terminal and marked in a pipe. JSON has their labels.
    """
    notes: list[str] = []
    data = preview(config, num_rows, notes)
    for note in notes:
        print_note(note)
    if as_json:
        rows: list[dict[str, Any]] = [{"segments": list(map(_json_of, row))} for row in data.rows]
        print(json.dumps({"rows": rows, "statistics": asdict(data.statistics)}))
        return EXIT_OK
    _print_rows(data)
    print_sections(_sections(data.statistics))
    return EXIT_OK


def _json_of(segment: Segment) -> dict[str, Any]:
    fields = segment._asdict()
    if not segment.answer:
        del fields["answer"]
    return fields


def _print_rows(data: Preview) -> None:
    has_colour = sys.stdout.isatty()
    if data.rows:
        legend = f"stand between {_OPEN} and {_CLOSE}"
        if has_colour:
            legend = "are green"
        print(f"Tokens with a loss {legend}.\n")
    for number, row in enumerate(data.rows, start=1):
        for place, segment in enumerate(row, start=1):
            with_loss = sum(label != IGNORE_INDEX for label in segment.labels)
            tokens = format_count(len(segment.tokens), "tokens")
            name = f"row {number}, document {place} of {len(row)}"
            if segment.answer:
                name += f", {segment.answer}"
            head = f"{name}: {tokens}, {with_loss} with loss"
            parts = [(text.translate(_ESCAPED), has_loss) for text, has_loss in _parts(segment, data.tokenizer)]
            if has_colour:
                _print_coloured(head, parts)
            else:
                marked = "".join(f"{_OPEN}{part}{_CLOSE}" if has_loss else part for part, has_loss in parts)
                print(f"-- {head}\n{marked}\n")


def _print_coloured(head: str, parts: Sequence[tuple[str, bool]]) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for part, has_loss in parts:
        if has_loss:
            text.append(part, "bold green")
        else:
            text.append(part)
    Console().print(Text(head, style="dim"), text, "", sep="\n", soft_wrap=True, highlight=False)


def _parts(segment: Segment, tokenizer: Tokenizer | TokenIds) -> Iterator[tuple[str, bool]]:
    """Yields the text in parts, each with whether its tokens have a loss, as labels of the tokens before them."""
    has_loss = np.array([False, *(label != IGNORE_INDEX for label in segment.labels[:-1])])
    ends = [*(np.flatnonzero(np.diff(has_loss)) + 1).tolist(), len(has_loss)]
    shown = 0
    for end in ends:
        # A tokenizer may drop white space at the start of a text, so a part is not decoded alone.
        text = _decode(tokenizer, segment.tokens[:end])
        yield text[shown:], bool(has_loss[end - 1])
        shown = len(text)


def _sections(statistics: Statistics) -> list[Section]:
    share = ""
    if statistics.tokens:
        share = f" ({statistics.loss_tokens / statistics.tokens:.1%})"
    rows: Rows = [
        ("", ""),
        ("packing", statistics.packing),
        ("samples", f"{statistics.samples:,}"),
        ("tokens", f"{statistics.tokens:,}"),
        ("with loss", f"{statistics.loss_tokens:,}{share}"),
        ("sequences", f"{statistics.sequences:,}, {statistics.padding:.1%} padding"),
        ("truncated", f"{statistics.truncated:,}"),
        ("dropped", f"{statistics.dropped:,}"),
    ]
    if statistics.bad_records:
        rows.append(("bad records", f"{statistics.bad_records:,} skipped"))
    if statistics.tokenizing_tokens_per_second is not None:
        rows.append(("tokenizing", f"{statistics.tokenizing_tokens_per_second:,.0f} tokens/s"))
    rows += [*record_weight_rows(statistics.weights), *data_source_rows(statistics.sources)]
    longest = max(statistics.lengths.values())
    lengths: Rows = [("percentile", "tokens", "")]
    for name, length in statistics.lengths.items():
        bar = "#" * max(round(_BAR_COLUMNS * length / longest), 1)
        lengths.append((name, f"{length:,}", bar))
    return [("statistics", rows), ("lengths", lengths)]
