/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* fragments.h: only a first fragment carries ports; the later ones get them from here. */
#ifndef PODWIRE_FRAGMENTS_H
#define PODWIRE_FRAGMENTS_H

#include <linux/if_ether.h>

#include <podwire/icmp_tuple.h>

static __always_inline void fill_fragment_key(const struct pw_flow *flow,
					      struct pw_fragment_key *key)
{
	key->instance = flow->key.instance;
	key->id = flow->fragment_id;
	copy_address(key->saddr, flow->key.saddr);
	copy_address(key->daddr, flow->key.daddr);
	key->direction = flow->key.direction;
	key->protocol = flow->ethertype == ETH_P_IP ? flow->key.protocol : 0;
	key->pad = 0;
}

/* The endpoint's row, made when it first has something in pieces. */
static __always_inline struct pw_fragments_value *find_fragments(__u32 instance, bool make)
{
	struct pw_fragments_value *row = bpf_map_lookup_elem(&pw_fragments, &instance), *empty;
	__u32 zero = 0;

	if (row || !make)
		return row;
	empty = bpf_map_lookup_elem(&own_no_fragments, &zero);
	if (!empty)
		return NULL;
	bpf_map_update_elem(&pw_fragments, &instance, empty, BPF_NOEXIST);
	return bpf_map_lookup_elem(&pw_fragments, &instance);
}

static __always_inline __u32 fragment_set(const struct pw_fragment_key *key)
{
	const __u32 *source = (const __u32 *)key->saddr, *destination = (const __u32 *)key->daddr;
	__u32 hash = key->id ^ source[3] * 0x9e3779b1 ^ destination[3] * 0x85ebca6b;

	return (hash * 0x9e3779b1) >> 29;
}

/* Remembers what a first fragment tells of the whole packet. */
PW_CHECKED_ALONE int keep_ports(struct pw_flow *flow)
{
	struct pw_fragment fragment = {};
	struct pw_fragments_value *row;
	__u32 direction, set, way;

	if (!flow)
		return PW_DROP_INTERNAL;
	row = find_fragments(flow->key.instance, true);
	if (!row)
		return PW_DROP_INTERNAL;
	direction = flow->key.direction & 1;
	fill_fragment_key(flow, &fragment.key);
	fragment.value.sport_be = flow->key.sport_be;
	fragment.value.dport_be = flow->key.dport_be;
	fragment.value.protocol = flow->key.protocol;
	fragment.value.icmp_type = flow->icmp_type;
	set = fragment_set(&fragment.key);
	bpf_spin_lock(&row->lock);
	way = row->next++ % PW_FRAGMENT_WAYS;
	row->kept[direction][set][way] = fragment;
	bpf_spin_unlock(&row->lock);
	return 0;
}

static __always_inline bool same_fragmented(const struct pw_fragment_key *left,
					    const struct pw_fragment_key *right)
{
	return left->id == right->id && left->protocol == right->protocol &&
	       left->instance == right->instance && same_address(left->saddr, right->saddr) &&
	       same_address(left->daddr, right->daddr);
}

/* Completes a later fragment, or refuses it: without the first one nobody can judge it. */
PW_CHECKED_ALONE int recall_ports(struct pw_flow *flow)
{
	struct pw_fragment_value value = {};
	struct pw_fragments_value *row;
	struct pw_fragment_key key;
	bool found = false;
	__u32 direction, set;

	if (!flow)
		return PW_DROP_INTERNAL;
	row = find_fragments(flow->key.instance, false);
	if (!row)
		return PW_DROP_FRAGMENT;
	direction = flow->key.direction & 1;
	fill_fragment_key(flow, &key);
	set = fragment_set(&key);
	bpf_spin_lock(&row->lock);
	for (__u32 way = 0; way < PW_FRAGMENT_WAYS; way++) {
		struct pw_fragment *kept = &row->kept[direction][set][way];

		if (same_fragmented(&kept->key, &key)) {
			value = kept->value;
			found = true;
		}
	}
	bpf_spin_unlock(&row->lock);
	if (!found)
		return PW_DROP_FRAGMENT;
	flow->key.sport_be = value.sport_be;
	flow->key.dport_be = value.dport_be;
	flow->key.protocol = value.protocol;
	flow->icmp_type = value.icmp_type;
	if (value.protocol == IPPROTO_ICMP || value.protocol == IPPROTO_ICMPV6)
		flow->flags |= icmp_flags(value.protocol, value.icmp_type);
	return 0;
}

#endif
