"""How text is cut before byte-level BPE, by `tokenizer.ggml.pre`.

GGUF files name the pre-tokenizer instead of holding it. The expressions are those in the
tokenizer.json of the models behind the names; "default" is llama.cpp's own, for files of models
that it did not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdecode_rdma.errors import ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}|{_SPACES}"
# Words are cut where a lower-case letter is followed by a capital one.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_HEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_MARKS_AND_SLASHES}|{_SPACES}"
)
_TEKKEN = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|"
    rf"\p{{N}}|{_MARKS_AND_SLASHES}|{_SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")


@dataclass(frozen=True)
class PreTokenizer:
    """One row: expressions that isolate their matches, one after another; then single digits; then
    bytes, after GPT-2's expression where `byte_level_splits`.

    `ignore_merges`: a piece that is a token is one, whatever the merges say. `adds_bos`: where the
    file is silent.
    """

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    byte_level_splits: bool = False
    normalizer: str | None = None
    ignore_merges: bool = False
    adds_bos: bool = False

    def steps(self, *, add_prefix_space: bool) -> list[dict[str, Any]]:
        """Returns the steps as tokenizer.json has them; the last is ByteLevel."""
        steps: list[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            }
            for expression in self.splits
        ]
        if self.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": add_prefix_space,
                "trim_offsets": True,
                "use_regex": self.byte_level_splits,
            }
        )
        return steps


_LLAMA3_ROW = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_GPT2_ROW = PreTokenizer(byte_level_splits=True)
_DIGITS_ROW = PreTokenizer(single_digits=True, byte_level_splits=True)
# The same expression, but merges hold for whole words, too.
_DBRX_ROW = PreTokenizer((_LLAMA3,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3_ROW,
    "llama3": _LLAMA3_ROW,
    "llama-v3": _LLAMA3_ROW,
    "dbrx": _DBRX_ROW,
    "smaug-bpe": _DBRX_ROW,
    "qwen2": PreTokenizer((_QWEN2,), normalizer="NFC"),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-2": _GPT2_ROW,
    "phi-2": _GPT2_ROW,
    "olmo": PreTokenizer(byte_level_splits=True, normalizer="NFC"),
    "smollm": _DIGITS_ROW,
    "starcoder": _DIGITS_ROW,
    "refact": _DIGITS_ROW,
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER, single_digits=True),
    "default": PreTokenizer(_DEFAULT),
}
"""Supported values of `tokenizer.ggml.pre`."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Returns the row of a name.

    Raises:
        ConfigError: it is not supported.
    """
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"pre-tokenizer {name!r:.80} is not supported; supported are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
