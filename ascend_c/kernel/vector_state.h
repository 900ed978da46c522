// The state of a vector core: its buffers, numbers of its rows, and the keys that those rows see.
#pragma once

#include "arguments.h"
#include "flags.h"
#include "rows.h"
#include "task.h"

namespace pasa {

class VectorState {
protected:
    using Row = AscendC::LocalTensor<float>;
    using HalfTile = AscendC::LocalTensor<half>;
    using FloatTile = AscendC::LocalTensor<float>;

    // Numbers of rows. Those of a lane come first, once for each lane. The exact recovery has one lane, and its last
    // two are those of blocks with an even and an odd number.
    enum LaneRow { kMaximum, kSum, kFrame, kOffset, kRaised, kLaneRows };
    enum SharedRow {
        kTop = kLanes * kLaneRows, kHere, kLarger, kKeep, kRowSum, kFirst, kSecond, kThird, kNext, kFactor, kPaperRows,
        kRho = kPaperRows, kHigh, kRest, kDistance, kGuess, kRows,  // exact only
        kGap = kHere, kAhead = kRowSum, kReached = kKeep,  // before weights are made
        kCarried = kThird,
        kBest = kLaneRows + kFrame  // exact: the largest score so far, in the place of a second lane's frame
    };

    static __aicore__ inline uint64_t Group() { return AscendC::GetBlockIdx() / 2; }

    __aicore__ inline Row Number(uint32_t shared) const { return values_[shared * kHalfRows]; }
    __aicore__ inline Row Number(uint32_t lane, LaneRow row) const
    {
        return values_[(lane * kLaneRows + row) * kHalfRows];
    }
    // Exact: q.f_j in nats of a block with an even or an odd number, in the place of a second lane.
    __aicore__ inline Row Framed(uint32_t slot) const { return Number(1, slot == 0 ? kMaximum : kSum); }
    __aicore__ inline FloatTile Output(uint32_t lane)
    {
        return output_buffer_.Get<float>()[lane * kHalfRows * t_.dim];
    }
    // How many of this core's rows there are, of so many in the tile.
    __aicore__ inline uint32_t OwnRows(uint32_t rows) const
    {
        return rows <= skipped_ ? 0 : Least(kHalfRows, rows - skipped_);
    }
    // Return how many of this core's first rows see no key of block j.
    __aicore__ inline uint32_t RowsWithoutKeys(const Task& task, const LaneTask& lane, uint32_t j, uint32_t rows) const
    {
        if (task.keys <= j * kBlockKeys) return rows;
        return RowsBefore(task, lane, j * kBlockKeys, rows);
    }

    // How many of this core's first rows see at most so many keys, because of the causal mask.
    __aicore__ inline uint32_t RowsBefore(const Task& task, const LaneTask& lane, uint32_t keys, uint32_t rows) const
    {
        if (!t_.causal) return 0;
        const int64_t first = static_cast<int64_t>(keys) - task.shift - t_.right - (lane.first_row + skipped_);
        return first <= 0 ? 0 : static_cast<uint32_t>(first < rows ? first : rows);
    }

    __aicore__ inline VectorState(const Arguments& arguments, const AttentionTiling& tiling, bool exact,
                                  AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tiling, arguments.lengths, arguments.visits, arguments.starts),
          skipped_(AscendC::GetSubBlockIdx() * kHalfRows)
    {
        if (exact) units_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.units));
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.out));
        lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.lse));
        if (tiling.has_largest) largest_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.largest));
        if (tiling.has_counts) given_counts_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.counts));
        if (tiling.has_mask) mask_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(arguments.mask));
        if (tiling.adds_mask) bias_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.mask));
        if (tiling.has_sinks) sinks_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.sinks));
        for (uint32_t i = 0; i < kLanes; ++i) {
            GM_ADDR at = arguments.workspace + (Group() * kLanes + i) * tiling.lane.bytes;
            const uint64_t tile = static_cast<uint64_t>(skipped_) * kBlockKeys;
            scores_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.scores) + tile);
            wide_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.wide) + tile);
            weights_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.weights) + tile);
            product_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.product) +
                                        skipped_ * tiling.dim);
            sums_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.sums) + skipped_ * kFractal);
            reference_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.reference) +
                                          skipped_ * kFractal);
            verdict_[i].SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at + tiling.lane.verdict) +
                                        AscendC::GetSubBlockIdx() * kVerdictWords);
            offsets_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.offsets) + skipped_);
        }
        InitBuffers(exact, pipe);
    }

    __aicore__ inline uint32_t KeysOf(const Task& task, uint32_t j) const
    {
        return Least(kBlockKeys, task.keys - j * kBlockKeys);
    }

    // Scores that a row does not see become kHidden: keys that do not exist, those beside a causal mask's or a window's
    // edges, and those that a mask of bits hides.
    __aicore__ inline void Hide(const Task& task, uint32_t i, uint32_t j, uint32_t rows, const FloatTile& tile)
    {
        const uint32_t count = KeysOf(task, j);
        const uint32_t without_keys = RowsBefore(task, task.lane[i], j * kBlockKeys, rows);
        const uint32_t partial = RowsBefore(task, task.lane[i], j * kBlockKeys + count - 1, rows);  // later rows see all
        if (partial > 0 || count < kBlockKeys) {
            AscendC::PipeBarrier<PIPE_V>();
            if (without_keys > 0) HideColumns(tile, 0, without_keys, kHidden);
            for (uint32_t r = without_keys; r < partial; ++r) {
                const uint32_t seen = tasks_.Seen(task, task.lane[i].first_row + skipped_ + r) - j * kBlockKeys;
                HideColumns(tile[r * kBlockKeys], seen, 1, kHidden);
            }
            if (partial < rows) HideColumns(tile[partial * kBlockKeys], count, rows - partial, kHidden);
            AscendC::PipeBarrier<PIPE_V>();
        }
        if (t_.windowed) HideBeforeWindow(task, j, rows, tile);
        if (HidesByBits()) HideMasked(rows, tile);  // reads all columns, so those behind the last key have to be there
    }

    // Keys to the left of the windows of rows. Other rows' windows begin before the block.
    __aicore__ inline void HideBeforeWindow(const Task& task, uint32_t j, uint32_t rows, const FloatTile& tile)
    {
        const uint32_t first_row = task.lane[0].first_row + skipped_, first_key = j * kBlockKeys;
        if (tasks_.Before(task, first_row + rows - 1) <= first_key) return;
        for (uint32_t r = 0; r < rows; ++r) {
            const uint32_t before = tasks_.Before(task, first_row + r);
            if (before <= first_key) continue;
            HideColumnsBefore(tile[r * kBlockKeys], Least(before - first_key, kBlockKeys), kHidden);
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Return if a mask hides keys by its bits; others are added to scores.
    __aicore__ inline bool HidesByBits() const { return t_.has_mask && !t_.adds_mask; }

    // The tile's part of a mask of bytes on its way. Its place is that of FP16 scores, which have to be taken before.
    __aicore__ inline void LoadMask(const Task& task, uint32_t j, uint32_t rows)
    {
        AscendC::LocalTensor<uint8_t> bytes = narrow_in_.AllocTensor<uint8_t>();
        LoadMaskTile(bytes, mask_, task, j, rows);
        narrow_in_.EnQue(bytes);
    }

    // The elements of a tile, in rows of 128. Where all rows share them, there is one.
    template <typename T>
    __aicore__ inline void LoadMaskTile(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& mask,
                                        const Task& task, uint32_t j, uint32_t rows)
    {
        const uint32_t own = OwnRows(task.lane[0].rows), count = KeysOf(task, j);
        uint64_t at = (task.lane[0].first_row + skipped_) * t_.mask.row_stride + j * kBlockKeys;
        at += task.head % t_.heads * t_.mask.head_stride;
        at += task.batch * t_.mask.batch_stride;
        LoadMaskRows(to, mask[at], t_.mask.row_stride == 0 ? 1 : own, count);
        if (rows > own && t_.mask.row_stride > 0) {  // one row, which is computed twice
            LoadMaskRows(to[kBlockKeys], mask[at], 1, count);
        }
    }

    template <typename T>
    __aicore__ inline void LoadMaskRows(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from,
                                        uint32_t rows, uint32_t count)
    {
        const uint32_t bytes = count * sizeof(T);
        AscendC::DataCopyExtParams p;
        p.blockCount = rows;
        p.blockLen = bytes;
        p.srcStride = rows > 1 ? t_.mask.row_stride * sizeof(T) - bytes : 0;
        p.dstStride = (kBlockKeys * sizeof(T) - RoundUp(bytes, kBlockBytes)) / kBlockBytes;
        AscendC::DataCopyPad(to, from, p, AscendC::DataCopyPadExtParams<T>(false, 0, 0, 0));
    }

    // The part of a mask of numbers for the tile of step j on its way: a tile ahead if it has a buffer of its own, and
    // otherwise in the place of FP32 scores, which have to be taken before.
    __aicore__ inline void LoadAddedMask(const Task& task, uint32_t j, uint32_t rows)
    {
        FloatTile bias = AddedMasks().AllocTensor<float>();
        LoadMaskTile(bias, bias_, task, tasks_.Block(task, j), rows);
        AddedMasks().EnQue(bias);
    }

    // score_tile_, in nats, with its part of a mask added. Nothing is behind the last key, which a maximum may not
    // find: it becomes kNothing.
    __aicore__ inline void AddMask(const Task& task, uint32_t j, uint32_t rows)
    {
        const uint32_t count = KeysOf(task, tasks_.Block(task, j)), stride = t_.mask.row_stride == 0 ? 0 : kTileBlocks;
        if (!t_.mask_ahead) LoadAddedMask(task, j, rows);
        FloatTile bias = AddedMasks().DeQue<float>();
        for (uint32_t c = 0; c < count; c += kFloats) {
            AscendC::Add(score_tile_[c], score_tile_[c], bias[c], Least(kFloats, count - c), rows,
                         AscendC::BinaryRepeatParams(1, 1, 1, kTileBlocks, kTileBlocks, stride));
        }
        if (count < kBlockKeys) {
            HideColumns(score_tile_, count, rows, kNothing);
        }
        AscendC::PipeBarrier<PIPE_V>();
        AddedMasks().FreeTensor(bias);
        if (t_.mask_ahead && j + 1 < task.steps) {
            LoadAddedMask(task, j + 1, rows);
        }
    }

    // The loaded part of the mask as bits, sixteen rows at a time.
    __aicore__ inline void TakeMask(const Task& task, uint32_t j, uint32_t rows)
    {
        constexpr uint32_t part = 16;
        const uint32_t count = KeysOf(task, j), stride = t_.mask.row_stride == 0 ? 0 : kBlockKeys;
        AscendC::LocalTensor<uint8_t> bytes = narrow_in_.DeQue<uint8_t>(), bits = mask_bits_buffer_.Get<uint8_t>();
        const HalfTile numbers = work_.ReinterpretCast<half>();
        for (uint32_t first = 0; first < rows; first += part) {
            const uint32_t here = Least(part, rows - first);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Cast(numbers, bytes[first * stride], AscendC::RoundMode::CAST_NONE, count, here,
                          AscendC::UnaryRepeatParams(1, 1, 8, stride / kBlockBytes));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Compares(bits[first * kBlockKeys / 8], numbers, static_cast<half>(0.0f), AscendC::CMPMODE::NE,
                              here * kBlockKeys);
        }
        narrow_in_.FreeTensor(bytes);
    }

    // Where a mask that is added hides keys, as bits.
    __aicore__ inline void TakeAddedMask(const Task& task, uint32_t j, uint32_t rows)
    {
        const uint32_t count = KeysOf(task, j);
        FloatTile bias = wide_in_.AllocTensor<float>();
        LoadMaskTile(bias, bias_, task, j, rows);
        for (uint32_t r = 1; r < rows && t_.mask.row_stride == 0; ++r) {
            LoadMaskTile(bias[r * kBlockKeys], bias_, task, j, rows);
        }
        wide_in_.EnQue(bias);
        bias = wide_in_.DeQue<float>();
        if (count < kBlockKeys) {
            HideColumns(bias, count, rows, 0.0f);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Compares(mask_bits_buffer_.Get<uint8_t>(), bias, kNothing, AscendC::CMPMODE::GE, rows * kBlockKeys);
        wide_in_.FreeTensor(bias);
    }

    __aicore__ inline void HideMasked(uint32_t rows, const FloatTile& tile)
    {
        AscendC::Select(tile, mask_bits_buffer_.Get<uint8_t>(), tile, kHidden,
                        AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, kFloats, 2 * rows, AscendC::BinaryRepeatParams());
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline uint64_t FirstRow(const Task& task, const LaneTask& lane) const
    {
        return task.query_row + lane.first_row + skipped_;
    }

    const AttentionTiling& t_;
    Tasks tasks_;
    uint32_t skipped_;      // rows of a tile before this core's
    float factor_[kLanes];  // exact: from units of a block's tile to nats
    AscendC::GlobalTensor<half> out_;
    AscendC::GlobalTensor<uint8_t> mask_;
    AscendC::GlobalTensor<float> bias_, given_counts_, lse_, largest_, units_, sinks_;
    AscendC::GlobalTensor<half> scores_[kLanes], weights_[kLanes], reference_[kLanes];
    AscendC::GlobalTensor<float> wide_[kLanes], product_[kLanes], sums_[kLanes], offsets_[kLanes];
    AscendC::GlobalTensor<int32_t> verdict_[kLanes];
    AscendC::TQue<AscendC::TPosition::VECIN, 1> narrow_in_, wide_in_, bias_in_, offset_in_, sums_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> tile_out_, row_out_, reference_out_, verdict_out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> scores_buffer_, output_buffer_, rows_buffer_, spread_buffer_,
        half_row_buffer_, work_buffer_, mean_work_buffer_, mask_bits_buffer_,
        counts_buffer_;
    AscendC::LocalTensor<float> values_, score_tile_, spread_, work_, mean_work_;

private:
    __aicore__ inline AscendC::TQue<AscendC::TPosition::VECIN, 1>& AddedMasks()
    {
        return t_.mask_ahead ? bias_in_ : wide_in_;
    }

    static constexpr uint32_t kReduction = RowReduction<AscendC::ReduceType::MAX>::kWork;

    __aicore__ inline void InitBuffers(bool exact, AscendC::TPipe& pipe)
    {
        pipe.InitBuffer(narrow_in_, 1, kHalfRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(wide_in_, 1, kHalfRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(tile_out_, 1, kHalfRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kHalfRows * sizeof(float));
        pipe.InitBuffer(scores_buffer_, kHalfRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(output_buffer_, t_.lanes * kHalfRows * t_.dim * sizeof(float));
        const uint32_t numbers = (exact ? kRows : kPaperRows) * kHalfRows;
        pipe.InitBuffer(rows_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(spread_buffer_, kHalfRows * kBlockBytes);
        pipe.InitBuffer(half_row_buffer_, kHalfRows * sizeof(half));
        pipe.InitBuffer(work_buffer_, kReduction * sizeof(float));
        if (exact) {
            pipe.InitBuffer(offset_in_, 1, 3 * kHalfRows * sizeof(float) + kBlockBytes);
            pipe.InitBuffer(mask_bits_buffer_, kHalfRows * kBlockKeys / 8);
            if (t_.mask_ahead) pipe.InitBuffer(bias_in_, 1, kHalfRows * kBlockKeys * sizeof(float));
            if (t_.has_counts) pipe.InitBuffer(counts_buffer_, kCountRows * kHalfRows * sizeof(float));
            pipe.InitBuffer(sums_in_, 1, kHalfRows * kFractal * sizeof(float));
            pipe.InitBuffer(reference_out_, 1, kHalfRows * kFractal * sizeof(half));
            pipe.InitBuffer(verdict_out_, 1, kVerdictWords * sizeof(int32_t));
        } else {
            pipe.InitBuffer(mean_work_buffer_, kReduction * sizeof(float));
            mean_work_ = mean_work_buffer_.Get<float>();
            AscendC::Duplicate(mean_work_, 0.0f, kReduction);
        }
        values_ = rows_buffer_.Get<float>();
        score_tile_ = scores_buffer_.Get<float>();
        spread_ = spread_buffer_.Get<float>();
        work_ = work_buffer_.Get<float>();
        AscendC::Duplicate(values_, 0.0f, numbers);  // calls that take whole blocks read behind the last row
        AscendC::Duplicate(work_, 0.0f, kReduction);
        AscendC::Duplicate(half_row_buffer_.Get<half>(), static_cast<half>(0.0f), kHalfRows);
        AscendC::PipeBarrier<PIPE_V>();
    }
};

}  // namespace pasa
