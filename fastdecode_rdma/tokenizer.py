"""Text <-> token ids over the `tokenizers` package, with the chat template of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from fastdecode_rdma.chat_template import ChatTemplate
from fastdecode_rdma.detokenizer import (
    ByteLevelDecoder,
    IncrementalDetokenizer,
    SentencePieceDecoder,
    TextDecoder,
    WindowDecoder,
)
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer_files import TokenizerFiles, id_list

__all__ = ["IncrementalDetokenizer", "Tokenizer"]


class Tokenizer:
    """A model's tokenizer.

    `eos_token_ids` are the union of the tokenizer's, config.json's, generation_config.json's and
    the argument's.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bos = self._special_tokens.get("bos_token")
        self.bos_token_id = None if self._bos is None else backend.token_to_id(self._bos)
        eos = self._special_tokens.get("eos_token")
        own = None if eos is None else backend.token_to_id(eos)
        self.eos_token_ids = frozenset(eos_token_ids) | ({own} if own is not None else set())
        self._template = (
            None if chat_template is None else ChatTemplate(chat_template, self._special_tokens)
        )
        self._make_decoder = _decoder_factory(self)

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        chat_template: str | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        required: bool = True,
    ) -> Tokenizer | None:
        """Loads tokenizer.json (or vocab.json and merges.txt) and what describes it.

        chat_template: Jinja text, or a file that holds it; overrides the model's.
        Returns None when there is no tokenizer and `required` is False.

        Raises:
            ConfigError: files are missing, or cannot be read.
        """
        files = TokenizerFiles(directory)
        backend = files.load_backend()
        if backend is None:
            if not required:
                return None
            raise ConfigError(files.explain_missing())
        return cls(
            backend,
            special_tokens=files.special_tokens,
            eos_token_ids=[*files.eos_token_ids(), *id_list(eos_token_id)],
            chat_template=files.chat_template(chat_template),
        )

    @property
    def chat_template(self) -> str | None:
        """The template's text, or None if the model has none."""
        return None if self._template is None else self._template.source

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def check_vocab_size(self, num_rows: int) -> None:
        """Checks that the model has an embedding for every ordinary token.

        Added tokens may lie beyond it (placeholders of image models do): a prompt that holds one is
        refused as it comes.

        Raises:
            ConfigError: tokenizer and model do not belong together.
        """
        # Looks past the embeddings, as far as there are tokens: faster than a dict of all of them.
        count = self._backend.get_vocab_size(with_added_tokens=True)
        outside = [
            i
            for i in range(num_rows, num_rows + count)
            if i not in self._added_ids and self._backend.id_to_token(i) is not None
        ]
        if outside:
            raise ConfigError(
                f"the tokenizer has a token {outside[0]}, the model only {num_rows} embeddings: it "
                "is another model's; pass tokenizer=, a directory with the right one"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`, with the model's special tokens around, one BOS at most.

        Raises:
            ConfigError: `text` is no text, or holds lone surrogates.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as exc:
            raise ConfigError(f"the prompt is no valid text: {exc}") from exc
        bos = self.bos_token_id
        if add_special_tokens and self._bos and text.startswith(self._bos) and ids[:2] == [bos] * 2:
            return ids[1:]
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns chat messages as one text by the chat template.

        Raises:
            ConfigError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ConfigError(
                "this model has no chat template; pass chat_template=, or a text prompt"
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Returns the ids of chat messages. The template writes all special tokens itself.

        Raises:
            ConfigError: there is no template, or it refuses the messages.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
        )
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; ids outside the vocabulary have none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token by itself (U+FFFD for a part of a character)."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def detokenizer(
        self, params: SamplingParams, *, prompt_ids: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """Returns a detokenizer for one sequence.

        With `prompt_ids` the text continues the prompt's: where a tokenizer drops the space at the
        start of a text (Llama 2), the output keeps its own.
        """
        continues = any(token_id not in self._special_ids for token_id in prompt_ids)
        return IncrementalDetokenizer(
            self._make_decoder(params.skip_special_tokens, continues), params
        )

    def _is_skipped(self, token_id: int, skip_special_tokens: bool) -> bool:
        return skip_special_tokens and token_id in self._special_ids


def _decoder_factory(tokenizer: Tokenizer) -> Callable[[bool, bool], TextDecoder]:
    """Returns a maker (skip_special_tokens, continues) -> decoder by the backend's decoder."""
    backend = tokenizer._backend
    spec = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    if spec.get("type") == "ByteLevel":

        @cache
        def token_bytes(token_id: int, skip: bool) -> bytes:
            token = backend.id_to_token(token_id)
            if token is None or tokenizer._is_skipped(token_id, skip):
                return b""
            table = _byte_table()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return token.encode()

        return lambda skip, continues: ByteLevelDecoder(lambda i: token_bytes(i, skip))
    pieces = _sentencepiece_spec(spec)
    if pieces is not None:
        replacements, num_stripped = pieces

        @cache
        def token_piece(token_id: int, skip: bool) -> str | int | None:
            token = backend.id_to_token(token_id)
            if token is None or tokenizer._is_skipped(token_id, skip):
                return None
            for old, new in replacements:
                token = token.replace(old, new)
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return int(token[3:5], 16)
                except ValueError:
                    return token
            return token

        return lambda skip, continues: SentencePieceDecoder(
            lambda i: token_piece(i, skip), 0 if continues else num_stripped
        )
    return lambda skip, continues: WindowDecoder(
        lambda ids: tokenizer.decode(ids, skip_special_tokens=skip)
    )


def _sentencepiece_spec(spec: Mapping[str, Any]) -> tuple[list[tuple[str, str]], int] | None:
    """Returns (replacements, leading spaces dropped) of Replace* ByteFallback Fuse [Strip]."""
    steps = spec.get("decoders", []) if spec.get("type") == "Sequence" else []
    kinds = [step["type"] for step in steps]
    num_replacements = len(kinds) - len([kind for kind in kinds if kind != "Replace"])
    rest = kinds[num_replacements:]
    if rest not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    replacements = []
    for step in steps[:num_replacements]:
        if step["type"] != "Replace" or "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    if rest[-1] != "Strip":
        return replacements, 0
    strip = steps[-1]
    if strip["content"] != " " or strip["stop"] != 0:
        return None
    return replacements, strip["start"]


@cache
def _byte_table() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE: character -> byte."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in own}
    others = (byte for byte in range(256) if byte not in own)
    table.update((chr(256 + number), byte) for number, byte in enumerate(others))
    return table
