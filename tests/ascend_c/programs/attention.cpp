// The attention kernel on arrays: q, keys, v, and for the exact recovery anchors and units; lengths if there are any.
#include "../../../ascend_c/kernel/pasa_attention.h"
#include "../../../ascend_c/tiling/plan.h"
#include "harness.h"

namespace {

template <typename T>
GM_ADDR bytes(T* pointer)
{
    return reinterpret_cast<GM_ADDR>(pointer);
}

double real(const harness::Arguments& a, const char* key) { return std::atof(a.text(key, "0").c_str()); }

}  // namespace

TWIN_CASE(attend)
{
    const harness::Arguments& a = arguments;
    const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    const pasa::Shape shape{number("batch"), number("heads"), number("kv_heads"), number("rows"), number("keys"),
                            number("dim")};
    pasa::Settings settings;
    settings.exact = a.number("exact", 1) != 0;
    settings.causal = a.number("causal") != 0;
    settings.saturates = a.text("overflow") == "saturate";
    settings.has_lengths = a.number("lengths") != 0;
    settings.keep_scores = true;
    settings.scale = real(a, "scale");
    settings.invariance = real(a, "invariance");
    settings.last_invariance = real(a, "last_invariance");
    pasa::Chip chip = pasa::kChips[2];
    chip.cube_cores = static_cast<uint32_t>(a.number("groups", 1));
    const pasa::AttentionTiling tiling = pasa::PlanAttention(shape, settings, chip);
    twin::Device device;
    const size_t rows = size_t{shape.batch} * shape.heads * shape.rows;
    const size_t tiles = size_t{shape.batch} * shape.heads * pasa::DivideUp(shape.rows, pasa::kTileRows) * tiling.blocks;
    half* out = device.output<half>("out", rows * shape.dim);
    float* lse = device.output<float>("lse", rows);
    half* scores = device.workspace<half>("scores", tiles * pasa::kTileRows * pasa::kBlockKeys);
    pasa::Arguments given{};
    given.q = bytes(device.input("q", a.load<half>("q")));
    given.keys = bytes(device.input("keys", a.load<half>("keys")));
    given.v = bytes(device.input("v", a.load<half>("v")));
    if (settings.exact) {
        given.anchors = bytes(device.input("anchors", a.load<half>("anchors")));
        given.units = bytes(device.input("units", a.load<float>("units")));
    }
    if (settings.has_lengths) given.lengths = bytes(device.input("lengths", a.load<int32_t>("lengths")));
    given.out = bytes(out);
    given.lse = bytes(lse);
    given.scores = bytes(scores);
    given.workspace = device.workspace<uint8_t>("workspace", tiling.workspace_bytes);
    twin::Report report = device.launch("pasa_attention", static_cast<int>(chip.cube_cores), a.options(), [&] {
        settings.exact ? pasa::PasaAttention<true>(given, tiling) : pasa::PasaAttention<false>(given, tiling);
    });
    a.save("out", out, rows * shape.dim);
    a.save("lse", lse, rows);
    a.save("scores", scores, tiles * pasa::kTileRows * pasa::kBlockKeys);
    return report;
}

