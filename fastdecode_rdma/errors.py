"""The typed errors. Messages state what was got, what was allowed, and what to do."""

from __future__ import annotations


class FastDecodeError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(FastDecodeError, ValueError):
    """An argument, a model file or a request that cannot be used as given."""


class SamplingError(FastDecodeError):
    """A request's own parameters or logits processor left no token to choose, or failed."""


class QueueFullError(FastDecodeError):
    """As many requests as may wait for a seat do so already: try again later."""


class RequestCancelledError(FastDecodeError):
    """The result of a request that its caller cancelled was asked for."""


class GeneratorClosedError(FastDecodeError):
    """The generator has been closed, before a call or while a request ran."""


class ProtocolError(FastDecodeError):
    """The wire protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side tried to send something its state does not allow: a bug here, nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something its state does not allow, or bytes that are no message."""


class TransportError(FastDecodeError):
    """A connection could not be made or broke. `errno` is the system's, where there is one."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class TransportTimeout(TransportError):
    """A deadline passed while waiting for a peer."""


class WorkerError(FastDecodeError):
    """An attention worker failed. `worker`: its address; `remote_message`: its words."""

    def __init__(self, worker: str, remote_message: str) -> None:
        super().__init__(f"attention worker {worker}: {remote_message}")
        self.worker = worker
        self.remote_message = remote_message


class StepError(WorkerError):
    """A worker refused a step. `worker_index` says which; `code` is one of config.StepCode."""

    def __init__(self, worker: str, worker_index: int, code: int, remote_message: str) -> None:
        super().__init__(worker, remote_message)
        self.worker_index = worker_index
        self.code = code


class WorkerLostError(WorkerError):
    """An attention worker died or fell silent. `texts` holds what each request had produced so far
    (request index -> text of each sample) when no worker was left to finish it."""

    def __init__(
        self,
        worker: str,
        remote_message: str,
        *,
        worker_index: int | None = None,
        texts: dict[int, list[str]] | None = None,
    ) -> None:
        super().__init__(worker, remote_message)
        self.worker_index = worker_index
        self.texts = {} if texts is None else texts


class CacheFullError(FastDecodeError):
    """No room in the KV-cache: bytes needed and bytes free, in the message too."""

    def __init__(self, message: str, *, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
