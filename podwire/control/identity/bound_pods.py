"""Pods that the API server has bound to this node: their identity is looked for before the runtime asks for them.

The watch of this node's pods notes them, and a thread of the identity duty numbers them. kubelet makes volumes and
cgroups first, so that an ADD most of the time finds the number there and needs no call to the store. Invariant: nothing
that fails here matters, because an ADD asks for what it does not find.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from podwire.control.identity.key import convert_ports
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.kubernetes.own_pods import OwnPods, PodName
from podwire.control.kubernetes.pod import PodFacts
from podwire.model.errors import PodwireError

_log = logging.getLogger(__name__)


@dataclass
class BoundPods:
    """The pods that were noted and not numbered yet. Safe to call from several threads."""

    resolver: IdentityResolver
    pods: OwnPods
    labels_at_add: Callable[[PodFacts], tuple[str, ...]]
    """Gives the labels that the ADD of a pod will bring."""
    noted: Callable[[], None] = lambda: None
    """Called when there is something to do."""
    _names: set[PodName] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, names: Iterable[PodName]) -> None:
        """Note pods that came or changed."""
        with self._lock:
            self._names.update(names)
        self.noted()

    def number(self) -> None:
        """Look for the identity of what was noted, and make what is missing. May wait for the store."""
        with self._lock:
            names, self._names = self._names, set()
        for name in sorted(names):
            pod = self.pods.find(*name)
            if pod is None or pod.host_network:
                continue
            labels = self.labels_at_add(pod)
            try:
                self.resolver.resolve(labels, convert_ports(pod.ports), pod.namespace, wait_s=0)
            except PodwireError as error:
                # Not the pod's failure: its ADD waits and tries again, and reports.
                told = {"pod": "/".join(name), "error": error.message}
                _log.debug("the identity of a bound pod waits for its ADD", extra=told)
