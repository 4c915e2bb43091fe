// Products with weights that are packed once.
//
// A packed weight [outputs, inputs] is a sequence of panels of TILE_COLUMNS outputs, each [inputs][TILE_COLUMNS] and thus
// contiguous in the order in which a product reads it (Goto and van de Geijn 2008); the last panel is filled up with
// zeros. Threads share the panels. A single tile of rows reads every weight once, at the speed of memory. With several, a
// panel stays in the second-level cache while they pass by, and each asks for its share of the next one meanwhile, so that
// memory works while they do. Parts that fit the first-level cache would gain nothing, but every part of the depth reads
// and writes the sums once more.
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "call.h"
#include "vector.h"

namespace {

constexpr long ROW_BLOCK = 64 * TILE_ROWS;
constexpr long DEPTH_BLOCK = 2048;
// Bytes by which a single tile is ahead of itself.
constexpr long AHEAD = 2048;
constexpr long SUM_DEPTH = 128;

// totals += products of M rows and some columns.
template <int M, typename W>
inline void add_products(
    const float* rows, long row_stride, const W* panel, long depth, Ahead ahead, Floats (&totals)[M][TILE_VECTORS]) {
    Floats sums[M][TILE_VECTORS] = {};
    if constexpr (M == 1) {
        // A single row has too few sums to hide an addition's latency: it takes turns with a second set. Of its weights
        // it wants more per instruction than others; asking ahead pays only while they have to be widened.
        constexpr bool asks = !std::is_same_v<W, float>;
        Floats others[1][TILE_VECTORS] = {};
        long k = 0;
        for (; k + 2 <= depth; k += 2) {
            const float* row = rows + k;
            const W* columns = panel + k * TILE_COLUMNS;
            multiply_tile<1, asks>(row, row_stride, columns, TILE_COLUMNS, 1, sums, ahead.from(k));
            multiply_tile<1>(row + 1, row_stride, columns + TILE_COLUMNS, TILE_COLUMNS, 1, others);
        }
        multiply_tile<1>(rows + k, row_stride, panel + k * TILE_COLUMNS, TILE_COLUMNS, depth - k, sums);
        for (int v = 0; v < TILE_VECTORS; ++v) sums[0][v] += others[0][v];
    } else {
        multiply_tile<M, true>(rows, row_stride, panel, TILE_COLUMNS, depth, sums, ahead);
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < TILE_VECTORS; ++v) totals[m][v] += sums[m][v];
}

// The same, called: registers that the totals would have meanwhile are wanted for columns.
template <int M, typename W>
[[gnu::noinline]] void add_products_apart(
    const float* rows, long row_stride, const W* panel, long depth, Ahead ahead, Floats (&totals)[M][TILE_VECTORS]) {
    add_products<M>(rows, row_stride, panel, depth, ahead, totals);
}

// One tile of sums, begun with what is in `out` or with the bias. Only `columns` of its TILE_COLUMNS exist.
template <int M, typename W>
void tile(
    const float* rows, long row_stride, const W* panel, long depth, float* out, long out_stride, long columns, bool is_begun,
    const float* bias, Ahead ahead) {
    Floats sums[M][TILE_VECTORS] = {};
    if (is_begun || bias != nullptr) {
        for (int m = 0; m < M; ++m) {
            const float* from = is_begun ? out + m * out_stride : bias;
            if (columns == TILE_COLUMNS) {
                for (int v = 0; v < TILE_VECTORS; ++v) sums[m][v] = load(from + v * LANES);
            } else {
                for (long n = 0; n < columns; ++n) sums[m][n / LANES][n % LANES] = from[n];
            }
        }
    }
    // A sum of many small ones is closer to the true one than a single long sum.
    for (long first = 0; first < depth; first += SUM_DEPTH) {
        // A whole tile's sums leave none for totals anyway.
        constexpr auto add = M == TILE_ROWS ? add_products<M, W> : add_products_apart<M, W>;
        const W* columns = panel + first * TILE_COLUMNS;
        add(rows + first, row_stride, columns, std::min(SUM_DEPTH, depth - first), ahead.from(first), sums);
    }
    for (int m = 0; m < M; ++m) {
        float* to = out + m * out_stride;
        if (columns == TILE_COLUMNS) {
            for (int v = 0; v < TILE_VECTORS; ++v) store(to + v * LANES, sums[m][v]);
        } else {
            for (long n = 0; n < columns; ++n) to[n] = sums[m][n / LANES][n % LANES];
        }
    }
}

template <typename W>
using Tile = void (*)(const float*, long, const W*, long, float*, long, long, bool, const float*, Ahead);

template <typename W>
constexpr Tile<W> TILES[] = {
    nullptr,    tile<1, W>, tile<2, W>, tile<3, W>, tile<4, W>, tile<5, W>,  tile<6, W>,
#if defined(__AVX512F__)
    tile<7, W>, tile<8, W>, tile<9, W>, tile<10, W>, tile<11, W>, tile<12, W>,
#endif
};

// What tile `t` of `tiles` asks for while it works on a panel's part of some depth, which begins at `weights`.
template <typename W>
Ahead ahead_of(const W* weights, long depth, long t, long tiles) {
    constexpr long line = TILE_COLUMNS * sizeof(W);
    const char* here = reinterpret_cast<const char*>(weights);
    if (tiles == 1) return {here + AHEAD, line};
    return {here + depth * line + t * depth * line / tiles, line / tiles};
}

// Panels [first, last) of the product, all rows.
template <typename W>
void multiply_panels(
    const float* rows, long row_stride, long count, const W* packed, long inputs, long outputs, long first, long last,
    const float* bias, float* out, long out_stride) {
    for (long row_begin = 0; row_begin < count; row_begin += ROW_BLOCK) {
        const long row_end = std::min(count, row_begin + ROW_BLOCK);
        // As even as possible: a tile of two rows takes nearly as long as one of four.
        const long tiles = (row_end - row_begin + TILE_ROWS - 1) / TILE_ROWS;
        for (long panel = first; panel < last; ++panel) {
            const long column = panel * TILE_COLUMNS;
            for (long depth_begin = 0; depth_begin < inputs; depth_begin += DEPTH_BLOCK) {
                const long depth = std::min(DEPTH_BLOCK, inputs - depth_begin);
                const W* narrow = packed + (panel * inputs + depth_begin) * TILE_COLUMNS;
                // Several tiles would each widen the same weights.
                constexpr bool is_narrow = !std::is_same_v<W, float>;
                float wide[is_narrow ? DEPTH_BLOCK * TILE_COLUMNS : 1];
                if (is_narrow && tiles > 1) convert_row(narrow, depth * TILE_COLUMNS, wide);
                for (long t = 0; t < tiles; ++t) {
                    const long row = row_begin + t * (row_end - row_begin) / tiles;
                    const long next = row_begin + (t + 1) * (row_end - row_begin) / tiles;
                    const auto multiply = [&](auto tile, auto weights) {
                        tile(
                            rows + row * row_stride + depth_begin, row_stride, weights, depth, out + row * out_stride + column,
                            out_stride, std::min<long>(TILE_COLUMNS, outputs - column), depth_begin > 0,
                            bias == nullptr ? nullptr : bias + column, ahead_of(narrow, depth, t, tiles));
                    };
                    if (is_narrow && tiles > 1) {
                        multiply(TILES<float>[next - row], static_cast<const float*>(wide));
                    } else {
                        multiply(TILES<W>[next - row], narrow);
                    }
                }
            }
        }
    }
}

// A row of sums, with what is to be added to them, as the result has it.
template <typename Out>
void finish_row(const float* sums, const Out* added, long width, Out* to) {
    if (added == nullptr) {
        convert_row(sums, width, to);
        return;
    }
    long n = 0;
    for (; n + LANES <= width; n += LANES) store(to + n, load(sums + n) + load(added + n));
    for (; n < width; ++n) narrow(to + n, sums[n] + widen(added[n]));
}

// rows x weight, with a bias for every output and `added`, which is as wide as the result, or without either.
template <typename T, typename Out>
void product(
    const T* rows, long row_stride, long count, const T* packed, long inputs, long outputs, const float* bias,
    const Out* added, Out* out) {
    static thread_local Scratch<float> held_rows, held_out;
    constexpr bool is_finished = std::is_same_v<Out, float>;
    const float* wide_rows = reinterpret_cast<const float*>(rows);
    float* wide_out = reinterpret_cast<float*>(out);
    long stride = row_stride;
    if constexpr (!is_finished) wide_out = held_out.of(count * outputs);
    if constexpr (!std::is_same_v<T, float>) {
        float* copy = held_rows.of(count * inputs);
        for (long row = 0; row < count; ++row) convert_row(rows + row * row_stride, inputs, copy + row * inputs);
        wide_rows = copy;
        stride = inputs;
    }
    const long panels = (outputs + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int threads = static_cast<int>(std::min<long>(omp_get_max_threads(), panels));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const long part = omp_get_thread_num(), parts = omp_get_num_threads();
        multiply_panels(
            wide_rows, stride, count, packed, inputs, outputs, panels * part / parts, panels * (part + 1) / parts, bias,
            wide_out, outputs);
        if (!is_finished || added != nullptr) {
#pragma omp barrier
#pragma omp for
            for (long row = 0; row < count; ++row) {
                const long place = row * outputs;
                finish_row(wide_out + place, added == nullptr ? nullptr : added + place, outputs, out + place);
            }
        }
    }
}

template <typename T>
constexpr auto linear = product<T, T>;
template <typename T>
constexpr auto linear_wide = product<T, float>;

template <typename W>
void pack(const W* weight, long weight_stride, long outputs, long inputs, W* packed) {
    const long panels = (outputs + TILE_COLUMNS - 1) / TILE_COLUMNS;
#pragma omp parallel for
    for (long panel = 0; panel < panels; ++panel) {
        const long columns = std::min<long>(TILE_COLUMNS, outputs - panel * TILE_COLUMNS);
        W* to = packed + panel * inputs * TILE_COLUMNS;
        for (long k = 0; k < inputs; ++k) {
            for (long n = 0; n < TILE_COLUMNS; ++n)
                to[k * TILE_COLUMNS + n] = n < columns ? weight[(panel * TILE_COLUMNS + n) * weight_stride + k] : W{};
        }
    }
}

}  // namespace

// Elements of a packed weight.
extern "C" long packed_size(long outputs, long inputs) {
    return (outputs + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS * inputs;
}

EXPORT_FOR_TYPES(pack)
EXPORT_FOR_TYPES(linear)
EXPORT_FOR_TYPES(linear_wide)
