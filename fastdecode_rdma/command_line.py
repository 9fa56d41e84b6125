"""What several commands need: addresses, messages on stderr, and an end in good order."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fastdecode_rdma.errors import ConfigError


def split_workers(text: str) -> list[str]:
    """Returns the addresses in the value of --workers; blank ones are left out.

    Raises:
        ConfigError: there is none, as an unset shell variable gives.
    """
    addresses = [address.strip() for address in text.split(",") if address.strip()]
    if not addresses:
        raise ConfigError("--workers names no worker")
    return addresses


@contextmanager
def messages_on_stderr(level: int = logging.WARNING) -> Iterator[None]:
    """Shows what the library's loggers say from `level` on; stdout is for results alone."""
    log = logging.getLogger("fastdecode_rdma")
    before = log.level
    handler = logging.StreamHandler()
    handler.setLevel(level)
    log.addHandler(handler)
    if not log.isEnabledFor(level):
        log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind the stack as Ctrl-C does: files are closed, half-written ones
    removed, workers ended. The exit status is the shell's for the signal, 143 or 129.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    # What is ignored stays so: nohup relies on it. Only the main thread may handle signals.
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
