"""Chat without a model: commands, what is forgotten, and where the configuration of a checkpoint is found."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from config_helpers import BASE, failure

from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.flags import split_arguments
from trainer.cli.main import dispatch
from trainer.config import Config
from trainer.run import chat
from trainer.run.chat import COMMANDS, Command, Conversation, checkpoint_config, parse_command
from trainer.run.generation import context_length


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("hello", None),
        (" /etc/passwd?", None),  # a space makes it a message
        ("", None),
        ("/reset", Command("/reset", "")),
        ("/reset ", Command("/reset", "")),
        ("/system Be  brief. ", Command("/system", "Be  brief.")),
        ("/system", Command("/system", "")),
        ("/temperature 0.5", Command("/temperature", "0.5")),
        ("/save my file.jsonl", Command("/save", "my file.jsonl")),
        *((word, Command("/exit", "")) for word in ("exit", "quit", "/exit", "/quit ")),
        (" exit", None),
        ("exit now", None),
    ],
)
def test_commands(line: str, command: Command | None) -> None:
    assert parse_command(line) == command


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("/rest", ["there is no command /rest", "/reset", "put a space before"]),
        ("/resetnow", ["there is no command /resetnow"]),
        ("/save", ["/save needs an argument", "write /save FILE"]),
        ("/reset all", ["/reset takes no argument"]),
    ],
)
def test_mistakes_in_commands(line: str, parts: list[str]) -> None:
    message = failure(lambda: parse_command(line))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_exit_leaves_a_pipe_as_it_leaves_a_terminal(word: str, is_terminal: bool, monkeypatch, capsys) -> None:
    asked: list[str] = []
    monkeypatch.setattr(chat._ChatSession, "reply", lambda self, message: asked.append(message) or 0)
    talk = chat._ChatSession(tokenizer=None, encode=None, generator=None, sampling=None, context=1, max_new_tokens=1)
    lines = ["one", " exit", word, "two"]
    if is_terminal:
        typed = iter(lines)
        monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
        assert chat._chat_on_terminal(talk) == 0
    else:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        assert chat._chat_from_pipe(talk) == 0
        assert f"note: {word} in line 3 ends the conversation" in capsys.readouterr().err
    assert asked == ["one", "exit"]


def test_every_command_can_be_parsed() -> None:
    for form in COMMANDS:
        assert parse_command(form) is not None


def conversation(turns: int) -> Conversation:
    """Questions and answers of one token each, the last a question."""
    made = Conversation(system="s")
    for number in range(turns):
        made.add("assistant" if number % 2 else "user", str(number))
    return made


def tokens(messages: list[dict[str, str]]) -> list[int]:
    return [-1 if message["role"] == "system" else int(message["content"]) for message in messages]


def test_the_oldest_questions_are_forgotten_with_their_answers() -> None:
    talk = conversation(5)
    assert talk.fit(tokens, 6) == [-1, 0, 1, 2, 3, 4] and talk.dropped == 0
    assert talk.fit(tokens, 5) == [-1, 2, 3, 4] and talk.dropped == 2
    talk.add("assistant", "5")
    talk.add("user", "6")
    assert talk.fit(tokens, 4) == [-1, 4, 5, 6] and talk.dropped == 4  # what is dropped stays so
    assert talk.fit(tokens, 1) == [-1, 6]  # but not the question itself
    assert len(talk.messages()) == 8  # all is there to be saved


# ---- the configuration -----------------------------------------------------------------------------------------------


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Writes the files of a run: its configuration, and the checkpoints of two steps."""
    folder = tmp_path / "output"
    for step in (1, 2):
        tensors = {"model": {"w": np.float32([step])}, "optimizer": {}}
        write_checkpoint(folder / "checkpoints", step, tensors, {}, 5, best_steps=[1])
    (folder / "config.yaml").write_text(BASE + "load_checkpoint: base\n")
    return folder


def config_of(name: Path, *flags: str) -> Config:
    arguments = split_arguments(flags)
    return checkpoint_config(str(name), arguments.config, arguments.overrides, "chat")


def test_a_checkpoint_has_the_configuration_of_its_run(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {name: output / "checkpoints" / f"step-{number:08d}" for number, name in ((1, "best"), (2, "newest"))}
    named = {output: "newest", output / "checkpoints": "newest", output / "checkpoints" / "best": "best"}
    for name, which in {**named, steps["best"]: "best", steps["newest"]: "newest"}.items():
        config = config_of(name)
        assert (config.run_mode, Path(config.load_checkpoint)) == ("chat", steps[which]), name
        assert config.decoder.hidden_size == 64 and config.source.path == str(output / "config.yaml")
    monkeypatch.chdir(output / "checkpoints")
    assert config_of(Path(steps["newest"].name)).load_checkpoint == steps["newest"].name


def test_adapters_keep_the_base_model_of_their_run(output: Path) -> None:
    write_checkpoint(output / "checkpoints", 3, {"adapter_model": {"a": np.float32([1])}, "optimizer": {}}, {}, 5)
    pet = "    pet_config: {pet_type: lora, lora_rank: 2, lora_alpha: 4, target_modules: '.*wq'}\ntrain_dataset:"
    yaml = output / "config.yaml"
    yaml.write_text(yaml.read_text().replace("train_dataset:", pet))
    config = config_of(output)
    assert config.load_checkpoint == "base" and Path(config.adapter_id).name == "step-00000003"


def test_another_configuration_and_flags_win(output: Path, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(BASE.replace("64", "128"))
    config = config_of(output, "--config", str(tmp_path / "other.yaml"), "--seed", "7")
    assert (config.decoder.hidden_size, config.seed, config.run_mode) == (128, 7, "chat")


def test_a_sampling_rule_turns_sampling_on(output: Path) -> None:
    assert not config_of(output).decoder.do_sample
    for flag in ("--temperature", "--top_p", "--model.model_config.top_p"):
        assert config_of(output, flag, "0.5").decoder.do_sample, flag
    assert not config_of(output, "--temperature", "0.5", "--do_sample", "False").decoder.do_sample
    assert config_of(output, "--max_new_tokens", "5").decoder.max_new_tokens == 5


def test_a_checkpoint_that_is_not_there_or_has_no_configuration(output: Path, tmp_path: Path) -> None:
    message = failure(lambda: config_of(tmp_path / "nowhere"))
    assert "there is no such checkpoint" in message and f"name one that is there: {output}" in message
    message = failure(lambda: config_of(tmp_path))
    assert "holds no complete checkpoint" in message and f"name one that is there: {output}" in message
    message = failure(lambda: config_of(output / "checkpoints" / "step-00000099"))
    assert f"name one that is there: {output / 'checkpoints'}/step-0000000" in message
    os.rename(output / "config.yaml", output / "other.yaml")
    message = failure(lambda: config_of(output))
    assert "there is no config.yaml of a run beside the checkpoint" in message and "--config FILE" in message


def test_an_evaluation_without_a_model_says_what_to_give() -> None:
    message = failure(lambda: dispatch(["eval", "--tasks", "hellaswag"]))
    assert "eval needs a model" in message and "eval output/quickstart, or eval --config FILE --load_" in message


def test_a_model_folder_needs_no_configuration(output: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    rest = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 64, "vocab_size": 300}
    folder = output / "checkpoints" / "step-00000002"
    (folder / "config.json").write_text(json.dumps({**sizes, **rest, "max_position_embeddings": 128}))
    assert config_of(folder).decoder.hidden_size == 64  # a checkpoint beside its run's configuration
    copied = folder.rename(tmp_path / "copied")
    assert config_of(copied, "--config", str(output / "config.yaml")).decoder.hidden_size == 64
    config = config_of(copied, "--seed", "7")
    assert (config.decoder.hidden_size, config.run_mode, config.seed) == (32, "chat", 7)
    assert config.load_checkpoint == str(copied) and context_length(config) == 128
