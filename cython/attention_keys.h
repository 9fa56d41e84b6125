/* The inner loops of attention_kernel.h over K, whose rows lie interleaved (attention_layout.h): a vector holds one
 * dimension of VL tokens, or two or four of them as integers, and a query's values go into all lanes. H query vectors
 * against TV vectors of tokens at a time. */

enum { ISA(KEY_STEP_ROWS) = VL > 8 ? FD_BLOCK : FD_KEY_STEP_ROWS }; /* the least that a pass over K takes at once */

/* Vectors of tokens by the number of query vectors; at most KEY_STEP_ROWS tokens. */
FD_INLINE int ISA(key_vectors)(int H, int dtype) {
    const int most = ISA(KEY_STEP_ROWS) / VL < 4 ? ISA(KEY_STEP_ROWS) / VL : 4;
    if (FD_REGISTERS > 16) return H > 6 && most > 2 ? 2 : most;
    if (dtype >= FD_INT8 && H > 2) return 2;
    return H < 3 || (H == 3 && dtype == FD_FP32) ? most : 2;
}

/* The vth vector of tokens of the words of 4 or 2 bytes that lie at `i` times that in each tile. */
FD_INLINE vf ISA(key_lanes)(const char *tiles, const size_t tile, const int v, const size_t i, const int dtype) {
#if VL > 8
    return ISA(load_two)(tiles + 2 * v * tile, tiles + (2 * v + 1) * tile, (int64_t)i * FD_TILE_TOKENS, dtype);
#else
    return ISA(load_as)(tiles + v * VL / FD_TILE_TOKENS * tile, (int64_t)i * FD_TILE_TOKENS + v * VL % FD_TILE_TOKENS,
                        dtype);
#endif
}

/* One dimension: products of H queries' values and TV vectors. */
FD_INLINE void ISA(key_products)(const int H, const int TV, vf a[FD_MOST][8], const vf *x, const float *q,
                                 const size_t dim) {
    if (TV > H) {
        vf y[FD_MOST];
        FD_UNROLL
        for (int h = 0; h < H; h++) y[h] = ISA(splat)(q[h * dim]);
        FD_UNROLL
        for (int v = 0; v < TV; v++) {
            FD_UNROLL
            for (int h = 0; h < H; h++) a[h][v] = ISA(fma)(x[v], y[h], a[h][v]);
        }
    } else {
        FD_UNROLL
        for (int h = 0; h < H; h++) {
            const vf y = ISA(splat)(q[h * dim]);
            FD_UNROLL
            for (int v = 0; v < TV; v++) a[h][v] = ISA(fma)(x[v], y, a[h][v]);
        }
    }
}

FD_INLINE void ISA(dot_numbers)(const int H, const int TV, const int dtype, vf a[FD_MOST][8], const float *q, const int dim,
                                const char *k, const size_t tile, ISA(stream) *s) {
    const size_t chunk = (size_t)FD_CHUNK * FD_TILE_TOKENS * (dtype == FD_FP32 ? 4 : 2);
    for (const float *end = q + dim; q < end; q += FD_CHUNK, k += chunk) {
        ISA(advance)(s);
        FD_UNROLL
        for (int e = 0; e < FD_CHUNK; e++) {
            vf x[8];
            FD_UNROLL
            for (int v = 0; v < TV; v++) x[v] = ISA(key_lanes)(k, tile, v, (size_t)e, dtype);
            ISA(key_products)(H, TV, a, x, q + e, (size_t)dim);
        }
    }
}

/* Two dimensions of VL tokens as 16-bit integers, of the pair that lies at `at` in each tile. */
FD_INLINE vi ISA(key_words)(const char *tiles, const size_t tile, const int v, const size_t at) {
#if VL > 8
    return ISA(join_whole)(fd_avx2_words(tiles + 2 * v * tile + at), fd_avx2_words(tiles + (2 * v + 1) * tile + at));
#else
    return ISA(words)(tiles + v * VL / FD_TILE_TOKENS * tile + at + v * VL % FD_TILE_TOKENS * 2);
#endif
}

/* Four dimensions, of int4: two pairs. */
FD_INLINE void ISA(key_nibbles)(const char *tiles, const size_t tile, const int v, const size_t at, vi *x) {
#if VL > 8
    v8i low[2], high[2];
    fd_avx2_nibble_words(tiles + 2 * v * tile + at, low);
    fd_avx2_nibble_words(tiles + (2 * v + 1) * tile + at, high);
    x[0] = ISA(join_whole)(low[0], high[0]);
    x[1] = ISA(join_whole)(low[1], high[1]);
#else
    ISA(nibble_words)(tiles + v * VL / FD_TILE_TOKENS * tile + at + v * VL % FD_TILE_TOKENS * 2, x);
#endif
}

enum { ISA(SCALES) = FD_TILE_TOKENS * 4, ISA(PAIR) = FD_TILE_TOKENS * 2 }; /* bytes of eight scales, of a pair of dims */

#if FD_INTEGERS

/* Adds the products of a pair of dimensions; `q` holds that of the first query. */
FD_INLINE void ISA(add_products)(const int H, const int TV, vi a[FD_MOST][8], const vi *x, const int16_t *q,
                                 const int width) {
    FD_UNROLL
    for (int h = 0; h < H; h++) {
        const vi y = ISA(spread)((const char *)(q + h * width));
        FD_UNROLL
        for (int v = 0; v < TV; v++) a[h][v] = ISA(madd_to)(a[h][v], x[v], y);
    }
}

FD_INLINE void ISA(dot_bytes)(const int H, const int TV, vf scores[FD_MOST][8], const int16_t *q, const int width,
                              const int dim, const char *k, const size_t tile, ISA(stream) *s) {
    vi a[FD_MOST][8];
    FD_UNROLL
    for (int h = 0; h < H; h++)
        FD_UNROLL
        for (int v = 0; v < TV; v++) a[h][v] = (vi){0};
    for (int d = 0; d < dim; d += FD_CHUNK) {
        ISA(advance)(s);
        FD_UNROLL
        for (int e = d; e < d + FD_CHUNK; e += 2) {
            vi x[8];
            FD_UNROLL
            for (int v = 0; v < TV; v++) x[v] = ISA(key_words)(k, tile, v, ISA(SCALES) + (size_t)e / 2 * ISA(PAIR));
            ISA(add_products)(H, TV, a, x, q + e, width);
        }
    }
    FD_UNROLL
    for (int v = 0; v < TV; v++) {
        const vf scale = ISA(key_lanes)(k, tile, v, 0, FD_FP32);
        FD_UNROLL
        for (int h = 0; h < H; h++) scores[h][v] = __builtin_convertvector(a[h][v], vf) * scale;
    }
}

/* One group: its sum is exact, times scale; the minimum times the sum of the query's integers. */
FD_INLINE void ISA(dot_group)(const int H, const int TV, vf scores[FD_MOST][8], const int16_t *q, const int width,
                              const float *sums, const int groups, const char *group, const size_t tile,
                              const int quads, ISA(stream) *s) {
    vi a[FD_MOST][8];
    FD_UNROLL
    for (int h = 0; h < H; h++)
        FD_UNROLL
        for (int v = 0; v < TV; v++) a[h][v] = (vi){0};
    for (int quad = 0; quad < quads; quad += 2) {
        ISA(advance)(s);
        FD_UNROLL
        for (int e = quad; e < quad + 2; e++) {
            vi low[8], high[8];
            FD_UNROLL
            for (int v = 0; v < TV; v++) {
                vi x[2];
                ISA(key_nibbles)(group, tile, v, ISA(SCALES) + (size_t)e * ISA(PAIR), x);
                low[v] = x[0];
                high[v] = x[1];
            }
            ISA(add_products)(H, TV, a, low, q + 4 * e, width);
            ISA(add_products)(H, TV, a, high, q + 4 * e + 2, width);
        }
    }
    FD_UNROLL
    for (int v = 0; v < TV; v++) {
        const vi pair = (vi)ISA(key_lanes)(group, tile, v, 0, FD_FP32);
        const vf scale = (vf)(pair & (int32_t)0xffff0000), minimum = (vf)(pair << 16);
        FD_UNROLL
        for (int h = 0; h < H; h++) {
            const vf sum = ISA(fma)(__builtin_convertvector(a[h][v], vf), scale, scores[h][v]);
            scores[h][v] = ISA(fma)(minimum, ISA(splat)(sums[h * groups]), sum);
        }
    }
}

FD_INLINE void ISA(dot_nibbles)(const int H, const int TV, vf scores[FD_MOST][8], const ISA(queries) *q, const int first,
                                const char *k, const size_t tile, ISA(stream) *s) {
    const int16_t *whole = q->whole + first * q->width;
    const float *sums = q->sums + first * q->groups;
    for (int d = 0; d < q->dim; d += 32, k += FD_INT4_GROUP_BYTES * FD_TILE_TOKENS, sums++) {
        ISA(dot_group)(H, TV, scores, whole + d, q->width, sums, q->groups, k, tile, q->dim - d > 16 ? 8 : 4, s);
    }
}

#else

/* int8 and int4 as numbers; a pair of dimensions is two words of 16 bits in each lane. */
FD_INLINE void ISA(dot_bytes)(const int H, const int TV, vf a[FD_MOST][8], const float *q, const int dim, const char *k,
                              const size_t tile, ISA(stream) *s) {
    for (int d = 0; d < dim; d += 2) {
        vf even[8], odd[8];
        if (d % FD_CHUNK == 0) ISA(advance)(s);
        FD_UNROLL
        for (int v = 0; v < TV; v++) {
            const vi x = ISA(key_words)(k, tile, v, ISA(SCALES) + (size_t)d / 2 * ISA(PAIR));
            even[v] = __builtin_convertvector(x << 16 >> 16, vf);
            odd[v] = __builtin_convertvector(x >> 16, vf);
        }
        ISA(key_products)(H, TV, a, even, q + d, (size_t)dim);
        ISA(key_products)(H, TV, a, odd, q + d + 1, dim);
    }
    FD_UNROLL
    for (int v = 0; v < TV; v++) {
        const vf scale = ISA(key_lanes)(k, tile, v, 0, FD_FP32);
        FD_UNROLL
        for (int h = 0; h < H; h++) a[h][v] *= scale;
    }
}

FD_INLINE void ISA(dot_nibbles)(const int H, const int TV, vf a[FD_MOST][8], const float *q, const int dim, const char *k,
                                const size_t tile, ISA(stream) *s) {
    for (int d = 0; d < dim; d += 4) {
        const char *group = k + d / 32 * FD_INT4_GROUP_BYTES * FD_TILE_TOKENS;
        vf x[4][8];
        if (d % FD_CHUNK == 0) ISA(advance)(s);
        FD_UNROLL
        for (int v = 0; v < TV; v++) {
            const vi pair = (vi)ISA(key_lanes)(group, tile, v, 0, FD_FP32);
            const vf scale = (vf)(pair & (int32_t)0xffff0000), minimum = (vf)(pair << 16);
            vi both[2];
            ISA(key_nibbles)(group, tile, v, ISA(SCALES) + (size_t)(d % 32) / 4 * ISA(PAIR), both);
            FD_UNROLL
            for (int i = 0; i < 4; i++) {
                const vi nibble = i % 2 ? both[i / 2] >> 16 : both[i / 2] & 0xffff;
                x[i][v] = ISA(fma)(__builtin_convertvector(nibble, vf), scale, minimum);
            }
        }
        FD_UNROLL
        for (int i = 0; i < 4; i++) ISA(key_products)(H, TV, a, x[i], q + d + i, dim);
    }
}

#endif

/* Scores of H vectors, the first of them `first`, against tokens [from, to) of a step whose tiles lie at k. Tiles are
 * taken whole: scores on either side of [from, to) may be written. */
FD_INLINE void ISA(dot)(const int H, const int TV, const int dtype, const ISA(queries) *q, const int first,
                        const char *k, const size_t tile, const int from, const int to, ISA(stream) *stream,
                        float *scores) {
    enum { TILE = FD_TILE_TOKENS };
    ISA(stream) s = *stream;
    for (int t = from / (TV * VL) * (TV * VL); t < to; t += TV * VL) {
        const char *kt = k + t / TILE * tile;
        vf a[FD_MOST][8];
        FD_UNROLL
        for (int h = 0; h < H; h++)
            FD_UNROLL
            for (int v = 0; v < TV; v++) a[h][v] = ISA(splat)(0.0f);
#if FD_INTEGERS
        if (dtype == FD_INT8) ISA(dot_bytes)(H, TV, a, q->whole + first * q->width, q->width, q->dim, kt, tile, &s);
        else if (dtype == FD_INT4) ISA(dot_nibbles)(H, TV, a, q, first, kt, tile, &s);
#else
        if (dtype == FD_INT8) ISA(dot_bytes)(H, TV, a, q->x + first * q->dim, q->dim, kt, tile, &s);
        else if (dtype == FD_INT4) ISA(dot_nibbles)(H, TV, a, q->x + first * q->dim, q->dim, kt, tile, &s);
#endif
        else ISA(dot_numbers)(H, TV, dtype, a, q->x + first * q->dim, q->dim, kt, tile, &s);
        FD_UNROLL
        for (int h = 0; h < H; h++)
            FD_UNROLL
            for (int v = 0; v < TV; v++) {
                if (ISA(in_integers)(dtype)) a[h][v] *= ISA(splat)(q->scales[first + h]);
                ISA(store)(scores + h * FD_SCORES + t + v * VL, a[h][v]);
            }
    }
    *stream = s;
}

typedef void (*ISA(dot_fn))(const ISA(queries) *q, int first, const char *k, size_t tile, int from, int to,
                            ISA(stream) *stream, float *scores);

#define FD_DOT(H, DTYPE)                                                                                            \
    static __attribute__((noinline)) void ISA(dot_##H##_##DTYPE)(const ISA(queries) *q, int first, const char *k,   \
                                                                 size_t tile, int from, int to,                     \
                                                                 ISA(stream) *stream, float *scores) {              \
        ISA(dot)(H, ISA(key_vectors)(H, FD_##DTYPE), FD_##DTYPE, q, first, k, tile, from, to, stream, scores);      \
    }
#define FD_DOTS(DTYPE) FD_EACH(FD_DOT, DTYPE)
FD_DOTS(FP32)
FD_DOTS(FP16)
FD_DOTS(BF16)
FD_DOTS(INT8)
FD_DOTS(INT4)
#undef FD_DOTS
#undef FD_DOT

#define FD_NAMED(H, DTYPE) ISA(dot_##H##_##DTYPE),
#define FD_ROW(DTYPE) {FD_EACH(FD_NAMED, DTYPE)}
/* by dtype and H - 1 */
static const ISA(dot_fn) ISA(dots)[5][FD_MOST] = {FD_ROW(FP32), FD_ROW(FP16), FD_ROW(BF16), FD_ROW(INT8), FD_ROW(INT4)};
#undef FD_ROW
#undef FD_NAMED
