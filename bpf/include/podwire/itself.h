/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* itself.h: a pod that a service has chosen as its own back end. Its packets go back to it at once, and no policy is
 * asked: a pod always reaches itself.
 */
#ifndef PODWIRE_ITSELF_H
#define PODWIRE_ITSELF_H

#include <podwire/deliver.h>
#include <podwire/service.h>

static __always_inline bool is_to_itself(const struct pw_flow *flow,
					 const struct pw_conntrack_value *here)
{
	if (flow->original.translated)
		return flow->original.itself;
	return here && here->kind == PW_CONNTRACK_OF_ITSELF;
}

/* What it asks, what it answers, or what it says of a packet that nobody takes. */
static __always_inline int turn_round(struct __sk_buff *skb, struct pw_flow *flow,
				      struct pw_conntrack_value *here)
{
	if (flow->original.translated)
		return remember_sender(flow, here) ?: write_itself(skb, flow, NULL);
	if (!here)
		return PW_DROP_INTERNAL;
	if (flow->here.related)
		return write_own_error(skb, flow, here);
	flow->here.reply = true;
	keep_alive(flow, &flow->here, here);
	return write_itself(skb, flow, here);
}

static __always_inline int readdress_to_itself(struct __sk_buff *skb, const struct pw_flow *flow)
{
	if (bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_dest), flow->row.pod_mac, ETH_ALEN,
				0) ||
	    bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_source), flow->row.host_mac,
				ETH_ALEN, 0))
		return PW_DROP_INTERNAL;
	return 0;
}

static __always_inline int loop_back(struct __sk_buff *skb, struct pw_flow *flow,
				     struct pw_conntrack_value *here)
{
	int reason;

	flow->instance = flow->row.instance;
	flow->direction = PW_EGRESS;
	flow->destination_identity = flow->row.identity;
	flow->path = PW_PATH_LOCAL;
	flow->said = here ? 0 : PW_SAID_NEW_FLOW;
	reason = turn_round(skb, flow, here) ?: readdress_to_itself(skb, flow);
	if (!reason)
		flow->action = PW_ACTION_ANSWER;
	return reason;
}

#endif
