// K' for the exact recovery: each column of a block less its anchor, without rounding.
#pragma once

#include "arguments.h"
#include "key_columns.h"
#include "packed_rows.h"

namespace pasa {

// `Chip` says how K' lies in memory, and how numbers are rounded to integers.
template <typename Chip>
class ShiftExactly {
public:
    __aicore__ inline ShiftExactly(const ShiftArguments& arguments, const ShiftTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          columns_(pipe)
    {
        k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.k));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        anchors_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.anchors));
        units_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.units));
        if (t_.has_lengths) lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(arguments.lengths));
        if (t_.sequences > 0) packed_.Init(arguments.starts, t_.sequences, t_.keys);
        pipe.InitBuffer(half_in_, 1, kBlockKeys * kFloats * sizeof(half));
        pipe.InitBuffer(half_out_, 1, kBlockKeys * t_.dim * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kFloats * sizeof(half));
        pipe.InitBuffer(unit_out_, 1, kBlockBytes);
    }

    __aicore__ inline void MakeAnchors()
    {
        const uint32_t total = t_.heads * t_.blocks;
        for (uint32_t item = AscendC::GetBlockIdx(); item < total; item += AscendC::GetBlockNum()) {
            const uint32_t head = item / t_.blocks, place = item % t_.blocks;
            const Span keys = KeysOf(head, t_.sequences > 0 ? packed_.Find(place) : 0);
            const uint32_t first = (place - keys.place) * kBlockKeys;  // of the sequence; below 0 it wraps
            if (first >= keys.rows) continue;
            Shift(head, place, keys.first + first, Least(kBlockKeys, keys.rows - first), first == 0);
        }
    }

    // When all cores have made their anchors.
    __aicore__ inline void MakeFrames()
    {
        const uint32_t parts = DivideUp(t_.dim, kFloats), sequences = Largest(t_.sequences, 1);
        const uint32_t total = t_.heads * sequences * parts;
        for (uint32_t item = AscendC::GetBlockIdx(); item < total; item += AscendC::GetBlockNum()) {
            const uint32_t head = item / parts / sequences;
            StoreFrames(head, KeysOf(head, item / parts % sequences), item % parts * kFloats);
        }
    }

private:
    using Row = KeyColumns::Row;

    // Keys that a head has, of a packed sequence if there are any.
    __aicore__ inline Span KeysOf(uint32_t head, uint32_t sequence) const
    {
        if (t_.sequences > 0) return packed_.Of(sequence);
        Span keys;
        keys.rows = t_.has_lengths ? Clamped(lengths_.GetValue(head / t_.kv_heads), t_.keys) : t_.keys;
        return keys;
    }

    // The keys of the piece at a place, from a row of the head on. `begins`: they are the first of their sequence.
    __aicore__ inline void Shift(uint32_t head, uint32_t place, uint32_t row, uint32_t count, bool begins)
    {
        const uint64_t from = (static_cast<uint64_t>(head) * t_.keys + row) * t_.dim;
        AscendC::LocalTensor<half> out = half_out_.AllocTensor<half>();
        for (uint32_t first = 0; first < t_.dim; first += kFloats) {
            const uint32_t width = Least(kFloats, t_.dim - first);
            AscendC::LocalTensor<half> in = LoadRows(k_[from + first], width, count, 1);
            columns_.template TakeAnchorOff<Chip>(out[first], t_.dim, in, width, count);
            half_in_.FreeTensor(in);
            StoreAnchor(head, place, first, width, begins);
        }
        const float unit = columns_.Rounds(t_.unit, out, count * t_.dim) ? 1.0f : t_.unit;
        AscendC::Muls(out, out, ToHalf(unit), static_cast<int32_t>(count * t_.dim));
        Chip::FillUp(out, t_.dim, count);
        half_out_.EnQue(out);
        out = half_out_.DeQue<half>();
        Chip::Store(keys_[Chip::Place(t_, head, place, row)], out, t_.dim, count);
        half_out_.FreeTensor(out);
        StoreUnit(head, place, unit);
    }

    // FP16 (count, width), 64 numbers a row, of rows that are `apart` rows of the head dimension apart.
    __aicore__ inline AscendC::LocalTensor<half> LoadRows(const AscendC::GlobalTensor<half>& from, uint32_t width,
                                                          uint32_t count, uint32_t apart)
    {
        AscendC::LocalTensor<half> in = half_in_.AllocTensor<half>();
        AscendC::DataCopyParams p;
        p.blockCount = count;
        p.blockLen = width / kFractal;
        p.srcGap = (apart * t_.dim - width) / kFractal;
        p.dstGap = (kFloats - width) / kFractal;
        AscendC::DataCopy(in, from, p);
        half_in_.EnQue(in);
        return half_in_.DeQue<half>();
    }

    __aicore__ inline uint64_t AnchorRow(uint32_t head, uint32_t place, uint32_t row) const
    {
        return ((static_cast<uint64_t>(head) * t_.blocks + place) * t_.anchor_rows + row) * t_.dim;
    }

    // Of the first block also what the anchor leaves of the mean, in the second row, which StoreFrames writes for
    // others. Where blocks have a third row, all of them store it there.
    __aicore__ inline void StoreAnchor(uint32_t head, uint32_t place, uint32_t first, uint32_t width, bool begins)
    {
        RowMath math(0, width);
        StoreHalfRow(columns_.Anchor(), AnchorRow(head, place, 0) + first, width, math);
        const bool has_third = t_.anchor_rows == 3;
        if (!begins && !has_third) return;
        const Row residual = columns_.Residual(math);
        if (begins) StoreHalfRow(residual, AnchorRow(head, place, 1) + first, width, math);
        if (has_third) StoreHalfRow(residual, AnchorRow(head, place, 2) + first, width, math);
    }

    __aicore__ inline void StoreHalfRow(const Row& row, uint64_t at, uint32_t width, RowMath& math)
    {
        AscendC::LocalTensor<half> out = row_out_.AllocTensor<half>();
        math.ToHalf(out, row);
        row_out_.EnQue(out);
        out = row_out_.DeQue<half>();
        AscendC::DataCopy(anchors_[at], out, width);
        row_out_.FreeTensor(out);
    }

    __aicore__ inline void StoreUnit(uint32_t head, uint32_t place, float unit)
    {
        AscendC::LocalTensor<float> out = unit_out_.AllocTensor<float>();
        AscendC::Duplicate(out, unit, static_cast<int32_t>(kUnitCopies));
        unit_out_.EnQue(out);
        out = unit_out_.DeQue<float>();
        AscendC::DataCopy(units_[(static_cast<uint64_t>(head) * t_.blocks + place) * kUnitCopies], out, kUnitCopies);
        unit_out_.FreeTensor(out);
    }

    // f_j in place of a_j, and a_j - f_j behind it: 64 columns of all blocks but the first, whose anchor is f_1.
    __aicore__ inline void StoreFrames(uint32_t head, const Span& keys, uint32_t first)
    {
        const uint32_t width = Least(kFloats, t_.dim - first), blocks = DivideUp(keys.rows, kBlockKeys);
        if (blocks < 2) return;
        RowMath math(0, width);
        const AscendC::GlobalTensor<half> from = anchors_[AnchorRow(head, keys.place, 0) + first];
        AscendC::LocalTensor<half> in = LoadRows(from, width, 1, t_.anchor_rows);
        columns_.BeginFrames(in, math);
        half_in_.FreeTensor(in);
        for (uint32_t block = 1; block < blocks; block += kBlockKeys) {
            const uint32_t count = Least(kBlockKeys, blocks - block);
            const AscendC::GlobalTensor<half> rows = anchors_[AnchorRow(head, keys.place + block, 0) + first];
            in = LoadRows(rows, width, count, t_.anchor_rows);
            columns_.FindFrames(in, width, count);
            half_in_.FreeTensor(in);
            AscendC::LocalTensor<half> out = half_out_.AllocTensor<half>();
            columns_.TakeFrames(out, width, count);
            StoreRows(rows, out, width, count);
            out = half_out_.AllocTensor<half>();
            columns_.TakeDistances(out, width, count);
            StoreRows(rows[t_.dim], out, width, count);
        }
    }

    // One row of each block's anchors.
    __aicore__ inline void StoreRows(const AscendC::GlobalTensor<half>& to, AscendC::LocalTensor<half>& out,
                                     uint32_t width, uint32_t count)
    {
        half_out_.EnQue(out);
        out = half_out_.DeQue<half>();
        AscendC::DataCopyParams p;
        p.blockCount = count;
        p.blockLen = width / kFractal;
        p.dstGap = (t_.anchor_rows * t_.dim - width) / kFractal;
        AscendC::DataCopy(to, out, p);
        half_out_.FreeTensor(out);
    }

    const ShiftTiling& t_;
    AscendC::GlobalTensor<half> k_, keys_, anchors_;
    AscendC::GlobalTensor<float> units_;
    AscendC::GlobalTensor<int32_t> lengths_;
    PackedRows packed_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> half_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> half_out_, row_out_, unit_out_;
    KeyColumns columns_;
};

}  // namespace pasa
