// What decoding subtracts from the keys of a head: a row of columns, of which some leave it on the way through the
// keys.
#pragma once

#include "rows.h"

namespace pasa {

constexpr uint32_t kSamples = 16;        // keys whose mean is the first frame
constexpr float kFinestReach = 0x1p25f;  // over it: halves of FP16 numbers, and their differences, are multiples of it

// The frame of a head starts as the mean of keys that are spread over it, the same for every part of its keys. A column
// leaves it, for the rest of the part, with the first block that has a key k for which |k - f| is above |f| / 2. So
// k - f is exact (Sterbenz), and no longer than k.
class HeadFrame {
public:
    using HalfTile = AscendC::LocalTensor<half>;
    using FloatTile = AscendC::LocalTensor<float>;

    // Numbers of columns, FP32 (D). kFrame is what results so far are relative to, kOwnFrame what the newest keys are.
    enum Column { kFrame, kOwnFrame, kMoved, kHighest, kLowest, kScratch, kColumns };

    __aicore__ inline HeadFrame(uint32_t dim, AscendC::TPipe& pipe) : dim_(dim)
    {
        pipe.InitBuffer(columns_buffer_, kColumns * kMaxDim * sizeof(float));
        pipe.InitBuffer(half_row_buffer_, kMaxDim * sizeof(half));
        columns_ = columns_buffer_.Get<float>();
        half_row_ = half_row_buffer_.Get<half>();
    }

    __aicore__ inline FloatTile Columns(Column which) const { return columns_[which * kMaxDim]; }

    // Return the place of a sampled key.
    static __aicore__ inline uint32_t Sample(uint32_t i, uint32_t keys)
    {
        return static_cast<uint32_t>((2 * i + 1) * uint64_t{keys} / (2 * kSamples));
    }

    // Make the mean of the samples (16, D), FP32, the frame kFrame, and its FP16 numbers half_row_. The samples are
    // lost.
    __aicore__ inline void Begin(const FloatTile& samples)
    {
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t rows = kSamples / 2; rows > 0; rows /= 2) {
            AscendC::Add(samples, samples, samples[rows * dim_], rows * dim_);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Muls(samples, samples, 1.0f / kSamples, dim_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(half_row_, samples, AscendC::RoundMode::CAST_NONE, dim_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(Columns(kFrame), half_row_, AscendC::RoundMode::CAST_NONE, dim_);
    }

    // The largest and the smallest number of each column of `in` (count, width), to kHighest and kLowest. It works in
    // `high` and `low`, each of which holds half of a block.
    __aicore__ inline void FindRange(const HalfTile& high, const HalfTile& low, const HalfTile& in, uint32_t width,
                                     uint32_t count)
    {
        uint32_t rows = DivideUp<uint32_t>(count, 2);
        int32_t numbers = static_cast<int32_t>(rows * width);
        AscendC::Max(high, in, in[(count - rows) * width], numbers);
        AscendC::Min(low, in, in[(count - rows) * width], numbers);
        AscendC::PipeBarrier<PIPE_V>();
        while (rows > 1) {
            const uint32_t lower = rows / 2, from = (rows - lower) * width;
            numbers = static_cast<int32_t>(lower * width);
            AscendC::Max(high, high, high[from], numbers);
            AscendC::Min(low, low, low[from], numbers);
            AscendC::PipeBarrier<PIPE_V>();
            rows -= lower;
        }
        AscendC::Cast(Columns(kHighest), high, AscendC::RoundMode::CAST_NONE, width);
        AscendC::Cast(Columns(kLowest), low, AscendC::RoundMode::CAST_NONE, width);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Columns of kOwnFrame from `first` on leave it where a key of FindRange is too far from it, and become NaN where
    // one is not finite.
    __aicore__ inline void Shrink(uint32_t first, uint32_t width)
    {
        const FloatTile frame = Columns(kOwnFrame)[first], far = Columns(kHighest), low = Columns(kLowest),
                        reach = Columns(kScratch);
        const int32_t n = static_cast<int32_t>(width);
        AscendC::Sub(far, far, frame, n);
        AscendC::Sub(low, frame, low, n);
        AscendC::Abs(reach, frame, n);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Max(far, far, low, n);
        AscendC::Muls(reach, reach, 0.5f, n);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(low, far, 0.0f, n);
        AscendC::Sub(far, far, reach, n);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(far, far, kFinestReach, n);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(far, far, 0.0f, n);  // 0 where |k - f| <= |f| / 2 for all keys, otherwise at least 1
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(far, far, 1.0f, n);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(far, far, frame, n);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(frame, frame, far, n);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(frame, frame, low, n);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Return if kMoved is not 0.
    __aicore__ inline bool HasMoved(const FloatTile& work)
    {
        const FloatTile length = Columns(kScratch);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(length, Columns(kMoved), dim_);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t c = kFloats; c < dim_; c += kFloats) {
            AscendC::Max(length, length, length[c], Least(kFloats, dim_ - c));
            AscendC::PipeBarrier<PIPE_V>();
        }
        return Extreme<AscendC::ReduceType::MAX>(length, Least(kFloats, dim_), work) > 0.0f;
    }

    // Take kMoved, the frame of a part of the keys, to those of which a common frame is made.
    __aicore__ inline void Meet(bool is_first)
    {
        const FloatTile part = Columns(kMoved), above = Columns(kHighest), below = Columns(kLowest);
        const FloatTile to_above = is_first ? above : Columns(kScratch);
        const FloatTile to_below = is_first ? below : Columns(kOwnFrame);
        AscendC::Maxs(to_above, part, 0.0f, dim_);
        AscendC::Mins(to_below, part, 0.0f, dim_);
        AscendC::PipeBarrier<PIPE_V>();
        if (is_first) return;
        AscendC::Min(above, above, to_above, dim_);
        AscendC::Max(below, below, to_below, dim_);
        AscendC::PipeBarrier<PIPE_V>();
    }
    // To kFrame: the common frame, of which each column is 0 where it is 0 in some part.
    __aicore__ inline void TakeCommon() { AscendC::Add(Columns(kFrame), Columns(kHighest), Columns(kLowest), dim_); }

    HalfTile half_row_;

private:
    uint32_t dim_;
    FloatTile columns_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> columns_buffer_, half_row_buffer_;
};

}  // namespace pasa
