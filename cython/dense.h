/* CPU GEMM over packed weights and the small row operations between two GEMMs of a decoder layer.
 *
 * Packed weights: panels of 16 output columns, [ceil(N/16)][K][16], fp32, bf16 or int8, zero-padded. A decode
 * step is a skinny GEMM: the weights are read once from memory, in order, and the activations stay in
 * cache. Weights are widened to fp32 in registers: exact. int8 weights have a scale per column and block of
 * DENSE_KC k, in the same stream, behind the block's lines: [block]{[kc][16] int8, [16] fp32}.
 */
#ifndef FASTDECODE_DENSE_H
#define FASTDECODE_DENSE_H

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define DENSE_PANEL 16    /* columns that are stored together */
#define DENSE_KC 256     /* 16 x 256 x 4 B = 16 KiB: half an L1 cache */
#define DENSE_GROUP 8    /* panels that share a pass over the activations: 64 KiB of sums */
#define DENSE_L2_FLOATS (48 << 10)
#define DENSE_MBLOCK 128 /* rows per pass: their accumulators (8 KiB) and activations stay in L1 and L2 */

#define DENSE_SKINNY 16  /* rows up to which memory decides, not arithmetic */
#define DENSE_MAX_NP 4   /* panels of a tile: one row and one panel would be one stream and too few sums in flight */
#define DENSE_AHEAD 2048 /* bytes ahead in each stream that lines are fetched */
#define DENSE_STRETCH 4096 /* bytes of a panel that tiles read in turn: with as many fetched, a quarter of an L1 */
#define DENSE_SCALES (4 * DENSE_PANEL) /* bytes behind a block of int8 lines */

enum { DENSE_FP32 = 0, DENSE_BF16 = 1, DENSE_INT8 = 2 };
#define DENSE_LINE(type) ((type) == DENSE_FP32 ? 64 : (type) == DENSE_BF16 ? 32 : 16) /* bytes of a k of a panel */
enum { DENSE_SILU = 0, DENSE_GELU_TANH = 1, DENSE_RELU = 2 };
enum { DENSE_OP_NORM, DENSE_OP_QKV, DENSE_OP_ACT, DENSE_OP_SOFTCAP };
#define DENSE_SOFTCAP_BLOCK 2048 /* a vocabulary's row is many blocks: threads share it */

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
    int blocked; /* few rows, and x is [block of DENSE_KC k][row][DENSE_KC] */
    int64_t panel_bytes, num_panels, panels_per_piece, pieces_per_block, num_blocks, num_pieces;
    _Atomic int64_t next;
} dense_gemm_job;

/* What a tile is given: its rows of x and its streams of weights from some k on. */
typedef struct {
    const float *x;
    const char *w;             /* the first of its panels, panel_bytes apart */
    int64_t x_stride, panel_bytes, kc;
    float *sums;               /* blocked x: [panels][DENSE_SKINNY][16] so far, in and out; else totals [rows][16], */
    int64_t sums_step;         /* those of the next panel so many floats on */
    const float *scales;       /* of a whole block */
    int first;                 /* block: its totals are set, not added to */
    const char *near, *far;    /* fetched meanwhile: from near on for the first `split` k, then from far on */
    int64_t split;
    int first_line, last_line; /* with one panel, which of the lines of every four k: tiles share the work */
} dense_piece;

typedef struct {
    float *x;
    const float *y, *weight, *bias;
    float *out;
    int64_t n, x_stride, out_stride; /* y is contiguous */
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
    float *x;
    int64_t n; /* of all blocks together */
    float cap;
} dense_softcap_job;

typedef struct {
    int op;
    const void *job;
    int64_t m, chunk;
    _Atomic int64_t next;
} dense_row_loop;

#define ATTEND_ROWS 96 /* query rows of an item, all heads of its group together */
#define ATTEND_KEYS 64 /* keys of a block: their packed K and V (D = 128: 64 KiB) stay in L2 */

/* q [T, Hq * D] are the last T of L positions; k, v [L, Hkv * D]; strides in elements. */
typedef struct {
    const float *q, *k, *v;
    float *out;
    int64_t q_stride, kv_stride, out_stride, num_rows, length, num_q_heads, num_kv_heads, head_dim, window;
    float scale, softcap;         /* softcap 0: none */
    const float *sinks, *slopes;  /* [Hq] each, as in config.KVGroup; NULL: none */
    int64_t heads_per_item, rows_per_item, items_per_head, num_items;
    _Atomic int64_t next, done;
} dense_attend_job;

typedef struct {
    int64_t kv_head, first_head, heads, first_row, rows; /* rows of the chunk */
    int64_t position, last_key;                          /* of the first and the last row */
} dense_attend_item;

typedef struct {
    float max[ATTEND_ROWS], sum[ATTEND_ROWS];
    float panel[ATTEND_ROWS * 16], scores[ATTEND_ROWS * ATTEND_KEYS];
    float *queries, *keys, *values, *out; /* behind this struct, by head_dim */
} dense_attend_scratch;

/* This thread's scratch for that head_dim, kept for the next call; NULL without memory. */
static dense_attend_scratch *dense_attend_scratch_of(int64_t head_dim)
{
    static _Thread_local dense_attend_scratch *kept = NULL;
    static _Thread_local int64_t kept_dim = 0;
    if (kept && kept_dim >= head_dim) return kept;
    int64_t width = (head_dim + 15) / 16 * 16;
    free(kept);
    kept = (dense_attend_scratch *)malloc(sizeof *kept + sizeof(float) * 2 * (ATTEND_ROWS + ATTEND_KEYS) * width);
    kept_dim = kept ? head_dim : 0;
    if (!kept) return NULL;
    kept->queries = (float *)(kept + 1);
    kept->out = kept->queries + ATTEND_ROWS * width;
    kept->keys = kept->out + ATTEND_ROWS * width;
    kept->values = kept->keys + ATTEND_KEYS * width;
    return kept;
}

/* Items run over (KV head, part of its query heads, block of rows), blocks fastest. */
static dense_attend_item dense_attend_item_of(const dense_attend_job *job, int64_t number)
{
    int64_t group = job->num_q_heads / job->num_kv_heads;
    int64_t parts = (group + job->heads_per_item - 1) / job->heads_per_item;
    int64_t block = number % job->items_per_head, rest = number / job->items_per_head;
    dense_attend_item item;
    item.kv_head = rest / parts;
    item.first_head = item.kv_head * group + rest % parts * job->heads_per_item;
    item.heads = group - rest % parts * job->heads_per_item;
    if (item.heads > job->heads_per_item) item.heads = job->heads_per_item;
    item.first_row = block * job->rows_per_item;
    item.rows = job->num_rows - item.first_row;
    if (item.rows > job->rows_per_item) item.rows = job->rows_per_item;
    item.position = job->length - job->num_rows + item.first_row;
    item.last_key = item.position + item.rows - 1;
    return item;
}

/* Bytes of a panel before k, a multiple of DENSE_KC or the panel's end. */
static inline int64_t dense_block_at(int type, int64_t k)
{
    return k * DENSE_LINE(type) + (type == DENSE_INT8 ? (k + DENSE_KC - 1) / DENSE_KC * DENSE_SCALES : 0);
}

#define DENSE_INLINE static inline __attribute__((always_inline))

#include "dense_pack.h"

/* a * b + c; compiled without contraction, so that this is what every tile size does */
#define DENSE(name) base_##name
#define DENSE_VL 4
#define DENSE_TILE_ROWS 3
#define DENSE_NP 1
#define DENSE_MR 3
#define DENSE_WIDTHS {1, 1, 1}
#define DENSE_MADD(a, b, c) ((a) * (b) + (c))
#include "dense_set.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define DENSE(name) avx2_##name
#define DENSE_VL 8
#define DENSE_TILE_ROWS 6
#define DENSE_NP 1
#define DENSE_MR 6 /* 6 x 16 sums + 2 weight vectors + 1 broadcast fill 15 of 16 registers */
#define DENSE_WIDTHS {4, 2, 2, 1, 1, 1}
#define DENSE_MADD(a, b, c) ((v8f)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#include "dense_set.h"
#pragma GCC pop_options

typedef float v16f __attribute__((vector_size(64)));

#pragma GCC push_options
#ifdef FD_EMULATE_AVX512 /* a build for tests: the same code, each vector as two */
#pragma GCC target("avx2,fma")
DENSE_INLINE v16f avx512_madd16(v16f a, v16f b, v16f c)
{
    for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")
DENSE_INLINE v16f avx512_madd16(v16f a, v16f b, v16f c)
{
    return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#endif
DENSE_INLINE v8f avx512_madd8(v8f a, v8f b, v8f c)
{
    return (v8f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

#define DENSE(name) avx512_##name
#define DENSE_VL 16
#define DENSE_TILE_ROWS 8 /* 8 x 3 sums + 3 weight vectors + 1 broadcast fill 28 of 32 registers */
#define DENSE_NP 3
#define DENSE_MR 16 /* as many sums, each a panel's line, as there are rows of a skinny product: one tile */
#define DENSE_WIDTHS {4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1}
#define DENSE_MADD(a, b, c) _Generic((a), v8f: avx512_madd8, default: avx512_madd16)(a, b, c)
#include "dense_set.h"
#pragma GCC pop_options
#define DENSE_BODY(name) (dense_isa == 2 ? avx512_##name : dense_isa == 1 ? avx2_##name : base_##name)

#elif defined(__aarch64__)
typedef float v4f __attribute__((vector_size(16)));

DENSE_INLINE v4f neon_madd4(v4f a, v4f b, v4f c)
{
    return (v4f)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

DENSE_INLINE v8f neon_madd8(v8f a, v8f b, v8f c)
{
    v4f x[2], y[2], z[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(z, &c, sizeof c);
    for (int i = 0; i < 2; i++) z[i] = neon_madd4(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
}

#define DENSE(name) neon_##name
#define DENSE_VL 4
#define DENSE_TILE_ROWS 6
#define DENSE_NP 1
#define DENSE_MR 6 /* 6 x 16 sums + 4 weight vectors + 1 broadcast fill 29 of 32 registers */
#define DENSE_WIDTHS {4, 2, 2, 1, 1, 1}
#define DENSE_MADD(a, b, c) _Generic((a), v8f: neon_madd8, default: neon_madd4)(a, b, c)
#include "dense_set.h"
#define DENSE_BODY(name) (dense_isa == 1 ? neon_##name : base_##name)

#else
#define DENSE_BODY(name) base_##name
#endif

static int dense_isa = 0; /* index into dense_isas */

static const char *const dense_isas[] = {
    "baseline",
#if defined(__x86_64__)
    "avx2",
    "avx512",
#elif defined(__aarch64__)
    "neon",
#endif
};
enum { DENSE_NUM_ISAS = sizeof dense_isas / sizeof *dense_isas };

static int dense_isa_supported(int isa)
{
    return isa >= 0 && isa < DENSE_NUM_ISAS && isa_cpu_has(dense_isas[isa]);
}

/* x [m, k] as [block of DENSE_KC k][row][DENSE_KC], in memory of this thread that its next call reuses: rows of 16 KiB
 * would otherwise share a few lines of the L1 cache. NULL without memory. */
static const float *dense_blocked(const float *x, int64_t x_stride, int64_t m, int64_t k)
{
    static _Thread_local float *kept = NULL;
    static _Thread_local int64_t kept_floats = 0;
    const int64_t count = (k + DENSE_KC - 1) / DENSE_KC * DENSE_KC * m;
    if (m == 1) return x; /* it is that already */
    if (kept_floats < count) {
        free(kept);
        kept = (float *)aligned_alloc(64, count * sizeof(float));
        kept_floats = kept ? count : 0;
        if (!kept) return NULL;
    }
    float *to = kept;
    for (int64_t k0 = 0; k0 < k; k0 += DENSE_KC)
        for (int64_t r = 0; r < m; r++, to += DENSE_KC)
            memcpy(to, x + r * x_stride + k0, (k - k0 < DENSE_KC ? k - k0 : DENSE_KC) * sizeof(float));
    return kept;
}

static void dense_gemm(const float *x, int64_t x_stride, int64_t m, const void *packed, int weight_type, int64_t n,
                       int64_t k, const float *bias, float *out, int64_t out_stride, int accumulate, int num_threads)
{
    dense_gemm_job job = {.x = x, .packed = packed, .bias = bias, .out = out, .m = m, .n = n, .k = k,
                          .x_stride = x_stride, .out_stride = out_stride, .weight_type = weight_type,
                          .accumulate = accumulate};
    if (m <= 0) return;
    if (m <= DENSE_SKINNY && (job.x = dense_blocked(x, x_stride, m, k))) job.blocked = 1;
    else job.x = x;
    job.panel_bytes = dense_block_at(weight_type, k);
    job.num_panels = (n + 15) / 16;
    job.num_blocks = (m + DENSE_MBLOCK - 1) / DENSE_MBLOCK;
    /* About eight pieces a thread: a core that is taken away for a while costs an eighth, not a half. */
    int64_t pieces = job.num_panels < 8 * num_threads ? job.num_panels : 8 * num_threads;
    if (num_threads == 1) pieces = 1;
    job.panels_per_piece = (job.num_panels + pieces - 1) / pieces;
    job.pieces_per_block = (job.num_panels + job.panels_per_piece - 1) / job.panels_per_piece;
    job.num_pieces = job.pieces_per_block * job.num_blocks;
    team_body_fn body = DENSE_BODY(gemm_body);
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
    team_body_fn body = DENSE_BODY(rows_body);
    team_run(num_threads, body, &loop);
}

/* Attends; returns 0, or -1 when there was no memory for the scratch. */
static int dense_attend(dense_attend_job *job, int num_threads)
{
    int64_t group = job->num_q_heads / job->num_kv_heads;
    job->heads_per_item = group < ATTEND_ROWS ? group : ATTEND_ROWS;
    job->rows_per_item = ATTEND_ROWS / job->heads_per_item;
    job->items_per_head = (job->num_rows + job->rows_per_item - 1) / job->rows_per_item;
    job->num_items = job->items_per_head * job->num_kv_heads * ((group + job->heads_per_item - 1) / job->heads_per_item);
    team_body_fn body = DENSE_BODY(attend_body);
    if (job->num_rows * job->length * job->head_dim * job->num_q_heads < 1 << 17) num_threads = 1;
    team_run(num_threads, body, job);
    return atomic_load(&job->done) == job->num_items ? 0 : -1;
}

#endif
