// The attention kernel: one cube core and two vector cores a group. Entries (pasa.asc) say so to the compiler.
#pragma once

#include "cube_side.h"
#include "overflow_mode.h"
#include "vector_side.h"

namespace pasa {

template <bool kExact>
__aicore__ inline void PasaAttention(const Arguments& arguments, const AttentionTiling& tiling)
{
    const OverflowMode mode(tiling.saturates != 0);
    AscendC::TPipe pipe;
    if ASCEND_IS_AIC {
        CubeSide<kExact>(arguments, tiling, pipe).Run();
    }
    if ASCEND_IS_AIV {
        VectorSide<kExact>(arguments, tiling, pipe).Run();
    }
}

}  // namespace pasa
