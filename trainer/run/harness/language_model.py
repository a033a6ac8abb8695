"""The trainer's model as a model of lm-eval: log-probabilities of texts, and generation up to a stop string.

Texts become tokens as in the harness' own class for Hugging Face models, HFLM: with the special tokens that
transformers adds, unless the text begins with one. Too long contexts lose their first tokens.

Legend: B sequences, T tokens of the longest, V vocabulary, n tokens with a log-probability.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from trainer.checkpoint.hugging_face import chat_template_of
from trainer.data import Batch
from trainer.data.batches.batch import document_batch
from trainer.errors import UserError
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.models.spec.saved import logit_rows
from trainer.run.generation import ModelReplica, context_length, find_eos_ids, make_generator, make_sampling

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from trainer.config import Config
    from trainer.data import ChatTemplate, Tokenizer
    from trainer.models.generate import Sampling
    from trainer.run.session import Session

# (texts, tokens of the context, tokens of the continuation); the texts name a request in the harness' cache.
Request: TypeAlias = "tuple[tuple[str, str] | None, list[int], list[int]]"
Score: TypeAlias = "tuple[float, bool]"  # the sum of the log-probabilities, and whether each token is the likeliest
_SAMPLING_KEYS = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


class Limits(NamedTuple):
    """How much a generated text may have: tokens, and no stop string."""

    max_tokens: int
    stop_strings: list[str]


class TrainerLM(TemplateLM):
    """A decoder of the trainer, in one process.

    Args:
        session: The model with its weights.
        check_stop: Called before each batch and each new token; raises an exception to end the evaluation.
    """

    backend = "causal"
    max_gen_toks = 256  # of a task that names no limit; HFLM has the same

    def __init__(
        self, config: Config, session: Session, tokenizer: Tokenizer, check_stop: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.config = config
        self.session = session
        self.tokens = tokenizer
        self.check_stop = check_stop
        self.max_length = context_length(config)
        self.batch_size = config.runner_config.batch_size
        model = session.model
        self.build_inputs = InputBuilder(config.decoder, model.kernels)  # a session's may have a loss of pairs
        self.generator = make_generator(session, [*find_eos_ids(config, tokenizer), self.eot_token_id], ModelReplica())
        self.template: ChatTemplate | None = None
        if config.chat:
            self.template = chat_template_of(config, tokenizer)

    @property
    def eot_token_id(self) -> int:
        """Returns the token that ends a text."""
        return self._special_id("eos_token", self.tokens.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """Returns the token before the first one of a text without a context."""
        return self._special_id("bos_token", self.eot_token_id)

    def _special_id(self, name: str, default: int) -> int:
        token_id = self.tokens.token_id(self.tokens.special_tokens.get(name, ""))
        if token_id is None:
            return default
        return token_id

    @property
    def tokenizer_name(self) -> str:
        """Returns a name that changes with the tokenizer."""
        return self.tokens.fingerprint.replace(":", "-")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the source of the chat template; empty without one."""
        if self.template is None:
            return ""
        return self.template.as_file

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation, up to the beginning of an answer, or up to the end of the last message's text."""
        assert self.template is not None, "the harness renders conversations only if `chat` is on"
        text = self.template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        before, content, _ = text.rpartition(last)
        if not content:
            rule = "the chat template changes the beginning of an answer, which the model is to continue"
            raise UserError(rule, where=self.template.where, key="chat", fix="leave --chat out")
        return before + last

    def get_model_info(self) -> dict[str, Any]:
        """Returns what identifies the model in the harness' results."""
        info: dict[str, Any] = {"load_checkpoint": self.config.load_checkpoint}
        if self.config.adapter_id:
            info["adapter_id"] = self.config.adapter_id
        return info

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the tokens of a text.

        Args:
            add_special_tokens: None: as transformers does, but not if the text begins with the special token.

        Raises:
            UserError: A token is beyond the model's vocabulary.
        """
        if add_special_tokens is None:
            prefix = self.tokens.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(prefix)
        if add_special_tokens:
            ids = self.tokens.encode_as_transformers(string)
        else:
            ids = self.tokens.encode(string)
        vocab_size = self.config.decoder.vocab_size
        if max(ids, default=0) >= vocab_size:
            rule = f"a text of a task has token {max(ids)}, beyond the model's vocabulary of {vocab_size}"
            raise UserError(rule, value=string[:40], fix="use the tokenizer that the model was trained with")
        return ids

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, in windows of `max_length` tokens that do not overlap."""
        windows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, pairs):
                windows.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += log_probability
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(self, requests: Sequence[Request], **kwargs: Any) -> list[Score]:
        """Returns the score of each continuation. Requests of the same input are computed once."""
        same: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                rule = f"a task asks for the probability of {len(continuation)} tokens, and the model reads fewer"
                key = "model.model_config.seq_length"
                raise UserError(rule, key=key, value=self.max_length, fix="raise it, or leave the task out")
            same[tuple([*context, *continuation][-self.max_length - 1 : -1])].append(number)
        scores: list[Score] = [(0.0, True)] * len(requests)
        inputs = sorted(same, key=len, reverse=True)
        for batch in _batches(inputs, self.batch_size, "log-probabilities"):
            self.check_stop()
            continuations = [[requests[number][2] for number in same[ids]] for ids in batch]
            for ids, batch_scores in zip(batch, self._score(batch, continuations), strict=True):
                for number, score in zip(same[ids], batch_scores, strict=True):
                    scores[number] = score
                    texts = requests[number][0]
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def _score(
        self, inputs: Sequence[tuple[int, ...]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> Iterator[list[Score]]:
        """Yields for each input the scores of its continuations, whose last tokens follow the input's last one."""
        batch = self._batch(inputs)
        model = self.session.model
        assert isinstance(model, Decoder), "only a decoder has texts"
        x_ND = model.hidden_states(self.build_inputs(batch)).asnumpy()
        width = batch.input_ids.shape[1]
        for row, (ids, targets) in enumerate(zip(inputs, continuations, strict=True)):
            end = row * width + len(ids)
            longest = max(map(len, targets))
            yield _score_continuations(model, self.config.decoder.vocab_size, x_ND[end - longest : end], targets)

    def _batch(self, inputs: Sequence[tuple[int, ...]]) -> Batch:
        """Returns a batch without labels. On a device its shape is one of few, because each is compiled."""
        rows = len(inputs)
        width = max(map(len, inputs))
        if self.session.device != "CPU":
            rows = self.batch_size
            width = min(1 << (width - 1).bit_length(), self.max_length)
        return document_batch(inputs, rows, width)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each context, up to a stop string, the end of the text or `max_gen_toks`."""
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[repr(request.args[1])].append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            first = requests[numbers[0]]
            limits, sampling = self._rules(first.args[1], first.task_name)
            prompts = {}
            for number in numbers:
                ids = self.tok_encode(requests[number].args[0]) or [self.prefix_token_id]
                prompts[number] = ids[limits.max_tokens - self.max_length :]
            # Longest first: too little memory shows at once.
            numbers.sort(key=lambda number: len(prompts[number]), reverse=True)  # noqa: B023 (used at once)
            for batch in _batches(numbers, self.batch_size, "generation"):
                answers = self._continue([prompts[number] for number in batch], limits, sampling, batch[0])
                for number, answer in zip(batch, answers, strict=True):
                    texts[number] = answer
                    self.cache_hook.add_partial("generate_until", requests[number].args, answer)
        return texts

    def _rules(self, gen_kwargs: Mapping[str, Any], task: str | None) -> tuple[Limits, Sampling]:
        """Returns the limits and the sampling rules of a task's generation_kwargs.

        Raises a UserError if there are others, or the model has no room for so many tokens.
        """
        where = f"task {task}"
        settings = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
        eos = self.tokens.decode([self.eot_token_id], skip_special_tokens=False)
        stop_strings = handle_stop_sequences(settings.pop("until"), eos=eos)
        max_tokens = settings.pop("max_gen_toks")
        if max_tokens >= self.max_length:
            rule = f"generates up to {max_tokens} tokens, and the model reads {self.max_length}"
            fix = "set max_gen_toks in a task file of your own, or raise model.model_config.seq_length"
            raise UserError(rule, where=where, key="generation_kwargs.max_gen_toks", value=max_tokens, fix=fix)
        known = {name: settings.pop(name) for name in _SAMPLING_KEYS if name in settings}
        for name, value in settings.items():
            if name == "num_beams" and value == 1:
                continue
            fix = f"leave it out in a task file of your own; these act: {', '.join(_SAMPLING_KEYS)}"
            raise UserError("is not supported", where=where, key=f"generation_kwargs.{name}", value=value, fix=fix)
        if not known["do_sample"] or known.get("temperature") == 0:
            known = {"do_sample": False, "repetition_penalty": known.get("repetition_penalty", 1.0)}
        return Limits(max_tokens, stop_strings), replace(make_sampling(self.config), **known)

    def _continue(
        self, prompts: Sequence[Sequence[int]], limits: Limits, sampling: Sampling, first_row: int
    ) -> list[str]:
        """Returns the continuations of a batch of prompts, without the stop strings."""
        answers: list[list[int]] = [[] for _ in prompts]
        streams = [self.tokens.stream() for _ in prompts]
        shown = ["" for _ in prompts]
        running = set(range(len(prompts)))
        steps = self.generator.stream(prompts, [limits.max_tokens] * len(prompts), sampling, first_row)
        with contextlib.closing(steps):
            for chosen in steps:
                self.check_stop()
                for row, token in enumerate(chosen):
                    if row not in running:
                        continue
                    if token is None or token in self.generator.eos_ids:
                        running.discard(row)
                        continue
                    answers[row].append(token)
                    shown[row] += streams[row].push(token)
                    if any(text and text in shown[row] for text in limits.stop_strings):
                        running.discard(row)
                if not running:
                    break
        return [postprocess_generated_text(self.tokens.decode(ids), limits.stop_strings, None) for ids in answers]


def _score_continuations(
    model: Decoder, vocabulary: int, x_nD: np.ndarray, continuations: Sequence[Sequence[int]]
) -> list[Score]:
    """Returns the scores of several continuations that end at the same token.

    Args:
        x_nD: The residual stream after the last layer, at the tokens before those of the longest continuation.
    """
    sums = [0.0] * len(continuations)
    likeliest = [True] * len(continuations)
    size = max(logit_rows(len(x_nD), vocabulary), 1)
    for start in range(0, len(x_nD), size):
        logits_nV = model.parts.logits_of_rows(x_nD[start : start + size])
        largest_n1 = logits_nV.max(1, keepdims=True)
        log_sum_n = np.log(np.exp(logits_nV - largest_n1).sum(1, dtype=np.float64))
        choice_n = logits_nV.argmax(1)
        for number, ids in enumerate(continuations):
            place = start - len(x_nD) + len(ids)  # of the first row in this continuation; a shorter one begins later
            rows = np.arange(max(0, -place), len(logits_nV))
            targets = np.array(ids, np.int64)[place + rows]
            differences = (logits_nV[rows, targets] - largest_n1[rows, 0]).astype(np.float64)
            sums[number] += float((differences - log_sum_n[rows]).sum())
            likeliest[number] &= bool((choice_n[rows] == targets).all())
    return list(zip(sums, likeliest, strict=True))


def _batches(items: Sequence[Any], size: int, description: str) -> Iterable[Sequence[Any]]:
    """Yields batches, with their progress on a terminal."""
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    return tqdm(batches, desc=description, disable=None)
