// One instruction of one pipe: legality, operands checked against shadow memory, work done now or deferred.
#pragma once

#include <cstring>
#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "pipeline.h"
#include "scheduler.h"

namespace twin {

inline const char* name_of(AscendC::TPosition p)
{
    static const char* const names[] = {"GM",  "A1",   "A2",        "B1",           "B2",     "C1",
                                        "C2",  "CO1",  "CO2",       "VECIN",        "VECOUT", "VECCALC",
                                        "SPM", "TSCM", "C2PIPE2GM", "C2PIPE2LOCAL", "MAX"};
    return names[static_cast<int>(p)];
}

// An operand: where it starts, and the buffer it must stay in.
struct Span {
    Memory* memory = nullptr;
    size_t begin = 0;  // byte offset in the memory
    size_t low = 0;    // the tensor's own buffer
    size_t high = 0;
    AscendC::TPosition position = AscendC::TPosition::GM;

    uint8_t* data() const { return memory->data() + begin; }
    std::string describe(size_t offset) const
    {
        std::ostringstream out;
        if (memory->space() == Space::GM) {
            out << "GM " << memory->name() << '+' << begin + offset;
        } else {
            out << name_of(memory->space()) << "+0x" << std::hex << begin + offset << " (" << name_of(position) << ')';
        }
        return out.str();
    }
};

// Calls that a 310P does not have, by their pages (docs/ascend/310p.md).
inline bool exists_on_310p(const char* call)
{
    static const char* const missing[] = {"CrossCoreSetFlag",  "CrossCoreWaitFlag", "Fixpipe",   "DataCopyPad",
                                          "SetSaturationFlag", "GetSaturationFlag", "ShiftLeft", "ShiftRight",
                                          "SyncAll",           "GetSubBlockIdx",    "DataCacheCleanAndInvalid"};
    for (const char* name : missing) {
        if (std::strcmp(call, name) == 0) return false;
    }
    return true;
}

constexpr const char* kNoBf16 = "an Ascend 310P has no bfloat16";

// Starts a call: remembers it for reports and lets another core run, by chance.
inline Core& begin_call(const char* call, Pipe pipe, Here here)
{
    Core& c = core();
    Scheduler::maybe_switch();
    c.call = call;
    c.here = here;
    c.pipe = pipe;
    c.require(c.kind != CoreKind::ai || exists_on_310p(call), FaultKind::core,
              std::string(call) + " does not exist on an Ascend 310P");
    c.require(c.has(pipe), FaultKind::core,
              std::string("pipe ") + name_of(pipe) + " does not exist on " + described(c.kind));
    return c;
}

class Instruction {
public:
    Instruction(const char* call, Pipe pipe, Here here) : core_(begin_call(call, pipe, here)), pipe_(pipe)
    {
        me_ = core_.issue(pipe);
        me_.site = launch->site(call, here);
        by_.me = me_;
        by_.clock = &core_.clocks[index_of(pipe)];
        by_.resolved = &resolved_;
        by_.scalar_synchronised = core_.kind == CoreKind::aiv;  // --cce-auto-sync=on, the default
        by_.own_pipe_in_order = pipe == Pipe::V && !core_.options.strict_vector;
        by_.check_init = by_.check_races = !is_deferred();
    }

    Core& core() const { return core_; }
    void require(bool holds, FaultKind kind, const std::string& sentence) const
    {
        core_.require(holds, kind, sentence);
    }
    template <typename T>
    void fits(const Field<T>& field, const char* name, int64_t low, int64_t high) const
    {
        in_range(field.full(), name, low, high);
    }
    void in_range(int64_t value, const char* name, int64_t low, int64_t high) const
    {
        if (value >= low && value <= high) return;
        core_.fault(FaultKind::range, "",
                    std::string(name) + " = " + std::to_string(value) + " is outside [" + std::to_string(low) + ", " +
                        std::to_string(high) + "]");
    }
    void own_pipe_in_order() { by_.own_pipe_in_order = true; }
    void unit_flag() { by_.unit_flag = true; }

    void lies_in(const Span& s, std::initializer_list<Space> spaces, const char* operand) const
    {
        std::string wanted;
        for (Space space : spaces) {
            if (s.memory != nullptr && s.memory->space() == space) return;
            wanted += (wanted.empty() ? "" : " or ") + std::string(name_of(space));
        }
        if (s.memory == nullptr)
            core_.fault(FaultKind::position, "", std::string(operand) + " is a tensor without memory");
        core_.fault(FaultKind::position, s.describe(0), std::string(operand) + " must lie in " + wanted);
    }
    void aligned(const Span& s, size_t bytes, const char* operand) const
    {
        if (s.begin % bytes == 0) return;
        core_.fault(FaultKind::alignment, s.describe(0),
                    std::string(operand) + " must start at a multiple of " + std::to_string(bytes) + " bytes");
    }

    void read(const Span& s, size_t offset, size_t bytes)
    {
        if (bytes == 0) return;
        inside(s, offset, bytes, "reads");
        if (const Conflict c = s.memory->note_read(by_, s.begin + offset, bytes)) report(s, c, "reads");
    }
    void write(const Span& s, size_t offset, size_t bytes)
    {
        if (bytes == 0) return;
        inside(s, offset, bytes, "writes");
        if (const Conflict c = s.memory->note_write(by_, s.begin + offset, bytes)) report(s, c, "writes");
    }

    // A copy hands uninitialised bytes on instead of reporting them: fractals and padded columns carry some that nobody
    // uses. It is a fault only when nothing that was copied is initialised. Call after read and write.
    void copies()
    {
        copy_checked_ = by_.check_init;
        by_.check_init = false;
    }
    void hand_on(const Span& dst, size_t to, size_t to_bytes, const Span& src, size_t from, size_t from_bytes)
    {
        if (!copy_checked_) return;
        if (src.memory->initialised(src.begin + from, from_bytes)) {
            copied_something_ = true;
        } else if (from_bytes > 1) {  // the two sizes differ where Fixpipe narrows
            const size_t half_from = from_bytes / 2, half_to = to_bytes * half_from / from_bytes;
            hand_on(dst, to, half_to, src, from, half_from);
            hand_on(dst, to + half_to, to_bytes - half_to, src, from + half_from, from_bytes - half_from);
        } else {
            dst.memory->forget(dst.begin + to, to_bytes);
        }
    }
    void copied(const Span& src) const
    {
        if (!copy_checked_ || copied_something_) return;
        core_.fault(FaultKind::uninitialised, src.describe(0), "copies memory that nobody has written");
    }

    // Does the work now, or keeps it for later. The closure must own what it needs.
    template <typename F>
    void run(F&& work)
    {
        Clock& clock = core_.clocks[index_of(pipe_)];
        for (Epoch e : resolved_) clock.raise(e.thread, e.seq);
        if (!is_deferred()) {
            work();
        } else if (pipe_ == Pipe::S) {
            for (Epoch e : resolved_) force(e);
            work();
        } else {
            core_.queues[index_of(pipe_)].push_back(Work{me_.seq, resolved_, std::forward<F>(work)});
        }
    }

private:
    void inside(const Span& s, size_t offset, size_t bytes, const char* verb) const
    {
        const size_t from = s.begin + offset;
        if (from >= s.low && from + bytes <= s.high && from + bytes <= s.memory->size()) return;
        core_.fault(FaultKind::bounds, s.describe(offset),
                    std::string(verb) + ' ' + std::to_string(bytes) + " bytes, but the tensor's buffer ends after " +
                        std::to_string(s.high - s.low) + " bytes at +" + std::to_string(s.high));
    }
    [[noreturn]] void report(const Span& s, const Conflict& c, const char* verb) const
    {
        const std::string where = s.describe(c.at - s.begin);
        if (c.what == Conflict::uninitialised) {
            core_.fault(FaultKind::uninitialised, where, "reads memory that nobody has written");
        }
        core_.fault(FaultKind::race, where,
                    std::string(verb) + " what " + launch->describe(c.other) + (c.other_wrote ? " wrote" : " reads") +
                        ", without an order between the two");
    }

    Core& core_;
    Pipe pipe_;
    Epoch me_;
    Accessor by_;
    std::vector<Epoch> resolved_;
    bool copy_checked_ = false;
    bool copied_something_ = false;
};

}  // namespace twin
