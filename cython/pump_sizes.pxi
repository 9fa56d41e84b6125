"""Row widths in C: read from transport.base.FrameSizes once per pump or server."""


cdef uint64_t *copy_widths(widths) except NULL:
    cdef uint64_t *copied = <uint64_t *>calloc(max(1, len(widths)), sizeof(uint64_t))
    if copied == NULL:
        raise MemoryError
    for i, width in enumerate(widths):
        copied[i] = width
    return copied


cdef fill_sizes(fd_sizes *out, sizes):
    out.num_layers = len(sizes.row_bytes)
    out.max_rows = sizes.max_rows
    out.max_bulk = sizes.max_bulk_bytes
    out.max_cold = sizes.max_cold_bytes
    out.row_bytes = copy_widths(sizes.row_bytes)
    out.out_bytes = copy_widths(sizes.out_bytes)
    out.kv_bytes = copy_widths(sizes.kv_bytes)


cdef void free_sizes(fd_sizes *sizes) noexcept:
    free(sizes.row_bytes)
    free(sizes.out_bytes)
    free(sizes.kv_bytes)
