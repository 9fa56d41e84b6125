/* Which instruction sets this CPU and its system can run: one rule for all kernels (fastdecode_rdma/isa.py).
 * What a name promises here, the code between its "#pragma GCC target" may use, and no more. */
#ifndef FASTDECODE_ISA_H
#define FASTDECODE_ISA_H

#include <string.h>

static inline int isa_cpu_has(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!strcmp(name, "avx2")) return avx2;
#ifdef FD_EMULATE_AVX512 /* a build for tests: see attention_avx512.h */
    if (!strcmp(name, "avx512")) return avx2;
#endif
    if (!strcmp(name, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) return 1; /* part of every ARMv8 */
#endif
    return !strcmp(name, "baseline");
}

#endif
