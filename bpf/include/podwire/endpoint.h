/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* endpoint.h: rows of pw_config and pw_endpoints, copied so that nobody can change them under a packet (rule 20).
 *
 * Writers change live rows in place and under the lock. A packet of a flow that is known needs no lock: of what it reads,
 * addresses, MACs and instance never change while the endpoint lives, and flags, identity and policy revision each mean
 * something alone, as one word. Only a policy needs them as they belong together: who judges copies the row anew, under
 * its lock. The lock costs as much as all the rest of a row's reading, and each row's would be fought over by all CPUs.
 */
#ifndef PODWIRE_ENDPOINT_H
#define PODWIRE_ENDPOINT_H

#include <podwire/flow.h>

static __always_inline void copy_body(struct pw_config_value *row,
				      const struct pw_config_value *live)
{
	__builtin_memcpy(&row->instance, &live->instance,
			 sizeof(*row) - offsetof(struct pw_config_value, instance));
}

/* Copies the row of a host device. The index is read last: it tells when the row was deleted since the look-up, and its
 * memory given to another device.
 */
static __always_inline int copy_row(__u32 ifindex, struct pw_config_value *row)
{
	struct pw_config_value *live = bpf_map_lookup_elem(&pw_config, &ifindex);

	if (!live)
		return PW_DROP_NO_ENDPOINT;
	copy_body(row, live);
	barrier();
	row->ifindex = *(volatile __u32 *)&live->ifindex;
	return row->ifindex == ifindex && row->flags & PW_CONFIG_OPEN ? 0 : PW_DROP_NO_ENDPOINT;
}

/* Copies a row once more, as one whole: what a verdict is about, and the revision that it is remembered under. */
PW_CHECKED_ALONE int recopy_row(struct pw_config_value *row)
{
	struct pw_config_value *live;
	__u32 ifindex, instance;

	if (!row)
		return PW_DROP_NO_ENDPOINT;
	ifindex = row->ifindex;
	instance = row->instance;
	live = bpf_map_lookup_elem(&pw_config, &ifindex);
	if (!live)
		return PW_DROP_NO_ENDPOINT;
	bpf_spin_lock(&live->lock);
	row->ifindex = live->ifindex;
	copy_body(row, live);
	bpf_spin_unlock(&live->lock);
	if (row->ifindex != ifindex || row->instance != instance)
		return PW_DROP_NO_ENDPOINT;
	return row->flags & PW_CONFIG_OPEN ? 0 : PW_DROP_NO_ENDPOINT;
}

/* Copies the row of the local endpoint that has the destination's address; 0 with flow->local unset = nobody here. A flow
 * remembers its target's device; when that turns out to be gone, one packet is lost and the next one looks it up.
 */
static __always_inline int copy_target(struct pw_flow *flow)
{
	struct pw_conntrack_value *entry = flow->here.entry;
	struct pw_endpoint_value *endpoint;
	__u32 ifindex = 0;

	if (entry && entry->path == PW_PATH_LOCAL)
		ifindex = entry->node;
	if (!ifindex) {
		endpoint = bpf_map_lookup_elem(&pw_endpoints, flow->key.daddr);
		if (!endpoint)
			return 0;
		ifindex = endpoint->ifindex;
	}
	flow->local = true;
	if (!copy_row(ifindex, &flow->target) && has_address(&flow->target, flow->key.daddr))
		return 0;
	if (entry)
		entry->node = 0;
	return PW_DROP_NO_ENDPOINT;
}

#endif
