// What the operators of decoding share: a call, its checks, and its layout for the tiling.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../tiling/decode_plan.h"
#include "pointers.h"
#include "starts.h"
#include "tensors.h"

namespace pasa {

// The tensors of a call: q (Hkv, T, G, D), the query heads of each KV head for the tokens of all sequences; k and v
// (B, Hkv, Skv, D), or with a table (B, columns) pages (pages, slots, Hkv, D). A sequence has `tokens` of the tokens,
// or those that `starts` (B + 1,) says. Without a table `starts` is (2, B + 1), and k and v are packed (1, Hkv, Tk, D).
struct DecodeCall {
    const Tensor& q;
    const Tensor& k;
    const Tensor& v;
    const OptionalTensor& table;
    const OptionalTensor& lengths;
    const OptionalTensor& starts;
    const OptionalTensor& sinks;
    int64_t tokens;

    bool paged() const { return table.has_value(); }
    bool packed() const { return starts && !paged(); }
    int64_t entries() const { return packed() ? 1 : k.size(0); }  // of k and v, without pages
    int64_t batch() const { return paged() ? table->size(0) : packed() ? starts->size(1) - 1 : k.size(0); }
    int64_t slots() const { return k.size(paged() ? 1 : 2); }
    int64_t keys() const { return paged() ? table->size(1) * slots() : slots(); }
};

// ---- checks

inline void CheckQueries(const DecodeCall& c)
{
    const Tensor& q = c.q;
    const int64_t rows = q.size(1), group = q.size(2), dim = q.size(3);
    CheckKind("q", q, q, at::kHalf, q.sizes());
    TORCH_CHECK_VALUE(q.is_non_overlapping_and_dense() && q.stride(3) == 1 && (group == 1 || q.stride(2) == dim),
                      "q has strides ", q.strides(), ", expected dense rows of ", dim, ", those of a token in a row");
    const bool single = !c.starts && c.tokens == 1;
    TORCH_CHECK_VALUE(single || rows == 1 || q.stride(1) == group * dim, "q has strides ", q.strides(),
                      ", expected the tokens of a sequence in a row");
    TORCH_CHECK_VALUE(c.starts || rows == c.batch() * c.tokens, "q has ", rows, " tokens, expected tokens=", c.tokens,
                      " for each of ", c.batch(), " sequences");
}

inline void CheckCache(const char* name, const Tensor& x, const DecodeCall& c)
{
    const int64_t heads = c.q.size(0), dim = c.q.size(3);
    const std::vector<int64_t> shape = c.paged() ? std::vector<int64_t>{c.k.size(0), c.slots(), heads, dim}
                                                 : std::vector<int64_t>{c.entries(), heads, c.slots(), dim};
    CheckKind(name, x, c.q, at::kHalf, shape);
    TORCH_CHECK_VALUE(x.stride(3) == 1, name, " has strides ", x.strides(), ", expected 1 as the last");
}

// Numbers in host memory alone: those of a device would have to be waited for. There the kernel clamps them.
inline void CheckPages(const DecodeCall& c)
{
    if (!c.table->device().is_cpu()) return;
    const int64_t columns = c.table->size(1), slots = c.slots(), pages = c.k.size(0);
    const int32_t *table = c.table->const_data_ptr<int32_t>(), *keys = c.lengths->const_data_ptr<int32_t>();
    for (int64_t b = 0; b < c.batch(); ++b) {
        TORCH_CHECK_VALUE(keys[b] >= 0 && keys[b] <= columns * slots, "lengths[", b, "]=", keys[b],
                          " do not fit into the ", columns, " pages of ", slots, " keys that table has for a sequence");
        for (int64_t i = 0; i * slots < keys[b]; ++i) {
            const int32_t page = table[b * columns + i];
            TORCH_CHECK_VALUE(page >= 0 && page < pages, "table[", b, ", ", i, "]=", page, ", but the cache has ",
                              pages, " pages");
        }
    }
}

inline void CheckStarts(const DecodeCall& c)
{
    if (c.packed()) {
        ReadStarts(*c.starts, c.q, c.q.size(1), c.slots());
        return;
    }
    CheckTensor("starts", *c.starts, c.q, at::kInt, {c.batch() + 1});
    if (!c.starts->device().is_cpu()) return;
    const int32_t* at = c.starts->const_data_ptr<int32_t>();
    TORCH_CHECK_VALUE(at[0] == 0, "starts[0]=", at[0], " must be 0: the first sequence begins with the first token");
    for (int64_t b = 1; b <= c.batch(); ++b) {
        TORCH_CHECK_VALUE(at[b] >= at[b - 1] && at[b] <= c.q.size(1), "starts[", b, "]=", at[b],
                          " does not rise from 0 to at most the ", c.q.size(1), " tokens of q");
    }
}

inline void Check(const DecodeCall& c)
{
    TORCH_CHECK_VALUE(!c.paged() || (c.table->dim() == 2 && c.lengths), "table needs two dimensions, and lengths");
    TORCH_CHECK_VALUE(!c.packed() || c.starts->dim() == 2, "starts has shape ", c.starts->sizes(),
                      ", expected [2, sequences + 1] without a table");
    CheckQueries(c);
    CheckCache("k", c.k, c);
    CheckCache("v", c.v, c);
    if (c.lengths) CheckTensor("lengths", *c.lengths, c.q, at::kInt, {c.batch()});
    if (c.starts) CheckStarts(c);
    if (c.sinks) CheckTensor("sinks", *c.sinks, c.q, at::kFloat, {c.q.size(0) * c.q.size(2)});
    if (c.paged()) {
        CheckTensor("table", *c.table, c.q, at::kInt, c.table->sizes());
        TORCH_CHECK_VALUE(c.keys() <= std::numeric_limits<int32_t>::max(), "table has room for ", c.keys(), " keys");
        CheckPages(c);
    }
}

// ---- tiling

// An axis with one entry may have any stride, because nothing steps over it.
inline CacheStrides StridesOf(const Tensor& x, bool paged)
{
    const auto step = [&x](int64_t axis, int64_t alone) { return x.size(axis) == 1 ? alone : x.stride(axis); };
    const int64_t slot = step(paged ? 1 : 2, x.size(3)), head = step(paged ? 2 : 1, 0);
    return {static_cast<uint64_t>(step(0, 0)), static_cast<uint64_t>(head),
            static_cast<uint32_t>(std::min<int64_t>(slot, std::numeric_limits<uint32_t>::max()))};
}

inline DecodeLayout LayoutOf(const DecodeCall& c)
{
    DecodeLayout layout;
    layout.tokens = static_cast<uint32_t>(c.tokens);
    layout.has_starts = c.starts.has_value();
    layout.pages = c.paged() ? Count("k", c.k, 0) : 0;
    layout.slots = Count("k", c.k, c.paged() ? 1 : 2);
    layout.table_columns = c.paged() ? static_cast<uint32_t>(c.table->size(1)) : 0;
    layout.q_token = static_cast<uint64_t>(c.q.stride(1));
    layout.q_head = static_cast<uint64_t>(c.q.stride(0));
    layout.k = StridesOf(c.k, c.paged());
    layout.v = StridesOf(c.v, c.paged());
    return layout;
}

// The shape of a call, checked.
inline Shape ShapeOf(const DecodeCall& c)
{
    const Tensor& q = c.q;
    Shape shape{0, Count("q", q, 0) * Count("q", q, 2), Count("q", q, 0), Count("q", q, 1), 1, Count("q", q, 3)};
    Count("k", c.k, 0);
    Check(c);
    shape.batch = static_cast<uint32_t>(c.batch());
    shape.keys = static_cast<uint32_t>(c.keys());
    return shape;
}

inline Settings SettingsOf(const DecodeCall& c, bool is_causal, double scale)
{
    Settings settings;
    settings.causal = is_causal;
    settings.has_lengths = c.lengths.has_value();
    settings.has_sinks = c.sinks.has_value();
    settings.scale = scale;
    return settings;
}

inline DecodePointers PointersOf(const DecodeCall& c, const Tensor& out, const Tensor& lse, const Tensor& workspace)
{
    return {Pointer(c.q),      Pointer(c.k),     Pointer(c.v), Pointer(c.table), Pointer(c.lengths),
            Pointer(c.starts), Pointer(c.sinks), Pointer(out), Pointer(lse),     Pointer(workspace)};
}

}  // namespace pasa
