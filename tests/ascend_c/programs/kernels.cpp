// The kernels on arrays: attention on q, keys, v, and for the exact recovery anchors and units; lengths if any.
#include "binding/on_twin.h"
#include "harness.h"
#include "inputs.h"
#include "tiling/decode_plan.h"

TWIN_CASE(attend)
{
    const harness::Arguments& a = arguments;
    choose_mutant(a);
    const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    const pasa::Shape shape = shape_of(a);
    pasa::Settings settings;
    settings.exact = a.number("exact", 1) != 0;
    settings.causal = a.number("causal") != 0;
    settings.saturates = a.text("overflow") == "saturate";
    settings.has_lengths = a.number("lengths") != 0;
    settings.sequences = number("sequences");
    settings.has_sinks = a.number("sinks") != 0;
    settings.has_largest = a.number("largest") != 0;
    settings.has_counts = a.number("counts") != 0;
    settings.left = a.number("left", -1);
    settings.right = a.number("right", -1);
    settings.has_mask = a.number("mask") != 0;
    settings.adds_mask = a.number("adds_mask") != 0;
    if (settings.has_mask) {
        settings.mask = {number("mask_batches"), number("mask_heads"), number("batch_stride"), number("head_stride"),
                         number("row_stride")};
    }
    settings.keep_scores = true;
    settings.unbiased_columns = number("unbiased_columns");
    settings.to_bf16 = a.number("to_bf16") != 0;
    settings.scale = real(a, "scale");
    settings.invariance = real(a, "invariance");
    pasa::Chip chip = pasa::kChips[2];
    chip.cube_cores = static_cast<uint32_t>(a.number("groups", 1));
    const pasa::AttentionTiling tiling = pasa::PlanAttention(shape, settings, chip);
    const size_t rows = size_t{shape.batch} * shape.heads * shape.rows;
    const size_t tiles = pasa::KeptTiles(tiling);
    auto q = given<half>(a, "q"), keys = given<half>(a, "keys"), v = given<half>(a, "v");
    auto anchors = given<half>(a, "anchors", settings.exact);
    auto units = given<float>(a, "units", settings.exact);
    auto lengths = given<int32_t>(a, "lengths", settings.has_lengths);
    auto starts = given<int32_t>(a, "starts", settings.sequences > 0);
    auto sinks = given<float>(a, "sinks", settings.has_sinks);
    auto mask = given<uint8_t>(a, "mask", settings.has_mask && !settings.adds_mask);
    auto bias = given<float>(a, "mask", settings.adds_mask);
    auto visits = given<int64_t>(a, "visits", settings.has_mask);
    std::vector<half> out(rows * shape.dim), scores(tiles * pasa::kTileRows * pasa::kBlockKeys);
    std::vector<float> lse(rows), largest(settings.has_largest ? rows : 0),
        counts(settings.has_counts ? pasa::kCountRows * rows : 0);
    const pasa::AttentionPointers pointers{data(q),       data(keys),   data(v),    data(anchors), data(units),
                                           data(lengths), data(starts), data(sinks), settings.adds_mask ? data(bias) : data(mask), data(visits),  data(out),
                                           data(lse),     data(largest), data(counts), nullptr};
    twin::Report report =
        pasa::AttendOnTwin(settings.exact, pointers, tiling, chip.cube_cores, a.options(), scores.data());
    a.save("out", out.data(), out.size());
    a.save("lse", lse.data(), lse.size());
    if (settings.has_largest) a.save("largest", largest.data(), largest.size());
    if (settings.has_counts) a.save("counts", counts.data(), counts.size());
    a.save("scores", scores.data(), scores.size());
    return report;
}

// pasa_decode on q (tokens, heads, D) and caches: rows of keys (B, Hkv, Skv, D), or pages (pages, slots, Hkv, D).
TWIN_CASE(decode)
{
    choose_mutant(arguments);
    DecodeInputs x(arguments);
    pasa::Chip chip = pasa::kChips[2];
    chip.cube_cores = static_cast<uint32_t>(arguments.number("groups", 1));
    const pasa::DecodeTiling tiling = pasa::PlanDecode(x.shape, x.layout, x.settings, chip);
    std::vector<float> lse(x.rows());
    twin::Report report =
        pasa::DecodeOnTwin(x.pointers(lse.data(), nullptr), tiling, chip.cube_cores, arguments.options());
    x.save(lse);
    return report;
}

// shift_keys on k; for the published recovery, of whole blocks, with the matrix.
TWIN_CASE(shift)
{
    const harness::Arguments& a = arguments;
    choose_mutant(a);
    const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    const pasa::Shape shape{number("batch"), number("kv_heads"), number("kv_heads"), 1, number("keys"), number("dim")};
    const bool exact = a.number("exact", 1) != 0;
    const pasa::ShiftTiling tiling = pasa::PlanShift(shape, exact ? real(a, "scale") : 1.0,
                                                     a.text("overflow") == "saturate", a.number("lengths") != 0,
                                                     a.number("begins_anywhere") != 0, number("sequences"));
    const size_t blocks = exact ? size_t{tiling.heads} * tiling.blocks : 0;
    auto k = given<half>(a, "k"), matrix = given<half>(a, "matrix", !exact);
    auto lengths = given<int32_t>(a, "lengths", tiling.has_lengths != 0);
    auto starts = given<int32_t>(a, "key_starts", tiling.sequences > 0);
    std::vector<half> keys(size_t{tiling.heads} * tiling.keys * tiling.dim);
    std::vector<half> anchors(blocks * tiling.anchor_rows * tiling.dim);
    std::vector<float> units(blocks * pasa::kUnitCopies);
    const pasa::ShiftPointers pointers{data(k),    data(lengths), data(starts), data(matrix),
                                       data(keys), data(anchors), data(units)};
    twin::Report report =
        pasa::ShiftOnTwin(exact, pointers, tiling, static_cast<uint32_t>(a.number("cores", 3)), a.options());
    a.save("keys", keys.data(), keys.size());
    if (exact) {
        a.save("anchors", anchors.data(), anchors.size());
        a.save("units", units.data(), units.size());
    }
    return report;
}

TWIN_CASE(probe_vector)
{
    return run_vector_probe(arguments, [&](const auto& pointers, uint32_t probe, uint32_t count) {
        return pasa::ProbeVectorOnTwin(pointers, probe, count, arguments.text("overflow") == "saturate",
                                       arguments.options());
    });
}

TWIN_CASE(probe_product)
{
    return run_product_probe(arguments, [&](const auto& pointers, uint32_t m, uint32_t n, uint32_t k) {
        return pasa::ProbeProductOnTwin(pointers, m, n, k, arguments.options());
    });
}

// UnbiasedRounding on rows of FP32 numbers, in the buffers that attention gives it: what is left to be rounded to nearest.
TWIN_CASE(unbiased)
{
    const harness::Arguments& a = arguments;
    choose_mutant(a);
    pasa::AttentionTiling tiling{};
    tiling.dim = static_cast<uint32_t>(a.number("dim"));
    tiling.unbiased_columns = static_cast<uint32_t>(a.number("unbiased_columns"));
    tiling.leaning = pasa::Leaning(tiling.unbiased_columns);
    tiling.to_bf16 = a.number("to_bf16") != 0;
    auto x = given<float>(a, "x");
    const uint32_t count = static_cast<uint32_t>(x.size()), rows = count / tiling.dim;
    pasa::TwinMemory memory;
    GM_ADDR from = memory.Input<float>("x", x.data(), count);
    GM_ADDR to = memory.Output<float>("z", x.data(), count);
    twin::Options options = a.options();
    options.shape = twin::Shape::aiv_only;
    const twin::Report report = memory.Launch("unbiased", 1, false, options, [&] {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
        const pasa::OverflowMode mode(false);
        AscendC::TPipe pipe;
        AscendC::TQue<AscendC::TPosition::VECIN, 1> in;
        AscendC::TQue<AscendC::TPosition::VECOUT, 1> out;
        AscendC::TBuf<AscendC::TPosition::VECCALC> tile, work, numbers;
        constexpr uint32_t kWork = pasa::RowReduction<AscendC::ReduceType::SUM>::kWork;
        pipe.InitBuffer(in, 1, count * sizeof(float));
        pipe.InitBuffer(out, 1, count * sizeof(float));
        pipe.InitBuffer(tile, pasa::kHalfRows * pasa::kBlockKeys * sizeof(float));
        pipe.InitBuffer(work, kWork * sizeof(float));
        pipe.InitBuffer(numbers, 2 * pasa::kHalfRows * sizeof(float));
        AscendC::Duplicate(work.Get<float>(), 0.0f, kWork);
        AscendC::Duplicate(numbers.Get<float>(), 0.0f, 2 * pasa::kHalfRows);
        AscendC::GlobalTensor<float> given, made;
        given.SetGlobalBuffer(reinterpret_cast<float*>(from), count);
        made.SetGlobalBuffer(reinterpret_cast<float*>(to), count);
        AscendC::LocalTensor<float> loaded = in.AllocTensor<float>();
        AscendC::DataCopy(loaded, given, count);
        in.EnQue(loaded);
        loaded = in.DeQue<float>();
        AscendC::LocalTensor<float> outputs = out.AllocTensor<float>();
        AscendC::Adds(outputs.ReinterpretCast<int32_t>(), loaded.ReinterpretCast<int32_t>(), 0,
                      static_cast<int32_t>(count));  // bits unchanged, of NaN as well
        AscendC::PipeBarrier<PIPE_V>();
        in.FreeTensor(loaded);
        pasa::UnbiasedRounding rounding(tiling, tile.Get<float>(), work.Get<float>(), numbers.Get<float>(),
                                        numbers.Get<float>()[pasa::kHalfRows], rows);
        if (rounding.FlagRows(outputs)) rounding.Draw(outputs, 0, tiling.dim);
        out.EnQue(outputs);
        outputs = out.DeQue<float>();
        AscendC::DataCopy(made, outputs, count);
        out.FreeTensor(outputs);
    });
    a.save("z", x.data(), x.size());
    return report;
}

// What PlanAttention makes of a shape, as numbers; or the sentence with which it refuses, as a fault.
TWIN_CASE(plan)
{
    const auto number = [&](const char* key) { return static_cast<uint32_t>(arguments.number(key)); };
    const pasa::Shape shape = shape_of(arguments);
    pasa::Settings settings;
    settings.exact = arguments.number("exact", 1) != 0;
    settings.causal = arguments.number("causal") != 0;
    settings.has_lengths = arguments.number("lengths") != 0;
    settings.scale = real(arguments, "scale");
    settings.unbiased_columns = number("unbiased_columns");
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
        arguments.save("leaning", &t.leaning, 1);
    } catch (const std::invalid_argument& error) {
        report.ok = false;
        report.fault.sentence = error.what();
    }
    return report;
}
