/* Quantised K and V rows; included once per instruction set by attention_simd.h.
 *
 * int8: [scale fp32][head_dim values]. x = scale * value; the kernel multiplies scores and weights by the scale.
 * int4: groups of 32 values along head_dim, each [scale bf16 << 16 | minimum bf16][16 bytes]: x = minimum + scale *
 *       nibble. 8 bytes hold 16 values: the low nibbles the first 8, the high ones the others. The last group is
 *       cut after the bytes that it needs.
 * The minimum is rounded down and the scale up, so that the rounded ones cover the group. Products and sums are
 * rounded apart, which makes the stored bits the same in all instruction sets and in kv_dtypes.py. */

FD_INLINE vi ISA(load_bytes)(const char *p) {
#if VL == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    const uint8_t *q = (const uint8_t *)p;
    return (vi){q[0], q[1], q[2], q[3]};
#endif
}

FD_INLINE vf ISA(load_int8)(const char *p) {
#if VL == 8
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    const int8_t *q = (const int8_t *)p;
    return __builtin_convertvector(((vi){q[0], q[1], q[2], q[3]}), vf);
#endif
}

/* Unpacks `count` rows of n values to dst [count][n], fetching as many rows ahead meanwhile. The last group of a row
 * may spill 8 floats into the next one, which comes later; behind the last row there is room. */
FD_INLINE void ISA(unpack_int4)(float *dst, const char *rows, size_t row_bytes, int count, int n, const char *ahead,
                                int ahead_rows) {
    for (int t = 0; t < count; t++, rows += row_bytes, ahead += row_bytes) {
        const char *p = rows;
        if (t < ahead_rows)
            for (size_t line = 0; line < row_bytes + 63; line += 64) __builtin_prefetch(ahead + line);
        for (int start = 0; start < n; start += 32, p += 4) {
            uint32_t bits;
            memcpy(&bits, p, sizeof bits);
            const vi pair = (vi){0} + (int32_t)bits;
            const vf scale = (vf)(pair & (int32_t)0xffff0000), minimum = (vf)(pair << 16);
            const int stop = n - start < 32 ? n : start + 32;
            for (int i = start; i < stop; i += 16, p += 8, dst += 16)
                for (int j = 0; j < 8; j += VL) {
                    const vi bytes = ISA(load_bytes)(p + 4 + j);
                    const vf low = __builtin_convertvector(bytes & 15, vf);
                    const vf high = __builtin_convertvector(bytes >> 4, vf);
                    ISA(store)(dst + j, ISA(fma)(low, scale, minimum)); /* the product is exact, fused or not */
                    ISA(store)(dst + 8 + j, ISA(fma)(high, scale, minimum));
                }
        }
        if (n % 16) dst -= 8;
    }
}

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
