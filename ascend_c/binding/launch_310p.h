// Functions of kernel/310p/pasa_310p.asc, compiled by CANN, that the binding, compiled by the host's compiler, calls with
// plain types.
#pragma once

#include "../tiling/tiling.h"

namespace pasa {

// Device memory; kernel/arguments.h and kernel/310p/shift.h describe the operands. `lengths` and what an attention's tiling
// does not have may be null.
struct Shift310P {
    void* k;
    void* lengths;
    void* keys;
    void* anchors;
    void* units;
};

struct Layout310P {
    void* v;
    void* lengths;
    void* values;
};

struct Attention310P {
    void* q;
    void* keys;
    void* values;
    void* anchors;
    void* units;
    void* lengths;
    void* sinks;
    void* mask;
    void* visits;
    void* out;
    void* lse;
    void* largest;
    void* workspace;
};

// `stream` is an aclrtStream, `cores` a number of AI cores. LaunchShift makes anchors and K', then frames;
// LaunchAttention merges parts of the keys, if there are any, in a second launch.
void LaunchShift(const Shift310P& given, const ShiftTiling& tiling, uint32_t cores, void* stream);
void LaunchLayOut(const Layout310P& given, const ShiftTiling& tiling, uint32_t cores, void* stream);
void LaunchAttention(const Attention310P& given, const AttentionTiling& tiling, uint32_t cores, void* stream);

}  // namespace pasa
