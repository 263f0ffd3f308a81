/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* icmp_error.h: turn a packet of the pod into the ICMP error about it, from the gateway, and send it back.
 *
 * The error quotes the packet as the pod sent it, as much of it as fits the size that every path carries. None is sent
 * about an ICMP error or about a later IPv4 fragment (RFC 1122 3.2.2); multicast never gets here.
 */
#ifndef PODWIRE_ICMP_ERROR_H
#define PODWIRE_ICMP_ERROR_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <podwire/checksum.h>
#include <podwire/gateway_address.h>
#include <podwire/icmp.h>

#define PW_ICMPV4_ERROR_BYTES 576  /* RFC 1812 4.3.2.3 */
#define PW_ICMPV6_ERROR_BYTES 1280 /* RFC 4443 2.4 (c) */
#define PW_ICMP_ERROR_TTL     64
#define PW_PRECEDENCE_CONTROL 0xc0 /* RFC 1812 4.3.2.5 */

/* `pad` aligns the headers behind the 14 bytes of Ethernet. */
struct pw_icmpv4_error {
	__u16 pad;
	struct ethhdr ethernet;
	struct iphdr ip;
	struct pw_icmp_header icmp;
};

struct pw_icmpv6_error {
	__u16 pad;
	struct ethhdr ethernet;
	union pw_ipv6_start ip;
	struct pw_icmp_header icmp;
};

/* What an error says, in both families' numbers: type in the upper byte, code in the lower one. */
enum pw_complaint {
	PW_SAY_TOO_BIG = PW_ICMPV4_UNREACHABLE << 8 | PW_ICMPV4_FRAGMENTATION_NEEDED,
	PW_SAY_TOO_BIG_V6 = PW_ICMPV6_PACKET_TOO_BIG << 8,
	PW_SAY_NOBODY = PW_ICMPV4_UNREACHABLE << 8 | PW_ICMPV4_HOST_UNREACHABLE,
	PW_SAY_NOBODY_V6 = PW_ICMPV6_UNREACHABLE << 8 | PW_ICMPV6_ADDRESS_UNREACHABLE,
	PW_SAY_NO_PORT = PW_ICMPV4_UNREACHABLE << 8 | PW_ICMPV4_PORT_UNREACHABLE,
	PW_SAY_NO_PORT_V6 = PW_ICMPV6_UNREACHABLE << 8 | PW_ICMPV6_PORT_UNREACHABLE,
	PW_SAY_EXPIRED = PW_ICMPV4_TIME_EXCEEDED << 8,
	PW_SAY_EXPIRED_V6 = PW_ICMPV6_TIME_EXCEEDED << 8,
};

static __always_inline void address_to_pod(const struct pw_flow *flow, struct ethhdr *ethernet)
{
	__builtin_memcpy(ethernet->h_dest, flow->row.pod_mac, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, flow->row.host_mac, ETH_ALEN);
	ethernet->h_proto = bpf_htons(flow->ethertype);
}

/* Cuts the packet to what is quoted and makes room for `bytes` of new headers in front. Ends any offload. */
static __always_inline bool make_room(struct __sk_buff *skb, __u32 quoted_bytes, __u32 bytes)
{
	return !bpf_skb_change_tail(skb, pw_link_header_bytes + quoted_bytes, 0) &&
	       !bpf_skb_adjust_room(skb, bytes, BPF_ADJ_ROOM_MAC, 0);
}

/* Link header and, where that ends, `bytes` of network headers. */
static __always_inline int write_headers(struct __sk_buff *skb, const struct ethhdr *ethernet,
					 const void *network, __u32 bytes)
{
	return bpf_skb_store_bytes(skb, 0, ethernet, ETH_HLEN, 0)
		       ?: bpf_skb_store_bytes(skb, pw_link_header_bytes, network, bytes, 0);
}

static __always_inline __u32 quoted_bytes(const struct pw_flow *flow, __u32 room)
{
	return flow->packet_bytes < room ? flow->packet_bytes : room;
}

PW_CHECKED_ALONE int send_icmpv4_error(struct __sk_buff *skb, struct pw_flow *flow, __u32 type_code,
				       __u32 mtu)
{
	const __u32 bytes = sizeof(struct iphdr) + sizeof(struct pw_icmp_header);
	struct pw_icmpv4_error error = {
		.ip.version = 4,
		.ip.ihl = 5,
		.ip.tos = PW_PRECEDENCE_CONTROL,
		.ip.ttl = PW_ICMP_ERROR_TTL,
		.ip.protocol = IPPROTO_ICMP,
		.ip.saddr = bpf_htonl(PW_GATEWAY_IPV4),
		.icmp.type = type_code >> 8,
		.icmp.code = type_code,
		.icmp.mtu_be = bpf_htonl(mtu),
	};
	__u32 quoted;

	if (!flow)
		return -1;
	quoted = quoted_bytes(flow, PW_ICMPV4_ERROR_BYTES - bytes);
	if (!make_room(skb, quoted, bytes))
		return -1;
	address_to_pod(flow, &error.ethernet);
	error.ip.daddr = mapped_ipv4(flow->key.saddr);
	error.ip.tot_len = bpf_htons(bytes + quoted);
	error.ip.check = fold_sum(sum_words(&error.ip, sizeof(error.ip), 0));
	error.icmp.checksum = fold_sum(sum_frame(skb, pw_link_header_bytes + bytes, quoted,
						 sum_words(&error.icmp, sizeof(error.icmp), 0)));
	return write_headers(skb, &error.ethernet, &error.ip, bytes);
}

PW_CHECKED_ALONE int send_icmpv6_error(struct __sk_buff *skb, struct pw_flow *flow, __u32 type_code,
				       __u32 mtu)
{
	const __u32 bytes = sizeof(struct ipv6hdr) + sizeof(struct pw_icmp_header);
	struct pw_icmpv6_error error = {
		.icmp.type = type_code >> 8,
		.icmp.code = type_code,
		.icmp.mtu_be = bpf_htonl(mtu),
	};
	__u32 quoted;
	__s64 sum;

	if (!flow)
		return -1;
	quoted = quoted_bytes(flow, PW_ICMPV6_ERROR_BYTES - bytes);
	if (!make_room(skb, quoted, bytes))
		return -1;
	address_to_pod(flow, &error.ethernet);
	set_gateway_ipv6(error.ip.summed.saddr);
	copy_address(error.ip.summed.daddr, flow->key.saddr);
	sum = sum_ipv6_start(&error.ip, IPPROTO_ICMPV6, sizeof(error.icmp) + quoted,
			     PW_ICMP_ERROR_TTL);
	sum = sum_words(&error.icmp, sizeof(error.icmp), sum);
	error.icmp.checksum = fold_sum(sum_frame(skb, pw_link_header_bytes + bytes, quoted, sum));
	return write_headers(skb, &error.ethernet, &error.ip, bytes);
}

/* Answers with an error where one may be sent; what the answer is about is dropped in any case. */
static __always_inline void complain(struct __sk_buff *skb, struct pw_flow *flow,
				     enum pw_complaint ipv4_says, enum pw_complaint ipv6_says,
				     __u32 mtu)
{
	bool four = flow->ethertype == ETH_P_IP;
	__u16 silent = PW_PACKET_ICMP_ERROR | (four ? PW_PACKET_LATER_FRAGMENT : 0);
	int failure;

	if (flow->flags & silent)
		return;
	failure = four ? send_icmpv4_error(skb, flow, ipv4_says, mtu)
		       : send_icmpv6_error(skb, flow, ipv6_says, mtu);
	if (!failure)
		flow->action = PW_ACTION_ANSWER;
}

#endif
