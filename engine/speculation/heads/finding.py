"""Where a head's files come from: a folder on this disk, the hub's cache, or the hub."""

import logging
from pathlib import Path

from engine.errors import ModelNotFound
from engine.model.folder import missing_weights
from engine.model.hub import Hub, is_hub_id
from engine.speculation.heads.checkpoint import MEDUSA_WEIGHTS

logger = logging.getLogger(__name__)


def head_hub(cache_dir: Path | None, *, offline: bool, endpoint: str | None = None) -> Hub:
    """The hub, as heads are looked for on it.

    Args:
        cache_dir: The hub's cache; None takes the one that all tools of the hub share.
        offline: Never touch the network.
        endpoint: Address of the hub; None takes HF_ENDPOINT or the public one.
    """
    return Hub(cache_dir, offline=offline, endpoint=endpoint, weights=MEDUSA_WEIGHTS)


def find_head(head: str, hub: Hub, revision: str | None = None) -> Path:
    """The folder with a head's config and weights; a tokenizer is not needed.

    Args:
        head: Local folder or hub id, tried in this order.
        hub: What `head_hub` returned.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelNotFound: There is no such head, or it is incomplete.
    """
    path = Path(head).expanduser()
    if path.is_dir():
        if missing := missing_weights(path, MEDUSA_WEIGHTS):
            raise ModelNotFound(f"the folder {path} lacks {', '.join(missing)}: it holds no complete head")
        return path
    if path.is_file():
        raise ModelNotFound(f"{path} is a file: give the folder that holds it and the head's config.json")
    if not is_hub_id(head):
        raise ModelNotFound(f"there is no folder {head!r} with a head (looked in {Path.cwd()})")
    if (folder := hub.cached(head, revision)) is not None:
        logger.info("%s: found in the hub's cache, %s", head, folder)
        return folder
    try:
        return hub.download(head, revision)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"there is no folder {head!r} with a head here, and as a hub id: {error}"
        ) from error
