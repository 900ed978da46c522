// Decoding on a core of an Ascend 310P: attention that reads the keys of a cache where they are.
#pragma once

#include "decode_rows.h"

namespace pasa {

// The blocks of all keys are cut into equal parts for the cores (decode_task.h). While the vector unit makes the
// weights of a block, the cube unit forms the scores of the next. Parts of an item are merged in a launch of its own,
// because no flags join cores.
class CoreDecode : private DecodeRows {
public:
    __aicore__ inline CoreDecode(const DecodeArguments& arguments, const DecodeTiling& tiling, AscendC::TPipe& pipe)
        : DecodeRows(arguments, tiling, pipe),
          workspace_(arguments.workspace)
    {
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.out));
        lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.lse));
        if (a_.has_sinks) sinks_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.sinks));
        pipe.InitBuffer(lse_out_, 1, kHalfRows * kFloatBlock * sizeof(float));
    }

    // The first launch: attention to this core's part of the blocks.
    __aicore__ inline void Run()
    {
        Segment s;
        tasks_.Begin(AscendC::GetBlockIdx());
        while (tasks_.Next(s)) {
            BeginItem(s.item);
            Attend(s);
            if (s.starts && s.ends) {
                Finish(s.item);
            } else {
                StorePart(s.starts);
            }
            products_.End();
        }
        products_.Close();
    }

    // The second launch: the item whose first part is the last one of this core.
    __aicore__ inline void Merge()
    {
        Segment s;
        DecodeItem item;
        bool has_parts = false;
        tasks_.Begin(AscendC::GetBlockIdx());
        while (tasks_.Next(s)) {
            if (!s.starts || s.ends) continue;
            item = s.item;
            has_parts = true;
        }
        if (has_parts) {
            BeginItem(item);
            AddParts(item);
            Finish(item);
            products_.End();
        }
        products_.Close();
    }

private:
    __aicore__ inline void BeginItem(const DecodeItem& item)
    {
        BeginRows(item.tokens * t_.group);
        TakeQueries(item);
    }

    __aicore__ inline void Attend(const Segment& s)
    {
        if (s.steps == 0) {
            AscendC::Duplicate(frame_.Columns(HeadFrame::kFrame), 0.0f, a_.dim);
            return;
        }
        TakeSamples(s.item);
        LoadPiece(s, 0);
        LoadPiece(s, 1);
        moves_ = false;
        ShiftKeys(s, 0);
        TakeValues(s, 0);
        for (uint32_t j = 0; j < s.steps; ++j) {
            FloatTile scores = products_.TakeScores();
            if (moves_) FollowFrame();
            if (j + 1 < s.steps) ShiftKeys(s, j + 1);
            TakeBlock(s, j, scores);
            if (j + 1 < s.steps) TakeValues(s, j + 1);
        }
        AddBlock(products_);
    }

    // K' of a block, its scores, and if columns leave the frame before it, what references gain by that.
    __aicore__ inline void ShiftKeys(const Segment& s, uint32_t j)
    {
        moves_ = TakeKeys(s, j);
        products_.MakeScores(j, KeysOf(s, j));
        if (!moves_) return;
        MultiplyQueries(HeadFrame::kMoved);
        const FloatTile frame = frame_.Columns(HeadFrame::kFrame), moved = frame_.Columns(HeadFrame::kMoved);
        AscendC::Sub(frame, frame, moved, a_.dim);
    }
    __aicore__ inline void FollowFrame()
    {
        TakeRowProduct(Number(kFramed));
        RowMath(0, rows_).Add(Number(kReference), Number(kReference), Number(kFramed));
    }

    __aicore__ inline void TakeBlock(const Segment& s, uint32_t j, FloatTile& scores)
    {
        CopyOut(tile_, scores, rows_ * RoundUp(KeysOf(s, j), kFractal));
        products_.FreeScores(scores);
        MoveReference(s, j);
        HalfTile weights = TakeWeights(half_out_, Number(kReference));
        products_.StoreWeights(KeysOf(s, j), weights);
        half_out_.FreeTensor(weights);
        if (j > 0) AddBlock(products_);
        products_.MakeProduct(j, KeysOf(s, j));
        if (j > 0) {
            Rescale();
        }
    }

    // The tile to nats, and kReference to the row's largest score so far less 11 ln 2. kKeep becomes the factor of the
    // output so far.
    __aicore__ inline void MoveReference(const Segment& s, uint32_t j)
    {
        FractalTile tile(tile_, work_, rows_);
        AscendC::PipeBarrier<PIPE_V>();
        tile.Scale(a_.scale, RoundUp(KeysOf(s, j), kFractal));
        AscendC::PipeBarrier<PIPE_V>();
        Hide(s, j, tile);
        tile.FoldEight();
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldFour();
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldTwo();
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldHalves();
        AscendC::PipeBarrier<PIPE_V>();
        tile.Finish(Number(kTop));
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(0, rows_).Lower(Number(kRaised), Number(kTop), kBelowLargest);
        AscendC::PipeBarrier<PIPE_V>();
        RaiseReference();
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Scores of keys that do not exist, or that a row does not see, become kHiddenNats.
    __aicore__ inline void Hide(const Segment& s, uint32_t j, FractalTile& tile)
    {
        const uint32_t first = (s.block + j) * kBlockKeys, count = KeysOf(s, j), rows = s.item.tokens * t_.group;
        const bool partial = a_.causal && s.item.first_sees < first + count;
        if (count == kBlockKeys && !partial) return;
        if (count < kBlockKeys) {
            tile.HideColumns(count, kHiddenNats);
            AscendC::PipeBarrier<PIPE_V>();
        }
        for (uint32_t r = 0; r < rows && partial; ++r) {
            const int64_t seen = s.item.first_sees + r / t_.group - first;
            if (seen < count) tile.HideInRow(r, seen <= 0 ? 0 : static_cast<uint32_t>(seen), kHiddenNats);
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    // ---- parts of the keys of an item

    // Where a part's results are: of a core's first segment, or of its last.
    struct Part {
        __aicore__ inline Part(const CoreDecode& of, uint32_t core, bool last)
        {
            const DecodeWorkspace& w = of.t_.group_workspace;
            GM_ADDR at = of.workspace_ + core * w.bytes;
            const uint64_t which = last;
            output.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.outputs) + which * kDecodeRows * of.a_.dim);
            state.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.states) + which * 2 * kDecodeRows);
            frame.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + w.ends) + which * of.a_.dim);
        }
        AscendC::GlobalTensor<float> output, state;
        AscendC::GlobalTensor<half> frame;
    };

    __aicore__ inline void StorePart(bool last)
    {
        const Part part(*this, AscendC::GetBlockIdx(), last);
        StoreRows(part.state, part.output, 2);
        HalfTile frame = half_out_.AllocTensor<half>();
        AscendC::Cast(frame, frame_.Columns(HeadFrame::kFrame), AscendC::RoundMode::CAST_NONE, a_.dim);
        half_out_.EnQue(frame);
        frame = half_out_.DeQue<half>();
        AscendC::DataCopy(part.frame, frame, a_.dim);
        half_out_.FreeTensor(frame);
    }

    // Parts merge in the columns that the frames of all of them have. So what a reference gains by the change of frames
    // is bounded by keys of its own part.
    __aicore__ inline void AddParts(const DecodeItem& item)
    {
        uint32_t core = AscendC::GetBlockIdx();
        do {
            LoadFrame(Part(*this, core, core == AscendC::GetBlockIdx()));
            frame_.Meet(core == AscendC::GetBlockIdx());
        } while (tasks_.NextPart(item, core));
        frame_.TakeCommon();
        core = AscendC::GetBlockIdx();
        do {
            AddPart(Part(*this, core, core == AscendC::GetBlockIdx()));
        } while (tasks_.NextPart(item, core));
    }

    // To kMoved.
    __aicore__ inline void LoadFrame(const Part& part)
    {
        HalfTile in = piece_in_.AllocTensor<half>();
        AscendC::DataCopy(in, part.frame, a_.dim);
        piece_in_.EnQue(in);
        in = piece_in_.DeQue<half>();
        AscendC::Cast(frame_.Columns(HeadFrame::kMoved), in, AscendC::RoundMode::CAST_NONE, a_.dim);
        piece_in_.FreeTensor(in);
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline FloatTile Load(const AscendC::GlobalTensor<float>& from, uint32_t numbers)
    {
        FloatTile in = piece_in_.AllocTensor<float>();
        AscendC::DataCopy(in, from, numbers);
        piece_in_.EnQue(in);
        return piece_in_.DeQue<float>();
    }

    __aicore__ inline void AddPart(const Part& part)
    {
        RowMath all(0, rows_);
        const Row reference = Number(kReference), other = Number(kTop), sum = Number(kGap), raised = Number(kRaised);
        FloatTile in = Load(part.state, 2 * kDecodeRows);
        all.Scale(other, in, 1.0f);
        all.Scale(sum, in[kDecodeRows], 1.0f);
        piece_in_.FreeTensor(in);
        LoadFrame(part);
        AscendC::Sub(frame_.Columns(HeadFrame::kMoved), frame_.Columns(HeadFrame::kMoved),
                     frame_.Columns(HeadFrame::kFrame), a_.dim);
        if (frame_.HasMoved(work_)) {
            MultiplyQueries(HeadFrame::kMoved);
            TakeRowProduct(Number(kFramed));
            all.Add(other, other, Number(kFramed));
        }
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(raised, reference, other);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(Number(kKeep), reference, raised);
        all.Subtract(other, other, raised);
        AscendC::PipeBarrier<PIPE_V>();
        all.Exponential(Number(kKeep), Number(kKeep));
        all.Exponential(other, other);
        all.Scale(reference, raised, 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        Rescale();
        all.Multiply(sum, sum, other);
        AscendC::PipeBarrier<PIPE_V>();
        SpreadRows(spread_, other, rows_);
        all.Add(Number(kSum), Number(kSum), sum);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t first = 0; first < a_.dim; first += kChunk) {
            const uint32_t numbers = rows_ * Least(kChunk, a_.dim - first);
            in = Load(part.output[first * rows_], numbers);
            for (uint32_t at = 0; at < numbers; at += group_) {
                AscendC::Mul(in[at], in[at], spread_, static_cast<int32_t>(group_));
            }
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(output_[first * rows_], output_[first * rows_], in, static_cast<int32_t>(numbers));
            piece_in_.FreeTensor(in);
        }
    }

    // ---- results

    __aicore__ inline void Finish(const DecodeItem& item)
    {
        const uint32_t rows = item.tokens * t_.group;
        const RowBits without_keys = RowsBetween(0, tasks_.RowsWithoutKeys(item, 0, rows_));
        MultiplyQueries(HeadFrame::kFrame);
        TakeRowProduct(Number(kFrame));
        CloseRows(without_keys);
        if (a_.has_sinks) {
            for (uint32_t r = 0; r < rows_; ++r) {
                RowMath(r, r + 1).Set(Number(kKeep), sinks_.GetValue(item.head * t_.group + r % t_.group));
            }
            AddSinks();
        }
        SpreadRows(spread_, Number(kSum), rows_);
        AscendC::PipeBarrier<PIPE_V>();
        MakeLogSums(Number(kTop), without_keys, a_.has_sinks);
        FloatTile lse = lse_out_.AllocTensor<float>();
        AscendC::PipeBarrier<PIPE_V>();
        Spread(lse, Number(kTop), rows_);  // eight times: no smaller piece of memory can be written
        lse_out_.EnQue(lse);
        lse = lse_out_.DeQue<float>();
        AscendC::DataCopy(lse_[FirstRow(item) * kFloatBlock], lse, rows * kFloatBlock);
        lse_out_.FreeTensor(lse);
        HalfTile out = half_out_.AllocTensor<half>();
        MakeOutput(out);
        half_out_.EnQue(out);
        out = half_out_.DeQue<half>();
        AscendC::DataCopy(out_[FirstRow(item) * a_.dim], out, rows * a_.dim);
        half_out_.FreeTensor(out);
    }

    GM_ADDR workspace_;
    bool moves_ = false;  // columns left the frame before the newest block, and references do not know of it
    AscendC::GlobalTensor<half> out_;
    AscendC::GlobalTensor<float> lse_, sinks_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> lse_out_;
};

__aicore__ inline void Decode(const DecodeArguments& arguments, const DecodeTiling& tiling)
{
    AscendC::TPipe pipe;
    CoreDecode(arguments, tiling, pipe).Run();
}
__aicore__ inline void MergeDecoded(const DecodeArguments& arguments, const DecodeTiling& tiling)
{
    AscendC::TPipe pipe;
    CoreDecode(arguments, tiling, pipe).Merge();
}

}  // namespace pasa
