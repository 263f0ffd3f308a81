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

/* Remembers what a first fragment tells of the whole packet. */
static __noinline int keep_ports(struct pw_flow *flow)
{
	struct pw_fragment_value value = {
		.sport_be = flow->key.sport_be,
		.dport_be = flow->key.dport_be,
		.protocol = flow->key.protocol,
		.icmp_type = flow->icmp_type,
	};
	struct pw_fragment_key key;

	fill_fragment_key(flow, &key);
	return bpf_map_update_elem(&pw_fragments, &key, &value, BPF_ANY) ? PW_DROP_INTERNAL : 0;
}

/* Completes a later fragment, or refuses it: without the first one nobody can judge it. */
static __noinline int recall_ports(struct pw_flow *flow)
{
	struct pw_fragment_value *value;
	struct pw_fragment_key key;

	fill_fragment_key(flow, &key);
	value = bpf_map_lookup_elem(&pw_fragments, &key);
	if (!value)
		return PW_DROP_FRAGMENT;
	flow->key.sport_be = value->sport_be;
	flow->key.dport_be = value->dport_be;
	flow->key.protocol = value->protocol;
	flow->icmp_type = value->icmp_type;
	if (value->protocol == IPPROTO_ICMP || value->protocol == IPPROTO_ICMPV6)
		flow->flags |= icmp_flags(value->protocol, value->icmp_type);
	return 0;
}

#endif
