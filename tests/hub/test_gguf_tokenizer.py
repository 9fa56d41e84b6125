"""Tokenizers rebuilt from GGUF metadata, against SentencePiece's rule and the real SmolLM2."""

from __future__ import annotations

import json
import random
import re

import pytest
import tokenizers

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile
from fastdecode_rdma.hub.gguf_tokenizer import (
    Vocabulary,
    build_tokenizer,
    merges_from_scores,
    special_token_ids,
)
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

SPACE = "\u2581"


def sentencepiece_encode(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper has it: join the best-scored neighbours, leftmost first."""
    pieces = list(text)
    while True:
        best, where = -float("inf"), -1
        for i in range(len(pieces) - 1):
            score = scores.get(pieces[i] + pieces[i + 1], -float("inf"))
            if score > best:
                best, where = score, i
        if where < 0:
            return pieces
        pieces[where : where + 2] = [pieces[where] + pieces[where + 1]]


def test_merges_join_pieces_in_sentencepieces_order():
    rng = random.Random(0)
    for trial in range(40):
        pieces = [*"abc", SPACE]
        while len(pieces) < 24:  # every piece is made of two others, as training makes them
            joined = rng.choice(pieces) + rng.choice(pieces)
            if joined not in pieces and len(joined) < 9:
                pieces.append(joined)
        values = [-float(n) for n in range(len(pieces))]
        scores = dict(zip(pieces, values, strict=True))
        merges = merges_from_scores(pieces, [1] * len(pieces), values)
        vocab = {piece: n for n, piece in enumerate(pieces)}
        bpe = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab, [tuple(merge) for merge in merges], ignore_merges=False)
        )
        single = {piece: scores[piece] for piece in pieces if len(piece) > 1}
        for _ in range(30):
            text = "".join(rng.choice("aabbc" + SPACE) for _ in range(25))
            assert bpe.encode(text).tokens == sentencepiece_encode(text, single), (trial, text)


def test_special_and_byte_tokens_take_no_part_in_merges():
    tokens = ["a", "b", "ab", "aa", "<x>"]
    assert merges_from_scores(tokens, [1, 1, 1, 4, 3], [0.0, -1, -2, -3, -4]) == [["a", "b"]]


def load(path, *, strips_after_specials: bool = False) -> tuple[Tokenizer, dict]:
    contents, config = build_tokenizer(
        Vocabulary.of(GGUFFile(path)), strips_after_specials=strips_after_specials
    )
    backend = tokenizers.Tokenizer.from_str(json.dumps(contents))
    special = {key: value for key, value in config.items() if key.endswith("_token") and value}
    special = {key: value for key, value in special.items() if isinstance(value, str)}
    return Tokenizer(backend, special_tokens=special), config


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer._backend.id_to_token(i) for i in ids]


def test_sentencepiece_kind(make_gguf):
    tokenizer, config = load(make_gguf("gemma3")[0])
    assert config["add_bos_token"] is True
    ids = tokenizer.encode("abc ab\n\né😀")
    tokens = [tokenizer._backend.id_to_token(i) for i in ids]
    assert tokens[0] == "<bos>"
    assert tokens[1:4] == ["abc", SPACE, "ab"]  # "ab" is best: joined before "▁a" and "bc"
    assert tokens[4:] == ["\n\n", *(f"<0x{byte:02X}>" for byte in "é😀".encode())]
    assert tokenizer.decode(ids) == "abc ab\n\né😀"


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_sentencepiece_of_random_text(make_gguf, add_space_prefix):
    """SentencePiece's rule between user-defined pieces, bytes for what no piece has."""
    path, _ = make_gguf("gemma3", metadata={"tokenizer.ggml.add_space_prefix": add_space_prefix})
    tokenizer, _ = load(path)
    pieces = ["ab", f"{SPACE}a", "bc", "abc"]
    scores = {piece: -float(n) for n, piece in enumerate(pieces)}
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices(["a", "b", "c", " ", "\n\n", "é", "<eos>"], k=20))
        expected = []
        for part in re.split("(\n\n|<eos>)", text):
            if part in ("\n\n", "<eos>"):
                expected.append(part)
            elif part:
                spaced = (SPACE if add_space_prefix else "") + part.replace(" ", SPACE)
                for piece in sentencepiece_encode(spaced, scores):
                    known = piece in scores or piece in "abc" + SPACE
                    hexes = [f"<0x{byte:02X}>" for byte in piece.encode()]
                    expected += [piece] if known else hexes
        assert tokens_of(tokenizer, text) == expected, text


def test_space_prefix_is_added_and_taken_off(make_gguf):
    """Llama 2's way: the file is silent on add_space_prefix, which means yes."""
    path, _ = make_gguf("gemma3", metadata={"tokenizer.ggml.add_space_prefix": None})
    tokenizer, _ = load(path)
    ids = tokenizer.encode("a b", add_special_tokens=False)
    assert tokens_of(tokenizer, "a b") == [f"{SPACE}a", SPACE, "b"]
    assert tokenizer.decode(ids) == "a b"


def test_special_ids_of_sentencepiece_where_the_file_is_silent(make_gguf):
    names = ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token")
    path, _ = make_gguf("gemma3", metadata={f"tokenizer.ggml.{name}": None for name in names})
    vocabulary = Vocabulary.of(GGUFFile(path))
    assert [vocabulary.special_id(name) for name in ("unknown", "bos", "eos")] == [0, 1, 2]
    tokenizer, _ = load(path)
    assert tokenizer.encode("a")[0] == 1


def test_space_after_special_tokens_of_phi3(make_gguf):
    """Its special tokens take the white space after them, but for the ends of text."""
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "<|endoftext|>", "a", SPACE]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3, 1, 1],
        "tokenizer.ggml.scores": [0.0] * 7,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path, _ = make_gguf("gemma3", metadata=metadata)
    tokenizer, _ = load(path, strips_after_specials=True)
    assert tokens_of(tokenizer, "<|end|>\n  a<|endoftext|> a") == [
        *("<|end|>", "a", "<|endoftext|>", SPACE, "a"),
    ]
    plain, _ = load(path)
    assert tokens_of(plain, "<|end|> a") == ["<|end|>", SPACE, "a"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"scores": [0.0, -1.0]}, "2 scores for 269 tokens"),
        ({"scores": [float("nan")] * 269}, "scores must be a list of finite numbers"),
        ({"scores": [-1000.0] * 269}, "all tokens have the same score"),
        ({"scores": None}, "lacks 'tokenizer.ggml.scores'"),
    ],
)
def test_scores_that_order_nothing_are_named(make_gguf, metadata, message):
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    with pytest.raises(ConfigError, match=message):
        load(make_gguf("gemma3", metadata=named)[0])


# -- byte-level BPE


def test_rows_that_pad_the_embedding_are_no_tokens(make_gguf):
    """[PADn] of type "unused" is the converter's; the same text as a real token stays."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "ab", "Ġab"]
    tokens += ["[PAD14]", "[PAD99]", "[PAD16]"]
    path, _ = make_gguf(
        "llama",
        metadata={
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 11 + [5, 5, 1],
        },
    )
    tokenizer, _ = load(path)
    vocabulary = tokenizer._backend.get_vocab()
    assert "[PAD14]" not in vocabulary
    assert vocabulary["[PAD99]"] == 15 and vocabulary["[PAD16]"] == 16


def test_empty_tokens_and_repeated_merges(make_gguf):
    tokens = ["", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "ab", "Ġab"]
    merges = ["a b", "Ġ ab", "a b"]
    path, _ = make_gguf(
        "llama", metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    )
    tokenizer, _ = load(path)
    assert tokens_of(tokenizer, "ab ab") == ["ab", "Ġab"]
    assert tokenizer._backend.id_to_token(0) == "[EMPTY_0]"


def test_unknown_kinds_are_named(make_gguf):
    path, _ = make_gguf("llama")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"smollm", b"nosuch"))
    with pytest.raises(ConfigError, match=r"'nosuch'.*smollm"):
        load(path)
    path.write_bytes(whole.replace(b"gpt2", b"rwkv"))
    with pytest.raises(ConfigError, match="'rwkv'"):
        load(path)


@pytest.mark.parametrize(
    ("tokens", "metadata", "expected"),
    [
        (["<|endoftext|>", "x", "y"], {"eos": 0}, 0),
        (["<|endoftext|>", "x", "y"], {"eos": 0, "eot": 1, "eom": 2}, [0, 1, 2]),
        # Phi-3: chats end with a token that the file does not name.
        (["<|endoftext|>", "<|assistant|>", "<|end|>"], {"eos": 0}, [0, 2]),
        (["<end_of_turn>", "<eos>", "x"], {"eos": 1}, [1, 0]),
        (["<|eom_id|>", "<|eot_id|>", "x"], {"eos": 1}, [1, 0]),
        (["<|im_end|>", "x", "y"], {}, 0),
    ],
)
def test_what_ends_generation(make_gguf, tokens, metadata, expected):
    pairs = {"bos_token_id": None, "eos_token_id": None}
    pairs |= {f"{name}_token_id": value for name, value in metadata.items()}
    pairs |= {"tokens": [*tokens, *"ab", "ab"], "token_type": [3, 3, 3, 1, 1, 1], "merges": ["a b"]}
    named = {f"tokenizer.ggml.{key}": value for key, value in pairs.items()}
    vocabulary = Vocabulary.of(GGUFFile(make_gguf("llama", metadata=named)[0]))
    assert special_token_ids(vocabulary) == {
        "bos_token_id": None,
        "eos_token_id": expected,
        "pad_token_id": None,
    }


# -- the real thing

TEXTS = [
    "Hello, world!",
    "  two spaces,\ttab\n\n\nnewlines \r\n end ",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # it's 100% OK\n",
    "In 2024, 3.14159 and 1,000,000 and 007",
    "Grüße aus Köln, naïve café, œuvre, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト。한국어 텍스트, 中文文本, हिन्दी, ไทย",
    "😀 👨‍👩‍👧 🏳️‍🌈 𐍈 \u200b\ufeff zero width",
    "{\"json\": [1, 2.5e-3, null, true]} <xml a='b'/>",
    "don't I'll we've THEY'RE o'clock",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_dir) -> Tokenizer:
    return Tokenizer.from_directory(smollm2_dir)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trip(smollm2, text):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    detokenizer = smollm2.detokenizer(SamplingParams())
    assert "".join(detokenizer.push(i) for i in ids) + detokenizer.flush() == text


def test_smollm2_known_ids(smollm2):
    """Digits one by one, spaces with the word after them; specials as single tokens."""
    tokens = [smollm2._backend.id_to_token(i) for i in smollm2.encode("Hello world 2024")]
    assert tokens == ["Hello", "Ġworld", "Ġ", "2", "0", "2", "4"]
    assert smollm2.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert smollm2.encode("<|endoftext|>") == [0]
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, {2})
    assert smollm2.vocab_size == 49152


def test_smollm2_chat(smollm2):
    messages = [{"role": "user", "content": "Hi 😀"}]
    text = smollm2.render_chat(messages)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode_chat(messages)
    assert ids[:2] == [1, 9690] and ids.count(1) == 3 and ids.count(2) == 2
    assert smollm2.decode(ids, skip_special_tokens=False) == text
