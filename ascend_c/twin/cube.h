// The cube core: LoadData (2D) from L1 into L0A and L0B, Fill there, and Mmad. Signatures: kernel_operator_mm_intf.h.
// Formats: L0A holds fractals (m1, k1, m0, k0), L0B (k1, n1, n0, k0), L0C (n1, m1, m0, n0); k0 is 32 bytes, the
// rest 16.
#pragma once

#include <cfloat>

#include "copy.h"

namespace twin {

constexpr int kFractalSide = 16;

template <typename T>
void load_2d(const Span& dst, const Span& src, const AscendC::LoadData2DParams& p, Here here)
{
    static_assert(sizeof(T) == 2, "LoadData: the twin loads half and bfloat16");
    Instruction op("LoadData", Pipe::MTE1, here);
    op.require(op.core().kind != CoreKind::ai || std::is_same_v<T, half>, FaultKind::type, kNoBf16);
    op.lies_in(src, {Space::L1}, "src");
    op.lies_in(dst, {Space::L0A, Space::L0B}, "dst");
    op.aligned(src, kBlockBytes, "src");
    op.aligned(dst, kFractalBytes, "dst");
    op.fits(p.startIndex, "startIndex", 0, 65535);
    op.fits(p.repeatTimes, "repeatTimes", 0, 255);
    op.fits(p.srcStride, "srcStride", 0, 65535);
    op.fits(p.dstGap, "dstGap", 0, 65535);
    op.require(p.addrMode == 0, FaultKind::range, "addrMode serves loads from GM only");
    const int64_t repeats = p.repeatTimes.full();
    if (repeats == 0) return;
    const auto from = [start = p.startIndex.full(), step = p.srcStride.full()](int64_t i) {
        return static_cast<size_t>(start + i * step) * kFractalBytes;
    };
    const auto to = [gap = p.dstGap.full()](int64_t i) { return static_cast<size_t>(i * (gap + 1)) * kFractalBytes; };
    op.copies();
    for (int64_t i = 0; i < repeats; ++i) op.read(src, from(i), kFractalBytes);
    for (int64_t i = 0; i < repeats; ++i) op.write(dst, to(i), kFractalBytes);
    const bool transpose = p.ifTranspose;
    for (int64_t i = 0; i < repeats; ++i) {
        const size_t s = from(i), d = to(i);
        if (!transpose || src.memory->initialised(src.begin + s, kFractalBytes)) {
            op.hand_on(dst, d, kFractalBytes, src, s, kFractalBytes);
            continue;
        }
        for (size_t e = 0; e < 256; ++e) op.hand_on(dst, d + (e % 16 * 16 + e / 16) * 2, 2, src, s + e * 2, 2);
    }
    op.copied(src);
    op.core().counters.bytes[index_of(Pipe::MTE1)] += static_cast<size_t>(repeats) * kFractalBytes;
    op.run([=] {
        for (int64_t i = 0; i < repeats; ++i) {
            const uint8_t* s = src.data() + from(i);
            uint8_t* d = dst.data() + to(i);
            if (!transpose) {
                std::memcpy(d, s, kFractalBytes);
                continue;
            }
            for (int r = 0; r < kFractalSide; ++r) {
                for (int c = 0; c < kFractalSide; ++c)
                    std::memcpy(d + (r * kFractalSide + c) * 2, s + (c * kFractalSide + r) * 2, 2);
            }
        }
    });
}

template <typename T>
void fill_l0(const Span& dst, const AscendC::InitConstValueParams<T>& p, Here here)
{
    static_assert(sizeof(T) == 2, "Fill: the twin fills with half and bfloat16");
    Instruction op("Fill", Pipe::MTE1, here);
    op.lies_in(dst, {Space::L0A, Space::L0B}, "dst");  // into L1 it is an instruction of MTE2: not emulated
    op.aligned(dst, kFractalBytes, "dst");
    op.fits(p.repeatTimes, "repeatTimes", 0, 32767);
    op.fits(p.blockNum, "blockNum", 0, 32767);
    op.fits(p.dstGap, "dstGap", 0, 32767);
    const bool fractals = op.core().kind == CoreKind::ai;  // a 310P reads neither blockNum nor dstGap
    const size_t run = (fractals ? 1 : static_cast<size_t>(p.blockNum.full())) * kFractalBytes;
    const size_t step = run + (fractals ? 0 : static_cast<size_t>(p.dstGap.full())) * kFractalBytes;
    const int64_t repeats = run == 0 ? 0 : p.repeatTimes.full();
    for (int64_t i = 0; i < repeats; ++i) op.write(dst, static_cast<size_t>(i) * step, run);
    op.core().counters.bytes[index_of(Pipe::MTE1)] += static_cast<size_t>(repeats) * run;
    const size_t filled = deviates(Deviation::fill) ? run / 2 : run;
    op.run([=, value = p.initValue] {
        for (int64_t i = 0; i < repeats; ++i) {
            for (size_t at = 0; at < filled; at += sizeof(T)) {
                std::memcpy(dst.data() + static_cast<size_t>(i) * step + at, &value, sizeof(T));
            }
        }
    });
}

inline int64_t up_to(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Unit flags: a bit for every 512 bytes of L0C says that a Mmad has finished them for Fixpipe (page "UnitFlag"). Mmad
// waits until its bits are 0, Fixpipe until they are 1; with unitFlag 3 the instruction turns them over. The twin goes
// by program order: bits in the other state are a fault, not a wait.
inline void use_unit_flags(Instruction& op, const Span& c, size_t at, size_t bytes, int unit_flag, bool by_mmad)
{
    if (unit_flag == 0) return;
    std::vector<bool>& finished = op.core().finished_units;
    const size_t first = (c.begin + at) / kFractalBytes, last = (c.begin + at + bytes - 1) / kFractalBytes;
    for (size_t unit = first; unit <= last; ++unit) {
        op.require(finished[unit] != by_mmad, FaultKind::flag,
                   by_mmad ? "Mmad with unitFlag waits for a Fixpipe with unitFlag 3 to take the last result away"
                           : "Fixpipe with unitFlag waits for a Mmad with unitFlag 3");
        if (unit_flag == 3) finished[unit] = by_mmad;
    }
}

inline void check_unit_flags_at_end(Core& c)
{
    c.call = "end of kernel";
    for (bool finished : c.finished_units) {
        c.require(!finished, FaultKind::flag,
                  "a result of Mmad with unitFlag 3 was never taken away by a Fixpipe with unitFlag 3");
    }
}

struct MmadShape {
    static constexpr int k0 = 16;
    int m, n, k;
    bool vector;  // m = 1: the A operand is a plain row of k elements (page "GEMV")

    int k1() const { return static_cast<int>(up_to(k, k0) / k0); }
    int64_t column() const { return up_to(m, kFractalSide) * kFractalSide; }  // elements of a column of fractals in L0C
    // Element offsets. A: row i, L0B: column j, both at depth l.
    size_t a(int i, int l) const
    {
        if (vector) return static_cast<size_t>(l);
        return static_cast<size_t>(((i / 16 * k1() + l / k0) * 16 + i % 16) * k0 + l % k0);
    }
    size_t b(int j, int l) const
    {
        const int n1 = static_cast<int>(up_to(n, kFractalSide)) / 16;
        return static_cast<size_t>(((l / k0 * n1 + j / 16) * 16 + j % 16) * k0 + l % k0);
    }
};

// Notes the valid part of an operand as read: whole fractal rows where k allows.
template <typename T>
void read_matrix(Instruction& op, const Span& s, const MmadShape& shape, bool left)
{
    const int rows = left ? shape.m : shape.n;
    if (left && shape.vector) {
        op.read(s, 0, static_cast<size_t>(shape.k) * sizeof(T));
        return;
    }
    for (int r1 = 0; r1 < rows; r1 += kFractalSide) {
        const int valid = std::min(kFractalSide, rows - r1);
        for (int l = 0; l < shape.k; l += shape.k0) {
            const size_t at = (left ? shape.a(r1, l) : shape.b(r1, l)) * sizeof(T);
            const int depth = std::min(shape.k0, shape.k - l);
            if (depth == shape.k0) {
                op.read(s, at, static_cast<size_t>(valid) * kBlockBytes);
            } else {
                for (int r = 0; r < valid; ++r)
                    op.read(s, at + static_cast<size_t>(r) * kBlockBytes, static_cast<size_t>(depth) * sizeof(T));
            }
        }
    }
}

// The operands as floats: A by rows, B as (n1, k, 16), which the inner loop walks.
struct Factors {
    std::vector<float> left, right;
    bool finite = true;
    bool nan = false;
};

template <typename T>
Factors factors_of(const Span& a, const Span& b, const MmadShape& s)
{
    const size_t k = static_cast<size_t>(s.k);
    Factors f{std::vector<float>(static_cast<size_t>(s.m) * k),
              std::vector<float>(static_cast<size_t>(up_to(s.n, kFractalSide)) * k)};
    const auto value = [&f](const Span& from, size_t at) {
        float x = to_float(reinterpret_cast<const T*>(from.data())[at]);
        if (deviates(Deviation::subnormal_operands) && std::fabs(x) < kHalfNormal) x = 0.0f;
        f.finite &= is_finite(x);
        f.nan |= x != x;
        return x;
    };
    for (int l = 0; l < s.k; ++l) {
        const size_t depth = static_cast<size_t>(l);
        for (int i = 0; i < s.m; ++i) f.left[static_cast<size_t>(i) * k + depth] = value(a, s.a(i, l));
        for (int i = s.m; deviates(Deviation::tail_rows) && i < up_to(s.m, kFractalSide); ++i) {
            const float x = to_float(reinterpret_cast<const T*>(a.data())[s.a(i, l)]);
            if (x != x) f.left[depth] = x;
        }
        for (int j = 0; j < s.n; ++j)
            f.right[(static_cast<size_t>(j / 16) * k + depth) * 16 + static_cast<size_t>(j % 16)] = value(b, s.b(j, l));
    }
    return f;
}

// C += A * B. The sum runs over k = 0, 1, 2... with one FP32 rounding per term; products of half and bfloat16 are exact
// (inferred: the order in which the hardware adds is not public). Returns the number of overflows.
inline uint64_t multiply(const Span& c, const Factors& f, const MmadShape& s, bool from_zero, bool saturate)
{
    const size_t k = static_cast<size_t>(s.k);
    const bool turned = deviates(Deviation::sum_order);
    uint64_t overflows = 0;
    for (int j1 = 0; j1 * kFractalSide < s.n; ++j1) {
        const int valid = std::min(kFractalSide, s.n - j1 * kFractalSide);
        const float* right = f.right.data() + static_cast<size_t>(j1) * k * 16;
        for (int i = 0; i < s.m; ++i) {
            float* out = reinterpret_cast<float*>(c.data()) + j1 * s.column() + i * 16;
            float sum[16] = {};
            if (!from_zero) std::memcpy(sum, out, static_cast<size_t>(valid) * sizeof(float));
            bool finite = f.finite;
            for (float x : sum) finite &= is_finite(x);
            const float* left = f.left.data() + static_cast<size_t>(i) * k;
            for (size_t step = 0; step < k; ++step) {
                const size_t l = turned ? k - 1 - step : step;
                for (size_t j = 0; j < 16; ++j) sum[j] += left[l] * right[l * 16 + j];
            }
            for (float& x : sum) {
                overflows += finite && !is_finite(x) ? 1 : 0;
                if (saturate) x = saturated(x, FLT_MAX);
            }
            std::memcpy(out, sum, static_cast<size_t>(valid) * sizeof(float));
        }
    }
    return overflows;
}

// Deviation::accumulator.
inline void change_other_accumulator(float* written)
{
    static float* before = nullptr;
    static const Launch* of = nullptr;
    if (before != nullptr && of == launch && before != written) *before += 100.0f;
    before = written;
    of = launch;
}

inline void check_mmad_fields(const Instruction& op, const AscendC::MmadParams& p)
{
    op.fits(p.m, "m", 0, 4095);
    op.fits(p.n, "n", 0, 4095);
    op.fits(p.k, "k", 0, 4095);
    op.require(p.unitFlag == 0 || p.unitFlag == 2 || p.unitFlag == 3, FaultKind::range, "unitFlag is 0, 2 or 3");
    op.require(!p.cmatrixSource && !p.isBias && !p.kDirectionAlign, FaultKind::program,
               "the twin does not emulate bias sources and kDirectionAlign");
}

template <typename T>
void mmad(const Span& dst, const Span& fm, const Span& filter, const AscendC::MmadParams& p, Here here)
{
    Instruction op("Mmad", Pipe::M, here);
    op.require(op.core().kind != CoreKind::ai || std::is_same_v<T, half>, FaultKind::type, kNoBf16);
    op.require(op.core().kind != CoreKind::ai || p.unitFlag == 0, FaultKind::range, "an Ascend 310P has no unitFlag");
    op.lies_in(dst, {Space::L0C}, "dst");
    op.lies_in(fm, {Space::L0A}, "fm");
    op.lies_in(filter, {Space::L0B}, "filter");
    op.aligned(dst, 1024, "dst");
    op.aligned(fm, kFractalBytes, "fm");
    op.aligned(filter, kFractalBytes, "filter");
    check_mmad_fields(op, p);
    if (p.m == 0 || p.n == 0 || p.k == 0) return;
    const MmadShape s{p.m, p.n, p.k, p.m == 1};
    // From this size on the hardware orders Mmad after Mmad by itself (page "Mmad").
    if ((p.m / 16) * (p.n / 16) >= 10) op.own_pipe_in_order();
    if (p.unitFlag != 0) op.unit_flag();
    read_matrix<T>(op, fm, s, true);
    read_matrix<T>(op, filter, s, false);
    const auto all = [&](auto&& note) {
        for (int j = 0; j < s.n; j += kFractalSide) {
            const int valid = std::min(kFractalSide, s.n - j);
            const size_t at = static_cast<size_t>(j / 16 * s.column()) * sizeof(float);
            if (valid == kFractalSide) {
                note(at, static_cast<size_t>(s.m) * 16 * sizeof(float));
            } else {
                for (int i = 0; i < s.m; ++i)
                    note(at + static_cast<size_t>(i) * 16 * sizeof(float), static_cast<size_t>(valid) * sizeof(float));
            }
        }
    };
    const bool from_zero = p.cmatrixInitVal;
    if (!from_zero) all([&](size_t at, size_t n) { op.read(dst, at, n); });
    all([&](size_t at, size_t n) { op.write(dst, at, n); });
    const size_t whole = static_cast<size_t>(up_to(s.n, 16) / 16 * s.column()) * sizeof(float);
    use_unit_flags(op, dst, 0, whole, p.unitFlag, true);
    Core& c = op.core();
    c.counters.macs += static_cast<uint64_t>(up_to(s.m, 16) * up_to(s.n, 16) * up_to(s.k, s.k0));
    ++c.counters.mmads;
    op.run([=, &c, saturate = c.saturate] {
        const Factors f = factors_of<T>(fm, filter, s);
        if (f.nan && !is_deferred()) {  // eager: the report still is about this call
            c.fault(FaultKind::nan, fm.describe(0), "NaN in an operand of Mmad, which the device must not be fed");
        }
        c.counters.count_overflows("Mmad", multiply(dst, f, s, from_zero, saturate));
        if (deviates(Deviation::accumulator)) change_other_accumulator(reinterpret_cast<float*>(dst.data()));
    });
}

}  // namespace twin

namespace AscendC {

template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& loadDataParams,
              Here here = Here::now())
{
    twin::load_2d<T>(dst.span(), src.span(), loadDataParams, here);
}

template <typename T>
void Fill(const LocalTensor<T>& dst, const InitConstValueParams<T>& initConstValueParams, Here here = Here::now())
{
    twin::fill_l0<T>(dst.span(), initConstValueParams, here);
}

template <typename T, typename U, typename S>
void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter,
          const MmadParams& mmadParams, Here here = Here::now())
{
    static_assert(std::is_same_v<T, float> && std::is_same_v<U, S> && twin::is_one_of<U, half, bfloat16_t>,
                  "Mmad: the twin multiplies half and bfloat16 into float, which is what A2 makes of them");
    twin::mmad<U>(dst.span(), fm.span(), filter.span(), mmadParams, here);
}

}  // namespace AscendC
