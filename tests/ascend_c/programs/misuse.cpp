// One wrong call at a time. Every snippet has a correct twin: `bug=0` runs it, `bug=1` runs it with the mistake.
#include <stdexcept>

#include "harness.h"

using namespace AscendC;

namespace {

struct Snippet {
    twin::Shape shape;
    std::function<void(bool, half*, float*)> run;  // the mistake, a GM input of 4096, a GM output of 4096
    std::function<void(bool, twin::Options&)> options = nullptr;
};

// A place in UB, named for calculating, for copies from GM and for copies to GM.
LocalTensor<half> ub(uint32_t address, uint32_t n) { return LocalTensor<half>(TPosition::VECCALC, address, n); }
LocalTensor<half> in(uint32_t address, uint32_t n) { return LocalTensor<half>(TPosition::VECIN, address, n); }
LocalTensor<half> out(uint32_t address, uint32_t n) { return LocalTensor<half>(TPosition::VECOUT, address, n); }

// Snippets on vector cores start from x = 0..1023 at UB address 0, initialised.
LocalTensor<half> some_input()
{
    LocalTensor<half> x = ub(0, 1024);
    Duplicate(x, half(3), 1024);
    PipeBarrier<PIPE_V>();
    return x;
}

void cube_operands(LocalTensor<half>& a, LocalTensor<half>& b, half* gx)
{
    LocalTensor<half> l1(TPosition::A1, 0, 4096);
    GlobalTensor<half> x;
    x.SetGlobalBuffer(gx, 4096);
    DataCopy(l1, x, 4096);
    PipeBarrier<PIPE_ALL>();
    a = LocalTensor<half>(TPosition::A2, 0, 4096);
    b = LocalTensor<half>(TPosition::B2, 0, 4096);
    LoadData2DParams p;
    p.repeatTimes = 16;
    p.srcStride = 1;
    LoadData(a, l1, p);
    LoadData(b, l1, p);
    PipeBarrier<PIPE_ALL>();
}

MmadParams mmad_params(int m, int n, int k)
{
    MmadParams p;
    p.m = m;
    p.n = n;
    p.k = k;
    return p;
}

FixpipeParamsV220 fixpipe_params(int m, int n)
{
    FixpipeParamsV220 p;
    p.mSize = m;
    p.nSize = n;
    p.srcStride = (m + 15) / 16 * 16;
    p.dstStride = n;
    return p;
}

constexpr twin::Shape aiv = twin::Shape::aiv_only, aic = twin::Shape::aic_only, mix = twin::Shape::mix_1_2;

// A product of 16 x 16 in L0C, finished.
LocalTensor<float> some_product(half* gx, int unit_flag = 0)
{
    LocalTensor<half> a, b;
    cube_operands(a, b, gx);
    LocalTensor<float> c(TPosition::CO1, 0, 4096);
    MmadParams p = mmad_params(16, 16, 16);
    p.unitFlag = unit_flag;
    Mmad(c, a, b, p);
    if (unit_flag == 0) PipeBarrier<PIPE_ALL>();
    return c;
}

const std::map<std::string, Snippet>& snippets()
{
    static const std::map<std::string, Snippet> all = {
        {"ub_capacity",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TBuf<TPosition::VECCALC> big, more;
              pipe.InitBuffer(big, 180 * 1024);
              pipe.InitBuffer(more, bug ? 8 * 1024 : 3 * 1024);  // 192 KiB less the 8 KiB that the compiler reserves
          }}},
        {"l0c_capacity",
         {aic,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TBuf<TPosition::CO1> c;
              pipe.InitBuffer(c, (bug ? 129 : 128) * 1024);
          }}},
        {"vector_on_cube",
         {aic,
          [](bool bug, half*, float*) {
              LocalTensor<half> x(TPosition::A1, 0, 1024);
              if (bug) Adds(x, x, half(1), 1024);
          }}},
        {"mmad_position",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, bug ? b : a, b, mmad_params(16, 16, 16));
          }}},
        {"gm_to_l0c",
         {aic,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              DataCopy(LocalTensor<half>(bug ? TPosition::CO1 : TPosition::A1, 0, 1024), x, 1024);
          }}},
        {"ub_alignment",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(ub(4096, 1024)[bug ? 8 : 16], x, half(1), 128);
          }}},
        {"copy_alignment",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              DataCopy(in(0, 1024), x, bug ? 63 : 64);
          }}},
        {"l0_alignment",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, a[bug ? 128 : 256], b, mmad_params(16, 16, 16));
          }}},
        {"mmad_alignment",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c[bug ? 16 : 256], a, b, mmad_params(16, 16, 16));
          }}},
        {"repeat_range",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = ub(0, 80 * 1024);
              const int repeats = bug ? 256 : 255;
              Duplicate(x, half(0), uint64_t(128), repeats, 1, 8);
          }}},
        {"mask_range",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<float> x(TPosition::VECCALC, 0, 1024);
              Duplicate(x, 0.0f, uint64_t(bug ? 128 : 64), 1, 1, 8);
          }}},
        {"nd2nz_range",
         {aic,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              Nd2NzParams p(1, 1, 16, 0, bug ? 65536 : 65535, 16, 1, 0);
              DataCopy(LocalTensor<half>(TPosition::A1, 0, 1024), x, p);
          }}},
        {"fixpipe_range",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, a, b, mmad_params(32, 32, 16));
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 4096);
              Fixpipe<float, float>(z, c, fixpipe_params(32, bug ? 24 : 32));
          }}},
        {"tensor_bounds",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(ub(4096, 512), x, half(1), bug ? 528 : 512);
          }}},
        {"gm_bounds",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx);
              DataCopy(in(0, 1024), x[bug ? 4032 : 4000], 96);
          }}},
        {"gm_foreign",
         {aiv,
          [](bool bug, half* gx, float*) {
              static half outside[16];
              GlobalTensor<half> x;
              x.SetGlobalBuffer(bug ? outside : gx, 16);
          }}},
        {"fixpipe_quant",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, a, b, mmad_params(16, 16, 16));
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 4096);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              if (!bug) p.quantPre = F322F16;
              Fixpipe<half, float>(z, c, p);
          }}},
        {"cast_mode",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Cast(LocalTensor<float>(TPosition::VECCALC, 4096, 1024), x,
                   bug ? RoundMode::CAST_RINT : RoundMode::CAST_NONE, 1024);
          }}},
        {"unwritten",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(ub(8192, 1024), bug ? ub(4096, 1024) : x, half(1), 1024);
          }}},
        {"unwritten_copy",
         {aiv,
          [](bool bug, half*, float* gz) {
              some_input();
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 4096);
              DataCopy(z, out(bug ? 4096 : 0, 1024), 1024);
          }}},
        {"nd2nz_tail_rows",
         {aic,
          [](bool bug, half* gx, float*) {
              // 10 rows of a 16-row fractal: the tail rows hold nothing, and Mmad may not use them.
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              LocalTensor<half> l1(TPosition::A1, 0, 256), a(TPosition::A2, 0, 256), b(TPosition::B2, 0, 256);
              DataCopy(l1, x, Nd2NzParams(1, 10, 16, 0, 16, 16, 1, 0));
              PipeBarrier<PIPE_ALL>();
              LoadData2DParams p;
              p.repeatTimes = 1;
              LoadData(a, l1, p);
              LoadData(b, l1, p);
              PipeBarrier<PIPE_ALL>();
              Mmad(LocalTensor<float>(TPosition::CO1, 0, 256), a, b, mmad_params(bug ? 16 : 10, 10, 16));
          }}},
        {"pad_undefined",
         {aiv,
          [](bool bug, half* gx, float*) {
              // Padding without isPad is random; with it, it is paddingValue.
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              LocalTensor<half> y = in(0, 16);
              DataCopyPad(y, x, DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<half>(!bug, 0, 6, half(0)));
              PipeBarrier<PIPE_ALL>();
              Adds(ub(1024, 16), y, half(1), 16);
          }}},
        {"odd_bytes_handed_on",
         {aiv,
          [](bool bug, half*, float* gz) {
              // 21 halves, of which the last four hold nothing, through GM and back: the first 17 stay usable.
              LocalTensor<half> x = out(0, 32), y = in(1024, 32);
              Duplicate(x, half(1), 17);
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz) + GetBlockIdx() * 64, 64);
              DataCopyPad(z, x, DataCopyExtParams(1, 42, 0, 0, 0));
              PipeBarrier<PIPE_ALL>();
              DataCopyPad(y, z, DataCopyExtParams(1, 42, 0, 0, 0), DataCopyPadExtParams<half>());
              PipeBarrier<PIPE_ALL>();
              Adds(x, y, half(1), bug ? 18 : 17);
          }}},
        {"overlap_partial",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(x[bug ? 16 : 0], x, half(1), 128);
          }}},
        {"overlap_in_place_cast",
         {aiv,
          [](bool bug, half*, float*) {
              // A wider result in the place of its source: the sizes differ, so the overlap is in part.
              Cast(LocalTensor<float>(TPosition::VECCALC, bug ? 0 : 4096, 64), some_input(), RoundMode::CAST_NONE, 64);
          }}},
        {"overlap_next_repeat",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(x[bug ? 128 : 512], x, half(1), uint64_t(128), 3, UnaryRepeatParams(1, 1, 8, 8));
          }}},
        {"accumulate_in_place",
         {aiv,
          [](bool bug, half*, float*) {
              // dst as the second source with repeat stride 0 is the one overlap across repeats that is defined.
              LocalTensor<half> x = some_input();
              LocalTensor<half> sum = x[896];
              const BinaryRepeatParams p(1, 1, 1, 0, 8, 0);
              if (bug) Div(sum, x, sum, uint64_t(128), 7, p);
              else Add(sum, x, sum, uint64_t(128), 7, p);
          }}},
        {"write_after_write",
         {aiv,
          [](bool bug, half*, float*) {
              Duplicate(ub(0, 64), half(0), 64);
              if (!bug) PipeBarrier<PIPE_V>();
              Duplicate(ub(0, 64), half(1), 64);
          }}},
        {"two_readers",
         {aiv,
          [](bool bug, half*, float* gz) {
              // V and MTE3 read a buffer; the next write has to wait for both.
              LocalTensor<half> x = some_input();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 64);
              SetFlag<HardEvent::V_MTE3>(0);
              WaitFlag<HardEvent::V_MTE3>(0);
              DataCopy(z, out(0, 64), 64);
              Adds(ub(4096, 64), x, half(1), 64);
              PipeBarrier<PIPE_V>();
              if (!bug) {
                  SetFlag<HardEvent::MTE3_V>(0);
                  WaitFlag<HardEvent::MTE3_V>(0);
              }
              Duplicate(x, half(0), 64);
          }}},
        {"two_writers",
         {aic,
          [](bool bug, half* gx, float* gz) {
              // FIX and S write halves of the same 32 bytes; the reader has to wait for both.
              LocalTensor<float> c = some_product(gx);
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 64);
              FixpipeParamsV220 p = fixpipe_params(1, 16);
              p.quantPre = F322F16;
              Fixpipe<half, float>(z[8], c, p);
              for (uint64_t i = 0; i < 8; ++i) z.SetValue(i, half(1));
              SetFlag<HardEvent::S_MTE2>(0);
              WaitFlag<HardEvent::S_MTE2>(0);
              if (!bug) {
                  SetFlag<HardEvent::FIX_MTE2>(0);
                  WaitFlag<HardEvent::FIX_MTE2>(0);
              }
              DataCopy(LocalTensor<half>(TPosition::A1, 65536, 16), z, 16);
          }}},
        {"event_id_range",
         {aiv,
          [](bool bug, half*, float*) {
              SetFlag<HardEvent::MTE2_V>(bug ? 8 : 7);
              WaitFlag<HardEvent::MTE2_V>(bug ? 8 : 7);
          }}},
        {"event_id_raw",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              const int id = bug ? 0 : pipe.FetchEventID<HardEvent::MTE2_V>();
              SetFlag<HardEvent::MTE2_V>(id);
              WaitFlag<HardEvent::MTE2_V>(id);
          }}},
        {"event_id_release",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              const TEventID id = pipe.AllocEventID<HardEvent::MTE2_V>();
              pipe.ReleaseEventID<HardEvent::MTE2_V>(bug ? 3 : id);
          }}},
        {"event_id_exhausted",
         {aic,
          [](bool bug, half*, float*) {
              TPipe pipe;  // holds 0, 1 and 2 of M_MTE1 itself
              for (int i = 0; i < (bug ? 6 : 5); ++i) pipe.AllocEventID<HardEvent::M_MTE1>();
          }}},
        {"flag_unset",
         {aiv,
          [](bool bug, half*, float*) {
              if (!bug) SetFlag<HardEvent::MTE2_V>(1);
              WaitFlag<HardEvent::MTE2_V>(1);
          }}},
        {"flag_reuse",
         {aiv,
          [](bool bug, half*, float*) {
              // The second set may come before V has consumed the first: something must lead back from V to MTE2.
              SetFlag<HardEvent::MTE2_V>(1);
              WaitFlag<HardEvent::MTE2_V>(1);
              if (!bug) {
                  SetFlag<HardEvent::V_MTE2>(2);
                  WaitFlag<HardEvent::V_MTE2>(2);
              }
              SetFlag<HardEvent::MTE2_V>(1);
              WaitFlag<HardEvent::MTE2_V>(1);
          }}},
        {"event_on_wrong_core",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) SetFlag<HardEvent::MTE1_M>(0);
          }}},
        {"event_pair",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) SetFlag<HardEvent::MTE2_MTE1>(0);
          }}},
        {"cross_core_aiv_only",
         {aiv,
          [](bool bug, half*, float*) {
              KERNEL_TASK_TYPE_DEFAULT(bug ? KERNEL_TYPE_AIV_ONLY : KERNEL_TYPE_MIX_AIV_1_0);
              CrossCoreSetFlag<0, PIPE_MTE3>(0);
              CrossCoreWaitFlag<0>(0);
          }}},
        {"cross_core_pipe",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) CrossCoreSetFlag<0, PIPE_S>(0);
              else CrossCoreSetFlag<0, PIPE_MTE3>(0);
              CrossCoreWaitFlag<0>(0);
          }}},
        {"scalar_auto_sync",
         {aiv,
          [](bool bug, half* gx, float*) {
              // The compiler orders S after V, but nothing orders V after MTE2.
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              LocalTensor<half> y = in(0, 64), z = ub(1024, 64);
              DataCopy(y, x, 64);
              if (!bug) {
                  SetFlag<HardEvent::MTE2_V>(0);
                  WaitFlag<HardEvent::MTE2_V>(0);
              }
              Adds(z, y, half(1), 64);
              z.SetValue(0, static_cast<float>(z.GetValue(1)) + 1);
          }}},
        {"stale_line",
         {aiv,
          [](bool bug, half*, float* gz) {
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 4096);
              LocalTensor<float> y(TPosition::VECOUT, 0, 64);
              Duplicate(y, 1.0f, 64);
              for (int i = 0; i < 2; ++i) {
                  PipeBarrier<PIPE_ALL>();
                  DataCopy(z, y, 64);
                  PipeBarrier<PIPE_ALL>();
                  if (!bug) {
                      DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(z);
                  }
                  static_cast<void>(z.GetValue(15));  // of the same 64 bytes
              }
          }}},
        {"nan_into_mmad",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);  // the last element of the input is NaN
              Mmad(LocalTensor<float>(TPosition::CO1, 0, 1024), bug ? a[3840] : a, b, mmad_params(16, 16, 16));
          }}},
        {"copy_position",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              DataCopy(bug ? ub(0, 64) : in(0, 64), x, 64);
          }}},
        {"no_memory",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input(), nowhere;
              Adds(bug ? nowhere : x, x, half(1), 64);
          }}},
        {"position_on_core",
         {aiv, [](bool bug, half*, float*) { LocalTensor<half>(bug ? TPosition::A1 : TPosition::VECIN, 0, 64); }}},
        {"queue_on_core",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TBuf<TPosition::VECIN> here;
              TBuf<TPosition::A1> elsewhere;
              if (bug) pipe.InitBuffer(elsewhere, 64);
              else pipe.InitBuffer(here, 64);
          }}},
        {"tensor_capacity",
         {aiv,
          [](bool bug, half*, float*) { LocalTensor<half>(TPosition::VECIN, 180 * 1024, bug ? 4096 : 1024); }}},
        {"select_workspace",
         {aiv,
          [](bool, half*, float*) {
              LocalTensor<half> x = some_input();
              LocalTensor<uint8_t> bits(TPosition::VECCALC, 4096, 32);
              Compares(bits, x, half(1), CMPMODE::GT, 128);
              PipeBarrier<PIPE_V>();
              Select(ub(8192, 128), bits, x, half(0), SELMODE::VSEL_TENSOR_SCALAR_MODE, 128);
          },
          [](bool bug, twin::Options& options) { options.asc_reserved_ubuf = !bug; }}},
        {"integer_overflow",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<int32_t> x(TPosition::VECCALC, 0, 64);
              Duplicate(x, 1 << 16, 64);
              PipeBarrier<PIPE_V>();
              Muls(x, x, (1 << 15) - (bug ? 0 : 1), 64);
          }}},
        {"shift_range",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<uint32_t> x(TPosition::VECCALC, 0, 64);
              Duplicate(x, 1u, 64);
              PipeBarrier<PIPE_V>();
              ShiftLeft(x, x, bug ? 33u : 32u, 64);
          }}},
        {"select_mode",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              LocalTensor<uint8_t> bits(TPosition::VECCALC, 4096, 32);
              Compares(bits, x, half(1), CMPMODE::GT, 128);
              PipeBarrier<PIPE_V>();
              Select(ub(8192, 128), bits, x, x,
                     bug ? SELMODE::VSEL_TENSOR_SCALAR_MODE : SELMODE::VSEL_TENSOR_TENSOR_MODE, 128);
          }}},
        {"compare_count",
         {aiv,
          [](bool bug, half*, float*) {
              Compares(LocalTensor<uint8_t>(TPosition::VECCALC, 4096, 32), some_input(), half(1), CMPMODE::GT,
                       bug ? 100 : 128);
          }}},
        {"compare_int32",
         {aiv,
          [](bool bug, half*, float*) {
              Compares(LocalTensor<uint8_t>(TPosition::VECCALC, 4096, 32), some_input().ReinterpretCast<int32_t>(), 1,
                       bug ? CMPMODE::GT : CMPMODE::EQ, 64);
          }}},
        {"pad_block",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              DataCopyPad(in(0, 64), x, DataCopyExtParams(1, bug ? 21 : 20, 0, 0, 0), DataCopyPadExtParams<half>());
          }}},
        {"pad_block_out",
         {aiv,
          [](bool bug, half*, float* gz) {
              some_input();
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 64);
              DataCopyPad(z, out(0, 64), DataCopyExtParams(1, bug ? 21 : 20, 0, 0, 0));
          }}},
        {"pad_width",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              DataCopyPad(in(0, 64), x, DataCopyExtParams(1, 20, 0, 0, 0),
                          DataCopyPadExtParams<half>(true, 0, bug ? 17 : 16, half(0)));
          }}},
        {"load_address_mode",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LoadData2DParams p;
              p.repeatTimes = 1;
              p.addrMode = bug;
              LoadData(a, LocalTensor<half>(TPosition::A1, 0, 4096), p);
          }}},
        {"mmad_bias",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              MmadParams p = mmad_params(16, 16, 16);
              p.cmatrixSource = bug;
              Mmad(LocalTensor<float>(TPosition::CO1, 0, 256), a, b, p);
          }}},
        {"unit_flag_range", {aic, [](bool bug, half* gx, float*) { some_product(gx, bug ? 1 : 0); }}},
        {"unit_flag_kept",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<float> c = some_product(gx, 3);
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 256);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              p.unitFlag = bug ? 2 : 3;
              Fixpipe(z, c, p);
          }}},
        {"unit_flag_unset",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<float> c = some_product(gx, bug ? 2 : 3);
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 256);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              p.unitFlag = 3;
              Fixpipe(z, c, p);
          }}},
        {"unit_flag_twice",
         {aic,
          [](bool bug, half* gx, float* gz) {
              some_product(gx, 3);
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 256);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              p.unitFlag = 3;
              if (!bug) Fixpipe(z, LocalTensor<float>(TPosition::CO1, 0, 256), p);
              LocalTensor<float> c = some_product(gx, 3);
              PipeBarrier<PIPE_FIX>();
              Fixpipe(z, c, p);
          }}},
        {"unit_flag_one_sided",
         {aic,
          [](bool bug, half* gx, float* gz) {
              // A plain Fixpipe does not hold up the Mmad that comes next, although that one has a unit flag.
              LocalTensor<float> c = some_product(gx);
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 256);
              Fixpipe(z, c, fixpipe_params(16, 16));
              if (!bug) {
                  SetFlag<HardEvent::FIX_M>(0);
                  WaitFlag<HardEvent::FIX_M>(0);
              }
              MmadParams p = mmad_params(16, 16, 16);
              p.unitFlag = 2;
              Mmad(c, LocalTensor<half>(TPosition::A2, 0, 256), LocalTensor<half>(TPosition::B2, 0, 256), p);
          }}},
        {"fixpipe_stride",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<float> c = some_product(gx);
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 256);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              if (bug) p.dstStride = 0;
              Fixpipe(z, c, p);
          }}},
        {"fixpipe_unit_flag",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<float> c = some_product(gx);
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 256);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              if (bug) p.unitFlag = 1;
              Fixpipe(z, c, p);
          }}},
        {"fixpipe_channels",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<float> c = some_product(gx);
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 256);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              p.isChannelSplit = bug;
              Fixpipe<float, float, CFG_NZ>(z, c, p);
          }}},
        {"fixpipe_to_l1",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<float> c = some_product(gx);
              LocalTensor<half> l1(TPosition::A1, 65536, 256);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              p.quantPre = F322F16;
              if (bug) Fixpipe<half, float, CFG_ROW_MAJOR>(l1, c, p);
              else Fixpipe<half, float, CFG_NZ>(l1, c, p);
          }}},
        {"mask_bits",
         {aiv,
          [](bool bug, half*, float*) {
              uint64_t bits[2] = {1, bug ? 1u : 0u};
              Duplicate(LocalTensor<float>(TPosition::VECCALC, 0, 64), 0.0f, bits, 1, 1, 8);
          }}},
        {"mask_mode",
         {aiv,
          [](bool bug, half*, float*) {
              if (!bug) SetMaskCount();
              SetVectorMask<half, MaskMode::COUNTER>(100);
          }}},
        {"negative_count", {aiv, [](bool bug, half*, float*) { Duplicate(ub(0, 64), half(0), bug ? -1 : 64); }}},
        {"brcb_overlap",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Brcb(x[bug ? 0 : 16], x, 1, BrcbRepeatParams(1, 8));
          }}},
        {"reduce_overlap",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              ReduceRepeat<ReduceType::MAX>(x[bug ? 128 : 0], x, 128, 2, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
          }}},
        {"gm_tensor_size",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, bug ? 4097 : 4096);
          }}},
        {"gm_beside",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(bug ? gx - 1 : gx);
          }}},
        {"buffer_bounds",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TBuf<TPosition::VECIN> b;
              pipe.InitBuffer(b, 64);
              b.Get<half>(bug ? 33 : 32);
          }}},
        {"buffer_uninitialised",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TBuf<TPosition::VECIN> b;
              if (!bug) pipe.InitBuffer(b, 64);
              b.Get<half>();
          }}},
        {"queue_uninitialised",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TQue<TPosition::VECIN, 1> q;
              if (!bug) pipe.InitBuffer(q, 1, 64);
              LocalTensor<half> t = q.AllocTensor<half>();
              q.FreeTensor(t);
          }}},
        {"queue_twice",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TQue<TPosition::VECIN, 1> q;
              pipe.InitBuffer(q, 1, 64);
              if (bug) pipe.InitBuffer(q, 1, 64);
          }}},
        {"queue_of_nothing",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TQue<TPosition::VECIN, 1> q;
              pipe.InitBuffer(q, 1, bug ? 0 : 64);
          }}},
        {"too_many_buffers",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TQue<TPosition::VECIN, 1> q;
              TBuf<TPosition::VECCALC> more;
              pipe.InitBuffer(q, 64, 32);
              if (bug) pipe.InitBuffer(more, 32);
          }}},
        {"queue_enqueue_twice",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TQue<TPosition::VECIN, 2> q;
              pipe.InitBuffer(q, 2, 64);
              LocalTensor<half> t = q.AllocTensor<half>();
              q.EnQue(t);
              if (bug) q.EnQue(t);
              t = q.DeQue<half>();
              q.FreeTensor(t);
          }}},
        {"queue_free_enqueued",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TQue<TPosition::VECIN, 1> q;
              pipe.InitBuffer(q, 1, 64);
              LocalTensor<half> t = q.AllocTensor<half>();
              q.EnQue(t);
              if (!bug) t = q.DeQue<half>();
              q.FreeTensor(t);
          }}},
        {"queue_never_freed",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TQue<TPosition::VECIN, 1> q;
              pipe.InitBuffer(q, 1, 64);
              LocalTensor<half> t = q.AllocTensor<half>();
              if (!bug) q.FreeTensor(t);
          }}},
        {"second_pipe",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              if (!bug) pipe.Destroy();
              TPipe second;
          }}},
        {"kernel_type",
         {aiv,
          [](bool bug, half*, float*) {
              KERNEL_TASK_TYPE_DEFAULT(bug ? KERNEL_TYPE_MIX_AIC_1_2 : KERNEL_TYPE_AIV_ONLY);
          }}},
        {"host_exception",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) throw std::runtime_error("the kernel's own words");
          }}},
        {"sync_all_on_cube",
         {mix,
          [](bool bug, half*, float*) {
              if (bug && ASCEND_IS_AIC) SyncAll();
          }}},
        {"cross_core_id",
         {aiv,
          [](bool bug, half*, float*) {
              CrossCoreSetFlag<0, PIPE_MTE3>(bug ? 16 : 15);
              CrossCoreWaitFlag<0>(15);
          }}},
        {"cross_core_wait_id",
         {aiv,
          [](bool bug, half*, float*) {
              CrossCoreSetFlag<0, PIPE_MTE3>(0);
              CrossCoreWaitFlag<0>(bug ? 16 : 0);
          }}},
        {"cross_core_wait_aiv_only",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) {
                  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
                  CrossCoreWaitFlag<0>(0);
              }
          }}},
        {"cross_core_shape",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) CrossCoreSetFlag<2, PIPE_MTE3>(0);
          }}},
        {"cross_core_pair",
         {mix,
          [](bool bug, half*, float*) {
              if (ASCEND_IS_AIV || bug) {
                  CrossCoreSetFlag<1, PIPE_MTE3>(0);
                  CrossCoreWaitFlag<1>(0);
              }
          }}},
        {"cross_core_counter",
         {mix,
          [](bool bug, half*, float*) {
              for (int i = 0; i < (bug ? 16 : 15); ++i) {
                  if ASCEND_IS_AIC {
                      CrossCoreSetFlag<2, PIPE_FIX>(0);
                  }
              }
              for (int i = 0; i < 15; ++i) {
                  if ASCEND_IS_AIV {
                      CrossCoreWaitFlag(0);
                  }
              }
          },
          [](bool, twin::Options& options) { options.switch_one_in = 0; }}},
        {"cross_core_partners",
         {mix,
          [](bool bug, half*, float*) {
              if (ASCEND_IS_AIV && (!bug || GetSubBlockIdx() == 0)) CrossCoreSetFlag<1, PIPE_MTE3>(0);
              if (ASCEND_IS_AIV && !bug) CrossCoreWaitFlag<1>(0);
          }}},
        {"input_written",
         {aiv,
          [](bool bug, half* gx, float* gz) {
              some_input();
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(bug ? gx : reinterpret_cast<half*>(gz), 1024);
              DataCopy(z, out(0, 1024), 1024);
          }}},
        {"guard",
         {aiv,
          [](bool bug, half*, float* gz) {
              if (bug) gz[4096 + 1] = 0;  // past the end, through the bare pointer
          }}},
    };
    return all;
}

}  // namespace

TWIN_CASE(snippet)
{
    twin::Device device;
    std::vector<half> x(4096, half(1));
    x.back() = std::numeric_limits<float>::quiet_NaN();
    half* gx = device.input("x", x);
    float* gz = device.output<float>("z", 4096);
    const Snippet& snippet = snippets().at(arguments.text("name"));
    twin::Options options = arguments.options();
    options.shape = snippet.shape;
    if (snippet.options) snippet.options(arguments.number("bug") != 0, options);
    return device.launch(arguments.text("name"), 2, options, [&] {
        if (GetBlockIdx() == 0 || arguments.text("name").rfind("cross_core", 0) == 0)
            snippet.run(arguments.number("bug") != 0, gx, gz);
    });
}

TWIN_CASE(blocks)
{
    twin::Options options;
    return twin::Device().launch("blocks", arguments.number("n"), options, [] {});
}
