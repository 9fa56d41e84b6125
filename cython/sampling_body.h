/* One row's token, for one instruction set; sampling.h includes this once per set, with SAMPLE(name)
 * pasting a prefix, SAMPLE_MADD(a, b, c) = a * b + c and SAMPLE_MAX(a, b): b where a is not a number.
 *
 * A row is one thread's work, in one order: its bits depend on nothing but its own numbers. */

/* exp(x) of x in [-inf, 0] to about 1 ulp, 0 below -87: x = n ln2 + r, a polynomial in r. */
static inline __attribute__((always_inline)) sv8f SAMPLE(exp8)(sv8f x)
{
    const sv8f low = (sv8f){0} - 87.0f, magic = (sv8f){0} + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    sv8i is_in = x > low;
    x = (sv8f)((is_in & (sv8i)x) | (~is_in & (sv8i)low));
    sv8f shifted = SAMPLE_MADD(x, (sv8f){0} + 1.44269504088896341f, magic);
    sv8f n = shifted - magic;
    sv8f r = SAMPLE_MADD(n, (sv8f){0} - 0.693359375f, x);
    r = SAMPLE_MADD(n, (sv8f){0} + 2.12194440e-4f, r);
    sv8f p = (sv8f){0} + 1.9875691500e-4f;
    p = SAMPLE_MADD(p, r, (sv8f){0} + 1.3981999507e-3f);
    p = SAMPLE_MADD(p, r, (sv8f){0} + 8.3334519073e-3f);
    p = SAMPLE_MADD(p, r, (sv8f){0} + 4.1665795894e-2f);
    p = SAMPLE_MADD(p, r, (sv8f){0} + 1.6666665459e-1f);
    p = SAMPLE_MADD(p, r, (sv8f){0} + 5.0000001201e-1f);
    p = SAMPLE_MADD(p, r * r, r + 1.0f);
    sv8i exponent = ((sv8i)shifted - (sv8i)magic) << 23;
    return (sv8f)(is_in & ((sv8i)p + exponent));
}

/* Eight logits from x[i] on; -inf beyond the end. */
static inline __attribute__((always_inline)) sv8f SAMPLE(load)(const float *x, int64_t i, int64_t n)
{
    sv8f v;
    if (__builtin_expect(i + 8 <= n, 1)) {
        memcpy(&v, x + i, sizeof v);
        return v;
    }
    v = (sv8f){0} - INFINITY;
    for (int64_t j = i; j < n; j++) v[j - i] = x[j];
    return v;
}

/* The weights of eight logits: exp((x - max) / temperature), 0 where min_p cuts. */
static inline __attribute__((always_inline)) sv8f SAMPLE(weights)(const sampling_scan *scan, sv8f x)
{
    sv8f w = SAMPLE(exp8)((x - scan->max) * scan->inverse_temperature);
    return (sv8f)((w >= scan->min_p) & (sv8i)w);
}

static float SAMPLE(weight)(const sampling_scan *scan, float x)
{
    return SAMPLE(weights)(scan, (sv8f){0} + x)[0];
}

/* Finds the largest logit, and those of SAMPLING_PEAKS parts; 0 if one is NaN or the largest infinite. */
static int SAMPLE(peaks)(sampling_scan *scan)
{
    sv8f top = (sv8f){0} - INFINITY;
    sv8i is_nan = {0};
    int64_t chunk = 8 * ((scan->n + SAMPLING_PEAKS - 1) / SAMPLING_PEAKS), i = 0;
    scan->chunk = chunk;
    scan->num_peaks = 0;
    while (i < scan->n) {
        sv8f high[2] = {(sv8f){0} - INFINITY, (sv8f){0} - INFINITY};
        int64_t end = i + chunk < scan->n ? i + chunk : scan->n;
        for (; i + 16 <= end; i += 16) {
            sv8f x, y;
            memcpy(&x, scan->x + i, sizeof x);
            memcpy(&y, scan->x + i + 8, sizeof y);
            is_nan |= (x != x) | (y != y);
            high[0] = SAMPLE_MAX(x, high[0]);
            high[1] = SAMPLE_MAX(y, high[1]);
        }
        for (; i < end; i += 8) {
            sv8f x = SAMPLE(load)(scan->x, i, scan->n);
            is_nan |= x != x;
            high[0] = SAMPLE_MAX(x, high[0]);
        }
        high[0] = SAMPLE_MAX(high[1], high[0]);
        top = SAMPLE_MAX(high[0], top);
        memcpy(scan->peaks + scan->num_peaks, &high[0], sizeof high[0]);
        scan->num_peaks += 8;
    }
    scan->max = top[0];
    for (int j = 1; j < 8; j++)
        if (top[j] > scan->max) scan->max = top[j];
    return !sampling_any(is_nan) && isfinite(scan->max);
}

/* The lowest id of the largest logit. */
static int64_t SAMPLE(greedy)(const sampling_scan *scan)
{
    int64_t i = 0;
    while (scan->peaks[i] != scan->max) i++;
    for (i = i / 8 * scan->chunk; scan->x[i] != scan->max;) i++;
    return i;
}

/* Sums of weights, block by block; returns the total. */
static double SAMPLE(sum)(const sampling_scan *scan, int64_t block, double *sums)
{
    double total = 0.0;
    for (int64_t b = 0, i = 0; i < scan->n; b++) {
        int64_t end = i + block < scan->n ? i + block : scan->n;
        sv8f sum = {0};
        for (; i < end; i += 8) sum += SAMPLE(weights)(scan, SAMPLE(load)(scan->x, i, scan->n));
        sums[b] = (((double)sum[0] + sum[1]) + ((double)sum[2] + sum[3]))
            + (((double)sum[4] + sum[5]) + ((double)sum[6] + sum[7]));
        total += sums[b];
    }
    return total;
}

/* Draws from all tokens that have a weight, in id order: sums of blocks, then of one block's tokens. */
static int64_t SAMPLE(wide)(const sampling_scan *scan, double uniform)
{
    double sums[SAMPLING_BLOCKS], before = 0.0;
    int64_t block = sampling_block(scan->n), num_blocks = (scan->n + block - 1) / block, chosen = 0, token = -1;
    int is_found = 0; /* rounding may lift the target to the total: then the last token is meant */
    const double target = uniform * SAMPLE(sum)(scan, block, sums);
    for (int64_t b = 0; b < num_blocks && !is_found; b++) {
        if (sums[b] > 0.0) chosen = b;
        is_found = before + sums[b] > target;
        if (!is_found) before += sums[b];
    }
    for (int64_t i = chosen * block; i < (chosen + 1) * block && i < scan->n; i += 8) {
        sv8f w = SAMPLE(weights)(scan, SAMPLE(load)(scan->x, i, scan->n));
        for (int j = 0; j < 8; j++) {
            before += w[j];
            if (w[j] > 0.0f) {
                token = i + j;
                if (is_found && before > target) return token;
            }
        }
    }
    return token;
}

/* Sets `floor`: no smaller logit can be among the top_k or in the nucleus. And the width of the bins.
 *
 * Of SAMPLING_PEAKS parts, top_k have a logit that is at least as large as the top_k-th largest of their
 * largest ones. Of the mass, all tokens with less than (1 - top_p) / V each hold less than 1 - top_p. */
static void SAMPLE(bound)(sampling_scan *scan, const sampling_row *row)
{
    float depth = SAMPLING_REACH;
    scan->floor = -FLT_MAX;
    if (row->top_k > 0) {
        if (row->top_k <= scan->num_peaks)
            scan->floor = sampling_nth_largest(scan->peaks, scan->num_peaks, row->top_k - 1);
    } else {
        double sums[SAMPLING_BLOCKS];
        scan->total = SAMPLE(sum)(scan, sampling_block(scan->n), sums);
        /* a little less than it is, as sums are rounded */
        float least = (float)-log(0.999 * (1.0 - row->top_p) * scan->total / (double)scan->n);
        if (least < depth) depth = least > 0.0f ? least : 0.0f;
        float reach = depth / scan->inverse_temperature;
        scan->floor = scan->max - reach - (fabsf(scan->max) + reach) * 1e-6f;
    }
    sv8f low = (sv8f){0} + scan->max;
    for (int64_t i = 0; i < scan->n; i += 8) {
        sv8f x = SAMPLE(load)(scan->x, i, scan->n);
        sv8i is_in = (x >= scan->floor) & (x < low);
        low = (sv8f)((is_in & (sv8i)x) | (~is_in & (sv8i)low));
    }
    float min = low[0];
    for (int j = 1; j < 8; j++)
        if (low[j] < min) min = low[j];
    float span = (scan->max - min) * scan->inverse_temperature;
    if (!(span < SAMPLING_REACH)) span = SAMPLING_REACH;
    scan->bins_per_unit = span > 1e-30f ? (SAMPLING_BINS - 1) / span : 0.0f;
}

/* Bins of eight logits: bin 0 holds the largest; -1 where one lies below the floor or SAMPLING_REACH.
 * Bins are ordered as the logits are: every step rounds monotonically. */
static inline __attribute__((always_inline)) sv8i SAMPLE(bins)(const sampling_scan *scan, sv8f x)
{
    sv8f depth = (scan->max - x) * scan->inverse_temperature;
    sv8i is_in = (depth <= SAMPLING_REACH) & (x >= scan->floor);
    sv8i bin = __builtin_convertvector((sv8f)(is_in & (sv8i)(depth * scan->bins_per_unit)), sv8i);
    sv8i last = (sv8i){0} + (SAMPLING_BINS - 1), over = bin > last;
    return (over & last) | (~over & bin) | ~is_in;
}

static void SAMPLE(histogram)(const sampling_scan *scan, sampling_bins *bins, int with_counts)
{
    memset(bins, 0, sizeof *bins);
    for (int64_t i = 0; i < scan->n; i += 8) {
        sv8f x = SAMPLE(load)(scan->x, i, scan->n);
        sv8i bin = SAMPLE(bins)(scan, x);
        if (!sampling_any(bin + 1)) continue;
        sv8f w = SAMPLE(weights)(scan, x);
        sv8i is_in = (bin >= 0) & (w > 0.0f);
        bin = (is_in & bin) | (~is_in & SAMPLING_BINS);
        for (int j = 0; j < 8; j++) bins->mass[bin[j]] += w[j];
        if (with_counts)
            for (int j = 0; j < 8; j++) bins->count[bin[j]]++;
    }
}

/* Makes `list` the tokens of a bin from the most probable down, equal ones in id order; 0 without memory. */
static int SAMPLE(gather)(const sampling_scan *scan, int32_t wanted, sampling_list *list)
{
    if (list->bin == wanted) return 1;
    list->num = 0;
    list->bin = wanted;
    for (int64_t i = 0; i < scan->n; i += 8) {
        sv8f x = SAMPLE(load)(scan->x, i, scan->n);
        sv8i hit = SAMPLE(bins)(scan, x) == wanted;
        if (!sampling_any(hit)) continue;
        hit &= SAMPLE(weights)(scan, x) > 0.0f;
        for (int j = 0; j < 8; j++)
            if (hit[j] && !sampling_append(list, x[j], i + j)) return 0;
    }
    sampling_sort(list);
    return 1;
}

/* Draws from the top_k or the nucleus. Whole bins are summed; only a bin that a border or the draw falls
 * into is sorted. Returns -2 without memory. */
static int64_t SAMPLE(narrow)(sampling_scan *scan, const sampling_row *row, sampling_list *list)
{
    sampling_bins bins;
    int32_t last = SAMPLING_BINS - 1, chosen = 0, b = 0;
    int64_t limit = INT64_MAX; /* tokens that are kept of the last bin */
    int is_found = 0;          /* as in wide */
    double before = 0.0;
    SAMPLE(bound)(scan, row);
    SAMPLE(histogram)(scan, &bins, row->top_k > 0);
    list->bin = -1;
    while (last > 0 && bins.mass[last] == 0.0) last--;
    if (row->top_k > 0) {
        int64_t above = 0;
        while (b < last && above + bins.count[b] < row->top_k) above += bins.count[b++];
        last = b;
        if (row->top_k - above < bins.count[b]) {
            if (!SAMPLE(gather)(scan, b, list)) return -2;
            limit = row->top_k - above;
            while (limit < list->num && sampling_equal(list, limit - 1, limit)) limit++; /* its equals stay */
            bins.mass[b] = 0.0;
            for (int64_t i = 0; i < limit; i++) bins.mass[b] += SAMPLE(weight)(scan, sampling_logit(list, i));
        }
        scan->total = 0.0;
        for (b = 0; b <= last; b++) scan->total += bins.mass[b];
    }
    if (row->top_p < 1.0) { /* a token stays while those above it hold less than top_p of the mass */
        const double target = row->top_p * scan->total;
        double mass = 0.0;
        int64_t kept = 0;
        for (b = 0; b < last && before + bins.mass[b] < target; b++) before += bins.mass[b];
        if (!SAMPLE(gather)(scan, b, list)) return -2;
        if (b < last || limit > list->num) limit = list->num;
        do mass += SAMPLE(weight)(scan, sampling_logit(list, kept++));
        while (kept < limit && before + mass < target);
        last = b;
        limit = kept;
        bins.mass[b] = mass;
        scan->total = before + mass;
    }
    const double target = row->uniform * scan->total;
    before = 0.0;
    for (b = 0; b <= last && !is_found; b++) {
        if (bins.mass[b] > 0.0) chosen = b;
        is_found = before + bins.mass[b] > target;
        if (!is_found) before += bins.mass[b];
    }
    if (!SAMPLE(gather)(scan, chosen, list)) return -2;
    if (chosen < last || limit > list->num) limit = list->num;
    for (int64_t i = 0; is_found && i < limit - 1; i++) {
        before += SAMPLE(weight)(scan, sampling_logit(list, i));
        if (before > target) return sampling_token(list, i);
    }
    return sampling_token(list, limit - 1);
}

static int64_t SAMPLE(row)(const sampling_row *row, int64_t n, sampling_list *list)
{
    sampling_scan scan;
    scan.x = (const float *)(uintptr_t)row->logits;
    scan.n = n;
    scan.min_p = row->min_p;
    if (!SAMPLE(peaks)(&scan)) return -1;
    if (row->temperature <= 0.0f) return SAMPLE(greedy)(&scan);
    scan.inverse_temperature = 1.0f / row->temperature;
    if (row->top_k <= 0 && row->top_p >= 1.0) return SAMPLE(wide)(&scan, row->uniform);
    return SAMPLE(narrow)(&scan, row, list);
}

static void SAMPLE(body)(void *arg, int tid)
{
    sampling_job *job = (sampling_job *)arg;
    sampling_list list = {.bin = -1};
    (void)tid;
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (i >= job->num_rows) break;
        job->rows[i].token = SAMPLE(row)(&job->rows[i], job->vocab_size, &list);
    }
    free(list.keys);
}
