"""Pods without an agent: a record, and what ADD and DEL do with it, step by step on a datapath."""

from typing import Final

from podwire.model.endpoint import AttachmentKey, EndpointRecord, Phase
from podwire.model.ids import (
    ContainerId,
    EndpointId,
    InterfaceName,
    NetworkName,
    host_device_name,
)
from podwire.model.interfaces import Datapath, EndpointConfig, PodNamespace

OPEN: Final = EndpointConfig(policy_revision=1)


def make_record(
    datapath: Datapath,
    number: int,
    namespace: PodNamespace,
    *,
    ipv4: str = "10.77.0.{}",
    ipv6: str = "fd77::{:x}",
) -> EndpointRecord:
    """Give the record of a pod; `number` is put into the addresses."""
    key = AttachmentKey(NetworkName("net"), ContainerId(f"c{number}"), InterfaceName("eth0"))
    return EndpointRecord(
        id=EndpointId(number),
        key=key,
        phase=Phase.ADDING,
        boot_id="boot",
        taken_boottime_ns=1,
        netns_path=namespace.path,
        netns_cookie=namespace.cookie,
        device=datapath.plan_device(
            EndpointId(number),
            host_device_name(key.container_id, key.if_name),
            key.if_name,
            mtu=0,
            pod_mac="",
        ),
        ipv4=ipv4.format(number),
        ipv6=ipv6.format(number),
    )


def attach(
    datapath: Datapath,
    record: EndpointRecord,
    namespace: PodNamespace,
    config: EndpointConfig = OPEN,
) -> None:
    """Connect a pod as ADD does."""
    datapath.create_guard(record)
    datapath.create_device(record, namespace)
    datapath.configure_pod(record, namespace)
    datapath.open_endpoint(record, config)


def detach(datapath: Datapath, record: EndpointRecord) -> None:
    """Disconnect a pod as DEL does."""
    datapath.close_endpoint(record)
    datapath.remove_routes(record)
    datapath.condemn_device(record)
