// The host's side of the tiling of decoding: what fits, what is refused, how much workspace it takes.
#pragma once

#include "plan.h"

namespace pasa {

// Where q, the caches and the output lie, in numbers; kernel/arguments.h has the shapes.
struct DecodeLayout {
    uint32_t tokens = 1;      // of a sequence, if all have as many
    bool has_starts = false;  // otherwise
    uint32_t pages = 0;       // 0: the keys of a sequence lie in a row
    uint32_t slots = 0;
    uint32_t table_columns = 0;
    uint64_t q_token = 0;
    uint64_t q_head = 0;
    CacheStrides k{};
    CacheStrides v{};
};

constexpr DecodeWorkspace DecodeParts(uint32_t dim)
{
    DecodeWorkspace w{};
    w.keys_bytes = uint64_t{kBlockKeys} * dim * 2;
    w.product_bytes = uint64_t{kDecodeRows} * dim * 4;
    w.keys = 0;
    w.scores = w.keys + 2 * w.keys_bytes;
    w.weights = w.scores + 2 * kDecodeRows * kBlockKeys * 4;
    w.product = w.weights + 2 * kDecodeRows * kBlockKeys * 2;
    w.sums = w.product + 2 * w.product_bytes;
    w.frames = w.sums + 2 * kDecodeRows * kFractal * 4;
    w.outputs = RoundUp<uint64_t>(w.frames + kFrames * dim * 2, 512);
    w.states = w.outputs + 2 * w.product_bytes;
    w.ends = w.states + 2 * 2 * 2 * kDecodeHalf * 4;
    w.bytes = RoundUp<uint64_t>(w.ends + 2 * 2 * dim * 2, 512);
    return w;
}

// Bytes of the unified buffer that a vector core takes: the buffers of decode_keys.h, decode_output.h, decode_vector.h.
constexpr uint64_t DecodeUnifiedBytes(uint32_t dim)
{
    const uint64_t half_columns = RoundUp(dim / 2, kFractal), tile = kDecodeHalf * kBlockKeys;
    const uint64_t keys = (dim <= kChunk ? 3 : 2) * kBlockKeys * half_columns * 2;
    return keys + tile * (4 + 4 + 2) + kDecodeHalf * uint64_t{dim} * 4 + 2 * uint64_t{dim} + half_columns * 2 + 21248;
}

// Numbers from the first to the last of a cache.
inline uint64_t CacheNumbers(const DecodeTiling& t, const CacheStrides& s)
{
    return (t.pages - 1) * s.page + (t.attention.kv_heads - 1) * s.head + uint64_t{t.slots - 1} * s.row +
           t.attention.dim;
}

inline void CheckStrides(const char* name, const CacheStrides& s)
{
    const auto text = [name](const char* which, uint64_t value) {
        return std::string(name) + " has " + which + " " + std::to_string(value) + " numbers apart";
    };
    Require(s.row % kFractal == 0 && s.row > 0 && s.row <= 65535,
            text("keys", s.row) + ", expected a multiple of 16 up to 65535");
    Require(s.head % kFractal == 0, text("heads", s.head) + ", expected a multiple of 16");
    Require(s.page % kFractal == 0, text("pages", s.page) + ", expected a multiple of 16");
}

// What the plans of all chips share. `shape.rows` are all tokens of q, and `shape.keys` the most that a sequence has
// room for.
inline DecodeTiling PlanTokens(const AttentionTiling& attention, const Shape& shape, const DecodeLayout& layout,
                               const Settings& settings)
{
    DecodeTiling t{};
    t.attention = attention;
    t.group = shape.heads / shape.kv_heads;
    Require(t.group <= kDecodeRows, "heads=" + std::to_string(shape.heads) + " are " + std::to_string(t.group) +
                                        " for each of kv_heads=" + std::to_string(shape.kv_heads) +
                                        ", and a tile has 64 rows");
    t.tile_tokens = kDecodeRows / t.group;
    t.tokens = layout.tokens;
    t.has_starts = layout.has_starts;
    t.has_table = layout.pages > 0;
    t.pages = t.has_table ? layout.pages : t.has_starts ? 1 : shape.batch;
    t.slots = t.has_table ? layout.slots : shape.keys;
    t.table_columns = layout.table_columns;
    Require(t.slots > 0, "slots=0 must be above 0");
    Require(!t.has_table || settings.has_lengths, "a cache in pages needs lengths");
    Require(t.has_table || !t.has_starts || !settings.has_lengths, "packed sequences take no lengths: starts have them");
    Require(!t.has_table || shape.keys <= uint64_t{layout.table_columns} * layout.slots,
            "keys=" + std::to_string(shape.keys) + " do not fit into " + std::to_string(layout.table_columns) +
                " pages of " + std::to_string(layout.slots));
    t.q_token = layout.q_token;
    t.q_head = layout.q_head;
    t.k = layout.k;
    t.v = layout.v;
    CheckStrides("k", t.k);
    CheckStrides("v", t.v);
    return t;
}

inline DecodeTiling PlanDecode(const Shape& shape, const DecodeLayout& layout, const Settings& settings,
                               const Chip& chip)
{
    Require(settings.exact, "the published recovery has no kernel for decoding");
    DecodeTiling t = PlanTokens(PlanAttention(shape, settings, chip), shape, layout, settings);
    Require(DecodeUnifiedBytes(shape.dim) <= chip.unified_buffer,
            "dim=" + std::to_string(shape.dim) + " does not fit into " + chip.name);
    t.group_workspace = DecodeParts(shape.dim);
    t.attention.workspace_bytes = uint64_t{chip.cube_cores} * t.group_workspace.bytes;
    return t;
}

}  // namespace pasa
