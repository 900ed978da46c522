// Functions of pasa.asc, compiled by CANN, that the binding, compiled by the host's compiler, calls with plain types.
#pragma once

#include "../tiling/tiling.h"

namespace pasa {

// Device memory, null for an operand that a call does not have. kernel/arguments.h describes the operands.
struct AttentionPointers {
    void* q;
    void* keys;
    void* v;
    void* anchors;
    void* units;
    void* lengths;
    void* starts;
    void* sinks;
    void* mask;
    void* visits;
    void* out;
    void* lse;
    void* largest;
    void* counts;
    void* workspace;
};

struct DecodePointers {
    void* q;
    void* k;
    void* v;
    void* table;
    void* lengths;
    void* starts;
    void* sinks;
    void* out;
    void* lse;
    void* workspace;
};

// kernel/arguments.h says what each holds.
struct ShiftPointers {
    void* k;
    void* lengths;
    void* starts;
    void* matrix;
    void* keys;
    void* anchors;
    void* units;
};

// `stream` is an aclrtStream. The number of cores is that of cube cores, of ShiftExact that of vector cores.
void LaunchAttention(bool exact, const AttentionPointers& given, const AttentionTiling& tiling, uint32_t cores,
                     void* stream);
void LaunchDecode(const DecodePointers& given, const DecodeTiling& tiling, uint32_t cores, void* stream);
void LaunchShiftExact(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void* stream);
void LaunchShiftPaper(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void* stream);

}  // namespace pasa
