"""Answers on a terminal, as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode_rdma.sequence import TokenEvent


def print_stream(
    texts: Sequence[str], events: Iterator[TokenEvent], *, with_headings: bool = True
) -> int:
    """Prints one block per prompt, in order, the first unfinished one as it streams.

    Returns the number of tokens.
    """
    held: list[list[str]] = [[] for _ in texts]
    finished = [False] * len(texts)
    current = 0
    num_tokens = 0

    def start(index: int) -> None:
        if with_headings:
            print(f"[{index + 1}/{len(texts)}] {texts[index].rstrip()}", flush=True)
        print("".join(held[index]), end="", flush=True)

    start(current)
    for event in events:
        num_tokens += event.token_id is not None
        index = event.request_index
        finished[index] = event.finish_reason is not None
        if index == current:
            print(event.text, end="", flush=True)
        else:
            held[index].append(event.text)
        while current < len(texts) and finished[current]:
            current += 1
            print("\n" if with_headings else "", flush=True)
            if current < len(texts):
                start(current)
    return num_tokens
