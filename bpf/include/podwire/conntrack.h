/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* conntrack.h: the memory of flows: find an entry, make one, let it go (rules 2, 4, 5).
 *
 * A new flow is kept in pw_new_flows, where flows push out each other. When both sides have shown that they want it, it
 * is a connection and moves to pw_conntrack, where nothing pushes it out. Without room there it stays where it is.
 * Entries are kept per endpoint: a flow between two local pods has one at each. The key is the tuple of the flow's
 * first packet with the endpoint's instance and the direction in which that packet crossed the endpoint's edge.
 * Whether an entry still allows anything is judged in judge.h.
 */
#ifndef PODWIRE_CONNTRACK_H
#define PODWIRE_CONNTRACK_H

#include <podwire/room.h>
#include <podwire/tcp_state.h>

/* What a row says of its own key. A row of pw_new_flows may have been given to another flow since it was found. */
static __always_inline __u32 tag_of(const struct pw_conntrack_key *key)
{
	return seeded_hash(key) >> 32;
}

/* A collector that is late or dead prolongs nothing. */
static __always_inline bool is_live(const struct pw_conntrack_value *entry, __u64 now_ns)
{
	__s64 age_ns = now_ns - entry->last_seen_ns;

	return !(entry->flags & (PW_CONNTRACK_EXPIRED | PW_CONNTRACK_LEFT)) &&
	       age_ns <= (__s64)(entry->lifetime_s * 1000000000ULL);
}

static __noinline struct pw_conntrack_value *find_connection(const struct pw_conntrack_key *key,
							     __u64 now_ns)
{
	void *shard = find_shard(key);
	struct pw_conntrack_value *entry;

	if (!shard)
		return NULL;
	entry = bpf_map_lookup_elem(shard, key);
	return entry && is_live(entry, now_ns) ? entry : NULL;
}

static __noinline struct pw_conntrack_value *find_new(const struct pw_conntrack_key *key,
						      __u64 now_ns)
{
	__u32 zero = 0;
	struct pw_conntrack_value *entry;
	void *rows = bpf_map_lookup_elem(&pw_new_flows, &zero);

	if (!rows)
		return NULL;
	entry = bpf_map_lookup_elem(rows, key);
	return entry && is_live(entry, now_ns) && entry->tag == tag_of(key) ? entry : NULL;
}

/* Connections first: a flow that has become one leaves a row behind. */
static __always_inline struct pw_conntrack_value *find_entry(const struct pw_conntrack_key *key,
							     __u64 now_ns)
{
	return find_connection(key, now_ns) ?: find_new(key, now_ns);
}

/* Turns a tuple round, in place: the stack is short. */
static __always_inline void reverse_key(struct pw_conntrack_key *key)
{
	__u64 *source = (__u64 *)key->saddr, *destination = (__u64 *)key->daddr;
	__u64 first = source[0], second = source[1];
	__be16 port_be = key->sport_be;

	source[0] = destination[0];
	source[1] = destination[1];
	destination[0] = first;
	destination[1] = second;
	key->sport_be = key->dport_be;
	key->dport_be = port_be;
	key->direction = !key->direction;
}

static __always_inline struct pw_conntrack_value *find_reversed(struct pw_conntrack_key *key,
								__u64 now_ns)
{
	struct pw_conntrack_value *entry;

	reverse_key(key);
	entry = find_entry(key, now_ns);
	reverse_key(key);
	return entry;
}

static __always_inline void describe_match(struct pw_match *match,
					   const struct pw_conntrack_key *key, bool reply)
{
	match->reply = reply;
	match->related = false;
	match->picked_up = false;
	match->translated = false;
	match->protocol = key->protocol;
	match->direction = reply ? !key->direction : key->direction;
	match->port_be = reply ? key->sport_be : key->dport_be;
}

/* An entry in one direction is made only where there is none in the other, so the order of the two lookups decides
 * nothing; the likelier comes first: servers have the lower port.
 */
static __always_inline struct pw_conntrack_value *
find_among(struct pw_conntrack_key *key, __u64 now_ns, bool connections, bool *reply)
{
	bool answer = bpf_ntohs(key->sport_be) < bpf_ntohs(key->dport_be);
	struct pw_conntrack_value *entry;

	if (answer)
		reverse_key(key);
	entry = connections ? find_connection(key, now_ns) : find_new(key, now_ns);
	if (!entry) {
		answer = !answer;
		reverse_key(key);
		entry = connections ? find_connection(key, now_ns) : find_new(key, now_ns);
	}
	if (answer)
		reverse_key(key);
	*reply = entry && answer;
	return entry;
}

static __noinline struct pw_conntrack_value *find_either(struct pw_conntrack_key *key, __u64 now_ns,
							 bool *reply)
{
	return find_among(key, now_ns, true, reply) ?: find_among(key, now_ns, false, reply);
}

/* What opens a flow is never a reply, though an entry of the reversed tuple may linger: else a server could open
 * connections to its former client's ports. An ICMP packet that neither asks nor answers an echo belongs to no flow.
 */
static __always_inline struct pw_conntrack_value *find_flow(struct pw_flow *flow,
							    struct pw_match *match)
{
	bool icmp = flow->key.protocol == IPPROTO_ICMP || flow->key.protocol == IPPROTO_ICMPV6;
	struct pw_conntrack_value *entry = NULL;
	bool reply = false;

	if (flow->flags & PW_PACKET_ECHO_REPLY) {
		entry = find_reversed(&flow->key, flow->now_ns);
		reply = entry != NULL;
	} else if (opens_tcp(flow->tcp_flags) || flow->flags & PW_PACKET_ECHO_REQUEST) {
		entry = find_entry(&flow->key, flow->now_ns);
	} else if (!icmp) {
		entry = find_either(&flow->key, flow->now_ns, &reply);
	}
	describe_match(match, &flow->key, reply);
	return entry;
}

/* Counts a connection that is one no longer. A translated flow's rows take room until they are deleted, and count as
 * brief until then: a pod that opens and closes many fills its own part of the table and no more. So does the row of a
 * flow that never became a connection.
 */
static __always_inline void discharge(struct pw_conntrack_value *entry, __u32 instance,
				      __u32 direction)
{
	__u32 charge = entry->kind == PW_CONNTRACK_PLAIN ? PW_CHARGE_NONE : PW_CHARGE_BRIEF;

	if (entry->charged == PW_CHARGE_CONNECTION)
		recharge(entry, bpf_map_lookup_elem(&pw_usage, &instance), direction, charge);
}

/* An entry is never deleted here: its memory would be given to another flow while a program on another CPU holds it. */
static __always_inline void retire(struct pw_conntrack_value *entry, __u32 instance,
				   __u32 direction)
{
	entry->flags |= PW_CONNTRACK_LEFT;
	discharge(entry, instance, direction);
}

/* Inserts a flow that is no connection yet. What cannot be inserted passes all the same. A row of the same key that is
 * over is written over in place.
 */
static __always_inline void insert_new(const struct pw_conntrack_key *key,
				       struct pw_conntrack_value *entry)
{
	struct pw_conntrack_value *old;
	__u32 zero = 0;
	void *rows = bpf_map_lookup_elem(&pw_new_flows, &zero);
	int failure;

	if (!rows)
		return;
	entry->flags |= PW_CONNTRACK_NEW;
	entry->charged = PW_CHARGE_NONE;
	failure = bpf_map_update_elem(rows, key, entry, BPF_NOEXIST);
	if (failure != -EEXIST)
		return;
	old = bpf_map_lookup_elem(rows, key);
	if (old && !is_live(old, entry->last_seen_ns))
		*old = *entry;
}

#endif
