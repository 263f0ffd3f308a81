/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* conntrack.h: the memory of flows: find an entry, make one, keep it alive (rules 2, 4, 5).
 *
 * Entries are kept per endpoint: a flow between two local pods has one at each. The key is the tuple of the flow's
 * first packet with the endpoint's instance and the direction in which that packet crossed the endpoint's edge.
 * Whether an entry still allows anything is judged in judge.h.
 */
#ifndef PODWIRE_CONNTRACK_H
#define PODWIRE_CONNTRACK_H

#include <linux/errno.h>

#include <podwire/tcp_state.h>

static __always_inline __u64 stir(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 32;
}

/* Seeded, so that nobody can aim at one shard and fill it. The key stands at a multiple of 8. */
static __always_inline __u32 shard_of(const struct pw_conntrack_key *key, __u32 seed)
{
	const __u64 *words = (const __u64 *)key;
	__u64 hash = stir(seed, words[0]);

	hash = stir(hash, words[1]);
	hash = stir(hash, words[2]);
	hash = stir(hash, words[3]);
	hash = stir(hash, words[4]);
	hash = stir(hash, *(const __u32 *)(words + 5));
	return hash % PW_CONNTRACK_SHARDS;
}

static __always_inline void *find_shard(const struct pw_conntrack_key *key)
{
	__u32 zero = 0, shard;
	struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	if (!settings)
		return NULL;
	shard = shard_of(key, settings->hash_seed);
	return bpf_map_lookup_elem(&pw_conntrack, &shard);
}

/* Takes an entry out and gives its endpoint the room back. */
static __always_inline void remove_entry(void *shard, const struct pw_conntrack_key *key)
{
	__u32 instance = key->instance;
	struct pw_usage_value *usage;

	if (bpf_map_delete_elem(shard, key))
		return;
	usage = bpf_map_lookup_elem(&pw_usage, &instance);
	if (usage)
		__sync_fetch_and_add(&usage->connections[key->direction & 1], -1);
}

/* The collector marks what is over and deletes it a round later; what is marked is over for everyone. */
static __noinline struct pw_conntrack_value *find_entry(const struct pw_conntrack_key *key)
{
	struct pw_conntrack_value *entry;
	void *shard = find_shard(key);

	if (!shard)
		return NULL;
	entry = bpf_map_lookup_elem(shard, key);
	if (entry && entry->flags & PW_CONNTRACK_EXPIRED) {
		remove_entry(shard, key);
		return NULL;
	}
	return entry;
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

static __always_inline struct pw_conntrack_value *find_reversed(struct pw_conntrack_key *key)
{
	struct pw_conntrack_value *entry;

	reverse_key(key);
	entry = find_entry(key);
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
static __noinline struct pw_conntrack_value *find_either(struct pw_conntrack_key *key, bool *reply)
{
	bool answer = bpf_ntohs(key->sport_be) < bpf_ntohs(key->dport_be);
	struct pw_conntrack_value *entry = answer ? find_reversed(key) : find_entry(key);

	if (!entry) {
		answer = !answer;
		entry = answer ? find_reversed(key) : find_entry(key);
	}
	*reply = entry && answer;
	return entry;
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
		entry = find_reversed(&flow->key);
		reply = entry != NULL;
	} else if (opens_tcp(flow->tcp_flags) || flow->flags & PW_PACKET_ECHO_REQUEST) {
		entry = find_entry(&flow->key);
	} else if (!icmp) {
		entry = find_either(&flow->key, &reply);
	}
	describe_match(match, &flow->key, reply);
	return entry;
}

/* Inserts an entry if its endpoint has room for one more. `key` is the tuple of the flow's first packet. */
static __noinline int insert_entry(const struct pw_conntrack_key *key,
				   const struct pw_conntrack_value *entry)
{
	struct pw_settings *settings;
	struct pw_usage_value *usage;
	__u32 instance = key->instance, zero = 0;
	void *shard = find_shard(key);
	int failure; /* not long: before Linux 6.4 a map's functions set the lower half only */

	settings = bpf_map_lookup_elem(&pw_settings, &zero);
	usage = bpf_map_lookup_elem(&pw_usage, &instance);
	if (!settings || !usage || !shard)
		return PW_DROP_INTERNAL;
	if ((__s32)usage->connections[key->direction & 1] >= (__s32)settings->conntrack_quota)
		return PW_DROP_CONNTRACK_QUOTA;
	failure = bpf_map_update_elem(shard, key, entry, BPF_NOEXIST);
	if (failure == -EEXIST)
		return 0;
	if (failure)
		return failure == -E2BIG ? PW_DROP_CONNTRACK_FULL : PW_DROP_INTERNAL;
	__sync_fetch_and_add(&usage->connections[key->direction & 1], 1);
	return 0;
}

#endif
