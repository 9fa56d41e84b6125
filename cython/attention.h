/* The attention worker's state: KV pools, sequences, step tables. One fd_ctx per session.
 *
 * Python decides (handles, budget, errors), this side owns the memory and runs the steps without the GIL.
 * Every public function takes the context's lock, so that close() waits for a running attend().
 *
 * A block holds FD_BLOCK tokens of all layers of one KV group: [layer][K|V][kv head][token][head_dim], but K of each
 * eight tokens lies interleaved: attention_layout.h.
 * A sequence has one block list per group; the list of a window group is a ring: block b lies at b % ring.
 */
#ifndef FASTDECODE_ATTENTION_H
#define FASTDECODE_ATTENTION_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"

/* Powers of two, chosen by measurement: bench/block_sizes.py builds others. */
#ifndef FD_BLOCK
#define FD_BLOCK 64 /* tokens of a block */
#endif
#ifndef FD_SEG
#define FD_SEG 1024 /* tokens of a segment: the unit of work, and of rounding (see attention_kernel.h) */
#endif

#ifndef FD_RUN_BYTES
#define FD_RUN_BYTES (128 << 10) /* of a block's heads side by side that one thread reads in turn */
#endif
#ifndef FD_THREAD_ITEMS
#define FD_THREAD_ITEMS 8 /* of work that each thread should find before heads are taken together */
#endif
#ifndef FD_BUNDLE_VECTORS
#define FD_BUNDLE_VECTORS 32 /* query vectors whose scores stay in L2 beside what is read */
#endif

enum {
    FD_SCORES = FD_SEG + 16, /* floats between the scores of two vectors: off the 4 KiB that share a cache set */
    FD_TABLES = 8,
    FD_NODES = 32,    /* NUMA nodes that one session's memory and threads may lie on */
    FD_VECTORS = 128, /* query vectors (rows x heads of one KV head) that one work item holds at most */
    FD_MAX_DIM = 1024,
    FD_UPLOAD = 1,    /* entry flag: the rows come by store() */
};
enum { FD_FP32 = 0, FD_FP16 = 1, FD_BF16 = 2, FD_INT8 = 3, FD_INT4 = 4 }; /* the last two hold K/V only */
enum { FD_STEP_BYTES = 9 << 10, FD_STEP_ROWS = 16 }; /* of V handled at a time, and the least rows; see step_rows */
enum { FD_KEY_STEP_ROWS = 32 }; /* the least of K: what most query vectors take at once */
enum { FD_CHUNK = 8 }; /* dimensions of K between two looks at what is being prefetched; divides all of them */
enum { FD_INT8_SCALE_BYTES = 4, FD_INT4_GROUP_BYTES = 20 }; /* see attention_quant.h */
/* Largest integers of quantised queries, of up to FD_NARROW_DIM dimensions and of more, and of weights: see
 * attention_integer.h. */
enum { FD_NARROW_DIM = 512, FD_NARROW_LIMIT = 32767, FD_WIDE_LIMIT = 16383, FD_WEIGHT_LIMIT = 32768 };
#define FD_WEIGHT_TINY 1e-34f /* as FD_WEIGHT_LIMIT over them */
#define FD_QUANT_TINY 1e-35f /* values of this size are zero: their scale has no finite inverse */

typedef struct fd_slab fd_slab;

typedef struct fd_block {
    char *data;
    fd_slab *slab;
    struct fd_block *next; /* in the slab's free list */
    int32_t refs;
} fd_block;

struct fd_slab {
    char *base; /* the caller's memory, returned to it by fd_trim and fd_close */
    int32_t node;
    int64_t num_blocks, num_used;
    fd_slab *next; /* in the chain of those being returned */
    fd_block *free;
    fd_block blocks[];
};

/* A group's slabs on one NUMA node. */
typedef struct {
    fd_slab **slabs;
    int64_t num_slabs, cap_slabs, hint; /* no slab below `hint` has a free block */
    int64_t num_free;
} fd_pool;

typedef struct {
    int32_t num_layers, num_q_heads, num_kv_heads, head_dim, heads_per_kv;
    int64_t window;     /* 0: all tokens */
    int64_t ring;       /* blocks of the ring, 0: none */
    float *sinks;       /* [num_layers][num_q_heads] logits without a key or value, NULL: none */
    float *slopes;      /* [num_q_heads] of ALiBi, NULL: none */
    size_t row_bytes, head_bytes, side_bytes, layer_bytes, block_bytes;
    fd_pool pools[FD_NODES];
    int64_t num_free, num_used; /* of all pools */
} fd_group;

typedef struct {
    fd_block **blocks;
    int64_t num, cap;
    int64_t floor;      /* ring: positions below it are lost, whatever the ring could still hold */
} fd_list;

typedef struct {
    uint64_t generation; /* grows when the sequence is freed: stale table entries notice */
    uint64_t stamp;      /* clock of the step that named it last: finds duplicates */
    uint64_t shared_at;  /* clock of the last fork: older tables may no longer write */
    int64_t length;      /* tokens that have room: kv_len_before + q_len of the last step */
    int64_t *written;    /* [num_layers] tokens that hold data */
    int32_t alive;
    int32_t node;        /* where its blocks are taken while there are any, and its work is done */
    int32_t tainted;     /* an uploaded value was not finite: every row that attends to it is flagged */
    fd_list lists[];     /* [num_groups] */
} fd_seq;

/* One line of a step table as it comes over the wire (config.ENTRY_DTYPE). */
typedef struct {
    uint64_t handle, kv_len_before;
    uint32_t q_len, flags;
} fd_line;

typedef struct {
    fd_seq *seq;
    uint64_t generation;
    int64_t kv_len;
    int32_t q_len, row;  /* row: first row of the entry in an attend payload */
    uint32_t flags;
} fd_entry;

/* Work of one KV head: query vectors [vec_begin, vec_end) of an entry over one segment, or over all (-1). */
typedef struct {
    int32_t entry, segment, vec_begin, vec_end;
    int32_t first, count;  /* units [first, first + count) are the segments to be merged */
    int64_t partial;       /* index of the unit's first partial vector */
} fd_unit;

typedef struct {
    fd_unit *units;
    int64_t num_units, cap_units;
    int64_t node_units[FD_NODES + 1]; /* units [node_units[n], node_units[n + 1]) are of sequences on node n */
    _Atomic int32_t *pending; /* [unit, kv head] segments still running, kept at unit `first` */
    int64_t cap_pending;
    int64_t num_partials;     /* vectors */
    int64_t num_tokens;       /* query-token pairs of one KV head, for the choice of threads */
    int32_t split_writes;     /* some entry has several units per segment: write K/V before all of them */
} fd_plan;

typedef struct {
    int32_t armed, num_entries, num_rows;
    uint32_t step;
    uint64_t armed_at;
    fd_entry *entries;
    int64_t cap_entries;
    fd_plan *plans;       /* [num_groups] */
} fd_table;

typedef struct {
    int32_t group, index; /* index of the layer inside its group */
} fd_layer;

/* Work items of one node that nobody has taken yet; a cache line each, as each node's threads take their own first. */
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t stop;
} fd_range;

struct fd_ctx;
typedef struct {
    const char *name;
    void (*body)(void *job, int tid);
    /* one K and V row of wire values into the cache; 1 when one is not finite */
    int (*write)(struct fd_ctx *ctx, const fd_group *group, int layer_index, int kv_head, fd_seq *seq,
                 int group_index, int64_t position, const void *k, const void *v);
    void (*read)(void *probe, int tid);
    void (*fma)(void *probe, int tid);
    void (*both)(void *probe, int tid);
    int lanes;
} fd_isa;

typedef struct fd_ctx {
    fd_range ranges[FD_NODES];
    pthread_mutex_t lock;
    int32_t closed, num_groups, num_layers, num_threads, kv_dtype, wire_dtype;
    int32_t num_nodes, num_cpus; /* num_cpus: length of cpu_nodes */
    uint8_t *cpu_nodes;          /* node of each CPU; NULL when there is one node */
    int64_t max_rows, max_model_len;
    float scale, softcap; /* softcap 0: none */
    const fd_isa *isa;
    fd_group *groups;
    fd_layer *layers;
    fd_seq **seqs;
    int32_t *free_slots;
    int64_t num_seqs, cap_seqs, num_free_slots;
    uint64_t clock;
    fd_table tables[FD_TABLES], staging;
    fd_block **journal;
    int64_t cap_journal;
    float *partials;
    int64_t cap_partials;
    float *scratch;       /* [num_threads][scratch_floats] */
    int64_t scratch_floats;
    uint64_t kernel_ns, attends;
} fd_ctx;

static const size_t fd_dtype_bytes[] = {4, 2, 2}; /* of what comes over the wire */

/* Bytes of one K or V row of a head, as config.kv_row_bytes says. */
static size_t fd_row_bytes(int dtype, size_t dim) {
    if (dtype == FD_INT8) return FD_INT8_SCALE_BYTES + dim;
    if (dtype == FD_INT4) return (dim + 31) / 32 * 4 + (dim + 15) / 16 * 8;
    return dim * fd_dtype_bytes[dtype];
}

/* Makes room for `need` items of `item` bytes, at least doubling; 0 when there is no memory. */
static int fd_reserve(void *array, int64_t *cap, int64_t need, size_t item) {
    if (need <= *cap) return 1;
    int64_t grown = need > 2 * *cap ? need : 2 * *cap;
    void *moved = realloc(*(void **)array, (size_t)grown * item);
    if (!moved) return 0;
    *(void **)array = moved;
    *cap = grown;
    return 1;
}

static inline int64_t fd_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fd_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* The node that the calling thread runs on. Helpers of the team are bound to one, a caller need not be. */
static inline int32_t fd_home(const fd_ctx *ctx) {
    if (ctx->num_nodes == 1) return 0;
    int cpu = sched_getcpu();
    return cpu >= 0 && cpu < ctx->num_cpus ? ctx->cpu_nodes[cpu] : 0;
}

/* Blocks that a group holds for `length` tokens. */
static inline int64_t fd_blocks_for(const fd_group *group, int64_t length) {
    int64_t blocks = (length + FD_BLOCK - 1) / FD_BLOCK;
    return group->ring && blocks > group->ring ? group->ring : blocks;
}

/* The block of a token position. */
static inline fd_block *fd_block_at(const fd_group *group, const fd_list *list, int64_t position) {
    int64_t index = position / FD_BLOCK;
    return list->blocks[group->ring ? index % group->ring : index];
}

#include "attention_layout.h"
#include "attention_kv.h"
#include "attention_step.h"
#include "attention_run.h"
#include "attention_open.h"

#endif
