/* The kernel once for each instruction set. A set has VL lanes, FD_REGISTERS vector registers, FD_INTEGERS if it
 * multiplies int8 and int4 rows as integers (attention_integer.h), and a file of primitives; everything else is written
 * once, over GCC's vector types. */

#define ISA(name) fd_base_##name
#define FD_ISA_NAME "baseline"
#define FD_PRIMITIVES "attention_base.h"
#define FD_REGISTERS 16
#define FD_INTEGERS 1
#define VL 4
#define vf v4f
#define vi v4i
#include "attention_set.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA(name) fd_avx2_##name
#define FD_ISA_NAME "avx2"
#define FD_PRIMITIVES "attention_avx2.h"
#define FD_REGISTERS 16
#define FD_INTEGERS 1
#define VL 8
#define vf v8f
#define vi v8i
#include "attention_set.h"
#pragma GCC pop_options
#endif

#if defined(__x86_64__)
#pragma GCC push_options
#ifdef FD_EMULATE_AVX512
#pragma GCC target("avx2,fma,f16c")
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif
#define ISA(name) fd_avx512_##name
#define FD_ISA_NAME "avx512"
#define FD_PRIMITIVES "attention_avx512.h"
#define FD_REGISTERS 32
#define FD_INTEGERS 1
#define VL 16
#define vf v16f
#define vi v16i
#include "attention_set.h"
#pragma GCC pop_options
#endif

#if defined(__aarch64__)
#define ISA(name) fd_neon_##name
#define FD_ISA_NAME "neon"
#define FD_PRIMITIVES "attention_neon.h"
#define FD_REGISTERS 32
#define FD_INTEGERS 0 /* its products of 16-bit integers add no neighbours; not measured on such a processor */
#define VL 4
#define vf v4f
#define vi v4i
#include "attention_set.h"
#endif

/* The kernels of this build, best first. */
static const fd_isa *const fd_isas[] = {
#if defined(__x86_64__)
    &fd_avx512_table,
    &fd_avx2_table,
#endif
#if defined(__aarch64__)
    &fd_neon_table,
#endif
    &fd_base_table,
};
enum { FD_NUM_ISAS = sizeof fd_isas / sizeof *fd_isas };

/* Returns the kernel of that name, or NULL when this build or this CPU does not have it. */
static const fd_isa *fd_find_isa(const char *name) {
    for (int i = 0; i < FD_NUM_ISAS; i++)
        if (!strcmp(name, fd_isas[i]->name)) return isa_cpu_has(name) ? fd_isas[i] : NULL;
    return NULL;
}
