/* The kernel for each instruction set, and the two calls of entry.h. */
#include <math.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "isa.h"
#include "team.h"

typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));

typedef struct {
    fd_ctx *ctx;
    const fd_group *group;
    const fd_table *table;
    fd_plan *plan;
    int group_index, layer_index, write_only;
    size_t wire_bytes, row_bytes, out_bytes; /* of one element, of one [q|k|v] row, of one output row */
    const char *qkv;
    char *out;
    uint8_t *row_status;
    int bundles, bundle_heads; /* a unit's KV heads are so many items, of so many heads */
    int64_t grain; /* items that a thread takes at once from one of ctx->ranges */
} fd_job;

enum { FD_READ_PIECE = 1 << 20, FD_FMA_ROUNDS = 1 << 14, FD_PIECE_CHUNKS = 16, FD_CHUNK_STRIDE = 7919 /* a prime */ };

/* A measurement of the machine, not of the kernel: see roofline.h. */
typedef struct {
    const char *buffer;
    int64_t num_pieces;
    int64_t num_chunks, chunk_bytes, rounds; /* of both at once: rounds of 8 vectors for each 256 bytes */
    _Atomic int64_t next;
    _Atomic int sink;
} fd_probe;

/* Rounds the bits of an fp32 to fp16, to nearest even; infinities and not-a-number stay what they are. */
static inline uint16_t fd_round_fp16(uint32_t bits) {
    uint16_t sign = (bits >> 16) & 0x8000;
    uint32_t a = bits & 0x7fffffff;
    if (a > 0x7f800000) return sign | 0x7e00 | ((a >> 13) & 0x3ff);
    if (a >= 0x47800000) return sign | 0x7c00;
    if (a >= 0x38800000) return sign | (uint16_t)((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13);
    if (a < 0x33000000) return sign; /* below half of the smallest subnormal */
    uint32_t shift = 126 - (a >> 23), mantissa = (a & 0x7fffff) | 0x800000;
    return sign | (uint16_t)((mantissa + (1u << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift);
}

#include "attention_isas.h"

static uint64_t fd_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Reads the buffer once; returns nanoseconds. nbytes is a multiple of FD_READ_PIECE. */
static uint64_t fd_probe_read(const fd_isa *isa, const void *buffer, int64_t nbytes, int threads) {
    fd_probe job = {.buffer = buffer, .num_pieces = nbytes / FD_READ_PIECE};
    uint64_t start = fd_now_ns();
    team_run(threads, isa->read, &job);
    return fd_now_ns() - start;
}

/* Runs num_pieces * FD_FMA_ROUNDS * 12 * lanes multiply-adds; returns nanoseconds. */
static uint64_t fd_probe_fma(const fd_isa *isa, int64_t num_pieces, int threads) {
    fd_probe job = {.num_pieces = num_pieces};
    uint64_t start = fd_now_ns();
    team_run(threads, isa->fma, &job);
    return fd_now_ns() - start;
}

/* Reads num_chunks chunks, a multiple of FD_PIECE_CHUNKS; `rounds` of 8 * lanes multiply-adds for each 256 bytes. */
static uint64_t fd_probe_both(const fd_isa *isa, const void *buffer, int64_t num_chunks, int64_t chunk_bytes,
                              int64_t rounds, int threads) {
    fd_probe job = {.buffer = buffer, .num_pieces = num_chunks / FD_PIECE_CHUNKS, .num_chunks = num_chunks,
                    .chunk_bytes = chunk_bytes, .rounds = rounds};
    uint64_t start = fd_now_ns();
    team_run(threads, isa->both, &job);
    return fd_now_ns() - start;
}

/* Runs all units, or writes the rows of all entries. */
static void fd_run_job(fd_job *job, int write_only) {
    fd_ctx *ctx = job->ctx;
    const fd_group *group = job->group;
    const int64_t heads = group->num_kv_heads, num_units = job->plan->num_units;
    /* a thread is worth waking for about 64 KiB of KV; few items per grab, but not one atomic per tiny item */
    int64_t nbytes = job->plan->num_tokens / group->heads_per_kv * heads * (int64_t)group->row_bytes * 2;
    int64_t threads = fd_min(ctx->num_threads, 1 + (nbytes >> 16));
    /* heads side by side make long reads, as long as all threads find enough to do */
    int64_t bundle = write_only ? 1 : fd_min(heads, fd_max(1, FD_RUN_BYTES / (int64_t)group->head_bytes));
    while (bundle > 1 && num_units * ((heads + bundle - 1) / bundle) < FD_THREAD_ITEMS * threads)
        bundle = (bundle + 1) / 2;
    job->bundles = (int)((heads + bundle - 1) / bundle);
    job->bundle_heads = (int)((heads + job->bundles - 1) / job->bundles);
    const int64_t num_items = (write_only ? job->table->num_entries : num_units) * job->bundles;
    threads = fd_min(threads, num_items);
    job->write_only = write_only;
    job->grain = fd_max(1, fd_min(16, num_items / (threads * 8)));
    for (int32_t n = 0; n < ctx->num_nodes; n++) {
        /* entries, unlike units, do not lie node by node: whoever is first writes them all */
        int64_t first = write_only ? n ? num_items : 0 : job->plan->node_units[n] * job->bundles;
        int64_t stop = write_only ? num_items : job->plan->node_units[n + 1] * job->bundles;
        ctx->ranges[n].stop = stop;
        atomic_store_explicit(&ctx->ranges[n].next, first, memory_order_relaxed);
    }
    team_run((int)threads, ctx->isa->body, job);
}

/* fd_attend_fn: see entry.h. */
static int fd_attend(void *context, int32_t index, int32_t layer, int32_t num_rows, const void *qkv, void *out,
                     uint8_t *row_status) {
    fd_ctx *ctx = context;
    int code = FD_E_TABLE;
    pthread_mutex_lock(&ctx->lock);
    uint64_t start = fd_now_ns();
    if (ctx->closed || index < 0 || index >= FD_TABLES || !ctx->tables[index].armed) goto out;
    fd_table *table = &ctx->tables[index];
    code = FD_E_LAYER;
    if (layer < 0 || layer >= ctx->num_layers) goto out;
    code = FD_E_ROWS;
    if (num_rows != table->num_rows) goto out;
    for (int32_t i = 0; i < table->num_entries; i++) {
        const fd_entry *entry = &table->entries[i];
        if (entry->flags & FD_UPLOAD) continue;
        code = fd_check_entry(table, entry);
        if (!code && entry->seq->written[layer] < entry->kv_len) code = FD_E_RANGE;
        if (code) goto out;
    }
    fd_layer at = ctx->layers[layer];
    const fd_group *group = &ctx->groups[at.group];
    const size_t wire_bytes = fd_dtype_bytes[ctx->wire_dtype], dim = (size_t)group->head_dim;
    fd_job job = {.ctx = ctx, .group = group, .table = table, .plan = &table->plans[at.group],
                  .group_index = at.group, .layer_index = at.index, .wire_bytes = wire_bytes,
                  .row_bytes = (group->num_q_heads + 2 * (size_t)group->num_kv_heads) * dim * wire_bytes,
                  .out_bytes = group->num_q_heads * dim * wire_bytes,
                  .qkv = qkv, .out = out, .row_status = row_status};
    memset(row_status, 0, (size_t)num_rows);
    if (job.plan->split_writes) fd_run_job(&job, 1);
    if (job.plan->num_units) fd_run_job(&job, 0);
    for (int64_t i = 0, row = 0; i < table->num_entries; i++) {
        const fd_entry *entry = &table->entries[i];
        if (entry->flags & FD_UPLOAD) continue;
        if (entry->seq->tainted) memset(row_status + row, 1, (size_t)entry->q_len);
        row += entry->q_len;
        entry->seq->written[layer] = fd_max(entry->seq->written[layer], entry->kv_len + entry->q_len);
    }
    code = FD_OK;
    ctx->attends++;
    ctx->kernel_ns += fd_now_ns() - start;
out:
    pthread_mutex_unlock(&ctx->lock);
    return code;
}

/* fd_store_fn: see entry.h. Rows come in ascending order; only the layers of a window group may leave gaps. */
static int fd_store(void *context, int32_t index, int32_t layer, int32_t entry_index, int64_t offset, int64_t count,
                    const void *k, const void *v) {
    fd_ctx *ctx = context;
    int code = FD_E_TABLE;
    pthread_mutex_lock(&ctx->lock);
    if (ctx->closed || index < 0 || index >= FD_TABLES || !ctx->tables[index].armed) goto out;
    const fd_table *table = &ctx->tables[index];
    code = FD_E_LAYER;
    if (layer < 0 || layer >= ctx->num_layers) goto out;
    code = FD_E_RANGE;
    if (entry_index < 0 || entry_index >= table->num_entries) goto out;
    const fd_entry *entry = &table->entries[entry_index];
    if (offset < 0 || count < 0 || offset > entry->q_len || count > entry->q_len - offset) goto out;
    code = FD_E_TABLE;
    if (!(entry->flags & FD_UPLOAD)) goto out;
    code = fd_check_entry(table, entry);
    if (code) goto out;
    fd_layer at = ctx->layers[layer];
    const fd_group *group = &ctx->groups[at.group];
    fd_seq *seq = entry->seq;
    const int64_t start = entry->kv_len + offset, written = seq->written[layer];
    code = FD_E_RANGE;
    if (start > written && !group->ring) goto out;
    if (start > written && count) seq->lists[at.group].floor = fd_max(seq->lists[at.group].floor, start);
    const size_t head_bytes = (size_t)group->head_dim * fd_dtype_bytes[ctx->wire_dtype];
    for (int64_t i = 0; i < count; i++)
        for (int32_t h = 0; h < group->num_kv_heads; h++) {
            size_t at_row = ((size_t)i * group->num_kv_heads + h) * head_bytes;
            seq->tainted |= ctx->isa->write(ctx, group, at.index, h, seq, at.group, start + i,
                                            (const char *)k + at_row, (const char *)v + at_row);
        }
    if (count) seq->written[layer] = fd_max(written, start + count);
    code = FD_OK;
out:
    pthread_mutex_unlock(&ctx->lock);
    return code;
}
