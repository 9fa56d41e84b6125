/* The inner loops of attention_kernel.h over V: NV vectors of its rows for H query vectors. Those over K:
 * attention_keys.h.
 *
 * Every case is a function of its own, kept from inlining: accumulators, one operand and the pointers just fit 16
 * registers, and together with anything else they would not (measured: half the speed). The products wanted per
 * loaded vector decide the shapes: 12 accumulators hide the latency of fma, 8 do nearly. */

/* Makes something of each number of query vectors. */
#if VL > 8
#define FD_EACH(MAKE, DTYPE) \
    MAKE(1, DTYPE) MAKE(2, DTYPE) MAKE(3, DTYPE) MAKE(4, DTYPE) MAKE(5, DTYPE) MAKE(6, DTYPE) MAKE(7, DTYPE) MAKE(8, DTYPE)
#else
#define FD_EACH(MAKE, DTYPE) MAKE(1, DTYPE) MAKE(2, DTYPE) MAKE(3, DTYPE) MAKE(4, DTYPE)
#endif

/* Fetches the memory that is to be read next, in step with the arithmetic on what is there: a burst would fill the
 * miss buffers and stall the loads behind it. Offsets and the pace are in 1/256 bytes. */
typedef struct {
    const char *base;
    uint64_t at, stop, pace;
} ISA(stream);

FD_INLINE ISA(stream) ISA(stream_of)(const char *base, size_t nbytes, int64_t steps) {
    return (ISA(stream)){base, 0, 0, nbytes * 256 / (uint64_t)fd_max(1, steps)};
}

FD_INLINE void ISA(advance)(ISA(stream) *s) {
    for (s->stop += s->pace; s->at < s->stop; s->at += 64 << 8) __builtin_prefetch(s->base + (s->at >> 8));
}

/* Vectors of V that a pass over the tokens adds up; no more than 64 dimensions, which the smaller heads have. */
FD_INLINE int ISA(tile_width)(int H) {
    if (VL > 8) return H > 6 ? 2 : 4;
    if (FD_REGISTERS > 16) return H > 2 ? 4 : 8;
    return H == 1 ? 8 : H == 4 && VL > 4 ? 2 : 4;
}
/* Dimensions of a row that are whole vectors. */
FD_INLINE int ISA(whole)(int dim) { return VL > 8 ? dim / VL * VL : dim; }
/* Passes over the tokens: of tile_width vectors, of pairs where there are registers for more, of one, of a half. */
FD_INLINE int ISA(slices)(int H, int dim) {
    const int width = ISA(tile_width)(H) * VL, rest = dim % width;
    if (FD_REGISTERS > 16) return dim / width + rest / (2 * VL) + (rest % (2 * VL) + VL - 1) / VL;
    return dim / width + rest / VL;
}

/* Scale of an int8 row. */
FD_INLINE float ISA(scale)(const char *row) {
    float scale;
    memcpy(&scale, row, sizeof scale);
    return scale;
}

/* NV vectors of a row from dimension d on, a multiple of NV * VL; a vector's first lanes, if there is one. */
FD_INLINE void ISA(load_slice)(const int NV, const int lanes, const int dtype, const char *row, const int d, vf *x) {
    if (dtype == FD_INT4) {
        const char *group = row + d / 32 * FD_INT4_GROUP_BYTES;
        FD_UNROLL
        for (int e = 0; e < NV * VL; e += 16)
            ISA(load_int4)(group + e / 32 * FD_INT4_GROUP_BYTES, NV * VL < 32 ? d % 32 / 16 : e % 32 / 16, x + e / VL);
        if (NV * VL < 16) {
            x[0] = x[d % 16 / VL];
            if (NV == 2) x[1] = x[d % 16 / VL + 1];
        }
    } else {
        FD_UNROLL
        for (int j = 0; j < NV; j++) x[j] = ISA(load_lanes)(row, d + j * VL, dtype, lanes);
    }
}

/* Adds weights * V of tokens [from, to) to NV vectors, from dimension d on, of H accumulators. */
FD_INLINE void ISA(add_slice)(const int H, const int NV, const int lanes, const int dtype, const float *weights,
                              const char *v, const size_t row, const int from, const int to, ISA(stream) *stream,
                              float *acc, const int dim, const int d) {
    ISA(stream) s = *stream;
    vf a[FD_MOST][8];
    FD_UNROLL
    for (int h = 0; h < H; h++)
        FD_UNROLL
        for (int j = 0; j < NV; j++) a[h][j] = ISA(load_lanes)(acc + h * dim + d + j * VL, 0, FD_FP32, lanes);
    const char *vt = v + from * row;
    int t = from; /* before `to` */
    do {
        ISA(advance)(&s);
        if (H > NV || dtype == FD_INT4) {
            vf x[8 + ISA(BLOCK_VECTORS)];
            ISA(load_slice)(NV, lanes, dtype, vt, d, x);
            FD_UNROLL
            for (int h = 0; h < H; h++) {
                const vf w = ISA(splat)(weights[h * FD_SCORES + t]);
                FD_UNROLL
                for (int j = 0; j < NV; j++) a[h][j] = ISA(fma)(w, x[j], a[h][j]);
            }
        } else {
            vf w[FD_MOST];
            FD_UNROLL
            for (int h = 0; h < H; h++) w[h] = ISA(splat)(weights[h * FD_SCORES + t]);
            FD_UNROLL
            for (int j = 0; j < NV; j++) {
                const vf x = ISA(load_lanes)(vt, d + j * VL, dtype, lanes);
                FD_UNROLL
                for (int h = 0; h < H; h++) a[h][j] = ISA(fma)(w[h], x, a[h][j]);
            }
        }
        vt += row;
    } while (++t < to);
    FD_UNROLL
    for (int h = 0; h < H; h++)
        FD_UNROLL
        for (int j = 0; j < NV; j++) ISA(store_lanes)(acc + h * dim + d + j * VL, a[h][j], lanes);
    *stream = s;
}

#include "attention_integer.h"
#include "attention_keys.h"

typedef void (*ISA(add_fn))(const float *weights, const char *v, size_t row, int from, int to, ISA(stream) *stream,
                            float *acc, int dim);

#define FD_TILE(H, DTYPE)                                                                                          \
    static __attribute__((noinline)) void ISA(add_##H##_##DTYPE)(const float *weights, const char *v, size_t row,  \
                                                                 int from, int to, ISA(stream) *stream, float *acc, \
                                                                 int dim) {                                        \
        const int NV = ISA(tile_width)(H);                                                                         \
        int d = 0;                                                                                                 \
        for (; d + NV * VL <= dim; d += NV * VL)                                                                   \
            ISA(add_slice)(H, NV, VL, FD_##DTYPE, weights, v, row, from, to, stream, acc, dim, d);                 \
        for (; FD_REGISTERS > 16 && d + 2 * VL <= dim; d += 2 * VL)                                                \
            ISA(add_slice)(H, 2, VL, FD_##DTYPE, weights, v, row, from, to, stream, acc, dim, d);                  \
        for (; d < ISA(whole)(dim); d += VL)                                                                       \
            ISA(add_slice)(H, 1, VL, FD_##DTYPE, weights, v, row, from, to, stream, acc, dim, d);                  \
        if (VL > 8 && d < dim)                                                                                     \
            ISA(add_slice)(H, 1, 8, FD_##DTYPE, weights, v, row, from, to, stream, acc, dim, d);                   \
    }
#define FD_TILES(DTYPE) FD_EACH(FD_TILE, DTYPE)
FD_TILES(FP32)
FD_TILES(FP16)
FD_TILES(BF16)
#if !FD_INTEGERS
FD_TILES(INT8)
FD_TILES(INT4)
#endif
#undef FD_TILES
#undef FD_TILE

#define FD_NAMED(H, DTYPE) ISA(add_##H##_##DTYPE),
#define FD_ROW(DTYPE) {FD_EACH(FD_NAMED, DTYPE)}
/* by dtype and H - 1 */
#if FD_INTEGERS
static const ISA(add_fn) ISA(adds)[3][FD_MOST] = {FD_ROW(FP32), FD_ROW(FP16), FD_ROW(BF16)};
static const ISA(add_integers_fn) ISA(adds_integers)[2][FD_MOST] = {FD_ROW(INT8), FD_ROW(INT4)};
#else
static const ISA(add_fn) ISA(adds)[5][FD_MOST] = {FD_ROW(FP32), FD_ROW(FP16), FD_ROW(BF16), FD_ROW(INT8), FD_ROW(INT4)};
#endif
#undef FD_ROW
#undef FD_NAMED
#undef FD_EACH
