/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* identity.h: who is at the other end (rules 1 and 10). */
#ifndef PODWIRE_IDENTITY_H
#define PODWIRE_IDENTITY_H

#include <podwire/endpoint.h>

static __always_inline struct pw_ipcache_value *find_prefix(const void *address)
{
	struct pw_prefix_key key = {.prefix_bits = 128};

	copy_address(key.addr, address);
	return bpf_map_lookup_elem(&pw_ipcache, &key);
}

/* Where the packet goes: an endpoint of this node, else what the ipcache says, else the world. */
static __always_inline int find_destination(struct pw_flow *flow)
{
	struct pw_ipcache_value *prefix;
	int reason = copy_target(flow);

	if (reason)
		return reason;
	if (flow->local) {
		flow->destination_identity = flow->target.instance == flow->row.instance
						     ? PW_IDENTITY_SELF
						     : flow->target.identity;
		flow->path_mtu = flow->target.mtu;
		return 0;
	}
	prefix = find_prefix(flow->key.daddr);
	if (!prefix) {
		flow->destination_identity = PW_IDENTITY_WORLD;
		return 0;
	}
	flow->destination_identity = prefix->identity;
	flow->path_mtu = prefix->mtu;
	flow->unreachable = prefix->flags & PW_IPCACHE_LOCAL;
	flow->native = prefix->flags & PW_IPCACHE_DIRECT;
	if (prefix->flags & (PW_IPCACHE_TUNNEL | PW_IPCACHE_DIRECT))
		flow->node = prefix->node;
	return 0;
}

/* A pod's, as far as anybody knows: what is not a node's, within the cluster. The key is on the stack, as Linux 6.1 wants
 * it to be.
 */
static __noinline bool is_pod_address(const void *address)
{
	struct pw_endpoint_key key;
	const struct pw_ipcache_value *prefix;

	copy_address(key.addr, address);
	if (bpf_map_lookup_elem(&pw_endpoints, &key))
		return true;
	prefix = find_prefix(address);
	return prefix && !(prefix->flags & PW_IPCACHE_NODE_ADDRESS) &&
	       prefix->identity != PW_IDENTITY_HOST;
}

/* A packet without a receiving device was made here. Of the kernel's own copies of forwarded fragments not all keep the
 * device, and those have no socket: they are whatever their address says, never the host.
 */
static __always_inline bool is_from_this_host(struct __sk_buff *skb, const struct pw_flow *flow)
{
	if (skb->ingress_ifindex)
		return false;
	return !(flow->flags & PW_PACKET_FRAGMENT) || skb->sk;
}

/* The identity of a sender beyond this host. An address of a node stands for everybody who was masqueraded behind it,
 * and one of our own blocks that comes from elsewhere is forged: both count as the world.
 */
static __noinline int address_identity(const struct pw_flow *flow)
{
	const __u32 distrusted = PW_IPCACHE_NODE_ADDRESS | PW_IPCACHE_LOCAL;
	struct pw_ipcache_value *prefix = find_prefix(flow->key.saddr);

	if (!prefix || prefix->flags & distrusted)
		return PW_IDENTITY_WORLD;
	return prefix->identity;
}

/* Who sent what the host's stack hands to a pod: told by the device it came in through, whatever was translated on the
 * way. `sender` is room for a row.
 */
static __always_inline __u32 stack_identity(struct __sk_buff *skb, const struct pw_flow *flow,
					    struct pw_row *sender)
{
	if (is_from_this_host(skb, flow))
		return PW_IDENTITY_HOST;
	if (skb->ingress_ifindex && !copy_row(skb->ingress_ifindex, sender))
		return sender->instance == flow->row.instance ? PW_IDENTITY_SELF : sender->identity;
	return address_identity(flow);
}

#endif
