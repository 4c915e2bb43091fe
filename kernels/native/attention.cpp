// Causal attention with grouped queries over a paged cache.
//
// One task is a head of keys and values and some query rows of one sequence: of a decode step one row, of a prompt's chunk
// QUERY_TILE of them. The query heads of a group are rows side by side, so keys and values are read once for all of them.
// A task walks over its keys in tiles and keeps a running maximum and sum of the softmax (Milakov and Gimelshein 2018;
// Dao et al. 2022, FlashAttention), so scores are never held for a whole context. Few rows take keys and values where
// they lie; many rows pay for a copy, keys transposed, and multiply tiles that stay in registers, or those of a matrix unit.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "call.h"
#include "matrix_unit.h"
#include "vector.h"

namespace {

constexpr long QUERY_TILE = 128;
constexpr long KEY_TILE = 128;
// Of a matrix unit, whose products are short beside what is done once for every row of scores.
constexpr long UNIT_KEY_TILE = 256;
// From this many rows on, keys and values are copied.
constexpr long MANY_ROWS = 2 * TILE_ROWS;

// Sizes of a page in elements; see kernels.pages.
struct Pages {
    long parts, kv_heads, block_size, head_dim, stride;
};

// Consecutive query rows of one sequence. Its tokens are numbered in the order of its visible blocks, which begin at
// first_block of all; row i sees [0, sinks) and [begin + i, end - rows + i + 1), the latter from 0 without a window.
struct Segment {
    long first_row, rows, begin, end, sinks, is_windowed, first_block;
};

struct Problem {
    Pages pages;
    const Segment* segments;
    const int64_t* blocks;
    long heads;
    float scale;
};

// What one thread works with, products with numbers of some type.
template <typename Number>
struct Workspace {
    Scratch<Number> queries, keys, values, weights;
    Scratch<float> scores, highest_scores, sums, maxima, totals;
};

template <typename T>
const T* page(const T* cache, const Problem& problem, const Segment& segment, long token, long part, long head) {
    const Pages& p = problem.pages;
    const int64_t block = problem.blocks[segment.first_block + token / p.block_size];
    return cache + block * p.stride + ((part * p.kv_heads + head) * p.block_size + token % p.block_size) * p.head_dim;
}

// Where the page of a token begins that is used next, which is asked for a little with every use of this one: at a page's
// end the processor stops reading ahead, and asking for all of it at once makes it wait. Behind the last, the last.
template <typename T>
const T* page_after(const T* cache, const Problem& problem, const Segment& segment, long token, long part, long head) {
    return page(cache, problem, segment, std::min(token, segment.end - 1), part, head);
}

// Asks for the memory of some numbers.
template <typename T>
void ask_for(const T* from, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// Scores of some neighbouring tokens for R rows: products along the head, four tokens at a time.
template <int R, typename T>
void score_run(const float* queries, const T* keys, const T* next, long width, long run, float* scores) {
    const long whole = width / LANES * LANES;
    long i = 0;
    for (; i + 4 <= run; i += 4) {
        ask_for(next + i * width, 4 * width);
        Floats products[R][4] = {};
        for (long d = 0; d < whole; d += LANES) {
            Floats key[4];
            for (int t = 0; t < 4; ++t) key[t] = load(keys + (i + t) * width + d);
            for (int r = 0; r < R; ++r) {
                const Floats query = load(queries + r * width + d);
                for (int t = 0; t < 4; ++t) products[r][t] += query * key[t];
            }
        }
        for (int r = 0; r < R; ++r) {
            const Quad sums = sum_each(products[r]);
            for (int t = 0; t < 4; ++t) {
                float score = sums[t];
                for (long d = whole; d < width; ++d) score += queries[r * width + d] * widen(keys[(i + t) * width + d]);
                scores[r * KEY_TILE + i + t] = score;
            }
        }
    }
    for (; i < run; ++i) {
        for (int r = 0; r < R; ++r) {
            Floats products = {};
            for (long d = 0; d < whole; d += LANES) products += load(queries + r * width + d) * load(keys + i * width + d);
            float score = sum(products);
            for (long d = whole; d < width; ++d) score += queries[r * width + d] * widen(keys[i * width + d]);
            scores[r * KEY_TILE + i] = score;
        }
    }
}

// sums += weights x values of some neighbouring tokens for R rows.
template <int R, typename T>
void add_run(
    const float* weights, const T* values, const T* next, long width, long run, float* sums, long sum_stride) {
    constexpr int VECTORS = R > 2 ? 2 : 4;
    long d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES) {
        const long part = run * VECTORS * LANES;
        ask_for(next + d / (VECTORS * LANES) * part, part);
        Floats totals[R][VECTORS] = {};
        for (long i = 0; i < run; ++i) {
            Floats value[VECTORS];
            for (int v = 0; v < VECTORS; ++v) value[v] = load(values + i * width + d + v * LANES);
            for (int r = 0; r < R; ++r) {
                const Floats weight = splat(weights[r * KEY_TILE + i]);
                for (int v = 0; v < VECTORS; ++v) totals[r][v] += weight * value[v];
            }
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                float* to = sums + r * sum_stride + d + v * LANES;
                store(to, load(to) + totals[r][v]);
            }
    }
    for (; d < width; ++d) {
        for (int r = 0; r < R; ++r) {
            float total = sums[r * sum_stride + d];
            for (long i = 0; i < run; ++i) total += weights[r * KEY_TILE + i] * widen(values[i * width + d]);
            sums[r * sum_stride + d] = total;
        }
    }
}

// Calls `action` with as many rows at a time as registers hold, the first of them and an integral constant for how many.
template <typename Action>
void by_few_rows(long rows, const Action& action) {
    long row = 0;
    for (; row + 3 <= rows; row += 3) action(row, std::integral_constant<int, 3>());
    if (rows - row == 2) action(row, std::integral_constant<int, 2>());
    if (rows - row == 1) action(row, std::integral_constant<int, 1>());
}

// Scores of the tile's tokens for a few rows, keys taken where they lie.
template <typename T>
void score_few(
    const Problem& problem, const Segment& segment, const T* cache, long head, const float* queries, long rows, long first,
    long count, float* scores) {
    const long width = problem.pages.head_dim;
    for (long t = 0, run; t < count; t += run) {
        const T* keys = page(cache, problem, segment, first + t, 0, head);
        run = std::min(count - t, problem.pages.block_size - (first + t) % problem.pages.block_size);
        const T* next = page_after(cache, problem, segment, first + t + run, 0, head);
        by_few_rows(rows, [&](long row, auto some) {
            score_run<some()>(queries + row * width, keys, next, width, run, scores + row * KEY_TILE + t);
        });
    }
}

// sums += weights x values for a few rows, values taken where they lie.
template <typename T>
void add_few(
    const Problem& problem, const Segment& segment, const T* cache, long head, const float* weights, long rows, long first,
    long count, float* sums) {
    const long width = problem.pages.head_dim, wide = (problem.pages.parts - 1) * width;
    for (long part = 1; part < problem.pages.parts; ++part) {
        for (long t = 0, run; t < count; t += run) {
            const T* values = page(cache, problem, segment, first + t, part, head);
            run = std::min(count - t, problem.pages.block_size - (first + t) % problem.pages.block_size);
            const T* next = page_after(cache, problem, segment, first + t + run, part, head);
            by_few_rows(rows, [&](long row, auto some) {
                add_run<some()>(
                    weights + row * KEY_TILE + t, values, next, width, run, sums + row * wide + (part - 1) * width, wide);
            });
        }
    }
}

// [tokens][head_dim] of one part as panels of TILE_COLUMNS tokens, each [head_dim][TILE_COLUMNS].
template <typename T>
void copy_keys(
    const Problem& problem, const Segment& segment, const T* cache, long head, long first, long count, float* keys) {
    const long width = problem.pages.head_dim;
    for (long t = 0; t < count; ++t) {
        const T* from = page(cache, problem, segment, first + t, 0, head);
        float* to = keys + t / TILE_COLUMNS * TILE_COLUMNS * width + t % TILE_COLUMNS;
        for (long d = 0; d < width; ++d) to[d * TILE_COLUMNS] = widen(from[d]);
    }
}

// Where the value of one dimension and token is in panels.
long value_at(long dimension, long token) {
    return (dimension / TILE_COLUMNS * KEY_TILE + token) * TILE_COLUMNS + dimension % TILE_COLUMNS;
}

// Values as panels of TILE_COLUMNS dimensions, each [tokens][TILE_COLUMNS]; `wide` is filled up to whole panels.
template <typename T>
void copy_values(
    const Problem& problem, const Segment& segment, const T* cache, long head, long first, long count, float* values) {
    const long width = problem.pages.head_dim;
    for (long part = 1; part < problem.pages.parts; ++part) {
        for (long t = 0; t < count; ++t) {
            const T* from = page(cache, problem, segment, first + t, part, head);
            long d = 0;
            for (; d + LANES <= width && (part - 1) * width % LANES == 0; d += LANES)
                store(values + value_at((part - 1) * width + d, t), load(from + d));
            for (; d < width; ++d) values[value_at((part - 1) * width + d, t)] = widen(from[d]);
        }
    }
}

template <int M>
void multiply_panels(
    const float* rows, long row_stride, const float* panels, long panel_stride, long count, long depth, float* out,
    long out_stride, bool is_begun) {
    for (long panel = 0; panel < count; ++panel) {
        Floats sums[M][TILE_VECTORS] = {};
        float* to = out + panel * TILE_COLUMNS;
        multiply_tile<M>(rows, row_stride, panels + panel * panel_stride, TILE_COLUMNS, depth, sums);
        // Added at the end: a sum of many small ones is closer to the true one than a single long sum.
        if (is_begun) {
            for (int m = 0; m < M; ++m)
                for (int v = 0; v < TILE_VECTORS; ++v) sums[m][v] += load(to + m * out_stride + v * LANES);
        }
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < TILE_VECTORS; ++v) store(to + m * out_stride + v * LANES, sums[m][v]);
    }
}

void multiply_many(
    const float* rows, long row_stride, long count, const float* panels, long panel_stride, long panel_count, long depth,
    float* out, long out_stride, bool is_begun) {
    long row = 0;
    for (; row + TILE_ROWS <= count; row += TILE_ROWS)
        multiply_panels<TILE_ROWS>(
            rows + row * row_stride, row_stride, panels, panel_stride, panel_count, depth, out + row * out_stride, out_stride,
            is_begun);
    for (; row < count; ++row)
        multiply_panels<1>(
            rows + row * row_stride, row_stride, panels, panel_stride, panel_count, depth, out + row * out_stride, out_stride,
            is_begun);
}

#if defined(HAS_MATRIX_UNIT)
// Transposes 16 rows of 16 words: groups of 1, 2, 4 and 8 change places across the diagonal.
inline void transpose(__m512i (&rows)[16]) {
#pragma GCC unroll 4
    for (int group = 1; group < 16; group *= 2) {
        int above[16], below[16];
        for (int lane = 0; lane < 16; ++lane) {
            above[lane] = lane & group ? 16 + lane - group : lane;
            below[lane] = lane & group ? 16 + lane : lane + group;
        }
        const __m512i to_above = _mm512_loadu_si512(above), to_below = _mm512_loadu_si512(below);
#pragma GCC unroll 16
        for (int row = 0; row < 16; ++row) {
            if (row & group) continue;
            const __m512i upper = rows[row], lower = rows[row + group];
            rows[row] = _mm512_permutex2var_epi32(upper, to_above, lower);
            rows[row + group] = _mm512_permutex2var_epi32(upper, to_below, lower);
        }
    }
}

// Where one part of each of some tokens lies.
void find_rows(
    const Problem& problem, const Segment& segment, const BFloat16* cache, long part, long head, long first, long count,
    const BFloat16** rows) {
    for (long t = 0, run; t < count; t += run) {
        const BFloat16* from = page(cache, problem, segment, first + t, part, head);
        run = std::min(count - t, problem.pages.block_size - (first + t) % problem.pages.block_size);
        for (long i = 0; i < run; ++i) rows[t + i] = from + i * problem.pages.head_dim;
    }
}

// Keys as the unit's panels of BLOCK tokens, filled up with zeros.
void copy_keys(
    const Problem& problem, const Segment& segment, const BFloat16* cache, long head, long first, long count, BFloat16* keys) {
    const long width = problem.pages.head_dim;
    const BFloat16* rows[UNIT_KEY_TILE];
    find_rows(problem, segment, cache, 0, head, first, count, rows);
    for (long t = 0; t < rounded_up(count, BLOCK); t += UNIT_ROWS) {
        BFloat16* panel = keys + t / BLOCK * BLOCK * width + t % BLOCK / UNIT_ROWS * UNIT_TILE;
        for (long d = 0; d < width; d += UNIT_DEPTH) {
            // A word is a pair along the depth.
            __m512i words[16];
            for (long i = 0; i < 16; ++i)
                words[i] = t + i < count ? _mm512_loadu_si512(rows[t + i] + d) : _mm512_setzero_si512();
            transpose(words);
            for (long i = 0; i < 16; ++i) _mm512_storeu_si512(panel + d * BLOCK + i * UNIT_DEPTH, words[i]);
        }
    }
}

// Values as the unit's panels of BLOCK dimensions with UNIT_KEY_TILE tokens each, filled up with zeros to whole tiles.
void copy_values(
    const Problem& problem, const Segment& segment, const BFloat16* cache, long head, long first, long count,
    BFloat16* values) {
    const long width = problem.pages.head_dim;
    // Numbers of two rows, by turns.
    int16_t left[32], right[32];
    for (int i = 0; i < 32; ++i) {
        left[i] = static_cast<int16_t>(i / 2 + i % 2 * 32);
        right[i] = static_cast<int16_t>(left[i] + 16);
    }
    const __m512i of_left = _mm512_loadu_si512(left), of_right = _mm512_loadu_si512(right);
    const BFloat16* rows[UNIT_KEY_TILE];
    for (long part = 1; part < problem.pages.parts; ++part) {
        find_rows(problem, segment, cache, part, head, first, count, rows);
        for (long t = 0; t < rounded_up(count, UNIT_DEPTH); t += 2) {
            for (long d = 0; d < width; d += BLOCK) {
                BFloat16* to = values + ((part - 1) * width + d) * UNIT_KEY_TILE + t / UNIT_DEPTH * 2 * UNIT_TILE +
                               t % UNIT_DEPTH / 2 * UNIT_DEPTH;
                const __m512i even = t < count ? _mm512_loadu_si512(rows[t] + d) : _mm512_setzero_si512();
                const __m512i odd = t + 1 < count ? _mm512_loadu_si512(rows[t + 1] + d) : _mm512_setzero_si512();
                _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, of_left, odd));
                _mm512_storeu_si512(to + UNIT_TILE, _mm512_permutex2var_epi16(even, of_right, odd));
            }
        }
    }
}

// out (+)= rows x panels, of up to BLOCK rows; `out` has all of them.
void multiply_many(
    const BFloat16* rows, long row_stride, long count, const BFloat16* panels, long panel_stride, long panel_count,
    long depth, float* out, long out_stride, bool is_begun) {
    const auto multiply = count > UNIT_ROWS ? multiply_block<2> : multiply_block<1>;
    for (long panel = 0; panel < panel_count; ++panel)
        multiply(
            rows, row_stride, panels + panel * panel_stride, depth, out + panel * BLOCK, out_stride, is_begun, {});
}

#endif

// What scores are the exponents of, and how far from exact: e as exactly as a float is, or for a unit, which multiplies
// bfloat16, 2 to four digits.
template <bool IN_UNIT>
struct Exponent {
    static constexpr float SCALE = 1.0f;
    static Floats power(Floats x) { return exp_of_negative(x); }
    static float power(float x) { return std::exp(x); }
};

#if defined(HAS_MATRIX_UNIT)
template <>
struct Exponent<true> {
    static constexpr float SCALE = 1.44269504088896341f;
    static Floats power(Floats x) { return rough_power_of_two(x); }
    static float power(float x) { return std::exp2(x); }
};
#endif

// What a task holds while its products are made with numbers of some type.
template <typename Number>
struct Unit {};
#if defined(HAS_MATRIX_UNIT)
template <>
struct Unit<BFloat16> : UnitTiles {};
#endif

// How the products of a task are made: with keys and values where they lie, with copies of them, or in a matrix unit.
enum class Way { IN_PLACE, COPIED, IN_UNIT };

// One task: query rows [first, first + count) of a segment, and the query heads of one key head.
template <Way WAY, typename T>
void attend_rows(
    const Problem& problem, const Segment& segment, long first, long count, long head, const T* query, long query_stride,
    const T* cache, T* out) {
    using Number = std::conditional_t<WAY == Way::IN_UNIT, T, float>;
    static thread_local Workspace<Number> space;
    [[maybe_unused]] const Unit<Number> unit;
    using Base = Exponent<WAY == Way::IN_UNIT>;
    const float scale = problem.scale * Base::SCALE;
    const Pages& pages = problem.pages;
    const long width = pages.head_dim, wide = (pages.parts - 1) * width, group = problem.heads / pages.kv_heads;
    const long rows = count * group, panels = (wide + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const long sum_stride = WAY == Way::IN_PLACE ? wide : panels * TILE_COLUMNS;
    constexpr long key_tile = WAY == Way::IN_UNIT ? UNIT_KEY_TILE : KEY_TILE;
    // A unit multiplies whole blocks of rows, and the scores of one are as many as the first-level cache holds.
    const long rows_at_once = WAY == Way::IN_UNIT ? TILE_COLUMNS : rows;
    const long height = (rows + rows_at_once - 1) / rows_at_once * rows_at_once;
    Number* queries = space.queries.of(height * width);
    float* scores = space.scores.of(rows_at_once * key_tile);
    float* sums = space.sums.of(height * sum_stride);
    float* maxima = space.maxima.of(rows);
    float* totals = space.totals.of(rows);
    float* highest_scores = space.highest_scores.of(rows_at_once);
    Number *keys = nullptr, *values = nullptr, *weights = nullptr;
    if constexpr (WAY != Way::IN_PLACE) {
        keys = space.keys.of(key_tile * width);
        values = space.values.of(panels * TILE_COLUMNS * key_tile);
    }
    if constexpr (WAY == Way::IN_UNIT) {
        weights = space.weights.of(rows_at_once * key_tile);
    } else {
        weights = scores;
    }
    for (long r = 0; r < rows; ++r) {
        const T* from =
            query + (segment.first_row + first + r / group) * query_stride + (head * group + r % group) * width;
        convert_row(from, width, queries + r * width);
        maxima[r] = -INFINITY;
        totals[r] = 0.0f;
    }
    std::fill(sums, sums + height * sum_stride, 0.0f);

    const auto begin_of = [&](long row) { return segment.is_windowed ? segment.begin + row : 0; };
    const auto end_of = [&](long row) { return segment.end - segment.rows + row + 1; };
    const long lowest = begin_of(first), highest = end_of(first + count - 1);
    for (long tile = 0; tile < highest; tile += key_tile) {
        const long tokens = std::min(key_tile, highest - tile), key_panels = (tokens + TILE_COLUMNS - 1) / TILE_COLUMNS;
        const long padded = key_panels * TILE_COLUMNS;
        if (tile + tokens <= lowest && tile >= segment.sinks) continue;
        if constexpr (WAY != Way::IN_PLACE) {
            copy_keys(problem, segment, cache, head, tile, tokens, keys);
            copy_values(problem, segment, cache, head, tile, tokens, values);
        }
        for (long block = 0; block < rows; block += rows_at_once) {
            const long block_rows = std::min(rows_at_once, rows - block);
            const Number* block_queries = queries + block * width;
            float* block_sums = sums + block * sum_stride;
            if constexpr (WAY == Way::IN_PLACE) {
                score_few(problem, segment, cache, head, block_queries, block_rows, tile, tokens, scores);
            } else {
                multiply_many(
                    block_queries, width, block_rows, keys, TILE_COLUMNS * width, key_panels, width, scores, key_tile, false);
            }
            for (long r = 0; r < block_rows; ++r) {
                float* score = scores + r * key_tile;
                const long row = first + (block + r) / group;
                // Of this tile the row sees [0, sinks) and [begin, end).
                const long end = std::clamp(end_of(row) - tile, 0L, tokens);
                const long begin = std::clamp(begin_of(row) - tile, 0L, end);
                const long sinks = std::clamp(segment.sinks - tile, 0L, begin);
                std::fill(score + sinks, score + begin, -INFINITY);
                std::fill(score + end, score + padded, -INFINITY);
                Floats high[2] = {splat(-INFINITY), splat(-INFINITY)};
                for (long t = 0; t < padded; t += TILE_COLUMNS)
                    for (int v = 0; v < TILE_VECTORS; ++v) high[v] = larger(load(score + t + v * LANES), high[v]);
                // The scale is positive: the highest stays the highest.
                highest_scores[r] = std::max(largest(larger(high[0], high[1])) * scale, maxima[block + r]);
            }
            for (long r = 0; r < block_rows; ++r) {
                const float* score = scores + r * key_tile;
                Number* weight = weights + r * key_tile;
                const float highest_score = highest_scores[r];
                if (highest_score == -INFINITY) {
                    for (long t = 0; t < padded; t += LANES) store(weight + t, splat(0.0f));
                    continue;
                }
                Floats total[TILE_VECTORS] = {};
                for (long t = 0; t < padded; t += TILE_COLUMNS) {
                    Floats shares[TILE_VECTORS];
                    for (int v = 0; v < TILE_VECTORS; ++v) {
                        shares[v] = Base::power(load(score + t + v * LANES) * scale - highest_score);
                        total[v] += shares[v];
                    }
                    store_pair(weight + t, shares[0], shares[1]);
                }
                float& highest_before = maxima[block + r];
                if (highest_before != highest_score) {
                    const float decay = Base::power(highest_before - highest_score);
                    totals[block + r] *= decay;
                    for (long d = 0; d < sum_stride; ++d) block_sums[r * sum_stride + d] *= decay;
                    highest_before = highest_score;
                }
                totals[block + r] += sum(total[0] + total[1]);
            }
            if constexpr (WAY == Way::IN_PLACE) {
                add_few(problem, segment, cache, head, weights, block_rows, tile, tokens, block_sums);
            } else {
                multiply_many(
                    weights, key_tile, block_rows, values, TILE_COLUMNS * key_tile, panels,
                    WAY == Way::COPIED ? tokens : padded, block_sums, sum_stride, true);
            }
        }
    }
    for (long r = 0; r < rows; ++r) {
        T* to = out + ((segment.first_row + first + r / group) * problem.heads + head * group + r % group) * wide;
        const float share = 1.0f / totals[r];
        const float* from = sums + r * sum_stride;
        long d = 0;
        for (; d + LANES <= wide; d += LANES) store(to + d, load(from + d) * share);
        for (; d < wide; ++d) narrow(to + d, from[d] * share);
    }
}

template <typename T>
using Attend = void (*)(const Problem&, const Segment&, long, long, long, const T*, long, const T*, T*);

// What attends for a task of `count` query rows.
template <typename T>
Attend<T> way_of(const Problem& problem, long count) {
    if (count * problem.heads / problem.pages.kv_heads < MANY_ROWS) return attend_rows<Way::IN_PLACE, T>;
#if defined(HAS_MATRIX_UNIT)
    if constexpr (std::is_same_v<T, BFloat16>)
        if (problem.pages.head_dim % UNIT_DEPTH == 0 && has_matrix_unit()) return attend_rows<Way::IN_UNIT, T>;
#endif
    return attend_rows<Way::COPIED, T>;
}

template <typename T>
void attend(
    const Pages* pages, const Segment* described, long segments, const int64_t* blocks, long heads, float scale,
    const T* query, long query_stride, const T* cache, T* out) {
    const Problem problem{*pages, described, blocks, heads, scale};
    struct Task {
        long segment, first, count, head;
    };
    std::vector<Task> tasks;
    for (long s = 0; s < segments; ++s)
        for (long first = 0; first < problem.segments[s].rows; first += QUERY_TILE)
            for (long head = 0; head < problem.pages.kv_heads; ++head)
                tasks.push_back({s, first, std::min(QUERY_TILE, problem.segments[s].rows - first), head});
    const long count = static_cast<long>(tasks.size());
    const int threads = static_cast<int>(std::min<long>(omp_get_max_threads(), count));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        // The last rows of a prompt see most: they begin first, and what is left at the end is short.
#pragma omp for schedule(dynamic)
        for (long i = count - 1; i >= 0; --i) {
            const Task& task = tasks[i];
            const auto attend_task = way_of<T>(problem, task.count);
            attend_task(
                problem, problem.segments[task.segment], task.first, task.count, task.head, query, query_stride, cache, out);
        }
    }
}

// Every row's parts into its slot.
template <typename T>
void write_slots(
    const Pages* pages, const T* values, long row_stride, long rows, const int64_t* blocks, const int64_t* offsets, T* cache) {
    const long lanes = pages->parts * pages->kv_heads, width = pages->head_dim;
#pragma omp parallel for if (rows * lanes * width >= SHARED)
    for (long row = 0; row < rows; ++row) {
        T* to = cache + blocks[row] * pages->stride + offsets[row] * width;
        for (long lane = 0; lane < lanes; ++lane)
            memcpy(to + lane * pages->block_size * width, values + row * row_stride + lane * width, width * sizeof(T));
    }
}

}  // namespace

EXPORT_FOR_TYPES(attend)
EXPORT_FOR_TYPES(write_slots)
