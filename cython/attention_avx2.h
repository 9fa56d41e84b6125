/* The primitives of AVX2 with FMA and F16C: eight lanes. */

FD_INLINE vf ISA(splat)(float x) { return _mm256_set1_ps(x); }
FD_INLINE vf ISA(fma)(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* b when either is not a number */
FD_INLINE vf ISA(max)(vf a, vf b) { return _mm256_max_ps(a, b); }
FD_INLINE vf ISA(min)(vf a, vf b) { return _mm256_min_ps(a, b); }
FD_INLINE v4f ISA(fold)(vf v) { return _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1); }
FD_INLINE vf ISA(load_fp16)(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
FD_INLINE vf ISA(load_bf16)(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

FD_INLINE void ISA(round_fp16)(uint16_t *dst, vf v) {
    _mm_storeu_si128((__m128i *)dst, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

/* The 4 bytes at p in every lane. */
FD_INLINE vi ISA(spread)(const char *p) {
    return (vi)_mm256_broadcast_ss((const float *)p); /* as plain C, gcc 12 would do the arithmetic on it in scalars */
}

FD_INLINE vf ISA(load_int8)(const char *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* 16 integers from 8 bytes of an int4 row, in order: the low nibbles, then the high ones. */
FD_INLINE void ISA(nibbles)(const char *p, vf *x) {
    const vi bytes = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    x[0] = __builtin_convertvector(bytes & 15, vf);
    x[1] = __builtin_convertvector(bytes >> 4, vf);
}

/* Sums of each two neighbouring products of 16-bit integers. */
FD_INLINE vi ISA(madd)(vi a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

/* 16 bytes as 16-bit integers. */
FD_INLINE vi ISA(words)(const char *p) {
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}

FD_INLINE __m128i ISA(interleave)(const char *a, const char *b) {
    return _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)a), _mm_loadl_epi64((const __m128i *)b));
}

/* 8 or 16 bytes of two rows each as pairs of 16-bit integers. */
FD_INLINE void ISA(eight_pairs)(const char *a, const char *b, vi *x) {
    x[0] = (vi)_mm256_cvtepi8_epi16(ISA(interleave)(a, b));
}
FD_INLINE void ISA(byte_pairs)(const char *a, const char *b, vi *x) {
    const __m128i p = _mm_loadu_si128((const __m128i *)a), q = _mm_loadu_si128((const __m128i *)b);
    x[0] = (vi)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(p, q));
    x[1] = (vi)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(p, q));
}

/* The 4 bytes at p, p + row and so on. */
FD_INLINE vi ISA(gather)(const char *p, size_t row) {
    int32_t x[VL];
    FD_UNROLL
    for (int i = 0; i < VL; i++) memcpy(&x[i], p + i * row, sizeof *x);
    return (vi){x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]};
}

/* The nibbles of 16 bytes as 16-bit integers: the low ones, then the high ones. */
FD_INLINE void ISA(nibble_words)(const char *p, vi *x) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    x[0] = (vi)_mm256_and_si256(wide, _mm256_set1_epi16(15));
    x[1] = (vi)_mm256_srli_epi16(wide, 4);
}

/* 16 nibbles of two rows each, of 8 bytes, as pairs of 16-bit integers. */
FD_INLINE void ISA(nibble_pairs)(const char *a, const char *b, vi *x) {
    const __m256i wide = _mm256_cvtepu8_epi16(ISA(interleave)(a, b));
    x[0] = (vi)_mm256_and_si256(wide, _mm256_set1_epi16(15));
    x[1] = (vi)_mm256_srli_epi16(wide, 4);
}

/* The headers of four int4 groups, 20 bytes apart: of the 16 bytes at 16 times i the ith word is one. */
FD_INLINE __m128i ISA(four_headers)(const char *p) {
    const __m128i *w = (const __m128i *)p;
    const __m128i low = _mm_blend_epi32(_mm_loadu_si128(w), _mm_loadu_si128(w + 1), 2);
    return _mm_blend_epi32(low, _mm_blend_epi32(_mm_loadu_si128(w + 2), _mm_loadu_si128(w + 3), 8), 12);
}

/* Those of rows p, p + row and so on, group by group. */
FD_INLINE void ISA(gather_four)(const char *p, size_t row, vi *x) {
    __m256i r[4];
    FD_UNROLL
    for (int t = 0; t < 4; t++)
        r[t] = _mm256_set_m128i(ISA(four_headers)(p + (t + 4) * row), ISA(four_headers)(p + t * row));
    const __m256i ab = _mm256_unpacklo_epi32(r[0], r[1]), cd = _mm256_unpacklo_epi32(r[2], r[3]);
    const __m256i ef = _mm256_unpackhi_epi32(r[0], r[1]), gh = _mm256_unpackhi_epi32(r[2], r[3]);
    x[0] = (vi)_mm256_unpacklo_epi64(ab, cd);
    x[1] = (vi)_mm256_unpackhi_epi64(ab, cd);
    x[2] = (vi)_mm256_unpacklo_epi64(ef, gh);
    x[3] = (vi)_mm256_unpackhi_epi64(ef, gh);
}

/* Integers that 16 bits hold. */
FD_INLINE void ISA(store_words)(int16_t *p, vi x) {
    const __m256i whole = (__m256i)x;
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}

/* The four sums over the lanes of a, b, c, d. */
FD_INLINE v4f ISA(sums)(vf a, vf b, vf c, vf d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256d p = _mm256_castps_pd(ab), q = _mm256_castps_pd(cd);
    const __m256 low = _mm256_castpd_ps(_mm256_unpacklo_pd(p, q)), high = _mm256_castpd_ps(_mm256_unpackhi_pd(p, q));
    return ISA(fold)(_mm256_add_ps(low, high));
}
