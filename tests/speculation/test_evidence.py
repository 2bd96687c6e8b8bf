import pytest

from engine.speculation.evidence import MEMORY, PRIORS, ROW_COST, EqualShares, MeasuredFloor, Rate, level_of


def test_a_rate_starts_at_its_prior_and_follows_what_is_seen() -> None:
    rate = Rate(0.5)
    assert rate.value == 0.5
    values = []
    for _ in range(30):
        rate.note(False)
        values.append(rate.value)
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < ROW_COST


def test_a_rate_forgets() -> None:
    """After as many observations as it remembers a change of mood shows."""
    rate = Rate(0.5)
    for _ in range(1000):
        rate.note(False)
    for _ in range(int(MEMORY)):
        rate.note(True)
    assert rate.value > 0.4


@pytest.mark.parametrize(
    ("length", "level"), [(1, 0), (2, 1), (3, 1), (4, 2), (8, 3), (16, 4), (31, 4), (32, 5), (1000, 5)]
)
def test_levels_double(length: int, level: int) -> None:
    assert level_of(length) == level < len(PRIORS)


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_a_node_pays_while_it_raises_tokens_per_time(num_requests: int) -> None:
    def speed(probabilities: list[float], others: list[float]) -> float:
        rows = 1 + len(probabilities) + (num_requests - 1) * (1 + len(others))
        tokens = 1 + sum(probabilities) + (num_requests - 1) * (1 + sum(others))
        return tokens / (1 + ROW_COST * (rows - 1))

    for taken in ([], [0.9], [0.9, 0.8, 0.7], [0.3] * 9):
        for probability in (0.01, 0.1, 0.119, 0.121, 0.2, 0.5, 0.53, 0.81, 1.0):
            better = speed([*taken, probability], taken) > speed(taken, taken)
            assert EqualShares(num_requests).pays(probability, 1 + sum(taken), len(taken)) == better


def test_a_full_batch_drafts_only_what_is_nearly_sure() -> None:
    assert EqualShares(1).pays(0.2, 1.0, 0)
    assert not EqualShares(8).pays(0.2, 1.0, 0)
    assert EqualShares(32).pays(0.9, 1.0, 0)


def test_a_measured_price_is_what_the_next_node_adds_to_its_own_request() -> None:
    """A first node needs the measured chance, later ones more, as the request has tokens without them."""
    price = MeasuredFloor(0.3)
    assert price.pays(0.31, 1.0, 0)
    assert not price.pays(0.3, 1.0, 0)
    assert not price.pays(0.31, 1.9, 1)
    assert price.pays(0.45, 1.9, 1)
    # A row is a smaller part of a step that is long already.
    assert price.pays(0.45, 2.4, 3)
    assert not price.pays(0.45, 2.4, 1)
