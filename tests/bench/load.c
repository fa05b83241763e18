/* A closed-loop load generator: N keep-alive connections, each sends its next request when the last one
 * is answered. One thread, epoll; the body is written from one shared copy.
 *
 * usage: load --port N --body FILE [--clients N] [--requests N] [--seconds S] [--stream 0|1]
 *             [--header "name: value"]... [--path P] [--timeout S] [--reshaped 0|1]
 *
 * In the body every "%CLIENT--NONCE-%" becomes 16 characters of this connection (and run), every
 * "%REQUEST-NONCE-%" 16 characters of this request, so that the length stays.
 * Prints one JSON object: requests, errors (with up to 5 samples), seconds, cpu_s (of this process),
 * ttfb_us (start of sending -> first byte of the answer's body), ttlb_us (-> last byte), and for paced
 * streams gap_us (between chunks) and delay_us (write in the mock -> read here).
 * An answer is an error unless its status is 200 and it is whole: for a stream 64 events and [DONE],
 * else a body with "usage". With --reshaped 1 more than 64 events are right too. */
#define _GNU_SOURCE
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define NONCE 16
#define BATCH 256
#define READ_SIZE (64 * 1024)
#define MAX_ERRORS 100 /* then the run ends: the server is gone or refuses */
#define CLIENT_MARK "%CLIENT--NONCE-%"
#define REQUEST_MARK "%REQUEST-NONCE-%"

enum kind { PLAIN, OF_CLIENT, OF_REQUEST };
enum phase { IDLE, HEAD, BODY };

struct segment {
    const char *data;
    size_t len;
    enum kind kind;
};

struct conn {
    int fd, id;
    enum phase phase;
    bool sent, fresh, got_first, close_after;
    size_t segment, offset; /* where sending goes on */
    char client[NONCE + 1], request[NONCE + 1];
    char head[MAX_HEAD];
    size_t head_len;
    int status;
    struct body body;
    struct carry carry;
    int events;
    bool finished; /* [DONE], or "usage" */
    int64_t started, first, last_mark;
};

struct samples {
    float *at;
    size_t len, size;
};

static struct segment *segments;
static size_t segment_count;
static struct samples ttfb, ttlb, gaps, delays;
static char errors_seen[5][200];
static unsigned errors, done_requests, started_requests;
static unsigned limit_requests;
static int64_t limit_ns, timeout_ns = 120000000000LL, began;
static bool stream, reshaped;
static int port, poller;
static unsigned active;
static char buffer[READ_SIZE];

static void begin(struct conn *c);

static void add(struct samples *s, int64_t ns) {
    if (s->len == s->size) {
        s->size = s->size ? 2 * s->size : 1024;
        s->at = realloc(s->at, s->size * sizeof *s->at);
        if (!s->at) abort();
    }
    s->at[s->len++] = (float)ns / 1000;
}

static void fail(const char *why, const struct conn *c) {
    if (errors < 5) snprintf(errors_seen[errors], sizeof errors_seen[0], "%s (status %d)", why, c ? c->status : 0);
    errors++;
}

/* ---- the request ---------------------------------------------------------------------------- */

static void add_segment(const char *data, size_t len, enum kind kind) {
    if (!len) return;
    segments = realloc(segments, (segment_count + 1) * sizeof *segments);
    if (!segments) abort();
    segments[segment_count++] = (struct segment){data, len, kind};
}

static void cut_body(const char *data, size_t len) {
    const char *end = data + len, *at;
    while ((at = find(data, (size_t)(end - data), "-NONCE-%", 8))) {
        const char *mark = at - 8;
        enum kind kind = mark < data                                ? PLAIN
                         : memcmp(mark, CLIENT_MARK, NONCE) == 0    ? OF_CLIENT
                         : memcmp(mark, REQUEST_MARK, NONCE) == 0   ? OF_REQUEST
                                                                    : PLAIN;
        size_t before = (size_t)((kind == PLAIN ? at + 8 : mark) - data);
        add_segment(data, before, PLAIN);
        if (kind != PLAIN) add_segment(NULL, NONCE, kind);
        data = at + 8;
    }
    add_segment(data, (size_t)(end - data), PLAIN);
}

static bool send_more(struct conn *c) {
    while (c->segment < segment_count) {
        struct iovec parts[BATCH];
        int n = 0;
        for (size_t i = c->segment; i < segment_count && n < BATCH; i++, n++) {
            const struct segment *s = &segments[i];
            const char *data = s->kind == PLAIN ? s->data : s->kind == OF_CLIENT ? c->client : c->request;
            size_t skip = n ? 0 : c->offset;
            parts[n] = (struct iovec){(void *)(uintptr_t)(data + skip), s->len - skip};
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n};
        ssize_t sent = sendmsg(c->fd, &message, MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN || errno == ENOTCONN;
        for (size_t left = (size_t)sent; left;) {
            size_t rest = segments[c->segment].len - c->offset;
            if (left < rest) {
                c->offset += left;
                break;
            }
            left -= rest;
            c->segment++;
            c->offset = 0;
        }
    }
    c->sent = true;
    return true;
}

/* ---- the answer ----------------------------------------------------------------------------- */

static int count(const char *text, size_t len, size_t fresh, const char *word) {
    const char *at = text, *end = text + len;
    size_t width = strlen(word);
    int n = 0;
    while ((at = find(at, (size_t)(end - at), word, width))) {
        at += width;
        n += (size_t)(at - text) > fresh;
    }
    return n;
}

static void match(void *self, const char *text, size_t len, size_t fresh) {
    struct conn *c = self;
    if (!stream) {
        c->finished |= count(text, len, fresh, "\"usage\"") > 0;
        return;
    }
    c->events += count(text, len, fresh, "\"delta\"");
    c->finished |= count(text, len, fresh, "[DONE]") > 0;
    const char *at = text, *end = text + len;
    while ((at = find(at, (size_t)(end - at), "\"@t=", 4))) { /* paced: a time and a space */
        const char *digit = at + 4;
        int64_t wrote = 0, now = now_ns();
        for (; digit < end && *digit >= '0' && *digit <= '9'; digit++) wrote = wrote * 10 + (*digit - '0');
        at = digit;
        if (digit == end || *digit != ' ' || (size_t)(digit + 1 - text) <= fresh) continue;
        add(&delays, now - wrote);
        if (c->last_mark) add(&gaps, now - c->last_mark);
        c->last_mark = now;
    }
}

static void on_body(void *self, const char *data, size_t len) {
    struct conn *c = self;
    if (!c->got_first) {
        c->first = now_ns();
        c->got_first = true;
    }
    carry_scan(&c->carry, data, len, match, c);
}

static void on_head(struct conn *c, size_t head_end) {
    const char *end = c->head + head_end;
    const char *length = head_value(c->head, head_end, "content-length:");
    const char *coding = head_value(c->head, head_end, "transfer-encoding:");
    c->status = head_end > 12 ? atoi(c->head + 9) : 0;
    c->close_after = value_has(head_value(c->head, head_end, "connection:"), end, "close");
    if (value_has(coding, end, "chunked"))
        body_start(&c->body, BODY_CHUNKED, 0);
    else
        body_start(&c->body, length ? BODY_LENGTH : BODY_TO_EOF, length ? strtoull(length, NULL, 10) : 0);
    c->phase = BODY;
}

static void conn_open(struct conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int on = 1;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connect(c->fd, (struct sockaddr *)&to, sizeof to);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    c->fresh = true;
}

static void reopen(struct conn *c) {
    close(c->fd);
    conn_open(c);
}

static void finish(struct conn *c, const char *problem) {
    int64_t now = now_ns();
    c->phase = IDLE;
    active--;
    done_requests++;
    if (!problem && c->status != 200) problem = "status";
    if (!problem && !c->finished) problem = "the answer lacks its end";
    if (!problem && stream && (reshaped ? c->events < 64 : c->events != 64)) problem = "not 64 chunks";
    if (problem) {
        fail(problem, c);
    } else {
        add(&ttfb, c->first - c->started);
        add(&ttlb, now - c->started);
    }
    if (problem || c->close_after || !c->sent) reopen(c);
    begin(c);
}

static void readable(struct conn *c) {
    for (;;) {
        ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
        if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;
        if (n <= 0) {
            if (c->phase == IDLE) {
                reopen(c);
                return;
            }
            bool whole = n == 0 && c->phase == BODY && c->body.framing == BODY_TO_EOF;
            c->close_after = true;
            if (!whole && n == 0 && !c->fresh && c->phase == HEAD && !c->head_len) {
                /* The server closed an idle connection as the request left: a client would try again. */
                reopen(c);
                c->segment = c->offset = 0;
                c->sent = false;
                return;
            }
            finish(c, whole ? NULL : n == 0 ? "connection closed" : strerror(errno));
            return;
        }
        const char *data = buffer;
        size_t len = (size_t)n;
        if (c->phase == HEAD) {
            size_t before = c->head_len, take = len < MAX_HEAD - before ? len : MAX_HEAD - before;
            memcpy(c->head + before, data, take);
            c->head_len += take;
            const char *end = find(c->head, c->head_len, "\r\n\r\n", 4);
            if (!end) {
                if (c->head_len < MAX_HEAD) continue;
                finish(c, "head too long");
                return;
            }
            size_t head_end = (size_t)(end - c->head) + 4;
            on_head(c, head_end);
            data += head_end - before;
            len -= head_end - before;
        }
        if (c->phase == BODY) {
            body_feed(&c->body, data, len, on_body, c);
            if (c->body.done || c->body.bad) {
                finish(c, c->body.bad ? "broken chunk" : NULL);
                return; /* what the next request brings wakes us again */
            }
        }
        if ((size_t)n < sizeof buffer) return;
    }
}

static void begin(struct conn *c) {
    int64_t now = now_ns();
    if (errors >= MAX_ERRORS || (limit_requests && started_requests >= limit_requests)) return;
    if (now - began >= limit_ns) return;
    snprintf(c->request, sizeof c->request, "r%015llx", (unsigned long long)now & 0xfffffffffffffffULL);
    started_requests++;
    active++;
    c->phase = HEAD;
    c->sent = c->got_first = c->finished = c->close_after = false;
    c->segment = c->offset = c->head_len = c->carry.len = 0;
    c->events = c->status = 0;
    c->last_mark = c->first = 0;
    c->started = now;
    if (!send_more(c)) finish(c, strerror(errno));
}

/* ---- the run -------------------------------------------------------------------------------- */

static void print_samples(const char *name, const struct samples *s) {
    printf(",\"%s\":[", name);
    for (size_t i = 0; i < s->len; i++) printf("%s%.1f", i ? "," : "", (double)s->at[i]);
    printf("]");
}

static void print_result(double seconds) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                 (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"requests\":%u,\"errors\":%u,\"seconds\":%.6f,\"cpu_s\":%.6f,\"error_samples\":[", done_requests,
           errors, seconds, cpu);
    for (unsigned i = 0; i < errors && i < 5; i++) printf("%s\"%s\"", i ? "," : "", errors_seen[i]);
    printf("]");
    print_samples("ttfb_us", &ttfb);
    print_samples("ttlb_us", &ttlb);
    print_samples("gap_us", &gaps);
    print_samples("delay_us", &delays);
    printf("}\n");
}

static const char *map_file(const char *path, size_t *len) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) < 0) {
        perror(path);
        exit(2);
    }
    *len = (size_t)info.st_size;
    const char *data = mmap(NULL, *len, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    if (data == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return data;
}

static void run(struct conn *conns, int clients) {
    began = now_ns();
    for (int i = 0; i < clients; i++) begin(&conns[i]);
    while (active) {
        struct epoll_event events[256];
        int n = epoll_wait(poller, events, 256, 1000);
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (c->phase == HEAD && !c->sent && events[i].events & EPOLLOUT && !send_more(c)) {
                finish(c, strerror(errno));
                continue;
            }
            if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) readable(c);
        }
        for (int i = 0; n == 0 && i < clients; i++)
            if (conns[i].phase != IDLE && now_ns() - conns[i].started > timeout_ns) finish(&conns[i], "timeout");
    }
}

int main(int argc, char **argv) {
    const char *path = "/v1/chat/completions", *body_path = NULL;
    static char head[MAX_HEAD], headers[MAX_HEAD / 2];
    int clients = 1;
    double seconds = 3600;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--port") == 0) port = atoi(value);
        if (strcmp(name, "--body") == 0) body_path = value;
        if (strcmp(name, "--clients") == 0) clients = atoi(value);
        if (strcmp(name, "--requests") == 0) limit_requests = (unsigned)atoi(value);
        if (strcmp(name, "--seconds") == 0) seconds = atof(value);
        if (strcmp(name, "--stream") == 0) stream = atoi(value) != 0;
        if (strcmp(name, "--reshaped") == 0) reshaped = atoi(value) != 0;
        if (strcmp(name, "--path") == 0) path = value;
        if (strcmp(name, "--timeout") == 0) timeout_ns = (int64_t)(atof(value) * 1e9);
        if (strcmp(name, "--header") == 0) {
            size_t used = strlen(headers);
            snprintf(headers + used, sizeof headers - used, "%s\r\n", value);
        }
    }
    if (!port || !body_path || clients < 1) {
        fprintf(stderr, "usage: load --port N --body FILE [--clients N] [--requests N] [--seconds S] "
                        "[--stream 0|1] [--header H]...\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    limit_ns = (int64_t)(seconds * 1e9);
    size_t body_len;
    const char *body = map_file(body_path, &body_len);
    int head_len = snprintf(head, sizeof head,
                            "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                            "accept: */*\r\n%scontent-length: %zu\r\n\r\n",
                            path, port, headers, body_len);
    add_segment(head, (size_t)head_len, PLAIN);
    cut_body(body, body_len);
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct conn *conns = calloc((size_t)clients, sizeof *conns);
    if (!conns) abort();
    for (int i = 0; i < clients; i++) {
        conns[i].id = i;
        snprintf(conns[i].client, sizeof conns[i].client, "c%07x%08x", (unsigned)getpid() & 0xfffffff, (unsigned)i);
        conn_open(&conns[i]);
    }
    run(conns, clients);
    print_result((double)(now_ns() - began) / 1e9);
    return 0;
}
