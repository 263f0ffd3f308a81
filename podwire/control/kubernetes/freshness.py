"""What the ADD of each own pod still waits for: policies and namespaces that were written before its pod was seen.

A watch may lag behind, and a policy that was written just before its pod must hold from the first packet on. So when
own pods are seen, the newest revision of each kind is asked for, once for all pods of that moment, and their ADDs wait
until the watch has brought what is so new. Filled by `agent.duties.kubernetes.freshness`, asked by `own_pods`. Pure:
asks nobody, waits for nothing. Invariant: an answer counts for the pods alone that were seen before its question.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from podwire.model.store import Revisions


@dataclass
class Freshness:
    """Which pods wait for what. `news` guards all, and is notified when pods wait for less."""

    news: threading.Condition
    is_asking: bool = False
    """Whether anybody asks for revisions; nothing waits otherwise."""
    seen: Callable[[], None] = lambda: None
    """Called when there is something to ask; must be quick."""
    _round: int = 1
    """Of the next question: pods that are seen now wait for its answer, or a later one's."""
    _unanswered: dict[str, int] = field(default_factory=dict)
    """By UID: the first question whose answer counts for the pod."""
    _wanted: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """By UID: up to which revision of each kind the pod's ADD has to wait."""
    _reached: dict[str, int] = field(default_factory=dict)

    def see(self, uids: Collection[str]) -> None:
        """Have the ADDs of pods wait for the next answer."""
        if not self.is_asking or not uids:
            return
        with self.news:
            self._unanswered.update(dict.fromkeys(uids, self._round))
        self.seen()

    def keep(self, uids: Collection[str]) -> None:
        """Forget all other pods."""
        with self.news:
            for waiting in (self._unanswered, self._wanted):
                for gone in waiting.keys() - uids:
                    del waiting[gone]

    def begin(self) -> tuple[int, list[str]] | None:
        """Begin a question: gives its number and the kinds that it is about; None when no pod waits for one."""
        with self.news:
            if not self._unanswered:
                return None
            self._round += 1
            # What the server does not know at all (CRDs of Cilium) is at no revision.
            return self._round - 1, [kind for kind, at in self._reached.items() if at]

    def answer(self, number: int, newest: Revisions) -> None:
        """Take the newest revision of each kind. Without any (nobody answers) pods wait for nothing more."""
        with self.news:
            wanted = {kind: at for kind, at in newest.items() if at > self._reached.get(kind, 0)}
            for uid in [uid for uid, first in self._unanswered.items() if first <= number]:
                del self._unanswered[uid]
                if wanted:
                    self._wanted[uid] = wanted
            self.news.notify_all()

    def reach(self, revisions: Revisions) -> None:
        """Note that everything up to these revisions was taken in: whoever is attached from now on meets it."""
        with self.news:
            for kind, at in revisions.items():
                self._reached[kind] = max(self._reached.get(kind, 0), at)
            done = [uid for uid, wanted in self._wanted.items() if self._has_reached(wanted)]
            for uid in done:
                del self._wanted[uid]
            if done:
                self.news.notify_all()

    def is_fresh(self, uid: str) -> bool:
        """Tell whether the pod's ADD has nothing to wait for."""
        with self.news:
            return uid not in self._unanswered and uid not in self._wanted

    def _has_reached(self, wanted: Mapping[str, int]) -> bool:
        return all(self._reached.get(kind, 0) >= at for kind, at in wanted.items())
