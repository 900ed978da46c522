// Functions of pasa.asc, compiled by CANN, that the binding, compiled by the host's compiler, calls with plain types.
#pragma once

#include "../tiling/tiling.h"
#include "pointers.h"

namespace pasa {

// `stream` is an aclrtStream. The number of cores is that of cube cores, of ShiftExact that of vector cores.
void LaunchAttention(bool exact, const AttentionPointers& given, const AttentionTiling& tiling, uint32_t cores,
                     void* stream);
void LaunchDecode(const DecodePointers& given, const DecodeTiling& tiling, uint32_t cores, void* stream);
void LaunchShiftExact(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void* stream);
void LaunchShiftPaper(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void* stream);

}  // namespace pasa
