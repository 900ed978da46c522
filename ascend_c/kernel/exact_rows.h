// The exact recovery on a vector core: the test if an FP16 tile is accurate, offsets of blocks, and references.
#pragma once

#include "next_reference.h"
#include "output_rows.h"

namespace pasa {

constexpr float kReach = 6.0f;         // nats above its reference at which FP16 stores a score too coarsely
constexpr float kZeroWeight = 104.0f;  // exp(-104) is zero even among FP32's subnormals
constexpr float kCoarseUnit = 0x1p17f;  // nats in a unit at which FP16's subnormals are 2^-7 nats apart

class ExactRows : protected OutputRows<true> {
protected:
    using OutputRows::OutputRows;
    static constexpr uint32_t kGuessRow = 2 * kHalfRows;  // of loaded offsets; behind it the unit

    // The tile again, in FP32 and in nats, with a mask added, to score_tile_; the largest of each row to kTop, in units
    // of the tile (TopFactor).
    __aicore__ inline void LoadWide(const Task& task, uint32_t j, uint32_t rows, float factor)
    {
        const uint32_t slot = j % 2;
        FloatTile wide = wide_in_.AllocTensor<float>();
        AscendC::DataCopy(wide, wide_[slot], rows * kBlockKeys);
        wide_in_.EnQue(wide);
        wide = wide_in_.DeQue<float>();
        Hide(task, 0, tasks_.Block(task, j), rows, wide);
        RowReduction<AscendC::ReduceType::MAX> top(work_, rows);
        if (!t_.adds_mask) top.Blocks(wide);
        AscendC::Muls(score_tile_, wide, factor, rows * kBlockKeys);
        wide_in_.FreeTensor(wide);
        AscendC::PipeBarrier<PIPE_V>();
        if (t_.adds_mask) {
            AddMask(task, j, rows);
            top.Blocks(score_tile_);
            AscendC::PipeBarrier<PIPE_V>();
        }
        top.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        top.Finish(Number(kTop));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Nats in a unit of kTop. What a mask adds is in nats.
    __aicore__ inline float TopFactor(uint32_t slot) const { return t_.adds_mask ? 1.0f : factor_[slot]; }

    // Return if the tile has to come in FP32: a mask is added, which no reference foresees, or a score is too far above
    // its reference (from it, if that is a guess), or the reference is too far above the running maximum, or the scale
    // is too coarse for the distances of all.
    __aicore__ inline bool NeedsWide(uint32_t rows, float reached, float factor)
    {
        if (t_.adds_mask || reached * factor > kReach || reached >= kHalfLargest || factor > kCoarseUnit) return true;
        return kHalfLargest * factor < kZeroWeight && HasBottom(rows, factor);
    }

    // With a tiny scale even FP16's lowest number has weight. Masked scores lie below it, so they may cause an FP32
    // tile that was not needed.
    __aicore__ inline bool HasBottom(uint32_t rows, float factor)
    {
        RowReduction<AscendC::ReduceType::MIN> bottom(work_, rows);
        bottom.Blocks(score_tile_);
        AscendC::PipeBarrier<PIPE_V>();
        bottom.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        bottom.Finish(Number(kFirst));
        AscendC::PipeBarrier<PIPE_V>();
        return Extreme<AscendC::ReduceType::MIN>(Number(kFirst), rows, work_) <= -kHalfLargest * factor;
    }

    __aicore__ inline void TellVerdict(uint32_t slot, int32_t wanted)
    {
        AscendC::LocalTensor<int32_t> verdict = verdict_out_.AllocTensor<int32_t>();
        AscendC::Duplicate(verdict, wanted, static_cast<int32_t>(kVerdictWords));
        verdict_out_.EnQue(verdict);
        verdict = verdict_out_.DeQue<int32_t>();
        AscendC::DataCopy(verdict_[slot], verdict, kVerdictWords);
        verdict_out_.FreeTensor(verdict);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kVerdictReady + slot);
    }

    // Load the offsets of the frame and of the anchor of the block of step j, its guess if it has one, and its unit.
    __aicore__ inline void LoadOffsets(const Task& task, uint32_t j, uint32_t rows)
    {
        const uint32_t padded = RoundUp(rows, kFloatBlock);
        FloatTile in = offset_in_.AllocTensor<float>();
        AscendC::DataCopyParams p;
        p.blockCount = t_.anchor_rows;
        p.blockLen = padded / kFloatBlock;
        p.srcGap = (kTileRows - padded) / kFloatBlock;
        p.dstGap = (kHalfRows - padded) / kFloatBlock;
        const uint32_t block = tasks_.Block(task, j);
        AscendC::DataCopy(in, offsets_[0][t_.anchor_rows * (block - task.first) * kTileRows], p);
        AscendC::DataCopy(in[kGuessRow + kHalfRows], units_[(task.key_block + block) * kUnitCopies], kUnitCopies);
        offset_in_.EnQue(in);
    }

    // The loaded offsets, to be freed; `unit` is that of their block.
    __aicore__ inline FloatTile TakeOffsets(float& unit)
    {
        FloatTile in = offset_in_.DeQue<float>();
        const AscendC::TEventID loaded = GetTPipePtr()->FetchEventID(AscendC::HardEvent::MTE2_S);
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(loaded);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(loaded);
        unit = in[kGuessRow + kHalfRows].GetValue(0);
        return in;
    }

    // The first tile refers to the mean score of its block, and the second one to the same mean in the rows that see a
    // key of the first; rows that begin there refer to the mean score of the second block. The frame of block 1 is its
    // anchor: its offset is 0.
    __aicore__ inline void MakeGuesses(const Task& task, uint32_t rows)
    {
        RowMath all(0, rows);
        const RowBits everyone = RowsBetween(0, rows);
        const bool has_offset = tasks_.Block(task, 0) > 0;
        float unit;
        LoadOffsets(task, 0, rows);
        FloatTile in = TakeOffsets(unit);
        factor_[0] = t_.scale / unit;
        all.Scale(Number(0, kFrame), in, t_.scale);
        all.Scale(Framed(0), in, t_.scale);
        all.Scale(Number(kRho), in[t_.anchor_rows == 3 ? kGuessRow : kHalfRows], unit);
        all.Scale(Number(kNext), in[kHalfRows], has_offset ? unit : 0.0f);
        offset_in_.FreeTensor(in);
        BeginReference(0, rows, Number(0, kMaximum), factor_[0], everyone, everyone, true);
        SendReference(0, rows);
        FinishReference();
        if (task.steps == 1) return;
        LoadOffsets(task, 1, rows);
        in = TakeOffsets(unit);
        factor_[1] = t_.scale / unit;
        all.Scale(Framed(1), in, t_.scale);
        all.Scale(Number(kNext), in[kHalfRows], unit);
        if (t_.anchor_rows == 3) all.Scale(Number(kGuess), in[kGuessRow], unit);
        offset_in_.FreeTensor(in);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(Number(kCarried), Number(0, kFrame), Framed(1));
        const RowBits begin = t_.adds_mask ? everyone : SeeFirst(task, 1, rows, SeenRows(task, 0, rows));
        BeginReference(1, rows, Number(0, kOffset), factor_[1], begin, everyone, false);
        SendReference(1, rows);
        FinishReference();
    }

    // The rows of this core that see a key of the block of a step; and those that do and are not among `before`.
    __aicore__ inline RowBits SeenRows(const Task& task, uint32_t step, uint32_t rows) const
    {
        return tasks_.Seeing(task, skipped_ / kHalfRows, step, rows);
    }
    __aicore__ inline RowBits SeeFirst(const Task& task, uint32_t step, uint32_t rows, RowBits before) const
    {
        return SeenRows(task, step, rows) & ~before;
    }

    // Begin the reference of a block: `from`, which kCarried takes into its frame, or a guess (next_reference.h).
    __aicore__ inline void BeginReference(uint32_t slot, uint32_t rows, const Row& from, float factor, RowBits begin,
                                          RowBits guessed, bool is_made)
    {
        next_.Begin({from, Number(kCarried), Number(kNext), Number(kFactor), Number(slot, kOffset),
                     Number(slot, kRaised), Number(kRho), Number(kHigh), Number(kRest), Number(kGuess),
                     half_row_buffer_.Get<half>(), spread_.ReinterpretCast<half>(), reference_out_.AllocTensor<half>()},
                    rows, factor, begin, guessed, is_made);
    }

    // The steps that are left until the cube core can have the reference.
    __aicore__ inline void SendReference(uint32_t slot, uint32_t rows)
    {
        while (!next_.IsOut()) {
            AscendC::PipeBarrier<PIPE_V>();
            next_.Advance();
        }
        HalfTile out = next_.Out();
        reference_out_.EnQue(out);
        out = reference_out_.DeQue<half>();
        AscendC::DataCopy(reference_[slot], out, rows * kFractal);
        reference_out_.FreeTensor(out);
    }

    // The steps that are left until the vector core can use the reference itself.
    __aicore__ inline void FinishReference()
    {
        while (!next_.IsDone()) {
            AscendC::PipeBarrier<PIPE_V>();
            next_.Advance();
        }
    }

    NextReference next_;
};

}  // namespace pasa
