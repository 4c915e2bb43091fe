// Vectors of floats as wide as the processor's registers, and what the kernels do with them.
//
// GCC's and Clang's vector extension: arithmetic on whole vectors in plain C++, for any processor. Numbers are stored as
// float32, bfloat16 or float16 and always calculated in float32.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;
#else
constexpr int LANES = 4;
constexpr int TILE_ROWS = 6;
#endif

// A tile of a product: TILE_ROWS x TILE_COLUMNS sums are held in registers.
constexpr int TILE_VECTORS = 2;
constexpr int TILE_COLUMNS = TILE_VECTORS * LANES;

// Elements from which on threads share the rows of what is done to each by itself.
constexpr long SHARED = 1 << 16;

typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t Halfwords __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

struct BFloat16 {
    uint16_t bits;
};

#if defined(__FLT16_MANT_DIG__)
typedef _Float16 Float16;
typedef _Float16 Float16s __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
#endif

// Subtracting zero changes no number, so it costs nothing; adding it would.
static inline Floats splat(float value) { return value - Floats{}; }

static inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
static inline void store(float* to, Floats values) { *reinterpret_cast<Floats*>(to) = values; }

static inline Floats load(const BFloat16* from) {
    const Words words = __builtin_convertvector(*reinterpret_cast<const Halfwords*>(from), Words) << 16;
    return reinterpret_cast<const Floats&>(words);
}

// Rounds to nearest, ties to even; not-a-number stays one.
#if defined(__AVX512BF16__)
// Below the smallest normal number it gives zero.
static inline void store(BFloat16* to, Floats values) {
    const __m256bh narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
    memcpy(to, &narrow, sizeof narrow);
}
#else
static inline void store(BFloat16* to, Floats values) {
    const Words words = reinterpret_cast<const Words&>(values);
    const Words rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16;
    const Words is_number = reinterpret_cast<const Words&>(static_cast<const Ints&>(values == values));
    const Words result = (rounded & is_number) | (~is_number & 0x7FC0);
    *reinterpret_cast<Halfwords*>(to) = __builtin_convertvector(result, Halfwords);
}
#endif

// Two vectors side by side.
template <typename T>
static inline void store_pair(T* to, Floats left, Floats right) {
    store(to, left);
    store(to + LANES, right);
}
#if defined(__AVX512BF16__)
static inline void store_pair(BFloat16* to, Floats left, Floats right) {
    const __m512bh narrow = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(right), reinterpret_cast<__m512>(left));
    memcpy(to, &narrow, sizeof narrow);
}
#endif

static inline float widen(float value) { return value; }
static inline float widen(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
static inline void narrow(float* to, float value) { *to = value; }
static inline void narrow(BFloat16* to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    to->bits = value == value ? static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) : 0x7FC0;
}

#if defined(__FLT16_MANT_DIG__)
#if defined(__AVX512F__)
static inline Floats load(const Float16* from) {
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
static inline void store(Float16* to, Floats values) {
    const __m256i halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(values), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
#elif defined(__F16C__)
// The compiler converts one by one where it could convert eight.
static inline Floats load(const Float16* from) {
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
static inline void store(Float16* to, Floats values) {
    const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
#else
static inline Floats load(const Float16* from) {
    return __builtin_convertvector(*reinterpret_cast<const Float16s*>(from), Floats);
}
static inline void store(Float16* to, Floats values) {
    *reinterpret_cast<Float16s*>(to) = __builtin_convertvector(values, Float16s);
}
#endif
static inline float widen(Float16 value) { return static_cast<float>(value); }
static inline void narrow(Float16* to, float value) { *to = static_cast<Float16>(value); }
#endif

// What a thread calculates in. It grows to the largest size that was asked for, and begins at a cache line: a register that
// is as wide as one would else be loaded from two.
template <typename T>
class Scratch {
public:
    T* of(size_t size) {
        constexpr size_t line = 64;
        if (held_.size() < size + line / sizeof(T)) held_.resize(size + line / sizeof(T));
        const auto begin = reinterpret_cast<uintptr_t>(held_.data());
        return reinterpret_cast<T*>((begin + line - 1) / line * line);
    }

private:
    std::vector<T> held_;
};

template <typename From, typename To>
static inline void convert_row(const From* from, long width, To* to) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) store(to + i, load(from + i));
    for (; i < width; ++i) narrow(to + i, widen(from[i]));
}

typedef float Quad __attribute__((vector_size(16)));

static inline Quad quad(Floats values, int index) {
    Quad part;
    memcpy(&part, reinterpret_cast<const char*>(&values) + 16 * index, 16);
    return part;
}

static inline float sum(Floats values) {
    Quad total = quad(values, 0);
    for (int i = 1; i < LANES / 4; ++i) total += quad(values, i);
    return (total[0] + total[1]) + (total[2] + total[3]);
}

// The sums of four vectors.
static inline Quad sum_each(const Floats (&vectors)[4]) {
    Quad parts[4];
    for (int v = 0; v < 4; ++v) {
        parts[v] = quad(vectors[v], 0);
        for (int i = 1; i < LANES / 4; ++i) parts[v] += quad(vectors[v], i);
    }
    const Quad low = __builtin_shufflevector(parts[0], parts[1], 0, 1, 4, 5) +
                     __builtin_shufflevector(parts[0], parts[1], 2, 3, 6, 7);
    const Quad high = __builtin_shufflevector(parts[2], parts[3], 0, 1, 4, 5) +
                      __builtin_shufflevector(parts[2], parts[3], 2, 3, 6, 7);
    return __builtin_shufflevector(low, high, 0, 2, 4, 6) + __builtin_shufflevector(low, high, 1, 3, 5, 7);
}

static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

static inline float largest(Floats values) {
    Quad found = quad(values, 0);
    for (int i = 1; i < LANES / 4; ++i) {
        const Quad other = quad(values, i);
        found = other > found ? other : found;
    }
    const float low = found[0] > found[1] ? found[0] : found[1], high = found[2] > found[3] ? found[2] : found[3];
    return low > high ? low : high;
}

// exp(x) for x <= 0, to 2 units in the last place; 0 below -87. Cody and Waite (1980): x = n ln 2 + r, and
// a polynomial in r of degree 6 (the Taylor series suffices on |r| <= ln 2 / 2).
static inline Floats exp_of_negative(Floats x) {
#if defined(__AVX512F__)
    const __mmask16 is_some = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const Floats whole = reinterpret_cast<Floats>(_mm512_roundscale_ps(
        reinterpret_cast<__m512>(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    const Floats lowest = splat(-87.0f);
    const Ints tiny = x < lowest;
    x = tiny ? lowest : x;
    const Ints n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Ints);
    const Floats whole = __builtin_convertvector(n, Floats);
#endif
    const Floats r = (x - whole * 0.693145751953125f) - whole * 1.42860682030941723e-6f;
    Floats p = splat(1.0f / 720.0f);
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(
        _mm512_maskz_scalef_ps(is_some, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(whole)));
#else
    const Ints scale = (n + 127) << 23;
    const Floats result = p * reinterpret_cast<const Floats&>(scale);
    return tiny ? splat(0.0f) : result;
#endif
}

// The compiler keeps a vector that it has loaded. For a few uses it would rather load it again for each.
static inline void keep(Floats& values) {
#if defined(__x86_64__)
    asm("" : "+v"(values));
#endif
}

// What a tile asks memory for while it calculates: `first`, and with every step of its depth so many bytes further.
struct Ahead {
    const char* first = nullptr;
    long stride = 0;

    Ahead from(long step) const { return {first + step * stride, stride}; }
};

// Sums of a tile: out[m][n] += sum over k of rows[m * row_stride + k] * columns[k * column_stride + n], for M rows.
template <int M, bool ASKS = false, typename Column>
static inline void multiply_tile(
    const float* rows, long row_stride, const Column* columns, long column_stride, long depth, Floats (&sums)[M][TILE_VECTORS],
    Ahead ahead = {}) {
    for (long k = 0; k < depth; ++k) {
        if constexpr (ASKS) __builtin_prefetch(ahead.from(k).first);
        Floats column[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; ++v) {
            column[v] = load(columns + k * column_stride + v * LANES);
            if constexpr (M > 1 && M < TILE_ROWS) keep(column[v]);
        }
        for (int m = 0; m < M; ++m) {
            const Floats row = splat(rows[m * row_stride + k]);
            for (int v = 0; v < TILE_VECTORS; ++v) sums[m][v] += row * column[v];
        }
    }
}
