"""Any ids, token by token, against the full decode: every kind of decoder, and the real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.text_decoders import (
    ByteLevelDecoder,
    DecoderFactory,
    SentencePieceDecoder,
    WindowDecoder,
)
from fastdecode_rdma.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SNIPPETS = [
    "the fox", " END", "\n\n", "naïve —", "日本語 텍스트", "😀👨\u200d👩\u200d👧", "𐍈", "\u0000",
    "</s>", "[tool call]", "  ", "x",
]  # fmt: skip
SPACE = "\u2581"

MakeBackend = Callable[[str], tokenizers.Tokenizer]


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: Tokenizer, *, max_parts: int = 12) -> list[int]:
    """Whole texts, single ids of everything there is, special tokens and ids beyond, in a row."""
    specials = sorted(tokenizer._decoders.special_ids)
    parts = draw(
        st.lists(
            st.one_of(
                st.sampled_from(SNIPPETS).map(
                    lambda text: tokenizer.encode(text, add_special_tokens=False)
                ),
                st.integers(0, tokenizer.vocab_size + 1).map(lambda i: [i]),
                st.integers(0, 300).map(lambda i: [i]),  # where bytes and special tokens live
                st.sampled_from(specials).map(lambda i: [i]),
            ),
            max_size=max_parts,
        )
    )
    ids = [token_id for part in parts for token_id in part]
    # Cut anywhere: in the middle of a character, too.
    return ids[draw(st.integers(0, 3)) : len(ids) - draw(st.integers(0, 3))]


def fuzz(max_examples: int) -> Callable:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


@fuzz(120)
@given(data=st.data())
def test_deltas_concatenate_to_the_full_decode_of_any_ids(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(token_ids(tokenizer))
    skip = data.draw(st.booleans())
    detokenizer = tokenizer.detokenizer(SamplingParams(skip_special_tokens=skip))
    deltas = [detokenizer.push(token_id) for token_id in ids]
    text = "".join(deltas) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@fuzz(60)
@given(data=st.data())
def test_what_is_given_out_is_the_start_of_every_longer_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """No U+FFFD for a character that is not complete, nothing that is taken back."""
    text = "".join(data.draw(st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=6)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    detokenizer = tokenizer.detokenizer(SamplingParams())
    so_far = ""
    for token_id in ids:
        so_far += detokenizer.push(token_id)
        assert whole.startswith(so_far)
    assert so_far + detokenizer.flush() == whole


@fuzz(80)
@given(data=st.data())
def test_output_continues_the_prompts_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """decode(prompt + output) is decode(prompt), then the output's text, where both are whole."""
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", *SNIPPETS, "a b c d e f g h i j"])))
    output = tokenizer.encode(data.draw(st.sampled_from(SNIPPETS)), add_special_tokens=False)
    skip = data.draw(st.booleans())
    detokenizer = tokenizer.detokenizer(SamplingParams(skip_special_tokens=skip), prompt_ids=prompt)
    text = "".join(map(detokenizer.push, output)) + detokenizer.flush()
    both, first = (
        tokenizer.decode(ids, skip_special_tokens=skip) for ids in (prompt + output, prompt)
    )
    assert first + text == both


def test_real_models_decode_as_transformers_does(
    smollm2_dir: Path,
    gemma3_dir: Path,
    texts: list[str],
    hf_tokenizer: Callable[[Path], Any],
    real_tokenizer: Callable[[str], Tokenizer],
) -> None:
    for name, directory in (("smollm2", smollm2_dir), ("gemma3", gemma3_dir)):
        ours = real_tokenizer(name)
        theirs = hf_tokenizer(directory)
        for text in [*texts, "<|im_start|>user\nhi<|im_end|><eos>", " ".join(texts)]:
            ids = ours.encode(text)
            assert ids == theirs(text)["input_ids"]
            for skip in (True, False):
                detokenizer = ours.detokenizer(SamplingParams(skip_special_tokens=skip))
                got = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
                assert got == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("char", "😀한日é𝄞")
@pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama2"])
def test_a_character_comes_once_its_last_token_is_there(
    text_backend: MakeBackend, kind: str, char: str
) -> None:
    """One token per byte, then an ordinary one, which ends a run of bytes."""
    tokenizer = Tokenizer(text_backend(kind), special_tokens=SPECIAL)
    backend = tokenizer._backend
    if kind == "byte_level":
        spell = {decoders.ByteLevel().decode([c]): c for c in backend.get_vocab() if len(c) == 1}
        alphabet = {v: k for k, v in _bytes_to_unicode().items()}
        assert spell  # the alphabet is the tokenizer's own
        ids = [backend.token_to_id({b: c for c, b in alphabet.items()}[b]) for b in char.encode()]
    else:
        ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
    detokenizer = tokenizer.detokenizer(SamplingParams())
    deltas = [detokenizer.push(token_id) for token_id in [*ids, backend.token_to_id("x")]]
    assert deltas[: len(ids) - 1] == [""] * (len(ids) - 1)
    assert "".join(deltas[-2:]) == char + "x"


def _bytes_to_unicode() -> dict[int, str]:
    """GPT-2's table by its definition: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}


@pytest.mark.parametrize("kind", ["byte_level", "gemma"])
def test_bytes_that_are_no_text_come_as_replacements_once(
    text_backend: MakeBackend, kind: str
) -> None:
    """The sequence ends within a character: its bytes come with the flush, and only once."""
    tokenizer = Tokenizer(text_backend(kind), special_tokens=SPECIAL)
    ids = [*tokenizer.encode("x😀", add_special_tokens=False)][:-1]
    detokenizer = tokenizer.detokenizer(SamplingParams())
    text = "".join(map(detokenizer.push, ids))
    assert text == "x"
    rest = detokenizer.flush()
    assert rest and set(rest) == {"\ufffd"}
    assert text + rest == tokenizer.decode(ids)
    assert detokenizer.flush() == ""


def test_a_byte_token_is_what_the_package_takes_for_one() -> None:
    names = ["<0x41>", "<0x+5>", "<0x 5>", "<0x4G>", "<0xé>", "<0x４1>", "<0x-5>", "<0x4_>", "a"]
    backend = tokenizers.Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, "a"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    for token_id in range(len(names)):
        ids = [token_id, len(names) - 1]
        detokenizer = tokenizer.detokenizer(SamplingParams())
        assert "".join(map(detokenizer.push, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (decoders.ByteLevel(), ByteLevelDecoder),
        (decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])]), ByteLevelDecoder),
        (decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback()]),
         SentencePieceDecoder),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), WindowDecoder),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
         WindowDecoder),
        (decoders.BPEDecoder(), WindowDecoder),
        (None, WindowDecoder),
    ],
)  # fmt: skip
def test_each_decoder_has_its_way(decoder: decoders.Decoder | None, kind: type) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a</w>": 0, "b": 1, "c</w>": 2}, "b"))
    if decoder is not None:
        backend.decoder = decoder
    assert isinstance(DecoderFactory(backend).make(skip_special_tokens=True), kind)
    tokenizer = Tokenizer(backend)
    for ids in ([0, 1, 2], [1, 1, 0, 2, 0], [0] * 50):
        detokenizer = tokenizer.detokenizer(SamplingParams())
        text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["word_piece", "metaspace", "no_decoder"])
def test_skipped_tokens_do_not_begin_the_text_anew(text_backend: MakeBackend, kind: str) -> None:
    """A window that held nothing but skipped tokens would drop the next word's space."""
    tokenizer = Tokenizer(text_backend(kind), special_tokens=SPECIAL)
    words = tokenizer.encode("the fox the dog", add_special_tokens=False)
    ids = [*words * 9, *[tokenizer.bos_token_id] * 60, *words * 9]
    detokenizer = tokenizer.detokenizer(SamplingParams())
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def test_endless_replacement_characters_are_given_out(text_backend: MakeBackend) -> None:
    """The general decoder waits for the rest of a character, but not for ever."""
    backend = tokenizers.Tokenizer(models.WordLevel({"\ufffd": 0, "a": 1}, "a"))
    tokenizer = Tokenizer(backend)
    detokenizer = tokenizer.detokenizer(SamplingParams())
    deltas = [detokenizer.push(0) for _ in range(1000)]
    assert sum(map(bool, deltas)) > 50
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode([0] * 1000)


@pytest.mark.parametrize(
    ("skip", "spaces", "text"),
    [
        (False, True, "the <s> </s> [tool call] dog"),
        (False, False, "the <s></s>[tool call] dog"),
        (True, True, "the [tool call] dog"),
        (True, False, "the [tool call] dog"),
    ],
)
def test_spaces_between_special_tokens(
    text_backend: MakeBackend, skip: bool, spaces: bool, text: str
) -> None:
    """As in vLLM: False takes out the spaces that a decoder puts between two added tokens."""
    for kind in ("word_piece", "no_decoder"):
        tokenizer = Tokenizer(text_backend(kind), special_tokens=SPECIAL)
        names = ["the", "<s>", "</s>", "[tool call]", "dog"]
        params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        detokenizer = tokenizer.detokenizer(params)
        ids = [tokenizer._backend.token_to_id(name) for name in names]
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text
    level = Tokenizer(text_backend("byte_level"), special_tokens=SPECIAL)
    ids = level.encode("the</s></s> dog")
    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    detokenizer = level.detokenizer(params)
    assert "".join(map(detokenizer.push, ids)) == "<s>the</s></s> dog"


def test_leading_space_of_llama_2(text_backend: MakeBackend) -> None:
    """Dropped at the start of a text, where encoding put it; kept where the output goes on."""
    tokenizer = Tokenizer(text_backend("llama2"), special_tokens=SPECIAL)
    the, space = (tokenizer._backend.token_to_id(t) for t in (f"{SPACE}the", SPACE))
    bos = tokenizer.bos_token_id
    for params, prompt, text in (
        (SamplingParams(), [], "the"),
        (SamplingParams(), [bos], "the"),
        (SamplingParams(skip_special_tokens=False), [bos], " the"),
        (SamplingParams(), [bos, the], " the"),
        (SamplingParams(), [bos, space], " the"),
    ):
        assert tokenizer.detokenizer(params, prompt_ids=prompt).push(the) == text


def test_what_is_skipped_is_what_the_package_skips(text_backend: MakeBackend) -> None:
    """Once special, always special there, whatever its list of added tokens says."""
    backend = text_backend("byte_level")
    backend.add_special_tokens(["[tool call]"])
    backend.add_tokens([tokenizers.AddedToken("[tool call]", special=False)])
    tokenizer = Tokenizer(backend, special_tokens=SPECIAL)
    ids = tokenizer.encode("a[tool call]b")
    detokenizer = tokenizer.detokenizer(SamplingParams())
    assert "".join(map(detokenizer.push, ids)) == tokenizer.decode(ids)
