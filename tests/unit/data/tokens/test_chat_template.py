"""Chat templates: the text, the tokens and the loss of conversations, compared with transformers and by hand."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from data_helpers import make_config, write_tokenizer

from trainer.data.source.samples import Sample
from trainer.data.tokens import template_engine
from trainer.data.tokens.chat_template import chatml, load_chat_template, template_names
from trainer.data.tokens.encode import Encoded, encode_samples, loss_mask
from trainer.data.tokens.tokenizer import ByteTokenizer, load_tokenizer
from trainer.errors import UserError

GOLDEN = json.loads(gzip.decompress((Path(__file__).parents[3] / "golden" / "chat_templates.json.gz").read_bytes()))
FAMILIES, CONVERSATIONS = GOLDEN["families"], GOLDEN["conversations"]
LARGE = {"vocab_size": 2000}


def write_tokenizer_of(folder: Path, family: str) -> Path:
    """Returns the files of a family's tokenizer, without a template."""
    described = FAMILIES[family]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(GOLDEN["tokenizers"][described["tokenizer"]]), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(described["special"]), encoding="utf-8")
    return folder


def encode_sample(sample: Sample, tokenizer, template, train_on: str) -> Encoded:
    def refuse(error: UserError) -> None:
        raise error

    (encoded,) = encode_samples([(sample, 0)], tokenizer, template, train_on, 1, refuse)
    return encoded


def load(folder: Path, path: Path | None = None, *, model=None, **train):
    """Returns tokenizer and template of a configuration in `folder`."""
    tokenizer = {} if path is None else {"tokenizer": {"type": "huggingface", "path": str(path)}}
    config = make_config(folder, "x", train={**tokenizer, **train}, model={**LARGE, **(model or {})})
    loaded = load_tokenizer(config)
    return loaded, load_chat_template(config, "train_dataset", loaded)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Returns tokenizer and template of each family, the template where a published one is: beside the tokenizer."""
    loaded = {}
    for family, described in FAMILIES.items():
        folder = write_tokenizer_of(tmp_path_factory.mktemp("family"), family)
        template = described["template"]
        if template in template_names():
            loaded[family] = load(folder, folder, chat_template=template)
        else:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
            loaded[family] = load(folder, folder)
    return loaded


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


def trained(template, messages, tools=None, train_on="assistant"):
    """Returns the parts of the text that carry loss."""
    text, spans = template.spans(messages, tools, train_on, "x:1")
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_tokens_and_masks_are_those_of_transformers(families, family):
    tokenizer, template = families[family]
    cases = [case for case in GOLDEN["cases"] if case["family"] == family]
    assert len(cases) == 2 * len(CONVERSATIONS)
    for case in cases:
        conversation, is_prompt = CONVERSATIONS[case["conversation"]], case["add_generation_prompt"]
        messages = conversation["messages"][:-1] if is_prompt else conversation["messages"]
        if "error" in case:
            with pytest.raises(UserError) as caught:
                template.render(messages, conversation["tools"], is_prompt, where="data.jsonl:7")
            assert case["error"].rstrip(".") in str(caught.value) and str(caught.value).startswith("data.jsonl:7: ")
            continue
        text = template.render(messages, conversation["tools"], is_prompt)
        assert text == case["text"], case
        (offsets,) = tokenizer.encode_offsets([text])
        assert offsets.ids.tolist() == case["ids"], case
        is_plain = {"role", "content"}.issuperset(key for message in messages for key in message)
        if "mask" in case and not is_prompt and is_plain:
            _, spans = template.spans(messages, conversation["tools"], "assistant", "")
            assert "".join(map(str, loss_mask(offsets, spans).astype(int))) == case["mask"], case


MULTI = [user("Hi"), assistant("Hello"), user("And?"), assistant("Bye")]
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "content": "3", "tool_call_id": CALL["id"]}
WITH_TOOLS = [user("Hi"), assistant("", tool_calls=[CALL]), RESULT, assistant("three"), user("Thanks"),
              assistant("Bye")]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "plain", "with_tools"),
    [
        ("llama3", ["Hello<|eot_id|>", "Bye<|eot_id|>"], None),
        ("gemma", ["Hello<end_of_turn>", "Bye<end_of_turn>"], None),
        ("phi3", ["Hello<|end|>", "Bye<|end|>"], None),
        (
            "qwen2.5",
            ["Hello<|im_end|>", "Bye<|im_end|>"],
            ['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>', "three<|im_end|>"],
        ),
        (
            "qwen3",
            ["Hello<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"],
            ['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>', "three<|im_end|>"],
        ),
        (
            "mistral",
            [" Hello</s>", " Bye</s>"],
            ['[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefgh1"}]</s>', " three</s>"],
        ),
        (
            "deepseek3",
            ["Hello<｜end▁of▁sentence｜>", "Bye<｜end▁of▁sentence｜>"],
            [
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
                '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
                "three<｜end▁of▁sentence｜>",
            ],
        ),
        (
            "glm4",
            ["\n<think></think>\nHello<|user|>", "\n<think></think>\nBye<|endoftext|>"],
            [
                "\n<think></think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
                "<|observation|>",
                "\n<think></think>\nthree<|user|>",
            ],
        ),
    ],
)
def test_loss_is_on_the_assistants_turns_and_the_tokens_that_end_them(families, family, plain, with_tools):
    template = families[family][1]
    assert trained(template, MULTI) == plain
    assert trained(template, MULTI, train_on="last") == plain[-1:]
    assert trained(template, [*MULTI, user("More?")])[0] == plain[0], "what follows the last answer carries no loss"
    text, spans = template.spans(MULTI, None, "all", "")
    assert spans == [(0, len(text))]
    assert trained(template, [user("Hi"), assistant("Hello", weight=0), *MULTI[2:]]) == plain[-1:]
    if with_tools is not None:
        assert trained(template, WITH_TOOLS)[:2] == with_tools and len(trained(template, WITH_TOOLS)) == 3


def test_turns_are_found_where_the_template_writes_earlier_ones_differently(families):
    """Qwen3 and GLM-4 drop the thinking of answers to earlier questions, Mistral moves the system turn."""
    thinking = [user("a"), assistant("b", reasoning_content="why", tool_calls=[CALL]),
                {"role": "tool", "content": "3"}, assistant("c", reasoning_content="so"), user("d"), assistant("e")]
    assert trained(families["qwen3"][1], thinking)[1:] == ["c<|im_end|>", "<think>\n\n</think>\n\ne<|im_end|>"]
    assert "why" not in "".join(trained(families["qwen3"][1], thinking))
    ends = [part.rpartition("<|")[2] for part in trained(families["glm4"][1], thinking)]
    assert trained(families["glm4"][1], thinking)[1] == "\n<think></think>\nc<|user|>"
    assert ends == ["observation|>", "user|>", "endoftext|>"]
    system = [{"role": "system", "content": "Be brief."}, *WITH_TOOLS]
    assert trained(families["mistral"][1], system)[1:] == [" three</s>", " Bye</s>"]


def test_a_conversation_may_start_with_the_assistant(tmp_path):
    """Llama-3's template writes the first token with the first message, so that no messages do not start the text."""
    folder = write_tokenizer_of(tmp_path / "t", "llama3")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ bos_token if loop.first }}<|start_header_id|>{{ m.role }}<|end_header_id|>"
        "{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    template = load(tmp_path, folder)[1]
    assert trained(template, MULTI[1:]) == ["Hello<|eot_id|>", "Bye<|eot_id|>"]
    assert trained(template, [MULTI[1], MULTI[3]]) == ["Hello<|eot_id|>", "Bye<|eot_id|>"], "by prefixes"


def test_thinking_that_the_generation_prompt_starts_is_no_loss(tmp_path):
    """Renders as DeepSeek-R1 does: an answer that starts like the prompt has loss behind it, other answers from the
    header on."""
    folder = write_tokenizer_of(tmp_path / "t", "chatml")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    template = load(tmp_path, folder)[1]
    thinking = [*MULTI[:3], assistant("<think>\nhm</think>Bye")]
    assert trained(template, thinking) == ["Hello<|im_end|>", "hm</think>Bye<|im_end|>"]


def test_an_answer_in_several_parts_is_one_turn(tmp_path):
    """Renders as gpt-oss does: the thinking ends with the token that ends a turn too."""
    folder = write_tokenizer_of(tmp_path / "t", "chatml")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.reasoning_content %}<|im_start|>thinks\n{{ m.reasoning_content }}<|im_end|>"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    template = load(tmp_path, folder)[1]
    thinking = [*MULTI[:3], assistant("Bye", reasoning_content="hm")]
    assert trained(template, thinking)[-1] == "thinks\nhm<|im_end|><|im_start|>assistant\nBye<|im_end|>"


COHERE = """\
{%- for m in messages %}
    {{- '<|START|>' + m.role }}
    {{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' if m.role == 'assistant' else m.content }}
    {{- '<|END_OF_TURN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START|>assistant<|START_RESPONSE|>' }}{%- endif %}
"""


def test_an_end_token_that_follows_the_end_of_a_turn_carries_loss_too(tmp_path):
    names = [f"<|{name}|>" for name in "START START_RESPONSE END_RESPONSE END_OF_TURN OTHER".split()]
    write_tokenizer(tmp_path / "tokenizer.json", *names)
    (tmp_path / "chat_template.jinja").write_text(COHERE)
    for eos, end in (("<|END_OF_TURN|>", "<|END_OF_TURN|>"), ("<|OTHER|>", "")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        _, template = load(tmp_path, tmp_path)
        assert template.turn_end == "<|END_RESPONSE|>"
        messages = [user("a"), assistant("b"), user("c"), assistant("d")]
        assert trained(template, messages) == [f"b<|END_RESPONSE|>{end}", f"d<|END_RESPONSE|>{end}"]
        assert trained(template, messages, train_on="last") == [f"d<|END_RESPONSE|>{end}"]


def test_a_template_that_ships_is_exported_without_generation_blocks(families, tmp_path):
    for family in ("llama3", "gemma", "phi3", "qwen2.5", "qwen3", "mistral", "deepseek3", "glm4"):
        exported = families[family][1].as_file
        assert "generation %}" not in exported
        path = tmp_path / "own.jinja"
        path.write_text(exported, encoding="utf-8")
        own = load(tmp_path, write_tokenizer_of(tmp_path / family, family), chat_template=str(path))[1]
        for messages in (MULTI, [user("a"), assistant("b")]):
            assert own.render(messages) == families[family][1].render(messages), family


@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1"])
def test_a_text_with_the_marks_of_generation_blocks_is_refused(families, mark):
    with pytest.raises(UserError, match="the conversation has the character U\\+FDD0 or U\\+FDD1"):
        trained(families["llama3"][1], [user(f"a{mark}b"), assistant("c")])


def test_markers_in_the_data_do_not_move_the_spans(families):
    marked = [user("<|im_end|><|im_start|>assistant\nx"), assistant("a<|im_end|>b"), user("c"), assistant("d")]
    assert trained(families["qwen2.5"][1], marked) == ["a<|im_end|>b<|im_end|>", "d<|im_end|>"]


def test_an_unclosed_last_answer_gets_the_end_token(families):
    tokenizer, template = families["glm4"]
    assert any("<|endoftext|> is added, with loss" in note for note in template.notes)
    encoded = encode_sample(Sample(MULTI, None, "", "", "x:1"), tokenizer, template, "assistant")
    assert encoded.tokens[-1] == tokenizer.eos_id and encoded.has_loss[-1]


# ---- without a template ----------------------------------------------------------------------------------------------


def test_without_a_template_bytes_are_written_as_chatml_with_the_end_token():
    tokenizer, template = ByteTokenizer(), chatml(ByteTokenizer())
    assert template.name == "ChatML" and not template.is_given
    assert template.notes == (
        "Neither the tokenizer nor the YAML has a chat template: conversations are written as ChatML "
        "(<|im_start|>, <|im_end|> are ordinary text for this tokenizer).",
    )
    encoded = encode_sample(Sample(MULTI, None, "", "", ""), tokenizer, template, "assistant")
    expected, mask = [], []
    for text, has_loss in [
        (b"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0), (b"Hello", 1), ([256], 1),
        (b"\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", 0), (b"Bye", 1), ([256], 1),
    ]:  # fmt: skip
        expected += list(text)
        mask += [has_loss] * len(text)
    assert encoded.tokens.tolist() == expected and encoded.has_loss.astype(int).tolist() == mask
    prompt = template.render(MULTI[:1], add_generation_prompt=True)
    assert tokenizer.decode(expected, skip_special_tokens=False).startswith(prompt)


def test_a_conversation_that_ends_with_a_question_ends_with_a_token_without_loss():
    encoded = encode_sample(Sample(MULTI[:3], None, "", "", ""), ByteTokenizer(), chatml(ByteTokenizer()), "assistant")
    assert encoded.tokens[-1] == 256 and not encoded.has_loss[-1] and encoded.has_loss.sum() == 6


def test_without_a_template_a_tokenizer_with_the_token_of_chatml_ends_turns_with_it(tmp_path):
    tokenizer, template = load(tmp_path, write_tokenizer_of(tmp_path / "t", "chatml"))
    assert not template.is_given and [note[-10:] for note in template.notes] == ["as ChatML."]
    assert trained(template, MULTI) == ["Hello<|im_end|>", "Bye<|im_end|>"]
    assert template.turn_end_id == tokenizer.token_id("<|im_end|>") != tokenizer.eos_id


@pytest.mark.parametrize("more", [{"tools": [{}]}, {}])
def test_chatml_refuses_tools(more):
    messages = MULTI if more else WITH_TOOLS
    with pytest.raises(UserError, match="ChatML has no form for tool"):
        chatml(ByteTokenizer()).render(messages, **more)


def test_a_template_that_needs_a_special_token_says_which_one_the_tokenizer_lacks(tmp_path):
    with pytest.raises(UserError, match="deepseek3. needs a bos_token, which the tokenizer lacks.\n  Fix: use a token"):
        load(tmp_path, chat_template="deepseek3")[1].render(MULTI)


# ---- where the template comes from -----------------------------------------------------------------------------------


def test_the_yaml_wins_over_the_file_and_the_file_over_tokenizer_config(tmp_path):
    folder = write_tokenizer_of(tmp_path / "t", "chatml")
    described = json.loads((folder / "tokenizer_config.json").read_text())
    several = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "config with tools"}]
    for found in ("config", several):
        (folder / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": found}))
        template = load(tmp_path, folder)[1]
        assert template.render(MULTI) == "config" and "tokenizer_config.json" in template.name and template.is_given
    assert template.render(MULTI, tools=[]) == "config with tools"
    (folder / "chat_template.jinja").write_text("file")
    of_file = load(tmp_path, folder)[1]
    assert of_file.render(MULTI) == "file" and of_file.fingerprint != template.fingerprint
    other = tmp_path / "other.jinja"
    other.write_text("yaml")
    assert load(tmp_path, folder, chat_template=str(other))[1].render(MULTI) == "yaml"
    assert load(tmp_path, None, chat_template=str(folder))[1].render(MULTI) == "file"
    assert load(tmp_path, folder, chat_template="gemma")[1].render(MULTI[:1]).startswith("<start_of_turn>user")


@pytest.mark.parametrize(
    ("name", "words"), [("lama3", "one of alpaca, chatml, deepseek3, gemma, glm4"), ("none.jinja", "No such file")]
)
def test_an_unknown_name_is_an_error_with_the_names(tmp_path, name, words):
    with pytest.raises(UserError, match=r"run.yaml:\d+: train_dataset.chat_template = ") as caught:
        load(tmp_path, chat_template=name)
    assert words in str(caught.value)


def test_a_folder_without_a_template_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder has neither chat_template.jinja nor"):
        load(tmp_path, chat_template=str(tmp_path / "empty"))


def test_markers_that_are_no_tokens_are_said(tmp_path):
    template = load(tmp_path, chat_template="llama3")[1]
    assert template.notes == (
        "Markers of the chat template are not tokens of the tokenizer but ordinary text: <|start_header_id|>, "
        "<|end_header_id|>, <|eot_id|>.",
    )
    assert template.turn_end == "<|eot_id|>" and template.turn_end_id is None
    assert trained(template, MULTI) == ["Hello<|eot_id|>", "Bye<|eot_id|>"]


def test_a_turns_end_beyond_the_models_vocabulary_is_an_error(tmp_path):
    folder = write_tokenizer_of(tmp_path / "t", "chatml")
    end = load(tmp_path, folder)[0].token_id("<|eot_id|>")
    with pytest.raises(UserError, match=f"vocab_size = {end}: .* turns with '<.eot_id.>', whose id {end} ") as caught:
        load(tmp_path, folder, model={"vocab_size": end}, chat_template="llama3")
    assert f"Fix: set it to at least {end + 1}" in str(caught.value)


# ---- bad templates and bad conversations -----------------------------------------------------------------------------


def with_template(folder: Path, text: str):
    path = folder / "own.jinja"
    path.write_text(text, encoding="utf-8")
    return load(folder, chat_template=str(path))[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n{% for x in y %}", r"own.jinja:2: the chat template has a syntax error: Unexpected end of template"),
        ("a\n\n{{ x | nothing }}", r"own.jinja:3: .*No filter named 'nothing'"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled .*recursion"),
    ],
)
def test_a_syntax_error_names_file_and_line(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        with_template(tmp_path, text)


def test_a_syntax_error_in_tokenizer_config_names_the_line_of_the_template(tmp_path):
    folder = write_tokenizer_of(tmp_path / "t", "chatml")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "\n{% if %}"}))
    with pytest.raises(UserError, match=r"tokenizer_config.json: .*syntax error, line 2 of the template"):
        load(tmp_path, folder)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 5000 + "{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "sum": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "concatenation": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "block": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
             "{% endfor %}",
    "product": "{{ 'x' * 10 ** 12 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "width": "{{ 'x'.ljust(10 ** 12) }}",
    "replacement": "{{ ('x' * 9999) | replace('x', 'y' * 9999) }}",
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_template_ends(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(template_engine, "MAX_STEPS", 1 << 18)
    monkeypatch.setattr(template_engine, "MAX_CHARACTERS", 1 << 20)
    path = tmp_path / "own.jinja"
    path.write_text("\n" + ENDLESS[kind], encoding="utf-8")
    with pytest.raises(UserError, match=r"own.jinja(:2)?: the chat template does not end on this conversation: it "):
        load(tmp_path, chat_template=str(path))[1].render(MULTI)


GIGABYTES = (
    "{{ '%2000000000d' % 1 }}", "{{ '%*d' % (2000000000, 1) }}", "{{ '%.2000000000f' % 1.5 }}",
    "{{ '%2000000000d' | format(1) }}", "{{ '{:2000000000}'.format(1) }}", "{{ '{:{w}}'.format(1, w=2000000000) }}",
    "{{ 'x' | center(2000000000) }}", "{{ 'x\\ny' | indent(2000000000) }}", "{{ 'x' | indent(2000000000, true) }}",
    "{{ ('x' * 50000) | replace('x', 'y' * 50000) }}", "{{ ('x' * 50000).replace('x', 'y' * 50000) }}",
    "{{ ('x' * 50000) | join('y' * 50000) }}", "{{ ('y' * 50000).join('x' * 50000) }}",
    "{{ [1] | batch(2000000000, 'x') | list }}", "{{ [1] | tojson(indent=2000000000) }}",
    "{{ ('\\t' * 50000).expandtabs(50000) }}", "{{ ('x ' * 50000) | wordwrap(1, wrapstring='y' * 50000) }}",
    "{% set x = 'x' * 60000000 %}{% set y = " + " ~ ".join(["x"] * 40) + " %}",
    "{% set x = 'x' * 60000000 %}{% set y %}{% for i in range(40) %}{{ x }}{% endfor %}{% endset %}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(9999999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
)  # fmt: skip
RENDER_ALL = """
import json, resource, sys
from trainer.data.tokens import template_engine

template_engine.MAX_MEMORY_BYTES = 1 << 27
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outcomes = []
for source in json.load(sys.stdin):
    try:
        template_engine.render(template_engine.compile_template(source), {})
        outcomes.append("it was rendered: " + source)
    except template_engine.Unbounded as error:
        outcomes.append(template_engine.line_of(error))
limit, _ = resource.getrlimit(resource.RLIMIT_AS)
print(json.dumps([outcomes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, limit]))
"""


def test_a_template_that_asks_for_gigabytes_does_not_get_them():
    process = subprocess.run([sys.executable, "-c", RENDER_ALL], input=json.dumps(GIGABYTES), text=True,
                             capture_output=True, timeout=300)  # fmt: skip
    assert process.returncode == 0, process.stderr
    outcomes, added_mib, limit = json.loads(process.stdout)
    assert outcomes == [1] * len(GIGABYTES)
    assert added_mib < 192, f"{added_mib} MiB"
    assert limit == resource.getrlimit(resource.RLIMIT_AS)[0]


def test_generation_blocks_in_macros_and_conditions_are_the_spans(tmp_path):
    template = with_template(
        tmp_path, "{% macro turn(m) %}[{{ m.role }}{% generation %}{{ m.content }}|{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ turn(m) }}{% endif %}{% endfor %}")
    assert trained(template, MULTI) == ["Hello|", "Bye|"]
    assert template.render(MULTI) == "Hi[assistantHello|And?[assistantBye|"


def test_a_template_that_wants_the_arguments_of_a_call_as_a_string_says_so(tmp_path):
    joined = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ 'x' + c.function.arguments }}"
    template = with_template(tmp_path, joined + "{% endfor %}|{% endfor %}")
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    with pytest.raises(UserError, match="TypeError: .*\n  Fix: write `arguments` of the tool calls as a JSON string"):
        template.render([user("a"), assistant("b", tool_calls=calls)])
    calls[0]["function"]["arguments"] = '{"a": 1}'
    assert template.render([user("a"), assistant("b", tool_calls=calls)]) == 'a|bx{"a": 1}|'


def test_a_template_is_kept_in_its_sandbox(tmp_path):
    template = with_template(tmp_path, "{{ messages.append(1) }}")
    with pytest.raises(UserError, match="line 1 of it: SecurityError"):
        template.render(MULTI)
    with pytest.raises(UserError, match="SecurityError"):
        with_template(tmp_path, "{{ ''.__class__.__mro__ }}").render(MULTI)


def test_a_conversation_without_anything_to_learn_is_an_error():
    for messages in (MULTI[:1], [user("a"), assistant("b", weight=0)]):
        with pytest.raises(UserError, match="x:1: messages: .*nothing to learn"):
            trained(chatml(ByteTokenizer()), messages)


def test_what_a_template_leaves_out_is_an_error(families, tmp_path):
    with pytest.raises(UserError, match="llama3.* leaves out the tools"):
        trained(families["llama3"][1], MULTI, tools=[{"type": "function"}])
    with pytest.raises(UserError, match="leaves out the calls of tools"):
        trained(families["llama3"][1], WITH_TOOLS)
    with pytest.raises(UserError, match="leaves out the reasoning of the assistant"):
        trained(families["llama3"][1], [user("a"), assistant("b", thinking="c")])
    turns = "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}"
    without_system = with_template(tmp_path, turns)
    with pytest.raises(UserError, match="leaves out the system's message 0"):
        trained(without_system, [{"role": "system", "content": "Be brief."}, *MULTI])
    nothing = with_template(tmp_path, "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="leaves out the whole conversation"):
        trained(nothing, [assistant("b")], train_on="all")


def test_turns_that_cannot_be_found_are_an_error_with_the_ways_out(tmp_path):
    upside_down = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content | upper | lower }}\n{% endfor %}"
    template = with_template(tmp_path, upside_down)
    lower = [{**message, "content": message["content"].lower()} for message in MULTI]
    with pytest.raises(UserError, match="x:1: .*does not show where .*\n  Fix: .*generation.*train_on"):
        trained(template, lower)
    assert trained(template, lower, train_on="all") == [template.render(lower)]


# ---- other forms -----------------------------------------------------------------------------------------------------


def test_instructions_use_the_template_only_where_there_is_one(families):
    sample = Sample(MULTI[:2], None, "### Instruction:\nHi\n\n### Response:\n", "Hello", "")
    plain = encode_sample(sample, ByteTokenizer(), chatml(ByteTokenizer()), "assistant")
    assert plain.tokens.tolist() == [*sample.prompt.encode(), *b"Hello", 256]
    assert plain.has_loss.astype(int).tolist() == [0] * len(sample.prompt) + [1] * 6 and plain.num_rendered == 0
    tokenizer, template = families["llama3"]
    rendered = encode_sample(sample, tokenizer, template, "assistant")
    assert tokenizer.decode(rendered.tokens, skip_special_tokens=False) == template.render(MULTI[:2])
    assert rendered.num_conversations == rendered.num_rendered == plain.num_conversations == 1


def test_the_template_of_alpaca_writes_an_instruction_as_one_without_a_template_is_written(tmp_path):
    tokenizer, template = load(tmp_path, chat_template="alpaca")
    sample = Sample(MULTI[:2], None, f"### Instruction:\n{MULTI[0]['content']}\n\n### Response:\n", "", "")
    sample = sample._replace(text=MULTI[1]["content"])
    plain, rendered = (encode_sample(sample, tokenizer, each, "assistant") for each in (chatml(tokenizer), template))
    assert [plain.num_rendered, rendered.num_rendered] == [0, 1]
    assert plain.tokens.tolist() == rendered.tokens.tolist()
    assert plain.has_loss.tolist() == rendered.has_loss.tolist()
    prompt = template.render(MULTI[:1], add_generation_prompt=True)
    assert prompt == sample.prompt and template.turn_end_id == tokenizer.eos_id and template.notes == ()


def test_a_prompt_and_its_completion_are_one_text_between_the_tokens_of_a_document(families):
    tokenizer, template = families["mistral"]
    encoded = encode_sample(Sample(None, None, "Hello, the we", "ather", ""), tokenizer, template, "assistant")
    assert encoded.tokens.tolist() == [tokenizer.bos_id, *tokenizer.encode("Hello, the weather"), tokenizer.eos_id]
    learnt = tokenizer.decode(encoded.tokens[encoded.has_loss], skip_special_tokens=False)
    assert learnt.endswith("ather</s>") and not encoded.has_loss[:2].any()
    whole = encode_sample(Sample(None, None, "", "Hello", ""), tokenizer, template, "assistant")
    assert whole.has_loss is None and whole.num_conversations == 0


def test_bytes_know_the_characters_they_cover():
    text = "é🙂<|endoftext|>a"
    (offsets,) = ByteTokenizer().encode_offsets([text])
    assert offsets.ids.tolist() == [*"é🙂".encode(), 256, 97] == ByteTokenizer().encode(text)
    assert offsets.starts.tolist() == [0, 0, 1, 1, 1, 1, 2, 15] and offsets.ends.tolist() == [1, 1, 2, 2, 2, 2, 15, 16]
    assert loss_mask(offsets, [(1, 15)]).astype(int).tolist() == [0, 0, 1, 1, 1, 1, 1, 0]
