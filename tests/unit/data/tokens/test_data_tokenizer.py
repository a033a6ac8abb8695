"""Tokenizers: bytes, and a Hugging Face tokenizer.json made here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter

import pytest
from data_helpers import line_of, make_config, write_tokenizer
from mutations import mutate, mutated_text

from trainer.data.tokens.tokenizer import ByteTokenizer, load_tokenizer
from trainer.errors import UserError

TEXTS = ["", "plain", "line\nline\r\n\ttab", "naïve café", "日本語", "🙂 family 👨‍👩‍👧", "\x00\x7f"]


def hugging_face(tmp_path, path, **model):
    train = {"tokenizer": {"type": "huggingface", "path": str(path)}}
    return load_tokenizer(make_config(tmp_path, "x", train=train, model=model))


@pytest.fixture
def plain(tmp_path):
    return hugging_face(tmp_path, write_tokenizer(tmp_path / "tokenizer.json", "<|endoftext|>"))


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_the_bytes_of_utf_8(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode() and tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x"]) == [ids, [120]]
    assert [array.tolist() for array in tokenizer.encode_utf8([text.encode()])] == [ids]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)


def test_decoding_bytes_leaves_out_special_tokens_and_replaces_invalid_bytes():
    assert ByteTokenizer().decode([72, 256, 105, 299, -1, 0xFF]) == "Hi\ufffd"


def test_bytes_from_a_terminal_that_are_not_utf_8_are_kept():
    assert ByteTokenizer().encode(b"a\xff".decode("utf-8", "surrogateescape")) == [97, 255]


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_bytes_gives_the_same_text(text):
    stream = ByteTokenizer().stream()
    pushed = [stream.push(token_id) for token_id in [*ByteTokenizer().encode(text), 256]]
    assert "".join(pushed) + stream.finish() == text
    assert all("\ufffd" not in part for part in pushed)


def test_streaming_replaces_an_incomplete_character_only_at_the_end():
    stream = ByteTokenizer().stream()
    assert [stream.push(token_id) for token_id in "é🙂".encode()[:-1]] == ["", "é", "", "", ""]
    assert stream.finish() == "\ufffd"


def test_the_eos_of_bytes_cannot_be_another(tmp_path):
    assert load_tokenizer(make_config(tmp_path, "x", model={"eos_token_id": 256})).eos_id == 256
    assert load_tokenizer(make_config(tmp_path, "x", model={"eos_token_id": [256, 10]})).eos_id == 256
    with pytest.raises(UserError, match="model.model_config.eos_token_id = 2: .*id 256") as caught:
        load_tokenizer(make_config(tmp_path, "x", model={"eos_token_id": 2}))
    assert line_of(tmp_path, "eos_token_id") in str(caught.value)


def test_bytes_need_no_tokenizers_library():
    code = "import sys, trainer.data; sys.exit(any(name in sys.modules for name in ('tokenizers', 'mindspore')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face_round_trip(plain, text):
    ids = plain.encode(text)
    assert plain.decode(ids) == text
    assert plain.encode_batch([text, text]) == [ids, ids]
    assert [array.tolist() for array in plain.encode_utf8([text.encode()])] == [ids]


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_hugging_face_gives_the_same_text(plain, text):
    stream = plain.stream()
    pushed = [stream.push(token_id) for token_id in [*plain.encode(text), plain.eos_id]]
    assert "".join(pushed) + stream.finish() == text
    assert all("\ufffd" not in part for part in pushed)


def test_streaming_garbage_does_not_wait_forever(plain):
    stream = plain.stream()
    byte = plain.encode("é")[-1]  # a continuation byte: never the start of a character
    assert "\ufffd" in "".join(stream.push(byte) for _ in range(20))


def test_hugging_face_vocabulary_and_specials(tmp_path, plain):
    assert plain.decode([*plain.encode("cat"), plain.eos_id]) == "cat"
    assert plain.vocab_size == plain.eos_id + 1, "the special token was added last"
    assert plain.bos_id is None
    both = hugging_face(tmp_path, write_tokenizer(tmp_path / "b" / "tokenizer.json", "<s>", "</s>").parent)
    assert (both.bos_id, both.eos_id) == (both.vocab_size - 2, both.vocab_size - 1)
    assert len({plain.fingerprint, both.fingerprint, ByteTokenizer().fingerprint}) == 3


def test_the_configuration_decides_eos_and_bos(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>", "<|im_end|>")
    own = hugging_face(tmp_path, path)
    chosen = hugging_face(tmp_path, path, eos_token_id=[own.eos_id + 1, own.eos_id], bos_token_id=0)
    assert (chosen.eos_id, chosen.bos_id) == (own.eos_id + 1, 0)
    assert chosen.fingerprint != own.fingerprint


def test_the_end_token_comes_from_the_model_folder(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>", "<|im_end|>", "<|end|>", "<|stop|>")
    end, turn, config_end, stop = (hugging_face(tmp_path, path).token_id(name) for name in (
        "</s>", "<|im_end|>", "<|end|>", "<|stop|>"))  # fmt: skip
    assert hugging_face(tmp_path, path).eos_ids == (end,), "a known name"
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config_end}))
    assert hugging_face(tmp_path, path).eos_ids == (config_end,)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert hugging_face(tmp_path, path).eos_ids == (turn,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, turn]}))
    tokenizer = hugging_face(tmp_path, path)
    assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.eos_token) == (stop, (stop, turn), "<|stop|>")
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}, "templates see that of tokenizer_config.json"
    assert hugging_face(tmp_path, path, eos_token_id=end).eos_ids == (end,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9999}))
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id = 9999: .*no token with this id"):
        hugging_face(tmp_path, path)


def test_an_end_token_beyond_the_models_vocabulary_is_an_error(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    with pytest.raises(UserError, match=r"run.yaml:\d+: .*vocab_size = 200: .* 274 tokens, .*'</s>', whose id is 273"):
        hugging_face(tmp_path, path, vocab_size=200)


@pytest.mark.parametrize("text", [*TEXTS, "a</s>b", " <|im_start|> x</s></s>", "e\u0301 not composed"])
@pytest.mark.parametrize("normalizer", [None, "NFC"])
def test_offsets_from_lengths_of_tokens_are_those_of_the_library(tmp_path, text, normalizer):
    from tokenizers import Tokenizer, normalizers

    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>", "<|im_start|>")
    if normalizer:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.save(str(path))
    loaded = hugging_face(tmp_path, path)
    (counted,) = loaded.encode_offsets([text])
    assert loaded._token_bytes is not None
    loaded._token_bytes = None
    (asked,) = loaded.encode_offsets([text])
    for ours, theirs in zip(counted, asked, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_special_tokens_are_shown_on_request(plain):
    ids = [*plain.encode("cat"), plain.eos_id]
    assert plain.decode(ids, skip_special_tokens=False) == "cat<|endoftext|>"
    assert ByteTokenizer().decode([97, 256], skip_special_tokens=False) == "a<|endoftext|>"
    assert ByteTokenizer().encode("a<|endoftext|>") == [97, 256]


def test_a_tokenizer_config_beside_it_decides_over_known_names(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>", "<|im_end|>", "<|begin|>")
    described = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|begin|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    tokenizer = hugging_face(tmp_path, path)
    assert (tokenizer.eos_id, tokenizer.bos_id) == (tokenizer.vocab_size - 2, tokenizer.vocab_size - 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert hugging_face(tmp_path, path, bos_token_id=0).bos_id is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert hugging_face(tmp_path, path).bos_id == tokenizer.vocab_size - 4


def test_transformers_adds_what_the_post_processor_says(tmp_path):
    """AutoTokenizer of transformers 5.24 gave the same, also with the flags."""
    import tokenizers

    path = write_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>")
    cat = hugging_face(tmp_path, path).encode("cat")
    assert hugging_face(tmp_path, path).encode_as_transformers("cat") == cat
    library = tokenizers.Tokenizer.from_file(str(path))
    bos = library.token_to_id("<s>")
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    library.save(str(path))
    for flags in ({}, {"add_bos_token": False, "add_eos_token": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | flags))
        tokenizer = hugging_face(tmp_path, path)
        assert tokenizer.encode_as_transformers("cat") == [bos, *cat]
        assert tokenizer.encode("cat") == cat


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("tokenizer_config.json", "[broken", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '["</s>"]', "tokenizer_config.json: input should be .* found a list"),
        ("tokenizer_config.json", '{"eos_token": 2}', "tokenizer_config.json: eos_token.*found 2"),
        ("special_tokens_map.json", '{"bos_token": [1]}', "special_tokens_map.json: bos_token"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "generation_config.json: eos_token_id"),
        ("generation_config.json", '{"eos_token_id": 1180591620717411303424}', "has no token with this id"),
        ("config.json", '{"eos_token_id": 1e999}', "config.json: eos_token_id"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 99999999999}}}', "tokenizer.json: model.vocab.*99999999999"),
        ("tokenizer.json", "[" * 100_000, "not valid JSON: recursion limit"),
    ],
)
def test_a_file_beside_it_that_is_not_right_is_named(tmp_path, name, content, rule):
    path = write_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>")
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rule) as caught:
        hugging_face(tmp_path, path)
    assert caught.value.fix and len(str(caught.value)) < 1200


def test_mutations_of_tokenizer_files_end_in_no_traceback(tmp_path):
    path, draw, counts = write_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>"), random.Random(6), Counter()
    described = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "x", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (tmp_path / name).read_text()
        for number in range(150):
            changed = json.dumps(mutate(draw, json.loads(whole), ["model"])).encode()
            (tmp_path / name).write_bytes(changed if number % 2 else mutated_text(draw, whole))
            try:
                hugging_face(tmp_path, path).encode("the cat sat <s>")
            except UserError as error:
                counts[name] += 1
                assert error.fix and len(str(error)) < 1500, error
        (tmp_path / name).write_text(whole)
    assert counts["tokenizer.json"] > 100 and counts["tokenizer_config.json"] > 75, counts


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    from tokenizers import Tokenizer

    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(path))
    loaded = hugging_face(tmp_path, path)
    assert loaded.decode(loaded.encode("a longer text")) == "a longer text"
    assert len(loaded.encode("a")) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: "", ["needs a tokenizer.json"]),
        (lambda folder: folder / "none.json", ["cannot be read", "No such file"]),
        (lambda folder: folder, ["cannot be read", "tokenizer.json"]),
        (lambda folder: (folder / "bad.json").write_text("{}") and folder / "bad.json", ["not a tokenizer.json"]),
        (lambda folder: write_tokenizer(folder / "t.json"), ["no token that ends a document", "</s>", "eos_token_id"]),
    ],
)
def test_a_bad_tokenizer_is_an_error(tmp_path, make, words):
    with pytest.raises(UserError) as caught:
        hugging_face(tmp_path, make(tmp_path))
    message = str(caught.value)
    assert "train_dataset.tokenizer.path" in message and "Fix: " in message and "run.yaml:" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_an_id_that_the_tokenizer_does_not_have_is_an_error(tmp_path, name):
    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    with pytest.raises(UserError, match=f"model.model_config.{name} = 9999: .*no token with this id") as caught:
        hugging_face(tmp_path, path, vocab_size=20_000, **{name: 9999})
    assert line_of(tmp_path, name) in str(caught.value)
