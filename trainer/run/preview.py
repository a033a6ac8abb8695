"""The command `data`: what will be trained on, as the model sees it. Never loads MindSpore."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data import IGNORE_INDEX, Batch, SequenceDataset, Tokenizer, build_eval_dataset, build_train_dataset
from trainer.data.batches.blend import SourceShare
from trainer.data.batches.loader import epoch_order
from trainer.data.datasets import EVAL, TRAIN, find_tokenizer
from trainer.errors import EXIT_OK, UserError
from trainer.plan.render import Section, data_source_rows, format_count, print_sections
from trainer.run.prepare import BuildProgress

if TYPE_CHECKING:
    from trainer.config import Config

_PERCENTILES = (0, 10, 25, 50, 75, 90, 99, 100)
_BAR_COLUMNS = 40
_TIMED_TOKENS = 100_000  # for tokens a second of tokenizing
_OPEN = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}"
_CLOSE = "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"
# Text of the data must not control the terminal.
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Segment(NamedTuple):
    """One document of a sequence."""

    tokens: list[int]
    labels: list[int]  # the next tokens; -100 where nothing is trained
    text: str
    trained_text: str  # of the labels


@dataclass(frozen=True)
class Statistics:
    """The numbers of a data set; counts are those of an epoch, or of all documents where text is cut."""

    packing: str
    samples: int
    tokens: int
    loss_tokens: int
    sequences: int
    padding: float
    truncated: int
    dropped: int
    bad_records: int  # that were skipped
    lengths: dict[str, int]  # percentiles of the tokens of a document before it is truncated
    tokenizing_tokens_per_second: float | None
    sources: tuple[SourceShare, ...]  # empty where there is one


class TokenIds:
    """Stands in for the tokenizer of data that are tokens already, where the file names none: shows their ids."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token_id} " for token_id in ids)


class Preview(NamedTuple):
    rows: list[list[Segment]]
    statistics: Statistics
    tokenizer: Tokenizer | TokenIds


def preview(config: Config, num_rows: int, notes: list[str]) -> Preview:
    """Reads the first sequences that the run trains on (with run_mode eval: evaluates on), and counts all of them.

    Raises:
        UserError: The data cannot be read, or are images.
        RunError: The token file cannot be written.
    """
    if num_rows < 0:
        raise UserError("must be at least 0", key="--rows", value=num_rows, fix="write for example --rows 3")
    if config.classifier is not None:
        key = "model.classifier"
        fix = "use plan, which checks the images"
        raise UserError("images have no tokens to show", where=config.source.where(key), key=key, fix=fix)
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
        fix = "set train_dataset.held_out, for example to 0.05, or write an eval_dataset"
        raise UserError(
            "there is nothing to evaluate on", where=config.source.where("run_mode"), key="run_mode", fix=fix
        )
    wanted = getattr(config, section)
    shows_ids = not wanted.data_loader.reads_text and wanted.tokenizer.type == "bytes"
    if shows_ids:
        tokenizer = TokenIds()
    else:
        tokenizer = find_tokenizer(config, section)
    indices = epoch_order(dataset, shuffle=shuffle, seed=config.seed, epoch=0)[:num_rows]
    batch = None
    if len(indices):
        batch = dataset.batch(indices)
    rows = [split_segments(batch, row, tokenizer) for row in range(len(indices))]
    return Preview(rows, _statistics(dataset, tokenizer), tokenizer)


def split_segments(batch: Batch, row: int, tokenizer: Tokenizer | TokenIds) -> list[Segment]:
    """The documents of a sequence, without padding."""
    ids = batch.input_ids[row]
    labels = batch.labels[row]
    segment_ids = batch.segment_ids[row]
    found = []
    for number in range(int(segment_ids[-1]) + 1):
        own_ids = ids[segment_ids == number]
        own_labels = labels[segment_ids == number]
        learnt = own_labels[own_labels != IGNORE_INDEX]
        if number and number == segment_ids[-1] and not len(learnt) and not own_ids.any():
            break  # padding
        tokens = own_ids.tolist()
        found.append(Segment(tokens, own_labels.tolist(), _decode(tokenizer, tokens), _decode(tokenizer, learnt)))
    return found


def _decode(tokenizer: Tokenizer | TokenIds, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _statistics(dataset: SequenceDataset, tokenizer: Tokenizer | TokenIds) -> Statistics:
    counts = dataset.count_documents()
    packed = dataset.packing
    values = np.percentile(counts.lengths, _PERCENTILES, method="lower").astype(int).tolist()
    return Statistics(
        packing=packed.packing if packed is not None else "none",
        samples=packed.samples if packed is not None else dataset.num_documents,
        tokens=dataset.num_tokens,
        loss_tokens=counts.loss_tokens,
        sequences=dataset.num_sequences,
        padding=packed.padding if packed is not None else 0.0,
        truncated=packed.truncated if packed is not None else 0,
        dropped=packed.dropped if packed is not None else 0,
        bad_records=packed.bad_records if packed is not None else 0,
        lengths={f"p{percent}": value for percent, value in zip(_PERCENTILES, values, strict=True)},
        tokenizing_tokens_per_second=None if isinstance(tokenizer, TokenIds) else _tokenizing_rate(dataset, tokenizer),
        sources=getattr(dataset, "shares", ()),
    )


def _tokenizing_rate(dataset: SequenceDataset, tokenizer: Tokenizer) -> float | None:
    """Tokens a second, measured on the text of the first sequences; None without a sequence."""
    count = min(dataset.num_sequences, max(_TIMED_TOKENS // dataset.seq_length, 1))
    if not count:
        return None
    texts = [_decode(tokenizer, ids.tolist()) for ids in dataset.batch(range(count)).input_ids]
    began = time.perf_counter()
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    return tokens / (time.perf_counter() - began)


def print_preview(config: Config, num_rows: int, as_json: bool) -> int:
    """Prints a preview: as JSON, with colours on a terminal, with marks into a pipe."""
    notes: list[str] = []
    found = preview(config, num_rows, notes)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if as_json:
        rows: list[dict[str, Any]] = [{"segments": [segment._asdict() for segment in row]} for row in found.rows]
        print(json.dumps({"rows": rows, "statistics": asdict(found.statistics)}))
        return EXIT_OK
    _print_rows(found)
    print_sections(_sections(found.statistics))
    return EXIT_OK


def _print_rows(found: Preview) -> None:
    has_colour = sys.stdout.isatty()
    if found.rows:
        if has_colour:
            legend = "are green"
        else:
            legend = f"stand between {_OPEN} and {_CLOSE}"
        print(f"Tokens with a loss {legend}.\n")
    for number, row in enumerate(found.rows, start=1):
        for place, segment in enumerate(row, start=1):
            with_loss = sum(label != IGNORE_INDEX for label in segment.labels)
            tokens = format_count(len(segment.tokens), "tokens")
            head = f"row {number}, document {place} of {len(row)}: {tokens}, {with_loss} with loss"
            parts = [(text.translate(_ESCAPED), has_loss) for text, has_loss in _parts(segment, found.tokenizer)]
            if has_colour:
                from rich.console import Console
                from rich.text import Text

                text = Text.assemble(*((part, "bold green" if has_loss else "") for part, has_loss in parts))
                Console().print(Text(head, style="dim"), text, "", sep="\n", soft_wrap=True, highlight=False)
            else:
                marked = "".join(f"{_OPEN}{part}{_CLOSE}" if has_loss else part for part, has_loss in parts)
                print(f"-- {head}\n{marked}\n")


def _parts(segment: Segment, tokenizer: Tokenizer | TokenIds) -> Iterator[tuple[str, bool]]:
    """The text in parts, each with whether its tokens are the labels of the tokens before them."""
    has_loss = np.array([False, *(label != IGNORE_INDEX for label in segment.labels[:-1])])
    ends = [*(np.flatnonzero(np.diff(has_loss)) + 1).tolist(), len(has_loss)]
    shown = 0
    for end in ends:
        # A tokenizer may drop white space at the start of a text, so a part is not decoded alone.
        text = _decode(tokenizer, segment.tokens[:end])
        yield text[shown:], bool(has_loss[end - 1])
        shown = len(text)


def _sections(found: Statistics) -> list[Section]:
    share = ""
    if found.tokens:
        share = f" ({found.loss_tokens / found.tokens:.1%})"
    rows = [
        ("", ""),
        ("packing", found.packing),
        ("samples", f"{found.samples:,}"),
        ("tokens", f"{found.tokens:,}"),
        ("with loss", f"{found.loss_tokens:,}{share}"),
        ("sequences", f"{found.sequences:,}, {found.padding:.1%} padding"),
        ("truncated", f"{found.truncated:,}"),
        ("dropped", f"{found.dropped:,}"),
    ]
    rows += [("bad records", f"{found.bad_records:,} skipped")] if found.bad_records else []
    if found.tokenizing_tokens_per_second is not None:
        rows.append(("tokenizing", f"{found.tokenizing_tokens_per_second:,.0f} tokens/s"))
    rows += data_source_rows(found.sources)
    longest = max(found.lengths.values())
    bars = [
        (name, f"{length:,}", "#" * max(round(_BAR_COLUMNS * length / longest), 1))
        for name, length in found.lengths.items()
    ]
    return [("statistics", rows), ("lengths", [("percentile", "tokens", ""), *bars])]
