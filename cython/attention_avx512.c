/* The kernel for AVX-512, in its own translation unit: see attention_isas.h. */
#if defined(__x86_64__)
#define FD_UNIT avx512
#include "attention.h"
#endif
