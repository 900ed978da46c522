// The results of decoding on a vector core: partial ones of parts of the keys, merged, and the output of rows.
#pragma once

#include "decode_keys.h"
#include "rounded_rows.h"

namespace pasa {

// A running maximum before the first key, and the score of a key that a row does not see, in nats: below every score,
// which is below 2^123. A row that sees no key of a part has weights there, and this maximum: the part itself has none.
constexpr float kUnseen = -0x1p125f;
constexpr float kDecodeLift = 0x1p15f;  // weights are so many times as large; the largest is 1

class DecodeOutput : protected DecodeKeys {
protected:
    __aicore__ inline DecodeOutput(const DecodeArguments& arguments, const DecodeTiling& tiling, AscendC::TPipe& pipe)
        : DecodeKeys(arguments, tiling, pipe),
          tasks_(tiling, arguments)
    {
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.out));
        lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.lse));
        if (a_.has_sinks) sinks_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.sinks));
        pipe.InitBuffer(wide_in_, 1, kDecodeHalf * kBlockKeys * sizeof(float));
        pipe.InitBuffer(state_in_, 1, 2 * kDecodeHalf * sizeof(float));
        pipe.InitBuffer(tile_out_, 1, kDecodeHalf * kBlockKeys * sizeof(half));
        pipe.InitBuffer(row_out_, 1, 2 * kDecodeHalf * sizeof(float));
        pipe.InitBuffer(outputs_, 1, kDecodeHalf * a_.dim * sizeof(float));
        pipe.InitBuffer(spread_buffer_, kDecodeHalf * kBlockBytes);
        spread_ = spread_buffer_.Get<float>();
    }

    // Before the first key.
    __aicore__ inline void BeginRows(uint32_t rows)
    {
        RowMath all(0, rows);
        o_ = outputs_.AllocTensor<float>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Duplicate(o_, 0.0f, rows * a_.dim);
        all.Set(Number(kMaximum), kUnseen);
        all.Set(Number(kSum), 0.0f);
    }

    // O += columns of a matrix (rows, D), each row times a number, if these are `spread`.
    __aicore__ inline void AddRows(const AscendC::GlobalTensor<float>& from, uint32_t rows, bool scaled)
    {
        for (uint32_t d = 0; d < a_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, a_.dim - d), stride = width / kFloatBlock;
            const uint32_t o_stride = a_.dim / kFloatBlock;
            FloatTile in = wide_in_.AllocTensor<float>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = stride;
            p.srcGap = (a_.dim - width) / kFloatBlock;
            AscendC::DataCopy(in, from[d], p);
            wide_in_.EnQue(in);
            in = wide_in_.DeQue<float>();
            for (uint32_t c = 0; scaled && c < width; c += kFloats) {
                AscendC::Mul(in[c], in[c], spread_, Least(kFloats, width - c), rows,
                             AscendC::BinaryRepeatParams(1, 1, 0, stride, stride, 1));
            }
            if (scaled) AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t c = 0; c < width; c += kFloats) {
                AscendC::Add(o_[d + c], o_[d + c], in[c], Least(kFloats, width - c), rows,
                             AscendC::BinaryRepeatParams(1, 1, 1, o_stride, o_stride, stride));
            }
            wide_in_.FreeTensor(in);
        }
    }

    // O and l by kKeep.
    __aicore__ inline void Rescale(uint32_t rows)
    {
        const uint32_t stride = a_.dim / kFloatBlock;
        Spread(spread_, Number(kKeep), rows);
        RowMath(0, rows).Multiply(Number(kSum), Number(kSum), Number(kKeep));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t c = 0; c < a_.dim; c += kFloats) {
            AscendC::Mul(o_[c], o_[c], spread_, Least(kFloats, a_.dim - c), rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, stride, stride, 1));
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    // O, l, maximum and frame of a part of the keys, the first of a group or its last.
    __aicore__ inline void StorePart(bool last, uint32_t rows)
    {
        const Part part(*this, group_, last);
        outputs_.EnQue(o_);
        o_ = outputs_.DeQue<float>();
        AscendC::DataCopy(part.output, o_, rows * a_.dim);
        outputs_.FreeTensor(o_);
        FloatTile state = row_out_.AllocTensor<float>();
        RowMath all(0, rows);
        AscendC::Duplicate(state, 0.0f, 2 * kDecodeHalf);
        AscendC::PipeBarrier<PIPE_V>();
        all.Scale(state, Number(kMaximum), 1.0f);
        all.Scale(state[kDecodeHalf], Number(kSum), 1.0f);
        row_out_.EnQue(state);
        state = row_out_.DeQue<float>();
        AscendC::DataCopy(part.state, state, 2 * kDecodeHalf);
        row_out_.FreeTensor(state);
        HalfTile frame = key_out_.AllocTensor<half>();
        AscendC::Cast(frame, Columns(kFrame), AscendC::RoundMode::CAST_RINT, a_.dim);
        key_out_.EnQue(frame);
        frame = key_out_.DeQue<half>();
        AscendC::DataCopy(part.frame, frame, a_.dim);
        key_out_.FreeTensor(frame);
    }

    // Merge all parts of an item, of which this group has the first, by their log-sum-exps. The frames of parts are
    // columns of one frame, and the merged one has the columns that all have. So what a maximum gains by the change of
    // frames is bounded by keys of its own part.
    __aicore__ inline void Merge(const DecodeItem& item, uint32_t rows)
    {
        FindCommonFrame(item);
        BeginRows(rows);
        RowMath all(0, rows);
        const Row maximum = Number(kMaximum), other = Number(kTop), sum = Number(kRowSum);
        uint32_t group = group_;
        do {
            const Part part(*this, group, group == group_);
            FloatTile in = state_in_.AllocTensor<float>();
            AscendC::DataCopy(in, part.state, 2 * kDecodeHalf);
            state_in_.EnQue(in);
            in = state_in_.DeQue<float>();
            all.Scale(other, in, 1.0f);
            all.Scale(sum, in[kDecodeHalf], 1.0f);
            state_in_.FreeTensor(in);
            if (FindMove(part.frame, true)) Carry(item, other, rows);
            all.Larger(Number(kNext), maximum, other);
            AscendC::PipeBarrier<PIPE_V>();
            all.Subtract(Number(kKeep), maximum, Number(kNext));
            all.Subtract(other, other, Number(kNext));
            AscendC::PipeBarrier<PIPE_V>();
            all.Exponential(Number(kKeep), Number(kKeep));
            all.Exponential(other, other);
            all.Scale(maximum, Number(kNext), 1.0f);
            AscendC::PipeBarrier<PIPE_V>();
            Rescale(rows);
            all.Multiply(sum, sum, other);
            Spread(spread_, other, rows);
            AscendC::PipeBarrier<PIPE_V>();
            all.Add(Number(kSum), Number(kSum), sum);
            AddRows(part.output, rows, true);
        } while (tasks_.NextPart(item, group));
    }

    // O / l and the log-sum-exp.
    __aicore__ inline void Finish(const DecodeItem& item, uint32_t rows)
    {
        const uint32_t without_keys = tasks_.RowsWithoutKeys(item, skipped_, rows);
        RowMath all(0, rows), never(0, without_keys);
        const Row maximum = Number(kMaximum), sum = Number(kSum), logarithm = Number(kLogarithm);
        MultiplyQueries(item, Columns(kFrame), Number(kCarry), rows);
        never.Set(sum, 1.0f);
        if (without_keys > 0) {
            AscendC::Duplicate(o_, 0.0f, without_keys * a_.dim);
        }
        AscendC::PipeBarrier<PIPE_V>();
        all.Add(maximum, maximum, Number(kCarry));
        all.Scale(logarithm, sum, 1.0f / kDecodeLift);
        AscendC::PipeBarrier<PIPE_V>();
        all.Logarithm(logarithm, logarithm);
        if (a_.has_sinks) {
            LoadSinks(item, rows);
            TakeSink(all, maximum, sum, logarithm, Number(kSink), Number(kTop));
        }
        Spread(spread_, sum, rows);
        AscendC::PipeBarrier<PIPE_V>();
        StoreOutput(item, rows);
        outputs_.FreeTensor(o_);
        FloatTile lse = row_out_.AllocTensor<float>();
        all.Add(lse, maximum, logarithm);
        AscendC::PipeBarrier<PIPE_V>();
        if (a_.has_sinks) {
            never.Scale(lse, Number(kSink), 1.0f);
        } else {
            never.SetBits(lse, kMinusInfinityBits);
        }
        row_out_.EnQue(lse);
        lse = row_out_.DeQue<float>();
        AscendC::DataCopyExtParams p;
        p.blockCount = 1;
        p.blockLen = rows * sizeof(float);
        AscendC::DataCopyPad(lse_[FirstRow(item)], lse, p);
        row_out_.FreeTensor(lse);
    }

    DecodeTasks tasks_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> wide_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> tile_out_;
    FloatTile o_, spread_;

private:
    // Where a part's results are.
    struct Part {
        __aicore__ inline Part(const DecodeOutput& of, uint32_t group, bool last)
        {
            const DecodeWorkspace& w = of.t_.group_workspace;
            GM_ADDR at = of.workspace_ + group * w.bytes;
            const uint64_t core = 2 * last + AscendC::GetSubBlockIdx();
            const uint64_t row = last * kDecodeRows + of.skipped_;
            output.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.outputs) + row * of.a_.dim);
            state.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.states) + core * 2 * kDecodeHalf);
            frame.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + w.ends) + core * of.a_.dim);
        }
        AscendC::GlobalTensor<float> output, state;
        AscendC::GlobalTensor<half> frame;
    };

    // To kFrame: each column is 0 where it is 0 in some part.
    __aicore__ inline void FindCommonFrame(const DecodeItem& item)
    {
        uint32_t group = group_;
        do {
            LoadFrame(Columns(kMoved), Part(*this, group, group == group_).frame);
            Meet(group == group_);
        } while (tasks_.NextPart(item, group));
        TakeCommon();
    }

    __aicore__ inline void LoadSinks(const DecodeItem& item, uint32_t rows)
    {
        for (uint32_t r = 0; r < rows; ++r) {
            RowMath(r, r + 1).Set(Number(kSink), sinks_.GetValue(item.head * t_.group + (skipped_ + r) % t_.group));
        }
    }

    // O / l, l being spread.
    __aicore__ inline void StoreOutput(const DecodeItem& item, uint32_t rows)
    {
        RoundedRows rounding(a_, tile_, work_, Number(kFirst), Number(kThird), rows);
        for (uint32_t d = 0; d < a_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, a_.dim - d);
            HalfTile rounded = tile_out_.AllocTensor<half>();
            rounding.Make(rounded, o_[d], spread_, d, width, true);
            tile_out_.EnQue(rounded);
            rounded = tile_out_.DeQue<half>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = width / kFractal;
            p.dstGap = (a_.dim - width) / kFractal;
            AscendC::DataCopy(out_[FirstRow(item) * a_.dim + d], rounded, p);
            tile_out_.FreeTensor(rounded);
        }
    }

    AscendC::GlobalTensor<half> out_;
    AscendC::GlobalTensor<float> lse_, sinks_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> state_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> row_out_, outputs_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> spread_buffer_;
};

}  // namespace pasa
