"""From which revision a kind is watched, without an API server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import parse_qs, urlsplit

import pytest

from podwire.model.errors import PodwireError
from podwire.model.store import Compacted
from podwire.store.kubernetes.api.client import Client, Request
from podwire.store.kubernetes.api.refusals import Refused
from podwire.store.kubernetes.api.wire import EXPIRED, Status
from podwire.store.kubernetes.streams import Hub
from podwire.store.kubernetes.watch import KubernetesWatch
from podwire.store.loop import LoopThread
from tests.waiting import DEADLINE_S, wait_for

KIND = "networkpolicies"


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
