// What a call's score tiles hold, counted on request: largest scores before and after shifting, FP16 overflow, and
// tiles that are kept in FP32 or flushed (ops/attention/spec/diagnostics.py).
#pragma once

#include "exact_rows.h"

namespace pasa {

// FP16 rounds numbers above the first to 65504, and numbers from 65520 on, which come behind the second, to infinity.
constexpr float kBelowLargest = 65488.0f, kBelowInfinity = 65520.0f - 0x1p-8f;

class CountedRows : protected ExactRows {
protected:
    using ExactRows::ExactRows;

    __aicore__ inline void BeginCounts()
    {
        counts_ = counts_buffer_.Get<float>();
        AscendC::Duplicate(counts_, 0.0f, static_cast<int32_t>(kCountRows * kHalfRows));
    }

    // The tile of step j, which is in the workspace in FP32 (`wide`: and stays so), and what was decided of it.
    __aicore__ inline void CountScores(const Task& task, uint32_t j, uint32_t rows, RowBits seeing, bool wide,
                                       bool flushed)
    {
        const uint32_t slot = j % 2;
        RowMath rows_of_tile(seeing), first(0, 1);
        const Row above = Number(kFirst), below = Number(kDistance), most = Number(kKeep);
        if (seeing != 0) {
            first.Lower(Count(kTiles), Count(kTiles), -1.0f);
            if (wide) first.Lower(Count(kRescued), Count(kRescued), -1.0f);
            if (flushed) first.Lower(Count(kFlushed), Count(kFlushed), -1.0f);
        }
        if (t_.adds_mask) TakeAddedMask(task, tasks_.Block(task, j), rows);
        FindMost(task, j, rows, 1.0f, above);
        FindMost(task, j, rows, -1.0f, below);
        rows_of_tile.Larger(most, above, below);
        AscendC::PipeBarrier<PIPE_V>();
        rows_of_tile.Scale(above, above, factor_[slot]);
        rows_of_tile.Scale(below, below, factor_[slot]);
        AscendC::PipeBarrier<PIPE_V>();
        if (!wide) rows_of_tile.ToHalf(work_.ReinterpretCast<half>(), most);
        rows_of_tile.Add(above, above, Number(slot, kOffset));
        rows_of_tile.Subtract(below, below, Number(slot, kOffset));
        AscendC::PipeBarrier<PIPE_V>();
        if (!wide) {
            rows_of_tile.ToFloat(most, work_.ReinterpretCast<half>());
        }
        rows_of_tile.Add(above, above, Number(0, kFrame));
        rows_of_tile.Subtract(below, below, Number(0, kFrame));
        AscendC::PipeBarrier<PIPE_V>();
        rows_of_tile.Larger(Count(kMostAfter), Count(kMostAfter), most);
        rows_of_tile.Larger(Count(kMostBefore), Count(kMostBefore), above);
        AscendC::PipeBarrier<PIPE_V>();
        rows_of_tile.Larger(Count(kMostBefore), Count(kMostBefore), below);
        for (uint32_t sign = 0; sign < 2 && !wide; ++sign) {
            CountAbove(task, j, rows, sign == 0 ? 1.0f : -1.0f, kBelowLargest, Count(kSaturated));
            if (t_.saturates) continue;
            CountAbove(task, j, rows, sign == 0 ? 1.0f : -1.0f, kBelowInfinity, Count(kNotFinite));
        }
    }

    // Counts of rows, one kind after another. What FP16 stored as infinity is not 65504.
    __aicore__ inline void StoreCounts(const Task& task, uint32_t rows)
    {
        const uint64_t all = static_cast<uint64_t>(t_.batch) * t_.heads * t_.rows;
        RowMath(0, rows).Subtract(Count(kSaturated), Count(kSaturated), Count(kNotFinite));
        for (uint32_t kind = 0; kind < kCountRows; ++kind) {
            AscendC::LocalTensor<float> numbers = row_out_.AllocTensor<float>();
            RowMath(0, rows).Scale(numbers, Count(kind), 1.0f);
            StoreRow(given_counts_[kind * all + FirstRow(task, task.lane[0])], numbers, rows);
        }
    }

private:
    // As in spec/diagnostics.py, FIELDS. Numbers of tiles stand in the first row of each vector core.
    enum CountRow { kMostBefore, kMostAfter, kNotFinite, kSaturated, kRescued, kFlushed, kTiles };

    __aicore__ inline Row Count(uint32_t kind) const { return counts_[kind * kHalfRows]; }

    // The tile of step j times a sign, with kHidden in the place of scores that a row does not see; to be freed.
    __aicore__ inline FloatTile LoadVisible(const Task& task, uint32_t j, uint32_t rows, float sign)
    {
        FloatTile tile = wide_in_.AllocTensor<float>();
        AscendC::DataCopy(tile, wide_[j % 2], rows * kBlockKeys);
        wide_in_.EnQue(tile);
        tile = wide_in_.DeQue<float>();
        const uint32_t block = tasks_.Block(task, j), count = KeysOf(task, block);
        if (count < kBlockKeys) {  // there is nothing behind
            HideColumns(tile, count, rows, 0.0f);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Muls(tile, tile, sign, rows * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        Hide(task, 0, block, rows, tile);
        if (t_.adds_mask) HideMasked(rows, tile);
        return tile;
    }

    // The largest of each row.
    __aicore__ inline void FindMost(const Task& task, uint32_t j, uint32_t rows, float sign, const Row& to)
    {
        FloatTile tile = LoadVisible(task, j, rows, sign);
        Reduce<AscendC::ReduceType::MAX>(tile, rows, to);
        wide_in_.FreeTensor(tile);
    }

    // How many of each row are above a number between 2^15 and 2^16, where FP32's spacing is 2^-8, are added to `to`.
    __aicore__ inline void CountAbove(const Task& task, uint32_t j, uint32_t rows, float sign, float above,
                                      const Row& to)
    {
        const int32_t numbers = rows * kBlockKeys;
        FloatTile tile = LoadVisible(task, j, rows, sign);
        AscendC::Adds(tile, tile, -above, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(tile, tile, 0x1p8f, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(tile, tile, 0.0f, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(tile, tile, 1.0f, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        Reduce<AscendC::ReduceType::SUM>(tile, rows, Number(kFirst));
        wide_in_.FreeTensor(tile);
        RowMath(0, rows).Add(to, to, Number(kFirst));
    }

    template <AscendC::ReduceType kType>
    __aicore__ inline void Reduce(const FloatTile& tile, uint32_t rows, const Row& to)
    {
        RowReduction<kType> reduction(work_, rows);
        reduction.Blocks(tile);
        AscendC::PipeBarrier<PIPE_V>();
        reduction.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        reduction.Finish(to);
        AscendC::PipeBarrier<PIPE_V>();
    }

    AscendC::LocalTensor<float> counts_;
};

}  // namespace pasa
