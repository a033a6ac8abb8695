"""Prediction: the cache is right, batches do not mix, sampling follows its distribution, prompts are checked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from run_helpers import PROGRAM, config_of, predict, refusal, train, write_config
from tolerances import FREQUENCY_OF_4000, RUN_ROUTING, WHOLE_NUMBER

from trainer.cli.flags import split_arguments
from trainer.data import Batch
from trainer.data.tokens.chat_template import chatml
from trainer.data.tokens.tokenizer import ByteTokenizer
from trainer.errors import RunError, UserError
from trainer.models.generate import Generator, Sampling, choose_token
from trainer.run.chat import checkpoint_config
from trainer.run.loop import run

pytestmark = pytest.mark.slow

# Grouped heads, q/k norm, biases, experts and scaled positions: each has its place in the cached path.
MODELS = {
    "llama": {"n_kv_heads": 1},
    "qwen3": {"n_kv_heads": 2, "use_qk_norm": True, "head_dim": 12, "tie_word_embeddings": True},
    "qwen2": {"n_kv_heads": 2, "num_heads": 4, "qkv_has_bias": True, "mlp_has_bias": True, "attn_proj_has_bias": True},
    "experts": {"moe_config": {"expert_num": 4, "num_experts_chosen": 2, "capacity_factor": 0.5}},
    "scaled": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """Returns a model that knows a little, so that its likeliest token is no coin toss."""
    return train(write_config(home / "trained", home / "data", {"runner_config.epochs": 3}))


def open_model(home: Path, changes: dict):
    from trainer.run.session import open_session

    changes = {"context": {"mode": 1}, **changes}  # no compilation: every length is a new shape
    return open_session(config_of(write_config(home / "model", home / "data", changes)))


def logits_of(session, ids: list[int]) -> np.ndarray:
    """Logits after each token by a full forward pass, without a cache: [tokens, vocabulary]."""
    ids_BT = np.array([ids], np.int32)
    positions = np.arange(len(ids), dtype=np.int32)[None]
    batch = Batch(ids_BT, np.zeros_like(ids_BT), positions, np.zeros_like(ids_BT))
    return session.model.logits(session.build_inputs(batch)).asnumpy()


def generate(session, prompts: list[list[int]], new: list[int], sampling: Sampling, eos: tuple = (), first: int = 0):
    """Returns new tokens of each row."""
    rows = [[] for _ in prompts]
    for tokens in Generator(session.model, session.build_inputs, eos).stream(prompts, new, sampling, first):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def with_large_weights(session):
    """Returns weights far from zero: logits differ clearly, and a wrong cache shows."""
    from mindspore import Tensor

    draw = np.random.default_rng(3)
    for parameter in session.model.parameters_by_name.values():
        noise = draw.standard_normal(parameter.shape).astype(np.float32)
        parameter.set_data(Tensor(parameter.asnumpy() + 0.3 * noise))
    return session


@pytest.mark.parametrize("name", MODELS)
def test_greedy_with_cache_equals_a_full_forward_pass(name: str, home: Path) -> None:
    session = with_large_weights(open_model(home, {f"model.model_config.{k}": v for k, v in MODELS[name].items()}))
    prompts = [[104, 101], [116, 104, 101, 32, 99, 97, 116, 32, 115], [10]]
    new = [30, 3, 37]  # beyond a multiple of the cache's rounding; rows end at different times
    rows = generate(session, prompts, new, Sampling())
    assert [len(row) for row in rows] == new
    assert len({token for row in rows for token in row}) > 5
    for prompt, row in zip(prompts, rows, strict=True):
        logits = logits_of(session, prompt + row)[len(prompt) - 1 : -1]
        # Equal but for rounding: where two tokens are as likely, either may be taken.
        assert (logits[np.arange(len(row)), row] >= logits.max(-1) - RUN_ROUTING).all()
        assert (np.sort(logits)[:, -1] - np.sort(logits)[:, -2] > 1e-2).mean() > 0.9  # mostly it is clear
    alone = [generate(session, [prompt], [count], Sampling())[0] for prompt, count in zip(prompts, new, strict=True)]
    assert rows == alone  # neighbours, and how long they are, make no difference


def test_sampling_is_repeatable_and_does_not_depend_on_the_batch(home: Path) -> None:
    session = open_model(home, {})
    prompts, new = [[1, 2, 3], [4], [5, 6]], [12, 12, 12]
    sampling = Sampling(do_sample=True, temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=3)
    rows = generate(session, prompts, new, sampling)
    assert generate(session, prompts, new, sampling) == rows
    assert generate(session, prompts[1:], new[1:], sampling, first=1) == rows[1:]
    assert generate(session, prompts, new, Sampling(do_sample=True, seed=4)) != rows
    same = generate(session, [prompts[0]] * 3, new, sampling)
    assert len({tuple(row) for row in same}) == 3  # equal prompts, streams of their own


def test_an_end_token_ends_its_row(home: Path) -> None:
    session = with_large_weights(open_model(home, {}))
    prompts = [[1, 2, 3], [40, 50]]
    rows = generate(session, prompts, [20, 20], Sampling())
    end = next(token for token in rows[0] if token not in rows[1])
    ended = generate(session, prompts, [20, 20], Sampling(), eos=(end,))
    assert ended[0] == rows[0][: rows[0].index(end) + 1] and ended[1] == rows[1]


# The rule for one token, without a model


LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.07, 0.03])).astype(np.float32)


def frequencies(logits: np.ndarray, seen: tuple = (), draws: int = 4000, **rules) -> np.ndarray:
    sampling = Sampling(do_sample=True, **rules)
    tokens = [choose_token(logits, seen, sampling, row, 0) for row in range(draws)]
    return np.bincount(tokens, minlength=len(logits)) / draws


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.07, 0.03]),
        ({"temperature": 0.5}, np.square([0.4, 0.3, 0.2, 0.07, 0.03]) / 0.2958),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0, 0]),
        ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 99}, [0.4, 0.3, 0.2, 0.07, 0.03]),
    ],
    ids=str,
)
def test_sampling_follows_its_distribution(rules: dict, expected: list[float]) -> None:
    found = frequencies(LOGITS, **rules)
    expected = np.array(expected)
    # Four standard deviations of a frequency over 4000 draws.
    bound = 4 * np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(found - expected) <= bound + WHOLE_NUMBER).all(), found


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    penalised = Sampling(repetition_penalty=2.0)
    assert choose_token(logits, (), penalised, 0, 0) == 0
    assert choose_token(logits, (0, 0), penalised, 0, 0) == 1  # 2 -> 1, once however often it was seen
    assert choose_token(logits, (0, 1), penalised, 0, 0) == 0  # 1 and 0.95
    expected = np.exp([1.0, 1.9, -2.0, -1.1])
    found = frequencies(logits, seen=(0, 2, 2), repetition_penalty=2.0)
    np.testing.assert_allclose(found, expected / expected.sum(), atol=FREQUENCY_OF_4000)
    assert (logits == np.array([2.0, 1.9, -1.0, -1.1], np.float32)).all()  # what it was given stays


def test_temperature_near_zero_is_greedy_and_does_not_overflow() -> None:
    rules = Sampling(do_sample=True, temperature=1e-6)
    assert {choose_token(LOGITS * 1e3, (), rules, row, 0) for row in range(50)} == {0}


def test_weights_that_are_no_numbers_are_an_error(home: Path) -> None:
    from mindspore import Tensor

    session = open_model(home, {})
    norm = session.model.parameters_by_name["model.norm.weight"]
    norm.set_data(Tensor(np.full(norm.shape, np.nan, np.float32)))
    with pytest.raises(RunError, match="not finite") as caught:
        generate(session, [[1, 2]], [3], Sampling())
    assert "Fix: use another checkpoint" in str(caught.value)


# As a run

TOKENIZER = {"train_dataset__tokenizer__type": "huggingface", "train_dataset__tokenizer__path": "words.json"}


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer of words, one of which is beyond the model's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "cat": 1, "mat": 300}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def path(home: Path, trained: Path) -> Path:
    changes = {"load_checkpoint": str(trained), "model.model_config.max_decode_length": 32}
    return write_config(home / "run", home / "data", changes)


def test_a_prompt_is_continued_and_written_down(path: Path, capsys: pytest.CaptureFixture) -> None:
    (record,) = predict(path, predict_data="the cat")
    assert record["prompt"] == "the cat" and 0 < len(record["text"].encode()) <= 32 - len("the cat")
    assert capsys.readouterr().out == "the cat" + record["text"] + "\n\n"
    (short,) = predict(path, predict_data="the cat", model__model_config__max_new_tokens=5)
    assert record["text"].startswith(short["text"]) and len(short["text"].encode()) == 5
    again = predict(path, predict_data="the cat")
    assert again == [record]
    assert predict(path, predict_data="the cat", use_parallel=True, parallel_config__model_parallel=2) == [record]


def test_a_file_of_prompts_in_batches(path: Path, home: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = ["the cat sat", "a", "über die Brücke", "rain fell"]
    (home / "prompts.txt").write_text("\n".join(prompts) + "\n\n", encoding="utf-8")
    records = predict(path, predict_data=home / "prompts.txt", predict_batch_size=3)
    assert [record["prompt"] for record in records] == prompts
    headed = (f"[{n}/4] {r['prompt']!r}\n{r['prompt']}{r['text']}\n\n" for n, r in enumerate(records, start=1))
    assert capsys.readouterr().out == "".join(headed)
    for prompt, record in zip(prompts, records, strict=True):
        assert predict(path, predict_data=prompt) == [record]


def test_a_file_of_json_lines(path: Path, home: Path, capsys: pytest.CaptureFixture) -> None:
    lines = [{"prompt": "the cat\nsat", "id": 7}, {"text": "a" * 50}]
    text = "\n\n".join(json.dumps(line) for line in lines)
    (home / "prompts.jsonl").write_text(text, encoding="utf-8")
    records = predict(path, predict_data=home / "prompts.jsonl", model__model_config__max_decode_length=64)
    assert [record["prompt"] for record in records] == ["the cat\nsat", "a" * 50]
    shown = capsys.readouterr().out
    assert shown.startswith("[1/2] 'the cat\\nsat'\nthe cat\nsat") and f"[2/2] '{'a' * 40}...'\n{'a' * 50}" in shown


def test_a_prompt_of_bytes_that_are_no_text(path: Path) -> None:
    (record,) = predict(path, predict_data="a\udcff")  # as Python hands over an argument that is not UTF-8
    assert record["prompt"] == "a\udcff" and record["text"]


def test_sampled_predictions_repeat_with_the_seed(path: Path) -> None:
    flags = {"predict_data": "the cat", "model__model_config__do_sample": True, "model__model_config__temperature": 2.0}
    first = predict(path, **flags)
    assert predict(path, **flags) == first
    assert predict(path, seed=2, **flags) != first


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"predict_data": "x" * 32}, ["32 tokens leaves no room", "predict_data", "max_decode_length"]),
        ({"predict_data": "ä" * 16}, ["32 tokens leaves no room"]),
        ({"predict_data": "[a, '']"}, ["a prompt is empty", "predict_data = ''"]),
        ({"predict_data": "[]"}, ["needs prompts"]),
        (
            {"predict_data": "a", "model__model_config__max_decode_length": 65},
            ["positions for 64 tokens", "model.model_config.max_decode_length = 65", "at most 64"],
        ),
        ({"predict_data": "a", "train_dataset__tokenizer__type": "huggingface"}, ["tokenizer"]),
        ({"predict_data": "mat", **TOKENIZER}, ["a prompt has token 300, beyond the model's vocabulary of 257"]),
        ({"predict_data": "a\udcff", **TOKENIZER}, ["a prompt is not valid UTF-8"]),
        ({"predict_data": "empty.txt"}, ["has no prompt", "empty.txt"]),
        ({"predict_data": "empty.jsonl"}, ["has no prompt", '{"prompt": "..."}']),
        ({"predict_data": "absent.jsonl"}, ["predict_data = 'absent.jsonl'", "does not exist"]),
        ({"predict_data": "texts.jsonl"}, ["texts.jsonl:2: ", "is a JSON object", "'just text'"]),
        ({"predict_data": "numbers.jsonl"}, ["numbers.jsonl:1: ", "with a text under prompt", "as a string"]),
        ({"predict_data": "binary.txt"}, ["cannot be read as UTF-8", "binary.txt"]),
        ({"predict_data": "a", "load_checkpoint": "nowhere"}, ["load_checkpoint = 'nowhere'", "does not exist"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_prompts_that_cannot_be_continued(
    path: Path, home: Path, flags: dict, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    Path("empty.txt").write_text("\n \n")
    Path("empty.jsonl").write_text("\n")
    Path("texts.jsonl").write_text('{"prompt": "a"}\njust text\n')
    Path("numbers.jsonl").write_text('{"prompt": 3}\n')
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    write_tokenizer(Path("words.json"))
    output = home / "refused"
    refusal(lambda: predict(path, output_dir=output, **flags), *parts)
    assert not output.exists()


# As chat: prompts and conversations in the chat template


def render_prompt(*messages: tuple[str, str]) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    return chatml(ByteTokenizer()).render(turns, add_generation_prompt=True)


def test_prompts_as_messages(path: Path, home: Path, capsys: pytest.CaptureFixture) -> None:
    flags = {"chat": True, "model__model_config__max_decode_length": 64}
    (record,) = predict(path, predict_data="cat", **flags)
    text = render_prompt(("user", "cat"))
    assert record == {"prompt": "cat", "text": record["text"]}
    assert capsys.readouterr().out == f"cat\n{record['text']}\n\n"
    (plain,) = predict(path, predict_data=json.dumps([text]), model__model_config__max_decode_length=64)
    assert plain["text"] == record["text"]
    messages = [{"role": "user", "content": "cat"}]
    lines = [{"messages": messages}, {"prompt": "cat"}]
    (home / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    records = predict(path, predict_data=home / "chat.jsonl", **flags)
    assert records == [{"messages": messages, "text": record["text"]}, record]
    with pytest.raises(UserError, match="chat.jsonl:1: .*rendered with the chat template.\n  Fix: add --chat"):
        predict(path, predict_data=home / "chat.jsonl")
    (home / "chat.jsonl").write_text('{"messages": [{"role": "nobody", "content": "a"}]}', encoding="utf-8")
    with pytest.raises(UserError, match="chat.jsonl:1: messages.0.role = 'nobody'"):
        predict(path, predict_data=home / "chat.jsonl", **flags)


LONG = ("--model.model_config.max_position_embeddings", "4096", "--model.model_config.max_decode_length", "4096")


def talk(monkeypatch: pytest.MonkeyPatch, home: Path, text: str | bytes, *arguments: object) -> int:
    """Runs chat with `text` as its standard input."""
    (home / "typed.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    overrides = split_arguments(list(map(str, arguments[1:]))).overrides
    config = checkpoint_config(str(arguments[0]), None, overrides, "chat")
    with (home / "typed.txt").open(encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stream)
        return run(config)


def test_a_conversation_from_a_pipe(
    path: Path, trained: Path, home: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = home / "said.jsonl"
    commands = ("/temperature 1.5", f"/save {saved}", "/help")
    lines = ("the cat", "", "and", "/system Be brief.", "/reset", "the cat", *commands)
    limit = ("--max_new_tokens", 12, *LONG)
    assert talk(monkeypatch, home, "\n".join(lines), trained / "checkpoints", *limit) == 0
    output, errors = capsys.readouterr()
    answers = output.split("\n")
    first = render_prompt(("user", "the cat"))
    second = render_prompt(("user", "the cat"), ("assistant", answers[0]), ("user", "and"))
    third = render_prompt(("system", "Be brief."), ("user", "the cat"))
    flags = {"model__model_config__max_position_embeddings": 4096, "model__model_config__max_decode_length": 4096}
    for name, prompt in (("first", first), ("second", second), ("third", third)):
        (record,) = predict(path, predict_data=json.dumps([prompt]), model__model_config__max_new_tokens=12, **flags)
        assert record["text"] == answers.pop(0), name
    assert answers == [""]
    said = [json.loads(line)["messages"] for line in saved.read_text(encoding="utf-8").splitlines()]
    assert said == [[
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": record["text"]},
    ]]  # fmt: skip
    assert "/temperature X" in errors and ">>>" not in output + errors


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("the cat\n/rest\n", ["standard input:2: ", "there is no command /rest", "/reset"]),
        ("x" * 5000, ["standard input:1: ", "which leaves no room in 4096"]),
        ("/temperature warm\n", ["must be a number of at least 0"]),
        ("/save /nowhere/else/a.jsonl\n", ["there is no conversation yet"]),
    ],
)
def test_lines_of_a_pipe_that_cannot_be_answered(
    trained: Path, home: Path, text: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal(lambda: talk(monkeypatch, home, text, trained, "--max_new_tokens", 3, *LONG), *parts)


def test_the_oldest_questions_are_forgotten_when_they_no_longer_fit(
    trained: Path, home: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert talk(monkeypatch, home, "the cat\n" * 6, trained, *LONG[:3], "240", "--max_new_tokens", 8) == 0
    output, errors = capsys.readouterr()
    assert output.count("\n") >= 6
    assert "exceeds 240 tokens (max_decode_length): the oldest question and its answer were dropped" in errors
    assert "the answer was cut" not in errors
    assert talk(monkeypatch, home, "the cat\n", trained, *LONG[:3], "80") == 0
    assert "the answer was cut: the conversation has 80 tokens" in capsys.readouterr().err


def test_on_a_terminal_a_signal_ends_the_answer_and_the_end_of_input_the_chat(trained: Path, home: Path) -> None:
    """Ctrl-C while it answers, Ctrl-C at the prompt, Ctrl-D."""
    ours, theirs = pty.openpty()
    # An answer of tens of thousands of tokens, which take a minute: the model never ends one.
    arguments = ["chat", str(trained), *(flag.replace("4096", "65536") for flag in LONG)]
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments], cwd=home, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)

    def type_in(text: bytes, until: bytes) -> None:
        """Types until something is shown.

        A key that arrives between the prompt and the reading of a line is lost, as in every program with readline; so
        it is typed again every two seconds.
        """
        shown, deadline = b"", time.monotonic() + 60
        while until not in shown:
            assert time.monotonic() < deadline and process.poll() is None, shown
            os.write(ours, text)
            while until not in shown and select.select([ours], [], [], 2)[0]:
                shown += os.read(ours, 4096)

    try:
        type_in(b"", b">>> ")
        os.write(ours, b"the cat\n")
        time.sleep(1)
        type_in(b"\x03", b">>> ")
        type_in(b"half a line\x03", b"(Ctrl-D leaves)")
        type_in(b"/save typed.jsonl\n", b"the conversation was appended to")
        type_in(b"/nothing\n", b"there is no command /nothing")
        for _ in range(30):
            os.write(ours, b"\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.wait(timeout=1) == 0
                break
        assert process.returncode == 0
    finally:
        process.kill()
        os.close(ours)
    (line,) = (home / "typed.jsonl").read_text(encoding="utf-8").splitlines()
    question, answer = json.loads(line)["messages"]
    assert question["content"] == "the cat" and 0 < len(answer["content"]) < 60000
