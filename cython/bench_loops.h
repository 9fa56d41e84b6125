/* The engine's side of a benchmark, below Python: ping-pong, a stream, and requests in a pipeline over one
 * connection of a pump, and one layer's exchange with all workers, each part timed.
 *
 * Waits have no deadline of their own: whoever watches from another thread marks the port lost, which wakes
 * them. */
#ifndef FASTDECODE_BENCH_LOOPS_H
#define FASTDECODE_BENCH_LOOPS_H

#include "bench_pattern.h"
#include "pump_steps.h"

enum { BENCH_RING = 4096, BENCH_WINDOWS = 8 };

typedef struct {
    uint16_t kind;       /* FD_BENCH_PING or FD_BENCH_READ */
    int check;           /* payloads hold their pattern and are compared */
    uint64_t nbytes;     /* of one message */
    uint64_t iterations; /* 0: until max_ns have passed */
    uint64_t max_ns;     /* 0: no limit */
    uint32_t depth;      /* messages under way, at most as many as there are slots */
    char *send, *recv;   /* [nbytes] */
    uint64_t *times;     /* latency: [capacity] nanoseconds of the last round trips */
    uint64_t capacity;
    /* results */
    uint64_t done, elapsed_ns;
    double peak;             /* bytes per nanosecond over a window of messages; 0: too few for one */
    uint64_t bad, bad_place; /* messages that came back changed; first wrong byte of the first, from 1 */
    /* while it runs */
    uint64_t posted[BENCH_RING]; /* when each of the last messages was handed over */
} bench_run;

static inline int bench_over(const bench_run *r, uint64_t done, uint64_t start) {
    if (r->iterations && done >= r->iterations) return 1;
    return r->max_ns && now_ns() - start >= r->max_ns;
}

static void bench_queue(fd_port *port, const bench_run *r, uint16_t kind, size_t nbytes, uint32_t number) {
    int carries = kind != FD_BENCH_READ && nbytes;
    if (r->check && carries) bench_fill(r->send, nbytes, number);
    conn_tx *tx = conn_queue(&port->conn, kind, FD_NO_TABLE, 0, r->send, carries ? nbytes : 0, NULL, 0);
    tx->head.layer = (uint32_t)r->check;
    tx->head.entry = number;
    tx->head.offset = kind == FD_BENCH_READ ? nbytes : 0;
    port->messages++;
}

/* Takes in the header in c->head: 1 a reply whose payload is due, 2 a credit, -1 lost. */
static int bench_take(fd_port *port, bench_run *r, size_t nbytes) {
    fd_conn *c = &port->conn;
    if (c->head.kind == FD_CREDIT && !c->head.nbytes) {
        conn_expect(c, NULL, 0, NULL, 0);
        return 2;
    }
    if (c->head.kind != FD_BENCH_REPLY || c->head.nbytes != nbytes)
        return conn_fail(c, CONN_PROTOCOL, "it answered a benchmark with %llu bytes of kind %u",
                         (unsigned long long)c->head.nbytes, c->head.kind);
    conn_expect(c, r->recv, nbytes, NULL, 0);
    return 1;
}

/* Counts the frame whose payload is in place. */
static void bench_took(fd_port *port, bench_run *r, size_t nbytes) {
    const fd_frame *h = &port->conn.head;
    port->conn.consumed[frame_class(h->kind)]++;
    port->messages++;
    if (h->kind != FD_BENCH_REPLY) return;
    uint64_t wrong = 0;
    if (h->status) wrong = nbytes ? h->offset : 1; /* there, or of a stream's messages this many */
    else if (r->check && nbytes) wrong = bench_differs(r->recv, nbytes, h->entry);
    if (!wrong) return;
    if (!r->bad) r->bad_place = nbytes ? wrong : 0;
    r->bad += nbytes ? 1 : h->offset;
}

/* Waits for one frame: 1 a reply, 2 a credit, -1 lost. */
static int bench_await(fd_port *port, bench_run *r, size_t nbytes) {
    fd_conn *c = &port->conn;
    if (conn_next(c, 1) < 0) return -1;
    int what = bench_take(port, r, nbytes);
    if (what < 0 || conn_payload(c, 1) < 0) return -1;
    bench_took(port, r, nbytes);
    return what;
}

/* Messages [first, done) have arrived by now: how fast were the last windows of them? */
static void bench_peak(bench_run *r, uint64_t done) {
    uint64_t window = (uint64_t)BENCH_WINDOWS * r->depth;
    if (done < window) return;
    double took = (double)(now_ns() - r->posted[(done - window) % BENCH_RING]);
    double rate = (double)window * (double)r->nbytes / took;
    if (rate > r->peak) r->peak = rate;
}

/* One message at a time, there and back. */
static int bench_latency(fd_port *port, bench_run *r) {
    uint64_t start = now_ns(), before = start;
    while (!bench_over(r, r->done, start)) {
        bench_queue(port, r, r->kind, r->nbytes, (uint32_t)r->done);
        if (r->check) before = now_ns();
        int what = conn_send(&port->conn, 1) < 0 ? -1 : 2;
        while (what == 2) what = bench_await(port, r, r->nbytes);
        if (what < 0) return -1;
        uint64_t now = now_ns();
        r->times[r->done++ % r->capacity] = now - before;
        before = now;
    }
    r->elapsed_ns = now_ns() - start;
    return 0;
}

/* Messages one way; the last word of the peer says that it has had them all. */
static int bench_stream(fd_port *port, bench_run *r) {
    fd_conn *c = &port->conn;
    uint64_t start = now_ns(), sent = 0;
    uint32_t base = c->peer_consumed[FD_LATENCY];
    while (!bench_over(r, sent, start)) {
        while (conn_in_flight(c, FD_LATENCY) >= r->depth) {
            if (bench_await(port, r, 0) != 2) return c->lost ? -1 : conn_fail(c, CONN_PROTOCOL, "it answered twice");
            bench_peak(r, c->peer_consumed[FD_LATENCY] - base);
        }
        r->posted[sent % BENCH_RING] = now_ns();
        bench_queue(port, r, FD_BENCH_DATA, r->nbytes, (uint32_t)sent++);
        if (conn_send(c, 1) < 0) return -1;
    }
    int what = 2;
    while (conn_in_flight(c, FD_LATENCY) >= c->slots[FD_LATENCY] && what == 2) what = bench_await(port, r, 0);
    if (what == 2) bench_queue(port, r, FD_BENCH_PING, 0, (uint32_t)sent);
    if (what != 2 || conn_send(c, 1) < 0) return -1;
    while (what == 2) what = bench_await(port, r, 0);
    r->done = sent;
    r->elapsed_ns = now_ns() - start;
    return what < 0 ? -1 : 0;
}

/* Takes in what has arrived of replies: how many, -1 lost. */
static int bench_drain(fd_port *port, bench_run *r) {
    fd_conn *c = &port->conn;
    int count = 0;
    do {
        if (!c->in_payload) {
            int rc = conn_next(c, 0);
            if (rc <= 0) return rc < 0 ? -1 : count;
            if (bench_take(port, r, r->nbytes) < 0) return -1;
        }
        int rc = conn_payload(c, 0);
        if (rc <= 0) return rc < 0 ? -1 : count;
        bench_took(port, r, r->nbytes);
        count += c->head.kind == FD_BENCH_REPLY;
    } while (c->plane->more(c));
    return count;
}

/* Up to `depth` messages under way, each of which comes back: both directions at once, or reads. */
static int bench_pipeline(fd_port *port, bench_run *r) {
    fd_conn *c = &port->conn;
    uint64_t start = now_ns(), sent = 0;
    for (;;) {
        int over = bench_over(r, sent, start), moved = 0;
        if (over && r->done == sent) break;
        while (!over && !conn_pending(c) && sent - r->done < r->depth && !(r->iterations && sent >= r->iterations)) {
            r->posted[sent % BENCH_RING] = now_ns();
            bench_queue(port, r, r->kind, r->nbytes, (uint32_t)sent++);
            if (conn_send(c, 0) < 0) return -1;
            moved = 1;
        }
        if (conn_pending(c) && conn_send(c, 0) < 0) return -1;
        int count = bench_drain(port, r);
        if (count < 0) return -1;
        r->done += (uint64_t)count;
        if (count) bench_peak(r, r->done);
        if (!count && !moved && !conn_spin(c))
            conn_sleep(c, (short)(POLLIN | (conn_pending(c) && !c->no_credit ? POLLOUT : 0)));
    }
    r->elapsed_ns = now_ns() - start;
    return 0;
}

/* One layer with every worker of a step's table. `arrived` and `kernel` [num_ports]: nanoseconds until the
 * reply was there, and of its kernel; 0 for a port without rows. */
static int bench_layer(fd_pump *pump, int table, uint32_t layer, uint64_t *scatter, uint64_t *total,
                       uint64_t *arrived, uint64_t *kernel) {
    uint64_t seen[PUMP_MAX_PORTS] = {0};
    for (int i = 0; i < pump->num_ports; i++) kernel[i] = pump->ports[i]->kernel_ns;
    uint64_t start = now_ns(), other = pump_other_ns(pump);
    int rc = pump_submit(pump, table, layer);
    if (rc == PUMP_OK) rc = pump_wait(pump, GOAL_SENT, table, -1, pump_deadline(pump, 0));
    *scatter = now_ns() - start;
    pump->arrived = seen; /* replies that are in by now came while others were still being sent to */
    if (rc == PUMP_OK) rc = pump_collect(pump, table, layer);
    *total = now_ns() - start;
    pump->arrived = NULL;
    pump_account(pump, table, start, other);
    for (int i = 0; i < pump->num_ports; i++) {
        int asked = pump->ports[i]->tables[table].rows != 0;
        arrived[i] = seen[i] ? seen[i] - start : asked ? *scatter : 0;
        kernel[i] = pump->ports[i]->kernel_ns - kernel[i];
    }
    return rc;
}

#endif
