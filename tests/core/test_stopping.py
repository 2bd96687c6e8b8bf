from collections.abc import Sequence
from itertools import product

import pytest

from engine.core.stopping import Stop, StopRules, apply_stop_rules
from engine.outputs import FinishReason

EOS, OTHER_EOS, STOP_ID = 7, 8, 9


def rules(
    *,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    max_tokens: int = 100,
) -> StopRules:
    return StopRules(
        frozenset({EOS, OTHER_EOS}), frozenset(stop_token_ids), ignore_eos, min_tokens, max_tokens
    )


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
@pytest.mark.parametrize("position", range(6))
def test_eos_ends_the_run_wherever_it_stands(position: int, eos: int) -> None:
    run = [1, 2, 3, 4, 5, 6]
    run[position] = eos
    assert apply_stop_rules(run, 10, rules()) == Stop(position + 1, FinishReason.STOP, None)


def test_first_of_several_stops_wins() -> None:
    assert apply_stop_rules([1, STOP_ID, EOS], 0, rules(stop_token_ids=[STOP_ID])) == Stop(
        2, FinishReason.STOP, STOP_ID
    )
    assert apply_stop_rules([1, EOS, STOP_ID], 0, rules(stop_token_ids=[STOP_ID])) == Stop(
        2, FinishReason.STOP
    )


def test_stop_id_is_named_even_if_it_is_an_eos_too() -> None:
    assert apply_stop_rules([EOS], 0, rules(stop_token_ids=[EOS])) == Stop(1, FinishReason.STOP, EOS)


def test_ignored_eos_is_an_ordinary_token() -> None:
    assert apply_stop_rules([1, EOS, 2], 0, rules(ignore_eos=True)) == Stop(3)
    assert apply_stop_rules([1, EOS, 2], 0, rules(ignore_eos=True, stop_token_ids=[EOS])) == Stop(
        2, FinishReason.STOP, EOS
    )


@pytest.mark.parametrize(
    ("run", "num_output_tokens", "expected"),
    [
        ([1, 2, 3, 4], 0, Stop(3, FinishReason.LENGTH)),
        ([1, 2, 3], 0, Stop(3, FinishReason.LENGTH)),
        ([1, 2], 0, Stop(2)),
        ([1, 2], 1, Stop(2, FinishReason.LENGTH)),
        ([1, 2], 3, Stop(0, FinishReason.LENGTH)),
        ([], 2, Stop(0)),
    ],
)
def test_max_tokens_cuts(run: list[int], num_output_tokens: int, expected: Stop) -> None:
    assert apply_stop_rules(run, num_output_tokens, rules(max_tokens=3)) == expected


def test_no_tokens_asked_for() -> None:
    assert apply_stop_rules([EOS, 1], 0, rules(max_tokens=0)) == Stop(0, FinishReason.LENGTH)
    assert apply_stop_rules([], 0, rules(max_tokens=0)) == Stop(0, FinishReason.LENGTH)


def test_eos_at_the_limit_is_a_stop_and_behind_it_is_not() -> None:
    assert apply_stop_rules([1, 2, EOS, 3], 0, rules(max_tokens=3)) == Stop(3, FinishReason.STOP)
    assert apply_stop_rules([1, 2, 3, EOS], 0, rules(max_tokens=3)) == Stop(3, FinishReason.LENGTH)


def test_nothing_stops_before_min_tokens() -> None:
    bound = rules(min_tokens=4, stop_token_ids=[STOP_ID])
    assert apply_stop_rules([EOS, STOP_ID, EOS, STOP_ID], 0, bound) == Stop(4)
    assert apply_stop_rules([1, 2, 3, 4, EOS], 0, bound) == Stop(5, FinishReason.STOP)
    assert apply_stop_rules([EOS, EOS, EOS], 3, bound) == Stop(2, FinishReason.STOP)


def one_by_one(tokens: Sequence[int], bound: StopRules) -> tuple[int, FinishReason | None, int | None]:
    """Plain decoding: one token a step."""
    for count, token in enumerate(tokens):
        stop = apply_stop_rules([token], count, bound)
        if stop.reason is not None:
            return count + stop.num_kept, stop.reason, stop.stop_token
    return len(tokens), None, None


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 9])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_any_cut_into_runs_ends_where_single_steps_end(max_tokens: int, min_tokens: int) -> None:
    bound = rules(min_tokens=min_tokens, max_tokens=max_tokens, stop_token_ids=[STOP_ID])
    for tokens in product([1, EOS, STOP_ID], repeat=5):
        for run_length in range(1, 6):
            count, stop = 0, Stop(0)
            while count < len(tokens) and stop.reason is None:
                stop = apply_stop_rules(tokens[count : count + run_length], count, bound)
                count += stop.num_kept
            assert (count, stop.reason, stop.stop_token) == one_by_one(tokens, bound)
