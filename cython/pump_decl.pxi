"""Declarations of the headers for _pump.pyx."""

cdef extern from "sys/socket.h" nogil:
    int shutdown(int fd, int how)
    int SHUT_RDWR

cdef extern from "entry.h" nogil:
    ctypedef int (*fd_attend_fn)(void *, int32_t, int32_t, int32_t, const void *, void *, uint8_t *)
    ctypedef int (*fd_store_fn)(void *, int32_t, int32_t, int32_t, long long, long long,
                                const void *, const void *)

cdef extern from "frame.h" nogil:
    int FD_MAX_TABLES, FD_ENTRY_BYTES, FD_LATENCY, FD_BULK, FD_NO_TABLE, FD_BEGIN_STEP
    ctypedef struct fd_frame:
        uint32_t magic, sequence, step, layer, rows, entry
        uint16_t kind, table
        uint64_t epoch, nbytes, offset
        int32_t status
        uint32_t consumed[2]
    ctypedef struct fd_sizes:
        uint32_t num_layers, max_rows
        uint64_t *row_bytes
        uint64_t *out_bytes
        uint64_t *kv_bytes
        uint64_t max_bulk, max_cold

cdef extern from "pump_conn.h" nogil:
    int CONN_PROTOCOL, CONN_CLOSED
    ctypedef struct fd_plane:
        const char *name
        void *(*view)(fd_conn *)
        void (*close)(fd_conn *)
    ctypedef struct fd_conn:
        const fd_plane *plane
        void *state
        uint64_t spin_ns
        int fd, lost, lost_errno
        char reason[200]
        fd_frame head
        uint32_t slots[2]
        uint32_t sent[2]
        uint32_t peer_consumed[2]
        uint32_t consumed[2]
        uint32_t reported[2]
        uint64_t frames_sent, frames_received, bytes_sent, bytes_received, io_ns
    void conn_init(fd_conn *, int fd, uint64_t epoch, uint32_t latency, uint32_t bulk)
    void conn_close(fd_conn *, int close_fd)

cdef extern from "pump_steps.h" nogil:
    int PUMP_MAX_PORTS, PORT_LOCAL, PORT_STREAM, GOAL_READY, STEP_ARMED, STEP_SENT, STEP_ABORTED
    int PUMP_OK, PUMP_LOST, PUMP_STEP, PUMP_TIMEOUT, PUMP_MISUSE
    ctypedef struct port_error:
        int set
        uint16_t table
        int32_t code
        char text[1025]
    ctypedef struct port_table:
        int state
        uint32_t step, rows
        uint64_t kernel_ns
        void *entries
    ctypedef struct fd_port:
        int kind
        uint64_t max_bulk
        fd_conn conn
        fd_attend_fn attend
        fd_store_fn store
        void *ctx
        port_table tables[8]
        port_error error
        int32_t request_status
        char *cold
        size_t cold_bytes
        int doomed
        char doom_reason[200]
        uint64_t messages, kernel_ns, wait_ns, pump_ns
    ctypedef struct pump_table:
        char *send
        char *recv
        uint8_t *status
    ctypedef struct fd_pump:
        fd_port *ports[256]
        int num_ports
        fd_sizes sizes
        pump_table tables[8]
        uint64_t timeout_ns
        int fail_port
        const char *fail_text
    int pump_begin(fd_pump *, int index, int table, uint32_t step, uint32_t first_row, uint32_t rows,
                   const void *entries, uint32_t num_entries)
    void pump_retire(fd_pump *, int index, int table)
    int pump_layer(fd_pump *, int table, uint32_t layer, int submit, int collect)
    int pump_store(fd_pump *, int index, int table, uint32_t layer, uint32_t entry, uint64_t offset,
                   uint64_t count, const char *k, const char *v)
    int pump_cold(fd_pump *, int index, uint16_t kind, const void *payload, size_t nbytes, int wait_reply)
    int pump_wait(fd_pump *, int goal, int table, int only, uint64_t deadline)
    void pump_abort(fd_pump *, int table)
    void port_set_error(fd_port *, uint16_t table, uint32_t step, int32_t code, const char *text)
    int port_lost(fd_port *)
    void port_renew(fd_port *)
    void port_connect(fd_port *, const fd_conn *)
    int table_live(const port_table *)
    uint64_t pump_deadline(const fd_pump *, uint64_t nbytes)
    void port_doom(fd_port *, const char *reason)
    uint64_t entries_rows(const void *entries, uint32_t count)
