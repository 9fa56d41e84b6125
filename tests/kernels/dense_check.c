/* The dense kernels without Python: every instruction set of this build that this CPU can run, against double
 * precision. Prints a line for each set; exits with 1 when one is wrong.
 *
 *   gcc -O3 -ffp-contract=off -pthread -w -Icython tests/kernels/dense_check.c -o dense_check -lm */
#define _GNU_SOURCE
#include <stdio.h>

#include "dense.h"
#include "team_pool.h"

#define UNIT 0x1p-24 /* unit roundoff of fp32 */

static int check_wrong;
static double check_worst; /* largest error as a share of what is allowed */

static float check_noise(void)
{
    static uint64_t seed = 1;
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((int)(seed >> 52) - 2048) / 1024.0f;
}

static float *check_vector(int64_t count)
{
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = check_noise();
    return x;
}

static void check_value(double got, double want, double allowed)
{
    const double share = fabs(got - want) / allowed;
    if (!(share <= 1.0)) check_wrong++;
    if (!(share <= check_worst)) check_worst = share;
}

/* A sum of blocks of DENSE_KC terms errs by about the root of their number. Up to DENSE_SKINNY rows, each row has the
 * bits that it has alone. */
static void check_gemm(int type, int m, int n, int k)
{
    float *x = check_vector((int64_t)m * k), *w = check_vector((int64_t)n * k), *stored = malloc(4 * (size_t)(n * k));
    float *out = malloc(4 * (size_t)(m * n)), *alone = malloc(4 * (size_t)n);
    const int64_t panel = dense_block_at(type, k);
    char *packed = calloc(1, (size_t)((n + 15) / 16 * panel));
    uint16_t *halves = malloc(2 * (size_t)(n * k));
    for (int64_t i = 0; i < (int64_t)n * k; i++) memcpy(halves + i, (const char *)(w + i) + 2, 2);
    dense_pack(type == DENSE_BF16 ? (const void *)halves : w, type == DENSE_BF16 ? DENSE_BF16 : DENSE_FP32, n, k, 0, type,
               packed);
    for (int j = 0; j < n; j++) dense_unpack(packed + j / 16 * panel, type, k, j % 16, stored + (int64_t)j * k);
    dense_gemm(x, k, m, packed, type, n, k, NULL, out, n, 0, 1 + m % 2);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0.0, size = 0.0;
            for (int q = 0; q < k; q++) {
                const double product = (double)x[i * k + q] * stored[j * k + q];
                sum += product;
                size += fabs(product);
            }
            check_value(out[i * n + j], sum, size * UNIT * (sqrt(k < DENSE_KC ? k : DENSE_KC) + 6) + 1e-30);
        }
        if (m > DENSE_SKINNY) continue;
        dense_gemm(x + i * k, k, 1, packed, type, n, k, NULL, alone, n, 0, 1);
        check_wrong += memcmp(alone, out + i * n, 4 * (size_t)n) != 0;
    }
    void *all[] = {x, w, stored, out, alone, packed, halves};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* One query of a chunk: `first` is the first key that it sees. */
static void check_query(const dense_attend_job *job, int64_t row, int64_t head)
{
    const int64_t d = job->head_dim, last = job->length - job->num_rows + row;
    const int64_t first = job->window && last >= job->window ? last - job->window + 1 : 0;
    const int64_t kv = head / (job->num_q_heads / job->num_kv_heads) * d;
    const float *q = job->q + row * job->q_stride + head * d;
    double *scores = malloc((size_t)job->length * sizeof *scores), top = job->sinks[head], total, size = 0.0;
    for (int64_t j = first; j <= last; j++) {
        double sum = 0.0, magnitude = 0.0;
        for (int64_t i = 0; i < d; i++) {
            sum += (double)q[i] * job->k[j * job->kv_stride + kv + i];
            magnitude += fabs((double)q[i] * job->k[j * job->kv_stride + kv + i]);
        }
        sum *= job->scale;
        size = fmax(size, magnitude * job->scale);
        if (job->softcap > 0.0f) sum = job->softcap * tanh(sum / job->softcap);
        scores[j] = sum + (double)job->slopes[head] * (double)(j - last);
        top = fmax(top, scores[j]);
    }
    total = exp(job->sinks[head] - top);
    for (int64_t j = first; j <= last; j++) total += scores[j] = exp(scores[j] - top);
    const double error = 2 * UNIT * ((sqrt(d) + 4) * size + 8 * job->softcap + 40) + UNIT * (sqrt(job->length) + 8);
    for (int64_t i = 0; i < d; i++) {
        double sum = 0.0;
        for (int64_t j = first; j <= last; j++) sum += scores[j] * job->v[j * job->kv_stride + kv + i];
        check_value(job->out[row * job->out_stride + head * d + i], sum / total, 2.0 * error); /* |v| <= 2 */
    }
    free(scores);
}

static void check_attend(int64_t rows, int64_t d, int64_t window, float softcap)
{
    enum { HEADS = 6, KV_HEADS = 2 };
    const int64_t length = rows + 77;
    float sinks[HEADS], slopes[HEADS];
    for (int h = 0; h < HEADS; h++) {
        sinks[h] = check_noise();
        slopes[h] = 0.125f * (float)h;
    }
    float *q = check_vector(rows * HEADS * d), *k = check_vector(length * KV_HEADS * d);
    float *v = check_vector(length * KV_HEADS * d), *out = check_vector(rows * HEADS * d);
    dense_attend_job job = {.q = q, .k = k, .v = v, .out = out, .q_stride = HEADS * d, .kv_stride = KV_HEADS * d,
                            .out_stride = HEADS * d, .num_rows = rows, .length = length, .num_q_heads = HEADS,
                            .num_kv_heads = KV_HEADS, .head_dim = d, .window = window, .scale = 1.0f / sqrtf((float)d),
                            .softcap = softcap, .sinks = sinks, .slopes = slopes};
    check_wrong += dense_attend(&job, 2) != 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < HEADS; head++) check_query(&job, row, head);
    free(q);
    free(k);
    free(v);
    free(out);
}

static void check_norm(int64_t n)
{
    float *x = check_vector(n), *y = check_vector(n), *weight = check_vector(n), *out = check_vector(n);
    double squares = 0.0;
    dense_norm_job job = {.x = x, .y = y, .weight = weight, .out = out, .n = n, .x_stride = n, .out_stride = n,
                          .eps = 1e-5f};
    dense_rows(DENSE_OP_NORM, &job, 1, n, 1); /* leaves x + y in x */
    for (int64_t i = 0; i < n; i++) squares += (double)x[i] * x[i];
    for (int64_t i = 0; i < n; i++) {
        const double want = x[i] / sqrt(squares / (double)n + 1e-5) * weight[i];
        check_value(out[i], want, UNIT * (sqrt((double)n) + 8) * fabs(want) + 1e-30);
    }
    free(x);
    free(y);
    free(weight);
    free(out);
}

static void check_all(void)
{
    static const int rows[] = {1, 2, 3, 4, 5, 6, 7, 11, 16, 17, 40, 150}, columns[] = {1, 16, 40, 130};
    static const int depths[] = {1, 3, 64, 257, 600};
    for (int type = DENSE_FP32; type <= DENSE_INT8; type++)
        for (size_t m = 0; m < sizeof rows / sizeof *rows; m++)
            for (size_t n = 0; n < sizeof columns / sizeof *columns; n++)
                for (size_t k = 0; k < sizeof depths / sizeof *depths; k++)
                    check_gemm(type, rows[m], columns[n], depths[k]);
    for (int64_t chunk = 1; chunk < 140; chunk += 46) {
        check_attend(chunk, 8, 0, 0.0f);
        check_attend(chunk, 72, 50, 0.0f);
        check_attend(chunk, 136, 0, 5.0f);
    }
    for (int64_t n = 1; n < 70; n += 7) check_norm(n);
}

int main(void)
{
    int failed = 0;
    team_bind((uintptr_t)team_pool_run);
    for (int isa = 0; isa < DENSE_NUM_ISAS; isa++) {
        if (!dense_isa_supported(isa)) {
            printf("%-9s not run: this CPU lacks it\n", dense_isas[isa]);
            continue;
        }
        dense_isa = isa;
        check_wrong = 0;
        check_worst = 0.0;
        check_all();
        printf("%-9s %d wrong; largest error %.2f of what is allowed\n", dense_isas[isa], check_wrong, check_worst);
        failed |= check_wrong > 0;
    }
    return failed;
}
