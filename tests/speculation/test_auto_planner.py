"""The planner on a made-up machine: as fast as the best fixed depth, gone under load, back when it falls."""

import cProfile
import math
import pstats
from dataclasses import replace

import pytest

from engine.planning import PlanOutcome
from engine.speculation.auto_planner import AutoPlanner
from engine.speculation.evidence import MeasuredFloor
from engine.speculation.measurements import Measurements, MethodMeasurements
from engine.speculation.planner import Allotment, Load, Offer, Wish
from engine.speculation.step_cost import StepShape
from engine.token_tree import TokenTree
from tests.speculation.simulation import Machine, Simulation, best_fixed, cpu, gpu, padded

MACHINES = {
    "cpu": lambda: Machine(cpu, draft_pass=0.008, draft_row=0.0008),
    "cpu, a dear draft": lambda: Machine(cpu, draft_pass=0.02, draft_row=0.002),
    "rows in eights": lambda: Machine(padded, draft_pass=0.001, draft_row=0.0001),
    "gpu": lambda: Machine(gpu, draft_pass=0.0008, draft_row=0.00001),
}
DEPTH = 4


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_as_fast_as_the_best_fixed_depth(machine: str, concurrency: int) -> None:
    """None included."""
    for rate in (0.5, 0.85):
        rates = [rate] * concurrency
        planned = Simulation.planned(MACHINES[machine](), rates, DEPTH)
        planned.run(100)
        best = best_fixed(MACHINES[machine], rates, DEPTH, 20)
        assert planned.run(100 + 300 // concurrency) > 0.97 * best, (rate, planned.granted[-20:])


def test_requests_get_what_each_is_worth() -> None:
    """Half of the texts are foreseen, half are not: better than any depth for all."""
    rates = [0.9, 0.05] * 4
    planned = Simulation.planned(MACHINES["gpu"](), rates, DEPTH)
    planned.run(150)
    speed = planned.run(100)
    assert speed > 0.99 * best_fixed(MACHINES["gpu"], rates, DEPTH, 30)
    foreseen, others = planned._drafts[::2], planned._drafts[1::2]
    assert min(foreseen) > max(others)


def test_it_fades_under_load_and_returns() -> None:
    planned = Simulation.planned(MACHINES["cpu, a dear draft"](), [0.8], DEPTH)
    planned.run(150)
    alone = sum(planned.granted[-50:]) / 50
    planned.resize([0.8] * 32)
    planned.run(60)
    assert planned.outcomes[-40:].count(PlanOutcome.LOAD) >= 38
    assert sum(planned.granted[-40:]) <= 4
    planned.resize([0.8])
    planned.run(30)
    assert sum(planned.granted[-20:]) / 20 > 0.7 * alone > 1


def test_it_comes_back_from_zero_when_the_text_is_foreseen_again() -> None:
    planned = Simulation.planned(MACHINES["cpu"](), [0.0], DEPTH)
    planned.run(600)
    assert sum(planned.granted[-400:]) < 40  # Trials, and no more.
    assert PlanOutcome.PROBING in planned.outcomes[-400:]
    planned.rates = [0.95]
    planned.run(400)
    assert sum(planned.granted[-50:]) / 50 > 3


def test_trials_cost_a_bounded_share_of_the_time() -> None:
    plain = Simulation(MACHINES["cpu"](), [0.0], depth=0).run(500)
    planned = Simulation.planned(MACHINES["cpu"](), [0.0], DEPTH)
    planned.run(200)
    assert planned.run(1000) > 0.985 * plain


# One decision at a time.

CONTEXT = 100


def load(num_requests: int, *, num_draft_rows: int = 480, newcomers: int = 0, num_read: int = 0) -> Load:
    decoding = StepShape(num_requests, num_requests, CONTEXT, CONTEXT)
    num_prompt_rows = newcomers + num_read
    shape = replace(decoding, rows=num_requests + num_prompt_rows, reads_prompts=num_prompt_rows > 0)
    return Load(decoding, shape, num_draft_rows, num_requests, num_read)


def known(*methods: MethodMeasurements, curve: object = cpu) -> Measurements:
    measurements = Measurements(methods)
    rows = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128)
    measurements.cost.calibrate({count: curve(count) for count in rows}, 0.0, 0.0)  # type: ignore[operator]
    return measurements


def taught(name: str, rate: float, per_pass: float, per_row: float = 0.0001) -> MethodMeasurements:
    """A method with this much acceptance and cost behind it."""
    method = MethodMeasurements(name)
    for step in range(200):
        accepted = range(1, 2 if step * 7 % 20 < 20 * rate else 1)
        method.book.note("another", TokenTree.chain((1,)), accepted, 0)
        passes, rows = 1.0 + step % 4, 1.0 + step % 7
        method.costs.observe((1.0, passes, rows), passes * per_pass + rows * per_row, 0.07)
    method.book.forget("another")
    return method


def wishes(count: int, num_nodes: int = 4) -> list[Wish]:
    return [Wish(place, f"r{place}", num_nodes, num_nodes) for place in range(count)]


def num_nodes(allotment: Allotment, method: int) -> int:
    return sum(grant.num_nodes for grant in allotment.grants[method])


def test_no_room_in_the_step_no_nodes() -> None:
    planner = AutoPlanner(known(taught("a", 0.95, 0.001)))
    assert num_nodes(planner.allot(load(4), [], [wishes(4)]), 0) == 16
    assert num_nodes(planner.allot(load(4, num_draft_rows=6), [], [wishes(4)]), 0) == 6
    assert num_nodes(planner.allot(load(4, num_draft_rows=0), [], [wishes(4)]), 0) == 0


def test_no_more_than_a_request_wishes() -> None:
    planner = AutoPlanner(known(taught("a", 0.95, 0.001)))
    allotment = planner.allot(load(2), [], [[Wish(0, "r0", 3, 2), Wish(1, "r1", 1, 60)]])
    assert sorted((grant.place, grant.num_nodes) for grant in allotment.grants[0]) == [(0, 2), (1, 1)]


@pytest.mark.parametrize(("first", "second", "chosen"), [(0.9, 0.4, 0), (0.4, 0.9, 1)])
def test_the_better_of_two_methods_drafts(first: float, second: float, chosen: int) -> None:
    planner = AutoPlanner(known(taught("a", first, 0.004), taught("b", second, 0.004)))
    allotment = planner.allot(load(1), [], [wishes(1), wishes(1)])
    assert num_nodes(allotment, chosen) > 2
    assert num_nodes(allotment, 1 - chosen) == 0


def test_the_cheaper_of_two_equals_drafts() -> None:
    planner = AutoPlanner(known(taught("a", 0.8, 0.02), taught("b", 0.8, 0.001)))
    allotment = planner.allot(load(1), [], [wishes(1), wishes(1)])
    assert (num_nodes(allotment, 0), num_nodes(allotment, 1)) == (0, 4)


def test_a_chain_that_ends_early_may_become_as_long_as_there_is_room() -> None:
    """Though the average one would not pay beyond its first token."""
    planner = AutoPlanner(known(taught("a", 0.5, 0.004)))
    [fixed] = planner.allot(load(1), [], [wishes(1, 8)]).grants[0]
    sure = [replace(wish, ends_early=True) for wish in wishes(1, 8)]
    [grant] = planner.allot(load(1), [], [sure]).grants[0]
    assert (fixed.least, grant.num_nodes, grant.max_depth) == (0.0, 8, 8)
    assert fixed.num_nodes < 8
    assert 0.05 < grant.least < 1.0
    # What a level costs is what its last token has to promise.
    dear = AutoPlanner(known(taught("a", 0.9, 0.02)))
    assert dear.allot(load(1), [], [sure]).grants[0][0].least > 2 * grant.least
    together = planner.allot(
        load(3, num_draft_rows=10), [], [[replace(each, ends_early=True) for each in wishes(3, 8)]]
    )
    assert sum(each.num_nodes for each in together.grants[0]) == 10


def test_texts_are_followed_as_long_as_drafts_may_pay() -> None:
    weak = AutoPlanner(known(taught("a", 0.4, 0.004, 0.002)))
    assert weak.follows_texts(0, 1)
    assert not weak.follows_texts(0, 32)
    follows = [weak.follows_texts(0, count) for count in range(1, 33)]
    assert follows == sorted(follows, reverse=True)
    strong = AutoPlanner(known(taught("a", 0.95, 0.001), curve=gpu))
    assert strong.follows_texts(0, 32)
    assert AutoPlanner(Measurements([taught("a", 0.01, 0.1)])).follows_texts(0, 32), "nothing is measured yet"


def test_what_lookups_offer_is_cut_where_it_stops_paying() -> None:
    lookup = MethodMeasurements("ngram", estimates=True)
    offer = Offer(0, 0, (0.95, 0.9, 0.5, 0.02))
    planner = AutoPlanner(known(lookup))
    alone = planner.allot(load(1), [offer], [[]]).kept
    among_many = planner.allot(load(32), [offer], [[]]).kept
    assert alone == (3,)
    assert among_many < alone


def test_one_sure_draft_is_kept_where_no_other_pays() -> None:
    """Of one token: the next one would add less to its request than its row takes from the seven others."""
    lookup = MethodMeasurements("ngram", estimates=True)
    offers = [Offer(0, 0, (0.99, 0.98)), Offer(7, 0, (0.3, 0.2))]
    assert AutoPlanner(known(lookup)).allot(load(8), offers, [[]]).kept == (1, 0)


def test_no_request_is_sped_up_at_the_cost_of_all_others() -> None:
    """Ten sure tokens for one of four would be more tokens per second, and each of the others would wait."""
    lookup = MethodMeasurements("ngram", estimates=True)
    planner = AutoPlanner(known(lookup))
    offer = Offer(0, 0, tuple(0.99**depth for depth in range(1, 13)))
    [among_four] = planner.allot(load(4), [offer], [[]]).kept
    assert 1 <= among_four <= 2
    assert sum(planner.allot(load(4), [replace(offer, place=place) for place in range(4)], [[]]).kept) > 6
    assert planner.allot(load(1), [offer], [[]]).kept == (12,)


def test_a_lookup_goes_first_where_it_promises_more() -> None:
    lookup = MethodMeasurements("ngram", estimates=True)
    planner = AutoPlanner(known(lookup, taught("draft_model", 0.7, 0.002)))
    offers = [Offer(0, 0, (0.99, 0.98, 0.97)), Offer(1, 0, (0.2,))]
    allotment = planner.allot(load(2), offers, [[], wishes(2)])
    assert allotment.kept == (3, 0)
    assert [grant.place for grant in allotment.grants[1]] == [1]


def test_lookups_that_are_not_worth_the_asking_are_asked_in_some_steps_alone() -> None:
    measurements = known(MethodMeasurements("ngram", estimates=True))
    planner = AutoPlanner(measurements)

    def share(steps: int, every: int, gain: float) -> float:
        """Of steps in which it is asked for "a", where one look of so many wins something."""
        asked = 0
        for _ in range(steps):
            measurements.step += 1
            if planner.listens("a"):
                asked += 1
                measurements.lookups.note_cost(0.0004, 4)
                measurements.lookups.note_gain("a", 0.0 if asked % every else gain)
        return asked / steps

    assert share(15, 100, 0.0) == 1.0, "a new text is trusted for a while"
    assert share(400, 20, 0.0008) == pytest.approx(0.25, abs=0.05)
    assert share(400, 3, 0.0008) > 0.95
    assert share(200, 1, 0.00005) < 0.4
    assert share(8, 1, 0.0008) >= 0.25
    assert share(100, 1, 0.0008) == 1.0
    share(100, 1, 0.0)
    assert planner.listens("b")
    measurements.lookups.forget("a")
    assert share(15, 100, 0.0) == 1.0


def test_what_kept_nodes_of_lookups_win_is_reckoned() -> None:
    planner = AutoPlanner(known(MethodMeasurements("ngram", estimates=True)))
    one = load(1)
    alone = planner.allot(one, [Offer(0, 0, (0.95, 0.9))], [[]])
    assert alone.kept == (2,)
    assert 0.5 * math.log(2.85) * cpu(1) < alone.gains[0] < math.log(2.85) * cpu(1)
    among_four = planner.allot(load(4), [Offer(0, 0, (0.95, 0.9)), Offer(1, 0, (0.05,))], [[]])
    assert among_four.kept[1] == 0
    assert among_four.gains[1] == 0.0
    assert 0.0 < among_four.gains[0] < alone.gains[0]
    beside_a_prompt = replace(one, shape=replace(one.shape, rows=300, reads_prompts=True), num_read=299)
    assert planner.allot(beside_a_prompt, [Offer(0, 0, (0.95, 0.9))], [[]]).gains == ()


def test_chains_may_grow_to_more_nodes_than_are_weighed() -> None:
    planner = AutoPlanner(known(taught("a", 0.9, 0.0001, 0.00001), curve=gpu))
    growing = [replace(wish, ends_early=True) for wish in wishes(64, 8)]
    offer = Offer(64, 0, (0.95,))
    allotment = planner.allot(load(65, num_draft_rows=1000), [offer], [growing])
    assert num_nodes(allotment, 0) == 64 * 8
    assert allotment.kept == (1,)
    assert 0.0 < allotment.gains[0] < math.log(1.95) * gpu(65) / 65


def test_lookups_that_promise_too_much_are_believed_less() -> None:
    lookup = MethodMeasurements("ngram", estimates=True)
    measurements = known(lookup)
    tree = TokenTree((1, 2), (0, 1), probabilities=(0.9, 0.8))
    before = lookup.calibration.overall
    for _ in range(200):
        measurements.note_verdict(0, "r", tree, ())
    assert before == 1.0
    assert lookup.calibration.overall < 0.2
    assert AutoPlanner(measurements).allot(load(1), [Offer(0, 0, (0.3,))], [[]]).kept == (0,)


def test_the_price_of_a_row_rises_with_the_load() -> None:
    planner = AutoPlanner(known(MethodMeasurements("ngram", estimates=True)))
    prices = [planner.price(load(count)) for count in (1, 4, 16, 32)]
    floors = [price.least for price in prices if isinstance(price, MeasuredFloor)]
    assert floors == sorted(floors)
    assert floors[0] < 0.04
    assert floors[-1] > 0.8


def test_who_waits_for_a_first_token_does_not_wait_for_drafts() -> None:
    """Neither for a method's passes nor for rows, and nobody is asked in vain."""
    measurements = known(MethodMeasurements("ngram", estimates=True), taught("a", 0.95, 0.001))
    planner = AutoPlanner(measurements)
    offer = Offer(0, 0, (0.99, 0.98))
    assert planner.allot(load(1), [offer], [[], []]).kept == (2,)
    beside = load(1, newcomers=40)
    assert planner.price(beside) is None
    assert not planner.asks(1, beside)
    assert planner.allot(beside, [offer], [[], []]).kept == (0,)
    assert planner.allot(beside, [], [[], []]).outcome is PlanOutcome.WAITING
    asked = planner.allot(beside, [], [[], wishes(1)])
    assert (asked.grants[1], asked.num_probes, asked.outcome) == ((), 0, PlanOutcome.WAITING)
    # What was refused for others' sake is asked again at once.
    assert planner.price(load(1)) is not None
    assert planner.asks(1, load(1))


def test_a_long_chunk_of_a_prompt_may_be_lengthened_by_a_few_hundredths() -> None:
    """It takes long by itself, and those that decode beside it have a step of theirs as long."""
    measurements = known(MethodMeasurements("ngram", estimates=True))
    planner = AutoPlanner(measurements)
    offers = [Offer(place, 0, tuple(0.99**depth for depth in range(1, 13))) for place in range(4)]
    chunk = load(4, num_read=1000)
    assert planner.price(chunk) is not None
    count = sum(planner.allot(chunk, offers, [[]]).kept)
    assert 4 <= count < 48
    cost = measurements.cost
    allowed = 0.02 * cost.step(replace(chunk.shape, rows=1004))
    assert 0.5 * allowed < cost.rise(chunk.shape, 48)[count] * 1.05 <= allowed


def test_catching_up_counts() -> None:
    planner = AutoPlanner(known(taught("a", 0.6, 0.004, 0.001)))
    near, far = Wish(0, "r0", 4, 4), Wish(1, "r1", 4, 4, num_behind=50_000)
    grants = planner.allot(load(2), [], [[near, far]]).grants[0]
    assert [grant.place for grant in grants] == [0]


@pytest.mark.parametrize(
    ("rate", "count", "outcome"),
    [
        (0.9, 1, PlanOutcome.SPECULATED),
        (0.9, 32, PlanOutcome.LOAD),
        (0.02, 1, PlanOutcome.ACCEPTANCE),
    ],
)
def test_it_says_why(rate: float, count: int, outcome: PlanOutcome) -> None:
    measurements = known(taught("a", rate, 0.02, 0.002))
    planner = AutoPlanner(measurements)
    planner.allot(load(count), [], [wishes(count)])
    measurements.step += 1
    assert planner.allot(load(count), [], [wishes(count)]).outcome is outcome
    assert planner.follows_prompts(0) is (outcome is not PlanOutcome.LOAD)


def test_who_got_nothing_is_left_alone_for_a_while_or_until_the_load_falls() -> None:
    measurements = known(taught("a", 0.9, 0.02, 0.002))
    planner = AutoPlanner(measurements)
    assert planner.asks(0, load(32))
    assert planner.allot(load(32), [], [wishes(32)]).outcome is PlanOutcome.LOAD
    assert not planner.asks(0, load(32))
    assert planner.allot(load(32), [], [[]]).outcome is PlanOutcome.LOAD
    assert planner.asks(0, load(31))
    measurements.step += 4
    assert planner.asks(0, load(32))
    assert num_nodes(planner.allot(load(1), [], [wishes(1)]), 0) > 0
    assert planner.asks(0, load(32)), "it has just drafted"


def test_a_rest_that_is_over_is_no_reason_any_more() -> None:
    measurements = known(taught("a", 0.02, 0.02, 0.002))
    planner = AutoPlanner(measurements)
    assert planner.allot(load(4), [], [wishes(4)]).outcome is PlanOutcome.PROBING
    measurements.step += 1
    assert planner.allot(load(4), [], [wishes(4)]).outcome is PlanOutcome.ACCEPTANCE
    measurements.step += 3
    assert planner.allot(load(4), [], [[]]).outcome is PlanOutcome.ACCEPTANCE
    # The load has fallen, or time has passed: the method would be asked, were there anybody to draft for.
    assert planner.allot(load(3), [], [[]]).outcome is PlanOutcome.NO_DRAFT
    measurements.step += 1
    assert planner.allot(load(4), [], [[]]).outcome is PlanOutcome.NO_DRAFT


def num_calls(count: int, rate: float, curve: object) -> int:
    """Functions called to decide one step in the thick of it."""
    measurements = known(taught("a", rate, 0.0001), curve=curve)
    planner = AutoPlanner(measurements)
    profile = cProfile.Profile()
    for step in range(20):
        asked = wishes(count)
        profile.clear()
        profile.enable()
        planner.allot(load(count), [], [asked])
        profile.disable()
        measurements.step = step
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_deciding_is_a_matter_of_few_operations() -> None:
    """A call is about a tenth of a microsecond, so that 32 requests are far below 0.2 milliseconds."""
    assert num_calls(32, 0.9, gpu) < 1500
    assert num_calls(32, 0.5, cpu) < 700
    assert num_calls(1, 0.9, gpu) < 300
