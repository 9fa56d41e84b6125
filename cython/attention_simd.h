/* The vectors of one instruction set; attention_run.h includes this and attention_kernel.h once per set,
 * with ISA(name) pasting a suffix, VL the lanes and vf, vi the vector types.
 *
 * Products that are added always go through fma(): nothing is left for the compiler to contract, so that
 * the bits do not depend on how a loop was unrolled. */

#define FD_INLINE static inline __attribute__((always_inline))
#define FD_MOST (VL > 8 ? 8 : 4) /* query vectors that one pass over rows takes, their accumulators in registers */
#define FD_UNROLL _Pragma("GCC unroll 8") /* before the arrays of vectors are split into registers */
#define FD_ROLLED _Pragma("GCC unroll 1")
#if defined(__x86_64__) && !defined(FD_EMULATE_AVX512)
#define FD_KEEP(v) __asm__("" : "+v"(v)) /* in a register: gcc would load it anew for each use, which costs more */
#else
#define FD_KEEP(v) (void)0
#endif

FD_INLINE vf ISA(load)(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

FD_INLINE void ISA(store)(float *p, vf v) { memcpy(p, &v, sizeof v); }

FD_INLINE vf ISA(pick)(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

#include FD_PRIMITIVES

FD_INLINE void ISA(round_bf16)(uint16_t *dst, vf v) {
    const vi bits = (vi)v, odd = (bits >> 16) & 1;
    const vi rounded = (vi)ISA(pick)(v == v, (vf)(bits + 0x7fff + odd), (vf)(bits | 0x400000));
    for (int i = 0; i < VL; i++) dst[i] = (uint16_t)((uint32_t)rounded[i] >> 16);
}

/* Lanes that are infinite or not a number, as a mask to be or-ed together. */
FD_INLINE vi ISA(bad)(vf v) { return ((vi)v & 0x7f800000) == 0x7f800000; }

FD_INLINE int ISA(any)(vi mask) {
    int32_t lanes[VL], any = 0;
    memcpy(lanes, &mask, sizeof lanes);
    for (int i = 0; i < VL; i++) any |= lanes[i];
    return any != 0;
}

#include "attention_quant.h"

/* Loads VL elements from element `i` on of a row of the given type; int8 without its scale, int4 not at all. */
FD_INLINE vf ISA(load_as)(const void *p, int64_t i, int dtype) {
    switch (dtype) {
        case FD_INT8: return ISA(load_int8)((const char *)p + FD_INT8_SCALE_BYTES + i);
        case FD_FP16: return ISA(load_fp16)((const uint16_t *)p + i);
        case FD_BF16: return ISA(load_bf16)((const uint16_t *)p + i);
        default: return ISA(load)((const float *)p + i);
    }
}

/* What is left of a row may be half a vector: 8 lanes of 16. */
FD_INLINE int ISA(lanes)(int left) { return VL > 8 && left < VL ? 8 : VL; }

/* The first `lanes` of a vector, 8 or VL; the others are zero, and memory behind the first is not touched. */
#if VL > 8
FD_INLINE vf ISA(load_lanes)(const void *p, int64_t i, int dtype, const int lanes) {
    return lanes < VL ? ISA(extend)(fd_avx2_load_as(p, i, dtype)) : ISA(load_as)(p, i, dtype);
}
FD_INLINE void ISA(store_lanes)(float *p, vf v, const int lanes) {
    if (lanes < VL) fd_avx2_store(p, ISA(low)(v));
    else ISA(store)(p, v);
}
#else
FD_INLINE vf ISA(load_lanes)(const void *p, int64_t i, int dtype, const int lanes) {
    (void)lanes;
    return ISA(load_as)(p, i, dtype);
}
FD_INLINE void ISA(store_lanes)(float *p, vf v, const int lanes) {
    (void)lanes;
    ISA(store)(p, v);
}
#endif

#if VL == 4
/* The four sums over the lanes of a, b, c, d. */
FD_INLINE v4f ISA(sums)(vf a, vf b, vf c, vf d) {
    const v4f ab = __builtin_shuffle(a, b, (v4i){0, 4, 1, 5}) + __builtin_shuffle(a, b, (v4i){2, 6, 3, 7});
    const v4f cd = __builtin_shuffle(c, d, (v4i){0, 4, 1, 5}) + __builtin_shuffle(c, d, (v4i){2, 6, 3, 7});
    return __builtin_shuffle(ab, cd, (v4i){0, 1, 4, 5}) + __builtin_shuffle(ab, cd, (v4i){2, 3, 6, 7});
}
#endif

/* e^x for x <= 88 within 2 ulp; 0 below -87.3; not-a-number stays. x = n ln 2 + r, ln 2 in two parts, the
 * polynomial is Cephes' minimax one for |r| <= ln 2 / 2; rounding to n by adding 1.5 * 2^23. */
FD_INLINE vf ISA(exp)(vf x) {
    const vf magic = ISA(splat)(12582912.0f);
    vi underflow = x < ISA(splat)(-87.3365f);
    x = ISA(min)(ISA(splat)(88.0f), ISA(max)(ISA(splat)(-87.3365f), x));
    vf shifted = ISA(fma)(x, ISA(splat)(1.44269504088896341f), magic);
    vf n = shifted - magic;
    vf r = ISA(fma)(n, ISA(splat)(-0.693359375f), x);
    r = ISA(fma)(n, ISA(splat)(2.12194440e-4f), r);
    vf p = ISA(splat)(1.9875691500e-4f);
    p = ISA(fma)(p, r, ISA(splat)(1.3981999507e-3f));
    p = ISA(fma)(p, r, ISA(splat)(8.3334519073e-3f));
    p = ISA(fma)(p, r, ISA(splat)(4.1665795894e-2f));
    p = ISA(fma)(p, r, ISA(splat)(1.6666665459e-1f));
    p = ISA(fma)(p, r, ISA(splat)(5.0000001201e-1f));
    p = ISA(fma)(p, r * r, r) + 1.0f;
    vf power = (vf)(((vi)shifted - (vi)magic + 127) << 23);
    return (vf)(~underflow & (vi)(p * power));
}

/* tanh(x) within 3 ulp: Cephes' polynomial near zero, 1 - 2 / (e^2|x| + 1) elsewhere. */
FD_INLINE vf ISA(tanh)(vf x) {
    const vi sign = (vi)x & (vi)ISA(splat)(-0.0f);
    vf a = (vf)((vi)x ^ sign), z = x * x;
    vf p = ISA(splat)(-5.70498872745e-3f);
    p = ISA(fma)(p, z, ISA(splat)(2.06390887954e-2f));
    p = ISA(fma)(p, z, ISA(splat)(-5.37397155531e-2f));
    p = ISA(fma)(p, z, ISA(splat)(1.33314422036e-1f));
    p = ISA(fma)(p, z, ISA(splat)(-3.33332819422e-1f));
    p = ISA(fma)(p * z, x, x);
    vf far = 1.0f - 2.0f / (ISA(exp)(ISA(min)(ISA(splat)(44.0f), a) * 2.0f) + 1.0f);
    return ISA(pick)(a < ISA(splat)(0.625f), p, (vf)((vi)far | sign));
}

#if VL > 8 /* each row is read and written once: AVX2's code does, which leaves no half vectors */

FD_INLINE int ISA(load_row)(float *dst, const void *src, int n, int dtype, float scale) {
    return fd_avx2_load_row(dst, src, n, dtype, scale);
}
FD_INLINE int ISA(round_row)(void *dst, const float *src, int n, int dtype) {
    return fd_avx2_round_row(dst, src, n, dtype);
}

#else

/* dst[i] = scale * src[i] in fp32; 1 when some src[i] is not finite. n is a multiple of 8. */
FD_INLINE int ISA(load_row)(float *dst, const void *src, int n, int dtype, float scale) {
    vi bad = {0};
    vf factor = ISA(splat)(scale);
    for (int i = 0; i < n; i += VL) {
        vf v = ISA(load_as)(src, i, dtype);
        bad |= ISA(bad)(v);
        ISA(store)(dst + i, v * factor);
    }
    return ISA(any)(bad);
}

/* Rounds a row to its stored form, to nearest even; 1 when some rounded value is not finite. n is a multiple of 8. */
FD_INLINE int ISA(round_row)(void *dst, const float *src, int n, int dtype) {
    vi bad = {0};
    if (dtype == FD_INT8) return ISA(quantise_int8)(dst, src, n);
    if (dtype == FD_INT4) return ISA(quantise_int4)(dst, src, n);
    for (int i = 0; i < n; i += VL) {
        vf v = ISA(load)(src + i);
        switch (dtype) {
            case FD_FP16: ISA(round_fp16)((uint16_t *)dst + i, v); break;
            case FD_BF16: ISA(round_bf16)((uint16_t *)dst + i, v); break;
            default: ISA(store)((float *)dst + i, v);
        }
        bad |= ISA(bad)(ISA(load_as)(dst, i, dtype));
    }
    return ISA(any)(bad);
}

#endif
