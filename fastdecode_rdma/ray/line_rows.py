"""Lines of a file as rows of Ray Data, and records on their way back to the driver.

Only the driver writes the output. A task of Ray Data's write stage, on the driver's node, hands it
records through a Unix socket and waits until they are in the file; only then the stage notes them
as done in its checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray.data import Datasource
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import Datasink, ReadTask

from fastdecode_rdma.batch.job import DoneLines
from fastdecode_rdma.batch.planning import LineRange, read_range

ID_COLUMN = "line"
_WRITTEN = b"written"


class LineDatasource(Datasource):
    """The ranges of a file; a block of each: line, first (the line that had its id first), data
    (null: too long)."""

    def __init__(self, path: str, ranges: list[LineRange]) -> None:
        """path: the same on all nodes."""
        super().__init__()
        self._path = path
        self._ranges = ranges

    def estimate_inmemory_data_size(self) -> int | None:
        """Returns the bytes of all lines."""
        return sum(part.nbytes for part in self._ranges)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: object = None,
    ) -> list[ReadTask]:
        """Returns a task for each range."""
        return [
            ReadTask(
                partial(_read_block, self._path, part),
                BlockMetadata(
                    num_rows=part.num_lines,
                    size_bytes=part.nbytes,
                    input_files=None,
                    exec_stats=None,
                ),
            )
            for part in self._ranges
        ]


def _read_block(path: str, part: LineRange) -> list[Block]:
    lines = read_range(path, part)
    numbers = [line.number for line in lines]
    return [
        pa.table(
            {
                ID_COLUMN: pa.array(numbers, pa.int64()),
                "first": pa.array([part.repeats.get(n, n) for n in numbers], pa.int64()),
                "data": pa.array([line.data for line in lines], pa.large_binary()),
            }
        )
    ]


class Receiver:
    """The driver's end: takes the records that tasks of the write stage bring."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fastdecode-"))  # nobody else may look into it
        self._key = secrets.token_bytes(32)
        path = str(self._folder / "records")
        self._listener = Listener(path, "AF_UNIX", backlog=16, authkey=self._key)
        self.sink = RecordSink(path, self._key)
        self._arrived: queue.SimpleQueue[tuple[pa.Table, Connection]] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._accept, name="fastdecode records", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            # A task that dies halfway has brought nothing; the listener ends with close().
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                connection = self._listener.accept()
                data = connection.recv_bytes()
                self._arrived.put((pa.ipc.open_stream(data).read_all(), connection))
                if self._is_closed:
                    connection.close()

    def next(self, timeout_s: float) -> tuple[list[dict[str, Any]], Connection] | None:
        """Returns records, and what is to be told when they are written; None if none came."""
        try:
            table, connection = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return table.to_pylist(), connection

    def close(self) -> None:
        """Refuses what comes from now on: tasks that bring something fail. Idempotent."""
        self._is_closed = True
        self._listener.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()[1].close()
        shutil.rmtree(self._folder, ignore_errors=True)


def confirm(connection: Connection) -> None:
    """Says that the records are written."""
    with contextlib.suppress(OSError):  # who brought them may be gone
        connection.send_bytes(_WRITTEN)


class RecordSink(Datasink[int]):
    """The tasks' end. Rows have the columns that engines give: line, record, failed, tokens."""

    def __init__(self, path: str, key: bytes) -> None:
        self._path = path
        self._key = key

    @property
    def supports_distributed_writes(self) -> bool:
        """The socket is on the driver's node."""
        return False

    def write(self, blocks: Iterable[Block], ctx: object) -> int:
        """Brings rows to the driver; returns how many.

        Raises:
            ConnectionError: the driver has gone, or could not write them.
        """
        count = 0
        for block in blocks:
            table = BlockAccessor.for_block(block).to_arrow()
            count += table.num_rows
            out = pa.BufferOutputStream()
            with pa.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table)
            try:
                with Client(self._path, "AF_UNIX", authkey=self._key) as connection:
                    connection.send_bytes(out.getvalue())
                    connection.recv_bytes()
            except (OSError, EOFError) as error:
                raise ConnectionError(f"records were not taken: {error}") from error
        return count


def prepare_checkpoint(folder: Path, done: DoneLines) -> CheckpointConfig:
    """Returns Ray Data's checkpoint in `folder`, which then holds the lines that are done: the
    output is the account of them, whatever an earlier run noted there.

    Raises:
        OSError: it cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if done.count:
        folder.mkdir()
        bits = np.unpackbits(np.frombuffer(done.bits, np.uint8), bitorder="little")
        pq.write_table(pa.table({ID_COLUMN: np.flatnonzero(bits)}), folder / "output.parquet")
    return CheckpointConfig(ID_COLUMN, os.fspath(folder.absolute()))
