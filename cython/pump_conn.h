/* One stream connection that carries frames: a ring of frames to send, a receiver that puts payloads
 * straight where they belong, credits. No allocation, no GIL; the callers decide whether to block. */
#ifndef FASTDECODE_PUMP_CONN_H
#define FASTDECODE_PUMP_CONN_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll, strerror_r that returns text */
#endif
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "frame.h"

enum { CONN_RING = 32, CONN_PARTS = 2, CONN_REASON = 200 };
enum { CONN_ALIVE = 0, CONN_CLOSED = 1, CONN_PROTOCOL = 2 };

typedef struct {
    fd_frame head;
    struct iovec part[CONN_PARTS];
    size_t nbytes, sent; /* header and payload together */
    int started;
} conn_tx;

typedef struct {
    int fd;
    int lost; /* CONN_ALIVE or why it ended */
    int lost_errno;
    char reason[CONN_REASON];
    uint64_t epoch;
    uint32_t tx_sequence, rx_sequence;
    uint32_t slots[FD_CLASSES];         /* of the peer, agreed in the handshake */
    uint32_t sent[FD_CLASSES];          /* frames sent since the start */
    uint32_t peer_consumed[FD_CLASSES]; /* of those, what the peer says it has consumed */
    uint32_t consumed[FD_CLASSES];      /* frames received and done with */
    uint32_t reported[FD_CLASSES];      /* of those, what the peer has been told */
    conn_tx ring[CONN_RING];
    uint32_t tx_first, tx_last; /* free-running; equal when nothing waits */
    int no_credit;              /* the first frame of the ring waits for a credit, not for the socket */
    fd_frame head;              /* private copy of the header being served, checked */
    fd_frame next;              /* header being received */
    size_t next_have;
    struct iovec part[CONN_PARTS]; /* where the rest of head's payload goes */
    size_t payload_left, discard_left;
    int in_payload;
    uint64_t frames_sent, frames_received, bytes_sent, bytes_received, io_ns;
} fd_conn;

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void conn_init(fd_conn *c, int fd, uint64_t epoch, uint32_t latency_slots, uint32_t bulk_slots) {
    memset(c, 0, sizeof *c);
    c->fd = fd;
    c->epoch = epoch;
    c->slots[FD_LATENCY] = latency_slots;
    c->slots[FD_BULK] = bulk_slots;
}

__attribute__((format(printf, 3, 4))) static int conn_fail(fd_conn *c, int lost, const char *format, ...) {
    if (c->lost) return -1; /* the first reason is the telling one */
    va_list args;
    va_start(args, format);
    vsnprintf(c->reason, sizeof c->reason, format, args);
    va_end(args);
    c->lost = lost;
    return -1;
}

static int conn_fail_errno(fd_conn *c, const char *doing, int error) {
    char text[96];
    c->lost_errno = error;
    return conn_fail(c, CONN_CLOSED, "%s: %s", doing, strerror_r(error, text, sizeof text));
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

/* The parts of a scatter list from byte `skip` on. */
static int conn_parts_from(struct iovec *out, const struct iovec *in, int count, size_t skip) {
    int filled = 0;
    for (int i = 0; i < count; i++) {
        if (skip >= in[i].iov_len) {
            skip -= in[i].iov_len;
            continue;
        }
        out[filled++] = (struct iovec){(char *)in[i].iov_base + skip, in[i].iov_len - skip};
        skip = 0;
    }
    return filled;
}

/* Sequence and credits go into a header when its first byte leaves, so they are never stale. */
static void conn_start(fd_conn *c, conn_tx *tx) {
    tx->head.sequence = c->tx_sequence++;
    for (int k = 0; k < FD_CLASSES; k++) tx->head.consumed[k] = c->reported[k] = c->consumed[k];
    c->sent[frame_class(tx->head.kind)]++;
    tx->started = 1;
}

/* A blocking caller may have been given a socket that does not block. */
static void conn_block(const fd_conn *c, short events) {
    struct pollfd ready = {.fd = c->fd, .events = events};
    poll(&ready, 1, -1);
}

/* Sends queued frames: 1 all gone, 0 it would block (socket or credit), -1 the connection is lost. */
static int conn_send(fd_conn *c, int flags) {
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
            conn_start(c, tx);
        }
        struct iovec whole[1 + CONN_PARTS] = {{&tx->head, sizeof(fd_frame)}, tx->part[0], tx->part[1]};
        struct iovec rest[1 + CONN_PARTS];
        struct msghdr message = {.msg_iov = rest};
        message.msg_iovlen = (size_t)conn_parts_from(rest, whole, 1 + CONN_PARTS, tx->sent);
        uint64_t start = now_ns();
        ssize_t n = sendmsg(c->fd, &message, flags | MSG_NOSIGNAL);
        int error = errno;
        c->io_ns += now_ns() - start;
        if (n < 0) {
            if (error == EINTR) continue;
            if (error == EAGAIN || error == EWOULDBLOCK) {
                if (flags & MSG_DONTWAIT) return 0;
                conn_block(c, POLLOUT);
                continue;
            }
            return conn_fail_errno(c, "sending", error);
        }
        c->bytes_sent += (uint64_t)n;
        tx->sent += (size_t)n;
        if (tx->sent < tx->nbytes) continue;
        c->frames_sent++;
        c->tx_first++;
    }
    return 1;
}

static ssize_t conn_receive(fd_conn *c, struct iovec *parts, int count, int flags) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    for (;;) {
        uint64_t start = now_ns();
        ssize_t n = recvmsg(c->fd, &message, flags);
        int error = errno;
        c->io_ns += now_ns() - start;
        if (n > 0) {
            c->bytes_received += (uint64_t)n;
            return n;
        }
        if (n == 0) return conn_fail(c, CONN_CLOSED, "the peer closed the connection");
        if (error == EINTR) continue;
        if (error == EAGAIN || error == EWOULDBLOCK) {
            if (flags & MSG_DONTWAIT) return 0;
            conn_block(c, POLLIN);
            continue;
        }
        return conn_fail_errno(c, "receiving", error);
    }
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
static int conn_next(fd_conn *c, int flags) {
    while (c->next_have < sizeof(fd_frame)) {
        struct iovec part = {(char *)&c->next + c->next_have, sizeof(fd_frame) - c->next_have};
        ssize_t n = conn_receive(c, &part, 1, flags);
        if (n <= 0) return (int)n;
        c->next_have += (size_t)n;
    }
    c->head = c->next; /* what is checked is what is used */
    c->next_have = 0;
    return conn_check(c);
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

/* Receives the payload: 1 complete, 0 would block, -1 lost. The next header rides along in the same
 * system call when it is there already. */
static int conn_payload(fd_conn *c, int flags) {
    char waste[4096];
    while (c->payload_left) {
        size_t total = c->part[0].iov_len + c->part[1].iov_len;
        struct iovec rest[CONN_PARTS + 1];
        int count = conn_parts_from(rest, c->part, CONN_PARTS, total - c->payload_left);
        rest[count++] = (struct iovec){&c->next, sizeof(fd_frame)};
        ssize_t n = conn_receive(c, rest, count, flags);
        if (n <= 0) return (int)n;
        if ((size_t)n <= c->payload_left) {
            c->payload_left -= (size_t)n;
            continue;
        }
        c->next_have = (size_t)n - c->payload_left;
        c->payload_left = 0;
    }
    while (c->discard_left) {
        struct iovec part = {waste, c->discard_left < sizeof waste ? c->discard_left : sizeof waste};
        ssize_t n = conn_receive(c, &part, 1, flags);
        if (n <= 0) return (int)n;
        c->discard_left -= (size_t)n;
    }
    c->frames_received++;
    c->in_payload = 0;
    return 1;
}

#endif
