// Small operations of a decoder layer, each one pass over its rows. Rows are shared by threads once they are many.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "call.h"
#include "matrix_unit.h"
#include "vector.h"

namespace {

template <typename T>
void rms_norm(
    const T* hidden, long row_stride, long head_stride, long rows, long heads, long width, const T* weight, float offset,
    float epsilon, T* out, long out_row_stride, long out_head_stride) {
#pragma omp parallel for if (rows * heads * width >= SHARED)
    for (long i = 0; i < rows * heads; ++i) {
        const T* from = hidden + i / heads * row_stride + i % heads * head_stride;
        T* to = out + i / heads * out_row_stride + i % heads * out_head_stride;
        Floats squares = {};
        long d = 0;
        for (; d + LANES <= width; d += LANES) squares += load(from + d) * load(from + d);
        float total = sum(squares);
        for (; d < width; ++d) total += widen(from[d]) * widen(from[d]);
        const float scale = 1.0f / std::sqrt(total / static_cast<float>(width) + epsilon);
        d = 0;
        for (; d + LANES <= width; d += LANES) {
            const Floats normal = load(from + d) * scale;
            store(to + d, weight == nullptr ? normal : normal * (load(weight + d) + offset));
        }
        for (; d < width; ++d) {
            const float normal = widen(from[d]) * scale;
            narrow(to + d, weight == nullptr ? normal : normal * (widen(weight[d]) + offset));
        }
    }
}

// Halves of a head against each other, in place; cos and sin are [rows, half].
template <typename T>
void apply_rotary(
    T* heads, long row_stride, long head_stride, long rows, long count, const T* cos, const T* sin, long half) {
#pragma omp parallel for if (rows * count * half >= SHARED)
    for (long row = 0; row < rows; ++row) {
        const T *c = cos + row * half, *s = sin + row * half;
        for (long head = 0; head < count; ++head) {
            T* first = heads + row * row_stride + head * head_stride;
            T* second = first + half;
            long d = 0;
            for (; d + LANES <= half; d += LANES) {
                const Floats a = load(first + d), b = load(second + d), x = load(c + d), y = load(s + d);
                store(first + d, a * x - b * y);
                store(second + d, b * x + a * y);
            }
            for (; d < half; ++d) {
                const float a = widen(first[d]), b = widen(second[d]), x = widen(c[d]), y = widen(s[d]);
                narrow(first + d, a * x - b * y);
                narrow(second + d, b * x + a * y);
            }
        }
    }
}

// As exact as a number of the type. e^-|x| never overflows: silu(x) = x / (1 + e^-x), and x e^x / (1 + e^x) for x < 0.
template <typename T>
Floats silu(Floats x) {
#if defined(HAS_MATRIX_UNIT)
    if constexpr (std::is_same_v<T, BFloat16>) return rough_silu(x);
#endif
    const Ints is_positive = x > 0.0f;
    const Floats e = exp_of_negative(is_positive ? -x : x);
    return x * (is_positive ? splat(1.0f) : e) / (1.0f + e);
}

template <typename T>
void silu_and_multiply(const T* gate_up, long row_stride, long rows, long width, T* out) {
#pragma omp parallel for if (rows * width >= SHARED)
    for (long row = 0; row < rows; ++row) {
        const T *gate = gate_up + row * row_stride, *up = gate + width;
        T* to = out + row * width;
        long d = 0;
        for (; d + LANES <= width; d += LANES) store(to + d, silu<T>(load(gate + d)) * load(up + d));
        for (; d < width; ++d) {
            const float x = widen(gate[d]);
            narrow(to + d, x / (1.0f + std::exp(-x)) * widen(up[d]));
        }
    }
}

// Rows of a table, of `width` elements each.
template <typename T>
void take_rows(const T* table, long width, const int64_t* index, long count, T* out) {
#pragma omp parallel for if (count * width >= SHARED)
    for (long row = 0; row < count; ++row) memcpy(out + row * width, table + index[row] * width, width * sizeof(T));
}

}  // namespace

EXPORT_FOR_TYPES(rms_norm)
EXPORT_FOR_TYPES(apply_rotary)
EXPORT_FOR_TYPES(silu_and_multiply)
EXPORT_FOR_TYPES(take_rows)
