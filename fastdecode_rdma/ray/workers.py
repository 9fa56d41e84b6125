"""Attention workers as Ray actors: one that dies is started again where engines look for it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from fastdecode_rdma.errors import ConfigError

MAX_RESTARTS = 1000
START_TIMEOUT_S = 180.0
"""How long workers may take to find a place in the cluster and to start."""


class AttentionWorker:
    """A worker that serves from a thread of this actor, and ends with it."""

    def __init__(
        self,
        token: bytes,
        port_name: str,
        *,
        memory_bytes: int | None,
        num_threads: int | None,
        num_on_node: int,
    ) -> None:
        """token: what engines must hold. port_name: of the file that keeps the port for a restart
        on the same node. memory_bytes, num_threads: None takes what is free here, divided by
        `num_on_node`, the workers that share the node."""
        from fastdecode_rdma.worker.command import prepare_environment

        prepare_environment(os.environ)
        from fastdecode_rdma.worker import limits
        from fastdecode_rdma.worker.machinery import kernel_facts, real_machinery
        from fastdecode_rdma.worker.memory import MemoryBudget
        from fastdecode_rdma.worker.preparation import find_nodes
        from fastdecode_rdma.worker.server import WorkerConfig, WorkerServer

        memory = memory_bytes or max(
            limits.MIN_MEMORY_BYTES, limits.default_memory().value // num_on_node
        )
        threads = num_threads or max(1, limits.default_threads().value // num_on_node)
        facts = kernel_facts()
        self._port_file = Path(tempfile.gettempdir()) / port_name
        config = WorkerConfig(
            host=ray.util.get_node_ip_address(),
            port=self._last_port(),
            memory_bytes=memory,
            num_threads=threads,
            isa=facts.isa,
            block_tokens=facts.block_tokens,
            seg_tokens=facts.seg_tokens,
            token=token,
        )
        nodes, _ = find_nodes(threads)
        self._server = WorkerServer(config, MemoryBudget(memory, nodes), real_machinery())
        self._keep_port()
        threading.Thread(
            target=self._server.serve_forever, name="fastdecode worker", daemon=True
        ).start()

    def _last_port(self) -> int:
        try:
            return int(self._port_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0  # a free one

    def _keep_port(self) -> None:
        part = self._port_file.with_suffix(f".{os.getpid()}")
        part.write_text(str(self._server.address[1]))
        part.replace(self._port_file)

    def address(self) -> str:
        """Returns where engines reach it."""
        host, port = self._server.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def pid(self) -> int:
        """Returns the id of its process."""
        return os.getpid()

    def forget(self) -> None:
        """Removes what a restart would read: there will be none."""
        self._port_file.unlink(missing_ok=True)


class WorkerPool:
    """Some attention workers and the token that they share, made for this pool alone."""

    def __init__(
        self,
        count: int,
        *,
        memory_bytes: int | None = None,
        num_threads: int | None = None,
        num_cpus: float = 1.0,
    ) -> None:
        """Starts `count` workers, spread over the nodes, and waits until they listen.

        num_cpus: what each takes of a node's CPUs, in Ray's account.

        Raises:
            ConfigError: the cluster has no room for them.
        """
        self.token = secrets.token_bytes(32)
        name = secrets.token_hex(8)
        num_nodes = max(1, sum(node["Alive"] for node in ray.nodes()))
        actor = ray.remote(AttentionWorker).options(
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,  # a question to one that is starting again waits
            num_cpus=num_cpus,
            scheduling_strategy="SPREAD",
        )
        self.actors: list[Any] = [
            actor.remote(
                self.token,
                f"fastdecode-{name}-{index}.port",
                memory_bytes=memory_bytes,
                num_threads=num_threads,
                num_on_node=-(-count // num_nodes),
            )
            for index in range(count)
        ]
        self.addresses = self._wait_for_addresses(count, num_cpus)

    def _wait_for_addresses(self, count: int, num_cpus: float) -> list[str]:
        answers = [actor.address.remote() for actor in self.actors]
        ready, late = ray.wait(answers, num_returns=count, timeout=START_TIMEOUT_S)
        if late:
            self.close()
            raise ConfigError(
                f"only {len(ready)} of {count} attention workers started within "
                f"{START_TIMEOUT_S:g} s; each needs {num_cpus:g} CPUs, and the cluster has "
                f"{ray.cluster_resources().get('CPU', 0):g} in all"
            )
        return ray.get(answers)

    def close(self) -> None:
        """Ends the workers. Idempotent."""
        actors, self.actors = self.actors, []
        for actor in actors:
            # One that is dead or was never placed has nothing to forget.
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.forget.remote(), timeout=2.0)
            ray.kill(actor)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
