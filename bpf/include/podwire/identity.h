/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* identity.h: who is at the other end (rules 1 and 10). */
#ifndef PODWIRE_IDENTITY_H
#define PODWIRE_IDENTITY_H

#include <podwire/endpoint.h>
#include <podwire/tunnel.h>

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

/* A pod's, as far as anybody knows: what is not a node's, within the cluster. The key is on the stack, as Linux 6.1
 * wants it to be.
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

/* What the stack has put together from pieces it may send whole with IPv6, behind a fragment header. */
static __always_inline bool was_cut(const struct pw_flow *flow)
{
	return flow->flags & (PW_PACKET_FRAGMENT | PW_PACKET_ATOMIC);
}

/* A packet without a receiving device was made here. Of the kernel's own copies of forwarded fragments not all keep the
 * device, and those have no socket: they are whatever their address says, never the host.
 */
static __always_inline bool is_from_this_host(struct __sk_buff *skb, const struct pw_flow *flow)
{
	if (skb->ingress_ifindex)
		return false;
	return !was_cut(flow) || skb->sk;
}

/* The device of the pod that a packet of the stack came from; 0 = another one's, or this host's. Where IPv6 cuts a
 * packet again that it had put together from pieces, it forgets the device, but not the mark that from_pod gives to
 * pieces: the pod's address tells then.
 */
static __always_inline __u32 sender_device(struct __sk_buff *skb, const struct pw_flow *flow)
{
	const struct pw_endpoint_value *endpoint;

	if (skb->ingress_ifindex || !was_cut(flow) ||
	    (skb->mark & ~PW_MARK_FOREIGN_BITS) != PW_MARK_POD_PIECE)
		return skb->ingress_ifindex;
	endpoint = find_endpoint(flow->key.saddr);
	return endpoint ? endpoint->ifindex : 0;
}

/* The identity that a pod's address has now, at `node` if that is not 0; 0 = it is none, or nobody has told us yet
 * whose.
 */
static __noinline __u32 pod_identity(const void *address, __u32 node)
{
	const struct pw_endpoint_value *endpoint;
	const struct pw_config_value *row;
	const struct pw_ipcache_value *prefix;
	struct pw_endpoint_key key;
	__u32 ifindex;

	copy_address(key.addr, address);
	endpoint = bpf_map_lookup_elem(&pw_endpoints, &key);
	if (endpoint) {
		ifindex = endpoint->ifindex;
		row = bpf_map_lookup_elem(&pw_config, &ifindex);
		return row && row->instance == endpoint->instance && !node ? row->identity : 0;
	}
	prefix = find_prefix(address);
	if (!prefix || (node && prefix->node != node) ||
	    prefix->flags & (PW_IPCACHE_NODE_ADDRESS | PW_IPCACHE_LOCAL) ||
	    prefix->identity == PW_IDENTITY_HOST || prefix->identity == PW_IDENTITY_UNMANAGED)
		return 0;
	return prefix->identity;
}

/* Those of pods, which may become others. */
static __always_inline bool may_change(__u32 identity)
{
	switch (identity) {
	case PW_IDENTITY_UNKNOWN:
	case PW_IDENTITY_HOST:
	case PW_IDENTITY_WORLD:
	case PW_IDENTITY_REMOTE_NODE:
	case PW_IDENTITY_SELF:
		return false;
	default:
		return true;
	}
}

/* Who the other end of an answer is now, or a stream in which only one side speaks would outlive what its peer was
 * (rule 6). Behind the address of a node or a service, and where its address has gone to another node, it stays who the
 * entry says.
 */
static __always_inline __u32 present_identity(const void *address,
					      const struct pw_conntrack_value *entry)
{
	__u32 node = entry->path == PW_PATH_TUNNEL ? entry->node : 0;

	if (!may_change(entry->peer_identity))
		return entry->peer_identity;
	return pod_identity(address, node) ?: entry->peer_identity;
}

/* Index of the device that from_netdev looks at, 0 = none: the stack has what goes natively, both ways. */
static __always_inline __u32 native_device(void)
{
	__u32 zero = 0;
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	return settings ? settings->native_ifindex : 0;
}

/* The identity of a sender beyond this host. These count as the world: a node's address, which may hide any sender that
 * was masqueraded; an address of our own blocks that comes from outside, which is forged; and an address of a pod behind
 * the tunnel that comes without it. Flows that such a pod began go on, because its node may be changing the way.
 */
static __noinline int address_identity(struct __sk_buff *skb, const struct pw_flow *flow,
				       const struct pw_conntrack_value *entry)
{
	const __u32 distrusted = PW_IPCACHE_NODE_ADDRESS | PW_IPCACHE_LOCAL;
	struct pw_ipcache_value *prefix = find_prefix(flow->key.saddr);

	if (!prefix || prefix->flags & distrusted)
		return PW_IDENTITY_WORLD;
	if (prefix->flags & PW_IPCACHE_TUNNEL && skb->ingress_ifindex != tunnel_device())
		return entry ? present_identity(flow->key.saddr, entry) : PW_IDENTITY_WORLD;
	return prefix->identity;
}

/* Who sent what the host's stack hands to a pod: told by the device it came in through, whatever was translated on the
 * way. `sender` is room for a row.
 */
static __always_inline __u32 stack_identity(struct __sk_buff *skb, const struct pw_flow *flow,
					    const struct pw_conntrack_value *entry,
					    struct pw_config_value *sender)
{
	__u32 ifindex = sender_device(skb, flow);

	if (is_from_this_host(skb, flow))
		return PW_IDENTITY_HOST;
	if (ifindex && !copy_row(ifindex, sender))
		return sender->instance == flow->row.instance ? PW_IDENTITY_SELF : sender->identity;
	return address_identity(skb, flow, entry);
}

#endif
