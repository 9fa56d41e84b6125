"""Stop strings: found as in the full text, wherever tokens end; what is held back, and when."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SNIPPETS = ["the fox", " END", "\n\n", "ab", "aab", "日本", "😀", "</s>", " the", "x"]
MakeBackend = Callable[[str], tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def plain(text_backend: MakeBackend) -> Tokenizer:
    return Tokenizer(text_backend("byte_level"), special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def fallback(text_backend: MakeBackend) -> Tokenizer:
    return Tokenizer(text_backend("gemma"), special_tokens=SPECIAL)


def stream(tokenizer: Tokenizer, ids: list[int], **params) -> tuple[list[str], str | None]:
    """Pushes ids until a stop string ends it; returns the deltas and the stop string."""
    detokenizer = tokenizer.detokenizer(SamplingParams(**params))
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stop_string is not None:
            break
    return [*deltas, detokenizer.flush()], detokenizer.stop_string


def words(*pieces: str) -> Tokenizer:
    """A tokenizer whose tokens 0, 1, … are these texts."""
    backend = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "a"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def visible(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text so far by the full decode, without the bytes of a character that is not whole."""
    for cut in range(4):
        text = tokenizer.decode(ids[: len(ids) - cut])
        if not text.endswith("\ufffd"):
            return text
    return tokenizer.decode(ids).rstrip("\ufffd")


def find_stop(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int
) -> tuple[int, str, str] | None:
    """(tokens used, text before the stop, stop) by looking through the full text of each length."""
    if len(ids) <= min_tokens:
        return None
    exempt = len(visible(tokenizer, ids[:min_tokens]))
    for count in range(min_tokens + 1, len(ids) + 2):  # the last time for what the end releases
        text = visible(tokenizer, ids[:count]) if count <= len(ids) else tokenizer.decode(ids)
        ends = [
            (start + len(stop), -len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > exempt
        ]
        if ends:
            end, _, stop = min(ends)
            return min(count, len(ids)), text[: end - len(stop)], stop
    return None


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_stops_are_those_of_the_full_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=6))
    ids = tokenizer.encode("".join(parts), add_special_tokens=False)
    noise = data.draw(st.lists(st.integers(0, min(300, tokenizer.vocab_size - 1)), max_size=4))
    place = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:place], *noise, *ids[place:]][:40]
    whole = tokenizer.decode(ids).replace("\ufffd", "") or "a"
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 6))])
    stops += data.draw(st.lists(st.sampled_from(["ab", "aa", "zz", " ", "\n", "本"]), max_size=1))
    min_tokens = data.draw(st.sampled_from([0, 0, 0, 1, 3]))
    include = data.draw(st.booleans())
    detokenizer = tokenizer.detokenizer(
        SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    )
    expected = find_stop(tokenizer, ids, stops, min_tokens)
    text, used = "", 0
    for token_id in ids:
        text += detokenizer.push(token_id)
        used += 1
        if detokenizer.stop_string is not None:
            break
        if expected is not None and not include:
            assert expected[1].startswith(text)  # nothing that belongs to the stop string
    text += detokenizer.flush()
    if expected is None:
        assert (text, detokenizer.stop_string) == (tokenizer.decode(ids), None)
    else:
        count, before, stop = expected
        assert (used, detokenizer.stop_string) == (count, stop)
        assert text == before + (stop if include else "")


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
        (["xabc"], ["abc", "ab"], "x", "ab"),  # a prefix of another is complete first
        (["x", "y", "\u00fc\u00fc"], ["\u00fc"], "xy", "\u00fc"),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], text: str, stop: str | None) -> None:
    tokenizer = words(*pieces)
    deltas, found = stream(tokenizer, list(range(len(pieces))), stop=stops)
    assert ("".join(deltas), found) == (text, stop)
    shown, _ = stream(
        tokenizer, list(range(len(pieces))), stop=stops, include_stop_str_in_output=True
    )
    assert "".join(shown) == text + (stop or "")


def test_stops_do_not_depend_on_where_tokens_end(plain: Tokenizer) -> None:
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


def test_no_delta_leaks_the_start_of_a_stop_string(plain: Tokenizer) -> None:
    ids = plain.encode("the quick brown END", add_special_tokens=False)
    detokenizer = plain.detokenizer(SamplingParams(stop=["brown END", "quack"]))
    so_far = ""
    for token_id in ids:
        so_far += detokenizer.push(token_id)
        assert "the quick ".startswith(so_far)
    assert detokenizer.stop_string == "brown END" and so_far + detokenizer.flush() == "the quick "


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = words("a", "b", "c", "x").detokenizer(SamplingParams(stop=["abc"]))
    assert [detokenizer.push(i) for i in (3, 0, 1, 0, 1, 3)] == ["x", "", "", "ab", "", "abx"]


def test_a_newline_byte_token_stops_at_once(fallback: Tokenizer) -> None:
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


def test_a_dropped_leading_space_is_no_stop_string(text_backend: MakeBackend) -> None:
    """Llama 2 drops the first space, also when it comes as a byte."""
    tokenizer = Tokenizer(text_backend("llama2"), special_tokens=SPECIAL)
    space = tokenizer._backend.token_to_id("<0x20>")
    text, found = stream(tokenizer, [space, tokenizer._backend.token_to_id("x")], stop=[" "])
    assert ("".join(text), found) == ("x", None)
    text, found = stream(tokenizer, [space, space], stop=[" "])
    assert ("".join(text), found) == ("", " ")


def test_stop_tokens_have_no_text_unless_asked(plain: Tokenizer) -> None:
    ids = plain.encode("the", add_special_tokens=False)
    for include, text in ((False, ""), (True, "the")):
        detokenizer = plain.detokenizer(SamplingParams(include_stop_str_in_output=include))
        got = "".join(detokenizer.push(i, is_stop_token=True) for i in ids)
        assert got + detokenizer.flush() == text


@pytest.mark.parametrize("is_stop_token", [True, False])
def test_the_end_releases_a_candidate(is_stop_token: bool) -> None:
    """End of sequence, or max_tokens, while the start of a stop string is held back."""
    tokenizer = words("a", "EN", "</s>")
    detokenizer = tokenizer.detokenizer(SamplingParams(stop=["END"]))
    assert [detokenizer.push(0), detokenizer.push(1)] == ["a", ""]
    if is_stop_token:
        assert detokenizer.push(2, is_stop_token=True) == ""
    assert (detokenizer.flush(), detokenizer.stop_string) == ("EN", None)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("pieces", "min_tokens", "text", "stop"),
    [
        ("xaxa", 0, "x", "a"),
        ("xaxa", 1, "x", "a"),
        ("xaxa", 2, "xax", "a"),  # complete with the second token: does not count
        ("xaxa", 3, "xax", "a"),
        ("xaxa", 4, "xaxa", None),
        ("aab", 1, "", "aab"),  # begun within min_tokens, complete after it
        ("aabaab", 3, "aab", "aab"),
    ],
)
def test_min_tokens_delays_stop_strings(
    plain: Tokenizer, pieces: str, min_tokens: int, text: str, stop: str | None
) -> None:
    letters = [plain._backend.token_to_id(c) for c in pieces]
    stops = [stop] if stop else ["a"]
    deltas, found = stream(plain, letters, stop=stops, min_tokens=min_tokens)
    assert ("".join(deltas), found) == (text, stop)


def test_min_tokens_with_text_that_becomes_certain_later(fallback: Tokenizer) -> None:
    """The newline belongs to the first two tokens, though its run ends with the third."""
    the, newline = (fallback._backend.token_to_id(t) for t in ("the", "<0x0A>"))
    deltas, found = stream(fallback, [the, newline, the], stop=["\n"], min_tokens=2)
    assert ("".join(deltas), found) == ("the\nthe", None)
    deltas, found = stream(fallback, [the, newline], stop=["\n"], min_tokens=2)
    assert ("".join(deltas), found) == ("the\n", None)
    deltas, found = stream(fallback, [the, newline, newline], stop=["\n"], min_tokens=2)
    assert ("".join(deltas), found) == ("the\n", "\n")
    deltas, found = stream(fallback, [the, newline, the], stop=["\nthe"], min_tokens=2)
    assert ("".join(deltas), found) == ("the", "\nthe")


def test_real_generations_stop_where_the_text_does(
    real_tokenizer: Callable[[str], Tokenizer],
) -> None:
    """Daily use on a real vocabulary: stops inside tokens, over lines, in emoji."""
    tokenizer = real_tokenizer("smollm2")
    text = "Sure! Here are the steps:\n\n1. Open the box 📦.\n2. DEFINE it.\n\nUser: thanks"
    ids = tokenizer.encode(text)
    for stop in ("\n\nUser:", "DEF", "📦", "eps:", "\n2", ":\n\n1"):
        deltas, found = stream(tokenizer, ids, stop=[stop, "never there"])
        assert ("".join(deltas), found) == (text[: text.index(stop)], stop)
