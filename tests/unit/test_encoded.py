"""Messages from templates are the bytes that encoding them anew gives, for whatever endpoint."""

import ipaddress
import random
from functools import partial

import pytest

from podwire.datapath import device, pod_net
from podwire.datapath.device import HostSide, Programs
from podwire.datapath.encoded import EncodedPlan, Plan
from podwire.datapath.routes import SourceAddresses
from podwire.kernel.netlink import encode_batch
from podwire.model.endpoint import AttachmentKey, Device, EndpointRecord, Phase
from podwire.model.ids import (
    ContainerId,
    EndpointId,
    IfIndex,
    InterfaceName,
    NetworkName,
    device_mac,
    host_device_name,
)

NODE = "node1"
SIDE = HostSide(
    NODE,
    Programs(11, 12, 101, 102),
    SourceAddresses(ipaddress.IPv4Address("192.0.2.10"), ipaddress.IPv6Address("fd99::a")),
)
PLANS: dict[str, Plan] = {
    "pair": device._plan_pair,
    "furnishing": partial(device._plan_furnishing, SIDE),
    "pod's end": pod_net._plan_set_up,
}


def make_record(chosen: random.Random, families: str) -> EndpointRecord:
    number = EndpointId(chosen.choice([1, 7, 42, 255, 4_294_967_295, chosen.randrange(1, 10**6)]))
    key = AttachmentKey(
        NetworkName("n"), ContainerId(f"{chosen.getrandbits(128):x}"), InterfaceName("eth0")
    )
    host_index = chosen.choice([0x01010101, 1 << 20, chosen.randrange(1 << 20, 1 << 31)])
    return EndpointRecord(
        id=number,
        key=key,
        phase=Phase.ADDING,
        boot_id="b",
        taken_boottime_ns=0,
        netns_path="/pod",
        netns_cookie=1,
        device=Device(
            kind="veth",
            host_name=host_device_name(key.container_id, key.if_name),
            host_ifindex=IfIndex(host_index),
            host_mac=device_mac(number, 1),
            pod_name=InterfaceName(chosen.choice(["eth0", "net1", "a-name-of-15-ch"])),
            pod_ifindex=IfIndex(host_index + 1),
            pod_mac=chosen.choice([device_mac(number, 0), "02:00:00:00:00:01"]),
            mtu=chosen.choice([1450, 1500, 9000]),
        ),
        ipv4=str(ipaddress.IPv4Address(chosen.getrandbits(32))) if "4" in families else "",
        ipv6=str(ipaddress.IPv6Address(chosen.getrandbits(128))) if "6" in families else "",
    )


@pytest.mark.parametrize("families", ["4", "6", "46"])
@pytest.mark.parametrize("name", PLANS)
def test_a_template_gives_the_bytes_of_its_plan(name: str, families: str) -> None:
    chosen = random.Random(f"{name} {families}")
    plan = PLANS[name]
    encoded = EncodedPlan(plan, NODE)
    for _ in range(60):
        record, descriptor = make_record(chosen, families), chosen.randrange(3, 1 << 20)
        batch = encoded.encode(record, descriptor)
        data, starts = encode_batch(plan(record, descriptor))
        assert (bytes(batch.data), batch.starts) == (data, starts)
        assert batch.requests() == plan(record, descriptor)
    assert all(encoded._templates.values()), "nothing was gained"
