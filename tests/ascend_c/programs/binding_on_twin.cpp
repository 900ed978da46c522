// The launches that binding.cpp asks for, on the CPU twin: the binding's tensors are copied in and out.
// K' has no kernel yet: it is made here as ops/shift_keys/reference.py makes it.
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../../../ascend_c/binding/launch.h"
#include "../../../ascend_c/kernel/pasa_attention.h"

namespace {

template <typename T>
const T* Of(void* pointer) { return static_cast<const T*>(pointer); }

template <typename T>
GM_ADDR Input(twin::Device& device, const char* name, void* pointer, size_t count)
{
    if (pointer == nullptr) return nullptr;
    return reinterpret_cast<GM_ADDR>(device.input(name, std::vector<T>(Of<T>(pointer), Of<T>(pointer) + count)));
}

bool IsHalf(float x) { return static_cast<float>(static_cast<half>(x)) == x; }

// One block of K' of the exact recovery: `n` keys of `dim` columns, in FP32.
struct Shifted {
    std::vector<float> keys, anchor, residual;
    float unit;
};

float Anchor(const std::vector<float>& k, uint32_t n, uint32_t dim, uint32_t d, float mean)
{
    float largest = 0.0f;
    for (uint32_t i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(k[i * dim + d]));
    int exponent = 0;
    std::frexp(largest, &exponent);
    const float grid = std::fmax(std::ldexp(1.0f, exponent - 11), 0x1p-24f);
    const float anchor = std::nearbyint(mean / grid) * grid;
    for (uint32_t i = 0; i < n; ++i) {
        const float x = k[i * dim + d], rest = x - anchor;
        if (!IsHalf(rest) || rest + anchor != x) return 0.0f;
    }
    return anchor;
}

Shifted Shift(const std::vector<float>& k, uint32_t n, uint32_t dim, float unit)
{
    Shifted s{std::vector<float>(k.size()), std::vector<float>(dim), std::vector<float>(dim), unit};
    for (uint32_t d = 0; d < dim; ++d) {
        float mean = 0.0f;
        for (uint32_t i = 0; i < n; ++i) mean += k[i * dim + d];
        mean = n == 0 ? 0.0f : mean / static_cast<float>(n);
        s.anchor[d] = Anchor(k, n, dim, d, mean);
        s.residual[d] = mean - s.anchor[d];
        for (uint32_t i = 0; i < n; ++i) {
            s.keys[i * dim + d] = k[i * dim + d] - s.anchor[d];
            if (!IsHalf(s.keys[i * dim + d] * unit)) s.unit = 1.0f;
        }
    }
    for (float& x : s.keys) x *= s.unit;
    return s;
}

void Store(const Shifted& block, const Shifted& first, uint32_t j, uint32_t dim, half* keys, half* anchors)
{
    for (uint32_t d = 0; d < dim; ++d) {
        const float offset = block.anchor[d] - first.anchor[d];
        const half high = static_cast<half>(j == 0 ? block.anchor[d] : offset);
        anchors[d] = high;
        anchors[dim + d] = static_cast<half>(j == 0 ? block.residual[d] : offset - static_cast<float>(high));
    }
    const uint32_t width = dim + pasa::kFractal;
    for (size_t i = 0; i < block.keys.size() / dim; ++i) {
        for (uint32_t d = 0; d < width; ++d) {
            keys[i * width + d] = static_cast<half>(d < dim ? block.keys[i * dim + d] : d < dim + 2 ? -1.0f : 0.0f);
        }
    }
}

}  // namespace

namespace pasa {

void LaunchAttention(bool exact, const AttentionPointers& p, const AttentionTiling& t, uint32_t cores, void*)
{
    twin::Device device;
    const size_t queries = size_t{t.batch} * t.heads * t.rows, keys = size_t{t.batch} * t.kv_heads * t.keys;
    const size_t blocks = size_t{t.batch} * t.kv_heads * t.blocks;
    Arguments given{};
    given.q = Input<half>(device, "q", p.q, queries * t.dim);
    given.keys = Input<half>(device, "keys", p.keys, keys * (t.dim + (exact ? kFractal : 0)));
    given.v = Input<half>(device, "v", p.v, keys * t.dim);
    given.anchors = Input<half>(device, "anchors", p.anchors, blocks * 2 * t.dim);
    given.units = Input<float>(device, "units", p.units, blocks * kVerdictWords);
    given.lengths = Input<int32_t>(device, "lengths", p.lengths, t.batch);
    given.out = device.allocate("out", queries * t.dim * sizeof(half), twin::Role::output);
    given.lse = device.allocate("lse", queries * sizeof(float), twin::Role::output);
    given.workspace = device.workspace<uint8_t>("workspace", t.workspace_bytes);
    const twin::Report report = device.launch("pasa_attention", static_cast<int>(cores), twin::Options{}, [&] {
        exact ? PasaAttention<true>(given, t) : PasaAttention<false>(given, t);
    });
    if (!report.ok) throw std::runtime_error(report.json());
    std::memcpy(p.out, given.out, queries * t.dim * sizeof(half));
    std::memcpy(p.lse, given.lse, queries * sizeof(float));
}

void LaunchShiftExact(const ShiftPointers& p, const ShiftTiling& t, uint32_t, void*)
{
    for (uint32_t h = 0; h < t.heads; ++h) {
        const uint32_t there = t.has_lengths ? static_cast<uint32_t>(Of<int32_t>(p.lengths)[h / t.kv_heads]) : t.keys;
        Shifted first;
        for (uint32_t j = 0; j < t.blocks; ++j) {
            const uint32_t start = j * kBlockKeys, rows = std::min(kBlockKeys, t.keys - start);
            const uint32_t n = there <= start ? 0 : std::min(rows, there - start);
            const half* k = Of<half>(p.k) + (size_t{h} * t.keys + start) * t.dim;
            const Shifted block = Shift(std::vector<float>(k, k + size_t{rows} * t.dim), n, t.dim, t.unit);
            if (j == 0) first = block;
            const size_t at = size_t{h} * t.blocks + j;
            half* keys = static_cast<half*>(p.keys) + (size_t{h} * t.keys + start) * (t.dim + kFractal);
            Store(block, first, j, t.dim, keys, static_cast<half*>(p.anchors) + at * 2 * t.dim);
            for (uint32_t i = 0; i < kVerdictWords; ++i)
                static_cast<float*>(p.units)[at * kVerdictWords + i] = block.unit;
        }
    }
}

void LaunchShiftPaper(const ShiftPointers& p, const ShiftTiling& t, uint32_t, void*)
{
    for (size_t row = 0; row < size_t{t.heads} * t.keys; ++row) {
        const size_t key = row % t.keys, j = key / kBlockKeys, start = row - key % kBlockKeys;
        const size_t n = std::min<size_t>(kBlockKeys, t.keys - j * kBlockKeys);
        const half* m = Of<half>(p.matrices) + (j + 1 == t.blocks ? kBlockKeys * kBlockKeys : 0);
        for (uint32_t d = 0; d < t.dim; ++d) {
            float sum = 0.0f;
            for (size_t i = 0; i < n; ++i) {
                sum += static_cast<float>(m[(key % kBlockKeys) * kBlockKeys + i]) *
                       static_cast<float>(Of<half>(p.k)[(start + i) * t.dim + d]);
            }
            static_cast<half*>(p.keys)[row * t.dim + d] = static_cast<half>(sum);
        }
    }
}

}  // namespace pasa
