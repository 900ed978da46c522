// What single calls of a vector unit do, on the device of either chip.
#pragma once

#include "rows.h"

namespace pasa {

constexpr uint32_t kProbeNumbers = 4096;  // most numbers of a vector probe

enum VectorProbe : uint32_t { kProbeExp, kProbeLn, kProbeDiv, kProbeHalfProduct, kProbeIntegers, kProbeSelect, kProbeSum };

struct VectorProbeArguments {
    GM_ADDR x;  // FP32, or int32 for kProbeIntegers
    GM_ADDR y;
    GM_ADDR z;
};

// z of x and y, by one vector core: exp(x), ln(x), x / y, the FP16 product x y, the integer x y + y with the first
// eight numbers of x for all, the smaller of both by Compare and Select, or x + y.
class VectorProbes {
public:
    __aicore__ inline VectorProbes(const VectorProbeArguments& arguments, uint32_t count, AscendC::TPipe& pipe)
        : count_(count)
    {
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.x));
        y_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.y));
        z_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.z));
        pipe.InitBuffer(x_in_, 1, kProbeNumbers * sizeof(float));
        pipe.InitBuffer(y_in_, 1, kProbeNumbers * sizeof(float));
        pipe.InitBuffer(z_out_, 1, kProbeNumbers * sizeof(float));
        pipe.InitBuffer(halves_buffer_, 2 * kProbeNumbers * sizeof(half));
        pipe.InitBuffer(bits_buffer_, kProbeNumbers / 8);
    }

    __aicore__ inline void Run(uint32_t probe)
    {
        if (AscendC::GetBlockIdx() > 0) return;
        Row x = Load(x_in_, x_), y = Load(y_in_, y_), z = z_out_.AllocTensor<float>();
        Compute(probe, z, x, y);
        x_in_.FreeTensor(x);
        y_in_.FreeTensor(y);
        z_out_.EnQue(z);
        z = z_out_.DeQue<float>();
        AscendC::DataCopy(z_, z, count_);
        z_out_.FreeTensor(z);
    }

private:
    using Row = AscendC::LocalTensor<float>;
    using Queue = AscendC::TQue<AscendC::TPosition::VECIN, 1>;

    __aicore__ inline Row Load(Queue& queue, const AscendC::GlobalTensor<float>& from)
    {
        Row row = queue.AllocTensor<float>();
        AscendC::DataCopy(row, from, count_);
        queue.EnQue(row);
        return queue.DeQue<float>();
    }

    __aicore__ inline void Compute(uint32_t probe, const Row& z, const Row& x, const Row& y)
    {
        const int32_t count = static_cast<int32_t>(count_);
        switch (probe) {
            case kProbeExp: AscendC::Exp(z, x, count); break;
            case kProbeLn: AscendC::Ln(z, x, count); break;
            case kProbeDiv: AscendC::Div(z, x, y, count); break;
            case kProbeHalfProduct: MultiplyHalves(z, x, y); break;
            case kProbeIntegers: MultiplyIntegers(z, x, y); break;
            case kProbeSum: AscendC::Add(z, x, y, count); break;
            default: TakeSmaller(z, x, y); break;
        }
    }

    __aicore__ inline void MultiplyHalves(const Row& z, const Row& x, const Row& y)
    {
        const AscendC::LocalTensor<half> left = halves_buffer_.Get<half>(), right = left[kProbeNumbers];
        AscendC::Cast(left, x, AscendC::RoundMode::CAST_NONE, count_);
        AscendC::Cast(right, y, AscendC::RoundMode::CAST_NONE, count_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(left, left, right, static_cast<int32_t>(count_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(z, left, AscendC::RoundMode::CAST_NONE, count_);
    }

    // As unbiased rounding does it, with strides of 0.
    __aicore__ inline void MultiplyIntegers(const Row& z, const Row& x, const Row& y)
    {
        using Integers = AscendC::LocalTensor<int32_t>;
        const Integers to = z.ReinterpretCast<int32_t>(), other = y.ReinterpretCast<int32_t>();
        AscendC::Mul(to, x.ReinterpretCast<int32_t>(), other, kFloats, count_ / kFloats,
                     AscendC::BinaryRepeatParams(1, 0, 1, 8, 0, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(to, to, other, static_cast<int32_t>(count_));
    }

    __aicore__ inline void TakeSmaller(const Row& z, const Row& x, const Row& y)
    {
        const AscendC::LocalTensor<uint8_t> bits = bits_buffer_.Get<uint8_t>();
        AscendC::Compare(bits, x, y, AscendC::CMPMODE::LE, kFloats, count_ / kFloats,
                         AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(z, bits, x, y, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, count_);
    }

    uint32_t count_;
    AscendC::GlobalTensor<float> x_, y_, z_;
    Queue x_in_, y_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> z_out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> halves_buffer_, bits_buffer_;
};

struct ProductProbeArguments {
    GM_ADDR a;      // FP16 (m, k)
    GM_ADDR b;      // FP16 (n, k)
    GM_ADDR stale;  // FP16 (128, k): lies in L1 before A and B do
    GM_ADDR c;      // FP32 (3, 128, 128)
};

}  // namespace pasa
