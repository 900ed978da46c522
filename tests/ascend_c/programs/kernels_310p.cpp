// The 310P's kernels on arrays.
#include "binding/on_twin_310p.h"
#include "harness.h"
#include "inputs.h"
#include "tiling/plan_310p.h"

TWIN_CASE(attend)
{
    const harness::Arguments& a = arguments;
    choose_mutant(a);
    pasa::Settings settings;
    settings.causal = a.number("causal") != 0;
    settings.has_lengths = a.number("lengths") != 0;
    settings.has_sinks = a.number("sinks") != 0;
    settings.has_largest = a.number("largest") != 0;
    settings.left = a.number("left", -1);
    settings.right = a.number("right", -1);
    settings.has_mask = a.number("mask") != 0;
    const auto many = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    settings.mask = {many("mask_batches"), many("mask_heads"), many("batch_stride"), many("head_stride"),
                     many("row_stride")};
    settings.scale = real(a, "scale");
    pasa::AttentionTiling tiling =
        pasa::PlanAttention310P(shape_of(a), settings, static_cast<uint32_t>(a.number("token_rows", 1)));
    pasa::CutKeys(tiling, static_cast<uint32_t>(a.number("parts", 1)));
    const size_t rows = size_t{tiling.batch} * tiling.heads * pasa::RoundUp(tiling.rows, pasa::kFractal);
    auto q = given<half>(a, "q"), keys = given<half>(a, "keys"), v = given<half>(a, "values");
    auto anchors = given<half>(a, "anchors");
    auto units = given<float>(a, "units");
    auto lengths = given<int32_t>(a, "lengths", settings.has_lengths);
    auto sinks = given<float>(a, "sinks", settings.has_sinks);
    auto mask = given<uint8_t>(a, "mask", settings.has_mask);
    auto visits = given<int64_t>(a, "visits", settings.has_mask);
    std::vector<half> out(rows * tiling.dim);
    std::vector<float> lse(rows), largest(settings.has_largest ? rows : 0);
    std::vector<uint8_t> workspace(tiling.workspace_bytes);
    pasa::AttentionPointers pointers{};
    pointers.q = data(q);
    pointers.keys = data(keys);
    pointers.v = data(v);
    pointers.anchors = data(anchors);
    pointers.units = data(units);
    pointers.lengths = data(lengths);
    pointers.sinks = data(sinks);
    pointers.mask = data(mask);
    pointers.visits = data(visits);
    pointers.out = data(out);
    pointers.lse = data(lse);
    pointers.largest = data(largest);
    pointers.workspace = data(workspace);
    const twin::Report report =
        pasa::AttendOnTwin(pointers, tiling, static_cast<uint32_t>(a.number("cores", 1)), a.options());
    a.save("out", out.data(), out.size());
    a.save("lse", lse.data(), lse.size());
    if (settings.has_largest) a.save("largest", largest.data(), largest.size());
    return report;
}

// Decoding of q (tokens, heads, D) and caches: rows of keys (B, Hkv, Skv, D), or pages (pages, slots, Hkv, D).
TWIN_CASE(decode)
{
    choose_mutant(arguments);
    DecodeInputs x(arguments);
    const auto cores = static_cast<uint32_t>(arguments.number("groups", 1));
    const pasa::DecodeTiling tiling = pasa::PlanDecode310P(x.shape, x.layout, x.settings, cores);
    std::vector<float> copies(x.rows() * pasa::kUnitCopies), lse(x.rows());
    std::vector<uint8_t> workspace(tiling.attention.workspace_bytes);
    twin::Report report =
        pasa::DecodeOnTwin(x.pointers(copies.data(), workspace.data()), tiling, cores, arguments.options());
    for (size_t i = 0; i < lse.size(); ++i) lse[i] = copies[i * pasa::kUnitCopies];
    x.save(lse);
    return report;
}

// K' and its anchors from k, and v as fractals.
TWIN_CASE(shift)
{
    const harness::Arguments& a = arguments;
    choose_mutant(a);
    pasa::Shape shape = shape_of(a);
    shape.heads = shape.kv_heads;
    shape.rows = 1;
    const pasa::ShiftTiling tiling = pasa::PlanShift(shape, real(a, "scale"), true, a.number("lengths") != 0, false);
    const size_t blocks = size_t{tiling.heads} * tiling.blocks, numbers = blocks * pasa::kBlockKeys * tiling.dim;
    auto k = given<half>(a, "k"), v = given<half>(a, "v");
    auto lengths = given<int32_t>(a, "lengths", tiling.has_lengths != 0);
    std::vector<half> keys(numbers), values(numbers), anchors(blocks * 2 * tiling.dim);
    std::vector<float> units(blocks * pasa::kUnitCopies);
    const uint32_t cores = static_cast<uint32_t>(a.number("cores", 3));
    const pasa::ShiftPointers pointers{data(k),    data(lengths), nullptr,    nullptr,
                                       data(keys), data(anchors), data(units)};
    twin::Report report = pasa::ShiftOnTwin(pointers, tiling, cores, a.options());
    if (report.ok) report = pasa::LayOutOnTwin({data(v), data(lengths), data(values)}, tiling, cores, a.options());
    a.save("keys", keys.data(), keys.size());
    a.save("values", values.data(), values.size());
    a.save("anchors", anchors.data(), anchors.size());
    a.save("units", units.data(), units.size());
    return report;
}

TWIN_CASE(probe_vector)
{
    return run_vector_probe(arguments, [&](const auto& pointers, uint32_t probe, uint32_t count) {
        return pasa::ProbeVectorOnTwin(pointers, probe, count, arguments.options());
    });
}

TWIN_CASE(probe_product)
{
    return run_product_probe(arguments, [&](const auto& pointers, uint32_t m, uint32_t n, uint32_t k) {
        return pasa::ProbeProductOnTwin(pointers, m, n, k, arguments.options());
    });
}

// The sentence with which PlanAttention310P refuses a call, as a fault.
TWIN_CASE(plan)
{
    pasa::Settings settings;
    settings.exact = arguments.number("exact", 1) != 0;
    settings.has_mask = arguments.number("mask") != 0;
    settings.causal = arguments.number("causal") != 0;
    settings.unbiased_columns = static_cast<uint32_t>(arguments.number("unbiased_columns"));
    settings.to_bf16 = arguments.number("to_bf16") != 0;
    settings.scale = real(arguments, "scale");
    twin::Report report;
    try {
        pasa::PlanAttention310P(shape_of(arguments), settings, static_cast<uint32_t>(arguments.number("token_rows", 1)));
    } catch (const std::invalid_argument& error) {
        report.ok = false;
        report.fault.sentence = error.what();
    }
    return report;
}
