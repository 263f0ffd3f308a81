/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* rewrite.h: put a back end's address where the pod wrote a service's, and the service's on the way home.
 *
 * Checksums are changed by what changed (RFC 1624), so that whatever a device has summed up or has yet to sum up stays
 * right. A later fragment has addresses only; the checksum that covers them is in the first one. SCTP's covers ports and
 * no addresses, and nobody here can sum up a whole packet by CRC32c: its ports stay as they are.
 */
#ifndef PODWIRE_REWRITE_H
#define PODWIRE_REWRITE_H

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <podwire/flow.h>
#include <podwire/icmp.h>

#define PW_TCP_CHECKSUM_OFFSET 16
#define PW_UDP_CHECKSUM_OFFSET 6
#define PW_WHOLE_SUM_OF_IPV6   (1ULL << 7) /* BPF_F_IPV6, which uapi headers before Linux 6.16 lack */

/* Where in a frame one checksum is, and how it is kept. */
struct pw_checksum {
	__u32 offset; /* 0 = there is none to keep */
	__u64 flags;  /* of bpf_l4_csum_replace */
};

static __always_inline struct pw_checksum transport_checksum(const struct pw_flow *flow)
{
	struct pw_checksum checksum = {};

	if (flow->flags & PW_PACKET_LATER_FRAGMENT || flow->key.protocol == IPPROTO_SCTP)
		return checksum;
	checksum.offset = flow->transport_offset + PW_TCP_CHECKSUM_OFFSET;
	if (flow->key.protocol != IPPROTO_TCP) {
		checksum.offset = flow->transport_offset + PW_UDP_CHECKSUM_OFFSET;
		checksum.flags = BPF_F_MARK_MANGLED_0; /* 0 = the sender summed nothing up */
	}
	return checksum;
}

static __always_inline int replace_ipv4(struct __sk_buff *skb, __u32 at, __u32 header, __be32 to_be,
					const struct pw_checksum *checksum)
{
	__u64 flags = checksum->flags | BPF_F_PSEUDO_HDR | sizeof(to_be);
	__be32 from_be;

	if (bpf_skb_load_bytes(skb, at, &from_be, sizeof(from_be)))
		return PW_DROP_INTERNAL;
	if (checksum->offset && bpf_l4_csum_replace(skb, checksum->offset, from_be, to_be, flags))
		return PW_DROP_INTERNAL;
	if (bpf_l3_csum_replace(skb, header + offsetof(struct iphdr, check), from_be, to_be,
				sizeof(to_be)))
		return PW_DROP_INTERNAL;
	return bpf_skb_store_bytes(skb, at, &to_be, sizeof(to_be), 0) ? PW_DROP_INTERNAL : 0;
}

/* An IPv6 header has no checksum of its own, so what a device has summed up over the whole packet stays as it is; a
 * kernel that cannot be told so sums up anew.
 */
static __always_inline int replace_ipv6(struct __sk_buff *skb, __u32 at, const void *to,
					const struct pw_checksum *checksum)
{
	__u64 flags = checksum->flags | BPF_F_PSEUDO_HDR;
	__be32 from[4], next[4];
	__s64 difference;

	copy_address(next, to);
	if (bpf_skb_load_bytes(skb, at, from, sizeof(from)))
		return PW_DROP_INTERNAL;
	difference = bpf_csum_diff(from, sizeof(from), next, sizeof(next), 0);
	if (checksum->offset &&
	    bpf_l4_csum_replace(skb, checksum->offset, 0, difference,
				flags | PW_WHOLE_SUM_OF_IPV6) &&
	    bpf_l4_csum_replace(skb, checksum->offset, 0, difference, flags))
		return PW_DROP_INTERNAL;
	/* with no other sum that changes against it */
	flags = checksum->offset ? 0 : BPF_F_RECOMPUTE_CSUM;
	return bpf_skb_store_bytes(skb, at, next, sizeof(next), flags) ? PW_DROP_INTERNAL : 0;
}

static __always_inline int replace_port(struct __sk_buff *skb, __u32 at, __be16 to_be,
					const struct pw_checksum *checksum)
{
	__u64 flags = checksum->flags | sizeof(to_be);
	__be16 from_be;

	if (!checksum->offset)
		return 0;
	if (bpf_skb_load_bytes(skb, at, &from_be, sizeof(from_be)))
		return PW_DROP_INTERNAL;
	if (from_be == to_be)
		return 0;
	if (bpf_l4_csum_replace(skb, checksum->offset, from_be, to_be, flags))
		return PW_DROP_INTERNAL;
	return bpf_skb_store_bytes(skb, at, &to_be, sizeof(to_be), 0) ? PW_DROP_INTERNAL : 0;
}

/* One address of the header that begins at `header`. */
static __always_inline int replace_address(struct __sk_buff *skb, const struct pw_flow *flow,
					   __u32 header, bool source, const void *to,
					   const struct pw_checksum *checksum)
{
	if (flow->ethertype == ETH_P_IP)
		return replace_ipv4(skb,
				    header + (source ? offsetof(struct iphdr, saddr)
						     : offsetof(struct iphdr, daddr)),
				    header, mapped_ipv4(to), checksum);
	return replace_ipv6(skb,
			    header + (source ? offsetof(struct ipv6hdr, saddr)
					     : offsetof(struct ipv6hdr, daddr)),
			    to, checksum);
}

/* To the back end that flow->key names. Its ports come first: they lie behind what is told of the addresses. */
PW_CHECKED_ALONE int write_back_end(struct __sk_buff *skb, const struct pw_flow *flow)
{
	struct pw_checksum checksum;

	if (!flow)
		return PW_DROP_INTERNAL;
	checksum = transport_checksum(flow);
	return replace_port(skb, flow->transport_offset, flow->key.sport_be, &checksum)
		       ?: replace_port(skb, flow->transport_offset + 2, flow->key.dport_be,
				       &checksum)
		       ?: replace_address(skb, flow, pw_link_header_bytes, false, flow->key.daddr,
					  &checksum);
}

/* From the service again, to the port that the pod used. */
PW_CHECKED_ALONE int write_service(struct __sk_buff *skb, const struct pw_flow *flow,
				   const struct pw_conntrack_value *entry)
{
	struct pw_checksum checksum;

	if (!flow || !entry)
		return PW_DROP_INTERNAL;
	checksum = transport_checksum(flow);
	return replace_port(skb, flow->transport_offset, entry->nat_dport_be, &checksum)
		       ?: replace_port(skb, flow->transport_offset + 2, entry->nat_sport_be,
				       &checksum)
		       ?: replace_address(skb, flow, pw_link_header_bytes, true, entry->nat_addr,
					  &checksum);
}

/* Exchanges the two addresses of the header that begins at `header`. No sum changes by it. */
static __always_inline int exchange_addresses(struct __sk_buff *skb, const struct pw_flow *flow,
					      __u32 header)
{
	bool six = flow->ethertype == ETH_P_IPV6;
	__u32 addresses[8];

	if (!six) {
		header += offsetof(struct iphdr, saddr);
		if (bpf_skb_load_bytes(skb, header, addresses, 8) ||
		    bpf_skb_store_bytes(skb, header, addresses + 1, 4, 0) ||
		    bpf_skb_store_bytes(skb, header + 4, addresses, 4, 0))
			return PW_DROP_INTERNAL;
		return 0;
	}
	header += offsetof(struct ipv6hdr, saddr);
	if (bpf_skb_load_bytes(skb, header, addresses, 32) ||
	    bpf_skb_store_bytes(skb, header, addresses + 4, 16, 0) ||
	    bpf_skb_store_bytes(skb, header + 16, addresses, 16, 0))
		return PW_DROP_INTERNAL;
	return 0;
}

/* A pod's packet to the service whose back end it is itself, and its answers: the other end is the service, seen from
 * both. `entry` is the flow that an answer belongs to, NULL for what is asked.
 */
PW_CHECKED_ALONE int write_itself(struct __sk_buff *skb, const struct pw_flow *flow,
				  const struct pw_conntrack_value *entry)
{
	struct pw_checksum checksum;

	if (!flow)
		return PW_DROP_INTERNAL;
	checksum = transport_checksum(flow);
	return replace_port(skb, flow->transport_offset,
			    entry ? entry->nat_dport_be : flow->key.dport_be, &checksum)
		       ?: replace_port(skb, flow->transport_offset + 2,
				       entry ? entry->nat_sport_be : flow->key.sport_be, &checksum)
		       ?: exchange_addresses(skb, flow, pw_link_header_bytes);
}

/* Where the transport header is of the packet that an ICMP error quotes; 0 = behind headers that no service has. */
static __always_inline __u32 quoted_transport(struct __sk_buff *skb, const struct pw_flow *flow,
					      __u32 quoted)
{
	__u8 first;

	if (flow->ethertype == ETH_P_IP) {
		if (bpf_skb_load_bytes(skb, quoted, &first, 1))
			return 0;
		return quoted + (first & 0xf) * 4;
	}
	if (bpf_skb_load_bytes(skb, quoted + offsetof(struct ipv6hdr, nexthdr), &first, 1) ||
	    (first != IPPROTO_TCP && first != IPPROTO_UDP && first != IPPROTO_SCTP))
		return 0;
	return quoted + sizeof(struct ipv6hdr);
}

/* What the pod has sent is quoted as it sent it. The quoted packet's own checksum is left, which nobody can verify: most
 * of what it covers is not quoted. An IPv4 address and the checksum of its header change the error's sum by nothing.
 */
static __always_inline int mend_quote(struct __sk_buff *skb, const struct pw_flow *flow,
				      const struct pw_conntrack_value *entry)
{
	__u32 quoted = flow->transport_offset + sizeof(struct pw_icmp_header);
	struct pw_checksum error = {
		.offset = flow->transport_offset + offsetof(struct pw_icmp_header, checksum),
	};
	struct pw_checksum of_address = {};
	__u32 ports = quoted_transport(skb, flow, quoted);

	if (!ports)
		return PW_DROP_HEADER;
	if (flow->ethertype == ETH_P_IPV6)
		of_address = error;
	return replace_port(skb, ports, entry->nat_sport_be, &error)
		       ?: replace_port(skb, ports + 2, entry->nat_dport_be, &error)
		       ?: replace_address(skb, flow, quoted, false, entry->nat_addr, &of_address);
}

/* What the pod says of a packet of its own that has come back to it, as it sent it. */
PW_CHECKED_ALONE int write_own_error(struct __sk_buff *skb, const struct pw_flow *flow,
				     const struct pw_conntrack_value *entry)
{
	struct pw_checksum error;
	__u32 quoted, ports;

	if (!flow || !entry)
		return PW_DROP_INTERNAL;
	quoted = flow->transport_offset + sizeof(struct pw_icmp_header);
	error.offset = flow->transport_offset + offsetof(struct pw_icmp_header, checksum);
	error.flags = 0;
	ports = quoted_transport(skb, flow, quoted);
	if (!ports)
		return PW_DROP_HEADER;
	return replace_port(skb, ports, entry->nat_sport_be, &error)
		       ?: replace_port(skb, ports + 2, entry->nat_dport_be, &error)
		       ?: exchange_addresses(skb, flow, quoted)
		       ?: exchange_addresses(skb, flow, pw_link_header_bytes);
}

/* Did the end of the flow that the quoted packet went to send the error, or a router on the way? */
static __always_inline bool is_from_destination(struct __sk_buff *skb, const struct pw_flow *flow,
						__u32 quoted)
{
	__u32 destination[4];

	if (flow->ethertype == ETH_P_IPV6)
		return !bpf_skb_load_bytes(skb, quoted + offsetof(struct ipv6hdr, daddr),
					   destination, sizeof(destination)) &&
		       same_address(destination, flow->key.saddr);
	return !bpf_skb_load_bytes(skb, quoted + offsetof(struct iphdr, daddr), destination, 4) &&
	       destination[0] == mapped_ipv4(flow->key.saddr);
}

/* An ICMP error about the flow: from the service, if the back end sent it, and about what the pod sent. */
PW_CHECKED_ALONE int write_error(struct __sk_buff *skb, const struct pw_flow *flow,
				 const struct pw_conntrack_value *entry)
{
	struct pw_checksum checksum = {};
	bool from_back_end;
	int reason;

	if (!flow || !entry)
		return PW_DROP_INTERNAL;
	from_back_end = is_from_destination(skb, flow,
					    flow->transport_offset + sizeof(struct pw_icmp_header));
	reason = mend_quote(skb, flow, entry);
	if (reason || !from_back_end)
		return reason;
	if (flow->ethertype == ETH_P_IPV6) /* ICMP of IPv4 has no addresses in its sum */
		checksum.offset =
			flow->transport_offset + offsetof(struct pw_icmp_header, checksum);
	return replace_address(skb, flow, pw_link_header_bytes, true, entry->nat_addr, &checksum);
}

#endif
