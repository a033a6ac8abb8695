"""What generates text: from the configuration to a generator, from text to tokens and back. Run modes predict and chat
share it with the texts that a training samples from its model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data import load_tokenizer
from trainer.errors import UserError
from trainer.parallel.mesh import Mesh, model_replica
from trainer.plan.memory import MOST_SAMPLED_TOKENS

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import ChatTemplate, Tokenizer
    from trainer.models.generate import Generator, Sampling
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.host_group import CpuGroup
    from trainer.parallel.world import World
    from trainer.run.session import Session


class ModelReplica(NamedTuple):
    """Which copy of the model this rank computes, and with whom: see `trainer.parallel.mesh.ModelReplicaRanks`.

    Attributes:
        group: None where the rank is alone.
    """

    number: int = 0
    copies: int = 1
    group: CpuGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.group is None or self.group.rank == 0

    def agree(self, tokens: list[int | None]) -> list[int | None]:
        """The new tokens of the first rank, on all of them."""
        if self.group is None:
            return tokens
        sent = np.array([-1 if token is None else token for token in tokens], np.int64)
        return [None if token < 0 else token for token in self.group.broadcast(sent, 0).tolist()]

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        if self.group is None:
            return flag
        return bool(self.group.all_gather(np.array([flag])).any())


def local_replica(communicator: Communicator) -> ModelReplica:
    """The copy of the model that a rank of these computes."""
    if not communicator.shards_model:
        return ModelReplica(communicator.rank, communicator.size)
    number, copies, ranks = model_replica(Mesh(communicator.layout.degrees), communicator.rank)
    return ModelReplica(number, copies, communicator.group.new_subgroup(ranks) if len(ranks) > 1 else None)


def open_generator(
    config: Config, weights: Mapping[str, np.ndarray], ends: Iterable[int], world: World, device: str
) -> tuple[Generator, Communicator, ModelReplica]:
    """The model with its weights, ready to generate; here MindSpore loads."""
    from trainer.run.session import open_session

    session = open_session(config, weights, world, device)
    copy = local_replica(session.communicator)
    return generator_of(session, ends, copy), session.communicator, copy


def generator_of(session: Session, ends: Iterable[int], copy: ModelReplica) -> Generator:
    """Generates with the weights that the model has now, on a CPU with native layers, whatever trains the model."""
    from trainer.models.generate import Generator

    of_stages = {}
    if session.pipeline is not None:
        of_stages = {"chunks": session.pipeline.generation_chunks(), "share": session.pipeline.share_logits}
    native = session.device == "CPU"
    return Generator(session.model, session.build_inputs, list(ends), **of_stages, agree=copy.agree, native=native)


class Sampler:
    """Continues `sample_prompt` with the model that is being trained.

    Raises:
        UserError: There is no tokenizer, or a prompt is empty, too long, or has a token that the model does not know.
    """

    def __init__(self, config: Config) -> None:
        given = config.sample_prompt
        key = "sample_prompt"
        self.config = config
        self.tokenizer = load_tokenizer(config)
        if isinstance(given, str):
            self.prompts = [given]
        else:
            self.prompts = list(given or ())
        self.encoded = []
        self.limits = []
        limit = context_length(config)
        for prompt in self.prompts:
            try:
                ids = encode_prompt(config, self.tokenizer, prompt, with_bos=True)
                if len(ids) >= limit:
                    rule = f"a prompt of {len(ids)} tokens leaves no room for new ones in {limit}"
                    raise UserError(rule, value=prompt, fix="shorten it")
            except UserError as error:
                raise error.with_location(config.source.where(key), key) from None
            self.encoded.append(ids)
            self.limits.append(min(limit - len(ids), config.decoder.max_new_tokens or MOST_SAMPLED_TOKENS))

    def sample(self, session: Session, stop: Callable[[], bool]) -> list[str] | None:
        """The text that follows each prompt, the same for the same weights; None where `stop` cut it short, and on
        ranks that have nothing to do: the ranks of one copy of the model sample, but all ranks call this."""
        copy = local_replica(session.communicator)
        with session.whole_weights():
            if copy.number > 0:
                return None
            generator = generator_of(session, end_ids(self.config, self.tokenizer), copy)
            steps = generator.stream(self.encoded, self.limits, sampling_of(self.config))
            texts = ["" for _ in self.prompts]
            with contextlib.closing(steps):
                for pieces in decoded(steps, len(texts), self.tokenizer, generator):
                    # Ranks that divide the model stop together.
                    if copy.any(stop()):
                        return None
                    texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        return texts


def sampling_of(config: Config) -> Sampling:
    from trainer.models.generate import Sampling

    settings = config.decoder
    return Sampling(
        do_sample=settings.do_sample,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        repetition_penalty=settings.repetition_penalty,
        seed=config.seed,
    )


def context_length(config: Config) -> int:
    """Tokens that a prompt and its answer may have together.

    Raises:
        UserError: The model has no positions for so many.
    """
    settings = config.decoder
    length = settings.seq_length
    if not config.source.where("model.model_config.seq_length"):  # a model folder has none
        length = min(length, settings.max_positions)
    limit = settings.max_decode_length or length
    positions = max(length, settings.max_positions)
    if limit > positions:
        key = "model.model_config.max_decode_length"
        fix = f"use at most {positions}, or raise max_position_embeddings"
        rule = f"the model has positions for {positions} tokens"
        raise UserError(rule, where=config.source.where(key), key=key, value=limit, fix=fix)
    return limit


def encode_prompt(config: Config, tokenizer: Tokenizer, text: str, *, with_bos: bool) -> list[int]:
    """The tokens of a prompt.

    Raises:
        UserError: It is empty or not UTF-8, or has a token that the model does not know. The error has no location yet.
    """
    try:
        ids = tokenizer.encode(text)
    except (TypeError, UnicodeError):  # lone surrogates: what was typed was not UTF-8
        raise UserError("a prompt is not valid UTF-8", value=text, fix="write it in UTF-8") from None
    if with_bos and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise UserError("a prompt is empty", value=text, fix="give at least a character")
    vocab_size = config.decoder.vocab_size
    if max(ids) >= vocab_size:
        rule = f"a prompt has token {max(ids)}, beyond the model's vocabulary of {vocab_size}"
        raise UserError(rule, value=text, fix="use the tokenizer that the model was trained with")
    return ids


def encode_chat(
    config: Config,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    where: str = "",
) -> list[int]:
    """The tokens of a conversation up to where the assistant is to go on; `where` is its place, for messages.

    Raises:
        UserError: The template refuses the conversation, or as `encode_prompt`.
    """
    text = template.render(messages, tools, add_generation_prompt=True, where=where)
    return encode_prompt(config, tokenizer, text, with_bos=False)  # the template has written it


def end_ids(config: Config, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> list[int]:
    """The tokens that end a text, or with a template an answer."""
    eos = config.decoder.eos_token_id
    ends = [*tokenizer.eos_ids, *([eos] if isinstance(eos, int) else eos or [])]
    turn_end = None
    if template is not None:
        turn_end = template.turn_end_id
    if turn_end is None:
        return ends
    return [*ends, turn_end]


def decoded(
    steps: Iterable[Sequence[int | None]], rows: int, tokenizer: Tokenizer, generator: Generator
) -> Iterator[list[str]]:
    """The new text of each of the rows, step by step; at the end what was held back as an incomplete character."""
    streams = [tokenizer.stream() for _ in range(rows)]
    for tokens in steps:
        yield [
            "" if token is None or token in generator.eos_ids else stream.push(token)
            for stream, token in zip(streams, tokens, strict=True)
        ]
    yield [stream.finish() for stream in streams]


def print_text(text: str) -> None:
    """Prints text as it comes; what the terminal's encoding lacks appears as an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
