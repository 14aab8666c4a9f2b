/* Sums and copies: n sources in one pass over memory, in the order listed, halves in fp32 and rounded once. */

#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "operations.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define VECTORIZED
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* `out` may be one of the sources, element for element; nothing else overlaps. */
#if defined(__clang__)
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

enum { BLOCK = 2048 }; /* elements added at a time: sums stay in the first-level cache until all have got them */

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

/* out[i] = source[0][begin + i] + source[1][begin + i] + ..., in that order and in type `SUM`, for at most BLOCK. */
#define SUM_BLOCK(NAME, TYPE, SUM, LOAD, ROUND)                                                                        \
    VECTORIZED static void NAME(void *to, const void *const *source, int64_t sources, int64_t begin, int64_t length) { \
        TYPE *out = to;                                                                                                \
        const TYPE *a = (const TYPE *)source[0] + begin, *b = (const TYPE *)source[1] + begin;                         \
        if (sources == 2) {                                                                                            \
            ELEMENTWISE for (int64_t i = 0; i < length; i++) out[i] = ROUND(LOAD(a[i]) + LOAD(b[i]));                  \
            return;                                                                                                    \
        }                                                                                                              \
        SUM sum[BLOCK];                                                                                                \
        ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] = LOAD(a[i]) + LOAD(b[i]);                             \
        for (int64_t s = 2; s < sources - 1; s++) {                                                                    \
            const TYPE *next = (const TYPE *)source[s] + begin;                                                        \
            ELEMENTWISE for (int64_t i = 0; i < length; i++) sum[i] += LOAD(next[i]);                                  \
        }                                                                                                              \
        const TYPE *last = (const TYPE *)source[sources - 1] + begin;                                                  \
        ELEMENTWISE for (int64_t i = 0; i < length; i++) out[i] = ROUND(sum[i] + LOAD(last[i]));                       \
    }

SUM_BLOCK(sum_f32, float, float, , )
SUM_BLOCK(sum_f64, double, double, , )
SUM_BLOCK(sum_bf16, uint16_t, float, widen, round_bf16)

#if defined(__x86_64__) && defined(__GNUC__)
/* Compilers convert halves one by one, or shuffle them about; these registers do eight at a time. */
#define EIGHT_WIDE __attribute__((target("avx2,f16c")))

EIGHT_WIDE static inline __m256 load_bf16(const uint16_t *at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
}

EIGHT_WIDE static inline void store_bf16(uint16_t *at, __m256 wide) { /* as round_bf16 */
    __m256i bits = _mm256_castps_si256(wide), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i half = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    half = _mm256_blendv_epi8(_mm256_srli_epi32(half, 16), _mm256_set1_epi32(0x7FC0), nan);
    half = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
    _mm_storeu_si128((__m128i *)at, _mm256_castsi256_si128(half));
}

EIGHT_WIDE static inline __m256 load_f16(const uint16_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

EIGHT_WIDE static inline void store_f16(uint16_t *at, __m256 wide) {
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
}

#define SUM_EIGHT(NAME, LOAD, STORE)                                                                                   \
    EIGHT_WIDE static void NAME(void *to, const void *const *source, int64_t sources, int64_t begin, int64_t length) { \
        uint16_t *out = to, last[8] = {0};                                                                             \
        int64_t i = 0;                                                                                                 \
        for (; i + 8 <= length; i += 8) {                                                                              \
            __m256 sum = LOAD((const uint16_t *)source[0] + begin + i);                                                \
            for (int64_t s = 1; s < sources; s++)                                                                      \
                sum = _mm256_add_ps(sum, LOAD((const uint16_t *)source[s] + begin + i));                               \
            STORE(out + i, sum);                                                                                       \
        }                                                                                                              \
        __m256 sum = _mm256_setzero_ps();                                                                              \
        for (int64_t s = 0; s < sources; s++) {                                                                        \
            memcpy(last, (const uint16_t *)source[s] + begin + i, (length - i) * sizeof *last);                        \
            sum = s ? _mm256_add_ps(sum, LOAD(last)) : LOAD(last);                                                     \
        }                                                                                                              \
        STORE(last, sum);                                                                                              \
        memcpy(out + i, last, (length - i) * sizeof *last);                                                            \
    }

SUM_EIGHT(sum_bf16_eight, load_bf16, store_bf16)
SUM_EIGHT(sum_f16, load_f16, store_f16)
static int has_eight(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
int ddpx_has_f16(void) { return has_eight(); }
#else
#define sum_bf16_eight sum_bf16
static int has_eight(void) { return 0; }
#ifdef __FLT16_MAX__
SUM_BLOCK(sum_f16, _Float16, float, (float), (_Float16))
int ddpx_has_f16(void) { return 1; }
#else
#define sum_f16 sum_bf16 /* never called */
int ddpx_has_f16(void) { return 0; }
#endif
#endif

typedef void sum_block(void *to, const void *const *source, int64_t sources, int64_t begin, int64_t length);

static void copy_past_caches(char *out, const char *from, int64_t count) {
#if defined(__x86_64__)
    int64_t head = -(intptr_t)out & 15;
    if (head < count) {
        memcpy(out, from, head);
        int64_t at = head;
        for (; at + 16 <= count; at += 16)
            _mm_stream_si128((__m128i *)(out + at), _mm_loadu_si128((const __m128i *)(from + at)));
        out += at, from += at, count -= at;
    }
#endif
    memcpy(out, from, count);
}

static void sum(const operation *o, sum_block *sum_of, int64_t width) {
    double result[BLOCK]; /* room for the widest type */
    for (int64_t begin = 0; begin < o->count; begin += BLOCK) {
        int64_t length = o->count - begin < BLOCK ? o->count - begin : BLOCK;
        char *out = (char *)o->out + begin * width, *first = o->past_caches ? (char *)result : out;
        sum_of(first, o->source, o->sources, begin, length);
        if (o->past_caches) copy_past_caches(out, first, length * width);
        for (int64_t a = 0; a < o->alsos; a++)
            if (o->past_caches) copy_past_caches((char *)o->also[a] + begin * width, first, length * width);
            else memcpy((char *)o->also[a] + begin * width, first, length * width);
    }
#if defined(__x86_64__)
    if (o->past_caches) _mm_sfence(); /* what went past the caches is there before anything is said of it */
#endif
}

void ddpx_compute(const operation *o) {
    switch (o->kind) {
    case COPY: memcpy(o->out, o->source[0], (size_t)o->count); break;
    case SUM_F32: sum(o, sum_f32, sizeof(float)); break;
    case SUM_F64: sum(o, sum_f64, sizeof(double)); break;
    case SUM_BF16: sum(o, has_eight() ? sum_bf16_eight : sum_bf16, sizeof(uint16_t)); break;
    case SUM_F16: sum(o, sum_f16, sizeof(uint16_t)); break;
    }
}

int64_t ddpx_cache_bytes(void) { /* 0 where unknown */
#ifdef _SC_LEVEL3_CACHE_SIZE
    long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return found > 0 ? found : 0;
#else
    return 0;
#endif
}

/* Which source this was built from, so that a library left from an older one is not called with other operations. */
#ifndef DDPX_SOURCE
#define DDPX_SOURCE 0u
#endif
uint32_t ddpx_source(void) { return DDPX_SOURCE; }
