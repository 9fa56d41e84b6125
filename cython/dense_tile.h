/* The tile of the packed GEMM: some rows times some panels over a piece of k, sums in registers. Included once
 * per instruction set, with DENSE(name) pasting a prefix, DENSE_VL the lanes of a vector (4, 8 or 16), DENSE_MR the
 * rows of the largest tile and DENSE_MADD the multiply-add.
 *
 * A sum is one chain of multiply-adds in the order of k, whatever the tile; a chain that is cut goes through
 * memory as it is. Tiles of every shape therefore give the same bits. */

typedef float DENSE(vf) __attribute__((vector_size(4 * DENSE_VL)));
typedef float DENSE(vfu) __attribute__((vector_size(4 * DENSE_VL), aligned(1), may_alias));
typedef uint32_t DENSE(vu) __attribute__((vector_size(4 * DENSE_VL)));
typedef uint32_t DENSE(vuu) __attribute__((vector_size(4 * DENSE_VL), aligned(1), may_alias));
#define DENSE_VECS (DENSE_PANEL / DENSE_VL)

DENSE_INLINE DENSE(vf) DENSE(splat)(float x)
{
#if DENSE_VL == 16
    return (DENSE(vf)){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif DENSE_VL == 8
    return (DENSE(vf)){x, x, x, x, x, x, x, x};
#else
    return (DENSE(vf)){x, x, x, x};
#endif
}

DENSE_INLINE void DENSE(widen_int8)(const char *w, DENSE(vf) *out)
{
#if DENSE_VL == 16 && defined(FD_EMULATE_AVX512)
    for (int j = 0; j < DENSE_PANEL; j++) out[0][j] = (float)((const int8_t *)w)[j];
#elif DENSE_VL == 16
    out[0] = (DENSE(vf))_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
#elif DENSE_VL == 8
    for (int i = 0; i < DENSE_VECS; i++) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(w + 8 * i));
        out[i] = (DENSE(vf))_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
#elif defined(__SSE2__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)w);
    const __m128i low = _mm_unpacklo_epi8(bytes, bytes), high = _mm_unpackhi_epi8(bytes, bytes);
    out[0] = (DENSE(vf))_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(low, low), 24));
    out[1] = (DENSE(vf))_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpackhi_epi16(low, low), 24));
    out[2] = (DENSE(vf))_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(high, high), 24));
    out[3] = (DENSE(vf))_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpackhi_epi16(high, high), 24));
#elif defined(__aarch64__)
    const int8x16_t bytes = vld1q_s8((const int8_t *)w);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    out[0] = (DENSE(vf))vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    out[1] = (DENSE(vf))vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
    out[2] = (DENSE(vf))vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    out[3] = (DENSE(vf))vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
#else
    const int8_t *bytes = (const int8_t *)w;
    for (int i = 0; i < DENSE_PANEL; i++) out[i / DENSE_VL][i % DENSE_VL] = (float)bytes[i];
#endif
}

/* The weights of one k, 16 columns, in fp32. */
DENSE_INLINE void DENSE(weights)(const int type, const char *w, DENSE(vf) *out)
{
    if (type == DENSE_INT8) {
        DENSE(widen_int8)(w, out);
    } else if (type == DENSE_BF16) { /* 32-bit lane j holds column j in its low half, j + 8 in its high half */
#if DENSE_VL == 16
        const v8u pair = *(const v8uu *)w;
        const DENSE(vu) both = __builtin_shufflevector(pair, pair, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
        const DENSE(vu) up = {16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0};
        out[0] = (DENSE(vf))(both << up & 0xffff0000u);
#else
        for (int i = 0; i < DENSE_VECS / 2; i++) {
            const DENSE(vu) pair = *(const DENSE(vuu) *)(w + 4 * DENSE_VL * i);
            out[i] = (DENSE(vf))(pair << 16);
            out[i + DENSE_VECS / 2] = (DENSE(vf))(pair & 0xffff0000u);
        }
#endif
    } else {
        for (int i = 0; i < DENSE_VECS; i++) out[i] = *(const DENSE(vfu) *)(w + 4 * DENSE_VL * i);
    }
}

/* Adds the products of one k to all sums. `blocked`: rows of x are DENSE_KC apart; a constant saves registers. */
DENSE_INLINE void DENSE(step)(const int mr, const int np, const int type, const int blocked, const dense_piece *piece,
                              int64_t k, DENSE(vf) (*sum)[DENSE_MAX_NP][DENSE_VECS])
{
    const int64_t x_stride = blocked ? DENSE_KC : piece->x_stride;
#if DENSE_VECS == 1 /* registers enough for the weights of all panels: a value of x is spread once */
    DENSE(vf) line[DENSE_MAX_NP];
    for (int p = 0; p < np; p++)
        DENSE(weights)(type, piece->w + p * piece->panel_bytes + k * DENSE_LINE(type), &line[p]);
    for (int m = 0; m < mr; m++) {
        const DENSE(vf) value = DENSE(splat)(piece->x[m * x_stride + k]);
        for (int p = 0; p < np; p++) sum[m][p][0] = DENSE_MADD(value, line[p], sum[m][p][0]);
    }
    return;
#endif
    for (int p = 0; p < np; p++) {
        DENSE(vf) weight[DENSE_VECS];
        DENSE(weights)(type, piece->w + p * piece->panel_bytes + k * DENSE_LINE(type), weight);
        for (int m = 0; m < mr; m++) {
            const DENSE(vf) value = DENSE(splat)(piece->x[m * x_stride + k]);
            for (int i = 0; i < DENSE_VECS; i++) sum[m][p][i] = DENSE_MADD(value, weight[i], sum[m][p][i]);
        }
    }
}

/* Weights come from memory once, so their loads must be under way long before: every four k, the lines are fetched
 * that these streams need some way ahead. */
DENSE_INLINE void DENSE(fetch)(const int np, const int type, const int blocked, const dense_piece *piece, const char *from)
{
    if (np == 1 || !blocked) { /* there may be several tiles, which share the lines */
        for (int p = 0; p < np; p++)
            for (int i = piece->first_line; i < piece->last_line; i++)
                __builtin_prefetch(from + p * piece->panel_bytes + 64 * i);
        return;
    }
    for (int p = 0; p < np; p++)
        for (int i = 0; i < DENSE_LINE(type) / 16; i++) __builtin_prefetch(from + p * piece->panel_bytes + 64 * i);
}

/* Where the sums go: a stretch of a block hands them on as they are, a whole block starts from zero and ends in
 * its total, = or +=, by the block's scales if any.
 *
 * Blocks of DENSE_KC terms are summed apart and then added up: the rounding error grows with
 * sqrt(KC + K / KC) instead of sqrt(K). Measured on Gemma 3 270M (K up to 2048, activations in the
 * thousands): a quarter of the error of one long sum. */
DENSE_INLINE void DENSE(total)(const int type, DENSE(vf) sum, const float *scales, int first, float *total)
{
    if (type == DENSE_INT8) sum *= *(const DENSE(vfu) *)scales;
    *(DENSE(vfu) *)total = first ? sum : sum + *(const DENSE(vfu) *)total;
}

DENSE_INLINE void DENSE(tile)(const int mr, const int np, const int type, const int blocked, const dense_piece *given)
{
    const dense_piece piece = *given;
    DENSE(vf) sum[DENSE_MR][DENSE_MAX_NP][DENSE_VECS];
    for (int m = 0; m < mr; m++)
        for (int p = 0; p < np; p++)
            for (int i = 0; i < DENSE_VECS; i++) {
                const float *from = piece.sums + (p * DENSE_SKINNY + m) * DENSE_PANEL + i * DENSE_VL;
                sum[m][p][i] = (DENSE(vf)){0};
                if (blocked) sum[m][p][i] = *(const DENSE(vfu) *)from;
            }
    const char *from = piece.near;
    int64_t k = 0, end = piece.split;
    for (int part = 0; part < 2; part++) {
        if (mr * np * DENSE_VECS > 8) { /* not unrolled: it would take registers that the sums need */
#pragma GCC unroll 1
            for (; k < end; k++, from += DENSE_LINE(type)) {
                if (k % 4 == 0) DENSE(fetch)(np, type, blocked, &piece, from);
                DENSE(step)(mr, np, type, blocked, &piece, k, sum);
            }
        } else { /* by hand: an inner loop is unrolled too late for the sums to become registers */
            for (; k < end; k += 4, from += 4 * DENSE_LINE(type)) {
                DENSE(fetch)(np, type, blocked, &piece, from);
                DENSE(step)(mr, np, type, blocked, &piece, k, sum);
                DENSE(step)(mr, np, type, blocked, &piece, k + 1, sum);
                DENSE(step)(mr, np, type, blocked, &piece, k + 2, sum);
                DENSE(step)(mr, np, type, blocked, &piece, k + 3, sum);
            }
        }
        from = piece.far;
        end = piece.kc & ~(int64_t)3;
    }
    for (; k < piece.kc; k++) DENSE(step)(mr, np, type, blocked, &piece, k, sum);
    for (int m = 0; m < mr; m++)
        for (int p = 0; p < np; p++)
            for (int i = 0; i < DENSE_VECS; i++) {
                const int64_t row = m * DENSE_PANEL + i * DENSE_VL;
                float *to = piece.sums + row + p * (blocked ? DENSE_SKINNY * DENSE_PANEL : piece.sums_step);
                const float *scales = piece.scales + p * (piece.panel_bytes / 4) + i * DENSE_VL;
                if (blocked) *(DENSE(vfu) *)to = sum[m][p][i];
                else DENSE(total)(type, sum[m][p][i], scales, piece.first, to);
            }
}

#define DENSE_CASE(MR, NP)                            \
    case 8 * (MR) + (NP):                             \
        DENSE(tile)(MR, NP, type, blocked, piece);    \
        break;

#define DENSE_CASES(NP) DENSE_CASE(1, NP) DENSE_CASE(2, NP) DENSE_CASE(3, NP)

DENSE_INLINE void DENSE(tile_of_type)(const int type, const int blocked, int mr, int np, const dense_piece *piece)
{
    switch (8 * mr + np) {
        DENSE_CASES(1)
#if DENSE_MR >= 6
        DENSE_CASE(4, 1)
        DENSE_CASE(5, 1)
        DENSE_CASE(6, 1)
#endif
#if DENSE_MR == 16
        DENSE_CASE(7, 1)
        DENSE_CASE(8, 1)
        DENSE_CASES(2)
        DENSE_CASE(4, 2)
        DENSE_CASE(5, 2)
        DENSE_CASE(6, 2)
        DENSE_CASE(7, 2)
        DENSE_CASE(8, 2)
        DENSE_CASES(3)
        DENSE_CASE(4, 3)
#endif
    }
#if DENSE_MR == 6
    if (!blocked) return;
    switch (8 * mr + np) {
        DENSE_CASES(2)
        DENSE_CASE(1, 3)
        DENSE_CASE(1, 4)
    }
#elif DENSE_MR == 16
    if (blocked) {
        switch (8 * mr + np) {
            DENSE_CASES(4)
            DENSE_CASE(4, 4)
            DENSE_CASE(9, 1)
            DENSE_CASE(10, 1)
            DENSE_CASE(11, 1)
            DENSE_CASE(12, 1)
            DENSE_CASE(13, 1)
            DENSE_CASE(14, 1)
            DENSE_CASE(15, 1)
            DENSE_CASE(16, 1)
        }
        return;
    }
    switch (8 * mr + np) {
        DENSE_CASE(5, 3)
        DENSE_CASE(6, 3)
        DENSE_CASE(7, 3)
        DENSE_CASE(8, 3)
    }
#endif
}

/* Functions a type: compilers see them one by one. */
#define DENSE_TILES(NAME, TYPE, BLOCKED)                              \
    static void DENSE(NAME)(int mr, int np, const dense_piece *piece) \
    {                                                                 \
        DENSE(tile_of_type)(TYPE, BLOCKED, mr, np, piece);            \
    }
DENSE_TILES(fp32_tile, DENSE_FP32, 0)
DENSE_TILES(bf16_tile, DENSE_BF16, 0)
DENSE_TILES(int8_tile, DENSE_INT8, 0)
DENSE_TILES(blocked_fp32_tile, DENSE_FP32, 1)
DENSE_TILES(blocked_bf16_tile, DENSE_BF16, 1)
DENSE_TILES(blocked_int8_tile, DENSE_INT8, 1)

/* Rows [mr] times panels [np] into piece->sums; np is DENSE_NP at most unless x is blocked. */
static void DENSE(any_tile)(int mr, int np, int type, int blocked, const dense_piece *piece)
{
    static void (*const tiles[][2])(int, int, const dense_piece *) = {
        [DENSE_FP32] = {DENSE(fp32_tile), DENSE(blocked_fp32_tile)},
        [DENSE_BF16] = {DENSE(bf16_tile), DENSE(blocked_bf16_tile)},
        [DENSE_INT8] = {DENSE(int8_tile), DENSE(blocked_int8_tile)},
    };
    tiles[type][blocked](mr, np, piece);
}

/* The totals [rows][16] of a panel from the sums [rows][16] of a block that came in stretches. */
static void DENSE(fold)(int type, const float *sums, const float *scales, int64_t rows, float *total, int first)
{
    for (int64_t at = 0; at < rows * DENSE_PANEL; at += DENSE_VL) {
        const DENSE(vf) sum = *(const DENSE(vfu) *)(sums + at);
        if (type == DENSE_INT8) DENSE(total)(DENSE_INT8, sum, scales + at % DENSE_PANEL, first, total + at);
        else DENSE(total)(DENSE_FP32, sum, scales, first, total + at);
    }
}
