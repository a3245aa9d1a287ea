/* Chunks to their places: read, crc32c, then Blosc (LZ4, bitshuffle) or a copy. No Python, no state.
 *
 * Every length, offset and size in the input is checked before it is followed, so that a damaged or forged chunk is an error code and never
 * a read or write out of bounds; tests/objects/test_kernels.py runs this file under the sanitizers. Called without the GIL.
 *
 * Formats: Blosc 1 chunks (github.com/Blosc/c-blosc, README_CHUNK_FORMAT.rst), LZ4 blocks (github.com/lz4/lz4, doc/lz4_Block_format.md).
 * x86-64 only. What a processor has is asked once, when the library is loaded.
 *
 * Sizes are in bytes. A "plane" is one bit of every value of a block: bitshuffle stores bit b of all values side by side, as block / 8 /
 * width bytes, plane after plane, the lowest bit of the first byte of the values first.
 */
#include <errno.h>
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#ifndef SOURCE
#define SOURCE 0
#endif

enum { OK = 0, BAD_CRC = 1, BAD_HEADER = 2, BAD_DATA = 3, BAD_SIZE = 4, NOT_MINE = 5, SCRATCH = 6, BAD_READ = 7 };
enum { CODEC_NONE = 0, CODEC_LZ4 = 1 };

/* One chunk, as eleven int64 of a table that the caller fills. */
typedef struct {
    uint64_t packed;      /* address of the stored bytes, without their crc */
    int64_t packed_size;
    uint64_t crc;         /* address of the 4 bytes of the crc; 0: not checked */
    int64_t size;         /* of the decoded bytes, */
    int64_t skip;         /* of which ``take`` from ``skip`` on are wanted, */
    int64_t take;
    uint64_t out;         /* at this address; 0: only the crc is checked */
    int64_t pitch;        /* 0: in one piece; else in rows of so many bytes, ``skip`` and ``take`` being whole rows, */
    int64_t left;         /* of each of which ``width`` bytes from ``left`` on are wanted, */
    int64_t width;
    int64_t stride;       /* so many bytes apart at ``out`` */
} job;

static int is_whole(const job *j) { return j->skip == 0 && j->take == j->size && j->pitch == 0; }

/* One ranged read of a file, as three int64; its chunks are the next ``jobs`` of the table. */
typedef struct {
    int64_t offset;
    int64_t size;
    int64_t jobs;
} range;

static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static uint64_t load64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }

/* What is wanted of the decoded bytes from ``begin`` to ``end`` of a chunk, to its place. */
static void place(const job *j, const uint8_t *bytes, int64_t begin, int64_t end) {
    int64_t first = begin > j->skip ? begin : j->skip, last = end < j->skip + j->take ? end : j->skip + j->take;
    uint8_t *out = (uint8_t *)j->out;
    if (first >= last) return;
    if (j->pitch == 0) {
        memcpy(out + first - j->skip, bytes + first - begin, (size_t)(last - first));
        return;
    }
    for (int64_t row = first / j->pitch; row * j->pitch < last; row++) {
        int64_t start = row * j->pitch + j->left, from = start > first ? start : first;
        int64_t to = start + j->width < last ? start + j->width : last;
        if (from < to)
            memcpy(out + (row - j->skip / j->pitch) * j->stride + from - start, bytes + from - begin, (size_t)(to - from));
    }
}

/* ---- crc32c ------------------------------------------------------------------------------------------------------------------------
 * Folding by carry-less multiplication (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", Intel 2009): a
 * lane of 16 bytes that lies D bits ahead of another adds to it as low * (x^(D+32) mod P) + high * (x^(D-32) mod P). What is left of the
 * message are 16 bytes with the same remainder, which the crc32 instruction takes. */

static uint64_t fold_constant(int bits) {
    uint32_t r = 0x80000000u; /* x^0, bit-reflected: the lowest power is the highest bit */
    for (int i = 0; i < bits; i++) r = (r >> 1) ^ (0x82F63B78u & (0u - (r & 1)));
    return (uint64_t)r << 1;
}

static uint64_t fold_2048[2], fold_512[2], fold_128[2];

__attribute__((target("sse4.2"))) static uint32_t crc_plain(uint32_t crc, const uint8_t *p, int64_t n) {
    uint64_t state = crc;
    for (; n >= 8; p += 8, n -= 8) state = _mm_crc32_u64(state, load64(p));
    crc = (uint32_t)state;
    for (; n > 0; p++, n--) crc = _mm_crc32_u8(crc, *p);
    return crc;
}

__attribute__((target("sse4.2,pclmul"))) static __m128i fold(__m128i lane, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(lane, by, 0x00), high = _mm_clmulepi64_si128(lane, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc_of_lanes(__m128i lanes[4], const uint8_t *p, int64_t n) {
    __m128i by4 = _mm_set_epi64x((int64_t)fold_512[1], (int64_t)fold_512[0]);
    __m128i by1 = _mm_set_epi64x((int64_t)fold_128[1], (int64_t)fold_128[0]);
    __m128i a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
    for (; n >= 64; p += 64, n -= 64) {
        a = fold(a, by4, _mm_loadu_si128((const __m128i *)p));
        b = fold(b, by4, _mm_loadu_si128((const __m128i *)(p + 16)));
        c = fold(c, by4, _mm_loadu_si128((const __m128i *)(p + 32)));
        d = fold(d, by4, _mm_loadu_si128((const __m128i *)(p + 48)));
    }
    __m128i one = fold(fold(fold(a, by1, b), by1, c), by1, d);
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, one);
    return crc_plain(crc_plain(0, rest, 16), p, n);
}

/* The crc32 instruction takes three cycles but starts one in each: three streams at once. A stream that lies THIRD bytes ahead of the next
 * is multiplied by x^(8 * THIRD). */
#define THIRD 1024
static uint64_t ahead_one, ahead_two;

__attribute__((target("sse4.2,pclmul"))) static uint64_t ahead(uint64_t crc, uint64_t by) {
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)crc), _mm_cvtsi64_si128((int64_t)by), 0x00);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc_three(uint32_t crc, const uint8_t *p, int64_t n) {
    uint64_t a = ~crc;
    for (; n >= 3 * THIRD; p += 3 * THIRD, n -= 3 * THIRD) {
        uint64_t b = 0, c = 0;
        for (int i = 0; i < THIRD; i += 8) {
            a = _mm_crc32_u64(a, load64(p + i));
            b = _mm_crc32_u64(b, load64(p + THIRD + i));
            c = _mm_crc32_u64(c, load64(p + 2 * THIRD + i));
        }
        a = ahead(a, ahead_two) ^ ahead(b, ahead_one) ^ c;
    }
    return ~crc_plain((uint32_t)a, p, n);
}

__attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq"))) static uint32_t crc_512(uint32_t crc, const uint8_t *p, int64_t n) {
    if (n < 512) return crc_three(crc, p, n);
    __m512i by16 = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)fold_2048[1], (int64_t)fold_2048[0]));
    __m512i by4 = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)fold_512[1], (int64_t)fold_512[0]));
    __m512i z[4];
    for (int i = 0; i < 4; i++) z[i] = _mm512_loadu_si512(p + 64 * i);
    z[0] = _mm512_xor_si512(z[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256)
        for (int i = 0; i < 4; i++) {
            __m512i low = _mm512_clmulepi64_epi128(z[i], by16, 0x00), high = _mm512_clmulepi64_epi128(z[i], by16, 0x11);
            z[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(p + 64 * i), 0x96);
        }
    for (int i = 1; i < 4; i++) {
        __m512i low = _mm512_clmulepi64_epi128(z[0], by4, 0x00), high = _mm512_clmulepi64_epi128(z[0], by4, 0x11);
        z[0] = _mm512_ternarylogic_epi64(low, high, z[i], 0x96);
    }
    __m128i lanes[4] = {_mm512_extracti32x4_epi32(z[0], 0), _mm512_extracti32x4_epi32(z[0], 1), _mm512_extracti32x4_epi32(z[0], 2),
                        _mm512_extracti32x4_epi32(z[0], 3)};
    return ~crc_of_lanes(lanes, p, n);
}

/* ---- bitshuffle, backwards ---------------------------------------------------------------------------------------------------------- */

/* Bit j of byte i becomes bit i of byte j. Three rounds of exchanging ever larger squares off the diagonal (Warren, Hacker's Delight,
 * 2nd edition, 7-3). */
static uint64_t transpose8(uint64_t x) {
    uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull;
    return x ^ t ^ (t << 28);
}

static void unshuffle_plain(const uint8_t *planes, uint8_t *out, int64_t plane, int width, int64_t from) {
    for (int64_t k = from; k < plane; k++)
        for (int b = 0; b < width; b++) {
            uint64_t square = 0;
            for (int bit = 0; bit < 8; bit++) square |= (uint64_t)planes[(8 * b + bit) * plane + k] << (8 * bit);
            square = transpose8(square);
            for (int j = 0; j < 8; j++) out[(8 * k + j) * width + b] = (uint8_t)(square >> (8 * j));
        }
}

/* 32 bytes of each of 8 planes to one byte of 256 values, 8 values in each 64 bits: of bytes 0 to 15 in the lower halves of v, of 16 to 31
 * in the upper ones. SQUARES transposes the 8 x 8 bits of each 64. */
#define GATHER(SQUARES, ROW)                                                                                                                   \
    __m256i r[8], s[8];                                                                                                                   \
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i *)(planes + (ROW) * plane));                                     \
    for (int i = 0; i < 4; i++) {                                                                                                         \
        s[2 * i] = _mm256_unpacklo_epi8(r[2 * i], r[2 * i + 1]);                                                                          \
        s[2 * i + 1] = _mm256_unpackhi_epi8(r[2 * i], r[2 * i + 1]);                                                                      \
    }                                                                                                                                     \
    for (int h = 0; h < 2; h++) { /* bytes 0 to 7, and 8 to 15, of each half */                                                           \
        __m256i a = _mm256_unpacklo_epi16(s[h], s[2 + h]), b = _mm256_unpackhi_epi16(s[h], s[2 + h]);                                     \
        __m256i c = _mm256_unpacklo_epi16(s[4 + h], s[6 + h]), d = _mm256_unpackhi_epi16(s[4 + h], s[6 + h]);                             \
        v[4 * h + 0] = SQUARES(_mm256_unpacklo_epi32(a, c));                                                                              \
        v[4 * h + 1] = SQUARES(_mm256_unpackhi_epi32(a, c));                                                                              \
        v[4 * h + 2] = SQUARES(_mm256_unpacklo_epi32(b, d));                                                                              \
        v[4 * h + 3] = SQUARES(_mm256_unpackhi_epi32(b, d));                                                                              \
    }

__attribute__((target("avx2"), always_inline)) static inline __m256i squares_avx2(__m256i x) {
    __m256i t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 7)), _mm256_set1_epi64x(0x00AA00AA00AA00AA));
    x = _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, 7)));
    t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 14)), _mm256_set1_epi64x(0x0000CCCC0000CCCC));
    x = _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, 14)));
    t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 28)), _mm256_set1_epi64x(0x00000000F0F0F0F0));
    return _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, 28)));
}

/* gf2p8affineqb takes the rows of its matrix in reverse: with the data as the matrix and single bits as the vectors, it transposes. */
__attribute__((target("avx2,gfni"), always_inline)) static inline __m256i squares_gfni(__m256i x) {
    return _mm256_gf2p8affine_epi64_epi8(_mm256_set1_epi64x((int64_t)0x8040201008040201ull), x, 0);
}

__attribute__((target("avx2"))) static void gather_avx2(const uint8_t *planes, int64_t plane, __m256i *v) { GATHER(squares_avx2, i) }
__attribute__((target("avx2,gfni"))) static void gather_gfni(const uint8_t *planes, int64_t plane, __m256i *v) { GATHER(squares_gfni, 7 - i) }

__attribute__((target("avx2"), always_inline)) static inline void store(uint8_t *out, __m128i a, __m128i b) {
    if (((uintptr_t)out & 15) == 0) { /* past the caches: nobody reads it soon, and the line need not be fetched to be written */
        _mm_stream_si128((__m128i *)out, a);
        _mm_stream_si128((__m128i *)(out + 16), b);
    } else {
        _mm_storeu_si128((__m128i *)out, a);
        _mm_storeu_si128((__m128i *)(out + 16), b);
    }
}

__attribute__((target("avx2"), always_inline)) static inline void put(uint8_t *out, __m256i low, __m256i high) {
    store(out, _mm256_castsi256_si128(low), _mm256_castsi256_si128(high));
}

__attribute__((target("avx2"), always_inline)) static inline void put_far(uint8_t *out, __m256i low, __m256i high) {
    store(out, _mm256_extracti128_si256(low, 1), _mm256_extracti128_si256(high, 1));
}

/* The gathered bytes of 256 values, v[byte of the value][8], to the values: 256 * width bytes. */
__attribute__((target("avx2"))) static void weave(uint8_t *out, __m256i v[4][8], int width) {
    int64_t half = 128 * (int64_t)width;
    if (width == 1)
        for (int i = 0; i < 8; i += 2) {
            put(out + 16 * i, v[0][i], v[0][i + 1]);
            put_far(out + half + 16 * i, v[0][i], v[0][i + 1]);
        }
    else if (width == 2)
        for (int i = 0; i < 8; i++) {
            __m256i a = _mm256_unpacklo_epi8(v[0][i], v[1][i]), b = _mm256_unpackhi_epi8(v[0][i], v[1][i]);
            put(out + 32 * i, a, b);
            put_far(out + half + 32 * i, a, b);
        }
    else
        for (int i = 0; i < 8; i++) {
            __m256i a = _mm256_unpacklo_epi8(v[0][i], v[1][i]), b = _mm256_unpackhi_epi8(v[0][i], v[1][i]);
            __m256i c = _mm256_unpacklo_epi8(v[2][i], v[3][i]), d = _mm256_unpackhi_epi8(v[2][i], v[3][i]);
            __m256i e = _mm256_unpacklo_epi16(a, c), f = _mm256_unpackhi_epi16(a, c);
            __m256i g = _mm256_unpacklo_epi16(b, d), h = _mm256_unpackhi_epi16(b, d);
            put(out + 64 * i, e, f);
            put(out + 64 * i + 32, g, h);
            put_far(out + half + 64 * i, e, f);
            put_far(out + half + 64 * i + 32, g, h);
        }
}

typedef void (*gatherer)(const uint8_t *planes, int64_t plane, __m256i *v);

/* Planes lie a power of two apart, so that their lines compete for the same few places in the first cache: whole lines (2 x 32 bytes) of 8
 * planes are taken before the next 8 are touched. */
__attribute__((target("avx2"))) static void unshuffle_256(const uint8_t *planes, uint8_t *out, int64_t plane, int width, gatherer gather) {
    __m256i v[2][4][8];
    int64_t k = 0;
    for (; k + 64 <= plane; k += 64) {
        for (int b = 0; b < width; b++)
            for (int n = 0; n < 2; n++) gather(planes + 8 * b * plane + k + 32 * n, plane, v[n][b]);
        for (int n = 0; n < 2; n++) weave(out + 8 * (k + 32 * n) * width, v[n], width);
    }
    unshuffle_plain(planes, out, plane, width, k);
}

__attribute__((target("avx2"))) static void unshuffle_avx2(const uint8_t *planes, uint8_t *out, int64_t plane, int width) {
    unshuffle_256(planes, out, plane, width, gather_avx2);
}

__attribute__((target("avx2"))) static void unshuffle_gfni(const uint8_t *planes, uint8_t *out, int64_t plane, int width) {
    unshuffle_256(planes, out, plane, width, gather_gfni);
}

/* ---- bitshuffle, forwards ----------------------------------------------------------------------------------------------------------- */

static void shuffle_plain(const uint8_t *in, uint8_t *planes, int64_t plane, int width, int64_t from) {
    for (int64_t k = from; k < plane; k++)
        for (int b = 0; b < width; b++) {
            uint64_t square = 0;
            for (int j = 0; j < 8; j++) square |= (uint64_t)in[(8 * k + j) * width + b] << (8 * j);
            square = transpose8(square);
            for (int bit = 0; bit < 8; bit++) planes[(8 * b + bit) * plane + k] = (uint8_t)(square >> (8 * bit));
        }
}

__attribute__((target("avx2"), always_inline)) static inline __m256i two(const uint8_t *low, const uint8_t *high) {
    return _mm256_set_m128i(_mm_loadu_si128((const __m128i *)high), _mm_loadu_si128((const __m128i *)low));
}

__attribute__((target("avx2"), always_inline)) static inline __m256i same(__m128i x) { return _mm256_broadcastsi128_si256(x); }

/* 256 values to their bytes, v[byte of the value][8]: of values 0 to 127 in the lower halves, of 128 to 255 in the upper ones. */
__attribute__((target("avx2"))) static void unweave(const uint8_t *in, __m256i v[4][8], int width) {
    int64_t half = 128 * (int64_t)width;
    if (width == 1)
        for (int i = 0; i < 8; i++) v[0][i] = two(in + 16 * i, in + half + 16 * i);
    else if (width == 2) {
        __m256i apart = same(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
        for (int i = 0; i < 8; i++) {
            __m256i a = _mm256_shuffle_epi8(two(in + 32 * i, in + half + 32 * i), apart);
            __m256i b = _mm256_shuffle_epi8(two(in + 32 * i + 16, in + half + 32 * i + 16), apart);
            v[0][i] = _mm256_unpacklo_epi64(a, b);
            v[1][i] = _mm256_unpackhi_epi64(a, b);
        }
    } else {
        __m256i apart = same(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        for (int i = 0; i < 8; i++) {
            __m256i q[4];
            for (int n = 0; n < 4; n++) q[n] = _mm256_shuffle_epi8(two(in + 64 * i + 16 * n, in + half + 64 * i + 16 * n), apart);
            __m256i a = _mm256_unpacklo_epi32(q[0], q[1]), b = _mm256_unpacklo_epi32(q[2], q[3]);
            __m256i c = _mm256_unpackhi_epi32(q[0], q[1]), d = _mm256_unpackhi_epi32(q[2], q[3]);
            v[0][i] = _mm256_unpacklo_epi64(a, b);
            v[1][i] = _mm256_unpackhi_epi64(a, b);
            v[2][i] = _mm256_unpacklo_epi64(c, d);
            v[3][i] = _mm256_unpackhi_epi64(c, d);
        }
    }
}

/* One byte of 256 values to 32 bytes of each of 8 planes. SQUARES transposes the 8 x 8 bits of each 64; ORDER is that of the 8 values first. */
#define SPREAD(SQUARES, ORDER)                                                                                                            \
    __m256i pairs = same(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)), r[8], s[8];                               \
    for (int i = 0; i < 8; i++) r[i] = _mm256_shuffle_epi8(SQUARES(ORDER(v[i])), pairs);                                                  \
    for (int i = 0; i < 4; i++) {                                                                                                         \
        s[i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]); /* planes 0 to 3 */                                                         \
        s[4 + i] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);                                                                         \
    }                                                                                                                                     \
    for (int h = 0; h < 8; h += 4) {                                                                                                      \
        __m256i a = _mm256_unpacklo_epi32(s[h], s[h + 1]), b = _mm256_unpacklo_epi32(s[h + 2], s[h + 3]);                                 \
        __m256i c = _mm256_unpackhi_epi32(s[h], s[h + 1]), d = _mm256_unpackhi_epi32(s[h + 2], s[h + 3]);                                 \
        _mm256_storeu_si256((__m256i *)(planes + (h + 0) * plane), _mm256_unpacklo_epi64(a, b));                                          \
        _mm256_storeu_si256((__m256i *)(planes + (h + 1) * plane), _mm256_unpackhi_epi64(a, b));                                          \
        _mm256_storeu_si256((__m256i *)(planes + (h + 2) * plane), _mm256_unpacklo_epi64(c, d));                                          \
        _mm256_storeu_si256((__m256i *)(planes + (h + 3) * plane), _mm256_unpackhi_epi64(c, d));                                          \
    }

__attribute__((target("avx2"), always_inline)) static inline __m256i as_is(__m256i x) { return x; }

__attribute__((target("avx2"), always_inline)) static inline __m256i reversed(__m256i x) {
    return _mm256_shuffle_epi8(x, same(_mm_setr_epi8(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8)));
}

__attribute__((target("avx2"))) static void spread_avx2(const __m256i *v, uint8_t *planes, int64_t plane) { SPREAD(squares_avx2, as_is) }
__attribute__((target("avx2,gfni"))) static void spread_gfni(const __m256i *v, uint8_t *planes, int64_t plane) {
    SPREAD(squares_gfni, reversed)
}

typedef void (*spreader)(const __m256i *v, uint8_t *planes, int64_t plane);

__attribute__((target("avx2"))) static void shuffle_256(const uint8_t *in, uint8_t *planes, int64_t plane, int width, spreader spread) {
    __m256i v[2][4][8];
    int64_t k = 0;
    for (; k + 64 <= plane; k += 64) {
        for (int n = 0; n < 2; n++) unweave(in + 8 * (k + 32 * n) * width, v[n], width);
        for (int b = 0; b < width; b++)
            for (int n = 0; n < 2; n++) spread(v[n][b], planes + 8 * b * plane + k + 32 * n, plane);
    }
    shuffle_plain(in, planes, plane, width, k);
}

__attribute__((target("avx2"))) static void shuffle_avx2(const uint8_t *in, uint8_t *planes, int64_t plane, int width) {
    shuffle_256(in, planes, plane, width, spread_avx2);
}

__attribute__((target("avx2"))) static void shuffle_gfni(const uint8_t *in, uint8_t *planes, int64_t plane, int width) {
    shuffle_256(in, planes, plane, width, spread_gfni);
}

static uint32_t (*crc32c)(uint32_t, const uint8_t *, int64_t);
static void (*unshuffle)(const uint8_t *, uint8_t *, int64_t, int);
static void (*shuffle)(const uint8_t *, uint8_t *, int64_t, int);

/* 1: AVX2 and PCLMULQDQ; 2: also GFNI, AVX-512 and VPCLMULQDQ; 0: less, which is not worth leaving numcodecs for. */
static int level_of_processor(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("avx2")) return 0;
    int newest = __builtin_cpu_supports("gfni") && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
                 __builtin_cpu_supports("avx512vl");
    return newest ? 2 : 1;
}

/* ---- LZ4 ---------------------------------------------------------------------------------------------------------------------------- */

#define SLACK 32 /* bytes behind the output that a copy may spoil */

/* A length of 15 goes on in further bytes. -1: the input ends. */
static int64_t more(const uint8_t **at, const uint8_t *end, int64_t length) {
    uint8_t byte;
    do {
        if (*at >= end) return -1;
        byte = *(*at)++;
        length += byte;
    } while (byte == 255);
    return length;
}

/* A match may overlap what it makes: a pattern that repeats. A short one goes by 16 bytes, as far as they do not overlap; for a long one
 * what stands already doubles with every copy. (Copies of 16 that overlap wait for each other's stores: 3 GB/s instead of 12 on planes of
 * zeros.) */
static void copy_match(uint8_t *to, int64_t distance, int64_t length) {
    const uint8_t *from = to - distance;
    if (distance >= 16 && length <= 64) {
        for (int64_t i = 0; i < length; i += 16) memcpy(to + i, from + i, 16);
        return;
    }
    if (distance == 1) {
        memset(to, *from, (size_t)length);
        return;
    }
    for (int64_t done = 0; done < length;) {
        int64_t n = distance + done < length - done ? distance + done : length - done;
        memcpy(to + done, from, (size_t)n);
        done += n;
    }
}

/* Decodes one block to exactly ``size`` bytes at ``out``, behind which SLACK bytes are writable. 0, or BAD_DATA. */
static int lz4_decode(const uint8_t *in, int64_t in_size, uint8_t *out, int64_t size) {
    const uint8_t *at = in, *end = in + in_size;
    uint8_t *to = out, *stop = out + size;
    while (at < end) {
        uint8_t token = *at++;
        int64_t literals = token >> 4, length = token & 15;
        if (literals == 15 && (literals = more(&at, end, literals)) < 0) return BAD_DATA;
        if (literals > end - at || literals > stop - to) return BAD_DATA;
        if (literals <= 64 && end - at >= 64 + 16)
            for (int64_t i = 0; i < literals; i += 16) memcpy(to + i, at + i, 16);
        else
            memcpy(to, at, (size_t)literals);
        at += literals;
        to += literals;
        if (at == end) return to == stop && length == 0 ? OK : BAD_DATA; /* the last sequence has no match */
        if (end - at < 2) return BAD_DATA;
        int64_t distance = at[0] | at[1] << 8;
        at += 2;
        if (length == 15 && (length = more(&at, end, length)) < 0) return BAD_DATA;
        length += 4;
        if (distance == 0 || distance > to - out || length > stop - to) return BAD_DATA;
        copy_match(to, distance, length);
        to += length;
    }
    return BAD_DATA;
}

/* A greedy match finder for planes of bits. What repeats in them are long runs; matches of four bytes, which skewed bits are full of, cost
 * more time on both sides than they save: with 7 as the least, sizes are the same within 0.3 %, encoding is up to 1.8 and decoding up to 1.2
 * times as fast as with 4. Steps grow where nothing is found. */
#define MATCH_MIN 7
#define HASH_BITS 12
#define DISTANCE_MAX 65535
#define LAST_LITERALS 5 /* the format: a block ends with at least 5 literals, its last match begins 12 bytes before the end or earlier */
#define LAST_MATCH 12

static uint32_t hash_of(uint64_t value) { return (uint32_t)((value << (64 - 8 * MATCH_MIN)) * 0x9E3779B185EBCA87ull >> (64 - HASH_BITS)); }

static uint8_t *put_more(uint8_t *to, int64_t length) {
    for (length -= 15; length >= 255; length -= 255) *to++ = 255;
    *to++ = (uint8_t)length;
    return to;
}

/* One sequence; match 0: the last one. Its end, or NULL if ``stop`` comes before it. */
static uint8_t *put_sequence(uint8_t *to, const uint8_t *stop, const uint8_t *literals, int64_t count, int64_t distance, int64_t match) {
    if (stop - to < count + count / 255 + match / 255 + 8) return NULL;
    uint8_t *token = to++;
    int64_t low = match > 0 ? match - 4 : 0;
    *token = (uint8_t)((count < 15 ? count : 15) << 4 | (low < 15 ? low : 15));
    if (count >= 15) to = put_more(to, count);
    memcpy(to, literals, (size_t)count);
    to += count;
    if (match == 0) return to;
    *to++ = (uint8_t)distance;
    *to++ = (uint8_t)(distance >> 8);
    return low >= 15 ? put_more(to, low) : to;
}

static int64_t same_bytes(const uint8_t *a, const uint8_t *b, const uint8_t *stop) { /* from a and b on, a up to stop */
    const uint8_t *from = a;
    for (; a + 8 <= stop; a += 8, b += 8) {
        uint64_t differ = load64(a) ^ load64(b);
        if (differ) return a - from + __builtin_ctzll(differ) / 8;
    }
    while (a < stop && *a == *b) a++, b++;
    return a - from;
}

/* The size of the block, or 0 if it takes ``room`` bytes or more. ``table``: 1 << HASH_BITS positions. */
static int64_t lz4_encode(const uint8_t *in, int64_t size, uint8_t *out, int64_t room, uint32_t *table) {
    const uint8_t *end = in + size, *anchor = in, *at = in + 1, *last = end - LAST_MATCH - 8, *match_stop = end - LAST_LITERALS;
    uint8_t *to = out, *stop = out + room;
    memset(table, 0, sizeof(uint32_t) << HASH_BITS);
    uint32_t misses = 1 << 6;
    while (at <= last) {
        uint64_t value = load64(at);
        uint32_t *slot = &table[hash_of(value)];
        const uint8_t *from = in + *slot;
        *slot = (uint32_t)(at - in);
        if (at - from > DISTANCE_MAX || (load64(from) ^ value) << (64 - 8 * MATCH_MIN)) {
            at += misses++ >> 6;
            continue;
        }
        while (at > anchor && from > in && at[-1] == from[-1]) at--, from--;
        int64_t length = same_bytes(at, from, match_stop);
        if ((to = put_sequence(to, stop, anchor, at - anchor, at - from, length)) == NULL) return 0;
        at += length;
        anchor = at;
        misses = 1 << 6;
    }
    to = put_sequence(to, stop, anchor, end - anchor, 0, 0);
    return to == NULL ? 0 : to - out;
}

/* ---- Blosc -------------------------------------------------------------------------------------------------------------------------- */

enum { HEADER = 16, MEMCPYED = 2, BITSHUFFLE = 4, DONT_SPLIT = 16, SPLITS_MAX = 16, SPLIT_VALUES_MIN = 128 };

/* One block: ``splits`` streams of equal size, each after its own length. */
static int blosc_block(const uint8_t *at, const uint8_t *end, uint8_t *to, int64_t size, int splits) {
    int64_t part = size / splits;
    for (int n = 0; n < splits; n++, to += part) {
        if (end - at < 4) return BAD_DATA;
        int64_t stored = load32(at);
        at += 4;
        if (stored > end - at) return BAD_DATA;
        if (stored == part)
            memcpy(to, at, (size_t)part);
        else if (lz4_decode(at, stored, to, part) != OK)
            return BAD_DATA;
        at += stored;
    }
    return part * splits == size ? OK : BAD_DATA;
}

/* A block's bytes back from its planes in ``scratch``. */
static void join_bits(const uint8_t *scratch, uint8_t *out, int64_t length, int width) {
    int64_t values = length / width;
    if (values % 8 != 0 || values == 0) {
        memcpy(out, scratch, (size_t)length);
        return;
    }
    unshuffle(scratch, out, values / 8, width);
    memcpy(out + values * width, scratch + values * width, (size_t)(length - values * width));
}

/* Only the blocks of which something is wanted are decoded; one that is not wanted in one piece goes by the second half of ``scratch``. */
static int blosc_decode(const job *j, uint8_t *scratch, int64_t scratch_size) {
    const uint8_t *in = (const uint8_t *)j->packed;
    uint8_t *out = (uint8_t *)j->out;
    int64_t in_size = j->packed_size, size = j->size, first = j->skip, last = j->skip + j->take;
    if (in_size < HEADER) return BAD_HEADER;
    int flags = in[2], width = in[3];
    int64_t block = load32(in + 8);
    if (in[0] != 2 || flags >> 5 != CODEC_LZ4 || load32(in + 4) != (uint64_t)size || load32(in + 12) != (uint64_t)in_size || width == 0 ||
        block == 0 || block > (size > 0 ? size : 1))
        return BAD_HEADER;
    if (flags & MEMCPYED) {
        if (in_size != HEADER + size) return BAD_HEADER;
        place(j, in + HEADER, 0, size);
        return OK;
    }
    if ((flags & (BITSHUFFLE | 1)) != BITSHUFFLE || (width != 1 && width != 2 && width != 4)) return NOT_MINE;
    if ((block + SLACK) * (is_whole(j) ? 1 : 2) > scratch_size) return SCRATCH;
    int64_t blocks = (size + block - 1) / block, starts = HEADER + 4 * blocks;
    if (starts > in_size) return BAD_DATA;
    for (int64_t n = first / block; n * block < last; n++) {
        int64_t start = load32(in + HEADER + 4 * n), begin = n * block, length = size - begin < block ? size - begin : block;
        if (start < starts || start > in_size) return BAD_DATA;
        int full = length == block && width <= SPLITS_MAX && length / width >= SPLIT_VALUES_MIN;
        int code = blosc_block(in + start, in + in_size, scratch, length, !(flags & DONT_SPLIT) && full ? width : 1);
        if (code != OK) return code;
        if (begin >= first && begin + length <= last && j->pitch == 0) {
            join_bits(scratch, out + begin - first, length, width);
            continue;
        }
        join_bits(scratch, scratch + block + SLACK, length, width);
        place(j, scratch + block + SLACK, begin, begin + length);
    }
    return OK;
}

static void store32(uint8_t *p, int64_t v) { uint32_t u = (uint32_t)v; memcpy(p, &u, 4); }

/* A block's planes in ``scratch``, or the block where it does not divide by 8 values. */
static const uint8_t *bits_of(const uint8_t *block, int64_t length, int width, uint8_t *scratch) {
    int64_t values = length / width;
    if (values % 8 != 0 || values == 0) return block;
    shuffle(block, scratch, values / 8, width);
    memcpy(scratch + values * width, block + values * width, (size_t)(length - values * width));
    return scratch;
}

/* A chunk as c-blosc 1.21 writes it with LZ4 and bitshuffle: blocks that are not split. ``out`` has room for HEADER + size bytes,
 * size > 0. */
static int64_t blosc_encode(const uint8_t *in, int64_t size, int width, int64_t block, uint8_t *out, uint8_t *scratch, uint32_t *table) {
    int64_t blocks = (size + block - 1) / block, room = HEADER + size, at = HEADER + 4 * blocks;
    int flags = CODEC_LZ4 << 5 | DONT_SPLIT | BITSHUFFLE;
    for (int64_t n = 0; n < blocks && at < room; n++) {
        int64_t left = size - n * block, length = left < block ? left : block, rest = room - at - 4;
        const uint8_t *planes = bits_of(in + n * block, length, width, scratch);
        int64_t made = rest > 0 && length > 64 ? lz4_encode(planes, length, out + at + 4, rest < length ? rest : length, table) : 0;
        if (made == 0 && rest >= length) { /* as it is, which its size says */
            memcpy(out + at + 4, planes, (size_t)length);
            made = length;
        }
        if (made == 0) {
            at = room;
            break;
        }
        store32(out + HEADER + 4 * n, at);
        store32(out + at, made);
        at += 4 + made;
    }
    if (at >= room) { /* it does not get smaller */
        flags |= MEMCPYED;
        memcpy(out + HEADER, in, (size_t)size);
        at = room;
    }
    out[0] = 2;
    out[1] = 1;
    out[2] = (uint8_t)flags;
    out[3] = (uint8_t)width;
    store32(out + 4, size);
    store32(out + 8, block);
    store32(out + 12, at);
    return at;
}

/* ---- what Python calls -------------------------------------------------------------------------------------------------------------- */

/* Of which source this is: the crc32 of this file, given by whoever compiles it. */
uint32_t fsref_source(void) { return SOURCE; }

/* Chooses the kernels, of ``level`` at most. Returns the level in use; 0: this processor has too little. Not thread-safe. */
int fsref_use(int level) {
    int found = level_of_processor();
    if (level < found) found = level;
    int bits[3] = {2048, 512, 128};
    uint64_t *to[3] = {fold_2048, fold_512, fold_128};
    for (int i = 0; i < 3; i++) {
        to[i][0] = fold_constant(bits[i] + 32);
        to[i][1] = fold_constant(bits[i] - 32);
    }
    ahead_one = fold_constant(8 * THIRD - 32);
    ahead_two = fold_constant(2 * 8 * THIRD - 32);
    crc32c = found == 2 ? crc_512 : crc_three;
    shuffle = found == 2 ? shuffle_gfni : shuffle_avx2;
    unshuffle = found == 2 ? unshuffle_gfni : unshuffle_avx2;
    return found;
}

/* crc32c (Castagnoli) of n bytes after others whose crc32c is ``crc`` (0: none). */
uint32_t fsref_crc32c(uint32_t crc, const uint8_t *data, int64_t n) { return crc32c(crc, data, n); }

static int unpack(const job *j, int codec, uint8_t *scratch, int64_t scratch_size) {
    const uint8_t *packed = (const uint8_t *)j->packed;
    if (j->crc != 0 && crc32c(0, packed, j->packed_size) != load32((const uint8_t *)j->crc)) return BAD_CRC;
    if (j->out == 0) return OK;
    if (codec == CODEC_LZ4) return blosc_decode(j, scratch, scratch_size);
    if (codec != CODEC_NONE) return NOT_MINE;
    if (j->packed_size != j->size) return BAD_SIZE;
    place(j, packed, 0, j->size);
    return OK;
}

/* Checks and decodes ``count`` chunks in order. Returns OK, or the code of the first that failed, whose index is in ``*failed`` (count: none).
 * ``scratch``: memory for one block and SLACK, twice where not all of a chunk is wanted; SCRATCH says that it is too small. */
int fsref_unpack(const job *jobs, int64_t count, int codec, uint8_t *scratch, int64_t scratch_size, int64_t *failed) {
    int code = OK;
    int64_t n = 0;
    while (n < count && (code = unpack(&jobs[n], codec, scratch, scratch_size)) == OK) n++;
    _mm_sfence(); /* what was stored past the caches is seen by whoever is told of it */
    *failed = n;
    return code;
}

#define IOVECS 512

/* Where the bytes of a range go: all to ``stored``, or (codec none) chunks that are wanted whole to their places and only the rest there.
 * Returns the number of iovecs; 0: there are too many, or the chunks are not as this needs them. */
static int spread(struct iovec *to, const range *r, const job *jobs, int codec, uint8_t *stored) {
    uint8_t *at = stored;
    int n = 0;
    for (const job *j = jobs; codec == CODEC_NONE && j < jobs + r->jobs; j++) {
        uint8_t *packed = (uint8_t *)j->packed;
        if (n + 3 > IOVECS || packed < at || j->packed_size != j->size) return 0;
        if (!is_whole(j) || j->size == 0) continue;
        if (packed > at) to[n++] = (struct iovec){at, (size_t)(packed - at)};
        to[n++] = (struct iovec){(void *)j->out, (size_t)j->size};
        at = packed + j->size;
    }
    if (stored + r->size > at) to[n++] = (struct iovec){at, (size_t)(stored + r->size - at)};
    return n;
}

static int fetch(int fd, const range *r, const job *jobs, int codec, uint8_t *stored, uint8_t *scratch, int64_t scratch_size) {
    struct iovec to[IOVECS];
    int vectors = spread(to, r, jobs, codec, stored);
    ssize_t got;
    if (vectors == 0) return NOT_MINE;
    do
        got = preadv(fd, to, vectors, r->offset);
    while (got < 0 && errno == EINTR);
    if (got != r->size) return BAD_READ;
    for (int64_t i = 0; i < r->jobs; i++) {
        job j = jobs[i];
        if (codec == CODEC_NONE && is_whole(&j)) { /* it is there already */
            j.packed = j.out;
            j.out = 0;
        }
        int code = unpack(&j, codec, scratch, scratch_size);
        if (code != OK) return code;
    }
    return OK;
}

/* Reads ``count`` ranges of a file one after the other through ``stored``, memory for the largest, and checks and decodes their chunks, which
 * lie in ascending order and do not overlap. With codec none they are read straight to their places. Returns OK, or the code of the first
 * range that failed, whose index is in ``*done``; ranges before it are done. Whoever calls this does the failed range again with care. */
int fsref_fetch(int fd, const range *ranges, int64_t count, const job *jobs, int codec, uint8_t *stored, uint8_t *scratch,
                int64_t scratch_size, int64_t *done) {
    int code = OK;
    int64_t n = 0;
    for (; n < count; jobs += ranges[n++].jobs)
        if ((code = fetch(fd, &ranges[n], jobs, codec, stored, scratch, scratch_size)) != OK) break;
    _mm_sfence();
    *done = n;
    return code;
}

/* Packs ``size`` bytes, values of ``width`` (1, 2, 4), in blocks of ``block`` bytes, a multiple of width and at most size. ``out``: room for
 * 16 + size bytes and 4 of crc32c, which follow. ``scratch``: ``block`` bytes and 16 KiB. Returns the packed size, without the crc. */
int64_t fsref_pack(const uint8_t *in, int64_t size, int width, int64_t block, uint8_t *out, uint8_t *scratch) {
    int64_t made = blosc_encode(in, size, width, block, out, scratch + (sizeof(uint32_t) << HASH_BITS), (uint32_t *)scratch);
    uint32_t crc = crc32c(0, out, made);
    memcpy(out + made, &crc, 4);
    return made;
}
