/* What this machine can do at best: bytes read per second, fused multiply-adds per second, both at once. Included once
 * per instruction set; the figures stand beside the kernel's own (fastdecode bench attention). */

/* Reads pieces of a buffer: plain streaming loads, as a kernel that did nothing else would. */
static void ISA(read_body)(void *arg, int tid) {
    fd_probe *job = arg;
    vf sum[8] = {{0}};
    (void)tid;
    for (;;) {
        int64_t piece = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (piece >= job->num_pieces) break;
        const char *p = job->buffer + piece * FD_READ_PIECE;
        for (int64_t at = 0; at < FD_READ_PIECE; at += 8 * (int64_t)sizeof(vf))
            for (int i = 0; i < 8; i++) sum[i] += ISA(load)((const float *)(p + at) + i * VL);
    }
    for (int i = 1; i < 8; i++) sum[0] += sum[i];
    if (sum[0][0] != sum[0][0]) atomic_store(&job->sink, 1); /* never: the buffer holds zeros */
}

/* Twelve chains of fused multiply-adds, enough to fill two pipes of four or five cycles. */
static void ISA(fma_body)(void *arg, int tid) {
    fd_probe *job = arg;
    vf a[12], b = ISA(splat)(0.999999f), c = ISA(splat)(1e-6f);
    (void)tid;
    for (int i = 0; i < 12; i++) a[i] = ISA(splat)(1.0f + (float)i);
    for (;;) {
        if (atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed) >= job->num_pieces) break;
        for (int n = 0; n < FD_FMA_ROUNDS; n++)
            for (int i = 0; i < 12; i++) a[i] = ISA(fma)(a[i], b, c);
    }
    for (int i = 1; i < 12; i++) a[0] += a[i];
    if (a[0][0] != a[0][0]) atomic_store(&job->sink, 1);
}

/* The place of the n-th chunk that is read: every chunk once, no two neighbours in turn. */
FD_INLINE const char *ISA(chunk_at)(const fd_probe *job, int64_t n) {
    return job->buffer + (uint64_t)n * FD_CHUNK_STRIDE % (uint64_t)job->num_chunks * (uint64_t)job->chunk_bytes;
}

/* Reads chunks of a buffer at scattered places while it multiplies: what is left of the roof when memory and
 * arithmetic have to overlap, in a loop that does nothing else. */
static void ISA(both_body)(void *arg, int tid) {
    enum { LOADS = 64 / (int)sizeof(vf), AHEAD = 64 * 64 };
    fd_probe *job = arg;
    vf sum[LOADS] = {{0}}, a[8], b = ISA(splat)(0.999999f), c = ISA(splat)(1e-6f);
    (void)tid;
    for (int i = 0; i < 8; i++) a[i] = ISA(splat)(1.0f + (float)i);
    for (;;) {
        const int64_t piece = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (piece >= job->num_pieces) break;
        for (int64_t n = piece * FD_PIECE_CHUNKS; n < (piece + 1) * FD_PIECE_CHUNKS; n++) {
            const char *here = ISA(chunk_at)(job, n), *then = ISA(chunk_at)(job, n + 1);
            for (int64_t at = 0; at < job->chunk_bytes; at += 256) {
                FD_UNROLL
                for (int line = 0; line < 256; line += 64) {
                    const int64_t ahead = at + line + AHEAD, rest = ahead - job->chunk_bytes;
                    __builtin_prefetch(rest < 0 ? here + ahead : then + rest);
                    FD_UNROLL
                    for (int i = 0; i < LOADS; i++) sum[i] += ISA(load)((const float *)(here + at + line) + i * VL);
                }
                for (int64_t round = 0; round < job->rounds; round++) {
                    FD_UNROLL
                    for (int i = 0; i < 8; i++) a[i] = ISA(fma)(a[i], b, c);
                }
            }
        }
    }
    for (int i = 0; i < LOADS; i++) a[0] += sum[i];
    for (int i = 1; i < 8; i++) a[0] += a[i];
    if (a[0][0] != a[0][0]) atomic_store(&job->sink, 1);
}

static const fd_isa ISA(table) = {FD_ISA_NAME, ISA(body), ISA(write), ISA(read_body), ISA(fma_body), ISA(both_body), VL};
