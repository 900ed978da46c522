// Which rows and keys a group works on: the cube side and the vector side walk through the same tasks.
#pragma once

#include "key_blocks.h"
#include "packed_rows.h"

namespace pasa {

// One query tile.
struct LaneTask {
    uint32_t first_row = 0;  // of its sequence
    uint32_t rows = 0;   // 0: the lane idles
    uint32_t steps = 0;  // key blocks that some row sees
    // Rows that the units compute: with one row Mmad would read its operand as a plain vector, so a row has a twin.
    __aicore__ inline uint32_t Computed() const { return Largest(rows, 2); }
    // The same where each half of the tile is multiplied on its own.
    __aicore__ inline uint32_t Twinned() const { return rows == kHalfRows + 1 ? rows + 1 : Computed(); }
};

// The tiles of a group that share keys.
struct Task {
    uint32_t batch = 0;
    uint32_t head = 0;
    uint32_t kv_head = 0;  // over all batch entries
    uint32_t keys = 0;     // that exist in this batch entry, or packed sequence
    bool padding = false;  // rows behind the last packed sequence
    int64_t shift = 0;     // keys before the one that the first row is aligned with; below 0: rows before the first key
    uint64_t query_row = 0;  // the first row of the sequence, over all heads and batch entries
    uint64_t key_row = 0;    // its first key, and its first block of keys, over all KV heads and batch entries
    uint64_t key_block = 0;
    uint64_t tile = 0;       // the number of the tile, over all heads and batch entries
    uint32_t steps = 0;    // the larger of the lanes'
    uint32_t first = 0;    // the first block that is visited
    uint32_t span = 0;     // blocks from there to the last one; a mask may hide some of them
    uint64_t visits = 0;   // where the table of visits begins, if there is a mask
    uint32_t part = 0;     // of the steps of the tile, if they are cut
    uint32_t skipped = 0;  // steps before that part
    LaneTask lane[kLanes];
};

class Tasks {
public:
    __aicore__ inline Tasks(const AttentionTiling& tiling, GM_ADDR lengths, GM_ADDR visits = nullptr,
                            GM_ADDR starts = nullptr)
        : tiling_(tiling),
          visits_(tiling, visits)
    {
        if (tiling_.has_lengths) lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(lengths));
        slots_ = DivideUp(tiling_.rows, tiling_.tile_rows * tiling_.lanes);
        const uint32_t sequences = tiling_.sequences;
        if (sequences == 0) return;
        slots_ = PackedPlaces(tiling_.rows, sequences + 1);  // rows behind the last sequence have tiles, too
        queries_.Init(starts, sequences, tiling_.rows);
        keys_.Init(starts + (sequences + 1) * sizeof(int32_t), sequences, tiling_.keys);
    }

    // The group's task number `turn`; false when there is none. Long tasks are dealt first, to and fro, so that with a
    // causal mask all groups get about the same work. Packed sequences are dealt from the last to the first; the place
    // of a tile that has no rows is a task, too.
    __aicore__ inline bool Get(uint32_t turn, uint32_t group, uint32_t groups, Task& task)
    {
        return Get(turn, group, groups, tiling_.parts, task);
    }

    // The same with the keys of a tile in so many parts, each a task.
    __aicore__ inline bool Get(uint32_t turn, uint32_t group, uint32_t groups, uint32_t parts, Task& task)
    {
        const uint32_t number = turn * groups + (turn % 2 == 0 ? group : groups - 1 - group), index = number / parts;
        if (index >= slots_ * tiling_.batch * tiling_.heads) return false;
        const uint32_t head = index % (tiling_.batch * tiling_.heads);
        const uint32_t slot = slots_ - 1 - index / (tiling_.batch * tiling_.heads);
        task.batch = head / tiling_.heads;
        task.head = head;
        task.kv_head = task.batch * tiling_.kv_heads + head % tiling_.heads / (tiling_.heads / tiling_.kv_heads);
        const Span queries = FindSequence(task, slot);
        task.steps = 0;
        for (uint32_t i = 0; i < kLanes; ++i) {
            LaneTask& lane = task.lane[i];
            // where starts are wrong, a place before the first one wraps beyond all rows
            lane.first_row = ((slot - queries.place) * tiling_.lanes + i) * tiling_.tile_rows;
            const bool used = i < tiling_.lanes && lane.first_row < queries.rows;
            lane.rows = used ? Least(tiling_.tile_rows, queries.rows - lane.first_row) : 0;
            lane.steps = used ? DivideUp(Seen(task, lane.first_row + lane.rows - 1), kBlockKeys) : 0;
            task.steps = Largest(task.steps, lane.steps);
        }
        FindBlocks(task);
        if (parts > 1) Cut(task, number % parts);
        return true;
    }

    // Leave a tile's task one of the parts of its steps, which are about as long as each other.
    __aicore__ inline void Cut(Task& task, uint32_t part) const
    {
        const uint64_t steps = task.steps;
        task.part = part;
        task.skipped = static_cast<uint32_t>(steps * part / tiling_.parts);
        task.steps = static_cast<uint32_t>(steps * (part + 1) / tiling_.parts) - task.skipped;
    }

    // Return the block of a step.
    __aicore__ inline uint32_t Block(const Task& task, uint32_t step) const
    {
        const uint32_t place = task.skipped + step;
        return tiling_.has_mask ? visits_.Block(task.visits, place) : task.first + place;
    }

    // Return the rows of a half of the tile, of those before `rows`, that see a key of the block of a step.
    __aicore__ inline RowBits Seeing(const Task& task, uint32_t half, uint32_t step, uint32_t rows) const
    {
        const RowBits all = RowsBetween(0, rows);
        if (tiling_.has_mask) return visits_.Rows(task.visits, task.skipped + step, half) & all;
        const uint32_t block = Block(task, step);
        const int64_t first_key = static_cast<int64_t>(block) * kBlockKeys - task.shift;
        const int64_t row = task.lane[0].first_row + half * kHalfRows, step_rows = tiling_.token_rows;
        const int64_t begin = tiling_.causal ? (first_key - tiling_.right) * step_rows - row : 0;
        const int64_t keys = Least(kBlockKeys, task.keys - block * kBlockKeys);
        const int64_t end = tiling_.windowed ? (first_key + keys + tiling_.left) * step_rows - row : kHalfRows;
        return RowsBetween(begin, end) & all;
    }

    // Keys before the first one that a row sees, because of its window.
    __aicore__ inline uint32_t Before(const Task& task, uint32_t row) const
    {
        const int64_t before = static_cast<int64_t>(Token(row)) + task.shift - tiling_.left;
        return !tiling_.windowed || before < 0 ? 0 : static_cast<uint32_t>(before);
    }

    // Keys up to the last one that a row sees. Masks are aligned to the last query and the last key.
    __aicore__ inline uint32_t Seen(const Task& task, uint32_t row) const
    {
        if (!tiling_.causal) return task.keys;
        const int64_t seen = static_cast<int64_t>(Token(row)) + 1 + tiling_.right + task.shift;
        return seen <= 0 ? 0 : seen < task.keys ? static_cast<uint32_t>(seen) : task.keys;
    }

private:
    __aicore__ inline uint32_t Token(uint32_t row) const
    {
        return tiling_.token_rows == 1 ? row : row / tiling_.token_rows;
    }

    // The sequence that a tile belongs to: its rows, and for the task its keys and where both lie.
    __aicore__ inline Span FindSequence(Task& task, uint32_t slot)
    {
        Span queries, keys;
        queries.rows = tiling_.rows;
        keys.rows = tiling_.has_lengths ? Clamped(lengths_.GetValue(task.batch), tiling_.keys) : tiling_.keys;
        task.shift = static_cast<int64_t>(tiling_.keys) - tiling_.rows / tiling_.token_rows;
        if (tiling_.sequences > 0) {
            const uint32_t sequence = queries_.Find(slot);
            queries = queries_.Of(sequence);
            task.padding = sequence == tiling_.sequences;
            keys = task.padding ? Span() : keys_.Of(sequence);
            task.shift = static_cast<int64_t>(keys.rows) - queries.rows;
        }
        task.keys = keys.rows;
        task.query_row = static_cast<uint64_t>(task.head) * tiling_.rows + queries.first;
        task.key_row = static_cast<uint64_t>(task.kv_head) * tiling_.keys + keys.first;
        task.key_block = static_cast<uint64_t>(task.kv_head) * tiling_.blocks + keys.place;
        task.tile = static_cast<uint64_t>(task.head) * slots_ + slot;
        return queries;
    }

    // Which blocks the task visits, in the exact recovery.
    __aicore__ inline void FindBlocks(Task& task) const
    {
        task.first = 0;
        task.span = task.steps;
        if (tiling_.has_mask) {
            task.visits = visits_.Find(task.head, task.lane[0].first_row / tiling_.tile_rows);
            task.steps = visits_.Count(task.visits);
            if (task.steps > 0) task.first = visits_.Block(task.visits, 0);
            task.span = task.steps > 0 ? visits_.Block(task.visits, task.steps - 1) + 1 - task.first : 0;
        } else if (tiling_.windowed) {
            task.first = Least(Before(task, task.lane[0].first_row) / kBlockKeys, task.steps);
            task.steps -= task.first;
            task.span = task.steps;
        }
        task.lane[0].steps = tiling_.has_mask || tiling_.windowed ? task.steps : task.lane[0].steps;
    }

    const AttentionTiling& tiling_;
    Visits visits_;
    AscendC::GlobalTensor<int32_t> lengths_;
    PackedRows queries_, keys_;
    uint32_t slots_ = 0;  // tiles of a head, or pairs of them; of packed sequences, their places
};

}  // namespace pasa
