// One wrong call at a time. The order of work in a core: reads before writes, memory that overlaps, races, events and flags.
#include "misuse.h"

namespace misuse {

static const Register order({
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
});

}  // namespace misuse
