/* The kernels for the instruction set that dense.h has just described. */
#include "dense_tile.h"
#include "dense_gemm.h"
#include "dense_body.h"
#include "dense_attend.h"
#undef DENSE
#undef DENSE_VL
#undef DENSE_MR
#undef DENSE_TILE_ROWS
#undef DENSE_NP
#undef DENSE_WIDTHS
#undef DENSE_MADD
#undef DENSE_VECS
#undef DENSE_CASE
#undef DENSE_CASES
#undef DENSE_TILES
