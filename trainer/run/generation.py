"""Generates text: makes a generator from the configuration, encodes prompts and decodes tokens.

Run modes predict and chat use this, and a training that samples text from its model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data import load_tokenizer
from trainer.errors import UserError
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.mesh import Mesh, model_replica
from trainer.plan.memory import MAX_SAMPLED_TOKENS

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import ChatTemplate, Tokenizer
    from trainer.models.generate import Generator, Sampling
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World
    from trainer.run.session import Session


class ModelReplica(NamedTuple):
    """The replica of the model that this rank computes.

    Attributes:
        number: The number of the replica, from 0.
        replicas: The number of replicas of the job.
        group: The ranks of this replica; None if the rank computes it alone.
    """

    number: int = 0
    replicas: int = 1
    group: CpuGroup | None = None

    @property
    def is_first_rank(self) -> bool:
        """Returns whether this rank is the first one of its replica."""
        return self.group is None or self.group.rank == 0

    def broadcast_tokens(self, tokens: list[int | None]) -> list[int | None]:
        """Returns, on all ranks of the replica, the new tokens of its first rank."""
        if self.group is None:
            return tokens
        sent = np.array([-1 if token is None else token for token in tokens], np.int64)
        return [None if token < 0 else token for token in self.group.broadcast(sent, 0).tolist()]

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is true on any rank of the replica."""
        if self.group is None:
            return flag
        return bool(self.group.all_gather(np.array([flag])).any())


def local_replica(communicator: Communicator) -> ModelReplica:
    """Returns the replica of the model that this rank computes; all ranks call it together."""
    layout = communicator.layout
    if layout is None:
        return ModelReplica(communicator.rank, communicator.size)
    number, replicas, ranks = model_replica(Mesh(layout.degrees), communicator.rank)
    group = None
    if len(ranks) > 1:
        assert isinstance(communicator.group, CpuGroup), "ranks of a device do not generate text together"
        group = communicator.group.new_subgroup(ranks)
    return ModelReplica(number, replicas, group)


def open_generator(
    config: Config, weights: Mapping[str, np.ndarray] | None, eos_ids: Iterable[int], world: World, device: str
) -> tuple[Generator, Communicator, ModelReplica]:
    """Builds the model with its weights and returns its generator; imports MindSpore.

    Args:
        weights: As in `trainer.run.session.open_session`.
        eos_ids: The tokens that end a text.
    """
    from trainer.run.session import open_session

    session = open_session(config, weights, world, device)
    replica = local_replica(session.communicator)
    return make_generator(session, eos_ids, replica), session.communicator, replica


def make_generator(session: Session, eos_ids: Iterable[int], replica: ModelReplica) -> Generator:
    """Returns a generator with the weights that the model has now. On a CPU the array engine computes it."""
    from trainer.models.generate import Generator
    from trainer.models.inputs import InputBuilder

    build_inputs = session.build_inputs
    assert isinstance(build_inputs, InputBuilder), "only a decoder generates text"
    options: dict[str, Any] = {"agree": replica.broadcast_tokens, "native": session.device == "CPU"}
    if session.pipeline is not None:
        options |= {"chunks": session.pipeline.generation_chunks(), "share": session.pipeline.share_logits}
    return Generator(session.model, build_inputs, list(eos_ids), **options)


class Sampler:
    """Continues the prompts of `sample_prompt` with the model that is being trained.

    Raises:
        UserError: There is no tokenizer, or a prompt is empty, too long, or has a token beyond the vocabulary.
    """

    def __init__(self, config: Config) -> None:
        key = "sample_prompt"
        self.config = config
        self.tokenizer = load_tokenizer(config)
        self.prompts = list(config.sample_prompt or ())
        if isinstance(config.sample_prompt, str):
            self.prompts = [config.sample_prompt]
        self.encoded: list[list[int]] = []
        self.limits: list[int] = []
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
            self.limits.append(min(limit - len(ids), config.decoder.max_new_tokens or MAX_SAMPLED_TOKENS))

    def sample(self, session: Session, should_stop: Callable[[], bool]) -> list[str] | None:
        """Returns the text that follows each prompt, which depends on the weights and the seed alone.

        All ranks call this; the ranks of the first replica of the model sample. Returns None on all other ranks, and if
        `should_stop` ended it early.
        """
        replica = local_replica(session.communicator)
        with session.unsharded_weights():
            if replica.number > 0:
                return None
            generator = make_generator(session, find_eos_ids(self.config, self.tokenizer), replica)
            texts = ["" for _ in self.prompts]
            steps = generator.stream(self.encoded, self.limits, make_sampling(self.config))
            with contextlib.closing(steps):
                for pieces in decode_steps(steps, len(texts), self.tokenizer, generator):
                    # The ranks of a replica stop together.
                    if replica.any(should_stop()):
                        return None
                    texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        return texts


def make_sampling(config: Config) -> Sampling:
    """Returns the sampling rules of the model configuration; imports MindSpore."""
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
    """Returns the largest number of tokens of a prompt together with its answer.

    Raises:
        UserError: `max_decode_length` exceeds the positions of the model.
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
    scaling = settings.rope_scaling
    if scaling and scaling.rope_type == "longrope" and limit > settings.trained_length >= settings.seq_length:
        key = "model.model_config.max_decode_length"
        rule = f"exceeds original_max_position_embeddings, and seq_length {settings.seq_length} has the short factors"
        fix = f"write seq_length: {limit}, for the long factors"
        raise UserError(rule, where=config.source.where(key), key=key, value=limit, fix=fix)
    return limit


def encode_prompt(config: Config, tokenizer: Tokenizer, text: str, *, with_bos: bool) -> list[int]:
    """Returns the tokens of a prompt.

    Raises:
        UserError: The prompt is empty or not UTF-8, or has a token beyond the vocabulary. The caller adds the location.
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
    config: Config, tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None, where: str = "",
) -> list[int]:  # fmt: skip
    """Returns the tokens of a conversation up to the beginning of the assistant's answer.

    Args:
        where: The location of the conversation, for error messages.

    Raises:
        UserError: The template refuses the conversation, or `encode_prompt` refuses its text.
    """
    text = template.render(messages, tools, add_generation_prompt=True, where=where)
    return encode_prompt(config, tokenizer, text, with_bos=False)  # the template writes it


def find_eos_ids(config: Config, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> list[int]:
    """Returns the tokens that end a text, with those that end an answer of the chat template."""
    eos_ids = list(tokenizer.eos_ids)
    configured = config.decoder.eos_token_id
    if isinstance(configured, int):
        eos_ids.append(configured)
    elif configured:
        eos_ids += configured
    if template is not None and template.turn_end_id is not None:
        eos_ids.append(template.turn_end_id)
    return eos_ids


def decode_steps(
    steps: Iterable[Sequence[int | None]], rows: int, tokenizer: Tokenizer, generator: Generator
) -> Iterator[list[str]]:
    """Yields the new text of each row, step by step; last the incomplete characters that were held back."""
    streams = [tokenizer.stream() for _ in range(rows)]
    for tokens in steps:
        yield [
            "" if token is None or token in generator.eos_ids else stream.push(token)
            for stream, token in zip(streams, tokens, strict=True)
        ]
    yield [stream.finish() for stream in streams]


def print_text(text: str) -> None:
    """Prints text at once, without a newline."""
    print(text, end="", flush=True)
