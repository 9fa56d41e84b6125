/* Units of work of one attend(): writing K/V rows, running segments, merging, rounding the output. */

typedef struct {
    float *q, *acc, *merged, *scores, *row, *sums_q, *scales_q;
    int16_t *whole_q;
    const char *next; /* see view */
    int next_rows;
    float maxima[FD_VECTORS], sums[FD_VECTORS], merged_max[FD_VECTORS], merged_sum[FD_VECTORS];
} ISA(scratch);

static int ISA(write)(fd_ctx *ctx, const fd_group *group, int layer_index, int kv_head, fd_seq *seq, int group_index,
                      int64_t position, const void *k, const void *v) {
    float row[FD_MAX_DIM] __attribute__((aligned(64)));
    char key[FD_MAX_DIM * sizeof(float)] __attribute__((aligned(64)));
    const int dim = group->head_dim;
    char *head = fd_block_at(group, &seq->lists[group_index], position)->data + layer_index * group->layer_bytes +
                 kv_head * group->head_bytes;
    int bad = ISA(load_row)(row, k, dim, ctx->wire_dtype, 1.0f);
    bad |= ISA(round_row)(key, row, dim, ctx->kv_dtype);
    fd_key_row(1, ctx->kv_dtype, (size_t)dim, head, group->row_bytes, position % FD_BLOCK, key);
    bad |= ISA(load_row)(row, v, dim, ctx->wire_dtype, 1.0f);
    bad |= ISA(round_row)(head + group->side_bytes + (size_t)(position % FD_BLOCK) * group->row_bytes, row, dim,
                          ctx->kv_dtype);
    return bad;
}

FD_INLINE void ISA(flag)(const fd_job *job, int row, int bad) {
    if (bad) __atomic_store_n(&job->row_status[row], 1, __ATOMIC_RELAXED); /* many threads, one value */
}

static void ISA(write_rows)(const fd_job *job, const fd_entry *entry, int kv_head, int64_t from, int64_t to) {
    const fd_group *group = job->group;
    const size_t head_bytes = group->head_dim * job->wire_bytes;
    from = fd_max(from, entry->kv_len);
    to = fd_min(to, entry->kv_len + entry->q_len);
    for (int64_t position = from; position < to; position++) {
        int row = entry->row + (int)(position - entry->kv_len);
        const char *k = job->qkv + row * job->row_bytes + (group->num_q_heads + kv_head) * head_bytes;
        const char *v = k + group->num_kv_heads * head_bytes;
        ISA(flag)(job, row, ISA(write)(job->ctx, group, job->layer_index, kv_head, entry->seq, job->group_index,
                                       position, k, v));
    }
}

static void ISA(load_queries)(const fd_job *job, const fd_unit *unit, const fd_entry *entry, int kv_head, float *q) {
    const int heads = job->group->heads_per_kv, dim = job->group->head_dim;
    for (int v = unit->vec_begin; v < unit->vec_end; v++, q += dim) {
        int row = entry->row + v / heads;
        const size_t head = (size_t)(kv_head * heads + v % heads);
        const char *src = job->qkv + row * job->row_bytes + head * dim * job->wire_bytes;
        ISA(flag)(job, row, ISA(load_row)(q, src, dim, job->ctx->wire_dtype, job->ctx->scale));
    }
}

/* Segment of a unit and some heads; leaves results at [*begin, *end) of each head's vectors: the others see none of it. */
static void ISA(run_segment)(const fd_job *job, const fd_unit *unit, const fd_entry *entry, int kv_head, int heads,
                             int segment, ISA(scratch) *s, int *begin, int *end) {
    const fd_group *group = job->group;
    const int64_t base = (int64_t)segment * FD_SEG;
    const int n = unit->vec_end - unit->vec_begin;
    ISA(span) spans[FD_VECTORS];
    *begin = *end = 0;
    for (int v = unit->vec_begin; v < unit->vec_end; v++) {
        int64_t position = entry->kv_len + v / group->heads_per_kv;
        int64_t lo = group->window ? fd_max(base, position - group->window + 1) : base;
        int64_t hi = fd_min(base + FD_SEG, position + 1);
        int i = v - unit->vec_begin;
        if (lo >= hi) continue; /* such rows come first (causal) or last (window) */
        if (*begin == *end) *begin = i;
        const ISA(span) span = {(int32_t)(lo - base), (int32_t)(hi - base), (int32_t)(base - position), 0.0f};
        for (int h = 0; h < heads; h++) spans[h * n + i] = span;
        *end = i + 1;
        if (!group->slopes) continue;
        const float *slopes = group->slopes + kv_head * group->heads_per_kv + v % group->heads_per_kv;
        for (int h = 0; h < heads; h++) spans[h * n + i].slope = slopes[h * group->heads_per_kv];
    }
    if (*begin == *end) return;
    size_t k_offset = job->layer_index * group->layer_bytes + kv_head * group->head_bytes;
    ISA(view) view = {group, &entry->seq->lists[job->group_index], base, k_offset, k_offset + group->side_bytes,
                      job->ctx->kv_dtype, heads, n, s->next, s->next_rows};
    const int b = *begin, dim = group->head_dim, groups = (dim + 31) / 32;
    const ISA(queries) queries = {s->q + b * dim, s->whole_q + b * groups * 32, s->sums_q + b * groups,
                                  s->scales_q + b, dim, groups * 32, groups};
    ISA(segment)(&view, *end - b, spans + b, job->ctx->softcap, &queries, s->scores, s->maxima + b, s->sums + b,
                 s->acc + b * dim);
}

/* Adds one segment's result of a vector to those before it, in fp32; the first one is copied. */
static void ISA(merge)(int dim, float *max, float *sum, float *out, float part_max, float part_sum, const float *part) {
    if (*sum == 0.0f) { /* no segment yet: a sum is at least 1, or not a number */
        *max = part_max;
        *sum = part_sum;
        memcpy(out, part, (size_t)dim * sizeof *out);
        return;
    }
    float top = part_max > *max ? part_max : *max;
    vf a = ISA(exp)(ISA(splat)(*max - top)), b = ISA(exp)(ISA(splat)(part_max - top));
    vf total = ISA(fma)(b, ISA(splat)(part_sum), a * *sum);
    for (int d = 0; d < dim; d += VL) {
        const int lanes = ISA(lanes)(dim - d);
        const vf before = ISA(load_lanes)(out, d, FD_FP32, lanes), more = ISA(load_lanes)(part, d, FD_FP32, lanes);
        ISA(store_lanes)(out + d, ISA(fma)(b, more, a * before), lanes);
    }
    *sum = total[0];
    *max = top;
}

/* What an unnormalised output is to be multiplied by. A sink joins the sum as one more weight, without a value:
 * once, after the segments, so that these merge as they would without it. */
FD_INLINE float ISA(normaliser)(const fd_job *job, int head, float max, float sum) {
    if (!job->group->sinks) return 1.0f / sum;
    const float sink = job->group->sinks[(size_t)job->layer_index * job->group->num_q_heads + head];
    const float top = max > sink ? max : sink;
    const vf scale = ISA(exp)(ISA(splat)(max - top)), weight = ISA(exp)(ISA(splat)(sink - top));
    return scale[0] / ISA(fma)(scale, ISA(splat)(sum), weight)[0];
}

static void ISA(finish)(const fd_job *job, const fd_entry *entry, int kv_head, int vector, float max, float sum,
                        const float *out, float *row) {
    const int heads = job->group->heads_per_kv, dim = job->group->head_dim, head = kv_head * heads + vector % heads;
    const vf factor = ISA(splat)(ISA(normaliser)(job, head, max, sum));
    for (int d = 0; d < dim; d += VL) {
        const int lanes = ISA(lanes)(dim - d);
        ISA(store_lanes)(row + d, ISA(load_lanes)(out, d, FD_FP32, lanes) * factor, lanes);
    }
    int index = entry->row + vector / heads;
    char *dst = job->out + index * job->out_bytes + (size_t)head * dim * job->wire_bytes;
    ISA(flag)(job, index, ISA(round_row)(dst, row, dim, job->ctx->wire_dtype));
}

/* Stores the segment's partials of a head, which lie at vector `at` of the scratch; the last of the unit's segments
 * merges all of them in order. */
static void ISA(share)(const fd_job *job, const fd_unit *unit, const fd_entry *entry, int kv_head, ISA(scratch) *s,
                       int at, int begin, int end) {
    const int dim = job->group->head_dim, n = unit->vec_end - unit->vec_begin;
    const int64_t stride = fd_partial_floats(job->group);
    float *partial = job->ctx->partials + (unit->partial + (int64_t)kv_head * n) * stride;
    for (int v = 0; v < n; v++, partial += stride) {
        int some = v >= begin && v < end;
        partial[0] = some ? s->maxima[at + v] : 0.0f;
        partial[1] = some ? s->sums[at + v] : 0.0f;
        if (some) memcpy(partial + 8, s->acc + (at + v) * dim, (size_t)dim * sizeof *partial);
    }
    _Atomic int32_t *pending = &job->plan->pending[(int64_t)unit->first * job->group->num_kv_heads + kv_head];
    if (atomic_fetch_sub_explicit(pending, 1, memory_order_acq_rel) != 1) return;
    atomic_store_explicit(pending, unit->count, memory_order_relaxed); /* for the next layer */
    for (int v = 0; v < n; v++) {
        float max = 0.0f, sum = 0.0f;
        for (int i = 0; i < unit->count; i++) {
            const fd_unit *other = &job->plan->units[unit->first + i];
            const float *part = job->ctx->partials + (other->partial + (int64_t)kv_head * n + v) * stride;
            if (part[1] != 0.0f) ISA(merge)(dim, &max, &sum, s->merged, part[0], part[1], part + 8);
        }
        ISA(finish)(job, entry, kv_head, v, max, sum, s->merged, s->row);
    }
}

/* All segments of a unit one after the other: no partials to keep. */
static void ISA(run_all)(const fd_job *job, const fd_unit *unit, const fd_entry *entry, int kv_head, ISA(scratch) *s) {
    const int dim = job->group->head_dim, heads = job->group->heads_per_kv, n = unit->vec_end - unit->vec_begin;
    int64_t oldest = job->group->window ? entry->kv_len + unit->vec_begin / heads - job->group->window + 1 : 0;
    int64_t newest = entry->kv_len + (unit->vec_end - 1) / heads;
    memset(s->merged_sum, 0, sizeof s->merged_sum);
    for (int segment = (int)(fd_max(0, oldest) / FD_SEG); segment <= newest / FD_SEG; segment++) {
        int begin, end;
        ISA(run_segment)(job, unit, entry, kv_head, 1, segment, s, &begin, &end);
        for (int v = begin; v < end; v++)
            ISA(merge)(dim, &s->merged_max[v], &s->merged_sum[v], s->merged + v * dim, s->maxima[v], s->sums[v],
                       s->acc + v * dim);
    }
    for (int v = 0; v < n; v++)
        ISA(finish)(job, entry, kv_head, unit->vec_begin + v, s->merged_max[v], s->merged_sum[v], s->merged + v * dim,
                    s->row);
}

/* A unit and KV heads [kv_head, kv_head + heads); a unit of all segments takes one at a time. */
static void ISA(run_unit)(const fd_job *job, const fd_unit *unit, int kv_head, int heads, ISA(scratch) *s) {
    const fd_entry *entry = &job->table->entries[unit->entry];
    const int dim = job->group->head_dim, n = unit->vec_end - unit->vec_begin;
    int begin, end;
    for (int h = 0; h < heads; h++) ISA(load_queries)(job, unit, entry, kv_head + h, s->q + h * n * dim);
#if FD_INTEGERS
    if (job->ctx->kv_dtype >= FD_INT8)
        ISA(quantise_queries)(s->q, heads * n, dim, s->whole_q, s->sums_q, s->scales_q);
#endif
    if (unit->segment < 0) {
        ISA(run_all)(job, unit, entry, kv_head, s);
        return;
    }
    if (!job->plan->split_writes) /* no other unit reads these positions */
        for (int h = 0; h < heads; h++)
            ISA(write_rows)(job, entry, kv_head + h, (int64_t)unit->segment * FD_SEG,
                            (int64_t)(unit->segment + 1) * FD_SEG);
    ISA(run_segment)(job, unit, entry, kv_head, heads, unit->segment, s, &begin, &end);
    for (int h = 0, at = 0; h < heads; h++, at += n) {
        if (unit->count > 1) {
            ISA(share)(job, unit, entry, kv_head + h, s, at, begin, end);
            continue;
        }
        for (int v = begin; v < end; v++)
            ISA(finish)(job, entry, kv_head + h, v, s->maxima[at + v], s->sums[at + v], s->acc + (at + v) * dim,
                        s->row);
    }
}

/* First K rows of a unit and head, for the prefetcher: short sequences are over before the hardware sees a stream. */
static void ISA(look_ahead)(const fd_job *job, const fd_unit *unit, int kv_head, ISA(scratch) *s) {
    const fd_group *group = job->group;
    const fd_entry *entry = &job->table->entries[unit->entry];
    if (unit->segment < 0) return;
    const int64_t base = (int64_t)unit->segment * FD_SEG, first = entry->kv_len + unit->vec_begin / group->heads_per_kv;
    const int64_t seen = group->window ? fd_max(base, first - group->window + 1) : base;
    const int64_t lo = seen / FD_TILE_TOKENS * FD_TILE_TOKENS, left = entry->kv_len - lo;
    if (left < 1) return;
    s->next = fd_block_at(group, &entry->seq->lists[job->group_index], lo)->data +
              job->layer_index * group->layer_bytes + kv_head * group->head_bytes +
              (size_t)(lo % FD_BLOCK) * group->row_bytes;
    s->next_rows = (int)fd_min(left, FD_BLOCK - lo % FD_BLOCK);
}

/* One item: a unit and a bundle of its heads, of which the unit's vectors leave room for so many at a time. */
static void ISA(run_item)(const fd_job *job, int64_t item, int64_t stop, ISA(scratch) *s) {
    const fd_unit *unit = &job->plan->units[item / job->bundles];
    const int bundle = job->bundle_heads, heads = job->group->num_kv_heads;
    const int most = unit->segment < 0 ? 1 : (int)fd_max(1, FD_BUNDLE_VECTORS / (unit->vec_end - unit->vec_begin));
    int head = (int)(item % job->bundles) * bundle;
    const int end = (int)fd_min(heads, head + bundle);
    for (int some; head < end; head += some) {
        some = (int)fd_min(most, end - head);
        s->next_rows = 0;
        if (head + some < end) ISA(look_ahead)(job, unit, head + some, s);
        else if (item + 1 < stop)
            ISA(look_ahead)(job, &job->plan->units[(item + 1) / job->bundles],
                            (int)((item + 1) % job->bundles) * bundle, s);
        ISA(run_unit)(job, unit, head, some, s);
    }
}

/* Body of a thread: takes items, or (entry, KV head) while only writing, from the counter. */
static void ISA(body)(void *arg, int tid) {
    fd_job *job = arg;
    const fd_ctx *ctx = job->ctx;
    const int64_t heads = job->group->num_kv_heads, dims = (int64_t)FD_VECTORS * job->group->head_dim;
    float *memory = ctx->scratch + tid * ctx->scratch_floats;
    ISA(scratch) s;
    s.q = memory;
    s.acc = s.q + dims;
    s.merged = s.acc + dims;
    s.scores = s.merged + dims;
    s.sums_q = s.scores + FD_VECTORS * FD_SCORES;
    s.scales_q = s.sums_q + (job->group->head_dim + 31) / 32 * FD_VECTORS;
    s.whole_q = (int16_t *)(s.scales_q + FD_VECTORS);
    s.row = s.scales_q + FD_VECTORS + (job->group->head_dim + 31) / 32 * 16 * FD_VECTORS;
    const int32_t home = fd_home(ctx);
    for (int32_t n = 0; n < ctx->num_nodes;) { /* the work of the own node first, then what is left of the others' */
        fd_range *range = &job->ctx->ranges[(home + n) % ctx->num_nodes];
        int64_t item = atomic_fetch_add_explicit(&range->next, job->grain, memory_order_relaxed);
        int64_t stop = fd_min(item + job->grain, range->stop);
        n += item >= stop;
        for (; item < stop; item++) {
            if (!job->write_only) {
                ISA(run_item)(job, item, stop, &s);
                continue;
            }
            const fd_entry *entry = &job->table->entries[item / heads];
            if (!(entry->flags & FD_UPLOAD)) ISA(write_rows)(job, entry, (int)(item % heads), 0, INT64_MAX);
        }
    }
}
