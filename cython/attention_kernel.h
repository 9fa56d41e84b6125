/* Attention of a few query vectors over one segment of one KV head; see attention_simd.h for ISA().
 *
 * What makes the bits of an output depend on (q, KV, SEG, ISA) alone:
 *  - a score is one chain of fused products over the head dimension (int8: a sum of integers, which is exact; int4: such
 *    sums of its groups, in a chain);
 *  - the softmax of a segment sums its weights by lanes of absolute position;
 *  - the weighted sum of V adds tokens in order, one chain per output element (int8 and int4: exact sums of steps,
 *    which begin at multiples of step_rows, in a chain);
 *  - segments begin at multiples of FD_SEG and merge in order.
 * How vectors and tokens are tiled, and which thread runs what, changes none of these chains. */

#include "attention_tiles.h"

typedef struct {
    const fd_group *group;
    const fd_list *list;
    int64_t base;            /* first position of the segment */
    size_t k_offset, v_offset; /* of this layer and the first head inside a block */
    int dtype;
    int heads, stride;       /* KV heads that are read together, and the vectors from one's to the next one's */
    const char *next;        /* K rows that this thread reads after this segment, fetched during its last V rows */
    int next_rows;
} ISA(view);

/* Tokens of one query vector inside the segment, [lo, hi) relative to its base; each has slope * (its position -
 * the query's) added to its score, where the segment's first token lies `ahead` of the query. */
typedef struct {
    int32_t lo, hi, ahead;
    float slope;
} ISA(span);

/* Query vectors of the next pass: all that are left, FD_MOST, or what does not leave too few, 3 + 2 rather than 4 + 1. */
FD_INLINE int ISA(tile)(int left) {
    if (left <= FD_MOST) return left;
    return left < FD_MOST * 3 / 2 ? (left + 1) / 2 : FD_MOST;
}

/* Rows of V that a pass handles at a time: they and the rows fetched meanwhile stay in L1. Divides FD_BLOCK. */
FD_INLINE int ISA(step_rows)(size_t row) {
    const int least = (int)fd_max(FD_STEP_ROWS, 2 * VL); /* integers go in pairs of vectors */
    const size_t most = VL > 8 ? 2 * FD_STEP_BYTES : FD_STEP_BYTES; /* passes are half as long, and L1 caches larger */
    int rows = FD_BLOCK;
    while (rows > least && rows * row > most) rows /= 2;
    return rows;
}

/* The order in which both passes read: a step of rows after the other, those of a block's first head, of its next, then
 * of the next block. That is how they lie in memory, and long runs of it are what memory gives fastest. */
typedef struct {
    const ISA(view) *view;
    int first, stop, end;  /* of the block's tokens [first, stop) are read; the span's end */
    int step, head, at;    /* rows [at, at + step) of this head */
} ISA(walk);

FD_INLINE ISA(walk) ISA(walk_over)(const ISA(view) *view, int lo, int end, int step) {
    const int first = lo / step * step;
    return (ISA(walk)){view, first, (int)fd_min(end, (first / FD_BLOCK + 1) * FD_BLOCK), end, step, 0, first};
}

/* Goes on to the next step; 0 when there is none. */
FD_INLINE int ISA(next)(ISA(walk) *w) {
    w->at += w->step;
    if (w->at < w->stop) return 1;
    if (++w->head < w->view->heads) {
        w->at = w->first;
        return 1;
    }
    w->head = 0;
    w->first = w->at = w->stop;
    w->stop = (int)fd_min(w->end, w->first + FD_BLOCK);
    return w->at < w->end;
}

FD_INLINE const char *ISA(rows_at)(const ISA(walk) *w, size_t offset) {
    const ISA(view) *view = w->view;
    return fd_block_at(view->group, view->list, view->base + w->at)->data +
           (size_t)(w->at % FD_BLOCK) * view->group->row_bytes + offset + w->head * view->group->head_bytes;
}

FD_INLINE int ISA(rows_of)(const ISA(walk) *w) { return (int)fd_min(w->step, w->end - w->at); }

#if FD_INTEGERS

/* Integers of h vectors' weights of one step, of which they see tokens [first, last). */
static __attribute__((noinline)) void ISA(quantise_step)(int dtype, int h, const ISA(span) *spans, int b, int step,
                                                         int first, int last, const float *weights, const vi *headers,
                                                         ISA(step_scales) *scales, const ISA(weights) *made) {
    for (int j = 0; j < h; j++, weights += FD_SCORES) {
        const int from = (int)fd_min(step, fd_max(0, spans[j].lo - b));
        const int to = (int)fd_max(from, fd_min(step, spans[j].hi - b));
        if (from != scales->from || to != scales->to) {
            if (dtype == FD_INT8) ISA(prepare_scales)(FD_INT8, headers, step, from, to, scales);
            else ISA(prepare_scales)(FD_INT4, headers, step, from, to, scales);
        }
        if (dtype == FD_INT8) ISA(quantise_weights)(FD_INT8, weights, first, last, scales, j, made);
        else ISA(quantise_weights)(FD_INT4, weights, first, last, scales, j, made);
    }
}

/* One step of the V pass: rows at v, whose first is token b. */
static void ISA(value_step)(const ISA(view) *view, int n, const ISA(span) *spans, const char *v, int b, int step,
                              const float *weights, ISA(stream) *stream, float *acc) {
    enum { MOST = FD_MAX_DIM / 32, WORDS = ISA(WORDS) };
    const int dim = view->group->head_dim, dtype = view->dtype, groups = dtype == FD_INT4 ? (dim + 31) / 32 : 1;
    const size_t row = view->group->row_bytes;
    const ISA(add_integers_fn) *adds = ISA(adds_integers)[dtype - FD_INT8];
    float worth[FD_MOST * MOST], minima[FD_MOST * MOST];
    vi pairs[FD_MOST * MOST * FD_BLOCK / WORDS], headers[MOST * FD_BLOCK / VL];
    ISA(step_scales) scales;
    const ISA(weights) made = {pairs, worth, minima, groups};
    ISA(gather_headers)(dtype, v, row, step, groups, headers);
    scales.from = scales.to = -1;
    scales.groups = groups;
    for (int i = 0, h; i < n; i += h) {
        h = ISA(tile)(n - i);
        const int first = (int)fd_max(0, spans[i].lo - b) / WORDS * WORDS;
        const int last = ((int)fd_min(step, spans[i + h - 1].hi - b) + WORDS - 1) / WORDS * WORDS;
        if (first >= last) continue;
        ISA(quantise_step)(dtype, h, spans + i, b, step, first, last, weights + i * FD_SCORES + b, headers, &scales,
                           &made);
        adds[h - 1](&made, v, row, first, last, stream, acc + i * dim, dim, 0);
    }
}

#endif

/* K pass: scores of all vectors over the union of their spans, step by step. */
static void ISA(score_pass)(const ISA(view) *view, int n, const ISA(span) *spans, const ISA(queries) *q,
                            float *scores) {
    const int chunks = view->group->head_dim / FD_CHUNK, lo = spans[0].lo, end = spans[n - 1].hi;
    const ISA(dot_fn) *dots = ISA(dots)[view->dtype];
    const size_t row = view->group->row_bytes, tile = row * FD_TILE_TOKENS;
    const int value_step = ISA(step_rows)(row);
    ISA(walk) w = ISA(walk_over)(view, lo, end, (int)fd_max(ISA(KEY_STEP_ROWS), value_step)), ahead = w;
    const char *k = ISA(rows_at)(&w, view->k_offset);
    for (int more = 1; more; w = ahead) {
        const int b = w.at, step = w.step, head = w.head * view->stride;
        more = ISA(next)(&ahead);
        if (!more) ahead = ISA(walk_over)(view, lo, end, value_step); /* then fetch the first V rows, else the next K */
        const char *then = ISA(rows_at)(&ahead, more ? view->k_offset : view->v_offset);
        int64_t tiles = 0;
        for (int v = 0, h; v < n; v += h) {
            h = ISA(tile)(n - v);
            tiles += step / (ISA(key_vectors)(h, view->dtype) * VL);
        }
        ISA(stream) stream = ISA(stream_of)(then, ISA(rows_of)(&ahead) * row, tiles * chunks);
        for (int v = 0, h; v < n; v += h) {
            h = ISA(tile)(n - v);
            const int from = (int)fd_max(0, spans[v].lo - b), to = (int)fd_min(step, spans[v + h - 1].hi - b);
            dots[h - 1](q, head + v, k, tile, from, to, &stream, scores + (head + v) * FD_SCORES + b);
        }
        k = then;
    }
}

/* Multiplies the weights of n vectors by the scales of the int8 rows of one block. Lanes outside of a span are
 * never read. */
FD_INLINE void ISA(scale_weights)(const char *v, size_t row, int b, int step, int n, const ISA(span) *spans,
                                  float *weights) {
    float scales[FD_BLOCK];
    for (int t = 0; t < step; t++) scales[t] = ISA(scale)(v + t * row);
    for (int i = 0; i < n; i++) {
        const int from = (int)fd_max(0, spans[i].lo - b) / VL * VL, to = (int)fd_min(step, spans[i].hi - b);
        float *w = weights + i * FD_SCORES + b;
        for (int t = from; t < to; t += VL) ISA(store)(w + t, ISA(load)(w + t) * ISA(load)(scales + t));
    }
}

/* V pass over one step of one head. Vectors of a tile share the tokens that all of them see; the ragged ends go one by
 * one, in order. */
static void ISA(add_step)(const ISA(view) *view, int n, const ISA(span) *spans, const char *v, int b, int step,
                          float *weights, ISA(stream) *stream, float *acc) {
    const int dim = view->group->head_dim;
    const ISA(add_fn) *adds = ISA(adds)[view->dtype];
    const size_t row = view->group->row_bytes;
    ISA(stream) none = {0};
    if (view->dtype == FD_INT8) ISA(scale_weights)(v, row, b, step, n, spans, weights);
    for (int i = 0, h; i < n; i += h) {
        h = ISA(tile)(n - i);
        const ISA(span) *s = spans + i;
        const float *w = weights + i * FD_SCORES + b;
        int first = (int)fd_max(0, s[h - 1].lo - b), last = (int)fd_min(step, s[0].hi - b);
        if (last < first) last = first;
        for (int j = 0; j < h && s[j].lo < s[h - 1].lo; j++) {
            int from = (int)fd_max(0, s[j].lo - b), to = (int)fd_min(fd_min(first, step), s[j].hi - b);
            if (from < to) adds[0](w + j * FD_SCORES, v, row, from, to, &none, acc + (i + j) * dim, dim);
        }
        if (first < last) adds[h - 1](w, v, row, first, last, stream, acc + i * dim, dim);
        for (int j = 0; j < h; j++) {
            int from = (int)fd_max(last, s[j].lo - b), to = (int)fd_min(step, s[j].hi - b);
            if (from < to) adds[0](w + j * FD_SCORES, v, row, from, to, &none, acc + (i + j) * dim, dim);
        }
    }
}

/* V pass: unnormalised outputs of all vectors. */
static void ISA(value_pass)(const ISA(view) *view, int n, const ISA(span) *spans, float *weights, float *acc) {
    const int dim = view->group->head_dim, whole = ISA(in_integers)(view->dtype);
    const size_t row = view->group->row_bytes;
    int slices = 0; /* passes over the tokens of a step, twice: integers go in pairs of tokens */
    for (int i = 0, h; i < n; i += h) {
        h = ISA(tile)(n - i);
        slices += whole ? ISA(integer_slices)(h, dim, view->dtype) : 2 * ISA(slices)(h, dim);
    }
    for (int i = 0; i < view->heads; i++) memset(acc + i * view->stride * dim, 0, (size_t)n * dim * sizeof *acc);
    ISA(walk) w = ISA(walk_over)(view, spans[0].lo, spans[n - 1].hi, ISA(step_rows)(row)), ahead = w;
    const char *v = ISA(rows_at)(&w, view->v_offset);
    for (int more = 1; more; w = ahead) {
        const int b = w.at, step = w.step, head = w.head * view->stride;
        more = ISA(next)(&ahead);
        const char *then = more ? ISA(rows_at)(&ahead, view->v_offset) : view->next;
        const int ahead_rows = more ? ISA(rows_of)(&ahead) : (int)fd_min(step, view->next_rows);
        const int tokens = (int)(fd_min(step, w.end - b) - fd_max(0, spans[0].lo - b));
        ISA(stream) stream = ISA(stream_of)(then, ahead_rows * row, (int64_t)slices * tokens / 2);
#if FD_INTEGERS
        if (whole) {
            ISA(value_step)(view, n, spans, v, b, step, weights + head * FD_SCORES, &stream, acc + head * dim);
            v = then;
            continue;
        }
#endif
        ISA(add_step)(view, n, spans, v, b, step, weights + head * FD_SCORES, &stream, acc + head * dim);
        v = then;
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
static __attribute__((noinline)) float ISA(softmax)(float *scores, ISA(span) span, float softcap, ISA(stream) stream,
                                                    float *maximum) {
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
        ISA(advance)(&stream);
        vf w = ISA(exp)(ISA(load)(scores + t) - m);
        ISA(store)(scores + t, w);
        sum += w;
    }
    v4f folded = ISA(sums)(sum, sum, sum, sum);
    *maximum = m;
    return folded[0];
}

/* Weights of all vectors. Memory would idle meanwhile, so each of them fetches half a step of V rows: about what
 * arrives in the time, to wait in L2. The score pass has fetched the first step. */
static void ISA(softmax_pass)(const ISA(view) *view, int n, const ISA(span) *spans, float softcap, float *scores,
                              float *maxima, float *sums) {
    const size_t row = view->group->row_bytes;
    ISA(walk) w = ISA(walk_over)(view, spans[0].lo, spans[n - 1].hi, ISA(step_rows)(row));
    int more = 1, second = 1; /* half of the step at w */
    for (int head = 0; head < view->heads; head++)
        for (int i = 0, v = head * view->stride; i < n; i++, v++) {
            if (more && second) more = ISA(next)(&w);
            second = !second;
            const int half = w.step / 2, rows = more ? ISA(rows_of)(&w) - second * half : 0;
            ISA(stream) stream = {0};
            if (rows > 0)
                stream = ISA(stream_of)(ISA(rows_at)(&w, view->v_offset) + second * half * row,
                                        (size_t)fd_min(half, rows) * row, (spans[i].hi - spans[i].lo) / VL);
            sums[v] = ISA(softmax)(scores + v * FD_SCORES, spans[v], softcap, stream, &maxima[v]);
        }
}

/* One segment: maxima, sums and unnormalised outputs of n vectors of each head, whose spans ascend and are not empty.
 * All arrays are [heads][stride] of what a vector has. */
static void ISA(segment)(const ISA(view) *view, int n, const ISA(span) *spans, float softcap,
                         const ISA(queries) *q, float *scores, float *maxima, float *sums, float *acc) {
    ISA(score_pass)(view, n, spans, q, scores);
    ISA(softmax_pass)(view, n, spans, softcap, scores, maxima, sums);
    ISA(value_pass)(view, n, spans, scores, acc);
}
