// The engine of vector calls: repeats, masks, strides, operand checks and the overlap rule. A repeat is 256 bytes of
// the widest operand, in up to 8 blocks of 32 bytes; block stride and repeat stride are in blocks.
#pragma once

#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "queue.h"

namespace twin {

constexpr int kMaxLanes = 128;

struct Lanes {
    uint64_t bits[2] = {0, 0};

    static Lanes first(int64_t n)
    {
        const auto ones = [](int64_t k) { return k <= 0 ? 0ull : k >= 64 ? ~0ull : (1ull << k) - 1; };
        return Lanes{{ones(n), ones(n - 64)}};
    }
    bool operator[](int i) const { return bits[i / 64] >> (i % 64) & 1u; }
    // Number of leading lanes when all active lanes lead; -1 otherwise.
    int prefix() const
    {
        const int low = __builtin_popcountll(bits[0]);
        const int high = __builtin_popcountll(bits[1]);
        if (high == 0) return (bits[0] & (bits[0] + 1)) == 0 ? low : -1;
        return bits[0] == ~0ull && (bits[1] & (bits[1] + 1)) == 0 ? 64 + high : -1;
    }
    int count() const { return __builtin_popcountll(bits[0]) + __builtin_popcountll(bits[1]); }
    int last() const
    {
        return bits[1] != 0 ? 128 - __builtin_clzll(bits[1]) : bits[0] != 0 ? 64 - __builtin_clzll(bits[0]) : 0;
    }
};

// Which lanes of which repeats take part.
struct Plan {
    int lanes = 0;  // per repeat
    int64_t repeats = 0;
    Lanes each;  // of every repeat but the last
    Lanes last;

    const Lanes& at(int64_t repeat) const { return repeat + 1 == repeats ? last : each; }
    static Plan counted(int lanes, int64_t count)
    {
        const int64_t repeats = (count + lanes - 1) / lanes;
        return Plan{lanes, repeats, Lanes::first(lanes), Lanes::first(count - (repeats - 1) * lanes)};
    }
};

struct Operand {
    Span span;
    int size = 0;  // bytes per element
    int64_t block = 1;
    int64_t repeat = 8;

    size_t at(int64_t r, int lane) const
    {
        const int per_block = static_cast<int>(kBlockBytes) / size;
        return static_cast<size_t>((r * repeat + static_cast<int64_t>(lane / per_block) * block) * kBlockBytes +
                                   static_cast<int64_t>(lane % per_block) * size);
    }
    size_t bytes_per_repeat(const Plan& plan) const
    {
        return static_cast<size_t>(plan.lanes) * static_cast<size_t>(size);
    }
    bool contiguous(const Plan& plan) const
    {
        return block == 1 &&
               (plan.repeats <= 1 || repeat * kBlockBytes == static_cast<int64_t>(bytes_per_repeat(plan)));
    }
    int blocks(const Lanes& active) const
    {
        return (active.last() * size + static_cast<int>(kBlockBytes) - 1) / static_cast<int>(kBlockBytes);
    }
    // First byte and one past the last byte touched, in whole blocks. The plan must not be empty.
    std::pair<size_t, size_t> hull(const Plan& plan) const
    {
        int64_t end = (plan.repeats - 1) * repeat + (blocks(plan.last) - 1) * block + 1;
        if (plan.repeats > 1) end = std::max(end, (plan.repeats - 2) * repeat + (blocks(plan.each) - 1) * block + 1);
        return {span.begin, span.begin + static_cast<size_t>(end) * kBlockBytes};
    }
    // Calls visit(offset, bytes) for every run of active bytes.
    template <typename F>
    void runs(const Plan& plan, F&& visit) const
    {
        if (plan.repeats == 0) return;
        const int last_prefix = plan.last.prefix();
        if (contiguous(plan) && last_prefix >= 0 && (plan.repeats == 1 || plan.each.prefix() == plan.lanes)) {
            visit(size_t{0}, static_cast<size_t>(plan.repeats - 1) * bytes_per_repeat(plan) +
                                 static_cast<size_t>(last_prefix * size));
            return;
        }
        const int per_block = static_cast<int>(kBlockBytes) / size;
        for (int64_t r = 0; r < plan.repeats; ++r) {
            const Lanes& active = plan.at(r);
            for (int lane = 0; lane < plan.lanes;) {
                int n = 0;  // active lanes in a row, within the block
                while (lane + n < plan.lanes && (lane + n) / per_block == lane / per_block && active[lane + n]) ++n;
                if (n > 0) visit(at(r, lane), static_cast<size_t>(n * size));
                lane += n > 0 ? n : 1;
            }
        }
    }
};

template <typename T>
Operand operand(const AscendC::LocalTensor<T>& t, int64_t block, int64_t repeat)
{
    return Operand{t.span(), static_cast<int>(sizeof(T)), block, repeat};
}
// Strides of a call that is given a count: no gaps, a repeat of `lanes` elements.
template <typename T>
Operand packed(const AscendC::LocalTensor<T>& t, int lanes)
{
    return operand(t, 1, static_cast<int64_t>(sizeof(T)) * lanes / static_cast<int64_t>(kBlockBytes));
}

// A mask argument: a number of leading lanes, or one bit per lane; in counter mode the number of elements in all. The
// vendor has an overload for each; calls that take `uint64_t mask[]` refuse a constant array, and so does Mask.
class Mask {
public:
    template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
    Mask(I lanes) : low(static_cast<uint64_t>(static_cast<int64_t>(lanes)))
    {
    }
    Mask(uint64_t* bits) : low(bits[0]), high(bits[1]), is_bits(true) {}

    uint64_t low = 0;
    uint64_t high = 0;
    bool is_bits = false;
};

// For calls that take `const uint64_t mask[]`.
class ConstMask : public Mask {
public:
    using Mask::Mask;
    ConstMask(const uint64_t* bits) : Mask(const_cast<uint64_t*>(bits)) {}
};

inline Plan plan_of(const Instruction& op, int lanes, const Mask& mask, int64_t repeats, bool set_mask)
{
    VectorMask& state = op.core().mask;
    op.in_range(repeats, "repeatTime", 0, 255);
    if (set_mask && state.counter) {
        state.low = mask.low;
        state.high = 0;
    } else if (set_mask) {
        const Lanes l = mask.is_bits ? Lanes{{mask.low, mask.high}} : Lanes::first(static_cast<int64_t>(mask.low));
        if (!mask.is_bits) op.in_range(static_cast<int64_t>(mask.low), "mask", 0, lanes);
        op.require(l.last() <= lanes, FaultKind::range,
                   "the mask has bits beyond the " + std::to_string(lanes) + " lanes of this type");
        state.low = l.bits[0];
        state.high = l.bits[1];
    }
    if (state.counter) return Plan::counted(lanes, static_cast<int64_t>(state.low));
    Lanes active{{state.low, lanes == kMaxLanes ? state.high : 0}};
    return Plan{lanes, active.count() == 0 ? 0 : repeats, active, active};
}

// How a call names its lanes: a mask with repeats, or a count.
struct Extent {
    Mask mask = 0;
    int64_t repeats = 1;
    int64_t count = 0;
    bool counted = false;
    bool set_mask = true;

    // A call with a count sets the mask itself, in counter mode, and leaves the default mask behind (page "mask").
    Plan plan(const Instruction& op, int lanes) const
    {
        if (!counted || !set_mask) return plan_of(op, lanes, mask, repeats, set_mask);
        op.require(count >= 0, FaultKind::range, "count = " + std::to_string(count));
        op.core().mask = VectorMask{};
        return Plan::counted(lanes, count);
    }
};
inline Extent repeated(const Mask& mask, const Field<uint8_t>& repeats, bool set_mask = true)
{
    return Extent{mask, repeats.full(), 0, false, set_mask};
}
inline Extent counted(int64_t count, bool set_mask = true) { return Extent{0, 1, count, true, set_mask}; }

inline void count_vector(const Instruction& op, const char* type, const Plan& plan)
{
    VectorCount c{1, static_cast<uint64_t>(plan.repeats), 0};
    if (plan.repeats > 0) {
        c.lanes = static_cast<uint64_t>(plan.repeats - 1) * static_cast<uint64_t>(plan.each.count()) +
                  static_cast<uint64_t>(plan.last.count());
    }
    Counters& counters = op.core().counters;
    counters.vector[type].add(c);
    counters.calls[std::string(op.core().call) + ' ' + type].add(c);
}

// Within one repeat source and destination are the same or apart; no repeat reads what an earlier repeat of the same
// call wrote (page "general constraints on overlap").
inline void check_overlap(const Instruction& op, const Plan& plan, const Operand& dst, const Operand& src,
                          bool accumulates)
{
    if (dst.span.memory != src.span.memory || plan.repeats == 0) return;
    const auto [d0, d1] = dst.hull(plan);
    const auto [s0, s1] = src.hull(plan);
    if (d1 <= s0 || s1 <= d0) return;
    if (accumulates && dst.span.begin == src.span.begin && dst.size == src.size && (dst.repeat == 0 || src.repeat == 0))
        return;
    const bool same_place = dst.span.begin == src.span.begin && dst.size == src.size;
    if (same_place && dst.contiguous(plan) && src.contiguous(plan)) return;
    const size_t base = std::min(d0, s0);
    std::vector<std::pair<int64_t, int>> writer((std::max(d1, s1) - base + kBlockBytes - 1) / kBlockBytes, {-1, -1});
    const auto cell = [&](const Operand& o, int64_t r, int b) {
        return (o.span.begin - base) / kBlockBytes + static_cast<size_t>(r * o.repeat + b * o.block);
    };
    for (int64_t r = 0; r < plan.repeats; ++r) {
        for (int b = 0; b < src.blocks(plan.at(r)); ++b) {
            const int64_t by = writer[cell(src, r, b)].first;
            if (by < 0) continue;
            op.core().fault(FaultKind::overlap, src.span.describe(src.at(r, 0)),
                            "repeat " + std::to_string(r) + " reads what repeat " + std::to_string(by) +
                                " of the same call writes");
        }
        for (int b = 0; b < dst.blocks(plan.at(r)); ++b) writer[cell(dst, r, b)] = {r, b};
        for (int b = 0; b < src.blocks(plan.at(r)); ++b) {
            const auto [by, block] = writer[cell(src, r, b)];
            if (by < 0 || (block == b && dst.size == src.size)) continue;
            op.core().fault(FaultKind::overlap, src.span.describe(src.at(r, 0)),
                            "source and destination of one repeat overlap in part");
        }
    }
}

inline void check_vector_operand(const Instruction& op, const Operand& o, const char* name)
{
    op.lies_in(o.span, {Space::UB}, name);
    op.aligned(o.span, kBlockBytes, name);
}

// Checks all operands, then notes reads before writes. `accumulates`: dst may be the last source of a later repeat.
inline void prepare(Instruction& op, const Plan& plan, const Operand& dst, std::initializer_list<Operand> sources,
                    bool accumulates = false)
{
    check_vector_operand(op, dst, "dst");
    for (const Operand& s : sources) check_vector_operand(op, s, "src");
    for (const Operand& s : sources) check_overlap(op, plan, dst, s, accumulates && &s == sources.end() - 1);
    for (const Operand& s : sources) s.runs(plan, [&](size_t at, size_t n) { op.read(s.span, at, n); });
    dst.runs(plan, [&](size_t at, size_t n) { op.write(dst.span, at, n); });
}

// The type in which values are computed: floating point in float, rounded once per operation; integers unchanged.
template <typename T>
using Wide = std::conditional_t<is_one_of<T, half, bfloat16_t, float>, float, T>;

// The active lanes of one repeat, in their type.
template <typename T>
void load_bits(const Operand& o, const Plan& plan, int64_t r, T* out)
{
    constexpr int per_block = static_cast<int>(kBlockBytes / sizeof(T));
    const int last = plan.at(r).last(), run = o.block == 1 ? last : per_block;
    for (int lane = 0; lane < last; lane += run) {
        const size_t n = static_cast<size_t>(std::min(run, last - lane));
        std::memcpy(out + lane, o.span.data() + o.at(r, lane), n * sizeof(T));
    }
}

// The same, widened.
template <typename T>
void load(const Operand& o, const Plan& plan, int64_t r, Wide<T>* out)
{
    if constexpr (std::is_same_v<T, Wide<T>>) {
        load_bits(o, plan, r, out);
    } else {
        T values[kMaxLanes] = {};
        load_bits(o, plan, r, values);
        if constexpr (std::is_same_v<T, half>) widen(values, out, kMaxLanes);
        else std::transform(values, values + kMaxLanes, out, [](T x) { return to_float(x); });
    }
}

// Stores values that already are of type T.
template <typename T>
void store(const Operand& o, const Plan& plan, int64_t r, const T* values)
{
    constexpr int per_block = static_cast<int>(kBlockBytes / sizeof(T));
    const Lanes& active = plan.at(r);
    const int prefix = active.prefix();
    for (int lane = 0; lane < active.last();) {
        const int n = std::min(per_block, active.last() - lane);
        T* to = reinterpret_cast<T*>(o.span.data() + o.at(r, lane));
        if (prefix >= 0) {
            std::memcpy(to, values + lane, static_cast<size_t>(n) * sizeof(T));
        } else {
            for (int i = 0; i < n; ++i) {
                if (active[lane + i]) to[i] = values[lane + i];
            }
        }
        lane += n;
    }
}

// The type in which arithmetic is done: wide enough that the one rounding, or the check of the range, comes after it.
template <typename T>
using Exact = std::conditional_t<std::is_same_v<T, int32_t>, int64_t, float>;

inline bool is_finite(float x) { return std::fabs(x) <= std::numeric_limits<float>::max(); }

// Whether any of a repeat's values is inf or NaN: the exponent is all ones.
template <typename T>
bool any_not_finite(const T* values)
{
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    constexpr Bits exponent = std::is_same_v<T, half> ? 0x7c00u : sizeof(T) == 2 ? 0x7f80u : 0x7f800000u;
    Bits bits[kMaxLanes];
    std::memcpy(bits, values, sizeof(bits));
    int found = 0;
    for (int i = 0; i < kMaxLanes; ++i) found |= (bits[i] & exponent) == exponent;
    return found != 0;
}

// Lanes whose result is not finite although every source is: the range was exceeded, in either overflow mode, or the
// operation has no value there.
template <typename T>
uint64_t count_overflows(const T* results, const Lanes& active, std::initializer_list<const float*> sources)
{
    if (!any_not_finite(results)) return 0;
    uint64_t found = 0;
    for (int i = 0; i < active.last(); ++i) {
        if (!active[i] || is_finite(to_float(results[i]))) continue;
        bool made_here = true;
        for (const float* source : sources) made_here &= is_finite(source[i]);
        found += made_here ? 1 : 0;
    }
    return found;
}

// The one rounding of the operation: float results to T, in the overflow mode. Returns the number of overflows.
template <typename T>
uint64_t round_lanes(const float* values, T* out, const Lanes& active, bool saturate,
                     std::initializer_list<const float*> sources)
{
    if constexpr (std::is_same_v<T, half>) {
        narrow(values, out, kMaxLanes);
        for (int i = 0; deviates(Deviation::subnormal_results) && i < kMaxLanes; ++i) {
            if (std::fabs(to_float(out[i])) < kHalfNormal) out[i] = half_from(0.0f);
        }
    } else {
        std::memcpy(out, values, sizeof(T) * static_cast<size_t>(kMaxLanes));
    }
    const uint64_t overflows = count_overflows(out, active, sources);
    if constexpr (std::is_same_v<T, half>) {
        saturate &= any_not_finite(out);
        for (int i = 0; saturate && i < kMaxLanes; ++i) out[i] = half_from(saturated(to_float(out[i]), kHalfMax));
    } else if constexpr (std::is_same_v<T, float>) {
        constexpr float largest = std::numeric_limits<float>::max();
        for (int i = 0; saturate && i < active.last(); ++i) out[i] = saturated(out[i], largest);
    }
    return overflows;
}

// The same for integers. What the device does beyond their range is documented nowhere.
inline uint64_t round_lanes(const int64_t* values, int32_t* out, const Lanes& active, Core& core)
{
    for (int i = 0; i < active.last(); ++i) {
        out[i] = static_cast<int32_t>(values[i]);
        core.require(!active[i] || out[i] == values[i], FaultKind::range,
                     "the result " + std::to_string(values[i]) + " is beyond int32_t");
    }
    return 0;
}

}  // namespace twin
