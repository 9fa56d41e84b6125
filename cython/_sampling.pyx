"""Rows of logits -> tokens. Unpacks addresses; sampling.py validates."""

from libc.stdint cimport int64_t, uint32_t, uintptr_t


cdef extern from "sampling.h" nogil:
    ctypedef struct sampling_row:
        pass
    ctypedef struct sampling_top:
        pass
    ctypedef struct sampling_score:
        pass
    void team_bind(uintptr_t address)
    int sampling_isa
    int SAMPLING_NUM_ISAS
    const char *sampling_isas[]
    int isa_cpu_has(const char *name)
    int sampling_isa_supported(int isa)
    void sampling_philox(const uint32_t *counters, const uint32_t *keys, uint32_t *out, int64_t num)
    void sampling_run(sampling_row *rows, int64_t num_rows, int64_t vocab_size, int num_threads)
    void sampling_score_run(sampling_score *rows, int64_t num_rows, int64_t vocab_size, int num_threads)


ROW_BYTES, TOP_BYTES, SCORE_BYTES = sizeof(sampling_row), sizeof(sampling_top), sizeof(sampling_score)
ISA_NAMES = tuple(sampling_isas[i].decode() for i in range(SAMPLING_NUM_ISAS))  # of this build


def bind_team(uintptr_t address):
    """Runs parallel regions on the team at that address (_team.address())."""
    team_bind(address)


def cpu_has(str name):
    """Returns whether this CPU can run an instruction set, whether or not a kernel of this build is made for it."""
    encoded = name.encode()
    return bool(isa_cpu_has(encoded))


def set_isa(int isa):
    """Chooses the instruction set by its place in ISA_NAMES; returns False if this CPU lacks it."""
    global sampling_isa
    if not sampling_isa_supported(isa):
        return False
    sampling_isa = isa
    return True


def philox(uintptr_t counters, uintptr_t keys, uintptr_t out, int64_t num):
    """out [num, 4] = Philox4x32-10 of counters [num, 4] under keys [num, 2], all uint32."""
    sampling_philox(<const uint32_t *>counters, <const uint32_t *>keys, <uint32_t *>out, num)


def sample(uintptr_t rows, int64_t num_rows, int64_t vocab_size, int num_threads):
    """Fills in the tokens of an array of rows, each of which points at its logits [V]."""
    with nogil:
        sampling_run(<sampling_row *>rows, num_rows, vocab_size, num_threads)


def score(uintptr_t rows, int64_t num_rows, int64_t vocab_size, int num_threads):
    """Fills in the log-probabilities of an array of rows, each of which points at its logits [V]."""
    with nogil:
        sampling_score_run(<sampling_score *>rows, num_rows, vocab_size, num_threads)
