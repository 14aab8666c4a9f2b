/* A mapped plan's operations run in one call: wait for clocks, add, copy, publish.
 *
 * Anything unusual (a peer that does not come within a slice, one that is in another epoch, entered this one with
 * another header, or has shut its memory) is not decided here: ddpx_run returns the number of the operation, and the
 * caller looks, raises, or goes on. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "operations.h"

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* 1 when the clock has reached `target`, 0 when it has not by the end of one slice. `sleeping` is my word for it: set,
 * it asks peers to wake me. Their clock is looked at after it is set, here and once more by the kernel. */
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

/* Whether I may write into my peers' memory in this epoch: said first, then looked whether one of them has shut it. A
 * peer that shuts does the same in turn, so one of us sees the other. */
static int claimed(const operation *o, uint64_t epoch) {
    __atomic_store_n((uint64_t *)o->out, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t peer = 0; peer < o->sources; peer++)
        if (__atomic_load_n((const uint64_t *)o->source[peer], __ATOMIC_SEQ_CST) > epoch) {
            __atomic_store_n((uint64_t *)o->out, 0, __ATOMIC_RELEASE);
            return 0;
        }
    return 1;
}

/* Shuts my memory for the epochs before `after`. The caller then waits until nobody writes. */
void ddpx_shut(uint64_t *word, uint64_t after) {
    __atomic_store_n(word, after, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Runs operations [from, count). Ticks are relative to `base`, the clock at the plan's start. Returns `count`, or the
 * number of a WAIT or CLAIM that the caller has to look at. */
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
                count_wait(result, o->peer, now_ns() - before);
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
        case CLAIM:
            if (!claimed(o, base >> 32)) return i;
            break;
        case RELEASE: __atomic_store_n((uint64_t *)o->out, 0, __ATOMIC_RELEASE); break;
        default: ddpx_compute(o);
        }
    }
    return count;
}

