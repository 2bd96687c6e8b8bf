"""Heads through the whole engine: whatever rule verifies their drafts, an answer has the law of the target.

See `small_law` for the model and the statistic. The heads guess at random, of five tokens: often right.
"""

from dataclasses import replace

import pytest

from engine.sampling_params import Acceptance, SpeculationParams
from tests.engine.small_law import excess
from tests.engine.test_rejection_law import WISHES, sampled

CASES = [
    ("eagle", Acceptance.REJECTION),
    ("eagle3", Acceptance.BLOCK),
    ("eagle3 2,2", Acceptance.REJECTION),
    ("eagle3 2,2", Acceptance.MATCH),
    ("medusa", Acceptance.REJECTION),
    ("medusa", Acceptance.BLOCK),
    ("medusa 2,2", Acceptance.REJECTION),
]


@pytest.mark.parametrize(("method", "rule"), CASES)
def test_the_law_is_the_targets(method: str, rule: Acceptance) -> None:
    wishes = replace(WISHES, speculation=SpeculationParams(acceptance=rule))
    counts, rate = sampled(wishes, method=method, num_seeds=1000)
    assert excess(counts) < 1
    # Both verdicts are frequent, so that neither is untested; of six nodes two can stand at most.
    assert 0.08 < rate < 0.95
