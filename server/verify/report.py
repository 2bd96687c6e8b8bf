"""The rows as text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from server.verify.results import Divergence, Equality, LawRow, Outcome, TextRow, Verdict

_MOST_SHOWN = 10
_NAME = 20


def as_text(outcome: Outcome) -> str:
    """The whole report."""
    bounds = outcome.bounds
    lines = [
        f"verified: {outcome.subject}",
        "",
        "texts and logprobs against plain decoding of each prompt alone",
        f"  near-ties: the two tokens at most {bounds.near_tie:g} nats apart; logprobs may differ by "
        f"{bounds.tolerance:g}",
        *_table(_TEXT_HEAD, [_text_cells(row) for row in _folded(outcome.texts)], left=3),
        *_divergences(outcome.texts),
        "",
        f"distributions of the first tokens against the exact law: {outcome.law_source}",
        f"  all tests together fail by chance with probability {bounds.false_alarm:g}: a fault is p below "
        f"{bounds.alarm_each:.1e}",
        *_table(_LAW_HEAD, [_law_cells(row) for row in outcome.laws], left=4),
        "",
        *_notes(outcome),
        _conclusion(outcome),
    ]
    return "\n".join(lines) + "\n"


_TEXT_HEAD = (
    "method",
    "rule",
    "case",
    "alone",
    "batched",
    "parts at",
    "gap",
    "logprobs",
    "accepted",
    "verdict",
)
_LAW_HEAD = ("method", "rule", "case", "prompt", "position", "draws", "cells", "p", "accepted", "verdict")


def _folded(rows: Sequence[TextRow]) -> list[TextRow]:
    """The rows, but one for all of plain decoding where a batch changes nothing, as it should."""
    plain = [row for row in rows if not row.rule]
    if any(row.verdict is not Verdict.EQUAL for row in plain):
        return list(rows)
    total = sum(row.batched.total for row in plain)
    differences = [row.logprob_difference for row in plain if row.logprob_difference is not None]
    one = replace(
        plain[0],
        case=f"all {len(plain)} cases",
        batched=Equality(total, total),
        logprob_difference=max(differences, default=None),
    )
    return [one, *(row for row in rows if row.rule)]


def _text_cells(row: TextRow) -> tuple[str, ...]:
    first = row.divergences[0] if row.divergences else None
    return (
        row.method,
        row.rule or "-",
        row.case,
        _share(row.alone),
        _share(row.batched),
        "-" if first is None else _place(first),
        "-" if first is None or first.gap is None else f"{first.gap:.1e}",
        "-" if row.logprob_difference is None else _small(row.logprob_difference),
        _accepted(row.accepted, row.drafted),
        row.verdict,
    )


def _law_cells(row: LawRow) -> tuple[str, ...]:
    return (
        row.method,
        row.rule or "-",
        row.case,
        row.prompt[:_NAME],
        str(row.position),
        str(row.num_draws),
        str(row.num_cells),
        _chance(row),
        _accepted(row.accepted, row.drafted),
        row.verdict,
    )


def _divergences(rows: Sequence[TextRow]) -> Iterator[str]:
    """The first few in words, and what failed."""
    found = [(row, item) for row in rows for item in row.divergences]
    # Faults first: they are what the reader looks for.
    found.sort(key=lambda pair: pair[1].verdict is not Verdict.FAULT)
    if found:
        yield "  where texts part:"
    for row, item in found[:_MOST_SHOWN]:
        gap = "gap unknown" if item.gap is None else f"{item.gap:.2e} nats apart"
        how = "batched" if item.batched else "alone"
        rule = f" {row.rule}" if row.rule else ""
        yield (
            f"    {item.verdict}: {row.method}{rule}, {row.case}, {how}, prompt {item.prompt[:_NAME]}, "
            f"{_place(item)}: {item.got!r}, not {item.expected!r}; {gap}"
        )
    if len(found) > _MOST_SHOWN:
        yield f"    and {len(found) - _MOST_SHOWN} more; --json has all"
    for row in rows:
        for error in row.errors[:1]:
            yield f"  FAILED: {row.method} {row.rule}, {row.case}: {error}"


def _place(item: Divergence) -> str:
    if item.token is not None:
        return f"token {item.token}"
    return "its end" if item.character is None else f"char {item.character}"


def _notes(outcome: Outcome) -> Iterator[str]:
    for who, what, reason in outcome.refused[:_MOST_SHOWN]:
        yield f"NOTE: {who} does not serve {what}: {reason}"
    for row in outcome.laws:
        for error in row.errors[:1]:
            yield f"FAILED: {row.method} {row.rule}, {row.case}, draws: {error}"
    drafted: dict[str, int] = {}
    for text in outcome.texts:
        if text.rule:
            drafted[text.method] = drafted.get(text.method, 0) + text.drafted
    for method, count in drafted.items():
        if not count:
            yield f"NOTE: {method} drafted nothing at all, so this says nothing about it"


def _conclusion(outcome: Outcome) -> str:
    answers = sum(row.alone.total + row.batched.total for row in outcome.texts)
    draws = sum(row.num_draws for row in outcome.laws)
    parted = sum(len(row.divergences) for row in outcome.texts)
    if outcome.num_faults:
        return f"FAULT: {outcome.num_faults} of {len(outcome.texts) + len(outcome.laws)} rows above"
    ties = f", {parted} of them but for near-ties" if parted else ""
    tested = sum(row.verdict is Verdict.HOLDS for row in outcome.laws)
    return (
        f"no fault: {answers} answers are those of plain decoding{ties}; "
        f"{draws} draws fit the law in {tested} of {len(outcome.laws)} tests"
    )


def _chance(row: LawRow) -> str:
    if row.verdict is Verdict.ONE_OUTCOME:
        return "-"
    return f"{row.p_value:.3f}" if row.p_value >= 0.001 else f"{row.p_value:.1e}"


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _share(equality: Equality) -> str:
    return f"{equality.equal}/{equality.total}" if equality.total else "-"


def _accepted(accepted: int, drafted: int) -> str:
    return f"{accepted}/{drafted}" if drafted else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """Rows under a head, as wide as they need; the first few and the last start left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            text.ljust(width) if column < left or column == len(head) - 1 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
