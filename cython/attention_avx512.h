/* The primitives of AVX-512 F, BW, VL, DQ and VNNI: 16 lanes. What is left of a row, 8 lanes, is AVX2's work.
 *
 * BF16's dot products are not used: they flush subnormals and round as no other set does. Nor are VNNI's of bytes: a
 * query would have too few. Sums are in fp32, or of 16-bit integers' products.
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
FD_INLINE vi ISA(join_whole)(v8i low, v8i high) { return (vi)ISA(join)((v8f)low, (v8f)high); }
FD_INLINE vi ISA(madd)(vi a, vi b) {
    return ISA(join_whole)(fd_avx2_madd((v8i)ISA(low)((vf)a), (v8i)ISA(low)((vf)b)),
                           fd_avx2_madd((v8i)ISA(high)((vf)a), (v8i)ISA(high)((vf)b)));
}
FD_INLINE vi ISA(madd_to)(vi c, vi a, vi b) { return c + ISA(madd)(a, b); }
/* The eight elements from `i` on at a, then those at b. */
FD_INLINE vf ISA(load_two)(const char *a, const char *b, int64_t i, int dtype) {
    return ISA(join)(fd_avx2_load_as(a, i, dtype), fd_avx2_load_as(b, i, dtype));
}
FD_INLINE void ISA(byte_pairs)(const char *a, const char *b, vi *x) {
    v8i both[2];
    fd_avx2_byte_pairs(a, b, both);
    *x = ISA(join_whole)(both[0], both[1]);
}
FD_INLINE void ISA(nibble_pairs)(const char *a, const char *b, vi *x) {
    v8i both[2];
    fd_avx2_nibble_pairs(a, b, both);
    *x = ISA(join_whole)(both[0], both[1]);
}
FD_INLINE void ISA(store_words)(int16_t *p, vi x) {
    fd_avx2_store_words(p, (v8i)ISA(low)((vf)x));
    fd_avx2_store_words(p + 8, (v8i)ISA(high)((vf)x));
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
FD_INLINE vi ISA(join_whole)(v8i low, v8i high) {
    return (vi)_mm512_inserti32x8(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
}
/* Sums of each two neighbouring products of 16-bit integers. */
FD_INLINE vi ISA(madd)(vi a, vi b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
/* VNNI's, which saturates nothing: the same sum. */
FD_INLINE vi ISA(madd_to)(vi c, vi a, vi b) { return (vi)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b); }
/* The eight elements from `i` on at a, then those at b. */
FD_INLINE vf ISA(load_two)(const char *a, const char *b, int64_t i, int dtype) {
    if (dtype == FD_FP32) {
        const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps((const float *)a + i));
        return (vf)_mm512_insertf32x8(low, _mm256_loadu_ps((const float *)b + i), 1);
    }
    const __m128i low = _mm_loadu_si128((const __m128i *)((const uint16_t *)a + i));
    const __m256i both = _mm256_set_m128i(_mm_loadu_si128((const __m128i *)((const uint16_t *)b + i)), low);
    if (dtype == FD_FP16) return (vf)_mm512_cvtph_ps(both);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16);
}
/* 16 bytes of two rows each as pairs of 16-bit integers. */
FD_INLINE void ISA(byte_pairs)(const char *a, const char *b, vi *x) {
    const __m128i p = _mm_loadu_si128((const __m128i *)a), q = _mm_loadu_si128((const __m128i *)b);
    *x = (vi)_mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(p, q), _mm_unpacklo_epi8(p, q)));
}
FD_INLINE vi ISA(split_nibbles)(__m128i bytes) { /* the mask drops a neighbour's bits */
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
    return (vi)_mm512_cvtepu8_epi16(_mm256_and_si256(both, _mm256_set1_epi8(15)));
}
/* 16 nibbles of two rows each, of 8 bytes, as pairs of 16-bit integers. */
FD_INLINE void ISA(nibble_pairs)(const char *a, const char *b, vi *x) {
    *x = ISA(split_nibbles)(
        _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)a), _mm_loadl_epi64((const __m128i *)b)));
}
/* Integers that 16 bits hold. */
FD_INLINE void ISA(store_words)(int16_t *p, vi x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x));
}

#endif

FD_INLINE v4f ISA(fold)(vf v) { return fd_avx2_fold(ISA(low)(v) + ISA(high)(v)); }

/* The four sums over the lanes of a, b, c, d. */
FD_INLINE v4f ISA(sums)(vf a, vf b, vf c, vf d) {
    return fd_avx2_sums(ISA(low)(a) + ISA(high)(a), ISA(low)(b) + ISA(high)(b), ISA(low)(c) + ISA(high)(c),
                             ISA(low)(d) + ISA(high)(d));
}
FD_INLINE vi ISA(gather)(const char *p, size_t row) {
    int32_t x[VL];
    FD_UNROLL
    for (int i = 0; i < VL; i++) memcpy(&x[i], p + i * row, sizeof *x);
    return (vi){x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]};
}
FD_INLINE void ISA(gather_four)(const char *p, size_t row, vi *x) {
    v8i low[4], high[4];
    fd_avx2_gather_four(p, row, low);
    fd_avx2_gather_four(p + 8 * row, row, high);
    FD_UNROLL
    for (int g = 0; g < 4; g++) x[g] = ISA(join_whole)(low[g], high[g]);
}
/* 8 bytes of two rows each, in the first half. */
FD_INLINE void ISA(eight_pairs)(const char *a, const char *b, vi *x) {
    v8i first;
    fd_avx2_eight_pairs(a, b, &first);
    *x = (vi)ISA(extend)((v8f)first);
}
