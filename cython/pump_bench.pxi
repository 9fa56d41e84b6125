"""Benchmarks over the connections of a pump: the loops are C, without the GIL."""

from types import SimpleNamespace

cdef extern from "bench_loops.h" nogil:
    int FD_BENCH_PING, FD_BENCH_READ
    ctypedef struct bench_run:
        uint16_t kind
        int check
        uint64_t nbytes, iterations, max_ns
        uint32_t depth
        char *send
        char *recv
        uint64_t *times
        uint64_t capacity, done, elapsed_ns
        double peak
        uint64_t bad, bad_place
    int bench_latency(fd_port *, bench_run *)
    int bench_stream(fd_port *, bench_run *)
    int bench_pipeline(fd_port *, bench_run *)
    int bench_layer(fd_pump *, int table, uint32_t layer, uint64_t *scatter, uint64_t *total,
                    uint64_t *arrived, uint64_t *kernel)


cdef int null_attend(void *ctx, int32_t table, int32_t layer, int32_t rows, const void *qkv, void *out,
                     uint8_t *status) noexcept nogil:
    memset(status, 0, rows)
    return 0


cdef int null_store(void *ctx, int32_t table, int32_t layer, int32_t entry, long long offset,
                    long long count, const void *k, const void *v) noexcept nogil:
    return 0


def null_entry():
    """Returns entry points (base.NativeEntry) of a session without a kernel: replies hold whatever
    lies in their buffers."""
    return SimpleNamespace(attend_addr=<size_t>&null_attend, store_addr=<size_t>&null_store, ctx_addr=0)


def stream_fd(Pump pump, int port):
    """Returns the descriptor of a port's socket, which stays the pump's; -1 when it is closed."""
    pump._check_port(port)
    return pump.pump.ports[port].conn.fd


def set_spin_ns(Pump pump, int port, uint64_t spin_ns):
    """Sets how long our end looks for news before it sleeps."""
    pump._check_port(port)
    pump.pump.ports[port].conn.spin_ns = spin_ns


def bench_port(Pump pump, int port, *, str mode, uint64_t nbytes, uint64_t iterations, size_t send,
               size_t recv, uint64_t[::1] times, uint64_t max_ns=0, uint32_t depth=1, bint check=False):
    """Runs one measurement over a port of a benchmark's session; returns a dict.

    mode: "ping" and "read" (one message at a time, `times` takes the nanoseconds of the last round
    trips), "stream" (one way), "pingpong" and "reads" (up to `depth` under way, each comes back).
    `send`, `recv`: addresses of buffers of `nbytes`. iterations 0: until max_ns have passed.

    Raises:
        WorkerLostError: the connection broke, or was marked lost.
    """
    cdef bench_run *run = <bench_run *>calloc(1, sizeof(bench_run))
    cdef fd_port *p
    cdef int rc
    if run == NULL:
        raise MemoryError
    try:
        pump._check_port(port)
        p = pump.pump.ports[port]
        if iterations == 0 and max_ns == 0:
            raise LocalProtocolError("a benchmark needs a number of messages or a time")
        if not 1 <= depth <= min(p.conn.slots[FD_LATENCY], 256):
            raise LocalProtocolError(f"a depth of {depth}, the worker has {p.conn.slots[FD_LATENCY]} slots")
        run.kind = FD_BENCH_READ if mode in ("read", "reads") else FD_BENCH_PING
        run.check, run.nbytes, run.iterations, run.max_ns, run.depth = check, nbytes, iterations, max_ns, depth
        run.send, run.recv = <char *>send, <char *>recv
        run.times, run.capacity = &times[0], times.shape[0]
        latency, stream = mode in ("ping", "read"), mode == "stream"
        if not latency and not stream and mode not in ("pingpong", "reads"):
            raise LocalProtocolError(f"no benchmark {mode!r}")
        pump._enter(0)
        if latency:
            with nogil:
                rc = bench_latency(p, run)
        elif stream:
            with nogil:
                rc = bench_stream(p, run)
        else:
            with nogil:
                rc = bench_pipeline(p, run)
        pump._leave()
        if rc < 0:
            port_lost(p)
            pump.pump.fail_port = port
            raise_failure(pump.pump, pump.names, PUMP_LOST)
        return {
            "done": run.done, "elapsed_ns": run.elapsed_ns, "peak_bytes_per_ns": run.peak,
            "bad": run.bad, "bad_place": run.bad_place,
        }
    finally:
        free(run)


def bench_exchange(Pump pump, int table, uint32_t layer, uint64_t[:, ::1] out):
    """Runs `exchange` once per row of `out`, each part timed, in nanoseconds: until all rows have
    left, until all replies are in, then [num_ports] until each reply was in, and [num_ports] of each
    kernel.

    Raises: as `exchange`.
    """
    cdef int rc = PUMP_OK
    cdef Py_ssize_t i, ports = pump.pump.num_ports
    if out.shape[1] != 2 + 2 * ports:
        raise LocalProtocolError(f"{2 + 2 * ports} figures per exchange, not {out.shape[1]}")
    pump._enter(table)
    with nogil:
        for i in range(out.shape[0]):
            rc = bench_layer(pump.pump, table, layer, &out[i, 0], &out[i, 1], &out[i, 2], &out[i, 2 + ports])
            if rc:
                break
    pump._leave()
    if rc:
        raise_failure(pump.pump, pump.names, rc)
