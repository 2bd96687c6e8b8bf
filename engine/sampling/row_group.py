"""RowGroup: what the rows of one request are processed by (row expansion).

A row of logits predicts the token behind some history. The row of a tree node is processed as if the tokens
on the node's path had already been emitted, so that penalties and min_tokens act at each place of a draft as
they would without one:

    committed ... x     row 0: history ... x
                  ├─ a  row 1: history ... x a
                  │  └─ c  row 3: history ... x a c
                  └─ b  row 2: history ... x b
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.grammar import Matcher
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling_params import Acceptance, SamplingParams
from engine.token_tree import TokenTree

# Positions are below 2**32; ranks and depths lie above them in a key.
_POSITION_BITS = 32
_OF_A_STEP = (Stream.DRAFT, Stream.ACCEPT)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive rows of logits that belong to one request.

    A target has the rows of a tree (`tree_paths`); a draft model has one row, whose path is the chain that it
    drafted so far.

    Attributes:
        params: The request's sampling parameters, the seed resolved.
        token_ids: Committed tokens, prompt and output.
        num_prompt_tokens: How many of them are the prompt.
        eos_token_ids: The model's EOS ids.
        paths: Per row, the draft tokens that count as emitted.
        matcher: Follows the answer through its grammar; None leaves it free.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: frozenset[int]
    paths: tuple[tuple[int, ...], ...] = ((),)
    matcher: Matcher | None = None

    def __len__(self) -> int:
        """Rows of the group."""
        return len(self.paths)

    @staticmethod
    def tree_paths(tree: TokenTree) -> tuple[tuple[int, ...], ...]:
        """The paths of a tree's rows: the root's, then one per node in node order."""
        if not tree.tokens:
            return ((),)
        return tuple(tree.path_tokens(node) for node in range(len(tree) + 1))

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that would end the answer, which min_tokens keeps away."""
        eos_token_ids = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return tuple(sorted(eos_token_ids.union(self.params.stop_token_ids)))

    def rows_below_min_tokens(self) -> list[int]:
        """Rows at which fewer than min_tokens tokens were emitted."""
        missing = self.params.min_tokens - (len(self.token_ids) - self.num_prompt_tokens)
        if missing <= 0:
            return []
        return [row for row, path in enumerate(self.paths) if len(path) < missing]

    def noise_keys(self, stream: Stream) -> tuple[NoiseKey | None, ...]:
        """Per row the key of its noise; None where the most likely token is taken."""
        if self.params.is_greedy:
            return (None,) * len(self)
        return tuple(self.noise_key(len(path), stream) for path in self.paths)

    def noise_key(self, depth: int, stream: Stream, rank: int = 0) -> NoiseKey:
        """The key of the token that follows `depth` draft tokens.

        Block verification decides on a token by what the draft says behind it, so that all the noise of a
        step's draft and coins is spent, even where nothing came of it. There their keys name the step, by the
        length at its start, and the depth. No other rule looks ahead.

        Args:
            depth: Draft tokens in front of it.
            stream: What the noise is for.
            rank: Its place among its siblings, where each has a number of its own.

        Raises:
            ValueError: The seed was not resolved.
        """
        seed = self.params.seed
        if seed is None:
            raise ValueError("the seed of a sampled request must be resolved at admission, got None")
        position, above = len(self.token_ids) + depth, rank
        if self.params.speculation.acceptance is Acceptance.BLOCK and stream in _OF_A_STEP:
            position, above = len(self.token_ids), 1 + depth
        return NoiseKey(seed, self.params.choice, position | above << _POSITION_BITS, stream)
