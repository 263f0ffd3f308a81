"""Open the agent's one watch of the store, with the file of what the store said last.

Called by `agent.node`. Decides how objects are decoded, where those that cannot be read are named, and which of them
are left to this node's own publisher.
"""

import logging
from contextlib import ExitStack
from functools import partial

from podwire.agent.duties.cluster.duty import is_published_by
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.unreadable import Reading
from podwire.agent.health import Health
from podwire.control.documents.damage import read_object, stand_in
from podwire.model.config import AgentConfig
from podwire.model.errors import StorageFailure
from podwire.model.right_of_way import RightOfWay
from podwire.model.store import Store
from podwire.store.remembered import FILE_NAME, RememberedObjects

_log = logging.getLogger(__name__)


def open_watch(
    config: AgentConfig, store: Store, health: Health, stack: ExitStack, way: RightOfWay
) -> SharedWatch:
    """Make the watch; nothing is listed before somebody joins it. `stack` closes the file."""
    is_own = partial(is_published_by, config.node.node_name)
    reading = Reading(read_object, stand_in, health.warn, is_own)
    return SharedWatch(store, _open_memory(config, stack), reading=reading, way=way)


def _open_memory(config: AgentConfig, stack: ExitStack) -> RememberedObjects | None:
    """Open what the store said last; None when that cannot be: it is needed only while the store is away."""
    try:
        path = config.files.state_dir / FILE_NAME
        return stack.enter_context(RememberedObjects(path, config.store.store))
    except StorageFailure as error:
        _log.warning("a start without the store would not work", extra={"error": error.message})
        return None
