// K'^T = K^T M for the published recovery, a batched product on the cube cores with M resident in L1 (Eq. 11).
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
        if (LastCount() < FirstCount()) {
            last_matrix_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.last_matrix));
        }
        pipe.InitBuffer(matrix_tiles_, 1, 2 * kMatrix * sizeof(half));
        pipe.InitBuffer(key_tiles_, 2, kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(accumulators_, 2, kAccumulator);
    }

    __aicore__ inline void Run()
    {
        AscendC::LocalTensor<half> matrices = LoadMatrices();
        for (uint32_t item = AscendC::GetBlockIdx(); item < t_.heads * t_.blocks; item += AscendC::GetBlockNum()) {
            const bool last = item % t_.blocks == t_.blocks - 1;
            const uint32_t count = last ? LastCount() : FirstCount();
            const uint64_t row = static_cast<uint64_t>(item / t_.blocks) * t_.keys + item % t_.blocks * kBlockKeys;
            Shift(matrices[count < FirstCount() ? kMatrix : 0], row * t_.dim, count);
        }
        matrix_tiles_.FreeTensor(matrices);
    }

private:
    static constexpr uint32_t kMatrix = kBlockKeys * kBlockKeys;

    __aicore__ inline uint32_t FirstCount() const { return Least(kBlockKeys, t_.keys); }
    __aicore__ inline uint32_t LastCount() const { return t_.keys - (t_.blocks - 1) * kBlockKeys; }

    __aicore__ inline AscendC::LocalTensor<half> LoadMatrices()
    {
        AscendC::LocalTensor<half> matrices = matrix_tiles_.AllocTensor<half>();
        LoadTile(matrices, matrix_, FirstCount(), FirstCount(), FirstCount());
        if (LastCount() < FirstCount()) {
            LoadTile(matrices[kMatrix], last_matrix_, LastCount(), LastCount(), LastCount());
        }
        matrix_tiles_.EnQue(matrices);
        return matrix_tiles_.DeQue<half>();
    }

    // M is symmetric, so K' = M K.
    __aicore__ inline void Shift(const AscendC::LocalTensor<half>& matrix, uint64_t at, uint32_t count)
    {
        AscendC::LocalTensor<half> keys = key_tiles_.AllocTensor<half>();
        LoadTile(keys, k_[at], count, t_.dim, t_.dim);
        key_tiles_.EnQue(keys);
        keys = key_tiles_.DeQue<half>();
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t columns = Least(kChunk, t_.dim - d), rows = Largest(count, 2);
            AscendC::LocalTensor<float> c = accumulators_.AllocTensor<float>();
            multiplier_.Multiply(c, matrix, keys[d / kFractal * kColumnBlock],
                                 Factors{rows, columns, count, false, false});
            accumulators_.EnQue(c);
            c = accumulators_.DeQue<float>();
            Store(keys_[at + d], c, count, columns, t_.dim);
            accumulators_.FreeTensor(c);
        }
        key_tiles_.FreeTensor(keys);
    }

    const ShiftTiling& t_;
    Multiplier multiplier_;
    AscendC::GlobalTensor<half> k_, keys_, matrix_, last_matrix_;
    AscendC::TQue<AscendC::TPosition::A1, 1> matrix_tiles_;
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
