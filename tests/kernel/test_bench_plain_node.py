"""The plain node of the benchmark of short flows tracks each flow that it forwards, and goes without a trace."""

from pathlib import Path

from bench import nf_conntrack
from bench.contestants import compile_c
from bench.exchanges import Town, read_outcome
from bench.plain_nodes import plain_node
from podwire.kernel import netns
from tests.kernel.conftest import Namespace, pings

LAB = "plaintrack"
NAMESPACES = Path("/run/netns")
PER_S, SECONDS = 50, 2


def test_each_flow_has_an_entry(tmp_path: Path) -> None:
    tool = compile_c("exchanges", tmp_path)
    with plain_node(LAB, 3) as (node, pods):
        for namespace, _ in pods[1:]:
            # A new device drops what it gets until the kernel has acted on its carrier, and nothing is asked twice.
            with netns.open_namespace(netns.named_path(namespace)) as fd:
                assert pings(Namespace(namespace, fd), pods[0][1])
        town = Town([namespace for namespace, _ in pods[1:]], pods[:1])
        rates = {"udp_per_s": PER_S, "tcp_per_s": PER_S}
        with town.start(tool, seconds=SECONDS, at_most_s=120, **rates) as running:
            found = read_outcome(running)
        assert [found[name]["answered"] for name in ("udp", "tcp")] == [PER_S * SECONDS] * 2
        # Entries of connections that are over stay for two minutes, those of single answers for half of one.
        assert nf_conntrack.count_entries(node.namespace) >= PER_S * SECONDS
        assert nf_conntrack.read_most(node.namespace) > 2 * PER_S * SECONDS
        assert nf_conntrack.read_cache().objects >= PER_S * SECONDS
        assert not nf_conntrack.read_losses(node.namespace).total()
    assert not list(NAMESPACES.glob(f"pw.{LAB}.*"))
