/* Dense CPU kernels, written once over GCC vector types and compiled once per instruction set.
 *
 * dense.h includes this file with DENSE(name) giving each instruction set its own symbols.
 * Every function here works on whole rows or whole output columns and sums in one fixed order, so a
 * row's bits depend on that row and the instruction set alone: not on the other rows of the batch, nor
 * on the number of threads. That is what makes deterministic decoding possible without padding.
 */

/* exp(x) to about 1 ulp for x <= 88: x = n ln2 + r, a degree-6 polynomial in r, exponent put in by hand. */
static inline __attribute__((always_inline)) v8f DENSE(exp8)(v8f x)
{
    const v8f high = {88.0f, 88.0f, 88.0f, 88.0f, 88.0f, 88.0f, 88.0f, 88.0f};
    const v8f low = {-87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f};
    v8i below = x < high, above = x > low; /* both false for NaN: callers carry NaN through themselves */
    x = (v8f)((below & (v8i)x) | (~below & (v8i)high));
    x = (v8f)((above & (v8i)x) | (~above & (v8i)low));
    v8f shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer in the low bits */
    v8i n = (v8i)shifted - 0x4b400000;
    v8f fn = shifted - 12582912.0f;
    v8f r = x - fn * 0.693145752f;
    r = r - fn * 1.42860677e-6f;
    v8f p = 1.3981999508e-3f + r * 1.9875691500e-4f;
    p = 8.3334519073e-3f + r * p;
    p = 4.1665795894e-2f + r * p;
    p = 1.6666665459e-1f + r * p;
    p = 5.0000001201e-1f + r * p;
    p = 1.0f + r + r * r * p;
    return (v8f)((v8i)p + (n << 23));
}

static inline __attribute__((always_inline)) v8f DENSE(activate8)(int kind, v8f g)
{
    if (kind == DENSE_SILU) return g / (1.0f + DENSE(exp8)(-g));
    if (kind == DENSE_GELU_TANH) { /* 0.5 g (1 + tanh(u)) = g / (1 + exp(-2u)) */
        v8f u = 0.7978845608f * (g + 0.044715f * g * g * g);
        return g / (1.0f + DENSE(exp8)(-2.0f * u));
    }
    return (v8f)((v8i)g & ~(v8i)(g <= 0.0f)); /* ReLU; a NaN stays */
}

/* out[i] = act(gate[i]) * up[i]; up NULL: act(gate[i]). Tails go through a padded vector: same bits. */
static void DENSE(activate_row)(int kind, const float *gate, const float *up, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8) {
        int64_t width = n - i < 8 ? n - i : 8;
        v8f g = {0}, u = {0};
        if (width == 8) {
            g = *(const v8fu *)(gate + i);
            if (up) u = *(const v8fu *)(up + i);
        } else {
            memcpy(&g, gate + i, 4 * width);
            if (up) memcpy(&u, up + i, 4 * width);
        }
        v8f value = DENSE(activate8)(kind, g);
        if (up) value *= u;
        if (width == 8) *(v8fu *)(out + i) = value;
        else memcpy(out + i, &value, 4 * width);
    }
}

/* Sum over a row in a fixed order: eight lanes, then the lanes pairwise, then the tail. */
static inline float DENSE(lanes)(v8f sum)
{
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

static float DENSE(sum_squares)(const float *x, int64_t n, float mean)
{
    v8f sum0 = {0}, sum1 = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v8f a = *(const v8fu *)(x + i) - mean, b = *(const v8fu *)(x + i + 8) - mean;
        sum0 = DENSE_MADD(a, a, sum0);
        sum1 = DENSE_MADD(b, b, sum1);
    }
    float total = DENSE(lanes)(sum0 + sum1);
    for (; i < n; i++) total += (x[i] - mean) * (x[i] - mean);
    return total;
}

/* out = x / rms(x) * (offset + weight) */
static void DENSE(rms_row)(const float *x, const float *weight, float offset, float eps, float *out, int64_t n)
{
    float scale = 1.0f / sqrtf(DENSE(sum_squares)(x, n, 0.0f) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * (offset + weight[i]);
}

static void DENSE(layer_norm_row)(const float *x, const float *weight, const float *bias, float eps, float *out, int64_t n)
{
    v8f sum = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) sum += *(const v8fu *)(x + i);
    float total = DENSE(lanes)(sum);
    for (; i < n; i++) total += x[i];
    float mean = total / (float)n;
    float scale = 1.0f / sqrtf(DENSE(sum_squares)(x, n, mean) / (float)n + eps);
    for (i = 0; i < n; i++) {
        float value = (x[i] - mean) * scale;
        out[i] = value * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
    }
}

/* x += y, then out = norm(x), one pass while the row is in cache; y or weight may be NULL. */
static void DENSE(norm_rows)(const dense_norm_job *job, int64_t m0, int64_t m1)
{
    for (int64_t m = m0; m < m1; m++) {
        float *x = job->x + m * job->x_stride, *out = job->out + m * job->out_stride;
        if (job->y) {
            const float *y = job->y + m * job->n;
            for (int64_t i = 0; i < job->n; i++) x[i] += y[i];
        }
        if (job->layer_norm) DENSE(layer_norm_row)(x, job->weight, job->bias, job->eps, out, job->n);
        else DENSE(rms_row)(x, job->weight, job->offset, job->eps, out, job->n);
    }
}

/* One head: optional RMS norm, then rotary over the first 2*half elements (half-split pairs). */
static void DENSE(head)(const dense_rows_job *job, const float *x, const float *weight, const float *cosine,
                        const float *sine, float *out)
{
    int64_t d = job->head_dim, half = job->half;
    float normed[1024];
    if (weight) {
        DENSE(rms_row)(x, weight, job->offset, job->eps, normed, d);
        x = normed;
    }
    if (!cosine) {
        memmove(out, x, 4 * d);
        return;
    }
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
        v8f a = *(const v8fu *)(x + i), b = *(const v8fu *)(x + half + i);
        v8f c = *(const v8fu *)(cosine + i), s = *(const v8fu *)(sine + i);
        *(v8fu *)(out + i) = a * c - b * s;
        *(v8fu *)(out + half + i) = b * c + a * s;
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        out[i] = a * cosine[i] - b * sine[i];
        out[half + i] = b * cosine[i] + a * sine[i];
    }
    if (2 * half < d && out != x) memmove(out + 2 * half, x + 2 * half, 4 * (d - 2 * half));
}

static void DENSE(qkv_rows)(const dense_rows_job *job, int64_t m0, int64_t m1)
{
    int64_t d = job->head_dim, q = job->num_q_heads, kv = job->num_kv_heads, width = (q + 2 * kv) * d;
    for (int64_t m = m0; m < m1; m++) {
        const float *x = job->qkv + m * width;
        float *out = job->out + m * width;
        const float *cosine = job->cosine ? job->cosine + job->positions[m] * job->half : NULL;
        const float *sine = job->sine ? job->sine + job->positions[m] * job->half : NULL;
        for (int64_t h = 0; h < q; h++, x += d, out += d) DENSE(head)(job, x, job->q_norm, cosine, sine, out);
        for (int64_t h = 0; h < kv; h++, x += d, out += d) DENSE(head)(job, x, job->k_norm, cosine, sine, out);
        if (out != x) memmove(out, x, 4 * kv * d);
    }
}

static void DENSE(activate_rows)(const dense_act_job *job, int64_t m0, int64_t m1)
{
    for (int64_t m = m0; m < m1; m++) {
        const float *gate = job->x + m * job->x_stride;
        DENSE(activate_row)(job->kind, gate, job->gated ? gate + job->n : NULL, job->out + m * job->n, job->n);
    }
}

/* tanh(u) to about 2 ulp; 1 - 2 / (exp(2|u|) + 1) loses the low bits of a small one: a polynomial there. */
static inline __attribute__((always_inline)) v8f DENSE(tanh8)(v8f u)
{
    const v8i sign = (v8i)((v8u){0} + 0x80000000u), s = (v8i)u & sign;
    v8f a = (v8f)((v8i)u & ~sign), z = a * a;
    v8f p = (v8f){0} + -0.0057714706f;
    p = 0.020719152f + z * p;
    p = -0.0537718065f + z * p;
    p = 0.133319371f + z * p;
    p = -0.333333053f + z * p;
    v8f low = a + a * (z * p), high = 1.0f - 2.0f / (DENSE(exp8)(2.0f * a) + 1.0f);
    v8i is_low = a < 0.625f, is_nan = u != u;
    v8i value = ((is_low & (v8i)low) | (~is_low & (v8i)high)) | s;
    return (v8f)((is_nan & (v8i)u) | (~is_nan & value));
}

/* x = cap tanh(x / cap), in place, blocks m0 .. m1. Tails go through a padded vector: same bits. */
static void DENSE(softcap_blocks)(const dense_softcap_job *job, int64_t m0, int64_t m1)
{
    int64_t end = m1 * DENSE_SOFTCAP_BLOCK < job->n ? m1 * DENSE_SOFTCAP_BLOCK : job->n;
    for (int64_t i = m0 * DENSE_SOFTCAP_BLOCK; i < end; i += 8) {
        int64_t width = end - i < 8 ? end - i : 8;
        v8f x = {0};
        if (width == 8) {
            *(v8fu *)(job->x + i) = job->cap * DENSE(tanh8)(*(const v8fu *)(job->x + i) / job->cap);
        } else {
            memcpy(&x, job->x + i, 4 * width);
            x = job->cap * DENSE(tanh8)(x / job->cap);
            memcpy(job->x + i, &x, 4 * width);
        }
    }
}

static void DENSE(rows_body)(void *arg, int tid)
{
    dense_row_loop *loop = (dense_row_loop *)arg;
    (void)tid;
    for (;;) {
        int64_t m0 = atomic_fetch_add_explicit(&loop->next, loop->chunk, memory_order_relaxed);
        if (m0 >= loop->m) return;
        int64_t m1 = m0 + loop->chunk < loop->m ? m0 + loop->chunk : loop->m;
        switch (loop->op) {
            case DENSE_OP_NORM: DENSE(norm_rows)((const dense_norm_job *)loop->job, m0, m1); break;
            case DENSE_OP_QKV: DENSE(qkv_rows)((const dense_rows_job *)loop->job, m0, m1); break;
            case DENSE_OP_ACT: DENSE(activate_rows)((const dense_act_job *)loop->job, m0, m1); break;
            case DENSE_OP_SOFTCAP: DENSE(softcap_blocks)((const dense_softcap_job *)loop->job, m0, m1); break;
        }
    }
}
