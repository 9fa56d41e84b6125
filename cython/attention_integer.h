/* The inner loops of attention_tiles.h over int8 and int4 rows, in integers: products of 16-bit ones, two of which a
 * single instruction multiplies and adds up in 32 bits, instead of a conversion and a fused product for each value.
 *
 * K: a query becomes integers of 15 bits and a sign, and one fp32 scale. V: the weights of one step's tokens become
 * integers relative to the largest of them (int4: of each group of 32 dimensions, as their scales differ), tokens
 * go in pairs, and a step's sum is converted and added once. Sums of integers are exact: neither how tokens and
 * vectors are tiled nor which of a step's tokens the others see changes their bits.
 *
 * What that costs: 2^-16 of a query's largest value for each value of it, and 2^-16 of a step's largest weight for each
 * weight; an int8 row itself is 2^-8 of its largest value off, an int4 group 2^-5 of its range. Weights below that are
 * zero. Not-a-number has no integer: it is carried by the scales. */

enum {
    ISA(WORDS) = 2 * VL, /* 16-bit integers of a vector */
};

_Static_assert((int64_t)FD_MAX_DIM * 127 * FD_WIDE_LIMIT < INT32_MAX, "a score of int8, of wide heads");
_Static_assert((int64_t)FD_NARROW_DIM * 127 * FD_NARROW_LIMIT < INT32_MAX, "a score of int8, of all others");
_Static_assert((int64_t)FD_BLOCK * 128 * FD_WEIGHT_LIMIT < INT32_MAX, "a step's weighted sum of int8");

/* Query vectors of a unit, as numbers and, for these loops, as integers. */
typedef struct {
    const float *x;       /* [n][dim] */
    const int16_t *whole; /* [n][width], zero behind dim; of int4 in the order of nibble_words() */
    const float *sums;    /* [n][groups]: of a group's integers, int4 */
    const float *scales;  /* [n] */
    int dim, width, groups;
} ISA(queries);

/* Tokens of a tile by its number of query vectors. */
FD_INLINE int ISA(integer_tokens)(int H) { return H == 1 ? 8 : H == 2 || FD_REGISTERS > 16 ? 4 : 2; }

/* Vectors of V that a pass over the tokens adds up. */
FD_INLINE int ISA(integer_width)(int H, int dtype) {
    if (dtype == FD_INT4) return VL > 8 ? 2 : VL < 8 || H < 3 ? 4 : 2;
    return FD_REGISTERS > 16 || VL < 8 ? 4 : H == 1 ? 8 : H == 2 ? 4 : 2;
}
/* Passes over the tokens, as many times half of them. */
FD_INLINE int ISA(integer_slices)(int H, int dim, int dtype) {
    const int width = ISA(integer_width)(H, dtype) * VL;
    return dim / width + (dim % width + 15) / 16;
}

/* Whether rows of a dtype go through these loops. */
FD_INLINE int ISA(in_integers)(int dtype) { return FD_INTEGERS && dtype >= FD_INT8; }

#if FD_INTEGERS

/* Where dimension i lies among a query's integers for int4: the low nibbles of a group's bytes, then the high ones;
 * nibble_words() of four lanes has too few to mix the group's halves. */
FD_INLINE int ISA(place)(int i) { return VL > 4 ? i / 32 * 32 + i / 8 % 2 * 16 + i / 16 % 2 * 8 + i % 8 : i; }

#if VL <= 8

/* A query's integers and the sums of each 32 of them; returns the scale, not-a-number when one is not finite. */
static float ISA(quantise_query)(const float *x, int dim, int dtype, int16_t *whole, float *sums) {
    const vf magic = ISA(splat)(12582912.0f);
    const float limit = dim > FD_NARROW_DIM ? FD_WIDE_LIMIT : FD_NARROW_LIMIT;
    vf top = {0};
    vi bad = {0};
    for (int i = 0; i < dim; i += VL) {
        const vf v = ISA(load)(x + i);
        bad |= ISA(bad)(v);
        top = ISA(max)(top, (vf)((vi)v & 0x7fffffff));
    }
    const float largest = ISA(largest)(top);
    const int empty = ISA(any)(bad) || largest < FD_QUANT_TINY;
    const vf inverse = ISA(splat)(empty ? 0.0f : 1.0f / largest), zero = {0};
    memset(whole, 0, (size_t)(dim + 31) / 32 * 32 * sizeof *whole);
    for (int start = 0; start < dim; start += 32) {
        const int stop = start + 32 < dim ? start + 32 : dim;
        vi sum = {0};
        for (int i = start; i < stop; i += VL) {
            const vf v = empty ? zero : ISA(load)(x + i) * inverse;
            const vi rounded = (vi)ISA(fma)(v, ISA(splat)(limit), magic) - (vi)magic;
            sum += rounded;
            ISA(store_words)(whole + (dtype == FD_INT4 ? ISA(place)(i) : i), rounded);
        }
        int32_t lanes[VL], total = 0;
        memcpy(lanes, &sum, sizeof lanes);
        for (int i = 0; i < VL; i++) total += lanes[i];
        sums[start / 32] = (float)total;
    }
    return ISA(any)(bad) ? NAN : empty ? 0.0f : largest / limit;
}

#else

FD_INLINE float ISA(quantise_query)(const float *x, int dim, int dtype, int16_t *whole, float *sums) {
    return fd_avx2_quantise_query(x, dim, dtype, whole, sums);
}

#endif

/* All vectors of a unit. */
static void ISA(quantise_queries)(const float *x, int n, int dim, int dtype, int16_t *whole, float *sums,
                                  float *scales) {
    const int groups = (dim + 31) / 32;
    for (int v = 0; v < n; v++, x += dim, whole += groups * 32, sums += groups)
        scales[v] = ISA(quantise_query)(x, dim, dtype, whole, sums);
}

/* H queries times T rows, `count` dimensions, at most WORDS. */
FD_INLINE void ISA(multiply_int8)(const int H, const int T, vi a[4][8], const int16_t *whole, const int width,
                                  const char *k, const size_t row, const int count) {
    vi x[8], y;
    if (H > T) {
        FD_UNROLL
        for (int t = 0; t < T; t++) x[t] = ISA(words)(k + t * row, count);
        FD_UNROLL
        for (int h = 0; h < H; h++) {
            memcpy(&y, whole + h * width, sizeof y);
            FD_KEEP(y);
            FD_UNROLL
            for (int t = 0; t < T; t++) a[h][t] += ISA(madd)(x[t], y);
        }
    } else {
        FD_UNROLL
        for (int h = 0; h < H; h++) {
            memcpy(&x[h], whole + h * width, sizeof y);
            FD_KEEP(x[h]);
        }
        FD_UNROLL
        for (int t = 0; t < T; t++) {
            y = ISA(words)(k + t * row, count);
            FD_UNROLL
            for (int h = 0; h < H; h++) a[h][t] += ISA(madd)(y, x[h]);
        }
    }
}

/* The sums over the lanes as they are, integers, in the place of scores: scale_scores() makes these of them. */
FD_INLINE void ISA(dot_int8)(const int H, const int T, const ISA(queries) *q, const int first, const char *k,
                             const size_t row, const int from, const int to, const int rows, ISA(stream) *stream,
                             float *scores) {
    ISA(stream) s = *stream;
    const int dim = q->dim, width = q->width;
    const int16_t *whole = q->whole + first * width;
    for (int t = from; t < to; t += T) {
        if (t + T > rows) t = rows - T;
        const char *kt = k + t * row + FD_INT8_SCALE_BYTES;
        vi a[4][8];
        FD_UNROLL
        for (int h = 0; h < H; h++)
            FD_UNROLL
            for (int j = 0; j < T; j++) a[h][j] = (vi){0};
        int i = 0;
        for (; i + FD_CHUNK <= dim; i += FD_CHUNK) {
            ISA(advance)(&s);
            FD_ROLLED
            for (int j = 0; j < FD_CHUNK; j += ISA(WORDS))
                ISA(multiply_int8)(H, T, a, whole + i + j, width, kt + i + j, row, ISA(WORDS));
        }
        for (; i + ISA(WORDS) <= dim; i += ISA(WORDS))
            ISA(multiply_int8)(H, T, a, whole + i, width, kt + i, row, ISA(WORDS));
        if (i < dim) ISA(multiply_int8)(H, T, a, whole + i, width, kt + i, row, dim - i);
        if (T == 2) {
            FD_UNROLL
            for (int h = 0; h < H; h += 2) {
                const int next = h + 1 < H ? h + 1 : h;
                const v4i r = ISA(sums_whole)(a[h][0], a[h][1], a[next][0], a[next][1]);
                memcpy(scores + h * FD_SCORES + t, &r, 8);
                memcpy(scores + next * FD_SCORES + t, (const char *)&r + 8, 8);
            }
            continue;
        }
        FD_UNROLL
        for (int j = 0; j < T; j += 4)
            FD_UNROLL
            for (int h = 0; h < H; h++) {
                const v4i r = ISA(sums_whole)(a[h][j], a[h][j + 1], a[h][j + 2], a[h][j + 3]);
                memcpy(scores + h * FD_SCORES + t + j, &r, sizeof r);
            }
    }
    *stream = s;
}

/* H queries times T groups of `nbytes` bytes of nibbles, 8 or 16: a group's sum is exact, times scale. */
FD_INLINE void ISA(multiply_int4)(const int H, const int T, vf a[4][8], const int16_t *whole, const int width,
                                  const char *group, const size_t row, const int nbytes) {
    FD_UNROLL
    for (int t = 0; t < T; t++) {
        const vf scale = (vf)(ISA(spread)(group + t * row) & (int32_t)0xffff0000);
        vi x[ISA(BLOCK_VECTORS)];
        ISA(nibble_words)(group + t * row + 4, nbytes, x);
        FD_UNROLL
        for (int h = 0; h < H; h++) {
            vi sum = {0}, y;
            FD_UNROLL
            for (int j = 0; j < ISA(BLOCK_VECTORS); j++) {
                memcpy(&y, whole + h * width + j * ISA(WORDS), sizeof y);
                sum = j ? sum + ISA(madd)(x[j], y) : ISA(madd)(x[j], y);
            }
            a[h][t] = ISA(fma)(__builtin_convertvector(sum, vf), scale, a[h][t]);
        }
    }
}

/* Scores, but for what scale_scores() adds. */
FD_INLINE void ISA(dot_int4_whole)(const int H, const int T, const ISA(queries) *q, const int first, const char *k,
                                   const size_t row, const int from, const int to, const int rows,
                                   ISA(stream) *stream, float *scores) {
    ISA(stream) s = *stream;
    const int dim = q->dim, width = q->width;
    const int16_t *whole = q->whole + first * width;
    for (int t = from; t < to; t += T) {
        if (t + T > rows) t = rows - T;
        const char *group = k + t * row;
        vf a[4][8];
        FD_UNROLL
        for (int h = 0; h < H; h++)
            FD_UNROLL
            for (int j = 0; j < T; j++) a[h][j] = ISA(splat)(0.0f);
        int i = 0;
        for (; i + 16 < dim; i += 32, group += FD_INT4_GROUP_BYTES) {
            ISA(advance)(&s);
            ISA(multiply_int4)(H, T, a, whole + i, width, group, row, 16);
        }
        if (i < dim) ISA(multiply_int4)(H, T, a, whole + i, width, group, row, 8);
        if (T == 2) {
            FD_UNROLL
            for (int h = 0; h < H; h += 2) {
                const int next = h + 1 < H ? h + 1 : h;
                const v4f r = ISA(sums)(a[h][0], a[h][1], a[next][0], a[next][1]);
                memcpy(scores + h * FD_SCORES + t, &r, 8);
                memcpy(scores + next * FD_SCORES + t, (const char *)&r + 8, 8);
            }
            continue;
        }
        FD_UNROLL
        for (int j = 0; j < T; j += 4)
            FD_UNROLL
            for (int h = 0; h < H; h++) {
                const v4f r = ISA(sums)(a[h][j], a[h][j + 1], a[h][j + 2], a[h][j + 3]);
                memcpy(scores + h * FD_SCORES + t + j, &r, sizeof r);
            }
    }
    *stream = s;
}

/* The first words of a step's rows, of int8, or of each of their groups: scales and minima. */
FD_INLINE void ISA(gather_headers)(const int dtype, const char *rows, const size_t row, const int step,
                                   const int groups, vi *headers) {
    int g = 0;
    for (; dtype == FD_INT4 && g + 4 <= groups; g += 4)
        for (int t = 0; t < step; t += VL) {
            vi four[4];
            ISA(gather_four)(rows + g * FD_INT4_GROUP_BYTES + t * row, row, four);
            for (int j = 0; j < 4; j++) headers[((g + j) * FD_BLOCK + t) / VL] = four[j];
        }
    for (; g < groups; g++)
        for (int t = 0; t < step; t += VL)
            headers[(g * FD_BLOCK + t) / VL] = ISA(gather)(rows + g * FD_INT4_GROUP_BYTES + t * row, row);
}

/* Makes scores of what the loops above leave for tokens [from, to) of a step. Lanes on either side may change. */
FD_INLINE void ISA(scale_scores)(const int dtype, const ISA(queries) *q, const int v, const vi *headers, int from,
                                 int to, float *scores) {
    const vf factor = ISA(splat)(q->scales[v]);
    const float *sums = q->sums + v * q->groups;
    for (int i = from / VL; i * VL < to; i++) {
        vf score = ISA(load)(scores + i * VL);
        if (dtype == FD_INT8) score = __builtin_convertvector((vi)score, vf) * (vf)headers[i];
        for (int g = 0; dtype == FD_INT4 && g < q->groups; g++)
            score = ISA(fma)((vf)(headers[g * (FD_BLOCK / VL) + i] << 16), ISA(splat)(sums[g]), score);
        ISA(store)(scores + i * VL, score * factor);
    }
}

#include "attention_weights.h"

#endif
