/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* affinity.h: a service that keeps a pod at the back end that it had last, for some time after its last flow. Every pod
 * has places of its own, so nobody's use of affinity costs another one's (rule 26).
 */
#ifndef PODWIRE_AFFINITY_H
#define PODWIRE_AFFINITY_H

#include <podwire/flow.h>

/* The number of the slot that leads to the back end of last time, if it is in the list still; 0 = any. */
PW_CHECKED_ALONE int recall_affinity(const struct pw_flow *flow,
				     const struct pw_service_value *service)
{
	const struct pw_affinity_value *found;
	struct pw_affinity_value value;
	struct pw_affinity_key key;

	if (!flow || !service)
		return 0;
	key.instance = flow->key.instance;
	key.place = service->affinity_place % PW_AFFINITY_PLACES;
	found = bpf_map_lookup_elem(&pw_affinity, &key);
	if (!found)
		return 0;
	value = *found;
	if (value.service != service->service ||
	    bpf_ktime_get_boot_ns() - value.last_ns > service->affinity_s * 1000000000ULL)
		return 0;
	return PW_SLOT_OF_MEMBER | value.back_end;
}

/* Rows are exchanged whole: one that was deleted may be another pod's, and is not written to. */
PW_CHECKED_ALONE int keep_affinity(const struct pw_flow *flow,
				   const struct pw_service_value *service)
{
	struct pw_affinity_value value;
	struct pw_affinity_key key;

	if (!flow || !service)
		return 0;
	key.instance = flow->key.instance;
	key.place = service->affinity_place % PW_AFFINITY_PLACES;
	value.last_ns = bpf_ktime_get_boot_ns();
	value.service = service->service;
	value.back_end = flow->original.back_end;
	bpf_map_update_elem(&pw_affinity, &key, &value, BPF_ANY);
	return 0;
}

#endif
