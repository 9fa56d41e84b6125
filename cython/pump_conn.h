/* One connection that carries frames, whatever the plane: a ring of frames to send, headers checked before
 * they are used, credits. No allocation, no GIL; the callers decide whether to block. */
#ifndef FASTDECODE_PUMP_CONN_H
#define FASTDECODE_PUMP_CONN_H

#include <unistd.h>

#include "plane_tcp.h"

static void conn_init(fd_conn *c, int fd, uint64_t epoch, uint32_t latency_slots, uint32_t bulk_slots) {
    memset(c, 0, sizeof *c);
    c->plane = &PLANE_TCP;
    c->fd = fd;
    c->epoch = epoch;
    c->slots[FD_LATENCY] = latency_slots;
    c->slots[FD_BULK] = bulk_slots;
}

/* Lets go of the plane's memory; the descriptor goes too where it is ours. */
static void conn_close(fd_conn *c, int close_fd) {
    if (c->plane && c->plane->close) c->plane->close(c);
    if (close_fd && c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static inline uint32_t conn_in_flight(const fd_conn *c, int class) {
    return c->sent[class] - c->peer_consumed[class];
}

static inline int conn_pending(const fd_conn *c) { return c->tx_first != c->tx_last; }

/* Queues one frame; its payload must stay as it is until the frame is sent. The ring has room: each table
 * has at most a BEGIN_STEP and an ATTEND in it (begin waits for older ones), and there is one cold frame. */
static conn_tx *conn_queue(fd_conn *c, uint16_t kind, uint16_t table, uint32_t step, const void *first,
                           size_t first_bytes, const void *second, size_t second_bytes) {
    conn_tx *tx = &c->ring[c->tx_last++ % CONN_RING];
    memset(&tx->head, 0, sizeof tx->head);
    tx->head.magic = FD_MAGIC;
    tx->head.kind = kind;
    tx->head.table = table;
    tx->head.epoch = c->epoch;
    tx->head.step = step;
    tx->head.nbytes = first_bytes + second_bytes;
    tx->part[0] = (struct iovec){(void *)first, first_bytes};
    tx->part[1] = (struct iovec){(void *)second, second_bytes};
    tx->nbytes = sizeof(fd_frame) + first_bytes + second_bytes;
    tx->sent = 0;
    tx->started = 0;
    return tx;
}

/* Sequence and credits go into a header when it leaves, so they are never stale. */
static void conn_start(fd_conn *c, conn_tx *tx) {
    tx->head.sequence = c->tx_sequence++;
    for (int k = 0; k < FD_CLASSES; k++) tx->head.consumed[k] = c->reported[k] = c->consumed[k];
    c->sent[frame_class(tx->head.kind)]++;
    tx->started = 1;
}

/* Sends queued frames: 1 all gone, 0 it would block (plane or credit), -1 the connection is lost. */
static int conn_send(fd_conn *c, int block) {
    c->no_credit = 0;
    while (conn_pending(c)) {
        conn_tx *tx = &c->ring[c->tx_first % CONN_RING];
        if (c->lost) return -1;
        if (!tx->started) {
            int class = frame_class(tx->head.kind);
            if (c->slots[class] && conn_in_flight(c, class) >= c->slots[class]) {
                c->no_credit = 1;
                return 0;
            }
            int room = c->plane->room ? c->plane->room(c, tx, block) : 1;
            if (room <= 0) return room;
            conn_start(c, tx);
        }
        int rc = c->plane->send(c, tx, block);
        if (rc <= 0) return rc;
        c->frames_sent++;
        c->tx_first++;
    }
    return 1;
}

static int conn_check(fd_conn *c) {
    const fd_frame *h = &c->head;
    if (h->magic != FD_MAGIC) return conn_fail(c, CONN_PROTOCOL, "it sent bytes that are no frame");
    if (h->epoch != c->epoch)
        return conn_fail(c, CONN_PROTOCOL, "it sent a frame of epoch %016llx, this connection's is %016llx",
                         (unsigned long long)h->epoch, (unsigned long long)c->epoch);
    if (h->sequence != c->rx_sequence)
        return conn_fail(c, CONN_PROTOCOL, "it sent frame number %u where %u was due", h->sequence,
                         c->rx_sequence);
    for (int k = 0; k < FD_CLASSES; k++) {
        if (h->consumed[k] - c->peer_consumed[k] > conn_in_flight(c, k))
            return conn_fail(c, CONN_PROTOCOL, "it returned credits that were never spent");
        c->peer_consumed[k] = h->consumed[k];
    }
    c->rx_sequence++;
    return 1;
}

/* Receives a header into c->head: 1 it is there and sound, 0 would block, -1 lost. */
static int conn_next(fd_conn *c, int block) {
    if (c->lost) return -1;
    int rc = c->plane->header(c, block);
    return rc <= 0 ? rc : conn_check(c);
}

/* Says where the payload of c->head goes; together the parts hold nbytes. */
static void conn_expect(fd_conn *c, void *first, size_t first_bytes, void *second, size_t second_bytes) {
    c->part[0] = (struct iovec){first, first_bytes};
    c->part[1] = (struct iovec){second, second_bytes};
    c->payload_left = first_bytes + second_bytes;
    c->discard_left = 0;
    c->in_payload = 1;
}

static void conn_discard(fd_conn *c) {
    c->payload_left = 0;
    c->discard_left = c->head.nbytes;
    c->in_payload = 1;
}

/* Receives the payload: 1 complete, 0 would block, -1 lost. */
static int conn_payload(fd_conn *c, int block) {
    int rc = c->plane->payload(c, block);
    if (rc <= 0) return rc;
    c->frames_received++;
    c->in_payload = 0;
    return 1;
}

/* Instead of conn_expect() and conn_payload(): where the payload lies already, until conn_release(). */
static void *conn_view(fd_conn *c) {
    void *where = c->plane->view ? c->plane->view(c) : NULL;
    if (where) c->frames_received++;
    return where;
}

static void conn_release(fd_conn *c) {
    if (c->plane->release) c->plane->release(c);
}

#endif
