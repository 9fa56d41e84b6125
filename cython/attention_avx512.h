/* The primitives of AVX-512 F, BW, VL and DQ: 16 lanes. What is left of a row, 8 lanes, is AVX2's work.
 *
 * BF16's and VNNI's dot products are not used: the one flushes subnormals and rounds as no other set does, the other
 * needs integers on both sides. Sums are in fp32.
 *
 * With -DFD_EMULATE_AVX512 the same kernel, with all its shapes and tails, runs on AVX2: every primitive is then two
 * halves of AVX2's, as it should be. */

#ifdef FD_EMULATE_AVX512

typedef union {
    v16f whole;
    v8f half[2];
} ISA(halves);

FD_INLINE v8f ISA(half)(vf v, int which) { return ((ISA(halves)){.whole = v}).half[which]; }
FD_INLINE vf ISA(join)(v8f low, v8f high) { return ((ISA(halves)){.half = {low, high}}).whole; }
FD_INLINE v8f ISA(low)(vf v) { return ISA(half)(v, 0); }
FD_INLINE v8f ISA(high)(vf v) { return ISA(half)(v, 1); }
FD_INLINE vf ISA(extend)(v8f v) { return ISA(join)(v, (v8f){0}); }
FD_INLINE vf ISA(splat)(float x) { return ISA(join)(fd_avx2_splat(x), fd_avx2_splat(x)); }
FD_INLINE vf ISA(fma)(vf a, vf b, vf c) {
    return ISA(join)(fd_avx2_fma(ISA(low)(a), ISA(low)(b), ISA(low)(c)),
                     fd_avx2_fma(ISA(high)(a), ISA(high)(b), ISA(high)(c)));
}
FD_INLINE vf ISA(max)(vf a, vf b) {
    return ISA(join)(fd_avx2_max(ISA(low)(a), ISA(low)(b)), fd_avx2_max(ISA(high)(a), ISA(high)(b)));
}
FD_INLINE vf ISA(min)(vf a, vf b) {
    return ISA(join)(fd_avx2_min(ISA(low)(a), ISA(low)(b)), fd_avx2_min(ISA(high)(a), ISA(high)(b)));
}
FD_INLINE vf ISA(load_fp16)(const uint16_t *p) { return ISA(join)(fd_avx2_load_fp16(p), fd_avx2_load_fp16(p + 8)); }
FD_INLINE vf ISA(load_bf16)(const uint16_t *p) { return ISA(join)(fd_avx2_load_bf16(p), fd_avx2_load_bf16(p + 8)); }
FD_INLINE vf ISA(load_int8)(const char *p) { return ISA(join)(fd_avx2_load_int8(p), fd_avx2_load_int8(p + 8)); }
FD_INLINE vi ISA(spread)(const char *p) { return (vi)ISA(join)((v8f)fd_avx2_spread(p), (v8f)fd_avx2_spread(p)); }
FD_INLINE void ISA(nibbles)(const char *p, vf *x) {
    v8f both[2];
    fd_avx2_nibbles(p, both);
    *x = ISA(join)(both[0], both[1]);
}

#else

FD_INLINE v8f ISA(low)(vf v) { return _mm512_castps512_ps256(v); }
FD_INLINE v8f ISA(high)(vf v) { return _mm512_extractf32x8_ps(v, 1); }
FD_INLINE vf ISA(extend)(v8f v) { return _mm512_zextps256_ps512(v); }
FD_INLINE vf ISA(splat)(float x) { return _mm512_set1_ps(x); }
FD_INLINE vf ISA(fma)(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* b when either is not a number */
FD_INLINE vf ISA(max)(vf a, vf b) { return _mm512_max_ps(a, b); }
FD_INLINE vf ISA(min)(vf a, vf b) { return _mm512_min_ps(a, b); }
FD_INLINE vf ISA(load_fp16)(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FD_INLINE vf ISA(load_bf16)(const uint16_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
FD_INLINE vf ISA(load_int8)(const char *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* The 4 bytes at p in every lane. */
FD_INLINE vi ISA(spread)(const char *p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (vi)_mm512_set1_epi32(bits);
}
/* 16 integers from 8 bytes of an int4 row, in order: the low nibbles, then the high ones. */
FD_INLINE void ISA(nibbles)(const char *p, vf *x) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    const __m128i both = _mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)); /* the mask drops a neighbour's bits */
    *x = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15))));
}

#endif

FD_INLINE v4f ISA(fold)(vf v) { return fd_avx2_fold(ISA(low)(v) + ISA(high)(v)); }
