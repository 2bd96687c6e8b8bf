"""Hidden states picked out of a step's rows, by the verdicts."""

import torch

from engine.core.scheduler import ScheduledRequest
from engine.speculation.step_features import StepFeatures
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.core.builders import make_request, prompt

ROWS = torch.arange(24, dtype=torch.float32).view(12, 2)


def test_committed_tokens_and_the_nodes_that_stand() -> None:
    reading, tree, chain = (make_request(name, prompt(9)) for name in "abc")
    reading.num_computed_tokens, tree.num_computed_tokens, chain.num_computed_tokens = 3, 8, 8
    items = [
        ScheduledRequest(reading, 4, EMPTY_TREE, reaches_end=False),
        ScheduledRequest(tree, 1, TokenTree((1, 2, 3), (0, 0, 2)), reaches_end=True),
        ScheduledRequest(chain, 1, TokenTree.chain((4, 5)), reaches_end=True),
    ]
    features = StepFeatures()
    features.begin(items, ROWS)
    features.commit(items[0], ())
    features.commit(items[1], (2, 3))
    features.commit(items[2], (1,))
    found = {name: features.take(name) for name in "abc"}
    assert {name: each and (each.start, each.end) for name, each in found.items()} == {
        "a": (3, 7),
        "b": (8, 11),
        "c": (8, 10),
    }
    rows = {name: each and each.rows[:, 0].tolist() for name, each in found.items()}
    assert rows == {"a": [0, 2, 4, 6], "b": [8, 12, 14], "c": [16, 18]}


def test_each_step_is_handed_out_once() -> None:
    request = make_request("a", prompt(3))
    item = ScheduledRequest(request, 3, EMPTY_TREE, reaches_end=True)
    features = StepFeatures()
    features.begin([item], ROWS)
    features.commit(item, ())
    assert features.take("b") is None
    assert features.take("a") is not None
    assert features.take("a") is None
    features.commit(item, ())
    features.begin([], ROWS[:0])
    assert features.take("a") is None, "of the step before"


def test_what_is_kept_adds_up_until_it_is_taken() -> None:
    """For a head that sees every position, but not in every step."""
    request = make_request("a", prompt(3))
    first = ScheduledRequest(request, 3, EMPTY_TREE, reaches_end=True)
    second = ScheduledRequest(request, 1, TokenTree.chain((4, 5)), reaches_end=True)
    features, rows = StepFeatures(keeps=True), ROWS.clone()
    features.begin([first], rows)
    features.commit(first, ())
    request.num_computed_tokens = 3
    features.begin([second], rows[6:])
    features.commit(second, (1,))
    rows.fill_(-1.0)  # As the next step does.
    assert features.num_waiting("a") == 5
    taken = features.take("a")
    assert taken is not None
    assert (taken.start, taken.end) == (0, 5)
    assert taken.rows[:, 0].tolist() == [0, 2, 4, 12, 14]
    assert features.num_waiting("a") == 0
    features.commit(second, ())
    features.drop("a")
    assert features.take("a") is None
