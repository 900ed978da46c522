// Memories with shadow cells. Each 32-byte cell knows which of its bytes are initialised, who wrote them last and who
// has read them since. Races are found by happens-before (clocks.h), not by values: a sequential emulator gives right
// numbers even where a WaitFlag is missing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "chip.h"
#include "clocks.h"

namespace twin {

enum class Space : uint8_t { GM, UB, L1, L0A, L0B, L0C };
constexpr int kSpaces = 6;

inline const char* name_of(Space space)
{
    static const char* const names[] = {"GM", "UB", "L1", "L0A", "L0B", "L0C"};
    return names[static_cast<int>(space)];
}

constexpr uint8_t kPoison = 0xFF;  // NaN as half, bfloat16 and float, -1 as an integer
constexpr uint8_t kGuard = 0xA5;
constexpr size_t kGuardBytes = 512;

// What one instruction brings to a check.
struct Accessor {
    Epoch me;
    const Clock* clock = nullptr;
    bool own_pipe_in_order = false;    // the hardware orders this pipe's instructions on these operands
    bool scalar_synchronised = false;  // the compiler orders PIPE_S against the other pipes of this core
    bool unit_flag = false;            // the hardware orders Mmad and Fixpipe where both say so
    bool check_init = true;
    bool check_races = true;
    std::vector<Epoch>* resolved = nullptr;  // conflicts that compiler or hardware order: the caller waits for these
};

struct Conflict {
    enum What { none, race, uninitialised } what = none;
    size_t at = 0;  // byte offset
    Epoch other;
    bool other_wrote = false;
    explicit operator bool() const { return what != none; }
};

class Memory {
public:
    static constexpr size_t kCell = 32;
    static constexpr size_t kCacheLine = 64;  // of the scalar unit's data cache

    // Inputs are read by every core and written by none: their readers need not be kept.
    Memory(std::string name, Space space, size_t bytes, bool track_readers = true)
        : name_(std::move(name)),
          space_(space),
          size_(bytes),
          track_readers_(track_readers),
          storage_(static_cast<uint8_t*>(::operator new(padded(bytes) + 2 * kGuardBytes, std::align_val_t(512)))),
          cells_((bytes + kCell - 1) / kCell)
    {
        std::memset(storage_.get(), kGuard, padded(bytes) + 2 * kGuardBytes);
        poison();
    }

    const std::string& name() const { return name_; }
    Space space() const { return space_; }
    size_t size() const { return size_; }
    uint8_t* data() { return storage_.get() + kGuardBytes; }
    const uint8_t* data() const { return storage_.get() + kGuardBytes; }
    bool contains(const void* p) const
    {
        const auto a = reinterpret_cast<uintptr_t>(p);
        const auto base = reinterpret_cast<uintptr_t>(data());
        return a >= base - kGuardBytes && a < base + padded(size_) + kGuardBytes;
    }

    void poison()
    {
        std::memset(data(), kPoison, size_);
        std::fill(cells_.begin(), cells_.end(), Cell{});
    }
    void set_initialised()
    {
        for (Cell& cell : cells_) cell.init = ~0u;
    }
    // A kernel's end orders everything before what follows.
    void forget_order()
    {
        for (Cell& cell : cells_) {
            Cell fresh;
            fresh.init = cell.init;
            cell = fresh;
        }
    }
    // How often somebody has written to a cache line since it was first asked for.
    uint64_t writes_to(size_t line) { return watched_[line]; }
    // The bytes hold something, but nothing the device promises.
    void forget(size_t offset, size_t bytes)
    {
        each_cell(offset, bytes, [](Cell& cell, uint32_t mask, size_t) {
            cell.init &= ~mask;
            return false;
        });
    }
    bool initialised(size_t offset, size_t bytes) const
    {
        bool all = true;
        const_cast<Memory*>(this)->each_cell(offset, bytes, [&](Cell& cell, uint32_t mask, size_t) {
            all = (cell.init & mask) == mask;
            return !all;
        });
        return all;
    }
    size_t uninitialised_bytes() const
    {
        size_t missing = 0;
        for (size_t i = 0; i < size_; ++i) missing += (cells_[i / kCell].init >> (i % kCell) & 1u) == 0 ? 1 : 0;
        return missing;
    }
    bool guards_intact() const
    {
        const uint8_t* low = storage_.get();
        const uint8_t* high = data() + size_;
        for (size_t i = 0; i < kGuardBytes; ++i) {
            if (low[i] != kGuard || high[i] != kGuard) return false;
        }
        return true;
    }

    Conflict note_read(const Accessor& by, size_t offset, size_t bytes)
    {
        Conflict found;
        each_cell(offset, bytes, [&](Cell& cell, uint32_t mask, size_t at) {
            if (by.check_init && (cell.init & mask) != mask) {
                found = Conflict{Conflict::uninitialised, at, Epoch{}, false};
                return true;
            }
            if (const Mark* w = unordered(cell.writers, mask, by)) {
                found = Conflict{Conflict::race, at, w->epoch, true};
                return true;
            }
            if (track_readers_) remember(cell.readers, mask, by);
            return false;
        });
        return found;
    }

    Conflict note_write(const Accessor& by, size_t offset, size_t bytes)
    {
        Conflict found;
        for (auto line = watched_.lower_bound(offset / kCacheLine); line != watched_.end(); ++line) {
            if (line->first * kCacheLine >= offset + bytes) break;
            ++line->second;
        }
        each_cell(offset, bytes, [&](Cell& cell, uint32_t mask, size_t at) {
            const Mark* w = unordered(cell.writers, mask, by);
            const Mark* r = w == nullptr ? unordered(cell.readers, mask, by) : nullptr;
            if (w != nullptr || r != nullptr) {
                found = Conflict{Conflict::race, at, w != nullptr ? w->epoch : r->epoch, w != nullptr};
                return true;
            }
            for (Mark& mark : cell.readers) mark.mask &= ~mask;
            for (Mark& mark : cell.writers) mark.mask &= ~mask;
            remember(cell.writers, mask, by);
            cell.init |= mask;
            return false;
        });
        return found;
    }

private:
    struct Mark {
        Epoch epoch;
        uint32_t mask = 0;       // bytes of the cell; 0: free
        bool unit_flag = false;  // the access set unitFlag
    };
    // Two writers and three readers per cell. Beyond that a mark is dropped, first one that the new access comes after:
    // a race may then be missed, but never invented.
    struct Cell {
        uint32_t init = 0;
        Mark writers[2];
        Mark readers[3];
    };
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t(512)); }
    };

    static size_t padded(size_t bytes) { return (bytes + kCell - 1) / kCell * kCell; }

    template <typename F>
    void each_cell(size_t offset, size_t bytes, F&& visit)
    {
        while (bytes > 0) {
            const size_t within = offset % kCell;
            const size_t n = std::min(bytes, kCell - within);
            const uint32_t mask = n == kCell ? ~0u : ((1u << n) - 1u) << within;
            if (visit(cells_[offset / kCell], mask, offset)) return;
            offset += n;
            bytes -= n;
        }
    }

    static bool ordered(const Mark& mark, const Accessor& by)
    {
        const Epoch other = mark.epoch;
        if (other.thread == by.me.thread && (other.seq == by.me.seq || by.own_pipe_in_order)) return true;
        if (by.clock->knows(other)) return true;
        if (other.core() != by.me.core()) return !by.check_races;
        const Pipe p = other.pipe();
        const Pipe q = by.me.pipe();
        const bool scalar = by.scalar_synchronised && (p == Pipe::S) != (q == Pipe::S);
        const bool unit = mark.unit_flag && by.unit_flag &&
                          ((p == Pipe::M && q == Pipe::FIX) || (p == Pipe::FIX && q == Pipe::M));
        if (!scalar && !unit) return !by.check_races;
        if (by.resolved->empty() || by.resolved->back().seq != other.seq ||
            by.resolved->back().thread != other.thread) {
            by.resolved->push_back(other);
        }
        return true;
    }

    template <size_t N>
    static const Mark* unordered(const Mark (&marks)[N], uint32_t mask, const Accessor& by)
    {
        for (const Mark& mark : marks) {
            if ((mark.mask & mask) != 0 && !ordered(mark, by)) return &mark;
        }
        return nullptr;
    }

    template <size_t N>
    static void remember(Mark (&marks)[N], uint32_t mask, const Accessor& by)
    {
        // A mark that lies wholly under the new one is subsumed if it came before; one of the same instruction grows.
        Mark* slot = nullptr;
        for (Mark& mark : marks) {
            if (mark.mask != 0 && mark.epoch.thread == by.me.thread && mark.epoch.seq == by.me.seq) {
                mark.mask |= mask;
                return;
            }
            const bool subsumed = (mark.mask & ~mask) == 0 &&
                                  (mark.mask == 0 || mark.epoch.thread == by.me.thread || by.clock->knows(mark.epoch));
            if (subsumed && slot == nullptr) slot = &mark;
            if (subsumed) mark.mask = 0;
        }
        if (slot == nullptr) slot = std::min_element(marks, marks + N, [&](const Mark& a, const Mark& b) {
            const bool a_before = by.clock->knows(a.epoch), b_before = by.clock->knows(b.epoch);
            return a_before != b_before ? a_before : a.epoch.seq < b.epoch.seq;
        });
        *slot = Mark{by.me, mask, by.unit_flag};
    }

    std::string name_;
    Space space_;
    size_t size_;
    bool track_readers_;
    std::unique_ptr<uint8_t, Free> storage_;
    std::map<size_t, uint64_t> watched_;  // by cache line: those that a scalar unit has read
    std::vector<Cell> cells_;
};

}  // namespace twin
