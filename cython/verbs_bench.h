/* perftest's loops over a bare queue pair: write, send or read, one message at a time or many under way.
 *
 * Both ends have one slot to send from and one that the peer writes into or reads from. A message that was
 * written is seen by its last byte, which counts; others by their completions. Numbers of messages go on from
 * one run to the next, so reports that nobody waited for do no harm. */
#ifndef FASTDECODE_VERBS_BENCH_H
#define FASTDECODE_VERBS_BENCH_H

#include <poll.h>
#include <sched.h>

#include "plane.h"
#include "verbs_queue.h"

enum { VERBS_BENCH_WRITE, VERBS_BENCH_SEND, VERBS_BENCH_READ };
enum { VERBS_QUIET_NS = 100000000 };
enum { VERBS_LIST = 64, VERBS_RING = 4096, VERBS_WINDOWS = 8, VERBS_PATIENT_SPINS = 2000, VERBS_NAP_MS = 20 };

typedef struct {
    verbs_queue *q;
    char *in; /* [slot_bytes], the peer writes or sends into it */
    int kind;
    int posts;   /* this end posts messages */
    int answers; /* of latency: only after the peer's */
    int both;    /* of bandwidth: so does the peer */
    int events;  /* sleep on the completion channel instead of polling */
    uint64_t nbytes, iterations, max_ns; /* iterations 0: until max_ns have passed or it is stopped */
    uint64_t idle_ns;                    /* so long without news: given up */
    uint32_t depth, list, cq_mod;
    uint64_t *times; /* latency: [capacity] nanoseconds of the last round trips */
    uint64_t capacity;
    volatile int stopped;
    /* results */
    volatile uint64_t done, received;
    uint64_t elapsed_ns;
    double peak; /* bytes per nanosecond over a window of messages; 0: too few for one */
    int status;  /* of a completion that failed */
    /* while it runs; the first three outlive a run */
    uint64_t posted, completed;
    uint32_t receives, num_receives;
    uint64_t base, signalled, moved_ns;
    uint32_t spins;
    uint64_t posted_ns[VERBS_RING];
} verbs_bench;

/* Posts receives up to `num_receives`, each as long as a slot. */
static int verbs_bench_replenish(verbs_bench *b) {
    struct ibv_sge part = {(uintptr_t)b->in, b->q->slot_bytes, b->q->mr->lkey};
    struct ibv_recv_wr requests[VERBS_LIST], *bad;
    while (b->receives < b->num_receives) {
        uint32_t left = b->num_receives - b->receives, batch = left < VERBS_LIST ? left : VERBS_LIST;
        for (uint32_t i = 0; i < batch; i++)
            requests[i] = (struct ibv_recv_wr){.wr_id = VERBS_RECEIVE,
                                               .sg_list = &part,
                                               .num_sge = 1,
                                               .next = i + 1 < batch ? &requests[i + 1] : NULL};
        int error = ibv_post_recv(b->q->qp, requests, &bad);
        if (error) return -error;
        b->receives += batch;
    }
    return 0;
}

/* Posts `count` messages in one call; one in `cq_mod` is reported, and the last if `report`. */
static int verbs_bench_post(verbs_bench *b, uint32_t count, int report) {
    static const enum ibv_wr_opcode OPCODES[] = {IBV_WR_RDMA_WRITE, IBV_WR_SEND, IBV_WR_RDMA_READ};
    verbs_queue *q = b->q;
    int is_read = b->kind == VERBS_BENCH_READ;
    struct ibv_sge part = {(uintptr_t)(is_read ? b->in : q->slots), (uint32_t)b->nbytes, q->mr->lkey};
    struct ibv_send_wr requests[VERBS_LIST], *bad;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t number = ++b->posted;
        requests[i] = (struct ibv_send_wr){.wr_id = number,
                                           .sg_list = &part,
                                           .num_sge = 1,
                                           .opcode = OPCODES[b->kind],
                                           .next = i + 1 < count ? &requests[i + 1] : NULL};
        if (number % b->cq_mod == 0 || (report && i + 1 == count)) {
            requests[i].send_flags |= IBV_SEND_SIGNALED;
            b->signalled = number;
        }
        if (!is_read && b->nbytes <= q->max_inline) requests[i].send_flags |= IBV_SEND_INLINE;
        requests[i].wr.rdma.remote_addr = q->remote;
        requests[i].wr.rdma.rkey = q->rkey;
        b->posted_ns[number % VERBS_RING] = now_ns();
    }
    return -ibv_post_send(q->qp, requests, &bad);
}

/* Messages up to `completed` are through: how fast were the last windows of them? */
static void verbs_bench_peak(verbs_bench *b) {
    uint64_t window = (uint64_t)VERBS_WINDOWS * b->depth;
    if (window >= VERBS_RING || b->done < window) return;
    double took = (double)(now_ns() - b->posted_ns[(b->completed - window + 1) % VERBS_RING]);
    double rate = (double)window * (double)b->nbytes / took;
    if (rate > b->peak) b->peak = rate;
}

/* Takes completions: how many, or -errno. */
static int verbs_bench_poll(verbs_bench *b) {
    struct ibv_wc found[VERBS_BATCH];
    int count = ibv_poll_cq(b->q->cq, VERBS_BATCH, found);
    if (count < 0) return -EIO;
    for (int i = 0; i < count; i++) {
        if (found[i].status != IBV_WC_SUCCESS) {
            b->status = (int)found[i].status;
            return -EIO;
        }
        if (found[i].wr_id == VERBS_RECEIVE) {
            b->receives--;
            b->received++;
        } else
            b->completed = found[i].wr_id;
    }
    if (b->completed > b->base) b->done = b->completed - b->base;
    if (count) b->moved_ns = now_ns();
    int error = verbs_bench_replenish(b);
    return error ? error : count;
}

/* Nothing came: 0 go on looking, or -errno. Where both ends share a processor the other must run too. */
static int verbs_bench_idle(verbs_bench *b) {
    if (b->stopped) return -ECANCELED;
    if (now_ns() - b->moved_ns > b->idle_ns) return -ETIMEDOUT;
    if (++b->spins % VERBS_PATIENT_SPINS == 0) sched_yield();
    else spin_pause();
    if (!b->events) return 0;
    int error = ibv_req_notify_cq(b->q->cq, 0);
    if (error) return -error;
    int count = verbs_bench_poll(b); /* what came before it was armed */
    if (count) return count < 0 ? count : 0;
    struct pollfd news = {b->q->channel->fd, POLLIN, 0};
    poll(&news, 1, VERBS_NAP_MS);
    verbs_disarm(b->q);
    return 0;
}

/* Polls, and if nothing came looks whether to go on: 0, or -errno. */
static int verbs_bench_look(verbs_bench *b) {
    int rc = verbs_bench_poll(b);
    if (!rc) rc = verbs_bench_idle(b);
    return rc < 0 ? rc : 0;
}

/* Waits until the peer's message `number` of this run is here; of a read, until it is through. */
static int verbs_bench_await(verbs_bench *b, uint64_t number) {
    volatile char *last = b->in + b->nbytes - 1;
    int rc;
    for (;;) {
        if (b->kind == VERBS_BENCH_WRITE && *last == (char)(uint8_t)number) {
            b->moved_ns = now_ns();
            return 0;
        }
        if (b->kind == VERBS_BENCH_SEND && b->received >= number) return 0;
        if (b->kind == VERBS_BENCH_READ && b->done >= number) return 0;
        if ((rc = verbs_bench_look(b)) < 0) return rc;
    }
}

static int verbs_bench_over(const verbs_bench *b, uint64_t count, uint64_t start) {
    if (b->stopped) return 1;
    if (b->iterations) return count >= b->iterations;
    return b->max_ns && now_ns() - start >= b->max_ns;
}

/* One message at a time: 0 or -errno. */
static int verbs_bench_latency(verbs_bench *b) {
    uint64_t start = now_ns(), before = start, count = 0;
    int rc;
    while (!verbs_bench_over(b, count, start)) {
        count++;
        if (b->answers && (rc = verbs_bench_await(b, count)) < 0) return rc;
        while (b->posted - b->completed >= b->depth)
            if ((rc = verbs_bench_look(b)) < 0) return rc;
        if (b->kind == VERBS_BENCH_WRITE) b->q->slots[b->nbytes - 1] = (char)(uint8_t)count;
        if ((rc = verbs_bench_post(b, 1, b->kind == VERBS_BENCH_READ))) return rc;
        if (!b->answers) {
            if ((rc = verbs_bench_await(b, count)) < 0) return rc;
            uint64_t now = now_ns();
            b->times[(count - 1) % b->capacity] = now - before;
            before = now;
        }
    }
    b->elapsed_ns = now_ns() - start;
    b->done = count;
    return b->stopped ? -ECANCELED : 0;
}

/* Whether the peer may still send: then receives must be there. */
static int verbs_bench_owes(const verbs_bench *b) {
    if (!b->posts) return 1;
    if (b->kind != VERBS_BENCH_SEND || !b->num_receives || !b->both) return 0;
    return b->iterations ? b->received < b->iterations : now_ns() - b->moved_ns < VERBS_QUIET_NS;
}

/* Many messages under way: 0 or -errno. An end that posts none takes in what comes until it is stopped. */
static int verbs_bench_stream(verbs_bench *b) {
    uint64_t start = now_ns();
    int rc = 0, over = 0;
    while (b->posts && !over && rc >= 0) {
        uint64_t room = b->depth - (b->posted - b->completed), sent = b->posted - b->base;
        uint64_t count = b->iterations && b->iterations - sent < b->list ? b->iterations - sent : b->list;
        rc = 0;
        if (room >= count) {
            rc = verbs_bench_post(b, (uint32_t)count, b->list > 1 || sent + count == b->iterations);
            over = verbs_bench_over(b, sent + count, start);
            if (over && b->signalled < b->posted && rc == 0) rc = verbs_bench_post(b, 1, 1);
        }
        if (rc == 0) rc = verbs_bench_poll(b);
        if (rc > 0) verbs_bench_peak(b);
        if (rc == 0 && room < count) rc = verbs_bench_idle(b);
    }
    while (b->posts && rc >= 0 && b->completed < b->posted) rc = verbs_bench_look(b);
    b->elapsed_ns = now_ns() - start;
    while (rc >= 0 && !b->stopped && verbs_bench_owes(b)) {
        if (!b->posts) b->moved_ns = now_ns(); /* whoever posts says when it is over */
        rc = verbs_bench_look(b);
    }
    if (!b->posts && (rc == -ECANCELED || rc >= 0)) return 0; /* that is how it ends */
    if (b->stopped) return -ECANCELED;
    return rc < 0 ? rc : 0;
}

#endif
