/* The worker's side of a benchmark: messages that come back, are dropped, or are asked for. Part of
 * pump_serve.h; only sessions that were opened for a benchmark get here. */
#ifndef FASTDECODE_BENCH_SERVE_H
#define FASTDECODE_BENCH_SERVE_H

#include "bench_pattern.h"

static int bench_header(fd_server *s) {
    fd_conn *c = &s->conn;
    const fd_frame *h = &c->head;
    uint64_t wanted = h->kind == FD_BENCH_READ ? h->offset : 0;
    if (h->nbytes <= s->bench_bytes && wanted <= s->bench_bytes) return 1;
    return conn_fail(c, CONN_PROTOCOL, "a benchmark's message of %llu bytes, at most %llu may be",
                     (unsigned long long)(wanted ? wanted : h->nbytes), (unsigned long long)s->bench_bytes);
}

/* `layer` says whether payloads hold the pattern of message number `entry`. A reply's status tells of this
 * message; one to a message of no bytes, which ends a stream, of all since the last one of that kind. */
static int server_bench(fd_server *s, const fd_frame *h) {
    fd_conn *c = &s->conn;
    uint64_t wrong = h->layer && h->nbytes ? bench_differs(s->in, h->nbytes, h->entry) : 0;
    int status = wrong ? FD_E_RANGE : FD_OK;
    s->bench_bad += wrong != 0;
    s->attends++;
    if (h->kind == FD_BENCH_DATA) return 1;
    size_t nbytes = h->kind == FD_BENCH_READ ? h->offset : h->nbytes;
    char *out = s->rows;
    if (!nbytes) {
        if (s->bench_bad) status = FD_E_RANGE;
        wrong = s->bench_bad;
        s->bench_bad = 0;
        return server_reply(s, FD_BENCH_REPLY, h, status, wrong, NULL, 0, NULL, 0);
    }
    if (!out) {
        if (!(out = c->plane->reserve(c, FD_BENCH_REPLY, nbytes))) return -1;
        if (h->kind == FD_BENCH_PING) memcpy(out, s->in, nbytes);
    }
    conn_release(c); /* before the reply: the next message may take the same slot */
    if (h->kind == FD_BENCH_READ && h->layer) bench_fill(out, nbytes, h->entry);
    return server_reply(s, FD_BENCH_REPLY, h, status, wrong, out, nbytes, NULL, 0);
}

#endif
