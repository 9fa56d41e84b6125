"""What carries frames besides a plain stream socket."""


cdef class Plane:
    """A data plane that is ready but for its connection: handed once to `Pump.add_stream` or to
    `FrameServer`, which it belongs to from then on.

    `table` is the address of an fd_plane (cython/plane.h), compiled against the same header as this
    module (`conn_bytes`), `state` that of what its functions find in fd_conn.state, and its `close`
    frees that. `owner` is kept alive by this object. `spin_ns`: how long to look for news before
    sleeping.
    """

    cdef const fd_plane *table
    cdef void *state
    cdef readonly object owner
    cdef public uint64_t spin_ns

    def __init__(self, *, size_t table, size_t state, size_t conn_bytes, uint64_t spin_ns=0, owner=None):
        if conn_bytes != sizeof(fd_conn):
            raise ImportError(
                "this data plane was compiled for another version of the pump: build both again")
        self.table = <const fd_plane *>table
        self.state = <void *>state
        self.owner = owner
        self.spin_ns = spin_ns

    def __dealloc__(self):
        cdef fd_conn conn
        if self.table == NULL or self.table.close == NULL:
            return
        memset(&conn, 0, sizeof(conn))
        conn.state = self.state
        self.table.close(&conn)

    cdef int install(self, fd_conn *conn) except -1:
        if self.table == NULL:
            raise LocalProtocolError("a data plane serves one connection")
        conn.plane = self.table
        conn.state = self.state
        conn.spin_ns = self.spin_ns
        self.table = NULL
        return 0
