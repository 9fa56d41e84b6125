"""Benchmarks of a bare queue pair, in perftest's ways: the loops are C, without the GIL."""

cdef extern from "verbs_bench.h" nogil:
    int VERBS_BENCH_WRITE, VERBS_BENCH_SEND, VERBS_BENCH_READ, VERBS_LIST
    ctypedef struct verbs_bench:
        verbs_queue *q
        char *into "in"
        int kind, posts, answers, both, events, stopped, status
        uint64_t nbytes, iterations, max_ns, idle_ns, capacity, done, received, elapsed_ns
        uint32_t depth, list, cq_mod, receives, num_receives
        uint64_t *times
        double peak
        uint64_t posted, completed, base, signalled, moved_ns
    uint64_t now_ns()
    int verbs_bench_replenish(verbs_bench *)
    int verbs_bench_poll(verbs_bench *)
    int verbs_bench_latency(verbs_bench *)
    int verbs_bench_stream(verbs_bench *)

BENCH_KINDS = {"write": VERBS_BENCH_WRITE, "send": VERBS_BENCH_SEND, "read": VERBS_BENCH_READ}
MAX_POST_LIST = VERBS_LIST


cdef class VerbsBench:
    """One end of a benchmark over a connected VerbsQueue that was made with `reads`. One run at a
    time; `stop` and `progress` are for other threads."""

    cdef verbs_bench *b
    cdef VerbsQueue queue

    def __cinit__(self, VerbsQueue queue, *, size_t into, uint32_t receives):
        self.queue = queue
        self.b = <verbs_bench *>calloc(1, sizeof(verbs_bench))
        if self.b == NULL:
            raise MemoryError
        self.b.q, self.b.into, self.b.num_receives, self.b.cq_mod = queue.q, <char *>into, receives, 1

    def __dealloc__(self):
        free(self.b)

    def prepare(self, *, str kind, bint posts, bint answers, bint both, bint events,
                uint64_t nbytes, uint64_t iterations, uint64_t max_ns, uint64_t idle_ns,
                uint32_t depth, uint32_t list, uint32_t cq_mod):
        """Sets the next run up and posts its receives; the peer may begin when both ends have."""
        cdef verbs_bench *b = self.b
        if not (1 <= nbytes <= b.q.slot_bytes and 1 <= list <= min(depth, VERBS_LIST) and 1 <= cq_mod <= depth):
            raise OSError(22, f"a benchmark of {nbytes} bytes, {depth} under way, {list} at once, {cq_mod} a report")
        b.kind = BENCH_KINDS[kind]
        b.posts, b.answers, b.both, b.events = posts, answers, both, events
        b.nbytes, b.iterations = nbytes, iterations
        b.max_ns, b.idle_ns, b.depth, b.list, b.cq_mod = max_ns, idle_ns, depth, list, cq_mod
        rc = verbs_bench_replenish(b) or verbs_bench_poll(b)  # what a run before has left
        while rc > 0:
            rc = verbs_bench_poll(b)
        b.stopped = b.status = b.done = b.received = b.elapsed_ns = 0
        b.peak, b.base = 0, b.posted
        self._check(rc)

    def run(self, uint64_t[::1] times, *, bint latency):
        """Runs what was prepared; `times` takes the nanoseconds of the last round trips. Returns
        (messages, nanoseconds, peak in bytes per nanosecond).

        Raises:
            OSError: a message failed, nothing came in time, or it was stopped.
        """
        cdef int rc
        self.b.times, self.b.capacity = &times[0], times.shape[0]
        with nogil:
            self.b.moved_ns = now_ns()
            rc = verbs_bench_latency(self.b) if latency else verbs_bench_stream(self.b)
        self.b.times = NULL
        self._check(rc)
        return self.b.done, self.b.elapsed_ns, self.b.peak

    def _check(self, int rc):
        if self.b.status:
            raise OSError(-rc, self.queue.explain(self.b.status))
        if rc < 0:
            fail(-rc, b"a benchmark of RDMA messages")

    def stop(self):
        """Ends what runs, from any thread."""
        self.b.stopped = 1

    @property
    def progress(self):
        """Moves whenever messages do."""
        return self.b.posted + self.b.received + self.b.completed
