"""Token ids -> text, one token at a time, for every kind of decoder of the `tokenizers` package.

Fed with any ids, the texts of a decoder concatenate to what the package gives for all of them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", re.ASCII)


class TextDecoder(Protocol):
    """Turns tokens into text. `tentative` is text that is complete but that the next token could
    still change; a decoder that never has any leaves it empty."""

    @property
    def tentative(self) -> str: ...

    def push(self, token_id: int) -> str:
        """Returns the text that this token makes certain."""
        ...

    def flush(self) -> str:
        """Returns what is left at the end of the sequence."""
        ...


class ByteLevelDecoder:
    """Byte-level BPE: tokens are byte strings, text is their UTF-8 with U+FFFD for what is none."""

    tentative = ""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class SentencePieceDecoder:
    """SentencePiece with byte fallback: tokens are text or single bytes.

    A run of byte tokens is text when the whole run is valid UTF-8; otherwise each byte is U+FFFD.
    So a run is certain only when it has ended; until then it is `tentative`.
    `num_stripped` leading spaces of the whole text are dropped (Llama 2 adds one when encoding).
    """

    def __init__(self, token_piece: Callable[[int], str | int | None], num_stripped: int) -> None:
        self._token_piece = token_piece
        self._num_stripped = num_stripped
        self._start_run()

    @property
    def tentative(self) -> str:
        return self._run[self._count_stripped(self._run) :]

    def push(self, token_id: int) -> str:
        piece = self._token_piece(token_id)
        if piece is None:  # a special token that is skipped does not end a run
            return ""
        if isinstance(piece, int):
            self._run_length += 1
            if self._run_is_valid:
                try:
                    self._run += self._utf8.decode(bytes((piece,)))
                except UnicodeDecodeError:
                    self._run_is_valid = False
                    self._run = ""
            return ""
        return self._strip(self._end_run() + piece)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _start_run(self) -> None:
        self._run = ""
        self._run_length = 0
        self._run_is_valid = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def _end_run(self) -> str:
        if not self._run_length:
            return ""
        is_whole = self._run_is_valid and not self._utf8.getstate()[0]
        text = self._run if is_whole else _REPLACEMENT * self._run_length
        self._start_run()
        return text

    def _count_stripped(self, text: str) -> int:
        if not self._num_stripped:
            return 0
        head = text[: self._num_stripped]
        return len(head) - len(head.lstrip(" "))

    def _strip(self, text: str) -> str:
        count = self._count_stripped(text)
        # The first other character ends it.
        self._num_stripped = self._num_stripped - count if count == len(text) else 0
        return text[count:]


class WindowDecoder:
    """Any other decoder: decodes a short window of tokens with and without the newest one.

    Only tokens that have text may enter the window: what a decoder does at the start of a text
    (no space, say) must not happen again where a window starts. `context`: tokens before the first.
    """

    _WINDOW = 8
    _MAX_HELD = 16  # tokens that may be the parts of one character

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        has_text: Callable[[int], bool],
        is_joined: Callable[[int, int], bool],
        context: Sequence[int] = (),
    ) -> None:
        """is_joined: (token before, token) -> whether no space may come between them."""
        self.tentative = ""
        self._decode = decode
        self._has_text = has_text
        self._is_joined = is_joined
        self._window = list(context)
        self._num_held = 0
        self._known = decode(self._window) if self._window else ""  # what was given out

    def push(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        is_joined = bool(self._window) and self._is_joined(self._window[-1], token_id)
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and self._num_held < self._MAX_HELD:
            self._num_held += 1  # perhaps an unfinished character
            return ""
        delta = text[len(self._known) :]
        if is_joined and not self._num_held:
            delta = delta.removeprefix(" ")
        self._num_held = 0
        self._known = text
        if len(self._window) > 4 * self._WINDOW:
            self._window = self._window[-self._WINDOW :]
            self._known = self._decode(self._window)
        return delta

    def flush(self) -> str:
        return self._decode(self._window)[len(self._known) :] if self._num_held else ""


class DecoderFactory:
    """Makes decoders for the tokens of one backend. What a token is, is looked up once for all."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        # What decoding skips; the flag that get_added_tokens_decoder shows may lag behind it.
        self.special_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special or (self._text(token_id) and not backend.decode([token_id]))
        )
        spec = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        steps = _flat_steps(spec)
        self._is_byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self._pieces = _sentencepiece_spec(steps)
        self.token_bytes = cache(self._token_bytes)
        self.token_piece = cache(self._token_piece)

    def _text(self, token_id: int) -> str:
        return self._backend.decode([token_id], skip_special_tokens=False)

    def make(
        self,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> TextDecoder:
        """Returns a decoder for text that continues the one of `prompt_ids`."""

        def has_text(token_id: int) -> bool:
            if skip_special_tokens and token_id in self.special_ids:
                return False
            return self._backend.id_to_token(token_id) is not None

        if self._is_byte_level:
            return ByteLevelDecoder(lambda i: self.token_bytes(i, skip_special_tokens))
        before = (token_id for token_id in map(int, prompt_ids) if has_text(token_id))
        if self._pieces is not None:
            num_stripped = self._pieces[1]
            if num_stripped and next(before, None) is not None:
                num_stripped = 0
            return SentencePieceDecoder(
                lambda i: self.token_piece(i, skip_special_tokens), num_stripped
            )
        latest = (token_id for token_id in map(int, reversed(prompt_ids)) if has_text(token_id))
        joins = not (skip_special_tokens or spaces_between_special_tokens)
        return WindowDecoder(
            lambda ids: self._backend.decode(ids, skip_special_tokens=False),
            has_text=has_text,
            is_joined=lambda a, b: joins and a in self._added and b in self._added,
            context=list(islice(latest, WindowDecoder._WINDOW))[::-1],
        )

    def _token_bytes(self, token_id: int, skip: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or (skip and token_id in self.special_ids):
            return b""
        table = _byte_table()
        if all(char in table for char in token):
            return bytes(table[char] for char in token)
        return token.encode()

    def _token_piece(self, token_id: int, skip: bool) -> str | int | None:
        token = self._backend.id_to_token(token_id)
        if token is None or (skip and token_id in self.special_ids):
            return None
        for old, new in self._pieces[0]:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return token if byte is None else int(byte[1], 16)


def _flat_steps(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the steps of a decoder, nested sequences opened; [] when there is none."""
    if spec.get("type") == "Sequence":
        return [step for part in spec["decoders"] for step in _flat_steps(part)]
    return [spec] if spec else []


def _sentencepiece_spec(
    steps: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[str, str]], int] | None:
    """Returns (replacements, leading spaces dropped) of Replace* ByteFallback Fuse [Strip]."""
    kinds = [step["type"] for step in steps]
    num_replacements = len(kinds) - len([kind for kind in kinds if kind != "Replace"])
    rest = kinds[num_replacements:]
    if rest not in (["ByteFallback"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
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
