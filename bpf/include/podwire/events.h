/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* events.h: everything that can be seen from outside: counters, events, and in test builds the decision. */
#ifndef PODWIRE_EVENTS_H
#define PODWIRE_EVENTS_H

#include <linux/if_ether.h>

#include <podwire/flow.h>

/* Events of one endpoint in one second. A flood fills its own share, not the ring, nor the time of its reader. */
#define PW_DROPS_PER_SECOND    200
#define PW_VERDICTS_PER_SECOND 100
#define PW_TRACES_PER_SECOND   400 /* verdicts of a watched endpoint included; they may go beyond */
#define PW_NS_PER_SECOND       1000000000ULL

_Static_assert(PW_DROP_REASONS <= PW_METRICS_REASONS, "every reason has a counter");

static __always_inline void count_packet(const struct pw_flow *flow, __u32 bytes, __u8 reason)
{
	__u32 index = (flow->hook * PW_METRICS_REASONS + reason) * PW_METRICS_PATHS + flow->path;
	struct pw_counter *counter = bpf_map_lookup_elem(&pw_metrics, &index);

	if (!counter)
		return;
	counter->packets += 1;
	counter->bytes += bytes;
}

/* Counts an event of this second; false = it is one too many. Races only blur the limit. */
static __always_inline bool take_event(struct pw_usage_value *usage, __u64 now_ns, __u16 limit,
				       bool drop)
{
	__u16 *count = drop ? &usage->drops : &usage->passes;
	__u32 second = now_ns / PW_NS_PER_SECOND;

	if (usage->event_second != second) {
		usage->event_second = second;
		usage->drops = 0;
		usage->passes = 0;
	}
	if (*count >= limit)
		return false;
	*count += 1;
	return true;
}

/* What passes has a count of its own, so that it never hides a drop; and traces leave room for verdicts. */
static __always_inline __u16 event_limit(const struct pw_flow *flow, __u32 kind)
{
	if (kind == PW_EVENT_DROP)
		return PW_DROPS_PER_SECOND;
	if (kind == PW_EVENT_TRACE)
		return PW_TRACES_PER_SECOND;
	return flow->row.flags & PW_CONFIG_TRACE ? PW_TRACES_PER_SECOND + PW_VERDICTS_PER_SECOND
						 : PW_VERDICTS_PER_SECOND;
}

/* Who the other end was: nobody has the identity by which an endpoint's own packets are judged. */
static __always_inline __u32 known_identity(const struct pw_flow *flow, __u32 identity)
{
	return identity == PW_IDENTITY_SELF ? flow->row.identity : identity;
}

static __always_inline void fill_event(struct __sk_buff *skb, const struct pw_flow *flow,
				       struct pw_event *event)
{
	event->instance = flow->instance ? flow->instance : flow->row.instance;
	event->source_identity = known_identity(flow, flow->source_identity);
	event->destination_identity = known_identity(flow, flow->destination_identity);
	event->length_bytes = skb->len;
	event->rule = flow->rule;
	event->ifindex = flow->row.ifindex ? flow->row.ifindex : skb->ifindex;
	event->policy_revision = flow->local && flow->instance == flow->target.instance
					 ? flow->target.policy_revision
					 : flow->row.policy_revision;
	event->hook = flow->hook;
	event->direction = flow->direction;
	event->path = flow->path;
	event->protocol = flow->key.protocol;
	event->tcp_flags = flow->tcp_flags;
	event->ethertype = flow->ethertype;
	event->sport_be = flow->key.sport_be;
	event->dport_be = flow->key.dport_be;
	copy_address(event->saddr, flow->key.saddr);
	copy_address(event->daddr, flow->key.daddr);
	if (flow->original.translated) {
		copy_address(event->original_daddr, flow->original.addr);
		event->original_dport_be = flow->original.dport_be;
	}
	if (flow->action == PW_ACTION_ANSWER ||
	    bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_source), event->source_mac, ETH_ALEN))
		__builtin_memcpy(event->source_mac, flow->row.pod_mac, ETH_ALEN);
}

/* What comes by the tunnel and belongs to no endpoint has one share together. */
static __always_inline struct pw_usage_value *find_usage(const struct pw_flow *flow)
{
	__u32 instance = flow->row.instance;

	if (instance)
		return bpf_map_lookup_elem(&pw_usage, &instance);
	if (flow->hook != PW_HOOK_FROM_OVERLAY && flow->hook != PW_HOOK_TO_OVERLAY)
		return NULL;
	return bpf_map_lookup_elem(&pw_strangers, &instance);
}

/* An endpoint that is over its limit, or a full ring: counted, and told with the next event that gets through. */
PW_CHECKED_ALONE int send_event(struct __sk_buff *skb, struct pw_flow *flow, __u32 kind,
				__u32 reason)
{
	struct pw_usage_value *usage;
	__u64 now_ns = bpf_ktime_get_boot_ns();
	struct pw_event *event = NULL;

	if (!flow)
		return 0;
	usage = find_usage(flow);
	if (!usage)
		return 0;
	if (take_event(usage, now_ns, event_limit(flow, kind), kind == PW_EVENT_DROP))
		event = bpf_ringbuf_reserve(&pw_events, sizeof(*event), 0);
	if (!event) {
		usage->events_lost += 1;
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->time_ns = now_ns;
	event->kind = kind;
	event->reason = reason;
	event->lost = usage->events_lost;
	usage->events_lost = 0;
	fill_event(skb, flow, event);
	bpf_ringbuf_submit(event, 0);
	return 0;
}

static __always_inline bool is_told(__u8 said)
{
	return said & (PW_SAID_BY_SLOT | PW_SAID_AUDIT);
}

static __always_inline void tell_verdict(struct __sk_buff *skb, struct pw_flow *flow, __u8 said)
{
	send_event(skb, flow, PW_EVENT_POLICY, said & PW_SAID_AUDIT ? PW_DROP_POLICY : 0);
}

/* What the sender's side said, before the target's side spoke. */
static __always_inline void tell_sender_verdict(struct __sk_buff *skb, struct pw_flow *flow)
{
	__u32 rule = flow->rule;

	flow->instance = flow->row.instance;
	flow->direction = PW_EGRESS;
	flow->rule = flow->sender_rule;
	tell_verdict(skb, flow, flow->sender_said);
	flow->instance = flow->target.instance;
	flow->direction = PW_INGRESS;
	flow->rule = rule;
}

/* Most packets go on with what is known of their flow, and nobody watches them. */
static __always_inline bool has_news(const struct pw_flow *flow)
{
	return (flow->said | flow->sender_said) &
		       (PW_SAID_NEW_FLOW | PW_SAID_BY_SLOT | PW_SAID_AUDIT) ||
	       flow->row.flags & PW_CONFIG_TRACE;
}

/* Drops are told always, and so is each new flow, by both ends where rules decided; passes where someone watches. */
PW_CHECKED_ALONE int tell(struct __sk_buff *skb, struct pw_flow *flow, __u32 reason)
{
	if (!flow)
		return 0;
	if (reason)
		return send_event(skb, flow, PW_EVENT_DROP, reason);
	if (is_told(flow->sender_said))
		tell_sender_verdict(skb, flow);
	if (is_told(flow->said))
		tell_verdict(skb, flow, flow->said);
	else if (is_told(flow->sender_said))
		return 0;
	else if (flow->said & PW_SAID_NEW_FLOW)
		send_event(skb, flow, PW_EVENT_POLICY, 0);
	else if (flow->row.flags & PW_CONFIG_TRACE)
		send_event(skb, flow, flow->said & PW_SAID_ANEW ? PW_EVENT_POLICY : PW_EVENT_TRACE,
			   0);
	return 0;
}

#ifdef PW_TEST_BUILD
PW_CHECKED_ALONE int record_decision(struct __sk_buff *skb, const struct pw_flow *flow,
				     __u32 reason)
{
	struct bpf_tunnel_key tunnel = {};
	struct pw_decision decision;
	__u32 zero = 0;

	if (!flow)
		return 0;
	if (bpf_skb_get_tunnel_key(skb, &tunnel, sizeof(tunnel), 0))
		bpf_skb_get_tunnel_key(skb, &tunnel, sizeof(tunnel), BPF_F_TUNINFO_IPV6);
	decision = (struct pw_decision){
		.action = flow->action,
		.reason = reason,
		.path = flow->path,
		.target_ifindex = flow->local ? flow->target.ifindex : 0,
		.instance = flow->instance,
		.direction = flow->direction,
		.source_identity = known_identity(flow, flow->source_identity),
		.destination_identity = known_identity(flow, flow->destination_identity),
		.rule = flow->rule,
		.sender_rule = flow->sender_rule,
		.audited = !!((flow->said | flow->sender_said) & PW_SAID_AUDIT),
		.node = flow->node,
		.tunnel_id = tunnel.tunnel_id,
	};
	return bpf_map_update_elem(&pw_decision, &zero, &decision, BPF_ANY);
}
#else
static __always_inline int record_decision(struct __sk_buff *skb, const struct pw_flow *flow,
					   __u8 reason)
{
	(void)skb;
	(void)flow;
	(void)reason;
	return 0;
}
#endif

#endif
