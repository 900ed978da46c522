// TPipe, TQue and TBuf: buffers in the local memories, with the event flags that a queue sets and waits for.
// Signatures: kernel_tpipe.h. Which event serves which queue follows the pages "TQue" and "automatic synchronisation".
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "sync.h"

namespace twin {

inline AscendC::TEventID take_event(Core& c, HardEvent event, bool owned)
{
    for (int id = 0; id < kEventIds; ++id) {
        EventFlag& flag = c.flags[static_cast<int>(event)][id];
        if (flag.allocated) continue;
        flag.allocated = true;
        flag.owned = owned;
        return static_cast<AscendC::TEventID>(id);
    }
    c.fault(FaultKind::event_id, "", std::string("all 8 event ids of ") + pipes_of(event).name + " are taken");
}

inline void give_event(Core& c, HardEvent event, AscendC::TEventID id)
{
    c.require(id >= 0 && id < kEventIds && c.flags[static_cast<int>(event)][id].allocated, FaultKind::event_id,
              std::string("event id ") + std::to_string(id) + " of " + pipes_of(event).name + " is not allocated");
    EventFlag& flag = c.flags[static_cast<int>(event)][id];
    flag.allocated = flag.owned = flag.fetched = false;
}

// The queue's events: data ready, and buffer free again.
struct QueueEvents {
    HardEvent ready;
    HardEvent free;
};

constexpr QueueEvents events_of(AscendC::TPosition position)
{
    using P = AscendC::TPosition;
    switch (position) {
        case P::VECIN: return {HardEvent::MTE2_V, HardEvent::V_MTE2};
        case P::VECOUT: return {HardEvent::V_MTE3, HardEvent::MTE3_V};
        case P::A1:
        case P::B1: return {HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2};
        case P::A2:
        case P::B2: return {HardEvent::MTE1_M, HardEvent::M_MTE1};
        case P::CO1: return {HardEvent::M_FIX, HardEvent::FIX_M};
        default: return {HardEvent::MAX, HardEvent::MAX};
    }
}

struct Buffer {
    enum State { free, allocated, enqueued, dequeued } state = free;
    size_t begin = 0;
    AscendC::TEventID ready_id = -1;
    AscendC::TEventID free_id = -1;
};

// A queue's buffers. TPipe shares them: kernels often destroy their queues before their TPipe, which waits for the
// events of buffers that were freed.
struct QueueState {
    QueueEvents events;
    Memory* memory = nullptr;
    size_t bytes = 0;
    std::vector<Buffer> buffers;
    std::deque<size_t> waiting;
    size_t next = 0;

    void wait_free(Core& c, Buffer& b, Here here)
    {
        if (b.free_id < 0) return;
        wait_flag(events.free, b.free_id, here, Caller::framework);
        give_event(c, events.free, b.free_id);
        b.free_id = -1;
    }
    Buffer& allocate(Core& c, Here here)
    {
        c.require(!buffers.empty(), FaultKind::queue, "the queue has no buffers: InitBuffer was not called");
        for (size_t tried = 0; tried < buffers.size(); ++tried) {
            Buffer& b = buffers[next];
            next = (next + 1) % buffers.size();
            if (b.state != Buffer::free) continue;
            wait_free(c, b, here);
            b.state = Buffer::allocated;
            return b;
        }
        c.fault(FaultKind::queue, "",
                "all " + std::to_string(buffers.size()) + " buffers are in use: FreeTensor is missing");
    }
    void enqueue(Core& c, Buffer& b, size_t depth, Here here)
    {
        c.require(b.state == Buffer::allocated, FaultKind::queue,
                  "EnQue of a tensor that AllocTensor has not just given");
        c.require(waiting.size() < depth, FaultKind::queue,
                  "the queue of depth " + std::to_string(depth) + " is full: DeQue comes first");
        b.state = Buffer::enqueued;
        b.ready_id = take_event(c, events.ready, true);
        set_flag(events.ready, b.ready_id, here, Caller::framework);
        waiting.push_back(static_cast<size_t>(&b - buffers.data()));
    }
    Buffer& dequeue(Core& c, Here here)
    {
        c.require(!waiting.empty(), FaultKind::queue, "DeQue of an empty queue");
        Buffer& b = buffers[waiting.front()];
        waiting.pop_front();
        b.state = Buffer::dequeued;
        wait_flag(events.ready, b.ready_id, here, Caller::framework);
        give_event(c, events.ready, b.ready_id);
        b.ready_id = -1;
        return b;
    }
    void release(Core& c, Buffer& b, Here here)
    {
        c.require(b.state != Buffer::free, FaultKind::queue, "FreeTensor of a tensor that is already free");
        c.require(b.state != Buffer::enqueued, FaultKind::queue, "FreeTensor of a tensor that is still in the queue");
        b.state = Buffer::free;
        b.free_id = take_event(c, events.free, true);
        set_flag(events.free, b.free_id, here, Caller::framework);
    }
    Buffer& buffer_of(Core& c, const Span& s)
    {
        for (Buffer& b : buffers) {
            if (s.memory == memory && s.low == b.begin) return b;
        }
        c.fault(FaultKind::queue, s.memory == nullptr ? "" : s.describe(0), "the tensor is not one of this queue's");
    }
    void end(Core& c, Here here)
    {
        for (Buffer& b : buffers) {
            c.require(b.state == Buffer::free, FaultKind::queue,
                      b.state == Buffer::enqueued ? "a tensor is still in the queue when TPipe ends: DeQue is missing"
                                                  : "a tensor was never freed: FreeTensor is missing");
            wait_free(c, b, here);
        }
    }
};

}  // namespace twin

namespace AscendC {

class TPipe;

template <TPosition pos, int32_t depth, auto mask = 0>
class TQue {
    static constexpr twin::QueueEvents kEvents = twin::events_of(pos);
    static_assert(kEvents.ready != HardEvent::MAX, "there is no queue at this position");
    static constexpr size_t kDepth = depth == 0 ? 1 : depth;  // 0: tensors are passed in by the caller

public:
    template <typename T>
    LocalTensor<T> AllocTensor(Here here = Here::now())
    {
        return tensor<T>(state_->allocate(twin::begin_call("AllocTensor", twin::Pipe::S, here), here));
    }
    template <typename T>
    void AllocTensor(LocalTensor<T>& tensor, Here here = Here::now())
    {
        tensor = AllocTensor<T>(here);
    }
    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor, Here here = Here::now())
    {
        twin::Core& c = twin::begin_call("EnQue", twin::Pipe::S, here);
        state_->enqueue(c, state_->buffer_of(c, tensor.span()), kDepth, here);
        return true;
    }
    template <typename T>
    LocalTensor<T> DeQue(Here here = Here::now())
    {
        return tensor<T>(state_->dequeue(twin::begin_call("DeQue", twin::Pipe::S, here), here));
    }
    template <typename T>
    void DeQue(LocalTensor<T>& tensor, Here here = Here::now())
    {
        tensor = DeQue<T>(here);
    }
    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor, Here here = Here::now())
    {
        twin::Core& c = twin::begin_call("FreeTensor", twin::Pipe::S, here);
        state_->release(c, state_->buffer_of(c, tensor.span()), here);
    }

private:
    friend class TPipe;
    static constexpr TPosition kWhere = pos;

    template <typename T>
    LocalTensor<T> tensor(const twin::Buffer& b) const
    {
        return LocalTensor<T>::over(state_->memory, pos, b.begin, state_->bytes);
    }

    std::shared_ptr<twin::QueueState> state_ =
        std::make_shared<twin::QueueState>(twin::QueueState{kEvents, nullptr, 0, {}, {}, 0});
};

template <TPosition pos = TPosition::LCM>
class TBuf {
public:
    template <typename T>
    LocalTensor<T> Get(Here here = Here::now())
    {
        ready(here);
        return LocalTensor<T>::over(memory_, pos, begin_, bytes_);
    }
    template <typename T>
    LocalTensor<T> Get(uint32_t len, Here here = Here::now())
    {
        return GetWithOffset<T>(len, 0, here);
    }
    template <typename T>
    LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bufOffset, Here here = Here::now())
    {
        ready(here).require(bufOffset + static_cast<size_t>(size) * sizeof(T) <= bytes_, twin::FaultKind::bounds,
                            "the tensor is larger than the buffer of " + std::to_string(bytes_) + " bytes");
        return LocalTensor<T>::over(memory_, pos, begin_ + bufOffset, static_cast<size_t>(size) * sizeof(T));
    }

private:
    friend class TPipe;

    twin::Core& ready(Here here) const
    {
        twin::Core& c = twin::begin_call("TBuf::Get", twin::Pipe::S, here);
        c.require(memory_ != nullptr, twin::FaultKind::queue, "the buffer is empty: InitBuffer was not called");
        return c;
    }

    twin::Memory* memory_ = nullptr;
    size_t begin_ = 0;
    size_t bytes_ = 0;
};

class TPipe {
public:
    TPipe(Here here = Here::now()) : here_(here) { Init(here); }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;
    ~TPipe() noexcept(false)
    {
        if (twin::launch == nullptr || twin::launch->abandoning || std::uncaught_exceptions() > 0) return;
        Destroy(here_);
    }

    void Init(Here here = Here::now())
    {
        twin::Core& c = twin::begin_call("TPipe", twin::Pipe::S, here);
        c.require(c.tpipe == nullptr, twin::FaultKind::program, "a second TPipe while the first one lives");
        c.tpipe = this;
        for (size_t& u : used_) u = 0;
        buffers_ = 0;
        c.mask = twin::VectorMask{};
        alive_ = true;
        if (c.kind != twin::CoreKind::aic) return;
        for (int id = 0; id < kOwnEvents; ++id) {  // TPipe's constructor sets these on the cube core
            twin::take_event(c, HardEvent::M_MTE1, true);
            twin::set_flag(HardEvent::M_MTE1, id, here, twin::Caller::framework);
        }
    }
    void Destroy(Here here = Here::now())
    {
        if (!alive_) return;
        alive_ = false;
        twin::Core& c = twin::begin_call("~TPipe", twin::Pipe::S, here);
        for (auto& queue : queues_) queue->end(c, here);
        queues_.clear();
        for (int id = 0; c.kind == twin::CoreKind::aic && id < kOwnEvents; ++id) {
            twin::wait_flag(HardEvent::M_MTE1, id, here, twin::Caller::framework);
            twin::give_event(c, HardEvent::M_MTE1, static_cast<TEventID>(id));
        }
        twin::pipe_barrier(PIPE_ALL, here);
        c.tpipe = nullptr;
    }

    template <class Q>
    bool InitBuffer(Q& que, uint8_t num, uint32_t len, Here here = Here::now())
    {
        twin::Core& c = twin::begin_call("InitBuffer", twin::Pipe::S, here);
        twin::QueueState& state = *que.state_;
        c.require(state.buffers.empty(), twin::FaultKind::queue, "InitBuffer of a queue that has buffers already");
        c.require(num > 0 && len > 0, twin::FaultKind::range, "InitBuffer of nothing");
        state.bytes = rounded(len);
        if (c.kind == twin::CoreKind::ai && Q::kWhere == TPosition::CO1) {  // the vector unit empties L0C
            state.events = {HardEvent::M_V, HardEvent::V_M};
        }
        for (int i = 0; i < num; ++i) {
            twin::Buffer b;
            b.begin = take(c, Q::kWhere, state.bytes, state.memory);
            state.buffers.push_back(b);
        }
        queues_.push_back(que.state_);
        return true;
    }
    template <TPosition pos>
    bool InitBuffer(TBuf<pos>& buf, uint32_t len, Here here = Here::now())
    {
        twin::Core& c = twin::begin_call("InitBuffer", twin::Pipe::S, here);
        buf.bytes_ = rounded(len);
        buf.begin_ = take(c, pos, buf.bytes_, buf.memory_);
        return true;
    }

    template <HardEvent evt>
    TEventID AllocEventID(Here here = Here::now())
    {
        return twin::take_event(twin::begin_call("AllocEventID", twin::Pipe::S, here), evt, false);
    }
    template <HardEvent evt>
    void ReleaseEventID(TEventID id, Here here = Here::now())
    {
        twin::give_event(twin::begin_call("ReleaseEventID", twin::Pipe::S, here), evt, id);
    }
    // A fetched id is not reserved: the next FetchEventID of the event may give the same one.
    TEventID FetchEventID(HardEvent evt, Here here = Here::now())
    {
        twin::Core& c = twin::begin_call("FetchEventID", twin::Pipe::S, here);
        const TEventID id = twin::take_event(c, evt, false);
        c.flags[static_cast<int>(evt)][id].allocated = false;
        c.flags[static_cast<int>(evt)][id].fetched = true;
        return id;
    }
    template <HardEvent evt>
    TEventID FetchEventID(Here here = Here::now())
    {
        return FetchEventID(evt, here);
    }

private:
    static constexpr int kOwnEvents = 3;
    static constexpr int kMaxBuffers = 64;  // page "InitBuffer"

    static size_t rounded(uint32_t len)
    {
        return (static_cast<size_t>(len) + twin::kBlockBytes - 1) / twin::kBlockBytes * twin::kBlockBytes;
    }
    size_t take(twin::Core& c, TPosition pos, size_t bytes, twin::Memory*& memory)
    {
        const twin::Space space = twin::space_of(pos);
        memory = c.memory(space);
        c.require(memory != nullptr, twin::FaultKind::core,
                  std::string("position ") + twin::name_of(pos) + " does not exist on this core");
        size_t& used = used_[twin::Core::index(space)];
        const size_t limit = c.capacity[twin::Core::index(space)];
        c.require(used + bytes <= limit, twin::FaultKind::capacity,
                  std::string(twin::name_of(space)) + " is full: " + std::to_string(used) + " + " +
                      std::to_string(bytes) + " bytes of " + std::to_string(limit));
        c.require(++buffers_ <= kMaxBuffers, twin::FaultKind::capacity,
                  "a kernel has at most " + std::to_string(kMaxBuffers) + " buffers");
        used += bytes;
        return used - bytes;
    }

    Here here_;
    bool alive_ = false;
    int buffers_ = 0;
    size_t used_[twin::kSpaces] = {};
    std::vector<std::shared_ptr<twin::QueueState>> queues_;
};

}  // namespace AscendC

inline AscendC::TPipe* GetTPipePtr() { return static_cast<AscendC::TPipe*>(twin::core().tpipe); }
namespace AscendC {
using ::GetTPipePtr;
}
