/* A thread team for the kernels: libgomp's own entry point, called through a pointer.
 *
 * Why not `#pragma omp parallel`: it binds to the libgomp this extension was linked with, and torch's
 * wheel brings another one. Two pools in one process spin against each other for the same cores. So the
 * region is started through a pointer to GOMP_parallel (a stable ABI, exported by libgomp, libomp and
 * libiomp5 alike), which team_share() moves to the library that is already loaded.
 */
#ifndef FASTDECODE_TEAM_H
#define FASTDECODE_TEAM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <string.h>

typedef void (*team_body_fn)(void *arg, int tid);
typedef void (*gomp_parallel_fn)(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags);

extern void GOMP_parallel(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags);

static gomp_parallel_fn team_parallel = GOMP_parallel;

typedef struct {
    team_body_fn body;
    void *arg;
    _Atomic int next_tid;
} team_region;

static void team_trampoline(void *data) {
    team_region *region = (team_region *)data;
    region->body(region->arg, atomic_fetch_add_explicit(&region->next_tid, 1, memory_order_relaxed));
}

/* Runs body(arg, tid) on num_threads threads, tid = 0 .. num_threads-1, and returns when all are done.
 * OpenMP may give fewer threads than asked for: bodies take their work from a shared counter and never
 * assume that every tid shows up. */
static inline void team_run(int num_threads, team_body_fn body, void *arg) {
    if (num_threads <= 1) {
        body(arg, 0);
        return;
    }
    team_region region = {body, arg, 0};
    team_parallel(team_trampoline, &region, (unsigned)num_threads, 0);
}

static int team_find(struct dl_phdr_info *info, size_t length, void *found) {
    (void)length;
    const char *base = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    base = base ? base + 1 : info->dlpi_name;
    if (!base || !info->dlpi_name[0]) return 0;
    if (strncmp(base, "libgomp", 7) && strncmp(base, "libomp", 6) && strncmp(base, "libiomp5", 8)) return 0;
    void *handle = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return 0;
    gomp_parallel_fn fn = (gomp_parallel_fn)dlsym(handle, "GOMP_parallel");
    /* torch's wheel renames its copy (libgomp-1a2b3c4d.so.1); ours has the plain name */
    if (fn && fn != GOMP_parallel) *(gomp_parallel_fn *)found = fn;
    dlclose(handle);
    return 0;
}

/* Moves this extension's regions to another OpenMP runtime already in the process; 1 if there is one. */
static inline int team_share(void) {
    gomp_parallel_fn found = NULL;
    dl_iterate_phdr(team_find, &found);
    if (found) team_parallel = found;
    return found != NULL;
}

#endif
