// The cube core: LoadData (2D) into L0A and L0B, and Mmad. Signatures: kernel_operator_mm_intf.h.
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
    const bool from_gm = on_gm(src);
    const Pipe pipe = from_gm ? Pipe::MTE2 : Pipe::MTE1;
    Instruction op("LoadData", pipe, here);
    if (from_gm) {
        op.lies_in(dst, {Space::L0A, Space::L0B, Space::L1}, "dst");
    } else {
        op.lies_in(src, {Space::L1}, "src");
        op.lies_in(dst, {Space::L0A, Space::L0B}, "dst");
        op.aligned(src, kBlockBytes, "src");
    }
    op.aligned(dst, on(dst, Space::L1) ? kBlockBytes : kFractalBytes, "dst");
    op.fits(p.startIndex, "startIndex", 0, 65535);
    op.fits(p.repeatTimes, "repeatTimes", 0, 255);
    op.fits(p.srcStride, "srcStride", 0, 65535);
    op.fits(p.dstGap, "dstGap", 0, 65535);
    op.require(!p.ifTranspose || (!from_gm && sizeof(T) == 2), FaultKind::type,
               "ifTranspose needs 16-bit data on the way from L1 to L0");
    op.require(p.addrMode == 0 || from_gm, FaultKind::range, "addrMode serves loads from GM only");
    const int64_t repeats = p.repeatTimes.full();
    if (repeats == 0) return;
    const int64_t step = (p.addrMode == 0 ? 1 : -1) * p.srcStride.full();
    const auto from = [start = p.startIndex.full(), step](int64_t i) {
        return (start + i * step) * static_cast<int64_t>(kFractalBytes);
    };
    const auto to = [gap = p.dstGap.full()](int64_t i) { return static_cast<size_t>(i * (gap + 1)) * kFractalBytes; };
    op.copies();
    for (int64_t i = 0; i < repeats; ++i) {
        op.require(from(i) >= 0, FaultKind::bounds, "fractal " + std::to_string(i) + " lies before the source");
        op.read(src, static_cast<size_t>(from(i)), kFractalBytes);
    }
    for (int64_t i = 0; i < repeats; ++i) op.write(dst, to(i), kFractalBytes);
    const bool transpose = p.ifTranspose;
    for (int64_t i = 0; i < repeats; ++i) {
        const size_t s = static_cast<size_t>(from(i)), d = to(i);
        if (!transpose || src.memory->initialised(src.begin + s, kFractalBytes)) {
            op.hand_on(dst, d, kFractalBytes, src, s, kFractalBytes);
            continue;
        }
        for (size_t e = 0; e < 256; ++e) op.hand_on(dst, d + (e % 16 * 16 + e / 16) * 2, 2, src, s + e * 2, 2);
    }
    op.copied(src);
    op.core().counters.bytes[index_of(pipe)] += static_cast<size_t>(repeats) * kFractalBytes;
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

template <typename D, typename A, typename B>
constexpr bool mmad_types =
    (std::is_same_v<A, B> && std::is_same_v<D, float> && is_one_of<A, half, float, bfloat16_t>) ||
    (std::is_same_v<A, int8_t> && std::is_same_v<B, int8_t> && std::is_same_v<D, int32_t>);

inline int64_t up_to(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct MmadShape {
    int m, n, k, k0;
    bool vector;  // m = 1: the A operand is a plain row of k elements (page "GEMV")

    int k1() const { return static_cast<int>(up_to(k, k0) / k0); }
    int64_t column() const
    {
        return up_to(m, kFractalSide) * kFractalSide;
    }  // elements of one column of fractals in L0C
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

template <typename T>
using Summed = std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>;

// C += A * B. The sum runs over k = 0, 1, 2... with one FP32 rounding per term; products of half and bfloat16 are exact
// (inferred: the order in which the hardware adds is not public).
template <typename D, typename T>
void multiply(const Span& c, const Span& a, const Span& b, const MmadShape& s, bool from_zero, bool check_nan,
              bool saturate, Core& core_, Here here)
{
    using Sum = Summed<T>;
    const size_t k = static_cast<size_t>(s.k);
    const int columns = static_cast<int>(up_to(s.n, kFractalSide));
    std::vector<Sum> left(static_cast<size_t>(s.m) * k);
    std::vector<Sum> right(static_cast<size_t>(columns) * k, Sum(0));
    const T* pa = reinterpret_cast<const T*>(a.data());
    const T* pb = reinterpret_cast<const T*>(b.data());
    const auto value = [](T x) {
        if constexpr (std::is_same_v<T, int8_t>) return static_cast<int32_t>(x);
        else return to_float(x);
    };
    for (int i = 0; i < s.m; ++i) {
        for (int l = 0; l < s.k; ++l) left[static_cast<size_t>(i) * k + static_cast<size_t>(l)] = value(pa[s.a(i, l)]);
    }
    for (int j = 0; j < s.n; ++j) {  // laid out as (n1, k, 16), which the inner loop walks
        for (int l = 0; l < s.k; ++l)
            right[(static_cast<size_t>(j / 16) * k + static_cast<size_t>(l)) * 16 + static_cast<size_t>(j % 16)] =
                value(pb[s.b(j, l)]);
    }
    if constexpr (std::is_same_v<Sum, float>) {
        bool nan = false;
        for (float x : left) nan |= x != x;
        for (float x : right) nan |= x != x;
        if (nan && check_nan) {
            core_.call = "Mmad";
            core_.here = here;
            core_.pipe = Pipe::M;
            core_.fault(FaultKind::nan, a.describe(0), "NaN in an operand of Mmad, which the device must not be fed");
        }
    }
    for (int j1 = 0; j1 < columns / 16; ++j1) {
        const int valid = std::min(kFractalSide, s.n - j1 * 16);
        const Sum* br = right.data() + static_cast<size_t>(j1) * k * 16;
        for (int i = 0; i < s.m; ++i) {
            D* out = reinterpret_cast<D*>(c.data()) + j1 * s.column() + i * 16;
            Sum sum[16] = {};
            if (!from_zero) std::memcpy(sum, out, static_cast<size_t>(valid) * sizeof(Sum));
            const Sum* al = left.data() + static_cast<size_t>(i) * k;
            for (size_t l = 0; l < k; ++l) {
                for (int j = 0; j < 16; ++j) sum[j] += al[l] * br[l * 16 + static_cast<size_t>(j)];
            }
            if constexpr (std::is_same_v<Sum, float>) {
                for (int j = 0; saturate && j < 16; ++j) sum[j] = saturated(sum[j], FLT_MAX);
            }
            std::memcpy(out, sum, static_cast<size_t>(valid) * sizeof(Sum));
        }
    }
}

template <typename D, typename T>
void mmad(const Span& dst, const Span& fm, const Span& filter, const AscendC::MmadParams& p, Here here)
{
    Instruction op("Mmad", Pipe::M, here);
    op.lies_in(dst, {Space::L0C}, "dst");
    op.lies_in(fm, {Space::L0A}, "fm");
    op.lies_in(filter, {Space::L0B}, "filter");
    op.aligned(dst, 1024, "dst");
    op.aligned(fm, kFractalBytes, "fm");
    op.aligned(filter, kFractalBytes, "filter");
    op.fits(p.m, "m", 0, 4095);
    op.fits(p.n, "n", 0, 4095);
    op.fits(p.k, "k", 0, 4095);
    op.require(p.unitFlag == 0 || p.unitFlag == 2 || p.unitFlag == 3, FaultKind::range, "unitFlag is 0, 2 or 3");
    op.require(!p.cmatrixSource && !p.isBias && !p.kDirectionAlign, FaultKind::program,
               "the twin does not emulate bias sources and kDirectionAlign");
    if (p.m == 0 || p.n == 0 || p.k == 0) return;
    const MmadShape s{p.m, p.n, p.k, static_cast<int>(kBlockBytes / sizeof(T)), p.m == 1};
    // Above this size the hardware orders Mmad after Mmad by itself (page "Mmad").
    if ((p.m / 16) * (p.n / 16) >= 10) op.own_pipe_in_order();
    if (p.unitFlag != 0) op.unit_flag();
    read_matrix<T>(op, fm, s, true);
    read_matrix<T>(op, filter, s, false);
    const bool from_zero = p.cmatrixInitVal;
    const auto all = [&](auto&& note) {
        for (int j = 0; j < s.n; j += 16) {
            const int valid = std::min(kFractalSide, s.n - j);
            const size_t at = static_cast<size_t>(j / 16 * s.column()) * sizeof(D);
            if (valid == kFractalSide) {
                note(at, static_cast<size_t>(s.m) * 16 * sizeof(D));
            } else {
                for (int i = 0; i < s.m; ++i)
                    note(at + static_cast<size_t>(i) * 16 * sizeof(D), static_cast<size_t>(valid) * sizeof(D));
            }
        }
    };
    if (!from_zero) all([&](size_t at, size_t n) { op.read(dst, at, n); });
    all([&](size_t at, size_t n) { op.write(dst, at, n); });
    Counters& counters = op.core().counters;
    counters.macs += static_cast<uint64_t>(up_to(s.m, 16) * up_to(s.n, 16) * up_to(s.k, s.k0));
    ++counters.mmads;
    Core& c = op.core();
    const bool check_nan = c.options.check_nan && !is_deferred();
    const bool saturate = c.saturate;
    op.run([=, &c] { multiply<D, T>(dst, fm, filter, s, from_zero, check_nan, saturate, c, here); });
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
void LoadData(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const LoadData2DParams& loadDataParams,
              Here here = Here::now())
{
    twin::load_2d<T>(dst.span(), src.span(), loadDataParams, here);
}

template <typename T, typename U, typename S>
void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter,
          const MmadParams& mmadParams, Here here = Here::now())
{
    static_assert(twin::mmad_types<T, U, S>,
                  "Mmad: A2 multiplies half, bfloat16 or float into float, and int8 into int32");
    twin::mmad<T, U>(dst.span(), fm.span(), filter.span(), mmadParams, here);
}

}  // namespace AscendC
