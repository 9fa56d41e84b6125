/* Arithmetic on int8 and int4 rows in integers: products of 16-bit ones, two of which a
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
    const int16_t *whole; /* [n][width], zero behind dim */
    const float *sums;    /* [n][groups]: of a group's integers, int4 */
    const float *scales;  /* [n] */
    int dim, width, groups;
} ISA(queries);

/* Vectors of V that a pass over the tokens adds up. */
FD_INLINE int ISA(integer_width)(int H, int dtype) {
    if (dtype == FD_INT4) return VL > 8 ? 2 : VL < 8 || H < 3 ? 4 : 2;
    if (VL > 8) return H > 6 ? 2 : 4;
    return FD_REGISTERS > 16 || VL < 8 ? 4 : H == 1 ? 8 : H == 2 ? 4 : 2;
}
/* Passes over the tokens, as many times half of them. */
FD_INLINE int ISA(integer_slices)(int H, int dim, int dtype) {
    const int width = ISA(integer_width)(H, dtype) * VL;
    return dim / width + (dim % width + 15) / 16;
}

/* c plus the sums of each two neighbouring products of 16-bit integers. */
#if FD_INTEGERS && VL <= 8
FD_INLINE vi ISA(madd_to)(vi c, vi a, vi b) { return c + ISA(madd)(a, b); }
#endif

/* Whether rows of a dtype go through these loops. */
FD_INLINE int ISA(in_integers)(int dtype) { return FD_INTEGERS && dtype >= FD_INT8; }

#if FD_INTEGERS

#if VL <= 8

/* A query's integers and the sums of each 32 of them; returns the scale, not-a-number when one is not finite. */
static float ISA(quantise_query)(const float *x, int dim, int16_t *whole, float *sums) {
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
            ISA(store_words)(whole + i, rounded);
        }
        int32_t lanes[VL], total = 0;
        memcpy(lanes, &sum, sizeof lanes);
        for (int i = 0; i < VL; i++) total += lanes[i];
        sums[start / 32] = (float)total;
    }
    return ISA(any)(bad) ? NAN : empty ? 0.0f : largest / limit;
}

#else

FD_INLINE float ISA(quantise_query)(const float *x, int dim, int16_t *whole, float *sums) {
    return fd_avx2_quantise_query(x, dim, whole, sums);
}

#endif

/* All vectors of a unit. */
static void ISA(quantise_queries)(const float *x, int n, int dim, int16_t *whole, float *sums, float *scales) {
    const int groups = (dim + 31) / 32;
    for (int v = 0; v < n; v++, x += dim, whole += groups * 32, sums += groups)
        scales[v] = ISA(quantise_query)(x, dim, whole, sums);
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

#include "attention_weights.h"

#endif
