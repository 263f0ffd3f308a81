// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* outer: the least that a program can do to send a pod's IPv4 packet through a VXLAN tunnel by itself. At tc ingress of a
 * pod's host device; writes the outer headers and hands the packet to the neighbours of the underlay device: neither
 * netfilter nor a tunnel device sees it. What making the headers so could spare is measured with it.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define TTL	      64
#define DONT_FRAGMENT 0x4000
#define LOWEST_PORT   32768
#define PASS_ON	      0 /* TC_ACT_OK */
#define DROP	      2 /* TC_ACT_SHOT */
#define GROWTH	      ((int)sizeof(struct outer))

const volatile __u32 uplink_index;
const volatile __u32 own_be;
const volatile __u32 peer_be;
const volatile __u32 inside_be; /* addresses of the peer's pods, */
const volatile __u32 inside_mask_be;
const volatile __u32 tunnel_number;
const volatile __u32 tunnel_port;
const volatile __u64 destination_mac; /* in its lower 48 bits, first byte lowest */

struct outer {
	struct iphdr ip;
	struct udphdr udp;
	__be32 flags_be;
	__be32 number_be;
	struct ethhdr inner;
} __attribute__((packed));

static __always_inline __u16 sum(const void *ip)
{
	__u16 words[10];
	__u32 total = 0;

	__builtin_memcpy(words, ip, sizeof(words));
	for (int i = 0; i < 10; i++)
		total += words[i];
	total = (total & 0xffff) + (total >> 16);
	return ~((total & 0xffff) + (total >> 16));
}

static __always_inline void fill(struct outer *outer, __u32 packet_bytes, __u32 hash)
{
	outer->ip.version = 4;
	outer->ip.ihl = 5;
	outer->ip.tot_len = bpf_htons(packet_bytes + GROWTH);
	outer->ip.frag_off = bpf_htons(DONT_FRAGMENT);
	outer->ip.ttl = TTL;
	outer->ip.protocol = IPPROTO_UDP;
	outer->ip.saddr = own_be;
	outer->ip.daddr = peer_be;
	outer->ip.check = sum(&outer->ip);
	outer->udp.source = bpf_htons(LOWEST_PORT | (hash & (LOWEST_PORT - 1)));
	outer->udp.dest = bpf_htons(tunnel_port);
	outer->udp.len = bpf_htons(packet_bytes + GROWTH - sizeof(outer->ip));
	outer->flags_be = bpf_htonl(1 << 27);
	outer->number_be = bpf_htonl(tunnel_number << 8);
	outer->inner.h_proto = bpf_htons(ETH_P_IP);
	for (int i = 0; i < ETH_ALEN; i++)
		outer->inner.h_dest[i] = destination_mac >> (8 * i);
}

SEC("tc")
int outer(struct __sk_buff *skb)
{
	const __u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 |
			    BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2_ETH |
			    BPF_F_ADJ_ROOM_ENCAP_L2(sizeof(struct ethhdr));
	struct outer made = {};
	__be32 destination_be;

	if (skb->protocol != bpf_htons(ETH_P_IP) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + 16, &destination_be, 4) ||
	    (destination_be & inside_mask_be) != inside_be)
		return PASS_ON;
	fill(&made, skb->len - ETH_HLEN, bpf_get_hash_recalc(skb));
	if (bpf_skb_adjust_room(skb, GROWTH, BPF_ADJ_ROOM_MAC, flags) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &made, sizeof(made), BPF_F_INVALIDATE_HASH))
		return DROP;
	return bpf_redirect_neigh(uplink_index, 0, 0, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
