/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* path.h: which way a judged packet of a pod takes, and whether it fits (rules 2, 3, 10, 16). */
#ifndef PODWIRE_PATH_H
#define PODWIRE_PATH_H

#include <podwire/icmp_error.h>
#include <podwire/identity.h>
#include <podwire/judge.h>
#include <podwire/related.h>
#include <podwire/stack_ports.h>
#include <podwire/tunnel.h>

#define PW_GSO_BY_FRAGMENTS 0xffff /* gso_size where every piece has a size of its own (SCTP) */

/* Which endpoint's edge the packet is about to cross: what conntrack is asked and told from here on. */
static __always_inline void stand_at(struct pw_flow *flow, const struct pw_config_value *row,
				     __u8 direction)
{
	flow->key.instance = row->instance;
	flow->key.direction = direction;
}

/* Does the packet leave by `path` whatever its destination is? An answer takes the way of the question. */
static __always_inline bool answers_by(const struct pw_match *match,
				       const struct pw_conntrack_value *entry, enum pw_path path)
{
	return entry && (match->reply || match->related) && entry->path == path;
}

/* An answer to what came by the tunnel, to the node that it came from. */
static __always_inline void answer_node(struct pw_flow *flow, __u32 number)
{
	struct pw_node_value *node;

	flow->node = number;
	node = find_node(flow->node);
	if (node)
		flow->path_mtu = node->mtu;
}

/* TCP that has begun through the tunnel goes on that way when the peer's other connections take another one. */
static __always_inline void keep_to_tunnel(struct pw_flow *flow,
					   const struct pw_conntrack_value *entry)
{
	if (entry && entry->path == PW_PATH_TUNNEL && !flow->here.reply && !flow->local &&
	    (!flow->node || flow->native) && is_midstream(flow)) {
		flow->node = entry->node;
		flow->native = false;
	}
}

/* Fills the identity of the other end, and where it is. What goes back through the stack may be translated there, and
 * what came by the tunnel said itself who it is: the entry knows, as long as its address tells nothing newer.
 */
PW_CHECKED_ALONE int resolve_destination(struct pw_flow *flow,
					 const struct pw_conntrack_value *entry)
{
	bool tunnel;
	int reason;

	if (!flow)
		return PW_DROP_INTERNAL;
	tunnel = answers_by(&flow->here, entry, PW_PATH_TUNNEL);
	if (tunnel || answers_by(&flow->here, entry, PW_PATH_STACK)) {
		flow->destination_identity = present_identity(flow->key.daddr, entry);
		if (tunnel)
			answer_node(flow, entry->node);
		return 0;
	}
	reason = find_destination(flow);
	if (reason)
		return reason;
	keep_to_tunnel(flow, entry);
	return 0;
}

/* What began in mid-stream stays on the stack, which alone knows whether it is translated, until its ports are used
 * for a new connection.
 */
static __always_inline bool is_bound_to_stack(const struct pw_flow *flow,
					      const struct pw_conntrack_value *entry)
{
	const struct pw_match *match = &flow->here;

	if (match->picked_up)
		return true;
	return entry && !match->reply && entry->flags & PW_CONNTRACK_PICKED_UP &&
	       !opens_tcp(flow->tcp_flags);
}

/* The target has its say too: it has no entry in mid-stream, or began the flow through the stack. */
static __always_inline bool target_wants_stack(const struct pw_flow *flow,
					       const struct pw_conntrack_value *there)
{
	if (!there)
		return is_midstream(flow);
	return answers_by(&flow->there, there, PW_PATH_STACK);
}

/* A node passes all of a connection through its stack or nothing: a tunnel that was not there when it began is not
 * taken (rule 2).
 */
static __always_inline bool began_through_stack(const struct pw_flow *flow,
						const struct pw_conntrack_value *entry)
{
	const struct pw_match *match = &flow->here;

	return entry && !match->reply && !match->related && entry->path == PW_PATH_STACK &&
	       is_midstream(flow);
}

/* Whole, and with nothing between its network header and its transport header that a router would have to look at. */
static __always_inline bool is_plain(const struct pw_flow *flow)
{
	__u32 header_bytes =
		flow->ethertype == ETH_P_IP ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);

	return !(flow->flags & PW_PACKET_FRAGMENT) &&
	       flow->transport_offset == pw_link_header_bytes + header_bytes + flow->jumbo_bytes;
}

/* The stack has seen the flow begin, and may have translated it. A new connection of the same ports is another flow. */
static __always_inline bool belongs_to_stack(const struct pw_flow *flow,
					     const struct pw_conntrack_value *entry)
{
	return entry->path == PW_PATH_STACK &&
	       !(opens_tcp(flow->tcp_flags) && entry->tcp_state == PW_TCP_CLOSED);
}

/* What the stack would do more than pass on is left to it: answers about size and time, pieces, options. An ICMP error
 * about a flow that nobody remembers may be about one that the stack translates.
 */
static __always_inline bool may_pass_stack_by(const struct pw_flow *flow,
					      const struct pw_conntrack_value *entry)
{
	if (entry ? belongs_to_stack(flow, entry) : flow->flags & PW_PACKET_ICMP_ERROR)
		return false;
	return is_plain(flow) && flow->ttl > 1 && flow->path_mtu && native_device() &&
	       !is_stack_port(flow, flow->key.sport_be);
}

/* Nobody but this host speaks to tunnels. */
static __always_inline int guard_tunnel_port(const struct pw_flow *flow)
{
	__u32 zero = 0;
	const struct pw_settings *settings;

	if (flow->key.protocol != IPPROTO_UDP)
		return 0;
	settings = bpf_map_lookup_elem(&pw_settings, &zero);
	if (!settings)
		return PW_DROP_INTERNAL;
	return settings->tunnel_port && bpf_ntohs(flow->key.dport_be) == settings->tunnel_port
		       ? PW_DROP_TUNNEL_PORT
		       : 0;
}

/* A pod that asked from that port is answered: at its address there is no tunnel. */
static __always_inline int guard_tunnel_ends(const struct pw_flow *flow,
					     const struct pw_conntrack_value *entry)
{
	int reason = guard_tunnel_port(flow);

	if (reason && entry && flow->here.reply && is_pod_address(flow->key.daddr))
		return 0;
	return reason;
}

/* `here` and `there` are what the sender and, for a local pod, the receiver remember. */
PW_CHECKED_ALONE int choose_path(struct __sk_buff *skb, struct pw_flow *flow,
				 const struct pw_conntrack_value *here,
				 const struct pw_conntrack_value *there)
{
	if (!flow)
		return PW_DROP_INTERNAL;
	flow->path = PW_PATH_STACK;
	if (flow->unreachable) {
		complain(skb, flow, PW_SAY_NOBODY, PW_SAY_NOBODY_V6, 0);
		return PW_DROP_NO_POD;
	}
	if (is_bound_to_stack(flow, here))
		return 0;
	if (flow->local && !target_wants_stack(flow, there))
		flow->path = PW_PATH_LOCAL;
	if (flow->node && flow->native) {
		if (may_pass_stack_by(flow, here))
			flow->path = PW_PATH_NATIVE;
	} else if (flow->node && tunnel_device() && !began_through_stack(flow, here)) {
		flow->path = PW_PATH_TUNNEL;
	}
	return 0;
}

/* Size of the largest packet that this one is on a wire. */
static __always_inline __u32 largest_piece(struct __sk_buff *skb, const struct pw_flow *flow)
{
	__u32 headers = flow->transport_offset - pw_link_header_bytes +
			flow->transport_header_bytes - flow->jumbo_bytes;

	if (!skb->gso_size)
		return flow->packet_bytes;
	return skb->gso_size == PW_GSO_BY_FRAGMENTS ? 0 : headers + skb->gso_size;
}

/* A datagram that its pod has cut for a larger MTU: some pieces are too big, the last one seldom is. The stack collects
 * all of them before it cuts anew, so all take its way.
 */
static __always_inline bool is_cut_too_large(const struct pw_flow *flow)
{
	return flow->flags & PW_PACKET_FRAGMENT && flow->ethertype == ETH_P_IP && flow->path_mtu &&
	       flow->row.mtu > flow->path_mtu && !(flow->flags & PW_PACKET_DONT_FRAGMENT);
}

/* Too big and allowed to be cut: the stack does that. To a local pod through the stack: the stack compares. */
PW_CHECKED_ALONE int check_size(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (!flow)
		return PW_DROP_INTERNAL;
	if (is_cut_too_large(flow)) {
		flow->path = PW_PATH_STACK;
		return 0;
	}
	if (!flow->path_mtu || largest_piece(skb, flow) <= flow->path_mtu ||
	    (flow->local && flow->path == PW_PATH_STACK))
		return 0;
	if (!(flow->flags & PW_PACKET_DONT_FRAGMENT)) {
		flow->path = PW_PATH_STACK;
		return 0;
	}
	complain(skb, flow, PW_SAY_TOO_BIG, PW_SAY_TOO_BIG_V6, flow->path_mtu);
	return PW_DROP_MTU;
}

#endif
