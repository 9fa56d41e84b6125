/* A stream socket as a plane: TCP, or the socket pairs of tests. Sends straight out of the caller's memory
 * and receives straight into it. A system call costs more than copying a page: what follows a header is read
 * along with it, up to a page, so that a short frame takes one call, and a header rides along with the payload
 * before it. */
#ifndef FASTDECODE_PLANE_TCP_H
#define FASTDECODE_PLANE_TCP_H

#include <stdlib.h>
#include <sys/socket.h>

#include "plane.h"

enum { TCP_AHEAD = 4096 };

/* Bytes received beyond c->next: none while that is not whole. */
typedef struct {
    size_t at, have;
    char bytes[TCP_AHEAD];
} tcp_ahead;

/* The parts of a scatter list from byte `skip` on. */
static int parts_from(struct iovec *out, const struct iovec *in, int count, size_t skip) {
    int filled = 0;
    for (int i = 0; i < count; i++) {
        if (skip >= in[i].iov_len) {
            skip -= in[i].iov_len;
            continue;
        }
        out[filled++] = (struct iovec){(char *)in[i].iov_base + skip, in[i].iov_len - skip};
        skip = 0;
    }
    return filled;
}

static int tcp_arm(fd_conn *c, short events, struct pollfd *fds) {
    fds[0] = (struct pollfd){.fd = c->fd, .events = events};
    return 1;
}

static int tcp_send(fd_conn *c, conn_tx *tx, int block) {
    struct iovec whole[1 + CONN_PARTS] = {{&tx->head, sizeof(fd_frame)}, tx->part[0], tx->part[1]};
    struct iovec rest[1 + CONN_PARTS];
    while (tx->sent < tx->nbytes) {
        struct msghdr message = {.msg_iov = rest};
        message.msg_iovlen = (size_t)parts_from(rest, whole, 1 + CONN_PARTS, tx->sent);
        uint64_t start = now_ns();
        ssize_t n = sendmsg(c->fd, &message, (block ? 0 : MSG_DONTWAIT) | MSG_NOSIGNAL);
        int error = errno;
        c->io_ns += now_ns() - start;
        if (n < 0) {
            if (error == EINTR) continue;
            if (error != EAGAIN && error != EWOULDBLOCK) return conn_fail_errno(c, "sending", error);
            if (!block) return 0;
            conn_sleep(c, POLLOUT); /* a blocking caller may have been given a socket that does not block */
            continue;
        }
        c->bytes_sent += (uint64_t)n;
        tx->sent += (size_t)n;
    }
    return 1;
}

static ssize_t tcp_receive(fd_conn *c, struct iovec *parts, int count, int block) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    for (;;) {
        uint64_t start = now_ns();
        ssize_t n = recvmsg(c->fd, &message, block ? 0 : MSG_DONTWAIT);
        int error = errno;
        c->io_ns += now_ns() - start;
        if (n > 0) {
            c->bytes_received += (uint64_t)n;
            return n;
        }
        if (n == 0) return conn_ended(c, !c->in_payload && !c->next_have);
        if (error == EINTR) continue;
        if (error != EAGAIN && error != EWOULDBLOCK) return conn_fail_errno(c, "receiving", error);
        if (!block) return 0;
        conn_sleep(c, POLLIN);
    }
}

static int tcp_header(fd_conn *c, int block) {
    tcp_ahead *ahead = c->state;
    if (!ahead && !(ahead = c->state = calloc(1, sizeof *ahead))) return conn_fail(c, CONN_CLOSED, "no memory");
    while (c->next_have < sizeof(fd_frame)) {
        size_t missing = sizeof(fd_frame) - c->next_have;
        struct iovec parts[2] = {{(char *)&c->next + c->next_have, missing}, {ahead->bytes, TCP_AHEAD}};
        ssize_t n = tcp_receive(c, parts, 2, block);
        if (n <= 0) return (int)n;
        size_t more = (size_t)n > missing ? (size_t)n - missing : 0;
        ahead->at = 0;
        ahead->have = more;
        c->next_have += (size_t)n - more;
    }
    c->head = c->next; /* what is checked is what is used */
    c->next_have = 0;
    return 1;
}

/* Takes up to `most` bytes of what was read ahead; `to` NULL: drops them. */
static size_t tcp_take(tcp_ahead *ahead, char *to, size_t most) {
    size_t left = ahead->have - ahead->at, n = left < most ? left : most;
    if (n && to) memcpy(to, ahead->bytes + ahead->at, n);
    ahead->at += n;
    return n;
}

static int tcp_payload(fd_conn *c, int block) {
    tcp_ahead *ahead = c->state;
    char waste[4096];
    while (c->payload_left) {
        size_t total = c->part[0].iov_len + c->part[1].iov_len;
        struct iovec rest[CONN_PARTS + 1];
        int count = parts_from(rest, c->part, CONN_PARTS, total - c->payload_left);
        size_t taken = tcp_take(ahead, rest[0].iov_base, rest[0].iov_len);
        if (taken) {
            c->payload_left -= taken;
            continue;
        }
        rest[count++] = (struct iovec){&c->next, sizeof(fd_frame)};
        ssize_t n = tcp_receive(c, rest, count, block);
        if (n <= 0) return (int)n;
        if ((size_t)n <= c->payload_left) {
            c->payload_left -= (size_t)n;
            continue;
        }
        c->next_have = (size_t)n - c->payload_left;
        c->payload_left = 0;
    }
    while (c->discard_left) {
        struct iovec part = {waste, c->discard_left < sizeof waste ? c->discard_left : sizeof waste};
        size_t taken = tcp_take(ahead, NULL, c->discard_left);
        ssize_t n = taken ? (ssize_t)taken : tcp_receive(c, &part, 1, block);
        if (n <= 0) return (int)n;
        c->discard_left -= (size_t)n;
    }
    /* what is left are the beginnings of the next frame */
    c->next_have += tcp_take(ahead, (char *)&c->next + c->next_have, sizeof(fd_frame) - c->next_have);
    return 1;
}

static void tcp_close(fd_conn *c) {
    free(c->state);
    c->state = NULL;
}

static int tcp_more(fd_conn *c) { return c->next_have == sizeof(fd_frame); }

static const fd_plane PLANE_TCP = {
    .name = "tcp",
    .send = tcp_send,
    .header = tcp_header,
    .payload = tcp_payload,
    .more = tcp_more,
    .arm = tcp_arm,
    .close = tcp_close,
};

#endif
