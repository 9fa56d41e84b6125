/* The memory that two processes of one machine share for one connection: its layout, and what it must be
 * before anybody touches it. See plane_shm.h. */
#ifndef FASTDECODE_SHM_SEGMENT_H
#define FASTDECODE_SHM_SEGMENT_H

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "plane.h"

enum { SHM_PAGE = 4096 };
enum { SHM_ENGINE = 0, SHM_WORKER = 1 }; /* sides; a lane has the number of the side that sends on it */
enum { SHM_WANTS_FRAME = 1, SHM_WANTS_ROOM = 2 };
#define SHM_TMPFS 0x01021994
#define SHM_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

enum { SHM_MAX_SLOTS = 256, SHM_BIG = 256 /* slot number of the area for what fits none */, SHM_NOWHERE = 257 };

typedef struct {
    _Alignas(64) _Atomic uint32_t published; /* by the sender: frames since the start */
    _Alignas(64) _Atomic uint32_t released;  /* by the receiver: of those, done with */
    _Alignas(64) _Atomic uint32_t sleeping;  /* what the side of this number sleeps for, SHM_WANTS_* */
} shm_counters;

_Static_assert(2 * sizeof(shm_counters) <= SHM_PAGE, "both lanes' counters fit into the first page");

typedef struct {
    fd_frame head;
    uint32_t slot; /* of the payload, in the class of its kind; SHM_BIG; or SHM_NOWHERE if there is none */
    uint32_t unused[15];
} shm_entry;

typedef struct {
    uint32_t entries, slots[FD_CLASSES];
    size_t slot_bytes[FD_CLASSES], big_bytes;
    size_t entry_at, slot_at[FD_CLASSES], big_at; /* from the start of the segment */
} shm_lane;

typedef struct {
    uint16_t class, slot;
} shm_use;

/* What both sides agree on; fixes the whole layout. */
typedef struct {
    uint32_t slots[FD_CLASSES];
    uint64_t slot_bytes[FD_CLASSES];
    uint64_t cold_bytes;
} shm_plan;

typedef struct {
    char *base;
    size_t nbytes;
    int side;
    shm_lane lane[2];
    uint32_t published, tx_entry; /* on our lane */
    uint32_t freed, freed_entry;  /* of those, released frames whose slots we have taken back */
    uint32_t room_seen;           /* released count at which there was no room */
    shm_use *use;                 /* [entries] what the frames under way lie in */
    uint8_t busy[FD_CLASSES][SHM_NOWHERE + 1];
    uint32_t taken, rx_entry, rx_slot; /* on the peer's lane */
    int holding;                       /* the frame taken last is not released yet */
    int ended;                         /* the socket has ended: */
    uint32_t last;                     /* frames published until then */
} shm_state;

static size_t shm_pages(size_t nbytes) { return (nbytes + SHM_PAGE - 1) / SHM_PAGE * SHM_PAGE; }

/* Lays out both lanes; returns the length of the segment. Replies are answers: as many as there may be
 * requests for rows, all in slots of the latency class. */
static size_t shm_layout(shm_lane *lanes, const shm_plan *plan) {
    size_t at = SHM_PAGE;
    for (int side = 0; side < 2; side++) {
        shm_lane *lane = &lanes[side];
        memset(lane, 0, sizeof *lane);
        for (int k = 0; k < FD_CLASSES; k++) {
            if (side == SHM_WORKER && k != FD_LATENCY) continue;
            lane->slots[k] = plan->slots[k];
            lane->slot_bytes[k] = shm_pages(plan->slot_bytes[k]);
        }
        lane->entries = lane->slots[FD_LATENCY];
        if (side == SHM_ENGINE) /* credits limit requests: an entry is free by the time its slot is */
            lane->entries = 2 * (lane->slots[FD_LATENCY] + lane->slots[FD_BULK]);
        lane->entry_at = at;
        at += shm_pages(lane->entries * sizeof(shm_entry));
        for (int k = 0; k < FD_CLASSES; k++) {
            lane->slot_at[k] = at;
            at += lane->slots[k] * lane->slot_bytes[k];
        }
        lane->big_at = at;
        lane->big_bytes = shm_pages(plan->cold_bytes);
        at += lane->big_bytes;
    }
    return at;
}

static shm_counters *shm_lane_counters(const shm_state *s, int side) { return (shm_counters *)s->base + side; }

/* Where the payload of a frame lies, NULL if it cannot lie there. */
static char *shm_place(const shm_state *s, int side, uint16_t kind, uint32_t slot, uint64_t nbytes) {
    const shm_lane *lane = &s->lane[side];
    int class = frame_class(kind);
    if (!nbytes) return s->base;
    if (slot == SHM_BIG) return nbytes <= lane->big_bytes ? s->base + lane->big_at : NULL;
    if (slot >= lane->slots[class] || nbytes > lane->slot_bytes[class]) return NULL;
    return s->base + lane->slot_at[class] + slot * lane->slot_bytes[class];
}

/* Maps a segment; NULL and the reason if it is not what was agreed on. A segment that its maker could still
 * cut short would kill whoever touches the rest. */
static shm_state *shm_attach(int fd, int side, const shm_plan *plan, char *reason, size_t reason_bytes) {
    shm_lane lanes[2];
    for (int k = 0; k < FD_CLASSES; k++)
        if (plan->slots[k] < 1 || plan->slots[k] > SHM_MAX_SLOTS) {
            snprintf(reason, reason_bytes, "%u slots of a class, 1 to %d may be", plan->slots[k], SHM_MAX_SLOTS);
            return NULL;
        }
    size_t nbytes = shm_layout(lanes, plan);
    struct stat file;
    struct statfs system;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &file) || fstatfs(fd, &system)) {
        snprintf(reason, reason_bytes, "it is no memory segment");
        return NULL;
    }
    if ((seals & SHM_SEALS) != SHM_SEALS || system.f_type != SHM_TMPFS) {
        snprintf(reason, reason_bytes, "the segment is not sealed: its length could change");
        return NULL;
    }
    if ((uint64_t)file.st_size != nbytes) {
        snprintf(reason, reason_bytes, "the segment has %lld bytes where %zu were agreed on", (long long)file.st_size,
                 nbytes);
        return NULL;
    }
    shm_state *s = calloc(1, sizeof *s);
    if (s) s->use = calloc(lanes[side].entries, sizeof *s->use);
    char *base = s && s->use ? mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (base == MAP_FAILED) {
        snprintf(reason, reason_bytes, "cannot map %zu bytes: %s", nbytes, strerror(errno));
        if (s) free(s->use);
        free(s);
        return NULL;
    }
    s->base = base;
    s->nbytes = nbytes;
    s->side = side;
    memcpy(s->lane, lanes, sizeof lanes);
    return s;
}

/* Frees what shm_attach() returned. */
static void shm_detach(shm_state *s) {
    if (!s) return;
    munmap(s->base, s->nbytes);
    free(s->use);
    free(s);
}

#endif
