/* The primitives of AVX-512 against two halves of AVX2's, bit by bit. The rest of the kernel is the same source for
 * both widths, and -DFD_EMULATE_AVX512 runs it: see attention_avx512.h. Exits with 1 when bits differ, or without
 * AVX-512.
 *
 *   gcc -O3 -ffp-contract=off -pthread -w -Icython tests/kernels/primitives_check.c -o primitives_check -lm */
#define _GNU_SOURCE
#include <stdio.h>

#include "attention.h"
#include "team_pool.h"

#pragma GCC push_options
#ifdef FD_EMULATE_AVX512
#pragma GCC target("avx2,fma,f16c")
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

typedef union {
    v16f whole;
    v8f half[2];
    float value[16];
    uint32_t bits[16];
} check_vector;

enum { CHECK_SHOWN = 10, CHECK_ROUNDS = 20000 };

static long check_compared, check_wrong;

/* Which not-a-number comes out of arithmetic is the compiler's choice of operands; all are one here. */
static void check_same(const char *name, check_vector got, check_vector want, int arithmetic) {
    for (int i = 0; i < 16 && arithmetic; i++)
        if (got.value[i] != got.value[i] && want.value[i] != want.value[i]) got.bits[i] = want.bits[i];
    check_compared++;
    if (!memcmp(&got, &want, sizeof got) || check_wrong++ >= CHECK_SHOWN) return;
    printf("%s, got/expected:", name);
    for (int i = 0; i < 16; i++) printf(" %08x/%08x", got.bits[i], want.bits[i]);
    printf("\n");
}

/* Every fp16 and bf16, as whole and half vectors; every byte as an integer and as two nibbles. */
static void check_loads(void) {
    check_vector got, want;
    uint16_t words[16];
    char bytes[16];
    for (int first = 0; first < 65536; first += 16) {
        for (int i = 0; i < 16; i++) words[i] = (uint16_t)(first + i);
        got.whole = fd_avx512_load_fp16(words);
        want.half[0] = fd_avx2_load_fp16(words), want.half[1] = fd_avx2_load_fp16(words + 8);
        check_same("load_fp16", got, want, 0);
        got.whole = fd_avx512_load_bf16(words);
        want.half[0] = fd_avx2_load_bf16(words), want.half[1] = fd_avx2_load_bf16(words + 8);
        check_same("load_bf16", got, want, 0);
        got.whole = (v16f)fd_avx512_spread((const char *)words);
        want.half[0] = want.half[1] = (v8f)fd_avx2_spread((const char *)words);
        check_same("spread", got, want, 0);
        got.whole = fd_avx512_load_lanes(words, 0, FD_FP16, 8);
        want.half[0] = fd_avx2_load_fp16(words), want.half[1] = (v8f){0};
        check_same("load_lanes", got, want, 0);
    }
    for (int first = 0; first < 256; first++) {
        for (int i = 0; i < 16; i++) bytes[i] = (char)(first + 37 * i);
        got.whole = fd_avx512_load_int8(bytes);
        want.half[0] = fd_avx2_load_int8(bytes), want.half[1] = fd_avx2_load_int8(bytes + 8);
        check_same("load_int8", got, want, 0);
        fd_avx512_nibbles(bytes, &got.whole);
        fd_avx2_nibbles(bytes, want.half);
        check_same("nibbles", got, want, 0);
    }
}

/* Two tiles' elements; products of 16-bit integers; pairs of rows and their nibbles; headers of four rows' groups. */
static void check_integers(void) {
    char bytes[32 * 80];
    check_vector got[4], want[4];
    uint64_t seed = 1;
    for (int round = 0; round < CHECK_ROUNDS; round++) {
        for (size_t i = 0; i < sizeof bytes; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            bytes[i] = (char)(seed >> 56);
        }
        for (int dtype = FD_FP32; dtype <= FD_BF16; dtype++) {
            got->whole = fd_avx512_load_two(bytes, bytes + 640, 8, dtype);
            want->half[0] = fd_avx2_load_as(bytes, 8, dtype), want->half[1] = fd_avx2_load_as(bytes + 640, 8, dtype);
            check_same("load_two", *got, *want, 1);
        }
        v16f x, y;
        memcpy(&x, bytes, sizeof x);
        memcpy(&y, bytes + 64, sizeof y);
        got->whole = (v16f)fd_avx512_madd((v16i)x, (v16i)y);
        want->half[0] = (v8f)fd_avx2_madd((v8i)fd_avx512_low(x), (v8i)fd_avx512_low(y));
        want->half[1] = (v8f)fd_avx2_madd((v8i)fd_avx512_high(x), (v8i)fd_avx512_high(y));
        check_same("madd", *got, *want, 0);
        fd_avx512_byte_pairs(bytes, bytes + 50, (v16i *)&got->whole);
        fd_avx2_byte_pairs(bytes, bytes + 50, (v8i *)want->half);
        check_same("byte_pairs", *got, *want, 0);
        fd_avx512_eight_pairs(bytes, bytes + 50, (v16i *)&got->whole);
        want->half[1] = (v8f){0};
        check_same("eight_pairs", *got, *want, 0);
        fd_avx512_nibble_pairs(bytes, bytes + 50, (v16i *)&got->whole);
        fd_avx2_nibble_pairs(bytes, bytes + 50, (v8i *)want->half);
        check_same("nibble_pairs", *got, *want, 0);
        fd_avx512_gather_four(bytes, 80, (v16i *)got);
        for (int i = 0; i < 64; i++) memcpy(&want[i / 16].bits[i % 16], bytes + i % 16 * 80 + i / 16 * 20, 4);
        for (int g = 0; g < 4; g++) check_same("gather_four", got[g], want[g], 0);
        int16_t stored[2][16];
        const v16i small = (v16i)x >> 16;
        fd_avx512_store_words(stored[0], small);
        for (int i = 0; i < 16; i++) stored[1][i] = (int16_t)small[i];
        memcpy(got, stored[0], sizeof *stored);
        memcpy(want, stored[1], sizeof *stored);
        check_same("store_words", *got, *want, 0);
    }
}

static void check_parts(check_vector x) {
    check_vector got, want;
    float to[16];
    got.half[0] = fd_avx512_low(x.whole), got.half[1] = fd_avx512_high(x.whole);
    check_same("low and high", got, x, 0);
    got.whole = fd_avx512_splat(x.value[0]);
    want.half[0] = want.half[1] = fd_avx2_splat(x.value[0]);
    check_same("splat", got, want, 0);
    memset(to, 0x55, sizeof to);
    fd_avx512_store_lanes(to, x.whole, 8);
    memcpy(&got, to, sizeof got);
    memset(&want, 0x55, sizeof want);
    want.half[0] = x.half[0];
    check_same("store_lanes", got, want, 0);
}

#define CHECK_MADE(NAME, ...)                                       \
    got.whole = fd_avx512_##NAME(__VA_ARGS__(whole));               \
    for (int i = 0; i < 2; i++) want.half[i] = fd_avx2_##NAME(__VA_ARGS__(half[i]));
#define CHECK_X(part) x.part
#define CHECK_XY(part) x.part, y.part
#define CHECK_XYZ(part) x.part, y.part, z.part

static void check_arithmetic(check_vector x, check_vector y, check_vector z) {
    check_vector got, want;
    CHECK_MADE(max, CHECK_XY)
    check_same("max", got, want, 0);
    CHECK_MADE(min, CHECK_XY)
    check_same("min", got, want, 0);
    CHECK_MADE(fma, CHECK_XYZ)
    check_same("fma", got, want, 1);
    CHECK_MADE(exp, CHECK_X)
    check_same("exp", got, want, 1);
    CHECK_MADE(tanh, CHECK_X)
    check_same("tanh", got, want, 1);
}

/* Zeros, subnormals, infinities, not-a-number and what lies at the ends of exp's range, each with each; then any. */
static void check_values(void) {
    static const uint32_t special[] = {0, 0x80000000, 1, 0x807fffff, 0x00800000, 0x33800001, 0x3f200000, 0x3f800000,
                                       0xbf800000, 0x42b00000, 0xc2aeac4f, 0x4b400001, 0x7f7fffff, 0x7f800000,
                                       0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001};
    enum { COUNT = sizeof special / sizeof *special };
    uint64_t seed = 1;
    check_vector v[3];
    for (int round = 0; round < CHECK_ROUNDS; round++) {
        for (int i = 0; i < 48; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            v[i / 16].bits[i % 16] = round % 2 ? special[(seed >> 33) % COUNT] : (uint32_t)(seed >> 32);
        }
        check_parts(v[0]);
        check_arithmetic(v[0], v[1], v[2]);
    }
}

#pragma GCC pop_options

int main(void) {
    if (!isa_cpu_has("avx512")) {
        printf("primitives: this CPU has no AVX-512\n");
        return 1;
    }
    check_loads();
    check_integers();
    check_values();
    printf("primitives: %ld vectors, %ld wrong\n", check_compared, check_wrong);
    return check_wrong > 0;
}
