/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* events.h: everything that can be seen from outside: counters, events, and in test builds the decision. */
#ifndef PODWIRE_EVENTS_H
#define PODWIRE_EVENTS_H

#include <linux/if_ether.h>

#include <podwire/flow.h>

/* Events of one endpoint in one second. A flood fills its own share, not the ring, nor the time of who reads it. */
#define PW_DROPS_PER_SECOND  200
#define PW_TRACES_PER_SECOND 400
#define PW_NS_PER_SECOND     1000000000ULL

/* One row per hook, reason and path, made on its first packet. */
static __always_inline void count_packet(const struct pw_flow *flow, __u32 bytes, __u8 reason)
{
	struct pw_metrics_key key = {.hook = flow->hook, .reason = reason, .path = flow->path};
	struct pw_counter *counter = bpf_map_lookup_elem(&pw_metrics, &key);

	if (!counter) {
		struct pw_counter first = {};

		bpf_map_update_elem(&pw_metrics, &key, &first, BPF_NOEXIST);
		counter = bpf_map_lookup_elem(&pw_metrics, &key);
		if (!counter)
			return;
	}
	counter->packets += 1;
	counter->bytes += bytes;
}

/* Counts an event of this second; false = it is one too many. Races only blur the limit. */
static __always_inline bool take_event(struct pw_usage_value *usage, __u64 now_ns, __u32 limit)
{
	__u32 second = now_ns / PW_NS_PER_SECOND;

	if (usage->event_second != second) {
		usage->event_second = second;
		usage->events = 0;
	}
	if (usage->events >= limit)
		return false;
	usage->events += 1;
	return true;
}

static __always_inline void fill_event(struct __sk_buff *skb, const struct pw_flow *flow,
				       struct pw_event *event)
{
	event->instance = flow->instance ? flow->instance : flow->row.instance;
	event->source_identity = flow->source_identity;
	event->destination_identity = flow->destination_identity;
	event->length_bytes = skb->len;
	event->rule = flow->rule;
	event->ifindex = flow->row.ifindex;
	event->policy_revision = flow->row.policy_revision;
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
	if (flow->action == PW_ACTION_ANSWER ||
	    bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_source), event->source_mac, ETH_ALEN))
		__builtin_memcpy(event->source_mac, flow->row.pod_mac, ETH_ALEN);
}

/* An endpoint that is over its limit, or a full ring: counted, and told with the next event that gets through. */
PW_CHECKED_ALONE int send_event(struct __sk_buff *skb, struct pw_flow *flow, __u32 kind,
				__u32 reason)
{
	__u32 limit = kind == PW_EVENT_DROP ? PW_DROPS_PER_SECOND : PW_TRACES_PER_SECOND;
	struct pw_usage_value *usage;
	__u64 now_ns = bpf_ktime_get_boot_ns();
	struct pw_event *event = NULL;
	__u32 instance;

	if (!flow)
		return 0;
	/* One counter for both: what passes of a watched pod took of it must not hide its drops. */
	if (kind == PW_EVENT_DROP && flow->row.flags & (PW_CONFIG_TRACE | PW_CONFIG_AUDIT))
		limit += PW_TRACES_PER_SECOND;
	instance = flow->row.instance;
	usage = bpf_map_lookup_elem(&pw_usage, &instance);
	if (!usage)
		return 0;
	if (take_event(usage, now_ns, limit))
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

/* Drops are told always; passes, and what a policy said about them, where someone watches. */
static __always_inline void tell(struct __sk_buff *skb, struct pw_flow *flow, __u8 reason)
{
	bool watched = flow->row.flags & PW_CONFIG_TRACE;

	if (reason)
		send_event(skb, flow, PW_EVENT_DROP, reason);
	else if (flow->audited || (watched && flow->judged_anew))
		send_event(skb, flow, PW_EVENT_POLICY, flow->audited ? PW_DROP_POLICY : 0);
	else if (watched)
		send_event(skb, flow, PW_EVENT_TRACE, 0);
}

#ifdef PW_TEST_BUILD
PW_CHECKED_ALONE int record_decision(const struct pw_flow *flow, __u32 reason)
{
	struct pw_decision decision;
	__u32 zero = 0;

	if (!flow)
		return 0;
	decision = (struct pw_decision){
		.action = flow->action,
		.reason = reason,
		.path = flow->path,
		.target_ifindex = flow->local ? flow->target.ifindex : 0,
		.instance = flow->instance,
		.direction = flow->direction,
		.source_identity = flow->source_identity,
		.destination_identity = flow->destination_identity,
		.rule = flow->rule,
		.audited = flow->audited,
	};
	return bpf_map_update_elem(&pw_decision, &zero, &decision, BPF_ANY);
}
#else
static __always_inline int record_decision(const struct pw_flow *flow, __u8 reason)
{
	(void)flow;
	(void)reason;
	return 0;
}
#endif

#endif
