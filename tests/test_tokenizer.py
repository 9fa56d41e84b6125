"""Ids of texts and chats, and the files that a tokenizer comes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer
from fastdecode_rdma.tokenizer_files import TokenizerFiles

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MakeBackend = Callable[[str], tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def plain(text_backend: MakeBackend) -> Tokenizer:
    return Tokenizer(text_backend("byte_level"), special_tokens=SPECIAL)


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama2"])
def test_round_trip_of_any_text(text_backend: MakeBackend, kind: str, texts: list[str]) -> None:
    tokenizer = Tokenizer(text_backend(kind), special_tokens=SPECIAL)
    for text in texts:
        ids = tokenizer.encode(text)
        detokenizer = tokenizer.detokenizer(SamplingParams())
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text
        assert tokenizer.decode(ids) == text


def test_one_bos_only(plain: Tokenizer) -> None:
    bos = plain.bos_token_id
    assert plain.encode("the")[0] == bos
    assert plain.encode("<s>the").count(bos) == 1
    assert plain.encode("the", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize("bad", ["a\ud800b", b"bytes", 3, None])
def test_what_is_no_text_is_a_typed_error(plain: Tokenizer, bad: object) -> None:
    with pytest.raises(ConfigError, match="text"):
        plain.encode(bad)


@pytest.mark.parametrize("bos", ["{{ bos_token }}", ""])
def test_a_chat_has_the_special_tokens_of_its_template(
    text_backend: MakeBackend, plain: Tokenizer, bos: str
) -> None:
    """One BOS at most, also when the rendered text is given as a prompt."""
    template = bos + "{{ messages[0].content }}"
    tokenizer = Tokenizer(
        text_backend("byte_level"), special_tokens=SPECIAL, chat_template=template
    )
    messages = [{"role": "user", "content": "the"}]
    expected = plain.encode("the", add_special_tokens=bool(bos))
    assert tokenizer.encode_chat(messages) == expected
    assert tokenizer.encode_chat(Chat(messages)) == expected
    as_text = tokenizer.encode(tokenizer.render_chat(messages))
    assert as_text == plain.encode("the") and as_text.count(plain.bos_token_id) == 1


def test_no_template_is_a_typed_error(plain: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="has no chat template; pass chat_template="):
        plain.encode_chat([{"role": "user", "content": "x"}])


@pytest.fixture
def directory(tmp_path: Path, text_backend: MakeBackend) -> Path:
    text_backend("byte_level").save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ messages[0]['content'] }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_directory(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.bos_token_id == tokenizer.encode("")[0]
    assert tokenizer.eos_token_ids == {tokenizer._backend.token_to_id("</s>")}
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    (directory / "chat_template.jinja").write_text("from file")
    assert Tokenizer.from_directory(directory).chat_template == "from file"
    other = directory / "other.txt"
    other.write_text("{{ 1 }}")
    assert Tokenizer.from_directory(directory, chat_template=str(other)).chat_template == "{{ 1 }}"
    assert Tokenizer.from_directory(directory, chat_template="{# a #}").chat_template == "{# a #}"
    with pytest.raises(ConfigError, match=r"nofile\.jinja"):
        Tokenizer.from_directory(directory, chat_template="nofile.jinja")


def test_templates_by_name(directory: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.render_chat(Chat(messages, tools=[{}])) == "tools"
    assert tokenizer.render_chat(Chat(messages, chat_template="tool_use")) == "tools"
    assert tokenizer.render_chat(Chat(messages, chat_template="{{ 1 }}")) == "1"
    with pytest.raises(ConfigError, match=r"'other'.*it has 'default', 'tool_use'"):
        tokenizer.render_chat(Chat(messages, chat_template="other"))
    chosen = Tokenizer.from_directory(directory, chat_template="tool_use")
    assert chosen.chat_template == chosen.render_chat(messages) == "tools"
    own = Tokenizer.from_directory(directory, chat_template="{{ 2 }}")
    assert own.render_chat(Chat(messages, tools=[{}])) == "2"  # the model's others do not count
    with pytest.raises(ConfigError, match="not valid Jinja"):
        Tokenizer.from_directory(directory, chat_template="{{ 2")


def test_templates_in_files(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    tokenizer = Tokenizer.from_directory(directory)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(Chat(messages, chat_template="rag")) == "rag"
    with pytest.raises(ConfigError, match="chat templates are 'rag', and none is the default"):
        tokenizer.render_chat(messages)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert Tokenizer.from_directory(directory).render_chat(messages) == "x"


def test_a_models_own_bad_template_only_matters_to_chats(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% nonsense %}", encoding="utf-8")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("the")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_bos_and_eos_are_as_tokenizer_json_says(directory: Path) -> None:
    """As in transformers: add_bos_token in the other file is for what has no tokenizer.json."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    for flag in (True, False):
        config |= {"add_bos_token": flag, "add_eos_token": flag}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        for text in ("the fox", ""):
            ids = Tokenizer.from_directory(directory).encode(text)
            assert ids == theirs(text)["input_ids"] and ids[0] == 0


def test_tokens_are_what_the_config_declares(tmp_path: Path) -> None:
    """tokenizer.json without added tokens: they come from tokenizer_config.json, special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate([*alphabet, "<s>", "</s>", "<|x|>", "<tool>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(["<|x|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    declared = {"258": ("<|x|>", True), "259": ("<tool>", False)}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "added_tokens_decoder": {
            token_id: {"content": content, "special": special, "lstrip": False, "rstrip": False,
                       "single_word": False, "normalized": False}
            for token_id, (content, special) in declared.items()
        },
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_directory(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "<s>a<|x|> b<tool></s>"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"] and {256, 257, 258, 259} <= set(ids)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )
        detokenizer = ours.detokenizer(SamplingParams(skip_special_tokens=skip))
        got = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert got == theirs.decode(ids, skip_special_tokens=skip)
    config |= {"pad_token": "<absent>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_directory(tmp_path).vocab_size == 260  # the model has no row for it
    config["added_tokens_decoder"] = {"x": {"content": "y"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="added_tokens_decoder"):
        Tokenizer.from_directory(tmp_path)


def test_eos_is_the_union_of_all_sources(directory: Path) -> None:
    (directory / "config.json").write_text('{"eos_token_id": 7}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    tokenizer = Tokenizer.from_directory(directory, eos_token_id=[10])
    assert tokenizer.eos_token_ids == {1, 7, 8, 9, 10}


def test_gpt2_files_without_tokenizer_json(tmp_path: Path, text_backend: MakeBackend) -> None:
    """OPT's checkpoints: vocab.json and merges.txt, BOS set in tokenizer_config.json."""
    backend = text_backend("byte_level")
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": true}'
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("the fox 😀")
    assert ids[0] == tokenizer.bos_token_id == backend.token_to_id("</s>")
    assert tokenizer.decode(ids) == "the fox 😀"


def test_missing_and_broken_files(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path, required=False) is None
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        Tokenizer.from_directory(tmp_path / "absent")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match="transformers"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path, required=False)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        Tokenizer.from_directory(tmp_path)


def test_a_chat_template_that_is_no_text(tmp_path: Path) -> None:
    files = TokenizerFiles(tmp_path)
    (tmp_path / "mine.jinja").write_bytes("é".encode("latin-1"))
    for given in (str(tmp_path / "mine.jinja"), f"{tmp_path}/a\0b"):
        with pytest.raises(ConfigError, match=f"template {tmp_path}.* cannot be read"):
            files.chat_templates(given)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read: .*utf-8"):
        files.chat_templates(None)


def test_vocabulary_check(plain: Tokenizer) -> None:
    plain.check_vocab_size(plain.vocab_size)
    plain.check_vocab_size(plain.vocab_size - 1)  # the last one is an added token
    with pytest.raises(ConfigError, match="10"):
        plain.check_vocab_size(10)
