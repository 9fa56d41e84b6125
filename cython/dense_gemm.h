/* The packed GEMM over tiles: which rows meet which panels in what order. Included once per instruction set,
 * after dense_tile.h.
 *
 * Up to DENSE_SKINNY rows, a decode step, memory decides: one pass over the weights as a few long streams that
 * are fetched ahead, all rows against each stretch while it is in L1. More rows, a prefill, are bound by
 * arithmetic: panels pass over blocks of rows that stay in L2. */

/* Writes one finished panel: columns n .. n+16 of rows m0 .. m1, bias and residual added last. */
static void DENSE(store_panel)(const dense_gemm_job *job, const float *acc, int64_t m0, int64_t m1, int64_t n)
{
    int64_t width = job->n - n < DENSE_PANEL ? job->n - n : DENSE_PANEL;
    for (int64_t m = m0; m < m1; m++, acc += DENSE_PANEL) {
        float *out = job->out + m * job->out_stride + n;
        for (int64_t j = 0; j < width; j++) {
            float value = acc[j] + (job->bias ? job->bias[n + j] : 0.0f);
            out[j] = job->accumulate ? out[j] + value : value;
        }
    }
}

/* Where a stream is DENSE_AHEAD bytes later: in the same panels, or at the start of the next. k: the first of
 * this stretch in its panels. */
static inline void DENSE(look_ahead)(const dense_gemm_job *job, dense_piece *piece, int64_t k, int64_t distance,
                                     const char *next)
{
    const int64_t line = DENSE_LINE(job->weight_type), left = job->k - k - distance; /* before the panels end */
    piece->near = piece->w + distance * line;
    piece->split = left < 0 ? 0 : left < piece->kc ? left & ~(int64_t)3 : piece->kc & ~(int64_t)3;
    piece->far = next + (piece->split - left) * line;
}

/* Panels [p, p + np) against all rows, at most DENSE_SKINNY; job->x is [block of k][row][DENSE_KC]. */
static void DENSE(skinny_panels)(const dense_gemm_job *job, int64_t p, int np, const char *next)
{
    float sums[DENSE_MAX_NP][DENSE_SKINNY * DENSE_PANEL] __attribute__((aligned(64)));
    float total[DENSE_MAX_NP][DENSE_SKINNY * DENSE_PANEL] __attribute__((aligned(64)));
    const int type = job->weight_type;
    const int64_t rows = job->m, num_tiles = (rows + DENSE_MR - 1) / DENSE_MR, line = DENSE_LINE(type);
    const int64_t stretch = num_tiles == 1 ? DENSE_KC : DENSE_STRETCH / line;
    const float *x = job->x;
    dense_piece piece = {.w = (const char *)job->packed + p * job->panel_bytes, .panel_bytes = job->panel_bytes};
    for (int64_t k0 = 0; k0 < job->k; k0 += DENSE_KC) {
        const int64_t k1 = k0 + DENSE_KC < job->k ? k0 + DENSE_KC : job->k;
        for (int q = 0; q < np; q++) memset(sums[q], 0, rows * DENSE_PANEL * sizeof(float));
        for (int64_t k = k0; k < k1; k += stretch) {
            piece.kc = k1 - k < stretch ? k1 - k : stretch;
            DENSE(look_ahead)(job, &piece, k, (num_tiles == 1 ? DENSE_AHEAD : DENSE_STRETCH) / line, next);
            for (int64_t t = 0; t < num_tiles; t++) { /* dealt evenly: 16 rows are 5, 5, 6 */
                const int64_t m0 = rows * t / num_tiles, m1 = rows * (t + 1) / num_tiles;
                piece.x = x + m0 * DENSE_KC + (k - k0);
                piece.sums = sums[0] + m0 * DENSE_PANEL;
                piece.first_line = (int)(line / 16 * t / num_tiles);
                piece.last_line = (int)(line / 16 * (t + 1) / num_tiles);
                DENSE(any_tile)((int)(m1 - m0), np, type, 1, &piece);
            }
            piece.w += piece.kc * line;
        }
        for (int q = 0; q < np; q++) {
            const float *scales = (const float *)(piece.w + q * job->panel_bytes);
            DENSE(fold)(type, sums[q], scales, rows, total[q], k0 == 0);
        }
        if (type == DENSE_INT8) piece.w += DENSE_SCALES;
        x += rows * DENSE_KC;
    }
    for (int q = 0; q < np; q++) DENSE(store_panel)(job, total[q], 0, rows, (p + q) * DENSE_PANEL);
}

static void DENSE(skinny)(const dense_gemm_job *job, int64_t low, int64_t high)
{
    static const int widths[] = DENSE_WIDTHS;
    const int width = job->m <= DENSE_MR ? widths[job->m - 1] : 1;
    const int64_t count = high - low, num_groups = (count + width - 1) / width;
    for (int64_t i = 0; i < num_groups; i++) { /* dealt evenly: nine panels are 3, 3, 3 */
        const int64_t p = low + count * i / num_groups, after = low + count * (i + 1) / num_groups;
        const int64_t following = after < job->num_panels ? after : p; /* the last ones again: no harm */
        DENSE(skinny_panels)(job, p, (int)(after - p), (const char *)job->packed + following * job->panel_bytes);
    }
}

/* total [np][rows][16], each total_step behind the other, = or += x [rows][kc] times a block of kc lines of np panels,
 * at most DENSE_NP; behind a panel's lines are its scales if any. `ahead`: the lines that come after these, to be
 * fetched meanwhile; or NULL. */
static void DENSE(block_panel)(int type, const float *x, int64_t x_stride, int64_t rows, const char *w, int np,
                               int64_t panel_bytes, int64_t kc, float *total, int64_t total_step, int first,
                               const char *ahead)
{
    const int64_t num_tiles = (rows + DENSE_TILE_ROWS - 1) / DENSE_TILE_ROWS;
    dense_piece piece = {.x_stride = x_stride, .w = w, .panel_bytes = panel_bytes, .kc = kc, .near = ahead ? ahead : w,
                         .split = kc & ~(int64_t)3, .scales = (const float *)(w + kc * DENSE_LINE(type)),
                         .first = first, .sums_step = total_step};
    if (ahead) piece.last_line = DENSE_LINE(type) / 16;
    for (int64_t t = 0; t < num_tiles; t++, piece.last_line = 0) { /* dealt evenly: 32 rows are 5, 5, 6, 5, 5, 6 */
        const int64_t m0 = rows * t / num_tiles, m1 = rows * (t + 1) / num_tiles;
        piece.x = x + m0 * x_stride;
        piece.sums = total + m0 * DENSE_PANEL;
        DENSE(any_tile)((int)(m1 - m0), np, type, 0, &piece);
    }
}

/* Panels [low, high), at most DENSE_GROUP, against rows m0 .. m1, at most DENSE_MBLOCK. A piece of the activations
 * (kc wide) stays in L2 while the panels pass over it, a piece of a panel (16 x kc) in L1 while the row tiles do. */
static void DENSE(block_panels)(const dense_gemm_job *job, int64_t low, int64_t high, int64_t m0, int64_t m1)
{
    float total[DENSE_GROUP][DENSE_MBLOCK * DENSE_PANEL] __attribute__((aligned(64)));
    const int type = job->weight_type;
    const char *packed = (const char *)job->packed;
    for (int64_t k = 0; k < job->k; k += DENSE_KC) {
        const int64_t kc = job->k - k < DENSE_KC ? job->k - k : DENSE_KC;
        for (int64_t p = low; p < high; p += DENSE_NP) {
            const char *w = packed + p * job->panel_bytes + dense_block_at(type, k);
            const char *ahead = p + DENSE_NP < high ? w + DENSE_NP * job->panel_bytes
                                                    : packed + low * job->panel_bytes + dense_block_at(type, k + kc);
            DENSE(block_panel)(type, job->x + m0 * job->x_stride + k, job->x_stride, m1 - m0, w,
                               p + DENSE_NP < high ? DENSE_NP : (int)(high - p), job->panel_bytes, kc, total[p - low],
                               DENSE_MBLOCK * DENSE_PANEL, k == 0, ahead);
        }
    }
    for (int64_t p = low; p < high; p++) DENSE(store_panel)(job, total[p - low], m0, m1, p * DENSE_PANEL);
}

static void DENSE(gemm_body)(void *arg, int tid)
{
    dense_gemm_job *job = (dense_gemm_job *)arg;
    (void)tid;
    for (;;) {
        int64_t piece = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (piece >= job->num_pieces) return;
        int64_t block = piece / job->pieces_per_block, low = piece % job->pieces_per_block * job->panels_per_piece;
        int64_t high = low + job->panels_per_piece < job->num_panels ? low + job->panels_per_piece : job->num_panels;
        if (job->blocked) {
            DENSE(skinny)(job, low, high);
            continue;
        }
        int64_t m0 = job->m * block / job->num_blocks, m1 = job->m * (block + 1) / job->num_blocks;
        /* few rows stay in L2 as a whole: then whole panels in order, one stream from memory */
        const int64_t group = (m1 - m0) * job->k <= DENSE_L2_FLOATS ? 1 : DENSE_GROUP;
        for (int64_t p = low; p < high; p += group)
            DENSE(block_panels)(job, p, p + group < high ? p + group : high, m0, m1);
    }
}
