"""Rebuilds tokenizer.json and tokenizer_config.json from GGUF metadata.

Two kinds: "gpt2", byte-level BPE with its merges in the file, split first as the named
pre-tokenizer does; and "llama", SentencePiece BPE, whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"

# Expressions that split text before byte-level BPE, by tokenizer.ggml.pre. None: ByteLevel's own.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "smollm": ({"type": "Digits", "individual_digits": True}, True),
    "gpt-2": (None, True),
    "llama-bpe": (None, False),
    "qwen2": (None, False),
}
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
# llama.cpp adds BOS for these when the file is silent.
_BOS_BY_DEFAULT = frozenset({"llama-bpe"})


def build_tokenizer(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of tokenizer.json and of tokenizer_config.json.

    Raises:
        ConfigError: the tokenizer kind or its pre-tokenizer is not supported.
    """
    kind = file.get("tokenizer.ggml.model")
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ConfigError(f"{file.path}: the vocabulary is inconsistent (types or duplicates)")
    if kind == "gpt2":
        parts = _byte_level_parts(file, tokens)
    elif kind == "llama":
        parts = _sentencepiece_parts(file, tokens, types)
    else:
        raise ConfigError(f"{file.path}: tokenizer {kind!r} is not supported (gpt2 and llama are)")
    adds_bos, adds_eos = _adds(file, kind)
    bos, eos = (_special(file, tokens, name) for name in ("bos", "eos"))
    template = _post_processor(tokens, bos=bos if adds_bos else None, eos=eos if adds_eos else None)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(tokens, types)),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": template,
        "decoder": parts["decoder"],
        "model": parts["model"],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.arch("context_length"),
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": _special(file, tokens, "unknown"),
        "pad_token": _special(file, tokens, "padding"),
    }
    if (chat_template := file.get("tokenizer.chat_template", None)) is not None:
        config["chat_template"] = chat_template
    return tokenizer, config


def special_token_ids(file: GGUFFile) -> dict[str, Any]:
    """Returns bos_token_id, eos_token_id (an int, or a list with end-of-turn) and pad_token_id."""
    keys = ("eos", "eot", "eom")
    found = [file.get(f"tokenizer.ggml.{key}_token_id", None) for key in keys]
    eos = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
    ids = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", None),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _special(file: GGUFFile, tokens: list[str], name: str) -> str | None:
    token_id = file.get(f"tokenizer.ggml.{name}_token_id", None)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ConfigError(f"{file.path}: {name}_token_id {token_id} is not in the vocabulary")
    return tokens[token_id]


def _adds(file: GGUFFile, kind: str) -> tuple[bool, bool]:
    by_default = kind == "llama" or file.get("tokenizer.ggml.pre", "") in _BOS_BY_DEFAULT
    adds_bos = file.get("tokenizer.ggml.add_bos_token", by_default)
    return bool(adds_bos), bool(file.get("tokenizer.ggml.add_eos_token", False))


def _added_tokens(tokens: list[str], types: list[int]) -> Iterator[dict[str, Any]]:
    for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            yield {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token_type != _USER_DEFINED,
            }


def _byte_level_parts(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path}: pre-tokenizer {name!r} is not supported; supported are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    first, own_regex = _PRE_TOKENIZERS[name]
    if name in _SPLITS:
        first = {
            "type": "Split",
            "pattern": {"Regex": _SPLITS[name]},
            "behavior": "Isolated",
            "invert": False,
        }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(file.get("tokenizer.ggml.add_space_prefix", False)),
        "trim_offsets": True,
        "use_regex": own_regex,
    }
    steps = [byte_level] if first is None else [first, byte_level]
    merges = [merge.split(" ") for merge in file.get("tokenizer.ggml.merges")]
    if any(len(pair) != 2 for pair in merges):
        raise ConfigError(f"{file.path}: tokenizer.ggml.merges holds a line that is not a pair")
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": dict(byte_level, add_prefix_space=True, use_regex=True),
        # Llama 3 takes a whole word that is in the vocabulary before looking at merges.
        "model": _bpe(tokens, merges, ignore_merges=name == "llama-bpe"),
    }


def _sentencepiece_parts(file: GGUFFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores: list[float] = file.get("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path}: {len(scores)} scores for {len(tokens)} tokens")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = spaces
    if file.get("tokenizer.ggml.add_space_prefix", True):
        prepend = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, spaces]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.get("tokenizer.ggml.unknown_token_id", None)
    model = _bpe(
        tokens,
        merges_from_scores(tokens, types, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
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
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return model | options | {"vocab": vocab, "merges": merges}


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
