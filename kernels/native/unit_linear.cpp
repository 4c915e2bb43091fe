// Products of bfloat16 with weights that are packed once for the processor's matrix unit; see matrix_unit.h.
//
// Threads share the panels. Up to 32 rows read every weight once, at the speed of memory; of more, a block's rows stay in
// the second-level cache while panels pass by.
#include <omp.h>

#include <algorithm>

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

// Some rows of a block's sums, with the bias and what is to be added, as bfloat16. Only `columns` of its BLOCK exist.
void store_block(
    const float* sums, long rows, long columns, const float* bias, const BFloat16* added, BFloat16* out, long out_stride) {
    for (long row = 0; row < rows; ++row) {
        const float* from = sums + row * BLOCK;
        BFloat16* to = out + row * out_stride;
        const BFloat16* more = added + row * out_stride;
        if (columns == BLOCK) {
            Floats left = load(from), right = load(from + LANES);
            if (bias != nullptr) {
                left += load(bias);
                right += load(bias + LANES);
            }
            if (added != nullptr) {
                left += load(more);
                right += load(more + LANES);
            }
            const __m512bh narrow = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(right), reinterpret_cast<__m512>(left));
            memcpy(to, &narrow, sizeof narrow);
        } else {
            for (long n = 0; n < columns; ++n) {
                const float whole = from[n] + (bias == nullptr ? 0.0f : bias[n]);
                narrow(to + n, added == nullptr ? whole : whole + widen(more[n]));
            }
        }
    }
}

// Panels [first, last) of the product, all rows.
void multiply_panels(
    const BlockRows& rows, long count, const BFloat16* packed, long outputs, long first, long last, const float* bias,
    const BFloat16* added, BFloat16* out) {
    const UnitTiles tiles;
    const long depth = rows.depth(), line = BLOCK * sizeof(BFloat16);
    alignas(64) float sums[BLOCK * BLOCK];
    for (long row_begin = 0; row_begin < count; row_begin += ROWS_AT_ONCE) {
        const long row_end = std::min(count, row_begin + ROWS_AT_ONCE);
        for (long group = first; group < last; group += PANELS_AT_ONCE) {
            const long panels = std::min(PANELS_AT_ONCE, last - group), after = group + panels;
            const long blocks = (row_end - row_begin + BLOCK - 1) / BLOCK * panels;
            for (long block = 0; block < blocks; ++block) {
                const long row = row_begin + block / panels * BLOCK, height = std::min(BLOCK, row_end - row);
                const long panel = group + block % panels, column = panel * BLOCK;
                const BFloat16* weights = packed + panel * depth * BLOCK;
                // What is written at the end is fetched meanwhile, and so is this block's share of the next panels.
                for (long r = row; r < row + height; ++r) __builtin_prefetch(out + r * outputs + column, 1);
                const Ahead ahead =
                    blocks == panels
                        ? Ahead{reinterpret_cast<const char*>(weights) + AHEAD, line}
                        : Ahead{
                              reinterpret_cast<const char*>(packed + after * depth * BLOCK) +
                                  block * panels * depth * line / blocks,
                              line * panels / blocks};
                const auto multiply = height > UNIT_ROWS ? multiply_block<2> : multiply_block<1>;
                multiply(rows.from(row), rows.stride(row), weights, depth, sums, BLOCK, false, ahead);
                const long place = row * outputs + column;
                store_block(
                    sums, height, std::min(BLOCK, outputs - column), bias == nullptr ? nullptr : bias + column,
                    added == nullptr ? nullptr : added + place, out + place, outputs);
            }
        }
    }
}

void pack(const BFloat16* weight, long weight_stride, long outputs, long inputs, BFloat16* packed) {
    const long depth = rounded_up(inputs, UNIT_DEPTH);
#pragma omp parallel for
    for (long panel = 0; panel < rounded_up(outputs, BLOCK) / BLOCK; ++panel) {
        BFloat16* to = packed + panel * BLOCK * depth;
        for (long n = 0; n < BLOCK; ++n) {
            const long output = panel * BLOCK + n;
            for (long k = 0; k < depth; ++k) {
                const bool exists = output < outputs && k < inputs;
                const long tile = k / UNIT_DEPTH * 2 + n / UNIT_ROWS;
                to[tile * UNIT_TILE + k % UNIT_DEPTH / 2 * UNIT_DEPTH + n % UNIT_ROWS * 2 + k % 2] =
                    exists ? weight[output * weight_stride + k] : BFloat16{};
            }
        }
    }
}

// rows x weight, with a bias for every output and `added`, which is as wide as the result, or without either.
void linear(
    const BFloat16* rows, long row_stride, long count, const BFloat16* packed, long inputs, long outputs, const float* bias,
    const BFloat16* added, BFloat16* out) {
    const BlockRows blocks(rows, row_stride, count, inputs);
    const long panels = rounded_up(outputs, BLOCK) / BLOCK;
    const int threads = static_cast<int>(std::min<long>(omp_get_max_threads(), panels));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const long part = omp_get_thread_num(), parts = omp_get_num_threads();
        multiply_panels(
            blocks, count, packed, outputs, panels * part / parts, panels * (part + 1) / parts, bias, added,
            out);
    }
}

}  // namespace

// Elements of a packed weight.
extern "C" long packed_unit_size(long outputs, long inputs) {
    return rounded_up(outputs, BLOCK) * rounded_up(inputs, UNIT_DEPTH);
}

EXPORT(pack_unit_bfloat16, pack)
EXPORT(linear_unit_bfloat16, linear)
#endif

extern "C" int may_use_matrix_unit() {
#if defined(HAS_MATRIX_UNIT)
    return has_matrix_unit();
#else
    return 0;
#endif
}
