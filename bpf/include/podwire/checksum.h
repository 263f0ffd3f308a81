/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* checksum.h: the internet checksum over what a program writes itself (RFC 1071). */
#ifndef PODWIRE_CHECKSUM_H
#define PODWIRE_CHECKSUM_H

#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ipv6.h>

#include <podwire/flow.h>

#define PW_SUM_CHUNK_BYTES 32
#define PW_SUM_CHUNKS_MAX  40

/* An IPv6 header before and after its addresses are summed up: what RFC 8200 8.1 puts into the sum besides them fits
 * into the eight bytes in front of them, where the header's own first fields come to stand.
 */
union pw_ipv6_start {
	struct ipv6hdr header;
	struct {
		__be32 bytes_be;
		__be32 protocol_be;
		__u8 saddr[16];
		__u8 daddr[16];
	} summed;
};

static __always_inline __u16 fold_sum(__s64 sum)
{
	__u32 folded = (__u32)sum;

	folded = (folded & 0xffff) + (folded >> 16);
	folded = (folded & 0xffff) + (folded >> 16);
	return ~folded;
}

/* `bytes` is a multiple of four. */
static __always_inline __s64 sum_words(const void *words, __u32 bytes, __s64 sum)
{
	return bpf_csum_diff(NULL, 0, (__be32 *)words, bytes, sum);
}

/* Sums up what a message of `bytes` has in front of it, then completes the header. The addresses are there. */
static __always_inline __s64 sum_ipv6_start(union pw_ipv6_start *ip, __u8 protocol, __u32 bytes,
					    __u8 hop_limit)
{
	__s64 sum;

	ip->summed.bytes_be = bpf_htonl(bytes);
	ip->summed.protocol_be = bpf_htonl(protocol);
	sum = sum_words(ip, sizeof(*ip), 0);
	ip->summed.bytes_be = bpf_htonl(6u << 28);
	ip->header.payload_len = bpf_htons(bytes);
	ip->header.nexthdr = protocol;
	ip->header.hop_limit = hop_limit;
	return sum;
}

/* Adds `bytes` of the frame from `offset` on to a sum; at most PW_SUM_CHUNKS_MAX chunks. */
static __noinline __s64 sum_frame(struct __sk_buff *skb, __u32 offset, __u32 bytes, __u32 sum)
{
	__u32 rest = bytes % PW_SUM_CHUNK_BYTES;
	__s64 total = sum;
	__u32 chunk[PW_SUM_CHUNK_BYTES / 4];

	for (int i = 0; i < PW_SUM_CHUNKS_MAX; i++) {
		if (bytes < PW_SUM_CHUNK_BYTES)
			break;
		if (bpf_skb_load_bytes(skb, offset, chunk, sizeof(chunk)))
			return total;
		total = sum_words(chunk, sizeof(chunk), total);
		offset += PW_SUM_CHUNK_BYTES;
		bytes -= PW_SUM_CHUNK_BYTES;
	}
	if (!rest)
		return total;
	__builtin_memset(chunk, 0, sizeof(chunk));
	/* Linux 6.1 does not conclude from the test above that `rest` is at least 1: say it in arithmetic */
	rest -= 1;
	barrier_var(rest);
	rest = rest % PW_SUM_CHUNK_BYTES + 1;
	if (!bpf_skb_load_bytes(skb, offset, chunk, rest))
		total = sum_words(chunk, sizeof(chunk), total);
	return total;
}

#endif
