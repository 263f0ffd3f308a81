/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* room.h: whether an endpoint has room for one more flow in pw_conntrack, and the row that takes it. For the programs
 * that see packets and for the one that hands flows over.
 */
#ifndef PODWIRE_ROOM_H
#define PODWIRE_ROOM_H

#include <stdbool.h>

#include <linux/errno.h>

#include <podwire/charge.h>
#include <podwire/shards.h>

#define PW_PLAIN_PART                                                                              \
	8 /* of the brief room: below what the collector needs to press anything out */

/* Brief flows that no service translates leave most of the brief room to those that one does: only these are refused
 * where it ends, and others may open the former.
 */
static __always_inline bool has_room_for(const struct pw_usage_value *usage, __u32 direction,
					 __u32 charge, __u32 quota)
{
	if ((__s32)usage->connections[direction & 1] >= (__s32)quota)
		return false;
	return charge != PW_CHARGE_BRIEF ||
	       (__s32)usage->brief_flows < (__s32)(quota / PW_BRIEF_PART / PW_PLAIN_PART);
}

/* Inserts a flow where nothing pushes it out, if its endpoint has room for it; 0 = it is there. */
static __always_inline int insert_connection(const struct pw_conntrack_key *key,
					     struct pw_conntrack_value *entry,
					     struct pw_usage_value *usage, __u32 charge)
{
	__u32 zero = 0, direction = key->direction & 1, number = shard_number(key);
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);
	void *shard = bpf_map_lookup_elem(&pw_conntrack, &number);
	int failure; /* not long: before Linux 6.4 a map's functions set the lower half only */

	if (!settings || !shard ||
	    !has_room_for(usage, direction, charge,
			  shrink_quota(settings->conntrack_quota, number)))
		return -E2BIG;
	entry->flags &= ~(PW_CONNTRACK_NEW | PW_CONNTRACK_UNPROTECTED);
	entry->charged = charge;
	failure = bpf_map_update_elem(shard, key, entry, BPF_NOEXIST);
	if (!failure) {
		count_rows(number, 1);
		count_charge(usage, direction, charge, 1);
	}
	return failure;
}

#endif
