// Functions of probes.asc and probes_310p.asc, compiled by CANN, that the binding calls with plain types.
// kernel/vector_probes.h describes the operands.
#pragma once

#include <cstdint>

namespace pasa {

struct VectorProbePointers {
    void* x;
    void* y;
    void* z;
};

struct ProductProbePointers {
    void* a;
    void* b;
    void* stale;
    void* c;
};

// `stream` is an aclrtStream. A 310P saturates, whatever `saturates` says.
void LaunchVectorProbe(const VectorProbePointers& given, uint32_t probe, uint32_t count, bool saturates, void* stream);
void LaunchProductProbe(const ProductProbePointers& given, uint32_t m, uint32_t n, uint32_t k, void* stream);

}  // namespace pasa
