"""What an answer may not say: tokens that its grammar does not allow, and ends that come too early."""

import torch

from engine.sampling.row_group import RowGroup
from engine.sampling.uploading import upload


def mask_rows(rows: torch.Tensor, group: RowGroup) -> None:
    """Takes away, in place, what may not follow each row's path.

    Where the grammar leaves nothing but an end, min_tokens yields to it. A row from which everything is taken
    away has no answer: it gets a token that the grammar does not allow, whose refusal fails the request.

    Args:
        rows: float32 [len(group), vocab_size], everything but the masks applied.
        group: Whose rows these are.
    """
    allowed = None if group.matcher is None else _allowed(group, rows)
    if allowed is not None:
        rows.masked_fill_(~allowed, -torch.inf)
    _keep_allowed(rows, group)
    _ban_words(rows, group)
    _ban_early_ends(rows, group)
    if allowed is not None:
        dead = (rows.amax(dim=-1) == -torch.inf).nonzero()[:, 0]
        if len(dead):
            # bool has no argmin; the first 0 among 0 and 1 is the lowest id that is not allowed.
            rows[dead, allowed[dead].to(torch.uint8).argmin(dim=-1)] = 0.0


def _allowed(group: RowGroup, rows: torch.Tensor) -> torch.Tensor:
    """Bool [num_rows, vocab_size]; all of it where no answer comes by."""
    assert group.matcher is not None, "there is a grammar"
    num_bytes = -(-rows.shape[1] // 8)
    everything = b"\xff" * num_bytes
    masks = [mask if mask is not None else everything for mask in group.matcher.masks(group.paths)]
    packed = torch.frombuffer(bytearray(b"".join(mask[:num_bytes] for mask in masks)), dtype=torch.uint8)
    bits = packed.view(len(group), num_bytes, 1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.view(len(group), -1)[:, : rows.shape[1]].to(device=rows.device, dtype=torch.bool)


def _keep_allowed(rows: torch.Tensor, group: RowGroup) -> None:
    ids = [token for token in group.params.allowed_token_ids if token < rows.shape[1]]
    if ids:
        columns = upload(ids, torch.int64, rows.device)
        kept = rows[:, columns]
        rows.fill_(-torch.inf)
        rows[:, columns] = kept


def _ban_words(rows: torch.Tensor, group: RowGroup) -> None:
    """Bans the last token of each word whose other tokens stand at the end, unless nothing else is left."""
    words = group.params.bad_words
    if not words:
        return
    reach = max(map(len, words)) - 1
    begin = max(group.num_prompt_tokens, len(group.token_ids) - reach)
    answer = tuple(group.token_ids[begin:])
    for row, path in enumerate(group.paths):
        said = answer + path
        banned = {
            word[-1]
            for word in words
            if len(word) <= len(said) + 1 and said[len(said) + 1 - len(word) :] == word[:-1]
        }
        columns = [token for token in banned if token < rows.shape[1]]
        if columns:
            left = rows[row].index_fill(0, upload(columns, torch.int64, rows.device), -torch.inf)
            rows[row] = torch.where(left.amax() > -torch.inf, left, rows[row])


def _ban_early_ends(rows: torch.Tensor, group: RowGroup) -> None:
    early = group.rows_below_min_tokens()
    # An id behind the vocabulary cannot be chosen, so there is nothing to ban.
    banned = [token for token in group.banned_token_ids if token < rows.shape[1]]
    if not early or not banned:
        return
    index = upload(early, torch.int64, rows.device)
    whole = rows[index]
    left = whole.index_fill(1, upload(banned, torch.int64, rows.device), -torch.inf)
    if group.matcher is not None or group.params.allowed_token_ids:
        is_end = left.amax(dim=-1, keepdim=True) == -torch.inf
        left = torch.where(is_end, whole, left)
    rows[index] = left
