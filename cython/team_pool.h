/* The thread team of a process: one pool, fork-join regions, nobody waited for who has not begun.
 *
 * Why not `#pragma omp parallel`: an OpenMP region ends when every thread of its team has passed the
 * barrier, also one that was never scheduled because something else has its core. On a busy machine that
 * costs whole time slices (measured: 4 to 16 ms for regions of 100 us), a waiting thread spins for
 * milliseconds against whoever needs the core, and torch and an extension bring a runtime each. Here
 *
 *   - a helper joins a region only while it is open; the caller closes it when the work is used up and
 *     waits for those that joined, so a helper that wakes late costs nothing;
 *   - a helper that has nothing to do spins for a moment (spin_ns), which bridges the gap between two regions
 *     of a layer, then sleeps;
 *   - a second caller finds the team busy and runs its region alone: sessions of several engines do not
 *     oversubscribe the cores.
 *
 * On a machine of several NUMA nodes the helpers are bound to the CPUs of one node each: a node's team are the
 * members that run there. A body that has work for each node asks where it is, does that node's, then helps the
 * others out (nobody promises that a helper of each node shows up).
 */
#ifndef FASTDECODE_TEAM_POOL_H
#define FASTDECODE_TEAM_POOL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "team.h"

#define TEAM_MAX_THREADS 256
#define TEAM_CPU_WORDS 128 /* 8192 CPUs */
#define TEAM_SPIN_NS 100000 /* unless the process says otherwise: _team.set_spin_ns */

/* state: low 16 bits helpers that joined, bit 16 open, high 32 bits generation */
#define TEAM_OPEN (1ull << 16)
#define TEAM_JOINED(state) ((state) & 0xffffu)

/* Helper number i, from 1 on. */
typedef struct {
    _Atomic pid_t thread;           /* 0: has not begun */
    _Atomic(const uint64_t *) cpus; /* mask of TEAM_CPU_WORDS: where it may run; NULL: where the process may */
    uint32_t seen;                  /* the generation when it was started */
} team_helper;

static struct {
    _Atomic uint64_t state;
    _Atomic uint32_t wake;     /* futex: helpers sleep on it; the generation */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t finished; /* futex: the caller sleeps on it */
    _Atomic uint32_t waiting;  /* the caller sleeps, or is about to */
    _Atomic int limit;         /* helpers that may join */
    _Atomic int64_t spin_ns;
    team_body_fn body;
    void *arg;
    _Atomic int busy;
    int num_helpers;           /* started; changed by the busy caller only */
    team_helper helpers[TEAM_MAX_THREADS];
} team_pool = {.spin_ns = TEAM_SPIN_NS};

static inline void team_futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static inline void team_futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, count, 0, 0, 0);
}

static inline void team_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t team_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Joins the open region; the helper's number from 1 on, or 0 if there is none to join. */
static int team_join(void) {
    uint64_t state = atomic_load(&team_pool.state);
    while ((state & TEAM_OPEN) && (int)TEAM_JOINED(state) < atomic_load(&team_pool.limit))
        if (atomic_compare_exchange_weak(&team_pool.state, &state, state + 1))
            return (int)TEAM_JOINED(state) + 1;
    return 0;
}

/* Waits until the generation is another than `seen`: spins, then sleeps. */
static void team_await(uint32_t seen) {
    int64_t start = team_now_ns();
    for (int round = 0;; round++) {
        if (atomic_load(&team_pool.wake) != seen) return;
        team_pause();
        if (round % 64 == 63 && team_now_ns() - start > atomic_load(&team_pool.spin_ns)) break;
    }
    atomic_fetch_add(&team_pool.sleepers, 1);
    while (atomic_load(&team_pool.wake) == seen) team_futex_wait(&team_pool.wake, seen);
    atomic_fetch_sub(&team_pool.sleepers, 1);
}

/* Binds a helper that runs to its CPUs. Those may be gone meanwhile: then it stays where the system lets it. */
static void team_bind_helper(team_helper *helper) {
    const uint64_t *cpus = atomic_load(&helper->cpus);
    pid_t thread = atomic_load(&helper->thread);
    if (cpus && thread) syscall(SYS_sched_setaffinity, thread, TEAM_CPU_WORDS * sizeof *cpus, cpus);
}

/* How long a helper without work spins before it sleeps, from now on. */
static void team_pool_spin(int64_t spin_ns) { atomic_store(&team_pool.spin_ns, spin_ns); }

/* From now on helper `number` runs on these CPUs only; the mask stays where it is. */
static void team_pool_place(int number, const uint64_t *cpus) {
    atomic_store(&team_pool.helpers[number].cpus, cpus);
    team_bind_helper(&team_pool.helpers[number]);
}

static void *team_help(void *argument) {
    team_helper *self = argument;
    uint32_t seen = self->seen;
    atomic_store(&self->thread, (pid_t)syscall(SYS_gettid));
    team_bind_helper(self);
    for (;;) {
        team_await(seen);
        seen = atomic_load(&team_pool.wake);
        int tid = team_join();
        if (!tid) continue;
        team_pool.body(team_pool.arg, tid);
        atomic_fetch_add(&team_pool.finished, 1);
        if (atomic_load(&team_pool.waiting)) team_futex_wake(&team_pool.finished, 1);
    }
    return 0;
}

/* After a fork the child has no helpers: it starts its own. */
static void team_after_fork(void) {
    team_pool.num_helpers = 0;
    for (int i = 0; i < TEAM_MAX_THREADS; i++) atomic_store(&team_pool.helpers[i].thread, 0);
    atomic_store(&team_pool.sleepers, 0);
    atomic_store(&team_pool.busy, 0);
    atomic_store(&team_pool.state, 0);
}

/* Starts helpers up to num_helpers; those that cannot be started are done without. */
static void team_grow(int num_helpers) {
    if (team_pool.num_helpers >= num_helpers) return;
    static int registered = 0;
    if (!registered) registered = !pthread_atfork(0, 0, team_after_fork);
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    uint32_t seen = atomic_load(&team_pool.wake);
    for (; team_pool.num_helpers < num_helpers; team_pool.num_helpers++) {
        pthread_t thread;
        team_helper *helper = &team_pool.helpers[team_pool.num_helpers + 1];
        helper->seen = seen;
        if (pthread_create(&thread, 0, team_help, helper)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void team_pool_run(int num_threads, team_body_fn body, void *arg) {
    int free = 0;
    if (num_threads > TEAM_MAX_THREADS) num_threads = TEAM_MAX_THREADS;
    if (!atomic_compare_exchange_strong(&team_pool.busy, &free, 1)) {
        body(arg, 0);
        return;
    }
    team_grow(num_threads - 1);
    team_pool.body = body;
    team_pool.arg = arg;
    atomic_store(&team_pool.finished, 0);
    atomic_store(&team_pool.waiting, 0);
    atomic_store(&team_pool.limit, num_threads - 1);
    uint32_t generation = atomic_load(&team_pool.wake) + 1;
    atomic_store(&team_pool.state, (uint64_t)generation << 32 | TEAM_OPEN);
    atomic_store(&team_pool.wake, generation);
    if (atomic_load(&team_pool.sleepers)) team_futex_wake(&team_pool.wake, num_threads - 1);
    body(arg, 0);
    uint64_t state = atomic_fetch_and(&team_pool.state, ~TEAM_OPEN);
    uint32_t joined = (uint32_t)TEAM_JOINED(state), finished;
    for (int round = 0; (finished = atomic_load(&team_pool.finished)) != joined; round++) {
        team_pause();
        if (round < 2000) continue;
        atomic_store(&team_pool.waiting, 1);
        finished = atomic_load(&team_pool.finished);
        if (finished != joined) team_futex_wait(&team_pool.finished, finished);
    }
    atomic_store(&team_pool.busy, 0);
}

#endif
