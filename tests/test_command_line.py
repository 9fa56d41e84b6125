"""Messages, signals and addresses of commands."""

from __future__ import annotations

import logging
import signal
import threading
import time

import pytest

from fastdecode_rdma.command_line import messages_on_stderr, split_workers, unwinding_on_signals
from fastdecode_rdma.errors import ConfigError

LOG = logging.getLogger("fastdecode_rdma.some.room")


def test_workers_are_split_and_blanks_left_out():
    assert split_workers("a:1, b ,,tcp://c:2,") == ["a:1", "b", "tcp://c:2"]
    for text in ("", " ", ",, "):
        with pytest.raises(ConfigError, match="--workers names no worker"):
            split_workers(text)


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_messages_go_to_stderr_while_the_command_runs(level, capsys):
    package = logging.getLogger("fastdecode_rdma")
    before = package.level, list(package.handlers)
    with messages_on_stderr(level):
        LOG.warning("worker %s is back", "h:1")
        LOG.info("a detail")
    LOG.warning("too late")
    captured = capsys.readouterr()
    detail = "a detail\n" if level == logging.INFO else ""
    assert (captured.out, captured.err) == ("", f"worker h:1 is back\n{detail}")
    assert (package.level, package.handlers) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, unwinding_on_signals():
        signal.raise_signal(number)
        time.sleep(5)  # the handler runs before this is over
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with unwinding_on_signals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_leave_signals_alone():
    seen: list[object] = []

    def run() -> None:
        with unwinding_on_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert seen == [before]
