"""The engine's side of attention: workers, placement, and the calls of every layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode_rdma.attention.backend import AttentionBackend
    from fastdecode_rdma.config import AttentionGeometry

# Imported in the functions: `fastdecode status` lives here too and needs neither pump nor kernel.


def connect_workers(
    workers: Sequence[str] | None,
    geometry: AttentionGeometry,
    *,
    token_file: str | os.PathLike[str] | None = None,
    timeout_s: float = 60.0,
    num_threads: int = 1,
) -> AttentionBackend:
    """Returns a backend over the workers at these URLs, or over one embedded worker when None.

    `timeout_s` bounds the wait for a worker's answer; `num_threads` is the embedded worker's.

    Raises:
        ConfigError: an address or the token cannot be used, or a worker is given twice.
        RemoteProtocolError: a worker refused: version, token, geometry or memory; says which.
        TransportError, TransportTimeout: a worker cannot be reached.
    """
    from fastdecode_rdma.attention.backend import AttentionBackend, WorkerLink

    links: list[WorkerLink] = []
    if workers is None:
        from fastdecode_rdma.attention.local import embed_worker

        links.append(embed_worker(geometry, num_threads=num_threads))
    else:
        from fastdecode_rdma.attention.remote import open_sessions
        from fastdecode_rdma.wire.token_file import find_token

        links.extend(open_sessions(workers, geometry, token=find_token(token_file)))
    try:
        return AttentionBackend(links, geometry, timeout_s=timeout_s)
    except BaseException:
        for link in links:
            link.close()
        raise
