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
