// One core: its memories, its pipes with their clocks and deferred work, its flags, mask and control state.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "counters.h"
#include "faults.h"
#include "memory.h"
#include "options.h"
#include "vendor_types.h"

namespace twin {

// A cube core, a vector core, and the core of a 310P that has both units.
enum class CoreKind : uint8_t { aic, aiv, ai };

inline const char* name_of(CoreKind kind)
{
    static const char* const names[] = {"aic", "aiv", "ai"};
    return names[static_cast<int>(kind)];
}
inline const char* described(CoreKind kind)
{
    static const char* const names[] = {"a cube core", "a vector core", "the core of a 310P"};
    return names[static_cast<int>(kind)];
}


// An event flag between two pipes of one core. The flag is one bit: setting it again before the waiting pipe is known
// to have cleared it loses a set (vendor page "SetFlag/WaitFlag").
struct EventFlag {
    bool set = false;
    Clock at_set;            // what the source pipe had completed
    uint32_t set_seq = 0;    // for deferred work
    uint32_t wait_seq = 0;   // the destination pipe's last wait
    bool allocated = false;  // taken from the pool by AllocEventID, a queue or TPipe itself
    bool fetched = false;    // handed out by FetchEventID
    bool owned = false;      // by a queue or by TPipe: not for the kernel's own SetFlag and WaitFlag
};

// One completed cross-core set, ready to be waited for.
struct Release {
    Clock clock;
    std::vector<Epoch> setters;  // whose pipes must have got there, for deferred work
};

struct Work {
    uint32_t seq = 0;
    std::vector<Epoch> after;  // on this core
    std::function<void()> run;
};

struct VectorMask {
    bool counter = false;
    uint64_t high = ~0ull;
    uint64_t low = ~0ull;
};

// A line of GM that the scalar unit has read: it may go on reading this copy until the line is invalidated.
struct CachedLine {
    uint64_t writes = 0;  // to the line, when it was read
    std::array<uint8_t, Memory::kCacheLine> bytes{};
};

class Core;
struct Launch;
inline Launch* launch = nullptr;  // the kernel that is running
inline Core* current = nullptr;   // the core whose fiber is running

class Core {
public:
    Core(int id_, CoreKind kind_, int group_, int sub_, size_t threads, const Options& o)
        : id(id_),
          kind(kind_),
          group(group_),
          sub(sub_),
          options(o),
          rng(o.seed * 1000003u + static_cast<uint64_t>(id_))
    {
        for (Clock& clock : clocks) clock = Clock(threads);
        const bool mixed = o.shape == Shape::mix_1_2;
        if (kind == CoreKind::ai) {  // Brcb and Select write into the last 8 KiB of UB, whatever the compiler's options
            add(Space::UB, o.chip.ub);
            capacity[index(Space::UB)] = o.chip.ub - o.chip.ub_reserved_select;
        } else if (kind == CoreKind::aiv) {
            add(Space::UB, o.chip.ub);
            capacity[index(Space::UB)] = o.chip.ub - (mixed ? o.chip.ub_reserved_mix : 0) -
                                         (o.asc_reserved_ubuf ? o.chip.ub_reserved_select : 0);
        }
        if (kind != CoreKind::aiv) {
            add(Space::L1, o.chip.l1);
            capacity[index(Space::L1)] = o.chip.l1 - (mixed ? o.chip.l1_reserved_mix : 0);
            add(Space::L0A, o.chip.l0a);
            add(Space::L0B, o.chip.l0b);
            add(Space::L0C, o.chip.l0c);
            finished_units.resize(o.chip.l0c / kFractalBytes);
        }
        const bool may_saturate = o.deviation != Deviation::no_saturation;
        const bool float_too = o.saturate_float || o.deviation == Deviation::float_saturation;
        saturate = may_saturate && (kind == CoreKind::ai || o.overflow == Overflow::saturate);
        saturate_float = kind == CoreKind::ai && float_too;
    }

    static int index(Space space) { return static_cast<int>(space); }
    std::string name() const { return std::string(twin::name_of(kind)) + ' ' + std::to_string(block_index()); }
    // What GetBlockIdx returns: the group on a cube core, group * 2 + sub on a vector core of a mixed kernel.
    int block_index() const
    {
        return options.shape == Shape::mix_1_2 && kind == CoreKind::aiv ? group * 2 + sub : group;
    }
    Memory* memory(Space space) { return memories[index(space)].get(); }
    bool has(Pipe pipe) const
    {
        if (kind == CoreKind::ai) return pipe != Pipe::FIX;
        if (pipe == Pipe::V) return kind == CoreKind::aiv;
        if (pipe == Pipe::M || pipe == Pipe::MTE1 || pipe == Pipe::FIX) return kind == CoreKind::aic;
        return true;
    }

    [[noreturn]] void fault(FaultKind kind_of_fault, const std::string& buffer, const std::string& sentence) const
    {
        throw FaultError{
            Fault{kind_of_fault, kernel_name, name(), name_of(pipe), call, here.file, here.line, buffer, sentence}};
    }
    void require(bool holds, FaultKind kind_of_fault, const std::string& sentence) const
    {
        if (!holds) fault(kind_of_fault, "", sentence);
    }

    // The next instruction of a pipe. Everything the scalar pipe has waited for comes before it, because the scalar
    // pipe issues all instructions in program order.
    Epoch issue(Pipe p)
    {
        Clock& clock = clocks[index_of(p)];
        if (p != Pipe::S && joined[index_of(p)] != scalar_clock().version()) {
            clock.join(scalar_clock());
            joined[index_of(p)] = scalar_clock().version();
        }
        const Epoch e{++seqs[index_of(p)], thread_of(id, p), 0};
        if (p == Pipe::S) clock.raise(e.thread, e.seq);  // scalar instructions are in order
        return e;
    }
    Clock& scalar_clock() { return clocks[index_of(Pipe::S)]; }
    // What is complete once the pipe has finished all it was given.
    Clock finished(Pipe p)
    {
        issue(p);
        Clock clock = clocks[index_of(p)];
        clock.raise(thread_of(id, p), seqs[index_of(p)]);
        return clock;
    }

    const int id;
    const CoreKind kind;
    const int group;
    const int sub;
    const Options& options;
    std::string kernel_name;

    std::array<Clock, kPipes> clocks;
    std::array<uint32_t, kPipes> seqs{};
    std::array<uint64_t, kPipes> joined{};
    std::array<std::deque<Work>, kPipes> queues;  // deferred mode
    std::array<uint32_t, kPipes> done{};          // deferred mode: the last instruction whose work is done

    EventFlag flags[static_cast<int>(AscendC::HardEvent::MAX)][kEventIds];
    std::deque<Release> releases[kCrossCoreFlags];
    std::vector<bool> finished_units;  // of L0C, by unitFlag
    VectorMask mask;
    bool saturate = false;
    bool saturate_float = false;
    template <typename T>
    bool saturates() const
    {
        return sizeof(T) == sizeof(float) ? saturate_float : saturate;
    }
    bool cross_core_sync = true;  // false in AIC_ONLY and AIV_ONLY kernels: the hardware has no scheduler for it there
    void* tpipe = nullptr;        // the live AscendC::TPipe

    std::array<size_t, kSpaces> capacity{};  // what TPipe may hand out
    Counters counters;
    std::map<std::pair<const Memory*, size_t>, CachedLine> data_cache;  // by memory and number of the line
    std::mt19937_64 rng;

    // The call that is being emulated, for reports.
    const char* call = "";
    Here here;
    Pipe pipe = Pipe::S;
    uint16_t site = 0;

private:
    void add(Space space, size_t bytes)
    {
        memories[index(space)] = std::make_unique<Memory>(name() + ' ' + name_of(space), space, bytes);
        capacity[index(space)] = bytes;
    }

    std::array<std::unique_ptr<Memory>, kSpaces> memories;
};

// Everything that belongs to one kernel launch.
struct Launch {
    std::string kernel;
    Options options;
    int blocks = 0;
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<Memory*> gm;  // sorted by address
    // Sets that wait for their partners, by (mode, group or -1, flag) and core.
    std::map<std::tuple<int, int, int>, std::map<int, std::deque<Release>>> pending;
    std::vector<Fault> sites;  // call, file and line of every access site
    std::map<std::tuple<const void*, int, const void*>, uint16_t> site_of;
    bool abandoning = false;

    uint16_t site(const char* call, Here here)
    {
        const auto key =
            std::make_tuple(static_cast<const void*>(here.file), here.line, static_cast<const void*>(call));
        const auto found = site_of.find(key);
        if (found != site_of.end()) return found->second;
        Fault f;
        f.call = call;
        f.file = here.file;
        f.line = here.line;
        sites.push_back(f);
        const uint16_t number = static_cast<uint16_t>(sites.size() - 1);
        site_of.emplace(key, number);
        return number;
    }
    Memory* find_gm(const void* p) const
    {
        for (Memory* memory : gm) {
            if (memory->contains(p)) return memory;
        }
        return nullptr;
    }
    std::string describe(Epoch e) const
    {
        const Fault& s = sites[e.site];
        return s.call + " on pipe " + name_of(e.pipe()) + " of " + cores[static_cast<size_t>(e.core())]->name() + " (" +
               s.file + ":" + std::to_string(s.line) + ")";
    }
};

// Whether this launch is to deviate from what the twin assumes of a device.
inline bool deviates(Deviation how) { return launch->options.deviation == how; }

inline Core& core()
{
    if (current == nullptr) {
        throw FaultError{
            Fault{FaultKind::program, "", "", "", "", "", 0, "", "an Ascend C call outside a kernel launch"}};
    }
    return *current;
}

}  // namespace twin
