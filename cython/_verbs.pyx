"""Queue pairs over libibverbs' own headers: what the RDMA plane drives without the interpreter.

Optional: built where infiniband/verbs.h is found. transport/rdma.py does the same through pyverbs.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, strncpy

import os

cdef extern from "rdma_queue.h" nogil:
    ctypedef struct rdma_queue_ops:
        pass
    ctypedef struct rdma_event:
        int kind, status
        uint32_t imm, nbytes, count

cdef extern from "verbs_queue.h" nogil:
    int VERBS_ROUTE
    enum ibv_mtu:
        pass
    enum ibv_port_state:
        pass
    struct ibv_context:
        pass
    struct ibv_device_attr:
        uint64_t max_mr_size
        int max_qp_wr, max_cqe, max_mr, max_qp, max_qp_rd_atom
    struct ibv_port_attr:
        ibv_mtu active_mtu
        ibv_port_state state
        uint16_t lid
    struct ibv_mr:
        uint32_t rkey
    struct ibv_qp:
        uint32_t qp_num
    struct ibv_comp_channel:
        int fd
    ctypedef struct verbs_queue:
        ibv_context *context
        ibv_mr *mr
        ibv_qp *qp
        ibv_comp_channel *channel
        char *slots
        uint32_t slot_bytes, max_inline
        uint8_t reads
        char route[192]
    ctypedef struct verbs_route:
        uint32_t dest_qp, rq_psn, sq_psn, rkey
        uint64_t remote
        uint8_t gid[16]
        int is_global, gid_index, lid, port, mtu, sl, tclass, timeout, retry, pkey_index
    const rdma_queue_ops VERBS_OPS
    int ibv_query_device(ibv_context *, ibv_device_attr *)
    int ibv_query_port(ibv_context *, uint8_t, ibv_port_attr *)
    int verbs_open(verbs_queue *, const char *, const char **)
    int verbs_make(verbs_queue *, void *, size_t, uint32_t, uint32_t, uint32_t, const char **)
    int verbs_connect(verbs_queue *, const verbs_route *, uint32_t, const char **)
    int verbs_write(void *, uint32_t, uint32_t, uint32_t, uint32_t)
    int verbs_receive(void *, uint32_t)
    int verbs_poll(void *, rdma_event *, int)
    void verbs_explain(void *, int, char *, size_t)
    void verbs_close(void *)


cdef fail(int error, const char *doing):
    raise OSError(error, f"{doing.decode()}: {os.strerror(error)}")


cdef class VerbsQueue:
    """A queue pair on one port of a device, over memory that it registers and the caller keeps.

    `slots` is the address of the slots that it writes from. OSError says what failed, with errno.
    """

    cdef verbs_queue *q
    cdef uint32_t receives

    def __cinit__(self, str device):
        cdef const char *doing = ""
        self.q = <verbs_queue *>calloc(1, sizeof(verbs_queue))
        if self.q == NULL:
            raise MemoryError
        name = device.encode()
        error = verbs_open(self.q, name, &doing)
        if error:
            fail(error, doing)

    def __dealloc__(self):
        if self.q != NULL:
            verbs_close(self.q)
            free(self.q)

    def limits(self):
        """Returns what the device allows: bytes of a registration, and numbers of things."""
        cdef ibv_device_attr found
        error = ibv_query_device(self.q.context, &found)
        if error:
            fail(error, "asking the RDMA device for its limits")
        return {"max_mr_size": found.max_mr_size, "max_qp_wr": found.max_qp_wr,
                "max_cqe": found.max_cqe, "max_mr": found.max_mr, "max_qp": found.max_qp}

    def active_mtu(self, int port):
        """Returns the code of the port's MTU: 1 for 256 bytes, up to 5 for 4096."""
        cdef ibv_port_attr found
        error = ibv_query_port(self.q.context, <uint8_t>port, &found)
        if error:
            fail(error, f"asking port {port} of the RDMA device".encode())
        return <int>found.active_mtu

    def make(self, *, size_t memory, size_t nbytes, size_t slots, uint32_t slot_bytes,
             uint32_t depth, uint32_t receives, uint32_t max_inline, uint8_t reads=0):
        """Registers the memory and makes the queues. `reads`: that may be under way at once, as far
        as the device allows; a queue pair with any is a benchmark's, which posts its receives."""
        cdef const char *doing = ""
        cdef ibv_device_attr found
        if reads:
            error = ibv_query_device(self.q.context, &found)
            if error:
                fail(error, "asking the RDMA device for its limits")
            self.q.reads = max(1, min(reads, found.max_qp_rd_atom))
        self.q.slots, self.q.slot_bytes = <char *>slots, slot_bytes
        self.receives = receives
        error = verbs_make(self.q, <void *>memory, nbytes, depth, receives, max_inline, &doing)
        if error:
            fail(error, doing)

    def connect(self, *, int port, uint32_t dest_qp, uint32_t rq_psn, uint32_t sq_psn,
                uint32_t rkey, uint64_t remote, bytes gid, bint is_global, int gid_index, int lid,
                int mtu, int sl, int tclass, int timeout, int retry, int pkey_index, str route):
        """Brings the queue pair to where it sends and receives."""
        cdef const char *doing = ""
        cdef verbs_route r
        r.port, r.dest_qp, r.rq_psn, r.sq_psn = port, dest_qp, rq_psn, sq_psn
        r.rkey, r.remote = rkey, remote
        memcpy(r.gid, <const char *>gid, 16)
        r.is_global, r.gid_index, r.lid, r.mtu = is_global, gid_index, lid, mtu
        r.sl, r.tclass, r.timeout, r.retry = sl, tclass, timeout, retry
        r.pkey_index = pkey_index
        text = route.encode()[:VERBS_ROUTE - 1]
        strncpy(self.q.route, <const char *>text, VERBS_ROUTE - 1)
        error = verbs_connect(self.q, &r, self.receives, &doing)
        if error:
            fail(error, doing)

    # What the plane calls in C, for setting up.

    def write(self, uint32_t slot, uint32_t nbytes, uint32_t imm, uint32_t count):
        """Writes the beginning of a slot to the peer's; `count` != 0 is reported when done."""
        error = verbs_write(self.q, slot, nbytes, imm, count)
        if error:
            fail(error, "posting a write")

    def receive(self, uint32_t count):
        """Posts `count` more empty receives."""
        error = verbs_receive(self.q, count)
        if error:
            fail(error, "posting receives")

    def poll(self, int limit):
        """Takes completions: (kind, status, imm, nbytes, count)."""
        cdef rdma_event events[16]
        found = verbs_poll(self.q, events, min(limit, 16))
        if found < 0:
            fail(-found, "polling")
        return [(events[i].kind, events[i].status, events[i].imm, events[i].nbytes, events[i].count)
                for i in range(found)]

    def explain(self, int status):
        """Returns what the status of a failed completion means."""
        cdef char text[320]
        verbs_explain(self.q, status, text, sizeof(text))
        return text.decode(errors="replace")

    @property
    def native(self):
        """Addresses of the queue's calls and of what they take."""
        return <size_t>&VERBS_OPS, <size_t>self.q

    @property
    def fd(self):
        return self.q.channel.fd

    @property
    def qp_num(self):
        return self.q.qp.qp_num

    @property
    def rkey(self):
        return self.q.mr.rkey

    @property
    def max_inline(self):
        return self.q.max_inline

    def close(self):
        """Ends the queue pair, then the registration. Idempotent."""
        verbs_close(self.q)


include "verbs_bench.pxi"
