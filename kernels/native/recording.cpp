// Calls of kernels that were kept, made again; see recording.py.
#include "call.h"

struct KeptCall {
    void (*kernel)(const Word*);
    const Word* arguments;
};

extern "C" void make_calls(const KeptCall* calls, long count) {
    for (long i = 0; i < count; ++i) calls[i].kernel(calls[i].arguments);
}
