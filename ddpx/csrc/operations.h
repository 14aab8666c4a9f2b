/* What plans are made of in the compiled helper. Plain C, no Python, no torch.
 *
 * The caller (ddpx/native.py and ddpx/native_messages.py, by ctypes, so without the GIL) hands over an array of these.
 * Numbers of kinds and the layout of both structs are written there once more. */

#ifndef DDPX_OPERATIONS_H
#define DDPX_OPERATIONS_H

#include <stdint.h>
#include <time.h>

enum { WAIT, PUBLISH, HOLD, CLAIM, RELEASE, COPY, SUM_F32, SUM_F64, SUM_BF16, SUM_F16, SEND, RECEIVE, SENT, RECEIVED };

typedef struct {
    int64_t kind;
    int64_t count;             /* bytes to copy or send, elements to add, nanoseconds to hold, tick or message to wait for */
    void *out;                 /* written; for WAIT and PUBLISH the clock, for CLAIM and RELEASE my word of writing */
    const void *const *source; /* `sources` addresses; WAIT: my word of sleep; PUBLISH, CLAIM: words of my peers */
    int64_t sources;
    int64_t peer;              /* WAIT, SEND, RECEIVE, SENT, RECEIVED: who */
    const uint64_t *header;    /* WAIT: the peer's headers, {header, epoch} by epoch % HEADERS */
    void *const *also;         /* sums: `alsos` further addresses that get the same as `out` */
    int64_t alsos;
    int64_t past_caches;       /* sums: write to memory directly */
} operation;

typedef struct {
    int64_t wait_ns;    /* out: spent waiting for peers */
    int64_t longest_ns; /* out: the longest of these waits */
    int64_t last_peer;  /* out: whom it was for */
} outcome;

/* Runs a COPY or a sum. */
void ddpx_compute(const operation *o);

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static inline void count_wait(outcome *result, int64_t peer, int64_t waited_ns) {
    result->wait_ns += waited_ns;
    if (waited_ns > result->longest_ns) {
        result->longest_ns = waited_ns;
        result->last_peer = peer;
    }
}

#endif
