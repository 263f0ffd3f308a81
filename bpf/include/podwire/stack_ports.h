/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* stack_ports.h: by which ports pods have lately sent datagrams that the stack may have translated (rule 14).
 *
 * Such a datagram may leave this node under the tuple of what the pod sends natively to the same peer, and nothing in an
 * answer tells which of the two it answers. Only the stack can keep them apart, and only where it sees both: by such a
 * port datagrams take the stack, whoever they go to, and so do answers. A port that is taken for another one by its hash
 * loses no more than the short way. A mark that another port's has displaced is one that was not made.
 */
#ifndef PODWIRE_STACK_PORTS_H
#define PODWIRE_STACK_PORTS_H

#include <linux/in.h>

#include <podwire/identity.h>
#include <podwire/shards.h>

#define PW_STACK_PORT_SHIFT 30 /* from ns to what is nearly s */
#define PW_STACK_PORT_AGE                                                                          \
	120 /* of those: as long as nf_conntrack remembers a stream of datagrams */

struct pw_stack_port {
	__u32 cell;
	__u32 tag;
};

/* TCP has numbers that tell (from_netdev), an echo has no ports. */
static __always_inline bool is_datagram(const struct pw_flow *flow)
{
	return flow->key.protocol == IPPROTO_UDP || flow->key.protocol == IPPROTO_UDPLITE ||
	       flow->key.protocol == IPPROTO_SCTP;
}

static __always_inline struct pw_stack_port place_port(const struct pw_flow *flow, __be16 port_be)
{
	__u64 hash = stir(stir(hash_seed(), flow->key.instance),
			  (__u32)flow->key.protocol << 16 | port_be);
	struct pw_stack_port place = {.cell = hash % PW_STACK_PORTS, .tag = hash >> 32};

	return place;
}

/* Has this port of the pod whose instance is in flow->key asked something through the stack? */
static __always_inline bool is_stack_port(const struct pw_flow *flow, __be16 port_be)
{
	__u32 now = flow->now_ns >> PW_STACK_PORT_SHIFT;
	struct pw_stack_port place;
	const volatile __u64 *mark;
	__u64 found;

	if (!is_datagram(flow))
		return false;
	place = place_port(flow, port_be);
	mark = bpf_map_lookup_elem(&pw_stack_ports, &place.cell);
	if (!mark)
		return false;
	found = *mark;
	return found >> 32 == place.tag && now - (__u32)found <= PW_STACK_PORT_AGE;
}

/* Remembers the port of a datagram that the pod sends to the stack. What goes to a pod is not translated there, and
 * where nothing passes by the stack there is nothing to tell apart.
 */
PW_CHECKED_ALONE int mark_stack_port(const struct pw_flow *flow)
{
	struct pw_stack_port place;
	volatile __u64 *mark;
	__u64 wanted;

	if (!flow || !is_datagram(flow) || !native_device())
		return 0;
	place = place_port(flow, flow->key.sport_be);
	wanted = (__u64)place.tag << 32 | (__u32)(flow->now_ns >> PW_STACK_PORT_SHIFT);
	mark = bpf_map_lookup_elem(&pw_stack_ports, &place.cell);
	if (mark && *mark != wanted)
		*mark = wanted;
	return 0;
}

#endif
