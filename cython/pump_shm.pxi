"""Shared memory as a plane."""

cdef extern from "plane_shm.h" nogil:
    int SHM_ENGINE, SHM_WORKER
    const fd_plane PLANE_SHM
    ctypedef struct shm_lane:
        pass
    ctypedef struct shm_plan:
        uint32_t slots[2]
        uint64_t slot_bytes[2]
        uint64_t cold_bytes
    size_t shm_layout(shm_lane *lanes, const shm_plan *plan)
    void *shm_attach(int fd, int side, const shm_plan *plan, char *reason, size_t reason_bytes)


cdef shm_plan plan_of(slots, sizes):
    cdef shm_plan plan
    plan.slots[0], plan.slots[1] = slots.num_latency, slots.num_bulk
    plan.slot_bytes[0], plan.slot_bytes[1] = slots.latency_nbytes, slots.bulk_nbytes
    plan.cold_bytes = sizes.max_cold_bytes
    return plan


def shm_segment_bytes(slots, sizes):
    """Returns the length of a connection's segment (SlotPlan, FrameSizes)."""
    cdef shm_lane lanes[2]
    cdef shm_plan plan = plan_of(slots, sizes)
    return shm_layout(lanes, &plan)


cdef class ShmPlane(Plane):
    """Maps a connection's segment, a sealed memfd; the descriptor stays the caller's.

    Raises:
        TransportError: the segment is not what was agreed on.
    """

    def __init__(self, int fd, slots, sizes, *, bint is_engine, uint64_t spin_ns=0):
        cdef char reason[200]
        cdef shm_plan plan = plan_of(slots, sizes)
        cdef void *state = shm_attach(fd, SHM_ENGINE if is_engine else SHM_WORKER, &plan, reason,
                                    sizeof(reason))
        if state == NULL:
            raise TransportError(f"shared memory: {reason.decode(errors='replace')}")
        Plane.__init__(self, table=<size_t>&PLANE_SHM, state=<size_t>state,
                       conn_bytes=sizeof(fd_conn), spin_ns=spin_ns)
