"""CPU GEMM over packed weights and fused row operations. Unpacks addresses; ops.py validates."""

from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memset


cdef extern from "dense.h" nogil:
    void team_bind(uintptr_t address)
    int dense_isa
    int DENSE_NUM_ISAS
    const char *dense_isas[]
    int isa_cpu_has(const char *name)
    int dense_isa_supported(int isa)
    void dense_gemm(const float *x, int64_t x_stride, int64_t m, const void *packed, int weight_type,
                    int64_t n, int64_t k, const float *bias, float *out, int64_t out_stride,
                    int accumulate, int num_threads)
    void dense_rows(int op, const void *job, int64_t m, int64_t width, int num_threads)
    int64_t dense_block_at(int weight_type, int64_t k)
    void dense_pack(const void *weight, int row_type, int64_t count, int64_t k, int64_t n0, int weight_type,
                    void *packed)
    int64_t dense_gather(const void *packed, int weight_type, int64_t n, int64_t k, const int64_t *ids,
                         int64_t count, float *out)
    int DENSE_OP_NORM, DENSE_OP_QKV, DENSE_OP_ACT, DENSE_OP_SOFTCAP, DENSE_SOFTCAP_BLOCK
    ctypedef struct dense_attend_job:
        const float *q
        const float *k
        const float *v
        float *out
        int64_t q_stride, kv_stride, out_stride, num_rows, length, num_q_heads, num_kv_heads, head_dim, window
        float scale, softcap
        const float *sinks
        const float *slopes
    int dense_attend(dense_attend_job *job, int num_threads)
    ctypedef struct dense_norm_job:
        float *x
        const float *y
        const float *weight
        const float *bias
        float *out
        int64_t n
        int64_t x_stride
        int64_t out_stride
        float eps
        float offset
        int layer_norm
    ctypedef struct dense_rows_job:
        const float *qkv
        float *out
        const int64_t *positions
        const float *cosine
        const float *sine
        const float *q_norm
        const float *k_norm
        int64_t num_q_heads
        int64_t num_kv_heads
        int64_t head_dim
        int64_t half
        float eps
        float offset
    ctypedef struct dense_act_job:
        const float *x
        float *out
        int64_t n
        int64_t x_stride
        int kind
        int gated
    ctypedef struct dense_softcap_job:
        float *x
        int64_t n
        float cap


FP32, BF16, INT8 = 0, 1, 2
SILU, GELU_TANH, RELU = 0, 1, 2
ISA_NAMES = tuple(dense_isas[i].decode() for i in range(DENSE_NUM_ISAS))  # of this build


def bind_team(uintptr_t address):
    """Runs parallel regions on the team at that address (_team.address())."""
    team_bind(address)


def cpu_has(str name):
    """Returns whether this CPU can run an instruction set, whether or not a kernel of this build is made for it."""
    encoded = name.encode()
    return bool(isa_cpu_has(encoded))


def set_isa(int isa):
    """Chooses the instruction set by its place in ISA_NAMES; returns False if this CPU lacks it."""
    global dense_isa
    if not dense_isa_supported(isa):
        return False
    dense_isa = isa
    return True


def panel_bytes(int weight_type, int64_t k):
    """Bytes of a panel of 16 columns [K, 16] of that type."""
    return dense_block_at(weight_type, k)


def pack(uintptr_t weight, int row_type, int64_t count, int64_t k, int64_t n0, int weight_type, uintptr_t packed):
    """Packs `count` rows of a [N, K] weight (fp32, or bf16 bits) that start at row n0, as their own type or INT8."""
    with nogil:
        dense_pack(<const void *>weight, row_type, count, k, n0, weight_type, <void *>packed)


def gather(uintptr_t packed, int weight_type, int64_t n, int64_t k, uintptr_t ids, int64_t count, uintptr_t out):
    """Copies whole rows out of a packed matrix; returns the index of the first bad id, or -1."""
    return dense_gather(<const void *>packed, weight_type, n, k, <const int64_t *>ids, count, <float *>out)


def gemm(uintptr_t x, int64_t x_stride, int64_t m, uintptr_t packed, int weight_type, int64_t n, int64_t k,
         uintptr_t bias, uintptr_t out, int64_t out_stride, bint accumulate, int num_threads):
    """out [m, n] (+)= x [m, k] @ weight.T + bias; fp32, row-major, strides in elements."""
    with nogil:
        dense_gemm(<const float *>x, x_stride, m, <const void *>packed, weight_type, n, k,
                   <const float *>bias, <float *>out, out_stride, accumulate, num_threads)


def norm(uintptr_t x, uintptr_t y, uintptr_t weight, uintptr_t bias, uintptr_t out, int64_t m, int64_t n,
         float eps, float offset, bint layer_norm, int num_threads, int64_t x_stride=0, int64_t out_stride=0):
    """x [m, n] += y (unless 0), in place; out = RMS norm or LayerNorm of x. Strides in elements; 0 means n."""
    cdef dense_norm_job job
    job.x, job.y, job.weight, job.bias = <float *>x, <const float *>y, <const float *>weight, <const float *>bias
    job.out, job.n, job.eps, job.offset, job.layer_norm = <float *>out, n, eps, offset, layer_norm
    job.x_stride, job.out_stride = x_stride or n, out_stride or n
    with nogil:
        dense_rows(DENSE_OP_NORM, &job, m, n, num_threads)


def qkv_rows(uintptr_t qkv, uintptr_t out, uintptr_t positions, uintptr_t cosine, uintptr_t sine, uintptr_t q_norm,
             uintptr_t k_norm, int64_t m, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim, int64_t half,
             float eps, float offset, int num_threads):
    """Per-head norm and rotary of q and k, v as it is; rows [q | k | v] to out, which may be qkv."""
    cdef dense_rows_job job
    job.qkv, job.out, job.positions = <const float *>qkv, <float *>out, <const int64_t *>positions
    job.cosine, job.sine = <const float *>cosine, <const float *>sine
    job.q_norm, job.k_norm = <const float *>q_norm, <const float *>k_norm
    job.num_q_heads, job.num_kv_heads, job.head_dim, job.half = num_q_heads, num_kv_heads, head_dim, half
    job.eps, job.offset = eps, offset
    with nogil:
        dense_rows(DENSE_OP_QKV, &job, m, (num_q_heads + 2 * num_kv_heads) * head_dim, num_threads)


def activate(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t m, int64_t n, int kind, bint gated,
             int num_threads):
    """out [m, n] = act(x[:, :n]), times x[:, n:2n] when gated."""
    cdef dense_act_job job
    job.x, job.out, job.n, job.x_stride, job.kind, job.gated = <const float *>x, <float *>out, n, x_stride, kind, gated
    with nogil:
        dense_rows(DENSE_OP_ACT, &job, m, 4 * n, num_threads)


def softcap(uintptr_t x, int64_t n, float cap, int num_threads):
    """x [n] = cap * tanh(x / cap), in place."""
    cdef dense_softcap_job job
    job.x, job.n, job.cap = <float *>x, n, cap
    with nogil:
        dense_rows(DENSE_OP_SOFTCAP, &job, (n + DENSE_SOFTCAP_BLOCK - 1) // DENSE_SOFTCAP_BLOCK,
                   DENSE_SOFTCAP_BLOCK, num_threads)


def attend(uintptr_t q, int64_t q_stride, uintptr_t k, uintptr_t v, int64_t kv_stride, uintptr_t out,
           int64_t out_stride, int64_t num_rows, int64_t length, int64_t num_q_heads, int64_t num_kv_heads,
           int64_t head_dim, int64_t window, float scale, float softcap, uintptr_t sinks, uintptr_t slopes,
           int num_threads):
    """Causal attention of the last num_rows of `length` positions; 0 means no window, softcap, sinks or slopes.

    Raises MemoryError if no thread got its scratch memory.
    """
    cdef dense_attend_job job
    cdef int failed
    memset(&job, 0, sizeof(job))
    job.q, job.k, job.v, job.out = <const float *>q, <const float *>k, <const float *>v, <float *>out
    job.q_stride, job.kv_stride, job.out_stride = q_stride, kv_stride, out_stride
    job.num_rows, job.length, job.window = num_rows, length, window
    job.num_q_heads, job.num_kv_heads, job.head_dim = num_q_heads, num_kv_heads, head_dim
    job.scale, job.softcap = scale, softcap
    job.sinks, job.slopes = <const float *>sinks, <const float *>slopes
    with nogil:
        failed = dense_attend(&job, num_threads)
    if failed:
        raise MemoryError("no memory for the scratch of prefill attention")
