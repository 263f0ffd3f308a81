/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* refuse.h: what asks for a service that nobody serves is refused at once: TCP by a reset from the service's address, a
 * datagram by an ICMP error from the gateway.
 */
#ifndef PODWIRE_REFUSE_H
#define PODWIRE_REFUSE_H

#include <podwire/icmp_error.h>

#define PW_RESET_TTL	 64
#define PW_RESET_WORDS	 0x50 /* five, in the upper half of the byte */
#define PW_TCP_RESET_ACK 0x14

struct pw_tcp_header {
	__be16 sport_be;
	__be16 dport_be;
	__be32 sequence_be;
	__be32 acknowledged_be;
	__u8 header_words;
	__u8 flags;
	__be16 window_be;
	__u16 checksum;
	__be16 urgent_be;
};

/* `pad` aligns the headers behind the 14 bytes of Ethernet. */
struct pw_resetv4 {
	__u16 pad;
	struct ethhdr ethernet;
	struct iphdr ip;
	struct pw_tcp_header tcp;
};

struct pw_resetv6 {
	__u16 pad;
	struct ethhdr ethernet;
	union pw_ipv6_start ip;
	struct pw_tcp_header tcp;
};

/* RFC 9293 3.10.7.1: acknowledges the SYN and what it carried. */
static __always_inline void fill_reset(const struct pw_flow *flow, struct pw_tcp_header *tcp)
{
	__u32 carried = flow->transport_bytes - flow->transport_header_bytes;

	tcp->sport_be = flow->key.dport_be;
	tcp->dport_be = flow->key.sport_be;
	tcp->acknowledged_be = bpf_htonl(flow->tcp_sequence + carried + 1);
	tcp->header_words = PW_RESET_WORDS;
	tcp->flags = PW_TCP_RESET_ACK;
}

static __always_inline int cut_to(struct __sk_buff *skb, __u32 network_bytes)
{
	return bpf_skb_change_tail(skb, pw_link_header_bytes + network_bytes, 0);
}

PW_CHECKED_ALONE int send_resetv4(struct __sk_buff *skb, struct pw_flow *flow)
{
	const __u32 bytes = sizeof(struct iphdr) + sizeof(struct pw_tcp_header);
	struct pw_resetv4 reset = {
		.ip.version = 4,
		.ip.ihl = 5,
		.ip.tot_len = bpf_htons(bytes),
		.ip.frag_off = bpf_htons(0x4000),
		.ip.ttl = PW_RESET_TTL,
		.ip.protocol = IPPROTO_TCP,
	};
	__s64 sum = bpf_htons(IPPROTO_TCP) + bpf_htons(sizeof(reset.tcp));

	if (!flow || cut_to(skb, bytes))
		return -1;
	address_to_pod(flow, &reset.ethernet);
	reset.ip.saddr = mapped_ipv4(flow->key.daddr);
	reset.ip.daddr = mapped_ipv4(flow->key.saddr);
	reset.ip.check = fold_sum(sum_words(&reset.ip, sizeof(reset.ip), 0));
	fill_reset(flow, &reset.tcp);
	sum = sum_words(&reset.ip.saddr, 8, sum);
	reset.tcp.checksum = fold_sum(sum_words(&reset.tcp, sizeof(reset.tcp), sum));
	return write_headers(skb, &reset.ethernet, &reset.ip, bytes);
}

PW_CHECKED_ALONE int send_resetv6(struct __sk_buff *skb, struct pw_flow *flow)
{
	const __u32 bytes = sizeof(struct ipv6hdr) + sizeof(struct pw_tcp_header);
	struct pw_resetv6 reset = {};
	__s64 sum;

	if (!flow || cut_to(skb, bytes))
		return -1;
	address_to_pod(flow, &reset.ethernet);
	copy_address(reset.ip.summed.saddr, flow->key.daddr);
	copy_address(reset.ip.summed.daddr, flow->key.saddr);
	fill_reset(flow, &reset.tcp);
	sum = sum_ipv6_start(&reset.ip, IPPROTO_TCP, sizeof(reset.tcp), PW_RESET_TTL);
	reset.tcp.checksum = fold_sum(sum_words(&reset.tcp, sizeof(reset.tcp), sum));
	return write_headers(skb, &reset.ethernet, &reset.ip, bytes);
}

static __always_inline void refuse(struct __sk_buff *skb, struct pw_flow *flow)
{
	int failure;

	if (flow->key.protocol != IPPROTO_TCP) {
		complain(skb, flow, PW_SAY_NO_PORT, PW_SAY_NO_PORT_V6, 0);
		return;
	}
	failure = flow->ethertype == ETH_P_IP ? send_resetv4(skb, flow) : send_resetv6(skb, flow);
	if (!failure)
		flow->action = PW_ACTION_ANSWER;
}

#endif
