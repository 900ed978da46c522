// The decoding kernel: one cube core and two vector cores a group, and all vector cores at once where parts are merged.
#pragma once

#include "decode_cube.h"
#include "decode_vector.h"
#include "overflow_mode.h"

namespace pasa {

__aicore__ inline void PasaDecode(const DecodeArguments& arguments, const DecodeTiling& tiling)
{
    const OverflowMode mode(tiling.attention.saturates != 0);
    AscendC::TPipe pipe;
    if ASCEND_IS_AIC {
        DecodeCube(arguments, tiling, pipe).Run();
    }
    if ASCEND_IS_AIV {
        DecodeVector(arguments, tiling, pipe).Run();
    }
}

}  // namespace pasa
