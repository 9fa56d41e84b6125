/* Causal attention of a prompt's chunk over its own fp32 K/V: the prefill's counterpart of the worker's
 * kernel. Included once per instruction set, after dense_body.h, whose GEMM tiles it uses.
 *
 * Flash-style: an item is one KV head and a block of query rows (all query heads of the group, so that K
 * and V are packed once for all); keys pass in blocks at fixed multiples of ATTEND_KEYS positions, with a
 * running maximum, sum and output per row. A block in which a row sees nothing leaves that row's numbers
 * as they are, so a row's bits depend on its own position, query, keys and values alone: not on the chunk
 * it came in, the other rows, or the threads.
 */

/* Packs keys j0 .. j0+count (of ATTEND_KEYS) into panels [key/16][D][16] and values into [D/16][key][16];
 * zeros beyond. */
static void DENSE(attend_pack)(const dense_attend_job *job, int64_t kv_head, int64_t j0, int64_t count,
                               float *keys, float *values)
{
    int64_t d = job->head_dim, panels = (d + 15) / 16;
    memset(keys, 0, sizeof(float) * ATTEND_KEYS * d);
    memset(values, 0, sizeof(float) * ATTEND_KEYS * panels * 16);
    for (int64_t j = 0; j < count; j++) {
        const float *k = job->k + (j0 + j) * job->kv_stride + kv_head * d;
        const float *v = job->v + (j0 + j) * job->kv_stride + kv_head * d;
        float *to = keys + j / 16 * 16 * d + j % 16;
        for (int64_t i = 0; i < d; i++) to[16 * i] = k[i];
        for (int64_t p = 0; p < panels; p++)
            memcpy(values + (p * ATTEND_KEYS + j) * 16, v + 16 * p, sizeof(float) * (d - 16 * p < 16 ? d - 16 * p : 16));
    }
}

/* Scores of one row -> weights, in place; keys low .. high-1 of the block are seen, the rest weigh 0. The block's
 * first key lies `ahead` of the query. Moves the row's maximum and sum; returns what the output so far must be
 * multiplied by. */
static float DENSE(attend_softmax)(const dense_attend_job *job, float *s, int64_t low, int64_t high, float slope,
                                   int64_t ahead, float *max, float *sum)
{
    const v8i lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    v8f tops = (v8f){0} - INFINITY, sums = {0};
    float top = *max;
    if (job->softcap > 0.0f)
        for (int64_t j = low; j < high; j++) s[j] = job->softcap * tanhf(s[j] * job->scale / job->softcap) / job->scale;
    for (int64_t j = 0; j < ATTEND_KEYS; j += 8) {
        v8i seen = (lanes + (int)j >= (int)low) & (lanes + (int)j < (int)high);
        v8f value = *(const v8fu *)(s + j) * job->scale;
        if (slope != 0.0f)
            value = DENSE_MADD(__builtin_convertvector(lanes + (int)(ahead + j), v8f), (v8f){0} + slope, value);
        value = (v8f)((seen & (v8i)value) | (~seen & (v8i)((v8f){0} - INFINITY)));
        v8i above = value > tops;
        tops = (v8f)((above & (v8i)value) | (~above & (v8i)tops));
        *(v8fu *)(s + j) = value;
    }
    for (int i = 0; i < 8; i++) top = tops[i] > top ? tops[i] : top;
    for (int64_t j = 0; j < ATTEND_KEYS; j += 8) {
        v8i seen = (lanes + (int)j >= (int)low) & (lanes + (int)j < (int)high);
        v8f shifted = *(const v8fu *)(s + j) - top;
        v8i number = shifted == shifted; /* exp8 would turn a NaN into a number */
        v8f value = (v8f)(seen & ((number & (v8i)DENSE(exp8)(shifted)) | (~number & (v8i)shifted)));
        sums += value;
        *(v8fu *)(s + j) = value;
    }
    float shrink = *max == -INFINITY ? 0.0f : expf(*max - top);
    *sum = *sum * shrink + DENSE(lanes)(sums);
    *max = top;
    return shrink;
}

/* One block of keys for all rows of an item. Rows are (head, query) with head slowest. */
static void DENSE(attend_block)(const dense_attend_job *job, const dense_attend_item *item, int64_t j0,
                                dense_attend_scratch *scratch)
{
    int64_t d = job->head_dim, rows = item->rows * item->heads, panels = (d + 15) / 16;
    int64_t count = item->last_key + 1 - j0 < ATTEND_KEYS ? item->last_key + 1 - j0 : ATTEND_KEYS;
    DENSE(attend_pack)(job, item->kv_head, j0, count, scratch->keys, scratch->values);
    for (int64_t p = 0; p < ATTEND_KEYS / 16; p++) {
        DENSE(block_panel)(DENSE_FP32, scratch->queries, d, rows, (const char *)(scratch->keys + p * 16 * d), 1,
                           0, d, scratch->panel, 0, 1, NULL);
        for (int64_t r = 0; r < rows; r++)
            memcpy(scratch->scores + r * ATTEND_KEYS + 16 * p, scratch->panel + 16 * r, 16 * sizeof(float));
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = item->position + r % item->rows; /* absolute position of the query */
        int64_t low = job->window ? at - job->window + 1 - j0 : 0, high = at + 1 - j0;
        low = low < 0 ? 0 : low;
        high = high > ATTEND_KEYS ? ATTEND_KEYS : high;
        float *s = scratch->scores + r * ATTEND_KEYS;
        if (low >= high) {
            memset(s, 0, ATTEND_KEYS * sizeof(float));
            continue;
        }
        float slope = job->slopes ? job->slopes[item->first_head + r / item->rows] : 0.0f;
        float shrink = DENSE(attend_softmax)(job, s, low, high, slope, j0 - at, &scratch->max[r], &scratch->sum[r]);
        if (shrink != 1.0f)
            for (int64_t p = 0; p < panels; p++)
                for (int64_t i = 0; i < 16; i++) scratch->out[(p * ATTEND_ROWS + r) * 16 + i] *= shrink;
    }
    for (int64_t p = 0; p < panels; p++)
        DENSE(block_panel)(DENSE_FP32, scratch->scores, ATTEND_KEYS, rows,
                           (const char *)(scratch->values + p * ATTEND_KEYS * 16), 1, 0, ATTEND_KEYS,
                           scratch->out + p * ATTEND_ROWS * 16, 0, 0, NULL);
}

/* What a row's output is to be multiplied by; its sink joins the sum as one more weight, without a value. */
static float DENSE(attend_scale)(const dense_attend_job *job, int64_t head, float max, float sum)
{
    if (!job->sinks) return 1.0f / sum;
    float top = max > job->sinks[head] ? max : job->sinks[head], shrink = expf(max - top);
    return shrink / (sum * shrink + expf(job->sinks[head] - top));
}

static void DENSE(attend_item)(const dense_attend_job *job, const dense_attend_item *item, dense_attend_scratch *scratch)
{
    int64_t d = job->head_dim, rows = item->rows * item->heads, panels = (d + 15) / 16;
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = item->first_head + r / item->rows, row = item->first_row + r % item->rows;
        memcpy(scratch->queries + r * d, job->q + row * job->q_stride + head * d, d * sizeof(float));
        scratch->max[r] = -INFINITY;
        scratch->sum[r] = 0.0f;
    }
    memset(scratch->out, 0, panels * ATTEND_ROWS * 16 * sizeof(float));
    int64_t first_key = job->window && item->position - job->window + 1 > 0 ? item->position - job->window + 1 : 0;
    for (int64_t j0 = first_key / ATTEND_KEYS * ATTEND_KEYS; j0 <= item->last_key; j0 += ATTEND_KEYS)
        DENSE(attend_block)(job, item, j0, scratch);
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = item->first_head + r / item->rows, row = item->first_row + r % item->rows;
        float *out = job->out + row * job->out_stride + head * d;
        float scale = DENSE(attend_scale)(job, head, scratch->max[r], scratch->sum[r]);
        for (int64_t i = 0; i < d; i++) out[i] = scratch->out[(i / 16 * ATTEND_ROWS + r) * 16 + i % 16] * scale;
    }
}

static void DENSE(attend_body)(void *arg, int tid)
{
    dense_attend_job *job = (dense_attend_job *)arg;
    dense_attend_scratch *scratch = dense_attend_scratch_of(job->head_dim);
    (void)tid;
    if (!scratch) return; /* no memory: the other threads do its share; the caller checks that all is done */
    for (;;) {
        int64_t number = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (number >= job->num_items) return;
        dense_attend_item item = dense_attend_item_of(job, job->num_items - 1 - number);
        DENSE(attend_item)(job, &item, scratch);
        atomic_fetch_add_explicit(&job->done, 1, memory_order_relaxed);
    }
}
