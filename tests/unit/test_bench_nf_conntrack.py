"""What the kernel says about its connection tracking, as the benchmark reads it."""

import pytest

from bench.nf_conntrack import Cache, parse_cache, parse_losses

STATISTICS = """\
entries  clashres found new invalid ignore delete chainlength insert insert_failed drop early_drop icmp_error
00000020  00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 0000000a 00000001 000000ff 00000007
00000020  00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 00000006 00000002 00000001 00000007
"""
CACHES = """\
slabinfo - version: 2.1
# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit>
nf_conntrack_expect      0      3    212   18    1 : tunables    0    0    0 : slabdata      0      0      0
nf_conntrack         144    208    256   16    1 : tunables    0    0    0 : slabdata     13     13      0
"""


def test_losses_of_all_cpus_are_summed() -> None:
    assert parse_losses(STATISTICS) == {"insert_failed": 16, "drop": 3, "early_drop": 256}


def test_the_cache_counts_what_is_ready_as_well() -> None:
    assert parse_cache(CACHES) == Cache(entry_bytes=256, objects=208)


def test_a_kernel_without_tracking_is_named() -> None:
    with pytest.raises(RuntimeError, match="nf_conntrack"):
        parse_cache(CACHES.replace("nf_conntrack ", "other "))
