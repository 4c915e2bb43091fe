// Products of bfloat16 with weights that are packed once for the processor's matrix unit; see matrix_unit.h.
//
// Up to 32 rows read every weight once, at the speed of memory, and threads share the panels. Of more, parts of rows stay
// in the second-level cache while panels pass by, and whichever thread is free takes the next few of both.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "call.h"
#include "matrix_unit.h"

#if defined(HAS_MATRIX_UNIT)
namespace {

constexpr long ROWS_AT_ONCE = 8 * BLOCK;
// Blocks side by side, so that lines of the result which lie side by side are written one after another.
constexpr long PANELS_AT_ONCE = 8;
// Bytes by which the only block of rows is ahead of itself.
constexpr long AHEAD = 8192;

// Rows as blocks read them: where they lie if they fill a block and their depth needs no zeros, else from a copy.
class BlockRows {
public:
    BlockRows(const BFloat16* rows, long stride, long count, long inputs)
        : rows_(rows), stride_(stride), depth_(rounded_up(inputs, UNIT_DEPTH)),
          in_place_(depth_ == inputs ? count / BLOCK * BLOCK : 0) {
        static thread_local Scratch<BFloat16> held;
        const long copied = rounded_up(count - in_place_, BLOCK);
        BFloat16* copy = held.of(copied * depth_);
        for (long row = in_place_; row < in_place_ + copied; ++row) {
            BFloat16* to = copy + (row - in_place_) * depth_;
            const long given = row < count ? inputs : 0;
            std::copy_n(rows + row * stride, given, to);
            std::fill(to + given, to + depth_, BFloat16{});
        }
        copied_ = copy;
    }

    long depth() const { return depth_; }
    long stride(long row) const { return row < in_place_ ? stride_ : depth_; }
    const BFloat16* from(long row) const {
        return row < in_place_ ? rows_ + row * stride_ : copied_ + (row - in_place_) * depth_;
    }

private:
    const BFloat16* rows_;
    long stride_, depth_, in_place_;
    // Of the thread that made it, for all that use it.
    const BFloat16* copied_;
};

// What the columns of a weight's panels are: its outputs in their order, BLOCK in a panel; or, of a weight whose outputs are
// gates and as many factors for them behind, UNIT_ROWS gates and then their factors, which are one result together.
template <bool GATED>
struct Columns {
    static constexpr long RESULTS = GATED ? UNIT_ROWS : BLOCK;

    explicit Columns(long outputs) : results(GATED ? outputs / 2 : outputs) {}

    long panels() const { return (results + RESULTS - 1) / RESULTS; }

    // The output that a panel's column is, or -1.
    long output(long panel, long column) const {
        const long result = panel * RESULTS + column % RESULTS;
        return result < results ? result + column / RESULTS * results : -1;
    }

    const long results;
};

// Some rows of a block's sums as the result has them, with the bias and what is to be added; `columns` of them exist.
template <bool GATED, typename Out>
void store_block(
    const float* sums, long rows, long columns, const float* bias, const float* factor_bias, const Out* added, Out* out,
    long out_stride) {
    for (long row = 0; row < rows; ++row) {
        const float* from = sums + row * BLOCK;
        Out* to = out + row * out_stride;
        const Out* more = added + row * out_stride;
        Floats left = load(from), right = load(from + LANES);
        if (columns == Columns<GATED>::RESULTS) {
            if (bias != nullptr) {
                left += load(bias);
                right += load(factor_bias);
            }
            if constexpr (GATED) {
                store(to, rough_silu(left) * right);
            } else {
                if (added != nullptr) {
                    left += load(more);
                    right += load(more + LANES);
                }
                store_pair(to, left, right);
            }
        } else {
            for (long n = 0; n < columns; ++n) {
                float whole = from[n] + (bias == nullptr ? 0.0f : bias[n]);
                if constexpr (GATED) {
                    const float factor = from[UNIT_ROWS + n] + (bias == nullptr ? 0.0f : factor_bias[n]);
                    whole *= factor / (1.0f + std::exp(-whole));
                } else if (added != nullptr) {
                    whole += widen(more[n]);
                }
                narrow(to + n, whole);
            }
        }
    }
}

// Rows [row_begin, row_end) of panels [first, last) of the product.
template <bool GATED, typename Out>
void multiply_panels(
    const BlockRows& rows, long row_begin, long row_end, const BFloat16* packed, const Columns<GATED>& columns, long first,
    long last, const float* bias, const Out* added, Out* out) {
    const UnitTiles tiles;
    const long depth = rows.depth(), line = BLOCK * sizeof(BFloat16);
    alignas(64) float sums[BLOCK * BLOCK];
    for (long group = first; group < last; group += PANELS_AT_ONCE) {
        const long panels = std::min(PANELS_AT_ONCE, last - group), after = group + panels;
        const long blocks = (row_end - row_begin + BLOCK - 1) / BLOCK * panels;
        for (long block = 0; block < blocks; ++block) {
            const long row = row_begin + block / panels * BLOCK, height = std::min(BLOCK, row_end - row);
            const long panel = group + block % panels, column = panel * columns.RESULTS;
            const BFloat16* weights = packed + panel * depth * BLOCK;
            // What is written at the end is fetched meanwhile, and so is this block's share of the next panels.
            for (long r = row; r < row + height; ++r) __builtin_prefetch(out + r * columns.results + column, 1);
            const Ahead ahead =
                blocks == panels
                    ? Ahead{reinterpret_cast<const char*>(weights) + AHEAD, line}
                    : Ahead{
                          reinterpret_cast<const char*>(packed + after * depth * BLOCK) +
                              block * panels * depth * line / blocks,
                          line * panels / blocks};
            const auto multiply = height > UNIT_ROWS ? multiply_block<2> : multiply_block<1>;
            multiply(rows.from(row), rows.stride(row), weights, depth, sums, BLOCK, false, ahead);
            const long place = row * columns.results + column;
            const float* own_bias = bias == nullptr ? nullptr : bias + column;
            store_block<GATED>(
                sums, height, std::min(columns.RESULTS, columns.results - column), own_bias,
                bias == nullptr ? nullptr : own_bias + (GATED ? columns.results : LANES),
                added == nullptr ? nullptr : added + place, out + place, columns.results);
        }
    }
}

template <bool GATED>
void pack(const BFloat16* weight, long weight_stride, long outputs, long inputs, BFloat16* packed) {
    const Columns<GATED> columns(outputs);
    const long depth = rounded_up(inputs, UNIT_DEPTH);
#pragma omp parallel for
    for (long panel = 0; panel < columns.panels(); ++panel) {
        BFloat16* to = packed + panel * BLOCK * depth;
        for (long n = 0; n < BLOCK; ++n) {
            const long output = columns.output(panel, n);
            for (long k = 0; k < depth; ++k) {
                const long tile = k / UNIT_DEPTH * 2 + n / UNIT_ROWS;
                to[tile * UNIT_TILE + k % UNIT_DEPTH / 2 * UNIT_DEPTH + n % UNIT_ROWS * 2 + k % 2] =
                    output >= 0 && k < inputs ? weight[output * weight_stride + k] : BFloat16{};
            }
        }
    }
}

// rows x weight, with a bias for every output and `added`, which is as wide as the result, or without either; or gated, with
// nothing to be added.
template <bool GATED, typename Out>
void product(
    const BFloat16* rows, long row_stride, long count, const BFloat16* packed, long inputs, long outputs, const float* bias,
    const Out* added, Out* out) {
    const BlockRows blocks(rows, row_stride, count, inputs);
    const Columns<GATED> columns(outputs);
    const long panels = columns.panels();
    const int threads = static_cast<int>(std::min<long>(omp_get_max_threads(), panels));
    const long row_parts = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const long panel_parts = count <= BLOCK ? threads : (panels + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long task = 0; task < row_parts * panel_parts; ++task) {
        const long row = task / panel_parts * ROWS_AT_ONCE, part = task % panel_parts;
        multiply_panels(
            blocks, row, std::min(count, row + ROWS_AT_ONCE), packed, columns, panels * part / panel_parts,
            panels * (part + 1) / panel_parts, bias, added, out);
    }
}

template <bool GATED>
constexpr auto linear = product<GATED, BFloat16>;
constexpr auto linear_wide = product<false, float>;

template <bool GATED>
long packed_size(long outputs, long inputs) {
    return Columns<GATED>(outputs).panels() * BLOCK * rounded_up(inputs, UNIT_DEPTH);
}

}  // namespace

// Elements of a packed weight.
extern "C" long packed_unit_size(long outputs, long inputs) { return packed_size<false>(outputs, inputs); }
extern "C" long packed_gated_unit_size(long outputs, long inputs) { return packed_size<true>(outputs, inputs); }

EXPORT(pack_unit_bfloat16, pack<false>)
EXPORT(pack_gated_unit_bfloat16, pack<true>)
EXPORT(linear_unit_bfloat16, linear<false>)
EXPORT(linear_gated_unit_bfloat16, linear<true>)
EXPORT(linear_wide_unit_bfloat16, linear_wide)
#endif

extern "C" int may_use_matrix_unit() {
#if defined(HAS_MATRIX_UNIT)
    return has_matrix_unit();
#else
    return 0;
#endif
}
