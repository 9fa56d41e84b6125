/* What carries the frames of one connection: a table of functions per kind of plane (TCP, shared memory,
 * RDMA), and the connection that all of them share. No allocation per frame, no GIL.
 *
 * A plane is reliable and ordered. Whatever it does not like about the peer it says with conn_fail(), and
 * returns -1 from then on. `block` says whether a call may wait for the peer; without it 0 means "not now". */
#ifndef FASTDECODE_PLANE_H
#define FASTDECODE_PLANE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll, strerror_r that returns text */
#endif
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

#include "frame.h"

enum { CONN_RING = 32, CONN_PARTS = 2, CONN_REASON = 200 };
enum { CONN_ALIVE = 0, CONN_CLOSED = 1, CONN_PROTOCOL = 2 };
enum { PLANE_FDS = 2 }; /* descriptors that a sleeping connection listens to, at most */

/* One frame on its way out. */
typedef struct {
    fd_frame head;
    struct iovec part[CONN_PARTS];
    size_t nbytes, sent; /* header and payload together */
    int started;
} conn_tx;

typedef struct fd_conn fd_conn;

typedef struct {
    const char *name;
    /* Whether a frame can be started: its header is final once it is, and its sequence number given.
     * NULL: always. */
    int (*room)(fd_conn *c, const conn_tx *tx, int block);
    /* Sends a started frame: 1 all of it is gone, 0 some is left (call again), -1 lost. */
    int (*send)(fd_conn *c, conn_tx *tx, int block);
    /* Receives the next header into c->head, which the caller checks: 1, 0, -1. */
    int (*header)(fd_conn *c, int block);
    /* Receives the payload of c->head into c->part, or drops c->discard_left bytes of it: 1, 0, -1. */
    int (*payload)(fd_conn *c, int block);
    /* Where the whole payload of c->head lies, readable until release(). NULL: only payload() gets it. */
    void *(*view)(fd_conn *c);
    /* The frame that was viewed is done with; once more does nothing. */
    void (*release)(fd_conn *c);
    /* Planes with view(): where the payload of the next frame may be built, so that sending it copies
     * nothing. Waits for room. The next frame that is queued uses it, or none does. NULL: lost. */
    void *(*reserve)(fd_conn *c, uint16_t kind, size_t nbytes);
    /* Whether header() would find something, as far as that is known without a system call. */
    int (*more)(fd_conn *c);
    /* Before sleeping until `events` (POLLIN, POLLOUT: room() or send() would go on): fills in what to poll
     * and returns how many; 0: do not sleep, it is there already. */
    int (*arm)(fd_conn *c, short events, struct pollfd *fds);
    /* After sleeping, whatever woke us; NULL: nothing to do. */
    void (*disarm)(fd_conn *c);
    /* Frees what the plane holds besides c->fd; idempotent. NULL: nothing. */
    void (*close)(fd_conn *c);
} fd_plane;

struct fd_conn {
    const fd_plane *plane;
    void *state;      /* the plane's own */
    uint64_t spin_ns; /* how long to look for the peer's news before sleeping */
    int fd;           /* the authenticated socket: ends with the peer, and shutting it down wakes a sleeper */
    int lost;         /* CONN_ALIVE or why it ended */
    int lost_errno;
    int clean_end; /* lost, but between two frames and by the peer's own doing */
    char reason[CONN_REASON];
    uint64_t epoch;
    uint32_t tx_sequence, rx_sequence;
    uint32_t slots[FD_CLASSES];         /* of the peer, agreed in the handshake; 0: no credits needed */
    uint32_t sent[FD_CLASSES];          /* frames sent since the start */
    uint32_t peer_consumed[FD_CLASSES]; /* of those, what the peer says it has consumed */
    uint32_t consumed[FD_CLASSES];      /* frames received and done with */
    uint32_t reported[FD_CLASSES];      /* of those, what the peer has been told */
    conn_tx ring[CONN_RING];
    uint32_t tx_first, tx_last; /* free-running; equal when nothing waits */
    int no_credit;              /* the first frame of the ring waits for a credit, not for the plane */
    fd_frame head;              /* private copy of the header being served, checked */
    struct iovec part[CONN_PARTS]; /* where the rest of head's payload goes */
    size_t payload_left, discard_left;
    int in_payload;
    fd_frame next; /* stream planes: header being received */
    size_t next_have;
    uint64_t frames_sent, frames_received, bytes_sent, bytes_received, io_ns;
};

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
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

/* The peer closed the connection; `between` frames that is its good right. */
static int conn_ended(fd_conn *c, int between) {
    c->clean_end = between && !c->lost;
    return conn_fail(c, CONN_CLOSED, "the peer closed the connection");
}

/* Tells the processor that we spin, so that the other thread of its core gets on. */
static inline void spin_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Looks for news for the connection's spin budget; 1 when there are some. */
static inline int conn_spin(fd_conn *c) {
    if (c->plane->more(c)) return 1;
    if (!c->spin_ns) return 0;
    uint64_t end = now_ns() + c->spin_ns;
    do {
        for (int i = 0; i < 64; i++) {
            if (c->plane->more(c)) return 1;
            spin_pause();
        }
    } while (now_ns() < end);
    return 0;
}

/* For a caller that blocks: sleeps until the plane may go on. An interrupted sleep counts as one. */
static inline void conn_sleep(fd_conn *c, short events) {
    struct pollfd fds[PLANE_FDS];
    int count = c->plane->arm(c, events, fds);
    if (count) poll(fds, (nfds_t)count, -1);
    if (c->plane->disarm) c->plane->disarm(c);
}

#endif
