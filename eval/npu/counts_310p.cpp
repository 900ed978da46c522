// What the 310P's attention kernel spends on the CPU twin, as JSON: one tile of 64 queries against so many blocks.
//
//     PROGRAM DIM BLOCKS
#include <cstdio>
#include <cstdlib>

#include "binding/on_twin_310p.h"
#include "tiling/plan_310p.h"

int main(int argc, char** argv)
{
    if (argc != 3) return 2;
    const uint32_t dim = static_cast<uint32_t>(std::atoi(argv[1])), blocks = static_cast<uint32_t>(std::atoi(argv[2]));
    pasa::Settings settings;
    settings.scale = 1.0;
    const pasa::Shape shape{1, 1, 1, pasa::kHalfRows, blocks * pasa::kBlockKeys, dim};
    const pasa::AttentionTiling tiling = pasa::PlanAttention310P(shape, settings);
    const size_t numbers = size_t{shape.keys} * dim;
    std::vector<half> q(size_t{shape.rows} * dim), keys(numbers), values(numbers), anchors(size_t{2} * blocks * dim);
    std::vector<half> out(q.size());
    std::vector<float> units(size_t{pasa::kUnitCopies} * blocks, 1.0f), lse(shape.rows);
    const pasa::AttentionPointers given{q.data(),     keys.data(), values.data(), anchors.data(),
                                    units.data(), nullptr,     nullptr,       nullptr,
                                    nullptr,      out.data(),  lse.data(),    nullptr,       nullptr,  nullptr};
    const twin::Report report = pasa::AttendOnTwin(given, tiling, 1);
    const twin::Counters counted = report.total(twin::CoreKind::ai);
    std::printf("{\"report\": %s, \"L0C to UB\": %llu}\n", report.json().c_str(),
                static_cast<unsigned long long>(counted.bytes[twin::index_of(twin::Pipe::V)]));
    return 0;
}
