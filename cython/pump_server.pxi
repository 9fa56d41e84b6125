"""The worker's half of the pump."""

from fastdecode_rdma.errors import TransportError
from fastdecode_rdma.wire.frame import Frame

cdef extern from "pump_serve.h" nogil:
    int SERVE_END, SERVE_COLD, SERVE_LOST
    ctypedef struct server_table:
        int armed
        uint32_t step
    ctypedef struct fd_server:
        fd_conn conn
        fd_attend_fn attend
        fd_store_fn store
        void *ctx
        fd_sizes sizes
        uint32_t slots[2]
        server_table tables[8]
        char *rows
        char *out
        char *bulk
        char *cold
        uint64_t bench_bytes, progress, kernel_ns, attends
    int server_run(fd_server *)
    int server_reply(fd_server *, uint16_t kind, const fd_frame *asked, int32_t status, uint64_t offset,
                     const void *first, size_t first_bytes, const void *second, size_t second_bytes)


cdef int attend_nothing(void *ctx, int32_t table, int32_t layer, int32_t num_rows, const void *qkv,
                        void *out, uint8_t *row_status) noexcept nogil:
    return 0


cdef int store_nothing(void *ctx, int32_t table, int32_t layer, int32_t entry, long long offset,
                       long long count, const void *k, const void *v) noexcept nogil:
    return 0


NULL_ATTEND = <size_t>&attend_nothing
"""Entry points that do nothing, for peers that only measure the wire (`attend`, `store`)."""
NULL_STORE = <size_t>&store_nothing


cdef class FrameServer:
    """Serves the frames of one engine in this worker, on one thread; `progress` may be read by others.

    `fd` stays the caller's: to end `run` from another thread, shut the socket down. Fixed buffers for
    the largest frames are allocated here, where the plane has no slots, and freed with the object.
    `plane`: what carries the frames (Plane); None: the socket itself. `bench`: a benchmark's messages
    are served too, as long as the largest frame of rows.
    """

    cdef fd_server *server
    cdef object owner
    cdef Plane plane

    def __cinit__(self, int fd, sizes, *, uint64_t epoch, uint32_t latency_slots,
                  uint32_t bulk_slots, size_t attend, size_t store, size_t ctx, owner=None,
                  Plane plane=None, bint bench=False):
        self.server = <fd_server *>calloc(1, sizeof(fd_server))
        if self.server == NULL:
            raise MemoryError
        cdef fd_server *s = self.server
        fill_sizes(&s.sizes, sizes)
        conn_init(&s.conn, fd, epoch, 0, 0)
        s.slots[FD_LATENCY], s.slots[FD_BULK] = latency_slots, bulk_slots
        s.attend = <fd_attend_fn>attend
        s.store = <fd_store_fn>store
        s.ctx = <void *>ctx
        self.owner = owner
        self.plane = plane
        if bench:
            s.bench_bytes = sizes.max_rows * max(sizes.row_bytes)
        if plane is not None:
            plane.install(&s.conn)
        if s.conn.plane.view != NULL:
            return
        s.rows = <char *>calloc(sizes.max_rows, max(sizes.row_bytes))
        s.out = <char *>calloc(sizes.max_rows, max(sizes.out_bytes) + 1)
        s.bulk = <char *>calloc(sizes.max_bulk_bytes, 1)
        if s.rows == NULL or s.out == NULL or s.bulk == NULL:
            raise MemoryError("no memory for the frame buffers of a session")

    def __dealloc__(self):
        if self.server == NULL:
            return
        conn_close(&self.server.conn, 0)
        free_sizes(&self.server.sizes)
        free(self.server.rows)
        free(self.server.out)
        free(self.server.bulk)
        free(self.server.cold)
        free(self.server)

    def run(self):
        """Serves until a frame needs Python: returns (Frame, payload), or None when the engine has
        closed the connection.

        Raises:
            RemoteProtocolError: the engine broke the protocol.
            TransportError: the connection broke.
        """
        cdef int rc
        cdef fd_server *s = self.server
        with nogil:
            rc = server_run(s)
        if rc == SERVE_END:
            return None
        if rc == SERVE_LOST:
            reason = s.conn.reason.decode(errors="replace")
            if s.conn.lost == CONN_PROTOCOL:
                raise RemoteProtocolError(f"the engine broke the protocol: {reason}")
            raise TransportError(f"the connection to the engine broke: {reason}",
                                 s.conn.lost_errno or None)
        payload = (<bytes>s.cold[:s.conn.head.nbytes]) if s.conn.head.nbytes else b""
        return Frame.decode((<const char *>&s.conn.head)[:sizeof(fd_frame)]), payload

    def arm(self, int table, uint32_t step):
        """Lets ATTEND and KV_ROWS of this step through."""
        self.server.tables[table].armed = 1
        self.server.tables[table].step = step

    def disarm(self, int table):
        """Refuses ATTEND and KV_ROWS on this table until it is armed again."""
        self.server.tables[table].armed = 0

    def reply(self, int kind, *, int status=0, payload=b""):
        """Answers the frame that `run` returned last. Blocks until the reply is in the socket.

        Raises:
            TransportError: the connection broke.
        """
        cdef Py_buffer view
        cdef int rc
        cdef fd_frame asked = self.server.conn.head
        PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
        try:
            asked.rows = 0
            with nogil:
                rc = server_reply(self.server, kind, &asked, status, 0, view.buf, view.len, NULL, 0)
        finally:
            PyBuffer_Release(&view)
        if rc < 0:
            reason = self.server.conn.reason.decode(errors="replace")
            raise TransportError(f"the connection to the engine broke: {reason}",
                                 self.server.conn.lost_errno or None)

    @property
    def progress(self):
        """A counter that moves whenever a frame is begun or done with: odd in the middle of one."""
        return self.server.progress

    @property
    def credits(self):
        """(consumed, told the engine) per class, latency first."""
        cdef fd_conn *c = &self.server.conn
        return (c.consumed[0], c.reported[0]), (c.consumed[1], c.reported[1])

    def stats(self):
        """Returns frames, bytes and nanoseconds since the start."""
        cdef fd_server *s = self.server
        return {
            "frames_received": s.conn.frames_received,
            "frames_sent": s.conn.frames_sent,
            "bytes_received": s.conn.bytes_received,
            "bytes_sent": s.conn.bytes_sent,
            "kernel_ns": s.kernel_ns,
            "attends": s.attends,
        }
