// Which blocks of keys a group decodes: all blocks of all tiles of query rows in a line, cut into equal parts. The cube
// side and the vector side walk through the same parts.
#pragma once

#include "arguments.h"
#include "flags.h"
#include "packed_rows.h"

namespace pasa {

// Flags of decoding, in mode kGroup. Each stands for two, one behind the other, for blocks of even and odd numbers.
// Set by both vector cores on MTE3, waited for by the cube core:
constexpr uint16_t kKeysReady = 0;            // K' is in the workspace, and the frame that it is relative to
constexpr uint16_t kDecodeWeightsReady = 4;   // P is there
// Set by the cube core on FIX, waited for by both vector cores:
constexpr uint16_t kDecodeScoresReady = 2;   // S is there in FP32, and K' was read
constexpr uint16_t kDecodeProductReady = 6;  // P V and the row sums are there

// Query rows that share keys: some tokens of a sequence, with all query heads of a KV head. Row i is head i % group of
// token i / group.
struct DecodeItem {
    uint32_t sequence = 0;
    uint32_t page = 0;       // of the sequence: its batch entry, if no table says
    uint32_t first_key = 0;  // the row of the first key there
    uint32_t head = 0;    // KV head
    uint32_t token = 0;   // the first one, of all tokens of q
    uint32_t tokens = 0;
    uint32_t keys = 0;    // that the last token sees
    int64_t first_sees = 0;  // keys that the first token sees; each other one sees one more. Below 0: as many see none
    uint32_t blocks = 0;  // of keys; at least 1, so that an item without keys has a part
    uint64_t first_block = 0;  // in the line of all blocks
};

// A part of the blocks of an item.
struct Segment {
    DecodeItem item;
    uint32_t block = 0;  // the first one
    uint32_t steps = 0;  // blocks; 0: the item has no keys
    bool starts = false;  // it holds the first block of the item
    bool ends = false;    // and the last one
};

class DecodeTasks {
public:
    __aicore__ inline DecodeTasks(const DecodeTiling& tiling, const DecodeArguments& arguments)
        : t_(tiling),
          a_(tiling.attention)
    {
        if (a_.has_lengths) lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(arguments.lengths));
        if (t_.has_starts) queries_.Init(arguments.starts, a_.batch, a_.rows);
        if (HasPackedKeys()) packed_keys_.Init(arguments.starts + (a_.batch + 1) * sizeof(int32_t), a_.batch, a_.keys);
        groups_ = AscendC::GetBlockNum();
    }

    // Begin with the part of a group.
    __aicore__ inline void Begin(uint32_t group)
    {
        total_ = 0;
        for (uint32_t b = 0; b < a_.batch; ++b) {
            const uint32_t tiles = Enter(b);
            for (uint32_t tile = 0; tile < tiles; ++tile) total_ += uint64_t{a_.kv_heads} * Tile(tile);
        }
        begin_ = FirstOf(group);
        end_ = FirstOf(group + 1);
        passed_ = 0;
        sequence_ = tile_ = head_ = 0;
        tiles_ = Enter(0);
    }

    // The next segment of the group; false when there is none.
    __aicore__ inline bool Next(Segment& segment)
    {
        while (passed_ < end_) {
            if (tile_ == tiles_) {
                tile_ = 0;
                tiles_ = Enter(++sequence_);
                continue;
            }
            const uint32_t blocks = Tile(tile_);
            if (head_ == 0 && passed_ + uint64_t{a_.kv_heads} * blocks <= begin_) {  // of no head
                passed_ += uint64_t{a_.kv_heads} * blocks;
                ++tile_;
                continue;
            }
            item_.head = head_;
            item_.first_block = passed_;
            const uint64_t last = passed_ + blocks;
            const uint64_t from = passed_ < begin_ ? begin_ : passed_, to = last < end_ ? last : end_;
            passed_ = last;
            if (++head_ == a_.kv_heads) {
                head_ = 0;
                ++tile_;
            }
            if (from >= to) continue;
            segment.item = item_;
            segment.block = static_cast<uint32_t>(from - item_.first_block);
            segment.steps = item_.keys == 0 ? 0 : static_cast<uint32_t>(to - from);
            segment.starts = segment.block == 0;
            segment.ends = to == last;
            return true;
        }
        return false;
    }

    // The first block of a group in the line of all blocks.
    __aicore__ inline uint64_t FirstOf(uint32_t group) const { return total_ * group / groups_; }

    // The next group that has a part of the item.
    __aicore__ inline bool NextPart(const DecodeItem& item, uint32_t& group) const
    {
        const uint64_t end = item.first_block + item.blocks;
        do ++group;
        while (FirstOf(group) == FirstOf(group + 1) && FirstOf(group) < end);
        return FirstOf(group) < end;
    }

    // How many of the `rows` rows of an item behind the first `skipped` ones see no key; they are the first of these.
    __aicore__ inline uint32_t RowsWithoutKeys(const DecodeItem& item, uint32_t skipped, uint32_t rows) const
    {
        if (item.keys == 0) return rows;
        if (!a_.causal || item.first_sees > 0) return 0;
        const int64_t none = (1 - item.first_sees) * t_.group - skipped;
        return none <= 0 ? 0 : static_cast<uint32_t>(none < rows ? none : rows);
    }

private:
    // Return if the keys of all sequences lie one behind another.
    __aicore__ inline bool HasPackedKeys() const { return t_.has_starts && !t_.has_table; }

    // The tiles of a sequence.
    __aicore__ inline uint32_t Enter(uint32_t sequence)
    {
        item_.sequence = sequence;
        item_.page = HasPackedKeys() ? 0 : sequence;
        first_token_ = sequence * t_.tokens;
        tokens_ = t_.tokens;
        if (t_.has_starts) {
            const Span tokens = queries_.Of(sequence);
            first_token_ = tokens.first;
            tokens_ = tokens.rows;
        }
        keys_ = a_.has_lengths ? Clamped(lengths_.GetValue(sequence), a_.keys) : a_.keys;
        if (HasPackedKeys()) {
            const Span keys = packed_keys_.Of(sequence);
            item_.first_key = keys.first;
            keys_ = keys.rows;
        }
        // the mask is aligned to the last token and the last key: of each sequence, or of all as if they were as long
        shift_ = static_cast<int64_t>(t_.has_table || t_.has_starts ? keys_ : a_.keys) - tokens_;
        return DivideUp(tokens_, t_.tile_tokens);
    }

    // A tile of the sequence; how many blocks of keys it sees.
    __aicore__ inline uint32_t Tile(uint32_t tile)
    {
        const uint32_t first = tile * t_.tile_tokens;
        item_.token = first_token_ + first;
        item_.tokens = Least(t_.tile_tokens, tokens_ - first);
        item_.first_sees = a_.causal ? first + 1 + shift_ : keys_;
        const int64_t last = a_.causal ? item_.first_sees + item_.tokens - 1 : item_.first_sees;
        item_.keys = last <= 0 ? 0 : last < keys_ ? static_cast<uint32_t>(last) : keys_;
        item_.blocks = Largest(DivideUp(item_.keys, kBlockKeys), 1);
        return item_.blocks;
    }

    const DecodeTiling& t_;
    const AttentionTiling& a_;
    AscendC::GlobalTensor<int32_t> lengths_;
    PackedRows queries_, packed_keys_;
    DecodeItem item_;
    uint32_t groups_ = 1;
    uint64_t total_ = 0, begin_ = 0, end_ = 0, passed_ = 0;  // blocks in line
    uint32_t sequence_ = 0, tile_ = 0, tiles_ = 0, head_ = 0;
    uint32_t first_token_ = 0, tokens_ = 0, keys_ = 0;  // of the sequence
    int64_t shift_ = 0;  // keys that its first token sees, less one
};

// Where the keys or values of a sequence lie: in pages, or in a row as if in one page, which packed sequences share.
class Cache {
public:
    __aicore__ inline void Init(const DecodeTiling& tiling, GM_ADDR cache, GM_ADDR table, const CacheStrides& strides)
    {
        slots_ = tiling.slots;
        columns_ = tiling.has_table ? tiling.table_columns : 0;
        pages_ = tiling.pages;
        strides_ = strides;
        cache_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(cache));
        if (columns_ > 0) table_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(table));
    }

    // The row of a key, and how many of the next rows, at most `count`, are in the same page. A page number that is not
    // in the cache is taken for the nearest one: nothing beyond the cache is read.
    __aicore__ inline AscendC::GlobalTensor<half> At(const DecodeItem& item, uint32_t key, uint32_t& count)
    {
        const uint32_t row = item.first_key + key, index = row / slots_, slot = row % slots_;
        uint32_t page = item.page;
        if (columns_ > 0) {
            page = Clamped(table_.GetValue(uint64_t{item.sequence} * columns_ + index), pages_ - 1);
        }
        count = Least(count, slots_ - slot);
        return cache_[page * strides_.page + item.head * strides_.head + uint64_t{slot} * strides_.row];
    }
    __aicore__ inline uint32_t RowStride() const { return strides_.row; }

private:
    uint32_t slots_ = 1, columns_ = 0, pages_ = 1;
    CacheStrides strides_;
    AscendC::GlobalTensor<half> cache_;
    AscendC::GlobalTensor<int32_t> table_;
};

}  // namespace pasa
