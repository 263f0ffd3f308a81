/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* remember.h: after an endpoint's verdict, write down that the packet passed: a new entry, or life for the old one. */
#ifndef PODWIRE_REMEMBER_H
#define PODWIRE_REMEMBER_H

#include <podwire/judge.h>
#include <podwire/rate.h>

/* Only what can be answered is remembered, and under its opener's name: not what passes as the probable answer of a flow
 * that nobody remembers, nor a SYN-ACK without its SYN.
 */
static __always_inline bool is_remembered(const struct pw_flow *flow, const struct pw_match *match)
{
	switch (flow->key.protocol) {
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return flow->flags & PW_PACKET_ECHO_REQUEST;
	case IPPROTO_TCP:
		if (flow->tcp_flags & PW_TCP_FLAG_RST || match->reply)
			return false;
		return !(flow->tcp_flags & PW_TCP_FLAG_SYN) || opens_tcp(flow->tcp_flags);
	default:
		return !match->reply;
	}
}

static __always_inline void fill_entry(const struct pw_flow *flow, const struct pw_match *match,
				       struct pw_conntrack_value *entry)
{
	bool tcp = flow->key.protocol == IPPROTO_TCP;

	__builtin_memset(entry, 0, sizeof(*entry));
	entry->last_seen_ns = flow->now_ns;
	entry->rule = flow->rule;
	if (match->reply) {
		entry->packets[1] = 1;
		entry->bytes[1] = flow->packet_bytes;
	} else {
		entry->packets[0] = 1;
		entry->bytes[0] = flow->packet_bytes;
	}
	entry->path = flow->path;
	entry->node = flow->node;
	entry->tcp_state = tcp ? PW_TCP_OPENING : PW_TCP_NONE;
	entry->lifetime_s = tcp ? PW_LIFETIME_TCP_OPENING : PW_LIFETIME_DATAGRAM;
	entry->flags = match->picked_up ? PW_CONNTRACK_PICKED_UP : 0;
	entry->answer = opens_tcp(flow->tcp_flags) ? flow->tcp_sequence : 0;
	if (match->translated)
		entry->flags |= PW_CONNTRACK_TRANSLATED;
	entry->tag = tag_of(&flow->key);
}

static __always_inline bool is_open_connection(const struct pw_conntrack_value *entry)
{
	return !(entry->flags & PW_CONNTRACK_PICKED_UP) &&
	       (entry->tcp_state == PW_TCP_ESTABLISHED || entry->tcp_state == PW_TCP_HALF_CLOSED);
}

/* What lingers of the reversed tuple goes when a new connection takes its ports: no two entries fit one packet. false =
 * a connection is open there, and stays: anybody can forge the SYN that its other end would never send.
 */
static __always_inline bool retire_reversed(struct pw_conntrack_key *key, __u64 now_ns)
{
	struct pw_conntrack_value *entry = find_reversed(key, now_ns);

	if (!entry)
		return true;
	if (is_open_connection(entry))
		return false;
	retire(entry, key->instance, !key->direction);
	return true;
}

/* Without a row in pw_usage the endpoint is just going. What the stack has translated is found by nobody else when its
 * answer comes: it is where nothing is pushed out, if there is room. So is every flow while no agent runs, for an
 * earlier build that may come next knows no other place.
 */
PW_CHECKED_ALONE int make_entry(struct pw_flow *flow, const struct pw_config_value *row,
				const struct pw_match *match)
{
	struct pw_conntrack_key key __attribute__((aligned(8))); /* Linux 6.1 takes no other */
	struct pw_conntrack_value entry;
	struct pw_settings *settings;
	struct pw_usage_value *usage;
	__u32 zero = 0, instance, charge;

	if (!flow || !row || !match)
		return PW_DROP_INTERNAL;
	if (!is_remembered(flow, match) || flow->unremembered)
		return 0;
	instance = flow->key.instance;
	usage = bpf_map_lookup_elem(&pw_usage, &instance);
	settings = bpf_map_lookup_elem(&pw_settings, &zero);
	if (!usage || !settings)
		return PW_DROP_INTERNAL;
	key = flow->key;
	if (opens_tcp(flow->tcp_flags) && !retire_reversed(&key, flow->now_ns))
		return 0;
	if (!spend_token(usage, flow, match->peer_identity, settings->new_flow_rate)) {
		flow->unremembered = true;
		return 0;
	}
	fill_entry(flow, match, &entry);
	*judgement_of(&entry) =
		judgement(match->translated ? ~row->policy_revision : row->policy_revision,
			  match->peer_identity);
	charge = match->translated			    ? PW_CHARGE_CONNECTION
		 : settings->flags & PW_SETTINGS_UNATTENDED ? PW_CHARGE_BRIEF
							    : PW_CHARGE_NONE;
	if (!charge || insert_connection(&key, &entry, usage, charge))
		insert_new(&key, &entry);
	return 0;
}

/* Copies a flow that has become a connection to where nothing pushes it out. Where there is no room, or another row of
 * its key is still being collected, it stays where it is until its next packet.
 */
PW_CHECKED_ALONE int protect(const struct pw_flow *flow, const struct pw_match *match,
			     struct pw_conntrack_value *entry)
{
	struct pw_conntrack_value copy;
	struct pw_conntrack_key key __attribute__((aligned(8)));
	struct pw_usage_value *usage;
	__u32 instance;

	if (!flow || !match || !entry)
		return 0;
	instance = flow->key.instance;
	usage = bpf_map_lookup_elem(&pw_usage, &instance);
	if (!usage)
		return 0;
	key = flow->key;
	if (match->reply)
		reverse_key(&key);
	copy = *entry;
	if (!insert_connection(&key, &copy, usage, PW_CHARGE_CONNECTION)) {
		entry->flags |= PW_CONNTRACK_LEFT;
	} else if (!(entry->flags & PW_CONNTRACK_UNPROTECTED)) {
		entry->flags |= PW_CONNTRACK_UNPROTECTED;
		usage->unprotected[key.direction & 1] += 1;
	}
	return 0;
}

/* A translated flow has become a connection. It has its room: only new flows are refused. */
static __always_inline void settle(struct pw_conntrack_value *entry, __u32 instance,
				   __u32 direction)
{
	recharge(entry, bpf_map_lookup_elem(&pw_usage, &instance), direction, PW_CHARGE_CONNECTION);
}

/* The flow's next state, and what follows from it. */
PW_CHECKED_ALONE int advance(const struct pw_flow *flow, const struct pw_match *match,
			     struct pw_conntrack_value *entry)
{
	const __u16 unprotected = PW_CONNTRACK_NEW | PW_CONNTRACK_CONNECTION;

	if (!flow || !match || !entry)
		return 0;
	if (flow->key.protocol == IPPROTO_TCP)
		advance_tcp(entry, flow, match->reply);
	else
		advance_datagrams(entry, flow, match->reply);
	if (entry->tcp_state == PW_TCP_CLOSED)
		discharge(entry, flow->key.instance, match->direction);
	else if (entry->charged == PW_CHARGE_BRIEF && entry->flags & PW_CONNTRACK_CONNECTION)
		settle(entry, flow->key.instance, match->direction);
	else if ((entry->flags & unprotected) == unprotected)
		protect(flow, match, entry);
	return 0;
}

/* The latest packet in the original direction decides which way the answers take (rule 2). Counters are plain: a lost
 * count costs less than a locked bus. What is closed has left its endpoint's budget, so no packet prolongs it.
 */
static __always_inline void keep_alive(const struct pw_flow *flow, const struct pw_match *match,
				       struct pw_conntrack_value *entry)
{
	bool reply = match->reply;

	if (entry->tcp_state != PW_TCP_CLOSED)
		entry->last_seen_ns = flow->now_ns;
	if (reply) {
		entry->packets[1] += 1;
		entry->bytes[1] += flow->packet_bytes;
	} else {
		entry->packets[0] += 1;
		entry->bytes[0] += flow->packet_bytes;
		if (entry->path != flow->path)
			entry->path = flow->path;
		if (entry->node != flow->node)
			entry->node = flow->node;
	}
	if ((entry->flags & (PW_CONNTRACK_NEW | PW_CONNTRACK_CONNECTION)) !=
		    PW_CONNTRACK_CONNECTION ||
	    flow->tcp_flags & (PW_TCP_FLAG_SYN | PW_TCP_FLAG_FIN | PW_TCP_FLAG_RST))
		advance(flow, match, entry);
}

/* A closed connection, and one that nobody saw begin, end where their ports are used for a new one. */
static __always_inline bool begins_anew(const struct pw_flow *flow,
					const struct pw_conntrack_value *entry)
{
	return opens_tcp(flow->tcp_flags) &&
	       (entry->tcp_state == PW_TCP_CLOSED || entry->flags & PW_CONNTRACK_PICKED_UP);
}

/* flow->key must be that of the side which `row` and `match` stand for. */
static __always_inline int remember(struct pw_flow *flow, const struct pw_config_value *row,
				    struct pw_match *match, struct pw_conntrack_value *entry)
{
	if (match->related)
		return 0;
	if (entry && begins_anew(flow, entry)) {
		retire(entry, flow->key.instance, match->direction);
		entry = NULL;
	}
	if (!entry)
		return make_entry(flow, row, match);
	keep_alive(flow, match, entry);
	return 0;
}

#endif
