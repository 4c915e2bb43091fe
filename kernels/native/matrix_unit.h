// Products of bfloat16 in the processor's matrix unit (Intel AMX), sums in float32.
//
// Its registers are tiles of 16 rows of 64 bytes. A block of a product is two by two of them, 32 rows and columns. One
// instruction multiplies 16 rows of 32 numbers with 32 x 16 others, which lie as pairs along the depth: a packed panel of
// BLOCK columns is a sequence of such tiles, [depth / 32][2 halves][16 pairs][16 columns][2]. Intel, Architecture
// Instruction Set Extensions Programming Reference, chapter 3. Numbers below the smallest normal one count as zero.
//
// Linux gives the registers to a process that asks. A thread sets their sizes before its products and lets go of them
// after, because a thread that holds them is slower to switch.
#pragma once

#include "vector.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__) && defined(__AVX512BF16__)
#define HAS_MATRIX_UNIT 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr long UNIT_ROWS = 16;
constexpr long UNIT_DEPTH = 32;
constexpr long BLOCK = 2 * UNIT_ROWS;
constexpr long UNIT_TILE = UNIT_ROWS * UNIT_DEPTH;
static_assert(BLOCK == TILE_COLUMNS);

// 2^x to four digits, more than bfloat16 keeps. A polynomial of degree 3 for 2^r, 0 <= r < 1, of the least
// relative error (Remez 1934), times 2^floor(x).
static inline Floats rough_power_of_two(Floats x) {
    const __m512 power = reinterpret_cast<__m512>(x);
    const Floats r = reinterpret_cast<Floats>(_mm512_reduce_ps(power, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    Floats p = splat(0.07802452f);
    p = p * r + 0.22606716f;
    p = p * r + 0.69583356f;
    p = p * r + 0.9999252f;
    return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), power));
}

// x / (1 + e^-x), as exact as bfloat16. Too large a power is infinite, and what is divided by it zero.
static inline Floats rough_silu(Floats x) {
    const Floats divisor = 1.0f + rough_power_of_two(x * -1.44269504088896341f);
    return x * reinterpret_cast<Floats>(_mm512_rcp14_ps(reinterpret_cast<__m512>(divisor)));
}

static inline long rounded_up(long count, long unit) { return (count + unit - 1) / unit * unit; }

// Whether this process may use the unit.
static inline bool has_matrix_unit() {
    constexpr long ask = 0x1023, tile_data = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ask, tile_data) == 0;
    return allowed;
}

// While it lives, this thread's tiles are 16 rows of 64 bytes.
class UnitTiles {
public:
    UnitTiles() {
        struct alignas(64) {
            uint8_t palette = 1, first_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } const sizes;
        _tile_loadconfig(&sizes);
    }
    ~UnitTiles() { _tile_release(); }
    UnitTiles(const UnitTiles&) = delete;
};

// out (+)= rows x panel, of TILES x 16 rows and BLOCK columns. `depth` is a multiple of UNIT_DEPTH, strides are in elements.
template <int TILES>
static inline void multiply_block(
    const BFloat16* rows, long row_stride, const BFloat16* panel, long depth, float* out, long out_stride, bool is_begun,
    Ahead ahead = {}) {
    // The compiler does not know that tiles are loaded from memory.
    asm volatile("" ::: "memory");
    float* below = out + UNIT_ROWS * out_stride;
    const long out_bytes = out_stride * sizeof(float), row_bytes = row_stride * sizeof(BFloat16);
    if (is_begun) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + UNIT_ROWS, out_bytes);
        if constexpr (TILES == 2) _tile_loadd(2, below, out_bytes);
        if constexpr (TILES == 2) _tile_loadd(3, below + UNIT_ROWS, out_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (TILES == 2) _tile_zero(2);
        if constexpr (TILES == 2) _tile_zero(3);
    }
    for (long k = 0; k < depth; k += UNIT_DEPTH) {
        const char* wanted = ahead.from(k).first;
        for (long byte = 0; byte < UNIT_DEPTH * ahead.stride; byte += 64) __builtin_prefetch(wanted + byte);
        _tile_loadd(4, rows + k, row_bytes);
        _tile_loadd(6, panel + k * BLOCK, 64);
        _tile_loadd(7, panel + k * BLOCK + UNIT_TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TILES == 2) {
            _tile_loadd(5, rows + UNIT_ROWS * row_stride + k, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + UNIT_ROWS, out_bytes);
    if constexpr (TILES == 2) _tile_stored(2, below, out_bytes);
    if constexpr (TILES == 2) _tile_stored(3, below + UNIT_ROWS, out_bytes);
    asm volatile("" ::: "memory");
}

#endif
