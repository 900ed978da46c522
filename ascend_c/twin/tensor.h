// LocalTensor and GlobalTensor: names for places in memory. Signatures: kernel_tensor.h.
#pragma once

#include <algorithm>

#include "instruction.h"

namespace twin {

constexpr Space space_of(AscendC::TPosition p)
{
    using P = AscendC::TPosition;
    switch (p) {
        case P::A1:
        case P::B1:
        case P::C1:
        case P::TSCM: return Space::L1;
        case P::A2: return Space::L0A;
        case P::B2: return Space::L0B;
        case P::CO1: return Space::L0C;
        case P::VECIN:
        case P::VECOUT:
        case P::VECCALC: return Space::UB;
        default: return Space::GM;  // on A2 the position CO2 is GM: there is no way from L0C to UB
    }
}

}  // namespace twin

namespace twin {

// A scalar read of GM. The first one of a line makes a copy, and later ones read that copy, so that a line which
// somebody else writes in between has to be invalidated (page "DataCacheCleanAndInvalid"). Scalar writes go through.
inline void read_cached(const Instruction& op, Memory& memory, size_t at, void* value, size_t bytes)
{
    const size_t number = at / Memory::kCacheLine, begin = number * Memory::kCacheLine;
    const auto [found, fresh] = op.core().data_cache.try_emplace({&memory, number});
    CachedLine& line = found->second;
    if (fresh) {
        line.writes = memory.writes_to(number);
        std::memcpy(line.bytes.data(), memory.data() + begin, std::min(line.bytes.size(), memory.size() - begin));
    }
    op.require(line.writes == memory.writes_to(number), FaultKind::race,
               "the line was written after the data cache read it: DataCacheCleanAndInvalid is missing");
    std::memcpy(value, line.bytes.data() + at - begin, bytes);
}

}  // namespace twin

namespace AscendC {

using twin::Here;

template <typename T>
class LocalTensor {
public:
    LocalTensor() = default;
    // Static tensor programming: a place chosen by the kernel, tileSize in elements.
    LocalTensor(TPosition pos, uint32_t addr, uint32_t tileSize, Here here = Here::now())
        : position_(pos),
          size_(tileSize)
    {
        twin::Core& c = twin::begin_call("LocalTensor", twin::Pipe::S, here);
        memory_ = c.memory(twin::space_of(pos));
        c.require(memory_ != nullptr, twin::FaultKind::core,
                  std::string(twin::name_of(pos)) + " does not exist on this core");
        begin_ = low_ = addr;
        high_ = static_cast<size_t>(addr) + static_cast<size_t>(tileSize) * sizeof(T);
        c.require(high_ <= c.capacity[twin::Core::index(memory_->space())], twin::FaultKind::capacity,
                  "the tensor ends at byte " + std::to_string(high_) + " of " + std::to_string(memory_->size()));
    }

    LocalTensor operator[](uint32_t offset) const
    {
        LocalTensor t = *this;
        t.begin_ += static_cast<size_t>(offset) * sizeof(T);
        t.size_ = offset < size_ ? size_ - offset : 0;
        return t;
    }
    template <typename U>
    LocalTensor<U> ReinterpretCast() const
    {
        LocalTensor<U> t;
        t.memory_ = memory_;
        t.position_ = position_;
        t.begin_ = begin_;
        t.low_ = low_;
        t.high_ = high_;
        t.size_ = static_cast<uint32_t>(static_cast<size_t>(size_) * sizeof(T) / sizeof(U));
        return t;
    }

    T GetValue(uint32_t index, Here here = Here::now()) const
    {
        twin::Instruction op("GetValue", twin::Pipe::S, here);
        scalar_place(op);
        op.read(span(), index * sizeof(T), sizeof(T));
        T value{};
        op.run([&] { std::memcpy(&value, span().data() + index * sizeof(T), sizeof(T)); });
        return value;
    }
    template <typename S>
    void SetValue(uint32_t index, S value, Here here = Here::now()) const
    {
        twin::Instruction op("SetValue", twin::Pipe::S, here);
        scalar_place(op);
        const T converted = static_cast<T>(value);
        op.write(span(), index * sizeof(T), sizeof(T));
        op.run([&] { std::memcpy(span().data() + index * sizeof(T), &converted, sizeof(T)); });
    }

    uint32_t GetSize() const { return size_; }

    twin::Span span() const { return twin::Span{memory_, begin_, low_, high_, position_}; }
    // For queues and buffers: a tensor over part of a memory.
    static LocalTensor over(twin::Memory* memory, TPosition pos, size_t begin, size_t bytes)
    {
        LocalTensor t;
        t.memory_ = memory;
        t.position_ = pos;
        t.begin_ = t.low_ = begin;
        t.high_ = begin + bytes;
        t.size_ = static_cast<uint32_t>(bytes / sizeof(T));
        return t;
    }

private:
    template <typename U>
    friend class LocalTensor;

    void scalar_place(const twin::Instruction& op) const { op.lies_in(span(), {twin::Space::UB}, "the tensor"); }

    twin::Memory* memory_ = nullptr;
    TPosition position_ = TPosition::MAX;
    size_t begin_ = 0;
    size_t low_ = 0;
    size_t high_ = 0;
    uint32_t size_ = 0;
};

template <typename T>
class GlobalTensor {
public:
    void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize, Here here = Here::now())
    {
        set(buffer, here);
        size_ = bufferSize;
        low_ = begin_;
        high_ = begin_ + bufferSize * sizeof(T);
        twin::core().require(high_ <= memory_->size(), twin::FaultKind::bounds,
                             "the tensor ends at byte " + std::to_string(high_) + " of the " +
                                 std::to_string(memory_->size()) + " bytes of GM " + memory_->name());
    }
    void SetGlobalBuffer(__gm__ T* buffer, Here here = Here::now())
    {
        set(buffer, here);
        low_ = 0;
        high_ = memory_->size();
        size_ = (high_ - begin_) / sizeof(T);
    }
    uint64_t GetSize() const { return size_; }

    T GetValue(uint64_t offset, Here here = Here::now()) const
    {
        twin::Instruction op("GetValue", twin::Pipe::S, here);
        op.lies_in(span(), {twin::Space::GM}, "the tensor");
        op.read(span(), offset * sizeof(T), sizeof(T));
        T value{};
        op.run([&] { twin::read_cached(op, *memory_, begin_ + offset * sizeof(T), &value, sizeof(T)); });
        return value;
    }
    void SetValue(uint64_t offset, T value, Here here = Here::now())
    {
        twin::Instruction op("SetValue", twin::Pipe::S, here);
        op.lies_in(span(), {twin::Space::GM}, "the tensor");
        op.write(span(), offset * sizeof(T), sizeof(T));
        op.run([&] { std::memcpy(span().data() + offset * sizeof(T), &value, sizeof(T)); });
    }

    GlobalTensor operator[](uint64_t offset) const
    {
        GlobalTensor t = *this;
        t.begin_ += offset * sizeof(T);
        t.size_ = offset < size_ ? size_ - offset : 0;
        return t;
    }

    twin::Span span() const { return twin::Span{memory_, begin_, low_, high_, TPosition::GM}; }

private:
    void set(__gm__ T* buffer, Here here)
    {
        twin::Core& c = twin::begin_call("SetGlobalBuffer", twin::Pipe::S, here);
        memory_ = twin::launch->find_gm(buffer);
        c.require(memory_ != nullptr, twin::FaultKind::bounds, "the pointer is not within any GM allocation");
        const ptrdiff_t at = reinterpret_cast<const uint8_t*>(buffer) - memory_->data();
        c.require(at >= 0 && at <= static_cast<ptrdiff_t>(memory_->size()), twin::FaultKind::bounds,
                  "the pointer lies beside GM " + memory_->name());
        begin_ = static_cast<size_t>(at);
    }

    twin::Memory* memory_ = nullptr;
    size_t begin_ = 0;
    size_t low_ = 0;
    size_t high_ = 0;
    uint64_t size_ = 0;
};

enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

template <typename T, CacheLine entireType, DcciDst dcciDst>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, Here here = Here::now())
{
    static_assert(dcciDst == DcciDst::CACHELINE_OUT || dcciDst == DcciDst::CACHELINE_ALL,
                  "the twin keeps the cache consistent with GM only");
    twin::Instruction op("DataCacheCleanAndInvalid", twin::Pipe::S, here);
    op.lies_in(dst.span(), {twin::Space::GM}, "dst");
    if (twin::deviates(twin::Deviation::scalar_cache)) return;
    if (entireType == CacheLine::ENTIRE_DATA_CACHE) {
        op.core().data_cache.clear();
    } else {
        op.core().data_cache.erase({dst.span().memory, dst.span().begin / twin::Memory::kCacheLine});
    }
}

}  // namespace AscendC
