/* The 64-byte header of every data-plane frame, little-endian. fastdecode_rdma/wire/frame.py holds the
 * same layout; tests/wire/test_frame.py keeps the two equal. */
#ifndef FASTDECODE_FRAME_H
#define FASTDECODE_FRAME_H

#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian structs copied as they lie: a big-endian host needs byte swaps here"
#endif

#define FD_MAGIC 0x31524446u /* the bytes "FDR1" */
#define FD_NO_TABLE 0xFFFFu  /* table of an error that belongs to no step */

enum {
    FD_MAX_TABLES = 8,
    FD_TEXT_BYTES = 1024, /* longest text of an error frame */
    FD_ENTRY_BYTES = 24,  /* one line of a BEGIN_STEP payload, config.ENTRY_DTYPE */
};

enum {
    FD_BEGIN_STEP = 1,
    FD_ATTEND = 2,
    FD_KV_ROWS = 3,
    FD_FREE = 4,
    FD_FORK = 5,
    FD_EXPORT = 6,
    FD_IMPORT = 7,
    FD_BENCH_PING = 8, /* the payload comes back */
    FD_BENCH_DATA = 9, /* the payload is dropped */
    FD_BENCH_READ = 10, /* `offset` bytes come back */
    FD_ATTEND_REPLY = 16,
    FD_CREDIT = 17,
    FD_STEP_READY = 18,
    FD_STEP_ERROR = 19,
    FD_EXPORT_REPLY = 20,
    FD_IMPORT_REPLY = 21,
    FD_BENCH_REPLY = 22,
};

/* Slot classes: K/V streaming has slots of its own so that it cannot hold up attention. */
enum { FD_LATENCY = 0, FD_BULK = 1, FD_CLASSES = 2 };

typedef struct {
    uint32_t magic;
    uint16_t kind;
    uint16_t table;
    uint64_t epoch;    /* random per connection: frames of an earlier one are refused */
    uint32_t sequence; /* per direction, from 0, one more per frame */
    uint32_t step;
    uint32_t layer;
    uint32_t rows;
    uint64_t nbytes; /* of the payload that follows */
    int32_t status;  /* FD_E_* of a reply */
    uint32_t consumed[FD_CLASSES]; /* frames of each class that the sender has consumed since the start */
    uint32_t entry;  /* KV_ROWS: line of the step table; cold frames: request number */
    uint64_t offset; /* KV_ROWS: first token; ATTEND_REPLY: nanoseconds the kernel took */
} fd_frame;

_Static_assert(sizeof(fd_frame) == 64, "the frame header is 64 bytes");
_Static_assert(offsetof(fd_frame, epoch) == 8 && offsetof(fd_frame, nbytes) == 32 &&
                   offsetof(fd_frame, consumed) == 44 && offsetof(fd_frame, offset) == 56,
               "the frame header's layout is fixed");

static inline int frame_class(uint16_t kind) {
    return kind == FD_KV_ROWS || kind == FD_EXPORT || kind == FD_IMPORT ? FD_BULK : FD_LATENCY;
}

/* Frames of a benchmark; only its own sessions take them. */
static inline int frame_is_bench(uint16_t kind) { return kind >= FD_BENCH_PING && kind <= FD_BENCH_READ; }

static inline int frame_from_engine(uint16_t kind) { return kind >= FD_BEGIN_STEP && kind <= FD_IMPORT; }

/* Byte widths of a model's rows, shared by both sides: what a header may claim is checked against these. */
typedef struct {
    uint32_t num_layers, max_rows;
    uint64_t *row_bytes; /* [num_layers] one [q | k | v] row */
    uint64_t *out_bytes; /* [num_layers] one attention output row */
    uint64_t *kv_bytes;  /* [num_layers] one k row (a v row is as long) */
    uint64_t max_bulk;   /* payload of a KV_ROWS frame */
    uint64_t max_cold;   /* payload of any other frame that carries no rows */
} fd_sizes;

#endif
