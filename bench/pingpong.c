/* The least that TCP costs: a ping-pong and a stream with plain send and recv, as a baseline.
 *
 *     pingpong serve                        prints its port on 127.0.0.1, then serves one client after another
 *     pingpong ping PORT BYTES N WARMUP     prints the median of half the round trips in nanoseconds
 *     pingpong stream PORT BYTES N WARMUP   prints bytes per second, until the last byte was received */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PING = 1, STREAM = 2 };
typedef struct {
    uint64_t what, nbytes, count;
} order;

static void check(int ok, const char *doing) {
    if (ok) return;
    perror(doing);
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int send_all(int fd, const char *data, size_t nbytes) {
    while (nbytes) {
        ssize_t n = send(fd, data, nbytes, MSG_NOSIGNAL);
        if (n <= 0) return 0;
        data += n;
        nbytes -= (size_t)n;
    }
    return 1;
}

static int recv_all(int fd, char *data, size_t nbytes) {
    while (nbytes) {
        ssize_t n = recv(fd, data, nbytes, 0);
        if (n <= 0) return 0;
        data += n;
        nbytes -= (size_t)n;
    }
    return 1;
}

static void set_no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void serve_client(int fd) {
    order todo;
    while (recv_all(fd, (char *)&todo, sizeof todo)) {
        char *data = malloc(todo.nbytes);
        check(data != NULL, "malloc");
        for (uint64_t i = 0; i < todo.count; i++) {
            if (!recv_all(fd, data, todo.nbytes)) break;
            if (todo.what == PING && !send_all(fd, data, todo.nbytes)) break;
        }
        if (todo.what == STREAM) send_all(fd, data, 1);
        free(data);
    }
    close(fd);
}

static void serve(void) {
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof place;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&place, length) == 0 && listen(listener, 8) == 0, "listening");
    check(getsockname(listener, (struct sockaddr *)&place, &length) == 0, "getsockname");
    printf("%d\n", ntohs(place.sin_port));
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        check(fd >= 0, "accept");
        set_no_delay(fd);
        serve_client(fd);
    }
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void ping(int fd, char *data, order todo, uint64_t *times) {
    check(send_all(fd, (char *)&todo, sizeof todo), "send");
    uint64_t before = now_ns();
    for (uint64_t i = 0; i < todo.count; i++) {
        check(send_all(fd, data, todo.nbytes) && recv_all(fd, data, todo.nbytes), "ping");
        uint64_t now = now_ns();
        times[i] = now - before;
        before = now;
    }
}

static double stream(int fd, char *data, order todo) {
    check(send_all(fd, (char *)&todo, sizeof todo), "send");
    uint64_t start = now_ns();
    for (uint64_t i = 0; i < todo.count; i++) check(send_all(fd, data, todo.nbytes), "stream");
    check(recv_all(fd, data, 1), "stream");
    return (double)(todo.nbytes * todo.count) / (double)(now_ns() - start) * 1e9;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "serve")) serve();
    if (argc != 6) {
        fprintf(stderr, "usage: pingpong serve | ping|stream PORT BYTES N WARMUP\n");
        return 2;
    }
    int is_ping = !strcmp(argv[1], "ping");
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    place.sin_port = htons((uint16_t)atoi(argv[2]));
    order todo = {is_ping ? PING : STREAM, strtoull(argv[3], NULL, 10), strtoull(argv[5], NULL, 10)};
    uint64_t count = strtoull(argv[4], NULL, 10), most = count > todo.count ? count : todo.count;
    char *data = calloc(1, todo.nbytes);
    uint64_t *times = calloc(most, sizeof *times);
    check(data && times, "calloc");
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(fd, (struct sockaddr *)&place, sizeof place) == 0, "connect");
    set_no_delay(fd);
    if (is_ping) ping(fd, data, todo, times);
    else stream(fd, data, todo);
    todo.count = count;
    if (is_ping) {
        ping(fd, data, todo, times);
        qsort(times, count, sizeof *times, compare);
        printf("%.1f\n", (double)times[count / 2] / 2);
    } else {
        printf("%.1f\n", stream(fd, data, todo));
    }
    return 0;
}
