/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* tunnel.h: what surrounds a packet between two nodes: the key that the tunnel device reads and writes (rule 9).
 *
 * The VNI is the sender's identity. A classic peer knows one VNI and looks at the frame's destination.
 */
#ifndef PODWIRE_TUNNEL_H
#define PODWIRE_TUNNEL_H

#include <podwire/flow.h>

#define PW_TUNNEL_ID_MAX     0xffffff /* a VNI has 24 bits */
#define PW_TUNNEL_ID_CLASSIC 1
#define PW_TUNNEL_TTL	     64

/* Index of the flow-based device, 0 = there is none. */
static __always_inline __u32 tunnel_device(void)
{
	__u32 zero = 0;
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	return settings ? settings->tunnel_ifindex : 0;
}

/* Takes the number by value: Linux 6.1 reads keys from the program's own stack only. */
static __always_inline struct pw_node_value *find_node(__u32 number)
{
	return bpf_map_lookup_elem(&pw_nodes, &number);
}

static __always_inline bool is_classic(const struct pw_node_value *node)
{
	return node->flags & PW_NODE_CLASSIC;
}

/* No program and no device of this build encrypts: what has to be would leave for all to read. */
static __always_inline bool must_be_encrypted(const struct pw_node_value *node)
{
	return node->flags & PW_NODE_ENCRYPTED;
}

/* What a peer is told of a sender. Numbers that only this node knows would name somebody else there. */
static __always_inline __u32 tunnel_id(const struct pw_node_value *node, __u32 identity)
{
	if (is_classic(node))
		return PW_TUNNEL_ID_CLASSIC;
	return identity > PW_TUNNEL_ID_MAX ? PW_IDENTITY_WORLD : identity;
}

/* Without BPF_F_DONT_FRAGMENT: what does not fit is cut on the way, not lost (rule 16). */
static __always_inline int set_tunnel_key(struct __sk_buff *skb, const struct pw_node_value *node,
					  __u32 identity)
{
	struct bpf_tunnel_key key = {
		.tunnel_id = tunnel_id(node, identity),
		.tunnel_ttl = PW_TUNNEL_TTL,
	};
	__u64 flags = 0;

	if (must_be_encrypted(node))
		return PW_DROP_NOT_ENCRYPTED;
	if (is_mapped_ipv4(node->addr)) {
		key.remote_ipv4 = bpf_ntohl(mapped_ipv4(node->addr));
	} else {
		copy_address(key.remote_ipv6, node->addr);
		flags = BPF_F_TUNINFO_IPV6;
	}
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), flags) ? PW_DROP_INTERNAL : 0;
}

/* What the host's stack tells a tunnel's packets by from those that a process forges (rule 22). It outlives
 * encapsulation.
 */
static __always_inline void mark_as_tunnelled(struct __sk_buff *skb)
{
	__u32 zero = 0;
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	if (settings)
		skb->mark = settings->tunnel_mark;
}

/* A key that a program has set, or, where the tunnel ends, the one that the packet came with. */
static __always_inline bool has_tunnel_key(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = {};

	return !bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0) ||
	       !bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6);
}

/* Reads which node sent a packet that came by the tunnel, and the identity that it gives the sender. */
static __always_inline bool read_tunnel_key(struct __sk_buff *skb, struct pw_tunnel_end *end)
{
	struct bpf_tunnel_key key = {};

	if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0))
		map_ipv4(end->outer, bpf_htonl(key.remote_ipv4));
	else if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
		copy_address(end->outer, key.remote_ipv6);
	else
		return false;
	end->tunnel_id = key.tunnel_id;
	return true;
}

#endif
