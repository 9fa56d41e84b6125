/* Packing of weights into the panels that dense_gemm reads, and rows taken out of them. Included by dense.h. */

/* One row of a weight as fp32, k elements. */
static inline float dense_value(const void *row, int row_type, int64_t i)
{
    if (row_type == DENSE_FP32) return ((const float *)row)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Column j of a panel as int8: each block of DENSE_KC k has the scale that puts its largest weight at 127. */
static void dense_pack_int8(const void *row, int row_type, int64_t k, int64_t j, char *panel)
{
    for (int64_t k0 = 0; k0 < k; k0 += DENSE_KC) {
        const int64_t k1 = k0 + DENSE_KC < k ? k0 + DENSE_KC : k;
        int8_t *to = (int8_t *)panel + dense_block_at(DENSE_INT8, k0) + j;
        float largest = 0.0f;
        for (int64_t i = k0; i < k1; i++) {
            const float size = fabsf(dense_value(row, row_type, i));
            if (!(size <= largest)) largest = size; /* a NaN stays, and makes the scale one */
            if (size != size) break;
        }
        const float scale = largest / 127.0f;
        for (int64_t i = k0; i < k1; i++, to += DENSE_PANEL) {
            float steps = scale > 0.0f && scale <= FLT_MAX ? rintf(dense_value(row, row_type, i) / scale) : 0.0f;
            *to = (int8_t)fmaxf(-127.0f, fminf(127.0f, steps)); /* beyond when the scale is subnormal: too coarse */
        }
        memcpy(panel + dense_block_at(DENSE_INT8, k0) + (k1 - k0) * DENSE_PANEL + 4 * j, &scale, 4);
    }
}

/* Where column j of a panel of bf16 has its first element, in elements: see DENSE(weights). */
static inline int64_t dense_bf16_lane(int64_t j) { return j < 8 ? 2 * j : 2 * (j - 8) + 1; }

/* Packs rows n0 .. n0+count of a [N, K] row-major weight (fp32 or bf16) into its panels, as weight_type: the rows'
 * own or int8. */
static void dense_pack(const void *weight, int row_type, int64_t count, int64_t k, int64_t n0, int weight_type,
                       void *packed)
{
    const int64_t row_bytes = k * (row_type == DENSE_BF16 ? 2 : 4), panel_bytes = dense_block_at(weight_type, k);
    for (int64_t r = 0; r < count; r++) {
        const int64_t j = (n0 + r) % DENSE_PANEL;
        const char *row = (const char *)weight + r * row_bytes;
        char *panel = (char *)packed + (n0 + r) / DENSE_PANEL * panel_bytes;
        if (weight_type == DENSE_INT8) {
            dense_pack_int8(row, row_type, k, j, panel);
        } else if (weight_type == DENSE_BF16) {
            uint16_t *to = (uint16_t *)panel + dense_bf16_lane(j);
            for (int64_t i = 0; i < k; i++) to[DENSE_PANEL * i] = ((const uint16_t *)row)[i];
        } else {
            float *to = (float *)panel + j;
            for (int64_t i = 0; i < k; i++) to[DENSE_PANEL * i] = ((const float *)row)[i];
        }
    }
}

/* Column j of a panel, k elements, as fp32. */
static void dense_unpack(const char *panel, int weight_type, int64_t k, int64_t j, float *out)
{
    if (weight_type == DENSE_BF16) {
        for (int64_t i = 0; i < k; i++) out[i] = dense_value(panel, DENSE_BF16, DENSE_PANEL * i + dense_bf16_lane(j));
        return;
    }
    if (weight_type == DENSE_FP32) {
        for (int64_t i = 0; i < k; i++) out[i] = ((const float *)panel)[DENSE_PANEL * i + j];
        return;
    }
    for (int64_t k0 = 0; k0 < k; k0 += DENSE_KC) {
        const int64_t k1 = k0 + DENSE_KC < k ? k0 + DENSE_KC : k;
        const int8_t *from = (const int8_t *)panel + dense_block_at(DENSE_INT8, k0);
        float scale;
        memcpy(&scale, from + (k1 - k0) * DENSE_PANEL + 4 * j, 4);
        for (int64_t i = k0; i < k1; i++) out[i] = (float)from[DENSE_PANEL * (i - k0) + j] * scale;
    }
}

/* Gathers whole rows of a packed matrix: the embedding of a tied head. Returns the index of a bad id, or -1. */
static int64_t dense_gather(const void *packed, int weight_type, int64_t n, int64_t k, const int64_t *ids,
                            int64_t count, float *out)
{
    const int64_t panel_bytes = dense_block_at(weight_type, k);
    for (int64_t r = 0; r < count; r++) {
        if (ids[r] < 0 || ids[r] >= n) return r;
        const char *panel = (const char *)packed + ids[r] / DENSE_PANEL * panel_bytes;
        dense_unpack(panel, weight_type, k, ids[r] % DENSE_PANEL, out + r * k);
    }
    return -1;
}
