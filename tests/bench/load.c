/* A closed-loop load generator: N keep-alive connections, each sends its next request when the last one
 * is answered. One thread, epoll; all bodies are written from one shared copy.
 *
 * usage: load --port N --body FILE [--clients N] [--requests N] [--seconds S] [--stream 0|1]
 *             [--header "name: value"]... [--path P] [--timeout S] [--reshaped 0|1] [--run N]
 *
 * The file holds one body with marks. Each "%END-OF-A-TURN-%" ends a turn: its body is all before that
 * mark and all after the last one, without these marks. A connection plays turn after turn and then
 * starts its next conversation at the first; connection c begins c turns further on, so that all lengths
 * are under way at any time. Without such a mark every request has the same body.
 * Every "%CLIENT--NONCE-%" becomes 16 characters of this connection, the same in every run,
 * "%CONVERSE-NONCE%" of its present conversation and "%REQUEST-NONCE-%" of this request, which no other
 * run repeats: they tell its number, too (by default the process id).
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
#define MAX_CLIENTS 4096 /* three digits of a nonce */

enum kind { OF_CLIENT, OF_CONVERSATION, OF_REQUEST, KINDS, END_OF_TURN = KINDS, PLAIN };
static const char *const marks[] = {"%CLIENT--NONCE-%", "%CONVERSE-NONCE%", "%REQUEST-NONCE-%",
                                    "%END-OF-A-TURN-%"};
enum phase { IDLE, HEAD, BODY };

struct segment {
    const char *data;
    size_t len;
    enum kind kind;
};

/* What is sent: the head, the segments before `end`, and those from `tail` on. */
struct turn {
    struct segment head;
    size_t end;
};

struct conn {
    int fd, id;
    unsigned begun; /* requests */
    const struct turn *turn;
    enum phase phase;
    bool sent, fresh, got_first, close_after;
    size_t segment, offset; /* where sending goes on */
    char nonce[KINDS][NONCE + 1];
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
static struct turn *turns;
static size_t segment_count, turn_count, tail;
static struct samples ttfb, ttlb, gaps, delays;
static char errors_seen[5][200];
static unsigned errors, done_requests, started_requests;
static unsigned limit_requests;
static int64_t limit_ns, timeout_ns = 120000000000LL, began;
static bool stream, reshaped;
static int port, poller;
static unsigned run_number;
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

static void add_turn(size_t end) {
    turns = realloc(turns, (turn_count + 1) * sizeof *turns);
    if (!turns) abort();
    turns[turn_count++] = (struct turn){.end = end};
    tail = end;
}

static enum kind mark_at(const char *at, const char *end) {
    enum kind kind = OF_CLIENT;
    if (end - at < NONCE) return PLAIN;
    while (kind != PLAIN && memcmp(at, marks[kind], NONCE) != 0) kind++;
    return kind;
}

static void cut_body(const char *data, size_t len) {
    const char *end = data + len, *at = data;
    while ((at = memchr(at, '%', (size_t)(end - at)))) {
        enum kind kind = mark_at(at, end);
        if (kind == PLAIN) {
            at++;
            continue;
        }
        add_segment(data, (size_t)(at - data), PLAIN);
        if (kind == END_OF_TURN)
            add_turn(segment_count);
        else
            add_segment(marks[kind], NONCE, kind);
        data = at += NONCE;
    }
    add_segment(data, (size_t)(end - data), PLAIN);
    if (!turn_count) add_turn(segment_count);
}

static void write_heads(const char *path, const char *headers) {
    size_t before = 0, after = 0, at = 0;
    for (size_t i = tail; i < segment_count; i++) after += segments[i].len;
    for (struct turn *t = turns; t < turns + turn_count; t++) {
        char *head = malloc(MAX_HEAD);
        if (!head) abort();
        for (; at < t->end; at++) before += segments[at].len;
        int n = snprintf(head, MAX_HEAD,
                         "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                         "accept: */*\r\n%scontent-length: %zu\r\n\r\n",
                         path, port, headers, before + after);
        t->head = (struct segment){head, (size_t)n, PLAIN};
    }
}

/* The i-th segment of what this connection sends now; NULL after the last. */
static const struct segment *segment_at(const struct conn *c, size_t i) {
    if (i == 0) return &c->turn->head;
    i = i <= c->turn->end ? i - 1 : tail + i - 1 - c->turn->end;
    return i < segment_count ? &segments[i] : NULL;
}

static bool send_more(struct conn *c) {
    const struct segment *s;
    while (segment_at(c, c->segment)) {
        struct iovec parts[BATCH];
        int n = 0;
        for (size_t i = c->segment; n < BATCH && (s = segment_at(c, i)); i++, n++) {
            const char *data = s->kind == PLAIN ? s->data : c->nonce[s->kind];
            size_t skip = n ? 0 : c->offset;
            parts[n] = (struct iovec){(void *)(uintptr_t)(data + skip), s->len - skip};
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n};
        ssize_t sent = sendmsg(c->fd, &message, MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN || errno == ENOTCONN;
        for (size_t left = (size_t)sent; left;) {
            size_t rest = segment_at(c, c->segment)->len - c->offset;
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

static void write_nonce(struct conn *c, enum kind kind, size_t number) {
    unsigned own = kind == OF_CLIENT ? 0 : run_number & 0xffffff;
    snprintf(c->nonce[kind], sizeof c->nonce[kind], "%c%06x%03x%06x", "ctr"[kind], own, (unsigned)c->id & 0xfff,
             (unsigned)number & 0xffffff);
}

static void begin(struct conn *c) {
    int64_t now = now_ns();
    if (errors >= MAX_ERRORS || (limit_requests && started_requests >= limit_requests)) return;
    if (now - began >= limit_ns) return;
    size_t step = (size_t)c->id + c->begun;
    write_nonce(c, OF_CONVERSATION, step / turn_count);
    write_nonce(c, OF_REQUEST, c->begun);
    c->turn = &turns[step % turn_count];
    c->begun++;
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
    static char headers[MAX_HEAD / 2];
    int clients = 1;
    double seconds = 3600;
    run_number = (unsigned)getpid();
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
        if (strcmp(name, "--run") == 0) run_number = (unsigned)atoi(value);
        if (strcmp(name, "--timeout") == 0) timeout_ns = (int64_t)(atof(value) * 1e9);
        if (strcmp(name, "--header") == 0) {
            size_t used = strlen(headers);
            snprintf(headers + used, sizeof headers - used, "%s\r\n", value);
        }
    }
    if (!port || !body_path || clients < 1 || clients > MAX_CLIENTS) {
        fprintf(stderr, "usage: load --port N --body FILE [--clients N] [--requests N] [--seconds S] "
                        "[--stream 0|1] [--header H]...\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    limit_ns = (int64_t)(seconds * 1e9);
    size_t body_len;
    const char *body = map_file(body_path, &body_len);
    cut_body(body, body_len);
    write_heads(path, headers);
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct conn *conns = calloc((size_t)clients, sizeof *conns);
    if (!conns) abort();
    for (int i = 0; i < clients; i++) {
        conns[i].id = i;
        write_nonce(&conns[i], OF_CLIENT, 0);
        conn_open(&conns[i]);
    }
    run(conns, clients);
    print_result((double)(now_ns() - began) / 1e9);
    return 0;
}
