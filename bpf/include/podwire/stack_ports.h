/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* stack_ports.h: by which ports pods have lately sent datagrams that the stack may have translated (rule 14).
 *
 * Such a datagram may leave this node under the tuple of what the pod sends natively to the same peer, and nothing in
 * an answer tells which of the two it answers. Only the stack can keep them apart, and only where it sees both: by such
 * a port datagrams take the stack, whoever they go to, and so do answers. There they can have one tuple with what was
 * translated; the stack then gives one of them another source port, which the pod may have used directly, too. So
 * answers of a peer that was asked in that way are the stack's, whatever their port is. A port that is taken for
 * another one by its hash loses no more than the short way. A mark that another one of the pod has displaced is one
 * that was not made.
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

static __always_inline struct pw_stack_port place_mark(const struct pw_flow *flow, __u64 hash)
{
	__u32 pod = flow->key.instance % PW_STACK_PODS;
	struct pw_stack_port place = {
		.cell = pod * PW_STACK_CELLS + hash % PW_STACK_CELLS,
		.tag = hash >> 32,
	};

	return place;
}

/* Of the pod whose instance is in flow->key. */
static __always_inline __u64 hash_port(const struct pw_flow *flow, __be16 port_be)
{
	return stir(stir(hash_seed(), flow->key.instance),
		    (__u32)flow->key.protocol << 16 | port_be);
}

/* Of its peer: one hash for each address and port that it has. */
static __always_inline __u64 hash_peer(const struct pw_flow *flow, const __u8 *address,
				       __be16 port_be)
{
	const __u64 *words = (const __u64 *)address;

	return stir(stir(hash_port(flow, port_be), words[0]), words[1]);
}

static __always_inline bool is_marked(const struct pw_flow *flow, __u64 hash)
{
	__u32 now = flow->now_ns >> PW_STACK_PORT_SHIFT;
	struct pw_stack_port place = place_mark(flow, hash);
	const volatile __u64 *mark = bpf_map_lookup_elem(&pw_stack_cells, &place.cell);
	__u64 found;

	if (!mark)
		return false;
	found = *mark;
	return found >> 32 == place.tag && now - (__u32)found <= PW_STACK_PORT_AGE;
}

/* Has this port of the pod asked something through the stack? */
static __always_inline bool is_stack_port(const struct pw_flow *flow, __be16 port_be)
{
	return is_datagram(flow) && is_marked(flow, hash_port(flow, port_be));
}

/* May an answer that comes natively be one to what the stack has given another source port? */
static __always_inline bool is_from_stack_peer(const struct pw_flow *flow)
{
	return is_datagram(flow) &&
	       is_marked(flow, hash_peer(flow, flow->key.saddr, flow->key.sport_be));
}

/* Remembers the port of a datagram that the pod sends to the stack, and, where it goes to a pod only for its port's
 * sake, the peer. What else goes to a pod is not translated there, and where nothing passes by the stack there is
 * nothing to tell apart.
 */
PW_CHECKED_ALONE int mark_stack_port(const struct pw_flow *flow)
{
	struct pw_stack_port place;
	volatile __u64 *mark;
	__u64 wanted;

	if (!flow || !is_datagram(flow) || !native_device())
		return 0;
	if (flow->node && !(flow->native && is_stack_port(flow, flow->key.sport_be)))
		return 0;
	place = place_mark(flow, flow->node ? hash_peer(flow, flow->key.daddr, flow->key.dport_be)
					    : hash_port(flow, flow->key.sport_be));
	wanted = (__u64)place.tag << 32 | (__u32)(flow->now_ns >> PW_STACK_PORT_SHIFT);
	mark = bpf_map_lookup_elem(&pw_stack_cells, &place.cell);
	if (mark && *mark != wanted)
		*mark = wanted;
	return 0;
}

#endif
