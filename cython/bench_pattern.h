/* Payloads that both ends of a benchmark can work out: a lost, repeated, shifted or changed byte shows. */
#ifndef FASTDECODE_BENCH_PATTERN_H
#define FASTDECODE_BENCH_PATTERN_H

#include <stdint.h>
#include <string.h>

static inline uint64_t bench_word(uint64_t number, uint64_t index) {
    uint64_t word = (number + 1) * 0x9E3779B97F4A7C15u + index * 0xBF58476D1CE4E5B9u;
    return word ^ word >> 29;
}

static void bench_fill(char *to, size_t nbytes, uint64_t number) {
    size_t whole = nbytes / 8;
    for (size_t i = 0; i < whole; i++) {
        uint64_t word = bench_word(number, i);
        memcpy(to + 8 * i, &word, 8);
    }
    uint64_t word = bench_word(number, whole);
    memcpy(to + 8 * whole, &word, nbytes % 8);
}

/* The place of the first byte that is wrong, from 1; 0: all are right. */
static uint64_t bench_differs(const char *from, size_t nbytes, uint64_t number) {
    size_t whole = nbytes / 8, i = 0;
    for (; i < whole; i++) {
        uint64_t got, word = bench_word(number, i);
        memcpy(&got, from + 8 * i, 8);
        if (got != word) break;
    }
    uint64_t word = bench_word(number, i);
    for (size_t k = 0; k < 8 && 8 * i + k < nbytes; k++)
        if (from[8 * i + k] != ((const char *)&word)[k]) return 8 * i + k + 1;
    return 0;
}

#endif
