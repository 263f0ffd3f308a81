/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* frame.h: the first look at a frame, and which addresses it may have. */
#ifndef PODWIRE_FRAME_H
#define PODWIRE_FRAME_H

#include <podwire/endpoint.h>
#include <podwire/gateway.h>
#include <podwire/parse.h>

#define PW_IPV4_LOOPBACK 0x7f000000

static __always_inline bool is_multicast(const void *address)
{
	if (is_mapped_ipv4(address))
		return bpf_ntohl(mapped_ipv4(address)) >= 0xe0000000; /* 224/3: and broadcast */
	return *(const __u8 *)address == 0xff;
}

/* Addresses that nothing on a wire may be sent to: this network, loopback, link-local IPv6 (the gateway's has been
 * answered before). 127/8 matters most: a node with route_localnet would deliver it to its own services.
 */
static __always_inline bool is_unroutable(const void *address)
{
	const __u32 *words = address;
	__u32 network;

	if (!is_mapped_ipv4(address))
		return is_link_local_ipv6(address) ||
		       (!words[0] && !words[1] && !words[2] && bpf_ntohl(words[3]) <= 1);
	network = bpf_ntohl(mapped_ipv4(address)) & 0xff000000;
	return !network || network == PW_IPV4_LOOPBACK;
}

/* Sets what the tuple and the events need of the endpoint, and reads the ethertype. */
static __always_inline int open_frame(struct __sk_buff *skb, struct pw_flow *flow, __u8 direction)
{
	const struct ethhdr *ethernet = (const void *)(long)skb->data;

	flow->instance = flow->row.instance;
	flow->direction = direction;
	flow->key.instance = flow->row.instance;
	flow->key.direction = direction;
	if ((void *)(ethernet + 1) > (void *)(long)skb->data_end)
		return PW_DROP_TRUNCATED;
	flow->ethertype = bpf_ntohs(ethernet->h_proto);
	/* a tag is either still in the frame or already beside it */
	return skb->vlan_present ? PW_DROP_ETHERTYPE : 0;
}

static __always_inline bool is_ip(const struct pw_flow *flow)
{
	return flow->ethertype == ETH_P_IP || flow->ethertype == ETH_P_IPV6;
}

/* A frame of a pod: from its own MAC. Only the gateway's MAC is a destination, which matters later: what is meant for
 * all has a quieter reason.
 */
static __always_inline int check_frame_of_pod(struct __sk_buff *skb, struct pw_flow *flow)
{
	const struct ethhdr *ethernet = (const void *)(long)skb->data;

	if ((void *)(ethernet + 1) > (void *)(long)skb->data_end)
		return PW_DROP_TRUNCATED;
	if (!same_mac(ethernet->h_source, flow->row.pod_mac))
		return PW_DROP_SOURCE_MAC;
	if (!same_mac(ethernet->h_dest, flow->row.host_mac))
		flow->flags |= PW_PACKET_FOREIGN_MAC;
	if (flow->ethertype == ETH_P_ARP)
		return answer_arp(skb, flow);
	return is_ip(flow) ? 0 : PW_DROP_ETHERTYPE;
}

/* A frame that the stack or the tunnel hands over. */
static __always_inline int check_frame_to_pod(const struct pw_flow *flow)
{
	if (flow->ethertype == ETH_P_ARP)
		return PW_DROP_ARP;
	return is_ip(flow) ? 0 : PW_DROP_ETHERTYPE;
}

static __always_inline bool is_neighbour_discovery(const struct pw_flow *flow)
{
	return flow->key.protocol == IPPROTO_ICMPV6 &&
	       flow->icmp_type >= PW_ICMPV6_ROUTER_SOLICITATION &&
	       flow->icmp_type <= PW_ICMPV6_REDIRECT;
}

/* A packet of a pod: from its own address, to somewhere it can be sent. Answers what is for the gateway. */
static __always_inline int check_packet_of_pod(struct __sk_buff *skb, struct pw_flow *flow)
{
	bool own = has_address(&flow->row, flow->key.saddr);

	if (is_neighbour_discovery(flow))
		return answer_neighbour(skb, flow);
	if (is_multicast(flow->key.daddr))
		return PW_DROP_QUIET;
	if (flow->flags & PW_PACKET_FOREIGN_MAC)
		return PW_DROP_DESTINATION_MAC;
	if (is_gateway(flow->key.daddr)) {
		if (!own && !is_link_local_ipv6(flow->key.saddr))
			return PW_DROP_SOURCE_ADDRESS;
		return answer_echo(skb, flow);
	}
	if (!own)
		return PW_DROP_SOURCE_ADDRESS;
	return is_unroutable(flow->key.daddr) ? PW_DROP_DESTINATION : 0;
}

/* A packet for a pod: to its own address, and no neighbour discovery: the host has permanent neighbours. */
static __always_inline int check_packet_to_pod(const struct pw_flow *flow)
{
	if (is_multicast(flow->key.daddr))
		return PW_DROP_QUIET;
	if (is_neighbour_discovery(flow))
		return PW_DROP_NEIGHBOUR;
	return has_address(&flow->row, flow->key.daddr) ? 0 : PW_DROP_NO_POD;
}

#endif
