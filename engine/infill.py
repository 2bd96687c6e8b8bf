"""Fill-in-the-middle (Bavarian et al. 2022): how models that fill gaps want the text around one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Qwen2.5-Coder and CodeGemma; StarCoder; Code Llama; DeepSeek-Coder. Each as its makers say.
_FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)

# Behind a middle such models say one of these, which need not be what ends a turn of theirs.
_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<file_sep>",
    "\u2581<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


@dataclass(frozen=True, slots=True)
class Infill:
    """A gap as a prompt.

    Attributes:
        token_ids: What stands around the gap, with the model's markers; the answer is what fills it.
        end_token_ids: Ids by which the model says that the gap is filled.
    """

    token_ids: Sequence[int]
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InfillMarkers:
    """Token ids that a model knows a gap by.

    Attributes:
        before, behind, gap: What precedes the text before the gap, the text behind it, and the gap.
        ends: Ids behind the middle.
    """

    before: int
    behind: int
    gap: int
    ends: tuple[int, ...]

    def around(self, before: Sequence[int], behind: Sequence[int]) -> Infill:
        """The texts around a gap as a prompt."""
        token_ids = (self.before, *before, self.behind, *behind, self.gap)
        return Infill(token_ids, self.ends)


def find_markers(token_to_id: Callable[[str], int | None]) -> InfillMarkers | None:
    """The markers in a vocabulary; None where there are none.

    Args:
        token_to_id: The id of a vocabulary entry, if there is one.
    """
    for spelling in _FORMATS:
        before, behind, gap = map(token_to_id, spelling)
        if before is not None and behind is not None and gap is not None:
            ends = tuple(found for found in map(token_to_id, _ENDS) if found is not None)
            return InfillMarkers(before, behind, gap, ends)
    return None
