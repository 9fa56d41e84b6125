/* How rows of K lie in a block. A score adds products along the head dimension; with one dimension of several tokens in a
 * vector they all add up lane by lane, and none across lanes. So eight tokens, a tile, lie interleaved:
 *   fp32, fp16, bf16  [head_dim][token]
 *   int8              [token] scales, [head_dim / 2][token][2]
 *   int4              of each group of 32 dimensions [token] headers, then [dimensions / 4][token][2] bytes: of four
 *                     dimensions the low nibbles hold the first two, the high ones the others
 * in as many bytes as eight rows take. Everywhere else (exports, attention_quant.h) a row is a row. */

enum { FD_TILE_TOKENS = 8 };
_Static_assert(FD_BLOCK % FD_KEY_STEP_ROWS == 0 && FD_KEY_STEP_ROWS % FD_TILE_TOKENS == 0, "steps of whole tiles");

/* Copies words of 2 or 4 bytes between a row and its lane of a tile; neither need be aligned. */
static inline __attribute__((always_inline)) void fd_lane(int put, const size_t size, size_t count, char *lane,
                                                          char *row) {
    for (size_t i = 0; i < count; i++, lane += size * FD_TILE_TOKENS, row += size)
        if (put) memcpy(lane, row, size);
        else memcpy(row, lane, size);
}

/* The nibbles of one int4 group, of 8 or 16 bytes: 8 bytes of a row hold 16 dimensions, the first 8 in low nibbles. */
static inline void fd_lane_nibbles(int put, size_t nbytes, char *lane, char *row) {
    for (size_t quad = 0; quad < nbytes / 2; quad++) /* dimensions 4 * quad and on */
        for (size_t i = 0; i < 2; i++) {
            const size_t first = 4 * quad + i; /* and first + 2 */
            char *low = row + first / 16 * 8 + first % 8, *both = lane + quad * 2 * FD_TILE_TOKENS + i;
            const int shift = first % 16 < 8 ? 0 : 4;
            if (put) *both = (char)((*low >> shift & 15) | (low[2] >> shift & 15) << 4);
            else low[0] = (char)(low[0] | (*both & 15) << shift), low[2] = (char)(low[2] | (*both >> 4 & 15) << shift);
        }
}

/* Writes the row of K at token `token` of a block's head, or reads it; `head` is the head's first tile. */
static inline void fd_key_row(int put, int dtype, size_t dim, char *head, size_t row_bytes, int64_t token, char *row) {
    const size_t lane = (size_t)(token % FD_TILE_TOKENS);
    char *tile = head + (size_t)(token - (int64_t)lane) * row_bytes;
    switch (dtype) {
        case FD_FP32: fd_lane(put, 4, dim, tile + 4 * lane, row); return;
        case FD_INT8:
            fd_lane(put, 4, 1, tile + 4 * lane, row);
            fd_lane(put, 2, dim / 2, tile + FD_INT8_SCALE_BYTES * FD_TILE_TOKENS + 2 * lane, row + FD_INT8_SCALE_BYTES);
            return;
        case FD_INT4:
            for (size_t left = row_bytes, nbytes; left; left -= nbytes, row += nbytes, tile += nbytes * FD_TILE_TOKENS) {
                nbytes = left < FD_INT4_GROUP_BYTES ? left : FD_INT4_GROUP_BYTES;
                fd_lane(put, 4, 1, tile + 4 * lane, row);
                if (!put) memset(row + 4, 0, nbytes - 4);
                fd_lane_nibbles(put, nbytes - 4, tile + 4 * FD_TILE_TOKENS + 2 * lane, row + 4);
            }
            return;
        default: fd_lane(put, 2, dim, tile + 2 * lane, row);
    }
}
