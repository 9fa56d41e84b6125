/* Logits -> tokens, rows in parallel: largest logit, temperature, min_p, top_k, top_p and the draw for a
 * given uniform number. And log-probabilities: of one token of a row, and of the most probable ones.
 *
 * No row is sorted whole. Without top_k and top_p, sums of blocks find the block that the draw falls
 * into. With them, a histogram of (max - x) / temperature has whole bins of tokens counted and summed at
 * once, and sorts the one, two or three bins that matter. Tokens less probable than exp(-SAMPLING_REACH)
 * of the best are then left out: 262,144 of them hold less than 4e-9 of the mass, below fp32 rounding.
 */
#ifndef FASTDECODE_SAMPLING_H
#define FASTDECODE_SAMPLING_H

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"
#include "team.h"

#define SAMPLING_BLOCKS 512 /* their sums take 4 KiB */
#define SAMPLING_PEAKS 1024 /* 4 KiB; a multiple of 8 */
#define SAMPLING_BINS 1024  /* masses and counts: 12 KiB */
#define SAMPLING_REACH 32.0f

typedef float sv8f __attribute__((vector_size(32)));
typedef int32_t sv8i __attribute__((vector_size(32)));

/* One row; sampling.py has the same layout. */
typedef struct {
    uint64_t logits; /* address of fp32 [V] */
    double uniform, top_p;
    int64_t top_k;              /* 0 or less: off */
    int64_t token;              /* result: an id; -1: no finite largest logit; -2: no memory */
    float temperature, min_p;   /* temperature 0 is greedy */
} sampling_row;

typedef struct {
    sampling_row *rows;
    int64_t num_rows, vocab_size;
    _Atomic int64_t next;
} sampling_job;

/* One of a row's most probable tokens; logprobs.py has the same layout, and that of sampling_score. */
typedef struct {
    double logprob;
    int32_t token, rank;
} sampling_top;

typedef struct {
    uint64_t logits, top; /* addresses of fp32 [V] and of sampling_top [num_top], num_top <= V */
    int64_t token, num_top;
    double logprob; /* result, of `token`; NaN: no finite largest logit */
    int64_t rank;   /* result, from 1; 0 with NaN; -2: no memory */
} sampling_score;

typedef struct {
    sampling_score *rows;
    int64_t num_rows, vocab_size;
    _Atomic int64_t next;
} sampling_score_job;

typedef struct {
    const float *x;
    int64_t n;
    float max, inverse_temperature, min_p, floor, bins_per_unit;
    double total;
    int64_t chunk, num_peaks; /* logits in eight parts, one per lane; parts */
    float peaks[SAMPLING_PEAKS];
} sampling_scan;

typedef struct {
    double mass[SAMPLING_BINS + 1]; /* the last: tokens without a weight */
    int32_t count[SAMPLING_BINS + 1];
} sampling_bins;

/* Tokens of one bin, as keys: descending logit in the high half, id in the low one. */
typedef struct {
    uint64_t *keys;
    int64_t num, room;
    int32_t bin;
} sampling_list;

static inline int sampling_any(sv8i mask)
{
    typedef int64_t v4l __attribute__((vector_size(32)));
    v4l wide = (v4l)mask;
    return (wide[0] | wide[1] | wide[2] | wide[3]) != 0;
}

/* Logits whose weights are summed together. */
static inline int64_t sampling_block(int64_t n)
{
    int64_t block = (n + SAMPLING_BLOCKS - 1) / SAMPLING_BLOCKS;
    return block < 64 ? 64 : (block + 7) / 8 * 8;
}

/* The value at place k (from 0) in descending order; reorders the values. Quickselect. */
static float sampling_nth_largest(float *values, int64_t num, int64_t k)
{
    for (int64_t low = 0, high = num - 1; low < high;) {
        float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i > j) break;
            float swapped = values[i];
            values[i++] = values[j];
            values[j--] = swapped;
        }
        if (k <= j) high = j;
        else if (k >= i) low = i;
        else break;
    }
    return values[k];
}

static int sampling_append(sampling_list *list, float x, int64_t token)
{
    if (list->num == list->room) {
        int64_t room = list->room ? 2 * list->room : 256;
        uint64_t *keys = (uint64_t *)realloc(list->keys, (size_t)room * sizeof *keys);
        if (!keys) return 0;
        list->keys = keys;
        list->room = room;
    }
    uint32_t bits;
    x += 0.0f; /* -0 equals 0 */
    memcpy(&bits, &x, sizeof bits);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u; /* in order of the logits */
    list->keys[list->num++] = (uint64_t)~bits << 32 | (uint32_t)token;
    return 1;
}

static inline int64_t sampling_token(const sampling_list *list, int64_t i) { return (uint32_t)list->keys[i]; }

static inline float sampling_logit(const sampling_list *list, int64_t i)
{
    uint32_t bits = ~(uint32_t)(list->keys[i] >> 32);
    float x;
    bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline int sampling_equal(const sampling_list *list, int64_t i, int64_t j)
{
    return list->keys[i] >> 32 == list->keys[j] >> 32;
}

static void sampling_sift(uint64_t *keys, int64_t root, int64_t end)
{
    uint64_t key = keys[root];
    for (int64_t child; (child = 2 * root + 1) < end; root = child) {
        if (child + 1 < end && keys[child + 1] > keys[child]) child++;
        if (keys[child] <= key) break;
        keys[root] = keys[child];
    }
    keys[root] = key;
}

/* Heap sort: never worse than n log n, whatever the logits. Equal ones are in order already. */
static void sampling_sort(sampling_list *list)
{
    uint64_t *keys = list->keys;
    int64_t i = 1;
    while (i < list->num && keys[i - 1] < keys[i]) i++;
    if (i >= list->num) return;
    for (i = list->num / 2 - 1; i >= 0; i--) sampling_sift(keys, i, list->num);
    for (i = list->num - 1; i > 0; i--) {
        uint64_t top = keys[0];
        keys[0] = keys[i];
        keys[i] = top;
        sampling_sift(keys, 0, i);
    }
}

/* Leaves the first `num` of the sorted order, in any order. A heap holds the best so far: n log num at most. */
static void sampling_keep_first(sampling_list *list, int64_t num)
{
    uint64_t *keys = list->keys;
    if (list->num <= num) return;
    for (int64_t i = num / 2 - 1; i >= 0; i--) sampling_sift(keys, i, num);
    for (int64_t i = num; i < list->num; i++) {
        if (keys[i] >= keys[0]) continue;
        keys[0] = keys[i];
        sampling_sift(keys, 0, num);
    }
    list->num = num;
}

#define SAMPLE(name) sample_base_##name
#define SAMPLE_MADD(a, b, c) ((a) * (b) + (c))
#define SAMPLE_MAX(a, b) ((sv8f)((((a) > (b)) & (sv8i)(a)) | (~((a) > (b)) & (sv8i)(b))))
#include "sampling_body.h"
#include "sampling_score.h"
#undef SAMPLE
#undef SAMPLE_MADD
#undef SAMPLE_MAX

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define SAMPLE(name) sample_avx2_##name
#define SAMPLE_MADD(a, b, c) ((sv8f)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define SAMPLE_MAX(a, b) ((sv8f)_mm256_max_ps((__m256)(a), (__m256)(b)))
#include "sampling_body.h"
#include "sampling_score.h"
#undef SAMPLE
#undef SAMPLE_MADD
#undef SAMPLE_MAX
#pragma GCC pop_options
#endif

static int sampling_isa __attribute__((unused)) = 0; /* 0 baseline, 1 AVX2 + FMA, where there is that */

static const char *const sampling_isas[] = {
    "baseline",
#if defined(__x86_64__)
    "avx2",
#endif
};
enum { SAMPLING_NUM_ISAS = sizeof sampling_isas / sizeof *sampling_isas };

static int sampling_isa_supported(int isa)
{
    return isa >= 0 && isa < SAMPLING_NUM_ISAS && isa_cpu_has(sampling_isas[isa]);
}

/* Philox4x32-10 (Salmon et al., SC 2011): counters [N][4] under keys [N][2] -> out [N][4]. */
static void sampling_philox(const uint32_t *counters, const uint32_t *keys, uint32_t *out, int64_t num)
{
    for (int64_t i = 0; i < num; i++, counters += 4, keys += 2, out += 4) {
        uint32_t c[4] = {counters[0], counters[1], counters[2], counters[3]}, k[2] = {keys[0], keys[1]};
        for (int round = 0; round < 10; round++) {
            uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
            c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k[0];
            c[1] = (uint32_t)b;
            c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k[1];
            c[3] = (uint32_t)a;
            k[0] += 0x9E3779B9u;
            k[1] += 0xBB67AE85u;
        }
        memcpy(out, c, sizeof c);
    }
}

/* A region is not worth its start-up for a few small rows. */
static int sampling_threads(int64_t num_rows, int64_t vocab_size, int num_threads)
{
    if (num_rows * vocab_size < 32768) return 1;
    return num_threads > num_rows ? (int)num_rows : num_threads;
}

/* Fills in the token of every row. */
static void sampling_run(sampling_row *rows, int64_t num_rows, int64_t vocab_size, int num_threads)
{
    sampling_job job = {.rows = rows, .num_rows = num_rows, .vocab_size = vocab_size};
    team_body_fn body = sample_base_body;
#if defined(__x86_64__)
    if (sampling_isa == 1) body = sample_avx2_body;
#endif
    team_run(sampling_threads(num_rows, vocab_size, num_threads), body, &job);
}

/* Fills in the log-probabilities of every row. */
static void sampling_score_run(sampling_score *rows, int64_t num_rows, int64_t vocab_size, int num_threads)
{
    sampling_score_job job = {.rows = rows, .num_rows = num_rows, .vocab_size = vocab_size};
    team_body_fn body = sample_base_score_body;
#if defined(__x86_64__)
    if (sampling_isa == 1) body = sample_avx2_score_body;
#endif
    team_run(sampling_threads(num_rows, vocab_size, num_threads), body, &job);
}

#endif
