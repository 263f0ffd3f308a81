"""From which revision a kind is watched, without an API server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import parse_qs, urlsplit

import pytest

from podwire.model.errors import PodwireError, Unavailable
from podwire.model.store import Compacted
from podwire.store.kubernetes import definitions
from podwire.store.kubernetes.api.client import Client, Request
from podwire.store.kubernetes.api.refusals import NOT_FOUND, Refused
from podwire.store.kubernetes.api.wire import EXPIRED, Status
from podwire.store.kubernetes.streams import Hub
from podwire.store.kubernetes.watch import KubernetesWatch
from podwire.store.loop import LoopThread
from tests.waiting import DEADLINE_S, wait_for

KIND = "networkpolicies"
OPTIONAL_KIND = "ciliumnetworkpolicies"


class ForgetfulClient:
    """Knows no revision before `oldest`; notes from which it was asked."""

    def __init__(self, oldest: int) -> None:
        self.oldest = oldest
        self.asked: list[int] = []

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        revision = int(parse_qs(urlsplit(request.path).query)["resourceVersion"][0])
        self.asked.append(revision)
        if revision < self.oldest:
            raise Refused(request.intent, Status(code=EXPIRED, message="too old"))
        yield _silence()

    def explain(self, refused: Refused) -> PodwireError:
        return PodwireError(str(refused))


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.sleep(3600)
    yield b""


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread("streams")
    yield made
    made.close()


def test_a_forgotten_kind_is_watched_from_the_new_list_on_while_the_former_watch_is_open(
    thread: LoopThread,
) -> None:
    client = ForgetfulClient(oldest=400)
    hub = Hub(thread, cast("Client", client), {})
    hub.note(KIND, 500)  # the server has named it: no doubt whether it is the same one
    former = KubernetesWatch({KIND: 7}, hub.detach)
    hub.attach(former, {KIND: 7})
    with pytest.raises(Compacted):
        former.next(DEADLINE_S)
    listed = KubernetesWatch({KIND: 500}, hub.detach)
    hub.attach(listed, {KIND: 500})
    wait_for(lambda: 500 in client.asked, "the second watch")
    former.close()
    assert client.asked == [7, 500]
    listed.close()


class ClientWithoutDefinition:
    """Does not know the resource that it is asked for; answers nothing while it `is_away`."""

    def __init__(self) -> None:
        self.is_away = False
        self.asked = 0

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        await self.call(request)
        yield _silence()

    async def call(self, request: Request) -> bytes:
        self.asked += 1
        if self.is_away:
            raise Unavailable("away")
        raise Refused(request.intent, Status(code=NOT_FOUND, message="not found"))

    def explain(self, refused: Refused) -> PodwireError:
        return PodwireError(str(refused))


def test_a_kind_without_definition_can_be_followed_again_after_an_outage(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_S", "LOOK_UNWATCHED_S"):
        monkeypatch.setattr(definitions, name, 0.02)
    client = ClientWithoutDefinition()
    hub = Hub(thread, cast("Client", client), {})
    with KubernetesWatch({OPTIONAL_KIND: 0}, hub.detach) as watch:
        hub.attach(watch, {OPTIONAL_KIND: 0})
        watch.wait_until_open(DEADLINE_S)
        assert watch.next(0) == ()
        client.is_away = True
        wait_for(lambda: not follows(watch), "the failure")
        client.is_away = False
        wait_for(lambda: follows(watch), "its end")
    assert client.asked > 2


def follows(watch: KubernetesWatch) -> bool:
    try:
        watch.next(0)
    except Unavailable:
        return False
    return True
