// Round outputs to 16 bits without the one-sided error of repeated maxima: a row whose rounding errors deviate by more
// than 4.25 sigma is flagged, and rounded stochastically. ops/numerics/dither.py explains why, and has the same bits.
#pragma once

#include "rows.h"

namespace pasa {

// The sign of a square wave of a dropped fraction is one bit: of g for a sine, of g + c for a cosine, where g holds the
// fraction's first five bits. Adding half of a bit's period turns the sine into the cosine. So one product and one sum
// form all signs, in copies of g that do not overlap:
//   bits 0 to 5, 7 to 12, 13 to 18   g + 1, g + 2, g + 8; cosines of the places 4, 3, 1 are the bits 1, 9, 17
//   bits 19 to 23, 26 to 30          g and g; sines of the places 4 and 3 are the bits 20 and 28
// The signs are eight places apart, so sums of 64 share one FP32 number without rounding, and can be separated.
constexpr int32_t kCopies = 1 | 1 << 7 | 1 << 13 | 1 << 19 | 1 << 26;
constexpr int32_t kPhases = 1 | 2 << 7 | 8 << 13;
constexpr uint32_t kCosines = 1u << 1 | 1u << 9 | 1u << 17, kSines = 1u << 20 | 1u << 28;
constexpr uint32_t kFractionBits = 5;
constexpr uint32_t kFloatMantissa = 23, kHalfMantissa = 10, kBf16Mantissa = 7;
constexpr uint32_t kMinusInfinityBits = 0xff800000;
// Bits of numbers of the target: the smallest normal one and the largest.
constexpr uint32_t kHalfNormal = 0x38800000, kHalfMost = 0x477fe000;
constexpr uint32_t kBf16Normal = 0x00800000, kBf16Most = 0x7f7f0000;

// Constants of the hash that makes the random bits: every product and sum stays below 2^31.
constexpr int32_t kKeyStep = 31865;
constexpr int32_t kLowFactor = 12285, kHighFactor = 14973, kFirstFactor = 26417, kSecondFactor = 31069;

// Rounds the output rows of a vector core, in the score tile and the buffer of row reductions, which are free by then.
class UnbiasedRounding {
public:
    using FloatTile = AscendC::LocalTensor<float>;
    using Row = RowMath::Row;

    // `low` and `high` are numbers of rows.
    __aicore__ inline UnbiasedRounding(const AttentionTiling& tiling, const FloatTile& tile, const FloatTile& work,
                                       const Row& low, const Row& high, uint32_t rows)
        : t_(tiling),
          tile_(tile),
          work_(work),
          low_(low),
          high_(high),
          rows_(rows),
          dropped_(kFloatMantissa - (tiling.to_bf16 ? kBf16Mantissa : kHalfMantissa)),
          moved_((tiling.to_bf16 ? kBf16Most : kHalfMost) - kMinusInfinityBits),
          stride_(tiling.dim / kFloatBlock)
    {
    }

    // Return if any of the rows at `out` is flagged; if so, note the flagged rows for Draw.
    __aicore__ inline bool FlagRows(const FloatTile& out)
    {
        CountWaves(out);
        Judge();
        if (Extreme<AscendC::ReduceType::MAX>(low_, rows_, work_) < 0.0f) return false;
        AddHalves(out);
        NoteLimits();
        HashRows();
        MakeKeys();
        return true;
    }

    // Round the columns from `first` on, which are at `out`, stochastically: up with a probability equal to the dropped
    // fraction. Rows that are not flagged, subnormals and numbers beyond the target's largest do not change, because
    // rounding these up could give infinity.
    __aicore__ inline void Draw(const FloatTile& out, uint32_t first, uint32_t width)
    {
        for (uint32_t c = 0; c < width; c += kFloats) {
            const uint32_t part = Least(kFloats, width - c);
            FindDrawn(out[c], part);
            MakeRandomNumbers(first + c, part);
            RoundByRandomNumber(out[c], part);
        }
    }

private:
    using Words = AscendC::LocalTensor<uint32_t>;
    using Integers = AscendC::LocalTensor<int32_t>;

    // The second half of work_ holds the keys of columns. The first half holds a bit for each number that is rounded
    // stochastically, and numbers of rows.
    static constexpr uint32_t kKeys = RowReduction<AscendC::ReduceType::SUM>::kPart;
    static_assert(kMaxDim <= RowReduction<AscendC::ReduceType::SUM>::kPart, "every column has a key");

    __aicore__ inline FloatTile Left() const { return tile_; }
    __aicore__ inline FloatTile Right() const { return tile_[kFloats]; }
    // For Draw, spread beside the left half.
    __aicore__ inline FloatTile Limits() const { return tile_[kFloats]; }
    __aicore__ inline FloatTile Factors() const { return tile_[kFloats + kFloatBlock]; }
    __aicore__ inline FloatTile Starts() const { return tile_[kFloats + 2 * kFloatBlock]; }
    // Scratch numbers of rows, behind the bits that Draw selects by.
    __aicore__ inline Row Scratch(uint32_t number) const { return work_[(2 + number) * kHalfRows]; }
    __aicore__ inline Integers Keys() const { return work_[kKeys].ReinterpretCast<int32_t>(); }

    // ---- calls on `columns` of every row; halves of the tile have its stride

    __aicore__ inline void ShiftLeft(const FloatTile& to, const FloatTile& from, uint32_t places, uint32_t columns,
                                     uint32_t stride = kTileBlocks)
    {
        AscendC::ShiftLeft(to.ReinterpretCast<uint32_t>(), from.ReinterpretCast<uint32_t>(), places, columns, rows_,
                           AscendC::UnaryRepeatParams(1, 1, kTileBlocks, stride));
    }
    __aicore__ inline void ShiftRight(const FloatTile& to, const FloatTile& from, uint32_t places, uint32_t columns,
                                      uint32_t stride = kTileBlocks)
    {
        AscendC::ShiftRight(to.ReinterpretCast<uint32_t>(), from.ReinterpretCast<uint32_t>(), places, columns, rows_,
                            AscendC::UnaryRepeatParams(1, 1, kTileBlocks, stride));
    }
    // x = x & mask, which is a block of eight words; the device has this for 16 bits.
    __aicore__ inline void Keep(const FloatTile& x, const FloatTile& mask, uint32_t columns)
    {
        const AscendC::LocalTensor<uint16_t> halves = x.ReinterpretCast<uint16_t>();
        AscendC::And(halves, halves, mask.ReinterpretCast<uint16_t>(), 2 * columns, rows_,
                     AscendC::BinaryRepeatParams(1, 1, 0, kTileBlocks, kTileBlocks, 0));
    }

    // ---- which rows are flagged

    // Count the columns that have each bit: cosines to low_, sines to high_.
    __aicore__ inline void CountWaves(const FloatTile& out)
    {
        const uint32_t columns = t_.unbiased_columns;
        const Words masks = work_.ReinterpretCast<uint32_t>();
        AscendC::Duplicate(masks, kSines, static_cast<int32_t>(kFloatBlock));
        AscendC::Duplicate(masks[kKeys], kCosines, static_cast<int32_t>(kFloatBlock));
        if (columns < kFloats) {  // the sums take whole repeats
            AscendC::Duplicate(tile_, 0.0f, rows_ * kBlockKeys);
            AscendC::PipeBarrier<PIPE_V>();
        }
        ShiftLeft(Left(), out, 32 - dropped_, columns, stride_);
        AscendC::PipeBarrier<PIPE_V>();
        ShiftRight(Left(), Left(), 32 - kFractionBits, columns);
        AscendC::PipeBarrier<PIPE_V>();
        const Integers copies = Left().ReinterpretCast<int32_t>(), phases = Right().ReinterpretCast<int32_t>();
        const AscendC::UnaryRepeatParams in_tile(1, 1, kTileBlocks, kTileBlocks);
        AscendC::Muls(copies, copies, kCopies, columns, rows_, in_tile);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(phases, copies, kPhases, columns, rows_, in_tile);
        AscendC::PipeBarrier<PIPE_V>();
        Keep(Left(), work_, columns);
        Keep(Right(), work_[kKeys], columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(tile_, tile_.ReinterpretCast<int32_t>(), AscendC::RoundMode::CAST_NONE, rows_ * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        RowReduction<AscendC::ReduceType::SUM> count(work_, rows_);
        count.Blocks(tile_);
        AscendC::PipeBarrier<PIPE_V>();
        count.Finish(high_);
        RowReduction<AscendC::ReduceType::SUM>(work_[kKeys], rows_).Finish(low_);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // To the nearest integers, half to even.
    __aicore__ inline void Round(const Row& row)
    {
        AscendC::Cast(row, row, AscendC::RoundMode::CAST_RINT, rows_, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }

    // Separate the sums, and write the result to low_: not below zero in flagged rows.
    __aicore__ inline void Judge()
    {
        RowMath all(0, rows_);
        const Row first = Scratch(0), cosine = Scratch(1), sine = Scratch(2), taken = Scratch(3), taken_too = Scratch(4);
        all.Scale(high_, high_, 0x1p-19f);  // as the cosines stand
        all.Scale(first, low_, 0x1p-17f);
        AscendC::PipeBarrier<PIPE_V>();
        Round(first);  // a quarter at most is behind it
        AscendC::PipeBarrier<PIPE_V>();
        all.Scale(taken, first, 0x1p17f);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(low_, low_, taken);
        AscendC::PipeBarrier<PIPE_V>();
        all.Scale(cosine, low_, 0x1p-9f);
        all.Scale(sine, high_, 0x1p-9f);
        AscendC::PipeBarrier<PIPE_V>();
        Round(cosine);
        Round(sine);
        AscendC::PipeBarrier<PIPE_V>();
        all.Scale(taken, cosine, 0x1p9f);
        all.Scale(taken_too, sine, 0x1p9f);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(low_, low_, taken);
        all.Subtract(high_, high_, taken_too);
        all.Scale(cosine, cosine, 2.0f);
        all.Scale(sine, sine, 2.0f);
        all.Scale(first, first, 2.0f);
        AscendC::PipeBarrier<PIPE_V>();
        Weigh(all, first, cosine, sine);
    }

    // Twice the counts of the columns with a bit: of place 1, of place 3 (cosine, sine) and of place 4 (low_, high_).
    __aicore__ inline void Weigh(RowMath& all, const Row& first, const Row& cosine, const Row& sine)
    {
        const float columns = static_cast<float>(t_.unbiased_columns), leaning = static_cast<float>(t_.leaning);
        const Row waves[] = {cosine, sine, low_, high_};
        for (const Row& wave : waves) all.Lower(wave, wave, columns);
        all.Lower(first, first, columns - leaning + 1.0f);  // all near 0 gives -1 or less
        AscendC::PipeBarrier<PIPE_V>();
        for (const Row& wave : waves) all.Absolute(wave, wave);
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(low_, low_, cosine);
        all.Larger(high_, high_, sine);
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(low_, low_, high_);
        AscendC::PipeBarrier<PIPE_V>();
        all.Lower(low_, low_, leaning);
        AscendC::PipeBarrier<PIPE_V>();
        all.Smaller(low_, low_, first);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The bits of a magnitude are moved down until those of the target's largest number are of -infinity. Larger ones
    // are then NaN or positive, smaller ones nearer to zero, and no move leaves int32_t: one comparison finds what is
    // normal and not too large. In rows that are not flagged it finds only the largest number, which rounding keeps.
    __aicore__ inline void NoteLimits()
    {
        RowMath all(0, rows_);
        const AscendC::LocalTensor<uint8_t> leans = work_.ReinterpretCast<uint8_t>();
        const Row normal = Scratch(0), none = Scratch(1), limit = Scratch(2);
        AscendC::Compares(leans, low_, 0.0f, AscendC::CMPMODE::GE, kFloats);
        all.SetBits(normal, (t_.to_bf16 ? kBf16Normal : kHalfNormal) - moved_);
        all.SetBits(none, kMinusInfinityBits);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(limit, leans, normal, none, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, kFloats);
        AscendC::PipeBarrier<PIPE_V>();
        Spread(Limits(), limit, rows_, kTileBlocks);  // Draw has barriers before it looks at what is spread
    }

    // ---- random bits: a row gives a factor and a start, a column gives a key

    // Sum the halves of each row's first numbers, to high_: below 2^23, so FP32 rounds none. Missing columns are 0
    // since CountWaves.
    __aicore__ inline void AddHalves(const FloatTile& out)
    {
        const uint32_t columns = t_.unbiased_columns;
        ShiftRight(Left(), out, 16, columns, stride_);
        ShiftLeft(Right(), out, 16, columns, stride_);
        AscendC::PipeBarrier<PIPE_V>();
        ShiftRight(Right(), Right(), 16, columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(tile_, tile_.ReinterpretCast<int32_t>(), AscendC::RoundMode::CAST_NONE, rows_ * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        RowReduction<AscendC::ReduceType::SUM> sum(work_, rows_);
        sum.Blocks(tile_);
        AscendC::PipeBarrier<PIPE_V>();
        sum.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        sum.Finish(high_);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Hash the sums to factors of 15 bits, and to starts of 24 bits whose low 8 are 0.
    __aicore__ inline void HashRows()
    {
        const int32_t rows = static_cast<int32_t>(rows_);
        const Row factor = Scratch(3);
        const Words word = high_.ReinterpretCast<uint32_t>(), factors = factor.ReinterpretCast<uint32_t>();
        AscendC::Cast(high_.ReinterpretCast<int32_t>(), high_, AscendC::RoundMode::CAST_RINT, rows_);
        AscendC::PipeBarrier<PIPE_V>();
        Stir(16, kLowFactor, kHighFactor);
        Stir(15, kFirstFactor);
        Stir(15, kSecondFactor);
        AscendC::ShiftLeft(factors, word, 9u, rows);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ShiftRight(factors, factors, 17u, rows);
        Stir(15, kFirstFactor);
        Spread(Factors(), factor, rows_, kTileBlocks);
        AscendC::ShiftLeft(word, word, 8u, rows);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ShiftRight(word, word, 16u, rows);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ShiftLeft(word, word, 8u, rows);
        AscendC::PipeBarrier<PIPE_V>();
        Spread(Starts(), high_, rows_, kTileBlocks);
    }

    // One round of the hash: the low bits of high_ times `factor`, plus those from the 16th on times `high_factor`, or
    // squared.
    __aicore__ inline void Stir(uint32_t bits, int32_t factor, int32_t high_factor = 0)
    {
        const int32_t rows = static_cast<int32_t>(rows_);
        const Integers word = high_.ReinterpretCast<int32_t>();
        const Integers low = Scratch(4).ReinterpretCast<int32_t>(), others = Scratch(5).ReinterpretCast<int32_t>();
        const Words low_bits = low.ReinterpretCast<uint32_t>();
        AscendC::ShiftLeft(low_bits, word.ReinterpretCast<uint32_t>(), 32 - bits, rows);
        AscendC::ShiftRight(others.ReinterpretCast<uint32_t>(), word.ReinterpretCast<uint32_t>(), 16u, rows);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ShiftRight(low_bits, low_bits, 32 - bits, rows);
        if (high_factor > 0) {
            AscendC::Muls(others, others, high_factor, rows);
        } else {
            AscendC::Mul(others, others, others, rows);
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(low, low, factor, rows);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(word, low, others, rows);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Make the key of every column j: the low 15 bits of j kKeyStep, made odd.
    __aicore__ inline void MakeKeys()
    {
        const int32_t columns = static_cast<int32_t>(t_.dim);
        const Integers keys = Keys();
        const Words bits = keys.ReinterpretCast<uint32_t>();
        AscendC::CreateVecIndex(keys, 0, t_.dim);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(keys, keys, kKeyStep, columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ShiftLeft(bits, bits, 17u, columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ShiftRight(bits, bits, 18u, columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ShiftLeft(bits, bits, 1u, columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(keys, keys, 1, columns);  // Draw has barriers before it multiplies by them
    }

    // ---- a part of the columns, in the left half

    // Set a bit in work_ for each number that is rounded stochastically.
    __aicore__ inline void FindDrawn(const FloatTile& out, uint32_t columns)
    {
        const Integers moved = Left().ReinterpretCast<int32_t>();
        AscendC::Abs(Left(), out, columns, rows_, AscendC::UnaryRepeatParams(1, 1, kTileBlocks, stride_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(moved, moved, -static_cast<int32_t>(moved_), columns, rows_,
                      AscendC::UnaryRepeatParams(1, 1, kTileBlocks, kTileBlocks));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compare(work_.ReinterpretCast<uint8_t>(), Left(), Limits(), AscendC::CMPMODE::LE, kFloats, rows_,
                         AscendC::BinaryRepeatParams(1, 1, 0, 1, kTileBlocks, kTileBlocks));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Factor times key plus start, for columns from `first` on.
    __aicore__ inline void MakeRandomNumbers(uint32_t first, uint32_t columns)
    {
        const Integers random_numbers = Left().ReinterpretCast<int32_t>();
        AscendC::Mul(random_numbers, Factors().ReinterpretCast<int32_t>(), Keys()[first], columns, rows_,
                     AscendC::BinaryRepeatParams(1, 0, 1, kTileBlocks, kTileBlocks, 0));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(random_numbers, random_numbers, Starts().ReinterpretCast<int32_t>(), columns, rows_,
                     AscendC::BinaryRepeatParams(1, 1, 0, kTileBlocks, kTileBlocks, kTileBlocks));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Add as many random bits as are dropped, from the eighth on, to the number, and truncate it.
    __aicore__ inline void RoundByRandomNumber(const FloatTile& out, uint32_t columns)
    {
        const Integers words = Left().ReinterpretCast<int32_t>();
        ShiftLeft(Left(), Left(), 24 - dropped_, columns);
        AscendC::PipeBarrier<PIPE_V>();
        ShiftRight(Left(), Left(), 32 - dropped_, columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(words, words, out.ReinterpretCast<int32_t>(), columns, rows_,
                     AscendC::BinaryRepeatParams(1, 1, 1, kTileBlocks, kTileBlocks, stride_));
        AscendC::PipeBarrier<PIPE_V>();
        ShiftRight(Left(), Left(), dropped_, columns);
        AscendC::PipeBarrier<PIPE_V>();
        ShiftLeft(Left(), Left(), dropped_, columns);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Select(out, work_.ReinterpretCast<uint8_t>(), Left(), out, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE,
                        columns, rows_, AscendC::BinaryRepeatParams(1, 1, 1, stride_, kTileBlocks, stride_));
        AscendC::PipeBarrier<PIPE_V>();
    }

    const AttentionTiling& t_;
    FloatTile tile_, work_;
    Row low_, high_;
    uint32_t rows_;
    uint32_t dropped_;  // bits of the mantissa
    uint32_t moved_;    // bits of a magnitude by so much
    uint32_t stride_;   // of a row of outputs, in blocks
};

}  // namespace pasa
