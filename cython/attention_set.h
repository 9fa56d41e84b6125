/* The kernel for the instruction set that attention_isas.h has just described; FD_PRIMITIVES is its own file. */
#include "attention_simd.h"
#include "attention_kernel.h"
#include "attention_work.h"
#include "roofline.h"
#undef ISA
#undef FD_ISA_NAME
#undef FD_PRIMITIVES
#undef FD_REGISTERS
#undef FD_INTEGERS
#undef FD_MOST
#undef VL
#undef vf
#undef vi
