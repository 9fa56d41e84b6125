"""The data plane: `Pump` drives all workers of an engine, `FrameServer` serves one engine in a worker.

Thin: arguments are checked and unpacked here, the loops are in the headers and run without the GIL.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastdecode_rdma.config import StepCode
from fastdecode_rdma.errors import (
    FastDecodeError,
    LocalProtocolError,
    RemoteProtocolError,
    StepError,
    WorkerLostError,
)
from fastdecode_rdma.transport.base import PortTimeout, step_code

include "pump_decl.pxi"
include "pump_sizes.pxi"
include "pump_errors.pxi"
include "pump_plane.pxi"
include "pump_shm.pxi"
include "pump_server.pxi"


cdef class Pump:
    """Drives every worker of one engine. Ports are numbered in the order they were added; a worker that
    comes back gets the port that was lost under its name.

    One thread at a time, except for `mark_lost` and `stats`. After an error that aborts a step, the
    table takes a new `begin` under a new step number; what still arrives of the old one is skipped.
    """

    cdef fd_pump *pump
    cdef list names, begins, keep
    cdef dict planes
    cdef int busy
    cdef bint closing

    def __cinit__(self, sizes, *, double timeout_s):
        self.pump = <fd_pump *>calloc(1, sizeof(fd_pump))
        if self.pump == NULL:
            raise MemoryError
        self.names, self.begins, self.keep, self.planes = [], [], [], {}
        fill_sizes(&self.pump.sizes, sizes)
        self.pump.timeout_ns = <uint64_t>(timeout_s * 1e9)

    def __dealloc__(self):
        if self.pump == NULL:
            return
        for i in range(self.pump.num_ports):
            conn_close(&self.pump.ports[i].conn, 1)
            for t in range(FD_MAX_TABLES):
                free(self.pump.ports[i].tables[t].entries)
            free(self.pump.ports[i].cold)
            free(self.pump.ports[i])
        free_sizes(&self.pump.sizes)
        free(self.pump)

    def set_buffers(self, int table, *, size_t send, size_t recv, size_t status, owner):
        """Gives a table its row buffers by address; `owner` is kept alive as long as the pump."""
        self._check_table(table)
        self.pump.tables[table].send = <char *>send
        self.pump.tables[table].recv = <char *>recv
        self.pump.tables[table].status = <uint8_t *>status
        self.keep.append(owner)

    cdef fd_port *_add(self, int kind, str name, begin) except NULL:
        if self.pump.num_ports >= PUMP_MAX_PORTS:
            raise LocalProtocolError(f"a pump drives at most {PUMP_MAX_PORTS} workers")
        cdef fd_port *port = <fd_port *>calloc(1, sizeof(fd_port))
        if port == NULL:
            raise MemoryError
        port.kind = kind
        port.conn.fd = -1
        self.pump.ports[self.pump.num_ports] = port
        self.pump.num_ports += 1
        self.names.append(name)
        self.begins.append(begin)
        return port

    def add_local(self, str name, *, size_t attend, size_t store, size_t ctx, begin, owner):
        """Adds a worker in this process by the addresses of its entry points; returns the port number.

        `begin(table, step, entries)` begins a step there; `owner` is kept alive as long as the pump.
        """
        self._enter(0)
        try:
            port = self._add(PORT_LOCAL, name, begin)
        finally:
            self._leave()
        port.attend = <fd_attend_fn>attend
        port.store = <fd_store_fn>store
        port.ctx = <void *>ctx
        self.keep.append(owner)
        return self.pump.num_ports - 1

    def add_stream(self, str name, int fd, *, uint64_t epoch, uint32_t latency_slots,
                   uint32_t bulk_slots, uint64_t bulk_bytes=0, Plane plane=None):
        """Adds a connected, authenticated socket, which the pump closes; returns the port number. It is
        that of a lost connection of the same name, whose counters go on, or else a new one.
        `bulk_bytes`: longest frame of K/V rows, 0: as the pump's sizes say. `plane`: what carries the
        frames; None: the socket itself."""
        cdef fd_conn conn
        cdef fd_port *port
        if latency_slots < 1 or bulk_slots < 1:
            raise LocalProtocolError("a connection needs at least one slot of each class")
        self._enter(0)
        try:
            conn_init(&conn, fd, epoch, latency_slots, bulk_slots)
            number = self._lost_port(name)
            port = self._add(PORT_STREAM, name, None) if number < 0 else self.pump.ports[number]
            if plane is not None:
                plane.install(&conn)
            if number >= 0:
                port_renew(port)
            port_connect(port, &conn)
            port.max_bulk = bulk_bytes
            number = number if number >= 0 else self.pump.num_ports - 1
            self.planes[number] = plane
            return number
        finally:
            self._leave()

    cdef int _lost_port(self, str name):
        for number in range(self.pump.num_ports):
            if self.names[number] == name and self.is_lost(number):
                return number
        return -1

    # -- steps --------------------------------------------------------------------------------

    def begin(self, int table, uint32_t step, list assignments):
        """Begins a step: `assignments` lists (port, entries), ports at most once each, entries a
        contiguous array of config.ENTRY_DTYPE. Row ranges follow the order given. Does not wait for
        the workers' answers: the first `collect`, `store` or `wait_ready` reports a refusal.

        Raises:
            WorkerLostError, PortTimeout: of that port; the step is aborted everywhere.
            LocalProtocolError: rows beyond the buffers, a used step number, a port named twice.
        """
        self._enter(table)
        try:
            self._begin(table, step, assignments)
        finally:
            self._leave()

    cdef _begin(self, int table, uint32_t step, list assignments):
        cdef uint64_t first_row = 0, rows
        cdef Py_buffer view
        ports = [port for port, _ in assignments]
        if len(set(ports)) != len(ports):
            raise LocalProtocolError(f"a port is named twice in step {step}")
        for i in range(self.pump.num_ports):
            if i not in ports:
                pump_retire(self.pump, i, table)
        for number, entries in assignments:
            self._check_port(number)
            PyObject_GetBuffer(entries, &view, PyBUF_SIMPLE)
            try:
                if view.len % FD_ENTRY_BYTES or <uint64_t>view.len > self.pump.sizes.max_cold:
                    raise LocalProtocolError(f"{view.len} bytes are no step table")
                rows = entries_rows(view.buf, <uint32_t>(view.len // FD_ENTRY_BYTES))
                if first_row + rows > self.pump.sizes.max_rows:
                    raise LocalProtocolError(
                        f"{first_row + rows} rows in a step, at most {self.pump.sizes.max_rows} fit")
                self._begin_port(number, table, step, first_row, rows, &view)
            except BaseException:
                pump_abort(self.pump, table)
                raise
            finally:
                PyBuffer_Release(&view)
            first_row += rows
            if self.begins[number] is not None:
                self._begin_local(number, table, step, entries)

    cdef _begin_port(self, int number, int table, uint32_t step, uint64_t first_row, uint64_t rows,
                     Py_buffer *view):
        cdef int rc
        with nogil:
            rc = pump_begin(self.pump, number, table, step, <uint32_t>first_row, <uint32_t>rows,
                            view.buf, <uint32_t>(view.len // FD_ENTRY_BYTES))
        if rc:
            raise_failure(self.pump, self.names, rc)

    cdef _begin_local(self, int number, int table, uint32_t step, entries):
        """A refusal is kept for the first collect or wait, as a remote worker's would be."""
        try:
            self.begins[number](table, step, entries)
        except FastDecodeError as error:
            text = str(error).encode()[:1024]
            port_set_error(self.pump.ports[number], table, step, int(step_code(error)), text)
            return
        self.pump.ports[number].tables[table].state = STEP_ARMED

    def exchange(self, int table, uint32_t layer):
        """Sends one layer's rows to all workers of the step and receives their outputs, in one call.

        Raises:
            WorkerLostError, StepError, PortTimeout: they name the worker; the step is aborted.
            LocalProtocolError: no step is under way, or it was aborted.
        """
        self._layer(table, layer, 1, 1)

    def submit(self, int table, uint32_t layer):
        """The first half of `exchange`: sends, never waits. The rows must stay until `collect`."""
        self._layer(table, layer, 1, 0)

    def collect(self, int table, uint32_t layer):
        """The second half of `exchange`: runs the worker of this process, waits for the others."""
        self._layer(table, layer, 0, 1)

    cdef _layer(self, int table, uint32_t layer, int submit, int collect):
        cdef int rc
        self._enter(table)
        with nogil:
            rc = pump_layer(self.pump, table, layer, submit, collect)
        self._leave()
        if rc:
            raise_failure(self.pump, self.names, rc)

    def abort(self, int table):
        """Gives up the step of a table on all ports: what still comes of it is skipped. Rows that are
        on their way may not change until the table's next `begin`, which waits for them."""
        self._enter(table)
        pump_abort(self.pump, table)
        self._leave()

    def wait_ready(self, int port, int table):
        """Waits until the worker has taken the step begun last.

        Raises: as `exchange`.
        """
        cdef int rc
        self._check_port(port)
        self._enter(table)
        if not table_live(&self.pump.ports[port].tables[table]):
            self._leave()
            raise LocalProtocolError("no step is under way on this table")
        with nogil:
            rc = pump_wait(self.pump, GOAL_READY, table, port, pump_deadline(self.pump, 0))
            if rc:
                pump_abort(self.pump, table)
        self._leave()
        if rc:
            raise_failure(self.pump, self.names, rc)

    def store(self, int port, int table, uint32_t layer, uint32_t entry, uint64_t offset, size_t k,
              size_t v, uint64_t count):
        """Streams `count` K rows and V rows at addresses `k` and `v` ([count, Hkv*D] each) to one
        entry of an upload step, to positions kv_len_before + offset + i. They are sent on return.

        Raises: as `exchange`.
        """
        cdef int rc
        self._check_port(port)
        self._enter(table)
        with nogil:
            rc = pump_store(self.pump, port, table, layer, entry, offset, count, <const char *>k,
                            <const char *>v)
            if rc and rc != PUMP_MISUSE:
                pump_abort(self.pump, table)
        self._leave()
        if rc:
            raise_failure(self.pump, self.names, rc)

    # -- cold frames --------------------------------------------------------------------------

    def post(self, int port, int kind, *, payload=b""):
        """Sends one cold frame behind everything sent before; returns when it has left."""
        self._cold(port, kind, payload, 0)

    def request(self, int port, int kind, *, payload=b""):
        """Sends one cold frame and returns the payload of its reply.

        Raises:
            StepError: the worker refused it.
            WorkerLostError, PortTimeout: of that port.
        """
        self._cold(port, kind, payload, 1)
        cdef fd_port *p = self.pump.ports[port]
        data = (<bytes>p.cold[:p.cold_bytes]) if p.cold_bytes else b""
        if p.request_status:
            raise StepError(self.names[port], port, p.request_status, data.decode(errors="replace"))
        return data

    cdef _cold(self, int port, int kind, payload, int wait_reply):
        cdef Py_buffer view
        cdef int rc
        self._check_port(port)
        if self.pump.ports[port].kind == PORT_LOCAL:
            raise LocalProtocolError("a worker of this process takes no frames")
        PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
        try:
            self._enter(0)
            with nogil:
                rc = pump_cold(self.pump, port, kind, view.buf, view.len, wait_reply)
            self._leave()
        finally:
            PyBuffer_Release(&view)
        if rc:
            raise_failure(self.pump, self.names, rc)

    # -- state --------------------------------------------------------------------------------

    def mark_lost(self, int port, str reason):
        """Declares a worker dead, from any thread; a wait for it ends at once."""
        self._check_port(port)
        cdef fd_port *p = self.pump.ports[port]
        if p.kind == PORT_LOCAL or p.doomed or p.conn.lost:
            return
        text = reason.encode()[:190]
        port_doom(p, text)
        if p.conn.fd >= 0:
            shutdown(p.conn.fd, SHUT_RDWR)

    def is_lost(self, int port):
        """True once the connection broke, was closed or marked lost."""
        self._check_port(port)
        return bool(self.pump.ports[port].conn.lost or self.pump.ports[port].doomed)

    def stats(self, int port):
        """Returns the counters of one port since the start: frames, bytes, and nanoseconds.

        pump_ns: our own code; io_ns: send and receive calls; wait_ns: waiting for the worker, its
        kernel included; kernel_ns: the worker's attention, as it measured it.
        """
        self._check_port(port)
        cdef fd_port *p = self.pump.ports[port]
        return {
            "messages": p.messages,
            "bytes_sent": p.conn.bytes_sent,
            "bytes_received": p.conn.bytes_received,
            "pump_ns": p.pump_ns,
            "io_ns": p.conn.io_ns,
            "wait_ns": p.wait_ns,
            "kernel_ns": p.kernel_ns,
            "sent": (p.conn.sent[0], p.conn.sent[1]),
            "returned": (p.conn.peer_consumed[0], p.conn.peer_consumed[1]),
        }

    def kernel_ns(self, int port, int table):
        """Returns what the worker's kernel took for the layer collected last, 0 if it had no rows."""
        self._check_port(port)
        self._check_table(table)
        cdef port_table *t = &self.pump.ports[port].tables[table]
        return t.kernel_ns if t.rows else 0

    @property
    def num_ports(self):
        return self.pump.num_ports

    def close(self):
        """Ends all connections. Idempotent; a call in another thread ends with WorkerLostError."""
        self.closing = True
        for port in range(self.pump.num_ports):
            self.mark_lost(port, "the engine closed the connection")
        if not self.busy:
            self._close_sockets()

    cdef _close_sockets(self):
        cdef fd_port *p
        for i in range(self.pump.num_ports):
            p = self.pump.ports[i]
            if p.kind == PORT_STREAM and p.conn.fd >= 0:
                port_lost(p)
                conn_close(&p.conn, 1)

    cdef _check_table(self, int table):
        if not 0 <= table < FD_MAX_TABLES:
            raise LocalProtocolError(f"there are tables 0 to {FD_MAX_TABLES - 1}, not {table}")

    cdef _check_port(self, int port):
        if not 0 <= port < self.pump.num_ports:
            raise LocalProtocolError(f"there are {self.pump.num_ports} workers, no number {port}")

    cdef _enter(self, int table):
        self._check_table(table)
        if self.closing:
            raise LocalProtocolError("the pump is closed")
        if self.busy:
            raise LocalProtocolError("the pump is used by two threads at once")
        self.busy = 1

    cdef _leave(self):
        self.busy = 0
        if self.closing:
            self._close_sockets()


include "pump_bench.pxi"
