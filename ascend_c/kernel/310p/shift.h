// Before attention on an Ascend 310P: K' as fractals, then frames in a launch of their own, and V as fractals.
#pragma once

#include "../shift_exact.h"
#include "fractals.h"

namespace pasa {

struct LayoutArguments {
    GM_ADDR v;        // FP16 (B, Hkv, Skv, D)
    GM_ADDR lengths;  // int32 (B,), if tiling.has_lengths
    GM_ADDR values;   // FP16 (B, Hkv, blocks, D / 16, 128, 16)
};

// V as fractals: a block at a time, without its keys beyond a length.
class LayOutValues {
public:
    __aicore__ inline LayOutValues(const LayoutArguments& arguments, const ShiftTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling)
    {
        v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.v));
        values_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.values));
        if (t_.has_lengths) lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(arguments.lengths));
        pipe.InitBuffer(in_, 1, kBlockKeys * t_.dim * sizeof(half));
        pipe.InitBuffer(out_, 1, kBlockKeys * t_.dim * sizeof(half));
    }

    __aicore__ inline void Run()
    {
        for (uint32_t item = AscendC::GetBlockIdx(); item < t_.heads * t_.blocks; item += AscendC::GetBlockNum()) {
            const uint32_t head = item / t_.blocks, block = item % t_.blocks, first = block * kBlockKeys;
            const uint32_t keys =
                t_.has_lengths ? Clamped(lengths_.GetValue(head / t_.kv_heads), t_.keys) : t_.keys;
            if (first < keys) {
                Store(head, block, Least(kBlockKeys, keys - first));
            }
        }
    }

private:
    __aicore__ inline void Store(uint32_t head, uint32_t block, uint32_t count)
    {
        AscendC::LocalTensor<half> in = in_.AllocTensor<half>(), out = out_.AllocTensor<half>();
        const uint64_t row = static_cast<uint64_t>(head) * t_.keys + block * kBlockKeys;
        AscendC::DataCopy(in, v_[row * t_.dim], count * t_.dim);
        in_.EnQue(in);
        in = in_.DeQue<half>();
        AscendC::DataCopy(out, in, count * t_.dim);
        in_.FreeTensor(in);
        FractalKeys::FillUp(out, t_.dim, count);
        out_.EnQue(out);
        out = out_.DeQue<half>();
        FractalKeys::Store(values_[FractalKeys::Place(t_, head, block, block * kBlockKeys)], out, t_.dim, count);
        out_.FreeTensor(out);
    }

    const ShiftTiling& t_;
    AscendC::GlobalTensor<half> v_, values_;
    AscendC::GlobalTensor<int32_t> lengths_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;
};

// The first of two launches: a 310P has no flags between cores, so frames begin when it has ended.
__aicore__ inline void ShiftToFractals(const ShiftArguments& arguments, const ShiftTiling& tiling)
{
    AscendC::TPipe pipe;
    ShiftExactly<FractalKeys>(arguments, tiling, pipe).MakeAnchors();
}
__aicore__ inline void MakeFrames(const ShiftArguments& arguments, const ShiftTiling& tiling)
{
    AscendC::TPipe pipe;
    ShiftExactly<FractalKeys>(arguments, tiling, pipe).MakeFrames();
}
__aicore__ inline void LayOut(const LayoutArguments& arguments, const ShiftTiling& tiling)
{
    AscendC::TPipe pipe;
    LayOutValues(arguments, tiling, pipe).Run();
}

}  // namespace pasa
