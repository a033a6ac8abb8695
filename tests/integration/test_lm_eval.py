"""Tasks of lm-eval: scores are the log-probabilities of the trainer's own evaluation, texts those of greedy decoding.

Most tests need the extra `lm-eval`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_helpers import REPOSITORY, config_of, train, write_config, write_corpus
from tolerances import decoder_limits

from trainer.checkpoint.adapters import load_initial_weights
from trainer.cli.main import dispatch
from trainer.data import IGNORE_INDEX, Batch, load_tokenizer
from trainer.errors import UserError

pytestmark = pytest.mark.slow
needs_extra = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs pip install 'run-trainer[lm-eval]'")

TASKS = REPOSITORY / "tests" / "lm_eval_tasks"
EOS = 256
LENGTH = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm_eval")
    write_corpus(folder / "data", documents=24, lines=16)
    # Gains of 0.2 make texts of several different tokens likely.
    return write_config(folder, folder / "data", {"model.model_config.initializer_range": 0.2})


@pytest.fixture(scope="module")
def trained(path: Path) -> Path:
    return train(path)


@dataclass
class Asked:
    """The adapter and its model, asked with plain arguments."""

    model: Any
    session: Any
    limit: float

    def ask(self, kind: str, arguments: Sequence[tuple]) -> list[Any]:
        from lm_eval.api.instance import Instance

        requests = [Instance(kind, {}, each, 0, ("asked", 0, 1)) for each in arguments]
        return getattr(self.model, kind)(requests)

    def batch(self, ids: Sequence[int], labels: Sequence[int]) -> Batch:
        zeros = np.zeros((1, len(ids)), np.int32)
        arrays = np.array([ids], np.int32), np.array([labels], np.int32), np.arange(len(ids), dtype=np.int32)[None]
        return Batch(*arrays, zeros)

    def evaluated(self, ids: Sequence[int], answer: Sequence[int]) -> float:
        """Returns the log-probability of the last tokens of `ids`, from the loss that run mode eval reports."""
        labels = [IGNORE_INDEX] * (len(ids) - 1 - len(answer)) + list(answer)
        assert list(ids[-len(answer) :]) == list(answer)
        sums = self.session.model(self.session.build_inputs(self.batch(ids[:-1], labels)))
        return -float(sums.tokens.asnumpy())

    def likeliest(self, ids: Sequence[int]) -> int:
        """Returns the likeliest token after these."""
        inputs = self.session.build_inputs(self.batch(ids, [IGNORE_INDEX] * len(ids)))
        return int(self.session.model.logits(inputs).asnumpy()[-1].argmax())


@pytest.fixture(scope="module")
def asked(path: Path, trained: Path) -> Iterator[Asked]:
    from trainer.run.harness.language_model import TrainerLM
    from trainer.run.session import open_session

    config = config_of(path, run_mode="eval", load_checkpoint=trained)
    session = open_session(config, load_initial_weights(config))
    limit = decoder_limits(config.decoder, rows=4).loss
    yield Asked(TrainerLM(config, session, load_tokenizer(config)), session, limit)


@needs_extra
def test_scores_are_the_losses_of_an_evaluation(asked: Asked) -> None:
    """Unequal lengths in batches of 4, an empty context, a context that is cut, and answers that share a context."""
    texts = [("the cat ", "sat"), ("", "dogs"), ("a", "b"), ("a", "bc"), ("a", "c"), ("rain fell down for an", " hour"),
             ("over ", "x"), ("saw dogs run over hills", " and")]  # fmt: skip
    found = asked.ask("loglikelihood", texts)
    for (context, answer), (score, _) in zip(texts, found, strict=True):
        if context.endswith(" "):  # the harness gives spaces at the end to the answer
            context, answer = context[:-1], f" {answer}"
        ids = [*([] if context else [EOS]), *f"{context}{answer}".encode()][-LENGTH - 1 :]
        assert score == pytest.approx(asked.evaluated(ids, answer.encode()), rel=asked.limit)


@needs_extra
def test_an_answer_is_greedy_if_each_token_is_the_likeliest(asked: Asked) -> None:
    context = list(b"the cat ")
    for _ in range(3):
        context.append(asked.likeliest(context))
    answer = context[8:]
    others = [[answer[0] ^ 1, *answer[1:]], [*answer[:2], answer[2] ^ 1], answer[:1]]
    requests = [(None, context[:8], each) for each in (answer, *others)]
    assert [is_greedy for _, is_greedy in asked.model._loglikelihood_tokens(requests)] == [True, False, False, True]


@needs_extra
def test_a_long_text_is_scored_in_windows_with_as_much_context_as_there_is(asked: Asked) -> None:
    text = "the cat sat on a mat and saw dogs run ov"
    ids = list(text.encode())
    assert len(ids) == 40
    windows = [([EOS, *ids[:16]], ids[:16]), (ids[15:32], ids[16:32]), (ids[23:], ids[32:])]
    scores = asked.ask("loglikelihood_rolling", [("hills",), (text,), ("",)])
    assert scores[1] == pytest.approx(sum(asked.evaluated(*each) for each in windows), rel=asked.limit)
    assert scores[0] == pytest.approx(asked.evaluated([EOS, *b"hills"], b"hills"), rel=asked.limit)
    assert scores[2] == 0


@needs_extra
def test_a_text_ends_before_a_stop_string_or_at_its_limit(asked: Asked) -> None:
    """The second context is cut to the 10 tokens beside which 6 new ones have room."""
    contexts = ["the c", "saw dogs run over hills and"]
    texts = []
    for context in contexts:
        ids = list(context.encode())[-10:]
        while len(ids) < len(context[-10:]) + 6 and ids[-1] != EOS:
            ids.append(asked.likeliest(ids))
        texts.append(asked.model.tokens.decode(ids[len(context[-10:]) :]))
    assert max(map(len, texts)) == 6
    assert asked.ask("generate_until", [(each, {"max_gen_toks": 6}) for each in contexts]) == texts
    long = max(texts, key=len)
    context = contexts[texts.index(long)]
    stops: list[dict] = [{"until": [long[2:4]]}, {"until": "zz", "temperature": 0.0}]
    rules = [{"max_gen_toks": 6, **each} for each in stops]
    assert asked.ask("generate_until", [(context, rule) for rule in rules]) == [long.split(long[2:4])[0], long]
    assert asked.ask("generate_until", [("", {"max_gen_toks": 1})])[0] == chr(asked.likeliest([EOS]))


@needs_extra
def test_an_answer_longer_than_the_model_reads_is_refused(asked: Asked) -> None:
    with pytest.raises(UserError, match="the probability of 17 tokens"):
        asked.ask("loglikelihood", [("a", "b" * 17)])


@needs_extra
@pytest.mark.parametrize(("rules", "message"), [
    ({"max_gen_toks": 16}, "generates up to 16 tokens, and the model reads 16"),
    ({"max_gen_toks": 4, "typical_p": 0.5}, "generation_kwargs.typical_p = 0.5: is not supported"),
])  # fmt: skip
def test_what_the_model_cannot_generate_is_refused(asked: Asked, rules: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        asked.ask("generate_until", [("a", rules)])


@needs_extra
def test_task_files_give_the_table_and_the_results_of_the_harness(
    path: Path, trained: Path, asked: Asked, capfd: pytest.CaptureFixture
) -> None:
    files = ",".join(str(TASKS / f"{name}.yaml") for name in ("choices", "perplexity"))
    assert dispatch(["eval", str(trained), "--tasks", files, str(TASKS / "answers.yaml"), "--limit", "3"]) == 0
    printed = capfd.readouterr().out
    assert "|tiny_choices   |" in printed and "word_perplexity" in printed
    found = json.loads((trained / "lm_eval.json").read_text())
    assert found["config"]["limit"] == 3 and found["config"]["load_checkpoint"].startswith(str(trained))
    questions = (("the cat sat on", ["a mat", "a hill", "it"], 0), ("dogs run over", ["hills", "a mat and a cat"], 0),
                 ("rain fell down for an", ["hour", "hill and a hill"], 0))  # fmt: skip
    right = 0
    for text, answers, best in questions:
        scores = asked.ask("loglikelihood", [(text, f" {answer}") for answer in answers])
        right += int(np.argmax([score for score, _ in scores])) == best
    assert found["results"]["tiny_choices"]["acc,none"] == pytest.approx(right / 3)
    texts = [f"{text} {answers[best]} {text}" for text, answers, best in questions]
    bits = -sum(asked.ask("loglikelihood_rolling", [(text,) for text in texts])) / np.log(2)
    expected = bits / sum(len(text) for text in texts)
    assert found["results"]["tiny_perplexity"]["bits_per_byte,none"] == pytest.approx(expected, rel=asked.limit)
    rules = {"until": [" "], "max_gen_toks": 6, "do_sample": False}  # of answers.yaml
    generated = asked.ask("generate_until", [(text, rules) for text, _, _ in questions])
    matches = [text == answers[best] for text, (_, answers, best) in zip(generated, questions, strict=True)]
    assert found["results"]["tiny_answers"]["exact_match,none"] == pytest.approx(sum(matches) / 3)
    assert not (trained / "eval.json").exists()


@needs_extra
@pytest.mark.parametrize(("flags", "message"), [
    (["--tasks", "nosuch.yaml"], "there is no such task"),
    (["--tasks", str(TASKS / "questions.py")], "the task cannot be loaded"),
    (["--tasks", str(TASKS / "choices.yaml"), "--num_fewshot", "9"], "Sample larger than population"),
])  # fmt: skip
def test_a_wrong_task_is_bad_input(trained: Path, flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dispatch(["eval", str(trained), *flags])


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="the extra is installed")
def test_without_the_extra_one_message_says_what_to_install(trained: Path) -> None:
    with pytest.raises(UserError) as caught:
        dispatch(["eval", str(trained), "--tasks", "hellaswag"])
    message = str(caught.value)
    assert "needs the package lm_eval" in message and "pip install 'run-trainer[lm-eval]'" in message
    assert len(message.splitlines()) == 2


def test_eval_without_tasks_is_run_mode_eval(path: Path, trained: Path) -> None:
    flags = ["--load_checkpoint", str(trained), "--output_dir", str(trained.parent / "evaluated")]
    assert dispatch(["eval", "--config", str(path), *flags]) == 0
    assert json.loads((trained.parent / "evaluated" / "eval.json").read_text())["loss"] > 0
