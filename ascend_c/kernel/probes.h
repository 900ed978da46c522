// Small kernels that show what single calls of a device do: whether its arithmetic is as the attention kernels and the
// CPU twin assume (eval/check_device/npu/probes.py).
#pragma once

#include "multiply.h"
#include "overflow_mode.h"
#include "vector_probes.h"

namespace pasa {

// A B^T by one cube core, where k is at most 128: stored at once; stored half by half, as a rescued tile is; and stored
// after a further product with the constant kReferenceWeight, as a reference is added.
class ProductProbe {
public:
    __aicore__ inline ProductProbe(const ProductProbeArguments& arguments, AscendC::TPipe& pipe) : multiplier_(pipe)
    {
        a_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.a));
        b_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.b));
        stale_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.stale));
        c_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.c));
        pipe.InitBuffer(left_, 1, kTileRows * kChunk * sizeof(half));
        pipe.InitBuffer(right_, 1, kTileRows * kChunk * sizeof(half));
        pipe.InitBuffer(accumulator_, 1, kAccumulator);
    }

    __aicore__ inline void Run(uint32_t m, uint32_t n, uint32_t k)
    {
        if (AscendC::GetBlockIdx() > 0) return;
        for (Queue* queue : {&left_, &right_}) {
            Tile before = Load(*queue, stale_, kTileRows, k);
            queue->FreeTensor(before);
        }
        Tile a = Load(left_, a_, m, k), b = Load(right_, b_, n, k);
        AscendC::LocalTensor<float> c = accumulator_.AllocTensor<float>();
        multiplier_.Multiply(c, a, b, Factors{m, n, k, true, false});
        Finish(c);
        Store(c_, c, m, n, kBlockKeys);
        for (uint32_t first = 0; first < m; first += kHalfRows) {
            Store(c_[(kTileRows + first) * kBlockKeys], c[first * kFractal], Least(kHalfRows, m - first), n, kBlockKeys,
                  m);
        }
        accumulator_.FreeTensor(c);
        c = accumulator_.AllocTensor<float>();
        multiplier_.Multiply(c, a, b, Factors{m, n, k, true, false});
        multiplier_.AddMultiple(c, a, static_cast<half>(kReferenceWeight), m, n);
        Finish(c);
        Store(c_[2 * kTileRows * kBlockKeys], c, m, n, kBlockKeys);
        accumulator_.FreeTensor(c);
        left_.FreeTensor(a);
        right_.FreeTensor(b);
    }

private:
    using Tile = AscendC::LocalTensor<half>;
    using Queue = AscendC::TQue<AscendC::TPosition::A1, 1>;

    __aicore__ inline Tile Load(Queue& queue, const AscendC::GlobalTensor<half>& from, uint32_t rows, uint32_t columns)
    {
        Tile tile = queue.AllocTensor<half>();
        LoadTile(tile, from, rows, columns, columns);
        queue.EnQue(tile);
        return queue.DeQue<half>();
    }

    __aicore__ inline void Finish(AscendC::LocalTensor<float>& c)
    {
        accumulator_.EnQue(c);
        c = accumulator_.DeQue<float>();
    }

    Multiplier multiplier_;
    AscendC::GlobalTensor<half> a_, b_, stale_;
    AscendC::GlobalTensor<float> c_;
    Queue left_, right_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> accumulator_;
};

__aicore__ inline void ProbeVector(const VectorProbeArguments& arguments, uint32_t probe, uint32_t count,
                                   uint32_t saturates)
{
    const OverflowMode mode(saturates != 0);
    AscendC::TPipe pipe;
    VectorProbes(arguments, count, pipe).Run(probe);
}

__aicore__ inline void ProbeProduct(const ProductProbeArguments& arguments, uint32_t m, uint32_t n, uint32_t k)
{
    const OverflowMode mode(false);
    AscendC::TPipe pipe;
    ProductProbe(arguments, pipe).Run(m, n, k);
}

}  // namespace pasa
