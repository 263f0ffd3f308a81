"""An agent that ends while its store stops answering: nobody waits, and what is kept on disk stays whole."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.store import ObjectKey, Revisions, Store, StoreEvent
from podwire.store.etcd import store as etcd
from podwire.store.etcd.store import EtcdStore
from podwire.store.kubernetes.api.access import Access
from podwire.store.kubernetes.store import KubernetesStore
from podwire.store.loop import LoopThread
from podwire.store.open import end_calls
from podwire.store.remembered import RememberedObjects
from tests.waiting import wait_for

KIND: Final = "networkpolicies"
DEADLINE_S: Final = 60.0
"""Longer than a test may take: what ends sooner was ended."""


class StubbornServer:
    """Answers lists of one policy and watches that bring nothing, until it answers nothing more. `asked`: paths."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.silent_after_page = False
        self.is_silent = False
        self._thread = LoopThread("stubborn")
        self._never = asyncio.Event()
        self.port = self._thread.run(self._open())

    def close(self) -> None:
        self._thread.run(self._runner.cleanup())
        self._thread.close()

    async def _open(self) -> int:
        server = web.Application()
        server.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(server, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        if self.is_silent or "continue" in request.query:
            await self._never.wait()
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await self._never.wait()
        return web.json_response(self._list())

    def _list(self) -> dict[str, Any]:
        name, revision, more = ("new", 9, "more") if self.silent_after_page else ("old", 7, "")
        policy = {
            "metadata": {
                "name": name,
                "namespace": "a",
                "uid": name,
                "resourceVersion": str(revision),
            }
        }
        return {"metadata": {"resourceVersion": str(revision), "continue": more}, "items": [policy]}


class Silent:
    """A listener that notes what it was handed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_lists(self, lists: Sequence[KindList]) -> None:
        self.names += [stored.key.name for kind_list in lists for stored in kind_list.objects]

    def on_events(self, _events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        pass

    def on_away(self, _error: PodwireError) -> None:
        pass

    def on_back(self) -> None:
        pass


@pytest.fixture
def server() -> Iterator[StubbornServer]:
    made = StubbornServer()
    yield made
    made.close()


@pytest.fixture
def store(server: StubbornServer) -> Iterator[KubernetesStore]:
    access = Access(f"http://127.0.0.1:{server.port}", "as nobody", is_insecure=True)
    with closing(KubernetesStore(access, deadline_s=DEADLINE_S)) as made:
        yield made


def open_etcd(server: StubbornServer) -> EtcdStore:
    server.is_silent = True
    return EtcdStore([f"127.0.0.1:{server.port}"], deadline_s=DEADLINE_S)


def open_kubernetes(server: StubbornServer) -> KubernetesStore:
    access = Access(f"http://127.0.0.1:{server.port}", "as nobody", is_insecure=True)
    made = KubernetesStore(access, deadline_s=DEADLINE_S)
    server.is_silent = True
    return made


@pytest.mark.parametrize("open_it", [open_etcd, open_kubernetes])
@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda store: store.get(ObjectKey(KIND, "a", "x")), id="get"),
        pytest.param(lambda store: store.list(KIND), id="list"),
        pytest.param(lambda store: store.watch({KIND: 7}).close(), id="watch"),
    ],
)
def test_whoever_waits_for_a_silent_store_is_let_go(
    server: StubbornServer,
    open_it: Callable[[StubbornServer], Store],
    ask: Callable[[Store], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd, "OPEN_S", 0.1)
    with closing(open_it(server)) as store, ThreadPoolExecutor(1) as threads:
        known = len(server.asked)
        waiting = threads.submit(ask, store)
        wait_for(lambda: len(server.asked) > known, "the request")
        end_calls(store)
        error = waiting.exception(DEADLINE_S / 2)
        assert error is None or isinstance(error, Unavailable)
        with pytest.raises(Unavailable, match="closed"):
            store.get(ObjectKey(KIND, "a", "x"))


def test_a_list_that_is_cut_off_leaves_what_was_kept_before(
    server: StubbornServer, store: KubernetesStore, tmp_path: Path
) -> None:
    path = tmp_path / "remembered.db"
    with closing(RememberedObjects(path, "kubernetes")) as memory:
        shared = SharedWatch(store, memory)
        first, second = (
            StoreFollower(name, store, (KIND,), Silent(), shared=shared) for name in "ab"
        )
        first.load()
        server.silent_after_page = True
        first.start()
        second.start()  # lacks lists: the first page comes, and nothing after it
        wait_for(lambda: any("continue" in path for path in server.asked), "the second page")
        threading.Timer(0.1, end_calls, (store,)).start()
        began_s = time.monotonic()
        first.stop()
        second.stop()
        assert time.monotonic() - began_s < DEADLINE_S / 2
    with closing(RememberedObjects(path, "kubernetes")) as memory:
        kept = memory.load(KIND)
    assert kept is not None
    assert [stored.key.name for stored in kept[0]] == ["old"]
    assert kept[1] == 7
