// What a kernel spends, per core: bytes per queue, cube work as the hardware pads it, vector work, synchronisation.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "clocks.h"

namespace twin {

struct VectorCount {
    uint64_t instructions = 0;  // calls
    uint64_t repeats = 0;       // 256-byte steps
    uint64_t lanes = 0;         // active lanes

    void add(const VectorCount& o)
    {
        instructions += o.instructions;
        repeats += o.repeats;
        lanes += o.lanes;
    }
};

struct Counters {
    std::array<uint64_t, kPipes> bytes{};  // moved by MTE1, MTE2, MTE3 and FIX
    uint64_t macs = 0;                     // padded to whole fractals
    uint64_t mmads = 0;
    std::map<std::string, VectorCount> vector;  // by data type
    std::map<std::string, VectorCount> calls;   // by call and data type of the source, "Cast half"
    std::map<std::string, uint64_t> syncs;      // "SetFlag<MTE2_V>", "PipeBarrier<V>"
    // Results that are not finite, or were saturated, although all operands are finite; by call ("Fixpipe", "Exp").
    std::map<std::string, uint64_t> overflows;
    uint64_t cross_core_sets = 0;
    uint64_t cross_core_waits = 0;

    void count_overflows(const char* call, uint64_t n)
    {
        if (n > 0) overflows[call] += n;
    }
    void add(const Counters& o)
    {
        for (int i = 0; i < kPipes; ++i) bytes[i] += o.bytes[i];
        macs += o.macs;
        mmads += o.mmads;
        for (const auto& [type, count] : o.vector) vector[type].add(count);
        for (const auto& [call, count] : o.calls) calls[call].add(count);
        for (const auto& [name, count] : o.syncs) syncs[name] += count;
        for (const auto& [name, count] : o.overflows) overflows[name] += count;
        cross_core_sets += o.cross_core_sets;
        cross_core_waits += o.cross_core_waits;
    }

    std::string json() const
    {
        std::string out = "{\"bytes\": {";
        const Pipe movers[] = {Pipe::MTE1, Pipe::MTE2, Pipe::MTE3, Pipe::FIX};
        for (Pipe p : movers) {
            out += std::string(p == Pipe::MTE1 ? "" : ", ") + '"' + name_of(p) +
                   "\": " + std::to_string(bytes[index_of(p)]);
        }
        return out + "}, \"macs\": " + std::to_string(macs) + ", \"mmads\": " + std::to_string(mmads) +
               ", \"vector\": " + json(vector) + ", \"calls\": " + json(calls) + ", \"syncs\": " + json(syncs) +
               ", \"overflows\": " + json(overflows) + ", \"cross_core_sets\": " + std::to_string(cross_core_sets) +
               ", \"cross_core_waits\": " + std::to_string(cross_core_waits) + "}";
    }

private:
    static std::string json(const std::map<std::string, VectorCount>& counts)
    {
        std::string out;
        for (const auto& [name, c] : counts) {
            out += (out.empty() ? "\"" : ", \"") + name + "\": {\"instructions\": " + std::to_string(c.instructions) +
                   ", \"repeats\": " + std::to_string(c.repeats) + ", \"lanes\": " + std::to_string(c.lanes) + "}";
        }
        return '{' + out + '}';
    }
    static std::string json(const std::map<std::string, uint64_t>& counts)
    {
        std::string out;
        for (const auto& [name, count] : counts)
            out += (out.empty() ? "\"" : ", \"") + name + "\": " + std::to_string(count);
        return '{' + out + '}';
    }
};

}  // namespace twin
