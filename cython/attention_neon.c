/* The kernel for NEON, in its own translation unit: see attention_isas.h. */
#if defined(__aarch64__)
#define FD_UNIT neon
#include "attention.h"
#endif
