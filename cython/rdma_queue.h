/* What the RDMA plane needs of a queue pair: a handful of calls that either C over libibverbs (verbs_queue.h)
 * or a Python object (any binding, and the tests' imitation) fills in. */
#ifndef FASTDECODE_RDMA_QUEUE_H
#define FASTDECODE_RDMA_QUEUE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { RDMA_RECEIVED = 1, RDMA_SENT = 2 };

/* One completion. */
typedef struct {
    int kind;
    int status;      /* 0, or why it failed: for explain() */
    uint32_t imm;    /* RECEIVED */
    uint32_t nbytes; /* RECEIVED */
    uint32_t count;  /* SENT: what write() was given; all writes before it are done too */
} rdma_event;

/* `self` is the queue's own. Calls return 0 or an errno, unless said otherwise; none of them waits. */
typedef struct {
    /* Writes the first `nbytes` of slot `slot` to the same slot of the peer, with immediate data. nbytes 0:
     * no slot. count != 0: its completion is reported. */
    int (*write)(void *self, uint32_t slot, uint32_t nbytes, uint32_t imm, uint32_t count);
    /* Posts `count` more empty receives. */
    int (*receive)(void *self, uint32_t count);
    /* Takes completions: how many, or -errno. */
    int (*poll)(void *self, rdma_event *events, int max);
    /* The next completion makes the descriptor readable. */
    int (*arm)(void *self);
    /* Takes what made it readable. */
    void (*disarm)(void *self);
    void (*explain)(void *self, int status, char *text, size_t capacity);
    /* Ends the queue pair, then its memory's registration. Idempotent. */
    void (*close)(void *self);
} rdma_queue_ops;

/* Statuses of completions as the verbs number them (ibv_wc_status), in words, with the route: that is what
 * tells a wrong GID from a dead peer. */
static inline void rdma_explain(int status, const char *route, char *text, size_t capacity) {
    const char *what;
    switch (status) {
    case 4:
        what = "RDMA memory is not registered (local protection error)";
        break;
    case 5:
        what = "the RDMA queue pair was ended (flushed)";
        break;
    case 9:
        what = "the peer took the RDMA write for invalid";
        break;
    case 10:
        what = "the peer's adapter refused the RDMA write: wrong key, or its memory is gone";
        break;
    case 12:
        what = "no answer over RDMA (retries exhausted): dead peer, wrong GID or MTU, or UDP port 4791 blocked";
        break;
    case 13:
        what = "the peer posted no receive for the RDMA write";
        break;
    default:
        snprintf(text, capacity, "an RDMA operation failed with status %d; %s", status, route);
        return;
    }
    snprintf(text, capacity, "%s; %s", what, route);
}

#endif
