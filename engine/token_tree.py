"""TokenTree: the shape of every draft, from none at all to SpecInfer's trees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

MAX_NODES = 63


class Proposal(StrEnum):
    """How a tree's tokens were chosen, which alone decides which verification rule is lossless.

    DETERMINISTIC: argmax, lookup, beam: anything that did not look at the target's noise or a distribution.
    COUPLED: the argmax of the draft's logits plus the very noise the target will use.
    SAMPLED: drawn from the recorded distribution of the node's parent, with noise of its own. Siblings are
        drawn independently, so that two may be the same token; each stays a node, in the order drawn.
    SAMPLED_DISTINCT: the same, but siblings are drawn one after another without replacement, which is to
        take the first m of log q plus Gumbel noise, in falling order (Kool et al. 2019).
    """

    DETERMINISTIC = "deterministic"
    COUPLED = "coupled"
    SAMPLED = "sampled"
    SAMPLED_DISTINCT = "sampled-distinct"

    @property
    def is_drawn(self) -> bool:
        """Whether the tokens were drawn from distributions that the tree records."""
        return self in (Proposal.SAMPLED, Proposal.SAMPLED_DISTINCT)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens that hang off a request's last committed token.

    Node 0 is the root: the last committed token, which the request already has and the tree does not
    repeat. Draft nodes are numbered from 1 in an order in which parents come first, so any prefix of the
    nodes is a tree again. A chain is a tree with one child per node; the empty tree is plain decoding.

        committed ... x     root 0 = x
                      ├─ a  node 1, parent 0
                      │  └─ c  node 3, parent 1
                      └─ b  node 2, parent 0        tokens (a, b, c), parents (0, 0, 1)

    Attributes:
        tokens: Token id of each draft node.
        parents: Node number of each draft node's parent.
        proposal: How the tokens were chosen.
        distributions: For trees whose tokens were drawn, per draft node the distribution that the draft gave
            to its parent's row, before any sibling was taken out of it (a tensor [vocab_size]; opaque here,
            where nothing knows of tensors).
        probabilities: Per draft node the chance that it stands, where the drafter knows better than averages
            do; falling from node to node. Nothing that decides about the text looks at it.
        confidences: For chains, per node how sure the draft was of its token, behind those before it; empty
            where nobody asked. As little looked at.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    proposal: Proposal = Proposal.DETERMINISTIC
    distributions: tuple[object, ...] = ()
    probabilities: tuple[float, ...] = field(default=(), compare=False)
    confidences: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if len(self.tokens) > MAX_NODES:
            raise ValueError(f"a tree holds at most {MAX_NODES} draft nodes, got {len(self.tokens)}")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents, start=1)):
            raise ValueError(f"each parent must come before its child, got parents {self.parents}")
        if self.proposal.is_drawn and len(self.distributions) != len(self.tokens):
            raise ValueError("a sampled tree carries one distribution per draft node")

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        proposal: Proposal = Proposal.DETERMINISTIC,
        distributions: Sequence[object] = (),
    ) -> "TokenTree":
        """A tree in which each node has one child."""
        return cls(tuple(tokens), tuple(range(len(tokens))), proposal, tuple(distributions))

    def __len__(self) -> int:
        """The number of draft nodes, the root not counted."""
        return len(self.tokens)

    def truncated(self, num_nodes: int) -> "TokenTree":
        """The tree of the first `num_nodes` draft nodes."""
        if num_nodes >= len(self):
            return self
        return TokenTree(
            self.tokens[:num_nodes],
            self.parents[:num_nodes],
            self.proposal,
            self.distributions[:num_nodes],
            self.probabilities[:num_nodes],
            self.confidences[:num_nodes],
        )

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(len(self)))

    def depths(self) -> tuple[int, ...]:
        """Distance from the root of each node, the root (0) included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def children(self, node: int) -> tuple[int, ...]:
        """The node numbers of a node's children, in proposed order."""
        return tuple(child for child, parent in enumerate(self.parents, start=1) if parent == node)

    def path(self, node: int) -> tuple[int, ...]:
        """The node numbers from the root's child down to `node`; empty for the root."""
        path: list[int] = []
        while node:
            path.append(node)
            node = self.parents[node - 1]
        return tuple(reversed(path))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The token ids along `path(node)`."""
        return tuple(self.tokens[step - 1] for step in self.path(node))

    def ancestor_words(self) -> tuple[int, ...]:
        """Per node, the root included, the draft nodes it may attend to: bit n - 1 stands for node n.

        A node sees itself and its ancestors. The root's word is 0: it belongs to the committed tokens.
        """
        words = [0]
        for node, parent in enumerate(self.parents, start=1):
            words.append(words[parent] | 1 << (node - 1))
        return tuple(words)


EMPTY_TREE = TokenTree()
