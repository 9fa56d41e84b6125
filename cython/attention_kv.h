/* KV storage: slabs of blocks, reference counts, sequences, fork, copies of ranges. */

/* ---- blocks; the caller holds the lock and has made sure that one is free ---- */

/* A block on the node, or on another one when the node has none. */
static fd_block *fd_take(fd_group *group, int32_t node) {
    fd_pool *pool = &group->pools[node];
    if (!pool->num_free)
        for (pool = group->pools; !pool->num_free;) pool++;
    while (!pool->slabs[pool->hint]->free) pool->hint++;
    fd_slab *slab = pool->slabs[pool->hint];
    fd_block *block = slab->free;
    slab->free = block->next;
    slab->num_used++;
    pool->num_free--;
    group->num_free--;
    group->num_used++;
    block->refs = 1;
    return block;
}

static void fd_drop(fd_group *group, fd_block *block) {
    if (--block->refs) return;
    fd_slab *slab = block->slab;
    block->next = slab->free;
    slab->free = block;
    slab->num_used--;
    fd_pool *pool = &group->pools[slab->node];
    pool->num_free++;
    group->num_free++;
    group->num_used--;
    if (pool->hint && (pool->hint >= pool->num_slabs || pool->slabs[pool->hint] != slab)) pool->hint = 0;
}

/* Adds num_blocks blocks at `base`, memory of the node that outlives its slab here. */
static int fd_add_slab(fd_ctx *ctx, int32_t group_index, int32_t node, int64_t num_blocks, void *base) {
    if (group_index < 0 || group_index >= ctx->num_groups || num_blocks < 1) return FD_E_INTERNAL;
    if (node < 0 || node >= ctx->num_nodes) return FD_E_INTERNAL;
    fd_group *group = &ctx->groups[group_index];
    fd_pool *pool = &group->pools[node];
    int code = FD_E_INTERNAL;
    pthread_mutex_lock(&ctx->lock);
    if (ctx->closed) goto out;
    if (!fd_reserve(&pool->slabs, &pool->cap_slabs, pool->num_slabs + 1, sizeof *pool->slabs)) goto out;
    fd_slab *slab = malloc(sizeof *slab + (size_t)num_blocks * sizeof(fd_block));
    if (!slab) goto out;
    *slab = (fd_slab){.base = base, .node = node, .num_blocks = num_blocks};
    for (int64_t i = num_blocks - 1; i >= 0; i--) {
        slab->blocks[i] = (fd_block){slab->base + (size_t)i * group->block_bytes, slab, slab->free, 0};
        slab->free = &slab->blocks[i];
    }
    pool->slabs[pool->num_slabs++] = slab;
    pool->num_free += num_blocks;
    group->num_free += num_blocks;
    code = FD_OK;
out:
    pthread_mutex_unlock(&ctx->lock);
    return code;
}

/* Takes the slabs without a block in use out of a pool; returns them in front of `chain`. */
static fd_slab *fd_detach_free(fd_group *group, fd_pool *pool, fd_slab *chain) {
    int64_t kept = 0;
    for (int64_t i = 0; i < pool->num_slabs; i++) {
        fd_slab *slab = pool->slabs[i];
        if (slab->num_used) {
            pool->slabs[kept++] = slab;
            continue;
        }
        pool->num_free -= slab->num_blocks;
        group->num_free -= slab->num_blocks;
        slab->next = chain;
        chain = slab;
    }
    pool->num_slabs = kept;
    pool->hint = 0;
    return chain;
}

/* Returns the chain of slabs that hold nothing: the caller's to free, and what lies at their `base`. */
static fd_slab *fd_trim(fd_ctx *ctx) {
    fd_slab *chain = NULL;
    pthread_mutex_lock(&ctx->lock);
    for (int32_t g = 0; g < ctx->num_groups; g++)
        for (int32_t n = 0; n < ctx->num_nodes; n++)
            chain = fd_detach_free(&ctx->groups[g], &ctx->groups[g].pools[n], chain);
    pthread_mutex_unlock(&ctx->lock);
    return chain;
}

/* ---- sequences ---- */

/* Returns the slot of a new, empty sequence, or a negative code. Structures are reused, never freed before
 * the context, so that a stale table entry can always read the generation. */
static int32_t fd_seq_new(fd_ctx *ctx, int32_t node) {
    int32_t slot = FD_E_INTERNAL;
    fd_seq *seq;
    pthread_mutex_lock(&ctx->lock);
    if (ctx->closed || node < 0 || node >= ctx->num_nodes) goto out;
    if (ctx->num_free_slots) {
        slot = ctx->free_slots[--ctx->num_free_slots];
    } else {
        int64_t cap = ctx->cap_seqs;
        if (!fd_reserve(&ctx->seqs, &cap, ctx->num_seqs + 1, sizeof *ctx->seqs)) goto out;
        int64_t cap_slots = ctx->cap_seqs;
        if (!fd_reserve(&ctx->free_slots, &cap_slots, cap, sizeof *ctx->free_slots)) goto out;
        ctx->cap_seqs = cap;
        seq = calloc(1, sizeof *seq + (size_t)ctx->num_groups * sizeof(fd_list));
        if (seq) seq->written = calloc((size_t)ctx->num_layers, sizeof *seq->written);
        if (!seq || !seq->written) {
            free(seq);
            goto out;
        }
        slot = (int32_t)ctx->num_seqs;
        ctx->seqs[ctx->num_seqs++] = seq;
    }
    seq = ctx->seqs[slot];
    seq->alive = 1;
    seq->node = node;
    seq->length = 0;
    seq->shared_at = 0;
    memset(seq->written, 0, (size_t)ctx->num_layers * sizeof *seq->written);
    seq->tainted = 0;
    for (int32_t g = 0; g < ctx->num_groups; g++) seq->lists[g].floor = 0;
out:
    pthread_mutex_unlock(&ctx->lock);
    return slot;
}

static int fd_is_alive(const fd_ctx *ctx, int32_t slot) {
    return !ctx->closed && slot >= 0 && slot < ctx->num_seqs && ctx->seqs[slot]->alive;
}

static int fd_seq_free(fd_ctx *ctx, int32_t slot) {
    pthread_mutex_lock(&ctx->lock);
    int known = fd_is_alive(ctx, slot);
    if (known) {
        fd_seq *seq = ctx->seqs[slot];
        for (int32_t g = 0; g < ctx->num_groups; g++) {
            fd_list *list = &seq->lists[g];
            while (list->num) fd_drop(&ctx->groups[g], list->blocks[--list->num]);
            free(list->blocks);
            *list = (fd_list){0};
        }
        seq->alive = 0;
        seq->generation++;
        ctx->free_slots[ctx->num_free_slots++] = slot;
    }
    pthread_mutex_unlock(&ctx->lock);
    return known ? FD_OK : FD_E_SEQUENCE;
}

/* First position that the group's list still holds. */
static int64_t fd_floor(const fd_group *group, const fd_list *list, int64_t length) {
    return group->ring ? fd_max(list->floor, length - group->ring * FD_BLOCK) : 0;
}

/* 1 when the tokens that position `length` sees before itself are still there. */
static int fd_window_kept(const fd_group *group, const fd_list *list, int64_t old_length, int64_t length) {
    if (!group->ring) return 1;
    int64_t first = fd_max(0, length - group->window + 1);
    return first >= length || first >= fd_floor(group, list, old_length);
}

/* The empty sequence `dst` shares the first `length` tokens of `src`; blocks are copied when written. */
static int fd_fork(fd_ctx *ctx, int32_t src_slot, int32_t dst_slot, int64_t length) {
    int code = FD_E_SEQUENCE;
    pthread_mutex_lock(&ctx->lock);
    if (!fd_is_alive(ctx, src_slot) || !fd_is_alive(ctx, dst_slot)) goto out;
    fd_seq *src = ctx->seqs[src_slot], *dst = ctx->seqs[dst_slot];
    code = FD_E_RANGE;
    if (length < 0 || length > src->length) goto out;
    for (int32_t g = 0; g < ctx->num_groups; g++)
        if (!fd_window_kept(&ctx->groups[g], &src->lists[g], src->length, length)) goto out;
    code = FD_E_INTERNAL;
    for (int32_t g = 0; g < ctx->num_groups; g++) {
        fd_list *list = &dst->lists[g];
        if (!fd_reserve(&list->blocks, &list->cap, fd_blocks_for(&ctx->groups[g], length), sizeof *list->blocks))
            goto out;
    }
    for (int32_t g = 0; g < ctx->num_groups; g++) {
        const fd_list *from = &src->lists[g];
        fd_list *to = &dst->lists[g];
        to->num = fd_blocks_for(&ctx->groups[g], length);
        to->floor = fd_min(length, fd_floor(&ctx->groups[g], from, src->length));
        for (int64_t i = 0; i < to->num; i++) {
            to->blocks[i] = from->blocks[i];
            to->blocks[i]->refs++;
        }
    }
    for (int32_t i = 0; i < ctx->num_layers; i++) dst->written[i] = fd_min(src->written[i], length);
    dst->tainted = src->tainted;
    dst->node = src->node;
    dst->length = length;
    src->shared_at = ++ctx->clock;
    code = FD_OK;
out:
    pthread_mutex_unlock(&ctx->lock);
    return code;
}

/* ---- ranges in stored form ---- */

/* First position of a group that an export of [start, ..) can give; negative code for a bad sequence. */
static int64_t fd_export_start(fd_ctx *ctx, int32_t slot, int32_t group, int64_t start) {
    pthread_mutex_lock(&ctx->lock);
    int64_t first = FD_E_SEQUENCE;
    if (fd_is_alive(ctx, slot) && group >= 0 && group < ctx->num_groups) {
        const fd_seq *seq = ctx->seqs[slot];
        first = fd_max(start, fd_floor(&ctx->groups[group], &seq->lists[group], seq->length));
    }
    pthread_mutex_unlock(&ctx->lock);
    return first;
}

/* Tokens that every layer of the sequence holds; negative code for a bad sequence. */
static int64_t fd_written(fd_ctx *ctx, int32_t slot) {
    pthread_mutex_lock(&ctx->lock);
    int64_t written = FD_E_SEQUENCE;
    if (fd_is_alive(ctx, slot)) {
        written = ctx->seqs[slot]->length;
        for (int32_t i = 0; i < ctx->num_layers; i++) written = fd_min(written, ctx->seqs[slot]->written[i]);
    }
    pthread_mutex_unlock(&ctx->lock);
    return written;
}

/* Copies tokens [start, stop) of one group between the cache and `data`, [layer][K|V][kv head][token][D].
 * With `load` the data goes into the cache, whose blocks a step has just made private. */
static int fd_copy_range(fd_ctx *ctx, int32_t slot, int32_t g, int64_t start, int64_t stop, char *data,
                         int32_t load) {
    int code = FD_E_SEQUENCE;
    pthread_mutex_lock(&ctx->lock);
    if (!fd_is_alive(ctx, slot) || g < 0 || g >= ctx->num_groups) goto out;
    const fd_group *group = &ctx->groups[g];
    fd_seq *seq = ctx->seqs[slot];
    fd_list *list = &seq->lists[g];
    code = FD_E_RANGE;
    if (start < 0 || stop > seq->length || start > stop) goto out;
    if (!load && start < stop && start < fd_floor(group, list, seq->length)) goto out;
    if (group->ring && stop - start > group->ring * FD_BLOCK) goto out;
    for (size_t piece = 0; piece < group->block_bytes; piece += group->head_bytes) {
        const int of_keys = piece / group->side_bytes % 2 == 0;
        for (int64_t token = start; token < stop;) {
            const int64_t end = of_keys ? token + 1 : fd_min(stop, (token / FD_BLOCK + 1) * FD_BLOCK);
            const size_t nbytes = (size_t)(end - token) * group->row_bytes;
            char *head = fd_block_at(group, list, token)->data + piece;
            char *cached = head + (size_t)(token % FD_BLOCK) * group->row_bytes;
            if (of_keys)
                fd_key_row(load, ctx->kv_dtype, (size_t)group->head_dim, head, group->row_bytes, token % FD_BLOCK, data);
            else memcpy(load ? cached : data, load ? data : cached, nbytes);
            data += nbytes;
            token = end;
        }
    }
    if (load) {
        for (int32_t i = 0; i < ctx->num_layers; i++) {
            if (ctx->layers[i].group != g) continue;
            if (start > seq->written[i]) list->floor = fd_max(list->floor, start); /* a gap: a ring only */
            seq->written[i] = fd_max(seq->written[i], stop);
        }
    }
    code = FD_OK;
out:
    pthread_mutex_unlock(&ctx->lock);
    return code;
}
