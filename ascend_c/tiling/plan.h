// The host's side of tiling: what fits, what is refused, how much workspace it takes. Pure C++17, tested on the CPU.
#pragma once

#include <cmath>
#include <stdexcept>
#include <string>

#include "tiling.h"

namespace pasa {

constexpr uint64_t kKiB = 1024;

// What of a chip decides on tiles: cores, and bytes a core may use (the vendor's documents; 256 bytes of UB and L1 are
// reserved in mixed kernels, and 8 KiB of UB without the compiler option --cce-disable-asc-reserved-ubuf).
struct Chip {
    const char* name;
    uint32_t cube_cores;
    uint32_t vector_cores;
    uint64_t unified_buffer;
    uint64_t l1;
};

// L0A, L0B and L0C are the same on all of them: multiply.h. The 310P is another machine: plan_310p.h.
constexpr Chip kChips[] = {
    {"Ascend910B1", 24, 48, 184 * kKiB - 256, 512 * kKiB - 256},
    {"Ascend910B2", 24, 48, 184 * kKiB - 256, 512 * kKiB - 256},
    {"Ascend910B3", 20, 40, 184 * kKiB - 256, 512 * kKiB - 256},
    {"Ascend910B4", 20, 40, 184 * kKiB - 256, 512 * kKiB - 256},
};

constexpr const char* kChip310P = "Ascend310P";  // begins the names of all chips of that kind

constexpr LaneWorkspace LaneParts(uint32_t dim, uint32_t anchor_rows)
{
    LaneWorkspace w{};
    w.scores = 0;
    w.wide = w.scores + kTileRows * kBlockKeys * 2;
    w.weights = w.wide + kTileRows * kBlockKeys * 4;
    w.product = w.weights + kTileRows * kBlockKeys * 2;
    w.sums = w.product + uint64_t{kTileRows} * dim * 4;
    w.reference = w.sums + kTileRows * kFractal * 4;
    w.verdict = w.reference + kTileRows * kFractal * 2;
    w.offsets = w.verdict + 512;
    w.bytes = RoundUp<uint64_t>(w.offsets + uint64_t{anchor_rows} * kTileRows * 4, 512);
    return w;
}

struct Shape {
    uint32_t batch;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t rows;
    uint32_t keys;
    uint32_t dim;
};

struct Settings {
    bool exact = true;
    bool causal = false;
    int64_t left = -1;  // keys that a row sees to the left of its own, and to the right; -1: all
    int64_t right = -1;
    bool has_mask = false;
    bool adds_mask = false;
    MaskTiling mask{};
    bool saturates = false;
    bool has_lengths = false;
    uint32_t sequences = 0;  // packed into one batch entry; 0: none
    bool has_sinks = false;
    bool has_largest = false;
    bool has_counts = false;
    bool keep_scores = false;
    uint32_t unbiased_columns = 0;  // columns of a row that unbiased rounding tests to flag it; 0: round to nearest
    bool to_bf16 = false;
    double scale = 1.0;
    double invariance = 0.0;  // paper: beta / (1 - beta)
};

inline void Require(bool holds, const std::string& what)
{
    if (!holds) throw std::invalid_argument(what);
}

inline void CheckShape(const Shape& s)
{
    const auto text = [](const char* name, uint32_t value) { return std::string(name) + "=" + std::to_string(value); };
    Require(s.batch > 0, text("batch", s.batch) + " must be above 0");
    Require(s.rows > 0, text("rows", s.rows) + " must be above 0");
    Require(s.keys > 0, text("keys", s.keys) + " must be above 0");
    Require(s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.heads > 0,
            text("heads", s.heads) + " must be a multiple of " + text("kv_heads", s.kv_heads));
    Require(s.dim % kFractal == 0 && s.dim > 0 && s.dim <= kMaxDim,
            text("dim", s.dim) + " must be a multiple of 16, from 16 to 256");
}

// Bytes of the unified buffer that a vector core takes: vector_state.h, InitBuffers.
constexpr uint64_t UnifiedBytes(uint32_t dim, uint32_t lanes, bool exact)
{
    const uint64_t tile = kHalfRows * kBlockKeys, numbers = exact ? 20928 : 15744;
    return tile * (2 + 4 + 2 + 4) + uint64_t{lanes} * kHalfRows * dim * 4 + numbers;
}

// A tile of a mask that is added, for which UB has room up to D = 128.
constexpr uint64_t kAddedMaskBytes = uint64_t{kHalfRows} * kBlockKeys * 4;

// Bytes of L1 that the cube core takes: exact_cube.h, and paper_cube.h, which takes less.
constexpr uint64_t L1Bytes(uint32_t dim)
{
    return 2 * (kTileRows * dim + 6 * kBlockKeys * dim + kTileRows * kBlockKeys + 2 * kTileRows * kFractal);
}

// The excess of columns of one sign over the other that flags a row: 4.25 sigma (ops/numerics/dither.py).
inline uint32_t Leaning(uint32_t columns) { return static_cast<uint32_t>(std::ceil(4.25 * std::sqrt(columns))); }

// Rows of anchors of a block of keys. Rows that may see their first key in any block need the mean of every block.
constexpr uint32_t AnchorRows(bool begins_anywhere) { return begins_anywhere ? 3 : 2; }

// A side of a window. No sequence is longer than the longest, so a wider one hides nothing.
inline uint32_t WithinLength(int64_t side)
{
    constexpr int64_t longest = 0x7fffffff;
    return static_cast<uint32_t>(side < longest ? side : longest);
}

// Blocks of keys that an anchor row may belong to.
constexpr uint32_t AnchorBlocks(uint32_t keys, uint32_t sequences)
{
    return sequences > 0 ? PackedPlaces(keys, sequences) : DivideUp(keys, kBlockKeys);
}

inline void CheckPacked(const Shape& shape, const Settings& settings)
{
    if (settings.sequences == 0) return;
    Require(settings.exact, "the published recovery takes no packed sequences");
    Require(shape.batch == 1, "batch=" + std::to_string(shape.batch) + " must be 1: packed sequences are one batch entry");
    Require(!settings.has_lengths, "packed sequences take no lengths: their starts have them");
    Require(!settings.has_mask, "packed sequences take no mask");
}

// What the plans of all chips share: which keys rows see, and what is wanted of them.
inline AttentionTiling PlanRows(const Shape& shape, const Settings& settings, uint32_t tile_rows)
{
    CheckShape(shape);
    Require(settings.scale > 0 && std::isfinite(settings.scale), "scale must be positive and finite");
    Require(settings.left >= -1 && settings.right >= -1,
            "left=" + std::to_string(settings.left) + " and right=" + std::to_string(settings.right) +
                " must be -1, which is unlimited, or more");
    Require(!settings.has_mask || !(settings.causal || settings.has_lengths || settings.left >= 0 || settings.right >= 0),
            "a mask comes alone: it has to hide what a causal mask, a window or lengths hide");
    AttentionTiling t{};
    t.batch = shape.batch;
    t.heads = shape.heads;
    t.kv_heads = shape.kv_heads;
    t.rows = shape.rows;
    t.keys = shape.keys;
    t.sequences = settings.sequences;
    t.dim = shape.dim;
    t.blocks = AnchorBlocks(shape.keys, settings.sequences);
    t.tile_rows = tile_rows;
    t.token_rows = 1;
    t.parts = 1;
    t.causal = settings.causal || settings.right >= 0;
    t.right = settings.right < 0 ? 0 : WithinLength(settings.right);
    t.windowed = settings.left >= 0;
    t.left = settings.left < 0 ? 0 : WithinLength(settings.left);
    t.has_mask = settings.has_mask;
    t.mask = settings.mask;
    t.has_lengths = settings.has_lengths;
    t.has_sinks = settings.has_sinks;
    t.has_largest = settings.has_largest;
    t.scale = static_cast<float>(settings.scale);
    return t;
}

inline AttentionTiling PlanAttention(const Shape& shape, const Settings& settings, const Chip& chip)
{
    AttentionTiling t = PlanRows(shape, settings, kTileRows);
    Require(settings.unbiased_columns <= Least(kWaveColumns, shape.dim),
            "unbiased_columns=" + std::to_string(settings.unbiased_columns) + " is above 64 or dim");
    Require(!settings.to_bf16 || settings.unbiased_columns > 0, "BF16 outputs are for unbiased rounding alone");
    Require(settings.exact || !settings.has_lengths, "the published recovery takes no lengths");
    CheckPacked(shape, settings);
    Require(settings.exact || !settings.has_sinks, "the published recovery takes no sinks");
    Require(settings.exact || (settings.left < 0 && settings.right < 0), "the published recovery takes no windows");
    Require(settings.exact || !settings.has_mask, "the published recovery takes no masks");
    Require(settings.has_mask || !settings.adds_mask, "there is no mask to be added");
    Require(settings.exact || !settings.has_largest, "the published recovery returns no largest scores");
    Require(settings.exact || !settings.has_counts, "the published recovery returns no counts");
    t.lanes = !settings.exact && UnifiedBytes(shape.dim, kLanes, false) <= chip.unified_buffer ? kLanes : 1;
    t.resident = shape.dim <= kChunk;
    const uint64_t counts = settings.has_counts ? kCountRows * kHalfRows * 4 : 0;
    const uint64_t unified = UnifiedBytes(shape.dim, t.lanes, settings.exact) + counts;
    Require(unified <= chip.unified_buffer && L1Bytes(shape.dim) <= chip.l1,
            "dim=" + std::to_string(shape.dim) + " does not fit into " + chip.name);
    t.adds_mask = settings.adds_mask;
    t.mask_ahead = settings.adds_mask && unified + kAddedMaskBytes <= chip.unified_buffer;
    t.anchor_rows = AnchorRows(t.windowed || t.has_mask);
    t.saturates = settings.saturates;
    t.has_counts = settings.has_counts;
    t.keep_scores = settings.keep_scores;
    t.unbiased_columns = settings.unbiased_columns;
    t.leaning = Leaning(settings.unbiased_columns);
    t.to_bf16 = settings.to_bf16;
    t.invariance = static_cast<float>(settings.invariance);
    t.lane = LaneParts(t.dim, t.anchor_rows * DivideUp(shape.keys, kBlockKeys));  // no sequence is longer
    t.workspace_bytes = uint64_t{chip.cube_cores} * kLanes * t.lane.bytes;
    return t;
}

// The share of the softmax scale that K' may hold: a power of two.
inline float ScaleUnit(double scale)
{
    return static_cast<float>(std::fmin(1.0, std::exp2(std::floor(std::log2(scale) + 0.5))));
}

inline ShiftTiling PlanShift(const Shape& shape, double scale, bool saturates, bool has_lengths, bool begins_anywhere,
                             uint32_t sequences = 0)
{
    CheckShape(shape);
    Require(sequences == 0 || (shape.batch == 1 && !has_lengths),
            "packed sequences are one batch entry, whose lengths are in its starts");
    ShiftTiling t{};
    t.heads = shape.batch * shape.kv_heads;
    t.kv_heads = shape.kv_heads;
    t.keys = shape.keys;
    t.dim = shape.dim;
    t.sequences = sequences;
    t.blocks = AnchorBlocks(shape.keys, sequences);
    t.saturates = saturates;
    t.has_lengths = has_lengths;
    t.anchor_rows = AnchorRows(begins_anywhere);
    t.unit = ScaleUnit(scale);
    return t;
}

}  // namespace pasa
