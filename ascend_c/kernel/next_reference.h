// The reference of a lane's next score tile, near which its scores should lie, as two FP16 numbers for each row.
#pragma once

#include "key_blocks.h"
#include "rows.h"

namespace pasa {

// Nats from 0 at which a reference is clamped: below 0, and for a guess above 0 as well. Further from 0, FP32 would
// round the sums that the reference enters too coarsely for scores near 0, which the row may still see.
constexpr float kFarthest = 0x1p11f;

// Computes the reference in steps. A barrier follows each, and other work may stand before it too.
class NextReference {
public:
    using Row = RowMath::Row;
    using HalfTile = AscendC::LocalTensor<half>;

    // Operands and buffers. Numbers of rows: `from`, the reference of the weights, and `carried`, what the block's
    // frame adds to it, both in nats; `apart`, the part of the scores that the block's anchor subtracts, in units of
    // the tile; `factor`, nats in such a unit; `offset`, the nats to be added to the scores; `raised`, by how many
    // units the clamp raised the reference; `guess`, the mean score of the block, in units of the tile. FP16: `term`
    // (64) and `spread` (64, 16) are scratch, `out` (64, 16) is for the cube core.
    struct Places {
        Row from, carried, apart, factor, offset, raised, rho, high, rest, guess;
        HalfTile term, spread, out;
    };

    // The first tile of some rows, which `begin` here, takes its guess for a reference; that of the tile before it is
    // passed on to their second tile, in `from`. Rows of both kinds are `guessed`: what they have may be far above all
    // scores that they see. In a task's first tile all guesses are already in `rho`: `is_made`.
    __aicore__ inline void Begin(const Places& places, uint32_t rows, float factor, RowBits begin, RowBits guessed,
                                 bool is_made)
    {
        p_ = places;
        all_ = RowMath(0, rows);
        repeats_ = DivideUp(rows, kFloatBlock);
        factor_ = factor;
        lowest_ = -2 * kHalfLargest;
        if (kFarthest < 2 * kHalfLargest * factor) lowest_ = -kFarthest / factor;
        begin_ = begin;
        guessed_ = guessed;
        step_ = is_made ? 4 : 0;
    }
    // `from` has changed.
    __aicore__ inline void Restart() { step_ = 0; }
    __aicore__ inline HalfTile Out() const { return p_.out; }
    __aicore__ inline bool IsOut() const { return step_ > kOutStep; }
    __aicore__ inline bool IsDone() const { return step_ >= kSteps; }

    // The next step, if there is one.
    __aicore__ inline void Advance()
    {
        const Row &rho = p_.rho, &high = p_.high, &rest = p_.rest;
        if (step_ == 3 && begin_ == 0) ++step_;
        if (step_ == 4 && guessed_ == 0) ++step_;
        switch (step_++) {
            case 0:
                all_.Set(p_.factor, factor_);
                all_.Add(rho, p_.carried, p_.from);
                break;
            case 1: all_.Divide(rho, rho, p_.factor); break;
            case 2: all_.Subtract(rho, rho, p_.apart); break;
            case 3: RowMath(begin_).Scale(rho, p_.guess, 1.0f); break;
            case 4: RowMath(guessed_).AtMost(rho, rho, -lowest_); break;
            case 5:
                all_.AtMost(high, rho, kHalfLargest);
                all_.AtMost(rest, rho, 2 * kHalfLargest);
                break;
            case 6:
                all_.AtLeast(high, high, lowest_ > -kHalfLargest ? lowest_ : -kHalfLargest);
                all_.AtLeast(rest, rest, lowest_);
                break;
            case 7:
                all_.ToHalf(p_.term, high);
                all_.Subtract(p_.raised, rest, rho);
                break;
            case 8:
                all_.ToFloat(high, p_.term);
                AscendC::Brcb(p_.out, p_.term, repeats_, AscendC::BrcbRepeatParams(1, 8));
                break;
            case 9: all_.Subtract(rest, rest, high); break;
            case 10: all_.ToHalf(p_.term, rest); break;
            case 11:
                all_.ToFloat(rest, p_.term);
                AscendC::Brcb(p_.spread, p_.term, repeats_, AscendC::BrcbRepeatParams(1, 8));
                break;
            case kOutStep: {
                all_.Add(high, high, rest);
                uint64_t odd[2] = {0xaaaaaaaaaaaaaaaa, 0xaaaaaaaaaaaaaaaa};
                AscendC::Adds(p_.out, p_.spread, static_cast<half>(0.0f), odd, repeats_,
                              AscendC::UnaryRepeatParams(1, 1, 8, 8));
                break;
            }
            case 13: all_.Add(rho, high, p_.apart); break;
            case 14: all_.Scale(p_.offset, rho, factor_); break;
            default: step_ = kSteps;
        }
    }

private:
    static constexpr uint32_t kOutStep = 12, kSteps = 15;

    Places p_;
    RowMath all_;
    uint32_t repeats_ = 0;
    float factor_ = 1.0f;
    float lowest_ = 0.0f;  // of rho, in units of the tile
    RowBits begin_ = 0, guessed_ = 0;
    uint32_t step_ = kSteps;
};

}  // namespace pasa
