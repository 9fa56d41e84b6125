/* The kernel once for each instruction set. A set has VL lanes, FD_REGISTERS vector registers, FD_INTEGERS if it
 * multiplies int8 and int4 rows as integers (attention_integer.h), and a file of primitives; everything else is written
 * once, over GCC's vector types.
 *
 * Each set takes the compiler seconds. With FD_APART it is left to a translation unit of its own, attention_<set>.c,
 * which says FD_UNIT: it sees all sets, as one may use another's primitives, and keeps the functions of the one that it
 * gives away. Without FD_APART (tests/kernels) all of them are here. */
#if defined(FD_APART) && !defined(FD_UNIT)
#define FD_TABLE(set) fd_##set##_unit
#else
#define FD_TABLE(set) fd_##set##_table

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
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
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
#endif

#ifdef FD_UNIT
#define FD_GIVE(set) FD_GIVEN(set)
#define FD_GIVEN(set) extern const fd_isa fd_##set##_unit __attribute__((alias("fd_" #set "_table"), visibility("hidden")))
FD_GIVE(FD_UNIT);
#elif defined(FD_APART)
extern const fd_isa fd_base_unit, fd_avx2_unit, fd_avx512_unit, fd_neon_unit; /* those that are used have to exist */
#endif

/* The kernels of this build, best first. */
static const fd_isa *const fd_isas[] = {
#if defined(__x86_64__)
    &FD_TABLE(avx512),
    &FD_TABLE(avx2),
#endif
#if defined(__aarch64__)
    &FD_TABLE(neon),
#endif
    &FD_TABLE(base),
};
enum { FD_NUM_ISAS = sizeof fd_isas / sizeof *fd_isas };

/* Returns the kernel of that name, or NULL when this build or this CPU does not have it. */
static const fd_isa *fd_find_isa(const char *name) {
    for (int i = 0; i < FD_NUM_ISAS; i++)
        if (!strcmp(name, fd_isas[i]->name)) return isa_cpu_has(name) ? fd_isas[i] : NULL;
    return NULL;
}
