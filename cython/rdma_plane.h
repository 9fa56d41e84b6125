/* RDMA as a plane: chunks of frames in slots that the peer writes into, one immediate value each.
 *
 * Both sides have `num_slots` slots for each direction at fixed addresses, registered once. A frame starts a
 * slot and goes on in the following ones; slot k here is written to slot k there. The immediate value is
 * slot (8 bits) | sequence (24 bits), so a chunk out of order is noticed. The first word of a chunk says how
 * many chunks of the other direction its sender has consumed; when there is nothing to send it travels alone,
 * as a write of no bytes to RDMA_NO_SLOT. A receive is posted before its slot is credited, so the peer never
 * finds none. Only every few writes are signalled. */
#ifndef FASTDECODE_RDMA_PLANE_H
#define FASTDECODE_RDMA_PLANE_H

#include <sys/socket.h>

#include "plane.h"
#include "rdma_queue.h"

enum {
    RDMA_MAX_SLOTS = 128, /* a power of two each time; 255 is no slot's number */
    RDMA_CHUNK_HEAD = 16, /* credits in the first word; the rest keeps payloads aligned */
    RDMA_SPARE = 4,       /* receives for lone credits: at most two are under way, as each half of the slots is told once */
    RDMA_NO_SLOT = 255,
    RDMA_EVENTS = 16,
};
enum { RDMA_SEQUENCE = 0xFFFFFF };

typedef struct {
    const rdma_queue_ops *ops;
    void *queue;
    int fd; /* readable after a completion, once armed */
    uint32_t num_slots, slot_bytes;
    uint32_t depth; /* writes that may be under way */
    uint32_t signal_every; /* of those, how many to one report that they are done */
    char *out;      /* [num_slots * slot_bytes] */
    const char *in; /* [num_slots * slot_bytes], written by the peer */
    uint32_t tx_chunks, tx_credited; /* sent since the start; of those, consumed by the peer */
    uint32_t posted, completed, signalled;
    uint32_t rx_chunks, rx_consumed, rx_posted, rx_told; /* rx_posted: consumed, and a receive is posted again */
    uint32_t rx_nbytes[RDMA_MAX_SLOTS];
    uint32_t rx_offset; /* in the chunk being read; 0: not begun */
    int ended;          /* the peer has closed its socket */
    int ended_errno;
} rdma_plane;

static inline uint32_t rdma_readable(const rdma_plane *p) { return p->rx_chunks - p->rx_consumed; }

static inline int rdma_writable(const rdma_plane *p) {
    return p->tx_chunks - p->tx_credited < p->num_slots && p->posted - p->completed < p->depth;
}

static int rdma_post(fd_conn *c, uint32_t slot, uint32_t nbytes, uint32_t imm, int signal) {
    rdma_plane *p = c->state;
    p->posted++;
    if (p->posted - p->signalled >= p->signal_every) signal = 1;
    if (signal) p->signalled = p->posted;
    /* 0 asks for no report, and is a count like others once in 2^32: that one goes unsignalled */
    uint64_t start = now_ns();
    int error = p->ops->write(p->queue, slot, nbytes, imm, signal ? p->posted : 0);
    c->io_ns += now_ns() - start;
    c->bytes_sent += nbytes;
    return error ? conn_fail_errno(c, "posting an RDMA write", error) : 1;
}

/* Posts receives for what has been consumed: before the peer is told, or it would find none. */
static int rdma_replenish(fd_conn *c) {
    rdma_plane *p = c->state;
    uint32_t count = p->rx_consumed - p->rx_posted;
    if (!count) return 1;
    p->rx_posted = p->rx_consumed;
    int error = p->ops->receive(p->queue, count);
    return error ? conn_fail_errno(c, "posting RDMA receives", error) : 1;
}

/* Tells the peer alone, when no chunk has carried it along for half of the slots. */
static int rdma_tell(fd_conn *c) {
    rdma_plane *p = c->state;
    if (p->rx_consumed - p->rx_told < p->num_slots / 2 || p->posted - p->completed >= p->depth) return 1;
    if (rdma_replenish(c) < 0) return -1;
    p->rx_told = p->rx_consumed;
    return rdma_post(c, 0, 0, (uint32_t)RDMA_NO_SLOT << 24 | (p->rx_consumed & RDMA_SEQUENCE), 0);
}

static int rdma_credit(fd_conn *c, uint32_t returned) {
    rdma_plane *p = c->state;
    if (returned > p->tx_chunks - p->tx_credited)
        return conn_fail(c, CONN_PROTOCOL, "it returned RDMA slots that were never written");
    p->tx_credited += returned;
    return 1;
}

static int rdma_received(fd_conn *c, const rdma_event *event) {
    rdma_plane *p = c->state;
    uint32_t slot = event->imm >> 24, sequence = event->imm & RDMA_SEQUENCE, credits;
    if (slot == RDMA_NO_SLOT) {
        int error = p->ops->receive(p->queue, 1);
        if (error) return conn_fail_errno(c, "posting RDMA receives", error);
        return rdma_credit(c, (sequence - p->tx_credited) & RDMA_SEQUENCE);
    }
    if (slot != p->rx_chunks % p->num_slots || sequence != (p->rx_chunks & RDMA_SEQUENCE))
        return conn_fail(c, CONN_PROTOCOL, "it wrote slot %u, number %u, where number %u was due", slot, sequence,
                         p->rx_chunks & RDMA_SEQUENCE);
    if (event->nbytes <= RDMA_CHUNK_HEAD || event->nbytes > p->slot_bytes || rdma_readable(p) >= p->num_slots)
        return conn_fail(c, CONN_PROTOCOL, "it wrote %u bytes into a slot of %u", event->nbytes, p->slot_bytes);
    memcpy(&credits, p->in + (size_t)slot * p->slot_bytes, sizeof credits);
    p->rx_nbytes[slot] = event->nbytes;
    p->rx_chunks++;
    c->bytes_received += event->nbytes;
    return rdma_credit(c, credits - p->tx_credited);
}

/* Takes in all completions: 0, or -1 lost. */
static int rdma_drain(fd_conn *c) {
    rdma_plane *p = c->state;
    rdma_event events[RDMA_EVENTS];
    int count;
    do {
        if (c->lost) return -1;
        count = p->ops->poll(p->queue, events, RDMA_EVENTS);
        if (count < 0) return conn_fail_errno(c, "polling for RDMA completions", -count);
        for (int i = 0; i < count; i++) {
            if (events[i].status) {
                char text[CONN_REASON] = "an RDMA operation failed";
                p->ops->explain(p->queue, events[i].status, text, sizeof text);
                return conn_fail(c, CONN_CLOSED, "%s", text);
            }
            if (events[i].kind == RDMA_SENT) {
                if (events[i].count) p->completed = events[i].count; /* 0: nobody asked for this one */
            } else if (rdma_received(c, &events[i]) < 0) return -1;
        }
    } while (count == RDMA_EVENTS);
    return rdma_tell(c) < 0 ? -1 : 0;
}

static int rdma_ended(fd_conn *c) {
    rdma_plane *p = c->state;
    if (p->ended_errno) return conn_fail_errno(c, "receiving", p->ended_errno);
    return conn_ended(c, !c->in_payload);
}

/* Waits for something to read, or for room: 1, 0 not now, -1 lost. */
static int rdma_await(fd_conn *c, short events, int block) {
    rdma_plane *p = c->state;
    for (;;) {
        if (rdma_drain(c) < 0) return -1;
        if (events == POLLIN ? rdma_readable(p) != 0 : rdma_writable(p)) return 1;
        if (p->ended) return rdma_ended(c);
        if (!block) return 0;
        if (events != POLLIN || !conn_spin(c)) conn_sleep(c, events);
    }
}

/* ---- sending ---- */

static int rdma_room(fd_conn *c, const conn_tx *tx, int block) {
    (void)tx;
    return rdma_await(c, POLLOUT, block);
}

/* Copies bytes [skip, skip + nbytes) of a frame. */
static void rdma_gather(char *to, const conn_tx *tx, size_t skip, size_t nbytes) {
    const struct iovec all[1 + CONN_PARTS] = {{(void *)&tx->head, sizeof(fd_frame)}, tx->part[0], tx->part[1]};
    for (int i = 0; i <= CONN_PARTS && nbytes; i++) {
        if (skip >= all[i].iov_len) {
            skip -= all[i].iov_len;
            continue;
        }
        size_t take = all[i].iov_len - skip < nbytes ? all[i].iov_len - skip : nbytes;
        memcpy(to, (const char *)all[i].iov_base + skip, take);
        to += take;
        nbytes -= take;
        skip = 0;
    }
}

static int rdma_send(fd_conn *c, conn_tx *tx, int block) {
    rdma_plane *p = c->state;
    while (tx->sent < tx->nbytes) {
        int rc = rdma_await(c, POLLOUT, block);
        if (rc <= 0) return rc;
        uint32_t slot = p->tx_chunks % p->num_slots;
        char *to = p->out + (size_t)slot * p->slot_bytes;
        size_t room = p->slot_bytes - RDMA_CHUNK_HEAD, left = tx->nbytes - tx->sent;
        size_t take = left < room ? left : room;
        rdma_gather(to + RDMA_CHUNK_HEAD, tx, tx->sent, take);
        if (rdma_replenish(c) < 0) return -1;
        p->rx_told = p->rx_consumed;
        memset(to, 0, RDMA_CHUNK_HEAD);
        memcpy(to, &p->rx_told, sizeof p->rx_told);
        uint32_t imm = slot << 24 | (p->tx_chunks & RDMA_SEQUENCE);
        p->tx_chunks++;
        if (rdma_post(c, slot, (uint32_t)(RDMA_CHUNK_HEAD + take), imm, 0) < 0) return -1;
        tx->sent += take;
    }
    return 1;
}

/* ---- receiving ---- */

static void rdma_consumed(rdma_plane *p) {
    p->rx_consumed++;
    p->rx_offset = 0;
}

static int rdma_header(fd_conn *c, int block) {
    rdma_plane *p = c->state;
    int rc = rdma_await(c, POLLIN, block);
    if (rc <= 0) return rc;
    uint32_t slot = p->rx_consumed % p->num_slots;
    if (p->rx_nbytes[slot] < RDMA_CHUNK_HEAD + sizeof(fd_frame))
        return conn_fail(c, CONN_PROTOCOL, "it wrote a frame of %u bytes", p->rx_nbytes[slot]);
    memcpy(&c->head, p->in + (size_t)slot * p->slot_bytes + RDMA_CHUNK_HEAD, sizeof(fd_frame));
    p->rx_offset = RDMA_CHUNK_HEAD + sizeof(fd_frame);
    if (p->rx_offset == p->rx_nbytes[slot]) rdma_consumed(p);
    return 1;
}

/* Copies `take` bytes to where the rest of the payload goes. */
static void rdma_scatter(fd_conn *c, const char *from, size_t take) {
    size_t skip = c->part[0].iov_len + c->part[1].iov_len - c->payload_left;
    for (int i = 0; i < CONN_PARTS && take; i++) {
        if (skip >= c->part[i].iov_len) {
            skip -= c->part[i].iov_len;
            continue;
        }
        size_t n = c->part[i].iov_len - skip < take ? c->part[i].iov_len - skip : take;
        memcpy((char *)c->part[i].iov_base + skip, from, n);
        from += n;
        take -= n;
        c->payload_left -= n;
        skip = 0;
    }
}

static int rdma_payload(fd_conn *c, int block) {
    rdma_plane *p = c->state;
    while (c->payload_left || c->discard_left) {
        int rc = rdma_readable(p) ? 1 : rdma_await(c, POLLIN, block);
        if (rc <= 0) return rc;
        uint32_t slot = p->rx_consumed % p->num_slots;
        if (!p->rx_offset) p->rx_offset = RDMA_CHUNK_HEAD;
        size_t left = c->payload_left ? c->payload_left : c->discard_left;
        size_t have = p->rx_nbytes[slot] - p->rx_offset, take = have < left ? have : left;
        if (c->payload_left) rdma_scatter(c, p->in + (size_t)slot * p->slot_bytes + p->rx_offset, take);
        else c->discard_left -= take;
        p->rx_offset += (uint32_t)take;
        if (p->rx_offset == p->rx_nbytes[slot]) rdma_consumed(p);
    }
    if (p->rx_offset) return conn_fail(c, CONN_PROTOCOL, "it wrote more than its frame holds");
    return rdma_tell(c);
}

/* ---- waiting ---- */

static int rdma_more(fd_conn *c) {
    rdma_plane *p = c->state;
    if (rdma_readable(p) || p->ended || c->lost) return 1;
    return rdma_drain(c) < 0 || rdma_readable(p);
}

static int rdma_ready(const fd_conn *c, short events) {
    const rdma_plane *p = c->state;
    return c->lost || p->ended || ((events & POLLIN) && rdma_readable(p)) || ((events & POLLOUT) && rdma_writable(p));
}

static int rdma_arm(fd_conn *c, short events, struct pollfd *fds) {
    rdma_plane *p = c->state;
    if (rdma_drain(c) < 0 || rdma_ready(c, events)) return 0;
    int error = p->ops->arm(p->queue);
    if (error) {
        conn_fail_errno(c, "arming the RDMA completion queue", error);
        return 0;
    }
    if (rdma_drain(c) < 0 || rdma_ready(c, events)) return 0; /* it came before we were armed */
    fds[0] = (struct pollfd){.fd = p->fd, .events = POLLIN};
    fds[1] = (struct pollfd){.fd = c->fd, .events = POLLIN};
    return 2;
}

/* The socket carries nothing while the queue pair lives: what can be read is its end. */
static void rdma_disarm(fd_conn *c) {
    rdma_plane *p = c->state;
    char byte;
    p->ops->disarm(p->queue);
    ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n > 0) conn_fail(c, CONN_PROTOCOL, "it sent bytes beside its RDMA connection");
    if (n == 0) p->ended = 1;
    if (n >= 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return;
    p->ended = 1;
    p->ended_errno = errno;
}

enum { RDMA_FLUSH_NS = 200000000 };

/* Lets what was written arrive, as far as the peer still takes it, and ends the queue pair. */
static void rdma_flush(fd_conn *c) {
    rdma_plane *p = c->state;
    uint64_t end = now_ns() + RDMA_FLUSH_NS;
    if (c->lost || p->ended || p->posted == p->completed) return;
    uint32_t imm = (uint32_t)RDMA_NO_SLOT << 24 | (p->rx_told & RDMA_SEQUENCE);
    if (p->posted != p->signalled && rdma_post(c, 0, 0, imm, 1) < 0) return;
    while (p->posted != p->completed && rdma_drain(c) == 0 && now_ns() < end) spin_pause();
}

#endif
