// The host's side: GM allocations by name, and kernel launches that return a report.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fixpipe.h"
#include "l0c_to_ub.h"

namespace twin {

enum class Role {
    input,       // filled by the host; a kernel that writes it is in error
    output,      // poisoned at each launch
    workspace,   // poisoned at each launch
    persistent,  // kept from launch to launch
};

struct Report {
    bool ok = true;
    Fault fault;
    std::vector<std::pair<std::string, Counters>> cores;
    std::vector<std::pair<std::string, size_t>>
        undefined;  // output bytes that nobody wrote, or that hold nothing defined

    Counters total(CoreKind kind) const
    {
        Counters sum;
        for (const auto& [name, counters] : cores) {
            if (name.rfind(std::string(name_of(kind)) + ' ', 0) == 0) sum.add(counters);
        }
        return sum;
    }
    std::string json() const
    {
        std::string out = std::string("{\"ok\": ") + (ok ? "true" : "false");
        if (!ok) out += ", \"fault\": " + twin::json(fault);
        out += ", \"undefined\": {";
        const char* comma = "";
        for (const auto& [name, bytes] : undefined) {
            out += comma + quoted(name) + ": " + std::to_string(bytes);
            comma = ", ";
        }
        out += "}, \"aic\": " + total(CoreKind::aic).json() + ", \"aiv\": " + total(CoreKind::aiv).json() +
               ", \"ai\": " + total(CoreKind::ai).json() + ", \"cores\": {";
        comma = "";
        for (const auto& [name, counters] : cores) {
            out += comma + ('"' + name) + "\": " + counters.json();
            comma = ", ";
        }
        return out + "}}";
    }
};

class Device {
public:
    // 512-byte aligned, with guards on both sides.
    uint8_t* allocate(const std::string& name, size_t bytes, Role role)
    {
        gm_.push_back(Allocation{std::make_unique<Memory>(name, Space::GM, bytes, role != Role::input), role});
        if (role == Role::input) gm_.back().memory->set_initialised();
        return gm_.back().memory->data();
    }
    template <typename T>
    T* input(const std::string& name, const std::vector<T>& values)
    {
        uint8_t* p = allocate(name, values.size() * sizeof(T), Role::input);
        std::memcpy(p, values.data(), values.size() * sizeof(T));
        return reinterpret_cast<T*>(p);
    }
    template <typename T>
    T* output(const std::string& name, size_t elements)
    {
        return reinterpret_cast<T*>(allocate(name, elements * sizeof(T), Role::output));
    }
    template <typename T>
    T* workspace(const std::string& name, size_t elements)
    {
        return reinterpret_cast<T*>(allocate(name, elements * sizeof(T), Role::workspace));
    }
    // What one launch writes and a later one reads.
    template <typename T>
    T* persistent(const std::string& name, size_t elements)
    {
        return reinterpret_cast<T*>(allocate(name, elements * sizeof(T), Role::persistent));
    }

    // Runs `kernel` on every core of `blocks` blocks: a cube core and two vector cores each, or one core each.
    Report launch(const std::string& name, int blocks, const Options& options, const std::function<void()>& kernel)
    {
        Launch l;
        l.kernel = name;
        l.options = options;
        l.blocks = blocks;
        make_cores(l);
        const auto hashes = input_hashes();
        for (Allocation& a : gm_) {
            const bool unseen = options.deviation == Deviation::launch_order && launched_;
            if (a.role == Role::output || a.role == Role::workspace || (unseen && a.role == Role::persistent)) {
                a.memory->poison();
            }
            a.memory->forget_order();
            l.gm.push_back(a.memory.get());
        }
        launched_ = true;
        twin::launch = &l;
        Report report;
        const int available = options.shape == Shape::aiv_only  ? options.chip.aiv_cores
                              : options.shape == Shape::ai_core ? options.chip.ai_cores
                                                                : options.chip.aic_cores;
        if (blocks < 1 || blocks > available) {
            report.ok = false;
            report.fault = Fault{
                FaultKind::range,
                name,
                "host",
                "",
                "launch",
                "",
                0,
                "",
                std::to_string(blocks) + " blocks on a chip that runs " + std::to_string(available) + " at a time"};
        } else {
            report.ok = Scheduler(l, kernel).run(report.fault);
        }
        if (report.ok) finish(l, hashes, report);
        for (auto& c : l.cores) report.cores.emplace_back(c->name(), c->counters);
        for (const Allocation& a : gm_) {
            if (a.role == Role::output)
                report.undefined.emplace_back(a.memory->name(), a.memory->uninitialised_bytes());
        }
        twin::launch = nullptr;
        current = nullptr;
        return report;
    }

private:
    struct Allocation {
        std::unique_ptr<Memory> memory;
        Role role;
    };

    static void make_cores(Launch& l)
    {
        const bool mixed = l.options.shape == Shape::mix_1_2;
        const int per_block = mixed ? 3 : 1;
        const size_t threads = static_cast<size_t>(std::max(l.blocks, 1) * per_block * kPipes);
        for (int i = 0; i < l.blocks * per_block; ++i) {
            const bool cube = mixed ? i % 3 == 0 : l.options.shape == Shape::aic_only;
            const CoreKind kind = l.options.shape == Shape::ai_core ? CoreKind::ai
                                  : cube                            ? CoreKind::aic
                                                                    : CoreKind::aiv;
            l.cores.push_back(std::make_unique<Core>(i, kind, i / per_block, mixed && !cube ? i % 3 - 1 : 0, threads,
                                                     l.options));
            l.cores.back()->kernel_name = l.kernel;
        }
    }

    std::vector<uint64_t> input_hashes() const
    {
        std::vector<uint64_t> hashes;
        for (const Allocation& a : gm_) {
            uint64_t h = 1469598103934665603ull;
            for (size_t i = 0; a.role == Role::input && i < a.memory->size(); ++i)
                h = (h ^ a.memory->data()[i]) * 1099511628211ull;
            hashes.push_back(h);
        }
        return hashes;
    }

    // What is still deferred, then the checks at the end of a kernel.
    void finish(Launch& l, const std::vector<uint64_t>& hashes, Report& report)
    {
        try {
            std::vector<Core*> order;
            for (auto& c : l.cores) order.push_back(c.get());
            if (l.options.seed / 2 % 2 == 0)
                std::reverse(order.begin(), order.end());  // vector cores first, or cube cores
            for (Core* c : order) {
                current = c;
                drain(*c);
            }
            for (auto& c : l.cores) {
                current = c.get();
                check_flags_at_end(*c);
                check_unit_flags_at_end(*c);
                check_cross_core_at_end(*c);
            }
            for (size_t i = 0; i < gm_.size(); ++i) {
                const Memory& m = *gm_[i].memory;
                l.cores[0]->require(m.guards_intact(), FaultKind::guard,
                                    "the memory beside GM " + m.name() + " was overwritten");
            }
            const std::vector<uint64_t> after = input_hashes();
            for (size_t i = 0; i < gm_.size(); ++i) {
                l.cores[0]->require(after[i] == hashes[i], FaultKind::guard,
                                    "the kernel wrote GM " + gm_[i].memory->name() + ", which is an input");
            }
        } catch (const FaultError& e) {
            report.ok = false;
            report.fault = e.fault;
        }
    }

    std::vector<Allocation> gm_;
    bool launched_ = false;  // before
};

}  // namespace twin
