/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* fragments.h: only a first fragment carries ports; the later ones get them from here. */
#ifndef PODWIRE_FRAGMENTS_H
#define PODWIRE_FRAGMENTS_H

#include <linux/if_ether.h>

#include <podwire/conntrack.h>
#include <podwire/icmp_tuple.h>

/* What names the datagram that a fragment is of. */
static __always_inline void name_datagram(const struct pw_flow *flow, struct pw_fragment *fragment)
{
	copy_address(fragment->saddr, flow->key.saddr);
	copy_address(fragment->daddr, flow->key.daddr);
	fragment->instance = flow->key.instance;
	fragment->id = flow->fragment_id;
	fragment->wire_protocol = flow->ethertype == ETH_P_IP ? flow->key.protocol : 0;
}

static __always_inline bool is_same_datagram(const struct pw_fragment *left,
					     const struct pw_fragment *right)
{
	return left->id == right->id && left->instance == right->instance &&
	       left->wire_protocol == right->wire_protocol &&
	       same_address(left->saddr, right->saddr) && same_address(left->daddr, right->daddr);
}

/* Seeded, so that nobody can aim at the set of somebody else. */
static __always_inline struct pw_fragment_set *find_set(const struct pw_flow *flow,
							const struct pw_fragment *fragment)
{
	const struct pw_settings *settings;
	__u32 zero = 0, set;
	__u64 words[5], hash; /* up to the identification */

	settings = bpf_map_lookup_elem(&pw_settings, &zero);
	if (!settings)
		return NULL;
	__builtin_memcpy(words, fragment, sizeof(words));
	hash = stir(settings->hash_seed, words[0]);
	hash = stir(hash, words[1]);
	hash = stir(hash, words[2]);
	hash = stir(hash, words[3]);
	hash = stir(hash, words[4]);
	hash = stir(hash, 0); /* what differs last stands in the highest byte */
	set = flow->hook * PW_FRAGMENT_SETS + hash % PW_FRAGMENT_SETS;
	return bpf_map_lookup_elem(&pw_fragments, &set);
}

/* The way that a first fragment takes: the datagram's own, the oldest one of a source that has its share, or the oldest.
 */
static __always_inline __u32 choose_way(const struct pw_fragment_set *set,
					const struct pw_fragment *fragment)
{
	__u32 way, share = 0;

	for (way = 0; way < PW_FRAGMENT_WAYS - 1; way++) {
		const struct pw_fragment *kept = &set->ways[way];

		if (is_same_datagram(kept, fragment))
			break;
		if (!same_address(kept->saddr, fragment->saddr))
			continue;
		share += 1;
		if (share == PW_FRAGMENT_SHARE)
			break;
	}
	return way;
}

/* Remembers what a first fragment tells of the whole packet. */
PW_CHECKED_ALONE int keep_ports(struct pw_flow *flow)
{
	struct pw_fragment fragment __attribute__((aligned(8))) = {};
	struct pw_fragment_set *set;
	__u32 way;

	if (!flow)
		return PW_DROP_INTERNAL;
	name_datagram(flow, &fragment);
	fragment.protocol = flow->key.protocol;
	fragment.icmp_type = flow->icmp_type;
	fragment.sport_be = flow->key.sport_be;
	fragment.dport_be = flow->key.dport_be;
	set = find_set(flow, &fragment);
	if (!set)
		return PW_DROP_INTERNAL;
	bpf_spin_lock(&set->lock);
	way = choose_way(set, &fragment);
	for (__u32 i = PW_FRAGMENT_WAYS - 1; i > 0; i--)
		if (i <= way)
			set->ways[i] = set->ways[i - 1];
	set->ways[0] = fragment;
	bpf_spin_unlock(&set->lock);
	return 0;
}

/* Only what comes from where its source address may come from is worth remembering: after that was looked at. */
static __always_inline int keep_fragment(struct pw_flow *flow)
{
	__u16 pieces = flow->flags & (PW_PACKET_FRAGMENT | PW_PACKET_LATER_FRAGMENT);

	return pieces == PW_PACKET_FRAGMENT ? keep_ports(flow) : 0;
}

/* Completes a later fragment, or refuses it: without the first one nobody can judge it. */
PW_CHECKED_ALONE int recall_ports(struct pw_flow *flow)
{
	struct pw_fragment fragment __attribute__((aligned(8))) = {};
	struct pw_fragment_set *set;
	bool found = false;

	if (!flow)
		return PW_DROP_INTERNAL;
	name_datagram(flow, &fragment);
	set = find_set(flow, &fragment);
	if (!set)
		return PW_DROP_INTERNAL;
	bpf_spin_lock(&set->lock);
	for (__u32 way = 0; way < PW_FRAGMENT_WAYS && !found; way++) {
		const struct pw_fragment *kept = &set->ways[way];

		found = is_same_datagram(kept, &fragment);
		if (found)
			fragment = *kept;
	}
	bpf_spin_unlock(&set->lock);
	if (!found)
		return PW_DROP_FRAGMENT;
	flow->key.sport_be = fragment.sport_be;
	flow->key.dport_be = fragment.dport_be;
	flow->key.protocol = fragment.protocol;
	flow->icmp_type = fragment.icmp_type;
	if (fragment.protocol == IPPROTO_ICMP || fragment.protocol == IPPROTO_ICMPV6)
		flow->flags |= icmp_flags(fragment.protocol, fragment.icmp_type);
	return 0;
}

#endif
