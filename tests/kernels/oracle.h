/* Attention in double precision, one query row and head at a time, and how far fp32 may be from it; the same rule
 * as in tests/worker/test_attention.py. K and V are taken as stored: rounded here by other code than the kernel's. */
#ifndef FASTDECODE_ORACLE_H
#define FASTDECODE_ORACLE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

#define UNIT 0x1p-24 /* unit roundoff of the arithmetic, fp32 */

/* One sequence: K, V [length][kv_heads][dim] and queries [rows][heads][dim] of its last rows, as sent. */
typedef struct {
    int kv_dtype, wire_dtype, heads, kv_heads, dim, rows, extras; /* extras: with sinks and ALiBi */
    int64_t length, window; /* window 0: all */
    float softcap;          /* 0: none */
    float *k, *v, *q, *sinks, *slopes;
    double *stored_k, *stored_v;
    double *out, *allowed; /* [rows][heads][dim], [rows][heads] */
} check_case;

static inline uint32_t check_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float check_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t check_fp16(float x) {
    _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

static inline float check_from_fp16(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
}

static inline uint16_t check_bf16(float x) {
    uint32_t bits = check_bits(x), low = bits & 0xffff;
    uint16_t high = (uint16_t)(bits >> 16);
    return low > 0x8000 || (low == 0x8000 && (high & 1)) ? high + 1 : high;
}

static inline float check_from_bf16(uint16_t bits) { return check_float((uint32_t)bits << 16); }

static float check_bf16_below(float x) {
    float cut = check_float(check_bits(x) & 0xffff0000u);
    return cut <= x ? cut : check_float((check_bits(x) & 0xffff0000u) + 0x10000u);
}

static void check_store_int8(const float *x, int dim, double *out) {
    float top = 0.0f;
    for (int i = 0; i < dim; i++) top = fmaxf(top, fabsf(x[i]));
    const float scale = top / 127.0f, inverse = 127.0f / top;
    for (int i = 0; i < dim; i++) out[i] = top == 0.0f ? 0.0 : (double)nearbyintf(x[i] * inverse) * scale;
}

static void check_store_int4(const float *x, int dim, double *out) {
    for (int start = 0; start < dim; start += 32) {
        const int stop = start + 32 < dim ? start + 32 : dim;
        float low = x[start], high = x[start];
        for (int i = start; i < stop; i++) {
            low = fminf(low, x[i]);
            high = fmaxf(high, x[i]);
        }
        const float minimum = check_bf16_below(low), scale = -check_bf16_below(-((high - minimum) / 15.0f));
        const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        for (int i = start; i < stop; i++) {
            float nibble = nearbyintf(fminf(15.0f, fmaxf(0.0f, (x[i] - minimum) * inverse)));
            out[i] = (double)(nibble * scale + minimum); /* an exact product, a sum rounded once */
        }
    }
}

/* A row as the cache keeps it. */
static void check_store(int dtype, const float *x, int dim, double *out) {
    if (dtype == FD_INT8) {
        check_store_int8(x, dim, out);
        return;
    }
    if (dtype == FD_INT4) {
        check_store_int4(x, dim, out);
        return;
    }
    for (int i = 0; i < dim; i++)
        out[i] = dtype == FD_FP16 ? check_from_fp16(check_fp16(x[i]))
                 : dtype == FD_BF16 ? check_from_bf16(check_bf16(x[i])) : x[i];
}

/* Scores of a query with keys [first, last], their largest sum of |q k|; with cap and bias. */
static void check_scores(const check_case *c, const float *q, int head, int64_t first, int64_t last, double *scores,
                         double *magnitude) {
    const double scale = (double)(1.0f / sqrtf((float)c->dim)); /* as the kernel is told */
    const int kv_head = head / (c->heads / c->kv_heads);
    *magnitude = 0.0;
    for (int64_t t = first; t <= last; t++) {
        const double *k = c->stored_k + (t * c->kv_heads + kv_head) * c->dim;
        double sum = 0.0, size = 0.0;
        for (int i = 0; i < c->dim; i++) {
            sum += k[i] * q[i];
            size += fabs(k[i] * q[i]);
        }
        *magnitude = fmax(*magnitude, size * scale);
        sum *= scale;
        scores[t] = c->softcap != 0.0f ? c->softcap * tanh(sum / c->softcap) : sum;
        if (c->extras) scores[t] += (double)c->slopes[head] * (double)(t - last);
    }
}

/* The larger one that is a number. Not fmax: gcc 12 for aarch64 breaks down over it in nested loops. */
static double check_larger(double a, double b) { return b > a ? b : a; }

/* int8 and int4: how far rounding a query to integers takes a score. Each value errs by up to half of its largest one's
 * 32767th part (16383rd, of wide heads), evenly spread: a score by less than 7 standard deviations of their sum. */
static double check_query_error(const check_case *c, const float *q, int kv_head, int64_t first, int64_t last) {
    double largest = 0.0, longest = 0.0;
    if (c->kv_dtype < FD_INT8) return 0.0;
    for (int i = 0; i < c->dim; i++) largest = check_larger(largest, fabs(q[i]));
    for (int64_t t = first; t <= last; t++) {
        const double *k = c->stored_k + (t * c->kv_heads + kv_head) * c->dim;
        double square = 0.0;
        for (int i = 0; i < c->dim; i++) square += k[i] * k[i];
        longest = check_larger(longest, sqrt(square));
    }
    return 4 * largest * longest / sqrt(c->dim) / (c->dim > 512 ? 32766 : 65534);
}

/* And rounding the weights, of which `scores` below `top` are the logarithms: each of a block's errs by up to half of
 * the 32768th part of the largest weight times the largest scale, which is V's largest value / 127, or of int4 a 15th
 * part of the range, no more than twice the largest and what bf16 adds. */
static double check_weights_error(const check_case *c, const double *scores, double top, int kv_head, int64_t first,
                                  int64_t last) {
    double squares = 0.0;
    if (c->kv_dtype < FD_INT8) return 0.0;
    for (int64_t block = first / FD_BLOCK; block <= last / FD_BLOCK; block++) {
        const int64_t from = fd_max(first, block * FD_BLOCK), to = fd_min(last + 1, (block + 1) * FD_BLOCK);
        double weight = 0.0, largest = 0.0;
        for (int64_t t = from; t < to; t++) {
            const double *v = c->stored_v + (t * c->kv_heads + kv_head) * c->dim;
            weight = check_larger(weight, exp(scores[t] - top));
            for (int i = 0; i < c->dim; i++) largest = check_larger(largest, fabs(v[i]));
        }
        squares += (double)(to - from) * weight * weight * largest * largest;
    }
    return (c->kv_dtype == FD_INT4 ? 2.02 : 1.0) * 4 * sqrt(squares) / 65536;
}

/* One row and head. The score's chain of D products errs by about sqrt(D) roundoffs of sum |q k|, its scaling and cap
 * by a few of itself; a weight by twice that plus the exponential's; the sum over n tokens by sqrt(n). ALiBi's bias
 * and what the exponential is taken of count by the weight of their keys. Integers: see above. */
static void check_row(const check_case *c, int row, int head, double *scores) {
    const int64_t last = c->length - c->rows + row, first = c->window ? fd_max(0, last - c->window + 1) : 0;
    const int kv_head = head / (c->heads / c->kv_heads), dim = c->dim;
    double *out = c->out + ((int64_t)row * c->heads + head) * dim;
    double magnitude, top = -INFINITY, total = 0.0, distant = 0.0, largest = 0.0, result = 0.0;
    check_scores(c, c->q + ((int64_t)row * c->heads + head) * dim, head, first, last, scores, &magnitude);
    const double score_error = UNIT * (sqrt(dim) + 4) * magnitude + 8 * UNIT * c->softcap +
                               check_query_error(c, c->q + ((int64_t)row * c->heads + head) * dim, kv_head, first, last);
    for (int64_t t = first; t <= last; t++) top = fmax(top, scores[t]);
    memset(out, 0, (size_t)dim * sizeof *out);
    for (int64_t t = first; t <= last; t++) {
        const double *v = c->stored_v + (t * c->kv_heads + kv_head) * dim, weight = exp(scores[t] - top);
        total += weight;
        if (c->extras)
            distant += weight * (2 * fabs((double)c->slopes[head] * (double)(t - last)) + 2 * fabs(scores[t] - top));
        for (int i = 0; i < dim; i++) {
            out[i] += weight * v[i];
            largest = fmax(largest, fabs(v[i]));
        }
    }
    const double share = c->extras ? 1.0 / (1.0 + exp(c->sinks[head] - top) / total) : 1.0;
    double allowed = 2 * score_error + UNIT * (sqrt((double)(last - first + 1)) + 8) + 2 * UNIT * distant / total;
    allowed *= largest * share;
    allowed += check_weights_error(c, scores, top, kv_head, first, last) / total * share;
    for (int i = 0; i < dim; i++) {
        out[i] *= share / total;
        result = fmax(result, fabs(out[i]));
    }
    if (c->extras) /* the share errs as an exponential does, and is nothing below e^-87.3 */
        allowed += result * (2 * score_error + UNIT * (2 * fabs(c->sinks[head] - top) + 8)) +
                   largest * total * exp(-87.3);
    if (c->wire_dtype == FD_FP16) allowed += result * 0x1p-11;
    if (c->wire_dtype == FD_BF16) allowed += result * 0x1p-8;
    c->allowed[(int64_t)row * c->heads + head] = allowed;
}

/* Fills in stored_k, stored_v, out and allowed. */
static void check_solve(check_case *c) {
    double *scores = malloc((size_t)c->length * sizeof *scores);
    for (int64_t i = 0; i < c->length * c->kv_heads; i++) {
        check_store(c->kv_dtype, c->k + i * c->dim, c->dim, c->stored_k + i * c->dim);
        check_store(c->kv_dtype, c->v + i * c->dim, c->dim, c->stored_v + i * c->dim);
    }
    for (int row = 0; row < c->rows; row++)
        for (int head = 0; head < c->heads; head++) check_row(c, row, head, scores);
    free(scores);
}

#endif
