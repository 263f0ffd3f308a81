// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* to_overlay: everything that enters the tunnel, at tc egress of the tunnel device.
 *
 * All of it leaves with the node's mark, and a classic device, which chooses the far end itself, wants no more.
 * What from_pod sent here has its key and goes on. What the host's stack sends here gets one: who it is for the other
 * end is told by the device it came in through, as at to_pod (rule 1).
 */
#include <linux/bpf.h>

#include <podwire/deliver.h>
#include <podwire/frame.h>

/* The pod's row, where a pod sent it, is kept: an event is about that pod. */
static __always_inline __u32 sender_identity(struct __sk_buff *skb, struct pw_flow *flow)
{
	__u32 ifindex = sender_device(skb, flow);

	if (is_from_this_host(skb, flow))
		return PW_IDENTITY_REMOTE_NODE;
	if (!ifindex || copy_row(ifindex, &flow->row))
		return PW_IDENTITY_WORLD;
	flow->instance = flow->row.instance;
	flow->key.instance = flow->row.instance;
	return flow->row.identity;
}

static __always_inline bool find_receiver(struct pw_flow *flow)
{
	const struct pw_ipcache_value *prefix = find_prefix(flow->key.daddr);

	if (!prefix || !(prefix->flags & PW_IPCACHE_TUNNEL))
		return false;
	flow->node = prefix->node;
	flow->destination_identity = prefix->identity;
	return true;
}

PW_CHECKED_ALONE int read_ports(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (!flow)
		return PW_DROP_INTERNAL;
	return parse_ports_of_packet(skb, flow);
}

/* An entry that from_pod has written about the packet, when it gave it to the stack. An entry of another way is about
 * what the pod has sent directly, by the same ports.
 */
static __always_inline bool is_told_by_from_pod(const struct pw_flow *flow,
						const struct pw_conntrack_value *entry)
{
	return !(entry->flags & PW_CONNTRACK_TRANSLATED) && entry->path == PW_PATH_STACK &&
	       !begins_anew(flow, entry);
}

/* A pod's packet under a tuple that from_pod has not seen was translated by the stack, and so has to be its answer,
 * which comes to from_overlay under this tuple (rule 2). What is remembered of it is judged whenever it is used: it
 * shows the way and allows nothing. Where the pod has sent directly by the same ports, the latest packet decides.
 */
static __always_inline int remember_translation(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_match *match = &flow->here;
	struct pw_conntrack_value *entry;

	if (!flow->instance || !has_address(&flow->row, flow->key.saddr) || read_ports(skb, flow) ||
	    keep_fragment(flow))
		return 0;
	flow->now_ns = bpf_ktime_get_coarse_ns();
	entry = look_up_flow(skb, flow, match);
	if (entry && (match->reply || is_told_by_from_pod(flow, entry)))
		return 0;
	match->translated = true;
	match->peer_identity = flow->destination_identity;
	flow->path = PW_PATH_STACK;
	return remember(flow, &flow->row, match, entry);
}

PW_CHECKED_ALONE int read_addresses(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (!flow)
		return PW_DROP_INTERNAL;
	return parse_network(skb, flow);
}

/* Functions of their own, so that what a key needs of the stack is given back: rows of a next layout may be longer. */
PW_CHECKED_ALONE int is_under_way(struct __sk_buff *skb)
{
	return has_tunnel_key(skb);
}

PW_CHECKED_ALONE int address_to_node(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_node_value *node;
	int reason;

	if (!flow)
		return PW_DROP_INTERNAL;
	node = find_node(flow->node);
	if (!node)
		return PW_DROP_NO_NODE;
	flow->path = PW_PATH_TUNNEL;
	reason = bpf_skb_store_bytes(skb, 0, node->mac, ETH_ALEN, 0)
			 ? PW_DROP_INTERNAL
			 : set_tunnel_key(skb, node, flow->source_identity);
	if (!reason)
		flow->action = PW_ACTION_STACK;
	return reason;
}

static __always_inline int enter_from_stack(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (is_multicast(flow->key.daddr))
		return PW_DROP_QUIET;
	flow->source_identity = sender_identity(skb, flow);
	if (!find_receiver(flow))
		return PW_DROP_NO_NODE;
	return remember_translation(skb, flow) ?: address_to_node(skb, flow);
}

SEC("tc")
int to_overlay(struct __sk_buff *skb)
{
	struct pw_flow *flow;
	int outcome;

	if (skb->ifindex != tunnel_device() || is_under_way(skb)) {
		mark_as_tunnelled(skb);
		return TC_ACT_OK;
	}
	flow = begin_flow(PW_HOOK_TO_OVERLAY);
	if (!flow)
		return TC_ACT_SHOT;
	outcome = open_frame(skb, flow, PW_EGRESS) ?:
		  check_frame_to_pod(flow) ?:
		  read_addresses(skb, flow) ?:
		  enter_from_stack(skb, flow);
	mark_as_tunnelled(skb); /* the mark that was there has told whose piece it is */
	return finish(skb, flow, outcome);
}

char _license[] SEC("license") = "Dual BSD/GPL";
