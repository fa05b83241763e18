/* What the mock upstream and the load generator share: message framing of HTTP/1.1 and a scan that
 * finds markers in a byte stream without keeping it. */
#ifndef CTXGATE_BENCH_WIRE_H
#define CTXGATE_BENCH_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MAX_HEAD 16384
#define CARRY 63

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- heads ---------------------------------------------------------------------------------- */

/* The value of header `name` (lower case, with its colon) in a head; NULL when absent. */
static inline const char *head_value(const char *head, size_t len, const char *name) {
    size_t width = strlen(name);
    const char *line = memchr(head, '\n', len), *end = head + len;
    while (line && ++line + width < end) {
        if (strncasecmp(line, name, width) == 0) {
            line += width;
            while (line < end && (*line == ' ' || *line == '\t')) line++;
            return line;
        }
        line = memchr(line, '\n', (size_t)(end - line));
    }
    return NULL;
}

static inline bool value_has(const char *value, const char *end, const char *word) {
    size_t width = strlen(word);
    if (!value) return false;
    for (; value + width <= end && *value != '\r' && *value != '\n'; value++)
        if (strncasecmp(value, word, width) == 0) return true;
    return false;
}

/* ---- bodies --------------------------------------------------------------------------------- */

enum framing { BODY_LENGTH, BODY_CHUNKED, BODY_TO_EOF };
enum chunk_state { SIZE, EXTENSION, DATA, AFTER_DATA, TRAILER };

struct body {
    enum framing framing;
    enum chunk_state state;
    uint64_t left; /* of the body, or of the current chunk */
    bool done, bad, line_empty;
};

typedef void (*sink)(void *self, const char *data, size_t len);

static inline void body_start(struct body *b, enum framing framing, uint64_t length) {
    memset(b, 0, sizeof *b);
    b->framing = framing;
    b->left = length;
    b->done = framing == BODY_LENGTH && length == 0;
}

static inline void chunk_line_byte(struct body *b, char c) {
    if (b->state == SIZE) {
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit >= 0)
            b->left = b->left * 16 + (uint64_t)digit;
        else if (c == ';')
            b->state = EXTENSION;
        else if (c == '\n')
            b->state = b->left ? DATA : TRAILER, b->line_empty = true;
        else if (c != '\r')
            b->bad = true;
    } else if (b->state == EXTENSION) {
        if (c == '\n') b->state = b->left ? DATA : TRAILER, b->line_empty = true;
    } else if (b->state == AFTER_DATA) {
        if (c == '\n') b->state = SIZE, b->left = 0;
    } else if (c == '\n') { /* TRAILER */
        b->done = b->line_empty;
        b->line_empty = true;
    } else if (c != '\r') {
        b->line_empty = false;
    }
}

/* Gives the payload in data[0:len] to `out`; returns the bytes that belong to this body. */
static inline size_t body_feed(struct body *b, const char *data, size_t len, sink out, void *self) {
    size_t at = 0;
    while (at < len && !b->done && !b->bad) {
        if (b->framing == BODY_CHUNKED && b->state != DATA) {
            chunk_line_byte(b, data[at++]);
            continue;
        }
        size_t take = len - at;
        if (b->framing != BODY_TO_EOF && take > b->left) take = (size_t)b->left;
        out(self, data + at, take);
        at += take;
        if (b->framing == BODY_TO_EOF) continue;
        b->left -= take;
        if (b->left == 0) {
            if (b->framing == BODY_LENGTH)
                b->done = true;
            else
                b->state = AFTER_DATA;
        }
    }
    return at;
}

/* ---- markers -------------------------------------------------------------------------------- */

/* First place of `needle` (at least 2 bytes): compares its first and last byte 16 places at a time. */
static inline const char *find(const char *text, size_t len, const char *needle, size_t width) {
    if (len < width) return NULL;
#ifdef __SSE2__
    const __m128i first = _mm_set1_epi8(needle[0]), last = _mm_set1_epi8(needle[width - 1]);
    while (len >= width + 15) {
        __m128i a = _mm_cmpeq_epi8(first, _mm_loadu_si128((const __m128i *)text));
        __m128i z = _mm_cmpeq_epi8(last, _mm_loadu_si128((const __m128i *)(text + width - 1)));
        unsigned hits = (unsigned)_mm_movemask_epi8(_mm_and_si128(a, z));
        for (; hits; hits &= hits - 1) {
            const char *at = text + __builtin_ctz(hits);
            if (memcmp(at, needle, width) == 0) return at;
        }
        text += 16;
        len -= 16;
    }
#endif
    return memmem(text, len, needle, width);
}

/* The last bytes of what has been seen, so that a marker split over two reads is found. */
struct carry {
    char bytes[2 * CARRY];
    size_t len;
};

typedef void (*matcher)(void *self, const char *text, size_t len, size_t fresh);

/* Calls `match` on the seam between the old bytes and the new ones, then on the new ones. `fresh` is
 * the offset in `text` where unseen bytes begin: a match that ends before it has been reported. */
static inline void carry_scan(struct carry *c, const char *data, size_t len, matcher match, void *self) {
    size_t old = c->len, seam = len < CARRY ? len : CARRY;
    if (old) {
        memcpy(c->bytes + old, data, seam);
        match(self, c->bytes, old + seam, old);
    }
    match(self, data, len, old ? seam : 0);
    if (len >= CARRY) {
        memcpy(c->bytes, data + len - CARRY, CARRY);
        c->len = CARRY;
    } else {
        if (!old) memcpy(c->bytes, data, len);
        size_t total = old + len, drop = total > CARRY ? total - CARRY : 0;
        memmove(c->bytes, c->bytes + drop, total - drop);
        c->len = total - drop;
    }
}

#endif
