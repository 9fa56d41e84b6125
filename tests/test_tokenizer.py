"""Text and ids: exact incremental decoding, stop strings, chat templates, files."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

TEXTS = [
    "",
    "a",
    " leading and trailing ",
    "def f(x):\n\treturn x ** 2  # it's\r\n\r\n",
    "Grüße, naïve café — 12345 3.14",
    "日本語のテキスト 한국어 텍스트 नमस्ते",
    "😀👨‍👩‍👧🏳️‍🌈 𐍈𝄞",
    "\u0000\u200b\ufeff\ufffd",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog the the END of it"] * 3
SPACE = "\u2581"


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["[tool call]"])
    return with_bos(backend)


def sentencepiece(*, strip: bool) -> tokenizers.Tokenizer:
    """Byte fallback over a few pieces, as Llama 2 (strip) and Gemma have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [SPACE, *"thequickbrownDENfx", "th", "the", f"{SPACE}the", f"{SPACE}{SPACE}", "日"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), (SPACE, SPACE)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if strip else replace
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return with_bos(backend)


def word_piece() -> tokenizers.Tokenizer:
    """Neither of the two: goes through the general decoder."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


BACKENDS = {
    "byte_level": byte_level,
    "gemma": lambda: sentencepiece(strip=False),
    "llama2": lambda: sentencepiece(strip=True),
    "word_piece": word_piece,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request) -> Tokenizer:
    return Tokenizer(BACKENDS[request.param](), special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer(byte_level(), special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    return Tokenizer(sentencepiece(strip=False), special_tokens=SPECIAL)


def stream(tokenizer: Tokenizer, ids: list[int], **params) -> tuple[list[str], str | None]:
    """Pushes ids until a stop string ends it; returns the deltas and the stop string."""
    detokenizer = tokenizer.detokenizer(SamplingParams(**params))
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stop_string is not None:
            break
    return [*deltas, detokenizer.flush()], detokenizer.stop_string


@pytest.mark.parametrize("skip", [True, False])
def test_deltas_concatenate_to_the_full_decode_of_any_ids(tokenizer, skip):
    """Random ids: mostly broken UTF-8, byte runs, special and unknown ids."""
    rng = random.Random(1)
    size = tokenizer.vocab_size
    for _ in range(400):
        ids = [rng.randrange(min(size, rng.choice([270, size, size + 3]))) for _ in range(20)]
        deltas, _ = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama2"])
def test_round_trip_without_partial_characters(kind, text):
    tokenizer = Tokenizer(BACKENDS[kind](), special_tokens=SPECIAL)
    ids = tokenizer.encode(text)
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


def test_long_sequence_in_the_general_decoder(tokenizer):
    ids = tokenizer.encode("the quick brown fox the dog " * 40, add_special_tokens=False)
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


def test_an_emoji_comes_with_its_last_byte(plain):
    ids = plain.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = plain.detokenizer(SamplingParams())
    assert [detokenizer.push(i) for i in ids] == [""] * (len(ids) - 1) + ["😀"]


def test_output_continues_the_prompt():
    """Llama 2 drops the space that it put before a text, not one in the middle of a text."""
    tokenizer = Tokenizer(sentencepiece(strip=True), special_tokens=SPECIAL)
    the = tokenizer._backend.token_to_id(f"{SPACE}the")
    bos = tokenizer.bos_token_id
    params = SamplingParams()
    assert tokenizer.detokenizer(params).push(the) == "the"
    assert tokenizer.detokenizer(params, prompt_ids=[bos]).push(the) == "the"
    assert tokenizer.detokenizer(params, prompt_ids=[bos, the]).push(the) == " the"


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["ABC", "DEF", "G"], ["DE"], "ABC", "DE"),  # inside one token
        (["xD", "E", "y"], ["DE"], "x", "DE"),  # across tokens
        (["a", "b", "c"], ["abd"], "abc", None),  # held, then released
        (["a", "b"], ["abc"], "ab", None),  # released by the end
        (["aab", "aac"], ["aabaac"], "", "aabaac"),
        (["aabaabaac"], ["aabaac"], "aab", "aabaac"),  # needs the failure function
        (["xabcz"], ["abcz", "bc"], "xa", "bc"),  # the first that is complete
        (["xabc"], ["bc", "abc"], "x", "abc"),  # the longest of those
        (["ab"], ["b", "a"], "", "a"),
    ],
)
def test_stop_strings(pieces, stops, text, stop):
    backend = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "a"))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend)
    deltas, found = stream(tokenizer, list(range(len(pieces))), stop=stops)
    assert ("".join(deltas), found) == (text, stop)
    shown, _ = stream(
        tokenizer, list(range(len(pieces))), stop=stops, include_stop_str_in_output=True
    )
    assert "".join(shown) == text + (stop or "")


def test_stops_do_not_depend_on_where_tokens_end(plain):
    """One character per token, or as the tokenizer cuts it: the same text and stop."""
    rng = random.Random(2)
    single = {c: plain._backend.token_to_id(c) for c in "ab"}
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(30))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(2, 7))) for _ in range(3)]
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        by_char, found = stream(plain, [single[c] for c in text], stop=stops)
        by_token, found2 = stream(plain, plain.encode(text), stop=stops)
        assert ("".join(by_char), found) == ("".join(by_token), found2)
        if ends:
            end, _, expected = min(ends)
            assert found == expected and "".join(by_char) == text[: end - len(expected)]
        else:
            assert found is None and "".join(by_char) == text


def test_no_delta_leaks_the_start_of_a_stop_string(plain):
    ids = plain.encode("the quick brown END", add_special_tokens=False)
    detokenizer = plain.detokenizer(SamplingParams(stop=["brown END", "quack"]))
    so_far = ""
    for token_id in ids:
        so_far += detokenizer.push(token_id)
        assert "the quick ".startswith(so_far)
    assert detokenizer.stop_string == "brown END" and so_far + detokenizer.flush() == "the quick "


def test_a_newline_byte_token_stops_at_once(fallback):
    """Byte runs are text only when they end, but there will be no next token after a stop."""
    newline = fallback._backend.token_to_id("<0x0A>")
    the = fallback._backend.token_to_id("the")
    detokenizer = fallback.detokenizer(SamplingParams(stop=["\n"]))
    assert detokenizer.push(the) == "the"
    assert detokenizer.push(newline) == "" and detokenizer.stop_string == "\n"
    assert detokenizer.flush() == ""
    crossing, found = stream(fallback, [the, newline, the, newline], stop=["the\nthe\n"])
    assert ("".join(crossing), found) == ("", "the\nthe\n")
    euro = [fallback._backend.token_to_id(f"<0x{byte:02X}>") for byte in "€x".encode()]
    text, found = stream(fallback, [the, *euro], stop=["x"])
    assert ("".join(text), found) == ("the€", "x")


def test_stop_tokens_have_no_text_unless_asked(plain):
    ids = plain.encode("the", add_special_tokens=False)
    for include, text in ((False, ""), (True, "the")):
        detokenizer = plain.detokenizer(SamplingParams(include_stop_str_in_output=include))
        got = "".join(detokenizer.push(i, is_stop_token=True) for i in ids)
        assert got + detokenizer.flush() == text


def test_min_tokens_delays_stop_strings(plain):
    letters = [plain._backend.token_to_id(c) for c in "xaxa"]
    text, found = stream(plain, letters, stop=["a"], min_tokens=3)
    assert ("".join(text), found) == ("xax", "a")


def test_one_bos_only(plain):
    bos = plain.bos_token_id
    assert plain.encode("the")[0] == bos
    assert plain.encode("<s>the").count(bos) == 1
    assert plain.encode("the", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize("bad", ["a\ud800b", b"bytes", 3, None])
def test_what_is_no_text_is_a_typed_error(plain, bad):
    with pytest.raises(ConfigError, match="text"):
        plain.encode(bad)


def test_encode_chat_leaves_special_tokens_to_the_template(plain):
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer(byte_level(), special_tokens=SPECIAL, chat_template=template)
    ids = tokenizer.encode_chat([{"role": "user", "content": "the"}])
    assert ids == plain.encode("the") and ids.count(tokenizer.bos_token_id) == 1


def test_no_template_is_a_typed_error(plain):
    with pytest.raises(ConfigError, match="chat template"):
        plain.encode_chat([{"role": "user", "content": "x"}])


@pytest.fixture
def directory(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
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


def test_directory(directory):
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


def test_eos_is_the_union_of_all_sources(directory):
    (directory / "config.json").write_text('{"eos_token_id": 7}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    tokenizer = Tokenizer.from_directory(directory, eos_token_id=[10])
    assert tokenizer.eos_token_ids == {1, 7, 8, 9, 10}


def test_gpt2_files_without_tokenizer_json(tmp_path):
    """OPT's checkpoints: vocab.json and merges.txt, BOS set in tokenizer_config.json."""
    backend = byte_level()
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": true}'
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("the fox 😀")
    assert ids[0] == tokenizer.bos_token_id == backend.token_to_id("</s>")
    assert tokenizer.decode(ids) == "the fox 😀"


def test_missing_and_broken_files(tmp_path):
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


def test_vocabulary_check(plain):
    plain.check_vocab_size(plain.vocab_size)
    plain.check_vocab_size(plain.vocab_size - 1)  # the last one is an added token
    with pytest.raises(ConfigError, match="10"):
        plain.check_vocab_size(10)
