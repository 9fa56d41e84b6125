/* Quantised K and V rows; included once per instruction set by attention_simd.h.
 *
 * int8: [scale fp32][head_dim values]. x = scale * value; the kernel multiplies scores and weights by the scale.
 * int4: groups of 32 values along head_dim, each [scale bf16 << 16 | minimum bf16][16 bytes]: x = minimum + scale *
 *       nibble. 8 bytes hold 16 values: the low nibbles the first 8, the high ones the others. The last group is
 *       cut after the bytes that it needs.
 * The minimum is rounded down and the scale up, so that the rounded ones cover the group. Products and sums are
 * rounded apart, which makes the stored bits the same in all instruction sets and in kv_dtypes.py. */

enum { ISA(BLOCK_VECTORS) = 16 / VL };

/* 16 values of an int4 group, its first ones or its second. The product is exact, fused or not. */
FD_INLINE void ISA(load_int4)(const char *group, int second, vf *x) {
    const vi pair = ISA(spread)(group);
    const vf scale = (vf)(pair & (int32_t)0xffff0000), minimum = (vf)(pair << 16);
    ISA(nibbles)(group + 4 + 8 * second, x);
    FD_UNROLL
    for (int j = 0; j < ISA(BLOCK_VECTORS); j++) x[j] = ISA(fma)(x[j], scale, minimum);
}

#if VL <= 8 /* wider sets write rows with AVX2's code */

/* The nearest bf16 at or below x, or at or above it. */
FD_INLINE float ISA(bf16_below)(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x < 0.0f && (bits & 0xffff)) bits += 0x10000;
    bits &= 0xffff0000;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

FD_INLINE float ISA(bf16_above)(float x) { return -ISA(bf16_below)(-x); }

FD_INLINE float ISA(largest)(vf v) {
    float lanes[VL], top;
    memcpy(lanes, &v, sizeof lanes);
    top = lanes[0];
    for (int i = 1; i < VL; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
}

/* Quantises a row of n values, a multiple of 8; 1, and a row that reads as not-a-number, when one is not finite. */
static int ISA(quantise_int8)(char *dst, const float *src, int n) {
    const vf magic = ISA(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, to nearest even */
    vf top = {0};
    vi bad = {0};
    for (int i = 0; i < n; i += VL) {
        vf v = ISA(load)(src + i);
        bad |= ISA(bad)(v);
        top = ISA(max)(top, (vf)((vi)v & 0x7fffffff));
    }
    const float largest = ISA(largest)(top);
    const int failed = ISA(any)(bad), empty = failed || largest < FD_QUANT_TINY;
    const float scale = failed ? NAN : empty ? 0.0f : largest / 127.0f;
    const vf inverse = ISA(splat)(empty ? 0.0f : 127.0f / largest);
    memcpy(dst, &scale, sizeof scale);
    for (int i = 0; i < n; i += VL) {
        vf v = failed ? (vf){0} : ISA(load)(src + i);
        vi rounded = (vi)(v * inverse + magic) - (vi)magic;
        for (int j = 0; j < VL; j++) dst[4 + i + j] = (char)rounded[j];
    }
    return failed;
}

static int ISA(quantise_int4)(char *dst, const float *src, int n) {
    const vf magic = ISA(splat)(12582912.0f);
    int failed = 0;
    for (int start = 0; start < n; start += 32, src += 32, dst += FD_INT4_GROUP_BYTES) {
        const int count = n - start < 32 ? n - start : 32;
        vf low = ISA(load)(src), high = low;
        vi bad = {0};
        for (int i = 0; i < count; i += VL) {
            vf v = ISA(load)(src + i);
            bad |= ISA(bad)(v);
            low = ISA(min)(low, v);
            high = ISA(max)(high, v);
        }
        float minimum = ISA(bf16_below)(-ISA(largest)(-low) + 0.0f); /* no -0, which lane order would decide */
        float scale = ISA(bf16_above)((ISA(largest)(high) - minimum) / 15.0f);
        if (scale < FD_QUANT_TINY) scale = 0.0f;
        const int wrong = ISA(any)(bad) || !(fabsf(minimum) <= 3.4e38f && scale <= 3.4e38f);
        if (wrong) minimum = scale = NAN;
        failed |= wrong;
        const vf inverse = ISA(splat)(wrong || scale == 0.0f ? 0.0f : 1.0f / scale), zero = {0};
        uint32_t pair[2];
        memcpy(pair, &minimum, 4);
        memcpy(pair + 1, &scale, 4);
        pair[0] = pair[0] >> 16 | (pair[1] & 0xffff0000);
        memcpy(dst, pair, 4);
        memset(dst + 4, 0, (size_t)(count + 15) / 16 * 8);
        for (int i = 0; i < count; i += VL) {
            vf v = wrong ? zero : (ISA(load)(src + i) - minimum) * inverse;
            vi rounded = (vi)(ISA(min)(ISA(splat)(15.0f), ISA(max)(zero, v)) + magic) - (vi)magic;
            for (int j = 0; j < VL; j++)
                dst[4 + (i + j) / 16 * 8 + (i + j) % 8] |= (char)(rounded[j] << ((i + j) % 16 < 8 ? 0 : 4));
        }
    }
    return failed;
}

#endif
