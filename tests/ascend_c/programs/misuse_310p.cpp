// One wrong call at a time, on the core of an Ascend 310P: what it lacks, and its ways between the cube and vector units.
#include "misuse.h"

namespace misuse {

constexpr twin::Shape ai = twin::Shape::ai_core;

static void on_310p(bool, twin::Options& options) { options.chip = twin::chip_310p(); }

static DataCopyEnhancedParams whole_fractals()
{
    DataCopyEnhancedParams p;
    p.blockMode = BlockMode::BLOCK_MODE_MATRIX;
    return p;
}

// A product of 16 x 16 in L0C, which the vector unit may read once it waits for it.
static LocalTensor<float> product_310p(half* gx)
{
    LocalTensor<half> a, b;
    cube_operands(a, b, gx);
    LocalTensor<float> c(TPosition::CO1, 0, 4096);
    Mmad(c, a, b, mmad_params(16, 16, 16));
    return c;
}

// Either the call that the chip lacks, or nothing.
template <typename F>
static Snippet lacking(F call)
{
    return {ai, [call](bool bug, half* gx, float* gz) { if (bug) call(gx, gz); }, on_310p};
}

static const Register missing_calls({
    {"310p_cross_core_set", lacking([](half*, float*) { CrossCoreSetFlag<2, PIPE_MTE3>(0); })},
    {"310p_cross_core_wait", lacking([](half*, float*) { CrossCoreWaitFlag<2>(0); })},
    {"310p_sync_all", lacking([](half*, float*) { SyncAll(); })},
    {"310p_sub_block", lacking([](half*, float*) { GetSubBlockIdx(); })},
    {"310p_overflow_mode", lacking([](half*, float*) { SetSaturationFlag<SaturationMode::FLOAT>(false); })},
    {"310p_read_overflow_mode", lacking([](half*, float*) { GetSaturationFlag<SaturationMode::FLOAT>(); })},
    {"310p_fixpipe",
     lacking([](half* gx, float* gz) {
         GlobalTensor<float> z;
         z.SetGlobalBuffer(gz, 4096);
         Fixpipe<float, float, CFG_ROW_MAJOR>(z, product_310p(gx), fixpipe_params(16, 16));
     })},
    {"310p_copy_pad",
     lacking([](half* gx, float*) {
         GlobalTensor<half> x;
         x.SetGlobalBuffer(gx, 4096);
         DataCopyPad(in(0, 16), x, DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<half>());
     })},
    {"310p_nd_to_nz",
     lacking([](half* gx, float*) {
         GlobalTensor<half> x;
         x.SetGlobalBuffer(gx, 4096);
         DataCopy(LocalTensor<half>(TPosition::A1, 0, 256), x, Nd2NzParams(1, 16, 16, 0, 16, 16, 1, 0));
     })},
    {"310p_shift",
     lacking([](half*, float*) {
         LocalTensor<uint32_t> x = some_input().ReinterpretCast<uint32_t>();
         ShiftRight(x, x, uint32_t(1), 64);
     })},
    {"310p_pipe", lacking([](half*, float*) { PipeBarrier<PIPE_FIX>(); })},
});

static const Register limits_310p({
    {"310p_cast",
     {ai,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = some_input();
          LocalTensor<float> y(TPosition::VECCALC, 8192, 64);
          Cast(y, x, RoundMode::CAST_NONE, 64);
          PipeBarrier<PIPE_V>();
          Cast(x, y, bug ? RoundMode::CAST_RINT : RoundMode::CAST_NONE, 64);
      },
      on_310p}},
    {"310p_cast_float",
     {ai,
      [](bool bug, half*, float*) {
          LocalTensor<float> y(TPosition::VECCALC, 8192, 64);
          Duplicate(y, 1.5f, 64);
          PipeBarrier<PIPE_V>();
          if (bug) Cast(y, y, RoundMode::CAST_RINT, 64);
      },
      on_310p}},
    {"310p_bfloat16",
     {ai,
      [](bool bug, half*, float*) {
          LocalTensor<float> y(TPosition::VECCALC, 8192, 64);
          Duplicate(y, 1.5f, 64);
          PipeBarrier<PIPE_V>();
          if (bug) {
              Cast(ub(0, 64).ReinterpretCast<bfloat16_t>(), y, RoundMode::CAST_RINT, 64);
          }
      },
      on_310p}},
    {"310p_load_bfloat16",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          LoadData2DParams p;
          p.repeatTimes = 1;
          if (bug) {
              LoadData(a.ReinterpretCast<bfloat16_t>(), LocalTensor<bfloat16_t>(TPosition::A1, 0, 4096), p);
          }
      },
      on_310p}},
    {"310p_reduce_order",
     {ai,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = some_input();
          ReduceRepeat<ReduceType::MAX>(ub(8192, 16), x, 128, 1, 1, 1, 8,
                                        bug ? ReduceOrder::ORDER_ONLY_VALUE : ReduceOrder::ORDER_VALUE_INDEX);
      },
      on_310p}},
    {"310p_unit_flag",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          MmadParams p = mmad_params(16, 16, 16);
          p.unitFlag = bug ? 2 : 0;
          Mmad(LocalTensor<float>(TPosition::CO1, 0, 4096), a, b, p);
      },
      on_310p}},
    {"310p_ub_capacity",
     {ai,
      [](bool bug, half*, float*) {
          TPipe pipe;  // the last 8 KiB are scratch space of Brcb and Select
          TBuf<TPosition::VECCALC> buffer;
          pipe.InitBuffer(buffer, bug ? 248 * 1024 + 32 : 248 * 1024);
      },
      on_310p}},
    {"310p_l0c_capacity",
     {ai,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TBuf<TPosition::CO1> buffer;
          pipe.InitBuffer(buffer, bug ? 256 * 1024 + 32 : 256 * 1024);
      },
      on_310p}},
    {"310p_fill_blocks",
     {ai,
      [](bool bug, half* gx, float*) {
          // Of an InitConstValueParams the chip reads repeatTimes: two fractals are two repeats of one block.
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          b = LocalTensor<half>(TPosition::B2, 16384, 512);
          InitConstValueParams<half> p(bug ? 1 : 2, bug ? 2 : 1, 0, half(1));
          Fill(b, p);
          PipeBarrier<PIPE_ALL>();
          Mmad(LocalTensor<float>(TPosition::CO1, 0, 4096), a, b, mmad_params(16, 32, 16));
      },
      on_310p}},
    {"310p_fill_gap",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          b = LocalTensor<half>(TPosition::B2, 16384, 1024);
          InitConstValueParams<half> p(2, 1, 1, half(1));  // the gap has no effect
          Fill(b, p);
          PipeBarrier<PIPE_ALL>();
          Mmad(LocalTensor<float>(TPosition::CO1, 0, 4096), a, b[bug ? 256 : 0], mmad_params(16, 32, 16));
      },
      on_310p}},
    {"310p_weights_in_l0",
     {ai,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = some_input();
          PipeBarrier<PIPE_ALL>();
          DataCopy(LocalTensor<half>(bug ? TPosition::A2 : TPosition::A1, 0, 1024), x, 1024);
      },
      on_310p}},
});

static const Register l0c_to_ub({
    {"310p_no_m_v",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = product_310p(gx);
          SetFlag<HardEvent::M_V>(0);
          if (!bug) WaitFlag<HardEvent::M_V>(0);
          DataCopy(LocalTensor<float>(TPosition::VECCALC, 0, 256), c, DataCopyParams(1, 1, 0, 0), whole_fractals());
          if (bug) WaitFlag<HardEvent::M_V>(0);
      },
      on_310p}},
    {"310p_no_v_m",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = product_310p(gx);
          PipeBarrier<PIPE_ALL>();
          DataCopy(LocalTensor<float>(TPosition::VECCALC, 0, 256), c, DataCopyParams(1, 1, 0, 0), whole_fractals());
          SetFlag<HardEvent::V_M>(0);
          if (!bug) WaitFlag<HardEvent::V_M>(0);
          Mmad(c, LocalTensor<half>(TPosition::A2, 0, 4096), LocalTensor<half>(TPosition::B2, 0, 4096),
               mmad_params(16, 16, 16));
          if (bug) WaitFlag<HardEvent::V_M>(0);
      },
      on_310p}},
    {"310p_no_v_s",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = product_310p(gx), y(TPosition::VECCALC, 0, 256);
          PipeBarrier<PIPE_ALL>();
          DataCopy(y, c, DataCopyParams(1, 1, 0, 0), whole_fractals());
          SetFlag<HardEvent::V_S>(0);
          if (!bug) WaitFlag<HardEvent::V_S>(0);
          y.GetValue(0);
          if (bug) WaitFlag<HardEvent::V_S>(0);
      },
      on_310p}},
    {"310p_no_mte3_mte1",
     {ai,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = some_input(), l1(TPosition::A1, 0, 1024);
          PipeBarrier<PIPE_ALL>();
          DataCopy(l1, x, 1024);
          SetFlag<HardEvent::MTE3_MTE1>(0);
          if (!bug) WaitFlag<HardEvent::MTE3_MTE1>(0);
          LoadData2DParams p;
          p.repeatTimes = 4;
          p.srcStride = 1;
          LoadData(LocalTensor<half>(TPosition::A2, 0, 1024), l1, p);
          if (bug) WaitFlag<HardEvent::MTE3_MTE1>(0);
      },
      on_310p}},
    {"310p_l0c_bounds",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = product_310p(gx);
          PipeBarrier<PIPE_ALL>();
          DataCopy(LocalTensor<float>(TPosition::VECCALC, 0, 256), c, DataCopyParams(1, bug ? 2 : 1, 0, 0),
                   whole_fractals());
      },
      on_310p}},
    {"310p_l0c_alignment",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = product_310p(gx);
          PipeBarrier<PIPE_ALL>();
          DataCopy(LocalTensor<float>(TPosition::VECCALC, 0, 512), c[bug ? 16 : 0], DataCopyParams(1, 1, 0, 0),
                   whole_fractals());
      },
      on_310p}},
    {"310p_l0c_mode",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = product_310p(gx);
          PipeBarrier<PIPE_ALL>();
          DataCopy(LocalTensor<float>(TPosition::VECCALC, 0, 256), c, DataCopyParams(1, 1, 0, 0),
                   bug ? DataCopyEnhancedParams() : whole_fractals());
      },
      on_310p}},
    {"310p_l0c_destination",
     {ai,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = product_310p(gx);
          PipeBarrier<PIPE_ALL>();
          DataCopy(LocalTensor<float>(bug ? TPosition::A1 : TPosition::VECCALC, 0, 256), c, DataCopyParams(1, 1, 0, 0),
                   whole_fractals());
      },
      on_310p}},
    {"310p_only",
     {aic,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = some_product(gx);
          if (bug) DataCopy(c, c, DataCopyParams(1, 1, 0, 0), whole_fractals());
      }}},
});

}  // namespace misuse
