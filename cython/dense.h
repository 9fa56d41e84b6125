/* CPU GEMM over packed weights and the small row operations between two GEMMs of a decoder layer.
 *
 * Packed weights: panels of 16 output columns, [ceil(N/16)][K][16], fp32 or bf16, zero-padded. A decode
 * step is a skinny GEMM: the weights are read once from memory, in order, and the activations stay in
 * cache. bf16 weights are widened to fp32 in registers: exact, and half the bytes.
 */
#ifndef FASTDECODE_DENSE_H
#define FASTDECODE_DENSE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

#define DENSE_MR 6       /* 6 x 16 accumulators + 2 weight vectors + 1 broadcast fill 15 of 16 registers */
#define DENSE_KC 256     /* 16 x 256 x 4 B = 16 KiB: half an L1 cache */
#define DENSE_MBLOCK 128 /* rows per pass: their accumulators (8 KiB) and activations stay in L1 and L2 */

enum { DENSE_FP32 = 0, DENSE_BF16 = 1 };
enum { DENSE_SILU = 0, DENSE_GELU_TANH = 1, DENSE_RELU = 2 };
enum { DENSE_OP_NORM, DENSE_OP_QKV, DENSE_OP_ACT };

typedef float v8f __attribute__((vector_size(32)));
typedef float v8fu __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef uint32_t v8uu __attribute__((vector_size(32), aligned(2), may_alias));
typedef int32_t v8i __attribute__((vector_size(32)));

typedef struct {
    const float *x;
    const void *packed;
    const float *bias;
    float *out;
    int64_t m, n, k, x_stride, out_stride;
    int weight_type, accumulate;
    int64_t num_panels, panels_per_piece, pieces_per_block, num_blocks, num_pieces;
    _Atomic int64_t next;
} dense_gemm_job;

typedef struct {
    float *x;
    const float *y, *weight, *bias;
    float *out;
    int64_t n;
    float eps, offset;
    int layer_norm;
} dense_norm_job;

typedef struct {
    const float *qkv;
    float *out;
    const int64_t *positions;
    const float *cosine, *sine, *q_norm, *k_norm;
    int64_t num_q_heads, num_kv_heads, head_dim, half;
    float eps, offset;
} dense_rows_job;

typedef struct {
    const float *x;
    float *out;
    int64_t n, x_stride;
    int kind, gated;
} dense_act_job;

typedef struct {
    int op;
    const void *job;
    int64_t m, chunk;
    _Atomic int64_t next;
} dense_row_loop;

#define DENSE(name) base_##name
#include "dense_body.h"
#undef DENSE

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define DENSE(name) avx2_##name
#include "dense_body.h"
#undef DENSE
#pragma GCC pop_options
#endif

static int dense_isa = 0; /* 0 baseline, 1 AVX2 + FMA */

static int dense_isa_supported(int isa)
{
#if defined(__x86_64__)
    if (isa == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return isa == 0;
}

static void dense_gemm(const float *x, int64_t x_stride, int64_t m, const void *packed, int weight_type, int64_t n,
                       int64_t k, const float *bias, float *out, int64_t out_stride, int accumulate, int num_threads)
{
    dense_gemm_job job = {.x = x, .packed = packed, .bias = bias, .out = out, .m = m, .n = n, .k = k,
                          .x_stride = x_stride, .out_stride = out_stride, .weight_type = weight_type,
                          .accumulate = accumulate};
    if (m <= 0) return;
    job.num_panels = (n + 15) / 16;
    job.num_blocks = (m + DENSE_MBLOCK - 1) / DENSE_MBLOCK;
    /* About eight pieces a thread: a core that is taken away for a while costs an eighth, not a half. */
    int64_t pieces = job.num_panels < 8 * num_threads ? job.num_panels : 8 * num_threads;
    job.panels_per_piece = (job.num_panels + pieces - 1) / pieces;
    job.pieces_per_block = (job.num_panels + job.panels_per_piece - 1) / job.panels_per_piece;
    job.num_pieces = job.pieces_per_block * job.num_blocks;
    team_body_fn body = base_gemm_body;
#if defined(__x86_64__)
    if (dense_isa == 1) body = avx2_gemm_body;
#endif
    team_run(num_threads, body, &job);
}

/* Runs a row operation; regions are worth their start-up only from about 16k elements on. */
static void dense_rows(int op, const void *job, int64_t m, int64_t width, int num_threads)
{
    dense_row_loop loop = {.op = op, .job = job, .m = m};
    if (m <= 0) return;
    if (m * width < 16384) num_threads = 1;
    loop.chunk = (m + 4 * num_threads - 1) / (4 * num_threads);
    if (num_threads == 1) loop.chunk = m;
    team_body_fn body = base_rows_body;
#if defined(__x86_64__)
    if (dense_isa == 1) body = avx2_rows_body;
#endif
    team_run(num_threads, body, &loop);
}

/* Packs rows n0 .. n0+count of a [N, K] row-major weight into its panels. */
static void dense_pack(const void *weight, int64_t count, int64_t k, int64_t n0, int weight_type, void *packed)
{
    for (int64_t r = 0; r < count; r++) {
        int64_t n = n0 + r, panel = n / 16, j = n % 16;
        if (weight_type == DENSE_BF16) {
            int64_t lane = j < 8 ? 2 * j : 2 * (j - 8) + 1;
            uint16_t *to = (uint16_t *)packed + panel * 16 * k + lane;
            const uint16_t *from = (const uint16_t *)weight + r * k;
            for (int64_t i = 0; i < k; i++) to[16 * i] = from[i];
        } else {
            float *to = (float *)packed + panel * 16 * k + j;
            const float *from = (const float *)weight + r * k;
            for (int64_t i = 0; i < k; i++) to[16 * i] = from[i];
        }
    }
}

/* Gathers whole rows of a packed matrix: the embedding of a tied head. Returns the index of a bad id, or -1. */
static int64_t dense_gather(const void *packed, int weight_type, int64_t n, int64_t k, const int64_t *ids,
                            int64_t count, float *out)
{
    for (int64_t r = 0; r < count; r++) {
        if (ids[r] < 0 || ids[r] >= n) return r;
        int64_t panel = ids[r] / 16, j = ids[r] % 16;
        if (weight_type == DENSE_BF16) {
            const uint16_t *from = (const uint16_t *)packed + panel * 16 * k + (j < 8 ? 2 * j : 2 * (j - 8) + 1);
            for (int64_t i = 0; i < k; i++) {
                uint32_t bits = (uint32_t)from[16 * i] << 16;
                memcpy(out + r * k + i, &bits, 4);
            }
        } else {
            const float *from = (const float *)packed + panel * 16 * k + j;
            for (int64_t i = 0; i < k; i++) out[r * k + i] = from[16 * i];
        }
    }
    return -1;
}

#endif
