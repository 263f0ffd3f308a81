"""One etcd as the back end sees it: checked, asked from any thread, and read as a whole range at one revision.

Shared by the store, its watches and its leases. Must never touch a store of a newer format. Invariant: before anything
is read or written after a failure, the format is checked again, because another etcd may answer by then.
"""

from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

import msgspec

from podwire.model.errors import NewerData, PodwireError, StorageFailure
from podwire.store.etcd import wire
from podwire.store.etcd.access import StoreAccess
from podwire.store.etcd.gateway import Gateway, Refused
from podwire.store.etcd.keys import FORMAT, FORMAT_KEY
from podwire.store.etcd.wire import Body, KeyValue, RangeAnswer, TxnAnswer
from podwire.store.loop import LoopThread

PAGE: Final = 500

_T = TypeVar("_T")


class Cluster:
    """Asks etcd. `create` false: a cluster that holds nothing of ours is a StorageFailure."""

    def __init__(
        self, endpoints: tuple[str, ...], access: StoreAccess, *, deadline_s: float, create: bool
    ) -> None:
        self.thread = LoopThread("etcd")
        self.gateway = Gateway(endpoints, access, deadline_s)
        self._create = create
        self._checked_at = -1

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait on another thread for one of the coroutines below."""
        return self.thread.run(work)

    def close(self) -> None:
        """Close the connections, and end what runs."""
        try:
            self.thread.run(self.gateway.close(), is_last=True)
        except PodwireError:
            return
        self.thread.close()

    async def check(self) -> None:
        """See to it that what answers holds our format. NewerData, StorageFailure, and what `call` raises."""
        # Read before asking: a failure during the check must cause another one.
        failures = self.gateway.failures
        # One comparison while nothing fails: the check costs a request only after a failure.
        if self._checked_at == failures:
            return
        pairs = (await self.call("kv/range", {"key": FORMAT_KEY}, RangeAnswer)).kvs
        if not pairs:
            pairs = await self._begin()
        _check_format(pairs, self.gateway.where)
        self._checked_at = failures

    async def transact(
        self, compare: Sequence[Body], success: Sequence[Body], failure: Sequence[Body] = ()
    ) -> tuple[TxnAnswer, bool]:
        """Do one transaction; gives its answer, and whether it may have been done before, unheard."""
        await self.check()
        body = {"compare": compare, "success": success, "failure": failure}
        try:
            return await self.gateway.call("kv/txn", body, TxnAnswer)
        except Refused as error:
            raise self.gateway.refuse(error) from None

    async def read(self, key: bytes) -> tuple[KeyValue | None, int]:
        """Read one key, and the revision that it was read at."""
        await self.check()
        answer = await self.call("kv/range", {"key": key}, RangeAnswer)
        return (answer.kvs[0] if answer.kvs else None), answer.header.revision

    async def read_range(self, first: bytes, end: bytes) -> tuple[list[KeyValue], int]:
        """Read all keys of a range at one revision, in pages."""
        await self.check()
        while True:
            try:
                return await self._read_pages(first, end)
            except Refused as error:
                if error.code != wire.OUT_OF_RANGE:
                    raise self.gateway.refuse(error) from None
                # Compacted between two pages: begin again with what is there now.

    async def call(self, path: str, body: Body, answer: type[_T]) -> _T:
        """Ask, whatever is there: only for what needs no format."""
        try:
            return (await self.gateway.call(path, body, answer))[0]
        except Refused as error:
            raise self.gateway.refuse(error) from None

    async def _read_pages(self, first: bytes, end: bytes) -> tuple[list[KeyValue], int]:
        pairs: list[KeyValue] = []
        revision = 0
        while True:
            # Revision 0 means "now". All later pages ask for the revision of the first, so the list is of one moment.
            body = {"key": first, "range_end": end, "limit": PAGE, "revision": revision}
            page, _ = await self.gateway.call("kv/range", body, RangeAnswer)
            revision = revision or page.header.revision
            pairs += page.kvs
            if not page.more:
                return pairs, revision
            # The smallest key behind the last one.
            first = page.kvs[-1].key + b"\0"

    async def _begin(self) -> Sequence[KeyValue]:
        if not self._create:
            raise StorageFailure(
                f"open store etcd at {self.gateway.where}: it holds nothing of podwire",
                hint="podwire apply begins one; are these the right endpoints?",
            )
        body = {
            # Two agents may begin an empty etcd at the same moment: one writes the key, the other reads it.
            "compare": [wire.equal(FORMAT_KEY, 0)],
            "success": [wire.put(FORMAT_KEY, str(FORMAT).encode()), wire.read(FORMAT_KEY)],
            "failure": [wire.read(FORMAT_KEY)],
        }
        done = await self.call("kv/txn", body, TxnAnswer)
        return [pair for pair in done.values() if pair is not None]


def _check_format(pairs: Sequence[KeyValue], where: str) -> None:
    try:
        number = msgspec.json.decode(pairs[0].value, type=int)
    except msgspec.MsgspecError:
        raise StorageFailure(
            f"open store etcd at {where}: key {FORMAT_KEY.decode()} is {pairs[0].value[:40]!r},"
            " no number",
            hint="another program uses these keys: give podwire an etcd of its own",
        ) from None
    if number > FORMAT:
        raise NewerData(
            f"open store etcd at {where}: its format is {number}, this podwire knows up to {FORMAT}",
            hint="run the newer podwire that wrote it; nothing was touched",
        )
