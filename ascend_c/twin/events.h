// Flags between the pipes of one core. SetFlag runs in the source pipe after all that pipe was given; WaitFlag holds
// up the destination pipe. Pages "SetFlag/WaitFlag" and "synchronisation within a core".
#pragma once

#include <string>

#include "tensor.h"

namespace twin {

using AscendC::HardEvent;

struct EventPipes {
    Pipe source;
    Pipe destination;
    bool on_aic;  // the pairs that exist on each core: tables 2 and 3 of "synchronisation within a core"
    bool on_aiv;
    const char* name;
};

inline const EventPipes& pipes_of(HardEvent event)
{
    static const EventPipes table[] = {
        {Pipe::MTE2, Pipe::MTE1, true, false, "MTE2_MTE1"},
        {Pipe::MTE1, Pipe::MTE2, true, false, "MTE1_MTE2"},
        {Pipe::MTE1, Pipe::M, true, false, "MTE1_M"},
        {Pipe::M, Pipe::MTE1, true, false, "M_MTE1"},
        {Pipe::MTE2, Pipe::V, false, true, "MTE2_V"},
        {Pipe::V, Pipe::MTE2, false, true, "V_MTE2"},
        {Pipe::MTE3, Pipe::V, false, true, "MTE3_V"},
        {Pipe::V, Pipe::MTE3, false, true, "V_MTE3"},
        {Pipe::M, Pipe::V, false, false, "M_V"},
        {Pipe::V, Pipe::M, false, false, "V_M"},
        {Pipe::V, Pipe::V, false, true, "V_V"},
        {Pipe::MTE3, Pipe::MTE1, true, false, "MTE3_MTE1"},
        {Pipe::MTE1, Pipe::MTE3, true, false, "MTE1_MTE3"},
        {Pipe::MTE1, Pipe::V, false, false, "MTE1_V"},
        {Pipe::MTE2, Pipe::M, true, false, "MTE2_M"},
        {Pipe::M, Pipe::MTE2, true, false, "M_MTE2"},
        {Pipe::V, Pipe::MTE1, false, false, "V_MTE1"},
        {Pipe::M, Pipe::FIX, true, false, "M_FIX"},
        {Pipe::FIX, Pipe::M, true, false, "FIX_M"},
        {Pipe::MTE3, Pipe::MTE2, true, true, "MTE3_MTE2"},
        {Pipe::MTE2, Pipe::MTE3, true, true, "MTE2_MTE3"},
        {Pipe::S, Pipe::V, false, true, "S_V"},
        {Pipe::V, Pipe::S, false, true, "V_S"},
        {Pipe::S, Pipe::MTE2, true, true, "S_MTE2"},
        {Pipe::MTE2, Pipe::S, true, true, "MTE2_S"},
        {Pipe::S, Pipe::MTE3, true, true, "S_MTE3"},
        {Pipe::MTE3, Pipe::S, true, true, "MTE3_S"},
        {Pipe::MTE2, Pipe::FIX, true, false, "MTE2_FIX"},
        {Pipe::FIX, Pipe::MTE2, true, false, "FIX_MTE2"},
        {Pipe::FIX, Pipe::S, true, false, "FIX_S"},
        {Pipe::M, Pipe::S, true, false, "M_S"},
        {Pipe::FIX, Pipe::MTE3, true, false, "FIX_MTE3"},
        {Pipe::MTE1, Pipe::FIX, true, false, "MTE1_FIX"},
        {Pipe::FIX, Pipe::MTE1, true, false, "FIX_MTE1"},
        {Pipe::FIX, Pipe::FIX, true, false, "FIX_FIX"},
    };
    return table[static_cast<int>(event)];
}

enum class Caller { kernel, framework };  // framework: a queue or TPipe itself

inline EventFlag& flag_of(Core& c, HardEvent event, int32_t id, Caller caller)
{
    const EventPipes& e = pipes_of(event);
    const std::string what = std::string(e.name) + " with event id " + std::to_string(id);
    const bool on_ai = e.source != Pipe::FIX && e.destination != Pipe::FIX;
    c.require(c.kind == CoreKind::ai ? on_ai : c.kind == CoreKind::aic ? e.on_aic : e.on_aiv, FaultKind::core,
              std::string(e.name) + " does not exist on this core");
    c.require(id >= 0 && id < kEventIds, FaultKind::event_id, what + ": ids are 0 to 7");
    EventFlag& flag = c.flags[static_cast<int>(event)][id];
    if (caller == Caller::kernel && c.tpipe != nullptr) {
        c.require(!flag.owned, FaultKind::event_id, what + " belongs to a queue or to TPipe itself");
        c.require(flag.allocated || flag.fetched, FaultKind::event_id,
                  what + " was neither allocated nor fetched from TPipe, which a kernel with a TPipe must do");
    }
    return flag;
}

inline void set_flag(HardEvent event, int32_t id, Here here, Caller caller = Caller::kernel)
{
    const EventPipes& e = pipes_of(event);
    Core& c = begin_call("SetFlag", e.source, here);
    EventFlag& flag = flag_of(c, event, id, caller);
    const std::string what = std::string(e.name) + '(' + std::to_string(id) + ')';
    c.require(!flag.set, FaultKind::flag, what + " is set a second time before anybody waited for it");
    flag.at_set = c.finished(e.source);
    // Only the kernel's own flags: how the vendor's queues pick their event ids is their affair.
    const uint16_t waiter = thread_of(c.id, e.destination);
    const bool checked = caller == Caller::kernel && !is_deferred();
    c.require(!checked || flag.wait_seq == 0 || flag.at_set[waiter] >= flag.wait_seq, FaultKind::flag,
              what + " may be set again before the last WaitFlag has run: nothing orders pipe " + name_of(e.source) +
                  " after that wait, and the flag is one bit");
    flag.set = true;
    flag.set_seq = c.seqs[index_of(e.source)];
    if (is_deferred() && e.source != Pipe::S) c.queues[index_of(e.source)].push_back(Work{flag.set_seq, {}, nullptr});
    ++c.counters.syncs[std::string("SetFlag<") + e.name + '>'];
}

inline void wait_flag(HardEvent event, int32_t id, Here here, Caller caller = Caller::kernel)
{
    const EventPipes& e = pipes_of(event);
    Core& c = begin_call("WaitFlag", e.destination, here);
    EventFlag& flag = flag_of(c, event, id, caller);
    // The twin follows program order: a wait whose set comes later in the program is reported too.
    c.require(flag.set, FaultKind::deadlock,
              std::string(e.name) + '(' + std::to_string(id) + ") is not set: pipe " + name_of(e.destination) +
                  " waits for ever");
    flag.set = false;
    const Epoch me = c.issue(e.destination);
    c.clocks[index_of(e.destination)].join(flag.at_set);
    flag.wait_seq = me.seq;
    const Epoch source{flag.set_seq, thread_of(c.id, e.source), 0};
    if (is_deferred() && e.destination == Pipe::S) {
        force(source);
    } else if (is_deferred() && e.source != Pipe::S) {
        c.queues[index_of(e.destination)].push_back(Work{me.seq, {source}, nullptr});
    }
    ++c.counters.syncs[std::string("WaitFlag<") + e.name + '>'];
}

inline void check_flags_at_end(Core& c)
{
    for (int event = 0; event < static_cast<int>(HardEvent::MAX); ++event) {
        for (int id = 0; id < kEventIds; ++id) {
            if (!c.flags[event][id].set) continue;
            c.call = "end of kernel";
            c.fault(FaultKind::flag, "",
                    std::string(pipes_of(static_cast<HardEvent>(event)).name) + '(' + std::to_string(id) +
                        ") is still set at the end: a WaitFlag is missing, and the next kernel inherits the flag");
        }
    }
}

}  // namespace twin
