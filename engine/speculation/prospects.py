"""Prospects: what a step costs with drafts in it, and whether any could pay at all."""

import math
from dataclasses import replace
from itertools import accumulate

from engine.speculation.allotment import Tariff
from engine.speculation.measurements import Measurements
from engine.speculation.planner import Load
from engine.speculation.step_cost import StepShape

# What drafts cost is taken to be so many times what it was measured to be: estimates are noisy, and the best
# of many noisy ones is too good to be true.
_CAUTION = 1.05
# Nodes of all requests that are weighed against each other in a step.
_MOST_NODES = 256
# Steps of the same size for which costs hold before they are looked up again.
_HOLD = 8
# If not even such drafts paid, of one request or of all, more acceptance would not help.
OPTIMISTIC = tuple(0.97**depth for depth in range(1, 9))
# By so much of its time drafts may lengthen a step that reads prompts: whoever waits for a first token has
# nothing of others' drafts.
_PATIENCE = 0.02
# Steps from one time to the next that this is asked.
_HOPE_STEPS = 8
# What drafts have to promise over plain steps for a text to be followed: a little more than nothing.
_MARGIN = 1.05
# By this factor the odds of a text's drafts may be better than those of all that is known.
_OPTIMISTIC_ODDS = 1.5
# Levels of the drafts that following is weighed by.
_FOLLOWED_DEPTH = 3


class Prospects:
    """What is to be had of drafts.

    Args:
        measurements: What it goes by.

    Attributes:
        hopeful: Per method whether drafts that nearly always stand would pay, when that was asked last.
    """

    def __init__(self, measurements: Measurements) -> None:
        self._known = measurements
        self.hopeful = [True for _ in measurements.methods]
        self._asked_at = [-_HOPE_STEPS for _ in measurements.methods]
        self._size = (0, 0, 0, 0)
        self._holds_until = 0
        self._plain = Tariff(1, 1.0, ())

    def plain(self, load: Load, most: int) -> Tariff:
        """What the step costs, and up to so many nodes in it; without the costs of drafting."""
        most = min(load.num_draft_rows, most, _MOST_NODES)
        size = (load.decoding.requests, load.shape.rows, load.num_draft_rows, load.num_read)
        if size != self._size or self._known.step >= self._holds_until or len(self._plain.rise) <= most:
            cost = self._known.cost
            rise = [_CAUTION * seconds for seconds in cost.rise(load.shape, most)]
            # Prompts that are read in the same step have a worth of their own: their time is not the drafts'.
            self._plain = Tariff(
                load.decoding.requests, cost.step(load.decoding), rise, most=self._patience(load)
            )
            self._size, self._holds_until = size, self._known.step + _HOLD
        return self._plain

    def _patience(self, load: Load) -> float:
        """Seconds that drafts may add to the step."""
        if not load.shape.reads_prompts:
            return math.inf
        least = replace(load.decoding, rows=load.decoding.rows + load.num_read)
        return _PATIENCE * self._known.cost.step(least)

    def tariff(self, method: int, plain: Tariff) -> Tariff:
        """The same with the costs of a method that drafts."""
        costs = self._known.methods[method].costs.solve(self._known.cost.unit)
        start, per_pass, per_row = (_CAUTION * cost for cost in costs)
        return replace(plain, start=start, per_pass=per_pass, per_row=per_row)

    def may_pay(self, method: int, num_requests: int, num_levels: int, plain: Tariff) -> bool:
        """Whether drafts that nearly always stand would pay at this load; asked anew every few steps."""
        if self._known.step - self._asked_at[method] >= _HOPE_STEPS:
            self._asked_at[method] = self._known.step
            tariff = self.tariff(method, plain)
            self.hopeful[method] = any(
                tariff.speed(sum(OPTIMISTIC[:depth]), count, depth) > tariff.plain_speed
                for count in (1, num_requests)
                for depth in range(1, min(num_levels, len(OPTIMISTIC)) + 1)
                if count * depth < len(tariff.rise)
            )
        return self.hopeful[method]

    def follows_texts(self, method: int, num_requests: int, context: int) -> bool:
        """Whether drafts that are somewhat better than the average would pay for reading texts along.

        Args:
            method: Who would read.
            num_requests: How many there are.
            context: Tokens of each.
        """
        if not self._known.cost.is_measured:
            return True
        shape = StepShape(num_requests, num_requests, num_requests * context, num_requests * context)
        num_rows = _FOLLOWED_DEPTH * num_requests
        tariff = self.tariff(method, self.plain(Load(shape, shape, num_rows, num_requests), num_rows))
        rate = self._known.methods[method].book.rates()[0][0]
        rate = _OPTIMISTIC_ODDS * rate / (1.0 - rate + _OPTIMISTIC_ODDS * rate)
        # Following costs a row of the method per token of each request, drafted for or not.
        tariff = replace(tariff, start=tariff.start + tariff.per_row * num_requests)
        worth_it = _MARGIN * tariff.plain_speed
        tokens = list(accumulate(rate**level for level in range(1, _FOLLOWED_DEPTH + 1)))
        return any(
            tariff.speed(gained, count, depth) > worth_it
            for count in (1, num_requests)
            for depth, gained in enumerate(tokens, start=1)
            if count * depth < len(tariff.rise)
        )
