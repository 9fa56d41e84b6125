/* The attention kernel without Python: every instruction set of this build that this CPU can run, against double
 * precision. Prints a line for each set; exits with 1 when one is wrong.
 *
 *   gcc -O3 -ffp-contract=off -pthread -Icython tests/kernels/kernel_check.c -o kernel_check -lm
 *   ./kernel_check [--every N] [--threads N] [--isa NAME]
 *
 * --every N takes each Nth case, for emulators and sanitizers. --threads N runs each case on N threads too: the bits
 * must be those of one. --isa NAME: only that set, and an error if it cannot run. */
#define _GNU_SOURCE
#include <stdio.h>

#include "attention.h"
#include "oracle.h"
#include "team_pool.h"

enum { CHECK_SHOWN = 5 }; /* mistakes printed of one set */

typedef struct {
    int64_t every, threads, index, ran;
    const char *only;
    struct {
        int64_t wrong;
        double worst;
        check_case at;
    } isas[FD_NUM_ISAS];
} check_run;

static uint64_t check_seed = 1;

/* About normal, and exact in every wire dtype: a sum of three numbers of 4 bits. */
static float check_noise(void) {
    check_seed = check_seed * 6364136223846793005u + 1442695040888963407u;
    const uint32_t r = (uint32_t)(check_seed >> 33);
    return (float)((int)(r & 15) + (int)((r >> 4) & 15) + (int)((r >> 8) & 15) - 22) * 0.125f;
}

/* Numbers of 24 bits, when the wire has them. */
static void check_fill(float *x, int64_t count, int wire) {
    for (int64_t i = 0; i < count; i++) x[i] = check_noise() * (wire == FD_FP32 ? 1.0f + 0.01f * check_noise() : 1.0f);
}

static void check_describe(const char *isa, const check_case *c) {
    static const char *const names[] = {"fp32", "fp16", "bf16", "int8", "int4"};
    printf("%s: %s over %s, heads %d/%d, dim %d, length %lld, rows %d, window %lld, softcap %g%s", isa,
           names[c->kv_dtype], names[c->wire_dtype], c->heads, c->kv_heads, c->dim, (long long)c->length, c->rows,
           (long long)c->window, c->softcap, c->extras ? ", sinks and slopes" : "");
}

static void check_must(int ok, const char *what) {
    if (ok) return;
    printf("failed: %s\n", what);
    exit(1);
}

static size_t check_wire_bytes(int wire) { return wire == FD_FP32 ? 4 : 2; }

static void check_send(int wire, const float *x, int64_t count, char *to) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t bits = wire == FD_FP16 ? check_fp16(x[i]) : check_bf16(x[i]);
        if (wire == FD_FP32) memcpy(to + 4 * i, x + i, 4);
        else memcpy(to + 2 * i, &bits, 2);
    }
}

static float check_receive(int wire, const char *from, int64_t i) {
    float x;
    uint16_t bits;
    memcpy(&x, from + (wire == FD_FP32 ? 4 * i : 0), 4);
    memcpy(&bits, from + 2 * i, 2);
    return wire == FD_FP32 ? x : wire == FD_FP16 ? check_from_fp16(bits) : check_from_bf16(bits);
}

/* A context of one group and layer with room for the case; its memory begins as not-a-number, and ends where it ends:
 * what is read and was not written shows. */
static fd_ctx *check_open(const check_case *c, const char *isa, int threads, void **memory) {
    fd_ctx *ctx = fd_open(1, 1, threads, isa);
    check_must(ctx != NULL, "fd_open");
    ctx->kv_dtype = c->kv_dtype;
    ctx->wire_dtype = c->wire_dtype;
    ctx->max_rows = 4096;
    ctx->max_model_len = 1 << 20;
    ctx->scale = 1.0f / sqrtf((float)c->dim);
    ctx->softcap = c->softcap;
    const int64_t ring = c->window ? (c->window + 64 + FD_BLOCK - 1) / FD_BLOCK + 1 : 0;
    fd_set_group(ctx, 0, 1, c->heads, c->kv_heads, c->dim, c->window, ring);
    check_must(!c->extras || fd_set_scores(ctx, 0, c->sinks, c->slopes), "fd_set_scores");
    check_must(fd_alloc_scratch(ctx), "fd_alloc_scratch");
    const int64_t blocks = fd_blocks_for(&ctx->groups[0], c->length);
    const size_t nbytes = (size_t)blocks * ctx->groups[0].block_bytes;
    check_must(!posix_memalign(memory, 64, nbytes), "posix_memalign");
    memset(*memory, 0xff, nbytes);
    check_must(!fd_add_slab(ctx, 0, 0, blocks, *memory), "fd_add_slab");
    return ctx;
}

static void check_begin(fd_ctx *ctx, int table, int32_t slot, int64_t before, int64_t rows, uint32_t flags) {
    int64_t missing[FD_NODES + 1];
    int32_t bad;
    const fd_line line = {1, (uint64_t)before, (uint32_t)rows, flags};
    check_must(!fd_begin(ctx, table, 1, 1, &line, &slot, 0, missing, &bad), "fd_begin");
}

/* Uploads all but the last rows, attends for those; the outputs as they come over the wire. */
static char *check_attend(const check_case *c, const char *isa, int threads) {
    void *memory;
    fd_ctx *ctx = check_open(c, isa, threads, &memory);
    const size_t wire = check_wire_bytes(c->wire_dtype), dim = (size_t)c->dim;
    const int64_t before = c->length - c->rows, side = (int64_t)c->kv_heads * c->dim;
    char *k = malloc((size_t)(c->length * side) * wire), *v = malloc((size_t)(c->length * side) * wire);
    char *qkv = malloc((size_t)c->rows * ((size_t)c->heads + 2 * (size_t)c->kv_heads) * dim * wire), *to = qkv;
    char *out = malloc((size_t)c->rows * (size_t)c->heads * dim * wire);
    uint8_t *status = malloc((size_t)c->rows);
    const int32_t slot = fd_seq_new(ctx, 0);
    check_send(c->wire_dtype, c->k, c->length * side, k);
    check_send(c->wire_dtype, c->v, c->length * side, v);
    if (before) {
        check_begin(ctx, 2, slot, 0, before, FD_UPLOAD);
        check_must(!fd_store(ctx, 2, 0, 0, 0, before, k, v), "fd_store");
    }
    for (int row = 0; row < c->rows; row++) {
        const int64_t width = (int64_t)c->heads * c->dim;
        check_send(c->wire_dtype, c->q + row * width, width, to);
        to += (size_t)width * wire;
        memcpy(to, k + (size_t)((before + row) * side) * wire, (size_t)side * wire);
        to += (size_t)side * wire;
        memcpy(to, v + (size_t)((before + row) * side) * wire, (size_t)side * wire);
        to += (size_t)side * wire;
    }
    check_begin(ctx, 0, slot, before, c->rows, 0);
    check_must(!fd_attend(ctx, 0, 0, c->rows, qkv, out, status), "fd_attend");
    for (int row = 0; row < c->rows; row++) check_must(!status[row], "all values are finite");
    fd_destroy(ctx);
    free(memory);
    free(k);
    free(v);
    free(qkv);
    free(status);
    return out;
}

/* Largest error of the outputs, as a share of what is allowed; infinite if one is not a number. */
static double check_compare(const check_case *c, const char *out) {
    double worst = 0.0;
    for (int64_t vector = 0; vector < (int64_t)c->rows * c->heads; vector++)
        for (int64_t i = vector * c->dim; i < (vector + 1) * c->dim; i++) {
            double error = fabs((double)check_receive(c->wire_dtype, out, i) - c->out[i]) / c->allowed[vector];
            worst = error <= worst ? worst : error == error ? error : INFINITY;
        }
    return worst;
}

static void check_isas(check_run *run, const check_case *c) {
    const size_t nbytes = (size_t)c->rows * (size_t)c->heads * (size_t)c->dim * check_wire_bytes(c->wire_dtype);
    for (int i = 0; i < FD_NUM_ISAS; i++) {
        const char *isa = fd_isas[i]->name;
        if (!fd_find_isa(isa) || (run->only && strcmp(run->only, isa))) continue;
        char *out = check_attend(c, isa, 1);
        const double share = check_compare(c, out);
        int same = 1;
        if (run->threads > 1) {
            char *again = check_attend(c, isa, (int)run->threads);
            same = !memcmp(out, again, nbytes);
            free(again);
        }
        if (share > run->isas[i].worst && c->wire_dtype == FD_FP32) { /* others: their rounding is all there is */
            run->isas[i].worst = share;
            run->isas[i].at = *c;
        }
        if ((share > 1.0 || !same) && run->isas[i].wrong++ < CHECK_SHOWN) {
            check_describe(isa, c);
            printf(": %.3g times the allowed error%s\n", share, same ? "" : "; other bits on more threads");
        }
        free(out);
    }
}

/* Runs a case, if it is one of those asked for. */
static void check(check_run *run, check_case c) {
    if (run->index++ % run->every) return;
    const int64_t kv = c.length * c.kv_heads * c.dim, vectors = (int64_t)c.rows * c.heads;
    run->ran++;
    c.k = malloc((size_t)kv * sizeof *c.k);
    c.v = malloc((size_t)kv * sizeof *c.v);
    c.q = malloc((size_t)(vectors * c.dim) * sizeof *c.q);
    c.sinks = malloc((size_t)c.heads * sizeof *c.sinks);
    c.slopes = malloc((size_t)c.heads * sizeof *c.slopes);
    c.stored_k = malloc((size_t)kv * sizeof *c.stored_k);
    c.stored_v = malloc((size_t)kv * sizeof *c.stored_v);
    c.out = malloc((size_t)(vectors * c.dim) * sizeof *c.out);
    c.allowed = malloc((size_t)vectors * sizeof *c.allowed);
    check_fill(c.k, kv, c.wire_dtype);
    check_fill(c.v, kv, c.wire_dtype);
    check_fill(c.q, vectors * c.dim, c.wire_dtype);
    for (int h = 0; h < c.heads; h++) {
        c.sinks[h] = 3.0f * check_noise();
        c.slopes[h] = ldexpf(1.0f, -1 - h % 8);
    }
    check_solve(&c);
    check_isas(run, &c);
    void *all[] = {c.k, c.v, c.q, c.sinks, c.slopes, c.stored_k, c.stored_v, c.out, c.allowed};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

#include "cases.h"

static int check_report(const check_run *run) {
    int failed = run->only != NULL;
    for (int i = 0; i < FD_NUM_ISAS; i++) {
        const char *isa = fd_isas[i]->name;
        if (run->only && strcmp(run->only, isa)) continue;
        if (!fd_find_isa(isa)) {
            printf("%-9s not run: this CPU lacks it\n", isa);
            continue;
        }
        if (run->only) failed = 0;
        failed |= run->isas[i].wrong > 0;
        printf("%-9s %lld cases, %lld wrong; largest error %.2f of what is allowed in fp32: ", isa, (long long)run->ran,
               (long long)run->isas[i].wrong, run->isas[i].worst);
        check_describe(isa, &run->isas[i].at);
        printf("\n");
    }
    if (run->only && failed) printf("%s has not passed\n", run->only);
    return failed;
}

int main(int argc, char **argv) {
    static check_run run = {.every = 1, .threads = 1};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--every")) run.every = atoll(value);
        else if (!strcmp(argv[i], "--threads")) run.threads = atoll(value);
        else if (!strcmp(argv[i], "--isa")) run.only = value;
        else run.every = 0;
    }
    if (run.every < 1 || run.threads < 1) {
        fprintf(stderr, "usage: kernel_check [--every N] [--threads N] [--isa NAME]\n");
        return 2;
    }
    team_bind((uintptr_t)team_pool_run);
    check_shapes(&run);
    check_segments(&run);
    check_windows(&run);
    check_rows(&run);
    return check_report(&run);
}
