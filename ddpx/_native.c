/* A mapped plan's operations run in one call: wait for clocks, add, copy, publish. Plain C, no Python, no torch.
 *
 * The caller (ddpx/native.py, by ctypes, so without the GIL) hands over an array of operations. Anything unusual (a peer
 * that does not come within a slice, one that is in another epoch or entered this one with another header) is not
 * decided here: ddpx_run returns the number of the operation, and the caller looks, raises, or calls again from there. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define VECTORIZED
#endif

enum { WAIT, PUBLISH, HOLD, COPY, SUM_F32, SUM_F64, SUM_BF16, SUM_F16 };
/* `out` may be one of the sources, element for element; nothing else overlaps. */
#if defined(__clang__)
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

enum { BLOCK = 2048 }; /* elements added at a time: accumulators stay in the first-level cache */

typedef struct {
    int64_t kind;
    int64_t count;             /* bytes to copy, elements to add, nanoseconds to hold, tick to wait for or publish */
    void *out;                 /* written; for WAIT and PUBLISH the clock */
    const void *const *source; /* `sources` addresses; WAIT: my word of sleep; PUBLISH: those of my peers */
    int64_t sources;
    int64_t peer;              /* WAIT: who */
    const uint64_t *header;    /* WAIT: the peer's headers, {header, epoch} by epoch % HEADERS */
} operation;

typedef struct {
    int64_t wait_ns;    /* out: spent waiting for peers */
    int64_t longest_ns; /* out: the longest of these waits */
    int64_t last_peer;  /* out: whom it was for */
} outcome;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* 1 when the clock has reached `target`, 0 when it has not by the end of one slice. `sleeping` is my word for it: set, it
 * asks peers to wake me. Their clock is looked at after it is set, here and once more by the kernel. */
static int reached(const uint64_t *clock, uint64_t target, uint64_t *sleeping, int64_t spin_ns, int64_t slice_ns) {
    if (__atomic_load_n(clock, __ATOMIC_ACQUIRE) >= target) return 1;
    if (spin_ns > 0) {
        int64_t until = now_ns() + spin_ns;
        do {
            for (int i = 0; i < 16; i++) {
                if (__atomic_load_n(clock, __ATOMIC_ACQUIRE) >= target) return 1;
                pause_briefly();
            }
        } while (now_ns() < until);
    }
    int64_t until = now_ns() + slice_ns, left;
    __atomic_store_n(sleeping, 1, __ATOMIC_SEQ_CST);
    uint64_t seen;
    while ((seen = __atomic_load_n(clock, __ATOMIC_SEQ_CST)) < target && (left = until - now_ns()) > 0) {
        struct timespec t = {left / 1000000000LL, left % 1000000000LL};
        syscall(SYS_futex, clock, FUTEX_WAIT, (uint32_t)seen, &t, NULL, 0);
    }
    __atomic_store_n(sleeping, 0, __ATOMIC_RELEASE);
    return seen >= target;
}

static void wake_sleepers(const operation *o) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t peer = 0; peer < o->sources; peer++)
        if (__atomic_load_n((const uint64_t *)o->source[peer], __ATOMIC_SEQ_CST)) {
            syscall(SYS_futex, o->out, FUTEX_WAKE, 0x7FFFFFFF, NULL, NULL, 0);
            return;
        }
}

VECTORIZED static void sum_f32(float *out, const float *const *source, int64_t sources, int64_t count) {
    if (sources == 2) {
        const float *a = source[0], *b = source[1];
        ELEMENTWISE for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
        return;
    }
    float sum[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t length = count - begin < BLOCK ? count - begin : BLOCK;
        const float *a = source[0] + begin, *b = source[1] + begin;
        ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] = a[i] + b[i];
        for (int64_t s = 2; s < sources - 1; s++) {
            const float *next = source[s] + begin;
            ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] += next[i];
        }
        const float *last = source[sources - 1] + begin;
        ELEMENTWISE for (int64_t i = 0; i < length; i++) out[begin + i] = sum[i] + last[i];
    }
}

VECTORIZED static void sum_f64(double *out, const double *const *source, int64_t sources, int64_t count) {
    double sum[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t length = count - begin < BLOCK ? count - begin : BLOCK;
        memcpy(sum, source[0] + begin, length * sizeof *sum);
        for (int64_t s = 1; s < sources; s++) {
            const double *next = source[s] + begin;
            ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] += next[i];
        }
        memcpy(out + begin, sum, length * sizeof *sum);
    }
}

static inline float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline uint16_t round_bf16(float wide) { /* to nearest, ties to even; every NaN becomes the same quiet one */
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    uint16_t rounded = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
}

VECTORIZED static void sum_bf16(uint16_t *out, const uint16_t *const *source, int64_t sources, int64_t count) {
    float sum[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t length = count - begin < BLOCK ? count - begin : BLOCK;
        ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] = widen(source[0][begin + i]);
        for (int64_t s = 1; s < sources; s++) {
            const uint16_t *next = source[s] + begin;
            ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] += widen(next[i]);
        }
        ELEMENTWISE for (int64_t i = 0; i < length; i++) out[begin + i] = round_bf16(sum[i]);
    }
}

#ifdef __FLT16_MAX__
VECTORIZED static void sum_f16(_Float16 *out, const _Float16 *const *source, int64_t sources, int64_t count) {
    float sum[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t length = count - begin < BLOCK ? count - begin : BLOCK;
        ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] = (float)source[0][begin + i];
        for (int64_t s = 1; s < sources; s++) {
            const _Float16 *next = source[s] + begin;
            ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] += (float)next[i];
        }
        ELEMENTWISE for (int64_t i = 0; i < length; i++) out[begin + i] = (_Float16)sum[i];
    }
}
int ddpx_has_f16(void) { return 1; }
#else
int ddpx_has_f16(void) { return 0; }
#endif

/* Runs operations [from, count). Ticks are relative to `base`, the clock at the plan's start. Returns `count`, or the
 * number of a WAIT that the caller has to look at. */
int64_t ddpx_run(const operation *operations, int64_t from, int64_t count, uint64_t base, uint64_t header,
                 int64_t headers, int64_t spin_ns, int64_t slice_ns, outcome *result) {
    for (int64_t i = from; i < count; i++) {
        const operation *o = &operations[i];
        switch (o->kind) {
        case WAIT: {
            uint64_t target = base + (uint64_t)o->count, epoch = base >> 32;
            if (__atomic_load_n((uint64_t *)o->out, __ATOMIC_ACQUIRE) < target) {
                int64_t before = now_ns();
                int came = reached(o->out, target, (uint64_t *)o->source[0], spin_ns, slice_ns);
                int64_t waited = now_ns() - before;
                result->wait_ns += waited;
                if (waited > result->longest_ns) {
                    result->longest_ns = waited;
                    result->last_peer = o->peer;
                }
                if (!came) return i;
            }
            if (__atomic_load_n((uint64_t *)o->out, __ATOMIC_ACQUIRE) >> 32 != epoch) return i;
            const uint64_t *theirs = o->header + 2 * (epoch % (uint64_t)headers);
            if (theirs[1] == epoch && theirs[0] != header) return i;
            break;
        }
        case PUBLISH:
            __atomic_store_n((uint64_t *)o->out, base + (uint64_t)o->count, __ATOMIC_SEQ_CST);
            wake_sleepers(o);
            break;
        case HOLD: {
            struct timespec t = {o->count / 1000000000LL, o->count % 1000000000LL};
            while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t)) {}
            break;
        }
        case COPY: memcpy(o->out, o->source[0], (size_t)o->count); break;
        case SUM_F32: sum_f32(o->out, (const float *const *)o->source, o->sources, o->count); break;
        case SUM_F64: sum_f64(o->out, (const double *const *)o->source, o->sources, o->count); break;
        case SUM_BF16: sum_bf16(o->out, (const uint16_t *const *)o->source, o->sources, o->count); break;
#ifdef __FLT16_MAX__
        case SUM_F16: sum_f16(o->out, (const _Float16 *const *)o->source, o->sources, o->count); break;
#endif
        }
    }
    return count;
}

/* Which source this was built from, so that a library left from an older one is not called with other operations. */
#ifndef DDPX_SOURCE
#define DDPX_SOURCE 0u
#endif
uint32_t ddpx_source(void) { return DDPX_SOURCE; }
