// What the kernels spend on the CPU twin, as JSON.
//
//     PROGRAM attend EXACT DIM BLOCKS DATA UNBIASED ROWS    so many queries (0: two tiles of 128) against so many
//                                                           blocks of 128 keys, one group
//     PROGRAM decode DIM BLOCKS HEADS SLOTS GROUPS    one token of so many query heads against so many blocks of keys
//                                                     of one KV head, in pages of so many keys (0: in a row)
//     PROGRAM shift EXACT DIM BLOCKS                   so many blocks of keys, one core
//     PROGRAM plan EXACT B H Hkv Sq Skv D CAUSAL       tasks and score tiles of the busiest group of a 910B3
//
// DATA is what the exact recovery finds: 0 keys without anchors, whose references stay; 1 scores that rise so much that
// every tile is kept in FP32; 2 keys with anchors; 3 scores that rise with every third block, so that references move.
// UNBIASED: 0 rounds outputs to nearest, 1 without bias where no row leans, 2 where every row does; then all queries are
// zero.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "binding/on_twin.h"
#include "tiling/decode_plan.h"

namespace {

constexpr uint32_t kQueries = pasa::kLanes * pasa::kTileRows;
enum Data : uint32_t { kPlain, kWide, kAnchored, kMoving };
constexpr float kStep = 40.0f;  // nats between the blocks of wide data: six times what makes a tile wide
constexpr float kMove = 5.0f;   // nats that move a reference, and make no tile wide

// Multiples of 1/128 in [middle - range, middle + range), the same every time: the scale fits into all or no blocks.
std::vector<half> noise(size_t count, float middle = 0.0f, float range = 1.0f)
{
    std::vector<half> numbers(count);
    uint32_t state = 1;
    for (half& x : numbers) {
        state = state * 1664525u + 1013904223u;
        const float number = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
        x = static_cast<half>(middle + std::floor(128.0f * range * number) / 128.0f);
    }
    return numbers;
}

// Scores that rise in steps. Wide data also have one score of the first block kStep / 2 above its others.
std::vector<half> steep(uint32_t blocks, uint32_t dim, bool wide)
{
    std::vector<half> keys;
    for (uint32_t key = 0; key < blocks * pasa::kBlockKeys; ++key) {
        const uint32_t block = key / pasa::kBlockKeys;
        const float risen = wide ? kStep * static_cast<float>(block) : kMove * static_cast<float>(block / 3);
        const float nats = wide && key == 0 ? kStep / 2 : risen;
        keys.insert(keys.end(), dim, static_cast<half>(nats / std::sqrt(static_cast<float>(dim))));
    }
    return keys;
}

std::vector<half> keys_of(uint32_t data, uint32_t blocks, uint32_t dim)
{
    if (data == kWide || data == kMoving) return steep(blocks, dim, data == kWide);
    const size_t count = size_t{blocks} * pasa::kBlockKeys * dim;
    return data == kAnchored ? noise(count, 3.0f, 0.25f) : noise(count);
}

struct Run {
    bool exact;
    uint32_t dim;
    uint32_t blocks;
    uint32_t data;
    uint32_t unbiased;
    uint32_t queries;
};

// Values of keys in turn: their mean is a tie of FP16, or 1.
std::vector<half> in_turn(uint32_t keys, uint32_t dim, bool tie)
{
    std::vector<half> v(size_t{keys} * dim, static_cast<half>(1.0f));
    for (size_t i = 0; tie && i < v.size(); ++i) v[i] = static_cast<half>(i / dim % 2 ? 1.0f : 1.0f + 0x1p-10f);
    return v;
}

twin::Report run(const Run& r, bool attends)
{
    const double scale = 1.0 / std::sqrt(static_cast<double>(r.dim));
    const pasa::Shape shape{1, 1, 1, r.queries, r.blocks * pasa::kBlockKeys, r.dim};
    const size_t numbers = size_t{shape.keys} * r.dim;
    std::vector<half> matrix(pasa::kBlockKeys * pasa::kBlockKeys);  // any does: no count depends on it
    for (uint32_t i = 0; i < pasa::kBlockKeys; ++i) matrix[i * (pasa::kBlockKeys + 1)] = static_cast<half>(scale);
    std::vector<half> k = keys_of(r.data, r.blocks, r.dim);
    std::vector<half> keys(numbers);
    std::vector<half> anchors(size_t{2} * r.blocks * r.dim);
    std::vector<float> units(size_t{pasa::kUnitCopies} * r.blocks);
    const pasa::ShiftTiling shift_tiling = pasa::PlanShift(shape, r.exact ? scale : 1.0, false, false, false);
    const pasa::ShiftPointers shift{k.data(),    nullptr,        nullptr, r.exact ? nullptr : matrix.data(),
                                    keys.data(), r.exact ? anchors.data() : nullptr,
                                    r.exact ? units.data() : nullptr};
    const twin::Report shifted = pasa::ShiftOnTwin(r.exact, shift, shift_tiling, 1);
    if (!attends || !shifted.ok) return shifted;

    pasa::Settings settings;
    settings.exact = r.exact;
    settings.scale = scale;
    settings.invariance = 1.0;
    if (r.unbiased > 0) settings.unbiased_columns = pasa::Least(pasa::kWaveColumns, r.dim);
    pasa::Chip chip = pasa::kChips[2];
    chip.cube_cores = 1;
    const pasa::AttentionTiling tiling = pasa::PlanAttention(shape, settings, chip);
    const size_t queries = size_t{r.queries} * r.dim;
    const bool steps = r.data == kWide || r.data == kMoving;
    std::vector<half> q = steps ? std::vector<half>(queries, static_cast<half>(1.0f)) : noise(queries);
    std::vector<half> v = noise(numbers), out(queries);
    if (r.unbiased > 0) {
        q.assign(queries, static_cast<half>(0.0f));
        v = in_turn(shape.keys, r.dim, r.unbiased == 2);
    }
    std::vector<float> lse(r.queries);
    const pasa::AttentionPointers given{q.data(), keys.data(), v.data(),   shift.anchors, shift.units,
                                        nullptr,  nullptr,     nullptr,    nullptr,       nullptr, out.data(),
                                        lse.data(), nullptr,     nullptr};
    return pasa::AttendOnTwin(r.exact, given, tiling, 1);
}

// Keys share a bias, so no column leaves its frame; pages are in order.
twin::Report decode(uint32_t dim, uint32_t blocks, uint32_t heads, uint32_t slots, uint32_t groups)
{
    const uint32_t keys = blocks * pasa::kBlockKeys;
    pasa::Shape shape{1, heads, 1, 1, keys, dim};
    pasa::Settings settings;
    settings.scale = 1.0 / std::sqrt(static_cast<double>(dim));
    settings.has_lengths = slots > 0;
    pasa::DecodeLayout layout;
    layout.q_token = layout.q_head = uint64_t{heads} * dim;
    layout.slots = slots;
    layout.pages = layout.table_columns = slots > 0 ? pasa::DivideUp(keys, slots) : 0;
    layout.k = pasa::CacheStrides{uint64_t{slots > 0 ? slots : keys} * dim, dim, dim};
    layout.v = layout.k;
    pasa::Chip chip = pasa::kChips[2];
    chip.cube_cores = groups;
    const pasa::DecodeTiling tiling = pasa::PlanDecode(shape, layout, settings, chip);
    const size_t numbers = size_t{keys} * dim, queries = size_t{heads} * dim;
    std::vector<half> q = noise(queries), k = noise(numbers, 3.0f, 0.25f), v = noise(numbers), out(queries);
    std::vector<float> lse(heads);
    std::vector<int32_t> table, lengths{static_cast<int32_t>(keys)};
    for (uint32_t page = 0; page < layout.pages; ++page) table.push_back(static_cast<int32_t>(page));
    const pasa::DecodePointers given{q.data(), k.data(), v.data(),   slots > 0 ? table.data() : nullptr,
                                     slots > 0 ? lengths.data() : nullptr,
                                     nullptr,  nullptr,  out.data(), lse.data(), nullptr};
    return pasa::DecodeOnTwin(given, tiling, groups);
}

std::string plan(bool exact, const pasa::Shape& shape, bool causal)
{
    pasa::Settings settings;
    settings.exact = exact;
    settings.causal = causal;
    const pasa::Chip& chip = pasa::kChips[2];
    const pasa::AttentionTiling tiling = pasa::PlanAttention(shape, settings, chip);
    uint64_t busiest_tasks = 0, busiest_tiles = 0;
    for (uint32_t group = 0; group < chip.cube_cores; ++group) {
        pasa::Tasks tasks(tiling, nullptr);
        pasa::Task task;
        uint64_t tiles = 0;
        uint32_t turn = 0;
        for (; tasks.Get(turn, group, chip.cube_cores, task); ++turn) {
            for (const pasa::LaneTask& lane : task.lane) tiles += lane.steps;
        }
        if (tiles > busiest_tiles) {
            busiest_tiles = tiles;
            busiest_tasks = turn;
        }
    }
    return "{\"tasks\": " + std::to_string(busiest_tasks) + ", \"tiles\": " + std::to_string(busiest_tiles) + "}";
}

}  // namespace

int main(int argc, char** argv)
{
    const std::string what = argc > 1 ? argv[1] : "";
    const auto number = [&](int i) { return i < argc ? static_cast<uint32_t>(std::atoi(argv[i])) : 0; };
    if (what == "plan") {
        const pasa::Shape shape{number(3), number(4), number(5), number(6), number(7), number(8)};
        std::puts(plan(number(2) != 0, shape, number(9) != 0).c_str());
    } else if (what == "attend" || what == "shift") {
        const Run r{number(2) != 0, number(3), number(4), number(5), number(6), number(7) > 0 ? number(7) : kQueries};
        std::puts(run(r, what == "attend").json().c_str());
    } else if (what == "decode") {
        std::puts(decode(number(2), number(3), number(4), number(5), number(6)).json().c_str());
    } else {
        return 2;
    }
    return 0;
}
