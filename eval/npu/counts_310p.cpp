// What the 310P's kernels spend on the CPU twin, as JSON: one tile against so many blocks of keys, by prefill with 64
// queries, or by decoding with so many rows, from keys in a row or in pages of so many slots.
//
//     PROGRAM attend DIM BLOCKS
//     PROGRAM decode DIM BLOCKS ROWS SLOTS
//
// What prefill needs before, of the keys and values of a head, a launch each:
//
//     PROGRAM shift DIM BLOCKS
//     PROGRAM frames DIM BLOCKS
//     PROGRAM lay_out DIM BLOCKS
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>

#include "binding/on_twin_310p.h"
#include "tiling/plan_310p.h"

static twin::Report Attend(uint32_t dim, uint32_t blocks)
{
    pasa::Settings settings;
    settings.scale = 1.0;
    const pasa::Shape shape{1, 1, 1, pasa::kHalfRows, blocks * pasa::kBlockKeys, dim};
    const pasa::AttentionTiling tiling = pasa::PlanAttention310P(shape, settings);
    const size_t numbers = size_t{shape.keys} * dim;
    std::vector<half> q(size_t{shape.rows} * dim), keys(numbers), values(numbers), anchors(size_t{2} * blocks * dim);
    std::vector<half> out(q.size());
    std::vector<float> units(size_t{pasa::kUnitCopies} * blocks, 1.0f), lse(shape.rows);
    pasa::AttentionPointers given{};
    given.q = q.data();
    given.keys = keys.data();
    given.v = values.data();
    given.anchors = anchors.data();
    given.units = units.data();
    given.out = out.data();
    given.lse = lse.data();
    return pasa::AttendOnTwin(given, tiling, 1);
}

// No column leaves the frame. The launch that merges parts is not in the report.
static twin::Report Decode(uint32_t dim, uint32_t blocks, uint32_t rows, uint32_t slots)
{
    const uint32_t keys = blocks * pasa::kBlockKeys, pages = slots == 0 ? 0 : keys / slots;
    pasa::Settings settings;
    settings.scale = 1.0;
    settings.has_lengths = pages > 0;
    pasa::DecodeLayout layout;
    layout.pages = pages;
    layout.slots = slots;
    layout.table_columns = pages;
    layout.q_token = layout.q_head = uint64_t{rows} * dim;
    layout.k = {uint64_t{slots == 0 ? keys : slots} * dim, dim, dim};
    layout.v = layout.k;
    const pasa::DecodeTiling tiling = pasa::PlanDecode310P({1, rows, 1, 1, keys, dim}, layout, settings, 1);
    std::vector<half> q(size_t{rows} * dim), k(size_t{keys} * dim), v(k.size()), out(q.size());
    std::vector<float> lse(size_t{rows} * pasa::kUnitCopies);
    std::vector<int32_t> table(pages), lengths(1, static_cast<int32_t>(keys));
    std::iota(table.begin(), table.end(), 0);
    std::vector<uint8_t> workspace(tiling.attention.workspace_bytes);
    const pasa::DecodePointers given{q.data(), k.data(), v.data(), pages == 0 ? nullptr : table.data(),
                                     pages == 0 ? nullptr : lengths.data(), nullptr, nullptr, out.data(), lse.data(),
                                     workspace.data()};
    return pasa::DecodeOnTwin(given, tiling, 1, {}, false);
}

// Keys around 4, so every column has an anchor.
static twin::Report Prepare(const std::string& what, uint32_t dim, uint32_t blocks)
{
    const pasa::Shape shape{1, 1, 1, 1, blocks * pasa::kBlockKeys, dim};
    const pasa::ShiftTiling tiling = pasa::PlanShift(shape, 1.0, true, false, false);
    const size_t numbers = size_t{shape.keys} * dim;
    std::vector<half> rows(numbers), fractals(numbers), anchors(size_t{2} * blocks * dim);
    std::mt19937 source(0);
    for (half& x : rows) x = static_cast<half>(4.0f + static_cast<float>(source() % 1000) / 1000.0f);
    if (what == "lay_out") return pasa::LayOutOnTwin({rows.data(), nullptr, fractals.data()}, tiling, 1);
    std::vector<float> units(size_t{pasa::kUnitCopies} * blocks);
    const pasa::ShiftPointers given{rows.data(),     nullptr,        nullptr,     nullptr,
                                    fractals.data(), anchors.data(), units.data()};
    return pasa::ShiftOnTwin(given, tiling, 1, {}, what == "frames");
}

int main(int argc, char** argv)
{
    const auto number = [argv](int i) { return static_cast<uint32_t>(std::atoi(argv[i])); };
    const std::string what = argc > 3 ? argv[1] : "";
    twin::Report report;
    if (what == "attend" && argc == 4) {
        report = Attend(number(2), number(3));
    } else if (what == "decode" && argc == 6) {
        report = Decode(number(2), number(3), number(4), number(5));
    } else if ((what == "shift" || what == "frames" || what == "lay_out") && argc == 4) {
        report = Prepare(what, number(2), number(3));
    } else {
        return 2;
    }
    const twin::Counters counted = report.total(twin::CoreKind::ai);
    std::printf("{\"report\": %s, \"L0C to UB\": %llu}\n", report.json().c_str(),
                static_cast<unsigned long long>(counted.bytes[twin::index_of(twin::Pipe::V)]));
    return 0;
}
