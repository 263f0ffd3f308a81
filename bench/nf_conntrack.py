"""What the kernel's own connection tracking does on one node: entries, losses, memory.

Entries and losses are those of the node's network namespace. The cache that entries are from (slab) and the hash table
that finds them are one for all namespaces of the machine.
"""

from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from bench.exchanges import read_in

LOSSES: Final = ("insert_failed", "drop", "early_drop")
"""`drop`: a packet of a new flow that found the table full. `early_drop`: an entry that made room for a newer one."""
POINTER_BYTES: Final = 8
_SETTINGS: Final = "/proc/sys/net/netfilter"


class Cache(NamedTuple):
    """The cache that entries are allocated from."""

    entry_bytes: int
    objects: int
    """Those that have memory, whether in use or ready to be used."""


def count_entries(namespace: str) -> int:
    """Count the entries of a node; 0 as well where nothing is tracked."""
    return _read_setting(namespace, "nf_conntrack_count")


def read_most(namespace: str) -> int:
    """Give how many entries a node may have."""
    return _read_setting(namespace, "nf_conntrack_max")


def table_bytes(namespace: str) -> int:
    """Give what the hash table takes, which is allocated when the machine starts."""
    return _read_setting(namespace, "nf_conntrack_buckets") * POINTER_BYTES


def read_losses(namespace: str) -> Counter[str]:
    """Give what was lost since the namespace was made."""
    return parse_losses(read_in(namespace, "/proc/net/stat/nf_conntrack"))


def parse_losses(text: str) -> Counter[str]:
    """Sum the rows of /proc/net/stat/nf_conntrack: one for each CPU, in hexadecimal."""
    names, *rows = (line.split() for line in text.splitlines())
    found: Counter[str] = Counter(dict.fromkeys(LOSSES, 0))
    for row in rows:
        for name, value in zip(names, row, strict=True):
            if name in LOSSES:
                found[name] += int(value, 16)
    return found


def read_cache() -> Cache:
    """Look at the machine's cache of entries."""
    return parse_cache(Path("/proc/slabinfo").read_text(encoding="ascii"))


def parse_cache(text: str) -> Cache:
    """Find the cache in /proc/slabinfo: name, objects in use, objects, bytes of each."""
    for line in text.splitlines():
        words = line.split()
        if words[0] == "nf_conntrack":
            return Cache(entry_bytes=int(words[3]), objects=int(words[2]))
    raise RuntimeError("/proc/slabinfo has no nf_conntrack: the kernel does not track flows")


def _read_setting(namespace: str, name: str) -> int:
    return int(read_in(namespace, f"{_SETTINGS}/{name}"))
