/* The engine's side of the data plane: ports (a worker in this process, or a connection), step tables, and
 * what arrives from the workers. Runs without the GIL; no allocation per message. One thread at a time; only
 * `doomed` may be set from another. */
#ifndef FASTDECODE_PUMP_ENGINE_H
#define FASTDECODE_PUMP_ENGINE_H

#include <stdlib.h>

#include "entry.h"
#include "pump_conn.h"

enum { PUMP_MAX_PORTS = 256, PUMP_ABORTED = 8, PUMP_NS_PER_BYTE = 100 };
enum { PORT_LOCAL = 1, PORT_STREAM = 2 };
enum { PUMP_OK = 0, PUMP_LOST = 1, PUMP_STEP = 2, PUMP_TIMEOUT = 3, PUMP_MISUSE = 4 };
/* ABORTED: given up, the engine must begin anew. RETIRED: a later step of the table leaves this port out. */
enum { STEP_NONE = 0, STEP_SENT = 1, STEP_ARMED = 2, STEP_ABORTED = 3, STEP_RETIRED = 4 };

/* One port's share of a step table. */
typedef struct {
    int state;
    int submitted;   /* an ATTEND that was not collected yet */
    int outstanding; /* its reply is not in yet */
    uint32_t step, layer, first_row, rows, num_entries;
    uint32_t aborted[PUMP_ABORTED]; /* steps given up: their late errors are nobody's business */
    uint32_t num_aborted;
    uint64_t kernel_ns; /* of the layer that came back last */
    void *entries; /* payload of BEGIN_STEP, kept until it is sent */
    size_t entries_capacity;
} port_table;

typedef struct {
    int set;
    uint16_t table;
    uint32_t step;
    int32_t code;
    char text[FD_TEXT_BYTES + 1];
} port_error;

typedef struct {
    int kind;
    uint64_t max_bulk; /* K/V rows of one frame; 0: as long as any may be */
    fd_conn conn;
    fd_attend_fn attend;
    fd_store_fn store;
    void *ctx;
    port_table tables[FD_MAX_TABLES];
    port_error error;    /* reported by the worker, not yet by us */
    port_error incoming; /* text being received */
    uint32_t request;    /* number of the cold request under way */
    int request_done;
    int32_t request_status;
    char *cold; /* payload of its reply */
    size_t cold_capacity, cold_bytes;
    _Atomic int doomed; /* set by the heartbeat thread once doom_reason is written */
    char doom_reason[CONN_REASON];
    uint64_t messages, kernel_ns, wait_ns, pump_ns;
    uint64_t store_ns; /* K/V rows into a worker of this process; others store while nobody waits */
} fd_port;

typedef struct {
    char *send;
    char *recv;
    uint8_t *status; /* NULL buffers: the table carries uploads only */
} pump_table;

typedef struct {
    fd_port *ports[PUMP_MAX_PORTS];
    int num_ports;
    fd_sizes sizes;
    pump_table tables[FD_MAX_TABLES];
    uint64_t timeout_ns;
    uint64_t wait_ns; /* spinning and in poll, all calls together */
    uint64_t *arrived; /* [PUMP_MAX_PORTS] when each port met the goal of a wait; NULL: nobody asks */
    int fail_port;
    const char *fail_text; /* of PUMP_MISUSE */
} fd_pump;

static inline int table_live(const port_table *t) { return t->state == STEP_SENT || t->state == STEP_ARMED; }

static void table_abort(fd_port *port, int table) {
    port_table *t = &port->tables[table];
    t->submitted = t->outstanding = 0;
    if (!table_live(t)) return;
    t->state = STEP_ABORTED;
    t->aborted[t->num_aborted++ % PUMP_ABORTED] = t->step;
    if (port->error.table == table && port->error.step == t->step) port->error.set = 0;
}

static int table_was_aborted(const port_table *t, uint32_t step) {
    uint32_t known = t->num_aborted < PUMP_ABORTED ? t->num_aborted : PUMP_ABORTED;
    for (uint32_t i = 0; i < known; i++)
        if (t->aborted[i] == step) return 1;
    return 0;
}

static int port_lost(fd_port *port) {
    if (port->kind == PORT_STREAM && port->conn.lost != CONN_PROTOCOL &&
        atomic_load_explicit(&port->doomed, memory_order_acquire)) {
        /* marking it lost shut the socket down: the mark is the reason, not the end of file */
        port->conn.lost = CONN_ALIVE;
        conn_fail(&port->conn, CONN_CLOSED, "%s", port->doom_reason);
    }
    return port->conn.lost;
}

/* Makes a lost port the next session of the same worker. Its counters go on: what is counted is the worker,
 * and one that comes and goes for months takes no more memory than one that stays. */
static void port_renew(fd_port *port) {
    fd_port fresh;
    memset(&fresh, 0, sizeof fresh);
    fresh.kind = port->kind;
    fresh.messages = port->messages;
    fresh.kernel_ns = port->kernel_ns;
    fresh.store_ns = port->store_ns;
    fresh.wait_ns = port->wait_ns;
    fresh.pump_ns = port->pump_ns;
    fresh.conn.frames_sent = port->conn.frames_sent;
    fresh.conn.frames_received = port->conn.frames_received;
    fresh.conn.bytes_sent = port->conn.bytes_sent;
    fresh.conn.bytes_received = port->conn.bytes_received;
    fresh.conn.io_ns = port->conn.io_ns;
    conn_close(&port->conn, 1);
    for (int t = 0; t < FD_MAX_TABLES; t++) free(port->tables[t].entries);
    free(port->cold);
    memcpy(port, &fresh, sizeof fresh);
}

/* Gives a new or renewed port its connection. */
static void port_connect(fd_port *port, const fd_conn *conn) {
    const fd_conn before = port->conn;
    port->conn = *conn;
    port->conn.frames_sent = before.frames_sent;
    port->conn.frames_received = before.frames_received;
    port->conn.bytes_sent = before.bytes_sent;
    port->conn.bytes_received = before.bytes_received;
    port->conn.io_ns = before.io_ns;
}

/* From another thread, under the GIL: the reason first, then the flag that publishes it. */
static void port_doom(fd_port *port, const char *reason) {
    snprintf(port->doom_reason, sizeof port->doom_reason, "%s", reason);
    atomic_store_explicit(&port->doomed, 1, memory_order_release);
}

static void port_set_error(fd_port *port, uint16_t table, uint32_t step, int32_t code, const char *text) {
    if (port->error.set) return; /* the first is the cause */
    port->error.set = 1;
    port->error.table = table;
    port->error.step = step;
    port->error.code = code;
    snprintf(port->error.text, sizeof port->error.text, "%s", text);
}

/* ---- receiving ---- */

static int port_attend_reply(fd_pump *pump, fd_port *port) {
    fd_conn *c = &port->conn;
    const fd_frame *h = &c->head;
    if (h->table >= FD_MAX_TABLES) return conn_fail(c, CONN_PROTOCOL, "it replied to table %u", h->table);
    port_table *t = &port->tables[h->table];
    if (!table_live(t) || h->step != t->step) { /* of a step given up: skip it */
        conn_discard(c);
        return 1;
    }
    if (!t->outstanding || h->layer != t->layer || h->rows != t->rows)
        return conn_fail(c, CONN_PROTOCOL, "it replied to layer %u, %u rows, which was not asked", h->layer,
                         h->rows);
    size_t nbytes = (size_t)t->rows * pump->sizes.out_bytes[t->layer];
    if (h->nbytes != nbytes + t->rows)
        return conn_fail(c, CONN_PROTOCOL, "its reply holds %llu bytes where %zu were due",
                         (unsigned long long)h->nbytes, nbytes + t->rows);
    conn_expect(c, pump->tables[h->table].recv + (size_t)t->first_row * pump->sizes.out_bytes[t->layer],
                nbytes, pump->tables[h->table].status + t->first_row, t->rows);
    return 1;
}

static int port_request_reply(fd_pump *pump, fd_port *port) {
    fd_conn *c = &port->conn;
    if (port->request_done || c->head.entry != port->request) { /* of a request that timed out */
        conn_discard(c);
        return 1;
    }
    if (c->head.nbytes > pump->sizes.max_cold) return conn_fail(c, CONN_PROTOCOL, "its reply is too long");
    if (c->head.nbytes > port->cold_capacity) {
        char *grown = realloc(port->cold, c->head.nbytes);
        if (!grown) return conn_fail(c, CONN_CLOSED, "no memory for its reply");
        port->cold = grown;
        port->cold_capacity = c->head.nbytes;
    }
    conn_expect(c, port->cold, c->head.nbytes, NULL, 0);
    return 1;
}

/* Checks c->head against what is due from this port and says where its payload goes. */
static int port_header(fd_pump *pump, fd_port *port) {
    fd_conn *c = &port->conn;
    switch (c->head.kind) {
    case FD_ATTEND_REPLY:
        return port_attend_reply(pump, port);
    case FD_EXPORT_REPLY:
    case FD_IMPORT_REPLY:
        return port_request_reply(pump, port);
    case FD_STEP_ERROR:
        if (c->head.nbytes > FD_TEXT_BYTES || (c->head.table >= FD_MAX_TABLES && c->head.table != FD_NO_TABLE))
            return conn_fail(c, CONN_PROTOCOL, "it sent a malformed error");
        conn_expect(c, port->incoming.text, c->head.nbytes, NULL, 0);
        return 1;
    case FD_CREDIT:
    case FD_STEP_READY:
        if (c->head.nbytes || (c->head.kind == FD_STEP_READY && c->head.table >= FD_MAX_TABLES))
            return conn_fail(c, CONN_PROTOCOL, "it sent a malformed frame of kind %u", c->head.kind);
        conn_expect(c, NULL, 0, NULL, 0);
        return 1;
    default:
        return conn_fail(c, CONN_PROTOCOL, "it sent a frame of kind %u", c->head.kind);
    }
}

static void port_step_error(fd_port *port, const fd_frame *h) {
    port->incoming.text[h->nbytes] = 0;
    if (h->table != FD_NO_TABLE && table_was_aborted(&port->tables[h->table], h->step)) return;
    port_set_error(port, h->table, h->step, h->status, port->incoming.text);
}

/* Takes in the frame c->head whose payload is in place. */
static void port_complete(fd_port *port) {
    const fd_frame *h = &port->conn.head;
    port_table *t = h->table < FD_MAX_TABLES ? &port->tables[h->table] : NULL;
    port->conn.consumed[frame_class(h->kind)]++;
    port->messages++;
    switch (h->kind) {
    case FD_ATTEND_REPLY:
        if (!table_live(t) || h->step != t->step || !t->outstanding) return;
        t->outstanding = 0;
        t->kernel_ns = h->offset;
        port->kernel_ns += h->offset;
        return;
    case FD_STEP_READY:
        if (t->state == STEP_SENT && h->step == t->step) t->state = STEP_ARMED;
        return;
    case FD_STEP_ERROR:
        port_step_error(port, h);
        return;
    case FD_EXPORT_REPLY:
    case FD_IMPORT_REPLY:
        if (port->request_done || h->entry != port->request) return;
        port->request_done = 1;
        port->request_status = h->status;
        port->cold_bytes = h->nbytes;
        return;
    default:
        return;
    }
}

/* Takes in what has arrived: 0 nothing more now, -1 lost. */
static int port_read(fd_pump *pump, fd_port *port) {
    fd_conn *c = &port->conn;
    do {
        if (!c->in_payload) {
            int rc = conn_next(c, 0);
            if (rc <= 0) return rc;
            if (port_header(pump, port) < 0) return -1;
        }
        int rc = conn_payload(c, 0);
        if (rc <= 0) return rc;
        port_complete(port);
    } while (c->plane->more(c));
    return 0;
}

#endif
