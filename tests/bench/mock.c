/* A fast mock of a vLLM server: one thread, epoll, HTTP/1.1 keep-alive.
 *
 * usage: mock --port N [--pace-ms N]
 *
 * POST /v1/chat/completions   64 SSE chunks, one write each, when the body asks for a stream; else one
 *                             JSON answer. Usage in vLLM's shape, on streams only if asked for.
 * POST /mock/pace?ms=N        N ms between chunks from now on (0: at once). A request may set its own
 *                             with the header x-mock-pace-ms. Paced streams share one clock, as the
 *                             streams of one engine share its steps, and each chunk carries the time
 *                             of its write ("@t=<CLOCK_MONOTONIC ns> ") as its content.
 * GET  /mock/stats            requests answered and body bytes read.
 * GET  /v1/models, /health, /metrics; POST /inference/v1/abort_requests.
 *
 * Bodies of any size are read through one shared buffer and not kept. Prints "ready" when it listens. */
#define _GNU_SOURCE
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define CHUNKS 64
#define MAX_BODY (512ull << 20)
#define READ_SIZE (256 * 1024)
#define MAX_CONNECTIONS 65536

enum phase { READ_HEAD, READ_BODY, REPLY };

struct conn {
    int fd;
    enum phase phase;
    char head[MAX_HEAD];
    size_t head_len; /* bytes kept in `head`; while replying, the start of a pipelined request */
    size_t head_end; /* length of the current request's head */
    struct body body;
    struct carry carry;
    uint64_t body_bytes;
    bool stream, include_usage, keep_alive;
    int pace_ms, next; /* next: index of the chunk to write */
    int64_t due;
    unsigned serial;
    char *out; /* what the socket did not take yet */
    size_t out_len, out_at;
};

static struct conn *conns[MAX_CONNECTIONS];
static char buffer[READ_SIZE];
static int poller, timer, pace_ms, highest;
static unsigned serial;
static uint64_t answered, bytes_read;
static int64_t armed;

static void on_request(struct conn *c);
static void feed(struct conn *c, const char *data, size_t len);

static void conn_close(struct conn *c) {
    conns[c->fd] = NULL;
    close(c->fd);
    free(c->out);
    free(c);
}

/* Returns false when the connection is gone. */
static bool conn_send(struct conn *c, const char *data, size_t len) {
    size_t sent = 0;
    if (c->out_at == c->out_len) {
        ssize_t n = send(c->fd, data, len, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) return false;
        sent = n < 0 ? 0 : (size_t)n;
    }
    if (sent == len) return true;
    if (c->out_at == c->out_len) c->out_at = c->out_len = 0;
    c->out = realloc(c->out, c->out_len + len - sent);
    if (!c->out) abort();
    memcpy(c->out + c->out_len, data + sent, len - sent);
    c->out_len += len - sent;
    return true;
}

static bool conn_flush(struct conn *c) {
    while (c->out_at < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_len - c->out_at, MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN;
        c->out_at += (size_t)n;
    }
    return true;
}

/* ---- answers -------------------------------------------------------------------------------- */

static bool reply(struct conn *c, int status, const char *type, const char *format, ...) {
    char body[4096], message[4096 + 256];
    va_list args;
    va_start(args, format);
    int len = vsnprintf(body, sizeof body, format, args);
    va_end(args);
    int n = snprintf(message, sizeof message,
                     "HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nserver: uvicorn\r\n\r\n%s", status,
                     status == 200 ? "OK" : "Error", type, len, body);
    return conn_send(c, message, (size_t)n);
}

static int usage_json(const struct conn *c, char *into, size_t size) {
    unsigned long long prompt = c->body_bytes / 4 + 1, cached = prompt > 160 ? (prompt - 160) / 16 * 16 : 0;
    return snprintf(into, size,
                    "{\"prompt_tokens\":%llu,\"total_tokens\":%llu,\"completion_tokens\":%d,"
                    "\"prompt_tokens_details\":{\"cached_tokens\":%llu}}",
                    prompt, prompt + CHUNKS, CHUNKS, cached);
}

/* One frame of the chunked transfer, in one write. */
static bool send_frame(struct conn *c, const char *payload, int len) {
    char frame[1024];
    int n = snprintf(frame, sizeof frame, "%x\r\n%.*s\r\n", (unsigned)len, len, payload);
    return conn_send(c, frame, (size_t)n);
}

static bool send_chunk(struct conn *c) {
    static const char *words[8] = {"The ", "parser ", "reads ", "one ", "line ", "and ", "returns ", "it. "};
    char delta[96], event[640];
    if (c->next == 0)
        snprintf(delta, sizeof delta, "\"role\":\"assistant\",\"content\":\"\"");
    else if (c->pace_ms)
        snprintf(delta, sizeof delta, "\"content\":\"@t=%lld \"", (long long)now_ns());
    else
        snprintf(delta, sizeof delta, "\"content\":\"%s\"", words[c->next % 8]);
    int n = snprintf(event, sizeof event,
                     "data: {\"id\":\"chatcmpl-mock%010u\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,"
                     "\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{%s},\"logprobs\":null,"
                     "\"finish_reason\":%s,\"token_ids\":null}]}\n\n",
                     c->serial, delta, c->next == CHUNKS - 1 ? "\"stop\",\"stop_reason\":null" : "null");
    return send_frame(c, event, n);
}

static bool send_tail(struct conn *c) {
    char usage[256], event[640];
    if (c->include_usage) {
        usage_json(c, usage, sizeof usage);
        int n = snprintf(event, sizeof event,
                         "data: {\"id\":\"chatcmpl-mock%010u\",\"object\":\"chat.completion.chunk\","
                         "\"created\":1790000000,\"model\":\"mock\",\"choices\":[],\"usage\":%s}\n\n",
                         c->serial, usage);
        if (!send_frame(c, event, n)) return false;
    }
    return send_frame(c, "data: [DONE]\n\n", 14) && conn_send(c, "0\r\n\r\n", 5);
}

static bool chat(struct conn *c) {
    char usage[256];
    c->serial = ++serial;
    if (c->stream) {
        static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                   "server: uvicorn\r\ntransfer-encoding: chunked\r\n\r\n";
        const char *own = head_value(c->head, c->head_end, "x-mock-pace-ms:");
        c->pace_ms = own ? atoi(own) : pace_ms;
        c->next = 0;
        c->due = 0;
        return conn_send(c, head, sizeof head - 1);
    }
    usage_json(c, usage, sizeof usage);
    c->next = CHUNKS + 1;
    return reply(c, 200, "application/json",
                 "{\"id\":\"chatcmpl-mock%010u\",\"object\":\"chat.completion\",\"created\":1790000000,\"model\":\"mock\","
                 "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The parser reads one line "
                 "and returns it, so the caller can stop at the first error.\",\"refusal\":null,\"tool_calls\":[]},"
                 "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":null}],"
                 "\"usage\":%s,\"prompt_logprobs\":null,\"kv_transfer_params\":null}",
                 c->serial, usage);
}

static bool is(const struct conn *c, const char *start) { return strncmp(c->head, start, strlen(start)) == 0; }

static bool answer(struct conn *c) {
    c->next = CHUNKS + 1; /* complete once flushed, unless it is a stream */
    if (is(c, "POST /v1/chat/completions ")) return chat(c);
    if (is(c, "POST /inference/v1/abort_requests ")) return reply(c, 200, "application/json", "null");
    if (is(c, "GET /health ")) return reply(c, 200, "application/json", "");
    if (is(c, "GET /v1/models "))
        return reply(c, 200, "application/json",
                     "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1790000000,"
                     "\"owned_by\":\"vllm\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":1048576}]}");
    if (is(c, "GET /metrics "))
        return reply(c, 200, "text/plain; version=0.0.4",
                     "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"mock\"} 0\n"
                     "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"mock\"} 0\n"
                     "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"mock\"} 0.1\n");
    if (is(c, "POST /mock/pace?ms=")) {
        pace_ms = atoi(c->head + strlen("POST /mock/pace?ms="));
        return reply(c, 200, "application/json", "{\"pace_ms\":%d}", pace_ms);
    }
    if (is(c, "GET /mock/stats "))
        return reply(c, 200, "application/json", "{\"answered\":%llu,\"body_bytes\":%llu}",
                     (unsigned long long)answered, (unsigned long long)bytes_read);
    return reply(c, 404, "application/json", "{\"detail\":\"Not Found\"}");
}

/* ---- requests ------------------------------------------------------------------------------- */

static bool is_true(const char *text, const char *end) {
    while (text < end && (*text == ' ' || *text == '\t' || *text == '\r' || *text == '\n')) text++;
    if (text == end || *text++ != ':') return false;
    while (text < end && (*text == ' ' || *text == '\t' || *text == '\r' || *text == '\n')) text++;
    return text + 4 <= end && memcmp(text, "true", 4) == 0;
}

static bool has_true(const char *text, size_t len, const char *key) {
    const char *end = text + len;
    size_t width = strlen(key);
    while ((text = find(text, (size_t)(end - text), key, width)))
        if (is_true(text += width, end)) return true;
    return false;
}

static void match(void *self, const char *text, size_t len, size_t fresh) {
    struct conn *c = self;
    (void)fresh;
    if (!c->stream) c->stream = has_true(text, len, "\"stream\"");
    if (!c->include_usage) c->include_usage = has_true(text, len, "\"include_usage\"");
}

static void on_body(void *self, const char *data, size_t len) {
    struct conn *c = self;
    c->body_bytes += len;
    bytes_read += len;
    carry_scan(&c->carry, data, len, match, c);
}

static bool start_body(struct conn *c) {
    const char *length = head_value(c->head, c->head_end, "content-length:");
    const char *coding = head_value(c->head, c->head_end, "transfer-encoding:");
    const char *end = c->head + c->head_end;
    unsigned long long size = length ? strtoull(length, NULL, 10) : 0;
    bool chunked = value_has(coding, end, "chunked");
    if (size > MAX_BODY) return false;
    body_start(&c->body, chunked ? BODY_CHUNKED : BODY_LENGTH, size);
    c->carry.len = 0;
    c->body_bytes = 0;
    c->stream = c->include_usage = false;
    c->keep_alive = !value_has(head_value(c->head, c->head_end, "connection:"), end, "close");
    c->phase = READ_BODY;
    if (value_has(head_value(c->head, c->head_end, "expect:"), end, "100-continue"))
        return conn_send(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    return true;
}

static void arm(int64_t due) {
    if (armed && armed <= due) return;
    struct itimerspec at = {.it_value = {.tv_sec = due / 1000000000, .tv_nsec = due % 1000000000}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
    armed = due;
}

/* Writes what is due. Ends the exchange when all is written and taken by the socket. */
static void advance(struct conn *c) {
    while (c->next <= CHUNKS && c->out_at == c->out_len) {
        if (c->pace_ms && c->next > 0 && c->next < CHUNKS) {
            int64_t step = (int64_t)c->pace_ms * 1000000, now = now_ns();
            if (!c->due) c->due = (now / step + 1) * step;
            if (c->due > now) {
                arm(c->due);
                return;
            }
            c->due += step;
        }
        bool alive = c->next < CHUNKS ? send_chunk(c) : send_tail(c);
        c->next++;
        if (!alive) {
            conn_close(c);
            return;
        }
    }
    if (c->next <= CHUNKS || c->out_at < c->out_len) return;
    answered++;
    if (!c->keep_alive) {
        conn_close(c);
        return;
    }
    char rest[MAX_HEAD];
    size_t len = c->head_len;
    memcpy(rest, c->head, len);
    c->head_len = 0;
    c->phase = READ_HEAD;
    if (len) feed(c, rest, len);
}

static void on_request(struct conn *c) {
    c->phase = REPLY;
    c->head_len = 0;
    if (answer(c))
        advance(c);
    else
        conn_close(c);
}

/* May close the connection. */
static void feed(struct conn *c, const char *data, size_t len) {
    if (c->phase == READ_HEAD) {
        size_t before = c->head_len, take = len < MAX_HEAD - before ? len : MAX_HEAD - before;
        memcpy(c->head + before, data, take);
        c->head_len += take;
        size_t from = before > 3 ? before - 3 : 0;
        const char *end = find(c->head + from, c->head_len - from, "\r\n\r\n", 4);
        if (!end) {
            if (c->head_len == MAX_HEAD) conn_close(c);
            return;
        }
        c->head_end = (size_t)(end - c->head) + 4;
        if (!start_body(c)) {
            conn_close(c);
            return;
        }
        data += c->head_end - before;
        len -= c->head_end - before;
    }
    if (c->phase == READ_BODY) {
        size_t used = body_feed(&c->body, data, len, on_body, c);
        data += used;
        len -= used;
        if (c->body.bad) {
            conn_close(c);
            return;
        }
        if (!c->body.done) return;
        int fd = c->fd;
        on_request(c);
        if (conns[fd] != c || !len) return;
        if (c->phase != REPLY) {
            feed(c, data, len);
            return;
        }
    }
    if (c->head_len + len > MAX_HEAD) { /* a pipelined request larger than what we keep */
        conn_close(c);
        return;
    }
    memcpy(c->head + c->head_len, data, len);
    c->head_len += len;
}

static void readable(struct conn *c) {
    int fd = c->fd;
    while (conns[fd] == c) {
        ssize_t n = recv(fd, buffer, sizeof buffer, 0);
        if (n > 0)
            feed(c, buffer, (size_t)n);
        else if (n < 0 && errno == EAGAIN)
            return;
        else
            conn_close(c);
        if (n > 0 && (size_t)n < sizeof buffer) return; /* edge-triggered: what comes later wakes us again */
    }
}

static void accept_all(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (fd >= MAX_CONNECTIONS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct conn *c = calloc(1, sizeof *c);
        if (!c) abort();
        c->fd = fd;
        c->next = CHUNKS + 1;
        conns[fd] = c;
        if (fd > highest) highest = fd;
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void tick(void) {
    uint64_t expirations;
    if (read(timer, &expirations, sizeof expirations) < 0) return;
    armed = 0;
    for (int fd = 0; fd <= highest; fd++)
        if (conns[fd] && conns[fd]->phase == REPLY && conns[fd]->due) advance(conns[fd]);
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) < 0 || listen(fd, 1024) < 0) {
        perror("mock: listen");
        exit(1);
    }
    return fd;
}

int main(int argc, char **argv) {
    int port = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--port") == 0) port = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--pace-ms") == 0) pace_ms = atoi(argv[i + 1]);
    }
    if (!port) {
        fprintf(stderr, "usage: mock --port N [--pace-ms N]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    int listener = listen_on(port);
    poller = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    event.data.fd = timer;
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event);
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct epoll_event events[256];
        int n = epoll_wait(poller, events, 256, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            struct conn *c = conns[fd];
            if (fd == listener) {
                accept_all(listener);
            } else if (fd == timer) {
                tick();
            } else if (c) {
                if (events[i].events & EPOLLOUT && c->out_at < c->out_len) {
                    if (!conn_flush(c)) {
                        conn_close(c);
                        continue;
                    }
                    if (c->phase == REPLY) advance(c);
                }
                if (conns[fd] == c && events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) readable(c);
            }
        }
    }
}
