"""Mutants of the reference's arithmetic: when a tile stays in FP32, and what its weights are relative to."""

from tests.mutants.kernels import mutant

SCORES, ATTENTION = "ops/attention/spec/scores.py", "ops/attention/spec/attention.py"
TESTS = "tests/ops/attention/spec/test_references.py::"
REACHES = TESTS + "test_four_nats_move_a_reference_and_six_keep_a_tile_in_fp32"
GUESSES = TESTS + "test_a_second_tile_refers_to_the_guess_of_the_first_so_distances_count_on_both_sides"
ROWS = TESTS + "test_a_move_of_one_row_moves_all_rows_of_its_tile_and_lowers_none"

REFERENCE = [
    mutant("a tile is kept in FP32 only beyond 12 nats", SCORES, "RESCUE_REACH = 6.0", "RESCUE_REACH = 12.0", REACHES),
    mutant("a tile is kept in FP32 from 3 nats on", SCORES, "RESCUE_REACH = 6.0", "RESCUE_REACH = 3.0", REACHES),
    mutant("a reference moves only beyond 5 nats", ATTENTION, "MOVE_REACH = 4.0", "MOVE_REACH = 5.0", REACHES),
    mutant("a reference moves from 3 nats on", ATTENTION, "MOVE_REACH = 4.0", "MOVE_REACH = 3.0", REACHES),
    mutant(
        "weights are lifted by 2^4 alone",
        ATTENTION,
        "LIFT = 2.0**10",
        "LIFT = 2.0**4",
        TESTS + "test_weights_far_below_a_sink_keep_their_digits",
    ),
    mutant(
        "weights are lifted beyond FP16",
        ATTENTION,
        "LIFT = 2.0**10",
        "LIFT = 2.0**12",
        TESTS + "test_weights_of_a_rise_fit_into_fp16",
    ),
    mutant(
        "a tile below the guess of the first block stays in FP16",
        SCORES,
        "started & ~block.guessed",
        "started",
        GUESSES,
    ),
    mutant("a second tile refers to no guess", ATTENTION, "torch.where(first, guess, carried)", "carried", GUESSES),
    mutant("a guess counts as a running maximum", ATTENTION, "self.guessed[..., old, :] = first", "pass", GUESSES),
    mutant(
        "a row's move leaves the other rows of its tile",
        ATTENTION,
        "whole_tiles((top - here > MOVE_REACH) & alive, block.rows_before, self.block_q)",
        "(top - here > MOVE_REACH) & alive",
        TESTS + "test_a_move_of_one_row_moves_the_others_by_less_than_four_nats",
    ),
    mutant(
        "a move lowers the reference of another row",
        ATTENTION,
        "torch.where(moves & alive, torch.maximum(carried, top + tile.offset), carried)",
        "torch.where(moves & alive, top + tile.offset, carried)",
        ROWS,
    ),
    mutant(
        "weights of a tile that moves its reference are relative to the old one",
        ATTENTION,
        "torch.where(moves, torch.maximum(here, top), here.where(apart, 0.0))",
        "torch.where(moves, here, here.where(apart, 0.0))",
        TESTS + "test_weights_of_a_rise_fit_into_fp16",
    ),
    mutant(
        "a rescued tile is not counted as flushed",
        ATTENTION,
        "moved = maximum > carried if tile.rescued is None else (maximum > carried) | tile.rescued",
        "moved = maximum > carried",
        TESTS + "test_a_tile_refers_to_what_the_weights_were_relative_to_two_blocks_before",
    ),
]
