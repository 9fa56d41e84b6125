"""The attention worker's C side: KV memory, step tables and the kernel. Thin: worker/attention.py validates."""

from libc.stdlib cimport free
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

cdef extern from "team.h" nogil:
    void team_bind(uintptr_t address)

cdef extern from "attention.h" nogil:
    enum:
        FD_BLOCK
        FD_SEG
        FD_TABLES
        FD_NODES
    ctypedef struct fd_isa:
        const char *name
        int lanes
    ctypedef struct fd_line:
        pass
    ctypedef struct fd_layer:
        int32_t group
        int32_t index
    ctypedef struct fd_slab:
        char *base
        fd_slab *next
    ctypedef struct fd_pool:
        int64_t num_free
    ctypedef struct fd_group:
        fd_pool *pools
        int64_t num_free
        int64_t num_used
        size_t block_bytes
    ctypedef struct fd_ctx:
        int32_t num_groups
        int32_t closed
        int32_t num_nodes
        int32_t kv_dtype
        int32_t wire_dtype
        int64_t max_rows
        int64_t max_model_len
        float scale
        float softcap
        fd_group *groups
        fd_layer *layers
        uint64_t kernel_ns
        uint64_t attends

    int FD_NUM_ISAS
    const fd_isa *fd_isas[]
    const fd_isa *fd_find_isa(const char *name)
    fd_ctx *fd_open(int32_t num_groups, int32_t num_layers, int32_t num_threads, const char *isa)
    void fd_set_group(fd_ctx *ctx, int32_t g, int32_t num_layers, int32_t num_q_heads, int32_t num_kv_heads,
                      int32_t head_dim, int64_t window, int64_t ring)
    int fd_set_scores(fd_ctx *ctx, int32_t g, const float *sinks, const float *slopes)
    int fd_alloc_scratch(fd_ctx *ctx)
    int fd_set_nodes(fd_ctx *ctx, int32_t num_nodes, int32_t num_cpus, const uint8_t *cpu_nodes)
    fd_slab *fd_close(fd_ctx *ctx)
    void fd_destroy(fd_ctx *ctx)
    int fd_add_slab(fd_ctx *ctx, int32_t group, int32_t node, int64_t num_blocks, void *base)
    fd_slab *fd_trim(fd_ctx *ctx)
    int32_t fd_seq_new(fd_ctx *ctx, int32_t node)
    int fd_seq_free(fd_ctx *ctx, int32_t slot)
    int fd_fork(fd_ctx *ctx, int32_t src, int32_t dst, int64_t length)
    int64_t fd_written(fd_ctx *ctx, int32_t slot)
    int64_t fd_export_start(fd_ctx *ctx, int32_t slot, int32_t group, int64_t start)
    int fd_copy_range(fd_ctx *ctx, int32_t slot, int32_t group, int64_t start, int64_t stop, char *data, int32_t load)
    int fd_begin(fd_ctx *ctx, int32_t table, uint32_t step, int32_t n, const fd_line *lines, const int32_t *slots,
                 int32_t spill, int64_t *missing, int32_t *bad)
    int fd_attend(void *ctx, int32_t table, int32_t layer, int32_t num_rows, const void *qkv, void *out,
                  uint8_t *row_status)
    int fd_store(void *ctx, int32_t table, int32_t layer, int32_t entry, int64_t offset, int64_t count,
                 const void *k, const void *v)

    int FD_READ_PIECE
    int FD_FMA_ROUNDS
    int FD_PIECE_CHUNKS
    uint64_t fd_probe_read(const fd_isa *isa, const void *buffer, int64_t nbytes, int threads)
    uint64_t fd_probe_fma(const fd_isa *isa, int64_t num_pieces, int threads)
    uint64_t fd_probe_both(const fd_isa *isa, const void *buffer, int64_t num_chunks, int64_t chunk_bytes,
                           int64_t rounds, int threads)

BLOCK_TOKENS = FD_BLOCK
SEGMENT_TOKENS = FD_SEG
NUM_TABLES = FD_TABLES
ISA_NAMES = tuple(fd_isas[i].name.decode() for i in range(FD_NUM_ISAS))  # of this build, best first
MAX_NODES = FD_NODES


def bind_team(uintptr_t address):
    """Runs parallel regions on the team at that address (_team.address())."""
    team_bind(address)


def has_isa(str name):
    """Returns whether this build has that kernel and this CPU can run it."""
    encoded = name.encode()
    return fd_find_isa(encoded) != NULL


def read_seconds(str isa, uintptr_t buffer, int64_t nbytes, int num_threads):
    """Seconds of one pass over a buffer of whole MiB, which holds zeros, by plain loads on the team's threads."""
    cdef uint64_t ns
    encoded = isa.encode()
    cdef const fd_isa *kernel = fd_find_isa(encoded)
    if kernel == NULL or nbytes < FD_READ_PIECE or nbytes % FD_READ_PIECE:
        raise ValueError("an instruction set of this CPU and whole MiB are needed")
    with nogil:
        ns = fd_probe_read(kernel, <const void *>buffer, nbytes, num_threads)
    return ns / 1e9


def multiply_adds_per_s(str isa, int64_t num_pieces, int num_threads):
    """fp32 fused multiply-adds per second of the team's threads together, from registers."""
    cdef uint64_t ns
    encoded = isa.encode()
    cdef const fd_isa *kernel = fd_find_isa(encoded)
    if kernel == NULL or num_pieces < 1:
        raise ValueError("an instruction set of this CPU and at least one piece are needed")
    with nogil:
        ns = fd_probe_fma(kernel, num_pieces, num_threads)
    return <double>num_pieces * FD_FMA_ROUNDS * 12 * kernel.lanes / ns * 1e9


def read_multiplying_bytes_per_s(str isa, uintptr_t buffer, int64_t nbytes, int64_t chunk_bytes,
                                 double multiply_adds_per_byte, int num_threads):
    """Bytes per second read in chunks of a multiple of 256 bytes at scattered places of a buffer, which holds zeros,
    while each byte costs so many fp32 multiply-adds (rounded to whole rounds of eight vectors for 256 bytes)."""
    cdef uint64_t ns
    encoded = isa.encode()
    cdef const fd_isa *kernel = fd_find_isa(encoded)
    cdef int64_t num_chunks, rounds
    if kernel == NULL or chunk_bytes < 256 or chunk_bytes % 256 or nbytes < chunk_bytes * FD_PIECE_CHUNKS:
        raise ValueError("an instruction set of this CPU and a buffer of at least 16 chunks are needed")
    num_chunks = nbytes // chunk_bytes // FD_PIECE_CHUNKS * FD_PIECE_CHUNKS
    rounds = round(multiply_adds_per_byte * 256 / (8 * kernel.lanes))
    with nogil:
        ns = fd_probe_both(kernel, <const void *>buffer, num_chunks, chunk_bytes, rounds, num_threads)
    return num_chunks * chunk_bytes / (ns / 1e9)


cdef class Context:
    """One session's state in C. Addresses are plain integers; the caller keeps the memory behind them alive."""

    cdef fd_ctx *ctx
    cdef dict slabs  # by address: what keeps the memory of a slab alive while the C side may use it

    def __cinit__(self, list groups, int num_layers, int num_threads, str isa, int kv_dtype, int wire_dtype,
                  long long max_rows, long long max_model_len, double scale, double softcap, bytes cpu_nodes):
        """`groups`: (layers, num_q_heads, num_kv_heads, head_dim, window or 0, ring blocks or 0, address of the
        sinks or 0, address of the slopes or 0) each; sinks float32 [layers, num_q_heads], slopes [num_q_heads]."""
        encoded = isa.encode()
        self.slabs = {}
        self.ctx = fd_open(<int32_t>len(groups), num_layers, num_threads, encoded)
        if self.ctx == NULL:
            raise MemoryError("no memory for an attention session")
        if cpu_nodes and not fd_set_nodes(self.ctx, max(cpu_nodes) + 1, <int32_t>len(cpu_nodes),
                                          <const uint8_t *>cpu_nodes):
            raise MemoryError("no memory for an attention session")
        self.ctx.kv_dtype = kv_dtype
        self.ctx.wire_dtype = wire_dtype
        self.ctx.max_rows = max_rows
        self.ctx.max_model_len = max_model_len
        self.ctx.scale = <float>scale
        self.ctx.softcap = <float>softcap
        for g, (layers, num_q_heads, num_kv_heads, head_dim, window, ring, sinks, slopes) in enumerate(groups):
            fd_set_group(self.ctx, g, <int32_t>len(layers), num_q_heads, num_kv_heads, head_dim, window, ring)
            if not fd_set_scores(self.ctx, g, <const float *><uintptr_t>sinks, <const float *><uintptr_t>slopes):
                raise MemoryError("no memory for an attention session")
            for index, layer in enumerate(layers):
                self.ctx.layers[<int>layer].group = g
                self.ctx.layers[<int>layer].index = index
        if not fd_alloc_scratch(self.ctx):
            raise MemoryError("no memory for the scratch of the attention threads")

    def __dealloc__(self):
        if self.ctx != NULL:
            fd_destroy(self.ctx)

    @property
    def address(self):
        return <uintptr_t>self.ctx

    @property
    def attend_address(self):
        return <uintptr_t>&fd_attend

    @property
    def store_address(self):
        return <uintptr_t>&fd_store

    cdef list _take_back(self, fd_slab *chain):
        cdef fd_slab *slab
        taken = []
        while chain != NULL:
            slab, chain = chain, chain.next
            taken.append(self.slabs.pop(<uintptr_t>slab.base))
            free(slab)
        return taken

    def close(self):
        """Frees all memory, waiting for a running attend; returns what add_slab() was given."""
        cdef fd_slab *chain
        with nogil:
            chain = fd_close(self.ctx)
        return self._take_back(chain)

    def add_slab(self, int32_t group, int32_t node, int64_t num_blocks, uintptr_t address, slab):
        """Adds blocks at an address, whose memory stays while `slab` lives."""
        cdef int code
        with nogil:
            code = fd_add_slab(self.ctx, group, node, num_blocks, <void *>address)
        if not code:
            self.slabs[address] = slab
        return code

    def trim(self):
        """Returns what add_slab() was given for the slabs that hold nothing now."""
        cdef fd_slab *chain
        with nogil:
            chain = fd_trim(self.ctx)
        return self._take_back(chain)

    def new_sequence(self, int32_t node):
        cdef int32_t slot
        with nogil:
            slot = fd_seq_new(self.ctx, node)
        return slot

    def free_sequence(self, int32_t slot):
        cdef int code
        with nogil:
            code = fd_seq_free(self.ctx, slot)
        return code

    def fork(self, int32_t src, int32_t dst, int64_t length):
        cdef int code
        with nogil:
            code = fd_fork(self.ctx, src, dst, length)
        return code

    def written(self, int32_t slot):
        cdef int64_t length
        with nogil:
            length = fd_written(self.ctx, slot)
        return length

    def export_start(self, int32_t slot, int32_t group, int64_t start):
        cdef int64_t first
        with nogil:
            first = fd_export_start(self.ctx, slot, group, start)
        return first

    def copy_range(self, int32_t slot, int32_t group, int64_t start, int64_t stop, uintptr_t data, int32_t load):
        cdef int code
        with nogil:
            code = fd_copy_range(self.ctx, slot, group, start, stop, <char *>data, load)
        return code

    def begin(self, int32_t table, uint32_t step, int32_t n, uintptr_t lines, uintptr_t slots, int32_t spill,
              uintptr_t missing):
        """Returns (code, offending line or -1)."""
        cdef int code
        cdef int32_t bad = -1
        with nogil:
            code = fd_begin(self.ctx, table, step, n, <const fd_line *>lines, <const int32_t *>slots, spill,
                            <int64_t *>missing, &bad)
        return code, bad

    def attend(self, int32_t table, int32_t layer, int32_t num_rows, uintptr_t qkv, uintptr_t out, uintptr_t status):
        cdef int code
        with nogil:
            code = fd_attend(self.ctx, table, layer, num_rows, <const void *>qkv, <void *>out, <uint8_t *>status)
        return code

    def store(self, int32_t table, int32_t layer, int32_t entry, int64_t offset, int64_t count, uintptr_t k, uintptr_t v):
        cdef int code
        with nogil:
            code = fd_store(self.ctx, table, layer, entry, offset, count, <const void *>k, <const void *>v)
        return code

    def group_blocks(self, int32_t group):
        """Returns (used blocks, free blocks, bytes of a block)."""
        cdef fd_group *g = &self.ctx.groups[group]
        return g.num_used, g.num_free, g.block_bytes

    def free_blocks(self, int32_t group):
        """Returns the free blocks of each node."""
        return [self.ctx.groups[group].pools[node].num_free for node in range(self.ctx.num_nodes)]

    def counters(self):
        """Returns (attend calls, nanoseconds spent in them)."""
        return self.ctx.attends, self.ctx.kernel_ns
