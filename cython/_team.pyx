"""The thread team that all kernels of this process share; see team_pool.h."""

from libc.stdint cimport uintptr_t


cdef extern from "team_pool.h" nogil:
    void team_pool_run(int num_threads, void (*body)(void *arg, int tid) noexcept nogil, void *arg)


def address():
    """Returns the address of the team's entry point, to be bound by the other extensions."""
    return <uintptr_t>&team_pool_run
