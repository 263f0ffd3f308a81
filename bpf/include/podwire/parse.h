/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* parse.h: from a frame to its tuple. Reads the packet, changes nothing, trusts no length it has not compared. */
#ifndef PODWIRE_PARSE_H
#define PODWIRE_PARSE_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <podwire/fragments.h>

#define PW_IPV4_DONT_FRAGMENT  0x4000
#define PW_IPV4_MORE_FRAGMENTS 0x2000
#define PW_IPV4_OFFSET	       0x1fff
#define PW_IPV6_OFFSET	       0xfff8
#define PW_IPV6_MORE_FRAGMENTS 0x0001
#define PW_IPV6_HEADERS_MAX    8
#define PW_JUMBO_BYTES	       8
#define PW_NEAR_OFFSETS	       256 /* of headers without long extensions in front */
#define PW_TCP_HEADER_BYTES    20
#define PW_UDP_HEADER_BYTES    8
#define PW_SCTP_HEADER_BYTES   12
#define PW_SCTP_INIT	       1

/* Copies a header out of the packet: straight from memory where it lies in the linear part, which is where a kernel
 * puts its own headers. `size` is a constant.
 */
static __always_inline int read_header(struct __sk_buff *skb, __u32 offset, void *to, __u32 size)
{
	void *end = (void *)(long)skb->data_end;
	void *from;

	if (offset < PW_NEAR_OFFSETS) {
		from = (void *)(long)skb->data + offset;
		if (from + size <= end) {
			__builtin_memcpy(to, from, size);
			return 0;
		}
	}
	return bpf_skb_load_bytes(skb, offset, to, size);
}

/* Where a chain of IPv6 headers has got to. */
struct pw_chain {
	__u32 offset; /* of the next header, from the frame's start */
	__u32 fragment_id;
	__u16 flags; /* enum pw_packet_flags */
	__u8 protocol;
	__u8 pad;
};

/* The two bytes that every extension header begins with, and what a fragment header has behind them. */
struct pw_extension {
	__u8 next;
	__u8 length;
	__be16 fragment_be;
	__u32 id;
};

/* The part of a TCP header that is looked at. */
struct pw_tcp_start {
	__be16 sport_be;
	__be16 dport_be;
	__u32 sequence;
	__u32 acknowledged;
	__u8 header_words;
	__u8 flags;
	__u16 window;
};

/* A later fragment that could replace the TCP header that was judged (RFC 3128). */
static __always_inline bool overwrites_tcp(__u8 protocol, __u32 offset_bytes)
{
	return protocol == IPPROTO_TCP && offset_bytes && offset_bytes < PW_TCP_HEADER_BYTES;
}

static __always_inline bool is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_DSTOPTS ||
	       protocol == IPPROTO_ROUTING || protocol == IPPROTO_FRAGMENT ||
	       protocol == IPPROTO_AH;
}

/* "Atomic" fragments (RFC 6946) are whole packets. */
static __always_inline int read_fragment(const struct pw_extension *extension,
					 struct pw_chain *chain)
{
	__u32 field = bpf_ntohs(extension->fragment_be);

	if (chain->flags & PW_PACKET_FRAGMENT)
		return PW_DROP_HEADER;
	chain->fragment_id = extension->id;
	chain->flags |= field & (PW_IPV6_OFFSET | PW_IPV6_MORE_FRAGMENTS) ? PW_PACKET_FRAGMENT
									  : PW_PACKET_ATOMIC;
	if (field & PW_IPV6_OFFSET)
		chain->flags |= PW_PACKET_LATER_FRAGMENT;
	return overwrites_tcp(extension->next, field & PW_IPV6_OFFSET) ? PW_DROP_HEADER : 0;
}

/* Steps over one extension header; with another protocol it stays where it is. */
static __always_inline int step_ipv6_header(struct __sk_buff *skb, struct pw_chain *chain,
					    bool first)
{
	struct pw_extension extension;
	__u32 bytes;

	if (chain->protocol == IPPROTO_NONE)
		return PW_DROP_PROTOCOL;
	if (!is_extension(chain->protocol))
		return 0;
	if (bpf_skb_load_bytes(skb, chain->offset, &extension, sizeof(extension)))
		return PW_DROP_TRUNCATED;
	if (chain->protocol == IPPROTO_HOPOPTS && !first)
		return PW_DROP_HEADER;
	/* with segments left the destination is not the one the policy would judge */
	if (chain->protocol == IPPROTO_ROUTING && extension.fragment_be & bpf_htons(0x00ff))
		return PW_DROP_HEADER;
	if (chain->protocol == IPPROTO_FRAGMENT && read_fragment(&extension, chain))
		return PW_DROP_HEADER;
	bytes = (extension.length + 1) * 8;
	if (chain->protocol == IPPROTO_FRAGMENT)
		bytes = sizeof(extension);
	if (chain->protocol == IPPROTO_AH)
		bytes = (extension.length + 2) * 4;
	chain->protocol = extension.next;
	chain->offset += bytes;
	return 0;
}

/* Walks to the transport header, or to a later fragment's data. */
PW_CHECKED_ALONE int walk_ipv6_headers(struct __sk_buff *skb, struct pw_chain *chain)
{
	if (!chain)
		return PW_DROP_INTERNAL;
	for (int i = 0; i < PW_IPV6_HEADERS_MAX; i++) {
		__u32 before = chain->offset;
		int reason = step_ipv6_header(skb, chain, i == 0);

		if (reason)
			return reason;
		if (chain->offset == before || chain->flags & PW_PACKET_LATER_FRAGMENT)
			return 0;
	}
	return PW_DROP_HEADER;
}

/* Length of the network packet: as its header says, or, where that cannot (BIG TCP), as the buffer says. */
static __always_inline __u32 wire_bytes(struct __sk_buff *skb, __u32 said, __u32 unsaid)
{
	return said == unsaid && skb->gso_size ? skb->len - pw_link_header_bytes : said;
}

static __always_inline int parse_ipv4(struct __sk_buff *skb, struct pw_flow *flow)
{
	__u32 header_bytes, fragment;
	struct iphdr ip;

	if (read_header(skb, pw_link_header_bytes, &ip, sizeof(ip)))
		return PW_DROP_TRUNCATED;
	header_bytes = ip.ihl * 4;
	flow->packet_bytes = wire_bytes(skb, bpf_ntohs(ip.tot_len), 0);
	if (ip.version != 4 || header_bytes < sizeof(ip) || flow->packet_bytes < header_bytes)
		return PW_DROP_HEADER;
	if (flow->packet_bytes > skb->len - pw_link_header_bytes)
		return PW_DROP_TRUNCATED;
	map_ipv4(flow->key.saddr, ip.saddr);
	map_ipv4(flow->key.daddr, ip.daddr);
	flow->key.protocol = ip.protocol;
	flow->ttl = ip.ttl;
	flow->fragment_id = ip.id;
	flow->transport_offset = pw_link_header_bytes + header_bytes;
	flow->transport_bytes = flow->packet_bytes - header_bytes;
	fragment = bpf_ntohs(ip.frag_off);
	if (fragment & PW_IPV4_DONT_FRAGMENT)
		flow->flags |= PW_PACKET_DONT_FRAGMENT;
	if (fragment & (PW_IPV4_OFFSET | PW_IPV4_MORE_FRAGMENTS))
		flow->flags |= PW_PACKET_FRAGMENT;
	if (fragment & PW_IPV4_OFFSET)
		flow->flags |= PW_PACKET_LATER_FRAGMENT;
	return overwrites_tcp(ip.protocol, (fragment & PW_IPV4_OFFSET) * 8) ? PW_DROP_HEADER : 0;
}

/* What every IPv6 packet begins with, up to its addresses. */
struct pw_ipv6_fields {
	__u8 version;
	__u8 pad[3];
	__be16 payload_be;
	__u8 next;
	__u8 hop_limit;
};

static __always_inline int parse_ipv6_header(struct __sk_buff *skb, struct pw_flow *flow,
					     struct pw_ipv6_fields *ip)
{
	const __u32 header_bytes = sizeof(struct ipv6hdr);

	if (read_header(skb, pw_link_header_bytes, ip, sizeof(*ip)) ||
	    read_header(skb, pw_link_header_bytes + sizeof(*ip), flow->key.saddr, 32))
		return PW_DROP_TRUNCATED;
	if (ip->version >> 4 != 6)
		return PW_DROP_HEADER;
	/* our maps hold IPv4 in this range: on a wire it would be mistaken for it */
	if (is_mapped_ipv4(flow->key.saddr) || is_mapped_ipv4(flow->key.daddr))
		return PW_DROP_HEADER;
	flow->packet_bytes =
		wire_bytes(skb, bpf_ntohs(ip->payload_be) + header_bytes, header_bytes);
	if (flow->packet_bytes > skb->len - pw_link_header_bytes)
		return PW_DROP_TRUNCATED;
	/* RFC 2675: the length stands in a hop-by-hop header, which the kernel adds to what it has yet to cut */
	if (!ip->payload_be && ip->next == IPPROTO_HOPOPTS)
		flow->jumbo_bytes = PW_JUMBO_BYTES;
	flow->ttl = ip->hop_limit;
	return 0;
}

static __always_inline int parse_ipv6(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_chain chain = {.offset = pw_link_header_bytes + sizeof(struct ipv6hdr)};
	struct pw_ipv6_fields ip;
	int reason = parse_ipv6_header(skb, flow, &ip);

	if (reason)
		return reason;
	chain.protocol = ip.next;
	if (ip.next != IPPROTO_TCP && ip.next != IPPROTO_UDP) {
		reason = walk_ipv6_headers(skb, &chain);
		if (reason)
			return reason;
	}
	if (chain.offset - pw_link_header_bytes > flow->packet_bytes)
		return PW_DROP_TRUNCATED;
	flow->key.protocol = chain.protocol;
	flow->fragment_id = chain.fragment_id;
	flow->flags |= chain.flags | PW_PACKET_DONT_FRAGMENT;
	flow->transport_offset = chain.offset;
	flow->transport_bytes = flow->packet_bytes - (chain.offset - pw_link_header_bytes);
	return 0;
}

static __always_inline int parse_tcp(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_tcp_start tcp;

	if (flow->transport_bytes < PW_TCP_HEADER_BYTES ||
	    read_header(skb, flow->transport_offset, &tcp, sizeof(tcp)))
		return PW_DROP_TRUNCATED;
	flow->transport_header_bytes = tcp.header_words >> 4 << 2;
	if (flow->transport_header_bytes < PW_TCP_HEADER_BYTES)
		return PW_DROP_HEADER;
	if (flow->transport_header_bytes > flow->transport_bytes)
		return PW_DROP_TRUNCATED;
	flow->key.sport_be = tcp.sport_be;
	flow->key.dport_be = tcp.dport_be;
	flow->tcp_flags = tcp.flags;
	flow->tcp_sequence = bpf_ntohl(tcp.sequence);
	flow->tcp_acknowledged = bpf_ntohl(tcp.acknowledged);
	return 0;
}

static __always_inline int parse_ports(struct __sk_buff *skb, struct pw_flow *flow,
				       __u16 header_bytes)
{
	if (flow->transport_bytes < header_bytes ||
	    read_header(skb, flow->transport_offset, &flow->key.sport_be, 4))
		return PW_DROP_TRUNCATED;
	flow->transport_header_bytes = header_bytes;
	return 0;
}

/* INIT is alone in its packet (RFC 9260 3), so the first chunk tells. */
static __always_inline int parse_sctp(struct __sk_buff *skb, struct pw_flow *flow)
{
	int reason = parse_ports(skb, flow, PW_SCTP_HEADER_BYTES);
	__u8 chunk = 0;

	if (reason || flow->transport_bytes == PW_SCTP_HEADER_BYTES)
		return reason;
	/* not by read_header(): Linux 6.1 loses the bound of an offset that is added to */
	if (bpf_skb_load_bytes(skb, flow->transport_offset + PW_SCTP_HEADER_BYTES, &chunk,
			       sizeof(chunk)))
		return PW_DROP_TRUNCATED;
	if (chunk == PW_SCTP_INIT)
		flow->flags |= PW_PACKET_SCTP_INIT;
	return 0;
}

/* An error that quotes IPv6 with IPv4 in it: it would be looked for among the flows of the other family. */
static __always_inline bool quotes_mapped_ipv4(struct __sk_buff *skb, const struct pw_flow *flow)
{
	__u32 quoted = flow->transport_offset + sizeof(struct pw_icmp_header);
	__u32 addresses[8];

	if (flow->ethertype != ETH_P_IPV6 || !(flow->flags & PW_PACKET_ICMP_ERROR) ||
	    bpf_skb_load_bytes(skb, quoted + offsetof(struct ipv6hdr, saddr), addresses,
			       sizeof(addresses)))
		return false;
	return is_mapped_ipv4(addresses) || is_mapped_ipv4(addresses + 4);
}

/* A redirect would tell a pod of another gateway: it has one, which is a program of ours and sends none. That of IPv6 is
 * neighbour discovery.
 */
static __always_inline int check_icmp(struct __sk_buff *skb, const struct pw_flow *flow)
{
	if (flow->ethertype == ETH_P_IP && flow->icmp_type == PW_ICMPV4_REDIRECT)
		return PW_DROP_REDIRECT;
	return quotes_mapped_ipv4(skb, flow) ? PW_DROP_HEADER : 0;
}

static __always_inline int parse_icmp(struct __sk_buff *skb, struct pw_flow *flow)
{
	bool six = flow->key.protocol == IPPROTO_ICMPV6;
	struct pw_icmp_header icmp;

	if (six != (flow->ethertype == ETH_P_IPV6))
		return PW_DROP_PROTOCOL;
	if (flow->transport_bytes < sizeof(icmp) ||
	    read_header(skb, flow->transport_offset, &icmp, sizeof(icmp)))
		return PW_DROP_TRUNCATED;
	flow->transport_header_bytes = sizeof(icmp);
	flow->icmp_type = icmp.type;
	flow->icmp_code = icmp.code;
	flow->flags |= icmp_flags(flow->key.protocol, icmp.type);
	set_icmp_ports(&flow->key, &icmp);
	return check_icmp(skb, flow);
}

/* Protocols that are not listed have no ports and are told apart by their addresses alone. */
static __always_inline int parse_transport(struct __sk_buff *skb, struct pw_flow *flow)
{
	switch (flow->key.protocol) {
	case IPPROTO_TCP:
		return parse_tcp(skb, flow);
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
		return parse_ports(skb, flow, PW_UDP_HEADER_BYTES);
	case IPPROTO_SCTP:
		return parse_sctp(skb, flow);
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return parse_icmp(skb, flow);
	default:
		return 0;
	}
}

/* Reads the network headers: addresses, protocol, sizes. */
static __always_inline int parse_network(struct __sk_buff *skb, struct pw_flow *flow)
{
	return flow->ethertype == ETH_P_IP ? parse_ipv4(skb, flow) : parse_ipv6(skb, flow);
}

/* Completes the tuple. flow->key.instance must be set: fragments are remembered under it. */
static __always_inline int parse_ports_of_packet(struct __sk_buff *skb, struct pw_flow *flow)
{
	return flow->flags & PW_PACKET_LATER_FRAGMENT ? recall_ports(flow)
						      : parse_transport(skb, flow);
}

PW_CHECKED_ALONE int parse_packet(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (!flow)
		return PW_DROP_INTERNAL;
	return parse_network(skb, flow) ?: parse_ports_of_packet(skb, flow);
}

#endif
