/* What the engine asks of its ports: begin a step, attend one layer, stream K/V rows, cold frames. */
#ifndef FASTDECODE_PUMP_STEPS_H
#define FASTDECODE_PUMP_STEPS_H

#include "pump_wait.h"

/* Nanoseconds spent so far in system calls and in kernels of this process. */
static uint64_t pump_other_ns(const fd_pump *pump) {
    uint64_t total = pump->wait_ns;
    for (int i = 0; i < pump->num_ports; i++) {
        const fd_port *port = pump->ports[i];
        total += port->conn.io_ns + (port->kind == PORT_LOCAL ? port->kernel_ns + port->store_ns : 0);
    }
    return total;
}

/* Attention rows of a step: query tokens of all entries that are no uploads (config.ENTRY_DTYPE). */
static uint64_t entries_rows(const void *entries, uint32_t count) {
    uint64_t rows = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t tail[2]; /* q_len, flags */
        memcpy(tail, (const char *)entries + (size_t)i * FD_ENTRY_BYTES + 16, sizeof tail);
        if (!(tail[1] & 1)) rows += tail[0];
    }
    return rows;
}

/* Queues BEGIN_STEP on one port and fixes its row range. The entries are copied, so nobody has to wait. */
static int pump_begin(fd_pump *pump, int index, int table, uint32_t step, uint32_t first_row, uint32_t rows,
                      const void *entries, uint32_t num_entries) {
    fd_port *port = pump->ports[index];
    port_table *t = &port->tables[table];
    size_t nbytes = (size_t)num_entries * FD_ENTRY_BYTES;
    if (port_lost(port)) return pump_fail(pump, PUMP_LOST, index);
    if (t->state != STEP_NONE && t->step == step)
        return pump_misuse(pump, "a step must be begun under a new number");
    if (t->submitted) table_abort(port, table); /* begun anew without collecting: the old step was given up */
    if (port->kind == PORT_STREAM) {
        /* An aborted step may lie half sent in the ring: its bytes must leave before they change. */
        int rc = conn_pending(&port->conn)
                     ? pump_wait(pump, GOAL_SENT, table, index, pump_deadline(pump, 0))
                     : PUMP_OK;
        if (rc) return rc;
        if (nbytes > t->entries_capacity) {
            void *grown = realloc(t->entries, nbytes);
            if (!grown) return pump_misuse(pump, "no memory for the step table");
            t->entries = grown;
            t->entries_capacity = nbytes;
        }
        if (nbytes) memcpy(t->entries, entries, nbytes);
        conn_tx *tx = conn_queue(&port->conn, FD_BEGIN_STEP, (uint16_t)table, step, t->entries, nbytes, NULL, 0);
        tx->head.rows = rows;
        port->messages++;
        conn_send(&port->conn, 0);
    }
    t->state = STEP_SENT;
    t->step = step;
    t->first_row = first_row;
    t->rows = rows;
    t->num_entries = num_entries;
    t->submitted = t->outstanding = 0;
    return PUMP_OK;
}

/* The table's next step leaves this port out. */
static void pump_retire(fd_pump *pump, int index, int table) {
    port_table *t = &pump->ports[index]->tables[table];
    if (t->submitted) table_abort(pump->ports[index], table);
    if (t->state != STEP_NONE) t->state = STEP_RETIRED;
    t->rows = t->num_entries = 0;
}

/* Sends one layer's rows to every port of the table, straight out of the send buffer. Does not wait. */
static int pump_submit(fd_pump *pump, int table, uint32_t layer) {
    const pump_table *buffers = &pump->tables[table];
    if (!buffers->send) return pump_misuse(pump, "this table carries uploads only");
    if (layer >= pump->sizes.num_layers) return pump_misuse(pump, "no such layer");
    for (int i = 0; i < pump->num_ports; i++) {
        const port_table *t = &pump->ports[i]->tables[table];
        if (t->state == STEP_ABORTED) return pump_misuse(pump, "the step was aborted: begin it anew");
        if (t->submitted) return pump_misuse(pump, "the previous layer was not collected");
    }
    size_t row_bytes = pump->sizes.row_bytes[layer];
    for (int i = 0; i < pump->num_ports; i++) {
        fd_port *port = pump->ports[i];
        port_table *t = &port->tables[table];
        if (!table_live(t) || !t->rows) continue;
        if (port_lost(port)) {
            pump_abort(pump, table);
            return pump_fail(pump, PUMP_LOST, i);
        }
        t->layer = layer;
        t->submitted = t->outstanding = 1;
        if (port->kind == PORT_LOCAL) continue; /* runs in collect: remote workers start first */
        conn_tx *tx = conn_queue(&port->conn, FD_ATTEND, (uint16_t)table, t->step,
                                 buffers->send + t->first_row * row_bytes, t->rows * row_bytes, NULL, 0);
        tx->head.layer = layer;
        tx->head.rows = t->rows;
        port->messages++;
        conn_send(&port->conn, 0);
    }
    return PUMP_OK;
}

static void port_attend_here(fd_pump *pump, fd_port *port, int table) {
    port_table *t = &port->tables[table];
    const pump_table *buffers = &pump->tables[table];
    if (port->error.set) return;
    uint64_t start = now_ns();
    int rc = port->attend(port->ctx, table, (int32_t)t->layer, (int32_t)t->rows,
                          buffers->send + t->first_row * pump->sizes.row_bytes[t->layer],
                          buffers->recv + t->first_row * pump->sizes.out_bytes[t->layer],
                          buffers->status + t->first_row);
    t->kernel_ns = now_ns() - start;
    port->kernel_ns += t->kernel_ns;
    port->messages++;
    t->outstanding = 0;
    if (rc) port_set_error(port, (uint16_t)table, t->step, rc, "attention failed");
}

/* Receives one layer's replies straight into the receive buffer. An error gives the step up everywhere. */
static int pump_collect(fd_pump *pump, int table, uint32_t layer) {
    uint64_t nbytes = 0;
    if (layer >= pump->sizes.num_layers) return pump_misuse(pump, "no such layer");
    for (int i = 0; i < pump->num_ports; i++) {
        const port_table *t = &pump->ports[i]->tables[table];
        if (t->state == STEP_ABORTED) return pump_misuse(pump, "the step was aborted: begin it anew");
        if (table_live(t) && t->rows && !(t->submitted && t->layer == layer))
            return pump_misuse(pump, "this layer was not submitted");
        if (t->outstanding) nbytes += t->rows * (pump->sizes.row_bytes[layer] + pump->sizes.out_bytes[layer]);
    }
    for (int i = 0; i < pump->num_ports; i++) {
        fd_port *port = pump->ports[i];
        if (port->kind == PORT_LOCAL && port->tables[table].outstanding) port_attend_here(pump, port, table);
    }
    int rc = pump_wait(pump, GOAL_REPLY, table, -1, pump_deadline(pump, nbytes));
    if (rc) pump_abort(pump, table);
    for (int i = 0; i < pump->num_ports; i++) pump->ports[i]->tables[table].submitted = 0;
    return rc;
}

/* Adds what a call took, without system calls, waits and kernels, to the ports that took part. */
static void pump_account(fd_pump *pump, int table, uint64_t start_ns, uint64_t other_before) {
    uint64_t other = pump_other_ns(pump) - other_before, total = now_ns() - start_ns;
    int sharing = 0;
    for (int i = 0; i < pump->num_ports; i++) sharing += pump->ports[i]->tables[table].rows > 0;
    if (!sharing || total < other) return;
    for (int i = 0; i < pump->num_ports; i++)
        if (pump->ports[i]->tables[table].rows) pump->ports[i]->pump_ns += (total - other) / (uint64_t)sharing;
}

/* One layer of a step: submit, collect, or both. */
static int pump_layer(fd_pump *pump, int table, uint32_t layer, int submit, int collect) {
    uint64_t start = now_ns(), other = pump_other_ns(pump);
    int rc = submit ? pump_submit(pump, table, layer) : PUMP_OK;
    if (rc == PUMP_OK && collect) rc = pump_collect(pump, table, layer);
    pump_account(pump, table, start, other);
    return rc;
}

static int pump_store(fd_pump *pump, int index, int table, uint32_t layer, uint32_t entry, uint64_t offset,
                      uint64_t count, const char *k, const char *v) {
    fd_port *port = pump->ports[index];
    port_table *t = &port->tables[table];
    if (layer >= pump->sizes.num_layers) return pump_misuse(pump, "no such layer");
    if (!table_live(t)) return pump_misuse(pump, "no step is under way on this table");
    if (entry >= t->num_entries) return pump_misuse(pump, "no such entry in the step table");
    size_t width = pump->sizes.kv_bytes[layer];
    if (port->kind == PORT_LOCAL) {
        if (port->error.set) return pump_fail(pump, PUMP_STEP, index);
        uint64_t start = now_ns();
        int rc = port->store(port->ctx, table, (int32_t)layer, (int32_t)entry, (int64_t)offset, (int64_t)count, k, v);
        port->store_ns += now_ns() - start;
        port->messages++;
        if (rc) port_set_error(port, (uint16_t)table, t->step, rc, "storing K/V rows failed");
        return rc ? pump_fail(pump, PUMP_STEP, index) : PUMP_OK;
    }
    uint64_t most = (port->max_bulk ? port->max_bulk : pump->sizes.max_bulk) / (2 * width);
    while (count) {
        uint64_t n = count < most ? count : most;
        uint64_t deadline = pump_deadline(pump, 2 * n * width);
        int rc = pump_wait(pump, GOAL_CREDIT, table, index, deadline);
        if (rc) return rc;
        conn_tx *tx = conn_queue(&port->conn, FD_KV_ROWS, (uint16_t)table, t->step, k, n * width, v, n * width);
        tx->head.layer = layer;
        tx->head.rows = (uint32_t)n;
        tx->head.entry = entry;
        tx->head.offset = offset;
        port->messages++;
        rc = pump_send_out(pump, index, deadline);
        if (rc) return rc;
        offset += n;
        count -= n;
        k += n * width;
        v += n * width;
    }
    return PUMP_OK;
}

/* Sends one cold frame and, if it asks for a reply, waits for that too. */
static int pump_cold(fd_pump *pump, int index, uint16_t kind, const void *payload, size_t nbytes, int wait_reply) {
    fd_port *port = pump->ports[index];
    uint64_t deadline = pump_deadline(pump, nbytes);
    if (nbytes > pump->sizes.max_cold) return pump_misuse(pump, "the payload is longer than a frame may be");
    int rc = port_trouble(pump, index, GOAL_REQUEST);
    if (rc == PUMP_OK && frame_class(kind) == FD_BULK) rc = pump_wait(pump, GOAL_CREDIT, 0, index, deadline);
    if (rc) return rc;
    conn_tx *tx = conn_queue(&port->conn, kind, FD_NO_TABLE, 0, payload, nbytes, NULL, 0);
    tx->head.entry = ++port->request;
    port->request_done = !wait_reply;
    port->messages++;
    rc = pump_send_out(pump, index, deadline);
    if (rc == PUMP_OK && wait_reply) rc = pump_wait(pump, GOAL_REQUEST, 0, index, deadline + pump->timeout_ns);
    port->request_done = 1;
    return rc;
}

#endif
