// Deferred mode: each pipe is a queue of closures, in order. Work is done only when something forces it. Even seeds do
// everything as late as the flags allow (a missing "data is ready" flag reads poison), odd seeds let the producers run
// ahead (a missing "buffer is free" flag overwrites what is still to be read).
#pragma once

#include "core.h"

namespace twin {

inline bool is_deferred() { return launch->options.mode == Mode::deferred; }
inline bool producers_first() { return launch->options.seed % 2 == 1; }

inline bool is_done(Epoch e)
{
    const std::deque<Work>& queue = launch->cores[static_cast<size_t>(e.core())]->queues[index_of(e.pipe())];
    return queue.empty() || queue.front().seq > e.seq;
}

void force(Epoch e);

inline void perform_next(Core& c, Pipe p)
{
    Work work = std::move(c.queues[index_of(p)].front());
    c.queues[index_of(p)].pop_front();
    for (Epoch e : work.after) force(e);
    if (work.run) work.run();
}

// All that may run without anybody's waiting, producers before consumers.
inline void run_ahead(Core& c)
{
    static constexpr Pipe order[] = {Pipe::MTE2, Pipe::MTE1, Pipe::M, Pipe::V, Pipe::FIX, Pipe::MTE3};
    for (bool progress = true; progress;) {
        progress = false;
        for (Pipe p : order) {
            std::deque<Work>& queue = c.queues[index_of(p)];
            while (!queue.empty() && std::all_of(queue.front().after.begin(), queue.front().after.end(), is_done)) {
                perform_next(c, p);
                progress = true;
            }
        }
    }
}

// Whatever pipe e.pipe() was given up to e is done on return.
inline void force(Epoch e)
{
    Core& c = *launch->cores[static_cast<size_t>(e.core())];
    if (is_done(e)) return;
    if (producers_first()) run_ahead(c);
    while (!is_done(e)) perform_next(c, e.pipe());
}

// The kernel's end on one core.
inline void drain(Core& c)
{
    if (producers_first()) run_ahead(c);
    static constexpr Pipe order[] = {Pipe::MTE3, Pipe::FIX, Pipe::V, Pipe::M, Pipe::MTE1, Pipe::MTE2};
    for (Pipe p : order) {
        while (!c.queues[index_of(p)].empty()) perform_next(c, p);
    }
}

}  // namespace twin
