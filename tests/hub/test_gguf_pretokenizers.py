"""Pre-tokenizers by name, against the tokenizers of the models behind the names.

Those are written down here as their tokenizer.json have them (two are transformers' own), trained
on a few lines, stored as GGUF does, and rebuilt: the same ids for any text.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile
from fastdecode_rdma.hub.gguf_pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from fastdecode_rdma.hub.gguf_tokenizer import Vocabulary, build_tokenizer

CL100K = TikTokenConverter().pattern
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501 - as it is published
NEMO = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def split(*expressions: str) -> list[pre.PreTokenizer]:
    return [pre.Split(Regex(expression), "isolated") for expression in expressions]


BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=True)
ONE_DIGIT = pre.Digits(individual_digits=True)
# Name -> pre-tokenizer, normalizer, ignore_merges.
ORIGINALS: dict[str, tuple[list[pre.PreTokenizer], bool, bool]] = {
    "llama-bpe": ([*split(CL100K), BYTES], False, True),
    "llama3": ([*split(CL100K), BYTES], False, True),
    "llama-v3": ([*split(CL100K), BYTES], False, True),
    "dbrx": ([pre.Split(Regex(CL100K), "removed", invert=True), BYTES], False, False),
    "smaug-bpe": ([*split(CL100K), BYTES], False, False),
    "qwen2": ([*split(QWEN2), BYTES], True, False),
    "deepseek-r1-qwen": ([*split(QWEN2), BYTES], False, False),
    "gpt-4o": ([pre.Split(Regex(O200K), "removed", invert=True), BYTES], False, False),
    "tekken": ([*split(NEMO), BYTES], False, True),
    "gpt-2": ([GPT2_BYTES], False, False),
    "phi-2": ([GPT2_BYTES], False, False),
    "olmo": ([GPT2_BYTES], True, False),
    "smollm": ([ONE_DIGIT, GPT2_BYTES], False, False),
    "starcoder": ([ONE_DIGIT, GPT2_BYTES], False, False),
    "refact": ([ONE_DIGIT, GPT2_BYTES], False, False),
    "deepseek-coder": (
        [
            *split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+"),
            ONE_DIGIT,
            BYTES,
        ],
        False,
        False,
    ),
    "default": (
        [*split(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), BYTES],
        False,
        False,
    ),
}
TEXTS = [
    "Hello, world! HelloWorld helloWORLD XMLHttpRequest",
    "  two spaces,\ttab\n\n\nnewlines \r\n end  ",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # it's 100% OK//\n/",
    "In 2024, 3.14159 and 1,000,000 and 007 and ٣٤٥ ⅷ",
    "Grüße aus Köln, nai\u0308ve cafe\u0301, œuvre, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト。한국어 텍스트, 中文文本, हिन्दी, ไทย",
    "😀 👨‍👩‍👧 🏳️‍🌈 𐍈 \u200b\ufeff zero width",
    "don't I'll we've THEY'RE O'CLOCK 'S 'll 've",
    "<|end|>text<|end|> <think>\n$x^2 + y = |z|~$",
    "",
]


@cache
def original(name: str) -> Tokenizer:
    steps, is_nfc, ignore_merges = ORIGINALS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=pre.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


@pytest.fixture
def rebuilt(request, make_gguf) -> Tokenizer:
    contents = json.loads(original(request.param).to_str())
    vocabulary = contents["model"]["vocab"]
    added = {token["content"]: token["id"] for token in contents["added_tokens"]}
    tokens = sorted(vocabulary | added, key=(vocabulary | added).get)
    types = {"<|end|>": 3, "<think>": 4}
    metadata = {
        "tokens": tokens,
        "token_type": [types.get(token, 1) for token in tokens],
        "merges": [" ".join(pair) for pair in contents["model"]["merges"]],
        "pre": request.param,
        "bos_token_id": None,
        "eos_token_id": added["<|end|>"],
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    path: Path = make_gguf("llama", metadata=named)[0]
    built, _ = build_tokenizer(Vocabulary.of(GGUFFile(path)), strips_after_specials=False)
    return Tokenizer.from_str(json.dumps(built))


def test_every_name_has_its_original():
    assert set(ORIGINALS) == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("rebuilt", ORIGINALS, indirect=True)
def test_the_same_ids_and_text(rebuilt, request):
    expected = original(request.node.callspec.params["rebuilt"])
    rng = random.Random(0)
    alphabet = [*sorted(set("".join(TEXTS))), "<|end|>", "<think>", "'ll", "  ", "\n\n"]
    noise = ["".join(rng.choices(alphabet, k=60)) for _ in range(40)]
    for text in TEXTS + noise:
        ids = rebuilt.encode(text).ids
        assert ids == expected.encode(text).ids, text
        for skip in (True, False):
            actual = rebuilt.decode(ids, skip_special_tokens=skip)
            assert actual == expected.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("name", "tokens"), [("llama-bpe", ["ba"]), ("tekken", ["ba"]), ("dbrx", ["b", "a"])]
)
def test_whole_words_may_be_tokens_without_merges(make_gguf, name, tokens):
    metadata = {
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "ba", "ab", "a", "b"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    path, _ = make_gguf("llama", metadata=metadata)
    built, config = build_tokenizer(Vocabulary.of(GGUFFile(path)), strips_after_specials=False)
    tokenizer = Tokenizer.from_str(json.dumps(built))
    assert tokenizer.encode("ba", add_special_tokens=False).tokens == tokens
    # The file is silent on BOS; these are the names for which that means yes.
    assert config["add_bos_token"] is (name != "dbrx")
    assert tokenizer.encode("ba").tokens == (["</s>"] if name != "dbrx" else []) + tokens


def test_unknown_names_are_named():
    with pytest.raises(ConfigError, match="pre-tokenizer 'nosuch' is not supported; supported are"):
        pre_tokenizer("nosuch")
