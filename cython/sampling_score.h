/* Log-probabilities of one row, for one instruction set; included as sampling_body.h is, and after it. */

static int64_t SAMPLE(count_above)(const sampling_scan *scan, float bound)
{
    sv8i below = {0}; /* minus the count: true is -1 */
    for (int64_t i = 0; i < scan->n; i += 8) below += SAMPLE(load)(scan->x, i, scan->n) > bound;
    int64_t count = 0;
    for (int j = 0; j < 8; j++) count -= below[j];
    return count;
}

/* Makes `list` the row's num_top highest logits, equal ones in id order; 0 without memory. */
static int SAMPLE(highest)(sampling_scan *scan, int64_t num_top, sampling_list *list)
{
    /* of the parts that have a peak, num_top reach the num_top-th highest peak */
    float floor = -INFINITY;
    if (num_top <= scan->num_peaks) floor = sampling_nth_largest(scan->peaks, scan->num_peaks, num_top - 1);
    list->num = 0;
    for (int64_t i = 0; i < scan->n; i += 8) {
        sv8i hit = SAMPLE(load)(scan->x, i, scan->n) >= floor;
        if (!sampling_any(hit)) continue;
        for (int j = 0; j < 8 && i + j < scan->n; j++)
            if (hit[j] && !sampling_append(list, scan->x[i + j], i + j)) return 0;
    }
    sampling_keep_first(list, num_top);
    sampling_sort(list);
    return 1;
}

static void SAMPLE(score_row)(sampling_score *row, int64_t n, sampling_list *list)
{
    sampling_scan scan;
    double sums[SAMPLING_BLOCKS];
    scan.x = (const float *)(uintptr_t)row->logits;
    scan.n = n;
    scan.min_p = 0.0f;
    scan.inverse_temperature = 1.0f;
    row->logprob = NAN;
    row->rank = 0;
    if (!SAMPLE(peaks)(&scan)) return;
    const double log_total = (double)scan.max + log(SAMPLE(sum)(&scan, sampling_block(n), sums));
    const float own = scan.x[row->token];
    row->logprob = (double)own - log_total;
    row->rank = 1 + SAMPLE(count_above)(&scan, own);
    if (row->num_top <= 0) return;
    if (!SAMPLE(highest)(&scan, row->num_top, list)) {
        row->rank = -2;
        return;
    }
    sampling_top *top = (sampling_top *)(uintptr_t)row->top;
    for (int64_t i = 0; i < row->num_top; i++) {
        top[i].logprob = (double)sampling_logit(list, i) - log_total;
        top[i].token = (int32_t)sampling_token(list, i);
        top[i].rank = i && sampling_equal(list, i - 1, i) ? top[i - 1].rank : (int32_t)(i + 1);
    }
}

static void SAMPLE(score_body)(void *arg, int tid)
{
    sampling_score_job *job = (sampling_score_job *)arg;
    sampling_list list = {.bin = -1};
    (void)tid;
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (i >= job->num_rows) break;
        SAMPLE(score_row)(&job->rows[i], job->vocab_size, &list);
    }
    free(list.keys);
}
