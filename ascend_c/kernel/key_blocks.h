// Which key blocks a query tile visits, and which of its rows see a key of each: by causal masks, windows, lengths, and
// the table of a mask.
#pragma once

#include "port.h"

namespace pasa {

// The rows of a vector core as bits, the first row lowest.
using RowBits = uint64_t;

// Return the bits of rows from `first` on, before `last`; both may lie outside the 64 rows.
__aicore__ inline RowBits RowsBetween(int64_t first, int64_t last)
{
    const uint32_t begin = first < 0 ? 0 : first > kHalfRows ? kHalfRows : static_cast<uint32_t>(first);
    const uint32_t end = last < begin ? begin : last > kHalfRows ? kHalfRows : static_cast<uint32_t>(last);
    const RowBits below = end == kHalfRows ? ~RowBits{0} : (RowBits{1} << end) - 1;
    return begin == kHalfRows ? 0 : below >> begin << begin;
}

// The table of a mask has one entry for each block that a tile visits, in order: the block, and the bits of the rows of
// each half of the tile (of a 310P's tile of 64 rows, all of it) that see a key of it. The number of these entries
// comes before them.
class Visits {
public:
    __aicore__ inline Visits(const AttentionTiling& tiling, GM_ADDR table) : t_(tiling)
    {
        if (t_.has_mask) table_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(table));
    }

    // Return where the table of a tile begins. `head` counts over all batch entries.
    __aicore__ inline uint64_t Find(uint32_t head, uint32_t tile) const
    {
        const uint64_t batch = t_.mask.batches == 1 ? 0 : head / t_.heads;
        const uint64_t entry = batch * t_.mask.heads + (t_.mask.heads == 1 ? 0 : head % t_.heads);
        return (entry * DivideUp(t_.rows, t_.tile_rows) + tile) * (t_.blocks + 1) * Words();
    }
    __aicore__ inline uint32_t Count(uint64_t at) const { return static_cast<uint32_t>(table_.GetValue(at)); }
    __aicore__ inline uint32_t Block(uint64_t at, uint32_t step) const
    {
        return static_cast<uint32_t>(table_.GetValue(at + (step + 1) * Words()));
    }
    __aicore__ inline RowBits Rows(uint64_t at, uint32_t step, uint32_t half) const
    {
        return static_cast<RowBits>(table_.GetValue(at + (step + 1) * Words() + 1 + half));
    }

private:
    __aicore__ inline uint64_t Words() const { return VisitWords(t_.tile_rows); }

    const AttentionTiling& t_;
    AscendC::GlobalTensor<int64_t> table_;
};

}  // namespace pasa
