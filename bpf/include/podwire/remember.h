/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* remember.h: after an endpoint's verdict, write down that the packet passed: a new entry, or life for the old one. */
#ifndef PODWIRE_REMEMBER_H
#define PODWIRE_REMEMBER_H

#include <podwire/judge.h>

/* Only what can be answered is remembered. */
static __always_inline bool is_remembered(const struct pw_flow *flow)
{
	if (flow->key.protocol == IPPROTO_ICMP || flow->key.protocol == IPPROTO_ICMPV6)
		return flow->flags & PW_PACKET_ECHO_REQUEST;
	return !(flow->tcp_flags & PW_TCP_FLAG_RST);
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
	if (match->translated)
		entry->flags |= PW_CONNTRACK_TRANSLATED;
}

/* What lingers of the reversed tuple goes when a new connection takes its ports: no two entries fit one packet. */
static __always_inline void forget_reversed(struct pw_conntrack_key *key)
{
	void *shard;

	reverse_key(key);
	shard = find_shard(key);
	if (shard)
		remove_entry(shard, key);
	reverse_key(key);
}

/* A flow that was picked up as an answer is remembered as what it answers. */
PW_CHECKED_ALONE int make_entry(struct pw_flow *flow, const struct pw_config_value *row,
				const struct pw_match *match)
{
	struct pw_conntrack_value entry;
	int reason;

	if (!flow || !row || !match)
		return PW_DROP_INTERNAL;
	if (!is_remembered(flow))
		return 0;
	fill_entry(flow, match, &entry);
	*judgement_of(&entry) =
		judgement(match->translated ? ~row->policy_revision : row->policy_revision,
			  match->peer_identity);
	if (opens_tcp(flow->tcp_flags))
		forget_reversed(&flow->key);
	if (match->reply)
		reverse_key(&flow->key);
	reason = insert_entry(&flow->key, &entry);
	if (match->reply)
		reverse_key(&flow->key);
	return reason;
}

/* The latest packet in the original direction decides which way the answers take (rule 2). Counters are plain: a lost
 * count costs less than a locked bus.
 */
static __always_inline void keep_alive(const struct pw_flow *flow, const struct pw_match *match,
				       struct pw_conntrack_value *entry)
{
	bool reply = match->reply;

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
	if (flow->key.protocol != IPPROTO_TCP)
		advance_datagrams(entry, flow->key.protocol, reply);
	else if (entry->tcp_state != PW_TCP_ESTABLISHED ||
		 flow->tcp_flags & (PW_TCP_FLAG_SYN | PW_TCP_FLAG_FIN | PW_TCP_FLAG_RST))
		advance_tcp(entry, flow->tcp_flags, reply);
}

/* flow->key must be that of the side which `row` and `match` stand for. */
static __always_inline int remember(struct pw_flow *flow, const struct pw_config_value *row,
				    struct pw_match *match, struct pw_conntrack_value *entry)
{
	if (match->related)
		return 0;
	if (!entry)
		return make_entry(flow, row, match);
	keep_alive(flow, match, entry);
	return 0;
}

#endif
