"""Rebuilds tokenizer.json and tokenizer_config.json from GGUF metadata.

Two kinds: "gpt2", byte-level BPE with its merges in the file, split first as the named
pre-tokenizer does; and "llama", SentencePiece BPE, whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile
from fastdecode_rdma.hub.gguf_pretokenizers import pre_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_KINDS = ("gpt2", "llama")
# What llama.cpp assumes of SentencePiece vocabularies where a file is silent.
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Tokens that end a turn of a chat. Many files name only the end of the text; as in llama.cpp, these
# end generation by their spelling.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
_KEEP_SPACE_AFTER = frozenset({"<unk>", "<s>", "<|endoftext|>"})
# generation_config.json's names for what a file may recommend.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file by id, their types, and the kind of tokenizer."""

    file: GGUFFile
    kind: str
    tokens: list[str]
    types: list[int]

    @classmethod
    def of(cls, file: GGUFFile) -> Vocabulary:
        """Reads it.

        Raises:
            ConfigError: it is missing, inconsistent, or of a kind that is not supported.
        """
        kind = file.text("tokenizer.ggml.model")
        if kind not in _KINDS:
            raise ConfigError(
                f"{file.path}: tokenizer {kind!r:.80} is not supported ({' and '.join(_KINDS)} are)"
            )
        # An empty token is never met in text; it needs a name of its own all the same.
        tokens = [
            token or f"[EMPTY_{token_id}]"
            for token_id, token in enumerate(file.texts("tokenizer.ggml.tokens"))
        ]
        types = file.numbers("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        if len(types) != len(tokens) or len(set(tokens)) != len(tokens) or not tokens:
            raise ConfigError(f"{file.path}: the vocabulary is inconsistent (types or duplicates)")
        return cls(file, kind, tokens, types)

    def special_id(self, name: str) -> int | None:
        """Returns the id of a special token ("bos", "eos", "unknown", …), or None.

        Raises:
            ConfigError: the file names one that is not in the vocabulary.
        """
        default = _SENTENCEPIECE_IDS.get(name) if self.kind == "llama" else None
        if default is not None and default >= len(self.tokens):
            default = None
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.file.count(key, default, least=0)
        if token_id is not None and token_id >= len(self.tokens):
            raise ConfigError(
                f"{self.file.path}: {key} {token_id} is not in the vocabulary of {len(self.tokens)}"
            )
        return token_id

    def special(self, name: str) -> str | None:
        """Returns the text of a special token, or None."""
        token_id = self.special_id(name)
        return None if token_id is None else self.tokens[token_id]

    def ids(self) -> dict[str, int]:
        """Returns token -> id, without the rows that only pad the embedding."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if not (kind == _UNUSED and token == f"[PAD{token_id}]")
        }


def build_tokenizer(
    vocabulary: Vocabulary, *, strips_after_specials: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of tokenizer.json and of tokenizer_config.json.

    `strips_after_specials`: special tokens of a SentencePiece vocabulary take the white space after
    them.

    Raises:
        ConfigError: the pre-tokenizer is not supported, or the vocabulary is inconsistent.
    """
    file, is_bpe = vocabulary.file, vocabulary.kind == "gpt2"
    if is_bpe:
        parts, by_default = _byte_level_parts(vocabulary)
    else:
        parts, by_default = _sentencepiece_parts(vocabulary), True
    adds_bos = file.flag("tokenizer.ggml.add_bos_token", by_default)
    adds_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(
            _added_tokens(vocabulary, rstrip=strips_after_specials and not is_bpe)
        ),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(
            vocabulary.tokens, bos=bos if adds_bos else None, eos=eos if adds_eos else None
        ),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.count(file.arch_key("context_length")),
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": vocabulary.special("unknown"),
        "pad_token": vocabulary.special("padding"),
    }
    if (chat_template := file.text("tokenizer.chat_template", None)) is not None:
        config["chat_template"] = chat_template
    return tokenizer, config


def special_token_ids(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns bos_token_id, eos_token_id (an int, or a list with the ends of turns), pad_token_id.

    Raises:
        ConfigError: nothing in the file ends a text.
    """
    ends = [vocabulary.special_id(name) for name in ("eos", "eot", "eom")]
    ends += [
        token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if token in _TURN_ENDS and vocabulary.types[token_id] in (_CONTROL, _USER_DEFINED)
    ]
    ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    if not ids:
        raise ConfigError(f"{vocabulary.file.path}: the file names no end-of-sequence token")
    return {
        "bos_token_id": vocabulary.special_id("bos"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids,
        "pad_token_id": vocabulary.special_id("padding"),
    }


def generation_defaults(file: GGUFFile) -> dict[str, Any]:
    """Returns the sampling that the file recommends, in generation_config.json's words."""
    found = {}
    for key, ours in _SAMPLING.items():
        # 0 is how each of them is switched off; a temperature of 0 is the choice not to sample.
        if file.get(f"general.sampling.{key}", 0) != 0:
            found[ours] = file.number(f"general.sampling.{key}")
        elif key == "temp" and file.get("general.sampling.temp", None) == 0:
            return {"do_sample": False}
    return found | {"do_sample": True} if found else {}


def _added_tokens(vocabulary: Vocabulary, *, rstrip: bool) -> Iterator[dict[str, Any]]:
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            yield {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": rstrip and token not in _KEEP_SPACE_AFTER,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }


def _byte_level_parts(vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """Returns the parts of tokenizer.json, and whether BOS is added where the file is silent."""
    file = vocabulary.file
    try:
        row = pre_tokenizer(file.text("tokenizer.ggml.pre", "default"))
    except ConfigError as exc:
        raise ConfigError(f"{file.path}: {exc}") from None
    steps = row.steps(add_prefix_space=file.flag("tokenizer.ggml.add_space_prefix", False))
    ids = vocabulary.ids()
    merges: dict[tuple[str, str], None] = {}
    for merge in file.texts("tokenizer.ggml.merges"):
        # The first part may itself begin with a space.
        cut = merge.find(" ", 1)
        left, right = merge[: max(cut, 0)], merge[cut + 1 :]
        if not (left in ids and right in ids and left + right in ids):
            raise ConfigError(
                f"{file.path}: tokenizer.ggml.merges holds {merge!r:.80}, "
                "which does not join two tokens to a third"
            )
        merges.setdefault((left, right))
    return {
        "normalizer": row.normalizer and {"type": row.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": dict(steps[-1], add_prefix_space=True, use_regex=True),
        "model": _bpe(ids, [list(pair) for pair in merges], ignore_merges=row.ignore_merges),
    }, row.adds_bos


def _sentencepiece_parts(vocabulary: Vocabulary) -> dict[str, Any]:
    file = vocabulary.file
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise ConfigError(f"{file.path}: {len(scores)} scores for {len(vocabulary.tokens)} tokens")
    merges = merges_from_scores(vocabulary.tokens, vocabulary.types, scores)
    score_of = dict(zip(vocabulary.tokens, scores, strict=True))
    joined = {left + right for left, right in merges}
    if len(joined) > 1 and len({score_of[token] for token in joined}) == 1:
        raise ConfigError(
            f"{file.path}: all tokens have the same score, so the order of merges is lost; take a "
            "file that was converted with the model's tokenizer.model"
        )
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = spaces
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        prepend = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, spaces]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(
        vocabulary.ids(),
        merges,
        unk_token=vocabulary.special("unknown"),
        fuse_unk=True,
        byte_fallback=_BYTE in vocabulary.types,
    )
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(ids: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return model | options | {"vocab": ids, "merges": merges}


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """Returns the merges that make ranked BPE join pieces in the order SentencePiece does.

    SentencePiece joins the neighbours whose joint piece has the best score; ranked BPE joins the
    pair of the lowest rank. So every way to split a piece in two pieces becomes a merge, ranked by
    the score of the whole (among splits of one piece: the order of the parts in the vocabulary).
    """
    normal = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _NORMAL
    }
    merges: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in normal.items():
        for cut in range(1, len(token)):
            left = normal.get(token[:cut])
            right = normal.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[token_id], token_id, left, right, token[:cut], token[cut:]))
    merges.sort()
    return [[left, right] for *_, left, right in merges]


def _post_processor(
    tokens: list[str], *, bos: str | None, eos: str | None
) -> dict[str, Any] | None:
    if bos is None and eos is None:
        return None

    def special(token: str, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": type_id}}

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        body: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": type_id}}]
        head = [] if bos is None else [special(bos, type_id)]
        return head + body + ([] if eos is None else [special(eos, type_id)])

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in (bos, eos)
            if token is not None
        },
    }
