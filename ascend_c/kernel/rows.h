// Arithmetic of a vector core: numbers of 64 rows, and tiles (64, 128). Calls do not wait for each other: a PipeBarrier
// stands wherever one needs what came before, with as much between two of them as goes together. Every one is needed
// (tests/ascend_c/test_mutants.py).
#pragma once

#include "port.h"

namespace pasa {

constexpr uint32_t kRepeatBytes = 256;
constexpr uint32_t kFloats = kRepeatBytes / sizeof(float);  // of a repeat: also the numbers of 64 rows
constexpr uint32_t kHalves = kRepeatBytes / sizeof(half);   // of a repeat: also a row of scores
constexpr uint32_t kFloatBlock = kBlockBytes / sizeof(float);
constexpr uint32_t kTileBlocks = 2 * kRepeatBytes / kBlockBytes;  // of a row of an FP32 tile
static_assert(kFloats == kHalfRows && kHalves == kBlockKeys, "a repeat holds one number of each row, or one row");

// One FP32 number for each of 64 rows. Calls take the rows from `first` to `last`; others keep their values.
class RowMath {
public:
    using Row = AscendC::LocalTensor<float>;

    __aicore__ inline RowMath() = default;
    __aicore__ inline RowMath(uint32_t first, uint32_t last)
    {
        const uint64_t below = last >= kFloats ? ~uint64_t{0} : (uint64_t{1} << last) - 1;
        mask_[0] = first >= kFloats ? 0 : below >> first << first;
    }
    // Rows of which a bit is set, the first row lowest.
    __aicore__ inline explicit RowMath(uint64_t rows) { mask_[0] = rows; }

    __aicore__ inline void Set(const Row& to, float value)
    {
        AscendC::Duplicate(to, value, mask_, 1, 1, 8);
    }
    __aicore__ inline void SetBits(const Row& to, uint32_t bits)
    {
        AscendC::Duplicate(to.ReinterpretCast<uint32_t>(), bits, mask_, 1, 1, 8);
    }
    __aicore__ inline void Add(const Row& to, const Row& a, const Row& b)
    {
        AscendC::Add(to, a, b, mask_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void Subtract(const Row& to, const Row& a, const Row& b)
    {
        AscendC::Sub(to, a, b, mask_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void Multiply(const Row& to, const Row& a, const Row& b)
    {
        AscendC::Mul(to, a, b, mask_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void Divide(const Row& to, const Row& a, const Row& b)
    {
        AscendC::Div(to, a, b, mask_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void Larger(const Row& to, const Row& a, const Row& b)
    {
        AscendC::Max(to, a, b, mask_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void Smaller(const Row& to, const Row& a, const Row& b)
    {
        AscendC::Min(to, a, b, mask_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void Scale(const Row& to, const Row& a, float factor)
    {
        AscendC::Muls(to, a, factor, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    __aicore__ inline void Lower(const Row& to, const Row& a, float by)
    {
        AscendC::Adds(to, a, -by, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    __aicore__ inline void AtLeast(const Row& to, const Row& a, float least)
    {
        AscendC::Maxs(to, a, least, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    __aicore__ inline void AtMost(const Row& to, const Row& a, float most)
    {
        AscendC::Mins(to, a, most, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    __aicore__ inline void Absolute(const Row& to, const Row& a)
    {
        AscendC::Abs(to, a, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    __aicore__ inline void Exponential(const Row& to, const Row& a)
    {
        AscendC::Exp(to, a, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    __aicore__ inline void Logarithm(const Row& to, const Row& a)
    {
        AscendC::Ln(to, a, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    // To nearest, half to even: CAST_NONE says so where digits are lost, and a 310P has no other name for it.
    __aicore__ inline void ToHalf(const AscendC::LocalTensor<half>& to, const Row& a)
    {
        AscendC::Cast(to, a, AscendC::RoundMode::CAST_NONE, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 4, 8));
    }
    __aicore__ inline void ToFloat(const Row& to, const AscendC::LocalTensor<half>& a)
    {
        AscendC::Cast(to, a, AscendC::RoundMode::CAST_NONE, mask_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 4));
    }

private:
    uint64_t mask_[2] = {0, 0};
};

// The sum, the largest or the smallest number of each row of an FP32 tile (rows, 128), in three steps with a barrier
// behind each. Blocks of eight numbers come first: to reduce whole repeats takes seven times as long.
template <AscendC::ReduceType kType>
class RowReduction {
public:
    static constexpr uint32_t kPart = kHalfRows * kFloatBlock;
    static constexpr uint32_t kWork = 2 * kPart;  // numbers

    __aicore__ inline RowReduction(const AscendC::LocalTensor<float>& work, uint32_t rows) : work_(work), rows_(rows) {}

    // 128 numbers to eight of either half of the row.
    __aicore__ inline void Blocks(const AscendC::LocalTensor<float>& tile)
    {
        for (uint32_t part = 0; part < 2; ++part) {
            AscendC::ReduceDataBlock<kType>(work_[part * kPart], tile[part * kFloats], kFloats, rows_, 1, 1,
                                            kTileBlocks);
        }
    }
    // The halves onto each other.
    __aicore__ inline void Halves()
    {
        const int32_t count = rows_ * kFloatBlock;
        if (kType == AscendC::ReduceType::SUM) {
            AscendC::Add(work_, work_, work_[kPart], count);
        } else if (kType == AscendC::ReduceType::MAX) {
            AscendC::Max(work_, work_, work_[kPart], count);
        } else {
            AscendC::Min(work_, work_, work_[kPart], count);
        }
    }
    // Eight numbers to one.
    __aicore__ inline void Finish(const RowMath::Row& to)
    {
        AscendC::ReduceDataBlock<kType>(to, work_, kFloats, DivideUp(rows_, kFloatBlock), 1, 1, 8);
    }

private:
    AscendC::LocalTensor<float> work_;
    uint32_t rows_;
};

// The largest or the smallest of the first numbers of a row, read by the scalar unit; `work` takes it and its index.
template <AscendC::ReduceType kType, typename T>
__aicore__ inline float Extreme(const AscendC::LocalTensor<T>& row, uint32_t count, const AscendC::LocalTensor<T>& work)
{
    AscendC::ReduceRepeat<kType>(work, row, count, 1, 1, 1, 8, AscendC::ReduceOrder::ORDER_VALUE_INDEX);
    const AscendC::TEventID done = GetTPipePtr()->FetchEventID(AscendC::HardEvent::V_S);
    AscendC::SetFlag<AscendC::HardEvent::V_S>(done);
    AscendC::WaitFlag<AscendC::HardEvent::V_S>(done);
    return static_cast<float>(work.GetValue(0));
}

// Columns before `last` of one row of an FP32 tile become `value`.
__aicore__ inline void HideColumnsBefore(const AscendC::LocalTensor<float>& row, uint32_t last, float value)
{
    for (uint32_t part = 0; part * kFloats < last; ++part) {
        const uint32_t count = last - part * kFloats;
        uint64_t mask[2] = {count >= kFloats ? ~uint64_t{0} : (uint64_t{1} << count) - 1, 0};
        AscendC::Duplicate(row[part * kFloats], value, mask, 1, 1, 8);
    }
}

// Columns from `first` on become `value`, in so many rows of a tile.
template <typename T>
__aicore__ inline void HideColumns(const AscendC::LocalTensor<T>& tile, uint32_t first, uint32_t rows, float value)
{
    constexpr uint32_t lanes = kRepeatBytes / sizeof(T);
    for (uint32_t part = first / lanes; part < kBlockKeys / lanes; ++part) {
        const uint32_t kept = first > part * lanes ? first - part * lanes : 0;
        uint64_t mask[2];
        mask[0] = kept >= 64 ? 0 : ~uint64_t{0} << kept;
        mask[1] = lanes <= 64 ? 0 : kept <= 64 ? ~uint64_t{0} : ~uint64_t{0} << (kept - 64);
        AscendC::Duplicate(tile[part * lanes], static_cast<T>(value), mask, rows, 1,
                           kBlockKeys * sizeof(T) / kBlockBytes);
    }
}

constexpr float kHalfLargest = 65504.0f;
// Of scores in the units of a tile, in FP32: below every other, and so far that its weight is zero at any scale.
constexpr float kHidden = -0x1p100f;
// A running maximum before the first key: FP32's lowest number. Scores are above it, because they are below 2^43 units
// of at most 2^80 nats, and with them what a mask adds is no lower (ops/attention/spec/masking.py, fitting_mask). Fully
// masked rows may find masked scores above it; their result is replaced at the end.
constexpr float kNothing = -0x1.fffffep127f;
constexpr uint32_t kMinusInfinity = 0xff800000;  // the device's headers have no INFINITY

// A scalar as FP16. The scalar unit rounds to odd, so this is for numbers that FP16 holds.
__aicore__ inline half ToHalf(float scalar)
{
    return AscendC::Cast<float, half, AscendC::RoundMode::CAST_ODD>(scalar);
}

// A number of each row, eight times: what a binary call with a block stride of 0 takes for a whole row. Rows are
// `stride` blocks apart.
__aicore__ inline void Spread(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& row,
                              uint32_t rows, uint32_t stride = 1)
{
    AscendC::Brcb(to, row, DivideUp(rows, kFloatBlock), AscendC::BrcbRepeatParams(stride, 8 * stride));
}

// Nats of a sink above L, from where on an FP16 output is 0 and L is the sink. l e^60 is an FP32 number, so nothing
// saturates.
constexpr float kFarthestSink = 60.0f;

// One more score of each row, whose value is 0. Let L = maximum + logarithm. Then l becomes l (1 + exp(sink - L)),
// which divides O; maximum and logarithm become max(L, sink) and ln(1 + exp(-|L - sink|)), the two terms of the new L.
// `apart` is scratch.
__aicore__ inline void TakeSink(RowMath& all, const RowMath::Row& maximum, const RowMath::Row& sum,
                                const RowMath::Row& logarithm, const RowMath::Row& sink, const RowMath::Row& apart)
{
    AscendC::PipeBarrier<PIPE_V>();
    all.Add(maximum, maximum, logarithm);
    AscendC::PipeBarrier<PIPE_V>();
    all.Subtract(apart, maximum, sink);
    all.Larger(maximum, maximum, sink);
    AscendC::PipeBarrier<PIPE_V>();
    all.AtLeast(apart, apart, -kFarthestSink);
    AscendC::PipeBarrier<PIPE_V>();
    all.Absolute(logarithm, apart);
    all.Scale(apart, apart, -1.0f);
    AscendC::PipeBarrier<PIPE_V>();
    all.Scale(logarithm, logarithm, -1.0f);
    all.Exponential(apart, apart);
    AscendC::PipeBarrier<PIPE_V>();
    all.Exponential(logarithm, logarithm);
    all.Lower(apart, apart, -1.0f);
    AscendC::PipeBarrier<PIPE_V>();
    all.Lower(logarithm, logarithm, -1.0f);
    all.Multiply(sum, sum, apart);
    AscendC::PipeBarrier<PIPE_V>();
    all.Logarithm(logarithm, logarithm);
}

}  // namespace pasa
