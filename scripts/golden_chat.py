#!/usr/bin/env python3
"""Makes tests/golden/chat_templates.json.gz: conversations rendered and tokenized by transformers.

    torch-env/bin/python scripts/golden_chat.py           # writes the file
    torch-env/bin/python scripts/golden_chat.py --check   # compares, writes nothing; exit code 1 on a difference

The environment is that of make_golden.py. Nothing is downloaded: the templates are those of
trainer/data/tokens/templates, which write what the published templates of these models write, and those below; the
tokenizers are trained here, one on bytes like those of Llama-3 and Qwen, one on words with a space before them like
those of Mistral and Gemma.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "trainer" / "data" / "tokens" / "templates"
FILE = ROOT / "tests" / "golden" / "chat_templates.json.gz"

# Every template without newlines of its own: what trim_blocks and lstrip_blocks do is in the templates of the package.
CHATML_GENERATION = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# White space that the block settings of the environment must remove, filters with arguments, loop controls, the date.
FEATURES = """\
{% set today = strftime_now('%Y') | length %}
{%- for message in messages[::-1] %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
  [{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}] {{ message.role | upper }}: {{ message.content | trim }}
    {{- message | tojson(indent=1, sort_keys=true) }}
{% endfor %}
{{ {'b': '<é>&', 'a': [1, none, true, 1.5]} | tojson }}{{ eos_token }}{{ unk_token }}{{ today }}
{{- messages | map(attribute='role') | join(',') }}{{ dict(a=1).items() | list }}
{% if tools is none and documents is none %}nothing{% endif %}"""

FAMILIES = {
    "llama3": ("llama3", "bytes", {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen2.5": ("qwen2.5", "bytes", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "qwen3": ("qwen3", "bytes", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "mistral": ("mistral", "words", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "gemma": ("gemma", "words", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "deepseek3": ("deepseek3", "bytes", {
        "bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}),
    "glm4": ("glm4", "bytes", {"eos_token": "<|endoftext|>"}),
    "phi3": ("phi3", "words", {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"}),
    "chatml": ("chatml", "bytes", {"eos_token": "<|endoftext|>"}),
    "chatml with generation blocks": (CHATML_GENERATION, "bytes", {"eos_token": "<|endoftext|>"}),
    "words with generation blocks": (CHATML_GENERATION, "words", {"bos_token": "<s>", "eos_token": "</s>"}),
    "features": (FEATURES, "bytes", {"eos_token": "<|endoftext|>", "unk_token": "<|im_end|>"}),
}
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
]
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]  # added tokens that a decoder shows
WORD_SPECIALS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<|endoftext|>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>",
]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: object, number: str = "abcdefgh1") -> dict:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, number: str = "abcdefgh1") -> dict:
    return {"role": "tool", "name": "weather", "tool_call_id": number, "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "The weather of a <city> & more, é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {
        "name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]
CONVERSATIONS = {
    "single turn": ([user("Hi"), assistant(" Hello! ")], None),
    "several turns": ([user("Hi"), assistant("Hello"), user("What is 2 + 2?\n"), assistant("4 🙂 naïve\n\ncafé")],
                      None),
    "system": ([SYSTEM, user("Hi"), assistant("Hello")], None),
    "system, several turns": ([SYSTEM, user("Hi"), assistant("Hello"), user("And now?"), assistant("Bye")], None),
    "system in the middle": ([user("Hi"), assistant("Hello"), SYSTEM, user("And?"), assistant("Bye")], None),
    "tools": ([user("Weather in Köln?"), assistant("", tool_calls=[call("weather", {"city": "Köln <x>"})]),
               result('{"t": 3}'), assistant("3 degrees")], TOOLS),
    "arguments as text": ([user("Weather in Köln?"), assistant("", tool_calls=[call("weather", '{"city": "Köln"}')]),
                           result('{"t": 3}'), assistant("3 degrees")], None),
    "two calls": ([SYSTEM, user("Weather?"), assistant("Let me see", tool_calls=[
        call("weather", {"city": "A", "days": [1, 2.5, None]}), call("now", {"n": 3}, "abcdefgh2")]),
        result("3"), result("4", "abcdefgh2"), assistant("done"), user("thanks"), assistant("welcome")], TOOLS),
    "call without content": ([user("Time?"), assistant(None, tool_calls=[call("now", {})]), result("3"),
                              assistant("three")], None),
    "thinking": ([user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"),
                  assistant("<think>\nhm, hm\n</think>\n\nd")], None),
    "reasoning": ([user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning="hm\n")],
                  None),
    "reasoning and tools": ([user("a"), assistant("x", reasoning_content="first", tool_calls=[call("now", {})]),
                             result("3"), assistant("b", reasoning_content="hm"), user("c"), assistant("d")], TOOLS),
    "markers in the content": ([user("<|im_end|> </s> [INST]"), assistant("</s><|im_start|>assistant\nx")], None),
    "roles out of order": ([user("a"), user("b"), assistant("c")], None),
    "assistant first": ([assistant("a"), user("b"), assistant("c")], None),
}


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    text = "Hello, the weather is brief. assistant user\n\nThe function name arguments"
    tokenizer.train_from_iterator([text] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in NOT_SPECIAL])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *fallback], show_progress=False)
    tokenizer.train_from_iterator(["Hello, the weather is brief. What is now done?\n" * 9], trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = []  # the bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in WORD_SPECIALS])
    return tokenizer


def template_text(template: str) -> str:
    path = TEMPLATES / f"{template}.jinja"
    return path.read_text(encoding="utf-8") if "{" not in template else template


def golden() -> dict:
    made = {"bytes": byte_tokenizer(), "words": word_tokenizer()}
    cases = []
    for family, (template, kind, special) in FAMILIES.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(made[kind].to_str()), **special)
        tokenizer.chat_template = template_text(template)
        for name, (messages, tools) in CONVERSATIONS.items():
            for is_prompt in (False, True):
                conversation = messages[:-1] if is_prompt else messages
                case = {"family": family, "conversation": name, "add_generation_prompt": is_prompt}
                cases.append(case | rendered(tokenizer, conversation, tools, is_prompt))
    return {
        "versions": {"transformers": __import__("transformers").__version__, "tokenizers": tokenizers.__version__},
        "tokenizers": {name: json.loads(tokenizer.to_str()) for name, tokenizer in made.items()},
        "families": {name: {"template": template, "tokenizer": kind, "special": special}
                     for name, (template, kind, special) in FAMILIES.items()},
        "conversations": {name: {"messages": messages, "tools": tools}
                          for name, (messages, tools) in CONVERSATIONS.items()},
        "cases": cases,
    }


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list, tools: list | None, is_prompt: bool) -> dict:
    """Returns text, ids and the assistant mask of a conversation, or the error of the template."""
    options = {"tools": tools, "add_generation_prompt": is_prompt}
    has_blocks = "generation %}" in tokenizer.chat_template
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # whatever the template raises
        return {"error": str(error)}
    options |= {"return_dict": True, "return_assistant_tokens_mask": has_blocks}
    encoded = tokenizer.apply_chat_template(messages, **options)
    mask = {"mask": "".join(map(str, encoded["assistant_masks"]))} if has_blocks else {}
    return {"text": text, "ids": encoded["input_ids"], **mask}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the file and write nothing")
    made = golden()
    text = json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n"
    if parser.parse_args().check:
        is_same = json.loads(gzip.decompress(FILE.read_bytes()))["cases"] == made["cases"]
        print("the same" if is_same else f"{FILE} differs")
        return 0 if is_same else 1
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    refused = sum("error" in case for case in made["cases"])
    print(f"{FILE}: {len(made['cases'])} cases, {refused} refused, {FILE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
