// Where the sequences of packed rows lie, one behind another, and which pieces of 128 rows they are cut into: query
// tiles, or blocks of keys.
#pragma once

#include "port.h"

namespace pasa {

static_assert(kTileRows == kBlockKeys, "queries and keys are cut into pieces of as many rows");

// The rows of a sequence.
struct Span {
    uint32_t first = 0;  // row
    uint32_t rows = 0;
    uint32_t place = 0;  // the place of the first piece
};

// The pieces of sequence s have the places from starts[s] / 128 + s on. A sequence of n rows has at most
// (starts[s] % 128 + n) / 128 + 1 pieces, so no two sequences share a place, and the host can say how many places there
// are without knowing a length (PackedPlaces). Some places have no rows. Lengths that decrease or end behind the last
// row give nonsense, but no row that does not exist.
class PackedRows {
public:
    __aicore__ inline void Init(GM_ADDR starts, uint32_t sequences, uint32_t rows)
    {
        starts_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(starts));
        sequences_ = sequences;
        rows_ = rows;
    }

    // The rows of a sequence; of the one behind the last, those that belong to none.
    __aicore__ inline Span Of(uint32_t sequence) const
    {
        Span span;
        span.first = First(sequence);
        const uint32_t end = sequence < sequences_ ? First(sequence + 1) : rows_;
        span.rows = end > span.first ? end - span.first : 0;
        span.place = Place(sequence);
        return span;
    }

    // The sequence that has a place.
    __aicore__ inline uint32_t Find(uint32_t place) const
    {
        uint32_t sequence = 0, behind = sequences_ + 1;
        while (behind - sequence > 1) {
            const uint32_t middle = (sequence + behind) / 2;
            if (Place(middle) <= place) {
                sequence = middle;
            } else {
                behind = middle;
            }
        }
        return sequence;
    }

private:
    __aicore__ inline uint32_t First(uint32_t sequence) const { return Clamped(starts_.GetValue(sequence), rows_); }
    __aicore__ inline uint32_t Place(uint32_t sequence) const { return First(sequence) / kTileRows + sequence; }

    AscendC::GlobalTensor<int32_t> starts_;
    uint32_t sequences_ = 0, rows_ = 0;
};

}  // namespace pasa
