/* Shared memory as a plane: two processes of one machine touch the same pages. Rows are read where the peer
 * put them, and replies are built where the peer will read them.
 *
 * One memfd per connection, made by the engine, holds a page of counters and two lanes, one per direction.
 * A lane has a ring of headers and, per slot class, slots of a fixed size that are used in turn, so which
 * slot a frame lies in follows from its kind and its number and is never read from the peer; what fits no
 * slot (exported K/V, a very long step table) lies in one area of its own. A frame is published by counting
 * it, and its slot is free once the receiver has counted it as released.
 *
 * Whoever waits looks at the peer's counter for a while and then sleeps on the Unix socket of the connection,
 * into which the peer writes a byte if it finds a sleeper: that socket also ends with the peer, and shutting
 * it down wakes the sleeper, which a futex would not do.
 *
 * The peer may write anything into these pages at any time: headers are copied before they are checked,
 * counters are compared with what can be, and payloads are data. */
#ifndef FASTDECODE_PLANE_SHM_H
#define FASTDECODE_PLANE_SHM_H

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "plane.h"

enum { SHM_PAGE = 4096, SHM_LOOK = 64 /* frames between two looks at the socket of a busy peer */ };
enum { SHM_ENGINE = 0, SHM_WORKER = 1 }; /* sides; a lane has the number of the side that sends on it */
enum { SHM_WANTS_FRAME = 1, SHM_WANTS_ROOM = 2 };
#define SHM_TMPFS 0x01021994
#define SHM_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

typedef struct {
    _Alignas(64) _Atomic uint32_t published; /* by the sender: frames since the start */
    _Alignas(64) _Atomic uint32_t released;  /* by the receiver: of those, done with */
    _Alignas(64) _Atomic uint32_t sleeping;  /* what the side of this number sleeps for, SHM_WANTS_* */
} shm_counters;

_Static_assert(2 * sizeof(shm_counters) <= SHM_PAGE, "both lanes' counters fit into the first page");

typedef struct {
    uint32_t entries, slots[FD_CLASSES];
    size_t slot_bytes[FD_CLASSES], big_bytes;
    size_t header_at, slot_at[FD_CLASSES], big_at; /* from the start of the segment */
} shm_lane;

/* What both sides agree on; fixes the whole layout. */
typedef struct {
    uint32_t slots[FD_CLASSES];
    uint64_t slot_bytes[FD_CLASSES];
    uint64_t cold_bytes;
} shm_plan;

typedef struct {
    char *base;
    size_t nbytes;
    int side;
    shm_lane lane[2];
    uint32_t published, tx_entry, tx_slot[FD_CLASSES]; /* on our lane */
    uint32_t big_until;                                /* released count that frees the big area */
    uint32_t room_seen;                                /* released count at which there was no room */
    uint32_t taken, rx_entry, rx_slot[FD_CLASSES];     /* on the peer's lane */
    int ended;                                         /* the socket has ended: */
    uint32_t last;                                     /* frames published until then */
} shm_state;

static size_t shm_pages(size_t nbytes) { return (nbytes + SHM_PAGE - 1) / SHM_PAGE * SHM_PAGE; }

/* Lays out both lanes; returns the length of the segment. Replies are answers: as many as there may be
 * requests for rows, all in slots of the latency class. */
static size_t shm_layout(shm_lane *lanes, const shm_plan *plan) {
    size_t at = SHM_PAGE;
    for (int side = 0; side < 2; side++) {
        shm_lane *lane = &lanes[side];
        memset(lane, 0, sizeof *lane);
        for (int k = 0; k < FD_CLASSES; k++) {
            if (side == SHM_WORKER && k != FD_LATENCY) continue;
            lane->slots[k] = plan->slots[k];
            lane->slot_bytes[k] = shm_pages(plan->slot_bytes[k]);
        }
        lane->entries = lane->slots[FD_LATENCY];
        if (side == SHM_ENGINE) /* credits limit requests: a header is free by the time its slot is */
            lane->entries = 2 * (lane->slots[FD_LATENCY] + lane->slots[FD_BULK]);
        lane->header_at = at;
        at += shm_pages(lane->entries * sizeof(fd_frame));
        for (int k = 0; k < FD_CLASSES; k++) {
            lane->slot_at[k] = at;
            at += lane->slots[k] * lane->slot_bytes[k];
        }
        lane->big_at = at;
        lane->big_bytes = shm_pages(plan->cold_bytes);
        at += lane->big_bytes;
    }
    return at;
}

static shm_counters *shm_lane_counters(const shm_state *s, int side) { return (shm_counters *)s->base + side; }

/* Where the payload of a frame lies, NULL if it fits nowhere. */
static char *shm_place(const shm_state *s, const shm_lane *lane, const uint32_t *slot, uint16_t kind, uint64_t nbytes) {
    int class = frame_class(kind);
    if (nbytes <= lane->slot_bytes[class]) return s->base + lane->slot_at[class] + slot[class] * lane->slot_bytes[class];
    return nbytes <= lane->big_bytes ? s->base + lane->big_at : NULL;
}

static void shm_advance(const shm_lane *lane, uint32_t *entry, uint32_t *slot, uint16_t kind) {
    int class = frame_class(kind);
    *entry = (*entry + 1) % lane->entries;
    if (lane->slots[class]) slot[class] = (slot[class] + 1) % lane->slots[class];
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

static int shm_has_room(fd_conn *c, shm_state *s, uint16_t kind, uint64_t nbytes) {
    const shm_lane *lane = &s->lane[s->side];
    uint32_t released = atomic_load_explicit(&shm_lane_counters(s, s->side)->released, memory_order_acquire);
    uint32_t held = s->published - released;
    if (held > lane->entries) return conn_fail(c, CONN_PROTOCOL, "it released frames that were never sent");
    s->room_seen = released;
    if (held == lane->entries) return 0;
    if (nbytes <= lane->slot_bytes[frame_class(kind)]) return 1;
    if (nbytes > lane->big_bytes) return conn_fail(c, CONN_CLOSED, "a frame is longer than the segment allows");
    return s->published - s->big_until >= held || !held; /* the last one that lay there is released */
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

static void *shm_reserve(fd_conn *c, uint16_t kind, size_t nbytes) {
    shm_state *s = c->state;
    if (shm_wait_room(c, kind, nbytes, 1) < 0) return NULL;
    return shm_place(s, &s->lane[s->side], s->tx_slot, kind, nbytes);
}

static int shm_send(fd_conn *c, conn_tx *tx, int block) {
    (void)block; /* there is room: shm_room() said so */
    shm_state *s = c->state;
    const shm_lane *lane = &s->lane[s->side];
    uint16_t kind = tx->head.kind;
    uint64_t start = now_ns();
    char *to = shm_place(s, lane, s->tx_slot, kind, tx->head.nbytes);
    if (tx->head.nbytes > lane->slot_bytes[frame_class(kind)]) s->big_until = s->published + 1;
    for (int i = 0; i < CONN_PARTS; i++) {
        if (tx->part[i].iov_len && tx->part[i].iov_base != to) memcpy(to, tx->part[i].iov_base, tx->part[i].iov_len);
        to += tx->part[i].iov_len;
    }
    memcpy(s->base + lane->header_at + s->tx_entry * sizeof(fd_frame), &tx->head, sizeof(fd_frame));
    shm_advance(lane, &s->tx_entry, s->tx_slot, kind);
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
    memcpy(&c->head, s->base + lane->header_at + s->rx_entry * sizeof(fd_frame), sizeof(fd_frame));
    s->taken++;
    return 1;
}

static void *shm_view(fd_conn *c) {
    shm_state *s = c->state;
    c->bytes_received += sizeof(fd_frame) + c->head.nbytes;
    return shm_place(s, &s->lane[!s->side], s->rx_slot, c->head.kind, c->head.nbytes);
}

static void shm_release(fd_conn *c) {
    shm_state *s = c->state;
    shm_advance(&s->lane[!s->side], &s->rx_entry, s->rx_slot, c->head.kind);
    atomic_store_explicit(&shm_lane_counters(s, !s->side)->released, s->taken, memory_order_release);
    shm_ring(c, s, SHM_WANTS_ROOM);
}

static int shm_payload(fd_conn *c, int block) {
    (void)block; /* a published frame is there whole */
    uint64_t start = now_ns();
    const char *from = shm_view(c);
    if (!from) return conn_fail(c, CONN_PROTOCOL, "a frame of %llu bytes fits no slot", (unsigned long long)c->head.nbytes);
    for (int i = 0; i < CONN_PARTS && c->payload_left; i++) {
        if (c->part[i].iov_len) memcpy(c->part[i].iov_base, from, c->part[i].iov_len);
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
    shm_state *s = c->state;
    c->state = NULL;
    if (!s) return;
    munmap(s->base, s->nbytes);
    free(s);
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

/* Maps a segment; NULL and the reason if it is not what was agreed on. A segment that its maker could still
 * cut short would kill whoever touches the rest. */
static shm_state *shm_attach(int fd, int side, const shm_plan *plan, char *reason, size_t reason_bytes) {
    shm_lane lanes[2];
    size_t nbytes = shm_layout(lanes, plan);
    struct stat file;
    struct statfs system;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &file) || fstatfs(fd, &system)) {
        snprintf(reason, reason_bytes, "it is no memory segment");
        return NULL;
    }
    if ((seals & SHM_SEALS) != SHM_SEALS || system.f_type != SHM_TMPFS) {
        snprintf(reason, reason_bytes, "the segment is not sealed: its length could change");
        return NULL;
    }
    if ((uint64_t)file.st_size != nbytes) {
        snprintf(reason, reason_bytes, "the segment has %lld bytes where %zu were agreed on", (long long)file.st_size,
                 nbytes);
        return NULL;
    }
    shm_state *s = calloc(1, sizeof *s);
    char *base = s ? mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (base == MAP_FAILED) {
        snprintf(reason, reason_bytes, "cannot map %zu bytes: %s", nbytes, strerror(errno));
        free(s);
        return NULL;
    }
    s->base = base;
    s->nbytes = nbytes;
    s->side = side;
    memcpy(s->lane, lanes, sizeof lanes);
    return s;
}

#endif
