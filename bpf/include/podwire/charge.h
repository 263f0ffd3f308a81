/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* charge.h: what a row of pw_conntrack takes of its endpoint's budgets, and how it is given back, once. For the programs
 * that see packets and for the collector.
 */
#ifndef PODWIRE_CHARGE_H
#define PODWIRE_CHARGE_H

#include <podwire/maps.h>

static __always_inline void count_charge(struct pw_usage_value *usage, __u32 direction,
					 __u32 charge, __s32 by)
{
	if (charge == PW_CHARGE_CONNECTION)
		__sync_fetch_and_add(&usage->connections[direction & 1], by);
	else if (charge == PW_CHARGE_BRIEF)
		__sync_fetch_and_add(&usage->brief_flows, by);
}

/* Whoever exchanges the row's charge counts it: two programs at once never count one twice. */
static __always_inline void recharge(struct pw_conntrack_value *entry, struct pw_usage_value *usage,
				     __u32 direction, __u32 charge)
{
	__u32 old;

	if (entry->charged == charge)
		return;
	old = __sync_lock_test_and_set(&entry->charged, charge);
	if (!usage)
		return;
	count_charge(usage, direction, old, -1);
	count_charge(usage, direction, charge, 1);
}

#endif
