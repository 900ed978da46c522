// The exact recovery on a vector core: the test if an FP16 tile is accurate, and the frames of this tile and the next.
#pragma once

#include "next_reference.h"
#include "vector_state.h"

namespace pasa {

constexpr float kReach = 8.0f;         // nats above its reference at which FP16 stores a score too coarsely
constexpr float kZeroWeight = 104.0f;  // exp(-104) is zero even among FP32's subnormals
constexpr float kCoarseUnit = 0x1p17f;  // nats in a unit at which FP16's subnormals are 2^-7 nats apart

class ExactRows : protected VectorState {
protected:
    using VectorState::VectorState;

    // Write scores in nats to score_tile_, from a tile in FP32 if FP16 was too coarse; the largest of each row to kTop,
    // and the same in the block's frame to kHere. If there is a next block, also prepare the part that its anchor
    // subtracts; factor_, which then is that block's; q.f_j in its frame, to kFramed; and to kCarried the change of
    // frame for the rows that see the block. Return true if the tile came in FP32.
    __aicore__ inline bool ToFrame(const Task& task, uint32_t i, uint32_t j, uint32_t rows, RowMath& seeing,
                                   bool refers)
    {
        RowMath all(0, rows);
        const float factor = factor_[i];
        const bool wide = Judge(i, j, rows, factor, seeing);
        if (wide) {
            LoadWide(task, i, j, rows, factor);
        } else {
            AscendC::Muls(score_tile_, score_tile_, factor, rows * kBlockKeys);
        }
        all.Scale(Number(kTop), Number(kTop), factor);
        if (refers) {
            float unit = 1.0f;
            FloatTile in = TakeOffsets(i, unit);
            all.Set(Number(kFactor), factor_[i]);
            all.Scale(Number(kFramed), in, t_.scale);
            all.Scale(Number(kNext), in[kHalfRows], unit);
            all.Set(Number(kCarried), 0.0f);
            offset_in_.FreeTensor(in);
        }
        AscendC::PipeBarrier<PIPE_V>();
        all.Add(Number(kHere), Number(kTop), Number(i, kOffset));
        RowMath next(RowsWithoutKeys(task, task.lane[i], j + 1, rows), rows);  // rows that see its keys
        if (refers) {
            next.Subtract(Number(kCarried), Number(i, kFrame), Number(kFramed));
        }
        AscendC::PipeBarrier<PIPE_V>();
        if (refers) {
            next.Scale(Number(i, kFrame), Number(kFramed), 1.0f);
        }
        return wide;
    }

    __aicore__ inline void LoadWide(const Task& task, uint32_t i, uint32_t j, uint32_t rows, float factor)
    {
        AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + i);
        FloatTile wide = wide_in_.AllocTensor<float>();
        AscendC::DataCopy(wide, wide_[i], rows * kBlockKeys);
        wide_in_.EnQue(wide);
        wide = wide_in_.DeQue<float>();
        Hide(task, i, j, rows, wide);
        RowReduction<AscendC::ReduceType::MAX> top(work_, rows);
        top.Blocks(wide);
        AscendC::Muls(score_tile_, wide, factor, rows * kBlockKeys);
        wide_in_.FreeTensor(wide);
        AscendC::PipeBarrier<PIPE_V>();
        top.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        top.Finish(Number(kTop));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Return if the tile has to come in FP32: a score is too far above its reference (in a first tile: too far from
    // it), or the reference is too far above the running maximum, or the scale is too coarse for the distances of all.
    // Fully masked rows hold 0 in kFirst.
    __aicore__ inline bool Judge(uint32_t i, uint32_t j, uint32_t rows, float factor, RowMath& seeing)
    {
        const Row reach = Number(kFirst);
        if (j == 0) {
            seeing.Absolute(reach, Number(kTop));
        } else {
            seeing.Larger(reach, Number(kTop), Number(i, kRaised));
        }
        AscendC::PipeBarrier<PIPE_V>();
        const float largest = Extreme<AscendC::ReduceType::MAX>(reach, rows, work_);
        bool wanted = largest * factor > kReach || largest >= kHalfLargest || factor > kCoarseUnit;
        if (kHalfLargest * factor < kZeroWeight) wanted = wanted || HasBottom(rows);
        TellVerdict(i, wanted);
        return wanted;
    }

    __aicore__ inline void TellVerdict(uint32_t i, bool wanted)
    {
        AscendC::LocalTensor<int32_t> verdict = verdict_out_.AllocTensor<int32_t>();
        AscendC::Duplicate(verdict, wanted ? 1 : 0, static_cast<int32_t>(kVerdictWords));
        verdict_out_.EnQue(verdict);
        verdict = verdict_out_.DeQue<int32_t>();
        AscendC::DataCopy(verdict_[i], verdict, kVerdictWords);
        verdict_out_.FreeTensor(verdict);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kVerdictReady + i);
    }

    // With a tiny scale even FP16's lowest number has weight. Masked scores lie below it, so they may cause an FP32
    // tile that was not needed.
    __aicore__ inline bool HasBottom(uint32_t rows)
    {
        RowReduction<AscendC::ReduceType::MIN> bottom(work_, rows);
        bottom.Blocks(score_tile_);
        AscendC::PipeBarrier<PIPE_V>();
        bottom.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        bottom.Finish(Number(kFirst));
        AscendC::PipeBarrier<PIPE_V>();
        return Extreme<AscendC::ReduceType::MIN>(Number(kFirst), rows, work_) <= -kHalfLargest;
    }

    // Load the offsets of the frame and of the anchor of block j, and its unit.
    __aicore__ inline void LoadOffsets(const Task& task, uint32_t i, uint32_t j, uint32_t rows)
    {
        const uint32_t padded = RoundUp(rows, kFloatBlock);
        FloatTile in = offset_in_.AllocTensor<float>();
        AscendC::DataCopyParams p;
        p.blockCount = 2;
        p.blockLen = padded / kFloatBlock;
        p.srcGap = (kTileRows - padded) / kFloatBlock;
        p.dstGap = (kHalfRows - padded) / kFloatBlock;
        AscendC::DataCopy(in, offsets_[i][2 * j * kTileRows], p);
        const uint64_t block = static_cast<uint64_t>(task.kv_head) * t_.blocks + j;
        AscendC::DataCopy(in[2 * kHalfRows], units_[block * kUnitCopies], kUnitCopies);
        offset_in_.EnQue(in);
    }

    // The loaded offsets, to be freed; `unit` is that of their block.
    __aicore__ inline FloatTile TakeOffsets(uint32_t i, float& unit)
    {
        FloatTile in = offset_in_.DeQue<float>();
        const AscendC::TEventID loaded = GetTPipePtr()->FetchEventID(AscendC::HardEvent::MTE2_S);
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(loaded);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(loaded);
        unit = in[2 * kHalfRows].GetValue(0);
        factor_[i] = t_.scale / unit;
        return in;
    }

    // The reference is the mean score of the first block; its frame is its anchor, so the offset is 0.
    __aicore__ inline void FirstReference(const Task& task, uint32_t i, uint32_t rows)
    {
        LoadOffsets(task, i, 0, rows);
        float unit;
        FloatTile in = TakeOffsets(i, unit);
        RowMath all(0, rows);
        all.Scale(Number(i, kFrame), in, t_.scale);
        all.Scale(Number(kFirst), in[kHalfRows], unit);
        all.Set(Number(kNext), 0.0f);
        offset_in_.FreeTensor(in);
        AscendC::PipeBarrier<PIPE_V>();
        NextReference next = Reference(i, rows, true);
        StoreReference(i, rows, next);
    }

    // Near what is going to be in kCarried, the running maximum in the frame of the next block, or near a guess.
    __aicore__ inline NextReference Reference(uint32_t i, uint32_t rows, bool is_guess)
    {
        const NextReference::Places places{
            Number(kCarried), Number(kNext), Number(kFactor), Number(i, kOffset), Number(i, kRaised), Number(kFirst),
            Number(kSecond), Number(kThird), half_row_buffer_.Get<half>(), spread_.ReinterpretCast<half>(),
            reference_out_.AllocTensor<half>()};
        return NextReference(places, rows, factor_[i], is_guess);
    }

    // What is left of its steps, and then to the cube core.
    __aicore__ inline void StoreReference(uint32_t i, uint32_t rows, NextReference& next)
    {
        if (next.IsDone()) return;
        while (!next.IsDone()) {
            next.Step();
            AscendC::PipeBarrier<PIPE_V>();
        }
        HalfTile out = next.Out();
        reference_out_.EnQue(out);
        out = reference_out_.DeQue<half>();
        AscendC::DataCopy(reference_[i], out, rows * kFractal);
        reference_out_.FreeTensor(out);
    }
};

}  // namespace pasa
