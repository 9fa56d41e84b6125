/* Attention of a few query vectors over one segment of one KV head; see attention_simd.h for ISA().
 *
 * What makes the bits of an output depend on (q, KV, SEG, ISA) alone:
 *  - a score is one chain of fused products over the head dimension and one fixed tree over the lanes;
 *  - the softmax of a segment sums its weights by lanes of absolute position;
 *  - the weighted sum of V adds tokens in order, one chain per output element;
 *  - segments begin at multiples of FD_SEG and merge in order.
 * How vectors and tokens are tiled, and which thread runs what, changes none of these chains. */

typedef struct {
    const fd_group *group;
    const fd_list *list;
    int64_t base;            /* first position of the segment */
    size_t k_offset, v_offset; /* of this layer and head inside a block */
    int dtype;
    const char *next;        /* K rows that this thread reads after this segment, fetched during its last V rows */
    int next_rows;
} ISA(view);

/* Tokens of one query vector inside the segment, [lo, hi) relative to its base; each has slope * (its position -
 * the query's) added to its score, where the segment's first token lies `ahead` of the query. */
typedef struct {
    int32_t lo, hi, ahead;
    float slope;
} ISA(span);

/* Start of a token's row, to which the offset of a layer, side and head is to be added. */
FD_INLINE const char *ISA(row)(const ISA(view) *view, int token) {
    return fd_block_at(view->group, view->list, view->base + token)->data +
           (size_t)(token % FD_BLOCK) * view->group->row_bytes;
}

/* Fetches the line that `nbytes` of streaming from offset `at` on correspond to, if it is the first to do so.
 * One line per line consumed: a burst would fill the miss buffers and stall the loads behind it. */
FD_INLINE void ISA(fetch)(const char *ahead, size_t at, size_t nbytes, size_t limit) {
    if (at >= limit) return;
    for (size_t b = 0; b < nbytes; b += 64)
        if (nbytes >= 64 || at % 64 < nbytes) __builtin_prefetch(ahead + at + b);
}

/* Scale of an int8 row. */
FD_INLINE float ISA(scale)(const char *row) {
    float scale;
    memcpy(&scale, row, sizeof scale);
    return scale;
}

/* Scores of H vectors against tokens [t, t+4), fetching ahead[at .. at + 4 rows) meanwhile. */
FD_INLINE void ISA(dot4)(int H, int dtype, const float *q, int dim, const char *k, size_t row, const char *ahead,
                         size_t at, size_t limit, float *scores) {
    v4f r[4];
    if (H == 4) {
        for (int t = 0; t < 4; t += 2) {
            vf acc[4][2] = {{{0}}};
            const char *k0 = k + t * row, *k1 = k0 + row;
            for (int i = 0; i < dim; i += VL) {
                vf a = ISA(load_as)(k0, i, dtype), b = ISA(load_as)(k1, i, dtype);
                ISA(fetch)(ahead, at + t * row + fd_stream_bytes(dtype, 2 * i), fd_stream_bytes(dtype, 2 * VL), limit);
                for (int h = 0; h < 4; h++) {
                    vf qh = ISA(load)(q + h * dim + i);
                    acc[h][0] = ISA(fma)(a, qh, acc[h][0]);
                    acc[h][1] = ISA(fma)(b, qh, acc[h][1]);
                }
            }
            r[t] = ISA(sums)(acc[0][0], acc[1][0], acc[2][0], acc[3][0]);
            r[t + 1] = ISA(sums)(acc[0][1], acc[1][1], acc[2][1], acc[3][1]);
        }
        const v4i low = {0, 4, 1, 5}, high = {2, 6, 3, 7}; /* from heads of a token to tokens of a head */
        v4f ab = __builtin_shuffle(r[0], r[1], low), cd = __builtin_shuffle(r[2], r[3], low);
        v4f ef = __builtin_shuffle(r[0], r[1], high), gh = __builtin_shuffle(r[2], r[3], high);
        r[0] = __builtin_shuffle(ab, cd, (v4i){0, 1, 4, 5});
        r[1] = __builtin_shuffle(ab, cd, (v4i){2, 3, 6, 7});
        r[2] = __builtin_shuffle(ef, gh, (v4i){0, 1, 4, 5});
        r[3] = __builtin_shuffle(ef, gh, (v4i){2, 3, 6, 7});
    } else {
        vf acc[3][4] = {{{0}}};
        for (int i = 0; i < dim; i += VL) {
            ISA(fetch)(ahead, at + fd_stream_bytes(dtype, 4 * i), fd_stream_bytes(dtype, 4 * VL), limit);
            for (int t = 0; t < 4; t++) {
                vf kt = ISA(load_as)(k + t * row, i, dtype);
                for (int h = 0; h < H; h++) acc[h][t] = ISA(fma)(kt, ISA(load)(q + h * dim + i), acc[h][t]);
            }
        }
        for (int h = 0; h < H; h++) r[h] = ISA(sums)(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
    }
    if (dtype == FD_INT8) {
        const v4f scales = {ISA(scale)(k), ISA(scale)(k + row), ISA(scale)(k + 2 * row), ISA(scale)(k + 3 * row)};
        for (int h = 0; h < H; h++) r[h] *= scales;
    }
    for (int h = 0; h < H; h++) memcpy(scores + h * FD_SCORES, &r[h], sizeof r[h]);
}

/* Adds weights * V of tokens [from, to) to the NV vectors of H accumulators from dimension d on. */
FD_INLINE void ISA(add)(int H, int NV, int dtype, const float *weights, const char *v, size_t row, int from, int to,
                        const char *ahead, int ahead_rows, float *acc, int dim, int d) {
    const size_t nbytes = fd_stream_bytes(dtype, NV * VL), skipped = fd_stream_bytes(dtype, d) * FD_BLOCK;
    ahead += skipped;
    const size_t limit = ahead_rows * row - fd_min(ahead_rows * row, skipped);
    vf a[4][8];
    for (int h = 0; h < H; h++)
        for (int j = 0; j < NV; j++) a[h][j] = ISA(load)(acc + h * dim + d + j * VL);
    for (int t = from; t < to; t++) {
        vf w[4];
        for (int h = 0; h < H; h++) w[h] = ISA(splat)(weights[h * FD_SCORES + t]);
        ISA(fetch)(ahead, t * nbytes, nbytes, limit);
        for (int j = 0; j < NV; j++) {
            vf vt = ISA(load_as)(v + t * row, d + j * VL, dtype);
            for (int h = 0; h < H; h++) a[h][j] = ISA(fma)(w[h], vt, a[h][j]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int j = 0; j < NV; j++) ISA(store)(acc + h * dim + d + j * VL, a[h][j]);
}

FD_INLINE void ISA(add_all)(int H, int NV, int dtype, const float *weights, const char *v, size_t row, int from, int to,
                            const char *ahead, int ahead_rows, float *acc, int dim) {
    int d = 0;
    for (; d + NV * VL <= dim; d += NV * VL)
        ISA(add)(H, NV, dtype, weights, v, row, from, to, ahead, ahead_rows, acc, dim, d);
    for (; d < dim; d += VL) ISA(add)(H, 1, dtype, weights, v, row, from, to, ahead, ahead_rows, acc, dim, d);
}

FD_INLINE void ISA(add_tile)(int H, int dtype, const float *weights, const char *v, size_t row, int from, int to,
                             const char *ahead, int ahead_rows, float *acc, int dim) {
    if (from >= to) return;
    switch (H) { /* accumulators + weights + one V vector stay below 16 registers */
        case 1: ISA(add_all)(1, 8, dtype, weights, v, row, from, to, ahead, ahead_rows, acc, dim); break;
        case 2: ISA(add_all)(2, 4, dtype, weights, v, row, from, to, ahead, ahead_rows, acc, dim); break;
        case 3: ISA(add_all)(3, 4, dtype, weights, v, row, from, to, ahead, ahead_rows, acc, dim); break;
        default: ISA(add_all)(4, 2, dtype, weights, v, row, from, to, ahead, ahead_rows, acc, dim);
    }
}

FD_INLINE int ISA(tile)(int left) { return left == 5 ? 3 : left < 4 ? left : 4; } /* 5 = 3 + 2, never 4 + 1 */

/* K pass: scores of all vectors over the union of their spans, block by block. */
FD_INLINE void ISA(score_pass)(const ISA(view) *view, int dtype, int n, const ISA(span) *spans, const float *q,
                               float *scores) {
    const int dim = view->group->head_dim, end = spans[n - 1].hi;
    const int step = dtype == FD_INT4 ? FD_UNPACK : FD_BLOCK, as = dtype == FD_INT4 ? FD_FP32 : dtype;
    float unpacked[FD_UNPACK * FD_MAX_DIM + 8] __attribute__((aligned(64)));
    const size_t stored = view->group->row_bytes, row = dtype == FD_INT4 ? (size_t)dim * 4 : stored;
    for (int b = spans[0].lo / step * step; b < end; b += step) {
        const char *k = ISA(row)(view, b) + view->k_offset;
        int more = b + step < end; /* then fetch the next K rows, else the first V rows */
        const char *ahead = more ? ISA(row)(view, b + step) + view->k_offset
                                 : ISA(row)(view, spans[0].lo / step * step) + view->v_offset;
        int ahead_rows = (int)fd_min(step, more ? end - b - step : end);
        if (dtype == FD_INT4) {
            ISA(unpack_int4)(unpacked, k, stored, (int)fd_min(step, (end - b + 3) & ~3), dim, ahead, ahead_rows);
            k = (const char *)unpacked;
            ahead_rows = 0;
        }
        for (int v = 0, h; v < n; v += h) {
            h = ISA(tile)(n - v);
            int from = spans[v].lo > b ? (spans[v].lo - b) & ~3 : 0;
            int to = (int)fd_min(step, spans[v + h - 1].hi - b);
            for (int t = from; t < to; t += 4) { /* rows past `to` are inside the block, their scores unused */
                const size_t at = t * row, limit = v ? 0 : ahead_rows * row;
                const float *qv = q + v * dim;
                float *out = scores + v * FD_SCORES + b + t;
                switch (h) {
                    case 1: ISA(dot4)(1, as, qv, dim, k + t * row, row, ahead, at, limit, out); break;
                    case 2: ISA(dot4)(2, as, qv, dim, k + t * row, row, ahead, at, limit, out); break;
                    case 3: ISA(dot4)(3, as, qv, dim, k + t * row, row, ahead, at, limit, out); break;
                    default: ISA(dot4)(4, as, qv, dim, k + t * row, row, ahead, at, limit, out);
                }
            }
        }
    }
}

/* Multiplies the weights of n vectors by the scales of the int8 rows of one block. Lanes outside of a span are
 * never read. */
FD_INLINE void ISA(scale_weights)(const char *v, size_t row, int b, int n, const ISA(span) *spans, float *weights) {
    float scales[FD_BLOCK];
    for (int t = 0; t < FD_BLOCK; t++) scales[t] = ISA(scale)(v + t * row);
    for (int i = 0; i < n; i++) {
        const int from = (int)fd_max(0, spans[i].lo - b) / VL * VL, to = (int)fd_min(FD_BLOCK, spans[i].hi - b);
        float *w = weights + i * FD_SCORES + b;
        for (int t = from; t < to; t += VL) ISA(store)(w + t, ISA(load)(w + t) * ISA(load)(scales + t));
    }
}

/* V pass. Vectors of a tile share the tokens that all of them see; the ragged ends go one by one, in order. */
FD_INLINE void ISA(value_pass)(const ISA(view) *view, int dtype, int n, const ISA(span) *spans, float *weights,
                               float *acc) {
    const int dim = view->group->head_dim, end = spans[n - 1].hi;
    const int step = dtype == FD_INT4 ? FD_UNPACK : FD_BLOCK, as = dtype == FD_INT4 ? FD_FP32 : dtype;
    float unpacked[FD_UNPACK * FD_MAX_DIM + 8] __attribute__((aligned(64)));
    const size_t stored = view->group->row_bytes, row = dtype == FD_INT4 ? (size_t)dim * 4 : stored;
    memset(acc, 0, (size_t)n * dim * sizeof *acc);
    for (int b = spans[0].lo / step * step; b < end; b += step) {
        const char *v = ISA(row)(view, b) + view->v_offset, *ahead = v;
        int ahead_rows = (int)fd_max(0, fd_min(step, end - b - step));
        if (ahead_rows) {
            ahead = ISA(row)(view, b + step) + view->v_offset;
        } else if (view->next_rows) {
            ahead = view->next;
            ahead_rows = (int)fd_min(step, view->next_rows);
        }
        if (dtype == FD_INT8) ISA(scale_weights)(v, row, b, n, spans, weights);
        if (dtype == FD_INT4) {
            ISA(unpack_int4)(unpacked, v, stored, (int)fd_min(step, end - b), dim, ahead, ahead_rows);
            v = (const char *)unpacked;
            ahead_rows = 0;
        }
        for (int i = 0, h; i < n; i += h, ahead_rows = 0) {
            h = ISA(tile)(n - i);
            const ISA(span) *s = spans + i;
            const float *w = weights + i * FD_SCORES + b;
            int first = (int)fd_max(0, s[h - 1].lo - b), last = (int)fd_min(step, s[0].hi - b);
            if (last < first) last = first;
            for (int j = 0; j < h && s[j].lo < s[h - 1].lo; j++) {
                int from = (int)fd_max(0, s[j].lo - b), to = (int)fd_min(fd_min(first, step), s[j].hi - b);
                ISA(add_tile)(1, as, w + j * FD_SCORES, v, row, from, to, v, 0, acc + (i + j) * dim, dim);
            }
            ISA(add_tile)(h, as, w, v, row, first, last, ahead, ahead_rows, acc + i * dim, dim);
            for (int j = 0; j < h; j++) {
                int from = (int)fd_max(last, s[j].lo - b), to = (int)fd_min(step, s[j].hi - b);
                ISA(add_tile)(1, as, w + j * FD_SCORES, v, row, from, to, v, 0, acc + (i + j) * dim, dim);
            }
        }
    }
}

/* ALiBi. A distance is exact up to 2^24 tokens; product and sum round once. */
FD_INLINE void ISA(add_distances)(float *scores, ISA(span) span, int from, int to) {
    vi distance;
    for (int i = 0; i < VL; i++) distance[i] = span.ahead + from + i;
    for (int t = from; t < to; t += VL, distance += VL) {
        vf biased = ISA(fma)(ISA(splat)(span.slope), __builtin_convertvector(distance, vf), ISA(load)(scores + t));
        ISA(store)(scores + t, biased);
    }
}

/* Turns the scores of one span, capped and then biased, into weights e^(score - maximum); returns their sum. */
FD_INLINE float ISA(softmax)(float *scores, ISA(span) span, float softcap, float *maximum) {
    const int from = span.lo / VL * VL, to = (span.hi + VL - 1) / VL * VL;
    vf top = ISA(splat)(-INFINITY), sum = {0};
    if (softcap != 0.0f)
        for (int t = from; t < to; t += VL)
            ISA(store)(scores + t, ISA(tanh)(ISA(load)(scores + t) / softcap) * softcap);
    if (span.slope != 0.0f) ISA(add_distances)(scores, span, from, to);
    for (int t = from; t < span.lo; t++) scores[t] = -INFINITY; /* weighs exactly nothing */
    for (int t = span.hi; t < to; t++) scores[t] = -INFINITY;
    for (int t = from; t < to; t += VL) top = ISA(max)(top, ISA(load)(scores + t));
    float lanes[VL], m = -INFINITY;
    memcpy(lanes, &top, sizeof lanes);
    for (int i = 0; i < VL; i++) m = lanes[i] > m ? lanes[i] : m;
    for (int t = from; t < to; t += VL) {
        vf w = ISA(exp)(ISA(load)(scores + t) - m);
        ISA(store)(scores + t, w);
        sum += w;
    }
    v4f folded = ISA(sums)(sum, sum, sum, sum);
    *maximum = m;
    return folded[0];
}

/* One segment: maxima, sums and unnormalised outputs of n vectors, whose spans ascend and are not empty. */
static void ISA(segment)(const ISA(view) *view, int n, const ISA(span) *spans, float softcap, const float *q,
                         float *scores, float *maxima, float *sums, float *acc) {
    switch (view->dtype) {
        case FD_FP16: ISA(score_pass)(view, FD_FP16, n, spans, q, scores); break;
        case FD_BF16: ISA(score_pass)(view, FD_BF16, n, spans, q, scores); break;
        case FD_INT8: ISA(score_pass)(view, FD_INT8, n, spans, q, scores); break;
        case FD_INT4: ISA(score_pass)(view, FD_INT4, n, spans, q, scores); break;
        default: ISA(score_pass)(view, FD_FP32, n, spans, q, scores);
    }
    for (int v = 0; v < n; v++) sums[v] = ISA(softmax)(scores + v * FD_SCORES, spans[v], softcap, &maxima[v]);
    switch (view->dtype) {
        case FD_FP16: ISA(value_pass)(view, FD_FP16, n, spans, scores, acc); break;
        case FD_BF16: ISA(value_pass)(view, FD_BF16, n, spans, scores, acc); break;
        case FD_INT8: ISA(value_pass)(view, FD_INT8, n, spans, scores, acc); break;
        case FD_INT4: ISA(value_pass)(view, FD_INT4, n, spans, scores, acc); break;
        default: ISA(value_pass)(view, FD_FP32, n, spans, scores, acc);
    }
}
