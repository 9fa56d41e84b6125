/* begin_step: validates a step table, finds or copies the blocks it writes, plans the work of each group.
 * All or nothing: everything that can fail happens before the first change. */

/* Blocks [first, last] of a list that tokens [start, stop) fall into, as list indices begin .. begin+count-1
 * (modulo the ring). */
static int64_t fd_written_blocks(const fd_group *group, int64_t start, int64_t stop, int64_t *begin) {
    if (stop <= start) return 0;
    int64_t last = (stop - 1) / FD_BLOCK;
    *begin = start / FD_BLOCK;
    if (group->ring) *begin = fd_max(*begin, last - group->ring + 1);
    return last - *begin + 1;
}

static int64_t fd_list_index(const fd_group *group, int64_t block) {
    return group->ring ? block % group->ring : block;
}

static int fd_check_lines(fd_ctx *ctx, int32_t n, const fd_line *lines, const int32_t *slots, int32_t *bad) {
    int64_t rows = 0;
    ctx->clock++;
    for (int32_t i = 0; i < n; i++) {
        *bad = i;
        const fd_line *line = &lines[i];
        if (!fd_is_alive(ctx, slots[i])) return FD_E_SEQUENCE;
        fd_seq *seq = ctx->seqs[slots[i]];
        if (seq->stamp == ctx->clock) return FD_E_PROTOCOL;
        seq->stamp = ctx->clock;
        if (line->kv_len_before > (uint64_t)seq->length) return FD_E_RANGE;
        if (line->kv_len_before + line->q_len > (uint64_t)ctx->max_model_len) return FD_E_RANGE;
        if (line->flags & ~(uint32_t)FD_UPLOAD) return FD_E_PROTOCOL;
        if (line->flags & FD_UPLOAD) continue;
        rows += line->q_len;
        if (rows > ctx->max_rows) return FD_E_ROWS;
        for (int32_t g = 0; g < ctx->num_groups; g++) {
            const fd_group *group = &ctx->groups[g];
            if (group->ring && (int64_t)line->q_len > group->ring * FD_BLOCK - group->window + 1) return FD_E_ROWS;
            if (line->q_len && !fd_window_kept(group, &seq->lists[g], seq->length, (int64_t)line->kv_len_before))
                return FD_E_RANGE;
        }
    }
    *bad = -1;
    return FD_OK;
}

/* Counts the blocks that the step needs beyond the free ones: a rehearsal of fd_commit_blocks() that takes
 * references away as that would, and gives them back at the end. Of each group, missing[] tells what is missing on
 * each node and, last, on all together; without `spill` no node may be short. */
static int fd_rehearse(fd_ctx *ctx, int32_t n, const fd_line *lines, const int32_t *slots, int32_t spill,
                       int64_t *missing) {
    const int32_t nodes = ctx->num_nodes;
    int short_of = 0;
    for (int32_t g = 0; g < ctx->num_groups; g++, missing += nodes + 1) {
        const fd_group *group = &ctx->groups[g];
        int64_t journal = 0;
        int failed = 0;
        for (int32_t k = 0; k < nodes; k++) missing[k] = -group->pools[k].num_free;
        for (int32_t i = 0; i < n && !failed; i++) {
            fd_list *list = &ctx->seqs[slots[i]]->lists[g];
            int64_t blocks = fd_blocks_for(group, (int64_t)lines[i].kv_len_before + lines[i].q_len);
            failed |= !fd_reserve(&list->blocks, &list->cap, blocks, sizeof *list->blocks);
            failed |= !fd_reserve(&ctx->journal, &ctx->cap_journal, journal + list->num, sizeof *ctx->journal);
            for (int64_t b = blocks; b < list->num && !failed; b++) {
                ctx->journal[journal++] = list->blocks[b];
                missing[list->blocks[b]->slab->node] -= !--list->blocks[b]->refs;
            }
        }
        for (int32_t i = 0; i < n && !failed; i++) {
            fd_list *list = &ctx->seqs[slots[i]]->lists[g];
            int64_t start = (int64_t)lines[i].kv_len_before, stop = start + lines[i].q_len, begin = 0;
            int64_t *needed = &missing[ctx->seqs[slots[i]]->node];
            *needed += fd_max(0, fd_blocks_for(group, stop) - list->num);
            int64_t count = fd_written_blocks(group, start, stop, &begin);
            failed |= !fd_reserve(&ctx->journal, &ctx->cap_journal, journal + count, sizeof *ctx->journal);
            for (int64_t b = begin; b < begin + count && !failed; b++) {
                int64_t at = fd_list_index(group, b);
                if (at >= list->num || list->blocks[at]->refs < 2) continue;
                ctx->journal[journal++] = list->blocks[at];
                list->blocks[at]->refs--;
                ++*needed;
            }
        }
        while (journal) ctx->journal[--journal]->refs++;
        if (failed) return FD_E_INTERNAL;
        missing[nodes] = 0;
        for (int32_t k = 0; k < nodes; k++) {
            missing[nodes] += missing[k];
            missing[k] = fd_max(0, missing[k]);
            short_of |= !spill && missing[k];
        }
        missing[nodes] = fd_max(0, missing[nodes]);
        short_of |= missing[nodes] > 0;
    }
    return short_of ? FD_E_CACHE_FULL : FD_OK;
}

static void fd_commit_blocks(fd_ctx *ctx, int32_t n, const fd_line *lines, const int32_t *slots) {
    for (int32_t g = 0; g < ctx->num_groups; g++) {
        fd_group *group = &ctx->groups[g];
        for (int32_t i = 0; i < n; i++) {
            fd_seq *seq = ctx->seqs[slots[i]];
            fd_list *list = &seq->lists[g];
            int64_t start = (int64_t)lines[i].kv_len_before;
            int64_t blocks = fd_blocks_for(group, start + lines[i].q_len);
            list->floor = fd_min(start, fd_floor(group, list, seq->length));
            while (list->num > blocks) fd_drop(group, list->blocks[--list->num]);
        }
        for (int32_t i = 0; i < n; i++) {
            fd_list *list = &ctx->seqs[slots[i]]->lists[g];
            const int32_t node = ctx->seqs[slots[i]]->node;
            int64_t start = (int64_t)lines[i].kv_len_before, stop = start + lines[i].q_len, begin = 0;
            int64_t count = fd_written_blocks(group, start, stop, &begin);
            for (int64_t b = begin; b < begin + count; b++) {
                int64_t at = fd_list_index(group, b);
                if (at >= list->num || list->blocks[at]->refs < 2) continue;
                fd_block *shared = list->blocks[at];
                list->blocks[at] = fd_take(group, node);
                memcpy(list->blocks[at]->data, shared->data, group->block_bytes);
                fd_drop(group, shared);
            }
            int64_t blocks = fd_blocks_for(group, stop);
            while (list->num < blocks) list->blocks[list->num++] = fd_take(group, node);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        fd_seq *seq = ctx->seqs[slots[i]];
        int64_t start = (int64_t)lines[i].kv_len_before;
        if (start < seq->length)
            for (int32_t layer = 0; layer < ctx->num_layers; layer++)
                seq->written[layer] = fd_min(seq->written[layer], start);
        seq->length = start + lines[i].q_len;
    }
}

/* Appends the units of one entry. A decode row gives one unit per segment, merged by the last to finish;
 * an entry of more than FD_VECTORS query vectors gives units that walk all its segments themselves, which
 * needs no memory for partials. The arithmetic is the same. */
static int fd_plan_entry(const fd_group *group, fd_plan *plan, int32_t index, const fd_entry *entry) {
    int32_t vectors = entry->q_len * group->heads_per_kv;
    int64_t last = entry->kv_len + entry->q_len - 1;
    int64_t first = group->window ? fd_max(0, entry->kv_len - group->window + 1) : 0;
    plan->num_tokens += (last - first + 1) * vectors;
    if (vectors > FD_VECTORS) {
        int64_t chunks = (vectors + FD_VECTORS - 1) / FD_VECTORS;
        if (!fd_reserve(&plan->units, &plan->cap_units, plan->num_units + chunks, sizeof *plan->units)) return 0;
        plan->split_writes = 1;
        for (int32_t v = 0; v < vectors; v += FD_VECTORS) {
            fd_unit *unit = &plan->units[plan->num_units++];
            *unit = (fd_unit){index, -1, v, (int32_t)fd_min(v + FD_VECTORS, vectors), 0, 1, 0};
        }
        return 1;
    }
    int32_t from = (int32_t)(first / FD_SEG), to = (int32_t)(last / FD_SEG), base = (int32_t)plan->num_units;
    if (!fd_reserve(&plan->units, &plan->cap_units, plan->num_units + to - from + 1, sizeof *plan->units)) return 0;
    for (int32_t segment = from; segment <= to; segment++) {
        fd_unit *unit = &plan->units[plan->num_units++];
        *unit = (fd_unit){index, segment, 0, vectors, base, to - from + 1, plan->num_partials};
        if (to > from) plan->num_partials += (int64_t)vectors * group->num_kv_heads;
    }
    return 1;
}

static inline int64_t fd_partial_floats(const fd_group *group) { return group->head_dim + 8; }

static int fd_plan_group(fd_ctx *ctx, const fd_group *group, const fd_table *table, fd_plan *plan) {
    plan->num_units = plan->num_partials = plan->num_tokens = 0;
    plan->split_writes = 0;
    for (int32_t node = 0; node < ctx->num_nodes; node++) {
        for (int32_t i = 0; i < table->num_entries; i++) {
            const fd_entry *entry = &table->entries[i];
            if (entry->seq->node != node || !entry->q_len || entry->flags & FD_UPLOAD) continue;
            if (!fd_plan_entry(group, plan, i, entry)) return 0;
        }
        plan->node_units[node + 1] = plan->num_units;
    }
    int64_t pending = plan->num_units * group->num_kv_heads;
    if (!fd_reserve(&plan->pending, &plan->cap_pending, pending, sizeof *plan->pending)) return 0;
    for (int64_t u = 0; u < plan->num_units; u++)
        for (int32_t h = 0; h < group->num_kv_heads; h++)
            atomic_init(&plan->pending[u * group->num_kv_heads + h], plan->units[u].count);
    return fd_reserve(&ctx->partials, &ctx->cap_partials, plan->num_partials * fd_partial_floats(group), sizeof(float));
}

static int fd_stage(fd_ctx *ctx, fd_table *table, int32_t n, const fd_line *lines, const int32_t *slots) {
    if (!fd_reserve(&table->entries, &table->cap_entries, n, sizeof *table->entries)) return FD_E_INTERNAL;
    table->num_entries = n;
    table->num_rows = 0;
    for (int32_t i = 0; i < n; i++) {
        fd_seq *seq = ctx->seqs[slots[i]];
        table->entries[i] = (fd_entry){seq, seq->generation, (int64_t)lines[i].kv_len_before,
                                       (int32_t)lines[i].q_len, table->num_rows, lines[i].flags};
        if (!(lines[i].flags & FD_UPLOAD)) table->num_rows += (int32_t)lines[i].q_len;
    }
    for (int32_t g = 0; g < ctx->num_groups; g++)
        if (!fd_plan_group(ctx, &ctx->groups[g], table, &table->plans[g])) return FD_E_INTERNAL;
    return FD_OK;
}

/* Arms a table (or, with table -1, only makes room). On FD_E_CACHE_FULL missing[] says how many blocks
 * each group lacks, as fd_rehearse does; on other codes *bad is the offending line, or -1. Nothing has changed then. */
static int fd_begin(fd_ctx *ctx, int32_t index, uint32_t step, int32_t n, const fd_line *lines,
                    const int32_t *slots, int32_t spill, int64_t *missing, int32_t *bad) {
    int code = FD_E_TABLE;
    *bad = -1;
    pthread_mutex_lock(&ctx->lock);
    if (ctx->closed || index < -1 || index >= FD_TABLES) goto out;
    code = fd_check_lines(ctx, n, lines, slots, bad);
    if (code) goto out;
    code = fd_rehearse(ctx, n, lines, slots, spill, missing);
    if (code) goto out;
    if (index >= 0) code = fd_stage(ctx, &ctx->staging, n, lines, slots);
    if (code) goto out;
    fd_commit_blocks(ctx, n, lines, slots);
    if (index >= 0) {
        fd_table armed = ctx->staging;
        ctx->staging = ctx->tables[index];
        ctx->tables[index] = armed;
        ctx->tables[index].armed = 1;
        ctx->tables[index].step = step;
        ctx->tables[index].armed_at = ctx->clock;
    }
out:
    pthread_mutex_unlock(&ctx->lock);
    return code;
}

/* Whether one armed entry may still be read and written. */
static int fd_check_entry(const fd_table *table, const fd_entry *entry) {
    const fd_seq *seq = entry->seq;
    if (!seq->alive || seq->generation != entry->generation) return FD_E_SEQUENCE;
    if (seq->shared_at > table->armed_at) return FD_E_TABLE;
    return seq->length < entry->kv_len + entry->q_len ? FD_E_RANGE : FD_OK;
}
