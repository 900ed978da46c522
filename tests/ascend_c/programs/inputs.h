// What the programs of the kernels share: numbers and arrays of a call.
#pragma once

#include "binding/pointers.h"
#include "binding/probes.h"
#include "harness.h"
#include "tiling/decode_plan.h"

// In a build of mutants, the one to run.
inline void choose_mutant([[maybe_unused]] const harness::Arguments& a)
{
#ifdef PASA_MUTANTS
    pasa_mutant = a.number("mutant");
#endif
}

inline double real(const harness::Arguments& a, const char* key) { return std::atof(a.text(key, "0").c_str()); }

// An array that a program was given or is to give, by name; empty without one.
template <typename T>
inline std::vector<T> given(const harness::Arguments& a, const char* name, bool there = true)
{
    return there ? a.load<T>(name) : std::vector<T>();
}

template <typename T>
inline void* data(std::vector<T>& array)
{
    return array.empty() ? nullptr : array.data();
}

inline pasa::Shape shape_of(const harness::Arguments& a)
{
    const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    return {number("batch"), number("heads"), number("kv_heads"), number("rows"), number("keys"), number("dim")};
}

// A call of decoding, on q (tokens, heads, D), or with the heads of a KV head together (`grouped`): rows of keys
// (B, Hkv, Skv, D), or pages (pages, slots, Hkv, D).
struct DecodeInputs {
    explicit DecodeInputs(const harness::Arguments& a) : arguments(a), shape(shape_of(a))
    {
        const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
        settings.causal = a.number("causal") != 0;
        settings.saturates = a.text("overflow") == "saturate";
        settings.has_lengths = a.number("lengths") != 0;
        settings.has_sinks = a.number("sinks") != 0;
        settings.unbiased_columns = number("unbiased_columns");
        settings.to_bf16 = a.number("to_bf16") != 0;
        settings.scale = real(a, "scale");
        layout.tokens = number("tokens");
        layout.has_starts = a.number("starts") != 0;
        layout.pages = number("pages");
        layout.slots = number("slots");
        layout.table_columns = number("table_columns");
        const uint64_t dim = shape.dim, group = shape.heads / shape.kv_heads;
        const bool grouped = a.number("grouped") != 0;
        layout.q_head = (grouped ? shape.rows : 1) * group * dim;
        layout.q_token = (grouped ? group : shape.heads) * dim;
        layout.k = layout.pages > 0
                       ? pasa::CacheStrides{layout.slots * shape.kv_heads * dim, dim, shape.kv_heads * shape.dim}
                       : pasa::CacheStrides{shape.keys * shape.kv_heads * dim, shape.keys * dim, shape.dim};
        layout.v = layout.k;
        q = given<half>(a, "q"), k = given<half>(a, "k"), v = given<half>(a, "v");
        table = given<int32_t>(a, "table", layout.pages > 0);
        lengths = given<int32_t>(a, "lengths", settings.has_lengths);
        starts = given<int32_t>(a, "starts", layout.has_starts);
        sinks = given<float>(a, "sinks", settings.has_sinks);
        out.resize(rows() * shape.dim);
    }

    size_t rows() const { return size_t{shape.rows} * shape.heads; }
    pasa::DecodePointers pointers(void* lse, void* workspace)
    {
        return {data(q),      data(k),     data(v),   data(table), data(lengths),
                data(starts), data(sinks), data(out), lse,         workspace};
    }
    void save(const std::vector<float>& lse) const
    {
        arguments.save("out", out.data(), out.size());
        arguments.save("lse", lse.data(), lse.size());
    }

    const harness::Arguments& arguments;
    pasa::Shape shape;
    pasa::Settings settings;
    pasa::DecodeLayout layout;
    std::vector<half> q, k, v, out;
    std::vector<int32_t> table, lengths, starts;
    std::vector<float> sinks;
};

// What `pasa check-device --npu` asks of a vector unit, on x and y. `launch` takes the pointers, the probe and a count.
template <typename Launch>
twin::Report run_vector_probe(const harness::Arguments& a, Launch launch)
{
    choose_mutant(a);
    auto x = given<float>(a, "x"), y = given<float>(a, "y");
    std::vector<float> z(x.size());
    const twin::Report report = launch(pasa::VectorProbePointers{data(x), data(y), data(z)},
                                       static_cast<uint32_t>(a.number("probe")), static_cast<uint32_t>(x.size()));
    a.save("z", z.data(), z.size());
    return report;
}

// The same of a cube unit, on a (m, k) and b (n, k). `launch` takes the pointers, m, n and k.
template <typename Launch>
twin::Report run_product_probe(const harness::Arguments& a, Launch launch)
{
    choose_mutant(a);
    const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    auto left = given<half>(a, "a"), right = given<half>(a, "b"), stale = given<half>(a, "stale");
    std::vector<float> c(size_t{3} * pasa::kTileRows * pasa::kBlockKeys);
    const twin::Report report = launch(pasa::ProductProbePointers{data(left), data(right), data(stale), data(c)},
                                       number("m"), number("n"), number("k"));
    a.save("c", c.data(), c.size());
    return report;
}
