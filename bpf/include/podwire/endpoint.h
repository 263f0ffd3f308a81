/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* endpoint.h: rows of pw_config and pw_endpoints, copied so that nobody can change them under a packet. */
#ifndef PODWIRE_ENDPOINT_H
#define PODWIRE_ENDPOINT_H

#include <podwire/flow.h>

/* Copies the row of a host device under its lock (rule 20): an update in place is seen whole or not at all. */
static __always_inline int copy_row(__u32 ifindex, struct pw_config_value *row)
{
	struct pw_config_value *live = bpf_map_lookup_elem(&pw_config, &ifindex);

	if (!live)
		return PW_DROP_NO_ENDPOINT;
	bpf_spin_lock(&live->lock);
	row->ifindex = live->ifindex;
	__builtin_memcpy(&row->instance, &live->instance,
			 sizeof(*row) - offsetof(struct pw_config_value, instance));
	bpf_spin_unlock(&live->lock);
	/* a row that was deleted and given to another device since the lookup */
	if (row->ifindex != ifindex)
		return PW_DROP_NO_ENDPOINT;
	return row->flags & PW_CONFIG_OPEN ? 0 : PW_DROP_NO_ENDPOINT;
}

/* Linux 6.1 takes keys from the stack and from maps only, not from what a function that is checked alone was handed. */
static __always_inline struct pw_endpoint_value *find_endpoint(const void *address)
{
	struct pw_endpoint_key key;

	copy_address(key.addr, address);
	return bpf_map_lookup_elem(&pw_endpoints, &key);
}

/* Copies the row of the local endpoint that has the destination's address. 0 with flow->local unset = nobody here. */
static __always_inline int copy_target(struct pw_flow *flow)
{
	struct pw_endpoint_value *endpoint = find_endpoint(flow->key.daddr);
	int reason;

	if (!endpoint)
		return 0;
	reason = copy_row(endpoint->ifindex, &flow->target);
	if (reason)
		return reason;
	if (!has_address(&flow->target, flow->key.daddr))
		return PW_DROP_NO_ENDPOINT;
	flow->local = true;
	return 0;
}

#endif
