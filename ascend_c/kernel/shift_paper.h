// K'^T = K^T M for the published recovery, a batched product on the cube cores with M resident in L1 (Eq. 11).
// Blocks are whole.
#pragma once

#include "arguments.h"
#include "multiply.h"
#include "overflow_mode.h"

namespace pasa {

class ShiftByMatrix {
public:
    __aicore__ inline ShiftByMatrix(const ShiftArguments& arguments, const ShiftTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          multiplier_(pipe)
    {
        k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.k));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        matrix_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.matrix));
        pipe.InitBuffer(matrix_tile_, 1, kBlockKeys * kBlockKeys * sizeof(half));
        pipe.InitBuffer(key_tiles_, 2, kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(accumulators_, 2, kAccumulator);
    }

    __aicore__ inline void Run()
    {
        AscendC::LocalTensor<half> matrix = LoadMatrix();
        for (uint32_t item = AscendC::GetBlockIdx(); item < t_.heads * t_.blocks; item += AscendC::GetBlockNum()) {
            Shift(matrix, static_cast<uint64_t>(item) * kBlockKeys * t_.dim);
        }
        matrix_tile_.FreeTensor(matrix);
    }

private:
    __aicore__ inline AscendC::LocalTensor<half> LoadMatrix()
    {
        AscendC::LocalTensor<half> matrix = matrix_tile_.AllocTensor<half>();
        LoadTile(matrix, matrix_, kBlockKeys, kBlockKeys, kBlockKeys);
        matrix_tile_.EnQue(matrix);
        return matrix_tile_.DeQue<half>();
    }

    // M is symmetric, so K' = M K.
    __aicore__ inline void Shift(const AscendC::LocalTensor<half>& matrix, uint64_t at)
    {
        AscendC::LocalTensor<half> keys = key_tiles_.AllocTensor<half>();
        LoadTile(keys, k_[at], kBlockKeys, t_.dim, t_.dim);
        key_tiles_.EnQue(keys);
        keys = key_tiles_.DeQue<half>();
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t columns = Least(kChunk, t_.dim - d);
            AscendC::LocalTensor<float> c = accumulators_.AllocTensor<float>();
            multiplier_.Multiply(c, matrix, keys[d / kFractal * kColumnBlock],
                                 Factors{kBlockKeys, columns, kBlockKeys, false, false});
            accumulators_.EnQue(c);
            c = accumulators_.DeQue<float>();
            Store(keys_[at + d], c, kBlockKeys, columns, t_.dim);
            accumulators_.FreeTensor(c);
        }
        key_tiles_.FreeTensor(keys);
    }

    const ShiftTiling& t_;
    Multiplier multiplier_;
    AscendC::GlobalTensor<half> k_, keys_, matrix_;
    AscendC::TQue<AscendC::TPosition::A1, 1> matrix_tile_;
    AscendC::TQue<AscendC::TPosition::B1, 1> key_tiles_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> accumulators_;
};

// On cube cores alone.
__aicore__ inline void ShiftPaper(const ShiftArguments& arguments, const ShiftTiling& tiling)
{
    const OverflowMode mode(tiling.saturates != 0);
    AscendC::TPipe pipe;
    ShiftByMatrix(arguments, tiling, pipe).Run();
}

}  // namespace pasa
