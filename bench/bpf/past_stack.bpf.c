// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* past_stack: a VXLAN tunnel without the host's stack, for IPv4 over IPv4. leave, at tc egress of the tunnel device, writes
 * the outer headers of what has its key; enter, at tc ingress of the underlay device, takes them off and calls
 * from_overlay. podwire's programs judge as ever; netfilter, UDP and the tunnel device see nothing.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define TTL	     64
#define LOWEST_PORT  32768
#define PASS_ON	     0	/* TC_ACT_OK */
#define DROP	     2	/* TC_ACT_SHOT */
#define NEXT_PROGRAM -1 /* TC_ACT_UNSPEC */
#define HEADER_BYTES ((int)sizeof(struct outer))
#define FRAGMENT     0x3fff

const volatile __u32 uplink_index;
const volatile __u32 own_be;
const volatile __u32 tunnel_port;

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} judges SEC(".maps");

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
	outer->ip.tot_len = bpf_htons(packet_bytes + HEADER_BYTES);
	outer->ip.id = bpf_get_prandom_u32();
	outer->ip.ttl = TTL;
	outer->ip.protocol = IPPROTO_UDP;
	outer->ip.saddr = own_be;
	outer->ip.check = sum(&outer->ip);
	outer->udp.source = bpf_htons(LOWEST_PORT | (hash & (LOWEST_PORT - 1)));
	outer->udp.dest = bpf_htons(tunnel_port);
	outer->udp.len = bpf_htons(packet_bytes + HEADER_BYTES - sizeof(outer->ip));
	outer->flags_be = bpf_htonl(1 << 27);
}

SEC("tc")
int leave(struct __sk_buff *skb)
{
	const __u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 |
			    BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2_ETH |
			    BPF_F_ADJ_ROOM_ENCAP_L2(sizeof(struct ethhdr));
	struct bpf_tunnel_key key = {};
	struct outer made = {};

	/* a key that is to be sent by has its receiver where one that was received has this host */
	if (skb->protocol != bpf_htons(ETH_P_IP) ||
	    bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0) ||
	    bpf_skb_load_bytes(skb, 0, &made.inner, sizeof(made.inner)))
		return NEXT_PROGRAM;
	made.ip.daddr = bpf_htonl(key.local_ipv4);
	made.number_be = bpf_htonl(key.tunnel_id << 8);
	fill(&made, skb->len - ETH_HLEN, bpf_get_hash_recalc(skb));
	if (bpf_skb_adjust_room(skb, HEADER_BYTES, BPF_ADJ_ROOM_MAC, flags) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &made, sizeof(made), BPF_F_INVALIDATE_HASH))
		return DROP;
	return bpf_redirect_neigh(uplink_index, 0, 0, 0);
}

static __always_inline int is_for_tunnel(const struct outer *outer)
{
	return outer->ip.version == 4 && outer->ip.ihl == 5 && outer->ip.protocol == IPPROTO_UDP &&
	       outer->ip.daddr == own_be && !(outer->ip.frag_off & bpf_htons(FRAGMENT)) &&
	       outer->udp.dest == bpf_htons(tunnel_port) && outer->flags_be == bpf_htonl(1 << 27) &&
	       outer->inner.h_proto == bpf_htons(ETH_P_IP);
}

SEC("tc")
int enter(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = {};
	struct outer came;

	if (skb->protocol != bpf_htons(ETH_P_IP) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN, &came, sizeof(came)) || !is_for_tunnel(&came))
		return PASS_ON;
	key.tunnel_id = bpf_ntohl(came.number_be) >> 8;
	key.local_ipv4 = bpf_ntohl(came.ip.saddr);
	if (bpf_skb_adjust_room(skb, -HEADER_BYTES, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO) ||
	    bpf_skb_set_tunnel_key(skb, &key, sizeof(key), 0))
		return DROP;
	bpf_tail_call(skb, &judges, 0);
	return DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
