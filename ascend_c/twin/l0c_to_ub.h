// L0C -> UB on an Ascend 310P, by its vector unit. Signature and units: page "DataCopy (L0C Buffer to UB)".
#pragma once

#include "cube.h"

namespace twin {

// Fractals of 16 x 16 floats, as they are: blocks of `blockLen` fractals, gaps of fractals in L0C, of 32 bytes in UB.
inline void l0c_to_ub(const Span& dst, const Span& src, const AscendC::DataCopyParams& p,
                      const AscendC::DataCopyEnhancedParams& e, Here here)
{
    constexpr size_t fractal = kFractalSide * kFractalSide * sizeof(float);
    Instruction op("DataCopy", Pipe::V, here);
    op.require(op.core().kind == CoreKind::ai, FaultKind::core, "only an Ascend 310P copies from L0C to UB");
    op.lies_in(src, {Space::L0C}, "src");
    op.lies_in(dst, {Space::UB}, "dst");
    op.aligned(src, fractal, "src");
    op.aligned(dst, kBlockBytes, "dst");
    op.fits(p.blockCount, "blockCount", 1, 4095);
    op.fits(p.blockLen, "blockLen", 1, 65535);
    op.fits(p.srcGap, "srcGap", 0, 65535);
    op.fits(p.dstGap, "dstGap", 0, 65535);
    op.require(e.blockMode == AscendC::BlockMode::BLOCK_MODE_MATRIX && !e.isRelu, FaultKind::program,
               "the twin copies whole fractals: BLOCK_MODE_MATRIX without ReLU");
    const size_t length = deviates(Deviation::l0c_fractals) ? fractal / 2 : fractal;
    const size_t bytes = static_cast<size_t>(p.blockLen.full()) * length;
    copy_blocks(op, Pipe::V, dst, src,
                BlockCopy{p.blockCount.full(), bytes, bytes + static_cast<size_t>(p.srcGap.full()) * fractal,
                          bytes + static_cast<size_t>(p.dstGap.full()) * kBlockBytes});
}

}  // namespace twin

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& intriParams,
              const DataCopyEnhancedParams& enhancedParams, Here here = Here::now())
{
    static_assert(std::is_same_v<T, float>, "DataCopy from L0C: the twin copies float");
    twin::l0c_to_ub(dst.span(), src.span(), intriParams, enhancedParams, here);
}

}  // namespace AscendC
