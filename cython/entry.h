/* The two calls by which a data plane drives an attention session: plain function pointers, no GIL.
 * _attention provides them, _pump calls them; addresses travel as integers through Python. */
#ifndef FASTDECODE_ENTRY_H
#define FASTDECODE_ENTRY_H

#include <stdint.h>

/* Error codes, shared by both sides of the wire (fastdecode_rdma/config.py holds the same list). */
enum {
    FD_OK = 0,
    FD_E_TABLE = -1,    /* no such table, or it is not armed */
    FD_E_LAYER = -2,    /* layer out of range */
    FD_E_ROWS = -3,     /* number of rows is not the table's, or the payload's length does not fit */
    FD_E_RANGE = -4,    /* token range outside what the table allocated */
    FD_E_CACHE_FULL = -5,
    FD_E_SEQUENCE = -6, /* unknown sequence handle */
    FD_E_PROTOCOL = -7,
    FD_E_INTERNAL = -8,
};

/* Writes the rows' k, v at their positions and attends. row_status[i] bit 0: a non-finite value was seen. */
typedef int (*fd_attend_fn)(void *ctx, int32_t table, int32_t layer, int32_t num_rows, const void *qkv,
                            void *out, uint8_t *row_status);
/* Writes count rows of k and of v ([count, Hkv*D] each) at kv_len_before + offset of one entry. */
typedef int (*fd_store_fn)(void *ctx, int32_t table, int32_t layer, int32_t entry, int64_t offset,
                           int64_t count, const void *k, const void *v);

#endif
