"""The RDMA plane over any queue pair: one of `_verbs` (C), or a Python object of the same calls."""

from libc.errno cimport EIO
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import logging

from fastdecode_rdma.errors import LocalProtocolError
from fastdecode_rdma.transport._pump import Plane

cdef extern from "poll.h" nogil:
    ctypedef struct pollfd:
        pass

cdef extern from "rdma_queue.h" nogil:
    int RDMA_RECEIVED, RDMA_SENT
    ctypedef struct rdma_event:
        int kind, status
        uint32_t imm, nbytes, count
    ctypedef struct rdma_queue_ops:
        int (*write)(void *, uint32_t, uint32_t, uint32_t, uint32_t) noexcept nogil
        int (*receive)(void *, uint32_t) noexcept nogil
        int (*poll)(void *, rdma_event *, int) noexcept nogil
        int (*arm)(void *) noexcept nogil
        void (*disarm)(void *) noexcept nogil
        void (*explain)(void *, int, char *, size_t) noexcept nogil
        void (*close)(void *) noexcept nogil
    void rdma_explain(int status, const char *route, char *text, size_t capacity)

cdef extern from "rdma_plane.h" nogil:
    int RDMA_MAX_SLOTS, RDMA_SPARE, RDMA_CHUNK_HEAD
    ctypedef struct conn_tx:
        pass
    ctypedef struct fd_conn:
        void *state
    ctypedef struct fd_plane:
        const char *name
        int (*room)(fd_conn *, const conn_tx *, int) noexcept nogil
        int (*send)(fd_conn *, conn_tx *, int) noexcept nogil
        int (*header)(fd_conn *, int) noexcept nogil
        int (*payload)(fd_conn *, int) noexcept nogil
        int (*more)(fd_conn *) noexcept nogil
        int (*arm)(fd_conn *, short, pollfd *) noexcept nogil
        void (*disarm)(fd_conn *) noexcept nogil
        void (*close)(fd_conn *) noexcept nogil
    ctypedef struct rdma_plane:
        const rdma_queue_ops *ops
        void *queue
        int fd
        uint32_t num_slots, slot_bytes, depth, signal_every
        char *out
        const char *into "in"
        uint32_t tx_chunks, tx_credited, posted, completed
        uint32_t rx_chunks, rx_consumed, rx_told
    int rdma_room(fd_conn *, const conn_tx *, int) noexcept
    int rdma_send(fd_conn *, conn_tx *, int) noexcept
    int rdma_header(fd_conn *, int) noexcept
    int rdma_payload(fd_conn *, int) noexcept
    int rdma_more(fd_conn *) noexcept
    int rdma_arm(fd_conn *, short, pollfd *) noexcept
    void rdma_disarm(fd_conn *) noexcept
    void rdma_flush(fd_conn *) noexcept

logger = logging.getLogger(__name__)

MAX_SLOTS = RDMA_MAX_SLOTS
SPARE_RECEIVES = RDMA_SPARE
"""Receives to post besides one per slot before the peer may write."""

CHUNK_HEAD_BYTES = RDMA_CHUNK_HEAD
RECEIVED, SENT = RDMA_RECEIVED, RDMA_SENT
"""Kinds of completions."""


def explain_status(int status, str route):
    """Returns what the status of a failed completion means, for people."""
    cdef char text[200]
    rdma_explain(status, route.encode(), text, sizeof(text))
    return text.decode(errors="replace")


# ---- a queue pair that is a Python object: the pump's thread takes the interpreter's lock ----

cdef int failed(object queue, object error) noexcept:
    """An exception as an errno; its words are kept for the log."""
    logger.warning("RDMA through %s failed: %s", type(queue).__name__, error)
    return getattr(error, "errno", None) or EIO


cdef int object_write(void *queue, uint32_t slot, uint32_t nbytes, uint32_t imm,
                      uint32_t count) noexcept with gil:
    try:
        (<object>queue).write(slot, nbytes, imm, count)
        return 0
    except Exception as error:
        return failed(<object>queue, error)


cdef int object_receive(void *queue, uint32_t count) noexcept with gil:
    try:
        (<object>queue).receive(count)
        return 0
    except Exception as error:
        return failed(<object>queue, error)


cdef int object_poll(void *queue, rdma_event *events, int limit) noexcept with gil:
    cdef int filled = 0
    try:
        for kind, status, imm, nbytes, count in (<object>queue).poll(limit):
            events[filled].kind, events[filled].status = kind, status
            events[filled].imm, events[filled].nbytes, events[filled].count = imm, nbytes, count
            filled += 1
        return filled
    except Exception as error:
        return -failed(<object>queue, error)


cdef int object_arm(void *queue) noexcept with gil:
    try:
        (<object>queue).arm()
        return 0
    except Exception as error:
        return failed(<object>queue, error)


cdef void object_disarm(void *queue) noexcept with gil:
    try:
        (<object>queue).disarm()
    except Exception as error:
        failed(<object>queue, error)


cdef void object_explain(void *queue, int status, char *text, size_t capacity) noexcept with gil:
    try:
        said = (<object>queue).explain(status).encode()[:capacity - 1]
        memcpy(text, <const char *>said, len(said))
        text[len(said)] = 0
    except Exception as error:
        failed(<object>queue, error)


cdef void object_close(void *queue) noexcept with gil:
    try:
        (<object>queue).close()
    except Exception as error:
        failed(<object>queue, error)


cdef rdma_queue_ops OBJECT_OPS
OBJECT_OPS.write = object_write
OBJECT_OPS.receive = object_receive
OBJECT_OPS.poll = object_poll
OBJECT_OPS.arm = object_arm
OBJECT_OPS.disarm = object_disarm
OBJECT_OPS.explain = object_explain
OBJECT_OPS.close = object_close


# ---- the plane ----

cdef dict owners = {}  # address of a state -> its SlotPlane, kept alive from plane() to close


cdef void plane_close(fd_conn *conn) noexcept nogil:
    cdef rdma_plane *p = <rdma_plane *>conn.state
    if p == NULL:
        return
    rdma_flush(conn)
    conn.state = NULL
    p.ops.close(p.queue)
    with gil:
        owners.pop(<size_t>p, None)  # frees p with its owner


cdef fd_plane PLANE
PLANE.name = "rdma"
PLANE.room = rdma_room
PLANE.send = rdma_send
PLANE.header = rdma_header
PLANE.payload = rdma_payload
PLANE.more = rdma_more
PLANE.arm = rdma_arm
PLANE.disarm = rdma_disarm
PLANE.close = plane_close


cdef class SlotPlane:
    """The state of one connection's plane: slots in registered memory and a connected queue pair.

    `queue` has `native`, the addresses of an rdma_queue_ops table (cython/rdma_queue.h) and of what
    its calls take, or is a Python object with those calls itself. `send` and `recv` are the addresses
    of the slots of each direction; `depth` writes may be under way, one of
    `signal_every` is reported done (at least a quarter of `depth`, as is usual). `num_slots + SPARE_RECEIVES`
    receives have been posted. The queue is closed with the connection, `memory` is kept that long.
    """

    cdef rdma_plane *state
    cdef readonly object queue
    cdef object memory
    cdef bint taken

    def __cinit__(self, queue, *, size_t send, size_t recv, uint32_t num_slots,
                  uint32_t slot_bytes, uint32_t depth, memory, uint32_t signal_every=0):
        if not (2 <= num_slots <= RDMA_MAX_SLOTS) or num_slots & (num_slots - 1):
            raise LocalProtocolError(f"{num_slots} slots: a power of two up to {MAX_SLOTS} is needed")
        if depth < 2 * num_slots + 16:
            raise LocalProtocolError(f"{num_slots} slots need more than {depth} writes under way")
        self.state = <rdma_plane *>calloc(1, sizeof(rdma_plane))
        if self.state == NULL:
            raise MemoryError
        self.queue, self.memory = queue, memory
        cdef rdma_plane *p = self.state
        cdef size_t ops, own
        native = getattr(queue, "native", None)
        if native is None:
            p.ops, p.queue = &OBJECT_OPS, <void *>queue
        else:
            ops, own = native
            p.ops, p.queue = <const rdma_queue_ops *>ops, <void *>own
        p.fd = queue.fd
        p.num_slots, p.slot_bytes, p.depth = num_slots, slot_bytes, depth
        p.signal_every = min(signal_every or depth // 4, depth // 4)
        p.out, p.into = <char *>send, <const char *>recv

    def __dealloc__(self):
        free(self.state)

    def plane(self, *, uint64_t spin_ns=0):
        """Returns the plane for one `Pump.add_stream` or `FrameServer`, which must follow."""
        if self.taken:
            raise LocalProtocolError("a queue pair serves one connection")
        self.taken = True
        owners[<size_t>self.state] = self
        return Plane(table=<size_t>&PLANE, state=<size_t>self.state, conn_bytes=sizeof(fd_conn),
                     spin_ns=spin_ns, owner=self)

    @property
    def running(self):
        """Whether a connection has been promised the plane, and has not closed it."""
        return <size_t>self.state in owners

    def stats(self):
        """Returns chunks and writes since the start; callable from any thread."""
        cdef rdma_plane *p = self.state
        return {
            "chunks_sent": p.tx_chunks,
            "chunks_credited": p.tx_credited,
            "chunks_received": p.rx_chunks,
            "chunks_consumed": p.rx_consumed,
            "writes": p.posted,
        }
