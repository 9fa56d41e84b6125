"""The thread team that all kernels of this process share; see team_pool.h."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t


cdef extern from "team_pool.h" nogil:
    enum:
        TEAM_MAX_THREADS
        TEAM_CPU_WORDS
    void team_pool_run(int num_threads, void (*body)(void *arg, int tid) noexcept nogil, void *arg)
    void team_pool_place(int number, const uint64_t *cpus)
    void team_pool_spin(int64_t spin_ns)

MAX_THREADS = TEAM_MAX_THREADS
MASK_BYTES = 8 * TEAM_CPU_WORDS

cdef dict masks = {}  # what the helpers' pointers point to: never taken back


def address():
    """Returns the address of the team's entry point, to be bound by the other extensions."""
    return <uintptr_t>&team_pool_run


def place(int number, bytes cpus):
    """Binds helper `number`, from 1 on and running or not yet, to a mask of MASK_BYTES; bit i % 64 of word i / 64
    is CPU i."""
    if not 1 <= number < TEAM_MAX_THREADS or len(cpus) != MASK_BYTES:
        raise ValueError("a helper's number and a mask of MASK_BYTES are needed")
    cpus = masks.setdefault(cpus, cpus)
    team_pool_place(number, <const uint64_t *><const char *>cpus)


def set_spin_ns(int64_t spin_ns):
    """How long a helper without work looks for more before it sleeps, in this process and from now on."""
    if spin_ns < 0:
        raise ValueError("spin_ns must be at least 0")
    team_pool_spin(spin_ns)
