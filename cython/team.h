/* Parallel regions for the kernels: team_run(num_threads, body, arg).
 *
 * All extensions of a process run on one team (cython/team_pool.h), whose address they are given with
 * team_bind. Before that, or with one thread, a region runs on the calling thread.
 */
#ifndef FASTDECODE_TEAM_H
#define FASTDECODE_TEAM_H

#include <stdint.h>

typedef void (*team_body_fn)(void *arg, int tid);
typedef void (*team_run_fn)(int num_threads, team_body_fn body, void *arg);

static team_run_fn team_bound = 0;

/* Gives this extension the team of the process, by address (fastdecode_rdma._team.address()). */
static inline void team_bind(uintptr_t address) { team_bound = (team_run_fn)address; }

/* Runs body(arg, tid) on up to num_threads threads, this one as tid 0, and returns when all that took
 * part are done. Fewer may take part, down to this one alone: bodies take their work from a shared
 * counter until it is used up, and never assume that a tid shows up. */
static inline void team_run(int num_threads, team_body_fn body, void *arg) {
    if (num_threads <= 1 || !team_bound) body(arg, 0);
    else team_bound(num_threads, body, arg);
}

#endif
