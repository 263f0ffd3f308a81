// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* from_netdev: what other nodes' pods send natively, at tc ingress of the device through which those nodes are reached.
 *
 * Comes to: straight into the local pod, if this node's stack need not see the flow; drop, where the pod's policy says
 * so; else on, untouched and uncounted, to whatever else looks at this device and to the stack. An address on a wire is
 * believed as at to_pod: as far as the ipcache places it at a node that is reached through this device.
 */
#include <linux/bpf.h>

#include <podwire/deliver.h>
#include <podwire/frame.h>

#define PW_NOT_OURS	       -2
#define PW_FAST_OPEN_BYTES_MAX 65535 /* that a SYN can carry */
#define PW_AWAITED_MAX	       4     /* as a client that asks several questions at once */
#define PW_AWAITED_NS	       1000000000LL

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

static __always_inline bool is_for_this_host(struct __sk_buff *skb, struct pw_flow *flow)
{
	return skb->pkt_type == PACKET_HOST && skb->ifindex == native_device() &&
	       !open_frame(skb, flow, PW_INGRESS) && is_ip(flow);
}

static __always_inline bool find_receiver(struct pw_flow *flow)
{
	if (copy_target(flow) || !flow->local)
		return false;
	flow->row = flow->target;
	flow->destination_identity = flow->row.identity;
	flow->instance = flow->row.instance;
	flow->key.instance = flow->row.instance;
	return true;
}

/* flow->native tells whether its source is a pod of a node that is reached past the stack. */
static __always_inline void find_sender(struct pw_flow *flow)
{
	const struct pw_ipcache_value *prefix = find_prefix(flow->key.saddr);

	if (!prefix || !(prefix->flags & PW_IPCACHE_DIRECT))
		return;
	flow->native = true;
	flow->node = prefix->node;
	flow->source_identity = prefix->identity;
}

/* The answer to a connection that the stack has translated can look like one of a direct connection of the same ports,
 * whose entry lives on: it was closed a moment ago, its end was lost, or nobody answered it. The numbers tell: an
 * answer acknowledges the SYN (with TCP Fast Open also some data, RFC 7413), and repeats its own sequence number. A SYN
 * that was answered may be answered anew with another number (SYN cookies), so nothing is told while it is not
 * confirmed.
 */
static __always_inline bool answers_another(const struct pw_flow *flow,
					    const struct pw_match *match,
					    const struct pw_conntrack_value *entry)
{
	if (!match->reply || !(flow->tcp_flags & PW_TCP_FLAG_SYN) || opens_tcp(flow->tcp_flags))
		return false;
	if (entry->tcp_state == PW_TCP_OPENING)
		return entry->answer &&
		       flow->tcp_acknowledged - entry->answer - 1 > PW_FAST_OPEN_BYTES_MAX;
	if (entry->tcp_state == PW_TCP_ESTABLISHED && !entry->answer)
		return false;
	return entry->tcp_state >= PW_TCP_ESTABLISHED && flow->tcp_sequence != entry->answer;
}

/* A datagram that went past the stack a moment ago has not been answered. Whatever was asked through the stack meanwhile
 * was asked later, and so is answered later.
 */
static __always_inline bool is_awaited(const struct pw_flow *flow,
				       const struct pw_conntrack_value *entry)
{
	return entry->packets[0] - entry->packets[1] - 1 < PW_AWAITED_MAX &&
	       (__s64)(flow->now_ns - entry->last_seen_ns) < PW_AWAITED_NS;
}

/* The answer to a datagram that the stack has translated looks like one to what the pod has sent past it by the same
 * port. Where that one is awaited, this is it. What goes to the stack needlessly reaches the pod, too.
 */
static __always_inline bool may_answer_stack(const struct pw_flow *flow,
					     const struct pw_conntrack_value *entry)
{
	return entry->path == PW_PATH_NATIVE && flow->here.reply && !is_awaited(flow, entry) &&
	       (is_stack_port(flow, flow->key.dport_be) || is_from_stack_peer(flow));
}

/* May the packet bypass the stack? Without an entry only when it cannot be the answer to a translated packet: it is the
 * first of a connection, and not from a pod here. An ICMP error takes the way of the flow that it is about.
 */
static __always_inline bool passes_stack_by(struct pw_flow *flow,
					    const struct pw_conntrack_value *entry)
{
	const struct pw_match *match = &flow->here;

	if (!entry)
		return flow->native && opens_tcp(flow->tcp_flags) &&
		       !find_endpoint(flow->key.saddr);
	if (match->related) {
		flow->source_identity = entry->peer_identity;
		return entry->path == PW_PATH_NATIVE;
	}
	if (!flow->native)
		return false;
	if (opens_tcp(flow->tcp_flags))
		return !belongs_to_stack(flow, entry);
	return entry->path == PW_PATH_NATIVE;
}

/* What the stack would answer, collect or refuse is left to it. */
static __always_inline bool is_deliverable(struct __sk_buff *skb, const struct pw_flow *flow)
{
	return flow->ttl > 1 && !check_packet_to_pod(flow) &&
	       (!flow->target.mtu || largest_piece(skb, flow) <= flow->target.mtu);
}

static __always_inline bool recognise(struct __sk_buff *skb, struct pw_flow *flow)
{
	if (!is_for_this_host(skb, flow) || read_addresses(skb, flow) || !is_plain(flow) ||
	    !find_receiver(flow))
		return false;
	find_sender(flow);
	if (!flow->native && flow->key.protocol != IPPROTO_ICMP &&
	    flow->key.protocol != IPPROTO_ICMPV6)
		return false;
	return !read_ports(skb, flow) && is_deliverable(skb, flow);
}

static __always_inline int receive(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_conntrack_value *entry;

	if (!recognise(skb, flow))
		return PW_NOT_OURS;
	flow->now_ns = bpf_ktime_get_coarse_ns();
	entry = look_up_flow(skb, flow, &flow->here);
	/* from here on both flows are the stack's, which alone can tell them apart */
	if (entry && (answers_another(flow, &flow->here, entry) || may_answer_stack(flow, entry)))
		entry->path = PW_PATH_STACK;
	if (!passes_stack_by(flow, entry))
		return PW_NOT_OURS;
	flow->path = PW_PATH_NATIVE;
	flow->here.peer_identity = flow->source_identity;
	return admit(skb, flow, &flow->row, &flow->here, entry);
}

SEC("tc")
int from_netdev(struct __sk_buff *skb)
{
	struct pw_flow *flow = begin_flow(PW_HOOK_FROM_NETDEV);
	int outcome;

	if (!flow)
		return TC_ACT_SHOT;
	outcome = receive(skb, flow);
	if (outcome != PW_NOT_OURS)
		return finish(skb, flow, outcome);
	flow->action = PW_ACTION_STACK;
	record_decision(skb, flow, 0);
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
