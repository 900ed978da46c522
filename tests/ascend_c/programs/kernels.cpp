// The attention kernel on arrays: q, keys, v, and for the exact recovery anchors and units; lengths if there are any.
#include "harness.h"
#include "kernel/pasa_attention.h"
#include "kernel/shift_exact.h"
#include "kernel/shift_paper.h"
#include "tiling/plan.h"

namespace {

template <typename T>
GM_ADDR bytes(T* pointer)
{
    return reinterpret_cast<GM_ADDR>(pointer);
}

// In a build of mutants, the one to run.
void choose_mutant([[maybe_unused]] const harness::Arguments& a)
{
#ifdef PASA_MUTANTS
    pasa_mutant = a.number("mutant");
#endif
}

// A launch that finds the other overflow mode than it is asked for, and has to leave it as it was.
twin::Report launch(twin::Device& device, const char* name, int blocks, twin::Options options,
                    const std::function<void()>& kernel)
{
    const bool saturates = options.overflow == twin::Overflow::saturate;
    options.overflow = saturates ? twin::Overflow::inf_nan : twin::Overflow::saturate;
    return device.launch(name, blocks, options, [&] {
        kernel();
        twin::core().require(AscendC::GetSaturationFlag<AscendC::SaturationMode::FLOAT>() != saturates,
                             twin::FaultKind::program, "the overflow mode is not as the kernel found it");
    });
}

double real(const harness::Arguments& a, const char* key) { return std::atof(a.text(key, "0").c_str()); }

}  // namespace

TWIN_CASE(attend)
{
    const harness::Arguments& a = arguments;
    choose_mutant(a);
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
    twin::Report report = launch(device, "pasa_attention", static_cast<int>(chip.cube_cores), a.options(), [&] {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
        settings.exact ? pasa::PasaAttention<true>(given, tiling) : pasa::PasaAttention<false>(given, tiling);
    });
    a.save("out", out, rows * shape.dim);
    a.save("lse", lse, rows);
    a.save("scores", scores, tiles * pasa::kTileRows * pasa::kBlockKeys);
    return report;
}


// shift_keys on k; for the published recovery with the matrices of a full and of the last block.
TWIN_CASE(shift)
{
    const harness::Arguments& a = arguments;
    choose_mutant(a);
    const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    const pasa::Shape shape{number("batch"), number("kv_heads"), number("kv_heads"), 1, number("keys"), number("dim")};
    const bool exact = a.number("exact", 1) != 0;
    const pasa::ShiftTiling tiling = pasa::PlanShift(shape, exact ? real(a, "scale") : 1.0,
                                                     a.text("overflow") == "saturate", a.number("lengths") != 0);
    twin::Device device;
    const size_t rows = size_t{tiling.heads} * tiling.keys;
    const size_t columns = tiling.dim + (exact ? pasa::kFractal : 0);
    half* keys = device.output<half>("keys", rows * columns);
    half* anchors = device.output<half>("anchors", exact ? size_t{tiling.heads} * 2 * tiling.blocks * tiling.dim : 0);
    float* units = device.output<float>("units", exact ? size_t{tiling.heads} * tiling.blocks * 8 : 0);
    pasa::ShiftArguments given{};
    given.k = bytes(device.input("k", a.load<half>("k")));
    if (tiling.has_lengths) given.lengths = bytes(device.input("lengths", a.load<int32_t>("lengths")));
    if (!exact) {
        given.matrix = bytes(device.input("matrix", a.load<half>("matrix")));
        given.last_matrix = bytes(device.input("last_matrix", a.load<half>("last_matrix")));
    }
    given.keys = bytes(keys);
    given.anchors = bytes(anchors);
    given.units = bytes(units);
    twin::Options options = a.options();
    options.shape = exact ? twin::Shape::aiv_only : twin::Shape::aic_only;
    twin::Report report = launch(device, exact ? "shift_exact" : "shift_paper", a.number("cores", 3), options, [&] {
        KERNEL_TASK_TYPE_DEFAULT(exact ? KERNEL_TYPE_MIX_AIV_1_0 : KERNEL_TYPE_AIC_ONLY);
        exact ? pasa::ShiftExact(given, tiling) : pasa::ShiftPaper(given, tiling);
    });
    a.save("keys", keys, rows * columns);
    if (exact) {
        a.save("anchors", anchors, size_t{tiling.heads} * 2 * tiling.blocks * tiling.dim);
        a.save("units", units, size_t{tiling.heads} * tiling.blocks * 8);
    }
    return report;
}

// What PlanAttention makes of a shape, as numbers; or the sentence with which it refuses, as a fault.
TWIN_CASE(plan)
{
    const auto number = [&](const char* key) { return static_cast<uint32_t>(arguments.number(key)); };
    const pasa::Shape shape{number("batch"), number("heads"), number("kv_heads"), number("rows"), number("keys"),
                            number("dim")};
    pasa::Settings settings;
    settings.exact = arguments.number("exact", 1) != 0;
    settings.causal = arguments.number("causal") != 0;
    settings.has_lengths = arguments.number("lengths") != 0;
    settings.scale = real(arguments, "scale");
    pasa::Chip chip = pasa::kChips[number("chip")];
    twin::Report report;
    try {
        const pasa::AttentionTiling t = pasa::PlanAttention(shape, settings, chip);
        std::vector<uint64_t> found{t.lanes, t.blocks, t.lane.bytes, t.workspace_bytes, chip.cube_cores};
        for (uint32_t group = 0; group < chip.cube_cores; ++group) {  // score tiles that each group makes
            pasa::Tasks tasks(t, nullptr);
            pasa::Task task;
            uint64_t tiles = 0;
            for (uint32_t turn = 0; tasks.Get(turn, group, chip.cube_cores, task); ++turn) {
                for (const pasa::LaneTask& lane : task.lane) tiles += lane.steps;
            }
            found.push_back(tiles);
        }
        arguments.save("plan", found.data(), found.size());
    } catch (const std::invalid_argument& error) {
        report.ok = false;
        report.fault.sentence = error.what();
    }
    return report;
}
