// Rows of decoding on an Ascend 310P: what the kernel reads of a cache, and how it lays that out for the cube unit.
#pragma once

#include "../decode_task.h"
#include "../head_frame.h"
#include "core_rows.h"
#include "decode_products.h"

namespace pasa {

// Queries, keys and values come to UB in pieces of at most 128 rows and 128 columns, each as it lies in memory, and
// leave it as fractals.
class DecodeRows : protected CoreRows {
protected:
    __aicore__ inline DecodeRows(const DecodeArguments& arguments, const DecodeTiling& tiling, AscendC::TPipe& pipe)
        : CoreRows(tiling.attention.dim, pipe),
          t_(tiling),
          a_(tiling.attention),
          tasks_(tiling, arguments),
          frame_(tiling.attention.dim, pipe),
          products_(tiling.attention.dim, pipe),
          pipe_(pipe)
    {
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        key_source_.Init(tiling, arguments.k, arguments.table, tiling.k);
        value_source_.Init(tiling, arguments.v, arguments.table, tiling.v);
        InitTile(kFractal, pipe);
        pipe.InitBuffer(piece_in_, 2, kBlockKeys * Least(kChunk, a_.dim) * sizeof(half));
        const uint32_t leaving = a_.dim <= kChunk ? 2 : 1;  // above, one buffer alone fits
        pipe.InitBuffer(half_out_, leaving, kBlockKeys * kChunk * sizeof(half));
        pipe.InitBuffer(ones_buffer_, kChunk * sizeof(uint16_t));
        ones_ = ones_buffer_.Get<uint16_t>();
        AscendC::Duplicate(ones_, static_cast<uint16_t>(0xffff), static_cast<int32_t>(kChunk));
    }

    __aicore__ inline uint32_t Pieces() const { return DivideUp(a_.dim, kChunk); }
    __aicore__ inline uint32_t KeysOf(const Segment& s, uint32_t j) const
    {
        return Least(kBlockKeys, s.item.keys - (s.block + j) * kBlockKeys);
    }
    // The first row of q that an item has, and of the output.
    __aicore__ inline uint64_t FirstRow(const DecodeItem& item) const
    {
        return (item.token * t_.q_token + item.head * t_.q_head) / a_.dim;
    }

    // The queries of an item to L1, and zeros behind them.
    __aicore__ inline void TakeQueries(const DecodeItem& item)
    {
        const uint32_t count = item.tokens * t_.group;
        products_.queries.BeginStore();
        for (uint32_t first = 0; first < a_.dim; first += kChunk) {
            const uint32_t width = Least(kChunk, a_.dim - first);
            HalfTile in = piece_in_.AllocTensor<half>();
            LoadRows(in, q_[FirstRow(item) * a_.dim + first], count, width, a_.dim);
            piece_in_.EnQue(in);
            TakeBits(products_.queries, first, width, count);
        }
        products_.queries.EndStore();
        products_.Begin(rows_);
    }

    // The first frame of an item.
    __aicore__ inline void TakeSamples(const DecodeItem& item)
    {
        HalfTile in = piece_in_.AllocTensor<half>();
        for (uint32_t i = 0; i < kSamples; ++i) {
            uint32_t count = 1;
            AscendC::DataCopy(in[i * a_.dim], key_source_.At(item, HeadFrame::Sample(i, item.keys), count), a_.dim);
        }
        piece_in_.EnQue(in);
        in = piece_in_.DeQue<half>();
        AscendC::Cast(tile_, in, AscendC::RoundMode::CAST_NONE, kSamples * a_.dim);
        piece_in_.FreeTensor(in);
        frame_.Begin(tile_);
        AscendC::Cast(frame_.Columns(HeadFrame::kOwnFrame), frame_.half_row_, AscendC::RoundMode::CAST_NONE, a_.dim);
    }

    // Begin to load a piece of a segment: of each block first all of its keys, then its values.
    __aicore__ inline void LoadPiece(const Segment& s, uint32_t piece)
    {
        const uint32_t j = piece / (2 * Pieces()), part = piece % (2 * Pieces());
        if (j >= s.steps) return;
        Cache& source = part < Pieces() ? key_source_ : value_source_;
        const uint32_t column = part % Pieces() * kChunk, width = Least(kChunk, a_.dim - column);
        const uint32_t first = (s.block + j) * kBlockKeys, total = KeysOf(s, j);
        HalfTile in = piece_in_.AllocTensor<half>();
        for (uint32_t at = 0; at < total;) {  // what lies within a page
            uint32_t count = total - at;
            const AscendC::GlobalTensor<half> from = source.At(s.item, first + at, count);
            LoadRows(in[at * width], from[column], count, width, source.RowStride());
            at += count;
        }
        piece_in_.EnQue(in);
    }

    // K' of block j to L1. Return if columns left the frame; kMoved is how far.
    __aicore__ inline bool TakeKeys(const Segment& s, uint32_t j)
    {
        const uint32_t count = KeysOf(s, j);
        StoredTile& to = products_.keys[j % 2];
        to.BeginStore();
        for (uint32_t first = 0; first < a_.dim; first += kChunk) {
            const uint32_t width = Least(kChunk, a_.dim - first), rows = RoundUp(count, kFractal);
            HalfTile in = piece_in_.DeQue<half>(), out = half_out_.AllocTensor<half>();
            frame_.FindRange(tile_.ReinterpretCast<half>(), out, in, width, count);
            frame_.Shrink(first, width);
            FillUp(in, width, count);
            AscendC::Cast(frame_.half_row_, frame_.Columns(HeadFrame::kOwnFrame)[first],
                          AscendC::RoundMode::CAST_NONE, width);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Sub(out, in, frame_.half_row_, width, rows, ToFractals(rows, width));
            piece_in_.FreeTensor(in);
            StoreFractals(to, first, out, width, rows);
            LoadPiece(s, 2 * Pieces() * j + first / kChunk + 2);
        }
        to.EndStore();
        const FloatTile moved = frame_.Columns(HeadFrame::kMoved);
        AscendC::Sub(moved, frame_.Columns(HeadFrame::kFrame), frame_.Columns(HeadFrame::kOwnFrame), a_.dim);
        return frame_.HasMoved(work_);
    }

    // V of block j to L1.
    __aicore__ inline void TakeValues(const Segment& s, uint32_t j)
    {
        StoredTile& to = products_.values[j % 2];
        to.BeginStore();
        for (uint32_t first = 0; first < a_.dim; first += kChunk) {
            TakeBits(to, first, Least(kChunk, a_.dim - first), KeysOf(s, j));
            LoadPiece(s, 2 * Pieces() * j + Pieces() + first / kChunk + 2);
        }
        to.EndStore();
    }

    // Form the products of the queries and a row of columns, FP16 numbers.
    __aicore__ inline void MultiplyQueries(HeadFrame::Column which)
    {
        HalfTile out = half_out_.AllocTensor<half>();
        AscendC::Duplicate(out, static_cast<half>(0.0f), static_cast<int32_t>(kFractal * a_.dim));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t d = 0; d < a_.dim; d += kFloats) {
            AscendC::Cast(out[d * kFractal], frame_.Columns(which)[d], AscendC::RoundMode::CAST_NONE,
                          Least(kFloats, a_.dim - d), 1, AscendC::UnaryRepeatParams(kFractal, 1, 8, 8));
        }
        products_.row.BeginStore();
        StoreFractals(products_.row, 0, out, a_.dim, kFractal);
        products_.row.EndStore();
        products_.MakeRowProduct();
    }
    // These products in nats.
    __aicore__ inline void TakeRowProduct(const Row& to)
    {
        FloatTile c = products_.TakeRowProduct();
        CopyOut(offsets_, c, kFractal * rows_);
        products_.FreeOffsets(c);
        AscendC::PipeBarrier<PIPE_V>();
        TakeOffsets(to, 0, kFractal, a_.scale);
        AscendC::PipeBarrier<PIPE_V>();
    }

    const DecodeTiling& t_;
    const AttentionTiling& a_;
    DecodeTasks tasks_;
    HeadFrame frame_;
    DecodeProducts products_;
    AscendC::TPipe& pipe_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> piece_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 2> half_out_;  // all that leaves UB in FP16

private:
    __aicore__ inline void LoadRows(const HalfTile& to, const AscendC::GlobalTensor<half>& from, uint32_t count,
                                    uint32_t width, uint32_t stride)
    {
        AscendC::DataCopyParams p;
        p.blockCount = count;
        p.blockLen = width / kFractal;
        p.srcGap = (stride - width) / kFractal;
        AscendC::DataCopy(to, from, p);
    }

    // A piece as it is to columns of a tile, with zeros behind its last row.
    __aicore__ inline void TakeBits(StoredTile& to, uint32_t first, uint32_t width, uint32_t count)
    {
        const uint32_t rows = RoundUp(count, kFractal);
        HalfTile in = piece_in_.DeQue<half>(), out = half_out_.AllocTensor<half>();
        FillUp(in, width, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::And(out.ReinterpretCast<uint16_t>(), in.ReinterpretCast<uint16_t>(), ones_, width, rows,
                     ToFractals(rows, width));
        piece_in_.FreeTensor(in);
        StoreFractals(to, first, out, width, rows);
    }

    __aicore__ inline void FillUp(const HalfTile& in, uint32_t width, uint32_t count)
    {
        const uint32_t rest = RoundUp(count, kFractal) - count;
        if (rest == 0) return;
        AscendC::Duplicate(in[count * width], static_cast<half>(0.0f), static_cast<int32_t>(rest * width));
    }

    __aicore__ inline void StoreFractals(StoredTile& to, uint32_t first, HalfTile& out, uint32_t width, uint32_t rows)
    {
        half_out_.EnQue(out);
        out = half_out_.DeQue<half>();
        to.Store(first, out, width / kFractal, rows);
        half_out_.FreeTensor(out);
    }

    AscendC::GlobalTensor<half> q_;
    Cache key_source_, value_source_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> ones_buffer_;
    AscendC::LocalTensor<uint16_t> ones_;
};

}  // namespace pasa
