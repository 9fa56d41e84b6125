/* The primitives of the baseline: four lanes, in what every x86-64 has, or in plain C. Products are not fused. */

FD_INLINE vf ISA(splat)(float x) { return (vf){x, x, x, x}; }
FD_INLINE vf ISA(fma)(vf a, vf b, vf c) { return a * b + c; }
/* b when either is not a number */
FD_INLINE vf ISA(max)(vf a, vf b) { return ISA(pick)(a > b, a, b); }
FD_INLINE vf ISA(min)(vf a, vf b) { return ISA(pick)(a < b, a, b); }
FD_INLINE v4f ISA(fold)(vf v) { return v; }
FD_INLINE vi ISA(widen)(const uint16_t *p) {
#ifdef __SSE2__
    return (vi)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128());
#else
    return (vi){p[0], p[1], p[2], p[3]};
#endif
}
/* Normal: move the exponent. Subnormal: as 2^-14 (1 + m) - 2^-14, which no flush-to-zero mode touches. */
FD_INLINE vf ISA(load_fp16)(const uint16_t *p) {
    vi h = ISA(widen)(p), magnitude = h & 0x7fff, bits = magnitude << 13;
    vf normal = (vf)((bits + (112 << 23)) | ((magnitude > 0x7bff) & 0x7f800000));
    vf tiny = (vf)(bits + (113 << 23)) - (vf)((vi){0} + (113 << 23));
    return (vf)((vi)ISA(pick)(magnitude < 0x0400, tiny, normal) | ((h & 0x8000) << 16));
}
FD_INLINE vf ISA(load_bf16)(const uint16_t *p) { return (vf)(ISA(widen)(p) << 16); }
FD_INLINE void ISA(round_fp16)(uint16_t *dst, vf v) {
    for (int i = 0; i < VL; i++) dst[i] = fd_round_fp16((uint32_t)((vi)v)[i]);
}

/* The 4 bytes at p in every lane. */
FD_INLINE vi ISA(spread)(const char *p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (vi){0} + bits;
}

FD_INLINE vf ISA(load_int8)(const char *p) {
    const int8_t *q = (const int8_t *)p;
    return __builtin_convertvector(((vi){q[0], q[1], q[2], q[3]}), vf);
}

/* 16 integers from 8 bytes of an int4 row, in order: the low nibbles, then the high ones. */
FD_INLINE void ISA(nibbles)(const char *p, vf *x) {
    const uint8_t *q = (const uint8_t *)p;
    FD_UNROLL
    for (int j = 0; j < 2; j++, q += 4) {
        const vi bytes = {q[0], q[1], q[2], q[3]};
        x[j] = __builtin_convertvector(bytes & 15, vf);
        x[2 + j] = __builtin_convertvector(bytes >> 4, vf);
    }
}
