// K' of decoding: a vector core takes half of the columns of each block of keys and subtracts a frame, exactly.
#pragma once

#include "decode_task.h"
#include "head_frame.h"

namespace pasa {

// A vector core's half of the columns of the keys, less their frame.
class DecodeKeys : protected HeadFrame {
protected:
    using Row = RowMath::Row;
    // Numbers of rows.
    enum RowNumber { kMaximum, kSum, kTop, kNext, kKeep, kCarry, kRowSum, kLogarithm, kSink, kFirst, kThird, kNumbers };

    __aicore__ inline DecodeKeys(const DecodeArguments& arguments, const DecodeTiling& tiling, AscendC::TPipe& pipe)
        : HeadFrame(tiling.attention.dim, pipe),
          t_(tiling),
          a_(tiling.attention),
          group_(AscendC::GetBlockIdx() / 2),
          workspace_(arguments.workspace)
    {
        const uint32_t half_columns = RoundUp(a_.dim / 2, kFractal);
        first_column_ = AscendC::GetSubBlockIdx() * half_columns;
        width_ = Least(half_columns, a_.dim - first_column_);
        ahead_ = a_.dim <= kChunk ? 2 : 1;  // above, one buffer alone fits
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        source_.Init(tiling, arguments.k, arguments.table, tiling.k);
        const DecodeWorkspace& w = tiling.group_workspace;
        GM_ADDR at = arguments.workspace + group_ * w.bytes;
        for (uint32_t i = 0; i < 2; ++i) {
            keys_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + w.keys + i * w.keys_bytes));
        }
        frames_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + w.frames));
        pipe.InitBuffer(key_in_, ahead_, kBlockKeys * half_columns * sizeof(half));
        pipe.InitBuffer(key_out_, 1, kBlockKeys * half_columns * sizeof(half));
        pipe.InitBuffer(frame_in_, 1, a_.dim * sizeof(half));
        pipe.InitBuffer(frame_out_, 1, half_columns * sizeof(half));
        pipe.InitBuffer(query_in_, 1, kDecodeHalf * kFloats * sizeof(half));
        pipe.InitBuffer(tile_buffer_, kDecodeHalf * kBlockKeys * sizeof(float));
        pipe.InitBuffer(numbers_buffer_, kNumbers * kFloats * sizeof(float));
        pipe.InitBuffer(work_buffer_, kReduction * sizeof(float));
        tile_ = tile_buffer_.Get<float>();
        numbers_ = numbers_buffer_.Get<float>();
        work_ = work_buffer_.Get<float>();
        AscendC::Duplicate(numbers_, 0.0f, kNumbers * kFloats);  // calls on whole blocks read behind the last row
        AscendC::Duplicate(work_, 0.0f, kReduction);
    }

    __aicore__ inline Row Number(RowNumber which) const { return numbers_[which * kFloats]; }
    __aicore__ inline uint32_t KeysOf(const Segment& s, uint32_t j) const
    {
        return Least(kBlockKeys, s.item.keys - (s.block + j) * kBlockKeys);
    }
    // The row of q of this core's first row.
    __aicore__ inline uint64_t FirstRow(const DecodeItem& item) const
    {
        return (item.token * t_.q_token + item.head * t_.q_head) / a_.dim + skipped_;
    }

    // The first frame, and the first blocks.
    __aicore__ inline void BeginKeys(const Segment& s)
    {
        const uint32_t dim = a_.dim;
        HalfTile in = key_in_.AllocTensor<half>();
        for (uint32_t i = 0; i < kSamples; ++i) {
            uint32_t count = 1;
            AscendC::DataCopy(in[i * dim], source_.At(s.item, Sample(i, s.item.keys), count), dim);
        }
        key_in_.EnQue(in);
        in = key_in_.DeQue<half>();
        AscendC::Cast(tile_, in, AscendC::RoundMode::CAST_NONE, kSamples * dim);
        key_in_.FreeTensor(in);
        for (uint32_t j = 0; j < Least(s.steps, ahead_); ++j) LoadKeys(s, j);
        Begin(tile_);
        if (width_ > 0) {
            AscendC::Cast(Columns(kOwnFrame), half_row_[first_column_], AscendC::RoundMode::CAST_NONE, width_);
        }
        for (uint32_t j = 0; j < Least(s.steps, 2); ++j) TakeKeys(s, j);
    }

    // K' of this core's columns of a block to the cube core.
    __aicore__ inline void TakeKeys(const Segment& s, uint32_t j)
    {
        const uint32_t slot = j % 2, count = KeysOf(s, j);
        if (width_ > 0) {
            HalfTile in = key_in_.DeQue<half>();
            HalfTile out = key_out_.AllocTensor<half>();
            AscendC::PipeBarrier<PIPE_V>();
            FindRange(tile_.ReinterpretCast<half>(), out, in, width_, count);
            Shrink(0, width_);
            HalfTile frame = frame_out_.AllocTensor<half>();
            AscendC::Cast(frame, Columns(kOwnFrame), AscendC::RoundMode::CAST_NONE, width_);
            AscendC::PipeBarrier<PIPE_V>();
            const uint8_t stride = width_ / kFractal;
            AscendC::Sub(out, in, frame, width_, count, AscendC::BinaryRepeatParams(1, 1, 1, stride, stride, 0));
            key_in_.FreeTensor(in);
            key_out_.EnQue(out);
            out = key_out_.DeQue<half>();
            AscendC::DataCopyParams p;
            p.blockCount = count;
            p.blockLen = stride;
            p.dstGap = (a_.dim - width_) / kFractal;
            AscendC::DataCopy(keys_[slot][first_column_], out, p);
            key_out_.FreeTensor(out);
            frame_out_.EnQue(frame);
            frame = frame_out_.DeQue<half>();
            AscendC::DataCopy(frames_[j % kFrames * a_.dim + first_column_], frame, width_);
            frame_out_.FreeTensor(frame);
            if (j + ahead_ < s.steps) LoadKeys(s, j + ahead_);
        }
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kKeysReady + slot);
    }

    // What the running maxima of rows gain where block j left columns out of the frame, q.(old frame - new frame).
    __aicore__ inline void FollowFrame(const Segment& s, uint32_t j, uint32_t rows)
    {
        if (!FindMove(frames_[j % kFrames * a_.dim], false)) return;
        Carry(s.item, Number(kMaximum), rows);
        AscendC::Sub(Columns(kFrame), Columns(kFrame), Columns(kMoved), a_.dim);
    }

    // To kMoved: kFrame less the frame at `from`, or (`towards`) the reverse. Return if that is not 0.
    __aicore__ inline bool FindMove(const AscendC::GlobalTensor<half>& from, bool towards)
    {
        const FloatTile moved = Columns(kMoved), frame = Columns(kFrame);
        LoadFrame(moved, from);
        if (towards) {
            AscendC::Sub(moved, moved, frame, a_.dim);
        } else {
            AscendC::Sub(moved, frame, moved, a_.dim);
        }
        return HasMoved(work_);
    }

    // A frame as FP32, with a barrier.
    __aicore__ inline void LoadFrame(const FloatTile& to, const AscendC::GlobalTensor<half>& from)
    {
        HalfTile in = frame_in_.AllocTensor<half>();
        AscendC::DataCopy(in, from, a_.dim);
        frame_in_.EnQue(in);
        in = frame_in_.DeQue<half>();
        AscendC::Cast(to, in, AscendC::RoundMode::CAST_NONE, a_.dim);
        frame_in_.FreeTensor(in);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // maximum + q.kMoved, in nats.
    __aicore__ inline void Carry(const DecodeItem& item, const Row& maximum, uint32_t rows)
    {
        RowMath all(0, rows);
        MultiplyQueries(item, Columns(kMoved), Number(kCarry), rows);
        all.Add(maximum, maximum, Number(kCarry));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // q.x in nats for each row, x being a row of columns. It works in the score tile.
    __aicore__ inline void MultiplyQueries(const DecodeItem& item, const FloatTile& x, const Row& to, uint32_t rows)
    {
        const FloatTile product = tile_, total = tile_[kDecodeHalf * kFloats];
        const uint64_t first = FirstRow(item) * a_.dim;
        for (uint32_t c = 0; c < a_.dim; c += kFloats) {
            const uint32_t width = Least(kFloats, a_.dim - c);
            HalfTile in = query_in_.AllocTensor<half>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = width / kFractal;
            p.srcGap = (a_.dim - width) / kFractal;
            p.dstGap = (kFloats - width) / kFractal;
            AscendC::DataCopy(in, q_[first + c], p);
            query_in_.EnQue(in);
            in = query_in_.DeQue<half>();
            const FloatTile to_tile = c == 0 ? total : product;
            AscendC::Cast(to_tile, in, AscendC::RoundMode::CAST_NONE, width, rows,
                          AscendC::UnaryRepeatParams(1, 1, 8, 4));
            query_in_.FreeTensor(in);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Mul(to_tile, to_tile, x[c], width, rows, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
            AscendC::PipeBarrier<PIPE_V>();
            if (c == 0) continue;
            AscendC::Add(total, total, product, width, rows, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::ReduceRepeat<AscendC::ReduceType::SUM>(to, total, Least(kFloats, a_.dim), rows, 1, 1, 8);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(0, rows).Scale(to, to, a_.scale);
        AscendC::PipeBarrier<PIPE_V>();
    }

    const DecodeTiling& t_;
    const AttentionTiling& a_;
    uint32_t group_;
    uint32_t skipped_ = 0;  // rows of the tile before this core's
    GM_ADDR workspace_;
    AscendC::GlobalTensor<half> q_, frames_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> key_out_;
    AscendC::LocalTensor<float> tile_, work_;  // (32, 128), and what reductions of its rows need

private:
    static constexpr uint32_t kReduction = RowReduction<AscendC::ReduceType::MAX>::kWork;

    // This core's columns of a block, in pieces that lie within one page.
    __aicore__ inline void LoadKeys(const Segment& s, uint32_t j)
    {
        if (width_ == 0) return;
        const uint32_t first = (s.block + j) * kBlockKeys, total = KeysOf(s, j);
        HalfTile in = key_in_.AllocTensor<half>();
        AscendC::DataCopyParams p;
        p.blockLen = width_ / kFractal;
        p.srcGap = (source_.RowStride() - width_) / kFractal;
        for (uint32_t at = 0; at < total;) {
            uint32_t count = total - at;
            const AscendC::GlobalTensor<half> from = source_.At(s.item, first + at, count);
            p.blockCount = count;
            AscendC::DataCopy(in[at * width_], from[first_column_], p);
            at += count;
        }
        key_in_.EnQue(in);
    }

    uint32_t first_column_, width_;  // of this core
    uint32_t ahead_;                 // blocks of keys that are loaded early
    Cache source_;
    AscendC::GlobalTensor<half> keys_[2];
    AscendC::TQue<AscendC::TPosition::VECIN, 2> key_in_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> frame_in_, query_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> frame_out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> tile_buffer_, numbers_buffer_, work_buffer_;
    AscendC::LocalTensor<float> numbers_;
};

}  // namespace pasa
