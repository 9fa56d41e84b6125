/* The kernel for AVX2, in its own translation unit: see attention_isas.h. */
#if defined(__x86_64__)
#define FD_UNIT avx2
#include "attention.h"
#endif
