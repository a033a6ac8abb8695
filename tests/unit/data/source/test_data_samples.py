"""What is learned from a record: its form, the names of its columns, and what is wrong with a bad one."""

from __future__ import annotations

import json

import pytest
from data_helpers import sample_of

from trainer.data.source.samples import Sample
from trainer.errors import UserError

WHERE = "data.jsonl:3"
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def turns(sample: Sample) -> list[tuple[str, str | None]]:
    return [(message["role"], message["content"]) for message in sample.messages]


def test_a_text():
    assert sample_of(text="café", id=3) == Sample(None, None, "", "café", WHERE)
    assert sample_of(text="") is None


def test_messages_keep_what_else_they_have():
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "", "tool_call_id": "1", "name": "add"}
    messages = [{"role": "system", "content": "Be brief."}, USER, call, result, ASSISTANT]
    tools = [{"type": "function", "function": {"name": "add"}}]
    for given in (tools, json.dumps(tools)):
        assert sample_of(messages=messages, tools=given) == Sample(messages, tools, "", "", WHERE)
    without_content = {"role": "assistant", "tool_calls": [CALL]}
    assert sample_of(messages=[USER, without_content]).messages == [USER, call]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert turns(sample_of(messages=[{"role": "user", "content": parts}, ASSISTANT]))[0] == ("user", "one two")


def test_sharegpt():
    conversation = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1 + 1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
    ]
    for name in ("conversations", "messages"):
        sample = sample_of(**{name: conversation})
        assert turns(sample) == [
            ("system", "Be brief."), ("user", "1 + 1?"), ("assistant", None), ("tool", "2"), ("assistant", "2"),
        ]  # fmt: skip
        assert sample.messages[2]["tool_calls"] == [CALL]
        assert set(sample.messages[1]) == {"role", "content"}


def test_a_system_column_comes_before_the_conversation():
    conversation = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    sample = sample_of(conversations=conversation, system="Short.")
    assert turns(sample) == [("system", "Short."), ("user", "Hi"), ("assistant", "Ho")]
    assert turns(sample_of(messages=[USER, ASSISTANT], system=""))[0] == ("user", "Hi")


@pytest.mark.parametrize(
    ("extra", "user", "prompt"),
    [
        ({"input": "2"}, "Double\n\n2", "### Instruction:\nDouble\n\n### Input:\n2\n\n### Response:\n"),
        ({"input": ""}, "Double", "### Instruction:\nDouble\n\n### Response:\n"),
        ({}, "Double", "### Instruction:\nDouble\n\n### Response:\n"),
        ({"text": "the whole rendered"}, "Double", "### Instruction:\nDouble\n\n### Response:\n"),
    ],
)
def test_an_instruction_is_both_a_conversation_and_a_prompt_with_its_answer(extra, user, prompt):
    sample = sample_of(instruction="Double", output="4", **extra)
    assert turns(sample) == [("user", user), ("assistant", "4")]
    assert (sample.prompt, sample.text) == (prompt, "4")


def test_an_instruction_with_earlier_turns_is_a_conversation():
    sample = sample_of(instruction="And 3?", output="6", history=[["Double 2", "4"]], system="Count.")
    assert turns(sample) == [
        ("system", "Count."), ("user", "Double 2"), ("assistant", "4"), ("user", "And 3?"), ("assistant", "6"),
    ]  # fmt: skip
    assert (sample.prompt, sample.text) == ("", "")


def test_a_prompt_and_its_completion():
    assert sample_of(prompt="2 + 2 =", completion=" 4") == Sample(None, None, "2 + 2 =", " 4", WHERE)
    assert sample_of(prompt="", completion="4").prompt == ""


def test_messages_of_a_prompt_carry_no_loss():
    sample = sample_of(prompt=[USER, ASSISTANT, USER], completion=[ASSISTANT])
    assert sample.messages == [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]


def test_the_first_form_counts_and_null_is_absent():
    assert turns(sample_of(messages=[USER, ASSISTANT], text="the whole rendered"))[1] == ("assistant", "Hello!")
    assert sample_of(messages=None, instruction="a", output=None, text="t") == Sample(None, None, "", "t", WHERE)


def test_columns_have_the_names_of_the_file():
    columns = {"messages": "dialogue", "tools": "functions"}
    sample = sample_of(columns, dialogue=[USER, ASSISTANT], functions="[]", messages="not these")
    assert (sample.messages, sample.tools) == ([USER, ASSISTANT], None)
    assert sample_of({"text": "story"}, story="once", messages=[USER, ASSISTANT]).text == "once"
    with pytest.raises(UserError) as caught:
        sample_of(columns, dialog=[USER, ASSISTANT], id=1)
    assert str(caught.value).startswith(f"{WHERE}: the record has no column 'dialogue'")
    assert "its columns are dialog, id" in str(caught.value)
    with pytest.raises(UserError, match=r"data.jsonl:3: dialogue\.0\.role = 'bot'"):
        sample_of({"messages": "dialogue"}, dialogue=[{"role": "bot", "content": "a"}])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"txet": "a", "id": 1}, ["none of the known forms", "txet, id"]),
        ({}, ["none of the known forms", "none"]),
        ({"instruction": "a"}, ["none of the known forms", "instruction"]),
        ({"instruction": "a", "output": None}, ["none of the known forms"]),
        ({"text": 3}, ["text = 3", "must be text", "write it as a string"]),
        ({"prompt": 3, "completion": "a"}, ["prompt = 3", "must be text", "Fix: write it as a string"]),
        ({"messages": [{**USER, "content": None}, ASSISTANT]}, ["Fix: write a text, or remove the record"]),
        ({"text": "\ud800"}, ["surrogate"]),
        ({"instruction": "a", "input": 5, "output": "b"}, ["input = 5"]),
        ({"instruction": "", "output": "b"}, ["instruction", "empty"]),
        ({"instruction": "a", "output": " "}, ["output", "empty"]),
        ({"instruction": "a", "output": "b", "history": ["q", "a"]}, ["history", "list of pairs"]),
        ({"prompt": "a", "completion": ""}, ["completion", "empty"]),
        ({"prompt": "a", "completion": [ASSISTANT]}, ["two strings or two lists"]),
        ({"messages": "hi"}, ["messages = 'hi'", "a list of messages"]),
        ({"messages": []}, ["messages = []"]),
        ({"messages": ["hi"]}, ["messages.0 = 'hi'", "role and content"]),
        ({"messages": [{"role": "user"}]}, ["messages.0", "role and content"]),
        ({"conversations": [{"from": "human"}]}, ["conversations.0", "from and value"]),
        ({"messages": [{"role": "bot", "content": "a"}]}, ["messages.0.role = 'bot'", "assistant"]),
        ({"messages": [{"role": ["user"], "content": "a"}]}, ["messages.0.role = ['user']", "assistant"]),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, ["messages.1.content", "empty"]),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, ["messages.1.content = null", "text"]),
        ({"messages": [{"role": "user", "content": ["a"]}]}, ["messages.0.content.0 = 'a'", "a part"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["messages.0.content.0", "images"]),
        ({"messages": [USER, ASSISTANT], "tools": "{"}, ["tools = '{'", "JSON"]),
        ({"messages": [USER, ASSISTANT], "tools": {"a": 1}}, ["tools", "a list of tools"]),
        ({"messages": [USER, {**ASSISTANT, "reasoning_content": "\udc00"}]}, ["surrogate"]),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "\udc00"}]}]}, ["surrogate"]),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": 5}]}, ["messages.1.tool_calls = 5", "a list of calls"]),
        ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, ["conversations.0.value", "JSON"]),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, ["conversations.0.value", "a call"]),
    ],
)
def test_a_bad_record_is_named_with_its_field(fields, words):
    with pytest.raises(UserError) as caught:
        sample_of(**fields)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: ") and "Fix: " in message
    for word in words:
        assert word in message


def test_a_long_bad_value_is_shown_in_part():
    with pytest.raises(UserError) as caught:
        sample_of(text=["x" * 10_000])
    assert len(str(caught.value)) < 400
