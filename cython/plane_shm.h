/* Shared memory as a plane: two processes of one machine touch the same pages. Rows are read where the peer
 * put them, and replies are built where the peer will read them.
 *
 * One memfd per connection, made by the engine, holds a page of counters and two lanes, one per direction.
 * A lane has a ring of entries (a header, and the slot of its payload) and, per slot class, slots of a fixed
 * size; the sender takes the first that is free, so that a connection with little under way touches the same
 * few pages again and again, in cache. What fits no slot (exported K/V, a very long step table) lies in one
 * area of its own. A frame is published by counting it, and its slot is free once the receiver has counted
 * it as released.
 *
 * Whoever waits looks at the peer's counter for a while and then sleeps on the Unix socket of the connection,
 * into which the peer writes a byte if it finds a sleeper: that socket also ends with the peer, and shutting
 * it down wakes the sleeper, which a futex would not do.
 *
 * The peer may write anything into these pages at any time: entries are copied before they are checked,
 * counters and slot numbers are compared with what can be, and payloads are data. */
#ifndef FASTDECODE_PLANE_SHM_H
#define FASTDECODE_PLANE_SHM_H

#include <sys/socket.h>

#include "shm_segment.h"

enum { SHM_LOOK = 64 /* frames between two looks at the socket of a busy peer */ };

/* Copies in pieces, each to whole cache lines. glibc copies some tens of kilobytes and more with one
 * instruction, `rep movsb`, which on AMD's processors falls to 2 GB/s when the target is not aligned; in
 * pieces of this length it uses vectors. Measured on Zen, 64 KiB to an address of 16 bytes' alignment: memcpy
 * 30 us, this 2 us. */
static void shm_copy(char *to, const char *from, size_t nbytes) {
    enum { LINE = 64, PIECE = 2048 };
    size_t piece = PIECE, at = -(uintptr_t)to % LINE;
    __asm__("" : "+r"(piece)); /* a length that the compiler knows it copies with the same instruction */
    if (at > nbytes) at = nbytes;
    memcpy(to, from, at);
    for (; nbytes - at > piece; at += piece) memcpy(to + at, from + at, piece);
    memcpy(to + at, from + at, nbytes - at);
}

/* Wakes the peer if it sleeps for what has just been counted. */
static int shm_ring(fd_conn *c, shm_state *s, uint32_t what) {
    _Atomic uint32_t *sleeping = &shm_lane_counters(s, !s->side)->sleeping;
    atomic_thread_fence(memory_order_seq_cst); /* our count is visible before we look for a sleeper */
    if (!(atomic_load_explicit(sleeping, memory_order_relaxed) & what)) return 1;
    if (!atomic_exchange(sleeping, 0)) return 1;
    ssize_t n;
    do {
        n = send(c->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    /* a full socket holds wake-ups that the peer has not taken yet */
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return conn_fail_errno(c, "sending", errno);
    return 1;
}

/* Takes the wake-ups out of the socket and notices its end. */
static void shm_drain(fd_conn *c, shm_state *s) {
    char wakes[256];
    ssize_t n;
    if (s->ended) return;
    do {
        n = recv(c->fd, wakes, sizeof wakes, MSG_DONTWAIT);
    } while (n == sizeof wakes || (n < 0 && errno == EINTR));
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))) return;
    s->ended = 1; /* what was published before still counts, but no more than that */
    s->last = atomic_load_explicit(&shm_lane_counters(s, !s->side)->published, memory_order_acquire);
}

/* ---- sending ---- */

/* Takes back the slots of what the peer has released: 1, or -1 if that cannot be. */
static int shm_reclaim(fd_conn *c, shm_state *s) {
    const shm_lane *lane = &s->lane[s->side];
    uint32_t released = atomic_load_explicit(&shm_lane_counters(s, s->side)->released, memory_order_acquire);
    if (released - s->freed > s->published - s->freed)
        return conn_fail(c, CONN_PROTOCOL, "it released frames that were never sent");
    s->room_seen = released;
    for (; s->freed != released; s->freed++) {
        s->busy[s->use[s->freed_entry].class][s->use[s->freed_entry].slot] = 0;
        s->freed_entry = (s->freed_entry + 1) % lane->entries;
    }
    return 1;
}

/* The slot that a frame would take now; -1 none is free. */
static int shm_free_slot(const shm_state *s, uint16_t kind, uint64_t nbytes) {
    const shm_lane *lane = &s->lane[s->side];
    int class = frame_class(kind);
    if (!nbytes) return SHM_NOWHERE;
    if (nbytes > lane->slot_bytes[class]) return s->busy[0][SHM_BIG] || s->busy[1][SHM_BIG] ? -1 : SHM_BIG;
    for (uint32_t slot = 0; slot < lane->slots[class]; slot++)
        if (!s->busy[class][slot]) return (int)slot;
    return -1;
}

static int shm_has_room(fd_conn *c, shm_state *s, uint16_t kind, uint64_t nbytes) {
    const shm_lane *lane = &s->lane[s->side];
    if (shm_reclaim(c, s) < 0) return -1;
    if (nbytes > lane->slot_bytes[frame_class(kind)] && nbytes > lane->big_bytes)
        return conn_fail(c, CONN_CLOSED, "a frame is longer than the segment allows");
    return s->published - s->freed < lane->entries && shm_free_slot(s, kind, nbytes) >= 0;
}

static int shm_wait_room(fd_conn *c, uint16_t kind, uint64_t nbytes, int block) {
    shm_state *s = c->state;
    for (;;) {
        int room = shm_has_room(c, s, kind, nbytes);
        if (room) return room;
        if (s->ended) return conn_ended(c, 1);
        if (!block) return 0;
        conn_sleep(c, POLLOUT);
    }
}

static int shm_room(fd_conn *c, const conn_tx *tx, int block) {
    return shm_wait_room(c, tx->head.kind, tx->head.nbytes, block);
}

/* Slots are taken back in shm_has_room() only, which shm_room() calls again: the slot may be another one by
 * then, and the payload is copied after all. */
static void *shm_reserve(fd_conn *c, uint16_t kind, size_t nbytes) {
    shm_state *s = c->state;
    if (shm_wait_room(c, kind, nbytes, 1) < 0) return NULL;
    return shm_place(s, s->side, kind, (uint32_t)shm_free_slot(s, kind, nbytes), nbytes);
}

static int shm_send(fd_conn *c, conn_tx *tx, int block) {
    (void)block; /* there is room: shm_room() said so */
    shm_state *s = c->state;
    const shm_lane *lane = &s->lane[s->side];
    uint16_t kind = tx->head.kind;
    uint64_t start = now_ns();
    uint32_t slot = (uint32_t)shm_free_slot(s, kind, tx->head.nbytes);
    char *to = shm_place(s, s->side, kind, slot, tx->head.nbytes);
    for (int i = 0; i < CONN_PARTS; i++) {
        if (tx->part[i].iov_len && tx->part[i].iov_base != to) shm_copy(to, tx->part[i].iov_base, tx->part[i].iov_len);
        to += tx->part[i].iov_len;
    }
    s->use[s->tx_entry] = (shm_use){(uint16_t)frame_class(kind), (uint16_t)slot};
    s->busy[frame_class(kind)][slot] = 1;
    shm_entry *entry = (shm_entry *)(s->base + lane->entry_at) + s->tx_entry;
    memcpy(&entry->head, &tx->head, sizeof(fd_frame));
    entry->slot = slot;
    s->tx_entry = (s->tx_entry + 1) % lane->entries;
    atomic_store_explicit(&shm_lane_counters(s, s->side)->published, ++s->published, memory_order_release);
    int rc = shm_ring(c, s, SHM_WANTS_FRAME);
    c->io_ns += now_ns() - start;
    c->bytes_sent += tx->nbytes;
    tx->sent = tx->nbytes;
    return rc;
}

/* ---- receiving ---- */

static int shm_more(fd_conn *c) {
    shm_state *s = c->state;
    uint32_t published = s->last;
    if (!s->ended)
        published = atomic_load_explicit(&shm_lane_counters(s, !s->side)->published, memory_order_acquire);
    return published != s->taken;
}

static int shm_header(fd_conn *c, int block) {
    shm_state *s = c->state;
    const shm_lane *lane = &s->lane[!s->side];
    if (s->taken % SHM_LOOK == SHM_LOOK - 1) shm_drain(c, s); /* a peer that never lets us sleep */
    while (!shm_more(c)) {
        if (s->ended) return conn_ended(c, 1);
        if (!block) return 0;
        if (!conn_spin(c)) conn_sleep(c, POLLIN);
    }
    uint32_t published = atomic_load_explicit(&shm_lane_counters(s, !s->side)->published, memory_order_acquire);
    if (published - s->taken > lane->entries)
        return conn_fail(c, CONN_PROTOCOL, "it published more frames than there are places for");
    /* the copy is what is checked and used */
    shm_entry entry;
    memcpy(&entry, s->base + lane->entry_at + s->rx_entry * sizeof(shm_entry), sizeof entry);
    c->head = entry.head;
    s->rx_slot = entry.slot;
    s->taken++;
    s->holding = 1;
    return 1;
}

static void *shm_view(fd_conn *c) {
    shm_state *s = c->state;
    c->bytes_received += sizeof(fd_frame) + c->head.nbytes;
    return shm_place(s, !s->side, c->head.kind, s->rx_slot, c->head.nbytes);
}

static void shm_release(fd_conn *c) {
    shm_state *s = c->state;
    if (!s->holding) return;
    s->holding = 0;
    s->rx_entry = (s->rx_entry + 1) % s->lane[!s->side].entries;
    atomic_store_explicit(&shm_lane_counters(s, !s->side)->released, s->taken, memory_order_release);
    shm_ring(c, s, SHM_WANTS_ROOM);
}

static int shm_payload(fd_conn *c, int block) {
    (void)block; /* a published frame is there whole */
    uint64_t start = now_ns();
    const char *from = shm_view(c);
    if (!from) return conn_fail(c, CONN_PROTOCOL, "a frame of %llu bytes fits no slot", (unsigned long long)c->head.nbytes);
    for (int i = 0; i < CONN_PARTS && c->payload_left; i++) {
        if (c->part[i].iov_len) shm_copy(c->part[i].iov_base, from, c->part[i].iov_len);
        from += c->part[i].iov_len;
    }
    c->payload_left = c->discard_left = 0;
    shm_release(c);
    c->io_ns += now_ns() - start;
    return c->lost ? -1 : 1;
}

/* ---- sleeping ---- */

static int shm_arm(fd_conn *c, short events, struct pollfd *fds) {
    shm_state *s = c->state;
    uint32_t wants = (events & POLLIN ? SHM_WANTS_FRAME : 0) | (events & POLLOUT ? SHM_WANTS_ROOM : 0);
    atomic_store(&shm_lane_counters(s, s->side)->sleeping, wants);
    atomic_thread_fence(memory_order_seq_cst); /* we are seen to sleep before we look for the last time */
    int woken = s->ended || (events & POLLIN && shm_more(c));
    if (events & POLLOUT)
        woken |= atomic_load_explicit(&shm_lane_counters(s, s->side)->released, memory_order_acquire) != s->room_seen;
    if (woken) return 0;
    fds[0] = (struct pollfd){.fd = c->fd, .events = POLLIN};
    return 1;
}

static void shm_disarm(fd_conn *c) {
    shm_state *s = c->state;
    /* who has taken our mark away has sent, or is about to send, a byte: a later sleep may find it */
    atomic_store_explicit(&shm_lane_counters(s, s->side)->sleeping, 0, memory_order_relaxed);
    shm_drain(c, s);
}

static void shm_close(fd_conn *c) {
    shm_detach(c->state);
    c->state = NULL;
}

static const fd_plane PLANE_SHM = {
    .name = "shm",
    .room = shm_room,
    .send = shm_send,
    .header = shm_header,
    .payload = shm_payload,
    .view = shm_view,
    .release = shm_release,
    .reserve = shm_reserve,
    .more = shm_more,
    .arm = shm_arm,
    .disarm = shm_disarm,
    .close = shm_close,
};

#endif
