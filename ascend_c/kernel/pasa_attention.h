// The attention kernel: one cube core and two vector cores a group. Entries (pasa.asc) say so to the compiler.
#pragma once

#include "exact_cube.h"
#include "exact_vector.h"
#include "overflow_mode.h"
#include "paper_cube.h"
#include "paper_vector.h"

namespace pasa {

template <typename CubeSide, typename VectorSide>
__aicore__ inline void RunBoth(const Arguments& arguments, const AttentionTiling& tiling)
{
    const OverflowMode mode(tiling.saturates != 0);
    AscendC::TPipe pipe;
    if ASCEND_IS_AIC {
        CubeSide(arguments, tiling, pipe).Run();
    }
    if ASCEND_IS_AIV {
        VectorSide(arguments, tiling, pipe).Run();
    }
}

template <bool kExact>
__aicore__ inline void PasaAttention(const Arguments& arguments, const AttentionTiling& tiling)
{
    if (kExact) {
        RunBoth<ExactCube, ExactVector>(arguments, tiling);
    } else {
        RunBoth<PaperCube, PaperVector>(arguments, tiling);
    }
}

}  // namespace pasa
