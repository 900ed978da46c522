// Vector clocks. A pipe of a core is a thread of instructions numbered 1, 2, 3...; entry t of a pipe's clock is the
// last instruction of pipe t that is known to be complete before the pipe's next instruction starts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace twin {

enum class Pipe : uint8_t { S, V, M, MTE1, MTE2, MTE3, FIX };
constexpr int kPipes = 7;

inline const char* name_of(Pipe pipe)
{
    static const char* const names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
    return names[static_cast<int>(pipe)];
}

inline int index_of(Pipe pipe) { return static_cast<int>(pipe); }

// The place of an instruction in the order of its pipe; seq 0 means none. `site` is where it stands in the source.
struct Epoch {
    uint32_t seq = 0;
    uint16_t thread = 0;
    uint16_t site = 0;

    Pipe pipe() const { return static_cast<Pipe>(thread % kPipes); }
    int core() const { return thread / kPipes; }
};

inline uint16_t thread_of(int core, Pipe pipe) { return static_cast<uint16_t>(core * kPipes + index_of(pipe)); }

class Clock {
public:
    Clock() = default;
    explicit Clock(size_t threads) : seen_(threads, 0) {}

    bool knows(Epoch e) const { return seen_[e.thread] >= e.seq; }
    uint32_t operator[](uint16_t thread) const { return seen_[thread]; }
    void raise(uint16_t thread, uint32_t seq)
    {
        if (seen_[thread] < seq) {
            seen_[thread] = seq;
            ++version_;
        }
    }
    void join(const Clock& other)
    {
        bool changed = false;
        for (size_t i = 0; i < seen_.size(); ++i) {
            changed |= other.seen_[i] > seen_[i];
            seen_[i] = std::max(seen_[i], other.seen_[i]);
        }
        version_ += changed ? 1 : 0;
    }
    // Grows with every change, so that whoever has joined this clock need not do so again.
    uint64_t version() const { return version_; }

private:
    std::vector<uint32_t> seen_;
    uint64_t version_ = 1;
};

}  // namespace twin
