// A small kernel that shows what the cube unit of an Ascend 310P does, and the ways of its operands and products.
#pragma once

#include "../vector_probes.h"
#include "core_products.h"
#include "fractals.h"

namespace pasa {

// A B^T, where k is at most 128: of A that comes from memory in pieces, as queries do in prefill; of A that comes from
// UB, as in decoding; and the first with a further product, with the constant kReferenceWeight.
class CoreProductProbe {
public:
    __aicore__ inline CoreProductProbe(const ProductProbeArguments& arguments, AscendC::TPipe& pipe)
        : multiplier_(pipe),
          pipe_(pipe)
    {
        a_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.a));
        b_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.b));
        stale_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.stale));
        c_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.c));
        pipe.InitBuffer(left_, 1, kTileRows * kChunk * sizeof(half));
        pipe.InitBuffer(right_, 1, kTileRows * kChunk * sizeof(half));
        stored_.Init(kTileRows * kChunk, pipe);
        pipe.InitBuffer(accumulator_, 1, kAccumulator);
        pipe.InitBuffer(rows_in_, 1, kTileRows * kChunk * sizeof(half));
        pipe.InitBuffer(fractals_out_, 1, kTileRows * kChunk * sizeof(half));
        pipe.InitBuffer(product_out_, 1, kTileRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(ones_buffer_, kChunk * sizeof(uint16_t));
        ones_ = ones_buffer_.Get<uint16_t>();
        AscendC::Duplicate(ones_, static_cast<uint16_t>(0xffff), static_cast<int32_t>(kChunk));
    }

    __aicore__ inline void Run(uint32_t m, uint32_t n, uint32_t k)
    {
        if (AscendC::GetBlockIdx() > 0) {
            stored_.Close(pipe_);
            return;
        }
        for (Queue* queue : {&left_, &right_}) {
            Tile before = Load(*queue, stale_, kTileRows, k);
            queue->FreeTensor(before);
        }
        StoreFractals(stale_, kTileRows, k);
        stored_.Take();
        stored_.Free();
        Tile a = Load(left_, a_, m, k), b = Load(right_, b_, n, k);
        const Factors whole{RoundUp(m, kFractal), n, k, true, false};
        Product c = accumulator_.AllocTensor<float>();
        multiplier_.Multiply(c, a, b, Factors{m, n, k, true, false});
        Store(c, 0, m, n);
        StoreFractals(a_, m, k);
        c = accumulator_.AllocTensor<float>();
        multiplier_.Multiply(c, stored_.Take(), b, whole);
        stored_.Free();
        Store(c, 1, m, n);
        c = accumulator_.AllocTensor<float>();
        multiplier_.Multiply(c, a, b, Factors{m, n, k, true, false});
        multiplier_.AddMultiple(c, a, static_cast<half>(kReferenceWeight), m, n);
        Store(c, 2, m, n);
        left_.FreeTensor(a);
        right_.FreeTensor(b);
        stored_.Close(pipe_);
    }

private:
    using Tile = AscendC::LocalTensor<half>;
    using Product = AscendC::LocalTensor<float>;
    using Queue = AscendC::TQue<AscendC::TPosition::A1, 1>;

    __aicore__ inline Tile Load(Queue& queue, const AscendC::GlobalTensor<half>& from, uint32_t rows, uint32_t columns)
    {
        Tile tile = queue.AllocTensor<half>();
        LoadPieces(tile, from, rows, columns);
        queue.EnQue(tile);
        return queue.DeQue<half>();
    }

    // Rows as fractals by the vector unit, and zeros behind the last one.
    __aicore__ inline void StoreFractals(const AscendC::GlobalTensor<half>& from, uint32_t m, uint32_t k)
    {
        const uint32_t rows = RoundUp(m, kFractal);
        Tile in = rows_in_.AllocTensor<half>();
        AscendC::DataCopy(in, from, m * k);
        rows_in_.EnQue(in);
        in = rows_in_.DeQue<half>();
        FractalKeys::FillUp(in, k, m);
        Tile out = fractals_out_.AllocTensor<half>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::And(out.ReinterpretCast<uint16_t>(), in.ReinterpretCast<uint16_t>(), ones_, k, rows,
                     ToFractals(rows, k));
        rows_in_.FreeTensor(in);
        fractals_out_.EnQue(out);
        out = fractals_out_.DeQue<half>();
        stored_.BeginStore();
        stored_.Store(0, out, k / kFractal, rows);
        stored_.EndStore();
        fractals_out_.FreeTensor(out);
    }

    // A product to its place in memory, row by row.
    __aicore__ inline void Store(Product& c, uint32_t place, uint32_t m, uint32_t n)
    {
        const uint32_t rows = RoundUp(m, kFractal), columns = RoundUp(n, kFractal);
        accumulator_.EnQue(c);
        c = accumulator_.DeQue<float>();
        Product out = product_out_.AllocTensor<float>();
        AscendC::DataCopyParams p;
        p.blockCount = 1;
        p.blockLen = rows * columns / (kFractal * kFractal);
        AscendC::DataCopyEnhancedParams whole;
        whole.blockMode = AscendC::BlockMode::BLOCK_MODE_MATRIX;
        AscendC::DataCopy(out, c, p, whole);
        accumulator_.FreeTensor(c);
        product_out_.EnQue(out);
        out = product_out_.DeQue<float>();
        p.blockCount = m;
        p.blockLen = kFractal / kFloatBlock;
        p.dstGap = (kBlockKeys - kFractal) / kFloatBlock;
        for (uint32_t first = 0; first < columns; first += kFractal) {
            AscendC::DataCopy(c_[place * kTileRows * kBlockKeys + first], out[first * rows], p);
        }
        product_out_.FreeTensor(out);
    }

    Multiplier multiplier_;
    AscendC::TPipe& pipe_;
    AscendC::GlobalTensor<half> a_, b_, stale_;
    AscendC::GlobalTensor<float> c_;
    Queue left_, right_;
    StoredTile stored_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> accumulator_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> rows_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> fractals_out_, product_out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> ones_buffer_;
    AscendC::LocalTensor<uint16_t> ones_;
};

__aicore__ inline void ProbeCoreVector(const VectorProbeArguments& arguments, uint32_t probe, uint32_t count)
{
    AscendC::TPipe pipe;
    VectorProbes(arguments, count, pipe).Run(probe);
}
__aicore__ inline void ProbeCoreProduct(const ProductProbeArguments& arguments, uint32_t m, uint32_t n, uint32_t k)
{
    AscendC::TPipe pipe;
    CoreProductProbe(arguments, pipe).Run(m, n, k);
}

}  // namespace pasa
