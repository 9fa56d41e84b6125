/* The one loop in which the engine sends to, receives from and waits for its workers. */
#ifndef FASTDECODE_PUMP_WAIT_H
#define FASTDECODE_PUMP_WAIT_H

#include "pump_engine.h"

enum { GOAL_REPLY, GOAL_READY, GOAL_SENT, GOAL_CREDIT, GOAL_REQUEST };

static int goal_met(const fd_port *port, int goal, int table) {
    const port_table *t = &port->tables[table];
    switch (goal) {
    case GOAL_REPLY:
        return !t->outstanding;
    case GOAL_READY:
        return t->state != STEP_SENT;
    case GOAL_SENT:
        return port->kind == PORT_LOCAL || !conn_pending(&port->conn);
    case GOAL_CREDIT:
        return port->kind == PORT_LOCAL || conn_in_flight(&port->conn, FD_BULK) < port->conn.slots[FD_BULK];
    default:
        return port->request_done;
    }
}

static int pump_fail(fd_pump *pump, int result, int port) {
    pump->fail_port = port;
    return result;
}

static int pump_misuse(fd_pump *pump, const char *text) {
    pump->fail_text = text;
    return pump_fail(pump, PUMP_MISUSE, -1);
}

/* A loss or an error of a port that matters to this wait; PUMP_OK if there is none. An error does not cut
 * a frame short that is being sent: the connection would be of no use afterwards. */
static int port_trouble(fd_pump *pump, int index, int goal) {
    fd_port *port = pump->ports[index];
    if (port_lost(port)) return pump_fail(pump, PUMP_LOST, index);
    if (goal != GOAL_SENT && port->error.set) return pump_fail(pump, PUMP_STEP, index);
    return PUMP_OK;
}

/* The connections that one round of a wait listens to. */
typedef struct {
    int count, waiting, num_fds;
    int index[PUMP_MAX_PORTS];  /* port */
    int unmet[PUMP_MAX_PORTS];  /* it is what we wait for, not only sent to */
    short events[PUMP_MAX_PORTS];
    int ready[PUMP_MAX_PORTS];  /* there is something to read */
    struct pollfd fds[PUMP_MAX_PORTS * PLANE_FDS];
    int whose[PUMP_MAX_PORTS * PLANE_FDS];
} pump_polled;

static void polled_add(pump_polled *polled, fd_port *port, int index, int unmet) {
    int pending = conn_pending(&port->conn), i = polled->count;
    polled->waiting += unmet;
    if (!unmet && !pending) return;
    polled->events[i] = (short)(POLLIN | (pending && !port->conn.no_credit ? POLLOUT : 0));
    polled->index[i] = index;
    polled->ready[i] = 0;
    polled->unmet[i] = unmet;
    polled->count++;
}

/* Looks for news that need no system call: for as long as every connection that is waited for allows. */
static int polled_spin(fd_pump *pump, pump_polled *polled, uint64_t start) {
    uint64_t budget = UINT64_MAX;
    for (int i = 0; i < polled->count; i++) {
        uint64_t own = pump->ports[polled->index[i]]->conn.spin_ns;
        if (polled->unmet[i] && own < budget) budget = own;
    }
    for (int found = 0, rounds = 0;; rounds++) {
        for (int i = 0; i < polled->count; i++) {
            fd_conn *c = &pump->ports[polled->index[i]]->conn;
            found += polled->ready[i] = c->plane->more(c);
        }
        if (found) return found;
        if (!budget || (rounds % 64 == 63 && now_ns() - start >= budget)) return 0;
        spin_pause();
    }
}

/* Waits until something can be read or sent: 0 the deadline has passed. */
static int polled_wait(fd_pump *pump, pump_polled *polled, uint64_t start, uint64_t deadline) {
    if (start >= deadline) return 0;
    if (polled_spin(pump, polled, start)) return 1;
    int found = 0, count = 0;
    for (int i = 0; i < polled->count; i++) {
        fd_conn *c = &pump->ports[polled->index[i]]->conn;
        int own = c->plane->arm(c, polled->events[i], polled->fds + count);
        if (!own) found += polled->ready[i] = 1;
        while (own--) polled->whose[count++] = i;
    }
    uint64_t now = found ? deadline : now_ns(); /* those that need a system call are looked at all the same */
    uint64_t left = now < deadline ? deadline - now : 0;
    struct timespec wait = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
    int rc = ppoll(polled->fds, (nfds_t)count, &wait, NULL);
    if (rc < 0) found++; /* interrupted: nobody is late yet */
    for (int k = 0; k < count && rc > 0; k++) {
        if (!polled->fds[k].revents) continue;
        found++;
        if (polled->fds[k].revents & ~POLLOUT) polled->ready[polled->whose[k]] = 1;
    }
    for (int i = 0; i < polled->count; i++) {
        fd_conn *c = &pump->ports[polled->index[i]]->conn;
        if (c->plane->disarm) c->plane->disarm(c);
    }
    return found;
}

/* Writes down who has met the goal just now. */
static void polled_note(fd_pump *pump, const pump_polled *polled, int goal, int table) {
    uint64_t now = now_ns();
    for (int i = 0; i < polled->count; i++)
        if (polled->unmet[i] && polled->ready[i] && goal_met(pump->ports[polled->index[i]], goal, table))
            pump->arrived[polled->index[i]] = now;
}

/* What K/V rows may take that are on their way to the ports that are waited for: what comes behind them waits too. */
static uint64_t pump_uploads_ns(const fd_pump *pump, int table, int only) {
    uint64_t most = 0;
    for (int i = 0; i < pump->num_ports; i++) {
        const fd_port *port = pump->ports[i];
        if (port->kind != PORT_STREAM || !(only < 0 ? table_live(&port->tables[table]) : i == only)) continue;
        const uint64_t longest = port->max_bulk ? port->max_bulk : pump->sizes.max_bulk;
        const uint64_t nbytes = conn_in_flight(&port->conn, FD_BULK) * longest;
        if (nbytes > most) most = nbytes;
    }
    return most * PUMP_NS_PER_BYTE;
}

/* Sends, receives and waits until the goal is met on one port, or (only < 0) on every port of the table.
 * Whoever is still being sent to is read from as well, so two senders never wait for each other. */
static int pump_wait(fd_pump *pump, int goal, int table, int only, uint64_t deadline) {
    pump_polled polled;
    deadline += pump_uploads_ns(pump, table, only);
    for (;;) {
        polled.count = polled.waiting = 0;
        for (int i = 0; i < pump->num_ports; i++) {
            fd_port *port = pump->ports[i];
            int asked = only < 0 ? table_live(&port->tables[table]) : i == only;
            if (port->kind == PORT_STREAM && !port->conn.lost && conn_pending(&port->conn))
                conn_send(&port->conn, 0);
            int trouble = asked ? port_trouble(pump, i, goal) : PUMP_OK;
            if (trouble) return trouble;
            if (port->kind == PORT_STREAM && !port->conn.lost)
                polled_add(&polled, port, i, asked && !goal_met(port, goal, table));
        }
        if (!polled.waiting) return PUMP_OK;
        uint64_t start = now_ns();
        int found = polled_wait(pump, &polled, start, deadline);
        uint64_t waited = now_ns() - start;
        pump->wait_ns += waited;
        int late = -1;
        for (int i = 0; i < polled.count; i++) {
            if (!polled.unmet[i]) continue;
            pump->ports[polled.index[i]]->wait_ns += waited;
            if (late < 0) late = polled.index[i];
        }
        if (!found) return pump_fail(pump, PUMP_TIMEOUT, late);
        for (int i = 0; i < polled.count; i++)
            if (polled.ready[i]) port_read(pump, pump->ports[polled.index[i]]);
        if (pump->arrived) polled_note(pump, &polled, goal, table);
    }
}

static inline uint64_t pump_deadline(const fd_pump *pump, uint64_t nbytes) {
    return now_ns() + pump->timeout_ns + nbytes * PUMP_NS_PER_BYTE;
}

/* Gives up a table's step on all ports; what still comes of it is skipped. */
static void pump_abort(fd_pump *pump, int table) {
    for (int i = 0; i < pump->num_ports; i++) table_abort(pump->ports[i], table);
}

/* Waits until the frame queued last is out: its payload is the caller's memory, so on a timeout it is
 * taken back, or, when half of it has left already, the connection is given up. */
static int pump_send_out(fd_pump *pump, int index, uint64_t deadline) {
    fd_conn *c = &pump->ports[index]->conn;
    int rc = pump_wait(pump, GOAL_SENT, 0, index, deadline);
    if (rc != PUMP_TIMEOUT) return rc;
    if (!c->ring[(c->tx_last - 1) % CONN_RING].started) {
        c->tx_last--;
        return rc;
    }
    conn_fail(c, CONN_CLOSED, "it did not take a whole frame in time");
    return pump_fail(pump, PUMP_LOST, index);
}

#endif