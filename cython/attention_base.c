/* The kernel for the baseline, in its own translation unit: see attention_isas.h. */
#define FD_UNIT base
#include "attention.h"
