// The attention kernel: one cube core and two vector cores a group.
#pragma once

#include "cube_side.h"
#include "vector_side.h"

namespace pasa {

template <bool kExact>
__aicore__ inline void PasaAttention(const Arguments& arguments, const AttentionTiling& tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(tiling.saturates != 0);
    AscendC::TPipe pipe;
    if ASCEND_IS_AIC {
        CubeSide<kExact>(arguments, tiling, pipe).Run();
    }
    if ASCEND_IS_AIV {
        VectorSide<kExact>(arguments, tiling, pipe).Run();
    }
}

}  // namespace pasa
