// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* from_overlay: everything that comes out of the tunnel, at tc ingress of the tunnel device.
 *
 * Comes to: drop; straight into the local pod; or the host's stack, for an address of this node, or for an answer to
 * what a pod sent through it. Nothing is ever sent on to another node. The tunnel is believed no more than rule 9
 * allows: a sender that is no node, says another's identity, or sends in another's name is not heard.
 */
#include <linux/bpf.h>

#include <podwire/deliver.h>
#include <podwire/frame.h>

#define PW_QUARTER_SECOND_BITS 28 /* of nanoseconds, nearly */

#ifdef PW_TEST_BUILD
static __always_inline bool read_sender(struct __sk_buff *skb, struct pw_tunnel_end *end)
{
	const struct pw_tunnel_end *given;
	__u32 zero = 0;

	if (read_tunnel_key(skb, end))
		return true;
	given = bpf_map_lookup_elem(&pw_tunnel_key, &zero);
	if (!given)
		return false;
	*end = *given;
	return true;
}
#else
static __always_inline bool read_sender(struct __sk_buff *skb, struct pw_tunnel_end *end)
{
	return read_tunnel_key(skb, end);
}
#endif

/* What a node may say of its senders: never that they are this host, nobody, or something only we know. */
static __always_inline bool may_be_said(__u32 identity)
{
	switch (identity) {
	case PW_IDENTITY_WORLD:
	case PW_IDENTITY_HEALTH:
	case PW_IDENTITY_INIT:
	case PW_IDENTITY_REMOTE_NODE:
		return true;
	default:
		return identity >= PW_IDENTITY_FIXED_FIRST && identity <= PW_TUNNEL_ID_MAX;
	}
}

static __always_inline bool is_from_classic(const struct pw_flow *flow)
{
	const struct pw_node_value *node = find_node(flow->node);

	return node && is_classic(node);
}

/* Which node sent it, and whether a node may use this key. Until the packet itself is read, an event names the node's
 * address. `end` is on the program's stack, as Linux 6.1 wants keys to be.
 */
static __always_inline int check_sender(struct pw_flow *flow, const struct pw_tunnel_end *end)
{
	const __u32 *number;

	copy_address(flow->key.saddr, end->outer);
	flow->source_identity = end->tunnel_id;
	number = bpf_map_lookup_elem(&pw_node_numbers, end->outer);
	if (!number)
		return PW_DROP_TUNNEL_SOURCE;
	flow->node = *number;
	if (may_be_said(end->tunnel_id))
		return 0;
	if (end->tunnel_id != PW_TUNNEL_ID_CLASSIC || !is_from_classic(flow))
		return PW_DROP_TUNNEL_IDENTITY;
	flow->source_identity = PW_IDENTITY_UNKNOWN; /* its address will tell */
	return 0;
}

/* A function of its own, so that what it needs of the stack is given back before the packet is judged: the verifier
 * counts the deepest chain of calls, and rows of a next layout may be longer.
 */
PW_CHECKED_ALONE int identify_sender(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_tunnel_end end = {};

	if (!flow)
		return PW_DROP_INTERNAL;
	return read_sender(skb, &end) ? check_sender(flow, &end) : PW_DROP_TUNNEL_SOURCE;
}

static __always_inline bool is_no_source(struct pw_flow *flow)
{
	return is_multicast(flow->key.saddr) || is_unroutable(flow->key.saddr) ||
	       is_gateway(flow->key.saddr) || find_endpoint(flow->key.saddr);
}

/* A peer may send for its own pods and addresses. Any other sender it can only pass on as the world. A node's address
 * may hide a sender that the node masqueraded: when the peer says no more of it, it counts as the world, too.
 */
static __always_inline int check_inner_source(struct pw_flow *flow)
{
	const struct pw_node_value *node = find_node(flow->node);
	const struct pw_ipcache_value *prefix;

	if (!node)
		return PW_DROP_TUNNEL_SOURCE;
	if (flow->source_identity && is_classic(node))
		return PW_DROP_TUNNEL_IDENTITY;
	if (is_no_source(flow))
		return PW_DROP_TUNNEL_INNER;
	prefix = find_prefix(flow->key.saddr);
	if (prefix && prefix->node != flow->node)
		return PW_DROP_TUNNEL_INNER;
	flow->source_prefix_identity = prefix ? prefix->identity : PW_IDENTITY_WORLD;
	if (!flow->source_identity)
		flow->source_identity = prefix && prefix->flags & PW_IPCACHE_NODE_ADDRESS
						? PW_IDENTITY_WORLD
						: flow->source_prefix_identity;
	return prefix || flow->source_identity == PW_IDENTITY_WORLD ? 0 : PW_DROP_TUNNEL_INNER;
}

/* A pod of this node, else one of its addresses (flow->local tells), else nobody: nothing is forwarded. */
static __always_inline int find_receiver(struct pw_flow *flow)
{
	const struct pw_ipcache_value *prefix;
	int reason;

	if (is_multicast(flow->key.daddr))
		return PW_DROP_QUIET;
	reason = copy_target(flow);
	if (reason)
		return reason;
	if (flow->local) {
		flow->row = flow->target;
		flow->destination_identity = flow->row.identity;
		flow->instance = flow->row.instance;
		flow->key.instance = flow->row.instance;
		return 0;
	}
	prefix = find_prefix(flow->key.daddr);
	if (!prefix || prefix->identity != PW_IDENTITY_HOST ||
	    !(prefix->flags & PW_IPCACHE_NODE_ADDRESS))
		return PW_DROP_NO_POD;
	flow->destination_identity = PW_IDENTITY_HOST;
	return 0;
}

PW_CHECKED_ALONE int read_addresses(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (!flow)
		return PW_DROP_INTERNAL;
	return parse_network(skb, flow);
}

PW_CHECKED_ALONE int read_ports(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (!flow)
		return PW_DROP_INTERNAL;
	return parse_ports_of_packet(skb, flow);
}

static __always_inline int hand_to_stack(struct __sk_buff *skb, struct pw_flow *flow)
{
	clean_up(skb);
	flow->path = PW_PATH_STACK;
	flow->action = PW_ACTION_STACK;
	return 0;
}

/* A tunnel packet inside of a tunnel packet would come back as one of the node that sent it. */
static __always_inline int receive_for_host(struct __sk_buff *skb, struct pw_flow *flow)
{
	return check_inner_source(flow) ?:
	       read_ports(skb, flow) ?:
	       keep_fragment(flow) ?:
	       guard_tunnel_port(flow) ?:
	       hand_to_stack(skb, flow);
}

/* The entry of the flow tells that this sender is at this node, and which identity it came with. */
static __always_inline bool is_known(const struct pw_flow *flow,
				     const struct pw_conntrack_value *entry)
{
	return entry && !flow->here.related && entry->path == PW_PATH_TUNNEL &&
	       entry->node == flow->node && flow->source_identity &&
	       entry->peer_identity == flow->source_identity;
}

/* Is the sender's address still at that node? An address may move while its pod's peer is silent, so this is looked up
 * a few times a second for each flow, not for each packet.
 */
static __always_inline int check_known_source(struct pw_flow *flow,
					      struct pw_conntrack_value *entry)
{
	__u32 now = flow->now_ns >> PW_QUARTER_SECOND_BITS;
	int reason;

	if (entry->vouched == now)
		return 0;
	reason = check_inner_source(flow);
	if (!reason)
		entry->vouched = now;
	return reason;
}

/* An answer's other end is who our own question would be judged for now. */
PW_CHECKED_ALONE int identify(struct pw_flow *flow, struct pw_conntrack_value *entry)
{
	const struct pw_match *match;
	bool known;
	int reason;

	if (!flow)
		return PW_DROP_INTERNAL;
	match = &flow->here;
	known = is_known(flow, entry);
	reason = known ? check_known_source(flow, entry) : check_inner_source(flow);
	if (reason)
		return reason;
	if (entry && match->related)
		flow->source_identity = entry->peer_identity;
	else if (entry && match->reply && !known)
		flow->source_identity = flow->source_prefix_identity;
	return 0;
}

/* What a pod asked through the stack may have been translated there, and the answer has to be translated back. */
static __always_inline int take_in(struct __sk_buff *skb, struct pw_flow *flow,
				   struct pw_conntrack_value *entry)
{
	if (answers_by(&flow->here, entry, PW_PATH_STACK)) {
		if (entry->flags & PW_CONNTRACK_TRANSLATED && !flow->here.related)
			keep_alive(flow, &flow->here, entry);
		return hand_to_stack(skb, flow);
	}
	if (flow->ttl <= 1)
		return PW_DROP_TTL;
	flow->path = PW_PATH_TUNNEL;
	flow->here.peer_identity = flow->source_identity;
	return admit(skb, flow, &flow->row, &flow->here, entry);
}

/* Only a sender that may send is remembered: a fragment is looked at before it tells its ports. */
static __always_inline int receive_for_pod(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_conntrack_value *entry;
	int reason = flow->flags & PW_PACKET_FRAGMENT ? check_inner_source(flow) : 0;

	reason = reason ?:
			 read_ports(skb, flow) ?:
			 check_packet_to_pod(flow) ?:
			 keep_fragment(flow);
	if (reason)
		return reason;
	flow->now_ns = bpf_ktime_get_coarse_ns();
	entry = look_up_flow(skb, flow, &flow->here);
	return identify(flow, entry) ?: take_in(skb, flow, entry);
}

static __always_inline int receive(struct __sk_buff *skb, struct pw_flow *flow)
{
	return flow->local ? receive_for_pod(skb, flow) : receive_for_host(skb, flow);
}

SEC("tc")
int from_overlay(struct __sk_buff *skb)
{
	struct pw_flow *flow = begin_flow(PW_HOOK_FROM_OVERLAY);
	int outcome;

	if (!flow)
		return TC_ACT_SHOT;
	outcome = open_frame(skb, flow, PW_INGRESS) ?:
		  identify_sender(skb, flow) ?:
		  check_frame_to_pod(flow) ?:
		  read_addresses(skb, flow) ?:
		  find_receiver(flow) ?:
		  receive(skb, flow);
	return finish(skb, flow, outcome);
}

char _license[] SEC("license") = "Dual BSD/GPL";
