// Functions of kernel/310p/pasa_310p.asc, compiled by CANN, that the binding, compiled by the host's compiler, calls
// with plain types.
#pragma once

#include "../tiling/tiling.h"
#include "pointers.h"

namespace pasa {

// kernel/310p/shift.h describes the operands.
struct LayoutPointers {
    void* v;
    void* lengths;
    void* values;
};

// `stream` is an aclrtStream, `cores` a number of AI cores. LaunchShift makes anchors and K', then frames;
// LaunchAttention and LaunchDecode merge parts of the keys in a second launch.
void LaunchShift(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void* stream);
void LaunchLayOut(const LayoutPointers& given, const ShiftTiling& tiling, uint32_t cores, void* stream);
void LaunchAttention(const AttentionPointers& given, const AttentionTiling& tiling, uint32_t cores, void* stream);
void LaunchDecode(const DecodePointers& given, const DecodeTiling& tiling, uint32_t cores, void* stream);

}  // namespace pasa
