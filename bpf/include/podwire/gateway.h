/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* gateway.h: answer what a pod asks its gateway: ARP, neighbour solicitation, echo (rule 18).
 *
 * Nobody owns the gateway's addresses; each pod sees its own host device behind them. Answers go back to the asking pod
 * and nowhere else, so nothing a pod sends here can mislead another.
 */
#ifndef PODWIRE_GATEWAY_H
#define PODWIRE_GATEWAY_H

#include <podwire/icmp_error.h>

#define PW_ND_OPTION_TARGET_MAC 2
#define PW_ND_ROUTER		0x80
#define PW_ND_SOLICITED		0x40
#define PW_ND_OVERRIDE		0x20
#define PW_ND_HOP_LIMIT		255

/* `pad` aligns the headers behind the 14 bytes of Ethernet. */
struct pw_advertisement_frame {
	__u16 pad;
	struct ethhdr ethernet;
	union pw_ipv6_start ip;
	struct pw_advertisement advertisement;
};

/* ff02::1 */
static __always_inline void set_all_nodes(void *address)
{
	__u32 *words = address;

	words[0] = bpf_htonl(0xff020000);
	words[1] = 0;
	words[2] = 0;
	words[3] = bpf_htonl(1);
}

/* Is it a request of this pod for the gateway, or its probe whether somebody has that address (RFC 5227)? */
static __always_inline bool is_own_arp(const struct pw_config_value *row, const struct pw_arp *arp)
{
	__be32 sender, target;

	__builtin_memcpy(&sender, arp->sender_ip, 4);
	__builtin_memcpy(&target, arp->target_ip, 4);
	if (arp->hardware_be != bpf_htons(PW_ARP_ETHERNET) ||
	    arp->protocol_be != bpf_htons(ETH_P_IP) || arp->hardware_bytes != ETH_ALEN ||
	    arp->protocol_bytes != 4 || arp->operation_be != bpf_htons(PW_ARP_REQUEST))
		return false;
	return same_mac(arp->sender_mac, row->pod_mac) &&
	       (!sender || sender == *(const __be32 *)row->ipv4) &&
	       target == bpf_htonl(PW_GATEWAY_IPV4);
}

PW_CHECKED_ALONE int answer_arp(struct __sk_buff *skb, struct pw_flow *flow)
{
	__be32 gateway_be = bpf_htonl(PW_GATEWAY_IPV4);
	struct pw_arp arp __attribute__((aligned(8)));

	if (!flow || bpf_skb_load_bytes(skb, 0, &arp, sizeof(arp)))
		return PW_DROP_TRUNCATED;
	if (!is_own_arp(&flow->row, &arp))
		return PW_DROP_ARP;
	__builtin_memcpy(arp.destination_mac, flow->row.pod_mac, ETH_ALEN);
	__builtin_memcpy(arp.source_mac, flow->row.host_mac, ETH_ALEN);
	arp.operation_be = bpf_htons(PW_ARP_REPLY);
	__builtin_memcpy(arp.target_mac, arp.sender_mac, ETH_ALEN + 4);
	__builtin_memcpy(arp.sender_mac, flow->row.host_mac, ETH_ALEN);
	__builtin_memcpy(arp.sender_ip, &gateway_be, 4);
	if (bpf_skb_store_bytes(skb, 0, &arp, sizeof(arp), 0))
		return PW_DROP_INTERNAL;
	flow->action = PW_ACTION_ANSWER;
	return PW_DONE;
}

/* Writes the advertisement over the solicitation. A pod that asks from "::" is about to take the gateway's address as
 * its own; the answer to it goes to all nodes (RFC 4861 7.2.4).
 */
PW_CHECKED_ALONE int advertise_gateway(struct __sk_buff *skb, struct pw_flow *flow, bool probe)
{
	struct pw_advertisement_frame frame = {
		.advertisement.message.type = PW_ICMPV6_NEIGHBOUR_ADVERTISEMENT,
		.advertisement.message.flags =
			PW_ND_ROUTER | PW_ND_OVERRIDE | (probe ? 0 : PW_ND_SOLICITED),
		.advertisement.option_type = PW_ND_OPTION_TARGET_MAC,
		.advertisement.option_words = 1,
	};
	const __u32 bytes = sizeof(frame) - offsetof(struct pw_advertisement_frame, ip);
	__s64 sum;

	if (!flow)
		return PW_DROP_INTERNAL;
	address_to_pod(flow, &frame.ethernet);
	__builtin_memcpy(frame.advertisement.mac, flow->row.host_mac, ETH_ALEN);
	set_gateway_ipv6(frame.advertisement.message.target);
	set_gateway_ipv6(frame.ip.summed.saddr);
	copy_address(frame.ip.summed.daddr, flow->key.saddr);
	if (probe)
		set_all_nodes(frame.ip.summed.daddr);
	sum = sum_ipv6_start(&frame.ip, IPPROTO_ICMPV6, sizeof(frame.advertisement),
			     PW_ND_HOP_LIMIT);
	sum = sum_words(&frame.advertisement, sizeof(frame.advertisement), sum);
	frame.advertisement.message.checksum = fold_sum(sum);
	if (bpf_skb_change_tail(skb, pw_link_header_bytes + bytes, 0) ||
	    write_headers(skb, &frame.ethernet, &frame.ip, bytes))
		return PW_DROP_INTERNAL;
	flow->action = PW_ACTION_ANSWER;
	return PW_DONE;
}

/* Validity as in RFC 4861 7.1.1; fragmented neighbour discovery is refused (RFC 6980). */
static __always_inline bool is_valid_solicitation(struct __sk_buff *skb, const struct pw_flow *flow,
						  struct pw_neighbour *solicitation)
{
	return flow->ttl == PW_ND_HOP_LIMIT && !flow->icmp_code &&
	       !(flow->flags & PW_PACKET_FRAGMENT) &&
	       flow->transport_bytes >= sizeof(*solicitation) &&
	       !bpf_skb_load_bytes(skb, flow->transport_offset, solicitation,
				   sizeof(*solicitation));
}

/* Neighbour discovery ends here, to whatever address it goes. A pod that checks one of its own addresses for duplicates
 * needs silence, and one that looks for routers has its route already.
 */
PW_CHECKED_ALONE int answer_neighbour(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_neighbour solicitation;
	bool probe;

	if (!flow)
		return PW_DROP_INTERNAL;
	probe = is_unspecified(flow->key.saddr);
	if (flow->icmp_type == PW_ICMPV6_ROUTER_SOLICITATION)
		return PW_DROP_QUIET;
	if (flow->icmp_type != PW_ICMPV6_NEIGHBOUR_SOLICITATION ||
	    !is_valid_solicitation(skb, flow, &solicitation))
		return PW_DROP_NEIGHBOUR;
	if (!is_gateway_ipv6(solicitation.target))
		return probe ? PW_DROP_QUIET : PW_DROP_NEIGHBOUR;
	if (!probe && !has_address(&flow->row, flow->key.saddr) &&
	    !is_link_local_ipv6(flow->key.saddr))
		return PW_DROP_SOURCE_ADDRESS;
	return advertise_gateway(skb, flow, probe);
}

static __always_inline bool swap_addresses(struct __sk_buff *skb, const struct pw_flow *flow)
{
	__u32 at = pw_link_header_bytes + offsetof(struct ipv6hdr, saddr), bytes = 16, skipped = 0;

	if (flow->ethertype == ETH_P_IP) {
		at = pw_link_header_bytes + offsetof(struct iphdr, saddr);
		bytes = 4;
		skipped = 12; /* of the mapped form */
	}
	return !bpf_skb_store_bytes(skb, at, flow->key.daddr + skipped, bytes, 0) &&
	       !bpf_skb_store_bytes(skb, at + bytes, flow->key.saddr + skipped, bytes, 0);
}

/* Turns an echo request around. The checksum changes by the type alone: the addresses only swap places. */
PW_CHECKED_ALONE int answer_echo(struct __sk_buff *skb, struct pw_flow *flow)
{
	__u32 checksum_at;
	__u8 reply;
	struct ethhdr ethernet;

	if (!flow || !(flow->flags & PW_PACKET_ECHO_REQUEST) || flow->flags & PW_PACKET_FRAGMENT)
		return PW_DROP_GATEWAY;
	checksum_at = flow->transport_offset + offsetof(struct pw_icmp_header, checksum);
	reply = echo_reply_type(flow->key.protocol);
	address_to_pod(flow, &ethernet);
	if (bpf_l4_csum_replace(skb, checksum_at, bpf_htons(flow->icmp_type << 8),
				bpf_htons(reply << 8), 2) ||
	    bpf_skb_store_bytes(skb, flow->transport_offset, &reply, 1, 0) ||
	    bpf_skb_store_bytes(skb, 0, &ethernet, sizeof(ethernet), 0) ||
	    !swap_addresses(skb, flow))
		return PW_DROP_INTERNAL;
	flow->action = PW_ACTION_ANSWER;
	return PW_DONE;
}

#endif
