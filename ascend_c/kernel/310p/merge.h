// Outputs of the parts of a tile's keys, merged on an Ascend 310P in a launch of its own: no flags join its cores.
#pragma once

#include "state.h"

namespace pasa {

class CoreMerge : private CoreState {
public:
    __aicore__ inline CoreMerge(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : CoreState(arguments, tiling, pipe)
    {
        pipe.InitBuffer(part_in_, 1, (kPartNumbers + tiling.dim) * kHalfRows * sizeof(float));
    }

    __aicore__ inline void Run()
    {
        Task task;
        for (uint32_t turn = 0; tasks_.Get(turn, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), 1, task); ++turn) {
            Merge(task);
        }
    }

private:
    __aicore__ inline void Merge(const Task& task)
    {
        RowBits seen = 0;
        BeginRows(task.lane[0].rows);
        for (uint32_t i = 0; i < t_.parts; ++i) {
            Task part = task;
            tasks_.Cut(part, i);
            RowBits here = 0;
            for (uint32_t j = 0; j < part.steps; ++j) here |= tasks_.Seeing(part, 0, j, part.lane[0].rows);
            if (here == 0) continue;
            AddPart(part, here);
            seen |= here;
        }
        Finish(task, seen);
    }

    // As a block moves the reference, so does a part; the rows that see a key of it take its frame.
    __aicore__ inline void AddPart(const Task& part, RowBits here)
    {
        FloatTile in = part_in_.AllocTensor<float>();
        const AscendC::GlobalTensor<float> from = parts_[PartPlace(part)];
        AscendC::DataCopy(in, from, (kPartNumbers * kHalfRows + rows_ * t_.dim));
        part_in_.EnQue(in);
        in = part_in_.DeQue<float>();
        RowMath all(0, rows_), seeing(here);
        const FloatTile output = in[kPartNumbers * kHalfRows];
        const Row reference = in[kReference * kHalfRows], sum = in[kSum * kHalfRows], frame = in[kFrame * kHalfRows];
        const Row best = in[kBest * kHalfRows], carried = Number(kScratch), raised = Number(kRaised);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Subtract(carried, Number(kFrame), frame);
        all.Set(Number(kKeep), 1.0f);
        all.Set(Number(kGap), 0.0f);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Add(Number(kReference), Number(kReference), carried);
        seeing.Add(Number(kBest), Number(kBest), carried);
        seeing.Scale(Number(kFrame), frame, 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Larger(Number(kBest), Number(kBest), best);
        seeing.Larger(raised, Number(kReference), reference);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Subtract(Number(kKeep), Number(kReference), raised);
        seeing.Subtract(Number(kGap), reference, raised);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Exponential(Number(kKeep), Number(kKeep));
        seeing.Exponential(Number(kGap), Number(kGap));
        seeing.Scale(Number(kReference), raised, 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        Rescale();
        all.Multiply(sum, sum, Number(kGap));
        AscendC::PipeBarrier<PIPE_V>();
        SpreadRows(spread_, Number(kGap), rows_);
        all.Add(Number(kSum), Number(kSum), sum);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {
            AscendC::Mul(output[d * rows_], output[d * rows_], spread_, static_cast<int32_t>(group_));
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(output_, output_, output, static_cast<int32_t>(rows_ * t_.dim));
        part_in_.FreeTensor(in);
    }

    AscendC::TQue<AscendC::TPosition::VECIN, 1> part_in_;
};

__aicore__ inline void MergeParts(const Arguments& arguments, const AttentionTiling& tiling)
{
    AscendC::TPipe pipe;
    CoreMerge(arguments, tiling, pipe).Run();
}

}  // namespace pasa
