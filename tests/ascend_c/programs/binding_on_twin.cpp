// The launches that binding.cpp asks for, on the CPU twin: the binding's tensors are copied in and out.
#include "../../../ascend_c/binding/launch.h"

#include <cstring>
#include <stdexcept>

#include "../../../ascend_c/kernel/pasa_attention.h"
#include "../../../ascend_c/kernel/shift_exact.h"
#include "../../../ascend_c/kernel/shift_paper.h"

namespace {

template <typename T>
GM_ADDR Input(twin::Device& device, const char* name, const void* pointer, size_t count)
{
    if (pointer == nullptr) return nullptr;
    const T* first = static_cast<const T*>(pointer);
    return reinterpret_cast<GM_ADDR>(device.input(name, std::vector<T>(first, first + count)));
}

template <typename T>
GM_ADDR Output(twin::Device& device, const char* name, const void* pointer, size_t count)
{
    return pointer == nullptr ? nullptr : reinterpret_cast<GM_ADDR>(device.output<T>(name, count));
}

template <typename T>
void CopyBack(void* pointer, GM_ADDR from, size_t count)
{
    if (pointer != nullptr) std::memcpy(pointer, reinterpret_cast<const uint8_t*>(from), count * sizeof(T));
}

void Run(twin::Device& device, const char* name, uint32_t cores, twin::Shape shape, const std::function<void()>& kernel)
{
    twin::Options options;
    options.shape = shape;
    const twin::Report report = device.launch(name, static_cast<int>(cores), options, kernel);
    if (!report.ok) throw std::runtime_error(report.json());
}

void LaunchShift(bool exact, const pasa::ShiftPointers& p, const pasa::ShiftTiling& t, uint32_t cores)
{
    twin::Device device;
    const size_t rows = size_t{t.heads} * t.keys, blocks = size_t{t.heads} * t.blocks;
    const size_t columns = t.dim + (exact ? pasa::kFractal : 0);
    const size_t first = std::min(t.keys, pasa::kBlockKeys), last = t.keys - (t.blocks - 1) * pasa::kBlockKeys;
    pasa::ShiftArguments given{};
    given.k = Input<half>(device, "k", p.k, rows * t.dim);
    given.lengths = Input<int32_t>(device, "lengths", p.lengths, t.heads / t.kv_heads);
    given.matrix = Input<half>(device, "matrix", p.matrix, first * first);
    given.last_matrix = Input<half>(device, "last_matrix", p.last_matrix, last * last);
    given.keys = Output<half>(device, "keys", p.keys, rows * columns);
    given.anchors = Output<half>(device, "anchors", p.anchors, blocks * 2 * t.dim);
    given.units = Output<float>(device, "units", p.units, blocks * pasa::kVerdictWords);
    if (exact) {
        Run(device, "shift_exact", cores, twin::Shape::aiv_only, [&] { pasa::ShiftExact(given, t); });
    } else {
        Run(device, "shift_paper", cores, twin::Shape::aic_only, [&] { pasa::ShiftPaper(given, t); });
    }
    CopyBack<half>(p.keys, given.keys, rows * columns);
    CopyBack<half>(p.anchors, given.anchors, blocks * 2 * t.dim);
    CopyBack<float>(p.units, given.units, blocks * pasa::kVerdictWords);
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
    given.out = Output<half>(device, "out", p.out, queries * t.dim);
    given.lse = Output<float>(device, "lse", p.lse, queries);
    given.workspace = device.workspace<uint8_t>("workspace", t.workspace_bytes);
    Run(device, "pasa_attention", cores, twin::Shape::mix_1_2,
        [&] { exact ? PasaAttention<true>(given, t) : PasaAttention<false>(given, t); });
    CopyBack<half>(p.out, given.out, queries * t.dim);
    CopyBack<float>(p.lse, given.lse, queries);
}

void LaunchShiftExact(const ShiftPointers& p, const ShiftTiling& t, uint32_t cores, void*) { LaunchShift(true, p, t, cores); }

void LaunchShiftPaper(const ShiftPointers& p, const ShiftTiling& t, uint32_t cores, void*) { LaunchShift(false, p, t, cores); }

}  // namespace pasa
