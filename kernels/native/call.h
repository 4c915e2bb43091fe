// How Python calls kernels: with their arguments one after another, each in a word of 8 bytes. So calls of all kernels are
// alike, and can be kept and made again; see recording.py.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

struct Word {
    char bytes[8];
};

template <auto KERNEL>
struct Called;

template <typename... Arguments, void (*KERNEL)(Arguments...)>
struct Called<KERNEL> {
    static void with(const Word* words) { with(words, std::index_sequence_for<Arguments...>{}); }

private:
    template <size_t... I>
    static void with(const Word* words, std::index_sequence<I...>) {
        KERNEL(from<Arguments>(words[I])...);
    }

    template <typename Argument>
    static Argument from(const Word& word) {
        static_assert(sizeof(Argument) <= sizeof(Word));
        Argument argument;
        memcpy(&argument, &word, sizeof argument);
        return argument;
    }
};

#define EXPORT(NAME, KERNEL) \
    extern "C" void NAME(const Word* words) { Called<KERNEL>::with(words); }

// A template by the names of its element types.
#if defined(__FLT16_MANT_DIG__)
#define EXPORT_FOR_TYPES(NAME)                \
    EXPORT(NAME##_float32, NAME<float>)       \
    EXPORT(NAME##_bfloat16, NAME<BFloat16>)   \
    EXPORT(NAME##_float16, NAME<Float16>)
#else
#define EXPORT_FOR_TYPES(NAME)          \
    EXPORT(NAME##_float32, NAME<float>) \
    EXPORT(NAME##_bfloat16, NAME<BFloat16>)
#endif
