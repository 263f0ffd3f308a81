/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* deliver.h: the last steps of a packet: into a local pod, to another node, or out of the program (rules 7, 13). */
#ifndef PODWIRE_DELIVER_H
#define PODWIRE_DELIVER_H

#include <podwire/events.h>
#include <podwire/path.h>
#include <podwire/remember.h>
#include <podwire/rewrite.h>

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#define PW_AF_INET  2
#define PW_AF_INET6 10

/* One router less to go. Only the checksum's part that changes is computed (RFC 1624). */
static __always_inline bool decrement_ttl(struct __sk_buff *skb, const struct pw_flow *flow)
{
	void *network = (void *)(long)skb->data + pw_link_header_bytes;
	void *end = (void *)(long)skb->data_end;
	struct ipv6hdr *six = network;
	struct iphdr *four = network;
	__u32 check;

	if (flow->ethertype == ETH_P_IPV6) {
		if ((void *)(six + 1) > end)
			return false;
		six->hop_limit -= 1;
		/* what a device has summed up: IPv4 headers always come to the same, this one is less by one */
		bpf_csum_update(skb, ~(__u32)bpf_htons(1));
		return true;
	}
	if ((void *)(four + 1) > end)
		return false;
	check = four->check + bpf_htons(0x0100);
	four->check = check + (check >= 0xffff);
	four->ttl -= 1;
	return true;
}

static __always_inline bool readdress(struct __sk_buff *skb, const __u8 *destination,
				      const __u8 *source)
{
	struct ethhdr *ethernet = (void *)(long)skb->data;

	if ((void *)(ethernet + 1) > (void *)(long)skb->data_end)
		return false;
	__builtin_memcpy(ethernet->h_dest, destination, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, source, ETH_ALEN);
	return true;
}

/* Makes the frame one that a router sends on. A sender of raw frames may keep its headers out of the linear part. */
static __always_inline int forward_frame(struct __sk_buff *skb, const struct pw_flow *flow,
					 const __u8 *destination, const __u8 *source)
{
	__u32 headers =
		pw_link_header_bytes +
		(flow->ethertype == ETH_P_IP ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));

	if ((void *)(long)skb->data + headers > (void *)(long)skb->data_end &&
	    bpf_skb_pull_data(skb, headers))
		return PW_DROP_INTERNAL;
	return decrement_ttl(skb, flow) && readdress(skb, destination, source) ? 0
									       : PW_DROP_INTERNAL;
}

/* The pod must not see a mark of ours, and takes no frame that is not for it. */
static __always_inline void clean_up(struct __sk_buff *skb)
{
	if (skb->mark)
		skb->mark = 0;
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
}

/* What comes home to the pod that asked a service comes from the service. */
static __always_inline int come_home(struct __sk_buff *skb, const struct pw_flow *flow,
				     const struct pw_match *match,
				     const struct pw_conntrack_value *entry)
{
	if (!entry || entry->kind != PW_CONNTRACK_OF_BACK_END || !match->reply)
		return 0;
	if (match->related)
		return write_error(skb, flow, entry);
	return write_service(skb, flow, entry);
}

/* The receiver's verdict, its entry, its frame. `row` and `match` are the receiver's, which is flow->target. */
static __always_inline int admit(struct __sk_buff *skb, struct pw_flow *flow,
				 const struct pw_config_value *row, struct pw_match *match,
				 struct pw_conntrack_value *entry)
{
	int reason = judge(skb, flow, row, match, entry) ?:
		     remember(flow, row, match, entry) ?:
		     come_home(skb, flow, match, entry) ?:
		     forward_frame(skb, flow, flow->target.pod_mac, flow->target.host_mac);

	if (!reason)
		flow->action =
			flow->target.flags & PW_CONFIG_SHAPED ? PW_ACTION_EGRESS : PW_ACTION_PEER;
	return reason;
}

static __always_inline int deliver_to_pod(struct __sk_buff *skb, struct pw_flow *flow,
					  struct pw_conntrack_value *there)
{
	flow->there.peer_identity = flow->source_identity;
	if (flow->target.instance == flow->row.instance)
		flow->there.peer_identity = PW_IDENTITY_SELF;
	flow->sender_rule = flow->rule;
	flow->sender_said = flow->said;
	stand_at(flow, &flow->target, PW_INGRESS);
	return admit(skb, flow, &flow->target, &flow->there, there);
}

/* What leads to a node that is just leaving goes where the stack's routes lead. */
PW_CHECKED_ALONE int enter_tunnel(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_node_value *node;
	int reason;

	if (!flow)
		return PW_DROP_INTERNAL;
	node = find_node(flow->node);
	flow->action = PW_ACTION_STACK;
	if (!node)
		return 0;
	reason = forward_frame(skb, flow, node->mac, flow->row.host_mac)
			 ?: set_tunnel_key(skb, node, flow->source_identity);
	flow->action = reason ? PW_ACTION_DROP : PW_ACTION_TUNNEL;
	return reason;
}

/* By the next hop that the node's row has; nothing but its link address is looked up. */
PW_CHECKED_ALONE int leave_natively(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct bpf_redir_neigh hop = {};
	struct pw_node_value *node;
	int reason;

	if (!flow)
		return PW_DROP_INTERNAL;
	node = find_node(flow->node);
	if (node && must_be_encrypted(node))
		return PW_DROP_NOT_ENCRYPTED;
	flow->action = PW_ACTION_STACK;
	if (!node)
		return 0;
	if (flow->ethertype == ETH_P_IP) {
		hop.nh_family = PW_AF_INET;
		__builtin_memcpy(&hop.ipv4_nh, node->hop_ipv4, sizeof(hop.ipv4_nh));
	} else {
		hop.nh_family = PW_AF_INET6;
		copy_address(hop.ipv6_nh, node->hop_ipv6);
	}
	if (is_unspecified(hop.ipv6_nh))
		return 0;
	reason = forward_frame(skb, flow, flow->row.pod_mac, flow->row.host_mac);
	flow->action = reason ? PW_ACTION_DROP : PW_ACTION_NATIVE;
	if (!reason && bpf_redirect_neigh(native_device(), &hop, sizeof(hop), 0) != TC_ACT_REDIRECT)
		reason = PW_DROP_INTERNAL;
	return reason;
}

/* The stack's routes lead to the node that the packet is for, too. */
static __always_inline int leave_by_stack(struct __sk_buff *skb, struct pw_flow *flow)
{
	const struct pw_node_value *node = flow->node ? find_node(flow->node) : NULL;

	if (node && must_be_encrypted(node))
		return PW_DROP_NOT_ENCRYPTED;
	if (flow->flags & PW_PACKET_FRAGMENT && flow->ethertype == ETH_P_IPV6)
		skb->mark = PW_MARK_POD_PIECE;
	flow->action = PW_ACTION_STACK;
	return 0;
}

static __always_inline int deliver(struct __sk_buff *skb, struct pw_flow *flow,
				   struct pw_conntrack_value *there)
{
	int reason;

	if (flow->path != PW_PATH_STACK && flow->ttl <= 1) {
		complain(skb, flow, PW_SAY_EXPIRED, PW_SAY_EXPIRED_V6, 0);
		return PW_DROP_TTL;
	}
	if (flow->original.translated) {
		reason = write_back_end(skb, flow);
		if (reason)
			return reason;
	}
	if (flow->path == PW_PATH_STACK)
		return leave_by_stack(skb, flow);
	if (flow->path == PW_PATH_LOCAL)
		return deliver_to_pod(skb, flow, there);
	return flow->path == PW_PATH_NATIVE ? leave_natively(skb, flow) : enter_tunnel(skb, flow);
}

static __always_inline int leave(struct __sk_buff *skb, const struct pw_flow *flow)
{
	switch (flow->action) {
	case PW_ACTION_STACK:
		return TC_ACT_OK;
	case PW_ACTION_PEER:
		clean_up(skb);
		return bpf_redirect_peer(flow->target.ifindex, 0);
	case PW_ACTION_ANSWER:
		clean_up(skb);
		return bpf_redirect_peer(skb->ifindex, 0);
	case PW_ACTION_EGRESS:
		skb->mark = PW_MARK_JUDGED;
		return bpf_redirect(flow->target.ifindex, 0);
	case PW_ACTION_NATIVE:
		skb->mark = 0;
		return TC_ACT_REDIRECT;
	case PW_ACTION_TUNNEL:
		skb->mark = 0;
		return bpf_redirect(tunnel_device(), 0);
	default:
		return TC_ACT_SHOT;
	}
}

/* Counts, tells and does what the steps came to. */
static __always_inline int finish(struct __sk_buff *skb, struct pw_flow *flow, int outcome)
{
	__u8 reason = outcome == PW_DONE ? 0 : outcome;

	count_packet(flow, skb->len, reason);
	if (reason || has_news(flow))
		tell(skb, flow, reason);
	record_decision(skb, flow, reason);
	return leave(skb, flow);
}

#endif
