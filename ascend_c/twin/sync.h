// Synchronisation and control as kernels write it: kernel_operator_block_sync_intf.h, kernel_operator_common_intf.h,
// kernel_common.h, kernel_operator_sys_var_intf.h.
#pragma once

#include <string>

#include "events.h"

#define ASCEND_IS_AIC (twin::core().kind == twin::CoreKind::aic)
#define ASCEND_IS_AIV (twin::core().kind == twin::CoreKind::aiv)
#define KERNEL_TASK_TYPE_DEFAULT(value) twin::set_kernel_type(value)

namespace twin {

// Cross-core flags do not work in AIC_ONLY and AIV_ONLY kernels (page "CrossCoreSetFlag").
inline void set_kernel_type(KernelMetaType type, Here here = Here::now())
{
    Core& c = begin_call("KERNEL_TASK_TYPE_DEFAULT", Pipe::S, here);
    c.cross_core_sync = type != KERNEL_TYPE_AIV_ONLY && type != KERNEL_TYPE_AIC_ONLY;
    const bool mixed = type == KERNEL_TYPE_MIX_AIC_1_2;
    c.require(mixed == (c.options.shape == Shape::mix_1_2), FaultKind::program,
              "the launch has another shape than the kernel's task type");
}

constexpr Pipe pipe_from(pipe_t p)
{
    switch (p) {
        case PIPE_V: return Pipe::V;
        case PIPE_M: return Pipe::M;
        case PIPE_MTE1: return Pipe::MTE1;
        case PIPE_MTE2: return Pipe::MTE2;
        case PIPE_MTE3: return Pipe::MTE3;
        case PIPE_FIX: return Pipe::FIX;
        default: return Pipe::S;
    }
}

inline void pipe_barrier(pipe_t p, Here here)
{
    Core& c = begin_call("PipeBarrier", p == PIPE_ALL ? Pipe::S : pipe_from(p), here);
    if (p == PIPE_ALL) {
        for (int i = 0; i < kPipes; ++i) {
            const Clock finished = c.finished(static_cast<Pipe>(i));
            c.scalar_clock().join(finished);
            if (is_deferred()) force(Epoch{c.seqs[i], thread_of(c.id, static_cast<Pipe>(i)), 0});
        }
        ++c.counters.syncs["PipeBarrier<ALL>"];
        return;
    }
    const Pipe pipe = pipe_from(p);
    c.clocks[index_of(pipe)] = c.finished(pipe);
    ++c.counters.syncs[std::string("PipeBarrier<") + name_of(pipe) + '>'];
}

// Which cores a set of this mode releases, and which must have set before it does.
inline std::vector<Core*> cores_of(const Core& c, int mode, bool releases)
{
    std::vector<Core*> found;
    for (auto& other : launch->cores) {
        const bool same_group = other->group == c.group;
        const bool same_kind = other->kind == c.kind;
        const bool in = mode == 0   ? same_kind
                        : mode == 1 ? same_group && same_kind
                                    : same_group && same_kind != releases;
        if (in) found.push_back(other.get());
    }
    return found;
}

inline void cross_core_set(int mode, pipe_t p, uint16_t flag_id, Here here)
{
    const Pipe pipe = pipe_from(p);
    Core& c = begin_call("CrossCoreSetFlag", pipe, here);
    const int flag = flag_id % kCrossCoreFlags;  // the hardware keeps the low four bits
    c.require(flag_id < kCrossCoreFlags, FaultKind::cross_core,
              "flag id " + std::to_string(flag_id) + " is cut to " + std::to_string(flag));
    c.require(p != PIPE_S && p != PIPE_ALL, FaultKind::cross_core, "PIPE_S and PIPE_ALL are not allowed here");
    c.require(c.cross_core_sync, FaultKind::cross_core,
              "AIC_ONLY and AIV_ONLY kernels have no cross-core synchronisation");
    c.require(mode == 0 || c.options.shape == Shape::mix_1_2, FaultKind::cross_core,
              "the modes 1 and 2 need a kernel of cube and vector cores");
    c.require(mode != 1 || c.kind == CoreKind::aiv, FaultKind::cross_core,
              "mode 1 is between the two vector cores of a group");
    Release mine{c.finished(pipe), {Epoch{c.seqs[index_of(pipe)], thread_of(c.id, pipe), 0}}};
    if (is_deferred()) c.queues[index_of(pipe)].push_back(Work{mine.setters[0].seq, {}, nullptr});
    ++c.counters.cross_core_sets;

    const std::vector<Core*> setters = cores_of(c, mode, false);
    auto& waiting =
        launch
            ->pending[{mode, mode == 0 ? -1 - static_cast<int>(c.kind) : c.group * 2 + static_cast<int>(c.kind), flag}];
    waiting[c.id].push_back(std::move(mine));
    c.require(waiting[c.id].size() <= static_cast<size_t>(kCrossCoreMax), FaultKind::cross_core,
              "more than 15 outstanding sets of flag " + std::to_string(flag));
    for (Core* s : setters) {
        if (waiting[s->id].empty()) return;  // not all have arrived
    }
    Release all;
    for (Core* s : setters) {
        Release& one = waiting[s->id].front();
        if (all.setters.empty()) {
            all = std::move(one);
        } else {
            all.clock.join(one.clock);
            all.setters.insert(all.setters.end(), one.setters.begin(), one.setters.end());
        }
        waiting[s->id].pop_front();
    }
    for (Core* r : cores_of(c, mode, true)) {
        r->releases[flag].push_back(all);
        c.require(r->releases[flag].size() <= static_cast<size_t>(kCrossCoreMax), FaultKind::cross_core,
                  "the counter of flag " + std::to_string(flag) + " on " + r->name() + " exceeds 15");
    }
}

// On this chip the wait holds up every pipe of the core, whatever its template arguments say (page
// "CrossCoreWaitFlag").
inline void cross_core_wait(uint16_t flag_id, Here here)
{
    Core& c = begin_call("CrossCoreWaitFlag", Pipe::S, here);
    const int flag = flag_id % kCrossCoreFlags;
    c.require(flag_id < kCrossCoreFlags, FaultKind::cross_core,
              "flag id " + std::to_string(flag_id) + " is cut to " + std::to_string(flag));
    c.require(c.cross_core_sync, FaultKind::cross_core,
              "AIC_ONLY and AIV_ONLY kernels have no cross-core synchronisation");
    Scheduler::wait_until(
        [&] { return !c.releases[flag].empty(); },
        "cross-core flag " + std::to_string(flag) + " at " + here.file + ':' + std::to_string(here.line));
    const Release release = std::move(c.releases[flag].front());
    c.releases[flag].pop_front();
    c.issue(Pipe::S);
    c.scalar_clock().join(release.clock);
    if (is_deferred()) {
        for (Epoch e : release.setters) force(e);
    }
    ++c.counters.cross_core_waits;
}

inline void check_cross_core_at_end(Core& c)
{
    c.call = "end of kernel";
    for (int flag = 0; flag < kCrossCoreFlags; ++flag) {
        c.require(c.releases[flag].empty(), FaultKind::cross_core,
                  "the counter of cross-core flag " + std::to_string(flag) + " is " +
                      std::to_string(c.releases[flag].size()) +
                      " at the end: a CrossCoreWaitFlag is missing, and the next kernel inherits the count");
        for (auto& [key, waiting] : launch->pending) {
            c.require(std::get<2>(key) != flag || waiting.count(c.id) == 0 || waiting.at(c.id).empty(),
                      FaultKind::cross_core,
                      "a set of cross-core flag " + std::to_string(flag) +
                          " found no partners: other cores of its mode did not set it");
        }
    }
}

}  // namespace twin

namespace AscendC {

template <HardEvent event>
void SetFlag(int32_t eventID, Here here = Here::now())
{
    twin::set_flag(event, eventID, here);
}
template <HardEvent event>
void WaitFlag(int32_t eventID, Here here = Here::now())
{
    twin::wait_flag(event, eventID, here);
}
template <pipe_t pipe>
void PipeBarrier(Here here = Here::now())
{
    static_assert(pipe != PIPE_S, "the scalar pipe is in order and has no barrier");
    twin::pipe_barrier(pipe, here);
}
template <uint8_t modeId, pipe_t pipe>
void CrossCoreSetFlag(uint16_t flagId, Here here = Here::now())
{
    static_assert(modeId <= 2, "A2 has the modes 0, 1 and 2");
    twin::cross_core_set(modeId, pipe, flagId, here);
}
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t flagId, Here here = Here::now())
{
    static_assert(modeId <= 2, "A2 has the modes 0, 1 and 2");
    twin::cross_core_wait(flagId, here);
}

// Flags 11 to 14 are the ones the vendor's SyncAll takes. Which of them serves which step is inferred.
template <bool isAIVOnly = true>
void SyncAll(Here here = Here::now())
{
    twin::Core& c = twin::begin_call("SyncAll", twin::Pipe::S, here);
    c.require(!isAIVOnly || c.kind == twin::CoreKind::aiv, twin::FaultKind::core, "SyncAll<true> is for vector cores");
    twin::pipe_barrier(PIPE_ALL, here);
    if (twin::deviates(twin::Deviation::sync_all)) return;
    if (isAIVOnly) {
        twin::cross_core_set(0, PIPE_MTE3, 14, here);
        twin::cross_core_wait(14, here);
    } else if (c.kind == twin::CoreKind::aic) {
        twin::cross_core_wait(11, here);
        twin::cross_core_set(0, PIPE_FIX, 12, here);
        twin::cross_core_wait(12, here);
        twin::cross_core_set(2, PIPE_FIX, 13, here);
    } else {
        twin::cross_core_set(2, PIPE_MTE3, 11, here);
        twin::cross_core_wait(13, here);
    }
}

template <typename T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(const uint64_t maskHigh, const uint64_t maskLow, Here here = Here::now())
{
    twin::Core& c = twin::begin_call("SetVectorMask", twin::Pipe::V, here);
    c.require((mode == MaskMode::COUNTER) == c.mask.counter, twin::FaultKind::type,
              "the mask's mode differs from the one that SetMaskCount or SetMaskNorm chose");
    c.mask.high = maskHigh;
    c.mask.low = maskLow;
}
template <typename T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(int32_t len, Here here = Here::now())
{
    const auto ones = [](int32_t n) { return n <= 0 ? 0ull : n >= 64 ? ~0ull : (1ull << n) - 1; };
    if (mode == MaskMode::COUNTER) {
        SetVectorMask<T, mode>(0, static_cast<uint64_t>(len), here);
    } else {
        SetVectorMask<T, mode>(ones(len - 64), ones(len), here);
    }
}
inline void SetMaskCount(Here here = Here::now())
{
    twin::begin_call("SetMaskCount", twin::Pipe::V, here).mask.counter = true;
}
inline void SetMaskNorm(Here here = Here::now())
{
    twin::begin_call("SetMaskNorm", twin::Pipe::V, here).mask.counter = false;
}
inline void ResetMask(Here here = Here::now())
{
    twin::Core& c = twin::begin_call("ResetMask", twin::Pipe::V, here);
    c.mask.high = c.mask.low = ~0ull;
}

// CTRL[48]: saturating or keeping inf and NaN (pages "SetSaturationFlag" and "SetCtrlSpr", A2).
template <SaturationMode mode>
void SetSaturationFlag(bool enableSat, Here here = Here::now())
{
    static_assert(mode == SaturationMode::FLOAT, "the twin emulates SaturationMode::FLOAT only");
    twin::Core& c = twin::begin_call("SetSaturationFlag", twin::Pipe::S, here);
    if (!twin::deviates(twin::Deviation::overflow_mode)) c.saturate = enableSat;
}
template <SaturationMode mode>
bool GetSaturationFlag(Here here = Here::now())
{
    static_assert(mode == SaturationMode::FLOAT, "the twin emulates SaturationMode::FLOAT only");
    return twin::begin_call("GetSaturationFlag", twin::Pipe::S, here).saturate;
}
inline int64_t GetBlockNum() { return twin::launch->blocks; }
inline int64_t GetBlockIdx() { return twin::core().block_index(); }
inline int64_t GetSubBlockIdx(Here here = Here::now())
{
    return twin::begin_call("GetSubBlockIdx", twin::Pipe::S, here).sub;
}
inline int64_t GetSubBlockNum() { return twin::core().options.shape == twin::Shape::mix_1_2 ? 2 : 1; }

}  // namespace AscendC
