/* Opening and closing a context. Sizes were validated in Python (config.AttentionGeometry). */

static fd_ctx *fd_open(int32_t num_groups, int32_t num_layers, int32_t num_threads, const char *isa) {
    fd_ctx *ctx = aligned_alloc(_Alignof(fd_ctx), sizeof *ctx); /* its size is a multiple of its alignment */
    if (!ctx) return NULL;
    memset(ctx, 0, sizeof *ctx);
    ctx->isa = fd_find_isa(isa);
    ctx->num_groups = num_groups;
    ctx->num_layers = num_layers;
    ctx->num_threads = num_threads;
    ctx->num_nodes = 1;
    ctx->groups = calloc((size_t)num_groups, sizeof *ctx->groups);
    ctx->layers = calloc((size_t)num_layers, sizeof *ctx->layers);
    int failed = !ctx->isa || !ctx->groups || !ctx->layers || pthread_mutex_init(&ctx->lock, NULL);
    ctx->staging.plans = calloc((size_t)num_groups, sizeof *ctx->staging.plans);
    failed |= !ctx->staging.plans;
    for (int i = 0; i < FD_TABLES; i++) {
        ctx->tables[i].plans = calloc((size_t)num_groups, sizeof *ctx->tables[i].plans);
        failed |= !ctx->tables[i].plans;
    }
    if (!failed) return ctx;
    for (int i = 0; i < FD_TABLES; i++) free(ctx->tables[i].plans);
    free(ctx->staging.plans);
    free(ctx->groups);
    free(ctx->layers);
    free(ctx);
    return NULL;
}

/* Spreads a context without slabs and sequences over NUMA nodes; 0 when there is no memory. */
static int fd_set_nodes(fd_ctx *ctx, int32_t num_nodes, int32_t num_cpus, const uint8_t *cpu_nodes) {
    ctx->cpu_nodes = malloc((size_t)num_cpus);
    if (!ctx->cpu_nodes) return 0;
    memcpy(ctx->cpu_nodes, cpu_nodes, (size_t)num_cpus);
    ctx->num_cpus = num_cpus;
    ctx->num_nodes = num_nodes;
    return 1;
}

static void fd_set_group(fd_ctx *ctx, int32_t g, int32_t num_layers, int32_t num_q_heads, int32_t num_kv_heads,
                         int32_t head_dim, int64_t window, int64_t ring) {
    fd_group *group = &ctx->groups[g];
    group->num_layers = num_layers;
    group->num_q_heads = num_q_heads;
    group->num_kv_heads = num_kv_heads;
    group->head_dim = head_dim;
    group->heads_per_kv = num_q_heads / num_kv_heads;
    group->window = window;
    group->ring = ring;
    group->row_bytes = fd_row_bytes(ctx->kv_dtype, (size_t)head_dim);
    group->head_bytes = group->row_bytes * FD_BLOCK;
    group->side_bytes = group->head_bytes * (size_t)num_kv_heads;
    group->layer_bytes = 2 * group->side_bytes;
    group->block_bytes = group->layer_bytes * (size_t)num_layers;
}

static int fd_copy_floats(float **to, const float *from, size_t count) {
    if (!from) return 1;
    *to = malloc(count * sizeof **to);
    if (*to) memcpy(*to, from, count * sizeof **to);
    return *to != NULL;
}

/* Keeps copies of a group's sinks and slopes, after its sizes are set; NULL: none. 0 when there is no memory. */
static int fd_set_scores(fd_ctx *ctx, int32_t g, const float *sinks, const float *slopes) {
    fd_group *group = &ctx->groups[g];
    const size_t heads = (size_t)group->num_q_heads;
    return fd_copy_floats(&group->sinks, sinks, heads * (size_t)group->num_layers) &&
           fd_copy_floats(&group->slopes, slopes, heads);
}

/* Scratch of all threads, after the groups are known; 0 when there is no memory. */
static int fd_alloc_scratch(fd_ctx *ctx) {
    int64_t dim = 0;
    for (int32_t g = 0; g < ctx->num_groups; g++) dim = fd_max(dim, ctx->groups[g].head_dim);
    const int64_t width = (dim + 31) / 32 * 17 + 1; /* of a query's integers, their sums and scale */
    ctx->scratch_floats = (3 * dim + FD_SCORES + width) * FD_VECTORS + dim;
    ctx->scratch_floats = (ctx->scratch_floats + 1023) / 1024 * 1024; /* no page shared by two threads */
    size_t nbytes = (size_t)(ctx->scratch_floats * ctx->num_threads) * sizeof(float);
    return !posix_memalign((void **)&ctx->scratch, 4096, nbytes);
}

static void fd_free_table(fd_ctx *ctx, fd_table *table) {
    for (int32_t g = 0; g < ctx->num_groups; g++) {
        free(table->plans[g].units);
        free(table->plans[g].pending);
    }
    free(table->plans);
    free(table->entries);
    *table = (fd_table){0};
}

/* Frees all memory but the context itself, which says "closed" to callers that still hold its address.
 * Returns all slabs, as fd_trim does. */
static fd_slab *fd_close(fd_ctx *ctx) {
    fd_slab *returned = NULL;
    pthread_mutex_lock(&ctx->lock); /* waits for a running attend */
    if (ctx->closed) goto out;
    ctx->closed = 1;
    for (int64_t i = 0; i < ctx->num_seqs; i++) {
        for (int32_t g = 0; g < ctx->num_groups; g++) free(ctx->seqs[i]->lists[g].blocks);
        free(ctx->seqs[i]->written);
        free(ctx->seqs[i]);
    }
    for (int32_t g = 0; g < ctx->num_groups; g++) {
        fd_group *group = &ctx->groups[g];
        for (int32_t n = 0; n < ctx->num_nodes; n++) {
            fd_pool *pool = &group->pools[n];
            for (int64_t i = 0; i < pool->num_slabs; i++) pool->slabs[i]->num_used = 0;
            returned = fd_detach_free(group, pool, returned);
            free(pool->slabs);
        }
        group->num_used = 0;
    }
    for (int i = 0; i < FD_TABLES; i++) fd_free_table(ctx, &ctx->tables[i]);
    fd_free_table(ctx, &ctx->staging);
    free(ctx->seqs);
    free(ctx->free_slots);
    free(ctx->journal);
    free(ctx->partials);
    free(ctx->scratch);
    ctx->num_seqs = 0;
out:
    pthread_mutex_unlock(&ctx->lock);
    return returned;
}

static void fd_destroy(fd_ctx *ctx) {
    for (fd_slab *slab = fd_close(ctx), *next; slab; slab = next) {
        next = slab->next;
        free(slab);
    }
    pthread_mutex_destroy(&ctx->lock);
    for (int32_t g = 0; g < ctx->num_groups; g++) {
        free(ctx->groups[g].sinks);
        free(ctx->groups[g].slopes);
    }
    free(ctx->groups);
    free(ctx->layers);
    free(ctx->cpu_nodes);
    free(ctx);
}
