/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* offload.h: where a checksum will be written that a pod has left to a device.
 *
 * A sender of raw frames may name any place (PACKET_VNET_HDR), and the device writes there behind all programs: over the
 * port or the address that they have judged. A kernel names the transport header's own checksum, or one in the payload,
 * where the pod has a tunnel of its own.
 */
#ifndef PODWIRE_OFFLOAD_H
#define PODWIRE_OFFLOAD_H

#include <bpf/bpf_core_read.h>

#include <podwire/flow.h>
#include <podwire/parse.h>
#include <podwire/rewrite.h>

#define PW_CHECKSUM_LEFT	3 /* CHECKSUM_PARTIAL of include/linux/skbuff.h */
#define PW_SCTP_CHECKSUM_OFFSET 8
#define PW_ICMP_CHECKSUM_OFFSET 2

/* The kernel's own description of a packet; libbpf finds the fields at the load. */
struct sk_buff___kernel {
	__u8 ip_summed : 2;
	__u16 csum_start; /* from the buffer's head, as mac_header; csum_offset is behind it */
	__u16 csum_offset;
	__u16 mac_header;
} __attribute__((preserve_access_index));

/* Where behind its transport header's start a packet has its checksum: everything in front is judged. */
static __always_inline __s32 checksum_place(__u8 protocol)
{
	switch (protocol) {
	case IPPROTO_TCP:
		return PW_TCP_CHECKSUM_OFFSET;
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
		return PW_UDP_CHECKSUM_OFFSET;
	case IPPROTO_SCTP:
		return PW_SCTP_CHECKSUM_OFFSET;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return PW_ICMP_CHECKSUM_OFFSET;
	default:
		return 0;
	}
}

/* What follows the checksum of these is judged, too: the first chunk, the number of an echo, a quoted packet. */
static __always_inline bool is_judged_behind_checksum(__u8 protocol)
{
	return protocol == IPPROTO_SCTP || protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6;
}

PW_CHECKED_ALONE int check_open_sum(struct __sk_buff *skb, const struct pw_flow *flow)
{
	const struct sk_buff___kernel *kernel = (const void *)skb;
	__u16 sum[2], mac_start; /* sum: where it begins, and how far behind that it is written */
	__s32 begin, behind;

	if (!flow)
		return PW_DROP_INTERNAL;
	if (bpf_core_read(sum, sizeof(sum), &kernel->csum_start) ||
	    bpf_core_read(&mac_start, sizeof(mac_start), &kernel->mac_header))
		return PW_DROP_INTERNAL;
	/* A device that segments takes the beginning for the transport header, and would write its fields elsewhere. */
	begin = (__s32)sum[0] - mac_start - flow->transport_offset;
	behind = begin + sum[1] - checksum_place(flow->key.protocol);
	if (begin < 0 || behind < 0 || (behind && is_judged_behind_checksum(flow->key.protocol)))
		return PW_DROP_HEADER;
	return 0;
}

static __always_inline int check_offload(struct __sk_buff *skb, const struct pw_flow *flow)
{
	const struct sk_buff___kernel *kernel = (const void *)skb;

	if (BPF_CORE_READ_BITFIELD_PROBED(kernel, ip_summed) != PW_CHECKSUM_LEFT)
		return 0;
	return check_open_sum(skb, flow);
}

#endif
