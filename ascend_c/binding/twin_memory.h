// The arrays of one launch on the CPU twin: copied in, and out again at its end.
#pragma once

#include <cstring>
#include <functional>
#include <vector>

#include "../kernel/arguments.h"
#include "../kernel/vector_probes.h"
#include "../tiling/decode_plan.h"
#include "pointers.h"
#include "probes.h"

namespace pasa {

// The arrays of one launch.
class TwinMemory {
public:
    template <typename T>
    GM_ADDR Input(const char* name, const void* host, size_t count)
    {
        if (host == nullptr) return nullptr;
        const T* first = static_cast<const T*>(host);
        return reinterpret_cast<GM_ADDR>(device_.input(name, std::vector<T>(first, first + count)));
    }

    template <typename T>
    GM_ADDR Output(const char* name, void* host, size_t count)
    {
        if (host == nullptr) return nullptr;
        T* made = device_.output<T>(name, count);
        outputs_.push_back({host, made, count * sizeof(T)});
        return reinterpret_cast<GM_ADDR>(made);
    }

    // An output of one launch that a later one reads or completes.
    template <typename T>
    GM_ADDR Kept(const char* name, void* host, size_t count)
    {
        T* made = device_.persistent<T>(name, count);
        outputs_.push_back({host, made, count * sizeof(T)});
        return reinterpret_cast<GM_ADDR>(made);
    }

    // An output whose numbers need not all be written.
    template <typename T>
    GM_ADDR Scratch(const char* name, void* host, size_t count)
    {
        T* made = device_.workspace<T>(name, count);
        if (host != nullptr) outputs_.push_back({host, made, count * sizeof(T)});
        return reinterpret_cast<GM_ADDR>(made);
    }

    twin::Report Launch(const char* name, uint32_t cores, const twin::Options& options,
                        const std::function<void()>& kernel)
    {
        const twin::Report report = device_.launch(name, static_cast<int>(cores), options, kernel);
        for (const Copy& c : outputs_) std::memcpy(c.host, c.made, c.bytes);
        return report;
    }

    // With the other overflow mode than the kernel asks for, which it has to leave as it was.
    twin::Report Launch(const char* name, uint32_t cores, bool saturates, twin::Options options,
                        const std::function<void()>& kernel)
    {
        options.overflow = saturates ? twin::Overflow::inf_nan : twin::Overflow::saturate;
        return Launch(name, cores, options, [&] {
            kernel();
            twin::core().require(AscendC::GetSaturationFlag<AscendC::SaturationMode::FLOAT>() != saturates,
                                 twin::FaultKind::program, "the overflow mode is not as the kernel found it");
        });
    }

private:
    struct Copy {
        void* host;
        const void* made;
        size_t bytes;
    };
    twin::Device device_;
    std::vector<Copy> outputs_;
};

// What a launch of decoding reads.
inline DecodeArguments DecodeInputsOf(TwinMemory& memory, const DecodePointers& p, const DecodeTiling& t)
{
    const AttentionTiling& a = t.attention;
    DecodeArguments given{};
    given.q = memory.Input<half>("q", p.q, size_t{a.rows} * a.heads * a.dim);
    given.k = memory.Input<half>("k", p.k, CacheNumbers(t, t.k));
    given.v = memory.Input<half>("v", p.v, CacheNumbers(t, t.v));
    given.table = memory.Input<int32_t>("table", p.table, size_t{a.batch} * t.table_columns);
    given.lengths = memory.Input<int32_t>("lengths", p.lengths, a.batch);
    given.starts = memory.Input<int32_t>("starts", p.starts, (t.has_table ? 1 : 2) * (size_t{a.batch} + 1));
    given.sinks = memory.Input<float>("sinks", p.sinks, a.heads);
    return given;
}

inline VectorProbeArguments ProbeArrays(TwinMemory& memory, const VectorProbePointers& p, uint32_t count)
{
    VectorProbeArguments given{};
    given.x = memory.Input<float>("x", p.x, count);
    given.y = memory.Input<float>("y", p.y, count);
    given.z = memory.Output<float>("z", p.z, count);
    return given;
}

inline ProductProbeArguments ProbeArrays(TwinMemory& memory, const ProductProbePointers& p, uint32_t m, uint32_t n,
                                         uint32_t k)
{
    ProductProbeArguments given{};
    given.a = memory.Input<half>("a", p.a, size_t{m} * k);
    given.b = memory.Input<half>("b", p.b, size_t{n} * k);
    given.stale = memory.Input<half>("stale", p.stale, size_t{kTileRows} * k);
    given.c = memory.Scratch<float>("c", p.c, size_t{3} * kTileRows * kBlockKeys);
    return given;
}

}  // namespace pasa
