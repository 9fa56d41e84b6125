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

#if FD_INTEGERS

typedef int8_t ISA(eight) __attribute__((vector_size(8)));
typedef int16_t ISA(short) __attribute__((vector_size(16)));
typedef uint8_t ISA(bytes) __attribute__((vector_size(16)));
typedef uint64_t ISA(longs) __attribute__((vector_size(16)));
static const ISA(bytes) ISA(low_bytes) = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
static const ISA(bytes) ISA(high_bytes) = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* Sums of each two neighbouring products of 16-bit integers. */
FD_INLINE vi ISA(madd)(vi a, vi b) {
#ifdef __SSE2__
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* 8 bytes as 16-bit integers. */
FD_INLINE vi ISA(words)(const char *p) {
    ISA(eight) bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (vi)__builtin_convertvector(bytes, ISA(short));
}

/* 8 or 16 bytes of two rows each as pairs of 16-bit integers. */
FD_INLINE void ISA(eight_pairs)(const char *a, const char *b, vi *x) {
    const vi p = ISA(words)(a), q = ISA(words)(b);
    x[0] = (vi)__builtin_shuffle((ISA(short))p, (ISA(short))q, (ISA(short)){0, 8, 1, 9, 2, 10, 3, 11});
    x[1] = (vi)__builtin_shuffle((ISA(short))p, (ISA(short))q, (ISA(short)){4, 12, 5, 13, 6, 14, 7, 15});
}
FD_INLINE void ISA(byte_pairs)(const char *a, const char *b, vi *x) {
    ISA(eight_pairs)(a, b, x);
    ISA(eight_pairs)(a + 8, b + 8, x + 2);
}

FD_INLINE ISA(bytes) ISA(load_eight)(const char *p) {
    uint64_t low;
    memcpy(&low, p, sizeof low);
    return (ISA(bytes))(ISA(longs)){low, 0};
}

/* The nibbles of 8 bytes as 16-bit integers: the low ones, then the high ones. */
FD_INLINE void ISA(nibble_words)(const char *p, vi *x) {
    const ISA(bytes) none = {0};
    const ISA(short) wide = (ISA(short))__builtin_shuffle(ISA(load_eight)(p), none, ISA(low_bytes));
    x[0] = (vi)(wide & 15);
    x[1] = (vi)(wide >> 4);
}

/* 16 nibbles of two rows each, of 8 bytes, as pairs of 16-bit integers. */
FD_INLINE void ISA(nibble_pairs)(const char *a, const char *b, vi *x) {
    const ISA(bytes) none = {0}, both = __builtin_shuffle(ISA(load_eight)(a), ISA(load_eight)(b), ISA(low_bytes));
    const ISA(short) low = (ISA(short))__builtin_shuffle(both, none, ISA(low_bytes));
    const ISA(short) high = (ISA(short))__builtin_shuffle(both, none, ISA(high_bytes));
    x[0] = (vi)(low & 15);
    x[1] = (vi)(high & 15);
    x[2] = (vi)(low >> 4);
    x[3] = (vi)(high >> 4);
}

/* The 4 bytes at p, p + row and so on. */
FD_INLINE vi ISA(gather)(const char *p, size_t row) {
    int32_t x[VL];
    FD_UNROLL
    for (int i = 0; i < VL; i++) memcpy(&x[i], p + i * row, sizeof *x);
    return (vi){x[0], x[1], x[2], x[3]};
}

/* The headers of four int4 groups, 20 bytes apart: of the 16 bytes at 16 times i the ith word is one. */
FD_INLINE v4i ISA(four_headers)(const char *p) {
    v4i w[4];
    for (int i = 0; i < 4; i++) memcpy(&w[i], p + 16 * i, sizeof w[i]);
    return __builtin_shuffle(__builtin_shuffle(w[0], w[1], (v4i){0, 5, 2, 3}),
                             __builtin_shuffle(w[2], w[3], (v4i){0, 1, 2, 7}), (v4i){0, 1, 6, 7});
}

/* Those of rows p, p + row and so on, group by group. */
FD_INLINE void ISA(gather_four)(const char *p, size_t row, vi *x) {
    v4i r[4];
    for (int t = 0; t < 4; t++) r[t] = ISA(four_headers)(p + t * row);
    const v4i low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
    const v4i ab = __builtin_shuffle(r[0], r[1], low), cd = __builtin_shuffle(r[2], r[3], low);
    const v4i ef = __builtin_shuffle(r[0], r[1], high), gh = __builtin_shuffle(r[2], r[3], high);
    x[0] = __builtin_shuffle(ab, cd, (v4i){0, 1, 4, 5});
    x[1] = __builtin_shuffle(ab, cd, (v4i){2, 3, 6, 7});
    x[2] = __builtin_shuffle(ef, gh, (v4i){0, 1, 4, 5});
    x[3] = __builtin_shuffle(ef, gh, (v4i){2, 3, 6, 7});
}

/* Integers that 16 bits hold. */
FD_INLINE void ISA(store_words)(int16_t *p, vi x) {
#ifdef __SSE2__
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi32((__m128i)x, (__m128i)x));
#else
    for (int i = 0; i < VL; i++) p[i] = (int16_t)x[i];
#endif
}

#endif
