/* The worker's side of the data plane: receives frames of one connection, runs the attention session's
 * entry points and replies, without the GIL. Cold frames are handed to Python. Whatever bytes arrive, the
 * worst that happens is that the connection ends with a reason.
 *
 * Frames are served one after the other. Rows are read where the plane has put them, and the output is
 * written where the plane sends from; on a stream that is one buffer per slot class, and frames that the
 * engine sent ahead wait in the socket, which bounds them by itself should it ignore its credits. */
#ifndef FASTDECODE_PUMP_SERVE_H
#define FASTDECODE_PUMP_SERVE_H

#include <stdlib.h>

#include "entry.h"
#include "pump_conn.h"

enum { SERVE_END = 0, SERVE_COLD = 1, SERVE_LOST = -1 };

typedef struct {
    int armed;
    uint32_t step;
} server_table;

typedef struct {
    fd_conn conn;
    fd_attend_fn attend;
    fd_store_fn store;
    void *ctx;
    fd_sizes sizes;
    uint32_t slots[FD_CLASSES];
    server_table tables[FD_MAX_TABLES];
    char *rows;      /* [max_rows * widest row] the latency slot; NULL where the plane has slots */
    char *out;       /* [max_rows * (widest output row + 1)] output rows, then their status bytes */
    char *bulk;      /* [max_bulk] the bulk slot */
    const char *in;  /* rows of the frame being served */
    char *cold;      /* payload of a cold frame, as long as one was so far */
    size_t cold_capacity;
    uint64_t bench_bytes; /* longest message of a benchmark; 0: this is no benchmark's session */
    uint64_t bench_bad;   /* messages whose payload was not what it should be */
    _Atomic uint64_t progress; /* moves whenever a frame is begun or done with: odd in the middle of one */
    uint64_t kernel_ns, attends;
} fd_server;

static const char *serve_code_text(int code) {
    switch (code) {
    case FD_E_TABLE:
        return "the table is not armed for this step";
    case FD_E_LAYER:
        return "no such layer";
    case FD_E_ROWS:
        return "the number of rows is not the step table's";
    case FD_E_RANGE:
        return "tokens outside the range that the step allocated";
    case FD_E_CACHE_FULL:
        return "the KV-cache is full";
    case FD_E_SEQUENCE:
        return "unknown sequence";
    case FD_E_PROTOCOL:
        return "malformed request";
    default:
        return "internal error";
    }
}

static int server_reply(fd_server *s, uint16_t kind, const fd_frame *asked, int32_t status, uint64_t offset,
                        const void *first, size_t first_bytes, const void *second, size_t second_bytes) {
    fd_conn *c = &s->conn;
    conn_tx *tx = conn_queue(c, kind, asked->table, asked->step, first, first_bytes, second, second_bytes);
    tx->head.layer = asked->layer;
    tx->head.rows = asked->rows;
    tx->head.entry = asked->entry;
    tx->head.status = status;
    tx->head.offset = offset;
    return conn_send(c, 1) == 1 ? 1 : -1; /* blocking: 0 cannot happen, replies need no credit here */
}

static int server_error(fd_server *s, const fd_frame *asked, int code) {
    const char *text = serve_code_text(code);
    return server_reply(s, FD_STEP_ERROR, asked, code, 0, text, strlen(text), NULL, 0);
}

#include "bench_serve.h"

/* Checks the header against what the session allows, before anything of the payload is read. */
static int server_header(fd_server *s) {
    fd_conn *c = &s->conn;
    const fd_frame *h = &c->head;
    if (s->bench_bytes && frame_is_bench(h->kind)) return bench_header(s);
    if (!frame_from_engine(h->kind)) return conn_fail(c, CONN_PROTOCOL, "it sent a frame of kind %u", h->kind);
    int rows = h->kind == FD_ATTEND || h->kind == FD_KV_ROWS;
    if (h->table >= FD_MAX_TABLES && (rows || h->kind == FD_BEGIN_STEP))
        return conn_fail(c, CONN_PROTOCOL, "it named table %u", h->table);
    if (!rows)
        return h->nbytes <= s->sizes.max_cold
                   ? 1
                   : conn_fail(c, CONN_PROTOCOL, "a frame of kind %u holds %llu bytes, at most %llu may be",
                               h->kind, (unsigned long long)h->nbytes, (unsigned long long)s->sizes.max_cold);
    if (h->layer >= s->sizes.num_layers) return conn_fail(c, CONN_PROTOCOL, "it named layer %u", h->layer);
    if (h->kind == FD_ATTEND) {
        if (h->rows < 1 || h->rows > s->sizes.max_rows || h->nbytes != h->rows * s->sizes.row_bytes[h->layer])
            return conn_fail(c, CONN_PROTOCOL, "%u attention rows in %llu bytes", h->rows,
                             (unsigned long long)h->nbytes);
        return 1;
    }
    if (h->rows < 1 || h->nbytes > s->sizes.max_bulk || h->nbytes != (uint64_t)h->rows * 2 * s->sizes.kv_bytes[h->layer])
        return conn_fail(c, CONN_PROTOCOL, "%u K/V rows in %llu bytes", h->rows, (unsigned long long)h->nbytes);
    return 1;
}

/* Receives the payload: rows into a slot, where they stay until conn_release(), all else into s->cold. */
static int server_payload(fd_server *s) {
    fd_conn *c = &s->conn;
    int rows = c->head.kind == FD_ATTEND || c->head.kind == FD_KV_ROWS || frame_is_bench(c->head.kind);
    if (rows && !s->rows) {
        s->in = conn_view(c);
        return s->in ? 1 : conn_fail(c, CONN_PROTOCOL, "its rows lie in no slot");
    }
    s->in = c->head.kind == FD_KV_ROWS ? s->bulk : s->rows;
    if (!rows && c->head.nbytes > s->cold_capacity) {
        char *grown = realloc(s->cold, c->head.nbytes);
        if (!grown) return conn_fail(c, CONN_CLOSED, "no memory for a frame");
        s->cold = grown;
        s->cold_capacity = c->head.nbytes;
    }
    conn_expect(c, rows ? (char *)s->in : s->cold, c->head.nbytes, NULL, 0);
    return conn_payload(c, 1);
}

static int server_attend(fd_server *s, const fd_frame *h) {
    if (!s->tables[h->table].armed || s->tables[h->table].step != h->step)
        return server_error(s, h, FD_E_TABLE);
    size_t nbytes = h->rows * s->sizes.out_bytes[h->layer];
    char *out = s->out;
    if (!out && !(out = s->conn.plane->reserve(&s->conn, FD_ATTEND_REPLY, nbytes + h->rows))) return -1;
    uint64_t start = now_ns();
    int rc = s->attend(s->ctx, h->table, (int32_t)h->layer, (int32_t)h->rows, s->in, out, (uint8_t *)out + nbytes);
    uint64_t took = now_ns() - start;
    conn_release(&s->conn); /* before the reply: the engine's next rows may take the same slot */
    s->kernel_ns += took;
    s->attends++;
    if (rc) return server_error(s, h, rc);
    return server_reply(s, FD_ATTEND_REPLY, h, FD_OK, took, out, nbytes + h->rows, NULL, 0);
}

static int server_store(fd_server *s, const fd_frame *h) {
    if (!s->tables[h->table].armed || s->tables[h->table].step != h->step)
        return server_error(s, h, FD_E_TABLE);
    if (h->entry > INT32_MAX || h->offset > INT64_MAX) return server_error(s, h, FD_E_RANGE);
    uint64_t start = now_ns();
    int rc = s->store(s->ctx, h->table, (int32_t)h->layer, (int32_t)h->entry, (int64_t)h->offset, h->rows,
                      s->in, s->in + h->rows * s->sizes.kv_bytes[h->layer]);
    s->kernel_ns += now_ns() - start;
    return rc ? server_error(s, h, rc) : 1;
}

/* Tells the engine about consumed frames that no reply is due for, before it runs out of credits. */
static int server_credit(fd_server *s) {
    fd_conn *c = &s->conn;
    static const fd_frame nothing = {.table = FD_NO_TABLE};
    for (int k = 0; k < FD_CLASSES; k++) {
        uint32_t owed = c->consumed[k] - c->reported[k];
        if (owed && owed >= s->slots[k] / 2) return server_reply(s, FD_CREDIT, &nothing, FD_OK, 0, NULL, 0, NULL, 0);
    }
    return 1;
}

/* Serves frames until one is for Python (SERVE_COLD: c->head, s->cold), the peer closes between two
 * frames (SERVE_END), or the connection is lost (SERVE_LOST: c->reason). Blocks. */
static int server_run(fd_server *s) {
    fd_conn *c = &s->conn;
    if (s->progress & 1) atomic_fetch_add_explicit(&s->progress, 1, memory_order_relaxed); /* Python's frame is done */
    for (;;) {
        if (server_credit(s) < 0) return SERVE_LOST;
        if (conn_next(c, 1) < 0) return c->clean_end ? SERVE_END : SERVE_LOST;
        atomic_fetch_add_explicit(&s->progress, 1, memory_order_relaxed);
        if (server_header(s) < 0 || server_payload(s) < 0) return SERVE_LOST;
        const fd_frame head = c->head;
        c->consumed[frame_class(head.kind)]++; /* told in the next header, after the rows have been read */
        int rc;
        if (head.kind == FD_ATTEND) rc = server_attend(s, &head);
        else if (head.kind == FD_KV_ROWS) rc = server_store(s, &head);
        else if (frame_is_bench(head.kind)) rc = server_bench(s, &head);
        else return SERVE_COLD;
        conn_release(c);
        atomic_fetch_add_explicit(&s->progress, 1, memory_order_relaxed);
        if (rc < 0) return SERVE_LOST;
    }
}

#endif
