/* A reliable connected queue pair over libibverbs that the RDMA plane drives without Python. */
#ifndef FASTDECODE_VERBS_QUEUE_H
#define FASTDECODE_VERBS_QUEUE_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <string.h>

#include "rdma_queue.h"

enum { VERBS_ROUTE = 192, VERBS_BATCH = 16 };

static const uint64_t VERBS_RECEIVE = UINT64_MAX; /* wr_id of a receive; that of a write is its count */

typedef struct {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    char *slots; /* that we write from */
    uint32_t slot_bytes, max_inline;
    uint8_t reads;   /* that may be under way: for benchmarks, which post receives themselves */
    uint64_t remote; /* the peer's slots that we write to */
    uint32_t rkey;
    char route[VERBS_ROUTE]; /* for messages */
} verbs_queue;

typedef struct {
    uint32_t dest_qp, rq_psn, sq_psn, rkey;
    uint64_t remote;
    uint8_t gid[16];
    int is_global, gid_index, lid, port, mtu, sl, tclass, timeout, retry, pkey_index;
} verbs_route;

static int verbs_write(void *self, uint32_t slot, uint32_t nbytes, uint32_t imm, uint32_t count) {
    verbs_queue *q = self;
    uint64_t offset = (uint64_t)slot * q->slot_bytes;
    struct ibv_sge part = {(uintptr_t)q->slots + offset, nbytes, q->mr->lkey};
    struct ibv_send_wr request = {
        .wr_id = count,
        .sg_list = &part,
        .num_sge = nbytes ? 1 : 0,
        .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
        .imm_data = htonl(imm),
    };
    struct ibv_send_wr *bad;
    if (!q->qp) return ENOTCONN;
    request.wr.rdma.remote_addr = q->remote + offset;
    request.wr.rdma.rkey = q->rkey;
    if (count) request.send_flags |= IBV_SEND_SIGNALED;
    if (nbytes && nbytes <= q->max_inline) request.send_flags |= IBV_SEND_INLINE;
    return ibv_post_send(q->qp, &request, &bad);
}

static int verbs_receive(void *self, uint32_t count) {
    verbs_queue *q = self;
    struct ibv_recv_wr requests[VERBS_BATCH], *bad;
    if (!q->qp) return ENOTCONN;
    while (count) {
        uint32_t batch = count < VERBS_BATCH ? count : VERBS_BATCH;
        for (uint32_t i = 0; i < batch; i++)
            requests[i] = (struct ibv_recv_wr){.wr_id = VERBS_RECEIVE, .next = i + 1 < batch ? &requests[i + 1] : NULL};
        int error = ibv_post_recv(q->qp, requests, &bad);
        if (error) return error;
        count -= batch;
    }
    return 0;
}

static int verbs_poll(void *self, rdma_event *events, int max) {
    verbs_queue *q = self;
    struct ibv_wc done[VERBS_BATCH];
    if (!q->qp) return -ENOTCONN;
    int count = ibv_poll_cq(q->cq, max < VERBS_BATCH ? max : VERBS_BATCH, done);
    if (count < 0) return -EIO;
    for (int i = 0; i < count; i++) {
        int received = done[i].wr_id == VERBS_RECEIVE;
        events[i] = (rdma_event){.kind = received ? RDMA_RECEIVED : RDMA_SENT, .status = (int)done[i].status};
        if (done[i].status != IBV_WC_SUCCESS) continue;
        if (!received) events[i].count = (uint32_t)done[i].wr_id;
        else if (done[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
            events[i].imm = ntohl(done[i].imm_data);
            events[i].nbytes = done[i].byte_len;
        } else
            events[i].status = IBV_WC_BAD_RESP_ERR; /* the peer sent something else */
    }
    return count;
}

static int verbs_arm(void *self) {
    verbs_queue *q = self;
    return q->cq ? ibv_req_notify_cq(q->cq, 0) : ENOTCONN;
}

static void verbs_disarm(void *self) {
    verbs_queue *q = self;
    struct ibv_cq *cq;
    void *context;
    while (q->channel && ibv_get_cq_event(q->channel, &cq, &context) == 0) ibv_ack_cq_events(cq, 1); /* does not block */
}

static void verbs_explain(void *self, int status, char *text, size_t capacity) {
    rdma_explain(status, ((verbs_queue *)self)->route, text, capacity);
}

static void verbs_close(void *self) {
    verbs_queue *q = self;
    verbs_disarm(q); /* a queue with events that nobody took cannot be destroyed */
    if (q->qp) ibv_destroy_qp(q->qp);
    if (q->cq) ibv_destroy_cq(q->cq);
    if (q->channel) ibv_destroy_comp_channel(q->channel);
    if (q->mr) ibv_dereg_mr(q->mr);
    if (q->pd) ibv_dealloc_pd(q->pd);
    if (q->context) ibv_close_device(q->context);
    q->qp = NULL, q->cq = NULL, q->channel = NULL, q->mr = NULL, q->pd = NULL, q->context = NULL;
}

static const rdma_queue_ops VERBS_OPS = {
    .write = verbs_write,
    .receive = verbs_receive,
    .poll = verbs_poll,
    .arm = verbs_arm,
    .disarm = verbs_disarm,
    .explain = verbs_explain,
    .close = verbs_close,
};

/* ---- setting up: 0 or an errno, and `doing` says at what ---- */

static int verbs_open(verbs_queue *q, const char *device, const char **doing) {
    int count = 0;
    *doing = "listing the RDMA devices";
    struct ibv_device **list = ibv_get_device_list(&count);
    if (!list) return errno;
    *doing = "opening the RDMA device";
    for (int i = 0; i < count && !q->context; i++) {
        if (strcmp(ibv_get_device_name(list[i]), device)) continue;
        q->context = ibv_open_device(list[i]);
        if (!q->context) break;
    }
    int error = q->context ? 0 : errno ? errno : ENODEV;
    ibv_free_device_list(list);
    return error;
}

static int verbs_make_qp(verbs_queue *q, uint32_t depth, uint32_t receives, uint32_t max_inline) {
    struct ibv_qp_init_attr attributes = {.send_cq = q->cq, .recv_cq = q->cq, .qp_type = IBV_QPT_RC};
    attributes.cap = (struct ibv_qp_cap){depth, receives, 1, 1, max_inline};
    do { /* adapters differ in how much they take inline */
        q->qp = ibv_create_qp(q->pd, &attributes);
        if (q->qp) {
            q->max_inline = attributes.cap.max_inline_data;
            return 0;
        }
        attributes.cap = (struct ibv_qp_cap){depth, receives, 1, 1, max_inline /= 2};
    } while (max_inline >= 16);
    return errno;
}

static int verbs_make(verbs_queue *q, void *memory, size_t nbytes, uint32_t depth, uint32_t receives,
                      uint32_t max_inline, const char **doing) {
    *doing = "making a protection domain";
    if (!(q->pd = ibv_alloc_pd(q->context))) return errno;
    *doing = "registering memory";
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | (q->reads ? IBV_ACCESS_REMOTE_READ : 0);
    if (!(q->mr = ibv_reg_mr(q->pd, memory, nbytes, access))) return errno;
    *doing = "making a completion channel";
    if (!(q->channel = ibv_create_comp_channel(q->context))) return errno;
    if (fcntl(q->channel->fd, F_SETFL, O_NONBLOCK)) return errno;
    *doing = "making a completion queue";
    if (!(q->cq = ibv_create_cq(q->context, (int)(depth + receives), NULL, q->channel, 0))) return errno;
    *doing = "making a queue pair";
    return verbs_make_qp(q, depth, receives, max_inline);
}

static int verbs_init(verbs_queue *q, const verbs_route *r) {
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_INIT,
        .pkey_index = (uint16_t)r->pkey_index,
        .port_num = (uint8_t)r->port,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | (q->reads ? IBV_ACCESS_REMOTE_READ : 0),
    };
    return ibv_modify_qp(q->qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int verbs_rtr(verbs_queue *q, const verbs_route *r) {
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)r->mtu,
        .dest_qp_num = r->dest_qp,
        .rq_psn = r->rq_psn,
        .max_dest_rd_atomic = q->reads ? q->reads : 1,
        .min_rnr_timer = 12,
    };
    struct ibv_ah_attr *path = &attributes.ah_attr;
    path->dlid = (uint16_t)r->lid;
    path->sl = (uint8_t)r->sl;
    path->port_num = (uint8_t)r->port;
    path->is_global = (uint8_t)r->is_global;
    memcpy(path->grh.dgid.raw, r->gid, sizeof r->gid);
    path->grh.sgid_index = (uint8_t)r->gid_index;
    path->grh.hop_limit = 64;
    path->grh.traffic_class = (uint8_t)r->tclass;
    return ibv_modify_qp(q->qp, &attributes,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

/* retry_cnt 7 would be for ever on some devices; the caller never asks for it. Receives are always there
 * before a write, so rnr_retry only covers a peer that is slow to post its first ones; a benchmark's may be
 * slower than what is sent to it, so there it is for ever, and the loops give up. */
static int verbs_rts(verbs_queue *q, const verbs_route *r) {
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTS,
        .sq_psn = r->sq_psn,
        .max_rd_atomic = q->reads ? q->reads : 1,
        .timeout = (uint8_t)r->timeout,
        .retry_cnt = (uint8_t)r->retry,
        .rnr_retry = q->reads ? 7 : 6,
    };
    return ibv_modify_qp(q->qp, &attributes,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT |
                             IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
}

/* RESET, INIT, RTR, RTS; receives are posted before the peer may write. */
static int verbs_connect(verbs_queue *q, const verbs_route *r, uint32_t receives, const char **doing) {
    q->remote = r->remote;
    q->rkey = r->rkey;
    *doing = "bringing the queue pair to INIT";
    int error = verbs_init(q, r);
    if (error) return error;
    *doing = "posting receives";
    if (!q->reads && (error = verbs_receive(q, receives))) return error;
    *doing = "bringing the queue pair to RTR";
    if ((error = verbs_rtr(q, r))) return error;
    *doing = "bringing the queue pair to RTS";
    return verbs_rts(q, r);
}

#endif
